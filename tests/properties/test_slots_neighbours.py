"""Steps with slots: one user swapped for any other, or in a sample and not, moves the sum by what is stated and nobody
else's contribution by a bit."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from privrep.data.table import UserTable
from privrep.privacy.bounds import NORM_SLACK, Bound
from privrep.privacy.contributions import Concatenated, Counts, Products, Vectors
from privrep.privacy.protocol import EVERYONE, StepSpec, UserBatch
from privrep.privacy.sampling import Sample
from privrep.users import summing as base
from privrep.users.memory import InMemoryUsers
from privrep.users.performance import Performance

FEATURES, HIDDEN, SLOTS = 9, 6, 4
W = np.random.default_rng(0).normal(size=(FEATURES, HIDDEN)).astype(np.float32)
SIZE = FEATURES * HIDDEN + HIDDEN
BOUNDS = {"gradient": Bound(0.8, SIZE), "tiny": Bound(2.0**-120, SIZE), "cells": Bound(1.0, 64, acute=True)}
User = tuple[np.ndarray, np.ndarray]


@dataclass(frozen=True)
class Layer:
    """One forward and backward over the rows of all users of a call, and a histogram that shows last bits."""

    rows_per_user: int = SLOTS
    floats: int = HIDDEN
    sent: dict[int, list[np.ndarray]] = field(default_factory=dict)  # by place

    @property
    def spec(self) -> StepSpec:
        return StepSpec(layout="padded", rows_per_user=self.rows_per_user, floats_per_user=self.floats)

    def __call__(self, batch: UserBatch) -> dict[str, Any]:
        X, y, places = batch.X, batch.y, batch.positions
        out = np.tanh(X.reshape(-1, FEATURES) @ W).reshape(*y.shape, HIDDEN)
        wrong = (out - (y[:, :, None] % HIDDEN == np.arange(HIDDEN))) * (y != -1)[:, :, None]
        wrong = wrong.astype(np.float32)
        bits = np.ascontiguousarray(wrong.sum(axis=1)[:, 0]).view(np.uint32).astype(np.int64)
        gradient = Concatenated((Products(X, wrong), Vectors(wrong.sum(axis=1))))
        for seat, place in enumerate(places.tolist()):
            if place >= 0:
                mine = [X[seat], wrong[seat], gradient.norms()[seat], bits[seat]]
                self.sent[place] = [np.asarray(number).copy() for number in mine]
        return {"gradient": gradient, "tiny": gradient, "cells": Counts(bits[:, None] % 64, 64)}


@dataclass(frozen=True)
class Known(Sample):
    """A sample whose members are told."""

    mask: Any = None

    def members(self, count: int) -> Any:
        assert len(self.mask) == count
        return self.mask


def table(users: list[User]) -> UserTable:
    offsets = np.cumsum([0, *(len(y) for _, y in users)]).astype(np.int64)
    X = np.concatenate([X for X, _ in users]).astype(np.float32)
    return UserTable(X, np.concatenate([y for _, y in users]).astype(np.float32), offsets, np.arange(len(users)))


def plain(rng: np.random.Generator, rows: int, scale: float = 1.0) -> User:
    return rng.normal(size=(rows, FEATURES)) * scale, rng.integers(0, HIDDEN, rows).astype(float)


def spoilt(rng: np.random.Generator, value: float) -> User:
    X, y = plain(rng, 3)
    X[rng.integers(3), rng.integers(FEATURES)] = value
    return X, y


SWAPS = {
    "huge": lambda rng: plain(rng, 3, 1e36),
    "largest": lambda rng: (np.full((3, FEATURES), 3.4e38), np.zeros(3)),
    "minute": lambda rng: plain(rng, 3, 1e-40),
    "NaN": lambda rng: spoilt(rng, np.nan),
    "infinite": lambda rng: spoilt(rng, np.inf),
    "a label that is none": lambda rng: (plain(rng, 2)[0], np.array([0.0, np.nan])),
    "strange labels": lambda rng: (plain(rng, 3)[0], np.array([-1.0, 1e30, -7.5])),
    "empty": lambda rng: (np.zeros((0, FEATURES)), np.zeros(0)),
    "many rows": lambda rng: plain(rng, 40_000),
    "few rows": lambda rng: plain(rng, 1),
    "opposite": lambda rng: plain(rng, SLOTS, -3.0),
}


def answers(users: list[User], seats: int, mask: Any = None) -> tuple[dict[str, np.ndarray], Layer]:
    step = Layer()
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(base, "choose_batch_size", lambda *_: seats)
        sample = EVERYONE if mask is None else Known(0.5, b"", mask)
        sums = InMemoryUsers(table(users), Performance(1)).sums(step, BOUNDS, sample)
    return {key: found.exact_numbers for key, found in sums.items()}, step


def assert_others_alike(one: Layer, other: Layer, user: int) -> None:
    assert one.sent.keys() - {user} == other.sent.keys() - {user}
    for place in one.sent.keys() - {user}:
        for a, b in zip(one.sent[place], other.sent[place], strict=True):
            assert np.array_equal(a, b, equal_nan=True), place


@pytest.mark.parametrize("name", SWAPS)
@settings(max_examples=20)
@given(st.integers(2, 30), st.integers(1, 9), st.booleans(), st.integers(0, 2**32 - 1))
def test_a_user_swapped_for_another_moves_sums_by_the_sensitivity_and_no_one_else(
    name: str, count: int, seats: int, drawn: bool, seed: int
) -> None:
    rng = np.random.default_rng(seed)
    users = [plain(rng, int(rng.integers(0, 7)), float(10.0 ** rng.integers(-3, 4))) for _ in range(count)]
    users[-1] = plain(rng, 3)  # at least one has rows
    who = int(rng.integers(count))
    mask = (rng.random(count) < 0.5) if drawn else None
    swapped = [*users[:who], SWAPS[name](rng), *users[who + 1 :]]
    (before, first), (after, second) = answers(users, seats, mask), answers(swapped, seats, mask)
    assert_others_alike(first, second, who)
    for key, bound in BOUNDS.items():
        moved = float(np.linalg.norm(after[key] - before[key]))
        assert moved <= bound.sensitivity("replace-one-user")
        assert moved == 0.0 or mask is None or mask[who]  # who is not in is not looked at


@settings(max_examples=60)
@given(st.integers(2, 40), st.integers(1, 9), st.sampled_from(sorted(SWAPS)), st.integers(0, 2**32 - 1))
def test_a_user_who_is_in_a_sample_or_not_moves_sums_by_the_bound_and_no_one_else(
    count: int, seats: int, name: str, seed: int
) -> None:
    """What the price of a sample rests on: others stay at their seats, in calls of the same shape."""
    rng = np.random.default_rng(seed)
    users = [plain(rng, int(rng.integers(1, 7))) for _ in range(count)]
    who = int(rng.integers(count))
    users[who] = SWAPS[name](rng)
    mask = rng.random(count) < 0.6
    (with_, first), (without, second) = (
        answers(users, seats, np.where(np.arange(count) == who, inside, mask)) for inside in (True, False)
    )
    assert_others_alike(first, second, who)
    for key, bound in BOUNDS.items():
        assert np.linalg.norm(with_[key] - without[key]) <= bound.norm * (1 + NORM_SLACK)


def test_the_test_would_see_a_step_that_looks_at_the_others() -> None:
    rng = np.random.default_rng(1)
    users = [plain(rng, 3) for _ in range(6)]

    @dataclass(frozen=True)
    class Careless(Layer):
        def __call__(self, batch: UserBatch) -> dict[str, Any]:
            X, y, places = batch.X, batch.y, batch.positions
            return super().__call__(UserBatch(X - X.mean(axis=(0, 1)), y, places))

    steps = Careless(), Careless()
    for step, someone in zip(steps, (users[0], SWAPS["huge"](rng)), strict=True):
        InMemoryUsers(table([someone, *users[1:]]), Performance(1)).sums(step, BOUNDS)
    with pytest.raises(AssertionError):
        assert_others_alike(*steps, 0)
