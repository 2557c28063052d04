"""Sizes read off released histograms: one cell an octave (see `local.steps.octaves`). All of it is post-processing."""

from __future__ import annotations

import math

import numpy as np

from privrep.local.steps import CELLS, LOWEST, FeatureSizes
from privrep.privacy.bounds import Array, Bound
from privrep.privacy.release import Query, Run

CLEAR = 5.0  # standard deviations above zero at which the largest of a few thousand noisy cells is believed
_WINDOW = 4  # octaves either side of the fullest cell that a quantile looks at


def feature_scales(run: Run, mu_squared: float, intercept: bool) -> Array:
    """Public scale of each feature: the power of two nearest to the root mean square that most users have.

    A feature whose histogram does not rise clearly above the noise gets the scale of all features together, and if
    even that is lost in the noise, 1.
    """
    d = run.users.features
    bound = Bound(math.sqrt(d), d * CELLS, acute=True)
    released = run.ask("scales", FeatureSizes(intercept), {"sizes": Query(bound, mu_squared)})["sizes"]
    counts = released.value.reshape(d, CELLS)
    together = counts.sum(axis=0)
    common = int(together.argmax()) if together.max() > CLEAR * released.sigma * math.sqrt(d) else -LOWEST
    clear = counts.max(axis=1) > CLEAR * released.sigma
    return np.ldexp(1.0, np.where(clear, counts.argmax(axis=1), common) + LOWEST)


def octave_quantile(counts: Array, quantile: float, lowest: int = LOWEST) -> float:
    """A quantile of the sizes in a noisy histogram, looking only near its fullest cell; interpolated within a cell."""
    peak = int(counts.argmax())
    low = max(peak - _WINDOW, 0)
    window = np.maximum(counts[low : peak + _WINDOW + 1], 0.0)
    below = np.cumsum(window)
    target = quantile * below[-1]
    cell = int(np.searchsorted(below, target))
    inside = 1 - (below[cell] - target) / max(window[cell], 1e-300)
    return math.ldexp(1.0, lowest + low + cell) * 2.0 ** (inside - 0.5)
