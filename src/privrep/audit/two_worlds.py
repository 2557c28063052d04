"""The audit of a whole fit: many runs in each of two worlds, and a lower bound of epsilon by their log-ratios.

Formal guarantee. Log-ratios of different runs are independent. Three lower bounds are made, and the largest counts. The
first is false with at most half of `error`, the others with a quarter each, so the answer is false with at most
`error`. The last two are of mu, for a fit that is mu-GDP: no test of one run then has errors below the trade-off of
N(0, 1) and N(mu, 1).
* Noise. In every run the distance of both worlds is known, page by page, in units of the deviation that the page
  states. All residuals of all runs, released less answered, give an upper bound of their true deviation in these units.
  Let c be a distance that most runs of the first halves reach, and p a lower bound of the part of the first world's
  other runs that do. A test stops adding up pages at c and asks whether the sum is above t. In the second world it is
  with at most the chance of a Gaussian at c. In the first it is with at least p times that chance, if runs with large
  sums do not reach c less often than others: this is assumed. So delta is at least p delta_G(epsilon - log p), where
  delta_G is of c over the deviation. Deviation and part have half of this bound's error each.
* Threshold. On the first halves of the runs a threshold is chosen. On the other halves both errors of the test
  "above it" are bounded from above (Clopper and Pearson), with half of this bound's error each. mu is at least the sum
  of their normal quantiles. No distribution is assumed: noise and totals may be anything.
* Means. Log-ratios are taken for normal, with one deviation in both worlds: what they are where the worlds are the same
  distance apart in every run. The difference of their means is bounded from below by Student's t, their deviation from
  above by chi-squared, with half of this bound's error each. The quotient is mu.
The noise is measured by all of them, never taken from a ledger. A scale that is wrong by a factor moves all log-ratios
by one factor, and the last two bounds do not change with it.
"""

from __future__ import annotations

import math
import time
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np
from scipy.special import ndtri
from scipy.stats import chi2, t

from privrep.audit.fits import Fit, Fitted, Neighbours
from privrep.audit.lower import bound_chance_above, bound_chance_below, bound_deviation_above
from privrep.audit.one_run import CONTROLS
from privrep.audit.sabotage import WeakNoise
from privrep.audit.search import Search
from privrep.audit.tradeoffs import ALL_ASKED
from privrep.errors import InputError
from privrep.privacy.accounting import LEAST_EPSILON, gaussian_mu
from privrep.privacy.noise import NoiseSource, secure_noise
from privrep.typing import Array

SEARCHING = 0.4  # of the time; the rest is shared by the fit and its control
MISSED = 0.05  # part of the runs that may be less far apart than is counted on
LEAST_RUNS = 20  # in each world
ROOM = 1.02  # by which the control's bound of mu should be above the claim


def bound_mu(first: Array, second: Array, error: float) -> tuple[float, str]:
    """Return a lower bound of mu by log-ratios, and whether it is by means or by a threshold.

    Args:
        first: log-ratios of runs in the first world, (runs,).
        second: log-ratios of runs in the second world, (runs,).
        error: chance that the bound is false.
    """
    bounds = (
        (_bound_by_means(first, second, error / 2), "means"),
        (
            _bound_by_threshold(first, second, error / 2),
            "threshold",
        ),
    )
    return max((max(mu, 0.0), by) for mu, by in bounds)


def _bound_by_means(first: Array, second: Array, error: float) -> float:
    """Return the lower bound of mu by the difference of means; arguments as in `bound_mu`."""
    free = len(first) + len(second) - 2
    squares = float(((first - first.mean()) ** 2).sum() + ((second - second.mean()) ** 2).sum())
    widest = math.sqrt(squares / float(chi2.ppf(error / 2, free)))
    off = float(t.ppf(1 - error / 2, free)) * math.sqrt(squares / free * (1 / len(first) + 1 / len(second)))
    return (float(first.mean() - second.mean()) - off) / widest if widest > 0 else 0.0


def _bound_by_threshold(first: Array, second: Array, error: float) -> float:
    """Return the lower bound of mu by both errors of a test; arguments as in `bound_mu`."""
    chosen, held = zip(*((each[: len(each) // 2], each[len(each) // 2 :]) for each in (first, second)), strict=True)

    def bound(some: tuple[Array, ...], threshold: float) -> float:
        missed, wrong = int((some[0] <= threshold).sum()), int((some[1] > threshold).sum())
        above = [bound_chance_above(k, len(each), error / 2) for k, each in zip((missed, wrong), some, strict=True)]
        return -float(ndtri(min(above[0], 1 - 1e-12)) + ndtri(min(above[1], 1 - 1e-12)))

    candidates = np.quantile(np.concatenate(chosen), np.linspace(0.1, 0.9, 17))
    return bound(held, max(candidates, key=lambda threshold: bound(chosen, float(threshold))))


@dataclass(frozen=True)
class FitFinding:
    """Findings about a whole fit, and its control. Every field is public: all users were made up.

    claimed   the largest epsilon that a ledger of a run stated, at `delta`.
    lower     lower bound of the epsilon that the fit has.
    by        noise, means or threshold.
    share     part of the mu^2 spent that the two worlds are apart: the canary's quality.
    runs      in both worlds together.
    tries     canaries that were tried.
    pages     of each statistic: how far its totals moved, of what one user may move them, and its part of the mu^2
              that was spent, on average over runs.
    control, control_lower, control_by, control_runs, caught   the same of the control.
    """

    claimed: float
    delta: float
    relation: str
    lower: float
    by: str
    share: float
    runs: int
    tries: int
    pages: dict[str, tuple[float, float]]
    control: float
    control_lower: float
    control_by: str
    control_runs: int
    caught: bool
    seconds: float

    @property
    def sound(self) -> bool:
        """Return whether nothing says that the fit costs more than its ledger states."""
        return self.lower <= self.claimed

    @property
    def passed(self) -> bool:
        """Return whether the fit is sound, and the control was caught."""
        return self.sound and self.caught

    def to_json(self) -> dict[str, Any]:
        """Return all of it as JSON has it."""
        pages = {name: {"moved": moved, "part": part} for name, (moved, part) in self.pages.items()}
        return {**asdict(self), "pages": pages, "sound": self.sound, "passed": self.passed}


def audit_fit(
    fit: Fit, seconds: float, error: float, most_runs: int = 10**9, neighbours: Neighbours | None = None
) -> FitFinding:
    """Return what is found of a fit, and of its control.

    Args:
        fit: the fit.
        seconds: that all of it takes, roughly.
        error: chance that the lower bound is false; of the control's, too.
        most_runs: of the fit in each world, and of the control.
        neighbours: with a canary that was found before; None: it is searched.
    """
    if not seconds > 0:
        raise InputError(f"an audit of a fit takes some time. Got {seconds:g} seconds instead.")
    began, search = time.monotonic(), Search(fit)
    neighbours = neighbours or search.go_on(SEARCHING * seconds)
    left = seconds - (time.monotonic() - began)
    runs = _repeat(neighbours, secure_noise, left / 2, most_runs)
    share = float(np.mean([run.share for world in runs for run in world]))
    claimed = max(run.epsilon for world in runs for run in world)
    lower, by = _bound_epsilon(runs, fit.delta, error)
    factor = _choose_control(lower, claimed, fit.delta)
    control_runs = _repeat(neighbours, WeakNoise(factor), left / 2, most_runs)
    control_lower, control_by = _bound_epsilon(control_runs, fit.delta, error)
    return FitFinding(
        claimed,
        fit.delta,
        fit.relation,
        lower,
        by,
        share,
        sum(map(len, runs)),
        search.tries,
        _average_pages(runs),
        factor,
        control_lower,
        control_by,
        sum(map(len, control_runs)),
        control_lower > claimed,
        time.monotonic() - began,
    )


def _choose_control(lower: float, claimed: float, delta: float) -> float:
    """Return the least factor of CONTROLS with which the bound of mu should come out above the claim.

    A canary that does not use all of the sensitivity leaves room that a small fault hides in. So does a small number of
    runs. The factor is part of what is reported.
    """
    mu, wanted = (gaussian_mu(max(epsilon, LEAST_EPSILON), delta) for epsilon in (lower, claimed))
    return next((each for each in CONTROLS if each * mu > ROOM * wanted), CONTROLS[-1])


def _repeat(neighbours: Neighbours, noise: NoiseSource, seconds: float, most: int) -> tuple[list[Fitted], list[Fitted]]:
    """Return runs in both worlds, equally many in each.

    How many there are follows from the clock, and never from what they say.
    """
    began, first, second = time.monotonic(), list[Fitted](), list[Fitted]()
    while len(first) < LEAST_RUNS or (len(first) < most and time.monotonic() - began < seconds):
        first.append(neighbours.learn(False, noise))
        second.append(neighbours.learn(True, noise))
    return first, second


def _bound_epsilon(runs: tuple[list[Fitted], list[Fitted]], delta: float, error: float) -> tuple[float, str]:
    """Return a lower bound of epsilon by runs in both worlds, and where it comes from."""
    first, second = (np.array([run.log_ratio for run in world]) for world in runs)
    mu, by = bound_mu(first, second, error / 2)
    by_noise = _bound_by_noise(runs, delta, error / 2)
    return max((by_noise, "noise"), (ALL_ASKED.compute_epsilon(mu, delta), by))


def _bound_by_noise(runs: tuple[list[Fitted], list[Fitted]], delta: float, error: float) -> float:
    """Return the lower bound of epsilon by distances and the deviation of the noise; arguments as above."""
    both = [run for world in runs for run in world]
    loudness, numbers = math.fsum(run.loudness for run in both), sum(run.numbers for run in both)
    apart = np.array([run.mu_squared for run in runs[0]])
    chosen, held = apart[: len(apart) // 2], apart[len(apart) // 2 :]
    level = float(np.quantile(chosen, MISSED))
    part = bound_chance_below(int((held >= level).sum()), len(held), error / 2)
    if not loudness or part <= delta:
        return 0.0
    mu = math.sqrt(level) / bound_deviation_above(loudness, numbers, error / 2)
    return max(ALL_ASKED.compute_epsilon(mu, delta / part) + math.log(part), 0.0)


def _average_pages(runs: tuple[list[Fitted], list[Fitted]]) -> dict[str, tuple[float, float]]:
    """Return how far each statistic moved where it was asked, and its part of the mu^2 spent, on average over runs."""
    fitted = [run for world in runs for run in world]
    names = dict.fromkeys(name for run in fitted for name in run.pages)
    spent = math.fsum(page.spent for run in fitted for page in run.pages.values())
    found = {name: [run.pages[name] for run in fitted if name in run.pages] for name in names}
    return {
        name: (float(np.mean([page.moved for page in pages])), math.fsum(page.spent for page in pages) / spent)
        for name, pages in found.items()
    }
