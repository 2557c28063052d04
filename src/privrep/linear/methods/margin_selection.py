"""Margin selection (Snedeker, Zhou, Bassily 2025, Algorithm 3): a Johnson-Lindenstrauss projection drawn without the
data, then the exponential mechanism over representations in its few dimensions.

What it costs in accuracy depends on the margin and on the projection's dimension, not on the number of features. The
paper's cover has (sqrt k / gamma)^(k' k) points, out of reach; a random finite set, or rounds of them (`nets`), are as
private and leave the guarantee of privacy exact.
"""

from __future__ import annotations

import math
from dataclasses import replace

import numpy as np

from privrep.errors import InputError
from privrep.linear.margins import MarginLosses
from privrep.linear.nets import Zooming, sign_matrix, zoom
from privrep.local.projection import Projection
from privrep.local.representation import Estimate, Representation, publish
from privrep.local.transform import FeatureTransform
from privrep.privacy.run import Run
from privrep.users.projected import project

FEWEST, MOST = 10, 60  # dimensions that `projected_dimension` takes


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

    `margin`, `radius`, `norm` and `projected` (the dimension k'; as many as features: no projection) are public facts.
    Users' labels are +-1. Rows outside the ball of `radius` are scaled onto it, each user its own. The loss of a user
    is that of its first half of rows (`halves`, the paper's), or of all.

    Formal guarantee: epsilon-DP at user level, without a delta, with the epsilon of the run's budget. A user's loss by
    each candidate lies in [0, 1], however its head is picked.
    """
    d = run.users.facts.features
    check_margin(margin, radius, norm)
    kept = min(projected_dimension(margin, radius, norm) if projected is None else projected, d)
    if not 1 <= rank <= kept:
        raise InputError(f"rank must lie between 1 and the projected dimension, {kept}. Got {rank} instead.")
    M = None if kept == d else sign_matrix(kept, d)
    low = replace(run, users=project(run.users, Projection(M, radius)))
    chosen = zoom(low, "margin", kept, rank, zooming or Zooming(), lambda net: MarginLosses(net, margin, norm, halves))
    return publish(
        run, Estimate(chosen if M is None else M.T @ chosen, np.zeros((rank, rank))), FeatureTransform.plain(d)
    )


def check_margin(margin: float, radius: float, norm: float) -> None:
    for name, value in (("margin", margin), ("radius", radius), ("norm", norm)):
        if not (value > 0 and math.isfinite(value)):
            raise InputError(f"{name} must be positive and finite. Got {value} instead.")
    if margin >= radius * norm:
        raise InputError(
            f"no row reaches a margin of radius times norm, {radius * norm:g}, or more: declare a smaller one. "
            f"Got {margin} instead."
        )


def projected_dimension(margin: float, radius: float, norm: float) -> int:
    """k', in proportion to (r Gamma / rho)^2 as in the paper; its logarithm of n m is one, its constant from trials."""
    return int(np.clip(round(2.8 * (radius * norm / margin) ** 2), FEWEST, MOST))
