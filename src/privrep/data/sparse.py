"""Rows most of whose entries are zero."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray
from scipy import sparse

from privrep.typing import Floats


@dataclass(frozen=True)
class SparseRows:
    """Rows of users who all have `size` rows, as one CSR matrix in canonical form (see `canonicalise`).

    Formal guarantee:
    * The product of `project` for a row is a function of that user's rows and the other factor, to the last bit.
    * So is the product of the matrix of `slots` for a user.
    * SciPy adds up each row of a CSR product by itself, one stored entry after another.
    """

    matrix: Any  # scipy.sparse.csr_array, (users * size, d)
    size: int

    def __post_init__(self) -> None:
        object.__setattr__(
            self, "matrix", canonicalise(self.matrix)
        )  # the dataclass is frozen; this is its construction

    @property
    def shape(self) -> tuple[int, int, int]:
        """Return (users, size, features)."""
        return self.matrix.shape[0] // self.size, self.size, self.matrix.shape[1]

    @property
    def ndim(self) -> int:
        return 3

    @property
    def dtype(self) -> np.dtype[Any]:
        return np.dtype(self.matrix.dtype)

    def __len__(self) -> int:
        return self.shape[0]

    def __getitem__(self, users: slice) -> SparseRows:
        start, stop, step = users.indices(len(self))
        if step != 1:
            raise IndexError("users of sparse rows are taken side by side.")
        return SparseRows(self.matrix[start * self.size : max(start, stop) * self.size], self.size)

    def dense(self) -> Floats:
        """Return the rows as an array, (users, size, d)."""
        return np.asarray(self.matrix.toarray()).reshape(self.shape)

    def project(self, M: Floats) -> Floats:
        """Return every row times M, (d, k), added up in the order of its columns: (users, size, k) in float64."""
        product = self.matrix @ np.ascontiguousarray(M, dtype=np.float64)
        return np.asarray(product).reshape(*self.shape[:2], M.shape[1])

    def slots(self) -> tuple[NDArray[np.int64], NDArray[np.int64], Any]:
        """Return the distinct (user, column) pairs, by user and column, and a CSR matrix T with a row for each of them.

        For W of shape (users * size, k), T @ W is for each pair the sum over that user's rows j of x_j[column] W_j. It
        is added up in the order of the rows.
        """
        n, d = self.matrix.shape
        rows = np.repeat(np.arange(n), np.diff(self.matrix.indptr))
        key = (rows // self.size) * d + self.matrix.indices
        order = np.argsort(key, kind="stable")
        key = key[order]
        first = np.flatnonzero(np.diff(key, prepend=-1))
        pairs = key[first]
        T = sparse.csr_array((self.matrix.data[order], rows[order], np.append(first, len(key))), shape=(len(pairs), n))
        return pairs // d, pairs % d, T

    def without(self, users: NDArray[np.bool_]) -> SparseRows:
        """Return the same with the rows of the users in this mask, (users,), all zero."""
        stored = np.repeat(users, self.size).repeat(np.diff(self.matrix.indptr))
        cleared = self.matrix.copy()
        cleared.data[stored] = 0
        return SparseRows(cleared, self.size)

    def find_finite(self) -> NDArray[np.bool_]:
        """Return a mask (users,) of the users who have nothing but finite numbers."""
        bad = np.flatnonzero(~np.isfinite(self.matrix.data))
        rows = np.searchsorted(self.matrix.indptr, bad, side="right") - 1
        result = np.ones(len(self), dtype=bool)
        result[rows // self.size] = False
        return result


def canonicalise(matrix: Any) -> Any:
    """Return a sparse matrix as a csr_array of floats with sorted columns, no duplicates and no stored zeros.

    float32 stays float32, all else becomes float64. The matrix that is given is never changed; one that is in order is
    not copied.
    """
    kept = matrix if matrix.dtype in (np.float32, np.float64) else matrix.astype(np.float64)
    kept = kept if isinstance(kept, sparse.csr_array) else sparse.csr_array(kept)
    if not kept.has_canonical_format or not kept.data.all():
        kept = kept.copy()
        kept.sum_duplicates()
        kept.eliminate_zeros()
    return kept
