"""The doors of a run, one contract for all: charge, then draw, then post, once. A new door joins by a line in DOORS."""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
import pytest

from privrep.data.table import UserTable
from privrep.errors import BudgetExceeded, InputError, ResumeError
from privrep.privacy.billboard import Billboard
from privrep.privacy.bounds import Bound
from privrep.privacy.calibration import Query
from privrep.privacy.contributions import Counts, Losses, Vectors
from privrep.privacy.ledger import Budget, Ledger
from privrep.privacy.noise import secure_noise, simulated_noise
from privrep.privacy.protocol import EVERYONE, StepSpec, UserBatch
from privrep.privacy.run import Run
from privrep.privacy.sampling import Fixed, Poisson
from privrep.users.holders import KeyHolders
from privrep.users.memory import InMemoryUsers
from privrep.users.performance import Performance

BUDGET = Budget(2.0, 1e-5)
SHARE, DELTA = 0.25 * BUDGET.mu**2, 1e-7
START = {"at": np.zeros(3)}
HELD = KeyHolders(("a", "b"), np.tile([0, 1], 200), np.arange(0, 401, 2))
Open = Callable[..., Ledger]  # the fixture open_ledger


@dataclass(frozen=True)
class Rows:
    """Users' mean rows from a point on, which feature is largest in them, and losses by four candidates."""

    at: Any = 0.0
    layout: str = "by_size"

    @property
    def spec(self) -> StepSpec:
        return StepSpec() if self.layout == "by_size" else StepSpec(layout="padded", rows_per_user=4)

    def __call__(self, batch: UserBatch) -> dict[str, Any]:
        means = batch.X.mean(axis=1) - self.at
        losses = np.abs(batch.y[:, :1] - np.arange(4)) / 9
        largest = Counts(means.argmax(axis=1)[:, None], 3)
        return {"mean": Vectors(means), "largest": largest, "losses": Losses(losses)}


@dataclass
class Spy:
    """Noise of zero that remembers what was asked for and checks that the charge is on disk. It can die of a draw."""

    seeded: ClassVar[bool] = False
    ledger: Path
    dies: bool = False
    calls: list[str] = field(default_factory=list)

    def __call__(self, name: str, sigma: float, size: int) -> np.ndarray:
        self._note(name)
        return np.zeros(size, dtype=np.int64)

    def draw_choice(self, name: str, losses: np.ndarray, scale: int) -> int:
        self._note(name)
        return int(losses.argmin())

    def draw_key(self, name: str) -> bytes:
        self._note(name)
        return secure_noise.draw_key(name)

    def _note(self, name: str) -> None:
        page = name.split("/")[0]
        assert f'"charge": "{page}/' in self.ledger.read_text()
        self.calls.append(name)
        if self.dies:
            raise KeyboardInterrupt


def queries(share: float = SHARE, norm: float = 1.5) -> dict[str, Query]:
    return {"mean": Query(Bound(norm, 3), share), "largest": Query(Bound(1.0, 3, acute=True), share)}


def release(run: Run, page: str, asked: Any = None, among: Any = EVERYONE) -> Any:
    released = run.release(page, Rows(layout="by_size" if among is EVERYONE else "padded"), asked or queries(), among)
    return {key: one.value.tolist() for key, one in released.items()}


def iterate(
    run: Run, page: str, steps: int = 2, share: float = SHARE, among: Any = EVERYONE, start: Any = START
) -> Any:
    asked = {"mean": Query(Bound(1.5, 3), share)}

    def update(state: Any, released: Any) -> Any:
        return state | {"at": state["at"] + released["mean"].value / 50}

    end = run.iterate(page, steps, start, lambda state: Rows(state["at"], "padded"), asked, update, among)
    return {key: value.tolist() for key, value in end.items()}


def select(run: Run, page: str, share: float = SHARE, delta: float = DELTA) -> Any:
    return run.select(page, HELD, share, delta)


def choose(run: Run, page: str, candidates: int = 4, epsilon: float = 0.8) -> Any:
    return run.choose(page, Rows(), candidates, epsilon)


@dataclass(frozen=True)
class Door:
    """How to ask, what costs too much beside it, questions that are others, and how many draws one takes."""

    ask: Callable[..., Any]
    dear: dict[str, Any]
    others: Sequence[dict[str, Any]]
    post: str
    draws: int
    given: dict[str, Any] = field(default_factory=dict)

    def __call__(self, run: Run, page: str = "page", **changes: Any) -> Any:
        return self.ask(run, page, **{**self.given, **changes})


OTHERS = [{"asked": {"mean": queries()["mean"]}}, {"asked": queries(SHARE / 2)}, {"asked": queries(norm=3.0)}]
HALF, FEW = {"among": Poisson(0.5)}, {"among": Fixed(10, 50)}
WALKS = [
    {"steps": 3},
    {"share": SHARE / 2},
    {"start": {"at": np.zeros(3), "more": np.zeros(1)}},
    {"among": Fixed(9, 50)},
]
DOORS = {
    "release": Door(release, {"asked": queries(3 * SHARE)}, OTHERS, "post_releases", 2),
    "sample": Door(release, {"asked": queries(99 * SHARE)}, [*OTHERS, {"among": EVERYONE}], "post_releases", 3, HALF),
    "batch": Door(release, {"asked": queries(99 * SHARE)}, [*OTHERS, {"among": EVERYONE}], "post_releases", 3, FEW),
    "walk": Door(iterate, {"steps": 9}, WALKS, "post_iterated", 2),
    "walk of batches": Door(iterate, {"share": 99 * SHARE}, [*WALKS, {"among": EVERYONE}], "post_iterated", 4, FEW),
    "select": Door(select, {"share": 4 * SHARE}, [{"share": SHARE / 2}, {"delta": DELTA / 2}], "post_selection", 1),
    "choose": Door(choose, {"epsilon": 1.9}, [{"candidates": 3}, {"epsilon": 0.5}], "post_choice", 1),
}


@pytest.fixture(params=DOORS)
def door(request: pytest.FixtureRequest) -> Door:
    return DOORS[request.param]


@dataclass(frozen=True)
class Watched(InMemoryUsers):
    """An engine that counts its passes."""

    passes: list[Any] = field(default_factory=list)

    def sums(self, step: Any, bounds: Any, among: Any = EVERYONE) -> Any:
        self.passes.append(bounds)
        return super().sums(step, bounds, among)


@pytest.fixture
def users(population: Callable[..., UserTable]) -> Watched:
    return Watched(population(n=50, d=3), Performance(1))


@dataclass
class Place:
    """A folder in which runs are opened again and again."""

    folder: Path
    users: Watched
    open_ledger: Open
    heard: list[str] = field(default_factory=list)

    @property
    def path(self) -> Path:
        return self.folder / "ledger.jsonl"

    @property
    def board(self) -> Path:
        return self.folder / "board"

    def files(self) -> dict[str, bytes]:
        return {path.name: path.read_bytes() for path in self.folder.rglob("*") if path.is_file()}

    def run(self, noise: Any = None, **options: Any) -> Run:
        ledger = self.open_ledger(BUDGET, self.path, **options)
        noise = Spy(self.path) if noise is None else noise
        return Run(self.users, ledger, Billboard(self.board), noise, lambda page, step: self.heard.append(page))


@pytest.fixture
def place(tmp_path: Path, users: Watched, open_ledger: Open) -> Place:
    return Place(tmp_path, users, open_ledger)


def test_the_charge_is_synced_before_the_draw_and_all_is_drawn_before_the_post(
    door: Door, place: Place, monkeypatch: pytest.MonkeyPatch
) -> None:
    run, events, real = place.run(), [], os.fsync

    def fsync(descriptor: int) -> None:
        real(descriptor)
        synced = Path(os.readlink(f"/proc/self/fd/{descriptor}"))
        events.append("charge" if synced == place.path and b'"posted"' not in place.path.read_bytes() else "post")

    class Drawing(Spy):
        def _note(self, name: str) -> None:
            super()._note(name)
            assert not list(place.board.iterdir())
            events.append("draw")

    monkeypatch.setattr(os, "fsync", fsync)
    door(Run(run.users, run.ledger, run.billboard, Drawing(place.path)))
    drawn = 1 + door.draws
    assert events[: drawn + 1] == ["charge", *["draw"] * door.draws, "post"]
    assert set(events[drawn:]) == {"post"}


def test_a_refused_charge_draws_nothing_and_leaves_everything_as_it_was(door: Door, place: Place) -> None:
    run = place.run()
    door(run, "first")
    before, calls = place.files(), list(run.noise.calls)
    with pytest.raises(BudgetExceeded, match="second/"):
        door(run, "second", **door.dear)
    assert (run.noise.calls, place.files()) == (calls, before)
    assert "second" not in run.billboard
    door(run, "second")  # what fits may still be asked
    assert len(run.noise.calls) == 2 * len(calls)


def test_a_page_that_stands_is_read_and_not_asked_again(door: Door, place: Place) -> None:
    run = place.run()
    first, spent, drawn = door(run), run.ledger.report(), len(run.noise.calls)
    asked = len(place.users.passes)
    assert drawn == door.draws
    run.ledger.close()
    for again in (run, place.run()):
        assert door(again) == first
        assert len(again.noise.calls) == (drawn if again is run else 0)
        assert again.ledger.report() == spent
    assert place.heard == ["page"] * 3
    assert len(place.users.passes) == asked <= 2


@pytest.mark.parametrize("dies", ["drawing", "posting"])
def test_a_run_killed_between_charge_and_post_goes_on_and_pays_once(
    door: Door, place: Place, monkeypatch: pytest.MonkeyPatch, dies: str
) -> None:
    def die(*_: Any, **__: Any) -> None:
        raise KeyboardInterrupt

    with monkeypatch.context() as patched:
        if dies == "posting":
            patched.setattr(Billboard, door.post, die)
        run = place.run(Spy(place.path, dies=dies == "drawing"))
        with pytest.raises(KeyboardInterrupt):
            door(run)
    charged, spent = place.path.read_bytes(), run.ledger.epsilon
    assert b'"charge": "page/' in charged
    drawn = len(run.noise.calls)
    with pytest.raises(ResumeError, match="pays for one"):  # this process may have drawn: it gets no second draw
        door(run)
    assert len(run.noise.calls) == drawn
    run.ledger.close()
    again = place.run()
    found = door(again)
    written = place.path.read_bytes()
    assert written.startswith(charged)
    (last,) = map(json.loads, written[len(charged) :].splitlines())
    assert (last["posted"], last["says"]) == ("page", again.billboard["page"].digest)
    assert (again.ledger.epsilon, len(again.noise.calls)) == (spent, door.draws)
    assert door(again) == found
    assert len(again.noise.calls) == door.draws


def test_a_page_that_is_gone_is_not_drawn_again_for_free(door: Door, place: Place) -> None:
    """The mean of many free draws is the exact sum."""
    run = place.run()
    door(run)
    drawn = len(run.noise.calls)
    with pytest.raises(ResumeError, match="A charge pays for one"):  # another billboard
        door(Run(run.users, run.ledger, Billboard(), run.noise))
    assert len(run.noise.calls) == drawn
    run.ledger.close()
    for file in place.board.iterdir():
        file.unlink()
    again = place.run()
    with pytest.raises(ResumeError, match="A charge pays for one"):
        door(again)
    assert again.noise.calls == []


def test_a_page_without_its_charge_is_not_read_as_if_it_were_free(door: Door, place: Place) -> None:
    """A ledger that was lost while the billboard stands: reading on without a charge would report too little."""
    run = place.run()
    door(run)
    run.ledger.close()
    place.path.unlink()
    with pytest.raises(ResumeError, match="never charged"):
        door(place.run())


def test_a_page_that_answers_another_question_is_refused(door: Door, place: Place) -> None:
    run = place.run()
    door(run)
    spent, calls = run.ledger.report(), list(run.noise.calls)
    for other in door.others:
        with pytest.raises(ResumeError):
            door(run, **other)
    for kind in DOORS.values():
        if kind.ask is not door.ask:
            with pytest.raises((ResumeError, InputError)):
                kind(run)
    assert (run.ledger.report(), run.noise.calls) == (spent, calls)
    for name in ("a/b", "", "a b"):
        with pytest.raises(InputError, match="a page is named"):
            door(run, name)


def test_a_simulation_cannot_keep_a_ledger_that_says_private(door: Door, place: Place) -> None:
    run = place.run(simulated_noise(0))
    with pytest.raises(InputError, match="seeded noise is a simulation"):
        door(run)
    assert run.ledger.report().events == ()


@pytest.mark.parametrize("seeded", [True, False])
def test_the_pages_of_a_simulation_say_so_and_no_others(door: Door, place: Place, seeded: bool) -> None:
    run = place.run(simulated_noise(0) if seeded else secure_noise, seeded=seeded)
    door(run)
    assert Billboard.read(place.board)["page"].facts.get("simulation", False) is seeded
    assert run.ledger.report().seeded is seeded
