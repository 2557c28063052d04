"""The sum of fits of the same users: a population ledger that they draw from, or a warning where there is none.

Formal guarantee of the warning's number. Fits of this process that share a user with the last one, under its relation,
compose to at most this epsilon for every user, at the largest delta of theirs. Sketches of ids tell who is in both: a
few users in common, out of thousands, may be missed. Fits that failed, and other processes, are not in it.
"""

from __future__ import annotations

import math
import threading
import warnings
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from numpy.typing import ArrayLike

from privrep.errors import FittedAgain
from privrep.privacy.accounting import compute_epsilon
from privrep.privacy.events import Event
from privrep.privacy.ledger import Budget
from privrep.privacy.naming import draw_name
from privrep.privacy.people import Sketch
from privrep.privacy.population import Account, PopulationLedger
from privrep.privacy.report import PrivacyReport
from privrep.privacy.shares import rename_splits

_SALT = draw_name()  # sketches of one process are compared with each other alone
_FITS: list[_Fit] = []
_LOCK = threading.Lock()


@dataclass(frozen=True)
class _Fit:
    """A fit of this process: a sketch of its users, its budget, what it charged, and its population ledger if any."""

    people: Sketch
    budget: Budget
    events: tuple[Event, ...]
    population: str | None = None


def open_account(estimator: Any, ids: Callable[[], ArrayLike]) -> Account | None:
    """Return the account of a fit with its estimator's population ledger; None where it has none.

    Args:
        estimator: which may have the path of a population ledger, or the ledger.
        ids: returns the ids of the fit's users, (users,).
    """
    given = estimator.population
    if given is None:
        return None
    ledger = given if isinstance(given, PopulationLedger) else PopulationLedger(given)
    folder = "" if estimator.run_folder is None else f", run folder {estimator.run_folder}"
    return Account(ledger, f"{type(estimator).__name__}{folder}", ids)


def check_account(estimator: Any, budget: Budget | None = None) -> None:
    """Raise what a new fit's reservation would raise, before a row is looked at. Nothing is reserved.

    Args:
        estimator: which may have a population ledger.
        budget: of the fit; None: as the estimator's parameters say.
    """
    account = open_account(estimator, lambda: ())
    if account is not None:
        if budget is None:
            relation = estimator.get_params().get("relation", "replace-one-user")
            budget = Budget(estimator.epsilon, estimator.delta, relation)
        ledger = None if estimator.run_folder is None else Path(estimator.run_folder) / "ledger.jsonl"
        account.check(budget, ledger, seeded=estimator.random_state is not None)


def warn_if_again(estimator: Any, ids: Callable[[], ArrayLike], report: PrivacyReport, stacklevel: int = 3) -> None:
    """Warn with the running total where this process fitted some of these users before, and no one ledger knows of all.

    Fits that draw from one population ledger, all of them, are within its budget: that ledger has the total.

    Args:
        estimator: that was fitted.
        ids: returns the ids of the fit's users, (users,).
        report: of the fit.
        stacklevel: how many calls above this one the warning points to.
    """
    if report.seeded:
        return
    budget = Budget(report.epsilon_budget, report.delta, report.relation)
    events = tuple(event for _, event in report.events)
    named = None if report.population is None else report.population[0]
    fit = _Fit(Sketch.of_ids(ids(), _SALT), budget, events, named)
    with _LOCK:
        met = [each for each in _FITS if each.budget.relation == budget.relation and _share_users(each, fit)]
        _FITS.append(fit)
    if any(each.population is None or each.population != fit.population for each in met):
        total, delta = compute_total([*met, fit])
        warnings.warn(
            f"this process has made {len(met) + 1} fits of users with these ids: together they spent up to epsilon "
            f"{_round_up(total):.4g} at delta {delta:g}, not {report.epsilon:.4g}. If all of them draw from one "
            "population ledger (population=), no fit goes over a budget for all.",
            FittedAgain,
            stacklevel=stacklevel,
        )


def forget_fits() -> None:
    """Forget the fits of this process: what follows is about other people."""
    with _LOCK:
        _FITS.clear()


def compute_total(fits: list[_Fit]) -> tuple[float, float]:
    """Return the epsilon of several fits together, rounded up, and the delta that it is at."""
    delta = max(fit.budget.delta for fit in fits)
    events = [event for number, fit in enumerate(fits) for event in rename_splits(str(number), fit.events)]
    return compute_epsilon(events, delta), delta


def _round_up(number: float) -> float:
    """Return a number of four digits that is no smaller."""
    if not 0 < number < math.inf:
        return number
    step = 10.0 ** (math.floor(math.log10(number)) - 3)
    return math.ceil(number / step) * step


def _share_users(one: _Fit, other: _Fit) -> bool:
    """Return whether two fits have users in common, as far as sketches tell."""
    return one.people.estimate_part_in(other.people) > 0
