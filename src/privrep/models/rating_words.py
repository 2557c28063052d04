"""Sentences about a model of ratings and what it is worth, by released numbers."""

from __future__ import annotations

import math
from typing import Any

import numpy as np

from privrep.local.representation import FREE, Ratings, Representation
from privrep.models.gains import describe_gains, describe_newcomers
from privrep.typing import Array


def describe_ratings(learned: Representation) -> list[str]:
    """Return sentences about the heads of a model of ratings with a prior and gains."""
    ratings = learned.ratings
    assert ratings is not None
    assert learned.gains is not None
    return [
        _describe_levels(ratings),
        _describe_items(learned, ratings.offset),
        describe_gains(learned),
        describe_newcomers(learned, learned.gains),
    ]


def make_ratings_json(learned: Representation) -> dict[str, Any] | None:
    """Return the numbers of `describe_ratings` for machines; None for a model without a prior or gains."""
    ratings, gains = learned.ratings, learned.gains
    if ratings is None or not ratings.has_prior or gains is None:
        return None
    return {
        "level": ratings.level,
        "level_deviation": _find_deviation(ratings),
        "spread": ratings.spread or None,
        "offset_deviation": float(np.std(ratings.offset)) if len(ratings.offset) else 0.0,
        "factors": learned.basis.shape[1],
        "residual": ratings.residual,
        "learned": gains.clear,
        "log_losses": {"prior_mean": gains.prior_mean, "heads": gains.heads},
        "log_losses_deviation": gains.sigma,
        "smaller_than_mean": -math.expm1(gains.heads),
    }


def _find_deviation(ratings: Ratings) -> float | None:
    """Return the standard deviation of users' levels; None where levels are free."""
    return math.sqrt(ratings.level_variance) if ratings.level_variance < FREE else None


def _describe_levels(ratings: Ratings) -> str:
    """Return a sentence about the level and how far users' levels differ."""
    apart = _find_deviation(ratings)
    if apart is None:
        return "Levels are the users' own: nothing was heard of where ratings lie."
    spread = f" A user's ratings vary by about {ratings.spread:.3g}." if ratings.spread else ""
    return (
        f"The level is {ratings.level:.4g}; users' levels lie around it by {apart:.2g} (standard deviations).{spread}"
    )


def _describe_items(learned: Representation, offset: Array) -> str:
    """Return a sentence about the items' offsets and factors."""
    if not len(offset):
        return "No item could be named."
    if not np.ptp(offset):
        return "Items' offsets: none stood out from the noise."
    k = learned.basis.shape[1]
    tastes = f"tastes along {k} {'factor' if k == 1 else 'factors'}" if k else "no factors, so no tastes"
    return (
        f"Items' offsets, shrunk by the noise of privacy and of sampling, have a standard deviation of "
        f"{np.std(offset):.2g} in units of a user's own spread. There are {tastes}."
    )
