"""A user's rows about a point of its own, of mean square one: what a linear layer and heads are fitted on.

The point is the mean of the user's rows, drawn towards a public centre as if that were `pull` more rows. A centre that
is mostly noise pulls little, and a user with few rows has the centre's help. Nothing public needs to know how large
rows are: each user divides by its own.

Everything is a function of one user's rows and of public numbers, added up row by row: the same bits in any company.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from privrep.typing import Array, Singles

SMALLEST = np.float32(1e-6)  # a size: rows that are alike stay at zero


class Standard(NamedTuple):
    """Rows of several users about their points, over their sizes."""

    rows: Singles  # (users, rows, d), zero where there is no row
    point: Singles  # (users, 1, d)
    size: Singles  # (users, 1, 1)
    present: Singles  # (users, 1, 1): how many rows there are


def standardise(rows: NDArray[Any], there: NDArray[np.bool_], centre: Array, pull: float) -> Standard:
    """Return rows about their users' points, of mean square one.

    Args:
        rows: (users, rows, d).
        there: (users, rows), whether there is a row.
        centre: (d,), public.
        pull: rows that the centre counts as.
    """
    single, absent = np.array(rows, dtype=np.float32, order="C"), ~there
    single[absent] = 0
    count = there.sum(axis=1).astype(np.float32)[:, None, None]
    pulled = centre.astype(np.float32) * np.float32(pull)
    point = (single.sum(axis=1, keepdims=True) + pulled) / np.maximum(count + np.float32(pull), SMALLEST)
    single -= point
    single[absent] = 0
    squares = (single * single).sum(axis=2).sum(axis=1)[:, None, None]
    size = np.maximum(np.sqrt(squares / np.maximum(count - 1, 1)), SMALLEST)
    single /= size
    return Standard(single, point, size, count)
