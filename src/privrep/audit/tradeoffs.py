"""The epsilon of releases with Gaussian noise whose noise is known: the other way around from what accountants do.

It shares no code with `privacy.accounting`, so that a mistake there does not hide itself.

Let r be the distance of two neighbours' totals over the noise's standard deviation, and q the chance that a user is
asked. In the direction of the distance the outcome is a draw from
    P = (1-q) N(0, 1) + q N(u, 1)    against    Q = (1-q) N(0, 1) + q N(-v, 1),    u, v >= 0.
* everyone   q = 1 and u + v = r.
* sample     a user of a Poisson sample is replaced: u = v = r/2. One that comes or goes would have v = 0.
* batch      a batch of fixed size, replace-one-user: u = r, v = 0. All other users send what the neighbour sends, so
             that the batch without the user has the neighbour's total (`privacy.batches`).

Formal guarantee. P/Q grows with x. So the largest P(S) - e^e Q(S) is that of a set S = {x > t}, where t is the point at
which P/Q is e^e. `compute_delta` returns it, and nothing larger, but for rounding. Reflecting x exchanges P and Q, and
u and v. Hence a mechanism that has these neighbours is (epsilon, delta)-DP for no epsilon below `compute_epsilon`.
Coins. Let fair coins decide between P and Q. A guess is right with probability at most (1 + TV)/2, where TV is the
total variation of P and Q: q (2 Phi(r/2) - 1) for canaries whose two values lie r apart, with zero in the middle.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Literal

import numpy as np
from scipy.optimize import brentq
from scipy.special import ndtr, ndtri

Design = Literal["everyone", "sample", "batch"]
FAR = 60.0  # no threshold lies farther out than this and the distances


def compute_delta(epsilon: float, u: float, v: float, rate: float) -> float:
    """Return the largest P(S) - e^epsilon Q(S) of the module's P and Q.

    Args:
        epsilon: at least 0.
        u: of P.
        v: of Q.
        rate: q.
    """

    def excess(x: float) -> float:
        """Return log P/Q at x, less epsilon."""
        first = np.logaddexp(np.log1p(-rate), math.log(rate) + u * x - u * u / 2) if rate < 1 else u * x - u * u / 2
        second = np.logaddexp(np.log1p(-rate), math.log(rate) - v * x - v * v / 2) if rate < 1 else -v * x - v * v / 2
        return float(first - second - epsilon)

    high = FAR + u + v + (epsilon - math.log(rate)) / max(u, v, 1e-300)
    if not high < 1e12 or excess(high) <= 0:
        return 0.0
    if excess(-high) >= 0:
        return 0.0
    t = float(brentq(excess, -high, high, xtol=1e-13, rtol=1e-14))
    p = (1 - rate) * ndtr(-t) + rate * ndtr(u - t)
    q = (1 - rate) * ndtr(-t) + rate * ndtr(-v - t)
    return max(float(p - math.exp(epsilon) * q), 0.0)


@dataclass(frozen=True)
class Tradeoff:
    """Neighbours of one release with Gaussian noise: who is asked, and the chance to be asked."""

    design: Design = "everyone"
    rate: float = 1.0

    def compute_epsilon(self, ratio: float, delta: float) -> float:
        """Return the smallest epsilon at which neighbours this far apart are (epsilon, delta)-DP.

        Args:
            ratio: r, the distance over the noise's standard deviation.
            delta: of the guarantee.
        """
        u, v = (ratio, 0.0) if self.design == "batch" else (ratio / 2, ratio / 2)

        def excess(epsilon: float) -> float:
            """Return by how much delta is missed, of the worse order of the neighbours."""
            found = max(compute_delta(epsilon, u, v, self.rate), compute_delta(epsilon, v, u, self.rate))
            return math.log(max(found, 1e-300) / delta)

        if excess(0.0) <= 0:
            return 0.0
        high = 1.0
        while excess(high) > 0:
            high *= 2
        return float(brentq(excess, 0.0, high, xtol=1e-10))

    def find_ratio(self, right: float) -> float:
        """Return the distance over the noise at which this part of coins is guessed right at best.

        Args:
            right: a chance.
        """
        seen = (2 * right - 1) / self.rate  # 2 Phi(r/2) - 1
        return 2 * float(ndtri((1 + min(seen, 1 - 1e-15)) / 2)) if seen > 0 else 0.0


ALL_ASKED = Tradeoff()
