"""Weights of rows: a weight is a number of copies of its row, inside its user.

A whole weight is that many copies, and 0 leaves the row out. Other weights are resampled systematically: going through
a user's rows in their order, a row gets as many copies as whole numbers lie between the sums of weights before and
after it, each sum rounded at a half. So a row has its weight in copies, rounded down or up, and a user has as many rows
as its weights sum to, rounded.

Formal guarantee: how many copies a user's rows get depends on that user's own weights, in their order, and on nothing
else: no other user, no generator of random numbers. Copied rows are rows of the user like any others. Whatever is made
of them is clipped as before, so weights cost no privacy and no sum changes its sensitivity. A user whose weights sum
to less than a half has no rows. It stays a user, so that the number of users does not depend on weights.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from privrep.errors import InputError
from privrep.typing import Array, Floats, Integers

if TYPE_CHECKING:
    from privrep.data.readers import TableSource

MOST_COPIES = 1000  # of one row
_BITS = 20  # weights are rounded to multiples of 2^-20: their sums are then exact, whatever rows are summed before


def check_weights(weights: Any, where: str) -> None:
    """Raise InputError unless weights (rows,) are numbers from 0 to MOST_COPIES; `where` says whose they are."""
    with np.errstate(invalid="ignore"):
        kinds = {
            "missing": np.isnan(weights),
            "negative": weights < 0,
            f"above {MOST_COPIES:,}": weights > MOST_COPIES,
        }
    found = [f"{int(bad.sum()):,} {words}" for words, bad in kinds.items() if bad.any()]
    if found:
        raise InputError(
            f"{where} are numbers of copies of a row, from 0 to {MOST_COPIES:,}; {' and '.join(found)}. Fill them in, "
            "or divide all by one number."
        )


def copies_of(weights: Array, begins: Integers, before: int = 0) -> tuple[Integers, int]:
    """Return how many copies each row gets, (rows,), and what to pass as `before` for the rows that follow.

    Args:
        weights: of rows that lie by user, (rows,).
        begins: the rows at which a user begins. Rows before the first are of a user who began earlier.
        before: what the call before returned, whose last user these rows continue; 0 for the first rows.
    """
    if not len(weights):
        return np.zeros(0, np.int64), before
    units = np.rint(np.clip(weights, 0, MOST_COPIES) * (1 << _BITS)).astype(np.int64)
    total = np.concatenate([[0], np.cumsum(units)])
    user = np.searchsorted(begins, np.arange(len(units)), side="right")
    start = np.concatenate([[-before], total[begins]])[user]
    half = 1 << (_BITS - 1)
    copies = ((total[1:] - start + half) >> _BITS) - ((total[:-1] - start + half) >> _BITS)
    return copies, int(total[-1] - start[-1])


def row_copies(
    source: TableSource, columns: Sequence[Floats], begins: Integers, before: int
) -> tuple[Integers | None, int]:
    """Return how often each row of a batch is there, (rows,), and what to pass as `before` for the batch that follows.

    None stands for once each.

    Args:
        source: says which rows are left out, and which column holds weights.
        columns: of the batch, but the user.
        begins, before: as `copies_of` has them.
    """
    weights = row_weights(source, columns)
    return (None, before) if weights is None else copies_of(weights, begins, before)


def row_weights(source: TableSource, columns: Sequence[Floats]) -> Array | None:
    """Return the weights of rows of a batch, (rows,), 0 for those that are left out; None where all are 1."""
    q, p = len(source.targets), len(source.numeric_names)
    kept = source.missing.keeps(columns[q : q + p], len(columns[0]))
    for target in columns[:q]:
        kept &= ~np.isnan(target)
    if source.weight is None:
        return None if kept.all() else kept.astype(np.float64)
    return np.where(kept, columns[-1], 0.0)


def join_weights(parts: Sequence[Array | None], rows: Sequence[int]) -> Array | None:
    """Return the weights of the rows of all batches, of so many rows each; None where all are 1."""
    if all(part is None for part in parts):
        return None
    return np.concatenate([np.ones(n) if part is None else part for part, n in zip(parts, rows, strict=True)])
