"""From bounded sums to the billboard: charge, then draw, then post. No other way leads from private to public."""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass

import numpy as np

from privrep.engines.base import LocalStep, Users
from privrep.errors import InputError, ResumeError
from privrep.privacy.accounting import Gaussian, Relation
from privrep.privacy.billboard import Billboard, Release
from privrep.privacy.bounds import Array, Bound, BoundedSum
from privrep.privacy.ledger import Ledger, noise_multiplier
from privrep.privacy.noise import WIDEST, NoiseSource, grid_step, to_grid


@dataclass(frozen=True)
class Query:
    """One statistic of a pass: clip every user to `bound.norm`, spend `mu_squared` of the budget on it."""

    bound: Bound
    mu_squared: float

    def __post_init__(self) -> None:
        if not (self.mu_squared > 0 and math.isfinite(self.mu_squared)):
            raise InputError(
                f"a release must spend a positive part of the budget. Got {self.mu_squared} of mu^2 instead."
            )


def release(
    sums: Mapping[str, BoundedSum], queries: Mapping[str, Query], ledger: Ledger, noise: NoiseSource, page: str
) -> dict[str, Release]:
    """Charge the ledger, then add discrete Gaussian noise to each bounded sum.

    Formal guarantee: release q is sqrt(mu_squared_q)-GDP under the ledger's relation (up to what `privacy.noise` says
    of discrete noise, which rounding mu down pays for), hence all releases of a run together are (epsilon, delta)-DP as
    the ledger states. The noise multiplier is relative to the sensitivity of the bounded sum under that relation plus
    the rounding onto the grid. If the charge does not fit, nothing is drawn.
    """
    if getattr(noise, "seeded", False) and not ledger.seeded:
        raise InputError("seeded noise is a simulation, and this ledger says private. Make it with seeded=True.")
    relation = ledger.budget.relation
    plan = {key: _plan(sums[key], query, relation) for key, query in queries.items()}
    ledger.charge(events_of(page, queries))
    return {key: _noisy(sums[key], planned, noise, f"{page}/{key}") for key, planned in plan.items()}


def events_of(page: str, queries: Mapping[str, Query]) -> dict[str, Gaussian]:
    return {f"{page}/{key}": Gaussian(noise_multiplier(query.mu_squared)) for key, query in queries.items()}


@dataclass(frozen=True)
class _Plan:
    step: float
    sensitivity: float
    multiplier: float

    @property
    def sigma(self) -> float:
        return self.multiplier * self.sensitivity


def rounding(bound: Bound) -> float:
    """What rounding onto the grid adds to the distance of two totals: each moves by at most half of this."""
    return math.sqrt(bound.size) * grid_step(bound.norm)


def _plan(total: BoundedSum, query: Query, relation: Relation) -> _Plan:
    step = grid_step(total.bound.norm)
    plan = _Plan(step, total.sensitivity(relation) + rounding(total.bound), noise_multiplier(query.mu_squared))
    if not 2.0**20 <= plan.sigma / step <= WIDEST:
        raise InputError(f"a noise multiplier of {plan.multiplier:g} is out of range; change the share of the budget.")
    return plan


def _noisy(total: BoundedSum, plan: _Plan, noise: NoiseSource, name: str) -> Release:
    integers = to_grid(total.total, plan.step) + noise(name, plan.sigma / plan.step, total.bound.size)
    return Release(integers.astype(np.float64) * plan.step, plan.sigma, plan.sensitivity, plan.multiplier)


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
        if not re.fullmatch(r"[A-Za-z0-9_-]+", page):
            raise InputError(f"a page is named with letters, digits, - and _. Got {page!r} instead.")
        events = events_of(page, queries)
        if page not in self.billboard:
            sums = self.users.bounded_sums(step, {key: query.bound for key, query in queries.items()})
            released = release(sums, queries, self.ledger, self.noise, page)
            self.billboard.post_releases(page, released, simulation=self.ledger.seeded)
        self.ledger.posted(page, events)
        released = self.billboard.releases(page)
        for key, query in queries.items():
            self._check(page, released.get(key), query)
        if released.keys() != queries.keys():
            raise ResumeError(f"page {page!r} answers another question. Use another folder.")
        self.on_page(page)
        return released

    def _check(self, page: str, released: Release | None, query: Query) -> None:
        wanted = query.bound.sensitivity(self.ledger.budget.relation) + rounding(query.bound)
        if (
            released is None
            or released.value.shape != (query.bound.size,)
            or not math.isclose(released.sensitivity, wanted, rel_tol=1e-6)
        ):
            raise ResumeError(f"page {page!r} answers another question. Use another folder.")

    def derive(self, page: str, arrays: Mapping[str, Array], **facts: float | int | str | bool | list[float]) -> None:
        """Post what was computed from the billboard and public facts."""
        arrays = {key: np.asarray(value) for key, value in arrays.items()}
        self.billboard.post_derived(page, arrays, facts, simulation=self.ledger.seeded)
