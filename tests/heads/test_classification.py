"""Heads of classifiers: against SciPy, against fits that really leave a row out, and on rows without a label."""

from __future__ import annotations

import numpy as np
import pytest
from scipy.optimize import minimize

from privrep.heads.classification import fit_class_constant, fit_class_own, fit_class_shared
from privrep.local.elementary import exp, log, sigmoid, softplus
from privrep.local.least_squares import move_users_last
from privrep.local.losses import INTERCEPT_PRECISION, SOFTNESS, Loss, fit_classes

CASES = [("log", 2), ("log", 3), ("log", 5), ("hinge", 2), ("hinge", 3)]


def users_of(loss: Loss, users: int, rows: int, rank: int, seed: int = 0) -> tuple[np.ndarray, np.ndarray]:
    """Rows (users, rows, rank) and labels (users, rows) of classifiers with heads of their own."""
    rng = np.random.default_rng([17, seed, loss.classes])
    X = rng.normal(size=(users, rows, rank))
    outputs = X @ rng.normal(scale=1.5, size=(users, rank, loss.classes))
    return X, (outputs + rng.gumbel(size=outputs.shape)).argmax(axis=2).astype(float)


def objective(head: np.ndarray, X: np.ndarray, y: np.ndarray, loss: Loss, precision: float) -> float:
    """What a head minimises, written down anew for one user."""
    V = head.reshape(loss.outputs, X.shape[1] + 1)
    outputs = X @ V[:, :-1].T + V[:, -1]
    if loss.softmax:
        top = outputs.max(axis=1)
        total = top + np.log(np.exp(outputs - top[:, None]).sum(axis=1))
        value = (total - outputs[np.arange(len(y)), y.astype(int)]).sum()
    else:
        classes = np.arange(1, 2) if loss.classes == 2 else np.arange(loss.classes)
        z = np.where(y[:, None] == classes, 1.0, -1.0) * outputs
        if loss.name == "log":
            value = np.logaddexp(0, -z).sum()
        else:
            value = SOFTNESS * np.logaddexp(0, (1 - z) / SOFTNESS).sum()
    return float(value + precision / 2 * (V[:, :-1] ** 2).sum() + INTERCEPT_PRECISION / 2 * (V[:, -1] ** 2).sum())


def test_elementary_functions_agree_with_numpy() -> None:
    x = np.linspace(-650, 650, 20_001)
    assert np.abs(exp(x) / np.exp(x) - 1).max() < 1e-9
    assert np.abs(log(np.exp(x)) - x).max() < 1e-9
    assert np.abs(softplus(x) - np.logaddexp(0, x)).max() < 1e-9
    assert np.abs(sigmoid(x) - 1 / (1 + np.exp(-x))).max() < 1e-9
    assert np.isfinite(exp(np.array([-1e300, 1e300]))).all()


@pytest.mark.parametrize(("name", "classes"), CASES)
def test_heads_are_minimisers(name: str, classes: int) -> None:
    loss = Loss(name, classes)  # type: ignore[arg-type]
    X, y = users_of(loss, 6, 25, 2)
    fit = fit_classes(move_users_last(X), loss.signs(y), loss, 0.7, True)
    for u in range(len(X)):
        ours = np.column_stack([fit.heads[:, :, u], fit.intercepts[:, u]]).ravel()
        best = minimize(objective, np.zeros(ours.size), args=(X[u], y[u], loss, 0.7), method="BFGS")
        assert objective(ours, X[u], y[u], loss, 0.7) < best.fun + 0.01 * (1 if loss.outputs == 1 else 10)


@pytest.mark.parametrize(("name", "classes"), CASES)
def test_leaving_out_a_row_is_close_to_a_fit_without_it(name: str, classes: int) -> None:
    loss = Loss(name, classes)  # type: ignore[arg-type]
    X, y = users_of(loss, 200, 25, 2, seed=1)
    P, signs = move_users_last(X), loss.signs(y)
    fit, without = fit_classes(P, signs, loss, 0.5, True), fit_classes(P[:, 1:], signs[:, 1:], loss, 0.5, True)
    exact = (without.heads * P[None, :, 0]).sum(axis=1) + without.intercepts
    inside = (fit.heads * P[None, :, 0]).sum(axis=1) + fit.intercepts
    gap = np.abs(fit.loo_outputs[:, 0] - exact).mean()
    assert gap < 0.5 * np.abs(inside - exact).mean()  # the fit with the row is much farther from it
    moved = np.abs(fit.loo_heads[:, :, 0] - without.heads).mean()
    assert moved < 0.5 * np.abs(fit.heads - without.heads).mean()


@pytest.mark.parametrize(("name", "classes"), CASES)
def test_pulls_are_derivatives(name: str, classes: int) -> None:
    loss = Loss(name, classes)  # type: ignore[arg-type]
    rng = np.random.default_rng(2)
    outputs = rng.normal(size=(loss.outputs, 4, 3))
    signs = loss.signs(rng.integers(0, classes, size=(3, 4)).astype(float))
    pull, _ = loss.differentiate(outputs, signs)
    for o in range(loss.outputs):
        up, down = outputs.copy(), outputs.copy()
        up[o] += 1e-4
        down[o] -= 1e-4
        slope = (loss.values(up, signs) - loss.values(down, signs)) / 2e-4
        np.testing.assert_allclose(-slope, pull[o], atol=1e-5)


@pytest.mark.parametrize(("name", "classes"), [("log", 2), ("log", 4), ("hinge", 3)])
def test_curvature_is_the_second_derivative_along_a_move_of_the_representation(name: str, classes: int) -> None:
    """With heads fixed, moving U by t e_a h^T moves outputs by t x_a <h, v>: the loss bends by h^T (curvature) h."""
    loss = Loss(name, classes)  # type: ignore[arg-type]
    rng = np.random.default_rng(3)
    outputs, heads = rng.normal(size=(loss.outputs, 5, 2)), rng.normal(size=(loss.outputs, 2, 5, 2))
    signs = loss.signs(rng.integers(0, classes, size=(2, 5)).astype(float))
    packed = loss.curvature(outputs, signs, heads)
    matrix = np.array([[packed[0, 0], packed[0, 1] / 2**0.5], [packed[0, 1] / 2**0.5, packed[0, 2]]])
    h = np.array([0.6, -0.8])
    along = np.tensordot(h, heads, axes=(0, 1))  # (outputs, rows, users)
    t = 1e-3
    values = [loss.values(outputs + step * along, signs)[:, 0].sum() for step in (-t, 0.0, t)]
    assert (values[0] - 2 * values[1] + values[2]) / t**2 == pytest.approx(h @ matrix @ h, rel=1e-3)


@pytest.mark.parametrize(("name", "classes"), CASES)
def test_rows_without_a_label_count_for_nothing(name: str, classes: int) -> None:
    loss = Loss(name, classes)  # type: ignore[arg-type]
    X, y = users_of(loss, 30, 20, 2, seed=4)
    hidden = y.copy()
    hidden[:, 12:] = -1
    P = move_users_last(X)
    all_rows = fit_classes(P, loss.signs(hidden), loss, 0.5, False)
    few_rows = fit_classes(P[:, :12], loss.signs(y[:, :12]), loss, 0.5, False)
    np.testing.assert_allclose(all_rows.heads, few_rows.heads, atol=1e-9)
    constant, known = (fit_class_constant(loss.signs(labels), loss, intercept=True) for labels in (hidden, y[:, :12]))
    np.testing.assert_allclose(constant.intercept, known.intercept, atol=1e-9)


@pytest.mark.parametrize("classes", [2, 5])
def test_a_head_on_the_right_representation_beats_one_s_own_and_both_beat_a_constant(classes: int) -> None:
    loss = Loss("log", classes)
    rng = np.random.default_rng(5)
    X, y = users_of(loss, 300, 60, 2, seed=6)
    hidden = np.concatenate([X, rng.normal(size=(300, 60, 18))], axis=2)
    matrix = np.eye(20)[:, :2]
    signs = loss.signs(y)
    shared = fit_class_shared(hidden, signs, loss, matrix, True, 0.5)
    own, constant = fit_class_own(hidden, signs, loss, np.ones(20), True), fit_class_constant(signs, loss, True)
    assert shared.loss.mean() < own.loss.mean() - 0.05
    assert own.loss.mean() < constant.loss.mean() - 0.1
    fresh, labels = hidden[:, :30], y[:, :30]  # what leave-one-out says of half of the rows, tried on the other half
    half = fit_class_own(hidden[:, 30:], loss.signs(y[:, 30:]), loss, np.ones(20), True)
    outputs = np.ascontiguousarray(
        (fresh @ half.weights.transpose(0, 2, 1) + half.intercept[:, None]).transpose(2, 1, 0)
    )
    assert loss.values(outputs, loss.signs(labels)).mean() == pytest.approx(half.loss.mean(), abs=0.05)


def test_a_user_with_one_class_and_huge_rows_gets_finite_numbers() -> None:
    loss = Loss("log", 3)
    X, y = np.full((2, 8, 2), 1e6), np.zeros((2, 8))
    X[1] *= np.linspace(-1, 1, 8)[:, None]
    fit = fit_class_shared(X, loss.signs(y), loss, np.eye(2), True, 1.0)
    assert np.isfinite(fit.loss).all()
    assert np.isfinite(fit.weights).all()
