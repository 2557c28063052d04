"""Priv-AltMin: its contributions, its limit without noise, its budget, and what it learns."""

from __future__ import annotations

import dataclasses
import math
from functools import partial

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from experiments.references import altmin
from scipy import sparse
from threadpoolctl import threadpool_limits

import runs
from clipping import STEP, add_up, check_sum, rounding_of
from privrep.data.readers import TableSource
from privrep.data.synthetic import make_population
from privrep.data.table import UserTable
from privrep.errors import BudgetExceeded, InputError
from privrep.linear.methods.priv_altmin import (
    MOST_UNKNOWNS,
    DisjointPairs,
    NormalEquations,
    QuarterEquations,
    paper_altmin,
    priv_altmin,
)
from privrep.linear.normal_matrix import denoise_normal
from privrep.linear.references import subspace_distance
from privrep.linear.starts import INITIALISERS, start_from
from privrep.linear.steps import SIZES
from privrep.local.transform import FeatureTransform
from privrep.privacy.bounds import DIRECTION_ONLY, MAX_ROWS_PER_SUM, Bound
from privrep.privacy.calibration import Query
from privrep.privacy.groups import Group
from privrep.privacy.kronecker import make_kronecker
from privrep.privacy.moments import packed_size, unpack
from privrep.privacy.protocol import UserBatch
from privrep.users.memory import InMemoryUsers
from privrep.users.performance import Performance
from privrep.users.streaming import StreamingUsers


def rng(*seed):
    return np.random.default_rng([50, *seed])


run_on = partial(runs.run_on, seed=7)


def basis(d, k):
    return np.linalg.qr(rng(d, k).standard_normal((d, k)))[0]


def equations(d, k, intercept, norms=(1e9, 1e9), ridge=0.01, transform=None):
    whole = np.linalg.qr(basis(d, k), mode="complete")[0]
    return NormalEquations(whole[:, :k], whole[:, k:], transform or FeatureTransform.plain(d), *norms, ridge, intercept)


# Contributions


def test_a_kronecker_sum_is_the_sum_of_kronecker_products():
    generator = rng(1)
    left, right, scale = generator.normal(size=(9, 2, 3)), generator.normal(size=(9, 5, 4)), generator.uniform(size=9)
    sent, weights = make_kronecker(left, right, scale), generator.uniform(size=9)
    weights[[2, 5]] = 0.0
    each = [scale[u] * np.kron(left[u].T @ left[u], right[u].T @ right[u]) for u in range(9)]
    check_sum(sent, weights, np.tensordot(weights, each, 1))
    whole = add_up(sent, weights).reshape(12, 12)
    assert np.array_equal(whole, whole.T)
    exact = np.array([np.linalg.norm(A) for A in each])
    assert (sent.norms() >= exact).all()
    np.testing.assert_allclose(sent.norms(), exact, rtol=1e-8)


@pytest.mark.parametrize(("small", "large"), [(1e-170, 1e150), (1e-200, 1e200), (1e150, 1e-170), (5e-324, 1e300)])
def test_kronecker_norms_hold_where_squares_underflow(small, large):
    """|R^T R|^2 of rows near 1e-170 is zero in floating point; times a huge L^T L it is not."""
    generator = rng(2)
    left, right = generator.normal(size=(4, 1, 2)), generator.normal(size=(4, 3, 5))
    sent, plain = make_kronecker(left * large, right * small, np.ones(4)), make_kronecker(left, right, np.ones(4))
    with np.errstate(all="ignore"):
        norms = sent.norms()
        weights = np.where(np.isfinite(norms), 1 / np.maximum(norms, 1.0), 0.0)
        total = add_up(sent, weights)
        for user in range(4):
            own = np.where(np.arange(4) == user, weights, 0.0)
            longest = weights[user] * norms[user] + rounding_of(sent, own) if weights[user] else 0.0
            assert np.linalg.norm(add_up(sent, own)) <= longest
    assert np.isfinite(total).all()
    if small == 1e-170:
        np.testing.assert_allclose(norms, plain.norms() * 1e-40, rtol=1e-6)


def test_kronecker_sums_of_very_long_users_are_cut():
    right = rng(3).normal(size=(2, MAX_ROWS_PER_SUM + 100, 3))
    sent = make_kronecker(np.ones((2, 1, 1)), right, np.ones(2))
    check_sum(sent, np.ones(2), sum(R.T @ R for R in right))


def leave_one_out(X, y, U, ridge, intercept):
    """Head and residual of each row, by fitting all the others; rows of length m for the ridge, as in ridge_fit."""
    heads, residuals = [], []
    m, k = len(y), U.shape[1]
    P = (X - X.mean(axis=0) if intercept else X) @ U
    design = np.column_stack([P, np.ones(m)]) if intercept else P
    penalty = np.diag(np.r_[np.full(k, ridge * m), [0.0] * intercept])
    for j in range(m):
        rest = np.arange(m) != j
        fit = np.linalg.solve(design[rest].T @ design[rest] + penalty, design[rest].T @ y[rest])
        heads.append(fit[:k])
        residuals.append(y[j] - design[j] @ fit)
    return np.array(heads), np.array(residuals)


@pytest.mark.parametrize("intercept", [True, False])
def test_normal_equations_are_those_of_the_rows_left_out(intercept):
    generator = rng(4)
    d, k, m = 6, 2, 9
    X, y = generator.normal(size=(5, m, d)) + 1.0, generator.normal(size=(5, m)) + 3.0
    step = equations(d, k, intercept)
    sent = step(UserBatch(X, y))
    for u in range(5):
        heads, residuals = leave_one_out(X[u], y[u], step.U, step.ridge, intercept)
        rows = (X[u] - X[u].mean(axis=0) if intercept else X[u]) @ step.outside
        right = sum(np.kron(heads[j], rows[j]) * residuals[j] for j in range(m)) / m
        np.testing.assert_allclose(sent["right"].values[u], right, atol=1e-8)
        only = (np.arange(5) == u).astype(float)
        P = (X[u] - X[u].mean(axis=0) if intercept else X[u]) @ step.U
        target = y[u] - y[u].mean() if intercept else y[u]
        head = np.linalg.solve(P.T @ P + step.ridge * m * np.eye(k), P.T @ target)
        check_sum(sent["normal"], only, np.kron(np.outer(head, head), rows.T @ rows) / (m - intercept))


def test_both_parts_of_a_user_shrink_by_one_factor():
    generator = rng(5)
    X, y = generator.normal(size=(200, 7, 5)), generator.normal(size=(200, 7))
    free, tight = equations(5, 2, True)(UserBatch(X, y)), equations(5, 2, True, norms=(0.3, 0.8))(UserBatch(X, y))
    rights = [np.linalg.norm(sent["right"].values, axis=1) for sent in (free, tight)]
    normals = [sent["normal"].norms() for sent in (free, tight)]
    np.testing.assert_allclose(rights[1] / rights[0], normals[1] / normals[0], rtol=1e-9)
    assert rights[1].max() <= 0.3 * (1 + 1e-12)
    assert normals[1].max() <= 0.8 * (1 + 1e-8)
    assert (rights[1] < rights[0]).any()
    assert np.array_equal(free["sizes"].cells, tight["sizes"].cells)


def test_several_targets_add_up():
    generator = rng(6)
    X, y = generator.normal(size=(4, 8, 5)), generator.normal(size=(4, 8, 2))
    step = equations(5, 2, True, transform=FeatureTransform(np.ones(5), None, np.array([1.0, 4.0])))
    both, one, other = step(UserBatch(X, y)), step(UserBatch(X, y[:, :, 0])), step(UserBatch(X, y[:, :, 1] / 4))
    np.testing.assert_allclose(both["right"].values, one["right"].values + other["right"].values, atol=1e-12)
    sums = [add_up(sent["normal"], np.ones(4)) for sent in (both, one, other)]
    moved = sum(rounding_of(sent["normal"], np.ones(4)) for sent in (both, one, other))
    assert np.linalg.norm(sums[0] - sums[1] - sums[2]) <= moved


def test_quarters():
    generator = rng(7)
    X, y = generator.normal(size=(3, 13, 4)), 3 * generator.normal(size=(3, 13))
    step = QuarterEquations(basis(4, 2), eta=1.5, zeta=2.0)
    sent = step(UserBatch(X, y))
    spoilt = step(
        UserBatch(np.concatenate([X[:, :6], 1e6 * X[:, 6:]], axis=1), np.concatenate([y[:, :6], y[:, 6:] - 9], axis=1))
    )
    np.testing.assert_array_equal(sent["right"].values, spoilt["right"].values)
    for u in range(3):
        head = np.linalg.lstsq(X[u, :3] @ step.U, y[u, :3])[0]
        W = np.array([np.kron(head, x) for x in X[u, 3:6]])
        W *= np.minimum(1, 1.5 / np.linalg.norm(W, axis=1))[:, None]
        np.testing.assert_allclose(sent["right"].values[u], np.clip(y[u, 3:6], -2, 2) @ W / 3, atol=1e-7)
        only = (np.arange(3) == u).astype(float)
        check_sum(sent["normal"], only, W.T @ W / 3)
    assert (np.linalg.norm(sent["right"].values, axis=1) <= 1.5 * 2.0).all()
    assert (sent["normal"].norms() <= 1.5**2 * (1 + 1e-8)).all()


def test_disjoint_pairs():
    generator = rng(8)
    X, y = generator.normal(size=(3, 11, 4)), 3 * generator.normal(size=(3, 11))
    sent = DisjointPairs(2.0)(UserBatch(X, y))["moments"]
    unit, held = X / np.linalg.norm(X, axis=2, keepdims=True), np.clip(y, -2, 2)
    expected = np.zeros((4, 4))
    for u in range(3):
        for a, b in ((0, 1), (2, 3)):
            pair = np.outer(unit[u, a], unit[u, b]) * held[u, a] * held[u, b]
            expected += (pair + pair.T) / 4
    check_sum(sent, np.ones(3), expected)
    assert (sent.norms() <= 4.0 * (1 + 1e-5)).all()


@pytest.mark.parametrize("rows", [1, 2, 3, 4])
@np.errstate(all="ignore")  # as the engines call steps
def test_users_with_too_few_rows_send_something_finite(rows):
    X, y = rng(9).normal(size=(2, rows, 6)), rng(10).normal(size=(2, rows))
    for intercept in (True, False):
        sent = equations(6, 3, intercept)(UserBatch(X, y))
        assert np.isfinite(sent["right"].values).all()
        assert (sent["right"].values == 0).all() == (rows <= 1 + intercept)
        assert (sent["normal"].norms() == 0).all() == (rows <= 1 + intercept)
    quarter = QuarterEquations(basis(6, 3), 1.0, 1.0)(UserBatch(X, y))
    assert (quarter["right"].values == 0).all() == (rows < 4)
    assert np.isfinite(quarter["normal"].norms()).all()
    assert (DisjointPairs(1.0)(UserBatch(X, y))["moments"].grid_sum(np.ones(2), STEP) == 0).all() == (rows < 4)


# Privacy: own rows only, to the bit, and never more than the stated sensitivity


def questions(d, k):
    unknowns, square = k * (d - k), (k * (d - k)) ** 2
    norms = {"right": Bound(0.5, unknowns), "normal": Bound(2.0, square, acute=True), "sizes": SIZES}
    loose = {"right": Bound(1e-3, unknowns), "normal": Bound(DIRECTION_ONLY, square, acute=True), "sizes": SIZES}
    paper = {"right": Bound(6.0, d * k), "normal": Bound(4.0, (d * k) ** 2, acute=True)}
    scaled = FeatureTransform(np.ldexp(1.0, np.arange(d) % 5 - 2), np.eye(d) + 0.1)
    return {
        "normal equations": (equations(d, k, True, (0.5, 2.0), transform=scaled), norms),
        "normal equations, no intercept": (equations(d, k, False, (0.5, 2.0)), norms),
        "normal equations, no ridge, other norms": (equations(d, k, True, ridge=0.0), loose),
        "quarters": (QuarterEquations(basis(d, k), 2.0, 3.0), paper),
        "pairs": (DisjointPairs(3.0), {"moments": Bound(9.0, d**2)}),
    }


def arrays(contributions):
    """All that is per user in contributions of any kind, norms included; of several together, those of each."""
    values = {f.name: getattr(contributions, f.name) for f in dataclasses.fields(contributions)}
    if "parts" in values:
        parts = enumerate(values["parts"])
        return {f"{place}/{name}": value for place, part in parts for name, value in arrays(part).items()}
    values["norms"] = contributions.norms()
    return {name: value for name, value in values.items() if isinstance(value, np.ndarray)}


@pytest.mark.parametrize("dtype", [np.float32, np.float64])
@pytest.mark.parametrize(("d", "k", "rows"), [(17, 3, 1), (17, 3, 2), (17, 3, 7), (5, 2, 33), (40, 8, 12)])
def test_contributions_do_not_depend_on_the_others(d, k, rows, dtype):
    generator = rng(11, rows)
    X = (generator.normal(size=(61, rows, d)) + generator.normal(size=(61, 1, d))).astype(dtype)
    y = generator.normal(size=(61, rows))
    y[::3] = 0.1  # constant targets: all that is left of them is rounding
    y[1::3] = np.einsum("umd,d->um", X[1::3], basis(d, k)[:, 0])
    y = y.astype(dtype)
    with np.errstate(all="ignore"), threadpool_limits(1, user_api="blas"):  # as the engines call steps
        for name, (step, _) in questions(d, k).items():
            together = {key: arrays(sent) for key, sent in step(UserBatch(X, y)).items()}
            for users in (slice(0, 1), slice(0, 2), slice(1, 61), slice(5, 30), slice(60, 61)):
                for key, sent in step(UserBatch(X[users].copy(), y[users].copy())).items():
                    for part, value in arrays(sent).items():
                        same = np.array_equal(value, together[key][part][users], equal_nan=value.dtype.kind == "f")
                        assert same, f"{name}/{key}/{part}: users {users} send something else alone"


def strange_users(dtype):
    generator = rng(12)
    sizes = [1.0, 1e8, 1e19, 1e30, 1e150, 1e300, 1e-20, 1e-38, 1e-160, 1e-300]
    users = [(np.zeros((0, 3)), np.zeros(0)), (np.zeros((8, 3)), np.zeros(8)), (np.full((8, 3), 0.1), np.full(8, 0.1))]
    for factor in sizes:
        for other in sizes:
            m = int(generator.integers(1, 10))
            users.append((generator.normal(size=(m, 3)) * factor, generator.normal(size=m) * other))
    lopsided = generator.normal(size=(8, 3))
    lopsided[0] *= 1e15
    collinear = generator.normal(size=(8, 1)) * generator.normal(size=3)
    long = generator.normal(size=(MAX_ROWS_PER_SUM + 7, 3))
    users += [(X, generator.normal(size=len(X))) for X in (lopsided, collinear, long)]
    users += [(np.full((5, 3), spoilt), np.ones(5)) for spoilt in (math.nan, math.inf)]
    with np.errstate(all="ignore"):
        return [(X.astype(dtype), y.astype(dtype)) for X, y in users]


@pytest.mark.parametrize("dtype", [np.float32, np.float64])
@pytest.mark.parametrize("name", questions(3, 2))
def test_no_replacement_moves_a_sum_by_more_than_its_sensitivity(name, dtype, table_of):
    step, bounds = questions(3, 2)[name]
    ordinary = [(rng(13, u).normal(size=(8, 3)), rng(14, u).normal(size=8)) for u in range(6)]

    def totals(users):
        return InMemoryUsers(table_of(users, 3, dtype), Performance(1)).sums(step, bounds)

    here, without = totals(ordinary), totals(ordinary[1:])
    for stranger in strange_users(dtype):
        there = totals([stranger, *ordinary[1:]])
        for key, bounded in here.items():
            norm = bounded.bound.norm
            assert np.isfinite(there[key].exact_numbers).all()
            moved = np.linalg.norm((there[key].exact_numbers - bounded.exact_numbers) / norm)
            assert moved <= bounded.sensitivity("replace-one-user") / norm
            alone = np.linalg.norm((there[key].exact_numbers - without[key].exact_numbers) / norm)
            assert alone <= bounded.sensitivity("add-or-remove-one-user") / norm


# The solve


def test_without_noise_the_equations_are_solved():
    generator = rng(15)
    rows = generator.normal(size=(300, 12)) * np.linspace(0.8, 1.2, 12)
    A = rows.T @ rows
    found = denoise_normal(A, 1e-9, 3, 0.02)
    np.testing.assert_allclose(found.inverse @ A, np.eye(12), atol=1e-6)
    assert found.heard.all()
    assert found.relative_error < 1e-6


def test_noise_leaves_the_heads_second_moment_and_drops_the_rest():
    """Of heads diag(1, 2) kron I under noise of a radius larger than both, the Kronecker structure is kept."""
    generator = rng(16)
    k, e, sigma = 2, 60, 0.1
    A = np.kron(np.diag([1.0, 2.0]), np.eye(e)) + unpack(sigma * generator.normal(size=packed_size(k * e)))
    found = denoise_normal(A, sigma, k, 0.02)
    np.testing.assert_allclose(found.inverse, np.kron(np.diag([1.0, 0.5]), np.eye(e)), atol=0.1)
    assert np.abs(np.linalg.eigvalsh(A)).min() < 0.2  # which the plain inverse would have to divide by
    nothing = denoise_normal(unpack(sigma * generator.normal(size=packed_size(k * e))), sigma, k, 0.02)
    assert (nothing.heads >= 3 * sigma / math.sqrt(e) * (1 - 1e-12)).all()


# The methods


@pytest.mark.parametrize("intercept", [True, False])
def test_without_noise_it_is_alternating_minimisation(intercept):
    table = make_population(rng(17), 1_500, 8, 2, 12, 0.05).sample(rng(18))
    found = priv_altmin(run_on(table, 1e6), 2, intercept=intercept)
    plain = altmin(table, 2, intercept=intercept)
    np.testing.assert_allclose(found.basis.T @ found.basis, np.eye(2), atol=1e-10)
    assert subspace_distance(np.linalg.qr(found.matrix)[0], plain.basis) < 0.01


def test_without_noise_the_papers_rounds_are_those_of_the_paper():
    """Against a plain implementation, user by user, of a solve for U from each group in turn."""
    table = make_population(rng(19), 900, 5, 2, 24, 0.05).sample(rng(20))
    found = paper_altmin(run_on(table, 1e9), 2, rounds=3, eta=30.0, zeta=10.0)
    unit = table.X / np.linalg.norm(table.X, axis=1, keepdims=True) * table.y[:, None]
    moments = sum(np.outer(unit[s + 2 * p], unit[s + 2 * p + 1]) for s in table.offsets[:-1] for p in range(6))
    U = np.linalg.eigh(moments + moments.T)[1][:, ::-1][:, :2]
    for t in range(3):
        A, b = np.zeros((10, 10)), np.zeros(10)
        for u in np.flatnonzero(Group("priv-altmin", t, 3).members(table.ids)):
            X, y = table.X[24 * u : 24 * u + 12], table.y[24 * u : 24 * u + 12]
            head = np.linalg.lstsq(X[:6] @ U, y[:6])[0]
            W = np.array([np.kron(head, x) for x in X[6:]])
            A, b = A + W.T @ W, b + W.T @ y[6:]
        U = np.linalg.qr(np.linalg.solve(A, b).reshape(2, 5).T)[0]
    assert subspace_distance(found.basis, U) < 2e-3


def test_charges_exactly_its_budget():
    table = make_population(rng(21), 400, 6, 2, 10, 0.1).sample(rng(22))
    for epsilon in (1.0, 30.0):
        run = run_on(table, epsilon)
        priv_altmin(run, 2)
        report = run.ledger.report()
        names = [name for name, _ in report.events]
        asked = {"covariance/within", "scales/sizes"}  # lost in noise if the budget is small
        assert asked & set(names) == (asked if epsilon == 30.0 else set())
        assert names.index("common-1/within") < names.index("pairs/moments")
        assert run.ledger.epsilon <= epsilon
        spent = sum(event.noise_multiplier**-2 for _, event in report.events)
        assert spent <= run.ledger.capacity * (1 + 1e-9)
        if epsilon == 30.0:  # nothing gave up before the end
            assert spent == pytest.approx(run.ledger.capacity, rel=1e-9)
            with pytest.raises(BudgetExceeded):
                run.release("more", DisjointPairs(1.0), {"moments": Query(Bound(1.0, 6**2), 1e-3)})


@pytest.mark.parametrize("rounds", [1, 4, 9])
def test_the_papers_rounds_cost_what_one_costs(rounds):
    run = run_on(make_population(rng(23), 300, 5, 2, 12, 0.1).sample(rng(24)), 1.0)
    paper_altmin(run, 2, rounds=rounds, init_share=0.4, normal_share=0.3)
    events = dict(run.ledger.report().events)
    assert len(events) == 1 + 2 * rounds
    total = run.ledger.capacity
    assert events["paper-pairs/moments"].noise_multiplier ** -2 == pytest.approx(0.4 * total)
    for t in range(1, rounds + 1):
        normal, right = events[f"paper-altmin-{t}/normal"], events[f"paper-altmin-{t}/right"]
        assert normal.noise_multiplier**-2 == pytest.approx(0.3 * 0.6 * total)
        assert right.noise_multiplier**-2 == pytest.approx(0.7 * 0.6 * total)
        assert normal.group == right.group == Group("priv-altmin", t - 1, rounds)
    assert 0.999 < run.ledger.epsilon <= 1.0


@pytest.mark.parametrize("intercept", [True, False])
def test_learns_at_a_small_epsilon(intercept):
    """The squared sine was at most 7e-6 over 20 noises; the start alone leaves 7e-3."""
    population = make_population(rng(25), 4_000, 20, 2, 10, 0.05)
    found = priv_altmin(run_on(population.sample(rng(26)), 2.0), 2, intercept=intercept)
    assert subspace_distance(np.linalg.qr(found.matrix)[0], population.U) ** 2 < 1e-4
    assert found.error < 1e-3


def test_strong_directions_first_where_they_hide_the_weak():
    """Heads are thirty times as long in one direction as in another.

    The squared sine was at most 0.006 over 158 of 160 noises. The other two showed no sign of a weak direction.
    """
    population = make_population(rng(33), 3_000, 12, 3, 12, 0.05, head_condition=30.0)
    run = run_on(population.sample(rng(34)), 5.0, seed=8)
    found = priv_altmin(run, 3)
    names = [name for name, _ in run.ledger.report().events]
    assert names.index("strong-scout/sizes") < names.index("residuals/moments") < names.index("altmin-scout/sizes")
    assert subspace_distance(np.linalg.qr(found.matrix)[0], population.U) ** 2 < 0.05
    assert 4.99 < run.ledger.epsilon <= 5.0


@pytest.mark.parametrize("name", [*INITIALISERS, "given"])
def test_every_initialiser_may_stand_before_it(name):
    population = make_population(rng(27), 1_500, 8, 2, 10, 0.05)
    start = start_from(np.eye(8)[:, :2], 1.0) if name == "given" else INITIALISERS[name]
    found = priv_altmin(run_on(population.sample(rng(28)), 20.0), 2, initialiser=start)
    np.testing.assert_allclose(found.basis.T @ found.basis, np.eye(2), atol=1e-10)
    assert subspace_distance(np.linalg.qr(found.matrix)[0], population.U) < 0.1


def test_ragged_users_and_no_rank():
    generator = rng(29)
    U, sizes = basis(6, 2), [1, 2, 3, 1000, *generator.integers(1, 30, 1_000)]
    X = generator.normal(size=(sum(sizes), 6))
    groups = np.repeat(np.arange(len(sizes)), sizes)
    y = ((X @ U) * generator.normal(size=(len(sizes), 2))[groups]).sum(axis=1) + generator.normal(size=len(sizes))[
        groups
    ]
    table = UserTable.from_rows(X, y, groups)
    assert subspace_distance(np.linalg.qr(priv_altmin(run_on(table, 20.0), 2).matrix)[0], U) < 0.1
    free = priv_altmin(run_on(table, 20.0, relation="add-or-remove-one-user"), None)
    assert free.basis.shape == (6, 2)
    assert paper_altmin(run_on(table, 20.0), 2).basis.shape == (6, 2)


def test_several_targets_and_sparse_rows():
    generator = rng(30)
    U, n, m = basis(6, 2), 800, 8
    X = generator.normal(size=(n * m, 6)) * (generator.uniform(size=(n * m, 6)) < 0.7)
    groups = np.repeat(np.arange(n), m)
    heads = generator.normal(size=(n, 2, 2))[groups]
    y = np.einsum("rk,rkq->rq", X @ U, heads) * [1.0, 50.0]
    for rows in (X, sparse.csr_array(X)):
        found = priv_altmin(run_on(UserTable.from_rows(rows, y, groups), 20.0), 2, intercept=False)
        assert subspace_distance(np.linalg.qr(found.matrix)[0], U) < 0.1


def test_engines_agree_and_a_resumed_run_repeats_nothing(tmp_path):
    table = make_population(rng(31), 300, 5, 2, (4, 12), 0.1).sample(rng(32))
    columns = {"user": np.repeat(np.arange(300), table.sizes), "y": table.y}
    columns |= {f"x{j}": np.ascontiguousarray(table.X[:, j]) for j in range(5)}
    pq.write_table(pa.table(columns), tmp_path / "rows.parquet")
    run = run_on(table, 5.0)
    for method in (priv_altmin, paper_altmin):
        here = method(run_on(table, 5.0), 2)
        with StreamingUsers.open(
            TableSource(tmp_path / "rows.parquet", "user", "y"), Performance(workdir=tmp_path, workers=1)
        ) as users:
            there = method(run_on(users, 5.0), 2)
        np.testing.assert_allclose(here.basis, there.basis, atol=1e-6)
    first, second = priv_altmin(run, 2), priv_altmin(run, 2)
    np.testing.assert_array_equal(first.basis, second.basis)


def test_says_what_is_out_of_reach():
    wide = UserTable(np.zeros((4, MOST_UNKNOWNS // 2 + 1)), np.zeros(4), np.array([0, 4]), np.arange(1))
    for method in (priv_altmin, paper_altmin):
        with pytest.raises(InputError, match="Private FedRep"):
            method(run_on(wide, 1.0), 2)


def test_learns_nothing_from_nothing():
    table = UserTable(np.zeros((400, 6)), np.zeros(400), np.arange(0, 401, 4), np.arange(100))
    assert priv_altmin(run_on(table, 1.0), 2).mostly_noise
    assert paper_altmin(run_on(table, 1.0), 2).mostly_noise


@pytest.mark.parametrize("norms", [(-1.0, 1.0), (1.0, 0.0), (np.nan, 1.0)])
def test_equations_with_a_norm_that_is_none_are_refused(norms: tuple[float, float]) -> None:
    with pytest.raises(InputError, match="norms must be positive"):
        NormalEquations(basis(4, 2), np.eye(4)[:, 2:], FeatureTransform.plain(4), *norms, ridge=0.1, intercept=False)


def test_a_step_leaves_the_rows_of_one_user_as_they_are() -> None:
    X, y = np.ones((1, 8, 4)), np.ones((1, 8))
    QuarterEquations(basis(4, 2), eta=1e-3, zeta=2.0)(UserBatch(X, y))
    assert (X == 1).all()
