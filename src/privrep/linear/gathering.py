"""The joint evidence of all steps on labels so far about level, slopes and contexts.

Parameters are the common slopes w, the level, and the slopes b of users' means. w says how outputs change with the
difference between a row and what its user's mean row will be. Contexts are c = b - w along the axes of users' means.
The two gradients of a step are derivatives by w and by b. A user's mean row is known by its rows alone, so what is left
of it moves with w. So the curvature between w and b follows from the curvature of b, and nothing more is released.

A step has a gradient g and a curvature H, taken from parameters t. It says that H t + g is H times the best parameters,
with noise of privacy. The best parameters differ from the true ones by sampling noise, whose variance is the inverse of
the curvature. Slopes are taken to be normal around the first ones, contexts around zero. Where contexts cannot be told
from noise, rows and means of users tell of one and the same slope. Both variances are averaged over, by how likely all
steps together are under them.

Outputs of several classes bend by diag(p) - p p^T, where p is how frequent classes are. Outputs of frequent classes
bend more than outputs of rare ones. They are turned to the eigenvectors of that matrix, each of which bends by itself;
see `Outputs`.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray

from privrep.local.prior import PriorMean
from privrep.local.transform import FeatureTransform
from privrep.typing import Array

Flags = NDArray[np.bool_]
LASTING = 50.0  # variance of users' means over their rows' variance, from which on an axis is constant within users
LEVELS = 1.5  # standard deviation of levels around the first one
SIZES = np.concatenate([[0.0], 2.0 ** np.arange(-7.0, 2.0)])  # standard deviations that slopes and contexts may have
LEAST = 1e-9  # of the largest eigenvalue: what is less counts as nothing
APART = 4.0  # of the same, for each output more than one, by which outputs must be likelier with variances of their own
MOST_APART = 16  # outputs whose variances are looked at apart


@dataclass(frozen=True)
class Outputs:
    """The turn of outputs after which each bends by itself, and how much more each bends than all of them on
    average."""

    turn: Array  # (q, k)
    bend: Array  # (k,), of mean one

    @classmethod
    def of(cls, level: Array, several: bool) -> Outputs:
        """Return the outputs of a level.

        Args:
            level: mean outputs, (q,).
            several: whether they are a softmax of several classes; else they are left as they are.
        """
        if not several:
            return cls(np.eye(len(level)), np.ones(len(level)))
        p = np.exp(level - level.max())
        p = p / p.sum()
        values, vectors = np.linalg.eigh(np.diag(p) - np.outer(p, p))
        return cls(vectors[:, 1:], values[1:] / values[1:].mean())  # a number added to all outputs changes nothing

    def to(self, parameters: Array) -> Array:
        """Return parameters (p, q) along the turned outputs, times their bends: (p, k)."""
        return np.asarray(parameters @ self.turn * self.bend)

    def back(self, turned: Array) -> Array:
        """Return parameters (p, q) from parameters along the turned outputs, (p, k)."""
        return np.asarray((turned / self.bend) @ self.turn.T)


@dataclass(frozen=True)
class Heard:
    """A released gradient, along turned outputs, and the curvature of outputs on average that goes with it."""

    gradient: Array  # (p, k)
    curvature: Array  # (p, p)
    sigma: float  # of the noise in the gradient


@dataclass(frozen=True)
class Coordinates:
    """The way to write a prior mean as parameters: slopes in the coordinates of rows, the level, b along the axes."""

    transform: FeatureTransform
    ahead: Array  # (r, d): slopes along the axes, by slopes of features as they come
    unit: Array  # (r,): of b
    left: Array  # (d, r): what is left of mean rows, by their coordinates
    lasting: Flags  # (r,): axes along which rows of one user hardly differ

    @classmethod
    def of(cls, mean: PriorMean, transform: FeatureTransform, rows: float) -> Coordinates:
        """Return the coordinates of a prior mean.

        Args:
            mean: the prior mean.
            transform: public coordinates of rows.
            rows: a typical user's number of rows.
        """
        known = mean.spread / (mean.spread + 1 / rows)
        unit = mean.unit_factors(rows, rows)
        left = transform.rows((mean.means_at(transform) * ((1 - known) / unit)).T).T
        ahead = mean.along_axes(np.eye(len(mean.axes)), transform)
        return cls(transform, ahead, unit / known, left, mean.spread > LASTING)

    def along(self, slopes: Array) -> Array:
        """Return slopes along the axes of users' means, (r, q), from slopes (d, q) of features as they come."""
        return np.asarray(self.ahead @ slopes / self.unit[:, None])

    @property
    def turn(self) -> Array:
        """Return the matrix (d + 1 + r, d + 1 + r) that makes parameters of slopes, the level and contexts.

        Along axes in which rows of one user hardly differ, b stays as it is: no slope tells of it.
        """
        d, r = self.left.shape
        turn = np.eye(d + 1 + r)
        turn[d + 1 :, :d] = np.where(self.lasting[:, None], 0.0, self.along(self.transform.to_original(np.eye(d))))
        return turn

    def parameters(self, mean: PriorMean) -> Array:
        """Return the parameters of a prior mean, (d + 1 + r, q): slopes, level and b."""
        t = self.transform
        scaled = mean.slopes * t.scale[:, None]
        turned = scaled if t.whitening is None else np.linalg.lstsq(t.whitening, scaled, rcond=1e-12)[0]
        return np.concatenate([turned, mean.level[None], self.along(mean.slopes) + mean.context / self.unit[:, None]])

    def mean_of(self, parameters: Array, mean: PriorMean, varies: Flags) -> PriorMean:
        """Return the prior mean with these parameters.

        Args:
            parameters: slopes, level and b, (d + 1 + r, q).
            mean: the prior mean whose other parts stay.
            varies: whether each column varies within users, (d,); columns that do not have no slopes.
        """
        d = len(varies)
        slopes = self.transform.to_original(parameters[:d])
        slopes[~varies] = 0.0
        context = (parameters[d + 1 :] - self.along(slopes)) * self.unit[:, None]
        return replace(mean, slopes=slopes, level=parameters[d], context=context)

    def curvature(self, within: Array, between: Array) -> Array:
        """Return the joint curvature of both gradients, (d + 1 + r, d + 1 + r), made positive semi-definite.

        Args:
            within: curvature by slopes, (d, d).
            between: curvature by the level and b, (1 + r, 1 + r).
        """
        cross = self.left @ between[1:]
        for _ in range(12):  # noise may leave it indefinite
            H = np.block([[within, cross], [cross.T, between]])
            if np.linalg.eigvalsh(H)[0] >= 0:
                break
            cross = 0.7 * cross
        return np.asarray(H)


@dataclass(frozen=True)
class Gathered:
    """The releases so far as one observation of the parameters, along turned outputs and times their bends."""

    first: Array  # (p, k): parameters before any step
    precision: Array  # (p, p): of the noise of privacy
    told: Array  # (p, k): precision times parameters
    curvature: Array  # (p, p): the last

    @classmethod
    def nothing(cls, first: Array) -> Gathered:
        """Return the evidence before any step.

        Args:
            first: the first parameters, (p, k).
        """
        p = len(first)
        return cls(first, np.zeros((p, p)), np.zeros_like(first), np.zeros((p, p)))

    def rescale(self, factor: float, coordinates: Coordinates) -> Gathered:
        """Return the same evidence about parameters whose level and contexts are `factor` times as large; slopes
        stay."""
        d, p = len(coordinates.left), len(self.first)
        change = np.diag(np.where(np.arange(p) < d, 1.0, factor))
        change[d + 1 :, :d] = (1 - factor) * coordinates.along(coordinates.transform.to_original(np.eye(d)))
        before = np.linalg.inv(change)
        precision, told = before.T @ self.precision @ before, before.T @ self.told
        return replace(self, first=change @ self.first, precision=precision, told=told)

    def add_step(self, within: Heard, between: Heard, here: Array, coordinates: Coordinates) -> Gathered:
        """Return the evidence with one more step.

        Args:
            within: the gradient by slopes, with its curvature.
            between: the gradient by the level and b, with its curvature.
            here: the parameters from which the step was taken, (p, k).
            coordinates: of the parameters.
        """
        H = coordinates.curvature(within.curvature, between.curvature)
        g = np.concatenate([within.gradient, between.gradient])
        sigma = np.repeat([within.sigma, between.sigma], [len(within.gradient), len(between.gradient)])
        weighed = H / sigma**2
        precision, told = weighed @ H, weighed @ (g + H @ here)
        keep = self._agreement(precision, told)
        return replace(self, precision=keep * self.precision + precision, told=keep * self.told + told, curvature=H)

    def _agreement(self, precision: Array, told: Array) -> float:
        """Return the weight of earlier steps beside a new one: the part of their precision under which the new one is
        likeliest.

        Steps from far away are not quite right, because curvatures change on the way.

        Args:
            precision: of the new step, (p, p).
            told: its precision times parameters, (p, k).
        """
        root, backward = _find_roots(precision)
        old, turn = np.linalg.eigh(self.precision)
        if not len(root) or old[-1] <= 0:
            return 1.0
        floor = np.maximum(old, LEAST * float(old[-1]))
        missed = backward @ told - root @ (turn @ ((turn.T @ self.told) / floor[:, None]))
        spread, basis = np.linalg.eigh((root @ turn / floor) @ (root @ turn).T)
        square = ((basis.T @ missed) ** 2).sum(axis=1)
        parts = 2.0 ** -np.arange(0.0, 30.0)
        total = 1 + np.maximum(spread, 0.0) / parts[:, None]
        likely = -0.5 * (square / total + told.shape[1] * np.log(total)).sum(axis=1)
        return float(parts[likely.argmax()])

    def best(self, coordinates: Coordinates, bend: Array) -> tuple[Array, bool]:
        """Return the posterior mean of the parameters, (p, k), and whether slopes are other than the first ones.

        Args:
            coordinates: of the parameters.
            bend: of the outputs, (k,).
        """
        d, lasting, turn = len(coordinates.left), coordinates.lasting, coordinates.turn
        root, backward = _find_roots(self.precision)  # in whose coordinates the noise of privacy is one
        if not len(root):
            return self.first, False
        start = np.linalg.solve(turn, self.first)
        start[d + 1 :][~lasting] = 0.0
        observed = backward @ self.told - root @ (turn @ start)
        sampled = root @ _find_roots(self.curvature)[1].T
        search = _Search(root @ turn, observed, sampled @ sampled.T, bend, d, lasting)
        likely, found, moved = search.best()
        if 1 < len(bend) <= MOST_APART:
            _, _, outputs = np.linalg.svd(observed, full_matrices=False)
            each = [search.along(output).best() for output in outputs]
            if sum(one[0] for one in each) > likely + APART * (len(bend) - 1):
                found, moved = np.concatenate([one[1] for one in each], axis=1) @ outputs, any(one[2] for one in each)
        return turn @ (start + found), moved


def _find_odds(size: float) -> float:
    """Return the prior probability of a standard deviation in SIZES: one half for zero, the rest shared evenly."""
    return 0.5 if size == 0 else 0.5 / (len(SIZES) - 1)


def _find_roots(matrix: Array) -> tuple[Array, Array]:
    """Return R with R^T R the matrix, and the transpose of its pseudo-inverse, both (kept, p).

    Directions whose eigenvalue is zero, but for rounding, are left out.

    Args:
        matrix: positive semi-definite, (p, p).
    """
    values, vectors = np.linalg.eigh(matrix)
    kept = values > LEAST * max(float(values[-1]), 1e-300)
    size = np.sqrt(values[kept])
    return (vectors[:, kept] * size).T, (vectors[:, kept] / size).T


@dataclass(frozen=True)
class _Search:
    """An observation, and how likely it is under variances of slopes and contexts."""

    model: Array  # (observed, p)
    observed: Array  # (observed, k)
    sampled: Array  # (observed, observed): sampling noise of outputs that bend by one
    bend: Array  # (k,)
    d: int
    lasting: Flags  # (r,)

    def along(self, output: Array) -> _Search:
        """Return the search for one combination of the outputs, (k,), which bends as they do on average."""
        return replace(self, observed=self.observed @ output[:, None], bend=np.array([output**2 @ self.bend]))

    def best(self) -> tuple[float, Array, bool]:
        """Return the logarithm of the mean likelihood, the posterior mean (p, k), and whether slopes likely have a
        variance.

        Variances are averaged over, each by its likelihood. Beforehand, a variance of zero is as likely as all others
        together.
        """
        tried = [(s > 0, *self._fit(s, c), _find_odds(s) * _find_odds(c)) for s in SIZES for c in SIZES]
        likely = np.array([one[1] for one in tried])
        weights = np.exp(likely - likely.max()) * np.array([one[3] for one in tried])
        total = float(weights.sum())
        found = sum(weight / total * one[2] for weight, one in zip(weights, tried, strict=True))
        moved = float(weights[np.array([one[0] for one in tried])].sum()) > 0.5 * total
        return float(likely.max()) + float(np.log(total)), np.asarray(found), moved

    def _fit(self, slopes: float, context: float) -> tuple[float, Array]:
        """Return the log-likelihood, up to a constant, and the posterior mean, (p, k).

        Args:
            slopes: standard deviation of slopes.
            context: standard deviation of contexts.
        """
        variance = np.concatenate([np.full(self.d, slopes**2), [LEVELS**2], np.full(len(self.lasting), context**2)])
        variance[self.d + 1 :][self.lasting] = max(slopes, context) ** 2
        shaped = self.model * np.sqrt(variance)
        spread, likely, found = shaped @ shaped.T, 0.0, np.empty((len(variance), len(self.bend)))
        for bend in np.unique(self.bend):
            these = self.bend == bend
            total = bend**2 * spread + bend * self.sampled + np.eye(len(spread))
            factor = np.linalg.cholesky(total + LEAST * np.trace(total) * np.eye(len(total)))
            white = np.linalg.solve(factor, self.observed[:, these])
            likely -= 0.5 * float((white**2).sum()) + int(these.sum()) * float(np.log(np.diag(factor)).sum())
            found[:, these] = bend**2 * ((self.model * variance).T @ np.linalg.solve(factor.T, white))
        return likely, found
