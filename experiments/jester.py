"""Ratings of jokes: private factorisation against what one can do without privacy, and without other users.

    python -m experiments.jester [--data ../shared/data/jester/ratings.npz] [--splits 5]

24,983 users rated 100 jokes between -10 and 10. In each split a random fifth of every user's ratings is held out. Every
private fit has defaults, selects the jokes it may name, finds its rank and charges all of it to (epsilon, 1e-6) under
replace-one-user. Noise is simulated from seeds, but for the fit that is timed. The non-private references see all the
ratings; the factorisation among them is given the rank and ridge that are best on the held-out ratings, which is too
kind to it. The same estimator with an epsilon of 300 shows what its noise costs.
Writes results/jester.csv and results/jester.png beside this file.
"""

from __future__ import annotations

import argparse
import csv
import itertools
import os
import time
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from experiments.jester_picture import draw
from privrep import PrivateFactorization
from privrep.typing import Array

RESULTS = Path(__file__).parent / "results"
EPSILONS = (0.1, 0.3, 1.0, 3.0)
DELTA = 1e-6
LEAST, MOST = -10.0, 10.0
RANKS, RIDGES = (4, 6, 8, 12), (10.0, 30.0)  # of the non-private factorisation, which gets the best of them
NOISELESS, PLENTY = "the same with next to no noise", 300.0


def default_data() -> Path:
    shared = Path(__file__).parents[2] / "shared" / "data"
    return Path(os.environ.get("PRIVREP_DATA", shared)) / "jester" / "ratings.npz"


@dataclass(frozen=True)
class Ratings:
    user: NDArray[np.int64]  # 0 to users - 1, sorted
    item: NDArray[np.int64]
    value: Array

    def take(self, rows: NDArray[np.bool_] | NDArray[np.int64]) -> Ratings:
        return Ratings(self.user[rows], self.item[rows], self.value[rows])

    def table(self, users: int, items: int) -> tuple[Array, Array]:
        """Values and presence, (users, items)."""
        values, present = np.zeros((users, items)), np.zeros((users, items))
        values[self.user, self.item], present[self.user, self.item] = self.value, 1.0
        return values, present


def read(path: Path) -> Ratings:
    with np.load(path) as file:
        user, item, value = file["user"], file["joke"], file["rating"].astype(np.float64)
    codes = np.unique(user, return_inverse=True)[1].astype(np.int64)
    order = np.argsort(codes, kind="stable")
    return Ratings(codes[order], item[order].astype(np.int64), value[order])


def split(ratings: Ratings, seed: int, held_out: float = 0.2) -> tuple[Ratings, Ratings]:
    """A random fifth of every user's ratings is for testing."""
    order = np.lexsort((np.random.default_rng([20_251_116, seed]).random(len(ratings.user)), ratings.user))
    place = np.arange(len(order)) - np.searchsorted(ratings.user, ratings.user)
    test = np.empty(len(order), dtype=bool)
    test[order] = place < np.round(held_out * np.bincount(ratings.user)[ratings.user])
    return ratings.take(~test), ratings.take(test)


@dataclass(frozen=True)
class Score:
    """One method on one split."""

    method: str
    epsilon: float | None  # None: not private
    split: int
    rank: int | None
    nmae: float
    rmse: float
    seconds: float


def errors(predictions: Array, test: Ratings, least: float = LEAST, most: float = MOST) -> tuple[float, float]:
    """Mean absolute error over the range of ratings, 20 points here, and root mean squared error."""
    error = np.clip(predictions, least, most) - test.value
    return float(np.abs(error).mean() / (most - least)), float(np.sqrt((error**2).mean()))


def private(train: Ratings, test: Ratings, epsilon: float, number: int, seed: int | None) -> Score:
    begin = time.perf_counter()
    model = PrivateFactorization(epsilon=epsilon, delta=DELTA, random_state=seed)
    model.fit(train.user, train.item, train.value)
    predictions = model.predict(test.user, test.item)
    seconds = time.perf_counter() - begin
    assert model.privacy_.epsilon <= epsilon
    return Score("private factorisation", epsilon, number, model.rank_, *errors(predictions, test), seconds)


def references(train: Ratings, test: Ratings, number: int) -> Iterator[Score]:
    """NOT PRIVATE, but for the user's own mean."""
    users, items = int(train.user.max()) + 1, int(train.item.max()) + 1
    values, present = train.table(users, items)
    user_mean = values.sum(axis=1) / np.maximum(present.sum(axis=1), 1)
    item_mean = values.sum(axis=0) / np.maximum(present.sum(axis=0), 1)
    centred = (values - user_mean[:, None]) * present
    offset = centred.sum(axis=0) / np.maximum(present.sum(axis=0), 1)
    for name, predictions in (
        ("alone: own mean", user_mean[test.user]),
        ("item mean", item_mean[test.item]),
        ("item + user mean", user_mean[test.user] + offset[test.item]),
    ):
        yield Score(name, None, number, None, *errors(predictions, test), 0.0)
    best: Score | None = None
    for rank, ridge in itertools.product(RANKS, RIDGES):
        begin = time.perf_counter()
        full = alternating_least_squares(values, present, rank, ridge, np.random.default_rng(number))
        score = Score(
            "non-private ALS, best rank",
            None,
            number,
            rank,
            *errors(full[test.user, test.item], test),
            time.perf_counter() - begin,
        )
        best = score if best is None or score.nmae < best.nmae else best
    assert best is not None
    yield best


def alternating_least_squares(
    values: Array, present: Array, rank: int, ridge: float, rng: np.random.Generator, rounds: int = 12
) -> Array:
    """(users, items): everybody's prediction of everything, user and item means in their own columns."""
    mean, U, V = alternating_factors(values, present, rank, ridge, rng, rounds)
    full: Array = mean + U @ V.T
    return full


def alternating_factors(
    values: Array, present: Array, rank: int, ridge: float, rng: np.random.Generator, rounds: int = 12
) -> tuple[float, Array, Array]:
    """Mean, and factors of users and of items, whose last two columns are the user's mean and the item's."""
    items = values.shape[1]
    mean = values.sum() / present.sum()
    left = (values - mean) * present
    V = 0.1 * rng.standard_normal((items, rank + 2))
    V[:, rank] = 1.0  # the factor of the user's mean; that of the item's is among the users' factors
    for _ in range(rounds):
        U = user_factors(V, left, present, ridge)
        free = [*range(rank), rank + 1]
        V[:, free] = _solve(U[:, free], (left - present * U[:, [rank]]).T, present.T, ridge)
    return float(mean), U, V


def user_factors(V: Array, left: Array, present: Array, ridge: float) -> Array:
    """Factors of users, given those of items and what is left of ratings after the mean."""
    rank = V.shape[1] - 2
    U = np.ones((len(left), rank + 2))
    U[:, : rank + 1] = _solve(V[:, : rank + 1], left - present * V[:, rank + 1], present, ridge)
    return U


def _solve(factors: Array, targets: Array, present: Array, ridge: float) -> Array:
    """For each line of `targets`, ridge regression on the factors of what is present in it."""
    k = factors.shape[1]
    rows, columns = np.triu_indices(k)
    gram = np.empty((len(targets), k, k))
    gram[:, rows, columns] = gram[:, columns, rows] = present @ (factors[:, rows] * factors[:, columns])
    gram[:, np.arange(k), np.arange(k)] += ridge
    solution: Array = np.linalg.solve(gram, ((targets * present) @ factors)[:, :, None])[:, :, 0]
    return solution


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--data", type=Path, default=default_data())
    parser.add_argument("--splits", type=int, default=5)
    arguments = parser.parse_args()
    if not arguments.data.is_file():
        raise SystemExit(f"there is no file {arguments.data}; pass --data, or set PRIVREP_DATA to its parent's parent.")
    ratings = read(arguments.data)
    scores: list[Score] = []
    for number in range(1, arguments.splits + 1):
        train, test = split(ratings, number)
        scores += references(train, test, number)
        scores += [private(train, test, epsilon, number, seed=number) for epsilon in EPSILONS]
        scores.append(replace(private(train, test, PLENTY, number, seed=number), method=NOISELESS, epsilon=None))
        print(f"split {number} done", flush=True)
    with open(RESULTS / "jester.csv", "w", newline="") as file:
        writer = csv.writer(file, lineterminator="\n")
        writer.writerow(["method", "epsilon", "split", "rank", "nmae", "rmse", "seconds"])
        for s in scores:
            epsilon, rank = ("" if value is None else value for value in (s.epsilon, s.rank))
            writer.writerow([s.method, epsilon, s.split, rank, f"{s.nmae:.6f}", f"{s.rmse:.5f}", f"{s.seconds:.2f}"])
    for method, epsilon in dict.fromkeys((s.method, s.epsilon) for s in scores):
        chosen = [s for s in scores if (s.method, s.epsilon) == (method, epsilon)]
        ranks = sorted({s.rank for s in chosen if s.rank is not None})
        print(
            f"{method:28} eps {epsilon or '-':>4}  NMAE {np.mean([s.nmae for s in chosen]):.4f} "
            f"(worst {max(s.nmae for s in chosen):.4f})  RMSE {np.mean([s.rmse for s in chosen]):.3f}  ranks {ranks}"
        )
    timed = private(*split(ratings, 1), 1.0, 1, seed=None)
    print(f"fit and prediction with cryptographic noise, epsilon 1: {timed.seconds:.1f} s, NMAE {timed.nmae:.4f}")
    draw(scores, RESULTS / "jester.png")


if __name__ == "__main__":
    main()
