"""A splitter for scikit-learn's tools that leaves each user's rows on both sides."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, ClassVar

import numpy as np
from numpy.typing import NDArray
from sklearn.model_selection import BaseShuffleSplit
from sklearn.utils import check_random_state

from privrep.data.table import factorize, plain
from privrep.errors import InputError

Places = NDArray[np.int64]


class WithinUserSplit(BaseShuffleSplit):
    """Split each user's rows: a part is held out, and the user has rows on both sides.

    A personal model is measured on new rows of the users it was fitted on, which a split by rows or by users does not
    do. Give it to scikit-learn's tools as `cv`, and the users as groups. Fits of several splits are fits of the same
    users: their budgets add up.

    Parameters
    ----------
    n_splits : int
        How many times rows are split, each time anew.
    test_size : float
        The part of each user's rows that is held out: at least one row, and one stays. A user with one row is in
        training alone.
    random_state : int, numpy random state, optional
        What the splits are drawn from: an integer draws the same ones each time. They are no part of a promise.
    """

    __metadata_request__split: ClassVar[dict[str, bool]] = {"groups": True}  # asked for where scikit-learn routes it

    def __init__(self, n_splits: int = 5, *, test_size: float = 0.2, random_state: Any = None) -> None:
        self.n_splits = n_splits
        self.test_size = test_size
        self.random_state = random_state
        self.train_size = None

    def split(self, X: Any, y: Any = None, groups: Any = None) -> Iterator[tuple[Places, Places]]:
        """Yield the places of rows for training and for testing, sorted.

        Args:
            X: rows, of which the number counts; not looked at.
            y: not looked at.
            groups: the user of each row.
        """
        if groups is None:
            raise InputError("WithinUserSplit needs groups: the user of each row.")
        if not 0 < self.test_size < 1:
            raise InputError(f"test_size is a part of a user's rows, between 0 and 1. Got {self.test_size} instead.")
        if self.n_splits < 1:
            raise InputError(f"n_splits must be at least 1. Got {self.n_splits} instead.")
        _, users = factorize(plain(groups))
        drawn = check_random_state(self.random_state)
        for _ in range(self.n_splits):
            held = _hold_out(users, float(self.test_size), drawn)
            yield np.flatnonzero(~held), np.flatnonzero(held)


def _hold_out(users: NDArray[Any], part: float, drawn: np.random.RandomState) -> NDArray[np.bool_]:
    """Return a mask of rows to hold out, (rows,).

    Args:
        users: the number of each row's user, (rows,).
        part: of each user's rows.
        drawn: randomness.
    """
    order = np.lexsort((drawn.random_sample(len(users)), users))
    sizes = np.bincount(users)
    starts = np.repeat(np.cumsum(sizes) - sizes, sizes)
    held = np.clip(np.floor(sizes * part + 0.5), 1, np.maximum(sizes - 1, 0))
    mask = np.zeros(len(users), dtype=bool)
    mask[order] = np.arange(len(users)) - starts < np.repeat(held, sizes)
    return mask
