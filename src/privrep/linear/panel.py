"""The prior mean of heads, by charged releases: where columns lie, how they vary, a level and common slopes.

Pages, each a pass over the users:
  scales      sizes of columns within users; users' means by signed octave; numbers of rows
  levels-t    users' means again, in windows that narrow around them      -> centre and scale of users' means
  covariance  second moments of rows around their means, and of means     -> coordinates, first slopes
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

import numpy as np

from privrep.linear.class_steps import encode_step
from privrep.linear.location import Location, find_location
from privrep.linear.panel_steps import PanelMoments
from privrep.linear.transform import CLEAR, MOST_WHITENED, find_frequency_scales, make_whitening
from privrep.local.losses import Loss
from privrep.local.prior import PriorMean
from privrep.local.transform import FeatureTransform
from privrep.privacy.billboard import Release
from privrep.privacy.bounds import DIRECTION_ONLY, Bound
from privrep.privacy.calibration import Query
from privrep.privacy.moments import packed_size, symmetrise
from privrep.privacy.run import Run
from privrep.typing import Array, Integers

PURPOSES = {
    "scales/sizes": "sizes of the features",
    "scales/levels": "where users' means lie",
    "scales/target_sizes": "size of the target",
    "scales/target_levels": "where users' mean targets lie",
    "scales/rows": "how many rows users have",
    "levels": "where users' means lie, closer",
    "covariance/within": "correlations within users",
    "covariance/between": "correlations between users",
    "target": "where users' mean targets lie, closer",
}
"""Purposes of the pages that this module asks for; see `method.Method.purposes`."""


@dataclass(frozen=True)
class PanelSettings:
    """Shares of mu^2 of the passes that find the prior mean."""

    histogram: tuple[float, float] = (0.005, 0.06)  # least and most of one histogram; between them, as much as it needs
    moments: float = 0.18


@dataclass(frozen=True)
class Panel:
    """The population as known before representations: coordinates, the prior mean, and where columns lie."""

    location: Location
    transform: FeatureTransform
    mean: PriorMean
    target_scale: Array  # (q,)
    factor: Array  # (d, p): along which slopes are known to vary so far
    level_ratio: float  # of the variance of levels to the noise's, so far
    residual: float  # size of what slopes leave of the targets within users, in units of `target_scale`
    level_size: float  # size of what the prior mean leaves of users' levels, in the same units
    loss: Loss | None = None  # of labels, whose outputs the mean is of, and whose noise counts as one; None: of numbers
    sized: bool = True  # whether sizes of features are known

    @property
    def level_guess(self) -> float:
        """Return the variance of levels over the noise's as far as it is known; infinity where levels are not."""
        if self.loss is not None:
            return self.level_ratio
        if not self.location.between[len(self.mean.slopes) :].any():
            return math.inf
        return self.guess_level(GUESSED)

    def guess_level(self, limits: tuple[float, float]) -> float:
        """Return the variance of levels over the noise's, guessed from their sizes and held within these limits."""
        if self.loss is not None:
            return float(np.clip(self.level_ratio, *limits))
        return float(np.clip((self.level_size / self.residual) ** 2, *limits))

    @property
    def seen_mean(self) -> PriorMean:
        """Return the mean that representations are learned around: without slopes that explain next to nothing.

        All users share the error of common slopes. To pair moments it looks like a direction of heads.
        """
        t = self.transform
        scaled = self.mean.slopes * t.scale[:, None] / self.target_scale
        turned = scaled if t.whitening is None else np.linalg.solve(t.whitening, scaled)
        if float((turned**2).sum()) > SLIGHT * len(self.target_scale):
            return self.mean
        return replace(self.mean, slopes=np.zeros_like(self.mean.slopes))


GUESSED = (0.3, 3.0)  # limits of a guess from sizes: the variance of levels over the noise's
SLIGHT = 0.03  # part of the targets' variance within users that common slopes explain


def find_moments(
    run: Run, location: Location, mu_squared: float, intercept: bool, loss: Loss | None = None
) -> dict[str, Release]:
    """Ask for second moments of columns: of rows around their user's mean, and of users' means.

    Args:
        run: asks the users.
        location: where columns lie.
        mu_squared: what the page costs.
        intercept: whether users have levels; without, moments of means are not asked for.
        loss: of labels; None: of numbers.
    """
    d, q = run.users.facts.features, run.users.facts.targets if loss is None else loss.outputs
    between = np.where(location.between > 0, location.between, location.scale)
    step = PanelMoments(location.scale, location.centre, between, intercept)
    size = (d + q + 1) ** 2
    share = mu_squared / 2 if intercept else mu_squared
    queries = {"within": Query(Bound(DIRECTION_ONLY, size, acute=True), share)}
    if intercept:
        queries["between"] = Query(Bound(DIRECTION_ONLY, size, acute=True), share)
    return run.release("covariance", encode_step(step, loss), queries)


def normalise(released: Release) -> tuple[Array, float] | None:
    """Return moments over the known column's, and the noise's standard deviation in them; None where all is noise."""
    moments = symmetrise(released.value)
    unit = float(moments[-1, -1])
    if unit < CLEAR * released.sigma:
        return None
    return moments / unit, released.sigma / unit


def find_panel(
    run: Run,
    total: float,
    intercept: bool,
    transform: FeatureTransform | None,
    s: PanelSettings | None = None,
    loss: Loss | None = None,
) -> tuple[Panel, float]:
    """Return coordinates and a first prior mean, and what of mu^2 they cost.

    With a `loss` targets are labels. Their second moments are taken of numbers that stand for labels. What these say of
    slopes and levels is carried over to outputs.

    Args:
        run: asks the users.
        total: mu^2 of the whole fit.
        intercept: whether users have levels.
        transform: declared public coordinates; None: found by charged releases.
        s: shares of the budget; None: the default.
        loss: of labels; None: of numbers.
    """
    s = s or PanelSettings()
    facts = run.users.facts
    d, q = facts.features, facts.targets if loss is None else loss.outputs
    declared = None if transform is None else transform.scale
    location, spent = find_location(run, total, intercept, s.histogram, declared, loss)
    sized = transform is not None or bool(location.varies[:d].any())
    if loss is not None and not sized:  # no size was heard; gradients may be, and steps are shrunk by their noise
        location = replace(location, varies=np.ones(d + q, bool))
    target_scale = np.maximum(location.scale[d:], 1e-300)
    located = (location.between > 0) if intercept else np.ones(d + q, bool)
    mean = replace(
        PriorMean.zero(d, q, intercept),
        level=location.centre[d:],
        centre=location.centre[:d],
        located=located[:d].astype(np.float64),
    )
    scales = FeatureTransform(location.scale[:d], None, target_scale if q > 1 and loss is None else None)
    noise = d**1.5 / (math.sqrt(s.moments * total / 2) * max(location.users, 1.0))
    residual = 1.0
    if facts.sparse:
        if transform is None:
            scales = replace(scales, scale=find_frequency_scales(run, scales.scale, s.moments * total))
            spent += s.moments * total
    elif d <= MOST_WHITENED and noise < 2 and (location.varies[:d].any() or location.between[:d].any()):
        released = find_moments(run, location, s.moments * total, intercept, loss)
        spent += s.moments * total
        scales, mean, residual = read_moments(released, location, scales, mean)
        if loss is not None and (within := normalise(released["within"])) is not None:
            mean = convert_slopes(mean, np.diag(within[0])[d : d + q] * target_scale**2, loss)
    none = np.zeros((d, 0))
    if loss is not None:
        mean = convert_level(mean, loss)
        return Panel(location, transform or scales, mean, np.ones(q), none, 1.0, 1.0, 1.0, loss, sized), spent
    between = np.where(location.between[d:] > 0, location.between[d:], target_scale)
    level_size = float(np.sqrt(np.mean((between / target_scale) ** 2)))
    return Panel(location, transform or scales, mean, target_scale, none, 1.0, residual, level_size), spent


def convert_slopes(mean: PriorMean, within: Array, loss: Loss) -> PriorMean:
    """Return the mean with slopes of outputs for slopes of the numbers that stand for labels.

    A probability p moves by p (1 - p) times its output. That is the variance of a label within users, or a quarter of
    it where labels are 1 and -1.

    Args:
        mean: of numbers.
        within: their variance within users, (outputs,).
        loss: of the labels.
    """
    two = loss.outputs == 1
    return replace(mean, slopes=mean.slopes * (2.0 if two else 1.0) / np.maximum(within, 0.1 if two else 0.03))


def convert_level(mean: PriorMean, loss: Loss) -> PriorMean:
    """Return the mean with the level of outputs for the level of the numbers that stand for labels."""
    if not mean.intercept:
        return mean
    if loss.outputs == 1:
        p = np.clip((1 + mean.level) / 2, 0.02, 0.98)
        return replace(mean, level=np.log(p / (1 - p)))
    level = np.log(np.clip(mean.level, 0.1 / loss.outputs, 1.0))
    return replace(mean, level=level - level.mean())


def denoise(moments: Array, sigma: float, diagonal: Array | None = None) -> Array:
    """Return released second moments, shrunk towards a diagonal by how much of the difference may be noise.

    Args:
        moments: (d, d), with noise.
        sigma: standard deviation of the noise in an entry.
        diagonal: to shrink towards, (d,); None: the mean of the moments' diagonal.
    """
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
    """Return whitened coordinates, the prior mean with first slopes, and the part of the targets' spread that slopes
    leave.

    The mean also gets axes of users' mean rows. The part left is the root of a share of variance within users.

    Args:
        released: second moments of rows, `within`, and of users' means, `between`.
        location: where columns lie.
        transform: coordinates without whitening.
        mean: the prior mean without slopes.
    """
    d, q = mean.slopes.shape
    found = normalise(released["within"])
    if found is None:
        return transform, mean, 1.0
    within, sigma = found
    varies = location.varies[:d]
    heard = float(np.trace(within[:d, :d])) > CLEAR * sigma * math.sqrt(d)  # else features do not vary within users
    features = denoise(within[:d, :d], sigma) if heard else np.zeros((d, d))
    whitening = None
    if d > 1 and heard:
        whitening = make_whitening(features / (np.trace(features) / d), 1e-6)
    scale, target = location.scale[:d], location.scale[d:]
    values, vectors = np.linalg.eigh(features)
    right, bend = vectors.T @ within[:d, d : d + q], np.maximum(values, 0.0) + sigma * math.sqrt(2 * d)
    signal, noise = float((right**2 / bend[:, None]).sum()), q * sigma**2 / 2 * float((1 / bend).sum())
    believed = signal > noise * (1 + 3 * math.sqrt(2 / (d * q)))  # more than noise alone makes it
    slopes = vectors @ (right / bend[:, None]) * (1 - noise / signal if believed else 0.0)
    slopes[~varies if heard else slice(None)] = 0.0
    explained = float(np.einsum("dq,de,eq->", slopes, features, slopes))
    whole = max(float(np.trace(within[d : d + q, d : d + q])), 1e-9)
    residual = math.sqrt(max(1 - explained / whole, 0.05))
    mean = replace(mean, slopes=slopes * target / scale[:, None])
    if mean.intercept:
        mean = _add_axes(mean, location, features, normalise(released["between"]))
    return replace(transform, whitening=whitening), mean, residual


def _add_axes(mean: PriorMean, location: Location, within: Array, found: tuple[Array, float] | None) -> PriorMean:
    """Return the mean with the coordinates of users' mean rows in which they vary.

    Where second moments of means were lost in noise, columns are taken to vary as their histograms say.

    Args:
        mean: the prior mean without axes.
        location: where columns lie.
        within: second moments of the features within users, (d, d), in units of `location.scale`.
        found: second moments of users' means and their noise, from `normalise`; None: lost in noise.
    """
    d, q = mean.slopes.shape
    known = np.flatnonzero(location.between[:d] > 0)
    if not len(known):
        return mean
    unit = location.between[known]
    ratio = np.where(location.varies[known], location.scale[known] / unit, 0.0)
    total = np.eye(len(known))
    if found is not None:
        mid = found[0][known, -1]
        total = denoise(found[0][np.ix_(known, known)] - np.outer(mid, mid), found[1])
    inside = within[np.ix_(known, known)] * np.outer(ratio, ratio)  # in the units of the means
    inside = inside + 1e-3 * np.diag(np.diag(total))
    users = total - inside / location.typical_rows
    values, vectors = np.linalg.eigh(inside)
    root = vectors / np.sqrt(np.maximum(values, 1e-12))
    spread, turn = np.linalg.eigh(root.T @ users @ root)
    heard = spread > 0.2 / location.typical_rows
    axes = np.zeros((d, int(heard.sum())))
    turned, spread = (root @ turn)[:, heard], spread[heard]
    axes[known] = turned / unit[:, None]
    mean = replace(mean, axes=axes, spread=spread, context=np.zeros((len(spread), q)))
    return mean if found is None else _add_level(mean, location, known, *found)


def _add_level(mean: PriorMean, location: Location, known: Integers, between: Array, sigma: float) -> PriorMean:
    """Return the mean with the level that users' means have, as far as that stands out from the noise.

    Args:
        mean: the prior mean with axes.
        location: where columns lie.
        known: positions of features whose users' means were heard, (known,).
        between: second moments of users' means, (d + q + 1, d + q + 1).
        sigma: standard deviation of the noise in an entry.
    """
    d, q = mean.slopes.shape
    target, mid = location.between[d:], between[:, -1]
    slopes = mean.slopes[known] * location.between[known][:, None]
    level = mid[d : d + q] * target - mid[known] @ slopes
    return replace(mean, level=mean.level + np.where(np.abs(level) > CLEAR * sigma * target, level, 0.0))
