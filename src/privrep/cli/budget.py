"""`privrep budget`."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated

import typer
from rich.table import Table

from privrep.cli.console import NOISE_MULTIPLIER, console, right, say
from privrep.cli.options import check_relation
from privrep.errors import InputError

if TYPE_CHECKING:
    from privrep.models.planning import PlanningProblem
    from privrep.privacy.ledger import Budget


def budget(
    delta: Annotated[float, typer.Option(help="Privacy budget, second part.")],
    epsilon: Annotated[float | None, typer.Option(help="Privacy budget: what noise does it ask for?")] = None,
    noise: Annotated[float | None, typer.Option(help="Noise multiplier: what epsilon does it cost?")] = None,
    releases: Annotated[int, typer.Option(help="With --noise: how many releases with that noise.")] = 1,
    features: Annotated[int | None, typer.Option(help="With --epsilon: how many users does a problem need?")] = None,
    rank: Annotated[int | None, typer.Option(help="Columns of the representation, for --features.")] = None,
    rows: Annotated[int | None, typer.Option(help="Rows of each user, for --features.")] = None,
    noise_level: Annotated[
        float, typer.Option(help="Noise of the target as a multiple of what a user's own best model explains.")
    ] = 0.5,
    relation: Annotated[str, typer.Option(help="For --features: the relation of the fit.")] = "replace-one-user",
) -> None:
    """What a budget buys: epsilon to noise, noise to epsilon, or roughly how many users a problem needs."""
    from privrep.models.planning import PlanningProblem
    from privrep.privacy.accounting import check_budget
    from privrep.privacy.ledger import Budget

    shape = {"features": features, "rank": rank, "rows": rows}
    missing = [name for name, value in shape.items() if value is None]
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
            _show_needs(PlanningProblem(features, rank, rows, noise_level), whole)
        elif len(missing) == len(shape):
            _show_noise(whole)
        else:
            raise InputError(f"--features, --rank and --rows go together; --{missing[0]} is missing.")
    else:
        raise InputError("give either --epsilon or --noise.")


def _show_cost(noise: float, releases: int, delta: float) -> None:
    from privrep.models.planning import epsilon_of_releases

    cost = epsilon_of_releases(noise, releases, delta)
    what = "1 release" if releases == 1 else f"{releases} releases"
    say(f"{what} with noise multiplier {noise:g}: epsilon {cost:.6g} at delta {delta:g}")


def _show_noise(whole: Budget) -> None:
    from privrep.models.planning import default_releases

    say(f"epsilon {whole.epsilon:g}, delta {whole.delta:g}: mu {whole.mu:.6g}")
    say(f"One release that spends it all: noise multiplier {1 / whole.mu:.6g}")
    table = Table("release of a default fit", "share of budget", "noise multiplier")
    right(table, 1, 2)
    for planned in default_releases(whole):
        table.add_row(planned.name, f"{planned.share:.1%}", f"{planned.noise_multiplier:.4g}")
    console().print(table)
    console().print(NOISE_MULTIPLIER, style="dim")


def _show_needs(p: PlanningProblem, whole: Budget) -> None:
    from privrep.models.planning import needs

    table = Table("what you want", "users you need, roughly")
    right(table, 1)
    for need in needs(p, whole):
        table.add_row(need.goal, "more than one fit takes" if need.users is None else f"{need.users:,}")
    say(
        f"{p.features} features, rank {p.rank}, {p.rows} rows each, noise {p.noise:g} x signal; "
        f"epsilon {whole.epsilon:g}, delta {whole.delta:g}, {whole.relation}"
    )
    console().print(table)
    console().print(
        "Rough: mostly within a factor of two for uncorrelated features and users who differ in all directions alike. "
        "Real data needs more. The step from nothing to found is sudden: plan above it.",
        style="dim",
    )
