"""Norms of sums of outer products, raised to cover rounding errors where terms cancel (see `Products`)."""

from __future__ import annotations

import numpy as np

from privrep.privacy.scaling import sum_squares
from privrep.typing import Array


def compute_norms_by_gram(left: Array, right: Array) -> Array:
    """Return upper bounds of the norms of `Products`, from Gram matrices, and the largest squares of rows' lengths.

    They are (2, users). Lengths are of rows of the left or of the right. This way is cheap where rows are few.
    """
    gram, other = left @ left.transpose(0, 2, 1), right @ right.transpose(0, 2, 1)
    first, second = np.diagonal(gram, axis1=1, axis2=2), np.diagonal(other, axis1=1, axis2=2)
    mass, largest = np.sqrt(first * second), _find_largest(first, second)
    gram *= other
    norms = _raise_norms_by_mass(gram.reshape(len(gram), -1).sum(axis=1), np.ascontiguousarray(mass).sum(axis=1))
    return np.stack([norms, largest])


def compute_norms_by_product(left: Array, right: Array) -> Array:
    """Return what `compute_norms_by_gram` does, from the products themselves."""
    first, second = (left * left).sum(axis=2), (right * right).sum(axis=2)
    mass = np.sqrt(first * second).sum(axis=1)
    norms = _raise_norms_by_mass(sum_squares(left.transpose(0, 2, 1) @ right), mass)
    return np.stack([norms, _find_largest(first, second)])


def _find_largest(first: Array, second: Array) -> Array:
    """Return the largest number of each user in two arrays, (users, rows) each; NaN if there is one."""
    return np.maximum(first.max(axis=1, initial=0.0), second.max(axis=1, initial=0.0))


def _raise_norms_by_mass(squares: Array, mass: Array) -> Array:
    """Return the roots of `squares` (users,), raised to cover rounding errors measured by `mass` (users,)."""
    norms = np.maximum(np.sqrt(np.maximum(squares, 0.0)) + 1e-6 * mass, mass / 64) * (1 + 1e-12)
    return np.where(np.isfinite(squares) & np.isfinite(mass), norms, np.inf)
