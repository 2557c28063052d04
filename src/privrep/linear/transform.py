"""Public coordinates for users' features: their sizes and their correlations.

Sizes are read off released histograms with one cell an octave (see `linear.steps.find_octaves`), correlations off
released second moments.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace

import numpy as np

from privrep.errors import InputError
from privrep.linear.steps import CELLS, LOWEST, FeatureSizes, Frequencies, SecondMoments
from privrep.local.transform import FeatureTransform
from privrep.privacy.bounds import DIRECTION_ONLY, Bound
from privrep.privacy.calibration import Query
from privrep.privacy.moments import symmetrise
from privrep.privacy.run import Run
from privrep.typing import Array

PURPOSES = {
    "scales": "sizes of the features",
    "covariance": "correlations of the features",
    "frequencies": "how often features occur",
}
"""Purposes of the pages that this module asks for; see `method.Method.purposes`."""

CLEAR = 5.0  # standard deviations above zero at which the largest of a few thousand noisy cells is believed
Numbers = Sequence[float] | Array
_WINDOW = 4  # octaves either side of the fullest cell that a quantile looks at


def find_feature_scales(run: Run, mu_squared: float, intercept: bool) -> tuple[FeatureTransform, float]:
    """Return public scales of the features, and roughly how many users took part.

    A scale is the power of two nearest to the root mean square that most users have. A feature whose histogram does not
    rise clearly above the noise gets the scale of all features together, and 1 if even that is lost. So do several
    targets;
    one alone needs no scale.

    Args:
        run: asks the users.
        mu_squared: what the release costs.
        intercept: whether sizes are taken around users' means.
    """
    d, q = run.users.facts.features, run.users.facts.targets
    columns = d + (q if q > 1 else 0)
    bound = Bound(
        math.sqrt(min(columns, SPARSE_COLUMNS) if run.users.facts.sparse else columns), columns * CELLS, acute=True
    )
    released = run.release("scales", FeatureSizes(intercept), {"sizes": Query(bound, mu_squared)})["sizes"]
    counts = released.value.reshape(columns, CELLS)
    scales = np.concatenate([_read_column_scales(part, released.sigma) for part in (counts[:d], counts[d:])])
    return FeatureTransform(scales[:d], None, scales[d:] if q > 1 else None), float(counts.sum()) / columns


SPARSE_COLUMNS = 64  # columns in a user's histogram of sizes; of a user with more, each counts less


def _read_column_scales(counts: Array, sigma: float) -> Array:
    """Return the scale of each column, (columns,), a power of two.

    Args:
        counts: users by octave of their size, (columns, CELLS), with noise.
        sigma: standard deviation of the noise in each count.
    """
    together = counts.sum(axis=0)
    clear = CLEAR * sigma * math.sqrt(max(len(counts), 1))
    common = int(together.argmax()) if together.max() > clear else -LOWEST
    legible = counts.max(axis=1) > CLEAR * sigma
    return np.ldexp(1.0, np.where(legible, counts.argmax(axis=1), common) + LOWEST)


def read_octave_quantile(counts: Array, quantile: float, lowest: int = LOWEST) -> float:
    """Return a quantile of the sizes in a noisy histogram, interpolated within a cell.

    It looks only near the fullest cell.

    Args:
        counts: users by octave of their size, (cells,), with noise.
        quantile: from 0 to 1.
        lowest: the octave of the first cell.
    """
    peak = int(counts.argmax())
    low = max(peak - _WINDOW, 0)
    window = np.maximum(counts[low : peak + _WINDOW + 1], 0.0)
    below = np.cumsum(window)
    target = quantile * below[-1]
    cell = int(np.searchsorted(below, target))
    inside = 1 - (below[cell] - target) / max(window[cell], 1e-300)
    return math.ldexp(1.0, lowest + low + cell) * 2.0 ** (inside - 0.5)


def find_transform(run: Run, sizes: float, moments: float, intercept: bool) -> tuple[FeatureTransform, float]:
    """Return public coordinates found by charged releases, and what of mu^2 they cost.

    Dense features are whitened. Each sparse feature is only brought to a common mean square. So is each of very many
    features, of which a matrix of all pairs is out of reach.

    Args:
        run: asks the users.
        sizes: mu^2 for the features' scales.
        moments: mu^2 for their second moments, which are not asked for where they would be lost in noise.
        intercept: whether rows are taken around users' means.
    """
    transform, users = find_feature_scales(run, sizes, intercept)
    d = run.users.facts.features
    if run.users.facts.sparse:
        return FeatureTransform(
            find_frequency_scales(run, transform.scale, moments), None, transform.target_scale
        ), sizes + moments
    # of a covariance with d equal eigenvalues: the radius of the noise's eigenvalues, over the mean of its own
    noise = d**1.5 / (math.sqrt(moments) * max(users, 1.0))
    if not 1 < d <= MOST_WHITENED or noise > 1:
        return transform, sizes
    return replace(transform, whitening=find_whitening(run, transform, moments, intercept)), sizes + moments


MOST_WHITENED = 1024  # features


def find_whitening(run: Run, transform: FeatureTransform, mu_squared: float, intercept: bool) -> Array | None:
    """Return W = C^-1/2, (d, d), from a release of the users' second moments, each by its direction alone.

    Eigenvalues of C, relative to their mean, count no less than the noise of the release: directions lost in it are all
    treated alike. Return None where what is left differs by no more than noise would make it differ, or by little.

    Args:
        run: asks the users.
        transform: coordinates without whitening.
        mu_squared: what the release costs.
        intercept: whether rows are taken around users' means.
    """
    d = run.users.facts.features
    bound = Bound(DIRECTION_ONLY, d**2, acute=True)
    released = run.release("covariance", SecondMoments(transform, intercept), {"covariance": Query(bound, mu_squared)})
    moments = symmetrise(released["covariance"].value)
    mean = float(np.trace(moments)) / d
    radius = released["covariance"].sigma * math.sqrt(2 * d)  # of the noise's eigenvalues
    if mean < CLEAR * released["covariance"].sigma / math.sqrt(d):
        return None
    return make_whitening(moments / mean, radius / mean)


def make_whitening(covariance: Array, noise: float) -> Array | None:
    """Return C^-1/2 with eigenvalues of at least `noise`; None where they differ by less than noise, or a factor of 2.

    Args:
        covariance: C, (d, d), of mean eigenvalue about one.
        noise: radius of the noise's eigenvalues.
    """
    values, vectors = np.linalg.eigh(covariance)
    kept = np.maximum(values, max(noise, 1e-9 * values[-1]))
    within_noise = values[-1] < 1 + 1.2 * noise and values[0] > 1 - 1.2 * noise
    if within_noise or kept[-1] < 2 * kept[0]:
        return None
    whitening: Array = (vectors / np.sqrt(kept)) @ vectors.T
    return whitening


def make_declared_transform(
    scale: Numbers | None, covariance: Sequence[Numbers] | None, features: int
) -> FeatureTransform | None:
    """Return the transform of sizes, or of a covariance, that were declared public; None if neither was.

    Args:
        scale: sizes of the features, (features,).
        covariance: of the features, (features, features).
        features: how many there are.
    """
    if scale is not None and covariance is not None:
        raise InputError("feature_covariance says how large features are; leave feature_scale out.")
    if covariance is not None:
        given = np.asarray(covariance, dtype=np.float64)
        if given.shape != (features, features) or not np.isfinite(given).all() or not np.allclose(given, given.T):
            raise InputError(f"feature_covariance must be a symmetric matrix of {features} x {features} numbers.")
        values = np.linalg.eigvalsh(given)
        if not values[-1] > 0 or values[0] < -1e-8 * values[-1]:
            raise InputError(
                "feature_covariance is no covariance: it has a negative eigenvalue, or none that is positive."
            )
        sizes = np.sqrt(np.maximum(np.diag(given), 1e-12 * max(float(np.diag(given).max()), 1e-300)))
        return FeatureTransform(sizes, make_whitening(given / np.outer(sizes, sizes), 1e-6))
    if scale is None:
        return None
    sizes = np.asarray(scale, dtype=np.float64)
    if sizes.shape != (features,) or not (np.isfinite(sizes).all() and (sizes > 0).all()):
        raise InputError(f"feature_scale must hold {features} positive finite numbers, one per feature.")
    return FeatureTransform(sizes)


def find_frequency_scales(run: Run, scale: Array, mu_squared: float) -> Array:
    """Return scales (d,) that bring every sparse feature to a mean square of one, or as near as noise lets one tell.

    Args:
        run: asks the users.
        scale: of the entries that are not zero, (d,).
        mu_squared: what the release costs.
    """
    bound = Bound(math.sqrt(2.0), run.users.facts.features + 1)
    released = run.release("frequencies", Frequencies(scale), {"frequencies": Query(bound, mu_squared)})["frequencies"]
    unit = max(float(released.value[-1]), CLEAR * released.sigma)
    frequencies = np.maximum(released.value[:-1], CLEAR * released.sigma) / unit
    return scale * np.sqrt(frequencies)
