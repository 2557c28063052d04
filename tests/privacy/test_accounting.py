"""What releases cost: closed forms, a quadrature oracle, a second accountant, and the traps of its conventions."""

from __future__ import annotations

import math

import dp_accounting
import mpmath
import pytest
from hypothesis import given
from hypothesis import strategies as st
from scipy.stats import norm

from privrep.errors import InputError, PrivrepError
from privrep.privacy.accounting import (
    CLOSED_FORM,
    check_budget,
    compute_delta_left,
    compute_epsilon,
    compute_epsilon_by_pld,
    describe_accountant,
    gaussian_delta,
    gaussian_epsilon,
    gaussian_mu,
    total_mu,
)
from privrep.privacy.events import Event, Gaussian, Selection
from privrep.privacy.groups import Group

EPSILONS = (1e-4, 1e-3, 0.01, 0.1, 0.5, 1.0, 3.0, 10.0, 100.0, 1e3, 1e4)
DELTAS = (1e-300, 1e-100, 1e-30, 1e-12, 1e-9, 1e-6, 1e-3, 0.1, 0.5, 0.999)


def exact_delta(epsilon: float, mu: float) -> mpmath.mpf:
    """delta(epsilon) of mu-GDP with sixty digits."""
    with mpmath.workdps(60):
        e, m = mpmath.mpf(epsilon), mpmath.mpf(mu)
        return mpmath.ncdf(-e / m + m / 2) - mpmath.exp(e) * mpmath.ncdf(-e / m - m / 2)


def hockey_stick(epsilon: float, mu: float) -> float:
    """The same from the definition: the integral of (p - e^epsilon q)_+ for p = N(mu, 1), q = N(0, 1).

    p/q increases, so the integrand is positive to the right of one point, found from the densities by bisection.
    """
    with mpmath.workdps(30):
        e, m = mpmath.mpf(epsilon), mpmath.mpf(mu)

        def excess(x: mpmath.mpf) -> mpmath.mpf:
            return mpmath.npdf(x, m, 1) - mpmath.exp(e) * mpmath.npdf(x)

        low, high = mpmath.mpf(-60), mpmath.mpf(60)
        for _ in range(100):
            middle = (low + high) / 2
            low, high = (low, middle) if excess(middle) > 0 else (middle, high)
        return float(mpmath.quad(excess, [high, high + 1, high + 4, high + 12, high + 40]))


# Known answers


@pytest.mark.parametrize("mu", [1e-3, 0.1, 0.5, 1.0, 2.0, 8.0])
def test_delta_at_epsilon_zero_is_total_variation(mu: float) -> None:
    assert gaussian_delta(0.0, mu) == pytest.approx(math.erf(mu / math.sqrt(8)), rel=1e-10)


@pytest.mark.parametrize("mu", [0.1, 0.5, 1.0, 2.0, 8.0])
def test_delta_where_the_first_term_is_one_half(mu: float) -> None:
    assert gaussian_delta(mu**2 / 2, mu) == pytest.approx(0.5 - math.exp(mu**2 / 2) * norm.sf(mu), rel=1e-9)


def test_the_analytic_gaussian_mechanism_of_balle_and_wang() -> None:
    assert 1 / gaussian_mu(1.0, 1e-5) == pytest.approx(3.730632, rel=1e-6)


def test_nothing_released_costs_nothing() -> None:
    assert total_mu([]) == 0.0
    assert compute_epsilon([], 1e-6) == 0.0
    assert gaussian_delta(1.0, 0.0) == 0.0


def test_a_budget_of_mu_small_against_delta_costs_epsilon_zero() -> None:
    assert gaussian_epsilon(0.5, 0.1) == 0.0


@pytest.mark.parametrize("epsilon", [0.0, 0.01, 0.5, 1.0, 4.0, 12.0])
@pytest.mark.parametrize("mu", [0.05, 0.4, 1.0, 3.0])
def test_delta_is_the_hockey_stick_divergence(epsilon: float, mu: float) -> None:
    if epsilon / mu < 40:  # beyond, both are below 1e-300
        assert gaussian_delta(epsilon, mu) == pytest.approx(hockey_stick(epsilon, mu), rel=1e-8)


@pytest.mark.parametrize("mu", [1e-3, 0.03, 0.3, 1.0, 5.0, 40.0])
def test_delta_agrees_with_sixty_digits(mu: float) -> None:
    for a in (-3.0, 0.0, 1.0, 5.0, 12.0, 30.0):  # where the threshold lies, in standard deviations
        epsilon = mu * (a + mu / 2)
        if epsilon >= 0:
            assert gaussian_delta(epsilon, mu) == pytest.approx(float(exact_delta(epsilon, mu)), rel=1e-8)


def test_composition_adds_mu_squared() -> None:
    assert total_mu([Gaussian(3.0), Gaussian(4.0)]) == pytest.approx(math.sqrt(1 / 9 + 1 / 16), rel=1e-15)
    assert total_mu([Gaussian(10.0)] * 100) == pytest.approx(1.0, rel=1e-14)
    assert compute_epsilon([Gaussian(2.0)] * 4, 1e-6) == pytest.approx(gaussian_epsilon(1e-6, 1.0), rel=1e-12)


# Round trips


@pytest.mark.parametrize("delta", DELTAS)
@pytest.mark.parametrize("epsilon", EPSILONS)
def test_mu_of_a_budget_fills_it_and_never_exceeds_it(epsilon: float, delta: float) -> None:
    mu = gaussian_mu(epsilon, delta)
    assert exact_delta(epsilon, mu) <= mpmath.mpf(delta)
    assert exact_delta(epsilon, mu * (1 + 1e-7)) > mpmath.mpf(delta)
    back = gaussian_epsilon(delta, mu)
    assert epsilon * (1 - 1e-5) - 1e-7 <= back <= epsilon * (1 + 1e-8)


@pytest.mark.parametrize(("epsilon", "delta"), [(1e-4, 1e-300), (1e-4, 1e-30), (1e-5, 1e-300), (1e-12, 1e-30)])
def test_minute_budgets_are_refused_or_not_exceeded(epsilon: float, delta: float) -> None:
    try:
        mu = gaussian_mu(epsilon, delta)
    except PrivrepError:
        return
    assert exact_delta(epsilon, mu) <= mpmath.mpf(delta)


@given(st.floats(1e-3, 30.0), st.floats(-690.0, -0.7))
def test_delta_to_epsilon_to_delta(mu: float, log_delta: float) -> None:
    delta = math.exp(log_delta)
    epsilon = gaussian_epsilon(delta, mu)
    assert gaussian_delta(epsilon, mu) <= delta * (1 + 1e-8)
    if epsilon > 1e-6:
        assert gaussian_delta(epsilon, mu) == pytest.approx(delta, rel=1e-5)


@given(st.floats(1e-4, 1e4), st.floats(-690.0, -0.7))
def test_epsilon_to_mu_to_epsilon(epsilon: float, log_delta: float) -> None:
    back = gaussian_epsilon(math.exp(log_delta), gaussian_mu(epsilon, math.exp(log_delta)))
    assert epsilon * (1 - 1e-5) - 1e-7 <= back <= epsilon * (1 + 1e-8)


# Monotonicity


@given(st.floats(0.0, 50.0), st.floats(0.0, 5.0), st.floats(0.01, 20.0), st.floats(0.0, 5.0))
def test_delta_falls_with_epsilon_and_rises_with_mu(epsilon: float, more: float, mu: float, wider: float) -> None:
    here = gaussian_delta(epsilon, mu)
    assert 0.0 <= here <= 1.0
    assert gaussian_delta(epsilon + more, mu) <= here * (1 + 1e-9)
    assert gaussian_delta(epsilon, mu + wider) >= here * (1 - 1e-9)


@given(st.floats(1e-3, 50.0), st.floats(-60.0, -1.0), st.floats(1.001, 10.0))
def test_a_larger_budget_holds_more(epsilon: float, log_delta: float, factor: float) -> None:
    delta = math.exp(log_delta)
    mu = gaussian_mu(epsilon, delta)
    assert gaussian_mu(epsilon * factor, delta) > mu
    assert gaussian_mu(epsilon, min(delta * factor, 0.99)) > mu


@given(st.lists(st.floats(0.5, 1e3), max_size=20), st.floats(0.5, 1e3))
def test_one_more_release_never_costs_less(multipliers: list[float], extra: float) -> None:
    events = [Gaussian(z) for z in multipliers]
    assert total_mu([*events, Gaussian(extra)]) >= total_mu(events)
    assert compute_epsilon([*events, Gaussian(extra)], 1e-6) >= compute_epsilon(events, 1e-6)


# Groups and selections

GROUPED = st.builds(
    Gaussian,
    st.floats(0.5, 1e3),
    st.one_of(
        st.none(), st.builds(lambda split, index: Group(split, index, 3), st.sampled_from("ab"), st.integers(0, 2))
    ),
)


def test_rounds_that_ask_one_group_each_cost_as_much_as_one() -> None:
    rounds = [Gaussian(2.0, Group("rounds", t, 10)) for t in range(10)]
    assert total_mu(rounds) == pytest.approx(0.5, rel=1e-15)
    assert compute_epsilon(rounds, 1e-6) == compute_epsilon([Gaussian(2.0)], 1e-6)
    assert total_mu([*rounds, Gaussian(2.0)]) == pytest.approx(math.sqrt(0.5), rel=1e-15)


def test_a_group_that_is_asked_twice_pays_twice_and_splits_add_up() -> None:
    a0, a1, b0 = (Group(split, index, 2) for split, index in (("a", 0), ("a", 1), ("b", 0)))
    assert total_mu([Gaussian(3.0, a0), Gaussian(4.0, a0), Gaussian(2.5, a1)]) ** 2 == pytest.approx(1 / 9 + 1 / 16)
    assert total_mu([Gaussian(3.0, a0), Gaussian(2.0, a1), Gaussian(4.0, b0)]) ** 2 == pytest.approx(1 / 4 + 1 / 16)


@given(st.lists(GROUPED, max_size=12))
def test_no_user_is_asked_for_more_than_the_run_says_and_one_may_be_asked_for_as_much(events: list[Gaussian]) -> None:
    """Every user there can be: one of the three groups of each of the two splits."""
    users = [
        math.fsum(
            e.noise_multiplier**-2
            for e in events
            if e.group is None or {"a": a, "b": b}[e.group.split] == e.group.index
        )
        for a in range(3)
        for b in range(3)
    ]
    assert total_mu(events) ** 2 == pytest.approx(max(users), rel=1e-12)


def test_a_split_whose_count_changes_is_refused() -> None:
    """Group 0 of 2 and group 1 of 3 have users in common."""
    events = [Gaussian(2.0, Group("a", 0, 2)), Gaussian(2.0, Group("a", 1, 3))]
    for account in (total_mu, lambda e: compute_epsilon(e, 1e-6), lambda e: compute_epsilon_by_pld(e, 1e-6)):
        with pytest.raises(InputError, match="split 'a' has 2 groups in one release and 3 in another"):
            account(events)


def test_a_selection_takes_its_part_of_delta_and_of_mu() -> None:
    events: list[Event] = [Selection(3.0, 4e-7), Gaussian(4.0), Selection(5.0, 1e-7)]
    mu = math.sqrt(1 / 9 + 1 / 16 + 1 / 25)
    assert total_mu(events) == pytest.approx(mu, rel=1e-15)
    assert compute_delta_left(events, 1e-6) == pytest.approx(5e-7, rel=1e-12)
    assert compute_epsilon(events, 1e-6) == pytest.approx(gaussian_epsilon(5e-7, mu), rel=1e-9)
    assert compute_epsilon(events, 5e-7) == compute_epsilon_by_pld(events, 5e-7) == math.inf


def test_the_accountant_says_what_it_did() -> None:
    assert describe_accountant([Gaussian(1.0)]) == CLOSED_FORM
    words = describe_accountant([Gaussian(1.0, Group("a", 0, 2)), Selection(3.0, 2.5e-8)])
    assert CLOSED_FORM in words
    assert "costliest group" in words
    assert "2.5e-08 of delta" in words


# The second accountant


@pytest.mark.parametrize(
    "events",
    [
        [Gaussian(2.0 + t % 3, Group("rounds", t, 10)) for t in range(10)],
        [Gaussian(6.0), *(Gaussian(3.0, Group("a", t % 2, 2)) for t in range(5)), Gaussian(4.0, Group("b", 0, 2))],
        [Selection(4.0, 3e-7), Gaussian(2.0)],
        [Selection(8.0, 1e-7), Selection(8.0, 1e-7), *(Gaussian(2.0, Group("a", t, 3)) for t in range(3))],
    ],
)
def test_privacy_loss_distributions_agree_on_groups_and_selections(events: list[Event]) -> None:
    closed, numeric = compute_epsilon(events, 1e-6), compute_epsilon_by_pld(events, 1e-6)
    assert numeric == pytest.approx(closed, rel=2e-3)
    assert numeric >= closed * (1 - 1e-6)


@pytest.mark.parametrize(
    ("multipliers", "delta"),
    [([2.0], 1e-6), ([4.0] * 5, 1e-6), ([10.0, 3.0, 25.0, 7.0], 1e-9), ([30.0] * 60 + [5.0], 1e-5)],
)
def test_privacy_loss_distributions_agree(multipliers: list[float], delta: float) -> None:
    events = [Gaussian(z) for z in multipliers]
    closed, numeric = compute_epsilon(events, delta), compute_epsilon_by_pld(events, delta)
    assert numeric == pytest.approx(closed, rel=2e-3)
    assert numeric >= closed * (1 - 1e-6)  # dp-accounting rounds up


def test_the_trap_of_replace_one_in_dp_accounting() -> None:
    """dp-accounting 0.6 doubles a Gaussian's sensitivity under REPLACE_ONE in one accountant and not in the other.

    Our multiplier is relative to the sensitivity of the relation in force, hence ADD_OR_REMOVE_ONE in
    `compute_epsilon_by_pld` always. If this fails after an upgrade, read the release notes before touching anything.
    """
    relations = dp_accounting.NeighboringRelation
    five = dp_accounting.SelfComposedDpEvent(dp_accounting.GaussianDpEvent(4.0), 5)

    def epsilon(accountant: dp_accounting.PrivacyAccountant) -> float:
        return float(accountant.compose(five).get_epsilon(1e-6))

    exact, doubled = compute_epsilon([Gaussian(4.0)] * 5, 1e-6), compute_epsilon([Gaussian(2.0)] * 5, 1e-6)
    assert epsilon(dp_accounting.pld.PLDAccountant(relations.ADD_OR_REMOVE_ONE)) == pytest.approx(exact, rel=2e-3)
    assert epsilon(dp_accounting.pld.PLDAccountant(relations.REPLACE_ONE)) == pytest.approx(doubled, rel=2e-3)
    both = (relations.ADD_OR_REMOVE_ONE, relations.REPLACE_ONE)
    rdp = [epsilon(dp_accounting.rdp.RdpAccountant(neighboring_relation=relation)) for relation in both]
    assert rdp[0] == rdp[1] < 1.2 * exact


# Failing closed


@pytest.mark.parametrize("event", [dp_accounting.LaplaceDpEvent(1.0), "gaussian", None, 3.0])
def test_unknown_events_are_refused_by_name(event: object) -> None:
    for account in (total_mu, lambda e: compute_epsilon(e, 1e-6), lambda e: compute_epsilon_by_pld(e, 1e-6)):
        with pytest.raises(InputError) as caught:
            account([Gaussian(1.0), event])
        assert repr(event) in str(caught.value)


@pytest.mark.parametrize(
    ("epsilon", "delta", "name"),
    [
        (0.0, 1e-6, "epsilon"),
        (-1.0, 1e-6, "epsilon"),
        (math.nan, 1e-6, "epsilon"),
        (math.inf, 1e-6, "epsilon"),
        (1.0, 0.0, "delta"),
        (1.0, 1.0, "delta"),
        (1.0, -1e-6, "delta"),
        (1.0, math.nan, "delta"),
    ],
)
def test_budgets_that_mean_nothing_are_refused(epsilon: float, delta: float, name: str) -> None:
    with pytest.raises(InputError, match=name):
        check_budget(epsilon, delta)
    with pytest.raises(InputError, match=name):
        gaussian_mu(epsilon, delta)
