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

from privrep.heads.margin import count_right, dot_rows, first_half, signs, surrogate_heads
from privrep.privacy.bounds import Losses
from privrep.privacy.protocol import StepSpec, UserBatch
from privrep.typing import Array, Floats

WIDTH = 256  # candidates that are scored at a time; the last ones of a net are filled up
_USERS = 64  # users at a time: their images by WIDTH candidates stay in a core's cache
_INSIDE = 1 + 2.0**-18  # heads tried have this much more than the margin: rows that are alike count alike


class Net(Protocol):
    """Finitely many candidates, drawn without looking at the data."""

    @property
    def size(self) -> int: ...

    def chunk(self, number: int) -> Array:
        """(dimension, rank, WIDTH): candidates number * WIDTH and following."""
        ...


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
        right = np.maximum(count_right(Q[:, :, 0] * gamma > rho), count_right(Q[:, :, 0] * -gamma > rho))
    elif k == 2:
        right = _depth(Q[:, :, 0], Q[:, :, 1], rho, gamma)
    else:
        right = count_right(dot_rows(Q, surrogate_heads(Q, margin, norm)) > rho)
    return 1 - right.astype(Q.dtype) / Q.dtype.type(m)


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
        np.maximum(best, np.where(reached[:, j], count_right(right), 0), out=best)
    return best
