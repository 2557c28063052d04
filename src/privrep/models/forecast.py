"""Forecasts of the error of predictions before any data is seen: by privrep, a user's mean, alone, and a mixed model.

Users have m rows each and slopes in d features of unit variance, without correlation. Targets around a user's own line
have variance s^2, levels t^2. Slopes that all users share add w^2 to a target. Users' own slopes add v^2, along k
directions. Means of squared errors on new rows of users who took part:

  a user's mean   (s^2 + v^2 + w^2) (1 + 1/m)
  alone           a ridge regression with the best penalty, closed form below; or the mean, if that is better
  mixed model     s^2 + doubt about slopes along the true U + doubt about the level, both closed form, + sampling error
  privrep         the same, with the error that noise leaves in the prior:
    common slopes   a user's gradient has norm sqrt(d (m - 1) r^2), r^2 what slopes leave; the noise of a release that
                    spends mu_t^2 is divided by n (m - 1). Steps are shrunk by their noise: precisions add up
    U               `planning.predict_direction_error`; what of v^2 it misses is noise to everyone
    level           the same for one coordinate of users' means
    family          the best of common slopes, slopes along U and slopes in all features, if losses are legible
    histograms      if sizes of the features are lost in noise, there are levels alone; if the target's is, own means

How rough it is. Constants of histograms and of clipping were set on 100 simulated fits. 150 other problems were drawn
at random afterwards: 500 to 20,000 users, 3 to 50 features, rank 0 to 3, 3 to 15 rows, epsilon 0.3, 1 or 3, either
relation; a rank was given if it was not 0. The root of a simulated fit's mean squared error was within 5% of the
forecast for 133 and within 10% for 145. With rank="auto" it was within 10% for 138. With users' means that differ and
levels that follow them, it was within 10% for 36 of 40. Some were off by up to a factor of three either way. There
histograms or directions are just heard, or just not, or "auto" finds another rank.
Correlated features, heavy tails and users with very different numbers of rows are not modelled.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Protocol

from privrep.linear.choice import STRONG, UNKNOWN
from privrep.linear.families import LEGIBLE
from privrep.linear.numbers import MOST_ALL
from privrep.models.planning import (
    MOST_PEOPLE,
    NUMBERS,
    Plan,
    PlanningProblem,
    find_fewest_users,
    find_sensitivity_factor,
    predict_direction_error,
    predict_few_rows_error,
)
from privrep.privacy.ledger import Budget


def find_posterior_share(rows: float, coordinates: int, ratio: float) -> float:
    """Return what doubt about slopes adds to the variance of a new target, in units of the noise's.

    Let Z be a Gaussian design, and lambda the noise's variance over a coordinate's. The mean of tr (Z^T Z + lambda)^-1
    is about the t that solves t (rows / (1 + t) + lambda) = coordinates.

    Args:
        rows: that tell of slopes.
        coordinates: of the slopes.
        ratio: the variance that slopes add to a target, all coordinates together, over the noise's.
    """
    if not coordinates or ratio <= 0:
        return 0.0
    penalty = coordinates / ratio
    b = rows + penalty - coordinates
    return (math.sqrt(b * b + 4 * penalty * coordinates) - b) / (2 * penalty)


@dataclass(frozen=True)
class Forecast:
    """Forecast mean squared errors on new rows of users who took part."""

    mean: float  # by each user's own mean
    alone: float  # the best of that and a ridge regression of each user's own
    mixed: float  # a mixed model without privacy
    private: float  # privrep
    sine: float  # mean squared sine between learned and true directions; 0 where there is nothing to learn

    @property
    def gain(self) -> float:
        """Return the part by which privrep's squared error is smaller than a user's mean's."""
        return 1 - self.private / self.mean

    @property
    def most(self) -> float:
        """Return the gain of a mixed model without privacy."""
        return 1 - self.mixed / self.mean


def forecast(users: float, problem: PlanningProblem, budget: Budget) -> Forecast:
    """Predict errors. Rough.

    Args:
        users: how many take part.
        problem: what is known without looking at the data.
        budget: of the fit.
    """
    p, once = problem, 1 + 1 / problem.rows  # a user's own level has the error of the mean of its rows
    mean = (p.noise**2 + p.spread + p.common**2) * once
    own = p.noise**2 * (1 + find_posterior_share(p.within, p.features, (p.spread + p.common**2) / p.noise**2)) * once
    alone = min(mean, own)
    mixed = find_exact_knowledge(users, p).least_error(p)
    return Forecast(
        mean, alone, mixed, _predict_private(users, p, budget, mean), predict_direction_error(users, p, budget)
    )


@dataclass(frozen=True)
class Known:
    """Knowledge of a population: errors of the parts of the prior, as variances that they add to a target."""

    slopes: float  # of common slopes
    along: float  # the same where users' slopes along U are known
    sine: float  # mean squared sine of U
    level: float = 0.0  # of the mean level
    ratio: float | None = None  # that levels are taken to have, over the noise; None: what they have
    heads: float | None = None  # the same of each coordinate of slopes along U
    families: tuple[int, ...] = (0, 1)  # that heads may be of

    def least_error(self, p: PlanningProblem) -> float:
        """Return the mean squared error of heads of the best family."""
        return min(_predict_family_error(p, family, self) for family in self.families)


def _predict_family_error(p: PlanningProblem, family: int, known: Known) -> float:
    """Return the mean squared error of heads of one family.

    Args:
        p: what is known without looking at the data.
        family: slopes are common (0), differ along U (1) or in all features (2).
        known: errors of the prior.
    """
    if family == 0:
        noise, doubt = p.noise**2 + p.spread + known.slopes, 0.0
    elif family == 1:
        noise = p.noise**2 + known.sine * p.spread + known.along
        slopes = (1 - known.sine) * p.spread / noise
        doubt = find_posterior_share(p.within, p.rank, slopes)
        if known.heads is not None:
            kept = known.heads * p.within / (1 + known.heads * p.within)
            doubt = max((1 - kept) ** 2 * slopes + kept**2 * p.rank / p.within, doubt)
    else:
        noise = p.noise**2
        doubt = find_posterior_share(p.within, p.features, (p.spread + known.slopes) / noise)
    left = noise * (1 + doubt)
    variance = p.levels**2 + known.level
    ratio = variance / left if known.ratio is None else known.ratio
    weight = ratio * p.rows / (1 + ratio * p.rows)  # of a user's own rows for its level
    return left + (1 - weight) ** 2 * variance + weight**2 * left / p.rows


def find_exact_knowledge(n: float, p: PlanningProblem) -> Known:
    """Return what a mixed model without privacy knows of n users: all but what few rows leave."""
    sampled = p.features * (p.noise**2 + p.spread) / (n * p.within)
    little = predict_few_rows_error(n, p) if 0 < p.rank < p.features else 0.0
    return Known(sampled, sampled, min(little, 1.0))


def _predict_private(n: float, p: PlanningProblem, budget: Budget, mean: float) -> float:
    """Return privrep's mean squared error, by heads of the best family, where users can tell.

    Args:
        n: how many users there are.
        p: what is known without looking at the data.
        budget: of the fit.
        mean: the mean squared error of users' means.
    """
    if not _is_heard(n, 1, budget):
        return mean  # not even the target's size is
    factor = find_sensitivity_factor(budget.relation)
    size = p.levels**2 + p.noise**2 / p.rows
    dear = NUMBERS.clipped / (0.3 * NUMBERS.rest(p.rank) * budget.mu**2)
    level = min(predict_level_error(n, p, p.features, dear, factor), 0.1 * size)  # by histograms at worst
    told = n * budget.mu * math.sqrt(0.2 * NUMBERS.shares.families) > SPREADS * factor
    found = find_private_knowledge(n, p, budget, NUMBERS, level, None if told else UNKNOWN).least_error(p)
    return found if are_features_heard(n, p, budget) else min(mean, found)


def find_private_knowledge(
    n: float, p: PlanningProblem, budget: Budget, plan: Plan, level: float, ratio: float | None
) -> Known:
    """Return what privrep knows of slopes, beside levels.

    Args:
        n: how many users there are.
        p: what is known without looking at the data.
        budget: of the fit.
        plan: of the fit.
        level: squared error of the mean level.
        ratio: that levels are taken to have, over the noise; None: what they have.
    """
    s, total, factor = plan.shares, budget.mu**2, find_sensitivity_factor(budget.relation)
    legible = n * budget.mu * math.sqrt(0.2 * s.families) > LEGIBLE
    alone = bool(p.rank) and plan.heads is not None and not legible  # there is a U, whatever it is worth
    heads = plan.heads / p.noise**2 if alone and plan.heads is not None else None
    if not are_features_heard(n, p, budget, plan):
        return Known(p.common**2, p.common**2, 1.0, level, ratio, heads, (int(alone),))
    rest, residual = plan.rest(p.rank) * total, p.noise**2 + p.spread

    def after(p: PlanningProblem, residual: float, steps: list[float], before: float | None = None) -> float:
        return _predict_common_error(
            n, p, residual, [plan.clipped / mu_squared for mu_squared in steps], factor, before
        )

    slopes = after(p, residual, [s.common * total, *(part * rest for part in plan.steps)])
    again = [s.again * rest] if p.common else []
    first = after(p, residual, [s.common * total, *again])
    sine, fewer = predict_direction_error(n, p, budget, plan), replace(p, rows=max(p.rows - p.rank, 2))
    along = after(fewer, p.noise**2 + sine * p.spread, [0.8 * s.last * rest], first)
    families = [int(alone)]
    if p.rank and not alone and (legible or (ratio is None and p.spread > STRONG * p.noise**2)):
        families.append(1)
    if legible and p.features <= MOST_ALL:
        families.append(2)
    return Known(slopes, along, sine, level, ratio, heads, tuple(families))


def are_features_heard(n: float, p: PlanningProblem, budget: Budget, plan: Plan = NUMBERS) -> bool:
    """Return whether sizes of the features are heard.

    Args:
        n: how many users there are.
        p: what is known without looking at the data.
        budget: of the fit.
        plan: of the fit.
    """
    return _is_heard(n, p.features, budget, plan)


def _is_heard(n: float, columns: int, budget: Budget, plan: Plan = NUMBERS) -> bool:
    """Return whether a histogram of each column is heard for the most that it may cost; see `linear.location`."""
    most = plan.shares.panel.histogram[1]
    noise = math.sqrt(columns / most) / budget.mu
    if budget.relation == "replace-one-user":
        return n / 2 > plan.heard * noise  # twice the most would pay for ten standard deviations
    return 0.7 * n > plan.heard / 2 * noise


def _predict_common_error(
    n: float, p: PlanningProblem, residual: float, steps: list[float], factor: float, before: float | None = None
) -> float:
    """Return the error of common slopes after steps, as the variance it adds to a target.

    A user's gradient has norm sqrt(d rows residual), a part more for its curvature, and is clipped to about that. The
    sum is divided by the curvature, n rows. Steps are shrunk by their noise, so that precisions add up.

    Args:
        n: how many users there are.
        p: what is known without looking at the data.
        residual: variance of what slopes leave of a target.
        steps: of each, squared norm that gradients are clipped to over their mean square, over the step's mu^2.
        factor: by how many norms a neighbour moves a sum.
        before: the error before these steps; None: nothing is known.
    """
    d, rows = p.features, p.within
    signal = p.common**2 if before is None else before
    if not signal:
        return 0.0
    precision = 1 / signal
    for dear in steps:
        noise = dear * (factor * d / n) ** 2 * residual / (rows / 2)
        precision += 1 / (noise + d * residual / (n * rows))
    return 1 / precision


def predict_level_error(n: float, p: PlanningProblem, contexts: int, dear: float, factor: float) -> float:
    """Return the squared error of the mean level by one release.

    Args:
        n: how many users there are.
        p: what is known without looking at the data.
        contexts: coordinates of users' mean rows in the same release.
        dear: squared norm that gradients are clipped to over their mean square, over the release's mu^2.
        factor: by how many norms a neighbour moves a sum.
    """
    return dear * (factor / n) ** 2 * (1 + contexts) * (p.levels**2 + p.noise**2 / p.rows)


SPREADS = 16.0  # users, times the root of mu^2, for histograms of levels to be read, for each clipping norm


@dataclass(frozen=True)
class Goal:
    """A gain over users' own means, and its price: users at this budget, and epsilon for a number of users."""

    goal: str
    gain: float
    users: int | None  # None: more than there are people
    epsilon: float | None  # None: no number of users was given, or no epsilon up to `MOST_EPSILON` is enough


def find_goals(problem: PlanningProblem, budget: Budget, users: int | None, wanted: float | None) -> list[Goal]:
    """Return what common goals take: parts of what a mixed model without privacy gains with very many users.

    Args:
        problem: what is known without looking at the data.
        budget: of the fit.
        users: how many there are; None: not known.
        wanted: a gain of one's own, a part of the squared error of users' means; None: no other goal.
    """
    return find_goals_by(lambda n, b: forecast(n, problem, b), budget, users, wanted)


class Gains(Protocol):
    """A forecast, as goals see it."""

    @property
    def gain(self) -> float:
        """Return the part by which privrep's error is smaller than the reference's."""

    @property
    def most(self) -> float:
        """Return the gain of the best model without privacy."""


Predict = Callable[[float, Budget], Gains]  # from users and budget


def find_goals_by(predict: Predict, budget: Budget, users: int | None, wanted: float | None) -> list[Goal]:
    """Return what common goals take, by a forecast of any kind; see `find_goals`.

    Args:
        predict: makes the forecast from users and budget.
        budget: of the fit.
        users: how many there are; None: not known.
        wanted: a gain of one's own; None: no other goal.
    """
    most = predict(int(MOST_PEOPLE), budget).most
    goals = {f"{part:.0%} of what a mixed model without privacy gains": part * most for part in PARTS}
    if wanted is not None:
        goals["the gain that is asked for"] = wanted
    found = []
    for goal, gain in goals.items():
        if gain > LEAST_GAIN:
            epsilon = None if users is None else _find_least_epsilon(predict, budget, users, gain)
            found.append(Goal(goal, gain, _find_fewest_users(predict, budget, gain), epsilon))
    return found


def find_users(problem: PlanningProblem, budget: Budget, gain: float) -> int | None:
    """Return the fewest users for which the predicted gain over a user's mean is at least this; None: too many.

    Args:
        problem: what is known without looking at the data.
        budget: of the fit.
        gain: to reach, a part of the squared error of users' means.
    """
    return _find_fewest_users(lambda n, b: forecast(n, problem, b), budget, gain)


def _find_fewest_users(predict: Predict, budget: Budget, gain: float) -> int | None:
    """Return the fewest users for which the forecast reaches this gain; None: more than there are people."""
    return find_fewest_users(lambda users: predict(users, budget).gain >= gain)


def find_epsilon(users: int, problem: PlanningProblem, budget: Budget, gain: float) -> float | None:
    """Return the smallest epsilon for which these users' predicted gain is at least this, two digits of it.

    Return None where no epsilon up to MOST_EPSILON is enough.

    Args:
        users: how many there are.
        problem: what is known without looking at the data.
        budget: whose delta and relation count.
        gain: to reach, a part of the squared error of users' means.
    """
    return _find_least_epsilon(lambda n, b: forecast(n, problem, b), budget, users, gain)


def _find_least_epsilon(predict: Predict, budget: Budget, users: int, gain: float) -> float | None:
    """Return the smallest epsilon for which the forecast reaches this gain, two digits of it; None: none is enough.

    Args:
        predict: makes the forecast from users and budget.
        budget: whose delta and relation count.
        users: how many there are.
        gain: to reach.
    """
    low, high = LEAST_EPSILON, MOST_EPSILON

    def reached(epsilon: float) -> bool:
        return predict(users, replace(budget, epsilon=epsilon)).gain >= gain

    if not reached(high):
        return None
    while high / low > 1.01:
        middle = math.sqrt(low * high)
        low, high = (low, middle) if reached(middle) else (middle, high)
    return float(f"{high:.2g}")


PARTS = (0.5, 0.9, 0.99)
LEAST_GAIN = 0.005  # smaller gains are no goals
LEAST_EPSILON, MOST_EPSILON = 1e-3, 20.0
