"""Rounds that alternate between heads given U and U given heads: the part of a fit that all methods share.

Passes over the users, each a page of the billboard:
  scales       histogram of each feature's size                -> public feature scales
  covariance   users' second moments                           -> coordinates without correlation
  (the start)  see `starts`                                    -> U_0
  *-scout      histograms of the sizes of what rounds release, at U_0
  *-t          what moves U (see `Round`), and the histograms again
                                                               -> a step, and a QR
Where strong directions may hide weak ones, a third page follows some rounds for the strong ones alone:
  residuals    pair moments of what users' heads leave over    -> the weak directions
At the end:
  preference   whether a user does better by the representation or alone
                                                               -> how to choose between the two on few rows
`numbers` and `labels` have what comes before the rounds and after.

Everything that depends on the users is read off these releases. The rest are public facts: d, k and the budget. The
number of users is not used anywhere, so it need not be public.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any, Protocol

import numpy as np
import scipy.linalg
from numpy.typing import NDArray

from privrep.heads.regression import KINDS, OWN, SHARED, Preference
from privrep.linear.starts import MOST_SQUARED, see_residuals, top_eigenvectors
from privrep.linear.steps import SIZES, WIDE_CELLS, WIDE_LOWEST, ResidualMoments
from privrep.linear.transform import CLEAR, read_octave_quantile
from privrep.local.losses import Loss
from privrep.local.prior import PriorMean
from privrep.local.representation import Estimate, Representation
from privrep.local.transform import FeatureTransform
from privrep.privacy.billboard import Release
from privrep.privacy.bounds import DIRECTION_ONLY, Bound
from privrep.privacy.calibration import Query
from privrep.privacy.moments import symmetrise
from privrep.privacy.protocol import Step
from privrep.privacy.run import Run
from privrep.typing import Array

PURPOSES = {
    "residuals": "weak directions that strong ones hide",
    "strong-scout": "first clipping norm, strong directions",
    "preference": "whether users gain by it",
    "sizes": "next clipping norm",
}
"""Purposes of the pages that this module asks for; see `method.Method.purposes`."""


@dataclass(frozen=True)
class AlternationSettings:
    """Shares of mu^2 and constants of the rounds.

    All are fixed beforehand. None was chosen on the data it is used on.
    """

    scales_share: float = 0.03
    covariance_share: float = 0.1
    start_share: float = 0.2
    votes_share: float = 0.01
    rounds: int = 8
    scout_share: float = 0.03  # of what the rounds have
    sizes_share: float = 0.05  # of the same, histograms of all rounds together
    growth: float = 1.25  # later rounds, whose gradients are smaller, get more
    far: float = math.inf  # squared sines beyond which a round that hears nothing does not leave all to a last one
    least_ridge: float = 1e-3  # of the rounds' heads; follows the estimated error of the representation, because a
    most_ridge: float = 0.02  # ridge leaves a residual, and the noise is in proportion to the residuals
    heads_weight: float = 0.3  # second moment of the heads against the gradient, in norm, within a contribution
    quantile: float = 0.2  # clip to this quantile of the gradients' norms
    clear_weak: float = 0.15  # squared sine that a weak direction may have if nobody said how many there are
    floor: float = 0.02  # of the heads' second moment, relative to its largest eigenvalue

    def ridge(self, state: Estimate) -> float:
        """Return the ridge of users' heads in a round, between `least_ridge` and `most_ridge`.

        It follows the estimated mean squared sine of the state's basis, because a ridge leaves a residual.
        """
        return float(np.clip(state.total_error / state.basis.shape[1], self.least_ridge, self.most_ridge))


FOR_CLASSES = AlternationSettings(scout_share=0.02, sizes_share=0.03, heads_weight=0.15)
"""Settings for classifiers, whose gradients are noisier."""

FOR_NUMBERS = AlternationSettings(rounds=16, growth=1.12, far=0.05)
"""Settings for numbers. As long as U is far from the truth, a round's noise is in proportion to its error. More rounds
with less each then get closer than few rounds with more."""


@dataclass(frozen=True)
class RoundContext:
    """The part of a fit that stays the same throughout its rounds."""

    run: Run
    transform: FeatureTransform
    intercept: bool
    settings: AlternationSettings
    loss: Loss | None = None  # of labels; None: the square, of numbers
    mean: PriorMean | None = None  # the prior mean: what rounds see is what it leaves
    precision: float = 1.0  # of the prior of classifiers' heads
    level: float = 1.0  # variance of classifiers' levels

    def see_residuals(self, step: Step) -> Step:
        """Return the step as a round asks it.

        For numbers the step sees what the prior mean leaves of the targets. Steps for labels know the prior mean
        already.
        """
        return step if self.loss is not None else see_residuals(step, None, self.mean)


class Round(Protocol):
    """A method's round: a local step, the queries about it, and the move that the releases stand for."""

    @property
    def name(self) -> str:
        """Return the name that the pages of its rounds begin with."""
        ...

    def limit_rank(self, features: int) -> int:
        """Return the most directions that the round can take where nobody gives a rank."""
        ...

    def make_step(self, problem: RoundContext, state: Estimate, norm: float, ratio: float) -> Any:
        """Return the local step of a round at this state. Its statistics include `sizes`, histograms of norms and of
        ratios.

        Args:
            problem: the part of the fit that stays the same.
            state: the current basis and its error.
            norm: the clipping norm of what moves U.
            ratio: the typical ratio of that norm to the norm of the heads' second moment.
        """
        ...

    def make_queries(self, step: Any, norm: float, mu_squared: float) -> dict[str, Query]:
        """Return the queries of a round by statistic, without `sizes`.

        Args:
            step: the step that `make_step` returned.
            norm: the clipping norm.
            mu_squared: mu^2 that the queries cost together.
        """
        ...

    def move(self, problem: RoundContext, state: Estimate, step: Any, released: Mapping[str, Release]) -> Estimate:
        """Return the state after a round.

        Args:
            problem: the part of the fit that stays the same.
            state: the state before the round.
            step: the step that users were asked.
            released: the releases by statistic.
        """
        ...


def run_rounds(problem: RoundContext, state: Estimate, rank: int | None, method: Round, left: float) -> Estimate:
    """Return the state after rounds that spend `left`.

    Where strong directions may hide weak ones, rounds for the strong ones come first.

    Args:
        problem: the part of the fit that stays the same.
        state: the start.
        rank: directions that are asked for; None: as many as releases show.
        method: the round to run.
        left: mu^2 that all rounds spend together.
    """
    d, s = len(state.basis), problem.settings
    if d > MOST_SQUARED or not state.may_hide(rank):
        return iterate(problem, state, method, left, method.name, s.rounds)
    if rank is None:  # first the strong directions: their error must not pass for a new one
        state = iterate(problem, state, method, 0.6 * left, "strong", s.rounds)
        state = add_weak(problem, state, None, method.limit_rank(d), 0.15 * left)
        return iterate(problem, state, method, 0.25 * left, method.name, s.rounds // 2)
    state = iterate(problem, state.first(state.found), method, 0.25 * left, "strong", s.rounds // 2)
    state = add_weak(problem, state, rank, rank, 0.25 * left)
    return iterate(problem, state, method, 0.5 * left, method.name, s.rounds)


def iterate(
    problem: RoundContext, state: Estimate, method: Round, mu_squared: float, name: str, rounds: int
) -> Estimate:
    """Return the state after rounds that spend `mu_squared` together, the first look at sizes included.

    A round that has converged spends all the rest, unless U is still far from the truth. The clipping norm follows the
    sizes of what is clipped, which shrink by orders of magnitude as U converges.

    Args:
        problem: the part of the fit that stays the same.
        state: the start.
        method: the round to run.
        mu_squared: what all pages cost together.
        name: the beginning of the pages' names.
        rounds: the most rounds to run.
    """
    s, ask = problem.settings, problem.run.release
    per_histogram = s.sizes_share * mu_squared / rounds
    plan: Array = s.growth ** np.arange(rounds, dtype=np.float64)
    plan *= (1 - s.scout_share - s.sizes_share) * mu_squared / plan.sum()
    scout = method.make_step(problem, state, 1.0, 1.0)
    sizes = ask(f"{name}-scout", problem.see_residuals(scout), {"sizes": Query(SIZES, s.scout_share * mu_squared)})[
        "sizes"
    ]
    read = read_sizes(sizes, s)
    if read is None:
        return state  # not even the histogram of sizes rises above the noise: what is left is better not spent
    norm, ratio = read
    for t in range(rounds):
        last = t + 1 == rounds or (state.converged and state.total_error <= s.far)
        step = method.make_step(problem, state, norm, ratio)
        share = float(plan[t:].sum()) + (rounds - t) * per_histogram if last else float(plan[t])
        queries = method.make_queries(step, norm, share)
        if not last:
            queries["sizes"] = Query(SIZES, per_histogram)
        released = ask(f"{name}-{t + 1}", problem.see_residuals(step), queries)
        state = method.move(problem, state, step, released)
        if last:
            break
        norm, ratio = read_sizes(released["sizes"], s) or (norm, ratio)
        norm, ratio = norm * state.shrink, ratio * state.shrink
    return state


def read_sizes(sizes: Release, s: AlternationSettings) -> tuple[float, float] | None:
    """Return the clipping norm and the typical ratio for the next pass; None where the histograms are lost in their
    noise.

    Args:
        sizes: released counts of users by octave: WIDE_CELLS of norms, then CELLS of ratios of a user's gradient to the
            second moment of its heads.
        s: settings, whose `quantile` of the norms is the clipping norm.
    """
    norms, ratios = sizes.value[:WIDE_CELLS], sizes.value[WIDE_CELLS:]
    if min(norms.max(), ratios.max()) < CLEAR * sizes.sigma:
        return None
    return read_octave_quantile(norms, s.quantile, WIDE_LOWEST), read_octave_quantile(ratios, 0.5)


def add_weak(problem: RoundContext, state: Estimate, rank: int | None, most: int, mu_squared: float) -> Estimate:
    """Return the state with the directions that strong ones hid, found in pair moments of what the strong ones leave
    over.

    Args:
        problem: the part of the fit that stays the same.
        state: the strong directions.
        rank: directions in all; None: as many new ones as stand out clearly from the noise, which may be none.
        most: the most directions in all.
        mu_squared: what the release costs.
    """
    d, k = state.basis.shape
    query = Query(Bound(DIRECTION_ONLY, d**2), mu_squared)
    step = ResidualMoments(state.basis, problem.transform, problem.settings.ridge(state), problem.intercept)
    asked = see_residuals(step, problem.loss, problem.mean, problem.level)
    released = problem.run.release("residuals", asked, {"moments": query})["moments"]
    moments = symmetrise(released.value)
    outside = scipy.linalg.null_space(state.basis.T)  # (d, d - k): among all d coordinates k would have no noise
    weak = top_eigenvectors(outside.T @ moments @ outside, min(most, d) - k, released.sigma)
    weak = replace(weak, basis=outside @ weak.basis)
    if rank is None:
        clear = np.diag(weak.error) < problem.settings.clear_weak
        weak = weak.first(int(clear.sum()))
    if not weak.basis.shape[1]:
        return replace(state, converged=False)
    error = scipy.linalg.block_diag(state.error, weak.error)
    return Estimate(np.linalg.qr(np.hstack([state.basis, weak.basis]))[0], error)


def ask_preference(problem: RoundContext, state: Estimate, mu_squared: float) -> float | None:
    """Return how many users do better by the representation for each who does better alone, by their own leave-one-out.

    Return None where the votes are lost in noise. Return None without asking where `mu_squared` is 0: sparse features
    leave no regression of one's own, and several targets have as many votes.

    Args:
        problem: the part of the fit that stays the same.
        state: the representation.
        mu_squared: what the votes cost.
    """
    if not mu_squared:
        return None
    step = Preference(_make_matrix(problem, state), problem.transform, problem.intercept)
    query = Query(Bound(1.0, len(KINDS), acute=True), mu_squared)
    votes = problem.run.release("preference", step, {"votes": query})["votes"]
    shared, own = float(votes.value[SHARED]), float(votes.value[OWN])
    if max(shared, own) < CLEAR * votes.sigma:
        return None
    return max(shared, votes.sigma) / max(own, votes.sigma)


def _make_matrix(problem: RoundContext, state: Estimate) -> Array:
    """Return the matrix (d, k) that takes rows as they come to the coordinates of heads."""
    return Representation(state.basis, problem.transform, 0.0, find_head_spread(state)).matrix


def find_head_spread(state: Estimate) -> Array:
    """Return how far users' heads reach in each column of the basis, (k,), or ones (1,) where it is not known."""
    return np.ones(1) if state.spread is None else state.spread


@dataclass(frozen=True)
class Move:
    """A round's answer: how U should move in each of k directions of the heads, and how much of that is noise."""

    turn: Array  # (k, k), orthonormal: the directions
    raw: Array  # (d, k), orthogonal to U: the move in each
    energy: Array  # (k,): expected square length of the noise in it
    heads: Array  # (k,): second moments of the heads in them, no smaller than can be told from noise
    reach: Array  # (k,): how much of each is theirs rather than a floor's
    heard: NDArray[np.bool_]  # (k,): whether there was anything but noise
    relative_error: float = 0.0  # of the length of the move, from noise in what it was divided by


def apply_move(state: Estimate, move: Move) -> Estimate:
    """Return U plus the move, made orthonormal by a QR, each direction shrunk by its signal over signal plus noise.

    The noise's variance is public. The signal of a direction is the length by which its move exceeds the noise, or what
    earlier steps left over if that is more. Once the signal is gone this averages the rounds' noise. So a round never
    adds more noise than it removes error.

    Args:
        state: the basis before the move.
        move: with its noise.
    """
    signal = np.maximum((move.raw**2).sum(axis=0) - move.energy, 0.0)
    left = np.diag(move.turn.T @ state.error @ move.turn)
    prior = np.maximum(signal, left)
    gain = np.where(move.heard, prior / (prior + move.energy), 0.0)  # nothing heard, nothing moved
    basis, R = np.linalg.qr(state.basis @ move.turn + gain * move.raw)
    basis *= np.where(np.diag(R) < 0, -1.0, 1.0)
    missed = (1 - gain * move.reach) ** 2 + (gain * move.relative_error) ** 2
    after = np.minimum(missed * prior + gain**2 * move.energy, 1.0)
    shrink = math.sqrt(float(after.sum() / prior.sum())) if after.sum() > 0 else 1.0
    converged = bool((signal < 0.5 * move.energy).all() and ((left < move.energy) | (gain == 0)).all())
    spread = np.sqrt(move.heads / move.heads.max())
    return Estimate(basis, np.diag(after), spread, min(shrink, 1.0), converged)
