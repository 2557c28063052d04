"""`privrep predict` and `personalize` with a prior: users without heads, intervals, and users without rows."""

from __future__ import annotations

import csv
import gzip
import json
import shutil
import warnings
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from commands import done, refused, run
from privrep import DPFedAvg, PrivateFedRep, PrivateFedRepClassifier, UnknownUsers
from privrep.models import model as models
from privrep.models.folder import ModelFolder

FEATURES = ["x0", "x1", "x2"]
TARGETS = ["y", "z"]


def make_rows(users: int, rows: int = 5, first: int = 0, seed: int = 0) -> dict[str, Any]:
    rng = np.random.default_rng(seed)
    who = np.repeat(np.arange(users), rows)
    X = rng.normal(size=(len(who), 3))
    y = 5 + rng.normal(size=users)[who] + X @ [1.0, -1.0, 2.0] + 0.3 * rng.normal(size=len(who))
    z = 100 - 7 * y + rng.normal(size=len(who))
    return {"user": who + first, "y": y, "z": z, **{name: X[:, j] for j, name in enumerate(FEATURES)}}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Tables, a model of one target and one of two."""
    folder = tmp_path_factory.mktemp("panel")
    pq.write_table(pa.table(make_rows(600)), folder / "users.parquet")
    new = make_rows(2, rows=3, first=9000, seed=3)
    rows = {name: np.concatenate([values[:20], new[name]]) for name, values in make_rows(600).items()}
    pd.DataFrame(rows).to_csv(folder / "some.csv", index=False)
    pq.write_table(pa.table(rows), folder / "some.parquet")
    for name, target in (("one", "y"), ("two", "y,z")):
        options = ["--user", "user", "--target", target, "--features", ",".join(FEATURES), "--simulate", "3"]
        command = ["fit", folder / "users.parquet", *options, "--epsilon", "8", "--delta", "1e-6"]
        done(*command, "--out", folder / name)
    return folder


@pytest.fixture
def copy(folder: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(folder / "one", tmp_path / "model"))


def read(path: Path) -> pd.DataFrame:
    return pd.read_parquet(path) if path.suffix == ".parquet" else pd.read_csv(path)


@pytest.mark.parametrize("given", ["some.csv", "some.parquet"])
@pytest.mark.parametrize("wanted", ["p.csv", "p.csv.gz", "p.parquet"])
def test_unknown_users_and_intervals_equal_the_estimators(
    given: str, wanted: str, folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / wanted
    code, said, _ = run(capsys, "predict", folder / "one", folder / given, "--out", out, "--interval", "0.8")
    assert code == 0
    assert "26 rows with their prediction" in said
    assert "6 rows of 2 users without a head: predicted with the prior mean; privrep personalize" in said
    before, after = read(folder / given), read(out)
    assert list(after.columns) == [*before.columns, "prediction", "prediction_low", "prediction_high"]
    model = PrivateFedRep.load(folder / "one")
    with pytest.warns(UnknownUsers, match="6 rows of 2 users"):
        values = model.predict(before[FEATURES], before["user"])
    with pytest.warns(UnknownUsers):
        low, high = model.predict_interval(before[FEATURES], before["user"], 0.8)
    for name, column in (("prediction", values), ("prediction_low", low), ("prediction_high", high)):
        np.testing.assert_allclose(after[name], column, rtol=1e-12)


def test_several_targets_have_intervals_each(folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = tmp_path / "p.csv"
    code, said, _ = run(capsys, "predict", folder / "two", folder / "some.csv", "--out", out, "--interval", ".9")
    assert code == 0
    assert "6 rows of 2 users without a head" in said
    after = read(out)
    assert list(after.columns[-6:]) == [f"prediction_{name}{end}" for name in TARGETS for end in ("", "_low", "_high")]
    for name in TARGETS:
        assert (after[f"prediction_{name}_low"] < after[f"prediction_{name}"]).all()
        assert (after[f"prediction_{name}"] < after[f"prediction_{name}_high"]).all()
        inside = after[name].between(after[f"prediction_{name}_low"], after[f"prediction_{name}_high"])
        assert inside.mean() > 0.6


def test_names_of_columns_that_would_be_there_twice(
    folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    table, out = pq.read_table(folder / "some.parquet"), tmp_path / "p.csv"
    pq.write_table(table.append_column("prediction_low", table["y"]), tmp_path / "t.parquet")
    command = ["predict", folder / "one", tmp_path / "t.parquet", "--out", out]
    assert "'prediction_low' already" in refused(capsys, *command, "--interval", "0.9")
    assert run(capsys, *command)[0] == 0
    renamed = json.loads((folder / "two" / "model.json").read_text())
    renamed["columns"]["targets"] = ["y", "y_low"]
    twice = Path(shutil.copytree(folder / "two", tmp_path / "twice"))
    ModelFolder(twice).finish(renamed)
    said = refused(capsys, "predict", twice, folder / "some.csv", "--out", tmp_path / "q.csv", "--interval", "0.9")
    assert "two columns would be called 'prediction_y_low'" in said


def test_refusals(folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = tmp_path / "p.csv"
    command = ["predict", folder / "one", folder / "some.csv", "--out", out]
    said = refused(capsys, *command, "--refuse-unknown")
    assert "user 9000 in row 21 of" in said
    assert "privrep personalize" in said
    X = pd.read_parquet(folder / "users.parquet")
    PrivateFedRep.paper(1, epsilon=20.0, random_state=0).fit(X[FEATURES], X["y"], groups=X["user"]).save(
        tmp_path / "paper"
    )
    old = ["predict", tmp_path / "paper", folder / "some.csv", "--out", out, "--user", "user"]
    said = refused(capsys, *old, "--interval", "0.9")
    assert "says nothing of its uncertainty" in said
    assert "user 9000 in row 21" in refused(capsys, *old)
    assert not out.exists()


def test_without_unknown_users_nothing_is_said_of_them(
    folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "p.parquet"
    command = ["predict", folder / "one", folder / "users.parquet", "--out", out, "--refuse-unknown"]
    code, said, _ = run(capsys, *command)
    assert code == 0
    assert "without a head" not in said
    assert pq.read_table(out).num_rows == 3000


@pytest.mark.parametrize("suffix", [".csv", ".csv.gz", ".parquet"])
def test_a_user_without_rows_gets_the_prior_mean(
    suffix: str, folder: Path, copy: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    table = tmp_path / f"nothing{suffix}"
    if suffix == ".parquet":
        pq.write_table(pq.read_table(folder / "some.parquet").drop_columns(["user"]).slice(0, 0), table)
    else:
        opened: Any = gzip.open if suffix == ".csv.gz" else open
        with opened(table, "wt") as file:
            file.write(",".join(["y", *FEATURES]) + "\n")
    assert "no rows" in refused(capsys, "personalize", copy, table)
    assert run(capsys, "personalize", copy, table, "--user-id", "9000")[1].startswith("Users: 1 more, 601 in all")
    assert "already" in refused(capsys, "personalize", copy, table, "--user-id", "9000")
    heads = models.load(copy).heads
    assert heads is not None
    assert heads.ids[-1] == 9000
    for model, out in ((folder / "one", "a.csv"), (copy, "b.csv")):
        assert run(capsys, "predict", model, folder / "some.csv", "--out", tmp_path / out, "--interval", ".9")[0] == 0
    one, other = read(tmp_path / "a.csv"), read(tmp_path / "b.csv")
    pd.testing.assert_frame_equal(one, other, rtol=1e-12)
    assert run(capsys, "personalize", copy, table, "--user-id", "7", "--out", tmp_path / "h.json")[0] == 0
    (head,) = json.loads((tmp_path / "h.json").read_text())["heads"]
    assert (head["user"], head["kind"], list(head["weights"])) == (7, "prior", FEATURES)
    chosen = one["user"] == 9001
    wanted = head["intercept"] + one.loc[chosen, FEATURES] @ pd.Series(head["weights"])
    np.testing.assert_allclose(one.loc[chosen, "prediction"], wanted, rtol=1e-9)


def test_heads_keep_their_doubts_when_others_join(
    folder: Path, copy: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    some = tmp_path / "new.csv"
    pd.DataFrame(make_rows(3, rows=2, first=598, seed=8)).to_csv(some, index=False)
    assert run(capsys, "personalize", copy, some, "--replace")[1].startswith("Users: 1 more, 2 with a new head, 601")
    for model, out in ((folder / "one", "a.parquet"), (copy, "b.parquet")):
        command = ["predict", model, folder / "users.parquet", "--out", tmp_path / out, "--interval", "0.9"]
        assert run(capsys, *command)[0] == 0
    one, other = read(tmp_path / "a.parquet"), read(tmp_path / "b.parquet")
    same = one["user"] < 598
    pd.testing.assert_frame_equal(one[same], other[same], rtol=1e-12)
    width = other["prediction_high"] - other["prediction_low"]
    before = one["prediction_high"] - one["prediction_low"]
    assert (width[~same] > before[~same]).all()


def test_a_node_does_the_same(folder: Path, copy: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    node = tmp_path / "node"
    shutil.copytree(copy, node / "model")
    options = [folder / "some.csv", "--interval", "0.9", "--out"]
    assert run(capsys, "predict", copy, *options, tmp_path / "a.csv")[0] == 0
    code, said, _ = run(capsys, "node", "predict", node, *options, tmp_path / "b.csv")
    assert code == 0
    assert "6 rows of 2 users without a head" in said
    with open(tmp_path / "a.csv") as one, open(tmp_path / "b.csv") as other:
        assert list(csv.reader(one)) == list(csv.reader(other))
    said = refused(capsys, "node", "predict", node, *options, tmp_path / "c.csv", "--refuse-unknown")
    assert "user 9000 in row 21" in said


def test_infinite_intervals_are_said(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Thirty users at epsilon 0.05 cannot tell how large errors are."""
    rng = np.random.default_rng(0)
    rows = pd.DataFrame(
        {"user": np.repeat(np.arange(30), 4), "y": 1e4 * rng.normal(size=120), "x": rng.normal(size=120)}
    )
    rows.to_csv(tmp_path / "few.csv", index=False)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        model = PrivateFedRep(epsilon=0.05, random_state=0).fit(rows[["x"]].to_numpy(), rows["y"], groups=rows["user"])
    model.save(tmp_path / "model")
    asked = ["--out", tmp_path / "p.csv", "--interval", "0.9", "--user", "user", "--features", "x"]
    code, said, _ = run(capsys, "predict", tmp_path / "model", tmp_path / "few.csv", *asked)
    assert code == 0
    assert "Intervals are infinite" in said
    written = pd.read_csv(tmp_path / "p.csv")
    assert np.isinf(written["prediction_low"]).all()
    assert np.isfinite(written["prediction"]).all()


@pytest.mark.parametrize(
    ("estimator", "reason"),
    [
        (PrivateFedRepClassifier(1, epsilon=20.0, classes=[0, 1], random_state=0), "classes have probabilities"),
        (PrivateFedRepClassifier(1, epsilon=20.0, classes=[0, 1], loss="hinge", random_state=0), "classes have none"),
        (DPFedAvg(1, epsilon=20.0, random_state=0), "heads of DPFedAvg have no prior"),
    ],
)
def test_a_model_without_intervals_says_why(
    estimator: Any, reason: str, folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    rows = pd.read_parquet(folder / "users.parquet")
    y = rows["y"] if isinstance(estimator, DPFedAvg) else (rows["y"] > rows["y"].median()).astype(int)
    estimator.fit(rows[FEATURES], y.rename("y"), groups=rows["user"]).save(tmp_path / "model")
    command = ["predict", tmp_path / "model", folder / "users.parquet", "--out", tmp_path / "p.csv"]
    said = refused(capsys, *command, "--user", "user", "--interval", "0.9")
    assert "says nothing of its uncertainty: " in said
    assert reason in said
