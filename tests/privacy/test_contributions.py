"""Factored contributions equal the plain computation with one full vector per user."""

from __future__ import annotations

from fractions import Fraction

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from clipping import STEP, add_up, clip_to_numbers
from privrep.errors import InputError
from privrep.privacy import sparse_moments
from privrep.privacy.bounds import MAX_ROWS_PER_SUM, Bound, Contributions
from privrep.privacy.columns import SparseColumns
from privrep.privacy.contributions import Concatenated, Counts, NonNegative, Summed, Vectors
from privrep.privacy.grid import grid_step
from privrep.privacy.moments import CrossMoments, RowMoments, pack, packed_size, symmetrise, unpack
from privrep.privacy.sparse_moments import SparseMoments

seeds = st.integers(0, 2**32 - 1)


def choose_step(sent: Contributions, weights: np.ndarray) -> float:
    """Return the step of the bound that the longest of the weighted contributions just keeps."""
    return grid_step(float((weights * sent.norms()).max(initial=0.0)) or 1.0)


def moved_at_most(sent: Contributions, weights: np.ndarray, step: float) -> float:
    """Return how far rounding may move this sum, by what its kind says of every user."""
    norm = float((weights * sent.norms()).max(initial=0.0))
    each = np.broadcast_to(sent.roundings(norm, step), weights.shape)
    return float(each[weights > 0].sum()) + np.count_nonzero(weights) * 2.0**-20 * norm


def dense_moments(rows: np.ndarray, scale: np.ndarray) -> np.ndarray:
    """(users, d * d): scale * sum over pairs of different rows of a a'^T, pair by pair, in long double."""
    users, m, d = rows.shape
    A = rows.astype(np.longdouble)
    Z = np.zeros((users, d, d), dtype=np.longdouble)
    for j in range(m):
        for other in range(m):
            if j != other:
                Z += A[:, j, :, None] * A[:, other, None, :]
    return (Z * scale[:, None, None].astype(np.longdouble)).reshape(users, d * d)


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


@given(st.integers(1, 9), seeds)
def test_whole_matrices_that_are_symmetrised_have_as_little_noise_as_packed_ones(d: int, seed: int) -> None:
    """They are the mean of a matrix and its transpose: the nearest symmetric matrix to what was released."""
    rng = np.random.default_rng(seed)
    noise = rng.normal(size=d * d)
    found = symmetrise(noise)
    assert found.shape == (d, d)
    assert np.array_equal(found, found.T)
    assert found == pytest.approx((noise.reshape(d, d) + noise.reshape(d, d).T) / 2, rel=1e-15)
    symmetric = found + found.T
    assert np.array_equal(symmetrise(symmetric.ravel()), symmetric)


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
    step = choose_step(moments, weights)
    total = add_up(moments, weights, step)
    assert total.shape == (d * d,)
    assert np.array_equal(total.reshape(d, d), total.reshape(d, d).T)
    assert np.linalg.norm(total - (weights @ dense).astype("f8")) <= moved_at_most(moments, weights, step)


def test_cross_moments_of_more_rows_than_one_product_may_add() -> None:
    rng = np.random.default_rng(0)
    rows = rng.normal(size=(1, 2 * MAX_ROWS_PER_SUM + 5, 3))
    moments = CrossMoments(rows, np.array([1e-6]))
    s = rows[0].sum(axis=0)
    Z = 1e-6 * (np.outer(s, s) - rows[0].T @ rows[0])
    weights = np.array([0.5])
    step = choose_step(moments, weights)
    moved = np.linalg.norm(add_up(moments, weights, step) - 0.5 * Z.ravel())
    assert moved <= moved_at_most(moments, weights, step) <= 2e-2 * np.linalg.norm(Z)
    assert moments.norms()[0] >= np.linalg.norm(Z)


@pytest.mark.parametrize("kind", [RowMoments, CrossMoments])
def test_moments_of_rows_on_the_grid_are_exact_however_many(kind: type) -> None:
    """Rows that are whole in roots of a step: nothing is rounded, and more rows are added up than one product may."""
    whole = np.random.default_rng(0).integers(-9, 10, (3, 2 * MAX_ROWS_PER_SUM + 5, 3))
    squares = np.einsum("uma,umb->uab", whole, whole)
    if kind is CrossMoments:
        sums = whole.sum(axis=1)
        squares = sums[:, :, None] * sums[:, None, :] - squares
    sent = kind(whole * 2.0**-22, np.ones(3))
    assert sent.grid_sum(np.ones(3), 2.0**-44).tolist() == squares.sum(axis=0).ravel().tolist()
    assert sent.grid_sum(np.array([1.0, 0.0, 4.0]), 2.0**-44).tolist() == (squares[0] + 4 * squares[2]).ravel().tolist()


def test_one_row_has_no_pairs() -> None:
    moments = CrossMoments(np.ones((1, 1, 3)), np.array([0.0]))
    assert np.array_equal(add_up(moments, np.ones(1)), np.zeros(9))
    assert moments.norms()[0] == 0.0
    others = CrossMoments(np.random.default_rng(0).normal(size=(40, 1, 3)), np.ones(40))
    assert not add_up(others, np.random.default_rng(1).random(40)).any()  # a row's square is rounded as its sum's is


@given(st.integers(1, 8), st.integers(1, 20), st.sampled_from(["f8", "f4"]), seeds)
def test_vectors_are_themselves(users: int, size: int, dtype: str, seed: int) -> None:
    rng = np.random.default_rng(seed)
    values = (rng.normal(size=(users, size)) * 10.0 ** rng.integers(-30, 30, (users, 1))).astype(dtype)
    weights = rng.uniform(0, 1, users)
    vectors = Vectors(values)
    exact = np.linalg.norm(values.astype("f8"), axis=1)
    assert vectors.norms() == pytest.approx(exact, rel=1e-10)
    assert (vectors.norms() >= exact * (1 - 1e-13)).all()
    step = choose_step(vectors, weights)
    whole = np.rint(weights[:, None] * values.astype(np.longdouble) / np.longdouble(step))
    found = add_up(vectors, weights, step)
    assert np.abs(found / step - whole.sum(axis=0)).max() <= users * 2.0**-14  # one where a middle is hit
    assert np.linalg.norm(found - weights @ values.astype("f8")) <= users * vectors.roundings(1.0, step)


@given(st.integers(1, 8), st.integers(1, 4), seeds)
def test_counts_are_sums_of_unit_vectors(users: int, each: int, seed: int) -> None:
    rng = np.random.default_rng(seed)
    cells = np.stack([rng.permutation(10)[:each] for _ in range(users)])
    cells = np.where(rng.random(cells.shape) < 0.3, -1, cells)
    weights = rng.uniform(0, 1, users)
    counts, dense = Counts(cells, 10), dense_counts(cells, 10)
    assert counts.norms() == pytest.approx(np.linalg.norm(dense, axis=1), rel=1e-15)
    assert np.array_equal(add_up(counts, weights), np.rint(weights / STEP) @ dense * STEP)
    assert counts.grid_sum(weights, STEP).shape == (10,)
    assert counts.grid_sum(weights, STEP).dtype == np.int64


# The kinds made of others, and those that are mostly zero


def some_slots(rng: np.random.Generator, users: int, d: int, k: int, p: int) -> tuple[SparseColumns, np.ndarray]:
    """Slots of random users and columns, and the same as one full vector per user, in long double."""
    user, column = np.nonzero(rng.random((users, d)) < 0.4)
    values = rng.normal(size=(len(user), k)) * 10.0 ** rng.integers(-20, 20, (len(user), 1))
    tail = rng.normal(size=(users, p)) * 10.0 ** rng.integers(-20, 20, (users, 1))
    full = np.zeros((users, k, d), dtype=np.longdouble)
    full[user, :, column] = values
    return SparseColumns(user, column, values, tail, d), np.concatenate([full.reshape(users, -1), tail], axis=1)


def dense_rows(rows: np.ndarray, scale: np.ndarray) -> np.ndarray:
    A = rows.astype(np.longdouble)
    return (np.einsum("uma,umb->uab", A, A) * scale[:, None, None]).reshape(len(A), -1)


def some_of_every_kind(rng: np.random.Generator, users: int) -> dict[str, tuple[Contributions, np.ndarray]]:
    """Contributions, and the same as one full vector per user."""
    rows, scale = (
        rng.normal(size=(users, 4, 3)) * np.exp(3 * rng.normal(size=(users, 1, 1))),
        rng.uniform(0.1, 2, users),
    )
    values = rng.normal(size=(users, 9))
    counts = np.stack([rng.permutation(6)[:2] for _ in range(users)])
    moments, products = RowMoments(rows, scale), CrossMoments(rows, scale)
    positive, slots = NonNegative(np.abs(values)), some_slots(rng, users, 5, 2, 3)
    histogram = Counts(counts, 6)
    full = {"row": dense_rows(rows, scale), "cross": dense_moments(rows, scale), "counts": dense_counts(counts, 6)}
    return {
        "row moments": (moments, full["row"]),
        "cross moments": (products, full["cross"]),
        "vectors": (Vectors(values), values),
        "slots": slots,
        "non-negative": (positive, np.abs(values)),
        "beside": (
            Concatenated((moments, positive, histogram)),
            np.hstack([full["row"], np.abs(values), full["counts"]]),
        ),
        "beside, others": (Concatenated((slots[0], products)), np.hstack([slots[1], full["cross"]])),
        "together": (Summed((products, Vectors(values), moments)), full["cross"] + values + full["row"]),
    }


KINDS = tuple(some_of_every_kind(np.random.default_rng(0), 1))


@pytest.mark.parametrize("kind", KINDS)
@given(st.integers(1, 7), seeds)
def test_norms_are_upper_bounds_and_sums_those_of_full_vectors(kind: str, users: int, seed: int) -> None:
    rng = np.random.default_rng(seed)
    sent, full = some_of_every_kind(rng, users)[kind]
    exact = np.sqrt((full.astype(np.longdouble) ** 2).sum(axis=1))
    norms = sent.norms()
    assert norms.dtype == np.float64
    assert (norms >= exact).all()
    if kind not in ("together", "cross moments", "beside, others"):
        assert norms == pytest.approx(exact.astype(float), rel=1e-8)  # and not much more than the norm
    weights = np.where(rng.random(users) < 0.3, 0.0, rng.uniform(0, 1, users))
    step = choose_step(sent, weights)
    error = np.linalg.norm((add_up(sent, weights, step) - weights.astype(np.longdouble) @ full).astype(float))
    assert error <= moved_at_most(sent, weights, step) <= users * 1e-3 * (weights * norms).max(initial=0.0)


@pytest.mark.parametrize("kind", ["row moments", "vectors", "non-negative", "slots"])
@given(st.integers(1, 12), st.integers(-300, 300), seeds)
def test_norms_are_no_less_than_the_exact_ones(kind: str, size: int, exponent: int, seed: int) -> None:
    """In exact fractions, squares compared, wherever the squares neither under- nor overflow."""
    rng = np.random.default_rng(seed)
    values = np.abs(rng.normal(size=size)) * 2.0 ** rng.integers(-40, 1, size)
    full = [Fraction(v) for v in values]
    if kind == "row moments":
        exponent = exponent // 2
        values, full = values * 2.0 ** (exponent // 2), [Fraction(v) * Fraction(2) ** (exponent // 2) for v in values]
        square = sum((a * b) ** 2 for a in full for b in full)
        sent: Contributions = RowMoments(values[None, None], np.ones(1))
    else:
        values, square = values * 2.0**exponent, sum((v * Fraction(2) ** exponent) ** 2 for v in full)
        slots = SparseColumns(np.zeros(size, int), np.arange(size), values[:, None], np.zeros((1, 1)), size)
        sent = {"vectors": Vectors(values[None]), "non-negative": NonNegative(values[None]), "slots": slots}[kind]
    assert Fraction(float(sent.norms()[0])) ** 2 >= square


@given(st.integers(2, 6), seeds)
def test_acute_kinds_never_point_away_from_each_other(users: int, seed: int) -> None:
    """Any two users: the inner product of what they add to the sum, in whole steps, is not negative."""
    rng = np.random.default_rng(seed)
    acute = {name: sent for name, (sent, _) in some_of_every_kind(rng, users).items() if sent.acute}
    assert acute.keys() == {"row moments", "non-negative", "beside"}
    acute["counts"] = Counts(rng.integers(-1, 6, (users, 1)), 6)
    for sent in acute.values():
        step = choose_step(sent, np.ones(users))
        each = np.stack([sent.grid_sum(weights, step) for weights in np.eye(users)]).astype(object)
        assert (each.dot(each.T) >= 0).all()


def test_a_negative_entry_or_a_cell_named_twice_makes_a_user_count_as_nothing() -> None:
    values = np.array([[1.0, 2.0], [1.0, -1e-300], [0.0, -0.0], [np.nan, 1.0]])
    norms = NonNegative(values).norms()
    assert np.array_equal(np.isfinite(norms), [True, False, True, False])
    total = clip_to_numbers(NonNegative(values), Bound(10.0, 2, acute=True))
    assert total == pytest.approx([1.0, 2.0])
    beside = Concatenated((NonNegative(values), RowMoments(np.ones((4, 1, 1)), np.ones(4))))
    assert np.array_equal(np.isfinite(beside.norms()), [True, False, True, False])
    assert clip_to_numbers(beside, Bound(10.0, 3, acute=True)) == pytest.approx([1.0, 2.0, 2.0], rel=1e-4)
    assert np.array_equal(
        clip_to_numbers(Counts(np.array([[0, 0], [-1, -1]]), 2), Bound(2.0, 2, acute=True)), [0.0, 0.0]
    )


def test_parts_decide_whether_the_whole_is_acute() -> None:
    positive, row = NonNegative(np.ones((1, 2))), RowMoments(np.ones((1, 1, 1)), np.ones(1))
    assert Concatenated((positive, row)).acute
    assert not Concatenated((positive, Vectors(np.ones((1, 2))))).acute
    assert not Summed((positive, positive)).acute  # to be safe
    with pytest.raises(InputError, match="not acute"):
        clip_to_numbers(Concatenated((positive, Vectors(np.ones((1, 2))))), Bound(1.0, 4, acute=True))


# Promises of the protocol


SPOILT = Vectors(np.array([[1.0, 2.0, 3.0, 4.0], [np.nan, np.inf, 1.0, 2.0], [4.0, 5.0, 6.0, 7.0]]))


@pytest.mark.parametrize(
    "spoilt",
    [
        Vectors(np.array([[1.0, 2.0, 3.0], [np.nan, 1.0, np.inf], [4.0, 5.0, 6.0]])),
        CrossMoments(np.stack([np.ones((3, 2)), np.full((3, 2), np.nan), np.ones((3, 2))]), np.ones(3)),
        CrossMoments(np.stack([np.ones((3, 2)), np.full((3, 2), np.inf), np.ones((3, 2))]), np.ones(3)),
        RowMoments(np.stack([np.ones((3, 2)), np.full((3, 2), np.nan), np.ones((3, 2))]), np.ones(3)),
        RowMoments(np.ones((3, 2, 2)), np.array([1.0, np.inf, 1.0])),
        NonNegative(np.array([[1.0, 2.0], [np.inf, 1.0], [4.0, 5.0]])),
        Concatenated((SPOILT, RowMoments(np.ones((3, 1, 2)), np.ones(3)))),
        Concatenated((RowMoments(np.ones((3, 1, 2)), np.ones(3)), SPOILT)),
        Summed((SPOILT, RowMoments(np.ones((3, 1, 2)), np.ones(3)))),
        SparseColumns(
            np.array([0, 0, 1, 2]), np.array([0, 1, 0, 1]), np.array([[1.0], [2], [np.nan], [4]]), np.ones((3, 1)), 2
        ),
        SparseColumns(np.array([0, 1]), np.array([0, 0]), np.ones((2, 1)), np.array([[1.0], [-np.inf], [4]]), 1),
    ],
)
def test_a_user_of_weight_zero_is_skipped_whatever_it_holds(spoilt: Contributions) -> None:
    with np.errstate(all="ignore"):
        assert not np.isfinite(spoilt.norms()[1])
        total = add_up(spoilt, np.array([1.0, 0.0, 0.5]))
    assert np.isfinite(total).all()
    assert (total != 0).all()


def test_only_kinds_are_acute_and_nobody_can_say_otherwise() -> None:
    slots = SparseColumns(np.zeros(1, int), np.zeros(1, int), np.ones((1, 1)), np.ones((1, 0)), 3)
    for kind in (Counts(np.zeros((1, 1), dtype=np.int64), 3), RowMoments(np.ones((1, 2, 2)), np.ones(1))):
        assert kind.acute
    for other in (Vectors(np.ones((1, 3))), CrossMoments(np.ones((1, 2, 3)), np.ones(1)), slots):
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


def test_sparse_columns_without_negative_entries() -> None:
    """They are acute, and a user with a negative number, in a column or in the tail, counts as zero."""
    from privrep.privacy.columns import NonNegativeColumns

    user, column = np.array([0, 0, 1, 2]), np.array([0, 2, 1, 2])
    values, tail = np.array([[1.0, 0.0], [2.0, 3.0], [-1.0, 0.0], [4.0, 0.0]]), np.array([[0.0], [0.0], [-1.0]])
    found, plain = (kind(user, column, values, tail, 3) for kind in (NonNegativeColumns, SparseColumns))
    assert found.acute
    assert found.norms().tolist() == [plain.norms()[0], np.inf, np.inf]
    weights = np.array([0.5, 0.0, 0.0])
    assert np.array_equal(add_up(found, weights), add_up(plain, weights))


@pytest.mark.parametrize(("features", "rated"), [(40, 3), (40, 25), (3, 2), (1, 1), (300, 30)])
def test_sparse_moments_are_moments_of_rows(features: int, rated: int) -> None:
    """Of users with few columns and with many, some of them with none, and of users who do not count."""
    rng = np.random.default_rng(rated)
    X = np.where(rng.random((60, features)) < rng.uniform(0, 2, (60, 1)) * rated / features, rng.normal(size=1), 0.0)
    X *= rng.normal(size=X.shape)
    user, column = np.nonzero(X)
    found = SparseMoments(user, column, X[user, column], len(X), features)
    rows = RowMoments(X[:, None], np.ones(len(X)))
    weights = rng.random(len(X)) * (rng.random(len(X)) < 0.8)
    assert found.acute
    assert np.allclose(found.norms(), rows.norms(), rtol=1e-8)
    assert np.array_equal(add_up(found, weights), add_up(rows, weights))


def test_sparse_moments_of_a_user_with_a_column_twice_count_as_zero() -> None:
    user, column = np.array([0, 0, 1, 1, 3]), np.array([1, 1, 0, 1, 0])
    sent = SparseMoments(user, column, np.ones(5), 4, 2)
    assert np.isfinite(sent.norms()).tolist() == [False, True, True, True]
    assert clip_to_numbers(sent, Bound(1.0, 4, acute=True)) == pytest.approx([1.5, 0.5, 0.5, 0.5], abs=1e-4)
    with pytest.raises(InputError, match="user by user"):
        SparseMoments(user[::-1], column, np.ones(5), 4, 2)


def test_pairs_of_sparse_moments_are_added_up_a_bounded_number_at_a_time(monkeypatch: pytest.MonkeyPatch) -> None:
    rng = np.random.default_rng(5)
    X = np.where(rng.random((30, 50)) < 0.15, rng.normal(size=(30, 50)), 0.0)
    user, column = np.nonzero(X)
    sent = SparseMoments(user, column, X[user, column], 30, 50)
    whole = add_up(sent, np.ones(30))
    for most in (1, 7, 100):
        monkeypatch.setattr(sparse_moments, "PAIRS_AT_ONCE", most)
        assert np.array_equal(add_up(sent, np.ones(30)), whole)
