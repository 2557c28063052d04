"""Sketches tell the same people from others, in memory of one size, and hold no id."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from privrep.privacy.people import SIZE, Sketch

SALT = "a salt"


def sketch(ids: object, salt: str = SALT) -> Sketch:
    return Sketch.of_ids(np.asarray(ids), salt)


@given(st.sets(st.integers(0, 10**6), max_size=300), st.sets(st.integers(0, 10**6), max_size=300))
def test_small_groups_are_compared_exactly(some: set[int], others: set[int]) -> None:
    found = sketch(sorted(some)).estimate_part_in(sketch(sorted(others)))
    assert found == (len(some & others) / len(some) if some else 0.0)


@pytest.mark.parametrize("part", [0.0, 0.25, 0.5, 1.0])
def test_large_groups_are_compared_to_a_few_percent(part: float) -> None:
    """The part is a mean of at least SIZE/2 draws: five standard deviations are under 0.12. Ids are fixed."""
    ids = np.arange(100_000)
    other = ids + round((1 - part) * len(ids))
    assert sketch(ids).estimate_part_in(sketch(other)) == pytest.approx(part, abs=0.12)
    assert len(sketch(ids).hashes) == SIZE
    assert sketch(ids).count == len(ids)


def test_a_part_of_the_people_is_found_in_all_of_them() -> None:
    everyone, some = sketch(np.arange(50_000)), sketch(np.arange(0, 50_000, 100))
    assert some.estimate_part_in(everyone) == 1.0
    assert everyone.estimate_part_in(some) < 0.05


def test_merging_is_the_sketch_of_all() -> None:
    one, other = np.arange(0, 5_000), np.arange(3_000, 9_000)
    assert np.array_equal(sketch(one).merge(sketch(other)).hashes, sketch(np.arange(9_000)).hashes)


@pytest.mark.parametrize("given", [[1, 2, 30], ["1", "2", "30"], np.array([1, 2, 30], np.uint8), [1.0, 2.0, 30.0]])
def test_the_same_people_are_known_in_numbers_and_in_text(given: object) -> None:
    assert np.array_equal(sketch(given).hashes, sketch(np.array([30, 2, 1, 1])).hashes)


@pytest.mark.parametrize("other", [["01", "2", "30"], ["1 ", "2", "30"], ["a", "b", "c"]])
def test_other_texts_are_other_people(other: list[str]) -> None:
    assert sketch(other).estimate_part_in(sketch([1, 2, 30])) < 1.0


def test_hashes_of_one_salt_say_nothing_under_another() -> None:
    assert sketch(range(1_000)).estimate_part_in(sketch(range(1_000), "another salt")) == 0.0


def test_nobody_is_in_nobody() -> None:
    nobody = sketch(np.array([], dtype=np.int64))
    assert nobody.count == 0
    assert nobody.estimate_part_in(sketch([1])) == sketch([1]).estimate_part_in(nobody) == 0.0
