"""`privrep inspect`."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from rich.padding import Padding
from rich.table import Table

from privrep.cli.console import NOISE_MULTIPLIER, right, show, tell

if TYPE_CHECKING:
    from privrep.models.sections import Inspection
    from privrep.models.spending import Spent


def inspect(
    folder: Annotated[Path, typer.Argument(metavar="FOLDER", help="A model folder, or that of an unfinished run.")],
) -> None:
    """Say what was spent and what it means: what is protected, against whom, and what is not.

    Five lines come first, the ledger last.
    """
    from privrep.models.inspection import inspect_folder

    found = inspect_folder(folder)
    tell(**found.to_json())
    _show(found)


def _show(found: Inspection) -> None:
    from privrep.models.sections import SEEDED

    state = "a fitted model" if found.finished else "a run that was NOT FINISHED"
    show(f"{found.folder}: {state}", style="bold")
    if found.privacy.seeded:
        show(SEEDED, style="bold red", wrap=True)
    show("")
    lines = Table.grid(padding=(0, 2))
    for label, words in found.summary.items():
        lines.add_row(label, words)
    show(Padding(lines, (0, 0, 0, 2)))
    for section in found.sections:
        show(f"\n{section.heading}", style="bold", wrap=True)
        for sentence in section.sentences:
            item = Table.grid(padding=(0, 1))
            item.add_row("-", sentence, style="bold red" if sentence == SEEDED else "")
            show(Padding(item, (0, 0, 0, 2)))
    show("")
    show(_ledger(found.releases, found.share_spent))
    show(NOISE_MULTIPLIER, style="dim", wrap=True)
    if any(release.group for release in found.releases):
        show(_GROUPS, style="dim", wrap=True)


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
