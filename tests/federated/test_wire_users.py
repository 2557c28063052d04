"""Users on nodes: what is learned is what one place would learn, and nothing crosses the wire but what is written."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import fields, is_dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

pytest.importorskip("flwr")

from federation import (
    BUDGET,
    COLUMNS,
    FEATURES,
    LABELS,
    NODES,
    NUMBERS,
    ROWS,
    TASK,
    USERS,
    Federation,
    Passed,
    federation,
    made_up,
    write_files,
)
from privrep.data.table import find_users
from privrep.errors import InputError
from privrep.federated.task import TableTask, Task
from privrep.federated.wire.messages import REFUSALS, Question
from privrep.linear.registry import METHODS
from privrep.linear.steps import CELLS, FeatureSizes
from privrep.models import model as models
from privrep.models.description import Columns, Config
from privrep.models.inspection import inspect_folder
from privrep.privacy.accounting import gaussian_epsilon
from privrep.privacy.bounds import Bound
from privrep.privacy.ledger import Budget
from privrep.privacy.sampling import Fixed, Poisson
from privrep.users.memory import InMemoryUsers

TABLES = {
    **{name: TableTask(Config(1, method=name, **BUDGET), COLUMNS) for name in METHODS},
    "labels": TableTask(Config(1, loss="log", **BUDGET), LABELS),
}
SIZES = {"sizes": Bound(1.0, FEATURES * CELLS)}
QUESTION = {"run", "number", "step", "bounds", "group", "rate", "page", "mu_squared", "asked"}


@pytest.fixture(scope="module")
def files(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, list[Path]]:
    return write_files(tmp_path_factory.mktemp("files"), made_up())


def in_one_place(task: Task, path: Path, folder: Path) -> Path:
    told = task.with_users(USERS)
    with told.open(path) as users:
        told.learn(users, folder, lambda page: None)
    return folder


# The same as in one place, to the last bit: sums are exact


@pytest.mark.parametrize("name", TABLES)
def test_three_nodes_learn_what_one_place_learns(name: str, files: tuple[Path, list[Path]], tmp_path: Path) -> None:
    task = TABLES[name]
    one = models.load(in_one_place(task, files[0], tmp_path / "one"))
    with federation(task, files[1], tmp_path / "nodes") as fed:
        three = models.load(fed.run(tmp_path / "three"))
    assert np.array_equal(three.representation.matrix, one.representation.matrix)
    assert (tmp_path / "three" / "ledger.jsonl").read_bytes() == (tmp_path / "one" / "ledger.jsonl").read_bytes()
    kept = [models.load(tmp_path / "nodes" / node / "model").heads for node in NODES]
    assert [len(heads.ids) for heads in kept if heads is not None] == list(NODES.values())


# Users with levels and common slopes: every pass of the default is worth its while


PANEL_USERS = {"a": 100, "b": 60, "c": 40}
NOISE_FREE = {"epsilon": 200.0, "delta": 1e-5, "seed": 1}
SHELVES = ("red", "blue", "green")
PANELS = {
    "rank found": TableTask(Config(None, **NOISE_FREE), COLUMNS),
    "rank 2, users secret": TableTask(Config(2, relation="add-or-remove-one-user", **NOISE_FREE), COLUMNS),
    "level alone": TableTask(Config(None, **NOISE_FREE), Columns("user", ("level",), NUMBERS)),
    "no intercept": TableTask(Config(1, intercept=False, **NOISE_FREE), COLUMNS),
    "two targets": TableTask(Config(None, **NOISE_FREE), Columns("user", ("y", "z"), NUMBERS)),
    "sparse": TableTask(Config(1, **NOISE_FREE), Columns("user", ("y",), NUMBERS, ("shelf",), (SHELVES,))),
    "sparse, two targets": TableTask(
        Config(None, **NOISE_FREE), Columns("user", ("y", "z"), NUMBERS, ("shelf",), (SHELVES,))
    ),
    "altmin": TableTask(Config(2, method="priv-altmin", **NOISE_FREE), COLUMNS),
    "centaur": TableTask(Config(None, method="centaur", **NOISE_FREE), COLUMNS),
}


def make_panel(folder: Path, users: Mapping[str, int]) -> tuple[Path, list[Path]]:
    """Write files of users who differ in level and along one direction, with 2 to 9 rows each."""
    n, rng = sum(users.values()), np.random.default_rng(4)
    user = np.repeat(np.arange(n), 2 + np.arange(n) % 8)
    X = rng.normal(size=(len(user), FEATURES)) + 0.7 * rng.normal(size=(n, FEATURES))[user]
    level, noise = 30 + 2 * rng.normal(size=n)[user], 0.1 * rng.normal(size=(2, len(user)))
    y = level + X @ np.linspace(1, 2, FEATURES) + X[:, 0] * rng.normal(size=n)[user] + noise[0]
    made: dict[str, Any] = {"user": user, "y": y, "z": 5 * y + X[:, 1] + noise[1], "level": level + 10 * noise[0]}
    made |= {name: X[:, j] for j, name in enumerate(NUMBERS)} | {"shelf": np.array(SHELVES)[user % 3]}
    ends, paths = np.cumsum([0, *users.values()]), []
    for name, start, stop in zip(users, ends, ends[1:], strict=False):
        mine = (user >= start) & (user < stop)
        paths.append(folder / f"{name}.parquet")
        pq.write_table(pa.table({column: values[mine] for column, values in made.items()}), paths[-1])
    pq.write_table(pa.table(made), folder / "all.parquet")
    return folder / "all.parquet", paths


@pytest.fixture(scope="module")
def panel(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, list[Path]]:
    return make_panel(tmp_path_factory.mktemp("panel"), PANEL_USERS)


def public_numbers(value: Any) -> dict[str, Any]:
    """Every number of a representation, by the way to it."""
    if not is_dataclass(value):
        return {"": value} if value is not None and not isinstance(value, bool) else {}
    return {
        f"{each.name}.{name}": number
        for each in fields(value)
        for name, number in public_numbers(getattr(value, each.name)).items()
    }


def predictions(folder: Path, task: TableTask, path: Path) -> np.ndarray:
    model = models.load(folder)
    assert model.heads is not None
    with task.open(path) as users:
        assert isinstance(users, InMemoryUsers)
        table = users.table
    at = find_users(model.heads.ids, np.repeat(table.ids, table.sizes))
    found = model.heads.predict(model.representation, table.X, at)
    return np.concatenate([found, model.heads.deviations(model.representation, table.X, at)])


@pytest.mark.parametrize("name", PANELS)
def test_three_nodes_learn_the_prior_that_one_place_learns(
    name: str, panel: tuple[Path, list[Path]], tmp_path: Path
) -> None:
    task = PANELS[name]
    one = in_one_place(task, panel[0], tmp_path / "one")
    with task.open(panel[0]) as users:
        task.keep(one, users)
    with federation(task, panel[1], tmp_path / "nodes") as fed:
        three = models.load(fed.run(tmp_path / "three"))
    expected, found = (public_numbers(each.representation) for each in (models.load(one), three))
    assert three.representation.prior is not None
    assert found.keys() == expected.keys()
    for field, numbers in expected.items():
        assert np.array_equal(found[field], numbers), field
    wanted, start = predictions(one, task, panel[0]), 0
    assert (np.abs(wanted) < 1e4).all()
    half = len(wanted) // 2
    for node, path in zip(PANEL_USERS, panel[1], strict=True):
        got = predictions(tmp_path / "nodes" / node / "model", task, path)
        stop = start + len(got) // 2
        mine = np.concatenate([wanted[start:stop], wanted[half + start : half + stop]])
        assert np.array_equal(got, mine)
        start = stop
    assert start == half


@pytest.mark.parametrize("name", ["rank found", "level alone", "two targets", "sparse"])
def test_nodes_that_add_the_noise_learn_a_prior(name: str, tmp_path: Path) -> None:
    """Few users: nodes who trust no server ask their users one by one."""
    task, (_, files) = PANELS[name], make_panel(tmp_path, {"a": 30, "b": 20, "c": 10})
    with federation(task, files, tmp_path / "nodes", noise_nodes=2) as fed:
        model = models.load(fed.run(tmp_path / "run"))
    prior = model.representation.prior
    assert prior is not None
    assert len(prior.mean.slopes) == task.features
    for node, path in zip(PANEL_USERS, files, strict=True):
        got = predictions(tmp_path / "nodes" / node / "model", task, path)
        assert np.isfinite(got).all()
        assert (np.abs(got) < 1e4).all()


def neural_files(folder: Path) -> tuple[Path, list[Path]]:
    rng = np.random.default_rng(0)
    users = np.repeat(np.arange(USERS), ROWS)
    y = rng.integers(0, 2, len(users))
    X = (0.7 * rng.normal(size=(len(users), FEATURES)) + 2 * np.eye(2, FEATURES)[y]).astype(np.float32)
    ends, paths = np.cumsum([0, *NODES.values()]), []
    for name, start, stop in zip(NODES, ends, ends[1:], strict=False):
        mine = (users >= start) & (users < stop)
        paths.append(folder / f"{name}.npz")
        np.savez(paths[-1], X=X[mine], y=y[mine], users=users[mine])
    np.savez(folder / "all.npz", X=X, y=y, users=users)
    return folder / "all.npz", paths


def neural_task(**options: Any) -> Any:
    pytest.importorskip("torch").set_num_threads(1)
    from privrep.federated.neural_task import NeuralTask

    usual = {"classes": 2, "epsilon": 50.0, "delta": 1e-5, "rows": ROWS, "rounds": 1, "seed": 0, "width": FEATURES}
    return NeuralTask(**{**usual, **options})


def test_three_nodes_share_the_network_of_one_place_and_ask_the_sample_it_asks(tmp_path: Path) -> None:
    task = neural_task(share="linear")
    from privrep import Centaur

    path, paths = neural_files(tmp_path)
    one = Centaur.load(in_one_place(task, path, tmp_path / "one"))
    with federation(task, paths, tmp_path / "nodes") as fed:
        three = Centaur.load(fed.run(tmp_path / "three"))
        assert np.array_equal(three.learned_.weights, one.learned_.weights)
        asked = of_kind(fed, "down", "sums")[-1]  # of a round
        for host in fed.hosts.values():
            host.close()
    with federation(task, paths, tmp_path / "again") as fed, task.with_users(USERS).open(path) as everyone:
        users = fed.engine()
        question = Question.from_record(asked.content, users.facts.features, users.facts.targets)
        drawn = set()
        for key in (b"1", b"2", b"3", b"4"):
            sample = Poisson(0.5).sample(key)
            found = users.sums(question.step, question.bounds, sample)
            wanted = everyone.sums(question.step, question.bounds, sample)
            for name, total in wanted.items():
                assert np.array_equal(found[name].total, total.total)
                assert np.abs(total.exact_numbers).max() > 1e-3
            sums = of_kind(fed, "down", "sums")[-len(NODES) :]
            for passed in sums:  # a node learns who is in the sample of its own users, and of nobody else
                assert passed.fields["asked"] == NODES[passed.node]
                bits = np.unpackbits(passed.arrays["members"])
                start = sum(count for node, count in NODES.items() if node < passed.node)
                own = sample.members(USERS)[start : start + NODES[passed.node]]
                assert np.array_equal(bits[: len(own)], own)
                assert not bits[len(own) :].any()
                drawn.add((passed.node, bits.tobytes()))
        assert len(drawn) == 4 * len(NODES)


# The wire


def of_kind(fed: Federation, way: str, kind: str) -> list[Passed]:
    return [passed for passed in fed.wire.record if (passed.way, passed.kind) == (way, kind)]


def test_nothing_travels_but_what_is_written_down(files: tuple[Path, list[Path]], tmp_path: Path) -> None:
    with federation(TASK, files[1], tmp_path / "nodes") as fed:
        fed.run(tmp_path / "run")
        assert {(passed.way, passed.kind) for passed in fed.wire.record} == {
            (way, kind) for way in ("down", "up") for kind in ("hello", "sums", "model")
        }
        for passed in fed.wire.record:
            assert set(passed.content) == {"privrep"}
            assert set(passed.content["privrep"]) == {"version", "text", "arrays"}
        for passed in of_kind(fed, "down", "hello"):
            assert set(passed.fields) == {"run", "name", "task", "begin", "noise"}
            assert (passed.arrays, passed.fields["name"]) == ({}, passed.node)
        for passed in of_kind(fed, "up", "hello"):
            facts = {"users": NODES[passed.node], "features": FEATURES, "targets": 1, "sparse": False}
            assert passed.fields in (facts, {"ready": True})
            assert passed.arrays == {}
        for passed in of_kind(fed, "down", "sums"):
            assert set(passed.fields) == QUESTION
            assert all(array.startswith("step.") for array in passed.arrays)
        asked = {passed.fields["number"]: passed.fields["bounds"] for passed in of_kind(fed, "down", "sums")}
        for passed in of_kind(fed, "up", "sums"):
            bounds = asked[passed.fields["number"]]
            assert passed.fields == {"number": passed.fields["number"], "users": NODES[passed.node]}
            assert {key: array.shape for key, array in passed.arrays.items()} == {
                key: (bound["size"],) for key, bound in bounds.items()
            }
            vectors = sum(8 * bound["size"] for bound in bounds.values())
            assert vectors < len(passed.raw) < vectors + 1000
        assert len(of_kind(fed, "up", "sums")) == len(asked) * len(NODES)
        public = {path.relative_to(tmp_path / "run") for path in (tmp_path / "run").rglob("*") if path.is_file()}
        for passed in of_kind(fed, "down", "model"):
            assert set(passed.fields) == {"run", "task", "files"}
            assert {Path(name) for name in passed.fields["files"]} == public
        assert all(passed.fields == {"kept": True} and not passed.arrays for passed in of_kind(fed, "up", "model"))


def test_no_row_no_id_and_no_head_is_in_any_message(files: tuple[Path, list[Path]], tmp_path: Path) -> None:
    rows = made_up()
    with federation(TASK, files[1], tmp_path / "nodes") as fed:
        fed.run(tmp_path / "run")
        wire = b"\0\0\0\0".join(passed.raw for passed in fed.wire.record)
    heads = [models.load(tmp_path / "nodes" / node / "model").heads for node in NODES]
    secret = [rows[name] for name in ("y", "x0", "x1", "x2", "x3")]
    secret += [np.ravel(array) for each in heads if each is not None for array in (each.own, each.shared)]
    numbers = np.concatenate(secret)
    numbers = numbers[np.abs(numbers) > 1e-6]  # zeros are everywhere
    assert len(numbers) > 1000
    for number in numbers:
        assert np.float64(number).tobytes() not in wire
        assert np.float32(number).tobytes() not in wire
        assert repr(float(number)).encode() not in wire
    for user in np.unique(rows["user"]):
        assert np.int64(user).tobytes() not in wire
        assert str(user).encode() not in wire


def test_what_needs_all_rows_in_one_place_is_refused(files: tuple[Path, list[Path]], tmp_path: Path) -> None:
    with federation(TASK, files[1], tmp_path / "nodes") as fed:
        users = fed.engine()
        with pytest.raises(InputError, match="all rows in one place"):
            users.sums(FeatureSizes(True), SIZES, Fixed(4, USERS).sample(b"key"))
        with pytest.raises(InputError, match="all rows in one place"):
            users.sums(FeatureSizes(True), {"sizes": Bound(1.0, FEATURES * CELLS, terms_per_user=1)})
        assert FeatureSizes(True).spec.layout == "by_size"
        assert not of_kind(fed, "down", "sums")


def test_a_node_that_cannot_answer_says_one_of_a_few_words(tmp_path: Path) -> None:
    """Why is for its own log: a reason may quote its rows."""
    rows = made_up()
    rows["x1"] = np.array(["secret-4711"] * len(rows["user"]))
    _, paths = write_files(tmp_path / "files", rows)
    with federation(TASK, paths, tmp_path / "nodes", wait=0.3) as fed:
        with pytest.raises(InputError, match="0 nodes joined"):
            fed.run(tmp_path / "run")
        up = of_kind(fed, "up", "hello")
        assert {passed.fields["refused"] for passed in up} == {"no-data"}
        assert "no-data" in REFUSALS
        assert all(b"4711" not in passed.raw for passed in fed.wire.record)


@pytest.mark.parametrize("noise_nodes", [1, 2])
def test_inspect_says_who_added_the_noise(noise_nodes: int, files: tuple[Path, list[Path]], tmp_path: Path) -> None:
    with federation(TASK, files[1], tmp_path / "nodes", noise_nodes=noise_nodes) as fed:
        fed.run(tmp_path / "run")
    for folder in (tmp_path / "run", tmp_path / "nodes" / "a" / "model"):
        said = " ".join(inspect_folder(folder).words["Against whom"])
        assert "reads the users' rows" not in said
        if noise_nodes == 1:
            assert "Not against the server, which sees exact sums" in said
        else:
            view = gaussian_epsilon(TASK.delta, Budget(TASK.epsilon, TASK.delta).mu * 2**0.5)
            assert f"at most epsilon {view:.3g} of a user" in said
            assert "needs 2 or more nodes" in said
            assert "not true of whoever runs nodes and knows their part of the noise" in said
