"""From bounded sums to the billboard: charge, then draw, then post. No other way leads from private to public."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass

import numpy as np

from privrep.engines.base import LocalStep, Users
from privrep.privacy.accounting import Gaussian, Relation
from privrep.privacy.billboard import Billboard, Release
from privrep.privacy.bounds import Array, Bound, BoundedSum
from privrep.privacy.ledger import Ledger, noise_multiplier
from privrep.privacy.noise import NoiseSource, grid_step, to_grid


@dataclass(frozen=True)
class Query:
    """One statistic of a pass: clip every user to `bound.norm`, spend `mu_squared` of the budget on it."""

    bound: Bound
    mu_squared: float


def release(
    sums: Mapping[str, BoundedSum], queries: Mapping[str, Query], ledger: Ledger, noise: NoiseSource, page: str
) -> dict[str, Release]:
    """Charge the ledger, then add discrete Gaussian noise to each bounded sum.

    Formal guarantee: release q is sqrt(mu_squared_q)-GDP under the ledger's relation, hence all releases of a run
    together are (epsilon, delta)-DP as the ledger states. The noise multiplier is relative to the sensitivity of the
    bounded sum under that relation plus the rounding onto the grid. If the charge does not fit, nothing is drawn.
    """
    events = {f"{page}/{key}": Gaussian(noise_multiplier(query.mu_squared)) for key, query in queries.items()}
    ledger.charge(events)
    return {
        key: _noisy(sums[key], events[f"{page}/{key}"].noise_multiplier, ledger.budget.relation, noise, f"{page}/{key}")
        for key in queries
    }


def _noisy(total: BoundedSum, multiplier: float, relation: Relation, noise: NoiseSource, name: str) -> Release:
    step = grid_step(total.bound.norm)
    rounding = math.sqrt(total.bound.size) * step  # each of the two neighbouring totals moves by at most half of this
    sensitivity = total.sensitivity(relation) + rounding
    sigma = multiplier * sensitivity
    integers = to_grid(total.total, step) + noise(name, sigma / step, total.bound.size)
    return Release(integers.astype(np.float64) * step, sigma, sensitivity, multiplier)


@dataclass(frozen=True)
class Run:
    """A private computation under way: where the users live, the budget, the public record, the noise.

    `ask` is the only door: one pass over the users, several statistics, each charged, released and posted as one page.
    A page that stands on the billboard is read from there: a resumed run repeats no pass and spends nothing twice.
    """

    users: Users
    ledger: Ledger
    billboard: Billboard
    noise: NoiseSource
    on_page: Callable[[str], None] = lambda page: None

    def ask(self, page: str, step: LocalStep, queries: Mapping[str, Query]) -> dict[str, Release]:
        if page not in self.billboard:
            sums = self.users.bounded_sums(step, {key: query.bound for key, query in queries.items()})
            self.billboard.post_releases(page, release(sums, queries, self.ledger, self.noise, page))
        self.on_page(page)
        return self.billboard.releases(page)

    def derive(self, page: str, arrays: Mapping[str, Array], **facts: float | int | str | bool | list[float]) -> None:
        """Post what was computed from the billboard and public facts."""
        self.billboard.post_derived(page, {key: np.asarray(value) for key, value in arrays.items()}, facts)
