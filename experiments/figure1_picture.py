"""The picture of `experiments.figure1`: population error against epsilon, next to the papers' rates."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from experiments import style
from experiments.theory import Problem, excess_risk, lemma_12, theorem_10

PRIVATE: Mapping[str, tuple[str, dict[str, Any]]] = {
    "Private FedRep (this project)": ("privrep", style.OURS),
    "paper, as its code: eta 2.5, same rows": ("paper, as its code", {"color": style.PAPER}),
    "the same with the paper's own heads": ("the same, the paper's heads", {"color": style.PAPER, "linestyle": "--"}),
    "paper, as its theory: eta 1, disjoint": ("paper, as its theory", {"color": "#d08a73"}),
    "paper, as its text: eta 2.5, disjoint": ("paper, as its text", {"color": "#d08a73", "linestyle": ":"}),
    "DP-FedAvg, one linear model": ("DP-FedAvg, one model for all", {"color": style.ANALYST}),
}
LEVELS = {
    "non-private FedRep": ("FedRep, not private", style.NOT_PRIVATE),
    "non-private AltMin": ("alternation, not private", style.NOT_PRIVATE),
    "alone": ("alone", style.ALONE),
    "pooled": ("one model, not private", style.NOT_PRIVATE),
    "null": ("always zero", style.NOT_PRIVATE),
    "oracle": ("true representation", style.INK),
}
RATES = (("Lemma 12, slope only", lambda p, e: excess_risk(p, lemma_12(p, e).privacy)),
         ("Theorem 10, slope only", lambda p, e: theorem_10(p, e).privacy))  # fmt: skip


def draw(rows: Sequence[Any], setting: Any, path: Path) -> None:
    """Draw the mean of each method, with bars from the least to the largest of the seeds.

    Args:
        rows: with method, epsilon, seed and the error.
        setting: a `figure1.Setting`, of which users, features, rank, rows and noise are read.
        path: of the PNG.
    """
    epsilons = sorted({row.epsilon for row in rows if row.epsilon is not None})
    words = f"{setting.users:,} users, {setting.features} features, rank {setting.rank}, {setting.rows} rows a user"
    seeds = len({row.seed for row in rows})
    with style.picture(
        path,
        panel=(10.0, 6.0),
        title=f"Population error: {words}, label noise {setting.noise:g}",
        note=f"Delta 1e-6, replace one user, everything charged; {seeds} seeds, bars from the least to the largest, "
        "simulated noise.",
    ) as panels:
        axes = panels[0, 0]
        for method, (name, look) in PRIVATE.items():
            values = np.array([[_error(r) for r in rows if (r.method, r.epsilon) == (method, e)] for e in epsilons])
            mean = values.mean(axis=1)
            bars = np.stack([mean - values.min(axis=1), values.max(axis=1) - mean])
            axes.errorbar(epsilons, mean, yerr=bars, fmt="none", ecolor=look["color"], elinewidth=0.9, capsize=2.5)
            axes.plot(epsilons, mean, label=name, **{"marker": "o"} | look)
        for method, (name, colour) in LEVELS.items():
            level = float(np.mean([_error(row) for row in rows if row.method == method]))
            axes.axhline(level, color=colour, linewidth=1, linestyle=":", label=name)
        _draw_rates(axes, setting, epsilons)
        style.epsilon_axis(axes, epsilons)
        style.number_axis(axes, "mean squared error, log scale", log=True)


def _error(row: Any) -> float:
    return float(getattr(row, "population_mse", None) or row.mse)


def _draw_rates(axes: Any, setting: Any, epsilons: Sequence[float]) -> None:
    s = setting
    problem = Problem(s.users, s.features, s.rank, s.rows, s.noise, 1.0, *[s.rank**-0.5] * 2)
    fine = np.geomspace(epsilons[0], epsilons[-1], 50)
    for name, rate in RATES:
        curve = s.noise**2 + np.array([rate(problem, e) for e in fine])
        axes.plot(fine, curve, color=style.OTHER, linewidth=0.9, linestyle="--", zorder=1, label=name)
