"""The state that users of a network keep between rounds and in the end: heads, or a whole model.

It is never released. It is a function of the user's own rows and of the public weights of all rounds so far. What the
user sends next follows from the two. A run that is continued computes it again from the pages that stand. Users of a
secret sample would have to remember in which rounds they were, so methods with such users ask everyone.

`Personal` is what users end with. `Personal.accuracy` is for experiments: one number per user, NOT PRIVATE.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from privrep.data.table import UserTable
from privrep.errors import InputError
from privrep.heads.gradient import HeadRule, cross_entropy, head_scores, labels_of, scores_gradient
from privrep.neural.gradient_step import GradientStep
from privrep.neural.local_sgd import LocalSgdStep, cut_batches, is_stack, stack_sgd
from privrep.neural.rounds import TrainingSettings, local_step
from privrep.nn.flat_module import FlatModule, Split
from privrep.nn.threads import one_thread, own_copy, rows_of
from privrep.privacy.bounds import Contributions
from privrep.privacy.protocol import StepSpec, UserBatch, positions_of
from privrep.typing import Singles
from privrep.users.batching import choose_batch_size, clear_non_finite, pad_batches
from privrep.users.performance import Performance
from privrep.users.summing import map_blocks

Advance = Callable[[Tensor, Singles, UserBatch], tuple[Tensor, Contributions]]
"""A round of several users: (their own (users, size), public weights, their rows) -> (their own, the update)."""


@dataclass(eq=False)
class UserState:
    """The state of users between rounds, by their positions in the population; see the module's text."""

    advance: Advance
    own: Tensor  # (users, size)
    spec: StepSpec  # the layout of what users do in a round
    met: NDArray[np.int64] = field(init=False)  # rounds that went into each one's own
    rounds: int = 0
    past: dict[int, Singles] = field(default_factory=dict)  # public weights of rounds that somebody has not met

    def __post_init__(self) -> None:
        self.met = np.zeros(len(self.own), dtype=np.int64)

    def step(self, weights: Singles) -> _KeptStep:
        """Return what users do in the next round, from its public weights, (size,)."""
        self.rounds += 1
        self.past = {t: old for t, old in self.past.items() if t > self.met.min()} | {self.rounds: weights}
        return _KeptStep(self, self.rounds)


@dataclass(frozen=True, eq=False)
class _KeptStep:
    """The step of one round, which moves users' state and sends their updates."""

    kept: UserState
    round: int

    @property
    def spec(self) -> StepSpec:
        return self.kept.spec

    def __call__(self, batch: UserBatch) -> dict[str, Contributions]:
        positions = positions_of(batch)
        kept = self.kept
        before = int(kept.met[positions[0]])
        if (kept.met[positions] != before).any() or before >= self.round:
            raise InputError("users who keep something of their own are all asked once in every round. Start again.")
        own = kept.own[torch.from_numpy(positions)]
        with one_thread():
            for t in range(before + 1, self.round + 1):  # more than one where a run is continued
                own, update = kept.advance(own, kept.past[t], batch)
        kept.own[torch.from_numpy(positions)], kept.met[positions] = own, self.round
        return {"update": update}


@dataclass(frozen=True, eq=False)
class _OwnFit:
    """Heads from where each user left off. A step that takes the users of a call in portions asks in their order."""

    rule: HeadRule
    heads: Tensor  # (users of the call, size), moved by every fit
    asked: list[int] = field(default_factory=lambda: [0])

    def fit(self, start: Tensor, Z: Tensor, labels: Tensor, head: FlatModule) -> Tensor:
        """Return heads of the next users of the call, fitted further.

        Args:
            start: is not used: heads begin where they were left.
            Z: representations, (users, rows, rank).
            labels: (users, rows), -1 for rows that are absent.
            head: the module of heads.
        """
        some = slice(self.asked[0], self.asked[0] + len(Z))
        self.asked[0] += len(Z)
        self.heads[some] = self.rule.fit(self.heads[some], Z, labels, head)
        return self.heads[some]


def keep_heads(split: Split, start: Singles, settings: TrainingSettings, users: int, rows_per_user: int) -> UserState:
    """Return the state of users who keep heads: they fit them further in every round, then take local steps.

    Args:
        split: the network, as a representation and a head.
        start: the head that all users begin with, (head size,).
        settings: rounds, steps and heads; everyone is asked in every round.
        users: how many there are.
        rows_per_user: rows of a user that a round looks at.
    """
    check_everyone(settings)
    plain = local_step(split, split.representation.weights(), start, settings, rows_per_user)

    def advance(own: Tensor, weights: Singles, batch: UserBatch) -> tuple[Tensor, Contributions]:
        """Return users' heads after a round, and their updates; see `Advance`."""
        heads = _OwnFit(settings.head_fit, own.clone())
        step: GradientStep | LocalSgdStep = replace(plain, weights=weights, head_fit=heads)
        update = step(batch)["update"]
        return heads.heads, update

    own = torch.tensor(start).expand(users, len(start)).clone()
    return UserState(advance, own, plain.spec)


def check_everyone(settings: TrainingSettings) -> None:
    """Raise InputError if settings sample users: all are asked in every round if they keep something of their own."""
    if settings.rate != 1:
        raise InputError("users who keep something of their own are all asked in every round. Use a rate of 1.")


@dataclass(frozen=True, eq=False)
class Personal:
    """The models that users end with: a representation, (1, size) for all or (users, size), and a head each."""

    split: Split
    representation: Tensor
    heads: Tensor  # (users, size)

    def accuracy(self, table: UserTable) -> NDArray[np.float64]:
        """Return the share of each user's rows in a table that are predicted right, (users,); nan where it has none.

        NOT PRIVATE, for experiments: one number per user.
        """
        if table.n_users != len(self.heads):
            raise InputError(f"there are {len(self.heads):,} users with heads. Got {table.n_users:,} in the table.")
        found = np.empty(table.n_users)
        for positions, (right, rows) in map_users(self._count_right, table, self.split, self.representation.shape[-1]):
            found[positions] = np.divide(right, rows, out=np.full(len(rows), np.nan), where=rows > 0)
        return found

    def _count_right(self, batch: UserBatch) -> tuple[NDArray[Any], NDArray[Any]]:
        """Return how many rows of each user are predicted right, and how many it has, both (users,)."""
        labels, theirs = labels_of(batch.y, self.split.classes), torch.from_numpy(positions_of(batch))
        shared = len(self.representation) == 1
        weights = self.representation[0] if shared else self.representation[theirs]
        scores = head_scores(self.heads[theirs], represent(self.split, weights, batch.X), self.split.head)
        right = (scores.argmax(dim=-1) == labels) & (labels >= 0)
        return right.sum(dim=1).numpy(), (labels >= 0).sum(dim=1).numpy()


def represent(split: Split, weights: Tensor, X: NDArray[Any]) -> Tensor:
    """Return representations of users' rows, (users, rows, rank).

    Args:
        split: the network, as a representation and a head.
        weights: one for all users, (size,), or one each, (users, size).
        X: rows, (users, rows, features).
    """
    part, rows = own_copy(split.representation), rows_of(X)
    with torch.no_grad():
        if weights.ndim == 1:
            return part(weights, rows.flatten(0, 1)).reshape(*rows.shape[:2], -1)
        return torch.stack([part(mine, some) for mine, some in zip(weights, rows, strict=True)])


def fine_tune(
    split: Split, representation: Tensor, start: Tensor, fit: HeadRule, table: UserTable, rows_per_user: int
) -> Personal:
    """Return what users have once they fitted their heads on their own rows, the representation fixed.

    Args:
        split: the network, as a representation and a head.
        representation: weights, one for all (1, size) or one each (users, size).
        start: heads to begin with, (head size,) or (users, head size).
        fit: how heads are fitted.
        table: the users' rows.
        rows_per_user: rows of a user that a fit looks at.
    """
    heads = torch.empty(table.n_users, split.head.size)

    def fit_batch(batch: UserBatch) -> Tensor:
        """Return the heads of a batch of users, (users, head size)."""
        theirs = torch.from_numpy(positions_of(batch))
        weights = representation[0] if len(representation) == 1 else representation[theirs]
        Z, labels = represent(split, weights, batch.X), labels_of(batch.y, split.classes)
        return fit.fit(start if start.ndim == 1 else start[theirs], Z, labels, split.head)

    for positions, found in map_users(fit_batch, table, split, representation.shape[-1], rows_per_user):
        heads[torch.from_numpy(positions)] = found
    return Personal(split, representation, heads)


def fit_last_heads(
    split: Split, weights: Singles, own: Tensor | None, fit: HeadRule, table: UserTable, rows_per_user: int
) -> Personal:
    """Return what users have after the last round: heads fitted once more, to the last representation.

    Args:
        split: the network, as a representation and a head.
        weights: shared weights, (size,): of the representation, and of the head after them where `own` is None.
        own: heads that users kept, (users, head size); None where the head was shared, too.
        fit: how heads are fitted.
        table: the users' rows.
        rows_per_user: rows of a user that a fit looks at.
    """
    size = split.representation.size
    representation, head = torch.tensor(weights)[None, :size], torch.tensor(weights)[size:]
    return fine_tune(split, representation, head if own is None else own, fit, table, rows_per_user)


def map_users(
    function: Callable[[UserBatch], Any], table: UserTable, split: Split, floats: int, rows_per_user: int | None = None
) -> Iterator[tuple[NDArray[np.int64], Any]]:
    """Yield what a function makes of all users of a table, some at a time, with their positions.

    Args:
        function: takes a batch of users.
        table: the users' rows.
        split: the network, for the size of its rows.
        floats: numbers that a user takes beside its rows; it decides how many users go together.
        rows_per_user: rows of a user that are looked at; None: all.
    """
    rows_per_user = max(int(table.sizes.max(initial=1)), 1) if rows_per_user is None else rows_per_user
    size = max(choose_batch_size(rows_per_user, split.features, floats) // 4, 1)

    def with_positions(batch: UserBatch) -> tuple[NDArray[np.int64], Any]:
        with one_thread(), torch.no_grad():
            return positions_of(batch), function(clear_non_finite(batch))

    yield from map_blocks(with_positions, pad_batches(table.blocks(), rows_per_user, size), Performance())


def descend(
    network: FlatModule, start: Tensor, rows: Tensor, labels: Tensor, rate: float, batch: int | None, epochs: int
) -> Tensor:
    """Return where each user's descent ends, (users, size), on the mean cross-entropy of a network all its own.

    Args:
        network: takes rows, gives scores.
        start: weights to begin with, (size,) or (users, size).
        rows: (users, rows, features).
        labels: (users, rows), -1 for rows that are absent.
        rate: the length of a step, in units of the gradient.
        batch: rows of a batch; None for all of them.
        epochs: how often a descent goes through the rows.
    """
    if is_stack(network):
        return stack_sgd(
            network, lambda scores, classes, _: scores_gradient(scores, classes), start, rows, labels,
            torch.zeros(len(rows), 0), rate=rate, batch=batch, epochs=epochs,
        )  # fmt: skip
    each = zip(start.expand(len(rows), network.size), rows, labels, strict=True)
    part = own_copy(network)
    return torch.stack([_descend_alone(part, mine.clone(), X, y, rate, batch, epochs) for mine, X, y in each])


def _descend_alone(
    network: FlatModule, weights: Tensor, rows: Tensor, labels: Tensor, rate: float, batch: int | None, epochs: int
) -> Tensor:
    """Return where one user's descent ends, (size,).

    Of convolutions with weights that differ from user to user, one at a time is the fastest way. Arguments are one
    user's of `descend`.
    """
    for some in cut_batches(len(rows), batch, epochs):
        if (labels[some] >= 0).any():
            with torch.enable_grad():
                weights.requires_grad_()
                (slope,) = torch.autograd.grad(cross_entropy(network(weights, rows[some]), labels[some]), weights)
            weights = weights.detach().sub_(slope, alpha=rate)
    return weights.detach()
