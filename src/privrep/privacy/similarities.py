"""Gradients of similarities of a batch, every one of them clipped by itself: terms of a function of the whole batch.

Row i of a batch is a pair of vectors, x_i and t_i, that two matrices G1 and G2 project. Let u_i be the direction of G1
x_i and v_j that of G2 t_j. The similarity of x_i and t_j is s_ij = <u_i, v_j>. A loss has the slope C_ij in it, and the
term (i, j) is C_ij times the gradient of s_ij:
    C_ij (v_j - s_ij u_i) x_i^T / |G1 x_i|   for G1, beside   C_ij (u_i - s_ij v_j) t_j^T / |G2 t_j|   for G2.

Formal guarantee. Let B be the bound, D the factor of the diagonal, b the rows of the batch and m the rows of a user.
* The term (i, j) must be a function of rows i and j alone, to the last bit. So must C_ij. s_ij is, if an entry of a
  product of fixed shape depends on its row, its column and its place alone.
* Terms are clipped to B, or to D B where i = j.
* The terms that a user can change have a row or a column of its own. These are m of the diagonal, 2 m (b - m) with the
  rows of others, and m (m - 1) among its own.
* Each is at most B long, or D B on the diagonal, before and after.
* So if that user is replaced, the sum of all terms moves by at most 2 B (m D + 2 m (b - m) + m (m - 1)). This is 2 B
  times `terms_per_user`.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from typing import Any, ClassVar

import numpy as np
from numpy.typing import NDArray

from privrep.errors import InputError
from privrep.privacy.bounds import MAX_TERMS
from privrep.privacy.grid import round_total
from privrep.typing import Array, Integers

WIDEST = 2048  # dimensions of embeddings; the analysis of rounding rests on it
LEAST_SINE = 1 / 16  # of two directions, for norms
EXTREME = 1e100  # a row so much longer or shorter than its projection, and a slope so steep, counts for nothing


def count_changed_terms(rows: int, rows_per_user: int, repeat: float = 1.0) -> float:
    """Return how many times the bound the terms add up to that a user can change.

    Args:
        rows: of the batch.
        rows_per_user: of the user.
        repeat: D of the module's guarantee.
    """
    return rows_per_user * (repeat + 2 * (rows - rows_per_user)) + rows_per_user * (rows_per_user - 1)


@dataclass(frozen=True)
class Similarities:
    """Terms of a batch of b rows, a user's rows side by side; see the module's guarantee.

    x, t              rows, (b, d1) and (b, d2).
    left, right       the directions u and v, (b, k).
    left_lengths      lengths |G1 x_i| of what was projected, (b,); `right_lengths` likewise.
    slopes            C, (b, b).
    rows_per_user     a public number.
    repeat            the public number D: norms of the diagonal are reported divided by it.

    A term of a row that has no direction (zeros, a length of zero) or a number that is not finite counts as zero.

    Formal guarantee of norms and sums. v_j - s u_i may cancel, so errors are measured by |C| (|x_i|/|G1 x_i| +
    |t_j|/|G2 t_j|). Let u = 2^-53.
    * Norms are reported as if the sine of the two directions were no less than LEAST_SINE. Above it, rounding moves its
      square by less than 2^-32 of itself. A factor of 1 + 1e-9 covers that.
    * A sum errs by at most 2 sqrt(2) (2b + k + 16) u / LEAST_SINE of the sum of weights times lengths. b <= 2896 and k
      <= WIDEST make it 2^-34.5.
    * Rows over lengths are between 1/EXTREME and EXTREME, so their squares neither under- nor overflow. Slopes are at
      most EXTREME. Terms beyond count as zero.
    * Weights times lengths are at most b^2 + (D - 1) b bounds, and at most MAX_TERMS.
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
        if not (self.repeat >= 1 and b * (b + self.repeat - 1) <= MAX_TERMS and k <= WIDEST):
            raise InputError(
                f"a batch has at most {MAX_TERMS:,} similarities, in {WIDEST} dimensions, and repeats its own once or "
                f"more. Got {b} rows, {k} dimensions and {self.repeat}; use a smaller batch."
            )

    @property
    def terms_per_user(self) -> float | None:
        return count_changed_terms(len(self.x), self.rows_per_user, self.repeat)

    @cached_property
    def _scaled_sides(self) -> tuple[Array, Array, Array, Array]:
        """Return u, (b, k), and x over the lengths of its projections, (b, d1); v and t likewise.

        All are zeros where a row has no direction.
        """
        u, x = _scale_side(self.left, self.x, self.left_lengths)
        v, t = _scale_side(self.right, self.t, self.right_lengths)
        return u, x, v, t

    @cached_property
    def _products(self) -> Array:
        """Return s_ij, (b, b)."""
        u, _, v, _ = self._scaled_sides
        return u @ v.T

    def norms(self) -> Array:
        s = self._products
        uu, xx, vv, tt = (_sum_squares(side) for side in self._scaled_sides)
        square = (
            _square_sine(vv[None, :], uu[:, None], s) * xx[:, None]
            + _square_sine(uu[:, None], vv[None, :], s) * tt[None, :]
        )
        slopes = np.abs(self.slopes.astype(np.float64, copy=False))
        norms = slopes * np.sqrt(square) * (1 + 1e-9)
        norms[~(slopes <= EXTREME)] = np.inf
        np.fill_diagonal(norms, np.diagonal(norms) / self.repeat)
        norms[(uu == 0)[:, None] | (vv == 0)[None, :]] = 0.0
        return norms.ravel()

    def roundings(self, norm: float, step: float) -> Array | float:
        return 0.0

    def grid_sum(self, weights: Array, step: float) -> Integers:
        u, x, v, t = self._scaled_sides
        each = weights.reshape(self.slopes.shape)
        slopes = np.where(each > 0, each * self.slopes, 0.0)
        slopes[(_sum_squares(u) == 0)[:, None] | (_sum_squares(v) == 0)[None, :]] = 0.0
        along = slopes * self._products
        first = (slopes @ v - along.sum(axis=1)[:, None] * u).T @ x
        second = (slopes.T @ u - along.sum(axis=0)[:, None] * v).T @ t
        return round_total(np.concatenate([first.ravel(), second.ravel()]), step)


def _scale_side(direction: NDArray[Any], rows: NDArray[Any], lengths: NDArray[Any]) -> tuple[Array, Array]:
    """Return directions and rows of one side in float64, the rows over the lengths of their projections.

    Both are zeros where the direction is none, or the row is too long, too short or not finite against its projection.

    Args:
        direction: (b, k).
        rows: (b, d).
        lengths: (b,).
    """
    direction, scaled = direction.astype(np.float64), rows.astype(np.float64) / lengths.astype(np.float64)[:, None]
    unit, size = np.abs(_sum_squares(direction) - 1) <= 1e-4, _sum_squares(scaled)
    good = unit & (lengths > 0) & (size >= EXTREME**-2) & (size <= EXTREME**2)
    if not good.all():
        direction[~good], scaled[~good] = 0.0, 0.0
    return direction, scaled


def _square_sine(other: Array, own: Array, product: Array) -> Array:
    """Return |b - s a|^2, (b, b), for a and b with these squares and s their product, at least LEAST_SINE^2."""
    return np.maximum(other - product * product * (2 - own), LEAST_SINE**2)


def _sum_squares(rows: Array) -> Array:
    """Return the sum of squares of each row, (rows,), of an array (rows, columns)."""
    total: Array = (rows * rows).sum(axis=1)
    return total
