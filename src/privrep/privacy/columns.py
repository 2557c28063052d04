"""Contributions that are sparse: vectors most of whose columns are zero."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import numpy as np
from numpy.typing import NDArray

from privrep.privacy.bounds import UserContributions
from privrep.privacy.grid import add_rounded, count_rounded, measure_rounding, round_weighted
from privrep.privacy.scaling import sum_squares
from privrep.typing import Array, Integers


@dataclass(frozen=True)
class SparseColumns(UserContributions):
    """Vectors (k, d) most of whose columns are zero, followed by a short dense `tail`.

    Entry s says that column `column[s]` of user `user[s]` is `values[s]`, (k,). A user's columns differ. Norms are too
    small by at most 2^-523. A user with a norm of 2^511 or more counts as zero.
    """

    acute: ClassVar[bool] = False
    user: NDArray[np.int64]
    column: NDArray[np.int64]
    values: Array  # (slots, k)
    tail: Array  # (users, p)
    features: int

    def measure_columns(self) -> Array:
        """Return the norm of each user's vector without its tail, (users,).

        It is added up entry by entry, so that a user's norm depends on no other user.
        """
        squares = np.ascontiguousarray(self.values, dtype=np.float64) ** 2
        return np.sqrt(np.bincount(self.user, squares.sum(axis=1), minlength=len(self.tail)))

    def norms(self) -> Array:
        return self._measure()

    def _measure(self) -> Array:
        """Return upper bounds of the norms, (users,), whatever the signs of the numbers."""
        tail = self.tail.astype(np.float64, copy=False)
        return np.sqrt(self.measure_columns() ** 2 + sum_squares(tail)) * (1 + 1e-10)

    def roundings(self, norm: float, step: float) -> Array | float:
        return measure_rounding(self.values.shape[1] * self.features + self.tail.shape[1], step)

    def grid_sum(self, weights: Array, step: float) -> Integers:
        rounded = round_weighted(self.values, (weights / step)[self.user, None])
        parts = [count_rounded(self.column, column, self.features) for column in rounded.T]
        return np.concatenate([*parts, add_rounded(self.tail, weights, step)])


@dataclass(frozen=True)
class NonNegativeColumns(SparseColumns):
    """Sparse columns without negative entries, so acute. A user with one counts as zero."""

    acute: ClassVar[bool] = True

    def norms(self) -> Array:
        """Return upper bounds of the norms, (users,), infinite for users with a negative number: they count as zero."""
        negative = ~(self.values >= 0).all(axis=1)
        below = np.bincount(self.user[negative], minlength=len(self.tail)) > 0
        below |= ~(self.tail >= 0).all(axis=1)
        return np.where(below, np.inf, self._measure())
