"""Clipping norms, read off released histograms of the norms of users' vectors."""

from __future__ import annotations

import math

import numpy as np
from numpy.typing import NDArray

from privrep.linear.steps import WIDE_LOWEST
from privrep.linear.transform import CLEAR
from privrep.typing import Array

BIAS = 0.1  # part of the cut-off that counts where users with large norms say much the same as the others
SEEN = 3.0  # deviations of noise above which a run of cells has users, where users are expected


def choose_norm(counts: Array, sigma: float, mu_squared: float, size: int, rare: float | None = None) -> float | None:
    """Return the clipping norm that balances the noise against what it cuts off; None where no user is heard.

    Args:
        counts: users by the octave of their norm, (cells,), with noise.
        sigma: standard deviation of the noise in each count.
        mu_squared: what the release will cost.
        size: how many numbers it has.
        rare: for labels, the largest norm that users with the rarer label may have; None: for numbers. Such users are
            few, have larger norms than the others and say something else, so all of what is cut off counts.
    """
    peak = int(counts.argmax())
    if counts[peak] < CLEAR * sigma:
        return None
    most = _find_full_cells(counts > 2 * sigma, peak)
    users = np.where(most, counts, 0.0)
    if rare is not None:
        last = min(math.floor(math.log2(rare)) - WIDE_LOWEST, len(counts) - 1)
        few = _find_rarer(counts, sigma, int(np.flatnonzero(most)[-1]) + 1, last)
        users = np.where(most | (counts > CLEAR * sigma), counts, few)
    norms = 2.0 ** (np.arange(len(counts)) + WIDE_LOWEST)
    first, last = np.flatnonzero(users)[[0, -1]]
    candidates = 2.0 ** (np.arange(4 * first, 4 * last + 5) / 4 + WIDE_LOWEST)
    noise = 2 * math.sqrt(size) / math.sqrt(mu_squared)
    kept = np.minimum(1.0, candidates[:, None] / norms)
    info = (users * kept).sum(axis=1)  # what is left of the curvature
    cut = (BIAS if rare is None else 1.0) * (users * norms * (1 - kept)).sum(axis=1)
    sampling = (users * (norms * kept) ** 2).sum(axis=1)
    error = ((noise * candidates) ** 2 + cut**2 + sampling) / info**2
    return float(candidates[error.argmin()])


def _find_full_cells(full: NDArray[np.bool_], peak: int) -> NDArray[np.bool_]:
    """Return a mask of the cells around the peak that are full without a gap, (cells,).

    Args:
        full: whether each cell is full, (cells,).
        peak: the position of the fullest cell.
    """
    below, above = np.flatnonzero(~full[:peak]), np.flatnonzero(~full[peak:])
    around = np.zeros(len(full), bool)
    around[below[-1] + 1 if len(below) else 0 : peak + above[0] if len(above) else len(full)] = True
    return around


def _find_rarer(counts: Array, sigma: float, first: int, last: int) -> Array:
    """Return users in the run of cells that stands out most from the noise, spread evenly over it, (cells,).

    Return zeros where no run stands out. Few users over many cells do not stand out cell by cell.

    Args:
        counts: users by cell, (cells,), with noise.
        sigma: standard deviation of the noise in each count.
        first: the first cell to look at.
        last: the last cell to look at.
    """
    found, clearest = np.zeros(len(counts)), SEEN
    sums = np.concatenate([[0.0], np.cumsum(counts)])
    for start in range(first, last + 1):
        for end in range(start + 1, last + 2):
            total, cells = float(sums[end] - sums[start]), end - start
            if total > clearest * sigma * math.sqrt(cells):
                clearest = total / (sigma * math.sqrt(cells))
                found = np.zeros(len(counts))
                found[start:end] = total / cells
    return found
