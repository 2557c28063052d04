"""The picture of `experiments.jester`: errors of ratings against epsilon."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from experiments import style

TARGETS = {0.3: 0.1600, 1.0: 0.1545, 3.0: 0.1530}  # NMAE at most
LEVELS = {
    "alone: own mean": ("each user's own mean", style.ALONE),
    "item + user mean": ("means of joke and user, not private", style.NOT_PRIVATE),
    "non-private ALS, best rank": ("factorisation of the best rank, not private", style.NOT_PRIVATE),
    "the same with next to no noise": ("privrep with next to no noise", style.NOT_PRIVATE),
}


def draw(rows: Sequence[Any], path: Path, targets: Mapping[float, float] = TARGETS) -> None:
    """Draw the error at each epsilon, levels of other ways, and targets as pale bars."""
    epsilons = sorted({row.epsilon for row in rows if row.epsilon is not None})
    splits = len({row.split for row in rows})
    with style.picture(
        path,
        panel=(9.0, 4.4),
        title="Ratings of jokes: 24,983 users, 100 jokes",
        note=f"Delta 1e-6, replace one user, everything charged, defaults; mean of {splits} splits, simulated noise.",
    ) as panels:
        axes = panels[0, 0]
        for number, (epsilon, most) in enumerate(targets.items()):
            label = "target (pale bars)" if number == len(targets) - 1 else None
            axes.plot([epsilon / 1.2, epsilon * 1.2], [most, most], label=label, **style.TARGET)
        ours = [style.means(rows, "nmae", epsilon=epsilon) for epsilon in epsilons]
        axes.plot(epsilons, ours, label=f"privrep {ours[-1]:.4f} at epsilon {epsilons[-1]:g}", **style.OURS)
        for method, (words, colour) in LEVELS.items():
            style.level(axes, style.means(rows, "nmae", method=method), words, colour=colour, digits=4)
        style.epsilon_axis(axes, epsilons)
        style.number_axis(axes, "mean absolute error of held-out ratings,\npart of the scale")
