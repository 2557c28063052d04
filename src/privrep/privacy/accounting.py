"""What releases cost: events are data, and this module interprets them.

The noise multiplier of an event is always *noise standard deviation / L2 sensitivity under the relation of the run*.
With that convention a Gaussian release has the same privacy loss under either relation, so composition never needs to
know the relation, and no accountant gets the chance to double (or forget to double) a sensitivity by itself.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal, get_args

from scipy.optimize import brentq
from scipy.special import log_ndtr

from privrep.errors import InputError

Relation = Literal["replace-one-user", "add-or-remove-one-user"]
RELATIONS: tuple[Relation, ...] = get_args(Relation)
CLOSED_FORM = "Gaussian differential privacy, closed form (exact composition of full-participation Gaussian releases)"


@dataclass(frozen=True)
class Gaussian:
    """A release with Gaussian noise of `noise_multiplier` times its L2 sensitivity; it is (1/noise_multiplier)-GDP."""

    noise_multiplier: float

    def __post_init__(self) -> None:
        if not (self.noise_multiplier > 0 and math.isfinite(self.noise_multiplier)):
            raise InputError(f"noise_multiplier must be positive and finite. Got {self.noise_multiplier} instead.")


Event = Gaussian


def event_to_json(event: Event) -> dict[str, Any]:
    return {"kind": "gaussian", "noise_multiplier": event.noise_multiplier}


def event_from_json(data: Mapping[str, Any]) -> Event:
    if data.get("kind") != "gaussian":
        raise InputError(f"unknown privacy event {data.get('kind')!r}: this version of privrep cannot account for it.")
    return Gaussian(float(data["noise_multiplier"]))


def check_budget(epsilon: float, delta: float) -> None:
    """Refuse budgets that mean nothing."""
    if not 1e-4 <= epsilon < math.inf:  # below, delta is a difference of numbers that agree to many digits
        raise InputError(f"epsilon must be a positive finite number, 0.0001 or more. Got {epsilon} instead.")
    if not 0 < delta < 1:
        raise InputError(f"delta must lie strictly between 0 and 1 (1e-6 is usual). Got {delta} instead.")


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
    """The mu of the whole run: Gaussian releases compose exactly, mu^2 = sum of 1/noise_multiplier^2."""
    return math.sqrt(math.fsum(_fail_closed(event).noise_multiplier ** -2 for event in events))


def epsilon_spent(events: Sequence[Event], delta: float) -> float:
    """Epsilon of the composition of all events at this delta, by the closed form."""
    return gaussian_epsilon(delta, total_mu(events))


def epsilon_by_pld(events: Sequence[Event], delta: float) -> float:
    """The same by dp-accounting's privacy loss distributions: the second accountant, used to check the first.

    Accounted under dp-accounting's add/remove convention on purpose: our multiplier is already relative to the
    sensitivity of the relation in force, and its REPLACE_ONE convention would double it once more.
    """
    import dp_accounting

    accountant = dp_accounting.pld.PLDAccountant(dp_accounting.NeighboringRelation.ADD_OR_REMOVE_ONE)
    for event in events:
        accountant.compose(dp_accounting.GaussianDpEvent(_fail_closed(event).noise_multiplier))
    return float(accountant.get_epsilon(delta))


def _fail_closed(event: Event) -> Event:
    if not isinstance(event, Gaussian):
        raise InputError(f"no accountant here understands the event {event!r}; it cannot be charged.")
    return event
