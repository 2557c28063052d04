"""One picture of a fit: the errors of the methods, and how the budget was spent."""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from privrep.models.spending import releases
from privrep.privacy.ledger import PrivacyReport

_PRIVATE, _GROUP, _OTHER, _INK, _FAINT = "#0b6e99", "#85b7cc", "#9aa5ad", "#222222", "#dddddd"
_ROW = 0.27  # inches of a bar and the room around it


def draw_fit(path: Path, report: PrivacyReport, errors: Mapping[str, float] | None = None, *, note: str = "") -> None:
    """Write a PNG, about 1000 pixels wide. Left, if there are errors, one dot a method (the first is ours) on a log
    axis; right, the share of the budget (of mu^2) that each pass over the users took."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    bars = _bars(report)
    figure = Figure(figsize=(10.0 if errors else 6.0, max(4.4, 1.1 + _ROW * len(bars))), dpi=100)
    figure.set_layout_engine("constrained", w_pad=0.12, h_pad=0.08)
    FigureCanvasAgg(figure)
    axes = figure.subplots(1, 2 if errors else 1, squeeze=False, width_ratios=[1.15, 1] if errors else None)[0]
    if errors:
        _draw_errors(axes[0], errors)
    _draw_budget(axes[-1], report, bars)
    if report.seeded:
        note = "SEEDED NOISE: a simulation, not private. " + note
    if note:
        figure.supxlabel(note, fontsize=9, color="#b00020" if report.seeded else "#555555", x=0.01, ha="left")
    temporary = path.with_name(f".{path.name}.tmp")
    figure.savefig(temporary, format="png")
    os.replace(temporary, path)


def _draw_errors(axis: Any, errors: Mapping[str, float]) -> None:
    names, values = list(errors), list(errors.values())
    smallest, largest = min(values), max(values)
    for row, value in enumerate(values):
        colour = _PRIVATE if row == 0 else _OTHER
        axis.plot([smallest / 3, value], [row, row], color=_FAINT, linewidth=1, zorder=1)
        axis.plot(value, row, "o", markersize=9, color=colour, zorder=2)
        axis.annotate(
            f"{value:#.2g}",
            (value, row),
            xytext=(9, 0),
            textcoords="offset points",
            va="center",
            color=_INK,
            weight="bold" if row == 0 else "normal",
        )
    axis.set_xscale("log")
    axis.set_xlim(smallest / 3, largest * (3 * largest / smallest) ** 0.2)
    axis.set_yticks(range(len(names)), names)
    axis.get_yticklabels()[0].set_weight("bold")
    axis.invert_yaxis()
    axis.margins(y=0.12)
    axis.set_xlabel("mean squared error on fresh rows (log scale, left is better)", loc="left")
    axis.set_title("Error", loc="left", weight="bold")
    _plain(axis)


def _bars(report: PrivacyReport) -> dict[str, float]:
    """The share of each page, in the order they were charged."""
    shares: dict[str, float] = {}
    for spent in releases(report):
        page, _, statistic = spent.name.partition("/")
        numbered = page[-1].isdigit() and statistic != "keys"
        said = page.replace("-", " ") if numbered else spent.purpose or page
        label = f"{said} ({spent.remark})" if spent.group else said
        shares[label] = shares.get(label, 0.0) + spent.share
    return shares


def _draw_budget(axis: Any, report: PrivacyReport, shares: Mapping[str, float]) -> None:
    """Shares of different groups of a split stand side by side and do not add up, which the picture says."""
    colours = [_GROUP if "(group " in label else _PRIVATE for label in shares]
    axis.barh(range(len(shares)), list(shares.values()), color=colours, height=0.62)
    for row, share in enumerate(shares.values()):
        axis.annotate(
            f"{share:.0%}" if share >= 0.1 else f"{share:.1%}",
            (share, row),
            xytext=(4, 0),
            textcoords="offset points",
            va="center",
            fontsize=9,
            color=_INK,
        )
    axis.set_yticks(range(len(shares)), list(shares))
    axis.invert_yaxis()
    axis.set_xticks([])
    axis.margins(x=0.12)
    parallel = any(spent.group for spent in releases(report))
    each = "\nPale: one group each; a user pays for one." if parallel else ""
    spent_of = f"epsilon {report.epsilon:.3g} of {report.epsilon_budget:g} spent, delta {report.delta:g}"
    axis.set_xlabel(f"share of the budget (of mu²){each}\n{spent_of}", loc="left", fontsize=9 if parallel else None)
    axis.set_title("Privacy", loc="left", weight="bold")
    _plain(axis, bottom=False)


def _plain(axis: Any, bottom: bool = True) -> None:
    for side in ("top", "right", "left", *(() if bottom else ("bottom",))):
        axis.spines[side].set_visible(False)
    axis.tick_params(axis="y", length=0)
    axis.minorticks_off()
