"""The picture of `experiments.table1`, from mean accuracies alone."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

Key = tuple[str, int, float, str, str]  # dataset, clients, epsilon, method, configuration
COLOURS = {
    "stand-alone": "#888888",
    "DP-FedAvg-ft": "#c0392b",
    "PMTL-ft": "#e08e0b",
    "PPSGD": "#8e44ad",
    "CENTAUR": "#1f5fa8",
    "FedRep": "#2e7d32",
}
MARKS = {"paper": "o", "grid": "s", "default": "*"}
LINES = {"paper": "--", "grid": ":", "default": "-"}


def draw(means: Mapping[Key, tuple[float, float, int]], path: Path) -> None:
    """Left: every setting at the epsilon it was run with. Right: accuracy against epsilon, where there are several."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    figure, (left, right) = plt.subplots(
        1, 2, figsize=(14, 5.2), layout="constrained", gridspec_kw={"width_ratios": [2, 1]}
    )
    swept = _swept(means)
    settings = list(dict.fromkeys((d, n, e) for d, n, e, _, _ in sorted(means) if e == 1.0 or (d, n) not in swept))
    _settings(left, means, settings)
    for dataset, clients in sorted(swept):
        _against_epsilon(right, means, dataset, clients)
    if not swept:
        right.set_axis_off()
    figure.savefig(path, dpi=130)
    plt.close(figure)


def _swept(means: Mapping[Key, Any]) -> set[tuple[str, int]]:
    """Datasets and clients that were run with three epsilons or more."""
    epsilons: dict[tuple[str, int], set[float]] = {}
    for dataset, clients, epsilon, _, _ in means:
        epsilons.setdefault((dataset, clients), set()).add(epsilon)
    return {key for key, several in epsilons.items() if len(several) >= 3}


def _settings(ax: Any, means: Mapping[Key, tuple[float, float, int]], settings: list[tuple[str, int, float]]) -> None:
    shown: set[str] = set()
    for place, setting in enumerate(settings):
        here = [(key[3], key[4], value[0]) for key, value in means.items() if key[:3] == setting]
        for number, (method, configuration, accuracy) in enumerate(sorted(here)):
            label = f"{method}, {configuration}" + (", not private" if method == "FedRep" else "")
            ax.plot(
                place + 0.6 * ((number + 0.5) / len(here) - 0.5),
                100 * accuracy,
                MARKS[configuration],
                color=COLOURS[method],
                markersize=10 if configuration == "default" else 6,
                label=None if label in shown else label,
            )
            shown.add(label)
    names = [f"{d}\nn {n:,}" + (f"\neps {e:g}" if e != 1 else "") for d, n, e in settings]
    ax.set_xticks(range(len(settings)), names, fontsize=7)
    ax.set_ylabel("accuracy on clients' test images, %")
    ax.set_title("epsilon 1, delta 1e-5, user level, replace-one-user; simulated noise", loc="left", fontsize=10)
    ax.legend(fontsize=7, frameon=False, ncols=2)
    ax.spines[["top", "right"]].set_visible(False)


def _against_epsilon(ax: Any, means: Mapping[Key, tuple[float, float, int]], dataset: str, clients: int) -> None:
    curves: dict[tuple[str, str], list[tuple[float, float]]] = {}
    for (there, count, epsilon, method, configuration), (accuracy, _, _) in sorted(means.items()):
        if (there, count) == (dataset, clients) and method != "FedRep":
            curves.setdefault((method, configuration), []).append((epsilon, 100 * accuracy))
    for (method, configuration), points in curves.items():
        if method == "stand-alone":
            ax.axhline(points[0][1], color=COLOURS[method], linestyle=LINES[configuration], linewidth=1)
            ax.annotate(f"alone, {configuration}", (0.25, points[0][1]), (0, 2), textcoords="offset points", fontsize=7)
        elif len(points) >= 3:
            marks = MARKS[configuration] + LINES[configuration]
            ax.plot(*zip(*points, strict=True), marks, color=COLOURS[method], label=f"{method}, {configuration}")
    ax.set_xscale("log")
    ax.set_xticks([0.25, 0.5, 1, 2, 4], ["0.25", "0.5", "1", "2", "4"])
    ax.minorticks_off()
    ax.set_xlabel("epsilon")
    ax.set_title(f"{dataset}, {clients:,} clients", loc="left", fontsize=10)
    ax.legend(fontsize=7, frameon=False)
    ax.spines[["top", "right"]].set_visible(False)
