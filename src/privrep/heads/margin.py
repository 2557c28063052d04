"""Heads that choose one of two classes, or predict by a 1-Lipschitz loss, of many users by many representations.

A row x with label y = +-1 is seen by a candidate U as p = U^T x, and q = y p is all that counts. Selections score
candidates by these heads (`margin_selection`, `lipschitz_selection`), and users keep one for the representation that
was chosen. A user's numbers are its own to the last bit: all is elementwise over users and candidates, by operations
that are rounded correctly.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, get_args

import numpy as np

from privrep.local.elementary import sigmoid, softplus
from privrep.typing import Floats

_STEPS = 8  # of the surrogate for rank 3 and more


def count_first_half(rows: int) -> int:
    """Return how many rows choose the representation: the first half, and of an odd number one more."""
    return (rows + 1) // 2


def find_signs(y: Floats) -> Floats:
    """Return 1 for the second class and -1 for the first, in the shape of y."""
    return np.where(y > 0, np.float32(1), np.float32(-1))


def count_right(right: Floats) -> Floats:
    """Return how many rows of each user are right, (users, WIDTH), from a mask (users, m, WIDTH)."""
    return np.add.reduce(right, axis=1, dtype=np.int32)


def dot_rows(Q: Floats, V: Floats) -> Floats:
    """Return <q, v>, (users, m, WIDTH).

    Args:
        Q: rows (users, m, k, WIDTH).
        V: heads (users, k, WIDTH).
    """
    total = Q[:, :, 0] * V[:, None, 0]
    for a in range(1, Q.shape[2]):
        total += Q[:, :, a] * V[:, None, a]
    return total


def fit_surrogate_heads(Q: Floats, margin: float, norm: float) -> Floats:
    """Return the best of the first few heads of a perceptron that starts at the rows' mean, (users, k, WIDTH).

    Args:
        Q: rows times their labels, (users, m, k, WIDTH).
        margin: that <q, v> must exceed.
        norm: length of the heads, Gamma.
    """
    rho = Q.dtype.type(margin)
    move = _sum_chosen(Q, np.ones(Q.shape[:2] + Q.shape[3:], bool))
    best, most = np.zeros_like(move), np.full(move[:, 0].shape, -1, np.int32)
    for _ in range(_STEPS):
        length = np.sqrt(dot_rows(move[:, None], move))
        V = move * (Q.dtype.type(norm) / np.where(length > 0, length, 1))
        right = dot_rows(Q, V) > rho
        count = count_right(right)
        better = (count > most)[:, None]
        best, most = np.where(better, V, best), np.maximum(most, count)
        move = move + _sum_chosen(Q, ~right)
    return best


def _sum_chosen(Q: Floats, chosen: Floats) -> Floats:
    """Return the sum of the chosen rows, one after the other, (users, k, WIDTH).

    Args:
        Q: rows (users, m, k, WIDTH).
        chosen: a mask (users, m, WIDTH).
    """
    total = Q[:, 0] * chosen[:, 0, None]
    for j in range(1, Q.shape[1]):
        total += Q[:, j] * chosen[:, j, None]
    return total


def fit_zero_one_heads(Q: Floats) -> Floats:
    """Return heads of length one, or zero, of least 0-1 loss on each user's rows, (users, k).

    They are exact for k = 1 and 2. In the plane the head is the middle of the widest best arc: it has the largest angle
    to the nearest row that it has right. For larger k it is the best of a few heads of a perceptron.

    Args:
        Q: rows times their labels, q = y U^T x, (users, m, k).
    """
    users, m, k = Q.shape
    if k == 1:
        right, wrong = (Q[:, :, 0] > 0).sum(axis=1), (Q[:, :, 0] < 0).sum(axis=1)
        return np.sign(right - wrong)[:, None].astype(np.float64)
    if k > 2:
        lengths = np.sqrt((Q**2).sum(axis=2, keepdims=True))
        return fit_surrogate_heads((Q / np.where(lengths > 0, lengths, 1))[..., None], 0.0, 1.0)[..., 0]
    length = np.sqrt((Q**2).sum(axis=2))
    unit = Q / np.where(length > 0, length, 1)[:, :, None]
    head, best = np.zeros((users, 2)), np.full((users, 2), -2.0)
    for j in range(m):
        first = unit[:, j]
        cosine = unit[:, :, 0] * first[:, None, 0] + unit[:, :, 1] * first[:, None, 1]
        sine = unit[:, :, 0] * first[:, None, 1] - unit[:, :, 1] * first[:, None, 0]
        right = (sine > 0) | ((sine == 0) & (cosine > 0))
        right[:, j] = length[:, j] > 0
        cosine = np.where(right, cosine, 2.0)
        last = unit[np.arange(users), cosine.argmin(axis=1)]
        found = np.stack([right.sum(axis=1), cosine.min(axis=1)], axis=1)
        better = (found[:, 0] > best[:, 0]) | ((found[:, 0] == best[:, 0]) & (found[:, 1] > best[:, 1]))
        better &= length[:, j] > 0
        best = np.where(better[:, None], found, best)
        head = np.where(better[:, None], first + last, head)
    size = np.sqrt((head**2).sum(axis=1, keepdims=True))
    return head / np.where(size > 0, size, 1)


LossName = Literal["logistic", "hinge", "absolute"]


LOSSES: tuple[LossName, ...] = get_args(LossName)
"""Names of the 1-Lipschitz losses."""


HEAD_STEPS = 200  # to one that stays


def shorten_rows(P: Floats, longest: float) -> Floats:
    """Return rows brought to length `longest` where they are longer.

    Args:
        P: rows (users, m, k, W).
        longest: the largest length to return.
    """
    square = P[:, :, 0] * P[:, :, 0]
    for a in range(1, P.shape[2]):
        square += P[:, :, a] * P[:, :, a]
    length = np.sqrt(square)
    long = length > P.dtype.type(longest)
    factor = np.where(long, P.dtype.type(longest) / np.where(long, length, 1), P.dtype.type(1))
    return P * factor[:, :, None]


@dataclass(frozen=True)
class LipschitzFit:
    """Heads that were fitted by a Lipschitz loss, and what they gain."""

    heads: Floats  # (users, k, W)
    gain: Floats  # (users, W): mean loss of v = 0 less the head's; not negative


def fit_lipschitz(F: Floats, y: Floats, loss: LossName, norm: float, steps: int = HEAD_STEPS) -> LipschitzFit:
    """Return the best of the first heads by Frank and Wolfe's method (1956) from v = 0, |v| <= norm.

    Any fixed rule is as private; this one needs no step size.

    Args:
        F: rows as candidates see them, (users, m, k, W).
        y: labels or targets, (users, m, 1).
        loss: of a prediction.
        norm: largest length of a head.
        steps: how many to take.
    """
    k = F.shape[2]
    V, z = np.zeros(F.shape[:1] + F.shape[2:], F.dtype), np.zeros(F.shape[:2] + F.shape[3:], F.dtype)
    zero = _average_loss(z, y, loss)
    best, gain = V, np.zeros_like(zero)
    for t in range(steps):
        slope = _find_slope(z, y, loss)
        pull = np.stack([_sum_rows(slope * F[:, :, a]) for a in range(k)], axis=1)
        length = np.sqrt(_sum_rows(pull * pull))
        corner = pull * (F.dtype.type(-norm) / np.where(length > 0, length, 1))[:, None]
        V = V + (corner - V) * F.dtype.type(2 / (t + 2))
        z = _sum_rows(np.stack([F[:, :, a] * V[:, None, a] for a in range(k)], axis=1))
        now = zero - _average_loss(z, y, loss)
        better = now > gain
        best, gain = np.where(better[:, None], V, best), np.where(better, now, gain)
    return LipschitzFit(best, gain)


def _sum_rows(values: Floats) -> Floats:
    """Return sums over axis 1, one row after the other."""
    total = values[:, 0].copy()
    for j in range(1, values.shape[1]):
        total += values[:, j]
    return total


def _average_loss(z: Floats, y: Floats, loss: LossName) -> Floats:
    """Return the mean loss over rows, (users, W).

    Args:
        z: outputs (users, m, W).
        y: labels or targets, (users, m, 1).
        loss: of an output.
    """
    if loss == "logistic":
        each = softplus(-y * z).astype(z.dtype, copy=False)
    elif loss == "hinge":
        each = np.maximum(1 - y * z, 0)
    else:
        each = np.abs(z - y)
    return _sum_rows(each) / z.dtype.type(z.shape[1])


def _find_slope(z: Floats, y: Floats, loss: LossName) -> Floats:
    """Return a subgradient of the loss at outputs z, (users, m, W).

    Its size does not matter, its direction over rows does.

    Args:
        z: outputs (users, m, W).
        y: labels or targets, (users, m, 1).
        loss: of an output.
    """
    if loss == "logistic":
        return -y * sigmoid(-y * z).astype(z.dtype, copy=False)
    return -y * (y * z < 1) if loss == "hinge" else np.sign(z - y)
