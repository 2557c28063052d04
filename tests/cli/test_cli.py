"""Every command end to end on small tables, and every kind of bad input: exit 2, one sentence, nothing written."""

from __future__ import annotations

import csv
import gzip
import json
import os
import stat
import subprocess
import sys
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

import privrep
from commands import done, refused, run
from privrep import PrivateFactorization, PrivateFedRep, PrivateFedRepClassifier
from privrep.cli.console import Bar
from privrep.data.synthetic import make_class_population, make_population
from privrep.heads.fitting import HEAD_KINDS
from privrep.linear.registry import DEFAULT, ESTIMATORS
from privrep.models import model as models
from privrep.models.description import Columns, Config
from privrep.models.learning import claim
from privrep.users.memory import InMemoryUsers
from privrep.users.streaming import StreamingUsers

FEATURES = [f"x{j}" for j in range(6)]
BUDGET = ["--epsilon", "4", "--delta", "1e-6"]
COLUMNS = ["--user", "user", "--target", "y"]


def make_rows(users: int, first: int = 0, seed: int = 0) -> dict[str, Any]:
    rng = np.random.default_rng(seed)
    table = make_population(rng, users, len(FEATURES), 2, 6, 0.1, intercept=0.5).sample(rng)
    ids = np.repeat(table.ids + first, table.sizes)
    shuffled = rng.permutation(len(ids))
    columns = {"user": ids, "y": table.y, **{name: table.X[:, j] for j, name in enumerate(FEATURES)}}
    return {name: values[shuffled] for name, values in columns.items()}


def write(path: Path, rows: dict[str, Any]) -> Path:
    if path.suffix == ".parquet":
        pq.write_table(pa.table(rows), path)
        return path
    with open(path, "w", newline="") as file:
        csv.writer(file, lineterminator="\n").writerows(
            [list(rows), *zip(*(np.asarray(column).tolist() for column in rows.values()), strict=True)]
        )
    return path


def edited(path: Path, row: int, column: str, value: str) -> Path:
    """A copy of a CSV file with one value changed; rows count from one."""
    lines = list(csv.reader(path.read_text().splitlines()))
    lines[row][lines[0].index(column)] = value
    copy = path.with_name("edited.csv")
    copy.write_text("\n".join(",".join(line) for line in lines) + "\n")
    return copy


@pytest.fixture(scope="module")
def tables(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("tables")
    rows = make_rows(400)
    write(folder / "users.parquet", rows)
    write(folder / "users.csv", rows)
    write(folder / "new.csv", make_rows(5, first=1000, seed=1))
    return folder


@pytest.fixture(scope="module")
def fitted(tables: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("fitted") / "model"
    done("fit", tables / "users.csv", *COLUMNS, *BUDGET, "--rank", "2", "--out", out)
    return out


@pytest.fixture
def copy(fitted: Path, tmp_path: Path) -> Path:
    """A model folder to change."""
    models.save(models.load(fitted), tmp_path / "model")
    return tmp_path / "model"


def test_help_and_version_are_quick(capsys: pytest.CaptureFixture[str]) -> None:
    """Nothing heavy is imported for them."""
    assert run(capsys, "--version")[1].startswith("privrep ")
    code = (
        "import sys, privrep.cli\n"
        "try:\n"
        "    privrep.cli.main(['fit', '--help'])\n"
        "finally:\n"
        "    print([m for m in ('numpy', 'scipy', 'sklearn', 'pyarrow', 'matplotlib') if m in sys.modules])\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert done.stdout.splitlines()[-1] == "[]"
    assert "--epsilon" in done.stdout
    code_of, out, _ = run(capsys, "--help")
    assert code_of == 0
    assert all(name in out for name in ("demo", "fit", "personalize", "predict", "inspect", "budget"))


# fit


def test_fit_says_what_it_did(tables: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = tmp_path / "model"
    code, said, _ = run(capsys, "fit", tables / "users.parquet", *COLUMNS, *BUDGET, "--rank", "2", "--out", out)
    assert code == 0
    for words in (str(out), "epsilon 4 of 4", "replace-one-user", "rank 2 of 6", "Users: 400;", "private", "predict"):
        assert words in said
    assert "SEEDED" not in said
    loaded = models.load(out)
    assert loaded.columns == Columns("user", ("y",), tuple(FEATURES))
    assert loaded.heads is not None
    assert len(loaded.heads.ids) == 400
    assert not (out / "run.json").exists()
    assert stat.S_IMODE((out / "private").stat().st_mode) == 0o700


def test_fit_equals_the_estimator(tables: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = tmp_path / "model"
    options = ["--simulate", "7", "--rank", "2", "--features", "x0, x1,x2,x3,x4,x5", "--out", out]
    code, said, _ = run(capsys, "fit", tables / "users.parquet", *COLUMNS, *BUDGET, *options)
    assert code == 0
    assert "SEEDED" in said
    assert "NOT PRIVATE" in said
    assert "may be published" not in said
    table = pq.read_table(tables / "users.parquet")
    X = np.column_stack([table[name].to_numpy() for name in FEATURES])
    estimator = PrivateFedRep(2, epsilon=4.0, delta=1e-6, random_state=7)
    estimator.fit(X, table["y"].to_numpy(), groups=table["user"].to_numpy())
    assert np.array_equal(models.load(out).representation.basis, estimator.model_.representation.basis)


def test_fit_takes_its_options(tables: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    scale = tmp_path / "scale.json"
    scale.write_text(json.dumps({"x0": 1.0, "x3": 2, "unused": 5}))
    out = tmp_path / "deep" / "model"
    switches = ["--no-intercept", "--no-safety-net", "--relation", "add-or-remove-one-user", "--scale", scale]
    command = ["fit", tables / "users.csv", *COLUMNS, *BUDGET, "--features", "x3,x0", *switches, "--out", out]
    code, said, _ = run(capsys, *command)
    assert code == 0
    assert "Users: 400 (not private: for your eyes);" in said  # under this relation their number is no public fact
    assert "400 users in private/ (not private: for your eyes)" in " ".join(run(capsys, "inspect", out)[1].split())
    config = models.load(out).config
    assert (config.intercept, config.safety_net, config.rank) == (False, False, None)
    assert config.relation == "add-or-remove-one-user"
    assert config.scale == (2.0, 1.0)
    heads = models.load(out).heads
    assert heads is not None
    assert {HEAD_KINDS[kind] for kind in heads.kind} == {"posterior"}


def test_fit_as_the_paper_has_it(tables: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = tmp_path / "model"
    options = ["--paper", "--rank", "2", "--no-intercept", "--no-safety-net", "--simulate", "7"]
    command = ["fit", tables / "users.parquet", *COLUMNS, *BUDGET, *options, "--out", out]
    code, said, _ = run(capsys, *command)
    assert code == 0
    assert "Method: private-fedrep, as its paper has it" in said
    table = pq.read_table(tables / "users.parquet")
    X = np.column_stack([table[name].to_numpy() for name in FEATURES])
    estimator = PrivateFedRep.paper(2, epsilon=4.0, delta=1e-6, random_state=7)
    estimator.fit(X, table["y"].to_numpy(), groups=table["user"].to_numpy())
    assert models.load(out).config == estimator.model_.config
    assert np.array_equal(models.load(out).representation.basis, estimator.model_.representation.basis)
    assert "paper-moments" in run(capsys, "inspect", out)[1]
    assert run(capsys, "predict", out, tables / "users.csv", "--out", tmp_path / "p.csv")[0] == 0


@pytest.mark.parametrize(
    ("options", "make"),
    [
        pytest.param(["--start", "normalised-pairs"], partial(PrivateFedRep, 2, start="normalised-pairs"), id="start"),
        *(
            pytest.param(["--method", name], partial(getattr(privrep, estimator), 2), id=name)
            for estimator, name in ESTIMATORS.items()
            if name != DEFAULT
        ),
        *(
            pytest.param(
                ["--method", name, "--paper", "--no-intercept", "--no-safety-net"],
                partial(getattr(privrep, estimator).paper, 2),
                id=f"{name}, paper",
            )
            for estimator, name in ESTIMATORS.items()
            if name != DEFAULT
        ),
    ],
)
def test_fit_by_every_method_equals_its_estimator(
    options: list[str], make: Any, tables: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "model"
    command = ["fit", tables / "users.parquet", *COLUMNS, *BUDGET, *options, "--rank", "2", "--simulate", "7"]
    code, said, _ = run(capsys, *command, "--out", out)
    assert code == 0
    assert ("Method: " in said) == ("--method" in options)
    table = pq.read_table(tables / "users.parquet")
    X = np.column_stack([table[name].to_numpy() for name in FEATURES])
    estimator = make(epsilon=4.0, delta=1e-6, random_state=7)
    estimator.fit(X, table["y"].to_numpy(), groups=table["user"].to_numpy())
    assert models.load(out).config == estimator.model_.config
    assert np.array_equal(models.load(out).representation.basis, estimator.model_.representation.basis)
    code, said, _ = run(capsys, "inspect", out)
    assert code == 0
    assert models.load(out).config.method in said
    grouped = {"priv-altmin", "--paper"} <= set(options)
    assert ("group 5 of 5" in said, "do not add up" in said) == (grouped, grouped)
    assert "not spent" not in said


def test_a_declared_covariance_is_put_in_the_order_of_the_features(
    tables: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out, file = tmp_path / "model", tmp_path / "covariance.json"
    given = {"columns": ["x3", "unused", "x0"], "covariance": [[2.0, 0.0, 0.5], [0.0, 9.0, 0.0], [0.5, 0.0, 1.0]]}
    file.write_text(json.dumps(given))
    command = ["fit", tables / "users.csv", *COLUMNS, *BUDGET, "--features", "x0,x3", "--covariance", file]
    assert run(capsys, *command, "--out", out)[0] == 0
    fitted = models.load(out)
    assert fitted.config.covariance == ((1.0, 0.5), (0.5, 2.0))
    assert not {"scales/sizes", "covariance/covariance"} & {name for name, _ in fitted.privacy.events}
    assert "The declared covariance: it was taken as a public fact" in " ".join(run(capsys, "inspect", out)[1].split())
    matrix = given["covariance"]
    for bad in (
        "no",
        [1],
        {"columns": ["x0"]},
        {"columns": ["x0", "x3"], "covariance": [[1, 0]]},
        {"columns": ["x0", "x3"], "covariance": [[1, 0], [0, "one"]]},
        {"columns": ["x0", "x3"], "covariance": [[1, float("nan")], [0, 1]]},
        {"columns": ["x0", "x3"], "covariance": [[1, 0.5], [0.4, 1]]},
        {"columns": ["x0", "x3"], "covariance": [[1, 2], [2, 1]]},
        {"columns": ["x0", "x3"], "covariance": [[0, 0], [0, 1]]},
        {"columns": ["x0", "x0", "x3"], "covariance": matrix},
        {"columns": ["x0", "x1", "x2"], "covariance": matrix},
    ):
        file.write_text(bad if isinstance(bad, str) else json.dumps(bad))
        assert "--covariance" in refused(capsys, *command, "--out", tmp_path / "other")
    file.write_text(json.dumps(given))
    (tmp_path / "scale.json").write_text('{"x0": 1, "x3": 1}')
    said = refused(capsys, *command, "--scale", tmp_path / "scale.json", "--out", tmp_path / "other")
    assert "covariance" in said
    assert not (tmp_path / "other").exists()


def test_text_ids_keep_leading_zeros(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    rows = make_rows(100)
    rows["user"] = np.array([f"{user:04d}" for user in rows["user"]])
    table = write(tmp_path / "t.csv", rows)
    out = tmp_path / "m"
    assert run(capsys, "fit", table, *COLUMNS, *BUDGET, "--user-as-text", "--out", out)[0] == 0
    heads = models.load(out).heads
    assert heads is not None
    assert heads.ids[1] == "0001"
    assert run(capsys, "predict", out, table, "--out", tmp_path / "p.csv")[0] == 0
    assert (tmp_path / "p.csv").read_text().splitlines()[1].startswith(rows["user"][0] + ",")


@pytest.mark.parametrize(
    ("column", "value"), [("x2", "inf"), ("x2", "-inf"), ("x2", "tall"), ("y", "inf"), ("y", "tall"), ("user", "")]
)
def test_bad_values_are_named_by_column_and_row(
    column: str, value: str, tables: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    bad = edited(tables / "users.csv", 1234, column, value)
    command = ["fit", bad, *COLUMNS, *BUDGET, "--features", ",".join(FEATURES), "--out", tmp_path / "model"]
    said = refused(capsys, *command)
    assert repr(column) in said
    assert "row 1234" in said
    assert list(tmp_path.iterdir()) == []


def test_one_users_value_does_not_decide_on_the_features(
    tables: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Two files that differ in one cell of one user: the list of features is public, so the second is refused."""
    command = [*COLUMNS, *BUDGET, "--out"]
    code, said, noted = run(capsys, "fit", tables / "users.csv", *command, tmp_path / "one")
    assert code == 0
    assert "of 6 features" in said
    assert "features" not in noted
    bad = edited(tables / "users.csv", 1234, "x2", "none")
    said = refused(capsys, "fit", bad, *command, tmp_path / "other")
    assert f"column 'x2' of {bad} is not a number in row 1234" in said
    assert "name the feature columns with --features to leave it out" in said
    assert "none" not in said
    assert not (tmp_path / "other").exists()
    code, said, _ = run(capsys, "fit", bad, *command, tmp_path / "other", "--features", "x0,x1,x3,x4,x5")
    assert code == 0
    assert "of 5 features" in said


def test_columns_that_are_declared_as_text_are_listed(
    tables: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Types of a Parquet file are declared, not guessed: what is no number column is left out, but not silently."""
    table = pq.read_table(tables / "users.parquet").append_column("colour", pa.array(["7"] * 2400))
    pq.write_table(table, tmp_path / "t.parquet")
    code, said, noted = run(capsys, "fit", tmp_path / "t.parquet", *COLUMNS, *BUDGET, "--out", tmp_path / "model")
    assert code == 0
    assert "of 6 features" in said
    assert "colour" in noted


def test_bad_files_are_refused(tables: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "text.parquet").write_text("no")
    (tmp_path / "empty.csv").write_text("user,y,x0\n")
    for name in ("nothing.csv", "text.parquet", "empty.csv", "table.xlsx"):
        assert name in refused(capsys, "fit", tmp_path / name, *COLUMNS, *BUDGET, "--out", tmp_path / "model")
    under_a_file = tables / "users.csv" / "model"
    assert "users.csv" in refused(capsys, "fit", tables / "users.csv", *COLUMNS, *BUDGET, "--out", under_a_file)
    for content in ("no", "[1]", '{"x0": 1}', '{"x0": -1}'):
        (tmp_path / "scale.json").write_text(content)
        command = ["fit", tables / "users.csv", *COLUMNS, *BUDGET, "--scale", tmp_path / "scale.json"]
        assert "--scale" in refused(capsys, *command, "--out", tmp_path / "model")
    assert not (tmp_path / "model").exists()


def test_fit_replaces_only_what_it_made_and_only_when_asked(
    tables: Path, copy: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    command = ["fit", tables / "users.csv", *COLUMNS, *BUDGET, "--rank", "1", "--out"]
    assert "--overwrite" in refused(capsys, *command, copy)
    assert "intercepts" in refused(capsys, *command, copy, "--overwrite", "--paper")
    assert models.load(copy).config.rank == 2
    code, _, noted = run(capsys, *command, copy, "--overwrite")
    assert code == 0
    assert "epsilon 4" in noted  # what the replaced model had spent
    assert models.load(copy).config.rank == 1
    other = tmp_path / "thesis"
    other.mkdir()
    (other / "chapter.txt").write_text("mine")
    assert "thesis" in refused(capsys, *command, other, "--overwrite")
    assert "chapter.txt" in refused(capsys, *command, other / "chapter.txt", "--overwrite")
    assert (other / "chapter.txt").read_text() == "mine"


def test_a_killed_fit_is_continued_by_the_same_command(
    tables: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The process dies between two pages; the second one ends where an undisturbed run ends, and spends no more."""

    def unread(*_: object) -> None:
        raise AssertionError("the whole file is read")

    out, whole = tmp_path / "model", tmp_path / "whole"
    command = ["fit", str(tables / "users.csv"), *COLUMNS, *BUDGET, "--rank", "2", "--simulate", "1", "--out"]
    die = (
        "import os, sys\n"
        "from privrep import cli\n"
        "from privrep.cli.console import Bar\n"
        "Bar.page = lambda bar, name, epsilon: os._exit(9) if name == 'round-1' else None\n"
        "cli.main(sys.argv[1:])\n"
    )
    assert subprocess.run([sys.executable, "-c", die, *command, str(out)]).returncode == 9
    assert (out / "run.json").is_file()
    assert not (out / "model.json").exists()
    code, said, _ = run(capsys, "inspect", out)
    assert code == 0
    assert "NOT FINISHED" in said
    assert "not spent" in said
    with monkeypatch.context() as patch:
        patch.setattr(StreamingUsers, "open", unread)  # the header says enough
        for other in (["--no-intercept"], ["--features", "x0,x1"]):
            assert "other settings" in refused(capsys, *command, out, *other)
    code, _, noted = run(capsys, *command, out)
    assert code == 0
    assert "Continuing" in noted
    assert run(capsys, *command, whole)[0] == 0
    assert (out / "ledger.jsonl").read_text() == (whole / "ledger.jsonl").read_text()
    assert np.array_equal(models.load(out).representation.basis, models.load(whole).representation.basis)


def test_a_fit_that_was_killed_while_it_claimed_its_folder_is_not_stuck(
    tables: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "model"
    out.mkdir()
    (out / "run.tmp").write_text("{")
    assert run(capsys, "fit", tables / "users.csv", *COLUMNS, *BUDGET, "--rank", "2", "--out", out)[0] == 0
    assert (out / "model.json").is_file()
    assert not (out / "run.tmp").exists()


def test_ctrl_c_tells_how_to_continue(
    tables: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def interrupt(bar: object, name: str, epsilon: float) -> None:
        raise KeyboardInterrupt

    command = ["fit", tables / "users.csv", *COLUMNS, *BUDGET, "--out", tmp_path / "model"]
    with monkeypatch.context() as patch:
        patch.setattr(Bar, "page", interrupt)
        code, _, err = run(capsys, *command)
    assert code == 130
    assert "same command" in err
    assert "Traceback" not in err
    assert run(capsys, *command, "--overwrite")[0] == 0  # --overwrite too continues what is the same run
    assert len(models.load(tmp_path / "model").privacy.events) > 3


def test_a_run_in_use_is_not_removed(tables: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    from privrep.privacy.ledger import Budget, Ledger

    out = tmp_path / "model"
    config = Config(2, 4.0, 1e-6)
    users = InMemoryUsers(make_population(np.random.default_rng(0), 400, 6, 2, 6, 0.1).sample(np.random.default_rng(0)))
    claim(out, config, Columns("user", ("y",), tuple(FEATURES)), users)
    at_work = Ledger(Budget(4.0, 1e-6), path=out / "ledger.jsonl")
    said = refused(capsys, "fit", tables / "users.csv", *COLUMNS, *BUDGET, "--rank", "1", "--out", out, "--overwrite")
    at_work.close()
    assert "in use" in said
    assert (out / "ledger.jsonl").is_file()


# predict


def predictions(path: Path) -> list[float]:
    if path.suffix == ".parquet":
        return list(pq.read_table(path)["prediction"].to_pylist())
    with gzip.open(path, "rt") if path.suffix == ".gz" else open(path) as file:
        return [float(row["prediction"]) for row in csv.DictReader(file)]


@pytest.mark.parametrize("given", ["users.csv", "users.parquet"])
@pytest.mark.parametrize("wanted", ["p.csv", "p.csv.gz", "p.parquet"])
def test_predictions_equal_the_estimators(
    given: str, wanted: str, tables: Path, fitted: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / wanted
    code, said, _ = run(capsys, "predict", fitted, tables / given, "--out", out)
    assert code == 0
    assert "2,400 rows" in said
    assert "readable by you alone" in said
    assert stat.S_IMODE(out.stat().st_mode) == 0o600
    table = pq.read_table(tables / "users.parquet")
    X = table.select(FEATURES).to_pandas()
    expected = PrivateFedRep.load(fitted).predict(X, groups=table["user"].to_numpy())
    np.testing.assert_allclose(predictions(out), expected, rtol=1e-12, atol=1e-14)
    assert list(tmp_path.iterdir()) == [out]


def test_predict_keeps_all_columns_as_they_are(
    tables: Path, fitted: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    lines = (tables / "users.csv").read_text().splitlines()
    table = tmp_path / "more.csv"
    notes = ["note,code", '"a, ""b""",007', ",1.50"]
    table.write_text("\n".join(f"{note},{line}" for note, line in zip(notes, lines, strict=False)) + "\n")
    assert run(capsys, "predict", fitted, table, "--out", tmp_path / "p.csv")[0] == 0
    before = list(csv.reader(table.read_text().splitlines()))
    after = list(csv.reader((tmp_path / "p.csv").read_text().splitlines()))
    assert [row[:-1] for row in after] == before
    assert after[0][-1] == "prediction"
    assert run(capsys, "predict", fitted, table, "--out", tmp_path / "p.parquet")[0] == 0
    assert pq.read_table(tmp_path / "p.parquet").column_names == after[0]
    extra = pq.read_table(tables / "users.parquet").append_column("when", pa.array([None, *["now"] * 2399]))
    pq.write_table(extra, tmp_path / "more.parquet", row_group_size=500)
    assert run(capsys, "predict", fitted, tmp_path / "more.parquet", "--out", tmp_path / "q.parquet")[0] == 0
    assert pq.read_table(tmp_path / "q.parquet").drop_columns(["prediction"]).equals(extra)


def test_bytes_that_are_no_utf8_stay_as_they_are(
    tables: Path, fitted: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    header, *lines = (tables / "users.csv").read_bytes().splitlines()
    table = tmp_path / "latin.csv"
    table.write_bytes(b"\n".join([b"note," + header, *(b"caf\xe9," + line for line in lines)]) + b"\n")
    assert run(capsys, "predict", fitted, table, "--out", tmp_path / "p.csv")[0] == 0
    assert (tmp_path / "p.csv").read_bytes().splitlines()[1].startswith(b"caf\xe9," + lines[0])


def test_predict_needs_no_target(
    tables: Path, fitted: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    table = pq.read_table(tables / "users.parquet").drop_columns(["y"]).rename_columns({"user": "who"})
    pq.write_table(table, tmp_path / "t.parquet")
    command = ["predict", fitted, tmp_path / "t.parquet", "--out", tmp_path / "p.csv"]
    assert "'user'" in refused(capsys, *command)
    assert run(capsys, *command, "--user", "who")[0] == 0


def test_predict_refuses(tables: Path, fitted: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = tmp_path / "p.csv"
    said = refused(capsys, "predict", fitted, tables / "new.csv", "--out", out, "--refuse-unknown")
    assert "user 100" in said
    assert "row 1 " in said
    assert "personalize" in said
    bad = edited(tables / "users.csv", 77, "x1", "inf")
    said = refused(capsys, "predict", fitted, bad, "--out", out)
    assert "'x1'" in said
    assert "row 77" in said
    text = write(tmp_path / "text.parquet", {**make_rows(5), "user": np.array(["a"] * 30)})
    assert "text" in refused(capsys, "predict", fitted, text, "--out", out)
    twice = write(tmp_path / "twice.csv", {**make_rows(5), "prediction": np.zeros(30)})
    assert "'prediction'" in refused(capsys, "predict", fitted, twice, "--out", out)
    assert "p.txt" in refused(capsys, "predict", fitted, tables / "users.csv", "--out", tmp_path / "p.txt")
    assert "nowhere" in refused(
        capsys, "predict", fitted, tables / "users.csv", "--out", tmp_path / "nowhere" / "p.csv"
    )
    assert "model folder" in refused(capsys, "predict", tmp_path, tables / "users.csv", "--out", out)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["text.parquet", "twice.csv"]
    out.write_text("mine")
    assert "--overwrite" in refused(capsys, "predict", fitted, tables / "users.csv", "--out", out)
    assert out.read_text() == "mine"


@pytest.mark.parametrize("command", ["predict", "personalize"])
def test_nothing_private_is_written_where_all_may_be_published(
    command: str, tables: Path, copy: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    table = tables / ("users.csv" if command == "predict" else "new.csv")
    link = tmp_path / "link"
    link.symlink_to(copy)
    before = {path: path.stat().st_mtime_ns for path in copy.rglob("*")}
    for out in (copy / "p.csv", copy / "billboard" / "p.csv", copy / "private" / ".." / "p.csv", link / "p.csv"):
        assert "may be published" in refused(capsys, command, copy, table, "--out", out)
    heads = copy / "private" / "heads.parquet"
    assert "heads of the model" in refused(capsys, command, copy, table, "--out", heads, "--overwrite")
    assert {path: path.stat().st_mtime_ns for path in copy.rglob("*")} == before
    for out in (copy / "private" / "p.csv", tmp_path / "model.csv"):
        assert run(capsys, command, copy, table, "--out", out)[0] == 0
        assert stat.S_IMODE(out.stat().st_mode) == 0o600


def test_a_model_fitted_on_arrays_asks_for_column_names(
    tables: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    rows = make_rows(50)
    X = np.column_stack([rows[name] for name in FEATURES])
    PrivateFedRep(1, epsilon=4.0).fit(X, rows["y"], groups=rows["user"]).save(tmp_path / "m")
    table = write(tmp_path / "t.csv", rows)
    command = ["predict", tmp_path / "m", table, "--out", tmp_path / "p.csv"]
    assert "--user" in refused(capsys, *command)
    assert "6 features" in refused(capsys, *command, "--user", "user")  # y would be a seventh
    assert run(capsys, *command, "--user", "user", "--features", ",".join(FEATURES))[0] == 0


# personalize


def test_new_users_join_the_heads(tables: Path, copy: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(capsys, "personalize", copy, tables / "new.csv")[1].startswith("Users: 5 more, 405 in all")
    out = tmp_path / "p.csv"
    assert run(capsys, "predict", copy, tables / "new.csv", "--out", out)[0] == 0
    rows = make_rows(5, first=1000, seed=1)
    chosen = rows["user"] == 1002
    X = pd.DataFrame({name: rows[name][chosen] for name in FEATURES})
    head = PrivateFedRep.load(copy).personalize(X, rows["y"][chosen])
    np.testing.assert_allclose(np.array(predictions(out))[chosen], head.predict(X), rtol=1e-9)
    assert run(capsys, "predict", copy, tables / "users.csv", "--out", tmp_path / "old.csv")[0] == 0
    assert "user 1000" in refused(capsys, "personalize", copy, tables / "new.csv")
    assert run(capsys, "personalize", copy, tables / "new.csv", "--replace")[1].startswith(
        "Users: 0 more, 5 with a new"
    )
    assert stat.S_IMODE((copy / "private" / "heads.parquet").stat().st_mode) == 0o600


def test_replacing_some_leaves_the_others(
    tables: Path, fitted: Path, copy: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    table = write(tmp_path / "again.csv", make_rows(3, first=7, seed=5))
    assert run(capsys, "personalize", copy, table, "--replace")[0] == 0
    assert run(capsys, "predict", fitted, tables / "users.parquet", "--out", tmp_path / "a.parquet")[0] == 0
    assert run(capsys, "predict", copy, tables / "users.parquet", "--out", tmp_path / "b.parquet")[0] == 0
    a, b = pq.read_table(tmp_path / "a.parquet"), pq.read_table(tmp_path / "b.parquet")
    same = np.isclose(a["prediction"].to_numpy(), b["prediction"].to_numpy(), rtol=1e-12)
    others = ~np.isin(a["user"].to_numpy(), [7, 8, 9])
    assert same[others].all()
    assert not same[~others].all()


@pytest.mark.parametrize("suffix", [".json", ".csv", ".parquet"])
def test_heads_in_a_file_of_their_own(
    suffix: str, tables: Path, fitted: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / f"heads{suffix}"
    before = (fitted / "private" / "heads.parquet").read_bytes()
    code, said, _ = run(capsys, "personalize", fitted, tables / "new.csv", "--out", out)
    assert code == 0
    assert str(out) in said
    assert stat.S_IMODE(out.stat().st_mode) == 0o600
    assert (fitted / "private" / "heads.parquet").read_bytes() == before
    if suffix == ".json":
        first = json.loads(out.read_text())["heads"][0]
        user, intercept, weights = first["user"], first["intercept"], [first["weights"][name] for name in FEATURES]
    else:
        lines = out.read_text().splitlines() if suffix == ".csv" else []
        row = next(csv.DictReader(lines)) if lines else pq.read_table(out).to_pylist()[0]
        user, intercept = int(row["user"]), float(row["intercept"])
        weights = [float(row[f"weight_{name}"]) for name in FEATURES]
    rows = make_rows(5, first=1000, seed=1)
    chosen = rows["user"] == user
    X = pd.DataFrame({name: rows[name][chosen] for name in FEATURES})
    head = PrivateFedRep.load(fitted).personalize(X, rows["y"][chosen])
    np.testing.assert_allclose(weights, head.weights, rtol=1e-9)
    assert intercept == pytest.approx(head.intercept, rel=1e-9)
    assert "--overwrite" in refused(capsys, "personalize", fitted, tables / "new.csv", "--out", out)


@pytest.mark.parametrize("suffix", [".csv", ".parquet"])
def test_one_users_table_needs_no_user_column(
    suffix: str, copy: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    rows = make_rows(1, seed=2)
    full = write(tmp_path / f"full{suffix}", rows)
    own = write(tmp_path / f"own{suffix}", {name: rows[name] for name in rows if name != "user"})
    assert "'user'" in refused(capsys, "personalize", copy, own)
    assert "--user-id" in refused(capsys, "personalize", copy, full, "--user-id", "9000")
    assert "integer" in refused(capsys, "personalize", copy, own, "--user-id", "me")
    assert run(capsys, "personalize", copy, own, "--user-id", "9000")[0] == 0
    heads = models.load(copy).heads
    assert heads is not None
    assert heads.ids[-1] == 9000
    bad = write(tmp_path / f"bad{suffix}", {**{n: rows[n] for n in rows if n != "user"}, "x3": np.full(6, np.inf)})
    said = refused(capsys, "personalize", copy, bad, "--user-id", "9001")
    assert "'x3'" in said
    assert str(bad) in said


def test_a_published_copy_personalises_too(
    tables: Path, copy: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """What a client gets: the folder without private/."""
    (copy / "private" / "heads.parquet").unlink()
    (copy / "private").rmdir()
    code, said, _ = run(capsys, "predict", copy, tables / "new.csv", "--out", tmp_path / "before.csv")
    assert code == 0
    assert f"{copy} holds no heads (private/)" in said
    assert "made from private rows" in said
    assert "of 5 users without a head: predicted with the prior mean" in said
    refusal = refused(capsys, "predict", copy, tables / "new.csv", "--out", tmp_path / "r.csv", "--refuse-unknown")
    assert "has no head in" in refusal
    assert "no heads here" in run(capsys, "inspect", copy)[1]
    assert run(capsys, "personalize", copy, tables / "new.csv")[0] == 0
    assert run(capsys, "predict", copy, tables / "new.csv", "--out", tmp_path / "p.csv")[0] == 0


def test_without_heads_ids_are_as_they_are_written(
    copy: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (copy / "private" / "heads.parquet").unlink()
    rows = make_rows(2)
    rows["user"] = np.where(rows["user"] == 0, "0090", "90")
    table = write(tmp_path / "t.csv", rows)
    assert run(capsys, "personalize", copy, table, "--out", tmp_path / "heads.csv")[1].startswith("2 heads")
    assert run(capsys, "personalize", copy, table)[1].startswith("Users: 2 more, 2 in all")
    heads = models.load(copy).heads
    assert heads is not None
    assert sorted(heads.ids) == ["0090", "90"]
    assert run(capsys, "predict", copy, table, "--out", tmp_path / "p.csv")[0] == 0
    own = write(tmp_path / "own.csv", {name: rows[name] for name in rows if name != "user"})
    assert run(capsys, "personalize", copy, own, "--user-id", "090")[1].startswith("Users: 1 more, 3 in all")
    (copy / "private" / "heads.parquet").unlink()
    assert run(capsys, "personalize", copy, own, "--user-id", "090")[0] == 0
    heads = models.load(copy).heads
    assert heads is not None
    assert heads.ids.tolist() == ["090"]


def test_personalize_refuses_and_changes_nothing(
    tables: Path, copy: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    before = (copy / "private" / "heads.parquet").read_bytes()
    bad = edited(tables / "new.csv", 3, "y", "inf")
    assert "'y'" in refused(capsys, "personalize", copy, bad)
    text = write(tmp_path / "text.parquet", {**make_rows(2), "user": np.array(["a", "b"] * 6)})
    assert "text" in refused(capsys, "personalize", copy, text)
    assert "heads.txt" in refused(capsys, "personalize", copy, tables / "new.csv", "--out", tmp_path / "heads.txt")
    assert (copy / "private" / "heads.parquet").read_bytes() == before
    assert not (tmp_path / "heads.txt").exists()


# several targets


def two_targets(tables: Path, folder: Path) -> Path:
    table = pq.read_table(tables / "users.parquet")
    rng = np.random.default_rng(5)
    other = 30 * table["x1"].to_numpy() - 10 * table["y"].to_numpy() + rng.normal(size=len(table))
    pq.write_table(table.append_column("z", pa.array(other)), folder / "two.parquet")
    return folder / "two.parquet"


def test_several_targets_end_to_end(tables: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    table, out = two_targets(tables, tmp_path), tmp_path / "model"
    command = ["fit", table, "--user", "user", "--target", "y, z", *BUDGET, "--rank", "2", "--simulate", "7"]
    code, said, _ = run(capsys, *command, "--out", out)
    assert code == 0
    assert "Targets: y, z; a head for each" in said
    assert "Users: 400; rank 2 of 6 features" in said
    rows = pq.read_table(table).to_pandas()
    estimator = PrivateFedRep(2, epsilon=4.0, delta=1e-6, random_state=7)
    estimator.fit(rows[FEATURES], rows[["y", "z"]], groups=rows["user"])
    expected = estimator.predict(rows[FEATURES], groups=rows["user"])
    for suffix in ("csv", "parquet"):
        made = tmp_path / f"p.{suffix}"
        assert "with their predictions" in run(capsys, "predict", out, table, "--out", made)[1]
        read = pd.read_csv(made) if suffix == "csv" else pq.read_table(made).to_pandas()
        assert list(read.columns) == [*rows.columns, "prediction_y", "prediction_z"]
        np.testing.assert_allclose(read[["prediction_y", "prediction_z"]], expected, rtol=1e-9, atol=1e-9)
    assert "'prediction_y'" in refused(capsys, "predict", out, tmp_path / "p.csv", "--out", tmp_path / "q.csv")
    assert "targets y, z" in " ".join(run(capsys, "inspect", out)[1].split())


@pytest.mark.parametrize("suffix", [".json", ".csv", ".parquet"])
def test_several_targets_of_new_users(
    suffix: str, tables: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    table, out = two_targets(tables, tmp_path), tmp_path / "model"
    assert run(capsys, "fit", table, "--user", "user", "--target", "y,z", *BUDGET, "--rank", "2", "--out", out)[0] == 0
    rows = make_rows(3, first=1000, seed=1)
    new = write(tmp_path / "new.csv", {**rows, "z": rows["y"] * 2})
    assert "2 targets" in refused(capsys, "personalize", out, new, "--target", "y")
    heads = tmp_path / f"heads{suffix}"
    assert run(capsys, "personalize", out, new, "--out", heads)[1].startswith("3 heads")
    if suffix == ".json":
        lines = [{**one, **{f"weight_{n}": w for n, w in one["weights"].items()}} for one in _heads_of(heads)]
    else:
        text = suffix == ".csv"
        lines = list(csv.DictReader(heads.read_text().splitlines())) if text else pq.read_table(heads).to_pylist()
    assert [(int(line["user"]), line["target"]) for line in lines] == [
        (user, target) for user in (1000, 1001, 1002) for target in ("y", "z")
    ]
    assert run(capsys, "personalize", out, new)[1].startswith("Users: 3 more, 403 in all")
    assert run(capsys, "personalize", out, new, "--replace")[1].startswith("Users: 0 more, 3 with a new")
    assert run(capsys, "predict", out, new, "--out", tmp_path / "p.csv")[0] == 0
    made = pd.read_csv(tmp_path / "p.csv")
    first = made[made["user"] == 1000]
    for target, line in zip(("y", "z"), lines[:2], strict=True):
        by_hand = float(line["intercept"]) + sum(float(line[f"weight_{name}"]) * first[name] for name in FEATURES)
        np.testing.assert_allclose(first[f"prediction_{target}"], by_hand, rtol=1e-6, atol=1e-9)


def _heads_of(path: Path) -> list[dict[str, Any]]:
    return list(json.loads(path.read_text())["heads"])


def _lines_of(path: Path) -> list[dict[str, Any]]:
    return list(csv.DictReader(path.read_text().splitlines()))


# categories


def make_shops(users: int = 600) -> dict[str, Any]:
    """Each user likes one of two kinds of shops; one user alone was in a shop of its own."""
    rng = np.random.default_rng(3)
    ids = np.repeat(np.arange(users), 8)
    shop, price = rng.integers(0, 5, len(ids)), rng.normal(size=len(ids))
    y = rng.normal(size=users)[ids] * (shop % 2) + 0.3 * price + 0.1 * rng.normal(size=len(ids))
    names = np.array([f"shop {number}" for number in shop], dtype=object)
    names[0] = "the secret one"
    return {"user": ids, "y": y, "shop": names, "colour": np.array(["red", "blue"])[shop % 2], "price": price}


SHOPS = [*COLUMNS, *BUDGET, "--categorical", "shop,colour"]


@pytest.fixture(scope="module")
def shops(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("shops")
    rows = make_shops()
    pq.write_table(pa.table({**rows, "note": [""] * len(rows["y"])}), folder / "shops.parquet")
    write(folder / "shops.csv", rows)
    (folder / "colours.json").write_text('{"colour": ["blue", "red", "green"]}')
    return folder


@pytest.mark.parametrize("name", ["shops.csv", "shops.parquet"])
def test_categories_end_to_end(name: str, shops: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """A list that is declared is used as it is; another is selected, and a value of one user alone is in no file."""
    out, colours = tmp_path / "model", ["--categories", shops / "colours.json"]
    code, said, noted = run(capsys, "fit", shops / name, *SHOPS, *colours, "--out", out)
    assert code == 0
    assert "Values of shop: 5 named (selected privately); rows with others have no such feature" in said
    assert "Values of colour: 3 named (declared)" in said
    assert "of 9 features" in said
    assert ("note" in noted) == (name == "shops.parquet")
    fitted = models.load(out)
    listed = (tuple(f"shop {number}" for number in range(5)), ("blue", "red", "green"))
    assert fitted.columns == Columns("user", ("y",), ("price",), ("shop", "colour"), listed)
    assert [event for event, _ in fitted.privacy.events][:2] == ["keys-1/keys", "scales/sizes"]
    for path in out.rglob("*"):
        assert path.is_dir() or b"the secret one" not in path.read_bytes()
    said = " ".join(run(capsys, "inspect", out)[1].split())
    for words in ("shop (5), colour (3)", "some declared, the others selected privately", "5e-08 of delta"):
        assert words in said
    code, said, _ = run(capsys, "predict", out, shops / name, "--out", tmp_path / "p.csv")
    assert code == 0
    assert "1 row with a value of shop that the model does not know: predicted without that feature" in said
    errors = pd.read_csv(tmp_path / "p.csv").eval("(prediction - y) ** 2").mean()
    assert errors < 0.15  # a constant for each user leaves 0.34
    assert run(capsys, "predict", out, shops / "shops.csv", "--out", tmp_path / "p.parquet")[0] == 0
    assert pq.read_table(tmp_path / "p.parquet")["shop"][0].as_py() == "the secret one"


def test_new_users_of_a_model_with_categories(shops: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out, rows = tmp_path / "model", make_shops(3)
    assert run(capsys, "fit", shops / "shops.csv", *SHOPS, "--out", out)[0] == 0
    new = write(tmp_path / "new.csv", {**rows, "user": rows["user"] + 5000})
    assert run(capsys, "personalize", out, new, "--out", tmp_path / "heads.csv")[0] == 0
    line = next(csv.DictReader((tmp_path / "heads.csv").read_text().splitlines()))
    assert [name for name in line if name.startswith("weight_")][:2] == ["weight_price", "weight_shop=shop 0"]
    assert run(capsys, "personalize", out, new)[1].startswith("Users: 3 more, 603 in all")
    assert run(capsys, "predict", out, new, "--out", tmp_path / "p.csv")[0] == 0
    first = pd.read_csv(tmp_path / "p.csv").iloc[1]
    weights = [float(line[f"weight_shop={first['shop']}"]), float(line[f"weight_colour={first['colour']}"])]
    by_hand = float(line["intercept"]) + float(line["weight_price"]) * first["price"] + sum(weights)
    assert first["prediction"] == pytest.approx(by_hand, rel=1e-9)
    renamed = write(tmp_path / "renamed.csv", {("store" if n == "shop" else n): v for n, v in rows.items()})
    assert "'shop'" in refused(capsys, "predict", out, renamed, "--out", tmp_path / "q.csv")
    numbers = write(tmp_path / "numbers.parquet", {**rows, "shop": np.arange(24)})
    assert "'shop'" in refused(capsys, "predict", out, numbers, "--out", tmp_path / "q.csv")


def test_only_categories_are_features_enough(shops: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    rows = {name: values for name, values in make_shops().items() if name != "price"}
    out, table = tmp_path / "model", write(tmp_path / "t.csv", rows)
    assert "of 7 features" in run(capsys, "fit", table, *SHOPS, "--out", out)[1]
    said = " ".join(run(capsys, "inspect", out)[1].split())
    assert "selected privately, from those that enough users hold" in said
    assert "declared" not in said
    assert models.load(out).columns.features == ()


@pytest.mark.parametrize(
    "content",
    [
        "no",
        "[1]",
        '{"colour": "red"}',
        '{"colour": []}',
        '{"colour": ["red", "red"]}',
        '{"colour": ["red", 1]}',
        '{"colour": [1.5]}',
        '{"price": [1]}',
    ],
)
def test_bad_lists_of_categories_are_refused(
    content: str, shops: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "lists.json"
    file.write_text(content)
    command = ["fit", shops / "shops.csv", *SHOPS, "--categories", file, "--out", tmp_path / "model"]
    assert "--categories" in refused(capsys, *command)
    assert list(tmp_path.iterdir()) == [file]


def test_a_bad_value_costs_nothing_where_categories_are_selected(
    shops: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Selecting comes first and costs; the table is looked at before."""
    bad = edited(shops / "shops.csv", 1234, "price", "inf")
    said = refused(capsys, "fit", bad, *SHOPS, "--out", tmp_path / "model")
    assert "'price'" in said
    assert "row 1234" in said
    decimal = pq.read_table(shops / "shops.parquet")
    decimal = decimal.set_column(decimal.column_names.index("shop"), "shop", decimal["price"])
    pq.write_table(decimal, tmp_path / "decimal.parquet")
    code, _, said = run(capsys, "fit", tmp_path / "decimal.parquet", *SHOPS, "--out", tmp_path / "model")
    assert code == 2
    assert "'shop'" in said.splitlines()[-1]
    assert not (tmp_path / "model").exists()


def test_an_empty_cell_is_no_category(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    rows = make_shops()
    rows["shop"][rows["shop"] == "shop 0"] = ""
    table = write(tmp_path / "t.csv", rows)
    assert "Values of shop: 4 named" in run(capsys, "fit", table, *SHOPS, "--out", tmp_path / "model")[1]
    assert "" not in models.load(tmp_path / "model").columns.by_category["shop"]


def test_sizes_of_declared_categories(shops: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out, sizes = tmp_path / "model", tmp_path / "scale.json"
    command = ["fit", shops / "shops.csv", *COLUMNS, *BUDGET, "--features", "price", "--categorical", "colour"]
    command += ["--categories", shops / "colours.json", "--scale", sizes, "--out", out]
    sizes.write_text(json.dumps({"price": 1}))
    assert "'colour=blue'" in refused(capsys, *command)
    sizes.write_text(json.dumps({"price": 1, "colour=blue": 0.7, "colour=red": 0.7, "colour=green": 0.1}))
    assert run(capsys, *command)[0] == 0
    assert models.load(out).config.scale == (1.0, 0.7, 0.7, 0.1)
    assert not any("keys" in name or name == "scales/sizes" for name, _ in models.load(out).privacy.events)


def test_values_that_are_too_rare_to_be_named(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """One sentence; what was spent stays on record, and repeating the command spends no more."""
    rows = make_shops(60)
    table = write(tmp_path / "t.csv", {**rows, "shop": np.array([f"shop of {user}" for user in rows["user"]])})
    said = run(capsys, "fit", table, *SHOPS, "--out", tmp_path / "other")[1]  # prices are left
    assert "Values of shop: 0 named (selected privately); no value is held by enough users" in said
    assert models.load(tmp_path / "other").columns.named == {}
    predict = ["predict", tmp_path / "other", table, "--out", tmp_path / "p.csv"]
    assert run(capsys, *predict)[0] == 0
    command = ["fit", table, *COLUMNS, *BUDGET, "--features", "", "--categorical", "shop", "--out", tmp_path / "model"]
    said = refused(capsys, *command)
    assert "no value of column 'shop'" in said
    assert "shop of" not in said
    spent = (tmp_path / "model" / "ledger.jsonl").read_text()
    code, _, noted = run(capsys, *command)
    assert code == 2
    assert "Continuing" in noted
    assert (tmp_path / "model" / "ledger.jsonl").read_text() == spent
    assert json.loads(run(capsys, "inspect", tmp_path / "model", "--json")[1])["share_spent"] < 0.06
    code, said, _ = run(capsys, "inspect", tmp_path / "model")
    assert code == 0
    assert "shop (not declared)" in " ".join(said.split())


Command = Sequence[str | Path]


def kill_at(place: str, page: str, command: Command) -> None:
    """Run a command in a process that dies where the keys of a page were charged, or where the page was posted."""
    die = (
        "import os, sys\n"
        "from privrep import cli\n"
        "from privrep.privacy.ledger import Ledger\n"
        "from privrep.privacy.billboard import Billboard\n"
        "charge, post = Ledger.charge, Billboard._post\n"
        "def new_charge(ledger, events):\n"
        "    charge(ledger, events)\n"
        f"    if '{page}/keys' in events and {place == 'charge'}: os._exit(9)\n"
        "def new_post(board, page):\n"
        "    post(board, page)\n"
        f"    if page.name == '{page}': os._exit(9)\n"
        "Ledger.charge, Billboard._post = new_charge, new_post\n"
        "cli.main(sys.argv[1:])\n"
    )
    assert subprocess.run([sys.executable, "-c", die, *map(str, command)]).returncode == 9


def assert_it_goes_on(
    capsys: pytest.CaptureFixture[str], command: Command, out: Path, changes: Sequence[Command]
) -> None:
    """Hold a fit that was killed to one that was not; with other settings it does not go on."""
    whole = out.with_name("whole")
    for change in changes:
        assert "other settings" in refused(capsys, *command, out, *change)
    code, _, noted = run(capsys, *command, out)
    assert code == 0
    assert "Continuing" in noted
    assert run(capsys, *command, whole)[0] == 0
    assert (out / "ledger.jsonl").read_text() == (whole / "ledger.jsonl").read_text()
    assert models.load(out).columns == models.load(whole).columns
    assert np.array_equal(models.load(out).representation.basis, models.load(whole).representation.basis)


@pytest.mark.parametrize("place", ["charge", "post"])
def test_a_fit_killed_while_it_selects_values_spends_nothing_twice(
    place: str, shops: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Dead between the charge of the second selection and its page: the charge is on record, and pays for one draw."""
    out = tmp_path / "model"
    command = ["fit", shops / "shops.csv", *SHOPS, "--simulate", "1", "--out"]
    kill_at(place, "keys-2", [*command, out])
    report = json.loads(run(capsys, "inspect", out, "--json")[1])
    assert [event["name"] for event in report["events"]] == ["keys-1/keys", "keys-2/keys"]
    assert (out / "billboard" / "0001-keys-2.safetensors").exists() == (place == "post")
    assert_it_goes_on(capsys, command, out, [["--categories", shops / "colours.json"]])


# classification


TREES = np.array(["ash", "birch", "cedar"], dtype=object)
LABELS = ["--user", "user", "--target", "tree", *BUDGET, "--task", "classification", "--rank", "2"]
LABELS += ["--features", ",".join(FEATURES)]


def make_labels(users: int = 500, first: int = 0, seed: int = 0) -> dict[str, Any]:
    """Three trees; one user alone has a label of its own in its first row."""
    rng = np.random.default_rng(seed)
    table = make_class_population(rng, users, len(FEATURES), 2, 8, 3, strength=4.0).sample(rng, np.float64)
    codes = table.y.astype(np.int64)
    trees = TREES[codes]
    trees[0] = "the secret one"
    ids = np.repeat(table.ids + first, table.sizes)
    shuffled = rng.permutation(len(ids))
    columns = {"user": ids, "tree": trees, "code": codes, "tall": codes > 0}
    columns |= {name: table.X[:, j] for j, name in enumerate(FEATURES)}
    return {name: values[shuffled] for name, values in columns.items()}


@pytest.fixture(scope="module")
def trees(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("trees")
    rows = make_labels()
    write(folder / "trees.parquet", rows)
    write(folder / "trees.csv", rows)
    write(folder / "new.csv", make_labels(4, first=5000, seed=1))
    (folder / "trees.json").write_text('["cedar", "birch", "ash", "elm"]')
    return folder


@pytest.fixture(scope="module")
def forest(trees: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("forest") / "model"
    done("fit", trees / "trees.csv", *LABELS, "--out", out)
    return out


def features_of(rows: Any) -> Any:
    return np.column_stack([rows[name] for name in FEATURES])


def test_a_label_of_one_user_alone_is_in_no_file(forest: Path, capsys: pytest.CaptureFixture[str]) -> None:
    fitted = models.load(forest)
    assert fitted.columns == Columns("user", ("tree",), tuple(FEATURES), classes=tuple(TREES))
    assert fitted.config.loss == "log"
    assert fitted.classes_selected
    assert [event for event, _ in fitted.privacy.events][:2] == ["classes/keys", "scales/sizes"]
    files = [path for path in forest.rglob("*") if path.is_file()]
    assert len(files) > 10
    for path in files:
        assert "private" in path.parts or b"the secret one" not in path.read_bytes()
    said = run(capsys, "inspect", forest)[1] + run(capsys, "inspect", forest, "--json")[1]
    assert "cedar" in said
    assert "the secret one" not in said


@pytest.mark.parametrize("name", ["trees.csv", "trees.parquet"])
@pytest.mark.parametrize("loss", ["log", "hinge"])
def test_fit_of_labels_equals_the_estimator(
    name: str, loss: str, trees: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """In memory and from a file, the same noise gives the same classes, representation, outputs and words."""
    out = tmp_path / "model"
    code, said, _ = run(capsys, "fit", trees / name, *LABELS, "--loss", loss, "--simulate", "7", "--out", out)
    assert code == 0
    assert "Classes: 3 (ash, birch, cedar), selected privately; other labels are ignored" in said
    assert "and a level of each user's own" in said
    rows = pd.read_csv(trees / "trees.csv")
    estimator = PrivateFedRepClassifier(2, epsilon=4.0, delta=1e-6, loss=loss, random_state=7)
    estimator.fit(features_of(rows), rows["tree"], groups=rows["user"])
    loaded = PrivateFedRepClassifier.load(out)
    assert loaded.model_.config == estimator.model_.config
    assert np.array_equal(loaded.representation_, estimator.representation_)
    assert loaded.privacy_ == estimator.privacy_
    assert run(capsys, "predict", out, trees / name, "--out", tmp_path / "p.csv")[0] == 0
    written = pd.read_csv(tmp_path / "p.csv")
    assert written["prediction"].tolist() == estimator.predict(features_of(rows), groups=rows["user"]).tolist()
    chances = [column for column in written if column.startswith("probability_")]
    assert chances == ([f"probability_{tree}" for tree in TREES] if loss == "log" else [])
    if chances:
        expected = estimator.predict_proba(features_of(rows), groups=rows["user"])
        assert np.allclose(written[chances], expected, atol=1e-9)


@pytest.mark.parametrize(
    ("target", "options", "classes", "selected"),
    [
        ("tree", ["--classes", "cedar, birch,ash"], ("ash", "birch", "cedar"), False),
        ("tree", ["--classes", "trees.json"], ("ash", "birch", "cedar", "elm"), False),
        ("code", [], (0, 1, 2), True),
        ("code", ["--classes", "0,1,2"], (0, 1, 2), False),
        ("tall", [], (False, True), False),
        ("tall", ["--classes", "true,false"], (False, True), False),
        ("tree", ["--method", "centaur"], ("ash", "birch", "cedar"), True),
    ],
    ids=["list", "file", "integers", "integers, list", "booleans", "booleans, list", "centaur"],
)
def test_kinds_of_labels(
    target: str,
    options: list[str],
    classes: Any,
    selected: bool,
    trees: Path,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    out = tmp_path / "model"
    options = [str(trees / option) if option.endswith(".json") else option for option in options]
    code, said, _ = run(capsys, "fit", trees / "trees.parquet", *LABELS, "--target", target, *options, "--out", out)
    assert code == 0
    assert f"Classes: {len(classes)} ({', '.join(map(str, classes))}), " in said
    assert ("selected privately" in said, "declared" in said) == (selected, not selected)
    fitted = models.load(out)
    assert fitted.columns.classes == classes
    assert [type(value) for value in fitted.columns.classes] == [type(value) for value in classes]
    assert ("classes/keys" in [name for name, _ in fitted.privacy.events]) == selected
    assert PrivateFedRepClassifier.load(out).classes_.tolist() == list(classes)
    assert run(capsys, "predict", out, trees / "trees.parquet", "--out", tmp_path / "p.parquet")[0] == 0
    written = pq.read_table(tmp_path / "p.parquet")
    same = np.asarray(written["prediction"].to_pylist()) == np.asarray(written[target].to_pylist())
    assert same.mean() > 0.7
    assert type(written["prediction"][0].as_py()) is type(written[target][0].as_py())


def test_integers_of_a_csv_file_are_text_unless_declared(
    trees: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Their types are not read off values, which are private."""
    command = ["fit", trees / "trees.csv", *LABELS, "--target", "code", "--out"]
    assert run(capsys, *command, tmp_path / "text")[0] == 0
    assert models.load(tmp_path / "text").columns.classes == ("0", "1", "2")
    (tmp_path / "codes.json").write_text("[0, 1, 2]")
    assert run(capsys, *command, tmp_path / "numbers", "--classes", tmp_path / "codes.json")[0] == 0
    assert models.load(tmp_path / "numbers").columns.classes == (0, 1, 2)
    for content in ("no", '{"a": 1}', "[1]", "[1, 1]", '[1, "a"]'):
        (tmp_path / "codes.json").write_text(content)
        assert "--classes" in refused(capsys, *command, tmp_path / "other", "--classes", tmp_path / "codes.json")
    assert not (tmp_path / "other").exists()


def test_inspect_tells_which_classes_and_how_they_were_found(
    forest: Path, trees: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    said = " ".join(run(capsys, "inspect", forest)[1].split())
    assert "The classes - 3 (ash, birch, cedar)." in said
    assert "Selected privately, from the labels that enough users have" in said
    report = json.loads(run(capsys, "inspect", forest, "--json")[1])
    assert report["columns"]["classes"] == list(TREES)
    assert report["words"]["The classes"][0] == "3 (ash, birch, cedar)."
    out = tmp_path / "model"
    assert run(capsys, "fit", trees / "trees.csv", *LABELS, "--classes", "ash,birch,cedar", "--out", out)[0] == 0
    said = " ".join(run(capsys, "inspect", out)[1].split())
    assert "taken as a public fact, not computed from the users, and so not protected" in said
    assert "Selected privately" not in said


def test_selected_classes_do_not_pass_for_declared_lists(forest: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Nor are they counted among lists of features' values."""
    assert "declared" not in " ".join(run(capsys, "inspect", forest)[1].split()).lower()
    report = json.loads(run(capsys, "inspect", forest, "--json")[1])
    assert not any("list" in sentence for sentence in report["words"]["What is not protected"])


def test_classes_and_categories_are_selected_from_one_share(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    rows = make_labels()
    rows["shop"] = np.array([f"shop {number}" for number in np.arange(len(rows["user"])) % 4])
    table, out = write(tmp_path / "t.csv", rows), tmp_path / "model"
    code, said, _ = run(capsys, "fit", table, *LABELS, "--categorical", "shop", "--out", out)
    assert code == 0
    assert "Values of shop: 4 named (selected privately)" in said
    assert "Classes: 3 (ash, birch, cedar), selected privately" in said
    fitted = models.load(out)
    selections = [(name, event.delta) for name, event in fitted.privacy.events if name.endswith("/keys")]
    assert selections == [("classes/keys", pytest.approx(2.5e-8)), ("keys-1/keys", pytest.approx(2.5e-8))]
    assert run(capsys, "predict", out, table, "--out", tmp_path / "p.csv")[0] == 0


def test_labels_that_cannot_be_used(trees: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = tmp_path / "model"
    for name in ("trees.csv", "trees.parquet"):
        numbers = ["--user", "user", "--target", "tree", *BUDGET, "--features", ",".join(FEATURES), "--out", out]
        said = refused(capsys, "fit", trees / name, *numbers)
        assert "or fit with --task classification if it holds labels" in said
    command = ["fit", trees / "trees.parquet", *LABELS, "--out", out]
    assert "'x0' holds values of type double" in refused(capsys, *command, "--target", "x0", "--features", "x1,x2")
    assert "holds integers and the classes are text" in refused(
        capsys, *command, "--target", "code", "--classes", "a,b"
    )
    assert not out.exists()


def test_labels_too_rare_to_be_named(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """One sentence that tells how to go on; what was spent stays on record, and repeating it spends no more."""
    rows = make_labels(60)
    table = write(tmp_path / "t.csv", {**rows, "tree": np.array([f"tree of {user}" for user in rows["user"]])})
    command = ["fit", table, *LABELS, "--out", tmp_path / "model"]
    said = refused(capsys, *command)
    assert "fewer than two classes" in said
    assert "--classes" in said
    assert "tree of" not in said
    spent = (tmp_path / "model" / "ledger.jsonl").read_text()
    code, _, noted = run(capsys, *command)
    assert code == 2
    assert "Continuing" in noted
    assert (tmp_path / "model" / "ledger.jsonl").read_text() == spent
    said = " ".join(run(capsys, "inspect", tmp_path / "model")[1].split())
    assert "Not declared: they are selected privately" in said


@pytest.mark.parametrize("place", ["charge", "post"])
def test_a_fit_killed_while_it_selects_classes_spends_nothing_twice(
    place: str, trees: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "model"
    command = ["fit", trees / "trees.csv", *LABELS, "--simulate", "1", "--out"]
    kill_at(place, "classes", [*command, out])
    report = json.loads(run(capsys, "inspect", out, "--json")[1])
    assert [event["name"] for event in report["events"]] == ["classes/keys"]
    assert_it_goes_on(capsys, command, out, [["--classes", "ash,birch,cedar"], ["--loss", "hinge"]])


def test_new_users_of_a_classifier(
    forest: Path, trees: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "model"
    models.save(models.load(forest), out)
    assert run(capsys, "personalize", out, trees / "new.csv")[1].startswith("Users: 4 more, 504 in all")
    assert run(capsys, "predict", out, trees / "new.csv", "--out", tmp_path / "p.csv")[0] == 0
    written = pd.read_csv(tmp_path / "p.csv")
    estimator, new = PrivateFedRepClassifier.load(forest), pd.read_csv(trees / "new.csv")
    mine = new["user"] == 5002
    head = estimator.personalize(new.loc[mine, FEATURES], new["tree"][mine])
    assert np.allclose(
        written.loc[mine, "probability_ash"], head.predict_proba(features_of(new[mine]))[:, 0], atol=1e-9
    )
    wrong = write(tmp_path / "wrong.parquet", {**make_labels(4, 6000), "tree": np.arange(32)})
    assert "holds integers and the classes are text" in refused(capsys, "personalize", out, wrong)


@pytest.mark.parametrize("suffix", [".json", ".csv", ".parquet"])
@pytest.mark.parametrize("target", ["tree", "tall"])
def test_weights_of_a_classifier(
    suffix: str, target: str, trees: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """A file says what it takes to predict by hand."""
    out, file = tmp_path / "model", tmp_path / f"heads{suffix}"
    assert run(capsys, "fit", trees / "trees.parquet", *LABELS, "--target", target, "--out", out)[0] == 0
    new = write(tmp_path / "new.parquet", make_labels(4, first=5000, seed=1))
    assert run(capsys, "personalize", out, new, "--out", file)[0] == 0
    read = {".json": _heads_of, ".csv": _lines_of, ".parquet": lambda path: pq.read_table(path).to_pylist()}
    heads = read[suffix](file)
    named = [True if head["class"] == "True" else head["class"] for head in heads]
    assert named == (list(TREES) * 4 if target == "tree" else [True] * 4)
    if suffix == ".json":
        told = json.loads(file.read_text())
        assert told["classes"] == (list(TREES) if target == "tree" else [False, True])
        assert ("largest" in told["prediction"], "positive" in told["prediction"]) == (
            target == "tree",
            target == "tall",
        )
        rows = pq.read_table(new).to_pandas()
        X = features_of(rows[rows["user"] == 5001])
        mine = [head for head in heads if head["user"] == 5001]
        outputs = np.column_stack([head["intercept"] + X @ np.array([*head["weights"].values()]) for head in mine])
        run(capsys, "personalize", out, new)
        assert run(capsys, "predict", out, new, "--out", tmp_path / "p.csv")[0] == 0
        written = pd.read_csv(tmp_path / "p.csv").query("user == 5001")["prediction"].tolist()
        by_hand = TREES[outputs.argmax(axis=1)] if target == "tree" else outputs[:, 0] > 0
        assert by_hand.tolist() == written


# ratings


def make_ratings(users: int = 1500, first: int = 0, seed: int = 0) -> dict[str, Any]:
    rng = np.random.default_rng(seed)
    fixed = np.random.default_rng(100)
    offset, factors = fixed.normal(size=20), 2 * fixed.normal(size=(20, 1))
    ids = np.repeat(np.arange(users), 10)
    items = np.concatenate([rng.choice(20, 10, replace=False) for _ in range(users)])
    taste = rng.normal(size=(users, 1))
    rating = 5 + offset[items] + (factors[items] * taste[ids]).sum(axis=1) + 0.3 * rng.normal(size=len(ids))
    items[0] = 776  # rated by one user alone
    return {"user": ids + first, "joke": items + 1, "rating": rating, "hour": rng.integers(0, 24, len(ids))}


RATINGS = ["--user", "user", "--item", "joke", "--target", "rating", *BUDGET]


@pytest.fixture(scope="module")
def ratings(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("ratings")
    write(folder / "ratings.parquet", make_ratings())
    write(folder / "ratings.csv", make_ratings())
    write(folder / "new.csv", make_ratings(2, first=9000, seed=1))
    (folder / "items.json").write_text(json.dumps([*range(1, 21)]))
    return folder


@pytest.mark.parametrize("name", ["ratings.csv", "ratings.parquet"])
def test_ratings_end_to_end(name: str, ratings: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = tmp_path / "model"
    code, said, noted = run(capsys, "fit", ratings / name, *RATINGS, "--rank", "1", "--out", out)
    assert code == 0
    assert "1,500 users, 20 items, rank 1" in said
    assert "Values of joke: 20 named (selected privately)" in said
    assert "hour" not in noted
    fitted = models.load(out)
    assert fitted.config.ratings
    assert set(fitted.columns.by_category["joke"]) == {str(n) if name.endswith("csv") else n for n in range(1, 21)}
    assert fitted.billboard.read_selection("keys-1").keys == fitted.columns.categories[0]
    words = " ".join(run(capsys, "inspect", out)[1].split())
    for part in ("factorisation of ratings", "joke (20)", "taste-1/pairs", "20 items"):
        assert part in words
    table = pq.read_table(ratings / "ratings.parquet").drop_columns(["rating", "hour"])
    asked = write(tmp_path / f"asked{Path(name).suffix}", {n: table[n].to_numpy() for n in table.column_names})
    code, said, _ = run(capsys, "predict", out, asked, "--out", tmp_path / "p.parquet")
    assert code == 0
    assert "1 row with a value of joke that the model does not know: predicted with the user's level" in said
    made = pq.read_table(tmp_path / "p.parquet")["prediction"].to_numpy()
    estimator = PrivateFactorization.load(out)
    items = table["joke"].to_numpy()
    items = items.astype(str) if name.endswith("csv") else items
    np.testing.assert_allclose(made, estimator.predict(table["user"].to_numpy(), items), rtol=1e-9)
    assert ((made - make_ratings()["rating"]) ** 2).mean() < 1  # their variance is 4.3
    code, said, _ = run(capsys, "personalize", out, ratings / "new.csv")
    assert said.startswith("Users: 2 more, 1,502 in all")
    assert run(capsys, "predict", out, ratings / "new.csv", "--out", tmp_path / "new.csv")[0] == 0
    new = pd.read_csv(tmp_path / "new.csv")
    second = new[new["user"] == 9001]
    items = second["joke"].astype(str) if name.endswith("csv") else second["joke"]
    taste = estimator.personalize(items.to_numpy(), second["rating"].to_numpy())
    np.testing.assert_allclose(second["prediction"], taste.predict(items.to_numpy()), rtol=1e-9)


def test_a_declared_catalogue(ratings: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """It costs nothing, items without a rating are in it, and a CSV file is read as the list says."""
    out, items = tmp_path / "model", tmp_path / "items.json"
    items.write_text(json.dumps([*range(1, 21), 50]))
    command = ["fit", ratings / "ratings.csv", *RATINGS, "--items", items]
    code, said, _ = run(capsys, *command, "--out", out)
    assert code == 0
    assert "1,500 users, 21 items" in said
    assert "21 named (declared)" in said
    assert not any(name.startswith("keys") for name, _ in models.load(out).privacy.events)
    assert "The declared list of items" in " ".join(run(capsys, "inspect", out)[1].split())
    assert "-1" in refused(capsys, *command, "--rank", "-1", "--out", tmp_path / "other")
    assert run(capsys, *command, "--rank", "0", "--out", tmp_path / "level")[0] == 0
    assert models.load(tmp_path / "level").representation.basis.shape[1] == 0
    own = write(tmp_path / "own.csv", {"joke": [1, 2, 50], "rating": [4.0, 5.0, 1.0]})
    heads = tmp_path / "mine.json"
    assert run(capsys, "personalize", out, own, "--user-id", "77777", "--out", heads)[0] == 0
    assert next(iter(_heads_of(heads)[0]["weights"])) == "joke=1"
    renamed = write(tmp_path / "renamed.csv", {"user": [3], "title": [2]})
    assert "'joke'" in refused(capsys, "predict", out, renamed, "--out", tmp_path / "p.csv")
    assert run(capsys, "predict", out, renamed, "--item", "title", "--out", tmp_path / "p.csv")[0] == 0
    assert "--features" in refused(capsys, "predict", out, renamed, "--features", "title", "--out", tmp_path / "q.csv")
    for bad in ("no", '{"joke": [1]}', "[]", "[1, 2, 1]", '[1, "2"]', "[1.5]", '["one"]'):
        items.write_text(bad)
        if bad == '["one"]':  # for a Parquet file, whose items are integers
            command[1] = ratings / "ratings.parquet"
            assert "'joke'" in refused(capsys, *command, "--out", tmp_path / "other")
        else:
            assert "--items" in refused(capsys, *command, "--out", tmp_path / "other")
    assert not (tmp_path / "other").exists()


def test_items_that_are_not_enough_for_the_rank(
    ratings: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Their number is known only after it was paid for. The rank is the most that is kept, so that is no error."""
    command = ["fit", ratings / "ratings.parquet", *RATINGS, "--rank", "25", "--out", tmp_path / "model"]
    assert run(capsys, *command)[0] == 0
    assert 1 <= models.load(tmp_path / "model").representation.basis.shape[1] <= 20
    command[command.index("25")] = "5"
    code, _, noted = run(capsys, *command, "--overwrite")
    assert code == 0
    assert "add up" in noted


@pytest.mark.parametrize("kind", ["parquet", "csv"])
def test_no_item_is_rated_often_enough(kind: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Nothing is named: users have shrunk levels, it is said loudly, and everything works on such a model."""
    rng, out = np.random.default_rng(0), tmp_path / "model"
    rows = {"user": np.arange(900) // 2, "joke": np.arange(900), "rating": 4 + rng.normal(size=900)}
    table = write(tmp_path / f"t.{kind}", rows)
    code, said, _ = run(capsys, "fit", table, *RATINGS, "--out", out)
    assert code == 0
    assert "NOTHING WAS LEARNED: no item is rated by enough users" in said
    assert "declare the list of items" in said.lower()
    assert "joke (0)" in " ".join(run(capsys, "inspect", out)[1].split())
    assert run(capsys, "predict", out, table, "--out", tmp_path / "p.csv")[0] == 0
    made = pd.read_csv(tmp_path / "p.csv")["prediction"]
    assert made.std() < 0.9 * pd.DataFrame(rows).groupby("user")["rating"].mean().std()
    assert run(capsys, "personalize", out, table, "--replace")[1].startswith("Users: 0 more, 450 with a new")


def test_newcomers_without_ratings(ratings: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out, empty, asked = tmp_path / "model", tmp_path / "empty.csv", tmp_path / "asked.csv"
    assert run(capsys, "fit", ratings / "ratings.parquet", *RATINGS, "--out", out)[0] == 0
    write(asked, {"user": [4, 4, 7777, 7777], "joke": [1, 2, 1, 2]})
    code, said, _ = run(capsys, "predict", out, asked, "--out", tmp_path / "p.csv")
    assert code == 0
    assert "2 rows of 1 user without a head" in said
    assert "7777" in refused(capsys, "predict", out, asked, "--refuse-unknown", "--out", tmp_path / "q.csv")
    empty.write_text("joke,rating\n")
    assert run(capsys, "personalize", out, empty, "--user-id", "7777")[0] == 0
    assert run(capsys, "predict", out, asked, "--refuse-unknown", "--out", tmp_path / "q.csv")[0] == 0
    before, after = (pd.read_csv(tmp_path / name)["prediction"] for name in ("p.csv", "q.csv"))
    np.testing.assert_allclose(before, after, rtol=1e-12)
    ratings_of = models.load(out).representation.ratings
    assert ratings_of is not None
    np.testing.assert_allclose(before[2:], ratings_of.level + ratings_of.spread * ratings_of.offset[:2], rtol=1e-12)


def test_ratings_too_few_to_learn_from(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Nothing heard at all: said loudly, and everything else works on items' offsets and users' levels."""
    out, items = tmp_path / "model", tmp_path / "items.json"
    rng = np.random.default_rng(0)
    rows = {"user": np.repeat(np.arange(30), 4), "joke": rng.integers(0, 9, 120), "rating": rng.normal(size=120)}
    table = write(tmp_path / "t.csv", rows)
    items.write_text(json.dumps([*range(9)]))
    options = ["--epsilon", "0.1", "--delta", "1e-6", "--simulate", "1", "--items", items, "--out", out]
    code, said, _ = run(capsys, "fit", table, *RATINGS[:6], *options)
    assert code == 0
    assert "30 users, 9 items, rank 0" in said
    assert "NOTHING WAS LEARNED" in said
    assert "Rank 0" in run(capsys, "inspect", out)[1]
    assert json.loads(run(capsys, "inspect", out, "--json")[1])["representation"]["mean_squared_sine"] == 1.0
    assert run(capsys, "personalize", out, table, "--replace")[1].startswith("Users: 0 more, 30 with a new")
    assert run(capsys, "predict", out, table, "--out", tmp_path / "p.csv")[0] == 0


def test_ctrl_c_in_a_fit_of_ratings(
    ratings: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def interrupt(bar: object, name: str, epsilon: float) -> None:
        raise KeyboardInterrupt

    command = ["fit", ratings / "ratings.csv", *RATINGS, "--out", tmp_path / "model"]
    with monkeypatch.context() as patch:
        patch.setattr(Bar, "page", interrupt)
        code, _, err = run(capsys, *command)
    assert code == 130
    assert "same command" in err
    code, said, noted = run(capsys, *command)
    assert code == 0
    assert "Continuing" in noted
    assert "epsilon 4 of 4" in said


# inspect


def test_inspect_in_words_and_for_machines(fitted: Path, capsys: pytest.CaptureFixture[str]) -> None:
    code, said, _ = run(capsys, "inspect", fitted)
    assert code == 0
    for words in ("replace-one-user", "epsilon 4", "moments/moments", "Side channels", "Rank 2", "heads of 400 users"):
        assert words in said
    assert "SEEDED" not in said
    data = json.loads(run(capsys, "inspect", fitted, "--json")[1])
    assert data["seeded"] is False
    assert data["epsilon"] == pytest.approx(4.0, rel=1e-6)
    assert "model" in refused(capsys, "inspect", fitted / "private")
    assert "nowhere" in refused(capsys, "inspect", "nowhere")


def test_inspect_shouts_about_a_simulation(tables: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = tmp_path / "m"
    assert run(capsys, "fit", tables / "users.csv", *COLUMNS, *BUDGET, "--simulate", "0", "--out", out)[0] == 0
    assert "THE NOISE WAS SEEDED" in run(capsys, "inspect", out)[1]
    assert json.loads(run(capsys, "inspect", out, "--json")[1])["private"] is False


def test_a_damaged_model_is_one_sentence(copy: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (copy / "model.json").write_text("{")
    assert "damaged" in refused(capsys, "inspect", copy)


# budget


def test_budget_round_trips(capsys: pytest.CaptureFixture[str]) -> None:
    code, said, _ = run(capsys, "budget", "--epsilon", "1.5", "--delta", "1e-6")
    assert code == 0
    multiplier = said.split("noise multiplier ")[1].split()[0]
    assert "how large errors are" in said
    back = run(capsys, "budget", "--noise", multiplier, "--delta", "1e-6")[1]
    assert float(back.split("epsilon ")[1].split()[0]) == pytest.approx(1.5, rel=1e-4)
    four = run(capsys, "budget", "--noise", 2 * float(multiplier), "--releases", "4", "--delta", "1e-6")[1]
    assert float(four.split("epsilon ")[1].split()[0]) == pytest.approx(1.5, rel=1e-4)


def test_budget_plans(capsys: pytest.CaptureFixture[str]) -> None:
    shape = ["--features", "50", "--rank", "2", "--rows", "10"]
    code, said, _ = run(capsys, "budget", "--epsilon", "1", "--delta", "1e-6", *shape, "--noise-level", "0.3")
    assert code == 0
    assert "users you need" in said
    assert "a factor of two" in " ".join(said.split())
    assert "the representation holds 90%" in said
    assert "epsilon that" not in said


def test_budget_forecasts_errors_of_ratings(capsys: pytest.CaptureFixture[str]) -> None:
    shape = ["--items", "500", "--rows", "20", "--users", "3000"]
    code, said, _ = run(capsys, "budget", "--epsilon", "1", "--delta", "1e-6", *shape)
    assert code == 0
    assert "500 items, 20 ratings each" in said
    errors = [float(line.split("│")[2]) for line in said.splitlines() if line.startswith("│")]
    mean, shrunk, exact, private, new = errors
    assert exact < private < shrunk <= mean < new


def test_budget_forecasts_errors(capsys: pytest.CaptureFixture[str]) -> None:
    """Rank 0: levels and common slopes alone."""
    shape = ["--features", "10", "--rank", "0", "--rows", "6", "--users", "5000", "--gain", "0.1"]
    code, said, _ = run(capsys, "budget", "--epsilon", "1", "--delta", "1e-6", *shape)
    assert code == 0
    for words in ("each user's own mean", "a mixed model without privacy", "privrep", "epsilon that", "is asked for"):
        assert words in said
    assert "the representation holds" not in said
    still = ["--levels", "5", "--common", "0"]
    assert "gains next to nothing" in run(capsys, "budget", "--epsilon", "1", "--delta", "1e-6", *shape, *still)[1]


def test_budget_forecasts_labels(capsys: pytest.CaptureFixture[str]) -> None:
    shape = ["--features", "10", "--rank", "1", "--rows", "6", "--rate", "0.2"]
    code, said, _ = run(capsys, "budget", "--epsilon", "1", "--delta", "1e-6", *shape, "--users", "5000")
    assert code == 0
    for words in ("log-loss", "own frequency", "a pooled model", "a mixed model", "users without rows", "epsilon that"):
        assert words in said
    assert "RMSE" not in said
    assert "a factor of two" in " ".join(said.split())
    code, said, _ = run(capsys, "budget", "--epsilon", "1", "--delta", "1e-6", *shape, "--gain", "0.02")
    assert code == 0
    assert "users without rows" not in said
    assert "is asked for" in said


# demo


def test_demo(tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    import privrep.cli.demo

    whole = privrep.cli.demo.run_demo
    monkeypatch.setattr(privrep.cli.demo, "run_demo", lambda folder, **more: whole(folder, users=1000, **more))
    out = tmp_path / "demo"
    code, said, _ = run(capsys, "demo", "--out", out)
    assert code == 0
    assert sorted(path.name for path in out.iterdir()) == sorted(privrep.cli.demo.MADE)
    for words in ("privrep", "each user alone", "mixed model without privacy", "made-up populations", "inspect"):
        assert words in said
    assert models.load(out / "model").privacy.seeded is False
    assert run(capsys, "predict", out / "model", out / "new-rows.csv", "--out", tmp_path / "p.csv")[0] == 0
    assert "--overwrite" in refused(capsys, "demo", "--out", out)
    assert run(capsys, "demo", "--out", out, "--overwrite")[0] == 0
    (out / "mine.txt").write_text("mine")
    assert "mine.txt" in refused(capsys, "demo", "--out", out, "--overwrite")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["demo", "p.csv"]


@pytest.mark.skipif(os.geteuid() == 0, reason="root may write anywhere")
def test_a_folder_without_permission_is_one_sentence(
    tables: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    tmp_path.chmod(0o500)
    said = refused(capsys, "fit", tables / "users.csv", *COLUMNS, *BUDGET, "--out", tmp_path / "model")
    tmp_path.chmod(0o700)
    assert "permission denied" in said
