"""Walks: many small steps under one charge and on one page."""

from __future__ import annotations

from collections.abc import Callable
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
from privrep.privacy.contributions import BatchTerm, Vectors
from privrep.privacy.events import Batched, Gaussian, Sampled
from privrep.privacy.ledger import Budget, Ledger, read_ledger
from privrep.privacy.noise import secure_noise, simulated_noise
from privrep.privacy.protocol import EVERYONE, StepSpec, UserBatch
from privrep.privacy.release import release_about_sample
from privrep.privacy.run import Run
from privrep.privacy.sampling import Fixed, FixedSample, Poisson
from privrep.users.memory import InMemoryUsers
from privrep.users.performance import Performance

REPLACE = "replace-one-user"
BUDGET = Budget(3.0, 1e-5)
QUERIES = {"sum": Query(Bound(2.0, 2), 0.01)}
START = {"at": np.array([5.0, -5.0]), "steps": np.zeros(1)}


@dataclass(frozen=True)
class Towards:
    """From where the walk is to each user's rows: a step of mean shift."""

    at: Any
    rows_per_user: int = 1

    @property
    def spec(self) -> StepSpec:
        return StepSpec(layout="padded", rows_per_user=self.rows_per_user)

    def __call__(self, batch: UserBatch) -> dict[str, Any]:
        X = batch.X
        return {"sum": Vectors(X[:, 0] - self.at)}


@dataclass(frozen=True)
class TowardsMean(Towards):
    @property
    def spec(self) -> StepSpec:
        return StepSpec(layout="batch", rows_per_user=self.rows_per_user)

    def __call__(self, batch: UserBatch) -> dict[str, Any]:
        X = batch.X
        return {"sum": BatchTerm(X[:, 0].mean(axis=0) - self.at)}


@dataclass
class Spy:
    """Noise of zero; remembers what was asked for, and checks that the charge was on disk before."""

    seeded: ClassVar[bool] = False
    ledger: Path | None = None
    calls: list[str] = field(default_factory=list)
    keys: list[bytes] = field(default_factory=list)
    fatal: str | None = None

    def __call__(self, name: str, sigma: float, size: int) -> np.ndarray:
        self._note(f"noise {name}")
        return np.zeros(size, dtype=np.int64)

    def draw_key(self, name: str) -> bytes:
        self._note(f"key {name}")
        self.keys.append(secure_noise.draw_key(name))
        return self.keys[-1]

    def _note(self, call: str) -> None:
        if self.ledger is not None:
            assert '"walk/sum"' in self.ledger.read_text()
        self.calls.append(call)
        if call == self.fatal:
            raise KeyboardInterrupt


def moved(state: Any, releases: Any) -> Any:
    return {"at": state["at"] + releases["sum"].value / 10, "steps": state["steps"] + 1}


def walk(run: Run, steps: int = 4, among: Any = EVERYONE, kind: Any = Towards, **others: Any) -> Any:
    asked = {"start": START, "queries": QUERIES, "update": moved, **others}
    return run.iterate("walk", steps, make_step=lambda state: kind(state["at"]), among=among, **asked)


@pytest.fixture
def users() -> InMemoryUsers:
    X = np.random.default_rng(0).normal(size=(20, 2)).astype(np.float32)
    return InMemoryUsers(UserTable(X, np.zeros(20, np.float32), np.arange(21), np.arange(20)), Performance(1))


def test_a_walk_is_charged_once_then_draws_a_key_and_noise_at_every_step(
    users: InMemoryUsers, tmp_path: Path, open_ledger: Callable[..., Ledger]
) -> None:
    path, told = tmp_path / "ledger.jsonl", []
    ledger, board, spy = open_ledger(BUDGET, path), Billboard(tmp_path / "board"), Spy(path)
    end = walk(Run(users, ledger, board, spy), 3, Fixed(5, 20), on_step=told.append)
    assert spy.calls == [
        f"{what} walk/{step}{of}" for step in range(3) for what, of in (("key", ""), ("noise", "/sum"))
    ]
    assert dict(ledger.report().events) == {"walk/sum": Batched(10.0, 0.25, REPLACE, 3)}
    assert told == [1, 2, 3]
    assert len(set(spy.keys)) == 3
    at = START["at"].copy()
    for key in spy.keys:  # the walk by hand
        away = users.table.X[FixedSample(5, key).draw_order(20)] - at
        at += (away * np.minimum(1, 2 / np.linalg.norm(away, axis=1))[:, None]).sum(axis=0) / 10
    assert end["at"] == pytest.approx(at, rel=1e-6)
    assert end["steps"].tolist() == [3.0]
    assert START["steps"].tolist() == [0.0]
    assert path.read_text().count("charge") == 1
    written = b"".join(file.read_bytes() for file in tmp_path.rglob("*") if file.is_file())
    assert not any(key in written or key.hex().encode() in written for key in spy.keys)


@pytest.mark.parametrize(
    ("among", "kind", "event"),
    [
        (EVERYONE, Towards, Gaussian(10.0, count=4)),
        (Poisson(1.0), Towards, Gaussian(10.0, count=4)),
        (Fixed(20, 20), Towards, Gaussian(10.0, count=4)),
        (Poisson(0.5), Towards, Sampled(10.0, 0.5, REPLACE, 4)),
        (Poisson(0.5), TowardsMean, Batched(10.0, 0.5, REPLACE, 4)),
        (Fixed(5, 20), TowardsMean, Batched(10.0, 0.25, REPLACE, 4)),
        (EVERYONE, TowardsMean, Gaussian(10.0, count=4)),
    ],
)
def test_the_price_is_that_of_so_many_steps(users: InMemoryUsers, among: Any, kind: Any, event: Any) -> None:
    run = Run(users, Ledger(BUDGET), Billboard(), Spy())
    terms = 1 if kind is TowardsMean else None
    walk(run, among=among, kind=kind, queries={"sum": Query(Bound(2.0, 2, terms_per_user=terms), 0.01)})
    assert dict(run.ledger.report().events) == {"walk/sum": event}
    facts = run.billboard["walk"].facts["walk"]
    assert facts["steps"] == 4
    assert facts["noise"]["sum"]["sigma"] == pytest.approx(10 * 2 * 2.0, rel=3e-3)


def test_one_step_of_a_walk_is_a_page_and_steps_of_a_simulation_differ(users: InMemoryUsers) -> None:
    run = Run(users, Ledger(BUDGET, seeded=True), Billboard(), simulated_noise(3))
    found: list[Any] = []

    def keeping(state: Any, releases: Any) -> Any:
        found.append(releases["sum"].value)
        return state

    walk(run, 3, update=keeping)
    noise = [value - found[0] for value in found[1:]]
    assert all(np.abs(each).min() > 1e-3 for each in noise)
    assert run.billboard["walk"].facts["simulation"] is True
    again = Run(users, Ledger(BUDGET, seeded=True), Billboard(), simulated_noise(3))
    assert (
        walk(again, 3)["at"].tolist()
        == walk(Run(users, Ledger(BUDGET, seeded=True), Billboard(), simulated_noise(3)), 3)["at"].tolist()
    )


def test_what_does_not_fit_draws_nothing(users: InMemoryUsers) -> None:
    spy, ledger = Spy(), Ledger(BUDGET)
    run = Run(users, ledger, Billboard(), spy)
    with pytest.raises(BudgetExceeded, match="walk/sum"):
        walk(run, 10**5)
    with pytest.raises(InputError, match="use replace-one-user"):
        walk(Run(users, Ledger(Budget(3.0, 1e-5, "add-or-remove-one-user")), Billboard(), spy), 3, Poisson(0.5))
    with pytest.raises(InputError, match="of 19 users"):
        walk(run, 3, Fixed(5, 19))
    with pytest.raises(InputError, match="bounds that say"):
        walk(run, 3, kind=TowardsMean)
    for steps in (0, -1, 2.5):
        with pytest.raises(InputError, match="one charge pays for"):
            walk(run, steps)  # type: ignore[arg-type]
    with pytest.raises(InputError, match="seeded noise is a simulation"):
        walk(Run(users, ledger, Billboard(), simulated_noise(3)))
    assert spy.calls == []
    assert ledger.report().events == ()
    assert walk(run, 3)["steps"].tolist() == [3.0]


@pytest.mark.parametrize("fatal", ["key walk/0", "noise walk/2/sum", "noise walk/3/sum", "post"])
def test_a_walk_that_was_killed_is_taken_anew_and_paid_for_once(
    users: InMemoryUsers, tmp_path: Path, fatal: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    path, spy, told = tmp_path / "ledger.jsonl", Spy(fatal=fatal), []

    def die(*_: Any, **__: Any) -> None:
        raise KeyboardInterrupt

    with monkeypatch.context() as patched:
        if fatal == "post":
            patched.setattr(Billboard, "post_iterated", die)
        ledger = Ledger(BUDGET, path=path)
        run = Run(users, ledger, Billboard(tmp_path / "board"), spy)
        with pytest.raises(KeyboardInterrupt):
            walk(run, 4, Fixed(5, 20))
        spent = ledger.epsilon
        assert "walk" not in run.billboard
        with pytest.raises(ResumeError, match="pays for one"):
            walk(run, 4, Fixed(5, 20))  # not in the same process
        ledger.close()
    first, ledger, board = len(spy.keys), Ledger(BUDGET, path=path), Billboard(tmp_path / "board")
    spy.fatal = None
    run = Run(users, ledger, board, spy)
    end = walk(run, 4, Fixed(5, 20), on_step=told.append)
    assert told == [1, 2, 3, 4]  # from the start
    assert len(set(spy.keys)) == len(spy.keys) == first + 4
    assert ledger.epsilon == spent
    drawn = len(spy.calls)
    assert np.array_equal(walk(run, 4, Fixed(5, 20))["at"], end["at"])  # read from the billboard
    assert len(spy.calls) == drawn
    ledger.close()
    assert read_ledger(path).epsilon == spent
    assert Billboard.read(tmp_path / "board")["walk"].arrays["at"].tolist() == end["at"].tolist()


def test_a_walk_whose_own_code_fails_is_never_taken_again(
    users: InMemoryUsers, tmp_path: Path, open_ledger: Callable[..., Ledger]
) -> None:
    def fails(state: Any, releases: Any) -> Any:
        if state["steps"][0] == 2:
            raise ValueError("whatever was drawn")
        return moved(state, releases)

    def loses(state: Any, releases: Any) -> Any:
        return {"at": moved(state, releases)["at"]}

    for number, (move, error) in enumerate(((fails, ValueError), (loses, InputError))):
        path, board = tmp_path / f"{number}.jsonl", Billboard()
        ledger = open_ledger(BUDGET, path)
        with pytest.raises(error):
            walk(Run(users, ledger, board, Spy(path)), update=move)
        ledger.close()
        assert "walk" not in board
        with pytest.raises(ResumeError, match="was made before"):
            walk(Run(users, open_ledger(BUDGET, path), board, Spy(path)))


def test_batches_of_other_users_are_refused_below_the_run_too(users: InMemoryUsers) -> None:
    asked = (Towards(START["at"]), QUERIES, Fixed(2, 10**6), Ledger(BUDGET), Spy(), "page")
    with pytest.raises(InputError, match="and there are 20"):
        release_about_sample(users, *asked)


def test_a_page_that_answers_another_question_is_not_read(users: InMemoryUsers) -> None:
    run = Run(users, Ledger(BUDGET), Billboard(), Spy())
    walk(run, 4, Fixed(5, 20))
    others: list[dict[str, Any]] = [
        {"steps": 5},
        {"among": Fixed(6, 20)},
        {"among": EVERYONE},
        {"queries": {"sum": Query(Bound(2.0, 2), 0.02)}},
        {"queries": {"sum": Query(Bound(2.5, 2), 0.01)}},
        {"queries": {"sum": Query(Bound(2.0, 3), 0.01)}},
        {"start": {"at": np.zeros(2)}},
        {"start": {"at": np.zeros(3), "steps": np.zeros(1)}},
    ]
    for other in others:
        with pytest.raises(ResumeError):
            walk(run, **{"steps": 4, "among": Fixed(5, 20), **other})
    run.release("plain", Towards(np.zeros(2)), QUERIES)
    with pytest.raises(ResumeError):
        run.iterate("plain", 1, {"sum": np.zeros(2)}, lambda state: Towards(0), QUERIES, moved)
    with pytest.raises(InputError, match="a page is named"):
        run.iterate("a/b", 1, START, lambda state: Towards(0), QUERIES, moved)
