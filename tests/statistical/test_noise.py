"""The noise has the right distribution, and these tests would see it if it had not.

Every test of a random quantity has a false-alarm rate of at most ALARM, two-sided where it has two sides. Secure noise
cannot be seeded, so about one run of this file in 50,000 goes red by chance. Power: the same statistic, applied to
draws of the same source at two thirds and three halves of the scale, rejects.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest
from scipy.stats import binom, chi2, norm

from privrep.errors import InputError
from privrep.privacy.noise import DRAWS_AT_A_TIME, NoiseSource, secure_noise, simulated_noise

ALARM = 1e-6
WIDE = 2.0**20  # steps: what releases use, and more
SOURCES = [pytest.param(secure_noise, id="secure"), pytest.param(simulated_noise(7), id="simulated")]


def accepts_scale(draws: np.ndarray, sigma: float) -> bool:
    """sum x^2 / sigma^2 is chi-square with as many degrees of freedom as draws."""
    low, high = chi2.ppf(ALARM / 2, draws.size), chi2.isf(ALARM / 2, draws.size)
    return bool(low < float(((draws / sigma) ** 2).sum()) < high)


def accepts_probabilities(draws: np.ndarray, probability: Callable[[np.ndarray], np.ndarray]) -> bool:
    """Pearson's test against exact probabilities of the integers; cells that expect fewer than 20 draws are pooled."""
    support = np.arange(-60, 61)
    expected = probability(support) * draws.size
    observed = np.array([(draws == x).sum() for x in support])
    kept = expected >= 20
    expected = np.append(expected[kept], draws.size - expected[kept].sum())
    observed = np.append(observed[kept], draws.size - observed[kept].sum())
    return bool(((observed - expected) ** 2 / expected).sum() < chi2.isf(ALARM, len(expected) - 1))


def discrete_gaussian(sigma: float) -> Callable[[np.ndarray], np.ndarray]:
    normaliser = np.exp(-(np.arange(-200, 201) ** 2) / (2 * sigma**2)).sum()
    return lambda x: np.exp(-(x**2) / (2 * sigma**2)) / normaliser


def rounded_gaussian(sigma: float) -> Callable[[np.ndarray], np.ndarray]:
    return lambda x: norm.cdf(x + 0.5, scale=sigma) - norm.cdf(x - 0.5, scale=sigma)


@pytest.mark.parametrize("sigma", [50.0, WIDE, 12345.678, 2.0**40])
@pytest.mark.parametrize("noise", SOURCES)
def test_standard_deviation(noise: NoiseSource, sigma: float) -> None:
    draws = noise("scale", sigma, 1500)
    assert accepts_scale(draws, sigma)
    assert not accepts_scale(draws, sigma * 2 / 3)
    assert not accepts_scale(draws, sigma * 3 / 2)
    assert not accepts_scale(noise("scale", sigma * 2 / 3, 1500), sigma)
    assert not accepts_scale(noise("scale", sigma * 3 / 2, 1500), sigma)


@pytest.mark.parametrize("sigma", [1.0, 2.3])
def test_secure_noise_is_the_discrete_gaussian(sigma: float) -> None:
    draws = secure_noise("fit", sigma, 20_000)
    assert accepts_probabilities(draws, discrete_gaussian(sigma))
    assert not accepts_probabilities(draws, discrete_gaussian(sigma * 2 / 3))
    assert not accepts_probabilities(draws, discrete_gaussian(sigma * 3 / 2))


def test_the_goodness_of_fit_can_tell_a_rounded_gaussian_from_a_discrete_one() -> None:
    """At sigma of one step they differ by a twelfth in variance; at the sigma of a release by less than 2^-40."""
    draws = simulated_noise(1)("fit", 1.0, 20_000)
    assert accepts_probabilities(draws, rounded_gaussian(1.0))
    assert not accepts_probabilities(draws, discrete_gaussian(1.0))


@pytest.mark.parametrize("noise", SOURCES)
def test_shape_at_the_scale_of_a_release(noise: NoiseSource) -> None:
    """Quantile cells of the normal distribution: catches a wrong shape with the right variance."""
    draws = noise("shape", WIDE, 4000)
    cells = np.searchsorted(norm.ppf(np.arange(1, 20) / 20) * WIDE, draws)
    expected = draws.size / 20
    statistic = ((np.bincount(cells, minlength=20) - expected) ** 2 / expected).sum()
    assert statistic < chi2.isf(ALARM, 19)
    uniform = np.random.default_rng(0).uniform(-1, 1, 4000) * WIDE * np.sqrt(3)  # same variance, other shape
    cells = np.searchsorted(norm.ppf(np.arange(1, 20) / 20) * WIDE, uniform)
    assert ((np.bincount(cells, minlength=20) - expected) ** 2 / expected).sum() > chi2.isf(ALARM, 19)


@pytest.mark.parametrize("noise", SOURCES)
def test_mean_is_zero(noise: NoiseSource) -> None:
    draws = noise("mean", WIDE, 4000)
    assert abs(draws.mean()) / (WIDE / np.sqrt(4000)) < norm.isf(ALARM / 2)


@pytest.mark.parametrize("noise", SOURCES)
def test_draws_are_integers_and_their_low_bits_are_fair(noise: NoiseSource) -> None:
    draws = noise("bits", WIDE, 4000)
    assert draws.dtype == np.int64
    assert draws.shape == (4000,)
    for bit in range(8):
        ones = int(((draws >> bit) & 1).sum())
        assert binom.ppf(ALARM / 16, 4000, 0.5) <= ones <= binom.isf(ALARM / 16, 4000, 0.5)


@pytest.mark.parametrize("noise", SOURCES)
def test_coordinates_are_independent(noise: NoiseSource) -> None:
    """Of 200 draws of 20 coordinates, no two coordinates and no two successive draws go together."""
    draws = np.stack([noise(f"draw-{i}", WIDE, 20) for i in range(200)]) / WIDE
    correlations = (draws.T @ draws / np.sqrt(200))[np.triu_indices(20, 1)]
    successive = (draws[:-1] * draws[1:]).sum(axis=0) / np.sqrt(199)
    # a sum of 200 products of independent normals has heavier tails than a normal; 8 is far beyond 1e-6 for any of 210
    assert np.abs(correlations).max() < 8.0
    assert np.abs(successive).max() < 8.0
    same = draws + draws[:, :1]  # the statistic sees a shared component of equal size
    assert np.abs((same.T @ same / np.sqrt(200))[np.triu_indices(20, 1)]).max() > 8.0


@pytest.mark.parametrize("noise", SOURCES)
def test_nothing_asked_nothing_drawn(noise: NoiseSource) -> None:
    assert noise("empty", WIDE, 0).shape == (0,)


def test_two_secure_draws_differ() -> None:
    assert not np.array_equal(secure_noise("same", WIDE, 16), secure_noise("same", WIDE, 16))


def test_a_seed_does_not_reach_secure_noise() -> None:
    np.random.seed(0)  # noqa: NPY002
    first = secure_noise("same", WIDE, 16)
    np.random.seed(0)  # noqa: NPY002
    assert not np.array_equal(first, secure_noise("same", WIDE, 16))


def test_a_simulated_draw_depends_on_seed_and_name_alone() -> None:
    wanted = simulated_noise(3)("round-1/step", WIDE, 50)
    other = simulated_noise(3)
    other("scales/sizes", 12.0, 7)
    np.random.seed(5)  # noqa: NPY002
    assert np.array_equal(other("round-1/step", WIDE, 50), wanted)
    assert np.array_equal(other("round-1/step", WIDE, 50), wanted)
    assert np.array_equal(simulated_noise(np.int64(3))("round-1/step", WIDE, 50), wanted)  # type: ignore[arg-type]
    for seed, name in ((4, "round-1/step"), (3, "round-2/step"), (3, "round-1/sizes"), (3, "round-11/step")):
        draws = simulated_noise(seed)(name, WIDE, 50)
        assert abs(float(draws @ wanted) / WIDE**2) < 8 * np.sqrt(50)
        assert not np.array_equal(draws, wanted)


@pytest.mark.parametrize("seed", [-1, 1.5, True, None, "3"])
def test_seeds_are_non_negative_integers(seed: object) -> None:
    with pytest.raises(InputError, match="seed"):
        simulated_noise(seed)  # type: ignore[arg-type]


@pytest.mark.parametrize("noise", SOURCES)
def test_noise_too_wide_for_the_integers_is_refused(noise: NoiseSource) -> None:
    """A saturated draw is a known number: a total plus a known number is the total. It must not be handed out."""
    with np.errstate(all="ignore"), pytest.raises(InputError):
        noise("wide", 2.0**63, 100)


def test_draws_of_several_threads_are_independent() -> None:
    """Five lots drawn side by side: no two draws alike (by chance with probability 2e-7), lots uncorrelated (each |r|
    sqrt(n) > 5.3 by chance with probability 1.2e-7, ten pairs), the whole of the right scale (6 standard errors). A lot
    drawn twice is seen."""
    sigma, lots = 2.0**52, 5
    drawn = secure_noise("lots", sigma, lots * DRAWS_AT_A_TIME)
    assert len(np.unique(drawn)) == drawn.size == lots * DRAWS_AT_A_TIME
    draws = drawn.reshape(lots, -1).astype(np.float64)

    def largest(values: np.ndarray) -> float:
        return float(np.abs(np.corrcoef(values)[np.triu_indices(lots, 1)]).max()) * np.sqrt(DRAWS_AT_A_TIME)

    assert largest(draws) < 5.3
    assert abs(draws.std() / sigma - 1) < 6 / np.sqrt(2 * draws.size)
    draws[1] = draws[0]
    assert largest(draws) > 5.3


@pytest.mark.parametrize("size", [1, 100, DRAWS_AT_A_TIME, DRAWS_AT_A_TIME + 1, 3 * DRAWS_AT_A_TIME - 1])
def test_as_many_draws_as_asked(size: int) -> None:
    draws = secure_noise("size", WIDE, size)
    assert draws.shape == (size,)
    assert draws.dtype == np.int64


def opendp_noise(sigma: float, size: int) -> np.ndarray:
    """The second opinion: the exact sampler of Canonne, Kamath and Steinke (2020)."""
    from opendp import domains, measurements, metrics, mod

    mod.enable_features("contrib")
    vectors = domains.vector_domain(domains.atom_domain(T="i64"))
    return np.asarray(measurements.make_gaussian(vectors, metrics.l2_distance(T="i64"), sigma)([0] * size))


@pytest.mark.parametrize("sigma", [2.3, 1.37 * 2.0**37])
def test_secure_noise_agrees_with_opendp(sigma: float) -> None:
    """Chi-square of two samples on 12 cells at ALARM; 8% of sigma are rejected, by 6 standard deviations or more."""
    opinion = opendp_noise(sigma, 30_000)
    inner = np.unique(np.rint(norm.ppf(np.arange(1, 12) / 12) * sigma) - 0.5)

    def agree(draws: np.ndarray) -> bool:
        counts = np.stack([np.bincount(np.searchsorted(inner, x), minlength=len(inner) + 1) for x in (draws, opinion)])
        sums = counts.sum(axis=1, keepdims=True)
        expected = counts.sum(axis=0) * sums / sums.sum()
        return bool(((counts - expected) ** 2 / expected).sum() < chi2.isf(ALARM, len(inner)))

    assert agree(secure_noise("opinion", sigma, 200_000))
    assert not agree(secure_noise("opinion", sigma * 1.08, 200_000))
    assert not agree(secure_noise("opinion", sigma / 1.08, 200_000))


@pytest.mark.parametrize("sigma", [1.0, 3.7])
def test_many_secure_draws_fit_the_probabilities_of_the_integers(sigma: float) -> None:
    draws = secure_noise("many", sigma, 500_000)
    assert accepts_probabilities(draws, discrete_gaussian(sigma))
    assert not accepts_probabilities(draws, discrete_gaussian(sigma * 1.02))
    assert not accepts_probabilities(draws, discrete_gaussian(sigma / 1.02))


def test_the_scale_of_many_secure_draws() -> None:
    """At 300,000 draws, 2% of sigma is 15 standard errors."""
    sigma = 1.7 * 2.0**40
    draws = secure_noise("scale", sigma, 300_000)
    assert accepts_scale(draws, sigma)
    assert not accepts_scale(draws, sigma * 1.02)
    assert not accepts_scale(draws, sigma / 1.02)
    assert abs(draws.mean()) / (sigma / np.sqrt(300_000)) < norm.isf(ALARM / 2)
