"""Local steps of the passes that find the prior of heads: locations, moments, gradients.

Columns are the features, then the targets. Each user's numbers are a function of its own rows, to the bit: products are
stacked, one per user (see `local.least_squares`).
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import ClassVar

import numpy as np

from privrep.data.sparse import SparseRows
from privrep.errors import InputError
from privrep.heads.posterior import Spread, make_images, make_spread
from privrep.linear.gradient_parts import Part, join_parts, make_between_part, make_within_part
from privrep.linear.steps import CELLS, LOWEST, FeatureSizes, find_octaves
from privrep.local.least_squares import ROUNDING, find_largest
from privrep.local.prior import PriorMean
from privrep.local.transform import FeatureTransform
from privrep.privacy.bounds import Contributions, Losses
from privrep.privacy.contributions import Counts
from privrep.privacy.moments import RowMoments
from privrep.privacy.protocol import Step, StepSpec, UserBatch
from privrep.typing import Array, Floats, Integers, Matrix, Vector

SIGNED_CELLS = 2 * CELLS + 1  # histograms of means: octaves below zero, zero, octaves above
LINEAR_CELLS = 16  # of a window, and one more at either end for what lies outside
ROW_CELLS = 24  # cells of numbers of rows: 1 to 4 by themselves, then one an octave
FARTHEST = 5.0  # most that a mean may lie off the centre, in units of its column's spread


def add_target_axis(y: Floats) -> Floats:
    """Return targets (users, m, q); a single target (users, m) gets q = 1."""
    return y if y.ndim == 3 else y[:, :, None]


def check_shapes(
    X: Floats | SparseRows,
    y: Floats,
    mean: PriorMean | None = None,
    *,
    features: Sequence[Array | None] = (),
    targets: Sequence[Array] = (),
    columns: Sequence[Array] = (),
) -> None:
    """Raise InputError unless public arrays are for such rows. It looks at shapes alone.

    Args:
        X: rows (users, m, d).
        y: targets (users, m, q).
        mean: a prior mean; None: there is none.
        features: arrays with a row for each feature.
        targets: vectors with a number for each target.
        columns: vectors with a number for each feature and each target.
    """
    d, q = X.shape[2], y.shape[2]
    if mean is not None:
        mean.check_rows(d, q)
    fit = all(array is None or len(array) == d for array in features)
    fit = fit and all(array.shape == (q,) for array in targets) and all(array.shape == (d + q,) for array in columns)
    if not fit:
        raise InputError(f"a step for other rows cannot be asked of rows with {d:,} features and {q:,} targets.")


def find_row_cell(rows: int) -> int:
    """Return the cell of a number of rows: 1 to 4 each have their own, then there is one an octave."""
    return rows - 1 if rows <= 4 else min(1 + math.ceil(math.log2(rows)), ROW_CELLS - 1)


def list_typical_rows() -> Array:
    """Return a typical number of rows of each cell, (ROW_CELLS,)."""
    return np.concatenate([np.arange(1, 5), 2.0 ** (np.arange(4, ROW_CELLS) - 1.5)])


@dataclass(frozen=True)
class ColumnSizes:
    """Histograms of columns: sizes within users, and users' means by signed octave; and a histogram of numbers of rows.

    Features and targets have histograms of their own, because histograms of targets may be had at a lower price. Sparse
    features have none of means: their mean is near zero. A user does not count in a column in which it has no value.
    Without `features`, sizes of features are left out: they are declared.
    """

    several_targets: ClassVar[bool] = True
    spec: ClassVar[StepSpec] = StepSpec(accepts_sparse=True, fill=math.nan, floats_per_sparse_user=4096)
    intercept: bool
    features: bool = True

    def __call__(self, batch: UserBatch) -> dict[str, Contributions]:
        """Return `sizes`, `levels`, `target_sizes`, `target_levels` and `rows` of each user, as far as they apply."""
        X: Floats | SparseRows = batch.X
        y = add_target_axis(batch.y)
        one = np.zeros(y.shape[:2])  # a single target, which is not counted among the columns
        sizes = FeatureSizes(self.intercept)
        rows = np.full((len(y), 1), find_row_cell(X.shape[1]))
        found: dict[str, Contributions] = {
            "target_sizes": sizes(UserBatch(y, one))["sizes"],
            "target_levels": _count_levels(y),
            "rows": Counts(rows, ROW_CELLS),
        }
        if self.features:
            found["sizes"] = sizes(replace(batch, y=one))["sizes"]
        return found if isinstance(X, SparseRows) else found | {"levels": _count_levels(X)}


def _count_levels(values: Floats) -> Counts:
    """Return users' means of columns (users, m, columns) by signed octave, a histogram for each column."""
    means = _average_columns(values)
    columns = means.shape[1]
    cells = find_signed_octaves(means) + SIGNED_CELLS * np.arange(columns)
    return Counts(np.where(np.isnan(means), -1, cells), SIGNED_CELLS * columns)


def _average_columns(values: Floats, largest: Array | None = None) -> Array:
    """Return users' means of columns, (users, columns); means that are only rounding are zero, missing ones NaN.

    Args:
        values: (users, m, columns); NaN is a missing value.
        largest: what `find_largest` says of them, (users, columns), if it is known.
    """
    rows = values.astype(np.float64, copy=False)
    m = rows.shape[1]
    means: Array = (np.full((1, m), 1 / m) @ rows)[:, 0]
    return np.where(np.abs(means) <= ROUNDING * (find_largest(rows) if largest is None else largest), 0.0, means)


def find_signed_octaves(values: Array) -> Integers:
    """Return the cell of each number, in the shape of `values`: an octave below zero, zero, or an octave above."""
    size = find_octaves(np.abs(values))
    cells = np.where(values < 0, CELLS - 1 - size, CELLS + 1 + size)
    return np.where(size < 0, CELLS, cells).astype(np.int64)


def list_signed_edges() -> tuple[Array, Array]:
    """Return the lower and the upper edge of each cell of `find_signed_octaves`, (SIGNED_CELLS,) each."""
    middle = np.arange(LOWEST, LOWEST + CELLS)
    low, high = 2.0 ** (middle - 0.5), 2.0 ** (middle + 0.5)
    return np.concatenate([-high[::-1], [0.0], low]), np.concatenate([-low[::-1], [0.0], high])


@dataclass(frozen=True)
class LevelCells:
    """Histograms of users' means of columns in windows, which begin at `start` and have cells of `width`.

    A column of width 0 is not counted. A user does not count in a column in which it has no value.
    """

    several_targets: ClassVar[bool] = True
    spec: ClassVar[StepSpec] = StepSpec(accepts_sparse=True, fill=math.nan)
    start: Vector  # (columns,)
    width: Vector  # (columns,)

    def __call__(self, batch: UserBatch) -> dict[str, Contributions]:
        """Return `cells` of each user: LINEAR_CELLS of each counted column, and one more at either end."""
        X: Floats | SparseRows = batch.X
        y = add_target_axis(batch.y)
        if self.start.shape != self.width.shape or len(self.width) != y.shape[2]:
            check_shapes(X, y, columns=(self.start, self.width))
        counted, before = np.flatnonzero(self.width > 0), len(self.width) - y.shape[2]
        if isinstance(X, SparseRows) or not before:  # means of sparse features are taken to be zero
            means, targets = np.zeros((len(y), len(counted))), counted >= before
            means[:, targets] = _average_columns(y)[:, counted[targets] - before]
        else:
            means = np.concatenate([_average_columns(X), _average_columns(y)], axis=1)[:, counted]
        place = np.floor((means - self.start[counted]) / self.width[counted])
        cells = np.clip(np.where(np.isfinite(place), place, -1.0), -1, LINEAR_CELLS).astype(np.int64) + 1
        total = LINEAR_CELLS + 2
        counts = np.where(np.isnan(means), -1, cells + total * np.arange(len(counted)))
        return {"cells": Counts(counts, total * len(counted))}


@dataclass(frozen=True)
class PanelMoments:
    """Second moments of columns, targets included: of rows around their user's mean, and of users' means.

    Both have one more column of known size, so that means over users can be read off a sum by direction alone. Within
    users it adds 1 to a corner for every row but one. Between users it is the constant 1.
    """

    several_targets: ClassVar[bool] = True
    spec: ClassVar[StepSpec] = StepSpec(fill=math.nan)
    scale: Vector  # (d + q,): of rows around their means
    centre: Vector  # (d + q,): also what a column holds of a user who has no value in it
    between: Vector  # (d + q,): scale of users' means around the centre
    intercept: bool

    def __call__(self, batch: UserBatch) -> dict[str, Contributions]:
        """Return `within` and, with intercepts, `between` of each user."""
        X: Floats = batch.X
        users, m, _ = X.shape
        y = add_target_axis(batch.y)
        check_shapes(X, y, columns=(self.scale, self.centre, self.between))
        joined = np.concatenate([X, y], axis=2).astype(np.float64, copy=False)
        np.copyto(joined, self.centre, where=np.isnan(joined))
        largest = find_largest(joined)
        means = _average_columns(joined, largest)
        rows = joined - means[:, None, :] if self.intercept else joined
        rows = np.where(np.abs(rows) > ROUNDING * largest[:, None], rows, 0.0)
        within = np.zeros((users, m + 1, joined.shape[2] + 1))
        within[:, :m, :-1] = rows / self.scale
        within[:, m, -1] = np.sqrt(max(m - self.intercept, 0))
        found: dict[str, Contributions] = {"within": RowMoments(within, np.ones(users))}
        if self.intercept:
            between = np.empty((users, 1, joined.shape[2] + 1))
            between[:, 0, :-1] = np.clip((means - self.centre) / self.between, -FARTHEST, FARTHEST)
            between[:, 0, -1] = 1.0
            found["between"] = RowMoments(between, np.ones(users))
        return found


@dataclass(frozen=True)
class CommonGradient:
    """Two gradients of the likelihood around a prior mean: by slopes within users, and by levels between users.

    Residuals r are weighed by how users' slopes and levels vary: B_0 = (I + P P^T)^-1, P the rows along `factor`, and
    levels with `level_ratio` times the noise's variance (see `heads.posterior`).
    within: sum over rows of z (B r), z the rows in public coordinates, B = B_0 with levels free.
    between: (1, p) times the sum of B r, B with levels as they vary. p are coordinates of the user's mean row, in
    public units, that its level may follow.
    Each is followed by `tail` times its curvature, a matrix (`full`) or one number. Clipping shrinks both by one
    factor, so their ratio is Newton's step of the clipped population. `sizes` are histograms of the norms of both
    gradients, and of their ratios to the curvatures' norms.
    """

    several_targets: ClassVar[bool] = True
    mean: PriorMean
    transform: FeatureTransform
    target_scale: Vector  # (q,)
    factor: Matrix  # (d, p)
    level_ratio: float
    typical_rows: float
    within_tail: float
    between_tail: float
    full: bool

    def __post_init__(self) -> None:
        numbers = self.level_ratio, self.within_tail, self.between_tail
        if not (self.typical_rows > 0 and all(0 <= number < math.inf for number in numbers)):
            raise InputError("ratios and tails of curvatures are 0 or more, and users have rows. Got other numbers.")

    @property
    def spec(self) -> StepSpec:
        floats = self.mean.slopes.size + self.factor.size
        return StepSpec(accepts_sparse=True, fill=self.mean.fill, floats_per_user=floats)

    def __call__(self, batch: UserBatch) -> dict[str, Contributions]:
        """Return `within`, `sizes` and, with intercepts, `between` of each user."""
        X: Floats | SparseRows = batch.X
        y, z = add_target_axis(batch.y), self.transform
        turned = None if z.whitening is None else z.whitening.T
        check_shapes(X, y, features=(self.factor, z.scale, z.whitening, turned), targets=(self.target_scale,))
        residuals = subtract_prior_mean(self.mean, X, y) / self.target_scale
        images = make_images(X, self.factor, self.mean, own=False)
        spread = make_spread(images, np.ascontiguousarray(residuals[:, :, 0]))
        weighed = spread.apply(residuals)  # B_0 r, (users, m, q)
        parts = {"within": self._within(X, spread, weighed, residuals)}
        if self.mean.intercept:
            parts["between"] = self._between(X, spread, weighed)
        return join_parts(parts)

    def _within(self, X: Floats | SparseRows, spread: Spread, weighed: Array, residuals: Array) -> Part:
        """Return the gradient by slopes.

        Args:
            X: rows (users, m, d).
            spread: the rows as the slopes' prior weighs them.
            weighed: B_0 times the residuals, (users, m, q).
            residuals: targets less the prior mean, (users, m, q).
        """
        m, intercept = X.shape[1], self.mean.intercept
        pull = _free_levels(spread, weighed) if intercept else weighed
        rounding = ROUNDING * np.abs(residuals).max(axis=1, keepdims=True)
        pull = np.where(np.abs(pull) > rounding, pull, 0.0)
        scale = np.ones(len(pull)) if isinstance(X, SparseRows) else self._left_over(spread, m)
        return make_within_part(X, self.transform, pull, scale, intercept, self.full, self.within_tail)

    def _left_over(self, spread: Spread, m: int) -> Array:
        """Return the share of users' rows that levels and slopes along the factor leave to common slopes, (users,)."""
        if not spread.images.shape[2]:
            return np.ones(len(spread.ones))
        trace = spread.diagonal.sum(axis=1)
        if self.mean.intercept:
            trace = trace - (spread.ones**2).sum(axis=1) / np.maximum(spread.ones.sum(axis=1), 1e-300)
        return np.clip(trace / max(m - self.mean.intercept, 1), 0.0, 1.0)

    def _between(self, X: Floats | SparseRows, spread: Spread, weighed: Array) -> Part:
        """Return the gradient by the level and by coordinates of users' mean rows.

        Args:
            X: rows (users, m, d).
            spread: the rows as the slopes' prior weighs them.
            weighed: B_0 times the residuals, (users, m, q).
        """
        whole = np.maximum(spread.ones.sum(axis=1), 0.0)  # rounding could make it negative, and a curvature no square
        weight = 1 / (1 + self.level_ratio * whole)
        pull = weight[:, None, None] * (np.ones((1, X.shape[1])) @ weighed)  # (users, 1, q)
        return make_between_part(X, self.mean, pull, whole * weight, self.typical_rows, self.full, self.between_tail)


def _free_levels(spread: Spread, weighed: Array) -> Array:
    """Return B times values, levels free, (users, m, c).

    Args:
        spread: the rows as the slopes' prior weighs them.
        weighed: B_0 times the values, (users, m, c).
    """
    m = weighed.shape[1]
    sums = np.ones((1, m)) @ weighed
    return weighed - spread.ones[:, :, None] * (sums / np.maximum(spread.ones.sum(axis=1), 1e-300)[:, None, None])


def subtract_prior_mean(mean: PriorMean, X: Floats | SparseRows, y: Floats) -> Array:
    """Return targets minus the prior mean, (users, m, q), in double precision.

    Args:
        mean: the prior mean.
        X: rows (users, m, d).
        y: targets (users, m, q).
    """
    check_shapes(X, y, mean)
    return y.astype(np.float64, copy=False) - mean.predict_users(X)


@dataclass(frozen=True)
class Residual:
    """A step asked about what common slopes leave of the targets.

    Levels stay: with intercepts a step takes users' means out by itself, and without there are none.
    """

    several_targets: ClassVar[bool] = True
    step: Step
    mean: PriorMean

    @property
    def spec(self) -> StepSpec:
        return replace(self.step.spec, fill=self.mean.fill)

    def __call__(self, batch: UserBatch) -> Mapping[str, Contributions | Losses]:
        """Return the contributions of the step inside."""
        y = add_target_axis(batch.y)
        check_shapes(batch.X, y, self.mean)
        if not self.mean.slopes.any():
            return self.step(batch)
        left = y.astype(np.float64, copy=False) - self.mean.apply_slopes(batch.X)
        return self.step(replace(batch, y=(left if batch.y.ndim == 3 else left[:, :, 0]).astype(batch.y.dtype)))
