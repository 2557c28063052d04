"""Priv-AltMin (Jain et al. 2021, Algorithms 1 to 3): U by least squares through perturbed normal equations.

Passes over the users, each a page of the billboard:
  scales, covariance   as in Private FedRep                      -> public coordinates
  pairs                pair moments of rows of length one        -> U_0, its top eigenvectors
  altmin-scout         histograms of sizes at U_0
  altmin-t             A = sum W W^T and b = sum r W, and the histograms again
                                                                 -> U + reshape(A^-1 b), and a QR
The paper solves for U anew, from the targets of one group of users a round. This solves for the move of U that explains
the residuals of all users: they shrink as U converges, and the noise of b with them. Noise in A then scales a move that
is small, so that little of the budget is enough for A.

`paper_altmin` is the paper's own configuration. Kept: disjoint groups of users, rows in quarters, fixed clipping norms,
a solve for U from the targets. Settled or corrected there:
  - Heads: the paper fits v on rows [1, m/4] in its algorithm and on [1, m/2] in its proofs; the algorithm is taken.
  - Sums over a user's rows are means, so that users of different sizes have the same say and the same bound.
  - The sensitivity is exact: sqrt 2 eta^2 for A, whose parts are positive semi-definite, 2 eta zeta for b.
    Noise is drawn for the triangle of A, in which it has sigma on the diagonal and sigma / sqrt 2 off it.
    Initialisation and rounds are charged to one budget. The paper shows each of the two to be (epsilon, delta)-DP by
    itself.
  - Noise may leave A indefinite, about which the paper says nothing; its equations are solved all the same.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import ClassVar

import numpy as np

from privrep.errors import InputError
from privrep.linear.alternation import AlternationSettings, Move, RoundContext, apply_move
from privrep.linear.method import Method, Problem
from privrep.linear.normal_matrix import denoise_normal
from privrep.linear.numbers import learn_numbers
from privrep.linear.starts import MAX_AUTO_RANK, Initialiser, choose_start, start_normalised_pairs
from privrep.linear.steps import SIZES, WIDE_CELLS, WIDE_LOWEST, find_octaves, project_centred
from privrep.local.least_squares import centre_rows, centre_targets, fit_least_squares, fit_ridge, move_users_last
from privrep.local.representation import Estimate, Representation, publish
from privrep.local.transform import FeatureTransform
from privrep.privacy.billboard import Release
from privrep.privacy.bounds import Bound, Contributions
from privrep.privacy.calibration import Query
from privrep.privacy.contributions import Counts, Summed, Vectors
from privrep.privacy.groups import Group
from privrep.privacy.kronecker import make_kronecker
from privrep.privacy.moments import CrossMoments, symmetrise
from privrep.privacy.protocol import StepSpec, UserBatch
from privrep.privacy.run import Run
from privrep.typing import Array, Floats, Matrix

MOST_UNKNOWNS = 4096  # d k: the normal equations have their square, half of which is released


ROUNDS = 5  # fewer than gradients take: a regression goes all the way at once
NORMAL_SHARE = 0.15  # of a round's mu^2: for A, the rest for b


def priv_altmin(
    run: Run,
    rank: int | None,
    *,
    intercept: bool = True,
    transform: FeatureTransform | None = None,
    initialiser: Initialiser | None = None,
    settings: AlternationSettings | None = None,
) -> Representation:
    """Learn a shared representation; see `numbers.learn_numbers`, whose formal guarantee this has.

    Args:
        run: asks the users; its whole budget is spent.
        rank: of the representation; None reads it off releases.
        intercept: whether users have levels.
        transform: declared public coordinates; None: found by charged releases.
        initialiser: where rounds start; None: chosen by the number of features.
        settings: of the rounds; None: the default.
    """
    d = run.users.facts.features
    check_reach(d, rank)
    start = initialiser or choose_start(d, start_normalised_pairs)
    settings = settings or AlternationSettings(rounds=ROUNDS)
    return learn_numbers(
        run, rank, RegressionRound(), start, intercept=intercept, transform=transform, settings=settings
    )


def check_reach(features: int, rank: int | None) -> None:
    """Raise InputError where normal equations are out of reach."""
    if features * (rank or 1) > MOST_UNKNOWNS:
        raise InputError(
            f"Priv-AltMin takes at most {MOST_UNKNOWNS:,} features times rank. Got {features:,} features instead: "
            "use Private FedRep."
        )


class PrivAltMinMethod(Method):
    """Priv-AltMin, as callers know it."""

    name = "priv-altmin"
    title = "Priv-AltMin: private least squares for the representation, in turn with heads of users' own (priv-altmin)."
    accepts = frozenset({"numbers", "rank 0", "several targets", "sparse", "start", "paper", "add-or-remove-one-user"})
    purposes: ClassVar[Mapping[str, str]] = {
        "altmin-scout": "first clipping norm",
        "strong/normal": "normal equations, strong directions",
        "strong/right": "their right side, strong directions",
        "normal": "normal equations",
        "right": "their right side",
        "paper-pairs": "starting point",
    }
    own_start = "normalised-pairs"

    def check(self, problem: Problem, features: int) -> None:
        """Raise InputError where normal equations are out of reach."""
        check_reach(features, problem.rank)

    def default(self, run: Run, problem: Problem) -> Representation:
        """Learn the representation by `priv_altmin`."""
        p = problem
        return priv_altmin(run, p.rank, intercept=p.intercept, transform=p.transform, initialiser=p.start)

    def paper(self, run: Run, rank: int) -> Representation:
        """Learn the representation by `paper_altmin`."""
        return paper_altmin(run, rank)


METHOD = PrivAltMinMethod()


@dataclass(frozen=True)
class RegressionRound:
    """The round of Priv-AltMin: A and b of the normal equations, and a step that solves them."""

    name: str = "altmin"

    def limit_rank(self, features: int) -> int:
        """Return the largest rank whose normal equations are within reach, at most MAX_AUTO_RANK."""
        return min(MAX_AUTO_RANK, MOST_UNKNOWNS // features)

    def make_step(self, problem: RoundContext, state: Estimate, norm: float, ratio: float) -> NormalEquations:
        """Return the step that asks for the normal equations at this state; see `alternation.Round`."""
        k = state.basis.shape[1]
        outside = np.linalg.qr(state.basis, mode="complete")[0][:, k:]
        ridge = problem.settings.ridge(state)
        return NormalEquations(state.basis, outside, problem.transform, norm, norm / ratio, ridge, problem.intercept)

    def make_queries(self, step: NormalEquations, norm: float, mu_squared: float) -> dict[str, Query]:
        """Return the queries for A, `normal`, and b, `right`; see `alternation.Round`."""
        unknowns = step.unknowns
        normal = Bound(step.normal_norm, unknowns**2, acute=True)
        return {
            "normal": Query(normal, NORMAL_SHARE * mu_squared),
            "right": Query(Bound(norm, unknowns), (1 - NORMAL_SHARE) * mu_squared),
        }

    def move(
        self, problem: RoundContext, state: Estimate, step: NormalEquations, released: Mapping[str, Release]
    ) -> Estimate:
        """Return the state after the move that solves the released equations; see `alternation.Round`."""
        solved = solve_normal(state, step.outside, released["normal"], released["right"], problem.settings.floor)
        return apply_move(state, solved)


def solve_normal(state: Estimate, outside: Array, normal: Release, right: Release, floor: float) -> Move:
    """Return reshape(A^-1 b), in coordinates in which users' heads are uncorrelated.

    Args:
        state: the basis before the round.
        outside: orthonormal basis of all that is orthogonal to it, (d, d - k).
        normal: the released A.
        right: the released b.
        floor: least second moment of heads, relative to the largest.
    """
    k, e = state.basis.shape[1], outside.shape[1]
    model = denoise_normal(symmetrise(normal.value), normal.sigma, k, floor)
    raw = (model.inverse @ right.value).reshape(k, e).T @ model.turn
    energy = right.sigma**2 * np.diag(model.turn.T @ _trace_blocks(model.inverse, k) @ model.turn)
    return Move(model.turn, outside @ raw, energy, model.heads, model.reach, model.heard, model.relative_error)


def _trace_blocks(inverse: Array, k: int) -> Array:
    """Return the traces of the blocks of inverse^2, (k, k): the noise in each pair of directions of the move.

    Args:
        inverse: of A, (k e, k e).
        k: blocks in each direction.
    """
    rows = inverse.reshape(k, -1)
    return rows @ rows.T


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
    """Learn a shared representation as the paper does, by its Algorithms 1 to 3, without an intercept.

    All users are asked for the initialisation. Each round asks one of the groups, which has all the rest of mu^2, since
    no user is in two of them. The defaults would rarely be reached by true heads where x ~ N(0, I_50) and |v| = 1, the
    setting the method was compared in. Heads fitted on m/4 rows are often longer.

    Formal guarantee, for the epsilon and delta of the run's budget:
      - Everything returned or posted is a function of the releases charged to `run.ledger`.
      - Hence it is (epsilon, delta)-DP at user level under the ledger's relation, for any data whatever.

    Args:
        run: asks the users; its whole budget is spent.
        rank: of the representation.
        rounds: how many there are, each with a group of its own.
        eta: bound of |x||v| of a row.
        zeta: bound of a target's size.
        init_share: part of mu^2 for the initialisation.
        normal_share: part of a round's mu^2 for A; the rest is for b.
    """
    d, total = run.users.facts.features, run.ledger.capacity
    check_reach(d, rank)
    pairs = Query(Bound(zeta**2, d**2), init_share * total)
    moments = run.release("paper-pairs", DisjointPairs(zeta), {"moments": pairs})["moments"].value
    U = np.linalg.eigh(symmetrise(moments))[1][:, ::-1][:, :rank]
    each = (1 - init_share) * total
    queries = {
        "normal": Query(Bound(eta**2, (d * rank) ** 2, acute=True), normal_share * each),
        "right": Query(Bound(eta * zeta, d * rank), (1 - normal_share) * each),
    }
    error = float(rank)
    for t in range(rounds):
        step = QuarterEquations(U, eta, zeta)
        released = run.release(f"paper-altmin-{t + 1}", step, queries, Group("priv-altmin", t, rounds))
        A, right = symmetrise(released["normal"].value), released["right"]
        values, axes = np.linalg.eigh(A)
        values = np.where(values == 0, np.inf, values)  # directions in which nobody said anything
        solution = axes @ ((axes.T @ right.value) / values)
        U, R = np.linalg.qr(solution.reshape(rank, d).T)
        noise = right.sigma**2 + 0.5 * released["normal"].sigma ** 2 * float((solution**2).sum())
        smallest = max(float(np.linalg.svd(R)[1].min()), 1e-150)
        error = min(noise * float((values**-2).sum()) / smallest**2, float(rank))  # of this round alone
    return publish(run, Estimate(U, np.eye(rank) * error / rank), FeatureTransform.plain(d))


@dataclass(frozen=True)
class NormalEquations:
    """Normal equations for the move of U that explains users' residuals r.

    They are A = sum W W^T and b = sum r W, with W = vec(z v^T).

    A move within the span of U changes nothing. So rows z are taken in coordinates of `outside`, an orthonormal basis
    of all that is orthogonal to U. Residuals and heads in b come from fits that leave the row out, so that every row is
    used and none explains itself. With an intercept such a residual sees the row's distance from the mean of the
    *other* rows.
    It is m/(m-1) times the distance from the mean, which A must know. A user shrinks both parts by one factor, so that
    neither exceeds its norm: the sums are the normal equations of a population with weights.
    With several targets a user has a head for each, and sends the sums over them.
    """

    several_targets: ClassVar[bool] = True
    U: Matrix  # (d, k)
    outside: Matrix  # (d, d - k)
    transform: FeatureTransform
    norm: float  # of b
    normal_norm: float  # of A
    ridge: float
    intercept: bool

    def __post_init__(self) -> None:
        if not (self.norm > 0 and self.normal_norm > 0):
            raise InputError(f"norms must be positive. Got {self.norm} and {self.normal_norm} instead.")

    @property
    def unknowns(self) -> int:
        """Return how many numbers a move of U has."""
        return self.U.shape[1] * self.outside.shape[1]

    @property
    def spec(self) -> StepSpec:
        return StepSpec(floats_per_user=self.unknowns)

    def __call__(self, batch: UserBatch) -> dict[str, Contributions]:
        """Return `normal`, `right` and `sizes` of each user."""
        X: Floats = batch.X
        y: Floats = batch.y
        users, m, _ = X.shape
        enough = m > 1 + self.intercept  # some rows are left to fit a head on when one is left out
        P = project_centred(X, self.transform, self.U, self.intercept)
        rows = (centre_rows(X) if self.intercept else X) @ self.transform.to_original(self.outside).astype(X.dtype)
        pull, heads = np.zeros_like(P), []
        for column in self.transform.targets(y):
            targets = centre_targets(column) if self.intercept else move_users_last(column)
            fit = fit_ridge(P, targets if enough else 0 * targets, self.ridge, self.intercept)
            pull += fit.loo_residuals * fit.loo_heads() / m
            heads.append(fit.heads.T)
        right = (np.ascontiguousarray(pull.transpose(2, 0, 1), dtype=X.dtype) @ rows).reshape(users, -1)
        normal = make_kronecker(np.stack(heads, axis=1), rows, np.full(users, 1 / max(m - self.intercept, 1)))
        length, size = _measure_lengths(right), normal.scale * normal.sizes
        weight = np.minimum(1.0, np.minimum(self.norm / length, self.normal_norm / size))
        weight = np.where(np.isfinite(weight), weight, 0.0)
        cells = np.stack([find_octaves(length, WIDE_LOWEST, WIDE_CELLS), find_octaves(length / size)], axis=1)
        cells[:, 1] = np.where(cells[:, 1] < 0, -1, cells[:, 1] + WIDE_CELLS)
        return {
            "normal": replace(normal, scale=normal.scale * weight),
            "right": Vectors(right * weight[:, None]),
            "sizes": Counts(cells, SIZES.size),
        }


@dataclass(frozen=True)
class QuarterEquations:
    """The equations of Jain et al. 2021, Algorithm 2: A = mean of W W^T and b = mean of y W over a user's second
    quarter.

    W = vec(x v^T), shrunk to length `eta`. v is the least squares head of the first quarter, the one of least norm if
    there are many. Targets are held within [-`zeta`, `zeta`]. Users with fewer than four rows send zero.
    """

    U: Matrix
    eta: float
    zeta: float

    @property
    def spec(self) -> StepSpec:
        return StepSpec(floats_per_user=self.U.size)

    def __call__(self, batch: UserBatch) -> dict[str, Contributions]:
        """Return `normal` and `right` of each user."""
        X: Floats = batch.X
        y: Floats = batch.y
        users, m, d = X.shape
        quarter, half = m // 4, m // 2
        if not quarter:
            nothing = np.zeros((users, 1, self.U.shape[1]))
            empty = make_kronecker(nothing, np.zeros((users, 1, d)), np.zeros(users))
            return {"normal": empty, "right": Vectors(np.zeros((users, self.U.size)))}
        X, y = X.astype(np.float64, copy=False), y.astype(np.float64, copy=False)
        heads = fit_least_squares(np.ascontiguousarray(X[:, :quarter]) @ self.U, y[:, :quarter])
        rows = np.ascontiguousarray(X[:, quarter:half])
        lengths = np.sqrt((rows**2).sum(axis=2)) * _measure_lengths(heads)[:, None]
        rows = rows * np.minimum(1.0, self.eta / lengths)[:, :, None]  # X may be the users' own
        targets = np.clip(y[:, quarter:half], -self.zeta, self.zeta) / (half - quarter)
        pull = (np.ascontiguousarray(targets)[:, None, :] @ rows)[:, 0]
        right = (heads[:, :, None] * pull[:, None, :]).reshape(users, -1)
        normal = make_kronecker(heads[:, None, :], rows, np.full(users, 1 / (half - quarter)))
        return {"normal": normal, "right": Vectors(right)}


@dataclass(frozen=True)
class DisjointPairs:
    """The moments of Jain et al. 2021, Algorithm 3: mean of sym(x x'^T) y y' / (|x||x'|) over neighbours in the first
    half.

    Targets are held within [-`zeta`, `zeta`], so that a user's norm is at most zeta^2.
    """

    spec: ClassVar[StepSpec] = StepSpec()
    zeta: float

    def __call__(self, batch: UserBatch) -> dict[str, Contributions]:
        """Return `moments` of each user."""
        X: Floats = batch.X
        y: Floats = batch.y
        pairs = X.shape[1] // 4
        rows = X[:, : max(2 * pairs, 1)].astype(np.float64)
        lengths = np.sqrt((rows**2).sum(axis=2))
        targets = np.clip(y[:, : rows.shape[1]], -self.zeta, self.zeta) * min(pairs, 1)
        rows *= (targets / np.maximum(lengths, np.finfo(np.float64).tiny))[:, :, None]
        scale = np.full(len(X), 1 / (2 * max(pairs, 1)))
        starts = range(0, max(2 * pairs, 1), 2)  # without a pair, one of zeros
        parts = (CrossMoments(np.ascontiguousarray(rows[:, j : j + 2]), scale) for j in starts)
        return {"moments": Summed(tuple(parts))}


def _measure_lengths(vectors: Floats) -> Array:
    """Return the lengths of vectors (users, numbers), in double precision."""
    values = vectors.astype(np.float64, copy=False)
    return np.sqrt((values**2).sum(axis=1))
