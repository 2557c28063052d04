"""What users of a network keep of their own between rounds: heads, or a whole model.

It is never released: it is a function of the user's own rows and of the public weights of all rounds so far, and what
the user sends next follows from the two. A run that is continued computes it again from the pages that stand. Users of
a secret sample would have to remember in which rounds they were, so that methods with such users ask everyone.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field, replace

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from privrep.errors import InputError
from privrep.heads.gradient import HeadRule, one_thread
from privrep.neural.gradient_step import GradientStep
from privrep.neural.local_sgd import LocalSgdStep
from privrep.neural.rounds import TrainingSettings, local_step
from privrep.nn.flat_module import FlatModule, Split
from privrep.privacy.bounds import Contributions
from privrep.privacy.protocol import StepSpec, UserBatch
from privrep.typing import Singles
from privrep.users.batching import positions_of

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
    check_everyone(settings)
    plain = local_step(split, split.representation.weights(), start, settings, rows_per_user)

    def advance(own: Tensor, weights: Singles, batch: UserBatch) -> tuple[Tensor, Contributions]:
        heads = _OwnFit(settings.head_fit, own.clone())
        step: GradientStep | LocalSgdStep = replace(plain, weights=weights, head_fit=heads)
        update = step(batch)["update"]
        return heads.heads, update

    own = torch.tensor(start).expand(users, len(start)).clone()
    return UserState(advance, own, plain.spec)


def check_everyone(settings: TrainingSettings) -> None:
    if settings.rate != 1:
        raise InputError("users who keep something of their own are all asked in every round. Use a rate of 1.")
