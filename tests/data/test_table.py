"""Users' rows in flat arrays: gathering, blocks, groups, splits."""

from __future__ import annotations

import numpy as np
import pytest
from experiments.split import split_within_users
from hypothesis import given
from hypothesis import strategies as st

from privrep.data.table import UserTable, factorize, find_users
from privrep.errors import InputError
from privrep.users.summing import clean_rows


@given(st.lists(st.integers(0, 5), min_size=1, max_size=40))
def test_rows_in_any_order_come_back_by_user(users):
    X = np.arange(2.0 * len(users)).reshape(-1, 2)
    table = UserTable.from_rows(X, X[:, 0], users)
    assert table.ids.tolist() == sorted(set(users))
    for i, name in enumerate(table.ids):
        one = table.users(i, i + 1)
        assert np.array_equal(one.X, X[np.array(users) == name])  # in the order they came
        assert np.array_equal(one.y, one.X[:, 0])


@given(st.lists(st.integers(1, 30), min_size=1, max_size=30), st.integers(1, 60))
def test_blocks_are_whole_users_in_order(sizes, most):
    offsets = np.concatenate([[0], np.cumsum(sizes)])
    table = UserTable(np.zeros((offsets[-1], 1)), np.arange(float(offsets[-1])), offsets, np.arange(len(sizes)))
    blocks = list(table.blocks(most))
    assert np.array_equal(np.concatenate([b.y for b in blocks]), table.y)
    assert np.array_equal(np.concatenate([b.ids for b in blocks]), table.ids)
    assert all(b.n_rows <= most or b.n_users == 1 for b in blocks)
    together = [b.n_rows for b in blocks]
    first = [b.sizes[0] for b in blocks]
    assert all(a + b > most for a, b in zip(together[:-1], first[1:], strict=True))  # none could have been larger


def test_groups_of_equal_size_hold_every_user_once():
    table = UserTable(np.arange(12.0)[:, None], np.arange(12.0), np.array([0, 2, 2, 5, 7, 12]), np.arange(5))
    found = {size: positions.tolist() for positions, size in table.positions_by_size()}
    assert found == {2: [0, 3], 3: [2], 5: [4]}
    X, y = table.group(np.array([0, 3]), 2)
    assert X[:, :, 0].tolist() == y.tolist() == [[0, 1], [5, 6]]


def test_ids():
    ids, codes = factorize(["b", "a", "b"])
    assert ids.tolist() == ["a", "b"]
    assert codes.tolist() == [1, 0, 1]
    mixed, codes = factorize([("x", 1), "y", ("x", 1), 3])
    assert [mixed[c] for c in codes] == [("x", 1), "y", ("x", 1), 3]
    assert len(factorize([1, "1", 1])[0]) == 2
    assert len(factorize([True, 2, 2])[0]) == 2
    assert find_users(np.array([3, 1, 2]), np.array([1, 9, 3])).tolist() == [1, -1, 0]
    assert find_users(np.array(["a", "b"], dtype=object), ["b", "zz"]).tolist() == [1, -1]
    assert find_users(np.array([1, 2]), ["1", "2"]).tolist() == [-1, -1]
    with pytest.raises(InputError, match="row 1"):
        factorize([1.0, float("nan")])


def test_float32_stays_and_integers_become_float64():
    assert UserTable.from_rows(np.ones((2, 1), np.float32), np.ones(2, np.float32), [0, 1]).X.dtype == np.float32
    assert UserTable.from_rows(np.ones((2, 1), int), np.ones(2, int), [0, 1]).X.dtype == np.float64


@given(st.lists(st.integers(0, 12), min_size=1, max_size=20), st.floats(0.05, 0.95), st.integers(0, 2**31))
def test_split_within_users(sizes, share, seed):
    offsets = np.concatenate([[0], np.cumsum(sizes)])
    rows = np.arange(float(offsets[-1]))
    table = UserTable(rows[:, None], rows, offsets, np.arange(len(sizes)))
    first, rest = split_within_users(table, share, np.random.default_rng(seed))
    for i, size in enumerate(sizes):
        a, b = first.users(i, i + 1).y, rest.users(i, i + 1).y
        assert len(a) == max(round(share * size), 1 if size else 0)
        assert sorted([*a, *b]) == list(range(offsets[i], offsets[i + 1]))
        assert np.all(np.diff(a) > 0)
        assert np.all(np.diff(b) > 0)


def test_split_is_even_handed_and_refuses_nonsense():
    table = UserTable(np.zeros((40_000, 1)), np.tile(np.arange(4.0), 10_000), np.arange(10_001) * 4, np.arange(10_000))
    first, _ = split_within_users(table, 0.5, np.random.default_rng(0))
    counts = np.bincount(first.y.astype(int))
    assert np.abs(counts - 5000).max() < 5 * 50  # standard deviation 50: false alarm about 2e-6
    with pytest.raises(InputError, match="share"):
        split_within_users(table, 1.0, np.random.default_rng(0))


def test_several_targets():
    X, y, users = np.arange(10.0).reshape(5, 2), np.arange(15.0).reshape(5, 3), [1, 0, 1, 0, 2]
    table = UserTable.from_rows(X, y, users)
    assert table.n_targets == 3
    assert table.y[:, 0].tolist() == [3, 9, 0, 6, 12]
    rows, targets = table.group(np.array([0, 1]), 2)
    assert (rows.shape, targets.shape) == ((2, 2, 2), (2, 2, 3))
    assert targets[1].tolist() == [[0, 1, 2], [6, 7, 8]]
    assert table.users(2, 3).y.tolist() == [[12, 13, 14]]
    first, rest = split_within_users(table, 0.5, np.random.default_rng(0))
    assert sorted([*first.y[:, 2], *rest.y[:, 2]]) == [2, 5, 8, 11, 14]
    assert UserTable.from_rows(X, y[:, 0], users).n_targets == 1
    for wrong in (y[:, :1], y[:4], y[:, :0], y[None], np.float64(1)):
        with pytest.raises(InputError, match="two or more"):
            UserTable.from_rows(X, wrong, users)


def test_users_with_a_target_that_is_not_finite_become_zero_rows():
    X, y = np.ones((3, 2, 4)), np.ones((3, 2, 2))
    y[1, 0, 1] = np.nan
    rows, targets = clean_rows(X, y)
    assert rows.sum(axis=(1, 2)).tolist() == [8, 0, 8]
    assert targets.sum(axis=(1, 2)).tolist() == [4, 0, 4]
