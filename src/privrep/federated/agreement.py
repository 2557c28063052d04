"""What server and nodes agree on before a run: the task, and what the server may learn of a user of a node."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Self

from privrep.errors import InputError
from privrep.federated.config import FederationSettings
from privrep.federated.task import Task
from privrep.privacy.accounting import gaussian_epsilon
from privrep.privacy.ledger import Budget

ROUNDING = 1e-6  # of the epsilon that nodes allow the server, so that the last release fits


@dataclass(frozen=True)
class Agreement:
    """The task, and `noise`: None if the server is trusted with exact sums, else {"epsilon": of the server's view}.

    Formal guarantee: a node that holds an agreement answers no hello that differs from it in anything but the number of
    all users, so a server can choose neither columns nor categories nor budget, and learns nothing from refusals.
    """

    task: Task
    noise: Mapping[str, float] | None

    @classmethod
    def of(cls, task: Task, settings: FederationSettings) -> Self:
        return cls(task, server_view(task, settings))

    def check(self, task: Task, noise: Any) -> None:
        """Refuse what was not agreed on."""
        if _plain(task) != _plain(self.task):
            raise InputError(
                "the server's task is not the one that was agreed on; see hello.json, and ask its operator."
            )
        if not _same(noise, self.noise):
            raise InputError("the server's plan for the noise is not what was agreed on; ask its operator.")


def server_view(task: Task, settings: FederationSettings) -> dict[str, float] | None:
    """What the server may learn of a user from the noisy sums of its node; None if it is trusted with exact ones.

    Every release is asked of a node at `noise_nodes` times its mu^2, so all of them are at most sqrt(noise_nodes) times
    the budget's mu.
    """
    if settings.noise == "server":
        return None
    budget = Budget(task.epsilon, task.delta, task.relation)
    if task.relation != "replace-one-user":
        raise InputError("nodes say how many users they have, so noise of the nodes goes with replace-one-user alone.")
    if not budget.delta:
        raise InputError("noise of the nodes is Gaussian, and takes a delta above 0.")
    epsilon = gaussian_epsilon(task.delta, budget.mu * math.sqrt(settings.noise_nodes)) * (1 + ROUNDING)
    if settings.server_epsilon is not None and epsilon > settings.server_epsilon * (1 + 2 * ROUNDING):
        raise InputError(
            f"with noise_nodes = {settings.noise_nodes} the server would learn epsilon {epsilon:.3g} of a user, and "
            f"server_epsilon is {settings.server_epsilon:g}. Let fewer nodes make up the noise, or lower epsilon."
        )
    return {"epsilon": epsilon}


def _same(noise: Any, agreed: Mapping[str, float] | None) -> bool:
    """Epsilon is computed on both machines, and may differ in its last digits."""
    if noise is None or agreed is None:
        return noise is None and agreed is None
    if not isinstance(noise, dict) or set(noise) != {"epsilon"} or not isinstance(noise["epsilon"], int | float):
        return False
    return math.isclose(noise["epsilon"], agreed["epsilon"], rel_tol=1e-9)


def nodes_view(task: Task, noise_nodes: int, others: int) -> float:
    """Epsilon of what is published to someone who can subtract all noise but that of so many other nodes."""
    budget = Budget(task.epsilon, task.delta, task.relation)
    return gaussian_epsilon(task.delta, budget.mu * math.sqrt(max(noise_nodes / others, 1.0)))


def _plain(task: Task) -> dict[str, Any]:
    """The task as it travels, but for the number of users, which is known when all have joined."""
    fields: dict[str, Any] = json.loads(json.dumps(task.to_json()))
    return {name: value for name, value in fields.items() if name != "users"}
