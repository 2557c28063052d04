"""Remarks on a budget's promise: budgets that promise little, and budgets that were not spent."""

from __future__ import annotations

import math

from privrep.privacy.events import Relation
from privrep.privacy.report import PrivacyReport

WEAK_EPSILON = 20.0  # above it, little is promised to anyone
LARGEST_EPSILON = 500.0  # above it, e^epsilon is no number that anybody would read
WEAK_DELTA = 1e-4  # above it, where the number of users is not public
OF_MU = " (of mu², in which releases add up: of epsilon it is less)"
EARLY = 0.02  # of the budget that may be left without a word


def find_weaknesses(epsilon: float, delta: float, relation: Relation, users: int, unit: str = "user") -> list[str]:
    """Return a sentence for each part of a budget that promises little.

    Args:
        epsilon: of the whole fit.
        delta: of the whole fit; 0 where it is pure.
        relation: under replace-one-user the number of users is public. Under the other it has no say.
        users: how many there are.
        unit: what is protected as a whole, "user" or "pair".
    """
    found = []
    if epsilon > WEAK_EPSILON:
        factor = f"{math.exp(epsilon):.1g}" if epsilon < LARGEST_EPSILON else "any number of"
        what = "one user's rows" if unit == "user" else f"one {unit}"
        found.append(
            f"epsilon {epsilon:g} is a weak promise: {what} may make an outcome {factor} times as likely. "
            "Usual are 1 to 10."
        )
    if relation == "replace-one-user":
        if delta * users >= 1:
            found.append(f"delta {delta:g} is a weak promise to {users:,} {unit}s: keep it far below 1 in them.")
    elif delta > WEAK_DELTA:
        found.append(f"delta {delta:g} is a weak promise: keep it far below one over the number of users.")
    return found


def describe_rest(report: PrivacyReport) -> str:
    """Return a sentence about what a finished fit left unspent; the empty string where that is next to nothing."""
    if report.unspent <= EARLY:
        return ""
    return (
        f"It stopped early: {report.unspent:.0%} of the budget was not spent{OF_MU if report.delta else ''}, because "
        "what was left to ask would not have stood out from its noise."
    )
