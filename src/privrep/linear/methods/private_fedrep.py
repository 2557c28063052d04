"""Private FedRep (Snedeker, Zhou, Bassily 2025, Algorithms 1 and 2), choosing its own settings.

It starts from the top eigenvectors of the users' pair moments. Then, round by round, every user fits its head and takes
the gradient of its squared error in U. The sum of the gradients, clipped and noisy, moves U. `alternation` has the
pages.

`paper_fedrep` is the paper's own configuration, for comparison. Kept: fixed clipping norms and step, two disjoint
batches a round, plain gradient steps, half of each user's rows. Corrected there: clip(a, C) = a min(1, C/|a|) (a typo);
the sensitivity is for replacing one user; initialisation and rounds are charged to one budget, accounted exactly;
the symmetric initial matrix is released once, as a triangle. Batches of floor(m/2T) rows do not fit the paper's own
experiment (m = 10, T = 5), so rows are used again in later rounds. That costs no privacy, since a release protects
whole users. It costs only the independence the proofs rest on.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import ClassVar

import numpy as np
from numpy.typing import NDArray

from privrep.errors import InputError
from privrep.linear.alternation import AlternationSettings, Move, RoundContext, apply_move
from privrep.linear.class_steps import ClassGradient
from privrep.linear.labels import learn_labels
from privrep.linear.method import Method, Problem
from privrep.linear.numbers import learn_numbers
from privrep.linear.starts import MAX_AUTO_RANK, Initialiser, choose_start, draw_public_order
from privrep.linear.steps import LeaveOneOutGradient, PairMoments, gradient_size
from privrep.local.least_squares import fit_least_squares
from privrep.local.losses import Loss
from privrep.local.representation import Estimate, Representation, publish
from privrep.local.transform import FeatureTransform
from privrep.privacy.billboard import Release
from privrep.privacy.bounds import Bound, Contributions
from privrep.privacy.calibration import Query
from privrep.privacy.contributions import Vectors
from privrep.privacy.moments import symmetrise, unpack
from privrep.privacy.protocol import StepSpec, UserBatch
from privrep.privacy.run import Run
from privrep.typing import Array, Floats, Matrix


def private_fedrep(
    run: Run,
    rank: int | None,
    *,
    intercept: bool = True,
    transform: FeatureTransform | None = None,
    initialiser: Initialiser | None = None,
    settings: AlternationSettings | None = None,
    loss: Loss | None = None,
) -> Representation:
    """Learn a shared representation and a prior of heads.

    See `numbers.learn_numbers` and `labels.learn_labels`, whose formal guarantee this has.

    Args:
        run: asks the users; its whole budget is spent.
        rank: of the representation; None reads it off releases.
        intercept: whether users have levels.
        transform: declared public coordinates; None: found by charged releases.
        initialiser: where rounds start; None: chosen by the number of features.
        settings: of the rounds; None: the default.
        loss: of labels; None: of numbers.
    """
    start = initialiser or choose_start(run.users.facts.features)
    if loss is None:
        return learn_numbers(
            run, rank, GradientRound(), start, intercept=intercept, transform=transform, settings=settings
        )
    return learn_labels(
        run, rank, GradientRound(), start, intercept=intercept, transform=transform, settings=settings, loss=loss
    )


class PrivateFedRepMethod(Method):
    """Private FedRep, as callers know it."""

    name = "private-fedrep"
    title = (
        "Private FedRep: private gradient steps on the representation, and a head of each user's own (private-fedrep)."
    )
    accepts = frozenset(
        {"numbers", "rank 0", "classes", "several targets", "sparse", "start", "paper", "add-or-remove-one-user"}
    )
    purposes: ClassVar[Mapping[str, str]] = {
        "round-scout": "first clipping norm",
        "strong/step": "step, strong directions",
        "step": "step",
        "paper-moments": "starting point",
        "gradient": "step",
    }
    own_start = "spectral"

    def default(self, run: Run, problem: Problem) -> Representation:
        """Learn the representation by `private_fedrep`."""
        p = problem
        return private_fedrep(
            run, p.rank, intercept=p.intercept, transform=p.transform, initialiser=p.start, loss=p.loss
        )

    def paper(self, run: Run, rank: int) -> Representation:
        """Learn the representation by `paper_fedrep`."""
        return paper_fedrep(run, rank)


METHOD = PrivateFedRepMethod()


@dataclass(frozen=True)
class GradientRound:
    """The round of Private FedRep: a clipped sum of (gradient, heads' second moment), and a preconditioned step."""

    name: str = "round"

    def limit_rank(self, features: int) -> int:
        """Return MAX_AUTO_RANK, whatever the number of features."""
        return MAX_AUTO_RANK

    def make_step(self, problem: RoundContext, state: Estimate, norm: float, ratio: float) -> LeaveOneOutGradient:
        """Return the step that asks for gradients at this state; see `alternation.Round`."""
        s, weight = problem.settings, problem.settings.heads_weight * ratio
        if problem.loss is not None:
            assert problem.mean is not None
            prior = problem.loss, problem.mean, problem.level
            return ClassGradient(state.basis, problem.transform, weight, problem.precision, problem.intercept, *prior)
        return LeaveOneOutGradient(state.basis, problem.transform, weight, s.ridge(state), problem.intercept)

    def make_queries(self, step: LeaveOneOutGradient, norm: float, mu_squared: float) -> dict[str, Query]:
        """Return the query for gradients and the heads' second moment, `step`; see `alternation.Round`."""
        return {"step": Query(Bound(norm, gradient_size(*step.U.shape)), mu_squared)}

    def move(
        self, problem: RoundContext, state: Estimate, step: LeaveOneOutGradient, released: Mapping[str, Release]
    ) -> Estimate:
        """Return the state after the released gradient, preconditioned; see `alternation.Round`."""
        return apply_move(state, precondition(state, released["step"], step.heads_weight, problem.settings.floor))


def precondition(state: Estimate, step: Release, heads_weight: float, floor: float) -> Move:
    """Return the move G H^-1, with G the released gradient and H the released second moment of the heads.

    Dividing by H makes the step independent of the size and conditioning of the heads.

    Args:
        state: the basis before the round.
        step: the released gradient, with `heads_weight` times H behind it.
        heads_weight: factor of H in the release.
        floor: least second moment of heads, relative to the largest.
    """
    d, k = state.basis.shape
    gradient = step.value[: d * k].reshape(k, d).T
    measured, turn = np.linalg.eigh(unpack(step.value[d * k :]) / heads_weight)
    noise = step.sigma / heads_weight
    heads = np.maximum(measured, max(floor * measured[-1], 3 * noise))
    raw = (gradient @ turn) / heads
    raw -= state.basis @ (state.basis.T @ raw)
    energy = (d - k) * (step.sigma / heads) ** 2
    return Move(turn, raw, energy, heads, np.minimum(measured / heads, 1.0), measured > noise)


Rows = NDArray[np.int64]


def paper_fedrep(
    run: Run,
    rank: int,
    *,
    rounds: int = 5,
    step: float = 2.5,
    clip: float = 10.0,
    clip_init: float = 10.0,
    batch: int | None = None,
    disjoint: bool = True,
    init_share: float = 0.5,
) -> Representation:
    """Learn a shared representation as the paper does, by its Algorithms 1 and 2, without an intercept.

    The defaults are the paper's for its Figure 1 (it gives no psi_init; its psi is taken). Beware of them: with
    disjoint batches a step of 2.5 overshoots on the paper's own experiment. It moves away from the truth, noise or no
    noise, because Lemma 9 asks for at most 1/(2 sigma_max^2), there 1. The authors' code takes head and gradient from
    the same rows, all of the half: `disjoint=False`. Its residuals are smaller by a factor 1 - k/b, and there 2.5
    converges.

    Formal guarantee, for the epsilon and delta of the run's budget:
      - Everything returned or posted is a function of the releases charged to `run.ledger`.
      - Hence it is (epsilon, delta)-DP at user level under replace-one-user, for any data whatever.

    Args:
        run: asks the users; its whole budget is spent.
        rank: of the representation.
        rounds: gradient steps after the initialisation.
        step: length of a step.
        clip: psi, the clipping norm of the gradients.
        clip_init: psi_init, the clipping norm of the initial moments.
        batch: rows of a user's first half that fit the head, and as many that give the gradient; None: half of them
            each.
        disjoint: whether the two batches have no row in common.
        init_share: part of mu^2 for the initialisation; the rest goes evenly to the rounds.
    """
    n, d, total = find_public_count(run), run.users.facts.features, run.ledger.capacity
    pairs = Query(Bound(clip_init, d**2), init_share * total)
    moments = run.release("paper-moments", FirstHalfPairs(), {"moments": pairs})["moments"].value
    U = np.linalg.eigh(symmetrise(moments))[1][:, ::-1][:, :rank]
    query = Query(Bound(clip, d * rank), (1 - init_share) * total / rounds)
    error = float(rank)
    for t in range(1, rounds + 1):
        page = f"paper-round-{t}"
        gradient = run.release(page, BatchGradient(U, page, batch, disjoint), {"gradient": query})["gradient"]
        U, R = np.linalg.qr(U - step / n * gradient.value.reshape(d, rank))
        noise = (step / n * gradient.sigma) ** 2 * (d - rank) * float((np.linalg.inv(R) ** 2).sum())
        error = min(noise, float(rank))  # what the noise of this round alone leaves
    return publish(run, Estimate(U, np.eye(rank) * error / rank), FeatureTransform.plain(d))


def find_public_count(run: Run) -> int:
    """Return n, which these algorithms divide by; raise InputError under add-or-remove-one-user.

    It is a public fact when a user's rows are replaced, not when a user leaves.
    """
    if run.ledger.budget.relation != "replace-one-user":
        raise InputError("this algorithm divides by the number of users, which only replace-one-user makes public.")
    return run.users.facts.users


@dataclass(frozen=True)
class FirstHalfPairs:
    """The Z_i of Snedeker, Zhou, Bassily 2025, Algorithm 2, on a user's first h = m/2 rows.

    Z_i = 1/(h(h-1)) sum over pairs of different rows of y y' x x'^T.
    """

    spec: ClassVar[StepSpec] = StepSpec()

    def __call__(self, batch: UserBatch) -> dict[str, Contributions]:
        """Return `moments` of each user."""
        X: Floats = batch.X
        y: Floats = batch.y
        half = X.shape[1] // 2
        return PairMoments(FeatureTransform.plain(X.shape[2]), intercept=False)(UserBatch(X[:, :half], y[:, :half]))


@dataclass(frozen=True)
class BatchGradient:
    """The users' half of Snedeker, Zhou, Bassily 2025, Algorithm 1, lines 5 to 7.

    The head is fitted by least squares on one batch. The gradient of the mean squared error is taken on another. Both
    batches come from the first half of a user's rows, drawn without replacement by a public permutation. It depends on
    the page and the number of rows alone, so that every engine draws the same. With fewer rows than columns of U the
    head is the one of least norm; with no rows for a batch a user sends zero.
    """

    spec: ClassVar[StepSpec] = StepSpec()
    U: Matrix
    page: str
    batch: int | None = None
    disjoint: bool = True

    def __call__(self, batch: UserBatch) -> dict[str, Contributions]:
        """Return `gradient` of each user, (users, d k)."""
        X: Floats = batch.X
        y: Floats = batch.y
        half = X.shape[1] // 2
        most = half // 2 if self.disjoint else half
        size = most if self.batch is None else min(self.batch, most)
        order = draw_public_order(half, self.page)
        rest = order[size : 2 * size] if self.disjoint else order[:size]
        return {"gradient": Vectors(fit_head_and_gradient(self.U, X, y, order[:size], rest)[1])}


def fit_head_and_gradient(U: Array, X: Floats, y: Floats, fit: Rows, rest: Rows) -> tuple[Array, Array]:
    """Return least squares heads v, (users, k), and gradients of the mean squared error, (users, d k).

    grad_U of 1/b sum (y - <x, U v>)^2 = -2/b (sum of residuals times rows) v^T. Without rows both are zero.

    Args:
        U: (d, k).
        X: rows (users, m, d).
        y: targets (users, m).
        fit: positions of the rows that fit the heads.
        rest: positions of the rows that give the gradients.
    """
    users, d, k = len(X), *U.shape
    if not len(fit) or not len(rest):
        return np.zeros((users, k)), np.zeros((users, d * k))
    X, y = X.astype(np.float64, copy=False), y.astype(np.float64, copy=False)
    heads = fit_least_squares(X.take(fit, axis=1) @ U, y.take(fit, axis=1))
    rows = X.take(rest, axis=1)
    residuals = y.take(rest, axis=1) - (rows @ U @ heads[:, :, None])[:, :, 0]
    pull = (residuals[:, None, :] @ rows)[:, 0] * (-2 / len(rest))
    return heads, (pull[:, :, None] * heads[:, None, :]).reshape(users, d * k)
