"""Forecasts of the error of predicted ratings before any data is seen: by a user's mean, offsets of items, and privrep.

Users have m ratings each of d items, the j-th of which is rated in proportion to 1 / (j + d / 20): a few often, most
rarely. Ratings around a user's level have the variance of the noise and of the items' offsets. Means of squared
errors on new ratings by users who took part:

  a user's mean   (s^2 + c^2) (1 + 1/m)
  offsets         s^2 + what sampling leaves unknown of offsets + doubt about the level, which is shrunk
  privrep         the same, with the noise that its passes on offsets have: `linear.offsets.predict_loss`

Tastes are not forecast: there is no telling beforehand how much they explain.

How rough it is: of 24 simulated fits (500 to 20,000 users, 50 to 2,000 items, 3 to 50 ratings each, epsilon 0.3, 1 and
3), all had a root mean squared error within 5% of the forecast, most a little more than it;
tests/models/test_rating_forecast.py makes others.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np

from privrep.errors import InputError
from privrep.linear.offsets import Items, predict_loss
from privrep.privacy.ledger import Budget

FOR_OFFSETS = 0.75  # of mu^2, where nothing is learned of tastes
SAMPLED = 1e12  # precision of sums without noise


@dataclass(frozen=True)
class RatingProblem:
    """Public facts and guesses of a table of ratings, in units of ratings."""

    items: int
    rows: int  # ratings of each user
    noise: float = 1.0  # deviation of ratings around what level and offset say
    levels: float = 0.5  # deviation of users' levels
    offsets: float = 0.5  # deviation of items' offsets

    def __post_init__(self) -> None:
        if self.items < 1 or self.rows < 1:
            raise InputError("there are items, and users have ratings: both at least 1.")
        if not (self.noise > 0 and self.levels >= 0 and self.offsets >= 0):
            raise InputError("deviations are 0 or more, and that of the noise is above 0.")

    @property
    def within(self) -> float:
        """Return the variance of a user's ratings around its level."""
        return self.noise**2 + self.offsets**2


@dataclass(frozen=True)
class RatingForecast:
    """Forecast mean squared errors on new ratings of users who took part."""

    mean: float  # by each user's own mean
    shrunk: float  # the same, drawn towards the mean of all
    exact: float  # offsets and shrunk levels without privacy
    private: float  # privrep
    newcomers: float  # privrep, of users without ratings


def guess_rated_items(users: float, problem: RatingProblem) -> Items:
    """Return how often items are taken to be rated, as unit vectors of users add up."""
    shares = 1 / (np.arange(problem.items) + 1 + problem.items / 20)
    return Items(users * math.sqrt(problem.rows) * shares / shares.sum(), 1e-9, users)


def forecast_ratings(users: float, problem: RatingProblem, budget: Budget) -> RatingForecast:
    """Predict errors. Rough.

    Args:
        users: how many take part.
        problem: what is known without looking at the data.
        budget: of the fit.
    """
    p = problem
    items, part = guess_rated_items(users, p), p.offsets**2 / p.within
    noise = FOR_OFFSETS * budget.mu**2 / (4 if budget.relation == "replace-one-user" else 2)
    left = [p.noise**2 + p.within * predict_loss(items, part, each) for each in (SAMPLED, noise)]
    exact, private = (each + _find_doubt(p, each) for each in left)
    mean = p.within * (1 + 1 / p.rows)
    return RatingForecast(mean, p.within + _find_doubt(p, p.within), exact, private, left[1] + p.levels**2)


def _find_doubt(p: RatingProblem, left: float) -> float:
    """Return the variance that stays unknown of a user's level, from ratings with this variance around it."""
    return p.levels**2 * left / (left + p.rows * p.levels**2) if p.levels else 0.0
