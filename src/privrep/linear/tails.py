"""Quantiles of errors for intervals, from noisy histograms of errors."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from functools import lru_cache

import numpy as np
from scipy.special import ndtr, ndtri, stdtr, stdtrit

from privrep.linear.families import ERROR_CELLS, LOWEST_ERROR
from privrep.local.prior import QUANTILES
from privrep.typing import Array

NORMAL = np.asarray(ndtri((1 + np.array(QUANTILES)) / 2))  # quantiles of errors if nothing is known but their variance
PRECISE = 0.01  # noise of a count, over all of them, up to which quantiles are read off as they are
HEARD = 5.0  # least answer of a filter, in standard deviations of its noise


@dataclass(frozen=True)
class Shape:
    """A distribution of errors over their scale, symmetric: the share below a size, and the size at a share."""

    below: Callable[[Array], Array]
    size: Callable[[Array], Array]


def _make_student(freedom: float) -> Shape:
    """Return Student's distribution with this many degrees of freedom."""
    return Shape(lambda size: 2 * stdtr(freedom, size) - 1, lambda share: stdtrit(freedom, (1 + share) / 2))


SHAPES = (
    Shape(lambda size: np.minimum(size / math.sqrt(3.0), 1.0), lambda share: math.sqrt(3.0) * share),  # even
    Shape(lambda size: 2 * ndtr(size) - 1, lambda share: ndtri((1 + share) / 2)),
    *map(_make_student, (8.0, 4.0, 2.5)),
)
"""Shapes of targets with a least and a most, of sums of many causes, and three with heavier tails."""


def read_quantiles(counts: Array, sigma: float, variance: float) -> Array:
    """Return `QUANTILES` of errors over their standard deviation, from a noisy histogram of their sizes.

    Where counts are precise they are read off. Else they are means over the shapes and scales that may explain the
    histogram. Where that is all noise they are the normal ones.

    Args:
        counts: of errors, (ERROR_CELLS,), two cells an octave, with noise.
        sigma: standard deviation of the noise in each.
        variance: of the errors.
    """
    total = max(float(counts.sum()), 1e-300)
    if sigma < PRECISE * total:
        return _interpolate(counts) / math.sqrt(variance)
    templates, sizes = _make_shapes()
    answers = templates @ counts
    best = int(answers.argmax())
    if answers[best] < HEARD * sigma:
        return NORMAL
    likely = np.exp((answers**2 - answers[best] ** 2) / (2 * sigma**2)) * (answers > 0)
    return np.asarray(likely @ sizes / likely.sum()) / math.sqrt(variance)


@lru_cache(maxsize=1)
def _list_edges() -> Array:
    """Return the edges of the histogram's cells, (ERROR_CELLS + 1,)."""
    return np.asarray(2.0 ** ((np.arange(ERROR_CELLS + 1) + LOWEST_ERROR) / 2))


@lru_cache(maxsize=1)
def _make_shapes() -> tuple[Array, Array]:
    """Return histograms of sizes of errors, each of length one, (shapes, ERROR_CELLS), and their quantiles."""
    edges, scales = _list_edges().copy(), 2.0 ** (np.arange(-24, 25) / 8)
    edges[0], edges[-1] = 0.0, math.inf
    shapes = np.concatenate([np.diff(shape.below(edges / scales[:, None]), axis=1) for shape in SHAPES])
    sizes = np.concatenate([scales[:, None] * shape.size(np.array(QUANTILES)) for shape in SHAPES])
    return shapes / np.linalg.norm(shapes, axis=1, keepdims=True), sizes


def _interpolate(counts: Array) -> Array:
    """Return quantiles of sizes in a histogram, interpolated within cells.

    Args:
        counts: of errors, (ERROR_CELLS,).
    """
    below = np.maximum.accumulate(np.cumsum(counts))
    below = np.maximum(below, 0.0) / max(float(below[-1]), 1e-300)
    return np.asarray(np.interp(QUANTILES, np.concatenate([[0.0], below]), np.concatenate([[0.0], _list_edges()[1:]])))
