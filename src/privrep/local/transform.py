"""Public coordinates in which a representation is learned, with the way there and back, and projections."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from privrep.data.sparse import SparseRows
from privrep.typing import Array, Floats, Matrix, Vector


@dataclass(frozen=True)
class FeatureTransform:
    """Coordinates of features, z = W (x / scale), and of several targets, y / target_scale. All of it is public.

    In good coordinates the features have about unit variance and little correlation. So noise of the same size in every
    coordinate does the same harm everywhere.
    """

    scale: Vector  # (d,)
    whitening: Matrix | None = None  # W, (d, d), symmetric; None is the identity
    target_scale: Vector | None = None  # (q,); None where there is one target, whose scale does not matter

    @classmethod
    def plain(cls, features: int) -> FeatureTransform:
        """Return the transform that leaves features as they come."""
        return cls(np.ones(features))

    def rows(self, X: Floats) -> Floats:
        """Return transformed rows, or sums of rows, (users, m, d), in X's precision.

        There is one product per user, never one for all.
        """
        scaled: Floats = X * (1 / self.scale).astype(X.dtype)
        return scaled if self.whitening is None else scaled @ self.whitening.astype(X.dtype)

    def targets(self, y: Floats) -> Floats:
        """Return targets (users, m, q) as (q, users, m), scaled; a single column comes as it is, (1, users, m)."""
        if y.ndim == 2:
            return y[None]
        scaled = y if self.target_scale is None else y / self.target_scale
        return np.ascontiguousarray(np.moveaxis(scaled, -1, 0), dtype=y.dtype)

    def to_original(self, basis: Array) -> Array:
        """Return a basis (d, k) for features as they come: <z, basis v> = <x, to_original(basis) v>."""
        turned = basis if self.whitening is None else self.whitening @ basis
        return turned / self.scale[:, None]


@dataclass(frozen=True)
class Projection:
    """Public map: rows are scaled into the ball of `radius` where they are outside it, then times a matrix.

    The matrix, (k', d), is transposed. None projects nothing.
    """

    matrix: Matrix | None  # None: no projection
    radius: float

    def __call__(self, X: Floats | SparseRows) -> Floats:
        """Return (users, m, k') or (users, m, d) in single precision, for X (users, m, d).

        It is a function of each user's rows, one product per user.
        """
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
