"""Heads of many users at once, on representations that are computed once.

Every user has the same number of rows: labels (users, rows) hold -1 where a user has no row. A user's head is a
function of its own rows, to the last bit: every product is stacked by user, and shapes are public facts (see
`users.batching`).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar, Protocol

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn
from torch.func import grad, vmap

from privrep.errors import InputError
from privrep.nn.flat_module import FlatModule
from privrep.nn.threads import own_copy


def labels_of(y: NDArray[Any], classes: int) -> Tensor:
    """Class numbers as int64; whatever is not one of 0..classes-1 becomes -1: a row that counts for nothing."""
    known = (y >= 0) & (y < classes) & (y == np.floor(y))
    return torch.from_numpy(np.where(known, y, -1).astype(np.int64))


def row_weights(labels: Tensor) -> Tensor:
    """Return one over the number of a user's rows for each row, (..., rows), zero where there is none."""
    present = (labels >= 0).to(torch.float32)
    return present / present.sum(dim=-1, keepdim=True).clamp(min=1)


def cross_entropy(scores: Tensor, labels: Tensor) -> Tensor:
    """Return the mean over one user's rows, scores (rows, classes) and labels (rows,); zero if it has none."""
    each = torch.log_softmax(scores, dim=-1).gather(-1, labels.clamp(min=0)[..., None])[..., 0]
    return -(each * row_weights(labels)).sum(dim=-1)


def scores_gradient(scores: Tensor, labels: Tensor) -> Tensor:
    """Return the gradient of users' mean cross-entropy in scores (users, rows, classes), in their place."""
    result = torch.softmax(scores, dim=-1)
    marked = torch.zeros_like(result).scatter_(-1, labels.clamp(min=0)[..., None], 1.0)
    return result.sub_(marked).mul_(row_weights(labels)[..., None])


class HeadRule(Protocol):
    """How users make their heads in a round, given the shared part."""

    def fit(self, start: Tensor, Z: Tensor, labels: Tensor, head: FlatModule) -> Tensor:
        """Fit heads (users, size) from a public start (size,) on Z (users, rows, rank), each by its user's own rows."""
        ...


@dataclass(frozen=True)
class HeadFit:
    """Full-batch gradient descent on the mean cross-entropy plus ridge/2 |head - start|^2."""

    fills: ClassVar[type] = HeadRule  # what fields of steps that travel declare
    steps: int = 15
    rate: float = 0.01
    momentum: float = 0.0
    ridge: float = 0.0

    def __post_init__(self) -> None:
        if not (self.steps >= 0 and self.rate > 0 and 0 <= self.momentum < 1 and self.ridge >= 0):
            raise InputError(
                "heads are fitted with steps >= 0, a positive rate, a momentum in [0, 1) and a ridge >= 0. "
                f"Got {self} instead."
            )

    def fit(self, start: Tensor, Z: Tensor, labels: Tensor, head: FlatModule) -> Tensor:
        """Fit heads (users, size) from `start`, (size,) or (users, size), on Z (users, rows, rank).

        A user without rows keeps the start.
        """
        first = start.expand(len(Z), head.size)
        heads, velocity = first.clone(), torch.zeros_like(first)
        gradient = _linear_gradient if is_linear(head) else _any_gradient
        with torch.no_grad():
            for _ in range(self.steps):
                slope = gradient(heads, Z, labels, head)
                if self.ridge:
                    slope = slope.add_(heads - first, alpha=self.ridge)
                velocity = velocity.mul_(self.momentum).add_(slope)
                heads.sub_(velocity, alpha=self.rate)
        return heads


def is_linear(head: FlatModule) -> bool:
    """Return whether the head is one nn.Linear, all of it trainable: then formulas replace differentiation."""
    return type(head.module) is nn.Linear and len(head.shapes) == len(list(head.module.parameters()))


def linear_parts(heads: Tensor, head: FlatModule) -> tuple[Tensor, Tensor | None]:
    """Weights (users, classes, rank) and biases (users, 1, classes) of heads that are linear."""
    named = head.unflatten(heads)
    bias = named.get("bias")
    return named["weight"], None if bias is None else bias[:, None, :]


def head_scores(heads: Tensor, Z: Tensor, head: FlatModule) -> Tensor:
    """Return each user's rows through its own head, (users, rows, classes)."""
    if is_linear(head):
        weight, bias = linear_parts(heads, head)
        return torch.bmm(Z, weight.mT) if bias is None else torch.baddbmm(bias, Z, weight.mT)
    scores: Tensor = vmap(own_copy(head))(heads, Z)
    return scores


def _linear_gradient(heads: Tensor, Z: Tensor, labels: Tensor, head: FlatModule) -> Tensor:
    slope = scores_gradient(head_scores(heads, Z, head), labels)
    parts = [torch.bmm(slope.mT, Z).flatten(1)]
    if "bias" in head.shapes:
        parts.append(slope.sum(dim=1))
    return torch.cat(parts, dim=1)


def _any_gradient(heads: Tensor, Z: Tensor, labels: Tensor, head: FlatModule) -> Tensor:
    own = own_copy(head)

    def loss(flat: Tensor, rows: Tensor, classes: Tensor) -> Tensor:
        return cross_entropy(own(flat, rows), classes)

    slope: Tensor = vmap(grad(loss))(heads, Z, labels)
    return slope


def representation_gradient(heads: Tensor, Z: Tensor, labels: Tensor, head: FlatModule) -> Tensor:
    """Return the gradient of each user's mean cross-entropy in its representations, (users, rows, rank)."""
    if is_linear(head):
        weight, _ = linear_parts(heads, head)
        return torch.bmm(scores_gradient(head_scores(heads, Z, head), labels), weight)
    own = own_copy(head)

    def loss(rows: Tensor, flat: Tensor, classes: Tensor) -> Tensor:
        return cross_entropy(own(flat, rows), classes)

    slope: Tensor = vmap(grad(loss))(Z, heads, labels)
    return slope
