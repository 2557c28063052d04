"""Leave-one-out in closed form equals fitting again without the row."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from privrep.local import least_squares
from privrep.local.least_squares import centre_rows, centre_targets, find_largest, fit_least_squares, move_users_last


@dataclass(frozen=True)
class Fit:
    heads: np.ndarray
    loo_residuals: np.ndarray
    loo_heads: np.ndarray


def ridge_fit(P: np.ndarray, y: np.ndarray, ridge: float, intercept: bool) -> Fit:
    """The fit with users first, as its inputs here."""
    fit = least_squares.fit_ridge(move_users_last(P), move_users_last(y), ridge, intercept)
    return Fit(fit.heads.T, fit.loo_residuals.T, fit.loo_heads().T)


seeds = st.integers(0, 2**32 - 1)


def refit(P: np.ndarray, y: np.ndarray, penalty: float, intercept: bool) -> tuple[np.ndarray, float]:
    """Head and intercept of one user by the normal equations, the intercept a column of its own without penalty."""
    k = P.shape[1]
    design = np.column_stack([P, np.ones(len(P))]) if intercept else P
    weight = np.append(np.full(k, penalty), 0.0) if intercept else np.full(k, penalty)
    solution = np.linalg.solve(design.T @ design + np.diag(weight), design.T @ y)
    return solution[:k], float(solution[k]) if intercept else 0.0


@given(st.integers(3, 9), st.integers(1, 3), st.booleans(), st.sampled_from([1e-3, 0.02, 1.0]), seeds)
def test_leave_one_out_equals_brute_force(m: int, k: int, intercept: bool, ridge: float, seed: int) -> None:
    rng = np.random.default_rng(seed)
    P, y = rng.normal(size=(3, m, k)), rng.normal(size=(3, m)) + 5.0 * intercept
    rows, targets = (centre_rows(P), centre_rows(y)) if intercept else (P, y)
    fit = ridge_fit(rows, targets, ridge, intercept)
    loo_heads = fit.loo_heads
    assert loo_heads.shape == (3, m, k)
    for u in range(3):
        penalty = ridge * m + 1e-10 * (rows[u] ** 2).sum()  # of the whole fit; stays when a row is left out
        head, _ = refit(P[u], y[u], penalty, intercept)
        assert fit.heads[u] == pytest.approx(head, rel=1e-6, abs=1e-9)
        for j in range(m):
            kept = np.arange(m) != j
            head, constant = refit(P[u, kept], y[u, kept], penalty, intercept)
            residual = y[u, j] - P[u, j] @ head - constant
            assert loo_heads[u, j] == pytest.approx(head, rel=1e-6, abs=1e-8)
            assert fit.loo_residuals[u, j] == pytest.approx(residual, rel=1e-6, abs=1e-8)


@given(seeds)
def test_users_do_not_see_each_other(seed: int) -> None:
    rng = np.random.default_rng(seed)
    P, y = rng.normal(size=(4, 5, 2)), rng.normal(size=(4, 5))
    together = ridge_fit(P, y, 0.02, False)
    for u in range(4):
        alone = ridge_fit(P[u : u + 1], y[u : u + 1], 0.02, False)
        assert np.array_equal(alone.heads[0], together.heads[u])
        assert np.array_equal(alone.loo_residuals[0], together.loo_residuals[u])


def test_without_ridge_and_with_enough_rows_it_is_least_squares() -> None:
    rng = np.random.default_rng(0)
    P, y = rng.normal(size=(1, 20, 3)), rng.normal(size=(1, 20))
    assert fit_least_squares(P, y)[0] == pytest.approx(np.linalg.lstsq(P[0], y[0])[0], rel=1e-6)


def test_with_fewer_rows_than_columns_it_is_nearly_the_solution_of_least_norm() -> None:
    rng = np.random.default_rng(0)
    P, y = rng.normal(size=(1, 2, 4)), rng.normal(size=(1, 2))
    assert ridge_fit(P, y, 0.0, False).heads[0] == pytest.approx(np.linalg.pinv(P[0]) @ y[0], rel=1e-4)


@pytest.mark.parametrize("dtype", ["f8", "f4"])
def test_centred_rows_have_mean_zero_and_forget_a_shift(dtype: str) -> None:
    values = np.random.default_rng(0).normal(size=(5, 7, 3)).astype(dtype)
    assert centre_rows(values).dtype == values.dtype
    assert np.abs(centre_rows(values).mean(axis=1)).max() < 1e-6
    assert centre_rows(values + np.float32(64)) == pytest.approx(centre_rows(values), abs=2e-5)
    assert np.array_equal(centre_rows(np.full((2, 1, 3), 7.0)), np.zeros((2, 1, 3)))


extremes = st.sampled_from(
    [0.0, 1.0, -1.0, 1e-300, 5e-324, 1e-160, 1e-77, 1e16, 1e77, 1e150, -1e150, 1e154, 1e300, 1e308, np.inf, np.nan]
)


@given(st.integers(1, 5), st.integers(1, 4), st.booleans(), st.sampled_from([0.0, 0.02]), st.data())
def test_no_rows_can_make_a_solve_fail(m: int, k: int, intercept: bool, ridge: float, data: st.DataObject) -> None:
    values = data.draw(st.lists(extremes, min_size=m * (k + 1), max_size=m * (k + 1)))
    P = np.array(values[: m * k]).reshape(1, m, k)
    y = np.array(values[m * k :]).reshape(1, m)
    quiet = np.ones((2, m, k)), np.ones((2, m))
    with np.errstate(all="ignore"):
        fit = ridge_fit(np.concatenate([P, quiet[0]]), np.concatenate([y, quiet[1]]), ridge, intercept)
    assert np.isfinite(fit.heads[1:]).all()  # and nobody else's head is touched


def test_targets_that_differ_by_rounding_alone_are_constant() -> None:
    y = np.array([[0.1, 0.1, 0.1], [1e9, 1e9, 1e9 + 1.0], [1.0, 2.0, 3.0]])
    assert np.array_equal(centre_targets(y)[:, 0], np.zeros(3))
    assert np.allclose(centre_targets(y)[:, 1:].T, centre_rows(y)[1:])


@pytest.mark.parametrize("shape", [(1, 1, 3), (1, 7, 2), (40, 7, 2), (3, 50, 1), (5, 4, 0)])
def test_the_largest_size_of_each_column_is_found_whoever_is_there(shape: tuple[int, int, int]) -> None:
    values = np.random.default_rng(2).normal(size=shape)
    values.flat[::11] = np.nan
    assert np.array_equal(find_largest(values), np.abs(values).max(axis=1, initial=0.0), equal_nan=True)
