"""Margin selection (Snedeker, Zhou, Bassily 2025, Algorithm 3).

A Johnson-Lindenstrauss projection is drawn without the data. Then the exponential mechanism chooses among
representations in its few dimensions.

The cost in accuracy depends on the margin and on the projection's dimension, not on the number of features. The
paper's cover has (sqrt k / gamma)^(k' k) points, out of reach. A random finite set, or rounds of them (`nets`), are as
private and leave the guarantee of privacy exact.

A row x with label y = +-1 is seen by a candidate U as p = U^T x, and q = y p is all that counts: a head v has the row
right with margin rho if <q, v> > rho. A user's loss by U is the part of its rows that the best |v| <= Gamma leaves
wrong. It lies in [0, 1] for any way of picking v. The loss is the user's own to the last bit (see
`nets.score_candidates`).
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

import numpy as np

from privrep.errors import InputError
from privrep.heads.margin import count_first_half, count_right, dot_rows, find_signs, fit_surrogate_heads
from privrep.linear.nets import Net, Zooming, make_sign_matrix, score_candidates, zoom
from privrep.local.representation import Estimate, Representation, publish
from privrep.local.transform import FeatureTransform, Projection
from privrep.privacy.bounds import Losses
from privrep.privacy.protocol import StepSpec, UserBatch
from privrep.privacy.run import Run
from privrep.typing import Floats
from privrep.users.projected import project

FEWEST, MOST = 10, 60  # dimensions that `choose_dimension` returns


_INSIDE = 1 + 2.0**-18  # heads tried have this much more than the margin: rows that are alike count alike


@dataclass(frozen=True)
class MarginLosses:
    """Losses by every candidate of a net, on a user's first half of rows or on all."""

    net: Net
    margin: float  # rho
    norm: float  # Gamma
    halves: bool

    @property
    def spec(self) -> StepSpec:
        return StepSpec(floats_per_user=self.net.size)

    def __call__(self, batch: UserBatch) -> dict[str, Losses]:
        """Return `losses` of each user, (users, candidates)."""
        X: Floats = batch.X
        y: Floats = batch.y
        m = count_first_half(X.shape[1]) if self.halves else X.shape[1]
        signed = X[:, :m].astype(np.float32) * find_signs(y[:, :m])[:, :, None]
        return {
            "losses": score_candidates(self.net, signed, lambda Q, users: find_margin_losses(Q, self.margin, self.norm))
        }


def find_margin_losses(Q: Floats, margin: float, norm: float) -> Floats:
    """Return the part of the rows that the best head leaves wrong, (users, WIDTH).

    It is exact for k = 1, where there are two heads to try, and for k = 2, up to rounding. For larger k it is an upper
    bound.

    Args:
        Q: rows times their labels, seen by the candidates, (users, m, k, WIDTH).
        margin: rho, which <q, v> must exceed.
        norm: Gamma, the largest length of a head.
    """
    m, k = Q.shape[1:3]
    rho, gamma = Q.dtype.type(margin), Q.dtype.type(norm)
    if k == 1:
        right = np.maximum(count_right(Q[:, :, 0] * gamma > rho), count_right(Q[:, :, 0] * -gamma > rho))
    elif k == 2:
        right = _count_depth(Q[:, :, 0], Q[:, :, 1], rho, gamma)
    else:
        right = count_right(dot_rows(Q, fit_surrogate_heads(Q, margin, norm)) > rho)
    return 1 - right.astype(Q.dtype) / Q.dtype.type(m)


def _count_depth(a: Floats, b: Floats, rho: Floats, gamma: Floats) -> Floats:
    """Return how many rows q = (a, b) one head in the plane can have right, (users, WIDTH).

    A longest head is best. Row j is right on an open arc of the circle |v| = Gamma. As many arcs as ever overlap do so
    just inside the start of one of them, at v = rho/|q|^2 q + sqrt(Gamma^2 - rho^2/|q|^2) q_perp/|q|.

    Args:
        a: first coordinates, (users, m, WIDTH).
        b: second coordinates, (users, m, WIDTH).
        rho: the margin.
        gamma: the largest length of a head.
    """
    inside = rho * rho.dtype.type(_INSIDE)
    one, other, right = np.empty_like(a), np.empty_like(a), np.empty(a.shape, bool)
    square = a * a
    square += np.multiply(b, b, out=one)
    left = np.subtract(gamma * gamma, np.divide(inside * inside, square, out=one), out=one)
    reached = left > 0
    np.maximum(left, 0, out=left)
    left /= square
    across, along = np.sqrt(left), np.divide(inside, square, out=square)
    x, y = along * a, along * b
    x += np.multiply(across, b, out=other)
    y -= np.multiply(across, a, out=other)
    best = np.zeros((len(a), a.shape[2]), np.int32)
    for j in range(a.shape[1]):
        np.multiply(a, x[:, j : j + 1], out=one)
        np.multiply(b, y[:, j : j + 1], out=other)
        one += other
        np.greater(one, rho, out=right)
        np.maximum(best, np.where(reached[:, j], count_right(right), 0), out=best)
    return best


def margin_selection(
    run: Run,
    rank: int,
    *,
    margin: float,
    radius: float = 1.0,
    norm: float = 1.0,
    projected: int | None = None,
    zooming: Zooming | None = None,
    halves: bool = True,
) -> Representation:
    """Choose U = M^T U~ by the margin loss that users have with it, each with its best head |v| <= norm.

    Formal guarantee, for the epsilon of the run's budget:
      - Everything returned or posted is epsilon-DP at user level, without a delta.
      - A user's loss by each candidate lies in [0, 1], however its head is picked.

    Args:
        run: asks the users; labels are +-1.
        rank: columns of U.
        margin: a public fact.
        radius: of a ball onto which rows outside are scaled, each user its own; a public fact.
        norm: largest length of a head, a public fact.
        projected: k', the dimension of the projection, a public fact; as many as features: none; None:
            `choose_dimension`.
        zooming: the plan of the rounds; None: the default.
        halves: whether losses are taken on a user's first half of rows, as in the paper.
    """
    d = run.users.facts.features
    check_margin(margin, radius, norm)
    kept = min(choose_dimension(margin, radius, norm) if projected is None else projected, d)
    if not 1 <= rank <= kept:
        raise InputError(f"rank must lie between 1 and the projected dimension, {kept}. Got {rank} instead.")
    M = None if kept == d else make_sign_matrix(kept, d)
    low = replace(run, users=project(run.users, Projection(M, radius)))
    chosen = zoom(low, "margin", kept, rank, zooming or Zooming(), lambda net: MarginLosses(net, margin, norm, halves))
    return publish(
        run, Estimate(chosen if M is None else M.T @ chosen, np.zeros((rank, rank))), FeatureTransform.plain(d)
    )


def check_margin(margin: float, radius: float, norm: float) -> None:
    """Raise InputError unless all three are positive and a row can reach the margin.

    Args:
        margin: that rows are to exceed.
        radius: largest length of a row.
        norm: largest length of a head.
    """
    for name, value in (("margin", margin), ("radius", radius), ("norm", norm)):
        if not (value > 0 and math.isfinite(value)):
            raise InputError(f"{name} must be positive and finite. Got {value} instead.")
    if margin >= radius * norm:
        raise InputError(
            f"no row reaches a margin of radius times norm, {radius * norm:g}, or more: declare a smaller one. "
            f"Got {margin} instead."
        )


def choose_dimension(margin: float, radius: float, norm: float) -> int:
    """Return k', in proportion to (r Gamma / rho)^2 as in the paper.

    The paper's logarithm of n m is taken to be one. The constant comes from trials.

    Args:
        margin: rho.
        radius: r, of the rows.
        norm: Gamma, the largest length of a head.
    """
    return int(np.clip(round(2.8 * (radius * norm / margin) ** 2), FEWEST, MOST))
