"""What the runs of `experiments.tables` should reach, next to what they reached."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import product

import numpy as np

from experiments.tables_data import PANELS
from experiments.tables_runs import ANALYST, DEFAULT, EPSILONS, KINDS, PRIVREP, SHARE, Score
from experiments.tables_synthetic import ORACLE, Ratio

MIXED = ("mixed model, intercepts", "mixed model, slopes")
POOLED = "pooled ridge"
NAMES = {"test": "test rows", "newcomers": "newcomers with three rows", "strangers": "newcomers with none"}
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


FIGURES = (
    *(Figure(*key) for key in MOST),
    *(Figure(OVER_ANALYST, kind, worst=True) for kind in KINDS),
    *(Figure(COVERED, kind) for kind in KINDS),
)


@dataclass(frozen=True)
class Verdict:
    """A target and what was measured: the mean over seeds, and the worst of them."""

    figure: str
    population: str
    method: str
    epsilon: float
    least: float | None  # None, and most too: nothing is asked for
    most: float | None
    mean: float
    worst: float
    met: str  # "yes" or "NO"; empty where nothing is asked for


class Results:
    """Scores by what they are of."""

    def __init__(self, scores: Iterable[Score]) -> None:
        self.scores = {(s.panel, s.seed, s.method, s.epsilon): s for s in scores}

    def panels(self) -> list[str]:
        return list(dict.fromkeys(panel for panel, *_ in self.scores))

    def of(self, panel: str, method: str, epsilon: float | None) -> list[Score]:
        """Return the scores of all seeds."""
        return [s for (p, _, m, e), s in self.scores.items() if (p, m, e) == (panel, method, epsilon)]

    def over_mixed(self, score: Score, kind: str) -> float:
        """Return RMSE over that of the better mixed model: on the same split, for rows of this kind."""
        return float(getattr(score, kind) / min(getattr(self.same(score, name), kind) for name in MIXED))

    def over_pooled(self, score: Score, kind: str) -> float:
        return float(getattr(score, kind) / getattr(self.same(score, POOLED), kind))

    def over_analyst(self, score: Score, kind: str) -> float:
        return float(getattr(score, kind) / getattr(self.same(score, ANALYST, score.epsilon), kind))

    def same(self, score: Score, method: str, epsilon: float | None = None) -> Score:
        """Return the score of another method on the same split."""
        return self.scores[score.panel, score.seed, method, epsilon]

    def measure(self, name: str) -> Callable[[Score, str], float]:
        """Return what makes a number of a score and a kind of rows."""
        if name == COVERED:
            return lambda score, kind: float(getattr(score, f"cover_{kind}"))
        return {OVER_MIXED: self.over_mixed, OVER_POOLED: self.over_pooled, OVER_ANALYST: self.over_analyst}[name]

    def values(self, figure: Figure, panel: str, method: str, epsilon: float) -> list[float]:
        """Return the figure's number for each seed."""
        measure = self.measure(figure.measure)
        return [measure(score, figure.kind) for score in self.of(panel, method, epsilon)]


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
    methods = list(dict.fromkeys((method, epsilon) for _, _, method, epsilon in results.scores))
    for panel in results.panels():
        print(f"\n{panel}: RMSE of " + ", ".join(NAMES.values()))
        for method, epsilon in sorted(methods, key=lambda pair: pair[1] or 0.0):
            scores = results.of(panel, method, epsilon)
            if scores:
                means = (np.mean([getattr(score, kind) for score in scores]) for kind in KINDS)
                shown = method if epsilon is None else f"{method}, epsilon {epsilon:g}"
                print(f"  {shown:40}" + "".join(f"{mean:10.4f}" for mean in means))


def print_verdicts(verdicts: Sequence[Verdict]) -> None:
    """Print a line for each figure, method and population: mean (worst seed) and target at each epsilon."""
    for figure in dict.fromkeys(v.figure for v in verdicts):
        print(f"\n{figure}: mean (worst seed), target")
        chosen = [v for v in verdicts if v.figure == figure]
        width = max(len(f"{v.method}  {v.population}") for v in chosen)
        for method, population in dict.fromkeys((v.method, v.population) for v in chosen):
            same = [v for v in chosen if (v.method, v.population) == (method, population)]
            cells = "".join(f"   epsilon {v.epsilon:<4g}{_words(v):36}" for v in same)
            print(f"  {f'{method}  {population}':{width}}{cells}".rstrip())


def _words(verdict: Verdict) -> str:
    mean, worst = (f"{value:.4f}" if value < 10 else f"{value:.4g}" for value in (verdict.mean, verdict.worst))
    measured = f"{mean} ({worst})"
    if not verdict.met:
        return measured
    target = f"{verdict.least:g} to {verdict.most:g}" if verdict.least else f"{verdict.most:g}"
    return f"{measured}, {target}: {verdict.met}"
