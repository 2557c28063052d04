"""Weights of rows: how much a row counts beside the other rows of its user.

A user's weights are divided by the largest of them, and are then the parts of rows that stay: 1 stays, 0 is left out.
Between these, rows are thinned systematically, in the user's order of rows. A row stays if the sum of parts, rounded at
a half, grows by it. So a user has as many rows as its parts sum to, rounded.

No row is ever there twice. Copies would be taken for more observations, and leaving one of them out leaves its twin. So
heads would be too sure, and noise would look smaller than it is. Nor can weights make one user count for more than
another. Every user is clipped to the same bound, and nobody sees which weights are large among all users.

Formal guarantee:
* The rows that a user keeps depend on that user's own weights, in their order. They depend on no other user and on no
  generator of random numbers.
* Numbers made of the rows are clipped as before. So weights cost no privacy and no sum changes its sensitivity.
* A user whose weights are all 0 has no rows. It stays a user, so that the number of users does not depend on weights.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from privrep.errors import InputError
from privrep.typing import Array, Floats, Integers

if TYPE_CHECKING:
    from privrep.data.readers import TableSource

_BITS = 20  # parts are rounded to multiples of 2^-20: their sums are then exact, whatever rows are summed before


def check_weights(weights: Any, where: str) -> None:
    """Raise InputError unless weights (rows,) are finite and at least 0; `where` says whose they are."""
    with np.errstate(invalid="ignore"):
        kinds = {"missing": np.isnan(weights), "negative": weights < 0, "infinite": weights == np.inf}
    found = [f"{int(bad.sum()):,} {words}" for words, bad in kinds.items() if bad.any()]
    if found:
        raise InputError(
            f"{where} must be numbers from 0; {' and '.join(found)}. Fill them in, or leave those rows out."
        )


def thin_rows(weights: Array, begins: Integers) -> NDArray[np.bool_]:
    """Return a mask (rows,) of the rows that stay.

    Args:
        weights: of rows that lie by user, (rows,).
        begins: the rows at which a user begins, (users,), the first of them 0.
    """
    if not len(weights):
        return np.zeros(0, bool)
    user = np.searchsorted(begins, np.arange(len(weights)), side="right") - 1
    largest = np.zeros(len(begins))
    np.maximum.at(largest, user, weights)
    parts = np.divide(weights, largest[user], out=np.zeros(len(weights)), where=largest[user] > 0)
    total = np.concatenate([[0], np.cumsum(np.rint(parts * (1 << _BITS)).astype(np.int64))])
    start, half = total[begins][user], 1 << (_BITS - 1)
    stays: NDArray[np.bool_] = (total[1:] - start + half) >> _BITS > (total[:-1] - start + half) >> _BITS
    return stays


def make_row_weights(source: TableSource, columns: Sequence[Floats]) -> Array | None:
    """Return the weights of rows of a batch, (rows,), 0 for rows that are left out; None where all are 1.

    Args:
        source: the file that the batch is from.
        columns: of the batch but the user, (rows,) each.
    """
    q, p = len(source.targets), len(source.numeric_names)
    kept = source.missing.keeps(columns[q : q + p], len(columns[0]))
    for target in columns[:q]:
        kept &= ~np.isnan(target)
    if source.weight is None:
        return None if kept.all() else kept.astype(np.float64)
    return np.where(kept, columns[-1], 0.0)


def join_weights(parts: Sequence[Array | None], rows: Sequence[int]) -> Array | None:
    """Return the weights of the rows of all batches, (rows,), `rows` of them in each; None where all are 1."""
    if all(part is None for part in parts):
        return None
    return np.concatenate([np.ones(n) if part is None else part for part, n in zip(parts, rows, strict=True)])
