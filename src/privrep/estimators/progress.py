"""Progress on a screen: a bar for fits in Python and for commands. It shows public facts, and changes nothing."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from rich.console import Console

    from privrep.data.table import UserTable


class Bar:
    """Progress on the operator's screen: pages and the epsilon spent so far, images encoded, steps, heads."""

    def __init__(self, shown: Any, folder: Path | None = None) -> None:
        """Take what shows the bar, and the folder whose ledger knows what was spent.

        Args:
            shown: a `rich.progress.Progress`.
            folder: of the run; None where `page` is told the epsilon.
        """
        self._shown, self._folder, self._task, self._loss = shown, folder, None, ""

    @property
    def visible(self) -> bool:
        """Return whether anyone sees it: elsewhere than on a terminal nothing is computed for it."""
        return not self._shown.disable

    def begin(self, what: str, total: int) -> None:
        """Show a new bar in place of the old one."""
        if self._task is not None:
            self._shown.remove_task(self._task)
        self._task = self._shown.add_task(what, total=total)

    def at(self, done: int, /) -> None:
        """Show how many of the bar's total are done."""
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
        """Yield the same blocks; the bar moves as they are taken."""
        self.begin("heads", users)
        for block in blocks:
            yield block
            self._shown.update(self._task, advance=block.n_users)


@contextmanager
def show_bar(console: Console, folder: Path | None = None, hidden: bool = False) -> Iterator[Bar]:
    """Show a bar on a terminal or in a notebook, and nothing elsewhere.

    Args:
        console: where it is shown.
        folder: of the run whose pages it counts.
        hidden: whether it is not to be shown at all.
    """
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

    columns = (TextColumn("{task.description:<34}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    seen = not hidden and (console.is_terminal or console.is_jupyter)
    with Progress(*columns, console=console, transient=True, disable=not seen) as shown:
        yield Bar(shown, folder)


@contextmanager
def watch(verbose: bool, total: int) -> Iterator[Bar | None]:
    """Show a bar on standard error for an estimator that is verbose; give None where nobody sees one.

    Args:
        verbose: what the estimator's parameter says.
        total: about how many pages or steps there are.
    """
    if not verbose:
        yield None
        return
    from rich.console import Console

    with show_bar(Console(stderr=True)) as bar:
        bar.begin("reading", total)
        yield bar if bar.visible else None
