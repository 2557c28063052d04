"""The prior of heads: a user's model before its own targets are seen, from everybody's releases. All of it is public.

The model of user i with mean row xbar_i, for one target:

    y_ij = level + <x_ij - centre, slopes> + <mu_i - centre, h> + b_i + <x_ij - xbar_i, factor v_i> + e_ij
    b_i ~ N(0, rho s^2),   v_i ~ N(0, s^2 I),   e_ij ~ N(0, s^2)

Slopes may turn around the centre instead of xbar_i (`own_origin`): then levels are those at the centre.

mu_i is the mean row that the user would have after very many rows. The mean of m rows estimates it. Users' means vary
by `spread` times as much as the rows of one user, along each of `axes`. So the posterior mean of mu_i - centre is
spread / (spread + 1 / m) times xbar_i - centre. `context` is h in these coordinates.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from privrep.data.sparse import SparseRows
from privrep.errors import InputError
from privrep.local.transform import FeatureTransform
from privrep.typing import Array, Floats, Matrix, Vector


@dataclass(frozen=True)
class PriorMean:
    """Expected target of a row, from the row and the mean of its user's rows.

    Without `intercept` users have no levels: the mean is <x, slopes>, and the fields of levels are zero or empty.
    """

    level: Vector  # (q,), at the centre
    slopes: Matrix  # (d, q), common to all users
    centre: Vector  # (d,): a typical mean row
    located: Vector  # (d,): 1 where the centre is known, else 0: there a level does not follow the user's mean row
    axes: Matrix  # (d, r): coordinates of users' mean rows, in which rows of one user have unit variance
    spread: Vector  # (r,): variance of users' means in them
    context: Matrix  # (r, q): what a user's mean row says of its level, beyond the slopes
    intercept: bool

    def __post_init__(self) -> None:
        (d, q), r = self.slopes.shape, len(self.spread)
        shapes = {"level": (q,), "centre": (d,), "located": (d,), "axes": (d, r), "context": (r, q)}
        if any(getattr(self, name).shape != shape for name, shape in shapes.items()):
            raise InputError("the arrays of a prior mean do not fit each other; make it anew.")

    def check_rows(self, features: int, targets: int) -> None:
        """Raise InputError unless the mean is one of rows with this many features and targets.

        Otherwise arrays of other shapes could be spread over rows, which would then have more targets than they have.
        """
        if self.slopes.shape != (features, targets):
            mine = "{:,} features and {:,} targets".format(*self.slopes.shape)
            raise InputError(f"a prior mean of {mine} does not go with rows of {features:,} and {targets:,}.")

    @classmethod
    def zero(cls, features: int, targets: int, intercept: bool) -> PriorMean:
        """Return the mean that is zero everywhere.

        Args:
            features: of a row, d.
            targets: of a row, q.
            intercept: whether users have levels.
        """
        d, q = features, targets
        empty = np.zeros((d, 0)), np.zeros(0), np.zeros((0, q))
        return cls(np.zeros(q), np.zeros((d, q)), np.zeros(d), np.ones(d), *empty, intercept)

    @property
    def knows_newcomers(self) -> bool:
        """Return whether rows of users without rows count by all common slopes.

        A slope counts around the centre of its column. Where that is not known, it counts around users' own means,
        which newcomers do not have.
        """
        return not (self.slopes.any(axis=1) & (self.located == 0)).any()

    def scale_levels(self, factor: float) -> PriorMean:
        """Return the mean with levels, and what mean rows say of them, this many times as far from zero."""
        return replace(self, level=factor * self.level, context=factor * self.context)

    @property
    def fill(self) -> Array:
        """Return the value of each column for a user without any value in it, (d,): the centre, where known."""
        return self.centre * self.located

    @property
    def constant(self) -> Array:
        """Return the mean at a row of zeros, of a user whose mean row is the centre, (q,)."""
        return self.level - self.centre @ (self.slopes * self.located[:, None])

    def context_weights(self, rows: int) -> Array:
        """Return the weights of a user's mean row for its level, (d, q), with this many rows."""
        known = self.spread / (self.spread + 1 / rows) if rows else np.zeros_like(self.spread)
        return self.axes @ (known[:, None] * self.context)

    def mean_weights(self, rows: int) -> Array:
        """Return all weights of a user's mean row, (d, q), with this many rows; `centre` moves with it."""
        return self.context_weights(rows) - self.slopes * (1 - self.located)[:, None]

    def level_variance(self, rows: int) -> Array:
        """Return the variance of users' levels that comes from mean rows being known by this many rows alone, (q,)."""
        return (self.spread / (1 + rows * self.spread)) @ self.context**2

    def unit_factors(self, rows: float, typical: float) -> Array:
        """Return factors of a mean row's coordinates, (r,).

        At a typical number of rows they give the coordinates unit variance. For other numbers they give as much less or
        more weight as those means say less or more of the user.
        """
        return np.sqrt(self.spread + 1 / typical) / (self.spread + 1 / rows)

    def user_means(self, X: Floats | SparseRows) -> Array:
        """Return the mean row of each user, (users, 1, d); a function of that user's rows to the bit."""
        rows = X.dense() if isinstance(X, SparseRows) else X
        m = rows.shape[1]
        return (np.full((1, m), 1 / m, rows.dtype) @ rows).astype(np.float64)

    def means_at(self, transform: FeatureTransform) -> Array:
        """Return the mean rows that coordinates along the axes stand for, (d, r).

        Where axes are fewer than features, users' means do not differ in what the axes leave open. So they are the
        shortest such rows, in coordinates in which rows of one user vary alike in all directions.
        """
        scale, W = transform.scale, transform.whitening
        wide = np.diag(scale) if W is None else scale[:, None] * np.linalg.pinv(W)
        return np.asarray(wide @ np.linalg.pinv(self.axes.T @ wide))

    def along_axes(self, slopes: Array, transform: FeatureTransform) -> Array:
        """Return what slopes (d, q) make of users' mean rows, by their coordinates along the axes, (r, q)."""
        return np.asarray(self.means_at(transform).T @ (slopes * self.located[:, None]))

    def scatter_of_means(self, X: Floats, transform: FeatureTransform) -> Array:
        """Return the part of users' mean rows that is no more than the rows' own scatter, (users, 1, d).

        It is the mean row less the posterior mean of mu_i. Nothing is left in columns whose centre is not known.

        Args:
            X: rows (users, m, d).
            transform: public coordinates, see `means_at`.
        """
        moved = (self.user_means(X) - self.centre) * self.located
        if not len(self.spread):
            return moved
        m = X.shape[1]
        known = self.spread / (self.spread + 1 / m)
        return moved @ (np.eye(len(self.axes)) - (self.axes * known) @ self.means_at(transform).T)

    def project_means(self, X: Floats | SparseRows, origin: Array, matrix: Array) -> Array:
        """Return users' mean rows less a public origin, times a matrix: (users, 1, k).

        Sparse rows are not made dense: their images are averaged, a product per user.

        Args:
            X: (users, m, d), or `SparseRows`.
            origin: (d,).
            matrix: (d, k).
        """
        if not isinstance(X, SparseRows):
            return (self.user_means(X) - origin) @ matrix
        return np.full((1, X.shape[1]), 1 / X.shape[1]) @ X.project(matrix) - origin @ matrix

    def apply_slopes(self, X: Floats | SparseRows) -> Array:
        """Return what common slopes make of every row, (users, m, q), for X (users, m, d)."""
        if not self.slopes.any():
            return np.zeros((*X.shape[:2], self.slopes.shape[1]))
        slopes = X.project(self.slopes) if isinstance(X, SparseRows) else X @ self.slopes.astype(X.dtype)
        return np.asarray(slopes, dtype=np.float64)

    def predict_users(self, X: Floats | SparseRows) -> Array:
        """Return the mean at every row of users with equally many, (users, m, q), for X (users, m, d)."""
        found = self.apply_slopes(X) + self.constant
        if self.axes.shape[1] or not self.located.all():
            found = found + self.project_means(X, self.centre * self.located, self.mean_weights(X.shape[1]))
        return found

    @property
    def row_weights(self) -> Array:
        """Return the weights of a row where nothing else is known of its user, (d, q)."""
        return self.slopes * self.located[:, None] + self.context_weights(1)

    def predict_rows(self, X: Any) -> Array:
        """Return the mean at rows (rows, d) of users of whom nothing is known but that one row each, (rows, q)."""
        weights = self.row_weights
        return np.asarray(X @ weights) + (self.level - (self.centre * self.located) @ weights)

    def predict_each_row(self, X: Floats | SparseRows) -> Array:
        """Return `predict_rows` of the rows of users with equally many, (users, m, q)."""
        weights = self.row_weights
        images = X.project(weights) if isinstance(X, SparseRows) else X @ weights.astype(X.dtype)
        return images.astype(np.float64, copy=False) + (self.level - (self.centre * self.located) @ weights)


@dataclass(frozen=True)
class HeadPrior:
    """The prior of heads: its mean, how far users differ from it, and how far predictions were off."""

    mean: PriorMean
    factor: Matrix  # (d, p): v has unit variance, in units of the noise's, along its columns; p may be 0
    own_origin: bool  # whether slopes turn a user's line around its own mean row, or around the centre
    level_ratio: float  # variance of users' levels, in units of the noise's; infinite: levels are the users' own
    noise: Vector  # (q,): variance of a row's target around its user's own line; infinite where it is not known
    known: Vector  # quantiles of errors of users' own heads over their standard deviations, at `QUANTILES`
    new: Vector  # the same of users without rows, whose deviations are `new_ratio` times the noise's, squared
    new_ratio: Vector  # (q,)
    decided: bool = True  # by users' losses; if those could not tell, users with a few rows choose for themselves

    @property
    def targets(self) -> int:
        """Return how many targets there are."""
        return len(self.noise)

    def level_ratio_at(self, rows: int, target: int) -> float:
        """Return the variance of levels of users with this many rows, in units of the noise's."""
        return self.level_ratio + float(self.mean.level_variance(rows)[target]) / max(float(self.noise[target]), 1e-300)

    def quantile(self, share: float, known: bool) -> float:
        """Return how many standard deviations cover this share of errors."""
        return float(np.interp(share, (0.0, *QUANTILES), (0.0, *(self.known if known else self.new))))


@dataclass(frozen=True)
class LabelPrior:
    """The prior of classifiers' heads: the mean of their outputs, and how far users differ from it."""

    mean: PriorMean  # of outputs, one for two classes, else one for each
    factor: Matrix  # (d, p): v has unit variance along its columns; p may be 0
    own_origin: bool  # whether slopes turn around a user's own mean row, or around the centre
    level: float  # variance of users' levels
    known: float  # factor of outputs that makes probabilities of users' own heads right on average
    new: float  # the same of users without rows
    logits: bool  # whether outputs stand for probabilities, which count less the more is left to doubt
    decided: bool = True  # by users' losses; if those could not tell, users with a few rows choose for themselves

    @property
    def targets(self) -> int:
        """Return how many outputs there are."""
        return self.mean.slopes.shape[1]

    def level_variance_at(self, rows: int) -> Array:
        """Return the variance of levels of users with this many rows, (outputs,)."""
        if not self.mean.intercept:
            return np.zeros(self.mean.slopes.shape[1])
        return self.level + self.mean.level_variance(rows)


QUANTILES = (0.25, 0.5, 0.68, 0.8, 0.9, 0.95, 0.98, 0.99)
