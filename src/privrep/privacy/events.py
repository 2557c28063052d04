"""Events: releases as data. `privacy.accounting` says what they cost.

The noise multiplier of an event is always *noise standard deviation / L2 sensitivity under the relation of the run*.
With that convention a Gaussian release has the same privacy loss under either relation. So composition never needs to
know the relation. No accountant gets the chance to double (or forget to double) a sensitivity by itself.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar, Literal, get_args

from privrep.errors import InputError
from privrep.privacy.groups import Group

Relation = Literal["replace-one-user", "add-or-remove-one-user"]
RELATIONS: tuple[Relation, ...] = get_args(Relation)


@dataclass(frozen=True)
class Gaussian:
    """A release with Gaussian noise of `noise_multiplier` times its L2 sensitivity; it is (1/noise_multiplier)-GDP.

    With a `group`, only the users of that group were asked, and it costs the others nothing. With a `count` it is this
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
    """A list of keys released by thresholding noisy counts, as `privacy.selection` says.

    It is (1/noise_multiplier)-GDP on the keys that others hold too. The other keys cost `delta` of the run's delta.
    """

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
    With a `count` it is this many releases, each about a sample of its own.
    """

    noise_multiplier: float
    rate: float
    relation: Relation
    count: int = 1

    def __post_init__(self) -> None:
        _check_sampled(self)


@dataclass(frozen=True)
class Batched:
    """A release with Gaussian noise about a secret batch, as `privacy.batches` says.

    It is a function of a whole Poisson sample, or anything about a batch of a fixed size, the part `rate` of the users.
    The multiplier is the noise over the sensitivity of the release given the batch. With a `count` it is this many
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
LEAST_MULTIPLIER = 1e-100  # the square of its inverse is still a number
LEAST_SAMPLED = 0.05  # less noise than this protects nobody, and its losses are too many to add up


def check_rate(rate: float) -> None:
    """Raise InputError unless the rate is a probability to be asked: at least 2^-32 and at most 1."""
    whole = isinstance(rate, int | float) and not isinstance(rate, bool)
    if not (whole and 2.0**-32 <= rate <= 1):
        raise InputError(f"a sampling rate is the probability to be asked, above 0 and up to 1. Got {rate!r} instead.")


def _check_sampled(event: Sampled | Batched) -> None:
    """Raise InputError unless a release about a sample can be priced."""
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
    """Raise InputError unless the count is a whole number from 1 to MOST_RELEASES."""
    if isinstance(count, bool) or not isinstance(count, int) or not 1 <= count <= MOST_RELEASES:
        raise InputError(f"one charge pays for 1 to {MOST_RELEASES:,} releases. Got {count!r} instead.")


def _check_multiplier(noise_multiplier: float) -> None:
    """Raise InputError unless the noise multiplier is positive and finite."""
    if not (noise_multiplier >= LEAST_MULTIPLIER and math.isfinite(noise_multiplier)):
        raise InputError(f"noise_multiplier must be positive and finite. Got {noise_multiplier} instead.")


def event_to_json(event: Event) -> dict[str, Any]:
    """Return the event as a ledger keeps it."""
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
    """Return the event that a ledger kept. Raise InputError if its kind, or a field of it, is not known."""
    kind, names, count = data.get("kind"), data.keys() - {"charge", "kind", "count"}, data.get("count", 1)
    counted = "count" in data
    if kind == ("gaussians" if counted else "gaussian") and names - {"group"} == {"noise_multiplier"}:
        group = Group(*data["group"]) if "group" in data else None
        return Gaussian(float(data["noise_multiplier"]), group, count)
    if kind == "selection" and not counted and names == {"noise_multiplier", "delta"}:
        return Selection(float(data["noise_multiplier"]), float(data["delta"]))
    if kind == "pure" and not counted and names == {"epsilon"}:
        return Pure(float(data["epsilon"]))
    if kind in ("sampled", "batched") and names == {"noise_multiplier", "rate", "relation"}:
        fields = float(data["noise_multiplier"]), float(data["rate"]), data["relation"], count
        return Sampled(*fields) if kind == "sampled" else Batched(*fields)
    raise InputError(f"unknown privacy event {kind!r}: this version of privrep cannot account for it.")
