"""From bounded sums to the billboard: charge, then draw, then post. No other way leads from private to public."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass

import numpy as np

from privrep.errors import InputError
from privrep.privacy.accounting import Batched, Gaussian, Sampled
from privrep.privacy.billboard import Billboard, Choice, Iterated, Release, Selected
from privrep.privacy.bounds import LEVELS, Bound, BoundedSum, LossBound
from privrep.privacy.calibration import (
    Calibration,
    another_question,
    calibrate,
    check_batches,
    check_name,
    check_page,
    check_share,
    check_step,
    events_of,
    sample_events,
    selection_events,
    sensitivity_of,
)
from privrep.privacy.calibration import Query as Query
from privrep.privacy.exponential import choice_events, scale_in_levels
from privrep.privacy.groups import Group
from privrep.privacy.ledger import Ledger
from privrep.privacy.node_noise import is_noisy, release_by_machines
from privrep.privacy.noise import NoiseSource, to_grid
from privrep.privacy.sampling import Fixed, Poisson, Sampling
from privrep.privacy.selection import COUNTED, Holders, Key, chance, counts_bound, threshold
from privrep.typing import Array
from privrep.users.summing import LocalStep, SlotStep, Users

State = dict[str, Array]


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
    plan = {key: calibrate(_norm_bound(sums[key]), query.mu_squared, relation) for key, query in queries.items()}
    ledger.charge(events_of(page, queries, group))
    return {key: _noisy(sums[key], planned, noise, f"{page}/{key}") for key, planned in plan.items()}


def release_about_sample(
    users: Users,
    step: LocalStep | SlotStep,
    queries: Mapping[str, Query],
    sampling: Sampling,
    ledger: Ledger,
    noise: NoiseSource,
    page: str,
) -> dict[str, Release]:
    """Charge the ledger, draw the key of a sample, pass over its members, then add noise to each bounded sum.

    Formal guarantee: the releases are together what `privacy.loss_distributions` or `privacy.batches` proves of the one
    event charged. If the charge does not fit, no key is drawn. The key and who was in stay in here; a run that was
    stopped in it draws another key, and nobody has seen anything of the first.
    """
    _check_noise(noise, ledger)
    relation = ledger.budget.relation
    check_batches(sampling, relation, users.count)
    plan = {key: calibrate(query.bound, query.mu_squared, relation, sampling) for key, query in queries.items()}
    ledger.charge(sample_events(page, queries, sampling, relation))
    return _drawn(users, step, queries, plan, sampling, noise, page)


def _drawn(
    users: Users,
    step: LocalStep | SlotStep,
    queries: Mapping[str, Query],
    plan: Mapping[str, Calibration],
    sampling: Sampling | None,
    noise: NoiseSource,
    name: str,
) -> dict[str, Release]:
    """Noisy sums over a new sample, or over everyone; paid for by who calls this."""
    bounds = {key: query.bound for key, query in queries.items()}
    sample = None if sampling is None else sampling.sample(noise.key(name))
    sums = users.bounded_sums(step, bounds) if sample is None else users.bounded_sums(step, bounds, sample=sample)
    if any(sums[key].bound != bound for key, bound in bounds.items()):
        raise InputError("the sums over a sample were clipped to another bound; nothing was released.")
    return {key: _noisy(sums[key], planned, noise, f"{name}/{key}") for key, planned in plan.items()}


def release_iterated(
    users: Users,
    steps: int,
    start: Mapping[str, Array],
    question: Callable[[State], LocalStep | SlotStep],
    queries: Mapping[str, Query],
    move: Callable[[State, dict[str, Release]], State],
    sampling: Sampling | None,
    ledger: Ledger,
    noise: NoiseSource,
    page: str,
    on_step: Callable[[int], None],
) -> Iterated:
    """Charge the ledger for all steps, then take them: each draws a key, passes, clips, adds noise, and moves on.

    Formal guarantee: each step's question is made of the releases before it and of public facts, so the steps compose
    as the one event charged says, `count` of them. The charge is on record before the first key is drawn. The walk
    returns where it ended, a function of its releases; nothing else of it is kept. One that was stopped on its way is
    taken anew from the start, with new keys and new noise, and nobody has seen anything of the first. `question` and
    `move` see releases before they are posted: they must keep nothing of them. If one of them fails, it may be for what
    was drawn: the walk is abandoned, its charge stands, and it is never taken again.
    """
    _check_noise(noise, ledger)
    relation = ledger.budget.relation
    check_batches(sampling, relation, users.count)
    plan = {key: calibrate(query.bound, query.mu_squared, relation, sampling) for key, query in queries.items()}
    bounds = [query.bound for query in queries.values()]
    state = {key: np.array(value, dtype=np.float64) for key, value in start.items()}
    step = question(state)
    check_step(step, bounds, relation, sampling=sampling)
    ledger.charge(sample_events(page, queries, sampling or Poisson(1), relation, steps))
    for number in range(steps):
        released = _drawn(users, step, queries, plan, sampling, noise, f"{page}/{number}")
        try:
            state = move(state, released)
            _check_state(state, start)
            if number + 1 < steps:
                step = question(state)
                check_step(step, bounds, relation, sampling=sampling)
        except Exception:
            ledger.abandoned(page)
            raise
        on_step(number + 1)
    return _iterated(steps, state, queries, plan)


def _check_state(state: Mapping[str, Array], start: Mapping[str, Array]) -> None:
    if {key: np.shape(value) for key, value in state.items()} != {key: np.shape(value) for key, value in start.items()}:
        raise InputError("a step of a walk must leave the same names and shapes of public numbers that it began with.")


def _iterated(
    steps: int, state: Mapping[str, Array], queries: Mapping[str, Query], plan: Mapping[str, Calibration]
) -> Iterated:
    noise = {
        key: {
            "size": float(queries[key].bound.size),
            "sigma": planned.sigma,
            "sensitivity": planned.sensitivity,
            "noise_multiplier": planned.multiplier,
        }
        for key, planned in plan.items()
    }
    return Iterated(steps, {key: np.asarray(value, dtype=np.float64) for key, value in state.items()}, noise)


def select(
    holders: Holders, mu_squared: float, delta: float, ledger: Ledger, noise: NoiseSource, page: str
) -> Selected:
    """Charge the ledger, then add noise to the count of each key and keep the keys above the threshold.

    Formal guarantee: that of `privacy.selection`, with `delta` the part of the run's delta that is set aside for it.
    Nothing of a key below the threshold leaves this function.
    """
    _check_noise(noise, ledger)
    plan = calibrate(COUNTED, mu_squared, ledger.budget.relation)
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


def _check_noise(noise: NoiseSource, ledger: Ledger) -> None:
    if getattr(noise, "seeded", False) and not ledger.seeded:
        raise InputError("seeded noise is a simulation, and this ledger says private. Make it with seeded=True.")


def _norm_bound(total: BoundedSum) -> Bound:
    if not isinstance(total.bound, Bound):
        raise InputError("losses are for a choice; noise is added to sums of clipped contributions alone.")
    return total.bound


def _noisy(total: BoundedSum, plan: Calibration, noise: NoiseSource, name: str) -> Release:
    integers = to_grid(total.total, plan.step) + noise(name, plan.sigma / plan.step, total.bound.size)
    return Release(integers.astype(np.float64) * plan.step, plan.sigma, plan.sensitivity, plan.multiplier)


@dataclass(frozen=True)
class Run:
    """A private computation under way: where the users live, the budget, the public record, the noise.

    `release`, `select` and `choose` are the only doors: one pass over the users, charged, released and posted as one
    page. A page that stands on the billboard is read from there: a resumed run repeats no pass and spends nothing
    twice.
    """

    users: Users
    ledger: Ledger
    billboard: Billboard
    noise: NoiseSource
    on_page: Callable[[str], None] = lambda page: None

    def release(
        self,
        page: str,
        step: LocalStep | SlotStep,
        queries: Mapping[str, Query],
        group: Group | None = None,
        sampling: Sampling | None = None,
    ) -> dict[str, Release]:
        """Several statistics of one pass over the users, or over those of one group, whom alone it then costs, or over
        a secret sample, which costs everyone less. A pass about a sample that fails has been paid for."""
        check_name(page)
        relation = self.ledger.budget.relation
        sampled = self._sampled(sampling)
        check_step(step, [query.bound for query in queries.values()], relation, group, sampled)
        events: Mapping[str, Gaussian | Sampled | Batched] = (
            events_of(page, queries, group) if sampled is None else sample_events(page, queries, sampled, relation)
        )
        if page not in self.billboard:
            released = self._released(page, step, queries, group, sampled)
            self.billboard.post_releases(page, released, simulation=self.ledger.seeded)
        self.ledger.posted(page, events)
        released = self.billboard.releases(page)
        for key, query in queries.items():
            wanted = sensitivity_of(query.bound, relation, sampled)
            check_page(page, released.get(key), wanted, query.bound.size)
        if released.keys() != queries.keys():
            raise another_question(page)
        self.on_page(page)
        return released

    def _released(
        self,
        page: str,
        step: LocalStep | SlotStep,
        queries: Mapping[str, Query],
        group: Group | None,
        sampled: Sampling | None,
    ) -> dict[str, Release]:
        if is_noisy(self.users):
            if sampled is not None:
                raise InputError(
                    "who asks for a sample knows it, so machines that add the noise are all asked: rate 1."
                )
            return release_by_machines(self.users, step, queries, self.ledger, page, group)
        if sampled is not None:
            return release_about_sample(self.users, step, queries, sampled, self.ledger, self.noise, page)
        self.ledger.check_affordable(events_of(page, queries, group))
        bounds = {key: query.bound for key, query in queries.items()}
        users = self.users
        sums = users.bounded_sums(step, bounds) if group is None else users.bounded_sums(step, bounds, group=group)
        return release(sums, queries, self.ledger, self.noise, page, group)

    def _sampled(self, sampling: Sampling | None) -> Sampling | None:
        """None if everyone is asked."""
        if isinstance(sampling, Fixed):
            check_batches(sampling, self.ledger.budget.relation, self.users.count)
        return None if sampling is None or sampling.everyone else sampling

    def iterate(
        self,
        page: str,
        steps: int,
        start: Mapping[str, Array],
        question: Callable[[State], LocalStep | SlotStep],
        queries: Mapping[str, Query],
        move: Callable[[State, dict[str, Release]], State],
        sampling: Sampling | None = None,
        on_step: Callable[[int], None] = lambda number: None,
    ) -> State:
        """Many small passes, each about a new sample or about everyone, under one charge and on one page: training.

        From the public state `start`, `question` makes the step of a pass and `move` the next state, which has the same
        names and shapes, of public numbers alone. The last state is what is posted and returned. `mu_squared` of a
        query is what one step spends on it. A page that stands is read, as in `release`. `on_step` hears how many steps
        were taken, and nobody hears more before the end.
        """
        check_name(page)
        if is_noisy(self.users):
            raise InputError("a walk's steps are seen by nobody on their way: it is for users whose sums are exact.")
        relation, sampled = self.ledger.budget.relation, self._sampled(sampling)
        events = sample_events(page, queries, sampled or Poisson(1), relation, steps)
        if page not in self.billboard:
            asked = (steps, start, question, queries, move, sampled)
            walk = release_iterated(self.users, *asked, self.ledger, self.noise, page, on_step)
            self.billboard.post_iterated(page, walk, simulation=self.ledger.seeded)
        self.ledger.posted(page, events)
        walk = self.billboard.iterated(page)
        shapes = {key: np.shape(value) for key, value in start.items()}
        if walk.steps != steps or {key: value.shape for key, value in walk.state.items()} != shapes:
            raise another_question(page)
        for key, query in queries.items():
            facts, wanted = walk.noise.get(key, {}), sensitivity_of(query.bound, relation, sampled)
            if facts.get("size") != query.bound.size or not math.isclose(facts["sensitivity"], wanted, rel_tol=1e-6):
                raise another_question(page)
        self.on_page(page)
        return dict(walk.state)

    def select(self, page: str, holders: Holders, mu_squared: float, delta: float) -> tuple[Key, ...]:
        """`select_page` on this run's ledger and billboard. The users of `holders` are those of the run."""
        keys = select_page(page, holders, mu_squared, delta, self.ledger, self.billboard, self.noise)
        self.on_page(page)
        return keys

    def choose(self, page: str, step: LocalStep | SlotStep, candidates: int, epsilon: float) -> int:
        """The index of one of many candidates: the smaller its loss, summed over all users, the likelier.

        `step` returns {"losses": Losses}, the loss in [0, 1] of each user by each candidate. It costs epsilon, with no
        delta. Choose before splitting what `ledger.capacity` then says. A page that stands is read, as in `release`.
        """
        check_name(page)
        candidates, epsilon = int(candidates), float(epsilon)
        bound, events = LossBound(candidates), choice_events(page, epsilon)
        scale = scale_in_levels(bound, epsilon, self.ledger.budget.relation) / LEVELS
        check_step(step, [bound], self.ledger.budget.relation)
        if page not in self.billboard:
            losses = self.users.bounded_sums(step, {"losses": bound})["losses"]
            choice = choose(losses, epsilon, self.ledger, self.noise, page)
            self.billboard.post_choice(page, choice, simulation=self.ledger.seeded)
        self.ledger.posted(page, events)
        choice = self.billboard.choice(page)
        if choice != Choice(choice.index, candidates, epsilon, scale) or not 0 <= choice.index < candidates:
            raise another_question(page)
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
    `billboard.selected(page)`. A page that stands is read, as in `Run.release`.
    """
    check_name(page)
    check_share(mu_squared)
    if page not in billboard:
        selected = select(holders, mu_squared, delta, ledger, noise, page)
        billboard.post_selection(page, selected, simulation=ledger.seeded)
    ledger.posted(page, selection_events(page, mu_squared, delta))
    selected = billboard.selected(page)
    check_page(page, selected.counts, sensitivity_of(COUNTED, ledger.budget.relation), len(selected.keys))
    return selected.keys
