"""Results of the parts of `experiments.tables`: scores by what they are of, targets, verdicts, and their print."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import product
from typing import Generic, Protocol, TypeVar

import numpy as np

from experiments.tables_runs import EPSILONS

NAMES = {"test": "test rows", "newcomers": "newcomers with three rows", "strangers": "newcomers with none"}


class ScoreLike(Protocol):
    """A line of a CSV: one method on one split of one panel."""

    @property
    def panel(self) -> str: ...
    @property
    def users(self) -> int: ...
    @property
    def seed(self) -> int: ...
    @property
    def method(self) -> str: ...
    @property
    def epsilon(self) -> float | None: ...


class FigureLike(Protocol):
    """A number that runs have, for rows of one kind."""

    @property
    def measure(self) -> str: ...
    @property
    def kind(self) -> str: ...
    def most(self, panel: str, epsilon: float) -> float | None:
        """Return the most that is asked for, if anything is."""
        ...


S = TypeVar("S", bound=ScoreLike)


class Runs(ABC, Generic[S]):
    """Scores by what they are of."""

    def __init__(self, scores: Iterable[S]) -> None:
        self.scores = {(s.panel, s.seed, s.method, s.epsilon): s for s in scores}

    def panels(self) -> list[str]:
        return list(dict.fromkeys(panel for panel, *_ in self.scores))

    def of(self, panel: str, method: str, epsilon: float | None) -> list[S]:
        """Return the scores of all seeds."""
        return [s for (p, _, m, e), s in self.scores.items() if (p, m, e) == (panel, method, epsilon)]

    def same(self, score: S, method: str, epsilon: float | None = None) -> S:
        """Return the score of another method on the same split."""
        return self.scores[score.panel, score.seed, method, epsilon]

    @abstractmethod
    def measure(self, name: str) -> Callable[[S, str], float | None]:
        """Return what makes a number of a score and a kind of rows; None where a run has no such number."""

    def values(self, figure: FigureLike, panel: str, method: str, epsilon: float | None) -> list[float]:
        """Return the figure's number for each seed that has it."""
        measure = self.measure(figure.measure)
        found = (measure(score, figure.kind) for score in self.of(panel, method, epsilon))
        return [value for value in found if value is not None]


@dataclass(frozen=True)
class Goal:
    """A number that runs have, and what it should be at most, by panel and at each epsilon."""

    measure: str
    kind: str  # of rows
    asked: Mapping[str, tuple[float | None, ...]]  # other panels have no such number

    @property
    def name(self) -> str:
        return f"{NAMES[self.kind]}: {self.measure}"

    def most(self, panel: str, epsilon: float) -> float | None:
        return self.asked[panel][EPSILONS.index(epsilon)] if panel in self.asked else None


def judge_goals(goals: Sequence[Goal], results: Runs[S], method: str) -> Iterator[Verdict]:
    """Yield what was measured next to what is asked for: the mean over seeds."""
    for goal, panel, epsilon in product(goals, results.panels(), EPSILONS):
        values = results.values(goal, panel, method, epsilon) if panel in goal.asked else []
        if values:
            most, mean = goal.most(panel, epsilon), float(np.mean(values))
            met = "" if most is None else "yes" if mean <= most else "NO"
            yield Verdict(goal.name, panel, method, epsilon, None, most, mean, max(values), met)


@dataclass(frozen=True)
class Verdict:
    """A target and what was measured: the mean over seeds, and the worst of them."""

    figure: str
    population: str
    method: str
    epsilon: float
    least: float | None  # None: as little as may be
    most: float | None  # None: nothing is asked for
    mean: float
    worst: float
    met: str  # "yes" or "NO"; empty where nothing is asked for


def print_table(results: Runs[S], title: str, columns: Mapping[str, str]) -> None:
    """Print fields of scores, mean over seeds, of everybody on every panel: names by fields."""
    methods = list(dict.fromkeys((method, epsilon) for _, _, method, epsilon in results.scores))
    for panel in results.panels():
        print(f"\n{panel}: {title} of " + ", ".join(columns.values()))
        for method, epsilon in sorted(methods, key=lambda pair: pair[1] or 0.0):
            scores = results.of(panel, method, epsilon)
            if scores:
                cells = ([getattr(score, field) for score in scores] for field in columns)
                shown = method if epsilon is None else f"{method}, epsilon {epsilon:g}"
                print(f"  {shown:40}" + "".join(_mean(values) for values in cells))


def _mean(values: Sequence[float | None]) -> str:
    known = [value for value in values if value is not None]
    return f"{np.mean(known):10.4f}" if known else f"{'-':>10}"


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
