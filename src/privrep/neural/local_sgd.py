"""Several local steps: every user has weights of its own for a while, a few users at a time.

`local_sgd` is the general form: stochastic gradient descent of each user from public weights on a loss of its own, for
many users at once. `LocalSgdStep` is CENTAUR's use of it: heads first, then the representation.

Batches are consecutive rows in the user's own order. A row that is absent (label -1) counts for nothing, and a batch
without rows changes nothing. Everything is stacked by user, so a user's result depends on its own rows to the last bit.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn
from torch.func import grad, vmap

from privrep.heads.gradient import HeadRule, cross_entropy, labels_of, representation_gradient
from privrep.neural.gradient_step import NUMBERS_AT_ONCE
from privrep.nn.flat_module import FlatModule, Split
from privrep.nn.ghost_clipping import count_numbers_per_row
from privrep.nn.threads import one_thread, own_copy, rows_of
from privrep.privacy.bounds import Contributions
from privrep.privacy.contributions import Vectors
from privrep.privacy.protocol import StepSpec, UserBatch
from privrep.typing import Weights

NUMBERS_IN_CACHE = 1 << 20  # weights of as many users at a time as have this many: 4 MB

Loss = Callable[[Tensor, Tensor, Tensor, Any], Tensor]
"""The loss of ONE user's batch: (weights (size,), rows (b, features), labels (b,), the user's own tensors) -> a number.

The mean over rows whose label is not negative, plus whatever belongs to a step; written for one user and mapped over
many with `torch.func.vmap`, so it may not look at values with `if`, nor draw random numbers.
"""


def local_sgd(
    loss: Loss, start: Tensor, X: Tensor, labels: Tensor, own: Any, *, rate: float, batch: int | None, epochs: int
) -> Tensor:
    """Return where each user's descent ends, (users, size).

    Args:
        loss: the loss of one user's batch; see `Loss`.
        start: where descents begin, (size,) or (users, size).
        X: rows, (users, rows, features).
        labels: (users, rows), -1 for rows that are absent.
        own: tensors (users, ...), in tuples or dicts, of which the loss gets one user's.
        rate: the length of a step, in units of the gradient.
        batch: rows of a batch; None for all of them.
        epochs: how often a descent goes through the rows.
    """
    slope = vmap(grad(loss))
    weights = start.expand(len(X), start.shape[-1]).clone()
    for rows in cut_batches(X.shape[1], batch, epochs):
        some = (labels[:, rows] >= 0).any(dim=1)
        step = slope(weights, X[:, rows], labels[:, rows], own)
        weights = torch.where(some[:, None], weights.sub(step, alpha=rate), weights)
    return weights


def cut_batches(rows_per_user: int, batch: int | None, epochs: int) -> Iterator[slice]:
    """Return slices of consecutive rows, epoch after epoch.

    Args:
        rows_per_user: rows of an epoch.
        batch: rows of a batch; None for all of them.
        epochs: how many there are.
    """
    size = rows_per_user if batch is None else batch
    for _ in range(epochs):
        for first in range(0, rows_per_user, size):
            yield slice(first, first + size)


Top = Callable[[Tensor, Tensor, Tensor], Tensor]
"""The slope of a batch of several users: the gradient of each user's mean loss in its outputs.

It takes outputs (users, b, size), labels (users, b) and what is users' own (users, ...). Absent rows have zero.
"""


def stack_sgd(
    part: FlatModule, top: Top, start: Tensor, X: Tensor, labels: Tensor, own: Tensor, *, rate: float, batch: int |
    None, epochs: int,
) -> Tensor:  # fmt: skip
    """Return what `local_sgd` would, for a module that `is_stack`, several times faster.

    It computes by formulas, in place, without a gradient per user.

    Args:
        part: the module.
        top: the gradient of several users' losses in the module's outputs; see `Top`.
        start: where descents begin, (size,) or (users, size).
        X: rows, (users, rows, features).
        labels: (users, rows), -1 for rows that are absent.
        own: a tensor (users, ...), of which `top` gets its users' part.
        rate: the length of a step, in units of the gradient.
        batch: rows of a batch; None for all of them.
        epochs: how often a descent goes through the rows.
    """
    weights = start.expand(len(X), part.size).clone()
    several = max(NUMBERS_IN_CACHE // part.size, 1)
    for first in range(0, len(X), several):
        some = slice(first, first + several)
        layers = _view_layers(part, weights[some])
        for rows in cut_batches(X.shape[1], batch, epochs):
            _step_layers(layers, top, X[some, rows], labels[some, rows], own[some], rate)
    return weights


def is_stack(part: FlatModule) -> bool:
    """Return whether a module is a sequence of trainable nn.Linear, each followed by nn.ReLU or nothing."""
    layers = [layer for layer in part.module.modules() if type(layer) is not nn.Sequential]
    linear = [layer for layer in layers if type(layer) is nn.Linear]
    known = all(type(layer) in (nn.Linear, nn.ReLU) for layer in layers) and type(layers[0]) is nn.Linear
    once = len(list(part.module.named_modules(remove_duplicate=False))) == len(list(part.module.named_modules()))
    return known and once and len(part.shapes) == sum(len(list(layer.parameters())) for layer in linear)


@dataclass(frozen=True, eq=False)
class _Layer:
    """Some users' weights (users, out, in) and biases (users, out), views of their flat vectors, and what follows."""

    weight: Tensor
    bias: Tensor | None
    relu: bool


def _view_layers(part: FlatModule, weights: Tensor) -> list[_Layer]:
    """Return the layers of a stack as views of some users' weights, (users, size)."""
    named = part.unflatten(weights)
    result: list[_Layer] = []
    for name, layer in part.module.named_modules():
        prefix = f"{name}." if name else ""
        if isinstance(layer, nn.Linear):
            result.append(_Layer(named[f"{prefix}weight"], named.get(f"{prefix}bias"), False))
        elif isinstance(layer, nn.ReLU):
            result[-1] = replace(result[-1], relu=True)
    return result


def _step_layers(layers: list[_Layer], top: Top, X: Tensor, labels: Tensor, own: Tensor, rate: float) -> None:
    """Take one step of some users on one batch each, in place.

    Args:
        layers: the users' weights.
        top: the gradient of the users' losses in the outputs.
        X: rows, (users, b, features).
        labels: (users, b).
        own: the users' part of what `top` takes.
        rate: the length of the step.
    """
    values = [X]
    for layer in layers:
        out = torch.bmm(values[-1], layer.weight.mT)
        out = out if layer.bias is None else out.add_(layer.bias[:, None, :])
        values.append(out.relu_() if layer.relu else out)
    slope = top(values[-1], labels, own)
    for place in reversed(range(len(layers))):
        layer = layers[place]
        if layer.relu:
            slope = slope * (values[place + 1] > 0)
        below = torch.bmm(slope, layer.weight) if place else slope
        layer.weight.baddbmm_(slope.mT, values[place], alpha=-rate)
        if layer.bias is not None:
            layer.bias.sub_(slope.sum(dim=1), alpha=rate)
        slope = below


@dataclass(frozen=True, eq=False)
class LocalSgdStep:
    """The step in which users fit their heads, take local steps on the representation, and send how far they got."""

    split: Split
    weights: Weights
    head_start: Weights
    head_fit: HeadRule
    step_size: float
    rows_per_user: int
    batch: int | None = None
    epochs: int = 1

    @property
    def spec(self) -> StepSpec:
        """Return how rows are laid out, and how many floats a user takes."""
        held = self.split.representation.size
        return StepSpec(layout="padded", rows_per_user=self.rows_per_user, floats_per_user=held)

    def __call__(self, batch: UserBatch) -> dict[str, Contributions]:
        with one_thread():
            rows, labels = rows_of(batch.X), labels_of(batch.y, self.split.classes)
            found, start = self._descend(rows, labels), torch.tensor(self.weights)
            return {"update": Vectors(found.sub_(start).numpy())}

    def _descend(self, rows: Tensor, labels: Tensor) -> Tensor:
        """Return where each user's representation gets, (users, size).

        Args:
            rows: (users, rows, features).
            labels: (users, rows), -1 for rows that are absent.
        """
        start, head = torch.tensor(self.weights), own_copy(self.split.head)
        representation = own_copy(self.split.representation)
        with torch.no_grad():
            Z = representation(start, rows.flatten(0, 1)).reshape(*rows.shape[:2], -1)
        heads = self.head_fit.fit(torch.tensor(self.head_start), Z, labels, head)

        def loss(flat: Tensor, some: Tensor, classes: Tensor, mine: Tensor) -> Tensor:
            """Return the mean cross-entropy of one user's batch under its own head."""
            return cross_entropy(head(mine, representation(flat, some)), classes)

        def top(Z: Tensor, classes: Tensor, theirs: Tensor) -> Tensor:
            """Return the gradient of users' mean losses in the representation of their rows."""
            return representation_gradient(theirs, Z, classes, head)

        rate, batch, epochs = self.step_size, self.batch, self.epochs
        if is_stack(representation):
            return stack_sgd(representation, top, start, rows, labels, heads, rate=rate, batch=batch, epochs=epochs)
        held = count_numbers_per_row(self.split) * min(batch or self.rows_per_user, self.rows_per_user)
        several = max(NUMBERS_AT_ONCE // held, 1)
        parts = []
        for first in range(0, len(rows), several):
            some = slice(first, first + several)
            parts.append(
                local_sgd(loss, start, rows[some], labels[some], heads[some], rate=rate, batch=batch, epochs=epochs)
            )
        return torch.cat(parts)
