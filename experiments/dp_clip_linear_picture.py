"""The picture of `experiments.dp_clip_linear`: errors of linear encoders against users and epsilon."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from experiments import style
from privrep.typing import Array

Lines = Mapping[str, tuple[Array, Array]]  # by name: where, and the mean error
LOOKS: Mapping[str, tuple[str, dict[str, Any]]] = {
    "one cross-moment": ("privrep: one cross-moment", style.OURS),
    "Algorithm 1, b = n/50": ("Algorithm 1, batches of a fiftieth", {"color": style.PAPER, "marker": "s"}),
    "Algorithm 1, b = 32": ("Algorithm 1, batches of 32", {"color": style.PAPER, "marker": "s", "linestyle": "--"}),
    "start": ("start of Algorithm 1", {"color": style.OTHER, "linestyle": ":"}),
    "no privacy": ("no privacy", {"color": style.NOT_PRIVATE, "linestyle": "--"}),
    "Theorem 5.1": ("Theorem 5.1, slope only", {"color": style.INK, "linestyle": "-", "linewidth": 0.9}),
    "the same, b = n/50 paid for": ("the same, batches paid for", {"color": style.INK, "ls": "-.", "linewidth": 0.9}),
}


def draw(by_users: Lines, by_epsilon: Lines, path: Path) -> None:
    """Draw one panel against users at epsilon 1, and one against epsilon with 16,000 users."""
    with style.picture(
        path,
        columns=2,
        panel=(6.4, 4.2),
        title="Linear contrastive loss on spiked pairs: 10 + 10 features, rank 2",
        note="Error: the larger of the two encoders' distances to the optimum, after the best common linear map. "
        "Delta 1e-6, replace one user, simulated noise.",
    ) as panels:
        for axes, lines, words, title in zip(
            panels.flat, (by_users, by_epsilon), ("users", "epsilon"), ("epsilon 1", "16,000 users"), strict=True
        ):
            for name, (label, look) in LOOKS.items():
                if name in lines:
                    axes.plot(*lines[name], label=label, **look)
            axes.set_title(title)
            style.epsilon_axis(axes, list(next(iter(lines.values()))[0]), words)
            style.number_axis(axes, "error, log scale", log=True, ticks=(0.03, 0.1, 0.3, 1.0))
