"""Missing values of rows to predict, filled in the way of the rows that heads were fitted on.

A user's means of columns are kept with its head, in private, where values were missing in `fit`. A missing value of a
row to predict is its user's own mean of the column. Where the user had no value in the column, it is the released
location of the column. Representations without a prior have no location: there it is 0. For a column that is the same
in all rows of a user with an intercept, 0 is as good as any other number.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray
from scipy import sparse

from privrep.data.missing import compute_own_means
from privrep.data.table import UserTable
from privrep.errors import InputError
from privrep.local.representation import Representation
from privrep.typing import Array

if TYPE_CHECKING:
    from privrep.heads.heads import Heads


def average_users(block: UserTable, columns: int) -> Array:
    """Return users' means of the first columns, (users, columns); NaN where a user has no value.

    Args:
        block: the users' rows.
        columns: how many columns to average.
    """
    means = np.full((block.n_users, columns), np.nan)
    for users, size in block.positions_by_size():
        X = block.group(users, size)[0]
        rows = X.matrix[:, :columns].toarray().reshape(-1, size, columns) if block.is_sparse else X[..., :columns]
        means[users] = compute_own_means(np.ascontiguousarray(rows))
    return means


def join_means(parts: Sequence[Heads]) -> Array | None:
    """Return the means of all users, (users, columns); infinity for users whose means were not kept."""
    width = max((0 if part.means is None else part.means.shape[1] for part in parts), default=0)
    if not width:
        return None
    joined = [np.full((len(part.ids), width), np.inf) for part in parts]
    for part, means in zip(parts, joined, strict=True):
        if part.means is not None:
            means[:, : part.means.shape[1]] = part.means
    return np.concatenate(joined)


def locate(representation: Representation, intercept: bool) -> tuple[Array, NDArray[np.bool_]]:
    """Return the values that columns are taken to hold for users without one, (d,), and whether columns lie there,
    (d,).

    Where a column does not, only differences to a user's own mean mean anything.
    """
    if representation.prior is not None:
        mean = representation.prior.mean
        return mean.fill, mean.located > 0
    d = len(representation.scale)
    return np.zeros(d), np.full(d, not intercept)


def fill_to_predict(
    heads: Heads,
    representation: Representation,
    X: Any,
    users: NDArray[np.int64],
    *,
    intercept: bool,
    names: Callable[[], Sequence[str]] = tuple,
) -> Any:
    """Return rows to predict in which no value is missing.

    A value also counts as missing in a column that its user never had in `fit` and that has no location. The user's
    head does not know what to compare it with.

    Args:
        heads: of users.
        representation: the one that the heads are of.
        X: rows (rows, d), which may be sparse; NaN is a missing value.
        users: the position of each row's user among the heads, -1 for a user without one, (rows,).
        intercept: whether users have levels.
        names: returns the names of the columns, for an error.
    """
    fill, located = locate(representation, intercept)
    means = np.zeros((len(heads.ids), 0)) if heads.means is None else heads.means
    gaps = np.asarray((np.isnan(means) & ~located[: means.shape[1]]).any(axis=1))
    holes = np.isnan(X.data if sparse.issparse(X) else X)
    if not holes.any() and not gaps.any():
        return X
    some = np.flatnonzero(_find_rows_with(X, holes) | ((users >= 0) & gaps[users]))
    if not len(some):
        return X
    dense = X[some].toarray() if sparse.issparse(X) else X[some]
    own = np.full(dense.shape, np.inf)
    own[:, : means.shape[1]] = means[users[some]]
    own[users[some] < 0] = np.nan
    missing = np.isnan(dense)
    lost = missing & np.isinf(own) & ~located
    if lost.any():
        raise InputError(_describe_lost(lost, names()))
    unheard = np.isnan(own) & ~located & (users[some] >= 0)[:, None]
    filled = np.where(missing | unheard, np.where(np.isfinite(own), own, fill), dense)
    return _replace_rows(X, some, filled)


def _find_rows_with(X: Any, holes: NDArray[np.bool_]) -> NDArray[np.bool_]:
    """Return a mask of the rows with a hole, (rows,).

    Args:
        X: rows (rows, d), which may be sparse.
        holes: a mask of X, or of its stored values if it is sparse.
    """
    if not sparse.issparse(X):
        return np.asarray(holes.any(axis=1))
    rows = np.repeat(np.arange(X.shape[0]), np.diff(X.indptr))
    return np.bincount(rows[holes], minlength=X.shape[0]) > 0


def _replace_rows(X: Any, some: NDArray[np.int64], filled: Array) -> Any:
    """Return X with some rows replaced.

    Args:
        X: rows (rows, d), which may be sparse.
        some: positions of the rows to replace, (some,).
        filled: what to replace them by, (some, d).
    """
    if sparse.issparse(X):
        rest = np.setdiff1d(np.arange(X.shape[0]), some)
        back = np.argsort(np.concatenate([rest, some]))
        return sparse.csr_array(sparse.vstack([X[rest], sparse.csr_array(filled)], format="csr"))[back]
    result = X.copy()
    result[some] = filled
    return result


def _describe_lost(lost: NDArray[np.bool_], names: Sequence[str]) -> str:
    """Return the sentence that refuses missing values in these columns.

    Args:
        lost: a mask of values that cannot be filled, (rows, d).
        names: of the columns; empty: they are numbered.
    """
    columns = np.flatnonzero(lost.any(axis=0))
    listed = [f"{names[c] if len(names) else f'column {c}'} ({int(lost[:, c].sum()):,})" for c in columns[:5]]
    more = ", ..." if len(columns) > 5 else ""
    return (
        f"rows to predict miss values of {', '.join(listed)}{more}, and no row of the fit missed one, so that users' "
        "own means were not kept; fill the values in."
    )
