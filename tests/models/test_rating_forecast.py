"""The forecast of ratings is held against simulated fits."""

from __future__ import annotations

import math
import warnings

import numpy as np
import pytest

from privrep import InputError, PrivateFactorization
from privrep.models.rating_forecast import RatingProblem, forecast_ratings
from privrep.privacy.ledger import Budget


def simulated(users: int, p: RatingProblem, epsilon: float, seed: int) -> float:
    """Return the root mean squared error of a simulated fit on new ratings."""
    rng = np.random.default_rng(seed)
    shares = 1 / (np.arange(p.items) + 1 + p.items / 20)
    offset, level = p.offsets * rng.normal(size=p.items), p.levels * rng.normal(size=users)

    def draw(rows: int) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        user = np.repeat(np.arange(users), rows)
        item = rng.choice(p.items, size=len(user), p=shares / shares.sum())
        return user, item, 3 + level[user] + offset[item] + p.noise * rng.normal(size=len(user))

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        model = PrivateFactorization(epsilon=epsilon, items=range(p.items), random_state=seed).fit(*draw(p.rows))
    user, item, rating = draw(5)
    return float(np.sqrt(np.mean((model.predict(user, item) - rating) ** 2)))


@pytest.mark.parametrize(
    ("users", "problem", "epsilon"),
    [
        (1500, RatingProblem(90, 40, levels=0.3), 0.3),
        (5000, RatingProblem(800, 17, offsets=0.6), 3.0),
        (10000, RatingProblem(200, 8, levels=0.6, offsets=0.3), 1.0),
    ],
)
def test_errors_are_as_forecast(users: int, problem: RatingProblem, epsilon: float) -> None:
    found = forecast_ratings(users, problem, Budget(epsilon, 1e-6))
    assert simulated(users, problem, epsilon, 0) == pytest.approx(math.sqrt(found.private), rel=0.05)
    assert found.exact < found.private < found.shrunk < found.mean
    assert found.private < found.newcomers


def test_more_of_anything_helps() -> None:
    problem, budget = RatingProblem(500, 20), Budget(1.0, 1e-6)
    base = forecast_ratings(2000, problem, budget).private
    assert forecast_ratings(4000, problem, budget).private < base
    assert forecast_ratings(2000, problem, Budget(2.0, 1e-6)).private < base
    assert forecast_ratings(2000, RatingProblem(500, 40), budget).private < base
    assert forecast_ratings(2000, RatingProblem(250, 20), budget).private < base


def test_problems_that_cannot_be() -> None:
    with pytest.raises(InputError, match="both at least 1"):
        RatingProblem(0, 3)
    with pytest.raises(InputError, match="deviations are 0 or more"):
        RatingProblem(3, 3, noise=0.0)
