"""Choices are drawn from the exponential mechanism, and these tests would see it if they were not.

Every test has a false-alarm rate of at most ALARM. Secure draws cannot be seeded, so about one run of this file in
50,000 goes red by chance. Power: the same statistic rejects draws at 1.2 times the epsilon, and permute-and-flip, whose
draws are those of exponential noise where Gumbel noise belongs.
"""

from __future__ import annotations

import numpy as np
import pytest
from scipy.stats import binom, chi2

from privrep.privacy.noise import NoiseSource, _Bits, _draw_bernoulli_exp, secure_noise, simulated_noise

ALARM = 1e-6
DRAWS = 100_000
SCALE = 2**21  # epsilon of 1 where a user is replaced
LOSSES = np.array([3, 5, 4, 3, 9, 4, 12]) * 2**20 + np.array([0, 7, 123_456, 300_000, 1, 0, 5])
SOURCES = [pytest.param(secure_noise, id="secure"), pytest.param(simulated_noise(7), id="simulated")]


def probabilities(losses: np.ndarray, scale: float) -> np.ndarray:
    weights = np.exp(-(losses - losses.min()) / scale)
    return weights / weights.sum()


def draws(noise: NoiseSource, losses: np.ndarray, scale: int, count: int) -> np.ndarray:
    drawn = [noise.draw_choice(f"choice-{i}", losses, scale) for i in range(count)]
    return np.bincount(drawn, minlength=len(losses))


def accepts(observed: np.ndarray, probability: np.ndarray) -> bool:
    """Pearson's test against exact probabilities; candidates that expect fewer than 20 draws are pooled."""
    expected = probability * observed.sum()
    rare = expected < 20
    if rare.any():
        observed = np.append(observed[~rare], observed[rare].sum())
        expected = np.append(expected[~rare], expected[rare].sum())
    return bool(((observed - expected) ** 2 / expected).sum() < chi2.isf(ALARM, len(expected) - 1))


def test_a_hundred_thousand_secure_draws_are_those_of_the_exponential_mechanism() -> None:
    observed = draws(secure_noise, LOSSES, SCALE, DRAWS)
    assert accepts(observed, probabilities(LOSSES, SCALE))
    for factor in (1.08, 1.2, 2.0):
        assert not accepts(observed, probabilities(LOSSES, SCALE * factor))
        assert not accepts(observed, probabilities(LOSSES, SCALE / factor))
    assert not accepts(observed, probabilities(-LOSSES, SCALE))


@pytest.mark.parametrize(
    ("noise", "count"),
    [pytest.param(secure_noise, 30_000, id="secure"), pytest.param(simulated_noise(7), 10_000, id="simulated")],
)
def test_draws_at_another_epsilon_are_rejected(noise: NoiseSource, count: int) -> None:
    assert accepts(draws(noise, LOSSES, SCALE, count), probabilities(LOSSES, SCALE))
    assert not accepts(draws(noise, LOSSES, round(SCALE / 1.2), count), probabilities(LOSSES, SCALE))


def test_the_test_can_tell_permute_and_flip() -> None:
    noisy = (LOSSES - LOSSES.min()) / SCALE - np.random.default_rng(0).exponential(size=(10_000, len(LOSSES)))
    assert not accepts(np.bincount(noisy.argmin(axis=1), minlength=len(LOSSES)), probabilities(LOSSES, SCALE))


@pytest.mark.parametrize("noise", SOURCES)
def test_many_candidates_of_which_few_are_good(noise: NoiseSource) -> None:
    """Most have no chance to speak of; where the losses lie makes no difference, only how far apart they are."""
    rng = np.random.default_rng(1)
    losses = (rng.random((3, 300)).sum(axis=0) * 2**27).astype(np.int64) + 2**42
    observed = draws(noise, losses, 2**23, 2000)
    assert accepts(observed, probabilities(losses, 2.0**23))
    assert not accepts(observed, probabilities(losses, 1.3 * 2.0**23))


@pytest.mark.parametrize("noise", SOURCES)
def test_equal_losses_are_equally_likely(noise: NoiseSource) -> None:
    observed = draws(noise, np.full(10, 2**40), 1, 5000)
    assert accepts(observed, np.full(10, 0.1))


def test_a_candidate_far_below_the_others_is_chosen() -> None:
    """With a probability of 1 - 1e-400, whatever it takes to get there."""
    losses = np.full(2000, 1000 * SCALE)
    losses[1234] = 0
    assert secure_noise.draw_choice("a", losses, SCALE) == 1234


# What the secure draw is made of


@pytest.mark.parametrize(("numerator", "denominator"), [(1, 3), (1, 1), (5, 2), (2**40 + 1, 2**41), (7, 1), (1, 1000)])
def test_an_event_of_exponential_probability_happens_as_often(numerator: int, denominator: int) -> None:
    count, bits = 20_000, _Bits()
    happened = sum(_draw_bernoulli_exp(numerator, denominator, bits) for _ in range(count))
    chance = float(np.exp(-numerator / denominator))
    assert binom.ppf(ALARM / 2, count, chance) <= happened <= binom.isf(ALARM / 2, count, chance)
    assert all(_draw_bernoulli_exp(0, denominator, bits) for _ in range(50))


@pytest.mark.parametrize("end", [1, 2, 3, 7, 10, 64, 65])
def test_bits_make_uniform_integers(end: int) -> None:
    bits = _Bits()
    observed = np.bincount([bits.draw_below(end) for _ in range(10_000)], minlength=end)
    assert len(observed) == end
    assert end == 1 or accepts(observed, np.full(end, 1 / end))


def test_bits_of_any_width_are_uniform_and_never_used_twice() -> None:
    """Integers below 3 * 2^200: the top two bits say which third, and none of 2,000 is drawn again."""
    bits = _Bits()
    drawn = [bits.draw_below(3 << 200) for _ in range(2000)]
    assert len(set(drawn)) == 2000
    assert accepts(np.bincount([x >> 200 for x in drawn], minlength=3), np.full(3, 1 / 3))
