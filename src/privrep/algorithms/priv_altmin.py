"""Priv-AltMin (Jain et al. 2021, Algorithms 1 to 3): U by least squares through perturbed normal equations.

Passes over the users, each a page of the billboard:
  scales, covariance   as in Private FedRep                      -> public coordinates
  pairs                pair moments of rows of length one        -> U_0, its top eigenvectors
  altmin-scout         histograms of sizes at U_0
  altmin-t             A = sum W W^T and b = sum r W, and the histograms again
                                                                 -> U + reshape(A^-1 b), and a QR
Where the paper solves for U anew, from the targets of one group of users a round, this solves for the move of U that
explains the residuals of all users: they shrink as U converges, and the noise of b with them. Noise in A then scales a
move that is small, so that little of the budget is enough for A.

`paper_altmin` is the paper's own configuration. Kept: disjoint groups of users, rows in quarters, fixed clipping norms,
a solve for U from the targets. Settled or corrected there:
  - Heads: the paper fits v on rows [1, m/4] in its algorithm and on [1, m/2] in its proofs; the algorithm is taken.
  - Sums over a user's rows are means, so that users of different sizes have the same say and the same bound.
  - The sensitivity is exact: sqrt 2 eta^2 for A, whose parts are positive semi-definite, 2 eta zeta for b; noise is
    drawn for the triangle of A, in which it has sigma on the diagonal and sigma / sqrt 2 off it; initialisation and
    rounds are charged to one budget. The paper charges each with all of epsilon.
  - Noise may leave A indefinite, about which the paper says nothing; its equations are solved all the same.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from privrep.algorithms.frames import CLEAR, find_frame
from privrep.algorithms.initialisers import MOST_SQUARED, Initialiser, Start, normalised_pairs, power_method
from privrep.algorithms.private_fedrep import Settings, add_weak, read_sizes
from privrep.algorithms.representation import Estimate, Representation, publish
from privrep.data.groups import Group
from privrep.errors import InputError
from privrep.local.frame import Frame
from privrep.local.regression import DisjointPairs, NormalEquations, QuarterEquations
from privrep.local.steps import SIZES
from privrep.privacy.billboard import Release
from privrep.privacy.bounds import Array, Bound
from privrep.privacy.contributions import packed_size, unpack
from privrep.privacy.release import Query, Run

MOST_UNKNOWNS = 4096  # d k: the normal equations have their square, half of which is released


@dataclass(frozen=True)
class AltMinSettings:
    """Constants of the default, all fixed beforehand; `shared` are those that mean what they mean in Private FedRep."""

    shared: Settings = field(default_factory=Settings)
    normal_share: float = 0.15  # of a round's mu^2: for A, the rest for b


def priv_altmin(
    run: Run,
    rank: int | None,
    *,
    intercept: bool = True,
    frame: Frame | None = None,
    initialiser: Initialiser | None = None,
    settings: AltMinSettings | None = None,
) -> Representation:
    """Learn a shared representation. `rank=None` reads it off the first releases; `frame` declares public coordinates.

    Formal guarantee: everything returned or posted is a function of the releases charged to `run.ledger`, hence
    (epsilon, delta)-DP at user level under the ledger's relation, for any data whatever.
    """
    settings = settings or AltMinSettings()
    s = settings.shared
    d, total = run.users.features, run.ledger.capacity
    if d * (rank or 1) > MOST_UNKNOWNS:
        raise InputError(
            f"Priv-AltMin takes at most {MOST_UNKNOWNS:,} features times rank. Got {d:,} features: use Private FedRep."
        )
    for_rounds = 1 - s.start_share
    if frame is None:
        frame = find_frame(run, s.scales_share * total, s.covariance_share * total, intercept)
        for_rounds -= s.scales_share + s.covariance_share
    if d in (rank, 1):  # all directions: there is nothing to choose
        return publish(run, Estimate(np.eye(d), np.zeros((d, d))), frame)
    start = initialiser or (normalised_pairs if d <= MOST_SQUARED else power_method)
    state = start(Start(run, frame, rank, s.start_share * total, intercept))
    state = state.first(min(state.basis.shape[1], MOST_UNKNOWNS // d))
    if rank is not None and state.lopsided and d <= MOST_SQUARED:
        state = alternate(
            run, state.first(state.found), frame, 0.25 * for_rounds * total, intercept, settings, "strong", 3
        )
        state = add_weak(run, state, rank, frame, 0.25 * for_rounds * total, intercept, s)
        for_rounds *= 0.5
    return publish(run, alternate(run, state, frame, for_rounds * total, intercept, settings), frame)


def alternate(
    run: Run,
    state: Estimate,
    frame: Frame,
    mu_squared: float,
    intercept: bool,
    settings: AltMinSettings,
    name: str = "altmin",
    rounds: int | None = None,
) -> Estimate:
    """Rounds of heads given U and U given heads, which together spend `mu_squared`, after a look at the sizes."""
    s = settings.shared
    rounds = rounds or s.rounds
    per_histogram = s.sizes_share * mu_squared / rounds
    plan = s.growth ** np.arange(rounds)
    plan *= (1 - s.scout_share - s.sizes_share) * mu_squared / plan.sum()
    scouting = _step(state, frame, (1.0, 1.0), s, intercept)
    sizes = run.ask(f"{name}-scout", scouting, {"sizes": Query(SIZES, s.scout_share * mu_squared)})["sizes"]
    read = read_sizes(sizes, s)
    if read is None:
        return state  # not even the histogram of sizes rises above the noise: what is left is better not spent
    norm, ratio = read
    for t in range(rounds):
        last = t + 1 == rounds or state.converged
        step = _step(state, frame, (norm, norm / ratio), s, intercept)
        share = float(plan[t:].sum()) + (rounds - t) * per_histogram if last else float(plan[t])
        unknowns = step.vector_size
        normal = Bound(step.normal_norm, packed_size(unknowns), acute=True)
        queries = {
            "normal": Query(normal, settings.normal_share * share),
            "right": Query(Bound(norm, unknowns), (1 - settings.normal_share) * share),
        }
        if not last:
            queries["sizes"] = Query(SIZES, per_histogram)
        released = run.ask(f"{name}-{t + 1}", step, queries)
        state = least_squares_step(state, step.outside, released["normal"], released["right"], s.floor)
        if last:
            break
        norm, ratio = read_sizes(released["sizes"], s) or (norm, ratio)
        norm, ratio = norm * state.shrink, ratio * state.shrink
    return state


def _step(state: Estimate, frame: Frame, norms: tuple[float, float], s: Settings, intercept: bool) -> NormalEquations:
    k = state.basis.shape[1]
    outside = np.linalg.qr(state.basis, mode="complete")[0][:, k:]
    return NormalEquations(state.basis, outside, frame, *norms, s.ridge(state), intercept)


def least_squares_step(state: Estimate, outside: Array, normal: Release, right: Release, floor: float) -> Estimate:
    """U + reshape(A^-1 b) and a QR, in coordinates in which users' heads are uncorrelated.

    As in `private_fedrep.preconditioned_step`, each of those directions of the move is then shrunk by what it is worth:
    its signal, as far as its length exceeds the noise's or was left over by earlier steps, over signal plus noise.
    """
    k, e = state.basis.shape[1], outside.shape[1]
    model = denoised(unpack(normal.value), normal.sigma, k, floor)
    raw = model.inverse @ right.value
    turned = raw.reshape(k, e).T @ model.turn
    energy = right.sigma**2 * np.diag(model.turn.T @ _block_squares(model.inverse, k) @ model.turn)
    signal = np.maximum((turned**2).sum(axis=0) - energy, 0.0)
    left = np.diag(model.turn.T @ state.error @ model.turn)
    prior = np.maximum(signal, left)
    gain = np.where(model.heard, prior / (prior + energy), 0.0)  # nothing heard, nothing moved
    basis, R = np.linalg.qr(state.basis @ model.turn + gain * (outside @ turned))
    basis *= np.where(np.diag(R) < 0, -1.0, 1.0)
    missed = (1 - gain * model.reach) ** 2 + (gain * model.relative_error) ** 2
    after = np.minimum(missed * prior + gain**2 * energy, 1.0)
    shrink = math.sqrt(float(after.sum() / prior.sum())) if after.sum() > 0 else 1.0
    converged = bool((signal < 0.5 * energy).all() and ((left < energy) | (gain == 0)).all())
    return Estimate(basis, np.diag(after), np.sqrt(model.heads / model.heads.max()), min(shrink, 1.0), converged)


def _block_squares(inverse: Array, k: int) -> Array:
    """(k, k): the traces of the blocks of inverse^2, which are the noise in each pair of directions of the move."""
    rows = inverse.reshape(k, -1)
    return rows @ rows.T


@dataclass(frozen=True)
class Normal:
    """The released A, made positive definite and rid of what is only noise in it."""

    inverse: Array  # (k e, k e)
    turn: Array  # (k, k): the directions in which users' heads are uncorrelated
    heads: Array  # (k,): second moments of the heads in them, no smaller than can be told from noise
    reach: Array  # (k,): how much of it is theirs rather than the floor's
    heard: NDArray[np.bool_]  # (k,)
    relative_error: float  # what is left of the noise, against all of A


def denoised(A: Array, sigma: float, k: int, floor: float) -> Normal:
    """A as sum of three orthogonal parts, each shrunk by how far it exceeds the noise, its eigenvalues floored.

    Where features are uncorrelated and heads have nothing to do with features, A is M kron I, M the heads' second
    moment; where only the latter holds, it is M kron S. The noise of a part of p coordinates has mean square p sigma^2:
    M has few and is always heard, the rest of A many and is heard as far as it rises above that. A part of square
    length q is multiplied by 1 - p sigma^2 / q, or by zero where that could be chance.
    """
    e = len(A) // k
    blocks = A.reshape(k, e, k, e)
    M = np.einsum("acbc->ab", blocks) / e
    measured, turn = np.linalg.eigh(M)
    noise = sigma / math.sqrt(e)
    heads = np.maximum(measured, max(floor * measured[-1], 3 * noise))
    unit = M / np.linalg.norm(M)
    S = np.einsum("acbd,ab->cd", blocks, unit)
    S -= np.trace(S) / e * np.eye(e)
    rest = A - np.kron(M, np.eye(e)) - np.kron(unit, S)
    p_S, p_rest = packed_size(e) - 1, packed_size(k * e) - packed_size(e) - packed_size(k) + 1
    g_S, g_rest = _kept(S, p_S, sigma), _kept(rest, p_rest, sigma)
    values, axes = np.linalg.eigh(np.eye(e) + g_S * S / np.linalg.norm(M))
    values = np.maximum(values, LEAST)
    inverse: Array = np.kron((turn / heads) @ turn.T, (axes / values) @ axes.T)
    if g_rest > 0:
        roots = (turn / np.sqrt(heads)) @ turn.T, (axes / np.sqrt(values)) @ axes.T
        relative = _kron_times(*roots, _kron_times(*roots, g_rest * rest).T)
        values, axes = np.linalg.eigh(np.eye(k * e) + relative)
        half = _kron_times(*roots, axes)
        inverse = (half / np.maximum(values, LEAST)) @ half.T
    left = packed_size(k) + g_S * p_S + g_rest * p_rest
    error = min(sigma * math.sqrt(left / (e * float((heads**2).sum()))), 1.0)
    return Normal(inverse, turn, heads, np.minimum(measured / heads, 1.0), measured > noise, error)


LEAST = 0.1  # eigenvalues of A, relative to what its larger parts make them, count no less than this


def _kron_times(left: Array, right: Array, matrix: Array) -> Array:
    """(left kron right) @ matrix, without the Kronecker product."""
    parts = right @ matrix.reshape(len(left), len(right), -1)
    return np.tensordot(left, parts, 1).reshape(matrix.shape)


def _kept(part: Array, coordinates: int, sigma: float) -> float:
    """Zero unless the square length exceeds that of noise by far more than noise does by chance."""
    square, noise = float((part**2).sum()), coordinates * sigma**2
    return 1 - noise / square if square > noise * (1 + CLEAR * math.sqrt(2 / max(coordinates, 1))) else 0.0


def paper_altmin(
    run: Run,
    rank: int,
    *,
    rounds: int = 5,
    eta: float = 10.0,
    zeta: float = 4.0,
    init_share: float = 0.5,
    normal_share: float = 0.5,
) -> Representation:
    """Algorithms 1 to 3. `init_share` of mu^2 goes to the initialisation, for which all users are asked; each of the
    groups, one a round, has all the rest, since no user is in two of them: `normal_share` of it for A. No intercept.

    `eta` bounds |x||v| of a row and `zeta` its target. The defaults are rarely reached where x ~ N(0, I_50) and
    |v| = 1, the setting the method was compared in.

    Formal guarantee: everything returned or posted is a function of the releases charged to `run.ledger`, hence
    (epsilon, delta)-DP at user level under the ledger's relation, for any data whatever.
    """
    d, total = run.users.features, run.ledger.capacity
    pairs = Query(Bound(zeta**2, packed_size(d)), init_share * total)
    moments = run.ask("paper-pairs", DisjointPairs(zeta), {"moments": pairs})["moments"].value
    U = np.linalg.eigh(unpack(moments))[1][:, ::-1][:, :rank]
    each = (1 - init_share) * total
    queries = {
        "normal": Query(Bound(eta**2, packed_size(d * rank), acute=True), normal_share * each),
        "right": Query(Bound(eta * zeta, d * rank), (1 - normal_share) * each),
    }
    error = float(rank)
    for t in range(rounds):
        step = QuarterEquations(U, eta, zeta)
        released = run.ask(f"paper-altmin-{t + 1}", step, queries, group=Group("priv-altmin", t, rounds))
        A, right = unpack(released["normal"].value), released["right"]
        values, axes = np.linalg.eigh(A)
        values = np.where(values == 0, np.inf, values)  # directions in which nobody said anything
        solution = axes @ ((axes.T @ right.value) / values)
        U, R = np.linalg.qr(solution.reshape(rank, d).T)
        noise = right.sigma**2 + 0.5 * released["normal"].sigma ** 2 * float((solution**2).sum())
        smallest = max(float(np.linalg.svd(R)[1].min()), 1e-150)
        error = min(noise * float((values**-2).sum()) / smallest**2, float(rank))  # of this round alone
    return publish(run, Estimate(U, np.eye(rank) * error / rank), Frame.plain(d))
