"""Every command end to end on small tables, and every kind of bad input: exit 2, one sentence, nothing written."""

from __future__ import annotations

import csv
import gzip
import json
import os
import stat
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from privrep import PrivateFedRep, cli
from privrep import model as models
from privrep.cli.shared import Bar
from privrep.data.synthetic import make_population
from privrep.engines.in_memory import InMemoryUsers
from privrep.engines.streaming import StreamingUsers

FEATURES = [f"x{j}" for j in range(6)]
BUDGET = ["--epsilon", "4", "--delta", "1e-6"]
COLUMNS = ["--user", "user", "--target", "y"]


def run(capsys: pytest.CaptureFixture[str], *arguments: object) -> tuple[int, str, str]:
    """Exit code, stdout and stderr of a command."""
    code = 0
    try:
        cli.main([str(argument) for argument in arguments])
    except SystemExit as end:
        code = int(end.code or 0)
    printed = capsys.readouterr()
    return code, printed.out, printed.err


def refused(capsys: pytest.CaptureFixture[str], *arguments: object) -> str:
    """The one sentence with which a command is refused."""
    code, out, err = run(capsys, *arguments)
    assert code == 2
    assert out == ""
    assert err.startswith("privrep: ")
    assert err.count("\n") == 1
    return err


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
    with pytest.raises(SystemExit) as end:
        cli.main(["fit", str(tables / "users.csv"), *COLUMNS, *BUDGET, "--rank", "2", "--out", str(out)])
    assert not end.value.code
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
    assert loaded.columns == models.Columns("user", "y", tuple(FEATURES))
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
    assert set(heads.kind) == {0}


def test_fit_as_the_paper_has_it(tables: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = tmp_path / "model"
    options = ["--method", "paper", "--rank", "2", "--no-intercept", "--no-safety-net", "--simulate", "7"]
    command = ["fit", tables / "users.parquet", *COLUMNS, *BUDGET, *options, "--out", out]
    assert run(capsys, *command)[0] == 0
    table = pq.read_table(tables / "users.parquet")
    X = np.column_stack([table[name].to_numpy() for name in FEATURES])
    estimator = PrivateFedRep.paper(2, epsilon=4.0, delta=1e-6, random_state=7)
    estimator.fit(X, table["y"].to_numpy(), groups=table["user"].to_numpy())
    assert models.load(out).config == estimator.model_.config
    assert np.array_equal(models.load(out).representation.basis, estimator.model_.representation.basis)
    assert "paper-moments" in run(capsys, "inspect", out)[1]
    assert run(capsys, "predict", out, tables / "users.csv", "--out", tmp_path / "p.csv")[0] == 0


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


PIECES = {
    "epsilon": (["--epsilon", "0"], "epsilon"),
    "delta": (["--delta", "1.5"], "delta"),
    "rank": (["--rank", "two"], "--rank"),
    "rank too large": (["--rank", "7"], "rank"),
    "relation": (["--relation", "swap"], "--relation"),
    "seed": (["--simulate", "-1"], "--simulate"),
    "user column": (["--user", "usr"], "'usr'"),
    "target column": (["--target", "z"], "'z'"),
    "feature column": (["--features", "x0,x9"], "'x9'"),
    "target among features": (["--features", "x0,y"], "'y'"),
    "scale file": (["--scale", "nowhere.json"], "nowhere.json"),
    "workdir": (["--workdir", "nowhere"], "nowhere"),
    "method": (["--method", "fast"], "method"),
    "paper without a rank": (["--method", "paper", "--no-intercept"], "rank"),
    "paper with intercepts": (["--method", "paper", "--rank", "2"], "intercepts"),
    "paper, number of users not public": (
        ["--method", "paper", "--rank", "2", "--no-intercept", "--relation", "add-or-remove-one-user"],
        "replace-one-user",
    ),
}


@pytest.mark.parametrize("piece", PIECES)
def test_bad_options_are_refused(piece: str, tables: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    options, culprit = PIECES[piece]
    out = tmp_path / "model"
    said = refused(capsys, "fit", tables / "users.csv", *COLUMNS, *BUDGET, "--out", out, *options)
    assert culprit in said
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    ("column", "value"), [("x2", "nan"), ("x2", ""), ("x2", "tall"), ("y", "inf"), ("y", "tall"), ("user", "")]
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


def test_missing_options_are_usage_errors(tables: Path, capsys: pytest.CaptureFixture[str]) -> None:
    code, _, err = run(capsys, "fit", tables / "users.csv", *COLUMNS, "--out", "nowhere", "--delta", "1e-6")
    assert code == 2
    assert "epsilon" in err
    assert not Path("nowhere").exists()


def test_fit_replaces_only_what_it_made_and_only_when_asked(
    tables: Path, copy: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    command = ["fit", tables / "users.csv", *COLUMNS, *BUDGET, "--rank", "1", "--out"]
    assert "--overwrite" in refused(capsys, *command, copy)
    assert "intercepts" in refused(capsys, *command, copy, "--overwrite", "--method", "paper")
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
        "from privrep.cli.shared import Bar\n"
        "Bar.page = lambda bar, name: os._exit(9) if name == 'round-1' else None\n"
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


def test_ctrl_c_tells_how_to_continue(
    tables: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def interrupt(bar: object, name: str) -> None:
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
    config = models.Config(2, 4.0, 1e-6)
    users = InMemoryUsers(make_population(np.random.default_rng(0), 400, 6, 2, 6, 0.1).sample(np.random.default_rng(0)))
    models._claim(out, config, models.Columns("user", "y", tuple(FEATURES)), users)
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
    said = refused(capsys, "predict", fitted, tables / "new.csv", "--out", out)
    assert "user 100" in said
    assert "row 1 " in said
    assert "personalize" in said
    bad = edited(tables / "users.csv", 77, "x1", "nan")
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
    assert run(capsys, "personalize", copy, tables / "new.csv")[1].startswith("5 users more, 405 in all")
    out = tmp_path / "p.csv"
    assert run(capsys, "predict", copy, tables / "new.csv", "--out", out)[0] == 0
    rows = make_rows(5, first=1000, seed=1)
    chosen = rows["user"] == 1002
    X = pd.DataFrame({name: rows[name][chosen] for name in FEATURES})
    head = PrivateFedRep.load(copy).personalize(X, rows["y"][chosen])
    np.testing.assert_allclose(np.array(predictions(out))[chosen], head.predict(X), rtol=1e-9)
    assert run(capsys, "predict", copy, tables / "users.csv", "--out", tmp_path / "old.csv")[0] == 0
    assert "user 1000" in refused(capsys, "personalize", copy, tables / "new.csv")
    assert run(capsys, "personalize", copy, tables / "new.csv", "--replace")[1].startswith("0 users more, 405 in all")
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
    bad = write(tmp_path / f"bad{suffix}", {**{n: rows[n] for n in rows if n != "user"}, "x3": np.full(6, np.nan)})
    said = refused(capsys, "personalize", copy, bad, "--user-id", "9001")
    assert "'x3'" in said
    assert str(bad) in said


def test_a_published_copy_personalises_too(
    tables: Path, copy: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """What a client gets: the folder without private/."""
    (copy / "private" / "heads.parquet").unlink()
    (copy / "private").rmdir()
    assert "personalize" in refused(capsys, "predict", copy, tables / "new.csv", "--out", tmp_path / "p.csv")
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
    assert run(capsys, "personalize", copy, table)[1].startswith("2 users more, 2 in all")
    heads = models.load(copy).heads
    assert heads is not None
    assert sorted(heads.ids) == ["0090", "90"]
    assert run(capsys, "predict", copy, table, "--out", tmp_path / "p.csv")[0] == 0
    own = write(tmp_path / "own.csv", {name: rows[name] for name in rows if name != "user"})
    assert run(capsys, "personalize", copy, own, "--user-id", "090")[1].startswith("1 users more, 3 in all")
    (copy / "private" / "heads.parquet").unlink()
    assert run(capsys, "personalize", copy, own, "--user-id", "090")[0] == 0
    heads = models.load(copy).heads
    assert heads is not None
    assert heads.ids.tolist() == ["090"]


def test_personalize_refuses_and_changes_nothing(
    tables: Path, copy: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    before = (copy / "private" / "heads.parquet").read_bytes()
    bad = edited(tables / "new.csv", 3, "y", "nan")
    assert "'y'" in refused(capsys, "personalize", copy, bad)
    text = write(tmp_path / "text.parquet", {**make_rows(2), "user": np.array(["a", "b"] * 6)})
    assert "text" in refused(capsys, "personalize", copy, text)
    assert "heads.txt" in refused(capsys, "personalize", copy, tables / "new.csv", "--out", tmp_path / "heads.txt")
    assert (copy / "private" / "heads.parquet").read_bytes() == before
    assert not (tmp_path / "heads.txt").exists()


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
    assert "round-8/step" in said
    back = run(capsys, "budget", "--noise", multiplier, "--delta", "1e-6")[1]
    assert float(back.split("epsilon ")[1].split()[0]) == pytest.approx(1.5, rel=1e-4)
    four = run(capsys, "budget", "--noise", 2 * float(multiplier), "--releases", "4", "--delta", "1e-6")[1]
    assert float(four.split("epsilon ")[1].split()[0]) == pytest.approx(1.5, rel=1e-4)


def test_budget_plans(capsys: pytest.CaptureFixture[str]) -> None:
    shape = ["--features", "50", "--rank", "2", "--rows", "10"]
    code, said, _ = run(capsys, "budget", "--epsilon", "1", "--delta", "1e-6", *shape, "--noise-level", "0.3")
    assert code == 0
    assert "users you need" in said
    assert "factor of two" in said


@pytest.mark.parametrize(
    ("options", "culprit"),
    [
        ([], "--epsilon"),
        (["--epsilon", "1", "--noise", "2"], "--noise"),
        (["--epsilon", "-1"], "epsilon"),
        (["--noise", "0"], "noise_multiplier"),
        (["--noise", "2", "--releases", "0"], "releases"),
        (["--noise", "2", "--rank", "2"], "--rank"),
        (["--epsilon", "1", "--releases", "2"], "--releases"),
        (["--epsilon", "1", "--features", "5", "--rank", "2"], "--rows"),
        (["--epsilon", "1", "--features", "5", "--rank", "5", "--rows", "9"], "rank"),
        (["--epsilon", "1", "--relation", "none"], "--relation"),
    ],
)
def test_budget_refuses(options: list[str], culprit: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert culprit in refused(capsys, "budget", "--delta", "1e-6", *options)


# demo


def test_demo(tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    import privrep.demo

    whole = privrep.demo.run_demo
    monkeypatch.setattr(privrep.demo, "run_demo", lambda folder, **options: whole(folder, users=1000, **options))
    out = tmp_path / "demo"
    code, said, _ = run(capsys, "demo", "--out", out)
    assert code == 0
    assert sorted(path.name for path in out.iterdir()) == ["model", "new-rows.csv", "picture.png"]
    for words in ("private", "each user alone", "predict zero", "made-up population", "inspect"):
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
