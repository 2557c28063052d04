"""Ridge regression of many users at once, with leave-one-out in closed form. Each user's answer uses its rows alone.

That is meant to the last bit. A matrix product over the rows of several users rounds a user's rows differently
depending on who stands beside them, and a number near the edge of a histogram's cell, or a direction made of rounding
errors, would turn that into more than the stated sensitivity. So products are stacked (one per user), and sums run
along axes that belong to one user; tests/properties holds every local step to it.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

Floats = NDArray[Any]


@dataclass(frozen=True)
class RidgeFit:
    """Heads of a group of users of equal size, shapes (users, k), and what leaving each row out would have given."""

    heads: Floats
    loo_residuals: Floats  # (users, rows): y_j minus the prediction of the fit without row j
    directions: Floats  # (users, rows, k): A^-1 p_j, so that the head without row j is heads - directions_j * loo_j

    def loo_heads(self) -> Floats:
        """(users, rows, k): the head of each user fitted without row j."""
        return self.heads[:, None, :] - self.directions * self.loo_residuals[:, :, None]


def centred(values: Floats) -> Floats:
    """Rows minus their user's mean, along axis 1."""
    return values - values.mean(axis=1, keepdims=True)


def ridge_fit(P: Floats, y: Floats, ridge: float, intercept: bool) -> RidgeFit:
    """min_v sum_j (y_j - <p_j, v>)^2 + ridge * m |v|^2 for each user; P is (users, m, k), y is (users, m).

    With `intercept`, P and y must come centred by user, and the leverage of the unpenalised intercept is added. A
    trace of 1e-10 of the Gram matrix's own trace keeps every system solvable: no user's rows can make a solve fail.
    """
    m, k = P.shape[1:]
    gram = P.transpose(0, 2, 1) @ P
    trace = gram[:, np.arange(k), np.arange(k)].sum(axis=1)
    gram[:, np.arange(k), np.arange(k)] += (ridge * m + 1e-10 * trace + np.finfo(P.dtype).tiny)[:, None]
    inverse = np.linalg.inv(gram)
    heads = np.matmul(inverse, np.matmul(P.transpose(0, 2, 1), y[:, :, None]))[:, :, 0]
    directions = P @ inverse
    residuals = y - np.matmul(P, heads[:, :, None])[:, :, 0]
    leverage = (P * directions).sum(axis=2) + (1 / m if intercept else 0.0)
    return RidgeFit(heads, residuals / np.maximum(1 - leverage, 1e-6), directions)
