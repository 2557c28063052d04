"""The prior mean of heads, by charged releases: where columns lie, how they vary, a level and common slopes.

Pages, each a pass over the users:
  scales      sizes of columns within users; users' means by signed octave; numbers of rows
  levels-t    users' means again, in windows that narrow around them      -> centre and scale of users' means
  covariance  second moments of rows around their means, and of means     -> coordinates, first slopes
  common-t    gradients of squared residuals, within users and between    -> level, slopes, what means say of levels
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

import numpy as np

from privrep.linear.panel_steps import (
    COMMON_CELLS,
    LINEAR_CELLS,
    ROW_CELLS,
    SIGNED_CELLS,
    ColumnSizes,
    CommonGradient,
    LevelCells,
    PanelMoments,
    rows_of_cells,
    signed_edges,
)
from privrep.linear.steps import CELLS, WIDE_CELLS, WIDE_LOWEST
from privrep.linear.transform import CLEAR, MOST_WHITENED, SPARSE_COLUMNS, _column_scales, octave_quantile, frequency_scales, whitening_of
from privrep.local.prior import PriorMean
from privrep.local.transform import FeatureTransform
from privrep.privacy.billboard import Release
from privrep.privacy.bounds import DIRECTION_ONLY, Bound
from privrep.privacy.calibration import Query
from privrep.privacy.contributions import packed_size, unpack
from privrep.privacy.run import Run
from privrep.typing import Array

PURPOSES = {
    "scales/sizes": "sizes of the columns",
    "scales/levels": "where users' means lie",
    "scales/rows": "how many rows users have",
    "levels": "where users' means lie, closer",
    "covariance/within": "correlations within users",
    "covariance/between": "correlations between users",
    "common/within": "common slopes",
    "common/between": "level, and what means say of it",
    "common/sizes": "next clipping norm",
}


@dataclass(frozen=True)
class PanelSettings:
    """Shares of mu^2 of the passes that find the prior mean."""

    histogram: tuple[float, float] = (0.005, 0.06)  # least and most of one histogram; between them, as much as it needs
    rows: float = 0.005
    moments: float = 0.12
    zooms: int = 2


@dataclass(frozen=True)
class Location:
    """Where columns lie: the features, then the targets. Of sparse features nothing but their size within users."""

    scale: Array  # (d + q,), within users
    varies: Array  # (d + q,): whether users' rows were seen to vary in the column
    centre: Array  # (d + q,)
    between: Array  # (d + q,): scale of users' means around the centre, zero where it is not known
    rows: Array  # (ROW_CELLS,): users by their number of rows
    users: float  # how many took part, roughly

    @property
    def typical_rows(self) -> float:
        """Return the number of rows whose inverse is the mean inverse over users."""
        counts = self.rows
        return float(counts.sum() / max((counts / rows_of_cells()).sum(), 1e-9)) if counts.sum() > 0 else 4.0

    @property
    def most_rows(self) -> int:
        """Return the number of rows that few users exceed."""
        seen = np.flatnonzero(self.rows > 0.02 * self.rows.sum())
        return int(rows_of_cells()[seen[-1]]) if len(seen) else 1 << 20


def histogram_share(run: Run, total: float, columns: int, s: PanelSettings) -> float:
    """Return mu^2 with which a histogram of each column is legible: four standard deviations are an eighth of users.

    Where the number of users is not public it is the most that may be spent.
    """
    least, most = s.histogram
    if run.ledger.budget.relation != "replace-one-user":
        return most * total
    needed = (4 * math.sqrt(2 * columns) / (run.users.facts.users / 6)) ** 2
    return float(np.clip(needed, least * total, most * total))


def find_location(run: Run, total: float, s: PanelSettings, intercept: bool) -> tuple[Location, float]:
    """Return where columns lie, and what of mu^2 it cost."""
    facts = run.users.facts
    d, q = facts.features, facts.targets
    seen = (0 if facts.sparse else d) + q
    columns = min(d + q, SPARSE_COLUMNS) if facts.sparse else d + q
    for_sizes, for_levels = histogram_share(run, total, columns, s), histogram_share(run, total, seen, s)
    queries = {
        "sizes": Query(Bound(math.sqrt(columns), (d + q) * CELLS, acute=True), for_sizes),
        "rows": Query(Bound(1.0, ROW_CELLS, acute=True), s.rows * total),
    }
    if intercept:
        queries["levels"] = Query(Bound(math.sqrt(seen), seen * SIGNED_CELLS, acute=True), for_levels)
    released = run.release("scales", ColumnSizes(intercept), queries)
    spent = sum(query.mu_squared for query in queries.values())
    sizes = released["sizes"]
    counts = sizes.value.reshape(d + q, CELLS)
    scale = np.concatenate([_column_scales(part, sizes.sigma) for part in (counts[:d], counts[d:])])
    varies = counts.max(axis=1) > CLEAR * sizes.sigma
    rows = np.where(released["rows"].value > 3 * released["rows"].sigma, released["rows"].value, 0.0)
    centre, between = np.zeros(d + q), np.zeros(d + q)
    if intercept:
        found, cost = _narrow(run, released["levels"], seen, for_levels, s.zooms)
        centre[d + q - seen :], between[d + q - seen :] = found
        spent += cost
    users = facts.users if run.ledger.budget.relation == "replace-one-user" else float(released["rows"].value.sum())
    return Location(scale, varies, centre, between, rows, users), spent


def _narrow(run: Run, levels: Release, columns: int, mu_squared: float, zooms: int) -> tuple[tuple[Array, Array], float]:
    """Return centres and scales of users' means, from windows that narrow until means fill several cells of them."""
    low, high = _clear_range(levels.value.reshape(columns, SIGNED_CELLS), levels.sigma, *signed_edges())
    centre, spread = (low + high) / 2, np.zeros(columns)
    active, spent = high > low, 0.0
    for t in range(1, zooms + 1):
        if not active.any():
            break
        width = np.where(active, (high - low) / LINEAR_CELLS, 0.0)
        total = int(active.sum()) * (LINEAR_CELLS + 2)
        query = Query(Bound(math.sqrt(int(active.sum())), total, acute=True), mu_squared)
        released = run.release(f"levels-{t}", LevelCells(low, width), {"cells": query})["cells"]
        spent += mu_squared
        counts = released.value.reshape(-1, LINEAR_CELLS + 2)
        for i, column in enumerate(np.flatnonzero(active)):
            clear = counts[i] > 3 * released.sigma
            clear &= counts[i] > 0.005 * counts[i][clear].sum()
            if not clear.any():
                active[column] = False
                continue
            weights = np.where(clear, counts[i], 0.0) / counts[i][clear].sum()
            place = low[column] + width[column] * (np.arange(-1, LINEAR_CELLS + 1) + 0.5)
            middle = float(weights @ place)
            centre[column] = middle
            spread[column] = math.sqrt(float(weights @ (place - middle) ** 2) + width[column] ** 2 / 12)
            first, last = np.flatnonzero(clear)[[0, -1]]
            near = low[column] + width[column] * np.array([first - 2.0, last + 1.0])
            active[column] = last - first <= 2 and counts[i][clear].sum() > 0.6 * counts[i].sum()
            low[column], high[column] = near
    return (centre, spread), spent


def _clear_range(counts: Array, sigma: float, low: Array, high: Array) -> tuple[Array, Array]:
    """Return the lower and upper end of the cells that stand out from the noise, of each column; equal where none."""
    clear = counts > np.maximum(CLEAR * sigma, 0.01 * np.where(counts > CLEAR * sigma, counts, 0.0).sum(axis=1, keepdims=True))
    any_clear = clear.any(axis=1)
    first = clear.argmax(axis=1)
    last = counts.shape[1] - 1 - clear[:, ::-1].argmax(axis=1)
    return np.where(any_clear, low[first], 0.0), np.where(any_clear, high[last], 0.0)


@dataclass(frozen=True)
class Panel:
    """What is known of users before representations: coordinates, the prior mean, and where columns lie."""

    location: Location
    transform: FeatureTransform
    mean: PriorMean
    target_scale: Array  # (q,)
    level_ratio: float
    residual: float  # of the targets' spread within users, what first slopes leave


def find_moments(run: Run, location: Location, mu_squared: float, intercept: bool) -> dict[str, Release]:
    d, q = run.users.facts.features, run.users.facts.targets
    between = np.where(location.between > 0, location.between, location.scale)
    step = PanelMoments(location.scale, location.centre, between, intercept)
    size = packed_size(d + q + 1)
    share = mu_squared / 2 if intercept else mu_squared
    queries = {"within": Query(Bound(DIRECTION_ONLY, size, acute=True), share)}
    if intercept:
        queries["between"] = Query(Bound(DIRECTION_ONLY, size, acute=True), share)
    return run.release("covariance", step, queries)


def normalise(released: Release) -> tuple[Array, float] | None:
    """Return moments over the known column's, and the noise's standard deviation in them; None: all noise."""
    moments = unpack(released.value)
    unit = float(moments[-1, -1])
    if unit < CLEAR * released.sigma:
        return None
    return moments / unit, released.sigma / unit


def find_panel(
    run: Run, total: float, intercept: bool, transform: FeatureTransform | None, s: PanelSettings | None = None
) -> tuple[Panel, float]:
    """Return coordinates and a first prior mean, and what of mu^2 they cost."""
    s = s or PanelSettings()
    facts = run.users.facts
    d, q = facts.features, facts.targets
    location, spent = find_location(run, total, s, intercept)
    target_scale = np.maximum(location.scale[d:], 1e-300)
    located = (location.between > 0) if intercept else np.ones(d + q, bool)
    mean = replace(
        PriorMean.nothing(d, q, intercept),
        level=location.centre[d:],
        centre=location.centre[:d],
        located=located[:d].astype(np.float64),
    )
    scales = FeatureTransform(location.scale[:d], None, target_scale if q > 1 else None)
    noise = d**1.5 / (math.sqrt(s.moments * total / 2) * max(location.users, 1.0))
    residual = 1.0
    if facts.sparse:
        if transform is None:
            scales = replace(scales, scale=frequency_scales(run, scales.scale, s.moments * total))
            spent += s.moments * total
    elif d <= MOST_WHITENED and noise < 2:
        released = find_moments(run, location, s.moments * total, intercept)
        spent += s.moments * total
        scales, mean, residual = read_moments(released, location, scales, mean)
    return Panel(location, transform or scales, mean, target_scale, 1.0, residual), spent


def denoise(moments: Array, sigma: float, diagonal: Array | None = None) -> Array:
    """Return released second moments, shrunk towards a diagonal by how much of the difference may be noise."""
    base = np.diag(np.full(len(moments), float(np.trace(moments)) / len(moments)) if diagonal is None else diagonal)
    rest = moments - base
    size = float((rest**2).sum())
    keep = max(0.0, 1 - sigma**2 * packed_size(len(moments)) / size) if size > 0 else 0.0
    values, vectors = np.linalg.eigh(base + keep * rest)
    least = max(keep * sigma * math.sqrt(len(moments)), 1e-9 * float(values[-1]))
    return np.asarray((vectors * np.maximum(values, least)) @ vectors.T)


def read_moments(
    released: dict[str, Release], location: Location, transform: FeatureTransform, mean: PriorMean
) -> tuple[FeatureTransform, PriorMean, float]:
    """Return whitened coordinates, the prior mean with axes of users' means and first slopes, and the part of the
    targets' spread within users that those leave."""
    d, q = mean.slopes.shape
    found = normalise(released["within"])
    if found is None:
        return transform, mean, 1.0
    within, sigma = found
    varies = location.varies[:d]
    features = denoise(within[:d, :d], sigma)
    whitening = None
    if d > 1:
        whitening = whitening_of(features / (np.trace(features) / d), 1e-6)
    scale, target = location.scale[:d], location.scale[d:]
    values, vectors = np.linalg.eigh(features)
    slopes = (vectors / (np.maximum(values, 0.0) + sigma * math.sqrt(2 * d))) @ (vectors.T @ within[:d, d : d + q])
    slopes[~varies] = 0.0
    explained = float(np.einsum("dq,de,eq->", slopes, features, slopes))
    whole = max(float(np.trace(within[d : d + q, d : d + q])), 1e-9)
    residual = math.sqrt(max(1 - explained / whole, 0.05))
    mean = replace(mean, slopes=slopes * target / scale[:, None])
    if mean.intercept and (between := normalise(released["between"])) is not None:
        mean = _with_axes(mean, location, features, *between)
    return replace(transform, whitening=whitening), mean, residual


def _with_axes(mean: PriorMean, location: Location, within: Array, between: Array, sigma: float) -> PriorMean:
    """Return the mean with the coordinates of users' mean rows in which they vary."""
    d, q = mean.slopes.shape
    known = np.flatnonzero(location.between[:d] > 0)
    if not len(known):
        return mean
    unit = location.between[known]
    ratio = np.where(location.varies[known], location.scale[known] / unit, 0.0)
    mid = between[known, -1]
    total = denoise(between[np.ix_(known, known)] - np.outer(mid, mid), sigma)
    inside = within[np.ix_(known, known)] * np.outer(ratio, ratio)  # in the units of the means
    inside = inside + 1e-3 * np.diag(np.diag(total))
    users = total - inside / location.typical_rows
    values, vectors = np.linalg.eigh(inside)
    root = vectors / np.sqrt(np.maximum(values, 1e-12))
    spread, turn = np.linalg.eigh(root.T @ users @ root)
    heard = spread > 0.2 / location.typical_rows
    axes = np.zeros((d, int(heard.sum())))
    axes[known] = ((root @ turn) / unit[:, None])[:, heard]
    return replace(mean, axes=axes, spread=spread[heard], context=np.zeros((int(heard.sum()), q)))


MOST_CURVED = 64  # features whose curvature is released as a matrix
SIZING = 0.03  # most of mu^2 for histograms of norms; where they would need more, norms are guessed from the scales


@dataclass
class Descent:
    """Newton's steps on level, slopes and context; each shrunk by how much of it is noise.

    The clipping norms of a step are read off histograms that come with the step before, where those can be afforded.
    """

    run: Run
    panel: Panel
    total: float
    steps: int = 0
    spent: float = 0.0
    heard: bool = False  # whether the last step found slopes or contexts that stand out from its noise
    sizes: Release | None = None

    @property
    def parts(self) -> dict[str, int]:
        """Return the numbers of coordinates of the gradients."""
        mean = self.panel.mean
        return {"within": len(mean.slopes)} | ({"between": 1 + len(mean.spread)} if mean.intercept else {})

    @property
    def full(self) -> bool:
        facts = self.run.users.facts
        return facts.features <= MOST_CURVED and not facts.sparse

    def ask(self, within: float = 1.0, between: float = 1.0) -> CommonGradient:
        p = self.panel
        rows = p.location.typical_rows
        return CommonGradient(p.mean, p.transform, p.target_scale, p.level_ratio, rows, within, between, self.full)

    def sizing(self) -> Query | None:
        """Return the question for the norms of gradients; None where it would cost too much."""
        parts = len(self.parts)
        needed = (4 * math.sqrt(4 * parts) / (max(self.panel.location.users, 1.0) / 10)) ** 2
        if needed > SIZING * self.total:
            return None
        bound = Bound(math.sqrt(2.0 * parts), COMMON_CELLS * parts, acute=True)
        return Query(bound, max(needed, 0.003 * self.total))

    def step(self, mu_squared: float, last: bool) -> None:
        """Take a step; `last` asks for no histograms for another."""
        sizing, q = self.sizing(), len(self.panel.target_scale)
        if sizing is not None and self.sizes is None:
            self.sizes = self.run.release("common-scout", self.ask(), {"sizes": sizing})["sizes"]
            self.spent += sizing.mu_squared
        self.steps += 1
        each = mu_squared / len(self.parts)
        read = self._read_sizes(each)
        tails = {key: TAIL * ratio for key, (_, ratio) in read.items()}
        queries = {
            key: Query(Bound(read[key][0], p * q + (packed_size(p) if self.full else 1)), each)
            for key, p in self.parts.items()
        }
        if sizing is not None and not last:
            queries["sizes"] = sizing
        released = self.run.release(f"common-{self.steps}", self.ask(**tails), queries)
        self.spent += sum(query.mu_squared for query in queries.values())
        self.sizes = released.get("sizes", self.sizes)
        mean, self.heard = _moved(self.panel, released, tails, self.full)
        self.panel = replace(self.panel, mean=mean)

    def _read_sizes(self, each: float) -> dict[str, tuple[float, float]]:
        """Return clipping norms, and typical ratios of gradients to curvatures."""
        read, q = _guess_sizes(self.panel), len(self.panel.target_scale)
        if self.sizes is None:
            return {key: read[key] for key in self.parts}
        for i, (key, p) in enumerate(self.parts.items()):
            counts = self.sizes.value[i * COMMON_CELLS : (i + 1) * COMMON_CELLS]
            norm = choose_norm(counts[:WIDE_CELLS], self.sizes.sigma, each, p * q)
            if norm is not None and counts[WIDE_CELLS:].max() > 3 * self.sizes.sigma:
                read[key] = norm, octave_quantile(counts[WIDE_CELLS:], 0.5)
        return {key: read[key] for key in self.parts}


def _guess_sizes(panel: Panel) -> dict[str, tuple[float, float]]:
    """Return norms of users' gradients and their ratios to curvatures, from scales and public facts."""
    d, q = panel.mean.slopes.shape
    r, m = len(panel.mean.spread), max(panel.location.typical_rows - 1, 1.0)
    between = np.where(panel.location.between[d:] > 0, panel.location.between[d:], panel.target_scale)
    size = float(np.sqrt(np.mean((between / panel.target_scale) ** 2)))
    return {
        "within": (panel.residual * math.sqrt(d * q * m), panel.residual * math.sqrt(q / m)),
        "between": (size * math.sqrt((1 + r) * q), size * math.sqrt(q / (1 + r))),
    }


TAIL = 0.4
BIAS = 0.1


def choose_norm(counts: Array, sigma: float, mu_squared: float, size: int) -> float | None:
    """Return the clipping norm that balances the noise against what it cuts off, from a histogram of norms."""
    clear = counts > 4 * sigma
    if not clear.any():
        return None
    weights = np.where(clear, counts, 0.0)
    norms = 2.0 ** (np.arange(len(counts)) + WIDE_LOWEST)
    first, last = np.flatnonzero(clear)[[0, -1]]
    candidates = 2.0 ** (np.arange(4 * first, 4 * last + 5) / 4 + WIDE_LOWEST)
    noise = 2 * math.sqrt(size) / math.sqrt(mu_squared)
    kept = np.minimum(1.0, candidates[:, None] / norms)
    info = (weights * kept).sum(axis=1)  # what is left of the curvature
    cut = BIAS * (weights * norms * (1 - kept)).sum(axis=1)
    sampling = (weights * (norms * kept) ** 2).sum(axis=1)
    error = ((noise * candidates) ** 2 + cut**2 + sampling) / info**2
    return float(candidates[error.argmin()])


def _moved(
    panel: Panel, released: dict[str, Release], tails: dict[str, float], full: bool
) -> tuple[PriorMean, bool]:
    """Return the prior mean after a step, and whether slopes or contexts moved."""
    mean = panel.mean
    d, q = mean.slopes.shape
    scale, heard = panel.target_scale, False
    step = _newton(released["within"], tails["within"], d, q, full, 0)
    if step is not None:
        move = panel.transform.original(step) * scale
        move[~panel.location.varies[:d]] = 0.0
        heard = bool(move.any())
        mean = replace(mean, slopes=mean.slopes + move)
    if not mean.intercept:
        return mean, heard
    m = panel.location.typical_rows
    step = _newton(released["between"], tails["between"], 1 + len(mean.spread), q, full, 1)
    if step is not None:
        unit = mean.unit(m, m) / (mean.spread / (mean.spread + 1 / m))
        context = mean.context + step[1:] * scale * unit[:, None]
        mean = replace(mean, level=mean.level + step[0] * scale, context=context)
        heard = heard or bool(step[1:].any())
    return mean, heard


def _newton(released: Release, tail: float, p: int, q: int, full: bool, spare: int) -> Array | None:
    """Return curvature^-1 gradient, (p, q), shrunk by how much of it is noise but for the `spare` first coordinates."""
    gradient = released.value[: p * q].reshape(q, p).T
    bend, sigma = released.value[p * q :] / tail, released.sigma / tail
    H = unpack(bend) if full else bend[0] * np.eye(p)
    mean_bend = float(np.trace(H)) / p
    if mean_bend < CLEAR * sigma / math.sqrt(p):
        return None
    rest = H - mean_bend * np.eye(p)
    size = float((rest**2).sum())
    keep = max(0.0, 1 - sigma**2 * packed_size(p) / size) if full and size > 0 else 0.0
    values, turn = np.linalg.eigh(mean_bend * np.eye(p) + keep * rest)
    values = np.maximum(values, max(0.1 * mean_bend, 2 * sigma * math.sqrt(p) if full else 0.0))
    inverse = (turn / values) @ turn.T
    step = inverse @ gradient
    noise = released.sigma**2 * q * float((inverse[spare:] ** 2).sum())
    length = float((step[spare:] ** 2).sum())
    if length > 0:
        step[spare:] *= max(0.0, 1 - noise / length)
    return np.asarray(step)
