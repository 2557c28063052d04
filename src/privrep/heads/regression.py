"""Candidates for a user's model, tried by leave-one-out on the user's own rows, for many users of equal size at once.

Each user's numbers are a function of its own rows to the last bit (see `least_squares`), because `Preference` turns
comparisons of them into a release. Heads of ratings are a user's mean, spread and taste, on the public offsets and
factors of the items.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import ClassVar

import numpy as np
from numpy.typing import NDArray

from privrep.data.sparse import SparseRows
from privrep.local.least_squares import ROUNDING, centre_rows
from privrep.local.representation import Ratings
from privrep.local.transform import FeatureTransform
from privrep.privacy.bounds import Contributions
from privrep.privacy.contributions import Counts
from privrep.privacy.protocol import StepSpec, UserBatch
from privrep.typing import Array, Floats, Matrix

SHARED, OWN, CONSTANT = 0, 1, 2
KINDS = ("shared", "own", "constant")
POSTERIOR, PRIOR = 3, 4
HEAD_KINDS = (*KINDS, "posterior", "prior")  # numbers of kinds are in files: append only
_SHARED_RIDGES = (1e-5, 1e-3, 1e-2, 1e-1, 1.0)
_OWN_RIDGES = (1e-3, 1e-1, 1.0, 10.0, 100.0)


@dataclass(frozen=True)
class Fit:
    """A candidate for a group of users: its leave-one-out error as it counts in the choice, and its numbers."""

    kind: int
    loss: Array
    intercept: Array
    weights: Array  # in the coordinates of that kind: (users, k) shared, (users, d) own; of classes (users, outputs, .)


def fit_constant_candidate(y: Array, intercept: bool) -> Fit:
    """Return the user's mean as a candidate, or zero without an intercept.

    Args:
        y: targets (users, m).
        intercept: whether users have intercepts.
    """
    m = y.shape[1]
    mean = y.mean(axis=1) if intercept else np.zeros(len(y))
    residual = (y - mean[:, None]) * (m / max(m - 1, 1) if intercept else 1.0)
    return Fit(CONSTANT, (residual**2).mean(axis=1), mean, np.zeros((len(y), 0)))


def fit_shared_candidate(X: Array | SparseRows, y: Array, matrix: Array, intercept: bool) -> Fit:
    """Return each user's ridge regression on the representation. Leave-one-out finds the ridge, and whether to have an
    intercept.

    Args:
        X: rows (users, m, d).
        y: targets (users, m).
        matrix: of the representation, (d, k).
        intercept: whether users may have intercepts.
    """
    P = project_rows(X, matrix)
    fits = [_fit_ridges(P, y, _SHARED_RIDGES, centre) for centre in ((True, False) if intercept else (False,))]
    return _pick_best(SHARED, fits)


def project_rows(X: Array | SparseRows, matrix: Array) -> Array:
    """Return rows times the representation, (users, m, k).

    Args:
        X: rows (users, m, d).
        matrix: of the representation, (d, k).
    """
    return X.project(matrix) if isinstance(X, SparseRows) else X @ matrix


def fit_own_candidate(X: Array, y: Array, scale: Array, intercept: bool) -> Fit:
    """Return each user's ridge regression on all features in public scales, with the ridge found by leave-one-out.

    Args:
        X: rows (users, m, d).
        y: targets (users, m).
        scale: public scales of the features, (d,).
        intercept: whether users have intercepts.
    """
    ridges = _fit_ridges if X.shape[1] > X.shape[2] else _fit_dual_ridges
    best = _pick_best(OWN, [ridges(X / scale, y, _OWN_RIDGES, intercept)])
    return replace(best, weights=best.weights / scale)


def _pick_best(kind: int, fits: list[tuple[Array, Array, Array]]) -> Fit:
    """Return each user's best of several fits of the same users.

    Args:
        kind: of the candidate, its number in KINDS.
        fits: losses (users,), intercepts (users,) and weights (users, .) of each.
    """
    losses = np.stack([loss for loss, _, _ in fits])
    best, users = losses.argmin(axis=0), np.arange(losses.shape[1])
    intercepts, weights = np.stack([fit[1] for fit in fits]), np.stack([fit[2] for fit in fits])
    return Fit(kind, losses[best, users], intercepts[best, users], weights[best, users])


def _fit_ridges(P: Array, y: Array, ridges: tuple[float, ...], centre: bool) -> tuple[Array, Array, Array]:
    """Return each user's best ridge regression, from one eigendecomposition.

    Args:
        P: rows (users, m, k), with more rows than columns.
        y: targets (users, m).
        ridges: to try, relative to the mean eigenvalue of a user's Gram matrix.
        centre: whether to fit an intercept.

    Returns:
        Leave-one-out losses (users,), intercepts (users,) and weights (users, k).
    """
    rows, targets = (centre_rows(P), centre_rows(y)) if centre else (P, y)
    m, k = P.shape[1:]
    gram, size, lost = normalise_grams(rows.transpose(0, 2, 1) @ rows)
    values, Q = np.linalg.eigh(gram)
    turned = rows @ Q  # (users, rows, k)
    squares = turned**2 / size[:, None, None]
    products = np.matmul(targets[:, None, :], turned)[:, 0] / size[:, None]
    losses = np.empty((len(ridges), len(P)))
    heads = np.empty((len(ridges), len(P), k))
    for i, ridge in enumerate(ridges):
        inverse = 1 / (np.maximum(values, 0.0) + ridge + 1e-10)
        heads[i] = inverse * products
        residuals = targets - np.matmul(turned, heads[i][:, :, None])[:, :, 0]
        leverage = np.matmul(squares, inverse[:, :, None])[:, :, 0] + (1 / m if centre else 0.0)
        losses[i] = ((residuals / np.maximum(1 - leverage, 1e-6)) ** 2).mean(axis=1) + np.where(lost, np.inf, 0.0)
    best, users = losses.argmin(axis=0), np.arange(len(P))
    weights = np.matmul(Q, heads[best, users][:, :, None])[:, :, 0]
    return losses[best, users], fit_intercepts(P, y, weights, centre), weights


def _fit_dual_ridges(rows: Array, y: Array, ridges: tuple[float, ...], centre: bool) -> tuple[Array, Array, Array]:
    """Return the results of `_fit_ridges` with no more rows than features, through the Gram matrix of the rows.

    An intercept is a feature of great size that is the same in every row, so it adds a large constant to the Gram
    matrix. The leave-one-out residual is (B y)_j / B_jj with B the inverse of the Gram matrix plus ridge.

    Args:
        rows: (users, m, d).
        y: targets (users, m).
        ridges: to try, relative to the mean eigenvalue of a user's Gram matrix.
        centre: whether to fit an intercept.
    """
    X, targets = (centre_rows(rows), centre_rows(y)) if centre else (rows, y)
    users, m = y.shape
    gram, size, lost = normalise_grams(X @ X.transpose(0, 2, 1))
    values, Q = np.linalg.eigh(gram + 1e3 if centre else gram)
    squares, products = Q**2, np.matmul(targets[:, None, :], Q)[:, 0]
    losses, alphas = np.empty((len(ridges), users)), np.empty((len(ridges), users, m))
    for i, ridge in enumerate(ridges):
        inverse = 1 / (np.maximum(values, 0.0) + ridge)
        alphas[i] = np.matmul(Q, (inverse * products)[:, :, None])[:, :, 0]
        left = alphas[i] / np.matmul(squares, inverse[:, :, None])[:, :, 0]
        losses[i] = (left**2).mean(axis=1) + np.where(lost, np.inf, 0.0)
    best = losses.argmin(axis=0)
    weights = np.matmul((alphas[best, np.arange(users)] / size[:, None])[:, None, :], X)[:, 0]
    return losses[best, np.arange(users)], fit_intercepts(rows, y, weights, centre), weights


def normalise_grams(gram: Array) -> tuple[Array, Array, NDArray[np.bool_]]:
    """Return Gram matrices over their mean eigenvalue, that mean, and which users' overflowed: overflown matrices are
    zero.

    So whatever a user's rows are, an eigendecomposition, which would raise for everybody, finds small finite numbers.

    Args:
        gram: (users, k, k); overflown ones are set to zero in place.
    """
    k = gram.shape[1]
    diagonal = np.ascontiguousarray(gram[:, np.arange(k), np.arange(k)])  # else the order of sums would change
    size = diagonal.sum(axis=1) / k
    lost = ~np.isfinite(gram.sum(axis=(1, 2)))
    size = np.where(lost | ~(size > np.finfo(np.float64).tiny), 1.0, size)
    gram[lost] = 0.0
    return gram / size[:, None, None], size, lost


def fit_intercepts(rows: Array, y: Array, weights: Array, centre: bool) -> Array:
    """Return what the weights leave of the users' means, (users,); zero without `centre`.

    Args:
        rows: (users, m, d).
        y: targets (users, m).
        weights: (users, d).
        centre: whether users have intercepts.
    """
    if not centre:
        return np.zeros(len(y))
    return y.mean(axis=1) - (rows.mean(axis=1) * weights).sum(axis=1)


@dataclass(frozen=True)
class Preference:
    """A vote of each user: which of the three candidates did best by leave-one-out.

    Users with too few rows to tell do not vote.
    """

    spec: ClassVar[StepSpec] = StepSpec()
    matrix: Matrix
    transform: FeatureTransform
    intercept: bool

    def __call__(self, batch: UserBatch) -> dict[str, Contributions]:
        """Return `votes` of each user: the cell is the candidate's number in KINDS."""
        X: Floats = batch.X
        y: Floats = batch.y
        votes = np.full((len(X), 1), -1)
        if X.shape[1] > 2:
            X, y = X.astype(np.float64, copy=False), y.astype(np.float64, copy=False)
            fits = {
                SHARED: fit_shared_candidate(X, y, self.matrix, self.intercept).loss,
                OWN: fit_own_candidate(X, y, self.transform.scale, self.intercept).loss,
                CONSTANT: fit_constant_candidate(y, self.intercept).loss,
            }
            losses = np.stack([fits[kind] for kind in range(len(KINDS))])
            clear = np.isfinite(losses).all(axis=0)
            votes[:, 0] = np.where(clear, losses.argmin(axis=0), -1)
        return {"votes": Counts(votes, len(KINDS))}


def fit_rating_candidate(P: Array, y: Array, ratings: Ratings) -> Fit:
    """Return a user's mean and its taste: a head with a normal prior of unit covariance, in units of the user's own
    spread.

    y / spread = a + offset + <factors, v> + rest, the variance of the rest public. A user with few ratings thus keeps
    close to the items' offsets. A user whose ratings are all alike keeps close to their mean.

    Args:
        P: offset and factors of each rated item, (users, m, 1 + k).
        y: ratings (users, m).
        ratings: tell the variance of the rest.
    """
    m = y.shape[1]
    spread = np.sqrt((centre_rows(y) ** 2).mean(axis=1))
    rows = centre_rows(P[:, :, 1:])
    unit = np.where(spread > ROUNDING * np.abs(y).max(axis=1), spread, 0.0)
    left = centre_rows(y) - centre_rows(P[:, :, 0]) * unit[:, None]
    gram = rows.transpose(0, 2, 1) @ rows + ratings.residual * np.eye(rows.shape[2])
    taste = np.linalg.solve(gram, rows.transpose(0, 2, 1) @ left[:, :, None])[:, :, 0]
    head = np.concatenate([unit[:, None], taste], axis=1)
    loss = (left - (rows @ taste[:, :, None])[:, :, 0]) ** 2
    return Fit(SHARED, loss.sum(axis=1) / m, fit_intercepts(P, y, head, True), head)
