"""`privrep node predict` and `personalize` on the folder of a node that holds a neural model, the server away."""

from __future__ import annotations

import csv
import gzip
import json
import shutil
import stat
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

pytest.importorskip("flwr")
pytest.importorskip("torch")


import commands
from privrep import Centaur
from privrep.federated.config import FederationSettings
from privrep.federated.neural_task import NeuralTask
from privrep.federated.simulation import simulate
from privrep.heads.store import read_own_heads
from privrep.models.description import Columns

USERS, WIDTH = 12, 16
NAMES = tuple(f"p{j}" for j in range(WIDTH))
LABELS = ("cat", "dog", "owl")
Capture = pytest.CaptureFixture[str]
Rows = dict[str, np.ndarray]


def made_up(first: int = 0, users: int = USERS, seed: int = 0) -> Rows:
    """Rows in no order, of users with more rows the earlier they come, so that heads are fitted in another order than
    that of the ids. Every other user is of one class, which a head alone knows best."""
    rng = np.random.default_rng(seed)
    who = np.repeat(np.arange(users), 3 + (users - np.arange(users)) % 5)
    y = np.where(who % 2, who % 3, rng.integers(0, 3, len(who)))
    X = 0.5 * rng.normal(size=(len(y), WIDTH)) + np.eye(3, WIDTH)[(y + who % 2) % 3] * 2
    order = rng.permutation(len(y))
    return {"X": X[order].astype(np.float32), "y": y[order], "users": first + who[order]}


def task(**options: Any) -> NeuralTask:
    usual = {"classes": 3, "epsilon": 30.0, "delta": 1e-5, "rows": 4, "rounds": 2, "seed": 0, "share": "linear"}
    return NeuralTask(**{**usual, **options})


def archive(rows: Rows, path: Path) -> Path:
    np.savez(path, **rows)
    return path


def pixels(rows: Rows, path: Path) -> Path:
    images = np.clip(np.abs(rows["X"]) * 80, 0, 255).astype(np.uint8).reshape(-1, 4, 4)
    np.savez(path, images=images, writers=np.array([f"w{user}" for user in rows["users"]]), labels=rows["y"])
    return path


def parquet(rows: Rows, path: Path) -> Path:
    pq.write_table(table(rows), path)
    return path


def text_ids(rows: Rows, path: Path) -> Path:
    """A CSV file whose ids are text, some of which look like integers."""
    found = table(rows).to_pydict()
    found["who"] = [f"{who:03d}" if who % 2 else f"u{who}" for who in found["who"]]
    with open(path, "w", newline="") as file:
        csv.writer(file).writerows([list(found), *zip(*found.values(), strict=True)])
    return path


def table(rows: Rows) -> pa.Table:
    columns = {name: rows["X"][:, j] for j, name in enumerate(NAMES)}
    return pa.table({"who": rows["users"], "what": np.array(LABELS)[rows["y"]], **columns})


NAMED = {"classes": LABELS, "columns": Columns("who", ("what",), NAMES)}
KINDS: dict[str, tuple[NeuralTask, Callable[[Rows, Path], Path], str]] = {
    "archive": (task(width=WIDTH), archive, "npz"),
    "images": (task(image=(4, 4, 1), feature_map=None, share="directions"), pixels, "npz"),
    "parquet": (task(**NAMED, representation="mlp", share="all", epsilon=1e4), parquet, "parquet"),
    "csv": (task(**NAMED), text_ids, "csv"),
}


@dataclass(frozen=True)
class Node:
    """A node's folder after a federation of two, its file, and how such files are written."""

    folder: Path
    data: Path
    write: Callable[[Rows, Path], Path]
    suffix: str

    @property
    def model(self) -> Centaur:
        return Centaur.load(self.folder / "model")

    def file(self, rows: Rows, name: str = "new") -> Path:
        return self.write(rows, self.folder.parent / f"{name}.{self.suffix}")

    @property
    def heads(self) -> bytes:
        return (self.folder / "model" / "private" / "heads.parquet").read_bytes()


@pytest.fixture(scope="module")
def finished(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Node]:
    made: dict[str, Node] = {}

    def get(kind: str) -> Node:
        if kind not in made:
            what, write, suffix = KINDS[kind]
            base = tmp_path_factory.mktemp(kind)
            files = [write(made_up(), base / f"a.{suffix}"), write(made_up(100, 8, 1), base / f"b.{suffix}")]
            settings = FederationSettings(wait=5.0, poll=0.002)
            simulate(what, files, base / "server", settings, say=lambda what: None, on_page=lambda page: None)
            made[kind] = Node(base / "server.nodes" / "node-1", files[0], write, suffix)
        return made[kind]

    return get


@pytest.fixture
def node(finished: Callable[[str], Node], request: pytest.FixtureRequest, tmp_path: Path) -> Node:
    """A copy that a test may change; of an archive unless it asks for another kind."""
    whole = finished(getattr(request, "param", "archive"))
    shutil.copytree(whole.folder, tmp_path / "node")
    return Node(tmp_path / "node", whole.data, whole.write, whole.suffix)


def run(capsys: Capture, *arguments: object) -> tuple[int, str, str]:
    """Return exit code, stdout and stderr of a command on a node."""
    return commands.run(capsys, "node", *arguments)


def refused(capsys: Capture, *arguments: object) -> str:
    """Return the one sentence with which a command on a node is refused."""
    return commands.refused(capsys, "node", *arguments)


def expected(node: Node, path: Path, rows: Rows) -> tuple[list[Any], np.ndarray, np.ndarray]:
    """The users of a file, and what the model in the folder says of its rows."""
    if node.write is pixels:
        with np.load(path) as found:
            X, users = found["images"].reshape(-1, WIDTH) / np.float32(255), found["writers"].tolist()
    else:
        X, users = rows["X"], rows["users"].tolist()
        if node.write is text_ids:
            users = [f"{who:03d}" if who % 2 else f"u{who}" for who in users]
    return users, node.model.predict(X, users), node.model.predict_proba(X, users)


@pytest.mark.parametrize("node", KINDS, indirect=True)
def test_rows_are_predicted_in_their_order_by_their_users_heads(node: Node, tmp_path: Path, capsys: Capture) -> None:
    users, classes, probabilities = expected(node, node.data, made_up())
    outs = {suffix: tmp_path / f"out{suffix}" for suffix in (".parquet", ".npz", ".csv.gz")}
    for out in outs.values():
        code, printed, _ = run(capsys, "predict", node.folder, node.data, "--out", out, "--proba")
        assert code == 0
        assert f"{len(users):,} rows" in printed
        assert stat.S_IMODE(out.stat().st_mode) == 0o600
    names = [f"probability_{name}" for name in node.model.classes_]
    found = pq.read_table(outs[".parquet"])
    assert found.column_names == ["user", "prediction", *names]
    assert found["user"].to_pylist() == users
    assert found["prediction"].to_pylist() == classes.tolist()
    assert np.array_equal(np.column_stack([found[name] for name in names]), probabilities)
    with np.load(outs[".npz"]) as arrays:
        assert arrays["user"].tolist() == users
        assert np.array_equal(arrays["prediction"], classes)
        assert np.array_equal(arrays["probability"], probabilities)
        assert np.array_equal(arrays["classes"], node.model.classes_)
    with gzip.open(outs[".csv.gz"], "rt") as file:
        lines = list(csv.reader(file))
    assert lines[0] == found.column_names
    assert [line[:2] for line in lines[1:]] == [[str(u), str(c)] for u, c in zip(users, classes, strict=True)]
    assert np.array_equal(np.array([line[2:] for line in lines[1:]], dtype=float), probabilities)


@pytest.mark.parametrize("node", KINDS, indirect=True)
def test_labels_are_not_needed_to_predict(node: Node, tmp_path: Path, capsys: Capture) -> None:
    bare, out = tmp_path / f"bare.{node.suffix}", tmp_path / "out.parquet"
    if node.suffix == "npz":
        with np.load(node.data) as found:
            np.savez(bare, **{name: found[name] for name in found.files if name not in ("y", "labels")})
    elif node.suffix == "parquet":
        pq.write_table(pq.read_table(node.data).drop_columns("what"), bare)
    else:
        with open(node.data, newline="") as file:
            lines = [line[:1] + line[2:] for line in csv.reader(file)]
        with open(bare, "w", newline="") as file:
            csv.writer(file).writerows(lines)
    assert run(capsys, "predict", node.folder, bare, "--out", out)[0] == 0
    found = pq.read_table(out)
    assert found.column_names == ["user", "prediction"]
    assert found["prediction"].to_pylist() == expected(node, node.data, made_up())[1].tolist()


@pytest.mark.parametrize("node", KINDS, indirect=True)
def test_new_users_get_the_heads_they_would_have_got_in_the_federation(node: Node, capsys: Capture) -> None:
    rows, before = made_up(200, 7, 2), node.model.heads_
    new = node.file(rows)
    assert f"privrep node personalize {node.folder}" in refused(
        capsys, "predict", node.folder, new, "--out", node.folder.parent / "p.csv"
    )
    assert not (node.folder.parent / "p.csv").exists()
    code, printed, _ = run(capsys, "personalize", node.folder, new)
    assert code == 0
    assert f"Users: 7 more, {USERS + 7} in all" in printed
    model = node.model
    assert before is not None
    assert model.heads_ is not None
    assert model.heads_.ids.tolist()[:USERS] == before.ids.tolist()
    private = node.folder / "model" / "private"
    assert stat.S_IMODE(private.stat().st_mode) == 0o700
    assert stat.S_IMODE((private / "heads.parquet").stat().st_mode) == 0o600
    assert [path.name for path in private.iterdir()] == ["heads.parquet"]
    users, _, found = expected(node, new, rows)
    X = rows["X"]
    if node.write is pixels:
        with np.load(new) as arrays:
            X = arrays["images"].reshape(-1, WIDTH) / np.float32(255)
    labels = rows["y"] if node.write in (archive, pixels) else np.array(LABELS)[rows["y"]]
    for user in set(users):
        mine = np.array(users) == user
        alone = model.personalize(X[mine], labels[mine])
        np.testing.assert_allclose(found[mine], alone.predict_proba(X[mine]), atol=1e-5)


def test_heads_of_those_who_were_there_stay_or_are_replaced(node: Node, capsys: Capture) -> None:
    old, X = made_up(), made_up()["X"]
    before, heads = node.model.predict_proba(X, old["users"]), node.heads
    again = made_up(USERS - 2, 4, 3)  # two who are there and two who are not
    path = node.file(again)
    assert f"user {USERS - 2} of {path} has a head" in refused(capsys, "personalize", node.folder, path)
    assert node.heads == heads
    code, printed, _ = run(capsys, "personalize", node.folder, path, "--replace")
    assert code == 0
    assert f"Users: 2 more, 2 with a new head, {USERS + 2} in all" in printed
    model = node.model
    after = model.predict_proba(X, old["users"])
    same = old["users"] < USERS - 2
    assert np.array_equal(before[same], after[same])
    assert not np.allclose(before[~same], after[~same], atol=1e-3)
    assert model.heads_ is not None
    assert sorted(model.heads_.ids.tolist()) == list(range(USERS + 2))
    assert 0 < model.heads_.alone.sum() < USERS + 2  # of both kinds, or the test would see half of what is joined


def test_a_folder_without_heads_gets_some(node: Node, tmp_path: Path, capsys: Capture) -> None:
    heads = node.heads
    shutil.rmtree(node.folder / "model" / "private")
    said = refused(capsys, "predict", node.folder, node.data, "--out", tmp_path / "p.csv")
    assert f"holds no heads (private/); make some with: privrep node personalize {node.folder}" in said
    assert run(capsys, "personalize", node.folder, node.data)[0] == 0
    assert node.heads == heads


def test_ids_of_unsigned_integers_stay_integers(node: Node, capsys: Capture) -> None:
    rows = made_up(300, 2, 4)
    path = node.file({**rows, "users": rows["users"].astype(np.uint64)})
    assert run(capsys, "personalize", node.folder, path)[0] == 0
    heads = read_own_heads(node.folder / "model", node.model.learned_.head_sizes)
    assert heads is not None
    assert heads.ids.dtype == np.int64
    assert heads.ids.tolist() == [*range(USERS), 300, 301]


@pytest.mark.parametrize("node", ["csv"], indirect=True)
def test_ids_of_text_stay_text_where_they_look_like_integers(node: Node, tmp_path: Path, capsys: Capture) -> None:
    path, out = node.file(made_up(21, 1, 4)), tmp_path / "p.parquet"
    assert run(capsys, "personalize", node.folder, path)[0] == 0
    assert run(capsys, "predict", node.folder, path, "--out", out)[0] == 0
    assert set(pq.read_table(out)["user"].to_pylist()) == {"021"}


def test_what_is_wrong_with_a_file_is_one_sentence_and_nothing_changes(
    node: Node, tmp_path: Path, capsys: Capture
) -> None:
    rows, heads, out = made_up(400, 2, 5), node.heads, tmp_path / "p.npz"
    spoilt = rows["X"].copy()
    spoilt[3, 1] = np.nan
    named = np.array([f"u{user}" for user in rows["users"]])
    cases: dict[str, tuple[Rows, str, str]] = {
        "short": ({**rows, "X": rows["X"][:, :5]}, "rows of 5 numbers", "rows of 5 numbers"),
        "nan": ({**rows, "X": spoilt, "users": rows["users"] % 2}, "row 4 of", "a row of user"),
        "text": ({**rows, "users": named}, "are text, those of", "are text, those of"),
        "nobody": ({"X": rows["X"], "y": rows["y"]}, "no array 'users'", "no array 'users'"),
        "fewer": ({**rows, "users": rows["users"][:3]}, "one user for each", "one user per"),
        "empty": ({name: values[:0] for name, values in rows.items()}, "must have rows", "has 0 users"),
    }
    for name, (given, of_predict, of_personalize) in cases.items():
        path = archive(given, tmp_path / f"{name}.npz")
        assert of_predict in refused(capsys, "predict", node.folder, path, "--out", out)
        assert of_personalize in refused(capsys, "personalize", node.folder, path)
    unlabelled = archive({"X": rows["X"], "users": rows["users"]}, tmp_path / "unlabelled.npz")
    assert "no array 'y'" in refused(capsys, "personalize", node.folder, unlabelled)
    for wrong, words in (("rows.csv", "names no columns"), ("gone.npz", "there is no file")):
        assert words in refused(capsys, "predict", node.folder, tmp_path / wrong, "--out", out)
        assert words in refused(capsys, "personalize", node.folder, tmp_path / wrong)
    assert not out.exists()
    assert node.heads == heads


def test_options_and_places_that_do_not_fit(node: Node, tmp_path: Path, capsys: Capture) -> None:
    given = ("predict", node.folder, node.data, "--out")
    assert "--features is for models of tables" in refused(capsys, *given, tmp_path / "p.csv", "--features", "a,b")
    assert "may be published" in refused(capsys, *given, node.folder / "model" / "p.csv")
    assert "must end in" in refused(capsys, *given, tmp_path / "p.txt")
    (tmp_path / "p.npz").touch()
    assert "exists already" in refused(capsys, *given, tmp_path / "p.npz")
    assert run(capsys, *given, tmp_path / "p.npz", "--overwrite")[0] == 0
    for option in ("--out", "--user-id"):
        said = refused(capsys, "personalize", node.folder, node.data, option, tmp_path / "w.csv")
        assert f"{option} is for models of tables" in said


def test_a_folder_that_is_not_whole_says_what_to_do(node: Node, tmp_path: Path, capsys: Capture) -> None:
    hello, asked = node.folder / "hello.json", ("predict", node.folder, node.data, "--out", tmp_path / "p.csv")
    fields = json.loads(hello.read_text())
    cases = {
        json.dumps({**fields, "task": {**fields["task"], "rounds": 3}}): "another task",
        json.dumps({"run": fields["run"]}): "is damaged (hello.json",
        "[1": "is damaged (hello.json",
    }
    for text, words in cases.items():
        hello.write_text(text)
        assert words in refused(capsys, *asked)
    hello.unlink()
    said = refused(capsys, *asked)
    assert "has no hello.json" in said
    assert f"Centaur.load({str(node.folder / 'model')!r})" in said
    assert "has no hello.json" in refused(capsys, "personalize", node.folder, node.data)
