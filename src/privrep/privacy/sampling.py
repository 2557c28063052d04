"""Samples of users: their members and their price, decided by one object.

Formal guarantee:
* Every user is in a `Poisson` sample with probability `rate`, independently of all others and of earlier samples.
* A `Fixed` sample has `size` of `count` users in an order, and all such lists are equally likely.
* Nobody learns the members. The key that decides them is drawn after the charge, and is never written nor posted.
* A sum over a Poisson sample costs what `privacy.loss_distributions` proves of `Sampled` events.
* A function of a whole Poisson sample, or anything about a fixed one, costs what `privacy.batches` proves of `Batched`
  events.
* All statistics of one page are about one sample, so they are one event. Divided by their standard deviations and laid
  side by side they are one Gaussian release. Its multiplier z has 1/z^2 = sum of their mu^2. They are not charged one
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
from privrep.privacy.accounting import compute_epsilon, within_budget
from privrep.privacy.bounds import MAX_USERS
from privrep.privacy.events import LEAST_SAMPLED, Batched, Event, Gaussian, Relation, Sampled, check_rate
from privrep.privacy.ledger import Budget

MOST_NOISE = 2.0**20  # of a plan; with more a release says nothing
MARGIN = 1e-4  # of a planned noise multiplier: far more than rounding may move what a ledger then adds up


@dataclass(frozen=True)
class Sample:
    """Members of a Poisson sample, a secret.

    The key is uniform, so the words of SHAKE-256 by position are independent and uniform for anyone who does not have
    it. By position, not by id: two users never share a word, whatever they are called.
    """

    rate: float
    key: bytes = field(repr=False)

    def members(self, count: int) -> NDArray[np.bool_]:
        """Return a mask (count,) of the users who are in, each with a probability of `rate` rounded down to 2^-64."""
        words = np.frombuffer(hashlib.shake_256(self.key).digest(8 * count), dtype="<u8")
        return words < np.uint64(math.floor(math.ldexp(self.rate, 64)))


@dataclass(frozen=True)
class ListedSample(Sample):
    """Members of a sample among the users of one node, as the drawer of the sample listed them.

    The key stays there, so that nobody learns of other nodes' users. `mask` is of this node's users, in their order.
    """

    mask: NDArray[np.bool_] = field(repr=False, default_factory=lambda: np.zeros(0, bool))

    def members(self, count: int) -> NDArray[np.bool_]:
        if self.mask.shape != (count,):
            raise InputError(f"a sample tells of {len(self.mask):,} users, and here are {count:,}.")
        return self.mask


@dataclass(frozen=True)
class Poisson:
    """Plan of a sample in which each user is asked with probability `rate`: sampler and price in one.

    At a rate of 1 everyone is asked.
    """

    rate: float

    def __post_init__(self) -> None:
        check_rate(self.rate)

    @property
    def everyone(self) -> bool:
        """Return whether everyone is asked."""
        return self.rate == 1

    def make_event(
        self, mu_squared: float, relation: Relation, batch_level: bool = False, steps: int = 1
    ) -> Gaussian | Sampled | Batched:
        """Return the price of `steps` pages, each of which would spend this much of mu^2 if everyone were asked.

        Args:
            mu_squared: spending of one page.
            relation: neighbours of the guarantee.
            batch_level: whether pages are about any functions of the sample, not sums over it.
            steps: number of pages.
        """
        multiplier = 1 / math.sqrt(mu_squared)
        if self.everyone:
            return Gaussian(multiplier, count=steps)
        if batch_level:
            return Batched(multiplier, self.rate, relation, steps)
        return Sampled(multiplier, self.rate, relation, steps)

    def sample(self, key: bytes) -> Sample:
        """Return the sample of a key. Raise InputError if everyone is asked."""
        if self.everyone:
            raise InputError("at a rate of 1 everyone is asked, and there is no sample to draw.")
        return Sample(self.rate, key)


@dataclass(frozen=True)
class FixedSample:
    """Members of a batch of a fixed size, and their order: a secret.

    They are drawn by position, from the words of SHAKE-256, as in `Sample`.
    """

    size: int
    key: bytes = field(repr=False)

    def draw_order(self, count: int) -> NDArray[np.int64]:
        """Return `size` different positions of 0 to count - 1, (size,). All lists of this length are equally likely.

        Words make uniform positions, one after the other, and repeated ones are passed over. A word too large for all
        positions to be equally likely is passed over, too.
        """
        most, words = (1 << 64) // count * count - 1, 2 * self.size + 16
        while True:
            drawn = np.frombuffer(hashlib.shake_256(self.key).digest(8 * words), dtype="<u8")
            places = (drawn[drawn <= np.uint64(most)] % np.uint64(count)).astype(np.int64)
            first = np.unique(places, return_index=True)[1]
            if len(first) >= self.size:
                return places[np.sort(first)[: self.size]]
            words *= 2  # the longer stream begins as the shorter one


@dataclass(frozen=True)
class Fixed:
    """Plan of a batch of always `size` of `count` users: sampler and price in one, for replace-one-user alone."""

    size: int
    count: int

    def __post_init__(self) -> None:
        numbers = all(isinstance(n, int | np.integer) and not isinstance(n, bool) for n in (self.size, self.count))
        if not (numbers and 1 <= self.size <= self.count <= MAX_USERS):
            raise InputError(
                f"a batch has a whole number of users, from 1 to all of them. Got {self.size!r} of {self.count!r}."
            )

    @property
    def rate(self) -> float:
        """Return the part of the users who are asked."""
        return self.size / self.count

    @property
    def everyone(self) -> bool:
        """Return whether everyone is asked."""
        return self.size == self.count

    def make_event(
        self, mu_squared: float, relation: Relation, batch_level: bool = False, steps: int = 1
    ) -> Gaussian | Batched:
        """Return the price of `steps` pages, each of which would spend this much of mu^2 if everyone were asked.

        Sums and functions of the batch cost the same. Arguments are as in `Poisson.make_event`.
        """
        self.check_relation(relation)
        multiplier = 1 / math.sqrt(mu_squared)
        return Gaussian(multiplier, count=steps) if self.everyone else Batched(multiplier, self.rate, relation, steps)

    def check_relation(self, relation: Relation) -> None:
        """Raise InputError unless the relation keeps the number of users public."""
        if relation != "replace-one-user":
            raise InputError(
                "batches of a fixed size say how many users there are: use replace-one-user, or a Poisson sample."
            )

    def sample(self, key: bytes) -> FixedSample:
        """Return the batch of a key. Raise InputError if everyone is asked."""
        if self.everyone:
            raise InputError("a batch of all users is everyone, and there is no sample to draw.")
        return FixedSample(self.size, key)


Sampling = Poisson | Fixed


def plan_noise_multiplier(
    budget: Budget,
    rate: float | Sampling,
    rounds: int,
    mu_squared_before: float = 0.0,
    beside: Sequence[Event] = (),
    batch_level: bool = False,
) -> float:
    """Return the least noise, but for MARGIN, with which a ledger accepts `rounds` pages about samples of this rate.

    The noise is relative to the sensitivity. 1/noise^2 is the sum of what the queries of one page may spend.

    Args:
        budget: of the run.
        rate: the probability to be asked, or how samples are drawn.
        rounds: number of pages.
        mu_squared_before: mu^2 that releases to all spend beside them.
        beside: other events, such as choices.
        batch_level: whether queries are functions of the whole sample.
    """
    if not rounds >= 1 or not 0 <= mu_squared_before < math.inf:
        raise InputError(f"a plan has one round or more, after others. Got {rounds} after {mu_squared_before} instead.")
    sampling = rate if isinstance(rate, Poisson | Fixed) else Poisson(rate)
    before = [*beside, *([Gaussian(mu_squared_before**-0.5)] if mu_squared_before > 0 else [])]

    def all_of(multiplier: float) -> list[Event]:
        """Return all events of the run, at this multiplier."""
        return [*before, sampling.make_event(multiplier**-2, budget.relation, batch_level, rounds)]

    def excess(log_multiplier: float) -> float:
        """Return the logarithm of the epsilon spent over the budget's: zero where the budget is used up."""
        spent = compute_epsilon(all_of(math.exp(log_multiplier)), budget.delta)
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
