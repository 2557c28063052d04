"""What the runs of `experiments.tables` on labels should reach, next to what they reached."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace

from experiments.label_data import LABELS, LOGISTIC, TWO_ROWS, UNION
from experiments.label_runs import ANALYST, ORACLE, LabelScore
from experiments.tables_results import NAMES, Goal, Runs, Verdict, judge_goals, print_table
from experiments.tables_runs import DEFAULT, KINDS

FREQUENCY, POOLED, ALONE = "shrunk frequency", "pooled logistic", "alone"
LOG_LOSS, ECE = "log-loss", "expected calibration error"
OVER_SIMPLE = "log-loss over the best of shrunk frequency, alone and prior mean"
OVER_POOLED = "log-loss over the better of shrunk frequency and pooled logistic"
OVER_ANALYST = "log-loss over the analyst's"
BELOW_ORACLE = "points of accuracy below heads on the true U"
NOTHING = (None, None, None)
GOALS = (
    Goal(LOG_LOSS, "test", {UNION: (0.340, 0.333, 0.328)}),
    Goal(OVER_POOLED, "test", {TWO_ROWS: (None, 1.0, None)}),
    Goal(BELOW_ORACLE, "test", {LOGISTIC: (None, 0.5, None)}),
    Goal(OVER_SIMPLE, "test", dict.fromkeys(LABELS, (1.005, 1.005, 1.005))),
    *(Goal(OVER_ANALYST, kind, dict.fromkeys(LABELS, NOTHING)) for kind in KINDS),
    *(Goal(ECE, kind, dict.fromkeys(LABELS, NOTHING)) for kind in KINDS),
)


class LabelResults(Runs[LabelScore]):
    """Scores on panels of labels, by what they are of."""

    def measure(self, name: str) -> Callable[[LabelScore, str], float | None]:
        return {
            LOG_LOSS: lambda score, kind: getattr(score, kind),
            ECE: lambda score, kind: getattr(score, f"ece_{kind}"),
            OVER_SIMPLE: self.over_simple,
            OVER_POOLED: self.over_pooled,
            OVER_ANALYST: self.over_analyst,
            BELOW_ORACLE: self.below_oracle,
        }[name]

    def over_simple(self, score: LabelScore, kind: str) -> float | None:
        """Return log-loss of test rows over the best simple one's; the prior mean counts where it is known."""
        simple = [float(getattr(self.same(score, name), kind)) for name in (FREQUENCY, ALONE)]
        prior = [] if score.prior is None else [score.prior]
        return _over(getattr(score, kind), min([*simple, *prior]))

    def over_pooled(self, score: LabelScore, kind: str) -> float | None:
        best = min(float(getattr(self.same(score, name), kind)) for name in (FREQUENCY, POOLED))
        return _over(getattr(score, kind), best)

    def over_analyst(self, score: LabelScore, kind: str) -> float | None:
        return _over(getattr(score, kind), getattr(self.same(score, ANALYST, score.epsilon), kind))

    def below_oracle(self, score: LabelScore, kind: str) -> float | None:
        field = f"accuracy_{kind}"
        return 100 * float(getattr(self.same(score, ORACLE), field) - getattr(score, field))


def _over(value: float | None, best: float) -> float | None:
    return None if value is None else float(value / best)


def judge_labels(results: LabelResults, quick: bool = False) -> Iterator[Verdict]:
    """Yield what is asked of labels, and how privrep does against the analyst, of which nothing is asked.

    Nothing is asked of made-up populations in a quick run, which has few of their users.
    """
    for verdict in judge_goals(GOALS, results, DEFAULT):
        small = quick and verdict.population in (TWO_ROWS, LOGISTIC)
        yield replace(verdict, most=None, met="") if small else verdict


def print_labels(results: LabelResults) -> None:
    """Print log-loss, accuracy and calibration error, means over seeds, of everybody on every panel."""
    for title, start in (("log-loss", ""), ("accuracy", "accuracy_"), (ECE, "ece_")):
        print_table(results, title, {f"{start}{kind}": name for kind, name in NAMES.items()})
