"""A target that was left among the features: found by its name or its values, and refused before anything is spent.

A model that sees its target learns nothing else, and what it spent on that is spent. Columns of a frame are refused.
Columns of an array have no names by which to tell a mistake from a test, so that a warning is all there is. Both depend
on the rows. They are for the eyes of whoever holds them: nothing was charged, written or released yet. That a fit was
refused is no release either: docs/pitfalls.md says so.
"""

from __future__ import annotations

import warnings
from collections.abc import Sequence
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from numpy.typing import NDArray
from scipy import sparse

from privrep.data.frames import FrameRows, read_column_names
from privrep.errors import ColumnNote, InputError
from privrep.typing import Array

FIRST = 64  # rows that columns are compared by before all of their rows are


def refuse_target_names(names: Sequence[str], y: Any) -> None:
    """Raise InputError if a column of X has the name of a series or a column of y.

    Args:
        names: of the columns of X.
        y: targets as they were given.
    """
    for name in read_column_names(y):
        if name in names:
            raise InputError(f"column {name!r} of X has the name of the target y; leave it out of X, or rename one.")


def refuse_target_values(X: Any, y: Any, names: Sequence[str], frame: FrameRows | None) -> None:
    """Raise InputError if a column of a frame holds the values of a target, row by row; warn if one of an array does.

    A target of one value alone is passed over.

    Args:
        X: rows (rows, columns), which may be sparse; numbers come first, then codes of categories.
        y: targets (rows,) or (rows, targets) as numbers, or labels as an Arrow array.
        names: of the columns of numbers; empty: they are numbered.
        frame: what the columns of X mean; None: they are numbers.
    """
    labels = isinstance(y, pa.Array | pa.ChunkedArray)
    if labels and not pa.types.is_integer(y.type) and not pa.types.is_boolean(y.type):
        _refuse_text(X, y, frame)
        return
    targets = pc.cast(y, pa.float64()).to_numpy(zero_copy_only=False) if labels else np.asarray(y)
    numbers = X if frame is None else X[:, : len(frame.numbers)]
    for target in targets.reshape(len(targets), -1).T:
        known = target[~np.isnan(target)]
        if len(known) and (known != known[0]).any() and (same := _find_same(numbers, target)) is not None:
            if len(names):
                raise InputError(_describe(repr(names[same])))
            warnings.warn(_describe(str(same)), ColumnNote, stacklevel=3)


def _find_same(X: Any, target: Array) -> int | None:
    """Return the first column of X (rows, d) that is this target, (rows,); None if there is none."""
    if sparse.issparse(X):
        return _find_same_sparse(X, target)
    target = target.astype(X.dtype)
    for column in np.flatnonzero(_agree(X[:FIRST], target[:FIRST, None]).all(axis=0)):
        if _agree(X[:, column], target).all():
            return int(column)
    return None


def _agree(values: Array, others: Array) -> NDArray[np.bool_]:
    """Return a mask of values that are equal, or both missing."""
    return np.asarray((values == others) | (np.isnan(values) & np.isnan(others)))


def _find_same_sparse(X: Any, target: Array) -> int | None:
    """Return what `_find_same` does for a sparse X: what is not stored is 0."""
    found = X.tocoo()
    stored = found.data != 0
    equal = stored & (found.data == target.astype(X.dtype)[found.row])
    each = [np.bincount(found.col[mask], minlength=X.shape[1]) for mask in (stored, equal)]
    wanted = np.count_nonzero(target)
    columns = np.flatnonzero((each[0] == wanted) & (each[1] == wanted))
    return int(columns[0]) if len(columns) else None


def _refuse_text(X: Any, labels: Any, frame: FrameRows | None) -> None:
    """Raise InputError if a column of text is the column of labels."""
    if frame is None or pc.count_distinct(labels).as_py() < 2:
        return
    labels = labels.combine_chunks() if isinstance(labels, pa.ChunkedArray) else labels
    for name, held in frame.held.items():
        if pa.types.is_large_string(held.type) and frame.keys(name, X).equals(labels):
            raise InputError(_describe(repr(name)))


def _describe(column: str) -> str:
    return f"column {column} of X holds the very values of y; take the target out of X."
