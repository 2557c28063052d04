"""Runs of one population compose as one ledger that holds all their events, and an open run is counted whole."""

from __future__ import annotations

import math

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy.special import ndtr

from privrep.errors import BudgetExceeded
from privrep.privacy.accounting import (
    compute_epsilon,
    compute_epsilon_by_pld,
    gaussian_delta,
    gaussian_epsilon,
    within_budget,
)
from privrep.privacy.events import Event, Gaussian, Pure, Sampled, Selection
from privrep.privacy.groups import Group
from privrep.privacy.ledger import Budget, Ledger, noise_multiplier
from privrep.privacy.shares import Accounts, Share, Status, bound_events

WHOLE = Budget(4.0, 1e-6)
ONE = Budget(1.0, 1e-6)


def share(run: str, events: list[Event], status: Status = "finished", budget: Budget = ONE) -> Share:
    return Share(run, "a run", "2026-01-01T00:00:00+00:00", budget, 10, tuple(events), status)


def accounts(*shares: Share, budget: Budget = WHOLE) -> Accounts:
    return Accounts("name", budget, "salt", {each.run: each for each in shares})


RUNS: dict[str, list[list[Event]]] = {
    "gaussian": [[Gaussian(5.0), Gaussian(7.0)], [Gaussian(3.0)]],
    "choices": [[Pure(0.3), Gaussian(6.0)], [Pure(0.1), Pure(0.2)]],
    "selections": [[Selection(9.0, 5e-8), Gaussian(6.0)], [Selection(8.0, 1e-8)]],
}


@pytest.mark.parametrize("kind", RUNS)
def test_all_runs_come_to_what_one_ledger_says_and_another_accountant(kind: str) -> None:
    """The known answer: one run's ledger that is charged all events of all runs, and dp-accounting."""
    found = accounts(*(share(str(number), events) for number, events in enumerate(RUNS[kind])))
    together = [event for events in RUNS[kind] for event in events]
    ledger = Ledger(WHOLE)
    ledger.charge({f"page/{number}": event for number, event in enumerate(together)})
    assert found.epsilon == ledger.epsilon
    theirs = compute_epsilon_by_pld(together, WHOLE.delta, 1e-3)
    assert found.epsilon == pytest.approx(theirs, rel=2e-3)
    assert found.epsilon != pytest.approx(compute_epsilon(together[1:], WHOLE.delta), rel=2e-3)  # it sees one lacking


def test_runs_about_samples_come_to_what_one_ledger_says() -> None:
    runs: list[list[Event]] = [[Sampled(1.5, 0.01, "replace-one-user", 50)], [Gaussian(4.0)]]
    found = accounts(*(share(str(number), events) for number, events in enumerate(runs)))
    assert found.epsilon == compute_epsilon([event for events in runs for event in events], WHOLE.delta)


def test_two_fits_at_epsilon_one_are_known_by_the_book() -> None:
    """mu of (1, 1e-6), twice: sqrt(2) mu. Gaussian differential privacy in closed form."""
    found = accounts(share("a", list(bound_events((), ONE))), share("b", list(bound_events((), ONE))))
    assert found.epsilon == pytest.approx(gaussian_epsilon(1e-6, math.sqrt(2) * ONE.mu), rel=1e-9)
    assert gaussian_delta(found.epsilon, math.sqrt(2) * ONE.mu) == pytest.approx(1e-6, rel=1e-6)
    assert accounts(share("a", list(bound_events((), ONE)))).forecast(1.0) == pytest.approx(found.epsilon, rel=1e-9)


def test_a_split_of_one_name_is_another_split_in_another_run() -> None:
    """Otherwise one run's second group would hide the other run's first."""
    runs: list[list[Event]] = [[Gaussian(4.0, Group("halves", 0, 2))], [Gaussian(4.0, Group("halves", 1, 2))]]
    found = accounts(*(share(str(number), events) for number, events in enumerate(runs)))
    assert found.epsilon == pytest.approx(gaussian_epsilon(1e-6, math.sqrt(2) / 4), rel=1e-9)
    other_count = accounts(share("a", runs[0]), share("b", [Gaussian(4.0, Group("halves", 0, 3))]))
    assert other_count.epsilon == pytest.approx(found.epsilon)


def test_what_was_returned_is_not_counted_and_what_was_given_up_is() -> None:
    whole = list(bound_events((), ONE))
    assert accounts(share("a", whole, "returned")).epsilon == 0.0
    for status in ("open", "given up", "finished"):
        assert accounts(share("a", whole, status)).epsilon == pytest.approx(1.0, rel=1e-6)


@pytest.mark.parametrize("kind", RUNS)
def test_what_is_left_fits_and_more_does_not(kind: str) -> None:
    found = accounts(*(share(str(number), events) for number, events in enumerate(RUNS[kind])))
    left = Budget(found.epsilon_left, WHOLE.delta)
    assert 0 < left.epsilon < WHOLE.epsilon
    found.check_fits("more", bound_events((), left))
    with pytest.raises(BudgetExceeded, match=r"of which one more run may take .*Ask for a smaller epsilon"):
        found.check_fits("more", bound_events((), Budget(left.epsilon * 1.001, WHOLE.delta)))
    assert found.forecast(left.epsilon) == pytest.approx(WHOLE.epsilon, rel=1e-6)


def test_a_population_of_choices_adds_their_epsilons_up() -> None:
    pure = Budget(1.0, 0)
    found = accounts(share("a", [Pure(0.25)], budget=Budget(0.25, 0)), budget=pure)
    assert (found.epsilon, found.epsilon_left) == (0.25, 0.75)
    found.check_fits("b", [Pure(0.75)])
    with pytest.raises(BudgetExceeded):
        found.check_fits("b", [Pure(0.7501)])
    with pytest.raises(BudgetExceeded):
        found.check_fits("b", bound_events((), Budget(0.1, 1e-9)))  # noise takes a delta


def test_open_runs_are_named_in_a_refusal() -> None:
    found = accounts(share("a", list(bound_events((), ONE)), "open"))
    with pytest.raises(BudgetExceeded, match="1 open runs hold a part of it"):
        found.check_fits("b", bound_events((), WHOLE))


@settings(max_examples=25)
@given(
    st.floats(0.05, 8.0),
    st.lists(
        st.one_of(
            st.builds(Gaussian, st.floats(0.3, 50.0)),
            st.builds(Pure, st.floats(0.01, 1.0)),
            st.builds(Selection, st.floats(1.0, 50.0), st.floats(1e-9, 2e-7)),
        ),
        max_size=6,
    ),
)
def test_a_bound_is_at_least_what_the_run_goes_on_to_charge(epsilon: float, asked: list[Event]) -> None:
    """After every charge, whatever Gaussian noise the ledger still allows is within what is counted for the run."""
    budget = Budget(epsilon, 1e-6)
    ledger, charged = Ledger(budget), list[Event]()
    for number, event in enumerate(asked):
        if within_budget([*charged, event], budget.epsilon, budget.delta):
            ledger.charge({f"page/{number}": event})
            charged.append(event)
        bound = bound_events(charged, budget)
        rest = [Gaussian(noise_multiplier(left))] if (left := ledger.remaining) > 1e-12 else []
        assert compute_epsilon([*charged, *rest], 1e-6) <= compute_epsilon(bound, 1e-6) * (1 + 1e-9) + 1e-12
        assert compute_epsilon(bound, 1e-6) <= budget.epsilon * (1 + 1e-6)


@given(st.floats(0, 0.2), st.floats(0, 0.2), st.floats(0.01, 3.0), st.floats(0.0, 6.0))
def test_a_selection_costs_twice_its_chance_at_any_epsilon(one: float, other: float, mu: float, epsilon: float) -> None:
    """The module's bound against the exact delta of a release beside a selection, summed over a grid of outcomes.

    One world names its own key with the first chance, its neighbour names another with the second. If none is named,
    both release a Gaussian, mu apart, here in a thousand bins.
    """
    edges = np.concatenate([[-np.inf], np.linspace(-8, 8 + mu, 1_000), [np.inf]])
    here, there = (np.diff(ndtr(edges - centre)) for centre in (mu, 0.0))
    exact = one + np.maximum((1 - one) * here - math.exp(epsilon) * (1 - other) * there, 0.0).sum()
    alone = np.maximum(here - math.exp(epsilon) * there, 0.0).sum()
    assert exact <= alone + 2 * max(one, other) + 1e-12
    assert exact >= one
