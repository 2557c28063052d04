"""Newton's steps on the prior mean: level, common slopes, and what users' mean rows say of their levels.

Each step is one release of two gradients with their curvatures. Its clipping norms come from the first of these that
can be had: histograms of norms from the step before; histograms of norms asked for by themselves, where users are now
known to vary; histograms of residuals; scales. Directions of a step are shrunk by how much of them is noise, whose
variance is public. `gathering` joins what all steps on labels tell.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field, replace

import numpy as np

from privrep.linear.gathering import Coordinates, Gathered, Outputs
from privrep.linear.gradient_parts import COMMON_CELLS
from privrep.linear.label_steps import LabelGradient
from privrep.linear.newton import Curvature, solve_newton
from privrep.linear.norms import choose_norm
from privrep.linear.panel import Panel
from privrep.linear.panel_steps import CommonGradient
from privrep.linear.spreads import find_spreads
from privrep.linear.steps import WIDE_CELLS
from privrep.linear.transform import read_octave_quantile
from privrep.privacy.billboard import Release
from privrep.privacy.bounds import DIRECTION_ONLY, Bound
from privrep.privacy.calibration import Query
from privrep.privacy.run import Run

PURPOSES = {
    "common/within": "common slopes",
    "common/between": "level, and what means say of it",
    "common/sizes": "next clipping norm",
    "common-look": "how large residuals are",
    "common-scout": "clipping norm of the last step on common slopes",
}
"""Purposes of the pages that this module asks for; see `method.Method.purposes`."""

MOST_CURVED = 64  # coordinates whose curvature is released as a matrix
LOOKED = 40.0  # least users times the root of mu^2 for histograms of residuals
SIZING = 0.03  # most of mu^2 for histograms of norms; where they would need more, norms are guessed from the scales


@dataclass
class Descent:
    """Newton's steps on level, slopes and context, each shrunk by how much of it is noise.

    The clipping norms of a step are read off histograms that come with the step before, if the budget allows them.
    """

    run: Run
    panel: Panel
    capacity: float
    steps: int = 0
    spent: float = 0.0
    heard: bool = False  # whether the last step found slopes or contexts that stand out from its noise
    sizes: Release | None = None
    bends: dict[str, Curvature] = field(default_factory=dict)  # curvatures, as steps so far have shown them
    known: Gathered | None = None  # the evidence of steps on labels
    outputs: Outputs = field(init=False)  # turned by the first level, that is, by how frequent classes are

    def __post_init__(self) -> None:
        loss = self.panel.loss
        self.outputs = Outputs.of(self.panel.mean.level, loss is not None and loss.softmax)

    @property
    def parts(self) -> dict[str, int]:
        """Return the number of coordinates of each gradient: "within" of slopes, "between" of the level and
        contexts."""
        mean = self.panel.mean
        return {"within": len(mean.slopes)} | ({"between": 1 + len(mean.spread)} if mean.intercept else {})

    @property
    def curved(self) -> bool:
        """Return whether curvatures are asked for as matrices, not as one number each."""
        return max(self.parts.values()) <= MOST_CURVED and not self.run.users.facts.sparse

    @property
    def coordinates(self) -> Coordinates:
        """Return the coordinates in which steps of labels are joined."""
        return Coordinates.of(self.panel.mean, self.panel.transform, self.panel.location.typical_rows)

    def ask(self, full: bool = False, within: float = 1.0, between: float = 1.0) -> CommonGradient | LabelGradient:
        """Return the local step that users are asked.

        Args:
            full: whether curvatures are matrices.
            within: the tail of the gradient by slopes: a factor of the curvature behind it.
            between: the tail of the gradient by the level.
        """
        p = self.panel
        rows = p.location.typical_rows
        factor, ratio = self.panel.factor, self.panel.level_ratio
        if p.loss is not None:
            return LabelGradient(p.mean, p.transform, p.loss, factor, ratio, rows, within, between, full)
        return CommonGradient(p.mean, p.transform, p.target_scale, factor, ratio, rows, within, between, full)

    def make_sizing_query(self) -> Query | None:
        """Return the query for histograms of the gradients' norms; None where it would cost more than SIZING of the
        capacity."""
        parts = len(self.parts)
        needed = (4 * math.sqrt(4 * parts) / (max(self.panel.location.users, 1.0) / 10)) ** 2
        if needed > SIZING * self.capacity:
            return None
        bound = Bound(math.sqrt(2.0 * parts), COMMON_CELLS * parts, acute=True)
        return Query(bound, max(needed, 0.003 * self.capacity))

    def stretch(self, factor: float, level_ratio: float) -> None:
        """Go on with another variance of levels, and with the mean's levels this many times as far from zero.

        Args:
            factor: of the mean's level and contexts.
            level_ratio: the new variance of levels.
        """
        self.known = None if self.known is None else self.known.rescale(factor, self.coordinates)
        self.panel = replace(self.panel, mean=self.panel.mean.scale_levels(factor), level_ratio=level_ratio)

    def refit(self, panel: Panel) -> None:
        """Go on with another panel, that is, another idea of how users vary.

        Earlier histograms and curvatures are forgotten: they say nothing of the new gradients.
        """
        self.panel, self.sizes, self.bends = panel, None, {}

    def step(self, mu_squared: float, last: bool) -> None:
        """Take a step on the prior mean.

        Args:
            mu_squared: what the step costs, histograms included.
            last: whether no step follows, so that no histograms for another are asked for.
        """
        sizing, q = self.make_sizing_query(), len(self.panel.target_scale)
        if sizing is not None and sizing.mu_squared > 0.3 * mu_squared:
            sizing = None
        left = mu_squared
        if sizing is None:
            left -= self._look(0.1 * mu_squared)
        elif self.sizes is None and self.panel.factor.shape[1]:  # gradients that no step before has shown
            page = f"common-scout-{self.steps + 1}"
            self.sizes = self.run.release(page, self.ask(), {"sizes": sizing})["sizes"]
            left -= sizing.mu_squared
        self.steps += 1
        queries = {"sizes": sizing} if sizing is not None and not last else {}
        left -= sum(query.mu_squared for query in queries.values())
        each = left / len(self.parts)
        full = self.curved
        read = self._read_sizes(each, full)
        tails = {key: TAIL * ratio for key, (_, ratio) in read.items()}
        queries |= {
            key: Query(Bound(read[key][0], p * q + (p**2 if full else 1)), each) for key, p in self.parts.items()
        }
        released = self.run.release(f"common-{self.steps}", self.ask(full, **tails), queries)
        self.spent += mu_squared
        self.sizes = released.get("sizes", self.sizes)
        for key, p in self.parts.items():
            size = p * q
            self.bends[key] = Curvature.read(released[key], size, p, tails[key], full).combine(self.bends.get(key))
        if self.panel.loss is not None and self.panel.sized and full and "between" in self.parts:
            self.panel, self.heard = self._gather(released)
        else:
            self.panel, self.heard = _apply_step(self.panel, released, self.bends, self.outputs)

    def _gather(self, released: dict[str, Release]) -> tuple[Panel, bool]:
        """Return the panel that all steps on labels so far tell of, and whether slopes or contexts moved."""
        panel, mean, coordinates = self.panel, self.panel.mean, self.coordinates
        here, outputs = self.outputs.to(coordinates.parameters(mean)), self.outputs
        within, between = (self.bends[key].read_gradient(released[key], outputs) for key in ("within", "between"))
        known = self.known or Gathered.nothing(here)
        self.known = known.add_step(within, between, here, coordinates)
        best, moved = self.known.best(coordinates, outputs.bend)
        varies = panel.location.varies[: len(mean.slopes)]
        return replace(panel, mean=coordinates.mean_of(outputs.back(best), mean, varies)), moved

    def _look(self, most: float) -> float:
        """Ask how large residuals are, by the cheapest of histograms; return what it cost, 0 where it was not asked.

        Args:
            most: the most mu^2 that it may cost.
        """
        needed = (LOOKED / max(self.panel.location.users, 1.0)) ** 2
        if self.panel.loss is not None or self.panel.factor.shape[1] or needed > most:
            return 0.0
        p, page = self.panel, f"common-look-{self.steps + 1}"
        found = find_spreads(self.run, page, p.mean, p.factor, p.target_scale, needed)
        residual = p.residual if found.noise is None else math.sqrt(found.noise)
        size = p.level_size if found.level is None else math.sqrt(found.level)
        self.panel = replace(p, residual=residual, level_size=size)
        return needed

    def _read_sizes(self, each: float, full: bool) -> dict[str, tuple[float, float]]:
        """Return the clipping norm of each gradient and its typical ratio to the curvature.

        Args:
            each: mu^2 of each gradient's release.
            full: whether curvatures are matrices.
        """
        read, q = _guess_sizes(self.panel, full, each), len(self.panel.target_scale)
        if self.sizes is None:
            return {key: read[key] for key in self.parts}
        for i, (key, p) in enumerate(self.parts.items()):
            counts = self.sizes.value[i * COMMON_CELLS : (i + 1) * COMMON_CELLS]
            rare = None if self.panel.loss is None else RARE * read[key][0]
            norm = choose_norm(counts[:WIDE_CELLS], self.sizes.sigma, each, p * q, rare)
            if norm is not None and counts[WIDE_CELLS:].max() > 3 * self.sizes.sigma:
                ratio = read_octave_quantile(counts[WIDE_CELLS:], 0.5)
                read[key] = norm, ratio if not full else ratio / math.sqrt(p)
        return {key: read[key] for key in self.parts}


def _guess_sizes(panel: Panel, full: bool, each: float) -> dict[str, tuple[float, float]]:
    """Return guesses of the norm of each gradient and of its ratio to the curvature, from scales and public facts.

    Args:
        panel: what is known of the population.
        full: whether curvatures are matrices.
        each: mu^2 of each gradient's release.
    """
    d, q = panel.mean.slopes.shape
    r, m = len(panel.mean.spread), max(panel.location.typical_rows - 1, 1.0)
    size = panel.level_size
    if panel.loss is not None:
        return _guess_label_sizes(panel, full, each)
    if panel.factor.shape[1]:  # by then it is known how far levels vary
        size = panel.residual * math.sqrt(panel.level_ratio + 1 / m)
    weight = m / (1 + panel.level_ratio * m)
    within, between = panel.residual * math.sqrt(d * q), size * math.sqrt((1 + r) * q)
    return {
        "within": (within * math.sqrt(m), within / math.sqrt(m) / (math.sqrt(d) if full else 1.0)),
        "between": (weight * between, between / ((1 + r) if full else 1.0)),
    }


def _guess_label_sizes(panel: Panel, full: bool, each: float) -> dict[str, tuple[float, float]]:
    """Guess how large users' gradients are where targets are labels, whose rows pull with about PULL each.

    The result has, for slopes ("within") and for levels ("between"), the norm of a user's gradient, and that norm over
    the curvature, where a row weighs WEIGHT.

    Where sizes of features are not known either, gradients of slopes count by their direction alone. A user whose
    labels are all unlikely pulls at the level as far as its own level goes. The more of that pull is cut off, the more
    the level follows the likelier label. So the pull is kept as far as noise allows.

    Args:
        panel: what is known of the population.
        full: whether curvatures are matrices.
        each: mu^2 of each gradient's release.
    """
    d, q = panel.mean.slopes.shape
    r, m = len(panel.mean.spread), max(panel.location.typical_rows, 1.0)
    within = PULL * math.sqrt(d * q * m)
    damped = 1 + panel.level_ratio * WEIGHT * m
    between, weight = PULL * math.sqrt((1 + r) * q * m / damped), WEIGHT * m / damped
    far = FAR + float(np.abs(panel.mean.level).max())
    largest = min(m, far / max(panel.level_ratio, 1e-9)) * math.sqrt(1 + r)
    cut, noise = (UNLIKELY * panel.location.users) ** 2, 4 * (1 + r) * q / each
    between = max(between, largest * cut / (cut + noise))
    return {
        "within": (within if panel.sized else DIRECTION_ONLY, within / (WEIGHT * m) / (math.sqrt(d) if full else 1.0)),
        "between": (between, between / weight / ((1 + r) if full else 1.0)),
    }


PULL, WEIGHT = 0.4, 0.16
FAR, UNLIKELY = 1.5, 0.2  # by how much levels pass zero of users whose labels are all unlikely; part of the users
TAIL = 0.4
RARE = 4.0  # norms of users with the rarer label, at most, in units of the guessed ones


def _apply_step(
    panel: Panel, released: dict[str, Release], bends: dict[str, Curvature], outputs: Outputs
) -> tuple[Panel, bool]:
    """Return the panel after a step, and whether slopes or contexts moved.

    Args:
        panel: what is known before the step.
        released: the gradients by name, each with its curvature behind.
        bends: the curvatures by name, as all steps so far show them.
        outputs: how outputs are turned.
    """
    mean = panel.mean
    d = len(mean.slopes)
    heard = False
    step = solve_newton(released["within"], bends["within"], outputs, 0)
    if step is not None:
        move = panel.transform.to_original(step.move) * panel.target_scale
        move[~panel.location.varies[:d]] = 0.0
        heard = bool(move.any())
        panel = replace(panel, mean=replace(mean, slopes=mean.slopes + move), residual=step.left(panel.residual))
    if not mean.intercept:
        return panel, heard
    change = panel.mean.slopes - mean.slopes
    panel, also = _apply_between(panel, released["between"], bends["between"], outputs)
    if heard and len(mean.spread):  # what users' means say in all is as the step found it, whatever slopes do
        context = panel.mean.context - mean.along_axes(change, panel.transform)
        panel = replace(panel, mean=replace(panel.mean, context=context))
    return panel, heard or also


def _apply_between(panel: Panel, released: Release, bend: Curvature, outputs: Outputs) -> tuple[Panel, bool]:
    """Return the panel with its level and contexts moved, and whether contexts moved.

    Args:
        panel: what is known before the step.
        released: the gradient by the level and contexts.
        bend: its curvature, as all steps so far show it.
        outputs: how outputs are turned.
    """
    mean, scale, m = panel.mean, panel.target_scale, panel.location.typical_rows
    step = solve_newton(released, bend, outputs, 1)
    if step is None:
        return panel, False
    unit = mean.unit_factors(m, m) / (mean.spread / (mean.spread + 1 / m))
    context = mean.context + step.move[1:] * scale * unit[:, None]
    mean = replace(mean, level=mean.level + step.move[0] * scale, context=context)
    return replace(panel, mean=mean, level_size=step.left(panel.level_size)), bool(step.move[1:].any())
