"""Heads as posterior means: as Gaussians have them, one user's own to the bit, and honest in what they doubt."""

from __future__ import annotations

import math
import warnings
from collections.abc import Callable
from dataclasses import dataclass, replace
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from scipy import sparse
from scipy.stats import norm

from privrep import PrivateFedRep, make_population
from privrep.data.table import UserTable
from privrep.errors import InputError
from privrep.heads.fitting import Heads, fit_block, fit_heads, make_prior_heads
from privrep.heads.posterior import MOST_PACKED, count_doubt, find_doubt_at, fit_posterior, make_images, make_spread
from privrep.heads.regression import OWN, POSTERIOR, PRIOR
from privrep.heads.store import read_heads, write_heads
from privrep.linear.references import fit_alone
from privrep.local.prior import QUANTILES, HeadPrior, PriorMean
from privrep.local.representation import Representation, read_representation
from privrep.local.transform import FeatureTransform
from privrep.privacy.moments import pack

FEATURES = 5
NORMAL = norm.ppf(0.5 + np.array(QUANTILES) / 2)


def some_prior(
    p: int = 2, ratio: float = 1.5, own: bool = False, intercept: bool = True, targets: int = 1, seed: int = 0
) -> HeadPrior:
    """A prior with every part in use: what mean rows say, unequal noise, and a column whose centre is not known."""
    rng = np.random.default_rng(seed)
    d, q = FEATURES, targets
    slopes, factor = rng.normal(size=(d, q)), rng.normal(size=(d, p))
    mean = replace(PriorMean.zero(d, q, False), slopes=slopes)
    if intercept:
        located = np.array([1.0, 1.0, 1.0, 1.0, 0.0])
        axes = rng.normal(size=(d, 2)) * located[:, None]
        levels = rng.normal(size=q), slopes, rng.normal(size=d), located
        mean = PriorMean(*levels, axes, np.array([0.5, 2.0]), rng.normal(size=(2, q)) * (ratio > 0), True)
    noise = rng.uniform(500.0, 2000.0, q)  # so large that nobody's level is a surprise
    new = rng.uniform(2.0, 3.0, q)
    return HeadPrior(mean, factor, own, ratio if intercept else 0.0, noise, NORMAL, NORMAL, new)


def some_rows(users: int, rows: int, targets: int = 1, seed: int = 1) -> tuple[np.ndarray, np.ndarray]:
    rng = np.random.default_rng(seed)
    X = rng.normal(size=(users, 1, FEATURES)) + rng.normal(size=(users, rows, FEATURES))
    y = 3 * rng.normal(size=(users, rows, targets))
    return X, y[:, :, 0] if targets == 1 else y


def representation_of(prior: HeadPrior) -> Representation:
    plain = FeatureTransform.plain(prior.factor.shape[0])
    return Representation(np.eye(prior.factor.shape[0])[:, :1], plain, 0.0, prior=prior)


def table_of_groups(*groups: tuple[np.ndarray, np.ndarray]) -> UserTable:
    sizes = [rows for X, _ in groups for rows in [X.shape[1]] * len(X)]
    X = np.concatenate([X.reshape(-1, X.shape[2]) for X, _ in groups])
    y = np.concatenate([y.reshape(-1, *y.shape[2:]) for _, y in groups])
    return UserTable(X, y, np.cumsum([0, *sizes]), np.arange(len(sizes)))


@dataclass
class Direct:
    """The posterior of one user and target, by textbook formulas with dense matrices."""

    prior: HeadPrior
    X: np.ndarray  # (m, d)
    target: int = 0

    @property
    def ratio(self) -> float:
        mean, m = self.prior.mean, len(self.X)
        known_by = mean.context[:, self.target] ** 2 * mean.spread / (1 + m * mean.spread)
        return self.prior.level_ratio + float(known_by.sum()) / self.prior.noise[self.target]

    def mean(self, X: np.ndarray) -> np.ndarray:
        """Targets of rows that the prior expects, given the user's mean row."""
        prior, own = self.prior.mean, self.X.mean(axis=0)
        slopes = prior.slopes[:, self.target]
        if not prior.intercept:
            return X @ slopes
        origin = np.where(prior.located == 1, prior.centre, own)
        about_user = (own - prior.centre) @ prior.axes * prior.spread / (prior.spread + 1 / len(self.X))
        return prior.level[self.target] + (X - origin) @ slopes + about_user @ prior.context[:, self.target]

    def design(self, X: np.ndarray) -> np.ndarray:
        """(rows, 1 + p): what the level and the coordinates of slopes count in each row."""
        prior, origin = self.prior.mean, np.zeros(FEATURES)
        if prior.intercept:
            own = self.X.mean(axis=0)
            origin = own if self.prior.own_origin else np.where(prior.located == 1, prior.centre, own)
        return np.column_stack([np.ones(len(X)), (X - origin) @ self.prior.factor])

    def posterior(self, residuals: np.ndarray, kept: Any = slice(None)) -> tuple[np.ndarray, np.ndarray]:
        """Mean and covariance, over the noise's variance, of level and coordinates, given some of the residuals."""
        A, ratio = self.design(self.X)[kept], self.ratio
        if math.isinf(ratio):
            covariance = np.linalg.inv(A.T @ A + np.diag([0.0, *np.ones(A.shape[1] - 1)]))
            return covariance @ A.T @ residuals[kept], covariance
        before = np.diag([ratio, *np.ones(A.shape[1] - 1)])
        gain = before @ A.T @ np.linalg.inv(np.eye(len(A)) + A @ before @ A.T)
        return gain @ residuals[kept], before - gain @ A @ before


def test_a_level_far_off_counts_for_more_than_the_prior_says() -> None:
    """Four standard deviations are believed as the prior says, forty are not: that user keeps most of its own mean."""
    mean = PriorMean.zero(FEATURES, 1, True)
    prior = HeadPrior(mean, np.zeros((FEATURES, 0)), False, 0.01, np.ones(1), NORMAL, NORMAL, np.ones(1))
    rng = np.random.default_rng(0)
    X, noise = rng.normal(size=(2, 8, FEATURES)), rng.normal(size=(2, 8))
    near, far = (fit_posterior(X, noise - noise.mean(axis=1, keepdims=True) + level, prior, 0) for level in (1.0, 14.0))
    np.testing.assert_allclose(near.intercept, 1.0 * 0.08 / 1.08)  # shrunk by rho m / (1 + rho m)
    assert (far.intercept > 0.99 * 14.0).all()
    assert (far.doubt > near.doubt).all()


CASES = [
    pytest.param(p, m, ratio, own, True, id=f"p{p}-m{m}-ratio{ratio}-{'own' if own else 'public'}")
    for p in (0, 2, MOST_PACKED)
    for m in (2, 4, 9)
    for ratio in (0.0, 1.5, math.inf)
    for own in (False, True)
] + [pytest.param(p, m, 0.0, False, False, id=f"p{p}-m{m}-no-intercept") for p in (0, 2, 6) for m in (1, 4, 9)]


@pytest.mark.parametrize(("p", "m", "ratio", "own", "intercept"), CASES)
def test_heads_are_posterior_means(p: int, m: int, ratio: float, own: bool, intercept: bool) -> None:
    """Predictions at fresh rows and what is left to doubt there, against matrices of Gaussians."""
    prior = some_prior(p, ratio, own, intercept)
    X, y = some_rows(4, m)
    heads = fit_posterior(X, y, prior, 0)
    fresh = np.random.default_rng(2).normal(size=(7, FEATURES))
    for i in range(4):
        direct = Direct(prior, X[i])
        mean, covariance = direct.posterior(y[i] - direct.mean(X[i]))
        if not intercept:
            mean[0], covariance[0], covariance[:, 0] = 0.0, 0.0, 0.0
        wanted = direct.mean(fresh) + direct.design(fresh) @ mean
        weights = prior.mean.slopes[:, 0] + prior.factor @ heads.coordinates[i]
        np.testing.assert_allclose(heads.intercept[i] + fresh @ weights, wanted, rtol=1e-9, atol=1e-9)
        np.testing.assert_allclose(heads.coordinates[i], mean[1:], rtol=1e-9, atol=1e-9)
        np.testing.assert_allclose(heads.doubt[i], pack(covariance), rtol=1e-9, atol=1e-9)
        doubts = find_doubt_at(np.repeat(heads.doubt[i : i + 1], 7, axis=0), fresh @ prior.factor - heads.origin[i])
        design = direct.design(fresh)
        np.testing.assert_allclose(doubts, np.einsum("ra,ab,rb->r", design, covariance, design), atol=1e-8)


@pytest.mark.parametrize(("p", "m", "ratio", "own", "intercept"), CASES)
def test_leaving_a_target_out_is_refitting_without_it(p: int, m: int, ratio: float, own: bool, intercept: bool) -> None:
    prior = some_prior(p, ratio, own, intercept)
    X, y = some_rows(3, m)
    direct = [Direct(prior, X[i]) for i in range(3)]
    residuals = np.stack([y[i] - each.mean(X[i]) for i, each in enumerate(direct)])
    whole = direct[0].ratio if intercept else 0.0
    fits = make_spread(make_images(X, prior.factor, prior.mean, own), residuals).with_levels(whole)
    for i, each in enumerate(direct):
        design = each.design(X[i])
        for j in range(m):
            mean, covariance = each.posterior(residuals[i], np.arange(m) != j)
            left = residuals[i, j] - design[j] @ mean
            assert fits.left[i, j] == pytest.approx(left, rel=1e-7, abs=1e-7)
            assert 1 / fits.certainty[i, j] == pytest.approx(1 + design[j] @ covariance @ design[j], rel=1e-7)


def test_doubts_of_many_coordinates_are_two_numbers() -> None:
    prior = some_prior(MOST_PACKED + 3, 0.7, own=True)
    for m in (4, 20):
        X, y = some_rows(3, m)
        heads = fit_posterior(X, y, prior, 0)
        assert heads.doubt.shape == (3, count_doubt(MOST_PACKED + 3)) == (3, 2)
        for i in range(3):
            direct = Direct(prior, X[i])
            _, covariance = direct.posterior(y[i])
            P = direct.design(X[i])[:, 1:]
            slopes = np.trace(np.linalg.inv(np.eye(P.shape[1]) + P.T @ P)) / P.shape[1]
            np.testing.assert_allclose(heads.doubt[i], [covariance[0, 0], slopes], rtol=1e-9)


@pytest.mark.parametrize("make", [np.asarray, sparse.csr_array], ids=["dense", "sparse"])
@pytest.mark.parametrize("p", [0, 2, 8])
def test_a_head_alone_is_the_head_in_a_crowd(p: int, make: Callable[[Any], Any]) -> None:
    prior = some_prior(p, targets=2)
    table = table_of_groups(*(some_rows(5, m, 2, seed=m) for m in (1, 2, 3, 7, 30)))
    crowd = fit_block(replace(table, X=make(table.X)), representation_of(prior), True, True)
    assert np.isin(crowd.kind, (OWN, POSTERIOR)).all()
    for user in range(table.n_users):
        one = table.users(user, user + 1)
        alone = fit_block(replace(one, X=make(one.X)), representation_of(prior), True, True)
        assert_same_heads(crowd.of_users(np.arange(table.n_users) == user), alone)


def assert_same_heads(one: Heads, other: Heads) -> None:
    for name, value in vars(one).items():
        assert np.array_equal(value, vars(other)[name]), name


@pytest.mark.parametrize("size", [1e-320, 1e-160, 1e7, 1e70, 1e150, 1e154, 1e200, 1e308])
@pytest.mark.parametrize("p", [0, 2, 8])
def test_no_size_of_one_users_rows_disturbs_the_others(p: int, size: float) -> None:
    prior = some_prior(p)
    X, y = some_rows(6, 4)
    before = fit_block(table_of_groups((X, y)), representation_of(prior), True, True)
    with np.errstate(all="ignore"):
        X[2] *= size
        y[3] *= size
        X[4], y[4] = X[4] * size, y[4] * size
    after = fit_block(table_of_groups((X, y)), representation_of(prior), True, True)
    others = np.array([True, True, False, False, False, True])
    assert_same_heads(before.of_users(others), after.of_users(others))
    for numbers in (after.intercept, after.shared, after.origin, after.doubt):
        assert np.isfinite(np.asarray(numbers)).all()


def test_users_without_rows_have_the_prior_mean() -> None:
    prior = some_prior(targets=2)
    X, y = some_rows(2, 3, 2)
    rows, fresh = table_of_groups((X, y)), some_rows(1, 8)[0][0]
    table = UserTable(rows.X, rows.y, np.array([0, 3, 3, 6]), np.array(["a", "b", "c"]))
    rep = representation_of(prior)
    heads = fit_heads(table.blocks(), rep)
    assert heads.kind.tolist() == [POSTERIOR, POSTERIOR, PRIOR, PRIOR, POSTERIOR, POSTERIOR]
    assert_same_heads(heads.of_users(np.array([False, True, False])), make_prior_heads(np.array(["b"]), prior))
    wanted = prior.mean.predict_rows(fresh)
    for user in (1, -1):
        users = np.full(8, user)
        np.testing.assert_array_equal(heads.predict(rep, fresh, users), wanted)
        np.testing.assert_array_equal(heads.predict(rep, sparse.csr_array(fresh), users).round(9), wanted.round(9))
        deviations = heads.deviations(rep, fresh, users)
        np.testing.assert_array_equal(deviations, np.tile(np.sqrt(prior.noise * prior.new_ratio), (8, 1)))
    weights = heads.weights(rep)[2:4]
    np.testing.assert_allclose(fresh @ weights.T + heads.intercept[2:4], wanted, rtol=1e-12)
    mixed = np.array([0, -1, 1, 2, -1, 0, 0, 2])
    together = heads.predict(rep, fresh, mixed)
    for user in (-1, 0, 1, 2):
        alone = heads.predict(rep, fresh, np.full(8, user))
        np.testing.assert_allclose(together[mixed == user], alone[mixed == user], rtol=1e-12)
    with pytest.raises(InputError, match="the model has 2 targets"):
        fit_block(table_of_groups(some_rows(2, 3)), rep, True, True)


def test_models_without_a_prior_refuse_unknown_users_and_say_nothing_of_doubt() -> None:
    rep = replace(representation_of(some_prior()), prior=None)
    heads = fit_heads(table_of_groups(some_rows(3, 4)).blocks(), rep)
    with pytest.raises(InputError, match="no prior"):
        heads.predict(rep, np.zeros((1, FEATURES)), np.array([-1]))
    for ask in (heads.deviations, lambda *rows: heads.interval(*rows, 0.9)):
        with pytest.raises(InputError, match="says nothing of its uncertainty"):
            ask(rep, np.zeros((1, FEATURES)), np.array([0]))


# Populations that the prior is true of


def drawn(prior: HeadPrior, users: int, rows: int, seed: int) -> tuple[np.ndarray, np.ndarray]:
    """Rows of users whose levels, slopes and noise are drawn from the prior; mean rows say nothing of levels."""
    rng = np.random.default_rng(seed)
    X = prior.mean.centre + rng.normal(size=(users, rows, FEATURES))
    b, v, e = (rng.normal(size=(users, each)) for each in (1, prior.factor.shape[1], rows))
    about = np.einsum("umd,dp,up->um", X - prior.mean.centre, prior.factor, v)
    unit = math.sqrt(prior.noise[0])
    y = prior.mean.predict_users(X)[:, :, 0] + unit * (math.sqrt(prior.level_ratio) * b + about + e)
    return X, y


@pytest.fixture(scope="module")
def true_prior() -> HeadPrior:
    prior = some_prior(1, 2.0)
    nothing = PriorMean.zero(FEATURES, 1, True)
    mean = replace(nothing, level=prior.mean.level, slopes=prior.mean.slopes, centre=prior.mean.centre)
    factor = prior.factor / np.linalg.norm(prior.factor)
    return replace(prior, mean=mean, factor=factor, new_ratio=np.array([1 + 2.0 + 1.0]))


def test_intervals_cover_what_they_say(true_prior: HeadPrior) -> None:
    rep = representation_of(true_prior)
    for rows in (0, 1, 2, 4, 12):
        X, y = drawn(true_prior, 4000, rows + 5, seed=rows)
        seen = UserTable(
            X[:, :rows].reshape(-1, FEATURES), y[:, :rows].ravel(), np.arange(4001) * rows, np.arange(4000)
        )
        heads = fit_heads(seen.blocks(), rep) if rows else make_prior_heads(seen.ids, true_prior)
        fresh, targets, users = X[:, rows:].reshape(-1, FEATURES), y[:, rows:].ravel(), np.repeat(np.arange(4000), 5)
        errors = (heads.predict(rep, fresh, users) - targets) / heads.deviations(rep, fresh, users)
        assert np.mean(errors**2) == pytest.approx(1.0, abs=0.06)
        for coverage in (0.5, 0.9, 0.95, 0.999):
            low, high = heads.interval(rep, fresh, users, coverage)
            assert np.mean((low <= targets) & (targets <= high)) == pytest.approx(coverage, abs=0.025)


def test_each_row_of_ones_own_helps_on_average(true_prior: HeadPrior) -> None:
    rep = representation_of(true_prior)
    X, y = drawn(true_prior, 4000, 20, seed=5)
    users, fresh, targets = np.repeat(np.arange(4000), 10), X[:, 10:].reshape(-1, FEATURES), y[:, 10:].ravel()
    errors = []
    for rows in range(9):
        heads = make_prior_heads(np.arange(4000), true_prior)
        if rows:
            heads = fit_heads(table_of_groups((X[:, :rows], y[:, :rows])).blocks(), rep)
        errors.append(np.mean((heads.predict(rep, fresh, users) - targets) ** 2))
    assert all(later < earlier for earlier, later in pairwise(errors))
    assert errors[0] > 2.5 * errors[-1] > 2.5 * true_prior.noise[0]


@pytest.mark.parametrize("coverage", [0.0, 1.0, -0.1, 90, math.nan, "0.9", None])
def test_coverage_is_a_share(coverage: Any, true_prior: HeadPrior) -> None:
    heads = make_prior_heads(np.arange(2), true_prior)
    with pytest.raises(InputError, match="coverage must lie between 0 and 1"):
        heads.interval(representation_of(true_prior), np.zeros((1, FEATURES)), np.array([0]), coverage)


# In a file


@pytest.mark.parametrize("targets", [1, 2])
@pytest.mark.parametrize("p", [0, 1, 2, 8])
def test_heads_with_doubts_come_back_as_they_were(p: int, targets: int, tmp_path: Path) -> None:
    prior = some_prior(p, targets=targets)
    heads = fit_heads(table_of_groups(some_rows(4, 3, targets)).blocks(), representation_of(prior))
    joined = Heads.join([heads, make_prior_heads(np.array([17, 18]), prior)])
    assert joined.shared.shape == (6 * targets, p)
    write_heads(joined, tmp_path)
    read = read_heads(tmp_path)
    assert_same_heads(joined, read)
    assert read.shared.dtype == read.origin.dtype == read.doubt.dtype == np.float64
    assert_same_heads(Heads.join([read.of_users(np.arange(6) < 4), read.of_users(np.arange(6) >= 4)]), joined)
    write_heads(replace(joined, origin=None, doubt=None), tmp_path)
    assert read_heads(tmp_path).origin is None
    assert read_heads(tmp_path).doubt is None


def test_users_are_as_well_off_as_alone_where_nothing_can_be_learned() -> None:
    """With 500 users and epsilon 0.3 losses cannot tell: own regressions are kept by most, and cost no more than 1%."""
    rng = np.random.default_rng(5)
    population = make_population(rng, 500, 20, 2, 10, 0.1, level=5.0, common=2.0, intercept=1.0)
    table = population.sample(rng)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        model = PrivateFedRep(epsilon=0.3, random_state=1)
        model.fit(table.X, table.y, groups=np.repeat(table.ids, table.sizes))
    heads, learned = model.model_.heads, model.model_.representation
    assert learned.prior is not None
    assert not learned.prior.decided
    assert (heads.kind == OWN).mean() > 0.5
    error = population.population_mse(heads.weights(learned), heads.intercept)
    assert error < 1.01 * population.population_mse(*fit_alone(table))
    assert not read_representation_again(model).decided


def read_representation_again(model: PrivateFedRep) -> HeadPrior:
    page = model.model_.billboard["representation"]
    prior = read_representation(page.arrays, page.facts["derived"]).prior
    assert prior is not None
    return prior


@pytest.mark.parametrize(("users", "m", "p"), [(1, 9, 3), (200, 10, 2), (30, 30, 8), (5, 6, 5)])
def test_few_coordinates_are_solved_side_by_side_as_they_are_one_by_one(users: int, m: int, p: int) -> None:
    """And a user's numbers are the same to the bit whoever is there."""
    rng = np.random.default_rng(p)
    images = rng.normal(size=(users, m, p)) * 10 ** rng.uniform(-3, 3, (users, 1, 1))
    images[0] *= 1e9  # too large: it counts as zero
    residuals = rng.normal(size=(users, m))
    found = make_spread(images, residuals)
    B = np.linalg.inv(found.images @ found.images.transpose(0, 2, 1) + np.eye(m))
    assert found.lost.tolist() == [True] + [False] * (users - 1)
    assert np.allclose(found.targets, (B @ residuals[:, :, None])[:, :, 0], atol=1e-8)
    assert np.allclose(found.ones, B.sum(axis=2), atol=1e-8)
    assert np.allclose(found.diagonal, B[:, np.arange(m), np.arange(m)], atol=1e-8)
    assert np.allclose(found.apply(residuals[:, :, None])[:, :, 0], found.targets, atol=1e-8)
    for user in range(users):
        alone = make_spread(images[user : user + 1], residuals[user : user + 1])
        for name in ("targets", "ones", "diagonal", "inverse"):
            assert np.array_equal(getattr(alone, name)[0], getattr(found, name)[user]), name
