"""Sorting a file by user: an external sort into ranges of ids, holding a bounded number of bytes in memory."""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections import Counter, deque
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq
from numpy.typing import NDArray

from privrep.data.missing import MissingCounts
from privrep.data.readers import BATCH_BYTES, TableSource, read_checked_batches

MAX_BUCKETS = 64  # ranges of ids that one round of regrouping tells apart, each an open file
SAMPLE = 8192  # ids from which the ranges are chosen


def read_ahead(batches: Iterator[Any], depth: int = 2) -> Iterator[Any]:
    """Yield the same batches, decoded by another thread while the caller works on those before."""
    with ThreadPoolExecutor(1) as thread:
        waiting: deque[Future[Any]] = deque(thread.submit(next, batches, None) for _ in range(depth))
        try:
            while (batch := waiting.popleft().result()) is not None:
                waiting.append(thread.submit(next, batches, None))
                yield batch
                del batch
        finally:
            thread.shutdown(cancel_futures=True)


class RowsSeen:
    """Facts of the rows read so far, given to it batch by batch."""

    def __init__(self, sampled: bool = True) -> None:
        self.users = 0  # as long as they are sorted
        self.rows = 0
        self.nbytes = 0
        self.sorted = True  # each user's rows side by side, users in ascending order
        self.sample = _Sample() if sampled else None
        self._last: Any = None  # the user of the last row, an array of one

    def add(self, batch: Any) -> NDArray[np.int64]:
        """Count a batch, and return the rows in it at which a user begins who did not end the batch before."""
        users = batch.column(0)
        before = pa.concat_arrays([users[:1] if self._last is None else self._last, users[:-1]])
        begins = np.flatnonzero(pc.not_equal(before, users).to_numpy(zero_copy_only=False))
        if self._last is None:
            begins = np.concatenate([[0], begins])
        self.sorted = self.sorted and bool(pc.all(pc.less_equal(before, users)).as_py())
        self._last = users[-1:]
        self.users += len(begins)
        self.rows += batch.num_rows
        self.nbytes += batch.nbytes
        if self.sample is not None:
            self.sample.add(users)
        return begins


class _Sample:
    """Ids of at most 2 * SAMPLE rows, every row as likely as any other: each gets a random key, the smallest stay."""

    def __init__(self) -> None:
        self._random = np.random.default_rng(0)  # decides how work is cut up, never what comes out
        self._below = 1.0
        self._keys: NDArray[np.float64] = np.empty(0)
        self._ids: list[Any] = []

    def add(self, users: Any) -> None:
        """Draw a key for each of these rows, (rows,), and keep the ids of the smallest."""
        keys = self._random.random(len(users))
        chosen = np.flatnonzero(keys < self._below)
        if not len(chosen):
            return
        self._ids.append(users.take(pa.array(chosen)))
        self._keys = np.concatenate([self._keys, keys[chosen]])
        if len(self._keys) > 2 * SAMPLE:
            self._below = float(np.partition(self._keys, SAMPLE)[SAMPLE])
            stay = np.flatnonzero(self._keys < self._below)
            self._ids = [pa.concat_arrays(self._ids).take(pa.array(stay))]
            self._keys = self._keys[stay]

    def choose_cuts(self, parts: int) -> list[tuple[Any, bool]]:
        """Return places to cut the ids into about `parts` ranges of equally many rows: (id, whether after it).

        An id that fills a range, or is the only one to cut at, gets a range of its own. So at least two ranges have
        rows or one range is a single user: cutting again always comes to an end.
        """
        ids = pa.concat_arrays(self._ids)
        ids = ids.take(pc.sort_indices(ids))
        places = np.arange(1, parts) * len(ids) // parts
        times = Counter(ids.take(pa.array(places)).to_pylist())
        alone = {name for name, count in times.items() if count > 1 or len(times) == 1}
        return sorted([(name, False) for name in times] + [(name, True) for name in alone])


@dataclass
class Rows:
    """Rows to be sorted."""

    batches: Callable[[], Iterable[Any]]
    nbytes: int
    sample: _Sample | None


@dataclass
class _Bucket:
    """Rows of one range of ids, in a file."""

    path: Path
    schema: Any
    one_user: bool
    nbytes: int = 0
    sample: _Sample = field(default_factory=_Sample)
    _writer: Any = None

    def add(self, batch: Any) -> None:
        """Write a batch to the file, which is made for the first."""
        if self._writer is None:
            self._writer = pa.ipc.new_stream(str(self.path), self.schema)
        self._writer.write_batch(batch)
        self.nbytes += batch.nbytes
        if not self.one_user:
            self.sample.add(batch.column(0))

    def finish(self) -> None:
        """Close the file for writing."""
        if self._writer is not None:
            self._writer.close()

    def batches(self) -> Iterator[Any]:
        """Yield the batches that were written."""
        with pa.OSFile(str(self.path)) as file, pa.ipc.open_stream(file) as reader:
            yield from reader


class _Writer:
    """Temporary Parquet file: the source's columns and types, in a form that is quick to read."""

    def __init__(self, source: TableSource, path: Path) -> None:
        self.seen = RowsSeen()
        self._file = pq.ParquetWriter(
            path,
            source.schema,
            compression="none",
            use_dictionary=[source.user] if pa.types.is_large_string(source.schema[0].type) else False,
            write_statistics=False,
            data_page_size=int(np.clip(BATCH_BYTES // len(source.columns), 1 << 13, 1 << 20)),
        )

    def write(self, batch: Any) -> None:
        """Count a batch and write it."""
        self.seen.add(batch)
        self._file.write_batch(batch)

    def close(self) -> None:
        self._file.close()


def copy_checked(source: TableSource, path: Path, counts: MissingCounts) -> tuple[TableSource, RowsSeen]:
    """Write the rows of a file, checked, in the order they are in, and return the copy and facts of its rows.

    Args:
        source: the file and its columns.
        path: of the copy.
        counts: where missing values are counted.
    """
    writer = _Writer(source, path)
    try:
        for table in _merge_batches(read_ahead(read_checked_batches(source, counts)), BATCH_BYTES):
            writer.write(table)
    finally:
        writer.close()
    return _describe_copy(source, path), writer.seen


def regroup(rows: Rows, source: TableSource, folder: Path, limit: int) -> tuple[TableSource, RowsSeen]:
    """Write rows sorted by user, each user's rows in their order, and return the file and facts of its rows.

    Args:
        rows: to be sorted.
        source: the file they are from, with its columns.
        folder: for temporary files and the sorted one.
        limit: most bytes of rows in memory.
    """
    path = folder / "users.parquet"
    writer = _Writer(source, path)
    try:
        _write_sorted(rows, writer, source.schema, folder / "part", limit)
    finally:
        writer.close()
    pa.default_memory_pool().release_unused()
    return _describe_copy(source, path), writer.seen


def _describe_copy(source: TableSource, path: Path) -> TableSource:
    """Return the source of the same columns in another file, where categories are codes already.

    Its lists of categories are positions in lists of the same length.
    """
    coded = {name: range(len(listed)) for name, listed in (source.categories or {}).items()}
    more: Any = {"categories": coded, "weight": source.weight, "missing": source.missing, "dense": source.dense}
    more |= {"items": source.items}
    return TableSource(path, source.user, source.target, source.numeric_names, **more)


def _write_sorted(rows: Rows, writer: _Writer, schema: Any, prefix: Path, limit: int) -> None:
    """Sort in memory what fits; cut anything else into ranges of ids, one file each, and do the same with each.

    Of a table that is sorted there are up to three copies: as read, in one piece, and sorted.

    Args:
        rows: to be sorted.
        writer: of the sorted rows.
        schema: of the rows.
        prefix: of the names of the ranges' files.
        limit: most bytes of rows in memory.
    """
    if rows.nbytes <= limit // 3:
        for table in _merge_batches(rows.batches(), limit):
            writer.write(_sort_by_user(table))
        return
    assert rows.sample is not None
    cuts = rows.sample.choose_cuts(int(np.clip(rows.nbytes // max(limit // 4, 1) + 1, 2, MAX_BUCKETS)))
    buckets = [_Bucket(prefix.with_name(f"{prefix.name}-{i}"), schema, False) for i in range(len(cuts) + 1)]
    for bucket, (below, above) in zip(buckets[1:], pairwise(cuts), strict=False):
        bucket.one_user = below[0] == above[0]
    try:
        for table in _merge_batches(rows.batches(), limit // 4):
            table = _sort_by_user(table)
            edges = [0, *(_find_position(table.column(0), *cut) for cut in cuts), table.num_rows]
            for bucket, (start, stop) in zip(buckets, pairwise(edges), strict=True):
                if start < stop:
                    bucket.add(table.slice(start, stop - start))
    finally:
        for bucket in buckets:
            bucket.finish()
    for bucket in buckets:
        if not bucket.nbytes:
            continue
        if bucket.one_user:
            for batch in bucket.batches():
                writer.write(batch)
        else:
            _write_sorted(Rows(bucket.batches, bucket.nbytes, bucket.sample), writer, schema, bucket.path, limit)
        bucket.path.unlink()


def _merge_batches(batches: Iterable[Any], nbytes: int) -> Iterator[Any]:
    """Yield the same rows, in batches of at most `nbytes`, or of one batch where that is larger."""
    waiting: list[Any] = []
    size = 0
    for batch in batches:
        if waiting and size + batch.nbytes > nbytes:
            yield _join(waiting)
            waiting, size = [], 0
        waiting.append(batch)
        size += batch.nbytes
    if waiting:
        yield _join(waiting)


def _join(batches: list[Any]) -> Any:
    """Return one batch of several."""
    return pa.Table.from_batches(batches).combine_chunks().to_batches()[0]


def _sort_by_user(batch: Any) -> Any:
    """Return a batch sorted by user; rows of a user keep their order."""
    return pc.take(batch, pc.sort_indices(batch.column(0)))  # a stable sort


def _find_position(ids: Any, name: Any, after: bool) -> int:
    """Return the row at which sorted ids are cut before, or after, this id."""
    side = bisect_right if after else bisect_left
    return side(range(len(ids)), name, key=lambda i: ids[i].as_py())
