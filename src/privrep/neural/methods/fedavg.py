"""DP-FedAvg of a whole network (McMahan et al. 2018), after which users fit heads of their own."""

from __future__ import annotations

from dataclasses import replace
from typing import ClassVar

import numpy as np
from torch import Tensor, nn

from privrep.data.table import UserTable
from privrep.heads.gradient import HeadFit, HeadRule
from privrep.neural.rounds import TrainedWeights, TrainingSettings, local_step, train
from privrep.neural.user_state import Personal, ended
from privrep.nn.flat_module import FlatModule, Split
from privrep.privacy.run import Run
from privrep.typing import Singles

NOTHING = np.zeros(0, dtype=np.float32)


NO_HEADS = HeadFit(steps=0)


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


class FedAvgMethod:
    """DP-FedAvg with heads that users fit afterwards, for a comparison of methods."""

    name: ClassVar[str] = "DP-FedAvg-ft"

    def train(
        self, run: Run, split: Split, settings: TrainingSettings, mu_squared: float, rows_per_user: int
    ) -> tuple[TrainedWeights, None]:
        return fedavg(run, split, settings, mu_squared, rows_per_user), None

    def end(
        self, split: Split, weights: Singles, own: Tensor | None, fit: HeadRule, table: UserTable, rows_per_user: int
    ) -> Personal:
        return ended(split, weights, None, fit, table, rows_per_user)
