"""Replace one user by anything: no bounded sum moves by more than its stated sensitivity, nothing raises.

Every local step that feeds a release, on every engine. A new engine joins by a line in ENGINES, a new step by one in
`questions`. The claim under test is the one in `privacy/bounds.py`: for any data whatever, rounding errors included.
It rests on each user's contribution being a function of that user's rows alone, to the last bit: a histogram cell or an
ill-conditioned head turns the last bit into a whole contribution. Hence the tests of company at the end.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from asking import (
    ADD,
    CASES,
    PHASES,
    REPLACE,
    D,
    Engine,
    Every,
    K,
    Question,
    User,
    assert_within,
    make_user,
    questions,
    sparse_questions,
    sparse_table_of,
    table_of,
    taste_questions,
    user,
)
from hypothesis import given, settings
from hypothesis import strategies as st
from threadpoolctl import threadpool_limits

from privrep.data.missing import fill_missing
from privrep.data.readers import TableSource
from privrep.data.table import UserTable
from privrep.privacy.bounds import MAX_ROWS_PER_SUM, BoundedSum
from privrep.privacy.protocol import UserBatch, Users
from privrep.users.memory import InMemoryUsers
from privrep.users.performance import Performance
from privrep.users.streaming import StreamingUsers

# Engines


@contextmanager
def in_memory(table: UserTable, folder: Path) -> Iterator[Users]:
    yield InMemoryUsers(table, Performance(2))


@contextmanager
def streaming(table: UserTable, folder: Path) -> Iterator[Users]:
    columns = {"user": np.repeat(np.arange(table.n_users), table.sizes), "y": table.y}
    columns |= {f"x{j}": np.ascontiguousarray(table.X[:, j]) for j in range(table.n_features)}
    path = folder / "rows.parquet"
    pq.write_table(pa.table(columns), path)
    with StreamingUsers.open(TableSource(path, "user", "y"), Performance(workdir=folder, workers=1)) as users:
        yield users


ENGINES: dict[str, Engine] = {"in memory": in_memory, "streaming": streaming}
WHOLE = {
    "streaming"
}  # engines of files, which refuse infinity when they are opened and cannot hold a user without rows


def sums_of(engine: Engine, folder: Path, question: Question, table: UserTable) -> dict[str, BoundedSum]:
    with engine(table, folder) as users:
        return users.sums(*question)


# The property


@pytest.mark.parametrize("intercept", [True, False])
@pytest.mark.parametrize("engine", ENGINES)
def test_replacing_and_removing_a_user(engine: str, intercept: bool, tmp_path: Path) -> None:
    every = Every(questions(D, K, intercept))
    whole = engine in WHOLE

    @settings(max_examples=12 if whole else 30, phases=PHASES)
    @given(st.data(), st.sampled_from([np.float64, np.float32]))
    def changed(data: st.DataObject, dtype: type) -> None:
        users = data.draw(st.lists(user(dtype, whole), min_size=2 if whole else 1, max_size=6))
        position = data.draw(st.integers(0, len(users) - 1))
        replaced = [*users[:position], data.draw(user(dtype, whole)), *users[position + 1 :]]
        removed = [*users[:position], *users[position + 1 :]]
        here, there, without = (
            sums_of(ENGINES[engine], tmp_path, (every, every.bounds()), table_of(u, dtype))
            for u in (users, replaced, removed)
        )
        assert_within(here, there, REPLACE)
        assert_within(here, without, ADD)

    changed()


def thinned(user: User, seed: int, one_hot: bool) -> User:
    """The same user with a few entries in a row, or with a one in a single place; and some rows of nothing."""
    rng = np.random.default_rng(seed)
    X, y = user
    if one_hot:
        return np.eye(D + 1)[rng.integers(0, D + 1, len(X))][:, :D].astype(X.dtype), y
    return np.where(rng.random(X.shape) < 0.4, X, X.dtype.type(0)), y


@pytest.mark.parametrize("asked", ["several targets", "sparse", "sparse, several targets", "ratings", "wild ratings"])
def test_replacing_and_removing_a_user_of_other_tables(asked: str, tmp_path: Path) -> None:
    targets = 2 if "several" in asked else 1
    make = table_of if asked == "several targets" else sparse_table_of
    kinds = {"several targets": questions, "sparse": sparse_questions, "sparse, several targets": sparse_questions}
    both = [kinds[asked](D, K, intercept, targets) for intercept in (True, False)] if asked in kinds else []
    every = [Every(q) for q in both or [taste_questions(D, 1)]]

    @settings(max_examples=12, phases=PHASES)
    @given(st.data(), st.sampled_from([np.float64, np.float32]))
    def changed(data: st.DataObject, dtype: type) -> None:
        one = st.builds(thinned, user(dtype, False, targets), st.integers(0, 2**32 - 1), st.just(asked == "ratings"))
        users = data.draw(st.lists(user(dtype, False, targets) if asked == "several targets" else one, min_size=1))
        position = data.draw(st.integers(0, len(users) - 1))
        replaced = [*users[:position], data.draw(one), *users[position + 1 :]]
        removed = [*users[:position], *users[position + 1 :], (np.zeros((0, D)), users[0][1][:0])]
        for each in every:
            here, there, without = (
                sums_of(in_memory, tmp_path, (each, each.bounds()), make(u, dtype)) for u in (users, replaced, removed)
            )
            assert_within(here, there, REPLACE)
            assert_within(here, without, ADD)

    changed()


# Crowds: rounding errors of many users together


def crowd(kind: str, n: int, m: int, d: int, dtype: type) -> tuple[np.ndarray, np.ndarray]:
    """n users of m rows each, of a kind that makes the most of rounding."""
    rng = np.random.default_rng(11)
    X, y = rng.normal(size=(n, m, d)), rng.normal(size=(n, m))
    if kind == "lopsided":  # a user's pairs cancel down to the rounding of its largest row
        X[:, 0] *= 1e15 if dtype is np.float64 else 1e6
    elif kind == "denormal":
        X, y = X * 1e-309, np.ones_like(y)
        X = X if dtype is np.float64 else X * 1e270
    elif kind == "ill-conditioned":
        X = X[:, :, :1] * rng.normal(size=(n, 1, d)) * 1e4 + 1e-3 * X
    elif kind == "wide":  # features far from their declared scale, so that the ridge does nothing
        X *= 1e4
    elif kind == "constant":  # features that do not vary: centred, nothing but rounding is left of them
        X = np.broadcast_to(X[:, :1], X.shape).copy()
    return X.astype(dtype), y.astype(dtype)


def swapped(X: np.ndarray, y: np.ndarray, rows: int, scale: float) -> UserTable:
    """The crowd, its first user replaced by one with `rows` rows of another size."""
    first = (np.repeat(X[0, :1], rows, axis=0) * X.dtype.type(scale), np.repeat(y[0, :1], rows))
    flat = (first[0], X[1:].reshape(-1, X.shape[2])), (first[1], y[1:].ravel())
    offsets = np.concatenate([[0], rows + X.shape[1] * np.arange(len(X))]).astype(np.int64)
    return UserTable(np.concatenate(flat[0]), np.concatenate(flat[1]), offsets, np.arange(len(X)))


IN_CROWDS = ("feature sizes", "second moments, whitened", "directions", "residuals", "power", "gradient")
IN_CROWDS += ("gradient, whitened", "gradient, no ridge")
IN_CROWDS += ("column sizes", "level cells", "panel moments", "common, with slopes", "common, full, with slopes")
IN_CROWDS += ("head losses", "head losses, relative", "head spreads", "head errors", "residual gradient")


@pytest.mark.parametrize("dtype", [np.float64, np.float32])
@pytest.mark.parametrize("kind", ["normal", "lopsided", "denormal", "ill-conditioned", "wide", "constant"])
def test_a_user_in_a_crowd(kind: str, dtype: type, tmp_path: Path) -> None:
    """Neighbours of other sizes shift all users after them into other blocks, next to other users."""
    d, k, m, n = 20, 8, 5, 6000
    X, y = crowd(kind, n, m, d, dtype)
    asked = questions(d, k, True)
    every = Every({name: asked[name] for name in IN_CROWDS})
    here, *there = (
        sums_of(in_memory, tmp_path, (every, every.bounds()), swapped(X, y, rows, scale))
        for rows, scale in ((m, 1.0), (0, 1.0), (MAX_ROWS_PER_SUM + 9, 1e3))
    )
    for other in there:
        assert_within(here, other, REPLACE)


@pytest.mark.parametrize("intercept", [True, False])
def test_a_user_with_more_rows_than_one_product_adds(intercept: bool, tmp_path: Path) -> None:
    rng = np.random.default_rng(3)
    rows = 2 * MAX_ROWS_PER_SUM + 5
    every = Every(questions(D, K, intercept))
    users = [make_user("normal", 4, i, None, np.float64) for i in range(5)]
    here = sums_of(in_memory, tmp_path, (every, every.bounds()), table_of(users, np.float64))
    for X in (rng.normal(size=(rows, D)), rng.normal(size=(rows, D)) * 1e120, np.ones((rows, D))):
        others = table_of([*users[:2], (X, rng.normal(size=rows)), *users[3:]], np.float64)
        assert_within(here, sums_of(in_memory, tmp_path, (every, every.bounds()), others), REPLACE)


@pytest.mark.parametrize("name", ["feature sizes", "directions", "gradient"])
def test_the_layout_of_the_array_does_not_matter(name: str, tmp_path: Path) -> None:
    """Frames come column by column. Where all users of a block have as many rows, that layout survives; where one user
    differs, it does not. Sums in another order round otherwise, and users with constant features are all rounding."""
    X, y = crowd("constant", 2000, 10, 6, np.float64)
    groups = np.repeat(np.arange(2000), 10)
    flat = np.asfortranarray(X.reshape(-1, 6))
    one = UserTable.from_rows(flat, y.ravel(), groups)
    other = UserTable.from_rows(np.asfortranarray(flat[1:]), y.ravel()[1:], groups[1:])
    question = questions(6, 2, True)[name]
    assert_within(*(sums_of(in_memory, tmp_path, question, table) for table in (one, other)), REPLACE)


# Company: what a user sends does not depend on who else is in its group, to the last bit


def arrays(contributions: Any, users: int) -> dict[str, np.ndarray]:
    """What is per user in contributions of any kind. Norms too: at the edge of overflow they decide all or nothing."""
    values = {f.name: getattr(contributions, f.name) for f in dataclasses.fields(contributions)}
    values["norms"] = contributions.norms()
    return {k: v for k, v in values.items() if isinstance(v, np.ndarray) and v.shape[:1] == (users,)}


@pytest.mark.parametrize("dtype", [np.float64, np.float32])
@pytest.mark.parametrize(("d", "k", "m"), [(1, 1, 7), (3, 2, 5), (20, 8, 5), (20, 4, 1), (30, 4, 33), (64, 16, 7)])
def test_a_contribution_is_a_function_of_the_users_own_rows(d: int, k: int, m: int, dtype: type) -> None:
    rng = np.random.default_rng(0)
    n = 203
    X, y = rng.normal(size=(n, m, d)).astype(dtype) * dtype(100), rng.normal(size=(n, m)).astype(dtype)
    parts = [(0, 1), (0, 2), (1, n), (0, n - 1), (3, 50), (n - 1, n), (7, 120)]
    with np.errstate(all="ignore"), threadpool_limits(1, user_api="blas"):  # as the engine calls steps
        for name, intercept in CASES:
            step, _ = questions(d, k, intercept)[name]
            together = {key: arrays(c, n) for key, c in step(UserBatch(X, y)).items()}
            for start, stop in parts:
                for key, apart in step(UserBatch(X[start:stop].copy(), y[start:stop].copy())).items():
                    found = arrays(apart, stop - start)
                    assert found.keys() == together[key].keys()
                    for part, value in found.items():
                        same = np.array_equal(value, together[key][part][start:stop], equal_nan=value.dtype.kind == "f")
                        assert same, f"{name}/{key}.{part}: users {start} to {stop} of {n} send something else alone"


@pytest.mark.parametrize("spoil", [math.nan, math.inf])
def test_a_neighbour_who_is_not_finite_changes_nobody_else(spoil: float) -> None:
    X, y = crowd("constant", 40, 6, D, np.float64)
    for name, intercept in CASES:
        step, bounds = questions(D, K, intercept)[name]
        zeroed, spoilt = X.copy(), X.copy()
        spoilt[3, 2, 1] = spoil
        targets = y.copy()
        if math.isnan(spoil):  # a missing value, filled by the user's own mean
            zeroed[3:4] = fill_missing(spoilt[3:4], math.nan)
        else:
            zeroed[3], targets[3] = 0.0, 0.0
        sums = [InMemoryUsers(swapped(x, targets, 6, 1.0), Performance(1)).sums(step, bounds) for x in (zeroed, spoilt)]
        for key in bounds:
            assert np.array_equal(sums[0][key].exact_numbers, sums[1][key].exact_numbers), name
