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
_ROW = 8  # bytes that a row counts as, at least
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
    """Raise OverLimit if a file is far smaller than its columns unpacked, or its rows take next to nothing.

    Repeated values take next to nothing. So a byte for each value counts, and eight for each row. Of parts of columns
    nothing is asked here: pyarrow ends the process where the footer is wrong about one.

    Args:
        metadata: of the Parquet file.
        size: of the file in bytes.
    """
    check_expansion(metadata.num_rows * max(metadata.num_columns, _ROW), size)
    groups = (metadata.row_group(group).total_byte_size for group in range(metadata.num_row_groups))
    check_expansion(sum(max(unpacked, 0) for unpacked in groups), size)


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

    A long text that is stored once may stand in every row. Then a batch has fewer rows, however few bytes they take.
    """
    with open_parquet(path) as file:
        text = [name for name in columns if name in file.schema_arrow.names]
        text = [name for name in text if is_text(file.schema_arrow.field(name).type)]
    longest = 0
    with open_parquet(path, text) as file:
        for group in range(file.metadata.num_row_groups) if text else ():
            for batch in file.iter_batches(1, row_groups=[group], columns=text):
                longest = max(longest, sum(_find_longest(column) for column in batch.columns))
                break  # with the first row come all texts that are stored once
    return min(rows, max(LIMITS["expanded"].value // max(longest, 1), _LEAST_ROWS))


def _find_longest(column: Any) -> int:
    """Return the bytes of the longest text of a column that comes as a dictionary, or 0."""
    if not pa.types.is_dictionary(column.type) or not len(column.dictionary):
        return 0
    return int(pc.max(pc.binary_length(column.dictionary)).as_py() or 0)
