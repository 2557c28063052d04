"""`privrep budget`."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import asdict
from typing import TYPE_CHECKING, Annotated

import typer
from rich.table import Table

from privrep.cli.config import note_weakness
from privrep.cli.console import NOISE_MULTIPLIER, right, show, tell
from privrep.cli.options import check_relation, was_given
from privrep.errors import InputError

if TYPE_CHECKING:
    from privrep.models.forecast import Goal
    from privrep.models.planning import PlanningProblem
    from privrep.privacy.ledger import Budget

ROUGH = (
    "Rough: of simulated fits of made-up populations, nine in ten had errors within a tenth of what is said here. "
    "Where nothing turns into something, a factor of two in users may decide. Real data needs more."
)

ERRORS = ("error (RMSE)", "squared error,\nagainst own means")  # columns of tables


def budget(
    context: typer.Context,
    delta: Annotated[float, typer.Option(help="Privacy budget, second part.")],
    epsilon: Annotated[float | None, typer.Option(help="Privacy budget: what noise does it ask for?")] = None,
    noise: Annotated[float | None, typer.Option(help="Noise multiplier: what epsilon does it cost?")] = None,
    releases: Annotated[int, typer.Option(help="With --noise: how many releases with that noise.")] = 1,
    features: Annotated[int | None, typer.Option(help="With --epsilon: how good will predictions be?")] = None,
    rank: Annotated[
        int | None, typer.Option(help="Directions in which users' slopes differ, 0 for none, for --features.")
    ] = None,
    rows: Annotated[int | None, typer.Option(help="Rows of each user, for --features and --items.")] = None,
    items: Annotated[int | None, typer.Option(help="Ratings: how many items; with --rows and --users.")] = None,
    offsets: Annotated[float, typer.Option(help="Ratings: deviation of items' offsets.")] = 0.5,
    users: Annotated[int | None, typer.Option(help="How many there are, if that is known.")] = None,
    noise_level: Annotated[float, typer.Option(help="Deviation of targets around their user's own line.")] = 1.0,
    levels: Annotated[float, typer.Option(help="Deviation of users' levels.")] = 1.0,
    slopes: Annotated[float, typer.Option(help="Deviation of what users' own slopes add to a target.")] = 0.5,
    common: Annotated[float, typer.Option(help="Deviation of what slopes common to all add to a target.")] = 0.5,
    gain: Annotated[
        float | None, typer.Option(help="By which part squared errors are to be smaller than by users' own means.")
    ] = None,
    rate: Annotated[
        float | None,
        typer.Option(
            help="Targets are yes/no labels, and this is the share of the rarer: deviations are on the logit, errors "
            "log-losses."
        ),
    ] = None,
    relation: Annotated[
        str, typer.Option(help="With --epsilon: the relation of the fit; replace-one-user or add-or-remove-one-user.")
    ] = "replace-one-user",
) -> None:
    """Say what a budget buys: epsilon to noise, noise to epsilon, or roughly how good predictions will be."""
    if items is not None:
        _check_ratings(context, epsilon, noise, features, rank)
        return _plan_ratings(items, rows, users, (noise_level, levels, offsets), (epsilon, delta, relation))
    shape = {"features": features, "rank": rank, "rows": rows}
    missing = [name for name, value in shape.items() if value is None]
    if rate is not None and (epsilon is None or missing):
        raise InputError("--rate goes with --epsilon, --features, --rank and --rows; give them all.")
    if noise is not None and epsilon is None:
        if len(missing) < len(shape):
            raise InputError("--features, --rank and --rows go with --epsilon, not with --noise.")
        return _show_cost(noise, releases, delta)
    if epsilon is None or noise is not None:
        raise InputError("give either --epsilon or --noise.")
    if releases != 1:
        raise InputError("--releases goes with --noise, not with --epsilon.")
    whole = _whole_budget(epsilon, delta, relation, users)
    if features is not None and rank is not None and rows is not None:
        _check_asked(users, gain)
        size, deviations = (features, rank, rows), (levels, slopes, common)
        return _plan_tables(size, rate, noise_level, deviations, users, whole, gain)
    if len(missing) < len(shape):
        raise InputError(f"--features, --rank and --rows go together; --{missing[0]} is missing.")
    return _show_noise(whole)


def _whole_budget(epsilon: float, delta: float, relation: str, users: int | None) -> Budget:
    """Return the budget that options say, and remark on one that promises little."""
    from privrep.privacy.accounting import check_budget
    from privrep.privacy.ledger import Budget

    check_budget(epsilon, delta)  # a pure budget buys no Gaussian noise
    tell(epsilon=epsilon, delta=delta, relation=relation)
    note_weakness(epsilon, delta, check_relation(relation), users or 1)
    return Budget(epsilon, delta, check_relation(relation))


def _plan_tables(
    size: tuple[int, int, int],
    rate: float | None,
    noise_level: float,
    deviations: tuple[float, float, float],
    users: int | None,
    whole: Budget,
    gain: float | None,
) -> None:
    """Say how good predictions of numbers, or of labels, will be, and what goals take.

    Args:
        size: features, rank and rows.
        rate: share of the rarer label; None: targets are numbers.
        noise_level: deviation of targets around their user's own line.
        deviations: of levels, of users' own slopes and of common slopes.
        users: how many there are, if that is known.
        whole: the budget.
        gain: what is wanted, if that was said.
    """
    from privrep.cli.budget_labels import make_label_problem, show_labels
    from privrep.models.planning import PlanningProblem

    if rate is not None:
        return show_labels(users, make_label_problem(size, rate, noise_level, deviations), whole, gain)
    problem = PlanningProblem(*size, noise_level, *deviations)
    _show_problem(problem, whole)
    if users is not None:
        _show_errors(users, problem, whole)
    return _show_goals(users, problem, whole, gain)


def _plan_ratings(
    items: int,
    rows: int | None,
    users: int | None,
    deviations: tuple[float, float, float],
    given: tuple[float | None, float, str],
) -> None:
    """Say how good predictions of ratings will be.

    Args:
        items: how many there are.
        rows: ratings of each user.
        users: how many there are.
        deviations: of ratings, of levels and of items' offsets.
        given: epsilon, delta and the relation.
    """
    from privrep.cli.budget_ratings import show_ratings
    from privrep.models.rating_forecast import RatingProblem

    epsilon, delta, relation = given
    assert epsilon is not None  # _check_ratings saw it
    if rows is None or users is None:
        raise InputError(
            f"--items, --rows and --users go together; --{'rows' if rows is None else 'users'} is missing."
        )
    _check_asked(users, None)
    show_ratings(users, RatingProblem(items, rows, *deviations), _whole_budget(epsilon, delta, relation, users))


def _check_ratings(
    context: typer.Context, epsilon: float | None, noise: float | None, features: int | None, rank: int | None
) -> None:
    if context.params["rate"] is not None:
        raise InputError("--rate is for yes/no labels, --items for ratings; give one of them.")
    if epsilon is None or noise is not None:
        raise InputError("--items goes with --epsilon, not with --noise.")
    if features is not None or rank is not None:
        raise InputError("--items is for ratings, which have neither features nor a rank to plan; leave those out.")
    ignored = [f"--{name}" for name in ("gain", "slopes", "common", "releases") if was_given(context, name)]
    if ignored:
        raise InputError(
            f"--items is for ratings, which have levels and offsets alone; leave out {', '.join(ignored)}."
        )


def _check_asked(users: int | None, gain: float | None) -> None:
    if users is not None and users < 1:
        raise InputError(f"--users must be at least 1. Got {users} instead.")
    if gain is not None and not 0 < gain < 1:
        raise InputError(f"--gain is a part of the error, between 0 and 1. Got {gain} instead.")


def _show_cost(noise: float, releases: int, delta: float) -> None:
    from privrep.models.planning import epsilon_of_releases

    cost = epsilon_of_releases(noise, releases, delta)
    note_weakness(cost, delta)
    what = "1 release" if releases == 1 else f"{releases} releases"
    show(f"{what} with noise multiplier {noise:g}: epsilon {cost:.6g} at delta {delta:g}")
    tell(epsilon=cost, delta=delta, noise_multiplier=noise, releases=releases)


def _show_noise(whole: Budget) -> None:
    from privrep.models.planning import plan_parts

    show(f"epsilon {whole.epsilon:g}, delta {whole.delta:g}: mu {whole.mu:.6g}")
    show(f"One release that spends it all: noise multiplier {1 / whole.mu:.6g}")
    tell(mu=whole.mu, noise_multiplier=1 / whole.mu)
    parts = plan_parts(whole)
    tell(parts=list(map(asdict, parts)))
    table = Table("part of a default fit of numbers", "pages", "share of\nbudget", "noise multiplier,\nas one release")
    right(table, 2, 3)
    for part in parts:
        table.add_row(part.purpose, ", ".join(part.pages), f"{part.share:.1%}", f"{part.noise_multiplier:.4g}")
    show(table)
    show(NOISE_MULTIPLIER, style="dim", wrap=True)


def _show_problem(p: PlanningProblem, whole: Budget) -> None:
    tell(problem=asdict(p))
    own = f"users' own slopes {p.slopes:g}, " if p.rank else ""
    show(
        f"{p.features} features, rank {p.rank}, {p.rows} rows each; epsilon {whole.epsilon:g}, delta {whole.delta:g}, "
        f"{whole.relation}"
    )
    show(f"Deviations: noise {p.noise:g}, levels {p.levels:g}, {own}common slopes {p.common:g}")


def _show_errors(users: int, p: PlanningProblem, whole: Budget) -> None:
    from privrep.models.forecast import forecast

    found = forecast(users, p, whole)
    errors = {
        "each user's own mean": found.mean,
        "each user alone, a regression of its own": found.alone,
        "a mixed model without privacy": found.mixed,
        "privrep": found.private,
    }
    show_forecast(users, {name: math.sqrt(error) for name, error in errors.items()}, *ERRORS, power=2)
    tell(mean_squared_sine=found.sine)
    if p.rank:
        show(f"Mean squared sine of the representation: {found.sine:.2g} (0 is exact, 1 is nothing learned)")


def _show_goals(users: int | None, p: PlanningProblem, whole: Budget, gain: float | None) -> None:
    """Say what a gain takes; where users' slopes differ, also what a representation takes."""
    from privrep.models.forecast import find_goals
    from privrep.models.planning import users_needed

    goals = find_goals(p, whole, users, gain)
    table = make_goal_table(goals, users, whole, "squared error")
    if 0 < p.rank < p.features and p.slopes:
        for error, what in ((0.1, "the representation holds 90% of what is shared"), (0.01, "it holds 99%")):
            needed = users_needed(p, whole, error)
            tell(representation={f"{1 - error:g}": needed})
            table.add_row(what, "", say_count(needed))
    if len(goals) == (gain is not None):
        show("Even a mixed model without privacy gains next to nothing over users' own means here.")
    if table.row_count:
        show(table)
    show(ROUGH, style="dim", wrap=True)


def show_forecast(users: int, errors: Mapping[str, float], error: str, against: str, power: int = 1) -> None:
    """Print the table of how large errors will be.

    Args:
        users: how many there are.
        errors: by what makes the predictions. The first is what all are compared with.
        error: what errors are.
        against: what the comparison is.
        power: of errors, in which they are compared.
    """
    table = Table("predictions by", error, against, title=f"{users:,} users")
    right(table, 1, 2)
    tell(users=users, errors=errors, errors_are=error)
    first = next(iter(errors.values()))
    for name, value in errors.items():
        change = f"{(value / first) ** power - 1:+.0%}"
        table.add_row(name, f"{value:.3g}", change, style="bold" if name == "privrep" else "")
    show(table)


def make_goal_table(goals: list[Goal], users: int | None, whole: Budget, error: str) -> Table:
    """Return the table of what goals take.

    Args:
        goals: with the users and the epsilon that each needs.
        users: how many there are, if that is known.
        whole: the budget.
        error: what is to be smaller.
    """
    epsilon = [f"epsilon that\n{users:,} need"] if users is not None else []
    table = Table("what you want", f"{error}\nsmaller by", f"users you need\nat epsilon {whole.epsilon:g}", *epsilon)
    right(table, *range(1, 3 + len(epsilon)))
    tell(goals=[{"goal": each.goal, "gain": each.gain, "users": each.users, "epsilon": each.epsilon} for each in goals])
    for goal in goals:
        needed = "above 20" if goal.epsilon is None else f"{goal.epsilon:g}"
        table.add_row(goal.goal, f"{goal.gain:.1%}", say_count(goal.users), *([needed] if epsilon else []))
    return table


def say_count(users: int | None) -> str:
    """Return a number of users in words of a table."""
    return "more than there are people" if users is None else f"{users:,}"
