"""Personal heads: functions of the public representation and one user's own rows. They never leave their user.

A user has three candidates: a head on the shared representation, a ridge regression of its own on all features, and a
constant. It tries each by leave-one-out on its own rows and keeps what predicted best. The choice costs no privacy
because nothing of it is released, and it is the safety net: where the representation does not help a user, or holds
nothing but noise, that user is about as well off as alone. About: a choice made on few rows is a noisy one, and where a
representation is learned well but does not fit the users (as many directions as features, ten rows each) the wrong
choices of some users have cost up to a fifth in mean squared error.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import numpy as np
from numpy.typing import NDArray

from privrep.algorithms.private_fedrep import Representation
from privrep.data.user_table import UserTable
from privrep.engines.base import default_workers, finite_rows, map_blocks
from privrep.local.least_squares import Floats, centred
from privrep.privacy.bounds import Array

SHARED, OWN, CONSTANT = 0, 1, 2
KINDS = ("shared", "own", "constant")
_SHARED_RIDGES = (1e-5, 1e-3, 1e-2, 1e-1, 1.0)
_OWN_RIDGES = (1e-3, 1e-1, 1.0, 10.0, 100.0)


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
    fit = partial(fit_block, representation=representation, intercept=intercept, safety_net=safety_net)
    return Heads.join(map_blocks(fit, blocks, workers or default_workers()))


def fit_block(block: UserTable, representation: Representation, intercept: bool, safety_net: bool) -> Heads:
    n, d, k = block.n_users, block.n_features, representation.basis.shape[1]
    kind = np.full(n, CONSTANT, dtype=np.int8)
    constant, shared, own = np.zeros(n), np.zeros((n, k)), np.zeros((n, d))
    for users, size in block.positions_by_size():
        X, y = (values.astype(np.float64, copy=False) for values in finite_rows(*block.group(users, size)))
        with np.errstate(all="ignore"):  # a user whose numbers overflow gets a constant, and nobody hears of it
            fits = _candidates(X, y, representation, intercept, safety_net)
        best = np.stack([np.where(np.isfinite(fit.loss), fit.loss, np.inf) for fit in fits]).argmin(axis=0)
        kind[users] = np.array([fit.kind for fit in fits], dtype=np.int8)[best]
        constant[users] = np.nan_to_num(np.stack([fit.intercept for fit in fits])[best, np.arange(len(users))])
        for i, fit in enumerate(fits):
            chosen = best == i
            target = shared if fit.kind == SHARED else own
            target[users[chosen]] = np.nan_to_num(fit.weights[chosen]) if fit.kind != CONSTANT else 0.0
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
    return [constant_candidate(y, intercept), shared, own_candidate(X, y, rep.scale, intercept)]


def constant_candidate(y: Array, intercept: bool) -> _Fit:
    """The user's mean (zero without an intercept)."""
    m = y.shape[1]
    mean = y.mean(axis=1) if intercept else np.zeros(len(y))
    residual = (y - mean[:, None]) * (m / max(m - 1, 1) if intercept else 1.0)
    return _Fit(CONSTANT, (residual**2).mean(axis=1), mean, np.zeros((len(y), 0)))


def shared_candidate(X: Array, y: Array, rep: Representation, intercept: bool) -> _Fit:
    """Ridge regression on the representation; ridge, and whether to have an intercept, by leave-one-out."""
    P = (X.reshape(-1, X.shape[2]) @ rep.matrix).reshape(*X.shape[:2], -1)
    fits = [_ridges(P, y, _SHARED_RIDGES, centre) for centre in ((True, False) if intercept else (False,))]
    return _best(SHARED, fits)


def own_candidate(X: Array, y: Array, scale: Array, intercept: bool) -> _Fit:
    """Ridge regression on all features in public scales; the ridge by leave-one-out."""
    ridges = _ridges if X.shape[1] > X.shape[2] else _dual_ridges
    best = _best(OWN, [ridges(X / scale, y, _OWN_RIDGES, intercept)])
    return replace(best, weights=best.weights / scale)


def _best(kind: int, fits: list[tuple[Array, Array, Array]]) -> _Fit:
    """Of fits (losses, intercepts, weights) of the same users, each user's best."""
    losses = np.stack([loss for loss, _, _ in fits])
    best, users = losses.argmin(axis=0), np.arange(losses.shape[1])
    intercepts, weights = np.stack([fit[1] for fit in fits]), np.stack([fit[2] for fit in fits])
    return _Fit(kind, losses[best, users], intercepts[best, users], weights[best, users])


def _ridges(P: Array, y: Array, ridges: tuple[float, ...], centre: bool) -> tuple[Array, Array, Array]:
    """Each user's best ridge regression: its leave-one-out loss, intercept and weights. From one eigendecomposition."""
    rows, targets = (centred(P), centred(y)) if centre else (P, y)
    m, k = P.shape[1:]
    gram = rows.transpose(0, 2, 1) @ rows
    lost = ~np.isfinite(gram.sum(axis=(1, 2)))
    gram[lost] = 0.0  # eigh would raise
    values, Q = np.linalg.eigh(gram)
    turned = rows @ Q  # (users, rows, k)
    squares = turned**2
    products = np.matmul(targets[:, None, :], turned)[:, 0]
    size = values.sum(axis=1, keepdims=True) / k
    least = 1e-10 * size + np.finfo(np.float64).tiny
    losses = np.empty((len(ridges), len(P)))
    heads = np.empty((len(ridges), len(P), k))
    for i, ridge in enumerate(ridges):
        inverse = 1 / (np.maximum(values, 0.0) + ridge * size + least)
        heads[i] = inverse * products
        residuals = targets - np.matmul(turned, heads[i][:, :, None])[:, :, 0]
        leverage = np.matmul(squares, inverse[:, :, None])[:, :, 0] + (1 / m if centre else 0.0)
        losses[i] = ((residuals / np.maximum(1 - leverage, 1e-6)) ** 2).mean(axis=1) + np.where(lost, np.inf, 0.0)
    best, users = losses.argmin(axis=0), np.arange(len(P))
    weights = np.matmul(Q, heads[best, users][:, :, None])[:, :, 0]
    return losses[best, users], _intercepts(P, y, weights, centre), weights


def _dual_ridges(rows: Array, y: Array, ridges: tuple[float, ...], centre: bool) -> tuple[Array, Array, Array]:
    """The same with no more rows than features, through the Gram matrix of the rows.

    An intercept is a feature of great size that is the same in every row, so it adds a large constant to the Gram
    matrix. The leave-one-out residual is (B y)_j / B_jj with B the inverse of the Gram matrix plus ridge.
    """
    X, targets = (centred(rows), centred(y)) if centre else (rows, y)
    users, m = y.shape
    gram = X @ X.transpose(0, 2, 1)
    lost = ~np.isfinite(gram.sum(axis=(1, 2)))
    gram[lost] = 0.0
    size = np.einsum("umm->u", gram) / m + np.finfo(np.float64).tiny
    if centre:
        gram += (1e3 * size)[:, None, None]
    diagonal = np.arange(m)
    losses, alphas = np.empty((len(ridges), users)), np.empty((len(ridges), users, m))
    for i, ridge in enumerate(ridges):
        shifted = gram.copy()
        shifted[:, diagonal, diagonal] += (ridge * size)[:, None]
        inverse = np.linalg.inv(shifted)
        alphas[i] = np.matmul(inverse, targets[:, :, None])[:, :, 0]
        losses[i] = ((alphas[i] / inverse[:, diagonal, diagonal]) ** 2).mean(axis=1) + np.where(lost, np.inf, 0.0)
    best = losses.argmin(axis=0)
    weights = np.matmul(alphas[best, np.arange(users)][:, None, :], X)[:, 0]
    return losses[best, np.arange(users)], _intercepts(rows, y, weights, centre), weights


def _intercepts(rows: Array, y: Array, weights: Array, centre: bool) -> Array:
    if not centre:
        return np.zeros(len(y))
    return y.mean(axis=1) - np.einsum("uk,uk->u", rows.mean(axis=1), weights)
