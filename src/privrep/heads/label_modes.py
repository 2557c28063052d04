"""Modes of classifiers' outputs for many users of equal size at once, and leave-one-out of their labels.

A user's outputs are f = offset + K a, one such line for each output; K = level 11^T + slopes P P^T, P the user's rows
less an origin, times a public factor. At the mode a is minus the derivative of the loss by f. With W the curvature
of the loss, Newton's step is f = offset + K (I + W K)^-1 (W (f - offset) + a), in the smaller of two spaces:

rows          B = I + w K w, w = sqrt(W): the step is (c - B^-1 c) / w for c = w (f - offset) + a / w, and the variance
              S = (K^-1 + W)^-1 that is left of f has the diagonal (1 - (B^-1)_jj) / W_j;
coordinates   H = I + C^T W C, where C C^T = K: the step is C H^-1 C^T (W (f - offset) + a), and S = C H^-1 C^T.

A system of a few unknowns is made anew in each step. From a mode nearby a larger one serves all steps: W is then at
least STEADY, half of the largest curvature of the logistic loss, with which each of its steps still goes downhill.

Arrays have users last. Each user's numbers are a function of its own rows to the last bit (see `local.elimination`).
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

import numpy as np

from privrep.heads.label_spaces import SMALL, Bent, Space
from privrep.local.losses import FARTHEST, Loss
from privrep.typing import Array

NEWTON_STEPS = 6  # of the log loss
HINGE_STEPS = 12
FEW = 6  # rows up to which leave-one-out takes fits of its own
FOLDS = 3  # fits for softmax with more rows, each without every FOLDS-th label
STEADY = 0.125
NUMBERS = 1 << 18  # of a system that is solved for several users at once


@dataclass(frozen=True)
class Mode:
    """The mode of users' outputs; arrays are (outputs, known, users)."""

    space: Space
    loss: Loss
    signs: Array
    outputs: Array
    pull: Array
    curve: Array
    rough: bool  # whether one system served all steps
    last: Bent | None = None  # the space at all but the same curvature, where that is at hand

    @cached_property
    def bent(self) -> Bent:
        """Return the space at the mode's curvature."""
        return self.space.at(self.curve) if self.last is None else self.last

    @cached_property
    def variance(self) -> Array:
        """Return what is left of the variance of outputs of known rows."""
        return self.bent.variance()

    @cached_property
    def dual(self) -> Array:
        """Return a with offset + K a the posterior mean of the outputs, which lies farther out than the mode.

        It does by S t / 2, t_j the third derivative of the log-likelihood times S_jj (Tierney and Kadane 1986).
        """
        if self.loss.name != "log":
            return self.pull
        tilt = 2 * (np.where(self.signs > 0, 1.0, 0.0) - self.pull) - 1  # the third derivative over W, p - (1 - p)
        return self.pull + 0.5 * self.bent.smooth(tilt * self.variance)


def find_mode(space: Space, offset: Array, signs: Array, near: Array | None, loss: Loss, steady: bool = False) -> Mode:
    """Return the mode of outputs.

    Args:
        space: of the lines.
        offset: the prior mean of the outputs, (outputs, known, users).
        signs: of the labels, of the same shape.
        near: outputs of another prior, or of more labels, from which fewer steps are taken; None: start at the offset.
        loss: what is minimised.
        steady: whether `near` is so near that a large system serves several steps.
    """
    f = (offset if near is None else near) - offset
    steps = HINGE_STEPS if loss.name == "hinge" else NEWTON_STEPS
    steps = steps if near is None else (steps + 1) // 2
    anew = loss.name == "hinge" or space.unknowns <= SMALL or not steady
    bent: Bent | None = None
    for _ in range(steps):
        pull, curve = loss.differentiate(offset + f, signs)
        if anew:
            bent = space.at(loss.bound_curvature(offset + f, signs, curve))
        elif bent is None:
            bent = space.at(np.maximum(curve, STEADY * np.abs(signs)))
        f = _take_step(f, bent.step(f, pull), signs)
    return Mode(space, loss, signs, offset + f, *loss.differentiate(offset + f, signs), not anew)


def _polish(mode: Mode, offset: Array) -> Mode:
    """Return a rough mode after another step, by the system that its variance takes anyway; any other mode as it is.

    Args:
        mode: of the outputs.
        offset: the prior mean of the outputs, (outputs, known, users).
    """
    if not mode.rough:
        return mode
    f, loss, signs = mode.outputs - offset, mode.loss, mode.signs
    f = _take_step(f, mode.bent.step(f, mode.pull), signs)
    return Mode(mode.space, loss, signs, offset + f, *loss.differentiate(offset + f, signs), False, mode.bent)


def _take_step(f: Array, target: Array, signs: Array) -> Array:
    """Return outputs less their offset after a step, shortened so that no row with a label moves by more than FARTHEST.

    Args:
        f: outputs less their offset, (outputs, known, users).
        target: where the step ends, of the same shape.
        signs: of the labels, of the same shape; rows without a label do not shorten it.
    """
    move = target - f
    farthest = np.abs(move * signs).max(axis=1, keepdims=True)
    return f + np.minimum(1.0, FARTHEST / np.maximum(farthest, 1e-300)) * move


def leave_out(space: Space, offset: Array, mode: Mode) -> tuple[Array, Array]:
    """Return outputs of each row without its label, and their variances, (outputs, m, users) each.

    Without row j they are f_j - s_j a_j with variance s_j = S_jj / (1 - W_j S_jj), to first order. Where a label is
    much of what is known, and with softmax, modes are found anew. For users with more rows than FEW every FOLDS-th
    label is left out together.

    Args:
        space: of the lines.
        offset: the prior mean of the outputs, (outputs, m, users).
        mode: of the outputs, by all labels.
    """
    m, loss = offset.shape[1], mode.loss
    if m > FEW and not loss.softmax:
        mode = _polish(mode, offset)
        variance = mode.variance / np.maximum(1 - mode.curve * mode.variance, 1e-2)
        return mode.outputs - variance * mode.pull, variance
    left, variance = offset.copy(), np.empty_like(offset)
    for fold in range(min(m, FOLDS if m > FEW else FEW)):
        out = np.arange(fold, m, FOLDS if m > FEW else FEW)
        known = np.setdiff1d(np.arange(m), out)
        if not len(known):
            variance[:, out] = space.prior_variance(out)
            continue
        fewer = space.without(known)
        start, signs, near = (np.take(part, known, axis=1) for part in (offset, mode.signs, mode.outputs))
        fit = _polish(find_mode(fewer, start, signs, near, loss, True), start)
        left[:, out] += fewer.line(fit.dual, out)
        variance[:, out] = fit.bent.variance(out)
    return left, variance


def count_users_at_once(rows: int, width: int, outputs: int) -> int:
    """Return how many users are fitted at once: as many as fit a cache.

    Args:
        rows: of each user.
        width: coordinates of slopes.
        outputs: of each row.
    """
    unknowns = min(rows, 1 + width)
    return max(NUMBERS // (outputs * max(unknowns * unknowns, 4 * rows)), 16)
