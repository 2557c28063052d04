"""Private FedRep (Snedeker, Zhou, Bassily 2025, Algorithms 1 and 2), choosing its own settings.

Passes over the users, each a page of the billboard:
  scales     histogram of each feature's size                  -> public feature scales
  moments    clipped sum of the pair moments Z_i               -> U_0, its top eigenvectors
  scout      histograms of the gradients' sizes at U_0
  round-t    clipped sum of (gradient, heads' second moment), and the histograms again
                                                               -> a preconditioned step and a QR

Everything that depends on the users is read off these releases; the rest are public facts (d, k and the budget). The
number of users is not used anywhere, so that it need not be public.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np

from privrep.algorithms.scales import CLEAR, feature_scales, octave_quantile
from privrep.local.steps import SIZES, WIDE_CELLS, WIDE_LOWEST, LeaveOneOutGradient, PairMoments, gradient_size
from privrep.privacy.billboard import Release
from privrep.privacy.bounds import Array, Bound
from privrep.privacy.contributions import packed_size, unpack
from privrep.privacy.release import Query, Run


@dataclass(frozen=True)
class Settings:
    """Shares of mu^2 and constants of the default. All fixed beforehand: none was chosen on the data it is used on."""

    scales_share: float = 0.03
    moments_share: float = 0.22
    scout_share: float = 0.02
    sizes_share: float = 0.03  # histograms of all rounds together
    rounds: int = 8
    growth: float = 1.25  # later rounds, whose gradients are smaller, get more
    least_ridge: float = 1e-3  # of the rounds' heads; follows the estimated error of the representation, because a
    most_ridge: float = 0.02  # ridge leaves a residual, and the noise is in proportion to the residuals
    heads_weight: float = 0.3  # second moment of the heads against the gradient, in norm, within a contribution
    quantile: float = 0.2  # clip to this quantile of the gradients' norms
    floor: float = 0.02  # of the heads' second moment, relative to its largest eigenvalue
    max_auto_rank: int = 16

    def ridge(self, state: Estimate) -> float:
        return float(np.clip(state.total_error / state.basis.shape[1], self.least_ridge, self.most_ridge))


@dataclass(frozen=True)
class Representation:
    """What the run learned; every field is on the billboard.

    Predictions use <x, matrix v>; `basis` has orthonormal columns in the space of scaled features x / scale.
    """

    basis: Array  # (d, k), orthonormal, for scaled features
    scale: Array  # (d,)
    error: float  # estimated sum of squared sines between basis and truth; k where nothing was learned

    @property
    def matrix(self) -> Array:
        return self.basis / self.scale[:, None]

    @property
    def mean_error(self) -> float:
        """Estimated mean squared sine between truth and basis, from the noise of the releases: 1 is nothing learned."""
        return self.error / self.basis.shape[1]

    @property
    def mostly_noise(self) -> bool:
        """Whether the releases say that next to nothing was learned; users then fall back on their own regressions."""
        return self.mean_error > 0.3

    @property
    def trust(self) -> float:
        """How readily a user should believe a good leave-one-out score of the shared head, from 1 down towards 0.

        With few rows, the best of several candidates is often good by luck. What the releases say of the
        representation's error is a better judge then: at a mean squared sine of 3% the shared head must halve the
        error of the user's own regression to be preferred.
        """
        return 1 / (1 + 30 * self.mean_error)


def private_fedrep(
    run: Run,
    rank: int | None,
    *,
    intercept: bool = True,
    scale: Array | None = None,
    settings: Settings | None = None,
) -> Representation:
    """Learn a shared representation. `rank=None` reads it off the released spectrum; `scale` declares public scales.

    Formal guarantee: everything returned or posted is a function of the releases charged to `run.ledger`, hence
    (epsilon, delta)-DP at user level under the ledger's relation, for any data whatever.
    """
    s = settings or Settings()
    total = run.ledger.budget.mu**2
    for_rounds = 1 - s.moments_share - s.scout_share
    if scale is None:
        scale = feature_scales(run, s.scales_share * total, intercept)
        for_rounds -= s.scales_share
    d = run.users.features
    if d in (rank, 1):
        state = Estimate(np.eye(d), np.zeros((d, d)))  # all directions: there is nothing to choose
    else:
        state = spectral_start(run, rank, scale, s.moments_share * total, intercept, s.max_auto_rank)
        state = descend(run, state, scale, for_rounds * total, intercept, s)
    run.derive("representation", {"basis": state.basis, "scale": scale}, error=state.total_error)
    return Representation(state.basis, scale, state.total_error)


def descend(run: Run, state: Estimate, scale: Array, mu_squared: float, intercept: bool, s: Settings) -> Estimate:
    """The rounds of Algorithm 1, which together spend `mu_squared`, after a look at the gradients' sizes."""
    d, k = state.basis.shape
    total = run.ledger.budget.mu**2
    per_histogram = s.sizes_share * total / s.rounds
    plan = s.growth ** np.arange(s.rounds)
    plan *= (mu_squared - s.sizes_share * total) / plan.sum()
    scouting = LeaveOneOutGradient(state.basis, 1 / scale, 1.0, s.ridge(state), intercept)
    sizes = run.ask("scout", scouting, {"sizes": Query(SIZES, s.scout_share * total)})["sizes"]
    read = read_sizes(sizes, s)
    if read is None:
        return state  # not even the histogram of sizes rises above the noise: what is left is better not spent
    norm, ratio = read
    for t in range(s.rounds):
        last = t + 1 == s.rounds or state.converged
        local = LeaveOneOutGradient(state.basis, 1 / scale, s.heads_weight * ratio, s.ridge(state), intercept)
        share = float(plan[t:].sum()) + (s.rounds - t) * per_histogram if last else float(plan[t])
        queries = {"step": Query(Bound(norm, gradient_size(d, k)), share)}
        if not last:
            queries["sizes"] = Query(SIZES, per_histogram)
        released = run.ask(f"round-{t + 1}", local, queries)
        state = preconditioned_step(state, released["step"], local.heads_weight, s.floor)
        if last:
            break
        norm, ratio = read_sizes(released["sizes"], s) or (norm, ratio)
        norm, ratio = norm * state.shrink, ratio * state.shrink
    return state


def spectral_start(
    run: Run, rank: int | None, scale: Array, mu_squared: float, intercept: bool, max_auto_rank: int
) -> Estimate:
    """Top eigenvectors of the released sum of pair moments, every user's clipped to its direction (Algorithm 2).

    A bound far below every user's norm leaves of each user the direction alone, which needs no scale and was the best
    choice at every epsilon tried. Without a rank: as many eigenvalues as stand above the edge of the noise bulk.
    """
    d = run.users.features
    queries = {"moments": Query(Bound(DIRECTION_ONLY, packed_size(d)), mu_squared)}
    moments = unpack(run.ask("moments", PairMoments(1 / scale, intercept), queries)["moments"].value)
    values, vectors = np.linalg.eigh(moments)
    k = rank if rank is not None else rank_above_noise(values, max_auto_rank)
    top, half = values[::-1][:k], noise_radius(values) / 2
    spike = (top + np.sqrt(np.maximum(top**2 - 4 * half**2, 0.0))) / 2  # before the noise pushed it up
    error = np.where(top > edge(values), (half / np.maximum(spike, half)) ** 2, 1.0)
    return Estimate(vectors[:, ::-1][:, :k], np.diag(error))


DIRECTION_ONLY = 2.0**-120


def noise_radius(values: Array) -> float:
    """Radius of the semicircle that eigenvalues of noise form: their median size is 0.4040 of it, signals or not."""
    return float(np.median(np.abs(values))) / 0.4040


def edge(values: Array) -> float:
    """Where noise ends: its radius, and room for its fluctuations, which are larger with few features."""
    return (1.15 + 2 / len(values)) * noise_radius(values)


def rank_above_noise(values: Array, most: int) -> int:
    """How many eigenvalues stand above the semicircle that the others form; at least one."""
    above = int((values > edge(values)).sum())
    return min(max(above, 1), most, len(values))


def read_sizes(sizes: Release, s: Settings) -> tuple[float, float] | None:
    """Clipping norm, and typical ratio of a user's gradient to the second moment of its heads, for the next pass.

    None where the histograms are lost in their noise.
    """
    norms, ratios = sizes.value[:WIDE_CELLS], sizes.value[WIDE_CELLS:]
    if min(norms.max(), ratios.max()) < CLEAR * sizes.sigma:
        return None
    return octave_quantile(norms, s.quantile, WIDE_LOWEST), octave_quantile(ratios, 0.5)


@dataclass(frozen=True)
class Estimate:
    """The representation so far and, in its own coordinates, how far the noise of the releases may have left it."""

    basis: Array
    error: Array  # (k, k): second moment of the columns' estimated errors
    shrink: float = 1.0  # by how much the last step shrank the error, and so, at most, the gradients
    converged: bool = False  # neither the last step nor the error before it stood out from the step's noise

    @property
    def total_error(self) -> float:
        return float(np.trace(self.error))


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
    return Estimate(basis, np.diag(after), min(shrink, 1.0), converged)
