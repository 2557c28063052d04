"""The pictures of `experiments.tables`: errors against epsilon, next to what one does without privacy."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from experiments import label_references, label_runs, label_targets, rating_references, rating_runs, rating_targets
from experiments.label_data import LABELS
from experiments.label_targets import ECE, LOG_LOSS, LabelResults
from experiments.rating_data import SOURCES
from experiments.rating_targets import RMSE, RatingResults
from experiments.table_references import REFERENCES
from experiments.tables_data import PANELS
from experiments.tables_results import NAMES, FigureLike, Goal, Runs
from experiments.tables_runs import ANALYST, DEFAULT, EPSILONS, KINDS, PRIVREP
from experiments.tables_targets import OVER_MIXED, OVER_POOLED, Figure, Results
from privrep.typing import Array

LINES_OF_TEXT = 17  # that fit beside a plot
TARGET = {"color": "#c0392b", "lw": 5, "alpha": 0.25, "solid_capstyle": "butt"}
RATIOS, TICKS = (0.95, 1.5), (0.95, 1.0, 1.05, 1.1, 1.2, 1.3, 1.4, 1.5)
HIGHEST = {LOG_LOSS: 2.0, ECE: 40.0, RMSE: 1.5}  # of an axis that follows its numbers, over the least of them
ROWS = (Figure(OVER_MIXED, "test"), Figure(OVER_MIXED, "newcomers"), Figure(OVER_POOLED, "strangers"))
GREYS = ("#7f8c8d", "#16a085", "#666666", "#000000", "#9a7d0a", "#27ae60")
WORDS = {
    "mixed model, intercepts": "mixed, intercepts",
    "mixed model, slopes": "mixed, slopes",
    rating_references.BOTH_MEANS: "item, user means",
}
OURS = {"color": "#c0392b", "lw": 2.2, "marker": "o", "ms": 5.5, "zorder": 6}
THEIRS = {"color": "#1f5fa8", "lw": 1.6, "marker": "v", "ms": 5, "zorder": 4}


@dataclass(frozen=True)
class Curve:
    """How a private method is drawn."""

    name: str
    factor: float  # of epsilon, which keeps marks apart
    style: dict[str, Any]


@dataclass(frozen=True)
class Sheet:
    """What stands in a picture: a column for each panel, a row for each figure."""

    title: str
    panels: Sequence[str]
    rows: Sequence[FigureLike]
    unit: str  # of ratios in the rows; empty where the measure says it
    references: Sequence[str]  # not private, drawn as horizontal lines
    private: Mapping[str, Curve]
    limits: tuple[float, float] | None = None  # of vertical axes; None: each follows its numbers
    ticks: Sequence[float] = field(default_factory=tuple)


def draw(results: Results, path: Path) -> None:
    """Draw panels of numbers."""
    private = {
        PRIVREP[0]: Curve("PrivateFedRep", 0.93, OURS),
        PRIVREP[1]: Curve(
            "PrivAltMin", 1.0, {"color": "#e67e22", "lw": 1.3, "ls": "--", "marker": "s", "ms": 4, "zorder": 5}
        ),
        PRIVREP[2]: Curve(
            "CentaurLinear", 1.05, {"color": "#8e44ad", "lw": 1.3, "ls": ":", "marker": "D", "ms": 4, "zorder": 5}
        ),
        ANALYST: Curve(ANALYST, 1.155, THEIRS),
    }
    panels = [name for name in PANELS if name in results.panels()]
    sheet = Sheet("Real panels", panels, ROWS, "RMSE ", tuple(REFERENCES), private, RATIOS, TICKS)
    draw_sheet(results, sheet, path)


def draw_labels(results: LabelResults, path: Path) -> None:
    """Draw log-loss of labels, and the calibration error of test rows."""
    panels = [name for name in LABELS if name in results.panels()]
    rows = [Goal(LOG_LOSS, kind, {}) for kind in KINDS] + [Goal(ECE, "test", {})]
    private = {
        DEFAULT: Curve("PrivateFedRepClassifier", 0.95, OURS),
        label_runs.ANALYST: Curve(label_runs.ANALYST, 1.07, THEIRS),
    }
    names = (*label_references.REFERENCES, label_runs.ORACLE)
    draw_sheet(results, Sheet("Labels", panels, with_targets(rows, label_targets.GOALS), "", names, private), path)


def draw_ratings(results: RatingResults, path: Path) -> None:
    """Draw RMSE of ratings."""
    panels = [name for name in SOURCES if name in results.panels()]
    rows = with_targets([Goal(RMSE, kind, {}) for kind in KINDS], rating_targets.GOALS)
    private = {
        rating_runs.FACTORIZATION: Curve("PrivateFactorization", 0.95, OURS),
        rating_runs.ANALYST: Curve(rating_runs.ANALYST, 1.07, THEIRS),
    }
    names = (rating_references.USER_MEAN, rating_references.BOTH_MEANS, rating_references.FACTORS)
    draw_sheet(results, Sheet("Ratings", panels, rows, "", names, private), path)


def with_targets(rows: Sequence[Goal], goals: Sequence[Goal]) -> list[Goal]:
    """Return the rows, with what is asked of the same measure and kind."""
    asked = {(goal.measure, goal.kind): goal for goal in goals}
    return [asked.get((row.measure, row.kind), row) for row in rows]


def draw_sheet(results: Runs[Any], sheet: Sheet, path: Path) -> None:
    """Draw a column for each panel, a row for each figure."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot as plt

    size = (5.6 * len(sheet.panels), 1 + 4 * len(sheet.rows))
    figure, grid = plt.subplots(
        len(sheet.rows), len(sheet.panels), figsize=size, layout="constrained", squeeze=False
    )  # fmt: skip
    for row, asked in enumerate(sheet.rows):
        for column, panel in enumerate(sheet.panels):
            axes = grid[row, column]
            plot(axes, results, sheet, asked, panel)
            if row == 0:
                users = max(score.users for score in results.scores.values() if score.panel == panel)
                axes.set_title(f"{panel}, {users:,} users", fontsize=12)
            if column == 0:
                axes.set_ylabel(f"{NAMES[asked.kind]}:\n{sheet.unit}{asked.measure}", fontsize=10)
            if row == len(sheet.rows) - 1:
                axes.set_xlabel("epsilon")
    seeds = len({seed for panel, seed, *_ in results.scores if panel in sheet.panels})
    figure.suptitle(
        f"{sheet.title}, seeds: {seeds}. Mean, and bars from the least to the largest. delta 1e-6, replace-one-user, "
        "everything charged, defaults, simulated noise.\nHorizontal lines: not private, in words and numbers at the "
        "right. Triangles at the top, arrows: beyond the axis.",
        fontsize=11,
    )
    handles = [plt.Line2D([], [], label=curve.name, **curve.style) for curve in sheet.private.values()]
    handles.append(plt.Line2D([], [], label="target", **TARGET))
    figure.legend(handles=handles, loc="outside lower center", ncols=len(handles), frameon=False, fontsize=11)
    figure.savefig(path, dpi=110)
    plt.close(figure)


@dataclass(frozen=True)
class Label:
    """A name at the right of a plot, near its value."""

    value: float
    name: str
    colour: str


def plot(axes: Any, results: Runs[Any], sheet: Sheet, asked: FigureLike, panel: str) -> None:
    """Draw one figure on one panel."""
    curves = {m: [results.values(asked, panel, m, epsilon) for epsilon in EPSILONS] for m in sheet.private}
    curves = {method: values for method, values in curves.items() if all(values)}
    labels = find_labels(results, sheet, asked, panel)
    targets = [asked.most(panel, epsilon) for epsilon in EPSILONS]
    limits = sheet.limits or find_limits(labels, list(curves.values()), targets, HIGHEST[asked.measure])
    axes.set(xscale="log", yscale="log", xlim=(EPSILONS[0] / 1.35, EPSILONS[-1] * 1.35), ylim=limits)
    axes.set_xticks(EPSILONS, [f"{epsilon:g}" for epsilon in EPSILONS])
    ticks = sheet.ticks or np.geomspace(*limits, 5)
    axes.set_yticks(ticks, [f"{tick:.3g}" for tick in ticks])
    axes.minorticks_off()
    axes.grid(axis="y", color="0.93", lw=0.8)
    axes.spines[["top", "right"]].set_visible(False)
    for epsilon, target in zip(EPSILONS, targets, strict=True):
        if target is not None:
            axes.plot([epsilon / 1.2, epsilon * 1.2], [target] * 2, **TARGET)
    for label in labels:
        if label.value <= limits[1]:
            style = "-" if label.value == 1 else (0, (5, 2))
            axes.axhline(label.value, color=label.colour, lw=1, ls=style, zorder=2)
    beyond = 0
    for method, values in curves.items():
        curve = sheet.private[method]
        plot_method(axes, curve.factor * np.array(EPSILONS), np.array(values), curve.style, beyond, limits[1])
        beyond += int(max(map(np.mean, values)) > limits[1])
    write_labels(axes, labels, limits)


def find_labels(results: Runs[Any], sheet: Sheet, asked: FigureLike, panel: str) -> list[Label]:
    """Return names, means and colours of what is not private and has such a number."""
    found = []
    for name, colour in zip(sheet.references, GREYS, strict=False):
        values = results.values(asked, panel, name, None)
        if values:
            found.append(Label(float(np.mean(values)), WORDS.get(name, name), colour))
    return found


def find_limits(
    labels: Sequence[Label],
    curves: Sequence[Sequence[Sequence[float]]],
    targets: Sequence[float | None],
    highest: float,
) -> tuple[float, float]:
    """Return limits of an axis around all that is drawn. What is `highest` times the least, or more, is beyond it."""
    means = [float(np.mean(values)) for curve in curves for values in curve]
    every = [*(label.value for label in labels), *means, *(target for target in targets if target is not None)]
    every = [value for value in every if value > 0] or [1.0]
    return min(every) / 1.03, min(max(every), highest * min(every)) * 1.03


def plot_method(axes: Any, epsilons: Array, values: Array, style: dict[str, Any], line: int, most: float) -> None:
    """Draw means and ranges of (epsilons, seeds). Means above the axis get a mark at its top, on this line of text."""
    means = values.mean(axis=1)
    ends = np.abs(np.stack([values.min(axis=1), values.max(axis=1)]) - means)
    axes.plot(epsilons, means, **style)
    inside = means <= most
    axes.errorbar(
        epsilons[inside], means[inside], yerr=ends[:, inside], fmt="none", ecolor=style["color"],
        elinewidth=0.9, capsize=2.5, alpha=0.7, zorder=3,
    )  # fmt: skip
    for epsilon, mean in zip(epsilons, means, strict=True):
        if mean > most:
            height = 0.975 - 0.045 * line
            where = {"transform": axes.get_xaxis_transform(), "color": style["color"], "zorder": 8}
            axes.plot([epsilon], [height], marker="^", ms=6, ls="none", **where)
            axes.text(epsilon / 1.06, height, f"{mean:.3g}", fontsize=8.5, ha="right", va="center", **where)


def write_labels(axes: Any, labels: list[Label], limits: tuple[float, float]) -> None:
    """Write names at the right, a line of text apart, from the top down where they are beyond it."""
    labels = sorted(labels, key=lambda label: label.value)
    if not labels:
        return
    low, high = np.log(limits)
    values = np.clip((np.log([label.value for label in labels]) - low) / (high - low), -0.02, 1.0)
    for label, value, height in zip(labels, values, apart(values, 1 / LINES_OF_TEXT), strict=True):
        axes.plot([1.0, 1.035], [value, height], color=label.colour, lw=0.7, transform=axes.transAxes, clip_on=False)
        arrow = " ↑" if label.value > limits[1] else " ↓" if label.value < limits[0] else ""
        axes.text(
            1.045, height, f"{label.name} {label.value:.3f}{arrow}", color=label.colour, fontsize=8.5, va="center",
            transform=axes.transAxes,
        )  # fmt: skip


def apart(heights: Array, gap: float) -> Array:
    """Return sorted heights moved until neighbours are a gap apart, none above 1."""
    heights = heights.copy()
    for _ in range(300):
        missing = np.maximum(gap - np.diff(heights), 0.0)
        heights[:-1] -= missing / 2
        heights[1:] += missing / 2
        heights -= np.maximum(heights - 1.0, 0.0)
    return heights
