"""What users compute in the passes of a classifier: those of `steps`, with labels in place of targets."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import ClassVar

import numpy as np

from privrep.data.sparse import SparseRows
from privrep.linear.steps import LeaveOneOutGradient, projected
from privrep.local.least_squares import sum_columns, sum_rows, without_mean
from privrep.local.losses import Loss, fit_classes
from privrep.local.transform import FeatureTransform
from privrep.privacy.bounds import Contributions, Losses
from privrep.privacy.contributions import Vectors
from privrep.privacy.protocol import Step, StepSpec, UserBatch
from privrep.typing import Floats, Matrix


@dataclass(frozen=True)
class Encoded:
    """A step for targets, asked of labels: 1 and -1 for two classes, a target for each class where there are more.

    The mean of y x over a user's rows points along that user's head for labels as for numbers, whatever their link to
    the features, if those are normal; so the pair moments of labels hold the representation as well.
    """

    step: Step
    classes: int

    @property
    def spec(self) -> StepSpec:
        return self.step.spec

    def __call__(self, batch: UserBatch) -> Mapping[str, Contributions | Losses]:
        y: Floats = batch.y
        if self.classes == 2:
            targets = np.where(y == 1, 1.0, 0.0) - np.where(y == 0, 1.0, 0.0)
        else:
            targets = np.where(y[:, :, None] == np.arange(self.classes), 1.0, 0.0)
        return self.step(replace(batch, y=targets.astype(y.dtype)))


def encoded(step: Step, loss: Loss | None) -> Step:
    """The step itself, or as labels need it."""
    return step if loss is None else Encoded(step, loss.classes)


@dataclass(frozen=True)
class ClassGradient(LeaveOneOutGradient):
    """`LeaveOneOutGradient` of another loss than the square; `ridge` is the precision of the heads' prior.

    A row pulls at U by the derivative of its loss at the head fitted without it. In place of the heads' second moment
    comes the loss's second derivative in U: heads weighted by the curvature at their rows. Features outside the span of
    U are not related to that curvature if they are normal, so that their ratio is Newton's step.
    """

    loss: Loss
    centre: Matrix | None = None

    def _pull(self, P: Floats, y: Floats) -> tuple[Floats, Floats]:
        m = P.shape[1]
        signs = self.loss.signs(y)
        fit = fit_classes(P, signs, self.loss, self.ridge, self.intercept, centre=self.centre)
        pull = sum_columns(self.loss.pulls(fit.loo_outputs, signs)[0][:, None] * fit.loo_heads) / m
        moment = self.loss.curvature(fit.loo_outputs, signs, fit.loo_heads) / m
        return without_mean(pull) if self.intercept else pull, moment


@dataclass(frozen=True)
class PooledGradient:
    """Of one classifier for everybody on the representation, `centre` (outputs, k + 1): minus the gradient of a user's
    mean loss, and its curvature in each coordinate, as one vector: their ratio is Newton's step."""

    spec: ClassVar[StepSpec] = StepSpec(accepts_sparse=True)
    U: Matrix
    transform: FeatureTransform
    intercept: bool
    loss: Loss
    centre: Matrix

    def __call__(self, batch: UserBatch) -> dict[str, Contributions]:
        X: Floats | SparseRows = batch.X
        y: Floats = batch.y
        m = X.shape[1]
        P = projected(X, self.transform, self.U, self.intercept)
        rows = np.concatenate([P, np.full((1, *P.shape[1:]), float(self.intercept))])
        signs = self.loss.signs(y)
        outputs = np.stack([sum_columns(rows * head[:, None, None]) for head in self.centre])
        pull, curve = self.loss.pulls(outputs, signs)
        gradient = [sum_rows(rows[a] * pull[o]) / m for o in range(len(pull)) for a in range(len(rows))]
        mean, most = sum_columns(curve) / len(pull), curve.max(axis=0)
        bend = np.maximum(mean, 0.5 * most) / m  # by the mean alone, outputs that bend more than others overshoot
        moments = [sum_rows(bend * row * row) for row in rows]
        return {"pooled": Vectors(np.stack([*gradient, *moments], axis=1))}
