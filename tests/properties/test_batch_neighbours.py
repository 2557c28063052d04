"""Batches: one seat given to any other user moves what is computed by the sensitivity at most, and no one else's
contribution by a bit."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest
import test_slots_neighbours as neighbours
from hypothesis import given, settings
from hypothesis import strategies as st

from privrep.errors import InputError
from privrep.privacy.bounds import Bound
from privrep.privacy.contributions import BatchTerm
from privrep.privacy.protocol import EVERYONE, StepSpec, UserBatch
from privrep.privacy.sampling import FixedSample, Poisson
from privrep.privacy.similarities import Similarities, count_changed_terms
from privrep.users import summing as base
from privrep.users.memory import InMemoryUsers
from privrep.users.performance import Performance

FEATURES, SLOTS, SWAPS, plain, table = (
    neighbours.FEATURES,
    neighbours.SLOTS,
    neighbours.SWAPS,
    neighbours.plain,
    neighbours.table,
)
LEFT, K = 5, 3  # numbers of a row that are its first side, and dimensions
RNG = np.random.default_rng(0)
G1, G2 = (RNG.normal(size=(width, K)).astype(np.float32) for width in (LEFT, FEATURES - LEFT))
SIZE = K * FEATURES


@dataclass(frozen=True)
class Known(FixedSample):
    """A batch whose order is told."""

    order: Any = None

    def draw_order(self, count: int) -> Any:
        return self.order


@dataclass(frozen=True)
class Pairs:
    """The similarities of all pairs of rows of a batch."""

    rows_per_user: int = SLOTS
    counted: int = SLOTS

    @property
    def spec(self) -> StepSpec:
        return StepSpec(layout="batch", rows_per_user=self.rows_per_user)

    def __call__(self, batch: UserBatch) -> dict[str, Any]:
        X, y = batch.X, batch.y
        rows, there = X.reshape(-1, FEATURES), (y != -1).ravel()
        sides = []
        for part, G in ((rows[:, :LEFT], G1), (rows[:, LEFT:], G2)):
            projected = (part @ G).astype(np.float64)
            length = np.sqrt((projected**2).sum(axis=1))
            direction = np.where(there[:, None] & (length > 0)[:, None], projected / length[:, None], 0)
            sides.append((part, direction, length))
        (x, u, zl), (t, v, zr) = sides
        slopes = 1 / (1 + np.exp(-4 * (u @ v.T))) - np.eye(len(u))
        return {"pairs": Similarities(x, t, u, v, zl, zr, slopes * np.outer(there, there), self.counted, 3.0)}


@dataclass(frozen=True)
class Anything:
    """A function of the batch that goes where one number of it points."""

    rows_per_user: int = SLOTS

    @property
    def spec(self) -> StepSpec:
        return StepSpec(layout="batch", rows_per_user=self.rows_per_user)

    def __call__(self, batch: UserBatch) -> dict[str, Any]:
        X = batch.X
        total = X.astype(np.float64).sum(axis=(0, 1))
        return {"anything": BatchTerm(total * 1e3 / total[0])}


def population(rng: np.random.Generator, count: int) -> list[Any]:
    users = [plain(rng, int(rng.integers(0, 7)), float(10.0 ** rng.integers(-3, 4))) for _ in range(count)]
    users[-1] = plain(rng, 3)
    return users


@settings(max_examples=60)
@given(st.integers(3, 30), st.integers(1, 9), st.sampled_from(sorted(SWAPS)), st.integers(0, 2**32 - 1))
def test_a_seat_of_a_batch_given_to_another_moves_sums_by_the_sensitivity_and_no_one_else(
    count: int, seats: int, name: str, seed: int
) -> None:
    """The three batches of the proof: the user in its seat, its neighbour in it, another user in it."""
    rng = np.random.default_rng(seed)
    users = population(rng, count)
    order = rng.permutation(count)[: int(rng.integers(1, count))]
    who, another = int(order[rng.integers(len(order))]), int(rng.choice(np.setdiff1d(np.arange(count), order)))
    swapped = [*users[:who], SWAPS[name](rng), *users[who + 1 :]]
    steps, totals = [], []
    for some, places in ((users, order), (swapped, order), (users, np.where(order == who, another, order))):
        steps.append(neighbours.Layer())
        with pytest.MonkeyPatch.context() as patched:
            patched.setattr(base, "choose_batch_size", lambda *_: seats)
            sample = Known(len(order), b"", places)
            sums = InMemoryUsers(table(some), Performance(1)).sums(steps[-1], neighbours.BOUNDS, sample)
        totals.append({key: found.exact_numbers for key, found in sums.items()})
    for first, second in ((0, 1), (0, 2), (1, 2)):
        here, there = (dict(steps[at].sent) for at in (first, second))
        for place in set(order.tolist()) - {who}:
            for a, b in zip(here[place], there[place], strict=True):
                assert np.array_equal(a, b, equal_nan=True), place
        for key, bound in neighbours.BOUNDS.items():
            moved = float(np.linalg.norm(totals[first][key] - totals[second][key]))
            assert moved <= bound.sensitivity("replace-one-user")


@pytest.mark.parametrize("name", SWAPS)
@settings(max_examples=15)
@given(st.integers(2, 8), st.floats(1e-3, 10.0), st.integers(0, 2**32 - 1))
def test_similarities_of_a_batch_move_by_what_one_user_touches(name: str, count: int, norm: float, seed: int) -> None:
    rng = np.random.default_rng(seed)
    users = population(rng, count)
    who = int(rng.integers(count))
    bound = Bound(norm, SIZE, terms_per_user=count_changed_terms(count * SLOTS, SLOTS, 3.0))
    before, after = (
        InMemoryUsers(table(some), Performance(1)).sums(Pairs(), {"pairs": bound})["pairs"].exact_numbers
        for some in (users, [*users[:who], SWAPS[name](rng), *users[who + 1 :]])
    )
    assert np.linalg.norm(after - before) <= bound.sensitivity("replace-one-user")


@dataclass(frozen=True)
class Fragile(Pairs):
    """Fails on some rows: a frozen layer that cannot take them."""

    def __call__(self, batch: UserBatch) -> dict[str, Any]:
        X, y, places = batch.X, batch.y, batch.positions
        if (X == 13).any():
            raise ValueError("thirteen")
        return super().__call__(UserBatch(X, y, places))


@settings(max_examples=20)
@given(st.integers(2, 8), st.integers(0, 2**32 - 1))
def test_a_row_on_which_similarities_fail_moves_no_more_than_any_other(count: int, seed: int) -> None:
    rng = np.random.default_rng(seed)
    users = population(rng, count)
    firsts = [(np.full((SLOTS, FEATURES), value, np.float32), np.zeros(SLOTS)) for value in (0.5, 13, np.nan)]
    bound = Bound(0.01, SIZE, terms_per_user=count_changed_terms(count * SLOTS, SLOTS, 3.0))
    before, after, absent = (
        InMemoryUsers(table([first, *users[1:]]), Performance(1))
        .sums(Fragile(), {"pairs": bound})["pairs"]
        .exact_numbers
        for first in firsts
    )
    assert np.linalg.norm(after - before) <= bound.sensitivity("replace-one-user")
    assert np.array_equal(after, absent)


def test_terms_counted_for_other_rows_a_user_are_refused() -> None:
    users = population(np.random.default_rng(1), 4)
    bound = Bound(1.0, SIZE, terms_per_user=1e4)
    with pytest.raises(InputError, match="another number of rows"):
        InMemoryUsers(table(users), Performance(1)).sums(Pairs(counted=1), {"pairs": bound})


def test_similarities_of_others_stay_the_same_to_the_last_bit() -> None:
    rng = np.random.default_rng(3)
    X = rng.normal(size=(6, SLOTS, FEATURES)).astype(np.float32)
    y, places, other = np.zeros((6, SLOTS)), np.arange(6), X.copy()
    other[2] = 1e30
    one, two = (Pairs()(UserBatch(some, y, places))["pairs"].norms().reshape(6 * SLOTS, -1) for some in (X, other))
    rest = np.setdiff1d(np.arange(6 * SLOTS), np.arange(2 * SLOTS, 3 * SLOTS))
    assert np.array_equal(one[np.ix_(rest, rest)], two[np.ix_(rest, rest)])
    assert not np.array_equal(one, two)


@settings(max_examples=60)
@given(st.sampled_from(sorted(SWAPS)), st.integers(2, 20), st.integers(0, 2**32 - 1))
def test_whatever_a_function_of_a_batch_does_it_stays_in_a_ball(name: str, count: int, seed: int) -> None:
    """So any two batches are as near as the sensitivity says, and one user can bring them that far apart."""
    rng = np.random.default_rng(seed)
    users, bound = population(rng, count), Bound(0.7, FEATURES, terms_per_user=1)
    users[0] = SWAPS[name](rng)
    sample = Poisson(0.7).sample(rng.bytes(32))
    totals = [
        InMemoryUsers(table(users), Performance(1))
        .sums(Anything(), {"anything": bound}, each)["anything"]
        .exact_numbers
        for each in (sample, EVERYONE)
    ]
    for relation in ("replace-one-user", "add-or-remove-one-user"):
        assert np.linalg.norm(totals[0] - totals[1]) <= bound.sensitivity(relation)  # type: ignore[arg-type]
        assert all(np.linalg.norm(total) <= bound.sensitivity(relation) / 2 for total in totals)  # type: ignore[arg-type]


def test_the_sensitivity_of_one_touched_term_is_reached() -> None:
    bound = Bound(0.7, FEATURES, terms_per_user=1)
    others = [(np.ones((1, FEATURES)), np.zeros(1))] * 3
    totals = [
        InMemoryUsers(table([(np.full((1, FEATURES), 50.0) * sign, np.zeros(1)), *others]), Performance(1))
        .sums(Signed(), {"anything": bound})["anything"]
        .exact_numbers
        for sign in (1, -1)
    ]
    assert np.linalg.norm(totals[0] - totals[1]) == pytest.approx(2 * 0.7, rel=1e-9)


@dataclass(frozen=True)
class Signed(Anything):
    def __call__(self, batch: UserBatch) -> dict[str, Any]:
        X = batch.X
        return {"anything": BatchTerm(X.astype(np.float64).sum(axis=(0, 1)) * 1e3)}
