"""The picture of `experiments.classes`: excess log-loss against epsilon, next to what one does without privacy."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from experiments import style

TITLES = {
    "two classes": "Two classes: 20,000 users, 20 rows each",
    "five classes": "Five classes: 10,000 users, 30 rows each",
}
OWN = ("alone, logistic", "own class frequencies", "alone, mixture")
LEAST = 2e-4  # of an excess that is drawn: heads of private runs can be better than those of the truth
LEVELS = {
    "pooled": "one model for all, not private",
    "alone, logistic": "alone, logistic",
    "majority": "own class frequencies",
    "alone, mixture": "alone, mixture",
    "FedRep": "FedRep, not private",
}


def draw(rows: Sequence[Any], path: Path) -> None:
    """Draw a panel for each population. The axis is logarithmic, since most of the range is far from privrep."""
    with style.picture(
        path,
        columns=2,
        panel=(6.2, 4.0),
        title="Labels: expected log-loss above heads on the true representation",
        note="Delta 1e-6, replace one user, everything charged, defaults; mean over seeds, simulated noise.\n"
        f"An excess below {LEAST:g} is drawn there.",
    ) as panels:
        for axes, (population, title) in zip(panels.flat, TITLES.items(), strict=True):
            here = [row for row in rows if row.population == population]
            epsilons = sorted({row.epsilon for row in here if row.method == "private"})
            best = style.means(here, "log_loss", method="oracle")
            losses = [style.means(here, "log_loss", method="private", epsilon=e) for e in epsilons]
            axes.plot(epsilons, [max(loss - best, LEAST) for loss in losses], label="privrep", **style.OURS)
            for method, words in LEVELS.items():
                value = style.means(here, "log_loss", method=method) - best
                style.level(axes, value, words, colour=style.ALONE if words in OWN else style.NOT_PRIVATE, digits=4)
            axes.set_title(title)
            style.epsilon_axis(axes, epsilons)
            style.number_axis(axes, "excess log-loss, log scale", log=True)
