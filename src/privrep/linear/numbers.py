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

import numpy as np

from privrep.linear.alternation import AlternationSettings, Round, RoundContext, add_weak, iterate
from privrep.linear.families import (
    ERROR_CELLS,
    LOWEST_ERROR,
    Candidate,
    Families,
    HeadErrors,
    Judged,
)
from privrep.linear.panel import Descent, Panel, PanelSettings, find_panel
from privrep.linear.spreads import Spreads
from privrep.linear.starts import MOST_SQUARED, Initialiser, Start
from privrep.linear.transform import CLEAR
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
ODDS_ALL = (0.3, 2.0)  # variance that slopes in all features explain, over the noise's
FIRST, SECOND = 6.0, 3.0  # factors between neighbours when ratios are refined, one after the other
MOST_ALL = 256  # features up to which slopes may differ in all of them


@dataclass(frozen=True)
class NumbersSettings:
    """Shares of mu^2, fixed beforehand."""

    panel: PanelSettings = PanelSettings()
    common: float = 0.04  # of the first step on the prior mean
    start: float = 0.18
    first_families: float = 0.03
    families: float = 0.08
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
        spreads = families.spreads("spreads-0", 0.4 * mu_squared)
        candidates = [guess(families, spreads, self.intercept) for guess in (guess_common, guess_shared)]
        p = families.second.shape[1]
        candidates += [Candidate(2, odds / p, candidates[0].level, own=not self.intercept) for odds in ODDS_ALL if p]
        self.descent.spent += 0.4 * mu_squared
        if not families.legible(0.6 * mu_squared):
            few = self.panel.location.most_rows * 2 < len(state.basis)  # without it such users have little to go by
            return state if few else state.first(0)
        judged = families.judge("families-0", candidates, 0.6 * mu_squared, relative=True)
        self.descent.spent += 0.6 * mu_squared
        loss = judged.by_factor()
        return state if loss[1] < min(loss[f] for f in loss if f != 1) - judged.sigma else state.first(0)

    def finish(self, state: Estimate, left: float, again: float) -> Estimate:
        """Return the state after rounds; what they leave goes to the prior mean."""
        d, k = state.basis.shape
        if not k or k == d:
            for share in (0.4 * left, 0.6 * left):
                self.descent.step(share, last=share > 0.5 * left)
            return state
        before = self.descent.spent
        if self.descent.heard:
            self.descent.step(again * left, last=False)
        last = 0.08 * left
        state = run_rounds(self.context, state, self.rank, self.method, left - (self.descent.spent - before) - last)
        mean = self.panel.mean
        everywhere = replace(mean, located=np.ones_like(mean.located))  # with zero for a centre where none is known
        families = replace(self.families(state), mean=everywhere)
        spreads = families.spreads("spreads-1", 0.2 * last)
        if spreads.around_public:
            self.descent.panel = replace(self.panel, mean=everywhere)
        families = self.families(state)
        shared = guess_shared(families, spreads, self.intercept)
        residual = self.panel.residual if spreads.noise_shared is None else math.sqrt(spreads.noise_shared)
        factor = families.first * math.sqrt(shared.slopes)
        self.descent.refit(replace(self.panel, factor=factor, level_ratio=shared.level, residual=residual))
        self.descent.step(0.8 * last, last=True)
        return state


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


def guess_common(families: Families, spreads: Spreads, intercept: bool) -> Candidate:
    """Return the candidate with common slopes whose levels vary as users see it."""
    if not intercept:
        return Candidate(0, 0.0, 0.0)
    return Candidate(0, 0.0, _ratio(spreads.level, spreads.noise, families, MODEST))


def guess_shared(families: Families, spreads: Spreads, intercept: bool) -> Candidate:
    """Return the candidate with slopes along U that vary, as do levels, as users see it.

    Slopes turn around whichever origin leaves levels that vary less.
    """
    slopes = _ratio(spreads.head, spreads.noise_shared, families, WIDE)
    if not intercept:
        return Candidate(1, slopes, 0.0)
    own = spreads.around_own
    level = spreads.level if own else spreads.level_shared
    return Candidate(1, slopes, _ratio(level, spreads.noise_shared, families, WIDE), own)


def _ratio(square: float | None, noise: float | None, families: Families, limits: tuple[float, float]) -> float:
    """Return a variance over the noise's, less what of the noise is in it; a guess where nothing is known."""
    if square is None or noise is None:
        return UNKNOWN
    ratio = square / noise
    return float(np.clip(max(ratio - 1 / families.rows, 0.2 * ratio), *limits))


MODEST = (0.1, 3.0)  # ratios of levels to the noise to begin with, where slopes are common
WIDE = (0.01, 1e6)  # ratios where slopes along U explain much
UNKNOWN = 10.0  # where nothing is known: users' own rows decide
STRONG = 3.0  # a variance that slopes along U explain, over the noise's, from which on they come first


def conclude(learner: _Learner, state: Estimate, for_families: float, for_errors: float) -> Representation:
    """Choose the prior, measure the noise, and post the representation."""
    families = learner.families(state)
    spreads = families.spreads("spreads", 0.2 * for_families)
    chosen = _Choice(families, spreads, learner.intercept, for_families).make()
    gains = read_gains(families, chosen, learner.intercept, 0.14 * for_families)
    factor = {0: np.zeros((len(state.basis), 0)), 1: families.first, 2: families.second}[chosen.factor]
    prior = measure_errors(learner, factor * math.sqrt(chosen.slopes), chosen, spreads, for_errors)
    return publish(learner.run, state, learner.panel.transform, prior=prior, gains=gains)


@dataclass
class _Choice:
    """How the prior is chosen: ratios of the likeliest family, then the family, then its ratios again."""

    families: Families
    spreads: Spreads
    intercept: bool
    mu_squared: float
    asked: int = 0

    def make(self) -> Candidate:
        k = self.families.first.shape[1]
        chosen = guess_common(self.families, self.spreads, self.intercept)
        shared = guess_shared(self.families, self.spreads, self.intercept) if k else None
        if shared is not None and self.spreads.head is not None and shared.slopes * k > STRONG:
            chosen = shared
        chosen = self._refined(chosen, FIRST, 0.22)
        others = self._others(chosen, shared)
        if others and self.families.legible(0.22 * self.mu_squared):
            chosen = choose(self._judge([chosen, *others], 0.22))
        return self._refined(chosen, SECOND, 0.22, flip=self.intercept)

    def _others(self, chosen: Candidate, shared: Candidate | None) -> list[Candidate]:
        """Return the candidates of the other families, with levels that go with those of the chosen one."""
        p, level = self.families.second.shape[1], chosen.level
        found = [shared] if shared is not None and chosen.factor != 1 else []
        if chosen.factor == 1 and chosen.slopes * self.families.first.shape[1] <= 100 * STRONG:
            found.append(Candidate(0, 0.0, min(max(level, MODEST[0]), MODEST[1]) if self.intercept else 0.0))
        if p and chosen.factor == 0:
            found += [Candidate(2, odds / p, level, own=not self.intercept) for odds in ODDS_ALL]
        return found

    def _refined(self, chosen: Candidate, factor: float, share: float, flip: bool = False) -> Candidate:
        around = neighbours(chosen, factor, flip)
        if len(around) == 1 or not self.families.legible(share * self.mu_squared):
            return chosen
        return refine(self._judge(around, share), factor)

    def _judge(self, candidates: list[Candidate], share: float) -> Judged:
        self.asked += 1
        return self.families.judge(f"families-{self.asked}", candidates, share * self.mu_squared)


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


def measure_errors(
    learner: _Learner, factor: Array, chosen: Candidate, spreads: Spreads, mu_squared: float
) -> HeadPrior:
    """Return the prior with the noise's variance and quantiles of errors, by one more release.

    Where that is lost in its noise, the variance is the one that users see alone.
    """
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
    if values[-1] > CLEAR * sigma:
        known, fresh = (np.maximum(values[i * q : (i + 1) * q], sigma) / float(values[-1]) for i in (0, 1))
    else:
        seen = spreads.noise if chosen.factor == 0 or spreads.noise_shared is None else spreads.noise_shared
        known = fresh = np.full(q, 1.0 if seen is None else seen)
    normal = _normal_quantiles()
    quantiles = [normal, normal]
    if share:
        counts = released["tails"].value.reshape(2, ERROR_CELLS)
        quantiles = [_quantiles(part) / math.sqrt(float(size.mean())) for part, size in zip(counts, (known, fresh), strict=True)]
    noise = known * panel.target_scale**2
    return HeadPrior(panel.mean, factor, chosen.own, level, noise, quantiles[0], quantiles[1], new * fresh / known)


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
