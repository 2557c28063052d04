"""What users of a network end with, and what each computes of its own rows alone: it stays with the user.

Nothing here is released. `Personal.accuracy` is for experiments: one number per user, NOT PRIVATE.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from privrep.data.table import UserTable
from privrep.errors import InputError
from privrep.heads.gradient import (
    HeadRule,
    cross_entropy,
    head_scores,
    labels_of,
    one_thread,
    own_copy,
    rows_of,
    scores_gradient,
)
from privrep.neural.local_sgd import batches, is_stack, stack_sgd
from privrep.nn.flat_module import FlatModule, Split
from privrep.typing import Singles
from privrep.users.batching import Call, calls, seats_of
from privrep.users.summing import default_workers, map_blocks


@dataclass(frozen=True, eq=False)
class Personal:
    """What everyone ends with: a representation, one for all (1, size) or one each (users, size), and a head each."""

    split: Split
    representation: Tensor
    heads: Tensor  # (users, size)

    def accuracy(self, table: UserTable) -> NDArray[np.float64]:
        """Of each user, the part of its rows in this table that are predicted right; nan where it has none.

        NOT PRIVATE, for experiments: one number per user.
        """
        if table.n_users != len(self.heads):
            raise InputError(f"there are {len(self.heads):,} users with heads. Got {table.n_users:,} in the table.")
        found = np.empty(table.n_users)
        for places, (right, rows) in of_all(self._right, table, self.split, self.representation.shape[-1]):
            found[places] = np.divide(right, rows, out=np.full(len(rows), np.nan), where=rows > 0)
        return found

    def _right(self, call: Call) -> tuple[NDArray[Any], NDArray[Any]]:
        labels, theirs = labels_of(call.y, self.split.classes), torch.from_numpy(call.places)
        shared = len(self.representation) == 1
        weights = self.representation[0] if shared else self.representation[theirs]
        scores = head_scores(self.heads[theirs], represented(self.split, weights, call.X), self.split.head)
        right = (scores.argmax(dim=-1) == labels) & (labels >= 0)
        return right.sum(dim=1).numpy(), (labels >= 0).sum(dim=1).numpy()


def represented(split: Split, weights: Tensor, X: NDArray[Any]) -> Tensor:
    """(users, slots, rank): representations by the same weights (size,) or by each one's own (users, size)."""
    part, rows = own_copy(split.representation), rows_of(X)
    with torch.no_grad():
        if weights.ndim == 1:
            return part(weights, rows.flatten(0, 1)).reshape(*rows.shape[:2], -1)
        return torch.stack([part(mine, some) for mine, some in zip(weights, rows, strict=True)])


def fine_tuned(
    split: Split, representation: Tensor, start: Tensor, fit: HeadRule, table: UserTable, slots: int
) -> Personal:
    """Users fit their heads on their own rows, from `start` (size,) or (users, size), the representation fixed."""
    heads = torch.empty(table.n_users, split.head.size)

    def fitted(call: Call) -> Tensor:
        theirs = torch.from_numpy(call.places)
        weights = representation[0] if len(representation) == 1 else representation[theirs]
        Z, labels = represented(split, weights, call.X), labels_of(call.y, split.classes)
        return fit.fit(start if start.ndim == 1 else start[theirs], Z, labels, split.head)

    for places, found in of_all(fitted, table, split, representation.shape[-1], slots):
        heads[torch.from_numpy(places)] = found
    return Personal(split, representation, heads)


def ended(split: Split, weights: Singles, own: Tensor | None, fit: HeadRule, table: UserTable, slots: int) -> Personal:
    """Return what users have after the last round: heads fitted once more, to the last representation.

    Args:
        split: The network, as a representation and a head.
        weights: Shared weights, (size,): of the representation, and of the head after them where `own` is None.
        own: Heads that users kept, (users, head size); None where the head was shared, too.
        fit: How heads are fitted.
        table: The users' rows.
        slots: Rows of a user that a fit looks at.
    """
    size = split.representation.size
    representation, head = torch.tensor(weights)[None, :size], torch.tensor(weights)[size:]
    return fine_tuned(split, representation, head if own is None else own, fit, table, slots)


def of_all(
    function: Callable[[Call], Any], table: UserTable, split: Split, vector_size: int, slots: int | None = None
) -> Iterator[tuple[NDArray[np.int64], Any]]:
    """The function of all users of a table, some at a time: their places, and what it said. On their own machines."""
    slots = max(int(table.sizes.max(initial=1)), 1) if slots is None else slots
    seats = max(seats_of(slots, split.features, vector_size) // 4, 1)

    def with_places(call: Call) -> tuple[NDArray[np.int64], Any]:
        with one_thread(), torch.no_grad():
            return call.places, function(call.finite())

    yield from map_blocks(with_places, calls(table.blocks(), slots, seats), default_workers())


def descended(
    network: FlatModule, start: Tensor, rows: Tensor, labels: Tensor, rate: float, batch: int | None, epochs: int
) -> Tensor:
    """(users, size): each user's descent on the mean cross-entropy of a network that is all its own."""
    if is_stack(network):
        return stack_sgd(
            network, lambda scores, classes, _: scores_gradient(scores, classes), start, rows, labels,
            torch.zeros(len(rows), 0), rate=rate, batch=batch, epochs=epochs,
        )  # fmt: skip
    each = zip(start.expand(len(rows), network.size), rows, labels, strict=True)
    part = own_copy(network)
    return torch.stack([_descended_alone(part, mine.clone(), X, y, rate, batch, epochs) for mine, X, y in each])


def _descended_alone(
    network: FlatModule, weights: Tensor, rows: Tensor, labels: Tensor, rate: float, batch: int | None, epochs: int
) -> Tensor:
    """One user's. Of convolutions with weights that differ from user to user, one at a time is the fastest way."""
    for some in batches(len(rows), batch, epochs):
        if (labels[some] >= 0).any():
            with torch.enable_grad():
                weights.requires_grad_()
                (slope,) = torch.autograd.grad(cross_entropy(network(weights, rows[some]), labels[some]), weights)
            weights = weights.detach().sub_(slope, alpha=rate)
    return weights.detach()
