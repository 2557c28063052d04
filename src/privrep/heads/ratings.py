"""Heads of ratings: a user's mean, spread and taste, on the public offsets and factors of the items."""

from __future__ import annotations

import numpy as np

from privrep.heads.regression import SHARED, Fit, intercepts
from privrep.local.least_squares import ROUNDING, centred
from privrep.local.representation import Ratings
from privrep.typing import Array


def rating_candidate(P: Array, y: Array, ratings: Ratings) -> Fit:
    """A user's mean, and its taste: a normal prior of the head with unit covariance, in units of the user's own spread.

    y / spread = a + offset + <factors, v> + rest, the variance of the rest public; P has offset and factors. A user
    with few ratings thus keeps close to the items' offsets, and one whose ratings are all alike to their mean.
    """
    m = y.shape[1]
    spread = np.sqrt((centred(y) ** 2).mean(axis=1))
    rows = centred(P[:, :, 1:])
    unit = np.where(spread > ROUNDING * np.abs(y).max(axis=1), spread, 0.0)
    left = centred(y) - centred(P[:, :, 0]) * unit[:, None]
    gram = rows.transpose(0, 2, 1) @ rows + ratings.residual * np.eye(rows.shape[2])
    taste = np.linalg.solve(gram, rows.transpose(0, 2, 1) @ left[:, :, None])[:, :, 0]
    head = np.concatenate([unit[:, None], taste], axis=1)
    loss = (left - (rows @ taste[:, :, None])[:, :, 0]) ** 2
    return Fit(SHARED, loss.sum(axis=1) / m, intercepts(P, y, head, True), head)
