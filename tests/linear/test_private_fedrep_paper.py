"""The paper's own configuration: its steps, its budget, and its limit without noise."""

from __future__ import annotations

from functools import partial

import numpy as np
import pytest

import runs
from clipping import add_up
from privrep.data.synthetic import make_population
from privrep.data.table import UserTable
from privrep.errors import BudgetExceeded, InputError
from privrep.linear.methods.private_fedrep import BatchGradient, FirstHalfPairs, paper_fedrep
from privrep.linear.references import fit_fedrep, subspace_distance
from privrep.privacy.bounds import Bound
from privrep.privacy.calibration import Query
from privrep.privacy.moments import symmetrise
from privrep.privacy.protocol import UserBatch
from privrep.users.memory import InMemoryUsers


def rng(seed):
    return np.random.default_rng([40, seed])


start = partial(runs.run_on, seed=5)


def batches(page, half, size):
    order = np.random.default_rng([half, *page.encode()]).permutation(half)
    return order[:size], order[size : 2 * size]


def test_the_gradient_is_that_of_the_second_batch_at_the_head_of_the_first():
    generator = rng(1)
    X, y = generator.standard_normal((3, 20, 6)), generator.standard_normal((3, 20))
    U = np.linalg.qr(generator.standard_normal((6, 2)))[0]
    sent = BatchGradient(U, "paper-round-1", None)(UserBatch(X, y))["gradient"].values.reshape(3, 6, 2)
    fit, rest = batches("paper-round-1", 10, 5)
    assert not set(fit) & set(rest)
    for u in range(3):
        head = np.linalg.lstsq(X[u, fit] @ U, y[u, fit])[0]
        residual = y[u, rest] - X[u, rest] @ U @ head
        np.testing.assert_allclose(sent[u], -2 / 5 * np.outer(X[u, rest].T @ residual, head), atol=1e-7)


def test_only_the_first_half_of_the_rows_is_used():
    generator = rng(2)
    X, y = generator.standard_normal((4, 9, 5)), generator.standard_normal((4, 9))
    U = np.linalg.qr(generator.standard_normal((5, 2)))[0]
    spoilt_X, spoilt_y = X.copy(), y.copy()
    spoilt_X[:, 4:], spoilt_y[:, 4:] = 1e6, -1e6
    for step in (BatchGradient(U, "a", None), BatchGradient(U, "a", None, disjoint=False)):
        one, other = step(UserBatch(X, y))["gradient"].values, step(UserBatch(spoilt_X, spoilt_y))["gradient"].values
        np.testing.assert_array_equal(one, other)
    ones = np.ones(4)
    one, other = (
        FirstHalfPairs()(UserBatch(X, y))["moments"],
        FirstHalfPairs()(UserBatch(spoilt_X, spoilt_y))["moments"],
    )
    np.testing.assert_array_equal(add_up(one, ones), add_up(other, ones))


def test_rounds_draw_different_batches_and_engines_the_same():
    drawn = {page: tuple(batches(page, 5, 2)[0]) for page in (f"paper-round-{t}" for t in range(1, 6))}
    assert len(set(drawn.values())) > 1
    table = make_population(rng(3), 300, 6, 2, (0, 12), 0.1).sample(rng(4))
    step = BatchGradient(np.eye(6)[:, :2], "paper-round-3", None)
    total = InMemoryUsers(table).sums(step, {"gradient": Bound(1.0, 12)})["gradient"].exact_numbers
    by_user = sum(
        InMemoryUsers(table.users(u, u + 1)).sums(step, {"gradient": Bound(1.0, 12)})["gradient"].exact_numbers
        for u in range(300)
    )
    np.testing.assert_allclose(total, by_user, atol=1e-9)


@pytest.mark.parametrize("rows", [1, 2, 3, 4])
def test_users_with_too_few_rows_send_something_finite(rows):
    """No first half, one row in it, or fewer rows than columns of U: zero, or the head of least norm."""
    X, y = rng(5).standard_normal((2, rows, 6)), rng(6).standard_normal((2, rows))
    sent = BatchGradient(np.eye(6)[:, :3], "paper-round-1", None)(UserBatch(X, y))["gradient"].values
    assert np.isfinite(sent).all()
    assert (sent == 0).all() == (rows < 4)
    assert np.isfinite(FirstHalfPairs()(UserBatch(X, y))["moments"].norms()).all()


def test_pair_moments_are_unbiased_for_the_representation():
    """E Z = U v v^T U^T: with 5,000 users the mean over users is close to U (V^T V / n) U^T."""
    population = make_population(rng(7), 5_000, 5, 2, 20, 0.1)
    users = InMemoryUsers(population.sample(rng(8)))
    total = users.sums(FirstHalfPairs(), {"moments": Bound(1e6, 5**2)})["moments"].exact_numbers
    expected = population.U @ (population.heads.T @ population.heads / 5_000) @ population.U.T
    np.testing.assert_allclose(symmetrise(total) / 5_000, expected, atol=0.03)
    assert not np.allclose(symmetrise(total) / 5_000, 1.5 * expected, atol=0.03)


@pytest.mark.parametrize("options", [{"batch": 5}, {"disjoint": False}])
def test_without_noise_it_approaches_fedrep(options):
    population = make_population(rng(9), 4_000, 15, 2, 20, 0.05)
    table = population.sample(rng(10))
    found = paper_fedrep(start(table, 1e5), 2, rounds=15, step=1.0, clip=100.0, clip_init=100.0, **options)
    np.testing.assert_allclose(found.basis.T @ found.basis, np.eye(2), atol=1e-10)
    plain = fit_fedrep(InMemoryUsers(table), 2, intercept=False)
    assert subspace_distance(plain.basis, population.U) < 0.005
    assert subspace_distance(found.basis, plain.basis) < 0.01


def test_the_papers_step_overshoots_on_disjoint_batches():
    """A finding this file documents: eta 2.5 breaks Lemma 9's own condition, and without any noise moves away."""
    population = make_population(rng(11), 4_000, 15, 2, 20, 0.01)
    table = population.sample(rng(12))
    distances = {
        eta: subspace_distance(paper_fedrep(start(table, 1e5), 2, step=eta, rounds=10).basis, population.U)
        for eta in (1.0, 2.5)
    }
    assert distances[1.0] < 0.05
    assert distances[2.5] > 0.5


@pytest.mark.parametrize("init_share", [0.5, 0.2])
def test_charges_exactly_its_budget(init_share):
    table = make_population(rng(13), 200, 6, 2, 10, 0.1).sample(rng(14))
    run = start(table, 1.0)
    found = paper_fedrep(run, 2, init_share=init_share)
    report = run.ledger.report()
    assert [name for name, _ in report.events] == [
        "paper-moments/moments",
        *(f"paper-round-{t}/gradient" for t in range(1, 6)),
    ]
    spent = [event.noise_multiplier**-2 for _, event in report.events]
    total = run.ledger.budget.mu**2
    assert spent[0] == pytest.approx(init_share * total)
    assert spent[1:] == pytest.approx([(1 - init_share) * total / 5] * 5)
    assert run.ledger.epsilon == pytest.approx(1.0, rel=1e-6)
    assert run.ledger.epsilon <= 1.0
    assert np.array_equal(found.scale, np.ones(6))
    assert 0 <= found.error <= 2
    with pytest.raises(BudgetExceeded):
        run.release("more", FirstHalfPairs(), {"moments": Query(Bound(1.0, 6**2), 1e-3)})


def test_noise_has_the_scale_of_replacing_one_user():
    """With users that are all zero, what is released is noise: sigma = 2 clip / sqrt(mu^2 of the release)."""
    empty = UserTable(np.zeros((400, 30)), np.zeros(400), np.arange(0, 401, 4), np.arange(100))
    run = start(empty, 1.0)
    paper_fedrep(run, 2, clip=3.0)
    multiplier = (0.1 * run.ledger.budget.mu**2) ** -0.5
    noise = np.concatenate([run.billboard.releases(f"paper-round-{t}")["gradient"].value for t in range(1, 6)])
    measured = noise.std() / (2 * 3.0 * multiplier)  # of 300 values: standard error 0.041
    assert abs(measured - 1) < 4.9 * 0.041
    assert not abs(measured - 1.5) < 4.9 * 0.041
    assert not abs(measured - 2 / 3) < 4.9 * 0.041


def test_needs_a_public_number_of_users():
    table = make_population(rng(15), 20, 6, 2, 10, 0.1).sample(rng(16))
    with pytest.raises(InputError, match="replace-one-user"):
        paper_fedrep(start(table, 1.0, relation="add-or-remove-one-user"), 2)


def test_a_resumed_run_repeats_nothing():
    table = make_population(rng(17), 200, 6, 2, 10, 0.1).sample(rng(18))
    run = start(table, 1.0)
    first, second = paper_fedrep(run, 2), paper_fedrep(run, 2)
    np.testing.assert_array_equal(first.basis, second.basis)
    assert len(run.ledger.report().events) == 6
