"""Commands on tables with missing values, weights, and users without a head."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pytest

import commands
from privrep import PrivateFedRep
from privrep.models import model as models

FEATURES = ["x0", "x1", "x2"]
OPTIONS = ["--user", "user", "--target", "y", "--epsilon", "8", "--delta", "1e-6", "--simulate", "3"]
NAMED = ["--features", ",".join(FEATURES)]


def run(capsys: pytest.CaptureFixture[str], *arguments: object) -> tuple[int, str, str]:
    """Return exit code, stdout and stderr of a command, all white space alike."""
    code, out, err = commands.run(capsys, *arguments)
    return code, " ".join(out.split()), " ".join(err.split())


def made(users: int = 300, first: int = 0, gaps: bool = True) -> pd.DataFrame:
    rng = np.random.default_rng(first)
    who = np.repeat(np.arange(users), 5)
    X = np.array([30.0, -2.0, 0.0]) + rng.normal(size=(users, 3))[who] + rng.normal(size=(len(who), 3))
    y = X @ [0.3, 1.0, 0.0] + rng.normal(size=users)[who] + 0.3 * rng.normal(size=len(who))
    weight = rng.integers(0, 4, len(who))
    if gaps:
        X[rng.random(X.shape) < 0.1] = np.nan
        X[who < 5, 1] = np.nan
        y[::50] = np.nan
    return pd.DataFrame({"user": who + first, "y": y, **{n: X[:, j] for j, n in enumerate(FEATURES)}, "w": weight})


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("gaps")
    made().to_csv(folder / "rows.csv", index=False)
    made().to_parquet(folder / "rows.parquet", index=False)
    made(4, first=9000).assign(y=1.0).to_csv(folder / "new.csv", index=False)
    return folder


@pytest.fixture(scope="module")
def model(folder: Path) -> Path:
    commands.done("fit", folder / "rows.csv", *OPTIONS, *NAMED, "--out", folder / "model")
    return folder / "model"


def heads_of(folder: Path) -> Any:
    heads = models.load(folder).heads
    assert heads is not None
    return heads


def test_fit_says_what_was_missing_and_files_and_python_agree(
    folder: Path, model: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    fit = ["fit", folder / "rows.parquet", *OPTIONS, *NAMED, "--out", tmp_path / "model"]
    code, said, noted = run(capsys, *fit)
    assert code == 0
    assert "filled" not in said
    assert "30 rows of 1,500 left out: no target (not private: for your eyes)" in noted
    assert "Missing values filled, inside each user: x1 (" in noted
    for name in ("ledger.jsonl", "model.json", "private/heads.parquet"):
        assert (model / name).read_bytes() == (tmp_path / "model" / name).read_bytes()
    rows = made()
    with pytest.warns(match="left out: no target"):
        python = PrivateFedRep(epsilon=8, delta=1e-6, random_state=3).fit(rows[FEATURES], rows.y, rows.user)
    np.testing.assert_array_equal(python.model_.heads.means, heads_of(model).means)
    np.testing.assert_array_equal(python.model_.heads.intercept, heads_of(model).intercept)
    for place in (model, tmp_path / "model"):
        public = "".join(path.read_text(errors="ignore") for path in place.glob("*.json*"))
        assert "filled" not in public


@pytest.mark.parametrize("suffix", [".csv", ".parquet"])
def test_predict_fills_and_says_so(
    suffix: str, folder: Path, model: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / f"p{suffix}"
    code, _, noted = run(capsys, "predict", model, folder / f"rows{suffix}", "--out", out)
    assert code == 0
    assert "Missing values filled, by the user's own mean" in noted
    written = pd.read_csv(out) if suffix == ".csv" else pd.read_parquet(out)
    assert len(written) == 1500  # rows without a target, too
    rows = made()
    python = PrivateFedRep.load(model)
    np.testing.assert_allclose(written.prediction, python.predict(rows[FEATURES], rows.user), rtol=1e-12)


@pytest.mark.parametrize("suffix", [".csv", ".parquet"])
def test_unknown_users_are_predicted_skipped_or_refused(
    suffix: str, folder: Path, model: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    both = pd.concat([made().head(40), made(4, first=9000), made().tail(40)])
    table, out = tmp_path / f"both{suffix}", tmp_path / f"p{suffix}"
    both.to_csv(table, index=False) if suffix == ".csv" else both.to_parquet(table, index=False)
    predict = ["predict", model, table, "--out", out, "--overwrite"]

    def written() -> pd.DataFrame:
        return pd.read_csv(out) if suffix == ".csv" else pd.read_parquet(out)

    code, said, _ = run(capsys, *predict)
    assert (code, len(written())) == (0, 100)
    assert "20 rows of 4 users without a head: predicted with the prior mean" in said
    everyone = written().set_index(["user", "y"]).prediction
    code, said, _ = run(capsys, *predict, "--unknown", "skip")
    assert code == 0
    assert "80 rows with their prediction" in said
    assert "20 rows of 4 users without a head: left out" in said
    known = written()
    assert known.user.tolist() == [*made().head(40).user, *made().tail(40).user]
    assert (
        known.set_index(["user", "y"]).prediction.tolist()
        == everyone[everyone.index.isin(known.set_index(["user", "y"]).index)].tolist()
    )
    for option in (["--unknown", "refuse"], ["--refuse-unknown"]):
        code, _, noted = run(capsys, *predict, *option)
        assert code == 2
        assert "user 9000 in row 41" in noted
    assert "--unknown must be one of prior, skip, refuse" in run(capsys, *predict, "--unknown", "guess")[2]
    assert "leave one out" in run(capsys, *predict, "--unknown", "skip", "--refuse-unknown")[2]


def test_a_model_without_a_prior_skips_or_refuses(
    folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    paper = ["--paper", "--rank", "1", "--no-intercept"]
    code, _, noted = run(capsys, "fit", folder / "rows.csv", *OPTIONS, *NAMED, *paper, "--out", tmp_path / "model")
    assert code == 0, noted
    predict = ["predict", tmp_path / "model", folder / "new.csv", "--out", tmp_path / "p.csv"]
    assert "has no prior" in run(capsys, *predict, "--unknown", "prior")[2]
    assert "has no head" in run(capsys, *predict)[2]
    code, said, _ = run(capsys, *predict, "--unknown", "skip")
    assert code == 0
    assert "0 rows with their prediction" in said


def test_choices_are_saved_and_shown(folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    options = ["--missing", "drop", "--missing-indicator", "x1", "--missing-indicator", "x0", "--weight", "w"]
    fit = ["fit", folder / "rows.csv", *OPTIONS, *NAMED, *options]
    code, _, noted = run(capsys, *fit, "--out", tmp_path / "model")
    assert code == 0, noted
    assert "rows left out for missing values of x2 (" in noted
    columns = models.load(tmp_path / "model").columns
    assert (columns.missing, columns.indicators, columns.weight) == ("drop", (0, 1), "w")
    assert columns.feature_names == (*FEATURES, "x0 is missing", "x1 is missing")
    shown = run(capsys, "inspect", tmp_path / "model")[1]
    assert "Rows of the fit that missed a feature were left out" in shown
    assert "Features that say where a value was missing: x0 is missing, x1 is missing." in shown
    assert "Weights of rows: column w" in shown
    told = json.loads(run(capsys, "inspect", tmp_path / "model", "--json")[1])
    assert told["columns"]["indicators"] == [0, 1]
    code, _, noted = run(capsys, "predict", tmp_path / "model", folder / "rows.csv", "--out", tmp_path / "p.csv")
    assert code == 0, noted
    loaded = PrivateFedRep.load(tmp_path / "model")
    rows = made()
    np.testing.assert_allclose(
        pd.read_csv(tmp_path / "p.csv").prediction, loaded.predict(rows[FEATURES], rows.user), rtol=1e-12
    )
    python = PrivateFedRep(epsilon=8, delta=1e-6, random_state=3, missing="drop", missing_indicator=["x0", "x1"])
    with pytest.warns(match="left out"):
        python.fit(rows[FEATURES], rows.y, rows.user, sample_weight=rows.w)
    np.testing.assert_array_equal(python.representation_, loaded.representation_)
    code, said, noted = run(capsys, "personalize", tmp_path / "model", folder / "new.csv", "--weight", "w")
    assert (code, said[:13]) == (0, "Users: 4 more"), noted
    assert heads_of(tmp_path / "model").means.shape == (304, 3)


def test_a_file_says_the_same_as_options(folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    config = f"""
    data.table = {str(folder / "rows.csv")!r}
    [columns]
    user = "user"
    target = "y"
    features = ["x0", "x1", "x2"]
    missing = "drop"
    missing_indicator = ["x1"]
    weight = "w"
    [privacy]
    epsilon = 8
    delta = 1e-6
    seed = 3
    """
    (tmp_path / "fit.toml").write_text(config)
    assert run(capsys, "fit", tmp_path / "fit.toml", "--out", tmp_path / "a")[0] == 0
    options = ["--missing", "drop", "--missing-indicator", "x1", "--weight", "w"]
    assert run(capsys, "fit", folder / "rows.csv", *OPTIONS, *NAMED, *options, "--out", tmp_path / "b")[0] == 0
    assert (tmp_path / "a/model.json").read_bytes() == (tmp_path / "b/model.json").read_bytes()
    assert (tmp_path / "a/private/heads.parquet").read_bytes() == (tmp_path / "b/private/heads.parquet").read_bytes()
    (tmp_path / "fit.toml").write_text(config.replace('"drop"', '"mean"'))
    assert run(capsys, "fit", tmp_path / "fit.toml", "--out", tmp_path / "c")[0] == 2


def test_a_refused_gap_in_rows_to_predict(folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    made(gaps=False).to_csv(tmp_path / "whole.csv", index=False)
    fit = ["fit", tmp_path / "whole.csv", *OPTIONS, *NAMED, "--missing", "refuse", "--out", tmp_path / "model"]
    assert run(capsys, *fit)[0] == 0
    predict = ["predict", tmp_path / "model", folder / "rows.csv", "--out", tmp_path / "p.csv"]
    assert "missing values are refused" in run(capsys, *predict)[2]
    assert not (tmp_path / "p.csv").exists()


def test_numbers_beside_categories_are_filled_too(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    rows = made().assign(colour=lambda r: np.where(r.user % 2 == 0, "red", "blue"))
    rows.loc[3, "colour"] = None
    rows.to_csv(tmp_path / "rows.csv", index=False)
    (tmp_path / "lists.json").write_text(json.dumps({"colour": ["red", "blue"]}))
    lists = ["--categorical", "colour", "--categories", tmp_path / "lists.json"]
    fit = ["fit", tmp_path / "rows.csv", *OPTIONS, *NAMED, *lists, "--out", tmp_path / "model"]
    code, _, noted = run(capsys, *fit)
    assert code == 0, noted
    assert "Missing values filled" in noted
    assert heads_of(tmp_path / "model").means.shape == (300, 3)
    code, _, noted = run(capsys, "predict", tmp_path / "model", tmp_path / "rows.csv", "--out", tmp_path / "p.csv")
    assert code == 0, noted
    found = pd.read_csv(tmp_path / "p.csv")
    there = found.y.notna()
    assert found.prediction.notna().all()
    assert np.corrcoef(found.prediction[there], found.y[there])[0, 1] > 0.8


def test_rows_without_a_label(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    rows = made(gaps=False)
    rows["kind"] = np.where(rows.x1 > -2, "high", "low")
    rows.loc[::10, "kind"] = None
    for suffix in (".csv", ".parquet"):
        table, out = tmp_path / f"rows{suffix}", tmp_path / f"model{suffix}"
        rows.to_csv(table, index=False) if suffix == ".csv" else rows.to_parquet(table, index=False)
        labels = ["--task", "classification", "--target", "kind", "--rank", "1"]
        code, said, noted = run(capsys, "fit", table, *OPTIONS, *NAMED, *labels, "--out", out)
        assert code == 0, noted
        assert "150 rows of 1,500 left out: no target" in noted
        assert "'high', 'low'" in said or "high, low" in said
