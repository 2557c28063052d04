"""What the runs of `experiments.tables` on ratings should reach, next to what they reached."""

from __future__ import annotations

from collections.abc import Callable, Iterator

from experiments.rating_data import FILMS, JOKES, SOURCES
from experiments.rating_references import USER_MEAN
from experiments.rating_runs import ANALYST, FACTORIZATION, RatingScore
from experiments.tables_results import NAMES, Goal, Runs, Verdict, judge_goals, print_table
from experiments.tables_runs import KINDS

RMSE, NMAE = "RMSE", "NMAE"
OVER_SIMPLE = "RMSE over the better of user mean shrunk and prior mean"
OVER_ANALYST = "RMSE over the analyst's"
NOTHING = (None, None, None)
GOALS = (
    Goal(RMSE, "test", {FILMS: (None, 1.025, 0.99)}),
    Goal(NMAE, "test", {JOKES: (0.1600, 0.1545, 0.153)}),
    Goal(OVER_SIMPLE, "test", dict.fromkeys(SOURCES, (1.005, 1.005, 1.005))),
    *(Goal(OVER_ANALYST, kind, dict.fromkeys(SOURCES, NOTHING)) for kind in KINDS),
)


class RatingResults(Runs[RatingScore]):
    """Scores on ratings, by what they are of."""

    def measure(self, name: str) -> Callable[[RatingScore, str], float | None]:
        return {
            RMSE: lambda score, kind: getattr(score, kind),
            NMAE: lambda score, kind: getattr(score, f"nmae_{kind}"),
            OVER_SIMPLE: self.over_simple,
            OVER_ANALYST: self.over_analyst,
        }[name]

    def over_simple(self, score: RatingScore, kind: str) -> float | None:
        """Return RMSE of test ratings over the better simple one's; the prior mean counts where it is known."""
        simple = float(getattr(self.same(score, USER_MEAN), kind))
        return float(getattr(score, kind) / min(simple, simple if score.prior is None else score.prior))

    def over_analyst(self, score: RatingScore, kind: str) -> float | None:
        value = getattr(score, kind)
        return None if value is None else float(value / getattr(self.same(score, ANALYST, score.epsilon), kind))


def judge_ratings(results: RatingResults) -> Iterator[Verdict]:
    """Yield what is asked of ratings, and how privrep does against the analyst, of which nothing is asked."""
    return judge_goals(GOALS, results, FACTORIZATION)


def print_ratings(results: RatingResults) -> None:
    """Print RMSE and NMAE, means over seeds, of everybody."""
    for title, start in ((RMSE, ""), (NMAE, "nmae_")):
        print_table(results, title, {f"{start}{kind}": name for kind, name in NAMES.items()})
