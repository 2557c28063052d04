"""PMTL (Hu et al. 2021): each user keeps a network of its own, pulled towards the noisy mean of all."""

from __future__ import annotations

from typing import ClassVar

import torch
from torch import Tensor

from privrep.data.table import UserTable
from privrep.heads.gradient import HeadRule, labels_of
from privrep.neural.local_sgd import batches
from privrep.neural.methods.fedavg import whole
from privrep.neural.rounds import TrainedWeights, TrainingSettings, train
from privrep.neural.user_state import Personal, UserState, check_everyone, descended, fine_tuned
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
    """PMTL (Hu et al. 2021): everyone keeps a whole network of their own, pulled towards the noisy mean of all.

    A user's loss is its mean cross-entropy plus pull/2 |own - mean|^2; it sends how far its network moved in the round,
    and the mean moves by the noisy average of that. `UserState.own` holds the networks, heads last.

    Formal guarantee: the mean is a function of releases charged to `run.ledger`; see `rounds.train`.
    """
    check_everyone(settings)
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


def ended_pmtl(split: Split, own: Tensor, fit: HeadRule, table: UserTable, rows_per_user: int) -> Personal:
    """What users have after the last round of `pmtl`: networks of their own, with heads fitted once more."""
    size = split.representation.size
    return fine_tuned(split, own[:, :size], own[:, size:], fit, table, rows_per_user)


class PmtlMethod:
    """PMTL with heads that users fit once more, for a comparison of methods."""

    name: ClassVar[str] = "PMTL-ft"

    def train(
        self, run: Run, split: Split, settings: TrainingSettings, mu_squared: float, rows_per_user: int
    ) -> tuple[TrainedWeights, Tensor]:
        trained, kept = pmtl(run, split, settings, mu_squared, rows_per_user)
        return trained, kept.own

    def end(
        self, split: Split, weights: Singles, own: Tensor | None, fit: HeadRule, table: UserTable, rows_per_user: int
    ) -> Personal:
        assert own is not None
        return ended_pmtl(split, own, fit, table, rows_per_user)
