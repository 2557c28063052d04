"""What users compute in the passes of Private FedRep: public values plus a function of one user's rows, to the bit."""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from privrep.local.least_squares import (
    ROUNDING,
    Floats,
    centred,
    centred_targets,
    ridge_fit,
    sum_rows,
    users_last,
    without_mean,
)
from privrep.privacy.bounds import Array, Bound, Contributions
from privrep.privacy.contributions import Counts, CrossMoments, Vectors, pack, packed_size

LOWEST, CELLS = -40, 81  # histograms of sizes: one cell an octave, from 2^-40 to 2^40, the ends open


WIDE_LOWEST, WIDE_CELLS = -100, 181  # the same for gradients, which go with the square of the target's unit


def octaves(values: Floats, lowest: int = LOWEST, count: int = CELLS) -> NDArray[np.int64]:
    """The cell of each positive size, its binary logarithm rounded; -1 for zero and for what is not finite."""
    positive = (values > 0) & np.isfinite(values)
    mantissa, exponent = np.frexp(np.where(positive, values, 1.0))
    nearest = exponent - (mantissa < np.sqrt(0.5)) - lowest
    return np.where(positive, np.clip(nearest, 0, count - 1), -1).astype(np.int64)


@dataclass(frozen=True)
class FeatureSizes:
    """A histogram, per feature, of the users' root mean squares (around their own mean if there is an intercept).

    A feature that does not vary within a user, but for rounding, is not counted by that user.
    """

    intercept: bool

    def __call__(self, X: Floats, y: Floats) -> dict[str, Contributions]:
        rows = X.astype(np.float64, copy=False)
        rounding = ROUNDING * np.abs(rows).max(axis=1)
        rows = centred(rows) if self.intercept else rows
        sizes = np.sqrt((rows**2).sum(axis=1) / max(X.shape[1] - self.intercept, 1))
        cells = octaves(np.where(sizes > rounding, sizes, 0.0))
        features = np.arange(X.shape[2]) * CELLS
        return {"sizes": Counts(np.where(cells < 0, -1, features + cells), X.shape[2] * CELLS)}


@dataclass(frozen=True)
class PairMoments:
    """Z = 1/(m(m-1)) sum over pairs of different rows of y y' x x'^T, features in public scales (000, Algorithm 2)."""

    inverse_scale: Array
    intercept: bool

    def __call__(self, X: Floats, y: Floats) -> dict[str, Contributions]:
        m = X.shape[1]
        rows = (centred(X) if self.intercept else X) * self.inverse_scale.astype(X.dtype)
        rows = rows * (centred_targets(y).T if self.intercept else y)[:, :, None].astype(X.dtype)
        scale = np.full(len(X), 1 / (m * (m - 1)) if m > 1 else 0.0)
        return {"moments": CrossMoments(rows, scale)}


SIZES = Bound(math.sqrt(2.0), WIDE_CELLS + CELLS, acute=True)
"""The histograms a round asks for: sizes of users' gradients, and their ratios to the second moment of the heads."""


def gradient_size(d: int, k: int) -> int:
    return d * k + packed_size(k)


@dataclass(frozen=True)
class LeaveOneOutGradient:
    """The round of Private FedRep with every row used: gradient and second moment of the heads, joined.

    The paper fits the head on one batch and takes the gradient on another. Leaving out one row at a time and taking
    the gradient on it keeps that independence row by row and wastes none. A user sends the gradient (its part
    orthogonal to U, which is all the step uses) together with `heads_weight` times the second moment of its heads, as
    one vector: both are then clipped by the same factor, so their ratio is the step of the clipped population.
    Products with X are in its own precision: float32 rows whose mean is 10,000 times their spread lose digits.
    """

    U: Array
    inverse_scale: Array
    heads_weight: float
    ridge: float
    intercept: bool

    @property
    def vector_size(self) -> int:
        return self.U.size

    def __call__(self, X: Floats, y: Floats) -> dict[str, Contributions]:
        users, m, d = X.shape
        k = self.U.shape[1]
        if m <= 1 + self.intercept:  # no rows are left to fit a head on when one is left out
            nothing = np.full((users, 2), -1)
            return {"step": Vectors(np.zeros((users, gradient_size(d, k)))), "sizes": Counts(nothing, SIZES.size)}
        targets = centred_targets(y) if self.intercept else users_last(y)
        P = users_last(X @ (self.U * self.inverse_scale[:, None]).astype(X.dtype))
        P = without_mean(P) if self.intercept else P
        fit = ridge_fit(P, targets, self.ridge, self.intercept)
        heads = fit.loo_heads()
        pull = fit.loo_residuals * heads / m
        pull = without_mean(pull) if self.intercept else pull  # the same as centring the rows, which are many more
        within = np.stack([np.stack([sum_rows(pull[a] * P[b]) for b in range(k)], 1) for a in range(k)], 1)
        gradient = np.ascontiguousarray(pull.transpose(2, 0, 1), dtype=X.dtype) @ X
        gradient *= self.inverse_scale.astype(X.dtype)
        gradient -= within.astype(X.dtype) @ self.U.T.astype(X.dtype)
        moments = [sum_rows(heads[a] * heads[b]) / m for a in range(k) for b in range(a, k)]
        moment = np.stack(moments, axis=1) * pack(np.ones((k, k)))
        joined = np.empty((users, gradient_size(d, k)))
        joined[:, : d * k] = gradient.reshape(users, d * k)
        joined[:, d * k :] = self.heads_weight * moment
        gradient_norm = np.sqrt((joined[:, : d * k] ** 2).sum(axis=1))
        ratio = gradient_norm / np.sqrt((moment**2).sum(axis=1))
        cells = np.stack([octaves(gradient_norm, WIDE_LOWEST, WIDE_CELLS), octaves(ratio)], axis=1)
        cells[:, 1] = np.where(cells[:, 1] < 0, -1, cells[:, 1] + WIDE_CELLS)
        return {"step": Vectors(joined), "sizes": Counts(cells, SIZES.size)}
