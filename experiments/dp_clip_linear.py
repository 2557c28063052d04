"""Theorem 5.1 of paper 002 against measurements: the linear contrastive loss, trained privately in two ways.

    python -m experiments.dp_clip_linear [--seeds 3] [--draw-only]

Pairs of the spiked covariance model (d1 = d2 = 10, r = 2, kappa 2, both signal-to-noise ratios 1, alpha 1), one pair a
user, replace-one-user, delta 1e-6, the whole budget charged in one ledger. Error is the theorem's: the larger of
min_A |A G1 - G1*| and min_A |A G2 - G2*|. Noise is simulated from seeds: reproducible, not private.

  no privacy               the minimiser of the sample's loss, by SVD
  one cross-moment         the cross-moment released once, users clipped one by one to E|x| E|x~|, then SVD
  Algorithm 1, b = n/50    400 gradient steps on batches of fixed size, each clipped to 0.2 as a whole; the theorem's
                           batches are a constant part of n
  Algorithm 1, b = 32      the same with the batches of the paper's experiments
  start                    where Algorithm 1 starts: the truth and a random matrix of norm 0.5, as the theorem supposes

Algorithm 1 is run with several step sizes and the best on average over the seeds is taken, at every point by itself and
at no charge: in its favour. Clipping bound, number of steps and the grid were chosen on seeds 900 to 902. The theorem's
own step size takes at least the number of steps that is printed. What needs no steps is cheap and gets ten times
the seeds. All of it takes about two minutes.

Writes results/dp_clip_linear.csv, one row a run, and dp_clip_linear.png beside this file. A row that stands is not run
again; after a change of the algorithms delete the csv.
"""

from __future__ import annotations

import argparse
import csv
import math
import time
from collections.abc import Callable, Iterator
from dataclasses import astuple, dataclass, fields, replace
from functools import lru_cache
from itertools import product
from pathlib import Path

import numpy as np

from experiments.dp_clip_linear_picture import draw as draw_picture
from experiments.figure1 import RESULTS
from experiments.linear_theory import (
    Spiked,
    cross_covariance,
    fit_by_batches,
    fit_by_moment,
    make_spiked,
    minimiser,
    representation_error,
    start_near,
    theorem_5_1,
)
from privrep.data.table import UserTable
from privrep.privacy.billboard import Billboard
from privrep.privacy.ledger import Budget, Ledger
from privrep.privacy.noise import simulated_noise
from privrep.privacy.run import Run
from privrep.privacy.sampling import Fixed, plan_noise_multiplier
from privrep.typing import Array
from privrep.users.memory import InMemoryUsers

SEED = 20_261_116
USERS = (1_000, 2_000, 4_000, 8_000, 16_000, 32_000, 64_000)
EPSILONS = (0.25, 0.5, 1.0, 2.0, 4.0, 8.0)
AT_USERS, AT_EPSILON = 16_000, 1.0
DELTA, ALPHA, HALF, RANK, AWAY = 1e-6, 1.0, 10, 2, 0.5
STEPS, NORM, STEP_SIZES = 400, 0.2, (0.0015, 0.005, 0.015)
NONE, MOMENT, START = "no privacy", "one cross-moment", "start"
LARGE, SMALL = "Algorithm 1, b = n/50", "Algorithm 1, b = 32"
BATCHES: dict[str, Callable[[int], int]] = {LARGE: lambda users: users // 50, SMALL: lambda users: 32}
METHODS = (NONE, MOMENT, LARGE, SMALL, START)
FAR = 0.6  # points of larger error are left out of slopes: half the length of an optimum's half, where errors saturate
NEAR = 1.05  # least ratio to the error without privacy of a point in the slope of an excess
TOLERANCE = 0.2  # of an exponent


@dataclass(frozen=True)
class Row:
    """One run. Epsilons are 0 where nothing is private, and the step size where there are no steps."""

    users: int
    epsilon: float
    method: str
    step_size: float
    seed: int
    error: float = math.nan
    epsilon_spent: float = 0.0
    seconds: float = 0.0

    @property
    def key(self) -> tuple[object, ...]:
        return self.users, self.epsilon, self.method, self.step_size, self.seed


@dataclass(frozen=True)
class Trial:
    model: Spiked
    start: Array
    table: UserTable


@lru_cache(maxsize=1)
def draw(users: int, seed: int) -> Trial:
    rng = np.random.default_rng([SEED, seed])
    model = make_spiked(rng, HALF, HALF, RANK)
    start = start_near(rng, model.minimiser(ALPHA), AWAY)
    return Trial(model, start, model.pairs(rng, users))


def points() -> list[tuple[int, float]]:
    return [*((users, AT_EPSILON) for users in USERS), *((AT_USERS, e) for e in EPSILONS if e != AT_EPSILON)]


def wanted(seeds: int) -> Iterator[Row]:
    for seed, (users, epsilon) in product(range(1, 10 * seeds + 1), sorted(points())):
        yield Row(users, epsilon, MOMENT, 0.0, seed)
        if epsilon == AT_EPSILON:
            yield from (Row(users, 0.0, method, 0.0, seed) for method in ((NONE, START) if seed <= seeds else (NONE,)))
        if seed <= seeds:
            yield from (Row(users, epsilon, method, size, seed) for method in BATCHES for size in STEP_SIZES)


def measure(row: Row) -> Row:
    trial, began = draw(row.users, row.seed), time.perf_counter()
    G, spent = learn(trial, row)
    error = representation_error(G, trial.model.minimiser(ALPHA), HALF)
    return replace(row, error=error, epsilon_spent=spent, seconds=time.perf_counter() - began)


def learn(trial: Trial, row: Row) -> tuple[Array, float]:
    """The encoders and the epsilon that was spent on them."""
    if row.method == START:
        return trial.start, 0.0
    if row.method == NONE:
        X = trial.table.X
        return minimiser(cross_covariance(X[:, :HALF], X[:, HALF:]), RANK, ALPHA), 0.0
    noise = simulated_noise((SEED * 100 + row.seed) * 10**6 + row.users + round(100 * row.epsilon))
    budget = Budget(row.epsilon, DELTA)
    run = Run(InMemoryUsers(trial.table), Ledger(budget, seeded=True), Billboard(), noise)
    if row.method == MOMENT:
        G = fit_by_moment(run, HALF, RANK, math.sqrt(math.prod(trial.model.squared_lengths())), alpha=ALPHA)
    else:
        batch = Fixed(BATCHES[row.method](row.users), row.users)
        multiplier = planned(budget, batch)
        G = fit_by_batches(run, HALF, trial.start, batch, STEPS, NORM, row.step_size, ALPHA, multiplier)
    return G, run.ledger.report().epsilon


def planned(budget: Budget, batch: Fixed) -> float:
    """The noise multiplier of Algorithm 1, found once for all batches that are the same part of the users."""
    common = math.gcd(batch.size, batch.count)
    return _planned(budget, Fixed(batch.size // common, batch.count // common))


@lru_cache(maxsize=64)
def _planned(budget: Budget, batch: Fixed) -> float:
    return plan_noise_multiplier(budget, batch, STEPS, batch_level=True)


def run_all(path: Path, seeds: int) -> list[Row]:
    rows = read_rows(path)
    done = {row.key for row in rows}
    for row in wanted(seeds):
        if row.key not in done:
            rows.append(measure(row))
            append(path, rows[-1])
    return rows


def append(path: Path, row: Row) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    new = not path.exists()
    with open(path, "a", newline="") as file:
        writer = csv.writer(file, lineterminator="\n")
        if new:
            writer.writerow([field.name for field in fields(Row)])
        writer.writerow([f"{cell:.6g}" if isinstance(cell, float) else cell for cell in astuple(row)])


def read_rows(path: Path) -> list[Row]:
    if not path.exists():
        return []
    with open(path, newline="") as file:
        return [
            Row(int(users), float(epsilon), method, float(size), int(seed), float(error), float(spent), float(seconds))
            for users, epsilon, method, size, seed, error, spent, seconds in list(csv.reader(file))[1:]
        ]


@dataclass(frozen=True)
class Results:
    rows: list[Row]

    def errors(self, method: str, users: int, epsilon: float, size: float | None = None) -> Array:
        """Of each seed; of this step size or of the best, where there are several."""
        at = (users, 0.0 if method in (NONE, START) else epsilon, method)
        here = [row for row in self.rows if (row.users, row.epsilon, row.method) == at]
        sizes = {row.step_size for row in here} if size is None else {size}
        tried = [np.array([row.error for row in here if row.step_size == size]) for size in sizes]
        return min(tried, key=lambda errors: float(errors.mean()))

    def line(self, method: str, along: str, size: float | None = None) -> tuple[Array, Array]:
        """Where and mean errors, along users or epsilon."""
        where = [(users, AT_EPSILON) for users in USERS] if along == "users" else [(AT_USERS, e) for e in EPSILONS]
        values = [float(self.errors(method, *at, size).mean()) for at in where]
        return np.array([users if along == "users" else e for users, e in where], dtype=float), np.array(values)

    def slope(self, method: str, along: str, excess: bool = False) -> float:
        """Fitted exponent of the error, or of its excess over no privacy, in squares; nan with fewer than 3 points."""
        x, error = self.line(method, along)
        kept = error < FAR
        if excess:
            least = self.line(NONE, along)[1]
            kept &= error > NEAR * least
            error = np.sqrt(np.maximum(error**2 - least**2, 0.0))
        return exponent(x[kept], error[kept])


def exponent(x: Array, y: Array) -> float:
    return float(np.polyfit(np.log(x), np.log(y), 1)[0]) if len(x) >= 3 else math.nan


def curve(along: str, batch: Callable[[int], float], term: str = "total") -> tuple[Array, Array]:
    model = make_spiked(np.random.default_rng([SEED, 1]), HALF, HALF, RANK)
    x = np.array(USERS if along == "users" else EPSILONS, dtype=float)
    at = [(int(v), AT_EPSILON) if along == "users" else (AT_USERS, float(v)) for v in x]
    bounds = [theorem_5_1(model, n, e, DELTA, STEPS, alpha=ALPHA, start=AWAY, batch=batch(n)) for n, e in at]
    return x, np.array([getattr(bound, term) for bound in bounds])


def print_tables(results: Results) -> None:
    for along in ("users", "epsilon"):
        x = results.line(MOMENT, along)[0]
        fixed = f"epsilon {AT_EPSILON:g}" if along == "users" else f"{AT_USERS:,} users"
        print(f"\nerror against {along}, {fixed}, mean over seeds")
        print(f"{'':32}" + "".join(f"{value:>9,g}" for value in x))
        for method in METHODS:
            print(f"{method:32}" + "".join(f"{value:9.4f}" for value in results.line(method, along)[1]))
        for method in BATCHES:
            values = results.line(method, along, STEP_SIZES[-1])[1]
            print(f"{f'{method}, step {STEP_SIZES[-1]:g}':32}" + "".join(f"{value:9.4f}" for value in values))
    print("\nfitted exponents          of users: error   of the excess   of epsilon: error   of the excess")
    for method in (NONE, MOMENT, LARGE, SMALL):
        found = [results.slope(method, along, excess) for along in ("users", "epsilon") for excess in (False, True)]
        if method == NONE:
            found[1:] = [math.nan] * 3
        print(f"{method:32}" + "".join(f"{'-' if math.isnan(v) else f'{v:.2f}':>13}   " for v in found))
    for name, batch in CURVES.items():
        found = [exponent(*curve(along, batch, t)) for along in ("users", "epsilon") for t in ("total", "privacy")]
        print(f"{name:32}" + "".join(f"{v:>13.2f}   " for v in found))
    print(
        "(excess: over no privacy, in squares; of a curve, its privacy term. Left out are errors beyond 0.6, and of\n"
        "excesses those within 5% of no privacy.)"
    )


CURVES: dict[str, Callable[[int], float]] = {
    "Theorem 5.1": lambda users: 1.0,
    "the same, b = n/50 paid for": lambda users: users / 50,
    "the same, b = 32 paid for": lambda users: 32.0,
}


def print_findings(results: Results) -> None:
    print("\nnoise of Algorithm 1 over what one pair moves a batch's gradient by (b = n/50, epsilon 1):")
    print(f"{'users':>8}{'Proposition 3.1':>18}{'the ledger asks':>18}{'ratio':>8}{'steps of the theorem':>24}")
    for users in USERS:
        stated = math.sqrt(STEPS * math.log(1 / DELTA)) / (users * AT_EPSILON) / 2
        asked = planned(Budget(AT_EPSILON, DELTA), Fixed(BATCHES[LARGE](users), users))
        size = RANK * 2 * HALF + math.log(STEPS * (users + 2 * HALF))
        steps = (users * AT_EPSILON / (1 + 1 / ALPHA)) ** 2 / (size * math.log(1 / DELTA))
        print(f"{users:8,}{stated:18.2g}{asked:18.3g}{asked / stated:8.0f}{steps:24,.0f}")
    for method, along in product(BATCHES, ("users", "epsilon")):
        measured, stated = results.slope(method, along, excess=True), exponent(*curve(along, lambda _: 1.0, "privacy"))
        word = "agrees with" if abs(measured - stated) <= TOLERANCE else "DISAGREES with"
        print(f"{method}: the excess goes with {along}^{measured:.2f}, which {word} {stated:.2f} of Theorem 5.1.")
    start = results.line(START, "users")[1]
    left = [results.line(method, "users")[1] / start for method in BATCHES]
    over = results.line(MOMENT, "users")[1] / start
    worse = " and ".join(f"{users:,}" for users, ratio in zip(USERS, over, strict=True) if ratio > 1)
    print(
        f"At epsilon {AT_EPSILON:g} Algorithm 1 ends at {np.min(left):.0%} to {np.max(left):.0%} of the error of its "
        f"start, whatever the number of users.\nThe cross-moment, which has no start, is at {over[-1]:.0%} of it with "
        f"{USERS[-1]:,} users, and worse than it with {worse or 'no number of'} users."
    )
    print(
        "\nTheorem 5.1 does not describe Algorithm 1. Its noise (Proposition 3.1) is that of a mean of b gradients\n"
        "clipped one by one; a gradient clipped as a whole moves by 2c whatever the batch, and needs b times as much.\n"
        "With batches a constant part of n, as the theorem asks, the cost of privacy then does not fall with n: at\n"
        "the step size above the error is about the same for all n. With the best one Algorithm 1 hardly leaves its\n"
        "start in these 400 steps (the theorem wants far more than those printed).\n"
        "One clipped cross-moment needs no start, no steps and no batches, and its noise is of size 1 / (n epsilon)."
    )


def plot(results: Results, path: Path) -> None:
    """Draw errors along users and along epsilon, and what Theorem 5.1 says, scaled to begin with Algorithm 1."""

    def lines(along: str) -> dict[str, tuple[Array, Array]]:
        found = {method: results.line(method, along) for method in METHODS}
        for name, batch in list(CURVES.items())[:2]:
            x, values = curve(along, batch, "privacy")
            found[name] = x, values * found[LARGE][1][0] / values[0]
        return found

    draw_picture(lines("users"), lines("epsilon"), path)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--draw-only", action="store_true", help="tables and picture of what has been run")
    arguments = parser.parse_args()
    path = RESULTS / "dp_clip_linear.csv"
    results = Results(read_rows(path) if arguments.draw_only else run_all(path, arguments.seeds))
    print_tables(results)
    print_findings(results)
    plot(results, RESULTS / "dp_clip_linear.png")


if __name__ == "__main__":
    main()
