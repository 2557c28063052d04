"""References on panels: what they recover where the truth is known, who beats whom, and the real tables."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from experiments.table_references import (
    REFERENCES,
    Predictions,
    Units,
    fit_mixed,
    informed,
    mixed_intercepts,
    mixed_slopes,
    noisy_ridge,
    noisy_scales,
    noisy_slopes,
    pooled_ridge,
    user_mean,
    user_moments,
    within_moments,
)
from experiments.tables_data import PANELS, Panel, Task, default_data, read_task, split

from privrep.data.synthetic import Population, make_population
from privrep.errors import InputError

SLOPES = np.array([1.0, -2.0, 0.5, 0.0, 1.5])
OPTIONS = {
    "intercept": 1.5,
    "level": 20.0,
    "common": SLOPES,
    "between": 1.0,
    "constant_columns": 1,
    "heads": "gaussian",
}


def rng(seed: int) -> np.random.Generator:
    return np.random.default_rng([161, seed])


def population(seed: int, users: int = 1_500, rows: tuple[int, int] = (2, 9), **options: object) -> Population:
    """Users with levels, slopes that are mostly common, and a column that never varies within a user."""
    return make_population(rng(seed), users, 5, 1, rows, 0.8, **{**OPTIONS, **options})


def drawn(truth: Population, seed: int) -> Task:
    """Return a split of rows, which are in a random order."""
    table, order = truth.sample(rng(seed)), rng(seed + 1).permutation(truth.sizes.sum())
    owners = np.repeat(np.arange(len(truth.sizes)), truth.sizes)
    return split(Panel(table.X[order], table.y[order], owners[order]), seed=0)


@pytest.fixture(scope="module")
def task() -> Task:
    return drawn(population(1), 2)


def errors(task: Task, predictions: Predictions) -> np.ndarray:
    return np.array(predictions.errors(task))


def test_a_split_is_whole_and_newcomers_are_strangers(task: Task) -> None:
    parts = np.stack([task.train, task.test, task.support, task.newcomers])
    assert parts.sum(axis=0).max() == 1
    known, new = (set(task.codes[a | b]) for a, b in ((task.train, task.test), (task.support, task.newcomers)))
    assert not known & new
    assert len(new) == 150
    assert set(task.codes[task.test]) <= set(task.codes[task.train])
    brought = np.bincount(task.codes[task.support])
    assert brought.max() == 3
    sizes = np.bincount(task.codes)
    tested = np.bincount(task.codes[task.test], minlength=len(sizes))
    assert not tested[sizes < 3].any()
    held = np.maximum(1, sizes // 4) * (sizes >= 3)
    assert (tested[sorted(known)] == held[sorted(known)]).all()


def test_newcomers_bring_as_many_rows_as_one_asks_for(task: Task) -> None:
    for rows in range(4):
        fewer = task.with_support(rows)
        assert np.bincount(task.codes[fewer.support], minlength=1).max() == rows
        assert not (fewer.support & ~task.support).any()
    with pytest.raises(InputError, match="between 0 and 3"):
        task.with_support(4)


def test_moments_are_sums_over_users_rows() -> None:
    rows, users = rng(3).standard_normal((40, 3)), rng(4).integers(0, 6, 40)
    users[users == 4] = 5  # a user without rows
    within, counts = within_moments(rows, users, 8)
    moments = user_moments(rows, users, 8)
    for i in range(8):
        own = rows[users == i]
        np.testing.assert_allclose(moments[i], own.T @ own, atol=1e-12)
        apart = own - own.mean(axis=0) if len(own) else own
        np.testing.assert_allclose(within[i], apart.T @ apart, atol=1e-12)
        assert counts[i] == len(own)


def test_em_recovers_variances_and_fixed_effects() -> None:
    """6,000 users of 8 rows: standard errors of the variances are about 2%, of the slopes 0.01."""
    truth = population(5, users=6_000, rows=(8, 8), constant_columns=0)
    table = truth.sample(rng(6))
    users, rows = np.repeat(np.arange(6_000), 8), np.column_stack([np.ones(48_000), table.X, table.y])
    model = fit_mixed(user_moments(rows, users, 6_000), slopes=True, iterations=200)
    assert model.noise == pytest.approx(0.64, rel=0.03)
    assert model.spread[0, 0] == pytest.approx(2.25, rel=0.08)
    np.testing.assert_allclose(model.spread[1:, 1:], truth.U @ truth.U.T, atol=0.06)
    np.testing.assert_allclose(model.spread[0, 1:], 0.0, atol=0.08)
    np.testing.assert_allclose(model.fixed, [20.0, *SLOPES], atol=0.08)


def test_em_recovers_the_variance_of_intercepts_alone() -> None:
    truth = make_population(rng(7), 4_000, 5, 0, (2, 9), 0.8, **OPTIONS)
    table = truth.sample(rng(8))
    users = np.repeat(np.arange(4_000), truth.sizes)
    moments = user_moments(np.column_stack([np.ones(len(users)), table.X, table.y]), users, 4_000)
    model = fit_mixed(moments, slopes=False)
    assert model.spread[0, 0] == pytest.approx(2.25, rel=0.08)
    assert model.noise == pytest.approx(0.64, rel=0.04)
    np.testing.assert_allclose(model.fixed, [20.0, *SLOPES], atol=0.1)
    better = fit_mixed(moments, slopes=True, iterations=200)  # slopes that do not differ have next to no variance
    assert np.diag(better.spread)[1:5].max() < 0.02


def test_a_mixed_model_without_rows_says_what_is_common(task: Task) -> None:
    units = Units.of(task)
    moments = user_moments(units.design(task)[task.train], task.codes[task.train], task.n_users)
    model = fit_mixed(moments[moments[:, 0, 0] > 0], slopes=True)
    heads = model.posterior(moments)
    without = moments[:, 0, 0] == 0
    assert without.sum() == 150
    np.testing.assert_allclose(heads[without], np.broadcast_to(model.fixed, (150, 6)))


def test_mixed_models_beat_user_mean_and_pooled_ridge(task: Task) -> None:
    mean, pooled, intercepts, slopes = (
        errors(task, fit(task)) for fit in (user_mean, pooled_ridge, mixed_intercepts, mixed_slopes)
    )
    assert (intercepts[:2] < 0.98 * np.minimum(mean, pooled)[:2]).all()
    assert (slopes[:2] < intercepts[:2]).all()
    assert slopes[2] == pytest.approx(pooled[2], rel=0.02)
    assert mean[2] == pytest.approx(task.y[task.newcomers].std(), rel=0.1)


def test_a_mixed_model_does_as_well_as_one_who_knows_the_population() -> None:
    """Its excess over the best linear prediction is that of some ten parameters learned from 3,000 users."""
    truth = population(9, users=3_000, between=2.0, context=1.0, noise_kind="student")
    task = drawn(truth, 10)
    table, owners = truth.sample(rng(10)), np.repeat(np.arange(3_000), truth.sizes)
    known = truth.population_mse(*informed(truth, table))
    units = Units(np.zeros(6), np.ones(6))
    moments = user_moments(np.column_stack([np.ones(len(owners)), table.X, table.y]), owners, 3_000)
    heads = units.heads(fit_mixed(moments, slopes=True).posterior(moments), np.zeros(6))
    mixed = truth.population_mse(heads.weights, heads.intercepts)
    assert 0.64 < known < mixed < 1.05 * known  # the mixed model takes levels and feature means for independent
    for change in (0.8, 1.25):  # who thinks that users differ less, or more, does worse
        wrong = replace(truth, heads=change * truth.heads, noise=truth.noise / change)
        assert truth.population_mse(*informed(wrong, table)) > known
    assert errors(task, mixed_slopes(task))[0] ** 2 == pytest.approx(mixed, rel=0.15)


def test_more_rows_of_newcomers_make_better_predictions(task: Task) -> None:
    """Of mixed models, that is: a user's mean of one row is worse than the mean of all here."""
    for fit in (mixed_intercepts, mixed_slopes):
        found = [errors(task, fit(task.with_support(rows)))[1] for rows in range(4)]
        assert (np.diff(found) < 0).all()
        assert found[0] == pytest.approx(errors(task, fit(task))[2])


def fixed_effects(task: Task) -> np.ndarray:
    """Return slopes within users by least squares; the constant column's is zero."""
    within, _ = within_moments(np.column_stack([task.X, task.y])[task.train], task.codes[task.train], task.n_users)
    total = within.sum(axis=0)
    return np.append(np.linalg.solve(total[:4, :4], total[:4, -1]), 0.0)


def test_the_analyst_with_next_to_no_noise_has_fixed_effects() -> None:
    task = drawn(make_population(rng(11), 4_000, 5, 0, (2, 9), 0.8, **OPTIONS), 12)
    slopes = fixed_effects(task)
    np.testing.assert_allclose(slopes, [*SLOPES[:4], 0.0], atol=0.05)
    rows, users = np.column_stack([task.X, task.y])[task.train], task.codes[task.train]
    within, counts = within_moments(rows, users, task.n_users)
    scales = noisy_scales(within, counts, 1e6, rng(13))
    assert np.isnan(scales[4])  # never varies: nobody to count
    assert set(scales[:4]) == {1.0}
    found = noisy_slopes(within, counts, scales, 1e6, rng(14))
    np.testing.assert_allclose(found, slopes, atol=0.05)  # clipping weighs users otherwise
    much, little = (errors(task, noisy_ridge(task, epsilon, rng(15))) for epsilon in (1_000.0, 0.02))
    levels = np.bincount(users, task.y[task.train] - task.X[task.train] @ slopes) / np.bincount(users).clip(1)
    exact = task.X[task.test] @ slopes + levels[task.codes[task.test]] - task.y[task.test]
    assert much[0] == pytest.approx(np.sqrt(np.mean(exact**2)), rel=0.01)
    mean = errors(task, user_mean(task))
    assert much[0] < 0.5 * mean[0]
    assert little[0] == pytest.approx(mean[0], rel=0.05)  # no scale stands, no slope
    assert much[2] == mean[2]


def test_noise_of_the_analyst_has_the_size_that_the_budget_asks_for() -> None:
    """Empty data: what is released is noise alone, and slopes are bounded by the ridge."""
    within, counts = np.zeros((50, 3, 3)), np.full(50, 4.0)
    assert np.isnan(noisy_scales(within, counts, 1.0, rng(16))).all()
    found = np.array([noisy_slopes(within, counts, np.ones(3), 1.0, rng(100 + i)) for i in range(200)])
    assert np.abs(found).max() < 2
    assert 0.1 < found.std() < 0.6
    assert (noisy_slopes(within, counts, np.array([1.0, 1.0, np.nan]), 1.0, rng(17)) == 0).all()


def test_seeds_give_the_same_numbers(task: Task) -> None:
    few = drawn(population(18, users=300), 19)
    for name, fit in REFERENCES.items():
        np.testing.assert_array_equal(errors(few, fit(few)), errors(few, fit(few)), err_msg=name)
    one, same, other = (errors(task, noisy_ridge(task, 1.0, rng(seed))) for seed in (20, 20, 21))
    np.testing.assert_array_equal(one, same)
    assert one[0] != other[0]


@pytest.mark.parametrize(
    ("name", "counts"),
    [
        ("nlswork", (19_550, 4_975, 1_201, 561)),
        ("batting", (34_503, 8_650, 2_031, 966)),
        ("chem97", (21_372, 6_235, 659, 773)),
    ],
)
def test_references_on_real_tables(name: str, counts: tuple[int, ...]) -> None:
    if not (default_data() / f"{name}.parquet").exists():
        pytest.skip(f"there is no {name}.parquet in {default_data()}")
    task = read_task(name, seed=0)
    assert tuple(part.sum() for part in (task.train, task.test, task.support, task.newcomers)) == counts
    found = {method: errors(task, fit(task)) for method, fit in REFERENCES.items()}
    mixed = np.minimum(found["mixed model, intercepts"], found["mixed model, slopes"])
    assert (mixed[:2] < found["user mean"][:2]).all()
    assert (mixed[:2] < found["pooled ridge"][:2]).all()
    analyst = errors(task, noisy_ridge(task, 1.0, rng(22)))
    assert mixed[0] < analyst[0] < found["user mean"][0]


def test_tables_that_are_not_there_are_asked_for(tmp_path: Path) -> None:
    assert set(PANELS) == {"nlswork", "batting", "chem97"}
    with pytest.raises(InputError, match=r"there is no nlswork\.parquet in"):
        read_task("nlswork", 0, tmp_path)
