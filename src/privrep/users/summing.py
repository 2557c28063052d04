"""How an engine answers its one question: call a step with users, clip what each of them sends, and add it up."""

from __future__ import annotations

import sys
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import suppress
from functools import lru_cache
from itertools import chain, islice
from typing import Any, TypeVar

import numpy as np
from numpy.typing import NDArray
from threadpoolctl import ThreadpoolController

from privrep.data.missing import fill_missing
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
from privrep.privacy.protocol import EVERYONE, Audience, Everyone, Step, StepSpec, UserBatch, check_audience
from privrep.privacy.sampling import FixedSample, Sample
from privrep.typing import Array
from privrep.users.batching import (
    BATCH_CALLS,
    SMALL_CALL,
    batch_size,
    cut_batches,
    finite_batch,
    only_user,
    padded_batches,
    taken_rows,
    whole_batch,
    without_users,
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

    The result does not depend on `performance`: blocks are added in the order they come.

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
    totals = {key: np.zeros(bound.size) for key, bound in bounds.items()}
    users = parts = 0
    for some, portions, sums in _block_sums(blocks, step, bounds, performance, among, count):
        users += some
        parts += 1 + portions
        for key, total in sums.items():
            totals[key] += total
    if users > MAX_USERS or users * parts > MAX_USERS_TIMES_BLOCKS:
        raise InputError(f"one sum takes at most {MAX_USERS:,} users. Got {users:,} in {parts:,} parts instead.")
    return {key: BoundedSum(totals[key], bound) for key, bound in bounds.items()}


def _block_sums(
    blocks: Iterable[UserTable],
    step: Step,
    bounds: Mapping[str, Bound | LossBound],
    performance: Performance,
    among: Audience,
    count: int,
) -> Iterator[_BlockSums]:
    spec = step.spec
    if spec.layout == "by_size":
        if isinstance(among, Sample | FixedSample):
            raise InputError("a sample is asked by a step with slots. Give the step a public number of rows a user.")
        return map_blocks(lambda block: _sum_block(block, step, spec, bounds, among), blocks, performance)
    rows = spec.padded_rows
    if spec.batch_level:
        if isinstance(among, Group):
            raise InputError("a function of a whole batch is asked of everyone or of a sample, not of a group.")
        batch = whole_batch(blocks, rows, _positions(among, count))
        return iter([] if batch is None else [_sum_whole(batch, step, bounds)])
    first, blocks = _first(blocks)
    features, floats = 1 if first is None else first.n_features, spec.floats_per_user
    if isinstance(among, FixedSample):
        least = SMALL_CALL // (rows * features)
        size = min(batch_size(rows, features, floats), max(-(-among.size // BATCH_CALLS), min(least, among.size)))
        made = cut_batches(whole_batch(blocks, rows, _positions(among, count)), size)
    elif isinstance(among, Sample):
        size = batch_size(rows, features, floats, among.rate * count)
        made = padded_batches(blocks, rows, size, among.members(count))
    else:
        made = padded_batches(blocks, rows, batch_size(rows, features, floats), among)
    return map_blocks(lambda batch: _sum_batch(batch, step, bounds), made, performance)


def _positions(among: Everyone | Sample | FixedSample, count: int) -> NDArray[np.int64]:
    """Return who is asked, in order."""
    if isinstance(among, FixedSample):
        return among.ordered(count)
    return np.flatnonzero(among.members(count)) if isinstance(among, Sample) else np.arange(count)


def _first(blocks: Iterable[UserTable]) -> tuple[UserTable | None, Iterator[UserTable]]:
    """The first block, if there is one, and all of them."""
    rest = iter(blocks)
    some = list(islice(rest, 1))
    return (some[0] if some else None), chain(some, rest)


_BlockSums = tuple[int, int, dict[str, Array]]  # users, portions they were added up in, sums


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
    block: UserTable,
    step: Step,
    spec: StepSpec,
    bounds: Mapping[str, Bound | LossBound],
    among: Everyone | Group,
) -> _BlockSums:
    sums = {key: np.zeros(bound.size) for key, bound in bounds.items()}
    chosen = among.members(block.ids) if isinstance(among, Group) else np.ones(block.n_users, dtype=bool)
    portions = 0
    with np.errstate(all="ignore"):  # a user's overflow is that user's zero contribution, not a warning that names it
        takes_sparse = block.is_sparse and spec.accepts_sparse
        floats = spec.floats_per_sparse_user if takes_sparse else spec.floats_per_user
        for X, y in _portions(block, chosen, floats, takes_sparse):
            contributions = step(UserBatch(*finite_rows(X, y, spec.fill)))
            portions += 1
            for key, bound in bounds.items():
                sums[key] += clipped_sum(contributions[key], bound, users=len(X))
    return int(chosen.sum()), portions, sums


def _sum_batch(batch: UserBatch, step: Step, bounds: Mapping[str, Bound | LossBound]) -> _BlockSums:
    with np.errstate(all="ignore"):
        batch, taken = finite_batch(batch), taken_rows(batch)
        contributions = _asked(step, batch)
        counted = None if taken.all() else taken
        sums = {key: clipped_sum(contributions[key], bound, counted, len(taken)) for key, bound in bounds.items()}
    return int(taken.sum()), 1, sums


def _sum_whole(batch: UserBatch, step: Step, bounds: Mapping[str, Bound | LossBound]) -> _BlockSums:
    """The clipped terms of a function of the batch. Users on whose rows it fails alone are users without rows, at their
    batch rows, and nobody hears of it: other users' terms stay what they are.

    If it fails even then, it is an error, except where the function is one term that any user may change wholly: there
    zero is as good a value as any other. A step that fails if no row is there is broken, and always an error.
    """
    zeros = {key: np.zeros(bound.size) for key, bound in bounds.items()}
    users = len(batch)
    if not users:
        return 0, 1, zeros
    with np.errstate(all="ignore"):
        batch = finite_batch(UserBatch(batch.X, batch.y, np.arange(users)))
        with suppress(Exception):  # whose rows it was for stays unsaid: no error below has this one as its cause
            return users, 1, _whole_sums(batch, step, bounds)
        failed = np.array([_fails(step, only_user(batch, row)) for row in range(users)])
        _whole_sums(without_users(batch, np.ones(users, bool)), step, bounds)
        try:
            return users, 1, _whole_sums(without_users(batch, failed), step, bounds)
        except Exception:
            if any(bound.terms_per_user != 1 for bound in bounds.values()):
                raise InputError(
                    "a function of the batch fails, and on nobody's rows alone; nothing was released."
                ) from None
            return users, 1, zeros


def _whole_sums(batch: UserBatch, step: Step, bounds: Mapping[str, Bound | LossBound]) -> dict[str, Array]:
    contributions, rows = step(batch), step.spec.padded_rows
    for kind in contributions.values():
        if kind.rows_per_user is not None and kind.rows_per_user != rows:
            raise InputError("terms of a batch were counted for another number of rows a user than the step has.")
    return {key: clipped_sum(contributions[key], bound) for key, bound in bounds.items()}


def _asked(step: Step, batch: UserBatch) -> Mapping[str, Contributions | Losses]:
    """What the users of a call send. Those on whose rows the step fails are users without rows, and nobody hears of it.

    To find them it is asked about each alone, at its row of a batch of the same shape. A step that keeps something of
    its users is then asked more than once about some: what it keeps may change by that, what it sends stays bounded.
    """
    try:
        return step(batch)
    except Exception:
        failed = np.array([_fails(step, only_user(batch, row)) for row in range(len(batch))])
        if not failed.any():
            raise
        return step(without_users(batch, failed))


def _fails(step: Step, batch: UserBatch) -> bool:
    try:
        step(batch)
    except Exception:
        return True
    return False


def _portions(
    block: UserTable, chosen: NDArray[np.bool_], floats: int, takes_sparse: bool
) -> Iterator[tuple[Any, NDArray[Any]]]:
    """Yield groups of chosen users of equal size, cut so that so many numbers of each take 32 MB at most.

    Sparse rows are made dense for a step that does not take them, and then take 32 MB at most, too, unless those of
    one user are more. For a step that takes them they are cut by the size of the vectors it makes of them.
    """
    for positions, size in block.positions_by_size(chosen):
        X, y = block.group(positions, size)
        to_dense = block.is_sparse and not takes_sparse
        users = max((1 << 22) // max(floats, size * block.n_features if to_dense else 1, 1), 1)
        for start in range(0, len(X), users):
            part = X if users >= len(X) else X[start : start + users]  # a slice of sparse rows is a copy
            yield part.dense() if to_dense else part, y[start : start + users]


def finite_rows(X: Any, y: NDArray[Any], fill: float | Array = 0.0) -> tuple[Any, NDArray[Any]]:
    """Return rows in one layout of memory, so that rounding depends on the numbers alone, with missing values filled.

    Users with a number that is not finite become users whose rows are all zero.

    Args:
        X: (users, m, d), or `SparseRows`. NaN is a missing value.
        y: (users, m) or (users, m, q).
        fill: what a column holds of a user who has no value in it, a number or (d,); see `StepSpec.fill`.
    """
    if isinstance(X, SparseRows):
        return _finite_sparse_rows(fill_missing(X, fill), y)
    X, y = np.ascontiguousarray(X), np.ascontiguousarray(y)
    with np.errstate(all="ignore"):
        if np.isfinite(X.sum()) and np.isfinite(y.sum()):
            return X, y
        X = fill_missing(X, fill)
    fine = np.isfinite(X) | (np.isnan(X) & np.isnan(fill))
    bad = ~(fine.all(axis=(1, 2)) & _finite_targets(y))
    return np.where(bad[:, None, None], 0, X), _zeroed(y, bad)


def _finite_sparse_rows(X: SparseRows, y: NDArray[Any]) -> tuple[SparseRows, NDArray[Any]]:
    y = np.ascontiguousarray(y)
    bad = ~(X.finite() & _finite_targets(y))
    return (X.without(bad), _zeroed(y, bad)) if bad.any() else (X, y)


def _finite_targets(y: NDArray[Any]) -> NDArray[np.bool_]:
    return np.asarray(np.isfinite(y).all(axis=tuple(range(1, y.ndim))))


def _zeroed(y: NDArray[Any], bad: NDArray[np.bool_]) -> NDArray[Any]:
    return np.where(bad.reshape(-1, *[1] * (y.ndim - 1)), 0, y)
