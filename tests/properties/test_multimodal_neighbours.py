"""DP-CLIP's steps: one user swapped for any other, in a sample or not, moves what is computed by the sensitivity at
most, and under "bank" no one else's contribution by a bit."""

from __future__ import annotations

from dataclasses import dataclass, field, fields
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from privrep.privacy.protocol import EVERYONE, StepSpec, UserBatch
from privrep.users.performance import Performance

torch = pytest.importorskip("torch")

import test_batch_neighbours as batches  # noqa: E402
import test_slots_neighbours as neighbours  # noqa: E402
from torch import nn  # noqa: E402

from privrep.data.table import UserTable  # noqa: E402
from privrep.multimodal.mechanisms.bank import BankStep  # noqa: E402
from privrep.multimodal.mechanisms.batch import BatchStep  # noqa: E402
from privrep.multimodal.mechanisms.pairwise import InsideStep  # noqa: E402
from privrep.multimodal.towers import Layout, Towers, make_towers  # noqa: E402
from privrep.privacy.bounds import BATCH_SLACK, Bound  # noqa: E402
from privrep.users import summing as base  # noqa: E402
from privrep.users.memory import InMemoryUsers  # noqa: E402

IMAGE, TEXT, DIM, CAPTIONS, SLOTS = 6, 4, 3, 5, 2
BANK = np.sin(1.1 * np.arange(CAPTIONS * TEXT)).reshape(CAPTIONS, TEXT).astype(np.float32)
LAYOUT = Layout(IMAGE, TEXT, BANK)
CLIP = 0.4
User = tuple[np.ndarray, np.ndarray]


def filled(module: nn.Module) -> nn.Module:
    with torch.no_grad():
        for place, p in enumerate(module.parameters()):
            p.copy_(torch.cos(1.9 * torch.arange(float(p.numel())) + place).reshape(p.shape))
    return module


def linear(learn_scale: bool = False) -> Towers:
    image, text = nn.Linear(IMAGE, DIM, bias=False), nn.Linear(TEXT, DIM, bias=False)
    return make_towers(filled(image), filled(text), IMAGE, TEXT, learn_scale)


def deep() -> Towers:
    """Of which users' gradients are had one by one."""
    image = nn.Sequential(nn.Linear(IMAGE, 4), nn.LayerNorm(4), nn.Linear(4, DIM))
    return make_towers(filled(image), filled(nn.Linear(TEXT, DIM)), IMAGE, TEXT, True, False)


MODELS = {"layer by layer": linear(True), "one by one": deep()}


@dataclass(frozen=True)
class Watched:
    """A step that remembers what users sent, by their places."""

    step: BankStep
    sent: dict[int, np.ndarray] = field(default_factory=dict)

    @property
    def spec(self) -> StepSpec:
        return self.step.spec

    def __call__(self, batch: UserBatch) -> dict[str, Any]:
        places = batch.positions
        found = self.step(batch)
        for seat, place in enumerate(places.tolist()):
            if place >= 0:
                self.sent[place] = numbers(found["gradient"], seat)
        return found


def numbers(contributions: Any, seat: int) -> np.ndarray:
    """All that says what a user sends."""
    if hasattr(contributions, "parts"):
        return np.concatenate([numbers(part, seat) for part in contributions.parts])
    arrays = [getattr(contributions, field.name)[seat].ravel() for field in fields(contributions)]
    return np.concatenate([*arrays, contributions.norms()[[seat]]])


def plain(rng: np.random.Generator, rows: int, scale: float = 1.0) -> User:
    return rng.normal(size=(rows, IMAGE + TEXT)) * scale, rng.integers(0, CAPTIONS + 1, rows).astype(float)


def spoilt(rng: np.random.Generator, value: float) -> User:
    X, y = plain(rng, 2)
    X[rng.integers(2), rng.integers(IMAGE + TEXT)] = value
    return X, y


SWAPS = {
    "huge": lambda rng: plain(rng, 2, 1e36),
    "largest": lambda rng: (np.full((2, IMAGE + TEXT), 3.4e38), np.array([0.0, CAPTIONS])),
    "minute": lambda rng: plain(rng, 2, 1e-40),
    "zeros": lambda rng: plain(rng, 2, 0.0),
    "NaN": lambda rng: spoilt(rng, np.nan),
    "infinite": lambda rng: spoilt(rng, np.inf),
    "a target that is none": lambda rng: (plain(rng, 2)[0], np.array([0.0, np.nan])),
    "strange targets": lambda rng: (plain(rng, 3, 1e20)[0], np.array([-1.0, 1e30, 2.5])),
    "no captions, huge": lambda rng: (np.full((2, IMAGE + TEXT), 3.4e38), np.array([-7.0, 1e9])),
    "empty": lambda rng: (np.zeros((0, IMAGE + TEXT)), np.zeros(0)),
    "many rows": lambda rng: plain(rng, 500),
    "opposite": lambda rng: plain(rng, SLOTS, -3.0),
}


def population(rng: np.random.Generator, count: int) -> list[User]:
    users = [plain(rng, int(rng.integers(0, 4)), float(10.0 ** rng.integers(-3, 4))) for _ in range(count)]
    users[-1] = plain(rng, 2)  # at least one has rows
    return users


def table(users: list[User]) -> UserTable:
    offsets = np.cumsum([0, *(len(y) for _, y in users)]).astype(np.int64)
    X, y = (np.concatenate([user[part] for user in users]).astype(np.float32) for part in (0, 1))
    return UserTable(X, y, offsets, np.arange(len(users)))


def bank(model: Towers, users: list[User], seats: int, sample: Any) -> tuple[np.ndarray, Watched]:
    step = Watched(BankStep(model, model.weights(0.3), LAYOUT, 0.3, SLOTS))
    with pytest.MonkeyPatch.context() as patched, np.errstate(all="ignore"):
        patched.setattr(base, "choose_batch_size", lambda *_: seats)
        bounds = {"gradient": Bound(CLIP, step.step.size)}
        return InMemoryUsers(table(users), Performance(1)).sums(step, bounds, sample)["gradient"].exact_numbers, step


def assert_others_alike(one: Watched, other: Watched, user: int) -> None:
    assert one.sent.keys() - {user} == other.sent.keys() - {user}
    for place in one.sent.keys() - {user}:
        assert np.array_equal(one.sent[place], other.sent[place], equal_nan=True), place


def samples(rng: np.random.Generator, kind: str, count: int, who: int) -> Any:
    """Everyone, or a sample with this user in it."""
    if kind == "poisson":
        mask = rng.random(count) < 0.6
        return neighbours.Known(0.6, b"", mask | (np.arange(count) == who))
    if kind == "fixed":
        order = rng.permutation(count)
        order[[0, int(np.flatnonzero(order == who)[0])]] = order[[int(np.flatnonzero(order == who)[0]), 0]]
        size = int(rng.integers(1, count + 1))
        return batches.Known(size, b"", rng.permutation(order[:size]))
    return EVERYONE


@pytest.mark.parametrize("model", MODELS)
@pytest.mark.parametrize("kind", ["everyone", "poisson", "fixed"])
@settings(max_examples=14)
@given(st.integers(2, 14), st.integers(1, 6), st.sampled_from(sorted(SWAPS)), st.integers(0, 2**32 - 1))
def test_a_user_swapped_for_another_moves_sums_by_the_sensitivity_and_no_one_else(
    model: str, kind: str, count: int, seats: int, name: str, seed: int
) -> None:
    rng = np.random.default_rng(seed)
    users, who = population(rng, count), int(rng.integers(count))
    sample = samples(rng, kind, count, who)
    swapped = [*users[:who], SWAPS[name](rng), *users[who + 1 :]]
    (before, first), (after, second) = (bank(MODELS[model], some, seats, sample) for some in (users, swapped))
    assert_others_alike(first, second, who)
    assert np.isfinite(after).all()
    assert np.linalg.norm(after - before) <= 2 * CLIP * (1 + BATCH_SLACK)


@settings(max_examples=30)
@given(st.integers(2, 14), st.integers(1, 6), st.sampled_from(sorted(SWAPS)), st.integers(0, 2**32 - 1))
def test_a_user_who_is_in_a_sample_or_not_moves_sums_by_the_bound_and_no_one_else(
    count: int, seats: int, name: str, seed: int
) -> None:
    rng = np.random.default_rng(seed)
    users, who = population(rng, count), int(rng.integers(count))
    users[who] = SWAPS[name](rng)
    mask = rng.random(count) < 0.6
    (with_, first), (without, second) = (
        bank(
            MODELS["layer by layer"],
            users,
            seats,
            neighbours.Known(0.6, b"", np.where(np.arange(count) == who, i, mask)),
        )
        for i in (True, False)
    )
    assert_others_alike(first, second, who)
    assert np.linalg.norm(with_ - without) <= CLIP * (1 + BATCH_SLACK)


def test_one_user_can_move_the_sum_almost_that_far() -> None:
    """So the bound on how far is not idle: two users with opposite rows."""
    rng = np.random.default_rng(2)
    users, X = population(rng, 8), np.ones((1, IMAGE + TEXT)) * 100
    found = linear()
    step = BankStep(found, found.weights(0.01), LAYOUT, 0.01, SLOTS)
    totals = []
    for target in range(CAPTIONS):
        some = [*users[:3], (X, np.array([float(target)])), *users[4:]]
        bound = Bound(1e-4, step.size)
        totals.append(
            InMemoryUsers(table(some), Performance(1)).sums(step, {"gradient": bound})["gradient"].exact_numbers
        )
    apart = max(float(np.linalg.norm(one - other)) for one in totals for other in totals)
    assert 1.2e-4 < apart <= 2e-4 * (1 + BATCH_SLACK)


@pytest.mark.parametrize("mechanism", ["batch", "inside"])
@settings(max_examples=30)
@given(st.integers(2, 10), st.sampled_from(sorted(SWAPS)), st.floats(1e-3, 10.0), st.integers(0, 2**32 - 1))
def test_functions_of_a_batch_move_by_twice_the_clip(
    mechanism: str, count: int, name: str, clip: float, seed: int
) -> None:
    rng = np.random.default_rng(seed)
    users, who, found = population(rng, count), int(rng.integers(count)), linear(mechanism == "batch")
    common = (found, found.weights(0.3), LAYOUT, 0.3, SLOTS)
    step = BatchStep(*common, chunk=3) if mechanism == "batch" else InsideStep(*common, users=count)
    bound = Bound(clip, step.size, terms_per_user=1) if isinstance(step, BatchStep) else step.choose_bound(clip)
    before, after = (
        InMemoryUsers(table(some), Performance(1)).sums(step, {"gradient": bound})["gradient"].exact_numbers
        for some in (users, [*users[:who], SWAPS[name](rng), *users[who + 1 :]])
    )
    assert np.isfinite(after).all()
    assert bound.sensitivity("replace-one-user") == pytest.approx(2 * clip * (1 + BATCH_SLACK))
    assert np.linalg.norm(after - before) <= bound.sensitivity("replace-one-user")


def test_the_test_would_see_a_step_that_looks_at_the_others() -> None:
    rng = np.random.default_rng(1)
    users, steps = population(rng, 6), []

    @dataclass(frozen=True)
    class Careless(Watched):
        def __call__(self, batch: UserBatch) -> dict[str, Any]:
            X, y, places = batch.X, batch.y, batch.positions
            return super().__call__(UserBatch(X - X.mean(axis=(0, 1)), y, places))

    for someone in (users[0], plain(rng, 2)):
        found = MODELS["layer by layer"]
        step = Careless(BankStep(found, found.weights(0.3), LAYOUT, 0.3, SLOTS))
        bounds = {"gradient": Bound(CLIP, step.step.size)}
        InMemoryUsers(table([someone, *users[1:]]), Performance(1)).sums(step, bounds)
        steps.append(step)
    with pytest.raises(AssertionError):
        assert_others_alike(*steps, 0)
