"""Sums of clipped contributions as numbers, for tests that compare them with what they should be about."""

from __future__ import annotations

from typing import Any

import numpy as np

from privrep.privacy.bounds import Bound, clip_and_sum
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
