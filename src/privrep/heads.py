"""Personal heads: functions of the public representation and one user's own rows. They never leave their user.

A user has three candidates: a head on the shared representation, a ridge regression of its own on all features, and a
constant. It tries each by leave-one-out on its own rows and keeps what predicted best. The choice costs no privacy
because nothing of it is released, and it is the safety net: where the representation does not help a user, or holds
nothing but noise, that user is as well off as alone.
"""

from __future__ import annotations

from collections.abc import Iterable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
from numpy.typing import NDArray
from threadpoolctl import threadpool_limits

from privrep.algorithms.private_fedrep import Representation
from privrep.data.user_table import UserTable
from privrep.engines.base import default_workers
from privrep.local.least_squares import Floats, centred, ridge_fit
from privrep.privacy.bounds import Array

SHARED, OWN, CONSTANT = 0, 1, 2
KINDS = ("shared", "own", "constant")
_SHARED_RIDGES = (1e-5, 1e-3, 1e-2, 1e-1, 1.0)
_OWN_RIDGES = (1e-4, 1e-3, 1e-2, 1e-1, 1.0, 10.0, 100.0)


@dataclass(frozen=True)
class Heads:
    """Heads of many users. A user's prediction is intercept + <x, matrix shared> + <x, own>; one of the two is zero."""

    ids: NDArray[Any]
    kind: NDArray[np.int8]
    intercept: Array
    shared: Array  # (n, k)
    own_position: NDArray[np.int64]  # row of `own`, or -1
    own: Array  # (users with a regression of their own, d)

    def predict(self, representation: Representation, X: Floats, users: NDArray[np.int64]) -> Array:
        """Predictions for rows X of the users at these positions."""
        predictions = self.intercept[users] + np.einsum("rk,rk->r", X @ representation.matrix, self.shared[users])
        position = self.own_position[users]
        rows = np.flatnonzero(position >= 0)
        if len(rows):
            predictions[rows] += np.einsum("rd,rd->r", X[rows], self.own[position[rows]])
        return predictions

    def weights(self, representation: Representation) -> Array:
        """(n, d): every user's linear model in the original features. For analysis; n full vectors."""
        weights = self.shared @ representation.matrix.T
        with_own = self.own_position >= 0
        weights[with_own] += self.own[self.own_position[with_own]]
        return weights

    @classmethod
    def join(cls, parts: Iterable[Heads]) -> Heads:
        parts = list(parts)
        starts = np.cumsum([0, *(len(part.own) for part in parts)])
        moved = [np.where(p.own_position >= 0, p.own_position + s, -1) for p, s in zip(parts, starts, strict=False)]
        return cls(
            np.concatenate([part.ids for part in parts]),
            np.concatenate([part.kind for part in parts]),
            np.concatenate([part.intercept for part in parts]),
            np.concatenate([part.shared for part in parts]),
            np.concatenate(moved),
            np.concatenate([part.own for part in parts]),
        )


def fit_heads(
    blocks: Iterable[UserTable],
    representation: Representation,
    *,
    intercept: bool = True,
    safety_net: bool = True,
    workers: int | None = None,
) -> Heads:
    """A head for every user of the blocks (`table.blocks()`). Without the safety net every head is a shared one."""
    with threadpool_limits(1, user_api="blas"), ThreadPoolExecutor(workers or default_workers()) as pool:
        return Heads.join(pool.map(lambda b: fit_block(b, representation, intercept, safety_net), blocks))


def fit_block(block: UserTable, representation: Representation, intercept: bool, safety_net: bool) -> Heads:
    n, d, k = block.n_users, block.n_features, representation.basis.shape[1]
    kind = np.full(n, CONSTANT, dtype=np.int8)
    constant, shared, own = np.zeros(n), np.zeros((n, k)), np.zeros((n, d))
    for users, size in block.positions_by_size():
        X, y = (values.astype(np.float64, copy=False) for values in block.group(users, size))
        fits = _candidates(X, y, representation, intercept, safety_net)
        losses = np.stack([fit.loss for fit in fits])
        best = losses.argmin(axis=0)
        picked = (np.arange(len(users)),)
        kind[users] = np.array([fit.kind for fit in fits], dtype=np.int8)[best]
        constant[users] = np.stack([fit.intercept for fit in fits])[(best, *picked)]
        for i, fit in enumerate(fits):
            chosen = best == i
            target = shared if fit.kind == SHARED else own
            target[users[chosen]] = fit.weights[chosen] if fit.kind != CONSTANT else 0.0
    has_own = kind == OWN
    return Heads(block.ids, kind, constant, shared, np.where(has_own, np.cumsum(has_own) - 1, -1), own[has_own])


@dataclass(frozen=True)
class _Fit:
    """One candidate for a group of users: its leave-one-out error as it counts in the choice, and its numbers."""

    kind: int
    loss: Array
    intercept: Array
    weights: Array  # in the coordinates of that kind: (users, k) shared, (users, d) own


def _candidates(X: Array, y: Array, rep: Representation, intercept: bool, safety_net: bool) -> list[_Fit]:
    shared = shared_candidate(X, y, rep, intercept)
    if not safety_net:
        return [shared]
    shared = replace(shared, loss=shared.loss / rep.trust)
    return [shared, own_candidate(X, y, rep.scale, intercept), constant_candidate(y, intercept)]


def constant_candidate(y: Array, intercept: bool) -> _Fit:
    """The user's mean (zero without an intercept)."""
    m = y.shape[1]
    mean = y.mean(axis=1) if intercept else np.zeros(len(y))
    residual = (y - mean[:, None]) * (m / max(m - 1, 1) if intercept else 1.0)
    return _Fit(CONSTANT, (residual**2).mean(axis=1), mean, np.zeros((len(y), 0)))


def shared_candidate(X: Array, y: Array, rep: Representation, intercept: bool) -> _Fit:
    """Ridge regression on the representation; ridge, and whether to have an intercept, by leave-one-out."""
    P = X @ rep.matrix
    options = [(ridge, centre) for centre in ((True, False) if intercept else (False,)) for ridge in _SHARED_RIDGES]
    return _best(SHARED, [_ridge(SHARED, P, y, ridge, centre) for ridge, centre in options])


def own_candidate(X: Array, y: Array, scale: Array, intercept: bool) -> _Fit:
    """Ridge regression on all features in public scales; the ridge by leave-one-out."""
    rows = X / scale
    if X.shape[1] > X.shape[2]:
        fits = [_ridge(OWN, rows, y, ridge, intercept) for ridge in _OWN_RIDGES]
    else:
        fits = _dual_ridges(rows, y, intercept)
    best = _best(OWN, fits)
    return _Fit(OWN, best.loss, best.intercept, best.weights / scale)


def _best(kind: int, fits: list[_Fit]) -> _Fit:
    best = np.stack([fit.loss for fit in fits]).argmin(axis=0)
    users = np.arange(len(best))
    return _Fit(
        kind,
        np.stack([fit.loss for fit in fits])[best, users],
        np.stack([fit.intercept for fit in fits])[best, users],
        np.stack([fit.weights for fit in fits])[best, users],
    )


def _ridge(kind: int, P: Array, y: Array, ridge: float, centre: bool) -> _Fit:
    fit = ridge_fit(centred(P), centred(y), ridge, True) if centre else ridge_fit(P, y, ridge, False)
    constant = y.mean(axis=1) - np.einsum("uk,uk->u", P.mean(axis=1), fit.heads) if centre else np.zeros(len(y))
    return _Fit(kind, (fit.loo_residuals**2).mean(axis=1), constant, fit.heads)


def _dual_ridges(rows: Array, y: Array, intercept: bool) -> list[_Fit]:
    """Ridge regressions with fewer rows than features, all ridges from one eigendecomposition of the Gram matrix."""
    users, m, _ = rows.shape
    X, targets = (centred(rows), centred(y)) if intercept else (rows, y)
    gram = X @ X.transpose(0, 2, 1)
    size = np.einsum("umm->u", gram) / m + np.finfo(np.float64).tiny
    if intercept:
        gram += (1e3 * m * size)[:, None, None] / m  # lifts the direction of the intercept above all others ...
    values, Q = np.linalg.eigh(gram)
    if intercept:
        values, Q = values[:, :-1], Q[:, :, :-1]  # ... and takes it out
    turned = np.matmul(Q.transpose(0, 2, 1), targets[:, :, None])[:, :, 0]
    fits = []
    for ridge in _OWN_RIDGES:
        inverse = 1 / (np.maximum(values, 0.0) + (ridge * size)[:, None])
        alpha = np.matmul(Q, (inverse * turned)[:, :, None])[:, :, 0]
        diagonal = np.einsum("ujc,uc->uj", Q**2, inverse)
        loo = alpha / np.maximum(diagonal, np.finfo(np.float64).tiny)
        weights = np.matmul(alpha[:, None, :], X)[:, 0]
        constant = y.mean(axis=1) - np.einsum("ud,ud->u", rows.mean(axis=1), weights) if intercept else np.zeros(users)
        fits.append(_Fit(OWN, (loo**2).mean(axis=1), constant, weights))
    return fits
