"""Offsets of items from noisy sums: shrunk by the noise of privacy and by that of sampling.

A pass releases S_j, the sum of users' directions, of which P_j (c_j - c'_j) is expected: P_j says how many users rated
item j, and c' are the offsets so far. Passes are averaged by their noise. Offsets are normal around a line in the
logarithm of P_j, for items that many rate are often rated otherwise than those that few do. Line and variance are those
that make the sums likeliest (empirical Bayes).
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np

from privrep.typing import Array

SHIFT = 0.3  # standard deviation of what named items are rated above users' levels, all together
SLOPE = 0.1  # standard deviation of the slope of offsets in the logarithm of how often items are rated
EVIDENCE = 1.0  # log-likelihood that offsets which differ must gain over offsets which do not
VARIANCES = np.concatenate([[0.0], np.geomspace(1e-4, 2.0, 40)])


@dataclass(frozen=True)
class Items:
    """Which items were rated how often, as released: P_j, floored where it is lost in noise."""

    presence: Array  # (d,)
    users: float

    @property
    def share(self) -> Array:
        """Return the part of all ratings that each item has, (d,)."""
        return self.presence / self.presence.sum()

    @property
    def sampling(self) -> Array:
        """Return the variance of each sum that comes from which users there are, (d,)."""
        return self.share * self.users


def read_items(counts: Array, sigma: float, users: float) -> Items:
    """Return how often items were rated, from noisy counts of users' unit vectors."""
    return Items(np.maximum(counts, max(sigma, 1e-3 * float(counts.max()), 1e-9)), users)


@dataclass(frozen=True)
class Evidence:
    """What passes say of the offsets: P_j c_j plus noise, averaged over passes."""

    pull: Array  # (d,)
    precision: float = 0.0  # the inverse of the noise's variance

    def with_pass(self, released: Array, sigma: float, items: Items, offset: Array) -> Evidence:
        """Return the evidence with one more pass, which was about what these offsets leave."""
        weight = 1 / sigma**2
        pull = (self.precision * self.pull + weight * (released + items.presence * offset)) / (self.precision + weight)
        return Evidence(pull, self.precision + weight)


@dataclass(frozen=True)
class Offsets:
    """Offsets as they are expected to be, and the variance of what stays unknown of each."""

    offset: Array  # (d,)
    variance: float  # of offsets around the line


def estimate_offsets(evidence: Evidence, items: Items) -> Offsets:
    """Return posterior means of the offsets."""
    P, noise = items.presence, items.sampling + 1 / evidence.precision
    rated = np.log(P / P.mean())
    design = np.column_stack([P, P * (rated - items.share @ rated)])
    best, found = -math.inf, Offsets(np.zeros_like(P), 0.0)
    for variance in VARIANCES:
        total = P**2 * variance + noise
        weighed = design / total[:, None]
        line = np.linalg.solve(weighed.T @ design + np.diag([SHIFT**-2, SLOPE**-2]), weighed.T @ evidence.pull)
        left = evidence.pull - design @ line
        beforehand = 0.5 * float(((line / (SHIFT, SLOPE)) ** 2).sum()) + EVIDENCE * float(variance > 0)
        likelihood = -0.5 * float(np.log(total).sum() + (left**2 / total).sum()) - beforehand
        if likelihood > best:
            best, found = likelihood, Offsets(design @ line / P + variance * P * left / total, float(variance))
    return found


def expected_loss(items: Items, variance: float, precision: float) -> float:
    """Return the part of a rating's variance that offsets will leave unexplained at such a precision of the sums.

    Args:
        items: how often they were rated.
        variance: of the offsets.
        precision: the inverse of the variance of the noise, all passes together.
    """
    noise = items.sampling + 1 / precision
    return float(items.share @ (variance * noise / (items.presence**2 * variance + noise))) if variance else 0.0
