"""Files as they come: dialects, quirks of R, Excel and pandas, codes and dates, and all that is wrong at once."""

from __future__ import annotations

import datetime
import gzip
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from privrep.data.dialects import Dialect, find_dialect
from privrep.data.readers import TableSource, read_checked_batches, read_table
from privrep.data.text_values import find_leading_zeros
from privrep.errors import InputError

PLAIN = [[1.5, 0.0], [2.5, 1.0], [-3.0, 0.0]]  # what the rows below hold in x and z
DATES = "turn dates into numbers, such as days since a public day, or leave the column out"

READ: dict[str, tuple[bytes, str]] = {  # a file, and what is said about reading it
    "plain": (b"user,y,x,z\n1,1,1.5,0\n1,2,2.5,1\n2,3,-3,0\n", ""),
    "byte order mark": (b"\xef\xbb\xbfuser,y,x,z\n1,1,1.5,0\n1,2,2.5,1\n2,3,-3,0\n", ""),
    "windows lines": (b"user,y,x,z\r\n1,1,1.5,0\r\n1,2,2.5,1\r\n2,3,-3,0\r\n", ""),
    "all quoted": (b'"user","y","x","z"\n"1","1","1.5","0"\n"1","2","2.5","1"\n"2","3","-3","0"\n', ""),
    "spaces": (b"user,y,x,z\n1, 1, 1.5 ,0\n1, 2 ,2.5,+1\n2,3,-3, 0\n", ""),
    "truth of R": (b'"user","y","x","z"\n1,1,1.5,FALSE\n1,2,2.5,TRUE\n2,3,-3,FALSE\n', ""),
    "truth of pandas": (b"user,y,x,z\n1,1,1.5,False\n1,2,2.5,True\n2,3,-3,False\n", ""),
    "row names of R": (b'"","user","y","x","z"\n"a",1,1,1.5,0\n"b",1,2,2.5,1\n"c",2,3,-3,0\n', ""),
    "index of pandas": (b"Unnamed: 0,user,y,x,z\n5,1,1,1.5,0\n6,1,2,2.5,1\n7,2,3,-3,0\n", ""),
    "semicolons": (b"user;y;x;z\n1;1;1.5;0\n1;2;2.5;1\n2;3;-3;0\n", "separated by semicolons"),
    "decimal commas": (b"user;y;x;z\n1;1,0;1,5;0\n1;2,0;2,5;1\n2;3,0;-3,0;0\n", "separated by semicolons"),
    "tabs": (b"user\ty\tx\tz\n1\t1\t1.5\t0\n1\t2\t2.5\t1\n2\t3\t-3\t0\n", "separated by tabs"),
    "bars": (b"user|y|x|z\n1|1|1.5|0\n1|2|2.5|1\n2|3|-3|0\n", "separated by bars"),
    "utf-16": ("user\ty\tx\tz\n1\t1\t1.5\t0\n1\t2\t2.5\t1\n2\t3\t-3\t0\n".encode("utf-16"), "as utf-16, separated by"),
    "a comma in a name": (b'user;"y";"a, b, c, d, e";x;z\n1;1;9;1.5;0\n1;2;9;2.5;1\n2;3;9;-3;0\n', "semicolons"),
}


@pytest.mark.parametrize("packed", [False, True], ids=["csv", "gz"])
@pytest.mark.parametrize("case", READ, ids=list(READ))
def test_dialects(case: str, packed: bool, tmp_path: Path) -> None:
    content, said = READ[case]
    path = tmp_path / ("t.csv.gz" if packed else "t.csv")
    path.write_bytes(gzip.compress(content) if packed else content)
    wanted = ["x", "z"] if "name" in case and "row" not in case else None
    source = TableSource(path, "user", "y", wanted)
    assert source.feature_names == ("x", "z")
    table = read_table(source)
    assert table.X.tolist() == PLAIN
    assert table.y.tolist() == [1.0, 2.0, 3.0]
    assert table.ids.tolist() == [1, 2]
    assert len(source.remarks) == bool(said)
    assert all(said in remark for remark in source.remarks)


def test_latin_1_is_said_and_read(tmp_path: Path) -> None:
    path = tmp_path / "t.csv"
    path.write_bytes("user;y;c\nJürgen;1;grün\nZoë;2;weiß\n".encode("cp1252"))
    source = TableSource(path, "user", "y", (), categories={"c": ["grün", "weiß"]})
    assert source.remarks == (
        f"Reading {path} as Latin-1 (cp1252), separated by semicolons, decimals with a point or a comma.",
    )
    table = read_table(source)
    assert table.ids.tolist() == ["Jürgen", "Zoë"]
    assert table.X.tolist() == [[1.0, 0.0], [0.0, 1.0]]


@pytest.mark.parametrize("late", [0, 1 << 17])
def test_one_line_does_not_change_how_others_are_read(tmp_path: Path, late: int) -> None:
    """A byte that is not UTF-8 in a file that is: refused, wherever it is, unless the encoding is declared."""
    path = tmp_path / "t.csv"
    lines = ["user,y,x", "Zoë,1,2", *(["anna,1,2"] * late)]
    path.write_bytes("\n".join(lines).encode() + b"\nJ\xfcrgen,1,2")
    with pytest.raises(InputError, match=rf"is not UTF-8 in line {len(lines) + 1}, and no other encoding fits"):
        TableSource(path, "user", "y")
    declared = find_dialect(path, "user", Dialect("latin-1", decimal="point"))
    assert declared == Dialect("iso8859-1", ",", ".")
    path.write_bytes("\n".join(lines).replace("ë", "e").encode() + b"\nJ\xfc")  # the last byte may be cut off
    assert find_dialect(path, "user").encoding == "cp1252"


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"encoding": "klingon"}, "--encoding: 'klingon' is no encoding"),
        ({"delimiter": "~"}, "--delimiter must be one of comma, semicolon, tab, bar"),
        ({"decimal": ";"}, "--decimal must be one of comma, point"),
    ],
)
def test_dialects_that_are_none(options: dict[str, str], said: str) -> None:
    with pytest.raises(InputError, match=said):
        Dialect(**options)


def test_leading_zeros() -> None:
    text = ["007", "0", "-07", "0.5", None, "", "+", "00", "-0", "a07", "10", "0", "7"]
    found = find_leading_zeros(pa.array(text, pa.large_string()))
    assert [value for value, is_code in zip(text, found, strict=True) if is_code] == ["007", "-07", "00"]
    assert find_leading_zeros(pa.array(text, pa.large_string())[2:3]).tolist() == [True]  # not where the array begins
    assert find_leading_zeros(pa.array(["0", "7"], pa.large_string())[:1]).tolist() == [False]  # nor where it ends


REFUSED: dict[str, tuple[str, list[str]]] = {  # rows of user,y,a,b; and what is said
    "codes": ("1,1,007,1\n1,2,8,1", ["column 'a' of", "has leading zeros, as codes have, in row 1", "--numeric"]),
    "dates": ("1,1,2020-01-31,1\n1,2,2020-02-01 10:00,1", ["holds dates or times in 2 rows, first in row 1", DATES]),
    "other dates": ("1,1,31.01.2020,1\n1,2,1/31/2020,1", ["holds dates or times in 2 rows", DATES]),
    "text": ("1,1,1,1\n1,2,x,1\n1,2,y,1", ["'a' of", "is not a number in 2 rows, first in row 2", "--categorical"]),
    "hexadecimal": (
        "1,1,0x1F,1\n0x1F,2,3,1",
        ["'a' is not a number in row 1", "'user' starts with integers", "in row 2"],
    ),
    "thousands": ('1,1,"1,234",1', ["is not a number in row 1"]),
    "infinite": ("1,1,inf,1\n1,2,-inf,1\n1,3,3,1", ["has no finite number in 2 rows, first in row 1"]),
    "text and infinite": (
        "1,1,x,1\n1,2,inf,1",
        ["'a' of", "is not a number in row 1 and has no finite number in row 2; correct it"],
    ),
    "several": (
        "1,1,2020-01-01,01\n1,inf,x,2\n1,3,2020-01-02,3",
        [
            "3 columns of",
            "'a' holds dates or times in 2 rows, first in row 1 and is not a number in row 2",
            "'b' has leading zeros, as codes have, in row 1",
            "'y' has no finite target in row 2",
            f"To go on: {DATES}; correct it, name it with",
            "; name codes with --categorical to use them as they are written, or with --numeric if they are numbers",
        ],
    ),
    "lengths": ("1,1,1\n1,1,x,1\n1,2,3,4,5", ["2 rows of", "header's 4, first row 1 with 3", "'a' of", "in row 2;"]),
    "names of R's write.table": ("a,1,1,1,1\nb,1,2,3,4", ["2 rows of", "without row names"]),
}


@pytest.mark.parametrize("case", REFUSED, ids=list(REFUSED))
def test_all_that_is_wrong_is_one_sentence(case: str, tmp_path: Path) -> None:
    rows, said = REFUSED[case]
    (tmp_path / "t.csv").write_text(f"user,y,a,b\n{rows}\n")
    with pytest.raises(InputError) as caught:
        read_table(TableSource(tmp_path / "t.csv", "user", "y"))
    message = str(caught.value)
    assert "\n" not in message
    assert [part for part in said if part not in message] == []


def test_decimal_marks_are_not_mixed(tmp_path: Path) -> None:
    """1.234 may be a thousand and more where others write 1,5: nobody guesses."""
    path = tmp_path / "t.csv"
    path.write_text("user;y;x\n1;1,5;2\n1;2,5;1.234\n")
    with pytest.raises(InputError, match=r"'x' of .* has a point where others have a comma for decimals in row 2;"):
        read_table(TableSource(path, "user", "y"))
    with pytest.raises(InputError, match=r"'y' of .* is not a number in 2 rows"):
        read_table(TableSource(path, "user", "y", dialect=Dialect(decimal="point")))
    path.write_text('user,y,x\n1,"1,5",2\n1,"2,5","1,25"\n')
    assert read_table(TableSource(path, "user", "y", dialect=Dialect(decimal="comma"))).X.tolist() == [[2.0], [1.25]]


def test_a_late_problem_stops_everything(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """No batch comes after a problem, and what is wrong is counted to the end."""
    monkeypatch.setattr("privrep.data.sources.BATCH_BYTES", 4000)
    path = tmp_path / "t.csv"
    path.write_text("user,y,x\n" + "1,1,1\n" * 3000 + "1,1,x\n" + "1,1,1\n" * 3000 + "1,1,x\n")
    source, seen = TableSource(path, "user", "y"), list[int]()
    with pytest.raises(InputError, match="is not a number in 2 rows, first in row 3001;"):
        seen.extend(batch.num_rows for batch in read_checked_batches(source))
    assert 0 < sum(seen) <= 3000


def test_declared_numbers(tmp_path: Path) -> None:
    codes = ["007", "-08", "9"]
    (tmp_path / "t.csv").write_text("user,y,a\n" + "\n".join(f"1,1,{code}" for code in codes))
    table = pa.table(
        {"user": [1, 1, 1], "y": [1.0, 1.0, 1.0], "a": codes, "d": pa.array([1, 2, 3], pa.decimal128(5, 2))}
    )
    pq.write_table(table, tmp_path / "t.parquet")
    read = read_table(TableSource(tmp_path / "t.csv", "user", "y", numeric=["a"]))
    assert read.X.tolist() == [[7.0], [-8.0], [9.0]]
    source = TableSource(tmp_path / "t.parquet", "user", "y", numeric=["a"])
    assert read_table(source).X.tolist() == [[7.0, 1.0], [-8.0, 2.0], [9.0, 3.0]]
    assert TableSource(tmp_path / "t.parquet", "user", "y").feature_names == ("d",)  # text is text: types are declared
    with pytest.raises(InputError, match="numeric: there is no column 'zip'"):
        TableSource(tmp_path / "t.parquet", "user", "y", numeric=["zip"])
    with pytest.raises(InputError, match="numeric contains 'a', which is a column of categories"):
        TableSource(tmp_path / "t.csv", "user", "y", numeric=["a"], categories={"a": ["007"]})


TYPES: dict[str, tuple[Any, str]] = {
    "date": (pa.array([datetime.date(2020, 1, 1)] * 2), f"holds dates or times; {DATES}"),
    "timestamp": (pa.array([datetime.datetime(2020, 1, 1)] * 2), f"holds dates or times; {DATES}"),
    "text": (pa.array(["a", "b"]), "holds text, not numbers; turn it into numbers (--numeric reads text as numbers"),
    "list": (pa.array([[1], [2]]), "holds values of type list<element: int64>, not numbers; turn it into numbers or"),
    "nothing": (pa.nulls(2), "holds no values; fill it or leave it out"),
}


@pytest.mark.parametrize("kind", TYPES, ids=list(TYPES))
def test_types_of_parquet(kind: str, tmp_path: Path) -> None:
    column, said = TYPES[kind]
    pq.write_table(pa.table({"user": [1, 2], "y": [1.0, 2.0], "x": [1.0, 2.0], "c": column}), tmp_path / "t.parquet")
    with pytest.raises(InputError) as caught:
        TableSource(tmp_path / "t.parquet", "user", "y", ["x", "c"])
    assert f"column 'c' of {tmp_path / 't.parquet'} {said}" in str(caught.value)
    if kind == "nothing":
        return
    source = TableSource(tmp_path / "t.parquet", "user", "y")
    assert source.feature_names == ("x",)
    assert set(source.left_out) == {"c"}


def test_categories_with_gaps_and_numbers(tmp_path: Path) -> None:
    """Whole numbers with gaps come as floats; a list of text that has numbers finds them; NA is missing."""
    pq.write_table(pa.table({"user": [1, 1, 1], "y": [0.0] * 3, "c": [6.0, None, 7.0]}), tmp_path / "t.parquet")
    for listed in ([6, 7], ["6", "7.0"]):
        table = read_table(TableSource(tmp_path / "t.parquet", "user", "y", (), categories={"c": listed}))
        assert table.X.tolist() == [[1.0, 0.0], [0.0, 0.0], [0.0, 1.0]]
    (tmp_path / "t.csv").write_text('user,y,c\n1,0,NA\n1,0,"NA"\n1,0,a\n')
    for listed, wanted in ((["a"], [[0.0], [0.0], [1.0]]), (["NA"], [[1.0], [1.0], [0.0]])):
        table = read_table(TableSource(tmp_path / "t.csv", "user", "y", (), categories={"c": listed}))
        assert table.X.tolist() == wanted
    dense = read_table(TableSource(tmp_path / "t.csv", "user", "y", (), categories={"c": ["a"]}, dense=True))
    assert isinstance(dense.X, np.ndarray)
