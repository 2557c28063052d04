"""Choices in the ledger: beside Gaussian releases, or alone, with no delta at all."""

from __future__ import annotations

import math
from collections.abc import Callable
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from privrep.errors import BudgetExceeded, InputError, ResumeError
from privrep.models import spending
from privrep.models.sections import describe_meaning
from privrep.privacy.accounting import compute_epsilon_by_pld, list_pure_epsilons, total_mu
from privrep.privacy.composition import log_composed_delta
from privrep.privacy.events import Event, Gaussian, Pure, Selection
from privrep.privacy.groups import Group
from privrep.privacy.ledger import Budget, Ledger, noise_multiplier, read_ledger, read_report

MIXED = Budget(2.0, 1e-6)
PURE = Budget(1.0, 0.0)
Open = Callable[..., Ledger]  # the fixture open_ledger


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "ledger.jsonl"


# Pure budgets


def test_a_pure_budget_takes_choices_up_to_its_epsilon(path: Path, open_ledger: Open) -> None:
    ledger = open_ledger(PURE, path)
    assert (PURE.mu, ledger.capacity, ledger.remaining, ledger.epsilon, ledger.pure_left) == (0, 0, 0, 0, 1)
    ledger.charge({"a/choice": Pure(0.25)})
    assert (ledger.epsilon, ledger.pure_left) == (0.25, 0.75)
    before = path.read_bytes()
    with pytest.raises(BudgetExceeded, match=r"epsilon to 1\.00001, over the budget of 1 at delta 0"):
        ledger.charge({"b/choice": Pure(0.75001)})
    assert path.read_bytes() == before
    ledger.charge({"b/choice": Pure(0.75)})
    assert (ledger.epsilon, ledger.pure_left, ledger.capacity) == (1.0, 0.0, 0.0)
    assert str(ledger.report()).startswith(
        "(1, 0)-DP, pure, user level, replace-one-user, of a budget of 1, 2 releases"
    )
    assert read_report(path) == ledger.report()


@pytest.mark.parametrize("parts", [3, 7, 10, 49])
def test_equal_parts_of_a_pure_budget_fit_and_one_more_does_not(parts: int) -> None:
    ledger = Ledger(PURE)
    for i in range(parts):
        ledger.charge({f"choice-{i}/choice": Pure(1 / parts)})
    assert ledger.epsilon == pytest.approx(1.0, rel=1e-15)
    with pytest.raises(BudgetExceeded):
        ledger.charge({"more/choice": Pure(1e-9)})


@given(st.lists(st.floats(1e-3, 1.0), min_size=1, max_size=8))
def test_whatever_is_left_of_a_pure_budget_fits(asked: list[float]) -> None:
    ledger = Ledger(PURE)
    for i, epsilon in enumerate(asked):
        fits = math.fsum([*list_pure_epsilons(e for _, e in ledger.report().events), epsilon]) <= 1
        if fits:
            ledger.charge({f"choice-{i}/choice": Pure(epsilon)})
    if ledger.pure_left > 0:
        ledger.charge({"last/choice": Pure(ledger.pure_left)})
    assert ledger.epsilon == pytest.approx(1.0, abs=1e-12)
    assert ledger.epsilon <= 1 + 1e-12


@pytest.mark.parametrize("event", [Gaussian(1e6), Gaussian(1e6, Group("a", 0, 2)), Selection(1e6, 1e-9)])
def test_a_pure_budget_refuses_gaussian_noise_in_words(event: Event, path: Path, open_ledger: Open) -> None:
    ledger = open_ledger(PURE, path)
    ledger.charge({"a/choice": Pure(0.25)})
    before = path.read_bytes()
    with pytest.raises(BudgetExceeded, match="step/x takes Gaussian noise, and that takes a delta"):
        ledger.charge({"step/x": event})
    assert path.read_bytes() == before


def test_a_pure_budget_is_of_delta_zero_and_nothing_near_it() -> None:
    for delta in (-1e-9, math.nan, 1.0, 0.02):
        with pytest.raises(InputError, match="delta"):
            Budget(1.0, delta)
    for epsilon in (0.0, -1.0, math.inf, math.nan):
        with pytest.raises(InputError, match="epsilon"):
            Budget(epsilon, 0.0)


def test_a_pure_run_and_another_do_not_share_a_ledger(path: Path, open_ledger: Open) -> None:
    open_ledger(PURE, path).close()
    with pytest.raises(InputError, match="another budget"):
        Ledger(Budget(1.0, 1e-6), path=path)
    assert read_ledger(path).budget == PURE


# Choices beside Gaussian releases


def test_a_choice_makes_the_capacity_smaller_and_the_rest_fits_exactly(path: Path, open_ledger: Open) -> None:
    ledger = open_ledger(MIXED, path)
    ledger.charge({"a/choice": Pure(0.5)})
    whole = ledger.capacity
    assert 0.4 * MIXED.mu**2 < whole < 0.8 * MIXED.mu**2
    assert ledger.remaining == whole
    with pytest.raises(BudgetExceeded, match="b/x would bring epsilon to 2"):
        ledger.charge({"b/x": Gaussian(noise_multiplier(whole * (1 + 1e-5)))})
    ledger.charge({"b/x": Gaussian(noise_multiplier(whole / 3))})
    assert ledger.capacity == whole  # what an algorithm splits stays what it was
    assert ledger.remaining == pytest.approx(2 / 3 * whole, rel=1e-12)
    ledger.charge({"c/x": Gaussian(noise_multiplier(ledger.remaining))})
    assert ledger.epsilon == pytest.approx(2.0, rel=1e-7)
    assert ledger.epsilon <= 2.0
    assert compute_epsilon_by_pld([e for _, e in ledger.report().events], 1e-6) == pytest.approx(2.0, rel=2e-3)
    assert ledger.remaining == pytest.approx(0.0, abs=1e-12)
    assert ledger.pure_left < 1e-4  # a choice costs little at first: its square
    ledger.close()
    assert open_ledger(MIXED, path).capacity == whole


def test_a_selection_and_a_choice_both_leave_less() -> None:
    ledger, alone = Ledger(MIXED), Ledger(MIXED)
    alone.charge({"keys/keys": Selection(20.0, 4e-7)})
    ledger.charge({"keys/keys": Selection(20.0, 4e-7)})
    ledger.charge({"a/choice": Pure(0.3)})
    assert 0 < ledger.capacity < alone.capacity
    ledger.charge({"b/x": Gaussian(noise_multiplier(ledger.capacity))})
    assert ledger.epsilon <= 2.0
    assert ledger.epsilon == pytest.approx(2.0, rel=1e-6)


def test_the_largest_choice_that_fits_fits() -> None:
    ledger = Ledger(MIXED)
    ledger.charge({"a/x": Gaussian(noise_multiplier(MIXED.mu**2 / 4))})
    most = ledger.pure_left
    assert 0.7 < most < 1.5
    with pytest.raises(BudgetExceeded):
        ledger.charge({"b/choice": Pure(most * (1 + 1e-5))})
    ledger.charge({"b/choice": Pure(most)})
    assert ledger.epsilon == pytest.approx(2.0, rel=1e-6)
    assert ledger.epsilon <= 2.0


def test_a_choice_that_comes_too_late_is_refused() -> None:
    ledger = Ledger(MIXED)
    ledger.charge({"a/x": Gaussian(noise_multiplier(MIXED.mu**2))})
    with pytest.raises(BudgetExceeded):
        ledger.charge({"b/choice": Pure(1e-3)})
    assert ledger.pure_left < 1e-4  # a choice costs little at first: its square


EVENTS = st.one_of(
    st.builds(Pure, st.floats(0.01, 1.5)),
    st.builds(lambda share: Gaussian(noise_multiplier(share * MIXED.mu**2)), st.floats(0.01, 1.0)),
    st.builds(
        lambda share, t: Gaussian(noise_multiplier(share * MIXED.mu**2), Group("a", t, 3)),
        st.floats(0.01, 1.0),
        st.integers(0, 2),
    ),
    st.builds(lambda delta: Selection(20.0, delta), st.floats(1e-9, 6e-7)),
)


@settings(max_examples=30)
@given(st.lists(EVENTS, min_size=1, max_size=8))
def test_whatever_is_asked_in_whatever_order_the_guarantee_stands(asked: list[Event]) -> None:
    ledger = Ledger(MIXED)
    for i, event in enumerate(asked):
        before = ledger.report()
        try:
            ledger.charge({f"release-{i}/x": event})
        except BudgetExceeded:
            assert ledger.report() == before
    events = [event for _, event in ledger.report().events]
    aside = sum(event.delta for event in events if isinstance(event, Selection))
    assert ledger.epsilon <= MIXED.epsilon * (1 + 1e-11)
    left = MIXED.delta - aside
    delta = math.exp(log_composed_delta(MIXED.epsilon, total_mu(events), list_pure_epsilons(events)))
    assert delta <= left * (1 + 1e-6) or not events


# In words


def test_shares_of_a_pure_budget_are_of_epsilon() -> None:
    ledger = Ledger(Budget(2.0, 0.0))
    ledger.charge({"margin-1/choice": Pure(0.5), "margin-2/choice": Pure(1.0)})
    report = ledger.report()
    first, second = spending.list_releases(report)
    assert (first.share, second.share) == pytest.approx((0.25, 0.5))
    assert (first.purpose, first.remark) == ("one of many candidates", "epsilon 0.5, pure")
    assert first.noise_multiplier is None
    assert spending.find_share_spent(report) == pytest.approx(0.75)
    assert describe_meaning(report).endswith("4.48 times as likely.")
    assert "added up" in report.accountant


def test_shares_of_a_mixed_budget_end_at_the_whole() -> None:
    """A choice takes of mu^2 what it leaves to no other; two choices share that by their epsilons."""
    ledger = Ledger(MIXED)
    ledger.charge({"a/choice": Pure(0.2), "b/choice": Pure(0.1), "keys/keys": Selection(20.0, 4e-7)})
    ledger.charge({"c/x": Gaussian(noise_multiplier(ledger.remaining))})
    report = ledger.report()
    spent = spending.list_releases(report)
    assert spent[0].share == pytest.approx(2 * spent[1].share)
    assert 0.05 < spent[1].share < 0.2
    assert sum(one.share for one in spent) == pytest.approx(1.0, rel=1e-6)
    assert spending.find_share_spent(report) == pytest.approx(1.0, rel=1e-6)
    assert describe_meaning(report).endswith("but for a chance of about 1e-06.")


def test_a_pure_run_that_released_nothing_says_so() -> None:
    report = Ledger(PURE).report()
    assert str(report) == "(0, 0)-DP, pure, user level, replace-one-user, of a budget of 1, 0 releases"
    assert (spending.list_releases(report), spending.find_share_spent(report)) == ([], 0.0)


# One charge, one draw


def test_a_choice_that_was_charged_is_not_charged_again_nor_drawn_twice(path: Path, open_ledger: Open) -> None:
    ledger = open_ledger(PURE, path)
    ledger.charge({"a/choice": Pure(0.6)})
    with pytest.raises(ResumeError, match="A charge pays for one draw"):
        ledger.charge({"a/choice": Pure(0.6)})
    ledger.close()
    again = open_ledger(PURE, path)
    with pytest.raises(InputError, match="another price"):
        again.charge({"a/choice": Pure(0.3)})
    again.charge({"a/choice": Pure(0.6)})  # the process died before the page was posted
    assert again.epsilon == 0.6


@pytest.mark.parametrize("line", ['"kind": "pure"', '"kind": "pure", "epsilon": 0', '"kind": "pure", "epsilon": null'])
def test_a_damaged_choice_is_refused(line: str, path: Path) -> None:
    Ledger(PURE, path=path).close()
    with open(path, "a") as file:
        file.write(f'{{"charge": "a/choice", {line}}}\n')
    with pytest.raises(InputError, match="damaged in line 2"):
        read_ledger(path)
