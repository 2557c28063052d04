"""DP-FedAvg of one linear model for everybody (McMahan et al. 2018): private, and without heads of users' own."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import numpy as np

from privrep.linear.methods.private_fedrep import find_public_count
from privrep.linear.references import LinearModel
from privrep.linear.steps import CELLS, find_octaves
from privrep.linear.transform import read_octave_quantile
from privrep.privacy.bounds import Bound, Contributions
from privrep.privacy.calibration import Query
from privrep.privacy.contributions import Counts, Vectors
from privrep.privacy.protocol import StepSpec, UserBatch
from privrep.privacy.run import Run
from privrep.typing import Array, Floats


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
    n, size, left = find_public_count(run), run.users.facts.features + 1, run.ledger.capacity
    model = np.zeros(size)
    if clip is None:
        query = Query(Bound(1.0, CELLS, acute=True), sizes_share * left)
        released = run.release("fedavg-sizes", LocalUpdate(model, ridge, intercept), {"sizes": query})["sizes"]
        clip, left = read_octave_quantile(released.value, 0.5), (1 - sizes_share) * left
    query = Query(Bound(clip, size), left / rounds)
    for t in range(1, rounds + 1):
        released = run.release(f"fedavg-round-{t}", LocalUpdate(model, ridge, intercept), {"update": query})["update"]
        model = model + step / n * released.value
    if not intercept:
        model[-1] = 0.0  # nothing but noise
    run.derive("linear-model", {"model": model})
    return LinearModel(model[:-1], float(model[-1]))


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
        return {"update": Vectors(move[:, :, 0]), "sizes": Counts(find_octaves(np.linalg.norm(move, axis=1)), CELLS)}
