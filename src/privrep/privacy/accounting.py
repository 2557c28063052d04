"""The price of releases: `privacy.events` are data, and this module interprets them.

Formal guarantee for groups (parallel composition). Neighbours, under either relation, differ in one user. That user's
groups are fixed by its id (`groups`), the same in both populations.
* A release to another group of a split is the same function of both populations and of the earlier releases. For that
  user it is post-processing, however it was chosen.
* The other releases are to all users or to the user's own groups. They compose, chosen adaptively or not:
  their mu^2 add up.
* GDP is ordered by mu alone, so the worst user is the one with the largest sum. Hence, for every user,
      mu^2 of a run = sum over releases to all + sum over splits of the largest sum of any one group.
* With one split this is exact. With several it is an upper bound, in case some user is in all worst groups.
* Pure and sampled releases are to all users. Beside them, too, a larger mu is worse. `privacy.composition` prices
  Gaussian and pure releases together, `privacy.loss_distributions` prices both beside sampled ones.
* If a user were replaced by one with another id, two groups would change, each by what one user adds. That is at most
  1/sqrt(2) of the move that replacing makes. Half the sum of two groups is at most the larger, so it costs no more.
  (The rounding onto the grid is left out here. It does not arise where ids stay the same.)
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable, Sequence
from functools import reduce
from itertools import chain

from scipy.optimize import brentq
from scipy.special import log_ndtr

from privrep.errors import InputError
from privrep.privacy.composition import compose_epsilon, composition_fits, find_largest_mu
from privrep.privacy.events import Batched, Event, Gaussian, Noisy, Pure, Sampled, Selection
from privrep.privacy.loss_distributions import Draw, Spending

CLOSED_FORM = "Gaussian differential privacy, closed form (exact composition of full-participation Gaussian releases)"
SAMPLED = (
    "privacy loss distributions, rounded up (Gaussian releases about secret samples of the users, composed "
    "numerically with all others)"
)
PURE = "closed form of pure releases (exact composition; at a delta of 0, their epsilons added up)"
MIXED = "closed form of Gaussian and pure releases (exact composition; a pure one is at worst a randomised response)"


def check_budget(epsilon: float, delta: float) -> None:
    """Raise InputError unless epsilon is at least LEAST_EPSILON and delta lies strictly between 0 and 1."""
    check_epsilon(epsilon)
    if not 0 < delta < 1:
        raise InputError(f"delta must lie strictly between 0 and 1 (1e-6 is usual). Got {delta} instead.")


LARGEST_READ = 1e9  # epsilon of a budget in a file, far beyond any that promises something
LEAST_EPSILON = 1e-4  # below, delta is a difference of numbers that agree to many digits


def check_epsilon(epsilon: float) -> None:
    """Raise InputError unless epsilon is finite and at least LEAST_EPSILON."""
    if not LEAST_EPSILON <= epsilon < math.inf:
        raise InputError(f"epsilon must be a positive finite number, 0.0001 or more. Got {epsilon} instead.")


def check_plausible(events: Iterable[Event], epsilon: float, delta: float) -> None:
    """Raise ValueError if one event alone is over a budget: no ledger charges it, and to add it up may never end.

    Args:
        events: as a file has them.
        epsilon: of the budget.
        delta: of the budget; 0 for choices alone.
    """
    if epsilon > LARGEST_READ:
        raise ValueError(f"a budget of epsilon {epsilon:g} promises nothing")
    most = gaussian_mu(epsilon, delta) * (1 + 1e-6) if delta else 0.0
    for event in events:
        if isinstance(event, Pure):
            over = event.epsilon > epsilon * (1 + 1e-6)
        else:
            over = isinstance(event, Gaussian | Selection) and math.sqrt(event.count) > most * event.noise_multiplier
        if over:
            raise ValueError(f"one charge alone is over the budget of epsilon {epsilon:g}")


def gaussian_delta(epsilon: float, mu: float) -> float:
    """Return the smallest delta for which a mu-GDP mechanism is (epsilon, delta)-DP.

    The formula is exact, and stable in the far tail. It is due to Dong, Roth and Su (2022).
    """
    if mu <= 0:
        return 0.0
    log_a = float(log_ndtr(-epsilon / mu + mu / 2))
    log_b = epsilon + float(log_ndtr(-epsilon / mu - mu / 2))
    return 0.0 if log_b >= log_a else math.exp(log_a) * -math.expm1(log_b - log_a)


def gaussian_epsilon(delta: float, mu: float) -> float:
    """Return the smallest epsilon for which a mu-GDP mechanism is (epsilon, delta)-DP."""
    if gaussian_delta(0.0, mu) <= delta:
        return 0.0
    high = 1.0
    while gaussian_delta(high, mu) > delta:
        high *= 2
    return float(brentq(lambda e: _log_delta(e, mu) - math.log(delta), 0.0, high, xtol=1e-13, rtol=1e-12))


def gaussian_mu(epsilon: float, delta: float) -> float:
    """Return the largest mu for which a mu-GDP mechanism is (epsilon, delta)-DP.

    It is the whole budget of a run of Gaussian releases. It is rounded down by one part in 10^9, so that what is built
    from it never exceeds (epsilon, delta) in floating point.
    """
    check_budget(epsilon, delta)
    high = 1.0
    while gaussian_delta(epsilon, high) < delta:
        high *= 2
    low = high
    while gaussian_delta(epsilon, low) > delta:
        low /= 2
    root = brentq(lambda mu: _log_delta(epsilon, mu) - math.log(delta), low, high, xtol=1e-15, rtol=1e-12)
    return float(root) * (1 - 1e-9)


def _log_delta(epsilon: float, mu: float) -> float:
    """Return the logarithm of `gaussian_delta`, -1e6 where it underflows: root finding needs finite numbers."""
    value = gaussian_delta(epsilon, mu)
    return math.log(value) if value > 0 else -1e6


def total_mu(events: Iterable[Event]) -> float:
    """Return the mu of a whole run.

    Gaussian releases compose exactly: mu^2 is the sum of 1/noise_multiplier^2. Of the groups of a split only the
    costliest counts. Pure releases have no part in it.

    A sampled release counts as if everyone had been asked. It costs less than that, and no mu can say how much less:
    `compute_epsilon` does.
    """
    return math.sqrt(_add_up_mu_squared(_select_worst_user_events(events)))


def drop_sampled(events: Iterable[Event]) -> list[Event]:
    """Return all events that are not about samples."""
    return [event for event in events if not isinstance(event, Sampled | Batched)]


def collect_spending(events: Iterable[Event]) -> Spending | None:
    """Return everything spent as one `Spending` if there are sampled releases, else None.

    Closed forms do not know sampled releases.
    """
    known = [_check_known(event) for event in events]
    draws: Counter[Draw] = Counter()
    for event in known:
        if isinstance(event, Sampled | Batched):
            replaced = event.relation == "replace-one-user"
            batch_level = replaced and isinstance(event, Batched)  # under the other relation it costs what a sum does
            draws[Draw(event.noise_multiplier, event.rate, replaced, batch_level)] += event.count
    return (
        Spending(tuple(draws.items()), total_mu(drop_sampled(known)), tuple(list_pure_epsilons(known)))
        if draws
        else None
    )


def within_budget(events: Sequence[Event], epsilon: float, delta: float) -> bool:
    """Return whether all events together are (epsilon, delta)-DP.

    Args:
        events: in any order, which does not matter.
        epsilon: of the budget.
        delta: of the budget.
    """
    spent, pures, left = collect_spending(events), list_pure_epsilons(events), compute_delta_left(events, delta)
    if spent is not None:
        return spent.fits(epsilon, left)
    if pures:
        return composition_fits(epsilon, left, total_mu(events), pures)
    return total_mu(events) ** 2 <= (gaussian_mu(epsilon, left) ** 2 if left > 0 else 0.0) * (1 + 1e-12)


def list_pure_epsilons(events: Iterable[Event]) -> list[float]:
    """Return the epsilons of the pure releases among the events."""
    return [event.epsilon for event in map(_check_known, events) if isinstance(event, Pure)]


def compute_delta_left(events: Iterable[Event], delta: float) -> float:
    """Return the part of delta that selections leave to other releases; zero or less if they set aside all of it."""
    known = map(_check_known, events)
    return math.fsum([delta, *(-event.delta for event in known if isinstance(event, Selection))])


def compute_capacity(events: Sequence[Event], epsilon: float, delta: float) -> float:
    """Return the largest mu^2 of Gaussian releases that fit beside these events; 0 if no delta is left for them.

    Formal guarantee. Let delta_G be the delta that selections leave, and delta' as in `privacy.selection`. With mu^2
    within the answer,
    * the run is (epsilon, delta_G + (1 + e^epsilon) delta')-DP, and the second term is what selections set aside;
    * the order of charges does not matter, because all events are looked at together, pure ones included.

    Args:
        events: releases that are not Gaussian, and selections.
        epsilon: of the budget.
        delta: of the budget.
    """
    left, pures = compute_delta_left(events, delta), list_pure_epsilons(events)
    if left <= 0:
        return 0.0
    mu, sampled = gaussian_mu(epsilon, left), collect_spending(events)
    if sampled is not None:
        return sampled.find_largest_mu(epsilon, left, mu) ** 2
    return find_largest_mu(epsilon, left, pures, mu) ** 2 if pures else mu**2


def compute_epsilon(events: Sequence[Event], delta: float) -> float:
    """Return the epsilon of the composition of all events at this delta.

    It is exact by a closed form. Where there are sampled releases it is computed numerically and rounded up. It is
    infinite if no delta is left for Gaussian releases. Pure releases need none: at a delta of zero their epsilons add
    up.

    Formal guarantee:
    * A selection sets aside (1 + e^E) delta', for the epsilon E of its budget.
    * The composition is (epsilon, delta_G(epsilon) + (1 + e^epsilon) delta')-DP for every epsilon.
    * So the answer is valid if it is at most E: (1 + e^epsilon) delta' is then at most the part that was set aside. A
      ledger keeps every answer at most E.
    """
    left, pures, sampled = compute_delta_left(events, delta), list_pure_epsilons(events), collect_spending(events)
    if sampled is not None:
        return sampled.epsilon(left)
    if pures:
        return compose_epsilon(left, total_mu(events), pures)
    if not events:
        return 0.0
    return gaussian_epsilon(left, total_mu(events)) if left > 0 else math.inf


def compute_epsilon_by_pld(events: Sequence[Event], delta: float, interval: float = 1e-4) -> float:
    """Return the same epsilon by the privacy loss distributions of dp-accounting, which checks the closed forms.

    Losses are rounded up to multiples of `interval`: a larger one takes less time, and comes to more.

    With sampled releases it is the only accountant, and tests check it against quadrature.

    It accounts under dp-accounting's add/remove convention on purpose. Our multiplier is already relative to the
    sensitivity of the relation in force, and the REPLACE_ONE convention would double that sensitivity once more.
    """
    from dp_accounting.pld import privacy_loss_distribution as pld
    from dp_accounting.pld.common import DifferentialPrivacyParameters

    left = compute_delta_left(events, delta)
    if (sampled := collect_spending(events)) is not None:
        return sampled.epsilon(left)
    losses = [
        pld.from_gaussian_mechanism(event.noise_multiplier, value_discretization_interval=interval).self_compose(
            event.count
        )
        for event in _select_worst_user_events(events)
    ]
    losses += [
        pld.from_privacy_parameters(DifferentialPrivacyParameters(e, 0), value_discretization_interval=interval)
        for e in list_pure_epsilons(events)
    ]
    if not losses:
        return 0.0
    composed = reduce(lambda before, after: before.compose(after), losses)
    return float(composed.get_epsilon_for_delta(left)) if left > 0 else math.inf


def describe_accountant(events: Sequence[Event]) -> str:
    """Return a sentence on how these events were accounted for."""
    pure = [isinstance(event, Pure) for event in events]
    sampled = {event.rate: 0 for event in events if isinstance(event, Sampled | Batched)}
    for event in events:
        if isinstance(event, Sampled | Batched):
            sampled[event.rate] += event.count
    words = [SAMPLED if sampled else PURE if pure and all(pure) else MIXED if any(pure) else CLOSED_FORM]
    if sampled:
        many, rates = sum(sampled.values()), _format_range(list(sampled))
        words.append(f"{many} about samples, each user in one with probability {rates}")
    if any(isinstance(event, Gaussian) and event.group is not None for event in events):
        words.append("each user is in one group of a split, so that only the costliest group counts")
    aside = math.fsum(event.delta for event in events if isinstance(event, Selection))
    if aside:
        words.append(f"{aside:.3g} of delta is set aside for keys that only one user holds")
    return "; ".join(words)


def _format_range(rates: list[float]) -> str:
    """Return "low to high" of some rates, or the rate if there is one."""
    low, high = min(rates), max(rates)
    return f"{low:g}" if low == high else f"{low:g} to {high:g}"


def _select_worst_user_events(events: Iterable[Event]) -> list[Noisy]:
    """Return the events of noise that count for a user who is in the costliest group of every split.

    The module's guarantee says why no user pays more. Pure events are left out. Raise InputError if a split has several
    counts of groups.
    """
    to_all: list[Noisy] = []
    splits: dict[str, dict[int, list[Noisy]]] = {}
    counts: dict[str, int] = {}
    for event in map(_check_known, events):
        if isinstance(event, Pure):
            continue
        group = event.group if isinstance(event, Gaussian) else None
        if group is None:
            to_all.append(event)
        elif counts.setdefault(group.split, group.count) != group.count:
            raise InputError(
                f"split {group.split!r} has {counts[group.split]} groups in one release and {group.count} in another, "
                "so a user is in several of them. Give each split one count, or another name."
            )
        else:
            splits.setdefault(group.split, {}).setdefault(group.index, []).append(event)
    costliest = (max(groups.values(), key=_add_up_mu_squared) for groups in splits.values())
    return [*to_all, *chain.from_iterable(costliest)]


def _add_up_mu_squared(events: Iterable[Noisy]) -> float:
    """Return the sum of 1/noise_multiplier^2 over all releases of these events."""
    return math.fsum(event.count * event.noise_multiplier**-2 for event in events)


def _check_known(event: Event) -> Event:
    """Return the event. Raise InputError if no accountant understands it, so that it is never charged as free."""
    if not isinstance(event, Gaussian | Selection | Pure | Sampled | Batched):
        raise InputError(f"no accountant here understands the event {event!r}; it cannot be charged.")
    return event
