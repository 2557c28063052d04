"""What users compute on their ratings: rows are items, one column each, and the targets are what they were given."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import numpy as np
from numpy.typing import NDArray

from privrep.data.sparse import SparseRows
from privrep.errors import InputError
from privrep.local.least_squares import centred_targets
from privrep.privacy.bounds import Contributions
from privrep.privacy.contributions import Concatenated, NonNegative, RowMoments, SparseColumns
from privrep.typing import Array, Floats


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

    sparse: ClassVar[bool] = True
    items: NDArray[np.int64]  # those it is about: direction and presence are of these alone
    mean_weight: float  # a
    presence_weight: float  # b

    @property
    def sparse_vector_size(self) -> int:
        return 2 * len(self.items) + 1

    def __call__(self, X: SparseRows, y: Floats) -> dict[str, Contributions]:
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

    sparse: ClassVar[bool] = True

    def __call__(self, X: SparseRows, y: Floats) -> dict[str, Contributions]:
        t = taste(X, y)
        values = np.column_stack([t.direction, t.presence])
        return {"means": SparseColumns(t.user, t.item, values, np.ones((len(X), 1)), X.shape[2])}


@dataclass(frozen=True)
class TasteImage:
    """x_tail (x_head^T B): a user's direction among some items times B, a public basis of the head, the other items.

    Its length is at most 1/2, since |x_tail|^2 + |x_head|^2 <= 1.
    """

    sparse: ClassVar[bool] = True
    basis: Array  # (d, k), zero outside the head
    tail: NDArray[np.bool_]  # (d,)

    def __post_init__(self) -> None:
        if self.tail.dtype != np.bool_:
            raise InputError("the tail is a mask of items; numbers would be taken for places.")

    def __call__(self, X: SparseRows, y: Floats) -> dict[str, Contributions]:
        users, _, d = X.shape
        t = taste(X, y)
        outside = self.tail[t.item]
        image = np.empty((int(outside.sum()), self.basis.shape[1]))
        for a in range(self.basis.shape[1]):
            along = np.bincount(t.user, t.direction * self.basis[t.item, a], minlength=users)
            image[:, a] = t.direction[outside] * along[t.user[outside]]
        return {"image": SparseColumns(t.user[outside], t.item[outside], image, np.empty((users, 0)), d)}
