"""Heads of classifiers: losses, and their minimisers for many users at once, with leave-one-out in closed form.

A head has `outputs` rows: one for two classes, whose sign decides, and one for each class where there are more. Rows
are fitted by Newton's method, all users of a block at once. Each of several outputs is fitted as if the others stood
still. With c classes the curvature of the softmax is then taken as p (1 - p) c / (c - 1). That is right where all
classes are as probable, and at least half of the bound 2 p (1 - p): the steps converge.

Leaving out a row is one Newton step from the fit with it. Each user's numbers are a function of its own rows to the
last bit: the arithmetic is that of `least_squares` and `elementary`.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, get_args

import numpy as np
from numpy.typing import NDArray

from privrep.local.elementary import exp, log, sigmoid, softplus
from privrep.local.least_squares import invert, sum_columns, sum_rows
from privrep.privacy.moments import pack
from privrep.typing import Array, Floats

LossName = Literal["log", "hinge"]
LOSSES: tuple[LossName, ...] = get_args(LossName)
SOFTNESS = 0.5  # of the hinge: it bends within about this much of its corner
STEPS = 4  # of Newton's method for one output of the log loss
MORE_STEPS = 8  # for several
HINGE_STEPS = 16
FARTHEST = 4.0  # that a step may move the output of a row
INTERCEPT_PRECISION = 0.1
CENTRED_PRECISION = 0.5  # of intercepts where it is known what is usual


@dataclass(frozen=True)
class Loss:
    """Loss that heads minimise: `log` (logistic, or softmax) or `hinge`, smoothed (or one class against the rest).

    Labels are codes 0 to classes - 1. A row with another code is one without a label, and counts for nothing.
    """

    name: LossName
    classes: int

    @property
    def outputs(self) -> int:
        """Return the number of outputs of a head."""
        return 1 if self.classes == 2 else self.classes

    @property
    def softmax(self) -> bool:
        """Return whether probabilities are a softmax over several outputs."""
        return self.name == "log" and self.classes > 2

    def signs(self, y: Floats) -> Floats:
        """Return labels (users, m) as (outputs, m, users): 1 for an output's own class, -1 for others, 0 for none."""
        codes = np.ascontiguousarray(y.T)
        own = np.arange(1, 2) if self.classes == 2 else np.arange(self.classes)
        known = (codes[None] == np.arange(self.classes)[:, None, None]).any(axis=0)
        return np.where(codes[None] == own[:, None, None], 1.0, -1.0) * known

    def probabilities(self, outputs: Floats) -> Floats:
        """Return the probability of each class, along the first axis, from outputs (outputs, ...) of the log loss."""
        if self.classes == 2:
            first = sigmoid(outputs[0])
            return np.stack([1 - first, first])
        shifted = exp(outputs - outputs.max(axis=0))
        return shifted / sum_columns(shifted)

    def differentiate(self, outputs: Floats, signs: Floats) -> tuple[Floats, Floats]:
        """Return minus the derivative of the loss by each output, and the second derivative by each alone.

        Args:
            outputs: (outputs, m, users).
            signs: (outputs, m, users).
        """
        if self.softmax:
            p = self.probabilities(outputs)
            known = np.abs(signs)
            return (np.where(signs > 0, 1.0, 0.0) - p) * known, p * (1 - p) * known * (
                self.classes / (self.classes - 1)
            )
        if self.name == "log":
            wrong = sigmoid(-signs * outputs)
            return signs * wrong, np.abs(signs) * wrong * (1 - wrong)
        short = sigmoid((1 - signs * outputs) / SOFTNESS)
        return signs * short, np.abs(signs) * short * (1 - short) / SOFTNESS

    @property
    def steps(self) -> int:
        """Return the number of Newton steps of a fit."""
        return HINGE_STEPS if self.name == "hinge" else STEPS if self.outputs == 1 else MORE_STEPS

    def bound_curvature(self, outputs: Floats, signs: Floats, curve: Floats) -> Floats:
        """Return the curvature that a Newton step reckons with, (outputs, m, users).

        Of the log loss it is the curvature as it is. The hinge has next to none but at its corner. There it is that of
        a parabola that touches the loss and lies above it everywhere (Jaakkola and Jordan 2000).

        Args:
            outputs: (outputs, m, users).
            signs: (outputs, m, users).
            curve: second derivatives from `differentiate`.
        """
        if self.name == "log":
            return curve
        u = (1 - signs * outputs) / SOFTNESS
        u = np.where(np.abs(u) < 1e-4, 1e-4, u)
        return np.abs(signs) * (2 * sigmoid(u) - 1) / (2 * u * SOFTNESS)

    def values(self, outputs: Floats, signs: Floats) -> Floats:
        """Return the loss of each row, (m, users), from outputs and signs (outputs, m, users)."""
        if self.softmax:
            p = self.probabilities(outputs)
            return -log(np.maximum(sum_columns(np.where(signs > 0, p, 0.0)), 1e-300)) * np.abs(signs[0])
        if self.name == "log":
            return sum_columns(softplus(-signs * outputs)) * np.abs(signs[0])
        return sum_columns(SOFTNESS * softplus((1 - signs * outputs) / SOFTNESS)) * np.abs(signs[0])

    def curvature(self, outputs: Floats, signs: Floats, heads: Floats) -> Floats:
        """Return the sum over rows of V^T W V, packed, (users, ...), W the second derivatives by the outputs.

        Args:
            outputs: (outputs, m, users).
            signs: (outputs, m, users).
            heads: V, (outputs, k, m, users).
        """
        k = heads.shape[1]
        weight = self.probabilities(outputs) if self.softmax else self.differentiate(outputs, signs)[1]
        weight = weight * np.abs(signs)
        weighted = weight[:, None] * heads
        mean = sum_columns(weighted) if self.softmax else np.zeros_like(heads[0])
        parts = [
            sum_rows(sum_columns(weighted[:, a] * heads[:, b]) - mean[a] * mean[b])
            for a in range(k)
            for b in range(a, k)
        ]
        packed: Floats = np.stack(parts, axis=1) * pack(np.ones((k, k)))
        return packed


@dataclass(frozen=True)
class ClassFit:
    """Heads of users of equal size, and their leave-one-out fits. Users come last."""

    heads: Floats  # (outputs, k, users)
    intercepts: Floats  # (outputs, users)
    loo_outputs: Floats  # (outputs, m, users)
    loo_heads: Floats  # (outputs, k, m, users)


def fit_classes(
    P: Floats,
    signs: Floats,
    loss: Loss,
    precision: float,
    intercept: bool,
    near: ClassFit | None = None,
    centre: Array | None = None,
    offset: Floats | None = None,
    level: float | None = None,
) -> ClassFit:
    """Return the heads of each user that minimise sum_j loss_j + precision / 2 |v - centre|^2.

    Args:
        P: regressors, (k, m, users). With an intercept they should come centred by user.
        signs: (outputs, m, users), see `Loss.signs`.
        loss: what is minimised.
        precision: of the prior of heads.
        intercept: whether heads have one.
        near: a fit of the same rows with another precision, from which this one takes fewer steps.
        centre: (outputs, k + 1), the intercept's last; None for zero.
        offset: (outputs, m, users), added to all outputs.
        level: variance of intercepts around `offset`.
    """
    k, m, users = P.shape
    rows = np.concatenate([P, np.ones((1, m, users))]) if intercept else P
    penalty = np.full(len(rows), precision)
    if intercept:
        penalty[-1] = INTERCEPT_PRECISION if centre is None else CENTRED_PRECISION
        if level is not None:
            penalty[-1] = 1 / max(level, 1e-6)
    L = loss.outputs
    middle = np.zeros((L, len(rows), 1)) if centre is None else centre[:, : len(rows), None]
    heads = np.repeat(middle, users, axis=2)
    if near is not None:
        heads = np.concatenate([near.heads, near.intercepts[:, None]], axis=1) if intercept else near.heads.copy()
    outputs = np.stack([sum_columns(rows * head[:, None, :]) for head in heads])
    if offset is not None:
        outputs += offset
    for _ in range(loss.steps if near is None else loss.steps // 2):
        pull, curve = loss.differentiate(outputs, signs)
        bend = loss.bound_curvature(outputs, signs, curve)
        for o in range(L):
            inverted = _invert_hessian(rows, bend[o], penalty)
            slope = sum_rows(rows * pull[o]) - penalty[:, None] * (heads[o] - middle[o])
            move = np.stack([sum_columns(inverted[a] * slope) for a in range(len(rows))])
            moved = sum_columns(rows * move[:, None, :])
            shorter = np.minimum(1.0, FARTHEST / np.maximum(np.abs(moved * signs[o]).max(axis=0), 1e-300))
            heads[o] += shorter * move
            outputs[o] += shorter * moved
    return _leave_out(rows, signs, loss, penalty, heads, outputs, k)


def _leave_out(
    rows: Floats, signs: Floats, loss: Loss, penalty: Floats, heads: Floats, outputs: Floats, k: int
) -> ClassFit:
    """Return the fit with its leave-one-out heads and outputs, each one Newton step away.

    Shapes are as in `fit_classes`; `rows` is P with a row of ones for the intercept.
    """
    pull, curve = loss.differentiate(outputs, signs)
    directions, leverage = np.empty((len(heads), *rows.shape)), np.empty_like(outputs)
    for o in range(len(heads)):
        inverted = _invert_hessian(rows, curve[o], penalty)
        for a in range(len(rows)):
            directions[o, a] = sum_columns(inverted[a][:, None, :] * rows)
        leverage[o] = sum_columns(rows * directions[o])
    left = pull / np.maximum(1 - curve * leverage, 1e-2)
    loo_heads = heads[:, :k, None, :] - directions[:, :k] * left[:, None]
    intercepts = heads[:, k] if len(rows) > k else np.zeros((len(heads), rows.shape[2]))
    return ClassFit(heads[:, :k], intercepts, outputs - leverage * left, loo_heads)


def _invert_hessian(rows: Floats, curve: Floats, penalty: Floats) -> Floats:
    """Return the inverse Hessian of each user, (k, k, users).

    Args:
        rows: regressors, (k, m, users).
        curve: second derivatives, (m, users).
        penalty: (k,).
    """
    k = len(rows)
    hessian = np.empty((k, k, rows.shape[2]))
    for a in range(k):
        weighted = curve * rows[a]
        for b in range(a + 1):
            hessian[a, b] = hessian[b, a] = sum_rows(weighted * rows[b])
        hessian[a, a] += penalty[a] + 1e-10 * hessian[a, a]
    return invert(hessian)


def decide_classes(outputs: Array) -> NDArray[np.int64]:
    """Return the class that each row's outputs, (rows,) or (rows, classes), stand for."""
    return (outputs > 0).astype(np.int64) if outputs.ndim == 1 else outputs.argmax(axis=1)


def compute_probabilities(loss: Loss, outputs: Array) -> Array:
    """Return the probabilities of classes, (rows, classes), from outputs (rows,) or (rows, classes)."""
    return np.asarray(loss.probabilities(outputs[None] if outputs.ndim == 1 else outputs.T).T)
