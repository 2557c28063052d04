"""The picture of `experiments.tables`: RMSE against epsilon, over what one does without privacy."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from experiments.table_references import REFERENCES
from experiments.tables_data import PANELS
from experiments.tables_runs import ANALYST, EPSILONS, PRIVREP
from experiments.tables_targets import NAMES, OVER_MIXED, OVER_POOLED, Figure, Results
from privrep.typing import Array

LEAST, MOST = 0.95, 1.5  # of the vertical axis; what is above is marked at its top
TICKS = (0.95, 1.0, 1.05, 1.1, 1.2, 1.3, 1.4, 1.5)
LINES_OF_TEXT = 17  # that fit beside a plot
TARGET = {"color": "#c0392b", "lw": 5, "alpha": 0.25, "solid_capstyle": "butt"}
ROWS = (Figure(OVER_MIXED, "test"), Figure(OVER_MIXED, "newcomers"), Figure(OVER_POOLED, "strangers"))
PRIVATE: dict[str, tuple[str, float, dict[str, Any]]] = {  # name, factor of epsilon that keeps marks apart, style
    PRIVREP[0]: ("PrivateFedRep", 0.93, {"color": "#c0392b", "lw": 2.2, "marker": "o", "ms": 5.5, "zorder": 6}),
    PRIVREP[1]: ("PrivAltMin", 1.0, {"color": "#e67e22", "lw": 1.3, "ls": "--", "marker": "s", "ms": 4, "zorder": 5}),
    PRIVREP[2]: (
        "CentaurLinear",
        1.05,
        {"color": "#8e44ad", "lw": 1.3, "ls": ":", "marker": "D", "ms": 4, "zorder": 5},
    ),
    ANALYST: (ANALYST, 1.155, {"color": "#1f5fa8", "lw": 1.6, "marker": "v", "ms": 5, "zorder": 4}),
}
COLOURS = dict(zip(REFERENCES, ("#7f8c8d", "#16a085", "#666666", "#000000", "#9a7d0a"), strict=True))
WORDS = {"mixed model, intercepts": "mixed, intercepts", "mixed model, slopes": "mixed, slopes"}


@dataclass(frozen=True)
class Label:
    """A name at the right of a plot, near its value."""

    value: float
    name: str
    colour: str


def draw(results: Results, path: Path) -> None:
    """Draw a column for each panel, a row for each kind of rows."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot as plt

    panels = [name for name in PANELS if name in results.panels()]
    figure, grid = plt.subplots(
        len(ROWS), len(panels), figsize=(5.6 * len(panels), 13), layout="constrained", squeeze=False
    )  # fmt: skip
    for row, asked in enumerate(ROWS):
        for column, panel in enumerate(panels):
            axes = grid[row, column]
            plot(axes, results, asked, panel)
            if row == 0:
                users = max(score.users for score in results.of(panel, PRIVREP[0], EPSILONS[0]))
                axes.set_title(f"{panel}, {users:,} users", fontsize=12)
            if column == 0:
                axes.set_ylabel(f"{NAMES[asked.kind]}:\nRMSE {asked.measure}", fontsize=10)
            if row == len(ROWS) - 1:
                axes.set_xlabel("epsilon")
    seeds = len({seed for panel, seed, *_ in results.scores if panel in panels})
    figure.suptitle(
        f"Real panels, seeds: {seeds}. Mean, and bars from the least to the largest. delta 1e-6, replace-one-user, "
        "everything charged, defaults, simulated noise.\nHorizontal lines: not private, in words and numbers at the "
        "right. Triangles at the top, arrows: beyond the axis.",
        fontsize=11,
    )
    handles = [plt.Line2D([], [], label=name, **style) for name, _, style in PRIVATE.values()]
    handles.append(plt.Line2D([], [], label="target", **TARGET))
    figure.legend(handles=handles, loc="outside lower center", ncols=len(handles), frameon=False, fontsize=11)
    figure.savefig(path, dpi=110)
    plt.close(figure)


def plot(axes: Any, results: Results, asked: Figure, panel: str) -> None:
    """Draw one kind of rows on one panel."""
    axes.set(xscale="log", yscale="log", xlim=(EPSILONS[0] / 1.35, EPSILONS[-1] * 1.35), ylim=(LEAST, MOST))
    axes.set_xticks(EPSILONS, [f"{epsilon:g}" for epsilon in EPSILONS])
    axes.set_yticks(TICKS, [f"{tick:g}" for tick in TICKS])
    axes.minorticks_off()
    axes.grid(axis="y", color="0.93", lw=0.8)
    axes.spines[["top", "right"]].set_visible(False)
    for epsilon in EPSILONS:
        axes.plot([epsilon / 1.2, epsilon * 1.2], [asked.range(epsilon)[1]] * 2, **TARGET)
    labels = plot_references(axes, results, asked, panel)
    beyond = 0
    for method, (_, factor, style) in PRIVATE.items():
        values = [results.values(asked, panel, method, epsilon) for epsilon in EPSILONS]
        if all(values):
            plot_method(axes, factor * np.array(EPSILONS), np.array(values), style, beyond)
            beyond += int(max(map(np.mean, values)) > MOST)
    write_labels(axes, labels)


def plot_references(axes: Any, results: Results, asked: Figure, panel: str) -> list[Label]:
    """Draw what is not private as horizontal lines, and return their labels."""
    labels, measure = [], results.measure(asked.measure)
    for name, colour in COLOURS.items():
        level = float(np.mean([measure(score, asked.kind) for score in results.of(panel, name, None)]))
        if level <= MOST:
            axes.axhline(level, color=colour, lw=1, ls="-" if level == 1 else (0, (5, 2)), zorder=2)
        labels.append(Label(level, WORDS.get(name, name), colour))
    return labels


def plot_method(axes: Any, epsilons: Array, values: Array, style: dict[str, Any], line: int) -> None:
    """Draw means and ranges of (epsilons, seeds). Means above the axis get a mark at its top, on this line of text."""
    means = values.mean(axis=1)
    ends = np.abs(np.stack([values.min(axis=1), values.max(axis=1)]) - means)
    axes.plot(epsilons, means, **style)
    inside = means <= MOST
    axes.errorbar(
        epsilons[inside], means[inside], yerr=ends[:, inside], fmt="none", ecolor=style["color"],
        elinewidth=0.9, capsize=2.5, alpha=0.7, zorder=3,
    )  # fmt: skip
    for epsilon, mean in zip(epsilons, means, strict=True):
        if mean > MOST:
            height = 0.975 - 0.045 * line
            where = {"transform": axes.get_xaxis_transform(), "color": style["color"], "zorder": 8}
            axes.plot([epsilon], [height], marker="^", ms=6, ls="none", **where)
            axes.text(epsilon / 1.06, height, f"{mean:.3g}", fontsize=8.5, ha="right", va="center", **where)


def write_labels(axes: Any, labels: list[Label]) -> None:
    """Write names at the right, a line of text apart, from the top down where they are beyond it."""
    labels = sorted(labels, key=lambda label: label.value)
    low, high = np.log(LEAST), np.log(MOST)
    values = np.clip((np.log([label.value for label in labels]) - low) / (high - low), -0.02, 1.0)
    for label, value, height in zip(labels, values, apart(values, 1 / LINES_OF_TEXT), strict=True):
        axes.plot([1.0, 1.035], [value, height], color=label.colour, lw=0.7, transform=axes.transAxes, clip_on=False)
        arrow = " ↑" if label.value > MOST else " ↓" if label.value < LEAST else ""
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
