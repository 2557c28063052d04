"""Local steps of the passes over ratings: which items users rated, what is left of their ratings, pairs, losses.

Each user's numbers are a function of its own rows, to the bit: sums run over a user's own slots, one after another, and
products are stacked, one per user (see `local.least_squares`).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated, ClassVar

import numpy as np
from numpy.typing import NDArray

from privrep.data.sparse import SparseRows
from privrep.errors import InputError
from privrep.heads.ratings import estimate_spreads, fit_ratings
from privrep.local.elementary import log
from privrep.local.least_squares import ROUNDING, centre_rows
from privrep.local.representation import Ratings
from privrep.privacy.bounds import Contributions
from privrep.privacy.columns import NonNegativeColumns
from privrep.privacy.contributions import Counts, Vectors
from privrep.privacy.protocol import StepSpec, UserBatch
from privrep.privacy.sparse_moments import SparseMoments
from privrep.typing import Array, Axes, Floats, Integers, Matrix

FARTHEST = 2.0  # most that a user's level may lie off the centre, in units of levels' deviation
WIDEST = 5.0  # variance of a user's ratings, in units of the typical one
MOST_SHARED = 2.0  # mean product of two ratings of a user, in public units
LEVEL_PARTS = 4  # numbers of `RatingLevels`
LEVEL_NORM = 1.0
MOST_LOST = 1.5  # a logarithm of squared errors, in `RatingLosses`
LOSS_PARTS = 4  # numbers of `RatingLosses`
LOSS_NORM = 2.0


def _check_batch(batch: UserBatch, matrix: Array) -> tuple[SparseRows, Array]:
    """Return rows and ratings (users, m), in double precision; raise InputError unless the matrix has a row for each
    item.

    Args:
        batch: users with equally many ratings.
        matrix: of the items, (d, .).
    """
    X: SparseRows = batch.X
    y: Floats = batch.y
    if not isinstance(X, SparseRows) or y.ndim != 2 or len(matrix) != X.shape[2] or matrix.shape[1] < 1:
        raise InputError("a step about ratings cannot be asked of other rows than ratings of its items.")
    return X, y.astype(np.float64, copy=False)


def _sum_by_item(X: SparseRows, values: Array) -> tuple[Integers, Integers, Array]:
    """Return users, items, and the sum of a user's values of each of its items, (slots,) each.

    Args:
        X: one-hot rows of items, (users, m, d).
        values: of each rating, (users, m).
    """
    user, item, T = X.slots()
    return user, item, T @ np.ascontiguousarray(values).ravel()


def _scale_to_unit(values: Array, user: Integers, users: int) -> Array:
    """Return values of slots over the length of their user's values, (slots,).

    Args:
        values: (slots,).
        user: the position of each slot's user, (slots,).
        users: how many there are.
    """
    length = np.sqrt(np.bincount(user, values**2, minlength=users))[user]
    unit: Array = np.divide(values, length, out=np.zeros_like(values), where=length > 0)
    return unit


def _subtract_fit(X: SparseRows, y: Array, matrix: Array, ratings: Ratings) -> Array:
    """Return what users' own levels, and tastes along the matrix, leave of their ratings, (users, m).

    Args:
        X: one-hot rows of items, (users, m, d).
        y: ratings (users, m).
        matrix: offsets, then factors, of each item, (d, 1 + k).
        ratings: the prior of users' levels and tastes.
    """
    left = fit_ratings(X.project(matrix), y, ratings).left
    rounding = ROUNDING * np.abs(y).max(axis=1, keepdims=True)
    return np.where(np.abs(left) > rounding, left, 0.0)


@dataclass(frozen=True)
class RatedItems:
    """The items that users rated, counted once each. Clipped to norm 1, a user adds 1 / sqrt(t) to each of its t items.

    Acute: counts.
    """

    spec: ClassVar[StepSpec] = StepSpec(accepts_sparse=True)

    def __call__(self, batch: UserBatch) -> dict[str, Contributions]:
        """Return `items` of each user."""
        X: SparseRows = batch.X
        if not X.shape[2]:
            raise InputError("no items are named that a user could have rated.")
        user, item, _ = X.slots()
        place = np.arange(len(user)) - np.searchsorted(user, user)  # of a slot among its user's
        cells = np.full((len(X), max(int(place.max(initial=-1)) + 1, 1)), -1)
        cells[user, place] = item
        return {"items": Counts(cells, X.shape[2])}


@dataclass(frozen=True)
class ItemPull:
    """A direction: what is left of a user's ratings of each item by its level and the offsets so far, brought to length
    1.

    So the range of ratings and their number do not matter. What lies above and what lies below are two vectors, neither
    with a negative entry: acute. Their difference has the noise that the direction would have. Their sum tells how
    often items are rated, at no price.
    """

    spec: ClassVar[StepSpec] = StepSpec(accepts_sparse=True)
    offset: Matrix  # (d, 1)
    ratings: Ratings

    def __call__(self, batch: UserBatch) -> dict[str, Contributions]:
        """Return `pull` of each user: what lies above, then what lies below."""
        X, y = _check_batch(batch, self.offset)
        user, item, values = _sum_by_item(X, _subtract_fit(X, y, self.offset, self.ratings))
        pull = _scale_to_unit(values, user, len(X))
        sides = np.stack([np.maximum(pull, 0.0), np.maximum(-pull, 0.0)], axis=1)
        return {"pull": NonNegativeColumns(user, item, sides, np.zeros((len(X), 0)), X.shape[2])}


@dataclass(frozen=True)
class RatingLevels:
    """Numbers that tell how users' levels and spreads are distributed, once offsets are taken out.

    z is the user's level. p is the mean product of two of its ratings around the centre, whose expectation is the
    variance of levels: the noise of two ratings has nothing in common. v is the variance of its ratings. All are in
    public units, and most users' numbers are close to zero: z / FARTHEST, p / MOST_SHARED, (v - 1) / (WIDEST - 1). The
    last number is -1/2 for a user with a single rating, who has no p and no v.
    """

    spec: ClassVar[StepSpec] = StepSpec(accepts_sparse=True)
    offset: Matrix  # (d, 1)
    spread: float  # typical, of a user's ratings
    centre: float
    between: float  # standard deviation of levels, roughly

    @property
    def shared(self) -> float:
        """Return the unit of products of two ratings."""
        return max(self.spread**2, self.between**2)

    def __call__(self, batch: UserBatch) -> dict[str, Contributions]:
        """Return `levels` of each user, (users, LEVEL_PARTS)."""
        X, y = _check_batch(batch, self.offset)
        m = y.shape[1]
        unit = estimate_spreads(y, self.spread)
        around = y - unit[:, None] * X.project(self.offset)[:, :, 0] - self.centre
        z = np.clip(around.mean(axis=1) / self.between, -FARTHEST, FARTHEST)
        values = np.zeros((len(y), LEVEL_PARTS))
        values[:, 0] = z / FARTHEST
        if m > 1:
            pairs = (around.sum(axis=1) ** 2 - (around**2).sum(axis=1)) / (m * (m - 1))
            values[:, 1] = np.clip(pairs / (self.shared * MOST_SHARED), -1.0, 1.0)
            v = (centre_rows(y) ** 2).sum(axis=1) / ((m - 1) * self.spread**2)
            values[:, 2] = (np.minimum(v, WIDEST) - 1) / (WIDEST - 1)
        else:
            values[:, 3] = -0.5
        return {"levels": Vectors(values)}


@dataclass(frozen=True)
class RatingPairs:
    """Pairs of items: what is left of a user's ratings of some items as a direction x, and which it rated, p.

    x x^T and p p^T are both of length at most 1, and acute: positive semi-definite.
    """

    items: Annotated[NDArray[np.int64], Axes(1)]  # positions of the items that directions are about
    offset: Matrix  # (d, 1)
    ratings: Ratings

    @property
    def spec(self) -> StepSpec:
        return StepSpec(accepts_sparse=True, floats_per_sparse_user=2 * len(self.items) + 1)

    def __call__(self, batch: UserBatch) -> dict[str, Contributions]:
        """Return `pairs` and `together` of each user."""
        X, y = _check_batch(batch, self.offset)
        users = len(X)
        place = np.full(X.shape[2], -1)
        place[self.items] = np.arange(len(self.items))
        user, item, values = _sum_by_item(X, _subtract_fit(X, y, self.offset, self.ratings))
        kept = place[item] >= 0
        user, item, values = user[kept], place[item[kept]], values[kept]
        units = (_scale_to_unit(numbers, user, users) for numbers in (values, np.ones(len(values))))
        pairs, together = (SparseMoments(user, item, unit, users, len(self.items)) for unit in units)
        return {"pairs": pairs, "together": together}


@dataclass(frozen=True)
class RatingLosses:
    """Leave-one-out losses of users, as logarithms over the loss by their own mean.

    They are losses by the prior, by level and offsets, and by taste as well. A last number says whether the user could
    tell. Users with a single rating, or equal ones, cannot.
    """

    spec: ClassVar[StepSpec] = StepSpec(accepts_sparse=True)
    matrix: Matrix  # (d, 1 + k)
    ratings: Ratings

    def __call__(self, batch: UserBatch) -> dict[str, Contributions]:
        """Return `losses` of each user, (users, LOSS_PARTS)."""
        X, y = _check_batch(batch, self.matrix)
        m = y.shape[1]
        values = np.zeros((len(y), LOSS_PARTS))
        alone = ((centre_rows(y) * (m / max(m - 1, 1))) ** 2).sum(axis=1)
        tell = (alone > (ROUNDING * np.abs(y).max(axis=1)) ** 2) & (m > 1)
        P = X.project(self.matrix)
        level, typical = self.ratings.level or 0.0, self.ratings.spread
        prior = y - level - typical * P[:, :, 0]
        offsets = fit_ratings(np.ascontiguousarray(P[:, :, :1]), y, self.ratings).left_out
        heads = offsets if P.shape[2] == 1 else fit_ratings(P, y, self.ratings).left_out
        for number, left in enumerate((prior, offsets, heads)):
            over = (left**2).sum(axis=1) / np.where(tell, alone, 1.0)
            lost = log(np.clip(over, 1e-9, 1e9))
            values[:, number] = np.where(tell, np.clip(lost, -MOST_LOST, MOST_LOST), 0.0)
        values[:, -1] = tell
        return {"losses": Vectors(values)}
