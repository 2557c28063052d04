"""Pictures of `experiments.frontier`: every sweep, and every start."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from experiments import style
from experiments.frontier_runs import OWN_START, REFERENCES, SWEEPS, Contender, Point, Row
from experiments.frontier_tables import Results, results_of_starts

METHODS = {  # all three are privrep's
    "private-fedrep": ("FedRep", style.OURS),
    "priv-altmin": ("AltMin", style.OURS | {"color": style.PALE, "marker": "s", "zorder": 5}),
    "centaur": ("CENTAUR", style.OURS | {"color": "#3a8bac", "marker": "D", "zorder": 5}),
}
DASHES = {"private-fedrep": "-", "priv-altmin": ":", "centaur": "--"}
START_COLOURS = {
    "spectral": style.PAPER,
    "normalised-pairs": style.ANALYST,
    "power-method": "#4d8c57",
    "random": style.OTHER,
    "given": style.INK,
}
PAPER = {"private-fedrep": "paper, its code", "priv-altmin": "paper", "centaur": "paper"}
FEDREP, _, ALONE = REFERENCES
AXES = {
    "epsilon": "epsilon",
    "users": "users",
    "features": "features",
    "rank": "rank",
    "noise": "label noise",
    "condition": "condition number of the features' covariance",
}
PROVED = {  # exponents of the squared distance, and where to draw them: two values and the height at the first
    "epsilon": ((0.7, 2.5, 1.5e-3), (-2,)),
    "users": ((7_000, 25_000, 8e-3), (-2,)),
    "features": ((24, 60, 3e-4), (2, 3)),
}
LEAST_EXCESS = 1e-4
AROUND = (
    "One change at a time from 20,000 users, 50 features, rank 2, 10 rows a user, label noise 0.1, identity covariance "
    "and epsilon 1. Delta 1e-6, replace one user, all charged, simulated noise.\nPapers: their configurations (of "
    "FedRep's three readings the one of its code). Not private: the better of FedRep and AltMin without noise.{more}"
)


@dataclass(frozen=True)
class Line:
    who: Contender
    label: str
    style: dict[str, Any]


LINES = [
    *(Line(Contender(method), f"privrep, {name}", look) for method, (name, look) in METHODS.items()),
    *(
        Line(
            Contender(method, configuration=PAPER[method]),
            f"{name}, paper",
            {"color": style.PAPER, "linestyle": DASHES[method]},
        )
        for method, (name, _) in METHODS.items()
    ),
    Line(FEDREP, "not private", {"color": style.NOT_PRIVATE, "linestyle": "--", "linewidth": 1}),
    Line(ALONE, "alone", {"color": style.ALONE, "linestyle": "--", "linewidth": 1}),
]


def panel(
    axes: Any, points: Sequence[tuple[float, Point]], lines: Sequence[Line], measure: Callable[..., float]
) -> None:
    """Draw lines on logarithmic axes. What was not measured is not drawn."""
    for line in lines:
        xy = [(x, y) for x, point in points if math.isfinite(y := measure(point, line.who))]
        if xy:
            cut = "" if xy[-1][0] == points[-1][0] else f" (to {xy[-1][0]:g})"
            axes.plot(*zip(*xy, strict=True), label=line.label + cut, **line.style)


def guides(axes: Any, field: str) -> None:
    """Draw what the papers prove, as slopes only: short grey lines."""
    if field not in PROVED:
        return
    (left, right, top), exponents = PROVED[field]
    x = np.array([left, right])
    for exponent in exponents:
        y = top * (x / left) ** exponent
        axes.plot(x, y, color=style.FAINT, linewidth=4, zorder=0)
        axes.annotate(
            f"proved: slope {exponent}", (x[1], y[1]), xytext=(5, 0 if exponent > 0 else -4),
            textcoords="offset points", fontsize=8, color=style.NOT_PRIVATE, va="center" if exponent > 0 else "top",
        )  # fmt: skip


def distance(results: Results, point: Point, who: Contender) -> float:
    return results.without_noise(results.distance, point) if who == FEDREP else results.distance(point, who)


def excess(results: Results, point: Point, who: Contender) -> float:
    """Return the MSE over the oracle's, less one. What is below a ten-thousandth is drawn there."""
    mse = results.without_noise(results.mse, point) if who == FEDREP else results.mse(point, who)
    return mse if math.isnan(mse) else max(mse - 1, LEAST_EXCESS)


def draw_sweeps(
    results: Results, path: Path, measure: Callable[..., float], title: str, more: str = "", proved: bool = False
) -> None:
    """Draw one measure over all six sweeps."""
    with style.picture(path, rows=2, columns=3, panel=(5.3, 3.9), title=title, note=AROUND.format(more=more)) as panels:
        for axes, (name, label) in zip(panels.flat, AXES.items(), strict=True):
            sweep = SWEEPS[name]
            points = [(float(value), sweep.point(value)) for value in sweep.values]
            panel(axes, points, LINES, partial(measure, results))
            if proved:
                guides(axes, name)
            style.epsilon_axis(axes, [x for x, _ in points], label)
            style.number_axis(axes, "", log=True)


def draw_starts(rows: Sequence[Row], path: Path) -> None:
    """Draw each method's default from each start, at two numbers of users."""
    with style.picture(
        path,
        rows=2,
        columns=3,
        panel=(5.3, 3.9),
        title="Population MSE over the oracle's, less one (log scale), from each start",
        note="50 features, rank 2, 10 rows a user, label noise 0.1; delta 1e-6, replace one user, all charged, "
        "simulated noise. privrep: the method's own start. Less than "
        f"{LEAST_EXCESS:g} is drawn there.",
    ) as panels:
        for row, (users, results) in enumerate(results_of_starts(rows).items()):
            points = [(float(e), Point(users=users, epsilon=float(e))) for e in SWEEPS["epsilon"].values]
            for axes, (method, own) in zip(panels[row], OWN_START.items(), strict=True):
                panel(axes, points, _lines_of_starts(method, own), partial(excess, results))
                sweep = f"starts at {users:,} users"
                seeds = min(SWEEPS[sweep].seeds, max((r.seed for r in rows if r.sweep == sweep), default=0))
                name = METHODS[method][0]
                axes.set_title(f"{name}, {users:,} users, {seeds} seed{'s' if seeds > 1 else ''}")
                style.epsilon_axis(axes, [x for x, _ in points])
                style.number_axis(axes, "", log=True)


def _lines_of_starts(method: str, own: str) -> list[Line]:
    lines = []
    for start, colour in START_COLOURS.items():
        if start == own:
            lines.append(Line(Contender(method, "own"), f"privrep: {start}", style.OURS))
        else:
            words = "given, not private" if start == "given" else start
            look = {"color": colour, "linestyle": ":" if start == "given" else "-", "marker": ".", "linewidth": 1.2}
            lines.append(Line(Contender(method, start), words, look))
    return lines


def draw_all(rows: Sequence[Row], folder: Path) -> None:
    """Draw frontier.png (errors), frontier_distance.png and frontier_starts.png."""
    results = Results(rows)
    title = "Population MSE over the oracle's, less one (log scale)"
    draw_sweeps(results, folder / "frontier.png", excess, title, f" Less than {LEAST_EXCESS:g} is drawn there.")
    title = "Squared distance to the true representation (log scale)"
    draw_sweeps(results, folder / "frontier_distance.png", distance, title, proved=True)
    draw_starts(rows, folder / "frontier_starts.png")
