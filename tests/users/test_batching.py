"""Calls of fixed shape: what a step with slots is given, on every engine, and who shares a call."""

from __future__ import annotations

import threading
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pytest
from scipy import sparse

from privrep.data.readers import TableSource
from privrep.data.table import UserTable
from privrep.errors import InputError
from privrep.local.transform import Projection
from privrep.privacy.billboard import Billboard
from privrep.privacy.bounds import LEVELS, Bound, LossBound
from privrep.privacy.calibration import Query
from privrep.privacy.contributions import Losses, Vectors
from privrep.privacy.groups import Group
from privrep.privacy.ledger import Budget, Ledger
from privrep.privacy.protocol import EVERYONE, StepSpec, UserBatch
from privrep.privacy.run import Run
from privrep.privacy.sampling import Sample
from privrep.users import batching as module
from privrep.users.batching import choose_batch_size
from privrep.users.memory import InMemoryUsers
from privrep.users.performance import Performance
from privrep.users.projected import ProjectedUsers
from privrep.users.streaming import StreamingUsers
from stepping import RowsStep

BOUNDS = {"sum": Bound(1.0, 3)}


@dataclass(frozen=True)
class Watching:
    """Sums of the rows that are there, and a note of every call."""

    rows_per_user: int
    floats: int = 3
    seen: list[tuple[Any, Any, Any]] = field(default_factory=list)
    lock: Any = field(default_factory=threading.Lock)

    @property
    def spec(self) -> StepSpec:
        return StepSpec(layout="padded", rows_per_user=self.rows_per_user, floats_per_user=self.floats)

    def __call__(self, batch: UserBatch) -> dict[str, Vectors]:
        X, y, places = batch.X, batch.y, batch.positions
        with self.lock:
            self.seen.append((X.copy(), y.copy(), places.copy()))
        return {"sum": Vectors((X * (y != -1)[:, :, None]).sum(axis=1) + 1.0)}

    @property
    def places(self) -> list[int]:
        return [place for _, _, places in self.seen for place in places.tolist()]


@pytest.fixture
def table(table_of: Callable[..., UserTable]) -> UserTable:
    """Seven users with 2, 0, 5, 1, 3, 2 and 4 rows of three features; the fifth holds an infinity."""
    rng = np.random.default_rng(0)
    users = [(rng.normal(size=(m, 3)), rng.integers(0, 4, m).astype(float)) for m in (2, 0, 5, 1, 3, 2, 4)]
    users[4][0][1, 2] = np.inf
    return table_of(users, 3, np.float32)


def few_seats(monkeypatch: pytest.MonkeyPatch, seats: int) -> None:
    monkeypatch.setattr("privrep.users.summing.choose_batch_size", lambda *_: seats)


def test_rows_are_padded_and_cut_and_users_come_in_order(table: UserTable) -> None:
    step = Watching(3)
    InMemoryUsers(table, Performance(1)).sums(step, BOUNDS)
    ((X, y, places),) = step.seen
    assert X.shape == (7, 3, 3)
    assert X.flags.c_contiguous
    assert X.dtype == np.float32
    assert places.tolist() == list(range(7))
    assert places.dtype == np.int64
    for user, rows in enumerate((2, 0, 3, 1, 0, 2, 3)):  # of the fifth nothing is left
        first = int(table.offsets[user])
        assert np.array_equal(X[user, :rows], table.X[first : first + rows])
        assert np.array_equal(y[user, :rows], table.y[first : first + rows])
        assert (X[user, rows:] == 0).all()
        assert (y[user, rows:] == -1).all()


@pytest.mark.parametrize("spoilt", [np.nan, np.inf])
def test_a_label_that_is_not_finite_takes_all_rows_of_its_user(table: UserTable, spoilt: float) -> None:
    y = table.y.copy()
    y[0] = spoilt
    step = Watching(2)
    InMemoryUsers(UserTable(table.X, y, table.offsets, table.ids), Performance(1)).sums(step, BOUNDS)
    assert (step.seen[0][1][0] == -1).all()
    assert (step.seen[0][0][0] == 0).all()


def test_the_shape_of_calls_follows_from_public_numbers() -> None:
    assert choose_batch_size(60, 784, 0) == 178
    assert choose_batch_size(60, 784, 235_000) == 17
    assert choose_batch_size(10**6, 10**6, 0) == 1
    assert choose_batch_size(60, 784, 0, expected=100.0) == 6
    assert choose_batch_size(60, 784, 0, expected=0.1) == 1


@pytest.mark.parametrize("seats", [1, 2, 3, 7, 20])
def test_calls_are_the_same_whatever_rows_users_have(
    table: UserTable, table_of: Callable[..., UserTable], seats: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    few_seats(monkeypatch, seats)
    other = table_of([(np.zeros((m, 3)), np.zeros(m)) for m in (900, 1, 0, 0, 70_000, 2, 3)], 3, np.float32)
    shapes = []
    for users in (table, other):
        step = Watching(2)
        InMemoryUsers(users, Performance(1)).sums(step, BOUNDS)
        shapes.append([(X.shape, places.tolist()) for X, _, places in step.seen])
    assert shapes[0] == shapes[1]
    assert [place for _, places in shapes[0] for place in places] == list(range(7))
    assert {shape[0] for shape, _ in shapes[0][:-1]} <= {seats}


def test_sums_do_not_depend_on_workers(population: Callable[..., UserTable], monkeypatch: pytest.MonkeyPatch) -> None:
    few_seats(monkeypatch, 7)
    table = population(n=60, d=3)
    totals = [InMemoryUsers(table, Performance(w)).sums(Watching(5), BOUNDS)["sum"].exact_numbers for w in (1, 4)]
    assert np.array_equal(*totals)
    rows = [table.X[a:b][:5].sum(axis=0) + 1 for a, b in zip(table.offsets[:-1], table.offsets[1:], strict=True)]
    plain = np.array([row * min(1.0, 1 / np.linalg.norm(row)) for row in rows]).sum(axis=0)
    assert totals[0] == pytest.approx(plain, rel=1e-9)


def test_a_file_gives_the_same_calls_as_memory(
    population: Callable[..., UserTable], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    few_seats(monkeypatch, 7)
    table = population(n=40, d=3)
    frame = pd.DataFrame(table.X, columns=["a", "b", "c"])
    frame["y"], frame["user"] = table.y, np.repeat(table.ids, table.sizes)
    frame.to_parquet(tmp_path / "rows.parquet")
    source = TableSource(tmp_path / "rows.parquet", "user", "y")
    sample = Sample(0.5, b"k" * 32)
    with StreamingUsers.open(source, Performance(workers=1)) as users:
        for among in (EVERYONE, Group("half", 0, 2), sample):
            steps = Watching(5), Watching(5)
            totals = [
                engine.sums(step, BOUNDS, among)["sum"].exact_numbers
                for engine, step in zip((users, InMemoryUsers(table, Performance(1))), steps, strict=True)
            ]
            assert np.array_equal(*totals)
            assert steps[0].places == steps[1].places
            assert len(steps[0].seen) > 1


def test_a_group_is_packed_into_calls(table: UserTable, monkeypatch: pytest.MonkeyPatch) -> None:
    few_seats(monkeypatch, 2)
    group = Group("a", 0, 2)
    step = Watching(2)
    InMemoryUsers(table, Performance(1)).sums(step, BOUNDS, group)
    assert step.places == np.flatnonzero(group.members(table.ids)).tolist()
    assert [len(places) for _, _, places in step.seen[:-1]] == [2] * (len(step.seen) - 1)


def test_members_of_a_sample_sit_at_their_own_seats_and_empty_seats_count_for_nothing(
    population: Callable[..., UserTable], monkeypatch: pytest.MonkeyPatch
) -> None:
    few_seats(monkeypatch, 4)
    table = population(n=60, d=3)
    sample = Sample(0.4, b"a" * 32)
    members = np.flatnonzero(sample.members(60))
    step = Watching(6)
    total = InMemoryUsers(table, Performance(1)).sums(step, BOUNDS, sample)["sum"].exact_numbers
    for X, y, places in step.seen:
        assert X.shape == (4, 6, 3)
        taken = places >= 0
        assert (places[taken] % 4 == np.flatnonzero(taken)).all()
        assert (y[~taken] == -1).all()
        assert (X[~taken] == 0).all()
    assert sorted(place for place in step.places if place >= 0) == members.tolist()
    rows = [table.X[table.offsets[u] : table.offsets[u + 1]][:6].sum(axis=0) + 1 for u in members]
    assert total == pytest.approx(sum(row * min(1.0, 1 / np.linalg.norm(row)) for row in rows), rel=1e-9)


def test_few_calls_wait_and_few_seats_stay_empty() -> None:
    n, rate = 4000, 0.1
    table = UserTable(np.zeros((n, 1), np.float32), np.zeros(n), np.arange(n + 1), np.arange(n))
    members = Sample(rate, b"b" * 32).members(n)
    seats = choose_batch_size(1, 1, 0, expected=rate * n)
    assert seats == 25
    made = list(module.pad_batches(table.blocks(), 1, seats, members))
    assert sum(int(module.find_taken_rows(batch).sum()) for batch in made) == members.sum()
    assert len(made) * seats <= 2 * members.sum()


def test_empty_seats_count_for_no_losses(table: UserTable, monkeypatch: pytest.MonkeyPatch) -> None:
    few_seats(monkeypatch, 5)

    @dataclass(frozen=True)
    class All:
        rows_per_user: int = 1

        @property
        def spec(self) -> StepSpec:
            return StepSpec(layout="padded", rows_per_user=self.rows_per_user)

        def __call__(self, batch: UserBatch) -> dict[str, Losses]:
            X = batch.X
            return {"losses": Losses(np.ones((len(X), 2)))}

    sample = Sample(0.6, b"c" * 32)
    total = InMemoryUsers(table, Performance(1)).sums(All(), {"losses": LossBound(2)}, sample)["losses"].total
    assert total.tolist() == [float(sample.members(7).sum() * LEVELS)] * 2


def test_what_slots_cannot_do_is_refused(table: UserTable, spy: Any) -> None:
    users, sample = InMemoryUsers(table, Performance(1)), Sample(0.5, b"d" * 32)
    rows = UserTable(sparse.csr_array(table.X), table.y, table.offsets, table.ids)
    with pytest.raises(InputError, match="dense rows"):
        InMemoryUsers(rows, Performance(1)).sums(Watching(2), BOUNDS)
    with pytest.raises(InputError, match="a step with slots"):
        users.sums(RowsStep(lambda X, y: {"sum": Vectors(X.sum(axis=1))}), BOUNDS, sample)
    with pytest.raises(InputError, match="no steps with slots"):
        ProjectedUsers(users, Projection(None, 1.0)).sums(Watching(2), BOUNDS)
    for slots in (0, -1, 2.5, True):
        with pytest.raises(InputError, match="whole number of slots"):
            users.sums(Watching(slots), BOUNDS)  # type: ignore[arg-type]
    ledger = Ledger(Budget(1.0, 1e-6, "add-or-remove-one-user"))
    with pytest.raises(InputError, match="use replace-one-user"):
        Run(users, ledger, Billboard(), spy).release("page", Watching(2), {"sum": Query(BOUNDS["sum"], 1e-3)})
    assert ledger.report().events == ()


def test_no_users_no_calls(table_of: Callable[..., UserTable]) -> None:
    step = Watching(2)
    total = InMemoryUsers(table_of([], 3), Performance(1)).sums(step, BOUNDS)["sum"].exact_numbers
    assert total.tolist() == [0.0, 0.0, 0.0]
    assert step.seen == []


class Fussy:
    """A step that fails on a number it does not like."""

    spec = StepSpec(layout="padded", rows_per_user=2)

    def __call__(self, batch: UserBatch):
        X = batch.X
        if (X == 13).any():
            raise ValueError("thirteen")
        return {"sum": Vectors(X.sum(axis=1))}


def test_a_user_on_whose_rows_the_step_fails_is_one_without_rows():
    def total(value):
        X = np.arange(8.0, dtype=np.float32).reshape(8, 1)
        X[4] = value
        table = UserTable(X, np.zeros(8), np.arange(0, 9, 2), np.arange(4))
        return InMemoryUsers(table).sums(Fussy(), {"sum": Bound(100.0, 1)})["sum"].exact_numbers[0]

    assert total(13) == total(4) - (4 + 5)


class Broken(Fussy):
    def __call__(self, batch: UserBatch):
        X = batch.X
        raise ValueError("always" if not (X == 0).all() else "even without rows")


def test_a_step_that_fails_without_rows_is_an_error():
    table = UserTable(np.ones((4, 1), np.float32), np.zeros(4), np.arange(0, 5, 2), np.arange(2))
    with pytest.raises(ValueError, match="even without rows"):
        InMemoryUsers(table).sums(Broken(), {"sum": Bound(1.0, 1)})
