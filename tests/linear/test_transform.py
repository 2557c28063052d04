"""Public coordinates: sizes and correlations of features, declared or found, and the way back to the features."""

from __future__ import annotations

import numpy as np
import pytest
from scipy import sparse

from privrep.data.synthetic import make_population
from privrep.data.table import UserTable
from privrep.errors import InputError
from privrep.heads.fitting import fit_heads
from privrep.linear.methods.private_fedrep import private_fedrep
from privrep.linear.steps import CELLS, LOWEST
from privrep.linear.transform import (
    find_feature_scales,
    find_frequency_scales,
    find_transform,
    find_whitening,
    make_declared_transform,
    make_whitening,
    read_octave_quantile,
)
from privrep.local.transform import FeatureTransform
from runs import run_on


def run_of(X, y, epsilon=4.0, seed=0, size=8):
    """X (rows, d), y (rows,) or (rows, q): users of `size` rows each."""
    n = X.shape[0] // size
    return run_on(UserTable(X, y, np.arange(n + 1) * size, np.arange(n)), epsilon, seed=seed)


def all_of(run):
    return run.ledger.capacity


def rows(n=3000, d=6, size=8, seed=0):
    rng = np.random.default_rng(seed)
    return rng.normal(size=(n * size, d)), rng.normal(size=n * size)


# Sizes


def test_octave_quantile():
    counts = np.zeros(CELLS)
    counts[[20, 21, 22]] = [10.0, 80.0, 10.0]
    assert read_octave_quantile(counts, 0.5) == pytest.approx(2.0 ** (21 + LOWEST), rel=1e-9)
    assert read_octave_quantile(counts, 0.05) == pytest.approx(2.0 ** (20 + LOWEST), rel=1e-9)
    counts[70] = 30.0  # noise far from the peak is not looked at
    assert read_octave_quantile(counts, 0.5) == pytest.approx(2.0 ** (21 + LOWEST), rel=1e-9)


def test_scales_are_within_an_octave_and_the_number_of_users_roughly_right():
    X, y = rows()
    scale = 10.0 ** np.linspace(-6, 6, 6)
    run = run_of(X * scale + 3 * scale, y)
    transform, users = find_feature_scales(run, all_of(run), True)
    assert np.abs(np.log2(transform.scale / scale)).max() <= 1
    assert np.all(np.log2(transform.scale) == np.rint(np.log2(transform.scale)))
    assert transform.whitening is None
    assert transform.target_scale is None  # one target needs none
    assert users == pytest.approx(3000, rel=0.05)
    assert run.ledger.remaining == pytest.approx(0.0, abs=1e-9)


def test_scales_of_several_targets():
    X, y = rows()
    run = run_of(X, np.column_stack([y * 1e6, y * 1e-6 + 1, np.full_like(y, 0.1)]))
    transform, _ = find_feature_scales(run, all_of(run), True)
    assert transform.scale.shape == (6,)
    assert np.abs(np.log2(transform.target_scale[:2] / [1e6, 1e-6])).max() <= 1
    assert np.isfinite(transform.target_scale).all()
    assert (transform.target_scale > 0).all()  # of one that never varies, too


def test_constant_features_get_the_scale_of_the_others():
    X, y = rows()
    run = run_of(np.column_stack([X * 16, np.full(len(X), 0.1), np.zeros(len(X))]), y)
    transform, _ = find_feature_scales(run, all_of(run), True)
    assert np.all(transform.scale == 16.0)


def test_scales_lost_in_noise_are_one():
    X, y = rows(20, 5)
    run = run_of(X * 100, y, 0.01)
    transform, users = find_feature_scales(run, all_of(run), True)
    assert np.all(transform.scale == 1.0)
    assert abs(users) < 1e5


@pytest.mark.parametrize("targets", [1, 2])
def test_sparse_scales_are_those_of_the_entries_and_frequencies_bring_all_to_one_mean_square(targets):
    rng = np.random.default_rng(0)
    often, size = np.array([0.5, 0.1, 0.02, 0.5]), np.array([1.0, 64.0, 1.0, 1e-3])
    X = np.where(rng.random((40_000, 4)) < often, rng.choice([-1.0, 1.0], (40_000, 4)), 0.0) * size
    y = rng.normal(size=(40_000, 2)) * [1e3, 1.0]
    run = run_of(sparse.csr_array(X), y[:, 0] if targets == 1 else y, 50.0)
    transform, _ = find_feature_scales(run, 0.5 * all_of(run), True)
    assert np.abs(np.log2(transform.scale / size)).max() <= 1
    assert (transform.target_scale is None) == (targets == 1)
    scale = find_frequency_scales(run, transform.scale, 0.5 * all_of(run))
    assert np.sqrt((X**2).mean(axis=0)) == pytest.approx(scale, rel=0.15)
    assert run.ledger.remaining == pytest.approx(0.0, abs=1e-9)


def test_a_sparse_feature_that_nobody_has_is_no_trouble():
    rng = np.random.default_rng(0)
    X = np.where(rng.random((8000, 5)) < 0.3, 1.0, 0.0)
    X[:, 4] = 0.0
    run = run_of(sparse.csr_array(X), rng.normal(size=8000), 10.0)
    transform, spent = find_transform(run, 0.3 * all_of(run), 0.3 * all_of(run), True)
    assert np.isfinite(transform.scale).all()
    assert (transform.scale > 0).all()
    assert spent == pytest.approx(0.6 * all_of(run))


# Correlations


def correlated(condition, d=6, seed=1):
    """A square root of a covariance with eigenvalues spread geometrically over this range."""
    turn = np.linalg.qr(np.random.default_rng(seed).normal(size=(d, d)))[0]
    return turn * np.sqrt(condition ** -np.linspace(0, 1, d)) @ turn.T


def whitened_eigenvalues(transform, covariance):
    """Of the features' covariance in the transform's coordinates's coordinates, over their mean."""
    W = (np.eye(len(covariance)) if transform.whitening is None else transform.whitening) / transform.scale
    values = np.linalg.eigvalsh(W @ covariance @ W.T)
    return values / values.mean()


def test_identity_needs_no_whitening():
    X, y = rows()
    for seed in range(5):
        run = run_of(X, y, 1.0, seed)
        assert find_whitening(run, FeatureTransform.plain(6), all_of(run), True) is None


@pytest.mark.parametrize("intercept", [True, False])
@pytest.mark.parametrize("condition", [100.0, 1000.0])
def test_correlated_features_become_uncorrelated(condition, intercept):
    X, y = rows(20_000)
    root = correlated(condition)
    run = run_of(X @ root.T, y, 8.0)
    whitening = find_whitening(run, FeatureTransform.plain(6), all_of(run), intercept)
    values = whitened_eigenvalues(FeatureTransform(np.ones(6), whitening), root @ root.T)
    assert values[-1] / values[0] < (1.5 if condition == 100 else 3)
    assert np.allclose(whitening, whitening.T)


def test_a_covariance_lost_in_noise_is_left_alone_or_not_asked_for():
    X, y = rows(50)
    run = run_of(X @ correlated(1000.0).T, y, 0.05)
    assert find_whitening(run, FeatureTransform.plain(6), all_of(run), True) is None
    run = run_of(X, y, 0.05)
    transform, spent = find_transform(run, 0.3 * all_of(run), 0.3 * all_of(run), True)
    assert transform.whitening is None
    assert "covariance" not in run.billboard
    assert spent == pytest.approx(0.3 * all_of(run))
    assert run.ledger.remaining == pytest.approx(0.7 * all_of(run), rel=1e-6)


def test_constant_and_duplicated_features_are_whitened_to_something_finite():
    X, y = rows(20_000, 4)
    X = np.column_stack([X, X[:, 0], np.full(len(X), 7.0), np.zeros(len(X))])
    run = run_of(X, y, 8.0)
    transform, _ = find_transform(run, 0.5 * all_of(run), 0.5 * all_of(run), True)
    assert np.isfinite(transform.whitening).all()
    moved = transform.rows(X[None, :, :] - X.mean(axis=0))[0]
    assert np.cov(moved[:, :4].T).diagonal() == pytest.approx(np.full(4, np.cov(moved[:, 1])), rel=0.6)
    assert np.abs(moved[:, 5:]).max() < 0.5


def test_whitening_of_a_known_matrix():
    root = correlated(50.0)
    W = make_whitening(root @ root.T, 1e-6)
    assert W @ root @ root.T @ W == pytest.approx(np.eye(6), abs=1e-8)
    assert make_whitening(np.eye(6), 1e-6) is None
    assert make_whitening(np.diag([1.0, 1.5]), 1e-6) is None  # a factor of less than two is not worth it
    singular = make_whitening(np.ones((3, 3)), 0.01)
    assert np.isfinite(singular).all()
    assert np.linalg.eigvalsh(singular)[-1] == pytest.approx(10.0)  # no less than the noise


# Declared


def test_declared_sizes_and_covariances():
    assert make_declared_transform(None, None, 3) is None
    assert np.array_equal(make_declared_transform([1.0, 2.0, 4.0], None, 3).scale, [1.0, 2.0, 4.0])
    root = np.diag([1e-3, 1.0, 1e3]) @ correlated(100.0, 3)
    transform = make_declared_transform(None, (root @ root.T).tolist(), 3)
    assert whitened_eigenvalues(transform, root @ root.T) == pytest.approx(np.ones(3), abs=1e-6)
    diagonal = make_declared_transform(None, np.diag([4.0, 9.0]), 2)
    assert diagonal.whitening is None
    assert diagonal.scale == pytest.approx([2.0, 3.0])
    degenerate = make_declared_transform(None, np.diag([1.0, 0.0]), 2)
    assert (degenerate.scale > 0).all()


@pytest.mark.parametrize(
    ("scale", "covariance", "sentence"),
    [
        ([1.0, 1.0], np.eye(2), "leave feature_scale out"),
        ([1.0], None, "feature_scale must hold 2 positive"),
        ([1.0, -1.0], None, "positive finite"),
        ([1.0, np.nan], None, "positive finite"),
        (None, np.eye(3), "2 x 2"),
        (None, [[1.0, 0.5], [0.0, 1.0]], "symmetric"),
        (None, [[1.0, np.nan], [np.nan, 1.0]], "symmetric"),
        (None, [[1.0, 2.0], [2.0, 1.0]], "covariance"),  # no covariance: it has a negative eigenvalue
        (None, [[-1.0, 0.0], [0.0, 1.0]], "covariance"),
        (None, np.zeros((2, 2)), "covariance"),
    ],
)
def test_declarations_that_cannot_be(scale, covariance, sentence):
    with pytest.raises(InputError, match=sentence):
        make_declared_transform(scale, covariance, 2)


# There and back


@pytest.mark.parametrize("whitening", [False, True])
def test_a_basis_means_the_same_in_both_coordinates(whitening):
    rng = np.random.default_rng(3)
    transform = FeatureTransform(2.0 ** rng.integers(-5, 5, 6), correlated(10.0) if whitening else None)
    X, basis, v = rng.normal(size=(2, 5, 6)), rng.normal(size=(6, 2)), rng.normal(size=2)
    assert transform.rows(X) @ (basis @ v) == pytest.approx(X @ (transform.to_original(basis) @ v), rel=1e-9)
    assert transform.rows(X.astype(np.float32)).dtype == np.float32


def test_targets_come_a_column_at_a_time():
    y = np.random.default_rng(0).normal(size=(4, 5, 3))
    transform = FeatureTransform(np.ones(2), None, np.array([1.0, 10.0, 100.0]))
    assert transform.targets(y) == pytest.approx(np.moveaxis(y / [1.0, 10.0, 100.0], -1, 0))
    assert np.array_equal(transform.targets(y[:, :, 0]), y[None, :, :, 0])  # one column is left alone


def test_a_linear_change_of_the_features_changes_no_prediction_but_by_noise():
    rng = np.random.default_rng(4)
    truth = make_population(rng, 6000, 10, 2, 10, 0.1)
    table = truth.sample(rng)
    change = correlated(300.0, 10) @ np.diag(2.0 ** rng.integers(-8, 8, 10))
    errors = []
    for X in (table.X, table.X @ change):
        other = UserTable(X, table.y, table.offsets, table.ids)
        run = run_on(other, 8.0, seed=1)
        learned = private_fedrep(run, 2)
        heads = fit_heads(other.blocks(), learned)
        weights = heads.weights(learned) if X is table.X else heads.weights(learned) @ change.T
        errors.append(truth.population_mse(weights, heads.intercept))
    assert errors[1] < 1.05 * errors[0]
    assert errors[0] < 2 * 0.1**2  # ten rows for two directions and an intercept
