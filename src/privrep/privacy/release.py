"""From bounded sums to the billboard: charge, then draw, then post. No other way leads from private to public."""

from __future__ import annotations

from collections.abc import Callable, Mapping

import numpy as np

from privrep.errors import InputError
from privrep.privacy.billboard import Choice, Iterated, Release, Selected
from privrep.privacy.bounds import LEVELS, Bound, BoundedSum, LossBound
from privrep.privacy.calibration import (
    Calibration,
    Query,
    calibrate,
    check_batches,
    check_step,
    events_of,
    iteration_events,
    sample_events,
    selection_events,
)
from privrep.privacy.exponential import choice_events, scale_in_levels
from privrep.privacy.groups import Group
from privrep.privacy.ledger import Ledger
from privrep.privacy.noise import NoiseSource, to_grid
from privrep.privacy.protocol import EVERYONE, Everyone, Step, Users
from privrep.privacy.sampling import Sampling
from privrep.privacy.selection import COUNTED, Holders, counts_bound, log_chance, threshold
from privrep.typing import Array

State = dict[str, Array]


def release(
    sums: Mapping[str, BoundedSum],
    queries: Mapping[str, Query],
    ledger: Ledger,
    noise: NoiseSource,
    page: str,
    among: Everyone | Group = EVERYONE,
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
    ledger.charge(events_of(page, queries, among))
    return {key: _noisy(sums[key], planned, noise, f"{page}/{key}") for key, planned in plan.items()}


def release_about_sample(
    users: Users,
    step: Step,
    queries: Mapping[str, Query],
    among: Sampling,
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
    check_batches(among, relation, users.facts.users)
    plan = {key: calibrate(query.bound, query.mu_squared, relation, among) for key, query in queries.items()}
    ledger.charge(sample_events(page, queries, among, relation))
    return _drawn(users, step, queries, plan, among, noise, page)


def _drawn(
    users: Users,
    step: Step,
    queries: Mapping[str, Query],
    plan: Mapping[str, Calibration],
    among: Everyone | Sampling,
    noise: NoiseSource,
    name: str,
) -> dict[str, Release]:
    """Noisy sums over a new sample, or over everyone; paid for by who calls this."""
    bounds = {key: query.bound for key, query in queries.items()}
    sums = users.sums(step, bounds, among if isinstance(among, Everyone) else among.sample(noise.key(name)))
    if any(sums[key].bound != bound for key, bound in bounds.items()):
        raise InputError("the sums over a sample were clipped to another bound; nothing was released.")
    return {key: _noisy(sums[key], planned, noise, f"{name}/{key}") for key, planned in plan.items()}


def release_iterated(
    users: Users,
    steps: int,
    start: Mapping[str, Array],
    make_step: Callable[[State], Step],
    queries: Mapping[str, Query],
    update: Callable[[State, dict[str, Release]], State],
    among: Everyone | Sampling,
    ledger: Ledger,
    noise: NoiseSource,
    page: str,
    on_step: Callable[[int], None],
) -> Iterated:
    """Charge the ledger for all steps, then take them: each draws a key, passes, clips, adds noise, and moves on.

    Formal guarantee: each step's question is made of the releases before it and of public facts, so the steps compose
    as the one event charged says, `count` of them. The charge is on record before the first key is drawn. The walk
    returns where it ended, a function of its releases; nothing else of it is kept. One that was stopped on its way is
    taken anew from the start, with new keys and new noise, and nobody has seen anything of the first. `make_step` and
    `update` see releases before they are posted: they must keep nothing of them. If one of them fails, it may be for
    what was drawn: the walk is abandoned, its charge stands, and it is never taken again.
    """
    _check_noise(noise, ledger)
    relation = ledger.budget.relation
    check_batches(among, relation, users.facts.users)
    plan = {key: calibrate(query.bound, query.mu_squared, relation, among) for key, query in queries.items()}
    bounds = [query.bound for query in queries.values()]
    state = {key: np.array(value, dtype=np.float64) for key, value in start.items()}
    step = make_step(state)
    check_step(step, bounds, relation, among)
    ledger.charge(iteration_events(page, queries, among, relation, steps))
    for number in range(steps):
        released = _drawn(users, step, queries, plan, among, noise, f"{page}/{number}")
        try:
            state = update(state, released)
            _check_state(state, start)
            if number + 1 < steps:
                step = make_step(state)
                check_step(step, bounds, relation, among)
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
    least = threshold(plan.sigma, log_chance(delta, ledger.budget.epsilon))
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
    if noise.seeded and not ledger.seeded:
        raise InputError("seeded noise is a simulation, and this ledger says private. Make it with seeded=True.")


def _norm_bound(total: BoundedSum) -> Bound:
    if not isinstance(total.bound, Bound):
        raise InputError("losses are for a choice; noise is added to sums of clipped contributions alone.")
    return total.bound


def _noisy(total: BoundedSum, plan: Calibration, noise: NoiseSource, name: str) -> Release:
    integers = to_grid(total.total, plan.step) + noise(name, plan.sigma / plan.step, total.bound.size)
    return Release(integers.astype(np.float64) * plan.step, plan.sigma, plan.sensitivity, plan.multiplier)
