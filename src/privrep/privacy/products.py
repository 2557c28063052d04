"""Norms of sums of outer products, raised to cover rounding errors where terms cancel (see `Products`)."""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from privrep.privacy.grid import round_weighted
from privrep.privacy.scaling import LARGEST_FACTOR, sum_squares
from privrep.typing import Array


def compute_norms_by_gram(left: Array, right: Array) -> Array:
    """Return upper bounds of the norms of `Products`, who has long rows as 1, and masses over norms, (3, users).

    Norms are taken from Gram matrices. Rows are long above LARGEST_FACTOR. This way is cheap where rows are few.
    """
    gram, other = left @ left.transpose(0, 2, 1), right @ right.transpose(0, 2, 1)
    first, second = np.diagonal(gram, axis1=1, axis2=2), np.diagonal(other, axis1=1, axis2=2)
    mass, large = np.sqrt(first * second), _find_large(first, second)
    gram *= other
    norms, ratio = _raise_norms_by_mass(gram.reshape(len(gram), -1).sum(axis=1), np.ascontiguousarray(mass).sum(axis=1))
    return np.stack([norms, large, ratio])


def compute_norms_by_product(left: Array, right: Array) -> Array:
    """Return what `compute_norms_by_gram` returns, from the products themselves."""
    first, second = (left * left).sum(axis=2), (right * right).sum(axis=2)
    mass = np.sqrt(first * second).sum(axis=1)
    norms, ratio = _raise_norms_by_mass(sum_squares(left.transpose(0, 2, 1) @ right), mass)
    return np.stack([norms, _find_large(first, second), ratio])


def _find_large(first: Array, second: Array) -> Array:
    """Return 1 for users with a number above LARGEST_FACTOR^2, or NaN, in either array (users, rows), 0 for others."""
    limit = LARGEST_FACTOR**2
    if first.max(initial=0.0) <= limit and second.max(initial=0.0) <= limit:
        return np.zeros(len(first))
    return np.where(((first <= limit) & (second <= limit)).all(axis=1), 0.0, 1.0)


def _raise_norms_by_mass(squares: Array, mass: Array) -> tuple[Array, Array]:
    """Return the roots of `squares` (users,), raised to cover rounding errors measured by `mass` (users,).

    Beside them, what is at least the mass over the norm, (users,).
    """
    norms = np.maximum(np.sqrt(np.maximum(squares, 0.0)) + 1e-6 * mass, mass / 64) * (1 + 1e-12)
    ratio = np.where(norms > 0, mass / np.where(norms > 0, norms, 1.0), 1.0) * (1 + 1e-6)
    return np.where(np.isfinite(squares) & np.isfinite(mass), norms, np.inf), ratio


def round_factors(left: NDArray[Any], right: NDArray[Any], weights: Array, root: float) -> tuple[Array, Array]:
    """Return both factors of weighted rows in whole multiples of `root`, made about equally long by powers of two.

    Rows whose product is below all that counts, or nothing, are zero in both.

    Args:
        left: (rows, p).
        right: (rows, q).
        weights: (rows, 1), positive.
        root: of the step of the grid.
    """
    a, b = (np.sqrt(sum_squares(factor.astype(np.float64))) for factor in (left, right))
    absent = (a == 0) | (b == 0)
    first, second = (np.where(absent, 0.0, by)[:, None] for by in balance(a, b, weights[:, 0]))
    return round_weighted(left, first / root), round_weighted(right, second / root)


def balance(first: Array, second: Array, weights: Array) -> tuple[Array, Array]:
    """Return w 2^k and 2^-k, each (n,), so that first and second times them are equally long, but for a factor of 4.

    Args:
        first: lengths, (n,); where one is zero, any k will do.
        second: lengths, (n,).
        weights: w, (n,).
    """
    (a, e), (_, f), (w, g) = (np.frexp(np.where(lengths > 0, lengths, 1.0)) for lengths in (first, second, weights))
    shift = (f - e - g - np.frexp(a * w)[1]) // 2  # the first is in [2^(n-1), 2^n), the second in [2^(n-1), 2^(n+1))
    return np.ldexp(weights, shift), np.ldexp(1.0, -shift)
