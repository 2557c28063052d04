"""Kinds of contributions, each in the cheapest form that gives exact norms and sums (see `bounds.Contributions`)."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar

import numpy as np
from numpy.typing import NDArray

from privrep.privacy.bounds import MAX_ROWS_PER_SUM, Array


@dataclass(frozen=True)
class Vectors:
    """One vector per user, (users, size). For statistics no larger than the rows they were computed from."""

    acute: ClassVar[bool] = False
    values: NDArray[Any]

    def norms(self) -> Array:
        values = self.values.astype(np.float64, copy=False)
        return np.sqrt(np.einsum("us,us->u", values, values)) * (1 + 1e-12)

    def weighted_sum(self, weights: Array) -> Array:
        values = self.values.astype(np.float64, copy=False)
        if not weights.all():
            values = np.where(weights[:, None] > 0, values, 0.0)
        return weights @ values


@dataclass(frozen=True)
class Counts:
    """Histograms: user u adds one to each of the cells `cells[u]`, an array (users, cells per user); -1 adds nothing.

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
class CrossMoments:
    """Z_u = scale_u * (s s^T - A^T A) with s the sum of the rows of A: the sum over pairs of different rows.

    `rows` is A of all users, (users, rows, d). Sums and norms are those of the packed upper triangle (`pack`), an
    isometry. Since s s^T and A^T A may cancel, a norm is reported as no less than 1/64 of the size of the two terms:
    otherwise a user could make the rounding error of the sum large against its own clipped contribution.
    """

    acute: ClassVar[bool] = False
    rows: NDArray[Any]
    scale: Array

    def _sums(self) -> Array:
        return self.rows.astype(np.float64, copy=False).sum(axis=1)

    def norms(self) -> Array:
        A = self.rows.astype(np.float64, copy=False)
        s = self._sums()
        gram = A @ A.transpose(0, 2, 1) if A.shape[1] <= A.shape[2] else A.transpose(0, 2, 1) @ A
        square = np.einsum("ud,ud->u", s, s)
        cross = np.einsum("umd,ud->um", A, s)
        gram_square = np.einsum("uab,uab->u", gram, gram)
        norm_squared = square**2 - 2 * np.einsum("um,um->u", cross, cross) + gram_square
        mass = square + np.einsum("umd,umd->u", A, A)
        return self.scale * np.maximum(np.sqrt(np.maximum(norm_squared, 0.0)) + 1e-6 * mass, mass / 64)

    def weighted_sum(self, weights: Array) -> Array:
        used = weights > 0
        users, size, d = self.rows.shape
        total = np.zeros((d, d))
        root = np.sqrt(np.where(used, weights * self.scale, 0.0))
        s = np.where(used[:, None], self._sums(), 0.0) * root[:, None]
        flat = (np.where(used[:, None, None], self.rows, 0) if not used.all() else self.rows).reshape(-1, d)
        root_rows = np.repeat(root, size)
        for start in range(0, users * size, MAX_ROWS_PER_SUM):
            part = slice(start, start + MAX_ROWS_PER_SUM)
            scaled = flat[part] * root_rows[part, None]
            total -= scaled.T @ scaled
        total += s.T @ s
        return pack(total)


def packed_size(d: int) -> int:
    return d * (d + 1) // 2


def pack(matrix: Array) -> Array:
    """Upper triangles of symmetric matrices (..., d, d) as vectors, off-diagonals times sqrt 2: an isometry."""
    d = matrix.shape[-1]
    rows, columns = np.triu_indices(d)
    return matrix[..., rows, columns] * np.where(rows == columns, 1.0, np.sqrt(2.0))


def unpack(vector: Array) -> Array:
    """The symmetric matrix of a packed triangle."""
    d = int((np.sqrt(8 * vector.shape[-1] + 1) - 1) / 2)
    rows, columns = np.triu_indices(d)
    matrix = np.zeros((d, d))
    matrix[rows, columns] = vector * np.where(rows == columns, 1.0, np.sqrt(0.5))
    return matrix + np.triu(matrix, 1).T
