"""Norms of sums of outer products, raised to cover rounding errors where terms cancel (see `contributions.Products`)."""

from __future__ import annotations

import numpy as np

from privrep.privacy.scaling import sum_squares
from privrep.typing import Array


def compute_norms_by_gram(left: Array, right: Array) -> Array:
    """Return upper bounds of the norms of `Products`, (users,), from Gram matrices: cheap where rows are few."""
    gram, other = left @ left.transpose(0, 2, 1), right @ right.transpose(0, 2, 1)
    mass = np.sqrt(np.diagonal(gram, axis1=1, axis2=2) * np.diagonal(other, axis1=1, axis2=2))
    gram *= other
    return _raise_norms_by_mass(gram.reshape(len(gram), -1).sum(axis=1), np.ascontiguousarray(mass).sum(axis=1))


def compute_norms_by_product(left: Array, right: Array) -> Array:
    """Return upper bounds of the norms of `Products`, (users,), from the products themselves."""
    mass = np.sqrt((left * left).sum(axis=2) * (right * right).sum(axis=2)).sum(axis=1)
    return _raise_norms_by_mass(sum_squares(left.transpose(0, 2, 1) @ right), mass)


def _raise_norms_by_mass(squares: Array, mass: Array) -> Array:
    """Return the roots of `squares` (users,), raised to cover rounding errors measured by `mass` (users,)."""
    norms = np.maximum(np.sqrt(np.maximum(squares, 0.0)) + 1e-6 * mass, mass / 64) * (1 + 1e-12)
    return np.where(np.isfinite(squares) & np.isfinite(mass), norms, np.inf)
