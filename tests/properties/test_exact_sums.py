"""Sums are the same integers whatever users are grouped into: threads, blocks, shards, machines, in any order.

Everything that tables are asked is asked here, of users whose numbers take all their digits and of strange ones. Files
and nodes are held to the same in `test_engines.py`.
"""

from __future__ import annotations

from itertools import pairwise
from typing import Any

import numpy as np
import pytest
from asking import Every, K, make_user, questions, sparse_questions, sparse_table_of, table_of, taste_questions
from test_class_steps import LOSSES, steps_of

from privrep.data.table import UserTable
from privrep.privacy.bounds import Bound
from privrep.privacy.contributions import Vectors
from privrep.privacy.grid import MAX_INT64_USERS, Total
from privrep.privacy.moments import RowMoments
from privrep.privacy.protocol import EVERYONE, StepSpec, UserBatch
from privrep.users.memory import InMemoryUsers
from privrep.users.performance import Performance
from privrep.users.summing import sum_blocks

D, USERS = 3, 36
STRANGE = ("huge", "tiny", "mixed", "cancel", "lopsided", "constant", "collinear")
WORLDS = [(kind, dtype) for kind in ("ordinary", "strange") for dtype in (np.float32, np.float64)]


def people(kind: str, dtype: type, targets: int = 1) -> list[tuple[np.ndarray, np.ndarray]]:
    """Users of 1 to 9 rows, ordinary ones or all kinds of strange ones."""
    rng, found = np.random.default_rng(7), []
    for user in range(USERS):
        kinds = STRANGE[user % len(STRANGE)] if kind == "strange" and user % 2 else "normal"
        found.append(make_user(kinds, 1 + user % 9, int(rng.integers(2**32)), None, dtype, targets))
    return found


def total(table: UserTable, every: Every, workers: int = 1) -> dict[str, np.ndarray]:
    sums = InMemoryUsers(table, Performance(workers)).sums(every, every.bounds())
    return {key: one.total for key, one in sums.items()}


def assert_same_however_cut(users: list[Any], every: Every, make_table: Any, dtype: type) -> None:
    whole = total(make_table(users, dtype), every)
    assert all(one.dtype == np.int64 for one in whole.values())
    assert sum(one.any() for one in whole.values()) > len(whole) / 2
    rng = np.random.default_rng(1)
    for workers in (2, 5):
        order = rng.permutation(USERS)
        ends = [0, *np.sort(rng.choice(np.arange(1, USERS), 1 + workers, replace=False)).tolist(), USERS]
        found = {key: np.zeros_like(one) for key, one in whole.items()}
        for start, end in pairwise(ends):
            part = total(make_table([users[user] for user in order[start:end]], dtype), every, workers)
            for key, one in part.items():
                found[key] += one
        wrong = [key for key, one in whole.items() if not np.array_equal(found[key], one)]
        assert not wrong


@pytest.mark.parametrize("targets", [1, 2])
@pytest.mark.parametrize("intercept", [True, False])
@pytest.mark.parametrize(("kind", "dtype"), WORLDS)
def test_of_numbers(kind: str, dtype: type, intercept: bool, targets: int) -> None:
    asked = questions(D, K, intercept, targets)
    assert_same_however_cut(people(kind, dtype, targets), Every(asked), table_of, dtype)


@pytest.mark.parametrize("intercept", [True, False])
@pytest.mark.parametrize(("kind", "dtype"), WORLDS[1:3])
def test_of_sparse_rows(kind: str, dtype: type, intercept: bool) -> None:
    assert_same_however_cut(people(kind, dtype), Every(sparse_questions(D, K, intercept)), sparse_table_of, dtype)


@pytest.mark.parametrize("loss", LOSSES, ids=str)
@pytest.mark.parametrize(("kind", "dtype"), WORLDS[1:3])
def test_of_classes(kind: str, dtype: type, loss: Any) -> None:
    assert_same_however_cut(people(kind, dtype), Every(steps_of(loss, D, K, True)), table_of, dtype)


def test_of_ratings() -> None:
    rng = np.random.default_rng(2)
    users = []
    for user in range(USERS):
        items = rng.permutation(D)[: 1 + user % D]
        users.append((np.eye(D)[items], rng.normal(size=len(items))))
    assert_same_however_cut(users, Every(taste_questions(D, 1)), sparse_table_of, np.float64)


class Plain:
    """A step of vectors and of moments."""

    spec = StepSpec()

    def __call__(self, batch: UserBatch) -> dict[str, Any]:
        return {"row": Vectors(batch.X[:, 0]), "moment": RowMoments(batch.X, np.ones(len(batch.X)))}


PLAIN = {"row": Bound(0.1, D), "moment": Bound(0.3, D * D, acute=True)}


@pytest.mark.parametrize("rows", [1, 7, 10_000])
def test_the_size_of_blocks_changes_nothing(rows: int) -> None:
    table = table_of(people("strange", np.float64), np.float64)
    one, other = (sum_blocks(table.blocks(most), Plain(), PLAIN, Performance(2), EVERYONE) for most in (rows, 10_000))
    assert all(np.array_equal(one[key].total, other[key].total) for key in PLAIN)


def test_more_users_than_fit_int64_are_added_up_all_the_same() -> None:
    """In Python's integers, and released as the same numbers."""
    most = 2**62
    small, large = Total(2), Total(2)
    for part in ([most, -3], [most // 2 - 5, 4]):
        small.add(np.array(part), 1)
        large.add(np.array(part), MAX_INT64_USERS)
    assert large.integers.dtype == object
    assert large.integers.tolist() == small.integers.tolist() == [most + most // 2 - 5, 1]
    large.add(np.array([most, 0]), 1)
    assert large.integers[0] == 2 * most + most // 2 - 5 > 2**63
    assert np.array_equal((small.integers + np.array([7, 7])).astype(float), np.array([most + most // 2 + 2, 8.0]))
