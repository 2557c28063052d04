"""`privrep fit CONFIG.toml`: the same fit as by options, and mistakes in the words of the file."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from commands import run
from configs import merged, write_config
from privrep.cli.fit_request import KEYS
from privrep.schema.commands import FitConfig

BASE: dict[str, Any] = {
    "data": {"table": "rows.parquet"},
    "columns": {"user": "user", "target": "y"},
    "privacy": {"epsilon": 4, "delta": 1e-6, "seed": 7},
    "model": {},
    "output": {"folder": "model"},
}
OPTIONS = ["--user", "user", "--target", "y", "--epsilon", "4", "--delta", "1e-6", "--simulate", "7"]


def write(folder: Path, changes: dict[str, dict[str, Any]] | None = None) -> Path:
    return write_config(folder / "c.toml", merged(BASE, changes or {}))


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    rng = np.random.default_rng(0)
    users, size = np.repeat(np.arange(200), 5), 1000
    X = rng.normal(size=(size, 4))
    rows = {"user": users, "y": X[:, 0] * (users % 3 - 1) + 0.1 * rng.normal(size=size)}
    rows |= {f"x{j}": X[:, j] for j in range(4)}
    rows |= {"colour": np.where(X[:, 1] > 0, "red", "green"), "label": np.where(X[:, 0] > 0, "no", "yes")}
    rows["item"] = rng.integers(0, 5, size)
    pq.write_table(pa.table(rows), tmp_path / "rows.parquet")
    (tmp_path / "scale.json").write_text(json.dumps({"x0": 1, "x1": 2.0}))
    (tmp_path / "covariance.json").write_text(json.dumps(COVARIANCE))
    (tmp_path / "categories.json").write_text('{"colour": ["red", "green"]}')
    return tmp_path


HINGE = ["--loss", "hinge"]
COVARIANCE = {"columns": ["x1", "x0"], "covariance": [[2.0, 0.5], [0.5, 1.0]]}
SAME: dict[str, tuple[dict[str, dict[str, Any]], list[str]]] = {
    "as it is": ({"columns": {"features": ["x0", "x1", "x2", "x3"]}}, ["--features", "x0,x1,x2,x3"]),
    "declared sizes": (
        {"columns": {"features": ["x0", "x1"]}, "model": {"rank": 1, "scale": {"x0": 1, "x1": 2.0}}},
        ["--features", "x0,x1", "--rank", "1", "--scale", "scale.json"],
    ),
    "declared covariance": (
        {"columns": {"features": ["x0", "x1"]}, "model": {"rank": 1, "covariance": COVARIANCE}},
        ["--features", "x0,x1", "--rank", "1", "--covariance", "covariance.json"],
    ),
    "categories": (
        {"columns": {"features": ["x0"], "categories": {"colour": ["red", "green"]}}},
        ["--features", "x0", "--categorical", "colour", "--categories", "categories.json"],
    ),
    "categories to select": (
        {"columns": {"features": ["x0"], "categorical": ["colour"]}},
        ["--features", "x0", "--categorical", "colour"],
    ),
    "labels": (
        {
            "columns": {"target": "label", "features": ["x0", "x1"]},
            "model": {"task": "classification", "classes": ["no", "yes"], "loss": "hinge"},
        },
        [
            "--target",
            "label",
            "--features",
            "x0,x1",
            "--task",
            "classification",
            "--classes",
            "no,yes",
            "--loss",
            "hinge",
        ],
    ),
    "several targets": (
        {
            "columns": {"target": ["y", "x3"], "features": ["x0", "x1"]},
            "privacy": {"relation": "add-or-remove-one-user"},
        },
        ["--target", "y,x3", "--features", "x0,x1", "--relation", "add-or-remove-one-user"],
    ),
    "the paper's": (
        {
            "columns": {"features": ["x0", "x1"]},
            "model": {"rank": 1, "configuration": "paper", "intercept": False, "method": "centaur"},
        },
        ["--features", "x0,x1", "--rank", "1", "--paper", "--no-intercept", "--method", "centaur"],
    ),
    "a start": (
        {"columns": {"features": ["x0", "x1"]}, "model": {"rank": 1, "start": "random", "safety_net": False}},
        ["--features", "x0,x1", "--rank", "1", "--start", "random", "--no-safety-net"],
    ),
    "ratings": ({"columns": {"item": "item", "items": [0, 1, 2, 3, 4]}}, ["--item", "item", "--items", "items.json"]),
}


def content(path: Path) -> Any:
    """The bytes of a file; of safetensors the header as a mapping, whose order the library leaves to chance."""
    found = path.read_bytes()
    if path.suffix != ".safetensors":
        return found
    end = 8 + int.from_bytes(found[:8], "little")
    return json.loads(found[8:end]), found[end:]


@pytest.mark.filterwarnings("ignore::privrep.errors.NothingLearned")
@pytest.mark.parametrize("name", SAME)
def test_a_file_and_the_same_options_make_the_same_model(
    name: str, folder: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    (folder / "items.json").write_text("[0, 1, 2, 3, 4]")
    changes, options = SAME[name]
    path = write(folder, changes)
    monkeypatch.chdir(folder)
    said = []
    for command in (["fit", path.name], ["fit", "rows.parquet", *OPTIONS, *options, "--out", "other"]):
        code, out, err = run(capsys, *command)
        assert code == 0, err
        said.append((out.replace("other", "model"), err))
    assert said[0] == said[1]
    files = [sorted(each.relative_to(root) for each in root.rglob("*")) for root in map(Path, ("model", "other"))]
    assert files[0] == files[1]
    for each in files[0]:
        one, two = Path("model", each), Path("other", each)
        if one.is_file():
            assert content(one) == content(two), each


def test_every_option_has_a_key_or_goes_with_a_file(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path, values = write(folder), {"--epsilon": "1", "--delta": "1", "--simulate": "1"}
    for option, key in KEYS.items():
        switch = option in ("--paper", "--no-intercept", "--no-safety-net", "--user-as-text")
        code, _, err = run(capsys, "fit", path, option, *([] if switch else [values.get(option, "x")]))
        assert (code, f"{option} would say it again; leave it out, and write {key} there." in err) == (2, True), err
        section, name = key.split(" ")[0].split(".")
        assert name in FitConfig.model_fields[section].annotation.model_fields  # type: ignore[union-attr]
    assert not (folder / "model").exists()


def test_out_goes_before_the_files_folder(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = write(folder, {"model": {"rank": 1}, "columns": {"features": ["x0", "x1"]}})
    assert run(capsys, "fit", path, "--out", folder / "elsewhere")[0] == 0
    assert (folder / "elsewhere" / "model.json").is_file()
    assert not (folder / "model").exists()
    assert "--overwrite" in run(capsys, "fit", path, "--out", folder / "elsewhere")[2]
    assert run(capsys, "fit", path, "--out", folder / "elsewhere", "--overwrite")[0] == 0
    assert "say where the model goes" in run(capsys, "fit", write(folder, {"output": {"folder": None}}))[2]


@pytest.mark.parametrize(
    ("changes", "sentence"),
    [
        ({"columns": {"user": None, "target": None}}, "must say columns.user (text) and columns.target"),
        ({"columns": {"usr": "x"}}, "the config has no key columns.usr; did you mean user?"),
        ({"model": {"classes": ["a", "b"]}}, "model.classes goes with model.task classification"),
        ({"model": {"method": "fast"}}, "method must be one of"),
        ({"model": {"task": "classification", "classes": ["a"]}}, "model.classes: classes must be a list of 2"),
        ({"columns": {"items": [1]}}, "columns.items lists the values of the item column"),
        ({"columns": {"item": "item", "features": ["x0"]}}, "leave out columns.features"),
        ({"columns": {"features": ["x0"]}, "model": {"scale": {"x1": 1}}}, "model.scale gives no positive number"),
        ({"columns": {"features": ["x0"], "categorical": ["item"], "categories": {"colour": ["red"]}}}, "'colour'"),
        ({"columns": {"features": ["x0"]}, "model": {"rank": 9}}, "rank must lie between 0 and"),
        ({"privacy": {"epsilon": 0}}, "epsilon"),
    ],
)
def test_check_refuses_what_a_fit_would(
    changes: dict[str, dict[str, Any]], sentence: str, folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = write(folder, changes)
    for more in (["--check"], []):
        code, out, err = run(capsys, "fit", path, *more)
        assert (code, out) == (2, "")
        assert sentence in err
        assert "--" not in err.replace(str(path), "")
        assert err.count("\n") == 1
    assert not (folder / "model").exists()


def test_check_takes_options_too_and_reads_no_table(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    table = folder / "none.csv"
    code, out, err = run(capsys, "fit", table, *OPTIONS, "--check")
    assert (code, out) == (0, f"Checked: {table} can be used. No data was read and nothing was spent.\n")
    assert str(table) in err
    assert "--rank" in run(capsys, "fit", table, *OPTIONS, "--check", "--rank", "two")[2]
