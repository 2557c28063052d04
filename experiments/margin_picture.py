"""The picture of `experiments.margin`: errors against features and epsilon."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from experiments import style

PART = "error_halves"  # heads on the second half of rows
LOOKS: Mapping[str, tuple[str, dict[str, Any]]] = {
    "margin selection": ("privrep's margin selection", style.OURS),
    "the same without projection": ("margin selection, no projection", {"color": style.PAPER, "marker": "s"}),
    "Private FedRep, logistic": ("privrep's default classifier", style.OURS | {"color": style.PALE}),
    "Gaussian noise on pair moments": ("noisy pair moments", {"color": style.ANALYST, "marker": "^"}),
    "true U": ("true representation", {"color": style.NOT_PRIVATE, "linestyle": "--"}),
}
SWEPT = ("margin selection", "Gaussian noise on pair moments")
TICKS = (0.001, 0.003, 0.01, 0.03, 0.1, 0.3)
SMALLER, LARGER = 1_000, 10_000  # features of the sweeps over epsilon


def draw(rows: Sequence[Any], path: Path) -> None:
    """Draw errors against features at two epsilons, and against epsilon for two numbers of features."""
    features = sorted({row.features for row in rows})
    with style.picture(
        path,
        columns=3,
        panel=(6.0, 3.9),
        title="Classes with a margin of 0.3: 5,000 users, 10 rows each, rank 2",
        note="Replace one user, everything charged; mean over seeds, simulated noise. Heads are fitted on the second "
        "half of a user's rows. Theorem 17: its price of privacy with constants and logarithms of one.",
    ) as panels:
        for axes, epsilon in zip(panels.flat[:2], (1.0, 0.3), strict=True):
            for method, (name, look) in LOOKS.items():
                at = None if method == "true U" else epsilon
                values = [style.means(rows, PART, method=method, features=d, epsilon=at) for d in features]
                there = [(d, value) for d, value in zip(features, values, strict=True) if value == value]
                if there:
                    cut = f" (to {there[-1][0]:,g})" if there[-1][0] < features[-1] else ""
                    axes.plot(*zip(*there, strict=True), label=name + cut, **look)
            axes.set_title(f"epsilon {epsilon:g}")
            style.epsilon_axis(axes, features, "features")
            style.number_axis(axes, "test error, log scale", log=True, ticks=TICKS)
            axes.set_ylim(0.003, 0.4)
        _draw_epsilons(panels[0, 2], rows)


def _draw_epsilons(axes: Any, rows: Sequence[Any]) -> None:
    swept = [row for row in rows if row.method in SWEPT and row.features in (SMALLER, LARGER)]
    epsilons = sorted({row.epsilon for row in swept})
    for method in SWEPT:
        for features, dash in ((SMALLER, ":"), (LARGER, "-")):
            values = [style.means(rows, PART, method=method, features=features, epsilon=e) for e in epsilons]
            name, look = LOOKS[method]
            axes.plot(epsilons, values, label=f"{name}, {features:,}", **look | {"linestyle": dash})
    price = [style.means(swept, "theorem_17_privacy", epsilon=e) for e in epsilons]
    axes.plot(epsilons, price, "--", color=style.INK, label="Theorem 17")
    axes.set_title("1,000 and 10,000 features")
    style.epsilon_axis(axes, epsilons)
    style.number_axis(axes, "test error, log scale", log=True, ticks=TICKS)
    axes.set_ylim(0.0005, 0.4)
