"""Kronecker products of two moment matrices, one pair a user: contributions to a least squares problem in U."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, ClassVar

import numpy as np
from numpy.typing import NDArray

from privrep.privacy.bounds import MAX_ROWS_PER_SUM, UserContributions
from privrep.privacy.grid import as_integers, measure_rounding, root_step, round_weighted
from privrep.privacy.products import balance
from privrep.privacy.scaling import read_scale, scale_near_one
from privrep.typing import Array, Integers

_IN_CACHE, _IN_MEMORY = 1 << 20, 1 << 22  # entries of users' matrices that stand together; and where those are large
_FEW = 64  # users for whose sum it is worth going through the whole total


@dataclass(frozen=True)
class Kronecker(UserContributions):
    """scale_u * (L^T L) kron (R^T R) of users' small L, (p, k), and rows R, (m, d), as whole matrices, (kd * kd).

    Acute: both factors are positive semi-definite, hence so is their product. Two such matrices have a non-negative
    inner product. The Frobenius norm of a Kronecker product is the product of the norms, so no user's matrix is ever
    made. A sum over users is one product of all users' L^T L with all users' R^T R.

    Rounding. A power of two makes the two factors of the weighted product equally long, but for a factor of 4: each is
    at most twice the root of the product's norm n. Both are rounded to multiples of the root of the step, which moves
    them by at most a and b. So the product moves by at most 2 sqrt(n) (a + b) + a b. Rounded products need not be
    acute, so this counts sqrt(2) times.

    Made by `make_kronecker`, which brings every user's L and R to a size near one, by powers of two. So no product
    under- or overflows on its way. A scale that is negative or NaN becomes infinite, and its user counts as zero. So
    does one whose scale overflows with those powers.
    """

    acute: ClassVar[bool] = True
    left: Array  # (users, p, k)
    right: NDArray[Any]  # (users, m, d)
    scale: Array  # (users,)
    left_size: Array  # (users,): norms of L^T L
    right_size: Array  # (users,): norms of R^T R

    @property
    def sizes(self) -> Array:
        """Return upper bounds of the norms before they are scaled, (users,)."""
        return self.left_size * self.right_size * (1 + 1e-9)

    def norms(self) -> Array:
        return self.scale * self.sizes

    def roundings(self, norm: float, step: float) -> Array | float:
        a, b = (measure_rounding(factor.shape[2] ** 2, root_step(step)) for factor in (self.left, self.right))
        return math.sqrt(2) * (2 * math.sqrt(norm) * (a + b) + a * b)

    def grid_sum(self, weights: Array, step: float) -> Integers:
        k, d = self.left.shape[2], self.right.shape[2]
        above, root = np.triu_indices(k), root_step(step)
        total = np.zeros((len(above[0]), d * d), np.int64)
        for part in _cut_users(len(self.scale), d * d):
            used = np.flatnonzero(weights[part] > 0)
            scaled = (weights[part] * self.scale[part])[used]
            first, second = balance(self.left_size[part][used], self.right_size[part][used], scaled)
            small = round_weighted(_make_grams(self.left[part][used])[:, *above], (first / root)[:, None])
            rows = self.right[part] if len(used) == len(self.right[part]) else self.right[part][used]
            large = _make_grams(rows * np.sqrt(second / root)[:, None, None]).reshape(-1, d * d)
            total += as_integers(small.T @ np.rint(large, out=large))
        matrix = np.empty((k, d, k, d), np.int64)
        for a, b, block in zip(*above, total.reshape(-1, d, d), strict=True):
            matrix[a, :, b] = matrix[b, :, a] = block
        return matrix.reshape(-1)


def make_kronecker(left: NDArray[Any], right: NDArray[Any], scale: Array) -> Kronecker:
    """Return the contributions of users with these factors.

    Args:
        left: L of each user, (users, p, k).
        right: R of each user, (users, m, d).
        scale: (users,).
    """
    left, left_exponent = scale_near_one(np.ascontiguousarray(left, dtype=np.float64))
    right, right_exponent = scale_near_one(np.ascontiguousarray(right))
    scale = np.ldexp(read_scale(scale), 2 * (left_exponent + right_exponent))
    return Kronecker(left, right, scale, _measure_grams(left), _measure_grams(right))


def _measure_grams(rows: NDArray[Any]) -> Array:
    """Return the Frobenius norm of each user's R^T R, (users,), for R (users, m, d)."""
    users, m, d = rows.shape
    found = np.empty(users)
    for part in _cut_users(users, max(min(m, d) ** 2, m)):
        A = rows[part].astype(np.float64, copy=False)
        gram = A @ A.transpose(0, 2, 1) if m <= d else _make_grams(A)
        found[part] = np.sqrt((gram.reshape(len(A), -1) ** 2).sum(axis=1))
    return found


def _make_grams(rows: NDArray[Any]) -> Array:
    """Return R^T R of each user, (users, d, d), one product per user, of a bounded number of rows."""
    total = None
    for start in range(0, rows.shape[1], MAX_ROWS_PER_SUM):
        A = rows[:, start : start + MAX_ROWS_PER_SUM].astype(np.float64, copy=False)
        square = A.transpose(0, 2, 1) @ A
        total = square if total is None else total + square
    return np.zeros((len(rows), rows.shape[2], rows.shape[2])) if total is None else total


def _cut_users(users: int, cells: int) -> Iterator[slice]:
    """Yield slices of users, few enough that `cells` numbers of each can stand together, and few enough for one sum."""
    cells = max(cells, 1)
    step = min(max(_IN_CACHE // cells, min(_FEW, _IN_MEMORY // cells), 1), MAX_ROWS_PER_SUM)
    yield from (slice(start, start + step) for start in range(0, users, step))
