"""Forecasts of yes/no labels: their limits, their order, and a simulated fit."""

from __future__ import annotations

import math
from dataclasses import replace
from itertools import pairwise

import numpy as np
import pytest
from scipy.special import expit

from privrep.errors import InputError
from privrep.estimators.classification import PrivateFedRepClassifier
from privrep.models.label_forecast import LabelProblem, find_label_goals, forecast_labels
from privrep.privacy.ledger import Budget

BUDGET = Budget(1.0, 1e-6)
PROBLEMS = (
    LabelProblem(10, 0, 6, 0.2),
    LabelProblem(20, 1, 10, 0.5, levels=0.3, slopes=1.2, common=0.0),
    LabelProblem(3, 2, 3, 0.05, levels=2.0, slopes=0.7, common=1.0),
    LabelProblem(1, 1, 2, 0.35),
)


@pytest.mark.parametrize("problem", PROBLEMS)
def test_more_users_and_epsilon_never_hurt(problem: LabelProblem) -> None:
    by_users = [forecast_labels(users, problem, BUDGET) for users in np.geomspace(10, 1e7, 60)]
    by_epsilon = [forecast_labels(5000, problem, Budget(epsilon, 1e-6)) for epsilon in np.geomspace(0.01, 20, 40)]
    for found in (by_users, by_epsilon):
        for name in ("private", "newcomers", "mixed", "pooled"):
            assert all(getattr(b, name) <= getattr(a, name) * (1 + 1e-9) for a, b in pairwise(found)), name


@pytest.mark.parametrize("problem", PROBLEMS)
def test_limits(problem: LabelProblem) -> None:
    """Very many users have a mixed model; few have their own frequencies."""
    many, few = forecast_labels(1e9, problem, BUDGET), forecast_labels(2, problem, BUDGET)
    assert many.private == pytest.approx(many.mixed, rel=2e-3)
    assert few.private == pytest.approx(few.own, rel=1e-3)
    assert many.mixed <= many.shrunk + 0.01
    assert many.shrunk <= many.own
    assert many.mixed <= many.pooled
    assert many.newcomers == pytest.approx(many.pooled, rel=1e-3)


@pytest.mark.parametrize("problem", PROBLEMS)
def test_losses_of_those_who_know_nothing_and_all(problem: LabelProblem) -> None:
    rate = problem.rate
    assert problem.loss(problem.variance) == pytest.approx(-rate * math.log(rate) - (1 - rate) * math.log(1 - rate))
    outputs = problem.level + math.sqrt(problem.variance) * np.random.default_rng(0).standard_normal(200_000)
    p = expit(outputs)
    surprise = -(p * np.log(p) + (1 - p) * np.log(1 - p))
    false_alarm = 5 * surprise.std() / math.sqrt(len(p))  # five standard errors: less than one in a million
    assert problem.loss(0.0) == pytest.approx(surprise.mean(), abs=false_alarm)
    assert p.mean() == pytest.approx(rate, abs=5 * p.std() / math.sqrt(len(p)))


def test_frequencies_lose_what_simulated_ones_do() -> None:
    """Users' slopes are common. Five standard errors over users: less than one false alarm in a million."""
    problem, rng, users = LabelProblem(1, 0, 5, 0.2, levels=1.5, common=0.8), np.random.default_rng(1), 100_000
    outputs = problem.level + 1.5 * rng.standard_normal((users, 1)) + 0.8 * rng.standard_normal((users, 6))
    y = rng.random(outputs.shape) < expit(outputs)
    said = (y[:, :5].sum(axis=1) + 1) / 7
    lost = -np.log(np.where(y[:, 5], said, 1 - said))
    assert problem.loss_of_frequencies(1.0) == pytest.approx(lost.mean(), abs=5 * lost.std() / math.sqrt(users))


@pytest.mark.parametrize(
    ("users", "problem", "epsilon"),
    [
        (3000, LabelProblem(4, 0, 6, 0.2, levels=1.2, common=0.8), 1.0),
        (3000, LabelProblem(4, 1, 8, 0.4, levels=1.0, slopes=1.0, common=0.5), 3.0),
        (300, LabelProblem(8, 0, 6, 0.3, levels=1.5, common=0.5), 0.3),  # hardly anything is heard
    ],
)
def test_a_simulated_fit_is_forecast_within_a_tenth(users: int, problem: LabelProblem, epsilon: float) -> None:
    """The median of three fits."""
    losses = [simulated_loss(users, problem, epsilon, seed) for seed in range(3)]
    assert forecast_labels(users, problem, Budget(epsilon, 1e-6)).private == pytest.approx(np.median(losses), rel=0.1)


def simulated_loss(users: int, p: LabelProblem, epsilon: float, seed: int) -> float:
    """Return the log-loss of a fit on new rows of its users."""
    rng, m, new = np.random.default_rng(seed), p.rows, 5
    X = rng.standard_normal((users, m + new, p.features))
    own = p.slopes * rng.standard_normal((users, 1)) * X[:, :, 0] if p.rank else 0.0
    outputs = p.level + p.levels * rng.standard_normal((users, 1)) + p.common * X[:, :, -1] + own
    y = (rng.random(outputs.shape) < expit(outputs)).astype(int)
    model = PrivateFedRepClassifier(
        epsilon=epsilon, delta=1e-6, classes=[0, 1], rank=p.rank or "auto", random_state=seed
    )
    ids = np.arange(users)
    model.fit(X[:, :m].reshape(-1, p.features), y[:, :m].ravel(), groups=np.repeat(ids, m))
    said = model.predict_proba(X[:, m:].reshape(-1, p.features), groups=np.repeat(ids, new))
    return float(-np.log(said[np.arange(users * new), y[:, m:].ravel()]).mean())


def test_goals_of_labels() -> None:
    problem = LabelProblem(8, 0, 5, 0.2)
    found = find_label_goals(problem, BUDGET, 3000, 0.01)
    assert len(found) == 4
    for goal in found:
        assert goal.users is not None
        assert forecast_labels(goal.users, problem, BUDGET).gain >= goal.gain * (1 - 1e-6)
        assert goal.epsilon is not None
        assert forecast_labels(3000, problem, Budget(1.05 * goal.epsilon, 1e-6)).gain >= goal.gain


@pytest.mark.parametrize(
    ("change", "culprit"),
    [
        ({"rate": 0.0}, "rate"),
        ({"rate": 0.6}, "rate"),
        ({"rate": math.nan}, "rate"),
        ({"rows": 1}, "rows"),
        ({"levels": -1.0}, "levels"),
        ({"levels": 20.0}, "logit"),
        ({"rank": 9}, "rank"),
    ],
)
def test_refusals(change: dict[str, float], culprit: str) -> None:
    with pytest.raises(InputError, match=culprit):
        replace(LabelProblem(4, 1, 5, 0.2), **change)
