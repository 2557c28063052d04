"""Time and memory of a fit of many ratings: `python -m benchmarks.ratings [--users 20000] [--items 20000]`.

Made-up ratings, 50 a user; items are rated unevenly, by a power law. The list of items is declared, then selected
privately. Noise is simulated.
"""

from __future__ import annotations

import argparse
import resource
import time
import warnings

import numpy as np

from privrep import PrivateFactorization
from privrep.errors import NothingLearned
from privrep.typing import Array, Integers

ROWS = 50  # of a user, before an item that comes twice counts once


def draw(users: int, items: int) -> tuple[Integers, Integers, Array]:
    """Return users, items and ratings: levels, offsets and two factors of deviations 0.5, 0.5 and 0.3, noise of 0.8."""
    rng = np.random.default_rng(0)
    often = 1 / (np.arange(items) + 20) ** 0.8
    drawn = rng.choice(items, users * ROWS, p=often / often.sum())
    pairs = np.unique(np.repeat(np.arange(users), ROWS) * items + drawn)
    user, item = pairs // items, pairs % items
    taste = (rng.normal(0, 0.3, (items, 2))[item] * rng.normal(0, 1, (users, 2))[user]).sum(axis=1)
    rated = 3.5 + rng.normal(0, 0.5, items)[item] + rng.normal(0, 0.5, users)[user] + taste
    return user, item, np.clip(rated + rng.normal(0, 0.8, len(user)), 0.5, 5.0)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--users", type=int, default=20_000)
    parser.add_argument("--items", type=int, default=20_000)
    arguments = parser.parse_args()
    user, item, rating = draw(arguments.users, arguments.items)
    for kind, listed in (("declared", list(range(arguments.items))), ("selected", None)):
        began, cpu = time.perf_counter(), time.process_time()
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", NothingLearned)
            model = PrivateFactorization(epsilon=1.0, delta=1e-6, items=listed, random_state=0).fit(user, item, rating)
        wall, spent = time.perf_counter() - began, time.process_time() - cpu
        most = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1e6
        print(
            f"{len(user):,} ratings, items {kind}: {wall:.1f} s, {spent:.1f} CPU s, at most {most:.2f} GB so far; "
            f"rank {model.rank_}, {len(model.items_):,} items named",
            flush=True,
        )


if __name__ == "__main__":
    main()
