"""Public coordinates: those in which a representation is learned, with the way there and back, and projections."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from privrep.data.sparse import SparseRows
from privrep.typing import Array, Floats, Matrix, Vector


@dataclass(frozen=True)
class FeatureTransform:
    """Features are seen as z = W (x / scale), several targets as y / target_scale. All of it is public.

    In good coordinates the features have about unit variance and little correlation, so that noise of the same size in
    every coordinate does the same harm everywhere.
    """

    scale: Vector  # (d,)
    whitening: Matrix | None = None  # W, (d, d), symmetric; None is the identity
    target_scale: Vector | None = None  # (q,); None where there is one target, whose scale does not matter

    @classmethod
    def plain(cls, features: int) -> FeatureTransform:
        """The features as they come."""
        return cls(np.ones(features))

    def rows(self, X: Floats) -> Floats:
        """Rows, or sums of rows, (users, m, d), in X's precision; one product per user, never one for all."""
        scaled: Floats = X * (1 / self.scale).astype(X.dtype)
        return scaled if self.whitening is None else scaled @ self.whitening.astype(X.dtype)

    def targets(self, y: Floats) -> Floats:
        """Targets (users, m, q) as (q, users, m), a column at a time; those of a single column are left alone."""
        if y.ndim == 2:
            return y[None]
        scaled = y if self.target_scale is None else y / self.target_scale
        return np.ascontiguousarray(np.moveaxis(scaled, -1, 0), dtype=y.dtype)

    def original(self, basis: Array) -> Array:
        """(d, k) for features as they come: <z, basis v> = <x, original(basis) v>."""
        turned = basis if self.whitening is None else self.whitening @ basis
        return turned / self.scale[:, None]


@dataclass(frozen=True)
class Projection:
    """Rows scaled into the ball of `radius` if they are outside it, times the transpose of a public matrix (k', d)."""

    matrix: Matrix | None  # None: no projection
    radius: float

    def __call__(self, X: Floats | SparseRows) -> Floats:
        """(users, m, k') or (users, m, d) in single precision; a function of each user's rows, one product per user."""
        if isinstance(X, SparseRows):
            assert self.matrix is not None  # sparse rows that are not projected are made dense by the engine
            squares = X.matrix.copy()
            squares.data = squares.data**2
            length = np.sqrt(squares @ np.ones(squares.shape[1], squares.dtype)).reshape(X.shape[:2])
            image = X.project(self.matrix.T)
        else:
            length = np.sqrt((X * X).sum(axis=2))
            image = X if self.matrix is None else X @ np.ascontiguousarray(self.matrix.T, dtype=X.dtype)
        outside = length > self.radius
        if outside.any():
            factor = np.where(outside, self.radius / np.where(outside, length, 1), 1)
            image = image * factor.astype(image.dtype)[:, :, None]
        return np.ascontiguousarray(image, dtype=np.float32)
