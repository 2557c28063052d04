"""The choice of the prior of heads that a population wants: one prior for everybody, by charged releases.

Histograms of what users see alone give first ratios of the variances. Then users' leave-one-out losses decide between
candidates, a few at a time, because losses of candidates that are much alike have little noise. Three rounds follow
each other: the ratios of the likeliest family, the family, its ratios again. Losses that could not tell candidates
apart are not asked for.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import ClassVar

import numpy as np

from privrep.linear.families import Candidate, Families, Judged
from privrep.linear.spreads import Spreads
from privrep.local.representation import Gains

ODDS_ALL = (0.3, 2.0)  # variance that slopes in all features explain, over the noise's
FIRST, SECOND = 6.0, 3.0  # factors between neighbours when ratios are refined, one after the other


def guess_common(families: Families, spreads: Spreads, intercept: bool) -> Candidate:
    """Return the candidate with common slopes whose levels vary as users see it.

    Args:
        families: the parts of candidates, with a typical number of rows.
        spreads: variances that users see alone.
        intercept: whether users have levels.
    """
    if not intercept:
        return Candidate(0, 0.0, 0.0)
    return Candidate(0, 0.0, _estimate_ratio(spreads.level, spreads.noise, families, MODEST, families.level))


def guess_shared(families: Families, spreads: Spreads, intercept: bool) -> Candidate:
    """Return the candidate whose slopes along U and levels vary as users see it.

    Slopes turn around the origin that leaves levels that vary less.

    Args:
        families: the parts of candidates, with a typical number of rows.
        spreads: variances that users see alone.
        intercept: whether users have levels.
    """
    slopes = _estimate_ratio(spreads.head, spreads.noise_shared, families, WIDE, UNKNOWN)
    if not intercept:
        return Candidate(1, slopes, 0.0)
    own = spreads.around_own
    level = spreads.level if own else spreads.level_shared
    return Candidate(1, slopes, _estimate_ratio(level, spreads.noise_shared, families, WIDE, UNKNOWN), own)


def _estimate_ratio(
    square: float | None, noise: float | None, families: Families, limits: tuple[float, float], unknown: float
) -> float:
    """Return a variance over the noise's, less the part of the noise that is in it.

    Args:
        square: the variance as users see it; None: not heard.
        noise: the noise's variance; None: not heard.
        families: tell a typical number of rows.
        limits: the least and the largest ratio to return.
        unknown: the ratio to return where one of the two was not heard.
    """
    if square is None or noise is None:
        return unknown
    ratio = square / noise
    return float(np.clip(max(ratio - 1 / families.rows, 0.2 * ratio), *limits))


MODEST = (0.1, 3.0)  # ratios of levels to the noise to begin with, where slopes are common
WIDE = (0.01, 1e6)  # ratios where slopes along U explain much
UNKNOWN = 10.0  # ratio of slopes along U, and of levels, where nothing is known: users' own rows decide
STRONG = 3.0  # variance that slopes along U explain, over the noise's, above which their family comes first


@dataclass
class PriorChoice:
    """The search for the prior that users lose least by: ratios of the likeliest family, then the family, then ratios
    again."""

    families: Families
    spreads: Spreads
    intercept: bool
    mu_squared: float
    asked: int = 0
    spent: float = 0.0  # of mu^2, so far
    last: Judged | None = None
    flips_last: ClassVar[bool] = True  # whether the other origin is judged with the last ratios, or before

    def make(self) -> Candidate:
        """Return the prior that users lose least by, after up to three charged releases of losses."""
        chosen, shared = self.guess()
        chosen = self._refine(chosen, FIRST, 0.22)
        others = self.others(chosen, shared)
        if others and self.families.is_legible(0.22 * self.mu_squared):
            chosen = pick(self._judge([chosen, *others], 0.22))
        return self._refine(chosen, SECOND, 0.22, flip=self.intercept and self.flips_last)

    def guess(self) -> tuple[Candidate, Candidate | None]:
        """Return the likeliest candidate before any is judged, and the candidate with slopes along U; None if there is
        no U."""
        k = self.families.first.shape[1]
        common = guess_common(self.families, self.spreads, self.intercept)
        shared = guess_shared(self.families, self.spreads, self.intercept) if k else None
        if shared is not None and self.spreads.head is not None and shared.slopes * k > STRONG:
            return shared, shared
        return common, shared

    def others(self, chosen: Candidate, shared: Candidate | None) -> list[Candidate]:
        """Return the candidates of the other families, with levels that go with the chosen candidate's.

        Args:
            chosen: the candidate so far.
            shared: the candidate with slopes along U; None: there is no U.
        """
        p, level = self.families.second.shape[1], chosen.level
        found = [shared] if shared is not None and chosen.factor != 1 else []
        if chosen.factor == 1 and chosen.slopes * self.families.first.shape[1] <= 100 * STRONG:
            found.append(Candidate(0, 0.0, min(max(level, MODEST[0]), MODEST[1]) if self.intercept else 0.0))
        if p and chosen.factor == 0:
            found += [Candidate(2, odds / p, level, own=not self.intercept) for odds in ODDS_ALL]
        return found

    def _refine(self, chosen: Candidate, factor: float, share: float, flip: bool = False) -> Candidate:
        """Return the candidate with its ratios moved to where users lose least; unchanged where losses could not tell.

        Args:
            chosen: the candidate so far.
            factor: the factor between neighbouring ratios.
            share: the part of `mu_squared` to spend.
            flip: whether to try the other origin of slopes as well.
        """
        around = list_neighbours(chosen, factor, flip)
        if len(around) == 1 or not self.families.is_legible(share * self.mu_squared):
            return chosen
        return refine(self._judge(around, share), factor)

    def _judge(self, candidates: list[Candidate], share: float) -> Judged:
        """Ask users what they lose by each candidate, for this part of `mu_squared`; return and remember the released
        losses."""
        self.asked += 1
        self.spent += share * self.mu_squared
        along = all(c.factor == 1 for c in candidates)
        unit = self.spreads.noise_shared if along else self.spreads.noise
        families = self.families if unit is None else replace(self.families, unit=unit)
        page, mu_squared = f"families-{self.asked}", share * self.mu_squared
        self.last = families.judge(page, candidates, mu_squared, before=self.last)
        return self.last


def pick(judged: Judged) -> Candidate:
    """Return the candidate that loses least, of the simplest family within the noise of the best."""
    losses = judged.by_factor()
    least = min(losses.values())
    factor = min(f for f, loss in losses.items() if loss <= least + judged.sigma)
    among = [i for i, c in enumerate(judged.candidates) if c.factor == factor]
    return judged.candidates[judged.best(among)]


def list_neighbours(chosen: Candidate, factor: float, flip: bool) -> list[Candidate]:
    """Return the candidate, and candidates with each of its ratios multiplied and divided by the factor.

    Args:
        chosen: the candidate in the middle.
        factor: the factor between neighbouring ratios.
        flip: whether to add the candidate whose slopes turn around the other origin.
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
    """Return the first candidate with each ratio moved to where a parabola through its neighbours' losses is least.

    Return the best candidate with the other origin instead, where it loses less than all neighbours.

    Args:
        judged: losses of the candidates that `list_neighbours` returned.
        factor: the factor between neighbouring ratios.
    """
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


def list_alone_candidates(families: Families, intercept: bool) -> list[Candidate]:
    """Return the regressions of users' own, which know nothing of others; none where features are sparse or too
    many."""
    p, free = families.second.shape[1], math.inf if intercept else 0.0
    odds = (1.0, 100.0) if families.loss is None or not families.loss.softmax else (1.0,)
    return [Candidate(2, each / p, free, common=False) for each in odds] if p else []


def read_gains(families: Families, chosen: Candidate, intercept: bool, mu_squared: float) -> Gains:
    """Return what users lose by their means, alone, by the prior mean and by their heads, from one more release.

    Args:
        families: the parts of candidates, and the run that asks users.
        chosen: the prior of the heads.
        intercept: whether users have levels.
        mu_squared: what the release costs.
    """
    own_mean = Candidate(0, 0.0, math.inf if intercept else 0.0, common=False)
    asked = [chosen, Candidate(0, 0.0, 0.0), own_mean, *list_alone_candidates(families, intercept)]
    judged = families.judge("families", asked, mu_squared, relative=True)
    heads, prior, mean, *own = (float(loss - judged.losses[2]) / judged.rows for loss in judged.losses)
    return Gains(min([mean, *own]), prior, heads, math.sqrt(2.0) * judged.sigma / judged.rows)
