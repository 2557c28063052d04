"""Families of heads: how far users differ from the prior mean, and in what, judged by users' leave-one-out losses.

A candidate is a prior of levels and of slopes around the prior mean. Users send what they lose by each candidate, as
differences to their mean over candidates, and that mean. One release decides for everybody.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from typing import ClassVar

import numpy as np

from privrep.data.sparse import SparseRows
from privrep.errors import InputError
from privrep.heads.fitting import FEWEST_OWN, find_fair_share
from privrep.heads.posterior import make_images, make_spread
from privrep.heads.regression import fit_own_candidate
from privrep.linear.label_steps import LabelLosses
from privrep.linear.norms import choose_norm
from privrep.linear.panel_steps import add_target_axis, check_shapes, subtract_prior_mean
from privrep.linear.spreads import Spreads, find_spreads
from privrep.linear.steps import WIDE_CELLS, WIDE_LOWEST, find_octaves
from privrep.local.elementary import log
from privrep.local.least_squares import centre_rows
from privrep.local.losses import Loss
from privrep.local.prior import PriorMean
from privrep.privacy.bounds import Bound, Contributions
from privrep.privacy.calibration import Query
from privrep.privacy.contributions import Counts, NonNegative, Vectors
from privrep.privacy.protocol import StepSpec, UserBatch
from privrep.privacy.run import Run
from privrep.typing import Array, Floats, Matrix, Vector


@dataclass(frozen=True)
class Candidate:
    """A prior of heads, with variances in units of the noise's."""

    factor: int  # 0: slopes are the common ones; 1: they differ along the representation; 2: in all features
    slopes: float  # variance of slopes along the factor, in units of the noise's
    level: float  # variance of levels
    own: bool = True  # whether slopes turn a user's line around its own mean row, or around the public centre
    common: bool = True  # whether it lies around the prior mean, or, with free levels, around zero


@dataclass(frozen=True)
class HeadLosses:
    """Leave-one-out losses of each user by candidates: sums of squares over its rows and all its targets.

    A user sends its losses as differences to their mean over candidates. `relative` takes the number of rows times the
    logarithm of the losses instead, so that candidates may differ by orders of magnitude. A part of a user's least loss
    is then added to each, so that no loss is lucky beyond measure. `tail` times the number of rows follows. `sizes` is
    a histogram of the norms of the differences. `votes` counts the users who lose least by each candidate.
    """

    several_targets: ClassVar[bool] = True
    mean: PriorMean
    first: Matrix  # (d, k)
    second: Matrix  # (d, p)
    factor: Vector  # (candidates,): 0: none, 1: `first`, 2: `second`
    slopes: Vector  # (candidates,)
    level: Vector  # (candidates,)
    own: Vector  # (candidates,): 1 or 0
    common: Vector  # (candidates,): 1 or 0
    target_scale: Vector  # (q,)
    tail: float
    relative: bool

    @property
    def spec(self) -> StepSpec:
        floats = self.second.size + self.first.size
        return StepSpec(accepts_sparse=True, fill=self.mean.fill, floats_per_user=floats)

    def __post_init__(self) -> None:
        if len({len(self.factor), len(self.slopes), len(self.level), len(self.own), len(self.common)}) > 1:
            raise InputError("candidates have a factor, slopes, a level and an origin each; give as many of each.")
        if not (np.isin(self.factor, (0, 1, 2)).all() and (self.slopes >= 0).all()):
            raise InputError("a candidate has one of three factors, and slopes that vary by 0 or more.")

    def __call__(self, batch: UserBatch) -> dict[str, Contributions]:
        """Return `losses`, `sizes` and `votes` of each user."""
        X: Floats | SparseRows = batch.X
        users, m, _ = X.shape
        y = add_target_axis(batch.y).astype(np.float64, copy=False)
        check_shapes(X, y, self.mean, features=(self.first, self.second), targets=(self.target_scale,))
        candidates = len(self.factor)
        losses = np.zeros((users, candidates))
        if m > 1 or not self.mean.intercept:
            around = subtract_prior_mean(self.mean, X, y) / self.target_scale
            alone = (centre_rows(y) if self.mean.intercept else y) / self.target_scale
            for c in range(y.shape[2]):
                for used, targets in ((1, around), (0, alone)):
                    self._add(losses, used, X, np.ascontiguousarray(targets[:, :, c]))
        scaled = losses
        if self.relative:
            least = losses.min(axis=1, keepdims=True)
            scaled = m * log(np.where(least > 0, losses / np.where(least > 0, least, 1.0), 1.0) + SOFT)
        moved = scaled - np.matmul(scaled[:, None, :], np.full((candidates, 1), 1 / candidates))[:, 0]
        cells = find_octaves(np.sqrt((moved**2).sum(axis=1)), WIDE_LOWEST, WIDE_CELLS)[:, None]
        joined = np.concatenate([moved, np.full((users, 1), self.tail * m)], axis=1)
        least = losses.min(axis=1)
        vote = np.where(least < losses.max(axis=1), losses.argmin(axis=1), -1)[:, None]
        return {"losses": Vectors(joined), "sizes": Counts(cells, WIDE_CELLS), "votes": Counts(vote, candidates)}

    def _add(self, losses: Array, common: int, X: Floats | SparseRows, residuals: Array) -> None:
        """Add to `losses` what users lose by the candidates around the prior mean, or by the others.

        Args:
            losses: by user and candidate, (users, candidates); changed in place.
            common: 1 for candidates around the prior mean, 0 for the others.
            X: rows (users, m, d).
            residuals: what the prior mean, or users' own means, leave of one target, (users, m).
        """
        asked = self.common == common
        for number in np.unique(self.factor[asked]):
            for own in np.unique(self.own[asked & (self.factor == number)]):
                among = asked & (self.factor == number) & (self.own == own)
                matrix = (np.zeros((X.shape[2], 0)), self.first, self.second)[int(number)]
                images = make_images(X, matrix, self.mean, bool(own) or not common)
                for ratio in np.unique(self.slopes[among]):
                    spread = make_spread(images * math.sqrt(ratio), residuals)
                    for i in np.flatnonzero(among & (self.slopes == ratio)):
                        losses[:, i] += (spread.with_levels(float(self.level[i])).left ** 2).sum(axis=1)


@dataclass(frozen=True)
class Judged:
    """Released losses of candidates, all users together, around their mean."""

    candidates: tuple[Candidate, ...]
    losses: Array  # (candidates,), with noise
    sigma: float  # of the noise in each
    rows: float  # rows that losses are summed over, with noise of its own
    norm: float  # clipping norm of users' differences

    def best(self, among: Iterable[int] | None = None) -> int:
        """Return the position of the candidate that loses least, among all or among the given positions."""
        chosen = list(range(len(self.candidates)) if among is None else among)
        return min(chosen, key=lambda i: float(self.losses[i]))

    def groups(self) -> dict[int, list[int]]:
        """Return the positions of the candidates of each factor."""
        factors = sorted({c.factor for c in self.candidates})
        return {f: [i for i, c in enumerate(self.candidates) if c.factor == f] for f in factors}

    def by_factor(self) -> dict[int, float]:
        """Return the least loss of the candidates of each factor."""
        return {f: float(self.losses[self.best(among)]) for f, among in self.groups().items()}

    def kinds(self) -> list[Candidate]:
        """Return the best candidate of each factor and origin."""
        kinds = sorted({(c.factor, c.own) for c in self.candidates})
        among = ([i for i, c in enumerate(self.candidates) if (c.factor, c.own) == kind] for kind in kinds)
        return [self.candidates[self.best(each)] for each in among]


@dataclass(frozen=True)
class Families:
    """The parts that candidates are made of, and the run that asks users about them."""

    run: Run
    mean: PriorMean
    first: Array
    second: Array
    target_scale: Array
    users: float  # roughly
    rows: float  # of a typical user
    level: float = 1.0  # variance of levels over the noise's, as guessed without asking for it
    unit: float = 1.0  # a typical square of an error, over the target's scale squared
    loss: Loss | None = None  # of labels; None: of numbers

    def ask_spreads(self, page: str, mu_squared: float) -> Spreads:
        """Ask users how far levels and slopes vary.

        Args:
            page: the name of the page.
            mu_squared: what the release costs.
        """
        return find_spreads(self.run, page, self.mean, self.first, self.target_scale, mu_squared)

    def _step(self, candidates: Sequence[Candidate], tail: float, relative: bool) -> HeadLosses | LabelLosses:
        """Return the local step that scores candidates: `HeadLosses` of numbers, `LabelLosses` of labels.

        Args:
            candidates: the priors to score.
            tail: the factor of users' numbers of rows behind the losses.
            relative: whether to send logarithms of losses of numbers.
        """
        names = ("factor", "slopes", "level", "own", "common")
        asked = {name: np.array([float(getattr(c, name)) for c in candidates]) for name in names}
        asked |= {"first": self.first, "second": self.second}
        if self.loss is not None:
            return LabelLosses(mean=self.mean, loss=self.loss, learned=self.level, tail=tail, **asked)
        return HeadLosses(mean=self.mean, target_scale=self.target_scale, tail=tail, relative=relative, **asked)

    def vote(self, page: str, candidates: Sequence[Candidate], mu_squared: float) -> tuple[Array, float]:
        """Ask users which candidate they lose least by: the cheapest of questions.

        Args:
            page: the name of the page.
            candidates: the priors to choose from.
            mu_squared: what the release costs.

        Returns:
            Votes for each candidate with noise, (candidates,), and the noise's standard deviation.
        """
        query = Query(Bound(1.0, len(candidates), acute=True), mu_squared)
        votes = self.run.release(page, self._step(candidates, 1.0, False), {"votes": query})["votes"]
        return votes.value, votes.sigma

    def is_legible(self, mu_squared: float) -> bool:
        """Return whether users are many enough for losses that cost this much mu^2 to tell candidates apart."""
        return mu_squared >= self.legible_price

    @property
    def legible_price(self) -> float:
        """Return the mu^2 that losses must cost to be legible."""
        return (LEGIBLE / max(self.users, 1e-9)) ** 2

    def judge(
        self,
        page: str,
        candidates: Sequence[Candidate],
        mu_squared: float,
        relative: bool = False,
        before: Judged | None = None,
    ) -> Judged:
        """Ask users what they lose by each candidate.

        Where users are very many, the clipping norm of the losses `before` serves again.

        Args:
            page: the name of the page.
            candidates: the priors to score.
            mu_squared: what the release costs, a histogram for its clipping norm included.
            relative: whether users send logarithms of their losses; losses of labels are logarithms already.
            before: losses that were released earlier; None: the first ones.
        """
        relative = relative and self.loss is None  # losses of labels are logarithms by themselves
        tail = 0.3 * math.sqrt(len(candidates))
        step = self._step(candidates, tail, relative)
        needed = (4 * math.sqrt(2) / (max(self.users, 1.0) / 10)) ** 2
        norm = 0.5 * self.rows * math.sqrt(len(candidates)) * (1.0 if relative else self.unit)
        if before is not None and math.sqrt(mu_squared) * self.users > AMPLE:
            norm = before.norm
        elif not relative and needed < 0.25 * mu_squared:
            share = max(needed, (0.05 if self.loss is None else LOOK) * mu_squared)
            mu_squared -= share
            sizing = {"sizes": Query(Bound(1.0, WIDE_CELLS, acute=True), share)}
            sizes = self.run.release(f"{page}-scout", step, sizing)["sizes"]
            rare = None if self.loss is None else norm
            norm = choose_norm(sizes.value, sizes.sigma, mu_squared, len(candidates), rare) or norm
        if not relative:
            tail = 0.3 * norm / self.rows
            step = replace(step, tail=tail)
        bound = Bound(norm, len(candidates) + 1)
        released = self.run.release(page, step, {"losses": Query(bound, mu_squared)})["losses"]
        rows = max(float(released.value[-1]), 3 * released.sigma) / tail
        return Judged(tuple(candidates), released.value[:-1], released.sigma, rows, norm)


@dataclass(frozen=True)
class HeadVotes:
    """Votes of users with a few rows between a head of this prior and a regression of their own, by leave-one-out.

    A user has one vote, and none where both do alike.
    """

    several_targets: ClassVar[bool] = True
    mean: PriorMean
    factor: Matrix
    own: bool
    level: float
    scale: Vector  # (d,): of the features, in regressions of one's own

    @property
    def spec(self) -> StepSpec:
        return StepSpec(fill=self.mean.fill, floats_per_user=self.factor.size)

    def __call__(self, batch: UserBatch) -> dict[str, Contributions]:
        """Return `votes` of each user: cell 0 for the head of the prior, cell 1 for a regression of its own."""
        X: Floats = batch.X.astype(np.float64, copy=False)
        y = add_target_axis(batch.y).astype(np.float64, copy=False)
        check_shapes(X, y, features=(self.factor, self.scale))
        users, m, _ = X.shape
        heads, alone = np.zeros(users), np.zeros(users)
        if m >= FEWEST_OWN:
            around = subtract_prior_mean(self.mean, X, y)
            images = make_images(X, self.factor, self.mean, self.own)
            for c in range(y.shape[2]):
                fits = make_spread(images, np.ascontiguousarray(around[:, :, c])).with_levels(self.level)
                heads += (fits.left**2).mean(axis=1)
                alone += fit_own_candidate(X, np.ascontiguousarray(y[:, :, c]), self.scale, self.mean.intercept).loss
            alone = alone / find_fair_share(m)
        vote = np.where(heads < alone, 0, np.where(alone < heads, 1, -1))
        return {"votes": Counts(vote[:, None], 2)}


LEGIBLE = 40.0  # users times the root of mu^2 for losses to stand out: then a twentieth of a typical user's is heard
LOOK = 0.25  # of what losses of labels cost, for their sizes: users with the rarer label lose most, and decide
AMPLE = 10 * LEGIBLE  # from which on a clipping norm need not be the best one
SOFT = 0.2  # of a user's least loss, added to all of them
LOWEST_ERROR, ERROR_CELLS = -8, 20  # histograms of errors over their deviations: two cells an octave, from 2^-4 to 2^6


@dataclass(frozen=True)
class HeadErrors:
    """Errors of users' heads, each target left out in turn, and of the prior mean by itself, in standard deviations.

    noise: sums of squares by target, of heads and of the prior mean, then the numbers of rows of both. With intercepts
    a user with one row has no other rows to make a head of, and counts for the prior mean alone.
    tails: how many of a user's errors are in each cell of two histograms, over all targets.
    Deviations are in units of `target_scale`, as if the noise had variance one in them.
    """

    several_targets: ClassVar[bool] = True
    mean: PriorMean
    factor: Matrix
    own: bool
    level: float
    new_variance: Vector  # (q,): of a target around the prior mean of a user without rows
    target_scale: Vector  # (q,)

    @property
    def spec(self) -> StepSpec:
        return StepSpec(accepts_sparse=True, fill=self.mean.fill, floats_per_user=self.factor.size)

    def __call__(self, batch: UserBatch) -> dict[str, Contributions]:
        """Return `noise` and `tails` of each user."""
        X: Floats | SparseRows = batch.X
        users, m, _ = X.shape
        y = add_target_axis(batch.y).astype(np.float64, copy=False)
        q = y.shape[2]
        check_shapes(X, y, features=(self.factor,), targets=(self.new_variance, self.target_scale))
        around = subtract_prior_mean(self.mean, X, y) / self.target_scale
        rows = self.mean.predict_each_row(X)
        new = (y - rows) / self.target_scale / np.sqrt(self.new_variance)
        images = make_images(X, self.factor, self.mean, self.own)
        known = np.empty_like(new)
        for c in range(q):
            fits = make_spread(images, np.ascontiguousarray(around[:, :, c])).with_levels(self.level)
            known[:, :, c] = fits.left * np.sqrt(fits.certainty)
        told = float(m > 1 or not self.mean.intercept)  # a head of the other rows, of which there are none
        squares = [told * (known**2).sum(axis=1), (new**2).sum(axis=1)]
        counted = np.tile([told * m, float(m)], (users, 1))
        tails = [told * _count_errors(known.reshape(users, -1)), _count_errors(new.reshape(users, -1))]
        return {
            "noise": NonNegative(np.concatenate([*squares, counted], axis=1)),
            "tails": NonNegative(np.concatenate(tails, axis=1)),
        }


def _count_errors(errors: Array) -> Array:
    """Return how many of each user's errors are in each cell, (users, ERROR_CELLS). Errors that are not finite are in
    the last cell.

    A cell is twice the binary logarithm, rounded down, by the bits of the number: see `local.elementary`.

    Args:
        errors: of each user in standard deviations, (users, errors).
    """
    mantissa, exponent = np.frexp(np.where(errors == 0, 2.0**-500, np.abs(errors)))
    place = 2 * exponent.astype(np.int64) - 1 - (mantissa < math.sqrt(0.5)) - LOWEST_ERROR
    cells = np.clip(np.where(np.isfinite(errors), place, ERROR_CELLS), 0, ERROR_CELLS - 1)
    each = cells + ERROR_CELLS * np.arange(len(errors))[:, None]
    counts = np.bincount(each.ravel(), minlength=ERROR_CELLS * len(errors)).reshape(len(errors), ERROR_CELLS)
    return counts.astype(np.float64)
