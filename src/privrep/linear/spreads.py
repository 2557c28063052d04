"""Variances of users' levels and slopes, and the size of the noise: histograms of what users see alone.

Each user counts once in each, so these are the cheapest releases of a fit, and no user's numbers are too large.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import lru_cache
from typing import ClassVar

import numpy as np
from scipy.special import chdtr

from privrep.data.sparse import SparseRows
from privrep.heads.posterior import make_images
from privrep.linear.panel_steps import add_target_axis, check_shapes, subtract_prior_mean
from privrep.linear.steps import WIDE_CELLS, WIDE_LOWEST, find_octaves
from privrep.local.least_squares import (
    ROUNDING,
    fit_ridge,
    move_users_last,
    subtract_mean,
    sum_columns,
    sum_rows,
)
from privrep.local.prior import PriorMean
from privrep.privacy.bounds import Bound, Contributions
from privrep.privacy.calibration import Query
from privrep.privacy.contributions import Counts
from privrep.privacy.protocol import StepSpec, UserBatch
from privrep.privacy.run import Run
from privrep.typing import Array, Floats, Matrix, Vector


@dataclass(frozen=True)
class HeadSpreads:
    """Histograms, one cell an octave, of squares that users see alone around the prior mean, over the target's scale.

    The first two are with common slopes: variance around the user's own level, and the level. The other three are with
    a regression on `factor` as well: variance around that, the level at the origin, and the mean square of the head.
    With several targets each is the mean over targets. Users with too few rows to tell are not counted.
    """

    several_targets: ClassVar[bool] = True
    mean: PriorMean
    factor: Matrix  # (d, k)
    target_scale: Vector

    @property
    def spec(self) -> StepSpec:
        return StepSpec(accepts_sparse=True, fill=self.mean.fill, floats_per_user=self.factor.size)

    def __call__(self, batch: UserBatch) -> dict[str, Contributions]:
        """Return `spreads` of each user: five histograms, one after the other."""
        X: Floats | SparseRows = batch.X
        users, m, _ = X.shape
        y = add_target_axis(batch.y)
        check_shapes(X, y, features=(self.factor,), targets=(self.target_scale,))
        k, free = self.factor.shape[1], int(self.mean.intercept)
        residuals = subtract_prior_mean(self.mean, X, y) / self.target_scale
        sizes = np.zeros((users, 5))
        images = move_users_last(make_images(X, self.factor, self.mean, own=False))
        for c in range(residuals.shape[2]):
            targets = move_users_last(np.ascontiguousarray(residuals[:, :, c]))
            if m > free:
                moved = subtract_mean(targets) if free else targets
                sizes[:, 0] += sum_rows(moved**2) / (m - free)
                sizes[:, 1] += (sum_rows(targets) / m) ** 2 if free else 0.0
            if k and m > k + free:
                sizes[:, 2:] += self._regress(images, targets, m, k, free)
        largest = np.abs(y.reshape(users, -1)).max(axis=1) / float(self.target_scale.min())
        sizes = np.where(
            sizes > (ROUNDING * largest[:, None]) ** 2, sizes, 0.0
        )  # what is left of equal numbers is none
        cells = find_octaves(sizes, WIDE_LOWEST, WIDE_CELLS)
        return {"spreads": Counts(np.where(cells < 0, -1, cells + WIDE_CELLS * np.arange(5)), 5 * WIDE_CELLS)}

    def _regress(self, images: Array, targets: Array, m: int, k: int, free: int) -> Array:
        """Return the variance left, the squared level and the mean square of the head of users' regressions, (users,
        3).

        Args:
            images: of the rows, (k, m, users).
            targets: less the prior mean, (m, users).
            m: rows of each user.
            k: coordinates of the head.
            free: 1 where users have levels, else 0.
        """
        P, y = (subtract_mean(images), subtract_mean(targets)) if free else (images, targets)
        fit = fit_ridge(P, y, 1e-9, bool(free))
        left = y - sum_columns(P * fit.heads[:, None, :])
        level = (sum_rows(targets) - sum_columns(sum_rows(images)[:, None, :] * fit.heads[:, None, :])[0]) / m
        head = sum_columns(fit.heads[:, None, :] ** 2)[0] / k
        parts = [sum_rows(left**2) / (m - k - free), level**2 if free else np.zeros_like(head), head]
        return np.stack(parts, axis=1)


@dataclass(frozen=True)
class Spreads:
    """Variances that users see alone around the prior mean, over the target's scale squared; None: lost in noise."""

    noise: float | None  # around users' own levels, with common slopes
    level: float | None  # of levels, with common slopes
    noise_shared: float | None  # around users' regressions along U
    level_shared: float | None  # of levels at the origin, with regressions along U
    head: float | None  # of a coordinate of heads along U

    @property
    def around_own(self) -> bool:
        """Return whether levels at users' own mean rows vary less than levels at the public origin."""
        return self.level is not None and self.level_shared is not None and self.level < self.level_shared

    @property
    def around_public(self) -> bool:
        """Return whether levels at the public origin vary far less than levels at users' own mean rows."""
        return self.level is not None and self.level_shared is not None and 2 * self.level_shared < self.level


def find_spreads(
    run: Run, page: str, mean: PriorMean, factor: Array, target_scale: Array, mu_squared: float
) -> Spreads:
    """Return variances, read off histograms of what users see alone.

    Args:
        run: asks the users.
        page: the name of the page.
        mean: the prior mean.
        factor: the directions of users' regressions, (d, k).
        target_scale: of each target, (q,).
        mu_squared: what the release costs.
    """
    step = HeadSpreads(mean, factor, target_scale)
    bound = Bound(math.sqrt(5.0 if factor.shape[1] else 2.0), 5 * WIDE_CELLS, acute=True)
    released = run.release(page, step, {"spreads": Query(bound, mu_squared)})["spreads"]
    return Spreads(*(_read_variance(part, released.sigma) for part in released.value.reshape(5, WIDE_CELLS)))


@lru_cache(maxsize=1)
def _make_square_shapes() -> Array:
    """Return shapes of histograms of mean squares, by octave around one, each of length one, (5, 2 HALF + 1).

    They are mean squares of 1, 2, 4, 8 and 16 normal numbers of variance one.
    """
    edges = 2.0 ** (np.arange(-HALF, HALF + 2) - 0.5)
    shapes = np.stack([np.diff(chdtr(dof, edges * dof)) for dof in (1, 2, 4, 8, 16)])
    return np.asarray(shapes / np.linalg.norm(shapes, axis=1, keepdims=True))


HALF = 10  # octaves either side of a variance in which squares are looked for


def _read_variance(counts: Array, sigma: float) -> float | None:
    """Return the variance behind a noisy histogram of squares; None where it is lost in noise.

    Args:
        counts: users by octave of their square, (WIDE_CELLS,), with noise.
        sigma: standard deviation of the noise in each count.
    """
    answers = np.stack([np.correlate(counts, shape, mode="same") for shape in _make_square_shapes()])
    best = np.unravel_index(int(answers.argmax()), answers.shape)
    if answers[best] < 5 * sigma:
        return None
    row, place = answers[best[0]], int(best[1])
    shift = 0.0
    if 0 < place < len(row) - 1:
        left, middle, right = row[place - 1 : place + 2]
        shift = 0.5 * (left - right) / min(left - 2 * middle + right, -1e-300)
    return float(2.0 ** (place + WIDE_LOWEST + np.clip(shift, -0.5, 0.5)))
