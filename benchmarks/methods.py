"""Seconds of one fit of every method, with cryptographic noise and all heads, as in Figure 1; and of fits of labels.

python -m benchmarks.methods
"""

from __future__ import annotations

import time
import warnings

import numpy as np

from privrep import CentaurLinear, NothingLearned, PrivAltMin, PrivateFedRep, PrivateFedRepClassifier, make_population
from privrep.data.synthetic import make_class_population


def main() -> None:
    warnings.simplefilter("ignore", NothingLearned)  # the papers' configurations
    rng = np.random.default_rng(1)
    table = make_population(rng, 20_000, 50, 2, 10, 0.01).sample(rng, np.float32)
    users = np.repeat(table.ids, table.sizes)
    print("one fit, 20,000 users x 10 rows x 50 features, rank 2, epsilon 1, three times each")
    for kind in (PrivateFedRep, PrivAltMin, CentaurLinear):
        for name, model in (("default", kind(2)), ("paper", kind.paper(2))):
            seconds = []
            for _ in range(3):
                began = time.perf_counter()
                model.fit(table.X, table.y, groups=users)
                seconds.append(time.perf_counter() - began)
            print(f"  {kind.__name__:14} {name:8} {min(seconds):.2f} to {max(seconds):.2f} s", flush=True)
    print("one fit of labels, 20 rows x 50 features a user, no rank given, epsilon 1; then seconds of all cores")
    for classes, count in ((2, 20_000), (5, 5_000)):
        fit_labels(classes, count)


def fit_labels(classes: int, count: int) -> None:
    """Fit this many users with labels of so many classes, and print how long it took."""
    rng = np.random.default_rng(5)
    table = make_class_population(rng, users=count, features=50, rank=2, rows=20, classes=classes).sample(rng)
    model = PrivateFedRepClassifier(epsilon=1.0, delta=1e-6, classes=list(range(classes)))
    began, used = time.perf_counter(), time.process_time()
    model.fit(table.X, table.y, groups=np.repeat(table.ids, table.sizes))
    seconds, used = time.perf_counter() - began, time.process_time() - used
    print(f"  {classes} classes, {count:6,} users  {seconds:.1f} s, {used:.1f} s, rank {model.rank_}", flush=True)


if __name__ == "__main__":
    main()
