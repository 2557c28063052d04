"""The plan is held against what a fit does: its ledger, and the error of simulated fits."""

from __future__ import annotations

import math
from itertools import pairwise

import numpy as np
import pytest

from privrep.data.synthetic import make_population
from privrep.errors import InputError
from privrep.models.description import Config
from privrep.models.learning import learn
from privrep.models.model import Model
from privrep.models.planning import (
    PlanningProblem,
    default_releases,
    epsilon_of_releases,
    needs,
    predicted_error,
    users_needed,
)
from privrep.privacy.accounting import epsilon_spent
from privrep.privacy.events import Gaussian
from privrep.privacy.ledger import Budget
from privrep.users.memory import InMemoryUsers

BUDGET = Budget(1.0, 1e-6)


def simulated(users: int, problem: PlanningProblem, budget: Budget, seed: int) -> tuple[float, Model]:
    """Mean squared sine of a simulated fit, and the fit."""
    rng = np.random.default_rng(seed)
    population = make_population(rng, users, problem.features, problem.rank, problem.rows, problem.noise)
    config = Config(problem.rank, budget.epsilon, budget.delta, budget.relation, seed=seed)
    fitted = learn(InMemoryUsers(population.sample(rng)), config)
    overlap = np.linalg.norm(fitted.representation.basis.T @ population.U) ** 2
    return 1 - float(overlap) / problem.rank, fitted


def test_planned_releases_spend_the_budget_exactly() -> None:
    planned = default_releases(BUDGET)
    assert math.fsum(release.share for release in planned) == pytest.approx(1.0, abs=1e-12)
    events = [Gaussian(release.noise_multiplier) for release in planned]
    assert epsilon_spent(events, BUDGET.delta) == pytest.approx(1.0, rel=1e-6)


def test_planned_releases_are_those_of_a_fit() -> None:
    """Names and noise multipliers are those a real ledger holds, as long as the fit does not end early."""
    _, fitted = simulated(3000, PlanningProblem(12, 2, 10, 0.01), BUDGET, seed=1)
    planned = {release.name: release.noise_multiplier for release in default_releases(BUDGET)}
    charged = {name: event.noise_multiplier for name, event in fitted.privacy.events}
    assert (list(charged)[-1], list(planned)[-1]) == ("preference/votes", "preference/votes")
    assert charged.pop("preference/votes") == pytest.approx(planned.pop("preference/votes"), rel=1e-9)
    last = list(charged)[-1]
    assert last.startswith("round-")
    assert list(planned)[: len(charged) - 1] == list(charged)[:-1]
    for name in list(charged)[:-1]:
        assert charged[name] == pytest.approx(planned[name], rel=1e-9)
    rest = math.fsum(z**-2 for name, z in planned.items() if name not in list(charged)[:-1])
    assert charged[last] ** -2 == pytest.approx(rest, rel=1e-9)


@pytest.mark.parametrize(("multiplier", "releases"), [(4.0, 1), (4.0, 7), (30.0, 100)])
def test_epsilon_of_equal_releases_is_that_of_the_ledger(multiplier: float, releases: int) -> None:
    direct = epsilon_spent([Gaussian(multiplier)] * releases, 1e-6)
    assert epsilon_of_releases(multiplier, releases, 1e-6) == pytest.approx(direct, rel=1e-9)


@pytest.mark.parametrize(
    ("problem", "budget"),
    [
        (PlanningProblem(30, 2, 10, 0.3), Budget(1.0, 1e-6)),
        (PlanningProblem(40, 1, 8, 0.5), Budget(2.0, 1e-6)),
        (PlanningProblem(20, 3, 12, 0.3), Budget(1.0, 1e-6, "add-or-remove-one-user")),
    ],
)
def test_users_needed_is_right_within_a_factor_of_two(problem: PlanningProblem, budget: Budget) -> None:
    """Of three simulated fits, the median reaches the error with twice the users and misses it with half of them."""
    target = 0.03
    needed = users_needed(problem, budget, target)
    assert needed is not None
    half = np.median([simulated(needed // 2, problem, budget, seed)[0] for seed in range(3)])
    twice = np.median([simulated(needed * 2, problem, budget, seed)[0] for seed in range(3)])
    assert half > target
    assert twice <= target


def test_more_users_and_more_budget_never_hurt() -> None:
    problem = PlanningProblem(30, 2, 10)
    errors = [predicted_error(users, problem, BUDGET) for users in np.geomspace(100, 1e6, 40)]
    assert all(b <= a + 1e-12 for a, b in pairwise(errors))
    counts = [users_needed(problem, Budget(epsilon, 1e-6), 0.01) for epsilon in (0.3, 1.0, 3.0)]
    assert None not in counts
    assert counts == sorted(counts, reverse=True)  # type: ignore[type-var]


def test_goals_ask_for_more_users_the_smaller_the_error() -> None:
    found = sorted(needs(PlanningProblem(50, 2, 10, 0.5), BUDGET), key=lambda need: -need.error)
    users = [need.users for need in found]
    assert None not in users
    assert users == sorted(users)  # type: ignore[type-var]
    assert [need.users for need in needs(PlanningProblem(50, 2, 10, 0.5), Budget(1e-4, 1e-12))] == [None] * 3


def test_without_noise_there_is_no_goal_relative_to_it() -> None:
    assert len(needs(PlanningProblem(50, 2, 10, 0.0), BUDGET)) == 2


@pytest.mark.parametrize(
    ("arguments", "named"),
    [
        ((1, 1, 10), "features"),
        ((10, 10, 10), "rank"),
        ((10, 0, 10), "rank"),
        ((10, 2, 2), "rows"),
        ((10, 2, 10, -1.0), "noise"),
        ((10, 2, 10, float("nan")), "noise"),
    ],
)
def test_impossible_problems_are_refused(arguments: tuple[float, ...], named: str) -> None:
    with pytest.raises(InputError, match=named):
        PlanningProblem(*arguments)  # type: ignore[arg-type]
