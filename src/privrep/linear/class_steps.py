"""Local steps of classifiers: the steps of `steps`, with labels in place of targets."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace

import numpy as np

from privrep.data.sparse import SparseRows
from privrep.linear.steps import LeaveOneOutGradient
from privrep.local.least_squares import subtract_mean, sum_columns
from privrep.local.losses import Loss, fit_classes
from privrep.local.prior import PriorMean
from privrep.privacy.bounds import Contributions, Losses
from privrep.privacy.protocol import Step, StepSpec, UserBatch
from privrep.typing import Floats


@dataclass(frozen=True)
class Encoded:
    """A step for targets, asked about labels: 1 and -1 for two classes, one target for each class where there are more.

    The mean of y x over a user's rows points along that user's head for labels as for numbers. That holds for any link
    to normal features. So the pair moments of labels hold the representation as well.
    """

    step: Step
    classes: int

    @property
    def spec(self) -> StepSpec:
        """Return the spec of the step inside."""
        return self.step.spec

    def __call__(self, batch: UserBatch) -> Mapping[str, Contributions | Losses]:
        """Return the contributions of the step inside, with numbers in place of the codes of labels."""
        y: Floats = batch.y
        if self.classes == 2:
            targets = np.where(y == 1, 1.0, 0.0) - np.where(y == 0, 1.0, 0.0)
        else:
            targets = np.where(y[:, :, None] == np.arange(self.classes), 1.0, 0.0)
        return self.step(replace(batch, y=targets.astype(y.dtype)))


def encode_step(step: Step, loss: Loss | None) -> Step:
    """Return the step for labels of this loss, or the step itself where the loss is None."""
    return step if loss is None else Encoded(step, loss.classes)


@dataclass(frozen=True)
class ClassGradient(LeaveOneOutGradient):
    """`LeaveOneOutGradient` of another loss than the square; `ridge` is the precision of the heads' prior.

    Heads lie around a prior mean of the outputs, with levels of variance `level`. A row pulls at U by the derivative of
    its loss at the head fitted without it. The loss's second derivative in U takes the place of the heads' second
    moment:
    heads weighted by the curvature at their rows. Features outside the span of U are not related to that curvature if
    they are normal, so the ratio of the two is Newton's step.
    """

    loss: Loss
    mean: PriorMean
    level: float

    @property
    def spec(self) -> StepSpec:
        """Return the spec of the gradient, with the prior mean's values for missing features."""
        return replace(super().spec, fill=self.mean.fill)

    def _pulls(self, X: Floats | SparseRows, P: Floats, y: Floats) -> tuple[Floats, Floats]:
        """Return how each row pulls at U, (k, m, users), and the packed second derivative, (users, packed k).

        Args:
            X: rows (users, m, d).
            P: the rows' images (k, m, users).
            y: codes of labels (users, m).
        """
        self.mean.check_rows(X.shape[2], self.loss.outputs)
        m = P.shape[1]
        signs = self.loss.signs(y)
        offset = np.ascontiguousarray(self.mean.predict_users(X).transpose(2, 1, 0))
        fit = fit_classes(P, signs, self.loss, self.ridge, self.intercept, offset=offset, level=self.level)
        pull = sum_columns(self.loss.differentiate(fit.loo_outputs, signs)[0][:, None] * fit.loo_heads) / m
        moment = self.loss.curvature(fit.loo_outputs, signs, fit.loo_heads) / m
        return subtract_mean(pull) if self.intercept else pull, moment
