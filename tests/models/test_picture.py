"""The picture of a fit."""

from __future__ import annotations

from pathlib import Path

from privrep.models.picture import _find_bars, draw_fit
from privrep.privacy.events import Event, Gaussian, Selection
from privrep.privacy.groups import Group
from privrep.privacy.ledger import Budget, Ledger, noise_multiplier
from privrep.privacy.report import PrivacyReport


def report_of(events: dict[str, Event], epsilon: float = 1.0, delta: float = 1e-6) -> PrivacyReport:
    ledger = Ledger(Budget(epsilon, delta))
    ledger.charge(events)
    return ledger.report()


def test_the_picture_is_a_png_of_about_a_thousand_pixels(tmp_path: Path) -> None:
    report = report_of({f"{name}/step": Gaussian(20.0) for name in ("scales", "round-1", "round-2")})
    errors = {"One population": {"alone": 0.9, "privrep": 1e-4}, "Another": {"alone": 2.0, "privrep": 1.5}}
    draw_fit(tmp_path / "both.png", report, errors, note="A note.")
    draw_fit(tmp_path / "budget.png", report)
    widths = []
    for name in ("both.png", "budget.png"):
        data = (tmp_path / name).read_bytes()
        assert data[:8] == b"\x89PNG\r\n\x1a\n"
        widths.append(int.from_bytes(data[16:20], "big"))
    assert widths == [1000, 600]
    assert sorted(path.name for path in tmp_path.iterdir()) == ["both.png", "budget.png"]


def test_the_picture_grows_with_the_number_of_passes(tmp_path: Path) -> None:
    """None of many bars is lost, groups and selections are drawn too."""
    whole = Budget(1.0, 1e-6).mu ** 2
    each = noise_multiplier(whole / 2)
    events: dict[str, Event] = {"keys-1/keys": Selection(noise_multiplier(whole / 20), 1e-8)}
    events |= {f"round-{t + 1}/step": Gaussian(each, Group("rounds", t, 30)) for t in range(30)}
    report = report_of(events)
    assert len(_find_bars(report)) == 31
    draw_fit(tmp_path / "many.png", report)
    data = (tmp_path / "many.png").read_bytes()
    assert int.from_bytes(data[16:20], "big") == 600
    assert int.from_bytes(data[20:24], "big") > 31 * 20


def test_bars_of_a_default_fit_of_numbers_are_its_parts() -> None:
    """A fit of numbers has some forty pages; those of one part make one bar."""
    names = ("scales/sizes", "scales/levels", "common-1/within", "round-1/step", "round-2/step", "calibration/noise")
    bars = _find_bars(report_of({name: Gaussian(20.0) for name in names}))
    assert list(bars) == [
        "where columns lie",
        "common slopes, first step",
        "rounds, and common slopes again",
        "how large errors are",
    ]
    assert bars["where columns lie"] == 2 * bars["how large errors are"]
