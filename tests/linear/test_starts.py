"""Where methods start: each start finds what is planted, costs what it is given and knows how well it did."""

from __future__ import annotations

import numpy as np
import pytest

from privrep.data.synthetic import make_population
from privrep.data.table import UserTable
from privrep.linear.methods.private_fedrep import private_fedrep
from privrep.linear.starts import (
    INITIALISERS,
    MOST_SPECTRAL,
    Start,
    choose_start,
    count_above_noise,
    find_noise_radius,
    random_basis,
    start_from,
    start_normalised_pairs,
    start_power_method,
    start_random,
    start_spectral,
    top_eigenvectors,
)
from privrep.local.transform import FeatureTransform
from runs import run_on

D, K = 15, 3
LOOKING = {name: start for name, start in INITIALISERS.items() if name != "random"}


@pytest.fixture(scope="module")
def planted():
    rng = np.random.default_rng(0)
    truth = make_population(rng, 6000, D, K, 8, 0.05, intercept=2.0)
    return truth.sample(rng), truth.U


def start_on(table, epsilon, rank=K, seed=0, intercept=True, share=1.0):
    run = run_on(table, epsilon, seed=seed)
    return Start(run, FeatureTransform.plain(table.n_features), rank, share * run.ledger.capacity, intercept)


def squared_sines(basis, U):
    """Mean squared sine between two subspaces of the same dimension."""
    return 1 - float(np.linalg.norm(basis.T @ U) ** 2) / U.shape[1]


@pytest.mark.parametrize("intercept", [True, False])
@pytest.mark.parametrize("name", LOOKING)
def test_finds_what_is_planted(name, intercept, planted):
    table, U = planted
    y = table.y if intercept else table.y - np.repeat(np.add.reduceat(table.y, table.offsets[:-1]) / 8, 8)
    found = LOOKING[name](start_on(UserTable(table.X, y, table.offsets, table.ids), 50.0, intercept=intercept))
    assert found.basis.shape == (D, K)
    assert found.basis.T @ found.basis == pytest.approx(np.eye(K), abs=1e-10)
    assert squared_sines(found.basis, U) < 0.02


@pytest.mark.parametrize("share", [1.0, 0.25])
@pytest.mark.parametrize("name", LOOKING)
def test_spends_what_it_is_given(name, share, planted):
    start = start_on(planted[0], 2.0, share=share)
    LOOKING[name](start)
    ledger = start.run.ledger
    assert ledger.capacity - ledger.remaining == pytest.approx(share * ledger.capacity, rel=1e-6)


@pytest.mark.parametrize("name", LOOKING)
def test_reads_the_rank_off_the_noise(name, planted):
    table, U = planted
    found = LOOKING[name](start_on(table, 8.0, rank=None))
    spare = 2 if name == "power-method" else 0  # to which users' scatter may look like a direction
    assert K <= found.basis.shape[1] <= K + spare
    assert np.linalg.norm(U - found.basis @ (found.basis.T @ U), 2) < 0.2


@pytest.mark.parametrize("name", LOOKING)
def test_knows_its_error_within_a_factor(name, planted):
    """Of noise: the users' own scatter is small against it at this epsilon. The mean of five starts."""
    table, U = planted
    pairs = []
    for seed in range(5):
        found = LOOKING[name](start_on(table, 0.7, seed=seed))
        pairs.append((found.total_error / K, squared_sines(found.basis, U)))
    said, true = np.mean(pairs, axis=0)
    assert 0.001 < true < 0.9
    assert true / 4 < said < 4 * true


@pytest.mark.parametrize("name", LOOKING)
def test_of_nothing_it_says_nothing(name):
    rng = np.random.default_rng(1)
    nobody = UserTable(rng.normal(size=(400, D)), rng.normal(size=400), np.arange(51) * 8, np.arange(50))
    found = LOOKING[name](start_on(nobody, 0.1))
    assert found.total_error > 0.5 * K
    assert np.isfinite(found.basis).all()


def test_a_random_start_looks_at_nothing_and_spends_nothing(planted):
    start = start_on(planted[0], 1.0)
    found = start_random(start)
    assert start.run.ledger.epsilon == 0.0
    assert not list(start.run.billboard)
    assert np.array_equal(found.basis, random_basis(D, K, "random-start"))
    assert found.total_error == K
    assert np.array_equal(start_random(start_on(planted[0], 9.0, seed=4)).basis, found.basis)
    assert not np.allclose(random_basis(D, K, "another"), found.basis)


def test_a_given_basis_is_taken_as_it_is(planted):
    table, U = planted
    start = start_on(table, 1.0)
    found = start_from(U, 0.01)(start)
    assert found.basis is U
    assert found.total_error == pytest.approx(0.01 * K)
    assert start.run.ledger.epsilon == 0.0
    learned = private_fedrep(start.run, K, initialiser=start_from(U, 0.01))
    assert squared_sines(np.linalg.qr(learned.matrix)[0], U) < 1e-3


def test_rows_of_any_length_have_the_same_say_once_normalised(planted):
    """One row in a hundred is a thousand times as long, as an error in a file would be."""
    table, U = planted
    wild = table.X.copy()
    wild[::97] *= 1000.0
    spoilt = UserTable(wild, table.y, table.offsets, table.ids)
    plain, brought = (
        start(start_on(spoilt, 20.0, intercept=False)) for start in (start_spectral, start_normalised_pairs)
    )
    assert squared_sines(brought.basis, U) < 0.5 * squared_sines(plain.basis, U) or squared_sines(plain.basis, U) < 0.02
    assert squared_sines(brought.basis, U) < 0.1


@pytest.mark.parametrize("rounds", [1, 6])
def test_rounds_of_the_power_method_share_what_it_is_given(rounds, planted):
    start = start_on(planted[0], 2.0)
    start_power_method(start, rounds=rounds, page="mine")
    events = start.run.ledger.report().events
    assert [name for name, _ in events] == [f"mine-{t}/image" for t in range(1, rounds + 1)]
    assert len({event.noise_multiplier for _, event in events}) == 1


def test_many_features_start_with_the_power_method():
    assert choose_start(MOST_SPECTRAL) is start_spectral
    assert choose_start(MOST_SPECTRAL + 1) is start_power_method


# Spectra


def wigner(d, seed):
    noise = np.random.default_rng(seed).normal(size=(d, d))
    return (noise + noise.T) / np.sqrt(2)


def test_rank_above_noise():
    assert count_above_noise(np.linalg.eigvalsh(wigner(200, 0)), 16) == 1
    spiked = wigner(200, 1)
    spiked[range(5), range(5)] += 60
    assert count_above_noise(np.linalg.eigvalsh(spiked), 16) == 5
    assert count_above_noise(np.linalg.eigvalsh(spiked), 4) == 4
    assert find_noise_radius(np.linalg.eigvalsh(spiked)) == pytest.approx(2 * np.sqrt(200), rel=0.1)


def test_errors_read_off_the_eigenvalues():
    d, strength = 200, 60.0
    U = np.linalg.qr(np.random.default_rng(2).normal(size=(d, 2)))[0]
    found = top_eigenvectors(wigner(d, 3) + strength * U @ U.T, 2)
    true = squared_sines(found.basis, U)
    assert true == pytest.approx(d / strength**2, rel=0.3)  # what the theory of spiked matrices says
    assert found.total_error / 2 == pytest.approx(true, rel=0.3)
    weak = top_eigenvectors(wigner(d, 3) + 5 * U @ U.T, 2)
    assert np.diag(weak.error) == pytest.approx([1.0, 1.0])
