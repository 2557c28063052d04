"""What releases cost: events are data, and this module interprets them.

The noise multiplier of an event is always *noise standard deviation / L2 sensitivity under the relation of the run*.
With that convention a Gaussian release has the same privacy loss under either relation, so composition never needs to
know the relation, and no accountant gets the chance to double (or forget to double) a sensitivity by itself.

Formal guarantee for groups (parallel composition). Neighbours, under either relation, differ in one user, and the
groups of that user are fixed by its id (`groups`), the same in both populations. A release to another group of a
split is the same function of both populations and of the earlier releases: for that user it is post-processing, however
it was chosen. What is left are the releases to all users and those to the user's own groups; they compose, chosen
adaptively or not, to mu^2 = the sum of theirs. GDP is ordered by mu alone, so the worst user is the one with the
largest sum, and
    mu^2 of a run = sum over releases to all + sum over splits of the largest sum of any one group
holds for every user. (Exact with one split; with several, an upper bound, in case some user is in all worst groups.)
Pure and sampled releases are to all users. Beside them, too, the larger mu is the worse: `privacy.composition` says
what Gaussian and pure ones cost together, and `privacy.loss_distributions` what they cost beside sampled ones.
Were a user replaced by one with another id, two groups would change, each by what one user adds: at most 1/sqrt(2) of
what replacing moves it by. Half the sum of two groups is at most the larger, so it costs no more (but for the rounding
onto the grid, which the ids staying the same spares).
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import reduce
from itertools import chain
from typing import Any, ClassVar, Literal, get_args

from scipy.optimize import brentq
from scipy.special import log_ndtr

from privrep.errors import InputError
from privrep.privacy.composition import composed_epsilon, composition_fits
from privrep.privacy.groups import Group
from privrep.privacy.loss_distributions import Draw, Spending

Relation = Literal["replace-one-user", "add-or-remove-one-user"]
RELATIONS: tuple[Relation, ...] = get_args(Relation)
CLOSED_FORM = "Gaussian differential privacy, closed form (exact composition of full-participation Gaussian releases)"
SAMPLED = (
    "privacy loss distributions, rounded up (Gaussian releases about secret samples of the users, composed "
    "numerically with all others)"
)
PURE = "closed form of pure releases (exact composition; at a delta of 0, their epsilons added up)"
MIXED = "closed form of Gaussian and pure releases (exact composition; a pure one is at worst a randomised response)"


@dataclass(frozen=True)
class Gaussian:
    """A release with Gaussian noise of `noise_multiplier` times its L2 sensitivity; it is (1/noise_multiplier)-GDP.

    With a `group`, only the users of that group were asked, and it costs the others nothing. With a `count` it is so
    many releases, chosen adaptively or not.
    """

    noise_multiplier: float
    group: Group | None = None
    count: int = 1

    def __post_init__(self) -> None:
        _check_multiplier(self.noise_multiplier)
        _check_count(self.count)


@dataclass(frozen=True)
class Selection:
    """A list of keys released by thresholding noisy counts, as `privacy.selection` says: (1/noise_multiplier)-GDP on
    the keys that others hold too, and `delta` of the run's delta for the keys that they do not."""

    count: ClassVar[int] = 1
    noise_multiplier: float
    delta: float

    def __post_init__(self) -> None:
        _check_multiplier(self.noise_multiplier)
        if not 0 < self.delta < 1:
            raise InputError(f"a selection sets a part of delta aside, between 0 and 1. Got {self.delta} instead.")


@dataclass(frozen=True)
class Pure:
    """A release to all users that is epsilon-DP, with no delta: a choice by the exponential mechanism."""

    count: ClassVar[int] = 1
    epsilon: float

    def __post_init__(self) -> None:
        if not (self.epsilon > 0 and math.isfinite(self.epsilon)):
            raise InputError(f"the epsilon of a choice must be positive and finite. Got {self.epsilon} instead.")


@dataclass(frozen=True)
class Sampled:
    """A release with Gaussian noise about a secret Poisson sample: every user is in it with probability `rate`.

    The multiplier is the noise over the sensitivity as if everyone were asked: 2C under replace-one-user, C otherwise.
    With a `count` it is so many releases, each about a sample of its own.
    """

    noise_multiplier: float
    rate: float
    relation: Relation
    count: int = 1

    def __post_init__(self) -> None:
        _check_sampled(self)


@dataclass(frozen=True)
class Batched:
    """A release with Gaussian noise about a secret batch, as `privacy.batches` says: a function of a whole Poisson
    sample, or anything about a batch of a fixed size that is the part `rate` of the users.

    The multiplier is the noise over the sensitivity of the release given the batch. With a `count` it is so many
    releases, each about a batch of its own.
    """

    noise_multiplier: float
    rate: float
    relation: Relation
    count: int = 1

    def __post_init__(self) -> None:
        _check_sampled(self)


Noisy = Gaussian | Selection | Sampled | Batched
Event = Noisy | Pure
MOST_RELEASES = 10**6  # of one event
LEAST_SAMPLED = 0.05  # less noise than this protects nobody, and its losses are too many to add up


def check_rate(rate: float) -> None:
    whole = isinstance(rate, int | float) and not isinstance(rate, bool)
    if not (whole and 2.0**-32 <= rate <= 1):
        raise InputError(f"a sampling rate is the probability to be asked, above 0 and up to 1. Got {rate!r} instead.")


def _check_sampled(event: Sampled | Batched) -> None:
    _check_multiplier(event.noise_multiplier)
    check_rate(event.rate)
    _check_count(event.count)
    if event.noise_multiplier < LEAST_SAMPLED:
        raise InputError(
            f"a release about a sample has a noise multiplier of {LEAST_SAMPLED} or more. Got "
            f"{event.noise_multiplier} instead; spend less on it."
        )
    if event.relation not in RELATIONS:
        raise InputError(f"relation must be one of {', '.join(RELATIONS)}. Got {event.relation!r} instead.")


def _check_count(count: int) -> None:
    if isinstance(count, bool) or not isinstance(count, int) or not 1 <= count <= MOST_RELEASES:
        raise InputError(f"one charge pays for 1 to {MOST_RELEASES:,} releases. Got {count!r} instead.")


def _check_multiplier(noise_multiplier: float) -> None:
    if not (noise_multiplier > 0 and math.isfinite(noise_multiplier)):
        raise InputError(f"noise_multiplier must be positive and finite. Got {noise_multiplier} instead.")


def event_to_json(event: Event) -> dict[str, Any]:
    if isinstance(event, Pure):
        return {"kind": "pure", "epsilon": event.epsilon}
    if isinstance(event, Selection):
        return {"kind": "selection", "noise_multiplier": event.noise_multiplier, "delta": event.delta}
    several = {"count": event.count} if event.count > 1 else {}
    if isinstance(event, Sampled | Batched):
        sampled = {"noise_multiplier": event.noise_multiplier, "rate": event.rate, "relation": event.relation}
        return {"kind": "sampled" if isinstance(event, Sampled) else "batched", **sampled, **several}
    group = event.group
    asked = {} if group is None else {"group": [group.split, int(group.index), int(group.count)]}
    kind = "gaussians" if several else "gaussian"  # a version that knows no counts then refuses it
    return {"kind": kind, "noise_multiplier": event.noise_multiplier, **asked, **several}


def event_from_json(data: Mapping[str, Any]) -> Event:
    kind, names, count = data.get("kind"), data.keys() - {"charge", "kind", "count"}, data.get("count", 1)
    if kind in ("gaussian", "gaussians") and (kind == "gaussians") == ("count" in data):
        group = Group(*data["group"]) if "group" in data else None
        return Gaussian(float(data["noise_multiplier"]), group, count)
    if kind == "selection":
        return Selection(float(data["noise_multiplier"]), float(data["delta"]))
    if kind == "pure":
        return Pure(float(data["epsilon"]))
    if kind in ("sampled", "batched") and names == {"noise_multiplier", "rate", "relation"}:
        fields = float(data["noise_multiplier"]), float(data["rate"]), data["relation"], count
        return Sampled(*fields) if kind == "sampled" else Batched(*fields)
    raise InputError(f"unknown privacy event {kind!r}: this version of privrep cannot account for it.")


def check_budget(epsilon: float, delta: float) -> None:
    """Refuse budgets that mean nothing."""
    check_epsilon(epsilon)
    if not 0 < delta < 1:
        raise InputError(f"delta must lie strictly between 0 and 1 (1e-6 is usual). Got {delta} instead.")


def check_epsilon(epsilon: float) -> None:
    if not 1e-4 <= epsilon < math.inf:  # below, delta is a difference of numbers that agree to many digits
        raise InputError(f"epsilon must be a positive finite number, 0.0001 or more. Got {epsilon} instead.")


def gaussian_delta(epsilon: float, mu: float) -> float:
    """The smallest delta for which a mu-GDP mechanism is (epsilon, delta)-DP; exact, stable in the far tail."""
    if mu <= 0:
        return 0.0
    log_a = float(log_ndtr(-epsilon / mu + mu / 2))
    log_b = epsilon + float(log_ndtr(-epsilon / mu - mu / 2))
    return 0.0 if log_b >= log_a else math.exp(log_a) * -math.expm1(log_b - log_a)


def gaussian_epsilon(delta: float, mu: float) -> float:
    """The smallest epsilon for which a mu-GDP mechanism is (epsilon, delta)-DP."""
    if gaussian_delta(0.0, mu) <= delta:
        return 0.0
    high = 1.0
    while gaussian_delta(high, mu) > delta:
        high *= 2
    return float(brentq(lambda e: _log_delta(e, mu) - math.log(delta), 0.0, high, xtol=1e-13, rtol=1e-12))


def gaussian_mu(epsilon: float, delta: float) -> float:
    """The largest mu for which a mu-GDP mechanism is (epsilon, delta)-DP: the whole budget of a run of Gaussians.

    Rounded down by one part in 10^9, so that what is built from it never exceeds (epsilon, delta) in floating point.
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
    value = gaussian_delta(epsilon, mu)
    return math.log(value) if value > 0 else -1e6


def total_mu(events: Iterable[Event]) -> float:
    """The mu of the whole run: Gaussian releases compose exactly, mu^2 = sum of 1/noise_multiplier^2, and of the groups
    of a split only the one that was asked for most counts. Pure releases have no part in it. A sampled release counts
    as if everyone had been asked: it costs less than that, and how much less no mu can say (`epsilon_spent` does)."""
    return math.sqrt(_mu_squared(_of_the_worst_user(events)))


def without_samples(events: Iterable[Event]) -> list[Event]:
    """All events but those about samples."""
    return [event for event in events if not isinstance(event, Sampled | Batched)]


def spending(events: Iterable[Event]) -> Spending | None:
    """All of it, if there are sampled releases, which closed forms do not know."""
    known = [_fail_closed(event) for event in events]
    draws: Counter[Draw] = Counter()
    for event in known:
        if isinstance(event, Sampled | Batched):
            replaced = event.relation == "replace-one-user"
            batch_level = replaced and isinstance(event, Batched)  # under the other relation it costs what a sum does
            draws[Draw(event.noise_multiplier, event.rate, replaced, batch_level)] += event.count
    return (
        Spending(tuple(draws.items()), total_mu(without_samples(known)), tuple(pure_epsilons(known))) if draws else None
    )


def within_budget(events: Sequence[Event], epsilon: float, delta: float) -> bool:
    """Whether all events together are (epsilon, delta)-DP. The order of the events does not matter."""
    spent, pures, left = spending(events), pure_epsilons(events), delta_left(events, delta)
    if spent is not None:
        return spent.fits(epsilon, left)
    if pures:
        return composition_fits(epsilon, left, total_mu(events), pures)
    return total_mu(events) ** 2 <= (gaussian_mu(epsilon, left) ** 2 if left > 0 else 0.0) * (1 + 1e-12)


def pure_epsilons(events: Iterable[Event]) -> list[float]:
    """The epsilons of the pure releases among them."""
    return [event.epsilon for event in map(_fail_closed, events) if isinstance(event, Pure)]


def delta_left(events: Iterable[Event], delta: float) -> float:
    """What selections leave of delta to the other releases; zero or less if they set aside all of it."""
    known = map(_fail_closed, events)
    return math.fsum([delta, *(-event.delta for event in known if isinstance(event, Selection))])


def epsilon_spent(events: Sequence[Event], delta: float) -> float:
    """Epsilon of the composition of all events at this delta, by the closed form, or numerically and rounded up where
    there are sampled releases; infinite if no delta is left for Gaussian releases. Pure ones need none: at a delta of
    zero their epsilons add up.

    What a selection set aside is (1 + e^E) delta' for the epsilon E of its budget. The composition is
    (epsilon, delta_G(epsilon) + (1 + e^epsilon) delta')-DP for every epsilon, so the answer is valid if it is at most
    E: then (1 + e^epsilon) delta' is at most what was set aside. A ledger sees to it that it is.
    """
    left, pures, sampled = delta_left(events, delta), pure_epsilons(events), spending(events)
    if sampled is not None:
        return sampled.epsilon(left)
    if pures:
        return composed_epsilon(left, total_mu(events), pures)
    if not events:
        return 0.0
    return gaussian_epsilon(left, total_mu(events)) if left > 0 else math.inf


def epsilon_by_pld(events: Sequence[Event], delta: float) -> float:
    """The same by dp-accounting's privacy loss distributions: the second accountant, used to check the closed forms.
    (With sampled releases it is the first, too: tests check it against quadrature.)

    Accounted under dp-accounting's add/remove convention on purpose: our multiplier is already relative to the
    sensitivity of the relation in force, and its REPLACE_ONE convention would double it once more.
    """
    from dp_accounting.pld import privacy_loss_distribution as pld
    from dp_accounting.pld.common import DifferentialPrivacyParameters

    left = delta_left(events, delta)
    if (sampled := spending(events)) is not None:
        return sampled.epsilon(left)
    losses = [
        pld.from_gaussian_mechanism(event.noise_multiplier).self_compose(event.count)
        for event in _of_the_worst_user(events)
    ]
    losses += [pld.from_privacy_parameters(DifferentialPrivacyParameters(e, 0)) for e in pure_epsilons(events)]
    if not losses:
        return 0.0
    composed = reduce(lambda before, after: before.compose(after), losses)
    return float(composed.get_epsilon_for_delta(left)) if left > 0 else math.inf


def accountant_of(events: Sequence[Event]) -> str:
    """How these events were accounted for, in words."""
    pure = [isinstance(event, Pure) for event in events]
    sampled = {event.rate: 0 for event in events if isinstance(event, Sampled | Batched)}
    for event in events:
        if isinstance(event, Sampled | Batched):
            sampled[event.rate] += event.count
    words = [SAMPLED if sampled else PURE if pure and all(pure) else MIXED if any(pure) else CLOSED_FORM]
    if sampled:
        many, rates = sum(sampled.values()), _between(list(sampled))
        words.append(f"{many} about samples, each user in one with probability {rates}")
    if any(isinstance(event, Gaussian) and event.group is not None for event in events):
        words.append("each user is in one group of a split, so that only the costliest group counts")
    aside = math.fsum(event.delta for event in events if isinstance(event, Selection))
    if aside:
        words.append(f"{aside:.3g} of delta is set aside for keys that only one user holds")
    return "; ".join(words)


def _between(rates: list[float]) -> str:
    low, high = min(rates), max(rates)
    return f"{low:g}" if low == high else f"{low:g} to {high:g}"


def _of_the_worst_user(events: Iterable[Event]) -> list[Noisy]:
    """The events of noise that count for a user who is in the costliest group of every split; see the module's
    guarantee. Pure ones are left out."""
    to_all: list[Noisy] = []
    splits: dict[str, dict[int, list[Noisy]]] = {}
    counts: dict[str, int] = {}
    for event in map(_fail_closed, events):
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
    costliest = (max(groups.values(), key=_mu_squared) for groups in splits.values())
    return [*to_all, *chain.from_iterable(costliest)]


def _mu_squared(events: Iterable[Noisy]) -> float:
    return math.fsum(event.count * event.noise_multiplier**-2 for event in events)


def _fail_closed(event: Event) -> Event:
    if not isinstance(event, Gaussian | Selection | Pure | Sampled | Batched):
        raise InputError(f"no accountant here understands the event {event!r}; it cannot be charged.")
    return event
