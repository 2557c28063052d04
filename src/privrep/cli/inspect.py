"""`privrep inspect`."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from rich.padding import Padding
from rich.table import Table

from privrep.cli.console import NOISE_MULTIPLIER, console, right, shout

if TYPE_CHECKING:
    from privrep.models.sections import Inspection
    from privrep.models.spending import Spent


def inspect(
    folder: Annotated[Path, typer.Argument(metavar="FOLDER", help="A model folder, or that of an unfinished run.")],
    as_json: Annotated[bool, typer.Option("--json", help="For machines.")] = False,
) -> None:
    """What was spent and what it means: what is protected, against whom, and what is not."""
    from privrep.models.inspection import inspect_folder

    found = inspect_folder(folder)
    if as_json:
        print(json.dumps(found.to_json(), indent=2))
    else:
        _show(found)


def _show(found: Inspection) -> None:
    from privrep.models.sections import SEEDED

    out = console()
    state = "a fitted model" if found.finished else "a run that was NOT FINISHED"
    out.print(f"{found.folder}: {state}", style="bold", soft_wrap=True)
    if found.privacy.seeded:
        shout(SEEDED)
    for section in found.sections:
        out.print(f"\n{section.heading}", style="bold")
        for sentence in section.sentences:
            item = Table.grid(padding=(0, 1))
            item.add_row("-", sentence, style="bold red" if sentence == SEEDED else "")
            out.print(Padding(item, (0, 0, 0, 2)))
    out.print()
    out.print(_ledger(found.releases, found.share_spent))
    out.print(NOISE_MULTIPLIER, style="dim")
    if any(release.group for release in found.releases):
        out.print(_GROUPS, style="dim")


_GROUPS = "Each user is in one group of a split and pays for that alone, so shares of different groups do not add up."


def _ledger(releases: list[Spent], share_spent: float) -> Table:
    table = Table(
        "release", "what for", "noise\nmultiplier", "share of\nbudget", title="The ledger", title_justify="left"
    )
    right(table, 2, 3)
    for column in (0, 2, 3):
        table.columns[column].no_wrap = True
    for spent in releases:
        noise = "" if spent.noise_multiplier is None else f"{spent.noise_multiplier:.4g}"
        remark = f"\n({spent.remark})" if spent.remark else ""  # on a line of its own, which nothing breaks
        table.add_row(spent.name, f"{spent.purpose}{remark}", noise, f"{spent.share:.1%}")
    if share_spent < 1 - 5e-4:
        table.add_row("", "not spent", "", f"{1 - share_spent:.1%}")
    return table
