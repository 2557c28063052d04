"""The answer of an engine to its one question: call a step with users, clip each contribution, and add up."""

from __future__ import annotations

import sys
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import suppress
from itertools import chain, islice
from typing import Any, TypeVar

import numpy as np
from numpy.typing import NDArray

from privrep.data.missing import fill_missing
from privrep.data.sparse import SparseRows
from privrep.data.table import UserTable
from privrep.errors import InputError
from privrep.local.cores import find_libraries
from privrep.privacy.bounds import (
    Bound,
    BoundedSum,
    Contributions,
    LossBound,
    Losses,
    clip_and_sum,
)
from privrep.privacy.grid import Total
from privrep.privacy.groups import Group
from privrep.privacy.protocol import EVERYONE, Audience, Everyone, Step, StepSpec, UserBatch, check_audience
from privrep.privacy.sampling import FixedSample, Sample
from privrep.typing import Array, Integers
from privrep.users.batching import (
    BATCH_CALLS,
    SMALL_CALL,
    choose_batch_size,
    clear_non_finite,
    clear_users,
    cut_batches,
    find_taken_rows,
    gather_batch,
    keep_user,
    pad_batches,
)
from privrep.users.performance import Performance


def sum_blocks(
    blocks: Iterable[UserTable],
    step: Step,
    bounds: Mapping[str, Bound | LossBound],
    performance: Performance,
    among: Audience = EVERYONE,
    count: int = 0,
) -> dict[str, BoundedSum]:
    """Clip and add up the contributions of the users of all blocks who are asked, on several cores.

    The result does not depend on `performance`, nor on the order of users, nor on how they are cut into blocks.

    Args:
        blocks: of users, in the order of the population.
        step: what users compute.
        bounds: of each statistic.
        performance: threads of the pass.
        among: who is asked. A sample is for padded steps alone: other calls are cut by rows of users not in it.
        count: of users, for a sample of them and for a step of the whole batch.
    """
    check_audience(among)
    batch_level = step.spec.batch_level
    if any(batch_level != (bound.terms_per_user is not None) for bound in bounds.values()):
        raise InputError("functions of a whole batch are asked for by bounds that say how much one user touched.")
    totals = {key: Total(bound.size) for key, bound in bounds.items()}
    for users, sums in _sum_each_block(blocks, step, bounds, performance, among, count):
        for key, total in sums.items():
            totals[key].add(total, users)
    return {key: BoundedSum(totals[key].integers, bound) for key, bound in bounds.items()}


def _sum_each_block(
    blocks: Iterable[UserTable],
    step: Step,
    bounds: Mapping[str, Bound | LossBound],
    performance: Performance,
    among: Audience,
    count: int,
) -> Iterator[_BlockSums]:
    """Yield the sums of each call, or block of calls, of the users who are asked; arguments are as in `sum_blocks`."""
    spec = step.spec
    if spec.layout == "by_size":
        if isinstance(among, Sample | FixedSample):
            raise InputError("a sample is asked by a step with slots. Give the step a public number of rows a user.")
        return map_blocks(lambda block: _sum_block(block, step, spec, bounds, among), blocks, performance)
    rows = spec.padded_rows
    if spec.batch_level:
        if isinstance(among, Group):
            raise InputError("a function of a whole batch is asked of everyone or of a sample, not of a group.")
        batch = gather_batch(blocks, rows, _list_positions(among, count))
        return iter([] if batch is None else [_sum_whole(batch, step, bounds)])
    first, blocks = _peek(blocks)
    features, floats = 1 if first is None else first.n_features, spec.floats_per_user
    if isinstance(among, FixedSample):
        least = SMALL_CALL // (rows * features)
        size = min(
            choose_batch_size(rows, features, floats), max(-(-among.size // BATCH_CALLS), min(least, among.size))
        )
        made = cut_batches(gather_batch(blocks, rows, _list_positions(among, count)), size)
    elif isinstance(among, Sample):
        size = choose_batch_size(rows, features, floats, among.rate * count)
        made = pad_batches(blocks, rows, size, among.members(count))
    else:
        made = pad_batches(blocks, rows, choose_batch_size(rows, features, floats), among)
    return map_blocks(lambda batch: _sum_batch(batch, step, bounds), made, performance)


def _list_positions(among: Everyone | Sample | FixedSample, count: int) -> NDArray[np.int64]:
    """Return the positions of the users who are asked, in order."""
    if isinstance(among, FixedSample):
        return among.draw_order(count)
    return np.flatnonzero(among.members(count)) if isinstance(among, Sample) else np.arange(count)


def _peek(blocks: Iterable[UserTable]) -> tuple[UserTable | None, Iterator[UserTable]]:
    """Return the first block, None if there is none, and an iterator over all of them."""
    rest = iter(blocks)
    some = list(islice(rest, 1))
    return (some[0] if some else None), chain(some, rest)


_BlockSums = tuple[int, dict[str, Integers]]  # users, sums


Block = TypeVar("Block")
Result = TypeVar("Result")


def map_blocks(
    function: Callable[[Block], Result], blocks: Iterable[Block], performance: Performance
) -> Iterator[Result]:
    """Yield the function of each block, in order, on several cores; read only a few blocks ahead.

    Args:
        function: of a block.
        blocks: in order.
        performance: threads that call the function.
    """
    workers = performance.workers
    _keep_freed_memory()
    if workers == 1:  # a thread of its own would cost more than a small block
        with find_libraries(len(sys.modules)).limit(limits=1, user_api="blas"):
            yield from map(function, blocks)
        return
    waiting: deque[Future[Result]] = deque()
    with find_libraries(len(sys.modules)).limit(limits=1, user_api="blas"), ThreadPoolExecutor(workers) as pool:
        for block in blocks:
            waiting.append(pool.submit(function, block))
            if len(waiting) > 2 * workers:
                yield waiting.popleft().result()
        while waiting:
            yield waiting.popleft().result()


def _keep_freed_memory() -> None:
    """Let temporaries reuse memory that this process already has.

    A pass allocates and frees the same few megabytes over and over. By default glibc hands each back to the kernel and
    faults it in again, which costs as much as the arithmetic. It stops doing so up to the size of the largest mapping
    it has seen freed, at most 32 MB. This is such a mapping, never touched. Elsewhere it does nothing.
    """
    np.empty(31 << 20, np.uint8)


def _sum_block(
    block: UserTable,
    step: Step,
    spec: StepSpec,
    bounds: Mapping[str, Bound | LossBound],
    among: Everyone | Group,
) -> _BlockSums:
    """Return the clipped sums of a block's users in calls by size."""
    sums = {key: np.zeros(bound.size, np.int64) for key, bound in bounds.items()}
    chosen = among.members(block.ids) if isinstance(among, Group) else np.ones(block.n_users, dtype=bool)
    with np.errstate(all="ignore"):  # a user's overflow is that user's zero contribution, not a warning that names it
        takes_sparse = block.is_sparse and spec.accepts_sparse
        floats = spec.floats_per_sparse_user if takes_sparse else spec.floats_per_user
        for X, y in _cut_portions(block, chosen, floats, takes_sparse):
            contributions = step(UserBatch(*clean_rows(X, y, spec.fill)))
            for key, bound in bounds.items():
                sums[key] += clip_and_sum(contributions[key], bound, users=len(X))
    return int(chosen.sum()), sums


def _sum_batch(batch: UserBatch, step: Step, bounds: Mapping[str, Bound | LossBound]) -> _BlockSums:
    """Return the clipped sums of the users of a padded batch."""
    with np.errstate(all="ignore"):
        batch, taken = clear_non_finite(batch), find_taken_rows(batch)
        contributions = _ask_users(step, batch)
        counted = None if taken.all() else taken
        sums = {key: clip_and_sum(contributions[key], bound, counted, len(taken)) for key, bound in bounds.items()}
    return int(taken.sum()), sums


def _sum_whole(batch: UserBatch, step: Step, bounds: Mapping[str, Bound | LossBound]) -> _BlockSums:
    """Return the clipped terms of a function of the batch.

    Users on whose rows alone it fails become users without rows, at their batch rows, and nobody hears of it. Other
    users' terms stay as they are. If it fails even then, that is an error, except where the function is one term that
    any user may change wholly. There zero is as good a value as any other. A step that fails if no row is there is
    broken, and always an error.
    """
    zeros = {key: np.zeros(bound.size, np.int64) for key, bound in bounds.items()}
    users = len(batch)
    if not users:
        return 0, zeros
    with np.errstate(all="ignore"):
        batch = clear_non_finite(UserBatch(batch.X, batch.y, np.arange(users)))
        with suppress(Exception):  # whose rows it was for stays unsaid: no error below has this one as its cause
            return users, _sum_terms(batch, step, bounds)
        failed = np.array([_fails(step, keep_user(batch, row)) for row in range(users)])
        _sum_terms(clear_users(batch, np.ones(users, bool)), step, bounds)
        try:
            return users, _sum_terms(clear_users(batch, failed), step, bounds)
        except Exception:
            if any(bound.terms_per_user != 1 for bound in bounds.values()):
                raise InputError(
                    "a function of the batch fails, and on nobody's rows alone; nothing was released."
                ) from None
            return users, zeros


def _sum_terms(batch: UserBatch, step: Step, bounds: Mapping[str, Bound | LossBound]) -> dict[str, Integers]:
    """Return the clipped terms of one call. Raise InputError if they were counted for another number of rows a user."""
    contributions, rows = step(batch), step.spec.padded_rows
    for kind in contributions.values():
        if kind.rows_per_user is not None and kind.rows_per_user != rows:
            raise InputError("terms of a batch were counted for another number of rows a user than the step has.")
    return {key: clip_and_sum(contributions[key], bound) for key, bound in bounds.items()}


def _ask_users(step: Step, batch: UserBatch) -> Mapping[str, Contributions | Losses]:
    """Return the contributions of the users of a call. Users on whose rows the step fails are users without rows.

    Nobody hears of such users. To find them the step is asked about each alone, at its row of a batch of the same
    shape. A step that keeps something of its users is then asked more than once about some. That may change what it
    keeps. Its contributions stay bounded.
    """
    try:
        return step(batch)
    except Exception:
        failed = np.array([_fails(step, keep_user(batch, row)) for row in range(len(batch))])
        if not failed.any():
            raise
        return step(clear_users(batch, failed))


def _fails(step: Step, batch: UserBatch) -> bool:
    """Return whether the step raises for this batch."""
    try:
        step(batch)
    except Exception:
        return True
    return False


def _cut_portions(
    block: UserTable, chosen: NDArray[np.bool_], floats: int, takes_sparse: bool
) -> Iterator[tuple[Any, NDArray[Any]]]:
    """Yield groups of chosen users of equal size, cut so that `floats` numbers of each take 32 MB at most.

    Sparse rows are made dense for a step that does not take them. They, too, then take 32 MB at most, unless one user's
    take more. For a step that takes them they are cut by the size of the vectors it makes of them.

    Args:
        block: of users.
        chosen: (users,), a mask.
        floats: numbers that the step holds of a user.
        takes_sparse: whether the step gets sparse rows as they are.
    """
    for positions, size in block.positions_by_size(chosen):
        X, y = block.group(positions, size)
        to_dense = block.is_sparse and not takes_sparse
        users = max((1 << 22) // max(floats, size * block.n_features if to_dense else 1, 1), 1)
        for start in range(0, len(X), users):
            part = X if users >= len(X) else X[start : start + users]  # a slice of sparse rows is a copy
            yield part.dense() if to_dense else part, y[start : start + users]


def clean_rows(X: Any, y: NDArray[Any], fill: float | Array = 0.0) -> tuple[Any, NDArray[Any]]:
    """Return rows and targets without missing values, and with zeros for users who have a number that is not finite.

    Rows are in one layout of memory, so that rounding depends on the numbers alone.

    Args:
        X: (users, m, d), or `SparseRows`. NaN is a missing value, to be filled.
        y: (users, m) or (users, m, q).
        fill: the value of a column for a user who has no value in it, a number or (d,); see `StepSpec.fill`.
    """
    if isinstance(X, SparseRows):
        return _clean_sparse_rows(fill_missing(X, fill), y)
    X, y = np.ascontiguousarray(X), np.ascontiguousarray(y)
    with np.errstate(all="ignore"):
        if np.isfinite(X.sum()) and np.isfinite(y.sum()):
            return X, y
        X = fill_missing(X, fill)
    fine = np.isfinite(X) | (np.isnan(X) & np.isnan(fill))
    bad = ~(fine.all(axis=(1, 2)) & _find_finite_targets(y))
    return np.where(bad[:, None, None], 0, X), _set_zero(y, bad)


def _clean_sparse_rows(X: SparseRows, y: NDArray[Any]) -> tuple[SparseRows, NDArray[Any]]:
    """Return sparse rows (users, m, d) and targets, with zeros for users who have a number that is not finite."""
    y = np.ascontiguousarray(y)
    bad = ~(X.find_finite() & _find_finite_targets(y))
    return (X.without(bad), _set_zero(y, bad)) if bad.any() else (X, y)


def _find_finite_targets(y: NDArray[Any]) -> NDArray[np.bool_]:
    """Return a mask (users,) of the users all of whose targets are finite."""
    return np.asarray(np.isfinite(y).all(axis=tuple(range(1, y.ndim))))


def _set_zero(y: NDArray[Any], bad: NDArray[np.bool_]) -> NDArray[Any]:
    """Return targets y, (users, m) or (users, m, q), with zeros for the users in the mask `bad`, (users,)."""
    return np.where(bad.reshape(-1, *[1] * (y.ndim - 1)), 0, y)
