"""Users in calls of fixed shape: every user has the same number of rows, a public number.

Formal guarantee. Under replace-one-user nobody's rows change the shape of a call. Nor do they change the call or the
batch row of anyone else.
* Without a sample, users take batch rows one after the other. So these follow from who is asked: all users, or those
  whose ids put them in a group.
* With a sample, whose members are secret, a user's batch row is its position in the population modulo the size of a
  batch. Batches always have all their rows, and one that nobody takes is empty.
* So whether a user is in the sample may move others to another call of the same shape, but never to another batch row.
  Their contributions stay the same to the last bit, if a row of a product of fixed shape depends on that row and its
  position alone.
* Batches of a fixed size come in a random order, and a user's number in it is its batch row. Calls are cut from that
  order, always at the same numbers, and the last one has empty rows. `privacy.batches` compares batches in which one
  batch row has another user. All others keep call, row and shape, and contribute the same to the last bit.

A step of the whole batch gets it as one call, in that order. Where the batch is everyone or a Poisson sample, it comes
by position. The step may return any function of the batch: its terms are clipped, not users.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from numpy.typing import NDArray

from privrep.data.table import UserTable
from privrep.errors import InputError
from privrep.privacy.groups import Group
from privrep.privacy.protocol import ABSENT, EVERYONE, Everyone, UserBatch, positions_of

NUMBERS = 1 << 23  # of the rows of one call
VECTOR_NUMBERS = 1 << 22  # of the vectors that a step makes of one call
LOAD = 16  # calls of a sample, roughly: with many, batch rows are taken evenly, and few stay empty
BATCH_CALLS = 4  # calls of a batch of fixed size, or more: some for every core
SMALL_CALL = 1 << 21  # numbers that are not worth cutting up
WAITING = 8  # calls of a sample that wait for their rows to be taken


def find_taken_rows(batch: UserBatch) -> NDArray[np.bool_]:
    """Return a mask (batch rows,) of the rows of a padded batch that a user takes."""
    return positions_of(batch) != ABSENT


def clear_non_finite(batch: UserBatch) -> UserBatch:
    """Return a padded batch in which users with a number that is not finite are users without rows."""
    with np.errstate(all="ignore"):
        if np.isfinite(batch.X.sum()) and np.isfinite(batch.y.sum()):
            return batch
    return clear_users(batch, ~(np.isfinite(batch.X).all(axis=(1, 2)) & np.isfinite(batch.y).all(axis=1)))


def clear_users(batch: UserBatch, bad: NDArray[np.bool_]) -> UserBatch:
    """Return the same padded batch with the rows of the users in the mask `bad`, (batch rows,), absent."""
    X, y = np.where(bad[:, None, None], 0, batch.X), np.where(bad[:, None], ABSENT, batch.y)
    return UserBatch(X.astype(batch.X.dtype, copy=False), y.astype(batch.y.dtype, copy=False), batch.positions)


def keep_user(batch: UserBatch, row: int) -> UserBatch:
    """Return the same padded batch with the rows of the user of this batch row alone."""
    return clear_users(batch, np.arange(len(batch.X)) != row)


def choose_batch_size(rows_per_user: int, features: int, floats_per_user: int, expected: float | None = None) -> int:
    """Return how many users one call of a step takes, at least 1: as many as fit into two limits of memory.

    The rows of all of them have at most NUMBERS numbers, and their vectors at most VECTOR_NUMBERS.

    Args:
        rows_per_user: rows of each user in a call.
        features: numbers of a row.
        floats_per_user: numbers that a step holds of each user.
        expected: number of users in a sample, on average; a call has places for at most this over LOAD.
    """
    size = min(NUMBERS // max(rows_per_user * features, 1), VECTOR_NUMBERS // max(floats_per_user, 1))
    return max(size if expected is None else min(size, int(expected / LOAD)), 1)


def pad_batches(
    blocks: Iterable[UserTable],
    rows_per_user: int,
    size: int,
    among: Everyone | Group | NDArray[np.bool_] = EVERYONE,
) -> Iterator[UserBatch]:
    """Yield the calls of the users of these blocks who are asked.

    Args:
        blocks: of users, in the order of the population.
        rows_per_user: rows of each user in a call.
        size: users of a call.
        among: everyone, a group, or (users,) a mask of the members of a sample.
    """
    members = among if isinstance(among, np.ndarray) else None
    under_way: list[_UnderWay] = []
    start = asked = 0
    for block in blocks:
        _check_dense(block)
        chosen = among.members(block.ids) if isinstance(among, Group) else np.ones(block.n_users, bool)
        if members is not None:
            chosen = members[start : start + block.n_users]
        for user in np.flatnonzero(chosen).tolist():
            row = (asked if members is None else start + user) % size
            one = next((one for one in under_way if row not in one.taken), None)
            if one is None:
                one = _UnderWay(_make_empty(block, rows_per_user, size))
                under_way.append(one)
            one.take(row, user)
            asked += 1
            if len(one.taken) == size:
                under_way = [other for other in under_way if other is not one]
                yield one.fill(block, start)
            elif len(under_way) > WAITING:
                yield under_way.pop(0).fill(block, start)
        for one in under_way:
            one.fill(block, start)
        start += block.n_users
    for one in under_way:
        some = size if members is not None else len(one.taken)
        yield UserBatch(one.batch.X[:some], one.batch.y[:some], positions_of(one.batch)[:some])


@dataclass
class _UnderWay:
    """Batch whose rows users are taking. Users of the block at hand bring their rows all at once."""

    batch: UserBatch
    taken: set[int] = field(default_factory=set)
    rows: list[int] = field(default_factory=list)  # of the batch, taken by users of the block at hand
    users: list[int] = field(default_factory=list)

    def take(self, row: int, user: int) -> None:
        """Let the user at this position of the block at hand take a batch row."""
        self.taken.add(row)
        self.rows.append(row)
        self.users.append(user)

    def fill(self, block: UserTable, start: int) -> UserBatch:
        """Copy the rows of the users of the block at hand into the batch, and return it.

        `start` is the position of the block's first user in the population.
        """
        if self.rows:
            users = np.array(self.users)
            self.batch.X[self.rows], self.batch.y[self.rows] = _take_first_rows(block, users, len(self.batch.X[0]))
            positions_of(self.batch)[self.rows] = start + users
            self.rows, self.users = [], []
        return self.batch


def gather_batch(blocks: Iterable[UserTable], rows_per_user: int, positions: NDArray[np.int64]) -> UserBatch | None:
    """Return the users at these positions as one call, in this order; None if there are no blocks.

    Args:
        blocks: of users, in the order of the population.
        rows_per_user: rows of each user in a call.
        positions: (users asked,), in the population.
    """
    batch, start = None, 0
    for block in blocks:
        _check_dense(block)
        inside = (positions >= start) & (positions < start + block.n_users)
        if inside.all():
            return UserBatch(*_take_first_rows(block, positions - start, rows_per_user), positions)
        batch = _make_empty(block, rows_per_user, len(positions)) if batch is None else batch
        batch.X[inside], batch.y[inside] = _take_first_rows(block, positions[inside] - start, rows_per_user)
        positions_of(batch)[inside] = positions[inside]
        start += block.n_users
    return batch


def cut_batches(batch: UserBatch | None, size: int) -> Iterator[UserBatch]:
    """Yield the same users in calls of `size` batch rows, the last of them padded with empty ones."""
    for first in range(0, len(batch) if batch is not None else 0, size):
        assert batch is not None
        X, y, positions = (part[first : first + size] for part in (batch.X, batch.y, positions_of(batch)))
        if missing := size - len(positions):
            X = np.concatenate([X, np.zeros((missing, *X.shape[1:]), X.dtype)])
            y = np.concatenate([y, np.full((missing, *y.shape[1:]), ABSENT, y.dtype)])
            positions = np.concatenate([positions, np.full(missing, ABSENT)])
        yield UserBatch(X, y, positions)


def _make_empty(block: UserTable, rows_per_user: int, size: int) -> UserBatch:
    """Return a batch of `size` rows that nobody takes, with features and types of the block."""
    X = np.zeros((size, rows_per_user, block.n_features), block.X.dtype)
    return UserBatch(X, np.full((size, rows_per_user), ABSENT, block.y.dtype), np.full(size, ABSENT, np.int64))


def _take_first_rows(
    block: UserTable, users: NDArray[np.int64], rows_per_user: int
) -> tuple[NDArray[Any], NDArray[Any]]:
    """Return the first rows of users, (users, rows, features), and labels; absent ones are zero and ABSENT.

    Args:
        block: holds the users.
        users: (users,), positions in the block.
        rows_per_user: most rows of a user that are taken.
    """
    first, row = block.offsets[users][:, None], np.arange(rows_per_user)
    there = row < (block.offsets[users + 1][:, None] - first)
    if not there.any():
        empty = _make_empty(block, rows_per_user, len(users))
        return empty.X, empty.y
    rows = np.where(there, first + row, block.offsets[0])
    X, y = block.X[rows], block.y[rows]
    if not there.all():
        X[~there], y[~there] = 0, ABSENT
    return X, y


def _check_dense(block: UserTable) -> None:
    """Raise InputError unless rows are dense and have one target."""
    if block.is_sparse or block.n_targets > 1:
        raise InputError("a step with slots takes dense rows and one target. Give it an array of features and labels.")
