"""Tasks of a federation: learned over several files as over one, kept on nodes, sent as JSON and read strictly."""

from __future__ import annotations

import json
import shutil
import stat
import subprocess
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.csv as csv
import pyarrow.parquet as pq
import pytest

from privrep.data.readers import TableSource
from privrep.data.table import UserTable, find_users
from privrep.errors import InputError, ResumeError
from privrep.federated import task as tasks
from privrep.federated.task import TableTask, Task, task_from_json
from privrep.heads.fitting import fit_heads
from privrep.linear.registry import METHODS
from privrep.models import model as models
from privrep.models.description import Columns, Config
from privrep.models.learning import learn
from privrep.privacy.bounds import BoundedSum
from privrep.privacy.protocol import EVERYONE, Facts
from privrep.users.memory import InMemoryUsers
from privrep.users.streaming import StreamingUsers

USERS, ROWS, FEATURES = 48, 10, 6
NODES = 3


@dataclass(frozen=True)
class SeveralUsers:
    """An engine of engines, as a server has over its nodes: one clipped sum of each, added up in order."""

    parts: Sequence[Any]

    @property
    def facts(self) -> Facts:
        return replace(self.parts[0].facts, users=sum(part.facts.users for part in self.parts))

    def sums(self, step: Any, bounds: Mapping[str, Any], among: Any = EVERYONE) -> Any:
        sums = [part.sums(step, bounds, among) for part in self.parts]
        return {key: BoundedSum(sum(each[key].total for each in sums), bounds[key]) for key in bounds}


def made_up() -> dict[str, np.ndarray]:
    """Rows of users whose regressions share two directions; users come in no order."""
    rng = np.random.default_rng(3)
    user = np.repeat(np.arange(USERS), ROWS)
    X = rng.normal(size=(len(user), FEATURES))
    heads = rng.normal(size=(USERS, 2)) + 1
    y = (X[:, :2] * heads[user]).sum(axis=1) + 0.1 * rng.normal(size=len(user))
    columns = {f"x{j}": X[:, j] for j in range(FEATURES)}
    made = {"user": user, "y": y, "z": y + X[:, 2], **columns}
    made["colour"] = np.array(["red", "green", "blue"])[rng.integers(0, 3, len(user))]
    made["label"] = np.array(["no", "yes"])[(y > 0).astype(int)]
    order = rng.permutation(len(user))
    return {name: values[order] for name, values in made.items()}


def write(rows: Mapping[str, np.ndarray], path: Path) -> Path:
    table = pa.table(dict(rows))
    if path.suffix == ".csv":
        csv.write_csv(table, path)
    else:
        pq.write_table(table, path)
    return path


def some(rows: Mapping[str, np.ndarray], chosen: np.ndarray) -> dict[str, np.ndarray]:
    return {name: values[chosen] for name, values in rows.items()}


def deal(rows: Mapping[str, np.ndarray], users: np.ndarray) -> list[dict[str, np.ndarray]]:
    """Unequal nodes: half of the users, a third, and the rest."""
    cuts = (users >= USERS // 2).astype(int) + (users >= USERS // 2 + USERS // 3)
    return [some(rows, cuts == node) for node in range(NODES)]


@pytest.fixture(scope="module")
def files(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, list[Path]]:
    """One file of all users, and those of three nodes, of both formats."""
    folder, rows = tmp_path_factory.mktemp("files"), made_up()
    parts = deal(rows, rows["user"])
    kinds = ("parquet", "csv", "parquet")
    nodes = [write(part, folder / f"node-{n}.{kind}") for n, (part, kind) in enumerate(zip(parts, kinds, strict=True))]
    return write(rows, folder / "all.parquet"), nodes


NUMBERS = tuple(f"x{j}" for j in range(FEATURES))
BUDGET: dict[str, Any] = {"epsilon": 50.0, "delta": 1e-5, "seed": 1}
COLUMNS = Columns("user", ("y",), NUMBERS)
TABLES = {
    **{name: TableTask(Config(2, method=name, **BUDGET), COLUMNS) for name in METHODS},
    "rank to be found, users secret": TableTask(
        Config(None, relation="add-or-remove-one-user", scale=(1.0,) * FEATURES, **BUDGET), COLUMNS
    ),
    "rank to be found": TableTask(Config(None, **BUDGET), COLUMNS),
    "no intercept": TableTask(Config(2, intercept=False, **BUDGET), COLUMNS),
    "two targets": TableTask(Config(None, **BUDGET), Columns("user", ("y", "z"), NUMBERS)),
    "categories": TableTask(Config(None, **BUDGET), Columns("user", ("y",), NUMBERS, ("colour",), (("red", "blue"),))),
    "two targets and categories": TableTask(
        Config(2, **BUDGET), Columns("user", ("y", "z"), NUMBERS, ("colour",), (("red", "blue"),))
    ),
    "ratings": TableTask(
        Config(1, ratings=True, **BUDGET), Columns("user", ("y",), (), ("colour",), (("red", "green", "blue"),))
    ),
    "labels": TableTask(Config(2, loss="log", **BUDGET), Columns("user", ("label",), NUMBERS, classes=("no", "yes"))),
}


def published(model: Path, folder: Path) -> Path:
    """What a node gets of a model: all but private/."""
    shutil.copytree(model, folder, ignore=shutil.ignore_patterns("private"))
    return folder


def federated(task: Task, paths: Sequence[Path], folder: Path, pages: list[str]) -> tuple[Path, list[Path]]:
    """The folder of a server, and those of its nodes."""
    task = task_from_json(json.loads(json.dumps(task.to_json())))
    total = sum(task.read_facts(path).users for path in paths)
    task = task_from_json(json.loads(json.dumps(task.with_users(total).to_json())))
    with ExitStack() as opened:
        nodes = [opened.enter_context(task.open(path)) for path in paths]
        task.learn(SeveralUsers(nodes), folder / "server", pages.append)
        kept = [published(folder / "server", folder / f"kept-{n}") for n in range(len(nodes))]
        assert [task.keep(where, node) for where, node in zip(kept, nodes, strict=True)] == [
            n.facts.users for n in nodes
        ]
    return folder / "server", kept


def fitted(task: TableTask, path: Path, out: Path) -> models.Model:
    """What `privrep fit` makes of one file (see `cli.fit_table.learn_table`)."""
    columns = task.columns
    lists: dict[str, Any] = {"categories": columns.by_category or None, "classes": columns.classes or None}
    lists |= {"items": task.config.ratings}
    source = TableSource(path, columns.user, columns.targets, columns.features, **lists)
    with StreamingUsers.open(source) as users:
        model = learn(users, task.config, folder=out, columns=columns)
        net = {"intercept": task.config.intercept, "safety_net": task.config.safety_net}
        return models.with_heads(model, fit_heads(users.blocks(), model.representation, loss=model.loss, **net))


@pytest.mark.parametrize("name", TABLES)
def test_three_files_give_what_one_gives_and_heads_stay(
    name: str, files: tuple[Path, list[Path]], tmp_path: Path
) -> None:
    task, pages = TABLES[name], []
    one = fitted(task, files[0], tmp_path / "one")
    server, kept = federated(task, files[1], tmp_path, pages)
    public = models.load(server)
    assert pages
    assert public.heads is None
    assert not list((server / "private").glob("*"))
    assert np.array_equal(public.representation.matrix, one.representation.matrix)
    if (prior := one.representation.prior) is not None:
        assert public.representation.prior is not None
        assert np.array_equal(public.representation.prior.factor, prior.factor)
        assert np.array_equal(public.representation.prior.mean.slopes, prior.mean.slopes)
    assert public.privacy.epsilon == one.privacy.epsilon
    assert one.heads is not None
    with task.open(files[0]) as users:
        assert isinstance(users, InMemoryUsers)
        X, rows = users.table.X, np.repeat(users.table.ids, users.table.sizes)
    seen = 0
    for where in kept:
        model = models.load(where)
        assert model.heads is not None
        mine = np.isin(rows, model.heads.ids)
        got = model.heads.predict(model.representation, X[mine], find_users(model.heads.ids, rows[mine]))
        wanted = one.heads.predict(one.representation, X[mine], find_users(one.heads.ids, rows[mine]))
        assert np.array_equal(got, wanted)
        assert stat.S_IMODE((where / "private").stat().st_mode) == 0o700
        assert stat.S_IMODE((where / "private" / "heads.parquet").stat().st_mode) == 0o600
        seen += len(model.heads.ids)
    assert seen == USERS


@pytest.mark.parametrize("name", ["private-fedrep", "rank to be found", "two targets and categories"])
def test_rows_in_memory_are_those_of_a_stream_to_the_last_bit(
    name: str, files: tuple[Path, list[Path]], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    task = TABLES[name]
    one = fitted(task, files[0], tmp_path / "one")
    task_folder, streamed = tmp_path / "held", tmp_path / "streamed"
    with task.open(files[0]) as users:
        assert isinstance(users, InMemoryUsers)
        task.learn(users, task_folder, lambda page: None)
        task.keep(task_folder, users)
    monkeypatch.setattr(tasks, "IN_MEMORY", 100)
    with task.open(files[0]) as users:
        assert isinstance(users, StreamingUsers)
        task.learn(users, streamed, lambda page: None)
        task.keep(streamed, users)
    assert one.heads is not None
    for folder in (task_folder, streamed):
        model = models.load(folder)
        assert np.array_equal(model.representation.matrix, one.representation.matrix)
        assert model.heads is not None
        for part in ("intercept", "shared", "own", "origin", "doubt"):
            assert np.array_equal(getattr(model.heads, part), getattr(one.heads, part)), part


def test_keeping_again_leaves_the_same_file_and_learning_again_spends_nothing(
    files: tuple[Path, list[Path]], tmp_path: Path
) -> None:
    task = TABLES["private-fedrep"]
    server, kept = federated(task, files[1], tmp_path, [])
    first, ledger = (kept[0] / "private" / "heads.parquet").read_bytes(), (server / "ledger.jsonl").read_bytes()
    with task.open(files[1][0]) as users:
        assert task.keep(kept[0], users) == users.facts.users
        assert (kept[0] / "private" / "heads.parquet").read_bytes() == first
        task.learn(users, server, lambda page: pytest.fail("asked again"))
        assert (server / "ledger.jsonl").read_bytes() == ledger
        other = replace(task, config=replace(task.config, rank=1))
        for refused in (lambda: other.keep(kept[0], users), lambda: other.learn(users, server, lambda page: None)):
            with pytest.raises(InputError, match="another task"):
                refused()
        with pytest.raises(InputError, match="keep takes the users that open gave"):
            task.keep(kept[0], SeveralUsers([users]))


def test_a_run_that_was_stopped_goes_on(files: tuple[Path, list[Path]], tmp_path: Path) -> None:
    task = TABLES["private-fedrep"]
    with task.open(files[0]) as users:
        seen: list[str] = []

        def stop(page: str) -> None:
            seen.append(page)
            if len(seen) == 3:
                raise KeyboardInterrupt

        with pytest.raises(KeyboardInterrupt):
            task.learn(users, tmp_path / "stopped", stop)
        with pytest.raises(ResumeError):
            replace(task, config=replace(task.config, rank=1)).learn(users, tmp_path / "stopped", stop)
        task.learn(users, tmp_path / "stopped", lambda page: None)
        task.learn(users, tmp_path / "whole", lambda page: None)
    stopped, whole = models.load(tmp_path / "stopped"), models.load(tmp_path / "whole")
    assert np.array_equal(stopped.representation.matrix, whole.representation.matrix)
    assert stopped.privacy == whole.privacy


def test_an_engine_of_other_rows_is_refused_before_anything_is_written(
    files: tuple[Path, list[Path]], tmp_path: Path
) -> None:
    fewer = replace(TABLES["private-fedrep"], columns=Columns("user", ("y",), NUMBERS[:4]))
    with TABLES["private-fedrep"].open(files[0]) as users, pytest.raises(InputError, match="same task"):
        fewer.learn(users, tmp_path / "run", lambda page: None)
    assert not (tmp_path / "run").exists()


def test_what_is_wrong_with_a_file_is_one_sentence_without_its_values(tmp_path: Path) -> None:
    rows = made_up()
    task, missing = TABLES["labels"], {name: values for name, values in rows.items() if name != "x3"}
    secret = {**rows, "x3": np.array(["secret-value"] * len(rows["user"]))}
    for found in (missing, secret):
        for kind in ("csv", "parquet"):
            path = write(found, tmp_path / f"bad.{kind}")
            for use in (task.read_facts, lambda path: task.open(path).__enter__()):
                with pytest.raises(InputError, match="x3") as caught:
                    use(path)
                assert "secret-value" not in str(caught.value)
                assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("columns", "loss", "words"),
    [
        (Columns(), None, "must name its columns"),
        (Columns("user", ("y",)), None, "must name its columns"),
        (Columns("user", ("y",), ("x0", "y")), None, "more than once"),
        (Columns("user", ("y",), NUMBERS, ("colour",), ()), None, "declared"),
        (Columns("user", ("y",), NUMBERS, ("colour",), ((),)), None, "lists none"),
        (Columns("user", ("y",), NUMBERS, classes=("a", "b")), None, "go with a loss"),
        (Columns("user", ("y",), NUMBERS), "log", "classes declared"),
        (Columns("user", ("y", "z"), NUMBERS, classes=("a", "b")), "log", "one target"),
    ],
)
def test_what_nodes_must_agree_on_is_declared(columns: Columns, loss: str | None, words: str) -> None:
    with pytest.raises(InputError, match=words):
        TableTask(Config(2, loss=loss, **BUDGET), columns)


# Neural tasks

torch = pytest.importorskip("torch")
from privrep import Centaur  # noqa: E402
from privrep.errors import NothingLearned  # noqa: E402
from privrep.federated.neural_task import NeuralTask  # noqa: E402
from privrep.neural.features import Dct, Frozen  # noqa: E402
from privrep.neural.training import LINEAR, PLAIN, WHOLE  # noqa: E402

PIXELS = (6, 6, 1)


def class_rows(users: int = USERS, rows: int = 8) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    rng = np.random.default_rng(0)
    y = rng.integers(0, 3, users * rows)
    X = 0.7 * rng.normal(size=(len(y), 36)) + np.eye(3, 36)[y] * 2
    return X.astype(np.float32), y, np.repeat(np.arange(users), rows)


def neural(**options: Any) -> NeuralTask:
    usual = {"classes": 3, "epsilon": 20.0, "delta": 1e-5, "rows": 6, "rounds": 2, "seed": 0, "width": 36}
    return NeuralTask(**{**usual, **options})


NETWORKS: dict[str, NeuralTask] = {
    "linear": neural(share="linear"),
    "directions": neural(share="directions"),
    "all of an mlp": neural(
        share="all", representation="mlp", epsilon=1e4, rounds=8, training={"clip": 1.0, "step_size": 0.5}
    ),
    "a map": neural(share="auto", feature_map=Dct(6, 6, 1, keep=12), width=None),
    "nothing": neural(share="nothing"),
}


def npz_files(folder: Path) -> list[Path]:
    X, y, users = class_rows()
    paths = []
    for n, part in enumerate(deal({"X": X, "y": y, "users": users}, users)):
        paths.append(folder / f"rows-{n}.npz")
        np.savez(paths[-1], **part)
    return paths


def in_one_place(task: NeuralTask) -> Centaur:
    settings = None
    if task.training:
        settings = replace(WHOLE if task.share == "all" else PLAIN, **task.training)
    return Centaur(
        task.representation,
        classes=task.classes,
        epsilon=task.epsilon,
        delta=task.delta,
        share=task.share,
        features=task.feature_map,
        rows=task.rows,
        rounds=task.rounds,
        settings=settings,
        random_state=task.seed,
    ).fit(*class_rows())


@pytest.mark.parametrize("name", NETWORKS)
def test_three_nodes_share_the_network_that_one_place_would(name: str, tmp_path: Path) -> None:
    task, pages = NETWORKS[name], []
    one = in_one_place(task)
    server, kept = federated(task, npz_files(tmp_path), tmp_path, pages)
    public = Centaur.load(server)
    assert bool(pages) is (name != "nothing")
    assert public.heads_ is None
    assert not list((server / "private").glob("*"))
    assert public.plan_ == one.plan_
    assert np.array_equal(public.learned_.weights, one.learned_.weights)
    assert public.privacy_.epsilon == one.privacy_.epsilon
    X, _, users = class_rows()
    seen = 0
    for where in kept:
        model = Centaur.load(where)
        assert model.heads_ is not None
        mine = np.isin(users, model.heads_.ids)
        got, wanted = (each.predict_proba(X[mine], users[mine]) for each in (model, one))
        assert np.array_equal(got, wanted)
        assert stat.S_IMODE((where / "private").stat().st_mode) == 0o700
        assert stat.S_IMODE((where / "private" / "heads.parquet").stat().st_mode) == 0o600
        seen += len(model.heads_.ids)
    assert seen == USERS


def test_tables_and_archives_of_images_are_read_as_arrays_are(tmp_path: Path) -> None:
    X, y, users = class_rows(6)
    names = tuple(f"p{j}" for j in range(36))
    table = neural(width=None, columns=Columns("who", ("what",), names), users=6)
    written = {"who": users, "what": y, **{name: X[:, j] for j, name in enumerate(names)}}
    pixels = np.clip(np.abs(X) * 50, 0, 255).astype(np.uint8).reshape(-1, 6, 6)
    np.savez(tmp_path / "images.npz", images=pixels, labels=y, writers=users)
    np.savez(tmp_path / "rows.npz", X=X, y=y, users=users)
    plain, images = neural(users=6), neural(width=None, image=PIXELS, feature_map=None, users=6)
    opened: list[UserTable] = []
    for task, path in (
        (plain, tmp_path / "rows.npz"),
        (table, write(written, tmp_path / "rows.parquet")),
        (images, tmp_path / "images.npz"),
    ):
        assert task.read_facts(path) == Facts(6, 36, 1, False)
        with task.open(path) as engine:
            assert isinstance(engine, InMemoryUsers)
            assert engine.facts.features == task.features
            opened.append(engine.table)
    assert np.array_equal(opened[0].X, opened[1].X)
    assert all(np.array_equal(each.y, opened[0].y) for each in opened)
    assert np.allclose(opened[2].X, pixels.reshape(-1, 36) / np.linalg.norm(pixels.reshape(-1, 36), axis=1)[:, None])


def test_a_node_may_hold_one_user(tmp_path: Path) -> None:
    X, y, users = class_rows(1)
    np.savez(tmp_path / "phone.npz", X=X, y=y, users=users)
    with neural(users=40).open(tmp_path / "phone.npz") as engine:
        assert engine.facts.users == 1


def test_neural_files_and_models_of_something_else_are_refused(tmp_path: Path) -> None:
    paths = npz_files(tmp_path)
    task = neural(share="linear")
    server, kept = federated(task, paths, tmp_path, [])
    X, y, users = class_rows(4)
    np.savez(tmp_path / "short.npz", X=X[:, :5], y=y, users=users)
    np.savez(tmp_path / "nameless.npz", X=X, y=y)
    (tmp_path / "torn.npz").write_bytes(paths[0].read_bytes()[:200])
    cases = {"short": "rows of 5 numbers", "nameless": "no array 'users'", "torn": "NumPy archive", "gone": "no file"}
    for name, words in cases.items():
        with pytest.raises(InputError, match=words):
            task.read_facts(tmp_path / f"{name}.npz")
    with pytest.raises(InputError, match="names no columns"):
        task.read_facts(write({"user": users}, tmp_path / "table.csv"))
    with pytest.raises(InputError, match="with_users"), task.open(paths[0]):
        pass
    with pytest.raises(InputError, match="more users"), task.with_users(3).open(paths[0]):
        pass
    whole = task.with_users(USERS)
    with whole.open(paths[0]) as engine:
        for other in (replace(whole, rounds=3), whole.with_users(USERS + 1)):
            with pytest.raises(InputError, match="another task"):
                other.keep(kept[0], engine)
            with pytest.raises(InputError, match="another task"):
                other.learn(engine, server, lambda page: None)
        with pytest.raises(InputError, match=f"{USERS} users"):
            whole.learn(engine, tmp_path / "run", lambda page: None)
    assert not (tmp_path / "run").exists()


def test_a_plan_that_shares_nothing_is_said(tmp_path: Path) -> None:
    X, y, users = class_rows(4)
    np.savez(tmp_path / "rows.npz", X=X, y=y, users=users)
    task = neural(epsilon=0.1, users=4)
    with task.open(tmp_path / "rows.npz") as engine, pytest.warns(NothingLearned, match="nothing"):
        task.learn(engine, tmp_path / "run", lambda page: None)
    assert Centaur.load(tmp_path / "run").privacy_.epsilon == 0


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"representation": torch.nn.Linear(36, 4)}, "no code travels"),
        ({"feature_map": Frozen(torch.nn.Linear(36, 4), "own", (36,), 4)}, "no code travels"),
        ({"settings": replace(LINEAR, head_fit=object())}, "no code travels"),
        ({"settings": LINEAR, "training": {"clip": 1.0}}, "as a whole"),
        ({"training": {"head_fit": 1}}, "training has no field"),
        ({"share": "all"}, "needs a network"),
        ({"share": "adapters"}, "needs a pretrained"),
        ({"representation": "lenet"}, "square images"),
        ({"width": None}, "how many numbers"),
        ({"image": (5, 5, 1)}, "25 and 36"),
        ({"classes": 1}, "classes must be"),
        ({"classes": ("a", 1)}, "classes must be"),
        ({"users": 1}, "from 2 to"),
        ({"columns": Columns("u", ("y", "z"), ("a",))}, "one target"),
    ],
)
def test_neural_tasks_that_cannot_be_are_refused(options: dict[str, Any], words: str) -> None:
    with pytest.raises(InputError, match=words):
        neural(**options)


# JSON

TASKS: list[Task] = [
    *TABLES.values(),
    *NETWORKS.values(),
    neural(classes=("a", "b"), image=PIXELS, representation="mlp", settings=WHOLE, width=None, users=7),
    neural(settings=LINEAR, columns=Columns("u", ("y",), tuple(map(str, range(36))))),
]


@pytest.mark.parametrize("number", range(len(TASKS)))
def test_a_task_comes_back_from_json(number: int) -> None:
    task = TASKS[number]
    sent = json.loads(json.dumps(task.to_json(), allow_nan=False))
    back = task_from_json(sent)
    assert back == task
    assert back.to_json() == sent
    assert (back.relation, back.epsilon, back.delta, back.seed) == (task.relation, task.epsilon, task.delta, task.seed)


def places(value: Any, at: tuple[Any, ...] = ()) -> Iterator[tuple[Any, ...]]:
    """Where something stands in JSON: all there is to change, of a list the first."""
    inside = value.items() if isinstance(value, dict) else enumerate(value[:1] if isinstance(value, list) else ())
    for key, inner in inside:
        yield (*at, key)
        yield from places(inner, (*at, key))


JUNK = [
    None,
    True,
    -1,
    0,
    10**400,
    2**64,
    1e308,
    float("nan"),
    float("inf"),
    "",
    "x" * 1000,
    [],
    [[]],
    {},
    {"a": 1},
    [None],
]


def complaint(sent: Any) -> str:
    """Of an InputError; nothing if this is a task, which can then be sent on. Any other error fails the test."""
    try:
        task = task_from_json(sent)
    except InputError as error:
        return str(error)
    json.dumps(task.to_json(), allow_nan=False)
    return ""


@pytest.mark.parametrize("number", range(len(TASKS)))
def test_whatever_else_is_sent_is_an_input_error_or_a_task(number: int) -> None:
    """Every value of a task in turn is replaced by junk, left out or joined by another."""
    sent, refused = TASKS[number].to_json(), 0
    for at in places(sent):
        for junk in (*JUNK, "leave out", "add"):
            changed = json.loads(json.dumps(sent))
            inner = changed
            for key in at[:-1]:
                inner = inner[key]
            if junk == "leave out":
                del inner[at[-1]]
            elif junk == "add" and isinstance(inner, dict):
                inner["stray"] = 1
            else:
                inner[at[-1]] = junk
            words = complaint(changed)
            refused += bool(words)
            assert "\n" not in words
            assert len(words) < 600
            if junk in ("leave out", "add") and isinstance(inner, dict) and at[:1] != ("training",):
                assert words
    assert refused > 100


@pytest.mark.parametrize("sent", [None, [], "task", {}, {"kind": "pickle"}, {1: 2}, {"kind": []}, {"kind": "table"}])
def test_what_is_no_task_at_all_is_refused(sent: Any) -> None:
    with pytest.raises(InputError):
        task_from_json(sent)


def test_tables_need_no_torch() -> None:
    code = (
        "import sys, json; from privrep.federated.task import task_from_json; "
        f"task_from_json(json.loads({json.dumps(json.dumps(TABLES['labels'].to_json()))})); "
        "print([name for name in ('torch', 'flwr') if name in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"
