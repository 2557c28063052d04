"""Newton's steps from a released gradient and its curvature, shrunk by how much of them is noise."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

import numpy as np

from privrep.linear.gathering import Heard, Outputs
from privrep.privacy.billboard import Release
from privrep.privacy.moments import packed_size, symmetrise
from privrep.typing import Array

BENT = 2.5  # standard deviations of its noise from which on a mean curvature is one: it may be off by two fifths
MOVED = 3.3  # the same, above which a level is moved: zero is often right, and its error is every user's
BELIEVED = 2.6  # standard deviations of its noise from which on a number is believed


@dataclass(frozen=True)
class Curvature:
    """A released curvature over its mean eigenvalue. It is noisy, and gets better with every step."""

    shape: Array  # (p, p), of mean eigenvalue about one; (p, 1) where all directions are taken to bend alike
    mean: float  # eigenvalue, in the units of the last release
    noise: float  # standard deviation of the noise in `shape`
    sigma: float  # and in `mean`

    @classmethod
    def read(cls, released: Release, skip: int, p: int, tail: float, full: bool) -> Curvature:
        """Return the curvature that one release shows.

        Args:
            released: numbers of the gradient, then the curvature times `tail`.
            skip: how many numbers the gradient has.
            p: coordinates of the curvature.
            tail: the factor of the curvature.
            full: whether the curvature is a matrix, not one number.
        """
        bend, sigma = released.value[skip:] / tail, released.sigma / tail
        if not full:
            return cls(np.ones((p, 1)), float(bend[0]), math.inf, sigma)
        H = symmetrise(bend)
        mean = float(np.trace(H)) / p
        return cls(H / max(mean, sigma), mean, sigma / max(mean, sigma), sigma / math.sqrt(p))

    def combine(self, other: Curvature | None) -> Curvature:
        """Return the mean of both shapes, weighted by precision; the mean eigenvalue is this release's."""
        if other is None or math.isinf(self.noise) or math.isinf(other.noise):
            return self
        mine, theirs = self.noise**-2, other.noise**-2
        shape = (mine * self.shape + theirs * other.shape) / (mine + theirs)
        return replace(self, shape=shape, noise=(mine + theirs) ** -0.5)

    def read_gradient(self, released: Release, outputs: Outputs) -> Heard:
        """Return the gradient of a release with the curvature as it is known so far; with zeros where that is all
        noise.

        Args:
            released: numbers of the gradient (q p), then the curvature.
            outputs: how the q outputs are turned.
        """
        p, found, (q, k) = len(self.shape), self.directions(), outputs.turn.shape
        if found is None:
            return Heard(np.zeros((p, k)), np.zeros((p, p)), released.sigma)
        values, turn = found
        curvature = np.diag(values) if turn is None else (turn * values) @ turn.T
        gradient = released.value[: p * q].reshape(q, p).T
        return Heard(gradient @ outputs.turn, curvature, released.sigma)

    def directions(self) -> tuple[Array, Array | None] | None:
        """Return the curvature's eigenvalues (p,) and eigenvectors (p, p); None where it is all noise.

        The shape is shrunk towards the identity by how much of it may be noise. Eigenvectors are None where they are
        the coordinates themselves.
        """
        p = len(self.shape)
        if self.mean < BENT * self.sigma:
            return None
        if math.isinf(self.noise):
            return np.full(p, self.mean), None
        rest = self.shape - np.eye(p)
        size = float((rest**2).sum())
        keep = max(0.0, 1 - self.noise**2 * packed_size(p) / size) if size > 0 else 0.0
        values, turn = np.linalg.eigh(np.eye(p) + keep * rest)
        return self.mean * np.maximum(values, max(0.1, keep * self.noise * math.sqrt(p))), turn


@dataclass(frozen=True)
class NewtonStep:
    """A step of Newton's method, (p, q), and by how much it lowers the mean square of what was left, over all
    targets."""

    move: Array
    gain: float

    def left(self, size: float) -> float:
        """Return the size of what is left after the step, at least a third of the size before it."""
        return math.sqrt(max(size**2 - 0.8 * self.gain, size**2 / 9))


def solve_newton(released: Release, bend: Curvature, outputs: Outputs, spare: int) -> NewtonStep | None:
    """Return curvature^-1 gradient, shrunk by how much of it is noise; None where the curvature is all noise.

    Args:
        released: numbers of the gradient (q p), then the curvature.
        bend: the curvature as all steps so far show it.
        outputs: how the q outputs are turned.
        spare: how many first coordinates are shrunk by themselves: 1 for a level, else 0.
    """
    p, found, (q, _) = len(bend.shape), bend.directions(), outputs.turn.shape
    if found is None:
        return None
    gradient = released.value[: p * q].reshape(q, p).T @ outputs.turn
    values, turn = found
    if turn is None and spare == 0:
        step = _shrink_step(gradient, values, released.sigma)
        return NewtonStep(outputs.back(step), max(float((gradient * step).sum()) / (bend.mean * q), 0.0))
    turn = np.eye(p) if turn is None else turn
    step = turn @ _shrink_step(turn.T @ gradient, values, released.sigma)
    if spare:  # a level moves by itself: contexts that are all noise do not keep it
        whole = (turn / values) @ (turn.T @ gradient)
        noise = released.sigma * np.sqrt(((turn / values) ** 2 @ np.ones(p))[:spare])
        moved = np.abs(whole[:spare]) > MOVED * noise[:, None]
        shrunk = whole[:spare] - noise[:, None] ** 2 / np.where(moved, whole[:spare], 1.0)
        step[:spare] = np.where(moved, shrunk, step[:spare])
    return NewtonStep(outputs.back(step), max(float((gradient * step).sum()) / (bend.mean * q), 0.0))


def _shrink_step(gradient: Array, values: Array, sigma: float) -> Array:
    """Return the posterior mean of a step, (p, k), in the eigenvectors of its curvature.

    The step is taken to be normal with one variance for all directions, the one under which the gradient is likeliest.
    Where the likelihood hardly favours it over no step, return zeros.

    Args:
        gradient: in the curvature's eigenvectors, (p, k).
        values: eigenvalues of the curvature, (p,).
        sigma: standard deviation of the noise in the gradient.
    """
    steps = gradient / values[:, None]
    largest = max(float((steps**2).max()), 1e-300)
    tried = largest * 2.0 ** np.arange(2, -30, -1.0)
    spread = values[None, :, None] ** 2 * tried[:, None, None] + sigma**2
    likelihood = -0.5 * (np.log(spread / sigma**2) + gradient**2 * (1 / spread - 1 / sigma**2)).sum(axis=(1, 2))
    best = int(likelihood.argmax())
    if likelihood[best] < 0.5 * BELIEVED**2:
        return np.zeros_like(steps)
    return np.asarray(steps * (values**2 * tried[best] / (values**2 * tried[best] + sigma**2))[:, None])
