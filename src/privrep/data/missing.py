"""Missing values: what a table does with them, and how they are filled, inside each user.

A missing value is NaN once rows are numbers. It is filled by its user's own mean of the column. A user without any
value in a column gets a public one (see `fill_missing`). Rows without a target are left out.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal, get_args

import numpy as np
from numpy.typing import NDArray
from scipy import sparse

from privrep.data.sparse import SparseRows
from privrep.errors import InputError
from privrep.typing import Array, Floats

How = Literal["impute", "drop", "refuse"]
HOW: tuple[str, ...] = get_args(How)


@dataclass(frozen=True)
class Missing:
    """Treatment of missing values of features: a public choice, the same for all users.

    impute  they are filled.
    drop    rows that miss one are left out.
    refuse  a table that misses one is an error.

    Columns with an indicator are filled whatever `how` says, and have one more column beside them: 1 where the value
    was missing, else 0. The indicators come after all columns of numbers, in the order of `indicators`.
    """

    how: str = "impute"
    indicators: tuple[int, ...] = ()  # positions among the columns of numbers

    def __post_init__(self) -> None:
        if self.how not in HOW:
            raise InputError(f"missing must be one of {', '.join(HOW)}. Got {self.how!r} instead.")
        object.__setattr__(self, "indicators", tuple(sorted(self.indicators)))  # frozen; this is its construction
        if len(set(self.indicators)) < len(self.indicators):
            raise InputError("a column has one indicator of missing values; name it once.")

    def others(self, columns: int) -> list[int]:
        """Return the positions of the columns, of this many, that have no indicator."""
        return [column for column in range(columns) if column not in self.indicators]

    def keeps(self, X: Any, rows: int) -> NDArray[np.bool_]:
        """Return a mask (rows,) of the rows that stay, from the columns of numbers.

        `X` is an array (rows, p), or a list of columns.
        """
        kept = np.ones(rows, dtype=bool)
        if self.how == "drop":
            columns = X.T if isinstance(X, np.ndarray) else X
            for column in self.others(len(columns)):
                kept &= ~np.isnan(columns[column])
        return kept

    def with_indicators(self, X: Floats) -> Floats:
        """Return columns of numbers (rows, p) with the indicators after them."""
        if not self.indicators:
            return X
        return np.concatenate([X, np.isnan(X[:, list(self.indicators)]).astype(X.dtype)], axis=1)


IMPUTE, REFUSE = Missing(), Missing("refuse")


@dataclass
class MissingCounts:
    """Counts of missing values in the rows seen so far. For the eyes of whoever holds the rows: not private."""

    rows: int = 0
    without_target: int = 0  # rows that are left out for it
    dropped: int = 0  # rows with a target that are left out for a feature
    values: Counter[str] = field(default_factory=Counter)  # of features, by column, in rows with a target
    unmarked: Counter[str] = field(default_factory=Counter)  # the same, of columns without an indicator

    def add(self, targets: Sequence[Floats], numbers: Mapping[str, Floats], missing: Missing) -> None:
        """Count rows.

        Args:
            targets: columns of targets, (rows,) each.
            numbers: columns of numbers, (rows,) each, by name.
            missing: what is done about rows that miss a number.
        """
        columns = list(numbers.values())
        rows = len((*targets, *columns)[0]) if targets or columns else 0
        there = np.ones(rows, dtype=bool)
        for target in targets:
            there &= ~np.isnan(target)
        self.rows += rows
        self.without_target += rows - int(there.sum())
        self.dropped += int((there & ~missing.keeps(columns, rows)).sum())
        with np.errstate(all="ignore"):
            some = [j for j, column in enumerate(columns) if column.dtype.kind == "f" and np.isnan(column.sum())]
        for name, j in ((list(numbers)[j], j) for j in some):
            count = int((np.isnan(columns[j]) & there).sum())
            self.values[name] += count
            self.unmarked[name] += 0 if j in missing.indicators else count
        self.values, self.unmarked = +self.values, +self.unmarked

    def check(self, missing: Missing, where: str) -> None:
        """Raise InputError if values are missing and are to be refused; `where` names the table."""
        if missing.how == "refuse" and self.unmarked:
            raise InputError(
                f"{where} misses values of {_list_counts(self.unmarked)}, and missing values are refused; fill them "
                "in, or choose impute or drop."
            )

    def words(self, filled_by: str = "inside each user") -> list[str]:
        """Return what was done about missing values, a sentence each; `filled_by` says how they were filled."""
        said = []
        if self.without_target:
            said.append(f"{_write_rows(self.without_target)} of {self.rows:,} left out: no target")
        filled = self.values
        if self.dropped:
            said.append(f"{_write_rows(self.dropped)} left out for missing values of {_list_counts(self.unmarked)}")
            filled = self.values - self.unmarked
        if filled:
            said.append(f"missing values filled, {filled_by}: {_list_counts(filled)}")
        return said


def _list_counts(counts: Counter[str]) -> str:
    """Return the columns with most missing values, with their counts, as a text."""
    most = counts.most_common(8)
    more = len(counts) - len(most)
    return ", ".join(f"{name} ({count:,})" for name, count in most) + (f" and {more} more columns" if more else "")


def _write_rows(count: int) -> str:
    """Return "1 row" or "2 rows"."""
    return f"{count:,} row{'' if count == 1 else 's'}"


def make_indicator_names(names: Sequence[str], indicators: Sequence[int]) -> tuple[str, ...]:
    """Return the names of indicators of these columns; positions stand for columns without names."""
    return tuple(f"{names[place] if names else f'column {place}'} is missing" for place in indicators)


def fill_missing(X: Any, fill: float | Array) -> Any:
    """Return rows of users in which no value is missing.

    Formal guarantee:
    * The rows of a user are a function of that user's rows and of `fill`, to the last bit. Sums are stacked products,
      one per user (see `local.least_squares`), and sums of sparse rows go entry by entry.
    * So are numbers computed from them. A release of them costs what it would cost without missing values.

    Args:
        X: (users, m, d), or `SparseRows`, in which a value that is stored as NaN is missing.
        fill: the value of a column for a user who has no value in it, a number or (d,). NaN leaves such a column as it
            is, but for sparse rows, where it is 0 then.
    """
    if isinstance(X, SparseRows):
        return _fill_sparse(X, fill)
    missing = np.isnan(X)
    some = np.flatnonzero(missing.any(axis=(1, 2)))
    if not len(some):
        return X
    absent, rows = missing[some], X[some]
    means = np.where(absent.all(axis=1), fill, _average_there(rows, absent))
    filled = X.copy()
    filled[some] = np.where(absent, means[:, None, :], rows)
    return filled


def compute_own_means(X: Any) -> Array:
    """Return users' own means of the columns, (users, d), of rows (users, m, d); NaN where a user has no value."""
    rows = X.dense() if isinstance(X, SparseRows) else X
    absent = np.isnan(rows)
    return np.where(absent.all(axis=1), np.nan, _average_there(rows, absent))


def _average_there(rows: Floats, absent: NDArray[np.bool_]) -> Array:
    """Return each user's mean of the values that are there, (users, d); `absent` is a mask of `rows`, (users, m, d)."""
    m = rows.shape[1]
    totals: Array = (np.ones((1, m)) @ np.where(absent, 0.0, rows.astype(np.float64)))[:, 0]
    return totals / np.maximum(m - absent.sum(axis=1), 1)


def _fill_sparse(X: SparseRows, fill: float | Array) -> SparseRows:
    """Return sparse rows (users, m, d) with stored NaN filled, as in `fill_missing`."""
    matrix, (_, size, d) = X.matrix, X.shape
    missing = np.isnan(matrix.data)
    if not missing.any():
        return X
    rows = np.repeat(np.arange(matrix.shape[0]), np.diff(matrix.indptr))
    slot = (rows // size) * d + matrix.indices  # the user and the column of each entry
    slots, place = np.unique(slot[missing], return_inverse=True)
    nearest = np.minimum(np.searchsorted(slots, slot), len(slots) - 1)
    there = ~missing & (slots[nearest] == slot)
    totals = np.bincount(nearest[there], matrix.data[there].astype(np.float64), len(slots))
    counts = size - np.bincount(place, minlength=len(slots))
    public = np.nan_to_num(np.broadcast_to(fill, d))[slots % d]
    values = matrix.data.copy()
    values[missing] = np.where(counts > 0, totals / np.maximum(counts, 1), public)[place]
    return SparseRows(sparse.csr_array((values, matrix.indices, matrix.indptr), shape=matrix.shape), size)
