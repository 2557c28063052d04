"""The picture of `experiments.dp_clip`: zero-shot accuracy against epsilon, the paper's Table 1 beside it."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import numpy as np

PAPER = {  # Table 1 of paper 002: zero-shot accuracy of DP-CLIP from CLIP's ViT-L/14
    "fashion-mnist": {10.0: 0.9152, 3.0: 0.9127, 1.0: 0.9065, 0.5: 0.9002, 0.25: 0.8909},
    "cifar10": {10.0: 0.9574, 3.0: 0.9562, 1.0: 0.9481, 0.5: 0.9447, 0.25: 0.9351},
}
LOOK = {
    "bank": ("#1f5fa8", "o", "public bank, pairs clipped one by one"),
    "inside": ("#2e7d32", "^", "private negatives, clipped inside the loss"),
    "batch": ("#c0392b", "s", "per-batch clipping (Algorithm 1)"),
}
TITLES = {"cifar10": "CIFAR-10", "fashion-mnist": "Fashion-MNIST"}


def draw(points: Sequence[tuple[str, str, float, float]], path: Path) -> None:
    """One panel a dataset; points are (dataset, method, epsilon, accuracy)."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    datasets = [name for name in TITLES if any(point[0] == name for point in points)]
    figure, axes = plt.subplots(1, max(len(datasets), 1), figsize=(12, 4.6), layout="constrained", squeeze=False)
    for ax, dataset in zip(axes[0], datasets, strict=False):
        for method, (colour, mark, label) in LOOK.items():
            mean = _means(points, dataset, method)
            ax.plot(list(mean), [100 * v for v in mean.values()], color=colour, marker=mark, label=label)
        for method, style in (("bank, no noise", "--"), ("bank, no privacy", ":")):
            for accuracy in _means(points, dataset, method).values():
                ax.axhline(100 * accuracy, color="#1f5fa8", ls=style, lw=1, label=method)
        paper = PAPER[dataset]
        ax.plot(
            list(paper),
            [100 * v for v in paper.values()],
            color="#888888",
            marker="x",
            ls=":",
            label="paper, Table 1: from CLIP ViT-L/14,\ncharged at sigma, not sigma/2",
        )
        ax.axhline(10, color="#bbbbbb", lw=0.8)
        ax.text(0.25, 11.5, "guessing", color="#888888", fontsize=8)
        ax.set(xscale="log", xlabel="epsilon (delta 1/(2n), replace one pair)", title=TITLES[dataset], ylim=(0, 100))
        ax.set_xticks([0.25, 0.5, 1, 3, 10], ["0.25", "0.5", "1", "3", "10"])
        ax.minorticks_off()
    axes[0][0].set_ylabel("zero-shot accuracy, %")
    axes[0][0].legend(fontsize=8, loc="center right")
    figure.savefig(path, dpi=130)
    plt.close(figure)


def _means(points: Sequence[tuple[str, str, float, float]], dataset: str, method: str) -> dict[float, float]:
    found: dict[float, list[float]] = {}
    for name, by, epsilon, accuracy in points:
        if (name, by) == (dataset, method):
            found.setdefault(epsilon, []).append(accuracy)
    return {epsilon: float(np.mean(found[epsilon])) for epsilon in sorted(found)}
