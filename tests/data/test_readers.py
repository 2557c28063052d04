"""Files are read as they are, and what is wrong with one is said in a sentence that names the place."""

from __future__ import annotations

import gzip
import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from scipy import sparse

from privrep.data import categories as one_hot
from privrep.data import readers, sources
from privrep.data.categories import check_lists
from privrep.data.readers import TableSource, read_checked_batches, read_table
from privrep.data.table import UserTable
from privrep.errors import InputError


@pytest.fixture(autouse=True)
def categories_are_sparse(monkeypatch: pytest.MonkeyPatch) -> None:
    """Read rows with few categories as those with many."""
    monkeypatch.setattr(one_hot, "MOST_DENSE", 0)


def test_rows_with_few_features_are_dense_and_those_with_many_or_of_items_sparse(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(one_hot, "MOST_DENSE", 3)
    path = tmp_path / "few.csv"
    path.write_text("user,y,x,c\n1,2,0.5,a\n1,3,1.5,b\n")
    few, many = (
        TableSource(path, "user", "y", ("x",), categories={"c": listed}) for listed in (["a", "b"], list("abc"))
    )
    assert not few.is_sparse
    assert many.is_sparse
    assert read_table(few).X.tolist() == [[0.5, 1.0, 0.0], [1.5, 0.0, 1.0]]
    assert read_table(many).X.toarray().tolist() == [[0.5, 1.0, 0.0, 0.0], [1.5, 0.0, 1.0, 0.0]]
    assert replace(few, items=True).is_sparse
    assert not replace(many, dense=True).is_sparse


def frame(rows: int = 40, features: int = 3, seed: int = 0, dtype: Any = np.float64) -> pd.DataFrame:
    rng = np.random.default_rng(seed)
    columns = {"user": rng.integers(-5, 6, rows), "y": rng.standard_normal(rows).astype(dtype)}
    for j in range(features):
        columns[f"x{j}"] = rng.standard_normal(rows).astype(dtype)
    return pd.DataFrame(columns)


def write(data: pd.DataFrame, path: Path) -> Path:
    if path.suffix in (".parquet", ".pq"):
        data.to_parquet(path)
    else:
        data.to_csv(path, index=False)
    return path


def expected(data: pd.DataFrame, features: list[str]) -> UserTable:
    return UserTable.from_rows(np.ascontiguousarray(data[features].to_numpy()), data["y"].to_numpy(), data["user"])


def assert_same(a: UserTable, b: UserTable) -> None:
    assert a.X.dtype == b.X.dtype
    assert a.y.dtype == b.y.dtype
    np.testing.assert_array_equal(a.X, b.X)
    np.testing.assert_array_equal(a.y, b.y)
    np.testing.assert_array_equal(a.offsets, b.offsets)
    assert a.ids.tolist() == b.ids.tolist()


@pytest.mark.parametrize("name", ["t.parquet", "t.pq", "t.csv", "t.csv.gz", "T.CSV", "T.Csv.Gz"])
@pytest.mark.parametrize("text_ids", [False, True])
def test_reads_what_was_written(tmp_path: Path, name: str, text_ids: bool) -> None:
    data = frame()
    if text_ids:
        data["user"] = "ü" + data["user"].astype(str)
    table = read_table(TableSource(write(data, tmp_path / name), "user", "y"))
    assert_same(table, expected(data, ["x0", "x1", "x2"]))
    assert table.ids.dtype == (object if text_ids else np.int64)


def test_float32_stays_only_where_all_is_float32(tmp_path: Path) -> None:
    data = frame(dtype=np.float32)
    path = write(data, tmp_path / "t.parquet")
    assert_same(read_table(TableSource(path, "user", "y")), expected(data, ["x0", "x1", "x2"]))
    assert read_table(TableSource(path, "user", "y")).X.dtype == np.float32
    data["y"] = data["y"].astype(np.float64)
    mixed = read_table(TableSource(write(data, path), "user", "y"))
    assert (mixed.X.dtype, mixed.y.dtype) == (np.float64, np.float64)
    without_target = read_table(TableSource(path, "user", None, ["x0", "x1"]))
    assert without_target.X.dtype == np.float32
    assert np.isnan(without_target.y).all()


def test_default_features_are_the_numeric_columns(tmp_path: Path) -> None:
    data = frame()
    data["flag"], data["number"], data["name"] = data["x0"] > 0, np.arange(40), "a"
    data.index = pd.Index(np.arange(40) * 7)  # pandas writes it as a column, __index_level_0__
    source = TableSource(write(data, tmp_path / "t.parquet"), "user", "y")
    assert source.feature_names == ("x0", "x1", "x2", "flag", "number")
    chosen = data[["x0", "x1", "x2", "flag", "number"]].astype(float)
    assert_same(read_table(source), expected(pd.concat([data[["user", "y"]], chosen], axis=1), list(chosen)))


@pytest.mark.parametrize("late", [3, 3000])
def test_features_of_a_csv_file_are_those_of_its_header(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, late: int
) -> None:
    """Feature list and shapes are public. No value of a user may decide on them: a file is refused or all is used."""
    monkeypatch.setattr(sources, "BATCH_BYTES", 1000)
    path = tmp_path / "t.csv"
    rows = [f"{row // 3},{row},{row % 2},1.5" for row in range(late)]
    path.write_text("\n".join(["user,y,x0,x1", *rows, "7,1,1,2"]) + "\n")
    source = TableSource(path, "user", "y")
    assert source.feature_names == ("x0", "x1")
    assert (source.dtype, read_table(source).X.dtype) == (np.float64, np.float64)
    assert [str(column.type) for column in source.schema] == ["int64", "double", "double", "double"]
    for value in ("none", "yes", "2020-01-01", "inf"):
        path.write_text("\n".join(["user,y,x0,x1", *rows, f"7,1,1,{value}"]) + "\n")
        message = complaint(path, "user", "y")
        assert "'x1'" in message
        assert f"row {late + 1};" in message
        advice = (
            "leave the column out."
            if "dates" in message
            else "name the feature columns with --features to leave it out."
        )
        assert message.endswith(f", or {advice}")
        assert not re.search(rf"\b{value}\b", message.replace(str(path), "")) or not value
        assert TableSource(path, "user", "y", ["x0"]).feature_names == ("x0",)
        path.write_text("\n".join(["user,y,x0,x1", *rows, f"7,{value},1,2"]) + "\n")
        message = complaint(path, "user", "y")
        assert "'y'" in message
        assert "--features" not in message
    for value in ("yes", "5", "2020-01-01"):  # a column alike from top to bottom is no other kind of column
        path.write_text("\n".join(["user,y,x0,x1", *([f"7,1,2,{value}"] * late)]) + "\n")
        if value == "5":
            assert TableSource(path, "user", "y").schema == source.schema
        else:
            assert "'x1'" in complaint(path, "user", "y")


def test_listed_features_come_in_the_listed_order(tmp_path: Path) -> None:
    data = frame()
    data = data.rename(columns={"x1": "x0.1"})  # Parquet readers take a dot for a path into "x0"
    source = TableSource(write(data, tmp_path / "t.parquet"), "user", "y", data.columns[[4, 2]])
    assert source.feature_names == ("x2", "x0")
    assert_same(read_table(source), expected(data, ["x2", "x0"]))
    (batch,) = source.batches()
    assert batch.schema.names == ["user", "y", "x2", "x0"]


def test_categorical_users(tmp_path: Path) -> None:
    data = frame()
    data["user"] = data["user"].astype(str)
    plain = expected(data, ["x0", "x1", "x2"])
    data["user"] = data["user"].astype("category")
    assert_same(read_table(TableSource(write(data, tmp_path / "t.parquet"), "user", "y")), plain)


def test_batches_are_small_parts_of_the_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    data = frame(rows=5000)
    monkeypatch.setattr(sources, "BATCH_BYTES", 32 * 1000)
    for name in ("t.parquet", "t.csv"):
        batches = list(TableSource(write(data, tmp_path / name), "user", "y").batches())
        assert max(batch.num_rows for batch in batches) <= 1000
        assert sum(batch.num_rows for batch in batches) == 5000


def test_integers_that_become_floats_after_the_first_block(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sources, "BATCH_BYTES", 1000)
    path = tmp_path / "t.csv"
    path.write_text("user,y,x\n" + "1,2,3\n" * 1000 + "1,2.5,3.5\n")
    table = read_table(TableSource(path, "user", "y"))
    assert (table.X[-1, 0], table.y[-1]) == (3.5, 2.5)


def test_user_as_text_keeps_leading_zeros(tmp_path: Path) -> None:
    path = tmp_path / "t.csv"
    path.write_text("user,y,x\n007,1,1\n7,2,2\n")
    message = complaint(path, "user", "y")  # 007 is not 7, and one user's id is not to make text of others'
    assert "'user' of" in message
    assert "has leading zeros, as codes have, in row 1; keep ids as they are written with user_as_text" in message
    assert read_table(TableSource(path, "user", "y", user_as_text=True)).ids.tolist() == ["007", "7"]


def complaint(*arguments: Any, **options: Any) -> str:
    with pytest.raises(InputError) as caught:
        for _ in read_checked_batches(TableSource(*arguments, **options)):
            pass
    message = str(caught.value)
    assert "\n" not in message
    assert message[-1] in ".?"
    return message


def test_files_that_cannot_be_opened(tmp_path: Path) -> None:
    assert "nowhere.csv" in complaint(tmp_path / "nowhere.csv", "user", "y")
    (tmp_path / "t.xlsx").write_text("")
    assert ".parquet, .pq, .csv, .csv.gz" in complaint(tmp_path / "t.xlsx", "user", "y")
    (tmp_path / "folder.csv").mkdir()
    assert "not a file" in complaint(tmp_path / "folder.csv", "user", "y")
    (tmp_path / "t.parquet").write_text("user,y,x\n1,2,3\n")
    assert "cannot be read as Parquet" in complaint(tmp_path / "t.parquet", "user", "y")
    (tmp_path / "t.csv.gz").write_bytes(gzip.compress(b"user,y,x\n" + b"1,2,3\n" * 100)[:-20])
    assert "cannot be read as CSV" in complaint(tmp_path / "t.csv.gz", "user", "y")
    whole = write(frame(rows=5000), tmp_path / "torn.parquet").read_bytes()
    (tmp_path / "torn.parquet").write_bytes(whole[:100] + bytes(2000) + whole[2100:])
    assert "cannot be read as Parquet" in complaint(tmp_path / "torn.parquet", "user", "y")


@pytest.mark.parametrize("name", ["t.parquet", "t.csv"])
def test_options_that_do_not_fit_the_file(tmp_path: Path, name: str) -> None:
    data = frame()
    data["colour"] = "red"
    path = write(data, tmp_path / name)
    if name == "t.csv":
        assert "'colour'" in complaint(path, "user", "y")
    assert "did you mean 'user'" in complaint(path, "User", "y")
    assert "'user', 'y', 'x0', 'x1', 'x2', 'colour'" in complaint(path, "qqqqq", "y")
    assert "target: there is no column 'z'" in complaint(path, "user", "z")
    assert "features: there is no column 0" in complaint(path, "user", "y", [0])
    assert "features: there is no column 'x9'" in complaint(path, "user", "y", ["x0", "x9"])
    assert "'colour'" in complaint(path, "user", "y", ["x0", "colour"])
    assert "'colour'" in complaint(path, "user", "colour")
    assert "is the user column" in complaint(path, "user", "y", ["x0", "user"])
    assert "is the target column" in complaint(path, "user", "y", ["y"])
    assert "both column 'y'" in complaint(path, "y", "y")
    assert "'x0' more than once" in complaint(path, "user", "y", ["x0", "x0"])
    assert "['x0']" in complaint(path, "user", "y", "x0")
    assert "no numeric column besides user 'user' and target 'y'" in complaint(path, "user", "y", [])
    only_text = write(data[["user", "y", "colour"]], tmp_path / f"text-{name}")
    said = "'colour'" if name == "t.csv" else "no numeric column besides"
    assert said in complaint(only_text, "user", "y")
    assert "no numeric column besides" in complaint(write(data[["user", "y"]], tmp_path / f"no-{name}"), "user", "y")


@pytest.mark.parametrize(
    ("name", "column", "value"),
    [
        (name, column, value)
        for name in ("t.parquet", "t.csv")
        for column in ("user", "y", "x1")
        for value in ((None, np.nan, np.inf, -np.inf) if column == "user" else (np.inf, -np.inf))
        if (name, column) != ("t.csv", "user") or value is None  # else it is a text, and a name like any other
    ],
)
def test_values_that_are_no_values(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str, column: str, value: float | None
) -> None:
    monkeypatch.setattr(sources, "BATCH_BYTES", 32 * 1000)
    data = frame(rows=3000).astype({column: float}).astype({column: object})
    data.loc[2716, column] = value
    data.loc[2900, column] = value
    schema = pa.schema([(c, pa.int64() if c == "user" and column != "user" else pa.float64()) for c in data])
    if name == "t.csv":
        data.to_csv(tmp_path / name, index=False, na_rep="")
    else:
        pq.write_table(pa.Table.from_pydict({c: data[c].tolist() for c in data}, schema), tmp_path / name)
    assert f"column '{column}' of" in (message := complaint(tmp_path / name, "user", "y"))
    assert "in row 2717;" in message


def test_empty_user_names_are_missing_users(tmp_path: Path) -> None:
    data = frame().astype({"user": str})
    data.loc[5, "user"] = ""
    for name in ("t.parquet", "t.csv"):
        assert "column 'user' of" in (message := complaint(write(data, tmp_path / name), "user", "y"))
        assert "row 6;" in message


@pytest.mark.parametrize("text", ["", "\n\n", "user,y,x\n"])
def test_csv_without_rows(tmp_path: Path, text: str) -> None:
    (tmp_path / "t.csv").write_text(text)
    assert "has no rows" in complaint(tmp_path / "t.csv", "user", "y")


def test_parquet_without_rows(tmp_path: Path) -> None:
    assert "has no rows" in complaint(write(frame().head(0), tmp_path / "t.parquet"), "user", "y")


def test_columns_of_one_name(tmp_path: Path) -> None:
    (tmp_path / "t.csv").write_text("user,y,x,x\n1,2,3,4\n")
    assert "'x' is in" in complaint(tmp_path / "t.csv", "user", "y")
    table = pa.Table.from_arrays([pa.array([1.0])] * 4, names=["user", "y", "x", "x"])
    pq.write_table(table, tmp_path / "t.parquet")
    assert "'x' is in" in complaint(tmp_path / "t.parquet", "user", "y")


def test_columns_without_any_value_are_not_dropped_in_silence(tmp_path: Path) -> None:
    (tmp_path / "t.csv").write_text("user,y,x,gap\n1,2,3,\n")
    assert TableSource(tmp_path / "t.csv", "user", "y").feature_names == ("x", "gap")
    assert TableSource(tmp_path / "t.csv", "user", "y", ["x"]).feature_names == ("x",)


def test_users_of_a_type_that_is_no_name(tmp_path: Path) -> None:
    data = frame()
    data["user"] = pd.Timestamp("2020-01-01")
    assert "the user column 'user' holds values of type timestamp" in complaint(
        write(data, tmp_path / "t.parquet"), "user", "y"
    )


@pytest.mark.parametrize("late", [0, 1000])
def test_malformed_csv(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, late: int) -> None:
    monkeypatch.setattr(sources, "BATCH_BYTES", 1000)
    path, start, row = tmp_path / "t.csv", "user,y,x\n1,2,3\n" + "1,2,3\n" * late, late + 2
    path.write_text(start + "1,2\n1,2,3\n")
    assert f"row {row} of" in (message := complaint(path, "user", "y"))
    assert "has 2 values under a header of 3" in message
    path.write_text(start + "1,2,?\n")
    assert f"'x' of {path} is not a number in row {row};" in complaint(path, "user", "y", ["x"])
    path.write_text(start + "1,high,1\n")
    assert f"'y' of {path} is not a number in row {row};" in complaint(path, "user", "y")
    path.write_bytes(start.encode() + "ü,2,3\n".encode() + b"\xff,2,3\n")
    assert f"{path} is not UTF-8 in line {row + 2}," in complaint(path, "user", "y", user_as_text=True)
    if late:
        path.write_text(start + "anna,2,3\n")
        assert "set user_as_text" in (message := complaint(path, "user", "y"))
        assert f"in row {row};" in message


# Several targets


@pytest.mark.parametrize("name", ["t.parquet", "t.csv"])
def test_several_targets(tmp_path: Path, name: str) -> None:
    data = frame()
    path = write(data, tmp_path / name)
    source = TableSource(path, "user", ["x1", "y"])
    assert (source.target, source.targets) == (("x1", "y"), ("x1", "y"))
    assert (source.columns, source.feature_names) == (("user", "x1", "y", "x0", "x2"), ("x0", "x2"))
    targets = data[["x1", "y"]].to_numpy()
    assert_same(read_table(source), UserTable.from_rows(data[["x0", "x2"]].to_numpy(), targets, data["user"]))
    for one in (["y"], ("y",), pd.Index(["y"]), "y"):
        source = TableSource(path, "user", one)
        assert (source.target, source.targets) == ("y", ("y",))
        assert_same(read_table(source), expected(data, ["x0", "x1", "x2"]))
    assert TableSource(path, "user", None).targets == ()


def test_float32_needs_every_target_to_be_float32(tmp_path: Path) -> None:
    data = frame(dtype=np.float32)
    table = read_table(TableSource(write(data, tmp_path / "t.parquet"), "user", ["y", "x0"]))
    assert (table.X.dtype, table.y.dtype, table.y.shape) == (np.float32, np.float32, (40, 2))
    data["x0"] = data["x0"].astype(np.float64)
    table = read_table(TableSource(write(data, tmp_path / "t.parquet"), "user", ["y", "x0"]))
    assert (table.X.dtype, table.y.dtype) == (np.float64, np.float64)


def test_several_targets_that_do_not_fit_the_file(tmp_path: Path) -> None:
    data = frame()
    data["colour"] = "red"
    path = write(data, tmp_path / "t.parquet")
    assert "target names column 'y' more than once" in complaint(path, "user", ["y", "x0", "y"])
    assert "target names no column" in complaint(path, "user", [])
    assert "both column 'user'" in complaint(path, "user", ["y", "user"])
    assert "target: there is no column 'z'" in complaint(path, "user", ["y", "z"])
    assert f"column 'colour' of {path} holds text" in complaint(path, "user", ["y", "colour"])
    assert "contains 'x0', which is a target column" in complaint(path, "user", ["y", "x0"], ["x0", "x1"])
    assert "besides user 'user' and targets 'y', 'x0';" in complaint(path, "user", ["y", "x0"], [])
    data.loc[7, "x0"] = np.inf
    message = complaint(write(data, tmp_path / "t.csv"), "user", ["y", "x0"], ["x1"])
    assert "column 'x0' of" in message
    assert "has no finite target in row 8;" in message


# Categories

COLOURS, SHELVES = ["red", "grün", "", "never", "a,b"], [7, -1, 300, 2**40, 0]


def coloured(rows: int = 60) -> pd.DataFrame:
    """With values that no list has, missing ones, and zeros among the numbers."""
    rng = np.random.default_rng(5)
    data = frame(rows)
    data.insert(3, "colour", rng.choice(["red", "grün", "", "a,b", "other", None], rows))
    data["shelf"] = rng.choice([7, -1, 300, 5, 0], rows)
    data.loc[::4, "x1"] = 0.0
    return data


def encoded(data: pd.DataFrame, features: list[str], lists: dict[str, list[Any]]) -> UserTable:
    columns = [data[name].to_numpy(dtype=float) for name in features]
    columns += [(data[name] == value).to_numpy(dtype=float) for name, listed in lists.items() for value in listed]
    return UserTable.from_rows(np.stack(columns, axis=1), data["y"].to_numpy(), data["user"])


def assert_same_sparse(a: UserTable, b: UserTable) -> None:
    """A sparse table and its dense twin; nothing stored that is zero."""
    assert isinstance(a.X, sparse.csr_array)
    assert a.X.has_canonical_format
    assert a.X.data.all()
    assert_same(replace(a, X=a.X.toarray()), b)


@pytest.mark.parametrize("name", ["t.parquet", "t.csv", "t.csv.gz"])
def test_categories_are_encoded_over_the_given_lists(tmp_path: Path, name: str) -> None:
    data = coloured()
    path = write(data, tmp_path / name)
    if name != "t.parquet":
        data["colour"] = data["colour"].fillna("")  # which is how CSV writes it
    lists = {"shelf": SHELVES, "colour": COLOURS}
    source = TableSource(path, "user", "y", categories=lists)
    assert source.numeric_names == ("x0", "x1", "x2")
    assert source.columns == ("user", "y", "x0", "x1", "x2", "shelf", "colour")
    assert source.feature_names == (
        *("x0", "x1", "x2", "shelf=7", "shelf=-1", "shelf=300", "shelf=1099511627776", "shelf=0"),
        *("colour=red", "colour=grün", "colour=", "colour=never", "colour=a,b"),
    )
    assert_same_sparse(read_table(source), encoded(data, ["x0", "x1", "x2"], lists))
    only = TableSource(path, "user", "y", (), categories={"colour": COLOURS})
    assert (only.numeric_names, only.columns) == ((), ("user", "y", "colour"))
    assert_same_sparse(read_table(only), encoded(data, [], {"colour": COLOURS}))
    some = TableSource(path, "user", "y", ["x2"], categories={"shelf": np.array(SHELVES)})
    assert_same_sparse(read_table(some), encoded(data, ["x2"], {"shelf": SHELVES}))
    codes = next(some.batches()).column("shelf")
    assert (codes.type, codes.null_count, min(codes.to_pylist())) == (pa.int32(), 0, -1)
    assert np.isnan(read_table(TableSource(path, "user", None, (), categories=lists)).y).all()


def test_categories_of_a_csv_file_are_text_or_integers_as_their_list_is(tmp_path: Path) -> None:
    path = tmp_path / "t.csv"
    path.write_text("user,y,c\n1,1,07\n1,2,7\n2,3,\n2,4,8\n")
    assert read_table(TableSource(path, "user", "y", (), categories={"c": ["7"]})).X.toarray().tolist() == [
        [0.0],
        [1.0],
        [0.0],
        [0.0],
    ]
    assert read_table(TableSource(path, "user", "y", (), categories={"c": [8, 7]})).X.toarray().tolist() == [
        [0.0, 1.0],
        [0.0, 1.0],
        [0.0, 0.0],
        [1.0, 0.0],
    ]


@pytest.mark.parametrize(
    ("kind", "values", "listed"),
    [
        (pa.string(), ["a", "b", None, "c"], ["c", "a", "z"]),
        (pa.large_string(), ["a", "b", None, "c"], ["c", "a", "z"]),
        (pa.dictionary(pa.int8(), pa.string()), ["a", "b", None, "c"], ["c", "a", "z"]),
        (pa.int8(), [5, -3, None, 127], [300, 127, 5, 2**70]),
        (pa.uint8(), [5, 253, None, 255], [-1, 255, -3, 5]),
        (pa.uint64(), [5, 2**64 - 3, None, 2**64 - 1], [-1, 2**64 - 1, -3, 5]),
        (pa.int64(), [5, -(2**63), None, 2**63 - 1], [2**63 - 1, 5, 9]),
        (pa.int16(), [5, -3, None, 127], [10**6]),
        (pa.dictionary(pa.int32(), pa.int64()), [5, -3, None, 7], [7, 5, 9]),
    ],
)
def test_types_of_categorical_columns(tmp_path: Path, kind: Any, values: list[Any], listed: list[Any]) -> None:
    column = pa.array(values, kind) if not pa.types.is_dictionary(kind) else pa.array(values).dictionary_encode()
    pq.write_table(pa.table({"user": [1, 1, 2, 3], "y": [0.0] * 4, "c": column}), tmp_path / "t.parquet")
    table = read_table(TableSource(tmp_path / "t.parquet", "user", "y", (), categories={"c": listed}))
    assert table.X.toarray().tolist() == [[float(value == each) for each in listed] for value in values]


def test_categories_that_do_not_fit(tmp_path: Path) -> None:
    data = coloured()
    data["day"], data["x0=1"] = pd.Timestamp("2020-01-01"), 1.0
    path = write(data, tmp_path / "t.parquet")

    def said(categories: Any, features: Any = ("x1",), target: Any = "y") -> str:
        return complaint(path, "user", target, features, categories=categories)

    assert "categories must map" in said([("colour", ["red"])])
    assert "categories of column 'colour' must be a list; write ['red']" in said({"colour": "red"})
    with pytest.raises(InputError, match="lists none for column 'colour'"):
        check_lists({"colour": []})
    assert "lists 'red' of column 'colour' more than once" in said({"colour": ["red", "x", "red"]})
    for mixed in (["red", 1], [1, True], [1.0, 2.0], [None, "red"]):
        assert "must be all text or all integers" in said({"colour": mixed})
    assert "categories: there is no column 'color' in" in (message := said({"color": ["red"]}))
    assert "did you mean 'colour'?" in message
    assert "categories contains 'user', which is the user column" in said({"user": [1]})
    assert "categories contains 'y', which is the target column" in said({"y": [1]})
    assert "features contains 'shelf', which is a column of categories" in said({"shelf": [1]}, ["x0", "shelf"])
    assert "'colour' holds text; list its categories as text" in said({"colour": [1]})
    assert "'shelf' holds integers; list its categories as integers" in said({"shelf": ["one"]})
    assert "'day' holds values of type timestamp" in said({"day": ["1"]})
    assert f"'x2' of {path} is not an integer in 60 rows, first in row 1" in said({"x2": [1]})
    data["x0"] = 1
    write(data, path)
    assert "name 'x0=1' stands for two columns" in said({"x0": [1]}, None)
    assert "no numeric column besides" in said({}, [])


def test_bad_values_of_categorical_columns_of_a_csv_file(tmp_path: Path) -> None:
    path = tmp_path / "t.csv"
    path.write_text("user,y,c\n1,1,7\n1,2,red\n")
    message = complaint(path, "user", "y", (), categories={"c": [7]})
    assert f"column 'c' of {path} is not an integer in row 2; correct it or list its values as text" in message
    path.write_bytes("user,y,c\n1,1,é\n1,2,".encode() + b"\xff\n")
    assert "is not UTF-8 in line 3, and" in complaint(path, "user", "y", (), categories={"c": ["7"]})


@pytest.mark.parametrize("name", ["t.parquet", "t.csv"])
def test_single_columns(tmp_path: Path, name: str) -> None:
    data = coloured()
    path = write(data.astype({"colour": "category"}), tmp_path / name)
    table = readers.read_columns(path, ["user", "shelf", "colour"])
    assert table.column_names == ["user", "shelf", "colour"]
    assert table["user"].to_pylist() == data["user"].tolist()
    shelves, colours = data["shelf"].tolist(), [each if isinstance(each, str) else None for each in data["colour"]]
    if name == "t.csv":
        shelves, colours = [str(each) for each in shelves], [each or None for each in colours]
    assert table["shelf"].to_pylist() == shelves
    assert table["colour"].to_pylist() == colours
    as_text = readers.read_columns(path, ["user"], user_as_text=True)["user"].to_pylist()
    assert as_text == [str(each) if name == "t.csv" else each for each in data["user"]]
    with pytest.raises(InputError, match=r"categories: there is no column 'color' in .*did you mean 'colour'"):
        readers.read_columns(path, ["user", "color"])
    with pytest.raises(InputError, match="user: there is no column 'User' in"):
        readers.read_columns(path, ["User", "colour"])
    with pytest.raises(InputError, match="there is no file"):
        readers.read_columns(tmp_path / f"no-{name}", ["user"])


# Labels


@pytest.mark.parametrize("name", ["t.parquet", "t.csv"])
@pytest.mark.parametrize(
    ("values", "classes", "codes"),
    [
        (["b", "a", "z", "ü"], ("a", "b", "ü"), [1, 0, -1, 2]),
        ([7, -1, 300, 7], (-1, 7), [1, 0, -1, 1]),
        ([True, False, True, True], (False, True), [1, 0, 1, 1]),
    ],
    ids=["text", "integers", "booleans"],
)
def test_labels_become_codes(tmp_path: Path, name: str, values: list[Any], classes: Any, codes: list[int]) -> None:
    data = pd.DataFrame({"user": [1, 1, 2, 3], "y": values, "x0": np.arange(4.0)})
    source = TableSource(write(data, tmp_path / name), "user", "y", classes=classes)
    assert source.feature_names == ("x0",)
    table = read_table(source)
    assert table.y.tolist() == codes
    assert table.y.dtype == np.float64
    assert table.X.ravel().tolist() == [0.0, 1.0, 2.0, 3.0]


def test_labels_are_of_the_type_of_the_features(tmp_path: Path) -> None:
    data = frame(dtype=np.float32)
    data["y"] = np.where(data["y"] > 0, "up", "down")
    table = read_table(TableSource(write(data, tmp_path / "t.parquet"), "user", "y", classes=("down", "up")))
    assert (table.X.dtype, table.y.dtype) == (np.float32, np.float32)
    encoded_labels = pd.DataFrame({**data, "y": data["y"].astype("category")})
    again = read_table(TableSource(write(encoded_labels, tmp_path / "u.parquet"), "user", "y", classes=("down", "up")))
    assert_same(again, table)
    assert set(table.y.tolist()) == {0.0, 1.0}


@pytest.mark.parametrize("name", ["t.parquet", "t.csv"])
def test_labels_that_are_missing(tmp_path: Path, name: str) -> None:
    for values, classes in (
        (["a", "", "b"], ("a", "b")),
        (["a", None, "b"], ("a",)),
        ([True, None, False], (False, True)),
    ):
        path = write(pd.DataFrame({"user": [1, 2, 3], "y": values, "x0": 1.0}), tmp_path / name)
        table = read_table(TableSource(path, "user", "y", classes=classes))
        assert table.ids.tolist() == [1, 2, 3]
        assert table.sizes.tolist() == [1, 0, 1]


def test_labels_that_do_not_fit(tmp_path: Path) -> None:
    data = frame()
    data["word"], data["yes"], data["count"] = "a", True, 3
    path = write(data, tmp_path / "t.parquet")

    def said(target: Any, *classes: Any) -> str:
        return complaint(path, "user", target, ["x0"], classes=classes)

    assert "'y' holds values of type double; make its labels text, integers or booleans" in said("y", "a", "b")
    assert "'word' holds text and the classes are integers" in said("word", 1, 2)
    assert "'count' holds integers and the classes are text" in said("count", "a", "b")
    assert "'yes' holds booleans and the classes are integers" in said("yes", 0, 1)
    assert "labels are one target column. Got 2" in said(["word", "yes"], "a", "b")
    assert "labels are one target column. Got 0" in said(None, "a", "b")
    advice = "turn it into numbers, or fit with --task classification if it holds labels"
    assert advice in complaint(path, "user", "word", ["x0"])
    text = write(data, tmp_path / "t.csv")
    assert "is not an integer in 40 rows, first in row 1;" in complaint(text, "user", "word", ["x0"], classes=(1, 2))
    assert "is neither true nor false in 40 rows, first in row 1;" in complaint(
        text, "user", "word", ["x0"], classes=(False, True)
    )
    message = complaint(text, "user", "word", ["x0"])
    assert "is not a number in 40 rows, first in row 1; correct it, or fit with --task classification" in message
