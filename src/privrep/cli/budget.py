"""`privrep budget`."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Annotated

import typer
from rich.table import Table

from privrep.cli.console import NOISE_MULTIPLIER, console, right, say
from privrep.cli.options import check_relation
from privrep.errors import InputError

if TYPE_CHECKING:
    from privrep.models.forecast import Goal
    from privrep.models.planning import PlanningProblem
    from privrep.models.rating_forecast import RatingProblem
    from privrep.privacy.ledger import Budget

ROUGH = (
    "Rough: of simulated fits of made-up populations, nine in ten had errors within a tenth of what is said here. "
    "Where nothing turns into something, a factor of two in users may decide. Real data needs more."
)


RATINGS_ROUGH = (
    "Rough: a few items are taken to be rated often and most rarely, and all users to rate alike. What tastes explain "
    "cannot be told beforehand and comes on top."
)


def budget(
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
    relation: Annotated[str, typer.Option(help="For --features: the relation of the fit.")] = "replace-one-user",
) -> None:
    """Say what a budget buys: epsilon to noise, noise to epsilon, or roughly how good predictions will be."""
    from privrep.models.planning import PlanningProblem
    from privrep.privacy.accounting import check_budget
    from privrep.privacy.ledger import Budget

    if items is not None:
        if rate is not None:
            raise InputError("--rate is for yes/no labels, --items for ratings; give one of them.")
        _check_ratings(epsilon, noise, features, rank)
        rated = _rating_problem(items, rows, users, (noise_level, levels, offsets))
        assert epsilon is not None
        assert users is not None
        _show_ratings(users, rated, Budget(epsilon, delta, check_relation(relation)))
        return
    shape = {"features": features, "rank": rank, "rows": rows}
    missing = [name for name, value in shape.items() if value is None]
    if rate is not None and (epsilon is None or missing):
        raise InputError("--rate goes with --epsilon, --features, --rank and --rows; give them all.")
    if noise is not None and epsilon is None:
        if len(missing) < len(shape):
            raise InputError("--features, --rank and --rows go with --epsilon, not with --noise.")
        _show_cost(noise, releases, delta)
    elif epsilon is not None and noise is None:
        if releases != 1:
            raise InputError("--releases goes with --noise, not with --epsilon.")
        check_budget(epsilon, delta)  # a pure budget buys no Gaussian noise
        whole = Budget(epsilon, delta, check_relation(relation))
        if features is not None and rank is not None and rows is not None:
            _check_asked(users, gain)
            if rate is not None:
                from privrep.cli.budget_labels import make_label_problem, show_labels

                labelled = make_label_problem((features, rank, rows), rate, noise_level, (levels, slopes, common))
                return show_labels(users, labelled, whole, gain)
            problem = PlanningProblem(features, rank, rows, noise_level, levels, slopes, common)
            _show_problem(problem, whole)
            if users is not None:
                _show_errors(users, problem, whole)
            _show_goals(users, problem, whole, gain)
        elif len(missing) == len(shape):
            _show_noise(whole)
        else:
            raise InputError(f"--features, --rank and --rows go together; --{missing[0]} is missing.")
    else:
        raise InputError("give either --epsilon or --noise.")


def _check_ratings(epsilon: float | None, noise: float | None, features: int | None, rank: int | None) -> None:
    if epsilon is None or noise is not None:
        raise InputError("--items goes with --epsilon, not with --noise.")
    if features is not None or rank is not None:
        raise InputError("--items is for ratings, which have neither features nor a rank to plan; leave those out.")


def _rating_problem(
    items: int, rows: int | None, users: int | None, deviations: tuple[float, float, float]
) -> RatingProblem:
    from privrep.models.rating_forecast import RatingProblem

    if rows is None or users is None:
        raise InputError(
            f"--items, --rows and --users go together; --{'rows' if rows is None else 'users'} is missing."
        )
    _check_asked(users, None)
    return RatingProblem(items, rows, *deviations)


def _show_ratings(users: int, p: RatingProblem, whole: Budget) -> None:
    from privrep.models.rating_forecast import forecast_ratings

    found = forecast_ratings(users, p, whole)
    say(f"{p.items:,} items, {p.rows} ratings each; epsilon {whole.epsilon:g}, delta {whole.delta:g}, {whole.relation}")
    say(f"Deviations: noise {p.noise:g}, levels {p.levels:g}, offsets of items {p.offsets:g}")
    table = Table("predictions by", "error (RMSE)", "squared error,\nagainst own means", title=f"{users:,} users")
    right(table, 1, 2)
    for name, error in (
        ("each user's own mean", found.mean),
        ("the same, drawn towards that of all", found.shrunk),
        ("levels and offsets without privacy", found.exact),
        ("privrep", found.private),
        ("privrep, of users without ratings", found.newcomers),
    ):
        change = f"{error / found.mean - 1:+.0%}"
        table.add_row(name, f"{math.sqrt(error):.3g}", change, style="bold" if name == "privrep" else "")
    console().print(table)
    console().print(RATINGS_ROUGH, style="dim")


def _check_asked(users: int | None, gain: float | None) -> None:
    if users is not None and users < 1:
        raise InputError(f"--users must be at least 1. Got {users} instead.")
    if gain is not None and not 0 < gain < 1:
        raise InputError(f"--gain is a part of the error, between 0 and 1. Got {gain} instead.")


def _show_cost(noise: float, releases: int, delta: float) -> None:
    from privrep.models.planning import epsilon_of_releases

    cost = epsilon_of_releases(noise, releases, delta)
    what = "1 release" if releases == 1 else f"{releases} releases"
    say(f"{what} with noise multiplier {noise:g}: epsilon {cost:.6g} at delta {delta:g}")


def _show_noise(whole: Budget) -> None:
    from privrep.models.planning import plan_parts

    say(f"epsilon {whole.epsilon:g}, delta {whole.delta:g}: mu {whole.mu:.6g}")
    say(f"One release that spends it all: noise multiplier {1 / whole.mu:.6g}")
    table = Table("part of a default fit of numbers", "pages", "share of\nbudget", "noise multiplier,\nas one release")
    right(table, 2, 3)
    for part in plan_parts(whole):
        table.add_row(part.purpose, ", ".join(part.pages), f"{part.share:.1%}", f"{part.noise_multiplier:.4g}")
    console().print(table)
    console().print(NOISE_MULTIPLIER, style="dim")


def _show_problem(p: PlanningProblem, whole: Budget) -> None:
    own = f"users' own slopes {p.slopes:g}, " if p.rank else ""
    say(
        f"{p.features} features, rank {p.rank}, {p.rows} rows each; epsilon {whole.epsilon:g}, delta {whole.delta:g}, "
        f"{whole.relation}"
    )
    say(f"Deviations: noise {p.noise:g}, levels {p.levels:g}, {own}common slopes {p.common:g}")


def _show_errors(users: int, p: PlanningProblem, whole: Budget) -> None:
    from privrep.models.forecast import forecast

    found = forecast(users, p, whole)
    table = Table("predictions by", "error (RMSE)", "squared error,\nagainst own means", title=f"{users:,} users")
    right(table, 1, 2)
    for name, error in (
        ("each user's own mean", found.mean),
        ("each user alone, a regression of its own", found.alone),
        ("a mixed model without privacy", found.mixed),
        ("privrep", found.private),
    ):
        change = f"{error / found.mean - 1:+.0%}"
        table.add_row(name, f"{math.sqrt(error):.3g}", change, style="bold" if name == "privrep" else "")
    console().print(table)
    if p.rank:
        say(f"Mean squared sine of the representation: {found.sine:.2g} (0 is exact, 1 is nothing learned)")


def _show_goals(users: int | None, p: PlanningProblem, whole: Budget, gain: float | None) -> None:
    """Say what a gain takes; where users' slopes differ, also what a representation takes."""
    from privrep.models.forecast import find_goals
    from privrep.models.planning import users_needed

    goals = find_goals(p, whole, users, gain)
    table = make_goal_table(goals, users, whole, "squared error")
    if 0 < p.rank < p.features and p.slopes:
        for error, what in ((0.1, "the representation holds 90% of what is shared"), (0.01, "it holds 99%")):
            table.add_row(what, "", say_count(users_needed(p, whole, error)))
    if len(goals) == (gain is not None):
        say("Even a mixed model without privacy gains next to nothing over users' own means here.")
    if table.row_count:
        console().print(table)
    console().print(ROUGH, style="dim")


def make_goal_table(goals: list[Goal], users: int | None, whole: Budget, error: str) -> Table:
    """Return the table of what goals take; `error` is what is to be smaller."""
    epsilon = [f"epsilon that\n{users:,} need"] if users is not None else []
    table = Table("what you want", f"{error}\nsmaller by", f"users you need\nat epsilon {whole.epsilon:g}", *epsilon)
    right(table, *range(1, 3 + len(epsilon)))
    for goal in goals:
        needed = "above 20" if goal.epsilon is None else f"{goal.epsilon:g}"
        table.add_row(goal.goal, f"{goal.gain:.1%}", say_count(goal.users), *([needed] if epsilon else []))
    return table


def say_count(users: int | None) -> str:
    """Return a number of users in words of a table."""
    return "more than one fit takes" if users is None else f"{users:,}"
