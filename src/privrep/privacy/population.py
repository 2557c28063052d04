"""One budget for a population: a file that all runs on the same people draw from, safe against processes and kills.

A run reserves its whole budget before it draws, in one transaction. What it did not spend returns when it is over. The
reservation of a run that was killed stands until the run is continued to its end, or is given up as spent.
`privacy.shares` has the formal guarantee.

A run goes on in one place. Each process that opens it writes a new mark into the run's own ledger. The population's
ledger keeps that mark and how long the run's ledger is, before every draw and again before every page is posted. So of
two copies of a run's folder one is refused, before it posts anything that the other one draws, too. What is left is a
copy that is made in the moment between the last of these notes and the page.

The lines of the file are only ever appended (`privacy.population_file`). It holds no row. It holds a keyed sketch of
users' ids, so it stays with whoever holds the rows.
"""

from __future__ import annotations

import sqlite3
import warnings
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from numpy.typing import ArrayLike

from privrep.boundary import say_why
from privrep.errors import InputError, OtherPeople, ResumeError
from privrep.privacy.account import UNOPENED, Place, refuse_simulation
from privrep.privacy.accounting import total_mu, within_budget
from privrep.privacy.events import Event, Gaussian, Relation, event_from_json, event_to_json
from privrep.privacy.ledger import Budget, Ledger
from privrep.privacy.ledger_file import read_file
from privrep.privacy.naming import draw_name
from privrep.privacy.people import Sketch
from privrep.privacy.population_file import (
    Holder,
    append_lines,
    make_file,
    meet_people,
    move_holder,
    open_file,
    read_holders,
    read_lines,
    reading,
    write_holder,
    writing,
)
from privrep.privacy.shares import Accounts, Share, Status, bound_events

FORMAT = "privrep-population/1"
FEW_KNOWN = 0.5  # of the users of a run: with fewer, the ledger may be of other people
Lines = list[dict[str, Any]]


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
        budget = Budget(epsilon, delta, relation)
        header = {
            "format": FORMAT,
            "name": draw_name(),
            "relation": budget.relation,
            "epsilon": float(budget.epsilon),
            "delta": float(budget.delta),
            "salt": draw_name(32),
        }
        make_file(Path(path), header)
        return cls(path)

    def read(self) -> Accounts:
        """Return the state of the file. Raise InputError if it is damaged."""
        with open_file(self.path) as connection, reading(connection):
            return self._read(connection)[0]

    def check_room(self, budget: Budget) -> None:
        """Raise what `reserve` would raise for a new run of this budget, and reserve nothing."""
        _check_new(self.read(), "", budget)

    def reserve(
        self, run: str, budget: Budget, what: str, people: Sketch | None = None, place: Place = UNOPENED
    ) -> tuple[str, float | None]:
        """Reserve a run's whole budget. Raise BudgetExceeded if there is no room for it.

        A run that has reserved it keeps what it has.

        Args:
            run: the name of the run.
            budget: all that it may spend.
            what: the run in words.
            people: a sketch of its users, made with the salt of this file; None where they are not known.
            place: of its ledger. Raise ResumeError if the run is open in another copy, which has more on record.

        Returns:
            The new mark of the run, for its ledger; empty if the run is finished and can charge no more.
            How much of its users and the earlier runs' are the same; None for the first run, and where it is not known.
        """
        mark = draw_name()

        def reserve(accounts: Accounts, holders: Mapping[str, Holder]) -> Lines:
            known = accounts.shares.get(run)
            if known is not None and known.status == "given up":
                raise ResumeError(
                    "this run was given up, so it cannot go on; its budget counts as spent. Fit into another folder."
                )
            if known is not None and known.budget != budget:
                raise ResumeError("this run reserved another budget; continue it with the same epsilon and delta.")
            if known is not None and known.status == "open" and not holders[run].is_at(place):
                raise ResumeError(_BEHIND)
            if known is not None and known.status != "returned":
                return []
            _check_new(accounts, run, budget)
            line = {"reserve": run, "what": what, "when": _now(), "epsilon": budget.epsilon, "delta": budget.delta}
            known_count = people is not None and budget.relation == "replace-one-user"  # else it is not public
            users, events = people.count if people and known_count else None, _to_json(bound_events((), budget))
            return [{**line, "users": users, "events": events}]

        with open_file(self.path) as connection, writing(connection):
            before = self._write(connection, reserve)
            known = before.shares.get(run)
            if known is not None and known.status == "finished":
                return "", None
            lines = 0 if known is None else place.lines
            write_holder(connection, run, Holder(mark, place.opened, lines))
            return mark, None if people is None or known is not None else meet_people(connection, people)

    def cover(self, run: str, events: Sequence[Event], place: Place) -> None:
        """Count other events for an open run. Raise BudgetExceeded if they do not fit, and count what was counted.

        Args:
            run: the name of the run.
            events: all that it may come to.
            place: of its ledger. Raise ResumeError if the run is over, or open elsewhere.
        """

        def cover(accounts: Accounts, holders: Mapping[str, Holder]) -> Lines:
            share = _find(accounts, run)
            if run not in holders or holders[run].opened != place.opened:
                raise ResumeError(_say_why(share))
            if share.events == tuple(events):
                return []
            accounts.check_fits(run, events)
            return [{"cover": run, "events": _to_json(events)}]

        self._change(cover)

    def advance(self, run: str, place: Place) -> None:
        """Take note of how long the ledger of a run is. Raise ResumeError if the run is over, or open elsewhere."""
        with open_file(self.path) as connection, writing(connection):
            if move_holder(connection, run, place):
                return
        raise ResumeError(_say_why(_find(self.read(), run)))

    def finish(self, run: str, charges: Sequence[Event], place: Place) -> None:
        """Count a run that is over by its charges, and return the rest. Without charges, all is returned.

        A run that is over changes nothing by being finished once more in the same way. Raise InputError if the charges
        are over what the run reserved, the run is not open, or is open elsewhere.
        """

        def finish(accounts: Accounts, holders: Mapping[str, Holder]) -> Lines:
            share = _find(accounts, run)
            if {"finished": share.events, "returned": ()}.get(share.status) == tuple(charges):
                return []
            if share.status != "open":
                raise InputError(f"run {run} is {share.status} in {self.path}, not open.")
            if not holders[run].is_at(place):
                raise ResumeError(_BEHIND)
            if not charges:
                return [{"return": run, "when": _now()}]
            if not within_budget(charges, share.budget.epsilon, share.budget.delta):
                raise InputError(f"run {run} charged more than it reserved in {self.path}.")
            return [{"finish": run, "when": _now(), "events": _to_json(charges)}]

        self._change(finish, over=run)

    def settle(self, ledger: Ledger, charges: Mapping[str, Event] | None = None) -> str:
        """Finish the run of a ledger that nobody has open any more; return its name.

        Args:
            ledger: of the run, as it was read.
            charges: all that the run was charged; None: what its ledger says.
        """
        entries = ledger.entries
        if entries.drawn_from is None or entries.drawn_from[0] != self.name:
            raise InputError(f"this run does not draw from {self.path}.")
        events = list((entries.charges if charges is None else charges).values())
        self.finish(entries.drawn_from[1], events, Place(entries.opened, len(entries.lines)))
        return entries.drawn_from[1]

    def give_up(self, run: str) -> None:
        """Count a run that will not go on as if it had spent all that it reserved. Raise InputError if it is over."""

        def give_up(accounts: Accounts, holders: Mapping[str, Holder]) -> Lines:
            share = _find(accounts, run)
            if share.status != "open":
                raise InputError(f"run {run} is {share.status}, not open: there is nothing to give up.")
            return [{"give up": run, "when": _now()}]

        self._change(give_up, over=run)

    def _change(self, change: Callable[[Accounts, Mapping[str, Holder]], Lines], over: str | None = None) -> None:
        """Append the lines that a change asks for; `over` names a run that is over by then."""
        with open_file(self.path) as connection, writing(connection):
            self._write(connection, change)
            if over is not None:
                write_holder(connection, over, None)

    def _write(
        self, connection: sqlite3.Connection, change: Callable[[Accounts, Mapping[str, Holder]], Lines]
    ) -> Accounts:
        """Append the lines that a change asks for; return the state before it."""
        accounts, head, count = self._read(connection)
        append_lines(connection, count, head, change(accounts, read_holders(connection)))
        return accounts

    def _read(self, connection: sqlite3.Connection) -> tuple[Accounts, str, int]:
        """Return the state of the file, the chain of its last line, and how many there are."""
        accounts = None
        try:
            lines, head = read_lines(connection)
            for number, data in enumerate(lines, start=1):
                try:
                    accounts = _read_header(data) if accounts is None else _replay(accounts, data)
                except Exception as error:
                    raise ValueError(f"line {number}: {say_why(error)}") from None
            if accounts is None:
                raise ValueError("it is empty")
            if read_holders(connection).keys() != {s.run for s in accounts.shares.values() if s.status == "open"}:
                raise ValueError("its table of runs has other open runs than its lines")
        except ValueError as error:
            raise InputError(
                f"{self.path} is damaged ({error}); restore it from a copy. What it says was spent cannot be trusted."
            ) from None
        return accounts, head, len(lines)


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

    def check(self, budget: Budget, ledger: Path | None, *, seeded: bool) -> None:
        """Raise what `reserve` would raise for a new run, and reserve nothing: no row is read in vain.

        Args:
            budget: of the run.
            ledger: the file of its own ledger, if there may be one. A run that has a share is looked at once it opens.
            seeded: whether its noise is simulated.
        """
        refuse_simulation(seeded)
        if ledger is None or not ledger.is_file() or read_file(ledger).entries.drawn_from is None:
            self.population.check_room(budget)

    def reserve(self, run: str, budget: Budget, place: Place) -> str:
        """Reserve the whole budget of a run and return its mark; warn where most of its users are not the ledger's."""
        people = None if self.ids is None else Sketch.of_ids(self.ids(), self.population.salt)
        mark, known = self.population.reserve(run, budget, self.what, people, place)
        if known is not None and known < FEW_KNOWN:
            warnings.warn(
                f"about {known:.0%} of these users were in earlier runs of {self.population.path}. A population ledger "
                "is for one group of people: these users' earlier runs may be on another one.",
                OtherPeople,
                stacklevel=2,
            )
        return mark

    def cover(self, run: str, charges: Sequence[Event], budget: Budget, place: Place) -> None:
        """Count more for the run, where what is counted does not cover these charges and all that may follow."""
        others = tuple(event for event in charges if not isinstance(event, Gaussian))
        charged = total_mu([event for event in charges if isinstance(event, Gaussian)])
        if self._covered is not None and self._covered[0] == others and charged <= self._covered[1]:
            return
        bound = bound_events(charges, budget)
        self.population.cover(run, bound, place)
        self._covered = others, total_mu([event for event in bound if isinstance(event, Gaussian)])

    def advance(self, run: str, place: Place) -> None:
        """Take note of the place of the run's ledger."""
        self.population.advance(run, place)

    def finish(self, run: str, charges: Sequence[Event], place: Place) -> None:
        """Count the run by its charges, and return the rest."""
        self.population.finish(run, charges, place)


_BEHIND = (
    "this run was continued in another copy of its folder, which has more on record: continue that one. What this copy "
    "drew again would be on no record."
)


def _say_why(share: Share) -> str:
    """Return why a run can charge nothing more."""
    return _BEHIND if share.status == "open" else f"this run is {share.status}: it can charge nothing more."


def _check_new(accounts: Accounts, run: str, budget: Budget) -> None:
    """Raise InputError or BudgetExceeded unless a new run of this budget fits."""
    if budget.relation != accounts.budget.relation:
        raise InputError(f"this population's budget is for {accounts.budget.relation}; use that relation.")
    accounts.check_fits(run, bound_events((), budget))


def _find(accounts: Accounts, run: str) -> Share:
    if run not in accounts.shares:
        raise InputError(f"there is no run {run!r} in this population ledger; privrep population show lists them.")
    return accounts.shares[run]


def _now() -> str:
    return datetime.now(UTC).isoformat(timespec="seconds")


def _to_json(events: Sequence[Event]) -> list[dict[str, Any]]:
    return [event_to_json(event) for event in events]


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
