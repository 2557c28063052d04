"""Personal heads: leave-one-out is what it says, and collaborating is never much worse than staying alone."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from scipy import sparse

from privrep.data.synthetic import make_population
from privrep.data.table import UserTable
from privrep.heads.fitting import Heads, fit_block, fit_heads
from privrep.heads.regression import (
    CONSTANT,
    OWN,
    SHARED,
    Preference,
    fit_constant_candidate,
    fit_own_candidate,
    fit_rating_candidate,
    fit_shared_candidate,
)
from privrep.linear.alternation import AlternationSettings, RoundContext, ask_preference
from privrep.linear.references import fit_alone
from privrep.local.representation import Estimate, Ratings, Representation
from privrep.local.transform import FeatureTransform
from privrep.privacy.protocol import UserBatch
from runs import run_on


def users(n, size, features, weights, noise, seed=0, intercept=0.0):
    rng = np.random.default_rng(seed)
    X = rng.normal(size=(n, size, features))
    y = np.einsum("umd,ud->um", X, weights) + intercept + noise * rng.normal(size=(n, size))
    table = UserTable(X.reshape(-1, features), y.ravel(), np.arange(n + 1) * size, np.arange(n))
    return table, X, y


def basis(features, rank, error=0.0):
    return Representation(np.eye(features)[:, :rank], FeatureTransform.plain(features), error)


def ridge_alone(P, y, ridge, centre):
    """Brute-force ridge with an unpenalised intercept."""
    mean_p, mean_y = (P.mean(0), y.mean()) if centre else (np.zeros(P.shape[1]), 0.0)
    A, t = P - mean_p, y - mean_y
    v = A.T @ np.linalg.solve(A @ A.T + ridge * np.eye(len(y)), t)
    return v, mean_y - mean_p @ v


@pytest.mark.parametrize("intercept", [True, False])
@pytest.mark.parametrize("size", [4, 8, 30])
def test_losses_are_leave_one_out_and_the_best_is_kept(size, intercept):
    """For own regressions (dual and primal) against refitting without each row, at the ridge that was chosen."""
    features = 10
    _, X, y = users(6, size, features, np.random.default_rng(1).normal(size=(6, features)), 0.3, intercept=2.0)
    fit = fit_own_candidate(X, y, np.ones(features), intercept)
    for i in range(6):
        centred = X[i] - X[i].mean(0) if intercept else X[i]
        unit = np.trace(centred @ centred.T) / min(size, features)
        losses = []
        for ridge in (1e-3, 1e-1, 1.0, 10.0, 100.0):
            errors = []
            for j in range(size):
                rest = np.delete(np.arange(size), j)
                v, b = ridge_alone(X[i][rest], y[i][rest], ridge * unit, intercept)
                errors.append(y[i, j] - X[i, j] @ v - b)
            losses.append(np.mean(np.square(errors)))
        assert fit.loss[i] == pytest.approx(min(losses), rel=2e-2)


def test_constant():
    y = np.array([[1.0, 2.0, 6.0]])
    fit = fit_constant_candidate(y, True)
    assert fit.intercept[0] == 3.0
    assert fit.loss[0] == pytest.approx(np.mean([(1 - 4.0) ** 2, (2 - 3.5) ** 2, (6 - 1.5) ** 2]))


def test_each_user_keeps_what_suits_it():
    rng = np.random.default_rng(2)
    features, n = 12, 300
    weights = np.zeros((3 * n, features))
    weights[:n, :2] = rng.normal(size=(n, 2))  # in the representation
    weights[n : 2 * n, 5:] = 3 * rng.normal(size=(n, 7))  # not in it, with rows enough to learn alone
    table, _, _ = users(3 * n, 40, features, weights, 0.2, intercept=1.0)
    heads = fit_heads(table.blocks(), basis(features, 2))
    assert (heads.kind[:n] == SHARED).mean() > 0.9
    assert (heads.kind[n : 2 * n] == OWN).all()
    learned = heads.weights(basis(features, 2))
    assert np.mean((learned - weights) ** 2) < 0.005
    assert np.allclose(heads.intercept, 1.0, atol=0.4)


def test_without_the_net_every_head_is_shared():
    table, _, _ = users(20, 5, 6, np.ones((20, 6)), 0.1)
    heads = fit_heads(table.blocks(), basis(6, 2), safety_net=False)
    assert (heads.kind == SHARED).all()
    assert len(heads.own) == 0


@pytest.mark.parametrize("unit", [1e-5, 1.0, 1e5])
@pytest.mark.parametrize("size", [8, 40])
def test_the_net_holds_whatever_the_unit_of_the_features(unit, size):
    """Scales lost in the noise are taken as 1: a user's own regression must not depend on them."""
    rng = np.random.default_rng(8)
    weights = rng.normal(size=(200, 5))
    _, X, y = users(200, size, 5, weights, 0.0)
    own = fit_own_candidate(X * unit, y, np.ones(5), True)
    assert np.mean((own.weights * unit - weights) ** 2) < 1e-3


def test_a_representation_of_noise_costs_almost_nothing():
    """The representation is orthogonal to the truth and known to be poor: users must fare as well as alone."""
    rng = np.random.default_rng(3)
    n, features = 2000, 30
    weights = np.zeros((n, features))
    weights[:, 2:] = rng.normal(size=(n, features - 2)) / np.sqrt(features - 2)
    table, X, y = users(n, 10, features, weights, 0.1)
    poor = basis(features, 2, error=1.5)
    together = fit_heads(table.blocks(), poor)
    alone = fit_own_candidate(X, y, np.ones(features), True)
    excess = [
        np.mean(((w - weights) ** 2).sum(axis=1) + b**2)
        for w, b in ((together.weights(poor), together.intercept), (alone.weights, alone.intercept))
    ]
    assert excess[0] <= 1.02 * excess[1]


def test_users_with_one_row_or_none_and_nothing_but_constants():
    X = np.array([[1.0, 2.0], [3.0, 4.0], [1.0, 1.0], [2.0, 5.0]])
    table = UserTable(X, np.array([5.0, 7.0, 7.0, 7.0]), np.array([0, 1, 1, 4]), np.arange(3))
    heads = fit_block(table, basis(2, 1), True, True)
    assert heads.kind[1] == CONSTANT
    assert heads.intercept[1] == 0.0
    predictions = heads.predict(basis(2, 1), X, np.array([0, 2, 2, 2]))
    assert np.allclose(predictions, [5.0, 7.0, 7.0, 7.0], atol=1e-6)


@pytest.mark.parametrize("size", [3, 20])
@pytest.mark.parametrize("wild", [1e160, 1e300, np.inf, np.nan])
def test_no_user_can_stop_the_others_from_getting_their_heads(wild, size):
    table, _, _ = users(30, size, 8, np.ones((30, 8)), 0.1)
    rows = table.X.copy()
    rows[:size] *= wild
    heads = fit_heads(UserTable(rows, table.y, table.offsets, table.ids).blocks(), basis(8, 2))
    plain = fit_heads(table.blocks(), basis(8, 2))
    assert heads.kind[0] == CONSTANT or not heads.weights(basis(8, 2))[0].any()  # rows without a value are alike
    assert np.isfinite(heads.intercept).all()
    assert np.array_equal(heads.kind[1:], plain.kind[1:])
    assert np.allclose(heads.weights(basis(8, 2))[1:], plain.weights(basis(8, 2))[1:])


def test_predict_equals_weights():
    rng = np.random.default_rng(4)
    table, _, _ = users(50, 30, 8, rng.normal(size=(50, 8)), 0.1, intercept=-2.0)
    rep = Representation(
        np.linalg.qr(rng.normal(size=(8, 3)))[0], FeatureTransform(2.0 ** rng.integers(-3, 3, 8).astype(float)), 0.0
    )
    heads = fit_heads(table.blocks(), rep)
    positions = np.repeat(np.arange(50), 30)
    expected = np.einsum("rd,rd->r", table.X, heads.weights(rep)[positions]) + heads.intercept[positions]
    assert np.allclose(heads.predict(rep, table.X, positions), expected)


def test_blocks_do_not_matter():
    table, _, _ = users(200, 7, 9, np.random.default_rng(5).normal(size=(200, 9)), 0.1)
    whole = fit_block(table, basis(9, 2), True, True)
    parts = Heads.join(fit_block(b, basis(9, 2), True, True) for b in table.blocks(max_rows=64))
    assert np.array_equal(whole.kind, parts.kind)
    assert np.allclose(whole.weights(basis(9, 2)), parts.weights(basis(9, 2)))


def test_shared_heads_beat_unregularised_ones_when_rows_are_few():
    rng = np.random.default_rng(6)
    weights = np.zeros((3000, 10))
    weights[:, :3] = rng.normal(size=(3000, 3))
    _, X, y = users(3000, 5, 10, weights, 1.0)
    fit = fit_shared_candidate(X, y, basis(10, 3).matrix, True)
    plain = np.array([np.linalg.lstsq(np.c_[X[i, :, :3], np.ones(5)], y[i], rcond=None)[0][:3] for i in range(3000)])
    errors = [np.median(((w - weights[:, :3]) ** 2).sum(axis=1)) for w in (fit.weights, plain)]
    assert errors[0] < 0.8 * errors[1]


def test_several_targets_have_a_head_each_as_if_alone():
    rng = np.random.default_rng(7)
    table, _, first = users(60, 9, 6, np.eye(6)[rng.integers(0, 2, 60)], 0.1)
    second = table.X[:, 3] * 100 + 7
    both = UserTable(table.X, np.column_stack([first.ravel(), second]), table.offsets, table.ids)
    heads = fit_heads(both.blocks(), basis(6, 2))
    positions = np.repeat(np.arange(60), 9)
    predictions = heads.predict(basis(6, 2), table.X, positions)
    assert predictions.shape == (540, 2)
    for column, y in enumerate((first.ravel(), second)):
        alone = fit_heads(UserTable(table.X, y, table.offsets, table.ids).blocks(), basis(6, 2))
        assert np.array_equal(heads.kind.reshape(60, 2)[:, column], alone.kind)
        assert np.allclose(predictions[:, column], alone.predict(basis(6, 2), table.X, positions))


def test_heads_of_sparse_rows_are_those_of_dense_ones_but_for_regressions_of_their_own():
    rng = np.random.default_rng(8)
    table, _, _ = users(60, 9, 6, np.eye(6)[rng.integers(0, 2, 60)], 0.1)
    X = np.where(rng.random(table.X.shape) < 0.5, table.X, 0.0)
    thin = UserTable(sparse.csr_array(X), table.y, table.offsets, table.ids)
    heads = fit_heads(thin.blocks(), basis(6, 2))
    assert set(heads.kind.tolist()) <= {SHARED, CONSTANT}
    dense = fit_heads(UserTable(X, table.y, table.offsets, table.ids).blocks(), basis(6, 2), safety_net=False)
    shared = fit_heads(thin.blocks(), basis(6, 2), safety_net=False)
    assert np.allclose(shared.shared, dense.shared)
    positions = np.repeat(np.arange(60), 9)
    assert np.allclose(
        shared.predict(basis(6, 2), thin.X, positions), dense.predict(basis(6, 2), X, positions), atol=1e-9
    )


def test_a_representation_without_columns_leaves_constants():
    """Ratings of which nothing was learned have offsets and no factors; tables may have a rank of zero likewise."""
    table, _, y = users(5, 4, 3, np.zeros((5, 3)), 1.0)
    empty = Representation(np.zeros((3, 0)), FeatureTransform.plain(3), 0.0, np.zeros(0), Ratings(np.zeros(3), 1.0))
    heads = fit_heads(table.blocks(), empty)
    assert np.allclose(heads.intercept, y.mean(axis=1))
    assert empty.mean_error == 1.0


def test_the_taste_of_a_user_is_a_posterior_mean():
    """Against the normal equations of the whole model, mean included, with the spread taken from the ratings."""
    rng = np.random.default_rng(9)
    P, y = rng.normal(size=(4, 7, 3)), 3 + rng.normal(size=(4, 7))
    fit = fit_rating_candidate(P, y, Ratings(np.zeros(1), 0.6))
    for i in range(4):
        spread = y[i].std()
        target = y[i] - spread * P[i, :, 0]
        A = np.column_stack([np.ones(7), P[i, :, 1:]])
        mean, *taste = np.linalg.solve(A.T @ A + 0.6 * np.diag([0.0, 1.0, 1.0]), A.T @ target)
        assert fit.weights[i] == pytest.approx([spread, *taste], rel=1e-9)
        assert fit.intercept[i] == pytest.approx(mean, rel=1e-9)


def test_ratings_that_are_all_alike_or_alone_are_predicted_by_their_mean():
    P = np.random.default_rng(10).normal(size=(2, 3, 4))
    fit = fit_rating_candidate(P, np.array([[4.0, 4.0, 4.0], [0.1, 0.1, 0.1]]), Ratings(np.zeros(1), 0.5))
    assert np.allclose(fit.weights, 0.0, atol=1e-12)
    assert fit.intercept == pytest.approx([4.0, 0.1])
    alone = fit_rating_candidate(P[:, :1], np.array([[2.0], [5.0]]), Ratings(np.zeros(1), 0.5))
    assert np.array_equal(alone.weights, np.zeros((2, 4)))
    assert alone.intercept == pytest.approx([2.0, 5.0])


@pytest.mark.parametrize("directions", [2, 8])
def test_what_others_found_helps_users_choose_on_few_rows(directions):
    """Ten rows and eight features: where the representation fits, few stray from it; where it does not, few keep it."""
    rng = np.random.default_rng(directions)
    table_rng = np.random.default_rng(40 + directions)
    truth = make_population(rng, 2500, 8, directions, 10, 0.1)
    table = truth.sample(table_rng)
    run = run_on(table, 20.0, seed=3)
    plain, basis = FeatureTransform.plain(8), truth.U[:, :2]
    problem = RoundContext(run, plain, True, AlternationSettings())
    votes = ask_preference(problem, Estimate(basis, np.zeros((2, 2))), 0.01 * run.ledger.capacity)
    learned = Representation(basis, plain, 0.01, preference=votes)
    assert learned.preference is not None
    error, without = (
        truth.population_mse(heads.weights(learned), heads.intercept)
        for heads in (fit_heads(table.blocks(), rep) for rep in (learned, replace(learned, preference=None)))
    )
    alone_error = truth.population_mse(*fit_alone(table))
    if directions == 2:  # all that there is
        shared = fit_heads(table.blocks(), learned, safety_net=False)
        best = truth.population_mse(shared.weights(learned), shared.intercept)
        assert learned.preference > 5
        assert error < 1.15 * best < 0.2 * alone_error
        assert without > 1.2 * best
    else:
        assert learned.preference < 0.2
        assert error < 1.01 * alone_error
        assert without > 1.03 * alone_error


@pytest.mark.parametrize("size", [1e-320, 1e-160, 1e-5, 1e70, 1e150, 1e153, 1e154, 1e200, 1e308])
@pytest.mark.parametrize(("rows", "features"), [(4, 9), (9, 4)])
def test_no_size_of_one_users_rows_stops_the_others(size, rows, features):
    """An eigendecomposition that fails fails for everybody: no user's numbers may reach one that do."""
    rng = np.random.default_rng(rows)
    X, y = rng.normal(size=(3, rows, features)), rng.normal(size=(3, rows))
    with np.errstate(all="ignore"):
        X[1] *= size
        step = Preference(np.eye(features)[:, :2], FeatureTransform.plain(features), True)
        cells = step(UserBatch(X, y))["votes"].cells
        assert np.array_equal(cells[[0, 2]], step(UserBatch(X[[0, 2]], y[[0, 2]]))["votes"].cells)
        for fit in (
            fit_own_candidate(X, y, np.ones(features), True),
            fit_shared_candidate(X, y, np.eye(features)[:, :2], True),
        ):
            assert np.isfinite(fit.loss[[0, 2]]).all()
