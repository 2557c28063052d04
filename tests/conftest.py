"""What all tests share: deterministic property tests, a small population, and a noise source that is watched."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import ClassVar

import numpy as np
import pytest
from hypothesis import HealthCheck, settings
from threadpoolctl import threadpool_limits

from privrep.data.table import UserTable
from privrep.privacy.ledger import Budget, Ledger

settings.register_profile(
    "privrep",
    derandomize=True,  # the same examples on every run: a red test stays red
    deadline=None,
    database=None,
    max_examples=100,
    suppress_health_check=[HealthCheck.too_slow, HealthCheck.data_too_large, HealthCheck.function_scoped_fixture],
)
settings.load_profile("privrep")

Users = list[tuple[np.ndarray, np.ndarray]]


@pytest.fixture(autouse=True, scope="session")
def no_syncs() -> Iterator[None]:
    """Sync nothing to disk. No test cuts the power, and a fit of twenty pages would wait for ninety syncs.

    A test of syncs replaces `os.fsync` by a function of its own, and sees every call as before.
    """
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(os, "fsync", os.fstat)  # which fails for a closed file, too
        yield


@pytest.fixture(autouse=True)
def other_people() -> None:
    """Let each test fit people of its own: what an earlier one fitted is no fit of theirs."""
    if "privrep.estimators.accounts" in sys.modules:
        sys.modules["privrep.estimators.accounts"].forget_fits()


@pytest.fixture(autouse=True)
def one_torch_thread() -> None:
    """Tiny products are slower on several threads, and much slower where other processes use these cores."""
    if "torch" in sys.modules:
        sys.modules["torch"].set_num_threads(1)


@pytest.fixture
def as_the_engines_call_steps() -> Iterator[None]:
    """Call steps by themselves as `users.summing` calls them."""
    with np.errstate(all="ignore"), threadpool_limits(1, user_api="blas"):
        yield


@dataclass
class SpyNoise:
    """A noise source that adds nothing and remembers what it was asked for."""

    seeded: ClassVar[bool] = False
    calls: list[tuple[str, float, int]] = field(default_factory=list)

    def __call__(self, name: str, sigma: float, size: int) -> np.ndarray:
        self.calls.append((name, sigma, size))
        return np.zeros(size, dtype=np.int64)


@pytest.fixture
def spy() -> SpyNoise:
    return SpyNoise()


@pytest.fixture
def open_ledger() -> Iterator[Callable[..., Ledger]]:
    """Makes ledgers that are closed when the test ends."""
    opened: list[Ledger] = []

    def make(budget: Budget, path: Path | None = None, *, seeded: bool = False) -> Ledger:
        opened.append(Ledger(budget, seeded=seeded, path=path))
        return opened[-1]

    yield make
    for ledger in opened:
        ledger.close()


@pytest.fixture(scope="session")
def table_of() -> Callable[..., UserTable]:
    """Makes a table of users given as (X, y) pairs; a user may be empty, which rows with ids cannot say."""

    def make(users: Users, features: int, dtype: type = np.float64) -> UserTable:
        offsets = np.cumsum([0, *(len(y) for _, y in users)]).astype(np.int64)
        X = np.concatenate([np.zeros((0, features)), *(X for X, _ in users)]).astype(dtype)
        y = np.concatenate([np.zeros(0), *(y for _, y in users)]).astype(dtype)
        return UserTable(X, y, offsets, np.arange(len(users)))

    return make


@pytest.fixture(scope="session")
def population(table_of: Callable[..., UserTable]) -> Callable[..., UserTable]:
    """Makes users of the model y = <x, U v_i> + c_i, with between 4 and 12 rows each."""

    def make(n: int = 60, d: int = 4, k: int = 2, seed: int = 0) -> UserTable:
        rng = np.random.default_rng(seed)
        U = np.linalg.qr(rng.normal(size=(d, k)))[0]
        users = []
        for _ in range(n):
            X = rng.normal(size=(rng.integers(4, 13), d))
            users.append((X, X @ (U @ rng.normal(size=k)) + rng.normal()))
        return table_of(users, d)

    return make
