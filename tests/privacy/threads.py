"""Threads at one ledger: trials that find a budget overspent, or one charge that paid for two draws."""

from __future__ import annotations

import threading
from collections.abc import Callable
from pathlib import Path

from privrep.errors import BudgetExceeded, ResumeError
from privrep.privacy.events import Gaussian
from privrep.privacy.ledger import Budget, Ledger, noise_multiplier, read_report

BUDGET = Budget(1.0, 1e-6)
THREADS = 4


def price(share: float) -> Gaussian:
    """Return the event that costs this share of the budget."""
    return Gaussian(noise_multiplier(share * BUDGET.mu**2))


def together(work: Callable[[int], None]) -> None:
    """Do something in several threads at once, begun at the same moment."""
    ready = threading.Barrier(THREADS)

    def begin(number: int) -> None:
        ready.wait()
        work(number)

    threads = [threading.Thread(target=begin, args=(number,)) for number in range(THREADS)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()


def spend_together(path: Path | None) -> str:
    """Let threads ask for 16 fifths of a budget; return what is wrong, or nothing.

    Args:
        path: of a new ledger; None keeps it in memory.
    """
    ledger, paid = Ledger(BUDGET, path=path), list[str]()

    def spend(number: int) -> None:
        for turn in range(4):
            name = f"{number}-{turn}/sum"
            try:
                ledger.charge({name: price(0.2)})
            except BudgetExceeded:
                continue
            paid.append(name)

    together(spend)
    ledger.close()
    if ledger.epsilon > BUDGET.epsilon or len(paid) > 5:
        return "over budget"
    if len(paid) < 5 or sorted(ledger.entries.charges) != sorted(paid):
        return "other charges than were paid"
    written = paid if path is None else [name for name, _ in read_report(path).events]
    return "" if sorted(written) == sorted(paid) else "other charges on disk than were paid"


def draw_together() -> str:
    """Let threads draw one release; return what is wrong, or nothing."""
    ledger, drawn = Ledger(BUDGET), list[int]()

    def draw(number: int) -> None:
        try:
            ledger.charge({"page/sum": price(0.5)})
        except ResumeError:
            return
        drawn.append(number)

    together(draw)
    return "" if len(drawn) == 1 else f"{len(drawn)} draws for one charge"
