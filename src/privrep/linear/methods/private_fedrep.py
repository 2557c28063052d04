"""Private FedRep (Snedeker, Zhou, Bassily 2025, Algorithms 1 and 2), choosing its own settings.

Start from the top eigenvectors of the users' pair moments; then, round by round, every user fits its head and takes the
gradient of its squared error in U, and the sum of those, clipped and noisy, moves U. `alternation` has the pages.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np

from privrep.linear.alternation import AlternationSettings, Move, Problem, learn, moved
from privrep.linear.class_steps import ClassGradient
from privrep.linear.starts import MAX_AUTO_RANK, Initialiser, best_start
from privrep.linear.steps import LeaveOneOutGradient, gradient_size
from privrep.local.losses import Loss
from privrep.local.representation import Estimate, Representation
from privrep.local.transform import FeatureTransform
from privrep.privacy.billboard import Release
from privrep.privacy.bounds import Bound
from privrep.privacy.contributions import unpack
from privrep.privacy.release import Query, Run


def private_fedrep(
    run: Run,
    rank: int | None,
    *,
    intercept: bool = True,
    frame: FeatureTransform | None = None,
    initialiser: Initialiser | None = None,
    settings: AlternationSettings | None = None,
    loss: Loss | None = None,
) -> Representation:
    """Learn a shared representation; see `alternation.learn`, whose formal guarantee this has."""
    start = initialiser or best_start(run.users.features)
    return learn(run, rank, GradientRound(), start, intercept=intercept, frame=frame, settings=settings, loss=loss)


@dataclass(frozen=True)
class GradientRound:
    """A clipped sum of (gradient, heads' second moment), and a preconditioned step."""

    name: str = "round"

    def most(self, features: int) -> int:
        return MAX_AUTO_RANK

    def step(self, problem: Problem, state: Estimate, norm: float, ratio: float) -> LeaveOneOutGradient:
        s, weight = problem.settings, problem.settings.heads_weight * ratio
        if problem.loss is not None:
            prior = problem.loss, problem.centre_on(state.basis)
            return ClassGradient(state.basis, problem.frame, weight, problem.precision, problem.intercept, *prior)
        return LeaveOneOutGradient(state.basis, problem.frame, weight, s.ridge(state), problem.intercept)

    def queries(self, step: LeaveOneOutGradient, norm: float, mu_squared: float) -> dict[str, Query]:
        return {"step": Query(Bound(norm, gradient_size(*step.U.shape)), mu_squared)}

    def move(
        self, problem: Problem, state: Estimate, step: LeaveOneOutGradient, released: Mapping[str, Release]
    ) -> Estimate:
        return moved(state, preconditioned(state, released["step"], step.heads_weight, problem.settings.floor))


def preconditioned(state: Estimate, step: Release, heads_weight: float, floor: float) -> Move:
    """G H^-1, with G the released gradient and H the released second moment of the heads.

    Dividing by H makes the step independent of the size and conditioning of the heads.
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
