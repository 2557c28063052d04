"""Releases whose noise nodes add: what everyone sees, and what the server sees of one node before it adds up.

It runs the code of server and nodes, with a ledger for each, and leaves out the wire between them.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping

import numpy as np

from privrep.audit.canaries import Sing, draw_coins, make_choir
from privrep.audit.releases import PAGE, Settings, Told
from privrep.audit.seen import Seen
from privrep.audit.worlds import TwoWorlds
from privrep.errors import InputError
from privrep.federated.wire.answering import answer
from privrep.federated.wire.messages import Answer, Question
from privrep.federated.wire.rounds import Conversation
from privrep.federated.wire.users import NoisyFlowerUsers
from privrep.privacy.accounting import gaussian_epsilon
from privrep.privacy.billboard import Billboard
from privrep.privacy.bounds import Bound
from privrep.privacy.calibration import Query
from privrep.privacy.ledger import Budget, Ledger
from privrep.privacy.noise import NoiseSource
from privrep.privacy.run import Run
from privrep.typing import Array


class NodesHere(Conversation):
    """Nodes of this process that answer when they are asked."""

    def __init__(self, runs: Mapping[str, Run]) -> None:
        """Take the runs of the nodes' own noise, by name."""
        self._runs = runs

    def ask_sums(
        self,
        what: str,
        questions: Mapping[str, Question],
        users: Mapping[str, int],
        accept: Callable[[str, Answer], Answer],
    ) -> dict[str, Answer]:
        """Return all nodes' answers; arguments are as in `Conversation.ask_sums`."""
        return {name: accept(name, answer(questions[name], run.users, run)) for name, run in self._runs.items()}


def release_by_nodes(settings: Settings, noise: NoiseSource) -> tuple[Told, Told]:
    """Return a sum that several nodes released together, and what the first of them sent for it.

    Every node adds its part of the noise. What it sends costs its users more than what is published, and its own ledger
    says how much.

    Args:
        settings: the promise of what is published.
        noise: of all nodes.
    """
    if settings.relation != "replace-one-user":
        raise InputError("nodes say how many users they have, so noise of their own goes with replace-one-user alone.")
    count, nodes = settings.canaries, settings.nodes
    coins = draw_coins(count)
    places = {f"node-{number}": np.arange(number, count, nodes) for number in range(nodes)}
    mu_squared = Ledger(Budget(settings.epsilon, settings.delta)).capacity
    if settings.multiplier is not None:
        mu_squared = settings.multiplier**-2
    own = Budget(gaussian_epsilon(settings.delta, math.sqrt(nodes * mu_squared)) * (1 + 1e-6), settings.delta)
    choirs = {
        name: make_choir(coins[axes], settings.relation, axes.astype(np.float64)) for name, axes in places.items()
    }
    runs = {name: Run(choir, Ledger(own), Billboard(), noise) for name, choir in choirs.items()}
    roster = {name: choir.facts for name, choir in choirs.items()}
    users = NoisyFlowerUsers(NodesHere(runs), "audit", roster, (1, 1, False), nodes)
    ledger = Ledger(Budget(settings.epsilon, settings.delta))
    run = Run(users, ledger, Billboard(), noise)
    released = run.release(PAGE, Sing(count), {"sum": Query(Bound(1.0, count), mu_squared)})["sum"].value
    answered, other = (sum(_total(choir, world) for choir in choirs.values()) for world in (0, 1))
    published = Told(ledger.epsilon, Seen(coins, released, np.asarray(answered), np.asarray(other)))
    (first, axes), own_run = next(iter(places.items())), runs[next(iter(places))]
    sent = own_run.billboard.releases(PAGE)["sum"].value[axes]
    first_total, second_total = (_total(choirs[first], world)[axes] for world in (0, 1))
    return published, Told(own_run.ledger.epsilon, Seen(coins[axes], sent, first_total, second_total))


def _total(choir: TwoWorlds, world: int) -> Array:
    """Return the total of one world's only pass."""
    return choir.totals[0]["sum"][world]
