"""Private factorisation of ratings: level, offsets and factors of items are released, users' tastes never leave them.

    r_ij = level + u_i (c_j + b_i + <F_j, v_i> + rest)

c_j says how far item j is rated above its raters' levels, and F_j are its factors. Users' spreads u_i, levels b_i and
tastes v_i stay with them (`heads.ratings`). Pages, in this order:

    scales, target   where ratings lie, how far a user's vary, how many a user has: histograms (`linear.location`)
    presence         which items are rated how often
    offsets-1        what users' levels leave of their ratings, by item; how to split the rest is planned from it
    offsets-2, ...   the same after the offsets so far (`linear.offsets`)
    levels           the level, and how far users' levels and ratings vary
    taste-1, ...     pairs of the items that are rated most (`linear.pairs`), if they are expected to pay
    losses           what it is worth, by users' leave-one-out losses

The share set aside for pairs goes to offsets if pairs are not expected to pay. If the first look at pairs shows
nothing, the rest of the share does so, too. No range of ratings is assumed.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import ClassVar

import numpy as np

from privrep.linear.location import Location, find_location
from privrep.linear.method import Method, Problem
from privrep.linear.offsets import Evidence, Items, Offsets, estimate_offsets
from privrep.linear.pairs import PairSums, TastePlan, find_factors, plan_taste, read_together, see_factors
from privrep.linear.panel_steps import list_typical_rows
from privrep.linear.rating_steps import (
    FARTHEST,
    LEVEL_NORM,
    LEVEL_PARTS,
    LOSS_NORM,
    LOSS_PARTS,
    MOST_SHARED,
    WIDEST,
    ItemPull,
    RatedItems,
    RatingLevels,
    RatingLosses,
    RatingPairs,
)
from privrep.local.representation import FREE, Estimate, Gains, Ratings, Representation, publish
from privrep.local.transform import FeatureTransform
from privrep.privacy.bounds import Bound
from privrep.privacy.calibration import Query
from privrep.privacy.moments import symmetrise
from privrep.privacy.run import Run
from privrep.typing import Array

HISTOGRAMS = (0.01, 0.04)  # of mu^2: the least and the most for one histogram
MOMENTS_SHARES = (0.003, 0.03)  # of mu^2, at least and at most: for levels, and for losses
LEVEL_HEARD = 0.015  # noise of means over users that levels pay for
HEARD, LOST = 0.0027, 0.053  # noise of means over users that losses pay for, and that they are lost in
PRESENCE_SHARES, FIRST_SHARES = (0.02, 0.04), (0.02, 0.2)  # of mu^2, at least and at most
KNOWN = 0.1  # noise of a typical item's presence, and of its first offset, over the presence: what is paid for
PASSES = 3  # on offsets, after the first
PROBE, LEFT_PASSES = 0.6, 2  # of what pairs get: for the first look; passes on offsets if nothing is seen in it
TOGETHER = 0.05  # of the first look, for which items are rated together
MOST_PAIRED, MOST_WORK = 1024, 3e10  # items; users times the square of items
FAINT = 80.0  # users times mu, below which a histogram may not be heard
SINGLE = 1.2  # ratings of a user, below which almost all have one
LEVEL_PART, LEVEL_FOLDS = 0.2, 1.2  # guess of levels' variance over ratings' variance; deviation of its logarithm
TAILS = 4.0  # degrees of freedom of that guess
APART_FOLDS = (1.5, 0.7)  # doubt about the logarithm of the variance of users' means: too large, or too small
LEVELS = np.geomspace(0.002, 1e6, 400)  # levels' variance over a user's ratings' variance
SPREAD_OFF, CENTRE_OFF = 0.4, 0.5  # doubt about a user's variance, and the level, by histograms: relative, in spreads
ALONE_HEARD = 0.1  # noise at which it is heard how many users have a single rating
MANY_ROWS, SHRUNK_SHARE = 20.0, 0.3  # ratings of a user above which levels are its own; of mu^2, for levels below it
FEW_ROWS = 10.0  # ratings of a user, where that was not heard


def private_factorization(run: Run, rank: int | None) -> Representation:
    """Learn offsets and factors of the items, on the whole budget.

    Formal guarantee, for the epsilon and delta of the run's budget:
      - Everything returned or posted is a function of the releases charged to `run.ledger`.
      - Hence it is (epsilon, delta)-DP at user level under the ledger's relation, for any data whatever.

    Args:
        run: asks the users.
        rank: the most factors to keep; None: as many as stand out; 0: none.
    """
    d, total = run.users.facts.features, run.ledger.capacity
    location, spent = find_location(run, total, True, HISTOGRAMS, np.ones(d))
    state = _Fit.start(run, location)
    levels, losses = state.price_levels(total), state.price_losses(total)
    if not d:  # nothing but levels can be learned
        return state.with_levels(total - spent - losses).publish(losses)
    state, cost = state.with_items(total)
    left = total - levels - losses - spent - cost
    plan = TastePlan(0.0, 0) if rank == 0 else state.plan(left)
    state = state.with_passes(PASSES, (1 - plan.share) * left)
    state = state.with_levels(levels)
    if plan.share:
        state = state.with_taste(plan, rank, plan.share * left)
    return state.publish(losses)


@dataclass(frozen=True)
class _Fit:
    """The state of a fit. Every method but `start` and `plan` asks users, and returns the state after that."""

    run: Run
    location: Location
    ratings: Ratings  # offsets included
    items: Items | None = None
    evidence: Evidence | None = None
    variance: float = 0.0  # of the offsets
    passes: int = 0
    factors: Array | None = None  # (d, k)
    error: Array | None = None  # (k,)

    @classmethod
    def start(cls, run: Run, location: Location) -> _Fit:
        """Return the state that histograms of where ratings lie tell."""
        heard, varies = bool(location.between[-1] > 0), bool(location.varies[-1])
        spread = float(location.scale[-1]) if varies else 0.0
        apart = float(location.between[-1]) ** 2
        single = location.rows.sum() > 0 and location.typical_rows < SINGLE  # users with one rating each do not tell
        faint = location.users * math.sqrt(run.ledger.capacity) < FAINT
        if heard and not varies and (single or faint):
            spread = math.sqrt(apart / (LEVEL_PART + 1 / location.typical_rows))
        sampled = spread**2 / (location.typical_rows if location.rows.sum() > 0 else FEW_ROWS)
        variance = max(apart - sampled, LEVEL_PART * apart) if heard else FREE
        offset = np.zeros(run.users.facts.features)
        return cls(run, location, Ratings(offset, 1.0, float(location.centre[-1]), spread, variance))

    @property
    def column(self) -> Array:
        """Return the offsets as the matrix of a step, (d, 1)."""
        return self.ratings.offset[:, None]

    @property
    def users(self) -> float:
        """Return roughly how many users there are, at least 1."""
        return max(self.location.users, 1.0)

    def price_levels(self, total: float) -> float:
        """Return the part of `total` (mu^2) for levels: more where users have few ratings, whose levels are shrunk."""
        many = self.location.rows.sum() > 0 and self.location.typical_rows > MANY_ROWS
        least, most = MOMENTS_SHARES
        good = (2 * LEVEL_NORM / (LEVEL_HEARD * self.users)) ** 2
        return float(np.clip(good, least * total, (most if many else SHRUNK_SHARE) * total))

    def price_losses(self, total: float) -> float:
        """Return the part of `total` (mu^2) for losses: what is needed to hear them, the least if they are lost
        anyway."""
        least, most = (share * total for share in MOMENTS_SHARES)
        good, lost = ((2 * LOSS_NORM / (noise * self.users)) ** 2 for noise in (HEARD, LOST))
        return least if lost > most else float(np.clip(good, max(least, lost), most))

    @property
    def rows(self) -> float:
        """Return how many ratings a user has, in the mean of roots, which weigh items."""
        counts = self.location.rows
        if not counts.sum() > 0:
            return FEW_ROWS
        return float((counts @ np.sqrt(list_typical_rows()) / counts.sum()) ** 2)

    def with_items(self, total: float) -> tuple[_Fit, float]:
        """Return the state after a first look at items, and what of mu^2 it cost.

        Args:
            total: mu^2 of the whole fit.
        """
        d = len(self.ratings.offset)
        typical = KNOWN * self.users * math.sqrt(self.rows) / d
        counted, first = (
            float(np.clip(factor / typical**2, low * total, high * total))
            for factor, (low, high) in ((2.0, PRESENCE_SHARES), (4.0, FIRST_SHARES))
        )
        query = Query(Bound(1.0, d, acute=True), counted)
        released = self.run.release("presence", RatedItems(), {"items": query})["items"]
        items = Items(released.value, released.sigma, self.users)
        fit = replace(self, items=items, evidence=Evidence(np.zeros(d), np.zeros(d)))
        return fit.with_passes(1, first), counted + first

    def with_passes(self, count: int, mu_squared: float) -> _Fit:
        """Return the state after more passes on offsets.

        Args:
            count: how many passes.
            mu_squared: what they cost together.
        """
        fit = self
        for _ in range(count):
            assert fit.items is not None
            assert fit.evidence is not None
            d = len(fit.ratings.offset)
            query = Query(Bound(1.0, 2 * d, acute=True), mu_squared / count)
            step, page = ItemPull(fit.column, replace(fit.ratings, residual=fit.residual)), f"offsets-{fit.passes + 1}"
            released = fit.run.release(page, step, {"pull": query})["pull"]
            above, below, sigma = released.value[:d], released.value[d:], math.sqrt(2) * released.sigma
            items = fit.items.with_sizes(above + below, sigma)
            evidence = fit.evidence.with_pass(above - below, sigma, fit.ratings.offset)
            found: Offsets = estimate_offsets(evidence, items)
            ratings, number = replace(fit.ratings, offset=found.offset), fit.passes + 1
            fit = replace(fit, ratings=ratings, items=items, evidence=evidence, variance=found.variance, passes=number)
        return fit

    def plan(self, mu_squared: float) -> TastePlan:
        """Return which part of this budget pairs of items get."""
        assert self.items is not None
        assert self.evidence is not None
        most = min(MOST_PAIRED, int(math.sqrt(MOST_WORK / self.users)))
        return plan_taste(self.items, self.variance, self.evidence.precision, mu_squared, self.rows, most)

    def with_levels(self, mu_squared: float) -> _Fit:
        """Return the state with the level, its variance and the typical spread as moments tell them, if they can be
        heard.

        Args:
            mu_squared: what the moments cost.
        """
        spread, between = self.ratings.spread, float(self.location.between[-1])
        centre = float(self.location.centre[-1])
        step = RatingLevels(self.column, spread or 1.0, centre, between or 1.0)
        query = Query(Bound(LEVEL_NORM, LEVEL_PARTS), mu_squared)
        released = self.run.release("levels", step, {"levels": query})["levels"]
        if not (spread and between):
            return self
        z, pairs, varied, alone = released.value / self.users
        noise = released.sigma / self.users
        several = float(np.clip(1 + 2 * alone, 0.1, 1.0)) if noise < ALONE_HEARD else 1.0
        v = 1 + combine(varied * (WIDEST - 1) / several, noise * (WIDEST - 1) / several, 0.0, SPREAD_OFF)
        found = spread**2 * float(np.clip(v, 0.3, 4.0))
        factor = MOST_SHARED * step.shared / several
        level = combine(z * FARTHEST, noise * FARTHEST, 0.0, CENTRE_OFF) * between
        rows = self.location.typical_rows
        variance = estimate_level_variance(pairs * factor - level**2, noise * factor, found, between**2, rows)
        ratings = replace(self.ratings, level=centre + level, level_variance=variance, spread=math.sqrt(found))
        return replace(self, ratings=ratings)

    def with_taste(self, plan: TastePlan, rank: int | None, mu_squared: float) -> _Fit:
        """Return the state with factors of the items that are rated most; if none is seen at first, with better offsets
        instead.

        Args:
            plan: how many items are paired.
            rank: the most factors to keep; None: as many as stand out.
            mu_squared: what it costs.
        """
        assert self.items is not None
        head = np.sort(np.argsort(-self.items.presence, kind="stable")[: plan.items])
        step = RatingPairs(head, self.column, replace(self.ratings, residual=self.residual))
        bound, first = Bound(1.0, len(head) ** 2, acute=True), PROBE * mu_squared
        shares = {"pairs": (1 - TOGETHER) * first, "together": TOGETHER * first}
        released = self.run.release("taste-1", step, {name: Query(bound, share) for name, share in shares.items()})
        sums, counts = (
            PairSums(symmetrise(found.value), found.sigma / math.sqrt(2))
            for found in map(released.get, shares)
            if found
        )
        together = read_together(counts)
        if not see_factors(sums, together):
            return self.with_passes(LEFT_PASSES, mu_squared - first)
        again = self.run.release("taste-2", step, {"pairs": Query(bound, mu_squared - first)})["pairs"]
        sums = sums.average(PairSums(symmetrise(again.value), again.sigma / math.sqrt(2)))
        factors, error = find_factors(sums, together, rank)
        every = np.zeros((len(self.ratings.offset), len(error)))
        every[head] = factors
        return replace(self, factors=every, error=error)

    @property
    def residual(self) -> float:
        """Return the part of the variance of a user's ratings that offsets and factors leave."""
        if self.items is None:
            return 1.0
        explained = self.ratings.offset**2
        if self.factors is not None:
            explained = explained + (self.factors**2).sum(axis=1)
        return max(1 - float(self.items.share @ explained), 0.1)

    def publish(self, mu_squared: float) -> Representation:
        """Ask what the model is worth, leave out tastes that users lose by, and post the rest.

        Args:
            mu_squared: what the losses cost.
        """
        d = len(self.ratings.offset)
        factors = np.zeros((d, 0)) if self.factors is None else self.factors
        error = np.zeros(0) if self.error is None else self.error
        ratings = replace(self.ratings, residual=self.residual)
        step = RatingLosses(np.column_stack([ratings.offset, factors]), ratings)
        query = Query(Bound(LOSS_NORM, LOSS_PARTS), mu_squared)
        released = self.run.release("losses", step, {"losses": query})["losses"]
        told, sigma = float(released.value[-1]), 1.0
        prior = offsets = heads = 0.0
        if told > 4 * released.sigma:  # else nobody was heard
            prior, offsets, heads = (float(value) / told for value in released.value[:-1])
            sigma = released.sigma / told
        if len(error) and heads - offsets > 2 * math.sqrt(2) * sigma:
            plain = replace(self, factors=None)
            ratings, factors, error, heads = (
                replace(ratings, residual=plain.residual),
                factors[:, :0],
                error[:0],
                offsets,
            )
        basis, spread = factors, np.ones(0)
        if len(error):
            basis, spread, _ = np.linalg.svd(factors, full_matrices=False)
        estimate = Estimate(basis, np.diag(error), spread)
        return publish(self.run, estimate, FeatureTransform.plain(d), ratings, gains=Gains(0.0, prior, heads, sigma))


def combine(value: float, noise: float, guess: float, doubt: float) -> float:
    """Return the posterior mean of a number that was seen with noise, and guessed beforehand with doubt.

    Args:
        value: the number as seen.
        noise: standard deviation of its noise.
        guess: the number as guessed.
        doubt: standard deviation of the guess.
    """
    return (value * doubt**2 + guess * noise**2) / (doubt**2 + noise**2)


def estimate_level_variance(value: float, noise: float, spread: float, apart: float, rows: float) -> float:
    """Return the expected variance of levels, T.

    Levels are shrunk by T / (T + s^2 / m). What is lost by that is a quadratic in the factor, whose coefficients are
    linear in T. So the posterior mean of T is best, whatever else is known of it.

    Args:
        value: the variance as seen.
        noise: the standard deviation of its noise.
        spread: the variance of a user's ratings, s^2. Beforehand the logarithm of T over it has heavy tails.
        apart: the variance of users' means, T + s^2 / m, as a histogram told it: roughly, and rather too large.
        rows: ratings of a typical user, m.
    """
    grid = spread * LEVELS
    guess = np.log1p((np.log(LEVELS / LEVEL_PART) / LEVEL_FOLDS) ** 2 / TAILS) * (TAILS + 1)
    told = np.log(apart / (grid + spread / rows))
    told = told / np.where(told > 0, *APART_FOLDS)
    likelihood = -0.5 * (((value - grid) / noise) ** 2 + guess + told**2)
    weights = np.exp(likelihood - likelihood.max())
    return float(weights @ grid / weights.sum())


class FactorizationMethod(Method):
    """Private factorisation, as callers know it."""

    name = "private-factorization"
    title = (
        "Private factorisation of ratings: a level, how far each item is rated above its raters' levels, and factors "
        "of the items are public. Each user's level, spread and taste stay in private/."
    )
    accepts = frozenset({"ratings", "rank 0", "sparse", "add-or-remove-one-user"})
    purposes: ClassVar[Mapping[str, str]] = {
        "presence": "which items are rated how often",
        "offsets": "offsets of the items",
        "levels/levels": "level of ratings, and how far users' levels and ratings vary",
        "taste/pairs": "factors of the items",
        "taste/together": "which items are rated together",
        "losses/losses": "what it is worth, by users' leave-one-out losses",
        "taste/taste": "offsets and factors of the items",  # this and the next two: of models of earlier versions
        "means": "offsets of the items",
        "tail": "factors of the rarer items",
    }

    def default(self, run: Run, problem: Problem) -> Representation:
        """Learn offsets and factors by `private_factorization`."""
        return private_factorization(run, problem.rank)


METHOD = FactorizationMethod()
