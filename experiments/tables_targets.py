"""What the runs of `experiments.tables` should reach, next to what they reached."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import product

import numpy as np

from experiments.tables_data import PANELS
from experiments.tables_results import NAMES, Runs, Verdict, print_table
from experiments.tables_runs import ANALYST, DEFAULT, EPSILONS, KINDS, PRIVREP, SHARE, Score
from experiments.tables_synthetic import ORACLE, Ratio

MIXED = ("mixed model, intercepts", "mixed model, slopes")
POOLED = "pooled ridge"
OVER_MIXED, OVER_POOLED, OVER_ANALYST = "over the better mixed model", "over the pooled ridge", "over the analyst"
COVERED = "in 90% intervals"
MOST = {  # at each epsilon
    (OVER_MIXED, "test"): (1.08, 1.02, 1.01),
    (OVER_MIXED, "newcomers"): (1.12, 1.05, 1.03),
    (OVER_POOLED, "strangers"): (1.06, 1.03, 1.02),
}
COVERAGE = (0.87, 0.93)


@dataclass(frozen=True)
class Figure:
    """A number that every private run has, and its target."""

    measure: str
    kind: str  # of rows
    worst: bool = False  # whether the worst seed counts, or the mean over seeds

    @property
    def name(self) -> str:
        return f"{NAMES[self.kind]} {self.measure}"

    def range(self, epsilon: float) -> tuple[float, float]:
        """Return the least and the most that is asked for."""
        if self.measure == COVERED:
            return COVERAGE
        if self.measure == OVER_ANALYST:
            return 0.0, 1.0
        return 0.0, MOST[self.measure, self.kind][EPSILONS.index(epsilon)]

    def most(self, panel: str, epsilon: float) -> float | None:
        """Return the most that is asked for; None for panels with fewer users."""
        return self.range(epsilon)[1] if panel in PANELS else None


FIGURES = (
    *(Figure(*key) for key in MOST),
    *(Figure(OVER_ANALYST, kind, worst=True) for kind in KINDS),
    *(Figure(COVERED, kind) for kind in KINDS),
)


class Results(Runs[Score]):
    """Scores on panels of numbers, by what they are of."""

    def over_mixed(self, score: Score, kind: str) -> float:
        """Return RMSE over that of the better mixed model: on the same split, for rows of this kind."""
        return float(getattr(score, kind) / min(getattr(self.same(score, name), kind) for name in MIXED))

    def over_pooled(self, score: Score, kind: str) -> float:
        return float(getattr(score, kind) / getattr(self.same(score, POOLED), kind))

    def over_analyst(self, score: Score, kind: str) -> float:
        return float(getattr(score, kind) / getattr(self.same(score, ANALYST, score.epsilon), kind))

    def measure(self, name: str) -> Callable[[Score, str], float]:
        """Return what makes a number of a score and a kind of rows."""
        if name == COVERED:
            return lambda score, kind: float(getattr(score, f"cover_{kind}"))
        return {OVER_MIXED: self.over_mixed, OVER_POOLED: self.over_pooled, OVER_ANALYST: self.over_analyst}[name]


def judge_panels(results: Results) -> Iterator[Verdict]:
    """Yield what is asked of the panels, and the same numbers of panels with fewer users, of which nothing is asked."""
    for figure, method, panel, epsilon in product(FIGURES, PRIVREP, results.panels(), EPSILONS):
        values = results.values(figure, panel, method, epsilon)
        if values:
            yield judge(figure, panel, method, epsilon, values)


def judge(figure: Figure, panel: str, method: str, epsilon: float, values: Sequence[float]) -> Verdict:
    """Return the verdict of values over seeds. Coverage is the worse the farther it is from 90%."""
    least, most = figure.range(epsilon)
    mean = float(np.mean(values))
    worst = max(values, key=lambda value: abs(value - SHARE)) if figure.measure == COVERED else max(values)
    if panel not in PANELS:
        return Verdict(figure.name, panel, method, epsilon, None, None, mean, worst, "")
    met = "yes" if least <= (worst if figure.worst else mean) <= most else "NO"
    return Verdict(figure.name, panel, method, epsilon, least, most, mean, worst, met)


def judge_synthetic(ratios: Sequence[Ratio]) -> Iterator[Verdict]:
    """Yield what is asked of synthetic populations: the mean over seeds."""
    for population, rank, epsilon in dict.fromkeys((r.population, r.rank, r.epsilon) for r in ratios):
        same = [r for r in ratios if (r.population, r.rank, r.epsilon) == (population, rank, epsilon)]
        values, most = [r.ratio for r in same], same[0].target
        against = ORACLE if same[0].against == ORACLE else "the best of user mean, alone and prior mean"
        mean, method = float(np.mean(values)), f"{DEFAULT}, rank {rank}"
        met = "" if most is None else "yes" if mean <= most else "NO"
        least = None if most is None else 0.0
        yield Verdict(f"MSE over {against}", population, method, epsilon, least, most, mean, max(values), met)


def print_errors(results: Results) -> None:
    """Print RMSE, mean over seeds, of everybody on every panel."""
    print_table(results, "RMSE", NAMES)
