"""The exponential mechanism for Lipschitz losses (Jain et al. 2021, Algorithm 4): over a net of orthonormal U, by the
loss that users have with it, each with its best head.

The paper's net covers all U; here it is a random finite set, or rounds of them (`nets`), as in `margin_selection`.
"""

from __future__ import annotations

import math
from dataclasses import replace

import numpy as np

from privrep.errors import InputError
from privrep.heads.margin import LOSSES, LossName
from privrep.linear.lipschitz import LipschitzLosses
from privrep.linear.nets import Zooming, sign_matrix, zoom
from privrep.local.projection import Projection
from privrep.local.representation import Estimate, Representation, publish
from privrep.local.transform import FeatureTransform
from privrep.privacy.run import Run
from privrep.users.projected import project


def lipschitz_selection(
    run: Run,
    rank: int,
    *,
    loss: LossName = "logistic",
    radius: float = 1.0,
    norm: float = 1.0,
    projected: int | None = None,
    zooming: Zooming | None = None,
    halves: bool = True,
) -> Representation:
    """Choose U by the loss of users' best heads |v| <= norm on U^T x, shortened to `radius` where it is longer.

    Labels are +-1; for the absolute loss targets may be any numbers. `projected` chooses within a random projection to
    so many dimensions, as margin selection does; None is the paper's, all of R^d. `radius` and `norm` are public facts.

    Formal guarantee: epsilon-DP at user level, without a delta, with the epsilon of the run's budget: what a user gains
    by a candidate lies in a range of radius times norm (see `LipschitzLosses`), brought to [0, 1].
    """
    d = run.users.facts.features
    if loss not in LOSSES:
        raise InputError(f"loss must be one of {', '.join(LOSSES)}. Got {loss!r} instead.")
    for name, value in (("radius", radius), ("norm", norm)):
        if not (value > 0 and math.isfinite(value)):
            raise InputError(f"{name} must be positive and finite. Got {value} instead.")
    kept = d if projected is None else min(projected, d)
    if not 1 <= rank <= kept:
        raise InputError(f"rank must lie between 1 and the dimension searched, {kept}. Got {rank} instead.")
    M = None if kept == d else sign_matrix(kept, d)
    low = replace(run, users=project(run.users, Projection(M, math.inf)))
    chosen = zoom(
        low,
        f"lipschitz-{loss}",
        kept,
        rank,
        zooming or Zooming(),
        lambda net: LipschitzLosses(net, loss, radius, norm, halves),
    )
    return publish(
        run, Estimate(chosen if M is None else M.T @ chosen, np.zeros((rank, rank))), FeatureTransform.plain(d)
    )
