"""One picture of a fit: the errors of the methods, and how the budget was spent."""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from privrep.models.planning import find_part
from privrep.models.spending import list_releases
from privrep.privacy.report import PrivacyReport

PRIVREP, GROUP, OTHER, INK, FAINT = "#0b6e99", "#85b7cc", "#9aa5ad", "#222222", "#dddddd"
_ROW = 0.27  # inches of a bar and the room around it
_DOT = 0.34  # of a dot


def draw_fit(
    path: Path,
    report: PrivacyReport,
    errors: Mapping[str, Mapping[str, float]] | None = None,
    *,
    ours: str = "privrep",
    note: str = "",
) -> None:
    """Write a PNG, about 1000 pixels wide.

    Args:
        path: of the file.
        report: of the fit whose budget is drawn, right: the share of mu^2 that each pass over the users took. With
            several populations it is the first one's fit.
        errors: by population the mean squared error of each method, left, a dot each on a log axis; None: no errors.
        ours: the method to set off.
        note: a line below.
    """
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    bars, populations = _find_bars(report), dict(errors or {})
    height = max(4.4, 1.1 + _ROW * len(bars), 1.2 + sum(0.9 + _DOT * len(each) for each in populations.values()))
    figure = Figure(figsize=(10.0 if populations else 6.0, height), dpi=100)
    figure.set_layout_engine("constrained", w_pad=0.12, h_pad=0.08)
    FigureCanvasAgg(figure)
    counts = [len(each) for each in populations.values()] or [1]
    columns = [1.0, 1.0] if populations else [1.0]
    grid = figure.add_gridspec(len(counts), len(columns), height_ratios=counts, width_ratios=columns)
    for row, (title, methods) in enumerate(populations.items()):
        _draw_errors(figure.add_subplot(grid[row, 0]), title, methods, ours, row + 1 == len(populations))
    title = "Budget of the first" if len(populations) > 1 else "Budget"
    _draw_budget(figure.add_subplot(grid[:, -1]), title, report, bars)
    if report.seeded:
        note = "SEEDED NOISE: a simulation, not private. " + note
    if note:
        figure.supxlabel(note, fontsize=9, color="#b00020" if report.seeded else "#555555", x=0.01, ha="left")
    temporary = path.with_name(f".{path.name}.tmp")
    figure.savefig(temporary, format="png")
    os.replace(temporary, path)


def _draw_errors(axis: Any, title: str, errors: Mapping[str, float], ours: str, last: bool) -> None:
    """Draw a dot for each method's mean squared error on a log axis.

    Args:
        axis: to draw on.
        title: the population.
        errors: mean squared error by method.
        ours: the method to set off.
        last: whether it is the lowest panel, which has the label of the axis.
    """
    from matplotlib.ticker import LogLocator

    names, values = list(errors), list(errors.values())
    smallest, largest = min(values), max(values)
    left = smallest / max(1.3, (largest / smallest) ** 0.12)
    for row, (name, value) in enumerate(errors.items()):
        axis.plot([left, value], [row, row], color=FAINT, linewidth=1, zorder=1)
        axis.plot(value, row, "o", markersize=9, color=PRIVREP if name == ours else OTHER, zorder=2)
        axis.annotate(
            f"{value:#.3g}",
            (value, row),
            xytext=(9, 0),
            textcoords="offset points",
            va="center",
            color=INK,
            weight="bold" if name == ours else "normal",
        )
    axis.set_xscale("log")
    axis.xaxis.set_major_locator(LogLocator(numticks=4))  # labels of more powers of ten would touch
    axis.xaxis.set_major_formatter("{x:g}")
    axis.set_xlim(left, largest * (3 * largest / smallest) ** 0.2)
    axis.set_yticks(range(len(names)), names)
    for label in axis.get_yticklabels():
        label.set_weight("bold" if label.get_text() == ours else "normal")
    axis.invert_yaxis()
    axis.margins(y=0.12)
    if last:
        axis.set_xlabel("mean squared error on fresh rows\n(log scale, left is better)", loc="left")
    axis.set_title(title, loc="left", weight="bold", fontsize=10)
    _strip_axes(axis)
    if largest < 100 * smallest:  # hardly a power of ten: the numbers at the dots say it
        axis.set_xticks([])


def _find_bars(report: PrivacyReport) -> dict[str, float]:
    """Return the share of each page, or of each part of a default fit of numbers, in the order they were charged."""
    shares: dict[str, float] = {}
    planned = any(name.startswith("calibration/") for name, _ in report.events)
    for spent in list_releases(report):
        page, _, statistic = spent.name.partition("/")
        numbered = page[-1].isdigit() and statistic != "keys"
        said = page.replace("-", " ") if numbered else spent.purpose or page
        said = (planned and find_part(page)) or said
        label = f"{said} ({spent.remark})" if spent.group else said
        shares[label] = shares.get(label, 0.0) + spent.share
    return shares


def _draw_budget(axis: Any, title: str, report: PrivacyReport, shares: Mapping[str, float]) -> None:
    """Draw a bar for each share of the budget.

    Shares of different groups of a split stand side by side and do not add up, which the picture says.

    Args:
        axis: to draw on.
        title: of the panel.
        report: of the fit.
        shares: of mu^2, by label.
    """
    colours = [GROUP if "(group " in label else PRIVREP for label in shares]
    axis.barh(range(len(shares)), list(shares.values()), color=colours, height=min(0.62, 0.07 * len(shares)))
    for row, share in enumerate(shares.values()):
        axis.annotate(
            f"{share:.0%}" if share >= 0.1 else f"{share:.1%}",
            (share, row),
            xytext=(4, 0),
            textcoords="offset points",
            va="center",
            fontsize=9,
            color=INK,
        )
    axis.set_yticks(range(len(shares)), list(shares))
    axis.invert_yaxis()
    axis.set_xticks([])
    axis.margins(x=0.2)
    parallel = any(spent.group for spent in list_releases(report))
    each = "\nPale: one group each; a user pays for one." if parallel else ""
    spent_of = f"epsilon {report.epsilon:.3g} of {report.epsilon_budget:g} spent,\ndelta {report.delta:g}"
    axis.set_xlabel(f"share of the budget{each}\n{spent_of}", loc="left", fontsize=9 if parallel else None)
    axis.set_title(title, loc="left", weight="bold", fontsize=10)
    _strip_axes(axis, bottom=False)


def _strip_axes(axis: Any, bottom: bool = True) -> None:
    """Remove the frame and the marks of an axis, with `bottom` all but the lowest line."""
    for side in ("top", "right", "left", *(() if bottom else ("bottom",))):
        axis.spines[side].set_visible(False)
    axis.tick_params(axis="y", length=0)
    axis.minorticks_off()
