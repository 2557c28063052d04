"""Bounds of chances and deviations that were observed, each false with at most a stated probability.

Formal guarantee, for independent draws:
* Chances. Of n draws, k hit. The bounds of Clopper and Pearson (1934) are on the wrong side of the chance of a hit with
  probability at most `error`. If the draws' chances differ, they bound the mean of the chances (Hoeffding 1956), as
  long as k/n lies outside of (mean - 1/n, mean + 1/n).
* Deviations. Let n residuals be draws of N(m, s^2). The sum of their squares over s^2 has a chi-squared distribution,
  non-central if m is not zero, and then it is larger. So the root of the sum over the `error` quantile of the central
  one is below s with probability at most `error`. Residuals that are not centred make the bound larger, never smaller.
"""

from __future__ import annotations

import math

from scipy.stats import beta, chi2


def bound_chance_below(hits: int, draws: int, error: float) -> float:
    """Return a lower bound of the chance of a hit; see the module's guarantee.

    Args:
        hits: draws that hit.
        draws: all of them.
        error: chance that the bound is false.
    """
    return 0.0 if hits == 0 else float(beta.ppf(error, hits, draws - hits + 1))


def bound_chance_above(hits: int, draws: int, error: float) -> float:
    """Return an upper bound of the chance of a hit; arguments as in `bound_chance_below`."""
    return 1.0 if hits == draws else float(beta.ppf(1 - error, hits + 1, draws - hits))


def bound_deviation_above(squares: float, count: int, error: float) -> float:
    """Return an upper bound of the standard deviation of independent residuals whose mean should be zero.

    Args:
        squares: the sum of their squares.
        count: how many there are.
        error: chance that the bound is false.
    """
    return math.sqrt(squares / float(chi2.ppf(error, count)))
