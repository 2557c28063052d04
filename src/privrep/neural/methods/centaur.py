"""CENTAUR as in its paper (Shen et al. 2023): shared representation, heads that users keep."""

from __future__ import annotations

from typing import ClassVar

from torch import Tensor

from privrep.data.table import UserTable
from privrep.heads.gradient import HeadRule
from privrep.neural.rounds import TrainedWeights, TrainingSettings, train
from privrep.neural.user_state import Personal, UserState, fit_last_heads, keep_heads
from privrep.nn.flat_module import Split
from privrep.privacy.run import Run
from privrep.typing import Singles


def centaur(
    run: Run, split: Split, settings: TrainingSettings, mu_squared: float, rows_per_user: int
) -> tuple[TrainedWeights, UserState]:
    """Train by CENTAUR (Shen et al. 2023, Algorithms 1 and 2), with heads that users keep and fit further.

    Formal guarantee: the weights are a function of releases charged to `run.ledger`; see `rounds.train`.

    Args:
        run: the run whose ledger is charged.
        split: the network, as a representation and a head.
        settings: rounds, clipping norm, steps and heads.
        mu_squared: what each round spends.
        rows_per_user: rows of a user that a round looks at.

    Returns:
        The shared weights, and users' heads.
    """
    kept = keep_heads(split, split.head.weights(), settings, run.users.facts.users, rows_per_user)
    return train(run, split.representation.weights(), kept.step, settings, mu_squared, "centaur"), kept


class CentaurMethod:
    """CENTAUR, for a comparison of methods."""

    name: ClassVar[str] = "CENTAUR"

    def train(
        self, run: Run, split: Split, settings: TrainingSettings, mu_squared: float, rows_per_user: int
    ) -> tuple[TrainedWeights, Tensor]:
        """Return the shared weights and users' heads; see `registry.NetworkMethod`."""
        trained, kept = centaur(run, split, settings, mu_squared, rows_per_user)
        return trained, kept.own

    def end(
        self, split: Split, weights: Singles, own: Tensor | None, fit: HeadRule, table: UserTable, rows_per_user: int
    ) -> Personal:
        """Return users' heads, fitted once more; see `registry.NetworkMethod`."""
        return fit_last_heads(split, weights, own, fit, table, rows_per_user)
