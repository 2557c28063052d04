"""Splitting every user's own rows, as one does to measure personal models on rows they were not fitted on."""

from __future__ import annotations

import numpy as np

from privrep.data.table import UserTable
from privrep.errors import InputError


def split_within_users(table: UserTable, share: float, rng: np.random.Generator) -> tuple[UserTable, UserTable]:
    """A random `share` of each user's rows, and the rest, as two tables of the same users in the same order.

    The first part gets round(share * rows) of a user's rows, at least one where the user has any; either part may leave
    a user without rows. Rows keep their order within a user.
    """
    if not 0 < share < 1:
        raise InputError(f"share must lie strictly between 0 and 1. Got {share} instead.")
    sizes = table.sizes
    owner = np.repeat(np.arange(table.n_users), sizes)
    order = np.lexsort((rng.random(table.n_rows), owner))  # each user's rows shuffled, users in place
    place = np.empty(table.n_rows, dtype=np.int64)
    place[order] = np.arange(table.n_rows) - np.repeat(table.offsets[:-1], sizes)
    taken = np.maximum(np.rint(share * sizes).astype(np.int64), sizes > 0)
    first = place < np.repeat(taken, sizes)
    return _rows(table, first, taken), _rows(table, ~first, sizes - taken)


def _rows(table: UserTable, chosen: np.ndarray, sizes: np.ndarray) -> UserTable:
    offsets = np.concatenate([[0], np.cumsum(sizes)]).astype(np.int64)
    return UserTable(table.X[chosen], table.y[chosen], offsets, table.ids)
