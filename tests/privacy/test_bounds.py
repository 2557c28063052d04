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
    BATCH_SLACK,
    LEVELS,
    MAX_SIZE,
    MAX_TERMS,
    MAX_USERS,
    NORM_SLACK,
    Bound,
    BoundedSum,
    Contributions,
    UserContributions,
    clip_and_sum,
)
from privrep.privacy.columns import SparseColumns
from privrep.privacy.contributions import Counts, NonNegative, Vectors
from privrep.privacy.grid import grid_step
from privrep.privacy.kronecker import make_kronecker
from privrep.privacy.moments import CrossMoments, RowMoments
from privrep.privacy.protocol import StepSpec, UserBatch
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
    """What one user adds to the sum, in units of how far one may move it."""
    with np.errstate(all="ignore"):
        return clip_to_numbers(contributions, bound) / bound.reach


# What is clipped and what is not


def test_below_the_bound_nothing_changes_and_above_only_the_length() -> None:
    vectors = np.array([[0.3, 0.4], [3.0, 4.0], [-30.0, 40.0], [0.0, 0.0]])
    bound = Bound(1.0, 2)
    for v, wanted in zip(vectors, [[0.3, 0.4], [0.6, 0.8], [-0.6, 0.8], [0.0, 0.0]], strict=True):
        assert clip_to_numbers(Vectors(v[None]), bound) == pytest.approx(np.array(wanted), abs=bound.step)
    assert clip_to_numbers(Vectors(vectors), bound) == pytest.approx([0.3, 2.0], abs=4 * bound.step)


def test_an_enormous_bound_gives_back_the_plain_sum() -> None:
    vectors = np.random.default_rng(0).normal(size=(50, 7))
    bound = Bound(1e9, 7)
    total = clip_to_numbers(Vectors(vectors), bound)
    assert np.array_equal(total, np.rint(vectors / bound.step).sum(axis=0) * bound.step)  # each rounded by itself
    assert np.abs(total - vectors.sum(axis=0)).max() <= 50 * bound.step / 2
    on_the_grid = np.rint(vectors / bound.step) * bound.step
    assert np.array_equal(clip_to_numbers(Vectors(on_the_grid), bound), on_the_grid.sum(axis=0))


@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf, 1e200, 1e308])
def test_contributions_that_are_not_finite_count_as_zero(bad: float) -> None:
    with np.errstate(all="ignore"):
        total = clip_to_numbers(Vectors(np.array([[0.3, 0.4], [bad, 0.1], [0.1, 0.0]])), Bound(1.0, 2))
    assert total == pytest.approx([0.4, 0.4], abs=2 * Bound(1.0, 2).step)


@given(st.lists(any_float, min_size=4, max_size=4), st.floats(1e-60, 1e60))
def test_no_vector_exceeds_its_bound(values: list[float], norm: float) -> None:
    assert np.linalg.norm(share(Vectors(np.array([values])), Bound(norm, 4))) <= 1


@given(st.lists(any_float, min_size=6, max_size=6), st.sampled_from([2.0**-120, 1e-9, 1.0, 1e20]))
def test_no_cross_moments_exceed_their_bound(values: list[float], norm: float) -> None:
    with np.errstate(all="ignore"):
        moments = CrossMoments(np.array(values).reshape(1, 3, 2), np.array([1 / 6]))
    assert np.linalg.norm(share(moments, Bound(norm, 4))) <= 1


@pytest.mark.parametrize("exponent", [-1070, -700, -540, -401, -400, -399, -120, 0, 1, 499, 500, 501, 540, 1023])
def test_a_bound_is_refused_or_kept_at_every_magnitude(exponent: int) -> None:
    """Squares underflow below 2^-537 and overflow above 2^512: a bound out there cannot be enforced by norms."""
    norm = math.ldexp(1.0, exponent)
    if not -400 <= exponent <= 500:
        with pytest.raises(InputError, match="must lie between"):
            Bound(norm, 3)
        return
    magnitudes = np.ldexp(1.0, np.arange(-1074, 1024, 7))
    for size in magnitudes:
        slots = SparseColumns(np.zeros(2, int), np.arange(2), np.full((2, 1), size), np.full((1, 1), size), 2)
        for length, kind in (
            (4, CrossMoments(np.full((1, 2, 2), size), np.ones(1))),
            (4, RowMoments(np.full((1, 2, 2), size), np.ones(1))),
            (3, NonNegative(np.full((1, 3), size))),
            (3, Vectors(np.full((1, 3), size))),
            (3, slots),
        ):
            assert np.linalg.norm(share(kind, Bound(norm, length))) <= 1


@pytest.mark.parametrize("norm", [2.0**-400, 2.0**-120, 1.0])
def test_products_of_huge_and_tiny_factors_are_kept_at_every_magnitude(norm: float) -> None:
    """The norm of a product of two moments may be as large as a number can be, and the weight that brings it down to
    the bound smaller than a number with all its digits can be."""
    for exponent in range(-300, 300, 1):
        for more in (1.0, 1.2, 1.5, 1.9):
            user = make_kronecker(
                np.full((1, 1, 1), math.sqrt(more) * 2.0**exponent), np.full((1, 1, 1), 2.0**200), np.ones(1)
            )
            assert np.linalg.norm(share(user, Bound(norm, 1, acute=True))) <= 1


# What is refused


@pytest.mark.parametrize("norm", [0.0, -1.0, math.nan, math.inf])
def test_a_bound_must_be_positive_and_finite(norm: float) -> None:
    with pytest.raises(InputError, match="clipping bound"):
        Bound(norm, 3)


def test_only_acute_contributions_get_an_acute_bound() -> None:
    counts = Counts(np.array([[0], [2]]), 3)
    assert clip_to_numbers(counts, Bound(1.0, 3, acute=True)) == pytest.approx([1.0, 0.0, 1.0])
    for size, other in ((3, Vectors(np.ones((1, 3)))), (4, CrossMoments(np.ones((1, 2, 2)), np.ones(1)))):
        with pytest.raises(InputError, match="acute"):
            clip_to_numbers(other, Bound(1.0, size, acute=True))
        clip_to_numbers(other, Bound(1.0, size))


def test_a_vector_of_another_size_is_refused() -> None:
    with pytest.raises(InputError, match=r"\(3,\)"):
        clip_to_numbers(Vectors(np.ones((2, 3))), Bound(1.0, 4))
    with pytest.raises(InputError, match="asked for"):
        clip_to_numbers(Counts(np.array([[7]]), 5), Bound(1.0, 5))  # a cell outside the histogram


@dataclass(frozen=True)
class Broken(Vectors):
    """Contributions that break their contract: a norm too small for what they add up to."""

    def norms(self) -> np.ndarray:
        return np.ones(len(self.values))


@pytest.mark.parametrize("value", [np.nan, np.inf, -np.inf, 1e300, 2.0**18])
def test_a_sum_that_is_not_exact_is_never_handed_out(value: float) -> None:
    with np.errstate(all="ignore"), pytest.raises(ArithmeticError, match="nothing was released"):
        clip_to_numbers(Broken(np.array([[value, 1.0]])), Bound(1.0, 2))


@dataclass(frozen=True)
class Adding(Vectors):
    """Contributions that add up numbers, and not whole steps."""

    def grid_sum(self, weights: np.ndarray, step: float) -> Any:
        return weights @ self.values


def test_sums_that_are_not_in_whole_steps_are_refused() -> None:
    with pytest.raises(InputError, match="float64, and not in whole steps"):
        clip_to_numbers(Adding(np.ones((2, 2))), Bound(1.0, 2))


def test_counts_that_name_a_cell_twice_are_refused_or_clipped_for_what_they_are() -> None:
    """Two in one cell is a vector of length two, not sqrt 2."""
    try:
        total = clip_to_numbers(Counts(np.array([[1, 1]]), 3), Bound(math.sqrt(2.0), 3, acute=True))
    except PrivrepError:
        return
    assert np.linalg.norm(total) <= Bound(math.sqrt(2.0), 3, acute=True).reach


# What is stated


@pytest.mark.parametrize("size", [1, 3, 10_000, MAX_SIZE])
def test_sensitivities_of_both_relations(size: int) -> None:
    """The bound, 2^-18 of it for norms and weights, and half a step for rounding every coordinate."""
    reach = 1.5 * (1 + 2.0**-18) + math.sqrt(size) / 2 * 2.0**-36 * (1 + 2.0**-10)
    plain, acute = (BoundedSum(np.zeros(3, np.int64), Bound(1.5, size, acute=a)) for a in (False, True))
    assert plain.bound.reach == acute.bound.reach == pytest.approx(reach, rel=1e-15)
    assert plain.sensitivity("replace-one-user") == pytest.approx(2 * reach, rel=1e-15)
    assert acute.sensitivity("replace-one-user") == pytest.approx(math.sqrt(2) * reach, rel=1e-15)
    assert plain.sensitivity("add-or-remove-one-user") == pytest.approx(reach, rel=1e-15)
    assert acute.sensitivity("add-or-remove-one-user") == pytest.approx(reach, rel=1e-15)


@pytest.mark.parametrize("terms", [1, 7, MAX_TERMS])
def test_the_sensitivity_of_terms_of_a_batch_is_the_same_under_both_relations(terms: int) -> None:
    bound = Bound(1.5, 10_000, terms_per_user=terms)
    wanted = 2 * terms * 1.5 * (1 + 2.0**-9) + 2 * 50 * 2.0**-36 * (1 + 2.0**-10)
    for relation in RELATIONS:
        assert bound.sensitivity(relation) == pytest.approx(wanted, rel=1e-15)  # type: ignore[arg-type]


def test_an_unknown_relation_gets_no_smaller_sensitivity_than_the_largest() -> None:
    plain = BoundedSum(np.zeros(3, np.int64), Bound(1.0, 3))
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
    sums = [BoundedSum(clip_and_sum(Counts(np.array([cells]), 10), bound), bound) for cells in (a, b)]
    moved = float(np.linalg.norm(sums[0].exact_numbers - sums[1].exact_numbers))
    assert moved <= sums[0].sensitivity("replace-one-user")


def test_the_slacks_cover_the_errors_that_contracts_allow() -> None:
    """A norm may be too small by 2^-20, rounding may move by 2^-20 of the bound more, and terms err by 2^-34 each."""
    assert (1 - 2.0**-20) * (1 + 2.0**-19) >= 1
    assert NORM_SLACK > 2.0**-19 + 2.0**-20
    assert 2.0**-34 * MAX_TERMS <= 3 / 8 * BATCH_SLACK
    assert 2 * 2.0**-19 + 2 * 3 / 8 * BATCH_SLACK <= 2 * BATCH_SLACK
    assert MAX_USERS * LEVELS == 2**60


def just_above_the_middle(whole: int, size: int, length: Callable[[float], float]) -> tuple[RowMoments, Bound]:
    """Return a user whose weighted row has `whole` and a half in every entry, in roots of a step, and the bound.

    `length` is what a user is clipped to by a bound of this norm.
    """
    wanted = size * (whole + 0.5) ** 2 * (1 + 2.0**-27) * grid_step(1.0)
    norm = wanted
    for _ in range(60):
        norm += wanted - length(norm)
    return RowMoments(np.ones((1, 1, size)), np.ones(1)), Bound(norm, size * size, acute=True)


@pytest.mark.parametrize("size", [2, 64, 256])
@pytest.mark.parametrize("shortened", [False, True], ids=["clipped to the bound", "clipped to less"])
def test_rounding_rows_makes_no_moments_longer_than_the_reach(size: int, shortened: bool) -> None:
    """All entries of a row are rounded up. So moments that were clipped to the bound itself would be longer."""

    def length(norm: float) -> float:
        bound = Bound(norm, size * size)
        moved = RowMoments(np.ones((1, 1, size)), np.ones(1)).roundings(norm, bound.step)
        return norm - max(float(np.max(moved)) - (bound.reach - norm * (1 + NORM_SLACK)), 0.0) * shortened

    whole = math.isqrt(2**35 * 3 // 2 // size)
    user, bound = just_above_the_middle(whole, size, length)
    assert bound.step == grid_step(1.0)
    found, up = clip_and_sum(user, bound), (whole + 1) ** 2
    assert np.linalg.norm(found * bound.step) <= bound.reach
    longer = size * up * bound.step
    if shortened:  # rounding takes almost all of the room that it was given
        assert (found == up).all()
        assert bound.norm * (1 - 2.0**-22) < longer <= bound.reach
    else:  # this would have been too long
        assert (found < up).all()
        assert longer > bound.reach


def test_the_result_depends_neither_on_workers_nor_on_blocks(population: Callable[..., UserTable]) -> None:
    table = population(n=3000, d=5)
    bounds = {"row": Bound(1.0, 5)}
    one, four = (
        InMemoryUsers(table, Performance(workers)).sums(FirstRow(), bounds)["row"].exact_numbers for workers in (1, 4)
    )
    assert np.array_equal(one, four)
    first = table.X[table.offsets[:-1]]
    clipped = first / np.maximum(np.linalg.norm(first, axis=1, keepdims=True), 1.0)
    assert one == pytest.approx(clipped.sum(axis=0), abs=3000 * bounds["row"].step)


def test_no_users_no_sum() -> None:
    table = UserTable(np.zeros((0, 3)), np.zeros(0), np.zeros(1, dtype=np.int64), np.zeros(0))
    total = InMemoryUsers(table, Performance(1)).sums(FirstRow(), {"row": Bound(1.0, 3)})["row"].exact_numbers
    assert np.array_equal(total, np.zeros(3))


@dataclass(frozen=True)
class Lying(UserContributions):
    """Contributions whose norms are not what they say."""

    acute = False
    vectors: np.ndarray
    said: float

    def norms(self) -> Any:
        return np.full(len(self.vectors), self.said)

    def roundings(self, norm: float, step: float) -> float:
        return 0.0

    def grid_sum(self, weights: Any, step: float) -> Any:
        return np.rint(weights @ self.vectors / step).astype(np.int64)


@pytest.mark.parametrize("said", [-1.0, -np.inf, np.nan, -5e-324])
def test_a_norm_that_is_none_counts_as_a_user_who_sends_zeros(said: float) -> None:
    vectors = np.full((3, 2), 1e9)
    assert not clip_to_numbers(Lying(vectors, said), Bound(1.0, 2)).any()
    assert clip_to_numbers(Lying(vectors, 1e10), Bound(1.0, 2)).any()  # one that is a norm counts


@dataclass(frozen=True)
class Rounded(Lying):
    """Contributions that say how far rounding moves them."""

    moved: float = 0.0

    def roundings(self, norm: float, step: float) -> float:
        return self.moved


@pytest.mark.parametrize(("moved", "wanted"), [(0.0, 1.0), (0.25, 0.75), (1.0, 0.0), (9.0, 0.0), (np.nan, 0.0)])
def test_users_are_clipped_to_the_bound_less_what_rounding_may_add(moved: float, wanted: float) -> None:
    total = clip_to_numbers(Rounded(np.array([[8.0, 0.0]]), 8.0, moved), Bound(1.0, 2))
    assert total == pytest.approx([wanted, 0.0], abs=4 * Bound(1.0, 2).step)


def test_a_step_that_sends_more_contributions_than_there_are_users_is_refused() -> None:
    with pytest.raises(InputError, match="sent 3 contributions of 2 users"):
        clip_to_numbers(Vectors(np.ones((3, 2))), Bound(1.0, 2), users=2)
    assert clip_to_numbers(Vectors(np.ones((2, 2))), Bound(1.0, 2), users=2).shape == (2,)
