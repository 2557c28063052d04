"""Releases whose noise is drawn where the users are, node by node: for a server that shall not see exact sums."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass

from privrep.errors import InputError
from privrep.privacy.billboard import Release
from privrep.privacy.calibration import Query, calibrate, price_release
from privrep.privacy.events import Relation
from privrep.privacy.groups import Group
from privrep.privacy.ledger import Ledger
from privrep.privacy.protocol import EVERYONE, Everyone, Step
from privrep.typing import Array


@dataclass(frozen=True)
class Noisy:
    """A sum that came with noise, and the standard deviation of all of that noise."""

    value: Array
    sigma: float


class NoisyUsers(ABC):
    """Users on several nodes, each of which adds noise of its own before anything leaves it.

    A class of users says so by deriving from this one.
    """

    @abstractmethod
    def noisy_sums(
        self,
        page: str,
        step: Step,
        queries: Mapping[str, Query],
        relation: Relation,
        among: Everyone | Group = EVERYONE,
    ) -> dict[str, Noisy]:
        """Return the sum, over nodes that answered, of what each released for this page.

        Each node releases it once, however often it is asked. The noise of all of them together is at least what the
        queries ask for. Arguments are as in `release_by_machines`.
        """


def release_by_machines(
    users: NoisyUsers,
    step: Step,
    queries: Mapping[str, Query],
    ledger: Ledger,
    page: str,
    among: Everyone | Group = EVERYONE,
) -> dict[str, Release]:
    """Charge the ledger, then ask for sums that are noisy already.

    Formal guarantee. It is the guarantee of `release`, as long as the nodes whose noise is counted draw it.
    * Each node adds a discrete Gaussian of at least 2^20 grid steps, on the same grid.
    * The sum of two discrete Gaussians, of variances a and b, is a discrete Gaussian of variance a + b but for a
      factor. At every point the factor is within 1 +- 6 exp(-2 pi^2 ab / (a + b)).
    * Proof: exp(-x^2/2a) exp(-(z - x)^2/2b) is exp(-z^2/2(a + b)) times a Gaussian in x of variance ab / (a + b). Its
      sum over the integers x hardly depends on its centre, by Poisson's summation.
    * That factor is nothing next to the room that `privacy.noise` leaves. Totals of nodes are whole steps of the grid,
      and of two neighbouring populations one node's total differs.
    * A release that was under way when a process died is asked for again: nodes repeat what they said.

    Args:
        users: on nodes that add noise.
        step: what users compute.
        queries: how each statistic is clipped, and what it spends.
        ledger: what it costs is charged there first.
        page: name of the page.
        among: who is asked.
    """
    relation = ledger.budget.relation
    if relation != "replace-one-user":
        raise InputError("machines say how many users they have, so noise of their own goes with replace-one-user.")
    plan = {key: calibrate(query.bound, query.mu_squared, relation) for key, query in queries.items()}
    ledger.charge(price_release(page, queries, among))
    noisy = users.noisy_sums(page, step, queries, relation, among)
    if any(noisy[key].value.shape != (query.bound.size,) for key, query in queries.items()):
        raise InputError("the machines' sums are of another size than was asked for; nothing was released.")
    if any(not noisy[key].sigma >= planned.sigma * (1 - 1e-12) for key, planned in plan.items()):
        raise InputError("the machines' noise is less than what was charged; nothing was released.")
    return {
        key: Release(noisy[key].value, noisy[key].sigma, planned.sensitivity, noisy[key].sigma / planned.sensitivity)
        for key, planned in plan.items()
    }
