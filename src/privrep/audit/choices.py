"""Choices among some candidates, many of them, each with a budget of its own, in two worlds.

Formal guarantee. One canary loses most by even candidates in the first world. In the second it loses most by odd ones,
or is not there. What other users lose is public, and the same in both. Coins decide which world answers a draw. Two
bounds are made, and the larger counts. The one by draws is false with at most a tenth of `error`, the other one with
the rest, so the answer is false with at most `error`.
* Draws. In each world the chance of an even candidate is bounded from both sides by `lower`. A choice that is
  epsilon-DP has chances within a factor of e^epsilon of each other. The logarithm of the largest factor that the bounds
  leave is a lower bound of epsilon, whatever the mechanism.
* Odds. Let candidate c be chosen with a chance proportional to e^(-x T(c) / R), as the exponential mechanism has it,
  for an x that is not known. T are the totals of the world that answers, and R is the range over candidates of the
  difference between both worlds. T and R are read off the engine, never taken from a bound. By `privacy.exponential`
  the worst neighbours that move totals by R have chances that differ by e^x, so x is epsilon.
  Let t be the sum over draws of T(chosen) / R, and A(x) the sum over draws of the logarithm of the sum of e^(-x T / R).
  By Chernoff's bound a sum of t or less has a chance of at most exp((y - x) t + A(y) - A(x)), for every y above x. The
  best y has A'(y) = -t. All x for which this is below the error are excluded, up to the one where it equals it.
"""

from __future__ import annotations

import math

import numpy as np
from numpy.typing import NDArray
from scipy.optimize import brentq
from scipy.special import logsumexp

from privrep.audit.canaries import Prefer, draw_coins
from privrep.audit.lower import bound_chance_above, bound_chance_below
from privrep.audit.seen import Lower
from privrep.audit.worlds import TwoWorlds
from privrep.data.table import UserTable
from privrep.privacy.billboard import Billboard
from privrep.privacy.events import Relation
from privrep.privacy.ledger import Budget, Ledger
from privrep.privacy.noise import NoiseSource
from privrep.privacy.run import Run
from privrep.typing import Array

CANDIDATES = 64
FARTHEST = 6.0  # scales by which the worst candidate loses more than the best
CROWD = 0.25  # power of a candidate's rank: there are more of the bad ones, so that draws tell most of the scale
MOST_OTHERS = 1 << 14
PAGE = "canary"


def choose_often(
    epsilon: float, relation: Relation, draws: int, noise: NoiseSource, error: float
) -> tuple[float, Lower]:
    """Return the claimed epsilon of one choice, and a lower bound of it; see the module's guarantee.

    Args:
        epsilon: of one choice.
        relation: neighbours of the guarantee.
        draws: how often it is made.
        noise: of the runs.
        error: chance that the bound is false.
    """
    coins, chosen = draw_coins(draws), np.zeros(draws, dtype=np.int64)
    tables = _make_tables(epsilon, relation)
    worlds = TwoWorlds(*tables), TwoWorlds(*tables, second_answers=True)
    claimed = 0.0
    for draw, coin in enumerate(coins.tolist()):
        run = Run(worlds[coin], Ledger(Budget(epsilon, 0.0, relation)), Billboard(), noise)
        chosen[draw] = run.choose(PAGE, Prefer(), CANDIDATES, epsilon)
        claimed = run.ledger.epsilon
        worlds[coin].totals[1:] = []  # the same for every draw
    totals = np.array(next(each.totals[0]["losses"] for each in worlds if each.totals))
    by_odds = _bound_by_odds(coins, chosen, totals, 0.9 * error)
    by_draws = _bound_by_draws(coins, chosen, 0.1 * error)
    bound, by = max((by_odds, "odds"), (by_draws, "draws"))
    return claimed, Lower(bound, by, float((chosen % 2 != coins).mean()), by_odds)


def _make_tables(epsilon: float, relation: Relation) -> tuple[UserTable, UserTable]:
    """Return the users of both worlds. Their losses are features of a row: far out of [0, 1] for the canary.

    Args:
        epsilon: of the choice.
        relation: neighbours of the guarantee.
    """
    replaced, even = relation == "replace-one-user", np.arange(CANDIDATES) % 2 == 0
    rank = (np.arange(CANDIDATES) // 2 + 0.5) / (CANDIDATES // 2)
    offset = FARTHEST * (2 if replaced else 1) / epsilon * rank**CROWD
    others = [np.clip(offset - user, 0, 1) for user in range(min(math.ceil(offset.max()), MOST_OTHERS))]
    loud = np.where(even, 1e9, -1e9)
    first, second = (np.array([*others, *canary]) for canary in ([loud], [-loud] if replaced else []))
    tables = [UserTable.from_rows(rows, np.zeros(len(rows)), np.arange(len(rows))) for rows in (first, second)]
    return tables[0], tables[1]


def _bound_by_odds(coins: NDArray[np.bool_], chosen: NDArray[np.int64], totals: Array, error: float) -> float:
    """Return the lower bound of epsilon of an exponential mechanism of unknown scale.

    Args:
        coins: whether the second world answered, (draws,).
        chosen: candidates, (draws,).
        totals: of both worlds, (2, candidates).
        error: chance that the bound is false.
    """
    moved = totals[0] - totals[1]
    range_ = float(np.ptp(moved))
    if not range_:
        return 0.0
    scaled = (totals - totals.min(axis=1, keepdims=True)) / range_
    answered = np.array([(~coins).sum(), coins.sum()])
    seen = float(scaled[coins.astype(int), chosen].sum())

    def log_sums(x: float) -> float:
        """Return A(x)."""
        return float(answered @ logsumexp(-x * scaled, axis=1))

    def excess(x: float) -> float:
        """Return by how much the mean at x lies above what was seen: it falls with x."""
        weights = np.exp(-x * scaled - logsumexp(-x * scaled, axis=1, keepdims=True))
        return float(answered @ (weights * scaled).sum(axis=1)) - seen

    if excess(0.0) <= 0:
        return 0.0
    high = 1.0
    while excess(high) > 0 and high < 1e6:
        high *= 2
    if excess(high) > 0:
        return 0.0  # nothing but the best candidate was ever chosen, which no bound of this kind explains
    best = float(brentq(excess, 0.0, high, xtol=1e-12))

    def log_chance(x: float) -> float:
        """Return the logarithm of the chance of what was seen at x, less that of the error."""
        return (best - x) * seen + log_sums(best) - log_sums(x) - math.log(error)

    return float(brentq(log_chance, 0.0, best, xtol=1e-12)) if log_chance(0.0) < 0 else 0.0


def _bound_by_draws(coins: NDArray[np.bool_], chosen: NDArray[np.int64], error: float) -> float:
    """Return the lower bound of epsilon by the chances of even and odd candidates in both worlds alone.

    Arguments are as in `_bound_by_odds`. Each of two bounds in each of two worlds serves two comparisons, so each of
    the four may be false with a quarter of the error.
    """
    draws = [int((coins == world).sum()) for world in (False, True)]
    even = [int((chosen[coins == world] % 2 == 0).sum()) for world in (False, True)]
    if not all(draws):
        return 0.0
    low = [bound_chance_below(k, n, error / 4) for k, n in zip(even, draws, strict=True)]
    high = [bound_chance_above(k, n, error / 4) for k, n in zip(even, draws, strict=True)]
    pairs = [(low[0], high[1]), (low[1], high[0]), (1 - high[0], 1 - low[1]), (1 - high[1], 1 - low[0])]
    return max([0.0, *(math.log(more / less) for more, less in pairs if more > 0 and less > 0)])
