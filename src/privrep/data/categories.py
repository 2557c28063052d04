"""Columns of categories, one-hot encoded over public lists: codes while rows are read, sparse columns in the end.

Columns of labels are codes all the way: their classes are a public list, too.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from numpy.typing import NDArray
from scipy import sparse

from privrep.data.problems import Problems, is_text
from privrep.errors import InputError

Categories = tuple[str | int, ...]  # all of one kind
MOST_CLASSES = 1000
MOST_DENSE = 128  # features of rows that are dense although some columns are categories


def check_lists(given: Any, selected: bool = False) -> dict[str, Categories]:
    """Return the lists of categories of each column, each all text or all integers, without an entry twice.

    With `selected`, a list may be empty: of a private selection, where no category was held by enough users.
    """
    if not isinstance(given, Mapping):
        raise InputError("categories must map columns to lists; write {'colour': ['red', 'green']}.")
    return {name: _check_list(name, values, selected) for name, values in given.items()}


def _check_list(name: str, values: Any, selected: bool) -> Categories:
    """Return the categories of a column. Raise InputError unless they are a list of one kind without repetition."""
    if isinstance(values, str):
        raise InputError(f"categories of column {name!r} must be a list; write [{values!r}].")
    listed = tuple(value.item() if isinstance(value, np.generic) else value for value in values)
    if not listed and selected:
        return ()
    if not listed:
        raise InputError(f"categories lists none for column {name!r}; list at least one or leave the column out.")
    texts = [isinstance(value, str) for value in listed]
    integers = [isinstance(value, int) and not isinstance(value, bool) for value in listed]
    if not all(texts) and not all(integers):
        raise InputError(f"categories of column {name!r} must be all text or all integers; write them one way.")
    value, times = Counter(listed).most_common(1)[0]
    if times > 1:
        raise InputError(f"categories lists {value!r} of column {name!r} more than once; list it once.")
    return listed


def can_hold(found: Any, listed: Categories) -> bool:
    """Return whether a column of this type can hold these categories.

    Whole numbers may come as floats, which is what integers become where some are missing. Numbers are found in a list
    of text that has numbers.
    """
    kind = found.value_type if pa.types.is_dictionary(found) else found
    if not listed:
        return is_text(kind) or pa.types.is_integer(kind)
    if pa.types.is_integer(kind) or pa.types.is_floating(kind):
        return not isinstance(listed[0], str) or bool(_index_numbers(listed))
    return is_text(kind) and isinstance(listed[0], str)


def choose_parquet_type(name: str, listed: Categories, found: Any) -> Any:
    """Return the type in which a column of a Parquet file with these categories is read.

    Args:
        name: of the column.
        listed: its categories.
        found: its type in the file. Raise InputError if its values cannot be among the categories.
    """
    if can_hold(found, listed):
        return found
    kind = found.value_type if pa.types.is_dictionary(found) else found
    if not is_text(kind) and not pa.types.is_integer(kind) and not pa.types.is_floating(kind):
        raise InputError(f"the categorical column {name!r} holds values of type {found}; make them text or integers.")
    kinds = "text" if is_text(kind) else "integers"
    raise InputError(f"the categorical column {name!r} holds {kinds}; list its categories as {kinds}.")


def choose_csv_type(listed: Categories) -> Any:
    """Return the type in which a column of a CSV file with these categories is read."""
    return pa.int64() if listed and isinstance(listed[0], int) else pa.large_string()


def check_classes(given: Any) -> Categories:
    """Return a list of classes, sorted: all text, all integers or all booleans, two at least, none twice."""
    if isinstance(given, str) or not hasattr(given, "__iter__"):
        raise InputError(f"classes must be a list of two or more. Got {given!r} instead.")
    listed = tuple(value.item() if isinstance(value, np.generic) else value for value in given)
    kinds = {name_label_kind(value) for value in listed}
    if len(kinds) > 1 or "" in (*kinds, *listed):
        raise InputError("classes must be all text, all integers or all booleans; write them one way, none empty.")
    value, times = Counter(listed).most_common(1)[0] if listed else ("", 0)
    if times > 1:
        raise InputError(f"classes lists {value!r} more than once; list it once.")
    if not 2 <= len(listed) <= MOST_CLASSES:
        count = f"{len(listed):,} class{'' if len(listed) == 1 else 'es'}"
        raise InputError(f"classes must be a list of 2 to {MOST_CLASSES:,}. Got {count} instead.")
    return tuple(sorted(listed))


def name_label_kind(value: Any) -> str:
    """Return the kind of a class in words; empty if it can be none."""
    if isinstance(value, bool):
        return "booleans"
    if isinstance(value, int) and -(2**63) <= value < 2**63:
        return "integers"
    return "text" if isinstance(value, str) else ""


def name_arrow_label_kind(found: Any) -> str:
    """Return the kind of labels in a column of a type of Arrow's, as `name_label_kind` does."""
    kind = found.value_type if pa.types.is_dictionary(found) else found
    if pa.types.is_boolean(kind):
        return "booleans"
    return "integers" if pa.types.is_integer(kind) else "text" if is_text(kind) else ""


def choose_parquet_label_type(name: str, listed: Categories, found: Any) -> Any:
    """Return the type in which a target column of a Parquet file with these classes is read.

    Arguments are as in `choose_parquet_type`.
    """
    kind, wanted = name_arrow_label_kind(found), name_label_kind(listed[0])
    if not kind:
        raise InputError(
            f"the target column {name!r} holds values of type {found}; make its labels text, integers or booleans."
        )
    if kind != wanted:
        raise InputError(f"the target column {name!r} holds {kind} and the classes are {wanted}; convert the column.")
    return found


def choose_csv_label_type(listed: Categories) -> Any:
    """Return the type in which a target column of a CSV file with these classes is read."""
    return pa.bool_() if isinstance(listed[0], bool) else choose_csv_type(listed)


def encode_labels(column: Any, listed: Categories) -> Any:
    """Return the codes of labels, as `encode` does, but null where the label is missing: null, or an empty text."""
    if pa.types.is_dictionary(column.type):
        column = column.dictionary_decode()
    if pa.types.is_boolean(column.type):
        column, listed = column.cast(pa.int8()), tuple(map(int, listed))
    missing = column.is_null()
    if is_text(column.type):
        missing = pc.or_(missing, pc.equal(column, pa.scalar("", column.type)).fill_null(True))
    return pc.if_else(missing, pa.scalar(None, pa.int32()), encode(column, listed))


def list_names(categories: Mapping[str, Categories]) -> tuple[str, ...]:
    """Return the names of the one-hot columns, column by column."""
    return tuple(f"{name}={value}" for name, listed in categories.items() for value in listed)


def encode(column: Any, listed: Categories) -> Any:
    """Return the place of each value in the list as an int32 array: -1 for a value that is not there, or is missing.

    Numbers are found in a list of text where it has them as text: 6 and 6.0 are "6", as a CSV file has it.
    """
    if not listed:
        return pa.array(np.full(len(column), -1, dtype=np.int32))
    if pa.types.is_dictionary(column.type):
        return encode(column.dictionary, listed).take(column.indices).fill_null(-1)
    places = list(range(len(listed)))
    if pa.types.is_floating(column.type) or (pa.types.is_integer(column.type) and isinstance(listed[0], str)):
        by_number = _index_numbers(listed)
        places, known = list(by_number.values()), pa.array(list(by_number), pa.float64())
        found = pc.index_in(column.cast(pa.float64()), value_set=known)
        return pa.array(places, pa.int32()).take(found).fill_null(-1)
    if pa.types.is_integer(column.type):
        range_of = np.iinfo(column.type.to_pandas_dtype())
        places = [place for place in places if range_of.min <= int(listed[place]) <= range_of.max]
    elif not pa.types.is_large_string(column.type):
        column = column.cast(pa.large_string())
    found = pc.index_in(column, value_set=pa.array([listed[place] for place in places], column.type))
    return pa.array(places, pa.int32()).take(found).fill_null(-1)


def _index_numbers(listed: Categories) -> dict[float, int]:
    """Return the places of the categories that are numbers, or text that is one as everybody writes it."""
    plain = re.compile(r"-?(0|[1-9][0-9]*)(\.[0-9]+)?")
    places: dict[float, int] = {}
    for place, value in enumerate(listed):
        if isinstance(value, int) or plain.fullmatch(value):
            places.setdefault(float(value), place)
    return places


def encode_column(name: str, column: Any, listed: Categories, problems: Problems) -> Any:
    """Return the codes of a column, as `encode` does. Note values that are not whole where categories are integers.

    Args:
        name: of the column.
        column: an array of Arrow's, (rows,).
        listed: its categories.
        problems: where to note values that are not whole.
    """
    inner = column.dictionary if pa.types.is_dictionary(column.type) else column
    if listed and pa.types.is_floating(inner.type) and not isinstance(listed[0], str):
        with np.errstate(invalid="ignore"):
            values = inner.fill_null(0).to_numpy(zero_copy_only=False)
            odd = (values != np.floor(values)) & ~np.isnan(values)
        if pa.types.is_dictionary(column.type):
            odd = np.append(odd, False)[column.indices.fill_null(len(odd)).to_numpy(zero_copy_only=False)]
        problems.note(name, "is not an integer", "round it or turn it into text, since it holds categories", odd)
    return encode(column, listed)


def to_text(column: Any) -> Any:
    """Return a column of text, out of its dictionary, as Arrow's large_string."""
    decoded = column.dictionary_decode() if pa.types.is_dictionary(column.type) else column
    return decoded.cast(pa.large_string())


def is_wide(features: int) -> bool:
    """Return whether rows with columns of categories are kept sparse, from how many features there are in all.

    Of dense rows a fit hears locations and correlations of all columns. Of sparse ones it hears sizes alone.
    """
    return features > MOST_DENSE


def encode_one_hot(numeric: NDArray[Any], coded: NDArray[np.int32], sizes: Sequence[int]) -> Any:
    """Return a csr_array in canonical form: numeric columns, then one column for each category of each coded column.

    Args:
        numeric: (rows, p).
        coded: (rows, columns), places of categories, -1 for none.
        sizes: categories of each coded column.
    """
    rows, p = numeric.shape
    starts = (p + np.cumsum([0, *sizes[:-1]])).astype(np.int32)
    stored = np.concatenate([numeric != 0, coded >= 0], axis=1)
    values = np.concatenate([numeric, np.ones(coded.shape, numeric.dtype)], axis=1)[stored]
    columns = np.concatenate([np.broadcast_to(np.arange(p, dtype=np.int32), numeric.shape), coded + starts], axis=1)
    begins = np.concatenate([[0], np.cumsum(stored.sum(axis=1))])
    return sparse.csr_array((values, columns[stored], begins), shape=(rows, p + sum(sizes)))


def to_item_column(items: Any) -> Any:
    """Return items as one Arrow array of integers or of text; whole numbers may come as floats."""
    try:
        column = items if isinstance(items, pa.Array | pa.ChunkedArray) else pa.array(items, from_pandas=True)
        column = column.combine_chunks() if isinstance(column, pa.ChunkedArray) else column
        column = column.dictionary_decode() if pa.types.is_dictionary(column.type) else column
        if pa.types.is_floating(column.type):
            column = pc.if_else(pc.is_nan(column), pa.scalar(None, column.type), column).cast(pa.int64())
        if pa.types.is_null(column.type) or pa.types.is_integer(column.type):
            return column
        return column.cast(pa.large_string()) if is_text(column.type) else _refuse_items()
    except (pa.ArrowException, ValueError, TypeError, OverflowError):
        return _refuse_items()


def _refuse_items() -> Any:
    """Raise InputError for items of mixed kinds."""
    raise InputError("items must be all integers or all text; turn them into one or the other.")


def encode_items(items: Any, listed: Categories) -> NDArray[np.int32]:
    """Return the place of each item in the list, (items,), or -1."""
    column = to_item_column(items)
    if pa.types.is_null(column.type) or not listed:
        return np.full(len(column), -1, dtype=np.int32)
    text = isinstance(listed[0], str)
    if text == pa.types.is_integer(column.type):
        kinds = "text" if text else "integers"
        raise InputError(f"the items of this model are {kinds}; give {kinds}.")
    return np.asarray(encode(column, listed))
