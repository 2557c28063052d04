"""Judge what a killed process left on the disk: its ledger, its billboard, its draws, and the population's ledger."""

from __future__ import annotations

import json
import sqlite3
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

ALIKE, SAMPLED = 1e-6, 1e-3  # relative: by how much a reservation may be rounded down, the latter beside samples


@dataclass(frozen=True)
class Books:
    """The files of one process's run.

    `board` is None for a ledger without pages. `log` is what a `Witness` wrote. `settled` is the ledger by whose
    charges the run counts when it is over, its own if None: a node trusts the server's.
    """

    ledger: Path
    board: Path | None
    population: Path
    log: Path
    settled: Path | None = None


@dataclass
class Judge:
    """Looks at books again and again; what was found before must still stand. Returns faults in words."""

    _lines: dict[Path, list[Any]] = field(default_factory=dict)  # of a ledger or population, as last seen
    _pages: dict[Path, dict[str, bytes]] = field(default_factory=dict)
    _draws: dict[tuple[Path, str], int] = field(default_factory=dict)  # page that stands -> lines of the log by then

    def look(self, books: Books) -> list[str]:
        """Return the faults of a run that was killed, goes on, or is over."""
        faults = [*self._look_at_pages(books), *self._look_at_ledger(books), *_look_at_draws(books, self._draws)]
        return [f"{books.ledger.parent.name}: {fault}" for fault in faults]

    def look_at_population(self, path: Path, runs: Sequence[Books], over: Iterable[Books] = ()) -> list[str]:
        """Return the faults of a population's ledger.

        Args:
            path: of the file.
            runs: all that draw from it. They may be under way.
            over: runs that came to their end.
        """
        from privrep.errors import InputError
        from privrep.privacy.accounting import collect_spending
        from privrep.privacy.population import PopulationLedger

        # A run may go on meanwhile: what its ledger says now is at most what the file counts later.
        try:
            ledgers = [
                (books, found) for books in runs if (found := _read(books.ledger)) is not None
            ]  # before the file
            accounts = PopulationLedger(path).read()
        except InputError as error:
            return [str(error)]
        faults = self._look_at_lines(path, _read_population(path))
        charged = {}
        for books, ledger in ledgers:
            charges, known = tuple(ledger.entries.charges.values()), ledger.entries.drawn_from
            share = None if known is None else accounts.shares.get(known[1])
            name = books.ledger.parent.name
            if share is None or share.status == "returned":
                faults += [f"{name}: charges without a reservation"] if charges else []
                continue
            charged[share.run] = replace(share, events=charges)
            least = ledger.budget.epsilon * (1 - (ALIKE if collect_spending(share.events) is None else SAMPLED))
            if share.status in ("open", "given up") and share.epsilon < least:
                faults.append(f"{name}: {share.status}, and {share.epsilon} is counted of {ledger.budget.epsilon}")
            if share.status == "finished" and share.events != _list_charges(books.settled or books.ledger):
                faults.append(f"{name}: finished, and other events are counted than were charged")
            if books in over and share.status != "finished":
                faults.append(f"{name}: over, and its share is {share.status}")
        counted, spent = accounts.epsilon, replace(accounts, shares=charged).epsilon
        if not spent <= counted * (1 + 1e-9) or not counted <= accounts.budget.epsilon * (1 + 1e-9):
            faults.append(f"epsilon {spent} was spent, {counted} is counted of {accounts.budget.epsilon}")
        return faults

    def _look_at_pages(self, books: Books) -> list[str]:
        if books.board is None:
            return []
        files = sorted(books.board.glob("*.safetensors"))
        for file in files:
            self._draws.setdefault((books.log, file.stem.partition("-")[2]), _count_lines(books.log))
        pages = {file.name: file.read_bytes() for file in files}
        before = self._pages.get(books.board, {})
        self._pages[books.board] = pages
        return [f"page {name} changed" for name, content in before.items() if pages.get(name) != content]

    def _look_at_ledger(self, books: Books) -> Iterator[str]:
        from privrep.errors import InputError
        from privrep.privacy.billboard import Billboard
        from privrep.privacy.books import find_fault

        raw = books.ledger.read_bytes() if books.ledger.exists() else b""
        yield from self._look_at_lines(books.ledger, raw.split(b"\n")[:-1])
        if books.board is None:
            return
        try:
            board = Billboard.read(books.board)
            ledger = _read(books.ledger)
        except InputError as error:
            yield str(error)
            return
        if ledger is None:
            yield from ["pages, and no ledger"] * (len(board) > 0)
            return
        charged = {name.partition("/")[0] for name in ledger.entries.charges}
        yield from (f"page {p.name} has no charge" for p in board if "derived" not in p.facts and p.name not in charged)
        if fault := find_fault(ledger, board, finished=False):
            yield fault

    def _look_at_lines(self, path: Path, lines: list[Any]) -> list[str]:
        before = self._lines.get(path, [])
        self._lines[path] = lines
        return [] if lines[: len(before)] == before else [f"{path.name}: lines were lost or changed"]


def _list_charges(path: Path) -> tuple[Any, ...]:
    """Return the events that a ledger was charged."""
    found = _read(path)
    return () if found is None else tuple(found.entries.charges.values())


def _count_lines(log: Path) -> int:
    return log.read_bytes().count(b"\n") if log.exists() else 0


def _read(path: Path) -> Any:
    """Return a ledger; None for one that was not begun."""
    from privrep.privacy.ledger import read_ledger
    from privrep.privacy.ledger_file import read_file

    return read_ledger(path) if path.is_file() and read_file(path).header is not None else None


def _read_population(path: Path) -> list[str]:
    connection = sqlite3.connect(path)
    try:
        return [line for (line,) in connection.execute("SELECT line FROM lines ORDER BY number")]
    finally:
        connection.close()


LIFE = "life"  # a line of the log: a process begins


def read_log(log: Path) -> list[tuple[int, str, str]]:
    """Return the lines that witnesses wrote: bytes of the ledger, place, page."""
    lines = log.read_text().split("\n")[:-1] if log.exists() else []
    return [(int(size), place, page) for size, place, page in (line.split("\t") for line in lines)]


def _look_at_draws(books: Books, standing: dict[tuple[Path, str], int]) -> Iterator[str]:
    """Yield draws without a charge on disk, draws of one name twice in a life, and draws after the page stood."""
    charged: dict[int, set[str]] = {}  # by bytes of the ledger
    posted: set[str] = set()
    drawn: set[str] = set()
    whole = books.ledger.read_bytes() if books.ledger.exists() else b""
    for number, (size, place, page) in enumerate(read_log(books.log)):
        if place == LIFE:
            drawn = set()
        elif place in ("after rename", "after post") and page:
            posted.add(page)
        if not place.startswith("before draw of "):
            continue
        name = place.removeprefix("before draw of ")
        of = name.partition("/")[0]
        if size not in charged:
            charged[size] = _list_charged(whole[:size])
        if of not in charged[size]:
            yield f"{name} was drawn before its charge was on disk"
        if name in drawn:
            yield f"{name} was drawn twice"
        if of in posted or standing.get((books.log, of), number + 1) <= number:
            yield f"{name} was drawn again, and its page stands"
        drawn.add(name)


def _list_charged(lines: bytes) -> set[str]:
    """Return the pages whose charges are among these bytes of a ledger."""
    read = [json.loads(line) for line in lines.split(b"\n")[:-1]]
    return {line["charge"].partition("/")[0] for line in read if "charge" in line}
