"""The file of a population's ledger: an SQLite database of chained lines, written by one process at a time.

lines   what happened, in its order: each line is chained to all before it, as lines of a run's ledger are
seal    how many lines there are, and the chain of the last: a line cut off at the end is missed
runs    of each open run, the mark of whoever has it open and how long its own ledger was then
people  the sketch of all users' ids
"""

from __future__ import annotations

import os
import sqlite3
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from privrep.boundary import is_full, say_why
from privrep.errors import DiskFull, InputError
from privrep.privacy.account import Place
from privrep.privacy.ledger_file import chain_line, read_chained
from privrep.privacy.people import Sketch

WAIT = 60.0  # seconds for another process to finish its transaction
_TABLES = """
CREATE TABLE lines (number INTEGER PRIMARY KEY, line TEXT NOT NULL);
CREATE TRIGGER lines_stay BEFORE UPDATE ON lines BEGIN SELECT RAISE(ABORT, 'lines are never rewritten'); END;
CREATE TRIGGER lines_are_kept BEFORE DELETE ON lines BEGIN SELECT RAISE(ABORT, 'lines are never deleted'); END;
CREATE TABLE seal (only INTEGER PRIMARY KEY CHECK (only = 1), lines INTEGER NOT NULL, chain TEXT NOT NULL);
CREATE TABLE runs (run TEXT PRIMARY KEY, opened TEXT NOT NULL, before TEXT NOT NULL, lines INTEGER NOT NULL);
CREATE TABLE people (hash INTEGER PRIMARY KEY);
"""


@dataclass(frozen=True)
class Holder:
    """The place where a run is open: the mark of its last opening, the mark before, and how long its own ledger was."""

    opened: str
    before: str  # still allowed: a process may have died before it wrote the new mark into the run's ledger
    lines: int

    def is_at(self, place: Place) -> bool:
        """Return whether a run's ledger is this one, and not a copy of it that was left behind."""
        return place.opened in (self.opened, self.before) and place.lines >= self.lines


def make_file(path: Path, first: Mapping[str, Any]) -> None:
    """Make a file that its owner alone can read, with one line. Raise InputError if there is one."""
    try:
        os.close(os.open(path, os.O_CREAT | os.O_EXCL | os.O_WRONLY, 0o600))
    except FileExistsError:
        raise InputError(f"{path} exists already. A population has one ledger; take another name.") from None
    except OSError as error:
        raise InputError(f"{path} cannot be made ({error.strerror}).") from None
    try:
        with open_file(path) as connection, writing(connection):
            for statement in _TABLES.strip().split("\n"):
                connection.execute(statement)
            append_lines(connection, 0, "", [first])
    except BaseException:
        path.unlink()
        raise


@contextmanager
def open_file(path: Path) -> Iterator[sqlite3.Connection]:
    """Open the file for one use: connections are shared by no thread, and none outlives a fork.

    What is committed is on disk: EXTRA syncs the folder, too, once the journal is gone.
    """
    connection = None
    try:
        connection = sqlite3.connect(f"{path.absolute().as_uri()}?mode=rw", WAIT, isolation_level=None, uri=True)
        connection.execute("PRAGMA synchronous = EXTRA")
        yield connection
    except sqlite3.OperationalError as error:
        if "locked" in str(error):
            raise InputError(f"{path} is in use by another process for over {WAIT:g} seconds. Try again.") from None
        if is_full(error):
            raise DiskFull(
                f"{path} cannot be written, because the disk is full. Make room and run the same again: what was "
                "written before still stands."
            ) from None
        why = f"{path} cannot be used as a population ledger ({say_why(error)})"
        raise InputError(f"{why}. What its runs wrote before still stands.") from None
    except (sqlite3.DatabaseError, UnicodeDecodeError) as error:  # the latter: a message that quotes the damage
        why = f"{path} is no population ledger, or is damaged ({say_why(error)})"
        raise InputError(f"{why}. Restore it from a copy.") from None
    finally:
        if connection is not None:
            connection.close()


@contextmanager
def writing(connection: sqlite3.Connection) -> Iterator[None]:
    """Let one process at a time read and write. All of it is on disk at the end, or nothing is."""
    with _transaction(connection, "BEGIN IMMEDIATE"):
        yield


@contextmanager
def reading(connection: sqlite3.Connection) -> Iterator[None]:
    """Read the tables as they are at one moment."""
    with _transaction(connection, "BEGIN"):
        yield


@contextmanager
def _transaction(connection: sqlite3.Connection, begin: str) -> Iterator[None]:
    connection.execute(begin)
    try:
        yield
        connection.execute("COMMIT")
    except BaseException:
        if connection.in_transaction:
            connection.execute("ROLLBACK")
        raise


def read_lines(connection: sqlite3.Connection) -> tuple[list[dict[str, Any]], str]:
    """Return all lines as data, and the chain of the last. Raise ValueError, naming the line, where one was changed."""
    rows = connection.execute("SELECT line FROM lines ORDER BY number").fetchall()
    head, found = "", list[dict[str, Any]]()
    for number, (line,) in enumerate(rows, start=1):
        try:
            data, head = read_chained(head, str(line).encode())
        except Exception as error:
            raise ValueError(f"line {number}: {say_why(error)}") from None
        found.append(data)
    if connection.execute("SELECT lines, chain FROM seal").fetchall() != ([(len(found), head)] if found else []):
        raise ValueError(f"line {len(found)}: it is not the last one that was written")
    return found, head


def append_lines(connection: sqlite3.Connection, count: int, head: str, lines: Sequence[Mapping[str, Any]]) -> None:
    """Append lines, and seal them.

    Args:
        connection: within `writing`.
        count: of the lines that stand.
        head: the chain of the last of them.
        lines: what to append.
    """
    for line in lines:
        text, chained = chain_line(head, line)
        head, count = chained or "", count + 1
        connection.execute("INSERT INTO lines VALUES (?, ?)", (count, text.decode().rstrip("\n")))
    if lines:
        connection.execute("INSERT OR REPLACE INTO seal VALUES (1, ?, ?)", (count, head))


def read_holders(connection: sqlite3.Connection) -> dict[str, Holder]:
    """Return who has which open run. Raise ValueError where that cannot be read."""
    rows = connection.execute("SELECT run, opened, before, lines FROM runs").fetchall()
    if not all(isinstance(each, kind) for row in rows for each, kind in zip(row, (str, str, str, int), strict=True)):
        raise ValueError("its table of runs cannot be read")
    return {run: Holder(opened, before, lines) for run, opened, before, lines in rows}


def write_holder(connection: sqlite3.Connection, run: str, holder: Holder | None) -> None:
    """Write who has a run open; None: it is over."""
    connection.execute("DELETE FROM runs WHERE run = ?", (run,))
    if holder is not None:
        row = run, holder.opened, holder.before, holder.lines
        connection.execute("INSERT INTO runs VALUES (?, ?, ?, ?)", row)


def move_holder(connection: sqlite3.Connection, run: str, place: Place) -> bool:
    """Write how long the ledger of a run is now; return whether it is still open, and open there."""
    row = connection.execute("SELECT before, lines FROM runs WHERE run = ? AND opened = ?", (run, place.opened))
    known = row.fetchone()
    if known is not None and known != ("", place.lines):  # otherwise nothing is written, and nothing synced
        connection.execute("UPDATE runs SET before = '', lines = ? WHERE run = ?", (place.lines, run))
    return known is not None


def meet_people(connection: sqlite3.Connection, people: Sketch) -> float | None:
    """Return how much of a run's users and the earlier runs' are the same, None for the first; keep all of them.

    It is the part of the run's users who were in earlier runs, or of the earlier ones who are in this, if that is more.
    """
    known = Sketch.of_hashes(int(value) & (2**64 - 1) for (value,) in connection.execute("SELECT hash FROM people"))
    part = None
    if len(known.hashes):
        part = max(people.estimate_part_in(known), known.estimate_part_in(people))
    merged = known.merge(people)
    connection.execute("DELETE FROM people")
    signed = [(int(value) - 2**64 if value >= 2**63 else int(value),) for value in merged.hashes.tolist()]
    connection.executemany("INSERT INTO people (hash) VALUES (?)", signed)
    return part
