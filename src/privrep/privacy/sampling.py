"""Poisson samples of users: who is asked and what that costs, decided by one object.

Formal guarantee. Every user is in a sample with probability `rate`, independently of all others and of earlier samples,
and nobody learns who was: the key that decides it is drawn after the charge, and is never written nor posted. What a
release about a sample costs is what `privacy.loss_distributions` proves of `Sampled` events.

All statistics of one page are about one sample, so they are one event. Divided by their standard deviations and laid
side by side they are one Gaussian release, whose multiplier z has 1/z^2 = sum of their mu^2. They are not charged one
by one: two releases about one sample are not two releases about two.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray
from scipy.optimize import brentq

from privrep.errors import BudgetExceeded, InputError
from privrep.privacy.accounting import (
    LEAST_SAMPLED,
    Event,
    Gaussian,
    Relation,
    Sampled,
    check_rate,
    epsilon_spent,
    within_budget,
)
from privrep.privacy.ledger import Budget

MOST_NOISE = 2.0**20  # of a plan; with more a release says nothing
MARGIN = 1e-4  # of a planned noise multiplier: far more than rounding may move what a ledger then adds up


@dataclass(frozen=True)
class Sample:
    """Who is in, a secret. The key is uniform, so the places' words are those of SHAKE-256: independent and uniform for
    anyone who does not have it. By place, not by id: two users never share a word, whatever they are called."""

    rate: float
    key: bytes = field(repr=False)

    def members(self, count: int) -> NDArray[np.bool_]:
        """Of users 0 to count - 1: those who are in, each with a probability of `rate` rounded down to 2^-64."""
        words = np.frombuffer(hashlib.shake_256(self.key).digest(8 * count), dtype="<u8")
        return words < np.uint64(math.floor(math.ldexp(self.rate, 64)))


@dataclass(frozen=True)
class Poisson:
    """Each user is asked with probability `rate`: sampler and price in one. At a rate of 1 everyone is asked."""

    rate: float

    def __post_init__(self) -> None:
        check_rate(self.rate)

    @property
    def everyone(self) -> bool:
        return self.rate == 1

    def event(self, mu_squared: float, relation: Relation) -> Gaussian | Sampled:
        """The price of a page that would spend this much of mu^2 if everyone were asked."""
        multiplier = 1 / math.sqrt(mu_squared)
        return Gaussian(multiplier) if self.everyone else Sampled(multiplier, self.rate, relation)

    def sample(self, key: bytes) -> Sample:
        if self.everyone:
            raise InputError("at a rate of 1 everyone is asked, and there is no sample to draw.")
        return Sample(self.rate, key)


def noise_multiplier_for(
    budget: Budget, rate: float, rounds: int, mu_squared_before: float = 0.0, beside: Sequence[Event] = ()
) -> float:
    """The least noise, but for MARGIN, with which a ledger accepts `rounds` pages about samples of this rate, beside
    releases to all that spend `mu_squared_before` and other events, such as choices.

    The noise is relative to the sensitivity, and 1/noise^2 is what the queries of one page may spend in all.
    """
    if not rounds >= 1 or not 0 <= mu_squared_before < math.inf:
        raise InputError(f"a plan has one round or more, after others. Got {rounds} after {mu_squared_before} instead.")
    sampling = Poisson(rate)
    before = [*beside, *([Gaussian(mu_squared_before**-0.5)] if mu_squared_before > 0 else [])]

    def all_of(multiplier: float) -> list[Event]:
        return [*before, *[sampling.event(multiplier**-2, budget.relation)] * rounds]

    def excess(log_multiplier: float) -> float:
        spent = epsilon_spent(all_of(math.exp(log_multiplier)), budget.delta)
        return math.log(min(max(spent, 1e-12), 1e12) / budget.epsilon)

    low, high = math.log(LEAST_SAMPLED), math.log(MOST_NOISE)
    some = budget.delta and within_budget(before, budget.epsilon, budget.delta)  # a quick look, before a slow one
    if not (some and within_budget(all_of(MOST_NOISE), budget.epsilon, budget.delta)):
        raise BudgetExceeded(
            "too little of the budget is left for the rounds. Use a larger epsilon, or spend less before."
        )
    found = low if excess(low) <= 0 else float(brentq(excess, low, high, xtol=MARGIN / 10))
    multiplier = math.exp(found) * (1 + MARGIN)
    while not within_budget(all_of(multiplier), budget.epsilon, budget.delta):
        multiplier *= 1 + MARGIN
    return multiplier
