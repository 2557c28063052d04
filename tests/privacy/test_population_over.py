"""Runs of a population that are over, or that go on elsewhere: nothing is drawn a second time."""

from __future__ import annotations

import copy
import os
import shutil
from contextlib import closing
from pathlib import Path

import pytest
from populations import ONE, START, charge_of, opened, page, price, status

from privrep.errors import InputError, ResumeError
from privrep.privacy.accounting import compute_epsilon
from privrep.privacy.events import Pure, Selection
from privrep.privacy.ledger import Ledger, read_ledger
from privrep.privacy.population import PopulationLedger


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
