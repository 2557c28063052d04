"""From bounded sums to the billboard: charge, then draw, then post. No other way leads from private to public."""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass

import numpy as np

from privrep.data.groups import Group
from privrep.engines.base import LocalStep, SlotStep, Users
from privrep.engines.slots import slots_of
from privrep.errors import InputError, ResumeError
from privrep.privacy.accounting import Gaussian, Relation, Sampled, Selection
from privrep.privacy.billboard import Billboard, Choice, Release, Selected
from privrep.privacy.bounds import FLOAT_SLACK, LEVELS, Array, Bound, BoundedSum, LossBound
from privrep.privacy.exponential import choice_events, scale_in_levels
from privrep.privacy.ledger import Ledger, noise_multiplier
from privrep.privacy.noise import WIDEST, NoiseSource, grid_step, to_grid
from privrep.privacy.sampling import Poisson
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


def release_about_sample(
    users: Users,
    step: LocalStep | SlotStep,
    queries: Mapping[str, Query],
    sampling: Poisson,
    ledger: Ledger,
    noise: NoiseSource,
    page: str,
) -> dict[str, Release]:
    """Charge the ledger, draw the key of a sample, pass over its members, then add noise to each bounded sum.

    Formal guarantee: the releases are together what `privacy.loss_distributions` proves of the one event charged. If
    the charge does not fit, no key is drawn. The key and who was in stay in this function; a run that was stopped in it
    draws another key, and nobody has seen anything of the first.
    """
    _check_noise(noise, ledger)
    relation = ledger.budget.relation
    plan = {key: _plan(query.bound, query.mu_squared, relation, sampled=True) for key, query in queries.items()}
    ledger.charge(sample_events(page, queries, sampling, relation))
    bounds = {key: query.bound for key, query in queries.items()}
    sums = users.bounded_sums(step, bounds, sample=sampling.sample(noise.key(page)))
    if any(sums[key].bound != bound for key, bound in bounds.items()):
        raise InputError("the sums over a sample were clipped to another bound; nothing was released.")
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


def sample_events(
    page: str, queries: Mapping[str, Query], sampling: Poisson, relation: Relation
) -> dict[str, Gaussian | Sampled]:
    """One event for all statistics of a page: they are about one sample, see `privacy.sampling`."""
    together = math.fsum(query.mu_squared for query in queries.values())
    return {f"{page}/{'+'.join(queries)}": sampling.event(together, relation)}


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


def sensitivity_of(bound: Bound, relation: Relation, sampled: bool) -> float:
    """How far the totals of neighbours are apart, on the grid.

    About a sample: under replace-one-user twice how far a user moves a total by being in it, as the proof of
    `privacy.loss_distributions` asks. Acute bounds gain nothing there.
    """
    if not sampled:
        return bound.sensitivity(relation) + rounding(bound)
    moved = bound.norm * (1 + FLOAT_SLACK) + rounding(bound)
    return 2 * moved if relation == "replace-one-user" else moved


def _plan(bound: Bound, mu_squared: float, relation: Relation, sampled: bool = False) -> _Plan:
    step = grid_step(bound.norm)
    plan = _Plan(step, sensitivity_of(bound, relation, sampled), noise_multiplier(mu_squared))
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
        self,
        page: str,
        step: LocalStep | SlotStep,
        queries: Mapping[str, Query],
        group: Group | None = None,
        sampling: Poisson | None = None,
    ) -> dict[str, Release]:
        """Several statistics of one pass over the users, or over those of one group, whom alone it then costs, or over
        a secret sample, which costs everyone less. A pass about a sample that fails has been paid for."""
        _check_name(page)
        relation = self.ledger.budget.relation
        sampled = None if sampling is None or sampling.everyone else sampling
        _check_slots(step, relation, group, sampled)
        events: Mapping[str, Gaussian | Sampled] = (
            events_of(page, queries, group) if sampled is None else sample_events(page, queries, sampled, relation)
        )
        if page not in self.billboard:
            released = self._released(page, step, queries, group, sampled)
            self.billboard.post_releases(page, released, simulation=self.ledger.seeded)
        self.ledger.posted(page, events)
        released = self.billboard.releases(page)
        for key, query in queries.items():
            wanted = sensitivity_of(query.bound, relation, sampled is not None)
            _check_page(page, released.get(key), wanted, query.bound.size)
        if released.keys() != queries.keys():
            raise ResumeError(f"page {page!r} answers another question. Use another folder.")
        self.on_page(page)
        return released

    def _released(
        self,
        page: str,
        step: LocalStep | SlotStep,
        queries: Mapping[str, Query],
        group: Group | None,
        sampled: Poisson | None,
    ) -> dict[str, Release]:
        if sampled is not None:
            return release_about_sample(self.users, step, queries, sampled, self.ledger, self.noise, page)
        bounds = {key: query.bound for key, query in queries.items()}
        users = self.users
        sums = users.bounded_sums(step, bounds) if group is None else users.bounded_sums(step, bounds, group=group)
        return release(sums, queries, self.ledger, self.noise, page, group)

    def select(self, page: str, holders: Holders, mu_squared: float, delta: float) -> tuple[Key, ...]:
        """`select_page` on this run's ledger and billboard. The users of `holders` are those of the run."""
        keys = select_page(page, holders, mu_squared, delta, self.ledger, self.billboard, self.noise)
        self.on_page(page)
        return keys

    def choose(self, page: str, step: LocalStep | SlotStep, candidates: int, epsilon: float) -> int:
        """The index of one of many candidates: the smaller its loss, summed over all users, the likelier.

        `step` returns {"losses": Losses}, the loss in [0, 1] of each user by each candidate. It costs epsilon, with no
        delta. Choose before splitting what `ledger.capacity` then says. A page that stands is read, as in `ask`.
        """
        _check_name(page)
        candidates, epsilon = int(candidates), float(epsilon)
        bound, events = LossBound(candidates), choice_events(page, epsilon)
        scale = scale_in_levels(bound, epsilon, self.ledger.budget.relation) / LEVELS
        _check_slots(step, self.ledger.budget.relation)
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
    _check_page(page, selected.counts, sensitivity_of(COUNTED, ledger.budget.relation, False), len(selected.keys))
    return selected.keys


def _check_page(page: str, released: Release | None, sensitivity: float, size: int) -> None:
    """Whether a page that stands answers this very question."""
    if (
        released is None
        or released.value.shape != (size,)
        or not math.isclose(released.sensitivity, sensitivity, rel_tol=1e-6)
    ):
        raise ResumeError(f"page {page!r} answers another question. Use another folder.")


def _check_slots(
    step: LocalStep | SlotStep, relation: Relation, group: Group | None = None, sampled: Poisson | None = None
) -> None:
    """Whether the guarantee of `engines.slots`, which samples rest on, holds for this question."""
    slots = slots_of(step)
    if slots is not None and relation != "replace-one-user":
        raise InputError("a step with slots goes by users' places, which shift when one comes: use replace-one-user.")
    if sampled is not None and slots is None:
        raise InputError("a sample is asked by a step with slots. Give the step a public number of rows a user.")
    if sampled is not None and group is not None:
        raise InputError("a sample is of all users. Ask a group or a sample, not both.")


def _check_share(mu_squared: float) -> None:
    if not (mu_squared > 0 and math.isfinite(mu_squared)):
        raise InputError(
            f"a release must spend a positive part of the budget. Got {mu_squared} of mu^2 instead. (A budget of delta "
            "0 has none: it pays for choices alone.)"
        )


def _check_name(page: str) -> None:
    if not re.fullmatch(r"[A-Za-z0-9_-]+", page):
        raise InputError(f"a page is named with letters, digits, - and _. Got {page!r} instead.")
