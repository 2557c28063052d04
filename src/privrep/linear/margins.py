"""Margin losses of many users by many candidate representations, and heads by 0-1 loss (000, Algorithm 3).

A row x with label y = +-1 is seen by a candidate U as p = U^T x, and q = y p is all that counts: a head v has the row
right with margin rho if <q, v> > rho. A user's loss by U is the part of its rows that the best |v| <= Gamma leaves
wrong, in [0, 1] for any way of picking v.

A user's losses are the same to the last bit whoever stands beside it and however many candidates there are: candidates
come WIDTH at a time, always, one product per user; all else is elementwise, by operations that are rounded correctly.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

import numpy as np

from privrep.privacy.bounds import Losses
from privrep.privacy.protocol import StepSpec, UserBatch
from privrep.typing import Array, Floats

WIDTH = 256  # candidates that are scored at a time; the last ones of a net are filled up
_USERS = 64  # users at a time: their images by WIDTH candidates stay in a core's cache
_INSIDE = 1 + 2.0**-18  # heads tried have this much more than the margin: rows that are alike count alike
_STEPS = 8  # of the surrogate for rank 3 and more


class Net(Protocol):
    """Finitely many candidates, drawn without looking at the data."""

    @property
    def size(self) -> int: ...

    def chunk(self, number: int) -> Array:
        """(dimension, rank, WIDTH): candidates number * WIDTH and following."""
        ...


def first_half(rows: int) -> int:
    """How many rows choose the representation: the first half, and of an odd number one more."""
    return (rows + 1) // 2


@dataclass(frozen=True)
class MarginLosses:
    """Losses by every candidate of a net; of a user's first half of rows, or of all."""

    net: Net
    margin: float  # rho
    norm: float  # Gamma
    halves: bool

    @property
    def spec(self) -> StepSpec:
        return StepSpec(floats_per_user=self.net.size)

    def __call__(self, batch: UserBatch) -> dict[str, Losses]:
        X: Floats = batch.X
        y: Floats = batch.y
        m = first_half(X.shape[1]) if self.halves else X.shape[1]
        signed = X[:, :m].astype(np.float32) * signs(y[:, :m])[:, :, None]
        return {"losses": by_candidate(self.net, signed, lambda Q, users: margin_losses(Q, self.margin, self.norm))}


def signs(y: Floats) -> Floats:
    return np.where(y > 0, np.float32(1), np.float32(-1))


def by_candidate(net: Net, rows: Floats, evaluate: Callable[[Floats, slice], Floats]) -> Losses:
    """The losses (users, candidates) that `evaluate` finds in images (users, m, rank, WIDTH), for a slice of users."""
    users, m, _ = rows.shape
    losses = np.empty((users, net.size), np.float32)
    for number, start in enumerate(range(0, net.size, WIDTH)):
        C = net.chunk(number)
        flat = np.ascontiguousarray(C, dtype=np.float32).reshape(len(C), -1)
        stop = min(start + WIDTH, net.size)
        for first in range(0, users, _USERS):
            some = slice(first, first + _USERS)
            images = (rows[some] @ flat).reshape(-1, m, C.shape[1], WIDTH)
            losses[some, start:stop] = evaluate(images, some)[:, : stop - start]
    return Losses(losses)


def margin_losses(Q: Floats, margin: float, norm: float) -> Floats:
    """(users, WIDTH): the part of the rows Q = (users, m, k, WIDTH) that the best head leaves wrong.

    Exact for k = 1, where there are two heads to try, and for k = 2, up to rounding; of larger k an upper bound.
    """
    m, k = Q.shape[1:3]
    rho, gamma = Q.dtype.type(margin), Q.dtype.type(norm)
    if k == 1:
        right = np.maximum(_count(Q[:, :, 0] * gamma > rho), _count(Q[:, :, 0] * -gamma > rho))
    elif k == 2:
        right = _depth(Q[:, :, 0], Q[:, :, 1], rho, gamma)
    else:
        right = _count(_dot(Q, surrogate_heads(Q, margin, norm)) > rho)
    return 1 - right.astype(Q.dtype) / Q.dtype.type(m)


def _count(right: Floats) -> Floats:
    """Over the rows of (users, m, WIDTH)."""
    return np.add.reduce(right, axis=1, dtype=np.int32)


def _dot(Q: Floats, V: Floats) -> Floats:
    """(users, m, WIDTH): <q, v> of rows (users, m, k, WIDTH) and heads (users, k, WIDTH)."""
    total = Q[:, :, 0] * V[:, None, 0]
    for a in range(1, Q.shape[2]):
        total += Q[:, :, a] * V[:, None, a]
    return total


def _depth(a: Floats, b: Floats, rho: Floats, gamma: Floats) -> Floats:
    """How many rows q = (a, b) one head in the plane can have right; all arrays (users, m, WIDTH).

    A longest head is best. Row j is right on an open arc of the circle |v| = Gamma, and as many arcs as ever overlap do
    so just inside the start of one of them, at v = rho/|q|^2 q + sqrt(Gamma^2 - rho^2/|q|^2) q_perp/|q|.
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
        np.maximum(best, np.where(reached[:, j], _count(right), 0), out=best)
    return best


def surrogate_heads(Q: Floats, margin: float, norm: float) -> Floats:
    """(users, k, WIDTH): the best of the first few heads of a perceptron that starts at the rows' mean, |v| = Gamma."""
    rho = Q.dtype.type(margin)
    move = _sum_of(Q, np.ones(Q.shape[:2] + Q.shape[3:], bool))
    best, most = np.zeros_like(move), np.full(move[:, 0].shape, -1, np.int32)
    for _ in range(_STEPS):
        length = np.sqrt(_dot(move[:, None], move))
        V = move * (Q.dtype.type(norm) / np.where(length > 0, length, 1))
        right = _dot(Q, V) > rho
        count = _count(right)
        better = (count > most)[:, None]
        best, most = np.where(better, V, best), np.maximum(most, count)
        move = move + _sum_of(Q, ~right)
    return best


def _sum_of(Q: Floats, chosen: Floats) -> Floats:
    """(users, k, WIDTH): the sum of the chosen rows, one after the other."""
    total = Q[:, 0] * chosen[:, 0, None]
    for j in range(1, Q.shape[1]):
        total += Q[:, j] * chosen[:, j, None]
    return total


def zero_one_heads(Q: Floats) -> Floats:
    """(users, k): heads of length one, or zero, of least 0-1 loss on the rows Q = (users, m, k), q = y U^T x.

    Exact for k = 1 and 2. In the plane the middle of the widest best arc: the largest angle to the nearest row that it
    has right. Of larger k the best of a few heads of a perceptron.
    """
    users, m, k = Q.shape
    if k == 1:
        right, wrong = (Q[:, :, 0] > 0).sum(axis=1), (Q[:, :, 0] < 0).sum(axis=1)
        return np.sign(right - wrong)[:, None].astype(np.float64)
    if k > 2:
        lengths = np.sqrt((Q**2).sum(axis=2, keepdims=True))
        return surrogate_heads((Q / np.where(lengths > 0, lengths, 1))[..., None], 0.0, 1.0)[..., 0]
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
