"""Parquet files that somebody else may have made: none becomes far larger than it is, in all or while it is read."""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from functools import lru_cache
from typing import Any

import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq

from privrep.boundary import LIMITS, check_expansion
from privrep.data.problems import is_text

_READ_BUFFER = 1 << 16  # per column; a memory map is as fast, but all it has touched counts as this process's memory
_SHARED = {"RLE_DICTIONARY", "PLAIN_DICTIONARY"}  # encodings by which one value stands in many rows
_WHOLE = {"PLAIN", "RLE", "BIT_PACKED"}  # encodings of bytes by which each row has its own
_LEAST_ROWS = 64
_Path = str | os.PathLike[str]


def open_parquet(path: _Path, shared: Sequence[str] = ()) -> Any:
    """Open a Parquet file for reading in batches, without mapping it into memory.

    Raise OverLimit if it is far smaller than what it would become.

    Args:
        path: of the file.
        shared: columns of text that come as dictionaries.
    """
    file = pq.ParquetFile(path, buffer_size=_READ_BUFFER, pre_buffer=False, read_dictionary=list(shared))
    try:
        _check_sizes(file.metadata, os.stat(path).st_size)
    except BaseException:
        file.close()
        raise
    return file


def _check_sizes(metadata: Any, size: int) -> None:
    """Raise OverLimit if a part of a column, or a byte for each value, is far larger than what is stored of it.

    Args:
        metadata: of the Parquet file.
        size: of the file in bytes.
    """
    check_expansion(metadata.num_rows * metadata.num_columns, size)
    for group in range(metadata.num_row_groups):
        row_group = metadata.row_group(group)
        if 0 <= row_group.total_byte_size <= LIMITS["expanded"].value:
            continue  # as nearly all are
        for column in range(row_group.num_columns):
            part = row_group.column(column)
            check_expansion(part.total_uncompressed_size, min(part.total_compressed_size, size))


def iterate_batches(path: _Path, columns: Sequence[str], rows: int, *, whole: bool = False) -> Iterator[Any]:
    """Yield batches of a file, of fewer rows where texts or bytes are long.

    Raise ValueError if a text is none or rows are missing. Raise OverLimit if what is kept becomes too large.

    Args:
        path: of the file.
        columns: that are read.
        rows: of a batch, at most.
        whole: whether all batches are kept, so that their sizes add up.
    """
    status, count, kept = os.stat(path), 0, 0
    rows = _limit_rows(os.fspath(path), status.st_mtime_ns, status.st_size, tuple(columns), rows)
    with open_parquet(path) as file:
        for batch in file.iter_batches(rows, columns=list(columns)):
            count += batch.num_rows
            for column in batch.columns:
                if is_text(column.type) or pa.types.is_dictionary(column.type):
                    column.validate(full=True)
            if whole:
                kept += batch.nbytes
                check_expansion(kept, status.st_size)
            yield batch
        if count != file.metadata.num_rows:
            raise ValueError(f"its footer tells of {file.metadata.num_rows:,} rows, and it holds {count:,}")


@lru_cache(maxsize=64)
def _limit_rows(path: str, changed: int, size: int, columns: tuple[str, ...], rows: int) -> int:
    """Return how many rows a batch may have, found once for each size and time of change.

    A long value that is stored once may stand in every row. Then a batch has fewer rows, however few bytes they take.
    """
    most = LIMITS["expanded"].value
    with open_parquet(path) as file:
        flat = {name for name in file.schema_arrow.names if is_text(file.schema_arrow.field(name).type)}
        shared: dict[str, list[int]] = {}  # columns of text, and the row groups in which values are stored once
        for group in range(file.metadata.num_row_groups):
            row_group = file.metadata.row_group(group)
            for place in range(row_group.num_columns):
                part = row_group.column(place)
                name, encodings = part.path_in_schema, set(part.encodings)
                if part.physical_type != "BYTE_ARRAY" or name.partition(".")[0] not in columns or encodings <= _WHOLE:
                    continue
                if encodings <= _WHOLE | _SHARED and name in flat:
                    shared.setdefault(name, []).append(group)
                else:
                    rows = min(rows, max(most // max(part.total_uncompressed_size, 1), _LEAST_ROWS))
    longest = _find_longest(path, shared) if shared else 0
    return min(rows, max(most // max(longest * max(len(shared), 1), 1), _LEAST_ROWS))


def _find_longest(path: str, shared: dict[str, list[int]]) -> int:
    """Return the bytes of the longest text that is stored once, of these columns in these row groups."""
    longest = 0
    with open_parquet(path, list(shared)) as file:
        for name, groups in shared.items():
            for group in groups:
                batch = next(file.iter_batches(1, row_groups=[group], columns=[name]), None)
                column = None if batch is None else batch.column(0)
                if column is not None and pa.types.is_dictionary(column.type) and len(column.dictionary):
                    longest = max(longest, pc.max(pc.binary_length(column.dictionary)).as_py() or 0)
    return longest
