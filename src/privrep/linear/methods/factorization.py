"""Private factorisation of ratings: items' offsets and factors from one release, users' tastes never leave them.

A user's ratings are r_j = spread (a + b_j + <F_j, v>) + rest: b_j how far item j is rated above what its raters rate on
average, F_j its factors, and the user's own mean, spread and taste v ~ N(0, I). The user sends the direction x of its
ratings around their mean (so neither its mean nor its spread matters, and no range of ratings need be known) as

    taste   sum of (x, a)(x, a)^T beside b times which items it rated       -> b_j, and the covariance of the items

Pairs (j, l) are seen as often as both are rated. With B_j the released presence of item j and n the sum of |x|^2, the
covariance is beta_j beta_l (F F^T)_jl off the diagonal, beta = B / sqrt n, plus noise whose variance is public; its
diagonal holds the rest too and is treated as missing. Items are weighted so that the noise is even, eigenvalues that
stand above it are kept and shrunk by it (Donoho, Gavish, Johnstone), and so are the factors of single items, the more
the rarer an item is.

More items than can be paired (the noise of all pairs would drown them, and take minutes to draw) go in two steps:

    means   sums of x and of which items were rated                         -> b_j, and the head: the items rated most
    taste   as above, of the head                                           -> factors of the head
    tail    sum of x_tail (x_head^T Q), Q an orthonormal basis of those     -> factors of the other items
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Annotated, ClassVar

import numpy as np
from numpy.typing import NDArray

from privrep.data.sparse import SparseRows
from privrep.errors import InputError
from privrep.linear.method import Method, Problem
from privrep.local.least_squares import centred_targets
from privrep.local.representation import Estimate, Ratings, Representation, publish
from privrep.local.transform import FeatureTransform
from privrep.privacy.bounds import Bound, Contributions
from privrep.privacy.calibration import Query
from privrep.privacy.contributions import Concatenated, NonNegative, RowMoments, SparseColumns, packed_size, unpack
from privrep.privacy.protocol import StepSpec, UserBatch
from privrep.privacy.run import Run
from privrep.typing import Array, Axes, Floats, Matrix

MEAN_WEIGHT, PRESENCE_WEIGHT = 0.3, 0.3  # a and b: of the offsets and of the counts against the covariance
MOST_PAIRED = 1024  # items
MAX_RANK = 30
MEANS_SHARE, PAIRS_SHARE = 0.15, 0.6  # of mu^2, where there are more; the tail gets the rest
TAIL_NORM = 0.25  # half of the largest that can be


@dataclass(frozen=True)
class _Items:
    """What is known of the items before their factors: all in units of a user's own spread."""

    offset: Array  # b_j
    presence: Array  # B_j, floored where it is lost in noise
    raters: float  # n: the sum of |x|^2 over users

    @property
    def share(self) -> Array:
        """Of all ratings."""
        return self.presence / self.presence.sum()

    @property
    def seen(self) -> Array:
        """How many users' worth of squared direction an item holds."""
        return self.share * self.raters

    @property
    def beta(self) -> Array:
        """E[x_j x_l] times n is beta_j beta_l <F_j, F_l>."""
        return self.presence / math.sqrt(self.raters)

    @property
    def common(self) -> Array:
        """The mean of x over users, times the root of n: what of the covariance is due to the offsets."""
        return self.offset * self.beta


def private_factorization(run: Run, rank: int | None) -> Representation:
    """Offsets and factors of the items, on the whole budget. `rank` is the most factors to keep.

    Formal guarantee: everything returned or posted is a function of the releases charged to `run.ledger`, hence
    (epsilon, delta)-DP at user level under the ledger's relation, for any data whatever.
    """
    d, total = run.users.facts.features, run.ledger.capacity
    if d <= MOST_PAIRED:
        items, factors, error = _paired(run, np.arange(d), rank, total)
        return _publish(run, items, factors, error)
    items = _means(run, MEANS_SHARE * total)
    head = np.sort(np.argsort(-items.presence, kind="stable")[:MOST_PAIRED])
    _, known, error = _paired(run, head, rank, PAIRS_SHARE * total)
    factors = np.zeros((d, len(error)))
    if len(error):
        factors = _tail(run, items, head, known, (1 - MEANS_SHARE - PAIRS_SHARE) * total)
    return _publish(run, items, factors, error)


class FactorizationMethod(Method):
    """Private factorisation, as callers know it."""

    name = "private-factorization"
    title = (
        "Private factorisation of ratings: how far each item is rated above a user's mean, and factors of the items, "
        "are public. Each user's mean, spread and taste stay in private/."
    )
    accepts = frozenset({"ratings", "sparse", "add-or-remove-one-user"})
    purposes: ClassVar[Mapping[str, str]] = {
        "taste": "offsets and factors of the items",
        "means": "offsets of the items",
        "tail": "factors of the rarer items",
    }

    def default(self, run: Run, problem: Problem) -> Representation:
        return private_factorization(run, problem.rank)


METHOD = FactorizationMethod()


def _paired(run: Run, about: NDArray[np.int64], rank: int | None, mu_squared: float) -> tuple[_Items, Array, Array]:
    """One release with all pairs of these items: their offsets, factors, and the factors' mean squared sines."""
    d = len(about)
    step = TasteMoments(about, MEAN_WEIGHT, PRESENCE_WEIGHT)
    bound = Bound(math.hypot(1 + MEAN_WEIGHT**2, PRESENCE_WEIGHT), packed_size(d + 1) + d, acute=True)
    released = run.release("taste", step, {"taste": Query(bound, mu_squared)})["taste"]
    moments, presence = unpack(released.value[:-d]), released.value[-d:] / PRESENCE_WEIGHT
    pairs, means, sigma = moments[:d, :d], moments[:d, d] / MEAN_WEIGHT, released.sigma
    raters = float(np.trace(pairs))
    items = _items(means, presence, sigma / (math.sqrt(2) * MEAN_WEIGHT), sigma / PRESENCE_WEIGHT, raters)
    noise = sigma / math.sqrt(2)  # of an off-diagonal entry
    weights = 1 / np.sqrt(noise + items.seen / math.sqrt(items.raters))  # this noise and the sample's, made even
    squared = np.outer(weights, weights)
    variance = (noise**2 + np.outer(items.seen, items.seen) / items.raters) * squared**2
    radius = 2 * math.sqrt(d * float(variance.mean()))  # of the eigenvalues of noise alone
    values, vectors = _without_diagonal((pairs - np.outer(items.common, items.common)) * squared, radius, rank)
    size = (values + np.sqrt(values**2 - radius**2)) / 2  # before noise pushed them up
    error = (radius / 2 / size) ** 2
    return items, _shrunk(vectors * np.sqrt(size), items.beta * weights, error * size / d), np.minimum(error, 1.0)


def _without_diagonal(covariance: Array, radius: float, rank: int | None) -> tuple[Array, Array]:
    """Eigenvalues above the noise, and their vectors, of a matrix whose diagonal is unknown: it is filled in from
    them, a few times over."""
    d = len(covariance)
    edge = radius * (1 + 0.5 * d ** (-2 / 3))  # the largest eigenvalue of noise alone stays below, 19 times of 20
    diagonal = np.zeros(d)
    for _ in range(10):
        np.fill_diagonal(covariance, diagonal)
        values, vectors = np.linalg.eigh(covariance)
        keep = np.flatnonzero(values > edge)[::-1][: MAX_RANK if rank is None else rank]
        values, vectors = values[keep], vectors[:, keep]
        before, diagonal = diagonal, vectors**2 @ np.sqrt(values**2 - radius**2)
        if np.abs(diagonal - before).max() < 1e-2 * radius:
            break
    return values, vectors


def _shrunk(rows: Array, beta: Array, noise: Array) -> Array:
    """F_ji from rows_ji = beta_j F_ji + noise of variance noise_i, with F_ji ~ N(0, tau_i), tau_i by moments."""
    tau = np.maximum((rows**2 - noise).sum(axis=0), 0.0) / (beta @ beta)
    factors: Array = rows * beta[:, None] * tau / (beta[:, None] ** 2 * tau + noise)
    return factors


def _means(run: Run, mu_squared: float) -> _Items:
    """Offsets and presence of more items than can be paired."""
    d = run.users.facts.features
    query = Query(Bound(math.sqrt(3.0), 2 * d + 1), mu_squared)
    released = run.release("means", TasteMeans(), {"means": query})["means"]
    means, presence, raters = released.value[:d], released.value[d : 2 * d], float(released.value[-1])
    return _items(means, presence, released.sigma, released.sigma, raters)


def _tail(run: Run, items: _Items, head: NDArray[np.int64], known: Array, mu_squared: float) -> Array:
    """Factors of all items. With beta F = Q R on the head, the tail's sum of x_tail (x_head^T Q) is beta F R^T."""
    d, k = len(items.offset), known.shape[1]
    basis, tail = np.zeros((d, k)), np.ones(d, dtype=bool)
    basis[head], R = np.linalg.qr(items.beta[head, None] * known)
    tail[head] = False
    query = Query(Bound(TAIL_NORM, d * k), mu_squared)
    released = run.release("tail", TasteImage(basis, tail), {"image": query})["image"]
    image = released.value.reshape(k, d).T[tail] - np.outer(items.common[tail], items.common @ basis)
    back = np.linalg.inv(R)
    factors = np.empty((d, k))
    factors[head] = known
    factors[tail] = _shrunk(image @ back.T, items.beta[tail], released.sigma**2 * (back**2).sum(axis=1))
    return factors


def _items(means: Array, presence: Array, mean_noise: float, presence_noise: float, raters: float) -> _Items:
    """means_j = presence_j b_j + noise with b_j ~ N(centre, spread), both by moments: b_j shrunk accordingly."""
    presence = np.maximum(presence, max(2 * presence_noise, 1e-3 * float(presence.max())))
    squares = float(presence @ presence)
    centre = float(means @ presence) / squares
    left = means - centre * presence
    spread = max((float(left @ left) - len(means) * mean_noise**2) / squares, 1e-6)
    offset = centre + spread * presence * left / (spread * presence**2 + mean_noise**2)
    return _Items(offset, presence, max(float(raters), math.sqrt(squares)))  # presence is a sum of n unit vectors


def _publish(run: Run, items: _Items, factors: Array, error: Array) -> Representation:
    offset = items.offset - items.share @ items.offset
    residual = max(1 - float(items.share @ (offset**2 + (factors**2).sum(axis=1))), 0.1)
    basis, spread, _ = np.linalg.svd(factors, full_matrices=False)
    return publish(
        run, Estimate(basis, np.diag(error), spread), FeatureTransform.plain(len(offset)), Ratings(offset, residual)
    )


@dataclass(frozen=True)
class _Taste:
    """A group of users' ratings as vectors over the items, held as slots (see `SparseRows.slots`)."""

    user: NDArray[np.int64]
    item: NDArray[np.int64]
    direction: Array  # ratings minus the user's mean, of length one, or zero where all are alike
    presence: Array  # how often an item was rated, of length one

    def among(self, items: NDArray[np.int64], users: int, features: int) -> _Taste:
        """The part that is about these items, numbered in their order, its vectors of length one again."""
        place = np.full(features, -1)
        place[items] = np.arange(len(items))
        kept = place[self.item] >= 0
        user = self.user[kept]
        direction, presence = (_unit(values[kept], user, users) for values in (self.direction, self.presence))
        return _Taste(user, place[self.item[kept]], direction, presence)


def taste(X: SparseRows, y: Floats) -> _Taste:
    user, item, T = X.slots()
    moved = T @ centred_targets(y).T.ravel()
    times = T @ np.ones(T.shape[1])
    return _Taste(user, item, _unit(moved, user, len(X)), _unit(times, user, len(X)))


def _unit(values: Array, user: NDArray[np.int64], users: int) -> Array:
    length = np.sqrt(np.bincount(user, values**2, minlength=users))[user]
    unit: Array = np.divide(values, length, out=np.zeros_like(values), where=length > 0)
    return unit


@dataclass(frozen=True)
class TasteMoments:
    """(x, a)(x, a)^T beside b times the presence, x a user's direction: x x^T, 2 a x, a^2 and which items it rated.

    All contributions have the same length sqrt((1 + a^2)^2 + b^2), but of users whose ratings are all alike, whose
    direction is zero. They are acute: the first is positive semi-definite, the second has no negative entry.
    """

    items: Annotated[NDArray[np.int64], Axes(1)]  # those it is about: direction and presence are of these alone
    mean_weight: float  # a
    presence_weight: float  # b

    @property
    def spec(self) -> StepSpec:
        return StepSpec(accepts_sparse=True, floats_per_sparse_user=2 * len(self.items) + 1)

    def __call__(self, batch: UserBatch) -> dict[str, Contributions]:
        X: SparseRows = batch.X
        y: Floats = batch.y
        users, d = len(X), len(self.items)
        t = taste(X, y).among(self.items, users, X.shape[2])
        rows, presence = np.zeros((users, 1, d + 1)), np.zeros((users, d))
        rows[t.user, 0, t.item] = t.direction
        rows[:, 0, d] = self.mean_weight
        presence[t.user, t.item] = self.presence_weight * t.presence
        return {"taste": Concatenated((RowMoments(rows, np.ones(users)), NonNegative(presence)))}


@dataclass(frozen=True)
class TasteMeans:
    """A user's direction and presence, for more items than can be paired."""

    spec: ClassVar[StepSpec] = StepSpec(accepts_sparse=True)

    def __call__(self, batch: UserBatch) -> dict[str, Contributions]:
        X: SparseRows = batch.X
        y: Floats = batch.y
        t = taste(X, y)
        values = np.column_stack([t.direction, t.presence])
        return {"means": SparseColumns(t.user, t.item, values, np.ones((len(X), 1)), X.shape[2])}


@dataclass(frozen=True)
class TasteImage:
    """x_tail (x_head^T B): a user's direction among some items times B, a public basis of the head, the other items.

    Its length is at most 1/2, since |x_tail|^2 + |x_head|^2 <= 1.
    """

    spec: ClassVar[StepSpec] = StepSpec(accepts_sparse=True)
    basis: Matrix  # (d, k), zero outside the head
    tail: Annotated[NDArray[np.bool_], Axes(1)]  # (d,)

    def __post_init__(self) -> None:
        if self.tail.dtype != np.bool_:
            raise InputError("the tail is a mask of items; numbers would be taken for places.")

    def __call__(self, batch: UserBatch) -> dict[str, Contributions]:
        X: SparseRows = batch.X
        y: Floats = batch.y
        users, _, d = X.shape
        t = taste(X, y)
        outside = self.tail[t.item]
        image = np.empty((int(outside.sum()), self.basis.shape[1]))
        for a in range(self.basis.shape[1]):
            along = np.bincount(t.user, t.direction * self.basis[t.item, a], minlength=users)
            image[:, a] = t.direction[outside] * along[t.user[outside]]
        return {"image": SparseColumns(t.user[outside], t.item[outside], image, np.empty((users, 0)), d)}
