"""The result of a run: an estimate on its way, and the representation it ends with. Both hold public values only."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, fields, replace

import numpy as np

from privrep.local.prior import QUANTILES, HeadPrior, LabelPrior, PriorMean
from privrep.local.transform import FeatureTransform
from privrep.privacy.run import Run
from privrep.typing import Array, Vector

FREE = 1e300  # a ratio or a variance of levels that stands for infinity: JSON has no other


@dataclass(frozen=True)
class Estimate:
    """The representation so far and, in its own coordinates, how far the noise of the releases may have left it."""

    basis: Array  # (d, k), orthonormal, in the coordinates of a transform
    error: Array  # (k, k): second moment of the columns' estimated errors
    spread: Array | None = None  # (k,): how far users' heads reach in each column, the farthest 1; None: not known
    shrink: float = 1.0  # by how much the last step shrank the error, and so, at most, the gradients
    converged: bool = False  # neither the last step nor the error before it stood out from the step's noise

    @property
    def total_error(self) -> float:
        """Return the estimated sum of squared sines between basis and truth."""
        return float(np.trace(self.error))

    @property
    def found(self) -> int:
        """Return how many of the first columns stand out from the noise."""
        return int(np.argmin(np.append(np.diag(self.error) < 1, False)))

    def may_hide(self, rank: int | None) -> bool:
        """Return whether strong directions may hide weak ones: the first is known well, and others may be missing."""
        return bool(self.error[0, 0] < 0.1) and (rank is None or self.found < rank)

    def first(self, k: int) -> Estimate:
        """Return the estimate of the first k columns."""
        return Estimate(self.basis[:, :k], self.error[:k, :k])


@dataclass(frozen=True)
class Ratings:
    """Parts of a representation of items beside their factors, in units of a user's own spread of ratings.

    A model without `level` is of an earlier version: its users' levels are their own means.
    """

    offset: Vector  # (d,): how far an item is rated above a user's level
    residual: float  # variance of what offset and factors leave
    level: float | None = None  # of a typical user; this and the next two are in units of ratings
    spread: float = 0.0  # standard deviation of a typical user's ratings; 0: not known
    level_variance: float = FREE  # of users' levels around `level`; FREE: not known

    @property
    def has_prior(self) -> bool:
        """Return whether heads are posterior means, so that users without ratings have one, too."""
        return self.level is not None


@dataclass(frozen=True)
class Gains:
    """Leave-one-out losses of users over the losses of their own means: logarithms of squared errors, a row.

    -0.1 says that a typical user's squared error is 10% smaller than by its mean. Released, with noise.
    """

    alone: float  # the best that users can do alone, by one rule for all
    prior_mean: float  # the prior mean, which users without rows have
    heads: float  # users' heads
    sigma: float  # standard deviation of the noise in each

    @property
    def over_alone(self) -> float:
        """Return by how much heads beat what users could do alone: a logarithm, negative where they do not."""
        return min(self.alone, 0.0) - self.heads

    @property
    def clear(self) -> bool:
        """Return whether heads beat what users could do alone by clearly more than the noise."""
        return self.over_alone >= 2 * self.sigma


@dataclass(frozen=True)
class Representation:
    """Result of a run; every field is on the billboard.

    Predictions use <x, matrix v>. `basis` has orthonormal columns in the coordinates of `transform`. The columns of
    `matrix` are as long as users' heads reach in them. So a head's coordinates are of one size, and one ridge treats
    all of them alike. In a representation of ratings the first column of `matrix` is the items' offset.
    """

    basis: Array  # (d, k)
    transform: FeatureTransform
    error: float  # estimated sum of squared sines between basis and truth; k where nothing was learned
    spread: Array = field(default_factory=lambda: np.ones(1))  # (k,) or (1,)
    ratings: Ratings | None = None
    preference: float | None = None  # users who preferred the shared head, to one who preferred its own; None: no vote
    precision: float | None = None  # of the prior of classifiers' heads; None: each user's own choice
    centre: Array | None = None  # of that prior, (outputs, k + 1): on the columns of `matrix`, then the intercept
    prior: HeadPrior | LabelPrior | None = None  # of heads; None: each user's own choice
    gains: Gains | None = None  # what the prior is worth, by users' leave-one-out losses

    @property
    def serves_newcomers(self) -> bool:
        """Return whether users without rows have a prediction: heads have a prior."""
        return self.prior is not None or (self.ratings is not None and self.ratings.has_prior)

    @property
    def head_matrix(self) -> Array:
        """Return the matrix whose columns heads weigh, (d, p)."""
        return self.matrix if self.prior is None else self.prior.factor

    @property
    def scale(self) -> Array:
        """Return the public scale of each feature, (d,)."""
        return self.transform.scale

    @property
    def matrix(self) -> Array:
        """Return the matrix of predictions in features as they come, (d, k), or (d, 1 + k) of ratings."""
        columns = self.transform.to_original(self.basis * self.spread)
        return columns if self.ratings is None else np.column_stack([self.ratings.offset, columns])

    @property
    def mean_error(self) -> float:
        """Return the estimated mean squared sine between truth and basis: 1 is nothing learned.

        It is computed from the noise of the releases.
        """
        k = self.basis.shape[1]
        return self.error / k if k else 1.0

    @property
    def mostly_noise(self) -> bool:
        """Return whether next to nothing was learned, by the releases; users then fall back on what they have alone.

        Factors of items are shrunk by their noise, so that more of it does no harm.
        """
        return self.mean_error > (0.3 if self.ratings is None else 0.5)

    @property
    def learned_nothing(self) -> bool:
        """Return whether users are no better off than alone, as far as the releases tell."""
        return self.mostly_noise if self.gains is None else not self.gains.clear

    @property
    def trust(self) -> float:
        """Return how far the noise of the releases lets one believe the representation, from 1 down towards 0."""
        return 1 / (1 + 30 * self.mean_error)

    def credit(self, rows: int) -> float:
        """Return the factor that divides the shared head's leave-one-out error before the comparison.

        A user of `rows` rows compares it with other candidates. With few rows the best of several is often good by
        luck, and what others found is a better judge. Let p users have preferred the shared head where one preferred
        its own regression. Then p^3 stands for the odds beforehand, against a likelihood ratio of (error / error)^(rows
        / 2).

        Without clear votes for the shared head, or without votes, its noise counts against it: at a mean squared sine
        of 3% it must halve the error of the others.
        """
        for_it = 1.0 if self.preference is None else self.preference ** (6 / rows)
        return for_it if self.preference is not None and self.preference > 2 else min(for_it, 1.0) * self.trust


def publish(
    run: Run,
    state: Estimate,
    transform: FeatureTransform,
    ratings: Ratings | None = None,
    preference: float | None = None,
    precision: float | None = None,
    centre: Array | None = None,
    prior: HeadPrior | LabelPrior | None = None,
    gains: Gains | None = None,
) -> Representation:
    """Post the representation, the last page of a run, and return it.

    Args:
        run: its billboard gets the page.
        state: the estimate at the end.
        transform: the coordinates of the estimate.
        ratings: of items, beside their factors.
        preference: users who preferred the shared head, to one who preferred its own.
        precision: of the prior of classifiers' heads.
        centre: of that prior, (outputs, k + 1).
        prior: of heads.
        gains: what the prior is worth.
    """
    spread = np.ones(1) if state.spread is None else state.spread
    optional = {"whitening": transform.whitening, "target_scale": transform.target_scale, "centre": centre}
    facts: dict[str, float | bool] = {"error": state.total_error}
    if ratings is not None:
        optional["offset"] = ratings.offset
        facts["residual"] = ratings.residual
        if ratings.level is not None:
            facts |= {f"ratings_{name}": float(getattr(ratings, name)) for name in _RATING_FACTS}
    if preference is not None:
        facts["preference"] = preference
    if precision is not None:
        facts["precision"] = precision
    arrays = {"basis": state.basis, "scale": transform.scale, "spread": spread}
    if prior is not None:
        arrays |= {f"prior_{name}": getattr(prior.mean, name) for name in _MEAN_ARRAYS}
        facts |= {"prior_intercept": prior.mean.intercept}
        if isinstance(prior, LabelPrior):
            arrays["prior_factor"] = prior.factor
            facts |= {f"prior_{name}": getattr(prior, name) for name in (*_LABEL_FACTS, "logits")}
        else:
            arrays |= {f"prior_{name}": getattr(prior, name) for name in _PRIOR_ARRAYS}
            facts["prior_level_ratio"] = min(prior.level_ratio, FREE)
        facts["prior_own_origin"] = prior.own_origin
        facts |= {} if prior.decided else {"prior_decided": False}
    if gains is not None:
        facts |= {f"loss_{name}": value for name, value in asdict(gains).items()}
    run.derive("representation", arrays | {name: a for name, a in optional.items() if a is not None}, **facts)
    found = Representation(state.basis, transform, state.total_error, spread, ratings, preference, precision, centre)
    return replace(found, prior=prior, gains=gains)


_MEAN_ARRAYS = ("level", "slopes", "centre", "located", "axes", "spread", "context")
_PRIOR_ARRAYS = ("factor", "noise", "known", "new", "new_ratio")
_LABEL_FACTS = ("level", "known", "new")


def read_representation(arrays: Mapping[str, Array], facts: Mapping[str, float]) -> Representation:
    """Return the representation that `publish` posted, from the arrays (of shapes as in `Representation`) and facts."""
    transform = FeatureTransform(arrays["scale"], arrays.get("whitening"), arrays.get("target_scale"))
    ratings = _read_ratings(arrays, facts) if "offset" in arrays else None
    votes = facts.get("preference"), facts.get("precision"), arrays.get("centre")
    prior = _read_prior(arrays, facts) if "prior_factor" in arrays else None
    gains = Gains(**{name: facts[f"loss_{name}"] for name in _GAINS}) if "loss_heads" in facts else None
    found = Representation(
        arrays["basis"], transform, facts["error"], arrays["spread"], ratings, *votes, prior=prior, gains=gains
    )
    _check(found)
    return found


def _check(found: Representation) -> None:
    """Raise ValueError unless all arrays are finite and fit each other, and all numbers are numbers."""
    (d, k), transform = found.basis.shape, found.transform
    shapes: list[tuple[Array | None, tuple[int, ...]]] = [
        (found.basis, (d, k)),
        (transform.scale, (d,)),
        (transform.whitening, (d, d)),
        (found.spread, (1,) if found.spread.shape == (1,) else (k,)),
        (None if found.ratings is None else found.ratings.offset, (d,)),
        (None if found.prior is None else found.prior.factor, (d, -1)),
    ]
    shapes += [(each, (-1,)) for each in (transform.target_scale,)] + [(found.centre, (-1, k + 1))]
    for array, shape in shapes:
        if array is not None and not _fits(array, shape):
            raise ValueError("the arrays of its representation do not fit each other, or are not finite")
    if not (transform.scale > 0).all() or not (transform.target_scale is None or (transform.target_scale > 0).all()):
        raise ValueError("its scales are not above 0")
    if found.prior is not None:
        mean = found.prior.mean
        if not all(np.isfinite(getattr(mean, name)).all() for name in _MEAN_ARRAYS):
            raise ValueError("the mean of its prior is not finite")
    numbers = [found.error, found.preference, found.precision]
    numbers += [] if found.gains is None else [getattr(found.gains, name) for name in _GAINS]
    if not all(each is None or (type(each) in (int, float) and not math.isnan(each)) for each in numbers):
        raise ValueError("its facts are not numbers")


def _fits(array: Array, shape: tuple[int, ...]) -> bool:
    """Return whether an array is finite and of a shape, in which -1 stands for any length."""
    fits = array.ndim == len(shape) and all(want in (-1, got) for got, want in zip(array.shape, shape, strict=True))
    return fits and bool(np.isfinite(array).all())


_RATING_FACTS = ("level", "spread", "level_variance")
_GAINS = tuple(each.name for each in fields(Gains))


def _read_ratings(arrays: Mapping[str, Array], facts: Mapping[str, float]) -> Ratings:
    """Return the parts beside items' factors. Raise ValueError if a number cannot be one of them."""
    ratings = Ratings(arrays["offset"], facts["residual"])
    if "ratings_level" in facts:
        level, spread, variance = (float(facts[f"ratings_{name}"]) for name in _RATING_FACTS)
        ratings = replace(ratings, level=level, spread=spread, level_variance=variance)
        if not (math.isfinite(facts["ratings_level"]) and ratings.spread >= 0 and ratings.level_variance >= 0):
            raise ValueError("the level and the spread of its ratings are no such numbers")
    if not 0 < ratings.residual < math.inf:
        raise ValueError("its residual is not a positive number")
    return ratings


def _read_prior(arrays: Mapping[str, Array], facts: Mapping[str, float]) -> HeadPrior | LabelPrior:
    """Return the prior of heads. Raise ValueError if its arrays do not fit each other or a number is impossible."""
    fields = {name: arrays[f"prior_{name}"] for name in _MEAN_ARRAYS}
    mean = PriorMean(**fields, intercept=bool(facts["prior_intercept"]))
    factor, d = arrays["prior_factor"], len(mean.slopes)
    if factor.shape[0] != d or d != len(arrays["basis"]):
        raise ValueError("the arrays of its prior do not fit each other")
    own, decided = bool(facts["prior_own_origin"]), bool(facts.get("prior_decided", True))
    if "prior_noise" not in arrays:
        level, factors = facts["prior_level"], (facts["prior_known"], facts["prior_new"])
        if not all(0 <= number < math.inf for number in (level, *factors)):
            raise ValueError("the numbers of its prior are not 0 or more")
        return LabelPrior(mean, factor, own, level, *factors, bool(facts["prior_logits"]), decided)
    noise, known, new, new_ratio = (arrays[f"prior_{name}"] for name in _PRIOR_ARRAYS[1:])
    if noise.shape != (mean.slopes.shape[1],) or not (noise >= 0).all():
        raise ValueError("the arrays of its prior do not fit each other")
    if {known.shape, new.shape} != {(len(QUANTILES),)} or new_ratio.shape != noise.shape:
        raise ValueError("the quantiles of its prior are not those that are known")
    ratio = float(facts["prior_level_ratio"])
    return HeadPrior(mean, factor, own, math.inf if ratio >= FREE else ratio, noise, known, new, new_ratio, decided)
