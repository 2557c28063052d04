"""How a command ends: its exit codes, and what Ctrl-C and SIGTERM do.

A command that is stopped says so in one sentence, and how to go on. Ctrl-C and SIGTERM differ in their exit code alone.
"""

from __future__ import annotations

import signal
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from enum import IntEnum
from types import FrameType
from typing import Never

import typer


class ExitCode(IntEnum):
    """The exit codes of commands."""

    DONE = 0
    BUG = 1
    REFUSED = 2
    INTERRUPTED = 130
    TERMINATED = 143


MEANINGS = {
    ExitCode.DONE: "done",
    ExitCode.BUG: "a bug, or nobody reads standard output any more",
    ExitCode.REFUSED: "something you gave cannot be used; one sentence says what",
    ExitCode.INTERRUPTED: "stopped by Ctrl-C (SIGINT)",
    ExitCode.TERMINATED: "stopped by SIGTERM",
}
"""The meaning of each code, as docs/command-line.md has it."""


class Terminated(KeyboardInterrupt):
    """Raised by SIGTERM inside a command, so that it ends as it does on Ctrl-C."""


def refuse(sentence: str) -> Never:
    """End the program: something that was given cannot be used."""
    print(f"privrep: {sentence}", file=sys.stderr)
    sys.exit(ExitCode.REFUSED)


def end_on_sigterm() -> None:
    """End the program on SIGTERM as on any other end: temporary files of users' rows go."""
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(ExitCode.TERMINATED))


@contextmanager
def sigterm_interrupts() -> Iterator[None]:
    """Make SIGTERM raise Terminated, for as long as a command runs."""
    before = signal.signal(signal.SIGTERM, _terminate)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)


def _terminate(number: int, frame: FrameType | None) -> Never:
    raise Terminated


@contextmanager
def stoppable(after: str | Callable[[], str]) -> Iterator[None]:
    """End what is inside with one sentence when Ctrl-C or SIGTERM stops it.

    Args:
        after: how to go on, or a function that tells it once the command is stopped.
    """
    try:
        yield
    except KeyboardInterrupt as stop:
        print(f"privrep: stopped; {after if isinstance(after, str) else after()}", file=sys.stderr)
        code = ExitCode.TERMINATED if isinstance(stop, Terminated) else ExitCode.INTERRUPTED
        raise typer.Exit(code) from None
