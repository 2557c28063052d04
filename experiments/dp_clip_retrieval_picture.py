"""The picture of `experiments.dp_clip_retrieval`: recall at 10 against epsilon."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from experiments import style

TITLES = {
    "text_at_10": "One of a photograph's captions in the first 10",
    "image_at_10": "A caption's photograph in the first 10",
}
CURVES: dict[str, tuple[str, dict[str, Any]]] = {
    "bank": ("privrep", style.OURS),
    "batch": ("clipping per batch (Algorithm 1)", {"color": style.PAPER, "marker": "s"}),
}
LEVELS = {"bank, no privacy": "no privacy", "public alone": "public photographs alone"}


def draw(rows: Sequence[Any], path: Path) -> None:
    """Draw a panel for each direction of retrieval."""
    epsilons = sorted({row.epsilon for row in rows if row.method == "bank"})
    with style.picture(
        path,
        columns=2,
        panel=(6.6, 3.9),
        title="Photographs and captions: recall among 1,000 photographs, %",
        note="A user is a photograph with its five captions; everything charged, simulated noise.",
    ) as panels:
        for axes, (number, title) in zip(panels.flat, TITLES.items(), strict=True):
            for method, (name, look) in CURVES.items():
                there = [e for e in epsilons if any((r.method, r.epsilon) == (method, e) for r in rows)]
                if there:
                    cut = f", to {there[-1]:g}" if there[-1] < epsilons[-1] else ""
                    values = [100 * style.means(rows, number, method=method, epsilon=e) for e in there]
                    axes.plot(there, values, label=name + cut, **look)
            for method, name in LEVELS.items():
                style.level(axes, 100 * style.means(rows, number, method=method), name, digits=1)
            axes.set_title(title)
            style.epsilon_axis(axes, epsilons)
            style.number_axis(axes, "recall at 10, %")
