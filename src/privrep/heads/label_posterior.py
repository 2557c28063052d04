"""Heads of classifiers as posterior means, for many users of equal size at once, with leave-one-out.

A user's outputs are f = offset + b + P v, one such line for each output. The offset is the prior mean, b ~ N(0, level)
the user's own level, and v ~ N(0, I) its slopes along the public factor. P are the user's rows less an origin, times
the factor. Modes of the outputs are found in `label_modes`. The posterior of logits is skewed, and its mean lies
farther out than its mode. A head is the mean, to second order.

Probabilities average over what is left to doubt: an output of variance s counts 1 / sqrt(1 + pi s / 8) of itself
(MacKay 1992). Each user's numbers are a function of its own rows to the last bit (see `local.least_squares`).
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np

from privrep.data.sparse import SparseRows
from privrep.heads.label_modes import count_users_at_once, find_mode, leave_out
from privrep.heads.label_spaces import LabelRows
from privrep.heads.posterior import LARGEST, MOST_PACKED, make_images, make_origins
from privrep.local.least_squares import move_users_last, sum_rows
from privrep.local.losses import Loss
from privrep.local.prior import LabelPrior
from privrep.privacy.moments import pack
from privrep.typing import Array, Floats

MODERATE = math.pi / 8  # of a variance, in the share of an output that probabilities count


@dataclass(frozen=True)
class LabelFits:
    """Heads of users with equally many rows. Users come last, but in what makes up the heads."""

    level: Array  # (users, outputs)
    coordinates: Array  # (users, outputs, p): v
    pull: Array  # (outputs, m, users): K times which is the mean, less the offset
    curve: Array  # (outputs, m, users): W
    variance: Array  # (outputs, m, users): S_jj
    left: Array  # (outputs, m, users): outputs of each row without its label
    left_variance: Array  # (outputs, m, users)
    covariance: Array | None  # (users, outputs, 1 + p, 1 + p): of (b, v), where it was asked for


def moderate(outputs: Array, variance: Array, loss: Loss) -> Array:
    """Return outputs as probabilities count them, given the variance that is left of each.

    Args:
        outputs: (outputs, ...).
        variance: of the same shape. All outputs of a row shrink alike, so that the largest stays so.
        loss: of the outputs; hinge outputs stand for no probabilities, and stay.
    """
    if loss.name != "log":
        return outputs
    return outputs * find_trust(variance)


def find_trust(variance: Array) -> Array:
    """Return the share of its outputs that a row's probabilities count, (...), from variances (outputs, ...).

    With several outputs it is their differences that count, whose variance is twice as large.
    """
    L = len(variance)
    total = variance[0].copy()
    for each in variance[1:]:
        total += each
    several = 2.0 if L > 1 else 1.0
    return 1 / np.sqrt(1 + MODERATE * several * np.maximum(total / L, 0.0))


def stretch(learned: float, level: float) -> float:
    """Return the factor of a prior mean's level that keeps probabilities the same on average over users.

    Slopes stay: they are much the same within users, whatever levels are.

    Args:
        learned: variance of levels with which the mean was learned.
        level: variance of levels that it is used with.
    """
    return math.sqrt((1 + MODERATE * level) / (1 + MODERATE * learned))


def fit_labels(
    offset: Array, images: Array, y: Floats, loss: Loss, level: Array, covariance: bool = False, left: bool = True
) -> LabelFits:
    """Return the heads of users with equally many rows.

    Args:
        offset: the prior mean of the outputs, (users, m, outputs).
        images: rows less an origin, times the factor, (users, m, p).
        y: codes of labels, (users, m).
        loss: what is minimised.
        level: the variance of levels, (outputs,); zero: none.
        covariance: whether to return the covariance of what is left to doubt.
        left: whether to leave labels out; else `left` and its variance are the mode's.
    """
    m, p = images.shape[1:]
    largest = np.abs(images).max(axis=(1, 2), initial=0.0)
    lost = ~(largest**2 * m * max(p, 1) < LARGEST)
    images = np.where(lost[:, None, None], 0.0, images) if lost.any() else images
    parts = [
        _fit_some(offset[some], images[some], y[some], loss, level, left)
        for some in iterate_users(len(images), m, p, loss.outputs)
    ]
    dual, curve, variance, without, doubt = (np.concatenate(each, axis=2) for each in zip(*parts, strict=True))
    return LabelFits(
        np.ascontiguousarray((level[:, None] * sum_rows(dual)).T),
        np.ascontiguousarray(dual.transpose(2, 0, 1)) @ images,
        dual,
        curve,
        variance,
        without,
        doubt,
        _find_covariance(images, level, curve) if covariance else None,
    )


def iterate_users(users: int, rows: int, width: int, outputs: int) -> Iterator[slice]:
    """Yield slices of users, as many at a time as are fitted at once.

    Args:
        users: how many there are.
        rows: of each user.
        width: coordinates of slopes.
        outputs: of each row.
    """
    size = count_users_at_once(rows, width, outputs)
    for start in range(0, max(users, 1), size):
        yield slice(start, start + size)


def _fit_some(
    offset: Array, images: Array, y: Floats, loss: Loss, level: Array, left: bool
) -> tuple[Array, Array, Array, Array, Array]:
    """Return dual, curvature and variance of the mode, then outputs without their labels and their variances.

    Args:
        offset: the prior mean of the outputs, (users, m, outputs).
        images: rows less an origin, times the factor, (users, m, p).
        y: codes of labels, (users, m).
        loss: what is minimised.
        level: the variance of levels, (outputs,).
        left: whether to leave labels out.

    Returns:
        Five arrays (outputs, m, users).
    """
    space, signs = LabelRows.of(images).with_prior(1.0, level), loss.signs(y)
    start = move_users_last(offset)
    mode = find_mode(space, start, signs, None, loss)
    without = leave_out(space, start, mode) if left else (mode.outputs, mode.variance)
    return mode.dual, mode.curve, mode.variance, *without


def _find_covariance(images: Array, level: Array, curve: Array) -> Array:
    """Return the covariance of levels and coordinates that is left, (users, outputs, 1 + p, 1 + p).

    Args:
        images: rows less an origin, times the factor, (users, m, p).
        level: the variance of levels, (outputs,).
        curve: of the loss, (outputs, m, users).
    """
    users, m, p = images.shape
    scale, found = np.ones(1 + p), np.empty((users, len(level), 1 + p, 1 + p))
    for o, variance in enumerate(level):
        scale[0] = math.sqrt(variance)
        Z = np.concatenate([np.full((users, m, 1), scale[0]), images], axis=2)
        across = np.ascontiguousarray(Z.transpose(0, 2, 1))
        weighted = across * np.ascontiguousarray(curve[o].T)[:, None, :]
        if m > p + 1:
            inner = np.linalg.inv(weighted @ Z + np.eye(1 + p))
        else:
            inner = np.eye(1 + p) - weighted @ np.linalg.solve((Z @ weighted) + np.eye(m), Z)
        found[:, o] = inner * scale[:, None] * scale
    return found


@dataclass(frozen=True)
class LabelHeads:
    """Heads of users with equally many rows: outputs are intercept + <x, slopes + factor coordinates>."""

    intercept: Array  # (users, outputs)
    coordinates: Array  # (users, outputs, p)
    origin: Array  # (users, p)
    doubt: Array  # (users, outputs, .), as `posterior.PosteriorHeads` has it, of outputs
    loss: Array  # (users,): mean loss of rows, each without its label


def fit_label_heads(X: Floats | SparseRows, y: Floats, prior: LabelPrior, loss: Loss) -> LabelHeads:
    """Return the heads of users with equally many rows.

    Args:
        X: rows (users, m, d).
        y: codes of labels (users, m).
        prior: of heads.
        loss: what heads minimise.
    """
    mean, m = prior.mean, X.shape[1]
    images = make_images(X, prior.factor, mean, prior.own_origin)
    level = prior.level_variance_at(m)
    fits = fit_labels(mean.predict_users(X), images, y, loss, level, covariance=True)
    users, _, p = fits.coordinates.shape
    origin = np.zeros((users, p))
    origin += make_origins(X, prior.factor, mean, prior.own_origin)[:, 0]
    base = np.tile(mean.constant, (users, 1))
    if mean.intercept:
        base = base + mean.project_means(X, mean.centre * mean.located, mean.mean_weights(m))[:, 0]
    intercept = base + fits.level - (fits.coordinates * origin[:, None, :]).sum(axis=2)
    assert fits.covariance is not None
    outputs = moderate(fits.left, fits.left_variance, loss) * prior.known
    loo = sum_rows(loss.values(outputs, loss.signs(y))) / m
    return LabelHeads(intercept, fits.coordinates, origin, _pack_doubt(fits.covariance), loo)


def _pack_doubt(covariance: Array) -> Array:
    """Return what is left to doubt, (users, outputs, .): packed, or two numbers where coordinates are many.

    Args:
        covariance: of level and coordinates, (users, outputs, 1 + p, 1 + p).
    """
    p = covariance.shape[2] - 1
    if p <= MOST_PACKED:
        return np.asarray(pack(covariance))
    trace = np.trace(covariance[:, :, 1:, 1:], axis1=2, axis2=3)
    return np.stack([covariance[:, :, 0, 0], trace / p], axis=2)


def find_new_variance(images: Array, level: Array) -> Array:
    """Return the variance of outputs of users about whom nothing is known, (rows, outputs).

    Args:
        images: rows less the public centre, times the factor, (rows, p).
        level: the variance of levels of such users, (outputs,).
    """
    return np.asarray(level + (images**2).sum(axis=1)[:, None])
