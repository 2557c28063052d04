"""The picture of `experiments.writers`: errors of new writers and of training writers."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from experiments import style

SHADES = ("#aacfdd", "#6ea9c0", "#3a8bac", style.PRIVREP)  # by epsilon, the largest last
OTHERS = {
    "random U": ("random representation", "o:", style.OTHER),
    "alone": ("alone", "d-", style.ALONE),
    "no noise": ("privrep without noise, not private", "s--", style.NOT_PRIVATE),
    "pooled": ("one model for all, not private", "^--", style.INK),
}
ALONE = ("alone, logistic", "alone, mixture", "majority")


def draw(rows: Sequence[Any], path: Path) -> None:
    """Draw errors against labelled digits of a new writer, left, and against epsilon for training writers, right."""
    with style.picture(
        path,
        columns=2,
        panel=(6.4, 4.2),
        title="Handwritten digits by writer: error on a writer's other digits, log scale",
        note="Delta 1e-5, replace one user, everything charged; representation of rank 16, mean over seeds, "
        "simulated noise.",
    ) as panels:
        _draw_new(panels[0, 0], [row for row in rows if row.group == "new writers"])
        _draw_training(panels[0, 1], [row for row in rows if row.group == "training writers"])


def _draw_new(axes: Any, rows: Sequence[Any]) -> None:
    most = max(row.trained for row in rows)
    counts = sorted({row.labelled for row in rows})
    epsilons = sorted({row.epsilon for row in rows if row.method == "private"})
    for epsilon, colour in zip(epsilons, SHADES[-len(epsilons) :], strict=True):
        axes.plot(
            counts,
            [style.means(rows, "error", method="private", epsilon=epsilon, trained=most, labelled=n) for n in counts],
            **style.OURS | {"color": colour},
            label=f"privrep, epsilon {epsilon:g}",
        )
    for method, (words, look, colour) in OTHERS.items():
        errors = [
            _best_alone(rows, labelled=n) if method == "alone"
            else style.means(rows, "error", method=method, trained=most, labelled=n)
            for n in counts
        ]  # fmt: skip
        axes.plot(counts, errors, look, color=colour, label=words)
    axes.set_title(f"{int(max(row.writers for row in rows))} new writers")
    axes.set_xticks(counts, [f"{n:g}" for n in counts])
    axes.set_xlabel("labelled digits of a new writer")
    style.number_axis(axes, "error", log=True, ticks=(0.03, 0.05, 0.1, 0.2, 0.3, 0.5))


def _draw_training(axes: Any, rows: Sequence[Any]) -> None:
    epsilons = sorted({row.epsilon for row in rows if row.method == "private"})
    for trained, colour in zip(sorted({row.trained for row in rows}), (style.PALE, style.PRIVREP), strict=True):
        errors = [style.means(rows, "error", method="private", epsilon=e, trained=trained) for e in epsilons]
        axes.plot(epsilons, errors, **style.OURS | {"color": colour}, label=f"privrep, {trained:g} digits each")
        noiseless = style.means(rows, "error", method="no noise", trained=trained)
        style.level(axes, noiseless, f"without noise, not private, {trained:g} digits")
        style.level(axes, _best_alone(rows, trained=trained), f"alone, {trained:g} digits", colour=style.ALONE)
    axes.set_title(f"{int(max(row.writers for row in rows))} of 539 training writers")
    style.epsilon_axis(axes, epsilons)
    style.number_axis(axes, "error", log=True, ticks=(0.03, 0.05, 0.1, 0.2, 0.3))


def _best_alone(rows: Sequence[Any], **same: object) -> float:
    """Return the error of the best way of learning alone."""
    return min(style.means(rows, "error", method=method, **same) for method in ALONE)
