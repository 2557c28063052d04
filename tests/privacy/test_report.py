"""A privacy report on a screen: few lines that fit, and HTML in which nothing is markup but the table."""

from __future__ import annotations

from dataclasses import replace
from html.parser import HTMLParser

import pytest

from privrep.privacy.events import Event, Gaussian, Pure
from privrep.privacy.ledger import Budget, Ledger
from privrep.privacy.report import PrivacyReport


def report_of(events: dict[str, Event], *, delta: float = 1e-6, seeded: bool = False) -> PrivacyReport:
    ledger = Ledger(Budget(1.0, delta), seeded=seeded)
    ledger.charge(events)
    return ledger.report()


MANY = report_of({f"round-{number}/step": Gaussian(60.0) for number in range(40)})
PURE = report_of({"choice/choice": Pure(0.5)}, delta=0.0)
NAMED = replace(
    MANY, accountant="a" * 500 + " b" * 500, events=(("<b>" * 200 + "/step", Gaussian(60.0)),), unit="<i>&pair"
)


@pytest.mark.parametrize("report", [MANY, PURE, NAMED, report_of({}), replace(MANY, epsilon_budget=1e300)])
def test_it_fits_on_a_screen(report: PrivacyReport) -> None:
    lines = repr(report).split("\n")
    assert len(lines) <= 12
    assert max(map(len, lines)) <= 80


def test_it_says_what_a_reviewer_asks_for() -> None:
    text = repr(MANY)
    for said in (f"({MANY.epsilon:.4g}, 1e-06)-DP at the level of a user", "of 1, delta 1e-06", "replace-one-user"):
        assert said in text
    assert "releases    40: pages round-0, round-1" in text
    assert " ..." in text
    assert "secret" in text
    assert "no delta (pure)" in repr(PURE)


def test_a_seeded_run_promises_nothing() -> None:
    seeded = report_of({"a/b": Gaussian(60.0)}, seeded=True)
    for text in (repr(seeded), seeded._repr_html_()):
        assert "SEEDED: a simulation, not private" in text
        assert "none, because the noise was seeded" in text
        assert "-DP" not in text


def test_html_is_escaped_and_closed() -> None:
    seen: list[str] = []
    open_tags: list[str] = []

    class Reader(HTMLParser):
        def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
            seen.append(tag)
            open_tags.append(tag)

        def handle_endtag(self, tag: str) -> None:
            assert open_tags.pop() == tag

    Reader().feed(NAMED._repr_html_())
    assert set(seen) == {"table", "caption", "tr", "th", "td"}
    assert not open_tags
    assert "&lt;b&gt;" in NAMED._repr_html_()
