"""Users in calls of fixed shape: every user has the same number of row slots, a public number.

Formal guarantee. Under replace-one-user nobody's rows change the shape of a call, nor in which call or at which seat
anyone else sits. Without a sample users are seated one after the other, so that seats follow from who is asked: all
users, or those whose ids put them in a group. With a sample, whose members are secret, a user's seat is its place in
the population modulo the number of seats, calls always have all their seats, and a seat that nobody takes is empty. So
whether a user is in the sample may move others to another call of the same shape, but never to another seat: what they
contribute stays the same to the last bit, if a row of a product of fixed shape depends on that row and its place alone.

Batches of a fixed size come in a random order, and a user's number in it is its seat: calls are cut from that order,
always at the same numbers, and the last one has empty seats. What `privacy.batches` compares are batches in which one
seat has another user, so that all others keep call, seat and shape, and contribute the same to the last bit.

A step that is `whole` gets the batch as one call, in that order, or by place where the batch is everyone or a Poisson
sample. What it returns may be any function of the batch: its terms are clipped, not users.
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

ABSENT = -1  # the label of a row that is not there, and the place of a seat that nobody takes
NUMBERS = 1 << 23  # of the rows of one call
VECTOR_NUMBERS = 1 << 22  # of the vectors that a step makes of one call
LOAD = 16  # calls of a sample, roughly: with many, seats are taken evenly, and few stay empty
BATCH_CALLS = 4  # calls of a batch of fixed size, or more: some for every core
SMALL_CALL = 1 << 21  # numbers that are not worth cutting up
WAITING = 8  # calls of a sample that wait for their seats to be taken


@dataclass(frozen=True)
class Call:
    """Rows of several users: X is (seats, slots, features), y and `places` say -1 where there is no row, no user."""

    X: NDArray[Any]
    y: NDArray[Any]
    places: NDArray[np.int64]

    @property
    def taken(self) -> NDArray[np.bool_]:
        return self.places != ABSENT

    def finite(self) -> Call:
        """Users with a number that is not finite become users without rows."""
        with np.errstate(all="ignore"):
            if np.isfinite(self.X.sum()) and np.isfinite(self.y.sum()):
                return self
        return self.without(~(np.isfinite(self.X).all(axis=(1, 2)) & np.isfinite(self.y).all(axis=1)))

    def without(self, bad: NDArray[np.bool_]) -> Call:
        """The same call with these users' rows absent."""
        X, y = np.where(bad[:, None, None], 0, self.X), np.where(bad[:, None], ABSENT, self.y)
        return Call(X.astype(self.X.dtype, copy=False), y.astype(self.y.dtype, copy=False), self.places)

    def only(self, seat: int) -> Call:
        """The same call with the rows of this seat's user alone."""
        return self.without(np.arange(len(self.X)) != seat)


def slots_of(step: object) -> int | None:
    """How many rows of each user a step is given, if that is fixed."""
    slots = getattr(step, "slots", None)
    if slots is not None and (isinstance(slots, bool) or not isinstance(slots, int | np.integer) or slots < 1):
        raise InputError(f"a step has a whole number of slots, 1 or more. Got {slots!r} instead.")
    return None if slots is None else int(slots)


def seats_of(slots: int, features: int, vector_size: int, expected: float | None = None) -> int:
    """Users of one call: as many as fit, and of a sample of this expected size no more than fill their seats well."""
    seats = min(NUMBERS // max(slots * features, 1), VECTOR_NUMBERS // max(vector_size, 1))
    return max(seats if expected is None else min(seats, int(expected / LOAD)), 1)


def is_whole(step: object) -> bool:
    """Whether a step is a function of the whole batch, to be called once; it then has slots."""
    whole = bool(getattr(step, "whole", False))
    if whole and slots_of(step) is None:
        raise InputError("a step of a whole batch says in `slots` how many rows of each user it takes.")
    return whole


def calls(
    blocks: Iterable[UserTable], slots: int, seats: int, group: Group | None = None, members: Any = None
) -> Iterator[Call]:
    """The calls of all users of these blocks, of those in the group, or of the `members` of a sample (a mask)."""
    under_way: list[_UnderWay] = []
    start = asked = 0
    for block in blocks:
        _check_dense(block)
        chosen = np.ones(block.n_users, bool) if group is None else group.members(block.ids)
        if members is not None:
            chosen = members[start : start + block.n_users]
        for user in np.flatnonzero(chosen).tolist():
            seat = (asked if members is None else start + user) % seats
            one = next((one for one in under_way if seat not in one.taken), None)
            if one is None:
                one = _UnderWay(_empty(block, slots, seats))
                under_way.append(one)
            one.seat(seat, user)
            asked += 1
            if len(one.taken) == seats:
                under_way = [other for other in under_way if other is not one]
                yield one.filled(block, start)
            elif len(under_way) > WAITING:
                yield under_way.pop(0).filled(block, start)
        for one in under_way:
            one.filled(block, start)
        start += block.n_users
    for one in under_way:
        some = seats if members is not None else len(one.taken)
        yield Call(one.call.X[:some], one.call.y[:some], one.call.places[:some])


@dataclass
class _UnderWay:
    """A call that users are being seated at; those of the block at hand bring their rows all at once."""

    call: Call
    taken: set[int] = field(default_factory=set)
    seats: list[int] = field(default_factory=list)  # of the block at hand
    users: list[int] = field(default_factory=list)

    def seat(self, seat: int, user: int) -> None:
        self.taken.add(seat)
        self.seats.append(seat)
        self.users.append(user)

    def filled(self, block: UserTable, start: int) -> Call:
        if self.seats:
            users = np.array(self.users)
            self.call.X[self.seats], self.call.y[self.seats] = _rows(block, users, len(self.call.X[0]))
            self.call.places[self.seats] = start + users
            self.seats, self.users = [], []
        return self.call


def whole_call(blocks: Iterable[UserTable], slots: int, places: NDArray[np.int64]) -> Call | None:
    """The users at these places as one call, in this order; none if there are no blocks."""
    call, start = None, 0
    for block in blocks:
        _check_dense(block)
        inside = (places >= start) & (places < start + block.n_users)
        if inside.all():
            return Call(*_rows(block, places - start, slots), places)
        call = call or _empty(block, slots, len(places))
        call.X[inside], call.y[inside] = _rows(block, places[inside] - start, slots)
        call.places[inside] = places[inside]
        start += block.n_users
    return call


def cut_calls(call: Call | None, seats: int) -> Iterator[Call]:
    """The same users in calls of so many seats, the last of them padded with empty ones."""
    for first in range(0, len(call.places) if call is not None else 0, seats):
        assert call is not None
        X, y, places = (part[first : first + seats] for part in (call.X, call.y, call.places))
        if missing := seats - len(places):
            X = np.concatenate([X, np.zeros((missing, *X.shape[1:]), X.dtype)])
            y = np.concatenate([y, np.full((missing, *y.shape[1:]), ABSENT, y.dtype)])
            places = np.concatenate([places, np.full(missing, ABSENT)])
        yield Call(X, y, places)


def _empty(block: UserTable, slots: int, seats: int) -> Call:
    X = np.zeros((seats, slots, block.n_features), block.X.dtype)
    return Call(X, np.full((seats, slots), ABSENT, block.y.dtype), np.full(seats, ABSENT, np.int64))


def _rows(block: UserTable, users: NDArray[np.int64], slots: int) -> tuple[NDArray[Any], NDArray[Any]]:
    """The first rows of these users, (users, slots, features), and their labels; absent ones are zero and ABSENT."""
    first, slot = block.offsets[users][:, None], np.arange(slots)
    there = slot < (block.offsets[users + 1][:, None] - first)
    if not there.any():
        empty = _empty(block, slots, len(users))
        return empty.X, empty.y
    rows = np.where(there, first + slot, block.offsets[0])
    X, y = block.X[rows], block.y[rows]
    if not there.all():
        X[~there], y[~there] = 0, ABSENT
    return X, y


def _check_dense(block: UserTable) -> None:
    if block.is_sparse or block.n_targets > 1:
        raise InputError("a step with slots takes dense rows and one target. Give it an array of features and labels.")
