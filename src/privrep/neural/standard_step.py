"""Steps on users' rows about points of their own (see `heads.standard`)."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace

import numpy as np
import torch

from privrep.errors import InputError
from privrep.heads.gradient import labels_of
from privrep.heads.standard import standardise
from privrep.nn.threads import one_thread, rows_of
from privrep.privacy.bounds import Contributions, Losses
from privrep.privacy.protocol import Step, StepSpec, UserBatch
from privrep.typing import Array, Matrix, Singles, Vector


@dataclass(frozen=True, eq=False)
class Coordinates:
    """A public map of rows: features over their sizes, then stretched along a few directions and alike in all others.

    Args:
        sizes: (d,), by which features are divided.
        basis: (d, k), directions of features so divided, orthonormal.
        stretch: (k,), what rows are multiplied by along each.
        flat: what rows are multiplied by along all others.
        degrees: of freedom, which say how long rows are there (see `curvature`).
    """

    sizes: Vector
    basis: Matrix
    stretch: Vector
    flat: float
    degrees: float

    def __post_init__(self) -> None:
        if self.basis.shape != (len(self.sizes), len(self.stretch)):
            raise InputError("the sizes, directions and lengths of coordinates belong to different features.")

    @property
    def _beyond(self) -> Array:
        """Return what is added along directions, relative to what all have."""
        return self.stretch / self.flat - 1

    def __call__(self, rows: Singles) -> Singles:
        """Return rows (users, r, d) in these coordinates."""
        along = (self.basis * self._beyond).T
        with one_thread():
            flat = rows_of(rows).flatten(0, 1).mul_(rows_of(self.flat / self.sizes))
            if len(self.stretch):
                flat = torch.addmm(flat, flat @ rows_of(self.basis), rows_of(along))
            result: Singles = flat.reshape(rows.shape).numpy()
        return result

    def on_rows(self, weights: Array) -> Array:
        """Return weights (outputs, d) for rows as they are, from weights for rows in these coordinates."""
        added = (weights @ self.basis) * self._beyond @ self.basis.T
        return np.asarray((weights + added) * (self.flat / self.sizes))


@dataclass(frozen=True, eq=False)
class Standards:
    """How public features are standardised: all of it public."""

    classes: int
    raw: int  # columns before the public features
    centre: Vector
    pull: float
    coordinates: Coordinates | None = None  # None: those of the features

    def __post_init__(self) -> None:
        if self.coordinates is not None and len(self.coordinates.sizes) != len(self.centre):
            raise InputError("the coordinates and the centre of standards belong to different features.")

    def __call__(self, batch: UserBatch) -> Singles:
        """Return the public features of a batch about their users' points, (users, rows, d)."""
        there = labels_of(batch.y, self.classes).numpy() >= 0
        rows = standardise(batch.X[:, :, self.raw :], there, self.centre, self.pull).rows
        return rows if self.coordinates is None else self.coordinates(rows)


@dataclass(frozen=True, eq=False)
class StandardStep:
    """A step on standardised public features."""

    step: Step
    standards: Standards

    @property
    def spec(self) -> StepSpec:
        return self.step.spec

    def __call__(self, batch: UserBatch) -> Mapping[str, Contributions | Losses]:
        with np.errstate(all="ignore"):
            return self.step(replace(batch, X=self.standards(batch)))
