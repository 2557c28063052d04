"""What kinds of contributions say of their rounding holds, and sums of very many users are exact, whatever the kind."""

from __future__ import annotations

from collections.abc import Callable
from fractions import Fraction

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from privrep.privacy.bounds import Bound, Contributions, clip_and_sum
from privrep.privacy.columns import NonNegativeColumns, SparseColumns
from privrep.privacy.contributions import Concatenated, Counts, NonNegative, NormAtMost, Products, Summed, Vectors
from privrep.privacy.grid import grid_step
from privrep.privacy.kronecker import make_kronecker
from privrep.privacy.moments import CrossMoments, RowMoments
from privrep.privacy.products import balance

seeds = st.integers(0, 2**32 - 1)


def exactly(values: np.ndarray) -> np.ndarray:
    """Return numbers as fractions."""
    return np.vectorize(Fraction, otypes=[object])(values.astype(np.float64))


def outer_sum(left: np.ndarray, right: np.ndarray) -> np.ndarray:
    """Return sum_r left_r right_r^T of one user, in fractions."""
    found: np.ndarray = exactly(left).T.dot(exactly(right))
    return found


def make_dense(rng: np.random.Generator) -> dict[str, tuple[Contributions, Callable[[], np.ndarray]]]:
    """Return contributions of one user, and what they stand for, in fractions."""
    m, d, k = (int(n) for n in rng.integers(1, 5, 3))
    rows, left = rng.normal(size=(1, m, d)), rng.normal(size=(1, m, k))
    scale = rng.uniform(0.1, 2, 1)
    if m > 1 and rng.random() < 0.5:  # terms that cancel are rounded more than their sum is long
        rows[0, -1] = -rows[0, :-1].sum(axis=0) * rng.choice([1.0, 0.999])
        left[0, -1] = left[0, 0] * rng.choice([1.0, -1.0])
    values = np.abs(rng.normal(size=(1, 5)))
    factor = Fraction(float(scale[0]))
    user, column = np.zeros(2, np.int64), np.array([0, 2])
    sparse = np.zeros((2, 3))
    sparse[:, column] = values[0, :4].reshape(2, 2).T

    def cross() -> np.ndarray:
        s = exactly(rows[0]).sum(axis=0)[None]
        found: np.ndarray = factor * (s.T.dot(s) - outer_sum(rows[0], rows[0])).ravel()
        return found

    def moments() -> np.ndarray:
        return factor * outer_sum(rows[0], rows[0]).ravel()

    def product() -> np.ndarray:
        return outer_sum(rows[0], left[0]).ravel()

    def kronecker() -> np.ndarray:
        return factor * np.kron(outer_sum(left[0], left[0]), outer_sum(rows[0], rows[0])).ravel()

    def with_tail() -> np.ndarray:
        return exactly(np.append(sparse.ravel(), values[0, 4]))

    vectors, of_rows = Vectors(values), RowMoments(rows, scale)
    products, several = Products(rows, left), make_kronecker(left, rows, scale)
    columns = (user, column, values[0, :4].reshape(2, 2), values[:, 4:], 3)
    return {
        "vectors": (vectors, lambda: exactly(values[0])),
        "non-negative": (NonNegative(values), lambda: exactly(values[0])),
        "counts": (Counts(np.array([[0, 2, -1]]), 3), lambda: exactly(np.array([1.0, 0.0, 1.0]))),
        "row moments": (of_rows, moments),
        "cross moments": (CrossMoments(rows, scale), cross),
        "products": (products, product),
        "kronecker": (several, kronecker),
        "sparse": (SparseColumns(*columns), with_tail),
        "sparse, non-negative": (NonNegativeColumns(*columns), with_tail),
        "norm at most": (NormAtMost(vectors, 0.0), lambda: exactly(np.array([-0.5]))),
        "beside": (Concatenated((products, vectors)), lambda: np.append(product(), exactly(values[0]))),
        "beside, acute": (Concatenated((several, of_rows)), lambda: np.append(kronecker(), moments())),
        "together": (Summed((of_rows, CrossMoments(rows, scale))), lambda: moments() + cross()),
    }


KINDS = tuple(make_dense(np.random.default_rng(0)))


def measure_moved(sent: Contributions, exact: np.ndarray, norm: float, step: float) -> tuple[Fraction, Fraction]:
    """Return how far rounding moves one user clipped to `norm`, and how far it may by `roundings`, both squared."""
    weight = norm / float(sent.norms()[0])
    q = sent.grid_sum(np.array([weight]), step)
    moved = [Fraction(int(n)) * Fraction(step) - Fraction(weight) * c for n, c in zip(q, exact, strict=True)]
    allowed = Fraction(float(np.max(sent.roundings(norm, step)))) + Fraction(norm) / 2**20
    return sum((each * each for each in moved), Fraction(0)), allowed**2


@pytest.mark.parametrize("kind", KINDS)
@given(seeds, st.integers(-30, 30), st.floats(1.0, 4.0))
def test_rounding_moves_no_contribution_farther_than_its_kind_says(
    kind: str, seed: int, exponent: int, factor: float
) -> None:
    sent, dense = make_dense(np.random.default_rng(seed))[kind]
    norm = factor * 2.0**exponent
    moved, allowed = measure_moved(sent, dense(), norm, grid_step(norm))
    assert moved <= allowed


def half_way(size: int, shift: int = 0) -> np.ndarray:
    """Return numbers that lie just above the middle of two whole numbers, (1, 1, size): all are rounded up."""
    return np.full((1, 1, size), (2.0**shift + 0.5) * (1 + 2.0**-40))


WORST: dict[str, Callable[[], tuple[Contributions, np.ndarray]]] = {
    "vectors": lambda: (Vectors(half_way(400, 20)[0]), exactly(half_way(400, 20).ravel())),
    "row moments": lambda: (
        RowMoments(half_way(40, 14), np.ones(1)),
        np.full(1600, exactly(half_way(1, 14)).item() ** 2),
    ),
    "cross moments": lambda: (
        CrossMoments(np.concatenate([half_way(20, 14), -half_way(20, 14)], axis=1), np.ones(1)),
        np.full(400, -2 * exactly(half_way(1, 14)).item() ** 2),
    ),
    "products, long left rows": lambda: (
        Products(half_way(900, 11), np.full((1, 1, 1), 2.0**16 * 1.99)),
        np.full(900, exactly(half_way(1, 11)).item() * Fraction(2.0**16 * 1.99)),
    ),
    "products, long right rows": lambda: (
        Products(np.full((1, 1, 1), 2.0**16 * 0.99), half_way(900, 11)),
        np.full(900, exactly(half_way(1, 11)).item() * Fraction(2.0**16 * 0.99)),
    ),
}


@pytest.mark.parametrize("kind", WORST)
def test_what_kinds_say_of_their_rounding_is_about_what_it_can_be(kind: str) -> None:
    """All numbers are rounded up, and none is moved farther than is said, nor much less far: no bound is idle."""
    sent, exact = WORST[kind]()
    norm = float(sent.norms()[0])
    step = 1.0
    moved, allowed = measure_moved(sent, exact, norm, step)
    said = Fraction(float(np.max(sent.roundings(norm, step))))
    assert said**2 / 16 <= moved <= said**2 <= allowed


def test_rounded_products_of_moments_need_not_be_acute_and_so_count_more_than_they_move() -> None:
    """The root of two times, by the contract of `Contributions`. Here one factor is rounded up in every entry."""
    k, step = 30, 1.0
    entry = (np.ceil(2.0**17 / k) + 0.5) * (1 + 2.0**-40)
    left, right = np.full((1, 1, k), np.sqrt(entry)), np.full((1, 1, 1), np.sqrt(0.99 * 2.0**19))
    sent = make_kronecker(left, right, np.ones(1))
    norm = float(sent.norms()[0])
    exact = np.full(k * k, exactly(left)[0, 0, 0] ** 2 * exactly(right)[0, 0, 0] ** 2)
    moved, _ = measure_moved(sent, exact, norm, step)
    said = Fraction(float(np.max(sent.roundings(norm, step)))) ** 2
    assert said / 2 <= 2 * moved <= said


@given(st.lists(st.tuples(*[st.floats(2.0**-300, 2.0**300)] * 3), min_size=1, max_size=9))
def test_balanced_factors_are_at_most_twice_the_root_of_their_product(lengths: list[tuple[float, ...]]) -> None:
    first, second, weights = (np.array(column) for column in zip(*lengths, strict=True))
    by, other = balance(first, second, weights)
    for a, b, w, p, q in zip(first, second, weights, by, other, strict=True):
        product = Fraction(w) * Fraction(a) * Fraction(b)
        assert Fraction(p) * Fraction(q) == Fraction(w)
        assert (Fraction(a) * Fraction(p)) ** 2 <= 4 * product
        assert (Fraction(b) * Fraction(q)) ** 2 <= 4 * product


# Portions that float64 adds up exactly

FULL = 2.0 ** (37 / 2)  # the length of a row whose moment is as long as a contribution can be, in steps
MANY: dict[str, Callable[[int], Contributions]] = {
    "vectors": lambda users: Vectors(np.full((users, 1), FULL**2)),
    "row moments": lambda users: RowMoments(np.full((users, 1, 1), FULL), np.ones(users)),
    "cross moments, which cancel": lambda users: CrossMoments(np.full((users, 1, 1), FULL), np.ones(users)),
    "cross moments": lambda users: CrossMoments(np.full((users, 2, 1), FULL), np.ones(users)),
    "products, which cancel": lambda users: Products(
        np.full((users, 2, 1), FULL), np.tile([[FULL], [-FULL]], (users, 1, 1))
    ),
    "products": lambda users: Products(np.full((users, 1, 1), FULL), np.full((users, 1, 1), FULL)),
    "kronecker": lambda users: make_kronecker(
        np.full((users, 1, 1), 1.0), np.full((users, 1, 1), FULL), np.ones(users)
    ),
    "sparse": lambda users: SparseColumns(
        np.arange(users), np.zeros(users, np.int64), np.full((users, 1), FULL**2), np.zeros((users, 1)), 1
    ),
    "counts": lambda users: Counts(np.zeros((users, 1), np.int64), 1),
}


@pytest.mark.parametrize("kind", MANY)
def test_many_users_as_long_as_can_be_are_added_up_exactly(kind: str) -> None:
    """Their sum does not fit float64, nor do the terms that cancel in it: it is so many times what one user sends."""
    users, acute = 3 << 16, MANY[kind](1).acute
    sent = MANY[kind](users)
    size = len(sent.grid_sum(np.zeros(users), 1.0))
    bound = Bound(1.9999999, size, acute)  # almost 2^37 steps
    alone, total = (clip_and_sum(MANY[kind](some), bound) for some in (1, users))
    assert total.tolist() == [users * number for number in alone.tolist()]
    assert "cancel" in kind or abs(int(total[0])) > 2**53
