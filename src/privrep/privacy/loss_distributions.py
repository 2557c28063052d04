"""The privacy of Poisson-sampled Gaussian releases beside others, in numbers, by privacy loss distributions.

This is about sums over samples. Functions of whole samples, and batches of a fixed size, are in `privacy.batches`.

Formal guarantee. Let a user be in the sample with probability q, independently of the others. Let the noise have
standard deviation z times the sensitivity under the relation. Scale so that the noise is N(0, I). Condition on who else
is in the sample. Totals are t without the user, t + c with it, and t + c' with it as its neighbour. The outcome is a
draw from
    P = (1-q) N(t, I) + q N(t+c, I)   against   Q = (1-q) N(t, I) + q N(t+c', I).
* These are totals as computed and rounded onto the grid. t is the same for both to the last bit, because nobody looks
  at the rows of a user who is not in.
* c and c' are what that user adds and no more: its being in changes nothing of what others add (`users.batching`).
* Who else is in has the same distribution for both neighbours, and hockey-stick divergences are jointly convex. So a
  pair that dominates (P, Q) for all t, c and c' dominates the release.
* Products of such pairs dominate the releases of a run, chosen adaptively (Zhu, Dong and Wang 2022). Rates,
  noise and number of the sampled ones are fixed beforehand, as are epsilons of pure ones: by public facts.

Replace-one-user: |c|, |c'| <= r = 1/(2z). The pair with c = r e, c' = -r e for a unit vector e dominates all others; it
lies on a line.

Proof. Let a >= 1 and b = (a-1)(1-q)/q. With p_v the density of N(t+v, I) and X a draw from N(t+c, I),
    H_a(P, Q) = integral (P - a Q)_+ = q integral (p_c - a p_c' - b p_0)_+ = q E (1 - W - V)_+,
    W = a p_c'(X)/p_c(X),   V = b p_0(X)/p_c(X).
For the pair on the line, W* and V* are continuous and decreasing functions of one Gaussian variable. Let k be W* at the
point where W* + V* = 1. Then (1 - W* - V*)_+ = (k - W*)_+ + (1 - k - V*)_+, as both terms are positive on the same side
of that point. For any other pair (1 - W - V)_+ <= (k - W)_+ + (1 - k - V)_+. The mean of (k - W)_+ is k times the
hockey-stick divergence of order a/k between Gaussians |c - c'| <= 2r apart, and grows with that distance. The mean of
(1 - k - V)_+ is the same of Gaussians |c| <= r apart. So both are largest for the pair on the line, and H_a is. For a <
1, H_a(P, Q) = 1 - a + a H_{1/a}(Q, P), and exchanging P and Q exchanges c and c'. (With b = 0, k is 1 and V is 0.) Two
vectors less than 2r apart, as acute ones are, gain nothing by it here: they are charged as any others.

Add-or-remove-one-user: c' is missing, Q = N(t, I), |c| <= 1/z. The pairs (P, Q) and (Q, P) on a line dominate, by the
same argument with W alone.

A smaller q costs less: P and Q of a smaller q are mixtures of those of a larger one and of N(t, I), the same for both.
So does the rounding of a rate to 64 bits.

Numbers. The distributions of dp-accounting are rounded up (`pessimistic_estimate`). With REPLACE_ONE its `sensitivity`
is the r above, half of ours; with ADD_OR_REMOVE_ONE it is ours. In floating point its masses are off by some 1e-9 in
all (measured: they add up to that much more than 1). So the masses of a thousand releases are off by 1e-6 of
themselves, and its convolutions by FFT by some 1e-13. RELATIVE and ABSOLUTE parts of delta pay for the two, a
hundredfold or more.

Discrete noise adds at most 267 MAX_SIZE 2^-70 times the sum of 1/z^2 to epsilon. (See `privacy.noise`; a mixture is
within a factor of its continuous twin if its components are.) DISCRETE times that sum pays for it.
"""

from __future__ import annotations

import math
from collections import Counter
from dataclasses import dataclass, replace
from functools import lru_cache, reduce
from typing import Any

from privrep.privacy.batches import make_batch_loss
from privrep.privacy.composition import find_largest

RELATIVE, ABSOLUTE = 1e-4, 1e-10  # of delta, left to rounding
DISCRETE = 1e-10  # of epsilon; 267 * 2^28 * 2^-70 is 6.1e-11
COARSE_MU = 20.0  # of Gaussian releases beside samples: a larger one, an epsilon over 200, has a coarser grid of losses
MOST_CELLS = 1e6  # of that grid, for the epsilons of pure releases
TOLERANCE = 1e-4  # of `find_largest_mu` and `find_largest_pure_epsilon`: enough for a plan


@dataclass(frozen=True)
class Draw:
    """One release about a sample: its noise over its sensitivity, the rate, whether neighbours replace a user.

    If it is `batch_level`, neighbours replace a user, and it is priced by `privacy.batches`. Else it is a sum over a
    Poisson sample.
    """

    multiplier: float
    rate: float
    replaced: bool
    batch_level: bool = False


@dataclass(frozen=True)
class Spending:
    """Sampled releases with how often each was made, the total mu of Gaussian ones, and the epsilons of pure ones."""

    draws: tuple[tuple[Draw, int], ...]
    mu: float = 0.0
    pures: tuple[float, ...] = ()

    def fits(self, epsilon: float, delta: float) -> bool:
        """Return whether all of it is together (epsilon, delta)-DP.

        It is if a few more releases fit, too. That is looked at first, because the answer then serves for several
        charges of a run.
        """
        more = replace(self, draws=tuple((draw, _round_up(count)) for draw, count in self.draws))
        return _fits(more, epsilon, delta) or _fits(self, epsilon, delta)

    def epsilon(self, delta: float) -> float:
        """Return the smallest epsilon at this delta, rounded up; infinite if there is none."""
        left = delta * (1 - RELATIVE) - ABSOLUTE
        return (
            float(self.compose_losses().get_epsilon_for_delta(left)) + self.discreteness_cost()
            if left > 0
            else math.inf
        )

    def find_largest_mu(self, epsilon: float, delta: float, limit: float) -> float:
        """Return the largest mu of Gaussian releases, in place of this one's, that fits, rounded down.

        Args:
            epsilon: of the budget.
            delta: of the budget.
            limit: no larger mu is tried.
        """
        return find_largest(lambda mu: _fits(replace(self, mu=mu), epsilon, delta), limit, TOLERANCE)

    def find_largest_pure_epsilon(self, epsilon: float, delta: float) -> float:
        """Return the largest epsilon of one more pure release that fits, rounded down."""
        return find_largest(
            lambda more: _fits(replace(self, pures=(*self.pures, more)), epsilon, delta), epsilon, TOLERANCE
        )

    def discreteness_cost(self) -> float:
        """Return what discrete noise adds to epsilon, or more."""
        return DISCRETE * (self.mu**2 + math.fsum(n * draw.multiplier**-2 for draw, n in self.draws))

    def compose_losses(self) -> Any:
        """Return the distribution of privacy losses of all of it, an object of dp-accounting, rounded up."""
        from dp_accounting.pld import privacy_loss_distribution as pld
        from dp_accounting.pld.common import DifferentialPrivacyParameters

        interval = _choose_interval(min(draw.multiplier for draw, _ in self.draws))
        if self.mu > COARSE_MU:
            interval = max(interval, _choose_interval(1 / self.mu))
        interval = max(interval, math.fsum(self.pures) / MOST_CELLS)
        losses = [_compose_copies(draw, count, interval) for draw, count in self.draws]
        if self.mu > 0:
            losses.append(_make_gaussian_loss(self.mu, interval))
        for e, count in Counter(self.pures).items():
            price = DifferentialPrivacyParameters(e, 0)
            losses.append(pld.from_privacy_parameters(price, interval).self_compose(count))
        return reduce(lambda before, after: before.compose(after), losses)


def _round_up(count: int) -> int:
    """Return the count rounded up to one of eight numbers between powers of two."""
    step = 1 << max(count.bit_length() - 4, 0)
    return -(-count // step) * step


@lru_cache(maxsize=256)
def _fits(spent: Spending, epsilon: float, delta: float) -> bool:
    """Return whether the spending is (epsilon, delta)-DP, with the parts of both that are left to rounding."""
    left = delta * (1 - RELATIVE) - ABSOLUTE
    return left > 0 and bool(spent.compose_losses().get_delta_for_epsilon(epsilon - spent.discreteness_cost()) <= left)


def _choose_interval(multiplier: float) -> float:
    """Return the width of the grid of losses: coarser where losses are larger, so that there are never too many."""
    return 1e-4 * 2.0 ** max(math.ceil(math.log2(2 / multiplier)), 0)


@lru_cache(maxsize=8)
def _make_loss(draw: Draw, interval: float) -> Any:
    """Return the distribution of losses of one release about a sample."""
    from dp_accounting import NeighboringRelation
    from dp_accounting.pld import privacy_loss_distribution as pld

    if draw.batch_level:
        return make_batch_loss(draw.multiplier, draw.rate, interval)
    relations = NeighboringRelation
    return pld.from_gaussian_mechanism(
        draw.multiplier,
        sensitivity=0.5 if draw.replaced else 1.0,
        sampling_prob=draw.rate,
        value_discretization_interval=interval,
        neighboring_relation=relations.REPLACE_ONE if draw.replaced else relations.ADD_OR_REMOVE_ONE,
    )


@lru_cache(maxsize=4)
def _compose_copies(draw: Draw, count: int, interval: float) -> Any:
    """Return the distribution of losses of `count` releases of one kind."""
    return _make_loss(draw, interval).self_compose(count)


@lru_cache(maxsize=4)
def _make_gaussian_loss(mu: float, interval: float) -> Any:
    """Return the distribution of losses of Gaussian releases of this total mu."""
    from dp_accounting.pld import privacy_loss_distribution as pld

    return pld.from_gaussian_mechanism(1 / mu, value_discretization_interval=interval)
