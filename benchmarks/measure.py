"""CPU seconds of all threads, reads of the rows, and what each pass of a fit costs.

Other work on the machine leaves CPU seconds nearly alone, which cannot be said of wall time. A read is what it takes to
add up the same rows in the same process: no pass over them can cost less. So reads mean the same on any machine.
"""

from __future__ import annotations

import re
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any
from unittest.mock import patch

import numpy as np

from privrep.privacy.run import Run
from privrep.users.memory import InMemoryUsers


def measure_cpu(work: Callable[[], object], times: int = 3) -> float:
    """Return the fewest CPU seconds of this process, all its threads together, that the work took."""
    found = []
    for _ in range(times):
        began = time.process_time()
        work()
        found.append(time.process_time() - began)
    return min(found)


def measure_read(X: Any) -> float:
    """Return the CPU seconds of one read of the rows: an array of any shape, which is added up."""
    return measure_cpu(lambda: np.asarray(X).sum(), 7)


@dataclass
class Profile:
    """CPU seconds of users' halves of passes, by page and step, in the order in which they were asked."""

    passes: list[tuple[str, str, float]] = field(default_factory=list)
    page: str = "?"

    @contextmanager
    def part(self, page: str, step: str) -> Iterator[None]:
        """Note what the block takes, as a pass."""
        began = time.process_time()
        yield
        self.passes.append((page, step, time.process_time() - began))

    def lines(self, read: float, total: float) -> Iterator[str]:
        """Yield a table: pages of one kind together, and what is left for server, ledger and noise.

        Args:
            read: CPU seconds of a read of the rows.
            total: CPU seconds of the whole fit.
        """
        kinds: dict[tuple[str, str], list[float]] = {}
        for page, step, seconds in self.passes:
            kinds.setdefault((re.sub(r"-?\d+(?=/|$)", "", page), step), []).append(seconds)
        yield f"  {'page':22} {'step':22} {'passes':>6} {'CPU s':>8} {'reads each':>10} {'share':>6}"
        for (page, step), each in sorted(kinds.items(), key=lambda kind: -sum(kind[1])):
            reads = sum(each) / len(each) / read
            yield f"  {page:22} {step:22} {len(each):6} {sum(each):8.3f} {reads:10.1f} {sum(each) / total:6.1%}"
        rest = total - sum(seconds for *_, seconds in self.passes)
        yield f"  {'all else':22} {'server, noise, ledger':22} {'':6} {rest:8.3f} {'':10} {rest / total:6.1%}"


def name_step(step: Any) -> str:
    """Return the name of a step, and of the step inside it if it has one."""
    inner = getattr(step, "step", None)
    return type(step).__name__ if inner is None else name_step(inner)


@contextmanager
def profile_passes() -> Iterator[Profile]:
    """Yield a profile of all passes over users in memory that are made within the block."""
    profile, release, sums = Profile(), Run.release, InMemoryUsers.sums

    def named(self: Run, page: str, *args: Any, **options: Any) -> Any:
        profile.page = page
        return release(self, page, *args, **options)

    def timed(self: InMemoryUsers, step: Any, *args: Any, **options: Any) -> Any:
        with profile.part(profile.page, name_step(step)):
            return sums(self, step, *args, **options)

    with patch.object(Run, "release", named), patch.object(InMemoryUsers, "sums", timed):
        yield profile


@dataclass(frozen=True)
class Figure:
    """A measured figure, beside its target and its floor: the least that any program could take."""

    what: str
    cpu: float  # seconds
    read: float  # CPU seconds of a read of the rows
    floor: float  # in CPU seconds
    target: str
    value: str = ""  # in the unit of the target, where that is not CPU seconds

    HEAD = f"{'what':56} {'CPU s':>10} {'reads':>7}   {'floor: s':>10} {'reads':>6}   {'to compare':>10}   target"

    def __str__(self) -> str:
        value = self.value or f"{self.cpu:.2f} s"
        return (
            f"{self.what:56} {self.cpu:10.4g} {self.cpu / self.read:7.0f}   {self.floor:10.3g} "
            f"{self.floor / self.read:6.1f}   {value:>10}   {self.target}"
        )


def print_ratios(measured: Mapping[str, float], against: str) -> None:
    """Print seconds, and ratios to one of them."""
    for name, seconds in measured.items():
        print(f"  {name:40} {seconds:9.4f} CPU s   ratio {seconds / measured[against]:.2f}", flush=True)
