"""References that experiments and tests compare private methods with. NOT PRIVATE."""

from __future__ import annotations

import numpy as np
from threadpoolctl import threadpool_limits

from privrep.data.table import UserTable
from privrep.linear.references import fit_fedrep, subspace_distance
from privrep.local.least_squares import centre_rows, fit_least_squares
from privrep.local.representation import Representation
from privrep.local.transform import FeatureTransform
from privrep.typing import Array, Floats
from privrep.users.memory import InMemoryUsers


def altmin(table: UserTable, rank: int, *, intercept: bool = True, rounds: int = 30) -> Representation:
    """Alternating minimisation: heads by least squares given U, then U by least squares given the heads. NOT PRIVATE.

    The U step solves the dk x dk normal equations sum (v v^T) kron (x x^T) vec U = sum y (v kron x), accumulated block
    by block, one matrix product for each pair of columns. Stops early once a round moves nothing.
    """
    d = table.n_features
    U = fit_fedrep(InMemoryUsers(table), rank, intercept=intercept, rounds=0).basis  # the spectral start
    with threadpool_limits(1, user_api="blas"):  # products this small gain nothing from threads and can lose much
        for _ in range(rounds):
            normal, right = np.zeros((rank, d, rank, d)), np.zeros((rank, d))
            for block in table.blocks():
                for X, y in block.by_size():
                    _add_normal_equations(normal, right, U, X, y, intercept)
            solution = np.linalg.lstsq(normal.reshape(rank * d, rank * d), right.ravel(), rcond=1e-12)[0]
            before, (U, _) = U, np.linalg.qr(solution.reshape(rank, d).T)
            if subspace_distance(before, U) < 1e-7:
                break
    return Representation(U, FeatureTransform.plain(d), 0.0)


def _add_normal_equations(normal: Array, right: Array, U: Array, X: Floats, y: Floats, intercept: bool) -> None:
    users, m, d = X.shape
    k = U.shape[1]
    if m <= k + intercept:  # any U fits such users: they have nothing to say
        return
    rows, targets = (centre_rows(X), centre_rows(y)) if intercept else (X, y)
    rows, targets = rows.astype(np.float64, copy=False), targets.astype(np.float64, copy=False)
    heads = np.repeat(fit_least_squares(rows @ U, targets, intercept), m, axis=0)
    flat = rows.reshape(users * m, d)
    right += (heads * targets.reshape(-1, 1)).T @ flat
    for a in range(k):
        for b in range(a, k):
            part = (flat * (heads[:, a] * heads[:, b])[:, None]).T @ flat
            normal[a, :, b, :] += part
            if b > a:
                normal[b, :, a, :] += part
