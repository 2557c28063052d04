"""The screen: what commands say, and progress."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from rich.console import Console
from rich.table import Table

from privrep.estimators.progress import Bar as Bar
from privrep.estimators.progress import show_bar

NOISE_MULTIPLIER = (
    "Noise multiplier: standard deviation of the noise over the most that one user can change the sum. "
    "Shares are of mu², which adds up over releases as 1 / multiplier²."
)


def console() -> Console:
    return Console(highlight=False, markup=False)


def say(text: str) -> None:
    console().print(text, soft_wrap=True)


def note(text: str) -> None:
    Console(stderr=True, highlight=False, markup=False).print(text, soft_wrap=True)


def shout(text: str) -> None:
    console().print(text, style="bold red")


def right(table: Table, *columns: int) -> None:
    for column in columns:
        table.columns[column].justify = "right"


@contextmanager
def progress(folder: Path | None = None) -> Iterator[Bar]:
    """Show a bar on a terminal, and nothing elsewhere; `folder` is that of the run whose pages it counts."""
    with show_bar(Console(stderr=True), folder) as bar:
        yield bar
