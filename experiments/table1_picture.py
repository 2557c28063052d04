"""The picture of `experiments.table1`: accuracies by setting, and against epsilon where there are several."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from experiments import style

Key = tuple[str, int, float, str, str]  # dataset, clients, epsilon, method, configuration
Means = Mapping[Key, tuple[float, float, int]]
COLOURS = {
    "CENTAUR": style.PRIVREP,
    "DP-FedAvg-ft": style.PAPER,
    "PMTL-ft": style.ANALYST,
    "PPSGD": "#4d8c57",
    "stand-alone": style.ALONE,
    "FedRep": style.INK,
}
WORDS = {
    "CENTAUR": "CENTAUR",
    "DP-FedAvg-ft": "DP-FedAvg, fine-tuned",
    "PMTL-ft": "PMTL, fine-tuned",
    "PPSGD": "PPSGD",
    "stand-alone": "alone",
    "FedRep": "FedRep, not private",
}
MARKS = {"default": "o", "grid": "s", "paper": "D"}
LINES = {"default": "-", "grid": "--", "paper": ":"}
CONFIGURATIONS = {"default": "", "grid": ", best of a grid", "paper": ", as in its paper"}


def means(rows: Iterable[Any]) -> dict[Key, tuple[float, float, int]]:
    """Return mean accuracy over seeds, its standard error and the number of seeds, by all that a run is told."""
    found: dict[Key, list[float]] = {}
    for row in rows:
        key = (row.dataset, row.clients, row.epsilon, row.method, row.configuration)
        found.setdefault(key, []).append(row.accuracy)
    return {
        key: (float(np.mean(a)), float(np.std(a, ddof=1) / np.sqrt(len(a))) if len(a) > 1 else float("nan"), len(a))
        for key, a in found.items()
    }


def draw(means: Means, path: Path) -> None:
    """Draw every setting, a line of dots each, and the accuracy against epsilon of one that has several."""
    swept = _swept(means)
    settings = [(d, n, e) for d, n, e, _, _ in sorted(means) if e == 1.0 or (d, n) not in swept]
    settings = list(dict.fromkeys(settings))
    with style.picture(
        path,
        rows=1 + len(swept[:2]),
        panel=(10.0, max(3.6, 0.55 * len(settings) + 1.0)),
        title="Images: accuracy on clients' test images, %",
        note="Delta 1e-5, replace one user, everything charged; simulated noise. No dot: not measured.",
    ) as panels:
        _draw_settings(panels[0, 0], means, settings)
        for axes, (dataset, clients) in zip(panels.flat[1:], swept[:2], strict=True):
            _draw_epsilons(axes, means, dataset, clients)


def _swept(means: Mapping[Key, Any]) -> list[tuple[str, int]]:
    """Return datasets and clients that were run with three epsilons or more."""
    epsilons: dict[tuple[str, int], set[float]] = {}
    for dataset, clients, epsilon, _, _ in means:
        epsilons.setdefault((dataset, clients), set()).add(epsilon)
    return sorted(key for key, several in epsilons.items() if len(several) >= 3)


def _name(method: str, configuration: str) -> str:
    return "privrep's default" if configuration == "default" else WORDS[method] + CONFIGURATIONS[configuration]


def _draw_settings(axes: Any, means: Means, settings: Sequence[tuple[str, int, float]]) -> None:
    shown: dict[str, Any] = {}
    for row, setting in enumerate(settings):
        axes.axhline(row, color=style.FAINT, linewidth=1, zorder=0)
        for (*here, method, configuration), (accuracy, _, _) in sorted(means.items()):
            if tuple(here) == setting:
                (dot,) = axes.plot(
                    100 * accuracy, row, MARKS[configuration], color=COLOURS[method],
                    markersize=9 if configuration == "default" else 6, zorder=6 if configuration == "default" else 3,
                )  # fmt: skip
                shown.setdefault(_name(method, configuration), dot)
    names = sorted(shown, key=lambda name: (not name.startswith("privrep"), name))
    axes.legend([shown[name] for name in names], names, loc="center left", bbox_to_anchor=(1.02, 0.5))
    labels = [f"{d}, {n:,} users" + (f",\nepsilon {e:g}" if e != 1 else "") for d, n, e in settings]
    axes.set_yticks(range(len(settings)), labels)
    axes.tick_params(axis="y", length=0)
    axes.invert_yaxis()
    axes.margins(y=0.12)
    axes.spines["left"].set_visible(False)
    axes.set_xlabel("accuracy, %")
    axes.set_title("epsilon 1 where nothing else is said")


def _draw_epsilons(axes: Any, means: Means, dataset: str, clients: int) -> None:
    curves: dict[tuple[str, str], list[tuple[float, float]]] = {}
    for (there, count, epsilon, method, configuration), (accuracy, _, _) in sorted(means.items()):
        if (there, count) == (dataset, clients):
            curves.setdefault((method, configuration), []).append((epsilon, 100 * accuracy))
    for (method, configuration), points in curves.items():
        name, colour = _name(method, configuration), COLOURS[method]
        if method in ("stand-alone", "FedRep"):
            style.level(axes, points[0][1], name, colour=colour, style=LINES[configuration], digits=1)
        elif len(points) >= 3:
            mark = MARKS[configuration] + LINES[configuration]
            axes.plot(*zip(*points, strict=True), mark, color=colour, label=name)
    axes.set_title(f"{dataset}, {clients:,} users")
    style.epsilon_axis(axes, sorted({e for d, n, e, _, _ in means if (d, n) == (dataset, clients)}))
    style.number_axis(axes, "accuracy, %")
