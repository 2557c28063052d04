"""Positive definite systems of many users at once, by elimination, and numbers read off their inverses.

Users come last, so that every operation is one long loop. Each user's numbers are a function of its own to the last
bit. There are additions, multiplications and divisions alone, always in the same order (see `least_squares`).
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

from privrep.typing import Floats

MANY = 32  # unknowns from which on LAPACK inverts a system faster than long loops do, if users are few


@dataclass(frozen=True)
class Systems:
    """Systems A, (n, n, ...): A^-1 = T^T D^-1 T, T triangular with ones on its diagonal; or T is the inverse itself."""

    T: Floats  # (n, n, ...)
    pivots: Floats | None  # (n, ...): D; None: T is the inverse

    def solve(self, right: Floats) -> Floats:
        """Return A^-1 times (n, ...)."""
        if self.pivots is None:
            return self._multiply(right)
        half = self._multiply(right) / self.pivots
        found = half.copy()
        for i in range(1, len(half)):
            found[:i] += self.T[i, :i] * half[i]
        return found

    def inverse_diagonal(self) -> Floats:
        """Return the diagonal of A^-1, (n, ...)."""
        n = len(self.T)
        if self.pivots is None:
            return self.T[np.arange(n), np.arange(n)]
        found = 1 / self.pivots
        for i in range(1, n):
            found[:i] += self.T[i, :i] * self.T[i, :i] / self.pivots[i]
        return found

    def quadratic_forms(self, right: Floats) -> Floats:
        """Return <b, A^-1 b> for each of (n, ...) b."""
        half = self._multiply(right)
        each = right * half if self.pivots is None else half * half / self.pivots
        total = each[0].copy()
        for part in each[1:]:
            total += part
        return total

    def _multiply(self, right: Floats) -> Floats:
        """Return T times (n, ...)."""
        if self.pivots is None:
            found = self.T[:, 0] * right[0]
            for k in range(1, len(right)):
                found += self.T[:, k] * right[k]
            return found
        found = right.copy()
        for k in range(len(right) - 1):
            found[k + 1 :] += self.T[k + 1 :, k] * right[k]
        return found


def eliminate(n: int, shape: tuple[int, ...], row: Callable[[int], Floats]) -> Systems:
    """Return systems of n unknowns each. Numbers that are not finite stay within their user.

    Rows of T follow those of A in one array. By symmetry, the columns of row a left of the diagonal are not needed. The
    columns of T are zero from the pivot on, so that the part that a pivot changes lies in one piece.

    Args:
        n: unknowns of a system.
        shape: of the systems, users last.
        row: returns row a of A, from its diagonal on, (n - a, *shape).
    """
    if n > MANY:
        return _invert(n, shape, row)
    A = np.empty((n, 2 * n, *shape))
    for a in range(n):
        A[a, a:n] = row(a)
        A[a, n : n + a] = 0.0
        A[a, n + a] = 1.0
    for c in range(n):
        ratios = A[c, c + 1 : n] / A[c, c]
        for a in range(c + 1, n):
            A[a, a : n + c + 1] -= ratios[a - c - 1] * A[c, a : n + c + 1]
    return Systems(A[:, n:], np.ascontiguousarray(A[np.arange(n), np.arange(n)]))


def _invert(n: int, shape: tuple[int, ...], row: Callable[[int], Floats]) -> Systems:
    """Return systems with their inverses by LAPACK, which is faster for many unknowns; arguments as in `eliminate`."""
    A = np.empty((n, n, *shape))
    for a in range(n):
        A[a, a:] = A[a:, a] = row(a)
    stacked = np.ascontiguousarray(A.reshape(n, n, -1).transpose(2, 0, 1))
    inverse = np.ascontiguousarray(np.linalg.inv(stacked).transpose(1, 2, 0))
    return Systems(inverse.reshape(n, n, *shape), None)
