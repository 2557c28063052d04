"""Factored contributions equal the plain computation with one full vector per user."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from privrep.privacy.bounds import MAX_ROWS_PER_SUM, Contributions
from privrep.privacy.contributions import Counts, CrossMoments, Vectors, pack, packed_size, unpack

seeds = st.integers(0, 2**32 - 1)


def dense_moments(rows: np.ndarray, scale: np.ndarray) -> np.ndarray:
    """(users, packed): scale * sum over pairs of different rows of a a'^T, pair by pair, in long double."""
    users, m, d = rows.shape
    A = rows.astype(np.longdouble)
    Z = np.zeros((users, d, d), dtype=np.longdouble)
    for j in range(m):
        for other in range(m):
            if j != other:
                Z += A[:, j, :, None] * A[:, other, None, :]
    return pack(Z * scale[:, None, None].astype(np.longdouble))


def dense_counts(cells: np.ndarray, size: int) -> np.ndarray:
    counts = np.zeros((len(cells), size))
    for u, user in enumerate(cells):
        for cell in user[user >= 0]:
            counts[u, cell] += 1
    return counts


# Packing


@given(st.integers(1, 9), seeds)
def test_packing_is_an_isometry_and_unpacking_undoes_it(d: int, seed: int) -> None:
    rng = np.random.default_rng(seed)
    A, B = (M + M.T for M in rng.normal(size=(2, d, d)))
    assert pack(A).shape == (packed_size(d),)
    assert np.linalg.norm(pack(A)) == pytest.approx(np.linalg.norm(A), rel=1e-14)
    assert pack(A) @ pack(B) == pytest.approx(float((A * B).sum()), rel=1e-12, abs=1e-12)
    assert unpack(pack(A)) == pytest.approx(A, rel=1e-15)
    v = rng.normal(size=packed_size(d))
    assert pack(unpack(v)) == pytest.approx(v, rel=1e-15)
    assert np.array_equal(unpack(v), unpack(v).T)


def test_packing_works_on_stacks() -> None:
    stack = np.random.default_rng(0).normal(size=(3, 4, 4))
    stack = stack + stack.transpose(0, 2, 1)
    assert np.array_equal(pack(stack), np.stack([pack(matrix) for matrix in stack]))


@pytest.mark.parametrize("d", [1, 2, 3, 50, 1000])
def test_the_size_of_a_triangle_gives_back_its_side(d: int) -> None:
    assert unpack(np.zeros(packed_size(d))).shape == (d, d)


# Norms and sums


@given(st.integers(1, 6), st.integers(1, 7), st.integers(1, 5), st.sampled_from(["f8", "f4"]), seeds)
def test_cross_moments_equal_the_sum_over_pairs(users: int, m: int, d: int, dtype: str, seed: int) -> None:
    rng = np.random.default_rng(seed)
    rows = (rng.normal(size=(users, m, d)) * np.exp(rng.normal(size=(users, 1, 1)))).astype(dtype)
    scale, weights = rng.uniform(0.1, 2, users), rng.uniform(0, 1, users)
    moments = CrossMoments(rows, scale)
    dense = dense_moments(rows, scale)
    mass = (rows.astype("f8").sum(axis=1) ** 2).sum(axis=1) + (rows.astype("f8") ** 2).sum(axis=(1, 2))
    exact = np.linalg.norm(dense.astype("f8"), axis=1)
    norms = moments.norms()
    assert (norms >= exact * (1 - 1e-15)).all()
    assert (norms <= np.maximum(exact, scale * mass / 64) + 2e-6 * scale * mass).all()
    assert moments.weighted_sum(weights) == pytest.approx((weights @ dense).astype("f8"), rel=1e-9, abs=1e-9)


def test_cross_moments_of_more_rows_than_one_product_may_add() -> None:
    rng = np.random.default_rng(0)
    rows = rng.normal(size=(1, 2 * MAX_ROWS_PER_SUM + 5, 3))
    moments = CrossMoments(rows, np.array([1e-6]))
    s = rows[0].sum(axis=0)
    Z = 1e-6 * (np.outer(s, s) - rows[0].T @ rows[0])
    assert moments.weighted_sum(np.array([0.5])) == pytest.approx(0.5 * pack(Z), rel=1e-9)
    assert moments.norms()[0] >= np.linalg.norm(Z)


def test_one_row_has_no_pairs() -> None:
    moments = CrossMoments(np.ones((1, 1, 3)), np.array([0.0]))
    assert np.array_equal(moments.weighted_sum(np.ones(1)), np.zeros(6))
    assert moments.norms()[0] == 0.0


@given(st.integers(1, 8), st.integers(1, 20), st.sampled_from(["f8", "f4"]), seeds)
def test_vectors_are_themselves(users: int, size: int, dtype: str, seed: int) -> None:
    rng = np.random.default_rng(seed)
    values = (rng.normal(size=(users, size)) * 10.0 ** rng.integers(-30, 30, (users, 1))).astype(dtype)
    weights = rng.uniform(0, 1, users)
    vectors = Vectors(values)
    exact = np.linalg.norm(values.astype("f8"), axis=1)
    assert vectors.norms() == pytest.approx(exact, rel=1e-10)
    assert (vectors.norms() >= exact * (1 - 1e-13)).all()
    scale = float((weights * exact).sum())
    assert np.linalg.norm(vectors.weighted_sum(weights) - weights @ values.astype("f8")) <= 2.0**-34 * scale


@given(st.integers(1, 8), st.integers(1, 4), seeds)
def test_counts_are_sums_of_unit_vectors(users: int, each: int, seed: int) -> None:
    rng = np.random.default_rng(seed)
    cells = np.stack([rng.permutation(10)[:each] for _ in range(users)])
    cells = np.where(rng.random(cells.shape) < 0.3, -1, cells)
    weights = rng.uniform(0, 1, users)
    counts, dense = Counts(cells, 10), dense_counts(cells, 10)
    assert counts.norms() == pytest.approx(np.linalg.norm(dense, axis=1), rel=1e-15)
    assert counts.weighted_sum(weights) == pytest.approx(weights @ dense, rel=1e-13, abs=1e-300)
    assert counts.weighted_sum(weights).shape == (10,)
    assert counts.weighted_sum(weights).dtype == np.float64


# Promises of the protocol


@pytest.mark.parametrize(
    "spoilt",
    [
        Vectors(np.array([[1.0, 2.0, 3.0], [np.nan, 1.0, np.inf], [4.0, 5.0, 6.0]])),
        CrossMoments(np.stack([np.ones((3, 2)), np.full((3, 2), np.nan), np.ones((3, 2))]), np.ones(3)),
        CrossMoments(np.stack([np.ones((3, 2)), np.full((3, 2), np.inf), np.ones((3, 2))]), np.ones(3)),
    ],
)
def test_a_user_of_weight_zero_is_skipped_whatever_it_holds(spoilt: Contributions) -> None:
    with np.errstate(all="ignore"):
        assert not np.isfinite(spoilt.norms()[1])
        total = spoilt.weighted_sum(np.array([1.0, 0.0, 0.5]))
    assert np.isfinite(total).all()
    assert (total != 0).all()


def test_only_counts_are_acute_and_nobody_can_say_otherwise() -> None:
    cells = Counts(np.zeros((1, 1), dtype=np.int64), 3)
    assert cells.acute
    for other in (Vectors(np.ones((1, 3))), CrossMoments(np.ones((1, 2, 3)), np.ones(1))):
        assert not other.acute
    with pytest.raises(TypeError):
        Vectors(np.ones((1, 3)), acute=True)  # type: ignore[call-arg]


@given(st.integers(2, 6), st.integers(1, 4), seeds)
def test_the_norm_of_cross_moments_bounds_what_cancels(m: int, d: int, seed: int) -> None:
    """Rows that cancel: the norm reported is an upper bound, and no less than 1/64 of the size of the two terms."""
    rng = np.random.default_rng(seed)
    A = rng.normal(size=(1, m, d)) * np.exp(rng.normal(size=(1, m, 1)) * rng.choice([0, 5, 30]))
    A[:, -1] = -A[:, :-1].sum(axis=1) if rng.random() < 0.5 else A[:, 0] * 1e-12
    mass = float((A.sum(axis=1) ** 2).sum() + (A**2).sum())
    norm = CrossMoments(A, np.ones(1)).norms()[0]
    exact = float(np.linalg.norm(dense_moments(A, np.ones(1)).astype("f8")))
    assert norm >= max(exact * (1 - 1e-12), mass / 64 * (1 - 1e-12))
