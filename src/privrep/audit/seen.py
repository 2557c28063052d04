"""A release of canaries as its auditor sees it, and the lower bound of epsilon that follows.

Formal guarantee. Let the noise of different coordinates be independent, and let each canary move one coordinate alone.
A coordinate is then one test of two neighbours. Two bounds of the ratio r (`tradeoffs`) are made, and the better
counts. Each is false with at most half of `error`, so the answer is false with at most `error`.
* Coins. Each coin is guessed by the side of the middle on which the release lies. Guesses are independent, and right
  with probability (1 + TV)/2 at most. A lower bound of that chance gives one of TV, and so of r. Nothing is known here
  but the released numbers and the middle.
* Noise. The distance between the two worlds is read off the engine's totals, the smallest of all canaries counting. The
  noise is the release less the total of the world that answered. An upper bound of its deviation gives one of r from
  below. Its scale is measured, never taken from a ledger; that it is Gaussian and does not depend on the coins is
  assumed. Where users are sampled, half of this bound's part of `error` goes to the rate: of the canaries, which are
  asked independently, these many were. A batch of fixed size has exactly the rate that was seen.
Clipping, the sensitivity, the rate and the noise are thereby what they are, and not what they should be. What is left
to belief is the form of the noise, and that neighbours in other places are no better off than canaries: a lower bound
of epsilon holds in any case.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray

from privrep.audit.lower import bound_chance_below, bound_deviation_above
from privrep.audit.tradeoffs import ALL_ASKED, Tradeoff
from privrep.typing import Array


@dataclass(frozen=True)
class Seen:
    """One number for each canary: what was released, and the totals of both worlds.

    coins       whether the canary's coin fell on the larger of its two values.
    released    noisy, (canaries,).
    answered    the total of the world that answered, (canaries,).
    other       the total with the canary's coin turned over, (canaries,).
    middle      halfway between a canary's two values, as a public number.
    tradeoff    who is asked, with the rate that was planned.
    """

    coins: NDArray[np.bool_]
    released: Array
    answered: Array
    other: Array
    middle: float = 0.0
    tradeoff: Tradeoff = ALL_ASKED


@dataclass(frozen=True)
class Lower:
    """A lower bound of epsilon, and what it rests on."""

    epsilon: float
    by: str  # coins or noise: the observation that gives the larger bound
    right: float  # part of the coins that were guessed right
    ratio: float  # distance of neighbours over the noise's deviation, at least


def bound_epsilon(seen: Seen, delta: float, error: float) -> Lower:
    """Return a lower bound of the epsilon of a release; see the module's guarantee.

    Args:
        seen: of the release.
        delta: of the guarantee.
        error: chance that the bound is false.
    """
    tradeoff, count = seen.tradeoff, len(seen.coins)
    right = int(((seen.released > seen.middle) == seen.coins).sum())
    by_coins = tradeoff.find_ratio(bound_chance_below(right, count, error / 2))
    moved = np.abs(seen.answered - seen.other)
    asked, rest = moved > 0, error / 2
    measured, noise = tradeoff, seen.released - seen.answered
    if tradeoff.design != "everyone":
        rate = int(asked.sum()) / count
        if tradeoff.design == "sample":
            rate, rest = bound_chance_below(int(asked.sum()), count, error / 4), error / 4
        measured = replace(tradeoff, rate=rate)
    by_noise = (
        float(moved[asked].min()) / bound_deviation_above(float(noise @ noise), count, rest) if asked.any() else 0
    )
    found = [
        Lower(one.compute_epsilon(ratio, delta) if one.rate else 0.0, by, right / count, ratio)
        for by, one, ratio in (("coins", tradeoff, by_coins), ("noise", measured, by_noise))
    ]
    return max(found, key=lambda each: each.epsilon)
