"""How the CPU seconds of a fit grow with users, rows, features, rank, classes and items, one at a time.

    python -m benchmarks.growth [--only users rows]

Each line changes one number of a small problem, and says by which power of it the cost grew since the line before. Fits
include heads and cryptographic noise. The best of two is printed.
"""

from __future__ import annotations

import argparse
import math
import warnings
from collections.abc import Callable
from functools import partial

import numpy as np

from benchmarks.measure import measure_cpu
from benchmarks.ratings import draw
from privrep import FittedAgain, NothingLearned, PrivateFactorization, PrivateFedRep, PrivateFedRepClassifier
from privrep.data.synthetic import make_class_population, make_population

Work = Callable[[], object]


def fit_numbers(users: int = 20_000, rows: int = 10, features: int = 50, rank: int = 2) -> Work:
    """Return a fit of numbers, float32."""
    rng = np.random.default_rng(1)
    table = make_population(rng, users, features, rank, rows, 0.01).sample(rng, np.float32)
    groups = np.repeat(table.ids, table.sizes)
    return partial(PrivateFedRep(rank, epsilon=1.0, delta=1e-6).fit, table.X, table.y, groups=groups)


def fit_labels(classes: int, users: int = 5_000) -> Work:
    """Return a fit of labels, 20 rows of 50 features a user."""
    rng = np.random.default_rng(5)
    table = make_class_population(rng, users=users, features=50, rank=2, rows=20, classes=classes).sample(rng)
    model = PrivateFedRepClassifier(2, epsilon=4.0, delta=1e-6, classes=list(range(classes)))
    return partial(model.fit, table.X, table.y, groups=np.repeat(table.ids, table.sizes))


def fit_ratings(items: int, users: int = 10_000) -> Work:
    """Return a fit of about 50 ratings a user."""
    model = PrivateFactorization(epsilon=8.0, delta=1e-6, items=list(range(items)), random_state=0)
    return partial(model.fit, *draw(users, items))


SWEEPS: dict[str, tuple[Callable[..., Work], tuple[int, ...]]] = {
    "users": (fit_numbers, (5_000, 20_000, 80_000)),
    "rows": (fit_numbers, (5, 10, 20, 40)),
    "features": (fit_numbers, (25, 50, 100, 200)),
    "rank": (fit_numbers, (1, 2, 4, 8)),
    "classes": (fit_labels, (2, 3, 5, 8)),
    "items": (fit_ratings, (400, 1_700, 7_000, 28_000)),
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", choices=SWEEPS, nargs="+", default=list(SWEEPS))
    arguments = parser.parse_args()
    for kind in (NothingLearned, FittedAgain):
        warnings.simplefilter("ignore", kind)
    measure_cpu(fit_numbers(1_000), 1)  # warms the noise and the BLAS
    for name in arguments.only:
        make, values = SWEEPS[name]
        before: tuple[int, float] | None = None
        for value in values:
            seconds = measure_cpu(make(**{name: value}), 2)
            power = (
                "" if before is None else f"   power {math.log(seconds / before[1]) / math.log(value / before[0]):5.2f}"
            )
            print(f"{name:9} {value:>7,} {seconds:9.2f} CPU s{power}", flush=True)
            before = value, seconds


if __name__ == "__main__":
    main()
