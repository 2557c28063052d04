"""Remark on what a budget promises: budgets that promise little, and budgets that were not spent."""

from __future__ import annotations

import math

from privrep.privacy.events import Relation
from privrep.privacy.ledger import PrivacyReport

WEAK_EPSILON = 20.0  # above it, little is promised to anyone
WEAK_DELTA = 1e-4  # above it, where the number of users is not public
EARLY = 0.02  # of the budget that may be left without a word


def find_weaknesses(
    epsilon: float, delta: float, relation: Relation, users: int, whose: str = "one user's"
) -> list[str]:
    """Return a sentence for each part of a budget that promises little.

    Args:
        epsilon: of the whole fit.
        delta: of the whole fit; 0 where it is pure.
        relation: under replace-one-user the number of users is public. Under the other it has no say.
        users: how many there are.
        whose: rows are protected together.
    """
    found = []
    if epsilon > WEAK_EPSILON:
        factor = f"{math.exp(epsilon):.1g}" if epsilon < 500 else "any number of"
        found.append(
            f"epsilon {epsilon:g} is a weak promise: {whose} rows may make an outcome {factor} times as likely. "
            "Usual are 1 to 10."
        )
    if relation == "replace-one-user":
        if delta * users >= 1:
            found.append(f"delta {delta:g} is a weak promise to {users:,} users: keep it far below 1 in them.")
    elif delta > WEAK_DELTA:
        found.append(f"delta {delta:g} is a weak promise: keep it far below one over the number of users.")
    return found


def describe_rest(report: PrivacyReport) -> str:
    """Return a sentence about what a finished fit left unspent; the empty string where that is next to nothing."""
    if report.unspent <= EARLY:
        return ""
    return (
        f"It stopped early: {report.unspent:.0%} of the budget was not spent, because what was left to ask would not "
        "have stood out from its noise."
    )
