"""Sums on the grid are exact: compared with Python's integers, which have no end and do not round."""

from __future__ import annotations

import math
from collections.abc import Iterable
from fractions import Fraction
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from privrep.errors import BudgetExceeded
from privrep.privacy import grid
from privrep.privacy.bounds import MAX_SIZE, Bound, BoundedSum
from privrep.privacy.calibration import Query
from privrep.privacy.grid import (
    MAX_INT64_USERS,
    PORTION,
    Total,
    add_rounded,
    as_integers,
    count_rounded,
    grid_step,
    measure_rounding,
    root_step,
    round_total,
    round_weighted,
)
from privrep.privacy.ledger import Budget, Ledger
from privrep.privacy.noise import simulated_noise
from privrep.privacy.release import release

seeds = st.integers(0, 2**32 - 1)
bounds = st.floats(2.0**-400, 2.0**500)
LONGEST = 2**37  # steps of a contribution, but for rounding: the module's guarantee rests on it


def add(rows: Iterable[Iterable[int]]) -> list[int]:
    """Return sums of columns in Python's integers."""
    return [sum(column) for column in zip(*rows, strict=True)]


def to_nearest(value: float, weight: float, step: float) -> int:
    """Return a weighted value in whole steps, rounded to the nearest; ties to even, as `round` does."""
    return round(Fraction(value * (weight / step)))


# The step


@given(bounds)
def test_the_step_is_a_power_of_two_with_a_root_and_far_below_the_bound(bound: float) -> None:
    step = grid_step(bound)
    assert math.frexp(step)[0] == 0.5
    assert 2**35 <= Fraction(bound) / Fraction(step) < 2**37
    assert Fraction(root_step(step)) ** 2 == Fraction(step)


@pytest.mark.parametrize("bound", [2.0**-400, 2.0**-120, 1e-3, 0.5, 1.0, 1.5, math.sqrt(2.0), 2.0, 1e9, 2.0**500])
def test_a_step_squared_is_the_next_power_of_four(bound: float) -> None:
    steps = [grid_step(bound * factor) for factor in (1.0, 2.0, 4.0)]
    assert steps[2] == 4 * steps[0]
    assert steps[1] in (steps[0], steps[2])
    assert [root_step(step) ** 2 for step in steps] == steps


@pytest.mark.parametrize("size", [1, 2, 3, 1000, MAX_SIZE])
def test_rounding_is_half_a_step_in_each_coordinate_and_a_thousandth_more(size: int) -> None:
    step = grid_step(1.0)
    assert measure_rounding(size, step) == pytest.approx(math.sqrt(size) * step / 2, rel=2.0**-9)
    assert measure_rounding(size, step) >= math.sqrt(size) * step / 2


# Rounding and adding


@given(st.integers(1, 9), st.integers(1, 6), st.sampled_from(["f8", "f4"]), bounds, seeds)
def test_every_number_is_rounded_to_the_nearest_step_and_sums_are_exact(
    users: int, size: int, dtype: str, bound: float, seed: int
) -> None:
    rng, step = np.random.default_rng(seed), grid_step(bound)
    magnitude = 1.0 if dtype == "f4" else bound
    values = (rng.normal(size=(users, size)) * 2.0 ** rng.integers(-40, 1, (users, 1)) * magnitude).astype(dtype)
    weights = rng.uniform(0, bound / magnitude, users)
    wanted = [
        [to_nearest(float(v), weight, step) for v in row] for row, weight in zip(values, weights.tolist(), strict=True)
    ]
    total = add_rounded(values, weights, step)
    assert total.dtype == np.int64
    assert total.tolist() == add(wanted)
    assert round_weighted(values, (weights / step)[:, None]).astype(np.int64).tolist() == wanted


def test_numbers_on_the_grid_are_not_moved_and_others_by_half_a_step_at_most() -> None:
    step = grid_step(3.0)
    values = np.random.default_rng(0).uniform(-3, 3, 1000)
    whole = add_rounded(values[None], np.ones(1), step)
    assert np.abs(whole * step - values).max() <= step / 2
    assert np.array_equal(add_rounded((whole * step)[None], np.ones(1), step), whole)
    assert np.array_equal(round_total(values, step), whole)


def test_more_users_than_float64_adds_up_exactly_are_added_up_exactly() -> None:
    """All are as long as can be, odd and of one sign: their sum takes 56 bits, three more than float64 has."""
    users = 16 * PORTION + 3
    numbers = np.full((users, 2), LONGEST - 1) - np.arange(2 * users).reshape(users, 2) % 101 * 2
    step = grid_step(float(2**10))
    wanted = [sum(column) for column in numbers.T.tolist()]
    assert min(wanted) > 2**55
    assert wanted != [int(sum(column, 0.0)) for column in numbers.T.astype(np.float64).tolist()]  # float64 cannot
    assert add_rounded(numbers * step, np.ones(users), step).tolist() == wanted
    assert add_rounded(numbers * (step / 4), np.full(users, 4.0), step).tolist() == wanted


@pytest.mark.parametrize("shape", [(5, 7), (1, 70_001), (70_001, 1), (9, 3000)])
@pytest.mark.parametrize("cache", [1, 6, 1 << 16])
def test_the_sum_does_not_depend_on_how_numbers_are_cut(
    shape: tuple[int, int], cache: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    if cache * 10_000 < math.prod(shape):
        shape = (shape[0] % 100 + 1, shape[1] % 100 + 1)
    rng = np.random.default_rng(0)
    values, weights = rng.normal(size=shape), rng.uniform(0.1, 1, shape[0])
    step = grid_step(8.0)
    wanted = round_weighted(values, (weights / step)[:, None]).astype(np.int64).sum(axis=0)
    order = rng.permutation(shape[0])
    for portion in (PORTION, 3):
        monkeypatch.setattr(grid, "_IN_CACHE", cache)
        monkeypatch.setattr(grid, "PORTION", portion)
        assert np.array_equal(add_rounded(values, weights, step), wanted)
        assert np.array_equal(add_rounded(values[order], weights[order], step), wanted)


def test_users_of_weight_zero_may_have_any_numbers() -> None:
    values = np.array([[1.0, 2.0], [np.nan, np.inf], [3.0, -1.0]])
    with np.errstate(all="raise"):
        assert add_rounded(values, np.array([1.0, 0.0, 1.0]), 1.0).tolist() == [4, 1]


@given(st.lists(st.tuples(st.integers(0, 4), st.integers(-LONGEST, LONGEST)), max_size=30), st.booleans())
def test_counts_are_exact_however_long(counted: list[tuple[int, int]], many: bool) -> None:
    counted = counted * 40_000 if many and len(counted) in (1, 2) else counted
    places, values = ([pair[i] for pair in counted] for i in (0, 1))
    wanted = [0] * 5
    for place, value in counted:
        wanted[place] += value
    found = count_rounded(np.array(places, np.int64), np.array(values, np.float64), 5)
    assert found.dtype == np.int64
    assert found.tolist() == wanted


def test_counts_too_large_for_float64_are_cut_into_two_parts() -> None:
    many = 1 << 18
    values = np.where(np.arange(many) % 3 == 0, -(LONGEST - 1), LONGEST - 1).astype(np.float64)
    values[::2] -= 2.0
    wanted = sum(int(v) for v in values.tolist())
    assert abs(wanted) > 2**53
    assert wanted % 2 == 0
    assert count_rounded(np.zeros(many, np.int64), values, 1).tolist() == [wanted]
    assert count_rounded(np.zeros(many - 1, np.int64), values[1:], 1).tolist() == [wanted - int(values[0])]


@pytest.mark.parametrize("value", [np.nan, np.inf, -np.inf, 2.0**53 + 2, -(2.0**60), 1e300])
def test_a_sum_that_float64_may_not_hold_exactly_is_refused(value: float) -> None:
    with pytest.raises(ArithmeticError, match="nothing was released"):
        as_integers(np.array([0.0, value]))
    with np.errstate(all="ignore"), pytest.raises(ArithmeticError, match="nothing was released"):
        count_rounded(np.array([0, 0]), np.array([0.0, value * 2.0**20]), 1)
    with pytest.raises(ArithmeticError, match="nothing was released"):
        round_total(np.array([0.0, value * 4.0**10]), 1.0)


def test_the_largest_sums_that_are_exact_are_not_refused() -> None:
    assert as_integers(np.array([2.0**53, -(2.0**53)])).tolist() == [2**53, -(2**53)]
    assert as_integers(np.zeros(0)).tolist() == []
    largest = float(np.nextafter(2.0**62, 0))
    assert round_total(np.array([largest, -largest]), 1.0).tolist() == [int(largest), -int(largest)]


# Totals of very many users


def test_a_total_of_more_users_than_fit_64_bits_goes_on_in_pythons_integers() -> None:
    part, total = np.array([2**62 - 1, -(2**62 - 3)]), Total(2)
    for parts in range(1, 9):
        total.add(part, MAX_INT64_USERS // 2)
        assert (total.integers.dtype == object) == (parts > 2)
        if parts == 1 or parts > 2:  # as long as two halves may be: in truth all of them fit 63 bits
            assert total.integers.tolist() == [parts * (2**62 - 1), -parts * (2**62 - 3)]
    assert all(isinstance(number, int) for number in total.integers.tolist())


def test_as_many_users_as_int64_takes_fit_it_however_long_they_are() -> None:
    """The reach of one user in steps, times all of them, is below 2^63, at bounds and sizes of every kind."""
    for norm in (1.0, 1.9999999, 2.0, 3.9999999, 2.0**-400, 2.0**500):
        for size in (1, MAX_SIZE):
            bound = Bound(norm, size)
            assert Fraction(bound.reach) / Fraction(bound.step) * MAX_INT64_USERS < 2**63
            assert Fraction(bound.reach) / Fraction(bound.step) * PORTION < 2**53


@pytest.mark.parametrize("size", [1, 40])
def test_a_total_in_pythons_integers_gives_the_same_release(size: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """To the last bit, and far beyond 2^53, where numbers are rounded once more when they are posted."""
    asked = {"s": Query(Bound(1.0, size), 0.25 * Budget(2.0, 1e-6).mu ** 2)}
    rng = np.random.default_rng(0)
    parts = [rng.integers(-(2**60), 2**60, size) for _ in range(4)]

    def run(most: int) -> tuple[Any, np.ndarray]:
        monkeypatch.setattr(grid, "MAX_INT64_USERS", most)
        total = Total(size)
        for part in parts:
            total.add(part, 100)
        summed = BoundedSum(total.integers, asked["s"].bound)
        ledger = Ledger(Budget(2.0, 1e-6), seeded=True)
        released = release({"s": summed}, asked, ledger, simulated_noise(1), "page")["s"]
        with pytest.raises(BudgetExceeded):
            release({"s": summed}, {"s": Query(Bound(1.0, size), 1e9)}, ledger, simulated_noise(1), "other")
        return total.integers.dtype, np.stack([released.value, summed.exact_numbers])

    (first, plain), (second, python) = run(400), run(399)
    assert (first, second) == (np.int64, object)
    assert plain.dtype == python.dtype == np.float64
    assert plain.tobytes() == python.tobytes()
