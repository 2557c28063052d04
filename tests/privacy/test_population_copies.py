"""Copies of a run that draws from a population ledger: of two that go on, one posts and the other is refused."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from privrep.data.table import UserTable
from privrep.errors import DiskFull, ResumeError
from privrep.privacy.billboard import Billboard
from privrep.privacy.bounds import Bound, Contributions
from privrep.privacy.calibration import Query
from privrep.privacy.contributions import Losses, Vectors
from privrep.privacy.ledger import Budget, Ledger
from privrep.privacy.noise import secure_noise
from privrep.privacy.population import Account, PopulationLedger
from privrep.privacy.protocol import EVERYONE, StepSpec, UserBatch
from privrep.privacy.run import Run
from privrep.privacy.sampling import Fixed, Poisson
from privrep.users.holders import KeyHolders
from privrep.users.memory import InMemoryUsers
from privrep.users.performance import Performance

BUDGET, QUERY = Budget(2.0, 1e-5), {"sum": Query(Bound(1.0, 2), 0.02)}
ROWS = np.random.default_rng(0).normal(size=(20, 2)).astype(np.float32)
USERS = InMemoryUsers(UserTable(ROWS, np.zeros(20, np.float32), np.arange(21), np.arange(20)), Performance(1))
Meanwhile = Callable[[], None]


class Halfway:
    """Send each user's row; halfway through the pass something else happens, once."""

    spec = StepSpec(layout="padded", rows_per_user=1)

    def __init__(self, meanwhile: Meanwhile) -> None:
        self.meanwhile = [meanwhile]

    def __call__(self, users: UserBatch) -> dict[str, Contributions]:
        if self.meanwhile:
            self.meanwhile.pop()()
        return {"sum": Vectors(np.asarray(users.X).sum(axis=1))}


class Guess:
    """Send each user's loss by two candidates."""

    spec = StepSpec(layout="padded", rows_per_user=1)

    def __call__(self, users: UserBatch) -> dict[str, Losses]:
        return {"losses": Losses(np.full((len(users.X), 2), 0.5))}


class Late:
    """Noise before whose first draw something else happens, once: the charge is on record, and no page stands."""

    seeded = False

    def __init__(self, meanwhile: Meanwhile) -> None:
        self.meanwhile = [meanwhile]

    def happen(self) -> None:
        if self.meanwhile:
            self.meanwhile.pop()()

    def __call__(self, name: str, sigma: float, size: int) -> Any:
        self.happen()
        return secure_noise(name, sigma, size)

    def draw_choice(self, name: str, losses: Any, scale: int) -> int:
        self.happen()
        return secure_noise.draw_choice(name, losses, scale)

    def draw_key(self, name: str) -> bytes:
        return secure_noise.draw_key(name)


def walk(run: Run, meanwhile: Meanwhile) -> None:
    step = Halfway(meanwhile)
    run.iterate("page", 3, {"at": np.zeros(2)}, lambda state: step, QUERY, lambda state, new: {"at": new["sum"].value})


def release(among: Any, run: Run, meanwhile: Meanwhile) -> None:
    run.release("page", Halfway(meanwhile), QUERY, among)


def release_late(run: Run, meanwhile: Meanwhile) -> None:
    replace(run, noise=Late(meanwhile)).release("page", Halfway(lambda: None), QUERY)


def select(run: Run, meanwhile: Meanwhile) -> None:
    holders = KeyHolders.from_columns(np.arange(20), np.arange(20) % 3)
    replace(run, noise=Late(meanwhile)).select("page", holders, 0.02, 1e-7)


def choose(run: Run, meanwhile: Meanwhile) -> None:
    replace(run, noise=Late(meanwhile)).choose("page", Guess(), 2, 0.1)


DOORS = {
    "a walk": walk,
    "a sum": partial(release, EVERYONE),
    "a sample": partial(release, Poisson(0.5)),
    "a batch": partial(release, Fixed(10, 20)),
    "a sum, at its noise": release_late,
    "a selection, at its noise": select,
    "a choice, at its draw": choose,
}


def posted(folder: Path) -> int:
    return len(Billboard.read(folder / "billboard"))


@pytest.mark.parametrize("door", DOORS)
@pytest.mark.parametrize("goes_on", [True, False], ids=["the copy is opened", "the copy is a backup"])
def test_of_two_copies_one_posts(door: str, goes_on: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A copy is made during a pass, or before a draw. Opened at once it goes on, and the first one posts no page.

    Or the first goes on until its page stands, and its disk is full before it notes that: then the copy is refused.
    """
    people = PopulationLedger.create(tmp_path / "people.db", epsilon=2.0, delta=1e-5)
    first, other = tmp_path / "first", tmp_path / "other"
    first.mkdir()

    def lived(folder: Path, meanwhile: Meanwhile) -> None:
        with Run.open(USERS, BUDGET, folder=folder, account=Account(people)) as run:
            DOORS[door](run, meanwhile)

    def copy() -> None:
        shutil.copytree(first, other)
        if goes_on:
            lived(other, lambda: None)

    def fill(ledger: Ledger, *given: Any) -> None:
        raise DiskFull("there is no room")

    if goes_on:
        with pytest.raises(ResumeError, match="this run is finished"):
            lived(first, copy)
        assert (posted(first), posted(other)) == (0, 1)
        return
    with monkeypatch.context() as patch:
        patch.setattr(Ledger, "record_posted", fill)
        with pytest.raises(DiskFull):
            lived(first, copy)
    with pytest.raises(ResumeError, match="another copy of its folder"):
        lived(other, lambda: None)
    assert (posted(first), posted(other)) == (1, 0)
    lived(first, lambda: None)
    (share,) = people.read().shares.values()
    assert (share.status, posted(first)) == ("finished", 1)
