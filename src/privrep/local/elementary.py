"""Exponential and logarithm made of additions, multiplications and divisions alone.

Those are rounded the same way wherever a number stands in an array. NumPy's own `exp` and `log` may take another path
through the last few numbers of an array, or through one that is not contiguous. A user's number would then depend on
who stands beside it (see `least_squares`). Correct to about ten digits, which is more than a fit on rows needs.
"""

from __future__ import annotations

import math

import numpy as np

from privrep.typing import Floats

_LARGEST = 690.0  # 2^(690 / log 2) has an exponent of 64-bit numbers, and so has its inverse


def exp(x: Floats) -> Floats:
    """Return e^x for an array of any shape, for |x| up to 690 and the value there beyond.

    Args:
        x: exponents, any shape.
    """
    x = np.clip(x, -_LARGEST, _LARGEST)
    octaves = np.rint(x * (1 / math.log(2)))
    half = (x - octaves * math.log(2)) * 0.5
    square = half * half
    even, odd = 120.0 + 12.0 * square, half * (60.0 + square)
    root = (even + odd) / (even - odd)  # Pade's approximation, on |half| < 0.174
    power = ((octaves.astype(np.int64) + 1023) << 52).view(np.float64)  # 2^octaves, by its bits
    return root * root * power


def log(x: Floats) -> Floats:
    """Return the natural logarithm, in the shape of x.

    Args:
        x: positive numbers, any shape.
    """
    mantissa, exponent = np.frexp(x)
    small = mantissa < math.sqrt(0.5)
    mantissa, exponent = np.where(small, 2 * mantissa, mantissa), exponent - small
    s = (mantissa - 1.0) / (mantissa + 1.0)
    square = s * s
    series = np.full_like(s, 1.0 / 11)
    for denominator in (9, 7, 5, 3, 1):
        series = series * square + 1.0 / denominator
    return exponent * math.log(2) + 2.0 * s * series


def sigmoid(x: Floats) -> Floats:
    """Return 1 / (1 + e^-x), in the shape of x."""
    return 1.0 / (1.0 + exp(-x))


def softplus(x: Floats) -> Floats:
    """Return log(1 + e^x) without overflow, in the shape of x."""
    return np.maximum(x, 0.0) + log(1.0 + exp(-np.abs(x)))
