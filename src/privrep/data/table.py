"""Many users' rows in flat arrays, sorted by user."""

from __future__ import annotations

import contextlib
from collections.abc import Hashable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray
from scipy import sparse

from privrep.data.sparse import SparseRows, canonicalise
from privrep.data.weights import thin_rows
from privrep.errors import InputError
from privrep.typing import Array, Floats


def choose_block_rows(features: int, is_sparse: bool = False) -> int:
    """Return the rows of a block: enough to keep two cores busy, few enough for their caches, 32 MB at most.

    A block of sparse rows always has the same number: every engine can follow this rule without looking at the rows.
    """
    return 1 << 16 if is_sparse else int(np.clip((1 << 22) // max(features, 1), 64, 1 << 15))


@dataclass(frozen=True)
class UserTable:
    """Rows of many users. User i holds rows offsets[i] to offsets[i+1] of X and y; `ids` names users in the same order.

    X is an array (rows, features) or a `scipy.sparse.csr_array`. y is (rows,), or (rows, targets) where there are
    several targets.
    """

    X: Any
    y: Floats
    offsets: NDArray[np.int64]
    ids: NDArray[Any]

    def __post_init__(self) -> None:
        if self.is_sparse and not isinstance(self.X, sparse.csr_array):
            object.__setattr__(self, "X", canonicalise(self.X))  # the dataclass is frozen; this is its construction

    @classmethod
    def from_rows(
        cls, X: Any, y: Floats, groups: Sequence[Hashable] | NDArray[Any], weights: Array | None = None
    ) -> UserTable:
        """Gather rows by user. Users come in sorted order of their ids where they sort, rows keep their order.

        Args:
            X: (rows, features), or any SciPy sparse matrix.
            y: (rows,), or (rows, targets).
            groups: the user of each row.
            weights: (rows,), see `data.weights`. A user who keeps no row is a user without rows.
        """
        X, y = canonicalise(X) if sparse.issparse(X) else _to_floats(X), _to_floats(y)
        fits = y.ndim == 1 or (y.ndim == 2 and y.shape[1] > 1)
        if X.ndim != 2 or not fits or len(y) != X.shape[0] or len(groups) != X.shape[0]:
            raise InputError(
                f"X must have one row, y one target (or two or more) and groups one user per observation. "
                f"Got shapes {X.shape}, {y.shape} and ({len(groups)},) instead."
            )
        ids, codes = factorize(groups)
        counts = np.bincount(codes, minlength=len(ids))
        offsets = np.concatenate([[0], np.cumsum(counts)]).astype(np.int64)
        if np.any(np.diff(codes) < 0):
            order = np.argsort(codes, kind="stable")
            X, y = X[order], y[order]
            weights = None if weights is None else weights[order]
        table = cls(X, y, offsets, ids)
        return table if weights is None else table.with_rows(thin_rows(weights, offsets[:-1]))

    @property
    def n_users(self) -> int:
        return len(self.offsets) - 1

    @property
    def n_rows(self) -> int:
        return int(self.offsets[-1] - self.offsets[0])

    @property
    def n_features(self) -> int:
        return int(self.X.shape[1])

    @property
    def n_targets(self) -> int:
        return 1 if self.y.ndim == 1 else int(self.y.shape[1])

    @property
    def is_sparse(self) -> bool:
        return bool(sparse.issparse(self.X))

    @property
    def sizes(self) -> NDArray[np.int64]:
        return np.diff(self.offsets)

    def users(self, start: int, stop: int) -> UserTable:
        """Return users start to stop, without copying their rows where those are dense."""
        first, last = self.offsets[start], self.offsets[stop]
        return UserTable(
            self.X[first:last], self.y[first:last], self.offsets[start : stop + 1] - first, self.ids[start:stop]
        )

    def with_rows(self, kept: NDArray[np.bool_]) -> UserTable:
        """Return the same users with some of their rows, (rows,)."""
        ends = np.concatenate([[0], np.cumsum(kept)])
        return UserTable(self.X[kept], self.y[kept], ends[self.offsets - self.offsets[0]], self.ids)

    def blocks(self, max_rows: int | None = None) -> Iterator[UserTable]:
        """Yield blocks of consecutive whole users with at most max_rows rows each; a larger user is one block."""
        max_rows = max_rows or choose_block_rows(self.n_features, self.is_sparse)
        start = 0
        while start < self.n_users:
            stop = int(np.searchsorted(self.offsets, self.offsets[start] + max_rows, side="right")) - 1
            stop = min(max(stop, start + 1), self.n_users)
            yield self.users(start, stop)
            start = stop

    def positions_by_size(self, chosen: NDArray[np.bool_] | None = None) -> Iterator[tuple[NDArray[np.int64], int]]:
        """Yield the positions (users,) of users with the same number of rows, and that number, unless it is 0.

        `chosen` is a mask (users,) of the users who count; None for all.
        """
        sizes = self.sizes if chosen is None else np.where(chosen, self.sizes, 0)
        for size in np.unique(sizes):
            if size > 0:
                yield np.flatnonzero(sizes == size), int(size)

    def group(self, positions: NDArray[np.int64], size: int) -> tuple[Any, Floats]:
        """Return X and y of users who all have `size` rows.

        X is (users, size, features), an array, or `SparseRows` where the table is sparse. y is (users, size), or
        (users, size, q) with several targets.
        """
        rows = (self.offsets[positions][:, None] + np.arange(size)).ravel() if len(positions) < self.n_users else None
        X, y = (self.X, self.y) if rows is None else (self.X[rows], self.y[rows])
        targets = y.reshape(-1, size, *y.shape[1:])
        return (SparseRows(X, size) if self.is_sparse else X.reshape(-1, size, self.n_features)), targets

    def by_size(self) -> Iterator[tuple[Any, Floats]]:
        """Yield X and y of all users with rows, grouped by their number of rows; shapes are as in `group`."""
        for positions, size in self.positions_by_size():
            yield self.group(positions, size)


def factorize(groups: Sequence[Hashable] | NDArray[Any]) -> tuple[NDArray[Any], NDArray[np.int64]]:
    """Return distinct ids and the code of each row, (rows,).

    Ids are sorted where they sort, and in order of appearance where they do not.
    """
    values = _to_sortable(groups)
    if values is not None:
        ids, codes = np.unique(values, return_inverse=True)
        return ids, codes.astype(np.int64)
    seen: dict[Hashable, int] = {}
    for row, group in enumerate(groups):
        if group is None or type(group).__name__ in ("NAType", "NaTType") or group != group:
            raise InputError(f"groups has no user in row {row}; give every row one.")
        seen.setdefault(group, len(seen))
    names: list[Any] = list(seen)
    with contextlib.suppress(TypeError):
        names.sort()
    ids = np.empty(len(names), dtype=object)
    ids[:] = names
    return ids, find_users(ids, groups)


def find_users(ids: NDArray[Any], groups: Sequence[Hashable] | NDArray[Any]) -> NDArray[np.int64]:
    """Return the position in `ids` of each row's user, (rows,); -1 for a user who is not there."""
    values = _to_sortable(groups)
    if values is not None and values.dtype.kind == ids.dtype.kind:
        order = np.argsort(ids)
        spot = np.minimum(np.searchsorted(ids, values, sorter=order), len(ids) - 1)
        return np.where(ids[order[spot]] == values, order[spot], -1).astype(np.int64)
    position = {name: code for code, name in enumerate(ids.tolist())}
    listed = values.tolist() if values is not None else list(groups)
    return np.fromiter((position.get(group, -1) for group in listed), dtype=np.int64, count=len(listed))


def id_kind(ids: NDArray[Any]) -> str:
    """Return what ids are, in words: integers, decimal numbers or text."""
    kind: str = ids.dtype.kind
    return "integers" if kind in "iu" else "decimal numbers" if kind == "f" else "text"


def _to_sortable(groups: Sequence[Hashable] | NDArray[Any]) -> NDArray[Any] | None:
    """Return groups (rows,) as an array where all are integers or all are strings, else None.

    These are the cases worth a fast path.
    """
    if hasattr(groups, "__array__"):
        values = np.asarray(groups)
        if values.dtype.kind in "iuU":
            return values
    kinds = set(map(type, groups))
    if kinds == {str} or (bool not in kinds and all(issubclass(kind, int | np.integer) for kind in kinds)):
        values = np.asarray(list(groups))
        return values if values.dtype.kind in "iuU" else None
    return None


def _to_floats(values: Any) -> Floats:
    """Return values as an array of float32, if they are that already, or float64."""
    array = np.asarray(values)
    return array if array.dtype in (np.float32, np.float64) else array.astype(np.float64)


def plain(values: Any) -> Any:
    """Return Arrow columns as arrays, and anything else as it came: scikit-learn reads frames and tables itself."""
    return values.to_numpy() if isinstance(values, pa.ChunkedArray) else values
