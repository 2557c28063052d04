"""What Gaussian and pure releases cost together: exact sums with sixty digits, the definition, a second accountant."""

from __future__ import annotations

import itertools
import json
import math
from collections.abc import Callable

import mpmath
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from privrep.errors import InputError
from privrep.privacy import composition
from privrep.privacy.accounting import (
    CLOSED_FORM,
    compute_epsilon,
    compute_epsilon_by_pld,
    describe_accountant,
    gaussian_delta,
    gaussian_epsilon,
    list_pure_epsilons,
    total_mu,
)
from privrep.privacy.composition import (
    compose_epsilon,
    composition_fits,
    find_largest_mu,
    find_largest_pure_epsilon,
    log_composed_delta,
)
from privrep.privacy.events import Event, Gaussian, Pure, Selection, event_from_json, event_to_json

MIXES = [
    (0.5, [0.5]),
    (0.3, [0.5, 0.5, 0.5]),
    (1.0, [0.1, 0.2, 0.7]),
    (0.01, [1.0, 0.3]),
    (1e-5, [0.4, 0.4]),
    (4.0, [3.0, 0.001]),
    (0.2, [0.05] * 8),
    (0.0, [0.5, 0.5, 0.25]),
    (0.0, [2.0]),
]


def exact_delta(epsilon: float, mu: float, pures: list[float]) -> mpmath.mpf:
    """The sum of the module's guarantee over all 2^n outcomes, with sixty digits."""
    with mpmath.workdps(60):
        total, m = mpmath.mpf(0), mpmath.mpf(mu)
        for signs in itertools.product((1, -1), repeat=len(pures)):
            chance, left = mpmath.mpf(1), mpmath.mpf(epsilon)
            for sign, pure in zip(signs, pures, strict=True):
                chance /= 1 + mpmath.exp(-sign * mpmath.mpf(pure))
                left -= sign * mpmath.mpf(pure)
            if mu > 0:
                rest = mpmath.ncdf(-left / m + m / 2) - mpmath.exp(left) * mpmath.ncdf(-left / m - m / 2)
            else:
                rest = max(mpmath.mpf(0), 1 - mpmath.exp(left))
            total += chance * rest
        return total


def hockey_stick(epsilon: float, mu: float, pures: list[float]) -> tuple[float, float]:
    """The integral of (P - e^epsilon Q)_+ and of (Q - e^epsilon P)_+ from the densities of the pair, by a fine grid."""
    z = np.linspace(-14, 14 + mu, 400_001)
    first, second = (np.exp(-((z - mean) ** 2) / 2) / math.sqrt(2 * math.pi) for mean in (mu, 0.0))
    both = [0.0, 0.0]
    for signs in itertools.product((1, -1), repeat=len(pures)):
        p, q = (
            math.prod(1 / (1 + math.exp(-way * sign * pure)) for sign, pure in zip(signs, pures, strict=True))
            for way in (1, -1)
        )
        both[0] += float(np.maximum(p * first - math.exp(epsilon) * q * second, 0).sum() * (z[1] - z[0]))
        both[1] += float(np.maximum(q * second - math.exp(epsilon) * p * first, 0).sum() * (z[1] - z[0]))
    return both[0], both[1]


# The closed form


@pytest.mark.parametrize(("mu", "pures"), MIXES)
@pytest.mark.parametrize("part", [0.0, 0.3, 0.9, 0.999999, 1.3, 4.0])
def test_delta_is_the_exact_sum_and_never_below_it(mu: float, pures: list[float], part: float) -> None:
    epsilon = part * (sum(pures) + mu)
    exact, got = exact_delta(epsilon, mu, pures), log_composed_delta(epsilon, mu, pures)
    if exact == 0:
        assert got == -math.inf
        return
    with mpmath.workdps(60):
        wanted = mpmath.log(exact)
        assert got >= wanted
        assert wanted < math.log(1e-300) or got - wanted < 1e-6


@pytest.mark.parametrize(("mu", "pures"), [(0.8, [0.5]), (0.5, [0.3, 0.9]), (2.0, [0.1] * 5), (0.5, [1.0, 1.0, 0.2])])
@pytest.mark.parametrize("epsilon", [0.0, 0.4, 1.5])
def test_delta_is_the_hockey_stick_divergence_in_either_order(mu: float, pures: list[float], epsilon: float) -> None:
    wanted = math.exp(log_composed_delta(epsilon, mu, pures))
    assert hockey_stick(epsilon, mu, pures) == pytest.approx((wanted, wanted), rel=1e-5, abs=1e-9)


@pytest.mark.parametrize("mu", [1e-3, 0.3, 1.0, 5.0])
@pytest.mark.parametrize("epsilon", [-30.0, -3.0, -0.5, -1e-3])
def test_delta_of_gaussians_at_negative_epsilons(mu: float, epsilon: float) -> None:
    assert gaussian_delta(epsilon, mu) == pytest.approx(float(exact_delta(epsilon, mu, [])), rel=1e-10)


def test_one_pure_release_of_all_gaussians_gone_is_the_gaussian_and_the_other_way_round() -> None:
    assert compose_epsilon(1e-6, 0.5, [1e-9]) == pytest.approx(gaussian_epsilon(1e-6, 0.5), rel=1e-7)
    assert compose_epsilon(1e-6, 1e-300, [0.5]) == pytest.approx(compose_epsilon(1e-6, 0.0, [0.5]), rel=1e-5)


# What it comes to


@given(st.lists(st.floats(1e-4, 20.0), min_size=1, max_size=8))
def test_pure_releases_at_delta_zero_cost_the_sum(pures: list[float]) -> None:
    assert compute_epsilon([Pure(e) for e in pures], 0.0) == math.fsum(pures)
    assert compute_epsilon([Gaussian(3.0), *(Pure(e) for e in pures)], 0.0) == math.inf
    assert compute_epsilon([], 0.0) == 0.0


MU = st.one_of(st.just(0.0), st.floats(1e-5, 2.0))


@settings(max_examples=40)
@given(st.lists(st.floats(1e-3, 3.0), min_size=1, max_size=5), MU, st.sampled_from([1e-9, 1e-6, 1e-3]))
def test_never_above_the_sum_of_the_parts_and_never_below_any(pures: list[float], mu: float, delta: float) -> None:
    got = compose_epsilon(delta, mu, pures)
    alone = gaussian_epsilon(delta, mu) if mu > 0 else 0.0
    assert got <= (math.fsum(pures) + alone) * (1 + 1e-7) + 1e-12
    assert got >= alone * (1 - 1e-9)
    assert got >= compose_epsilon(delta, 0.0, pures) * (1 - 1e-9)
    if got > 0:
        assert composition_fits(got * (1 + 1e-11), delta, mu, pures)
        assert not composition_fits(got * (1 - 1e-8) - 1e-11, delta, mu, pures)
        assert exact_delta(got, mu, pures) <= delta


SHRINK = st.floats(0.3, 0.99)


@settings(max_examples=40)
@given(st.lists(st.floats(0.01, 2.0), min_size=1, max_size=5), st.floats(0.01, 2.0), SHRINK, st.integers(0, 4))
def test_less_of_anything_costs_no_more(pures: list[float], mu: float, less: float, place: int) -> None:
    delta = 1e-6
    whole = compose_epsilon(delta, mu, pures)
    place %= len(pures)
    smaller = [e * less if i == place else e for i, e in enumerate(pures)]
    assert compose_epsilon(delta, mu, smaller) <= whole * (1 + 1e-11)
    assert compose_epsilon(delta, mu * less, pures) <= whole * (1 + 1e-11)
    assert compose_epsilon(delta / less, mu, pures) <= whole * (1 + 1e-11)
    assert compose_epsilon(delta, mu, [*pures, 0.1]) >= whole * (1 - 1e-11)
    assert compose_epsilon(delta, mu, pures[::-1]) == pytest.approx(whole, rel=1e-10)


def test_many_small_choices_cost_less_than_their_sum() -> None:
    """Sixty-four choices of 0.05: the square-root law shows at last."""
    assert compose_epsilon(1e-6, 0.0, [0.05] * 64) < 0.55 * compose_epsilon(0.0, 0.0, [0.05] * 64)
    assert compose_epsilon(0.0, 0.0, [0.05] * 64) == pytest.approx(3.2)


# The second accountant


@pytest.mark.parametrize(
    ("events", "delta"),
    [
        ([Gaussian(2.0), Pure(0.5), Pure(0.5), Pure(0.5)], 1e-6),
        ([*[Gaussian(6.0)] * 5, Pure(0.2), Pure(0.9)], 1e-8),
        ([Pure(0.1)] * 30, 1e-6),
        ([Pure(0.5), Pure(0.25)], 1e-3),
        ([Selection(5.0, 4e-7), Gaussian(3.0), Pure(1.0)], 1e-6),
    ],
)
def test_privacy_loss_distributions_agree(events: list[Event], delta: float) -> None:
    closed, numeric = compute_epsilon(events, delta), compute_epsilon_by_pld(events, delta)
    assert numeric == pytest.approx(closed, rel=2e-3)
    assert numeric >= closed * (1 - 1e-6)  # dp-accounting rounds up


# Too many outcomes


def test_the_smallest_are_added_up_where_there_would_be_too_many_outcomes(monkeypatch: pytest.MonkeyPatch) -> None:
    pures = [0.02 + 0.001 * i for i in range(11)]
    exact = compose_epsilon(1e-6, 0.5, pures)
    monkeypatch.setattr(composition, "MOST_OUTCOMES", 2**8)
    assert len(composition._list_outcomes(pures)[0]) <= 2**8
    assert exact < compose_epsilon(1e-6, 0.5, pures) < 1.1 * exact


@pytest.mark.parametrize("count", [1000, 70_000])
def test_many_equal_ones_stay_exact_or_are_bounded(count: int) -> None:
    log_chance, loss = composition._list_outcomes([1e-3] * count)
    assert len(loss) <= composition.MOST_OUTCOMES
    assert np.exp(log_chance).sum() == pytest.approx(1.0, abs=1e-7)
    assert loss.max() == pytest.approx(1e-3 * count)


# How much more fits


@pytest.mark.parametrize("pures", [[0.5], [0.3, 0.3], [1.9], [0.05] * 10])
def test_the_most_that_fits_fits_and_a_little_more_does_not(pures: list[float]) -> None:
    epsilon, delta = 2.0, 1e-6
    mu = find_largest_mu(epsilon, delta, pures, 5.0)
    assert mu > 0
    assert composition_fits(epsilon, delta, mu, pures)
    assert not composition_fits(epsilon, delta, mu * (1 + 1e-7), pures)
    assert compose_epsilon(delta, mu, pures) <= epsilon
    more = find_largest_pure_epsilon(epsilon, delta, 0.1, pures)
    assert composition_fits(epsilon, delta, 0.1, [*pures, more]) or more == 0
    assert not composition_fits(epsilon, delta, 0.1, [*pures, more * (1 + 1e-7) + 1e-6])


def test_nothing_fits_beside_what_is_too_much() -> None:
    assert find_largest_mu(2.0, 1e-6, [2.5], 1.0) == 0.0
    assert find_largest_mu(2.0, 1e-6, [2.0], 1.0) < 1e-3
    assert find_largest_pure_epsilon(2.0, 1e-6, 5.0, []) == 0.0
    assert find_largest_pure_epsilon(1.0, 0.0, 0.0, [0.25, 0.25]) == 0.5
    assert find_largest_pure_epsilon(1.0, 0.0, 0.1, [0.25]) == 0.0


# Events


@given(st.floats(1e-9, 1e6))
def test_pure_events_survive_json_exactly(epsilon: float) -> None:
    assert event_from_json(json.loads(json.dumps(event_to_json(Pure(epsilon))))) == Pure(epsilon)


@pytest.mark.parametrize("epsilon", [0.0, -1.0, math.nan, math.inf])
def test_a_pure_event_must_mean_something(epsilon: float) -> None:
    with pytest.raises(InputError, match="epsilon of a choice"):
        Pure(epsilon)
    with pytest.raises(InputError, match="epsilon of a choice"):
        event_from_json({"kind": "pure", "epsilon": epsilon})


def test_pure_events_have_no_part_in_mu() -> None:
    events: list[Event] = [Pure(0.5), Gaussian(2.0), Pure(0.25), Selection(2.0, 1e-7)]
    assert total_mu(events) == pytest.approx(math.sqrt(0.5), rel=1e-15)
    assert list_pure_epsilons(events) == [0.5, 0.25]


@pytest.mark.parametrize("account", [total_mu, list_pure_epsilons, lambda e: compute_epsilon(e, 1e-6)])
def test_unknown_events_beside_pure_ones_are_refused(account: Callable[[list[object]], object]) -> None:
    with pytest.raises(InputError, match="laplace"):
        account([Pure(1.0), "laplace"])


def test_the_accountant_says_what_it_did() -> None:
    assert describe_accountant([]) == describe_accountant([Gaussian(1.0)]) == CLOSED_FORM
    assert describe_accountant([Pure(1.0), Pure(2.0)]).startswith("closed form of pure releases")
    mixed = describe_accountant([Pure(1.0), Gaussian(2.0), Selection(3.0, 2.5e-8)])
    assert "Gaussian and pure releases" in mixed
    assert "2.5e-08 of delta" in mixed
