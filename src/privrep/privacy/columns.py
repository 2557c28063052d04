"""Sparse vectors without negative entries: see `contributions.SparseColumns`."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import numpy as np

from privrep.privacy.contributions import SparseColumns
from privrep.typing import Array


@dataclass(frozen=True)
class NonNegativeColumns(SparseColumns):
    """Sparse columns without negative entries, so acute. A user with one counts as zero."""

    acute: ClassVar[bool] = True

    def norms(self) -> Array:
        negative = ~(self.values >= 0).all(axis=1)
        below = np.bincount(self.user[negative], minlength=len(self.tail)) > 0
        below |= ~(self.tail >= 0).all(axis=1)
        norms = np.sqrt(self.lengths() ** 2 + (self.tail**2).sum(axis=1)) * (1 + 1e-10)
        return np.where(below, np.inf, norms)
