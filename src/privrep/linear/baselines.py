"""What Private FedRep is compared with. All but `dp_fedavg` are NOT PRIVATE and say so.

The non-private methods read exact sums of users' contributions, which nothing that claims privacy may do: an engine's
`BoundedSum.total` is read here, under a bound too large to clip, and nowhere else but in `privacy.release`.
Each user's rows centred by their own mean (`intercept`) profile the user's intercept out of the regression.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import numpy as np
from threadpoolctl import threadpool_limits

from privrep.data.table import UserTable
from privrep.heads.regression import own_candidate
from privrep.linear.methods.private_fedrep import head_and_gradient, public_count
from privrep.linear.steps import CELLS, PairMoments, octaves
from privrep.linear.transform import octave_quantile
from privrep.local.least_squares import centred, least_squares_heads
from privrep.local.representation import Representation
from privrep.local.transform import FeatureTransform
from privrep.privacy.bounds import Bound, Contributions
from privrep.privacy.calibration import Query
from privrep.privacy.contributions import Counts, Vectors, pack, packed_size, unpack
from privrep.privacy.protocol import StepSpec, UserBatch, Users
from privrep.privacy.run import Run
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


def altmin(table: UserTable, rank: int, *, intercept: bool = True, rounds: int = 30) -> Representation:
    """Alternating minimisation: heads by least squares given U, then U by least squares given the heads. NOT PRIVATE.

    The U step solves the dk x dk normal equations sum (v v^T) kron (x x^T) vec U = sum y (v kron x), accumulated block
    by block, one matrix product for each pair of columns. Stops early once a round moves nothing.
    """
    from privrep.users.memory import InMemoryUsers

    d = table.n_features
    U = _spectral(InMemoryUsers(table), rank, np.ones(d), intercept)
    with threadpool_limits(1, user_api="blas"):  # products this small gain nothing from threads and can lose much
        for _ in range(rounds):
            normal, right = np.zeros((rank, d, rank, d)), np.zeros((rank, d))
            for block in table.blocks():
                for X, y in block.by_size():
                    _add_normal_equations(normal, right, U, X, y, intercept)
            solution = np.linalg.lstsq(normal.reshape(rank * d, rank * d), right.ravel(), rcond=1e-12)[0]
            before, (U, _) = U, np.linalg.qr(solution.reshape(rank, d).T)
            if subspace_distance(before, U) < 1e-7:
                break
    return Representation(U, FeatureTransform.plain(d), 0.0)


def _add_normal_equations(normal: Array, right: Array, U: Array, X: Floats, y: Floats, intercept: bool) -> None:
    users, m, d = X.shape
    k = U.shape[1]
    if m <= k + intercept:  # any U fits such users: they have nothing to say
        return
    rows, targets = (centred(X), centred(y)) if intercept else (X, y)
    rows, targets = rows.astype(np.float64, copy=False), targets.astype(np.float64, copy=False)
    heads = np.repeat(least_squares_heads(rows @ U, targets, intercept), m, axis=0)
    flat = rows.reshape(users * m, d)
    right += (heads * targets.reshape(-1, 1)).T @ flat
    for a in range(k):
        for b in range(a, k):
            part = (flat * (heads[:, a] * heads[:, b])[:, None]).T @ flat
            normal[a, :, b, :] += part
            if b > a:
                normal[b, :, a, :] += part


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


def dp_fedavg(
    run: Run,
    *,
    intercept: bool = True,
    rounds: int = 10,
    step: float = 1.0,
    ridge: float = 0.1,
    clip: float | None = None,
    sizes_share: float = 0.05,
) -> LinearModel:
    """User-level DP-FedAvg (McMahan et al. 2018) of one linear model, full participation.

    Every round each user moves the shared model towards its own rows (`LocalUpdate`), the moves are clipped and added
    up, and the server takes `step` times their noisy mean. Without `clip`, the norm is the median of the users' first
    moves, read off a histogram released for `sizes_share` of mu^2; the rest goes evenly to the rounds.

    Formal guarantee: everything returned or posted is a function of the releases charged to `run.ledger`, hence
    (epsilon, delta)-DP at user level under replace-one-user, for any data whatever.
    """
    n, size, left = public_count(run), run.users.facts.features + 1, run.ledger.capacity
    model = np.zeros(size)
    if clip is None:
        query = Query(Bound(1.0, CELLS, acute=True), sizes_share * left)
        released = run.release("fedavg-sizes", LocalUpdate(model, ridge, intercept), {"sizes": query})["sizes"]
        clip, left = octave_quantile(released.value, 0.5), (1 - sizes_share) * left
    query = Query(Bound(clip, size), left / rounds)
    for t in range(1, rounds + 1):
        released = run.release(f"fedavg-round-{t}", LocalUpdate(model, ridge, intercept), {"update": query})["update"]
        model = model + step / n * released.value
    if not intercept:
        model[-1] = 0.0  # nothing but noise
    run.derive("linear-model", {"model": model})
    return LinearModel(model[:-1], float(model[-1]))


def alone(table: UserTable, *, intercept: bool = True) -> tuple[Array, Array]:
    """Every user's own ridge regression, (n, d) weights and (n,) intercepts: nothing is shared, nothing is spent."""
    weights, intercepts = np.zeros((table.n_users, table.n_features)), np.zeros(table.n_users)
    for users, size in table.positions_by_size():
        for part in np.array_split(users, max(len(users) * size // 8192, 1)):
            X, y = (values.astype(np.float64, copy=False) for values in table.group(part, size))
            fit = own_candidate(X, y, np.ones(table.n_features), intercept)
            weights[part], intercepts[part] = fit.weights, fit.intercept
    return weights, intercepts


@dataclass(frozen=True)
class LocalUpdate:
    """The move of a shared model that fits a user's rows: ridge regression of the model's residuals.

    The ridge is relative to the user's mean squared row length, so it needs no scale; `sizes` is the octave of the
    move's length. Solved in the smaller of rows and features.
    """

    spec: ClassVar[StepSpec] = StepSpec()
    model: Array  # (d + 1,), the intercept last
    ridge: float
    intercept: bool

    def __call__(self, batch: UserBatch) -> dict[str, Contributions]:
        X: Floats = batch.X
        y: Floats = batch.y
        users, m, d = X.shape
        rows = np.concatenate([X, np.full((users, m, 1), float(self.intercept))], axis=2, dtype=np.float64)
        residuals = (y - rows @ self.model)[:, :, None]
        penalty = (self.ridge + 1e-10) * (rows**2).sum(axis=(1, 2))[:, None, None] / m + np.finfo(np.float64).tiny
        across = rows.transpose(0, 2, 1)
        if m <= d:
            move = across @ np.linalg.solve(rows @ across + penalty * np.eye(m), residuals)
        else:
            move = np.linalg.solve(across @ rows + penalty * np.eye(d + 1), across @ residuals)
        return {"update": Vectors(move[:, :, 0]), "sizes": Counts(octaves(np.linalg.norm(move, axis=1)), CELLS)}
