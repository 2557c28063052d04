"""One budget for a population: a file that all runs on the same people draw from, safe against processes and kills.

A run reserves its whole budget before it draws, in one transaction. What it did not spend returns when it is over. The
reservation of a run that was killed stands until the run is continued to its end, or is given up as spent.
`privacy.shares` has the formal guarantee.

The file is an SQLite database of lines that are only ever appended, each chained to all before it, as lines of a ledger
are. It holds no row. It holds a keyed sketch of users' ids, so it stays with whoever holds the rows.
"""

from __future__ import annotations

import os
import secrets
import sqlite3
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from numpy.typing import ArrayLike

from privrep.boundary import say_why
from privrep.errors import InputError, OtherPeople, ResumeError
from privrep.privacy.accounting import total_mu, within_budget
from privrep.privacy.events import Event, Gaussian, Relation, event_from_json, event_to_json
from privrep.privacy.ledger import Budget
from privrep.privacy.ledger_file import chain_line, read_chained
from privrep.privacy.people import Sketch
from privrep.privacy.shares import Accounts, Share, Status, bound_events

FORMAT = "privrep-population/1"
FEW_KNOWN = 0.5  # of the users of a run: with fewer, the ledger may be of other people
WAIT = 60.0  # seconds for another process to finish its transaction


class PopulationLedger:
    """The file of a population's budget. Any number of processes and threads may use it at once."""

    def __init__(self, path: str | Path) -> None:
        """Name a file that `PopulationLedger.create` made. Raise InputError if it is none."""
        self.path = Path(path)
        if not self.path.is_file():
            raise InputError(
                f"{self.path} is no population ledger: there is no such file. Make one with privrep population create."
            )
        accounts = self.read()
        self.name, self.budget, self.salt = accounts.name, accounts.budget, accounts.salt

    @classmethod
    def create(
        cls,
        path: str | Path,
        *,
        epsilon: float,
        delta: float = 1e-6,
        relation: Relation = "replace-one-user",
    ) -> PopulationLedger:
        """Make a file with this budget, readable by its owner alone. Raise InputError if there is one.

        Args:
            path: of the file.
            epsilon: of all runs together.
            delta: of all runs together; 0 for choices alone.
            relation: between populations that are not to be told apart, the same for all runs.
        """
        path, budget = Path(path), Budget(epsilon, delta, relation)
        try:
            os.close(os.open(path, os.O_CREAT | os.O_EXCL | os.O_WRONLY, 0o600))
        except FileExistsError:
            raise InputError(f"{path} exists already. A population has one ledger; take another name.") from None
        except OSError as error:
            raise InputError(f"{path} cannot be made ({error.strerror}).") from None
        header = {
            "format": FORMAT,
            "name": secrets.token_hex(8),
            "relation": budget.relation,
            "epsilon": float(budget.epsilon),
            "delta": float(budget.delta),
            "salt": secrets.token_hex(16),
        }
        try:
            with _connect(path) as connection:
                connection.executescript(_TABLES)
                with _transaction(connection):
                    _append(connection, "", [header])
        except BaseException:
            path.unlink()
            raise
        return cls(path)

    def read(self) -> Accounts:
        """Return the state of the file. Raise InputError if it is damaged."""
        with _connect(self.path) as connection:
            return _read(connection, self.path)[0]

    def reserve(self, run: str, budget: Budget, what: str, people: Sketch | None = None) -> float | None:
        """Reserve a run's whole budget. Raise BudgetExceeded if there is no room for it.

        A run that has reserved it keeps what it has.

        Args:
            run: the name of the run.
            budget: all that it may spend.
            what: the run in words.
            people: a sketch of its users, made with the salt of this file; None where they are not known.

        Returns:
            The part of its users who were in earlier runs; None for the first run, and where it is not known.
        """

        def reserve(accounts: Accounts) -> list[dict[str, Any]]:
            known = accounts.shares.get(run)
            if known is not None and known.status == "given up":
                raise ResumeError("this run was given up, so it cannot go on; its budget counts as spent.")
            if known is not None and known.budget != budget:
                raise ResumeError("this run reserved another budget; continue it with the same epsilon and delta.")
            if budget.relation != accounts.budget.relation:
                raise InputError(f"this population's budget is for {accounts.budget.relation}; use that relation.")
            if known is not None and known.status != "returned":
                return []
            events = bound_events((), budget)
            accounts.check_fits(run, events, budget)
            line = {"reserve": run, "what": what, "when": _now(), "epsilon": budget.epsilon, "delta": budget.delta}
            return [{**line, "users": None if people is None else people.count, "events": _to_json(events)}]

        with _connect(self.path) as connection, _transaction(connection):
            before = _write(connection, self.path, reserve)
            return None if people is None or run in before.shares else _meet(connection, people)

    def cover(self, run: str, events: Sequence[Event]) -> None:
        """Count other events for an open run. Raise BudgetExceeded if they do not fit, and count what was counted."""

        def cover(accounts: Accounts) -> list[dict[str, Any]]:
            share = _find(accounts, run)
            if share.status != "open":
                raise ResumeError(f"this run is {share.status} in {self.path}: it can charge nothing more.")
            accounts.check_fits(run, events, share.budget)
            return [{"cover": run, "events": _to_json(events)}]

        self._write(cover)

    def finish(self, run: str, charges: Sequence[Event]) -> None:
        """Count a run that is over by its charges, and return the rest. Without charges, all is returned.

        Raise InputError if the charges are over what the run reserved, or the run is not open.
        """

        def finish(accounts: Accounts) -> list[dict[str, Any]]:
            share = _find(accounts, run)
            if share.status == "finished" and share.events == tuple(charges):
                return []
            if share.status != "open":
                raise InputError(f"run {run} is {share.status} in {self.path}, not open.")
            if not charges:
                return [{"return": run, "when": _now()}]
            if not within_budget(charges, share.budget.epsilon, share.budget.delta):
                raise InputError(f"run {run} charged more than it reserved in {self.path}.")
            return [{"finish": run, "when": _now(), "events": _to_json(charges)}]

        self._write(finish)

    def give_up(self, run: str) -> None:
        """Count a run that will not go on as if it had spent all that it reserved. Raise InputError if it is over."""

        def give_up(accounts: Accounts) -> list[dict[str, Any]]:
            share = _find(accounts, run)
            if share.status != "open":
                raise InputError(f"run {run} is {share.status}, not open: there is nothing to give up.")
            return [{"give up": run, "when": _now()}]

        self._write(give_up)

    def _write(self, change: Callable[[Accounts], list[dict[str, Any]]]) -> None:
        with _connect(self.path) as connection, _transaction(connection):
            _write(connection, self.path, change)


@dataclass
class Account:
    """The account of one run with a population's ledger: who asks, and what is counted for it so far.

    Args:
        population: the ledger.
        what: the run in words, for whoever reads the ledger.
        ids: of the run's users, (users,); None where they are not known.
        lasts: whether a run goes on after its ledger is closed, so that nothing returns by itself.
    """

    population: PopulationLedger
    what: str = "a run"
    ids: Callable[[], ArrayLike] | None = None
    lasts: bool = False
    _covered: tuple[tuple[Event, ...], float] | None = None  # charges but Gaussian ones, and mu for all Gaussian ones

    @property
    def name(self) -> str:
        """Return the name of the ledger."""
        return self.population.name

    def reserve(self, run: str, budget: Budget) -> None:
        """Reserve the whole budget of a run; warn where most of its users are not the ledger's."""
        people = None if self.ids is None else Sketch.of_ids(self.ids(), self.population.salt)
        known = self.population.reserve(run, budget, self.what, people)
        if known is not None and known < FEW_KNOWN:
            warnings.warn(
                f"about {known:.0%} of these users were in earlier runs of {self.population.path}. A population ledger "
                "is for one group of people: these users' earlier runs may be on another one.",
                OtherPeople,
                stacklevel=2,
            )

    def cover(self, run: str, charges: Sequence[Event], budget: Budget) -> None:
        """Count more for the run, where what is counted does not cover these charges and all that may follow."""
        others = tuple(event for event in charges if not isinstance(event, Gaussian))
        charged = total_mu([event for event in charges if isinstance(event, Gaussian)])
        if self._covered is not None and self._covered[0] == others and charged <= self._covered[1]:
            return
        bound = bound_events(charges, budget)
        if bound != self.population.read().shares[run].events:
            self.population.cover(run, bound)
        self._covered = others, total_mu([event for event in bound if isinstance(event, Gaussian)])

    def finish(self, run: str, charges: Sequence[Event]) -> None:
        """Count the run by its charges, and return the rest."""
        self.population.finish(run, charges)


def _find(accounts: Accounts, run: str) -> Share:
    if run not in accounts.shares:
        raise InputError(f"there is no run {run!r} in this population ledger; privrep population show lists them.")
    return accounts.shares[run]


def _now() -> str:
    return datetime.now(UTC).isoformat(timespec="seconds")


def _to_json(events: Sequence[Event]) -> list[dict[str, Any]]:
    return [event_to_json(event) for event in events]


# The file

_TABLES = """
PRAGMA journal_mode = DELETE;
CREATE TABLE lines (number INTEGER PRIMARY KEY, line TEXT NOT NULL);
CREATE TRIGGER lines_stay BEFORE UPDATE ON lines BEGIN SELECT RAISE(ABORT, 'lines are never rewritten'); END;
CREATE TRIGGER lines_are_kept BEFORE DELETE ON lines BEGIN SELECT RAISE(ABORT, 'lines are never deleted'); END;
CREATE TABLE people (hash INTEGER PRIMARY KEY);
"""


@contextmanager
def _connect(path: Path) -> Iterator[sqlite3.Connection]:
    """Open the file for one use: connections are shared by no thread, and none outlives a fork."""
    connection = None
    try:
        connection = sqlite3.connect(f"{path.absolute().as_uri()}?mode=rw", WAIT, isolation_level=None, uri=True)
        connection.execute("PRAGMA synchronous = EXTRA")
        yield connection
    except sqlite3.OperationalError as error:
        if "locked" in str(error):
            raise InputError(f"{path} is in use by another process for over {WAIT:g} seconds. Try again.") from None
        why = f"{path} cannot be used as a population ledger ({say_why(error)})"
        raise InputError(f"{why}. Nothing was drawn.") from None
    except (sqlite3.DatabaseError, UnicodeError) as error:
        why = f"{path} is no population ledger, or is damaged ({say_why(error)})"
        raise InputError(f"{why}. Restore it from a copy.") from None
    finally:
        if connection is not None:
            connection.close()


@contextmanager
def _transaction(connection: sqlite3.Connection) -> Iterator[None]:
    """Let one process at a time read and write. All of it is on disk at the end, or nothing is."""
    connection.execute("BEGIN IMMEDIATE")
    try:
        yield
        connection.execute("COMMIT")
    except BaseException:
        if connection.in_transaction:
            connection.execute("ROLLBACK")
        raise


def _write(connection: sqlite3.Connection, path: Path, change: Callable[[Accounts], list[dict[str, Any]]]) -> Accounts:
    """Append the lines that a change asks for; return the state before it."""
    accounts, head = _read(connection, path)
    _append(connection, head, change(accounts))
    return accounts


def _append(connection: sqlite3.Connection, head: str, lines: Sequence[Mapping[str, Any]]) -> None:
    for line in lines:
        text, chained = chain_line(head, line)
        head = chained or ""
        connection.execute("INSERT INTO lines (line) VALUES (?)", (text.decode().rstrip("\n"),))


def _read(connection: sqlite3.Connection, path: Path) -> tuple[Accounts, str]:
    """Return the state of the file, and the chain of its last line. Raise InputError if it is damaged."""
    lines = [str(line) for (line,) in connection.execute("SELECT line FROM lines ORDER BY number")]
    head, accounts = "", None
    for number, line in enumerate(lines, start=1):
        try:
            data, head = read_chained(head, line.encode())
            accounts = _read_header(data) if accounts is None else _replay(accounts, data)
        except Exception as error:
            raise InputError(
                f"{path} is damaged in line {number} ({say_why(error)}); restore it from a copy. What it says was "
                "spent cannot be trusted."
            ) from None
    if accounts is None:
        raise InputError(f"{path} is no population ledger: it is empty.")
    return accounts, head


def _read_header(data: Mapping[str, Any]) -> Accounts:
    if data["format"] != FORMAT:
        raise ValueError(f"its format is not {FORMAT}")
    return Accounts(str(data["name"]), Budget(data["epsilon"], data["delta"], data["relation"]), str(data["salt"]))


def _replay(accounts: Accounts, data: Mapping[str, Any]) -> Accounts:
    """Return the state after one more line. Raise ValueError if the line cannot follow."""
    (kind,) = data.keys() & {"reserve", "cover", "finish", "return", "give up"}
    run = str(data[kind])
    share = accounts.shares.get(run)
    if kind == "reserve":
        if share is not None and share.status != "returned":
            raise ValueError(f"run {run} reserved twice")
        budget = Budget(data["epsilon"], data["delta"], accounts.budget.relation)
        share = Share(run, str(data["what"]), str(data["when"]), budget, data["users"], _from_json(data["events"]))
    elif share is None or share.status != "open":
        raise ValueError(f"run {run} is not open")
    elif kind in ("cover", "finish"):
        status: Status = "open" if kind == "cover" else "finished"
        share = replace(share, events=_from_json(data["events"]), status=status)
    else:
        share = replace(share, status="returned" if kind == "return" else "given up")
    return replace(accounts, shares={**accounts.shares, run: share})


def _from_json(events: Sequence[Mapping[str, Any]]) -> tuple[Event, ...]:
    return tuple(event_from_json(event) for event in events)


def _meet(connection: sqlite3.Connection, people: Sketch) -> float | None:
    """Return the part of a run's users who were in earlier runs, None for the first; keep a sketch of them all."""
    known = Sketch.of_hashes(int(value) & (2**64 - 1) for (value,) in connection.execute("SELECT hash FROM people"))
    part = None if not len(known.hashes) else people.estimate_part_in(known)
    merged = known.merge(people)
    connection.execute("DELETE FROM people")
    signed = [(int(value) - 2**64 if value >= 2**63 else int(value),) for value in merged.hashes.tolist()]
    connection.executemany("INSERT INTO people (hash) VALUES (?)", signed)
    return part
