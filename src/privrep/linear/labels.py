"""Learning from labels: the prior mean of outputs first, then what users differ in, then how strong the prior is.

Passes over the users, each a page of the billboard; pages that numbers have too are explained in `numbers`:
  scales, levels-t, covariance   where features lie; labels count as numbers   -> coordinates, first slopes
  common-t                       see `descent`                                 -> level, common slopes, contexts
  families-level                 losses with several variances of levels       -> how far levels vary
  families-look                  a vote, without a rank                        -> whether to look for U, and how hard
  (the start)                    see `starts`, of what the mean leaves         -> U_0, its rank, which may be 0
  families-0                     losses of heads along it                      -> how long heads are, whether to go on
  *-scout, *-t                   rounds, see `alternation`                     -> U
  common-t                       a last step that knows how heads vary         -> level, common slopes, contexts
  families-t                     see `choice`                                  -> how far users differ, and in what
  families-votes                 a vote, where losses cannot tell              -> whether users may do without the prior
  families                       losses of heads and of users alone            -> what is gained
  trust-t                        derivatives of losses by a factor of outputs  -> probabilities right on average
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field, replace
from typing import ClassVar

import numpy as np

from privrep.heads.label_posterior import stretch
from privrep.linear.alternation import FOR_CLASSES, AlternationSettings, Round, RoundContext, run_rounds
from privrep.linear.choice import ODDS_ALL, PriorChoice, read_gains, refine
from privrep.linear.descent import Descent
from privrep.linear.families import Candidate, Judged
from privrep.linear.label_steps import LabelTrust, LabelVotes
from privrep.linear.numbers import HOPE, STRONG_HOPE, PriorLearner, make_empty_estimate
from privrep.linear.panel import PanelSettings, find_panel
from privrep.linear.spreads import Spreads
from privrep.linear.starts import Initialiser
from privrep.local.losses import Loss
from privrep.local.prior import LabelPrior
from privrep.local.representation import Estimate, Representation, publish
from privrep.local.transform import FeatureTransform
from privrep.privacy.bounds import Bound
from privrep.privacy.calibration import Query
from privrep.privacy.run import Run
from privrep.typing import Array

PURPOSES = {
    "families-level": "how far users' levels vary",
    "trust": "how far outputs are to be believed",
}
"""Purposes of the pages that this module asks for; see `method.Method.purposes`."""

LEVEL, UNHEARD = 1.0, 3.0  # variance of levels to begin with, and where not even their mean was heard
STEP, HALF_STEP = 8.0, 3.0  # between neighbours when the variance of levels is looked for, and again
HEADS = (0.2, 2.0, 20.0)  # variances of heads along U to begin with
MOST_LEVEL = 0.25  # of mu^2, for the first look at how far levels vary: little else can be learned from few users
HARDLY_ANYBODY = 3.0  # votes for heads over votes against, from which on heads without slopes are for everybody
MOSTLY_NOISE = 0.3  # mean squared sine of U from which on it is not the first choice
NOTHING_SEEN = Spreads(None, None, None, None, None)  # no user's own variances: of labels they say little


@dataclass(frozen=True)
class LabelsSettings:
    """Shares of mu^2, fixed beforehand."""

    panel: PanelSettings = field(default_factory=lambda: PanelSettings(moments=0.12))
    common: float = 0.06  # of the first step on the prior mean
    level: float = 0.02  # how far levels vary
    level_again: float = 0.02  # the same, of what is left
    look: float = 0.01  # whether slopes differ at all
    start: float = 0.15
    brief_start: float = 0.1  # where nobody gives a rank, and users' slopes do not differ strongly
    first_families: float = 0.03
    families: float = 0.08
    trust: float = 0.02
    again: float = 0.15  # of what is left, for another step on the prior mean beside rounds
    last: float = 0.12  # and for the last


def learn_labels(
    run: Run,
    rank: int | None,
    method: Round,
    initialiser: Initialiser,
    *,
    intercept: bool,
    transform: FeatureTransform | None,
    loss: Loss,
    settings: AlternationSettings | None = None,
    shares: LabelsSettings | None = None,
) -> Representation:
    """Learn the prior of classifiers' heads and a shared representation from labels.

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
        loss: of the labels.
        settings: of the rounds.
        shares: of the budget.
    """
    s, total, d = shares or LabelsSettings(), run.ledger.capacity, run.users.facts.features
    panel, spent = find_panel(run, total, intercept, transform, s.panel, loss)
    descent = Descent(run, panel, total, spent=spent)
    descent.step(s.common * total, last=False)
    learner = LabelLearner(run, method, settings or FOR_CLASSES, descent, rank, intercept)
    if not learner.panel.mean.level.any():  # where it lies was not heard, and levels are spread around it
        descent.panel = replace(descent.panel, level_ratio=UNHEARD)
    learner.find_level(make_empty_estimate(d), STEP, s.level * total)
    s = s if loss.name == "log" else replace(s, trust=0.0)  # outputs that stand for no probabilities need no trust
    later = (s.families + s.trust) * total
    state = make_empty_estimate(d)
    hope = math.inf if rank is not None else learner.hope(s.look * total)
    if hope > HOPE:
        state = learner.start(initialiser, (s.start if hope > STRONG_HOPE else s.brief_start) * total)
    if state.basis.shape[1]:
        state = learner.doubt(state, s.first_families * total)
    state = learner.improve(state, total - later - descent.spent, s)
    return learner.conclude(state, s.families * total, s.trust * total)


@dataclass
class LabelLearner(PriorLearner):
    """A fit of labels under way."""

    heads: float = HEADS[1]  # variance of heads along U
    asked: int = 0  # releases about the variance of levels so far

    @property
    def loss(self) -> Loss:
        """Return the loss of the labels."""
        loss = self.panel.loss
        assert loss is not None
        return loss

    @property
    def context(self) -> RoundContext:
        """Return what stays the same in the rounds: prior mean, precision of heads and variance of levels as known
        now."""
        panel = self.panel
        prior = panel.seen_mean, 1 / self.heads, panel.level_ratio
        return RoundContext(self.run, panel.transform, self.intercept, self.settings, self.loss, *prior)

    def find_level(self, state: Estimate, factor: float, mu_squared: float) -> None:
        """Ask users with which variance of levels they lose least, and go on with it.

        The candidates are the variance so far, and `factor` times more and less. Nothing is asked where users are too
        few.

        Args:
            state: the representation so far.
            factor: between neighbouring candidates.
            mu_squared: what the release costs.
        """
        families, level = self.families(state), self.panel.level_ratio
        if self.asked == 0:
            mu_squared = max(mu_squared, min(families.legible_price, MOST_LEVEL * self.run.ledger.capacity))
        if not (self.intercept and families.is_legible(mu_squared)):
            return
        self.asked += 1
        kind = (1, self.heads) if state.basis.shape[1] else (0, 0.0)
        candidates = [Candidate(*kind, level * each) for each in (1.0, factor, 1 / factor)]
        judged = families.judge(f"families-level-{self.asked}", candidates, mu_squared)
        self.descent.spent += mu_squared
        self.use_level(refine(judged, factor).level)

    def use_level(self, level: float) -> None:
        """Go on with another variance of levels, and the prior mean that goes with it."""
        self.descent.stretch(stretch(self.panel.level_ratio, level) if self.intercept else 1.0, level)

    def doubt(self, state: Estimate, mu_squared: float) -> Estimate:
        """Return the state, or rank 0 where nobody asks for a rank and heads along it do no better than others.

        It also finds how long heads along the state's directions are.

        Args:
            state: the start.
            mu_squared: what the release costs.
        """
        families, level = self.families(state), self.panel.level_ratio
        own = self.intercept
        shared = [Candidate(1, slopes, level, own) for slopes in HEADS]
        others, width = [], families.second.shape[1]
        if self.rank is None:  # else U is asked for, whatever others do
            odds = ODDS_ALL[-1:] if self.loss.softmax else ODDS_ALL  # in all features softmax takes its time
            others = [Candidate(0, 0.0, level)]
            others += [Candidate(2, each / width, level, own=not own) for each in odds if width]
        if not families.is_legible(mu_squared):
            if self.rank is not None or self.few:
                return state
            votes, sigma = families.vote("families-0", [shared[1], *others], mu_squared)
            self.descent.spent += mu_squared
            better = votes[0] > max(votes[1], votes[2:].sum()) + 2 * sigma
            return state if better else state.first(0)
        judged = families.judge("families-0", [*shared, *others], mu_squared)
        self.descent.spent += mu_squared
        self.heads = _find_head_variance(judged, len(shared))
        if self.rank is not None:
            return state
        losses = judged.by_factor()
        clearly = (1.0 if self.few else 3.0) * judged.sigma
        return state if losses[1] < min(losses[f] for f in losses if f != 1) - clearly else state.first(0)

    def improve(self, state: Estimate, left: float, s: LabelsSettings) -> Estimate:
        """Return the state after rounds, and after steps on the prior mean that share their budget.

        Args:
            state: the start.
            left: mu^2 to spend on all of it.
            s: shares of the budget.
        """
        d, k = state.basis.shape
        if not k or k == d:
            before = self.descent.spent
            self.descent.step(0.35 * left, last=False)
            self.find_level(make_empty_estimate(d), HALF_STEP, s.level_again * left)
            self.descent.step(left - (self.descent.spent - before), last=True)
            return state
        before = self.descent.spent
        if self.descent.heard:
            self.descent.step(s.again * left, last=False)
            self.find_level(state, HALF_STEP, s.level_again * left)
        last = s.last * left
        state = run_rounds(self.context, state, self.rank, self.method, left - (self.descent.spent - before) - last)
        self.descent.panel = replace(self.panel, mean=self.panel.seen_mean)
        factor = self.families(state).first * math.sqrt(self.heads)
        self.descent.refit(replace(self.panel, factor=factor))
        self.descent.step(last, last=True)
        return state

    def conclude(self, state: Estimate, for_families: float, for_trust: float) -> Representation:
        """Choose the prior, measure how far to believe it, and post the representation.

        Args:
            state: the representation so far.
            for_families: mu^2 for the choice and for gains.
            for_trust: mu^2 for factors of outputs.
        """
        families, logits = self.families(state), self.loss.name == "log"
        level = self.panel.level_ratio if self.intercept else 0.0
        seen = bool(state.basis.shape[1]) and state.total_error < MOSTLY_NOISE * state.basis.shape[1]
        asked = families, NOTHING_SEEN, self.intercept, for_families
        choice = LabelChoice(*asked, heads=self.heads, level=level, seen=seen)
        chosen = choice.make()
        left = 0.8 * for_families - choice.spent  # what was not worth asking for
        self.use_level(chosen.level)
        factor = {0: np.zeros((len(state.basis), 0)), 1: families.first, 2: families.second}[chosen.factor]
        factor, decided = factor * math.sqrt(chosen.slopes), True
        if choice.asked == 0 and not self.run.users.facts.sparse:
            decided = self.ask_votes(factor, chosen, 0.3 * for_families)
            left -= 0.3 * for_families
        gains = read_gains(families, chosen, self.intercept, 0.2 * for_families + (0.0 if logits else left))
        prior = LabelPrior(self.panel.mean, factor, chosen.own, chosen.level, 1.0, 1.0, logits, decided)
        if logits:
            prior = self.find_trust(prior, for_trust + left)
        return publish(self.run, state, self.panel.transform, prior=prior, gains=gains)

    def ask_votes(self, factor: Array, chosen: Candidate, mu_squared: float) -> bool:
        """Return whether clearly more users do better by heads of the prior than by classifiers of their own.

        Where noise leaves that open, each user chooses for itself. Where slopes were not heard, each user does so
        unless hardly anybody does better without the prior.

        Args:
            factor: the directions along which slopes vary, (d, p).
            chosen: the prior of the heads.
            mu_squared: what the votes cost.
        """
        scale = self.panel.transform.scale
        step = LabelVotes(self.panel.mean, factor, chosen.own, chosen.level, scale, self.loss)
        query = Query(Bound(1.0, 2, acute=True), mu_squared)
        votes = self.run.release("families-votes", step, {"votes": query})["votes"]
        heads, own = votes.value
        bar = own if self.descent.heard else HARDLY_ANYBODY * own
        return bool(heads - bar > 2 * math.sqrt(2.0) * votes.sigma)

    def find_trust(self, prior: LabelPrior, mu_squared: float) -> LabelPrior:
        """Return the prior with factors of outputs that make probabilities right on average, by two of Newton's steps.

        A step is shrunk by how much of it is noise, and stays within a factor of two.

        Args:
            prior: with the factors so far.
            mu_squared: what both steps cost together.
        """
        size = TRUST_NORM * (1.5 + float(np.abs(prior.mean.level).max()))  # of outputs, about
        norm = size * math.sqrt(self.panel.location.typical_rows)
        for t in (1, 2):
            step = LabelTrust(
                prior.mean, prior.factor, prior.own_origin, prior.level, self.loss, prior.known, prior.new
            )
            query = Query(Bound(norm, 4), mu_squared / 2)
            released = self.run.release(f"trust-{t}", step, {"trust": query})["trust"]
            slope, curve, new_slope, new_curve = (float(value) for value in released.value)
            known = prior.known * _find_factor(slope, curve, released.sigma, prior.known)
            new = prior.new * _find_factor(new_slope, new_curve, released.sigma, prior.new)
            prior = replace(prior, known=known, new=new)
        return prior


USUAL = 0.15
TRUST_NORM = 0.8  # of a user's derivatives, for each root of its rows, over the size of outputs


def _find_factor(slope: float, curve: float, sigma: float, here: float) -> float:
    """Return the number to multiply a factor of outputs by: the posterior mean of Newton's step, given its noise.

    Before it is asked, the logarithm of the factor is taken to be normal around 0 with deviation USUAL.

    Args:
        slope: minus the released derivative of users' losses by the factor.
        curve: the released second derivative.
        sigma: standard deviation of the noise in both.
        here: the factor at which derivatives were taken.
    """
    if curve < 4 * sigma:
        return 1.0
    move = slope / curve / here
    noise = (sigma / curve / here) ** 2
    return float(np.clip(1 + move * USUAL**2 / (USUAL**2 + noise), 0.5, 2.0))


def _find_head_variance(judged: Judged, count: int) -> float:
    """Return the variance of heads where a parabola through the first `count` losses, over its logarithm, is least."""
    low, middle, high = (float(loss) for loss in judged.losses[:count])
    curvature = max(low + high - 2 * middle, 0.0) + 3 * judged.sigma
    place = float(np.clip((low - high) / (2 * curvature), -1.0, 1.0))
    return float(HEADS[1] * (HEADS[2] / HEADS[1]) ** place)


@dataclass
class LabelChoice(PriorChoice):
    """The search for the prior of labels, from the variances that earlier losses found."""

    flips_last: ClassVar[bool] = False
    heads: float = HEADS[1]
    level: float = LEVEL
    seen: bool = True  # whether U is more than noise, as far as its releases tell

    def guess(self) -> tuple[Candidate, Candidate | None]:
        """Return the likeliest candidate before any is judged, and the candidate with slopes along U; None if there is
        no U."""
        common = Candidate(0, 0.0, self.level)
        if not self.families.first.shape[1]:
            return common, None
        shared = Candidate(1, self.heads, self.level, self.intercept)
        return (shared if self.seen else common), shared

    def others(self, chosen: Candidate, shared: Candidate | None) -> list[Candidate]:
        """Return the candidates of the other families, and candidates with the other origin, at which levels may vary
        less.

        The loss of a label has no scale to speak of, and the last ratios belong to one origin.

        Args:
            chosen: the candidate so far.
            shared: the candidate with slopes along U; None: there is no U.
        """
        found = super().others(chosen, shared)
        if self.intercept and chosen.factor:
            found += [replace(chosen, own=not chosen.own, level=chosen.level * each) for each in (1.0, 0.1)]
        return found
