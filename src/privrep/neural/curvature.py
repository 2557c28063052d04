"""Coordinates in which all directions of the features bend the loss alike: few rounds then go as far as many.

    spread    squares of standardised features                      -> features of one size
    moment    pairs of features, those of the largest squares       -> directions of one size

Noise of a gradient is the same in all coordinates. In these it is also the least harmful: directions in which rows vary
k times as much have 1/k of its effect on scores (the product of the sizes of gradients and of errors is least there).
What the noise of these two releases hides is taken to be flat. Directions are not brought to one size beyond what
rounds can carry: a ridge leaves as many as the plan says, in sum over w / (w + ridge), the degrees of freedom.

Formal guarantee: `coordinates` is a function of two releases and of public numbers.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Annotated

import numpy as np
from numpy.typing import NDArray

from privrep.neural.standard_step import Coordinates, Standards
from privrep.privacy.bounds import DIRECTION_ONLY, Bound, Contributions
from privrep.privacy.calibration import Query
from privrep.privacy.contributions import NonNegative
from privrep.privacy.moments import RowMoments, symmetrise
from privrep.privacy.protocol import StepSpec, UserBatch
from privrep.privacy.run import Run
from privrep.typing import Array, Axes, Integers, Vector

Places = Annotated[Integers, Axes(1)]

SPREAD_SHARE = 0.03
MOMENT_SHARE = 0.08
MOST_PAIRED = 512  # features whose pairs are released
FAINT = 0.8  # length of a user's moments, all of which are one, that noise of eigenvalues may have at most
CLEAR = 3.0  # standard deviations that all squares together must have to count
UNHEARD = 0.25  # the largest part of all squares that one direction is taken to have where pairs were not released
STEEPEST = 0.5  # curvature of a softmax, at most


@dataclass(frozen=True, eq=False)
class FeatureSquares:
    """The squares of a user's standardised features, added up over rows."""

    rows_per_user: int
    standards: Standards

    @property
    def spec(self) -> StepSpec:
        return StepSpec(layout="padded", rows_per_user=self.rows_per_user)

    def __call__(self, batch: UserBatch) -> dict[str, Contributions]:
        with np.errstate(all="ignore"):
            rows = self.standards(batch)
            return {"squares": NonNegative((rows * rows).sum(axis=1, dtype=np.float64))}


@dataclass(frozen=True, eq=False)
class FeaturePairs:
    """The products of pairs of a user's standardised features, of some of them, over public sizes."""

    rows_per_user: int
    standards: Standards
    chosen: Places  # of the features
    sizes: Vector  # by which those are divided

    @property
    def spec(self) -> StepSpec:
        return StepSpec(layout="padded", rows_per_user=self.rows_per_user)

    def __call__(self, batch: UserBatch) -> dict[str, Contributions]:
        with np.errstate(all="ignore"):
            scaled = self.standards(batch)[:, :, self.chosen] / self.sizes.astype(np.float32)
        return {"pairs": RowMoments(np.ascontiguousarray(scaled), np.ones(len(scaled)))}


@dataclass(frozen=True, eq=False)
class Variation:
    """How far rows vary in coordinates: their mean squares, relative to what no ridge would leave.

    Args:
        basis: (d, k), directions that are told apart, orthonormal.
        along: (k,), mean square of rows along each, at most 1.
        flat: the mean square along each other direction.
    """

    basis: Array
    along: Array
    flat: float

    @property
    def each(self) -> Array:
        """Return the mean squares along all directions, (d,)."""
        return np.append(self.along, np.full(len(self.basis) - len(self.along), self.flat))

    def weighted_square(self, weights: Array) -> float:
        """Return the sum of squares of weights (outputs, d), each direction times the mean square of rows there."""
        flat = self.flat * float((weights * weights).sum())
        return flat + float(((weights @ self.basis) ** 2 @ (self.along - self.flat)).sum())


def coordinates(
    run: Run, rows_per_user: int, standards: Standards, *, total: float, most: float
) -> tuple[Coordinates, Variation, float]:
    """Return coordinates in which directions are of one size, how rows vary there, and what was spent, of mu squared.

    Args:
        run: whose users are asked.
        rows_per_user: of a user, so many rows count.
        standards: how features are standardised.
        total: the whole budget, in mu squared.
        most: degrees of freedom that are worth while.
    """
    users, d = run.users.facts.users, len(standards.centre)
    asked, spread = FeatureSquares(rows_per_user, standards), SPREAD_SHARE * total
    released = run.release("spread", asked, {"squares": Query(Bound(DIRECTION_ONLY, d, acute=True), spread)})["squares"]
    squares = np.maximum(released.value, 0.0) + 2 * released.sigma
    squares = squares / squares.sum()
    sizes = np.sqrt(squares * d)  # rows of length one, divided by these, have features of mean square 1/d
    sizes = np.maximum(sizes, 1e-6)
    chosen = np.sort(np.argsort(-squares, kind="stable")[:MOST_PAIRED])
    k = len(chosen)
    noise = math.sqrt(2 * k) * math.sqrt(2 / (MOMENT_SHARE * total)) / users  # of eigenvalues, at most
    if noise > FAINT:
        return *_flat(sizes, most), spread
    pairs = FeaturePairs(rows_per_user, standards, chosen, sizes[chosen])
    query = Query(Bound(DIRECTION_ONLY, k**2, acute=True), MOMENT_SHARE * total)
    found = run.release("moment", pairs, {"pairs": query})["pairs"]
    return *_turned(sizes, chosen, symmetrise(found.value), found.sigma, most), spread + MOMENT_SHARE * total


def _flat(sizes: Array, most: float) -> tuple[Coordinates, Variation]:
    """Return features of one size, none of which bends the loss by more than UNHEARD."""
    d = len(sizes)
    return _scaled(sizes, np.zeros((d, 0)), np.zeros(0), (1 / d, UNHEARD), most)


def _turned(
    sizes: Array, chosen: NDArray[np.int64], moment: Array, sigma: float, most: float
) -> tuple[Coordinates, Variation]:
    """Return directions of one size, from the released moment of the chosen features."""
    d, k = len(sizes), len(chosen)
    trace = float(np.trace(moment))
    if trace <= CLEAR * math.sqrt(k) * sigma:  # noise alone, as where users have no rows
        return _flat(sizes, most)
    values, vectors = np.linalg.eigh(moment)
    every = trace * d / k  # what all features have; those of one size have as much each
    heard = math.sqrt(2 * k) * sigma / every  # the radius of the noise's eigenvalues
    values = values / every
    known = values > heard
    basis = np.zeros((d, int(known.sum())))
    basis[chosen] = vectors[:, known]
    rest = max((1 - float(values[known].sum())) / max(d - basis.shape[1], 1), 1e-6)
    return _scaled(sizes, basis, values[known], (rest, max(rest, heard / 2)), most)


def _scaled(
    sizes: Array, basis: Array, known: Array, rest: tuple[float, float], most: float
) -> tuple[Coordinates, Variation]:
    """Return directions over what each bends the loss by, and over a ridge.

    Args:
        sizes: (d,), of features.
        basis: (d, k), directions that are told apart.
        known: (k,), the part of all squares that each of them has.
        rest: the part that each other direction is expected to have, and the most that it may have: beyond that steps
            would overshoot.
        most: degrees of freedom that are worth while.
    """
    others = len(sizes) - len(known)
    parts, steepest = (np.append(known, np.full(others, each)) for each in rest)
    ridge = ridge_for(parts, steepest, most)
    stretch, flat = 1 / np.sqrt(STEEPEST * (known + ridge)), 1 / math.sqrt(STEEPEST * (rest[1] + ridge))
    found = Coordinates(sizes, basis, stretch, flat, degrees(parts, steepest, ridge))
    return found, Variation(basis, known / (known + ridge), rest[0] / (rest[1] + ridge))


def degrees(parts: Array, steepest: Array, ridge: float) -> float:
    """Return the degrees of freedom of directions: the mean square of rows there, times STEEPEST."""
    return float((parts / (steepest + ridge)).sum())


def ridge_for(parts: Array, steepest: Array, most: float) -> float:
    """Return the least ridge that leaves at most so many degrees of freedom."""
    low, high = 1e-7, 1e3
    if degrees(parts, steepest, low) <= most:
        return low
    for _ in range(60):
        middle = math.sqrt(low * high)
        low, high = (middle, high) if degrees(parts, steepest, middle) > most else (low, middle)
    return high
