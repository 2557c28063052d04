"""Keys (items, categories) that may be named, because enough users hold them. Noisy counts above a threshold.

A list of the keys that occur is private: a key that one user alone holds tells of that user. So every user adds
1/sqrt(t) to each of its t <= MOST_KEYS keys. Every key that occurs gets Gaussian noise of standard deviation sigma.
Only keys whose noisy count is above the threshold are ever named (Gopi et al. 2020).

Formal guarantee. Consider a run whose releases, the counts included as Gaussian ones, are together (epsilon,
delta_G)-DP. Let delta' be the sum of the delta' of its selections. Then the run is (epsilon, delta_G + (1 + e^epsilon)
delta')-DP. The argument, for neighbours D and D' that differ in the user u, under either relation:

1. Let K be the keys that users other than u add to: a set that is the same for D and D'. Let R be the run as it is, and
   R_K the run whose selections look at the keys in K alone. Keys outside K are added to by u alone, so there are s <= t
   of them, with a count of 1/sqrt(t) each. The noise of each key is independent of the other keys' noise, and a key
   that is not selected leaves no trace. So draw R and R_K with the same noise: they are equal unless a key outside K is
   selected. By `compute_threshold` that has a probability of at most s P(noise > threshold - 1/sqrt(t)) <= delta'. With
   several selections, these probabilities add up until the first time that R and R_K differ.
2. On K, u adds a vector without negative entries and of norm at most 1 (a part of one whose norm is 1). So the counts
   move by at most 1 when u comes or goes. They move by at most sqrt(1 + 1) when u's rows are replaced: two vectors
   without negative entries have a non-negative product. That is the sensitivity of an `acute` bound of norm 1, and R_K
   is an adaptive composition of Gaussian and pure releases. Hence P(R_K(D) in S) <= e^epsilon P(R_K(D') in S) +
   delta_G. Everything the run does later sees the selected keys alone, and is part of that composition.
3. P(R(D) in S) <= P(R_K(D) in S) + delta' <= e^epsilon P(R_K(D') in S) + delta_G + delta'
                <= e^epsilon (P(R(D') in S) + delta') + delta_G + delta'.

For this to hold nothing public may depend on how many keys occur. So the sensitivity that scales the noise allows for
rounding in MAX_SIZE coordinates rather than in those that there are. (It costs one part in eight million.) A table
without any key is answered like any other. A key occurs if some user adds to it. One that its only holder leaves out
because of MOST_KEYS does not occur: otherwise a user could bring more than MOST_KEYS keys of its own.

The tail. In grid steps noise is an integer X of density proportional to e^(-x^2 / 2 sigma^2). The sum of these weights
over x >= m is at most their integral from m - 1 on. Their sum over all integers is at least sqrt(2 pi) sigma (by
Poisson's summation formula, whose terms are all positive). So P(X >= m) <= P(N(0, sigma^2) >= m - 1). Together with the
rounding of the count, two grid steps on the threshold pay for all of that; it has four.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Protocol

import numpy as np
from scipy.special import ndtri_exp

from privrep.errors import InputError
from privrep.privacy.bounds import MAX_SIZE, Bound, BoundedSum

Key = int | str
MOST_KEYS = 4096  # that one user adds to
COUNTED = Bound(1.0, MAX_SIZE, acute=True)  # what is public of the bound that counts are clipped to


class Holders(Protocol):
    """Users and the keys that each of them holds, wherever that is kept."""

    @property
    def private_keys(self) -> Sequence[Key]:
        """Return the distinct keys that users add to, all integers or all texts, sorted. Not to be shown to anyone."""
        ...

    def count_keys(self, bound: Bound) -> BoundedSum:
        """Return how many users hold each key (one zero if there are no keys), users clipped to the bound."""
        ...


def make_counts_bound(holders: Holders) -> Bound:
    """Return the bound that `count_keys` is asked for. Its size is private."""
    return Bound(COUNTED.norm, max(len(holders.private_keys), 1), COUNTED.acute)


def compute_log_chance(delta: float, epsilon: float) -> float:
    """Return the logarithm of the delta' for which (1 + e^epsilon) delta' is this part of a run's delta.

    At a large epsilon the delta' itself is below all numbers that a computer has.
    """
    if not (0 < delta < 1 and math.isfinite(epsilon)):
        raise InputError(f"a selection needs a part of delta, between 0 and 1, and an epsilon. Got {delta}, {epsilon}.")
    return math.log(delta) - float(np.logaddexp(0.0, epsilon))


def compute_threshold(sigma: float, log_chance: float) -> float:
    """Return the smallest threshold, but for a few grid steps, that keys of one user alone seldom pass.

    Their probability to pass is at most e^log_chance. For every t up to MOST_KEYS: t P(1/sqrt(t) + noise > threshold)
    <= e^log_chance. `sigma` is the noise's standard deviation.
    """
    if not (sigma > 0 and log_chance < math.log(0.5)):
        raise InputError(f"a threshold needs noise and a chance below one half. Got {sigma} and {log_chance} instead.")
    t = np.arange(1, MOST_KEYS + 1)
    least = np.max(1 / np.sqrt(t) - sigma * ndtri_exp(log_chance - np.log(t)))
    return float(least) * (1 + 2.0**-40) + 4 * COUNTED.step
