"""Layers that the default makes: one linear layer on public features, released directions of them, and their heads.

Every weight at the start is public: a function of sizes and of what was released.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor, nn

from privrep.neural.models import initialise
from privrep.nn.flat_module import Split, split
from privrep.typing import Array


@dataclass(frozen=True)
class Shape:
    """Sizes of a problem, all public: rows are `raw` numbers for a representation, then the public features."""

    classes: int
    rows_per_user: int
    raw: int = 0
    ordered: bool = False  # whether the first public features matter most


class Centred(nn.Module):
    """Rows less a public centre, over a public size; both are constants."""

    def __init__(self, centre: Array, size: float) -> None:
        super().__init__()
        self.register_buffer("centre", torch.from_numpy(centre.astype(np.float32)))
        self.size = size

    def forward(self, rows: Tensor) -> Tensor:
        result: Tensor = (rows - self.get_buffer("centre")) / self.size
        return result


class Leading(nn.Module):
    """A module on the first columns of rows; the public features of the same rows follow them."""

    def __init__(self, module: nn.Module, columns: int) -> None:
        super().__init__()
        self.module, self.columns = module, columns

    def forward(self, rows: Tensor) -> Tensor:
        result: Tensor = self.module(rows[:, : self.columns])
        return result


def linear_split(centre: Array, shape: Shape, kept: int = 0) -> Split:
    """Return one linear layer on centred rows, from zero, and heads that add a number for each class.

    Args:
        centre: (features,), public.
        shape: of the problem.
        kept: where there are more features, the layer sees the first so many, or a public projection where they are in
            no order; 0 for all.
    """
    features = len(centre)
    layers: list[nn.Module] = [Centred(centre, 1.0)] if centre.any() else []
    if 0 < kept < features:
        layers.append(Leading(nn.Identity(), kept) if shape.ordered else public_projection(features, kept))
    layer = nn.Linear(kept or features, shape.classes, bias=False)
    nn.init.zeros_(layer.weight)
    head = nn.Linear(shape.classes, shape.classes)
    initialise(head, "head")  # public: a run that is continued asks the same
    return split(nn.Sequential(*layers, layer), head, features)


def public_projection(features: int, kept: int) -> nn.Linear:
    """Frozen, drawn from its sizes: rows keep their lengths on average."""
    layer = nn.Linear(features, kept, bias=False)
    initialise(layer, "projection")
    with torch.no_grad():
        layer.weight.mul_(math.sqrt(features / (2 * kept)))
    return layer.requires_grad_(False)


def directions_split(centre: Array, basis: Array, shape: Shape) -> Split:
    """Return a linear layer of released directions on centred rows, and a linear head.

    Args:
        centre: (features,), public.
        basis: the directions, (features, rank).
        shape: of the problem.
    """
    layer = nn.Linear(basis.shape[0], basis.shape[1], bias=False)
    with torch.no_grad():
        layer.weight.copy_(torch.from_numpy(basis.T.astype(np.float32)))
    representation = nn.Sequential(Centred(centre, 1.0), layer)
    return split(representation, nn.Linear(basis.shape[1], shape.classes), len(centre))
