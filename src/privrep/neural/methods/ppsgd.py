"""PPSGD (Bietti et al. 2022): a shared network, to whose head each user adds a head of its own."""

from __future__ import annotations

from dataclasses import replace
from typing import ClassVar

import numpy as np
import torch
from torch import Tensor, nn

from privrep.data.table import UserTable
from privrep.errors import InputError
from privrep.heads.gradient import HeadFit, HeadRule, is_linear
from privrep.neural.rounds import TrainedWeights, TrainingSettings, train
from privrep.neural.user_state import Personal, UserState, keep_heads
from privrep.nn.flat_module import FlatModule, Split
from privrep.privacy.run import Run
from privrep.typing import Singles


class _Both(nn.Module):
    """A module that gives scores of a shared head, and beside them the representation they were made of."""

    def __init__(self, representation: nn.Module, head: nn.Module) -> None:
        super().__init__()
        self.representation, self.head = representation, head

    def forward(self, rows: Tensor) -> Tensor:
        """Return (r, classes + rank) of rows (r, features)."""
        Z = self.representation(rows)
        return torch.cat([self.head(Z), Z], dim=-1)


class _Added(nn.Module):
    """A module that adds a user's own linear function of the representation to shared scores."""

    def __init__(self, rank: int, classes: int, bias: bool) -> None:
        super().__init__()
        self.own, self.classes = nn.Linear(rank, classes, bias=bias), classes

    def forward(self, both: Tensor) -> Tensor:
        """Return scores (..., classes) from shared scores and representations, (..., classes + rank)."""
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
    """Train by PPSGD (Bietti et al. 2022): everyone adds a head of their own to a shared network.

    In a round a user takes one step of `eta` on its own part, and then its local steps of `alpha * eta` on what is
    shared. The own parts are zero at first.

    Formal guarantee: the weights are a function of releases charged to `run.ledger`; see `rounds.train`.

    Args:
        run: the run whose ledger is charged.
        split: the network, whose head is one nn.Linear.
        settings: rounds, clipping norm and steps; everyone is asked in every round.
        mu_squared: what each round spends.
        rows_per_user: rows of a user that a round looks at.
        eta: the step on own parts.
        alpha: the step on the shared weights, relative to `eta`.

    Returns:
        The shared weights, and users' own parts.
    """
    if not is_linear(split.head):
        raise InputError("PPSGD adds a user's head to the shared one, so the head must be one nn.Linear.")
    rank, classes = split.rank, split.classes
    shared = FlatModule(_Both(split.representation.module, split.head.module))
    added = Split(shared, FlatModule(_Added(rank, classes, "bias" in split.head.shapes)), split.features, 0, classes)
    settings = replace(settings, step_size=alpha * eta, head_fit=HeadFit(steps=1, rate=eta))
    kept = keep_heads(added, np.zeros(split.head.size, np.float32), settings, run.users.facts.users, rows_per_user)
    return train(run, shared.weights(), kept.step, settings, mu_squared, "ppsgd"), kept


def end_ppsgd(split: Split, weights: Singles, own: Tensor) -> Personal:
    """Return what users have after the last round of `ppsgd`: the shared head plus their own.

    Args:
        split: the network, as a representation and a head.
        weights: the shared weights, (size,).
        own: what users add to the shared head, (users, head size).
    """
    size = split.representation.size
    flat = torch.tensor(weights)
    return Personal(split, flat[None, :size], flat[size:] + own)


class PpsgdMethod:
    """PPSGD whose shared weights take the local step of the settings, for a comparison of methods."""

    name: ClassVar[str] = "PPSGD"
    alpha: ClassVar[float] = 0.1

    def train(
        self, run: Run, split: Split, settings: TrainingSettings, mu_squared: float, rows_per_user: int
    ) -> tuple[TrainedWeights, Tensor]:
        """Return the shared weights and what users add to the head; see `registry.NetworkMethod`."""
        eta = settings.step_size / self.alpha
        trained, kept = ppsgd(run, split, settings, mu_squared, rows_per_user, eta=eta, alpha=self.alpha)
        return trained, kept.own

    def end(
        self, split: Split, weights: Singles, own: Tensor | None, fit: HeadRule, table: UserTable, rows_per_user: int
    ) -> Personal:
        """Return the shared head plus each user's own, which are fitted already: `fit` is not used."""
        assert own is not None
        return end_ppsgd(split, weights, own)
