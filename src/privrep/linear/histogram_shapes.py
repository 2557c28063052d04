"""Shapes that histograms of users' means may have, for the matched filters of `location`."""

from __future__ import annotations

import math
from functools import lru_cache

import numpy as np
from scipy.special import gammainc, ndtr

from privrep.linear.panel_steps import (
    LINEAR_CELLS,
    SIGNED_CELLS,
    list_signed_edges,
)
from privrep.linear.steps import CELLS, LOWEST
from privrep.typing import Array

NARROW = 0.2  # a spread over a location, below which the octaves of means do not tell it
_UNIT_SHARES = np.array([0.75, 0.2, 0.05])  # of users with ones, whose mean is about 1, a half, a quarter
UNIT_LENGTH = float(np.linalg.norm(_UNIT_SHARES))
UNIT_MEAN = float(_UNIT_SHARES @ 0.5 ** np.arange(3))
UNIT_SPREAD = math.sqrt(float(_UNIT_SHARES @ 0.25 ** np.arange(3)) - UNIT_MEAN**2)


def make_unit_shape() -> Array:
    """Return the shape of a histogram of means of zeros and ones by signed octave, (SIGNED_CELLS,), of length one.

    The cell of zero is left out.
    """
    shape = np.zeros(SIGNED_CELLS)
    one = CELLS + 1 - LOWEST  # the cell of 1
    shape[[one, one - 1, one - 2]] = _UNIT_SHARES / UNIT_LENGTH
    return shape


@lru_cache(maxsize=1)
def make_octave_shapes() -> tuple[Array, Array]:
    """Return shapes of histograms of means, normal or gamma, by signed octave, and facts about each.

    Returns:
        Shapes of length one, (shapes, SIGNED_CELLS), and four facts about each, (shapes, 4): its centre, its spread,
        whether it is narrow, and the length of the shape of one user.
    """
    low, high = list_signed_edges()
    sizes = 2.0 ** (np.arange(2 * LOWEST, 2 * (LOWEST + CELLS)) / 2)
    shapes, facts = [], []
    for ratio in (0.0, NARROW, 0.5, 1.0, 2.0):
        for sign in (-1.0, 1.0) if ratio else (1.0,):
            middle = sign * sizes if ratio else np.zeros_like(sizes)
            spread = ratio * sizes if ratio else sizes
            shape = ndtr((high - middle[:, None]) / spread[:, None]) - ndtr((low - middle[:, None]) / spread[:, None])
            shapes.append(shape)
            facts.append(np.column_stack([middle, spread, np.full(len(sizes), float(ratio == NARROW))]))
    for order in (1.0, 0.5):  # of one sign, and over many octaves: numbers whose logarithm varies
        for sign in (-1.0, 1.0):
            edges = sorted((sign * low, sign * high), key=np.sum)
            ends = (gammainc(order, order * np.maximum(edge, 0.0) / sizes[:, None]) for edge in edges)
            shapes.append(np.subtract(*reversed(list(ends))))
            facts.append(np.column_stack([sign * sizes, sizes / math.sqrt(order), np.zeros(len(sizes))]))
    found = np.concatenate(shapes)
    found[:, CELLS] = 0.0
    length = np.linalg.norm(found, axis=1)
    return found / length[:, None], np.column_stack([np.concatenate(facts), length])


@lru_cache(maxsize=1)
def make_window_shapes() -> tuple[Array, Array, Array, Array]:
    """Return shapes of histograms of means in a window, and facts about each.

    Returns:
        Shapes of length one, (shapes, LINEAR_CELLS); their centres and spreads in cells, and the lengths of the shapes
        of one user, (shapes,) each.
    """
    places = np.arange(0.0, LINEAR_CELLS + 0.25, 0.25)
    edges = np.arange(LINEAR_CELLS + 1.0)
    shapes, centres, spreads, lengths = [], [], [], []
    for spread in (0.3, 0.5, 0.8, 1.3, 2.0, 3.0, 5.0):
        below = ndtr((edges - places[:, None]) / spread)
        shape = np.diff(below, axis=1)
        lengths.append(np.maximum(np.linalg.norm(shape, axis=1), 1e-3))
        shapes.append(shape / lengths[-1][:, None])
        centres.append(places)
        spreads.append(np.full(len(places), spread))
    return np.concatenate(shapes), np.concatenate(centres), np.concatenate(spreads), np.concatenate(lengths)
