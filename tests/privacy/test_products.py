"""Sums of outer products, never multiplied out per user: equal to the plain computation, bounded, a user's own."""

from __future__ import annotations

from fractions import Fraction

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from clipping import STEP, add_up, clip_to_numbers
from privrep.errors import InputError
from privrep.privacy import contributions as kinds
from privrep.privacy.bounds import Bound
from privrep.privacy.contributions import Concatenated, NormAtMost, Products, Vectors
from privrep.privacy.products import compute_norms_by_gram, compute_norms_by_product

SHAPES = [(1, 5, 3), (4, 6, 2), (7, 1, 1), (60, 9, 4), (3, 40, 30), (200, 3, 2), (1, 1, 1)]
BY = {"gram": compute_norms_by_gram, "product": compute_norms_by_product}


def some(users: int, shape: tuple[int, int, int], seed: int = 0) -> Products:
    rng, (rows, p, q) = np.random.default_rng([seed, *shape]), shape
    left, right = (rng.normal(size=(users, rows, n)).astype(np.float32) for n in (p, q))
    right[rng.random((users, rows)) < 0.2] = 0.0  # absent
    return Products(left, right)


def multiplied_out(sent: Products) -> np.ndarray:
    left, right = sent.left.astype(np.float64), sent.right.astype(np.float64)
    return np.stack([(a.T @ b).ravel() for a, b in zip(left, right, strict=True)])


@pytest.mark.parametrize("shape", SHAPES)
def test_norms_and_sums_are_those_of_the_products(shape: tuple[int, int, int]) -> None:
    sent = some(11, shape)
    plain = multiplied_out(sent)
    mass = (np.linalg.norm(sent.left, axis=2) * np.linalg.norm(sent.right, axis=2)).sum(axis=1)
    norms = np.linalg.norm(plain, axis=1)
    assert (sent.norms() >= norms).all()
    assert sent.norms() == pytest.approx(np.maximum(norms, mass / 64), rel=1e-3, abs=1e-12)
    weights = np.linspace(0.0, 2.0, 11)
    norm = float((weights * sent.norms()).max())
    moved = np.linalg.norm(add_up(sent, weights) - weights @ plain)
    assert moved <= sent.roundings(norm, STEP).sum() + 11 * 2.0**-20 * norm
    assert moved <= 1e-4 * norm * np.sqrt(shape[0])


@pytest.mark.parametrize("way", BY)
@pytest.mark.parametrize("shape", SHAPES)
def test_both_ways_to_a_norm_agree(way: str, shape: tuple[int, int, int]) -> None:
    sent = some(5, shape)
    found, large, ratio = BY[way](sent.left.astype(np.float64), sent.right.astype(np.float64))
    assert found == pytest.approx(sent.norms(), rel=1e-4)
    assert not large.any()
    mass = (np.linalg.norm(sent.left, axis=2) * np.linalg.norm(sent.right, axis=2)).sum(axis=1)
    assert (ratio * found >= mass).all()
    assert ratio * found == pytest.approx(np.where(found > 0, mass, 0.0), rel=1e-4)
    assert ratio.max() <= 65


@given(st.integers(1, 5), st.integers(1, 4), st.integers(1, 4), st.integers(-40, 40), st.integers(0, 2**32 - 1))
def test_norms_are_no_less_than_the_exact_ones_nor_than_a_part_of_the_mass(
    rows: int, p: int, q: int, exponent: int, seed: int
) -> None:
    """In exact fractions, with rows that cancel each other."""
    rng = np.random.default_rng(seed)
    left = (rng.normal(size=(rows, p)) * 2.0**exponent).astype(np.float32)
    right = rng.normal(size=(rows, q)).astype(np.float32)
    if rows > 1 and rng.random() < 0.7:
        left[-1], right[-1] = left[0], -right[0] * np.float32(rng.choice([1.0, 1 + 2.0**-20, 0.5]))
    exact = [[Fraction(float(x)) for x in row] for row in left], [[Fraction(float(x)) for x in row] for row in right]
    square = sum(sum(exact[0][r][i] * exact[1][r][j] for r in range(rows)) ** 2 for i in range(p) for j in range(q))
    mass = float((np.linalg.norm(left.astype("f8"), axis=1) * np.linalg.norm(right.astype("f8"), axis=1)).sum())
    for way in BY.values():
        norm = float(way(left[None].astype(np.float64), right[None].astype(np.float64))[0, 0])
        assert Fraction(norm) ** 2 >= square
        assert norm >= mass / 64 * (1 - 1e-12)


@pytest.mark.parametrize("shape", [*SHAPES, (60, 784, 16), (64, 33, 257)])
def test_a_norm_is_its_users_own_to_the_last_bit(shape: tuple[int, int, int], monkeypatch: pytest.MonkeyPatch) -> None:
    everyone = some(9, shape)
    expected = everyone.norms()
    order = np.random.default_rng(1).permutation(9)
    assert np.array_equal(Products(everyone.left[order], everyone.right[order]).norms(), expected[order])
    for user in range(9):
        for last in (user + 1, user + 3):
            company = slice(user, last)
            assert Products(everyone.left[company], everyone.right[company]).norms()[0] == expected[user]
    monkeypatch.setattr(kinds, "AT_ONCE", 100)
    assert np.array_equal(everyone.norms(), expected)


def test_a_neighbour_that_is_wild_changes_nobodys_norm() -> None:
    sent = some(6, (5, 8, 3))
    left = sent.left.copy()
    for wild in (np.nan, np.inf, 3e38):
        left[2] = wild
        with np.errstate(all="ignore"):
            norms = Products(left, sent.right).norms()
        assert np.array_equal(np.delete(norms, 2), np.delete(sent.norms(), 2))


@pytest.mark.parametrize("value", [np.nan, np.inf, -np.inf])
def test_a_user_with_a_number_that_is_not_finite_counts_as_nothing(value: float) -> None:
    sent = some(4, (3, 4, 2))
    sent.right[1, 0, 0] = value
    sent.left[2, 1, 3] = value
    sent.right[2, 1] = 0.0  # absent, but spoilt
    with np.errstate(all="ignore"):
        assert np.array_equal(np.isfinite(sent.norms()), [True, False, False, True])
        total = clip_to_numbers(sent, Bound(1e3, 8))
    others = Products(sent.left[[0, 3]], sent.right[[0, 3]])
    assert np.array_equal(total, clip_to_numbers(others, Bound(1e3, 8)))
    assert total == pytest.approx(multiplied_out(others).sum(axis=0), rel=1e-3, abs=1e-2)


def test_sums_where_terms_cancel_are_exact_and_the_same_however_rows_are_cut(monkeypatch: pytest.MonkeyPatch) -> None:
    rng = np.random.default_rng(3)
    left, right = (rng.normal(size=(40, 50, n)).astype(np.float32) for n in (6, 4))
    left[:, 25:], right[:, 25:] = left[:, :25], -right[:, :25]  # every user's product is zero
    sent, weights = Products(left, right), rng.random(40)
    for rows in (kinds.FEW_ROWS, 7):
        monkeypatch.setattr(kinds, "FEW_ROWS", rows)
        assert not add_up(sent, weights).any()  # rows that are opposite to each other are rounded to opposite ones
    assert (sent.norms() > 0).all()
    others = some(40, (50, 6, 4))
    sums = []
    for rows in (512, 7, 1):
        monkeypatch.setattr(kinds, "FEW_ROWS", rows)
        sums.append(add_up(others, weights))
    assert sums[0].any()
    assert all(np.array_equal(each, sums[0]) for each in sums)


def test_layers_stand_beside_each_other() -> None:
    first, second, bias = some(5, (4, 3, 2), 1), some(5, (4, 2, 6), 2), Vectors(np.ones((5, 3), np.float32))
    layers = Concatenated((first, second, bias))
    plain = np.hstack([multiplied_out(first), multiplied_out(second), bias.values])
    assert layers.norms() == pytest.approx(np.linalg.norm(plain, axis=1), rel=1e-3)
    bound = Bound(0.7, 21)
    clipped = plain * np.minimum(1.0, 0.7 / layers.norms())[:, None]
    moved = np.linalg.norm(clip_to_numbers(layers, bound) - clipped.sum(axis=0))
    assert (
        moved <= 2 * np.sum(layers.roundings(0.7, bound.step)) + 5 * 2.0**-20 * 0.7
    )  # they are shortened, and rounded


def test_shapes_that_do_not_fit_are_refused() -> None:
    with pytest.raises(InputError, match="equal rows"):
        Products(np.ones((2, 3, 4)), np.ones((2, 4, 4)))


@pytest.mark.parametrize("dtype", [np.float32, np.float64])
def test_long_vectors_are_the_same_a_few_users_at_a_time(dtype: type, monkeypatch: pytest.MonkeyPatch) -> None:
    values = np.random.default_rng(4).normal(size=(13, 1001)).astype(dtype)
    values[5, 3] = np.nan
    weights = np.arange(13) % 6 + 0.5
    weights[5] = 0.0
    whole = Vectors(values)
    norms, total = whole.norms(), add_up(whole, weights)
    monkeypatch.setattr(kinds, "AT_ONCE", 2500)
    assert np.array_equal(whole.norms(), norms, equal_nan=True)
    assert np.array_equal(add_up(whole, weights), total)
    assert np.isfinite(total).all()


def test_who_is_short_is_counted_from_one_half() -> None:
    values = np.array([[3.0, 4.0], [0.6, 0.8], [np.nan, 0.0], [0.0, 0.0], [np.inf, 0.0]])
    sent = NormAtMost(Vectors(values), 1.5)
    with np.errstate(all="ignore"):
        assert clip_to_numbers(sent, Bound(0.5, 1)).tolist() == [2 * 0.5 - 3 * 0.5]
        for user, expected in enumerate([-0.5, 0.5, -0.5, 0.5, -0.5]):
            alone = NormAtMost(Vectors(values[user : user + 1]), 1.5)
            assert clip_to_numbers(alone, Bound(0.5, 1)).tolist() == [expected]
        counted = np.array([True, True, False, False, False])
        assert clip_to_numbers(sent, Bound(0.5, 1), counted).tolist() == [0.0]
    with pytest.raises(InputError, match="not acute"):
        clip_to_numbers(sent, Bound(0.5, 1, acute=True))
