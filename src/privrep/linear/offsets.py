"""Offsets of items from noisy sums, shrunk by the noise of privacy and by the noise of sampling.

A pass releases S_j, the sum of users' directions, whose expectation is P_j (c_j - c'_j). P_j says how many users rated
item j, and c' are the offsets so far. Passes are averaged by their noise. Offsets are normal around a line in the
logarithm of P_j, because items that many rate are often rated otherwise than items that few rate. Lines and variances
count by how likely they make the sums (empirical Bayes).
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np

from privrep.typing import Array

SHIFT = 0.3  # standard deviation of what named items are rated above users' levels, all together
SLOPE = 0.1  # standard deviation of the slope of offsets in the logarithm of how often items are rated
FEW = 5.0  # standard deviations that the sum of all sizes must have to be of use
MOST_OVER = 2.0  # of counts over sizes: about 1.25 where many users rated many items
TYPICAL, FOLDS = 0.1, 1.5  # variance of offsets, beforehand, and the standard deviation of its logarithm
VARIANCES = np.geomspace(1e-5, 2.0, 40)


@dataclass(frozen=True)
class Items:
    """Released counts of how often items were rated, with noise, averaged over releases."""

    counts: Array  # (d,)
    sigma: float  # of their noise
    users: float

    @property
    def presence(self) -> Array:
        """Return P_j, floored where it is lost in noise, (d,)."""
        return np.maximum(self.counts, max(self.sigma, 1e-3 * float(self.counts.max()), 1e-9))

    def with_sizes(self, sizes: Array, sigma: float) -> Items:
        """Return the average of these counts with sizes of directions, which are as large but for a factor.

        Args:
            sizes: sums of absolute directions by item, (d,).
            sigma: standard deviation of their noise.
        """
        whole = float(sizes.sum())
        if not whole > FEW * sigma * math.sqrt(len(sizes)) or not float(self.counts.sum()) > 0:
            return self
        factor = float(np.clip(self.counts.sum() / whole, 1.0, MOST_OVER))
        mine, theirs = self.sigma**-2, (factor * sigma) ** -2
        counts = (mine * self.counts + theirs * factor * sizes) / (mine + theirs)
        return Items(counts, (mine + theirs) ** -0.5, self.users)

    @property
    def share(self) -> Array:
        """Return the part of all ratings that each item has, (d,)."""
        return self.presence / self.presence.sum()

    @property
    def sampling(self) -> Array:
        """Return the variance of each sum that comes from which users there are, (d,)."""
        return self.share * self.users


@dataclass(frozen=True)
class Evidence:
    """The evidence of all passes about the offsets: P_j c_j plus noise, averaged over passes."""

    left: Array  # (d,): what passes saw of what earlier offsets had left, averaged
    before: Array  # (d,): the offsets that they left, averaged in the same way
    precision: float = 0.0  # the inverse of the noise's variance

    def with_pass(self, left: Array, sigma: float, offset: Array) -> Evidence:
        """Return the evidence with one more pass.

        Args:
            left: what the pass saw of what offsets leave, (d,).
            sigma: standard deviation of its noise.
            offset: the offsets that it was asked about, (d,).
        """
        weight = 1 / sigma**2
        mine, total = self.precision, self.precision + weight
        return Evidence(
            (mine * self.left + weight * left) / total, (mine * self.before + weight * offset) / total, total
        )


@dataclass(frozen=True)
class Offsets:
    """Expected offsets, and the variance of what stays unknown of each."""

    offset: Array  # (d,)
    variance: float  # of offsets around the line


def estimate_offsets(evidence: Evidence, items: Items) -> Offsets:
    """Return posterior means of the offsets, averaged over variances by how likely each makes the sums."""
    P, noise = items.presence, items.sampling + 1 / evidence.precision
    pull = evidence.left + P * evidence.before
    rated = np.log(P / P.mean())
    design = np.column_stack([P, P * (rated - items.share @ rated)])
    likelihood, offsets = np.empty(len(VARIANCES)), np.empty((len(VARIANCES), len(P)))
    for number, variance in enumerate(VARIANCES):
        total = P**2 * variance + noise
        weighed = design / total[:, None]
        line = np.linalg.solve(weighed.T @ design + np.diag([SHIFT**-2, SLOPE**-2]), weighed.T @ pull)
        left = pull - design @ line
        beforehand = ((line / (SHIFT, SLOPE)) ** 2).sum() + (math.log(variance / TYPICAL) / FOLDS) ** 2
        likelihood[number] = -0.5 * (np.log(total).sum() + (left**2 / total).sum() + beforehand)
        offsets[number] = design @ line / P + variance * P * left / total
    weights = np.exp(likelihood - likelihood.max())
    weights /= weights.sum()
    return Offsets(weights @ offsets, float(weights @ VARIANCES))


def predict_loss(items: Items, variance: float, precision: float) -> float:
    """Return the part of a rating's variance that offsets will leave unexplained at such a precision of the sums.

    Args:
        items: how often they were rated.
        variance: of the offsets.
        precision: the inverse of the variance of the noise, all passes together.
    """
    noise = items.sampling + 1 / precision
    return float(items.share @ (variance * noise / (items.presence**2 * variance + noise)))
