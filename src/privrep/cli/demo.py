"""`privrep demo`."""

from __future__ import annotations

import os
import shutil
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from rich.table import Table

from privrep.cli.console import console, progress, right, say
from privrep.errors import InputError

if TYPE_CHECKING:
    from privrep.cli.demo_run import Comparison

MADE = {"model", "picture.png", "new-rows.csv"}


def demo(
    out: Annotated[Path, typer.Option(help="Folder to write model, picture and some rows to.")] = Path("demo"),
    overwrite: Annotated[bool, typer.Option("--overwrite", help="Replace an earlier demo there.")] = False,
) -> None:
    """Train privately on a made-up population of 20,000 users and compare. Takes seconds."""
    _check_out(out, overwrite)
    from privrep.cli.demo_run import NOTE, run_demo
    from privrep.models.learning import PAGES

    out.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(prefix=f".{out.name}-", dir=out.parent) as scratch:
        new = Path(scratch) / "demo"
        new.mkdir()
        with progress(new / "model") as bar:
            bar.begin("reading", PAGES)
            rows = run_demo(new, on_page=bar.page)
        if out.exists():
            shutil.rmtree(out)
        os.replace(new, out)
    console().print(_table(rows))
    say(NOTE)
    say("Label noise alone gives an error of 0.0001. Epsilon 0: nothing about one user reaches another.")
    say(f"Model: {out / 'model'}   picture: {out / 'picture.png'}")
    say(f"Next: privrep inspect {out / 'model'}")
    say(f"      privrep predict {out / 'model'} {out / 'new-rows.csv'} --out predictions.csv")


def _check_out(out: Path, overwrite: bool) -> None:
    if not out.exists():
        return
    held = {path.name for path in out.iterdir()} if out.is_dir() else {"a file"}
    if held and not overwrite:
        raise InputError(f"{out} exists already; choose another --out, or pass --overwrite.")
    if not held <= MADE:
        raise InputError(f"{out} holds more than a demo ({min(held - MADE)}); choose another --out.")


def _table(rows: list[Comparison]) -> Table:
    table = Table("method", "mean squared error", "epsilon", title="20,000 users, 50 features, rank 2, 10 rows each")
    right(table, 1, 2)
    for row in rows:
        epsilon = "no privacy" if row.epsilon is None else f"{row.epsilon:.3g}"
        table.add_row(row.method, f"{row.error:#.3g}", epsilon, style="bold" if row.private else "")
    return table
