"""Users in a Parquet or CSV file that may be larger than memory, read in blocks of whole users.

Every pass reads the file from beginning to end, and the blocks are those that `UserTable.blocks` makes of the same
rows, so results equal those of the in-memory engine bit for bit. That needs each user's rows side by side and the users
sorted by id. A Parquet file written so is read where it is; any other is regrouped once, when it is opened, into a
Parquet file in a temporary folder that only its owner can enter and that goes away on close. What a killed process
leaves behind goes away when the next one regroups a file in the same place.
"""

from __future__ import annotations

import os
import shutil
import sys
from bisect import bisect_left, bisect_right
from collections import Counter, deque
from collections.abc import Callable, Iterable, Iterator, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass, field
from itertools import pairwise
from pathlib import Path
from tempfile import TemporaryDirectory, gettempdir
from types import TracebackType
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq
from numpy.typing import NDArray

from privrep.data.readers import BATCH_BYTES, TableSource, checked_batches, column_values, fill_rows, user_ids
from privrep.data.user_table import Floats, UserTable
from privrep.engines.base import LocalStep, default_workers, sum_blocks
from privrep.errors import InputError
from privrep.privacy.bounds import MAX_ROWS_PER_SUM, Bound, BoundedSum

if sys.platform != "win32":
    import fcntl

REGROUP_BYTES = 150 << 20  # most bytes of rows that regrouping holds at a time
MAX_BUCKETS = 64  # ranges of ids that one round of regrouping tells apart, each an open file
PREFIX = "privrep-rows-"  # of temporary folders
SAMPLE = 8192  # ids from which the ranges are chosen


class StreamingUsers:
    """The engine of a file. Make one with `open`, best in a `with` block, which removes temporary files at its end."""

    def __init__(self, origin: TableSource, source: TableSource, seen: _Seen, workers: int, files: ExitStack) -> None:
        self.origin = origin  # the file that was opened
        self.source = source  # what a pass reads, that file or a temporary one: sorted by user, checked
        self.count = seen.users
        self.rows = seen.rows
        self.workers = workers
        self._files = files
        self._closed = False

    @classmethod
    def open(
        cls,
        source: TableSource,
        workdir: str | os.PathLike[str] | None = None,
        *,
        workers: int | None = None,
        limit: int = REGROUP_BYTES,
    ) -> StreamingUsers:
        """Read the file once, looking at every value, and regroup it in `workdir` if it is not sorted by user.

        Regrouping holds at most `limit` bytes of rows in memory. The temporary file takes about the room of the
        uncompressed columns, twice that while it is being made.
        """
        with ExitStack() as files, _full_disks_explained(workdir):
            grouped = source
            folder: Path | None = None
            if source.format == "csv":
                folder = _private_folder(files, workdir)
                grouped, seen = _copy(source, folder / "rows.parquet")
            else:
                seen = _Seen()
                for batch in _ahead(checked_batches(source)):
                    seen.add(batch)
            if not seen.sorted:
                folder = folder or _private_folder(files, workdir)
                grouped, seen = _regroup(_Rows(grouped.batches, seen.nbytes, seen.sample), source, folder, limit)
                (folder / "rows.parquet").unlink(missing_ok=True)
            users = cls(source, grouped, seen, workers or default_workers(), files.pop_all())
        return users

    @property
    def features(self) -> int:
        return len(self.source.feature_names)

    def bounded_sums(self, step: LocalStep, bounds: Mapping[str, Bound]) -> dict[str, BoundedSum]:
        if self.source.target is None:
            raise InputError(f"{self.origin.path} was opened without a target; name the target column.")
        _keep_freed_memory()
        return sum_blocks(self.blocks(), step, bounds, self.workers)

    def blocks(self, max_rows: int = MAX_ROWS_PER_SUM) -> Iterator[UserTable]:
        """The blocks `UserTable.blocks` would give, in the same order, each in arrays of its own; y is NaN without a
        target. Not for what leaves the users: that goes through `bounded_sums`."""
        if self._closed:
            raise InputError(f"the users of {self.origin.path} were closed; open the file again.")
        return self._blocks(max_rows)

    def _blocks(self, max_rows: int) -> Iterator[UserTable]:
        seen = _Seen(sampled=False)
        window = _Window(self.source)
        for batch in _ahead(self.source.batches()):
            window.add(batch, seen.add(batch))
            if not seen.sorted:
                break
            yield from window.whole_blocks(max_rows)
        if (seen.sorted, seen.users, seen.rows) != (True, self.count, self.rows):
            raise InputError(f"{self.origin.path} changed while it was in use; open it again.")
        yield from window.whole_blocks(max_rows, end=True)
        pa.default_memory_pool().release_unused()

    def close(self) -> None:
        """Remove temporary files. The users cannot be asked after that."""
        self._closed = True
        self._files.close()

    def __enter__(self) -> StreamingUsers:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


def _ahead(batches: Iterator[Any], depth: int = 2) -> Iterator[Any]:
    """The same batches, decoded by another thread while the caller works on those before."""
    with ThreadPoolExecutor(1) as thread:
        waiting: deque[Future[Any]] = deque(thread.submit(next, batches, None) for _ in range(depth))
        try:
            while (batch := waiting.popleft().result()) is not None:
                waiting.append(thread.submit(next, batches, None))
                yield batch
                del batch
        finally:
            thread.shutdown(cancel_futures=True)


def _keep_freed_memory() -> None:
    """Let temporaries reuse memory that this process already has.

    A pass allocates and frees the same few megabytes over and over. By default glibc hands each back to the kernel and
    faults it in again, which costs as much as the arithmetic. It stops doing so for all sizes up to that of the largest
    mapping it has seen freed, at most 32 MB: this is such a mapping, never touched. Elsewhere it does nothing.
    """
    np.empty(31 << 20, np.uint8)


# Blocks of whole users


class _Seen:
    """What is known of the rows read so far, given to it batch by batch."""

    def __init__(self, sampled: bool = True) -> None:
        self.users = 0  # as long as they are sorted
        self.rows = 0
        self.nbytes = 0
        self.sorted = True  # each user's rows side by side, users in ascending order
        self.sample = _Sample() if sampled else None
        self._last: Any = None  # the user of the last row, an array of one

    def add(self, batch: Any) -> NDArray[np.int64]:
        """Count a batch; returns the rows in it at which a user begins who did not end the batch before."""
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


class _Window:
    """Rows that were read and are not yet in a block. The first of them is the first of a user."""

    def __init__(self, source: TableSource) -> None:
        self._features = len(source.feature_names)
        self._target = source.target is not None
        self._dtype = source.dtype
        self._pieces: deque[list[Floats]] = deque()  # columns of a batch: target if any, features
        self._rows = 0
        self._begins = np.empty(0, np.int64)  # row in the window at which each user begins
        self._ids: NDArray[Any] = np.empty(0)

    def add(self, batch: Any, begins: NDArray[np.int64]) -> None:
        self._pieces.append([column_values(column) for column in batch.columns[1:]])
        ids = user_ids(batch.column(0).take(pa.array(begins)))
        self._ids = np.concatenate([self._ids, ids]) if len(self._ids) else ids
        self._begins = np.concatenate([self._begins, begins + self._rows])
        self._rows += batch.num_rows

    def whole_blocks(self, max_rows: int, end: bool = False) -> Iterator[UserTable]:
        """Blocks that later rows cannot change; all that is left if there are none."""
        while self._rows > max_rows or (end and self._rows):
            edges = np.append(self._begins, self._rows) if end else self._begins
            users = max(int(np.searchsorted(edges, max_rows, side="right")) - 1, 1)
            if users == len(edges):
                return  # a user with more rows than a block, whose end has not been read
            yield self._take(users, int(edges[users]))

    def _take(self, users: int, rows: int) -> UserTable:
        X = np.empty((rows, self._features), self._dtype)
        y = np.empty(rows, self._dtype) if self._target else np.full(rows, np.nan, self._dtype)
        filled = 0
        while filled < rows:
            piece = self._pieces.popleft()
            stop = min(filled + len(piece[0]), rows)
            used = [column[: stop - filled] for column in piece]
            if len(used[0]) < len(piece[0]):
                self._pieces.appendleft([column[stop - filled :] for column in piece])
            if self._target:
                y[filled:stop] = used.pop(0)
            fill_rows(X[filled:stop], used)
            filled = stop
        offsets = np.append(self._begins[:users], rows)
        block = UserTable(X, y, offsets, self._ids[:users])
        self._begins, self._ids, self._rows = self._begins[users:] - rows, self._ids[users:], self._rows - rows
        return block


# Regrouping: an external sort into ranges of ids


class _Sample:
    """Ids of at most 2 * SAMPLE rows, every row as likely as any other: each gets a random key, the smallest stay."""

    def __init__(self) -> None:
        self._random = np.random.default_rng(0)  # decides how work is cut up, never what comes out
        self._below = 1.0
        self._keys: NDArray[np.float64] = np.empty(0)
        self._ids: list[Any] = []

    def add(self, users: Any) -> None:
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

    def cuts(self, parts: int) -> list[tuple[Any, bool]]:
        """Places to cut the ids into about `parts` ranges of equally many rows: (id, whether after it).

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
class _Rows:
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
        if self._writer is None:
            self._writer = pa.ipc.new_stream(str(self.path), self.schema)
        self._writer.write_batch(batch)
        self.nbytes += batch.nbytes
        if not self.one_user:
            self.sample.add(batch.column(0))

    def finish(self) -> None:
        if self._writer is not None:
            self._writer.close()

    def batches(self) -> Iterator[Any]:
        with pa.OSFile(str(self.path)) as file, pa.ipc.open_stream(file) as reader:
            yield from reader


class _Writer:
    """The temporary Parquet file: the source's columns and types, in a form that is quick to read."""

    def __init__(self, source: TableSource, path: Path) -> None:
        self.seen = _Seen()
        self._file = pq.ParquetWriter(
            path,
            source.schema,
            compression="none",
            use_dictionary=[source.user] if pa.types.is_large_string(source.schema[0].type) else False,
            write_statistics=False,
            data_page_size=int(np.clip(BATCH_BYTES // len(source.columns), 1 << 13, 1 << 20)),
        )

    def write(self, batch: Any) -> None:
        self.seen.add(batch)
        self._file.write_batch(batch)

    def close(self) -> None:
        self._file.close()


def _copy(source: TableSource, path: Path) -> tuple[TableSource, _Seen]:
    """The rows of a file, checked, in the order they are in."""
    writer = _Writer(source, path)
    try:
        for table in _tables(_ahead(checked_batches(source)), BATCH_BYTES):
            writer.write(table)
    finally:
        writer.close()
    return _at(source, path), writer.seen


def _regroup(rows: _Rows, source: TableSource, folder: Path, limit: int) -> tuple[TableSource, _Seen]:
    """The rows, with the columns of the source, sorted by user; each user's rows keep their order."""
    path = folder / "users.parquet"
    writer = _Writer(source, path)
    try:
        _write_sorted(rows, writer, source.schema, folder / "part", limit)
    finally:
        writer.close()
    pa.default_memory_pool().release_unused()
    return _at(source, path), writer.seen


def _at(source: TableSource, path: Path) -> TableSource:
    return TableSource(path, source.user, source.target, source.feature_names)


def _write_sorted(rows: _Rows, writer: _Writer, schema: Any, prefix: Path, limit: int) -> None:
    """Sort in memory what fits; cut anything else into ranges of ids, one file each, and do the same with each.

    Of a table that is sorted there are up to three copies: as read, in one piece, and sorted.
    """
    if rows.nbytes <= limit // 3:
        for table in _tables(rows.batches(), limit):
            writer.write(_by_user(table))
        return
    assert rows.sample is not None
    cuts = rows.sample.cuts(int(np.clip(rows.nbytes // max(limit // 4, 1) + 1, 2, MAX_BUCKETS)))
    buckets = [_Bucket(prefix.with_name(f"{prefix.name}-{i}"), schema, False) for i in range(len(cuts) + 1)]
    for bucket, (below, above) in zip(buckets[1:], pairwise(cuts), strict=False):
        bucket.one_user = below[0] == above[0]
    try:
        for table in _tables(rows.batches(), limit // 4):
            table = _by_user(table)
            edges = [0, *(_position(table.column(0), *cut) for cut in cuts), table.num_rows]
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
            _write_sorted(_Rows(bucket.batches, bucket.nbytes, bucket.sample), writer, schema, bucket.path, limit)
        bucket.path.unlink()


def _tables(batches: Iterable[Any], nbytes: int) -> Iterator[Any]:
    """The same rows, in batches of at most so many bytes, or of one batch where that is larger."""
    waiting: list[Any] = []
    size = 0
    for batch in batches:
        if waiting and size + batch.nbytes > nbytes:
            yield _joined(waiting)
            waiting, size = [], 0
        waiting.append(batch)
        size += batch.nbytes
    if waiting:
        yield _joined(waiting)


def _joined(batches: list[Any]) -> Any:
    return pa.Table.from_batches(batches).combine_chunks().to_batches()[0]


def _by_user(batch: Any) -> Any:
    return pc.take(batch, pc.sort_indices(batch.column(0)))  # a stable sort


def _position(ids: Any, name: Any, after: bool) -> int:
    side = bisect_right if after else bisect_left
    return side(range(len(ids)), name, key=lambda i: ids[i].as_py())


def _private_folder(files: ExitStack, workdir: str | os.PathLike[str] | None) -> Path:
    """A new folder that only its owner can enter, removed with all in it when `files` is closed.

    A process that is killed cannot remove its own; the next that makes one in the same place does.
    """
    if workdir is not None and not Path(workdir).is_dir():
        raise InputError(f"workdir: there is no folder {workdir}; make it or name another.")
    _remove_leftovers(Path(workdir if workdir is not None else gettempdir()))
    folder = Path(files.enter_context(TemporaryDirectory(prefix=PREFIX, dir=workdir)))
    if sys.platform != "win32":
        lock = os.open(folder / "locking", os.O_CREAT | os.O_WRONLY, 0o600)
        files.callback(os.close, lock)
        fcntl.flock(lock, fcntl.LOCK_EX)  # held while this process lives
        (folder / "locking").rename(folder / "lock")
    return folder


def _remove_leftovers(parent: Path) -> None:
    """Folders of this user whose lock no process holds."""
    if sys.platform == "win32":
        return
    for folder in parent.glob(PREFIX + "*"):
        with suppress(OSError), open(folder / "lock") as lock:
            if folder.lstat().st_uid == os.getuid():
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
                shutil.rmtree(folder)


@contextmanager
def _full_disks_explained(workdir: str | os.PathLike[str] | None) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        where = workdir if workdir is not None else "the default folder for temporary files"
        raise InputError(f"workdir: cannot write to {where} ({error}); make room there or name another.") from error
