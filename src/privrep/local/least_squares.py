"""Ridge regression of many users at once, with leave-one-out in closed form. Each user's answer uses its rows alone.

Formal guarantee: that is meant to the last bit. A matrix product over the rows of several users rounds a user's rows
differently, depending on who stands beside them. A number near the edge of a histogram's cell, or a direction made of
rounding errors, would turn that into more than the stated sensitivity. So products are stacked (one per user), and sums
run along axes that belong to one user. tests/properties holds every local step to it.

Small arrays are kept with the users along the last axis, (k, rows, users): then every operation is one long loop.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from privrep.typing import Floats

ROUNDING = 64 * float(np.finfo(np.float64).eps)  # relative size below which differences of numbers mean nothing


@dataclass(frozen=True)
class RidgeFit:
    """Heads of a group of users of equal size and their leave-one-out fits. Users come last."""

    heads: Floats  # (k, users)
    loo_residuals: Floats  # (rows, users): y_j minus the prediction of the fit without row j
    directions: Floats  # (k, rows, users): A^-1 p_j, so that the head without row j is heads - directions_j * loo_j

    def loo_heads(self) -> Floats:
        """Return the head of each user fitted without row j, (k, rows, users)."""
        return self.heads[:, None, :] - self.directions * self.loo_residuals


def move_users_last(values: Floats) -> Floats:
    """Return (users, ...) as a float64 array (..., users) of its own, the other axes reversed."""
    return np.ascontiguousarray(values.T, dtype=np.float64)


def sum_rows(values: Floats) -> Floats:
    """Return the sum over rows of (..., rows, users), row after row: (..., users).

    NumPy would add a single user's rows in another order.
    """
    if values.shape[-1] == 1:
        return np.add.accumulate(values, axis=-2)[..., -1, :]
    return values.sum(axis=-2)


def sum_columns(values: Floats) -> Floats:
    """Return the sum over the first axis of (k, rows, users), one after the other: (rows, users)."""
    total = values[0].copy()
    for part in values[1:]:
        total += part
    return total


def find_largest(values: Floats) -> Floats:
    """Return the largest size of each column of each user's rows (users, rows, columns): (users, columns).

    Few rows are compared one after the other, several times faster than NumPy does it along an axis in the middle.
    """
    if not 0 < values.shape[1] <= len(values):
        return np.asarray(np.abs(values).max(axis=1, initial=0.0))
    largest = np.abs(values[:, 0])
    size = np.empty_like(largest)
    for j in range(1, values.shape[1]):
        np.maximum(largest, np.abs(values[:, j], out=size), out=largest)
    return np.asarray(largest)


def centre_rows(values: Floats) -> Floats:
    """Return rows minus their user's mean, along axis 1 of (users, rows) or (users, rows, features)."""
    m = values.shape[1]
    if values.ndim == 2:
        return values - values.mean(axis=1, keepdims=True)
    return values - np.full((1, m), 1 / m, values.dtype) @ values


def subtract_mean(values: Floats) -> Floats:
    """Return (..., rows, users) minus each user's mean over rows."""
    return values - sum_rows(values)[..., None, :] / values.shape[-2]


def centre_targets(y: Floats) -> Floats:
    """Return targets (users, rows) minus their user's mean, as (rows, users).

    They are zero where a user's differ by rounding alone. Otherwise a user with constant targets would send a direction
    made of rounding errors.
    """
    targets = move_users_last(y)
    moved = subtract_mean(targets)
    rounding = ROUNDING * np.abs(targets).max(axis=0)
    return np.where(np.abs(moved).max(axis=0) > rounding, moved, 0.0)


def fit_ridge(P: Floats, y: Floats, ridge: float, intercept: bool) -> RidgeFit:
    """Return the v of each user that minimises sum_j (y_j - <p_j, v>)^2 + ridge * m |v|^2, with leave-one-out.

    1e-10 of the Gram matrix's trace is added to its diagonal. It keeps every system solvable: no user's rows can make a
    solve fail.

    Args:
        P: regressors, (k, m, users).
        y: targets, (m, users).
        ridge: penalty, per row.
        intercept: P and y come centred by user, and the leverage of the unpenalised intercept is added.
    """
    k, m, users = P.shape
    gram = np.empty((k, k, users))
    for a in range(k):
        for b in range(a + 1):
            gram[a, b] = gram[b, a] = sum_rows(P[a] * P[b])
    trace = sum_columns(gram[np.arange(k), np.arange(k)])
    for a in range(k):
        gram[a, a] += ridge * m + 1e-10 * trace + np.finfo(np.float64).tiny
    inverted = invert(gram)
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


def fit_least_squares(P: Floats, y: Floats, intercept: bool = False) -> Floats:
    """Return plain least squares of y on P, (users, k), the solution of least norm if there are many.

    Args:
        P: regressors, (users, m, k).
        y: targets, (users, m).
        intercept: see `fit_ridge`.
    """
    fit = fit_ridge(move_users_last(P), move_users_last(y), 0.0, intercept)
    return np.ascontiguousarray(fit.heads.T)


def invert(A: Floats) -> Floats:
    """Return inverses of positive definite matrices (k, k, users), by Gauss-Jordan elimination; overwrites A.

    Positive definite systems need no pivoting. Numbers that are not finite stay within their user.
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
