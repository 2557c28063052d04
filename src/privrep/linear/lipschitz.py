"""Losses that are 1-Lipschitz in the prediction, of many users by many candidate representations (003, Algorithm 4).

A candidate U sees a row as f = U^T x, shortened to L_f where it is longer; a user's head is any |v| <= C, its loss the
mean over rows of loss(<f, v>; y). As in `margins`, a user's numbers are its own to the last bit.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, get_args

import numpy as np

from privrep.linear.margins import Net, by_candidate, first_half, signs
from privrep.local.elementary import sigmoid, softplus
from privrep.privacy.bounds import Losses
from privrep.privacy.protocol import StepSpec, UserBatch
from privrep.typing import Floats

LossName = Literal["logistic", "hinge", "absolute"]
LOSSES: tuple[LossName, ...] = get_args(LossName)
_STEPS = 6  # to a head within a selection
HEAD_STEPS = 200  # to one that stays


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


def shortened(P: Floats, longest: float) -> Floats:
    """Rows (users, m, k, W) brought to length `longest` where they are longer."""
    square = P[:, :, 0] * P[:, :, 0]
    for a in range(1, P.shape[2]):
        square += P[:, :, a] * P[:, :, a]
    length = np.sqrt(square)
    long = length > P.dtype.type(longest)
    factor = np.where(long, P.dtype.type(longest) / np.where(long, length, 1), P.dtype.type(1))
    return P * factor[:, :, None]


@dataclass(frozen=True)
class LipschitzFit:
    heads: Floats  # (users, k, W)
    gain: Floats  # (users, W): mean loss of v = 0 less that of the head; not negative


def lipschitz_fit(F: Floats, y: Floats, loss: LossName, norm: float, steps: int = HEAD_STEPS) -> LipschitzFit:
    """The best of the first heads by Frank and Wolfe's method from v = 0, |v| <= norm.

    F is (users, m, k, W), y (users, m, 1). Any fixed rule is as private; this one needs no step size.
    """
    k = F.shape[2]
    V, z = np.zeros(F.shape[:1] + F.shape[2:], F.dtype), np.zeros(F.shape[:2] + F.shape[3:], F.dtype)
    zero = _mean_loss(z, y, loss)
    best, gain = V, np.zeros_like(zero)
    for t in range(steps):
        slope = _slope(z, y, loss)
        pull = np.stack([_sum_rows(slope * F[:, :, a]) for a in range(k)], axis=1)
        length = np.sqrt(_sum_rows(pull * pull))
        corner = pull * (F.dtype.type(-norm) / np.where(length > 0, length, 1))[:, None]
        V = V + (corner - V) * F.dtype.type(2 / (t + 2))
        z = _sum_rows(np.stack([F[:, :, a] * V[:, None, a] for a in range(k)], axis=1))
        now = zero - _mean_loss(z, y, loss)
        better = now > gain
        best, gain = np.where(better[:, None], V, best), np.where(better, now, gain)
    return LipschitzFit(best, gain)


def _sum_rows(values: Floats) -> Floats:
    """Over axis 1, one after the other."""
    total = values[:, 0].copy()
    for j in range(1, values.shape[1]):
        total += values[:, j]
    return total


def _mean_loss(z: Floats, y: Floats, loss: LossName) -> Floats:
    """(users, W): over the rows of outputs z, (users, m, W)."""
    if loss == "logistic":
        each = softplus(-y * z).astype(z.dtype, copy=False)
    elif loss == "hinge":
        each = np.maximum(1 - y * z, 0)
    else:
        each = np.abs(z - y)
    return _sum_rows(each) / z.dtype.type(z.shape[1])


def _slope(z: Floats, y: Floats, loss: LossName) -> Floats:
    """A subgradient of the loss at outputs z; its size does not matter, its direction over rows does."""
    if loss == "logistic":
        return -y * sigmoid(-y * z).astype(z.dtype, copy=False)
    return -y * (y * z < 1) if loss == "hinge" else np.sign(z - y)
