"""The grid of a release, and sums of users' contributions on it: exact, in integers.

A statistic with the clipping bound C lives on the multiples of a step, a power of two with 2^35 to 2^37 steps a bound.
Every user's clipped contribution is rounded to it before anything is added. So a sum does not depend on order, blocks,
threads, shards or machines, and a user who changes moves a sum by that user's integers alone.

Formal guarantee. Let a portion be users whose integers add up to less than 2^53 in absolute value, in each coordinate
and in each product on its way there.
* Then float64 adds up a portion exactly, in any order: all sums on the way are integers below 2^53.
* A user's contribution after clipping is shorter than 2^37.1 steps. So PORTION users are a portion. CANCELLING users
  are one where terms of a user that cancel are at most 64 times longer than their sum.
* Portions are added up in int64: 2^37.1 steps of 2^25 users are less than 2^63. More users are added up in Python's
  integers, which have no end.

Rounding moves a vector of n coordinates by at most `measure_rounding(n, step)`. Half a step a coordinate is rounding to
the nearest integer. The factor 1 + 2^-10 covers what floating point does to numbers of at most 2^38 before that, 2^-14
of a step a coordinate.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Any

import numpy as np
from numpy.typing import NDArray

from privrep.typing import Array, Integers

STEPS_PER_BOUND = 36  # log2 of the steps of a bound, but for one up or down
PORTION = 1 << 15  # users whose clipped contributions float64 adds up exactly
CANCELLING = 1 << 9  # the same where a user's terms may be 64 times longer than their sum
MAX_INT64_USERS = 1 << 25  # whose sums fit 63 bits
_IN_CACHE = 1 << 15  # numbers that are rounded at a time


def grid_step(bound: float) -> float:
    """Return the power of two on whose multiples a statistic with this clipping bound is released.

    Its exponent is even, so that its root is a power of two as well.
    """
    return math.ldexp(1.0, (math.frexp(bound)[1] - STEPS_PER_BOUND) // 2 * 2)


def measure_rounding(size: int, step: float) -> float:
    """Return how far rounding to multiples of `step` moves a vector of this size, at most."""
    return 0.5 * math.sqrt(size) * step * (1 + 2.0**-10)


def root_step(step: float) -> float:
    """Return the root of a step: products of two of its multiples are multiples of the step."""
    return math.ldexp(1.0, (math.frexp(step)[1] - 1) // 2)


def add_rounded(values: NDArray[np.floating[Any]], weights: Array, step: float) -> Integers:
    """Return sum_i rint(w_i v_i / step), (size,), exactly.

    Args:
        values: v of each user, (users, size); users of weight zero may have any.
        weights: (users,), such that w_i v_i is a clipped contribution.
        step: of the grid.
    """
    users, size = values.shape
    total = np.zeros(size, np.int64)
    factors = (weights / step)[:, None]
    for columns in cut_evenly(size, _IN_CACHE):
        width = columns.stop - columns.start
        for portion in cut_evenly(users, PORTION):
            sums = np.zeros(width)
            for some in cut_evenly(portion.stop, _IN_CACHE // width, portion.start):
                sums += round_weighted(values[some, columns], factors[some]).sum(axis=0)
            total[columns] += as_integers(sums)
    return total


def cut_evenly(stop: int, most: int, start: int = 0) -> Iterator[slice]:
    """Yield slices from `start` to `stop`, at most `most` long."""
    most = max(most, 1)
    return (slice(first, min(first + most, stop)) for first in range(start, stop, most))


def round_weighted(values: NDArray[np.floating[Any]], factors: Array) -> Array:
    """Return values times factors, rounded to whole numbers; values of factor zero may be anything.

    Args:
        values: (users, ...).
        factors: in steps of the grid, (users, 1, ...): they are broadcast.
    """
    if not (factors > 0).all():
        values = np.where(factors > 0, values, 0)
    rounded: Array = np.multiply(values, factors, dtype=np.float64)
    return np.rint(rounded, out=rounded)


def as_integers(values: NDArray[np.floating[Any]]) -> Integers:
    """Return whole numbers as int64. Raise ArithmeticError if they are too large to be exact: nothing is released."""
    if not np.abs(values).max(initial=0.0) <= 2.0**53:  # cannot happen by the contract of Contributions; NaN included
        raise ArithmeticError("a clipped sum overflowed: the local step broke its contract, and nothing was released.")
    return values.astype(np.int64)


def count_rounded(places: Integers, values: Array, size: int) -> Integers:
    """Return the sum of the whole numbers `values` (n,) at each place, (size,), exactly.

    Numbers too many for float64 are cut into a high and a low part of 20 bits.
    """
    if np.abs(values).sum() <= 2.0**52:
        return as_integers(np.bincount(places, values, minlength=size) * 1.0)
    high = np.floor(values * 2.0**-20)
    parts = (np.bincount(places, part, minlength=size) * 1.0 for part in (high, values - high * 2.0**20))
    first, second = (as_integers(part) for part in parts)
    return (first << 20) + second


def round_total(values: Array, step: float) -> Integers:
    """Return numbers, (size,), in whole steps: a sum that is rounded once. Raise ArithmeticError where it overflows."""
    rounded = np.rint(values / step)
    if not np.abs(rounded).max(initial=0.0) < 2.0**62:
        raise ArithmeticError("a clipped sum overflowed: the local step broke its contract, and nothing was released.")
    return rounded.astype(np.int64)


class Total:
    """A sum over users that grows part by part: in int64 as long as it fits there, whoever they are."""

    def __init__(self, size: int) -> None:
        self._sum: NDArray[np.int64] | NDArray[np.object_] = np.zeros(size, np.int64)
        self._users = 0

    def add(self, part: NDArray[np.int64] | NDArray[np.object_], users: int) -> None:
        """Add the integers of some users, (size,)."""
        self._users += users
        if self._users > MAX_INT64_USERS and self._sum.dtype != object:
            self._sum = self._sum.astype(object)
        self._sum = self._sum + part

    @property
    def integers(self) -> NDArray[np.int64] | NDArray[np.object_]:
        """Return the sum, (size,)."""
        return self._sum
