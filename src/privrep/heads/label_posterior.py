"""Heads of classifiers as posterior means, for many users of equal size at once, with leave-one-out.

A user's outputs are f = offset + b + P v, one such line for each output: the offset is the prior mean, b ~ N(0, level)
the user's own level, v ~ N(0, I) its slopes along the public factor, P the user's rows less an origin, times the
factor. With K = level 11^T + P P^T the mode solves f - offset = K a, where a is minus the derivative of the loss by
f. Newton's method takes a fixed number of steps, in the smaller of the two spaces, rows or coordinates. At the mode W
is the loss's second derivative and S = (K^-1 + W)^-1 the variance that is left of f.

The posterior of logits is skewed, and its mean lies farther out than its mode: by S t / 2, t_j the third derivative of
the log-likelihood times S_jj (Tierney and Kadane 1986). A head is the mean so corrected. Without row j the output of
the row is f_j - s_j a_j with variance s_j = S_jj / (1 - W_j S_jj), to first order; users with few rows,
or with softmax, are fitted anew.

Probabilities average over what is left to doubt: an output of variance s counts 1 / sqrt(1 + pi s / 8) of itself
(MacKay 1992). Each user's numbers are a function of its own rows to the last bit (see `local.least_squares`).
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np

from privrep.data.sparse import SparseRows
from privrep.heads.posterior import LARGEST, MOST_PACKED, images_of, origins_of
from privrep.local.losses import FARTHEST, Loss
from privrep.local.prior import LabelPrior
from privrep.privacy.contributions import pack
from privrep.typing import Array, Floats

MODERATE = math.pi / 8  # of a variance, in the share of an output that probabilities count
NEWTON_STEPS = 6  # for one output of the log loss
MORE_STEPS = 6  # for several, a sweep each
HINGE_STEPS = 12
FEW = 6  # rows up to which leave-one-out takes fits of its own
FOLDS = 3  # fits for softmax with more rows, each without every so many labels


@dataclass(frozen=True)
class LabelFits:
    """Modes of users with equally many rows, and what leaving each label out would have given."""

    level: Array  # (users, outputs)
    coordinates: Array  # (users, outputs, p): v
    outputs: Array  # (outputs, users, m): of the mode
    pull: Array  # (outputs, users, m): K times which is the mean, less the offset
    curve: Array  # (outputs, users, m): W
    variance: Array  # (outputs, users, m): S_jj
    left: Array  # (outputs, users, m): outputs of each row without its label
    left_variance: Array  # (outputs, users, m)
    covariance: Array | None  # (users, outputs, 1 + p, 1 + p): of (b, v), where it was asked for


def moderated(outputs: Array, variance: Array, loss: Loss) -> Array:
    """Return outputs as probabilities count them, given the variance that is left of each.

    Args:
        outputs: (outputs, ...).
        variance: of the same shape. All outputs of a row shrink alike, so that the largest stays so.
        loss: hinge outputs stand for no probabilities, and stay.
    """
    if loss.name != "log":
        return outputs
    return outputs * trust_of(variance)


def trust_of(variance: Array) -> Array:
    """Return the share of its outputs that a row's probabilities count, from variances (outputs, ...).

    Of several outputs differences count, whose variance is twice as large.
    """
    L = len(variance)
    total = variance[0].copy()
    for each in variance[1:]:
        total += each
    several = 2.0 if L > 1 else 1.0
    return 1 / np.sqrt(1 + MODERATE * several * np.maximum(total / L, 0.0))


def stretch(learned: float, level: float) -> float:
    """Return the factor of a prior mean that keeps probabilities the same on average over users.

    Args:
        learned: variance of levels with which the mean was learned.
        level: variance of levels that it is used with.
    """
    return math.sqrt((1 + MODERATE * level) / (1 + MODERATE * learned))


def fit_labels(
    offset: Array,
    images: Array,
    y: Floats,
    loss: Loss,
    level: Array,
    covariance: bool = False,
    near: LabelFits | None = None,
) -> LabelFits:
    """Return the heads of users with equally many rows.

    Args:
        offset: the prior mean of the outputs, (users, m, outputs).
        images: rows less an origin, times the factor, (users, m, p).
        y: codes of labels, (users, m).
        loss: what is minimised.
        level: the variance of levels, (outputs,); zero: none.
        covariance: whether to return the covariance of what is left to doubt.
        near: fits of the same labels with another prior, from which fewer steps are taken.
    """
    signs = loss.signs(y.T)  # (outputs, users, m)
    m, p = images.shape[1:]
    largest = np.abs(images).max(axis=(1, 2), initial=0.0)
    lost = ~(largest**2 * m * max(p, 1) < LARGEST)
    images = np.where(lost[:, None, None], 0.0, images) if lost.any() else images
    start = np.ascontiguousarray(offset.transpose(2, 0, 1), dtype=np.float64)
    mode = _Mode.of(start, images, signs, loss, level, None if near is None else near.outputs)
    if m <= FEW or loss.softmax:  # one step is too little where a label is much of what is known
        left, left_variance = _refitted(start, images, signs, loss, level, mode)
    else:
        left_variance = mode.variance / np.maximum(1 - mode.curve * mode.variance, 1e-2)
        left = mode.outputs - left_variance * mode.pull
    heads = [space.head(mode.dual[o]) for o, space in enumerate(mode.spaces)]
    return LabelFits(
        np.stack([head[0] for head in heads], axis=1),
        np.stack([head[1] for head in heads], axis=1),
        mode.outputs,
        mode.dual,
        mode.curve,
        mode.variance,
        left,
        left_variance,
        np.stack([s.covariance(mode.curve[o]) for o, s in enumerate(mode.spaces)], axis=1) if covariance else None,
    )


def _refitted(start: Array, images: Array, signs: Array, loss: Loss, level: Array, mode: _Mode) -> tuple[Array, Array]:
    """Return outputs of each row without its label, and their variances, (outputs, users, m), by fits without it.

    With more rows than FEW, every FOLDS-th label is left out together.
    """
    L, users, m = start.shape
    folds = m if m <= FEW else FOLDS
    known = np.where(np.arange(m) % folds == np.arange(folds)[:, None], 0.0, 1.0)  # (folds, m)
    offsets = np.repeat(start, folds, axis=1)
    without = (signs[:, :, None, :] * known).reshape(L, users * folds, m)
    near = np.repeat(mode.outputs, folds, axis=1)
    fits = _Mode.of(offsets, np.repeat(images, folds, axis=0), without, loss, level, near)
    lines = np.stack([space.line(fits.dual[o]) for o, space in enumerate(fits.spaces)]) + offsets
    left, variance = (each.reshape(L, users, folds, m) for each in (lines, fits.variance))
    fold, row = np.arange(m) % folds, np.arange(m)
    return np.ascontiguousarray(left[:, :, fold, row]), np.ascontiguousarray(variance[:, :, fold, row])


@dataclass(frozen=True)
class _Mode:
    """The mode of users' outputs, and the mean that is taken for it; arrays are (outputs, users, m)."""

    spaces: list[_Space]
    outputs: Array
    pull: Array
    curve: Array
    variance: Array
    dual: Array  # K times which, and the offset, is the mean

    @classmethod
    def of(
        cls, start: Array, images: Array, signs: Array, loss: Loss, level: Array, near: Array | None = None
    ) -> _Mode:
        spaces = _Space.each(images, level)
        outputs = start.copy() if near is None else near.copy()
        for _ in range(_steps(loss) if near is None else (_steps(loss) + 1) // 2):
            pull, curve = loss.pulls(outputs, signs)
            bend = loss.bend(outputs, signs, curve)
            moves = [space.newton(outputs[o] - start[o], pull[o], bend[o]) for o, space in enumerate(spaces)]
            for o, move in enumerate(moves):
                shorter = np.minimum(1.0, FARTHEST / np.maximum(np.abs(move * signs[o]).max(axis=1), 1e-300))
                outputs[o] += shorter[:, None] * move
        pull, curve = loss.pulls(outputs, signs)
        variance = np.stack([space.variance(curve[o]) for o, space in enumerate(spaces)])
        skew = loss.skew(outputs, signs, curve) * variance
        outward = np.stack([space.smooth(skew[o], curve[o]) for o, space in enumerate(spaces)])
        return cls(spaces, outputs, pull, curve, variance, pull + 0.5 * outward)


def _steps(loss: Loss) -> int:
    return HINGE_STEPS if loss.name == "hinge" else NEWTON_STEPS if loss.outputs == 1 else MORE_STEPS


@dataclass(frozen=True)
class _Space:
    """The lines that one output may be of: f - offset = Z u, u ~ N(0, I), Z = (sqrt(level) 1, P)."""

    Z: Array  # (users, m, r)
    across: Array  # its transpose
    level: float
    kernel: Array | None  # K = Z Z^T, where there are fewer rows than coordinates

    @classmethod
    def each(cls, images: Array, level: Array) -> list[_Space]:
        """Return the space of each output, whose levels have these variances; one for all where those are alike."""
        if (level == level[0]).all():
            return [cls.of(images, float(level[0]))] * len(level)
        return [cls.of(images, float(variance)) for variance in level]

    @classmethod
    def of(cls, images: Array, level: float) -> _Space:
        users, m, p = images.shape
        Z = np.concatenate([np.full((users, m, 1), math.sqrt(level)), images], axis=2)
        across = np.ascontiguousarray(Z.transpose(0, 2, 1))
        return cls(Z, across, level, Z @ across if m <= p + 1 else None)

    def newton(self, f: Array, pull: Array, bend: Array) -> Array:
        """Return Newton's step, (users, m), from outputs f less their offset: to K (I + W K)^-1 (W f + pull)."""
        wanted = (bend * f + pull)[:, :, None]
        if self.kernel is None:
            hessian = self.across @ (bend[:, :, None] * self.Z) + np.eye(self.Z.shape[2])
            return np.asarray((self.Z @ np.linalg.solve(hessian, self.across @ wanted))[:, :, 0] - f)
        root = np.sqrt(bend)
        B = root[:, :, None] * self.kernel * root[:, None, :] + np.eye(f.shape[1])
        inside = np.linalg.solve(B, root[:, :, None] * (self.kernel @ wanted))
        return np.asarray((self.kernel @ (wanted - root[:, :, None] * inside))[:, :, 0] - f)

    def smooth(self, values: Array, curve: Array) -> Array:
        """Return (I + W K)^-1 times values (users, m)."""
        right = values[:, :, None]
        if self.kernel is None:
            return np.asarray(values - curve * (self.Z @ (self._inverse(curve) @ (self.across @ right)))[:, :, 0])
        return np.asarray((right - self._weight(curve) @ (self.kernel @ right))[:, :, 0])

    def line(self, dual: Array) -> Array:
        """Return K times values (users, m)."""
        return np.asarray((self.Z @ (self.across @ dual[:, :, None]))[:, :, 0])

    def variance(self, curve: Array) -> Array:
        """Return what is left of each row's variance, (users, m)."""
        if self.kernel is None:
            spread = self.Z @ self._inverse(curve)
            return np.asarray((spread * self.Z).sum(axis=2))
        diagonal = np.ascontiguousarray(self.kernel[:, np.arange(curve.shape[1]), np.arange(curve.shape[1])])
        explained = (self.kernel * (self._weight(curve) @ self.kernel)).sum(axis=1)
        return np.asarray(np.maximum(diagonal - explained, 0.0), dtype=np.float64)

    def _inverse(self, curve: Array) -> Array:
        """Return (I + Z^T W Z)^-1, (users, r, r)."""
        inner = self.across @ (curve[:, :, None] * self.Z) + np.eye(self.Z.shape[2])
        return np.asarray(np.linalg.inv(inner), dtype=np.float64)

    def _weight(self, curve: Array) -> Array:
        """Return (K + W^-1)^-1, (users, m, m)."""
        root = np.sqrt(curve)
        B = root[:, :, None] * self.kernel * root[:, None, :] + np.eye(curve.shape[1])
        return np.asarray(root[:, :, None] * np.linalg.inv(B) * root[:, None, :])

    def head(self, pull: Array) -> tuple[Array, Array]:
        """Return the level (users,) and the coordinates (users, p) of the mode: Z^T a."""
        u = (self.across @ pull[:, :, None])[:, :, 0]
        return math.sqrt(self.level) * u[:, 0], u[:, 1:]

    def covariance(self, curve: Array) -> Array:
        """Return the covariance of level and coordinates that is left, (users, r, r)."""
        r = self.Z.shape[2]
        inner = np.eye(r) - self.across @ self._weight(curve) @ self.Z if self.kernel is not None else None
        found = self._inverse(curve) if inner is None else inner
        scale = np.ones(r)
        scale[0] = math.sqrt(self.level)
        return np.asarray(found * scale[:, None] * scale)


@dataclass(frozen=True)
class LabelHeads:
    """Heads of users with equally many rows: outputs are intercept + <x, slopes + factor coordinates>."""

    intercept: Array  # (users, outputs)
    coordinates: Array  # (users, outputs, p)
    origin: Array  # (users, p)
    doubt: Array  # (users, outputs, .), as `posterior.PosteriorHeads` has it, of outputs
    loss: Array  # (users,): mean loss of rows, each without its label


def fit_label_heads(X: Floats | SparseRows, y: Floats, prior: LabelPrior, loss: Loss) -> LabelHeads:
    """Return the heads of users with equally many rows, from rows (users, m, d) and codes of labels (users, m)."""
    mean, m = prior.mean, X.shape[1]
    images = images_of(X, prior.factor, mean, prior.own_origin)
    level = prior.level_variance_at(m)
    fits = fit_labels(mean.of_users(X), images, y, loss, level, covariance=True)
    users, _, p = fits.coordinates.shape
    origin = np.zeros((users, p))
    origin += origins_of(X, prior.factor, mean, prior.own_origin)[:, 0]
    base = np.tile(mean.constant, (users, 1))
    if mean.intercept:
        base = base + mean.means_along(X, mean.centre * mean.located, mean.mean_weights(m))[:, 0]
    intercept = base + fits.level - (fits.coordinates * origin[:, None, :]).sum(axis=2)
    assert fits.covariance is not None
    outputs = moderated(fits.left, fits.left_variance, loss) * prior.known
    loo = loss.values(outputs, loss.signs(y.T)).sum(axis=1) / m
    return LabelHeads(intercept, fits.coordinates, origin, _packed(fits.covariance), loo)


def _packed(covariance: Array) -> Array:
    """Return what is left to doubt, (users, outputs, .): packed, or two numbers where coordinates are many."""
    p = covariance.shape[2] - 1
    if p <= MOST_PACKED:
        return np.asarray(pack(covariance))
    trace = np.trace(covariance[:, :, 1:, 1:], axis1=2, axis2=3)
    return np.stack([covariance[:, :, 0, 0], trace / p], axis=2)


def new_variance(images: Array, level: Array) -> Array:
    """Return the variance of outputs of users of whom nothing is known, (rows, outputs).

    Args:
        images: rows less the public centre, times the factor, (rows, p).
        level: the variance of levels of such users, (outputs,).
    """
    return np.asarray(level + (images**2).sum(axis=1)[:, None])
