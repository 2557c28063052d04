"""Forecasts of the log-loss of yes/no labels before any data is seen: by privrep, users' frequencies, and other models.

A label's output is a level of its user's and slopes times the row, as in `forecast`, on the logit. A label weighs
W = E[p (1 - p)], as much as a number with noise of variance 1/W. A predictor leaves u of the outputs' variance e + u
unexplained, by the formulas for such numbers. It says E sigmoid(z + N(0, u)), and loses the entropy of that, in the
mean over z ~ N(a, e). What is beyond e + u, for a level that was not found, costs W/2 each.

  own frequency   of a user's labels, with one more row of each class; exact, but for slopes of users' own
  shrunk          the same, drawn towards the frequency of all as far as levels ask for, without privacy; as exact
  pooled          a logistic regression of all rows: level and common slopes
  mixed model     a mixed logistic model without privacy
  privrep         as numbers are, without histograms of the target; where nothing is heard, own frequencies
  newcomers       users without rows, by the released prior

How rough it is (`python -m experiments.label_forecast`). Constants of `planning.LABELS`, and the loss of a fit that
hears little, were settled on 180 simulated fits. On 60 other problems (500 to 10,000 users, 2 to 20 features, rank 0 or
1, 2 to 15 rows, rates from 0.05, epsilon 0.3, 1 or 3; a rank was given if it was not 0) a fit's log-loss was within 5%
of the forecast for 50, within 10% for 57; of newcomers within 5% for 59. Predictors' losses lie close together, though:
of what lies between own frequencies and the best model without privacy, half of the forecasts missed up to 21%, one in
ten more than 85%. Forecasts are off where a level, features or directions are just heard, or just not. Newcomers'
may then be off by a factor of two. Outputs are taken to be normal, which large slopes of users' own make them less.
Slopes that are found though sizes of features are not heard, and several classes, are not modelled.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property

import numpy as np
from scipy.optimize import brentq
from scipy.special import entr, expit, ndtr
from scipy.stats import binom

from privrep.errors import InputError
from privrep.linear.descent import TAIL, WEIGHT
from privrep.linear.families import LEGIBLE
from privrep.linear.labels import LEVEL
from privrep.linear.newton import BENT, MOVED
from privrep.models.forecast import (
    Goal,
    are_features_heard,
    find_exact_knowledge,
    find_goals_by,
    find_private_knowledge,
    predict_level_error,
)
from privrep.models.planning import LABELS, PlanningProblem, find_sensitivity_factor
from privrep.privacy.ledger import Budget
from privrep.typing import Array

NODES, MASSES = np.polynomial.hermite_e.hermegauss(61)
MASSES = MASSES / MASSES.sum()
STEEPEST = 100.0  # variance of outputs beyond which labels are certain


@dataclass(frozen=True)
class LabelProblem:
    """A problem of yes/no labels, described without looking at the data. Deviations are on the logit."""

    features: int
    rank: int  # directions in which users' slopes differ
    rows: int  # of each user
    rate: float  # share of the rarer class
    levels: float = 1.0  # deviation of users' levels
    slopes: float = 0.5  # of what users' own slopes add to an output; 0 where the rank is
    common: float = 0.5  # of what common slopes add to it

    def __post_init__(self) -> None:
        if not 0 < self.rate <= 0.5:
            raise InputError(f"rate is the share of the rarer class, above 0 and at most 0.5. Got {self.rate} instead.")
        PlanningProblem(self.features, self.rank, self.rows, 1.0, self.levels, self.slopes, self.common)  # the others
        if self.variance > STEEPEST:
            raise InputError(
                f"levels, slopes and common are deviations on the logit; with {math.sqrt(self.variance):g} in all, "
                f"labels are certain. Give numbers of which the squares add up to {STEEPEST:g} at most."
            )

    @property
    def variance(self) -> float:
        """Return the variance of outputs."""
        return self.levels**2 + (self.slopes**2 if self.rank else 0.0) + self.common**2

    @cached_property
    def level(self) -> float:
        """Return the mean output, with which labels have their rate."""
        return float(brentq(lambda a: _average(expit, a, self.variance) - self.rate, -STEEPEST, STEEPEST))

    @cached_property
    def weight(self) -> float:
        """Return the mean of p (1 - p): the weight of a label."""
        return _average(lambda z: expit(z) * expit(-z), self.level, self.variance)

    @cached_property
    def as_numbers(self) -> PlanningProblem:
        """Return the problem of numbers that tell as much."""
        noise = 1 / math.sqrt(self.weight)
        return PlanningProblem(self.features, self.rank, self.rows, noise, self.levels, self.slopes, self.common)

    def loss(self, unexplained: float) -> float:
        """Return the log-loss of a predictor that leaves this much of the outputs' variance unexplained."""
        u = min(max(unexplained, 0.0), self.variance)

        def entropy_at(z: Array) -> Array:
            return _find_entropy(expit(z[:, None] + math.sqrt(u) * NODES) @ MASSES)

        beyond = max(unexplained - self.variance, 0.0)
        return _average(entropy_at, self.level, self.variance - u) + self.rate * (1 - self.rate) / 2 * beyond

    @cached_property
    def counts(self) -> tuple[Array, Array]:
        """Return users' mean probabilities, (nodes,), and the masses of users by their number of yeses, (nodes, rows +
        1)."""
        rest = self.variance - self.levels**2
        p = np.array([_average(expit, self.level + self.levels * node, rest) for node in NODES])
        masses = binom.pmf(np.arange(self.rows + 1), self.rows, p[:, None]) * MASSES[:, None]
        return p, np.asarray(masses)

    def loss_of_frequencies(self, more: float) -> float:
        """Return the log-loss of each user's own frequency, with this many more rows of each class."""
        p, masses = self.counts
        said = (np.arange(self.rows + 1) + more) / (self.rows + 2 * more)
        return float(-(masses * (p[:, None] * np.log(said) + (1 - p[:, None]) * np.log(1 - said))).sum())

    @cached_property
    def loss_of_shrunk(self) -> float:
        """Return the log-loss of frequencies that are drawn towards the frequency of all, as far as is best."""
        p, masses = self.counts
        seen = masses.sum(axis=0)
        return float(seen @ _find_entropy((p @ masses) / np.maximum(seen, 1e-300)))


def _average(value: Callable[[Array], Array], centre: float, variance: float) -> float:
    """Return the mean of a function of a normal variable.

    Args:
        value: the function, of an array (nodes,).
        centre: mean of the variable.
        variance: of the variable.
    """
    return float(value(centre + math.sqrt(max(variance, 0.0)) * NODES) @ MASSES)


def _find_entropy(p: Array) -> Array:
    """Return the entropy of labels, in nats, from probabilities of any shape."""
    return np.asarray(entr(p) + entr(1 - p))


@dataclass(frozen=True)
class LabelForecast:
    """Forecast log-losses, in nats a label, on new rows of users who took part, and of newcomers."""

    own: float  # by each user's own frequency, smoothed
    shrunk: float  # the same, drawn towards the frequency of all, without privacy
    pooled: float  # level and common slopes, without privacy
    mixed: float  # a mixed logistic model without privacy
    private: float  # privrep
    newcomers: float  # privrep, of users without rows

    @property
    def gain(self) -> float:
        """Return the part by which privrep's log-loss is smaller than the log-loss of users' own frequencies."""
        return 1 - self.private / self.own

    @property
    def most(self) -> float:
        """Return the gain of a mixed model without privacy."""
        return 1 - self.mixed / self.own


def forecast_labels(users: float, problem: LabelProblem, budget: Budget) -> LabelForecast:
    """Predict log-losses. Rough.

    Args:
        users: how many take part.
        problem: what is known without looking at the data.
        budget: of the fit.
    """
    p, own = problem.as_numbers, problem.loss_of_frequencies(1.0)
    differ = p.levels**2 + p.spread
    sampled = p.features * (p.noise**2 + differ) / (users * p.rows)
    pooled = problem.loss(differ + (p.common**2 * sampled / (p.common**2 + sampled) if p.common else 0.0))
    mixed = problem.loss(find_exact_knowledge(users, p).least_error(p) - p.noise**2)
    private, newcomers = _predict_private(users, problem, budget)
    return LabelForecast(own, problem.loss_of_shrunk, pooled, min(mixed, own), private, newcomers)


def _predict_private(n: float, problem: LabelProblem, budget: Budget) -> tuple[float, float]:
    """Return privrep's log-losses for users who took part and for newcomers, in the mean over whether a level is found.

    A level that is not found is taken to be zero. Where losses cannot tell how far levels vary, their variance is taken
    to be LEVEL.
    """
    p = problem.as_numbers
    told = n * math.sqrt(LABELS.level) * budget.mu > LEGIBLE
    ratio = None if told else LEVEL / p.noise**2
    nothing = problem.loss_of_frequencies(1.0)  # users vote on whether they do without the prior

    def lost(level: float) -> tuple[float, float]:
        known = find_private_knowledge(n, p, budget, LABELS, level, ratio)
        slopes = known.along if p.rank else known.slopes
        new = problem.loss(p.levels**2 + p.spread + level + slopes)
        return min(problem.loss(known.least_error(p) - p.noise**2), nothing), min(new, math.log(2))

    found, error = _find_level(n, problem, budget)
    known, new = lost(min(error, problem.level**2))
    without, without_new = lost(problem.level**2)
    if not (told or are_features_heard(n, p, budget, LABELS)):
        without = nothing
    return found * known + (1 - found) * without, found * new + (1 - found) * without_new


def _find_level(n: float, problem: LabelProblem, budget: Budget) -> tuple[float, float]:
    """Return the chance that the mean level is found, and its squared error if it is.

    Some step must show a curvature, and then a level, that stand out from its noise (see `descent`). A user's curvature
    is scaled to TAIL of its clipping norm, as if a label weighed WEIGHT.
    """
    p, s, total, factor = problem.as_numbers, LABELS.shares, budget.mu**2, find_sensitivity_factor(budget.relation)
    heard = are_features_heard(n, p, budget, LABELS)
    rest = LABELS.rest(p.rank) + (0.0 if heard else s.panel.moments)  # moments are then not asked for
    later = LABELS.steps if not p.rank else (s.again, s.last) if heard and p.common else (s.last,)
    steps = [each * total / 2 for each in (s.common, *(part * rest for part in later))]  # the other half is for slopes
    after, best = (predict_level_error(n, p, 0, LABELS.clipped / mu, factor) for mu in (sum(steps), max(steps)))
    weight, guess = (p.rows * each / (1 + LEVEL * p.rows * each) for each in (problem.weight, WEIGHT))
    bend = TAIL * n * math.sqrt(max(steps)) / factor * min(weight / guess, 1.0)
    return float(ndtr(min(bend - BENT, abs(problem.level) / math.sqrt(best) - MOVED))), after


def find_label_goals(problem: LabelProblem, budget: Budget, users: int | None, wanted: float | None) -> list[Goal]:
    """Return what common goals take, as `forecast.find_goals` does; gains are parts of own frequencies' log-loss.

    Args:
        problem: what is known without looking at the data.
        budget: of the fit.
        users: how many there are; None: not known.
        wanted: a gain of one's own; None: no other goal.
    """
    return find_goals_by(lambda n, b: forecast_labels(n, problem, b), budget, users, wanted)
