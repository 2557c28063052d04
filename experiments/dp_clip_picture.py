"""The picture of `experiments.dp_clip`: zero-shot accuracy against epsilon, the paper's Table 1 beside it."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from experiments import style

PAPER = {  # Table 1 of paper 002: zero-shot accuracy of DP-CLIP from CLIP's ViT-L/14
    "fashion-mnist": {10.0: 0.9152, 3.0: 0.9127, 1.0: 0.9065, 0.5: 0.9002, 0.25: 0.8909},
    "cifar10": {10.0: 0.9574, 3.0: 0.9562, 1.0: 0.9481, 0.5: 0.9447, 0.25: 0.9351},
}
LOOKS: dict[str, tuple[str, dict[str, Any]]] = {
    "bank": ("privrep", style.OURS),
    "inside": ("private negatives, clipped in the loss", style.OURS | {"color": style.PALE, "marker": "^"}),
    "batch": ("clipping per batch (Algorithm 1)", {"color": style.PAPER, "marker": "s"}),
}
LEVELS = {"bank, no noise": "privrep without noise", "bank, no privacy": "no privacy"}
TITLES = {"cifar10": "CIFAR-10", "fashion-mnist": "Fashion-MNIST"}


def draw(rows: Sequence[Any], path: Path) -> None:
    """Draw one panel a dataset. Rows have dataset, method, epsilon and accuracy."""
    datasets = [name for name in TITLES if any(row.dataset == name for row in rows)]
    with style.picture(
        path,
        columns=len(datasets),
        panel=(6.6, 4.2),
        title="Pairs of images and texts: zero-shot accuracy, %",
        note="Delta 1 / (2 n), replace one pair, everything charged; guessing gives 10%. The paper starts from CLIP "
        "ViT-L/14, and its epsilons take its noise for twice as large as it counts.",
    ) as panels:
        for axes, dataset in zip(panels.flat, datasets, strict=True):
            here = [row for row in rows if row.dataset == dataset]
            for method, (name, look) in LOOKS.items():
                there = sorted({row.epsilon for row in here if row.method == method})
                values = [100 * style.means(here, "accuracy", method=method, epsilon=e) for e in there]
                axes.plot(there, values, label=name, **look)
            for method, name in LEVELS.items():
                style.level(axes, 100 * style.means(here, "accuracy", method=method), name, digits=1)
            paper = dict(sorted(PAPER[dataset].items()))
            axes.plot(
                list(paper), [100 * v for v in paper.values()], "x:", color=style.OTHER, label="paper, another network"
            )
            axes.set_title(TITLES[dataset])
            style.epsilon_axis(axes, sorted(paper))
            style.number_axis(axes, "zero-shot accuracy, %")
