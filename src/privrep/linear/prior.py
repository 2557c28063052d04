"""What classifiers' heads have in common: a public prior of them, where its centre lies and how strong it is.

The centre is one classifier for everybody on the representation, in features around each user's own mean. It is found
by a few of Newton's steps, each a release of gradient and curvature. The first is a look, for little: where heads have
nothing in common that stands out from its noise, that is the end of it.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from scipy.stats import chi2

from privrep.heads.classification import PRECISIONS, ClassPrior
from privrep.linear.class_steps import PooledGradient
from privrep.linear.transform import CLEAR
from privrep.local.losses import Loss
from privrep.local.transform import FeatureTransform
from privrep.privacy.billboard import Release
from privrep.privacy.bounds import DIRECTION_ONLY, Bound
from privrep.privacy.calibration import Query
from privrep.privacy.run import Run
from privrep.typing import Array

PURPOSES = dict.fromkeys(("centre", "heads-centre"), "what heads have in common")
"""What the pages that this module asks for are for; see `method.Method.purposes`."""

TOO_KIND = (
    1.4  # to a weak prior of one output is leave-one-out by a Newton step: it said 0.27 where 0.35 to 0.5 was best
)
MOST_DIFFERENT = 0.25  # losses of a user's with different precisions, in norm


@dataclass(frozen=True)
class Common:
    """The centre of users' heads, as weights on all features: representations change, and it is seen through each."""

    weights: Array  # (d, outputs), in the coordinates of a transform
    intercepts: Array  # (outputs,), for features around a user's mean

    def on(self, basis: Array, spread: Array | float = 1.0) -> Array:
        """(outputs, k + 1) in the coordinates of a basis whose columns are `spread` long, the intercept last."""
        return np.column_stack([self.weights.T @ basis / spread, self.intercepts])


def newton_step(
    run: Run,
    page: str,
    basis: Array,
    transform: FeatureTransform,
    loss: Loss,
    intercept: bool,
    common: Common | None,
    mu_squared: float,
) -> Common | None:
    """A step towards the classifier that suits everybody best; as it was where the step is lost in its noise.

    The step is shrunk by how much of its length, in the metric of the curvature, is noise, whose variance is public.
    """
    k = basis.shape[1]
    here = np.zeros((loss.outputs, k + 1)) if common is None else common.on(basis)
    step = PooledGradient(basis, transform, intercept, loss, here)
    query = Query(Bound(DIRECTION_ONLY, (loss.outputs + 1) * (k + 1)), mu_squared)
    move = _move(run.release(page, step, {"pooled": query})["pooled"], loss.outputs, k + 1)
    if move is None:
        return common
    there = here + move
    return Common(basis @ there[:, :k].T, there[:, k])


def _move(released: Release, outputs: int, columns: int) -> Array | None:
    sigma = released.sigma
    gradient, curvature = np.split(released.value.reshape(outputs + 1, columns), [outputs])
    if curvature.max() < CLEAR * sigma:
        return None
    bend = np.maximum(curvature, max(0.05 * float(curvature.max()), 3 * sigma))
    length = float((gradient**2 / bend).sum())
    noise = outputs * sigma**2 * float((1 / bend).sum())
    if length < noise * chi2.ppf(BELIEVED, outputs * columns) / (outputs * columns):
        return None
    move: Array = (1 - noise / length) * gradient / bend
    return move * min(1.0, LONGEST / float(np.abs(move).max()))


BELIEVED = 0.995  # a move is, that noise alone would exceed with the rest of this probability
LONGEST = 3.0  # that a weight moves in one step


def find_precision(
    run: Run,
    page: str,
    matrix: Array,
    loss: Loss,
    intercept: bool,
    centre: Array | None,
    mu_squared: float,
) -> float:
    """The precision with which heads do best by leave-one-out, all users together.

    Where a parabola through the users' losses, over the precisions' logarithms, is least. A curvature of three times
    the noise more keeps the answer near the middle one where there is little but noise.
    """
    query = Query(Bound(MOST_DIFFERENT, len(PRECISIONS)), mu_squared)
    step = ClassPrior(matrix, intercept, loss, centre)
    losses = run.release(page, step, {"precisions": query})["precisions"]
    high, middle, low = (float(value) for value in losses.value)
    curvature = max(high + low - 2 * middle, 0.0) + 3 * losses.sigma
    place = float(np.clip((low - high) / (2 * curvature), -1.5, 1.5))  # in steps from the middle towards high
    return float(PRECISIONS[1] * (PRECISIONS[0] / PRECISIONS[1]) ** place)
