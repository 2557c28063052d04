"""Frames of pandas, polars and Arrow: their columns as numbers and categories, found by name."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from numpy.typing import NDArray

from privrep.data import categories as one_hot
from privrep.data.categories import Categories
from privrep.data.missing import IMPUTE, Missing
from privrep.data.problems import DATES, TURN_DATES, Problems, is_text, name_value_kind, note_type
from privrep.data.sources import find_bad_values
from privrep.data.text_values import looks_like_date, looks_like_number, read_numbers
from privrep.errors import InputError

_NOT_ONE_KIND = (pa.ArrowException, ValueError, TypeError, OverflowError)  # what Arrow says of values of several kinds


@dataclass(frozen=True)
class Frame:
    """The columns of a frame, as Arrow has them. Columns that Arrow cannot take are in `odd`, as they came."""

    columns: Mapping[str, Any]
    odd: Mapping[str, Any]
    names: tuple[str, ...]
    rows: int


@dataclass(frozen=True)
class FrameRows:
    """Rows of a frame as one array: numbers, and codes of categories.

    `values` is (rows, columns): first the columns of numbers, then one column for each of `held`. The latter hold the
    position of a value among the values that this frame holds in that column, -1 for a missing one. These values are
    private.
    """

    values: NDArray[Any] = field(repr=False)
    numbers: tuple[str, ...]
    held: Mapping[str, Any] = field(repr=False)  # Arrow arrays of the distinct values of each column of categories
    single: bool  # all numbers are float32

    def keys(self, name: str, values: NDArray[Any]) -> Any:
        """Return the values of a column of categories of these rows; null if missing.

        Args:
            name: of the column.
            values: (rows, columns), some of the rows of this frame in any order.
        """
        place = len(self.numbers) + list(self.held).index(name)
        code = values[:, place].astype(np.int64)
        return self.held[name].take(pa.array(code, mask=code < 0))

    def encode(
        self, values: NDArray[Any], lists: Mapping[str, Categories], dense: bool = False, missing: Missing = IMPUTE
    ) -> Any:
        """Return rows as features: numbers, indicators, a column for each category of each list that is not empty.

        Args:
            values: (rows, columns), some of the rows of this frame in any order. More columns after those of the frame
                are numbers, too.
            lists: the categories of each column.
            dense: whether to return an array rather than a sparse matrix.
            missing: which numbers have an indicator of missing values.

        Returns:
            (rows, features), a csr_array where categories make many features.
        """
        p, last = len(self.numbers), len(self.numbers) + len(self.held)
        numbers = values[:, :p] if values.shape[1] == last else np.delete(values, np.s_[p:last], axis=1)
        numbers = missing.with_indicators(numbers.astype(np.float32) if self.single else numbers)
        if not self.held:
            return numbers
        named = {name: listed for name, listed in lists.items() if listed}
        codes = np.empty((len(values), len(named)), np.int32)
        for j, (name, listed) in enumerate(named.items()):
            places = np.append(np.asarray(one_hot.encode(self.held[name], listed)), -1)
            codes[:, j] = places[values[:, p + list(self.held).index(name)].astype(np.int64)]
        encoded = one_hot.encode_one_hot(numbers, codes, [len(listed) for listed in named.values()] or [0])
        return encoded if one_hot.is_wide(encoded.shape[1]) and not dense else encoded.toarray()


def read_frame(X: Any) -> Frame | None:
    """Return the columns of a frame of pandas, polars or Arrow whose columns have names; None for anything else.

    A frame of pandas that is sparse, or whose columns have numbers for names, is as good as an array.
    """
    if isinstance(X, pa.Table | pa.RecordBatch):
        return _from_arrow(pa.table(X) if isinstance(X, pa.RecordBatch) else X)
    if _is_a(X, "polars", "LazyFrame"):
        raise InputError("X is a lazy frame; collect it first.")
    if _is_a(X, "polars", "DataFrame"):
        return _from_arrow(X.to_arrow())
    return _from_pandas(X) if _is_a(X, "pandas", "DataFrame") else None


def read_column_names(values: Any) -> tuple[str, ...]:
    """Return the names of the columns of a frame, or the name of a series; none where there is none."""
    if any(_is_a(values, module, "DataFrame") for module in ("pandas", "polars")):
        names = tuple(values.columns)
    else:
        series = any(_is_a(values, module, "Series") for module in ("pandas", "polars"))
        names = (values.name,) if series else ()
    return names if all(isinstance(name, str) and name for name in names) else ()


def _is_a(value: Any, module: str, name: str) -> bool:
    """Return whether a value is of a class of a library that need not be there."""
    return any(each.__name__ == name and each.__module__.partition(".")[0] == module for each in type(value).__mro__)


def _from_arrow(table: Any) -> Frame:
    """Return the columns of an Arrow table."""
    names = _check_names(table.column_names)
    columns = {name: _to_one_array(table[name]) for name in names}
    return Frame(columns, {}, names, table.num_rows)


def _from_pandas(frame: Any) -> Frame | None:
    """Return the columns of a frame of pandas; None if it is as good as an array."""
    if not any(isinstance(name, str) for name in frame.columns) and len(frame.columns):
        text = [str(kind) for kind in frame.dtypes if not _is_numeric(kind)]
        if text:
            raise InputError(f"X has columns of {text[0]} without names; give columns names that are text.")
        return None
    if len(frame.columns) and all(type(kind).__name__ == "SparseDtype" for kind in frame.dtypes):
        return None
    names = _check_names(list(frame.columns))
    columns, odd = {}, {}
    for name in names:
        try:
            columns[name] = _to_one_array(pa.array(frame[name], from_pandas=True))
        except _NOT_ONE_KIND:
            odd[name] = frame[name]
    return Frame(columns, odd, names, len(frame))


def _is_numeric(kind: Any) -> bool:
    """Return whether a dtype is one of numbers or booleans."""
    return str(kind.kind) in "iufbc"


def _check_names(names: Sequence[Any]) -> tuple[str, ...]:
    """Return the names of columns. Raise InputError unless all are text and differ."""
    if not all(isinstance(name, str) for name in names):
        raise InputError("some columns of X have names that are text and others do not; make all of them text.")
    repeated = [name for name, times in Counter(names).items() if times > 1]
    if repeated:
        raise InputError(f"column {repeated[0]!r} is in X more than once; rename one of the two.")
    return tuple(names)


def _to_one_array(column: Any) -> Any:
    """Return one Arrow array, NaN and null both null in it, text and dictionaries of one type each."""
    column = column.combine_chunks() if isinstance(column, pa.ChunkedArray) else column
    if isinstance(column, pa.ChunkedArray):  # of several pieces that cannot be one
        column = pa.concat_arrays(column.chunks)
    if isinstance(column, pa.ExtensionArray):
        column = column.storage
    if pa.types.is_dictionary(column.type) and is_text(column.type.value_type):
        return column.cast(pa.dictionary(pa.int64(), pa.large_string()))
    return column.cast(pa.large_string()) if is_text(column.type) else column


# Which columns are what


def sort_columns(frame: Frame, declared: Mapping[str, Any]) -> tuple[tuple[str, ...], tuple[str, ...]]:
    """Return the names of the columns of numbers and of the columns of categories, in the order of the frame.

    The types decide: integers, floats, decimals and booleans are numbers. Text and dictionaries (categorical columns,
    enumerations) are categories, as are columns that `declared` names. All other columns are one error.
    """
    for name in declared:
        if name not in frame.names:
            raise InputError(
                f"categories: there is no column {name!r} in X; its columns are {_list_names(frame.names)}."
            )
    numbers, categories, problems = [], [], Problems("X", start=0)
    for name in frame.names:
        if name in frame.odd:
            _note_odd(problems, name, frame.odd[name])
            continue
        kind = name_value_kind(frame.columns[name].type)
        if kind == "text" or (name in declared and kind == "numbers"):
            categories.append(name)
            if name not in declared:
                _note_dates(problems, name, frame.columns[name])
        elif kind == "numbers":
            numbers.append(name)
        else:
            note_type(problems, name, frame.columns[name].type, " or leave it out")
    if problems:
        raise problems.error()
    return tuple(numbers), tuple(categories)


def _note_odd(problems: Problems, name: str, values: Any) -> None:
    """Note a column with values of several kinds, and where the rarer ones are."""
    kinds = np.array([_name_kind(value) for value in values], dtype=object)
    counts = Counter(kinds.tolist())
    counts.pop("", None)
    advice = "make all of them numbers, or all of them text"
    if len(counts) < 2:
        what = next(iter(counts), "no values")
        problems.note(name, f"holds {what}, not numbers or text", "turn it into numbers or text, or leave it out")
        return
    (most, _), *rest = counts.most_common()
    others = kinds != most
    others &= kinds != ""
    listed = " and ".join(kind for kind, _ in rest)
    problems.note(name, f"holds {most} in most rows and {listed}", advice, others)


def _name_kind(value: Any) -> str:
    """Return the kind of a Python value in words; empty if it is missing."""
    if value is None or type(value).__name__ in ("NAType", "NaTType") or value is np.nan or value != value:
        return ""
    if isinstance(value, str):
        return "text"
    if isinstance(value, bool | int | float | np.number | np.bool_):
        return "numbers"
    return f"values of type {type(value).__name__}"


def _note_dates(problems: Problems, name: str, column: Any) -> None:
    """Note text most of which is dates: nobody means a category for each day without saying so."""
    text = one_hot.to_text(column) if _holds_text(column) else None
    if text is None:
        return
    dates = pc.fill_null(looks_like_date(text), False)
    if 2 * pc.sum(dates, min_count=0).as_py() > len(text) - text.null_count > 0:
        problems.note(name, DATES, TURN_DATES, dates)


def _holds_text(column: Any) -> bool:
    """Return whether a column holds text, or a dictionary of text."""
    return is_text(column.type.value_type if pa.types.is_dictionary(column.type) else column.type)


def find_numeric_text(frame: Frame, names: Sequence[str]) -> list[str]:
    """Return the names of columns of text most of which is written as numbers are.

    Libraries make text of a column of numbers for the sake of one value that is no number, which may be one user's.
    """
    found = []
    for name in names:
        column = frame.columns[name]
        if _holds_text(column) and column.null_count < len(column):
            text = one_hot.to_text(column)
            numbers = pc.sum(pc.fill_null(looks_like_number(text), False)).as_py()
            if 2 * numbers > len(text) - text.null_count:
                found.append(name)
    return found


# Rows


def read_rows(
    frame: Frame, numbers: Sequence[str], categories: Mapping[str, Categories], may_miss: bool = False
) -> FrameRows:
    """Return the rows of a frame, every value in them looked at. All problems are one error.

    Args:
        frame: the columns, by name.
        numbers: the columns of numbers. Text in them is read as numbers: somebody said that it is numbers.
        categories: the columns of categories, each with its list, empty where it is not known.
        may_miss: whether numbers may be missing; they are NaN then.
    """
    problems, single = Problems("X", start=0), bool(numbers)
    values = np.empty((frame.rows, len(numbers) + len(categories)))
    for j, name in enumerate(numbers):
        column = frame.columns[name]
        single = single and column.type == pa.float32()
        column = _read_numbers(name, column, problems)
        if column is None:
            continue
        bad = find_bad_values(column, may_miss)
        if bad is not None:
            problems.note_missing(name, "has no finite number", "fill the value in or leave the row out", bad)
        values[:, j] = column.to_numpy(zero_copy_only=False)
    held = {}
    for j, (name, listed) in enumerate(categories.items(), start=len(numbers)):
        column = _read_keys(name, frame.columns[name], listed, problems)
        if column is not None:
            encoded = column.dictionary_encode()
            held[name] = encoded.dictionary
            values[:, j] = pc.fill_null(encoded.indices, -1).to_numpy(zero_copy_only=False)
    if problems:
        raise problems.error()
    return FrameRows(values, tuple(numbers), held, single)


def _read_numbers(name: str, column: Any, problems: Problems) -> Any:
    """Return a column as float64, null where a value is missing; None if it holds no numbers, which is noted."""
    kind = name_value_kind(column.type)
    if kind == "text" and _holds_text(column):
        return read_numbers(name, one_hot.to_text(column), problems, "", ".", declared=True)
    if kind != "numbers":
        note_type(problems, name, column.type, "")
        return None
    column = column.dictionary_decode() if pa.types.is_dictionary(column.type) else column
    return column.cast(pa.float64())


def _read_keys(name: str, column: Any, listed: Categories, problems: Problems) -> Any:
    """Return categories as text or whole numbers, null where one is missing."""
    if pa.types.is_dictionary(column.type):
        column = column.dictionary_decode()
    kind = name_value_kind(column.type)
    if kind not in ("text", "numbers", "nothing") or pa.types.is_boolean(column.type):
        problems.note(name, f"holds values of type {column.type}, not categories", "make them text or integers")
        return None
    if kind == "nothing" or column.null_count == len(column):  # a column of NaN is one of floats
        return pa.nulls(len(column), pa.large_string())
    if listed and not one_hot.can_hold(column.type, listed):
        wanted = "text" if isinstance(listed[0], str) else "integers"
        problems.note(name, f"holds {kind} where categories are {wanted}", "convert the column")
        return None
    if kind == "text":
        return pc.if_else(pc.equal(column, ""), None, column)
    if pa.types.is_integer(column.type) and not pa.types.is_uint64(column.type):
        return column.cast(pa.int64())
    numbers = column.cast(pa.float64())
    numbers = pc.if_else(pc.is_nan(numbers), None, numbers)
    values = numbers.fill_null(0).to_numpy(zero_copy_only=False)
    whole = (values == np.floor(values)) & (np.abs(values) < 2.0**53)
    if not (listed and isinstance(listed[0], str)):
        advice = "round it or turn it into text, since it holds categories"
        problems.note(name, "is not an integer", advice, ~whole)
        numbers = pc.if_else(pa.array(whole), numbers, None).cast(pa.int64())
    return numbers


def check_columns(frame: Frame, wanted: Sequence[str], besides: Sequence[str] = ()) -> None:
    """Raise InputError unless a frame has the columns of a fit, in any order.

    Args:
        frame: the columns, by name.
        wanted: names that must be there.
        besides: names that may be there; others may not.
    """
    missing = [name for name in wanted if name not in frame.names]
    extra = [name for name in frame.names if name not in wanted and name not in besides]
    if missing or extra:
        told = [f"does not have {_list_names(missing)}, which the model was fitted on"] if missing else []
        told += [f"has {_list_names(extra)}, which the model does not know"] if extra else []
        advice = "give the columns of the fit" if missing else "leave them out" if len(extra) > 1 else "leave it out"
        raise InputError(f"X {' and '.join(told)}; {advice}.")
    odd = Problems("X", start=0)
    for name in wanted:
        if name in frame.odd:
            _note_odd(odd, name, frame.odd[name])
    if odd:
        raise odd.error()


def _list_names(names: Sequence[str]) -> str:
    """Return the first ten names as a text."""
    return ", ".join(map(repr, names[:10])) + (", ..." if len(names) > 10 else "")
