"""How far users differ from the prior mean, and in what: families of heads, judged by users' leave-one-out losses.

A candidate is a prior of levels and of slopes around the prior mean. Users send what they lose by each candidate, as
differences to their mean over candidates, and that mean. One release decides for everybody.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import ClassVar

import numpy as np

from privrep.data.sparse import SparseRows
from privrep.heads.posterior import images_of, spread_of
from privrep.linear.panel import choose_norm
from privrep.linear.panel_steps import residual_targets, with_targets
from privrep.linear.steps import WIDE_CELLS, WIDE_LOWEST, octaves
from privrep.local.least_squares import centred
from privrep.local.prior import PriorMean
from privrep.privacy.bounds import Bound, Contributions
from privrep.privacy.calibration import Query
from privrep.privacy.contributions import Counts, NonNegative, Vectors
from privrep.privacy.protocol import StepSpec, UserBatch
from privrep.privacy.run import Run
from privrep.typing import Array, Floats, Matrix, Vector


@dataclass(frozen=True)
class Candidate:
    """A prior of heads, up to the noise's variance."""

    factor: int  # 0: slopes are the common ones; 1: they differ along the representation; 2: in all features
    slopes: float  # variance of slopes along the factor, in units of the noise's
    level: float  # variance of levels
    common: bool = True  # whether it lies around the prior mean, or, with free levels, around zero


@dataclass(frozen=True)
class HeadLosses:
    """Leave-one-out losses of each user by candidates: sums of squares over its rows, in units of the target's scale.

    A user sends its losses as differences to their mean over candidates, then `tail` times that mean. With several
    targets losses are added up. `sizes` is a histogram of the norms of the differences.
    """

    several_targets: ClassVar[bool] = True
    mean: PriorMean
    first: Matrix  # (d, k)
    second: Matrix  # (d, p)
    factor: Vector  # (candidates,): 0: none, 1: `first`, 2: `second`
    slopes: Vector  # (candidates,)
    level: Vector  # (candidates,)
    common: Vector  # (candidates,): 1 or 0
    target_scale: Vector  # (q,)
    tail: float

    @property
    def spec(self) -> StepSpec:
        return StepSpec(accepts_sparse=True, floats_per_user=self.second.size + self.first.size)

    def __call__(self, batch: UserBatch) -> dict[str, Contributions]:
        X: Floats | SparseRows = batch.X
        users, m, _ = X.shape
        candidates = len(self.factor)
        losses = np.zeros((users, candidates))
        if m > 1 or not self.mean.intercept:
            y = with_targets(batch.y).astype(np.float64, copy=False)
            around = residual_targets(self.mean, X, y) / self.target_scale
            alone = (centred(y) if self.mean.intercept else y) / self.target_scale
            images = {
                number: images_of(X, factor, self.mean.intercept)
                for number, factor in ((1, self.first), (2, self.second))
                if (self.factor == number).any()
            }
            for c in range(y.shape[2]):
                for used, targets in ((1, around), (0, alone)):
                    self._add(losses, used, images, np.ascontiguousarray(targets[:, :, c]))
        middle = np.matmul(losses[:, None, :], np.full((candidates, 1), 1 / candidates))[:, 0]
        moved = losses - middle
        norms = np.sqrt((moved**2).sum(axis=1))
        cells = octaves(norms, WIDE_LOWEST, WIDE_CELLS)[:, None]
        joined = np.concatenate([moved, self.tail * middle], axis=1)
        return {"losses": Vectors(joined), "sizes": Counts(cells, WIDE_CELLS)}

    def _add(self, losses: Array, common: int, images: dict[int, Array], residuals: Array) -> None:
        """Add what users lose by the candidates around the prior mean, or by the others."""
        asked = self.common == common
        for number, ratio in sorted({(int(f), float(s)) for f, s in zip(self.factor[asked], self.slopes[asked], strict=True)}):
            P = images[number] * math.sqrt(ratio) if number else np.zeros((*residuals.shape, 0))
            spread = spread_of(P, residuals)
            for i in np.flatnonzero(asked & (self.factor == number) & (self.slopes == ratio)):
                losses[:, i] += (spread.with_levels(float(self.level[i])).left ** 2).sum(axis=1)


@dataclass(frozen=True)
class Judged:
    """Released losses of candidates, all users together, in units of the target's scale squared."""

    candidates: tuple[Candidate, ...]
    losses: Array  # (candidates,), with noise
    sigma: float  # of the noise in each difference to the mean
    middle: float  # their mean, with noise of its own

    def best(self, among: Iterable[int] | None = None) -> int:
        """Return the number of the candidate that loses least."""
        chosen = list(range(len(self.candidates)) if among is None else among)
        return min(chosen, key=lambda i: float(self.losses[i]))


    def by_factor(self) -> dict[int, float]:
        """Return the least loss of the candidates of each factor."""
        factors = sorted({c.factor for c in self.candidates})
        groups = {f: [i for i, c in enumerate(self.candidates) if c.factor == f] for f in factors}
        return {f: float(self.losses[self.best(among)]) for f, among in groups.items()}


@dataclass(frozen=True)
class Families:
    """What candidates are made of."""

    run: Run
    mean: PriorMean
    first: Array
    second: Array
    target_scale: Array
    users: float  # how many there are, roughly
    rows: float  # a typical user has

    def judge(self, page: str, candidates: Sequence[Candidate], mu_squared: float) -> Judged:
        """Ask users what they lose by each candidate."""
        tail = 0.5 / self.rows
        step = HeadLosses(
            self.mean,
            self.first,
            self.second,
            np.array([float(c.factor) for c in candidates]),
            np.array([c.slopes for c in candidates]),
            np.array([c.level for c in candidates]),
            np.array([float(c.common) for c in candidates]),
            self.target_scale,
            tail,
        )
        needed = (4 * math.sqrt(2) / (max(self.users, 1.0) / 10)) ** 2
        norm = 0.3 * self.rows * math.sqrt(len(candidates))
        if needed < 0.25 * mu_squared:
            share = max(needed, 0.05 * mu_squared)
            mu_squared -= share
            sizing = {"sizes": Query(Bound(1.0, WIDE_CELLS, acute=True), share)}
            sizes = self.run.release(f"{page}-scout", step, sizing)["sizes"]
            norm = choose_norm(sizes.value, sizes.sigma, mu_squared, len(candidates)) or norm
        bound = Bound(norm, len(candidates) + 1)
        released = self.run.release(page, step, {"losses": Query(bound, mu_squared)})["losses"]
        middle = float(released.value[-1]) / tail
        return Judged(tuple(candidates), released.value[:-1] + middle, released.sigma, middle)


LOWEST_ERROR, ERROR_CELLS = -8, 20  # histograms of errors over their deviations: two cells an octave, from 2^-4 to 2^6


@dataclass(frozen=True)
class HeadErrors:
    """Errors of users' heads, each target left out in turn, and of the prior mean by itself, in standard deviations.

    noise: sums of squares by target, of heads and of the prior mean, then the number of rows.
    tails: how many of a user's errors are in each cell of two histograms, over all targets.
    Deviations are in units of `target_scale`, as if the noise had variance one in them.
    """

    several_targets: ClassVar[bool] = True
    mean: PriorMean
    factor: Matrix
    level: float
    new_variance: Vector  # (q,): of a target around the prior mean of a user without rows
    target_scale: Vector  # (q,)

    @property
    def spec(self) -> StepSpec:
        return StepSpec(accepts_sparse=True, floats_per_user=self.factor.size)

    def __call__(self, batch: UserBatch) -> dict[str, Contributions]:
        X: Floats | SparseRows = batch.X
        users, m, _ = X.shape
        y = with_targets(batch.y).astype(np.float64, copy=False)
        q = y.shape[2]
        around = residual_targets(self.mean, X, y) / self.target_scale
        rows = self.mean.at_rows(X)
        new = (y - rows) / self.target_scale / np.sqrt(self.new_variance)
        images = images_of(X, self.factor, self.mean.intercept)
        known = np.empty_like(new)
        for c in range(q):
            fits = spread_of(images, np.ascontiguousarray(around[:, :, c])).with_levels(self.level)
            known[:, :, c] = fits.left * np.sqrt(fits.certainty)
        if m < 2 and self.mean.intercept:
            known[:] = 0.0
        squares = np.concatenate([(part**2).sum(axis=1) for part in (known, new)], axis=1)
        counted = np.full((users, 1), float(m))
        tails = np.concatenate([_error_counts(part.reshape(users, -1)) for part in (known, new)], axis=1)
        return {"noise": NonNegative(np.concatenate([squares, counted], axis=1)), "tails": NonNegative(tails)}


def _error_counts(errors: Array) -> Array:
    """Return how many of each user's errors are in each cell, (users, ERROR_CELLS); what is not finite is in the last."""
    with np.errstate(divide="ignore"):
        place = np.floor(2 * np.log2(np.abs(errors))) - LOWEST_ERROR
    cells = np.clip(np.where(np.isnan(place), ERROR_CELLS, place), 0, ERROR_CELLS - 1).astype(np.int64)
    each = cells + ERROR_CELLS * np.arange(len(errors))[:, None]
    counts = np.bincount(each.ravel(), minlength=ERROR_CELLS * len(errors)).reshape(len(errors), ERROR_CELLS)
    return counts.astype(np.float64)
