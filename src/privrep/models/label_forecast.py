"""Predict the log-loss of yes/no labels before any data is seen: by privrep, by users' frequencies, by other models.

A label's output is a level of its user's and slopes times the row, as in `forecast`, on the logit. A label weighs
W = E[p (1 - p)], as much as a number with noise of variance 1/W. What a predictor leaves unexplained of outputs is u of
their variance e + u, by the formulas for such numbers. It says E sigmoid(z + N(0, u)), and loses the entropy of
that, in the mean over z ~ N(a, e). What is beyond e + u, for a level that was not found, costs W/2 each.

  own frequency   of a user's labels, with one more row of each class; exact, but for slopes of users' own
  shrunk          the same, drawn towards that of all as far as levels ask for, without privacy; as exact
  pooled          a logistic regression of all rows: level and common slopes
  mixed model     a mixed logistic model without privacy
  privrep         as numbers are, without histograms of the target; where nothing is heard, own frequencies
  newcomers       users without rows, by the released prior

How rough it is. Two constants of `planning.LABELS` (how far gradients are clipped, from when on histograms are heard)
were set on 60 simulated fits. Figures of others are in VALIDATED.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache, cached_property

import numpy as np
from scipy.optimize import brentq
from scipy.special import entr, expit, ndtr, polygamma
from scipy.stats import binom

from privrep.errors import InputError
from privrep.linear.descent import MOVED
from privrep.linear.families import LEGIBLE
from privrep.linear.labels import LEVEL
from privrep.models.forecast import (
    Goal,
    features_heard,
    find_goals_by,
    known_to_privrep,
    known_without_privacy,
    level_error,
)
from privrep.models.planning import LABELS, PlanningProblem
from privrep.privacy.ledger import Budget
from privrep.typing import Array

NODES, MASSES = np.polynomial.hermite_e.hermegauss(61)
MASSES = MASSES / MASSES.sum()
STEEPEST = 100.0  # output that no label is worth planning beyond


@dataclass(frozen=True)
class LabelProblem:
    """A problem of yes/no labels as one can describe it without looking at the data. Deviations are on the logit."""

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
        return float(brentq(lambda a: _mean(expit, a, self.variance) - self.rate, -STEEPEST, STEEPEST))

    @cached_property
    def weight(self) -> float:
        """Return the mean of p (1 - p): what a label weighs."""
        return _mean(lambda z: expit(z) * expit(-z), self.level, self.variance)

    @cached_property
    def as_numbers(self) -> PlanningProblem:
        """Return the problem of numbers that tell as much."""
        noise = 1 / math.sqrt(self.weight)
        return PlanningProblem(self.features, self.rank, self.rows, noise, self.levels, self.slopes, self.common)

    def loss(self, unexplained: float) -> float:
        """Return the log-loss of a predictor that leaves this of the outputs' variance."""
        u = min(max(unexplained, 0.0), self.variance)

        def entropy_at(z: Array) -> Array:
            return _entropy(expit(z[:, None] + math.sqrt(u) * NODES) @ MASSES)

        beyond = max(unexplained - self.variance, 0.0)
        return _mean(entropy_at, self.level, self.variance - u) + self.rate * (1 - self.rate) / 2 * beyond

    @cached_property
    def counts(self) -> tuple[Array, Array]:
        """Return users' mean probabilities, (nodes,), and the masses of those with so many yeses, (nodes, rows + 1)."""
        rest = self.variance - self.levels**2
        p = np.array([_mean(expit, self.level + self.levels * node, rest) for node in NODES])
        masses = binom.pmf(np.arange(self.rows + 1), self.rows, p[:, None]) * MASSES[:, None]
        return p, np.asarray(masses)

    def loss_of_frequencies(self, more: float) -> float:
        """Return the log-loss of each user's own frequency, with this many more rows of each class."""
        p, masses = self.counts
        said = (np.arange(self.rows + 1) + more) / (self.rows + 2 * more)
        return float(-(masses * (p[:, None] * np.log(said) + (1 - p[:, None]) * np.log(1 - said))).sum())

    @cached_property
    def loss_of_shrunk(self) -> float:
        """Return the log-loss of frequencies that are drawn towards that of all, as far as is best."""
        p, masses = self.counts
        seen = masses.sum(axis=0)
        return float(seen @ _entropy((p @ masses) / np.maximum(seen, 1e-300)))


def _mean(value: Callable[[Array], Array], centre: float, variance: float) -> float:
    """Return the mean of a function of a normal variable."""
    return float(value(centre + math.sqrt(max(variance, 0.0)) * NODES) @ MASSES)


def _entropy(p: Array) -> Array:
    return np.asarray(entr(p) + entr(1 - p))


@dataclass(frozen=True)
class LabelForecast:
    """Log-losses on new rows of users who took part, and of newcomers."""

    own: float  # by each user's own frequency, smoothed
    shrunk: float  # the same, drawn towards that of all, without privacy
    pooled: float  # level and common slopes, without privacy
    mixed: float  # a mixed logistic model without privacy
    private: float  # privrep
    newcomers: float  # privrep, of users without rows

    @property
    def gain(self) -> float:
        """Return by which part privrep's log-loss is smaller than that of users' own frequencies."""
        return 1 - self.private / self.own

    @property
    def most(self) -> float:
        """Return the gain of a mixed model without privacy."""
        return 1 - self.mixed / self.own


def forecast_labels(users: float, problem: LabelProblem, budget: Budget) -> LabelForecast:
    """Predict log-losses. Rough."""
    p, own = problem.as_numbers, problem.loss_of_frequencies(1.0)
    differ = p.levels**2 + p.spread
    sampled = p.features * (p.noise**2 + differ) / (users * p.rows)
    pooled = problem.loss(differ + (p.common**2 * sampled / (p.common**2 + sampled) if p.common else 0.0))
    mixed = problem.loss(known_without_privacy(users, p).least_error(p) - p.noise**2)
    private, newcomers = _private(users, problem, budget)
    return LabelForecast(own, problem.loss_of_shrunk, pooled, min(mixed, own), private, newcomers)


def _private(n: float, problem: LabelProblem, budget: Budget) -> tuple[float, float]:
    """Return privrep's log-losses, of users who took part and of newcomers.

    A level is moved if it stands out from the noise of the largest step; else it stays zero, an even chance.
    """
    p, s, total = problem.as_numbers, LABELS.shares, budget.mu**2
    parts = [part * LABELS.rest(p.rank) for part in ((s.again, s.last) if p.rank else LABELS.steps)]
    after, largest = (  # half of a step is for slopes
        level_error(n, p, share * total / 2, budget, LABELS) for share in (s.common + sum(parts), max(parts))
    )
    zero = problem.level**2
    moved = float(ndtr(abs(problem.level) / math.sqrt(largest) - MOVED))
    told = n * math.sqrt(LABELS.level * total) > LEGIBLE
    ratio = None if told else LEVEL / p.noise**2
    nothing = problem.loss_of_frequencies(_rows_of_prior())
    heard = told or features_heard(n, p, budget, LABELS)

    def lost(level: float) -> tuple[float, float]:
        known = known_to_privrep(n, p, budget, LABELS, level, ratio)
        slopes = known.along if p.rank else known.slopes
        new = problem.loss(p.levels**2 + p.spread + level + slopes)
        old = problem.loss(known.least_error(p) - p.noise**2)
        return min(old, nothing), min(new, math.log(2))

    known, new = lost(min(after, zero))
    without, without_new = lost(zero)
    without = without if heard else nothing
    return moved * known + (1 - moved) * without, moved * new + (1 - moved) * without_new


@cache
def _rows_of_prior() -> float:
    """Return how many rows of each class are worth as much as a prior of levels with variance LEVEL around zero."""
    return float(brentq(lambda rows: 2 * float(polygamma(1, rows)) - LEVEL, 0.01, 1000.0))


def find_label_goals(problem: LabelProblem, budget: Budget, users: int | None, wanted: float | None) -> list[Goal]:
    """Return what common goals take, as `forecast.find_goals` does; gains are parts of own frequencies' log-loss."""
    return find_goals_by(lambda n, b: forecast_labels(n, problem, b), budget, users, wanted)
