"""Public projections of rows into few columns."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from privrep.data.sparse import SparseRows
from privrep.typing import Floats, Matrix


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
