"""Tables of (user, target, features) in Parquet or CSV files: what is in a file, its rows in batches or all at once."""

from __future__ import annotations

import os
import re
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Literal

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.csv as csv
from scipy import sparse

from privrep.data import categories as one_hot
from privrep.data.files import SUFFIXES as SUFFIXES
from privrep.data.files import file_format, file_schema, open_csv, open_parquet, require, unreadable, user_type
from privrep.data.table import UserTable
from privrep.errors import InputError
from privrep.typing import Floats

BATCH_BYTES = 16 << 20  # of one batch of rows
MAX_BATCH_ROWS = 1 << 16
_LABELS = ", or fit with --task classification if it holds labels"
_PANDAS_INDEX = re.compile(r"__index_level_\d+__")


@dataclass(frozen=True)
class TableSource:
    """One file, the columns to use of it, and the promise that they are there: making one checks it against the file.

    `features=None` takes every column other than user and target; of a Parquet file, whose types are declared, every
    numeric one (integers, floats, booleans). The features and their types are public, so they are read off the header
    of a CSV file and the schema of a Parquet file, never off values: in a CSV file every target and feature is
    float64, and a value that is no number is an error. `target` is a column or several of them; None is for rows whose
    target is to be predicted. Only the columns named here are ever read. `user_as_text` reads the ids of a CSV file as
    text even where they look like integers, which keeps leading zeros.

    `categories` are columns of text or integers to be one-hot encoded, each with the public list of its categories.
    They come after the numeric features, a column `name=value` for each category in the order of the list; a row whose
    value is missing or not in the list has zeros there. The list is never read off the file: which values occur is
    private. A column of a CSV file is read as text where its list is of text and as integers where it is of integers.

    With `classes`, a public list of text, integers or booleans, the target is a column of labels: they become numbers,
    their positions in the list, -1 for those not in it. A missing label is an error.
    """

    path: str | os.PathLike[str]
    user: str
    target: str | Sequence[str] | None
    features: Sequence[str] | None = None
    user_as_text: bool = False
    categories: Mapping[str, Sequence[str | int]] | None = field(default=None, hash=False)
    classes: one_hot.Categories | None = None
    numeric_names: tuple[str, ...] = field(init=False, repr=False, compare=False)
    feature_names: tuple[str, ...] = field(init=False, repr=False, compare=False)  # numeric, then one-hot columns
    schema: Any = field(init=False, repr=False, compare=False)  # of `batches`, with the columns of `columns`
    read_types: dict[str, Any] = field(init=False, repr=False, compare=False)  # of `columns` before they are encoded
    header: tuple[str, ...] = field(init=False, repr=False, compare=False)  # all columns of the file
    dtype: np.dtype[Any] = field(init=False, repr=False, compare=False)
    """float32 where all targets (other than labels) and numeric features are float32, else float64."""

    def __post_init__(self) -> None:
        self._check_options()
        found = file_schema(self.path, self.user, BATCH_BYTES // 4)
        self._set("header", tuple(found.names))
        named = [("user", self.user), *(("target", name) for name in self.targets)]
        named += [("features", name) for name in self.features or ()] + [("categories", name) for name in self._lists]
        for option, name in named:
            require(name, option, self.path, self.header)
        self._set("numeric_names", self.features if self.features is not None else self._numeric(found))
        self._set("feature_names", (*self.numeric_names, *one_hot.names(self._lists)))
        self._check_feature_names()
        self._set("read_types", {name: self._type(name, found.field(name).type) for name in self.columns})
        numbers = self.numeric_names if self.classes is not None else (*self.targets, *self.numeric_names)
        kinds = [self.read_types[name] for name in numbers]
        single = bool(kinds) and all(kind == pa.float32() for kind in kinds)
        self._set("dtype", np.dtype(np.float32 if single else np.float64))
        coded = dict.fromkeys(self._lists, pa.int32())
        if self.classes is not None:
            coded[self.targets[0]] = pa.float32() if single else pa.float64()
        self._set("schema", pa.schema([(name, coded.get(name, kind)) for name, kind in self.read_types.items()]))
        if self.format == "csv":
            next(self._read_csv())  # what is wrong in the first rows is reported now

    @property
    def format(self) -> Literal["parquet", "csv"]:
        return file_format(self.path)

    @property
    def targets(self) -> tuple[str, ...]:
        if self.target is None:
            return ()
        single = isinstance(self.target, str) or not hasattr(self.target, "__iter__")
        return (self.target,) if single else tuple(self.target)  # type: ignore[return-value]

    @property
    def columns(self) -> tuple[str, ...]:
        """The columns that are read: user, targets, numeric features, columns of categories."""
        return (self.user, *self.targets, *self.numeric_names, *self._lists)

    @property
    def is_sparse(self) -> bool:
        """Whether rows are made sparse: where there are categories."""
        return bool(self._lists)

    @property
    def _lists(self) -> Mapping[str, one_hot.Categories]:
        return self.categories or {}  # type: ignore[return-value]

    def batches(self) -> Iterator[Any]:
        """Arrow record batches with the columns of `schema`, of some 16 MB; at no time more than a few of them.

        A column of categories comes as codes, the positions of its values in the list, -1 for those not in it.
        """
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
        targets = self.targets
        if self.target is not None:
            if not targets:
                raise InputError("target names no column; name one or more.")
            self._set("target", targets[0] if len(targets) == 1 else targets)
        if self.categories is not None:
            self._set("categories", one_hot.checked_lists(self.categories, selected=True) or None)
        if self.classes is not None and len(targets) != 1:
            raise InputError(f"labels are one target column. Got {len(targets)} instead.")
        if self.user in targets:
            raise InputError(f"user and target are both column {self.user!r}; name two different columns.")
        article = "a" if len(targets) > 1 else "the"
        taken = {self.user: "the user column"}
        for option, names, role in (
            ("target", targets, f"{article} target column"),
            ("categories", tuple(self._lists), "a column of categories"),
            ("features", self.features or (), ""),
        ):
            for name, times in Counter(names).items():
                if times > 1:
                    raise InputError(f"{option} names column {name!r} more than once; name it once.")
                if name in taken:
                    raise InputError(f"{option} contains {name!r}, which is {taken[name]}; take it out of {option}.")
            taken |= dict.fromkeys(names, role)

    def _set(self, name: str, value: Any) -> None:
        object.__setattr__(self, name, value)  # the dataclass is frozen; this is its construction

    def _check_feature_names(self) -> None:
        name, times = Counter(self.feature_names).most_common(1)[0] if self.feature_names else ("", 0)
        if times == 0 and not self._lists:  # a column of items of which none could be named is no feature, yet enough
            several = "targets" if len(self.targets) > 1 else "target"
            raise InputError(
                f"{self.path} has no numeric column besides user {self.user!r}"
                + (f" and {several} {', '.join(map(repr, self.targets))}" if self.targets else "")
                + "; add feature columns or turn existing ones into numbers."
            )
        if times > 1:
            raise InputError(f"the feature name {name!r} stands for two columns; rename a column of {self.path}.")

    def _numeric(self, found: Any) -> tuple[str, ...]:
        names = []
        for column in found:
            if column.name in (self.user, *self.targets, *self._lists):
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
        """The type in which a column is read that was found as another; an error if it cannot be used."""
        if name == self.user:
            return user_type(name, found, self.format, self.user_as_text)
        if name in self._lists:
            listed = self._lists[name]
            return one_hot.csv_type(listed) if self.format == "csv" else one_hot.read_type(name, listed, found)
        if name in self.targets and self.classes is not None:
            listed = self.classes
            return one_hot.csv_label_type(listed) if self.format == "csv" else one_hot.label_type(name, listed, found)
        if not _is_number(found):
            role = "target" if name in self.targets else "feature"
            otherwise = _LABELS if role == "target" else " or leave it out"
            raise InputError(
                f"the {role} column {name!r} holds values of type {found}, not numbers; turn it into numbers"
                f"{otherwise}."
            )
        return found

    # Its rows

    @property
    def _batch_rows(self) -> int:
        width = sum(column.type.bit_width / 8 if _is_number(column.type) else 16 for column in self.schema)
        return int(np.clip(BATCH_BYTES // width, 256, MAX_BATCH_ROWS))

    def _read_parquet(self) -> Iterator[Any]:
        with open_parquet(self.path) as file:
            for batch in file.iter_batches(self._batch_rows, columns=list(self.columns)):
                yield self._conform(batch)

    def _read_csv(self) -> Iterator[Any]:
        convert = csv.ConvertOptions(column_types=self.read_types, include_columns=list(self.columns))
        try:
            with open_csv(self.path, convert, BATCH_BYTES // 4) as reader:
                for batch in reader:
                    if batch.num_rows:
                        yield self._conform(batch)
        except (pa.ArrowException, OSError) as error:
            raise self._unreadable(error) from error

    def _conform(self, batch: Any) -> Any:
        """The columns of `schema`, in its order and types."""
        columns, lists = [], self._lists
        for wanted in self.schema:
            column = batch.column(wanted.name)
            if wanted.name in lists:
                column = one_hot.codes(column, lists[wanted.name])
            elif self.classes is not None and wanted.name in self.targets:
                column = one_hot.label_codes(column, self.classes)
            columns.append(column if column.type == wanted.type else column.cast(wanted.type))
        return pa.record_batch(columns, schema=self.schema)

    def _unreadable(self, error: Exception) -> InputError:
        def advice(name: str) -> str:
            return _LABELS if name in self.targets else self.or_name_features(name)

        return unreadable(self.path, error, self.header, self.user, advice)

    def or_name_features(self, name: str) -> str:
        """More advice about a column with a bad value, where nobody asked for that column by name."""
        if self.features is not None or name in (self.user, *self.targets, *self._lists):
            return ""
        return ", or name the feature columns with --features to leave it out"


def checked_batches(source: TableSource) -> Iterator[Any]:
    """The batches of a file, every value in them looked at: no user missing, every number a finite one."""
    rows = 0
    target = "no finite target" if source.classes is None else "no label"
    missing = {source.user: "no user"} | dict.fromkeys(source.targets, target)
    for batch in source.batches():
        for name, column in zip(source.columns, batch.columns, strict=True):
            bad = _first_bad(column)
            if bad is not None:
                what = missing.get(name, "no finite number")
                raise InputError(
                    f"column {name!r} of {source.path} has {what} in row {rows + bad + 1}; fill the value in or "
                    f"leave the row out{source.or_name_features(name)}."
                )
        rows += batch.num_rows
        yield batch


def read_table(source: TableSource) -> UserTable:
    """All rows of a file that fits in memory. Without a target, y is NaN.

    float32 stays float32 where all targets and numeric features are; otherwise everything becomes float64.
    """
    parts, users = [], []
    for batch in checked_batches(source):
        users.append(batch.column(0))
        parts.append(assembled(source, [[column_values(column) for column in batch.columns[1:]]], batch.num_rows))
    X = [part for part, _ in parts]
    rows = sparse.csr_array(sparse.vstack(X, format="csr")) if source.is_sparse else np.concatenate(X)
    targets = np.concatenate([part for _, part in parts])
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


def assembled(source: TableSource, pieces: Iterable[Sequence[Floats]], rows: int) -> tuple[Any, Floats]:
    """X and y of so many rows in pieces, each with the columns of the source's batches but the user."""
    q, p = len(source.targets), len(source.numeric_names)
    y = np.empty((rows, q), source.dtype)
    X = np.empty((rows, p), source.dtype)
    codes = np.empty((rows, len(source.columns) - 1 - q - p), np.int32)
    start = 0
    for piece in pieces:
        stop = start + len(piece[0])
        fill_rows(y[start:stop], piece[:q])
        fill_rows(X[start:stop], piece[q : q + p])
        fill_rows(codes[start:stop], piece[q + p :])
        start = stop
    sizes = [len(listed) for listed in (source.categories or {}).values()]
    targets = y if q > 1 else y.ravel() if q else np.full(rows, np.nan, source.dtype)
    return (one_hot.one_hot(X, codes, sizes) if source.is_sparse else X), targets


def read_columns(path: str | os.PathLike[str], names: Sequence[str], user_as_text: bool = False) -> Any:
    """Just these columns of a file, the first of them the users, as an Arrow table; no value in them is looked at.

    It is for finding out which categories occur, which is private: only what a private selection makes of it may be
    shown or used. Ids come as `TableSource` reads them. Other columns come as text from a CSV file, and from a Parquet
    file in the type they have there, out of their dictionaries.
    """
    user, kind = names[0], file_format(path)
    found = file_schema(path, user, BATCH_BYTES // 4)
    for name in names:
        require(name, "user" if name == user else "categories", path, found.names)
    types = {name: pa.large_string() if kind == "csv" else found.field(name).type for name in names}
    types = {name: each.value_type if pa.types.is_dictionary(each) else each for name, each in types.items()}
    types[user] = user_type(user, found.field(user).type, kind, user_as_text)
    try:
        if kind == "csv":
            convert = csv.ConvertOptions(column_types=types, include_columns=list(types))
            with open_csv(path, convert, BATCH_BYTES // 4) as reader:
                return reader.read_all()
        with open_parquet(path) as file:
            return file.read(columns=list(types)).select(list(types)).cast(pa.schema(list(types.items())))
    except (pa.ArrowException, OSError) as error:
        raise unreadable(path, error, found.names, user) from error


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
