"""Rows most of whose entries are zero: the same answers as dense rows, without ever making them dense."""

from __future__ import annotations

import tracemalloc
from dataclasses import dataclass
from typing import Any, ClassVar

import numpy as np
import pytest
from experiments.split import split_within_users
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy import sparse

from privrep.data.sparse import SparseRows
from privrep.data.table import UserTable
from privrep.privacy.bounds import Bound
from privrep.privacy.columns import SparseColumns
from privrep.privacy.contributions import Vectors
from privrep.privacy.protocol import StepSpec, UserBatch
from privrep.users import summing as base
from privrep.users.memory import InMemoryUsers
from privrep.users.performance import Performance
from privrep.users.summing import clean_rows, sum_blocks


def random_rows(rows: int, d: int, density: float, dtype: Any, rng: np.random.Generator) -> np.ndarray:
    values = rng.standard_normal((rows, d)) * np.exp(8 * rng.standard_normal((rows, d)))
    return np.where(rng.random((rows, d)) < density, values, 0.0).astype(dtype)


def some(users: int, m: int, d: int, dtype: Any = np.float64, seed: int = 0) -> tuple[SparseRows, np.ndarray]:
    dense = random_rows(users * m, d, 0.2, dtype, np.random.default_rng([users, m, d, seed]))
    return SparseRows(sparse.csr_array(dense), m), dense.reshape(users, m, d)


@pytest.mark.parametrize("dtype", [np.float32, np.float64])
@pytest.mark.parametrize(("users", "m", "d"), [(1, 1, 1), (7, 3, 11), (2, 1000, 5), (40, 1, 300)])
def test_looks_like_the_dense_array(users: int, m: int, d: int, dtype: Any) -> None:
    rows, dense = some(users, m, d, dtype)
    assert (rows.shape, rows.ndim, rows.dtype, len(rows)) == (dense.shape, 3, dense.dtype, users)
    assert rows.dense().tobytes() == dense.tobytes()
    for part in (slice(1, 3), slice(None, -1), slice(3, 1), slice(0, 100)):
        assert np.array_equal(rows[part].dense(), dense[part])
    M = np.random.default_rng(1).standard_normal((d, 4))
    assert rows.project(M).dtype == np.float64
    np.testing.assert_allclose(rows.project(M), dense @ M, rtol=1e-9, atol=1e-9 * np.abs(dense).max())


@pytest.mark.parametrize("dtype", [np.float32, np.float64])
@pytest.mark.parametrize(("users", "m", "d"), [(1, 1, 1), (7, 3, 11), (2, 1000, 5), (40, 1, 300)])
def test_slots_are_the_columns_each_user_has(users: int, m: int, d: int, dtype: Any) -> None:
    rows, dense = some(users, m, d, dtype)
    user, column, T = rows.slots()
    assert np.array_equal(np.stack([user, column], axis=1), np.argwhere((dense != 0).any(axis=1)))
    assert T.shape == (len(user), users * m)
    W = np.random.default_rng(1).standard_normal((users * m, 3))
    expected = np.einsum("umd,umk->udk", dense.astype(np.float64), W.reshape(users, m, 3))[user, column]
    np.testing.assert_allclose(T @ W, expected, rtol=1e-9, atol=1e-9 * np.abs(dense).max())


@pytest.mark.parametrize("k", [1, 2, 3, 8, 17])
@pytest.mark.parametrize("dtype", [np.float32, np.float64])
@pytest.mark.parametrize("m", [1, 2, 9, 100])
def test_products_of_a_user_do_not_depend_on_the_others(m: int, dtype: Any, k: int) -> None:
    rows, _ = some(23, m, 37, dtype)
    rng = np.random.default_rng(k)
    M, W = rng.standard_normal((37, k)), rng.standard_normal((23, m, k))
    projected, (user, _, T) = rows.project(M), rows.slots()
    pulled = T @ W.reshape(-1, k)
    for i in range(23):
        alone = rows[i : i + 1]
        assert alone.project(M).tobytes() == projected[i : i + 1].tobytes()
        assert (alone.slots()[2] @ W[i]).tobytes() == pulled[user == i].tobytes()
        few = rows[i : i + 3]
        place, _, part = few.slots()
        assert few.project(M)[0].tobytes() == projected[i].tobytes()
        assert (part @ W[i : i + 3].reshape(-1, k))[place == 0].tobytes() == pulled[user == i].tobytes()


def test_rows_without_any_entry() -> None:
    rows = SparseRows(sparse.csr_array((6, 4)), 2)
    assert not rows.dense().any()
    assert rows.project(np.ones((4, 2))).tolist() == np.zeros((3, 2, 2)).tolist()
    user, column, T = rows.slots()
    assert (len(user), len(column), T.shape) == (0, 0, (0, 6))
    assert (T @ np.ones((6, 2))).shape == (0, 2)


def test_canonical_form() -> None:
    """Sorted, duplicates added up, no stored zeros, also those that cancel; what was given stays as it was."""
    given = sparse.csr_matrix(
        (np.array([1.0, 2.0, 4.0, 0.0, 5.0, -5.0]), np.array([3, 0, 3, 1, 2, 2]), np.array([0, 3, 6])), shape=(2, 4)
    )
    rows = SparseRows(given, 1)
    assert rows.matrix.indices.tolist() == [0, 3]
    assert rows.matrix.data.tolist() == [2.0, 5.0]
    assert rows.matrix.indptr.tolist() == [0, 2, 2]
    assert isinstance(rows.matrix, sparse.csr_array)
    assert given.data.tolist() == [1.0, 2.0, 4.0, 0.0, 5.0, -5.0]
    assert given.indices.tolist() == [3, 0, 3, 1, 2, 2]


# Tables


@given(
    st.lists(st.integers(0, 5), min_size=1, max_size=40), st.sampled_from(["csr", "csc", "coo", "lil"]), st.booleans()
)
def test_rows_in_any_order_come_back_by_user(users: list[int], form: str, array: bool) -> None:
    rng = np.random.default_rng(len(users))
    X = random_rows(len(users), 4, 0.5, np.float64, rng)
    made = sparse.csr_array(X) if array else sparse.csr_matrix(X)
    y = rng.standard_normal(len(users))
    table, twin = UserTable.from_rows(made.asformat(form), y, users), UserTable.from_rows(X, y, users)
    assert isinstance(table.X, sparse.csr_array)
    assert (table.n_features, table.n_rows, table.n_users) == (4, len(users), twin.n_users)
    assert np.array_equal(table.X.toarray(), twin.X)
    assert np.array_equal(table.y, twin.y)
    for size in np.unique(table.sizes):
        positions = np.flatnonzero(table.sizes == size)
        rows, targets = table.group(positions, int(size))
        assert isinstance(rows, SparseRows)
        assert np.array_equal(rows.dense(), twin.group(positions, int(size))[0])
        assert np.array_equal(targets, twin.group(positions, int(size))[1])


def test_integers_become_float64_and_float32_stays() -> None:
    X = sparse.csr_array(np.eye(3, dtype=int))
    assert UserTable.from_rows(X, np.ones(3), [0, 1, 2]).X.dtype == np.float64
    assert UserTable.from_rows(X.astype(np.float32), np.ones(3), [0, 1, 2]).X.dtype == np.float32


def test_splits_and_matrices_of_the_old_kind() -> None:
    X = random_rows(60, 5, 0.5, np.float64, np.random.default_rng(0))
    table = UserTable(sparse.csr_matrix(X), np.arange(60.0), np.arange(0, 61, 6), np.arange(10))
    assert isinstance(table.X, sparse.csr_array)
    for part in split_within_users(table, 0.5, np.random.default_rng(0)):
        assert part.is_sparse
        assert np.array_equal(part.X.toarray(), X[part.y.astype(int)])


def twins(sizes: list[int], d: int, dtype: Any, targets: int = 1) -> tuple[UserTable, UserTable]:
    """The same rows, sparse and dense."""
    rng = np.random.default_rng(d)
    offsets = np.concatenate([[0], np.cumsum(sizes)]).astype(np.int64)
    X = random_rows(sum(sizes), d, 0.1, dtype, rng)
    y = rng.standard_normal((sum(sizes), targets) if targets > 1 else sum(sizes)).astype(dtype)
    ids = np.arange(len(sizes))
    return UserTable(sparse.csr_array(X), y, offsets, ids), UserTable(X, y, offsets, ids)


@dataclass
class Recorder:
    """A step that knows nothing of sparse rows and keeps what every user sent, by the user's first target."""

    spec: ClassVar[StepSpec] = StepSpec()
    sent: dict[float, bytes]
    largest: int = 0

    def __call__(self, batch: UserBatch) -> dict[str, Vectors]:
        X, y = batch.X, batch.y
        self.largest = max(self.largest, X.size)
        values = np.einsum("umd,um->ud", X, y if y.ndim == 2 else y[:, :, 0])
        self.sent |= {
            float(first): value.tobytes() for first, value in zip(y.reshape(len(y), -1)[:, 0], values, strict=True)
        }
        return {"sums": Vectors(values)}


RAGGED = [1, 1000, 1, *np.random.default_rng(0).integers(1, 40, 300).tolist(), 0, 2500, 7]


@pytest.mark.parametrize("dtype", [np.float32, np.float64])
@pytest.mark.parametrize(("d", "targets"), [(6, 1), (6, 3), (256, 1), (3000, 1)])
def test_a_step_for_dense_rows_gets_the_same_numbers(d: int, targets: int, dtype: Any) -> None:
    sizes = RAGGED if d < 3000 else [*[size for size in RAGGED if size < 1000][:60], 900]
    tables = twins(sizes, d, dtype, targets)
    steps = [Recorder({}), Recorder({})]
    totals = [
        InMemoryUsers(table, Performance(1)).sums(step, {"sums": Bound(1.0, d)})["sums"].exact_numbers
        for table, step in zip(tables, steps, strict=True)
    ]
    assert len(steps[0].sent) == sum(size > 0 for size in sizes)
    assert steps[0].sent == steps[1].sent
    assert steps[0].largest * 8 <= 32 << 20
    if d <= 256:  # where blocks are the same
        assert totals[0].tobytes() == totals[1].tobytes()


def test_users_with_numbers_that_are_not_finite_count_as_zero_rows() -> None:
    X, dense = some(6, 3, 8)
    y = np.random.default_rng(0).standard_normal((6, 3, 2))
    assert clean_rows(X, y)[0] is X
    for value in (np.inf, -np.inf):
        spoilt, targets = dense.copy(), y.copy()
        spoilt[1, 2, 5] = spoilt[4, 0, 0] = value
        targets[2, 1, 0] = np.nan
        rows, kept = clean_rows(SparseRows(sparse.csr_array(spoilt.reshape(18, 8)), 3), targets)
        as_dense, kept_dense = clean_rows(spoilt, targets)
        assert not rows.dense()[[1, 2, 4]].any()
        assert rows.dense().tobytes() == as_dense.tobytes()
        assert rows.matrix.data.all()
        assert kept.tobytes() == kept_dense.tobytes()
        assert not kept[[1, 2, 4]].any()
    one = clean_rows(X, np.where(np.arange(6)[:, None] == 3, np.nan, y[:, :, 0]))[0].dense()
    assert not one[3].any()
    assert np.array_equal(one[[0, 1, 2, 4, 5]], dense[[0, 1, 2, 4, 5]])


@dataclass(frozen=True)
class SlotSums:
    """Each user's sum of its rows, as a step for sparse rows would send it."""

    spec: ClassVar[StepSpec] = StepSpec(accepts_sparse=True)

    def __call__(self, batch: UserBatch) -> dict[str, SparseColumns]:
        X, y = batch.X, batch.y
        assert isinstance(X, SparseRows)
        user, column, T = X.slots()
        return {"sums": SparseColumns(user, column, T @ y.reshape(-1, 1), np.empty((len(X), 0)), X.shape[2])}


@settings(max_examples=30, deadline=None)
@given(st.lists(st.integers(0, 6), min_size=1, max_size=30), st.integers(1, 50))
def test_a_step_for_sparse_rows_sums_what_a_dense_one_does(sizes: list[int], d: int) -> None:
    table, twin = twins(sizes, d, np.float64)
    bounds = {"sums": Bound(1.0, d)}
    kept = InMemoryUsers(table, Performance(2)).sums(SlotSums(), bounds)["sums"].exact_numbers
    dense = InMemoryUsers(twin, Performance(1)).sums(Recorder({}), bounds)["sums"].exact_numbers
    np.testing.assert_allclose(kept, dense, rtol=1e-6, atol=1e-9)


def test_a_wide_table_is_never_made_dense(monkeypatch: pytest.MonkeyPatch) -> None:
    rows, d = 100_000, 10_000
    rng = np.random.default_rng(0)
    columns, values = rng.integers(0, d, 3 * rows), rng.standard_normal(3 * rows)
    X = sparse.csr_array((values, columns, np.arange(0, 3 * rows + 1, 3)), shape=(rows, d))
    table = UserTable.from_rows(X, rng.standard_normal(rows), np.repeat(np.arange(rows // 10), 10))
    bounds = {"sums": Bound(1.0, d)}
    tracemalloc.start()
    try:
        total = sum_blocks(table.blocks(), SlotSums(), bounds, Performance(2))["sums"].exact_numbers
        sparse_peak = tracemalloc.get_traced_memory()[1]
        tracemalloc.reset_peak()
        few = UserTable(table.X[:2000], table.y[:2000], table.offsets[:201], table.ids[:200])
        portions = [X.nbytes for X, _ in base._cut_portions(few, np.ones(200, dtype=bool), 0, False)]
        dense_peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert total.any()
    assert sparse_peak < 100 << 20  # where all rows would be 8 GB and those of one block 1.3 GB
    assert max(portions) <= 32 << 20
    assert sum(portions) == 2000 * d * 8
    assert dense_peak < 100 << 20
