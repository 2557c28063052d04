"""Seconds of one fit of every method, with cryptographic noise and all heads, in the setting of Figure 1.

python -m benchmarks.methods
"""

from __future__ import annotations

import time
import warnings

import numpy as np

from privrep import CentaurLinear, NothingLearned, PrivAltMin, PrivateFedRep, make_population


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


if __name__ == "__main__":
    main()
