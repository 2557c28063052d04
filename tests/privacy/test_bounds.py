"""Clipping: every user's share of a sum is at most the bound, whatever the user holds, and the bound asked for."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, ClassVar

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from clipping import clip_to_numbers
from privrep.data.table import UserTable
from privrep.errors import InputError, PrivrepError
from privrep.privacy.bounds import (
    MAX_USERS,
    NORM_SLACK,
    Bound,
    BoundedSum,
    Contributions,
    UserContributions,
)
from privrep.privacy.columns import SparseColumns
from privrep.privacy.contributions import Counts, CrossMoments, NonNegative, RowMoments, Vectors
from privrep.privacy.kronecker import make_kronecker
from privrep.privacy.protocol import StepSpec, UserBatch
from privrep.users import summing as base
from privrep.users.memory import InMemoryUsers
from privrep.users.performance import Performance

RELATIONS = ("replace-one-user", "add-or-remove-one-user")
any_float = st.floats(allow_nan=True, allow_infinity=True, width=64)


@dataclass(frozen=True)
class FirstRow:
    """A local step that sends a user's first row."""

    spec: ClassVar[StepSpec] = StepSpec()

    def __call__(self, batch: UserBatch) -> dict[str, Contributions]:
        X = batch.X
        return {"row": Vectors(X[:, 0, :])}


def share(contributions: Contributions, bound: Bound) -> np.ndarray:
    """What one user adds to the sum, in units of the bound."""
    with np.errstate(all="ignore"):
        return clip_to_numbers(contributions, bound) / bound.norm


# What is clipped and what is not


def test_below_the_bound_nothing_changes_and_above_only_the_length() -> None:
    vectors = np.array([[0.3, 0.4], [3.0, 4.0], [-30.0, 40.0], [0.0, 0.0]])
    for v, wanted in zip(vectors, [[0.3, 0.4], [0.6, 0.8], [-0.6, 0.8], [0.0, 0.0]], strict=True):
        assert clip_to_numbers(Vectors(v[None]), Bound(1.0, 2)) == pytest.approx(np.array(wanted), rel=1e-11)
    assert clip_to_numbers(Vectors(vectors), Bound(1.0, 2)) == pytest.approx([0.3, 2.0], rel=1e-11)


def test_an_enormous_bound_gives_back_the_plain_sum() -> None:
    vectors = np.random.default_rng(0).normal(size=(50, 7))
    assert clip_to_numbers(Vectors(vectors), Bound(1e9, 7)) == pytest.approx(vectors.sum(axis=0), rel=1e-12)


@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf, 1e200, 1e308])
def test_contributions_that_are_not_finite_count_as_zero(bad: float) -> None:
    with np.errstate(all="ignore"):
        total = clip_to_numbers(Vectors(np.array([[0.3, 0.4], [bad, 0.1], [0.1, 0.0]])), Bound(1.0, 2))
    assert total == pytest.approx([0.4, 0.4], rel=1e-11)


@given(st.lists(any_float, min_size=4, max_size=4), st.floats(1e-60, 1e60))
def test_no_vector_exceeds_its_bound(values: list[float], norm: float) -> None:
    assert np.linalg.norm(share(Vectors(np.array([values])), Bound(norm, 4))) <= 1 + NORM_SLACK / 4


@given(st.lists(any_float, min_size=6, max_size=6), st.sampled_from([2.0**-120, 1e-9, 1.0, 1e20]))
def test_no_cross_moments_exceed_their_bound(values: list[float], norm: float) -> None:
    with np.errstate(all="ignore"):
        moments = CrossMoments(np.array(values).reshape(1, 3, 2), np.array([1 / 6]))
    assert np.linalg.norm(share(moments, Bound(norm, 3))) <= 1 + NORM_SLACK / 4


@pytest.mark.parametrize("exponent", [-1070, -1000, -700, -600, -540, 540, 600, 1000, 1023])
def test_a_bound_is_refused_or_kept_at_every_magnitude(exponent: int) -> None:
    """Squares underflow below 2^-537 and overflow above 2^512: a bound out there cannot be enforced by norms."""
    try:
        bound = Bound(math.ldexp(1.0, exponent), 3)
    except InputError:
        return
    magnitudes = np.ldexp(1.0, np.arange(-1074, 1024, 7))
    for size in magnitudes:
        assert np.linalg.norm(share(Vectors(np.full((1, 3), size)), bound)) <= 1 + NORM_SLACK
        slots = SparseColumns(np.zeros(2, int), np.arange(2), np.full((2, 1), size), np.full((1, 1), size), 2)
        for kind in (
            CrossMoments(np.full((1, 2, 2), size), np.ones(1)),
            RowMoments(np.full((1, 2, 2), size), np.ones(1)),
            NonNegative(np.full((1, 3), size)),
            slots,
        ):
            assert np.linalg.norm(share(kind, bound)) <= 1 + NORM_SLACK


@pytest.mark.parametrize("norm", [2.0**-400, 2.0**-120, 1.0])
def test_products_of_huge_and_tiny_factors_are_kept_at_every_magnitude(norm: float) -> None:
    """The norm of a product of two moments may be as large as a number can be, and the weight that brings it down to
    the bound smaller than a number with all its digits can be."""
    for exponent in range(-300, 300, 1):
        for more in (1.0, 1.2, 1.5, 1.9):
            user = make_kronecker(
                np.full((1, 1, 1), math.sqrt(more) * 2.0**exponent), np.full((1, 1, 1), 2.0**200), np.ones(1)
            )
            assert np.linalg.norm(share(user, Bound(norm, 1, acute=True))) <= 1 + NORM_SLACK / 4


# What is refused


@pytest.mark.parametrize("norm", [0.0, -1.0, math.nan, math.inf])
def test_a_bound_must_be_positive_and_finite(norm: float) -> None:
    with pytest.raises(InputError, match="clipping bound"):
        Bound(norm, 3)


def test_only_acute_contributions_get_an_acute_bound() -> None:
    counts = Counts(np.array([[0], [2]]), 3)
    assert clip_to_numbers(counts, Bound(1.0, 3, acute=True)) == pytest.approx([1.0, 0.0, 1.0])
    for other in (Vectors(np.ones((1, 3))), CrossMoments(np.ones((1, 2, 2)), np.ones(1))):
        with pytest.raises(InputError, match="acute"):
            clip_to_numbers(other, Bound(1.0, 3, acute=True))
        clip_to_numbers(other, Bound(1.0, 3))


def test_a_vector_of_another_size_is_refused() -> None:
    with pytest.raises(InputError, match=r"\(3,\)"):
        clip_to_numbers(Vectors(np.ones((2, 3))), Bound(1.0, 4))
    with pytest.raises(InputError, match="asked for"):
        clip_to_numbers(Counts(np.array([[7]]), 5), Bound(1.0, 5))  # a cell outside the histogram


@dataclass(frozen=True)
class Broken(UserContributions):
    """Contributions that break their contract: a norm too small for what they add up to."""

    acute: bool = False

    def norms(self) -> np.ndarray:
        return np.ones(1)

    def weighted_sum(self, weights: np.ndarray) -> np.ndarray:
        return np.array([np.inf, 1.0])


def test_a_sum_that_is_not_finite_is_never_handed_out() -> None:
    with pytest.raises(ArithmeticError):
        clip_to_numbers(Broken(), Bound(1.0, 2))


def test_counts_that_name_a_cell_twice_are_refused_or_clipped_for_what_they_are() -> None:
    """Two in one cell is a vector of length two, not sqrt 2."""
    try:
        total = clip_to_numbers(Counts(np.array([[1, 1]]), 3), Bound(math.sqrt(2.0), 3, acute=True))
    except PrivrepError:
        return
    assert np.linalg.norm(total) <= math.sqrt(2.0) * (1 + NORM_SLACK)


def test_more_users_than_the_error_analysis_covers_are_refused(
    population: Callable[..., UserTable], monkeypatch: pytest.MonkeyPatch
) -> None:
    table = population(n=20, d=3)
    monkeypatch.setattr(base, "MAX_USERS", 19)
    with pytest.raises(InputError, match="at most 19 users"):
        InMemoryUsers(table, Performance(1)).sums(FirstRow(), {"row": Bound(1.0, 3)})


# What is stated


def test_sensitivities_of_both_relations() -> None:
    slack = 1 + NORM_SLACK
    plain, acute = (BoundedSum(np.zeros(3), Bound(1.5, 3, acute=a)) for a in (False, True))
    assert plain.sensitivity("replace-one-user") == pytest.approx(3.0 * slack, rel=1e-15)
    assert acute.sensitivity("replace-one-user") == pytest.approx(1.5 * math.sqrt(2) * slack, rel=1e-15)
    assert plain.sensitivity("add-or-remove-one-user") == pytest.approx(1.5 * slack, rel=1e-15)
    assert acute.sensitivity("add-or-remove-one-user") == pytest.approx(1.5 * slack, rel=1e-15)


def test_an_unknown_relation_gets_no_smaller_sensitivity_than_the_largest() -> None:
    plain = BoundedSum(np.zeros(3), Bound(1.0, 3))
    try:
        sensitivity = plain.sensitivity("remove-one-row")  # type: ignore[arg-type]
    except PrivrepError:
        return
    assert sensitivity >= plain.sensitivity("replace-one-user")


@given(
    st.lists(st.integers(-1, 9), min_size=2, max_size=2, unique=True),
    st.lists(st.integers(-1, 9), min_size=2, max_size=2, unique=True),
)
def test_replacing_a_user_of_a_histogram_moves_it_by_no_more_than_sqrt_two_bounds(a: list[int], b: list[int]) -> None:
    bound = Bound(math.sqrt(2.0), 10, acute=True)
    sums = [clip_to_numbers(Counts(np.array([cells]), 10), bound) for cells in (a, b)]
    moved = float(np.linalg.norm(sums[0] - sums[1]))
    assert moved <= BoundedSum(sums[0], bound).sensitivity("replace-one-user")


def test_the_float_slack_covers_the_stated_error_of_the_largest_population() -> None:
    """2^-34 of the sum of clipped norms, twice (two neighbouring sums), for as many users as are let in."""
    assert 2 * 2.0**-34 * MAX_USERS <= NORM_SLACK


def test_the_result_depends_neither_on_workers_nor_on_blocks(population: Callable[..., UserTable]) -> None:
    table = population(n=3000, d=5)
    bounds = {"row": Bound(1.0, 5)}
    one, four = (InMemoryUsers(table, Performance(workers)).sums(FirstRow(), bounds)["row"].value for workers in (1, 4))
    assert np.array_equal(one, four)
    first = table.X[table.offsets[:-1]]
    clipped = first / np.maximum(np.linalg.norm(first, axis=1, keepdims=True), 1.0)
    assert one == pytest.approx(clipped.sum(axis=0), rel=1e-10, abs=1e-9)


def test_no_users_no_sum() -> None:
    table = UserTable(np.zeros((0, 3)), np.zeros(0), np.zeros(1, dtype=np.int64), np.zeros(0))
    total = InMemoryUsers(table, Performance(1)).sums(FirstRow(), {"row": Bound(1.0, 3)})["row"].value
    assert np.array_equal(total, np.zeros(3))


@dataclass(frozen=True)
class Lying(UserContributions):
    """Contributions whose norms are not what they say."""

    acute = False
    vectors: np.ndarray
    said: float

    def norms(self) -> Any:
        return np.full(len(self.vectors), self.said)

    def weighted_sum(self, weights: Any) -> Any:
        return weights @ self.vectors


@pytest.mark.parametrize("said", [-1.0, -np.inf, np.nan, -5e-324])
def test_a_norm_that_is_none_counts_as_a_user_who_sends_zeros(said: float) -> None:
    vectors = np.full((3, 2), 1e9)
    assert not clip_to_numbers(Lying(vectors, said), Bound(1.0, 2)).any()
    assert clip_to_numbers(Lying(vectors, 1e10), Bound(1.0, 2)).any()  # one that is a norm counts


def test_a_step_that_sends_more_contributions_than_there_are_users_is_refused() -> None:
    with pytest.raises(InputError, match="sent 3 contributions of 2 users"):
        clip_to_numbers(Vectors(np.ones((3, 2))), Bound(1.0, 2), users=2)
    assert clip_to_numbers(Vectors(np.ones((2, 2))), Bound(1.0, 2), users=2).shape == (2,)
