"""The privacy of a noisy function of a whole random batch, and of sums over batches of a fixed size.

Formal guarantee. Let a release add noise to a function f of a batch. Let r' be the farthest that values of f may be
apart where this is priced, and z the standard deviation of the noise over r'.
(a) Poisson batches, each user in with probability q. f may be any function whose values lie in a set of diameter r': a
    gradient of the batch, clipped as one. Replace-one-user; see below for add-or-remove-one-user.
(b) Batches of b of n users in random order, q = b/n, replace-one-user. r' is the move of f if one user of the batch is
    replaced by any other.
Scale so that the noise is N(0, I), and r = 1/z. Let delta_G(e, r) be the delta of one Gaussian release of mu = r. Then
the release is dominated by the profile, for e >= 0,
    delta(e) = q delta_G(log(1 + (e^e - 1)/q), r),   delta(-e) = 1 - e^-e + e^-e delta(e).

Proof. (a) Condition on who else is in the batch. Let t, t+c and t+c' be values of f without the user, with it, and with
its neighbour. |c|, |c'| and |c - c'| are at most r. The outcome is a draw from
    P = (1-q) N(t, I) + q N(t+c, I)   against   Q = (1-q) N(t, I) + q N(t+c', I).
(b) Draw a batch that the user is in and, independently, one of the others who are not in it. The batch with that other
in the user's seat is a uniform batch without the user. So, given the two, P and Q are as above: t is f of the second
batch, t+c and t+c' are f of the first with the user and with its neighbour. Any two of the three differ in who has one
seat (Balle, Barthe and Gaboardi 2018).

In both cases the condition has one distribution for both neighbours, and hockey-stick divergences are jointly convex.
It remains to bound H_a(P, Q) for all such t, c and c'. For a >= 1 let b = (a-1)(1-q)/q, p_v the density of N(t+v, I),
and X a draw from N(t+c, I). As in `privacy.loss_distributions`,
    H_a(P, Q) = q E (1 - W - V)_+,   W = a p_c'(X)/p_c(X),   V = b p_0(X)/p_c(X).
For c = r e and c' = 0, W* and V* are a and b times one and the same ratio. Let k be W* where W* + V* = 1. Then (1 - W*
- V*)_+ = (k - W*)_+ + (1 - k - V*)_+, and for all other pairs the left is at most the right. The means of the two terms
on the right are divergences of Gaussians |c - c'| and |c| apart. They grow with these distances, so the pair that has
both at r is the worst. For it, W* + V* = (1 + (a-1)/q) p_0/p_c. So H_a is q times the divergence of order 1 + (a-1)/q
between Gaussians r apart: the profile at e = log a. For a < 1, H_a(P, Q) = 1 - a + a H_{1/a}(Q, P), and (Q, P) is such
a pair, too.

The profile is convex in a. Above 1 it is a convex function of an affine one, below 1 the perspective of that. At 1 its
slope is s = -Phi(-r/2) on the right. On the left it is -1 + q (1 + 2s) - s, which is at most s because q <= 1. So it is
the profile of some pair of distributions, in either direction. Products of such pairs dominate the releases of a run,
chosen adaptively (Zhu, Dong and Wang 2022). It grows with q, by the argument of `privacy.loss_distributions`.

Add-or-remove-one-user: (a) alone. Q is N(t, I) and |c| <= r. `privacy.loss_distributions` proves the price under that
relation, for sums and functions alike: the price of a sum of the same multiplier.

Numbers. The profile is connected from dot to dot on a grid of e^e (Doroshenko and others 2022). The line is never below
it. Beyond the grid the rest is an infinite loss, or one at its lower end.
"""

from __future__ import annotations

import math
from typing import Any

import numpy as np
from scipy.special import log_ndtr

from privrep.typing import Array

FAR = 11.0  # standard deviations of a Gaussian's losses that the grid reaches; beyond lies less than 1e-27


def compute_batch_deltas(epsilons: Array, multiplier: float, rate: float) -> Array:
    """Return delta(e) of the module's guarantee at each epsilon.

    Args:
        epsilons: (n,), of either sign.
        multiplier: z, the noise's standard deviation over the sensitivity given the batch.
        rate: q, the probability to be in the batch.
    """
    size, mu = np.abs(epsilons), 1 / multiplier
    inner = _log1p_exp_ratio(size, rate)
    log_a, log_b = log_ndtr(-inner / mu + mu / 2), inner + log_ndtr(-inner / mu - mu / 2)
    above = rate * np.exp(log_a) * -np.expm1(np.minimum(log_b - log_a, 0.0))
    below = -np.expm1(-size) + np.exp(-size) * above
    return np.where(epsilons >= 0, above, below)


def _log1p_exp_ratio(size: Array, rate: float) -> Array:
    """Return log(1 + (e^size - 1)/rate), for sizes (n,) that e^size cannot be taken of, too."""
    small = np.minimum(size, 30.0)
    large = size - math.log(rate) + np.log1p((rate - 1) * np.exp(-size))
    return np.where(size <= 30.0, np.log1p(np.expm1(small) / rate), large)


def make_batch_loss(multiplier: float, rate: float, interval: float) -> Any:
    """Return the distribution of privacy losses of one release, an object of dp-accounting, rounded up.

    Args:
        multiplier: z of the module's guarantee.
        rate: q.
        interval: width of the grid onto whose multiples losses are rounded.
    """
    from dp_accounting.pld import pld_pmf
    from dp_accounting.pld import privacy_loss_distribution as pld

    mu = 1 / multiplier
    farthest = mu * mu / 2 + FAR * mu  # of everyone asked; about a batch losses are less
    if farthest < 600:
        farthest = math.log1p(rate * math.expm1(farthest))
    end = math.ceil(farthest / interval)
    deltas = compute_batch_deltas(interval * np.arange(-end, end + 1, dtype=np.float64), multiplier, rate)
    pmf = pld_pmf.create_pmf_pessimistic_connect_dots_fixed_gap(interval, -end, end, np.clip(deltas, 0.0, 1.0))
    return pld.PrivacyLossDistribution(pmf)
