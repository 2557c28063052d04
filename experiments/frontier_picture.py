"""Pictures of `experiments.frontier`: every sweep, and every start."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from experiments.figure1 import spread_out
from experiments.frontier_runs import OWN_START, REFERENCES, SWEEPS, Contender, Point, Row
from experiments.frontier_tables import Results, results_of_starts

COLOURS = {"private-fedrep": "C3", "priv-altmin": "C0", "centaur": "C2"}
SHORT = {"private-fedrep": "FedRep", "priv-altmin": "AltMin", "centaur": "CENTAUR"}
START_COLOURS = {"spectral": "C3", "normalised-pairs": "C0", "power-method": "C2", "random": "0.5", "given": "k"}
PAPER = {"private-fedrep": "paper, its code", "priv-altmin": "paper", "centaur": "paper"}
FEDREP, _, ALONE = REFERENCES
AXES = {
    "epsilon": "epsilon",
    "users": "users n",
    "features": "features d",
    "rank": "rank k",
    "noise": "label noise R",
    "condition": "condition number of the features' covariance",
}
PROVED = {  # exponents of the squared distance, and where to draw them: two values and the height at the first
    "epsilon": ((0.7, 2.5, 1.5e-3), (-2,)),
    "users": ((7_000, 25_000, 8e-3), (-2,)),
    "features": ((24, 60, 3e-4), (2, 3)),
}
LEAST_EXCESS = 1e-4


@dataclass(frozen=True)
class Line:
    who: Contender
    label: str
    style: dict[str, Any]


LINES = [
    *(Line(Contender(m), SHORT[m], {"color": c, "lw": 2, "marker": "o", "ms": 3.5}) for m, c in COLOURS.items()),
    *(
        Line(Contender(m, configuration=PAPER[m]), f"{SHORT[m]}, paper", {"color": c, "lw": 1.2, "ls": "--"})
        for m, c in COLOURS.items()
    ),
    Line(FEDREP, "not private", {"color": "k", "lw": 1, "ls": ":"}),
    Line(ALONE, "alone", {"color": "0.5", "lw": 1, "ls": ":"}),
]


def panel(
    axes: Any, points: Sequence[tuple[float, Point]], lines: Sequence[Line], measure: Callable[..., float]
) -> None:
    """Lines with their names at the right end, a line of text apart. What was not measured is not drawn."""
    labels: list[tuple[float, str, str]] = []
    for line in lines:
        xy = [(x, y) for x, point in points if math.isfinite(y := measure(point, line.who))]
        if not xy:
            continue
        axes.plot(*zip(*xy, strict=True), **line.style)
        cut = "" if xy[-1][0] == points[-1][0] else f" (to {xy[-1][0]:g})"
        labels.append((xy[-1][1], line.label + cut, line.style["color"]))
    axes.set(xscale="log", yscale="log")
    axes.set_xticks([x for x, _ in points], [f"{x:g}" if x < 1_000 else f"{x / 1_000:g}k" for x, _ in points])
    axes.minorticks_off()
    axes.tick_params(labelsize=8)
    low, high = np.log10(axes.get_ylim())
    labels.sort()
    heights = spread_out(labels, low, low + (high - low) * 26 / 15)  # fifteen lines of text fit, not twenty-six
    for (value, name, colour), height in zip(labels, heights, strict=True):
        ends = [(np.log10(value) - low) / (high - low), (height - low) / (high - low)]
        axes.plot([1.0, 1.04], ends, color=colour, lw=0.6, transform=axes.transAxes, clip_on=False)
        axes.text(1.05, ends[1], name, color=colour, fontsize=8, va="center", transform=axes.transAxes)


def guides(axes: Any, field: str) -> None:
    """What the papers prove, as slopes only: short grey lines where nothing else is."""
    if field not in PROVED:
        return
    (left, right, top), exponents = PROVED[field]
    x = np.array([left, right])
    for exponent in exponents:
        y = top * (x / left) ** exponent
        axes.plot(x, y, color="0.75", lw=3, zorder=0)
        axes.annotate(
            f" proved: slope {exponent}",
            (x[1], y[1]),
            fontsize=7.5,
            color="0.45",
            va="center" if exponent > 0 else "top",
        )


def distance(results: Results, point: Point, who: Contender) -> float:
    return results.without_noise(results.distance, point) if who == FEDREP else results.distance(point, who)


def excess(results: Results, point: Point, who: Contender) -> float:
    """MSE over the oracle's, less one; what is below a ten-thousandth is drawn there."""
    mse = results.without_noise(results.mse, point) if who == FEDREP else results.mse(point, who)
    return mse if math.isnan(mse) else max(mse - 1, LEAST_EXCESS)


def draw_sweeps(results: Results, path: Path) -> None:
    from matplotlib import pyplot as plt

    figure, grid = plt.subplots(4, 3, figsize=(16, 17), layout="constrained")
    for i, (name, label) in enumerate(AXES.items()):
        sweep = SWEEPS[name]
        points = [(float(value), sweep.point(value)) for value in sweep.values]
        for row, measure, title in (
            (0, partial(distance, results), "squared distance to the true representation"),
            (2, partial(excess, results), "population MSE over the oracle's, less one"),
        ):
            axes = grid[row + i // 3, i % 3]
            panel(axes, points, LINES, measure)
            if row == 0:
                guides(axes, name)
            axes.set_xlabel(label, fontsize=9)
            if i % 3 == 0:
                axes.set_ylabel(title, fontsize=9)
    figure.suptitle(
        "One change at a time from n 20,000, d 50, k 2, m 10, R 0.1, identity covariance, epsilon 1; delta 1e-6, "
        "replace-one-user, simulated noise.\nSolid: defaults of this project. Dashed: configurations of the papers (of "
        "FedRep's three readings that of its code), all charged. Black: the better of FedRep and AltMin without noise.",
        fontsize=11,
    )
    figure.savefig(path, dpi=110)
    plt.close(figure)


def draw_starts(rows: Sequence[Row], path: Path) -> None:
    from matplotlib import pyplot as plt

    figure, grid = plt.subplots(2, 3, figsize=(16, 9), layout="constrained")
    for row, (users, results) in enumerate(results_of_starts(rows).items()):
        points = [(float(e), Point(users=users, epsilon=float(e))) for e in SWEEPS["epsilon"].values]
        for axes, (method, own) in zip(grid[row], OWN_START.items(), strict=True):
            lines = []
            for start, colour in START_COLOURS.items():
                mark = " (own)" if start == own else " (not private)" if start == "given" else ""
                style = {"color": colour, "lw": 2.2 if start == own else 1.2, "marker": "o", "ms": 3}
                style |= {"ls": ":"} if start == "given" else {}
                lines.append(Line(Contender(method, "own" if start == own else start), start + mark, style))
            panel(axes, points, lines, partial(excess, results))
            sweep = f"starts at {users:,} users"
            seeds = min(SWEEPS[sweep].seeds, max((r.seed for r in rows if r.sweep == sweep), default=0))
            axes.set_title(f"{SHORT[method]}, n {users:,}, {seeds} seed{'s' if seeds > 1 else ''}", fontsize=10)
            axes.set_xlabel("epsilon", fontsize=9)
        grid[row, 0].set_ylabel("population MSE over the oracle's, less one", fontsize=9)
    figure.suptitle("Each method's default from each start (d 50, k 2, m 10, R 0.1, delta 1e-6; simulated noise)")
    figure.savefig(path, dpi=110)
    plt.close(figure)


def draw_all(rows: Sequence[Row], folder: Path) -> None:
    import matplotlib

    matplotlib.use("Agg")
    draw_sweeps(Results(rows), folder / "frontier.png")
    draw_starts(rows, folder / "frontier_starts.png")
