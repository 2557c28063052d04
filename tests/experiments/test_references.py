"""The methods Private FedRep is compared with do what their papers say on data where the answer is known."""

from __future__ import annotations

from functools import partial

import numpy as np
import pytest
from experiments.fedavg import LocalUpdate, dp_fedavg
from experiments.references import altmin

import runs
from privrep.data.synthetic import make_population
from privrep.data.table import UserTable
from privrep.errors import InputError
from privrep.linear.references import FullGradient, fit_fedrep, fit_pooled, subspace_distance
from privrep.privacy.protocol import UserBatch
from privrep.users.memory import InMemoryUsers


def rng(seed):
    return np.random.default_rng([30, seed])


def learn(method, table, rank, **options):
    return method(InMemoryUsers(table) if method is fit_fedrep else table, rank, **options)


start = partial(runs.run_on, seed=3)


@pytest.mark.parametrize("method", [fit_fedrep, altmin])
@pytest.mark.parametrize("kind", ["gaussian", "rademacher"])
def test_recovers_the_representation(method, kind):
    """2,000 users of 8 rows: the error of the least-squares U is about R sqrt(d / (n m)), here 0.002."""
    population = make_population(rng(1), 2_000, 20, 2, 8, 0.05, feature_kind=kind)
    found = learn(method, population.sample(rng(2)), 2, intercept=False)
    np.testing.assert_allclose(found.basis.T @ found.basis, np.eye(2), atol=1e-10)
    assert subspace_distance(found.basis, population.U) < 0.006


@pytest.mark.parametrize("method", [fit_fedrep, altmin])
def test_without_noise_recovery_is_exact(method):
    population = make_population(rng(3), 500, 10, 3, 12, 0.0, intercept=3.0, feature_mean=2.0)
    found = learn(method, population.sample(rng(4)), 3)
    assert subspace_distance(found.basis, population.U) < 1e-5


def test_fedrep_and_altmin_minimise_the_same_risk():
    table = make_population(rng(5), 800, 10, 2, 8, 0.3).sample(rng(6))
    one, other = learn(fit_fedrep, table, 2), learn(altmin, table, 2)
    assert subspace_distance(one.basis, other.basis) < 1e-4


@pytest.mark.parametrize(("method", "condition"), [(fit_fedrep, 1.0), (altmin, 5.0)])
def test_ragged_users_and_ill_conditioned_heads(method, condition):
    """Users with no more rows than columns of U, and empty ones, do no harm; AltMin finds weak directions too.

    Plain FedRep is left out of the latter: it needs sigma_max^2 / sigma_min^2 times as many rounds.
    """
    population = make_population(rng(7), 2_000, 12, 3, (0, 14), 0.05, head_condition=condition, intercept=1.0)
    found = learn(method, population.sample(rng(8)), 3)
    assert subspace_distance(found.basis, population.U) < 0.03


def test_fedrep_in_declared_scales():
    scale = 10.0 ** np.arange(-2, 3)
    population = make_population(rng(9), 1_000, 5, 2, 8, 0.01)
    table = population.sample(rng(10))
    stretched = UserTable(table.X * scale, table.y, table.offsets, table.ids)
    plain, scaled = learn(fit_fedrep, table, 2), learn(fit_fedrep, stretched, 2, scale=scale)
    np.testing.assert_allclose(scaled.basis @ scaled.basis.T, plain.basis @ plain.basis.T, atol=1e-6)
    np.testing.assert_allclose(scaled.scale, scale)


@pytest.mark.parametrize("unit", [2.0**-60, 2.0**60])
def test_fedrep_in_any_unit_of_targets(unit):
    """Bounds follow what users send: sums of tiny contributions keep their digits."""
    table = make_population(rng(9), 1_000, 5, 2, 8, 0.01).sample(rng(10))
    other = UserTable(table.X, table.y * unit, table.offsets, table.ids)
    plain, found = learn(fit_fedrep, table, 2), learn(fit_fedrep, other, 2)
    np.testing.assert_allclose(found.basis @ found.basis.T, plain.basis @ plain.basis.T, atol=1e-6)


def test_full_gradient_is_the_derivative_of_the_risk():
    """With the head at its optimum, the gradient in U is that of the risk minimised over heads: finite differences."""
    generator = rng(11)
    X, y = generator.standard_normal((1, 7, 4)), generator.standard_normal((1, 7))
    U, direction = np.linalg.qr(generator.standard_normal((4, 2)))[0], generator.standard_normal((4, 2))

    def risk(V):
        head = np.linalg.lstsq(X[0] @ V, y[0])[0]
        return float(((y[0] - X[0] @ V @ head) ** 2).mean())

    slope = (risk(U + 1e-6 * direction) - risk(U - 1e-6 * direction)) / 2e-6
    gradient = FullGradient(U, np.ones(4), False)(UserBatch(X, y))["gradient"].values[0].reshape(4, 2)
    assert float((gradient * direction).sum()) == pytest.approx(slope, rel=1e-5)


def test_pooled_is_ridge_regression_of_all_rows():
    table = make_population(rng(12), 200, 6, 2, (1, 9), 0.1, intercept=0.5, feature_mean=1.0).sample(rng(13))
    model = fit_pooled(table, ridge=0.0)
    expected = np.linalg.lstsq(np.column_stack([table.X, np.ones(table.n_rows)]), table.y)[0]
    np.testing.assert_allclose(np.append(model.weights, model.intercept), expected, atol=1e-9)
    plain = fit_pooled(table, ridge=0.0, intercept=False)
    np.testing.assert_allclose(plain.weights, np.linalg.lstsq(table.X, table.y)[0], atol=1e-9)
    assert plain.intercept == 0.0


def one_model(users, rows, seed):
    """Everybody has the same head: the case DP-FedAvg is made for."""
    generator = rng(seed)
    X = generator.standard_normal((users * rows, 5)) + 1.0
    weights = np.array([1.0, -2.0, 0.5, 0.0, 3.0])
    y = X @ weights + 4.0 + 0.1 * generator.standard_normal(len(X))
    return UserTable.from_rows(X, y, np.repeat(np.arange(users), rows)), np.append(weights, 4.0)


@pytest.mark.parametrize(("rows", "epsilon"), [(3, 1e4), (20, 1e4), (20, 2.0)])
def test_fedavg_finds_the_model_everybody_shares(rows, epsilon):
    table, truth = one_model(5_000, rows, 14)
    run = start(table, epsilon)
    model = dp_fedavg(run, rounds=40)
    error = np.linalg.norm(np.append(model.weights, model.intercept) - truth) / np.linalg.norm(truth)
    assert error < (0.05 if epsilon > 100 else 0.15)
    assert run.ledger.epsilon == pytest.approx(epsilon, rel=1e-6)
    assert run.ledger.epsilon <= epsilon
    assert len(run.ledger.report().events) == 41  # one histogram, forty rounds


def test_fedavg_with_a_fixed_norm_spends_everything_on_rounds():
    table, _ = one_model(100, 3, 15)
    run = start(table)
    model = dp_fedavg(run, rounds=4, clip=1.0, intercept=False)
    assert model.intercept == 0.0
    assert [name for name, _ in run.ledger.report().events] == [f"fedavg-round-{t}/update" for t in range(1, 5)]
    assert run.ledger.remaining < 1e-9


def test_fedavg_needs_a_public_number_of_users():
    table, _ = one_model(10, 3, 16)
    run = start(table, relation="add-or-remove-one-user")
    with pytest.raises(InputError, match="replace-one-user"):
        dp_fedavg(run)
    assert run.ledger.epsilon == 0.0


def test_a_local_update_is_the_same_in_rows_and_in_features():
    """The two ways of solving the ridge regression agree, and users that are zero move nothing."""
    generator = rng(17)
    model = generator.standard_normal(5)
    for m in (4, 5, 30):
        X, y = generator.standard_normal((3, m, 4)), generator.standard_normal((3, m))
        X[2], y[2] = 0.0, 0.0
        update = LocalUpdate(model, 0.1, False)(UserBatch(X, y))["update"].values
        for u in range(2):
            penalty = 0.1 * (X[u] ** 2).sum() / m
            expected = np.linalg.solve(X[u].T @ X[u] + penalty * np.eye(4), X[u].T @ (y[u] - X[u] @ model[:4]))
            np.testing.assert_allclose(update[u], np.append(expected, 0.0), atol=1e-10)
        np.testing.assert_array_equal(update[2], 0.0)
