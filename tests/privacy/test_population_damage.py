"""Damage to the file of a population: every change is refused, and its lines stay."""

from __future__ import annotations

import sqlite3
from collections.abc import Callable
from contextlib import closing
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from populations import ONE, opened

from privrep.errors import InputError
from privrep.privacy.events import Selection
from privrep.privacy.ledger import Budget
from privrep.privacy.population import PopulationLedger


def some_runs(people: PopulationLedger, folder: Path) -> None:
    with closing(opened(people, folder / "1.jsonl")) as ledger:
        ledger.charge({"keys/keys": Selection(20.0, 1e-8)})
        ledger.finish()
    opened(people, folder / "2.jsonl", Budget(0.3, 1e-6)).close()
    people.reserve("third", Budget(0.2, 1e-6), "a third")
    people.give_up("third")


LINES = 6  # of some_runs: the header, three reserved, one covered, finished; the last given up
Tamper = Callable[[sqlite3.Connection, int], Any]


def edit(number: int, change: Callable[[str], str]) -> Tamper:
    def tamper(file: sqlite3.Connection, _: int) -> None:
        (line,) = file.execute("SELECT line FROM lines WHERE number = ?", (number,)).fetchone()
        file.execute("UPDATE lines SET line = ? WHERE number = ?", (change(line), number))

    return tamper


def delete(number: int) -> Tamper:
    return lambda file, last: file.execute("DELETE FROM lines WHERE number = ?", (number,))


def repeat(number: int) -> Tamper:
    insert = "INSERT INTO lines SELECT ?, line FROM lines WHERE number = ?"
    return lambda file, last: file.execute(insert, (last + 1, number))


def swap(number: int) -> Tamper:
    def tamper(file: sqlite3.Connection, last: int) -> None:
        for before, after in ((number, -1), (number + 1, number), (-1, number + 1)):
            file.execute("UPDATE lines SET number = ? WHERE number = ?", (after, before))

    return tamper


def say(sql: str) -> Tamper:
    return lambda file, last: file.execute(sql)


def flip(line: str) -> str:
    """Return a line with a digit changed that is not of its chain."""
    place = next(i for i, c in enumerate(line) if c.isdigit())
    return line[:place] + str((int(line[place]) + 1) % 10) + line[place + 1 :]


TAMPERED: dict[str, Tamper] = {
    **{f"delete {n}": delete(n) for n in range(1, LINES + 2)},
    **{f"repeat {n}": repeat(n) for n in range(1, LINES + 2)},
    **{f"swap {n}": swap(n) for n in range(1, LINES + 1)},
    **{f"edit {n}": edit(n, flip) for n in range(1, LINES + 2)},
    **{f"cut {n}": edit(n, lambda line: line[:-40]) for n in range(1, LINES + 2)},
    "blank": edit(2, lambda line: ""),
    "deep": edit(2, lambda line: "[" * 100_000),
    "delete all": say("DELETE FROM lines"),
    "delete the seal": say("DELETE FROM seal"),
    "another seal": say("UPDATE seal SET lines = lines - 1"),
    "forget an open run": say("DELETE FROM runs"),
    "open a run that is over": say("INSERT INTO runs VALUES ('third', '', '', 0)"),
    "a run of no length": say("UPDATE runs SET lines = 'many'"),
    "no lines": say("DROP TABLE lines"),
}


@pytest.mark.parametrize("name", TAMPERED)
def test_every_change_is_refused(people: PopulationLedger, tmp_path: Path, name: str) -> None:
    some_runs(people, tmp_path)
    with closing(sqlite3.connect(people.path, isolation_level=None)) as file:
        (last,) = file.execute("SELECT MAX(number) FROM lines").fetchone()
        assert last == LINES + 1
        file.execute("DROP TRIGGER lines_stay")
        file.execute("DROP TRIGGER lines_are_kept")
        assert people.read().epsilon > 0
        TAMPERED[name](file, last)
    for use in (people.read, lambda: PopulationLedger(people.path), lambda: people.reserve("x", ONE, "a run")):
        with pytest.raises(InputError, match=r"is damaged|cannot be used|is no population ledger"):
            use()


@pytest.mark.parametrize("sql", ["DELETE FROM lines WHERE number = 2", "UPDATE lines SET line = ''"])
def test_lines_stay_by_themselves(people: PopulationLedger, tmp_path: Path, sql: str) -> None:
    some_runs(people, tmp_path)
    before = people.read()
    with closing(sqlite3.connect(people.path)) as file, pytest.raises(sqlite3.DatabaseError, match="lines are never"):
        file.execute(sql)
    assert people.read() == before


def test_damaged_bytes_are_refused_or_change_nothing(people: PopulationLedger, tmp_path: Path) -> None:
    """Flip bits anywhere in the database: the state is the same, or the file is refused. Each time the same bits."""
    some_runs(people, tmp_path)
    whole, good = people.path.read_bytes(), people.read()
    rng, refused = np.random.default_rng(0), 0
    used = np.flatnonzero(np.frombuffer(whole, np.uint8))
    for place in rng.choice(used, 100):
        flipped = bytes([whole[place] ^ (1 << int(rng.integers(8)))])
        people.path.write_bytes(whole[:place] + flipped + whole[place + 1 :])
        try:
            assert people.read() == good
        except InputError:
            refused += 1
    assert refused > 30
