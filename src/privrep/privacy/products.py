"""Norms of sums of outer products, raised to cover rounding errors where terms cancel (see `Products`)."""

from __future__ import annotations

import numpy as np

from privrep.privacy.scaling import LARGEST_FACTOR, sum_squares
from privrep.typing import Array


def compute_norms_by_gram(left: Array, right: Array) -> Array:
    """Return upper bounds of the norms of `Products`, from Gram matrices, and who has long rows as 1, (2, users).

    Rows of left and right are long above LARGEST_FACTOR. This way is cheap where rows are few.
    """
    gram, other = left @ left.transpose(0, 2, 1), right @ right.transpose(0, 2, 1)
    first, second = np.diagonal(gram, axis1=1, axis2=2), np.diagonal(other, axis1=1, axis2=2)
    mass, large = np.sqrt(first * second), _find_large(first, second)
    gram *= other
    norms = _raise_norms_by_mass(gram.reshape(len(gram), -1).sum(axis=1), np.ascontiguousarray(mass).sum(axis=1))
    return np.stack([norms, large])


def compute_norms_by_product(left: Array, right: Array) -> Array:
    """Return what `compute_norms_by_gram` does, from the products themselves."""
    first, second = (left * left).sum(axis=2), (right * right).sum(axis=2)
    mass = np.sqrt(first * second).sum(axis=1)
    norms = _raise_norms_by_mass(sum_squares(left.transpose(0, 2, 1) @ right), mass)
    return np.stack([norms, _find_large(first, second)])


def _find_large(first: Array, second: Array) -> Array:
    """Return 1 for users with a number above LARGEST_FACTOR^2, or NaN, in either array (users, rows), 0 for others."""
    limit = LARGEST_FACTOR**2
    if first.max(initial=0.0) <= limit and second.max(initial=0.0) <= limit:
        return np.zeros(len(first))
    return np.where(((first <= limit) & (second <= limit)).all(axis=1), 0.0, 1.0)


def _raise_norms_by_mass(squares: Array, mass: Array) -> Array:
    """Return the roots of `squares` (users,), raised to cover rounding errors measured by `mass` (users,)."""
    norms = np.maximum(np.sqrt(np.maximum(squares, 0.0)) + 1e-6 * mass, mass / 64) * (1 + 1e-12)
    return np.where(np.isfinite(squares) & np.isfinite(mass), norms, np.inf)
