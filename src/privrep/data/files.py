"""Parquet and CSV files: opening them, what columns they have, and a sentence on what is wrong with one."""

from __future__ import annotations

import difflib
import os
import re
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Literal

import pyarrow as pa
import pyarrow.csv as csv

from privrep.boundary import say_why
from privrep.data.dialects import Dialect, find_dialect, is_packed
from privrep.data.parquet import open_parquet as open_parquet
from privrep.data.problems import Problems
from privrep.data.problems import is_text as is_text
from privrep.errors import InputError, OverLimit, PrivrepError

SUFFIXES: dict[str, Literal["parquet", "csv"]] = {
    ".parquet": "parquet",
    ".pq": "parquet",
    ".csv": "csv",
    ".csv.gz": "csv",
}
_ROW_NAMES = re.compile(r"|__index_level_\d+__|Unnamed: \d+")
_Path = str | os.PathLike[str]


def find_format(path: _Path) -> Literal["parquet", "csv"]:
    """Return the format of a file by the end of its name. Raise InputError for any other."""
    name = Path(path).name.lower()
    for suffix, kind in SUFFIXES.items():
        if name.endswith(suffix):
            return kind
    raise InputError(f"{path} does not end in {', '.join(SUFFIXES)}; convert the file to one of these.")


def open_csv(path: _Path, dialect: Dialect, convert: Any, block_size: int, problems: Problems | None = None) -> Any:
    """Open a CSV file to read its rows in blocks.

    Args:
        path: of the file.
        dialect: how it is written.
        convert: pyarrow.csv.ConvertOptions.
        block_size: bytes of a block.
        problems: where lines of another length than the header's are noted; without it they are an error.
    """
    # whoever found the dialect read all of a packed file, and looked at what it becomes
    stream = pa.input_stream(os.fspath(path), compression="gzip" if is_packed(path) else None)
    # without threads, errors come with the number of their row
    encoding = "utf8" if dialect.encoding in (None, "utf-8") else dialect.encoding
    read = csv.ReadOptions(use_threads=False, block_size=block_size, encoding=encoding)
    handler = None if problems is None else problems.note_ragged
    parse = csv.ParseOptions(delimiter=dialect.delimiter or ",", newlines_in_values=True, invalid_row_handler=handler)
    return csv.open_csv(stream, read, parse, convert)


def make_text_options(names: Sequence[str], missing: Sequence[str], types: Mapping[str, Any] | None = None) -> Any:
    """Return options to read columns of a CSV file as text, null where the text is missing and not quoted.

    Args:
        names: the columns.
        missing: the text that stands for a missing value.
        types: the types of columns that are not to be text.
    """
    return csv.ConvertOptions(
        column_types={**dict.fromkeys(names, pa.large_string()), **(types or {})},
        include_columns=list(names),
        null_values=list(missing),
        strings_can_be_null=True,
        quoted_strings_can_be_null=False,
    )


def check_exists(path: _Path) -> None:
    """Raise InputError unless there is such a file, of a kind that can be read."""
    find_format(path)
    if not Path(path).exists():
        raise InputError(f"there is no file {path}; check the path.")
    if not Path(path).is_file():
        raise InputError(f"{path} is not a file; give the path of one Parquet or CSV file.")


def find_file_dialect(path: _Path, user: str | None, asked: Dialect | None = None) -> Dialect:
    """Return how a file is written, if it is CSV. Raise InputError for one that cannot be read.

    Args:
        path: of the file.
        user: the column of users.
        asked: what was declared.
    """
    check_exists(path)
    if find_format(path) == "parquet":
        return asked or Dialect()
    with reading_table(path):
        return find_dialect(path, user, asked)


def read_schema(path: _Path, user: str, block_size: int, asked: Dialect | None = None) -> Any:
    """Return all columns of a file with their types.

    Raise InputError if there is no such file, it has no rows or a name twice.

    Args:
        path: of the file.
        user: the column of users.
        block_size: bytes of a CSV file to look at.
        asked: how a CSV file is declared to be written.
    """
    dialect, kind = find_file_dialect(path, user, asked), find_format(path)
    with reading_table(path):
        schema, rows = (
            _read_csv_schema(path, user, block_size, dialect) if kind == "csv" else _read_parquet_schema(path)
        )
    if rows == 0:
        raise InputError(f"{path} has no rows; give a file with at least one.")
    repeated = [name for name, times in Counter(schema.names).items() if times > 1 and not is_row_name(name)]
    if repeated:
        raise InputError(f"column {repeated[0]!r} is in {path} more than once; rename one of the two.")
    return schema


def is_row_name(name: str) -> bool:
    """Return whether a column is one of row names or of an index, as R and pandas write them; the header tells."""
    return _ROW_NAMES.fullmatch(name) is not None


def _read_parquet_schema(path: _Path) -> tuple[Any, int]:
    """Return the schema and the number of rows of a Parquet file."""
    with open_parquet(path) as file:
        return file.schema_arrow, file.metadata.num_rows


def _read_csv_schema(path: _Path, user: str, block_size: int, dialect: Dialect) -> tuple[Any, int]:
    """Return the names of the header, and how many rows the first block has.

    Of types only the users' type counts: integers where Arrow takes the first block for integers, else text.
    """
    problems = Problems(path)
    try:
        with open_csv(path, dialect, csv.ConvertOptions(), block_size, problems) as reader:
            found = reader.schema
            rows = next((batch.num_rows for batch in reader if batch.num_rows), 0)
    except pa.ArrowInvalid as error:
        if "Empty CSV file" not in str(error):
            raise
        return pa.schema([]), 0
    if not rows and problems:
        raise problems.error()
    kind = pa.large_string()
    if user in found.names and pa.types.is_integer(found.field(user).type):
        kind = pa.int64()
    schema = pa.schema([(name, kind if name == user else pa.float64()) for name in found.names])
    return schema, rows


def require_column(name: str, option: str, path: _Path, header: Sequence[str]) -> None:
    """Raise InputError, with advice, unless the header has a column of this name.

    Args:
        name: of the column.
        option: that named it.
        path: of the file.
        header: all columns of the file.
    """
    if name in header:
        return
    folded = {known.casefold(): known for known in header}
    close = difflib.get_close_matches(str(name).casefold(), folded, n=1)
    listed = ", ".join(repr(known) for known in header[:10]) + (", ..." if len(header) > 10 else "")
    advice = f"did you mean {folded[close[0]]!r}?" if close else f"choose from its columns {listed}."
    raise InputError(f"{option}: there is no column {name!r} in {path}; {advice}")


def choose_user_type(name: str, found: Any, kind: Literal["parquet", "csv"], as_text: bool) -> Any:
    """Return the type in which a user column is read. Raise InputError if it cannot hold ids.

    Args:
        name: of the column.
        found: its type in the file.
        kind: of the file.
        as_text: whether a CSV file's ids are text even where they look like integers.
    """
    if kind == "csv":
        return pa.int64() if pa.types.is_integer(found) and not as_text else pa.large_string()
    if pa.types.is_dictionary(found):
        found = found.value_type
    if pa.types.is_integer(found) or pa.types.is_floating(found):
        return found
    if is_text(found):
        return pa.large_string()
    raise InputError(f"the user column {name!r} holds values of type {found}; make them integers or text.")


@contextmanager
def reading_table(path: _Path) -> Iterator[None]:
    """Turn whatever goes wrong in reading a table into one sentence that names the file."""
    try:
        yield
    except OverLimit as error:
        raise make_unreadable_error(path, error) from None
    except PrivrepError:
        raise
    except Exception as error:
        raise make_unreadable_error(path, error) from error


def make_unreadable_error(path: _Path, error: Exception) -> InputError:
    """Return the error to raise for an error of Arrow's, of Python's or of the system's."""
    text = say_why(error)
    if found := re.search(r"Row #(\d+): Expected (\d+) columns, got (\d+)", text):
        return InputError(
            f"row {int(found[1]) - 1} of {path} has {found[3]} values under a header of {found[2]}; correct that line."
        )
    kind = "Parquet" if find_format(path) == "parquet" else "CSV"
    return InputError(f"{path} cannot be read as {kind} ({text}); check the file or write it again.")
