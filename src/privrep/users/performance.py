"""Settings that decide how fast and in how much memory an answer is computed, and never which answer it is."""

from __future__ import annotations

import os
import sys
from dataclasses import dataclass, field

from privrep.errors import InputError

REGROUP_BYTES = 150 << 20


def count_workers() -> int:
    """Return how many cores this process may use."""
    return len(os.sched_getaffinity(0)) if sys.platform == "linux" else os.cpu_count() or 1


@dataclass(frozen=True)
class Performance:
    """Settings that a caller may choose freely: nothing here can change what is released, to the last bit.

    `tests/users/test_performance.py` checks it. A setting that moves a rounding error belongs elsewhere, even if the
    guarantee covers the error. Blocks in which users are added up follow from their rows alone.

    workers         threads of a pass.
    regroup_bytes   most bytes of rows that regrouping a file holds at a time.
    workdir         folder for temporary files; None for the system's own.
    """

    workers: int = field(default_factory=count_workers)
    regroup_bytes: int = REGROUP_BYTES
    workdir: str | os.PathLike[str] | None = None

    def __post_init__(self) -> None:
        if isinstance(self.workers, bool) or not isinstance(self.workers, int) or self.workers < 1:
            raise InputError(f"workers must be a whole number, 1 or more. Got {self.workers!r} instead.")
