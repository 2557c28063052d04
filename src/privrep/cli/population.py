"""`privrep population`: one budget for all runs on the same people."""

from __future__ import annotations

import math
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from privrep.cli.command import with_screen
from privrep.cli.console import say, show, tell
from privrep.cli.options import Relations, check_relation
from privrep.errors import InputError

if TYPE_CHECKING:
    from privrep.privacy.shares import Accounts, Share

PopulationFile = Annotated[Path, typer.Argument(metavar="FILE", help="The population ledger.")]
population = typer.Typer(
    name="population",
    help="One budget for a population: a ledger that every fit on the same people draws from.",
    no_args_is_help=True,
)
ONE_MORE = 1.0  # epsilon of the fit that `show` forecasts


def create(
    file: PopulationFile,
    epsilon: Annotated[float, typer.Option(help="Budget of all runs together.")],
    delta: Annotated[float, typer.Option(help="Second part of it; well below 1 / number of users.")],
    relation: Relations = "replace-one-user",
) -> None:
    """Make the ledger of a population, with the budget of all runs on it."""
    from privrep.privacy.population import PopulationLedger

    made = PopulationLedger.create(file, epsilon=epsilon, delta=delta, relation=check_relation(relation))
    tell(**_to_json(made.read()))
    say(f"Population ledger: {file}, readable by you alone; epsilon {epsilon:g} at delta {delta:g} for all runs")
    say(f"Draw from it with: privrep fit ... --population {file}     What is left: privrep population show {file}")


def show_population(file: PopulationFile) -> None:
    """Say what every run reserved and spent, what all of them come to, and what is left."""
    from privrep.privacy.population import PopulationLedger

    found = PopulationLedger(file).read()
    tell(**_to_json(found))
    budget = found.budget
    show(f"{file}: population ledger {found.name}", style="bold")
    show(f"Budget: epsilon {budget.epsilon:g} at delta {budget.delta:g}, {budget.relation}, for all runs together")
    over = "" if found.epsilon <= budget.epsilon * (1 + 1e-9) else ": OVER THE BUDGET"
    show(f"Spent and reserved: epsilon {found.epsilon:.4g}, by exact composition over all events of all runs{over}")
    show(f"Left: one more run may take epsilon {found.epsilon_left:.4g}")
    if budget.delta:
        more = found.forecast(ONE_MORE)
        over = ", so it would be refused" if more > budget.epsilon else ""
        show(f"One more fit at epsilon {ONE_MORE:g} would bring it to {more:.4g}{over}")
    if found.shares:
        show("")
        for line in _list_runs(found):
            show(line)
    waiting = [share for share in found.shares.values() if share.status == "open"]
    if waiting:
        show("")
        show("An open run holds all that it reserved: it is under way, or was stopped.", wrap=True)
        show("Run its command again, or, if it will not go on:", wrap=True)
        show(f"    privrep population give-up {file} RUN")


def give_up(
    file: PopulationFile, run: Annotated[str, typer.Argument(metavar="RUN", help="As `show` names it.")]
) -> None:
    """Give up a run that will not go on: all that it reserved counts as spent."""
    from privrep.privacy.population import PopulationLedger

    ledger = PopulationLedger(file)
    ledger.give_up(run)
    found = ledger.read()
    tell(**_to_json(found))
    say(f"Run {run} is given up; all it reserved counts as spent. Left: epsilon {found.epsilon_left:.4g}")


def settle(
    file: PopulationFile,
    folder: Annotated[Path, typer.Argument(metavar="FOLDER", help="The finished model of an open run.")],
) -> None:
    """Return what a finished model has not spent, where its run was stopped before it could do so itself."""
    from privrep.models.folder import ModelFolder
    from privrep.models.verification import verify
    from privrep.privacy.ledger import read_ledger
    from privrep.privacy.population import PopulationLedger

    ledger = PopulationLedger(file)
    if not ModelFolder(folder).finished:
        raise InputError(
            f"{folder} holds no finished model. If its run is open, run its command again; a run that was given up is "
            "counted whole."
        )
    fault = next((found for found in verify(folder).findings if not found.good), None)
    if fault is not None:
        raise InputError(f"{folder}: its books are not in order ({fault.words}), so nothing can return.")
    run = ledger.settle(read_ledger(folder / "ledger.jsonl"))
    found = ledger.read()
    tell(**_to_json(found))
    say(f"Run {run} is finished. Left: epsilon {found.epsilon_left:.4g}")


for _name, _command in (("create", create), ("show", show_population), ("give-up", give_up), ("settle", settle)):
    population.command(_name)(with_screen(_command))


def _to_json(found: Accounts) -> dict[str, Any]:
    """Return all that may be shown of a ledger: nothing of who the people are."""
    budget, forecast = found.budget, found.forecast(ONE_MORE) if found.budget.delta else None
    return {
        "population": found.name,
        "budget": {"epsilon": budget.epsilon, "delta": budget.delta, "relation": budget.relation},
        "epsilon": _finite(found.epsilon),
        "epsilon_left": found.epsilon_left,
        "after_one_more": None if forecast is None else {"epsilon": ONE_MORE, "total": _finite(forecast)},
        "runs": [_run_to_json(share) for share in found.shares.values()],
    }


def _run_to_json(share: Share) -> dict[str, Any]:
    spent, returned = _spent(share)
    return {
        "run": share.run,
        "what": share.what,
        "when": share.when,
        "status": share.status,
        "users": share.users,
        "reserved": {"epsilon": share.budget.epsilon, "delta": share.budget.delta},
        "spent": spent,
        "returned": returned,
    }


def _spent(share: Share) -> tuple[float | None, float | None]:
    """Return the epsilon that a run spent, and how much less that is than it reserved; None while open."""
    if share.status == "open":
        return None, None
    spent = {"finished": share.epsilon, "returned": 0.0, "given up": share.budget.epsilon}[share.status]
    return spent, max(share.budget.epsilon - spent, 0.0)


def _finite(number: float) -> float | None:
    return number if math.isfinite(number) else None


def _list_runs(found: Accounts) -> list[str]:
    """Return two lines for each run: its name, status and epsilons; then when, who and what."""
    lines = []
    for share in found.shares.values():
        told = [f"reserved {share.budget.epsilon:g}"]
        spent, returned = _spent(share)
        if spent is not None and returned is not None:
            told += [f"spent {round(spent, 4):g}", f"returned {round(returned, 4):g}"]
        users = [] if share.users is None else [f"{share.users:,} users"]
        lines.append(f"{share.run}  {share.status:<9} {', '.join(told)}")
        lines.append("    " + ", ".join([share.when[:16].replace("T", " "), *users, share.what]))
    return lines
