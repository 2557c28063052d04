"""Ridge regression of many users at once, with leave-one-out in closed form. Each user's answer uses its rows alone.

That is meant to the last bit. A matrix product over the rows of several users rounds a user's rows differently
depending on who stands beside them, and a number near the edge of a histogram's cell, or a direction made of rounding
errors, would turn that into more than the stated sensitivity. So products are stacked (one per user), and sums run
along axes that belong to one user; tests/properties holds every local step to it.

Small arrays are kept with the users along the last axis, (k, rows, users): then every operation is one long loop.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from privrep.typing import Floats

ROUNDING = 64 * float(np.finfo(np.float64).eps)  # relative size below which differences of numbers mean nothing


@dataclass(frozen=True)
class RidgeFit:
    """Heads of a group of users of equal size and what leaving each row out would have given. Users come last."""

    heads: Floats  # (k, users)
    loo_residuals: Floats  # (rows, users): y_j minus the prediction of the fit without row j
    directions: Floats  # (k, rows, users): A^-1 p_j, so that the head without row j is heads - directions_j * loo_j

    def loo_heads(self) -> Floats:
        """(k, rows, users): the head of each user fitted without row j."""
        return self.heads[:, None, :] - self.directions * self.loo_residuals


def users_last(values: Floats) -> Floats:
    """(users, ...) as a float64 array (..., users) of its own, the other axes reversed."""
    return np.ascontiguousarray(values.T, dtype=np.float64)


def sum_rows(values: Floats) -> Floats:
    """The sum over rows of (..., rows, users), row after row; NumPy would add a single user's in another order."""
    if values.shape[-1] == 1:
        return np.add.accumulate(values, axis=-2)[..., -1, :]
    return values.sum(axis=-2)


def sum_columns(values: Floats) -> Floats:
    """The sum over the first axis of (k, rows, users), one after the other."""
    total = values[0].copy()
    for part in values[1:]:
        total += part
    return total


def centred(values: Floats) -> Floats:
    """Rows minus their user's mean, along axis 1 of (users, rows) or (users, rows, features)."""
    m = values.shape[1]
    if values.ndim == 2:
        return values - values.mean(axis=1, keepdims=True)
    return values - np.full((1, m), 1 / m, values.dtype) @ values


def without_mean(values: Floats) -> Floats:
    """(..., rows, users) minus each user's mean over rows."""
    return values - sum_rows(values)[..., None, :] / values.shape[-2]


def centred_targets(y: Floats) -> Floats:
    """Targets (users, rows) minus their user's mean, as (rows, users); zero where a user's differ by rounding alone.

    Otherwise a user with constant targets would send a direction made of rounding errors.
    """
    targets = users_last(y)
    moved = without_mean(targets)
    rounding = ROUNDING * np.abs(targets).max(axis=0)
    return np.where(np.abs(moved).max(axis=0) > rounding, moved, 0.0)


def ridge_fit(P: Floats, y: Floats, ridge: float, intercept: bool) -> RidgeFit:
    """min_v sum_j (y_j - <p_j, v>)^2 + ridge * m |v|^2 for each user; P is (k, m, users), y is (m, users).

    With `intercept`, P and y must come centred by user, and the leverage of the unpenalised intercept is added. A
    trace of 1e-10 of the Gram matrix's own trace keeps every system solvable: no user's rows can make a solve fail.
    """
    k, m, users = P.shape
    gram = np.empty((k, k, users))
    for a in range(k):
        for b in range(a + 1):
            gram[a, b] = gram[b, a] = sum_rows(P[a] * P[b])
    trace = sum_columns(gram[np.arange(k), np.arange(k)])
    for a in range(k):
        gram[a, a] += ridge * m + 1e-10 * trace + np.finfo(np.float64).tiny
    inverted = inverse(gram)
    directions = np.zeros_like(P)
    for a in range(k):
        for b in range(k):
            directions[a] += inverted[a, b] * P[b]
    heads = sum_rows(directions * y)
    residuals = y.copy()
    leverage = np.full((m, users), 1 / m if intercept else 0.0)
    for a in range(k):
        residuals -= P[a] * heads[a]
        leverage += P[a] * directions[a]
    return RidgeFit(heads, residuals / np.maximum(1 - leverage, 1e-6), directions)


def least_squares_heads(P: Floats, y: Floats, intercept: bool = False) -> Floats:
    """(users, k): plain least squares of y (users, m) on P (users, m, k), the one of least norm if there are many."""
    fit = ridge_fit(users_last(P), users_last(y), 0.0, intercept)
    return np.ascontiguousarray(fit.heads.T)


def inverse(A: Floats) -> Floats:
    """Inverses of positive definite matrices (k, k, users), by Gauss-Jordan elimination; overwrites A.

    Positive definite systems need no pivoting; what is not finite stays within its user.
    """
    k = len(A)
    for c in range(k):
        pivot = 1 / A[c, c]
        row = A[c] * pivot
        row[c] = pivot
        column = A[:, c].copy()
        A[:, c] = 0.0
        for a in range(k):
            if a != c:
                A[a] -= column[a] * row
        A[c] = row
    return A
