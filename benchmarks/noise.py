"""Draws a second of the noise that is added to releases, against OpenDP's exact sampler, in the same run.

python -m benchmarks.noise
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor

import numpy as np

from privrep.privacy.discrete_gaussian import make_table
from privrep.privacy.noise import secure_noise

SIGMA = 1.37 * 2.0**40
SIZES = (1, 100, 10_000, 106_000, 1_000_000)
MOST = 106_000  # of OpenDP's draws: its time goes with their number
AT_A_TIME = 2048


def opendp(size: int) -> np.ndarray:
    from opendp import domains, measurements, metrics, mod

    mod.enable_features("contrib")
    vectors = domains.vector_domain(domains.atom_domain(T="i64"))
    draw = measurements.make_gaussian(vectors, metrics.l2_distance(T="i64"), SIGMA)
    counts = [min(AT_A_TIME, size - start) for start in range(0, size, AT_A_TIME)]
    with ThreadPoolExecutor(os.cpu_count()) as pool:
        return np.concatenate(list(pool.map(lambda count: np.asarray(draw([0] * count)), counts)))


def seconds(work: Callable[[], object], times: int) -> float:
    """The fastest of so many, after one that warms up."""
    work()
    taken = []
    for _ in range(times):
        start = time.perf_counter()
        work()
        taken.append(time.perf_counter() - start)
    return min(taken)


def main() -> None:
    table = seconds(lambda: make_table.__wrapped__(SIGMA), 20)
    print(f"a table, once for each sigma: {1e3 * table:.2f} ms")
    for size in SIZES:
        ours = seconds(lambda size=size: secure_noise("noise", SIGMA, size), 20)  # type: ignore[misc]
        theirs = seconds(lambda size=size: opendp(min(size, MOST)), 3) * size / min(size, MOST)  # type: ignore[misc]
        print(
            f"{size:>9,} draws: {1e3 * ours:8.3f} ms, {size / ours:12,.0f} a second; "
            f"OpenDP {1e3 * theirs:10.3f} ms, {size / theirs:9,.0f} a second; ratio {theirs / ours:.0f}"
        )


if __name__ == "__main__":
    main()
