"""CENTAUR as in its paper (Shen et al. 2023): shared representation, heads that users keep."""

from __future__ import annotations

from typing import ClassVar

from torch import Tensor

from privrep.data.table import UserTable
from privrep.heads.gradient import HeadRule
from privrep.neural.rounds import TrainedWeights, TrainingSettings, train
from privrep.neural.user_state import Personal, UserState, ended, kept_heads
from privrep.nn.flat_module import Split
from privrep.privacy.run import Run
from privrep.typing import Singles


def centaur(
    run: Run, split: Split, settings: TrainingSettings, mu_squared: float, rows_per_user: int
) -> tuple[TrainedWeights, UserState]:
    """CENTAUR as in its paper (Algorithms 1 and 2): shared representation, heads that users keep and fit further.

    Formal guarantee: the weights are a function of releases charged to `run.ledger`; see `rounds.train`.
    """
    kept = kept_heads(split, split.head.weights(), settings, run.users.facts.users, rows_per_user)
    return train(run, split.representation.weights(), kept.step, settings, mu_squared, "centaur"), kept


class CentaurMethod:
    """CENTAUR, for a comparison of methods."""

    name: ClassVar[str] = "CENTAUR"

    def train(
        self, run: Run, split: Split, settings: TrainingSettings, mu_squared: float, rows_per_user: int
    ) -> tuple[TrainedWeights, Tensor]:
        trained, kept = centaur(run, split, settings, mu_squared, rows_per_user)
        return trained, kept.own

    def end(
        self, split: Split, weights: Singles, own: Tensor | None, fit: HeadRule, table: UserTable, rows_per_user: int
    ) -> Personal:
        return ended(split, weights, own, fit, table, rows_per_user)
