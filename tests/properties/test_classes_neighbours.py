"""The steps of pairs of classes: one user swapped for any other moves sums by the sensitivity at most, and no one
else's contribution by a bit."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

torch = pytest.importorskip("torch")

from dataclasses import dataclass, field  # noqa: E402

import test_multimodal_neighbours as pairs  # noqa: E402

from privrep.multimodal.mechanisms.classes import ClassStep, ClosedRows, MomentStep, Whitening  # noqa: E402
from privrep.multimodal.towers import Centred, Layout  # noqa: E402
from privrep.privacy.bounds import Bound  # noqa: E402
from privrep.privacy.protocol import StepSpec, UserBatch  # noqa: E402
from privrep.users import summing as base  # noqa: E402
from privrep.users.memory import InMemoryUsers  # noqa: E402
from privrep.users.performance import Performance  # noqa: E402

IMAGE, CLASSES = pairs.IMAGE, 3
LAYOUT = Layout(IMAGE, 0, pairs.BANK, np.array([0, 1, 2, 1, 0]))
TURNED = np.linalg.qr(np.sin(1.3 * np.arange(2.0 * IMAGE)).reshape(IMAGE, 2))[0]
MEAN = 0.1 * np.cos(np.arange(float(IMAGE))).astype(np.float32)


@dataclass(frozen=True)
class Watched:
    """A step that remembers what users sent, by their places."""

    step: MomentStep | ClassStep
    sent: dict[int, np.ndarray] = field(default_factory=dict)

    @property
    def spec(self) -> StepSpec:
        return self.step.spec

    def __call__(self, batch: UserBatch) -> dict[str, Any]:
        found = self.step(batch)
        for seat, place in enumerate(batch.positions.tolist()):
            if place >= 0:
                self.sent[place] = np.concatenate([pairs.numbers(each, seat) for each in found.values()])
        return found


def step_of(kind: str) -> tuple[MomentStep | ClassStep, str, Bound]:
    rows = ClosedRows(LAYOUT, Centred(MEAN) if "centred" in kind else None, pairs.SLOTS)
    if "moment" in kind:
        return MomentStep(rows), "moment", Bound(1.0, IMAGE**2, acute=True)
    scores = 3 * np.sin(0.7 * np.arange(float(CLASSES * IMAGE))).reshape(CLASSES, IMAGE)
    step = ClassStep(rows, Whitening(TURNED, np.array([0.5, 2.0]), 7.0), scores)
    return step, "gradient", Bound(pairs.CLIP, step.size)


def total(kind: str, users: list[pairs.User], seats: int) -> tuple[np.ndarray, Watched, Bound]:
    step, name, bound = step_of(kind)
    watched = Watched(step)
    with pytest.MonkeyPatch.context() as patched, np.errstate(all="ignore"):
        patched.setattr(base, "choose_batch_size", lambda *_: seats)
        found = InMemoryUsers(pairs.table(users), Performance(1)).sums(watched, {name: bound})[name]
    return found.exact_numbers, watched, bound


@pytest.mark.parametrize("kind", ["moment", "moment, centred", "gradient", "gradient, centred"])
@settings(max_examples=20)
@given(st.integers(2, 14), st.integers(1, 6), st.sampled_from(sorted(pairs.SWAPS)), st.integers(0, 2**32 - 1))
def test_a_user_swapped_for_another_moves_sums_by_the_sensitivity_and_no_one_else(
    kind: str, count: int, seats: int, name: str, seed: int
) -> None:
    rng = np.random.default_rng(seed)
    users, who = pairs.population(rng, count), int(rng.integers(count))
    swapped = [*users[:who], pairs.SWAPS[name](rng), *users[who + 1 :]]
    (before, first, bound), (after, second, _) = (total(kind, some, seats) for some in (users, swapped))
    assert first.sent.keys() - {who} == second.sent.keys() - {who}
    for place in first.sent.keys() - {who}:
        assert np.array_equal(first.sent[place], second.sent[place], equal_nan=True), place
    assert np.isfinite(after).all()
    assert np.linalg.norm(after - before) <= bound.sensitivity("replace-one-user")


@pytest.mark.parametrize("kind", ["moment, centred", "gradient, centred"])
def test_a_user_alone_sends_what_it_sends_in_a_crowd(kind: str) -> None:
    """At the same seat of a batch: what the others hold does not matter."""
    rng = np.random.default_rng(8)
    users = pairs.population(rng, 9)
    empty = (np.zeros((0, IMAGE + pairs.TEXT)), np.zeros(0))
    for who, user in enumerate(users):
        alone = [user if place == who else empty for place in range(len(users))]
        (_, crowd, _), (_, single, _) = (total(kind, some, 4) for some in (users, alone))
        assert np.array_equal(crowd.sent[who], single.sent[who], equal_nan=True), who


def test_a_moment_is_no_longer_than_its_bound() -> None:
    """So clipping changes none: the mean of squares of rows of length one."""
    _, watched, _ = total("moment, centred", pairs.population(np.random.default_rng(3), 12), 5)
    norms = np.array([sent[-1] for sent in watched.sent.values()])
    assert norms.max() <= 1 + 1e-6
    assert norms.max() > 0.5
