"""The privacy report of a run: a few lines of what a reviewer asks for, for a screen and for a notebook."""

from __future__ import annotations

import textwrap
from dataclasses import dataclass
from html import escape

from privrep.privacy.accounting import LEAST_EPSILON, compute_delta_left, gaussian_mu
from privrep.privacy.events import Event, Relation

WIDTH, MOST = 78, 2  # characters of a line, and lines of an entry
_LABEL = 12
_SEEDED = "SEEDED: a simulation, not private"


@dataclass(frozen=True)
class PrivacyReport:
    """The spending of a run, in the words a reviewer asks for. Holds nothing but public facts."""

    relation: Relation
    epsilon: float
    delta: float
    epsilon_budget: float
    accountant: str
    events: tuple[tuple[str, Event], ...]
    seeded: bool
    unit: str = "user"  # what is protected as a whole: the word for a user of the run
    population: tuple[str, str] | None = None  # the population ledger that it draws from, and its own name there

    @property
    def unspent(self) -> float:
        """Return the share of the budget that was left: of mu^2, or of epsilon where the budget is pure."""
        left = compute_delta_left((event for _, event in self.events), self.delta)
        if left <= 0:
            return max(1 - self.epsilon / self.epsilon_budget, 0.0)
        if self.epsilon < LEAST_EPSILON:
            return 1.0
        return max(1 - (gaussian_mu(self.epsilon, left) / gaussian_mu(self.epsilon_budget, left)) ** 2, 0.0)

    def __repr__(self) -> str:
        return describe_report(self)

    def _repr_html_(self) -> str:
        return report_to_html(self)

    def __str__(self) -> str:
        seeded = "  SEEDED: a simulation, not private" if self.seeded else ""
        pure = "" if self.delta else " pure,"
        releases = sum(event.count for _, event in self.events)
        return (
            f"({self.epsilon:.4g}, {self.delta:g})-DP,{pure} {self.unit} level, {self.relation}, of a budget of "
            f"{self.epsilon_budget:g}, {releases} releases{seeded}"
        )


def describe_report(report: PrivacyReport) -> str:
    """Return a report in at most 12 lines of at most 80 characters."""
    lines = ["PrivacyReport"]
    for label, words in _entries(report):
        wrapped = textwrap.wrap(words, WIDTH - _LABEL - 2, max_lines=MOST, placeholder=" ...")
        lines += [f"  {label if not number else '':<{_LABEL}}{line}" for number, line in enumerate(wrapped)]
    return "\n".join(lines)


def report_to_html(report: PrivacyReport) -> str:
    """Return a report as a small table in HTML. All words are escaped."""
    rows = "".join(
        f'<tr><th style="text-align:left">{escape(label)}</th><td style="text-align:left">{escape(words)}</td></tr>'
        for label, words in _entries(report)
    )
    return f"<table><caption>PrivacyReport</caption>{rows}</table>"


def _entries(report: PrivacyReport) -> list[tuple[str, str]]:
    """Return what a report says, by label."""
    delta = f"delta {report.delta:g}" if report.delta else "no delta (pure)"
    promise = f"({report.epsilon:.4g}, {report.delta:g})-DP at the level of a {report.unit}"
    count = sum(event.count for _, event in report.events)
    pages = list(dict.fromkeys(name.partition("/")[0] for name, _ in report.events))
    named = f": pages {', '.join(pages)}" if pages else ""
    drawn = [] if report.population is None else [("population", "ledger {}, run {}".format(*report.population))]
    return [
        ("promise", "none, because the noise was seeded" if report.seeded else promise),
        ("spent", f"epsilon {report.epsilon:.4g} of {report.epsilon_budget:g}, {delta}"),
        *drawn,
        ("relation", report.relation),
        ("accountant", report.accountant),
        ("releases", f"{count:,}{named}"),
        ("noise", _SEEDED if report.seeded else "secret, of the operating system's generator"),
    ]
