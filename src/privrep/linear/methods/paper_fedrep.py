"""Private FedRep as its paper has it (Snedeker, Zhou, Bassily 2025, Algorithms 1 and 2), for comparison.

Kept: fixed clipping norms and step, two disjoint batches a round, plain gradient steps, half of each user's rows.
Corrected: clip(a, C) = a min(1, C/|a|) (a typo there); the sensitivity is that of replacing one user; initialisation
and rounds are charged to one budget, accounted exactly; the symmetric initial matrix is released once, as a triangle.
Batches of floor(m/2T) rows do not fit the paper's own experiment (m = 10, T = 5), so rows are used again in later
rounds: that costs no privacy, since a release protects whole users, only the independence the proofs rest on.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from privrep.errors import InputError
from privrep.linear.steps import PairMoments
from privrep.local.least_squares import least_squares_heads
from privrep.local.representation import Estimate, Representation, publish
from privrep.local.transform import FeatureTransform
from privrep.privacy.bounds import Bound, Contributions
from privrep.privacy.contributions import Vectors, packed_size, unpack
from privrep.privacy.release import Query, Run
from privrep.typing import Array, Floats

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
    """Algorithms 1 and 2. The defaults are the paper's for its Figure 1 (it gives no psi_init; its psi is taken).

    `batch` rows of a user's first half fit the head and as many others give the gradient: half of them unless told.
    `init_share` of mu^2 goes to the initialisation, the rest evenly to the rounds. No intercept: the paper has none.
    Beware of the defaults: with disjoint batches a step of 2.5 overshoots and moves away from the truth on the paper's
    own experiment, noise or no noise, for its Lemma 9 asks for at most 1/(2 sigma_max^2), there 1. The authors' code
    takes head and gradient from the same rows, all of the half: `disjoint=False`, whose residuals are smaller by a
    factor 1 - k/b; there 2.5 converges.

    Formal guarantee: everything returned or posted is a function of the releases charged to `run.ledger`, hence
    (epsilon, delta)-DP at user level under replace-one-user, for any data whatever.
    """
    n, d, total = public_count(run), run.users.features, run.ledger.capacity
    pairs = Query(Bound(clip_init, packed_size(d)), init_share * total)
    moments = run.release("paper-moments", FirstHalfPairs(), {"moments": pairs})["moments"].value
    U = np.linalg.eigh(unpack(moments))[1][:, ::-1][:, :rank]
    query = Query(Bound(clip, d * rank), (1 - init_share) * total / rounds)
    error = float(rank)
    for t in range(1, rounds + 1):
        page = f"paper-round-{t}"
        gradient = run.release(page, BatchGradient(U, page, batch, disjoint), {"gradient": query})["gradient"]
        U, R = np.linalg.qr(U - step / n * gradient.value.reshape(d, rank))
        noise = (step / n * gradient.sigma) ** 2 * (d - rank) * float((np.linalg.inv(R) ** 2).sum())
        error = min(noise, float(rank))  # what the noise of this round alone leaves
    return publish(run, Estimate(U, np.eye(rank) * error / rank), FeatureTransform.plain(d))


def public_count(run: Run) -> int:
    """n, which these algorithms divide by: a public fact when a user's rows are replaced, not when a user leaves."""
    if run.ledger.budget.relation != "replace-one-user":
        raise InputError("this algorithm divides by the number of users, which only replace-one-user makes public.")
    return run.users.count


@dataclass(frozen=True)
class FirstHalfPairs:
    """Algorithm 2's Z_i = 1/(h(h-1)) sum over pairs of different rows of y y' x x'^T, on a user's first h = m/2."""

    def __call__(self, X: Floats, y: Floats) -> dict[str, Contributions]:
        half = X.shape[1] // 2
        return PairMoments(FeatureTransform.plain(X.shape[2]), intercept=False)(X[:, :half], y[:, :half])


@dataclass(frozen=True)
class BatchGradient:
    """Lines 5 to 7 of Algorithm 1: head by least squares on one batch, gradient of the mean squared error on another.

    Both batches come from the first half of a user's rows, drawn without replacement by a public permutation that
    depends on the page and the number of rows alone, so that every engine draws the same. With fewer rows than
    columns of U the head is the one of least norm; with no rows for a batch a user sends zero.
    """

    U: Array
    page: str
    batch: int | None = None
    disjoint: bool = True

    def __call__(self, X: Floats, y: Floats) -> dict[str, Contributions]:
        half = X.shape[1] // 2
        most = half // 2 if self.disjoint else half
        size = most if self.batch is None else min(self.batch, most)
        order = np.random.default_rng([half, *self.page.encode()]).permutation(half)
        rest = order[size : 2 * size] if self.disjoint else order[:size]
        return {"gradient": Vectors(head_and_gradient(self.U, X, y, order[:size], rest)[1])}


def head_and_gradient(U: Array, X: Floats, y: Floats, fit: Rows, rest: Rows) -> tuple[Array, Array]:
    """(users, k) heads v by least squares on rows `fit`; (users, d k) gradients of the mean squared error on `rest`.

    grad_U of 1/b sum (y - <x, U v>)^2 = -2/b (sum of residuals times rows) v^T. Without rows both are zero.
    """
    users, d, k = len(X), *U.shape
    if not len(fit) or not len(rest):
        return np.zeros((users, k)), np.zeros((users, d * k))
    X, y = X.astype(np.float64, copy=False), y.astype(np.float64, copy=False)
    heads = least_squares_heads(X.take(fit, axis=1) @ U, y.take(fit, axis=1))
    rows = X.take(rest, axis=1)
    residuals = y.take(rest, axis=1) - (rows @ U @ heads[:, :, None])[:, :, 0]
    pull = (residuals[:, None, :] @ rows)[:, 0] * (-2 / len(rest))
    return heads, (pull[:, :, None] * heads[:, None, :]).reshape(users, d * k)
