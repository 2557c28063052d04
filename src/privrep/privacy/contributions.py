"""Kinds of contributions, each in the cheapest form that gives exact norms and sums (see `bounds.Contributions`).

Formal guarantee. Norms are right for numbers of any size, by float64 alone where that is proven here, else by powers of
two that bring a user's numbers near one (`privacy.scaling`).
* Squares that underflow make the norm of a vector too small by at most 2^-523, for up to 2^28 numbers.
* Contributions whose squares overflow count as zero: vectors, also concatenated ones, of norm 2^511 or more; moments
  of rows whose squares add up to 2^511 or more. `CrossMoments` adds the square of the sum of the rows.
* The norms of moments hold for users of at most 2^24 rows.
* A user with a negative scale counts as zero.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property
from typing import Any, ClassVar

import numpy as np
from numpy.typing import NDArray

from privrep.errors import InputError
from privrep.privacy.bounds import MAX_ROWS_PER_SUM, Contributions, UserContributions
from privrep.privacy.bounds import Losses as Losses
from privrep.privacy.products import compute_norms_by_gram, compute_norms_by_product
from privrep.privacy.scaling import scale_moments, scale_products, sum_squares
from privrep.typing import Array

AT_ONCE = 1 << 21  # numbers of users that are made float64 at a time: 16 MB
GRAM_ROWS = 1 << 12  # of a user, for norms of products by Gram matrices; wider or longer ones are multiplied out
GRAM_WIDTH = 1 << 22
SUM_ROWS = 1 << 11  # rows of products that are added up before others
FEW_ROWS = 1 << 9  # of them, in one matrix product


@dataclass(frozen=True)
class Vectors(UserContributions):
    """One vector per user, (users, size). For statistics no larger than the rows they were computed from."""

    acute: ClassVar[bool] = False
    values: NDArray[Any]

    def norms(self) -> Array:
        parts = [sum_squares(self.values[some].astype(np.float64, copy=False)) for some in self._cut_users()]
        return np.sqrt(np.concatenate([np.zeros(0), *parts])) * (1 + 1e-12)

    def weighted_sum(self, weights: Array) -> Array:
        total = np.zeros(self.values.shape[1])
        for some in self._cut_users():
            values, each = self.values[some].astype(np.float64, copy=False), weights[some]
            total += each @ (values if each.all() else np.where(each[:, None] > 0, values, 0.0))
        return total

    def _cut_users(self) -> Iterator[slice]:
        """Yield all users at once, or few at a time where their numbers would be copied to be made float64."""
        users, size = self.values.shape
        return _cut_portions(users, users if self.values.dtype == np.float64 else AT_ONCE // max(size, 1))


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

    def weighted_sum(self, weights: Array) -> Array:
        used = self.cells >= 0
        repeated = np.broadcast_to(weights[:, None], self.cells.shape)
        return np.bincount(self.cells[used], repeated[used], minlength=self.size).astype(np.float64, copy=False)


@dataclass(frozen=True)
class CrossMoments(UserContributions):
    """Z_u = scale_u * (s s^T - A^T A) with s the sum of the rows of A: the sum over pairs of different rows.

    `rows` holds A of each user, (users, rows, d). Sums and norms are of the packed upper triangle (`pack`), an
    isometry. The terms s s^T and A^T A may cancel, so a norm is reported as no less than 1/64 of their size. Otherwise
    a user could make the rounding error of the sum large against its own clipped contribution.
    """

    acute: ClassVar[bool] = False
    rows: NDArray[Any]
    scale: Array

    def _sum_rows(self) -> Array:
        """Return the sum of each user's rows, (users, d)."""
        return self.rows.astype(np.float64, copy=False).sum(axis=1)

    def norms(self) -> Array:
        A, scale = scale_moments(self.rows, self.scale)
        s = A.sum(axis=1)
        gram = A @ A.transpose(0, 2, 1) if A.shape[1] <= A.shape[2] else A.transpose(0, 2, 1) @ A
        square, cross = sum_squares(s), A @ s[:, :, None]
        norm_squared = square**2 - 2 * sum_squares(cross) + sum_squares(gram)
        mass = square + sum_squares(A)
        norms = scale * np.maximum(np.sqrt(np.maximum(norm_squared, 0.0)) + 1e-6 * mass, mass / 64)
        return np.where(np.isfinite(norm_squared), norms, np.inf)  # a term that overflowed says nothing of the others

    def weighted_sum(self, weights: Array) -> Array:
        used = weights > 0
        scaled = np.where(used, weights * self.scale, 0.0)
        total = np.zeros((self.rows.shape[2], self.rows.shape[2]))
        for part in _weight_rows(self.rows, scaled, used):
            total -= part.T @ part
        s = np.where(used[:, None], self._sum_rows(), 0.0) * np.sqrt(scaled)[:, None]
        total += s.T @ s
        return pack(total)


@dataclass(frozen=True)
class RowMoments(UserContributions):
    """S_u = scale_u * A^T A of the rows A of each user, (users, rows, d), as packed triangles.

    Acute: two positive semi-definite matrices have a non-negative inner product.
    """

    acute: ClassVar[bool] = True
    rows: NDArray[Any]
    scale: Array

    def norms(self) -> Array:
        A, scale = scale_moments(self.rows, self.scale)
        gram = A @ A.transpose(0, 2, 1) if A.shape[1] <= A.shape[2] else A.transpose(0, 2, 1) @ A
        return scale * np.sqrt(sum_squares(gram)) * (1 + 1e-9)

    def weighted_sum(self, weights: Array) -> Array:
        total = np.zeros((self.rows.shape[2], self.rows.shape[2]))
        for part in _weight_rows(self.rows, weights * self.scale, weights > 0):
            total += part.T @ part
        return pack(total)


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
    * Sums. At most SUM_ROWS rows of weighted terms, added up in any order, err by 2^-41.9 of their mass. Adding at most
      2^12 such sums to each other errs by 2^-41. 64 times the two is 2^-34.4 of the norms.
    """

    acute: ClassVar[bool] = False
    left: NDArray[Any]
    right: NDArray[Any]

    def __post_init__(self) -> None:
        users, rows, _ = self.left.shape
        if self.right.shape[:2] != (users, rows):
            raise InputError(f"products take equal rows. Got shapes {self.left.shape} and {self.right.shape} instead.")
        if users * rows > SUM_ROWS << 12:
            raise InputError(f"one call takes at most {SUM_ROWS << 12:,} rows. Got {users * rows:,}; use fewer slots.")

    @cached_property
    def _measured(self) -> tuple[Array, tuple[NDArray[np.bool_], Array, Array, NDArray[np.int64]] | None]:
        """Return norms, (users,), a mask of users with long rows, and what `scale_products` makes of their factors.

        None stands for the rest where no user has any. Products of squares of float32 are in the range of float64.
        """
        norms, long = self._measure(self.left, self.right)
        large = long > 0
        if not large.any() or max(self.left.dtype.itemsize, self.right.dtype.itemsize) <= 4:
            return norms, None
        left, right, exponent = scale_products(self.left[large], self.right[large])
        norms[large] = np.ldexp(self._measure(left, right)[0], exponent)
        return norms, (large, left, right, exponent)

    def _measure(self, left: NDArray[Any], right: NDArray[Any]) -> Array:
        """Return norms, and who has long rows as 1, (2, users), of factors as in the class."""
        (users, rows, p), q = left.shape, right.shape[2]
        small = rows <= GRAM_ROWS and p + q <= GRAM_WIDTH
        norms = compute_norms_by_gram if small and rows * (p + q) <= 2 * p * q else compute_norms_by_product
        size = rows * (p + q) if norms is compute_norms_by_gram else max(rows * (p + q), p * q)
        parts = [
            norms(*(factor[some].astype(np.float64, order="C") for factor in (left, right)))
            for some in _cut_portions(users, AT_ONCE // max(size, 1))
        ]
        return np.concatenate([np.zeros((2, 0)), *parts], axis=1)

    def norms(self) -> Array:
        return self._measured[0].copy()

    def weighted_sum(self, weights: Array) -> Array:
        (users, rows, p), q = self.left.shape, self.right.shape[2]
        used, total = np.flatnonzero(weights > 0), np.zeros((p, q))
        left, right, scaled = self.left, self.right, self._measured[1]
        if scaled is not None:
            large, *factors, exponent = scaled
            left, right, weights = left.astype(np.float64), right.astype(np.float64), weights.copy()
            left[large], right[large], weights[large] = *factors, np.ldexp(weights[large], exponent)
        left, right = (array if len(used) == users else array[used] for array in (left, right))
        left, right, each = left.reshape(-1, p), right.reshape(-1, q), np.repeat(weights[used], rows)[:, None]
        for some in _cut_portions(len(each), SUM_ROWS):
            total += _multiply_weighted(left[some], right[some], each[some])
        return total.ravel()


def _multiply_weighted(left: NDArray[Any], right: NDArray[Any], each: Array) -> Array:
    """Return the sum over rows of each left_r right_r^T, (p, q).

    Few rows are made float64 at a time, so that wide ones stay in the cache. Weights go to the narrower side.

    Args:
        left: (rows, p).
        right: (rows, q).
        each: weights, (rows, 1).
    """
    total, narrow = np.zeros((left.shape[1], right.shape[1])), left.shape[1] <= right.shape[1]
    for some in _cut_portions(len(each), FEW_ROWS):
        a, b = (left[some] * each[some], right[some]) if narrow else (left[some], right[some] * each[some])
        total += a.astype(np.float64, copy=False).T @ b.astype(np.float64, copy=False)
    return total


@dataclass(frozen=True)
class NonNegative(UserContributions):
    """One vector per user without negative entries, (users, size), so acute; users with one count as zero."""

    acute: ClassVar[bool] = True
    values: Array

    def norms(self) -> Array:
        norms = np.sqrt(sum_squares(self.values.astype(np.float64, copy=False))) * (1 + 1e-12)
        return np.where((self.values >= 0).all(axis=1), norms, np.inf)

    def weighted_sum(self, weights: Array) -> Array:
        return weights @ np.where(weights[:, None] > 0, self.values, 0.0)


@dataclass(frozen=True)
class BatchTerm:
    """One vector of the whole batch, (size,): any function of it, a gradient. Everyone may have changed all of it."""

    acute: ClassVar[bool] = False
    terms_per_user: ClassVar[float | None] = 1.0
    rows_per_user: ClassVar[int | None] = None
    vector: NDArray[Any]

    def norms(self) -> Array:
        return Vectors(self.vector[None]).norms()

    def weighted_sum(self, weights: Array) -> Array:
        return Vectors(self.vector[None]).weighted_sum(weights)


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

    def weighted_sum(self, weights: Array) -> Array:
        return np.concatenate([part.weighted_sum(weights) for part in self.parts])


@dataclass(frozen=True)
class Summed(_Combined):
    """The sum of several contributions of the same users, its norm bounded by the sum of their norms."""

    @property
    def acute(self) -> bool:
        """Return False, to be safe: parts of different kinds need not be acute to each other."""
        return False

    def norms(self) -> Array:
        return _add_in_order([_check_norms(part) for part in self.parts]) * (1 + 1e-12)

    def weighted_sum(self, weights: Array) -> Array:
        return _add_in_order([part.weighted_sum(weights) for part in self.parts])


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

    def weighted_sum(self, weights: Array) -> Array:
        return np.array([weights @ np.where(self.of.norms() <= self.than, 0.5, -0.5)])


def _check_norms(part: Contributions) -> Array:
    """Return the norms of a part, (users,), infinite where one is none: negative or NaN."""
    norms = part.norms()
    return norms if (norms >= 0).all() else np.where(norms >= 0, norms, np.inf)


def _add_in_order(parts: list[Array]) -> Array:
    """Return the sum of arrays of one shape, such as (users,), one after the other.

    NumPy would add many parts of a single user in another order than several users' parts.
    """
    total = parts[0].copy()
    for part in parts[1:]:
        total += part
    return total


def _cut_portions(count: int, most: int) -> Iterator[slice]:
    """Yield slices from 0 to `count`, at most `most` at a time."""
    return (slice(start, start + max(most, 1)) for start in range(0, count, max(most, 1)))


def _weight_rows(rows: NDArray[Any], weights: Array, used: NDArray[np.bool_]) -> Iterator[Array]:
    """Yield rows of all used users times the root of their user's weight, a bounded number at a time.

    Args:
        rows: (users, rows, d).
        weights: (users,).
        used: (users,), a mask; other users' rows count as zeros.
    """
    users, size, d = rows.shape
    flat = (np.where(used[:, None, None], rows, 0) if not used.all() else rows).reshape(-1, d)
    root = np.repeat(np.sqrt(np.where(used, weights, 0.0)), size)
    for start in range(0, users * size, MAX_ROWS_PER_SUM):
        part = slice(start, start + MAX_ROWS_PER_SUM)
        yield flat[part] * root[part, None]


def packed_size(d: int) -> int:
    """Return the length of a packed symmetric matrix (d, d)."""
    return d * (d + 1) // 2


def pack(matrix: Array) -> Array:
    """Return upper triangles of symmetric matrices (..., d, d) as vectors, off-diagonals times sqrt 2: an isometry."""
    d = matrix.shape[-1]
    rows, columns = np.triu_indices(d)
    return matrix[..., rows, columns] * np.where(rows == columns, 1.0, np.sqrt(2.0))


def unpack(vector: Array) -> Array:
    """Return the symmetric matrix (d, d) of a packed triangle, (d * (d + 1) / 2,)."""
    d = int((np.sqrt(8 * vector.shape[-1] + 1) - 1) / 2)
    rows, columns = np.triu_indices(d)
    matrix = np.zeros((d, d))
    matrix[rows, columns] = vector * np.where(rows == columns, 1.0, np.sqrt(0.5))
    return matrix + np.triu(matrix, 1).T
