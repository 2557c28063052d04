"""Moments of users' rows as contributions, and symmetric matrices as vectors.

The largest kinds: a user's matrix is never made (see `contributions` for how their sums are exact all the same).
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import cached_property
from typing import Any, ClassVar

import numpy as np
from numpy.typing import NDArray

from privrep.privacy.bounds import MAX_ROWS_PER_SUM, UserContributions
from privrep.privacy.grid import (
    CANCELLING,
    PORTION,
    as_integers,
    cut_evenly,
    measure_rounding,
    root_step,
    round_weighted,
)
from privrep.privacy.scaling import scale_moments, sum_squares
from privrep.typing import Array, Integers


@dataclass(frozen=True)
class CrossMoments(UserContributions):
    """Z_u = scale_u * (s s^T - A^T A) with s the sum of the rows of A: the sum over pairs of different rows.

    `rows` holds A of each user, (users, rows, d). Sums and norms are of the whole matrix, (d * d). The terms s s^T and
    A^T A may cancel, so a norm is reported as no less than 1/64 of their size. Otherwise a user could make rounding
    errors large against its own clipped contribution. Sum and rows are rounded each by itself.
    """

    acute: ClassVar[bool] = False
    rows: NDArray[Any]
    scale: Array

    @cached_property
    def _measured(self) -> tuple[Array, Array]:
        """Return norms, (users,), and what is at least the terms' length over the norm, (users,)."""
        A, scale = scale_moments(self.rows, self.scale)
        s = A.sum(axis=1)
        gram = A @ A.transpose(0, 2, 1) if A.shape[1] <= A.shape[2] else A.transpose(0, 2, 1) @ A
        square, cross = sum_squares(s), A @ s[:, :, None]
        norm_squared = square**2 - 2 * sum_squares(cross) + sum_squares(gram)
        mass = square + sum_squares(A)
        norms = np.maximum(np.sqrt(np.maximum(norm_squared, 0.0)) + 1e-6 * mass, mass / 64)
        ratio = np.where(norms > 0, mass / np.where(norms > 0, norms, 1.0), 1.0) * (1 + 1e-6)
        return np.where(np.isfinite(norm_squared), scale * norms, np.inf), ratio  # else a term overflowed

    def norms(self) -> Array:
        return self._measured[0].copy()

    def roundings(self, norm: float, step: float) -> Array | float:
        _, m, d = self.rows.shape
        length = np.sqrt(np.minimum(self._measured[1], 65.0) * norm)
        sums, rows = (measure_rounding(size, root_step(step)) for size in (d, m * d))
        moved = sums + m**1.5 * 2.0**-52 * length  # float64 adds up the rows before their sum is rounded
        rounding: Array = 2 * length * (moved + rows) + moved**2 + rows**2
        return rounding

    def grid_sum(self, weights: Array, step: float) -> Integers:
        factors, d = _weigh_roots(weights, self.scale, step), self.rows.shape[2]
        total = -_add_moments(self.rows, factors, CANCELLING)
        for some in cut_evenly(len(weights), CANCELLING):
            sums = np.ascontiguousarray(self.rows[some], dtype=np.float64).sum(axis=1)
            s = round_weighted(sums, factors[some, None])
            total += as_integers(s.T @ s)
        return total.reshape(d * d)


@dataclass(frozen=True)
class RowMoments(UserContributions):
    """S_u = scale_u * A^T A of the rows A of each user, (users, rows, d), as whole matrices, (d * d).

    Acute: two positive semi-definite matrices have a non-negative inner product. Those of rounded rows are such, too.
    """

    acute: ClassVar[bool] = True
    rows: NDArray[Any]
    scale: Array

    def norms(self) -> Array:
        A, scale = scale_moments(self.rows, self.scale)
        gram = A @ A.transpose(0, 2, 1) if A.shape[1] <= A.shape[2] else A.transpose(0, 2, 1) @ A
        return scale * np.sqrt(sum_squares(gram)) * (1 + 1e-9)

    def roundings(self, norm: float, step: float) -> Array | float:
        moved = measure_rounding(self.rows.shape[1] * self.rows.shape[2], root_step(step))
        return 2 * math.sqrt(norm) * moved + moved**2

    def grid_sum(self, weights: Array, step: float) -> Integers:
        return _add_moments(self.rows, _weigh_roots(weights, self.scale, step), PORTION).reshape(-1)


def _weigh_roots(weights: Array, scale: Array, step: float) -> Array:
    """Return what rows are multiplied with for moments on the grid, (users,), zero for users of weight zero."""
    used = weights > 0
    return np.sqrt(np.where(used, weights, 0.0)) * np.sqrt(np.where(used, scale, 0.0)) / root_step(step)


def _add_moments(rows: NDArray[Any], factors: Array, portion: int) -> Integers:
    """Return the sum over users of Q^T Q, (d, d), Q a user's rows times its factor, rounded: exactly.

    Args:
        rows: (users, m, d).
        factors: (users,); users of factor zero count as zero.
        portion: number of users whose terms float64 adds up exactly.
    """
    users, m, d = rows.shape
    total = np.zeros((d, d), np.int64)
    for some in cut_evenly(users, max(min(portion, MAX_ROWS_PER_SUM // max(m, 1)), 1)):
        for part in cut_evenly(m, MAX_ROWS_PER_SUM):
            Q = round_weighted(rows[some, part], factors[some, None, None]).reshape(-1, d)
            total += as_integers(Q.T @ Q)
    return total


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


def symmetrise(vector: Array) -> Array:
    """Return the symmetric matrix (d, d) of released moments, (d * d,): the mean of what came and its transpose.

    Off the diagonal its noise has a standard deviation smaller by sqrt(2), as if the triangle had been released by an
    isometry.
    """
    d = math.isqrt(vector.shape[-1])
    matrix = vector.reshape(d, d)
    return (matrix + matrix.T) / 2
