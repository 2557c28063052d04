"""What a budget buys, before any data is seen: noise of the releases, error of the representation, users needed.

The prediction follows the algorithm's own recursion with what is public: the noise of every release is known from the
budget, and for a population like that of the papers (features of unit variance without correlation, heads alike in all
directions of the representation) the signal is known too. All in units of the signal: the part of the target that a
user's own features explain has variance one. With e the mean squared sine between learned and true directions:

  start    a user sends a matrix of norm one, of which a part 1/(k |Z|) points along each true direction; the noise of
           the release has operator norm sigma sqrt(d/2), and e = (noise / signal)^2
  round    gradients, clipped to about their own size |g|, are divided by the second moment of the heads; what noise
           this leaves in a direction has energy N = (d - k) (2 |g| / (mu_t n (lambda + h)))^2, h the error of a user's
           head, and the step keeps t/(t + N) of itself, t = e/(1 - e)
  sizes    a histogram is legible if users outnumber its noise's standard deviation by six; if not, nothing is learned
  at last  few rows in all leave (d - k) k R^2 / (n m), with or without privacy

How rough it is. The formulas were derived, not fitted, but for the six above, chosen on simulated fits of 15 problems.
On 16 others, drawn at random afterwards (10 to 80 features, rank 1 to 4, 9 to 30 rows, noise 0.05 to 1, epsilon 1 to 5,
either relation, errors 0.1 and 0.01), simulated fits reached the error with 0.7 to 1.4 times the users given here and
missed it with a step of 1.4 fewer (median of three seeds). Single fits of small problems, with about 10 features or
fewer than rank + 3 rows, failed at up to twice the number. Correlated features and heads that favour some directions
are not modelled and need more users.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from privrep.errors import InputError
from privrep.linear.alternation import AlternationSettings
from privrep.privacy.accounting import epsilon_spent
from privrep.privacy.bounds import MAX_USERS
from privrep.privacy.events import Gaussian, Relation
from privrep.privacy.ledger import Budget, noise_multiplier


@dataclass(frozen=True)
class PlannedRelease:
    """One release of a default fit: its name in the ledger, its share of mu^2 and its noise."""

    name: str
    share: float
    noise_multiplier: float


def default_releases(budget: Budget, settings: AlternationSettings | None = None) -> list[PlannedRelease]:
    """The releases of a fit that uses all its rounds. One that converges earlier spends the rest at once."""
    s = settings or AlternationSettings()
    weights = [s.growth**t for t in range(s.rounds)]
    for_rounds = 1 - s.scales_share - s.covariance_share - s.start_share - s.votes_share
    each = s.sizes_share * for_rounds / s.rounds
    shares = {
        "scales/sizes": s.scales_share,
        "covariance/covariance": s.covariance_share,
        "moments/moments": s.start_share,
        "round-scout/sizes": s.scout_share * for_rounds,
    }
    for t, weight in enumerate(weights, start=1):
        last = t == s.rounds
        step = (1 - s.scout_share - s.sizes_share) * for_rounds * weight / sum(weights)
        shares[f"round-{t}/step"] = step + (each if last else 0.0)
        if not last:
            shares[f"round-{t}/sizes"] = each
    shares["preference/votes"] = s.votes_share
    total = budget.mu**2
    return [PlannedRelease(name, share, noise_multiplier(share * total)) for name, share in shares.items()]


def epsilon_of_releases(multiplier: float, releases: int, delta: float) -> float:
    """Epsilon of this many releases with the same noise multiplier."""
    if releases < 1:
        raise InputError(f"the number of releases must be at least 1. Got {releases} instead.")
    if not 0 < delta < 1:
        raise InputError(f"delta must lie strictly between 0 and 1 (1e-6 is usual). Got {delta} instead.")
    return epsilon_spent([Gaussian(Gaussian(multiplier).noise_multiplier / math.sqrt(releases))], delta)


@dataclass(frozen=True)
class PlanningProblem:
    """A problem as one can describe it without looking at the data."""

    features: int
    rank: int
    rows: int  # of each user
    noise: float = 0.5  # standard deviation of the targets' noise, as a multiple of that of the signal
    intercept: bool = True

    def __post_init__(self) -> None:
        if self.features < 2:
            raise InputError(f"features must be at least 2. Got {self.features} instead.")
        if not 1 <= self.rank < self.features:
            raise InputError(
                f"rank must lie between 1 and the number of features less one, {self.features - 1}. "
                f"Got {self.rank} instead."
            )
        if self.rows < 3:
            raise InputError(
                f"rows must be at least 3: users with fewer have too little to say. Got {self.rows} instead."
            )
        if not (self.noise >= 0 and math.isfinite(self.noise)):
            raise InputError(f"the noise level must be zero or a positive finite number. Got {self.noise} instead.")


def predicted_error(users: float, problem: PlanningProblem, budget: Budget) -> float:
    """Mean squared sine between learned and true directions, from 0 (exact) to 1 (nothing learned). Rough."""
    s, p = AlternationSettings(), problem
    n, d, k, factor = users, p.features, p.rank, _sensitivity_factor(budget.relation)
    rows = p.rows - p.intercept  # an intercept takes one degree of freedom of each user
    spare = max(rows - k, 1)
    e = _start(n, p, rows, factor, s.start_share * budget.mu**2)
    releases = {release.name: release.noise_multiplier for release in default_releases(budget, s)}
    if n < 6 * max(factor, math.sqrt(2.0)) * releases["round-1/sizes"]:
        return 1.0
    for multiplier in (z for name, z in releases.items() if name.endswith("/step")):
        ridge = min(max(e, s.least_ridge), s.most_ridge)
        residual = p.noise**2 + ridge**2 + e  # the targets' noise, what the ridge holds back, what is not yet learned
        head_error = residual / spare
        heads = (1 - e) / k + head_error
        gradient = residual * (1 + k / spare) * (1 - e + k * head_error) * (d - k) / rows
        clipped = gradient * (1 + s.heads_weight**2)
        noise = (d - k) * clipped * (factor * multiplier / (n * heads)) ** 2
        tangent = e / (1 - e)
        gain = tangent / (tangent + noise)
        heard = (1 - e) / k / heads
        after = min((1 - gain * heard) ** 2 * tangent + gain**2 * noise, tangent)
        e = after / (1 + after)
    few_rows = (d - k) * k * p.noise**2 * (1 + k / spare) / (n * rows)
    return min(e + few_rows, 1.0)


def _start(n: float, p: PlanningProblem, rows: int, factor: float, mu_squared: float) -> float:
    """Mean squared sine of the spectral start."""
    d, k, target = p.features, p.rank, 1 + p.noise**2
    size = math.sqrt(1 + 4 * target * d / rows + 2 * (target * d) ** 2 / (rows * (rows - 1)))  # |Z| of a user
    variance = factor**2 / mu_squared + 2 * n / d**2  # of the release, and of the users' own scatter
    return min(d * variance / 2 * (k * size / n) ** 2, 1 - k / (2 * d))  # a random start is a little better than none


def _sensitivity_factor(relation: Relation) -> float:
    return 2.0 if relation == "replace-one-user" else 1.0


def users_needed(problem: PlanningProblem, budget: Budget, error: float) -> int | None:
    """The fewest users for which the predicted error is at most `error`; None where even the largest run has more."""
    low, high = 1.0, float(MAX_USERS)
    if predicted_error(high, problem, budget) > error:
        return None
    while high / low > 1.01:
        middle = math.sqrt(low * high)
        low, high = (low, middle) if predicted_error(middle, problem, budget) <= error else (middle, high)
    return _two_digits(high)


def _two_digits(value: float) -> int:
    digits = max(math.floor(math.log10(value)) - 1, 0)
    return int(math.ceil(value / 10**digits) * 10**digits)


@dataclass(frozen=True)
class Need:
    """How many users a goal needs; `error` is the mean squared sine that reaches it."""

    goal: str
    error: float
    users: int | None


def needs(problem: PlanningProblem, budget: Budget) -> list[Need]:
    """What people ask for: a representation that is found at all, and one that costs next to nothing."""
    goals = {
        "the representation holds 90% of what is shared": 0.1,
        "it holds 99%": 0.01,
        "its error adds a tenth to what the targets' noise leaves anyway": 0.1 * problem.noise**2,
    }
    return [Need(goal, error, users_needed(problem, budget, error)) for goal, error in goals.items() if error > 0]
