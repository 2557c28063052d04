"""Rows of Parquet and CSV files, every value looked at: in batches or all at once."""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from scipy import sparse

from privrep.data import categories as one_hot
from privrep.data.dialects import Dialect
from privrep.data.files import SUFFIXES as SUFFIXES
from privrep.data.files import (
    choose_user_type,
    find_file_dialect,
    find_format,
    make_text_options,
    open_csv,
    read_schema,
    reading_table,
    require_column,
)
from privrep.data.missing import MissingCounts
from privrep.data.parquet import iterate_batches
from privrep.data.sources import BATCH_BYTES as BATCH_BYTES
from privrep.data.sources import MAX_BATCH_ROWS
from privrep.data.sources import TableSource as TableSource
from privrep.data.table import UserTable
from privrep.data.text_values import MISSING_TEXT
from privrep.data.weights import check_weights, join_weights, make_row_weights
from privrep.typing import Floats


def read_checked_batches(source: TableSource, counts: MissingCounts | None = None) -> Iterator[Any]:
    """Yield the batches of a file, every value in them looked at: no user missing, no number infinite.

    All problems of the file are one error, when all of it was read. After the first problem no batch comes. Missing
    values are added to `counts`. A source that refuses them raises InputError at its end.
    """
    counts = counts or MissingCounts()
    q, p = len(source.targets), len(source.numeric_names)
    for batch in source.batches(checked=True):
        columns = [read_values(column) for column in batch.columns[1:]]
        counts.add(columns[:q], dict(zip(source.numeric_names, columns[q : q + p], strict=True)), source.missing)
        if source.weight is not None:
            check_weights(columns[-1], f"the weights in column {source.weight!r} of {source.path}")
        yield batch
    counts.check(source.missing, str(source.path))


def read_table(source: TableSource) -> UserTable:
    """Return all rows of a file that fits in memory. Without a target, y is NaN.

    float32 stays float32 where all targets and numeric features are; otherwise everything becomes float64.
    """
    parts, users, weighed = [], [], []
    for batch in read_checked_batches(source):
        users.append(batch.column(0))
        columns = [read_values(column) for column in batch.columns[1:]]
        weighed.append(make_row_weights(source, columns))
        parts.append(assemble(source, [columns], batch.num_rows))
    weights = join_weights(weighed, [batch.shape[0] for batch, _ in parts])
    X = [part for part, _ in parts]
    rows = sparse.csr_array(sparse.vstack(X, format="csr")) if source.is_sparse else np.concatenate(X)
    targets = np.concatenate([part for _, part in parts])
    ids = pa.chunked_array(users)
    if not pa.types.is_large_string(ids.type):
        return UserTable.from_rows(rows, targets, ids.to_numpy(), weights)
    encoded = ids.dictionary_encode().combine_chunks()
    names = encoded.dictionary
    order = pc.sort_indices(names).to_numpy()
    rank = np.empty_like(order)
    rank[order] = np.arange(len(order), dtype=order.dtype)
    table = UserTable.from_rows(rows, targets, rank[encoded.indices.to_numpy()], weights)
    return replace(table, ids=read_user_ids(names.take(pa.array(order))))


def assemble(source: TableSource, pieces: Iterable[Sequence[Floats]], rows: int) -> tuple[Any, Floats]:
    """Return X, (rows, features), and y, (rows,) or (rows, targets), of rows in pieces.

    Args:
        source: the file that they are from.
        pieces: the columns of the source's batches but the user, (rows of the piece,) each.
        rows: of all pieces.
    """
    q, p, c = len(source.targets), len(source.numeric_names), len(source.categories or ())
    y = np.empty((rows, q), source.dtype)
    X = np.empty((rows, p), source.dtype)
    codes = np.empty((rows, c), np.int32)
    start = 0
    for piece in pieces:
        stop = start + len(piece[0])
        fill_rows(y[start:stop], piece[:q])
        fill_rows(X[start:stop], piece[q : q + p])
        fill_rows(codes[start:stop], piece[q + p : q + p + c])
        start = stop
    sizes = [len(listed) for listed in (source.categories or {}).values()]
    targets = y if q > 1 else y.ravel() if q else np.full(rows, np.nan, source.dtype)
    X = source.missing.with_indicators(X)
    if not sizes:
        return X, targets
    encoded = one_hot.encode_one_hot(X, codes, sizes)
    return (encoded if source.is_sparse else encoded.toarray()), targets


def read_columns(
    path: str | os.PathLike[str], names: Sequence[str], user_as_text: bool = False, dialect: Dialect | None = None
) -> Any:
    """Return columns of a file, the first of them the users, as an Arrow table; no value in them is looked at.

    It is for finding out which categories occur, which is private: only a private selection of them may be shown or
    used. Ids come as `TableSource` reads them. Other columns come as text from a CSV file, null where it is empty or
    NA. From a Parquet file they come in the type they have there, out of their dictionaries.

    Args:
        path: of the file.
        names: of the columns.
        user_as_text: whether a CSV file's ids are text even where they look like integers.
        dialect: how a CSV file is written.
    """
    user, kind, dialect = names[0], find_format(path), find_file_dialect(path, names[0], dialect)
    found = read_schema(path, user, BATCH_BYTES // 4, dialect)
    for name in names:
        require_column(name, "user" if name == user else "categories", path, found.names)
    types = {name: pa.large_string() if kind == "csv" else found.field(name).type for name in names}
    types = {name: each.value_type if pa.types.is_dictionary(each) else each for name, each in types.items()}
    types[user] = choose_user_type(user, found.field(user).type, kind, user_as_text)
    with reading_table(path):
        if kind == "csv":
            convert = make_text_options(list(types), MISSING_TEXT, {user: types[user]})
            with open_csv(path, dialect, convert, BATCH_BYTES // 4) as reader:
                rows = reader.read_all()
            empty = {name: pc.equal(rows[name], "") for name in names if name != user}
            columns = {name: pc.if_else(mask, None, rows[name]) for name, mask in empty.items()}
            return pa.table({user: rows[user], **columns})
        table = pa.Table.from_batches(list(iterate_batches(path, list(types), MAX_BATCH_ROWS, whole=True)))
        return table.select(list(types)).cast(pa.schema(list(types.items())))


def read_values(column: Any) -> Floats:
    """Return a column as a NumPy array, NaN for nulls, without copying it where it holds integers or floats."""
    if column.null_count and pa.types.is_boolean(column.type):
        column = column.cast(pa.uint8())
    return np.asarray(column.to_numpy(zero_copy_only=False))


def read_user_ids(users: Any) -> NDArrayAny:
    """Return the values of a user column, (rows,): integers, floats, or Python strings."""
    return np.asarray(users.to_numpy(zero_copy_only=False))


def fill_rows(out: Floats, columns: Sequence[Floats]) -> Floats:
    """Copy columns (rows,) into a row-major array (rows, columns), and return it.

    One column at a time is as fast as any blocking while `out` fits in the cache.
    """
    for j, column in enumerate(columns):
        out[:, j] = column
    return out


NDArrayAny = np.ndarray[Any, np.dtype[Any]]
