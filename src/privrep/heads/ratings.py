"""Heads of ratings: a user's level, spread and taste given its own ratings, on the public offsets and factors of items.

    r_ij = level + u_i (c_j + b_i + <F_j, v_i> + e_ij),   b_i ~ N(0, T / u_i^2),   v_i ~ N(0, I),   e_ij ~ N(0, rest)

The user's spread u_i is the spread of its own ratings, drawn towards the typical one as if it had STRENGTH more
ratings. Given it, level and taste are a posterior mean (`heads.posterior`). A user with few ratings stays close to the
released level and to the items' offsets, and a user without ratings has just these.

Each user's numbers are a function of its own rows to the last bit (see `local.least_squares`).
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np

from privrep.heads.posterior import make_spread
from privrep.local.least_squares import ROUNDING, centre_rows
from privrep.local.representation import Ratings
from privrep.typing import Array

STRENGTH = 10.0  # ratings that the typical spread counts for


@dataclass(frozen=True)
class RatingFits:
    """Heads of users with equally many ratings, and what leaving each rating out would have given."""

    intercept: Array  # (users,)
    weights: Array  # (users, 1 + k): the user's spread, and that times its taste
    left: Array  # (users, m): ratings minus their prediction by all ratings
    left_out: Array  # (users, m): ratings minus their prediction by the others


def estimate_spreads(y: Array, typical: float) -> Array:
    """Return each user's spread, (users,), from its ratings (users, m); zero where nothing tells it.

    Args:
        y: ratings (users, m).
        typical: the spread of a typical user.
    """
    m = y.shape[1]
    squares = (centre_rows(y) ** 2).sum(axis=1)
    spread = np.sqrt((STRENGTH * typical**2 + squares) / (STRENGTH + m - 1))
    return np.where(spread > ROUNDING * np.abs(y).max(axis=1), spread, 0.0)


def fit_ratings(P: Array, y: Array, ratings: Ratings) -> RatingFits:
    """Return the heads of users with equally many ratings.

    Args:
        P: offset and factors of each rated item, (users, m, 1 + k); zero for an item that is not named.
        y: the ratings, (users, m).
        ratings: the prior.
    """
    level = ratings.level or 0.0
    unit = estimate_spreads(y, ratings.spread)
    varies, safe = unit > 0, np.where(unit > 0, unit, 1.0)
    known = np.where(varies[:, None, None], P, 0.0)
    around = (y - level) / safe[:, None] - known[:, :, 0]
    root = math.sqrt(ratings.residual)
    spread = make_spread(known[:, :, 1:] / root, around)
    ratio = ratings.level_variance / (safe**2 * ratings.residual)
    fits = spread.with_levels(np.where(ratio < 1e299, spread.raise_ratios(ratio, ratings.residual), ratio))
    taste = np.where(spread.lost[:, None], 0.0, fits.coordinates / root)
    weights = np.concatenate([unit[:, None], taste * unit[:, None]], axis=1)
    made = fits.level[:, None] + (known[:, :, 1:] @ taste[:, :, None])[:, :, 0]
    scale = safe[:, None]
    return RatingFits(level + safe * fits.level, weights, (around - made) * scale, fits.left * scale)


def make_newcomer(ratings: Ratings, factors: int) -> tuple[float, Array]:
    """Return intercept and weights (1 + factors,) of a user without ratings: the level and the items' offsets."""
    weights = np.zeros(1 + factors)
    weights[0] = ratings.spread
    return float(ratings.level or 0.0), weights
