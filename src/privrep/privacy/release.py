"""The way from bounded sums to the billboard: charge, then draw, then post. No other leads from private to public."""

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
    price_iteration,
    price_release,
    price_sample,
    price_selection,
)
from privrep.privacy.exponential import compute_scale, price_choice
from privrep.privacy.groups import Group
from privrep.privacy.ledger import Ledger
from privrep.privacy.noise import NoiseSource
from privrep.privacy.protocol import EVERYONE, Everyone, Step, Users
from privrep.privacy.sampling import Sampling
from privrep.privacy.selection import COUNTED, Holders, compute_log_chance, compute_threshold, make_counts_bound
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

    Formal guarantee. Let mu_squared_q be the spending of query q.
    * Release q is sqrt(mu_squared_q)-GDP under the ledger's relation. Discrete noise differs from Gaussian noise by
      what `privacy.noise` says, and rounding mu down pays for that.
    * Hence all releases of a run together are (epsilon, delta)-DP as the ledger states.
    * The noise multiplier is relative to the sensitivity of the bounded sum under that relation, on the grid.
    * If the charge does not fit, nothing is drawn.
    * With a group, the sums must be over the users of that group alone.

    Args:
        sums: of users' clipped contributions, by statistic.
        queries: what each statistic spends.
        ledger: what it costs is charged there first.
        noise: source of the noise.
        page: name of the page.
        among: everyone, or the group that the sums are over.
    """
    _check_noise(noise, ledger)
    relation = ledger.budget.relation
    plan = {
        key: calibrate(_require_norm_bound(sums[key]), query.mu_squared, relation) for key, query in queries.items()
    }
    ledger.charge(price_release(page, queries, among))
    return {key: _add_noise(sums[key], planned, noise, f"{page}/{key}") for key, planned in plan.items()}


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

    Formal guarantee:
    * The releases are together what `privacy.loss_distributions` or `privacy.batches` proves of the one event charged.
    * If the charge does not fit, no key is drawn.
    * The key and the members stay in here. A run that was stopped in it draws another key, and nobody has seen anything
      of the first.

    Args:
        users: who may be in the sample.
        step: what users compute.
        queries: how each statistic is clipped, and what it spends.
        among: how the sample is drawn.
        ledger: what it costs is charged there first.
        noise: source of the key and the noise.
        page: name of the page.
    """
    _check_noise(noise, ledger)
    relation = ledger.budget.relation
    check_batches(among, relation, users.facts.users)
    plan = {key: calibrate(query.bound, query.mu_squared, relation, among) for key, query in queries.items()}
    ledger.charge(price_sample(page, queries, among, relation))
    return _release_sums(users, step, queries, plan, among, noise, page)


def _release_sums(
    users: Users,
    step: Step,
    queries: Mapping[str, Query],
    plan: Mapping[str, Calibration],
    among: Everyone | Sampling,
    noise: NoiseSource,
    name: str,
) -> dict[str, Release]:
    """Return noisy sums over a new sample, or over everyone. The caller has paid for them."""
    bounds = {key: query.bound for key, query in queries.items()}
    sums = users.sums(step, bounds, among if isinstance(among, Everyone) else among.sample(noise.draw_key(name)))
    if any(sums[key].bound != bound for key, bound in bounds.items()):
        raise InputError("the sums over a sample were clipped to another bound; nothing was released.")
    return {key: _add_noise(sums[key], planned, noise, f"{name}/{key}") for key, planned in plan.items()}


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

    Formal guarantee:
    * Each step's question is made of the releases before it and of public facts. So the steps compose as the one event
      charged says, `count` of them.
    * The charge is on record before the first key is drawn.
    * The iteration returns the state in which it ended, a function of its releases; nothing else of it is kept.
    * One that was stopped on its way is taken anew from the start, with new keys and new noise. Nobody has seen
      anything of the first.
    * `make_step` and `update` see releases before they are posted: they must keep nothing of them.
    * If one of them fails, the draws may be the reason. The iteration is then abandoned, its charge stands, and it is
      never taken again.

    Arguments are as in `Run.iterate`.
    """
    _check_noise(noise, ledger)
    relation = ledger.budget.relation
    check_batches(among, relation, users.facts.users)
    plan = {key: calibrate(query.bound, query.mu_squared, relation, among) for key, query in queries.items()}
    bounds = [query.bound for query in queries.values()]
    state = {key: np.array(value, dtype=np.float64) for key, value in start.items()}
    step = make_step(state)
    check_step(step, bounds, relation, among)
    ledger.charge(price_iteration(page, queries, among, relation, steps))
    for number in range(steps):
        released = _release_sums(users, step, queries, plan, among, noise, f"{page}/{number}")
        try:
            state = update(state, released)
            _check_state(state, start)
            if number + 1 < steps:
                step = make_step(state)
                check_step(step, bounds, relation, among)
        except Exception:
            ledger.record_abandoned(page)
            raise
        on_step(number + 1)
    return _make_iterated(steps, state, queries, plan)


def _check_state(state: Mapping[str, Array], start: Mapping[str, Array]) -> None:
    """Raise InputError unless a state has the names and shapes of the state that the iteration began with."""
    if {key: np.shape(value) for key, value in state.items()} != {key: np.shape(value) for key, value in start.items()}:
        raise InputError("a step of a walk must leave the same names and shapes of public numbers that it began with.")


def _make_iterated(
    steps: int, state: Mapping[str, Array], queries: Mapping[str, Query], plan: Mapping[str, Calibration]
) -> Iterated:
    """Return the end of an iteration and how noisy each statistic was at a step."""
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

    Formal guarantee:
    * It is the guarantee of `privacy.selection`, with `delta` the part of the run's delta that is set aside for it.
    * Nothing of a key below the threshold leaves this function.

    Args:
        holders: which user holds which keys.
        mu_squared: what the noisy counts spend.
        delta: what is set aside for keys that one user alone holds.
        ledger: what it costs is charged there first.
        noise: source of the noise.
        page: name of the page.
    """
    _check_noise(noise, ledger)
    plan = calibrate(COUNTED, mu_squared, ledger.budget.relation)
    least = compute_threshold(plan.sigma, compute_log_chance(delta, ledger.budget.epsilon))
    keys, counts = holders.private_keys, holders.count_keys(make_counts_bound(holders))
    if counts.bound != make_counts_bound(holders):
        raise InputError("the counts of a selection were clipped to another bound; nothing was released.")
    if not (set(map(type, keys)) <= {int} or set(map(type, keys)) <= {str}):
        raise InputError("keys must be all integers or all texts. Turn them into one or the other.")
    ledger.charge(price_selection(page, mu_squared, delta))
    noisy = _add_noise(counts, plan, noise, f"{page}/keys")
    kept = np.flatnonzero(noisy.value[: len(keys)] > least).tolist()
    named = sorted((keys[place], float(noisy.value[place])) for place in kept)
    values = np.array([count for _, count in named], dtype=np.float64)
    return Selected(
        tuple(key for key, _ in named), Release(values, noisy.sigma, noisy.sensitivity, noisy.noise_multiplier), least
    )


def choose(losses: BoundedSum, epsilon: float, ledger: Ledger, noise: NoiseSource, page: str) -> Choice:
    """Charge the ledger, then draw a candidate by the exponential mechanism: the smaller its loss, the likelier.

    Formal guarantee:
    * The choice is epsilon-DP under the ledger's relation, as `privacy.exponential` proves.
    * If the charge does not fit, nothing is drawn.
    * Nothing of the losses leaves this function but the index.

    Args:
        losses: of all users together, in levels, for each candidate.
        epsilon: what the choice spends.
        ledger: what it costs is charged there first.
        noise: source of the draw.
        page: name of the page.
    """
    _check_noise(noise, ledger)
    bound = losses.bound
    if not isinstance(bound, LossBound):
        raise InputError("a choice is made from losses, and these sums are none; nothing was chosen.")
    scale = compute_scale(bound, epsilon, ledger.budget.relation)
    events = price_choice(page, epsilon)
    totals = losses.total.astype(np.int64)
    ledger.charge(events)
    (name,) = events
    return Choice(noise.draw_choice(name, totals, scale), bound.size, epsilon, scale / LEVELS)


def _check_noise(noise: NoiseSource, ledger: Ledger) -> None:
    """Raise InputError if noise is simulated and the ledger says that the run is private."""
    if noise.seeded and not ledger.seeded:
        raise InputError("seeded noise is a simulation, and this ledger says private. Make it with seeded=True.")


def _require_norm_bound(total: BoundedSum) -> Bound:
    """Return the bound of a sum. Raise InputError if it is a sum of losses, to which no noise is added."""
    if not isinstance(total.bound, Bound):
        raise InputError("losses are for a choice; noise is added to sums of clipped contributions alone.")
    return total.bound


def _add_noise(total: BoundedSum, plan: Calibration, noise: NoiseSource, name: str) -> Release:
    """Return the total plus noise of the plan, both in whole steps of the grid."""
    integers = total.total + noise(name, plan.sigma / plan.step, total.bound.size)
    return Release(integers.astype(np.float64) * plan.step, plan.sigma, plan.sensitivity, plan.multiplier)
