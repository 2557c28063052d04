"""Doubt about predictions: what heads with a prior leave to doubt, the noise of targets, and intervals.

The standard deviation of a prediction's error is the noise's times the root of 1 + doubt, the doubt about this
user's head at this row. Errors have heavier tails than a normal distribution, and the noise of privacy in the prior
adds to them. Intervals therefore use released quantiles of users' own errors over their standard deviations.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray
from scipy.special import ndtri

from privrep.errors import InputError
from privrep.heads.label_posterior import find_new_variance, find_trust
from privrep.heads.posterior import find_doubt_at
from privrep.heads.regression import OWN, PRIOR
from privrep.local.prior import QUANTILES, HeadPrior, LabelPrior
from privrep.typing import Array

SAYS_NOTHING = "this model says nothing of its uncertainty: "
NO_PRIOR = f"{SAYS_NOTHING}intervals are made of a prior of heads, and it has none."


@dataclass(frozen=True)
class Doubts:
    """The doubt that heads leave. The head of user i for target c has number i * targets + c."""

    prior: HeadPrior
    origin: Array  # (heads, p) and
    doubt: Array  # (heads, .), as `posterior.PosteriorHeads` has them
    new: NDArray[np.bool_]  # (heads,): heads of users without rows, which are the prior mean

    @property
    def targets(self) -> int:
        """Return how many targets each user has."""
        return len(self.prior.noise)

    def deviations(self, X: Any, users: NDArray[np.int64]) -> Array:
        """Return the standard deviations of errors.

        Args:
            X: rows (rows, d), which may be sparse.
            users: the position of each row's user, -1 for a user without a head, (rows,).

        Returns:
            (rows,), or (rows, targets) where there are several.
        """
        images = np.asarray(X @ self.prior.factor)
        return self._each([self._deviations(images, users, c) for c in range(self.targets)])

    def half_widths(self, X: Any, users: NDArray[np.int64], coverage: float) -> Array:
        """Return how far intervals reach to either side, in the shape of `deviations`.

        Args:
            X: rows (rows, d), which may be sparse.
            users: the position of each row's user, -1 for a user without a head, (rows,).
            coverage: the share of targets that intervals cover.
        """
        check_coverage(coverage)
        known, new = (_find_quantile(self.prior, coverage, known) for known in (True, False))
        return self.deviations(X, users) * self._each(
            [np.where(self._newcomers(users, c), new, known) for c in range(self.targets)]
        )

    def _deviations(self, images: Array, users: NDArray[np.int64], target: int) -> Array:
        """Return the standard deviations of errors for one target, (rows,).

        Args:
            images: rows times the prior's factor, (rows, p).
            users: the position of each row's user, -1 for a user without a head, (rows,).
            target: its position.
        """
        heads = users * self.targets + target
        doubt = find_doubt_at(self.doubt[heads], images - self.origin[heads])
        ratio = np.where(self._newcomers(users, target), self.prior.new_ratio[target], 1 + np.maximum(doubt, 0.0))
        return np.sqrt(self.prior.noise[target] * ratio)

    def _newcomers(self, users: NDArray[np.int64], target: int) -> NDArray[np.bool_]:
        """Return a mask of rows whose user's prediction is the prior mean, (rows,).

        Args:
            users: the position of each row's user, -1 for a user without a head, (rows,).
            target: its position.
        """
        return (users < 0) | self.new[users * self.targets + target]

    def _each(self, columns: list[Array]) -> Array:
        """Return columns (rows,) as they are asked for: one by itself, or several side by side."""
        return columns[0] if self.targets == 1 else np.stack(columns, axis=1)


@dataclass(frozen=True)
class Trust:
    """The trust in outputs of classifiers: the less, the more is left to doubt about a user's head."""

    prior: LabelPrior
    origin: Array  # (heads, p) and
    doubt: Array  # (heads, .), as `posterior.PosteriorHeads` has them
    kind: NDArray[np.int8]  # (heads,)

    def factors(self, X: Any, users: NDArray[np.int64]) -> Array:
        """Return factors of outputs, (rows,).

        Args:
            X: rows (rows, d), which may be sparse.
            users: the position of each row's user, -1 for a user without a head, (rows,).
        """
        prior, q = self.prior, self.prior.targets
        heads = users * q
        new = (users < 0) | (self.kind[heads] == PRIOR)
        if not prior.logits:
            return np.ones(len(users))
        images = np.asarray(X @ prior.factor)
        variance = np.stack([find_doubt_at(self.doubt[heads + c], images - self.origin[heads + c]) for c in range(q)])
        found = prior.known * find_trust(np.maximum(variance, 0.0))
        if new.any():
            mean = prior.mean
            moved = images[new] - (mean.centre * mean.located) @ prior.factor
            unknown = find_new_variance(moved, prior.level_variance_at(1))
            found[new] = prior.new * find_trust(np.ascontiguousarray(unknown.T))
        return np.where(~new & (self.kind[heads] == OWN), 1.0, found)


def _find_quantile(prior: HeadPrior, coverage: float, known: bool) -> float:
    """Return the quantile of errors at this coverage; beyond the last known one, tails are taken to be normal.

    Args:
        prior: with released quantiles.
        coverage: the share of errors below the quantile.
        known: whether users have heads; else they are newcomers.
    """
    last = QUANTILES[-1]
    farther = ndtri(0.5 + coverage / 2) / ndtri(0.5 + last / 2) if coverage > last else 1.0
    return prior.quantile(min(coverage, last), known) * float(farther)


def check_coverage(coverage: float, name: str = "coverage") -> None:
    """Raise InputError unless a share of rows lies between 0 and 1.

    Args:
        coverage: the share.
        name: of the setting, for the sentence.
    """
    if not isinstance(coverage, int | float | np.number) or not 0 < coverage < 1:
        raise InputError(f"{name} must lie between 0 and 1, as 0.9 does. Got {coverage!r} instead.")


def describe_unknown(rows: int, users: int, skipped: bool = False, ratings: bool = False) -> str:
    """Return a sentence about rows of users without a head: how many were predicted, or left out.

    Args:
        rows: how many rows they have.
        users: how many users they are.
        skipped: whether the rows were left out.
        ratings: whether the model is one of ratings.
    """
    how = "the level and the items' offsets" if ratings else "the prior mean"
    return (
        f"{rows:,} {'row' if rows == 1 else 'rows'} of {users:,} {'user' if users == 1 else 'users'} without a head: "
        f"{'left out' if skipped else f'predicted with {how}'}"
    )
