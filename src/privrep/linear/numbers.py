"""Learn from numbers: the prior mean first, then what users differ in, then how strong the prior is.

Passes over the users, each a page of the billboard:
  scales, levels-t, covariance   see `panel`                               -> coordinates, first slopes
  common-t                       see `panel.Descent`                       -> level, common slopes, contexts
  (the start)                    see `starts`, of what the mean leaves     -> U_0, its rank, which may be 0
  families-1                     losses of families of heads               -> whether to go on with U
  *-scout, *-t                   rounds, see `alternation`                 -> U
  families                       losses of families, and of users alone    -> the prior, and what it gains
  calibration                    errors in standard deviations             -> the noise's variance, intervals
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import lru_cache

import numpy as np
from scipy.stats import chi2

from privrep.linear.alternation import AlternationSettings, Round, RoundContext, add_weak, iterate
from privrep.linear.families import (
    ERROR_CELLS,
    LOWEST_ERROR,
    SPREADS,
    Candidate,
    Families,
    HeadErrors,
    HeadSpreads,
    Judged,
)
from privrep.linear.panel import Descent, Panel, PanelSettings, find_panel
from privrep.linear.starts import MOST_SQUARED, Initialiser, Start
from privrep.linear.steps import WIDE_CELLS, WIDE_LOWEST
from privrep.local.prior import QUANTILES, HeadPrior
from privrep.local.representation import Estimate, Gains, Representation, publish
from privrep.local.transform import FeatureTransform
from privrep.privacy.bounds import Bound
from privrep.privacy.calibration import Query
from privrep.privacy.run import Run
from privrep.typing import Array

PURPOSES = {
    "families": "how far users differ, and in what",
    "calibration/noise": "noise of the targets",
    "calibration/tails": "how often errors are large",
}
UNKNOWN = 10.0  # variance of levels or slopes over the noise's, where nothing is known: users' own rows decide
RATIOS = (0.01, 1e6)  # least and largest of the noise's variance that levels or slopes are taken to have at first
ODDS_ALL = (0.3, 3.0, 100.0)  # variance that slopes in all features explain, over the noise's
STEPS = (4.0, 2.0)  # factors between neighbours when ratios are refined, one after the other
MOST_ALL = 256  # features up to which slopes may differ in all of them


@dataclass(frozen=True)
class NumbersSettings:
    """Shares of mu^2, fixed beforehand."""

    panel: PanelSettings = PanelSettings()
    common: float = 0.06  # of the first step on the prior mean
    start: float = 0.12
    first_families: float = 0.03
    families: float = 0.05
    calibration: float = 0.02
    again: float = 0.25  # of what is left, for another step on the prior mean beside rounds


def learn_numbers(
    run: Run,
    rank: int | None,
    method: Round,
    initialiser: Initialiser,
    *,
    intercept: bool,
    transform: FeatureTransform | None,
    settings: AlternationSettings,
    shares: NumbersSettings | None = None,
) -> Representation:
    """Learn prior and representation; see `alternation.learn`, whose formal guarantee this has."""
    s, total, d = shares or NumbersSettings(), run.ledger.capacity, run.users.facts.features
    panel, spent = find_panel(run, total, intercept, transform, s.panel)
    descent = Descent(run, panel, total, spent=spent)
    descent.step(s.common * total, last=False)
    later = (s.families + s.calibration) * total
    learner = _Learner(run, method, settings, descent, rank, intercept)
    state = learner.start(initialiser, s.start * total)
    if rank is None and 0 < state.basis.shape[1] < d:
        state = learner.doubt(state, s.first_families * total)
    state = learner.finish(state, total - later - descent.spent, s.again)
    return conclude(learner, state, s.families * total, s.calibration * total)


@dataclass
class _Learner:
    """A fit under way."""

    run: Run
    method: Round
    settings: AlternationSettings
    descent: Descent
    rank: int | None
    intercept: bool

    @property
    def panel(self) -> Panel:
        return self.descent.panel

    @property
    def context(self) -> RoundContext:
        return RoundContext(self.run, self.panel.transform, self.intercept, self.settings, mean=self.panel.mean)

    def start(self, initialiser: Initialiser, mu_squared: float) -> Estimate:
        """Return where rounds start: no direction where nobody asks for one and none stands out from the noise."""
        d, rank = self.run.users.facts.features, self.rank
        if rank == 0:
            return Estimate(np.zeros((d, 0)), np.zeros((0, 0)))
        if d in (rank, 1):
            return Estimate(np.eye(d), np.zeros((d, d)))
        asked = Start(self.run, self.panel.transform, rank, mu_squared, self.intercept, mean=self.panel.mean)
        state = initialiser(asked)
        self.descent.spent += mu_squared
        if rank is not None:
            return state
        rows = self.panel.location.most_rows
        least = 1 if d > 2 * rows else 0  # rounds may find what a start does not, and few rows are lost without it
        return state.first(min(max(state.found, least), self.method.most(d), max(rows - 1, 0)))

    def families(self, state: Estimate) -> Families:
        panel, d = self.panel, self.run.users.facts.features
        matrix = Representation(state.basis, panel.transform, 0.0, _spread(state)).matrix
        facts = self.run.users.facts
        second = np.zeros((d, 0)) if facts.sparse or d > MOST_ALL else _all_features(panel)
        location = panel.location
        return Families(self.run, panel.mean, matrix, second, panel.target_scale, location.users, location.typical_rows)

    def doubt(self, state: Estimate, mu_squared: float) -> Estimate:
        """Return the state, or no direction where heads along it do no better than others."""
        families = self.families(state)
        spreads = find_spreads(families, "spreads-0", 0.4 * mu_squared)
        candidates = make_candidates(families, spreads, self.intercept)
        self.descent.spent += 0.4 * mu_squared
        if not families.legible(0.6 * mu_squared):
            return state
        judged = families.judge("families-0", candidates, 0.6 * mu_squared, relative=True)
        self.descent.spent += 0.6 * mu_squared
        loss = judged.by_factor()
        return state if loss[1] < min(loss[f] for f in loss if f != 1) - judged.sigma else state.first(0)

    def finish(self, state: Estimate, left: float, again: float) -> Estimate:
        """Return the state after rounds; what they leave goes to the prior mean."""
        d, k = state.basis.shape
        if not k or k == d:
            for share in (0.4 * left, 0.6 * left):
                self.descent.step(self._affordable(share), last=share > 0.5 * left)
            return state
        before = self.descent.spent
        if self.descent.heard:
            self.descent.step(self._affordable(again * left), last=False)
        last = 0.12 * left
        state = run_rounds(self.context, state, self.rank, self.method, left - (self.descent.spent - before) - last)
        families = self.families(state)
        spreads = find_spreads(families, "spreads-1", 0.2 * last)
        shared = make_candidates(families, spreads, self.intercept)[1]
        residual = self.panel.residual if spreads.noise_shared is None else math.sqrt(spreads.noise_shared)
        factor = families.first * math.sqrt(shared.slopes)
        self.descent.refit(replace(self.panel, factor=factor, level_ratio=shared.level, residual=residual))
        self.descent.step(0.8 * last, last=True)
        return state

    def _affordable(self, mu_squared: float) -> float:
        """Return what of a share is left once the histograms that come with the step are paid."""
        sizing = self.descent.sizing()
        return mu_squared - (sizing.mu_squared if sizing is not None else 0.0)


def run_rounds(problem: RoundContext, state: Estimate, rank: int | None, method: Round, left: float) -> Estimate:
    """Return the state after rounds that spend what is left, with those for strong directions first where they hide
    weak ones."""
    d, s = len(state.basis), problem.settings
    if d > MOST_SQUARED or not state.hides(rank):
        return iterate(problem, state, method, left, method.name, s.rounds)
    if rank is None:  # a direction that is only the error of the others must not pass for a new one: those first
        state = iterate(problem, state, method, 0.6 * left, "strong", s.rounds)
        state = add_weak(problem, state, None, method.most(d), 0.15 * left)
        return iterate(problem, state, method, 0.25 * left, method.name, s.rounds // 2)
    state = iterate(problem, state.first(state.found), method, 0.25 * left, "strong", s.rounds // 2)
    state = add_weak(problem, state, rank, rank, 0.25 * left)
    return iterate(problem, state, method, 0.5 * left, method.name, s.rounds)


def _spread(state: Estimate) -> Array:
    return np.ones(1) if state.spread is None else state.spread


def _all_features(panel: Panel) -> Array:
    """Return the factor of slopes that differ in all features alike, in the scale of each within users."""
    d = len(panel.mean.slopes)
    return np.diag(np.where(panel.location.varies[:d], 1 / panel.transform.scale, 0.0))


@dataclass(frozen=True)
class Spreads:
    """Variances that users see alone around the prior mean, over the target's scale squared; None: lost in noise."""

    noise: float | None  # around users' own levels, with common slopes
    level: float | None  # of levels, with common slopes
    noise_shared: float | None  # around users' regressions along U
    level_shared: float | None  # of levels at the origin, with regressions along U
    head: float | None  # of a coordinate of heads along U


def find_spreads(families: Families, page: str, mu_squared: float) -> Spreads:
    """Return variances, read off histograms of what users see alone."""
    step = HeadSpreads(families.mean, families.first, families.target_scale)
    released = families.run.release(page, step, {"spreads": Query(SPREADS, mu_squared)})["spreads"]
    return Spreads(*(_read_variance(part, released.sigma) for part in released.value.reshape(5, WIDE_CELLS)))


@lru_cache(maxsize=1)
def _square_shapes() -> Array:
    """Return shapes of histograms of mean squares of 1, 2, 4, 8 and 16 normal numbers of variance one, in octaves
    around one, each of length one, (5, 2 HALF + 1)."""
    edges = 2.0 ** (np.arange(-HALF, HALF + 2) - 0.5)
    shapes = np.stack([np.diff(chi2.cdf(edges * dof, dof)) for dof in (1, 2, 4, 8, 16)])
    return np.asarray(shapes / np.linalg.norm(shapes, axis=1, keepdims=True))


HALF = 10  # octaves either side of a variance in which squares are looked for


def _read_variance(counts: Array, sigma: float) -> float | None:
    """Return the variance behind a noisy histogram of squares; None where it is lost in noise."""
    answers = np.stack([np.correlate(counts, shape, mode="same") for shape in _square_shapes()])
    best = np.unravel_index(int(answers.argmax()), answers.shape)
    if answers[best] < 5 * sigma:
        return None
    row, place = answers[best[0]], int(best[1])
    shift = 0.0
    if 0 < place < len(row) - 1:
        left, middle, right = row[place - 1 : place + 2]
        shift = 0.5 * (left - right) / min(left - 2 * middle + right, -1e-300)
    return float(2.0 ** (place + WIDE_LOWEST + np.clip(shift, -0.5, 0.5)))


def make_candidates(families: Families, spreads: Spreads, intercept: bool) -> list[Candidate]:
    """Return candidates with common slopes, with slopes along U, and some whose slopes differ in all features."""
    k, p, share = families.first.shape[1], families.second.shape[1], 1 / families.rows
    levels = _ratio(spreads.level, spreads.noise, share) if intercept else 0.0
    found = [Candidate(0, 0.0, levels)]
    if k:
        ratio = _ratio(spreads.level_shared, spreads.noise_shared, share) if intercept else 0.0
        found.append(Candidate(1, _ratio(spreads.head, spreads.noise_shared, share), ratio, own=not intercept))
    if p:
        found += [Candidate(2, odds / p, levels, own=not intercept) for odds in ODDS_ALL]
    return found


def _ratio(square: float | None, noise: float | None, share: float) -> float:
    """Return a variance over the noise's, less the share of the noise in it; a weak prior's where nothing is known."""
    if square is None or noise is None:
        return UNKNOWN
    return float(np.clip(square / noise - share, *RATIOS))


def conclude(learner: _Learner, state: Estimate, for_families: float, for_errors: float) -> Representation:
    """Choose the prior, measure the noise, and post the representation."""
    families, intercept = learner.families(state), learner.intercept
    spreads = find_spreads(families, "spreads", 0.15 * for_families)
    candidates = make_candidates(families, spreads, intercept)
    chosen, left = candidates[0], 0.85 * for_families
    if families.legible(0.25 * for_families):
        judged = families.judge("families-1", candidates, 0.25 * for_families, relative=True)
        best = [judged.candidates[judged.best(among)] for among in judged.groups().values()]
        chosen, left = choose(judged), left - 0.25 * for_families
        if len(best) > 1 and families.legible(0.15 * for_families):
            chosen, left = choose(families.judge("families-2", best, 0.15 * for_families)), left - 0.15 * for_families
    share = 0.7 * left / len(STEPS)
    for t, factor in enumerate(STEPS, start=3):
        around = neighbours(chosen, factor, flip=intercept and factor > STEPS[-1])
        if len(around) > 1 and families.legible(share):
            chosen = refine(families.judge(f"families-{t}", around, share), factor)
            left -= share
    gains = read_gains(families, chosen, intercept, left)
    factor = {0: np.zeros((len(state.basis), 0)), 1: families.first, 2: families.second}[chosen.factor]
    prior = measure_errors(learner, factor * math.sqrt(chosen.slopes), chosen, for_errors)
    return publish(learner.run, state, learner.panel.transform, prior=prior, gains=gains)


def choose(judged: Judged) -> Candidate:
    """Return the candidate that loses least, of the simplest family within the noise of the best."""
    losses = judged.by_factor()
    least = min(losses.values())
    factor = min(f for f, loss in losses.items() if loss <= least + judged.sigma)
    among = [i for i, c in enumerate(judged.candidates) if c.factor == factor]
    return judged.candidates[judged.best(among)]


def neighbours(chosen: Candidate, factor: float, flip: bool) -> list[Candidate]:
    """Return the candidate, and those with each ratio that much larger and smaller.

    With `flip` also one whose slopes turn around the other origin.
    """
    found = [chosen]
    for name in ("level", "slopes"):
        ratio = getattr(chosen, name)
        if 0 < ratio < math.inf:
            found += [replace(chosen, **{name: ratio * factor}), replace(chosen, **{name: ratio / factor})]
    if flip and chosen.factor:
        found.append(replace(chosen, own=not chosen.own))
    return found


def refine(judged: Judged, factor: float) -> Candidate:
    """Return the first candidate moved, ratio by ratio, to where a parabola through its neighbours is least; or the
    best of those with the other origin, where that loses less than all neighbours."""
    chosen = found = judged.candidates[0]
    middle = float(judged.losses[0])
    same = [i for i, c in enumerate(judged.candidates) if c.own == chosen.own]
    others = [i for i, c in enumerate(judged.candidates) if c.own != chosen.own]
    if others and judged.losses[judged.best(others)] < judged.losses[judged.best(same)] - judged.sigma:
        return judged.candidates[judged.best(others)]
    for name in ("level", "slopes"):
        beside = {getattr(judged.candidates[i], name): float(judged.losses[i]) for i in same}
        ratio = getattr(chosen, name)
        more, less = beside.get(ratio * factor), beside.get(ratio / factor)
        if more is not None and less is not None:
            curvature = max(more + less - 2 * middle, 0.0) + 3 * judged.sigma
            place = float(np.clip((less - more) / (2 * curvature), -1.0, 1.0))
            found = replace(found, **{name: ratio * factor**place})
    return found


def read_gains(families: Families, chosen: Candidate, intercept: bool, mu_squared: float) -> Gains:
    """Return what users lose by their means, alone, by the prior mean and by their heads, from one more release."""
    free = math.inf if intercept else 0.0
    p = families.second.shape[1]
    alone = [Candidate(2, odds / p, free, common=False) for odds in (1.0, 100.0)] if p else []
    asked = [chosen, Candidate(0, 0.0, 0.0), Candidate(0, 0.0, free, common=False), *alone]
    judged = families.judge("families", asked, mu_squared, relative=True)
    heads, prior, mean, *own = (float(loss - judged.losses[2]) / judged.rows for loss in judged.losses)
    return Gains(min([mean, *own]), prior, heads, math.sqrt(2.0) * judged.sigma / judged.rows)


def measure_errors(learner: _Learner, factor: Array, chosen: Candidate, mu_squared: float) -> HeadPrior:
    """Return the prior with the noise's variance and quantiles of errors, by one more release."""
    panel, q = learner.panel, len(learner.panel.target_scale)
    location, level = panel.location, chosen.level
    odds = chosen.slopes * factor.shape[1] if chosen.factor else 0.0
    new = np.full(q, 1.0 + odds + (level if math.isfinite(level) else 8.0))
    step = HeadErrors(panel.mean, factor, chosen.own, level, new, panel.target_scale)
    norm = 2.0 * location.typical_rows * math.sqrt(2 * q)
    needed = (math.sqrt(4) / (0.01 * max(location.users, 1.0))) ** 2
    share = 0.5 * mu_squared if needed < mu_squared else 0.0
    queries = {"noise": Query(Bound(norm, 2 * q + 1, acute=True), mu_squared - share)}
    if share:
        bound = Bound(math.sqrt(2.0) * q * location.typical_rows, 2 * ERROR_CELLS, acute=True)
        queries["tails"] = Query(bound, share)
    released = learner.run.release("calibration", step, queries)
    values, sigma = released["noise"].value, released["noise"].sigma
    rows = max(float(values[-1]), 3 * sigma)
    known, fresh = np.maximum(values[:q], sigma) / rows, np.maximum(values[q : 2 * q], sigma) / rows
    normal = _normal_quantiles()
    quantiles = [normal, normal * math.sqrt(float(fresh.mean() / known.mean()))]
    if share:
        counts = released["tails"].value.reshape(2, ERROR_CELLS)
        scale = math.sqrt(float(known.mean()))
        quantiles = [_quantiles(part) / scale for part in counts]
    return HeadPrior(panel.mean, factor, chosen.own, level, known * panel.target_scale**2, quantiles[0], quantiles[1], new)


def _normal_quantiles() -> Array:
    from scipy.stats import norm

    return np.asarray(norm.ppf(0.5 + np.array(QUANTILES) / 2))


def _quantiles(counts: Array) -> Array:
    """Return quantiles of sizes in a noisy histogram with two cells an octave, interpolated within cells."""
    below = np.maximum.accumulate(np.cumsum(counts))
    below = np.maximum(below, 0.0) / max(float(below[-1]), 1e-300)
    edges = 2.0 ** ((np.arange(ERROR_CELLS + 1) + LOWEST_ERROR) / 2)
    return np.asarray(np.interp(QUANTILES, np.concatenate([[0.0], below]), np.concatenate([[0.0], edges[1:]])))


def describe_candidates(candidates: Sequence[Candidate]) -> list[str]:
    """Return candidates in words, for those who look at a billboard."""
    names = ("common slopes", "slopes along the representation", "slopes in all features")
    return [f"{names[c.factor]}, slopes {c.slopes:.3g}, levels {c.level:.3g}" for c in candidates]
