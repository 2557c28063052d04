"""Losses of candidates: every entry of every user lies in [0, 1], and the sum is exact, however it is cut up."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra.numpy import arrays

from privrep.data.readers import TableSource
from privrep.data.table import UserTable
from privrep.errors import InputError
from privrep.privacy.bounds import LEVELS, MAX_SIZE, MAX_USERS, Bound, LossBound, clip_and_sum
from privrep.privacy.contributions import Counts, Losses, Vectors
from privrep.privacy.grid import MAX_INT64_USERS, Total
from privrep.privacy.protocol import StepSpec, UserBatch
from privrep.users.memory import InMemoryUsers
from privrep.users.performance import Performance
from privrep.users.streaming import StreamingUsers

any_float = st.floats(allow_nan=True, allow_infinity=True, width=32)


@dataclass(frozen=True)
class Distances:
    """A local step: how far each user's mean target is from each of some public points."""

    points: np.ndarray
    dtype: type = np.float64
    floats: int = 0

    @property
    def spec(self) -> StepSpec:
        return StepSpec(floats_per_user=self.floats)

    def __call__(self, batch: UserBatch) -> dict[str, Losses]:
        y = batch.y
        return {"losses": Losses(np.abs(y.mean(axis=1)[:, None] - self.points).astype(self.dtype))}


def levels(*values: float, dtype: type = np.float64) -> list[float]:
    return clip_and_sum(Losses(np.array([values], dtype=dtype)), LossBound(len(values))).tolist()


@pytest.mark.parametrize("dtype", [np.float64, np.float32, np.float16])
def test_entries_are_brought_into_the_unit_interval_and_counted_in_levels(dtype: type) -> None:
    assert levels(0.0, 1.0, 0.5, 7.0, -3.0, -0.0, dtype=dtype) == [0, LEVELS, LEVELS / 2, LEVELS, 0, 0]
    assert levels(2.0**-21, 2.0**-20, 3 * 2.0**-21, dtype=np.float32) == [0, 1, 2]
    assert levels(1 - 2.0**-23, 0.3) == [LEVELS, round(0.3 * LEVELS)]


def test_integers_and_truths_are_losses_too() -> None:
    assert clip_and_sum(Losses(np.array([[True, False], [True, True]])), LossBound(2)).tolist() == [2 * LEVELS, LEVELS]
    assert clip_and_sum(Losses(np.array([[0, 1, 5]])), LossBound(3)).tolist() == [0, LEVELS, LEVELS]


@pytest.mark.parametrize("dtype", [np.float64, np.float32])
@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf])
def test_a_user_with_an_entry_that_is_not_finite_counts_as_all_zeros(bad: float, dtype: type) -> None:
    values = np.array([[0.5, 0.25, 1.0], [0.5, bad, 1.0], [0.25, 0.0, 0.0]], dtype=dtype)
    assert clip_and_sum(Losses(values), LossBound(3)).tolist() == [0.75 * LEVELS, 0.25 * LEVELS, LEVELS]


def test_huge_entries_of_many_users_are_clipped_and_not_taken_for_infinite() -> None:
    values = np.full((4, 3), 3e38, dtype=np.float32)
    with np.errstate(over="ignore"):
        assert clip_and_sum(Losses(values), LossBound(3)).tolist() == [4 * LEVELS] * 3


@given(arrays(np.float32, (5, 3), elements=any_float))
def test_every_user_adds_whole_levels_between_none_and_all(values: np.ndarray) -> None:
    with np.errstate(all="ignore"):
        each = [clip_and_sum(Losses(user[None]), LossBound(3)) for user in values]
        together = clip_and_sum(Losses(values), LossBound(3))
    for added in each:
        assert ((added >= 0) & (added <= LEVELS) & (added == np.rint(added))).all()
    assert np.array_equal(np.sum(each, axis=0), together)


def test_the_largest_sum_is_exact() -> None:
    """Of all users it fits int64. Of the users of one call, whose levels float64 adds up, it fits 53 bits."""
    assert MAX_USERS * LEVELS <= 2**60
    calls = Total(1)
    calls.add(np.array([MAX_INT64_USERS * LEVELS - 1]), MAX_INT64_USERS)
    calls.add(np.array([MAX_USERS * LEVELS]), MAX_USERS)
    assert calls.integers.tolist() == [(MAX_INT64_USERS + MAX_USERS) * LEVELS - 1]
    assert float(2**32) * LEVELS - 1 == 2**32 * LEVELS - 1


@pytest.mark.parametrize("size", [0, -1, MAX_SIZE + 1])
def test_a_choice_has_candidates(size: int) -> None:
    with pytest.raises(InputError, match="candidates"):
        LossBound(size)


def test_losses_are_for_choices_and_choices_for_losses() -> None:
    with pytest.raises(InputError, match="a choice asks for Losses"):
        clip_and_sum(Vectors(np.ones((2, 3))), LossBound(3))
    with pytest.raises(InputError, match="a choice asks for Losses"):
        clip_and_sum(Counts(np.array([[0]]), 3), LossBound(3))
    with pytest.raises(InputError, match="Losses are for choices"):
        clip_and_sum(Losses(np.ones((2, 3))), Bound(1.0, 3))
    for shape in ((2, 4), (3,), (2, 3, 1)):
        with pytest.raises(InputError, match="losses of shape"):
            clip_and_sum(Losses(np.ones(shape)), LossBound(3))


# Exact, however it is cut up


def sums(users: Any, step: Distances) -> np.ndarray:
    return users.sums(step, {"losses": LossBound(len(step.points))})["losses"].total


@pytest.mark.parametrize("dtype", [np.float64, np.float32])
def test_the_sum_is_the_same_bits_in_every_engine_and_every_block(
    population: Callable[..., UserTable], tmp_path: Path, dtype: type, monkeypatch: pytest.MonkeyPatch
) -> None:
    table = population(n=300, d=3)
    step = Distances(np.random.default_rng(0).normal(size=40), dtype)
    whole = sums(InMemoryUsers(table, Performance(1)), step)
    columns = {"user": np.repeat(table.ids, table.sizes), "y": table.y}
    columns |= {f"x{j}": table.X[:, j] for j in range(3)}
    pq.write_table(pa.table(columns), tmp_path / "rows.parquet")
    with StreamingUsers.open(
        TableSource(tmp_path / "rows.parquet", "user", "y"), Performance(workdir=tmp_path, workers=2)
    ) as streamed:
        assert np.array_equal(sums(streamed, step), whole)
    for workers, floats in ((2, 0), (1, 1 << 22), (2, 1 << 20)):  # one user, four users at a time
        cut = Distances(step.points, dtype, floats)
        assert np.array_equal(sums(InMemoryUsers(table, Performance(workers)), cut), whole)
    for rows in (1, 37, 500):
        monkeypatch.setattr("privrep.data.table.choose_block_rows", lambda *a, rows=rows: rows)
        assert len(list(table.blocks())) > (1 if rows < 500 else 0)
        assert np.array_equal(sums(InMemoryUsers(table, Performance(2)), step), whole)
    assert np.array_equal(np.rint(whole), whole)


def test_users_in_any_order_add_up_to_the_same_bits(table_of: Callable[..., UserTable]) -> None:
    rng = np.random.default_rng(1)
    users = [(rng.normal(size=(4, 2)), rng.normal(size=4)) for _ in range(60)]
    step = Distances(rng.normal(size=9))
    whole = sums(InMemoryUsers(table_of(users, 2), Performance(1)), step)
    for _ in range(5):
        rng.shuffle(users)
        assert np.array_equal(sums(InMemoryUsers(table_of(users, 2), Performance(1)), step), whole)
