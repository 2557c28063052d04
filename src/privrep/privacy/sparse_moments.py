"""Moments of sparse vectors: x x^T of users most of whose columns are zero."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property
from typing import ClassVar

import numpy as np
from numpy.typing import NDArray

from privrep.errors import InputError
from privrep.privacy.bounds import MAX_ROWS_PER_SUM, UserContributions
from privrep.privacy.grid import (
    as_integers,
    measure_rounding,
    root_step,
    round_weighted,
)
from privrep.typing import Array, Integers

PAIRS_AT_ONCE = 1 << 18  # whose numbers and places stand together
DENSE = 8  # a user with an eighth of all columns is made dense: a matrix product adds a pair up many times faster


@dataclass(frozen=True)
class SparseMoments(UserContributions):
    """S_u = x x^T of each user's vector x, (d,), most of whose columns are zero, as whole matrices, (d * d).

    Entry s says that column `column[s]` of user `user[s]` is `values[s]`. Entries come user by user, and a user's in
    the order of its columns. A user whose columns repeat counts as zero, and so does one with squares that add up to
    2^1023 or more. Norms are too small by at most 2^-1000.
    Acute: two positive semi-definite matrices have a non-negative inner product. Those of rounded rows are such, too.
    Sums are the integers that `RowMoments` of the same vectors would give for the same weights.
    """

    acute: ClassVar[bool] = True
    user: NDArray[np.int64]
    column: NDArray[np.int64]
    values: Array  # (entries,)
    users: int
    features: int

    def __post_init__(self) -> None:
        if (np.diff(self.user) < 0).any():
            raise InputError("entries of sparse moments come user by user.")

    def norms(self) -> Array:
        """Return the squared length of each user's vector, (users,), added up entry by entry; infinite where it has a
        column twice."""
        squares = self.values.astype(np.float64, copy=False) ** 2
        length = np.bincount(self.user, squares, minlength=self.users).astype(np.float64)  # integers if there are none
        twice = (np.diff(self.column) <= 0) & (np.diff(self.user) == 0)
        length[self.user[1:][twice]] = np.inf
        return np.asarray(length * (1 + 1e-9))

    def roundings(self, norm: float, step: float) -> Array | float:
        moved = measure_rounding(self.features, root_step(step))
        return 2 * math.sqrt(norm) * moved + moved**2

    def grid_sum(self, weights: Array, step: float) -> Integers:
        d, factors = self.features, np.sqrt(weights) / root_step(step)
        roots = round_weighted(self.values, factors[self.user])
        total = np.zeros((d, d), np.int64)
        flat = total.reshape(-1)  # the same numbers
        for first, other in self._pair_up():
            i, j = self.column[first], self.column[other]
            products, apart = (roots[first] * roots[other]).astype(np.int64), first != other
            np.add.at(flat, i * d + j, products)
            np.add.at(flat, (j * d + i)[apart], products[apart])
        for rows in self._make_dense(roots):
            total += as_integers(rows.T @ rows)
        return flat

    @cached_property
    def _counts(self) -> tuple[NDArray[np.int64], NDArray[np.bool_]]:
        """Return how many entries each user has, (users,), and a mask (users,) of who is made dense."""
        counts = np.bincount(self.user, minlength=self.users)
        return counts, counts * DENSE > self.features

    def _pair_up(self) -> Iterator[tuple[NDArray[np.int64], NDArray[np.int64]]]:
        """Yield all pairs of entries of a user who is not made dense, the first no later than the other."""
        counts, dense = self._counts
        left = np.repeat(np.cumsum(counts), counts) - np.arange(len(self.user))  # of the user's entries, from this one
        left[dense[self.user]] = 0
        ends = np.cumsum(left)
        start = 0
        while start < len(left):
            before = int(ends[start - 1]) if start else 0
            stop = max(int(np.searchsorted(ends, before + PAIRS_AT_ONCE, side="right")), start + 1)
            first = np.repeat(np.arange(start, stop), left[start:stop])
            yield (
                first,
                first
                + np.arange(before, int(ends[stop - 1]))
                - np.repeat(ends[start:stop] - left[start:stop], left[start:stop]),
            )
            start = stop

    def _make_dense(self, values: Array) -> Iterator[Array]:
        """Yield the vectors of users with many entries as rows of a matrix, a bounded number at a time.

        Args:
            values: of the entries, (entries,).
        """
        _, dense = self._counts
        mine = np.flatnonzero(dense[self.user])
        place, column = np.cumsum(dense)[self.user[mine]] - 1, self.column[mine]
        count, most = int(dense.sum()), min(MAX_ROWS_PER_SUM, PAIRS_AT_ONCE * 4 // max(self.features, 1) + 1)
        for start in range(0, count, most):
            some = slice(*np.searchsorted(place, [start, start + most]))
            rows = np.zeros((min(most, count - start), self.features))
            rows[place[some] - start, column[some]] = values[mine[some]]
            yield rows
