"""The privacy of Gaussian and pure releases together, in numbers: total mu, the epsilons of the pure ones, delta.

Formal guarantee. Let the Gaussian releases of a run compose to mu-GDP. Let the others be pure, the i-th epsilon_i-DP.
What they ask may depend on earlier releases, and so may their order. The epsilons of the pure ones may not, nor the
limit of mu. Within this limit each Gaussian release may be priced by earlier ones: however mu^2 is split, what is left
is dominated alike. With Gaussian releases alone, or pure ones alone and no delta, all prices may be chosen on the way.
* Each is dominated by a pair of distributions (P, Q): its outcomes tell neighbours apart no better than a draw tells P
  from Q.
* For mu-GDP the pair is (N(mu, 1), N(0, 1)).
* For epsilon_i-DP it is randomised response (Kairouz, Oh and Viswanath 2015). Its privacy loss log P/Q is +epsilon_i
  with P-probability e^epsilon_i / (1 + e^epsilon_i), and -epsilon_i otherwise.
* Products of dominating pairs dominate adaptive compositions (Zhu, Dong and Wang 2022), and losses of independent draws
  add up.
* Let x be an outcome of the randomised responses, L(x) the sum of its +-epsilon_i, and A(x) its P-probability. Let
  delta_mu be the delta of mu-GDP at any real argument, with delta_0(e) = max(0, 1 - e^e). Then the run is (epsilon,
  delta)-DP with
      delta(epsilon) = sum over x of A(x) delta_mu(epsilon - L(x)).
* This is exact: some mechanisms of those prices attain it.
* Either of two neighbours may be the first of the pair. One computation serves both orders, because the pairs are
  symmetric. Swapping P and Q leaves the distribution of the loss as it is. For the Gaussian this is a reflection, for
  randomised response an exchange of its two answers.

Equal epsilons are grouped: of n, the number with a positive loss is binomial. Where more than MOST_OUTCOMES outcomes
would remain, the two smallest epsilons are replaced by their sum until they do not. Two releases of epsilon_1 and
epsilon_2 are one that is (epsilon_1 + epsilon_2)-DP. That is an upper bound, no longer exact.

Rounding. `log_composed_delta` is rounded up: arguments are moved down and logarithms up by more than their errors. The
discrete Gaussian adds less than 1e-9 of epsilon to it (`privacy.noise`). MARGIN of epsilon pays for that wherever
Gaussian and pure releases meet. A pure release is made with a noise 1e-9 larger than its epsilon asks for
(`privacy.exponential`). So sums of epsilons may be compared in floating point.
"""

from __future__ import annotations

import heapq
import math
from collections import Counter
from collections.abc import Callable, Sequence

import numpy as np
from scipy.special import gammaln, log_ndtr, logsumexp

from privrep.typing import Array

MOST_OUTCOMES = 2**16
MARGIN = 2e-9  # of epsilon
LEAST_MU = 1e-6  # a smaller one counts as this: delta grows with mu, and smaller ones overflow what is divided by them
SLACK = 1e-12  # of a sum of epsilons, relative: far below what pure releases leave by their noise


def log_composed_delta(epsilon: float, mu: float, pures: Sequence[float]) -> float:
    """Return the logarithm of delta(epsilon) of the module's guarantee, rounded up; minus infinity where delta is zero.

    Args:
        epsilon: at which delta is asked for.
        mu: of all Gaussian releases together, 0 for none.
        pures: the epsilons of the pure releases.
    """
    if mu <= 0 and epsilon >= math.fsum(pures):
        return -math.inf
    log_chance, loss = _list_outcomes(pures)
    left = epsilon - loss - 1e-14 * (abs(epsilon) + math.fsum(pures))
    terms = log_chance + _bound_log_delta(left, max(mu, LEAST_MU) if mu > 0 else 0.0)
    total = float(logsumexp(terms)) if np.isfinite(terms).any() else -math.inf
    return min(total + 5e-9, 0.0)  # log_chance is off by less


def _bound_log_delta(epsilon: Array, mu: float) -> Array:
    """Return log delta_mu at real arguments (n,), rounded up.

    With a, b = -epsilon/mu +- mu/2 it is the logarithm of Phi(a) - e^epsilon Phi(b). `error` is more than the rounding
    of either logarithm. Adding it to the first and to the gap between them gives no less than the truth.
    """
    with np.errstate(divide="ignore", invalid="ignore"):
        if mu <= 0:
            return np.log(-np.expm1(np.minimum(epsilon, 0.0)))
        log_a = log_ndtr(-epsilon / mu + mu / 2)
        log_b = epsilon + log_ndtr(-epsilon / mu - mu / 2)
        error = 1e-14 * (1 + np.abs(log_a) + np.abs(log_b) + np.abs(epsilon))
        up = log_a + error + np.log(-np.expm1(-np.maximum(log_a - log_b, 0.0) - error))
    return np.asarray(np.where(np.isnan(up), 0.0, np.minimum(up, 0.0)))


def _list_outcomes(pures: Sequence[float]) -> tuple[Array, Array]:
    """Return log A(x) and L(x) of all outcomes of the randomised responses, (outcomes,), equal epsilons grouped."""
    log_chance, loss = np.zeros(1), np.zeros(1)
    for epsilon, count in _merge_smallest(pures).items():
        positive = np.arange(count + 1)
        ways = gammaln(count + 1) - gammaln(positive + 1) - gammaln(count - positive + 1)
        log_yes, log_no = -np.logaddexp(0.0, -epsilon), -np.logaddexp(0.0, epsilon)
        chances = ways + positive * log_yes + (count - positive) * log_no
        log_chance = np.add.outer(log_chance, chances).ravel()
        loss = np.add.outer(loss, (2 * positive - count) * epsilon).ravel()
    return log_chance, loss


def _merge_smallest(pures: Sequence[float]) -> Counter[float]:
    """Return how often each epsilon occurs, the smallest added up until there are MOST_OUTCOMES outcomes at most."""
    smallest = list(pures)
    heapq.heapify(smallest)
    counts = Counter(smallest)
    while math.prod(count + 1 for count in counts.values()) > MOST_OUTCOMES:
        first, second = heapq.heappop(smallest), heapq.heappop(smallest)
        counts -= Counter([first, second])
        counts[first + second] += 1
        heapq.heappush(smallest, first + second)
    return counts


def composition_fits(epsilon: float, delta: float, mu: float, pures: Sequence[float]) -> bool:
    """Return whether Gaussian releases and at least one pure one are together (epsilon, delta)-DP.

    Args:
        epsilon: of the budget.
        delta: of the budget.
        mu: of all Gaussian releases together, 0 for none.
        pures: the epsilons of the pure releases.
    """
    if mu <= 0 and math.fsum(pures) <= epsilon * (1 + SLACK):
        return True
    target = epsilon * (1 - MARGIN) if mu > 0 else epsilon
    return delta > 0 and log_composed_delta(target, mu, pures) <= math.log(delta)


def compose_epsilon(delta: float, mu: float, pures: Sequence[float]) -> float:
    """Return the smallest epsilon of a composition at this delta, rounded up; arguments as in `composition_fits`.

    It is infinite if there is none.
    """
    added = math.fsum(pures)
    if delta <= 0:
        return added if mu <= 0 else math.inf
    wanted = math.log(delta)
    if log_composed_delta(0.0, mu, pures) <= wanted:
        return 0.0
    high = max(added, 1e-3)
    while log_composed_delta(high, mu, pures) > wanted:
        high *= 2
    fits = _find_smallest(lambda epsilon: log_composed_delta(epsilon, mu, pures) <= wanted, high)
    return fits / (1 - MARGIN) if mu > 0 else min(fits, added)


def find_largest_mu(epsilon: float, delta: float, pures: Sequence[float], limit: float) -> float:
    """Return the largest mu, up to `limit`, that fits; arguments as in `composition_fits`. It is rounded down."""
    if not composition_fits(epsilon, delta, 0.0, pures):
        return 0.0
    return find_largest(lambda mu: composition_fits(epsilon, delta, mu, pures), limit) * (1 - 1e-9)


def find_largest_pure_epsilon(epsilon: float, delta: float, mu: float, pures: Sequence[float]) -> float:
    """Return the largest epsilon of one more pure release that fits, rounded down.

    Args:
        epsilon: of the budget.
        delta: of the budget.
        mu: of all Gaussian releases together.
        pures: the epsilons of the pure releases so far.
    """
    if delta <= 0:
        return max(epsilon - math.fsum(pures), 0.0) if mu <= 0 else 0.0
    high = epsilon
    while composition_fits(epsilon, delta, mu, [*pures, high]):
        high *= 2
    return find_largest(lambda more: composition_fits(epsilon, delta, mu, [*pures, more]), high) * (1 - 1e-9)


def find_largest(fits: Callable[[float], bool], high: float, tolerance: float = 1e-12) -> float:
    """Return the largest number up to `high` that fits, to a relative tolerance and rounded down; zero if none does.

    Args:
        fits: whether a number fits. If it does, all smaller ones must.
        high: no larger number is tried.
        tolerance: relative.
    """
    if fits(high):
        return high
    low = high
    while not fits(low):
        low, high = low / 2, low
        if low < 1e-9:
            return 0.0
    while high - low > tolerance * high:
        middle = (low + high) / 2
        low, high = (middle, high) if fits(middle) else (low, middle)
    return low


def _find_smallest(fits: Callable[[float], bool], high: float) -> float:
    """Return the smallest number up to `high` that fits, rounded up in the twelfth digit, where all larger ones fit."""
    low = 0.0
    while high - low > 1e-12 * high:
        middle = (low + high) / 2
        low, high = (low, middle) if fits(middle) else (middle, high)
    return high
