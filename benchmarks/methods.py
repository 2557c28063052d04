"""CPU seconds of one fit of every method, with cryptographic noise and all heads, as in Figure 1.

python -m benchmarks.methods
"""

from __future__ import annotations

import warnings
from functools import partial

import numpy as np

from benchmarks.measure import measure_cpu, measure_read
from privrep import CentaurLinear, NothingLearned, PrivAltMin, PrivateFedRep, make_population
from privrep.data.synthetic import make_class_population
from privrep.data.table import UserTable


def make_labels(classes: int, users: int) -> UserTable:
    """Return users with 20 rows of 50 features, and labels of so many classes."""
    rng = np.random.default_rng(5)
    return make_class_population(rng, users=users, features=50, rank=2, rows=20, classes=classes).sample(rng)


def main() -> None:
    warnings.simplefilter("ignore", NothingLearned)  # the papers' configurations
    rng = np.random.default_rng(1)
    table = make_population(rng, 20_000, 50, 2, 10, 0.01).sample(rng, np.float32)
    users, read = np.repeat(table.ids, table.sizes), measure_read(table.X)
    print("one fit, 20,000 users x 10 rows x 50 features, rank 2, epsilon 1, best of three")
    for kind in (PrivateFedRep, PrivAltMin, CentaurLinear):
        for name, model in (("default", kind(2)), ("paper", kind.paper(2))):
            seconds = measure_cpu(partial(model.fit, table.X, table.y, groups=users))
            print(f"  {kind.__name__:14} {name:8} {seconds:.2f} CPU s, {seconds / read:.0f} reads", flush=True)


if __name__ == "__main__":
    main()
