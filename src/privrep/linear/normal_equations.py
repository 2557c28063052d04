"""What users compute for least squares in U, their part of the normal equations: a function of their own rows."""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np

from privrep.errors import InputError
from privrep.linear.steps import SIZES, WIDE_CELLS, WIDE_LOWEST, octaves, projected
from privrep.local.least_squares import centred, centred_targets, least_squares_heads, ridge_fit, users_last
from privrep.local.transform import FeatureTransform
from privrep.privacy.bounds import Contributions
from privrep.privacy.contributions import Counts, CrossMoments, Summed, Vectors
from privrep.privacy.kronecker import kronecker
from privrep.typing import Array, Floats


@dataclass(frozen=True)
class NormalEquations:
    """A = sum W W^T and b = sum r W for the move of U that explains users' residuals r, with W = vec(z v^T).

    A move within the span of U changes nothing, so rows z are taken in coordinates of `outside`, an orthonormal basis
    of all that is orthogonal to U. Residuals and heads in b are those of fits that leave the row out, so that every row
    is used and none explains itself; with an intercept such a residual sees the row's distance from the mean of the
    *other* rows, m/(m-1) of that from the mean, which A must know. A user shrinks both parts by one factor, so that
    neither exceeds its norm: what is summed are the normal equations of a population with weights.
    With several targets a user has a head for each, and sends the sums over them.
    """

    U: Array  # (d, k)
    outside: Array  # (d, d - k)
    frame: FeatureTransform
    norm: float  # of b
    normal_norm: float  # of A
    ridge: float
    intercept: bool

    def __post_init__(self) -> None:
        if not (self.norm > 0 and self.normal_norm > 0):
            raise InputError(f"norms must be positive. Got {self.norm} and {self.normal_norm} instead.")

    @property
    def vector_size(self) -> int:
        return self.U.shape[1] * self.outside.shape[1]

    def __call__(self, X: Floats, y: Floats) -> dict[str, Contributions]:
        users, m, _ = X.shape
        enough = m > 1 + self.intercept  # some rows are left to fit a head on when one is left out
        P = projected(X, self.frame, self.U, self.intercept)
        rows = (centred(X) if self.intercept else X) @ self.frame.original(self.outside).astype(X.dtype)
        pull, heads = np.zeros_like(P), []
        for column in self.frame.targets(y):
            targets = centred_targets(column) if self.intercept else users_last(column)
            fit = ridge_fit(P, targets if enough else 0 * targets, self.ridge, self.intercept)
            pull += fit.loo_residuals * fit.loo_heads() / m
            heads.append(fit.heads.T)
        right = (np.ascontiguousarray(pull.transpose(2, 0, 1), dtype=X.dtype) @ rows).reshape(users, -1)
        normal = kronecker(np.stack(heads, axis=1), rows, np.full(users, 1 / max(m - self.intercept, 1)))
        length, size = _lengths(right), normal.scale * normal.sizes
        weight = np.minimum(1.0, np.minimum(self.norm / length, self.normal_norm / size))
        weight = np.where(np.isfinite(weight), weight, 0.0)
        cells = np.stack([octaves(length, WIDE_LOWEST, WIDE_CELLS), octaves(length / size)], axis=1)
        cells[:, 1] = np.where(cells[:, 1] < 0, -1, cells[:, 1] + WIDE_CELLS)
        return {
            "normal": replace(normal, scale=normal.scale * weight),
            "right": Vectors(right * weight[:, None]),
            "sizes": Counts(cells, SIZES.size),
        }


@dataclass(frozen=True)
class QuarterEquations:
    """Algorithm 2 of Jain et al. 2021: A = mean of W W^T and b = mean of y W over the second quarter of a user's rows.

    W = vec(x v^T), shrunk to length `eta`, with v the least squares head of the first quarter (the one of least norm if
    there are many); targets are held within [-`zeta`, `zeta`]. Users with fewer than four rows send zero.
    """

    U: Array
    eta: float
    zeta: float

    @property
    def vector_size(self) -> int:
        return self.U.size

    def __call__(self, X: Floats, y: Floats) -> dict[str, Contributions]:
        users, m, d = X.shape
        quarter, half = m // 4, m // 2
        if not quarter:
            nothing = np.zeros((users, 1, self.U.shape[1]))
            empty = kronecker(nothing, np.zeros((users, 1, d)), np.zeros(users))
            return {"normal": empty, "right": Vectors(np.zeros((users, self.U.size)))}
        X, y = X.astype(np.float64, copy=False), y.astype(np.float64, copy=False)
        heads = least_squares_heads(np.ascontiguousarray(X[:, :quarter]) @ self.U, y[:, :quarter])
        rows = np.ascontiguousarray(X[:, quarter:half])
        lengths = np.sqrt((rows**2).sum(axis=2)) * _lengths(heads)[:, None]
        rows = rows * np.minimum(1.0, self.eta / lengths)[:, :, None]  # X may be the users' own
        targets = np.clip(y[:, quarter:half], -self.zeta, self.zeta) / (half - quarter)
        pull = (np.ascontiguousarray(targets)[:, None, :] @ rows)[:, 0]
        right = (heads[:, :, None] * pull[:, None, :]).reshape(users, -1)
        normal = kronecker(heads[:, None, :], rows, np.full(users, 1 / (half - quarter)))
        return {"normal": normal, "right": Vectors(right)}


@dataclass(frozen=True)
class DisjointPairs:
    """Algorithm 3 of Jain et al. 2021: mean of sym(x x'^T) y y' / (|x||x'|) over neighbouring rows of the first half.

    Targets are held within [-`zeta`, `zeta`], so that a user's norm is at most zeta^2.
    """

    zeta: float

    def __call__(self, X: Floats, y: Floats) -> dict[str, Contributions]:
        pairs = X.shape[1] // 4
        rows = X[:, : max(2 * pairs, 1)].astype(np.float64)
        lengths = np.sqrt((rows**2).sum(axis=2))
        targets = np.clip(y[:, : rows.shape[1]], -self.zeta, self.zeta) * min(pairs, 1)
        rows *= (targets / np.maximum(lengths, np.finfo(np.float64).tiny))[:, :, None]
        scale = np.full(len(X), 1 / (2 * max(pairs, 1)))
        starts = range(0, max(2 * pairs, 1), 2)  # without a pair, one of zeros
        parts = (CrossMoments(np.ascontiguousarray(rows[:, j : j + 2]), scale) for j in starts)
        return {"moments": Summed(tuple(parts))}


def _lengths(vectors: Floats) -> Array:
    values = vectors.astype(np.float64, copy=False)
    return np.sqrt((values**2).sum(axis=1))
