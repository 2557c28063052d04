"""Ratings of films (MovieLens 100k) with a declared list of films: private factorisation against what is simpler.

    python -m experiments.films [--data ../shared/data/ml-100k/ratings.parquet] [--splits 5]

943 users rated 1,682 films from 1 to 5. In each split a random fifth of every user's ratings is held out. Private fits
have defaults and the declared list of films, and charge all else to (epsilon, 1e-6) under replace-one-user. Noise is
simulated from seeds. Beside them:

    practitioner     what one writes in an hour: ratings known to lie between 1 and 5, noisy sums and counts of films by
                     the Gaussian mechanism, users clipped to the root of 16 or of 64 ratings, and users' shrunk means
    shrunk mean      a user's own mean, drawn towards the released centre of the scale: other users do not matter
    item and user    means of films and users, shrunk, not private: what offsets could reach

The better of the practitioner's two clipping norms on the held-out ratings counts, which is too kind to it.
Writes results/films.csv beside this file.
"""

from __future__ import annotations

import argparse
import csv
import math
import os
import time
import warnings
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pyarrow.parquet as pq

from experiments.jester import Ratings, split
from privrep import PrivateFactorization
from privrep.privacy.ledger import Budget
from privrep.typing import Array

RESULTS = Path(__file__).parent / "results"
EPSILONS = (0.1, 0.3, 1.0, 3.0, 10.0, 100.0)
DELTA = 1e-6
LEAST, MOST = 1.0, 5.0
GUESS = 0.25  # variance of films' offsets on a scale from 1 to 5, where that of ratings is 1
NORMS = (4.0, 8.0)  # of the practitioner's users
TARGETS = {1.0: 1.025, 3.0: 0.99}  # RMSE at most


def default_data() -> Path:
    shared = Path(__file__).parents[2] / "shared" / "data"
    return Path(os.environ.get("PRIVREP_DATA", shared)) / "ml-100k" / "ratings.parquet"


def read(path: Path) -> Ratings:
    """Return users, films and ratings: the first three columns of the file, numbered from 0, by user."""
    table = pq.read_table(path)
    user, item, value = (table.column(place).to_numpy() for place in range(3))
    codes = [np.unique(column, return_inverse=True)[1].astype(np.int64) for column in (user, item)]
    order = np.argsort(codes[0], kind="stable")
    return Ratings(codes[0][order], codes[1][order], value[order].astype(np.float64))


@dataclass(frozen=True)
class Score:
    """One method on one split."""

    method: str
    epsilon: float | None  # None: not private, or without others' data
    split: int
    rank: int | None
    rmse: float
    seconds: float


def rmse(predictions: Array, test: Ratings) -> float:
    return float(np.sqrt(np.mean((np.clip(predictions, LEAST, MOST) - test.value) ** 2)))


def private(train: Ratings, test: Ratings, items: int, epsilon: float, number: int) -> Score:
    begin = time.perf_counter()
    model = PrivateFactorization(epsilon=epsilon, delta=DELTA, items=range(items), random_state=number)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # at small epsilons it says that little is learned
        predictions = model.fit(train.user, train.item, train.value).predict(test.user, test.item)
    assert model.privacy_.epsilon <= epsilon
    error = rmse(predictions, test)
    return Score("private factorisation", epsilon, number, model.rank_, error, time.perf_counter() - begin)


def user_sums(train: Ratings, values: Array, users: int) -> Array:
    return np.bincount(train.user, values, minlength=users)


def practitioner(
    train: Ratings, test: Ratings, sizes: tuple[int, int], epsilon: float, norm: float, rng: np.random.Generator
) -> Array:
    """Return predictions by noisy means of films and shrunk means of users; half the budget for sums, half for counts.

    Args:
        train, test: the ratings.
        sizes: users and films.
        epsilon: of the whole budget.
        norm: to which users' vectors of sums and of counts are clipped, in ratings.
        rng: of the noise.
    """
    users, items = sizes
    mu_squared = Budget(epsilon, DELTA, "replace-one-user").mu ** 2
    count = user_sums(train, np.ones_like(train.value), users)
    middle = (LEAST + MOST) / 2
    own = (user_sums(train, train.value, users) + 5 * middle) / (count + 5)
    left = train.value - own[train.user]
    length = np.sqrt(user_sums(train, left**2, users))
    shorter = np.minimum(1, norm / np.maximum(length, 1e-9))[train.user]
    fewer = np.minimum(1, norm / np.sqrt(np.maximum(count, 1)))[train.user]
    noise = norm / math.sqrt(mu_squared / 2)
    sums = np.bincount(train.item, left * shorter, minlength=items) + 2 * noise * rng.normal(size=items)
    counts = np.bincount(train.item, fewer, minlength=items) + math.sqrt(2) * noise * rng.normal(size=items)
    seen = np.maximum(counts, 0.0)
    offset = GUESS * seen * sums / (GUESS * seen**2 + seen + (2 * noise) ** 2)  # the posterior mean, by guesses
    level = user_sums(train, train.value - middle - 0.5 - offset[train.item], users) / (count + 5)
    predictions: Array = middle + 0.5 + level[test.user] + offset[test.item]
    return predictions


def references(train: Ratings, test: Ratings, sizes: tuple[int, int], number: int) -> Iterator[Score]:
    """Yield what needs no budget: a user's own mean, shrunk, and means of films and users, not private."""
    users, items = sizes
    count, middle = user_sums(train, np.ones_like(train.value), users), (LEAST + MOST) / 2 + 0.5
    own = middle + user_sums(train, train.value - middle, users) / (count + 5)
    yield Score("shrunk mean", None, number, None, rmse(own[test.user], test), 0.0)
    offset, rated = np.zeros(items), np.bincount(train.item, minlength=items)
    for _ in range(15):
        level = user_sums(train, train.value - middle - offset[train.item], users) / (count + 5)
        offset = np.bincount(train.item, train.value - middle - level[train.user], minlength=items) / (rated + 5)
    both = middle + level[test.user] + offset[test.item]
    yield Score("item and user", None, number, None, rmse(both, test), 0.0)


def scores_of(ratings: Ratings, number: int) -> Iterator[Score]:
    """Yield the scores of all methods on one split."""
    sizes = int(ratings.user.max()) + 1, int(ratings.item.max()) + 1
    train, test = split(ratings, number)
    yield from references(train, test, sizes, number)
    for epsilon in EPSILONS:
        rng = np.random.default_rng([number, 7])
        simple = min(rmse(practitioner(train, test, sizes, epsilon, norm, rng), test) for norm in NORMS)
        yield Score("practitioner", epsilon, number, None, simple, 0.0)
        yield private(train, test, sizes[1], epsilon, number)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--data", type=Path, default=default_data())
    parser.add_argument("--splits", type=int, default=5)
    parser.add_argument("--first", type=int, default=1, help="number of the first split")
    arguments = parser.parse_args()
    if not arguments.data.is_file():
        raise SystemExit(f"there is no file {arguments.data}; pass --data, or set PRIVREP_DATA to its parent's parent.")
    ratings = read(arguments.data)
    numbers = range(arguments.first, arguments.first + arguments.splits)
    scores = [score for number in numbers for score in scores_of(ratings, number)]
    with open(RESULTS / "films.csv", "w", newline="") as file:
        writer = csv.writer(file, lineterminator="\n")
        writer.writerow(["method", "epsilon", "split", "rank", "rmse", "seconds"])
        for s in scores:
            epsilon, rank = ("" if value is None else value for value in (s.epsilon, s.rank))
            writer.writerow([s.method, epsilon, s.split, rank, f"{s.rmse:.5f}", f"{s.seconds:.2f}"])
    for method, epsilon in dict.fromkeys((s.method, s.epsilon) for s in scores):
        chosen = [s for s in scores if (s.method, s.epsilon) == (method, epsilon)]
        ranks = sorted({s.rank for s in chosen if s.rank is not None})
        target = f"  target {TARGETS[epsilon]}" if epsilon in TARGETS and method.startswith("private") else ""
        print(
            f"{method:22} eps {epsilon or '-':>5}  RMSE {np.mean([s.rmse for s in chosen]):.4f} "
            f"(worst {max(s.rmse for s in chosen):.4f})  ranks {ranks}{target}"
        )


if __name__ == "__main__":
    main()
