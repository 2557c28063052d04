"""Spaces of lines that classifiers' outputs may lie on, and the systems of Newton's steps in them; see `label_modes`.

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
from privrep.typing import Array, Floats

SMALL = 4  # unknowns of a system that is made anew in each step
FLATTEST = 1e-7  # curvature of a row without a label, or with one that is certain, where it is divided by


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
        """Return the same lines, where only the labels of the rows at these positions, (known,), are known."""

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
        """Return the same lines, where only the labels of the rows at these positions are known; see `Space`."""
        return RowSpace(self.level, known, self.kernel)

    def prior_variance(self, asked: NDArray[np.int64]) -> Array:
        """Return the variance of outputs before any label is seen; see `Space`."""
        return self.kernel[asked, asked] + self.levels

    def line(self, dual: Array, asked: NDArray[np.int64]) -> Array:
        """Return K times a dual at the rows asked for; see `Space`."""
        found = np.repeat((self.level[:, None] * sum_rows(dual))[:, None], len(asked), axis=1)
        for i, j in enumerate(self.known):
            found += self.kernel[asked, j] * dual[:, i, None]
        return found

    def at(self, curve: Array) -> BentRows:
        """Return the space with its systems B at curvatures (outputs, known, users)."""
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
        """Return where Newton's step ends; see `Bent`."""
        wanted = self.root * f + pull / self.root
        return (wanted - self._solve(wanted)) / self.root

    def _solve(self, values: Array) -> Array:
        """Return B^-1 times values, (outputs, known, users) both."""
        return self.systems.solve(values.transpose(1, 0, 2)).transpose(1, 0, 2)

    def variance(self, asked: NDArray[np.int64] | None = None) -> Array:
        """Return what is left of the variance of outputs; see `Bent`."""
        if asked is None:
            certain = np.ascontiguousarray(self.systems.inverse_diagonal().transpose(1, 0, 2))
            return np.maximum(1 - certain, 0.0) / self.curve
        found = self.space.prior_variance(asked)
        for i, j in enumerate(asked):
            across = (self.space.kernel[j, self.space.known] + self.space.levels) * self.root
            found[:, i] -= self.systems.quadratic_forms(across.transpose(1, 0, 2))
        return np.maximum(found, 0.0)

    def smooth(self, values: Array) -> Array:
        """Return (I + W K)^-1 W times values; see `Bent`."""
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
        """Return the same lines, where only the labels of the rows at these positions are known; see `Space`."""
        return CoordinateSpace(self.level, known, self.columns)

    def prior_variance(self, asked: NDArray[np.int64]) -> Array:
        """Return the variance of outputs before any label is seen; see `Space`."""
        found = np.zeros((len(asked), self.columns.shape[2]))
        for column in self.columns:
            found += column[asked] * column[asked]
        return found + self.levels

    def line(self, dual: Array, asked: NDArray[np.int64]) -> Array:
        """Return K times a dual at the rows asked for; see `Space`."""
        found = np.repeat((self.level[:, None] * sum_rows(dual))[:, None], len(asked), axis=1)
        for own, column in zip(self.mine, self.columns, strict=True):
            found += sum_rows(dual * own)[:, None] * column[asked]
        return found

    def at(self, curve: Array) -> BentCoordinates:
        """Return the space with its systems H at curvatures (outputs, known, users)."""
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
        """Return where Newton's step ends; see `Bent`."""
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
        """Return what is left of the variance of outputs; see `Bent`."""
        space = self.space
        columns = space.mine if asked is None else np.take(space.columns, asked, axis=1)
        right = np.empty((space.unknowns, len(space.level), *columns.shape[1:]))
        right[0] = np.sqrt(space.levels)
        right[1:] = columns[:, None]
        T, pivots = self.systems.T[:, :, :, None], self.systems.pivots
        return Systems(T, None if pivots is None else pivots[:, :, None]).quadratic_forms(right)

    def smooth(self, values: Array) -> Array:
        """Return (I + W K)^-1 W times values; see `Bent`."""
        weighted = self.curve * values
        return weighted - self.curve * self._through(weighted)
