"""Private FedRep of labels: it finds the representation, knows when it has not, and nobody pays for that."""

from __future__ import annotations

import dataclasses

import numpy as np
import pytest
from experiments.class_references import alone_classes, fedrep_classes, pooled_classes
from scipy import sparse

from privrep.data.synthetic import ClassPopulation, make_class_population
from privrep.data.table import UserTable
from privrep.errors import InputError
from privrep.heads.fitting import OWN, POSTERIOR, Heads, fit_heads
from privrep.linear.methods.private_fedrep import private_fedrep
from privrep.linear.references import subspace_distance
from privrep.local.losses import Loss
from privrep.local.prior import LabelPrior
from privrep.local.representation import Representation
from privrep.local.transform import FeatureTransform
from privrep.users.memory import InMemoryUsers
from runs import run_on


def population(users: int, classes: int = 2, seed: int = 0, **options: float) -> tuple[ClassPopulation, UserTable]:
    rng = np.random.default_rng([31, seed])
    made = make_class_population(rng, users, 12, 2, 15, classes, **options)
    return made, made.sample(rng)


def distance(truth: np.ndarray, found: Representation) -> float:
    return subspace_distance(np.linalg.qr(found.matrix)[0], truth)


def log_loss(made: ClassPopulation, heads: Heads, representation: Representation, loss: Loss, seed: int = 1) -> float:
    fresh = made.sample(np.random.default_rng([32, seed]))
    users = np.repeat(np.arange(fresh.n_users), fresh.sizes)
    outputs = heads.predict(representation, fresh.X, users)
    predicted = loss.probabilities(np.atleast_2d(outputs.T)).T
    return made.expected_log_loss(predicted, fresh.X, users)


@pytest.mark.parametrize(("name", "classes"), [("log", 2), ("log", 4), ("hinge", 2), ("hinge", 3)])
def test_the_representation_is_found(name: str, classes: int) -> None:
    loss = Loss(name, classes)  # type: ignore[arg-type]
    epsilon = 2.0 if classes == 2 else 4.0
    made, table = population(6000 if classes == 2 else 1200, classes)
    run = run_on(table, epsilon)
    found = private_fedrep(run, 2, loss=loss)
    assert distance(made.U, found) < 0.2  # a random plane is at 0.9 or more
    assert run.ledger.epsilon == pytest.approx(epsilon, rel=1e-3)  # all of the budget is spent, and no more
    assert run.ledger.epsilon <= epsilon
    heads = fit_heads(table.blocks(), found, loss=loss)
    assert (heads.kind == POSTERIOR).all()  # 15 rows are few for 12 features
    assert heads.targets == loss.outputs


def test_the_rank_is_read_off_the_releases() -> None:
    _, table = population(8000)
    assert private_fedrep(run_on(table, 3.0), None, loss=Loss("log", 2)).basis.shape == (12, 2)


def test_the_prior_of_heads_follows_the_heads() -> None:
    """Heads that are six times as long have a variance that is many times as large."""
    loss = Loss("log", 2)
    variances = []
    for strength in (0.5, 3.0):
        _, table = population(6000, strength=strength)
        variances.append(float((prior_of(private_fedrep(run_on(table, 8.0), 2, loss=loss)).factor ** 2).sum()))
    assert variances[1] > 6 * variances[0]


def test_the_prior_of_levels_follows_the_levels() -> None:
    """Levels of standard deviation 2, two rows a user, next to no slopes: as the insurance of cars is."""
    rng, loss = np.random.default_rng(36), Loss("log", 2)
    X, levels = rng.normal(size=(16000, 3)), np.repeat(rng.normal(-2.0, 2.0, size=8000), 2)
    y = (rng.random(16000) < 1 / (1 + np.exp(-levels - 0.3 * X[:, 0]))).astype(np.float64)
    table = UserTable.from_rows(X, y, np.repeat(np.arange(8000), 2))
    run = run_on(table, 1.0)
    prior = prior_of(private_fedrep(run, None, loss=loss))
    assert 2.0 < prior.level < 8.0
    assert prior.mean.level[0] == pytest.approx(-2.0, abs=0.7)
    assert run.ledger.epsilon == pytest.approx(1.0, rel=1e-3)


def prior_of(found: Representation) -> LabelPrior:
    assert isinstance(found.prior, LabelPrior)
    return found.prior


def test_what_heads_have_in_common_is_found_where_there_is_something() -> None:
    """Then few rows go a long way; and where there is nothing, slopes are none."""
    loss = Loss("log", 4)
    alike, _ = population(1500, 4, strength=0.5)
    rng = np.random.default_rng(34)
    alike = dataclasses.replace(alike, heads=alike.heads + 2 * rng.normal(size=(1, 4, 2)))
    table = alike.sample(rng, rows=5)
    run = run_on(table, 5.0)
    found = private_fedrep(run, 2, loss=loss)
    prior = prior_of(found)
    assert np.abs(prior.mean.slopes).max() > 0.5
    assert run.ledger.epsilon == pytest.approx(5.0, rel=1e-3)
    flat = dataclasses.replace(prior, mean=dataclasses.replace(prior.mean, slopes=np.zeros_like(prior.mean.slopes)))
    losses = []
    for each in (found, dataclasses.replace(found, prior=flat)):
        heads = fit_heads(table.blocks(), each, loss=loss)
        losses.append(log_loss(alike, heads, each, loss))
    assert losses[0] < losses[1] - 0.1
    _, other = population(1500, 4)
    none = prior_of(private_fedrep(run_on(other, 5.0, seed=1), 2, loss=loss))
    assert np.abs(none.mean.slopes).max() < 0.1


def test_with_next_to_no_noise_it_is_as_good_as_fedrep_without_privacy() -> None:
    loss = Loss("log", 2)
    made, table = population(4000)
    private = private_fedrep(run_on(table, 1e4), 2, loss=loss)
    plain = fedrep_classes(InMemoryUsers(table), 2, loss)
    assert distance(made.U, private) < 1.3 * distance(made.U, plain) < 0.2


@pytest.mark.parametrize("classes", [2, 4])
def test_a_hopeless_budget_costs_nobody_much(classes: int) -> None:
    loss = Loss("log", classes)
    made, table = population(300, classes, skew=1.0)
    found = private_fedrep(run_on(table, 0.1), 2, loss=loss)
    assert found.learned_nothing
    heads = fit_heads(table.blocks(), found, loss=loss)
    ours = log_loss(made, heads, found, loss)
    nothing = Representation(np.zeros((12, 1)), FeatureTransform.plain(12), 1.0)
    constants = dataclasses.replace(heads, intercept=frequencies(table, loss), shared=np.zeros((len(heads.kind), 1)))
    constants = dataclasses.replace(constants, own_position=np.full(len(heads.kind), -1))
    majority = log_loss(made, constants, nothing, loss)
    alone = alone_classes(table, loss)
    fresh = made.sample(np.random.default_rng([32, 1]))
    users = np.repeat(np.arange(fresh.n_users), fresh.sizes)
    own = made.expected_log_loss(loss.probabilities(alone.outputs(fresh.X, users).T).T, fresh.X, users)
    assert ours < 1.02 * min(majority, own)


def frequencies(table: UserTable, loss: Loss) -> np.ndarray:
    """Outputs of each user's own class frequencies, half a row added to each class."""
    counts = np.stack([np.bincount(y.astype(int), minlength=loss.classes) for y in table.y.reshape(-1, 15)]) + 0.5
    return np.log(counts[:, 1] / counts[:, 0]) if loss.outputs == 1 else np.log(counts).ravel()


def test_sparse_features() -> None:
    rng = np.random.default_rng(33)
    made, table = population(6000)
    X = np.where(rng.random(table.X.shape) < 0.5, table.X, 0.0).astype(np.float32)
    users = np.repeat(np.arange(table.n_users), table.sizes)
    y = (rng.random(len(X)) < made.probabilities(X, users)[:, 1]).astype(np.float32)
    thin = UserTable(sparse.csr_array(X), y, table.offsets, table.ids)
    found = private_fedrep(run_on(thin, 4.0), 2, loss=Loss("log", 2))
    assert distance(made.U, found) < 0.4
    heads = fit_heads(thin.blocks(), found, loss=Loss("log", 2))
    assert not (heads.kind == OWN).any()


def test_pooled_is_one_model_for_all_and_worse_than_personal_ones() -> None:
    loss = Loss("log", 4)
    made, table = population(800, 4)
    pooled = pooled_classes(table, loss)
    fresh = made.sample(np.random.default_rng([32, 2]))
    users = np.repeat(np.arange(fresh.n_users), fresh.sizes)
    shared = made.expected_log_loss(loss.probabilities(pooled.outputs(fresh.X, users).T).T, fresh.X, users)
    oracle = Representation(made.U, FeatureTransform.plain(12), 0.0, precision=0.3)
    assert log_loss(made, fit_heads(table.blocks(), oracle, loss=loss), oracle, loss, 2) < shared - 0.1


def test_a_population_needs_two_classes() -> None:
    with pytest.raises(InputError, match="two classes"):
        make_class_population(np.random.default_rng(0), 10, 5, 2, 5, 1)
