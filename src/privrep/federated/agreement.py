"""The agreement of server and nodes before a run: the task, and what the server may learn of a node's users."""

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

ROUNDING = 1e-6  # added to the epsilon that nodes allow the server, as a share of it, so that the last release fits


@dataclass(frozen=True)
class Agreement:
    """The task, and the noise that nodes add.

    `noise` is None if the server is trusted with exact sums. Else it is {"epsilon": ...}, the epsilon of the server's
    view.

    Formal guarantee, for a node that holds an agreement:
    * It answers no hello that differs from the agreement in anything but the number of all users.
    * So a server can choose neither columns nor categories nor budget, and learns nothing from refusals.
    """

    task: Task
    noise: Mapping[str, float] | None

    @classmethod
    def of(cls, task: Task, settings: FederationSettings) -> Self:
        """Return the agreement that a node and a server with this task and these settings both compute."""
        return cls(task, compute_server_view(task, settings))

    def check(self, task: Task, noise: Any) -> None:
        """Raise InputError if a server's hello differs from what was agreed on.

        Args:
            task: the task as the server sent it.
            noise: the server's plan for the noise, as it came from JSON.
        """
        if _list_agreed_fields(task) != _list_agreed_fields(self.task):
            raise InputError(
                "the server's task is not the one that was agreed on; see hello.json, and ask its operator."
            )
        if not _is_same_noise(noise, self.noise):
            raise InputError("the server's plan for the noise is not what was agreed on; ask its operator.")


def compute_server_view(task: Task, settings: FederationSettings) -> dict[str, float] | None:
    """Return what the server may learn of a user from the noisy sums of its node; None if it gets exact sums.

    Every release is asked of a node at `noise_nodes` times its mu^2. So all releases together are at most
    sqrt(noise_nodes) times the budget's mu. InputError says if that is more than `server_epsilon` allows, or if nodes
    cannot add the noise.

    Returns:
        {"epsilon": ...}, at the task's delta.
    """
    if settings.noise == "server":
        return None
    budget = Budget(task.epsilon, task.delta, task.relation)
    if task.relation != "replace-one-user":
        raise InputError("nodes say how many users they have, so noise of the nodes goes with replace-one-user alone.")
    if not budget.delta:
        raise InputError("noise of the nodes is Gaussian, and takes a delta above 0.")
    if task.rate < 1:
        raise InputError(
            f"rounds that ask a secret sample (rate {task.rate:g}) do not go with noise of the nodes: who asks for a "
            "sample knows it. Leave the rate out, or let the server add the noise."
        )
    epsilon = gaussian_epsilon(task.delta, budget.mu * math.sqrt(settings.noise_nodes)) * (1 + ROUNDING)
    if settings.server_epsilon is not None and epsilon > settings.server_epsilon * (1 + 2 * ROUNDING):
        raise InputError(
            f"with noise_nodes = {settings.noise_nodes} the server would learn epsilon {epsilon:.3g} of a user, and "
            f"server_epsilon is {settings.server_epsilon:g}. Let fewer nodes make up the noise, or lower epsilon."
        )
    return {"epsilon": epsilon}


def _is_same_noise(noise: Any, agreed: Mapping[str, float] | None) -> bool:
    """Return whether two plans for the noise agree.

    Epsilon is computed on both machines, and may differ in its last digits.
    """
    if noise is None or agreed is None:
        return noise is None and agreed is None
    if not isinstance(noise, dict) or set(noise) != {"epsilon"} or not isinstance(noise["epsilon"], int | float):
        return False
    return math.isclose(noise["epsilon"], agreed["epsilon"], rel_tol=1e-9)


def compute_nodes_view(task: Task, noise_nodes: int, others: int) -> float:
    """Return the epsilon of published releases towards a node that can subtract its own noise.

    Args:
        task: the task, with the budget of the run.
        noise_nodes: how many nodes' noise makes up what the budget asks for.
        others: the number of nodes whose noise the observer does not know.
    """
    budget = Budget(task.epsilon, task.delta, task.relation)
    return gaussian_epsilon(task.delta, budget.mu * math.sqrt(max(noise_nodes / others, 1.0)))


def _list_agreed_fields(task: Task) -> dict[str, Any]:
    """Return the task's JSON fields but for the number of users, which is known only when all nodes have joined."""
    fields: dict[str, Any] = json.loads(json.dumps(task.to_json()))
    return {name: value for name, value in fields.items() if name != "users"}
