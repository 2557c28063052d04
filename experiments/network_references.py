"""References for networks: FedRep with exact sums, which is NOT PRIVATE, and training alone, which shares nothing."""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

from privrep.data.table import UserTable
from privrep.heads.gradient import labels_of
from privrep.neural.methods.fedavg import share_everything
from privrep.neural.rounds import TrainingSettings
from privrep.neural.user_state import Personal, UserState, descend, keep_heads, map_users
from privrep.nn.flat_module import Split
from privrep.nn.threads import rows_of
from privrep.privacy.bounds import Bound
from privrep.privacy.protocol import UserBatch, Users
from privrep.typing import Singles

UNBOUNDED = 2.0**8  # a clipping norm that no update reaches, with steps of 2^-28


def fedrep(users: Users, split: Split, settings: TrainingSettings, rows_per_user: int) -> tuple[Singles, UserState]:
    """FedRep (Collins et al. 2021): the same rounds with exact sums, nothing clipped and no noise. NOT PRIVATE."""
    kept = keep_heads(split, split.head.weights(), settings, users.facts.users, rows_per_user)
    weights = split.representation.weights().astype(np.float64)
    bounds = {"update": Bound(UNBOUNDED, len(weights))}
    for _ in range(settings.rounds):
        total = users.sums(kept.step(weights.astype(np.float32)), bounds)["update"].exact_numbers
        weights = weights + settings.server_rate * total / users.facts.users
    return weights.astype(np.float32), kept


def alone(split: Split, table: UserTable, rows_per_user: int, rate: float, batch: int | None, epochs: int) -> Personal:
    """Everyone trains the same network on their own rows: nothing is shared, nothing is spent."""
    network = share_everything(split).representation
    start, own = torch.tensor(network.weights()), torch.empty(table.n_users, network.size)

    def trained(users: UserBatch) -> Tensor:
        return descend(network, start, rows_of(users.X), labels_of(users.y, split.classes), rate, batch, epochs)

    for positions, found in map_users(trained, table, split, network.size, rows_per_user):
        own[torch.from_numpy(positions)] = found
    return Personal(split, own[:, : split.representation.size], own[:, split.representation.size :])
