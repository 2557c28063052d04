"""Which group a user is in is a public function of its id, whatever array it comes in and whoever stands beside it."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from scipy.stats import chi2

from privrep.errors import InputError
from privrep.privacy.groups import Group

ALARM = 1e-6
IDS = st.one_of(
    st.lists(st.integers(-(2**63), 2**63 - 1), min_size=1),
    st.lists(st.integers(0, 2**64 - 1), min_size=1),
    st.lists(st.text(), min_size=1),
    st.lists(st.floats(allow_nan=False), min_size=1),
    st.lists(st.one_of(st.integers(), st.text(), st.tuples(st.integers(), st.text())), min_size=1),
)


def column(ids: Sequence[Any]) -> np.ndarray:
    """As they are, nothing converted: an array of objects."""
    array = np.empty(len(ids), dtype=object)
    array[:] = ids
    return array


def groups_of(ids: Any, split: str = "rounds", count: int = 7) -> np.ndarray:
    """The group of each id, after checking that it is in exactly one."""
    members = np.stack([Group(split, index, count).members(ids) for index in range(count)])
    assert members.dtype == bool
    assert (members.sum(axis=0) == 1).all()
    return members.argmax(axis=0)


@given(IDS, st.text(), st.integers(1, 9))
def test_every_user_is_in_one_group_whoever_stands_beside_it(ids: list[Any], split: str, count: int) -> None:
    together = groups_of(column(ids), split, count)
    for place in range(min(len(ids), 5)):
        assert groups_of(column([ids[place]]), split, count) == [together[place]]
    assert np.array_equal(groups_of(column(ids[::-1]), split, count), together[::-1])


@pytest.mark.parametrize(
    "dtype", [np.int8, np.uint8, np.int16, np.int32, np.uint32, np.int64, np.uint64, object, float]
)
def test_a_number_is_in_the_same_group_whatever_its_type(dtype: type) -> None:
    wanted = groups_of(list(range(128)))
    assert np.array_equal(groups_of(np.arange(128).astype(dtype)), wanted)
    assert np.array_equal(groups_of(column([np.float32(i) for i in range(128)])), wanted)


def test_a_missing_id_beside_them_moves_no_one() -> None:
    """pandas turns a column of integers in which one is missing into floats."""
    assert np.array_equal(groups_of(np.array([*range(-50, 50), np.nan]))[:-1], groups_of(np.arange(-50, 50)))


@pytest.mark.parametrize("ids", [["a", "bc", "déf", ""], ["0", "1"]])
def test_a_text_is_in_the_same_group_in_any_kind_of_array(ids: list[str]) -> None:
    wanted = groups_of(column(ids))
    assert np.array_equal(groups_of(np.array(ids)), wanted)
    assert np.array_equal(groups_of(np.array([*ids, "x" * 100]))[:-1], wanted)
    assert np.array_equal(groups_of(ids), wanted)


def test_the_groups_are_these_forever() -> None:
    """A run that is resumed after an upgrade must find every user where it was."""
    assert groups_of(np.array([0, 1, 2, -1, 2**62])).tolist() == [5, 3, 2, 4, 6]
    assert groups_of(np.array(["", "a", "user-17", "é"])).tolist() == [3, 1, 5, 4]
    assert groups_of(np.array([0.5, 1e300])).tolist() == [0, 6]


@pytest.mark.parametrize("ids", [np.arange(20_000), np.arange(20_000) * 2**32, [f"u{i}" for i in range(20_000)]])
def test_groups_are_of_one_size_and_splits_independent(ids: Any) -> None:
    """Chi-square of the groups of one split, and of the pairs of groups of two; false-alarm rate 1e-6 each."""
    for a, b, cells in ((groups_of(ids), 0, 7), (groups_of(ids), groups_of(ids, "other"), 49)):
        found = np.bincount(a + 7 * b, minlength=cells)
        wanted = len(ids) / cells
        assert ((found - wanted) ** 2 / wanted).sum() < chi2.isf(ALARM, cells - 1)


@pytest.mark.parametrize(("index", "count"), [(-1, 3), (3, 3), (0, 0), (0.5, 2), (0, 2**64), (True, 2)])
def test_a_group_is_one_of_those_that_there_are(index: Any, count: Any) -> None:
    with pytest.raises(InputError, match="a group is one of"):
        Group("rounds", index, count)


def test_an_id_that_has_no_value_is_refused() -> None:
    with pytest.raises(InputError, match="a user id must be"):
        Group("rounds", 0, 2).members(column([object()]))
