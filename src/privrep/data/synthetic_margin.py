"""Populations of margin selection, drawn from the assumptions of its paper and no easier than them.

Rows of user i are x = U a + w in the unit ball, with labels y = sign <a, v_i>. Unit heads v_i are uniform on the
sphere. `a` is uniform on the sphere of radius `inside`, without the part that is nearer than `margin` to the user's
boundary. That part has |<a, v_i>| < margin. w has length sqrt(1 - inside^2) and a uniform direction orthogonal to U. So
every x has length one, and w is the part 1 - inside^2 of its square.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from privrep.data.table import UserTable
from privrep.errors import InputError
from privrep.typing import Array

_BLOCK = 1 << 22  # numbers drawn at a time


@dataclass(frozen=True)
class MarginPopulation:
    """The true model of each user; `sample` draws rows."""

    U: Array  # (d, k), orthonormal columns
    heads: Array  # (n, k), of length one
    rows: int  # of each user
    margin: float
    inside: float  # |U^T x|, with |x| = 1

    def sample(self, rng: np.random.Generator) -> UserTable:
        """Return fresh rows of every user, in single precision; labels are +-1."""
        n, d = len(self.heads), len(self.U)
        X = np.empty((n * self.rows, d), np.float32)
        y = np.empty(n * self.rows, np.float32)
        for at, some, labels in self.blocks(rng):
            X[at], y[at] = some, labels
        return UserTable(X, y, np.arange(n + 1, dtype=np.int64) * self.rows, np.arange(n))

    def errors(self, rng: np.random.Generator, models: Sequence[tuple[Array, Array]]) -> list[float]:
        """Return each model's share of fresh rows whose label is not the sign of <x, matrix v_i>.

        There are as many rows as users have, the same for all models. A model is a pair (matrix, heads), (d, k) and (n,
        k).
        """
        wrong = np.zeros(len(models))
        for at, X, y in self.blocks(rng):
            users = np.arange(at.start, at.stop) // self.rows
            for place, (matrix, heads) in enumerate(models):
                P = (X @ matrix.astype(np.float32)).astype(np.float64)
                wrong[place] += (y * (P * heads[users]).sum(axis=1) <= 0).sum()
        return [float(count) / (len(self.heads) * self.rows) for count in wrong]

    def blocks(self, rng: np.random.Generator) -> Iterator[tuple[slice, NDArray[Any], NDArray[Any]]]:
        """Yield fresh rows of whole users, a few at a time: where they stand among all, X (rows, d) and y (rows,)."""
        n, d = len(self.heads), len(self.U)
        U = self.U.astype(np.float32)
        step = max(_BLOCK // (d * self.rows), 1)
        for start in range(0, n, step):
            V = np.repeat(self.heads[start : start + step], self.rows, axis=0)
            y = 2.0 * rng.integers(0, 2, len(V)) - 1.0
            a = (y[:, None] * self._draw_beyond_margin(rng, V)).astype(np.float32)
            W = rng.standard_normal((len(V), d), dtype=np.float32)
            W -= (W @ U) @ U.T
            W *= np.float32(math.sqrt(1 - self.inside**2)) / np.sqrt((W**2).sum(axis=1, keepdims=True))
            W += a @ U.T
            yield slice(start * self.rows, start * self.rows + len(V)), W, y.astype(np.float32)

    def _draw_beyond_margin(self, rng: np.random.Generator, V: Array) -> Array:
        """Return draws, (rows, k), uniform on the sphere of radius `inside` where <a, v> >= margin, by rejection.

        `V` is the head of each row's user, (rows, k).
        """
        a = np.empty_like(V)
        left = np.arange(len(V))
        while len(left):
            z = rng.standard_normal((len(left), V.shape[1]))
            z *= self.inside / np.sqrt((z**2).sum(axis=1, keepdims=True))
            z *= np.sign((z * V[left]).sum(axis=1, keepdims=True))
            good = (z * V[left]).sum(axis=1) >= self.margin
            a[left[good]] = z[good]
            left = left[~good]
        return a


def make_margin_population(
    rng: np.random.Generator,
    users: int,
    features: int,
    rank: int = 2,
    rows: int = 10,
    *,
    margin: float = 0.3,
    inside: float = math.sqrt(0.5),
) -> MarginPopulation:
    """Draw a population with margins. By default half of |x|^2 is outside the subspace that decides.

    Args:
        rng: source of all draws.
        users: number of users, n.
        features: number of features, d.
        rank: columns of U, k.
        rows: of each user.
        margin: least |<a, v_i>|.
        inside: |U^T x|, with |x| = 1.
    """
    if not 1 <= rank < features:
        raise InputError(f"rank must lie between 1 and the number of features less one. Got {rank} instead.")
    if not 0 < margin < inside < 1:
        raise InputError(f"0 < margin < inside < 1 must hold. Got margin {margin} and inside {inside} instead.")
    U, _ = np.linalg.qr(rng.standard_normal((features, rank)))
    V = rng.standard_normal((users, rank))
    V /= np.sqrt((V**2).sum(axis=1, keepdims=True))
    return MarginPopulation(U, V, rows, margin, inside)
