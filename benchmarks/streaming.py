"""A pass over users in a Parquet file against Arrow alone reading that file, and the memory the pass takes.

    python -m benchmarks.streaming [--users 100000] [--plain]

Makes a file of users x 10 rows x 50 float32 features, sorted by user, in a temporary folder. Everything is timed in
turns, each in a process of its own, because what Arrow costs depends on what was allocated before; CPU seconds are
printed because other work on the machine leaves them nearly alone. Memory is the peak of a process that opens the file
and makes one pass, less that of a process that only imports the same modules.
"""

from __future__ import annotations

import argparse
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from privrep.data.readers import TableSource
from privrep.data.regroup import RowsSeen
from privrep.linear.steps import SIZES, LeaveOneOutGradient, gradient_size
from privrep.local.transform import FeatureTransform
from privrep.privacy.bounds import Bound
from privrep.users.performance import Performance, count_workers
from privrep.users.streaming import StreamingUsers

ROWS, FEATURES, RANK = 10, 50, 2
STEP = LeaveOneOutGradient(np.eye(FEATURES, RANK), FeatureTransform.plain(FEATURES), 0.15, 0.02, intercept=True)
BOUNDS = {"step": Bound(1.0, gradient_size(FEATURES, RANK)), "sizes": SIZES}


def make_file(path: Path, users: int, plain: bool) -> None:
    """As pyarrow writes it by default (dictionaries, snappy); `plain`: neither, which Arrow reads twice as fast."""
    names = ["user", "y", *(f"x{j}" for j in range(FEATURES))]
    schema = pa.schema([(name, pa.int64() if name == "user" else pa.float32()) for name in names])
    options = {"use_dictionary": False, "compression": "none"} if plain else {}
    rng = np.random.default_rng(0)
    with pq.ParquetWriter(path, schema, **options) as file:
        for start in range(0, users, 10_000):
            count = min(10_000, users - start)
            values = rng.standard_normal((1 + FEATURES, count * ROWS), dtype=np.float32)
            ids = np.repeat(np.arange(start, start + count), ROWS)
            file.write_table(pa.table([pa.array(ids), *(pa.array(column) for column in values)], schema=schema))


def read_table(path: Path) -> None:
    """The whole file into memory, as one reads a file with Arrow."""
    pq.read_table(path)


def iter_batches(path: Path) -> None:
    """Batch by batch, with Arrow's default options."""
    for _ in pq.ParquetFile(path).iter_batches():
        pass


def as_the_engine(path: Path) -> None:
    """Batch by batch, as the engine asks Arrow for them: the fastest we know."""
    for _ in TableSource(path, "user", "y").batches():
        pass


def blocks(path: Path) -> None:
    users = _opened(path)
    sum(block.n_rows for block in users.blocks())


def one_pass(path: Path) -> None:
    _opened(path).sums(STEP, BOUNDS)


def _opened(path: Path) -> StreamingUsers:
    """An engine over a file that was looked at before: a pass is timed here, not the scan when a file is opened."""
    source = TableSource(path, "user", "y")
    seen = RowsSeen(sampled=False)
    seen.rows = pq.ParquetFile(path).metadata.num_rows
    seen.users = seen.rows // ROWS
    return StreamingUsers(source, source, seen, Performance(), ExitStack())


RUNS: dict[str, Callable[[Path], None]] = {
    "Arrow alone, read_table": read_table,
    "Arrow alone, iter_batches": iter_batches,
    "Arrow alone, the engine's options": as_the_engine,
    "blocks of whole users, no step": blocks,
    "pass: LeaveOneOutGradient": one_pass,
}


def timed(name: str, path: str) -> str:
    """Wall and CPU seconds of one run, the better of two in this process."""
    best = (np.inf, np.inf)
    for _ in range(2):
        wall, cpu = time.perf_counter(), time.process_time()
        RUNS[name](Path(path))
        best = min(best, (time.perf_counter() - wall, time.process_time() - cpu))
    return f"{best[0]} {best[1]}"


def timings(path: Path, repeats: int) -> dict[str, tuple[float, float]]:
    """Wall and CPU seconds, the best of several turns."""
    best = dict.fromkeys(RUNS, (np.inf, np.inf))
    for _ in range(repeats):
        for name in RUNS:
            wall, cpu = map(float, in_a_process(f"timed({name!r}, {str(path)!r})").split())
            best[name] = min(best[name], (wall, cpu))
    return best


def peak(path: Path | None) -> float:
    """MB at the peak of this process after a pass over the file, or after nothing."""
    if path is not None:
        with StreamingUsers.open(TableSource(path, "user", "y")) as users:
            users.sums(STEP, BOUNDS)
    status = Path("/proc/self/status").read_text()
    return next(int(line.split()[1]) / 1024 for line in status.splitlines() if line.startswith("VmHWM"))


def in_a_process(call: str) -> str:
    code = f"from pathlib import Path; from benchmarks.streaming import peak, timed; print({call})"
    return subprocess.check_output([sys.executable, "-c", code], text=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--users", type=int, default=100_000)
    parser.add_argument("--plain", action="store_true", help="a file without dictionaries and compression")
    parser.add_argument("--repeats", type=int, default=2)
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="privrep-benchmark-") as folder:
        path = Path(folder) / "users.parquet"
        make_file(path, arguments.users, arguments.plain)
        size = path.stat().st_size / 2**20
        imports = float(in_a_process("peak(None)"))
        memory = float(in_a_process(f"peak(Path({str(path)!r}))"))
        best = timings(path, arguments.repeats)
    rows = arguments.users * ROWS
    print(f"{arguments.users:,} users x {ROWS} rows x {FEATURES} features, float32, a file of {size:,.0f} MB,")
    print(f"rank {RANK}, {count_workers()} cores, best of {2 * arguments.repeats}\n")
    print(f"{'':34}{'rows/s':>12}{'seconds':>9}{'CPU s':>8}")
    for name, (wall, cpu) in best.items():
        print(f"{name:34}{rows / wall:12,.0f}{wall:9.2f}{cpu:8.2f}")
    passed = best["pass: LeaveOneOutGradient"][0]
    print("\nspeed of the pass over that of")
    for name in list(best)[:3]:
        print(f"  {name:32}{best[name][0] / passed:6.2f}")
    print(f"\npeak memory of opening and one pass: {memory - imports:.0f} MB above the {imports:.0f} MB of the imports")


if __name__ == "__main__":
    main()
