"""Learning from numbers: the prior mean first, then what users differ in, then how strong the prior is.

Passes over the users, each a page of the billboard:
  scales, levels-t, covariance   see `panel`                               -> coordinates, first slopes
  common-t                       see `descent`                             -> level, common slopes, contexts
  families-look                  a vote, without a rank                    -> whether to look for U, and how hard
  (the start)                    see `starts`, of what the mean leaves     -> U_0, its rank, which may be 0
  spreads-0, families-0          how heads along it do, without a rank     -> whether to go on with U
  *-scout, *-t                   rounds, see `alternation`                 -> U
  spreads-1, common-t            a last step that knows how heads vary     -> level, common slopes, contexts
  spreads, families-t            see `choice`                              -> how far users differ, and in what
  families-votes                 a vote, where losses cannot tell          -> whether users may do without the prior
  families                       losses of heads and of users alone        -> what is gained
  calibration                    errors in standard deviations             -> the noise's variance, intervals
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field, replace

import numpy as np

from privrep.linear.alternation import (
    FOR_NUMBERS,
    AlternationSettings,
    Round,
    RoundContext,
    find_head_spread,
    run_rounds,
)
from privrep.linear.choice import MODEST, ODDS_ALL, PriorChoice, guess_common, guess_shared, read_gains
from privrep.linear.descent import Descent
from privrep.linear.families import ERROR_CELLS, Candidate, Families, HeadErrors, HeadVotes
from privrep.linear.panel import Panel, PanelSettings, find_panel
from privrep.linear.spreads import Spreads
from privrep.linear.starts import Initialiser, Start
from privrep.linear.tails import read_quantiles
from privrep.linear.transform import CLEAR
from privrep.local.prior import HeadPrior
from privrep.local.representation import Estimate, Representation, publish
from privrep.local.transform import FeatureTransform
from privrep.privacy.bounds import Bound
from privrep.privacy.calibration import Query
from privrep.privacy.run import Run
from privrep.typing import Array

PURPOSES = {
    "spreads": "how far users' levels and slopes vary",
    "families": "how far users differ, and in what",
    "families-look": "whether users' slopes differ",
    "families-votes": "whether users do better alone",
    "calibration/noise": "noise of the targets",
    "calibration/tails": "how often errors are large",
}
"""Purposes of the pages that this module asks for; see `method.Method.purposes`."""
FEW = 4  # features for each row of a user with many rows, from which on it has little to go by alone
HOPE = 1.1  # users who do better if slopes differ, for one who does not, from which on U is looked for
STRONG_HOPE = 3.5  # and from which on more is spent on it
TYPICAL = 0.5  # difference of a label's losses by two candidates, where users differ much
MOST_ALL = 256  # features up to which slopes may differ in all of them


@dataclass(frozen=True)
class NumbersSettings:
    """Shares of mu^2, fixed beforehand."""

    panel: PanelSettings = field(default_factory=PanelSettings)
    common: float = 0.05  # of the first step on the prior mean
    look: float = 0.01  # whether slopes differ at all
    start: float = 0.18
    brief_start: float = 0.1  # where nobody gives a rank, and users' slopes do not differ strongly
    first_families: float = 0.03
    families: float = 0.08
    calibration: float = 0.02
    again: float = 0.25  # of what is left, for another step on the prior mean beside rounds
    last: float = 0.08  # and for the last


def learn_numbers(
    run: Run,
    rank: int | None,
    method: Round,
    initialiser: Initialiser,
    *,
    intercept: bool,
    transform: FeatureTransform | None,
    settings: AlternationSettings | None = None,
    shares: NumbersSettings | None = None,
) -> Representation:
    """Learn the prior of heads and a shared representation of numbers.

    Formal guarantee, for the epsilon and delta of the run's budget:
      - Everything returned or posted is a function of the releases charged to `run.ledger`.
      - Hence it is (epsilon, delta)-DP at user level under the ledger's relation, for any data whatever.

    Args:
        run: asks the users.
        rank: of the representation; None reads it off releases, 0 has none.
        method: what a round does.
        initialiser: where rounds start.
        intercept: whether users have levels.
        transform: declared public coordinates; None: found by charged releases.
        settings: of the rounds.
        shares: of the budget.
    """
    s, total, d = shares or NumbersSettings(), run.ledger.capacity, run.users.facts.features
    panel, spent = find_panel(run, total, intercept, transform, s.panel)
    descent = Descent(run, panel, total, spent=spent)
    descent.step(s.common * total, last=False)
    later = (s.families + s.calibration) * total
    learner = PriorLearner(run, method, settings or FOR_NUMBERS, descent, rank, intercept)
    state = make_empty_estimate(d)
    hope = math.inf if rank is not None else learner.hope(s.look * total)
    if hope > HOPE:
        state = learner.start(initialiser, (s.start if hope > STRONG_HOPE else s.brief_start) * total)
    if rank is None and 0 < state.basis.shape[1] < d:
        state = learner.doubt(state, s.first_families * total)
    state = learner.finish(state, total - later - descent.spent, s)
    return conclude(learner, state, s.families * total, s.calibration * total)


def make_empty_estimate(d: int) -> Estimate:
    """Return a representation of rank 0 of d features."""
    return Estimate(np.zeros((d, 0)), np.zeros((0, 0)))


@dataclass
class PriorLearner:
    """A fit under way."""

    run: Run
    method: Round
    settings: AlternationSettings
    descent: Descent
    rank: int | None
    intercept: bool

    @property
    def panel(self) -> Panel:
        """Return what is known of the population so far."""
        return self.descent.panel

    @property
    def context(self) -> RoundContext:
        """Return what stays the same in the rounds."""
        return RoundContext(self.run, self.panel.transform, self.intercept, self.settings, mean=self.panel.seen_mean)

    def start(self, initialiser: Initialiser, mu_squared: float) -> Estimate:
        """Return where rounds start: rank 0 where nobody asks for a rank and no direction stands out from the noise.

        Args:
            initialiser: finds the directions.
            mu_squared: what the start costs.
        """
        d, rank = self.run.users.facts.features, self.rank
        if rank == 0:
            return make_empty_estimate(d)
        if d in (rank, 1):
            return Estimate(np.eye(d), np.zeros((d, d)))
        panel = self.panel
        seen = panel.loss, panel.seen_mean, panel.level_ratio
        state = initialiser(Start(self.run, panel.transform, rank, mu_squared, self.intercept, *seen))
        self.descent.spent += mu_squared
        if rank is not None:
            return state
        rows = self.panel.location.most_rows
        least = int(self.few)  # rounds may find what a start does not, and few rows are lost without it
        return state.first(min(max(state.found, least), self.method.limit_rank(d), max(rows - 1, 0)))

    @property
    def few(self) -> bool:
        """Return whether users have so few rows that without a representation they have little to go by."""
        return self.run.users.facts.features > FEW * self.panel.location.most_rows

    def hope(self, mu_squared: float) -> float:
        """Return whether a representation is worth looking for: how many users do better if slopes differ, for each who
        does not.

        Return 0 where that is lost in noise, and infinity where it cannot be asked. Users with many rows for their
        features tell by how they do with slopes that differ in all features alike.

        Args:
            mu_squared: what the vote costs.
        """
        families = self.families(make_empty_estimate(self.run.users.facts.features))
        width = families.second.shape[1]
        if self.few or width < 2:
            return math.inf
        ratio = self.panel.guess_level(MODEST) if self.intercept else 0.0
        candidates = [Candidate(0, 0.0, ratio), Candidate(2, ODDS_ALL[0] / width, ratio, own=not self.intercept)]
        votes, sigma = families.vote("families-look", candidates, mu_squared)
        self.descent.spent += mu_squared
        if votes[1] - votes[0] < 3 * math.sqrt(2.0) * sigma:
            return 0.0
        return float(votes[1] / max(votes[0], sigma))

    def families(self, state: Estimate) -> Families:
        """Return the parts of candidates, with the directions of this state."""
        panel, d = self.panel, self.run.users.facts.features
        matrix = Representation(state.basis, panel.transform, 0.0, find_head_spread(state)).matrix
        facts = self.run.users.facts
        second = np.zeros((d, 0)) if facts.sparse or d > MOST_ALL else _make_full_factor(panel)
        location = panel.location
        many = location.users, location.typical_rows, panel.level_guess
        unit = 1.0 if panel.loss is None else TYPICAL
        return Families(self.run, panel.mean, matrix, second, panel.target_scale, *many, unit, panel.loss)

    def doubt(self, state: Estimate, mu_squared: float) -> Estimate:
        """Return the state, or rank 0 where heads along it do no better than others.

        Args:
            state: the start.
            mu_squared: what the releases cost together.
        """
        families = self.families(state)
        spreads = families.ask_spreads("spreads-0", 0.4 * mu_squared)
        candidates = [guess(families, spreads, self.intercept) for guess in (guess_common, guess_shared)]
        p = families.second.shape[1]
        candidates += [Candidate(2, odds / p, candidates[0].level, own=not self.intercept) for odds in ODDS_ALL if p]
        self.descent.spent += 0.4 * mu_squared
        if not families.is_legible(0.6 * mu_squared):
            votes, sigma = families.vote("families-0", candidates, 0.6 * mu_squared)
            self.descent.spent += 0.6 * mu_squared
            better = votes[1] > max(votes[0], votes[2:].sum()) + 2 * sigma
            return state if better or self.few else state.first(0)
        judged = families.judge("families-0", candidates, 0.6 * mu_squared, relative=True)
        self.descent.spent += 0.6 * mu_squared
        loss = judged.by_factor()
        clearly = (1.0 if self.few else 3.0) * judged.sigma
        return state if loss[1] < min(loss[f] for f in loss if f != 1) - clearly else state.first(0)

    def finish(self, state: Estimate, left: float, s: NumbersSettings) -> Estimate:
        """Return the state after rounds, and after steps on the prior mean that share their budget.

        Args:
            state: the start.
            left: mu^2 to spend on all of it.
            s: shares of the budget.
        """
        d, k = state.basis.shape
        if not k or k == d:
            for share in (0.4 * left, 0.6 * left):
                self.descent.step(share, last=share > 0.5 * left)
            return state
        before = self.descent.spent
        if self.descent.heard:
            self.descent.step(s.again * left, last=False)
        last = s.last * left
        state = run_rounds(self.context, state, self.rank, self.method, left - (self.descent.spent - before) - last)
        mean = self.panel.seen_mean
        self.descent.panel = replace(self.panel, mean=mean)
        everywhere = replace(mean, located=np.ones_like(mean.located))  # with zero for a centre where none is known
        families = replace(self.families(state), mean=everywhere)
        spreads = families.ask_spreads("spreads-1", 0.2 * last)
        if spreads.around_public:
            self.descent.panel = replace(self.panel, mean=everywhere)
        families = self.families(state)
        shared = guess_shared(families, spreads, self.intercept)
        residual = self.panel.residual if spreads.noise_shared is None else math.sqrt(spreads.noise_shared)
        factor = families.first * math.sqrt(shared.slopes)
        self.descent.refit(replace(self.panel, factor=factor, level_ratio=shared.level, residual=residual))
        self.descent.step(0.8 * last, last=True)
        return state


def _make_full_factor(panel: Panel) -> Array:
    """Return the factor (d, d) of slopes that differ in all features alike, in the scale of each within users."""
    d = len(panel.mean.slopes)
    return np.diag(np.where(panel.location.varies[:d], 1 / panel.transform.scale, 0.0))


def conclude(learner: PriorLearner, state: Estimate, for_families: float, for_errors: float) -> Representation:
    """Choose the prior, measure the noise, and post the representation.

    Args:
        learner: the fit.
        state: the representation so far.
        for_families: mu^2 for the choice and for gains.
        for_errors: mu^2 for the noise and for intervals.
    """
    families = learner.families(state)
    spreads = families.ask_spreads("spreads", 0.2 * for_families)
    choice = PriorChoice(families, spreads, learner.intercept, for_families)
    chosen = choice.make()
    gains = read_gains(families, chosen, learner.intercept, 0.14 * for_families)
    for_errors += 0.66 * for_families - choice.spent  # what was not worth asking for
    factor = {0: np.zeros((len(state.basis), 0)), 1: families.first, 2: families.second}[chosen.factor]
    factor, decided = factor * math.sqrt(chosen.slopes), True
    if choice.asked == 0 and not learner.run.users.facts.sparse:
        decided = ask_votes(learner, factor, chosen, 0.3 * for_families)
        for_errors -= 0.3 * for_families
    prior = replace(measure_errors(learner, factor, chosen, spreads, for_errors), decided=decided)
    return publish(learner.run, state, learner.panel.transform, prior=prior, gains=gains)


def ask_votes(learner: PriorLearner, factor: Array, chosen: Candidate, mu_squared: float) -> bool:
    """Return whether more users do better by heads of the prior than by regressions of their own.

    A vote is the cheapest of questions, for populations too small for losses.

    Args:
        learner: the fit.
        factor: the directions along which slopes vary, (d, p).
        chosen: the prior of the heads.
        mu_squared: what the votes cost.
    """
    panel = learner.panel
    step = HeadVotes(panel.mean, factor, chosen.own, chosen.level, panel.transform.scale)
    votes = learner.run.release("families-votes", step, {"votes": Query(Bound(1.0, 2, acute=True), mu_squared)})
    heads, own = votes["votes"].value
    return bool(heads >= own)


def measure_errors(
    learner: PriorLearner, factor: Array, chosen: Candidate, spreads: Spreads, mu_squared: float
) -> HeadPrior:
    """Return the prior with the noise's variance and quantiles of errors, by one more release.

    Where that is lost in its noise, the variance is what users see alone, and infinite where nobody is heard.

    Args:
        learner: the fit.
        factor: the directions along which slopes vary, (d, p).
        chosen: the prior of the heads.
        spreads: variances that users see alone.
        mu_squared: what the release costs.
    """
    panel, q = learner.panel, len(learner.panel.target_scale)
    location, level = panel.location, chosen.level
    odds = chosen.slopes * factor.shape[1] if chosen.factor else 0.0
    new = np.full(q, 1.0 + odds + (level if math.isfinite(level) else 8.0))
    seen = spreads.noise if chosen.factor == 0 or spreads.noise_shared is None else spreads.noise_shared
    scale = panel.target_scale * math.sqrt(1.0 if seen is None else seen)  # in which errors are about one
    step = HeadErrors(panel.mean, factor, chosen.own, level, new, scale)
    norm = 2.0 * location.typical_rows * math.sqrt(2 * q)
    bound = Bound(math.sqrt(2.0) * q * location.typical_rows, 2 * ERROR_CELLS, acute=True)
    queries = {
        "noise": Query(Bound(norm, 2 * q + 2, acute=True), 0.5 * mu_squared),
        "tails": Query(bound, 0.5 * mu_squared),
    }
    released = learner.run.release("calibration", step, queries)
    values, sigma = released["noise"].value, released["noise"].sigma
    known = fresh = np.ones(q)
    heard = bool(values[-2:].min() > CLEAR * sigma)
    if heard:
        known, fresh = (np.maximum(values[i * q : (i + 1) * q], sigma) / float(values[i - 2]) for i in (0, 1))
    tails = released["tails"]
    sizes = known.mean(), fresh.mean()
    counts = tails.value.reshape(2, ERROR_CELLS)
    quantiles = [read_quantiles(part, tails.sigma, float(size)) for part, size in zip(counts, sizes, strict=True)]
    told = heard or seen is not None or bool(location.varies[-q:].all())
    noise = known * scale**2 if told else np.full(q, math.inf)  # nobody said how large errors are
    return HeadPrior(panel.mean, factor, chosen.own, level, noise, quantiles[0], quantiles[1], new * fresh / known)
