"""What CENTAUR is compared with, over the same rounds, ledger and local steps: its paper's baselines.

`fedavg`, `ppsgd`, `pmtl` and `centaur` (the paper's own method, heads kept) are private: everything of one user that
reaches another goes through `Run.release`, clipped and charged, under replace-one-user. `alone` shares nothing.
`fedrep` is NOT PRIVATE: it reads exact sums, which nothing that claims privacy may do.

Some users keep something of their own between rounds (`UserState`): heads, or a whole model. It is never released: it
is a function of the user's own rows and of the public weights of all rounds so far, and what the user sends next
follows from the two. A run that is continued computes it again from the pages that stand. Users of a secret sample
would have to remember in which rounds they were, so that these methods ask everyone.

What everyone ends with, `Personal`, is each user's own and stays with it; `Personal.accuracy` is for experiments.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from privrep.data.table import UserTable
from privrep.errors import InputError
from privrep.heads.gradient import (
    HeadFit,
    HeadRule,
    cross_entropy,
    head_scores,
    is_linear,
    labels_of,
    one_thread,
    own_copy,
    rows_of,
    scores_gradient,
)
from privrep.neural.gradient_step import GradientStep
from privrep.neural.local_sgd import LocalSgdStep, batches, is_stack, stack_sgd
from privrep.neural.rounds import TrainedWeights, TrainingSettings, local_step, train
from privrep.nn.flat_module import FlatModule, Split
from privrep.privacy.bounds import Bound, Contributions
from privrep.privacy.contributions import Vectors
from privrep.privacy.protocol import StepSpec, UserBatch, Users
from privrep.privacy.run import Run
from privrep.typing import Singles
from privrep.users.batching import batch_size, finite_batch, padded_batches, positions_of
from privrep.users.summing import default_workers, map_blocks

UNBOUNDED = 1e100  # a clipping norm that no data reaches
NOTHING = np.zeros(0, dtype=np.float32)
NO_HEADS = HeadFit(steps=0)

Advance = Callable[[Tensor, Singles, UserBatch], tuple[Tensor, Contributions]]
"""One round of several users: (their own (users, size), public weights, their rows) -> (their own, the update)."""


@dataclass(eq=False)
class UserState:
    """What users keep of their own between rounds, by their positions in the population; see the module's text."""

    advance: Advance
    own: Tensor  # (users, size)
    spec: StepSpec  # of what users do in a round
    met: NDArray[np.int64] = field(init=False)  # rounds that went into each one's own
    rounds: int = 0
    past: dict[int, Singles] = field(default_factory=dict)  # public weights of rounds that somebody has not met

    def __post_init__(self) -> None:
        self.met = np.zeros(len(self.own), dtype=np.int64)

    def step(self, weights: Singles) -> _KeptStep:
        """What users do in the next round."""
        self.rounds += 1
        self.past = {t: old for t, old in self.past.items() if t > self.met.min()} | {self.rounds: weights}
        return _KeptStep(self, self.rounds)


@dataclass(frozen=True, eq=False)
class _KeptStep:
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
        some = slice(self.asked[0], self.asked[0] + len(Z))
        self.asked[0] += len(Z)
        self.heads[some] = self.rule.fit(self.heads[some], Z, labels, head)
        return self.heads[some]


def kept_heads(split: Split, start: Singles, settings: TrainingSettings, users: int, rows_per_user: int) -> UserState:
    """Users who fit their heads further in every round, and then take their local steps on the shared weights."""
    _check_everyone(settings)
    plain = local_step(split, split.representation.weights(), start, settings, rows_per_user)

    def advance(own: Tensor, weights: Singles, batch: UserBatch) -> tuple[Tensor, Contributions]:
        heads = _OwnFit(settings.head_fit, own.clone())
        step: GradientStep | LocalSgdStep = replace(plain, weights=weights, head_fit=heads)
        update = step(batch)["update"]
        return heads.heads, update

    own = torch.tensor(start).expand(users, len(start)).clone()
    return UserState(advance, own, plain.spec)


def centaur(
    run: Run, split: Split, settings: TrainingSettings, mu_squared: float, rows_per_user: int
) -> tuple[TrainedWeights, UserState]:
    """CENTAUR as in its paper (Algorithms 1 and 2): shared representation, heads that users keep and fit further.

    Formal guarantee: the weights are a function of releases charged to `run.ledger`; see `rounds.train`.
    """
    kept = kept_heads(split, split.head.weights(), settings, run.users.facts.users, rows_per_user)
    return train(run, split.representation.weights(), kept.step, settings, mu_squared, "centaur"), kept


def fedrep(users: Users, split: Split, settings: TrainingSettings, rows_per_user: int) -> tuple[Singles, UserState]:
    """FedRep (Collins et al. 2021): the same rounds with exact sums, nothing clipped and no noise. NOT PRIVATE."""
    kept = kept_heads(split, split.head.weights(), settings, users.facts.users, rows_per_user)
    weights = split.representation.weights().astype(np.float64)
    bounds = {"update": Bound(UNBOUNDED, len(weights))}
    for _ in range(settings.rounds):
        total = users.sums(kept.step(weights.astype(np.float32)), bounds)["update"].total
        weights = weights + settings.server_rate * total / users.facts.users
    return weights.astype(np.float32), kept


def whole(split: Split) -> Split:
    """The network with all its weights shared, those of the head last, and no head of one's own."""
    parts = (split.representation.module, split.head.module)
    network = nn.Sequential(*(part for part in parts if type(part) is not nn.Identity))
    return Split(FlatModule(network), FlatModule(nn.Identity()), split.features, split.classes, split.classes)


def fedavg(run: Run, split: Split, settings: TrainingSettings, mu_squared: float, rows_per_user: int) -> TrainedWeights:
    """DP-FedAvg (McMahan et al. 2018): all weights are shared and trained; users fine-tune heads afterwards.

    Formal guarantee: the weights are a function of releases charged to `run.ledger`; see `rounds.train`.
    """
    network, settings = whole(split), replace(settings, head_fit=NO_HEADS)
    start = network.representation.weights()
    first = local_step(network, start, NOTHING, settings, rows_per_user)
    return train(run, start, lambda weights: replace(first, weights=weights), settings, mu_squared, "fedavg")


class _Both(nn.Module):
    """Scores of a shared head, and beside them the representation they were made of."""

    def __init__(self, representation: nn.Module, head: nn.Module) -> None:
        super().__init__()
        self.representation, self.head = representation, head

    def forward(self, rows: Tensor) -> Tensor:
        Z = self.representation(rows)
        return torch.cat([self.head(Z), Z], dim=-1)


class _Added(nn.Module):
    """What a user adds to shared scores, a linear function of the representation beside them."""

    def __init__(self, rank: int, classes: int, bias: bool) -> None:
        super().__init__()
        self.own, self.classes = nn.Linear(rank, classes, bias=bias), classes

    def forward(self, both: Tensor) -> Tensor:
        result: Tensor = both[..., : self.classes] + self.own(both[..., self.classes :])
        return result


def ppsgd(
    run: Run,
    split: Split,
    settings: TrainingSettings,
    mu_squared: float,
    rows_per_user: int,
    eta: float = 0.1,
    alpha: float = 0.1,
) -> tuple[TrainedWeights, UserState]:
    """PPSGD (Bietti et al. 2022): representation and a head are shared, and everyone adds a head of their own to it.

    In a round a user takes one step of `eta` on its own part, and then its local steps of `alpha * eta` on what is
    shared. The own parts, zero at first, are what `UserState.own` holds.

    Formal guarantee: the weights are a function of releases charged to `run.ledger`; see `rounds.train`.
    """
    if not is_linear(split.head):
        raise InputError("PPSGD adds a user's head to the shared one, so the head must be one nn.Linear.")
    rank, classes = split.rank, split.classes
    shared = FlatModule(_Both(split.representation.module, split.head.module))
    added = Split(shared, FlatModule(_Added(rank, classes, "bias" in split.head.shapes)), split.features, 0, classes)
    settings = replace(settings, step_size=alpha * eta, head_fit=HeadFit(steps=1, rate=eta))
    kept = kept_heads(added, np.zeros(split.head.size, np.float32), settings, run.users.facts.users, rows_per_user)
    return train(run, shared.weights(), kept.step, settings, mu_squared, "ppsgd"), kept


def pmtl(
    run: Run, split: Split, settings: TrainingSettings, mu_squared: float, rows_per_user: int, pull: float = 1.0
) -> tuple[TrainedWeights, UserState]:
    """PMTL (Hu et al. 2021): everyone keeps a whole network of their own, pulled towards the noisy mean of all.

    A user's loss is its mean cross-entropy plus pull/2 |own - mean|^2; it sends how far its network moved in the round,
    and the mean moves by the noisy average of that. `UserState.own` holds the networks, heads last.

    Formal guarantee: the mean is a function of releases charged to `run.ledger`; see `rounds.train`.
    """
    _check_everyone(settings)
    network = whole(split).representation
    start = network.weights()

    def advance(own: Tensor, weights: Singles, batch: UserBatch) -> tuple[Tensor, Contributions]:
        rows, labels = rows_of(batch.X), labels_of(batch.y, split.classes)
        moved = own.clone()
        for some in batches(rows_per_user, settings.batch, settings.epochs):
            moved = _pulled_step(network, moved, torch.tensor(weights), rows[:, some], labels[:, some], settings, pull)
        return moved, Vectors((moved - own).numpy())

    spec = StepSpec(layout="padded", rows_per_user=rows_per_user, floats_per_user=network.size)
    kept = UserState(advance, torch.tensor(start).expand(run.users.facts.users, len(start)).clone(), spec)
    return train(run, start, kept.step, settings, mu_squared, "pmtl"), kept


def _pulled_step(
    network: FlatModule,
    own: Tensor,
    mean: Tensor,
    rows: Tensor,
    labels: Tensor,
    settings: TrainingSettings,
    pull: float,
) -> Tensor:
    present = (labels >= 0).any(dim=1, keepdim=True)
    towards = torch.where(present, (own - mean).mul_(settings.step_size * pull), 0.0)
    return descended(network, own, rows, labels, settings.step_size, None, 1).sub_(towards)


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


def _check_everyone(settings: TrainingSettings) -> None:
    if settings.rate != 1:
        raise InputError("users who keep something of their own are all asked in every round. Use a rate of 1.")


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
        for positions, (right, rows) in _of_all(self._right, table, self.split, self.representation.shape[-1]):
            found[positions] = np.divide(right, rows, out=np.full(len(rows), np.nan), where=rows > 0)
        return found

    def _right(self, batch: UserBatch) -> tuple[NDArray[Any], NDArray[Any]]:
        labels, theirs = labels_of(batch.y, self.split.classes), torch.from_numpy(positions_of(batch))
        shared = len(self.representation) == 1
        weights = self.representation[0] if shared else self.representation[theirs]
        scores = head_scores(self.heads[theirs], represented(self.split, weights, batch.X), self.split.head)
        right = (scores.argmax(dim=-1) == labels) & (labels >= 0)
        return right.sum(dim=1).numpy(), (labels >= 0).sum(dim=1).numpy()


def represented(split: Split, weights: Tensor, X: NDArray[Any]) -> Tensor:
    """(users, rows, rank): representations by the same weights (size,) or by each one's own (users, size)."""
    part, rows = own_copy(split.representation), rows_of(X)
    with torch.no_grad():
        if weights.ndim == 1:
            return part(weights, rows.flatten(0, 1)).reshape(*rows.shape[:2], -1)
        return torch.stack([part(mine, some) for mine, some in zip(weights, rows, strict=True)])


def fine_tuned(
    split: Split, representation: Tensor, start: Tensor, fit: HeadRule, table: UserTable, rows_per_user: int
) -> Personal:
    """Users fit their heads on their own rows, from `start` (size,) or (users, size), the representation fixed."""
    heads = torch.empty(table.n_users, split.head.size)

    def fitted(batch: UserBatch) -> Tensor:
        theirs = torch.from_numpy(positions_of(batch))
        weights = representation[0] if len(representation) == 1 else representation[theirs]
        Z, labels = represented(split, weights, batch.X), labels_of(batch.y, split.classes)
        return fit.fit(start if start.ndim == 1 else start[theirs], Z, labels, split.head)

    for positions, found in _of_all(fitted, table, split, representation.shape[-1], rows_per_user):
        heads[torch.from_numpy(positions)] = found
    return Personal(split, representation, heads)


def ended(
    split: Split, weights: Singles, own: Tensor | None, fit: HeadRule, table: UserTable, rows_per_user: int
) -> Personal:
    """What users have after the last round of `centaur` or `fedrep` (own: their heads) or, with all weights in
    `weights`, of `fedavg` (own: None): heads fitted once more, to the last representation."""
    size = split.representation.size
    representation, head = torch.tensor(weights)[None, :size], torch.tensor(weights)[size:]
    return fine_tuned(split, representation, head if own is None else own, fit, table, rows_per_user)


def ended_ppsgd(split: Split, weights: Singles, own: Tensor) -> Personal:
    """What users have after the last round of `ppsgd`: the shared head plus their own."""
    size = split.representation.size
    flat = torch.tensor(weights)
    return Personal(split, flat[None, :size], flat[size:] + own)


def ended_pmtl(split: Split, own: Tensor, fit: HeadRule, table: UserTable, rows_per_user: int) -> Personal:
    """What users have after the last round of `pmtl`: networks of their own, with heads fitted once more."""
    size = split.representation.size
    return fine_tuned(split, own[:, :size], own[:, size:], fit, table, rows_per_user)


def alone(split: Split, table: UserTable, rows_per_user: int, rate: float, batch: int | None, epochs: int) -> Personal:
    """Everyone trains the same network on their own rows: nothing is shared, nothing is spent."""
    network = whole(split).representation
    start, own = torch.tensor(network.weights()), torch.empty(table.n_users, network.size)

    def trained(users: UserBatch) -> Tensor:
        return descended(network, start, rows_of(users.X), labels_of(users.y, split.classes), rate, batch, epochs)

    for positions, found in _of_all(trained, table, split, network.size, rows_per_user):
        own[torch.from_numpy(positions)] = found
    return Personal(split, own[:, : split.representation.size], own[:, split.representation.size :])


def _of_all(
    function: Callable[[UserBatch], Any], table: UserTable, split: Split, floats: int, rows_per_user: int | None = None
) -> Iterator[tuple[NDArray[np.int64], Any]]:
    """The function of all users of a table, some at a time: their positions, and what it said, where they are."""
    rows_per_user = max(int(table.sizes.max(initial=1)), 1) if rows_per_user is None else rows_per_user
    size = max(batch_size(rows_per_user, split.features, floats) // 4, 1)

    def with_positions(batch: UserBatch) -> tuple[NDArray[np.int64], Any]:
        with one_thread(), torch.no_grad():
            return positions_of(batch), function(finite_batch(batch))

    yield from map_blocks(with_positions, padded_batches(table.blocks(), rows_per_user, size), default_workers())
