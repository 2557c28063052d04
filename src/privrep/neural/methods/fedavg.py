"""DP-FedAvg of a whole network (McMahan et al. 2018), after which users fit heads of their own."""

from __future__ import annotations

from dataclasses import replace
from typing import ClassVar

import numpy as np
from torch import Tensor, nn

from privrep.data.table import UserTable
from privrep.heads.gradient import HeadFit, HeadRule
from privrep.neural.rounds import TrainedWeights, TrainingSettings, local_step, train
from privrep.neural.user_state import Personal, fit_last_heads
from privrep.nn.flat_module import FlatModule, Split
from privrep.privacy.run import Run
from privrep.typing import Singles

NOTHING = np.zeros(0, dtype=np.float32)


NO_HEADS = HeadFit(steps=0)


def share_everything(split: Split) -> Split:
    """Return the network with all its weights shared, the head's last, and no head of one's own."""
    parts = (split.representation.module, split.head.module)
    network = nn.Sequential(*(part for part in parts if type(part) is not nn.Identity))
    return Split(FlatModule(network), FlatModule(nn.Identity()), split.features, split.classes, split.classes)


def fedavg(run: Run, split: Split, settings: TrainingSettings, mu_squared: float, rows_per_user: int) -> TrainedWeights:
    """Train by DP-FedAvg (McMahan et al. 2018): all weights are shared; users fine-tune heads afterwards.

    Formal guarantee: the weights are a function of releases charged to `run.ledger`; see `rounds.train`.

    Args:
        run: the run whose ledger is charged.
        split: the network, as a representation and a head.
        settings: rounds, clipping norm and steps.
        mu_squared: what each round spends.
        rows_per_user: rows of a user that a round looks at.
    """
    network, settings = share_everything(split), replace(settings, head_fit=NO_HEADS)
    start = network.representation.weights()
    first = local_step(network, start, NOTHING, settings, rows_per_user)
    return train(run, start, lambda weights: replace(first, weights=weights), settings, mu_squared, "fedavg")


class FedAvgMethod:
    """DP-FedAvg with heads that users fit afterwards, for a comparison of methods."""

    name: ClassVar[str] = "DP-FedAvg-ft"

    def train(
        self, run: Run, split: Split, settings: TrainingSettings, mu_squared: float, rows_per_user: int
    ) -> tuple[TrainedWeights, None]:
        """Return the shared weights, and None: users keep nothing; see `registry.NetworkMethod`."""
        return fedavg(run, split, settings, mu_squared, rows_per_user), None

    def end(
        self, split: Split, weights: Singles, own: Tensor | None, fit: HeadRule, table: UserTable, rows_per_user: int
    ) -> Personal:
        """Return heads that users fit from the shared one; see `registry.NetworkMethod`."""
        return fit_last_heads(split, weights, None, fit, table, rows_per_user)
