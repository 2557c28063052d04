"""One budget for a population: transitions, refusals, damage, races and kills."""

from __future__ import annotations

import copy
import os
import shutil
import signal
import sqlite3
import stat
import sys
from collections.abc import Callable
from contextlib import closing
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import racing
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import Bundle, RuleBasedStateMachine, invariant, rule

from privrep.errors import BudgetExceeded, InputError, OtherPeople, PrivrepError, ResumeError
from privrep.privacy.account import Place
from privrep.privacy.accounting import compute_epsilon, within_budget
from privrep.privacy.billboard import Post
from privrep.privacy.events import Event, Gaussian, Pure, Selection
from privrep.privacy.ledger import Budget, Ledger, noise_multiplier, read_ledger
from privrep.privacy.people import Sketch
from privrep.privacy.population import Account, PopulationLedger
from privrep.privacy.shares import bound_events

WHOLE, ONE = Budget(2.0, 1e-6), Budget(1.0, 1e-6)
START = Place("", 0)


def price(share: float, budget: Budget = ONE) -> Gaussian:
    return Gaussian(noise_multiplier(share * budget.mu**2))


@pytest.fixture
def people(tmp_path: Path) -> PopulationLedger:
    return PopulationLedger.create(tmp_path / "people.db", epsilon=WHOLE.epsilon, delta=WHOLE.delta)


def status(people: PopulationLedger) -> list[str]:
    return [share.status for share in people.read().shares.values()]


def opened(people: PopulationLedger, path: Path | None = None, budget: Budget = ONE, **more: Any) -> Ledger:
    return Ledger(budget, path=path, account=Account(people, **more))


def page(name: str) -> Post:
    return Post(name, {"a": np.zeros(1)}, {"releases": {}})


# The file


def test_a_new_file_has_its_budget_and_is_for_its_owner(tmp_path: Path) -> None:
    made = PopulationLedger.create(tmp_path / "a b#?%.db", epsilon=3, delta=1e-7, relation="add-or-remove-one-user")
    assert made.budget == Budget(3.0, 1e-7, "add-or-remove-one-user")
    assert stat.S_IMODE(made.path.stat().st_mode) == 0o600
    assert PopulationLedger(str(made.path)).name == made.name
    found = made.read()
    assert (found.epsilon, found.epsilon_left, dict(found.shares)) == (0.0, pytest.approx(3.0, rel=1e-6), {})
    with pytest.raises(InputError, match="exists already"):
        PopulationLedger.create(made.path, epsilon=1)
    assert [path.name for path in tmp_path.iterdir()] == ["a b#?%.db"]


def test_what_is_no_budget_makes_no_file(tmp_path: Path) -> None:
    for wrong in ({"epsilon": 0}, {"epsilon": 1, "delta": 0.5}, {"epsilon": 1, "relation": "swap"}):
        with pytest.raises(InputError):
            PopulationLedger.create(tmp_path / "p.db", **wrong)  # type: ignore[arg-type]
    with pytest.raises(InputError, match="cannot be made"):
        PopulationLedger.create(tmp_path / "nowhere" / "p.db", epsilon=1)
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("content", [b"", b"no database", b"SQLite format 3\0" + bytes(200)])
def test_what_is_no_ledger_is_refused(tmp_path: Path, content: bytes) -> None:
    path = tmp_path / "p.db"
    with pytest.raises(InputError, match=r"there is no such file\. Make one with privrep population create"):
        PopulationLedger(path)
    path.write_bytes(content)
    with pytest.raises(InputError, match=r"p\.db (is no population ledger|cannot be used as a population ledger)"):
        PopulationLedger(path)
    assert path.read_bytes() == content


def test_a_link_to_the_file_is_the_file(people: PopulationLedger, tmp_path: Path) -> None:
    (tmp_path / "elsewhere").mkdir()
    link = tmp_path / "elsewhere" / "link.db"
    link.symlink_to(people.path)
    opened(PopulationLedger(link))
    assert status(people) == ["open"]
    assert not list((tmp_path / "elsewhere").glob("*journal*"))


def test_a_file_that_cannot_be_written_reserves_nothing(people: PopulationLedger) -> None:
    before = people.path.read_bytes()
    with closing(sqlite3.connect(people.path, isolation_level=None)) as other:
        other.execute("BEGIN EXCLUSIVE")
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr("privrep.privacy.population_file.WAIT", 0.01)
            with pytest.raises(InputError, match="is in use by another process"):
                people.reserve("a", ONE, "a run")
        other.execute("ROLLBACK")
    assert people.path.read_bytes() == before


# A run of one ledger


def test_a_run_reserves_before_it_draws_and_returns_what_is_left(people: PopulationLedger) -> None:
    ledger = opened(people, what="a fit", ids=lambda: np.arange(30))
    (share,) = people.read().shares.values()
    assert (share.status, share.what, share.users, share.budget) == ("open", "a fit", 30, ONE)
    assert people.read().epsilon == pytest.approx(1.0, rel=1e-6)
    ledger.charge({"page/a": price(0.25)})
    assert people.read().epsilon == pytest.approx(1.0, rel=1e-6)
    ledger.finish()
    assert status(people) == ["finished"]
    assert people.read().epsilon == pytest.approx(compute_epsilon([price(0.25)], 1e-6))
    with pytest.raises(InputError, match="this ledger is closed"):
        ledger.charge({"page/b": price(0.25)})


def test_a_run_that_charged_nothing_returns_all_and_may_be_opened_again(
    people: PopulationLedger, tmp_path: Path
) -> None:
    path = tmp_path / "ledger.jsonl"
    ledger = opened(people, path)
    ledger.finish()
    ledger.close()
    assert (status(people), people.read().epsilon) == (["returned"], 0.0)
    with closing(opened(people, path)) as ledger:
        assert status(people) == ["open"]
        ledger.charge({"page/a": price(0.5)})
        ledger.finish()
    assert status(people) == ["finished"]


def test_a_budget_that_does_not_fit_is_refused_before_any_charge(people: PopulationLedger) -> None:
    runs = [opened(people), opened(people)]
    with pytest.raises(BudgetExceeded, match="2 open runs hold a part of it"):
        opened(people, budget=WHOLE)
    people.check_room(Budget(people.read().epsilon_left, 1e-6))
    for ledger in runs:
        ledger.charge({"page/a": price(1.0)})
        ledger.finish()
    assert people.read().epsilon < WHOLE.epsilon
    assert status(people) == ["finished", "finished"]


def test_the_same_relation_goes_for_all_runs(people: PopulationLedger) -> None:
    other = Budget(1.0, 1e-6, "add-or-remove-one-user")
    for refused in (lambda: opened(people, budget=other), lambda: people.check_room(other)):
        with pytest.raises(InputError, match=r"is for replace-one-user; use that relation"):
            refused()
    assert status(people) == []


def test_a_simulation_draws_nothing_from_people(people: PopulationLedger) -> None:
    with pytest.raises(InputError, match="a simulation is not private, so it draws nothing from a population ledger"):
        Ledger(ONE, seeded=True, account=Account(people))
    assert status(people) == []


def test_a_killed_run_goes_on_with_what_it_has(people: PopulationLedger, tmp_path: Path) -> None:
    path = tmp_path / "ledger.jsonl"
    with closing(opened(people, path)) as ledger:
        ledger.charge({"page/a": price(0.5)})
    assert status(people) == ["open"]
    people.reserve("another", Budget(people.read().epsilon_left, 1e-6), "takes all that is left")
    with closing(opened(people, path)) as ledger:
        ledger.charge({"page/a": price(0.5), "more/b": price(0.5)})
        ledger.finish()
    assert status(people) == ["finished", "open"]


def test_a_run_that_died_between_its_name_and_the_reservation_goes_on(people: PopulationLedger, tmp_path: Path) -> None:
    path = tmp_path / "ledger.jsonl"
    with closing(Ledger(ONE, path=path)) as ledger:
        ledger._write([{"population": people.name, "run": "cafe"}])
    with closing(opened(people, path)) as ledger:
        ledger.charge({"page/a": price(0.5)})
    assert list(people.read().shares) == ["cafe"]


def test_a_ledger_that_was_deleted_is_another_run(people: PopulationLedger, tmp_path: Path) -> None:
    path = tmp_path / "ledger.jsonl"
    with closing(opened(people, path)) as ledger:
        ledger.charge({"page/a": price(0.5)})
    path.unlink()
    with closing(opened(people, path)) as ledger:
        ledger.charge({"page/a": price(0.5)})
    assert status(people) == ["open", "open"]
    assert people.read().epsilon == pytest.approx(compute_epsilon([price(1.0)] * 2, 1e-6), rel=1e-6)


def test_a_finished_run_charges_nothing_more(people: PopulationLedger, tmp_path: Path) -> None:
    """Not even what an open run of the same charges would be counted by."""
    for number, (budget, event) in enumerate([(ONE, price(0.5)), (Budget(0.5, 0), Pure(0.5))]):
        path = tmp_path / f"{number}.jsonl"
        with closing(opened(people, path, budget)) as ledger:
            ledger.charge({"page/a": event})
            ledger.finish()
        with closing(opened(people, path, budget)) as ledger:
            for name in ("page/a", "more/a"):
                with pytest.raises(PrivrepError, match=r"is finished in its population|over the budget"):
                    ledger.charge({name: event})
            ledger.finish()  # once more: nothing changes
        assert status(people)[number] == "finished"


def test_a_run_goes_on_with_its_own_population_alone(people: PopulationLedger, tmp_path: Path) -> None:
    path, other = tmp_path / "ledger.jsonl", PopulationLedger.create(tmp_path / "other.db", epsilon=2)
    opened(people, path).close()
    with pytest.raises(ResumeError, match=f"another population ledger, {people.name}"):
        opened(other, path)
    with pytest.raises(InputError, match=f"draws from the population ledger {people.name}: name its file"):
        Ledger(ONE, path=path)
    alone = tmp_path / "alone.jsonl"
    with closing(Ledger(ONE, path=alone)) as ledger:
        ledger.charge({"page/a": price(0.5)})
    with pytest.raises(ResumeError, match="begun without a population ledger"):
        opened(people, alone)
    assert status(other) == []


def test_another_budget_for_the_same_run_is_refused(people: PopulationLedger) -> None:
    people.reserve("a", ONE, "a run")
    with pytest.raises(ResumeError, match="reserved another budget"):
        people.reserve("a", Budget(0.5, 1e-6), "a run")


def test_a_run_whose_population_was_restored_from_an_older_copy_is_counted_again(
    people: PopulationLedger, tmp_path: Path
) -> None:
    """With all that its own ledger says, selections included, before it goes on."""
    path, older = tmp_path / "ledger.jsonl", people.path.read_bytes()
    with closing(opened(people, path)) as ledger:
        ledger.charge({"keys/keys": Selection(9.0, 4e-7)})
    people.path.write_bytes(older)
    opened(people, path).close()
    (share,) = people.read().shares.values()
    assert share.events == bound_events([Selection(9.0, 4e-7)], ONE)


def test_choices_and_selections_are_counted_before_they_are_made(people: PopulationLedger) -> None:
    ledger, charged = opened(people), list[Event]()
    for name, event in {"a/choice": Pure(0.1), "b/keys": Selection(20.0, 1e-7), "c/x": price(0.1)}.items():
        ledger.charge({name: event})
        charged.append(event)
        (share,) = people.read().shares.values()
        assert share.events == bound_events(charged[:2], ONE)  # a Gaussian one was counted from the start
        assert within_budget(share.events, ONE.epsilon, ONE.delta)


def test_a_choice_that_does_not_fit_beside_other_runs_is_refused_and_nothing_is_written(tmp_path: Path) -> None:
    """A choice and Gaussian noise are not comparable: what fits the run's budget may not fit beside others."""
    people = PopulationLedger.create(tmp_path / "p.db", epsilon=2, delta=1e-6)
    people.reserve("other", Budget(1.99, 1e-6), "takes most")
    left = people.read().epsilon_left
    ledger = opened(people, tmp_path / "ledger.jsonl", Budget(left, 1e-6))
    before = people.path.read_bytes(), (tmp_path / "ledger.jsonl").read_bytes()
    with pytest.raises(BudgetExceeded, match="no room for this run"):
        ledger.charge({"a/choice": Pure(left * 0.999)})
    assert before == (people.path.read_bytes(), (tmp_path / "ledger.jsonl").read_bytes())
    ledger.close()


# Over, or elsewhere


def test_a_run_that_was_given_up_is_counted_whole_and_stops(people: PopulationLedger, tmp_path: Path) -> None:
    path = tmp_path / "ledger.jsonl"
    ledger = opened(people, path)
    ledger.charge({"page/a": price(0.1)})
    (run,) = people.read().shares
    people.give_up(run)
    assert people.read().epsilon == pytest.approx(1.0, rel=1e-6)
    with pytest.raises(ResumeError, match="this run is given up: it can charge nothing more"):
        ledger.charge({"page/b": price(0.1)})
    with pytest.raises(InputError, match="this ledger is closed"):
        ledger.charge({"page/c": price(0.1)})
    ledger.close()
    with pytest.raises(ResumeError, match="was given up, so it cannot go on"):
        opened(people, path)
    with pytest.raises(InputError, match="is given up, not open"):
        people.give_up(run)
    with pytest.raises(InputError, match="there is no run 'nobody'"):
        people.give_up("nobody")


def charge_of(ledger: Ledger, *names: str) -> None:
    for name in names:
        ledger.charge({f"{name}/a": price(0.1)})
        ledger.record_posted(page(name))


def test_a_copy_that_was_left_behind_cannot_go_on(people: PopulationLedger, tmp_path: Path) -> None:
    """Its draws would be made a second time against one reservation."""
    path, left = tmp_path / "ledger.jsonl", tmp_path / "left.jsonl"
    ledger = opened(people, path)
    charge_of(ledger, "p", "q")
    shutil.copy(path, left)
    charge_of(ledger, "r")
    for _ in range(3):  # trying does not make it longer
        with pytest.raises(ResumeError, match="continued in another copy of its folder"):
            opened(people, left)
    ledger.close()
    with closing(opened(people, path)) as ledger:
        charge_of(ledger, "s")
        ledger.finish()
    assert status(people) == ["finished"]


def test_a_copy_made_while_a_page_is_drawn_cannot_draw_it_again(people: PopulationLedger, tmp_path: Path) -> None:
    path, left = tmp_path / "ledger.jsonl", tmp_path / "left.jsonl"
    ledger = opened(people, path)
    ledger.charge({"p/a": price(0.1)})
    shutil.copy(path, left)
    ledger.record_posted(page("p"))
    ledger.close()
    with pytest.raises(ResumeError, match="another copy"):
        opened(people, left)


def test_of_two_copies_the_first_that_is_opened_goes_on(people: PopulationLedger, tmp_path: Path) -> None:
    path, copied = tmp_path / "ledger.jsonl", tmp_path / "copied.jsonl"
    live = opened(people, path)
    charge_of(live, "p")
    shutil.copy(path, copied)
    other = opened(people, copied)
    with pytest.raises(ResumeError, match="another copy"):
        live.charge({"q/a": price(0.1)})
    live.close()
    with pytest.raises(ResumeError, match="another copy"):
        opened(people, path)
    charge_of(other, "q")
    other.close()


def test_what_a_copy_counts_changes_nothing(people: PopulationLedger, tmp_path: Path) -> None:
    path, copied = tmp_path / "ledger.jsonl", tmp_path / "copied.jsonl"
    live = opened(people, path)
    shutil.copy(path, copied)
    with closing(opened(people, copied)) as other:
        other.charge({"keys/keys": Selection(9.0, 4e-7)})
        counted = people.read()
        with pytest.raises(ResumeError, match="another copy"):
            live.charge({"a/choice": Pure(0.1)})
    assert people.read() == counted
    live.close()


def test_a_copy_in_memory_has_no_account_and_charges_nothing(people: PopulationLedger) -> None:
    ledger = opened(people)
    again = copy.deepcopy(ledger)
    with pytest.raises(InputError, match="this ledger is closed"):
        again.charge({"page/a": price(0.1)})
    again.finish()
    assert status(people) == ["open"]


def test_a_forked_child_charges_nothing(people: PopulationLedger) -> None:
    ledger = opened(people)
    child = os.fork()
    if not child:
        try:
            ledger.charge({"page/a": price(0.1)})
        except InputError:
            os._exit(7)
        os._exit(0)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 7
    assert status(people) == ["open"]


def test_a_ledger_that_is_settled_is_that_of_the_run(people: PopulationLedger, tmp_path: Path) -> None:
    path, left, alone = tmp_path / "ledger.jsonl", tmp_path / "left.jsonl", tmp_path / "alone.jsonl"
    with closing(opened(people, path)) as ledger:
        charge_of(ledger, "p")
        shutil.copy(path, left)
        charge_of(ledger, "q")
    with pytest.raises(ResumeError, match="another copy"):
        people.settle(read_ledger(left))
    Ledger(ONE, path=alone).close()
    with pytest.raises(InputError, match="does not draw from"):
        people.settle(read_ledger(alone))
    assert people.settle(read_ledger(path)) in people.read().shares
    assert people.read().epsilon == pytest.approx(compute_epsilon([price(0.1)] * 2, 1e-6))


def test_a_run_is_not_finished_with_more_than_it_reserved(people: PopulationLedger) -> None:
    people.reserve("a", ONE, "a run")
    with pytest.raises(InputError, match="charged more than it reserved"):
        people.finish("a", [price(1.1)], START)
    people.finish("a", [price(0.5)], START)
    with pytest.raises(InputError, match=r"is finished in .*, not open"):
        people.finish("a", [price(0.4)], START)
    with pytest.raises(ResumeError, match="this run is finished"):
        people.cover("a", [price(0.5)], START)


# Who they are


def test_other_people_are_remarked_on_and_the_same_are_not(people: PopulationLedger) -> None:
    small = Budget(0.1, 1e-6)
    for ids in (np.arange(100), np.arange(100).astype(str), np.arange(40), np.arange(5_000)):
        opened(people, budget=small, ids=lambda ids=ids: ids)
    with pytest.warns(OtherPeople, match=r"about 0% of these users were in earlier runs of .*people\.db"):
        opened(people, budget=small, ids=lambda: np.arange(10_000, 11_000))
    assert [share.users for share in people.read().shares.values()] == [100, 100, 40, 5_000, 1_000]


def test_the_file_holds_no_id(people: PopulationLedger) -> None:
    opened(people, ids=lambda: np.array(["somebody-by-name", "another-by-name"]))
    assert b"by-name" not in people.path.read_bytes()
    salted, plain = (Sketch.of_ids(["somebody-by-name"], salt).hashes[0] for salt in (people.salt, ""))
    assert salted != plain


# Damage


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
            if not (self.status[run] == "finished" and self.counted[run] == charges):
                with pytest.raises(InputError, match="not open"):
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
