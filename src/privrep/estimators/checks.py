"""Rows that estimators are given: checked, with what their parameters say about missing values and weights."""

from __future__ import annotations

import warnings
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray
from scipy import sparse
from sklearn.utils.validation import check_array, check_consistent_length

from privrep.data.frames import FrameRows
from privrep.data.missing import IMPUTE, Missing, MissingCounts
from privrep.data.table import plain
from privrep.data.weights import check_weights
from privrep.errors import InputError, MissingValues
from privrep.estimators.rows import Named, validated
from privrep.typing import Array

INFINITE = "contains infinity or a value too large for dtype('float64')"


def check_features(estimator: Any, X: Any, *, reset: bool, missing: Missing = IMPUTE, least: int = 1) -> Any:
    """Return X as an array or a CSR matrix of floats, in which values may be missing: NaN.

    Args:
        estimator: whose features they are.
        X: rows (rows, n_features), in any form that scikit-learn takes.
        reset: whether the estimator learns the number and the names of features from X.
        missing: what is done about missing values. Sparse rows must not have any.
        least: rows that there must be.
    """
    named, own = isinstance(X, Named), {"accept_sparse": "csr", "ensure_all_finite": False}
    how: Any = {"dtype": [np.float64, np.float32], "ensure_min_samples": least, **own}
    X = validated(estimator, X, reset=reset, **how)
    if named:  # infinite values were refused when the frame was read
        return X
    names = feature_names(estimator)
    if sparse.issparse(X):
        bad = int((~np.isfinite(X.data)).sum())
        if bad:
            raise InputError(
                f"X is sparse and stores {bad:,} values that are missing (NaN) or infinite; leave them out, or give a "
                "dense X, whose missing values are filled."
            )
        if missing.indicators:
            raise InputError("missing_indicator is for dense X; leave it out.")
        return X
    with np.errstate(all="ignore"):
        if np.isfinite(X.sum()):
            return X
    if (infinite := np.isinf(X)).any():
        raise InputError(f"Input X {INFINITE}: {_counted(infinite, names)}; mend those values, or leave the rows out.")
    counts = MissingCounts()
    counts.add([], columns_of(X, names), missing)
    counts.check(missing, "X")
    return X


def check_numbers(y: Any, X: Any) -> Array:
    """Return targets (rows,) or (rows, targets) of these rows, NaN where one is missing. No refusal shows a value."""
    try:
        y = check_array(plain(y), dtype=np.float64, ensure_2d=False, ensure_all_finite=False, input_name="y")
    except ValueError as error:
        if "could not convert" not in str(error):
            raise
        raise InputError("y has values that are not numbers; correct them, or leave their rows out.") from None
    check_consistent_length(X, y)
    check_infinite_targets(y)
    return np.asarray(y)


def check_infinite_targets(y: Any) -> None:
    """Raise InputError if targets are floats and some are infinite."""
    values = np.asarray(y)
    if values.dtype.kind == "f" and (bad := int(np.isinf(values).sum())):
        raise InputError(f"Input y {INFINITE} in {bad:,} rows; mend those targets, or leave the rows out.")


def refuse_missing(estimator: Any, X: Any, y: Any = None) -> None:
    """Raise InputError if values are missing, for estimators that do not fill them."""
    holes = np.isnan(X.data if sparse.issparse(X) else X)
    count = int(holes.sum()) + (0 if y is None else int(absent_targets(y).sum()))
    if count:
        name = type(estimator).__name__
        raise InputError(
            f"{count:,} values are missing (NaN), and {name} does not fill them; leave those rows out, or fill each by "
            "its user's own mean: a mean over all users is not private."
        )


def absent_targets(y: Any) -> NDArray[np.bool_]:
    """Return which rows have no target, or lack one of several, (rows,)."""
    if isinstance(y, pa.Array | pa.ChunkedArray):
        return np.asarray(y.is_null())
    values = np.asarray(y)
    if values.dtype.kind != "f":
        return np.zeros(len(values), dtype=bool)
    return np.isnan(values) if values.ndim == 1 else np.isnan(values).any(axis=1)


def feature_names(estimator: Any) -> list[str]:
    """Return the names of an estimator's features, empty where it learned none."""
    return [str(name) for name in getattr(estimator, "feature_names_in_", ())]


def missing_of(estimator: Any, numbers: Sequence[str] = ()) -> Missing:
    """Return what an estimator's parameters `missing` and `missing_indicator` say, once it knows its features.

    Indicators are positions among `numbers`, the columns of numbers of a frame, or among all columns of an array.
    """
    given = estimator.missing_indicator
    if isinstance(given, str) or (given is not None and not hasattr(given, "__iter__")):
        raise InputError(f"missing_indicator must be a list of columns; write [{given!r}].")
    names = list(numbers) or feature_names(estimator)
    features = len(numbers) or estimator.n_features_in_
    places = []
    for column in given or ():
        whole = isinstance(column, int | np.integer) and not isinstance(column, bool)
        if whole and 0 <= column < features:
            places.append(int(column))
        elif column in names:
            places.append(names.index(column))
        else:
            raise InputError(f"missing_indicator names {column!r}, which is no column of X; name one, or its position.")
    return Missing(estimator.missing, tuple(places))


@dataclass(frozen=True)
class Rows:
    """Rows for a fit: X with indicators, and how often each row counts."""

    X: Any
    weights: Array | None  # (rows,), 0 for rows that are left out; None: all are 1
    keep_means: int  # columns whose means are kept with heads
    counts: MissingCounts
    frame: FrameRows | None = None  # what the columns of X mean; None: they are features

    def warn(self) -> None:
        """Say what was missing, to whoever holds the rows."""
        warn_missing(self.counts, stacklevel=4)


def warn_missing(counts: MissingCounts, stacklevel: int) -> None:
    """Say what was missing, to whoever holds the rows."""
    if said := counts.words():
        warnings.warn(f"{'; '.join(said)} (not private: for your eyes)", MissingValues, stacklevel=stacklevel)


def prepare(
    estimator: Any,
    X: Any,
    y: Any,
    sample_weight: Any,
    missing: Missing,
    frame: FrameRows | None = None,
    *,
    may_be_empty: bool = False,
) -> Rows:
    """Return the rows of a fit, or of a new user.

    Args:
        estimator: whose features they are.
        X: rows that `check_features` returned.
        y: their targets, as arrays or Arrow columns, in which some may be missing.
        sample_weight: (rows,), see `data.weights`; None: all alike.
        missing: what is done about missing values.
        frame: what the columns of X mean, if they are not features yet.
        may_be_empty: whether it is no error if no row is left.
    """
    counts, absent = MissingCounts(), absent_targets(y)
    rows, dense = X.shape[0], not sparse.issparse(X)
    names = feature_names(estimator) if frame is None else list(frame.numbers)
    numbers = X if frame is None else X[:, : len(names)]
    holes = dense and bool(np.isnan(numbers).any())
    columns = columns_of(numbers, names if len(names) == numbers.shape[1] else []) if holes else {}
    counts.add([np.where(absent, np.nan, 0.0)], columns, missing)
    counts.check(missing, "X")
    kept = ~absent & (missing.keeps(numbers, rows) if holes else True)
    weights = None
    if sample_weight is not None:
        weights = np.where(kept, _weights(sample_weight, rows), 0.0)
    elif not kept.all():
        weights = kept.astype(np.float64)
    if weights is not None and not weights.any() and not may_be_empty:
        raise InputError("no row is left: each lacks its target or a feature, or has weight 0. Give others.")
    keep = numbers.shape[1] if dense and missing.how != "refuse" else 0  # whoever misses what
    plain_rows = frame is None and dense and X.shape[1] == estimator.n_features_in_
    return Rows(missing.with_indicators(X) if plain_rows else X, weights, keep, counts, frame)


def columns_of(X: Array, names: Sequence[str]) -> dict[str, Array]:
    """Return the columns of X by name, or by position."""
    return {names[j] if names else f"column {j}": X[:, j] for j in range(X.shape[1])}


def _weights(given: Any, rows: int) -> Array:
    try:
        weights = np.asarray(plain(given), dtype=np.float64)
    except (TypeError, ValueError):
        raise InputError("sample_weight must be numbers, one for each row.") from None
    weights = np.full(rows, float(weights)) if weights.ndim == 0 else weights
    if weights.shape != (rows,):
        raise InputError(f"sample_weight must have shape ({rows},), one for each row. Got {weights.shape} instead.")
    check_weights(weights, "the weights in sample_weight")
    return weights


def _counted(bad: NDArray[np.bool_], names: Sequence[str]) -> str:
    columns = np.flatnonzero(bad.any(axis=0))
    listed = [f"{names[c] if names else f'column {c}'} ({int(bad[:, c].sum()):,})" for c in columns[:8]]
    return ", ".join(listed) + (", ..." if len(columns) > 8 else "")


def as_rank(rank: Any) -> int | None:
    """Return the parameter `rank`, None for "auto"; raise InputError if it is neither that nor a whole number."""
    if rank == "auto":
        return None
    if isinstance(rank, bool) or not isinstance(rank, int | np.integer):
        raise InputError(f'rank must be a whole number or "auto". Got {rank!r} instead.')
    return int(rank)


def as_seed(random_state: Any) -> int:
    """Return a seed; raise InputError if the parameter `random_state` is none."""
    if isinstance(random_state, bool) or not isinstance(random_state, int | np.integer) or random_state < 0:
        raise InputError(
            "random_state must be None (cryptographic noise) or a non-negative integer (a simulation). "
            f"Got {random_state!r} instead."
        )
    return int(random_state)
