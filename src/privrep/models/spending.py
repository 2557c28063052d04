"""The spending of a fit: what each release of a ledger was for, and its part of the budget."""

from __future__ import annotations

import math
import re
from collections.abc import Callable
from dataclasses import dataclass, replace

from privrep.linear.registry import find_purposes
from privrep.privacy.accounting import compute_delta_left, gaussian_mu, list_pure_epsilons, total_mu
from privrep.privacy.composition import find_largest_mu
from privrep.privacy.events import Batched, Event, Gaussian, Pure, Sampled, Selection
from privrep.privacy.groups import Group
from privrep.privacy.ledger import Ledger
from privrep.privacy.report import PrivacyReport

_SELECTIONS = {"keys/keys": "which values may be named", "classes/keys": "which classes may be named"}


@dataclass(frozen=True)
class Spent:
    """A release in the ledger and its part of the budget."""

    name: str
    purpose: str
    noise_multiplier: float | None  # None of a choice, which adds noise to nothing
    share: float  # of all that the run may spend; of a group's, where only a group was asked
    group: Group | None = None
    delta: float = 0.0  # what a selection sets aside of delta
    epsilon: float = 0.0  # what a choice spends, with no delta
    count: int = 1  # releases that one charge paid for: steps of a walk

    @property
    def remark(self) -> str:
        """Return what the share alone does not tell; the empty string where it tells all."""
        if self.group is not None:
            return f"group {self.group.index + 1} of {self.group.count}"
        if self.count > 1:
            return f"{self.count:,} steps"
        if self.epsilon:
            return f"epsilon {self.epsilon:.4g}, pure"
        return f"{self.delta:.3g} of delta" if self.delta else ""


def count_releases(report: PrivacyReport) -> int:
    """Return how many releases were charged: every step of a walk is one."""
    return sum(1 if isinstance(event, Pure | Selection) else event.count for _, event in report.events)


def find_whole_budget(report: PrivacyReport) -> float:
    """Return all of mu^2 that the run may spend, given what its selections set aside of delta; zero if it is pure."""
    left = compute_delta_left((event for _, event in report.events), report.delta)
    return gaussian_mu(report.epsilon_budget, left) ** 2 if left > 0 else 0.0


def find_share_of_choices(report: PrivacyReport) -> float:
    """Return the share of the budget that choices took.

    Of a pure budget that is their part of epsilon. Else it is the part of all mu^2 that they leave to no other release.
    """
    whole, events = find_whole_budget(report), [event for _, event in report.events]
    pures, left = list_pure_epsilons(events), compute_delta_left(events, report.delta)
    if not whole or not pures:
        return math.fsum(pures) / report.epsilon_budget
    return 1 - find_largest_mu(report.epsilon_budget, left, pures, math.sqrt(whole)) ** 2 / whole


def find_share_spent(report: PrivacyReport) -> float:
    """Return the share of the budget that was spent, at most 1.

    Groups of one split are asked in parallel, so only the costliest counts.
    """
    whole = find_whole_budget(report)
    gaussian = total_mu(event for _, event in report.events) ** 2 / whole if whole else 0.0
    return gaussian + find_share_of_choices(report)


def list_releases(report: PrivacyReport) -> list[Spent]:
    """Return every release with its share of the budget, in the order they were charged. Choices share by their
    epsilons."""
    total, choices = find_whole_budget(report), find_share_of_choices(report)
    pure = math.fsum(list_pure_epsilons(event for _, event in report.events))

    def spent(name: str, event: Event) -> Spent:
        if isinstance(event, Pure):
            return Spent(name, find_purpose(name), None, choices * event.epsilon / pure, epsilon=event.epsilon)
        group = event.group if isinstance(event, Gaussian) else None
        delta, count = (event.delta, 1) if isinstance(event, Selection) else (0.0, event.count)
        share = count * event.noise_multiplier**-2 / total
        return Spent(name, find_purpose(name), event.noise_multiplier, share, group, delta, count=count)

    return [spent(name, event) for name, event in report.events]


def find_share(ledger: Ledger) -> float:
    """Return the share of the budget that no release to all users could spend any more."""
    return max(1 - ledger.remaining / find_whole_budget(ledger.report()), 0.0)


def list_releases_with_samples(report: PrivacyReport, spent: float, purpose: Callable[[str], str]) -> list[Spent]:
    """Return every release and its share. Samples, which no mu measures, share what others have not spent.

    Args:
        report: of the ledger.
        spent: the share of the budget that all releases spent.
        purpose: says what a release is for, by its name.
    """
    events = dict(report.events)
    samples = {name: event for name, event in events.items() if isinstance(event, Sampled | Batched)}
    plain = replace(report, events=tuple((name, event) for name, event in events.items() if name not in samples))
    known = {one.name: replace(one, purpose=purpose(one.name)) for one in list_releases(plain)}
    rest = spent - sum(one.share for one in known.values())
    steps = sum(event.count for event in samples.values())
    for name, event in samples.items():
        share = rest * event.count / steps
        known[name] = Spent(name, purpose(name), event.noise_multiplier, share, count=event.count)
    return [known[name] for name in events]


def find_purpose(name: str) -> str:
    """Return what a release is for, by its name in the ledger (page/statistic); the empty string where nothing is
    known."""
    page, _, statistic = name.partition("/")
    page = re.sub(r"(-\d+)+$", "", page)
    known = {**find_purposes(), **_SELECTIONS}
    return next((known[key] for key in (f"{page}/{statistic}", page, statistic) if key in known), "")
