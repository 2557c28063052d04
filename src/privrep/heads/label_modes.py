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

import math
from abc import ABC, abstractmethod
from dataclasses import dataclass, replace
from functools import cached_property

import numpy as np
from numpy.typing import NDArray

from privrep.heads.posterior import LARGEST
from privrep.local.elimination import Systems, eliminate
from privrep.local.least_squares import sum_rows
from privrep.local.losses import FARTHEST, Loss
from privrep.typing import Array, Floats

NEWTON_STEPS = 6  # of the log loss
HINGE_STEPS = 12
FEW = 6  # rows up to which leave-one-out takes fits of its own
FOLDS = 3  # fits for softmax with more rows, each without every so many labels
SMALL = 4  # unknowns of a system that is made anew in each step
STEADY = 0.125
FLATTEST = 1e-7  # curvature of a row without a label, or with one that is certain, where it is divided by
NUMBERS = 1 << 18  # of a system that is solved for several users at once


@dataclass(frozen=True)
class LabelRows:
    """Rows of users with equally many, as slopes see them: what all priors with this factor and origin have in common.

    The space of rows needs P P^T, the space of coordinates P itself.
    """

    columns: Array | None  # (p, m, users): P, where it has fewer columns than rows
    gram: Array | None  # (m, m, users): P P^T, elsewhere
    largest: Array  # (users,): the largest number of P
    rows: int
    width: int  # p

    @classmethod
    def of(cls, images: Array) -> LabelRows:
        """Return the rows of users from images (users, m, p)."""
        _, m, p = images.shape
        largest = np.abs(images).max(axis=(1, 2), initial=0.0)
        if p + 1 < m:
            return cls(np.ascontiguousarray(images.transpose(2, 1, 0)), None, largest, m, p)
        gram = images @ np.ascontiguousarray(images.transpose(0, 2, 1))
        return cls(None, np.ascontiguousarray(gram.transpose(1, 2, 0)), largest, m, p)

    def with_prior(self, slopes: float, level: Array) -> Space:
        """Return the lines that a prior allows. Users with rows too large to count with keep their level alone.

        Args:
            slopes: variance of slopes.
            level: variance of levels, (outputs,).
        """
        lost = ~(self.largest**2 * (slopes * self.rows * max(self.width, 1)) < LARGEST)
        kept = self
        if lost.any():
            columns, gram = (None if part is None else np.where(lost, 0.0, part) for part in (self.columns, self.gram))
            kept = replace(self, columns=columns, gram=gram)
        every = np.arange(self.rows)
        if kept.gram is None:
            assert kept.columns is not None
            return CoordinateSpace(level, every, kept.columns * math.sqrt(slopes))
        return RowSpace(level, every, kept.gram * slopes)


@dataclass(frozen=True)
class Space(ABC):
    """The lines that outputs may lie on, and the rows whose labels are known."""

    level: Array  # (outputs,)
    known: NDArray[np.int64]

    @abstractmethod
    def at(self, curve: Array) -> Bent:
        """Return the space with curvatures of the loss at its known rows, (outputs, known, users)."""

    @abstractmethod
    def without(self, known: NDArray[np.int64]) -> Space:
        """Return the same lines, where only the labels of these rows are known."""

    @abstractmethod
    def prior_variance(self, asked: NDArray[np.int64]) -> Array:
        """Return the variance of outputs of rows before any label is seen, (outputs, asked, users)."""

    @abstractmethod
    def line(self, dual: Array, asked: NDArray[np.int64]) -> Array:
        """Return K times a dual at the rows asked for, (outputs, asked, users).

        Args:
            dual: of the known rows, (outputs, known, users).
            asked: positions of rows, (asked,).
        """

    @property
    @abstractmethod
    def unknowns(self) -> int:
        """Return the number of unknowns of its systems of equations."""
        ...

    @property
    def levels(self) -> Array:
        """Return the variance of levels, (outputs, 1, 1)."""
        return self.level[:, None, None]


@dataclass(frozen=True)
class Bent(ABC):
    """A space, and the curvature of the loss at its known rows."""

    curve: Array  # (outputs, known, users)

    @abstractmethod
    def step(self, f: Array, pull: Array) -> Array:
        """Return where Newton's step ends, less the offset, (outputs, known, users).

        Args:
            f: outputs less their offset, before the step.
            pull: minus the derivative of the loss there.
        """

    @abstractmethod
    def variance(self, asked: NDArray[np.int64] | None = None) -> Array:
        """Return what is left of the variance of outputs, (outputs, rows, users).

        Args:
            asked: positions of rows; None: the known rows.
        """

    @abstractmethod
    def smooth(self, values: Array) -> Array:
        """Return (I + W K)^-1 W times values, (outputs, known, users) both."""


@dataclass(frozen=True)
class RowSpace(Space):
    """The lines in the space of rows, which is the smaller one where users have few rows."""

    kernel: Array  # (m, m, users), without levels

    @property
    def unknowns(self) -> int:
        return len(self.known)

    def without(self, known: NDArray[np.int64]) -> RowSpace:
        return RowSpace(self.level, known, self.kernel)

    def prior_variance(self, asked: NDArray[np.int64]) -> Array:
        return self.kernel[asked, asked] + self.levels

    def line(self, dual: Array, asked: NDArray[np.int64]) -> Array:
        found = np.repeat((self.level[:, None] * sum_rows(dual))[:, None], len(asked), axis=1)
        for i, j in enumerate(self.known):
            found += self.kernel[asked, j] * dual[:, i, None]
        return found

    def at(self, curve: Array) -> BentRows:
        n, (outputs, _, users) = len(self.known), curve.shape
        curve = np.maximum(curve, FLATTEST)
        root = np.sqrt(curve)

        def row(a: int) -> Floats:
            found = self.kernel[self.known[a], self.known[a:]] + self.levels
            found *= root[:, a:]
            found *= root[:, a, None]
            found[:, 0] += 1.0
            return found.transpose(1, 0, 2)

        return BentRows(curve, self, eliminate(n, (outputs, users), row), root)


@dataclass(frozen=True)
class BentRows(Bent):
    """The space of rows with its systems B = I + w K w, eliminated."""

    space: RowSpace
    systems: Systems
    root: Array

    def step(self, f: Array, pull: Array) -> Array:
        wanted = self.root * f + pull / self.root
        return (wanted - self._solve(wanted)) / self.root

    def _solve(self, values: Array) -> Array:
        """Return B^-1 times values, (outputs, known, users) both."""
        return self.systems.solve(values.transpose(1, 0, 2)).transpose(1, 0, 2)

    def variance(self, asked: NDArray[np.int64] | None = None) -> Array:
        if asked is None:
            certain = np.ascontiguousarray(self.systems.inverse_diagonal().transpose(1, 0, 2))
            return np.maximum(1 - certain, 0.0) / self.curve
        found = self.space.prior_variance(asked)
        for i, j in enumerate(asked):
            across = (self.space.kernel[j, self.space.known] + self.space.levels) * self.root
            found[:, i] -= self.systems.squares(across.transpose(1, 0, 2))
        return np.maximum(found, 0.0)

    def smooth(self, values: Array) -> Array:
        return self.root * self._solve(self.root * values)


@dataclass(frozen=True)
class CoordinateSpace(Space):
    """The lines in the space of coordinates, which is the smaller one where users have many rows."""

    columns: Array  # (p, m, users)

    @property
    def unknowns(self) -> int:
        return 1 + len(self.columns)

    @cached_property
    def mine(self) -> Array:
        """Return the columns of known rows, (p, known, users)."""
        return self.columns if len(self.known) == self.columns.shape[1] else np.take(self.columns, self.known, axis=1)

    def without(self, known: NDArray[np.int64]) -> CoordinateSpace:
        return CoordinateSpace(self.level, known, self.columns)

    def prior_variance(self, asked: NDArray[np.int64]) -> Array:
        found = np.zeros((len(asked), self.columns.shape[2]))
        for column in self.columns:
            found += column[asked] * column[asked]
        return found + self.levels

    def line(self, dual: Array, asked: NDArray[np.int64]) -> Array:
        found = np.repeat((self.level[:, None] * sum_rows(dual))[:, None], len(asked), axis=1)
        for own, column in zip(self.mine, self.columns, strict=True):
            found += sum_rows(dual * own)[:, None] * column[asked]
        return found

    def at(self, curve: Array) -> BentCoordinates:
        deviation = np.sqrt(self.level)[:, None]
        if len(self.columns) > SMALL:
            moments = self._moments(curve)

        def row(a: int) -> Floats:
            """Row a of H, the level first."""
            found = np.empty((self.unknowns - a, *deviation.shape[:1], curve.shape[2]))
            weighted = curve if a == 0 else curve * self.mine[a - 1]
            if a == 0:
                found[0] = sum_rows(curve) * self.level[:, None]
            for b in range(max(a, 1), self.unknowns):
                if a and len(self.columns) > SMALL:
                    found[b - a] = moments[a - 1, b - 1]
                else:
                    found[b - a] = sum_rows(weighted * self.mine[b - 1])
                if a == 0:
                    found[b] *= deviation
            found[0] += 1.0
            return found

        return BentCoordinates(curve, self, eliminate(self.unknowns, (len(curve), curve.shape[2]), row))

    def _moments(self, curve: Array) -> Array:
        """Return P^T W P, (p, p, outputs, users), by products of stacked matrices."""
        p, users = len(self.mine), curve.shape[2]
        P = np.ascontiguousarray(self.mine.transpose(2, 1, 0))  # (users, m, p)
        across = np.ascontiguousarray(P.transpose(0, 2, 1))
        found = np.empty((p, p, len(curve), users))
        for o, weight in enumerate(curve):
            found[:, :, o] = ((across * np.ascontiguousarray(weight.T)[:, None, :]) @ P).transpose(1, 2, 0)
        return found


@dataclass(frozen=True)
class BentCoordinates(Bent):
    """The space of coordinates with its systems H = I + C^T W C, eliminated."""

    space: CoordinateSpace
    systems: Systems

    def step(self, f: Array, pull: Array) -> Array:
        return self._through(self.curve * f + pull)

    def _through(self, values: Array) -> Array:
        """Return C H^-1 C^T times values, (outputs, known, users) both."""
        space = self.space
        deviation = np.sqrt(space.level)[:, None]
        right = np.stack([deviation * sum_rows(values), *(sum_rows(values * column) for column in space.mine)])
        solved = self.systems.solve(right)
        found = np.repeat((deviation * solved[0])[:, None], values.shape[1], axis=1)
        for part, column in zip(solved[1:], space.mine, strict=True):
            found += part[:, None] * column
        return found

    def variance(self, asked: NDArray[np.int64] | None = None) -> Array:
        space = self.space
        columns = space.mine if asked is None else np.take(space.columns, asked, axis=1)
        right = np.empty((space.unknowns, len(space.level), *columns.shape[1:]))
        right[0] = np.sqrt(space.levels)
        right[1:] = columns[:, None]
        T, pivots = self.systems.T[:, :, :, None], self.systems.pivots
        return Systems(T, None if pivots is None else pivots[:, :, None]).squares(right)

    def smooth(self, values: Array) -> Array:
        weighted = self.curve * values
        return weighted - self.curve * self._through(weighted)


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
        pull, curve = loss.pulls(offset + f, signs)
        if anew:
            bent = space.at(loss.bend(offset + f, signs, curve))
        elif bent is None:
            bent = space.at(np.maximum(curve, STEADY * np.abs(signs)))
        f = _take_step(f, bent.step(f, pull), signs)
    return Mode(space, loss, signs, offset + f, *loss.pulls(offset + f, signs), not anew)


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
    return Mode(mode.space, loss, signs, offset + f, *loss.pulls(offset + f, signs), False, mode.bent)


def _take_step(f: Array, target: Array, signs: Array) -> Array:
    """Return outputs after a step, shortened so that none moves by more than FARTHEST.

    Args:
        f: outputs less their offset, (outputs, known, users).
        target: where the step ends.
        signs: of the labels; rows without a label do not shorten it.
    """
    move = target - f
    farthest = np.abs(move * signs).max(axis=1, keepdims=True)
    return f + np.minimum(1.0, FARTHEST / np.maximum(farthest, 1e-300)) * move


def leave_out(space: Space, offset: Array, mode: Mode) -> tuple[Array, Array]:
    """Return outputs of each row without its label, and their variances, (outputs, m, users) each.

    Without row j they are f_j - s_j a_j with variance s_j = S_jj / (1 - W_j S_jj), to first order. Where a label is
    much of what is known, and with softmax, modes are found anew. For users with more rows than FEW every FOLDS-th
    label
    is left out together.

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
