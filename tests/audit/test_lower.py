"""Bounds of what was observed are false as seldom as they say, and no more cautious than that."""

from __future__ import annotations

import math

import numpy as np
import pytest
from scipy import integrate
from scipy.stats import binom, norm

from privrep.audit.fits import Apart, Fitted
from privrep.audit.lower import bound_chance_above, bound_chance_below, bound_deviation_above
from privrep.audit.seen import Seen, bound_epsilon
from privrep.audit.tradeoffs import ALL_ASKED, Tradeoff, compute_delta
from privrep.audit.two_worlds import _bound_by_noise, bound_mu
from privrep.privacy.accounting import compute_epsilon, gaussian_epsilon
from privrep.privacy.batches import compute_batch_deltas
from privrep.privacy.events import Event
from privrep.privacy.sampling import Fixed, Poisson

TIMES = 2000
ERROR = 0.05
MOST_FALSE = int(binom.isf(1e-6, TIMES, ERROR))  # of so many bounds, that is passed with probability below 1e-6


@pytest.mark.parametrize("chance", [0.003, 0.2, 0.5, 0.97])
def test_bounds_of_a_chance_are_false_as_seldom_as_they_say(chance: float) -> None:
    hits = np.arange(61)
    weights = binom.pmf(hits, 60, chance)
    below = np.array([bound_chance_below(int(k), 60, ERROR) for k in hits])
    above = np.array([bound_chance_above(int(k), 60, ERROR) for k in hits])
    assert weights[below > chance].sum() <= ERROR
    assert weights[above < chance].sum() <= ERROR
    assert weights[below > chance - 0.3].sum() > 0.9  # neither is it always zero


def test_bounds_of_a_chance_are_near_it_with_many_draws() -> None:
    assert 0.295 < bound_chance_below(30_000, 100_000, 0.01) < 0.3 < bound_chance_above(30_000, 100_000, 0.01) < 0.305
    assert (bound_chance_below(0, 9, 0.01), bound_chance_above(9, 9, 0.01)) == (0.0, 1.0)


def test_the_bound_of_a_deviation_is_false_as_seldom_as_it_says() -> None:
    """False alarms: fewer than 1 in 10^6. A deviation a quarter larger would nearly always be refused."""
    draws = np.random.default_rng(1).normal(0.0, 2.0, (TIMES, 400))
    bounds = np.array([bound_deviation_above(each @ each, len(each), ERROR) for each in draws])
    assert 0 < (bounds < 2.0).sum() <= MOST_FALSE
    assert (bounds < 2.5).mean() > 0.99
    shifted = np.array([bound_deviation_above(((each + 0.5) ** 2).sum(), len(each), ERROR) for each in draws])
    assert (shifted > bounds).mean() > 0.9  # what is not centred is not taken for less noise


@pytest.mark.parametrize("rate", [1.0, 0.3, 0.01])
@pytest.mark.parametrize(("u", "v"), [(0.5, 0.5), (1.5, 0.0), (0.0, 1.5), (0.02, 0.02)])
def test_delta_is_the_largest_difference_of_the_two_mixtures(u: float, v: float, rate: float) -> None:
    for epsilon in (0.0, 0.1, 0.7):

        def excess(x: float, epsilon: float = epsilon) -> float:
            first = (1 - rate) * norm.pdf(x) + rate * norm.pdf(x - u)
            return float(max(first - math.exp(epsilon) * ((1 - rate) * norm.pdf(x) + rate * norm.pdf(x + v)), 0.0))

        wanted, _ = integrate.quad(excess, -12, 12, limit=400, epsabs=1e-12)
        assert compute_delta(epsilon, u, v, rate) == pytest.approx(wanted, abs=1e-9)


@pytest.mark.parametrize("mu", [0.05, 0.7, 3.0])
def test_of_everyone_it_agrees_with_the_closed_form(mu: float) -> None:
    assert ALL_ASKED.compute_epsilon(mu, 1e-6) == pytest.approx(gaussian_epsilon(1e-6, mu), rel=1e-6)
    assert ALL_ASKED.compute_epsilon(1e-9, 1e-6) == 0.0


@pytest.mark.parametrize("rate", [0.02, 0.5])
def test_about_samples_and_batches_it_is_a_little_below_what_accountants_say(rate: float) -> None:
    ratio, delta = 1.3, 1e-5
    events: dict[str, Event] = {
        "sample": Poisson(rate).make_event(ratio**2, "replace-one-user"),
        "batch": Fixed(round(1000 * rate), 1000).make_event(ratio**2, "replace-one-user"),
    }
    for design, event in events.items():
        exact = Tradeoff(design, rate).compute_epsilon(ratio, delta)  # type: ignore[arg-type]
        assert 0.99 * compute_epsilon([event], delta) < exact < compute_epsilon([event], delta)
    at = np.array([Tradeoff("batch", rate).compute_epsilon(ratio, delta)])
    assert compute_batch_deltas(at, 1 / ratio, rate)[0] == pytest.approx(delta, rel=1e-6)


def test_the_ratio_that_coins_tell_is_the_one_that_makes_them() -> None:
    for rate in (1.0, 0.2):
        right = (1 + rate * (2 * norm.cdf(1.4 / 2) - 1)) / 2
        assert Tradeoff("sample", rate).find_ratio(right) == pytest.approx(1.4)
    assert Tradeoff("sample", 0.2).find_ratio(0.5) == Tradeoff("sample", 0.2).find_ratio(0.3) == 0.0


def see(rng: np.random.Generator, canaries: int, ratio: float, design: Tradeoff) -> Seen:
    coins = rng.random(canaries) < 0.5
    asked = rng.random(canaries) < design.rate
    total = np.where(coins, 1.0, -1.0) * asked
    return Seen(coins, total + rng.normal(0.0, 2 / ratio, canaries), total, -total, tradeoff=design)


@pytest.mark.parametrize("design", [ALL_ASKED, Tradeoff("sample", 0.5)])
def test_the_bound_of_epsilon_is_false_as_seldom_as_it_says(design: Tradeoff) -> None:
    """False alarms: fewer than 1 in 10^6. Twice the noise claimed would nearly always be refused."""
    rng, truth = np.random.default_rng(2), design.compute_epsilon(1.5, 1e-5)
    found = np.array([bound_epsilon(see(rng, 300, 1.5, design), 1e-5, ERROR).epsilon for _ in range(TIMES // 5)])
    assert (found > truth).sum() <= int(binom.isf(1e-6, len(found), ERROR))
    assert (found > design.compute_epsilon(0.75, 1e-5)).mean() > 0.99


def test_coins_alone_tell_of_noise_that_hides_nothing_from_them() -> None:
    """A release whose noise is as large as it should be, but goes the way of the coins, is found out by coins alone."""
    rng = np.random.default_rng(3)
    coins = rng.random(4000) < 0.5
    total = np.where(coins, 1.0, -1.0)
    told = bound_epsilon(Seen(coins, total + np.abs(rng.normal(0.0, 4.0, 4000)) * total, total, -total), 1e-5, 1e-6)
    assert told.by == "coins"
    assert told.right == 1.0
    assert told.epsilon > 5 * ALL_ASKED.compute_epsilon(0.5, 1e-5)


@pytest.mark.parametrize("mu", [0.8, 2.5])
def test_the_bound_of_mu_is_false_as_seldom_as_it_says(mu: float) -> None:
    """False alarms: fewer than 1 in 10^6. Half of mu would nearly always be refused, whatever unit ratios are in."""
    rng = np.random.default_rng(4)
    worlds = rng.normal(mu**2 / 2, mu, (2, TIMES // 10, 600)) * np.array([1, -1])[:, None, None]
    found = np.array([bound_mu(first, second, ERROR)[0] for first, second in zip(*worlds, strict=True)])
    assert (found > mu).sum() <= int(binom.isf(1e-6, len(found), ERROR))
    assert (found > mu / 2).mean() > 0.99
    scaled = bound_mu(1.21 * worlds[0, 0], 1.21 * worlds[1, 0], ERROR)[0]
    assert scaled == pytest.approx(found[0])


def test_thresholds_serve_where_ratios_are_far_from_normal() -> None:
    rng = np.random.default_rng(5)
    first, second = (rng.standard_t(1.2, 4000) + shift for shift in (2.0, -2.0))
    mu, by = bound_mu(first, second, 0.01)
    assert by == "threshold"
    assert 1.0 < mu < 4.0


@pytest.mark.parametrize("deviation", [1.0, 0.5])
def test_the_bound_by_distances_is_false_as_seldom_as_it_says(deviation: float) -> None:
    """False alarms: fewer than 1 in 10^6. Noise that is half as large is noticed: distances then count twice."""
    rng, times, delta = np.random.default_rng(6), 100, 1e-5

    def make_runs() -> list[Fitted]:
        apart = np.where(rng.random(150) < 0.9, 1.0, 0.8)
        loud = deviation**2 * rng.chisquare(20, 150)
        return [
            Fitted(0.0, float(x), 20, 1.0, {"page/sum": Apart(0.9, float(a) / 0.81)})
            for a, x in zip(apart, loud, strict=True)
        ]

    truth = ALL_ASKED.compute_epsilon(1 / deviation, delta / 0.9)  # no less than that of nine runs of ten at distance 1
    found = np.array([_bound_by_noise((make_runs(), make_runs()), delta, ERROR) for _ in range(times)])
    assert (found > truth).sum() <= int(binom.isf(1e-6, times, ERROR))
    assert (found > 0.7 * truth).mean() > 0.99
    assert (found > 1.5 * ALL_ASKED.compute_epsilon(1.0, delta)).all() == (deviation < 1)
