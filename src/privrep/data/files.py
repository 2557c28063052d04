"""Parquet and CSV files: opening them, what columns they have, and a sentence on what is wrong with one."""

from __future__ import annotations

import difflib
import os
import re
from collections import Counter
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, Literal

import pyarrow as pa
import pyarrow.csv as csv
import pyarrow.parquet as pq

from privrep.errors import InputError

SUFFIXES: dict[str, Literal["parquet", "csv"]] = {
    ".parquet": "parquet",
    ".pq": "parquet",
    ".csv": "csv",
    ".csv.gz": "csv",
}
_READ_BUFFER = 1 << 16  # per column; a memory map is as fast, but all it has touched counts as this process's memory
_Path = str | os.PathLike[str]


def file_format(path: _Path) -> Literal["parquet", "csv"]:
    name = Path(path).name.lower()
    for suffix, kind in SUFFIXES.items():
        if name.endswith(suffix):
            return kind
    raise InputError(f"{path} does not end in {', '.join(SUFFIXES)}; convert the file to one of these.")


def open_parquet(path: _Path) -> Any:
    return pq.ParquetFile(path, buffer_size=_READ_BUFFER, pre_buffer=False)


def open_csv(path: _Path, convert: Any, block_size: int) -> Any:
    packed = Path(path).name.lower().endswith(".gz")
    stream = pa.input_stream(os.fspath(path), compression="gzip" if packed else None)
    # without threads, errors come with the number of their row
    read = csv.ReadOptions(use_threads=False, block_size=block_size)
    return csv.open_csv(stream, read, None, convert)


def file_schema(path: _Path, user: str, block_size: int) -> Any:
    """All columns of a file with their types; an error if there is no such file, it has no rows or a name twice."""
    kind = file_format(path)
    if not Path(path).exists():
        raise InputError(f"there is no file {path}; check the path.")
    if not Path(path).is_file():
        raise InputError(f"{path} is not a file; give the path of one Parquet or CSV file.")
    try:
        schema, rows = _csv_schema(path, user, block_size) if kind == "csv" else _parquet_schema(path)
    except (pa.ArrowException, OSError) as error:
        if "Empty CSV file" not in str(error):
            raise unreadable(path, error) from error
        rows = 0
    if rows == 0:
        raise InputError(f"{path} has no rows; give a file with at least one.")
    repeated = [name for name, times in Counter(schema.names).items() if times > 1]
    if repeated:
        raise InputError(f"column {repeated[0]!r} is in {path} more than once; rename one of the two.")
    return schema


def _parquet_schema(path: _Path) -> tuple[Any, int]:
    with open_parquet(path) as file:
        return file.schema_arrow, file.metadata.num_rows


def _csv_schema(path: _Path, user: str, block_size: int) -> tuple[Any, int]:
    """Names of the header. Of the types that Arrow infers from the first block only that of the users counts."""
    with open_csv(path, csv.ConvertOptions(), block_size) as reader:
        schema = pa.schema([f if f.name == user else pa.field(f.name, pa.float64()) for f in reader.schema])
        first = next(iter(reader), None)
    return schema, 0 if first is None else first.num_rows


def require(name: str, option: str, path: _Path, header: Sequence[str]) -> None:
    """An error that helps if the header has no column of this name."""
    if name in header:
        return
    folded = {known.casefold(): known for known in header}
    close = difflib.get_close_matches(str(name).casefold(), folded, n=1)
    listed = ", ".join(repr(known) for known in header[:10]) + (", ..." if len(header) > 10 else "")
    advice = f"did you mean {folded[close[0]]!r}?" if close else f"choose from its columns {listed}."
    raise InputError(f"{option}: there is no column {name!r} in {path}; {advice}")


def user_type(name: str, found: Any, kind: Literal["parquet", "csv"], as_text: bool) -> Any:
    """The type in which a user column of this type is read."""
    if kind == "csv":
        return pa.int64() if pa.types.is_integer(found) and not as_text else pa.large_string()
    if pa.types.is_dictionary(found):
        found = found.value_type
    if pa.types.is_integer(found) or pa.types.is_floating(found):
        return found
    if is_text(found):
        return pa.large_string()
    raise InputError(f"the user column {name!r} holds values of type {found}; make them integers or text.")


def is_text(kind: Any) -> bool:
    return bool(pa.types.is_string(kind) or pa.types.is_large_string(kind) or str(kind) == "string_view")


def unreadable(
    path: _Path,
    error: Exception,
    header: Sequence[str] = (),
    user: str | None = None,
    advice: Callable[[str], str] = lambda name: "",
) -> InputError:
    """What to say of an error of Arrow's; `advice` on a column with a bad number comes after "correct that value"."""
    text = str(error).splitlines()[0] if str(error) else type(error).__name__
    if header and (found := re.search(r"In CSV column #(\d+): Row #(\d+): CSV conversion error to (\w+)", text)):
        name, row, wanted = header[int(found[1])], int(found[2]) - 1, found[3]
        if name == user and wanted.startswith("int"):
            return InputError(
                f"the user column {name!r} starts with integers and has other text in row {row} of {path}; "
                "correct that row or set user_as_text."
            )
        if wanted.endswith("string"):
            return InputError(f"column {name!r} of {path} is not UTF-8 text in row {row}; save it as UTF-8.")
        if wanted.startswith("int"):
            return InputError(
                f"column {name!r} of {path} is not an integer in row {row}; correct that value or list its "
                "values as text."
            )
        if wanted == "bool":
            return InputError(f"column {name!r} of {path} is neither true nor false in row {row}; correct that value.")
        return InputError(f"column {name!r} of {path} is not a number in row {row}; correct that value{advice(name)}.")
    if found := re.search(r"Row #(\d+): Expected (\d+) columns, got (\d+)", text):
        return InputError(
            f"row {int(found[1]) - 1} of {path} has {found[3]} values under a header of {found[2]}; correct that line."
        )
    kind = "Parquet" if file_format(path) == "parquet" else "CSV"
    return InputError(f"{path} cannot be read as {kind} ({text}); check the file or write it again.")
