"""The screen: what commands say, in words or as JSON, and progress.

A command says what it did by `say`, what it was asked for by `show`, and remarks by `note`. Facts that it passes along
make the JSON object that `--json` prints in place of all words on standard output. `--quiet` leaves what was asked for.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rich.console import Console, RenderableType
from rich.table import Table

from privrep.errors import InputError
from privrep.estimators.progress import Bar as Bar
from privrep.estimators.progress import show_bar

if TYPE_CHECKING:
    from privrep.privacy.report import PrivacyReport


NOISE_MULTIPLIER = (
    "Noise multiplier: standard deviation of the noise over the most that one user can change the sum. "
    "Shares are of mu², which adds up over releases as 1 / multiplier². Half of them is more "
    "than half of epsilon."
)


@dataclass
class Screen:
    """The screen of one command: what it may print, and what it has told so far."""

    quiet: bool = False
    as_json: bool = False
    facts: dict[str, Any] = field(default_factory=dict)
    aliases: dict[str, str] = field(default_factory=dict)  # of temporary files: what sentences call them
    stdout_is_file: bool = False  # whether standard output is a file that the command writes

    def worded(self, text: str) -> str:
        """Return a sentence with temporary files under the names that the user knows."""
        for path, name in self.aliases.items():
            text = text.replace(path, name)
        return text


_screen = Screen()


@contextmanager
def screen(quiet: bool, as_json: bool) -> Iterator[None]:
    """Open the screen of one command; with `as_json`, print at the end what it told."""
    global _screen
    before, _screen = _screen, Screen(quiet, as_json)
    try:
        yield
        if as_json:
            print(json.dumps(_plain(_screen.facts), indent=2, default=_of_numpy))
    finally:
        _screen = before


def say(text: str, **facts: Any) -> None:
    """Say what was done. Not said with --quiet; with --json the facts are printed instead."""
    _tell(text, facts)


def shout(text: str, **facts: Any) -> None:
    """Say, in bold red, what nobody should miss."""
    _tell(text, facts, "bold red")


def show(what: RenderableType, style: str = "", wrap: bool = False, **facts: Any) -> None:
    """Print what the command was asked for; with --json the facts are printed instead.

    Args:
        what: a sentence or a table.
        style: of a sentence, in words of rich.
        wrap: whether a sentence is broken to the width of the screen.
        facts: that --json prints.
    """
    tell(**facts)
    if not _screen.as_json:
        _console().print(what, style=style or None, soft_wrap=isinstance(what, str) and not wrap)


def note(text: str) -> None:
    """Remark on something on standard error. Not said with --quiet."""
    if not _screen.quiet:
        _console(stderr=True).print(_screen.worded(text), soft_wrap=True)


def tell(**facts: Any) -> None:
    """Add facts to what --json prints; mappings are merged."""
    for name, value in facts.items():
        known = _screen.facts.get(name)
        both = isinstance(known, dict) and isinstance(value, Mapping)
        _screen.facts[name] = {**known, **value} if both else value  # type: ignore[dict-item]


def tell_privacy(report: PrivacyReport) -> None:
    """Add what a model spent to what --json prints."""
    tell(
        epsilon=report.epsilon,
        epsilon_budget=report.epsilon_budget,
        delta=report.delta,
        relation=report.relation,
        unit=report.unit,
        seeded=report.seeded,
        private=not report.seeded,
    )


def call(path: Path, name: str) -> None:
    """Let sentences call a temporary file by another name."""
    _screen.aliases[str(path)] = name


def worded(text: str) -> str:
    """Return a sentence with temporary files under the names that the user knows."""
    return _screen.worded(text)


def take_stdout() -> None:
    """Make standard output the file that a command writes; what it says goes to standard error from here on."""
    if _screen.as_json:
        raise InputError("--json and --out - would both write to standard output; leave one out.")
    _screen.stdout_is_file = True


def _tell(text: str, facts: Mapping[str, Any], style: str = "") -> None:
    tell(**facts)
    if not (_screen.quiet or _screen.as_json):
        console = _console(stderr=_screen.stdout_is_file)
        console.print(_screen.worded(text), style=style or None, soft_wrap=not style)


def _console(stderr: bool = False) -> Console:
    return Console(stderr=stderr, highlight=False, markup=False)


def _plain(value: Any) -> Any:
    """Return a value as JSON has it: paths as text, infinite numbers as null."""
    if isinstance(value, Mapping):
        return {str(name): _plain(inner) for name, inner in value.items()}
    if isinstance(value, str) or value is None:
        return value if value is None else _screen.worded(value)
    if isinstance(value, Path):
        return _screen.worded(str(value))
    if isinstance(value, Sequence):
        return [_plain(inner) for inner in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value


def _of_numpy(number: Any) -> Any:
    """Return a number of NumPy's as one of Python's."""
    return number.item()


def right(table: Table, *columns: int) -> None:
    """Align columns of a table to the right."""
    for column in columns:
        table.columns[column].justify = "right"


@contextmanager
def progress(folder: Path | None = None) -> Iterator[Bar]:
    """Show a bar on a terminal, and nothing elsewhere or with --quiet.

    Args:
        folder: of the run whose pages it counts.
    """
    with show_bar(Console(stderr=True), folder, hidden=_screen.quiet) as bar:
        yield bar
