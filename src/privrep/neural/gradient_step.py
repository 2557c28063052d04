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
from privrep.nn.ghost_clipping import capture, compute_gradients, count_numbers_per_row, find_layer_name, join_groups
from privrep.nn.threads import one_thread, own_copy, rows_of
from privrep.privacy.bounds import Contributions
from privrep.privacy.contributions import Concatenated
from privrep.privacy.protocol import StepSpec, UserBatch
from privrep.typing import Weights

NUMBERS_AT_ONCE = 1 << 24  # the most that a forward pass may hold: 64 MB


@dataclass(frozen=True, eq=False)
class GradientStep:
    """The step in which users fit their heads, then send -step_size times the gradient in the shared weights.

    It is the gradient of the mean loss of a user's rows.
    """

    split: Split
    weights: Weights
    head_start: Weights
    head_fit: HeadRule
    step_size: float
    rows_per_user: int

    @cached_property
    def spec(self) -> StepSpec:
        """Return how rows are laid out, and how many floats a user takes: the weights of convolutions."""
        layers = dict(self.split.representation.module.named_modules())
        shapes = self.split.representation.shapes
        held = sum(math.prod(s) for name, s in shapes.items() if isinstance(layers[find_layer_name(name)], nn.Conv2d))
        return StepSpec(layout="padded", rows_per_user=self.rows_per_user, floats_per_user=held)

    @cached_property
    def _numbers_per_row(self) -> int:
        return count_numbers_per_row(self.split)

    def __call__(self, batch: UserBatch) -> dict[str, Contributions]:
        with one_thread():
            labels = labels_of(batch.y, self.split.classes)
            users = max(NUMBERS_AT_ONCE // (self._numbers_per_row * self.rows_per_user), 1)
            groups = [slice(start, start + users) for start in range(0, len(batch.X), users)]
            pieces = [self._compute_pieces(batch.X[group], labels[group]) for group in groups]
            return {"update": Concatenated(join_groups(self.split.representation, pieces))}

    def _compute_pieces(self, X: NDArray[Any], labels: Tensor) -> dict[str, tuple[Tensor, ...]]:
        """Return the update of each user by the parameter's name, as `compute_gradients` has it.

        Args:
            X: rows, (users, rows, features).
            labels: (users, rows), -1 for rows that are absent.
        """
        users = len(X)
        part = own_copy(self.split.representation)
        rows = rows_of(X).flatten(0, 1)
        with capture(part) as seen:
            out = part(torch.tensor(self.weights), rows)
        Z = out.detach().reshape(users, self.rows_per_user, -1)
        heads = self.head_fit.fit(torch.tensor(self.head_start), Z, labels, self.split.head)
        slope = representation_gradient(heads, Z, labels, self.split.head).mul_(-self.step_size).flatten(0, 1)
        return compute_gradients(part, seen, out, slope, users)
