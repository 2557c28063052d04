"""Populations of classifiers: user i's label is c with probability softmax_c(<x, U v_ic> + b_ic).

One orthonormal U for all, heads and intercepts of each user's own. Features are standard normal. Intercepts spread the
classes unevenly over users: at a `skew` of 2 most of five classes are rare with any one user.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import DTypeLike, NDArray

from privrep.data.table import UserTable
from privrep.errors import InputError
from privrep.typing import Array


@dataclass(frozen=True)
class ClassPopulation:
    """The truth: what the users are. `sample` draws their rows."""

    U: Array  # (d, k), orthonormal columns
    heads: Array  # (n, classes, k)
    intercepts: Array  # (n, classes)
    rows: int  # of each user

    @property
    def classes(self) -> int:
        return self.heads.shape[1]

    def sample(self, rng: np.random.Generator, dtype: DTypeLike = np.float32, rows: int | None = None) -> UserTable:
        """Fresh rows of every user, labels 0 to classes - 1."""
        n, m = len(self.heads), self.rows if rows is None else rows
        X = rng.standard_normal((n * m, len(self.U)), dtype=np.float32).astype(dtype, copy=False)
        users = np.repeat(np.arange(n), m)
        below = np.cumsum(self.probabilities(X, users), axis=1)[:, :-1]
        y = (rng.random(n * m)[:, None] > below).sum(axis=1)
        return UserTable(X, y.astype(X.dtype), np.arange(0, n * m + 1, m), np.arange(n))

    def probabilities(self, X: NDArray[np.floating], users: NDArray[np.int64]) -> Array:
        """(rows, classes): of each class, for rows of these users."""
        P = X @ self.U.astype(X.dtype)
        outputs = np.einsum("rk,rck->rc", P, self.heads[users]) + self.intercepts[users]
        outputs -= outputs.max(axis=1, keepdims=True)
        weights = np.exp(outputs)
        return np.asarray(weights / weights.sum(axis=1, keepdims=True))

    def expected_log_loss(self, predicted: Array, X: NDArray[np.floating], users: NDArray[np.int64]) -> float:
        """Of predicted probabilities on these rows, over labels drawn anew: less noisy than on drawn labels."""
        truth = self.probabilities(X, users)
        return float(-(truth * np.log(np.maximum(predicted, 1e-300))).sum(axis=1).mean())

    def expected_error(self, predicted: NDArray[np.int64], X: NDArray[np.floating], users: NDArray[np.int64]) -> float:
        """The probability that a predicted class is not the label, over labels drawn anew."""
        truth = self.probabilities(X, users)
        return float(1 - truth[np.arange(len(truth)), predicted].mean())


def make_class_population(
    rng: np.random.Generator,
    users: int,
    features: int,
    rank: int,
    rows: int,
    classes: int = 2,
    *,
    strength: float = 2.0,
    skew: float = 0.0,
) -> ClassPopulation:
    """Draw who the users are. `strength` is the standard deviation of the heads, `skew` that of the intercepts.

    Of two classes the output of the first is zero, so that heads are those of a logistic regression.
    """
    if not 1 <= rank <= features or classes < 2 or min(users, rows) < 1 or strength < 0 or skew < 0:
        raise InputError("a population needs users, rows, a rank of at most its features and two classes or more.")
    U, _ = np.linalg.qr(rng.standard_normal((features, rank)))
    heads = strength * rng.standard_normal((users, classes, rank))
    intercepts = skew * rng.standard_normal((users, classes))
    if classes == 2:
        heads[:, 0], intercepts[:, 0] = 0.0, 0.0
    return ClassPopulation(U, heads, intercepts, rows)
