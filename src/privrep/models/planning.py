"""Plans of a fit before any data is seen: how its budget is split, and the error of the representation it finds.

`models.forecast` predicts the error of predictions. Here is the error of U. The prediction follows the algorithm's own
recursion with what is public. The noise of every release is known from the budget. The signal is known, too, for a
population as the papers have it: features of unit variance without correlation, heads alike in all directions of the
representation. All is in units of the signal: what users' own slopes add to a target has variance one. With e the
mean squared sine between learned and true directions:

  start    a user sends a matrix of norm one, of which a part 1/(k |Z|) points along each true direction; the noise of
           the release has operator norm sigma sqrt(d/2), and e = (noise / signal)^2
  round    gradients, clipped to about their own size |g|, are divided by the second moment of the heads; what noise
           this leaves in a direction has energy N = (d - k) (2 |g| / (mu_t n (lambda + h)))^2, h the error of a user's
           head, and the step keeps t/(t + N) of itself, t = e/(1 - e)
  sizes    the first histogram is legible if users outnumber its noise's deviation by ten; if not, nothing is learned
  at last  few rows in all leave (d - k) k R^2 / (n m), with or without privacy

The formulas were derived, not fitted, except for the ten above, chosen on simulated fits. Of 65 other simulated fits
that found something (3 to 50 features, rank 1 to 3, 3 to 15 rows, epsilon 0.3 to 3), nine in ten found U as well as
0.46 to 1.83 times their users should have. Correlated features and heads that favour some directions are not modelled.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

from privrep.errors import InputError
from privrep.linear.alternation import FOR_CLASSES, FOR_NUMBERS, AlternationSettings
from privrep.linear.labels import HEADS, LabelsSettings
from privrep.linear.numbers import NumbersSettings
from privrep.privacy.accounting import compute_epsilon
from privrep.privacy.events import Gaussian, Relation
from privrep.privacy.ledger import Budget, noise_multiplier

HISTOGRAMS = 5  # sizes and users' means, of features and of targets, and numbers of rows


@dataclass(frozen=True)
class PlannedPart:
    """A part of a default fit of numbers: its purpose, its pages, its share of mu^2, and its noise were it one
    release."""

    purpose: str
    pages: tuple[str, ...]
    share: float
    noise_multiplier: float


def plan_parts(budget: Budget, settings: NumbersSettings | None = None) -> list[PlannedPart]:
    """Return the parts of a default fit of numbers with users enough for every release.

    With fewer users histograms take more, at most `PanelSettings.histogram` each, and rounds less.
    """
    s = settings or NumbersSettings()
    shares = {
        "where columns lie": HISTOGRAMS * s.panel.histogram[0],
        "correlations": s.panel.moments,
        "common slopes, first step": s.common,
        "start of the representation": s.start,
        "whether users' slopes differ": s.look + s.first_families,
        "rounds, and common slopes again": 0.0,
        "how far users differ": s.families,
        "how large errors are": s.calibration,
    }
    rest = 1 - math.fsum(shares.values())
    total = budget.mu**2
    return [
        PlannedPart(purpose, PARTS[purpose], share or rest, noise_multiplier((share or rest) * total))
        for purpose, share in shares.items()
    ]


PARTS = {  # and how names of their pages begin
    "where columns lie": ("scales", "levels", "target"),
    "correlations": ("covariance", "frequencies"),
    "common slopes, first step": ("common-1", "common-look"),
    "start of the representation": ("moments", "pairs", "power"),
    "whether users' slopes differ": ("spreads-0", "families-0", "families-look"),
    "rounds, and common slopes again": ("round", "strong", "residuals", "altmin", "centaur", "spreads-1", "common"),
    "how far users differ": ("spreads", "families"),
    "how large errors are": ("calibration",),
}


def find_part(page: str) -> str:
    """Return the part of a default fit of numbers that a page belongs to; the empty string where there is none."""
    fitting = [(len(start), part) for part, starts in PARTS.items() for start in starts if page.startswith(start)]
    return max(fitting)[1] if fitting else ""


@dataclass(frozen=True)
class Plan:
    """The plan that a forecast makes of a default fit: how its budget is split, and its rounds."""

    shares: NumbersSettings | LabelsSettings
    rounds: AlternationSettings
    histograms: int
    other: float  # share of mu^2 for what is asked beside prior mean, rounds and families
    steps: tuple[float, ...]  # of the rest, each step on common slopes where there are no rounds
    clipped: float  # squared norm that a gradient is clipped to, curvature included, over its mean square
    heard: float  # standard deviations of its noise, times the root of two, that a histogram must have
    level: float = 0.0  # share of mu^2 for how far levels vary, where that is asked for by itself
    heads: float | None = None  # variance of slopes along U where losses cannot tell; None: then slopes are common

    def rest(self, rank: int | None) -> float:
        """Return the share of mu^2 that is left for rounds and later steps. A rank of 0 needs no start and no doubt."""
        s = self.shares
        fixed = (
            self.histograms * s.panel.histogram[0] + s.panel.moments + s.common + s.families + self.other + self.level
        )
        return 1 - fixed - (s.start + s.look + s.first_families if rank != 0 else 0.0)


NUMBERS = Plan(NumbersSettings(), FOR_NUMBERS, HISTOGRAMS, NumbersSettings().calibration, (0.4, 0.6), 1.3, 10.0)
_L = LabelsSettings()
LABELS = Plan(  # sizes of labels are known: histograms are of features and of numbers of rows
    _L, FOR_CLASSES, HISTOGRAMS - 2, _L.trust, (0.35, 0.65 - _L.level_again), 2.0, 8.0, _L.level, HEADS[1]
)


def epsilon_of_releases(multiplier: float, releases: int, delta: float) -> float:
    """Return epsilon of this many releases with the same noise multiplier.

    Args:
        multiplier: standard deviation of the noise over the sensitivity of each release.
        releases: how many there are.
        delta: of all of them together.
    """
    if releases < 1:
        raise InputError(f"the number of releases must be at least 1. Got {releases} instead.")
    if not 0 < delta < 1:
        raise InputError(f"delta must lie strictly between 0 and 1 (1e-6 is usual). Got {delta} instead.")
    return compute_epsilon([Gaussian(Gaussian(multiplier).noise_multiplier / math.sqrt(releases))], delta)


@dataclass(frozen=True)
class PlanningProblem:
    """A problem, described without looking at the data. Deviations are in units of the target.

    The target of a row is a level of its user's, common slopes and slopes of its user's own times the row, and noise.
    """

    features: int
    rank: int  # directions in which users' slopes differ
    rows: int  # of each user
    noise: float = 1.0  # standard deviation of targets around their user's own line
    levels: float = 1.0  # of users' levels
    slopes: float = 0.5  # of what users' own slopes add to a target; 0 where the rank is
    common: float = 0.5  # of what common slopes add to it

    def __post_init__(self) -> None:
        if self.features < 1:
            raise InputError(f"features must be at least 1. Got {self.features} instead.")
        if not 0 <= self.rank <= self.features:
            raise InputError(
                f"rank must lie between 0 and the number of features, {self.features}. Got {self.rank} instead."
            )
        if self.rows < 2:
            raise InputError(
                f"rows must be at least 2: users with fewer have too little to say. Got {self.rows} instead."
            )
        for name in ("noise", "levels", "slopes", "common"):
            value = getattr(self, name)
            if not (value >= 0 and math.isfinite(value)):
                raise InputError(f"{name} must be zero or a positive finite number. Got {value} instead.")
        if self.noise == 0:
            raise InputError("noise must be above 0: no target lies on a line exactly.")

    @property
    def spread(self) -> float:
        """Return the variance that users' own slopes add to a target; zero where they do not differ."""
        return self.slopes**2 if self.rank else 0.0

    @property
    def within(self) -> int:
        """Return how many of a user's rows tell of slopes: its level takes one degree of freedom."""
        return self.rows - 1


def predict_direction_error(users: float, problem: PlanningProblem, budget: Budget, plan: Plan = NUMBERS) -> float:
    """Return the mean squared sine between learned and true directions, from 0 (exact) to 1 (nothing learned). Rough.

    Return 0 where there are no directions to learn: at rank 0, at full rank, or where users' slopes do not differ.

    Args:
        users: how many there are.
        problem: what is known without looking at the data.
        budget: of the fit.
        plan: of the fit.
    """
    p, d, k = problem, problem.features, problem.rank
    if k == 0 or k == d or not p.spread:
        return 0.0
    s, n, factor = plan.rounds, users, find_sensitivity_factor(budget.relation)
    relative = p.noise**2 / p.spread  # the noise, in units of the signal
    spare, total = max(p.within - k, 1), budget.mu**2
    e = _predict_start_error(n, p, relative, factor, plan.shares.start * total)
    shares = plan.shares
    for_rounds = (1 - shares.last - (shares.again if p.common else 0.0)) * plan.rest(k) * total
    if n < 10 * max(factor, math.sqrt(2.0)) * noise_multiplier(s.scout_share * for_rounds):
        return 1.0
    weights = [s.growth**t for t in range(s.rounds)]
    for weight in weights:
        multiplier = noise_multiplier((1 - s.scout_share - s.sizes_share) * for_rounds * weight / sum(weights))
        ridge = min(max(e, s.least_ridge), s.most_ridge)
        residual = relative + ridge**2 + e  # the targets' noise, what the ridge holds back, what is not yet learned
        head_error = residual / spare
        heads = (1 - e) / k + head_error
        gradient = residual * (1 + k / spare) * (1 - e + k * head_error) * (d - k) / p.within
        clipped = gradient * (1 + s.heads_weight**2)
        noise = (d - k) * clipped * (factor * multiplier / (n * heads)) ** 2
        tangent = e / (1 - e)
        gain = tangent / (tangent + noise)
        heard = (1 - e) / k / heads
        after = min((1 - gain * heard) ** 2 * tangent + gain**2 * noise, tangent)
        e = after / (1 + after)
    return min(e + predict_few_rows_error(n, p), 1.0)


def predict_few_rows_error(users: float, p: PlanningProblem) -> float:
    """Return the error of U that few rows leave, with or without privacy."""
    d, k = p.features, p.rank
    spare = max(p.within - k, 1)
    return (d - k) * k * p.noise**2 / max(p.spread, 1e-300) * (1 + k / spare) / (users * p.within)


def _predict_start_error(n: float, p: PlanningProblem, relative: float, factor: float, mu_squared: float) -> float:
    """Return the mean squared sine of the spectral start.

    Args:
        n: how many users there are.
        p: what is known without looking at the data.
        relative: variance of the noise over the variance that users' own slopes add to a target.
        factor: by how many norms a neighbour moves a sum.
        mu_squared: of the start.
    """
    d, k, target, rows = p.features, p.rank, 1 + relative, max(p.within, 2)
    size = math.sqrt(1 + 4 * target * d / rows + 2 * (target * d) ** 2 / (rows * (rows - 1)))  # |Z| of a user
    variance = factor**2 / mu_squared + 2 * n / d**2  # of the release, and of the users' own scatter
    return min(d * variance / 2 * (k * size / n) ** 2, 1 - k / (2 * d))  # a random start is a little better than none


def find_sensitivity_factor(relation: Relation) -> float:
    """Return by how many clipping norms a neighbour moves a sum: 2 under replace-one-user, else 1."""
    return 2.0 if relation == "replace-one-user" else 1.0


MOST_PEOPLE = 1e10  # there are no more users in the world: a plan that needs more is none


def find_fewest_users(reached: Callable[[float], bool]) -> int | None:
    """Return the fewest users who reach a goal, rounded up to two digits; None: more than there are people."""
    low, high = 1.0, MOST_PEOPLE
    if not reached(high):
        return None
    while high / low > 1.01:
        middle = math.sqrt(low * high)
        low, high = (low, middle) if reached(middle) else (middle, high)
    digits = max(math.floor(math.log10(high)) - 1, 0)
    return int(math.ceil(high / 10**digits) * 10**digits)


def users_needed(problem: PlanningProblem, budget: Budget, error: float) -> int | None:
    """Return the fewest users for which the predicted error of U is at most `error`; None: more than there are people.

    Args:
        problem: what is known without looking at the data.
        budget: of the fit.
        error: mean squared sine to reach.
    """
    return find_fewest_users(lambda users: predict_direction_error(users, problem, budget) <= error)
