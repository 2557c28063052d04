"""The exponential mechanism for Lipschitz losses (Jain et al. 2021, Algorithm 4).

It chooses from a net of orthonormal U, by the loss that users have with each U and their best head on it. The paper's
net covers all U; here it is a random finite set, or rounds of them (`nets`), as in `margin_selection`.

Losses are 1-Lipschitz in the prediction. A candidate U sees a row as f = U^T x, shortened to L_f where it is longer. A
user's head is any |v| <= C, and its loss is the mean over rows of loss(<f, v>; y). A user's numbers are its own to the
last bit, as in `margin_selection`.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

import numpy as np

from privrep.errors import InputError
from privrep.heads.margin import LOSSES, LossName, count_first_half, find_signs, fit_lipschitz, shorten_rows
from privrep.linear.nets import Net, Zooming, make_sign_matrix, score_candidates, zoom
from privrep.local.representation import Estimate, Representation, publish
from privrep.local.transform import FeatureTransform, Projection
from privrep.privacy.bounds import Losses
from privrep.privacy.protocol import StepSpec, UserBatch
from privrep.privacy.run import Run
from privrep.typing import Floats
from privrep.users.projected import project

_STEPS = 6  # to a head within a selection


@dataclass(frozen=True)
class LipschitzLosses:
    """Losses by every candidate of a net, of a user's first half of rows or of all, on the range [0, 1].

    The score is a user's gain on v = 0, min_v loss(v) - loss(0). It lies in [-L_f C, 0]: v = 0 is allowed, and a
    1-Lipschitz loss moves by at most |<f, v>| <= L_f C. loss(0) is a constant of the user, the same for all candidates,
    and changes no probability. The paper takes off a constant, too, and bounds each of four terms by L_f C: a
    sensitivity of 4 L_f C, and exp(-epsilon score / (8 L_f C)). On the range above one user replaced by another moves a
    score by L_f C at most: exp(-epsilon score / (2 L_f C)), four times as sharp at the same epsilon.
    """

    net: Net
    loss: LossName
    longest: float  # L_f
    norm: float  # C
    halves: bool

    @property
    def spec(self) -> StepSpec:
        return StepSpec(floats_per_user=self.net.size)

    def __call__(self, batch: UserBatch) -> dict[str, Losses]:
        """Return `losses` of each user, (users, candidates)."""
        X: Floats = batch.X
        y: Floats = batch.y
        m = count_first_half(X.shape[1]) if self.halves else X.shape[1]
        targets = y[:, :m, None].astype(np.float32) if self.loss == "absolute" else find_signs(y[:, :m, None])

        def losses(P: Floats, users: slice) -> Floats:
            fit = fit_lipschitz(shorten_rows(P, self.longest), targets[users], self.loss, self.norm, _STEPS)
            return 1 - fit.gain / P.dtype.type(self.longest * self.norm)

        return {"losses": score_candidates(self.net, X[:, :m].astype(np.float32), losses)}


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
    """Choose U by the loss of users' best heads |v| <= norm on U^T x.

    Formal guarantee, for the epsilon of the run's budget:
      - Everything returned or posted is epsilon-DP at user level, without a delta.
      - A user gains by a candidate within a range of radius times norm (see `LipschitzLosses`), brought to [0, 1].

    Args:
        run: asks the users; labels are +-1, but any numbers for the absolute loss.
        rank: columns of U.
        loss: of predictions.
        radius: length that images U^T x are shortened to, a public fact.
        norm: largest length of a head, a public fact.
        projected: dimension of a random projection to choose in, as margin selection does; None: all of R^d, as in the
            paper.
        zooming: the plan of the rounds; None: the default.
        halves: whether losses are taken on a user's first half of rows, as in the paper.
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
    M = None if kept == d else make_sign_matrix(kept, d)
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
