"""The linear case of DP-CLIP: loss, optimum, model, error, curves, and the two private ways to train."""

from __future__ import annotations

import itertools
import math
from dataclasses import replace
from functools import partial

import numpy as np
import pytest
from experiments.linear_theory import (
    CrossMoment,
    cross_covariance,
    distance,
    fit_by_batches,
    fit_by_moment,
    gradient,
    loss,
    make_spiked,
    minimiser,
    representation_error,
    start_near,
    theorem_5_1,
)

import runs
from clipping import check_sum
from privrep.data.table import UserTable
from privrep.errors import BudgetExceeded, InputError
from privrep.privacy.accounting import gaussian_epsilon
from privrep.privacy.bounds import NORM_SLACK
from privrep.privacy.ledger import Budget
from privrep.privacy.protocol import UserBatch
from privrep.privacy.sampling import Fixed

DELTA = 1e-6
D1, D2, RANK = 5, 4, 2


def drawn(seed, users=2_000, **more):
    rng = np.random.default_rng(seed)
    model = make_spiked(rng, D1, D2, RANK, **more)
    return model, model.pairs(rng, users), rng


def halves(table):
    return table.X[:, :D1], table.X[:, D1:]


run_on = partial(runs.run_on, delta=DELTA, seed=900)


def by_definition(G, left, right, alpha):
    """Pair by pair, as the paper writes it."""
    n, first, second = len(left), left @ G[:, :D1].T, right @ G[:, D1:].T
    near = sum(first[i] @ second[i] for i in range(n)) / n
    far = sum(first[i] @ second[j] for i, j in itertools.permutations(range(n), 2)) / (n * (n - 1))
    return -near + far + alpha / 4 * np.linalg.norm(G @ G.T - np.eye(len(G))) ** 2


def test_the_loss_by_the_cross_covariance_is_the_sum_over_pairs_of_pairs():
    rng = np.random.default_rng(900)
    left, right = rng.standard_normal((7, D1)) + 3, rng.standard_normal((7, D2)) - 1
    G = rng.standard_normal((RANK, D1 + D2))
    expected = by_definition(G, left, right, 0.7)
    assert loss(G, cross_covariance(left, right), 0.7) == pytest.approx(expected, rel=1e-12)


def test_the_gradient_is_that_of_the_definition():
    rng = np.random.default_rng(901)
    left, right = rng.standard_normal((6, D1)), rng.standard_normal((6, D2)) + 1
    G, found = rng.standard_normal((RANK, D1 + D2)), np.zeros((RANK, D1 + D2))
    for place in np.ndindex(*G.shape):
        step = np.zeros_like(G)
        step[place] = 1e-5
        found[place] = by_definition(G + step, left, right, 0.7) - by_definition(G - step, left, right, 0.7)
    assert gradient(G, cross_covariance(left, right), 0.7) == pytest.approx(found / 2e-5, rel=1e-6, abs=1e-8)


def test_one_pair_is_refused():
    with pytest.raises(InputError, match="two pairs"):
        cross_covariance(np.ones((1, 3)), np.ones((1, 3)))


@pytest.mark.parametrize("alpha", [0.5, 2.0])
def test_descent_ends_at_the_minimiser_by_svd(alpha):
    model, table, rng = drawn(902)
    S = cross_covariance(*halves(table))
    best = minimiser(S, RANK, alpha)
    assert np.linalg.norm(gradient(best, S, alpha)) < 1e-12
    G = start_near(rng, model.minimiser(alpha), 0.5)
    assert distance(G, best) > 0.3
    for _ in range(2_000):
        G = G - 0.1 * gradient(G, S, alpha)
    assert loss(G, S, alpha) == pytest.approx(loss(best, S, alpha), abs=1e-12)
    assert distance(G, best) < 1e-6
    others = [loss(start_near(rng, best, away), S, alpha) for away in (0.01, 0.1, 1.0, 3.0) for _ in range(20)]
    assert min(others) > loss(best, S, alpha)


def test_the_error_is_zero_for_every_optimum_and_does_not_see_the_basis():
    model, _, rng = drawn(903)
    truth = model.minimiser(1.0)
    turned = np.linalg.qr(rng.standard_normal((RANK, RANK)))[0] @ truth
    other, mixed = start_near(rng, truth, 0.4), np.array([[2.0, 1.0], [0.5, -3.0]])
    assert representation_error(turned, truth, D1) < 1e-12
    assert distance(turned, truth) < 1e-12
    assert representation_error(mixed @ truth, truth, D1) < 1e-12
    assert distance(mixed @ truth, truth) > 0.5
    assert representation_error(other, truth, D1) > 0.05
    assert representation_error(mixed @ other, truth, D1) == pytest.approx(representation_error(other, truth, D1))
    assert representation_error(np.zeros_like(truth), truth, D1) == pytest.approx(
        max(np.linalg.norm(truth[:, :D1]), np.linalg.norm(truth[:, D1:]))
    )


def test_the_error_is_that_of_the_worse_half():
    model, _, _ = drawn(904)
    truth = model.minimiser(1.0)
    for half in (slice(None, D1), slice(D1, None)):
        spoilt = truth.copy()
        spoilt[:, half] = 0.0
        assert representation_error(spoilt, truth, D1) == pytest.approx(np.linalg.norm(truth[:, half]))


def test_pairs_have_the_covariance_of_the_model():
    """False alarm: 81 entries (45 different), each beyond 6.3 standard errors with probability 3e-10: 1e-8 in all."""
    model, table, _ = drawn(905, users=50_000, condition=3.0, snr=(2.0, 0.5))

    def worst(claimed):
        own = [(U * claimed.signal) @ U.T for U in (claimed.U1, claimed.U2)]
        own = [part + size**2 * np.eye(len(part)) for part, size in zip(own, claimed.noise, strict=True)]
        cross = claimed.cross_covariance
        C = np.block([[own[0], cross], [cross.T, own[1]]])
        errors = np.sqrt((np.outer(np.diag(C), np.diag(C)) + C**2) / table.n_users)
        return np.max(np.abs(table.X.astype(np.float64).T @ table.X / table.n_users - C) / errors)

    assert worst(model) < 6.3
    assert worst(replace(model, noise=(0.25, 2.0))) > 6.3
    assert worst(replace(model, noise=(0.5, 1.9))) > 6.3
    assert worst(replace(model, signal=np.array([1.0, 0.45]))) > 6.3
    assert np.allclose(model.signal, [1, 1 / 3])
    assert model.condition == pytest.approx(3)
    lengths = [(half.astype(np.float64) ** 2).sum(axis=1).mean() for half in halves(table)]
    assert lengths == pytest.approx(model.squared_lengths(), rel=0.02)
    assert model.spread == pytest.approx(2 + 5 / 4 + 4 * 4)


def test_models_that_mean_nothing_are_refused():
    rng = np.random.default_rng(906)
    with pytest.raises(InputError, match="between 1 and 4"):
        make_spiked(rng, D1, D2, 5)
    with pytest.raises(InputError, match="condition must be 1 or more"):
        make_spiked(rng, D1, D2, 2, condition=0.5)


def test_the_curve_is_that_of_corollary_d_2():
    model, _, _ = drawn(907, users=2)
    n, epsilon, T, alpha, r, d = 5_000, 0.5, 300, 2.0, RANK, D1 + D2
    size = r * d + math.log(T * (n + d))
    found = theorem_5_1(model, n, epsilon, DELTA, T, alpha=alpha, start=0.3)
    assert found.privacy == pytest.approx(
        (1 + alpha) * size**0.25 * math.log(1 / DELTA) ** 0.25 / math.sqrt(n * epsilon)
    )
    exponent = n * epsilon / (8 * 2 * math.sqrt(math.log(1 / DELTA) * size))
    assert found.optimisation == pytest.approx(0.3 * math.exp(-exponent))
    inside = r * (r + D1 + D2) ** 2 * math.log(n + d) ** 3 / n
    assert found.statistical == pytest.approx((alpha + 1 / alpha) * math.sqrt(inside))
    assert found.total == found.optimisation + found.privacy + found.statistical


def test_the_curve_falls_with_users_and_epsilon_but_not_with_users_once_whole_batches_are_paid_for():
    model, _, _ = drawn(907, users=2)

    def at(n, epsilon, **more):
        return theorem_5_1(model, n, epsilon, DELTA, 200, **more)

    totals = [at(n, 1.0).total for n in (1_000, 4_000, 16_000, 64_000)]
    assert totals == sorted(totals, reverse=True)
    totals = [at(4_000, epsilon).total for epsilon in (0.25, 1.0, 4.0)]
    assert totals == sorted(totals, reverse=True)
    assert at(4_000, 4.0).privacy / at(4_000, 1.0).privacy == pytest.approx(0.5)
    assert at(16_000, 1.0).privacy / at(4_000, 1.0).privacy == pytest.approx(0.5, rel=0.03)
    paid = [at(n, 1.0, batch=n / 50).privacy for n in (4_000, 16_000, 64_000)]
    assert paid == sorted(paid)
    assert paid[-1] / paid[0] < 1.05


def test_the_moment_spends_the_whole_budget():
    model, table, _ = drawn(908, users=300)
    run = run_on(table, 1.0)
    G = fit_by_moment(run, D1, RANK, 8.0)
    assert G.shape == (RANK, D1 + D2)
    report = run.ledger.report()
    assert report.epsilon == pytest.approx(1.0, rel=1e-6)
    assert report.epsilon <= 1.0
    assert [name for name, _ in report.events] == ["moment/moment"]
    assert model.rank == RANK


def test_without_noise_the_moment_gives_the_minimiser_whatever_the_means():
    _, table, _ = drawn(909, users=400)
    S = cross_covariance(*halves(table))
    moved = replace(table, X=table.X + np.arange(D1 + D2, dtype=np.float32) / 4)
    for some in (table, moved):
        G = fit_by_moment(run_on(some, 1e9), D1, RANK, 300.0)
        assert distance(G, minimiser(S, RANK, 1.0)) < 5e-3
    assert distance(fit_by_moment(run_on(table, 0.1), D1, RANK, 300.0), minimiser(S, RANK, 1.0)) > 0.5


def test_clipped_moments_keep_the_singular_vectors():
    """Bias, not noise: with next to no noise and half of all pairs clipped the error is that of the sample.

    Of 100,000 pairs it is 0.01 to 0.02; a bias of a tenth of the length of the optimum would be 0.1."""
    model, table, _ = drawn(910, users=100_000)
    truth = model.minimiser(1.0)
    for norm in (2.0, 6.0):
        assert representation_error(fit_by_moment(run_on(table, 1e9), D1, RANK, norm), truth, D1) < 0.04


def test_a_user_of_several_rows_sends_their_mean_product():
    rng = np.random.default_rng(911)
    X = rng.standard_normal((3, 4, D1 + D2))
    sent = CrossMoment(D1, 0.5)(UserBatch(X, np.zeros((3, 4))))["moment"]
    full = [np.mean([np.outer([*row[:D1], 0.5], [*row[D1:], 0.5]) for row in user], axis=0).ravel() for user in X]
    for user, expected in enumerate(full):
        weights = np.zeros(3)
        weights[user] = 1.0
        check_sum(sent, weights, expected)
        assert sent.norms()[user] >= np.linalg.norm(expected)


def test_algorithm_1_spends_the_budget_in_one_charge():
    _, table, rng = drawn(912, users=60)
    start = start_near(rng, minimiser(cross_covariance(*halves(table)), RANK, 1.0), 0.3)
    run = run_on(table, 2.0)
    fit_by_batches(run, D1, start, Fixed(60, 60), 8, 0.25, 0.05)
    assert 0.999 * 2.0 < run.ledger.report().epsilon <= 2.0
    ((_, event),) = run.ledger.report().events
    assert (event.count, event.noise_multiplier) == (8, pytest.approx(math.sqrt(8) / Budget(2.0, DELTA).mu, rel=1e-3))


def test_batches_are_charged_for_their_part_of_the_users():
    _, table, rng = drawn(912, users=60)
    start = start_near(rng, minimiser(cross_covariance(*halves(table)), RANK, 1.0), 0.3)
    run = run_on(table, 2.0)
    fit_by_batches(run, D1, start, Fixed(12, 60), 8, 0.25, 0.05, multiplier=3.0)
    report = run.ledger.report()
    ((_, event),) = report.events
    assert (event.count, event.rate, event.noise_multiplier) == (8, 0.2, pytest.approx(3.0))
    everyone = gaussian_epsilon(DELTA, math.sqrt(8) / 3)
    assert 0.2 * everyone < report.epsilon < everyone / 2
    with pytest.raises(BudgetExceeded):
        fit_by_batches(run_on(table, 0.5), D1, start, Fixed(12, 60), 8, 0.25, 0.05, multiplier=3.0)


def test_the_noise_of_algorithm_1_is_twice_the_multiplier_that_is_charged():
    """No signal, and a start where the penalty is flat: steps are noise. Of 320 numbers, each a sum of 4 draws, the
    root mean square is within a fifth of the truth but with probability 6e-7; sigma c and 4 sigma c are far outside."""
    silent = UserTable(np.zeros((60, 80), np.float32), np.zeros(60, np.float32), np.arange(61), np.arange(60))
    run, best = run_on(silent, 2.0, seed=913), minimiser(np.zeros((40, 40)), 4, 1.0)
    moved = fit_by_batches(run, 40, best, Fixed(12, 60), 4, 0.25, 1e-6, multiplier=3.0) - best
    ((_, event),) = run.ledger.report().events
    spread = np.sqrt(np.mean(moved**2) / 4) / 1e-6
    assert event.noise_multiplier == pytest.approx(3.0)
    assert spread == pytest.approx(2 * 3.0 * 0.25 * (1 + NORM_SLACK), rel=0.2)


def test_without_noise_algorithm_1_comes_near_the_minimiser():
    _, table, rng = drawn(914, users=500)
    best = minimiser(cross_covariance(*halves(table)), RANK, 1.0)
    start = start_near(rng, best, 0.5)
    found = fit_by_batches(run_on(table, 1e9), D1, start, Fixed(500, 500), 200, 3.0, 0.1, multiplier=0.001)
    assert distance(start, best) > 0.3
    assert distance(found, best) < 0.1
