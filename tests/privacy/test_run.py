"""How a run is opened and what it tells, and what steps may declare."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from privrep.data.table import UserTable
from privrep.errors import InputError
from privrep.privacy.bounds import Bound
from privrep.privacy.calibration import Query
from privrep.privacy.contributions import Vectors
from privrep.privacy.ledger import Budget, read_ledger
from privrep.privacy.protocol import StepSpec
from privrep.privacy.run import Run
from privrep.privacy.sampling import Fixed, FixedSample, Poisson, Sample
from privrep.users.holders import KeyHolders
from privrep.users.isolated import IsolatedUsers
from privrep.users.memory import InMemoryUsers
from privrep.users.performance import Performance
from stepping import RowsStep

BUDGET = Budget(4.0, 1e-6)
QUERY = {"mean": Query(Bound(1.0, 3), 0.1)}
MEANS = RowsStep(lambda X, y: {"mean": Vectors(X.mean(axis=1))})


@pytest.fixture
def users(population: Callable[..., UserTable]) -> InMemoryUsers:
    return InMemoryUsers(population(n=20, d=3), Performance(1))


def test_a_run_with_a_folder_is_continued_and_its_ledger_is_closed_whatever_happens(
    users: InMemoryUsers, tmp_path: Path
) -> None:
    released: list[np.ndarray] = []

    def begin() -> None:
        with Run.open(users, BUDGET, seed=3, folder=tmp_path) as run:
            released.append(run.release("page", MEANS, QUERY)["mean"].value)
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        begin()
    told: list[tuple[str, Any]] = []
    with Run.open(
        users, BUDGET, seed=3, folder=tmp_path, on_release=lambda page, step: told.append((page, step))
    ) as run:  # the ledger was closed: another may hold it
        again = run.release("page", MEANS, QUERY)["mean"].value
    assert np.array_equal(released[0], again)
    assert told == [("page", MEANS)]
    assert run.ledger.seeded
    assert read_ledger(tmp_path / "ledger.jsonl").report() == run.ledger.report()


def test_without_a_seed_noise_is_secret_and_without_a_folder_nothing_is_written(users: InMemoryUsers) -> None:
    with Run.open(users, BUDGET) as run:
        assert not run.ledger.seeded
        assert not run.noise.seeded


def test_a_run_without_users_selects_keys_and_asks_nobody(users: InMemoryUsers) -> None:
    held = KeyHolders(("common",), np.zeros(300, np.int64), np.arange(301))
    told: list[str] = []
    with Run.open(None, BUDGET, seed=1, on_release=lambda page, step: told.append(page)) as run:
        assert run.select("keys-1", held, 0.05 * BUDGET.mu**2, 5e-8) == ("common",)
        with pytest.raises(InputError, match="not known yet"):
            run.release("page", MEANS, QUERY)
        with pytest.raises(InputError, match="not known yet"):
            _ = run.users.facts
        assert "page" not in run.billboard
        known = run.with_users(users)
        known.release("page", MEANS, QUERY)
        assert "page" in run.billboard
    assert told == ["keys-1", "page"]
    assert [name for name, _ in run.ledger.report().events] == ["keys-1/keys", "page/mean"]


@pytest.mark.parametrize(
    ("declared", "words"),
    [
        ({"layout": "padded", "rows_per_user": 0}, "whole number of slots"),
        ({"layout": "padded", "rows_per_user": True}, "whole number of slots"),
        ({"layout": "batch"}, "how many rows of each user"),
        ({"layout": "padded"}, "cannot be called"),
        ({"rows_per_user": 3}, "cannot be called"),
    ],
)
def test_steps_that_cannot_be_called_are_refused(declared: dict[str, Any], words: str) -> None:
    with pytest.raises(InputError, match=words):
        StepSpec(**declared)


@pytest.mark.parametrize("among", [Poisson(0.1), Fixed(4, 20), None, "all"])
def test_users_refuse_an_audience_that_nobody_drew(users: InMemoryUsers, among: Any) -> None:
    """Otherwise a sample that was paid for could be answered about everyone."""
    for engine in (users, IsolatedUsers(users), IsolatedUsers(users, strictly=True)):
        with pytest.raises(InputError, match="everyone, a group or a sample that was drawn"):
            engine.sums(MEANS, {"mean": Bound(1.0, 3)}, among)


@pytest.mark.parametrize("among", [Sample(0.5, b"key"), FixedSample(4, b"key"), None])
def test_a_run_refuses_a_sample_that_it_did_not_draw(users: InMemoryUsers, among: Any) -> None:
    with Run.open(users, BUDGET) as run:
        with pytest.raises(InputError, match="a sample that it draws itself"):
            run.release("page", MEANS, QUERY, among)
        assert run.ledger.epsilon == 0
