"""The pictures of `experiments.tables`: errors against epsilon, next to what one does without privacy."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import product
from pathlib import Path
from typing import Any

import numpy as np

from experiments import (
    label_references,
    label_runs,
    label_targets,
    rating_references,
    rating_runs,
    rating_targets,
    style,
)
from experiments.label_data import LABELS
from experiments.label_targets import ECE, LOG_LOSS, LabelResults
from experiments.rating_data import SOURCES
from experiments.rating_targets import RMSE, RatingResults
from experiments.table_references import REFERENCES
from experiments.tables_data import PANELS
from experiments.tables_results import NAMES, FigureLike, Goal, Runs
from experiments.tables_runs import ANALYST, DEFAULT, EPSILONS, KINDS, PRIVREP
from experiments.tables_targets import OVER_MIXED, OVER_POOLED, Figure, Results

COLUMNS = 3
RATIOS = (0.95, 1.5)
TICKS = {RATIOS: (0.95, 1.0, 1.1, 1.2, 1.3, 1.4, 1.5)}
HIGHEST = {LOG_LOSS: 2.0, ECE: 200.0, RMSE: 1.5}  # of an axis that follows its numbers, over the least of them
WORDS = {
    "mixed model, intercepts": "mixed, intercepts",
    "mixed model, slopes": "mixed, slopes",
    rating_references.BOTH_MEANS: "means of item and user",
    rating_references.FACTORS: "factorisation, best rank",
    label_runs.ORACLE: "true representation",
}
OWN = ("alone", "user mean", "shrunk frequency", rating_references.USER_MEAN)
THEIRS = {"color": style.ANALYST, "marker": "v", "zorder": 4}
NOTE = (
    "Mean over {seeds} seeds, bars from the least to the largest. Delta 1e-6, replace one user, everything charged, "
    "defaults, simulated noise.\nBroken lines: not private. Pale bars: targets. Logarithmic axes."
)
Named = Callable[[str], Path]


@dataclass(frozen=True)
class Curve:
    """How a private method is drawn."""

    name: str
    factor: float  # of epsilon, which keeps marks apart
    style: dict[str, Any]


@dataclass(frozen=True)
class Sheet:
    """What stands in a picture: a panel for each figure and each table."""

    title: str
    panels: Sequence[str]
    figures: Sequence[FigureLike]
    unit: str  # of ratios; empty where the measure says it
    references: Sequence[str]  # not private, drawn as horizontal lines
    private: Mapping[str, Curve] = field(default_factory=dict)
    limits: tuple[float, float] | None = None  # of vertical axes; None: each follows its numbers


def draw(results: Results, named: Named) -> None:
    """Draw panels of numbers: tables.png (test rows) and tables_newcomers.png."""
    pale = style.OURS | {"color": style.PALE, "linewidth": 1.4, "zorder": 5}
    private = {
        PRIVREP[0]: Curve("privrep", 0.93, style.OURS),
        PRIVREP[1]: Curve("privrep, AltMin", 1.0, pale | {"marker": "s", "markersize": 4}),
        PRIVREP[2]: Curve("privrep, CENTAUR", 1.05, pale | {"marker": "D", "markersize": 4, "linestyle": ":"}),
        ANALYST: Curve(ANALYST, 1.155, THEIRS),
    }
    panels = [name for name in PANELS if name in results.panels()]
    test, three, none = Figure(OVER_MIXED, "test"), Figure(OVER_MIXED, "newcomers"), Figure(OVER_POOLED, "strangers")
    for name, figures, title in (
        ("tables", (test,), "Real panels: test rows"),
        ("tables_newcomers", (three, none), "Real panels: newcomers"),
    ):
        draw_sheet(results, Sheet(title, panels, figures, "RMSE ", tuple(REFERENCES), private, RATIOS), named(name))


def draw_labels(results: LabelResults, named: Named) -> None:
    """Draw labels: log-loss of each kind of rows in a picture of its own, and the calibration error of test rows."""
    panels = [name for name in LABELS if name in results.panels()]
    private = {
        DEFAULT: Curve("privrep", 0.95, style.OURS),
        label_runs.ANALYST: Curve(label_runs.ANALYST, 1.07, THEIRS),
    }
    names = (*label_references.REFERENCES, label_runs.ORACLE)
    pictures = {
        "tables_labels": Goal(LOG_LOSS, KINDS[0], {}),
        "tables_labels_newcomers": Goal(LOG_LOSS, KINDS[1], {}),
        "tables_labels_strangers": Goal(LOG_LOSS, KINDS[2], {}),
        "tables_labels_calibration": Goal(ECE, "test", {}),
    }
    for name, goal in pictures.items():
        figures = with_targets([goal], label_targets.GOALS)
        draw_sheet(results, Sheet(f"Labels, {goal.name}", panels, figures, "", names, private), named(name))


def draw_ratings(results: RatingResults, named: Named) -> None:
    """Draw RMSE of ratings: tables_ratings.png."""
    panels = [name for name in SOURCES if name in results.panels()]
    rows = with_targets([Goal(RMSE, kind, {}) for kind in KINDS], rating_targets.GOALS)
    private = {
        rating_runs.FACTORIZATION: Curve("privrep", 0.95, style.OURS),
        rating_runs.ANALYST: Curve(rating_runs.ANALYST, 1.07, THEIRS),
    }
    names = (rating_references.USER_MEAN, rating_references.BOTH_MEANS, rating_references.FACTORS)
    draw_sheet(results, Sheet("Ratings", panels, rows, "", names, private), named("tables_ratings"))


def with_targets(rows: Sequence[Goal], goals: Sequence[Goal]) -> list[Goal]:
    """Return the rows, with what is asked of the same measure and kind."""
    asked = {(goal.measure, goal.kind): goal for goal in goals}
    return [asked.get((row.measure, row.kind), row) for row in rows]


def draw_sheet(results: Runs[Any], sheet: Sheet, path: Path) -> None:
    """Draw a panel for each figure and table; the tables of a figure stand side by side."""
    cells = list(product(sheet.figures, sheet.panels))
    columns = min(COLUMNS, len(sheet.panels) if len(sheet.figures) < 3 else len(sheet.figures))
    if len(sheet.figures) >= 3:  # a table a row
        cells = [(asked, panel) for panel in sheet.panels for asked in sheet.figures]
    seeds = len({seed for panel, seed, *_ in results.scores if panel in sheet.panels})
    with style.picture(
        path,
        rows=-(-len(cells) // columns),
        columns=columns,
        panel=(5.4, 3.9),
        title=sheet.title,
        note=NOTE.format(seeds=seeds),
    ) as panels:
        for axes, (asked, panel) in zip(panels.flat, cells, strict=False):
            plot(axes, results, sheet, asked, panel)
            users = max(score.users for score in results.scores.values() if score.panel == panel)
            kind = f"\n{NAMES[asked.kind]}" if len(sheet.figures) > 1 else ""
            axes.set_title(f"{panel}, {users:,} users{kind}")


def plot(axes: Any, results: Runs[Any], sheet: Sheet, asked: FigureLike, panel: str) -> None:
    """Draw one figure on one table."""
    curves = {m: [results.values(asked, panel, m, epsilon) for epsilon in EPSILONS] for m in sheet.private}
    curves = {method: values for method, values in curves.items() if all(values)}
    levels = find_levels(results, sheet, asked, panel)
    targets = [asked.most(panel, epsilon) for epsilon in EPSILONS]
    measured = [float(np.mean(values)) for curve in curves.values() for values in curve]
    limits = sheet.limits or find_limits(
        [*levels.values(), *measured, *(t for t in targets if t is not None)], HIGHEST[asked.measure]
    )
    for epsilon, target in zip(EPSILONS, targets, strict=True):
        if target is not None:
            axes.plot([epsilon / 1.2, epsilon * 1.2], [target] * 2, **style.TARGET)
    for name, value in levels.items():
        axes.axhline(
            value, color=style.ALONE if name in OWN else style.NOT_PRIVATE, linewidth=1, linestyle="--",
            label=f"{WORDS.get(name, name)} {style.said(value)}",
        )  # fmt: skip
    for method, values in curves.items():
        plot_method(axes, sheet.private[method], np.array(values))
    style.epsilon_axis(axes, EPSILONS)
    axes.set_xlim(EPSILONS[0] / 1.35, EPSILONS[-1] * 1.35)
    style.number_axis(axes, f"{sheet.unit}{asked.measure}", log=True, ticks=find_ticks(limits))
    axes.set_ylim(limits)


def find_levels(results: Runs[Any], sheet: Sheet, asked: FigureLike, panel: str) -> dict[str, float]:
    """Return means of what is not private and has such a number, by name."""
    found = {name: results.values(asked, panel, name, None) for name in sheet.references}
    return {name: float(np.mean(values)) for name, values in found.items() if values}


def find_limits(values: Sequence[float], highest: float) -> tuple[float, float]:
    """Return limits of an axis around these values. What is `highest` times the least, or more, is beyond it."""
    above = [value for value in values if value > 0] or [1.0]
    return min(above) / 1.03, min(max(above), highest * min(above)) * 1.03


def find_ticks(limits: tuple[float, float]) -> tuple[float, ...]:
    """Return round numbers between the limits of a logarithmic axis."""
    from matplotlib.ticker import LogLocator, MaxNLocator

    low, high = limits
    near = high < 4 * low
    ticks = MaxNLocator(5).tick_values(low, high) if near else LogLocator(subs=(1.0, 2.0, 5.0)).tick_values(low, high)
    return TICKS.get(limits, tuple(float(tick) for tick in ticks if low <= tick <= high))


def plot_method(axes: Any, curve: Curve, values: Any) -> None:
    """Draw means and ranges of an array (epsilons, seeds). The name has the mean at the largest epsilon."""
    epsilons, means = curve.factor * np.array(EPSILONS), values.mean(axis=1)
    ends = np.abs(np.stack([values.min(axis=1), values.max(axis=1)]) - means)
    axes.errorbar(
        epsilons, means, yerr=ends, fmt="none", ecolor=curve.style["color"], elinewidth=0.9, capsize=2.5, alpha=0.7,
        zorder=3,
    )  # fmt: skip
    axes.plot(epsilons, means, label=f"{curve.name} {style.said(means[-1])}", **curve.style)
