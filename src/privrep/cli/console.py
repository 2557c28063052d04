"""The screen: what commands say, and progress."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rich.console import Console
from rich.table import Table

if TYPE_CHECKING:
    from privrep.data.table import UserTable


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


class Bar:
    """Progress on the operator's screen: pages and the epsilon spent so far, images encoded, steps, heads."""

    def __init__(self, shown: Any, folder: Path | None = None) -> None:
        self._shown, self._folder, self._task, self._loss = shown, folder, None, ""

    @property
    def visible(self) -> bool:
        """Whether anyone sees it: elsewhere than on a terminal nothing is computed for it."""
        return not self._shown.disable

    def begin(self, what: str, total: int) -> None:
        """Show a new bar in place of the old one."""
        if self._task is not None:
            self._shown.remove_task(self._task)
        self._task = self._shown.add_task(what, total=total)

    def at(self, done: int, /) -> None:
        self._shown.update(self._task, completed=done)

    def counting(self, what: str, then: Callable[[], None] | None = None) -> Callable[[int, int], None]:
        """Return a function that is told how many are done, of how many, and shows a bar of its own meanwhile.

        Args:
            what: is counted.
            then: called when all are done, such as to show the next bar.
        """
        under_way = False

        def told(done: int, total: int, /) -> None:
            nonlocal under_way
            if not under_way:
                self.begin(what, total)
            self.at(done)
            under_way = done < total
            if not under_way and then is not None:
                then()

        return told

    def page(self, name: str, epsilon: float | None = None) -> None:
        """Count a page that was posted; without an epsilon, what was spent is read from the folder's ledger."""
        if not self.visible:
            return
        if epsilon is None and self._folder is not None:
            from privrep.privacy.ledger import read_report

            epsilon = read_report(self._folder / "ledger.jsonl").epsilon
        text = f"{name.replace('-', ' ')}, epsilon {epsilon:.3f} spent{self._loss}"
        self._shown.update(self._task, description=text, advance=1)

    def loss(self, page: str, loss: float) -> None:
        """Show, from the next page on, a training loss that is not private."""
        self._loss = f", training loss about {loss:.3f} (not private)"

    def heads(self, blocks: Iterable[UserTable], users: int) -> Iterator[UserTable]:
        """The same blocks; the bar moves as they are taken."""
        self.begin("heads", users)
        for block in blocks:
            yield block
            self._shown.update(self._task, advance=block.n_users)


@contextmanager
def progress(folder: Path | None = None) -> Iterator[Bar]:
    """Show a bar on a terminal, and nothing elsewhere; `folder` is that of the run whose pages it counts."""
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

    console = Console(stderr=True)
    columns = (TextColumn("{task.description:<34}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    with Progress(*columns, console=console, transient=True, disable=not console.is_terminal) as shown:
        yield Bar(shown, folder)
