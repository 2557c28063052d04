"""A privacy report for a screen and for a notebook: a few lines of what a reviewer asks for."""

from __future__ import annotations

import textwrap
from html import escape
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from privrep.privacy.ledger import PrivacyReport

WIDTH, MOST = 78, 2  # characters of a line, and lines of an entry
_LABEL = 12
_SEEDED = "SEEDED: a simulation, not private"


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
    return [
        ("promise", "none, because the noise was seeded" if report.seeded else promise),
        ("spent", f"epsilon {report.epsilon:.4g} of {report.epsilon_budget:g}, {delta}"),
        ("relation", report.relation),
        ("accountant", report.accountant),
        ("releases", f"{count:,}{named}"),
        ("noise", _SEEDED if report.seeded else "secret, of the operating system's generator"),
    ]
