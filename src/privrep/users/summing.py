"""Where users live. An engine answers one question, a bounded sum over its users, and lets nothing else out."""

from __future__ import annotations

import os
import sys
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import suppress
from functools import lru_cache
from itertools import chain, islice
from typing import Any, Protocol, TypeVar

import numpy as np
from numpy.typing import NDArray
from threadpoolctl import ThreadpoolController

from privrep.data.sparse import SparseRows
from privrep.data.table import UserTable
from privrep.errors import InputError
from privrep.privacy.bounds import (
    MAX_USERS,
    MAX_USERS_TIMES_BLOCKS,
    Bound,
    BoundedSum,
    Contributions,
    LossBound,
    Losses,
    clipped_sum,
)
from privrep.privacy.groups import Group
from privrep.privacy.sampling import FixedSample, Sample
from privrep.typing import Array
from privrep.users.batching import (
    BATCH_CALLS,
    SMALL_CALL,
    Call,
    calls,
    cut_calls,
    is_whole,
    seats_of,
    slots_of,
    whole_call,
)


class LocalStep(Protocol):
    """What users compute on their own rows, given public values: a frozen dataclass of public arrays and numbers.

    Called with a group of users of equal size, X of shape (users, rows, features) and y of shape (users, rows), or
    (users, rows, targets) where there are several; returns their contributions to each statistic. A step that makes one
    vector per user says how long it is in an attribute `vector_size`, and is called with fewer users where those are
    long. A step whose attribute `sparse` is true gets `SparseRows` where the users' rows are sparse, and says in
    `sparse_vector_size` if it makes a dense vector of each user's; any other step gets dense rows, of few users at a
    time. A step that says in an attribute `slots` how many rows of each user it takes is called with X of shape (users,
    slots, features), y of shape (users, slots) and `places`, the positions of these users in the population. Of a user
    with more rows it gets the first, and rows that are missing are zero, with -1 for y; so are all rows of a user with
    a number that is not finite. See `users.batching` for which users share a call: in calls about a sample there are
    seats that nobody takes, without rows and with -1 for a place, and what a step says of those is not counted. A step
    with slots whose attribute `whole` is true is called once, with all users who are asked; `places` are then their
    numbers in this batch, from 0. It returns terms of a function of the batch, kinds of contributions that say how many
    of them one user has `touched`. It may look at all rows, and fail on those of some: if it does, it must fail on some
    user's alone, who is then one without rows. Of all other steps, a user's contribution must be a function of that
    user's rows alone, to the last bit: see `local.least_squares`.
    """

    def __call__(self, X: Any, y: NDArray[Any]) -> Mapping[str, Contributions | Losses]: ...


class SlotStep(Protocol):
    """A local step whose calls have a fixed shape; see `LocalStep`."""

    @property
    def slots(self) -> int: ...

    def __call__(
        self, X: NDArray[Any], y: NDArray[Any], places: NDArray[np.int64]
    ) -> Mapping[str, Contributions | Losses]: ...


class Users(Protocol):
    """An engine: in memory, streamed from disk, on other machines. The same algorithm code runs on each."""

    @property
    def count(self) -> int:
        """How many users there are: public under replace-one-user, not to be used in a release otherwise."""
        ...

    @property
    def features(self) -> int:
        """How many features a row has: a public fact of the schema."""
        ...

    @property
    def targets(self) -> int:
        """How many targets a row has: a public fact of the schema."""
        ...

    @property
    def sparse(self) -> bool:
        """Whether steps that take them get `SparseRows`: a public fact of how the rows are held."""
        ...

    def bounded_sums(
        self,
        step: LocalStep | SlotStep,
        bounds: Mapping[str, Bound | LossBound],
        group: Group | None = None,
        sample: Sample | FixedSample | None = None,
    ) -> dict[str, BoundedSum]:
        """One pass over all users, or those of a group or a sample: every statistic of the step, clipped and summed."""
        ...


def default_workers() -> int:
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def sum_blocks(
    blocks: Iterable[UserTable],
    step: LocalStep | SlotStep,
    bounds: Mapping[str, Bound | LossBound],
    workers: int,
    group: Group | None = None,
    sample: Sample | FixedSample | None = None,
    count: int = 0,
) -> dict[str, BoundedSum]:
    """Clip and add up the contributions of all users of all blocks, or of those in the group, on several cores.

    The result does not depend on the number of workers: blocks are added in the order they come. A sample is of `count`
    users, and is for steps with slots alone: calls of others are cut by the rows of users who are not in it.
    """
    if any(is_whole(step) != (getattr(bound, "touched", None) is not None) for bound in bounds.values()):
        raise InputError("functions of a whole batch are asked for by bounds that say how much one user touched.")
    totals = {key: np.zeros(bound.size) for key, bound in bounds.items()}
    users = parts = 0
    for some, portions, sums in _block_sums(blocks, step, bounds, workers, group, sample, count):
        users += some
        parts += 1 + portions
        for key, total in sums.items():
            totals[key] += total
    if users > MAX_USERS or users * parts > MAX_USERS_TIMES_BLOCKS:
        raise InputError(f"one sum takes at most {MAX_USERS:,} users. Got {users:,} in {parts:,} parts instead.")
    return {key: BoundedSum(totals[key], bound) for key, bound in bounds.items()}


def _block_sums(
    blocks: Iterable[UserTable],
    step: Any,
    bounds: Mapping[str, Bound | LossBound],
    workers: int,
    group: Group | None,
    sample: Sample | FixedSample | None,
    count: int,
) -> Iterator[_BlockSums]:
    slots = slots_of(step)
    if slots is None:
        if sample is not None:
            raise InputError("a sample is asked by a step with slots. Give the step a public number of rows a user.")
        return map_blocks(lambda block: _sum_block(block, step, bounds, group), blocks, workers)
    if group is not None and sample is not None:
        raise InputError("a sample is of all users. Ask a group or a sample, not both.")
    if is_whole(step):
        if group is not None:
            raise InputError("a function of a whole batch is asked of everyone or of a sample, not of a group.")
        call = whole_call(blocks, slots, _places(sample, count))
        return iter([] if call is None else [_sum_whole(call, step, bounds)])
    first, blocks = _first(blocks)
    features, vector_size = 1 if first is None else first.n_features, getattr(step, "vector_size", 0)
    if isinstance(sample, FixedSample):
        least = SMALL_CALL // (slots * features)
        seats = min(
            seats_of(slots, features, vector_size), max(-(-sample.size // BATCH_CALLS), min(least, sample.size))
        )
        made = cut_calls(whole_call(blocks, slots, _places(sample, count)), seats)
    else:
        members, expected = (None, None) if sample is None else (sample.members(count), sample.rate * count)
        made = calls(blocks, slots, seats_of(slots, features, vector_size, expected), group, members)
    return map_blocks(lambda call: _sum_call(call, step, bounds), made, workers)


def _places(sample: Sample | FixedSample | None, count: int) -> NDArray[np.int64]:
    """Who is asked, in order."""
    if isinstance(sample, FixedSample):
        return sample.ordered(count)
    return np.arange(count) if sample is None else np.flatnonzero(sample.members(count))


def _first(blocks: Iterable[UserTable]) -> tuple[UserTable | None, Iterator[UserTable]]:
    """The first block, if there is one, and all of them."""
    rest = iter(blocks)
    some = list(islice(rest, 1))
    return (some[0] if some else None), chain(some, rest)


_BlockSums = tuple[int, int, dict[str, Array]]  # users, portions they were added up in, sums


Block = TypeVar("Block")
Result = TypeVar("Result")


def map_blocks(function: Callable[[Block], Result], blocks: Iterable[Block], workers: int) -> Iterator[Result]:
    """The function of each block, in order, on several cores; reads only a few blocks ahead of the result it yields."""
    _keep_freed_memory()
    if workers == 1:  # a thread of its own would cost more than a small block
        with _libraries(len(sys.modules)).limit(limits=1, user_api="blas"):
            yield from map(function, blocks)
        return
    waiting: deque[Future[Result]] = deque()
    with _libraries(len(sys.modules)).limit(limits=1, user_api="blas"), ThreadPoolExecutor(workers) as pool:
        for block in blocks:
            waiting.append(pool.submit(function, block))
            if len(waiting) > 2 * workers:
                yield waiting.popleft().result()
        while waiting:
            yield waiting.popleft().result()


@lru_cache(maxsize=1)
def _libraries(modules: int) -> ThreadpoolController:
    """Those with threads of their own. To look for them takes longer than a small pass, so it is done again only when
    another number of modules was imported."""
    return ThreadpoolController()


def _keep_freed_memory() -> None:
    """Let temporaries reuse memory that this process already has.

    A pass allocates and frees the same few megabytes over and over. By default glibc hands each back to the kernel and
    faults it in again, which costs as much as the arithmetic. It stops doing so for all sizes up to that of the largest
    mapping it has seen freed, at most 32 MB: this is such a mapping, never touched. Elsewhere it does nothing.
    """
    np.empty(31 << 20, np.uint8)


def _sum_block(
    block: UserTable, step: LocalStep, bounds: Mapping[str, Bound | LossBound], group: Group | None
) -> _BlockSums:
    sums = {key: np.zeros(bound.size) for key, bound in bounds.items()}
    chosen = np.ones(block.n_users, dtype=bool) if group is None else group.members(block.ids)
    portions = 0
    with np.errstate(all="ignore"):  # a user's overflow is that user's zero contribution, not a warning that names it
        takes_sparse = block.is_sparse and getattr(step, "sparse", False)
        vector_size = getattr(step, "sparse_vector_size" if takes_sparse else "vector_size", 0)
        for X, y in _portions(block, chosen, vector_size, takes_sparse):
            contributions = step(*finite_rows(X, y))
            portions += 1
            for key, bound in bounds.items():
                sums[key] += clipped_sum(contributions[key], bound, users=len(X))
    return int(chosen.sum()), portions, sums


def _sum_call(call: Call, step: SlotStep, bounds: Mapping[str, Bound | LossBound]) -> _BlockSums:
    with np.errstate(all="ignore"):
        call, taken = call.finite(), call.taken
        contributions = _asked(step, call)
        counted = None if taken.all() else taken
        sums = {key: clipped_sum(contributions[key], bound, counted, len(taken)) for key, bound in bounds.items()}
    return int(taken.sum()), 1, sums


def _sum_whole(call: Call, step: SlotStep, bounds: Mapping[str, Bound | LossBound]) -> _BlockSums:
    """The clipped terms of a function of the batch. Users on whose rows it fails alone are users without rows, at their
    seats, and nobody hears of it: other users' terms stay what they are.

    If it fails even then, it is an error, except where the function is one term that any user may change wholly: there
    zero is as good a value as any other. A step that fails if no row is there is broken, and always an error.
    """
    zeros = {key: np.zeros(bound.size) for key, bound in bounds.items()}
    if not len(call.places):
        return 0, 1, zeros
    with np.errstate(all="ignore"):
        call = Call(call.X, call.y, np.arange(len(call.places))).finite()
        with suppress(Exception):  # whose rows it was for stays unsaid: no error below has this one as its cause
            return len(call.places), 1, _whole_sums(call, step, bounds)
        failed = np.array([_fails(step, call.only(seat)) for seat in range(len(call.X))])
        _whole_sums(call.without(np.ones(len(call.places), bool)), step, bounds)
        try:
            return len(call.places), 1, _whole_sums(call.without(failed), step, bounds)
        except Exception:
            if any(getattr(bound, "touched", None) != 1 for bound in bounds.values()):
                raise InputError(
                    "a function of the batch fails, and on nobody's rows alone; nothing was released."
                ) from None
            return len(call.places), 1, zeros


def _whole_sums(call: Call, step: SlotStep, bounds: Mapping[str, Bound | LossBound]) -> dict[str, Array]:
    contributions = step(call.X, call.y, call.places)
    for kind in contributions.values():
        if getattr(kind, "slots", step.slots) != step.slots:
            raise InputError("terms of a batch were counted for another number of rows a user than the step has.")
    return {key: clipped_sum(contributions[key], bound) for key, bound in bounds.items()}


def _asked(step: SlotStep, call: Call) -> Mapping[str, Contributions | Losses]:
    """What the users of a call send. Those on whose rows the step fails are users without rows, and nobody hears of it.

    To find them it is asked about each alone, at its seat of a call of the same shape. A step that keeps something of
    its users is then asked more than once about some: what it keeps may change by that, what it sends stays bounded.
    """
    try:
        return step(call.X, call.y, call.places)
    except Exception:
        failed = np.array([_fails(step, call.only(seat)) for seat in range(len(call.X))])
        if not failed.any():
            raise
        good = call.without(failed)
        return step(good.X, good.y, good.places)


def _fails(step: SlotStep, call: Call) -> bool:
    try:
        step(call.X, call.y, call.places)
    except Exception:
        return True
    return False


def _portions(
    block: UserTable, chosen: NDArray[np.bool_], vector_size: int, takes_sparse: bool
) -> Iterator[tuple[Any, NDArray[Any]]]:
    """Groups of chosen users of equal size, cut so that their vectors of this size take 32 MB at most.

    Sparse rows are made dense for a step that does not take them, and then take 32 MB at most, too, unless those of
    one user are more. For a step that takes them they are cut by the size of the vectors it makes of them.
    """
    for positions, size in block.positions_by_size(chosen):
        X, y = block.group(positions, size)
        to_dense = block.is_sparse and not takes_sparse
        users = max((1 << 22) // max(vector_size, size * block.n_features if to_dense else 1, 1), 1)
        for start in range(0, len(X), users):
            part = X[start : start + users]
            yield part.dense() if to_dense else part, y[start : start + users]


def finite_rows(X: Any, y: NDArray[Any]) -> tuple[Any, NDArray[Any]]:
    """Rows in one layout of memory, so that rounding depends on the numbers alone; users with a number that is not
    finite become users whose rows are all zero."""
    if isinstance(X, SparseRows):
        return _finite_sparse_rows(X, y)
    X, y = np.ascontiguousarray(X), np.ascontiguousarray(y)
    with np.errstate(all="ignore"):
        if np.isfinite(X.sum()) and np.isfinite(y.sum()):
            return X, y
    bad = ~(np.isfinite(X).all(axis=(1, 2)) & _finite_targets(y))
    return np.where(bad[:, None, None], 0, X), _zeroed(y, bad)


def _finite_sparse_rows(X: SparseRows, y: NDArray[Any]) -> tuple[SparseRows, NDArray[Any]]:
    y = np.ascontiguousarray(y)
    bad = ~(X.finite() & _finite_targets(y))
    return (X.without(bad), _zeroed(y, bad)) if bad.any() else (X, y)


def _finite_targets(y: NDArray[Any]) -> NDArray[np.bool_]:
    return np.asarray(np.isfinite(y).all(axis=tuple(range(1, y.ndim))))


def _zeroed(y: NDArray[Any], bad: NDArray[np.bool_]) -> NDArray[Any]:
    return np.where(bad.reshape(-1, *[1] * (y.ndim - 1)), 0, y)
