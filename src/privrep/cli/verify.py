"""`privrep verify`."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from rich.table import Table

from privrep.cli.console import show, tell

if TYPE_CHECKING:
    from privrep.models.verification import Verification


def verify(
    folder: Annotated[Path, typer.Argument(metavar="FOLDER", help="A model, a published copy, or an unfinished run.")],
) -> None:
    """Check the books of a folder: ledger against billboard, hashes, noise, and epsilon by both accountants.

    Ends with 1 if something is wrong.
    """
    from privrep.models.verification import verify as look

    found = look(folder)
    tell(**found.to_json())
    _show(found)
    if not found.good:
        raise typer.Exit(1)


def _show(found: Verification) -> None:
    verdict = "the books are in order" if found.good else "the books are NOT in order"
    show(f"{found.folder}: {verdict}", style="bold" if found.good else "bold red", wrap=True)
    table = Table.grid(padding=(0, 2))
    for finding in found.findings:
        table.add_row(
            "good" if finding.good else "WRONG", finding.name, finding.words, style="" if finding.good else "red"
        )
    show(table)
