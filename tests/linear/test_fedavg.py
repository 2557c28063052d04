"""DP-FedAvg finds the model that users share, gives its direction to their heads, and pays for all it asks."""

from __future__ import annotations

from functools import partial

import numpy as np
import pytest

import runs
from privrep.data.table import UserTable
from privrep.errors import InputError
from privrep.heads.fitting import fit_heads
from privrep.linear.methods.fedavg import ROUNDS, ModelUpdate, fedavg, paper_fedavg
from privrep.local.transform import FeatureTransform
from privrep.privacy.protocol import UserBatch

WEIGHTS = np.array([1.0, -2.0, 0.5, 0.0, 3.0])


def rng(seed):
    return np.random.default_rng([33, seed])


def one_model(users, rows, seed, scale=1.0, spread=0.0):
    """Everybody has the same model up to its length and intercept: the case DP-FedAvg is made for."""
    generator = rng(seed)
    who = np.repeat(np.arange(users), rows)
    X = generator.standard_normal((users * rows, 5)) + 1.0
    length, intercepts = 1 + spread * generator.standard_normal(users), generator.standard_normal(users)
    y = (X @ WEIGHTS) * length[who] + intercepts[who] + 0.1 * generator.standard_normal(len(X))
    return UserTable.from_rows(X * scale, y, who)


start = partial(runs.run_on, seed=3)


def sine(matrix, weights=WEIGHTS):
    """Squared, between the one column and the truth."""
    (column,) = matrix.T
    return 1 - (column @ weights) ** 2 / (column @ column) / (weights @ weights)


@pytest.mark.parametrize(("rows", "epsilon", "spread"), [(3, 1e4, 0.0), (20, 1e4, 0.5), (20, 2.0, 0.0), (8, 2.0, 0.5)])
def test_finds_the_direction_that_everybody_shares(rows, epsilon, spread):
    table = one_model(5_000, rows, 1, spread=spread)
    run = start(table, epsilon)
    found = fedavg(run)
    assert found.basis.shape == (5, 1)
    assert sine(found.matrix) < 0.005
    assert not found.mostly_noise
    assert run.ledger.epsilon == pytest.approx(epsilon, rel=1e-6)
    heads = fit_heads(table.blocks(), found)
    assert ((heads.predict(found, table.X, np.repeat(np.arange(5_000), rows)) - table.y) ** 2).mean() < 0.05


def test_the_units_of_the_features_do_not_matter():
    scale = 10.0 ** np.arange(-2, 3)
    found = fedavg(start(one_model(5_000, 10, 2, scale), 2.0))
    assert sine(found.matrix * scale[:, None]) < 0.005
    declared = fedavg(start(one_model(5_000, 10, 2, scale), 2.0), transform=FeatureTransform(scale))
    assert sine(declared.matrix * scale[:, None]) < 0.005


def test_asks_for_no_more_than_it_says():
    run = start(one_model(5_000, 5, 3))
    fedavg(run, transform=FeatureTransform(np.ones(5)))
    rounds = [f"fedavg-round-{t}/{what}" for t in range(1, ROUNDS) for what in ("update", "sizes")]
    assert [name for name, _ in run.ledger.report().events] == [
        "fedavg-sizes/sizes", *rounds, f"fedavg-round-{ROUNDS}/update", "preference/votes",
    ]  # fmt: skip


def test_with_few_users_it_says_that_nothing_was_learned():
    run = start(one_model(60, 5, 4))
    found = fedavg(run)
    assert found.mostly_noise
    assert run.ledger.epsilon < 1.0  # the rest is not spent
    np.testing.assert_allclose(np.linalg.norm(found.basis), 1.0)


def test_models_with_nothing_in_common_leave_noise():
    generator = rng(5)
    X, who = generator.standard_normal((20_000, 5)), np.repeat(np.arange(2_000), 10)
    heads = generator.standard_normal((2_000, 5))
    found = fedavg(start(UserTable.from_rows(X, (X * heads[who]).sum(axis=1), who)))
    assert found.mean_error > 0.1


def test_one_feature_has_one_direction():
    table = UserTable.from_rows(rng(6).standard_normal((100, 1)), rng(7).standard_normal(100), np.repeat(range(20), 5))
    assert fedavg(start(table)).mean_error == 0.0


def test_the_paper_spends_its_budget_evenly_on_its_rounds():
    table = one_model(20_000, 10, 8)
    run = start(table, 4.0)
    found = paper_fedavg(run, rounds=12, clip=2.0)
    events = run.ledger.report().events
    assert [name for name, _ in events] == [f"paper-fedavg-{t}/update" for t in range(1, 13)]
    assert len({event.noise_multiplier for _, event in events}) == 1
    assert run.ledger.remaining < 1e-9
    assert sine(found.matrix) < 0.2  # intercepts that nobody models count as noise


@pytest.mark.parametrize("learn", [fedavg, paper_fedavg])
def test_needs_a_public_number_of_users(learn):
    run = start(one_model(10, 3, 9), relation="add-or-remove-one-user")
    with pytest.raises(InputError, match="replace-one-user"):
        learn(run)
    assert run.ledger.epsilon == 0.0


def test_a_move_is_the_same_in_rows_and_in_features():
    """The two ways of solving the ridge regression agree, and users that are zero move nothing."""
    generator = rng(10)
    weights = generator.standard_normal(4)
    for m in (4, 5, 30):
        X, y = generator.standard_normal((3, m, 4)), generator.standard_normal((3, m))
        X[2], y[2] = 0.0, 0.0
        update = ModelUpdate(weights, FeatureTransform.plain(4), 0.1, False)(UserBatch(X, y))["update"].values
        for u in range(2):
            penalty = 0.1 * (X[u] ** 2).sum() / m
            expected = np.linalg.solve(X[u].T @ X[u] + penalty * np.eye(4), X[u].T @ (y[u] - X[u] @ weights))
            np.testing.assert_allclose(update[u], expected, atol=1e-10)
        np.testing.assert_array_equal(update[2], 0.0)
