"""Powers of two that bring users' numbers near one, so that squares and products neither under- nor overflow.

A power of two changes no digit of a number. Which power a user gets, and whether it gets one, follows from that user's
numbers alone. Users with ordinary numbers get none: their norms and sums are what they would be without this module.

Formal guarantee of what is not scaled.
* Products of rows of length at most LARGEST_FACTOR: an entry of a Gram matrix, of up to 2^22 products, underflows by
  at most 2^-1053. Times an entry of the other, over 2^24 pairs of rows, that is 2^-929 in the square of the norm.
* Moments with a scale of at most LARGEST_SCALE: the squares of at most 2^29 entries underflow by 2^-1075 each. That is
  2^-523 in the norm, times the scale 2^-459.
* So such norms are too small by less than 2^-459. All others are computed of numbers near one.
"""

from __future__ import annotations

import math
from typing import Any

import numpy as np
from numpy.typing import NDArray

from privrep.typing import Array

LARGEST_FACTOR = 2.0**50  # up to here, what underflows in the other factor of a product is too small to matter
LARGEST_SCALE = 2.0**64  # likewise for a scale and the rows of a moment matrix
_LOWEST = -(1 << 12)  # an exponent below all that numbers and their products have


def scale_near_one(values: NDArray[Any]) -> tuple[NDArray[Any], NDArray[np.int64]]:
    """Return each user's numbers times a power of two, and the exponents (users,) that were taken out.

    The largest number of a user is then between 1/2 and 1, unless it is subnormal. `values` is (users, rows, columns).
    """
    largest = np.abs(values).max(axis=(1, 2), initial=0.0)
    exponent = np.maximum(np.frexp(largest)[1], np.finfo(values.dtype).minexp).astype(np.int64)
    return values * np.ldexp(1.0, -exponent).astype(values.dtype)[:, None, None], exponent


def read_scale(scale: NDArray[Any]) -> Array:
    """Return scales (users,) in float64, infinite where they are negative or NaN: these users count as zero."""
    return np.where(scale >= 0, scale, np.inf).astype(np.float64, copy=False)


def scale_moments(rows: NDArray[Any], scale: NDArray[Any]) -> tuple[Array, Array]:
    """Return rows and scales in float64 that have the same scale_u * A^T A, for norms.

    The rows of users with a scale above LARGEST_SCALE are brought near one, as their squares could underflow.

    Args:
        rows: A of each user, (users, m, d).
        scale: (users,).
    """
    A, scale = np.ascontiguousarray(rows, dtype=np.float64), read_scale(scale)  # one order, whoever else is there
    large = scale > LARGEST_SCALE
    if large.any():
        A = A.copy()
        A[large], exponent = scale_near_one(A[large])
        scale[large] = np.ldexp(scale[large], 2 * exponent)
    return A, scale


def scale_products(left: NDArray[Any], right: NDArray[Any]) -> tuple[Array, Array, NDArray[np.int64]]:
    """Return factors near one or below, and exponents e, (users,): 2^e_u times their products is what it was.

    Every row is brought near one by itself. A user's exponent is the largest of its rows' exponents. Rows with smaller
    ones keep what is missing in their right factor.

    Args:
        left: (users, rows, p).
        right: (users, rows, q).
    """
    users, rows, _ = left.shape
    flat = (factor.astype(np.float64, copy=False).reshape(users * rows, 1, -1) for factor in (left, right))
    (a, e), (b, f) = (scale_near_one(factor) for factor in flat)
    absent = (a == 0).all(axis=(1, 2)) | (b == 0).all(axis=(1, 2))
    exponent = np.where(absent, _LOWEST, e + f).reshape(users, rows)
    shared = exponent.max(axis=1, initial=_LOWEST)
    b = np.ldexp(b, (exponent - shared[:, None]).reshape(-1, 1, 1))
    return a.reshape(left.shape), b.reshape(right.shape), shared


def sum_squares(values: Array) -> Array:
    """Return the sum of squares of each user's numbers, (users,), whoever stands beside it.

    It does not use einsum, which cuts long sums at the end of its buffer: elsewhere for one user than for several.
    Numbers in another order in memory would be added up in another order, too.
    """
    values = np.ascontiguousarray(values)
    total: Array = (values * values).reshape(len(values), math.prod(values.shape[1:])).sum(axis=1)
    return total
