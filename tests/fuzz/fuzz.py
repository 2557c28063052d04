"""Open changed input of every kind, and see that it is read or refused: `python tests/fuzz/fuzz.py --cases 1000000`.

Opening ends well, or in an error of privrep's that is one sentence. Any other exception is a fault. So is a case that
takes over SLOW seconds or grows the process by over LARGE bytes, and a process that dies. A fault prints its target and
its seed; `--target NAME --seed N --cases 1` opens that case again, with its traceback. Ends with 1 if there was one.
"""

from __future__ import annotations

import argparse
import multiprocessing
import os
import random
import resource
import shutil
import signal
import sys
import tempfile
import time
import traceback
import warnings
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from types import FrameType
from typing import Any

sys.path.insert(0, str(Path(__file__).parent))

import targets
from targets import TARGETS, Case

from privrep.errors import MissingPackage, PrivrepError

SLOW = 20  # seconds of its own
LARGE = 1 << 30  # bytes
PARQUET_PAGE = 1 << 31  # beside them, for the header of a single page: pyarrow makes room for what it says
PARQUET = ("Parquet", "tables of images")
MEMORY = 12 << 30  # bytes of addresses, so that a fault ends a case, not the machine
SHOWN = 40  # faults of a target of which the traceback is kept
CHUNK = 2_000  # cases of a target that one process tries


class TooSlow(BaseException):
    """A case took too long."""


@dataclass
class Found:
    """Counts of cases by their end, and faults by their seed."""

    ends: Counter[str] = field(default_factory=Counter)
    faults: dict[int, str] = field(default_factory=dict)
    seconds: float = 0.0


def _stop(number: int, frame: FrameType | None) -> None:
    raise TooSlow


def try_case(case: Case, seed: int, name: str) -> tuple[str, str]:
    """Open one changed input. Return "opened", "refused" or "FAULT", and what is wrong."""
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    signal.setitimer(signal.ITIMER_PROF, SLOW)
    try:
        case(random.Random(f"{name} {seed}"))
    except MissingPackage:
        raise
    except PrivrepError as error:
        told = str(error)
        if not told.strip() or len(told.splitlines()) != 1:
            return "FAULT", f"its error is not one line: {told[:500]!r}"
        end = "refused"
    except TooSlow:
        return "FAULT", f"it takes over {SLOW} s\n{traceback.format_exc()}"
    except BaseException:
        return "FAULT", traceback.format_exc()
    else:
        end = "opened"
    finally:
        signal.setitimer(signal.ITIMER_PROF, 0)
    grown = 1024 * (resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before)
    most = LARGE + (PARQUET_PAGE if name in PARQUET else 0)
    return ("FAULT", f"it takes {grown:,} bytes") if grown > most else (end, "")


def try_target(name: str, first: int, count: int, on_case: Callable[[int], None] = lambda seed: None) -> Found:
    """Open `count` changed inputs of one target, with seeds from `first`."""
    found, began = Found(), time.perf_counter()
    folder = Path(tempfile.mkdtemp(prefix="fuzz-", dir=targets.MODELS))
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            case = TARGETS[name].prepare(folder)
            for seed in range(first, first + count):
                on_case(seed)
                end, why = try_case(case, seed, name)
                found.ends[end] += 1
                if end == "FAULT":
                    found.faults[seed] = why
                    shutil.rmtree(folder)  # a case that was stopped may have left anything
                    folder.mkdir()
                    case = TARGETS[name].prepare(folder)
    finally:
        shutil.rmtree(folder, ignore_errors=True)
    found.seconds = time.perf_counter() - began
    return found


def share_out(cases: int, names: Sequence[str]) -> dict[str, int]:
    """Return how many cases each target gets: by its weight, one at least."""
    total = sum(TARGETS[name].weight for name in names)
    return {name: max(int(cases * TARGETS[name].weight / total), 1) for name in names}


def list_targets() -> list[str]:
    """Return the targets that can be tried here: without PyTorch there are no networks, without Flower no messages."""
    from importlib.util import find_spec

    left_out = (
        {f"models: {name}" for name in ("network", "one user's network", "pairs")} if not find_spec("torch") else set()
    )
    left_out |= {"messages", "steps", "tasks", "federate configurations"} if not find_spec("flwr") else set()
    left_out |= {"images", "tables of images"} if not find_spec("PIL") else set()
    return [name for name in TARGETS if name not in left_out]


# Many processes


def _work(name: str, first: int, count: int, last: Any, results: Any) -> None:
    resource.setrlimit(resource.RLIMIT_AS, (MEMORY, MEMORY))
    signal.signal(signal.SIGPROF, _stop)
    os.environ |= {"OMP_NUM_THREADS": "1"}

    def note(seed: int) -> None:
        last.value = seed

    results.put((name, try_target(name, first, count, note)))


def _run_all(shares: dict[str, int], seed: int, jobs: int, report: Callable[[str, Found], None]) -> None:
    """Try all targets in chunks, each in a process of its own, so that one which dies ends its chunk alone."""
    context = multiprocessing.get_context("fork")
    waiting = [
        (name, seed + start, min(CHUNK, count - start))
        for name, count in shares.items()
        for start in range(0, count, CHUNK)
    ]
    running: list[tuple[Any, str, int, int, Any, Any]] = []
    while waiting or running:
        while waiting and len(running) < jobs:
            name, first, count = waiting.pop(0)
            last, results = context.Value("q", first), context.SimpleQueue()
            process = context.Process(target=_work, args=(name, first, count, last, results))
            process.start()
            running.append((process, name, first, count, last, results))
        for entry in list(running):
            process, name, first, count, last, results = entry
            if not results.empty():
                report(*results.get())
            elif process.is_alive():
                continue
            else:
                process.join()
                why = f"the process died with {process.exitcode}"
                report(name, Found(Counter({"FAULT": 1, "before it": last.value - first}), {last.value: why}))
                if rest := first + count - last.value - 1:
                    waiting.append((name, last.value + 1, rest))
            process.join()
            running.remove(entry)
        time.sleep(0.005)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--cases", type=int, default=20_000)
    parser.add_argument("--seed", type=int, default=0, help="the first seed; go on by a later one")
    parser.add_argument("--jobs", type=int, default=os.cpu_count() or 1)
    parser.add_argument("--target", action="append", help="this target alone; may be repeated")
    asked, began = parser.parse_args(), time.perf_counter()
    chosen, found = asked.target or list_targets(), dict[str, Found]()
    with tempfile.TemporaryDirectory(prefix="fuzz-models-", dir=targets.MODELS) as models:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            targets.make_models(Path(models))
        made = time.perf_counter()

        def report(name: str, part: Found) -> None:
            whole = found.setdefault(name, Found())
            whole.ends.update(part.ends)
            whole.seconds += part.seconds
            for seed, why in part.faults.items():
                whole.faults[seed] = why
                if len(whole.faults) <= SHOWN:
                    print(f"FAULT: --target {name!r} --seed {seed} --cases 1\n{why}", flush=True)

        _run_all(share_out(asked.cases, chosen), asked.seed, asked.jobs, report)
    seconds, cases, faults = time.perf_counter() - made, 0, 0
    for name, whole in found.items():
        count, wrong = sum(whole.ends.values()), whole.ends["FAULT"]
        cases, faults = cases + count, faults + wrong
        rate = count / max(whole.seconds, 1e-9)
        ends = "  ".join(f"{whole.ends[end]:9,} {end}" for end in ("opened", "refused"))
        print(f"{name:28s} {ends}  {wrong:6,} faults  {rate:8,.0f} a second")
    rate = f"{cases / seconds:,.0f} a second, models were made in {made - began:.0f} s before"
    print(f"{cases:,} cases from seed {asked.seed} in {seconds:.0f} s ({rate}), {faults:,} faults")
    return int(faults > 0)


if __name__ == "__main__":
    sys.exit(main())
