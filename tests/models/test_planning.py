"""The plan is held against what a fit does: its ledger, and the errors of simulated fits."""

from __future__ import annotations

import math
from dataclasses import replace
from itertools import pairwise

import numpy as np
import pytest

from privrep.data.synthetic import make_population
from privrep.errors import InputError
from privrep.heads.fitting import fit_heads
from privrep.models.description import Config
from privrep.models.forecast import find_epsilon, find_goals, find_posterior_share, find_users, forecast
from privrep.models.learning import learn
from privrep.models.planning import (
    PlanningProblem,
    epsilon_of_releases,
    find_part,
    plan_parts,
    predict_direction_error,
    users_needed,
)
from privrep.models.spending import list_releases
from privrep.privacy.accounting import compute_epsilon
from privrep.privacy.events import Gaussian
from privrep.privacy.ledger import Budget
from privrep.privacy.report import PrivacyReport
from privrep.users.memory import InMemoryUsers

BUDGET = Budget(1.0, 1e-6)


def simulated(users: int, problem: PlanningProblem, budget: Budget, seed: int) -> tuple[float, float, PrivacyReport]:
    """Return mean squared error and mean squared sine of a simulated fit, and its ledger. Slopes are 1 or 0."""
    rng, p = np.random.default_rng(seed), problem
    assert p.slopes == 1.0 or not p.rank
    population = make_population(rng, users, p.features, p.rank, p.rows, p.noise, intercept=p.levels, common=p.common)
    table = population.sample(rng)
    config = Config(p.rank or None, budget.epsilon, budget.delta, budget.relation, seed=seed)
    fitted = learn(InMemoryUsers(table), config)
    heads = fit_heads(table.blocks(), fitted.representation)
    overlap = np.linalg.norm(fitted.representation.basis.T @ population.U) ** 2
    error = population.population_mse(heads.weights(fitted.representation), heads.intercept)
    return error, 1 - float(overlap) / max(p.rank, 1), fitted.privacy


def plain(features: int, rank: int, rows: int, noise: float = 0.3) -> PlanningProblem:
    """Return a problem like those of the papers: users differ in slopes and in nothing else."""
    return PlanningProblem(features, rank, rows, noise, levels=0.0, slopes=1.0, common=0.0)


def test_planned_parts_spend_the_budget_exactly() -> None:
    planned = plan_parts(BUDGET)
    assert math.fsum(part.share for part in planned) == pytest.approx(1.0, abs=1e-12)
    events = [Gaussian(part.noise_multiplier) for part in planned]
    assert compute_epsilon(events, BUDGET.delta) == pytest.approx(1.0, rel=1e-6)


def test_planned_parts_are_those_of_a_fit() -> None:
    """Every page of a real ledger belongs to a part, and parts that no number of users changes cost what is said."""
    _, _, report = simulated(4000, PlanningProblem(8, 1, 10, 0.5, slopes=1.0), BUDGET, seed=1)
    spent: dict[str, float] = {}
    for one in list_releases(report):
        part = find_part(one.name.partition("/")[0])
        assert part, one.name
        spent[part] = spent.get(part, 0.0) + one.share
    planned = {part.purpose: part.share for part in plan_parts(BUDGET)}
    for fixed in ("correlations", "start of the representation", "how large errors are"):
        assert spent[fixed] == pytest.approx(planned[fixed], rel=1e-6)
    assert set(spent) <= set(planned)
    assert find_part("unheard-of") == ""


@pytest.mark.parametrize(("multiplier", "releases"), [(4.0, 1), (4.0, 7), (30.0, 100)])
def test_epsilon_of_equal_releases_is_that_of_the_ledger(multiplier: float, releases: int) -> None:
    direct = compute_epsilon([Gaussian(multiplier)] * releases, 1e-6)
    assert epsilon_of_releases(multiplier, releases, 1e-6) == pytest.approx(direct, rel=1e-9)


@pytest.mark.parametrize(
    ("problem", "budget"),
    [
        (plain(30, 2, 10), Budget(1.0, 1e-6)),
        (plain(40, 1, 8, 0.5), Budget(2.0, 1e-6)),
        (plain(20, 3, 12), Budget(1.0, 1e-6, "add-or-remove-one-user")),
    ],
)
def test_users_needed_is_right_within_a_factor_of_two(problem: PlanningProblem, budget: Budget) -> None:
    """Of three simulated fits, the median reaches the error with twice the users and misses it with half of them."""
    target = 0.03
    needed = users_needed(problem, budget, target)
    assert needed is not None
    half = np.median([simulated(needed // 2, problem, budget, seed)[1] for seed in range(3)])
    twice = np.median([simulated(needed * 2, problem, budget, seed)[1] for seed in range(3)])
    assert half > target
    assert twice <= target


@pytest.mark.parametrize(
    ("users", "problem", "budget"),
    [
        (6000, PlanningProblem(8, 0, 6, 1.0, levels=1.0, common=1.0), Budget(1.0, 1e-6)),
        (3000, PlanningProblem(3, 0, 12, 1.0, levels=0.5, common=0.7), Budget(1.0, 1e-6, "add-or-remove-one-user")),
        (4000, PlanningProblem(12, 1, 10, 0.8, levels=0.8, slopes=1.0, common=0.5), Budget(3.0, 1e-6)),
        (10_000, PlanningProblem(20, 2, 8, 0.5, levels=1.0, slopes=1.0, common=0.0), Budget(1.0, 1e-6)),
        (300, PlanningProblem(20, 0, 8, 1.0, levels=1.0, common=1.0), Budget(0.3, 1e-6)),  # nothing is heard
    ],
)
def test_errors_of_predictions_are_forecast_within_a_tenth(
    users: int, problem: PlanningProblem, budget: Budget
) -> None:
    """The median of three simulated fits, as a root of the mean squared error."""
    found = np.median([math.sqrt(simulated(users, problem, budget, seed)[0]) for seed in range(3)])
    assert math.sqrt(forecast(users, problem, budget).private) == pytest.approx(found, rel=0.1)


PROBLEMS = (
    PlanningProblem(10, 0, 6),
    PlanningProblem(30, 2, 10),
    PlanningProblem(5, 3, 4, 0.3, levels=2.0, slopes=1.0, common=0.0),
    PlanningProblem(1, 1, 3),
)


@pytest.mark.parametrize("problem", PROBLEMS)
def test_more_of_anything_never_hurts(problem: PlanningProblem) -> None:
    by_users = [forecast(users, problem, BUDGET).private for users in np.geomspace(100, 1e6, 40)]
    by_epsilon = [forecast(5000, problem, Budget(epsilon, 1e-6)).private for epsilon in np.geomspace(0.01, 20, 30)]
    by_rows = [forecast(5000, replace(problem, rows=rows), BUDGET).private for rows in range(2, 40)]
    sines = [predict_direction_error(users, problem, BUDGET) for users in np.geomspace(100, 1e6, 40)]
    for errors in (by_users, by_epsilon, by_rows, sines):
        assert all(b <= a * (1 + 1e-9) for a, b in pairwise(errors))


@pytest.mark.parametrize("problem", PROBLEMS)
def test_errors_are_in_order(problem: PlanningProblem) -> None:
    """Nobody does better than the noise, nor than a mixed model without privacy by more than its sampling error."""
    found = forecast(20_000, problem, BUDGET)
    assert problem.noise**2 <= found.mixed <= found.private * (1 + 1e-3)
    assert found.mixed <= found.alone <= found.mean
    assert found.gain <= found.most + 1e-3


def test_doubt_about_slopes_is_that_of_simulated_regressions() -> None:
    rng = np.random.default_rng(0)
    for rows, coordinates, ratio in ((9, 2, 1.0), (5, 8, 3.0), (20, 3, 0.2)):
        penalty = coordinates / ratio
        Z = rng.standard_normal((4000, rows, coordinates))
        inverse = np.linalg.inv(Z.transpose(0, 2, 1) @ Z + penalty * np.eye(coordinates))
        doubt = float(np.trace(inverse, axis1=1, axis2=2).mean())
        assert find_posterior_share(rows, coordinates, ratio) == pytest.approx(doubt, rel=0.1)
    assert find_posterior_share(5, 0, 1.0) == find_posterior_share(5, 3, 0.0) == 0.0


def test_goals_ask_for_more_users_and_epsilon_the_larger_the_gain() -> None:
    problem = PlanningProblem(20, 1, 8)
    found = find_goals(problem, BUDGET, 5000, 0.01)
    assert [goal.goal for goal in found][-1] == "the gain that is asked for"
    found = sorted(found, key=lambda goal: goal.gain)
    users = [goal.users for goal in found]
    assert None not in users
    assert users == sorted(users)  # type: ignore[type-var]
    for goal in found:
        assert goal.users is not None
        assert forecast(goal.users, problem, BUDGET).gain >= goal.gain * (1 - 1e-6)
        assert goal.epsilon is None or forecast(5000, problem, Budget(1.05 * goal.epsilon, 1e-6)).gain >= goal.gain
    assert [goal.epsilon for goal in find_goals(problem, BUDGET, None, None)] == [None] * 3


def test_goals_that_nobody_reaches() -> None:
    wide = PlanningProblem(10**7, 2, 10)
    assert find_users(wide, Budget(1e-4, 1e-12), 0.1) is None
    assert find_users(wide, BUDGET, 0.1) is not None
    assert find_epsilon(20, PlanningProblem(50, 2, 10), BUDGET, 0.1) is None
    assert find_goals(PlanningProblem(3, 0, 50, levels=5.0, common=0.0), BUDGET, None, None) == []


def test_users_needed_fall_with_the_budget() -> None:
    counts = [users_needed(plain(30, 2, 10, 0.5), Budget(epsilon, 1e-6), 0.01) for epsilon in (0.3, 1.0, 3.0)]
    assert None not in counts
    assert counts == sorted(counts, reverse=True)  # type: ignore[type-var]
    assert users_needed(plain(10**5, 2, 10, 0.5), Budget(1e-4, 1e-12), 0.1) is None
    assert users_needed(plain(10**5, 2, 10, 0.5), BUDGET, 0.1) is not None
    assert predict_direction_error(1000, PlanningProblem(5, 0, 10), BUDGET) == 0.0


@pytest.mark.parametrize(
    ("arguments", "named"),
    [
        ((0, 0, 10), "features"),
        ((10, 11, 10), "rank"),
        ((10, -1, 10), "rank"),
        ((10, 2, 1), "rows"),
        ((10, 2, 10, -1.0), "noise"),
        ((10, 2, 10, 0.0), "noise"),
        ((10, 2, 10, float("nan")), "noise"),
        ((10, 2, 10, 1.0, -1.0), "levels"),
        ((10, 2, 10, 1.0, 1.0, float("inf")), "slopes"),
        ((10, 2, 10, 1.0, 1.0, 1.0, -0.1), "common"),
    ],
)
def test_impossible_problems_are_refused(arguments: tuple[float, ...], named: str) -> None:
    with pytest.raises(InputError, match=named):
        PlanningProblem(*arguments)  # type: ignore[arg-type]
