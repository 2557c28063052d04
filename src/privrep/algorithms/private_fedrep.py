"""Private FedRep (Snedeker, Zhou, Bassily 2025, Algorithms 1 and 2), choosing its own settings.

Passes over the users, each a page of the billboard:
  scales       histogram of each feature's size                -> public feature scales
  covariance   users' second moments                           -> coordinates without correlation
  moments      clipped sum of the pair moments Z_i             -> U_0, its top eigenvectors
  scout        histograms of the gradients' sizes at U_0
  round-t      clipped sum of (gradient, heads' second moment), and the histograms again
                                                               -> a preconditioned step and a QR

Everything that depends on the users is read off these releases; the rest are public facts (d, k and the budget). The
number of users is not used anywhere, so that it need not be public.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np
import scipy.linalg

from privrep.algorithms.frames import CLEAR, find_frame, octave_quantile
from privrep.algorithms.initialisers import MOST_SQUARED, Initialiser, Start, affordable, top_eigenvectors
from privrep.algorithms.representation import Estimate, Representation, publish
from privrep.local.frame import Frame
from privrep.local.steps import SIZES, WIDE_CELLS, WIDE_LOWEST, LeaveOneOutGradient, ResidualMoments, gradient_size
from privrep.privacy.billboard import Release
from privrep.privacy.bounds import DIRECTION_ONLY, Bound
from privrep.privacy.contributions import packed_size, unpack
from privrep.privacy.release import Query, Run


@dataclass(frozen=True)
class Settings:
    """Shares of mu^2 and constants of the default. All fixed beforehand: none was chosen on the data it is used on."""

    scales_share: float = 0.03
    covariance_share: float = 0.1
    start_share: float = 0.2
    rounds: int = 8
    scout_share: float = 0.03  # of what the rounds have
    sizes_share: float = 0.05  # of the same, histograms of all rounds together
    growth: float = 1.25  # later rounds, whose gradients are smaller, get more
    least_ridge: float = 1e-3  # of the rounds' heads; follows the estimated error of the representation, because a
    most_ridge: float = 0.02  # ridge leaves a residual, and the noise is in proportion to the residuals
    heads_weight: float = 0.3  # second moment of the heads against the gradient, in norm, within a contribution
    quantile: float = 0.2  # clip to this quantile of the gradients' norms
    floor: float = 0.02  # of the heads' second moment, relative to its largest eigenvalue

    def ridge(self, state: Estimate) -> float:
        return float(np.clip(state.total_error / state.basis.shape[1], self.least_ridge, self.most_ridge))


def private_fedrep(
    run: Run,
    rank: int | None,
    *,
    intercept: bool = True,
    frame: Frame | None = None,
    initialiser: Initialiser | None = None,
    settings: Settings | None = None,
) -> Representation:
    """Learn a shared representation. `rank=None` reads it off the first releases; `frame` declares public coordinates.

    Formal guarantee: everything returned or posted is a function of the releases charged to `run.ledger`, hence
    (epsilon, delta)-DP at user level under the ledger's relation, for any data whatever.
    """
    s = settings or Settings()
    d, total = run.users.features, run.ledger.capacity
    if d in (rank, 1):  # all directions: there is nothing to choose
        frame = frame or find_frame(run, s.scales_share * total, s.covariance_share * total, intercept)
        return publish(run, Estimate(np.eye(d), np.zeros((d, d))), frame)
    for_rounds = 1 - s.start_share
    if frame is None:
        frame = find_frame(run, s.scales_share * total, s.covariance_share * total, intercept)
        for_rounds -= s.scales_share + s.covariance_share
    start = initialiser or affordable(d)
    state = start(Start(run, frame, rank, s.start_share * total, intercept))
    if rank is not None and state.lopsided and d <= MOST_SQUARED:
        state = descend(run, state.first(state.found), frame, 0.25 * for_rounds * total, intercept, s, "strong", 3)
        state = add_weak(run, state, rank, frame, 0.25 * for_rounds * total, intercept, s)
        for_rounds *= 0.5
    return publish(run, descend(run, state, frame, for_rounds * total, intercept, s), frame)


def descend(
    run: Run,
    state: Estimate,
    frame: Frame,
    mu_squared: float,
    intercept: bool,
    s: Settings,
    name: str = "round",
    rounds: int | None = None,
) -> Estimate:
    """The rounds of Algorithm 1, which together spend `mu_squared`, after a look at the gradients' sizes."""
    d, k = state.basis.shape
    rounds = rounds or s.rounds
    per_histogram = s.sizes_share * mu_squared / rounds
    plan = s.growth ** np.arange(rounds)
    plan *= (1 - s.scout_share - s.sizes_share) * mu_squared / plan.sum()
    scouting = LeaveOneOutGradient(state.basis, frame, 1.0, s.ridge(state), intercept)
    sizes = run.ask(f"{name}-scout", scouting, {"sizes": Query(SIZES, s.scout_share * mu_squared)})["sizes"]
    read = read_sizes(sizes, s)
    if read is None:
        return state  # not even the histogram of sizes rises above the noise: what is left is better not spent
    norm, ratio = read
    for t in range(rounds):
        last = t + 1 == rounds or state.converged
        local = LeaveOneOutGradient(state.basis, frame, s.heads_weight * ratio, s.ridge(state), intercept)
        share = float(plan[t:].sum()) + (rounds - t) * per_histogram if last else float(plan[t])
        queries = {"step": Query(Bound(norm, gradient_size(d, k)), share)}
        if not last:
            queries["sizes"] = Query(SIZES, per_histogram)
        released = run.ask(f"{name}-{t + 1}", local, queries)
        state = preconditioned_step(state, released["step"], local.heads_weight, s.floor)
        if last:
            break
        norm, ratio = read_sizes(released["sizes"], s) or (norm, ratio)
        norm, ratio = norm * state.shrink, ratio * state.shrink
    return state


def add_weak(
    run: Run, state: Estimate, rank: int, frame: Frame, mu_squared: float, intercept: bool, s: Settings
) -> Estimate:
    """The directions that the strong ones hid, from the pair moments of what those leave over."""
    d, k = state.basis.shape
    query = Query(Bound(DIRECTION_ONLY, packed_size(d)), mu_squared)
    step = ResidualMoments(state.basis, frame, s.ridge(state), intercept)
    moments = unpack(run.ask("residuals", step, {"moments": query})["moments"].value)
    outside = np.eye(d) - state.basis @ state.basis.T
    weak = top_eigenvectors(outside @ moments @ outside, rank - k)
    error = scipy.linalg.block_diag(state.error, weak.error)
    return Estimate(np.linalg.qr(np.hstack([state.basis, weak.basis]))[0], error)


def read_sizes(sizes: Release, s: Settings) -> tuple[float, float] | None:
    """Clipping norm, and typical ratio of a user's gradient to the second moment of its heads, for the next pass.

    None where the histograms are lost in their noise.
    """
    norms, ratios = sizes.value[:WIDE_CELLS], sizes.value[WIDE_CELLS:]
    if min(norms.max(), ratios.max()) < CLEAR * sizes.sigma:
        return None
    return octave_quantile(norms, s.quantile, WIDE_LOWEST), octave_quantile(ratios, 0.5)


def preconditioned_step(state: Estimate, step: Release, heads_weight: float, floor: float) -> Estimate:
    """U + G H^-1 and a QR, with G the released gradient and H the released second moment of the heads.

    Dividing by H makes the step independent of the size and conditioning of the heads. Each direction of the step is
    then shrunk by what it is worth: its signal, as far as its length exceeds that of the noise (whose variance is
    public) or was left over by earlier steps, over signal plus noise. Once the signal is gone this averages the rounds'
    noise, and a round never adds more noise than it removes error.
    """
    d, k = state.basis.shape
    gradient = step.value[: d * k].reshape(k, d).T
    measured, Q = np.linalg.eigh(unpack(step.value[d * k :]) / heads_weight)
    heads_noise = step.sigma / heads_weight
    values = np.maximum(measured, max(floor * measured[-1], 3 * heads_noise))
    raw = (gradient @ Q) / values
    raw -= state.basis @ (state.basis.T @ raw)
    noise_energy = (d - k) * (step.sigma / values) ** 2
    signal = np.maximum((raw**2).sum(axis=0) - noise_energy, 0.0)
    left = np.diag(Q.T @ state.error @ Q)
    prior = np.maximum(signal, left)
    gain = np.where(measured > heads_noise, prior / (prior + noise_energy), 0.0)  # nothing heard, nothing moved
    basis, R = np.linalg.qr(state.basis @ Q + gain * raw)
    basis *= np.where(np.diag(R) < 0, -1.0, 1.0)
    after = np.minimum((1 - gain * np.minimum(measured / values, 1.0)) ** 2 * prior + gain**2 * noise_energy, 1.0)
    shrink = math.sqrt(float(after.sum() / prior.sum())) if after.sum() > 0 else 1.0
    converged = bool((signal < 0.5 * noise_energy).all() and ((left < noise_energy) | (gain == 0)).all())
    spread = np.sqrt(values / values.max())
    return Estimate(basis, np.diag(after), spread, min(shrink, 1.0), converged)
