"""CENTAUR, linear case: boosting by agreement, the paper's configuration, its budget, and what it learns."""

from __future__ import annotations

from functools import partial

import numpy as np
import pytest
from threadpoolctl import threadpool_limits

import runs
from privrep.data.synthetic import make_population
from privrep.data.table import UserTable
from privrep.errors import BudgetExceeded, InputError
from privrep.linear.methods.centaur import HalfLossGradient, boost_start, centaur_linear, choose_agreed, paper_centaur
from privrep.linear.methods.private_fedrep import private_fedrep
from privrep.linear.references import subspace_distance
from privrep.linear.starts import INITIALISERS, Start, random_basis, start_from, start_power_method
from privrep.local.transform import FeatureTransform
from privrep.privacy.bounds import Bound
from privrep.privacy.calibration import Query
from privrep.privacy.groups import hash_ids
from privrep.privacy.protocol import UserBatch
from privrep.users.memory import InMemoryUsers
from privrep.users.performance import Performance


def rng(*seed):
    return np.random.default_rng([60, *seed])


run_on = partial(runs.run_on, seed=9)


def population(seed, n=1_500, d=8, noise=0.05):
    made = make_population(rng(seed), n, d, 2, 10, noise)
    return made, made.sample(rng(seed, 1))


# What users compute


def batches(page, m):
    order = np.argsort(hash_ids(np.arange(m), page), kind="stable")
    return order[: m // 2], order[m // 2 : 2 * (m // 2)]


def test_the_gradient_is_that_of_half_the_squared_error_on_the_other_batch():
    X, y = rng(1).normal(size=(3, 11, 6)), rng(2).normal(size=(3, 11))
    U = random_basis(6, 2, "any")
    sent = HalfLossGradient(U, "centaur-round-1")(UserBatch(X, y))["gradient"].values.reshape(3, 6, 2)
    fit, rest = batches("centaur-round-1", 11)
    assert not set(fit) & set(rest)
    for u in range(3):
        head = np.linalg.lstsq(X[u, fit] @ U, y[u, fit])[0]

        def loss(B, u=u, head=head):
            return 0.5 * np.mean((y[u, rest] - X[u, rest] @ B @ head) ** 2)

        for place in np.ndindex(6, 2):
            step = np.zeros((6, 2))
            step[place] = 1e-5
            slope = (loss(U + step) - loss(U - step)) / 2e-5
            assert sent[u][place] == pytest.approx(slope, abs=1e-6)
    assert len({tuple(batches(f"centaur-round-{t}", 11)[0]) for t in range(1, 6)}) > 1


@pytest.mark.parametrize("dtype", [np.float32, np.float64])
@pytest.mark.parametrize("rows", [1, 2, 3, 10, 33])
def test_contributions_do_not_depend_on_the_others(rows, dtype):
    X, y = rng(3, rows).normal(size=(61, rows, 17)).astype(dtype), rng(4, rows).normal(size=(61, rows)).astype(dtype)
    y[::3] = 0.1
    step = HalfLossGradient(random_basis(17, 3, "any"), "page")
    with np.errstate(all="ignore"), threadpool_limits(1, user_api="blas"):  # as the engines call steps
        together = step(UserBatch(X, y))["gradient"].values
        for users in (slice(0, 1), slice(0, 2), slice(1, 61), slice(7, 30)):
            alone = step(UserBatch(X[users].copy(), y[users].copy()))["gradient"].values
            assert np.array_equal(alone, together[users], equal_nan=True)
    assert np.isfinite(together).all()
    assert (together == 0).all() == (rows < 2)


@pytest.mark.parametrize("dtype", [np.float32, np.float64])
def test_no_replacement_moves_a_sum_by_more_than_its_sensitivity(dtype, table_of):
    step, bounds = HalfLossGradient(random_basis(3, 2, "any"), "page"), {"gradient": Bound(0.5, 6)}
    ordinary = [(rng(5, u).normal(size=(8, 3)), rng(6, u).normal(size=8)) for u in range(6)]
    sizes = [0.0, 1.0, 1e19, 1e150, 1e300, 1e-38, 1e-160, np.nan, np.inf]
    with np.errstate(all="ignore"):
        strange = [
            (a * rng(7).normal(size=(m, 3)), b * rng(8).normal(size=m)) for a in sizes for b in sizes for m in (2, 7)
        ]
        here = InMemoryUsers(table_of(ordinary, 3, dtype), Performance(1)).sums(step, bounds)["gradient"]
        for stranger in strange:
            users = InMemoryUsers(table_of([stranger, *ordinary[1:]], 3, dtype), Performance(1))
            there = users.sums(step, bounds)["gradient"]
            assert np.linalg.norm(here.exact_numbers - there.exact_numbers) <= here.sensitivity("replace-one-user")


# Boosting


def turned(basis, angle):
    """The basis with its first column turned by an angle out of its span."""
    outside = np.linalg.qr(basis, mode="complete")[0][:, -1]
    first = np.cos(angle) * basis[:, 0] + np.sin(angle) * outside
    return np.column_stack([first, basis[:, 1:]])


@pytest.mark.parametrize(
    ("angles", "chosen", "enough"),
    [
        ((1.0, 0.0, 0.02, 1.5), 1, True),
        ((0.0,), 0, True),
        ((0.0, 0.5, 1.0, 1.5), 0, False),
        ((1.2, 0.0, 0.6), 0, False),
    ],
)
def test_keeps_one_with_which_half_of_the_copies_agree(angles, chosen, enough):
    """All cosines at least 1 - 2 * 0.05^2 = 0.995, an angle of 0.1; a copy agrees with itself."""
    run, true = run_on(population(1, 20)[1], 1.0), random_basis(8, 2, "true")
    assert choose_agreed(run, [turned(true, angle) for angle in angles], 0.05) == chosen
    facts = run.billboard["agreement"].facts["derived"]
    assert facts == {"chosen": chosen + 1, "enough": enough}


def test_bases_of_other_ranks_do_not_agree():
    run = run_on(population(2, 20)[1], 1.0)
    bases = [random_basis(8, 3, "a"), random_basis(8, 2, "b"), random_basis(8, 2, "b")]
    assert choose_agreed(run, bases, 0.1) == 1


@pytest.mark.parametrize("copies", [1, 3])
def test_every_copy_is_charged(copies):
    run = run_on(population(3)[1], 20.0)
    state = boost_start(copies, 0.2)(Start(run, FeatureTransform.plain(8), 2, 0.3, True))
    events = run.ledger.report().events
    assert len(events) == 4 * copies
    assert sum(event.noise_multiplier**-2 for _, event in events) == pytest.approx(0.3)
    assert state.basis.shape == (8, 2)
    if copies > 1:  # different starts, different noise
        images = [run.billboard.releases(f"power-{c}-1")["image"].value for c in (1, 2, 3)]
        assert abs(np.corrcoef(images[0], images[1])[0, 1]) < 0.9
    with pytest.raises(InputError, match="one copy or more"):
        boost_start(0, 0.2)


# The methods


def test_the_default_is_the_rounds_of_private_fedrep_after_a_power_method():
    table = population(4)[1]
    found = centaur_linear(run_on(table, 5.0), 2)
    same = private_fedrep(run_on(table, 5.0), 2, initialiser=start_power_method)
    np.testing.assert_array_equal(found.basis, same.basis)


@pytest.mark.parametrize("copies", [1, 4])
def test_charges_its_budget_and_no_more(copies):
    run = run_on(population(5)[1], 20.0)
    centaur_linear(run, 2, copies=copies)
    spent = sum(event.noise_multiplier**-2 for _, event in run.ledger.report().events)
    assert spent == pytest.approx(run.ledger.capacity, rel=1e-9)
    assert 19.99 < run.ledger.epsilon <= 20.0


@pytest.mark.parametrize("intercept", [True, False])
def test_learns_at_a_small_epsilon(intercept):
    """The squared sine was at most 8e-6 over 20 noises."""
    made, table = population(6, 4_000, 20)
    found = centaur_linear(run_on(table, 2.0), 2, intercept=intercept)
    assert subspace_distance(np.linalg.qr(found.matrix)[0], made.U) ** 2 < 1e-4


@pytest.mark.parametrize("name", [*INITIALISERS, "given"])
def test_every_initialiser_may_stand_before_it(name):
    made, table = population(7)
    start = start_from(np.eye(8)[:, :2], 1.0) if name == "given" else INITIALISERS[name]
    found = centaur_linear(run_on(table, 20.0), 2, initialiser=start)
    assert subspace_distance(np.linalg.qr(found.matrix)[0], made.U) < 0.1


def test_ragged_users_and_no_rank():
    sizes = [1, 2, 3, 1000, *rng(9).integers(1, 30, 1_000)]
    U, groups = random_basis(6, 2, "true"), np.repeat(np.arange(len(sizes)), sizes)
    X, heads = rng(10).normal(size=(len(groups), 6)), rng(11).normal(size=(len(sizes), 2))
    table = UserTable.from_rows(X, ((X @ U) * heads[groups]).sum(axis=1), groups)
    assert subspace_distance(np.linalg.qr(centaur_linear(run_on(table, 20.0), 2, copies=2).matrix)[0], U) < 0.1
    assert centaur_linear(run_on(table, 20.0, relation="add-or-remove-one-user"), None).basis.shape[0] == 6
    assert paper_centaur(run_on(table, 20.0), 2).basis.shape == (6, 2)


def plain_centaur(table, m, power_rounds, rounds, step):
    """Algorithms 4 and 5 user by user: no clipping, no noise."""
    X, y = table.X.reshape(-1, m, table.n_features), table.y.reshape(-1, m)
    B = random_basis(table.n_features, 2, "centaur-power-1")
    M = np.einsum("um,uma,umb->ab", y**2, X, X)
    for _ in range(power_rounds):
        B = np.linalg.qr(M @ B)[0]
    for t in range(1, rounds + 1):
        fit, rest = batches(f"centaur-round-{t}", m)
        gradient = np.zeros_like(B)
        for Xu, yu in zip(X, y, strict=True):
            head = np.linalg.lstsq(Xu[fit] @ B, yu[fit])[0]
            gradient -= np.outer(Xu[rest].T @ (yu[rest] - Xu[rest] @ B @ head), head) / len(rest)
        B = np.linalg.qr(B - step * gradient / len(X))[0]
    return B


def test_without_noise_the_papers_rounds_are_those_of_the_paper():
    table = population(8, 600, 6)[1]
    found = paper_centaur(run_on(table, 1e7), 2, power_rounds=3, rounds=4, clip=50.0, clip_init=200.0, s_1=0.8)
    plain = plain_centaur(table, 10, 3, 4, 1 / (4 * 0.8**2))
    assert subspace_distance(found.basis, plain) < 0.01
    assert subspace_distance(random_basis(6, 2, "centaur-power-1"), plain) > 0.1


def test_the_papers_budget():
    run = run_on(population(9, 200)[1], 1.0)
    paper_centaur(run, 2, copies=3, power_rounds=2, rounds=5, init_share=0.4)
    events, total = dict(run.ledger.report().events), run.ledger.capacity
    assert len(events) == 3 * 2 + 5
    for name, event in events.items():
        share = 0.4 / 6 if name.startswith("centaur-power") else 0.6 / 5
        assert event.noise_multiplier**-2 == pytest.approx(share * total)
    assert 0.999 < run.ledger.epsilon <= 1.0
    with pytest.raises(BudgetExceeded):
        run.release("more", HalfLossGradient(np.eye(8)[:, :2], "more"), {"gradient": Query(Bound(1.0, 16), 1e-3)})


def test_the_paper_needs_a_public_number_of_users_and_a_copy():
    table = population(10, 20)[1]
    with pytest.raises(InputError, match="replace-one-user"):
        paper_centaur(run_on(table, 1.0, relation="add-or-remove-one-user"), 2)
    with pytest.raises(InputError, match="one copy or more"):
        paper_centaur(run_on(table, 1.0), 2, copies=0)


def test_a_resumed_run_repeats_nothing():
    run = run_on(population(11, 200)[1], 1.0)
    first, second = paper_centaur(run, 2, copies=2), paper_centaur(run, 2, copies=2)
    np.testing.assert_array_equal(first.basis, second.basis)
    assert len(run.ledger.report().events) == 2 * 5 + 20
