"""Tables of (user, target, features) in Parquet or CSV files: the columns of a file, and its rows in batches."""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from privrep.data import categories as one_hot
from privrep.data.dialects import Dialect
from privrep.data.files import (
    choose_user_type,
    find_file_dialect,
    find_format,
    is_row_name,
    make_text_options,
    open_csv,
    read_schema,
    reading_table,
    require_column,
)
from privrep.data.missing import IMPUTE, Missing, make_indicator_names
from privrep.data.parquet import iterate_batches
from privrep.data.problems import CODES, Problems, name_value_kind, note_type
from privrep.data.text_values import MISSING_TEXT, find_leading_zeros, read_integers, read_numbers, read_truth
from privrep.errors import InputError

BATCH_BYTES = 16 << 20  # of one batch of rows
MAX_BATCH_ROWS = 1 << 16
_LABELS = ", or fit with --task classification if it holds labels"


@dataclass(frozen=True)
class TableSource:
    """One file and the columns to use of it, checked against the file when it is made.

    The features and their types are public. So they are read off the header of a CSV file and the schema of a Parquet
    file, never off values. In a CSV file every target and feature is float64. A value that is no number, or that has
    leading zeros as codes have, is an error there. Only the columns named here are ever read.

    Args:
        path: of the file.
        user: column of users.
        target: column of targets, or several of them. None is for rows whose target is to be predicted. Rows without a
            target, or without one of several, are left out.
        features: columns of features. None takes every column other than user and target, and in a Parquet file every
            numeric one (integers, floats, decimals, booleans). Row names, as R and pandas write them, are left out.
        user_as_text: reads the ids of a CSV file as text even where they look like integers.
        categories: columns to be one-hot encoded, each with the public list of its categories, never read off the file.
            They come after the numeric features, a column `name=value` for each category. A row whose value is missing
            or not in the list has zeros there. A CSV column is read as its list is: text or integers.
        classes: public list of text, integers or booleans. The target is then a column of labels, which become their
            positions in the list, -1 for those not in it.
        numeric: columns declared to be numbers: leading zeros are fine, and text in a Parquet file is read as in a CSV
            file.
        dialect: how a CSV file is written. What it leaves open is found out.
        dense: makes rows dense even where there are categories.
        items: whether the categories are items of ratings, whose rows are always sparse.
        weight: column of weights of rows, see `data.weights`.
        missing: what is done about missing features, see `data.missing`.
    """

    path: str | os.PathLike[str]
    user: str
    target: str | Sequence[str] | None
    features: Sequence[str] | None = None
    user_as_text: bool = False
    categories: Mapping[str, Sequence[str | int]] | None = field(default=None, hash=False)
    classes: one_hot.Categories | None = None
    numeric: Sequence[str] = ()
    dialect: Dialect | None = None
    dense: bool = False
    items: bool = False
    weight: str | None = None
    missing: Missing = IMPUTE
    numeric_names: tuple[str, ...] = field(init=False, repr=False, compare=False)
    feature_names: tuple[str, ...] = field(init=False, repr=False, compare=False)  # numeric, indicators, one-hot
    schema: Any = field(init=False, repr=False, compare=False)  # of `batches`, with the columns of `columns`
    read_types: dict[str, Any] = field(init=False, repr=False, compare=False)  # of `columns` before they are encoded
    header: tuple[str, ...] = field(init=False, repr=False, compare=False)  # all columns of the file
    left_out: dict[str, str] = field(init=False, repr=False, compare=False)  # columns that nobody named, and why
    decimal: str = field(init=False, repr=False, compare=False)  # the decimal mark of the first rows of a CSV file
    dtype: np.dtype[Any] = field(init=False, repr=False, compare=False)
    """float32 where all targets (other than labels) and numeric features are float32, else float64."""

    def __post_init__(self) -> None:
        self._check_options()
        self._set("dialect", find_file_dialect(self.path, self.user, self.dialect))
        found = read_schema(self.path, self.user, BATCH_BYTES // 4, self.dialect)
        self._set("header", tuple(found.names))
        named = [("user", self.user), *(("target", name) for name in self.targets)]
        named += [("features", name) for name in self.features or ()] + [("categories", name) for name in self._lists]
        named += [] if self.weight is None else [("weight", self.weight)]
        for option, name in (*named, *(("numeric", name) for name in self.numeric)):
            require_column(name, option, self.path, self.header)
        self._set("left_out", {})
        self._set("numeric_names", self.features if self.features is not None else self._find_numeric(found))
        more = (*make_indicator_names(self.numeric_names, self.missing.indicators), *one_hot.list_names(self._lists))
        self._set("feature_names", (*self.numeric_names, *more))
        self._check_feature_names()
        self._set_types(found)
        self._set("decimal", ".")
        if self.format == "csv":  # what is wrong, if it begins in the first rows, is reported now
            problems = Problems(self.path)
            next(self._check_batches(problems, checked=True), None)
            self._set("decimal", problems.decimal or ".")

    def _set_types(self, found: Any) -> None:
        """Find the type of each column, as it is read and as it comes. Raise InputError for columns of no use."""
        problems = Problems(self.path)
        self._set(
            "read_types", {name: self._find_type(name, found.field(name).type, problems) for name in self.columns}
        )
        if problems:
            raise problems.error()
        numbers = self.numeric_names if self.classes is not None else (*self.targets, *self.numeric_names)
        kinds = [self.read_types[name] for name in numbers]
        single = bool(kinds) and all(kind == pa.float32() for kind in kinds)
        self._set("dtype", np.dtype(np.float32 if single else np.float64))
        coded = dict.fromkeys(self._lists, pa.int32())
        coded |= {name: pa.float64() for name in numbers if not _is_plain(self.read_types[name])}
        if self.classes is not None:
            coded[self.targets[0]] = pa.float32() if single else pa.float64()
        self._set("schema", pa.schema([(name, coded.get(name, kind)) for name, kind in self.read_types.items()]))

    @property
    def format(self) -> Literal["parquet", "csv"]:
        return find_format(self.path)

    @property
    def targets(self) -> tuple[str, ...]:
        if self.target is None:
            return ()
        single = isinstance(self.target, str) or not hasattr(self.target, "__iter__")
        return (self.target,) if single else tuple(self.target)  # type: ignore[return-value]

    @property
    def columns(self) -> tuple[str, ...]:
        """Return the columns that are read: user, targets, numeric features, columns of categories, the weight."""
        return (self.user, *self.targets, *self.numeric_names, *self._lists, *filter(None, (self.weight,)))

    @property
    def is_sparse(self) -> bool:
        """Return whether rows are made sparse: where categories make many features."""
        return bool(self._lists) and not self.dense and (self.items or one_hot.is_wide(len(self.feature_names)))

    @property
    def remarks(self) -> tuple[str, ...]:
        """Return sentences on how the file is read, where that is not as everybody would expect."""
        said = []
        if self.format == "csv" and self.dialect is not None and self.dialect.words:
            said.append(f"Reading {self.path} {self.dialect.words}.")
        return tuple(said)

    @property
    def _lists(self) -> Mapping[str, one_hot.Categories]:
        return self.categories or {}  # type: ignore[return-value]

    def batches(self, checked: bool = False) -> Iterator[Any]:
        """Yield Arrow record batches with the columns of `schema`, of some 16 MB; at no time more than a few of them.

        A column of categories comes as codes, the positions of its values in the list, -1 for others. With
        `checked`, a missing user and a target or feature that is no finite number are errors. All errors of the file
        are one, when all of it was read. After the first, no batch comes.
        """
        return self._check_batches(Problems(self.path), checked)

    def _check_batches(self, problems: Problems, checked: bool) -> Iterator[Any]:
        """Yield batches until the first problem; raise one error for all problems at the end."""
        try:
            with reading_table(self.path):
                for batch in self._read_csv(problems) if self.format == "csv" else self._read_parquet(problems):
                    if checked:
                        self._note_bad_values(batch, problems)
                    problems.advance(batch.num_rows)
                    if not problems:
                        yield batch
        except InputError:
            if not problems:
                raise
        if problems:
            raise problems.error()

    @property
    def _may_miss(self) -> tuple[str, ...]:
        """Return the columns in which values may be missing; they are then null. Weights are checked by themselves."""
        return (*self.targets, *self.numeric_names, *filter(None, (self.weight,)))

    def _note_bad_values(self, batch: Any, problems: Problems) -> None:
        """Note what is missing in a batch, or not finite."""
        missing = {self.user: "has no user"}
        missing |= dict.fromkeys(self.targets, "has no finite target")
        for name, column in zip(self.columns, batch.columns, strict=True):
            bad = find_bad_values(column, may_miss=name in self._may_miss)
            if bad is not None:
                says = missing.get(name, "has no finite number")
                advice = f"fill the value in or leave the row out{self.advise_features(name)}"
                problems.note_missing(name, says, advice, bad)

    # What is in the file

    def _check_options(self) -> None:
        """Raise InputError unless the options name each column once and for one purpose."""
        if isinstance(self.features, str):
            raise InputError(f"features must be a list of column names; write [{self.features!r}].")
        if self.features is not None:
            self._set("features", tuple(self.features))
        self._set("numeric", tuple(self.numeric))
        targets = self.targets
        if self.target is not None:
            if not targets:
                raise InputError("target names no column; name one or more.")
            self._set("target", targets[0] if len(targets) == 1 else targets)
        if self.categories is not None:
            self._set("categories", one_hot.check_lists(self.categories, selected=True) or None)
        if self.classes is not None and len(targets) != 1:
            raise InputError(f"labels are one target column. Got {len(targets)} instead.")
        if self.user in targets:
            raise InputError(f"user and target are both column {self.user!r}; name two different columns.")
        article = "a" if len(targets) > 1 else "the"
        taken = {self.user: "the user column"}
        for option, names, role in (
            ("target", targets, f"{article} target column"),
            ("categories", tuple(self._lists), "a column of categories"),
            ("weight", () if self.weight is None else (self.weight,), "the column of weights"),
            ("features", self.features or (), ""),
        ):
            for name, times in Counter(names).items():
                if times > 1:
                    raise InputError(f"{option} names column {name!r} more than once; name it once.")
                if name in taken:
                    raise InputError(f"{option} contains {name!r}, which is {taken[name]}; take it out of {option}.")
            taken |= dict.fromkeys(names, role)
        both = next((name for name in self.numeric if name in (self.user, *self._lists)), None)
        if both is not None:
            raise InputError(f"numeric contains {both!r}, which is {taken[both]}; take it out of one of the two.")

    def _set(self, name: str, value: Any) -> None:
        object.__setattr__(self, name, value)  # the dataclass is frozen; this is its construction

    def _check_feature_names(self) -> None:
        """Raise InputError if there is no feature, or a name stands for two."""
        name, times = Counter(self.feature_names).most_common(1)[0] if self.feature_names else ("", 0)
        if times == 0 and not self._lists:  # items of which none could be named are no features, yet enough
            several = "targets" if len(self.targets) > 1 else "target"
            raise InputError(
                f"{self.path} has no numeric column besides user {self.user!r}"
                + (f" and {several} {', '.join(map(repr, self.targets))}" if self.targets else "")
                + "; add feature columns or turn existing ones into numbers."
            )
        if times > 1:
            raise InputError(f"the feature name {name!r} stands for two columns; rename a column of {self.path}.")

    def _find_numeric(self, found: Any) -> tuple[str, ...]:
        """Return the columns that are numeric features where nobody named any; the others go to `left_out`."""
        names, nothing = [], Problems(self.path)
        for column in found:
            if column.name in (self.user, self.weight, *self.targets, *self._lists):
                continue
            kind = "row names" if is_row_name(column.name) else name_value_kind(column.type)
            if kind == "nothing":
                nothing.note(column.name, "holds no values", "fill it or list the features")
            elif kind == "numbers" or (kind == "text" and column.name in self.numeric):
                names.append(column.name)
            else:
                self.left_out[column.name] = kind or f"values of type {column.type}"
        if nothing:
            raise nothing.error()
        return tuple(names)

    def _find_type(self, name: str, found: Any, problems: Problems) -> Any:
        """Return the type in which a column is read that was found as another; note it if it cannot be used."""
        if name == self.user:
            return choose_user_type(name, found, self.format, self.user_as_text)
        if name in self._lists:
            listed = self._lists[name]
            return (
                one_hot.choose_csv_type(listed)
                if self.format == "csv"
                else one_hot.choose_parquet_type(name, listed, found)
            )
        if name in self.targets and self.classes is not None:
            listed = self.classes
            return (
                one_hot.choose_csv_label_type(listed)
                if self.format == "csv"
                else one_hot.choose_parquet_label_type(name, listed, found)
            )
        kind = name_value_kind(found)
        if kind != "numbers" and not (kind == "text" and name in self.numeric):
            otherwise = _LABELS
            if name not in self.targets:
                known = " (--numeric reads text as numbers, --categorical makes a feature of each value)"
                otherwise = f"{known if kind == 'text' else ''} or leave it out"
            note_type(problems, name, found, otherwise)
        return found

    # Its rows

    @property
    def _batch_rows(self) -> int:
        width = sum(column.type.bit_width / 8 if _is_plain(column.type) else 16 for column in self.schema)
        return int(np.clip(BATCH_BYTES // width, 256, MAX_BATCH_ROWS))

    def _read_parquet(self, problems: Problems) -> Iterator[Any]:
        for batch in iterate_batches(self.path, self.columns, self._batch_rows):
            yield self._conform(batch, problems)

    def _read_csv(self, problems: Problems) -> Iterator[Any]:
        assert self.dialect is not None
        listed = {str(value) for values in (*self._lists.values(), self.classes or ()) for value in values}
        convert = make_text_options(self.columns, [word for word in MISSING_TEXT if word not in listed])
        with open_csv(self.path, self.dialect, convert, BATCH_BYTES // 4, problems) as reader:
            for batch in reader:
                if batch.num_rows:
                    columns = [self.read_text(name, batch.column(name), problems) for name in self.columns]
                    read = pa.record_batch(columns, names=list(self.columns))
                    yield self._conform(read, problems)

    def read_text(self, name: str, text: Any, problems: Problems) -> Any:
        """Return a column of a CSV file in the type of `read_types`. Values that cannot be read are noted, and null.

        `text` is a large_string array (rows,); arguments are as in `data.text_values`.
        """
        wanted = self.read_types[name]
        if pa.types.is_large_string(wanted):
            return text
        if name == self.user:
            says, advice = "starts with integers and has other text", "correct it or set user_as_text (--user-as-text)"
            kept = "keep ids as they are written with user_as_text (--user-as-text), or write them without zeros"
            problems.note(name, CODES, kept, find_leading_zeros(text))
            return read_integers(name, text, problems, says, advice)
        if pa.types.is_integer(wanted):
            advice = "correct it or list its values as text"
            return read_integers(name, text, problems, "is not an integer", advice)
        return (
            read_truth(name, text, problems)
            if pa.types.is_boolean(wanted)
            else self._read_numbers(name, text, problems)
        )

    def _read_numbers(self, name: str, text: Any, problems: Problems) -> Any:
        advice, declared = _LABELS, name in self.numeric
        if name not in self.targets:
            otherwise = self.advise_features(name)
            as_categories = f",{'' if otherwise else ' or'} name it with --categorical if it holds categories"
            advice = otherwise if declared else as_categories + otherwise
        marks = self.dialect.marks if self.format == "csv" and self.dialect is not None else "."
        return read_numbers(name, text, problems, advice, marks, declared)

    def _conform(self, batch: Any, problems: Problems) -> Any:
        """Return the columns of `schema`, in its order and types."""
        columns, lists = [], self._lists
        for wanted in self.schema:
            column = batch.column(wanted.name)
            if wanted.name in lists:
                column = one_hot.encode_column(wanted.name, column, lists[wanted.name], problems)
            elif self.classes is not None and wanted.name in self.targets:
                column = one_hot.encode_labels(column, self.classes)
            elif name_value_kind(column.type) == "text" and wanted.name != self.user:
                column = self._read_numbers(wanted.name, one_hot.to_text(column), problems)
            columns.append(column if column.type == wanted.type else column.cast(wanted.type))
        return pa.record_batch(columns, schema=self.schema)

    def advise_features(self, name: str) -> str:
        """Return more advice about a column with a bad value, where nobody asked for that column by name."""
        if self.features is not None or name in (self.user, self.weight, *self.targets, *self._lists):
            return ""
        return ", or name the feature columns with --features to leave it out"


def _is_plain(kind: Any) -> bool:
    """Return whether values of a type are numbers of NumPy's, too."""
    return bool(pa.types.is_integer(kind) or pa.types.is_floating(kind) or pa.types.is_boolean(kind))


def find_bad_values(column: Any, may_miss: bool = False) -> Any:
    """Return a mask (rows,) of the values that are not finite or an empty text, or missing unless they may be.

    None if there is no such value. NaN is a missing value.
    """
    bad = None
    if column.null_count and not may_miss:
        bad = np.asarray(column.is_null())
    if pa.types.is_floating(column.type):
        values = (column.fill_null(0) if column.null_count else column).to_numpy(zero_copy_only=False)
        with np.errstate(all="ignore"):
            if not np.isfinite(values.sum()):
                odd = np.isinf(values) if may_miss else ~np.isfinite(values)
                bad = odd if bad is None else bad | odd
    elif pa.types.is_large_string(column.type):
        empty = np.asarray(pc.fill_null(pc.equal(column, ""), False))
        bad = empty if bad is None else bad | empty
    return bad if bad is not None and bad.any() else None
