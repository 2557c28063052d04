"""Losses that are 1-Lipschitz in the prediction, of many users by many candidate representations (003, Algorithm 4).

A candidate U sees a row as f = U^T x, shortened to L_f where it is longer; a user's head is any |v| <= C, its loss the
mean over rows of loss(<f, v>; y). As in `margins`, a user's numbers are its own to the last bit.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from privrep.heads.margin import LossName, first_half, lipschitz_fit, shortened, signs
from privrep.linear.margins import Net, by_candidate
from privrep.privacy.bounds import Losses
from privrep.privacy.protocol import StepSpec, UserBatch
from privrep.typing import Floats

_STEPS = 6  # to a head within a selection


@dataclass(frozen=True)
class LipschitzLosses:
    """Losses by every candidate of a net, of a user's first half of rows or of all, on the range [0, 1].

    What counts is how much a user gains on v = 0, min_v loss(v) - loss(0). It lies in [-L_f C, 0]: v = 0 is allowed,
    and a 1-Lipschitz loss moves by at most |<f, v>| <= L_f C. loss(0) is a constant of the user, the same for all
    candidates, and changes no probability. The paper takes off a constant, too, and bounds each of four terms by
    L_f C: a sensitivity of 4 L_f C, and exp(-epsilon score / (8 L_f C)). On the range above one user replaced by
    another moves a score by L_f C at most: exp(-epsilon score / (2 L_f C)), four times as sharp at the same epsilon.
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
        X: Floats = batch.X
        y: Floats = batch.y
        m = first_half(X.shape[1]) if self.halves else X.shape[1]
        targets = y[:, :m, None].astype(np.float32) if self.loss == "absolute" else signs(y[:, :m, None])

        def losses(P: Floats, users: slice) -> Floats:
            fit = lipschitz_fit(shortened(P, self.longest), targets[users], self.loss, self.norm, _STEPS)
            return 1 - fit.gain / P.dtype.type(self.longest * self.norm)

        return {"losses": by_candidate(self.net, X[:, :m].astype(np.float32), losses)}
