"""PMTL (Hu et al. 2021): each user keeps a network of its own, pulled towards the noisy mean of all."""

from __future__ import annotations

from typing import ClassVar

import torch
from torch import Tensor

from privrep.data.table import UserTable
from privrep.heads.gradient import HeadRule, labels_of
from privrep.neural.local_sgd import cut_batches
from privrep.neural.methods.fedavg import share_everything
from privrep.neural.rounds import TrainedWeights, TrainingSettings, train
from privrep.neural.user_state import Personal, UserState, check_everyone, descend, fine_tune
from privrep.nn.flat_module import FlatModule, Split
from privrep.nn.threads import rows_of
from privrep.privacy.bounds import Contributions
from privrep.privacy.contributions import Vectors
from privrep.privacy.protocol import StepSpec, UserBatch
from privrep.privacy.run import Run
from privrep.typing import Singles


def pmtl(
    run: Run, split: Split, settings: TrainingSettings, mu_squared: float, rows_per_user: int, pull: float = 1.0
) -> tuple[TrainedWeights, UserState]:
    """Train by PMTL (Hu et al. 2021): everyone keeps a whole network, pulled towards the noisy mean of all.

    A user's loss is its mean cross-entropy plus pull/2 |own - mean|^2. A user sends how far its network moved in the
    round, and the mean moves by the noisy average of that.

    Formal guarantee: the mean is a function of releases charged to `run.ledger`; see `rounds.train`.

    Args:
        run: the run whose ledger is charged.
        split: the network, as a representation and a head.
        settings: rounds, clipping norm and steps; everyone is asked in every round.
        mu_squared: what each round spends.
        rows_per_user: rows of a user that a round looks at.
        pull: the strength of the pull.

    Returns:
        The mean, and users' networks, heads last.
    """
    check_everyone(settings)
    network = share_everything(split).representation
    start = network.weights()

    def advance(own: Tensor, weights: Singles, batch: UserBatch) -> tuple[Tensor, Contributions]:
        """Return users' networks after a round, and how far they moved; see `Advance` in `user_state`."""
        rows, labels = rows_of(batch.X), labels_of(batch.y, split.classes)
        moved = own.clone()
        for some in cut_batches(rows_per_user, settings.batch, settings.epochs):
            moved = _take_pulled_step(
                network, moved, torch.tensor(weights), rows[:, some], labels[:, some], settings, pull
            )
        return moved, Vectors((moved - own).numpy())

    spec = StepSpec(layout="padded", rows_per_user=rows_per_user, floats_per_user=network.size)
    kept = UserState(advance, torch.tensor(start).expand(run.users.facts.users, len(start)).clone(), spec)
    return train(run, start, kept.step, settings, mu_squared, "pmtl"), kept


def _take_pulled_step(
    network: FlatModule,
    own: Tensor,
    mean: Tensor,
    rows: Tensor,
    labels: Tensor,
    settings: TrainingSettings,
    pull: float,
) -> Tensor:
    """Return some users' networks after one step on one batch each, (users, size).

    Args:
        network: the whole network.
        own: weights of each user, (users, size).
        mean: the noisy mean of all, (size,).
        rows: (users, b, features).
        labels: (users, b), -1 for rows that are absent.
        settings: the size of the step.
        pull: the strength of the pull.
    """
    present = (labels >= 0).any(dim=1, keepdim=True)
    towards = torch.where(present, (own - mean).mul_(settings.step_size * pull), 0.0)
    return descend(network, own, rows, labels, settings.step_size, None, 1).sub_(towards)


def end_pmtl(split: Split, own: Tensor, fit: HeadRule, table: UserTable, rows_per_user: int) -> Personal:
    """Return what users have after the last round of `pmtl`: networks of their own, with heads fitted once more.

    Args:
        split: the network, as a representation and a head.
        own: weights of each user, heads last, (users, size).
        fit: how heads are fitted.
        table: the users' rows.
        rows_per_user: rows of a user that a fit looks at.
    """
    size = split.representation.size
    return fine_tune(split, own[:, :size], own[:, size:], fit, table, rows_per_user)


class PmtlMethod:
    """PMTL with heads that users fit once more, for a comparison of methods."""

    name: ClassVar[str] = "PMTL-ft"

    def train(
        self, run: Run, split: Split, settings: TrainingSettings, mu_squared: float, rows_per_user: int
    ) -> tuple[TrainedWeights, Tensor]:
        """Return the mean and users' networks; see `registry.NetworkMethod`."""
        trained, kept = pmtl(run, split, settings, mu_squared, rows_per_user)
        return trained, kept.own

    def end(
        self, split: Split, weights: Singles, own: Tensor | None, fit: HeadRule, table: UserTable, rows_per_user: int
    ) -> Personal:
        """Return users' networks, with heads fitted once more; see `registry.NetworkMethod`."""
        assert own is not None
        return end_pmtl(split, own, fit, table, rows_per_user)
