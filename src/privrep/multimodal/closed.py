"""Training on pairs whose texts are a few public classes: few steps of a convex problem, whitened and shrunk.

  moment     the second moment of the images' features     -> the directions in which they vary more than its noise
  steps      gradients of a softmax regression, summed up  -> scores of classes

Gradients are taken in coordinates in which features vary alike, as far as the moment tells. There, noise that is equal
in all directions costs least. All steps start from their sum so far, whose noise is known exactly: it is what every
step adds. Parts of the sum that are little more than noise are shrunk (James and Stein 1961) before the next gradient
is asked for. So a rate that would be too fast for a small budget does no harm, and none has to be tuned. All arithmetic
on releases is public.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import cached_property

import numpy as np

from privrep.multimodal.mechanisms.classes import ClassStep, ClosedRows, MomentStep, Whitening
from privrep.multimodal.towers import Layout, Towers
from privrep.privacy.billboard import Release
from privrep.privacy.bounds import Bound
from privrep.privacy.calibration import Query
from privrep.privacy.moments import symmetrise
from privrep.privacy.release import State
from privrep.privacy.run import Run
from privrep.typing import Array

MOMENT_PAGE = "moment"
MOST_FEATURES = 2048  # the most features of which a second moment is released
MOST_DIRECTIONS = 64  # the most directions of it that are told apart from the others
TOO_NOISY = 0.1  # noise of a moment, as a share of what all directions add up to, from which on none is released
SEEN = 1.05  # an eigenvalue that sticks out of the noise, relative to the largest of noise alone
LEAST_LEFT = 1e-3  # the least share of the trace for directions that do not stick out
TOGETHER = 8  # directions that are shrunk as one
LEAST_KEPT = 0.02  # the least share that is kept of a part that looks like noise alone


def compute_moment_noise(features: int, users: int, mu_squared: float) -> float:
    """Return the largest eigenvalue of a moment's noise, relative to the trace of the moment: a public number.

    Args:
        features: how many numbers a row of features has.
        users: how many users send their moment.
        mu_squared: the budget of the release.
    """
    return 2 * math.sqrt(features / mu_squared) / users


def estimate_whitening(released: Release, features: int, users: int) -> Whitening:
    """Return the map that makes features vary alike, as far as a released moment tells.

    An eigenvalue that sticks out of the noise is corrected for what noise adds to it. It is also corrected for how far
    noise turns its eigenvector (Benaych-Georges and Nadakuditi 2011). All other directions share what is left of the
    trace, which is one for features of length one.

    Args:
        released: the moment, summed over users: a packed triangle of (features, features).
        features: how many numbers a row of features has.
        users: how many users sent their moment.
    """
    values, vectors = np.linalg.eigh(symmetrise(released.value) / users)
    values, vectors = values[::-1], np.ascontiguousarray(vectors[:, ::-1])
    noise = math.sqrt(2 * features) * released.sigma / users
    count = min(int((values > SEEN * noise).sum()), MOST_DIRECTIONS, features - 1)
    seen = values[:count]
    true = (seen + np.sqrt(np.maximum(seen**2 - noise**2, 0.0))) / 2
    overlap = 1 - (noise / (2 * true)) ** 2
    rest = max(1 - float(true @ overlap), LEAST_LEFT) / (features - float(overlap.sum()))
    variances = true * overlap + (1 - overlap) * rest
    rest = max(1 - float(variances.sum()), LEAST_LEFT / features) / (features - count)
    return Whitening(vectors[:, :count], 1 / np.sqrt(variances), 1 / math.sqrt(rest))


@dataclass(frozen=True, eq=False)
class ClosedProblem:
    """The convex problem, but for the scores of classes: all of it public."""

    rows: ClosedRows
    whitening: Whitening
    texts: Array  # (classes, dim): the directions of classes' texts
    steps: int
    clip: float
    rate: float
    average: float  # the share of the steps, the last ones, whose weights are averaged
    temperature: float
    users: int

    @property
    def classes(self) -> int:
        return len(self.texts)

    @property
    def features(self) -> int:
        return self.rows.layout.image_numbers

    @property
    def bound(self) -> Bound:
        """Return the bound of a user's gradient, (classes, features) flat."""
        return Bound(self.clip, self.classes * self.features)

    @cached_property
    def _span(self) -> tuple[Array, Array]:
        """Return the projection of scores onto the scores that embeddings can have, and its way back to embeddings.

        The first is (classes, classes), the second (dim, classes).
        """
        apart = self.texts - self.texts.mean(axis=0)
        back = np.linalg.pinv(apart, rcond=1e-4)
        return apart @ back, back

    def start(self) -> State:
        """Return the state before the first step: scores of zero."""
        scores, weights = np.zeros((self.classes, self.features)), np.zeros(self.texts.shape[1] * self.features)
        return {"total": scores, "scores": scores, "weights": weights, "average": weights, "taken": np.zeros(1)}

    def step(self, state: State) -> ClassStep:
        """Return what users are asked for at a state: the gradient at its scores."""
        return ClassStep(self.rows, self.whitening, state["scores"])

    def move(self, state: State, released: Release) -> State:
        """Return the state after one more gradient: its sum, shrunk scores, and the weights that give these.

        Args:
            state: the state before.
            released: the noisy gradient, summed over users, (classes * features,).
        """
        span, back = self._span
        taken, each = state["taken"] + 1, self.rate / self.users
        total = state["total"] - each * span @ released.value.reshape(self.classes, self.features)
        noise = float(taken[0]) * (each * released.sigma) ** 2
        scores = self.shrink(total, noise)
        weights = (self.temperature * back @ self.whitening.map_weights(scores)).ravel()
        averaged = int(taken[0]) - self.steps + max(round(self.steps * self.average), 1)
        mean = state["average"] + (weights - state["average"]) / averaged if averaged > 0 else state["average"]
        return {"total": total, "scores": scores, "weights": weights, "average": mean, "taken": taken}

    def shrink(self, total: Array, noise: float) -> Array:
        """Return scores with less noise: some directions at a time, by how much they exceed what noise adds up to.

        Args:
            total: the sum of all steps, (classes, features), with equal noise in every number of the span.
            noise: the variance of that noise.
        """
        directions, rank = self.whitening.directions, float(np.trace(self._span[0]))
        along = total @ directions
        others = total - along @ directions.T
        for start in range(0, along.shape[1], TOGETHER):
            some = along[:, start : start + TOGETHER]
            some *= compute_kept_share(some, noise, rank * some.shape[1])
        others *= compute_kept_share(others, noise, rank * (self.features - along.shape[1]))
        return np.asarray(others + along @ directions.T)


def compute_kept_share(part: Array, noise: float, count: float) -> float:
    """Return the factor of James and Stein (1961) for a part with noise of a known variance.

    Args:
        part: the noisy numbers, of any shape.
        noise: the variance of the noise in each number.
        count: how many numbers have noise, where some are known to have none.
    """
    square = float((part**2).sum())
    return max(1 - noise * count / square, LEAST_KEPT) if square > 0 else 1.0


def compute_class_directions(towers: Towers, layout: Layout) -> Array:
    """Return the directions of classes' texts, (classes, dim): the mean of directions of all texts of a class."""
    assert layout.classes is not None
    texts = towers.embed_texts(towers.weights(1.0), layout.bank).astype(np.float64)
    texts /= np.maximum(np.linalg.norm(texts, axis=1, keepdims=True), 1e-12)
    means = np.zeros((layout.class_count, texts.shape[1]))
    np.add.at(means, layout.classes, texts)
    return np.asarray(means / np.maximum(np.linalg.norm(means, axis=1, keepdims=True), 1e-12))


def release_whitening(run: Run, rows: ClosedRows, mu_squared: float) -> Whitening:
    """Return the map that makes features vary alike, for this much of the budget; the identity for nothing.

    Args:
        run: the run whose ledger is charged.
        rows: how rows are read.
        mu_squared: the budget of the release, 0 for none.
    """
    features, users = rows.layout.image_numbers, run.users.facts.users
    if not mu_squared:
        return Whitening(np.zeros((features, 0)), np.zeros(0), 1.0)
    query = Query(Bound(1.0, features**2, acute=True), mu_squared)
    released = run.release(MOMENT_PAGE, MomentStep(rows), {"moment": query})["moment"]
    return estimate_whitening(released, features, users)
