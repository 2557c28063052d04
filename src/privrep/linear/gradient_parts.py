"""Parts of the gradient around a prior mean, for numbers and for labels: by slopes, and by the level.

Each user's numbers are a function of its own rows, to the bit: products are stacked, one per user (see
`local.least_squares`).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

import numpy as np

from privrep.data.sparse import SparseRows
from privrep.linear.steps import CELLS, WIDE_CELLS, WIDE_LOWEST, find_octaves, pull_rows
from privrep.local.least_squares import centre_rows
from privrep.local.prior import PriorMean
from privrep.local.transform import FeatureTransform
from privrep.privacy.bounds import Contributions
from privrep.privacy.columns import SparseColumns
from privrep.privacy.contributions import Concatenated, Counts, Vectors
from privrep.privacy.moments import RowMoments
from privrep.typing import Array, Floats

COMMON_CELLS = WIDE_CELLS + CELLS  # of the norms of a gradient, and of their ratios to curvatures
Part = tuple[Contributions, Array, Array]
"""Gradients with their curvatures behind, norms of the gradients, and mean eigenvalues of the curvatures."""


def join_parts(parts: Mapping[str, Part]) -> dict[str, Contributions]:
    """Return the gradients of a prior mean and, as `sizes`, histograms of their norms and of their ratios to the
    curvatures."""
    cells = []
    for i, (_, norm, bend) in enumerate(parts.values()):
        ratio = np.divide(norm, bend, out=np.zeros_like(norm), where=bend > 0)
        pair = np.stack([find_octaves(norm, WIDE_LOWEST, WIDE_CELLS), find_octaves(ratio)], axis=1)
        cells.append(np.where(pair < 0, -1, pair + np.array([0, WIDE_CELLS]) + i * COMMON_CELLS))
    counts = Counts(np.concatenate(cells, axis=1), COMMON_CELLS * len(parts))
    return {key: part[0] for key, part in parts.items()} | {"sizes": counts}


def make_within_part(
    X: Floats | SparseRows,
    transform: FeatureTransform,
    pull: Array,
    scale: Array,
    intercept: bool,
    full: bool,
    tail: float,
    beside: tuple[Array, Array, Array] | None = None,
) -> Part:
    """Return the gradient by common slopes.

    Args:
        X: rows (users, m, d).
        transform: public coordinates of the rows.
        pull: what each row pulls with, (users, m, q); with an intercept it sums to zero over a user's rows.
        scale: weight of a user's rows in the curvature, (users,).
        intercept: whether rows count around their user's mean.
        full: whether the curvature is a matrix.
        tail: factor of the curvature, which stands behind the gradient.
        beside: of dense rows, one more row of each user; None: no such row. It has three arrays: the row, (users, 1,
            d); its pull, (users, 1, q); and the root of its weight over the weight of the others, (users,).
    """
    users, m, _ = X.shape
    gradient = pull_rows(X, transform, np.ascontiguousarray(pull.transpose(2, 1, 0)))
    if isinstance(gradient, SparseColumns) or isinstance(X, SparseRows):
        assert isinstance(gradient, SparseColumns)
        curvature = scale[:, None] * float(max(m - intercept, 0))
        return replace(gradient, tail=curvature * tail), gradient.measure_columns(), curvature[:, 0]
    flat = gradient.reshape(users, -1).astype(np.float64, copy=False)
    rows = transform.rows(centre_rows(X) if intercept else X)
    if beside is not None:
        row = transform.rows(beside[0])
        flat = flat + (beside[1].transpose(0, 2, 1) @ row).reshape(users, -1)
        rows = np.concatenate([rows.astype(np.float64, copy=False), row * beside[2][:, None, None]], axis=1)
    return _append_curvature(flat, rows, scale, full, tail)


def make_between_part(
    X: Floats | SparseRows, mean: PriorMean, pull: Array, scale: Array, typical_rows: float, full: bool, tail: float
) -> Part:
    """Return the gradient by the level, and by what users' means say of it.

    Args:
        X: rows (users, m, d).
        mean: with the coordinates of users' mean rows.
        pull: what users' levels pull with, (users, 1, q).
        scale: weight of a user in the curvature, (users,).
        typical_rows: number of rows at which coordinates have unit variance.
        full: whether the curvature is a matrix.
        tail: factor of the curvature, which stands behind the gradient.
    """
    users, m, _ = X.shape
    rows = np.ones((users, 1, 1))
    if mean.axes.shape[1]:
        p = (mean.user_means(X) - mean.centre) @ (mean.axes * mean.unit_factors(m, typical_rows))
        rows = np.concatenate([rows, p], axis=2)
    flat = np.ascontiguousarray(pull.transpose(0, 2, 1) * rows).reshape(users, -1)
    return _append_curvature(flat, rows, scale, full, tail)


def _append_curvature(gradient: Array, rows: Floats, scale: Array, full: bool, tail: float) -> Part:
    """Return gradients with their curvatures behind, norms of the gradients, and mean eigenvalues of the curvatures.

    A curvature is scale times rows^T rows. What slopes along the factor take from it is taken evenly from all
    directions.

    Args:
        gradient: (users, numbers).
        rows: in the gradient's coordinates, (users, m, p).
        scale: weight of a user's rows, (users,).
        full: whether the curvature is a matrix, not its mean eigenvalue.
        tail: factor of the curvature.
    """
    users, _, p = rows.shape
    norms = np.sqrt((gradient**2).sum(axis=1))
    squares = rows.astype(np.float64, copy=False).reshape(users, -1) ** 2
    bend = scale * squares.sum(axis=1) / p
    if full:
        return Concatenated((Vectors(gradient), RowMoments(rows, tail * scale))), norms, bend
    return Vectors(np.concatenate([gradient, tail * bend[:, None]], axis=1)), norms, bend
