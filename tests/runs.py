"""Simulated runs: where tests bring users, a budget, a record and noise together."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, ClassVar

import numpy as np

from privrep.data.table import UserTable
from privrep.privacy.billboard import Billboard
from privrep.privacy.events import Relation
from privrep.privacy.ledger import Budget, Ledger
from privrep.privacy.noise import NoiseSource, simulated_noise
from privrep.privacy.protocol import Users
from privrep.privacy.run import Run
from privrep.users.memory import InMemoryUsers
from privrep.users.performance import Performance


@dataclass(frozen=True)
class Silence:
    """A simulation that adds no noise and remembers what it was asked for. Samples are drawn as ever."""

    seeded: ClassVar[bool] = True
    asked: list[tuple[str, float, int]] = field(default_factory=list)

    def __call__(self, name: str, sigma: float, size: int) -> np.ndarray:
        self.asked.append((name, sigma, size))
        return np.zeros(size, dtype=np.int64)

    def draw_key(self, name: str) -> bytes:
        return simulated_noise(9).draw_key(name)


def run_on(
    users: UserTable | Users,
    epsilon: float = 1.0,
    delta: float = 1e-6,
    *,
    relation: Relation = "replace-one-user",
    seed: int = 0,
    noise: NoiseSource | Any = None,
    workers: int | None = None,
    folder: Path | None = None,
    ledger: Ledger | None = None,
    billboard: Billboard | None = None,
    **more: Any,
) -> Run:
    """Return a simulated run.

    Args:
        users: an engine, or a table for the engine in memory.
        epsilon: of the budget, as are delta and relation.
        seed: of the noise, unless `noise` is given.
        workers: threads of the engine in memory. None: as many as it takes by itself.
        folder: where ledger and billboard are kept. None keeps them in memory.
        ledger: one to go on with, as is billboard.
        more: other fields of the run.
    """
    if isinstance(users, UserTable):
        users = InMemoryUsers(users, Performance() if workers is None else Performance(workers))
    if ledger is None:
        path = None if folder is None else folder / "ledger.jsonl"
        ledger = Ledger(Budget(epsilon, delta, relation), seeded=True, path=path)
    if billboard is None:
        billboard = Billboard(None if folder is None else folder / "billboard")
    return Run(users, ledger, billboard, simulated_noise(seed) if noise is None else noise, **more)
