"""From bounded sums to the billboard: charge, then draw, then post. No other way leads from private to public."""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass

import numpy as np

from privrep.data.groups import Group
from privrep.engines.base import LocalStep, Users
from privrep.errors import InputError, ResumeError
from privrep.privacy.accounting import Gaussian, Relation, Selection
from privrep.privacy.billboard import Billboard, Choice, Release, Selected
from privrep.privacy.bounds import LEVELS, Array, Bound, BoundedSum, LossBound
from privrep.privacy.exponential import choice_events, scale_in_levels
from privrep.privacy.ledger import Ledger, noise_multiplier
from privrep.privacy.noise import WIDEST, NoiseSource, grid_step, to_grid
from privrep.privacy.selection import COUNTED, Holders, Key, chance, counts_bound, threshold


@dataclass(frozen=True)
class Query:
    """One statistic of a pass: clip every user to `bound.norm`, spend `mu_squared` of the budget on it."""

    bound: Bound
    mu_squared: float

    def __post_init__(self) -> None:
        _check_share(self.mu_squared)


def release(
    sums: Mapping[str, BoundedSum],
    queries: Mapping[str, Query],
    ledger: Ledger,
    noise: NoiseSource,
    page: str,
    group: Group | None = None,
) -> dict[str, Release]:
    """Charge the ledger, then add discrete Gaussian noise to each bounded sum.

    Formal guarantee: release q is sqrt(mu_squared_q)-GDP under the ledger's relation (up to what `privacy.noise` says
    of discrete noise, which rounding mu down pays for), hence all releases of a run together are (epsilon, delta)-DP as
    the ledger states. The noise multiplier is relative to the sensitivity of the bounded sum under that relation plus
    the rounding onto the grid. If the charge does not fit, nothing is drawn. With a group, the sums must be over the
    users of that group alone.
    """
    _check_noise(noise, ledger)
    relation = ledger.budget.relation
    plan = {key: _plan(_norm_bound(sums[key]), query.mu_squared, relation) for key, query in queries.items()}
    ledger.charge(events_of(page, queries, group))
    return {key: _noisy(sums[key], planned, noise, f"{page}/{key}") for key, planned in plan.items()}


def select(
    holders: Holders, mu_squared: float, delta: float, ledger: Ledger, noise: NoiseSource, page: str
) -> Selected:
    """Charge the ledger, then add noise to the count of each key and keep the keys above the threshold.

    Formal guarantee: that of `privacy.selection`, with `delta` the part of the run's delta that is set aside for it.
    Nothing of a key below the threshold leaves this function.
    """
    _check_noise(noise, ledger)
    plan = _plan(COUNTED, mu_squared, ledger.budget.relation)
    least = threshold(plan.sigma, chance(delta, ledger.budget.epsilon))
    keys, counts = holders.private_keys, holders.counted(counts_bound(holders))
    if counts.bound != counts_bound(holders):
        raise InputError("the counts of a selection were clipped to another bound; nothing was released.")
    if not (set(map(type, keys)) <= {int} or set(map(type, keys)) <= {str}):
        raise InputError("keys must be all integers or all texts. Turn them into one or the other.")
    ledger.charge(selection_events(page, mu_squared, delta))
    noisy = _noisy(counts, plan, noise, f"{page}/keys")
    kept = np.flatnonzero(noisy.value[: len(keys)] > least).tolist()
    named = sorted((keys[place], float(noisy.value[place])) for place in kept)
    values = np.array([count for _, count in named], dtype=np.float64)
    return Selected(
        tuple(key for key, _ in named), Release(values, noisy.sigma, noisy.sensitivity, noisy.noise_multiplier), least
    )


def choose(losses: BoundedSum, epsilon: float, ledger: Ledger, noise: NoiseSource, page: str) -> Choice:
    """Charge the ledger, then draw a candidate by the exponential mechanism: the smaller its loss, the likelier.

    Formal guarantee: the choice is epsilon-DP under the ledger's relation, as `privacy.exponential` proves. If the
    charge does not fit, nothing is drawn. Nothing of the losses leaves this function but the index.
    """
    _check_noise(noise, ledger)
    bound = losses.bound
    if not isinstance(bound, LossBound):
        raise InputError("a choice is made from losses, and these sums are none; nothing was chosen.")
    scale = scale_in_levels(bound, epsilon, ledger.budget.relation)
    events = choice_events(page, epsilon)
    totals = losses.total.astype(np.int64)
    ledger.charge(events)
    (name,) = events
    return Choice(noise.smallest(name, totals, scale), bound.size, epsilon, scale / LEVELS)


def events_of(page: str, queries: Mapping[str, Query], group: Group | None = None) -> dict[str, Gaussian]:
    return {f"{page}/{key}": Gaussian(noise_multiplier(query.mu_squared), group) for key, query in queries.items()}


def selection_events(page: str, mu_squared: float, delta: float) -> dict[str, Selection]:
    return {f"{page}/keys": Selection(noise_multiplier(mu_squared), delta)}


def _check_noise(noise: NoiseSource, ledger: Ledger) -> None:
    if getattr(noise, "seeded", False) and not ledger.seeded:
        raise InputError("seeded noise is a simulation, and this ledger says private. Make it with seeded=True.")


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


def _norm_bound(total: BoundedSum) -> Bound:
    if not isinstance(total.bound, Bound):
        raise InputError("losses are for a choice; noise is added to sums of clipped contributions alone.")
    return total.bound


def _plan(bound: Bound, mu_squared: float, relation: Relation) -> _Plan:
    step = grid_step(bound.norm)
    plan = _Plan(step, bound.sensitivity(relation) + rounding(bound), noise_multiplier(mu_squared))
    if not 2.0**20 <= plan.sigma / step <= WIDEST:
        raise InputError(f"a noise multiplier of {plan.multiplier:g} is out of range; change the share of the budget.")
    return plan


def _noisy(total: BoundedSum, plan: _Plan, noise: NoiseSource, name: str) -> Release:
    integers = to_grid(total.total, plan.step) + noise(name, plan.sigma / plan.step, total.bound.size)
    return Release(integers.astype(np.float64) * plan.step, plan.sigma, plan.sensitivity, plan.multiplier)


@dataclass(frozen=True)
class Run:
    """A private computation under way: where the users live, the budget, the public record, the noise.

    `ask`, `select` and `choose` are the only doors: one pass over the users, charged, released and posted as one page.
    A page that stands on the billboard is read from there: a resumed run repeats no pass and spends nothing twice.
    """

    users: Users
    ledger: Ledger
    billboard: Billboard
    noise: NoiseSource
    on_page: Callable[[str], None] = lambda page: None

    def ask(
        self, page: str, step: LocalStep, queries: Mapping[str, Query], group: Group | None = None
    ) -> dict[str, Release]:
        """Several statistics of one pass over the users, or over those of one group, whom alone it then costs."""
        _check_name(page)
        events = events_of(page, queries, group)
        if page not in self.billboard:
            bounds = {key: query.bound for key, query in queries.items()}
            sums = (
                self.users.bounded_sums(step, bounds)
                if group is None
                else self.users.bounded_sums(step, bounds, group=group)
            )
            released = release(sums, queries, self.ledger, self.noise, page, group)
            self.billboard.post_releases(page, released, simulation=self.ledger.seeded)
        self.ledger.posted(page, events)
        released = self.billboard.releases(page)
        for key, query in queries.items():
            _check_page(page, released.get(key), query.bound, query.bound.size, self.ledger)
        if released.keys() != queries.keys():
            raise ResumeError(f"page {page!r} answers another question. Use another folder.")
        self.on_page(page)
        return released

    def select(self, page: str, holders: Holders, mu_squared: float, delta: float) -> tuple[Key, ...]:
        """`select_page` on this run's ledger and billboard. The users of `holders` are those of the run."""
        keys = select_page(page, holders, mu_squared, delta, self.ledger, self.billboard, self.noise)
        self.on_page(page)
        return keys

    def choose(self, page: str, step: LocalStep, candidates: int, epsilon: float) -> int:
        """The index of one of many candidates: the smaller its loss, summed over all users, the likelier.

        `step` returns {"losses": Losses}, the loss in [0, 1] of each user by each candidate. It costs epsilon, with no
        delta. Choose before splitting what `ledger.capacity` then says. A page that stands is read, as in `ask`.
        """
        _check_name(page)
        candidates, epsilon = int(candidates), float(epsilon)
        bound, events = LossBound(candidates), choice_events(page, epsilon)
        scale = scale_in_levels(bound, epsilon, self.ledger.budget.relation) / LEVELS
        if page not in self.billboard:
            losses = self.users.bounded_sums(step, {"losses": bound})["losses"]
            choice = choose(losses, epsilon, self.ledger, self.noise, page)
            self.billboard.post_choice(page, choice, simulation=self.ledger.seeded)
        self.ledger.posted(page, events)
        choice = self.billboard.choice(page)
        if choice != Choice(choice.index, candidates, epsilon, scale) or not 0 <= choice.index < candidates:
            raise ResumeError(f"page {page!r} answers another question. Use another folder.")
        self.on_page(page)
        return choice.index

    def derive(self, page: str, arrays: Mapping[str, Array], **facts: float | int | str | bool | list[float]) -> None:
        """Post what was computed from the billboard and public facts."""
        arrays = {key: np.asarray(value) for key, value in arrays.items()}
        self.billboard.post_derived(page, arrays, facts, simulation=self.ledger.seeded)


def select_page(
    page: str,
    holders: Holders,
    mu_squared: float,
    delta: float,
    ledger: Ledger,
    billboard: Billboard,
    noise: NoiseSource,
) -> tuple[Key, ...]:
    """The keys that enough users hold, sorted; `delta` of the run's delta is set aside for the others.

    Select before splitting what `ledger.capacity` then says. The keys' noisy counts are on the page:
    `billboard.selected(page)`. A page that stands is read, as in `Run.ask`.
    """
    _check_name(page)
    _check_share(mu_squared)
    if page not in billboard:
        selected = select(holders, mu_squared, delta, ledger, noise, page)
        billboard.post_selection(page, selected, simulation=ledger.seeded)
    ledger.posted(page, selection_events(page, mu_squared, delta))
    selected = billboard.selected(page)
    _check_page(page, selected.counts, COUNTED, len(selected.keys), ledger)
    return selected.keys


def _check_page(page: str, released: Release | None, bound: Bound, size: int, ledger: Ledger) -> None:
    """Whether a page that stands answers this very question."""
    wanted = bound.sensitivity(ledger.budget.relation) + rounding(bound)
    if (
        released is None
        or released.value.shape != (size,)
        or not math.isclose(released.sensitivity, wanted, rel_tol=1e-6)
    ):
        raise ResumeError(f"page {page!r} answers another question. Use another folder.")


def _check_share(mu_squared: float) -> None:
    if not (mu_squared > 0 and math.isfinite(mu_squared)):
        raise InputError(
            f"a release must spend a positive part of the budget. Got {mu_squared} of mu^2 instead. (A budget of delta "
            "0 has none: it pays for choices alone.)"
        )


def _check_name(page: str) -> None:
    if not re.fullmatch(r"[A-Za-z0-9_-]+", page):
        raise InputError(f"a page is named with letters, digits, - and _. Got {page!r} instead.")
