"""Many who want a budget at once: of MANY that ask for a share, exactly FITTING may have it.

python tests/privacy/racing.py 1000      # so many rounds with processes, and as many with threads
"""

from __future__ import annotations

import math
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

from privrep.errors import BudgetExceeded
from privrep.privacy.accounting import gaussian_epsilon
from privrep.privacy.events import Gaussian
from privrep.privacy.ledger import Budget, Ledger, noise_multiplier
from privrep.privacy.population import Account, PopulationLedger

WHOLE = Budget(2.0, 1e-6)
MANY, FITTING = 8, 3
SHARE = Budget(gaussian_epsilon(WHOLE.delta, WHOLE.mu / math.sqrt(FITTING + 0.5)), WHOLE.delta)


def make(path: Path) -> PopulationLedger:
    return PopulationLedger.create(path, epsilon=WHOLE.epsilon, delta=WHOLE.delta)


def ask(path: Path) -> bool:
    """Reserve a share and charge all of it; return whether there was room."""
    try:
        ledger = Ledger(SHARE, account=Account(PopulationLedger(path)))
        ledger.charge({"page/all": Gaussian(noise_multiplier(SHARE.mu**2))})
    except BudgetExceeded:
        return False
    return True


def ask_in_threads(path: Path) -> list[bool]:
    """Return who got a share, of MANY threads that ask at once."""
    ready, found = threading.Barrier(MANY), list[bool]()

    def begin() -> None:
        ready.wait()
        found.append(ask(path))

    threads = [threading.Thread(target=begin) for _ in range(MANY)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return found


@contextmanager
def processes() -> Iterator[Callable[[Path], list[bool]]]:
    """Yield a function that returns who got a share, of MANY processes that ask at once."""
    started = [
        subprocess.Popen([sys.executable, __file__], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
        for _ in range(MANY)
    ]

    def ask_all(path: Path) -> list[bool]:
        for process in started:
            assert process.stdin is not None
            process.stdin.write(f"{path}\n")
        for process in started:
            assert process.stdin is not None
            process.stdin.flush()
        return [process.stdout.readline() == "True\n" for process in started if process.stdout is not None]

    try:
        yield ask_all
    finally:
        for process in started:
            process.communicate()


def play(folder: Path, rounds: int, ask_all: Callable[[Path], list[bool]]) -> tuple[int, int]:
    """Return in how many rounds not exactly FITTING had a share, and in how many the budget was gone over."""
    wrong = over = 0
    for number in range(rounds):
        path = folder / f"{number}.db"
        ledger = make(path)
        wrong += sum(ask_all(path)) != FITTING
        found = ledger.read()
        over += found.epsilon > WHOLE.epsilon
        wrong += sum(share.status == "open" for share in found.shares.values()) != FITTING
        path.unlink()
    return wrong, over


def main() -> None:
    """Answer on the standard output who asks by the standard input; with an argument, play so many rounds."""
    if len(sys.argv) == 1:
        for line in sys.stdin:
            print(ask(Path(line.strip())), flush=True)
        return
    rounds = int(sys.argv[1])
    with tempfile.TemporaryDirectory() as folder, processes() as by_processes:
        for name, ask_all in (("processes", by_processes), ("threads", ask_in_threads)):
            began = time.monotonic()
            wrong, over = play(Path(folder), rounds, ask_all)
            print(
                f"{rounds} rounds of {MANY} {name}: {wrong} wrong, {over} over budget, {time.monotonic() - began:.0f} s"
            )


if __name__ == "__main__":
    main()
