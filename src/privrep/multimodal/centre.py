"""A common scale for cached features: of length one, less the mean of all users', of length one again.

Features of a frozen network have a large mean in common, which tells no image from another. Their mean is released
once, charged like everything else; what is done with it is public arithmetic on every row by itself.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from privrep.multimodal.towers import Layout, unit
from privrep.privacy.bounds import Bound, Contributions
from privrep.privacy.calibration import Query
from privrep.privacy.contributions import Vectors
from privrep.privacy.protocol import StepSpec, UserBatch
from privrep.privacy.run import Run
from privrep.typing import Array, Singles

PAGE = "centre"


@dataclass(frozen=True, eq=False)
class CentreStep:
    """Users send the mean of their images' features, each of length one."""

    layout: Layout
    rows_per_user: int

    @property
    def spec(self) -> StepSpec:
        held = self.layout.image_numbers
        return StepSpec(layout="padded", rows_per_user=self.rows_per_user, floats_per_user=held)

    def __call__(self, batch: UserBatch) -> dict[str, Contributions]:
        rows = batch.X[..., : self.layout.image_numbers].astype(np.float64)
        lengths = np.sqrt((rows * rows).sum(axis=2, keepdims=True))
        there = (self.layout.targets(batch.y) >= 0)[..., None]
        rows *= np.where(there & (lengths > 0), 1 / np.where(lengths > 0, lengths, 1), 0)
        return {"sum": Vectors(rows.sum(axis=1) / np.maximum(there.sum(axis=1), 1))}


def centre(run: Run, layout: Layout, rows_per_user: int, mu_squared: float) -> Singles:
    """The mean of all users' features of length one, released for this much of the budget."""
    query = Query(Bound(1.0, layout.image_numbers), mu_squared)
    released = run.release(PAGE, CentreStep(layout, rows_per_user), {"sum": query})["sum"]
    return mean_of(released.value, run.users.facts.users)


def mean_of(total: Array, users: int) -> Singles:
    return (total / users).astype(np.float32)


class Centred(nn.Module):
    """Rows of features, of length one, less a public mean, of length one again."""

    mean: Tensor

    def __init__(self, mean: Singles) -> None:
        super().__init__()
        self.register_buffer("mean", torch.tensor(mean))

    def forward(self, rows: Tensor) -> Tensor:
        return unit(unit(rows) - self.mean)


class TextSpace(nn.Linear):
    """The directions in which the public texts of a bank differ most: their features less their mean, `dim` principal
    components of them, equally long on average over the bank. Public, and frozen."""

    def __init__(self, bank: NDArray[Any], dim: int) -> None:
        texts = np.asarray(bank, np.float64)
        mean = texts.mean(axis=0)
        _, lengths, components = np.linalg.svd(texts - mean, full_matrices=False)
        kept = min(dim, int((lengths > 1e-6 * lengths[0]).sum()))
        directions = components[:kept] / lengths[:kept, None] * np.sqrt(len(texts))
        super().__init__(texts.shape[1], kept)
        with torch.no_grad():
            self.weight.copy_(torch.from_numpy(directions))
            self.bias.copy_(torch.from_numpy(-directions @ mean))
        self.requires_grad_(False)
