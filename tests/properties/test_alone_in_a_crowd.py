"""A user's contribution is a function of its own rows, to the last bit, whoever stands beside it.

Batched arithmetic that rounds a user's numbers differently in another company would break the stated sensitivity where
a step is not continuous (cells of histograms, directions of tiny vectors): then one user's change moves all the others.
"""

from __future__ import annotations

import numpy as np
import pytest

from privrep.algorithms.baselines import LocalUpdate
from privrep.algorithms.paper import BatchGradient, FirstHalfPairs
from privrep.local.steps import FeatureSizes, LeaveOneOutGradient, PairMoments
from privrep.privacy.contributions import Counts, CrossMoments, Vectors

D, K = 17, 3
U = np.linalg.qr(np.random.default_rng(0).normal(size=(D, K)))[0]
SCALE = 2.0 ** np.random.default_rng(1).integers(-3, 4, D)
STEPS = {
    "sizes": FeatureSizes(True),
    "sizes, no intercept": FeatureSizes(False),
    "moments": PairMoments(1 / SCALE, True),
    "moments, no intercept": PairMoments(1 / SCALE, False),
    "gradient": LeaveOneOutGradient(U, 1 / SCALE, 0.3, 0.01, True),
    "gradient, no intercept": LeaveOneOutGradient(U, 1 / SCALE, 0.3, 1e-3, False),
    "paper's moments": FirstHalfPairs(),
    "paper's gradient": BatchGradient(U, "paper-round-1"),
    "federated averaging": LocalUpdate(np.append(U[:, 0], 0.5), 1.0, True),
}


def crowd(users, rows, dtype, rng):
    """Ordinary users, users with constant targets (all their residuals are rounding errors), and exact fits."""
    X = rng.normal(size=(users, rows, D)) * SCALE + rng.normal(size=(users, 1, D))
    y = rng.normal(size=(users, rows))
    y[::3] = 0.1
    y[1::3] = np.einsum("umd,d->um", X[1::3], U[:, 0])
    return X.astype(dtype), y.astype(dtype)


def local(step, X, y):
    with np.errstate(all="ignore"):  # as the engines call it
        return step(X, y)


def numbers(contributions, user):
    match contributions:
        case Vectors(values):
            return values[user]
        case Counts(cells, _):
            return cells[user]
        case CrossMoments(rows, scale):
            return np.concatenate([rows[user].ravel(), contributions._sums()[user], scale[[user]]])
    raise AssertionError(contributions)


@pytest.mark.parametrize("dtype", [np.float32, np.float64])
@pytest.mark.parametrize("rows", [1, 2, 3, 7, 10, 33])
@pytest.mark.parametrize("name", STEPS)
def test_contributions_do_not_depend_on_the_others(name, rows, dtype):
    rng = np.random.default_rng([rows, len(name)])
    X, y = crowd(61, rows, dtype, rng)
    together = local(STEPS[name], X, y)
    order = rng.permutation(61)
    shuffled = local(STEPS[name], X[order][:40], y[order][:40])
    for user in range(61):
        alone = local(STEPS[name], X[user : user + 1], y[user : user + 1])
        for key in together:
            expected = numbers(together[key], user)
            assert np.array_equal(numbers(alone[key], 0), expected, equal_nan=True)
            if user < 60:
                pair = local(STEPS[name], X[user : user + 2], y[user : user + 2])
                assert np.array_equal(numbers(pair[key], 0), expected, equal_nan=True)
            place = int(np.flatnonzero(order == user)[0])
            if place < 40:
                assert np.array_equal(numbers(shuffled[key], place), expected, equal_nan=True)
