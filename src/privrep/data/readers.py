"""Tables of (user, target, features) in Parquet or CSV files: what is in a file, its rows in batches or all at once."""

from __future__ import annotations

import difflib
import os
import re
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Literal

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.csv as csv
import pyarrow.parquet as pq

from privrep.data.user_table import Floats, UserTable
from privrep.errors import InputError

SUFFIXES: dict[str, Literal["parquet", "csv"]] = {
    ".parquet": "parquet",
    ".pq": "parquet",
    ".csv": "csv",
    ".csv.gz": "csv",
}
BATCH_BYTES = 16 << 20  # of one batch of rows
MAX_BATCH_ROWS = 1 << 16
_READ_BUFFER = 1 << 16  # per column; a memory map is as fast, but all it has touched counts as this process's memory
_PANDAS_INDEX = re.compile(r"__index_level_\d+__")


@dataclass(frozen=True)
class TableSource:
    """One file, the columns to use of it, and the promise that they are there: making one checks it against the file.

    `features=None` takes every column other than user and target; of a Parquet file, whose types are declared, every
    numeric one (integers, floats, booleans). The features and their types are public, so they are read off the header
    of a CSV file and the schema of a Parquet file, never off values: in a CSV file every target and feature is
    float64, and a value that is no number is an error. `target=None` is for rows whose target is to be predicted.
    Only the columns named here are ever read. `user_as_text` reads the ids of a CSV file as text even where they look
    like integers, which keeps leading zeros.
    """

    path: str | os.PathLike[str]
    user: str
    target: str | None
    features: Sequence[str] | None = None
    user_as_text: bool = False
    feature_names: tuple[str, ...] = field(init=False, repr=False, compare=False)
    schema: Any = field(init=False, repr=False, compare=False)  # of `batches`: user, target if any, features
    header: tuple[str, ...] = field(init=False, repr=False, compare=False)  # all columns of the file

    def __post_init__(self) -> None:
        self._check_options()
        kind = self.format
        file = Path(self.path)
        if not file.exists():
            raise InputError(f"there is no file {self.path}; check the path.")
        if not file.is_file():
            raise InputError(f"{self.path} is not a file; give the path of one Parquet or CSV file.")
        found = self._csv_schema() if kind == "csv" else self._parquet_schema()
        self._set("header", tuple(found.names))
        repeated = [name for name, times in Counter(self.header).items() if times > 1]
        if repeated:
            raise InputError(f"column {repeated[0]!r} is in {self.path} more than once; rename one of the two.")
        for option, name in (("user", self.user), ("target", self.target)):
            if name is not None:
                self._require(name, option)
        for name in self.features or ():
            self._require(name, "features")
        self._set("feature_names", tuple(self.features) if self.features is not None else self._numeric(found))
        if not self.feature_names:
            raise InputError(
                f"{self.path} has no numeric column besides user {self.user!r}"
                + (f" and target {self.target!r}" if self.target else "")
                + "; add feature columns or turn existing ones into numbers."
            )
        fields = [pa.field(name, self._type(name, found.field(name).type)) for name in self.columns]
        self._set("schema", pa.schema(fields))
        if kind == "csv":
            next(self._read_csv())  # what is wrong in the first rows is reported now

    @property
    def format(self) -> Literal["parquet", "csv"]:
        name = Path(self.path).name.lower()
        for suffix, kind in SUFFIXES.items():
            if name.endswith(suffix):
                return kind
        raise InputError(f"{self.path} does not end in {', '.join(SUFFIXES)}; convert the file to one of these.")

    @property
    def columns(self) -> tuple[str, ...]:
        """The columns that are read: user, target if there is one, features."""
        return (self.user, *([self.target] if self.target is not None else []), *self.feature_names)

    @property
    def dtype(self) -> np.dtype[Any]:
        """float32 where the target and all features are float32, else float64."""
        single = all(column.type == pa.float32() for column in list(self.schema)[1:])
        return np.dtype(np.float32 if single else np.float64)

    def batches(self) -> Iterator[Any]:
        """Arrow record batches with the columns of `schema`, of some 16 MB; at no time more than a few of them."""
        try:
            yield from self._read_csv() if self.format == "csv" else self._read_parquet()
        except (pa.ArrowException, OSError) as error:
            raise self._unreadable(error) from error

    # What is in the file

    def _check_options(self) -> None:
        if isinstance(self.features, str):
            raise InputError(f"features must be a list of column names; write [{self.features!r}].")
        if self.features is not None:
            self._set("features", tuple(self.features))
        if self.user == self.target:
            raise InputError(f"user and target are both column {self.user!r}; name two different columns.")
        if self.features is None:
            return
        for name, times in Counter(self.features).items():
            if times > 1:
                raise InputError(f"features names column {name!r} more than once; name it once.")
            if name in (self.user, self.target):
                role = "user" if name == self.user else "target"
                raise InputError(f"features contains {name!r}, which is the {role} column; take it out of features.")

    def _set(self, name: str, value: Any) -> None:
        object.__setattr__(self, name, value)  # the dataclass is frozen; this is its construction

    def _parquet_schema(self) -> Any:
        try:
            with self._open_parquet() as file:
                schema, rows = file.schema_arrow, file.metadata.num_rows
        except (pa.ArrowException, OSError) as error:
            raise self._unreadable(error) from error
        if rows == 0:
            raise self._no_rows()
        return schema

    def _csv_schema(self) -> Any:
        """Names of the header. Of the types that Arrow infers from the first block only that of the users counts."""
        try:
            with self._open_csv(csv.ConvertOptions()) as reader:
                schema = pa.schema(
                    [f if f.name == self.user else pa.field(f.name, pa.float64()) for f in reader.schema]
                )
                self._set("header", tuple(schema.names))
                first = next(iter(reader), None)
        except (pa.ArrowException, OSError) as error:
            if "Empty CSV file" in str(error):
                raise self._no_rows() from error
            raise self._unreadable(error) from error
        if first is None or first.num_rows == 0:
            raise self._no_rows()
        return schema

    def _no_rows(self) -> InputError:
        return InputError(f"{self.path} has no rows; give a file with at least one.")

    def _require(self, name: str, option: str) -> None:
        if name in self.header:
            return
        folded = {known.casefold(): known for known in self.header}
        close = difflib.get_close_matches(str(name).casefold(), folded, n=1)
        listed = ", ".join(repr(known) for known in self.header[:10]) + (", ..." if len(self.header) > 10 else "")
        advice = f"did you mean {folded[close[0]]!r}?" if close else f"choose from its columns {listed}."
        raise InputError(f"{option}: there is no column {name!r} in {self.path}; {advice}")

    def _numeric(self, found: Any) -> tuple[str, ...]:
        names = []
        for column in found:
            if column.name in (self.user, self.target):
                continue
            if self.format == "parquet" and _PANDAS_INDEX.fullmatch(column.name):
                continue
            if pa.types.is_null(column.type):
                raise InputError(
                    f"column {column.name!r} of {self.path} holds no values; fill it or list the features."
                )
            if _is_number(column.type):
                names.append(column.name)
        return tuple(names)

    def _type(self, name: str, found: Any) -> Any:
        """The type in which `batches` gives a column that was found as another; an error if it cannot be used."""
        if name == self.user:
            return self._user_type(found)
        if not _is_number(found):
            role = "target" if name == self.target else "feature"
            raise InputError(
                f"the {role} column {name!r} holds values of type {found}, not numbers; "
                + ("turn it into numbers." if role == "target" else "turn it into numbers or leave it out.")
            )
        return found

    def _user_type(self, found: Any) -> Any:
        if self.format == "csv":
            return pa.int64() if pa.types.is_integer(found) and not self.user_as_text else pa.large_string()
        if pa.types.is_dictionary(found):
            found = found.value_type
        if pa.types.is_integer(found) or pa.types.is_floating(found):
            return found
        if pa.types.is_string(found) or pa.types.is_large_string(found) or str(found) == "string_view":
            return pa.large_string()
        raise InputError(f"the user column {self.user!r} holds values of type {found}; make them integers or text.")

    # Its rows

    @property
    def _batch_rows(self) -> int:
        width = sum(column.type.bit_width / 8 if _is_number(column.type) else 16 for column in self.schema)
        return int(np.clip(BATCH_BYTES // width, 256, MAX_BATCH_ROWS))

    def _open_parquet(self) -> Any:
        return pq.ParquetFile(self.path, buffer_size=_READ_BUFFER, pre_buffer=False)

    def _read_parquet(self) -> Iterator[Any]:
        with self._open_parquet() as file:
            for batch in file.iter_batches(self._batch_rows, columns=list(self.columns)):
                yield self._conform(batch)

    def _open_csv(self, convert: Any) -> Any:
        packed = Path(self.path).name.lower().endswith(".gz")
        stream = pa.input_stream(os.fspath(self.path), compression="gzip" if packed else None)
        # without threads, errors come with the number of their row
        read = csv.ReadOptions(use_threads=False, block_size=BATCH_BYTES // 4)
        return csv.open_csv(stream, read, None, convert)

    def _read_csv(self) -> Iterator[Any]:
        types = {column.name: column.type for column in self.schema}
        convert = csv.ConvertOptions(column_types=types, include_columns=list(types))
        try:
            with self._open_csv(convert) as reader:
                for batch in reader:
                    if batch.num_rows:
                        yield self._conform(batch)
        except (pa.ArrowException, OSError) as error:
            raise self._unreadable(error) from error

    def _conform(self, batch: Any) -> Any:
        """The columns of `schema`, in its order and types."""
        columns = []
        for wanted in self.schema:
            column = batch.column(wanted.name)
            columns.append(column if column.type == wanted.type else column.cast(wanted.type))
        return pa.record_batch(columns, schema=self.schema)

    def _unreadable(self, error: Exception) -> InputError:
        text = str(error).splitlines()[0] if str(error) else type(error).__name__
        if found := re.search(r"In CSV column #(\d+): Row #(\d+): CSV conversion error to (\w+)", text):
            name, row, wanted = self.header[int(found[1])], int(found[2]) - 1, found[3]
            if name == self.user and wanted.startswith("int"):
                return InputError(
                    f"the user column {name!r} starts with integers and has other text in row {row} of {self.path}; "
                    "correct that row or set user_as_text."
                )
            if name == self.user:
                return InputError(f"column {name!r} of {self.path} is not UTF-8 text in row {row}; save it as UTF-8.")
            advice = self.or_name_features(name)
            return InputError(
                f"column {name!r} of {self.path} is not a number in row {row}; correct that value{advice}."
            )
        if found := re.search(r"Row #(\d+): Expected (\d+) columns, got (\d+)", text):
            return InputError(
                f"row {int(found[1]) - 1} of {self.path} has {found[3]} values under a header of {found[2]}; "
                "correct that line."
            )
        kind = "Parquet" if self.format == "parquet" else "CSV"
        return InputError(f"{self.path} cannot be read as {kind} ({text}); check the file or write it again.")

    def or_name_features(self, name: str) -> str:
        """More advice about a column with a bad value, where nobody asked for that column by name."""
        if self.features is not None or name in (self.user, self.target):
            return ""
        return ", or name the feature columns with --features to leave it out"


def checked_batches(source: TableSource) -> Iterator[Any]:
    """The batches of a file, every value in them looked at: no user missing, every number a finite one."""
    rows = 0
    for batch in source.batches():
        for name, column in zip(source.columns, batch.columns, strict=True):
            bad = _first_bad(column)
            if bad is not None:
                what = {source.user: "no user", source.target: "no finite target"}.get(name, "no finite number")
                raise InputError(
                    f"column {name!r} of {source.path} has {what} in row {rows + bad + 1}; fill the value in or "
                    f"leave the row out{source.or_name_features(name)}."
                )
        rows += batch.num_rows
        yield batch


def read_table(source: TableSource) -> UserTable:
    """All rows of a file that fits in memory. Without a target, y is NaN.

    float32 stays float32 where the target and all features are; otherwise everything becomes float64.
    """
    X, y, users = [], [], []
    for batch in checked_batches(source):
        values = [column_values(column) for column in batch.columns[1:]]
        users.append(batch.column(0))
        y.append(values.pop(0) if source.target is not None else np.full(batch.num_rows, np.nan))
        X.append(fill_rows(np.empty((batch.num_rows, len(values)), source.dtype), values))
    rows, targets = np.concatenate(X), np.concatenate(y).astype(source.dtype, copy=False)
    ids = pa.chunked_array(users)
    if not pa.types.is_large_string(ids.type):
        return UserTable.from_rows(rows, targets, ids.to_numpy())
    encoded = ids.dictionary_encode().combine_chunks()
    names = encoded.dictionary
    order = pc.sort_indices(names).to_numpy()
    rank = np.empty_like(order)
    rank[order] = np.arange(len(order), dtype=order.dtype)
    table = UserTable.from_rows(rows, targets, rank[encoded.indices.to_numpy()])
    return replace(table, ids=user_ids(names.take(pa.array(order))))


def column_values(column: Any) -> Floats:
    """A column without nulls as a NumPy array, without copying it where it holds integers or floats."""
    if column.null_count:
        raise InputError("a column that had no missing values when it was checked now has some; open the file again.")
    return np.asarray(column.to_numpy(zero_copy_only=False))


def user_ids(users: Any) -> NDArrayAny:
    """The values of a user column: an array of its integers or floats, or of Python strings."""
    return np.asarray(users.to_numpy(zero_copy_only=False))


def fill_rows(out: Floats, columns: Sequence[Floats]) -> Floats:
    """Columns into a row-major array. One column at a time is as fast as any blocking while `out` fits in the cache."""
    for j, column in enumerate(columns):
        out[:, j] = column
    return out


NDArrayAny = np.ndarray[Any, np.dtype[Any]]


def _is_number(kind: Any) -> bool:
    return bool(pa.types.is_integer(kind) or pa.types.is_floating(kind) or pa.types.is_boolean(kind))


def _first_bad(column: Any) -> int | None:
    """Position of the first value that is missing, not finite or an empty text."""
    if column.null_count:
        return int(pc.index(column.is_null(), True).as_py())
    if pa.types.is_floating(column.type):
        values = column.to_numpy()
        with np.errstate(all="ignore"):
            if np.isfinite(values.sum()):
                return None
        bad = np.flatnonzero(~np.isfinite(values))
        return int(bad[0]) if len(bad) else None
    if pa.types.is_large_string(column.type):
        position = int(pc.index(column, pa.scalar("", column.type)).as_py())
        return position if position >= 0 else None
    return None
