"""One budget for a population: its file, the runs that draw from it, and whose they are."""

from __future__ import annotations

import sqlite3
import stat
from contextlib import closing
from pathlib import Path

import numpy as np
import pytest
from populations import ONE, WHOLE, opened, price, status

from privrep.errors import BudgetExceeded, InputError, OtherPeople, PrivrepError, ResumeError
from privrep.privacy.accounting import compute_epsilon, within_budget
from privrep.privacy.events import Event, Pure, Selection
from privrep.privacy.ledger import Budget, Ledger
from privrep.privacy.people import Sketch
from privrep.privacy.population import Account, PopulationLedger
from privrep.privacy.shares import bound_events

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
