"""References for ratings: what one does without privacy, and what an analyst does with it.

All but `noisy_means` are NOT PRIVATE. Each is learned from ratings and returns a `Predictor`, which is given users' own
ratings, or none, and asked about others of the same users.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

import numpy as np

from experiments.jester import RANKS, RIDGES, Ratings, alternating_factors, user_factors
from experiments.rating_data import RatingTask
from privrep.privacy.ledger import Budget
from privrep.typing import Array, Integers

ROUNDS = 10  # of taking turns between items and users
PULL = 3.0  # ratings at the common level that the analyst adds to each user's own
LEVEL_SHARE = 0.05  # of the analyst's mu^2, for the common level
LARGEST = 50.0  # ratings of a user that count with the analyst
UNIT = 0.25  # of the range: largest deviation that counts with the analyst
PRESENCE = 0.5  # weight of who rated what against how
SPREAD = 0.5  # of items' offsets, in units, by the analyst's guess; ratings spread by 1


class Predictor(Protocol):
    """What was learned of items."""

    def predict(self, own: Ratings, asked: Ratings) -> Array:
        """Return predictions of the ratings asked for, from what the same users own; own may be empty."""
        ...


def no_ratings() -> Ratings:
    return Ratings(np.empty(0, np.int64), np.empty(0, np.int64), np.empty(0))


def sum_by(places: Integers, values: Array, count: int) -> Array:
    return np.asarray(np.bincount(places, values, count))


@dataclass(frozen=True)
class Means:
    """A level, offsets of items, and users' levels, shrunk as if each had `pull` more ratings at zero."""

    level: float
    offsets: Array  # (items,)
    pull: float

    def predict(self, own: Ratings, asked: Ratings) -> Array:
        users = max((int(ratings.user.max()) + 1 for ratings in (own, asked) if len(ratings.user)), default=0)
        left = own.value - self.level - self.offsets[own.item]
        counts = np.bincount(own.user, minlength=users)
        levels = sum_by(own.user, left, users) / np.maximum(counts + self.pull, 1e-12)
        return np.asarray(self.level + self.offsets[asked.item] + levels[asked.user])


def find_pull(places: Integers, values: Array) -> float:
    """Return the variance within groups over that between them: by moments, of values around a common zero.

    Groups with one value say nothing of the variance within.
    """
    counts = np.bincount(places)
    some = counts > 0
    means = sum_by(places, values, len(counts))[some] / counts[some]
    within = max(float(((values**2).sum() - (counts[some] * means**2).sum()) / max((counts[some] - 1).sum(), 1)), 1e-12)
    between = float((counts[some] * means**2).sum() - some.sum() * within) / len(values)
    return within / max(between, 1e-3 * within)


def user_means(train: Ratings, items: int) -> Means:
    """Learn a level, and by how much to shrink users' means to it."""
    level = float(train.value.mean())
    return Means(level, np.zeros(items), find_pull(train.user, train.value - level))


def item_and_user_means(train: Ratings, items: int) -> Means:
    """Learn offsets of items and users' levels in turns, each shrunk by empirical Bayes."""
    level, users = float(train.value.mean()), int(train.user.max()) + 1
    offsets, levels, pull = np.zeros(items), np.zeros(users), 0.0
    of_item, of_user = np.bincount(train.item, minlength=items), np.bincount(train.user, minlength=users)
    for _ in range(ROUNDS):
        left = train.value - level - levels[train.user]
        offsets = sum_by(train.item, left, items) / (of_item + find_pull(train.item, left))
        left = train.value - level - offsets[train.item]
        pull = find_pull(train.user, left)
        levels = sum_by(train.user, left, users) / (of_user + pull)
    return Means(level, offsets, pull)


@dataclass(frozen=True)
class Factors:
    """Item factors of alternating least squares. Users who own no rating have the level and the item's offset."""

    level: float
    factors: Array  # (items, rank + 2), as `jester.alternating_factors` has them
    ridge: float

    def predict(self, own: Ratings, asked: Ratings) -> Array:
        users = int(asked.user.max()) + 1
        known = own.take(own.user < users)
        values, present = known.table(users, len(self.factors))
        U = user_factors(self.factors, (values - self.level) * present, present, self.ridge)
        return np.asarray(self.level + np.einsum("rk,rk->r", U[asked.user], self.factors[asked.item]))


def fit_factors(train: Ratings, items: int, rank: int, ridge: float) -> Factors:
    values, present = train.table(int(train.user.max()) + 1, items)
    level, _, V = alternating_factors(values, present, rank, ridge, np.random.default_rng(0))
    return Factors(level, V, ridge)


def best_factors(task: RatingTask) -> tuple[int, float]:
    """Return the rank and the ridge that are best for the test ratings themselves: too kind to the reference."""

    def error(pair: tuple[int, float]) -> float:
        return task.errors(fit_factors(task.train, task.items, *pair).predict(task.train, task.test), task.test)[0]

    return min(itertools.product(RANKS, RIDGES), key=error)


Learn = Callable[[Ratings], Predictor]
USER_MEAN, BOTH_MEANS, FACTORS = "user mean, shrunk", "item and user means, shrunk", "ALS, best rank"


def references(task: RatingTask) -> dict[str, Learn]:
    """Return what learns, by name. NOT PRIVATE, all of them."""
    rank, ridge = best_factors(task)
    return {
        USER_MEAN: lambda train: user_means(train, task.items),
        BOTH_MEANS: lambda train: item_and_user_means(train, task.items),
        FACTORS: lambda train: fit_factors(train, task.items, rank, ridge),
    }


def noisy_means(
    train: Ratings, task: RatingTask, epsilon: float, rng: np.random.Generator, delta: float = 1e-6
) -> Means:
    """Learn an analyst's noisy level and offsets of items. Noise is simulated; items and the range are public.

    A user's own level is shrunk by three ratings at the common one. Offsets are posterior means, as if they spread by
    an eighth of the range and ratings by a quarter.

    Formal guarantee: level and offsets are functions of two Gaussian releases, of 5% and of 95% of mu^2. With noise
    that nobody can predict they are (epsilon, delta)-DP at user level under replace-one-user.
    """
    mu, width = Budget(epsilon, delta, "replace-one-user").mu, task.most - task.least
    level = noisy_level(train, task, np.sqrt(LEVEL_SHARE) * mu, rng)
    alone = Means(level, np.zeros(task.items), PULL).predict(train, train)
    apart = np.clip((train.value - alone) / (UNIT * width), -1.0, 1.0)
    sums, noise = noisy_sums(train, apart, task.items, np.sqrt(1 - LEVEL_SHARE) * mu, rng)
    counts = np.maximum(sums[0], 0.0)
    shrunk = sums[1] * counts * SPREAD**2 / (counts**2 * SPREAD**2 + counts + noise**2)
    return Means(level, UNIT * width * shrunk, PULL)


def noisy_level(train: Ratings, task: RatingTask, mu: float, rng: np.random.Generator) -> float:
    """Return the mean over users of their means, with noise. Replacing a user moves the sum by the range at most."""
    counts = np.bincount(train.user)
    has = counts > 0
    means = sum_by(train.user, np.clip(train.value, task.least, task.most), len(counts))[has] / counts[has]
    total = float((means - task.least).sum() + (task.most - task.least) / mu * rng.standard_normal())
    return float(np.clip(task.least + total / has.sum(), task.least, task.most))


def noisy_sums(train: Ratings, apart: Array, items: int, mu: float, rng: np.random.Generator) -> tuple[Array, float]:
    """Return (2, items) noisy sums over users of who rated what and how far apart, and the deviation of the second.

    A user's first rating of an item counts, and no other. A rating weighs sqrt(LARGEST / ratings) at most, so that a
    user's presences have a norm of PRESENCE sqrt(LARGEST) and are not negative, and deviations one of sqrt(LARGEST).
    Replacing a user moves the first by sqrt(2) norms at most and the second by 2.
    """
    first = np.unique(train.user * items + train.item, return_index=True)[1]
    train, apart = train.take(first), apart[first]
    counts = np.bincount(train.user)
    weights = np.sqrt(np.minimum(1.0, LARGEST / np.maximum(counts, 1)))[train.user]
    noise = np.sqrt((2 * PRESENCE**2 + 4) * LARGEST) / mu
    presence = PRESENCE * sum_by(train.item, weights, items) + noise * rng.standard_normal(items)
    deviations = sum_by(train.item, weights * apart, items) + noise * rng.standard_normal(items)
    return np.stack([presence / PRESENCE, deviations]), float(noise)
