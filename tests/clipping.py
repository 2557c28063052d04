"""Sums of clipped contributions as numbers, for tests that compare them with what they should be about."""

from __future__ import annotations

from typing import Any

import numpy as np

from privrep.privacy.bounds import Bound, clip_and_sum
from privrep.privacy.grid import grid_step
from privrep.typing import Array


def clip_to_numbers(contributions: Any, bound: Bound, counted: Any = None, users: int | None = None) -> Array:
    """Return what `clip_and_sum` does, times the step of the grid."""
    total = clip_and_sum(contributions, bound, counted, users)
    assert total.dtype == np.int64
    return total * bound.step


STEP = 2.0**-44  # a power of two with a root, for contributions of about one


def add_up(contributions: Any, weights: Any, step: float = STEP) -> Array:
    """Return the weighted sum of contributions as numbers, (size,)."""
    total = contributions.grid_sum(np.asarray(weights, dtype=np.float64), step)
    assert total.dtype == np.int64
    return total * step


def rounding_of(contributions: Any, weights: Any, step: float = STEP) -> float:
    """Return how far rounding may move the weighted sum of contributions, by the promise of their kind."""
    lengths = np.asarray(weights, dtype=np.float64) * contributions.norms()
    longest = float(lengths.max(initial=0.0))
    each = np.broadcast_to(contributions.roundings(longest, step), lengths.shape)
    return float(each[lengths > 0].sum() + (lengths > 0).sum() * 2.0**-20 * longest)


def check_sum(contributions: Any, weights: Any, wanted: Any) -> None:
    """Check that a weighted sum is this one but for rounding, on the grid of its longest contribution."""
    step = grid_step(float((np.asarray(weights) * contributions.norms()).max(initial=1e-300)))
    total = add_up(contributions, weights, step)
    assert np.linalg.norm(total - np.ravel(wanted)) <= rounding_of(contributions, weights, step)
