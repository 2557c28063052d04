"""Local steps of Private FedRep: functions of public values and of one user's rows, to the bit."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import ClassVar

import numpy as np
from numpy.typing import NDArray

from privrep.data.sparse import SparseRows
from privrep.local.least_squares import (
    ROUNDING,
    centre_rows,
    centre_targets,
    find_largest,
    fit_ridge,
    move_users_last,
    subtract_mean,
    sum_columns,
    sum_rows,
)
from privrep.local.transform import FeatureTransform
from privrep.privacy.bounds import Bound, Contributions
from privrep.privacy.columns import SparseColumns
from privrep.privacy.contributions import Counts, Summed, Vectors
from privrep.privacy.moments import CrossMoments, RowMoments, pack, packed_size
from privrep.privacy.protocol import StepSpec, UserBatch
from privrep.typing import Array, Floats, Matrix, Vector

LOWEST, CELLS = -40, 81  # histograms of sizes: one cell an octave, from 2^-40 to 2^40, the ends open
WIDE_LOWEST, WIDE_CELLS = -100, 181  # the same for gradients, which go with the square of the target's unit


def find_octaves(values: Floats, lowest: int = LOWEST, count: int = CELLS) -> NDArray[np.int64]:
    """Return the cell of each positive size, its binary logarithm rounded; -1 for zero and for what is not finite.

    Args:
        values: sizes, of any shape.
        lowest: the octave of the first cell.
        count: how many cells there are; both ends are open.
    """
    positive = (values > 0) & np.isfinite(values)
    mantissa, exponent = np.frexp(np.where(positive, values, 1.0))
    nearest = exponent - (mantissa < np.sqrt(0.5)) - lowest
    return np.where(positive, np.clip(nearest, 0, count - 1), -1).astype(np.int64)


@dataclass(frozen=True)
class FeatureSizes:
    """Histograms, one a column, of users' root mean squares, around their own mean if there is an intercept.

    A user does not count in a column in which it has no value, or which does not vary within it but for rounding.
    Columns are the features and, where there are several, the targets. The size of a sparse feature is the size of its
    entries that are not zero.
    """

    several_targets: ClassVar[bool] = True
    # of few users at a time: all get as many cells as the one who has most
    spec: ClassVar[StepSpec] = StepSpec(accepts_sparse=True, fill=math.nan, floats_per_sparse_user=4096)
    intercept: bool

    def __call__(self, batch: UserBatch) -> dict[str, Contributions]:
        """Return `sizes` of each user."""
        X: Floats | SparseRows = batch.X
        y: Floats = batch.y
        targets = y if y.ndim == 3 else np.zeros((*y.shape, 0))
        d, q = X.shape[2], targets.shape[2]
        cells = [self._sparse(X) if isinstance(X, SparseRows) else self._dense(X), self._dense(targets)]
        first = np.concatenate([np.arange(d) * CELLS, (d + np.arange(q)) * CELLS])
        if isinstance(X, SparseRows):
            cells[1] = np.where(cells[1] < 0, -1, cells[1] + first[d:])
            return {"sizes": Counts(np.concatenate(cells, axis=1), (d + q) * CELLS)}
        joined = np.concatenate(cells, axis=1)
        return {"sizes": Counts(np.where(joined < 0, -1, first + joined), (d + q) * CELLS)}

    def _dense(self, values: Floats) -> NDArray[np.int64]:
        """Return the cell of each user's size within each column's own histogram, or -1, (users, columns).

        Args:
            values: (users, m, columns).
        """
        rows = values.astype(np.float64, copy=False)
        rounding = ROUNDING * find_largest(rows)
        rows = centre_rows(rows) if self.intercept else rows
        sizes = np.sqrt((rows**2).sum(axis=1) / max(values.shape[1] - self.intercept, 1))
        return find_octaves(np.where(sizes > rounding, sizes, 0.0))

    def _sparse(self, X: SparseRows) -> NDArray[np.int64]:
        """Return cells in the joint histogram of all features, or -1, (users, most columns that a user has)."""
        user, column, T = X.slots()
        squares, times = T.copy(), T.copy()
        squares.data, times.data = T.data.astype(np.float64) ** 2, np.ones(len(T.data))
        ones = np.ones(T.shape[1])
        cell = find_octaves(np.sqrt((squares @ ones) / (times @ ones)))
        place = np.arange(len(user)) - np.searchsorted(user, user)  # of a slot among its user's
        cells = np.full((len(X), int(place.max(initial=-1)) + 1), -1)
        cells[user, place] = np.where(cell < 0, -1, column * CELLS + cell)
        return cells


@dataclass(frozen=True)
class SecondMoments:
    """The second moment 1/m sum x x^T of a user's rows in public coordinates.

    With an intercept rows are taken around their mean.
    """

    several_targets: ClassVar[bool] = True
    spec: ClassVar[StepSpec] = StepSpec()
    transform: FeatureTransform
    intercept: bool

    def __call__(self, batch: UserBatch) -> dict[str, Contributions]:
        """Return `covariance` of each user."""
        X: Floats = batch.X
        m = X.shape[1]
        rows = self.transform.rows(centre_rows(X) if self.intercept else X)
        return {"covariance": RowMoments(rows, np.full(len(X), 1 / max(m - self.intercept, 1)))}


@dataclass(frozen=True)
class Frequencies:
    """Mean squares of features over a user's rows, in public scales, and a constant `unit` to measure them by.

    They are to sparse features what a covariance is to dense ones, as far as it can be afforded. Clipping shrinks the
    unit with the rest, so that the ratio is the mean square in the clipped population.
    """

    several_targets: ClassVar[bool] = True
    spec: ClassVar[StepSpec] = StepSpec(accepts_sparse=True)
    scale: Vector
    unit: float = 1.0

    def __call__(self, batch: UserBatch) -> dict[str, Contributions]:
        """Return `frequencies` of each user."""
        X: SparseRows = batch.X
        user, column, T = X.slots()
        squares = T.copy()
        squares.data = T.data.astype(np.float64) ** 2
        values = (squares @ np.full(T.shape[1], 1 / X.shape[1])) / self.scale[column] ** 2
        tail = np.full((len(X), 1), self.unit)
        return {"frequencies": SparseColumns(user, column, values[:, None], tail, X.shape[2])}


@dataclass(frozen=True)
class PairMoments:
    """The pair moments of Snedeker, Zhou, Bassily 2025, Algorithm 2, in public coordinates.

    Z = 1/(m(m-1)) sum over pairs of different rows of y y' x x'^T. With several targets it is the sum of their Z.
    `normalised` brings every row to length one first (Jain et al. 2021, Algorithm 3).
    """

    several_targets: ClassVar[bool] = True
    spec: ClassVar[StepSpec] = StepSpec()
    transform: FeatureTransform
    intercept: bool
    normalised: bool = False

    def __call__(self, batch: UserBatch) -> dict[str, Contributions]:
        """Return `moments` of each user."""
        X: Floats = batch.X
        y: Floats = batch.y
        m = X.shape[1]
        rows = self.transform.rows(centre_rows(X) if self.intercept else X)
        if self.normalised:
            lengths = np.sqrt((rows.astype(np.float64) ** 2).sum(axis=2, keepdims=True))
            rows = (rows / np.maximum(lengths, np.finfo(np.float64).tiny)).astype(X.dtype)
        scale = np.full(len(X), 1 / (m * (m - 1)) if m > 1 else 0.0)
        parts = [
            CrossMoments(rows * (centre_targets(t).T if self.intercept else t)[:, :, None].astype(X.dtype), scale)
            for t in self.transform.targets(y)
        ]
        return {"moments": parts[0] if len(parts) == 1 else Summed(tuple(parts))}


@dataclass(frozen=True)
class ResidualMoments:
    """The pair moments of what a user's head on U leaves over, outside the span of U.

    The strong directions of a representation hide the weak ones in `PairMoments`. With the strong ones in U, users'
    residuals hold the weak ones and noise. Two residuals of a fit are correlated through the rows' images in U alone,
    which adds nothing on average outside its span.
    """

    several_targets: ClassVar[bool] = True
    spec: ClassVar[StepSpec] = StepSpec()
    U: Matrix
    transform: FeatureTransform
    ridge: float
    intercept: bool

    def __call__(self, batch: UserBatch) -> dict[str, Contributions]:
        """Return `moments` of each user."""
        X: Floats = batch.X
        y: Floats = batch.y
        m = X.shape[1]
        P = project_centred(X, self.transform, self.U, self.intercept)
        inside = np.ascontiguousarray(P.transpose(2, 1, 0), dtype=X.dtype)
        rows = self.transform.rows(centre_rows(X) if self.intercept else X) - inside @ self.U.T.astype(X.dtype)
        scale = np.full(len(X), 1 / (m * (m - 1)) if m > self.U.shape[1] + self.intercept + 1 else 0.0)
        parts = []
        for column in self.transform.targets(y):
            targets = centre_targets(column) if self.intercept else move_users_last(column)
            left = targets - sum_columns(P * fit_ridge(P, targets, self.ridge, self.intercept).heads[:, None, :])
            parts.append(CrossMoments(rows * left.T[:, :, None].astype(X.dtype), scale))
        return {"moments": parts[0] if len(parts) == 1 else Summed(tuple(parts))}


SIZES = Bound(math.sqrt(2.0), WIDE_CELLS + CELLS, acute=True)
"""Bound of the histograms that a round asks for: norms of users' gradients, and their ratios to the second moment of
the
heads."""


def gradient_size(d: int, k: int) -> int:
    """Return how many numbers a gradient by U (d, k) and a packed second moment of heads have together."""
    return d * k + packed_size(k)


def pull_rows(X: Floats | SparseRows, transform: FeatureTransform, pull: Floats) -> Floats | SparseColumns:
    """Return the sum over rows j of pull_j z_j^T, z the transformed rows: (users, k, d), or slots of sparse rows.

    Args:
        X: rows (users, m, d).
        transform: public coordinates of the rows.
        pull: of each row, (k, m, users).
    """
    if not isinstance(X, SparseRows):
        return transform.rows(np.ascontiguousarray(pull.transpose(2, 0, 1), dtype=X.dtype) @ X)
    users, m, d = X.shape
    user, column, T = X.slots()
    values = T @ np.ascontiguousarray(pull.transpose(2, 1, 0)).reshape(users * m, -1)
    return SparseColumns(user, column, values / transform.scale[column, None], np.empty((users, 0)), d)


def project_centred(X: Floats | SparseRows, transform: FeatureTransform, basis: Array, intercept: bool) -> Floats:
    """Return transformed rows times the basis, (k, m, users), around their user's mean if there is an intercept.

    Args:
        X: rows (users, m, d).
        transform: public coordinates of the rows.
        basis: (d, k).
        intercept: whether to subtract users' means.
    """
    matrix = transform.to_original(basis)
    P = move_users_last(X.project(matrix) if isinstance(X, SparseRows) else X @ matrix.astype(X.dtype))
    return subtract_mean(P) if intercept else P


def make_nothing(users: int, d: int, k: int) -> Contributions:
    """Return the contributions of users who have nothing to say of a gradient by U.

    Args:
        users: how many there are.
        d: rows of U.
        k: columns of U.
    """
    none = np.empty(0, np.int64)
    return SparseColumns(none, none, np.empty((0, k)), np.zeros((users, packed_size(k))), d)


@dataclass(frozen=True)
class LeaveOneOutGradient:
    """The round of Private FedRep with every row used: the gradient by U and the second moment of the heads, joined.

    The paper (Snedeker, Zhou, Bassily 2025) fits the head on one batch and takes the gradient on another. Leaving out
    one row at a time and taking the gradient on it keeps that independence row by row and wastes none.
    A user sends the gradient, of dense rows the part of it orthogonal to U, which is all the step uses. Behind it
    stands `heads_weight` times the second moment of its heads, in one vector. Both are clipped by the same factor, so
    their ratio is the step of the clipped population. With several targets a user has a head for each, and sends the
    sums over them.
    Products with X are in its own precision: float32 rows whose mean is 10,000 times their spread lose digits.
    """

    several_targets: ClassVar[bool] = True
    U: Matrix
    transform: FeatureTransform
    heads_weight: float
    ridge: float
    intercept: bool

    @property
    def spec(self) -> StepSpec:
        return StepSpec(accepts_sparse=True, floats_per_user=self.U.size)

    def __call__(self, batch: UserBatch) -> dict[str, Contributions]:
        """Return `step` and `sizes` of each user."""
        X: Floats | SparseRows = batch.X
        y: Floats = batch.y
        users, m, d = X.shape
        k = self.U.shape[1]
        if m <= 1 + self.intercept:  # no rows are left to fit a head on when one is left out
            return {"step": make_nothing(users, d, k), "sizes": Counts(np.full((users, 2), -1), SIZES.size)}
        P = project_centred(X, self.transform, self.U, self.intercept)
        pull, moment = self._pulls(X, P, y)
        step, norm = self._join(X, P, pull, self.heads_weight * moment)
        ratio = norm / np.sqrt((moment**2).sum(axis=1))
        cells = np.stack([find_octaves(norm, WIDE_LOWEST, WIDE_CELLS), find_octaves(ratio)], axis=1)
        cells[:, 1] = np.where(cells[:, 1] < 0, -1, cells[:, 1] + WIDE_CELLS)
        return {"step": step, "sizes": Counts(cells, SIZES.size)}

    def _pulls(self, X: Floats | SparseRows, P: Floats, y: Floats) -> tuple[Floats, Floats]:
        """Return `_pull` summed over all targets.

        Args:
            X: rows (users, m, d).
            P: the rows' images (k, m, users).
            y: targets (users, m) or (users, m, q).
        """
        pulls, moments = zip(*(self._pull(P, t) for t in self.transform.targets(y)), strict=True)
        return sum(pulls[1:], pulls[0]), sum(moments[1:], moments[0])

    def _pull(self, P: Floats, y: Floats) -> tuple[Floats, Floats]:
        """Return how each row pulls at U, (k, m, users), and the heads' packed second moment, (users, packed k), for
        one target.

        Args:
            P: the rows' images (k, m, users).
            y: one target (users, m).
        """
        k, m, _ = P.shape
        fit = fit_ridge(P, centre_targets(y) if self.intercept else move_users_last(y), self.ridge, self.intercept)
        heads = fit.loo_heads()
        pull = fit.loo_residuals * heads / m
        moments = [sum_rows(heads[a] * heads[b]) / m for a in range(k) for b in range(a, k)]
        moment = np.stack(moments, axis=1) * pack(np.ones((k, k)))
        # centred pulls are the same as centred rows, which are many more
        return subtract_mean(pull) if self.intercept else pull, moment

    def _join(self, X: Floats | SparseRows, P: Floats, pull: Floats, tail: Floats) -> tuple[Contributions, Floats]:
        """Return gradient and tail as one contribution, and the gradient's norms, (users,).

        Args:
            X: rows (users, m, d).
            P: the rows' images (k, m, users).
            pull: of each row, (k, m, users).
            tail: numbers to append, (users, packed k).
        """
        gradient = pull_rows(X, self.transform, pull)
        if isinstance(gradient, SparseColumns):
            return replace(gradient, tail=tail), gradient.measure_columns()
        users, k, d = gradient.shape
        within = np.stack([np.stack([sum_rows(pull[a] * P[b]) for b in range(k)], 1) for a in range(k)], 1)
        gradient -= within.astype(gradient.dtype) @ self.U.T.astype(gradient.dtype)
        joined = np.empty((users, gradient_size(d, k)))
        joined[:, : d * k] = gradient.reshape(users, d * k)
        joined[:, d * k :] = tail
        return Vectors(joined), np.sqrt((joined[:, : d * k] ** 2).sum(axis=1))


@dataclass(frozen=True)
class PowerStep:
    """A round of the power method: Z X for the pair moments Z of a user (see `PairMoments`) and a public basis X.

    The method's paper (Shen et al. 2023) takes M = 1/m sum y^2 x x^T in place of Z, `own_rows`. M's eigenvalues outside
    the representation are as large as the targets' mean square. Z's are zero there, so Z needs fewer rounds.
    """

    several_targets: ClassVar[bool] = True
    basis: Matrix
    transform: FeatureTransform
    intercept: bool
    own_rows: bool = False

    @property
    def spec(self) -> StepSpec:
        return StepSpec(accepts_sparse=True, floats_per_user=self.basis.size)

    def __call__(self, batch: UserBatch) -> dict[str, Contributions]:
        """Return `image` of each user, (users, columns d)."""
        X: Floats | SparseRows = batch.X
        y: Floats = batch.y
        m = X.shape[1]
        P = project_centred(X, self.transform, self.basis, self.intercept)
        pull = np.zeros_like(P)
        for column in self.transform.targets(y):
            t = centre_targets(column) if self.intercept else move_users_last(column)
            if self.own_rows:
                pull += t**2 * P / m
            elif m > 1:
                weighted = t * P
                pull += t * (sum_rows(weighted)[:, None, :] - weighted) / (m * (m - 1))
        image = pull_rows(X, self.transform, subtract_mean(pull) if self.intercept else pull)
        return {"image": image if isinstance(image, SparseColumns) else Vectors(image.reshape(len(image), -1))}
