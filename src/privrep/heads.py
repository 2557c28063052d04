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
from scipy import sparse

from privrep.algorithms.representation import Ratings, Representation
from privrep.data.sparse_rows import SparseRows
from privrep.data.user_table import UserTable
from privrep.engines.base import default_workers, finite_rows, map_blocks
from privrep.local.frame import Frame
from privrep.local.least_squares import ROUNDING, centred
from privrep.privacy.bounds import Array

SHARED, OWN, CONSTANT = 0, 1, 2
KINDS = ("shared", "own", "constant")
_SHARED_RIDGES = (1e-5, 1e-3, 1e-2, 1e-1, 1.0)
_OWN_RIDGES = (1e-3, 1e-1, 1.0, 10.0, 100.0)


@dataclass(frozen=True)
class Heads:
    """Heads of many users, for each of their targets: that of user i for target c has number i * targets + c.

    A prediction is intercept + <x, matrix shared> + <x, own>; one of the last two is zero.
    """

    ids: NDArray[Any]  # (n,)
    kind: NDArray[np.int8]  # (heads,)
    intercept: Array
    shared: Array  # (heads, k)
    own_position: NDArray[np.int64]  # row of `own`, or -1
    own: Array  # (heads that are regressions of their users' own, d)
    targets: int = 1

    def predict(self, representation: Representation, X: Any, users: NDArray[np.int64]) -> Array:
        """Predictions for rows X of the users at these positions: (rows,), or (rows, targets) where there are more."""
        columns = [self._predict(representation, X, users * self.targets + c) for c in range(self.targets)]
        return columns[0] if self.targets == 1 else np.stack(columns, axis=1)

    def _predict(self, representation: Representation, X: Any, heads: NDArray[np.int64]) -> Array:
        predictions = self.intercept[heads] + np.einsum("rk,rk->r", X @ representation.matrix, self.shared[heads])
        position = self.own_position[heads]
        rows = np.flatnonzero(position >= 0)
        if len(rows):
            predictions[rows] += np.einsum("rd,rd->r", X[rows], self.own[position[rows]])
        return predictions

    def weights(self, representation: Representation) -> Array:
        """(heads, d): every head's linear model in the original features. For analysis; full vectors all."""
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
            parts[0].targets,
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
    n, (d, k) = block.n_users, representation.matrix.shape
    q = 1 if block.y.ndim == 1 else block.y.shape[1]
    kind = np.full(n * q, CONSTANT, dtype=np.int8)
    constant, shared = np.zeros(n * q), np.zeros((n * q, k))
    own = np.zeros((n * q, 0 if isinstance(block.X, sparse.sparray) else d))
    for users, size in block.positions_by_size():
        X, Y = finite_rows(*block.group(users, size))
        X = X if isinstance(X, SparseRows) else X.astype(np.float64, copy=False)
        for c, y in enumerate(Frame.plain(d).targets(Y.astype(np.float64, copy=False))):
            heads = users * q + c
            with np.errstate(all="ignore"):  # a user whose numbers overflow gets a constant, and nobody hears of it
                fits = _candidates(X, y, representation, intercept, safety_net)
            best = np.stack([np.where(np.isfinite(fit.loss), fit.loss, np.inf) for fit in fits]).argmin(axis=0)
            kind[heads] = np.array([fit.kind for fit in fits], dtype=np.int8)[best]
            constant[heads] = np.nan_to_num(np.stack([fit.intercept for fit in fits])[best, np.arange(len(users))])
            for i, fit in enumerate(fits):
                if fit.kind != CONSTANT:
                    target = shared if fit.kind == SHARED else own
                    target[heads[best == i]] = np.nan_to_num(fit.weights[best == i])
    has_own = kind == OWN
    place = np.where(has_own, np.cumsum(has_own) - 1, -1)
    return Heads(block.ids, kind, constant, shared, place, own[has_own].reshape(-1, d), q)


@dataclass(frozen=True)
class _Fit:
    """One candidate for a group of users: its leave-one-out error as it counts in the choice, and its numbers."""

    kind: int
    loss: Array
    intercept: Array
    weights: Array  # in the coordinates of that kind: (users, k) shared, (users, d) own


def _candidates(X: Array | SparseRows, y: Array, rep: Representation, intercept: bool, safety_net: bool) -> list[_Fit]:
    if rep.ratings is not None:
        return [rating_candidate(_images(X, rep.matrix), y, rep.ratings)]
    shared = shared_candidate(X, y, rep, intercept)
    if not safety_net:
        return [shared]
    shared = replace(shared, loss=shared.loss / rep.trust)
    candidates = [constant_candidate(y, intercept), shared]
    if not isinstance(X, SparseRows):  # a weight for each of very many features, from few rows, is no alternative
        candidates.append(own_candidate(X, y, rep.scale, intercept))
    return candidates


def constant_candidate(y: Array, intercept: bool) -> _Fit:
    """The user's mean (zero without an intercept)."""
    m = y.shape[1]
    mean = y.mean(axis=1) if intercept else np.zeros(len(y))
    residual = (y - mean[:, None]) * (m / max(m - 1, 1) if intercept else 1.0)
    return _Fit(CONSTANT, (residual**2).mean(axis=1), mean, np.zeros((len(y), 0)))


def shared_candidate(X: Array | SparseRows, y: Array, rep: Representation, intercept: bool) -> _Fit:
    """Ridge regression on the representation; ridge, and whether to have an intercept, by leave-one-out."""
    P = _images(X, rep.matrix)
    fits = [_ridges(P, y, _SHARED_RIDGES, centre) for centre in ((True, False) if intercept else (False,))]
    return _best(SHARED, fits)


def rating_candidate(P: Array, y: Array, ratings: Ratings) -> _Fit:
    """A user's mean, and its taste: a normal prior of the head with unit covariance, in units of the user's own spread.

    y / spread = a + offset + <factors, v> + rest, the variance of the rest public; P has offset and factors. A user
    with few ratings thus keeps close to the items' offsets, and one whose ratings are all alike to their mean.
    """
    m = y.shape[1]
    spread = np.sqrt((centred(y) ** 2).mean(axis=1))
    rows = centred(P[:, :, 1:])
    unit = np.where(spread > ROUNDING * np.abs(y).max(axis=1), spread, 0.0)
    left = centred(y) - centred(P[:, :, 0]) * unit[:, None]
    gram = rows.transpose(0, 2, 1) @ rows + ratings.residual * np.eye(rows.shape[2])
    taste = np.linalg.solve(gram, rows.transpose(0, 2, 1) @ left[:, :, None])[:, :, 0]
    head = np.concatenate([unit[:, None], taste], axis=1)
    loss = (left - (rows @ taste[:, :, None])[:, :, 0]) ** 2
    return _Fit(SHARED, loss.sum(axis=1) / m, _intercepts(P, y, head, True), head)


def _images(X: Array | SparseRows, matrix: Array) -> Array:
    """(users, rows, k): rows times the representation."""
    if isinstance(X, SparseRows):
        return X.project(matrix)
    return (X.reshape(-1, len(matrix)) @ matrix).reshape(*X.shape[:2], -1)


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
