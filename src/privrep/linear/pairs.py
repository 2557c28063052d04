"""Factors of items from noisy sums over pairs of items, and whether such sums are worth their price.

The sum of x x^T over users, x what is left of a user's ratings as a direction, is W_jl <F_j, F_l> off the diagonal.
W_jl, how often both are rated, is the sum of p p^T. It is released as well, so nothing is assumed of which items are
rated together. Each entry has the noise of privacy and, as W_jl tells, the noise of sampling. Over its standard
deviation every entry has noise of size one. Eigenvalues that stand above the edge of such noise are kept, and shrunk by
it (Donoho, Gavish, Johnstone 2018). So are the factors of single items, the more the rarer an item is. The diagonal
holds all else, too, and is treated as missing.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np

from privrep.linear.offsets import Items, predict_loss
from privrep.linear.spectrum import find_above, reaches
from privrep.typing import Array

MAX_RANK = 30
SURE = 0.5  # the largest eigenvalue of noise alone stays below that, 19 times of 20; and below 0, five times of six
EDGE = 1.05  # over the largest eigenvalue of noise, of what counts as seen in how often items are rated together
TASTES = 0.025 / np.sqrt(np.arange(1, 11))  # parts of the variance of ratings that tastes are guessed to explain
SHARES = (0.0, 0.1, 0.2, 0.3, 0.4, 0.5, 0.6, 0.7, 0.8, 0.9, 0.95)


@dataclass(frozen=True)
class PairSums:
    """Released sums over pairs of items, and the noise of an entry off the diagonal."""

    pairs: Array  # (K, K)
    noise: float  # standard deviation

    def average(self, other: PairSums) -> PairSums:
        """Return the average of two releases of the same sum, weighted by their precision."""
        mine, theirs = self.noise**-2, other.noise**-2
        return PairSums((mine * self.pairs + theirs * other.pairs) / (mine + theirs), (mine + theirs) ** -0.5)


def read_together(sums: PairSums) -> Array:
    """Return W, (K, K): how often items are rated together, without what may be noise, never negative."""
    radius = 2 * math.sqrt(len(sums.pairs)) * sums.noise
    values, vectors = find_above(sums.pairs, EDGE * radius)
    size = np.sqrt(values**2 - radius**2)
    return np.asarray(np.maximum((vectors * size) @ vectors.T, 0.0))


def see_factors(sums: PairSums, together: Array) -> bool:
    """Return whether any factor may stand out: an eigenvalue reaches the edge of noise, the diagonal set to zero.

    Filling the diagonal in raises eigenvalues. So it need not be filled in for this.

    Args:
        sums: over pairs, of what is left of ratings.
        together: W, (K, K).
    """
    matrix = sums.pairs / _find_deviation(sums, together)
    np.fill_diagonal(matrix, 0.0)
    return reaches(matrix, 2 * math.sqrt(len(together)))


def _find_deviation(sums: PairSums, together: Array) -> Array:
    """Return the standard deviation of each entry of sums over pairs, (K, K): of privacy, and of sampling.

    Args:
        sums: over pairs.
        together: W, (K, K).
    """
    few = float(np.trace(together)) / max(float(together.sum()), 1e-300)  # the inverse of how many items users rated
    return np.sqrt(sums.noise**2 + together * min(few, 1.0))


def find_factors(sums: PairSums, together: Array, rank: int | None) -> tuple[Array, Array]:
    """Return factors of the items, (K, k), and the mean squared sine of each with the truth, (k,).

    Args:
        sums: over pairs, of what is left of ratings.
        together: W, (K, K).
        rank: the most factors to keep; None: as many as stand out.
    """
    K = len(together)
    deviation = _find_deviation(sums, together)
    signal = together / deviation
    np.fill_diagonal(signal, 0.0)
    strength = (signal**2).mean(axis=1)
    strength = np.sqrt(strength / max(math.sqrt(float(strength.mean())), 1e-300))  # signal_jl is about the product
    radius = 2 * math.sqrt(K)
    values, vectors = _decompose_without_diagonal(sums.pairs / deviation, radius, MAX_RANK if rank is None else rank)
    size = (values + np.sqrt(values**2 - radius**2)) / 2  # before noise pushed them up
    error = (radius / 2 / size) ** 2
    return _shrink_factors(vectors * np.sqrt(size), strength, error * size / K), np.minimum(error, 1.0)


def _decompose_without_diagonal(matrix: Array, radius: float, rank: int) -> tuple[Array, Array]:
    """Return eigenvalues above the noise, (k,), and their vectors, (K, k), of a matrix whose diagonal is unknown.

    The diagonal is filled in from them, a few times over.

    Args:
        matrix: (K, K); its diagonal is overwritten.
        radius: of the noise's eigenvalues.
        rank: the most eigenvalues to keep.
    """
    d = len(matrix)
    edge = radius * (1 + SURE * d ** (-2 / 3))
    diagonal = np.zeros(d)
    for _ in range(10):
        np.fill_diagonal(matrix, diagonal)
        values, vectors = (part[..., :rank] for part in find_above(matrix, edge))
        before, diagonal = diagonal, vectors**2 @ np.sqrt(values**2 - radius**2)
        if np.abs(diagonal - before).max() < 1e-2 * radius:
            break
    return values, vectors


def _shrink_factors(rows: Array, strength: Array, noise: Array) -> Array:
    """Return F_ji, (K, k), from rows_ji = strength_j F_ji + noise of variance noise_i.

    F_ji is taken to be normal with variance tau_i, found by moments.

    Args:
        rows: (K, k).
        strength: (K,).
        noise: (k,).
    """
    tau = np.maximum((rows**2 - noise).sum(axis=0), 0.0) / max(float(strength @ strength), 1e-300)
    factors: Array = rows * strength[:, None] * tau / (strength[:, None] ** 2 * tau + noise)
    return factors


@dataclass(frozen=True)
class TastePlan:
    """The part of the budget that pairs of items get, and how many items are paired: the items rated most."""

    share: float
    items: int


def plan_taste(items: Items, variance: float, precision: float, mu_squared: float, rows: float, most: int) -> TastePlan:
    """Return the part of a budget for pairs that is expected to lose least, where offsets could have it as well.

    Nothing is known of tastes beforehand. They are guessed to explain TASTES of what is left of ratings.

    Args:
        items: how often they were rated.
        variance: of the offsets.
        precision: of the sums that offsets are known by.
        mu_squared: what is there to spend.
        rows: ratings of a typical user.
        most: the most items that can be paired.
    """
    covered = np.cumsum(np.sort(items.presence)[::-1]) / items.presence.sum()
    sizes = sorted({min(most, len(covered), 2**power) for power in range(3, 14)})
    best, plan = -math.inf, TastePlan(0.0, 0)
    for share in SHARES:
        loss = predict_loss(items, variance, precision + (1 - share) * mu_squared / 4)
        for size in sizes if share else (0,):
            gain = _predict_gain(items.users, float(covered[size - 1]), size, share * mu_squared, rows) if size else 0.0
            if gain - loss > best + 1e-6:
                best, plan = gain - loss, TastePlan(share, size)
    return plan


def _predict_gain(users: float, covered: float, size: int, mu_squared: float, rows: float) -> float:
    """Return the part of a rating's variance that factors of this many items are expected to explain.

    Args:
        users: how many there are.
        covered: the part of all ratings that are of these items.
        size: how many items are paired.
        mu_squared: what pairs cost.
        rows: ratings of a typical user.
    """
    rated = rows * covered
    found = TASTES * users * min(rated / 2, 1.0)  # eigenvalues
    noise = size * (1 / mu_squared + users / size**2)  # square of half the edge
    known = rated * TASTES / (rated * TASTES + 1)  # of a user's taste, by its ratings
    return covered * float((TASTES * known * np.maximum(1 - noise / found**2, 0.0)).sum())
