"""`privrep population`, and every command that draws from a population's ledger."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from test_cli import make_rows, write

from commands import Capture, refused, run
from configs import FEDERATED_TABLE, merged, write_config
from privrep import PopulationLedger
from privrep.errors import OtherPeople
from privrep.models.folder import ModelFolder
from privrep.privacy.accounting import compute_epsilon
from privrep.privacy.events import Relation
from privrep.privacy.ledger import Budget, Ledger, read_ledger
from privrep.privacy.population import Account
from privrep.privacy.shares import Accounts, Share

FIT = ["--user", "user", "--target", "y", "--rank", "2", "--delta", "1e-6"]


def make_people(path: Path, epsilon: float = 5.0) -> PopulationLedger:
    return PopulationLedger.create(path, epsilon=epsilon, delta=1e-6)


def shares(people: PopulationLedger) -> list[Share]:
    return list(people.read().shares.values())


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    write(tmp_path / "users.csv", make_rows(200))
    return tmp_path


# The command


def test_a_ledger_is_made_shown_and_kept_to(folder: Path, capsys: Capture) -> None:
    file = folder / "people.db"
    code, out, _ = run(capsys, "population", "create", file, "--epsilon", "2", "--delta", "1e-6")
    assert code == 0
    assert f"Population ledger: {file}, readable by you alone; epsilon 2 at delta 1e-06 for all runs" in out
    assert "exists already" in refused(capsys, "population", "create", file, "--epsilon", "2", "--delta", "1e-6")
    fit = ["fit", folder / "users.csv", *FIT, "--population", file, "--out"]
    assert run(capsys, *fit, folder / "a", "--epsilon", "1")[0] == 0
    assert run(capsys, *fit, folder / "b", "--epsilon", "1")[0] == 0
    code, out, _ = run(capsys, "population", "show", file)
    assert code == 0
    found = PopulationLedger(file).read()
    for words in (
        f"Spent and reserved: epsilon {found.epsilon:.4g}, by exact composition",
        f"Left: one more run may take epsilon {found.epsilon_left:.4g}",
        f"One more fit at epsilon 1 would bring it to {found.forecast(1.0):.4g}",
        *found.shares,
    ):
        assert words in out
    assert "give-up" not in out
    code, out, _ = run(capsys, "population", "show", file, "--json")
    told = json.loads(out)
    assert (code, told["population"], told["epsilon"]) == (0, found.name, found.epsilon)
    assert told["budget"] == {"epsilon": 2.0, "delta": 1e-6, "relation": "replace-one-user"}
    assert told["epsilon_left"] == found.epsilon_left
    assert told["after_one_more"] == {"epsilon": 1.0, "total": found.forecast(1.0)}
    for name, share, each in zip("ab", found.shares.values(), told["runs"], strict=True):
        events = list(read_ledger(folder / name / "ledger.jsonl").entries.charges.values())
        assert each == {
            "run": share.run,
            "what": f"fit into {(folder / name).absolute()}",
            "when": share.when,
            "status": "finished",
            "users": 200,
            "reserved": {"epsilon": 1.0, "delta": 1e-6},
            "spent": compute_epsilon(events, 1e-6),
            "returned": 1.0 - compute_epsilon(events, 1e-6),
        }
    assert file.stat().st_mode & 0o777 == 0o600


@pytest.mark.parametrize("relation", ["replace-one-user", "add-or-remove-one-user"])
def test_how_many_users_there_are_is_shown_where_it_is_public(
    relation: Relation, folder: Path, capsys: Capture
) -> None:
    file, budget = folder / "people.db", Budget(1.0, 1e-6, relation)
    people = PopulationLedger.create(file, epsilon=2.0, delta=1e-6, relation=relation)
    Ledger(budget, account=Account(people, "a fit", lambda: np.arange(4_321))).close()
    (told,) = json.loads(run(capsys, "population", "show", file, "--json")[1])["runs"]
    public = relation == "replace-one-user"
    assert told["users"] == (4_321 if public else None)
    assert ("4,321 users" in run(capsys, "population", "show", file)[1]) == public
    assert (b'"users": 4321' in file.read_bytes()) == public


def test_a_ledger_that_is_over_its_budget_says_so(
    folder: Path, capsys: Capture, monkeypatch: pytest.MonkeyPatch
) -> None:
    people = make_people(folder / "people.db", 1.0)
    people.reserve("first", Budget(1.0, 1e-6), "all of the budget")
    code, out, _ = run(capsys, "population", "show", people.path)
    assert (code, "OVER" in out) == (0, False)
    with monkeypatch.context() as patch:  # no version of privrep reserves it
        patch.setattr(Accounts, "check_fits", lambda accounts, run, events: None)
        people.reserve("second", Budget(1.0, 1e-6), "as much again")
    code, out, _ = run(capsys, "population", "show", people.path)
    assert (code, people.read().epsilon > 1.4) == (0, True)
    assert "by exact composition over all events of all runs: OVER THE BUDGET" in " ".join(out.split())
    assert "Left: one more run may take epsilon 0\n" in out


@pytest.mark.parametrize("command", ["show", "give-up", "settle"])
def test_what_is_no_ledger_is_refused(command: str, folder: Path, capsys: Capture) -> None:
    more = {"give-up": ["run"], "settle": [folder]}.get(command, [])
    assert "there is no such file" in refused(capsys, "population", command, folder / "none.db", *more)
    (folder / "wrong.db").write_text("user,y\n")
    assert "is no population ledger" in refused(capsys, "population", command, folder / "wrong.db", *more)


def test_a_run_that_will_not_go_on_is_given_up(folder: Path, capsys: Capture) -> None:
    people = make_people(folder / "people.db")
    people.reserve("somebody", Budget(1.0, 1e-6), "a run that was killed")
    out = run(capsys, "population", "show", people.path)[1]
    assert "An open run holds all that it reserved" in out
    assert f"privrep population give-up {people.path} RUN" in " ".join(out.split())
    assert "there is no run 'nobody'" in refused(capsys, "population", "give-up", people.path, "nobody")
    code, out, _ = run(capsys, "population", "give-up", people.path, "somebody", "--json")
    assert code == 0
    (told,) = json.loads(out)["runs"]
    assert (told["status"], told["spent"], told["returned"]) == ("given up", 1.0, 0.0)
    assert people.read().epsilon == pytest.approx(1.0, rel=1e-6)
    assert "is given up, not open" in refused(capsys, "population", "give-up", people.path, "somebody")


def test_a_finished_model_is_settled(folder: Path, capsys: Capture, monkeypatch: pytest.MonkeyPatch) -> None:
    """A node's model, say, whose process died before it returned what was left."""
    people = make_people(folder / "people.db")
    with monkeypatch.context() as patch:
        patch.setattr(Ledger, "finish", lambda ledger: None)
        options = [*FIT, "--epsilon", "1", "--population", people.path, "--out", folder / "model"]
        assert run(capsys, "fit", folder / "users.csv", *options)[0] == 0
    assert [share.status for share in shares(people)] == ["open"]
    assert "holds no finished model" in refused(capsys, "population", "settle", people.path, folder)
    other = make_people(folder / "other.db")
    assert "does not draw from" in refused(capsys, "population", "settle", other.path, folder / "model")
    code, out, _ = run(capsys, "population", "settle", people.path, folder / "model")
    (share,) = shares(people)
    assert (code, share.status) == (0, "finished")
    assert f"Run {share.run} is finished. Left: epsilon {people.read().epsilon_left:.4g}" in out
    ledger = folder / "model" / "ledger.jsonl"
    ledger.write_bytes(b"".join(ledger.read_bytes().splitlines(keepends=True)[:-3]))
    assert "its books are not in order" in refused(capsys, "population", "settle", people.path, folder / "model")


def test_a_ledger_of_choices(folder: Path, capsys: Capture) -> None:
    file = folder / "pure.db"
    assert run(capsys, "population", "create", file, "--epsilon", "2", "--delta", "0")[0] == 0
    code, out, _ = run(capsys, "population", "show", file)
    assert code == 0
    assert "One more fit" not in out
    assert json.loads(run(capsys, "population", "show", file, "--json")[1])["after_one_more"] is None
    options = [*FIT, "--epsilon", "1", "--population", file, "--out", folder / "model"]
    assert "no room for this run" in refused(capsys, "fit", folder / "users.csv", *options)


# Commands that fit


@dataclass(frozen=True)
class Command:
    """A command that fits: how its files are made, and what is typed, given the ledger and the folder to write to."""

    prepare: Callable[[Path], Any]
    typed: Callable[[Path, Path, Path], list[object]]
    users: int | None


def prepare_table(folder: Path) -> None:
    write(folder / "users.csv", make_rows(200))


def prepare_images(folder: Path) -> None:
    pytest.importorskip("torch")
    from test_fit_neural import WHOLE, write_idx

    write_idx(folder)
    changed = merged(WHOLE, {"privacy": {"epsilon": 3.0, "delta": 1e-6}})
    del changed["privacy"]["seed"]
    write_config(folder / "c.toml", changed)


def prepare_pairs(folder: Path) -> None:
    pytest.importorskip("torch")
    from test_fit_clip import WHOLE, write_pairs

    write_pairs(folder)
    changed = merged(WHOLE, {"privacy": {"epsilon": 3.0, "delta": 1e-6}})
    del changed["privacy"]["seed"]
    write_config(folder / "c.toml", changed)


def prepare_toml(folder: Path) -> None:
    prepare_table(folder)
    write_config(
        folder / "c.toml",
        {
            "data": {"table": "users.csv"},
            "columns": {"user": "user", "target": "y"},
            "privacy": {"epsilon": 3.0, "delta": 1e-6, "population": "people.db"},
            "model": {"rank": 2},
        },
    )


def prepare_federation(folder: Path) -> None:
    pytest.importorskip("flwr")
    rows = make_rows(200)
    rows = {"user": rows["user"], "y": rows["y"], **{f"x{j}": rows[f"x{j}"] for j in range(6)}}
    write(folder / "rows.parquet", rows)
    (folder / "c.toml").write_text(FEDERATED_TABLE.replace("epsilon = 4", "epsilon = 3"))


FITS = {
    "fit": Command(
        prepare_table,
        lambda folder, people, out: [
            *("fit", folder / "users.csv", *FIT, "--epsilon", "3", "--population", people, "--out", out)
        ],
        200,
    ),
    "fit of a file": Command(prepare_toml, lambda folder, people, out: ["fit", folder / "c.toml", "--out", out], 200),
    "fit-neural": Command(
        prepare_images,
        lambda folder, people, out: ["fit-neural", folder / "c.toml", "--population", people, "--out", out],
        30,
    ),
    "fit-clip": Command(
        prepare_pairs,
        lambda folder, people, out: ["fit-clip", folder / "c.toml", "--population", people, "--out", out],
        300,
    ),
    "federate simulate": Command(
        prepare_federation,
        lambda folder, people, out: [
            *("federate", "simulate", folder / "c.toml", "--data", folder / "rows.parquet"),
            *("--population", people, "--out", out),
        ],
        None,
    ),
}


@pytest.mark.parametrize("name", FITS)
def test_every_command_draws_from_a_population(
    name: str, tmp_path: Path, capsys: Capture, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A fit that is stopped holds what it reserved, goes on with it, and finishes; another one then does not fit."""
    command, people = FITS[name], make_people(tmp_path / "people.db", 4.0)
    command.prepare(tmp_path)
    typed = command.typed(tmp_path, people.path, tmp_path / "model")
    record = Ledger.record_posted

    def stop(ledger: Ledger, *given: Any) -> None:
        record(ledger, *given)
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(Ledger, "record_posted", stop)
        assert run(capsys, *typed)[0] == 130
    assert [share.status for share in shares(people)] == ["open"]
    code, _, err = run(capsys, *typed)
    assert code == 0, err
    (share,) = shares(people)
    assert (share.status, share.users) == ("finished", command.users)
    entries = read_ledger(tmp_path / "model" / "ledger.jsonl").entries
    assert entries.drawn_from == (people.name, share.run)
    assert share.events == tuple(entries.charges.values())
    told = json.loads(run(capsys, "inspect", tmp_path / "model", "--json")[1])
    assert told["population"] == {"ledger": people.name, "run": share.run}
    assert people.name in run(capsys, "verify", tmp_path / "model")[1]

    people.reserve("another", Budget(people.read().epsilon_left, 1e-6), "takes the rest")
    for read in ("images.gz", "train.npz", "rows.parquet"):  # whoever reads them says something else
        if (tmp_path / read).exists():
            (tmp_path / read).write_bytes(b"no rows")
    code, _, err = run(capsys, *command.typed(tmp_path, people.path, tmp_path / "other"))
    assert (code, "no room for this run" in err) == (2, True), err
    assert not (tmp_path / "other").exists()
    if name != "federate simulate":  # which has no --check
        code, _, err = run(capsys, *command.typed(tmp_path, people.path, tmp_path / "other"), "--check")
        assert (code, "no room for this run" in err) == (2, True), err


def test_a_fit_over_what_is_left_reads_no_row(folder: Path, capsys: Capture, monkeypatch: pytest.MonkeyPatch) -> None:
    people = make_people(folder / "people.db", 1.0)
    monkeypatch.setattr("privrep.users.streaming.StreamingUsers.open", None)
    monkeypatch.setattr("privrep.cli.accounts.list_users", None)
    before = people.path.read_bytes()
    options = [*FIT, "--epsilon", "1.5", "--population", people.path, "--out", folder / "model"]
    assert "which one more run may take 1 at that delta" in refused(capsys, "fit", folder / "users.csv", *options)
    assert people.path.read_bytes() == before
    assert not (folder / "model").exists()


def test_a_model_is_not_replaced_by_a_fit_that_does_not_fit(folder: Path, capsys: Capture) -> None:
    people = make_people(folder / "people.db", 1.5)
    fit = ["fit", folder / "users.csv", *FIT, "--population", people.path, "--out", folder / "model"]
    assert run(capsys, *fit, "--epsilon", "1")[0] == 0
    before = (folder / "model" / "ledger.jsonl").read_bytes()
    assert "no room for this run" in refused(capsys, *fit, "--epsilon", "1.4", "--overwrite")
    assert (folder / "model" / "ledger.jsonl").read_bytes() == before
    assert ModelFolder(folder / "model").finished
    code, _, err = run(capsys, *fit, "--epsilon", "0.5", "--overwrite")
    assert code == 0, err
    assert [share.status for share in shares(people)] == ["finished", "finished"]


def test_simulations_and_other_relations_are_refused(folder: Path, capsys: Capture) -> None:
    people = make_people(folder / "people.db")
    fit = ["fit", folder / "users.csv", *FIT, "--epsilon", "1", "--population", people.path, "--out", folder / "model"]
    assert "a simulation is not private" in refused(capsys, *fit, "--simulate", "0")
    assert "use that relation" in refused(capsys, *fit, "--relation", "add-or-remove-one-user")
    assert "there is no such file" in refused(capsys, *fit, "--population", folder / "none.db")
    assert (shares(people), (folder / "model").exists()) == ([], False)


def test_other_people_are_remarked_on(folder: Path, capsys: Capture) -> None:
    people = make_people(folder / "people.db")
    write(folder / "others.csv", make_rows(200, first=5_000))
    options = [*FIT, "--epsilon", "1", "--population", people.path]
    assert run(capsys, "fit", folder / "users.csv", *options, "--out", folder / "a")[0] == 0
    with pytest.warns(OtherPeople, match="about 0% of these users"):
        run(capsys, "fit", folder / "others.csv", *options, "--out", folder / "b")


# Nodes


@pytest.mark.parametrize("noise_nodes", [1, 2], ids=["noise of the server", "noise of the nodes"])
def test_nodes_reserve_before_they_answer_and_settle_with_the_model(noise_nodes: int, tmp_path: Path) -> None:
    pytest.importorskip("flwr")
    from dataclasses import replace

    from federation import NODES, TASK, federation, made_up, write_files

    task = replace(TASK, config=replace(TASK.config, epsilon=3.0, delta=1e-6, seed=None))
    _, files = write_files(tmp_path / "files", made_up())
    ledgers = {name: make_people(tmp_path / f"{name}.db", 6.0) for name in NODES}
    with federation(task, files, tmp_path / "nodes", noise_nodes=noise_nodes) as fed:
        for name, host in fed.hosts.items():
            host.population = ledgers[name]
        fed.run(tmp_path / "run")
    told = read_ledger(tmp_path / "run" / "ledger.jsonl").entries.charges
    for name, people in ledgers.items():
        (share,) = shares(people)
        assert (share.status, share.users) == ("finished", NODES[name])
        assert share.what.startswith("federated run ")
        if noise_nodes == 1:
            assert share.events == tuple(told.values())
        else:
            assert share.budget.epsilon > 3.0  # half of the noise is a node's own
            assert share.events == tuple(read_ledger(next((tmp_path / "nodes" / name).glob("noise/*/ledger.jsonl")))
                                         .entries.charges.values())  # fmt: skip


def test_a_node_without_room_takes_no_part(tmp_path: Path) -> None:
    pytest.importorskip("flwr")
    from dataclasses import replace

    from federation import NODES, QUICK, TASK, federation, made_up, write_files

    task = replace(TASK, config=replace(TASK.config, epsilon=3.0, delta=1e-6, seed=None))
    _, files = write_files(tmp_path / "files", made_up())
    people, said = make_people(tmp_path / "a.db", 2.0), list[str]()
    with federation(task, files, tmp_path / "nodes", **QUICK, min_nodes=2) as fed:
        fed.hosts["a"].population, fed.hosts["a"].say = people, said.append
        fed.run(tmp_path / "run")
    assert any("no room for this run" in words for words in said)
    assert shares(people) == []
    assert not (tmp_path / "nodes" / "a" / "model").exists()
    assert len(NODES) == 3
