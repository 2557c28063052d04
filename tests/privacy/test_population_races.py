"""Races for one budget, kills of its runs, and any order of everything."""

from __future__ import annotations

import os
import signal
import sys
from contextlib import closing
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import racing
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import Bundle, RuleBasedStateMachine, invariant, rule
from populations import opened, page, price

from privrep.errors import BudgetExceeded, InputError, ResumeError
from privrep.privacy.account import Place
from privrep.privacy.accounting import compute_epsilon, within_budget
from privrep.privacy.events import Event, Pure, Selection
from privrep.privacy.ledger import Budget, read_ledger
from privrep.privacy.population import PopulationLedger
from privrep.privacy.shares import bound_events

# Many at once


def test_of_many_processes_exactly_those_who_fit_have_a_share(tmp_path: Path) -> None:
    with racing.processes() as ask_all:
        assert racing.play(tmp_path, 24, ask_all) == (0, 0)


def test_of_many_threads_exactly_those_who_fit_have_a_share(tmp_path: Path) -> None:
    assert racing.play(tmp_path, 24, racing.ask_in_threads) == (0, 0)


def work(people: PopulationLedger, folder: Path) -> None:
    """Make a run of five pages from start to end, or go on with it; every draw is a line of a file."""
    with closing(opened(people, folder / "ledger.jsonl")) as ledger, open(folder / "drawn", "a") as drawn:
        for number, event in enumerate([Pure(0.05), Selection(20.0, 1e-8), *[price(0.1)] * 3]):
            name = f"page-{number}"
            if name in ledger.entries.posted:
                continue
            ledger.charge({f"{name}/a": event})
            drawn.write(f"{name}\n")
            drawn.flush()
            ledger.record_posted(page(name))
        ledger.finish()


def killed_after(calls: int, people: PopulationLedger, folder: Path) -> bool:
    """Do the work in a child that is killed at a call of the kernel's, or of SQLite's; return whether it was."""
    child = os.fork()
    if not child:
        left = calls

        def count(frame: Any, event: str, called: Any) -> None:
            nonlocal left
            if event in ("call", "c_call") and "/privrep/privacy/" in frame.f_code.co_filename:
                left -= 1
                if not left:
                    os.kill(os.getpid(), signal.SIGKILL)

        sys.setprofile(count)
        work(people, folder)
        os._exit(0)
    return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == -signal.SIGKILL


def test_whenever_it_is_killed_nothing_is_drawn_that_is_not_counted(tmp_path: Path) -> None:
    """Kills at 12 calls, spread over the whole run; each run then goes on to its end, killed twice more."""
    rng, kills = np.random.default_rng(1), 0
    for trial, first in enumerate(np.geomspace(30, 6_000, 12).astype(int)):
        folder = tmp_path / str(trial)
        folder.mkdir()
        people = PopulationLedger.create(folder / "people.db", epsilon=2)
        for calls in (int(first), *(int(n) for n in rng.integers(50, 4_000, 2))):
            if not killed_after(calls, people, folder):
                break
            kills += 1
            entries = read_ledger(folder / "ledger.jsonl").entries if (folder / "ledger.jsonl").exists() else None
            names = (folder / "drawn").read_text().split() if (folder / "drawn").exists() else []
            assert entries is not None or not names
            if entries is None:
                continue
            assert set(names) <= {name.partition("/")[0] for name in entries.charges}
            found = people.read()
            if names:
                (share,) = found.shares.values()
                assert share.status in ("open", "finished")
                mine = list(entries.charges.values())
                assert compute_epsilon(mine, 1e-6) <= compute_epsilon(share.events, 1e-6) * (1 + 1e-9)
        work(people, folder)
        (share,) = people.read().shares.values()
        assert share.status == "finished"
        assert share.events == tuple(read_ledger(folder / "ledger.jsonl").entries.charges.values())
    assert kills > 15


# Any order of everything


class Model(RuleBasedStateMachine):
    """A ledger and a simple model of it: a dictionary of what is counted for each run."""

    runs = Bundle("runs")

    def __init__(self) -> None:
        super().__init__()
        import tempfile

        self.folder = tempfile.TemporaryDirectory()
        self.people = PopulationLedger.create(Path(self.folder.name) / "p.db", epsilon=2)
        self.counted: dict[str, tuple[Event, ...]] = {}
        self.status: dict[str, str] = {}
        self.budgets: dict[str, Budget] = {}
        self.marks: dict[str, str] = {}
        self.number = 0

    def teardown(self) -> None:
        self.folder.cleanup()

    def fits(self, run: str, events: tuple[Event, ...]) -> bool:
        others = [event for name, each in self.counted.items() if name != run for event in each]
        return within_budget([*others, *events], 2.0, 1e-6)

    @rule(target=runs, epsilon=st.floats(0.05, 1.5))
    def reserve(self, epsilon: float) -> str:
        self.number += 1
        run, budget = f"run {self.number}", Budget(epsilon, 1e-6)
        events = bound_events((), budget)
        try:
            self.marks[run], _ = self.people.reserve(run, budget, "a run")
        except BudgetExceeded:
            assert not self.fits(run, events)
            self.status[run] = "refused"
            return run
        assert self.fits(run, events)
        self.counted[run], self.status[run], self.budgets[run] = events, "open", budget
        return run

    @rule(run=runs, again=st.booleans())
    def resume(self, run: str, again: bool) -> None:
        place = Place(self.marks.get(run, "") if again else "of a copy", 0)
        if self.status[run] == "refused":
            return
        if self.status[run] == "given up" or (self.status[run] == "open" and not again):
            with pytest.raises(ResumeError):
                self.people.reserve(run, self.budgets[run], "a run", place=place)
            return
        events = bound_events((), self.budgets[run])
        if self.status[run] == "returned" and not self.fits(run, events):
            with pytest.raises(BudgetExceeded):
                self.people.reserve(run, self.budgets[run], "a run", place=place)
            return
        mark, _ = self.people.reserve(run, self.budgets[run], "a run", place=place)
        assert bool(mark) == (self.status[run] != "finished")
        if self.status[run] == "returned":
            self.counted[run], self.status[run] = events, "open"
        if mark:
            self.marks[run] = mark

    @rule(run=runs, epsilon=st.floats(0.01, 0.5), share=st.floats(0.1, 1.0))
    def cover(self, run: str, epsilon: float, share: float) -> None:
        if self.status[run] == "refused":
            return
        events = (Pure(epsilon), price(share, self.budgets[run]))
        place = Place(self.marks[run], 0)
        if self.status[run] != "open":
            with pytest.raises(ResumeError):
                self.people.cover(run, events, place)
        elif self.fits(run, events):
            self.people.cover(run, events, place)
            self.counted[run] = events
        else:
            with pytest.raises(BudgetExceeded):
                self.people.cover(run, events, place)

    @rule(run=runs, share=st.floats(0.0, 1.0))
    def finish(self, run: str, share: float) -> None:
        if self.status[run] == "refused":
            return
        charges = (price(share, self.budgets[run]),) if share > 0.01 else ()
        if self.status[run] != "open":
            if not (self.status[run] in ("finished", "returned") and self.counted[run] == charges):
                with pytest.raises(InputError, match="not open"):
                    self.people.finish(run, charges, Place(self.marks[run], 0))
            else:
                self.people.finish(run, charges, Place(self.marks[run], 0))
            return
        self.people.finish(run, charges, Place(self.marks[run], 0))
        self.counted[run], self.status[run] = charges, "finished" if charges else "returned"

    @rule(run=runs)
    def give_up(self, run: str) -> None:
        if self.status[run] == "open":
            self.people.give_up(run)
            self.status[run] = "given up"
        else:
            with pytest.raises(InputError, match=r"there is no run|not open"):
                self.people.give_up(run)

    @rule(run=runs, lines=st.integers(0, 9))
    def advance(self, run: str, lines: int) -> None:
        mark = self.marks.get(run, "")
        if self.status[run] == "open":
            with pytest.raises(ResumeError):
                self.people.advance(run, Place("of a copy", lines))
        elif self.status[run] != "refused":
            with pytest.raises(ResumeError):
                self.people.advance(run, Place(mark, lines))

    @invariant()
    def agrees(self) -> None:
        found = self.people.read()
        known = {run: status for run, status in self.status.items() if status != "refused"}
        assert {run: share.status for run, share in found.shares.items()} == known
        assert found.epsilon == compute_epsilon([event for each in self.counted.values() for event in each], 1e-6)
        assert found.epsilon <= 2.0 * (1 + 1e-9)


TestModel = Model.TestCase
TestModel.settings = settings(max_examples=10, stateful_step_count=20)
