"""Draws from the discrete Gaussian: the integer x with probability proportional to f(x) = exp(-x^2 / (2 sigma^2)).

Formal guarantee. Let 0 < sigma <= 2^56, let bits be uniform and independent, and let NumPy's exp be within 2^-41 of
exp, relatively. (That is hundreds of times the error that NumPy allows itself.)
* The draws are independent.
* They have exactly this distribution, restricted to -R <= x < R for some R > 40 sigma.
* The part left out has a probability under e^-799, or e^-800 from sigma = 1 on.
* Floating-point numbers decide nothing that they could get wrong.

How. The area under height * f is covered with 2^16 rectangles, called slots, all of the same area. Slot (k, l) is above
the integers kB to (k+1)B - 1, B a power of two, from height l to l + 1. 16 bits choose a slot and log2 B bits a place x
in it. x is kept if (x, l + U) is below the curve, U uniform on [0, 1). Slots that are below it everywhere need no U.

Proof. Bucket k has the slots from l = 0 up to at least the largest height * f in it. So a try ends with x kept with
probability 2^-16 / B * sum over l of the part of [l, l + 1] that is below height * f(x). That is 2^-16 / B * height *
f(x): proportional to f(x). Tries are independent, so the kept ones are. The number of kept tries says nothing of their
values: the first `size` of them are as good as any. Floating point computes these:

* The table. The number of slots of a bucket is rounded up, and the number of slots below the curve is rounded down.
  Both are rounded after a margin of 2^-32. That is far more than the error of f wherever height * f is 1 or more.
* Whether (x, l + U) is below the curve, in the other slots, 7 in 100. x / sigma is off by less than 2^-51 of it, half
  its square t by less than 2^-50 t. f(x) is off by less than 2^-51 + 2^-41, as t exp(-t) < 1/2. height is under 2^15,
  so height * f(x) - l - U is off by less than 2^-24, the first 53 bits of U taken for all of it. Once in 10^8 draws it
  is closer to zero than that. Then decimal numbers decide, of as many digits and after as many bits of U as it takes:
  see `_is_below_curve`.

Beyond R: both sides of sum f are together less than (2 + sigma / 20) e^-800. All of sum f is at least 1, and at least
sigma sqrt(2 pi).
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from decimal import ROUND_HALF_EVEN, Context, Decimal, localcontext
from functools import lru_cache

import numpy as np
from numpy.typing import NDArray

from privrep.typing import Array, Integers

Bits = Callable[[int], bytes]
"""Source of a number of uniform, independent bytes."""

SLOT_BITS = 16
SLOTS = 1 << SLOT_BITS
REACH = 40.0  # standard deviations
MARGIN = 2.0**-32  # of f, relatively, for the table
UNSURE = 2.0**-24  # of height * f - l - U: closer to zero than this, floating point does not decide


@dataclass(frozen=True)
class Table:
    """The slots for one sigma. Slots before `edge` are below the curve; slots that are left over are above it."""

    sigma: float
    height: int
    shift: int  # log2 B
    edge: int
    buckets: NDArray[np.int16]
    layers: NDArray[np.uint16]


def draw_discrete_gaussian(sigma: float, size: int, bits: Bits) -> Integers:
    """Return independent draws, (size,), by the module's guarantee.

    Args:
        sigma: in steps of the grid, above 0 and at most 2^56.
        size: number of draws.
        bits: source of uniform, independent bytes.
    """
    table = make_table(float(sigma))
    kept, missing = [np.empty(0, dtype=np.int64)], size
    while missing > 0:
        kept.append(_draw_kept(table, missing + missing // 16 + 8, bits)[:missing])  # 4 in 100 are not kept
        missing -= len(kept[-1])
    return np.concatenate(kept)


def _draw_kept(table: Table, count: int, bits: Bits) -> Integers:
    """Return the draws that are kept of this many tries, `count` of them or fewer."""
    words = np.frombuffer(bits(8 * count), dtype="<i8")
    slots = words & (SLOTS - 1)
    values = table.buckets.take(slots).astype(np.int64)
    values <<= table.shift
    places = words >> SLOT_BITS
    places &= (1 << table.shift) - 1
    values += places
    edge = np.flatnonzero(slots >= table.edge)
    kept = _find_below_curve(table, values[edge], table.layers.take(slots[edge]), bits)
    return np.delete(values, edge[~kept])


def _find_below_curve(table: Table, values: Integers, layers: NDArray[np.uint16], bits: Bits) -> NDArray[np.bool_]:
    """Return a mask of the tries that are below the curve: l + U < height * f(x).

    Args:
        table: of the slots.
        values: x of each try, (tries,).
        layers: l of each try, (tries,).
        bits: source of U.
    """
    uniform = np.frombuffer(bits(8 * len(values)), dtype="<u8")
    gaps = table.height * _evaluate_curve(values, table.sigma) - layers - (uniform >> np.uint64(11)) * 2.0**-53
    kept: NDArray[np.bool_] = gaps > 0
    for i in np.flatnonzero(np.abs(gaps) <= UNSURE).tolist():
        kept[i] = _is_below_curve(table, int(values[i]), int(layers[i]), int(uniform[i]), bits)
    return kept


def _is_below_curve(table: Table, value: int, layer: int, uniform: int, bits: Bits) -> bool:
    """Return whether layer + U < height * f(value), exactly; `uniform` holds the first 64 bits of U.

    With p digits, the gap is off by less than 10^(8 - p). The half of the square is off by 4 * 10^(1 - p) of it, f by 2
    * 10^(1 - p). All else is less than 10^5, rounded to p digits. The loop ends, as the gap is zero with probability
    zero.
    """
    known, digits = 64, 40
    while True:
        with localcontext(Context(digits, ROUND_HALF_EVEN, Emin=-999_999, Emax=999_999, clamp=0, flags=[], traps=[])):
            ratio = Decimal(value) / Decimal(table.sigma)
            part = Decimal(uniform) / (1 << known)
            gap = table.height * (ratio * ratio / -2).exp() - layer - part
            error, unknown = Decimal(10) ** (8 - digits), 1 / Decimal(1 << known)
            if gap <= -error:
                return False
            if gap >= unknown + 2 * error:
                return True
        uniform, known, digits = uniform << 64 | int.from_bytes(bits(8), "little"), known + 64, digits + 20


def _evaluate_curve(values: Integers | Array, sigma: float) -> Array:
    """Return f at values (n,), up to the error in the proof above."""
    with np.errstate(over="ignore", under="ignore"):  # both are zero then
        curve: Array = np.exp(-0.5 * (values / sigma) ** 2)
    return curve


@lru_cache(maxsize=32)
def make_table(sigma: float) -> Table:
    """Return the slots for one sigma.

    B is between sigma / 32 and sigma / 16, but at least 1 and at most 2^48, so that a try takes 64 bits.
    """
    shift = min(max(math.frexp(sigma)[1] - 5, 0), 64 - SLOT_BITS)
    count = math.ceil(REACH * math.ldexp(sigma, -shift)) + 1
    ends = _evaluate_curve(np.ldexp(np.arange(count + 1.0), shift), sigma)
    height = int((SLOTS - 2 * count) / (2 * (1 + 2 * MARGIN) * ends[:-1].sum()))
    tops = np.floor(height * ends[:-1] * (1 + MARGIN)).astype(np.int64) + 1
    below = np.floor(height * ends[1:] * (1 - MARGIN)).astype(np.int64)
    numbers = np.arange(count)
    numbers, tops, below = np.concatenate([numbers, ~numbers]), np.tile(tops, 2), np.tile(below, 2)  # ~k = -k - 1
    crossed = tops - below
    first = np.cumsum(crossed) - crossed
    edge, end = int(below.sum()), int(tops.sum())
    buckets, layers = np.zeros(SLOTS, dtype=np.int16), np.full(SLOTS, height + 1, dtype=np.uint16)
    buckets[:edge], buckets[edge:end] = np.repeat(numbers, below), np.repeat(numbers, crossed)
    layers[edge:end] = np.arange(end - edge) - np.repeat(first - below, crossed)
    buckets.flags.writeable = layers.flags.writeable = False
    return Table(sigma, height, shift, edge, buckets, layers)
