"""Users in calls of fixed shape: every user has the same number of row slots, a public number.

Formal guarantee. Under replace-one-user nobody's rows change the shape of a call, nor in which call or at which seat
anyone else sits. Without a sample users are seated one after the other, so that seats follow from who is asked: all
users, or those whose ids put them in a group. With a sample, whose members are secret, a user's seat is its place in
the population modulo the number of seats, calls always have all their seats, and a seat that nobody takes is empty. So
whether a user is in the sample may move others to another call of the same shape, but never to another seat: what they
contribute stays the same to the last bit, if a row of a product of fixed shape depends on that row and its place alone.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from privrep.data.groups import Group
from privrep.data.user_table import UserTable
from privrep.errors import InputError

ABSENT = -1  # the label of a row that is not there, and the place of a seat that nobody takes
NUMBERS = 1 << 23  # of the rows of one call
VECTOR_NUMBERS = 1 << 22  # of the vectors that a step makes of one call
LOAD = 16  # calls of a sample, roughly: with many, seats are taken evenly, and few stay empty
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


def calls(
    blocks: Iterable[UserTable], slots: int, seats: int, group: Group | None = None, members: Any = None
) -> Iterator[Call]:
    """The calls of all users of these blocks, of those in the group, or of the `members` of a sample (a mask)."""
    under_way: list[Call] = []
    start = asked = 0
    for block in blocks:
        _check_dense(block)
        chosen = np.ones(block.n_users, bool) if group is None else group.members(block.ids)
        if members is not None:
            chosen = members[start : start + block.n_users]
        for user in np.flatnonzero(chosen).tolist():
            seat = (asked if members is None else start + user) % seats
            call = next((call for call in under_way if call.places[seat] == ABSENT), None)
            if call is None:
                call = _empty(block, slots, seats)
                under_way.append(call)
            _take(call, seat, block, user, start + user)
            asked += 1
            if call.taken.all():
                under_way = [other for other in under_way if other is not call]
                yield call
            elif len(under_way) > WAITING:
                yield under_way.pop(0)
        start += block.n_users
    for call in under_way:
        some = seats if members is not None else int(call.taken.sum())
        yield Call(call.X[:some], call.y[:some], call.places[:some])


def _empty(block: UserTable, slots: int, seats: int) -> Call:
    X = np.zeros((seats, slots, block.n_features), block.X.dtype)
    return Call(X, np.full((seats, slots), ABSENT, block.y.dtype), np.full(seats, ABSENT, np.int64))


def _take(call: Call, seat: int, block: UserTable, user: int, place: int) -> None:
    first, last = block.offsets[user], block.offsets[user + 1]
    rows = min(int(last - first), call.X.shape[1])
    call.X[seat, :rows], call.y[seat, :rows] = block.X[first : first + rows], block.y[first : first + rows]
    call.places[seat] = place


def _check_dense(block: UserTable) -> None:
    if block.is_sparse or block.n_targets > 1:
        raise InputError("a step with slots takes dense rows and one target. Give it an array of features and labels.")
