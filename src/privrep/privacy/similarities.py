"""Gradients of similarities of a batch, every one of them clipped by itself: terms of a function of the whole batch.

Row i of a batch is a pair of vectors, x_i and t_i, that two matrices G1 and G2 project. With u_i the direction of
G1 x_i and v_j that of G2 t_j, the similarity of x_i and t_j is s_ij = <u_i, v_j>. A loss has the slope C_ij in it, and
the term (i, j) is C_ij times the gradient of s_ij:
    C_ij (v_j - s_ij u_i) x_i^T / |G1 x_i|   for G1, beside   C_ij (u_i - s_ij v_j) t_j^T / |G2 t_j|   for G2.

Formal guarantee. The term (i, j) must be a function of rows i and j alone, to the last bit: so must C_ij, and s_ij is
if an entry of a product of fixed shape depends on its row, its column and its place alone. Clipped to B, or to D B
where i = j, the terms that a user with m of b rows can change are those with a row or a column of its own: m of the
diagonal, 2 m (b - m) with the rows of others and m (m - 1) among its own. Each is at most B long, or D B, before and
after. So if that user is replaced, their sum moves by at most 2 B (m D + 2 m (b - m) + m (m - 1)), which is 2 B times
`terms_per_user`.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from typing import Any, ClassVar

import numpy as np
from numpy.typing import NDArray

from privrep.errors import InputError
from privrep.privacy.bounds import MAX_USERS
from privrep.typing import Array

WIDEST = 2048  # dimensions of embeddings; the analysis of rounding rests on it
LEAST_SINE = 1 / 16  # of two directions, for norms
EXTREME = 1e100  # a row so much longer or shorter than its projection, and a slope so steep, counts for nothing


def changed_terms(rows: int, rows_per_user: int, repeat: float = 1.0) -> float:
    """Return how many times the bound the terms add up to that a user with so many rows of a batch can change."""
    return rows_per_user * (repeat + 2 * (rows - rows_per_user)) + rows_per_user * (rows_per_user - 1)


@dataclass(frozen=True)
class Similarities:
    """The terms of a batch of b rows, those of a user side by side; see the module's guarantee.

    `x` is (b, d1), `t` is (b, d2). `left` and `right` are the directions u and v, (b, k), and `left_lengths` and
    `right_lengths` the lengths of what was projected, (b,). `slopes` is C, (b, b). A term of a row that has no
    direction (zeros, a length of zero) or a number that is not finite counts as zero. `rows_per_user` is a
    public number, and `repeat` is the public number D: norms of the diagonal are reported divided by it.

    Formal guarantee of norms and sums. v_j - s u_i may cancel, so errors are measured by |C| (|x_i|/|G1 x_i| +
    |t_j|/|G2 t_j|), and norms are reported as if the sine of the two directions were no less than LEAST_SINE. Above
    it, rounding moves its square by less than 2^-32 of itself, which a factor of 1 + 1e-9 covers. With u = 2^-53, a sum
    errs by at most 2 sqrt(2) (2b + k + 16) u / LEAST_SINE of the sum of weights times lengths: b <= 2896 and
    k <= WIDEST make it 2^-34.5. Weights times lengths are at most b^2 + (D - 1) b bounds, and at most MAX_USERS.
    """

    acute: ClassVar[bool] = False
    x: NDArray[Any]
    t: NDArray[Any]
    left: NDArray[Any]
    right: NDArray[Any]
    left_lengths: NDArray[Any]
    right_lengths: NDArray[Any]
    slopes: NDArray[Any]
    rows_per_user: int = 1
    repeat: float = 1.0

    def __post_init__(self) -> None:
        b, k = self.left.shape
        shapes = [self.right.shape, self.slopes.shape, self.left_lengths.shape, self.right_lengths.shape]
        if shapes != [(b, k), (b, b), (b,), (b,)] or len(self.x) != b or len(self.t) != b or b % self.rows_per_user:
            raise InputError(
                f"similarities take the rows of one batch, {self.rows_per_user} a user. Got other shapes instead."
            )
        if not (self.repeat >= 1 and b * (b + self.repeat - 1) <= MAX_USERS and k <= WIDEST):
            raise InputError(
                f"a batch has at most {MAX_USERS:,} similarities, in {WIDEST} dimensions, and repeats its own once or "
                f"more. Got {b} rows, {k} dimensions and {self.repeat}; use a smaller batch."
            )

    @property
    def terms_per_user(self) -> float | None:
        return changed_terms(len(self.x), self.rows_per_user, self.repeat)

    @cached_property
    def _sides(self) -> tuple[Array, Array, Array, Array]:
        """Directions, and rows over the lengths of their projections; zeros where a row has none."""
        u, x = _direction(self.left, self.x, self.left_lengths)
        v, t = _direction(self.right, self.t, self.right_lengths)
        return u, x, v, t

    @cached_property
    def _products(self) -> Array:
        u, _, v, _ = self._sides
        return u @ v.T

    def norms(self) -> Array:
        s = self._products
        uu, xx, vv, tt = (_squares(side) for side in self._sides)
        square = _sine(vv[None, :], uu[:, None], s) * xx[:, None] + _sine(uu[:, None], vv[None, :], s) * tt[None, :]
        slopes = np.abs(self.slopes.astype(np.float64, copy=False))
        norms = slopes * np.sqrt(square) * (1 + 1e-9)
        norms[~(slopes <= EXTREME)] = np.inf
        np.fill_diagonal(norms, np.diagonal(norms) / self.repeat)
        norms[(uu == 0)[:, None] | (vv == 0)[None, :]] = 0.0
        return norms.ravel()

    def weighted_sum(self, weights: Array) -> Array:
        u, x, v, t = self._sides
        each = weights.reshape(self.slopes.shape)
        slopes = np.where(each > 0, each * self.slopes, 0.0)
        slopes[(_squares(u) == 0)[:, None] | (_squares(v) == 0)[None, :]] = 0.0
        along = slopes * self._products
        first = (slopes @ v - along.sum(axis=1)[:, None] * u).T @ x
        second = (slopes.T @ u - along.sum(axis=0)[:, None] * v).T @ t
        return np.concatenate([first.ravel(), second.ravel()])


def _direction(direction: NDArray[Any], rows: NDArray[Any], lengths: NDArray[Any]) -> tuple[Array, Array]:
    """One side of all rows in float64, zeros where the direction is none or the row is too long, too short or not
    finite against its projection."""
    direction, scaled = direction.astype(np.float64), rows.astype(np.float64) / lengths.astype(np.float64)[:, None]
    unit, size = np.abs(_squares(direction) - 1) <= 1e-4, _squares(scaled)
    good = unit & (lengths > 0) & (size >= EXTREME**-2) & (size <= EXTREME**2)
    if not good.all():
        direction[~good], scaled[~good] = 0.0, 0.0
    return direction, scaled


def _sine(other: Array, own: Array, product: Array) -> Array:
    """|b - s a|^2 for a and b with these squares and s their product, no less than that of the least sine."""
    return np.maximum(other - product * product * (2 - own), LEAST_SINE**2)


def _squares(rows: Array) -> Array:
    total: Array = (rows * rows).sum(axis=1)
    return total
