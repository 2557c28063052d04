"""Kinds of contributions, each in the cheapest form that gives exact norms and sums (see `bounds.Contributions`).

Formal guarantee. Norms are right for numbers of any size, by float64 alone where that is proven here, else by powers of
two that bring a user's numbers near one (`privacy.scaling`).
* Squares that underflow make the norm of a vector too small by at most 2^-523, for up to 2^28 numbers.
* Contributions whose squares overflow count as zero: vectors, also concatenated ones, of norm 2^511 or more; moments
  of rows whose squares add up to 2^511 or more. `CrossMoments` adds the square of the sum of the rows.
* The norms of moments hold for users of at most 2^24 rows.
* A user with a negative scale counts as zero.

How sums become exact. Vectors are rounded to the grid number by number. Moments and products of rows are too large to
be made for each user. There the weighted rows are rounded, to multiples of the root of the grid's step. Products of
whole numbers are whole, and float64 adds them up exactly in one matrix product of a portion of users (`privacy.grid`).
So a user's contribution is the moment matrix of its rounded rows, exactly, although nobody computed it. Let n be the
length that a weighted contribution has at most, and let rounding move a user's weighted rows A by E, of norm epsilon.
* A^T A then moves by at most 2 |A| |E| + |E|^2, and |A|^2 <= n where |A| is the largest singular value.
* Terms that cancel are longer than their sum: |A|^2 <= ratio * n, with the ratio of a user's terms to its norm.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property
from typing import Any, ClassVar

import numpy as np
from numpy.typing import NDArray

from privrep.errors import InputError
from privrep.privacy.bounds import Contributions, UserContributions
from privrep.privacy.bounds import Losses as Losses
from privrep.privacy.grid import (
    add_rounded,
    as_integers,
    count_rounded,
    cut_evenly,
    measure_rounding,
    root_step,
)
from privrep.privacy.products import compute_norms_by_gram, compute_norms_by_product, round_factors
from privrep.privacy.scaling import scale_products, sum_squares
from privrep.typing import Array, Integers

AT_ONCE = 1 << 21  # numbers of users that are made float64 at a time: 16 MB
GRAM_ROWS = 1 << 12  # of a user, for norms of products by Gram matrices; wider or longer ones are multiplied out
GRAM_WIDTH = 1 << 22
FEW_ROWS = 1 << 9  # of products, of as many users or fewer, whose sum is exact


@dataclass(frozen=True)
class Vectors(UserContributions):
    """One vector per user, (users, size). For statistics no larger than the rows they were computed from."""

    acute: ClassVar[bool] = False
    values: NDArray[Any]

    def norms(self) -> Array:
        parts = [sum_squares(self.values[some].astype(np.float64, copy=False)) for some in self._cut_users()]
        return np.sqrt(np.concatenate([np.zeros(0), *parts])) * (1 + 1e-12)

    def roundings(self, norm: float, step: float) -> Array | float:
        return measure_rounding(self.values.shape[1], step)

    def grid_sum(self, weights: Array, step: float) -> Integers:
        return add_rounded(self.values, weights, step)

    def _cut_users(self) -> Iterator[slice]:
        """Yield all users at once, or few at a time where their numbers would be copied to be made float64."""
        users, size = self.values.shape
        return cut_evenly(users, users if self.values.dtype == np.float64 else AT_ONCE // max(size, 1))


@dataclass(frozen=True)
class Counts(UserContributions):
    """Histograms: user u adds one to each of the cells `cells[u]`. `cells` is (users, cells per user); -1 adds nothing.

    Acute: two vectors of counts have a non-negative inner product. A user's cells must differ from each other.
    """

    acute: ClassVar[bool] = True
    cells: NDArray[np.int64]
    size: int

    def norms(self) -> Array:
        used = self.cells >= 0
        ordered = np.sort(self.cells, axis=1)
        twice = ((ordered[:, 1:] == ordered[:, :-1]) & (ordered[:, 1:] >= 0)).any(axis=1)
        return np.where(twice, np.inf, np.sqrt(used @ np.ones(used.shape[1])))

    def roundings(self, norm: float, step: float) -> Array | float:
        return measure_rounding(self.size, step)

    def grid_sum(self, weights: Array, step: float) -> Integers:
        used = self.cells >= 0
        repeated = np.broadcast_to(np.rint(weights / step)[:, None], used.shape)
        return count_rounded(self.cells[used], repeated[used], self.size)


@dataclass(frozen=True)
class Products(UserContributions):
    """P_u = sum over the rows r of a user of left_r right_r^T, as a vector (p * q): gradients of layers, factored.

    `left` is (users, rows, p), `right` is (users, rows, q). A row that is absent is zero in one of them. The norm is
    taken from the Gram matrices of left and right, or from the product itself, whichever is cheaper.

    Formal guarantee. Terms may cancel, so errors are measured by the mass m = sum_r |left_r| |right_r|. A norm is
    reported as no less than m / 64. Let u = 2^-53.
    * Norms by Gram matrices. They give the norm squared but for (p + q + rows^2 + 8) u m^2, at most 2^-28 m^2 within
      GRAM_ROWS and GRAM_WIDTH. A true norm of m / 65 or more is then below the root of the computed square plus 33 *
      2^-28 m. A smaller one is below m / 64. Adding 1e-6 m is enough for the first.
    * Norms by the product. It gives the norm but for 2 (rows + p q) u m. 1e-6 m covers that for all sizes of a release.
    * Underflow. No row is longer than LARGEST_FACTOR, or it is brought near one. What underflows in one factor then
      changes the norm by less than 2^-459. float32 needs neither.
    * Rounding. A power of two makes the two factors of each weighted row equally long, but for a factor of 4. So no
      factor is longer than 2 sqrt(w |left_r| |right_r|). Over a user's R rows these add up to at most 2 sqrt(R w m).
      Factors are then rounded to multiples of the root of the step. That moves a left one by at most a, a right one by
      at most b. So the product moves by at most (a + b) 2 sqrt(R w m) + R a b.
    """

    acute: ClassVar[bool] = False
    left: NDArray[Any]
    right: NDArray[Any]

    def __post_init__(self) -> None:
        users, rows, _ = self.left.shape
        if self.right.shape[:2] != (users, rows):
            raise InputError(f"products take equal rows. Got shapes {self.left.shape} and {self.right.shape} instead.")

    @cached_property
    def _measured(self) -> tuple[Array, Array, tuple[NDArray[np.bool_], Array, Array, NDArray[np.int64]] | None]:
        """Return norms and masses over norms, (users,), a mask of users with long rows, and their scaled factors.

        The last are what `scale_products` makes of them. None stands for both where no user has any. Products of
        squares of float32 are in the range of float64.
        """
        norms, long, ratio = self._measure(self.left, self.right)
        large = long > 0
        if not large.any() or max(self.left.dtype.itemsize, self.right.dtype.itemsize) <= 4:
            return norms, ratio, None
        left, right, exponent = scale_products(self.left[large], self.right[large])
        scaled, _, ratio[large] = self._measure(left, right)
        norms[large] = np.ldexp(scaled, exponent)
        return norms, ratio, (large, left, right, exponent)

    def _measure(self, left: NDArray[Any], right: NDArray[Any]) -> Array:
        """Return norms, who has long rows as 1, and masses over norms, (3, users), of factors as in the class."""
        (users, rows, p), q = left.shape, right.shape[2]
        small = rows <= GRAM_ROWS and p + q <= GRAM_WIDTH
        norms = compute_norms_by_gram if small and rows * (p + q) <= 2 * p * q else compute_norms_by_product
        size = rows * (p + q) if norms is compute_norms_by_gram else max(rows * (p + q), p * q)
        parts = [
            norms(*(factor[some].astype(np.float64, order="C") for factor in (left, right)))
            for some in cut_evenly(users, AT_ONCE // max(size, 1))
        ]
        return np.concatenate([np.zeros((3, 0)), *parts], axis=1)

    def norms(self) -> Array:
        return self._measured[0].copy()

    def roundings(self, norm: float, step: float) -> Array | float:
        (_, rows, p), q = self.left.shape, self.right.shape[2]
        a, b = (measure_rounding(size, root_step(step)) for size in (p, q))
        rounding: Array = (a + b) * 2 * np.sqrt(rows * norm * np.minimum(self._measured[1], 65.0)) + rows * a * b
        return rounding

    def grid_sum(self, weights: Array, step: float) -> Integers:
        (users, rows, p), q = self.left.shape, self.right.shape[2]
        used, total = np.flatnonzero(weights > 0), np.zeros((p, q), np.int64)
        left, right, scaled = self.left, self.right, self._measured[2]
        if scaled is not None:
            large, *factors, exponent = scaled
            left, right, weights = left.astype(np.float64), right.astype(np.float64), weights.copy()
            left[large], right[large], weights[large] = *factors, np.ldexp(weights[large], exponent)
        left, right = (np.ascontiguousarray(array if len(used) == users else array[used]) for array in (left, right))
        left, right, each = left.reshape(-1, p), right.reshape(-1, q), np.repeat(weights[used], rows)[:, None]
        for some in cut_evenly(len(each), FEW_ROWS):
            a, b = round_factors(left[some], right[some], each[some], root_step(step))
            total += as_integers(a.T @ b)
        return total.reshape(-1)


@dataclass(frozen=True)
class NonNegative(UserContributions):
    """One vector per user without negative entries, (users, size), so acute; users with one count as zero."""

    acute: ClassVar[bool] = True
    values: Array

    def norms(self) -> Array:
        norms = np.sqrt(sum_squares(self.values.astype(np.float64, copy=False))) * (1 + 1e-12)
        return np.where((self.values >= 0).all(axis=1), norms, np.inf)

    def roundings(self, norm: float, step: float) -> Array | float:
        return measure_rounding(self.values.shape[1], step)

    def grid_sum(self, weights: Array, step: float) -> Integers:
        return add_rounded(self.values, weights, step)


@dataclass(frozen=True)
class BatchTerm:
    """One vector of the whole batch, (size,): any function of it, a gradient. Everyone may have changed all of it."""

    acute: ClassVar[bool] = False
    terms_per_user: ClassVar[float | None] = 1.0
    rows_per_user: ClassVar[int | None] = None
    vector: NDArray[Any]

    def norms(self) -> Array:
        return Vectors(self.vector[None]).norms()

    def roundings(self, norm: float, step: float) -> Array | float:
        return 0.0

    def grid_sum(self, weights: Array, step: float) -> Integers:
        return Vectors(self.vector[None]).grid_sum(weights, step)


@dataclass(frozen=True)
class _Combined:
    """Base of several contributions of the same users, or of several terms of the same batch."""

    parts: tuple[Contributions, ...]

    @property
    def terms_per_user(self) -> float | None:
        """Return the largest number of terms of any part that is of the whole batch, None if none is.

        Terms of equal number are the same terms, changed by the same users.
        """
        return max((each for part in self.parts if (each := part.terms_per_user) is not None), default=None)

    @property
    def rows_per_user(self) -> int | None:
        """Return the number of rows a user for which terms were counted. Raise InputError if parts disagree."""
        counted = {each for part in self.parts if (each := part.rows_per_user) is not None}
        if len(counted) > 1:
            raise InputError(f"terms were counted for different numbers of rows a user: {sorted(counted)}.")
        return counted.pop() if counted else None


@dataclass(frozen=True)
class Concatenated(_Combined):
    """Several contributions of the same users side by side, as one vector. Acute if all of them are."""

    @property
    def acute(self) -> bool:
        return all(part.acute for part in self.parts)

    def norms(self) -> Array:
        return np.sqrt(_add_in_order([_check_norms(part) ** 2 for part in self.parts])) * (1 + 1e-12)

    def roundings(self, norm: float, step: float) -> Array | float:
        parts = [np.asarray(part.roundings(norm, step)) for part in self.parts]
        if self.acute:  # some may be acute after rounding and others not: each moves the whole by what it moves by
            return _add_in_order(parts)
        return np.sqrt(_add_in_order([np.square(part) for part in parts]))

    def grid_sum(self, weights: Array, step: float) -> Integers:
        return np.concatenate([part.grid_sum(weights, step) for part in self.parts])


@dataclass(frozen=True)
class Summed(_Combined):
    """The sum of several contributions of the same users, its norm bounded by the sum of their norms."""

    @property
    def acute(self) -> bool:
        """Return False, to be safe: parts of different kinds need not be acute to each other."""
        return False

    def norms(self) -> Array:
        return _add_in_order([_check_norms(part) for part in self.parts]) * (1 + 1e-12)

    def roundings(self, norm: float, step: float) -> Array | float:
        return _add_in_order([np.asarray(part.roundings(norm, step)) for part in self.parts])

    def grid_sum(self, weights: Array, step: float) -> Integers:
        return np.sum([part.grid_sum(weights, step) for part in self.parts], axis=0)


@dataclass(frozen=True)
class NormAtMost:
    """One number a user: 1/2 if its contribution's norm is at most `than`, else -1/2.

    So a sum over n users is their number of short contributions less n/2, and replacing a user moves it by at most 1.
    """

    acute: ClassVar[bool] = False
    of: Contributions
    than: float

    @property
    def terms_per_user(self) -> float | None:
        return self.of.terms_per_user

    @property
    def rows_per_user(self) -> int | None:
        return self.of.rows_per_user

    def norms(self) -> Array:
        return np.full(len(self.of.norms()), 0.5)

    def roundings(self, norm: float, step: float) -> Array | float:
        return 0.0 if self.terms_per_user is not None else measure_rounding(1, step)

    def grid_sum(self, weights: Array, step: float) -> Integers:
        return add_rounded(np.where(self.of.norms() <= self.than, 0.5, -0.5)[:, None], weights, step)


def _check_norms(part: Contributions) -> Array:
    """Return the norms of a part, (users,), infinite where one is none: negative or NaN."""
    norms = part.norms()
    return norms if (norms >= 0).all() else np.where(norms >= 0, norms, np.inf)


def _add_in_order(parts: list[Array]) -> Array:
    """Return the sum of arrays of one shape, such as (users,), one after the other.

    NumPy would add many parts of a single user in another order than several users' parts.
    """
    total = parts[0]
    for part in parts[1:]:
        total = total + part
    return total
