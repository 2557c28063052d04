"""One local step on the shared weights: one forward and one backward pass for many users, and no gradient per user.

`nn.ghost_clipping` has the gradients, and says why a user's numbers are its own to the last bit.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from privrep.heads.gradient import HeadRule, labels_of, representation_gradient
from privrep.nn.flat_module import Split
from privrep.nn.ghost_clipping import captured, gradients, joined, layer_name, numbers_per_row
from privrep.nn.threads import one_thread, own_copy, rows_of
from privrep.privacy.bounds import Contributions
from privrep.privacy.contributions import Concatenated
from privrep.privacy.protocol import StepSpec, UserBatch
from privrep.typing import Weights

NUMBERS_AT_ONCE = 1 << 24  # that a forward pass may hold: 64 MB


@dataclass(frozen=True, eq=False)
class GradientStep:
    """Users fit their heads, then send -step_size times the gradient of their mean loss in the shared weights."""

    split: Split
    weights: Weights
    head_start: Weights
    head_fit: HeadRule
    step_size: float
    rows_per_user: int

    @cached_property
    def spec(self) -> StepSpec:
        """Of a user's numbers, the weights of convolutions are held as a vector."""
        layers = dict(self.split.representation.module.named_modules())
        shapes = self.split.representation.shapes
        held = sum(math.prod(s) for name, s in shapes.items() if isinstance(layers[layer_name(name)], nn.Conv2d))
        return StepSpec(layout="padded", rows_per_user=self.rows_per_user, floats_per_user=held)

    @cached_property
    def _numbers_per_row(self) -> int:
        return numbers_per_row(self.split)

    def __call__(self, batch: UserBatch) -> dict[str, Contributions]:
        with one_thread():
            labels = labels_of(batch.y, self.split.classes)
            users = max(NUMBERS_AT_ONCE // (self._numbers_per_row * self.rows_per_user), 1)
            groups = [slice(start, start + users) for start in range(0, len(batch.X), users)]
            pieces = [self._pieces(batch.X[group], labels[group]) for group in groups]
            return {"update": Concatenated(joined(self.split.representation, pieces))}

    def _pieces(self, X: NDArray[Any], labels: Tensor) -> dict[str, tuple[Tensor, ...]]:
        """By the parameter's name: (output gradients, inputs) of a linear layer's weights, or a vector per user."""
        users = len(X)
        part = own_copy(self.split.representation)
        rows = rows_of(X).flatten(0, 1)
        with captured(part) as seen:
            out = part(torch.tensor(self.weights), rows)
        Z = out.detach().reshape(users, self.rows_per_user, -1)
        heads = self.head_fit.fit(torch.tensor(self.head_start), Z, labels, self.split.head)
        slope = representation_gradient(heads, Z, labels, self.split.head).mul_(-self.step_size).flatten(0, 1)
        return gradients(part, seen, out, slope, users)
