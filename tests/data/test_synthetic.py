"""Synthetic populations are what they say.

Statistical tests have a false-alarm rate of about 1e-6 each, at fixed seeds, and are shown to reject a value that is
wrong by a few percent.
"""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from scipy.stats import kstest, norm, t

from privrep.data.synthetic import STUDENT_FREEDOM, SUB_GAUSSIAN, condition_heads, make_population
from privrep.errors import InputError

ALARM = 1e-6


def rng(seed):
    return np.random.default_rng([20, seed])


def covariance_is(X, covariance):
    """Whether the sample covariance of rows of known mean zero is within what chance explains, entry by entry.

    Entry (a, b) has standard error sqrt(var(x_a x_b) / rows), taken from the sample itself; Bonferroni over entries. A
    product of two signs squared has no variance at all, hence the 1e-9.
    """
    d = X.shape[1]
    worst = norm.isf(ALARM / 2 / (d * (d + 1) / 2))
    second = X.T @ X / len(X)
    error = np.sqrt(np.maximum((X**2).T @ (X**2) / len(X) - second**2, 0) / len(X))
    return bool((np.abs(second - covariance) <= worst * error + 1e-9).all())


@pytest.mark.parametrize("kind", SUB_GAUSSIAN)
def test_features_have_identity_covariance(kind):
    table = make_population(rng(1), 5_000, 6, 2, 20, 0.1, feature_kind=kind).sample(rng(2))
    assert covariance_is(table.X, np.eye(6))
    assert covariance_is(table.X, 1.05 * np.eye(6)) is False
    assert covariance_is(table.X, np.eye(6) + 0.05 * (np.eye(6, k=1) + np.eye(6, k=-1))) is False
    assert np.abs(table.X.mean(axis=0)).max() < norm.isf(ALARM / 12) / np.sqrt(table.n_rows)


def test_kinds_are_their_distributions():
    """Kolmogorov-Smirnov for the continuous kinds, the support for the others."""
    samples = {
        kind: make_population(rng(3), 1_000, 3, 1, 10, 0.1, feature_kind=kind).sample(rng(4)).X
        for kind in (*SUB_GAUSSIAN, "student")
    }
    scale = np.sqrt(1 - 2 / STUDENT_FREEDOM)
    for column in range(3):
        assert kstest(samples["gaussian"][:, column], norm.cdf).pvalue > ALARM
        assert kstest(samples["uniform"][:, column] / (2 * np.sqrt(3)) + 0.5, "uniform").pvalue > ALARM
        assert (
            kstest(samples["sphere"][:, column] / (2 * np.sqrt(3)) + 0.5, "uniform").pvalue > ALARM
        )  # d = 3: Archimedes
        assert kstest(samples["student"][:, column] / scale, t(STUDENT_FREEDOM).cdf).pvalue > ALARM
        assert kstest(samples["student"][:, column] * 1.5 / scale, t(STUDENT_FREEDOM).cdf).pvalue < ALARM
        assert kstest(samples["student"][:, column], norm.cdf).pvalue < ALARM
    assert set(np.unique(samples["rademacher"])) == {-1.0, 1.0}
    np.testing.assert_allclose((samples["sphere"] ** 2).sum(axis=1), 3.0)


def test_each_user_has_its_own_kind():
    population = make_population(rng(5), 2_000, 4, 2, 25, 0.1, per_user=True)
    table = population.sample(rng(6))
    assert set(population.feature_kinds) == set(SUB_GAUSSIAN)
    assert covariance_is(table.X, np.eye(4))
    blocks = table.X.reshape(2_000, 25, 4)
    assert (np.abs(blocks[population.feature_kinds == "rademacher"]) == 1).all()
    assert not (np.abs(blocks[population.feature_kinds == "gaussian"]) == 1).any()


@pytest.mark.parametrize("matrix", [False, True])
def test_feature_scale_and_mean(matrix):
    scale = rng(7).standard_normal((4, 4)) if matrix else np.array([0.1, 1.0, 5.0, 20.0])
    mean = np.array([1.0, -2.0, 0.0, 30.0])
    population = make_population(rng(8), 4_000, 4, 2, 20, 0.1, feature_scale=scale, feature_mean=mean)
    X = population.sample(rng(9)).X
    expected = scale @ scale.T if matrix else np.diag(scale**2)
    np.testing.assert_allclose(population.covariance, expected)
    assert covariance_is(X - mean, expected)
    assert not covariance_is(X - mean, 1.05 * expected)


@pytest.mark.parametrize("noise_kind", ["gaussian", "rademacher", "uniform"])
def test_label_noise_has_the_stated_deviation(noise_kind):
    population = make_population(rng(10), 5_000, 5, 2, 20, 0.3, noise_kind=noise_kind, intercept=1.0)
    table = population.sample(rng(11))
    owner = np.repeat(np.arange(5_000), population.sizes)
    noise = table.y - np.einsum("rd,rd->r", table.X, population.weights[owner]) - population.intercepts[owner]
    assert covariance_is(noise[:, None], [[0.09]])
    if noise_kind == "rademacher":
        np.testing.assert_allclose(np.abs(noise), 0.3)
    else:
        assert not covariance_is(noise[:, None], [[0.09 * 1.05]])
    kurtosis = {"gaussian": 3.0, "rademacher": 1.0, "uniform": 1.8}[noise_kind]
    assert (noise**4).mean() / 0.09**2 == pytest.approx(kurtosis, abs=0.15)  # 5 standard errors of the worst, Gaussian


def test_representation_and_heads():
    population = make_population(rng(12), 3_000, 10, 3, (2, 9), 0.1)
    np.testing.assert_allclose(population.U.T @ population.U, np.eye(3), atol=1e-12)
    np.testing.assert_allclose(np.linalg.norm(population.heads, axis=1), 1.0)
    assert set(population.sizes) == set(range(2, 10))
    gaussian = make_population(rng(13), 20_000, 10, 3, 5, 0.1, heads="gaussian")
    assert covariance_is(gaussian.heads, np.eye(3))
    assert (gaussian.sizes == 5).all()
    centres = make_population(rng(13), 20_000, 10, 3, 5, 0.1, intercept=2.0).intercepts[:, None]
    assert covariance_is(centres, [[4.0]])
    assert not covariance_is(centres, [[4.4]])


@pytest.mark.parametrize("heads", ["unit", "gaussian"])
def test_condition_number_of_the_heads_is_exact(heads):
    population = make_population(rng(14), 500, 10, 4, 5, 0.1, heads=heads, head_condition=10.0)
    plain = make_population(rng(14), 500, 10, 4, 5, 0.1, heads=heads)
    values = np.linalg.svd(population.heads, compute_uv=False)
    np.testing.assert_allclose(values[:-1] / values[1:], 10 ** (1 / 3))  # geometric, over a range of ten
    assert (population.heads**2).sum() == pytest.approx((plain.heads**2).sum())
    assert np.linalg.cond(plain.heads) < 1.3


@pytest.mark.parametrize("kind", ["gaussian", "rademacher", "student"])
def test_population_mse_agrees_with_fresh_rows(kind):
    """The exact error of wrong predictors against its Monte-Carlo estimate, in standard errors of the latter."""
    population = make_population(
        rng(15),
        400,
        5,
        2,
        500,
        0.2,
        feature_kind=kind,
        feature_scale=np.arange(1.0, 6.0),
        feature_mean=0.5,
        intercept=1.0,
    )
    weights = population.weights + 0.1 * rng(16).standard_normal((400, 5))
    intercepts = population.intercepts + 0.3
    table = population.sample(rng(17))
    owner = np.repeat(np.arange(400), population.sizes)
    squares = (table.y - np.einsum("rd,rd->r", table.X, weights[owner]) - intercepts[owner]) ** 2
    error = squares.std() / np.sqrt(len(squares))
    exact = population.population_mse(weights, intercepts)
    assert abs(squares.mean() - exact) < norm.isf(ALARM / 2) * error
    assert abs(squares.mean() - 1.1 * exact) > norm.isf(ALARM / 2) * error
    assert abs(squares.mean() - population.population_mse(weights, population.intercepts)) > norm.isf(ALARM / 2) * error


def test_errors_of_the_truth_and_of_nothing():
    population = make_population(rng(18), 50, 5, 2, 3, 0.2)
    assert population.population_mse(population.weights, population.intercepts) == pytest.approx(0.04)
    assert population.null_mse == pytest.approx(1.04)  # unit heads, identity covariance
    one = population.weights.copy()
    one[7] += np.eye(5)[0]
    assert population.user_mse(one, population.intercepts)[7] == pytest.approx(1.04)


# Populations like real panels

PANEL = {
    "intercept": 0.5,
    "level": 7.0,
    "common": 2.0,
    "feature_mean": 1.0,
    "between": np.array([0.5, 1.0, 2.0, 1.0, 3.0]),
    "context": 1.5,
    "constant_columns": 2,
}


@pytest.mark.parametrize("kind", ["gaussian", "sphere"])
@pytest.mark.parametrize("matrix", [False, True])
def test_mse_of_a_panel_agrees_with_fresh_rows(kind, matrix):
    """Users' own feature means enter: the exact error is not that of rows around the population's mean."""
    scale = rng(30).standard_normal((5, 5)) if matrix else np.arange(1.0, 6.0)
    made = make_population(rng(31), 400, 5, 2, 500, 0.5, feature_kind=kind, feature_scale=scale, **PANEL)
    weights = made.weights + 0.1 * rng(32).standard_normal((400, 5))
    intercepts = made.intercepts + 0.3
    table = made.sample(rng(33))
    owner = np.repeat(np.arange(400), made.sizes)
    squares = (table.y - np.einsum("rd,rd->r", table.X, weights[owner]) - intercepts[owner]) ** 2
    exact = made.user_mse(weights, intercepts)
    blocks = squares.reshape(400, 500)
    errors = np.abs(blocks.mean(axis=1) - exact) / (blocks.std(axis=1) / np.sqrt(500))
    assert errors.max() < 6  # 400 users, skewed squares
    error = squares.std() / np.sqrt(len(squares))
    assert abs(squares.mean() - exact.mean()) < norm.isf(ALARM / 2) * error
    around_the_mean = replace(made, means=None).population_mse(weights, intercepts)
    assert abs(squares.mean() - around_the_mean) > norm.isf(ALARM / 2) * error
    assert made.population_mse(made.weights, made.intercepts) == pytest.approx(0.25)


def test_a_panel_has_its_level_common_slopes_and_own_means():
    common, context = np.array([1.0, -2.0, 0.5]), np.array([0.0, 3.0, 0.0])
    options = {"common": common, "feature_mean": 4.0, "between": np.array([1.0, 0.5, 2.0]), "context": context}
    made = make_population(rng(34), 20_000, 3, 1, 2, 0.1, intercept=2.0, level=-5.0, **options)
    apart = made.means - 4.0
    assert covariance_is(apart, np.diag([1.0, 0.25, 4.0]))
    assert not covariance_is(apart, 1.05 * np.diag([1.0, 0.25, 4.0]))
    own = made.intercepts + 5.0 - apart @ context
    assert covariance_is(own[:, None], [[4.0]])
    assert abs(own.mean()) < norm.isf(ALARM / 2) * 2.0 / np.sqrt(20_000)
    np.testing.assert_allclose(made.weights, made.heads @ made.U.T + common)
    table = made.sample(rng(35))
    within = table.X.reshape(20_000, 2, 3) - made.means[:, None, :]
    assert covariance_is(within.reshape(-1, 3), np.eye(3))
    noise = table.y - np.einsum("rd,rd->r", table.X, np.repeat(made.weights, 2, axis=0)) - made.intercepts.repeat(2)
    assert covariance_is(noise[:, None], [[0.01]])


@pytest.mark.parametrize("matrix", [False, True])
@pytest.mark.parametrize("dtype", [np.float32, np.float64])
def test_constant_columns_never_vary_within_a_user(matrix, dtype):
    scale = rng(36).standard_normal((6, 6)) if matrix else 2.0
    made = make_population(rng(37), 300, 6, 2, (2, 5), 0.1, feature_scale=scale, between=1.0, constant_columns=2)
    table = made.sample(rng(38), dtype)
    for rows in np.split(table.X, table.offsets[1:-1]):
        assert (np.ptp(rows[:, 4:], axis=0) == 0).all()
        assert (np.ptp(rows[:, :4], axis=0) > 0).all()
    assert (np.ptp(table.X[:, 4:], axis=0) > 0).all()  # they differ between users
    assert not made.U[4:].any()
    assert not made.covariance[4:].any()
    np.testing.assert_allclose(made.U.T @ made.U, np.eye(2), atol=1e-12)


def test_a_length_is_that_of_random_slopes():
    made = make_population(rng(39), 50, 8, 2, 3, 0.1, common=3.0, between=1.0, context=2.0)
    assert np.linalg.norm(made.common) == pytest.approx(3.0)
    context = np.linalg.lstsq(made.means, made.intercepts, rcond=None)[0]
    assert np.linalg.norm(context) == pytest.approx(2.0)
    assert abs(made.common @ context) < 5.9  # not the same direction


def test_student_noise_has_its_deviation_and_heavy_tails():
    made = make_population(rng(40), 5_000, 3, 1, 20, 0.3, noise_kind="student", intercept=1.0)
    table = made.sample(rng(41))
    owner = np.repeat(np.arange(5_000), made.sizes)
    noise = table.y - np.einsum("rd,rd->r", table.X, made.weights[owner]) - made.intercepts[owner]
    assert covariance_is(noise[:, None], [[0.09]])
    assert not covariance_is(noise[:, None], [[0.09 * 1.1]])
    assert kstest(noise / (0.3 * np.sqrt(1 - 2 / STUDENT_FREEDOM)), t(STUDENT_FREEDOM).cdf).pvalue > ALARM


@pytest.mark.parametrize("options", [{"common": 2.0}, {"intercept": 1.0}])
def test_rank_zero_is_a_population_without_slopes_of_their_own(options):
    made = make_population(rng(42), 40, 5, 0, (2, 4), 0.2, level=3.0, **options)
    assert made.U.shape == (5, 0)
    assert made.heads.shape == (40, 0)
    assert (made.weights == (0.0 if made.common is None else made.common)).all()
    table = made.sample(rng(43))
    assert set(table.sizes) == {2, 3, 4}
    assert made.population_mse(made.weights, made.intercepts) == pytest.approx(0.04)


def test_options_of_panels_change_nothing_that_is_drawn_without_them():
    plain = make_population(rng(44), 30, 5, 2, (2, 6), 0.1, intercept=1.0)
    panel = make_population(rng(44), 30, 5, 2, (2, 6), 0.1, intercept=1.0, level=2.0, common=1.0, between=1.0)
    for name in ("U", "heads", "sizes"):
        np.testing.assert_array_equal(getattr(plain, name), getattr(panel, name))
    np.testing.assert_array_equal(plain.intercepts + 2.0, panel.intercepts)
    assert plain.common is None
    assert plain.means is None


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"rank": 0}, "rank must lie between 1"),
        ({"rank": 0, "level": 1.0}, "rank must lie between 1"),  # nothing tells users apart, nor rows
        ({"constant_columns": 2, "between": 1.0}, ", 1 without constant ones"),
        ({"rank": 1, "constant_columns": 1}, "constant columns it must be positive"),
        ({"constant_columns": 1, "between": np.array([1.0, 1.0, 0.0])}, "constant columns it must be positive"),
        ({"constant_columns": -1}, "constant columns it must be positive"),
        ({"context": 1.0}, "with context or constant columns"),
        ({"between": -1.0}, "between must not be negative"),
    ],
)
def test_panels_that_are_refused(options, words):
    with pytest.raises(InputError, match=words):
        make_population(rng(0), 5, 3, **{"rank": 2, "rows": 2, "noise": 0.1, **options})


def test_sample_is_a_function_of_the_generator():
    population = make_population(rng(19), 30, 4, 2, (0, 6), 0.1, per_user=True)
    first, second, other = population.sample(rng(1)), population.sample(rng(1)), population.sample(rng(2))
    np.testing.assert_array_equal(first.X, second.X)
    np.testing.assert_array_equal(first.y, second.y)
    assert not np.array_equal(first.y, other.y)
    np.testing.assert_array_equal(first.sizes, population.sizes)
    narrow = population.sample(rng(1), dtype=np.float32)
    assert narrow.X.dtype == narrow.y.dtype == np.float32


def test_refusals():
    with pytest.raises(InputError, match="rank must lie between 1"):
        make_population(rng(0), 5, 3, 4, 2, 0.1)
    with pytest.raises(InputError, match="feature_kind must be one of"):
        make_population(rng(0), 5, 3, 2, 2, 0.1, feature_kind="cauchy")
    with pytest.raises(InputError, match="head_condition"):
        condition_heads(np.ones((5, 1)), 2.0)
