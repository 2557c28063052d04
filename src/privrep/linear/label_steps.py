"""Local steps of the passes that find the prior of classifiers' heads: gradients, losses, trust.

Heads are fitted by `heads.label_posterior`. Each user's numbers are a function of its own rows, to the bit.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, replace

import numpy as np

from privrep.data.sparse import SparseRows
from privrep.errors import InputError
from privrep.heads.classification import fit_class_own
from privrep.heads.label_modes import find_mode, leave_out
from privrep.heads.label_posterior import LabelFits, fit_labels, iterate_users, moderate, stretch
from privrep.heads.label_spaces import LabelRows
from privrep.heads.posterior import make_images
from privrep.linear.gradient_parts import Part, join_parts, make_between_part, make_within_part
from privrep.linear.panel_steps import check_shapes
from privrep.linear.steps import WIDE_CELLS, WIDE_LOWEST, find_octaves
from privrep.local.least_squares import move_users_last, sum_columns, sum_rows
from privrep.local.losses import Loss
from privrep.local.prior import PriorMean
from privrep.local.transform import FeatureTransform
from privrep.privacy.bounds import Contributions, Losses
from privrep.privacy.contributions import Counts, Vectors
from privrep.privacy.protocol import Step, StepSpec, UserBatch
from privrep.typing import Array, Floats, Matrix, Vector

LOOSE = 4.0  # variance of levels of users who know nothing of others: about what one more row of each class is worth
FREE = 1e4  # the largest variance of levels
STEEP = 10.0  # variance that slopes explain, from which on modes of candidates are far from each other
OWN_FEWEST = 4  # rows from which on a user compares its head with a classifier of its own


def find_level_variance(mean: PriorMean, level: float, rows: int) -> Array:
    """Return the variance of levels of users with this many rows, (outputs,); zero without intercepts.

    Args:
        mean: the prior mean of the outputs.
        level: variance of levels around it.
        rows: of each user.
    """
    if not mean.intercept:
        return np.zeros(mean.slopes.shape[1])
    return np.minimum(level + mean.level_variance(rows), FREE)  # a system of equations that is never quite singular


def fit_around(
    mean: PriorMean,
    factor: Array,
    own: bool,
    level: float,
    X: Floats | SparseRows,
    y: Floats,
    loss: Loss,
    left: bool = True,
) -> LabelFits:
    """Return the heads of users around a prior mean.

    Args:
        mean: of the outputs.
        factor: the directions along which slopes vary, (d, p).
        own: whether slopes turn around a user's own mean row.
        level: variance of levels.
        X: rows (users, m, d).
        y: codes of labels (users, m).
        loss: what heads minimise.
        left: whether to leave labels out.
    """
    check_shapes(X, np.zeros((*y.shape, loss.outputs)), mean, features=(factor,))
    images = make_images(X, factor, mean, own)
    return fit_labels(mean.predict_users(X), images, y, loss, find_level_variance(mean, level, X.shape[1]), left=left)


@dataclass(frozen=True)
class LabelResidual:
    """A step for targets, asked about what a prior mean and a user's own level leave of labels.

    Each output makes one target: minus the derivative of the loss by it.
    """

    step: Step
    mean: PriorMean
    loss: Loss
    level: float

    @property
    def spec(self) -> StepSpec:
        return replace(self.step.spec, fill=self.mean.fill)

    def __call__(self, batch: UserBatch) -> Mapping[str, Contributions | Losses]:
        """Return the contributions of the step inside."""
        none = np.zeros((len(self.mean.slopes), 0))
        fits = fit_around(self.mean, none, True, self.level, batch.X, batch.y, self.loss, left=False)
        left = np.ascontiguousarray(fits.pull.T)
        targets = left[:, :, 0] if self.loss.outputs == 1 else left
        return self.step(replace(batch, y=targets.astype(batch.y.dtype)))


@dataclass(frozen=True)
class LabelGradient:
    """`CommonGradient` of labels: gradients of the likelihood around a prior mean of outputs.

    The derivative of a user's marginal likelihood by the prior mean of its rows is K^-1 times a difference: the
    posterior mean of its outputs less the prior mean. The curvature is about (K + W^-1)^-1 (see
    `heads.label_posterior`).
    """

    mean: PriorMean
    transform: FeatureTransform
    loss: Loss
    factor: Matrix  # (d, p)
    level: float
    typical_rows: float
    within_tail: float
    between_tail: float
    full: bool

    def __post_init__(self) -> None:
        numbers = self.level, self.within_tail, self.between_tail
        if not (self.typical_rows > 0 and all(0 <= number < math.inf for number in numbers)):
            raise InputError("variances and tails of curvatures are 0 or more, and users have rows. Got other numbers.")

    @property
    def spec(self) -> StepSpec:
        floats = self.mean.slopes.size + self.factor.size
        return StepSpec(accepts_sparse=True, fill=self.mean.fill, floats_per_user=floats)

    def __call__(self, batch: UserBatch) -> dict[str, Contributions]:
        """Return `within`, `sizes` and, with intercepts, `between` of each user."""
        X: Floats | SparseRows = batch.X
        z, mean, m = self.transform, self.mean, X.shape[1]
        turned = None if z.whitening is None else z.whitening.T
        check_shapes(
            X, np.zeros((*batch.y.shape, self.loss.outputs)), features=(self.factor, z.scale, z.whitening, turned)
        )
        fits = fit_around(mean, self.factor, False, self.level, X, batch.y, self.loss, left=False)
        pull = np.ascontiguousarray(fits.pull.T)  # (users, m, outputs)
        weight, variance = (sum_columns(part) / self.loss.outputs for part in (fits.curve, fits.variance))
        whole = sum_rows(weight)
        left = sum_rows(weight * np.maximum(1 - weight * variance, 0.0))  # what own heads leave of the weight
        share = np.clip(left / np.maximum(whole, 1e-300) * m / max(m - mean.intercept, 1), 0.0, 1.0)
        if not mean.intercept:
            asked = share * whole / m, False, self.full, self.within_tail
            return join_parts({"within": make_within_part(X, z, pull, *asked)})
        lasting = whole * share if self.factor.shape[1] else whole
        sums = np.ones((1, m)) @ pull
        scale = lasting / (1 + float(find_level_variance(mean, self.level, m).mean()) * lasting)
        between = make_between_part(X, mean, sums, scale, self.typical_rows, self.full, self.between_tail)
        return join_parts({"within": self._within(X, pull, share * whole / m, sums, scale), "between": between})

    def _within(self, X: Floats | SparseRows, pull: Array, weight: Array, sums: Array, scale: Array) -> Part:
        """Return the gradient by slopes, of rows less what their user's mean would be after very many rows.

        Args:
            X: rows (users, m, d).
            pull: of each row, (users, m, outputs).
            weight: of a row in the curvature, (users,).
            sums: of the pulls of a user's rows, (users, 1, outputs).
            scale: weight of a user's mean row in the curvature, (users,).
        """
        m, z = X.shape[1], self.transform
        moved = pull - sums / m
        if isinstance(X, SparseRows):
            return make_within_part(X, z, moved, weight, True, self.full, self.within_tail)
        left = self.mean.scatter_of_means(X, z)
        ratio = np.sqrt(np.divide(scale, weight, out=np.zeros_like(scale), where=weight > 0))
        return make_within_part(X, z, moved, weight, True, self.full, self.within_tail, (left, sums, ratio))


@dataclass(frozen=True)
class LabelLosses:
    """`HeadLosses` of labels: each user's losses by candidates, each label left out in turn, summed over its rows.

    Candidates that are not `common` lie around zero, as for users who know nothing of others. Others lie around the
    prior mean. Its level and contexts are stretched from the variance of levels that it was learned with to the
    candidate's.
    """

    mean: PriorMean
    first: Matrix  # (d, k)
    second: Matrix  # (d, p)
    factor: Vector  # (candidates,): 0: none, 1: `first`, 2: `second`
    slopes: Vector  # (candidates,)
    level: Vector  # (candidates,)
    own: Vector  # (candidates,): 1 or 0
    common: Vector  # (candidates,): 1 or 0
    loss: Loss
    learned: float
    tail: float

    @property
    def spec(self) -> StepSpec:
        floats = self.second.size + self.first.size
        return StepSpec(accepts_sparse=True, fill=self.mean.fill, floats_per_user=floats)

    def __post_init__(self) -> None:
        if len({len(self.factor), len(self.slopes), len(self.level), len(self.own), len(self.common)}) > 1:
            raise InputError("candidates have a factor, slopes, a level and an origin each; give as many of each.")
        fine = np.isin(self.factor, (0, 1, 2)).all() and (self.slopes >= 0).all() and (self.level >= 0).all()
        if not (fine and self.learned >= 0):
            raise InputError("a candidate has one of three factors; slopes and levels vary by 0 or more.")

    def __call__(self, batch: UserBatch) -> dict[str, Contributions]:
        """Return `losses`, `sizes` and `votes` of each user."""
        X: Floats | SparseRows = batch.X
        y: Floats = batch.y
        users, m, _ = X.shape
        check_shapes(X, np.zeros((*y.shape, self.loss.outputs)), self.mean, features=(self.first, self.second))
        offset, images = self.mean.predict_users(X), self._images(X)
        still = self.mean.scale_levels(0.0).predict_users(X)
        losses = np.empty((users, len(self.factor)))
        for some in iterate_users(
            users, m, max((each.shape[2] for each in images.values()), default=0), offset.shape[2]
        ):
            rows = {kind: LabelRows.of(each[some]) for kind, each in images.items()}
            losses[some] = self._losses(
                rows, move_users_last(still[some]), move_users_last(offset[some]), self.loss.signs(y[some])
            ).T
        moved = losses - np.matmul(losses[:, None, :], np.full((len(self.factor), 1), 1 / len(self.factor)))[:, 0]
        cells = find_octaves(np.sqrt((moved**2).sum(axis=1)), WIDE_LOWEST, WIDE_CELLS)[:, None]
        joined = np.concatenate([moved, np.full((users, 1), self.tail * m)], axis=1)
        vote = np.where(losses.min(axis=1) < losses.max(axis=1), losses.argmin(axis=1), -1)[:, None]
        counts = Counts(vote, len(self.factor))
        return {"losses": Vectors(joined), "sizes": Counts(cells, WIDE_CELLS), "votes": counts}

    def _kind(self, i: int) -> tuple[int, bool]:
        """Return the factor of candidate i, and whether slopes along it turn around a user's own mean row."""
        number = int(self.factor[i])
        return number, number > 0 and bool(self.own[i] or not self.common[i])

    def _images(self, X: Floats | SparseRows) -> dict[tuple[int, bool], Array]:
        """Return the images (users, m, p) of rows (users, m, d) by each kind of candidate."""
        factors = np.zeros((X.shape[2], 0)), self.first, self.second
        kinds = {self._kind(i) for i in range(len(self.factor))}
        return {kind: make_images(X, factors[kind[0]], self.mean, kind[1]) for kind in sorted(kinds)}

    def _losses(self, rows: Mapping[tuple[int, bool], LabelRows], still: Array, mean: Array, signs: Floats) -> Array:
        """Return what users lose by each candidate, (candidates, users).

        Args:
            rows: of the users, by kind of candidate.
            still: prior mean of outputs without level and contexts, (outputs, m, users).
            mean: prior mean of outputs, of the same shape.
            signs: of labels, of the same shape.
        """
        losses = np.empty((len(self.factor), mean.shape[2]))
        near: dict[bool, Array] = {}
        for i, common in enumerate(self.common > 0):
            variance, offset = min(float(self.level[i]), FREE if common else LOOSE), np.zeros_like(mean)
            if common:
                offset = still + (stretch(self.learned, variance) if self.mean.intercept else 1.0) * (mean - still)
            level = find_level_variance(self.mean, variance, mean.shape[1])
            mine, slopes = rows[self._kind(i)], float(self.slopes[i])
            space, steady = mine.with_prior(slopes, level), slopes * mine.width < STEEP
            mode = find_mode(space, offset, signs, near.get(bool(common)), self.loss, steady)
            near[bool(common)] = mode.outputs
            left = moderate(*leave_out(space, offset, mode), self.loss)
            losses[i] = sum_rows(self.loss.values(left, signs))
        return losses


@dataclass(frozen=True)
class LabelVotes:
    """Votes of users with a few rows between a head of this prior and a classifier of their own, by leave-one-out.

    A user has one vote, and none where both do alike.
    """

    mean: PriorMean
    factor: Matrix
    own: bool
    level: float
    scale: Vector  # (d,): of the features, in classifiers of one's own
    loss: Loss

    @property
    def spec(self) -> StepSpec:
        return StepSpec(fill=self.mean.fill, floats_per_user=self.factor.size)

    def __call__(self, batch: UserBatch) -> dict[str, Contributions]:
        """Return `votes` of each user: cell 0 for the head of the prior, cell 1 for a classifier of its own."""
        X: Floats = batch.X.astype(np.float64, copy=False)
        users, m, _ = X.shape
        vote = np.full(users, -1)
        if m >= OWN_FEWEST:
            check_shapes(X, np.zeros((*batch.y.shape, self.loss.outputs)), features=(self.scale,))
            fits = fit_around(self.mean, self.factor, self.own, self.level, X, batch.y, self.loss)
            signs = self.loss.signs(batch.y)
            heads = sum_rows(self.loss.values(moderate(fits.left, fits.left_variance, self.loss), signs)) / m
            alone = fit_class_own(X, signs, self.loss, self.scale, self.mean.intercept).loss
            vote = np.where(heads < alone, 0, np.where(alone < heads, 1, -1))
        return {"votes": Counts(vote[:, None], 2)}


@dataclass(frozen=True)
class LabelTrust:
    """The evidence about how far outputs should be believed: of heads, each label left out, and of the prior mean
    alone.

    For each of the two a user sends derivatives of its loss by a factor of its outputs, at `known` and at `new`. They
    are minus the first and the second derivative, whose ratio is Newton's step on the factor.
    """

    mean: PriorMean
    factor: Matrix
    own: bool
    level: float
    loss: Loss
    known: float
    new: float

    @property
    def spec(self) -> StepSpec:
        return StepSpec(accepts_sparse=True, fill=self.mean.fill, floats_per_user=self.factor.size)

    def __call__(self, batch: UserBatch) -> dict[str, Contributions]:
        """Return `trust` of each user: the two derivatives of heads, then the two of the prior mean."""
        X: Floats | SparseRows = batch.X
        fits = fit_around(self.mean, self.factor, self.own, self.level, X, batch.y, self.loss)
        signs = self.loss.signs(batch.y)
        told = float(X.shape[1] > 1 or not self.mean.intercept)  # by other rows, of which there may be none
        left = moderate(fits.left, fits.left_variance, self.loss)
        parts = [told * part for part in self._derivatives(left, signs, self.known)]
        parts += self._derivatives(self._new(X), signs, self.new)
        return {"trust": Vectors(np.stack(parts, axis=1))}

    def _new(self, X: Floats | SparseRows) -> Array:
        """Return moderated outputs of rows whose users nothing is known of, (outputs, m, users).

        Args:
            X: rows (users, m, d).
        """
        images = make_images(X, self.factor, self.mean, False)
        slopes = (images**2).sum(axis=2) if images.shape[2] else np.zeros(X.shape[:2])
        variance = find_level_variance(self.mean, self.level, 1)[:, None, None] + np.ascontiguousarray(slopes.T)
        return moderate(move_users_last(self.mean.predict_each_row(X)), variance, self.loss)

    def _derivatives(self, outputs: Array, signs: Floats, factor: float) -> list[Array]:
        """Return minus the first and the second derivative of users' losses by a factor of their outputs, (users,)
        each.

        Args:
            outputs: (outputs, m, users).
            signs: of the labels, of the same shape.
            factor: at which derivatives are taken.
        """
        pull, curve = self.loss.differentiate(factor * outputs, signs)
        return [sum_rows(sum_columns(part)) for part in (pull * outputs, curve * outputs**2)]
