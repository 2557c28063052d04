"""DP-FedAvg of one linear model (McMahan et al. 2018), over which users then have heads of their own.

Passes over the users, each a page of the billboard:
  scales, covariance   as in Private FedRep                      -> public coordinates
  fedavg-sizes         histogram of the lengths of users' moves  -> the first clipping norm
  fedavg-round-t       the clipped sum of users' moves, and the histogram again
                                                                 -> the model plus the noisy mean of the moves
  preference           as in Private FedRep
The representation is the direction of the shared model: one column, however large a rank is asked for. A user's head
scales that column and has an intercept. Users whose models have nothing in common leave no direction but noise.

`paper_fedavg` has fixed constants: a clipping norm, a number of rounds, a server that adds the mean. Kept from the
paper: flat clipping of a user's whole update, and the estimator that divides by the number of users. Settled here:
everyone takes part in every round, and a user solves its local problem exactly in place of some epochs of SGD.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import ClassVar

import numpy as np

from privrep.linear.alternation import AlternationSettings, RoundContext, ask_preference
from privrep.linear.method import Method, Problem
from privrep.linear.methods.private_fedrep import find_public_count
from privrep.linear.starts import random_basis
from privrep.linear.steps import CELLS, find_octaves
from privrep.linear.transform import CLEAR, find_transform, read_octave_quantile
from privrep.local.least_squares import centre_rows, centre_targets
from privrep.local.representation import Estimate, Representation, publish
from privrep.local.transform import FeatureTransform
from privrep.privacy.billboard import Release
from privrep.privacy.bounds import Bound, Contributions
from privrep.privacy.calibration import Query
from privrep.privacy.contributions import Counts, Vectors
from privrep.privacy.protocol import StepSpec, UserBatch
from privrep.privacy.run import Run
from privrep.typing import Array, Floats, Vector

ROUNDS = 8
SIZES_SHARE = 0.1  # of what the rounds have: the histograms of all passes together
RIDGE = 0.1  # of the local problem, relative to the mean squared length of a user's rows
QUANTILE = 0.5  # of the lengths of users' moves: the clipping norm


class FedAvgMethod(Method):
    """DP-FedAvg, as callers know it."""

    name = "fedavg"
    title = (
        "DP-FedAvg: one linear model of all users by private averages of their moves, and a head of each user's own "
        "over its direction (fedavg)."
    )
    accepts = frozenset({"numbers", "paper"})
    purposes: ClassVar[Mapping[str, str]] = {
        "fedavg-sizes": "first clipping norm",
        "fedavg-round/update": "step",
        "paper-fedavg/update": "step",
    }
    automatic_rank = "the direction of one shared model"

    def default(self, run: Run, problem: Problem) -> Representation:
        """Learn the representation by `fedavg`, whatever the rank."""
        return fedavg(run, intercept=problem.intercept, transform=problem.transform)

    def paper(self, run: Run, rank: int) -> Representation:
        """Learn the representation by `paper_fedavg`, whatever the rank."""
        return paper_fedavg(run)


METHOD = FedAvgMethod()


def fedavg(run: Run, *, intercept: bool = True, transform: FeatureTransform | None = None) -> Representation:
    """Learn the direction of one linear model for everybody.

    The clipping norm of a round is the median length of users' moves in the round before, read off a released
    histogram. Where the histogram is lost in noise, nothing is learned and the rest of the budget is not spent.

    Formal guarantee, for the epsilon and delta of the run's budget:
      - Everything returned or posted is a function of the releases charged to `run.ledger`.
      - Hence it is (epsilon, delta)-DP at user level under replace-one-user, for any data whatever.

    Args:
        run: asks the users.
        intercept: whether users have levels.
        transform: declared public coordinates; None: found by charged releases.
    """
    n, d, total = find_public_count(run), run.users.facts.features, run.ledger.capacity
    s, spent = AlternationSettings(), 0.0
    if transform is None:
        transform, spent = find_transform(run, s.scales_share * total, s.covariance_share * total, intercept)
    if d == 1:  # one direction: there is nothing to choose
        return publish(run, Estimate(np.eye(1), np.zeros((1, 1))), transform)
    for_votes = s.votes_share * total
    left = total - spent - for_votes
    histogram = Query(Bound(1.0, CELLS, acute=True), SIZES_SHARE * left / ROUNDS)
    step = ModelUpdate(np.zeros(d), transform, RIDGE, intercept)
    norm = _read_norm(run.release("fedavg-sizes", step, {"sizes": histogram})["sizes"])
    if norm is None:
        return publish(run, _make_direction(np.zeros(d), 0.0), transform)
    variance = 0.0
    for t in range(1, ROUNDS + 1):
        queries = {"update": Query(Bound(norm, d), (1 - SIZES_SHARE) * left / ROUNDS)}
        if t < ROUNDS:
            queries["sizes"] = histogram
        released = run.release(f"fedavg-round-{t}", step, queries)
        step = step.apply_move(released["update"].value / n)
        variance += (released["update"].sigma / n) ** 2
        norm = (_read_norm(released["sizes"]) if t < ROUNDS else None) or norm
    state = _make_direction(step.weights, variance)
    votes = ask_preference(RoundContext(run, transform, intercept, s), state, for_votes)
    return publish(run, state, transform, preference=votes)


def paper_fedavg(
    run: Run, *, rounds: int = 20, clip: float = 1.0, server_rate: float = 1.0, ridge: float = RIDGE
) -> Representation:
    """Learn the direction of one linear model with fixed constants. No intercept, features as they come.

    Args:
        run: The run whose whole budget is spent, evenly on the rounds.
        rounds: How often the users are asked.
        clip: The norm to which a user's move is clipped.
        server_rate: By how much the mean of the moves is multiplied.
        ridge: Of the local problem, relative to the mean squared length of a user's rows.

    Formal guarantee, for the epsilon and delta of the run's budget:
      - Everything returned or posted is a function of the releases charged to `run.ledger`.
      - Hence it is (epsilon, delta)-DP at user level under replace-one-user, for any data whatever.
    """
    n, d = find_public_count(run), run.users.facts.features
    step = ModelUpdate(np.zeros(d), FeatureTransform.plain(d), ridge, intercept=False)
    query, variance = Query(Bound(clip, d), run.ledger.capacity / rounds), 0.0
    for t in range(1, rounds + 1):
        released = run.release(f"paper-fedavg-{t}", step, {"update": query})["update"]
        step = step.apply_move(server_rate / n * released.value)
        variance += (server_rate / n * released.sigma) ** 2
    return publish(run, _make_direction(step.weights, variance), step.transform)


def _read_norm(sizes: Release) -> float | None:
    """Return the clipping norm that a histogram of lengths stands for; None where it is lost in its noise."""
    return read_octave_quantile(sizes.value, QUANTILE) if sizes.value.max() > CLEAR * sizes.sigma else None


def _make_direction(weights: Array, variance: float) -> Estimate:
    """Return the direction of the model, and the squared sine that the noise of the releases may have left.

    What more rounds would have moved is not part of it.

    Args:
        weights: The shared model, (d,). Zero stands for no model; its direction is a public random one.
        variance: Of the noise in each coordinate, with nothing of it corrected by later rounds: an upper bound.
    """
    d, length = len(weights), math.sqrt(float(weights @ weights))
    if not length:
        return Estimate(random_basis(d, 1, "fedavg"), np.eye(1))
    error = min((d - 1) * variance / length**2, 1.0)
    return Estimate(weights[:, None] / length, np.full((1, 1), error))


@dataclass(frozen=True)
class ModelUpdate:
    """The move of a shared model that fits a user's rows: ridge regression of what the model leaves over.

    The ridge is relative to the user's mean squared row length, so it needs no scale. `sizes` is the octave of the
    move's length. The regression is solved in the smaller of rows and features.
    """

    spec: ClassVar[StepSpec] = StepSpec()
    weights: Vector  # (d,), in the coordinates of the transform
    transform: FeatureTransform
    ridge: float
    intercept: bool

    def apply_move(self, move: Array) -> ModelUpdate:
        """Return the step of the model after this move, (d,)."""
        return ModelUpdate(self.weights + move, self.transform, self.ridge, self.intercept)

    def __call__(self, batch: UserBatch) -> dict[str, Contributions]:
        """Return `update`, (users, d), and `sizes` of each user."""
        X: Floats = batch.X
        y: Floats = batch.y
        m, d = X.shape[1:]
        rows = self.transform.rows((centre_rows(X) if self.intercept else X).astype(np.float64))
        targets = centre_targets(y).T if self.intercept else y
        residuals = (targets - rows @ self.weights)[:, :, None]
        penalty = (self.ridge + 1e-10) * (rows**2).sum(axis=(1, 2))[:, None, None] / m + np.finfo(np.float64).tiny
        across = rows.transpose(0, 2, 1)
        if m <= d:
            move = across @ np.linalg.solve(rows @ across + penalty * np.eye(m), residuals)
        else:
            move = np.linalg.solve(across @ rows + penalty * np.eye(d), across @ residuals)
        return {"update": Vectors(move[:, :, 0]), "sizes": Counts(find_octaves(np.linalg.norm(move, axis=1)), CELLS)}
