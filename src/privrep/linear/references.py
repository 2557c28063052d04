"""References that the demo compares a private fit with. NOT PRIVATE, but for `alone`, in which nothing is shared.

`fedrep` reads exact sums of users' contributions, which nothing that claims privacy may do: `BoundedSum.total` is read
here, under a bound too large to clip. References of experiments alone are in `experiments/references.py`.
Rows of each user are centred by their own mean (`intercept`), which takes the user's intercept out of the regression.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import numpy as np

from privrep.data.table import UserTable
from privrep.heads.regression import own_candidate
from privrep.linear.methods.private_fedrep import head_and_gradient
from privrep.linear.steps import PairMoments
from privrep.local.least_squares import centred
from privrep.local.representation import Representation
from privrep.local.transform import FeatureTransform
from privrep.privacy.bounds import Bound, Contributions
from privrep.privacy.contributions import Vectors, pack, packed_size, unpack
from privrep.privacy.protocol import StepSpec, UserBatch, Users
from privrep.typing import Array, Floats

UNBOUNDED = 1e150  # a clipping norm that no data reaches


@dataclass(frozen=True)
class LinearModel:
    """One linear predictor for everybody: <x, weights> + intercept."""

    weights: Array  # (d,)
    intercept: float


def fedrep(
    users: Users, rank: int, *, intercept: bool = True, scale: Array | None = None, rounds: int = 100, step: float = 1.0
) -> Representation:
    """FedRep (Collins et al. 2021), full participation, no clipping and no noise. NOT PRIVATE.

    Every round each user fits its head by least squares and takes the gradient of its mean squared error on the same
    rows, all of them; the server takes a gradient step and a QR. `step` is in units of 1 / (2 sigma_max(V)^2 / n),
    the longest the theory allows. `scale` divides the features. Stops early once a round moves nothing.
    """
    inverse_scale = np.ones(users.facts.features) if scale is None else 1 / scale
    U = _spectral(users, rank, inverse_scale, intercept)
    d, k = U.shape
    bounds = {"gradient": Bound(UNBOUNDED, d * k), "heads": Bound(UNBOUNDED, packed_size(k))}
    for _ in range(rounds):
        sums = users.sums(FullGradient(U, inverse_scale, intercept), bounds)
        largest = float(np.linalg.eigvalsh(unpack(sums["heads"].total))[-1])
        before, gradient = U, sums["gradient"].total.reshape(d, k)
        U, _ = np.linalg.qr(U - step / (2 * max(largest, 1e-300)) * gradient)
        if subspace_distance(before, U) < 1e-7:
            break
    return Representation(U, FeatureTransform(1 / inverse_scale), 0.0)


@dataclass(frozen=True)
class FullGradient:
    """Head and gradient of every user on all its rows. Users whose rows any U can fit have nothing to say: zero."""

    spec: ClassVar[StepSpec] = StepSpec()
    U: Array
    inverse_scale: Array
    intercept: bool

    def __call__(self, batch: UserBatch) -> dict[str, Contributions]:
        X: Floats = batch.X
        y: Floats = batch.y
        rows, targets = (centred(X), centred(y)) if self.intercept else (X, y)
        every = np.arange(X.shape[1] if X.shape[1] > self.U.shape[1] + self.intercept else 0)
        heads, gradient = head_and_gradient(self.U, rows * self.inverse_scale, targets, every, every)
        return {"gradient": Vectors(gradient), "heads": Vectors(pack(heads[:, :, None] * heads[:, None, :]))}


def _spectral(users: Users, rank: int, inverse_scale: Array, intercept: bool) -> Array:
    """Algorithm 2 without clipping and noise. NOT PRIVATE."""
    bound = {"moments": Bound(UNBOUNDED, packed_size(users.facts.features))}
    total = users.sums(PairMoments(FeatureTransform(1 / inverse_scale), intercept), bound)["moments"].total
    return np.linalg.eigh(unpack(total))[1][:, ::-1][:, :rank]


def subspace_distance(U: Array, W: Array) -> float:
    """Sine of the largest principal angle between the columns' spans, both orthonormal: dist(U, W) of the papers."""
    return float(np.linalg.norm(W - U @ (U.T @ W), ord=2))


def pooled(table: UserTable, *, ridge: float = 1e-6, intercept: bool = True) -> LinearModel:
    """One ridge regression on everybody's rows. NOT PRIVATE. `ridge` is relative to the mean square of the features."""
    d = table.n_features
    normal = np.zeros((d + 2, d + 2))
    for block in table.blocks():
        joined = np.column_stack([block.X, np.full(block.n_rows, float(intercept)), block.y]).astype(np.float64)
        normal += joined.T @ joined
    gram, right = normal[:-1, :-1], normal[:-1, -1]
    penalty = np.append(np.full(d, ridge * np.trace(gram[:d, :d]) / d + 1e-300), 0.0 if intercept else 1.0)
    solution: Array = np.linalg.lstsq(gram + np.diag(penalty), right, rcond=None)[0].astype(np.float64)
    return LinearModel(solution[:d], float(solution[d]))


def alone(table: UserTable, *, intercept: bool = True) -> tuple[Array, Array]:
    """Every user's own ridge regression, (n, d) weights and (n,) intercepts: nothing is shared, nothing is spent."""
    weights, intercepts = np.zeros((table.n_users, table.n_features)), np.zeros(table.n_users)
    for users, size in table.positions_by_size():
        for part in np.array_split(users, max(len(users) * size // 8192, 1)):
            X, y = (values.astype(np.float64, copy=False) for values in table.group(part, size))
            fit = own_candidate(X, y, np.ones(table.n_features), intercept)
            weights[part], intercepts[part] = fit.weights, fit.intercept
    return weights, intercepts
