"""Releases whose noise is drawn where the users are, machine by machine: for a server that shall not see exact sums."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass

from privrep.errors import InputError
from privrep.privacy.billboard import Release
from privrep.privacy.calibration import Query, calibrate, events_of
from privrep.privacy.events import Relation
from privrep.privacy.groups import Group
from privrep.privacy.ledger import Ledger
from privrep.privacy.protocol import EVERYONE, Everyone, Step
from privrep.typing import Array


@dataclass(frozen=True)
class Noisy:
    """A sum that came with noise, and the standard deviation of all of it."""

    value: Array
    sigma: float


class NoisyUsers(ABC):
    """Users on several machines, each of which adds noise of its own before anything leaves it.

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
        """Return the sum, over machines that answered, of what each released for this page.

        Each released it once, however often it is asked. The noise of all of them together is at least what the queries
        ask for.
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

    Formal guarantee: that of `release`, as long as the machines whose noise is counted draw it. Each adds a discrete
    Gaussian of at least 2^20 grid steps, on the same grid. The sum of two, of variances a and b, is a discrete Gaussian
    of variance a + b but for a factor within 1 +- 6 exp(-2 pi^2 ab / (a + b)) at every point: exp(-x^2/2a) exp(-(z -
    x)^2/2b) is exp(-z^2/2(a + b)) times a Gaussian in x of variance ab / (a + b), whose sum over the integers x hardly
    depends on where it is centred, by Poisson's summation. That is nothing next to what `privacy.noise` leaves room
    for, and so is what rounding adds: of two neighbouring populations one machine's total differs, so one is rounded
    differently. A release that was under way when a process died is asked for again: machines repeat what they said.
    """
    relation = ledger.budget.relation
    if relation != "replace-one-user":
        raise InputError("machines say how many users they have, so noise of their own goes with replace-one-user.")
    plan = {key: calibrate(query.bound, query.mu_squared, relation) for key, query in queries.items()}
    ledger.charge(events_of(page, queries, among))
    noisy = users.noisy_sums(page, step, queries, relation, among)
    if any(noisy[key].value.shape != (query.bound.size,) for key, query in queries.items()):
        raise InputError("the machines' sums are of another size than was asked for; nothing was released.")
    if any(not noisy[key].sigma >= planned.sigma * (1 - 1e-12) for key, planned in plan.items()):
        raise InputError("the machines' noise is less than what was charged; nothing was released.")
    return {
        key: Release(noisy[key].value, noisy[key].sigma, planned.sensitivity, noisy[key].sigma / planned.sensitivity)
        for key, planned in plan.items()
    }
