"""What classifiers are compared with. All but `alone_classes`, in which nothing is shared, are NOT PRIVATE and say so.

Exact sums of users' contributions are read here, which nothing that claims privacy may do.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from privrep.data.table import UserTable
from privrep.heads.classification import fit_class_shared
from privrep.linear.class_steps import Encoded
from privrep.linear.references import PlainSums, subspace_distance
from privrep.linear.steps import PairMoments, project_centred, pull_rows
from privrep.local.least_squares import subtract_mean, sum_columns
from privrep.local.losses import Loss, fit_classes
from privrep.local.representation import Representation
from privrep.local.transform import FeatureTransform
from privrep.privacy.bounds import Contributions
from privrep.privacy.columns import SparseColumns
from privrep.privacy.contributions import Vectors
from privrep.privacy.moments import packed_size, symmetrise, unpack
from privrep.privacy.protocol import StepSpec, UserBatch, Users
from privrep.typing import Array, Floats


@dataclass(frozen=True)
class LinearClassifiers:
    """Outputs <x, weights> + intercept of each user, or of one model for everybody (one row)."""

    weights: Array  # (users or 1, outputs, d)
    intercepts: Array  # (users or 1, outputs)

    def outputs(self, X: Floats, users: NDArray[np.int64]) -> Array:
        """(rows, outputs) for rows of the users at these positions."""
        who = np.zeros_like(users) if len(self.weights) == 1 else users
        return np.asarray(np.einsum("rd,rod->ro", X, self.weights[who]) + self.intercepts[who])


def fedrep_classes(
    users: Users, rank: int, loss: Loss, *, intercept: bool = True, precision: float = 0.5, rounds: int = 100
) -> Representation:
    """FedRep (Collins et al. 2021) of another loss than the square, full participation. NOT PRIVATE.

    Every round each user fits its head and takes the gradient of its mean loss on the same rows, all of them; the
    server steps by one over the largest curvature, the longest step that is safe, and takes a QR. Stops early once a
    round moves nothing.
    """
    d, plain = users.facts.features, FeatureTransform.plain(users.facts.features)
    add_up, step = PlainSums(users), Encoded(PairMoments(plain, intercept), loss.classes)
    U = np.linalg.eigh(symmetrise(add_up(step, {"moments": d**2})["moments"]))[1][:, ::-1][:, :rank]
    sizes = {"gradient": d * rank, "curvature": packed_size(rank)}
    for _ in range(rounds):
        sums = add_up(FullClassGradient(U, intercept, precision, loss), sizes)
        largest = float(np.linalg.eigvalsh(unpack(sums["curvature"]))[-1])
        before, gradient = U, sums["gradient"].reshape(rank, d).T
        U, _ = np.linalg.qr(U + gradient / max(largest, 1e-300))
        if subspace_distance(before, U) < 1e-5:
            break
    return Representation(U, plain, 0.0)


@dataclass(frozen=True)
class FullClassGradient:
    """Head and (minus) gradient of every user on all its rows."""

    U: Array
    intercept: bool
    precision: float
    loss: Loss

    @property
    def spec(self) -> StepSpec:
        return StepSpec(floats_per_user=self.U.size)

    def __call__(self, batch: UserBatch) -> dict[str, Contributions]:
        X: Floats = batch.X
        y: Floats = batch.y
        users, m, d = X.shape
        k = self.U.shape[1]
        plain, signs = FeatureTransform.plain(d), self.loss.signs(y)
        P = project_centred(X, plain, self.U, self.intercept)
        fit = fit_classes(P, signs, self.loss, self.precision, self.intercept)
        outputs = np.stack([sum_columns(P * head[:, None, :]) for head in fit.heads]) + fit.intercepts[:, None, :]
        heads = np.broadcast_to(fit.heads[:, :, None, :], (self.loss.outputs, k, m, users))
        pull = sum_columns(self.loss.differentiate(outputs, signs)[0][:, None] * heads) / m
        gradient = pull_rows(X, plain, subtract_mean(pull) if self.intercept else pull)
        assert not isinstance(gradient, SparseColumns), "dense rows"
        curvature = self.loss.curvature(outputs, signs, heads) / m
        return {"gradient": Vectors(np.asarray(gradient).reshape(users, -1)), "curvature": Vectors(curvature)}


def pooled_classes(table: UserTable, loss: Loss, *, penalty: float = 1.0) -> LinearClassifiers:
    """One logistic or softmax regression on everybody's rows. NOT PRIVATE."""
    from sklearn.linear_model import LogisticRegression

    model = LogisticRegression(C=1 / penalty, max_iter=1000).fit(table.X, table.y.astype(np.int64))
    weights, intercepts = np.zeros((loss.outputs, table.n_features)), np.full(loss.outputs, -30.0)
    present = np.arange(1) if loss.outputs == 1 else model.classes_
    weights[present], intercepts[present] = model.coef_, model.intercept_
    return LinearClassifiers(weights[None], intercepts[None])


def alone_classes(
    table: UserTable, loss: Loss, *, intercept: bool = True, precisions: tuple[float, ...] = (64.0, 16.0, 4.0, 1.0)
) -> LinearClassifiers:
    """Every user's own logistic or softmax regression on all features, its penalty by the user's own leave-one-out:
    nothing is shared, nothing is spent."""
    d = table.n_features
    weights, intercepts = np.zeros((table.n_users, loss.outputs, d)), np.zeros((table.n_users, loss.outputs))
    for users, size in table.positions_by_size():
        for part in np.array_split(users, max(len(users) * max(size, d) // 2048, 1)):
            X, y = (values.astype(np.float64, copy=False) for values in table.group(part, size))
            fits = [fit_class_shared(X, loss.signs(y), loss, np.eye(d), intercept, p) for p in precisions]
            best = np.stack([fit.loss for fit in fits]).argmin(axis=0)
            weights[part] = np.stack([fit.weights for fit in fits])[best, np.arange(len(part))]
            intercepts[part] = np.stack([fit.intercept for fit in fits])[best, np.arange(len(part))]
    return LinearClassifiers(weights, intercepts)
