"""Users in a Parquet or CSV file that may be larger than memory, read in blocks of whole users.

Every pass reads the file from beginning to end. The blocks are those that `UserTable.blocks` makes of the same rows, so
results equal those of the in-memory engine bit for bit. That needs each user's rows side by side and the users sorted
by id.

A Parquet file written so is read where it is. Any other is regrouped once, when it is opened, into a Parquet file in a
temporary folder. Only its owner can enter the folder, and it goes away on close. Leftovers of a killed process go away
when the next one regroups a file in the same place.
"""

from __future__ import annotations

import os
import shutil
import sys
from collections import deque
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path
from tempfile import TemporaryDirectory, gettempdir
from types import TracebackType
from typing import Any

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

from privrep.data.missing import MissingCounts
from privrep.data.readers import TableSource, assemble, read_checked_batches, read_user_ids, read_values
from privrep.data.regroup import Rows, RowsSeen, copy_checked, read_ahead, regroup
from privrep.data.table import UserTable, choose_block_rows
from privrep.data.weights import make_row_weights, thin_rows
from privrep.errors import InputError
from privrep.privacy.bounds import Bound, BoundedSum, LossBound
from privrep.privacy.protocol import EVERYONE, Audience, Facts, Step
from privrep.typing import Floats
from privrep.users.performance import Performance
from privrep.users.summing import sum_blocks

if sys.platform != "win32":
    import fcntl

PREFIX = "privrep-rows-"  # of temporary folders


class StreamingUsers:
    """Engine of a file. Make one with `open`, best in a `with` block, which removes temporary files at its end."""

    def __init__(
        self, origin: TableSource, source: TableSource, seen: RowsSeen, performance: Performance, files: ExitStack
    ) -> None:
        self.origin = origin  # the file that was opened
        self.source = source  # what a pass reads, that file or a temporary one: sorted by user, checked
        self._users = seen.users
        self.rows = seen.rows
        self.missing = MissingCounts()  # what was seen when the file was opened: for the eyes of whoever holds it
        self.performance = performance
        self._files = files
        self._closed = False

    @classmethod
    def open(cls, source: TableSource, performance: Performance | None = None) -> StreamingUsers:
        """Read the file once, looking at every value, and regroup it in the `workdir` if it is not sorted by user.

        Regrouping holds at most `regroup_bytes` of rows in memory. The temporary file takes about the room of the
        uncompressed columns, twice that while it is being made.
        """
        performance = performance or Performance()
        workdir = performance.workdir
        with ExitStack() as files, _explain_full_disks(workdir):
            grouped = source
            folder: Path | None = None
            counts = MissingCounts()
            if source.format == "csv":
                folder = _make_private_folder(files, workdir)
                grouped, seen = copy_checked(source, folder / "rows.parquet", counts)
            else:
                seen = RowsSeen()
                for batch in read_ahead(read_checked_batches(source, counts)):
                    seen.add(batch)
            if not seen.sorted:
                folder = folder or _make_private_folder(files, workdir)
                grouped, seen = regroup(
                    Rows(grouped.batches, seen.nbytes, seen.sample), source, folder, performance.regroup_bytes
                )
                (folder / "rows.parquet").unlink(missing_ok=True)
            users = cls(source, grouped, seen, performance, files.pop_all())
            users.missing = counts
        return users

    @property
    def facts(self) -> Facts:
        source = self.source
        return Facts(self._users, len(source.feature_names), len(source.targets), source.is_sparse)

    @property
    def means_to_keep(self) -> int:
        """Return the number of columns whose means are kept with users' heads: all of numbers, if one may be missing.

        What is kept of one user must not depend on what others miss.
        """
        return len(self.source.numeric_names) if self.source.missing.how != "refuse" else 0

    def sums(
        self, step: Step, bounds: Mapping[str, Bound | LossBound], among: Audience = EVERYONE
    ) -> dict[str, BoundedSum]:
        if self.source.target is None:
            raise InputError(f"{self.origin.path} was opened without a target; name the target column.")
        if step.spec.batch_level:
            raise InputError("a function of a whole batch is asked of rows in memory. Read the file into a table.")
        return sum_blocks(self.blocks(), step, bounds, self.performance, among, self._users)

    def blocks(self, max_rows: int | None = None) -> Iterator[UserTable]:
        """Yield the blocks that `UserTable.blocks` would yield, in the same order, each in arrays of its own.

        y is NaN without a target. Not for anything that leaves the users: that goes through `sums`.
        """
        if self._closed:
            raise InputError(f"the users of {self.origin.path} were closed; open the file again.")
        return self._read_blocks(max_rows or choose_block_rows(self.facts.features, self.source.is_sparse))

    def _read_blocks(self, max_rows: int) -> Iterator[UserTable]:
        """Yield blocks of at most `max_rows` rows. Raise InputError if the file changed since it was opened."""
        seen = RowsSeen(sampled=False)
        window = _Window(self.source)
        for batch in read_ahead(self.source.batches()):
            window.add(batch, seen.add(batch))
            if not seen.sorted:
                break
            yield from window.take_blocks(max_rows)
        if (seen.sorted, seen.users, seen.rows) != (True, self._users, self.rows):
            raise InputError(f"{self.origin.path} changed while it was in use; open it again.")
        window.close()
        yield from window.take_blocks(max_rows, end=True)
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


class _Window:
    """Rows that were read and are not yet in a block. The first of them is the first of a user."""

    def __init__(self, source: TableSource) -> None:
        self._source = source
        self._pieces: deque[list[Floats]] = deque()  # columns of a batch but the user
        self._rows = 0
        self._begins = np.empty(0, np.int64)  # row in the window at which each user begins
        self._ids: NDArray[Any] = np.empty(0)
        self._open: list[list[Floats]] = []  # of the last user, whose weights are not all known
        self._open_id: NDArray[Any] = np.empty(0)

    def add(self, batch: Any, begins: NDArray[np.int64]) -> None:
        """Take the rows of a batch, without rows that are left out; users who lose all of theirs stay.

        Args:
            batch: of Arrow, its columns as in `TableSource.columns`.
            begins: rows of the batch at which a user begins, (users,).
        """
        columns = [read_values(column) for column in batch.columns[1:]]
        ids = read_user_ids(batch.column(0).take(pa.array(begins)))
        if self._source.weight is None:
            weights = make_row_weights(self._source, columns)
            self._push(columns, ids, begins, None if weights is None else weights > 0)
            return
        last = int(begins[-1]) if len(begins) else 0
        if len(begins):
            self._open.append([column[:last] for column in columns])
            self._push_open(ids[:-1], begins[:-1])
            self._open_id = ids[-1:]
        self._open.append([column[last:] for column in columns])

    def close(self) -> None:
        """Take what was held back: no more rows come."""
        if self._open:
            self._push_open(self._open_id[:0], np.empty(0, np.int64))

    def _push_open(self, ids: NDArray[Any], begins: NDArray[np.int64]) -> None:
        """Add the rows of the last user so far, with the users who began in the piece that was held back last.

        Args:
            ids: of the users who begin in the piece, (users,).
            begins: rows of the piece at which they begin, (users,).
        """
        before = sum(len(piece[0]) for piece in self._open[:-1])
        columns = [np.concatenate(parts) for parts in zip(*self._open, strict=True)]
        if len(self._open_id):
            ids = np.concatenate([self._open_id, ids])
            begins = np.concatenate([[0], begins + before])
        weights = make_row_weights(self._source, columns)
        self._push(columns, ids, begins, None if weights is None else thin_rows(weights, begins))
        self._open, self._open_id = [], ids[:0]

    def _push(
        self, columns: list[Floats], ids: NDArray[Any], begins: NDArray[np.int64], kept: NDArray[np.bool_] | None
    ) -> None:
        """Add rows, or only the ones that are kept.

        Args:
            columns: of the rows, (rows,) each.
            ids: of the users who begin in them, (users,).
            begins: rows at which they begin, (users,), counted before any row is left out.
            kept: (rows,), a mask of the rows that stay; None for all.
        """
        rows = len(columns[0])
        if kept is not None:
            ends = np.concatenate([[0], np.cumsum(kept)])
            columns, begins, rows = [column[kept] for column in columns], ends[begins], int(ends[-1])
        self._pieces.append(columns)
        self._ids = np.concatenate([self._ids, ids]) if len(self._ids) else ids
        self._begins = np.concatenate([self._begins, begins + self._rows])
        self._rows += rows

    def take_blocks(self, max_rows: int, end: bool = False) -> Iterator[UserTable]:
        """Yield blocks that later rows cannot change; all that is left at the end of the file."""
        while self._rows > max_rows or (end and len(self._begins)):
            edges = np.append(self._begins, self._rows) if end else self._begins
            users = max(int(np.searchsorted(edges, max_rows, side="right")) - 1, 1)
            if users == len(edges):
                return  # a user with more rows than a block, whose end has not been read
            yield self._take_block(users, int(edges[users]))

    def _take_block(self, users: int, rows: int) -> UserTable:
        """Return the first users of the window, who have this many rows, and drop them from it."""
        X, y = assemble(self._source, self._pop_rows(rows), rows)
        offsets = np.append(self._begins[:users], rows)
        block = UserTable(X, y, offsets, self._ids[:users])
        self._begins, self._ids, self._rows = self._begins[users:] - rows, self._ids[users:], self._rows - rows
        return block

    def _pop_rows(self, rows: int) -> Iterator[list[Floats]]:
        """Yield the first rows of the window, piece by piece, and drop them from it."""
        while rows:
            piece = self._pieces.popleft()
            used = [column[:rows] for column in piece]
            if len(used[0]) < len(piece[0]):
                self._pieces.appendleft([column[rows:] for column in piece])
            rows -= len(used[0])
            yield used


def _make_private_folder(files: ExitStack, workdir: str | os.PathLike[str] | None) -> Path:
    """Return a new folder that only its owner can enter, removed with all in it when `files` closes.

    A lock in it says that this process lives. Folders of dead processes are removed.
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
    """Remove folders of this operating system's user whose lock no process holds."""
    if sys.platform == "win32":
        return
    for folder in parent.glob(PREFIX + "*"):
        with suppress(OSError), open(folder / "lock") as lock:
            if folder.lstat().st_uid == os.getuid():
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
                shutil.rmtree(folder)


@contextmanager
def _explain_full_disks(workdir: str | os.PathLike[str] | None) -> Iterator[None]:
    """Turn errors of the operating system into an InputError that says where room is missing."""
    try:
        yield
    except OSError as error:
        where = workdir if workdir is not None else "the default folder for temporary files"
        raise InputError(f"workdir: cannot write to {where} ({error}); make room there or name another.") from error
