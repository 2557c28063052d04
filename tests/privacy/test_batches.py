"""Batches: what functions of whole batches and batches of a fixed size cost, who is in them, and what may be asked."""

from __future__ import annotations

import itertools
import json
import math
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy.stats import chi2

from clipping import clip_to_numbers
from privrep.data.readers import TableSource
from privrep.data.table import UserTable
from privrep.errors import InputError
from privrep.privacy.accounting import (
    SAMPLED,
    compute_epsilon,
    compute_epsilon_by_pld,
    describe_accountant,
    total_mu,
    within_budget,
)
from privrep.privacy.batches import compute_batch_deltas
from privrep.privacy.billboard import Billboard
from privrep.privacy.bounds import BATCH_SLACK, MAX_TERMS, MAX_USERS, Bound, LossBound
from privrep.privacy.calibration import Query
from privrep.privacy.contributions import BatchTerm, Concatenated, NormAtMost, Summed, Vectors
from privrep.privacy.events import Batched, Event, Gaussian, Relation, Sampled, event_from_json, event_to_json
from privrep.privacy.groups import Group
from privrep.privacy.ledger import Budget, Ledger
from privrep.privacy.noise import secure_noise, simulated_noise
from privrep.privacy.protocol import EVERYONE, StepSpec, UserBatch
from privrep.privacy.run import Run
from privrep.privacy.sampling import Fixed, FixedSample, Poisson, plan_noise_multiplier
from privrep.users.memory import InMemoryUsers
from privrep.users.performance import Performance
from privrep.users.streaming import StreamingUsers

REPLACE: Relation = "replace-one-user"
ADD: Relation = "add-or-remove-one-user"


def batched(z: float, q: float = 0.1, count: int = 1) -> Batched:
    return Batched(z, q, REPLACE, count)


LINE = np.linspace(-9, 9, 181)
AREA = 0.1**2


def seen(q: float, move: np.ndarray) -> np.ndarray:
    """The density of a total that is at zero, and with probability q moved; on a grid of the plane."""

    def density(at: np.ndarray) -> np.ndarray:
        one, other = np.exp(-((LINE - at[:, None]) ** 2) / 2)
        return np.outer(one, other) / (2 * np.pi)

    return (1 - q) * density(np.zeros(2)) + q * density(move)


def hockey_stick(epsilon: float, P: np.ndarray, Q: np.ndarray) -> float:
    return float(np.maximum(P - math.exp(epsilon) * Q, 0).sum()) * AREA


# What it costs


@pytest.mark.parametrize(("z", "q"), [(1.0, 0.1), (0.5, 0.01), (3.0, 0.3), (0.05, 0.02), (5.0, 0.9)])
@pytest.mark.parametrize("delta", [1e-3, 1e-6])
def test_epsilon_of_one_release_is_that_of_the_closed_form(z: float, q: float, delta: float) -> None:
    epsilon = compute_epsilon([batched(z, q)], delta)
    assert compute_batch_deltas(np.array([epsilon]), z, q)[0] <= delta
    assert compute_batch_deltas(np.array([epsilon * 0.996 - 1e-6]), z, q)[0] > delta


@settings(max_examples=100)
@given(st.floats(0.4, 4.0), st.floats(0.01, 0.99), st.floats(-1.0, 2.0), st.integers(0, 2**32 - 1))
def test_no_three_totals_are_worse_than_the_profile_and_some_reach_it(
    z: float, q: float, epsilon: float, seed: int
) -> None:
    """Without the user, with it, with its neighbour: any two are at most 1/z apart, in the plane."""
    rng, r = np.random.default_rng(seed), 1 / z
    one, other = rng.normal(size=(2, 2))
    most = max(math.hypot(*one), math.hypot(*other), math.hypot(*(one - other)))
    profile = float(compute_batch_deltas(np.array([epsilon]), z, q)[0])
    assert hockey_stick(epsilon, seen(q, one * r / most), seen(q, other * r / most)) <= profile + 5e-4
    worst = (np.array([r, 0.0]), np.zeros(2))[:: 1 if epsilon >= 0 else -1]
    assert hockey_stick(epsilon, seen(q, worst[0]), seen(q, worst[1])) == pytest.approx(profile, abs=5e-4)


@pytest.mark.parametrize(("z", "q"), [(1.0, 0.1), (0.3, 0.5), (4.0, 0.01), (2.0, 1.0)])
def test_the_profile_is_one_that_a_pair_of_distributions_has(z: float, q: float) -> None:
    """Convex in e^epsilon, falling, from 1 to 0, and never below 1 - e^epsilon; the slope at 1 is what could fail."""
    a = np.concatenate([np.linspace(1e-3, 0.99, 200), np.linspace(0.991, 1.009, 200), np.linspace(1.01, 40, 400)])
    values = compute_batch_deltas(np.log(a), z, q)
    slopes = np.diff(values) / np.diff(a)
    assert (np.diff(slopes) >= -1e-9).all()
    assert (slopes <= 1e-12).all()
    assert (values >= np.maximum(1 - a, 0) - 1e-12).all()
    assert values[0] == pytest.approx(1, abs=2e-3)


def masses(z: float, q: float, step: float, up: bool) -> tuple[np.ndarray, int]:
    """Losses of a pair of the closed form's profile, rounded up or down to multiples of a step: probabilities and the
    first multiple. P(loss > e) follows from the profile: it is delta - delta' with ' the derivative by e."""
    ends = np.arange(-60_000, 60_001) * step

    def upper(e: np.ndarray) -> np.ndarray:
        h = 1e-4
        return compute_batch_deltas(e, z, q) - (
            compute_batch_deltas(e + h, z, q) - compute_batch_deltas(e - h, z, q)
        ) / (2 * h)

    beyond = upper(ends)
    beyond[60_000] = upper(np.array([1e-4 + 1e-12]))[0]  # the profile has a kink at zero
    mass = np.maximum(-np.diff(beyond, prepend=1.0), 0.0)
    first = -60_000 - (0 if up else 1)
    return mass, first


@pytest.mark.parametrize(("z", "q", "rounds"), [(1.0, 0.1, 2), (2.0, 0.2, 30)])
def test_compositions_are_between_those_of_losses_rounded_down_and_up(z: float, q: float, rounds: int) -> None:
    delta, step = 1e-4, 2e-4
    epsilon = compute_epsilon([batched(z, q)] * rounds, delta)
    assert compute_epsilon([batched(z, q, rounds)], delta) == epsilon
    deltas = []
    for up in (False, True):
        mass, first = masses(z, q, step, up)
        length = 1 << (rounds * len(mass)).bit_length()
        together = np.fft.irfft(np.fft.rfft(mass, length) ** rounds, length)[: rounds * len(mass)]
        losses = (rounds * first + np.arange(len(together))) * step
        deltas.append(float((np.maximum(-np.expm1(epsilon - losses), 0.0) * together).sum()))
    low, high = deltas
    assert low <= delta
    assert high >= delta * 0.98


def test_everyone_is_a_gaussian_release_and_a_batch_costs_at_least_what_a_sum_does() -> None:
    assert Fixed(50, 50).make_event(0.25, REPLACE) == Gaussian(2.0)
    assert Poisson(1.0).make_event(0.25, ADD, batch_level=True, steps=3) == Gaussian(2.0, count=3)
    near = compute_epsilon([batched(2.0, 1.0, 3)], 1e-5)
    assert near == pytest.approx(compute_epsilon([Gaussian(2.0)] * 3, 1e-5), rel=2e-3)
    for z, q, count in ((1.0, 0.02, 1), (1.0, 0.02, 300), (3.0, 0.3, 20)):
        added, whole = (compute_epsilon([kind(z, q, ADD, count)], 1e-6) for kind in (Sampled, Batched))
        replaced = compute_epsilon([batched(z, q, count)], 1e-6)
        assert added == whole  # a user who is one more: the same pairs
        assert added * (1 - 1e-9) <= replaced <= 1.35 * added
        assert replaced >= compute_epsilon([Sampled(z, q, REPLACE, count)], 1e-6) * (1 - 1e-9)


def test_epsilon_falls_with_the_rate_and_with_noise_and_rises_with_rounds() -> None:
    rates = [compute_epsilon([batched(1.0, q, 5)], 1e-5) for q in (1.0, 0.5, 0.1, 0.02)]
    noises = [compute_epsilon([batched(z, count=5)], 1e-5) for z in (0.5, 1.0, 2.0)]
    rounds = [compute_epsilon([batched(1.0, count=t)], 1e-5) for t in (20, 5, 1)]
    for falling in (rates, noises, rounds):
        assert all(b < 0.8 * a for a, b in itertools.pairwise(falling))


# Events


@given(st.floats(0.05, 1e6), st.floats(2.0**-32, 1.0), st.sampled_from([REPLACE, ADD]), st.integers(1, 10**6))
def test_events_and_their_counts_survive_json_exactly(z: float, q: float, relation: Relation, count: int) -> None:
    for event in (Batched(z, q, relation, count), Sampled(z, q, relation, count), Gaussian(z, None, count)):
        data = json.loads(json.dumps(event_to_json(event)))
        assert event_from_json(data) == event
        assert ("count" in data) == (count > 1)


@pytest.mark.parametrize("count", [0, -1, 1.5, True, "3", 10**7, None])
def test_a_count_must_be_a_whole_number(count: Any) -> None:
    recorded = {"kind": "batched", "noise_multiplier": 1.0, "rate": 0.1, "relation": REPLACE, "count": count}
    for data in (
        recorded,
        {**recorded, "kind": "sampled"},
        {"kind": "gaussians", "noise_multiplier": 1.0, "count": count},
    ):
        with pytest.raises(InputError):
            event_from_json(data)


def test_counts_are_recorded_so_that_a_version_without_them_refuses() -> None:
    assert event_to_json(Gaussian(2.0, count=5))["kind"] == "gaussians"
    for data in (
        {"kind": "gaussian", "noise_multiplier": 2.0, "count": 5},
        {"kind": "gaussians", "noise_multiplier": 2.0},
    ):
        with pytest.raises(InputError, match="unknown privacy event"):
            event_from_json(data)


def test_a_count_is_so_many_releases() -> None:
    several: list[tuple[Event, Event]] = [
        (Gaussian(3.0, count=7), Gaussian(3.0)),
        (Sampled(2.0, 0.1, REPLACE, 7), Sampled(2.0, 0.1, REPLACE)),
        (batched(2.0, count=7), batched(2.0)),
    ]
    for event, one in several:
        assert compute_epsilon([event], 1e-5) == pytest.approx(compute_epsilon([one] * 7, 1e-5), rel=1e-9)
        assert total_mu([event]) == pytest.approx(total_mu([one] * 7))
        assert compute_epsilon_by_pld([event], 1e-5) == pytest.approx(compute_epsilon_by_pld([one] * 7, 1e-5), rel=1e-3)
    assert compute_epsilon_by_pld([several[0][0]], 1e-5) == pytest.approx(
        compute_epsilon([several[0][0]], 1e-5), rel=1e-3
    )
    ledger = Ledger(Budget(9.0, 1e-5))
    ledger.charge({"walk/g": batched(2.0, count=7), "other/g": Gaussian(3.0, count=4)})
    assert "11 releases" in str(ledger.report())
    assert SAMPLED in ledger.report().accountant
    assert "7 about samples" in describe_accountant([batched(2.0, count=7), Gaussian(3.0)])
    with pytest.raises(InputError, match="another relation"):
        ledger.charge({"more/g": Batched(2.0, 0.1, ADD)})


# Planning


@pytest.mark.parametrize("sampling", [Fixed(20, 1000), Poisson(0.05), Fixed(9, 9)])
def test_a_plan_for_batches_fits_the_ledger_and_hardly_less_noise_would(sampling: Any) -> None:
    budget = Budget(1.0, 1e-5)
    z, ledger = plan_noise_multiplier(budget, sampling, 30, batch_level=True), Ledger(budget)
    ledger.charge({"walk/g": sampling.make_event(z**-2, REPLACE, batch_level=True, steps=30)})
    assert 0.99 < ledger.epsilon <= 1.0
    assert not within_budget([sampling.make_event((0.99 * z) ** -2, REPLACE, batch_level=True, steps=30)], 1.0, 1e-5)


# Who is in


def test_places_differ_and_every_ordered_batch_is_as_likely_as_any_other() -> None:
    """Of 5 places 2 in order, 20 lists: chi-square with a false alarm of 1e-6; sorted batches are found out."""
    places = np.array([FixedSample(2, secure_noise.draw_key("a")).draw_order(5) for _ in range(6000)])
    assert (places[:, 0] != places[:, 1]).all()

    def rejects(lists: np.ndarray) -> bool:
        found = np.bincount(lists @ [5, 1], minlength=25).reshape(5, 5)
        cells = found[~np.eye(5, dtype=bool)]
        return bool(chi2.sf(float(((cells - 300) ** 2 / 300).sum()), 19) < 1e-6)

    assert not rejects(places)
    assert rejects(np.sort(places, axis=1))
    assert rejects(np.where(places == 4, 3 * (places[:, ::-1] != 3), places))


def test_large_batches_have_everyone_in_them_once() -> None:
    for size, count in ((1000, 1000), (999, 1000), (10, 2**23), (1, 1)):
        places = FixedSample(size, b"k" * 32).draw_order(count)
        assert len(np.unique(places)) == len(places) == size
        assert places.min() >= 0
        assert places.max() < count
    assert Fixed(3, 9).sample(b"k" * 32).key.hex() not in repr(Fixed(3, 9).sample(b"k" * 32))


@pytest.mark.parametrize(("size", "count"), [(0, 5), (6, 5), (2.0, 5), (True, 5), (3, MAX_USERS + 1), ("3", 5)])
def test_a_batch_is_some_of_the_users(size: Any, count: Any) -> None:
    with pytest.raises(InputError, match="a batch has"):
        Fixed(size, count)
    assert Fixed(3, MAX_USERS).count == MAX_USERS


def test_fixed_batches_are_for_replacing() -> None:
    with pytest.raises(InputError, match="use replace-one-user"):
        Fixed(3, 9).make_event(0.1, ADD)
    with pytest.raises(InputError, match="no sample to draw"):
        Fixed(9, 9).sample(b"k" * 32)


# What may be asked


@dataclass(frozen=True)
class Mean:
    """The mean of all rows of a batch that are there, and a note of every call."""

    rows_per_user: int = 2
    times: float = 1.0
    many: int = 1 << 20
    seen: list[tuple[Any, Any, Any]] = field(default_factory=list)

    @property
    def spec(self) -> StepSpec:
        return StepSpec(layout="batch", rows_per_user=self.rows_per_user)

    def __call__(self, batch: UserBatch) -> dict[str, Any]:
        X, y, places = batch.X, batch.y, batch.positions
        self.seen.append((X.copy(), y.copy(), places.copy()))
        if (X == 13).any() or (y != -1).any(axis=1).sum() > self.many:
            raise ValueError("thirteen, or too many")
        return {"mean": BatchTerm(self.times * X.sum(axis=(0, 1)) / max((y != -1).sum(), 1))}


@dataclass(frozen=True)
class Sum:
    """Sums of each user's rows, and a note of every call."""

    rows_per_user: int = 2
    seen: list[tuple[Any, Any, Any]] = field(default_factory=list)

    @property
    def spec(self) -> StepSpec:
        return StepSpec(layout="padded", rows_per_user=self.rows_per_user)

    def __call__(self, batch: UserBatch) -> dict[str, Any]:
        X, y, places = batch.X, batch.y, batch.positions
        self.seen.append((X.copy(), y.copy(), places.copy()))
        return {"sum": Vectors(X.sum(axis=1) + 1)}


def table(n: int = 30, value: float | None = None) -> UserTable:
    """Users with 2, 1, 3, 0 rows and so on, of two features, the user's number and the row's; someone has a value."""
    sizes = np.array([2, 1, 3, 0] * n, dtype=np.int64)[:n]
    offsets = np.concatenate([[0], np.cumsum(sizes)]).astype(np.int64)
    X = np.stack([np.repeat(np.arange(n), sizes), np.arange(offsets[-1])], axis=1).astype(np.float32) / 64
    if value is not None:
        X[0, 0] = value
    return UserTable(X, np.ones(len(X), np.float32), offsets, np.arange(n))


WHOLE = {"mean": Bound(1.0, 2, terms_per_user=1)}


@pytest.mark.parametrize("sample", [FixedSample(7, b"a" * 32), Poisson(0.3).sample(b"a" * 32), EVERYONE])
def test_a_whole_step_gets_the_batch_at_once_in_its_order(sample: Any) -> None:
    users, step = table(), Mean()
    total = InMemoryUsers(users).sums(step, WHOLE, sample)["mean"].exact_numbers
    places = sample.draw_order(30) if isinstance(sample, FixedSample) else np.arange(30)
    if isinstance(sample, type(Poisson(0.3).sample(b""))):
        places = np.flatnonzero(sample.members(30))
    ((X, y, seats),) = step.seen
    assert X.shape == (len(places), 2, 2)
    assert seats.tolist() == list(range(len(places)))  # not places, which say how many users there are
    rows = []
    for seat, user in enumerate(places):
        mine = users.X[users.offsets[user] : users.offsets[user + 1]][:2]
        assert np.array_equal(X[seat, : len(mine)], mine)
        assert (X[seat, len(mine) :] == 0).all()
        assert (y[seat] == np.where(np.arange(2) < len(mine), 1, -1)).all()
        rows.append(mine)
    assert total == pytest.approx(np.concatenate(rows).mean(axis=0), rel=1e-6)


def test_a_batch_gradient_is_clipped_as_one_and_counts_as_zero_if_it_is_not_finite() -> None:
    users = InMemoryUsers(table())
    total = users.sums(Mean(times=1e6), WHOLE)["mean"].exact_numbers
    assert np.linalg.norm(total) == pytest.approx(1.0, rel=1e-9)
    for times in (math.inf, math.nan):
        assert users.sums(Mean(times=times), WHOLE)["mean"].exact_numbers.tolist() == [0.0, 0.0]


def test_a_row_that_makes_a_whole_step_fail_is_not_heard_of_and_a_broken_step_is() -> None:
    failed, absent = (
        InMemoryUsers(table(value=value)).sums(Mean(), WHOLE)["mean"].exact_numbers for value in (13.0, math.nan)
    )
    assert failed.tolist() == absent.tolist()  # whose row it is counts as one without rows
    at_odds = InMemoryUsers(table()).sums(Mean(many=3), WHOLE)["mean"].exact_numbers
    assert at_odds.tolist() == [0.0, 0.0]  # it fails, and on nobody alone
    step = Mean()
    InMemoryUsers(table(value=math.nan)).sums(step, WHOLE)
    assert (step.seen[0][1][0] == -1).all()  # whose row is not finite is absent
    for broken in (Bound(1.0, 3, terms_per_user=1), Bound(1.0, 2)):
        with pytest.raises(InputError) as told:
            InMemoryUsers(table()).sums(Mean(), {"mean": broken})
        assert told.value.__context__ is None  # of the batch itself nothing is said
    empty = InMemoryUsers(table(0)).sums(Mean(), WHOLE)["mean"].exact_numbers
    assert empty.tolist() == [0.0, 0.0]


def test_calls_of_a_fixed_batch_are_cut_from_its_order_and_padded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("privrep.users.summing.choose_batch_size", lambda *_: 4)
    users, step, sample = table(), Sum(), FixedSample(14, b"b" * 32)
    total = InMemoryUsers(users, Performance(1)).sums(step, {"sum": Bound(1.0, 2)}, sample)["sum"].exact_numbers
    places = sample.draw_order(30)
    assert [at.tolist() for _, _, at in step.seen] == [
        places[:4].tolist(),
        places[4:8].tolist(),
        places[8:12].tolist(),
        [*places[12:].tolist(), -1, -1],
    ]
    assert (step.seen[-1][1][2:] == -1).all()
    sums = [users.X[users.offsets[u] : users.offsets[u + 1]][:2].sum(axis=0) + 1 for u in places]
    assert total == pytest.approx(sum(v * min(1, 1 / np.linalg.norm(v)) for v in sums), rel=1e-6)


def test_a_file_gives_the_same_batches_as_memory_but_no_whole_ones(tmp_path: Path) -> None:
    users = table(40)
    kept = np.flatnonzero(users.sizes)  # a file has no users without rows
    users = UserTable(users.X, users.y, np.append(users.offsets[kept], users.offsets[-1]), users.ids[kept])
    frame = pd.DataFrame(users.X, columns=["a", "b"])
    frame["y"], frame["user"] = users.y, np.repeat(users.ids, users.sizes)
    frame.to_parquet(tmp_path / "rows.parquet")
    sample, steps = FixedSample(11, b"c" * 32), (Sum(), Sum())
    with StreamingUsers.open(TableSource(tmp_path / "rows.parquet", "user", "y"), Performance(workers=1)) as streamed:
        totals = [
            engine.sums(step, {"sum": Bound(1.0, 2)}, sample)["sum"].exact_numbers
            for engine, step in zip((streamed, InMemoryUsers(users, Performance(1))), steps, strict=True)
        ]
        with pytest.raises(InputError, match="rows in memory"):
            streamed.sums(Mean(), WHOLE)
    assert np.array_equal(*totals)
    assert all(
        np.array_equal(a, b)
        for one, two in zip(*(step.seen for step in steps), strict=True)
        for a, b in zip(one, two, strict=True)
    )


def test_bounds_and_kinds_must_agree_on_what_one_user_touches() -> None:
    vector = np.ones(2)
    for contributions in (
        BatchTerm(vector),
        Concatenated((BatchTerm(vector),)),
        Summed((BatchTerm(vector),)),
        NormAtMost(BatchTerm(vector), 1),
    ):
        with pytest.raises(InputError, match="of the whole batch"):
            clip_to_numbers(contributions, Bound(1.0, 2))
    with pytest.raises(InputError, match="of users one by one"):
        clip_to_numbers(Vectors(vector[None]), Bound(1.0, 2, terms_per_user=1))

    class Several(BatchTerm):
        terms_per_user = 2.0

    with pytest.raises(InputError, match="touches 2 terms"):
        clip_to_numbers(Several(vector), Bound(1.0, 2, terms_per_user=1))
    assert clip_to_numbers(Several(vector), Bound(9.0, 2, terms_per_user=2)).tolist() == [1.0, 1.0]
    for terms, acute in ((0.5, False), (math.nan, False), (1, True), (MAX_TERMS + 1, False)):
        with pytest.raises(InputError, match="whole batch is not acute"):
            Bound(1.0, 2, acute, terms)


def test_what_whole_steps_and_fixed_batches_cannot_do_is_refused_before_the_charge() -> None:
    users = InMemoryUsers(table())
    ledger = Ledger(Budget(2.0, 1e-5))
    run, added = (Run(users, each, Billboard(), secure_noise) for each in (ledger, Ledger(Budget(2.0, 1e-5, ADD))))
    one, many = ({"mean": Query(Bound(1.0, 2, terms_per_user=t), 0.01)} for t in (1, 2))
    with pytest.raises(InputError, match="not of a group"):
        run.release("page", Mean(), one, Group("a", 0, 2))
    with pytest.raises(InputError, match="use a fixed one"):
        run.release("page", Mean(), many, among=Poisson(0.5))
    with pytest.raises(InputError, match="use replace-one-user"):
        added.release("page", Mean(), many)
    with pytest.raises(InputError, match="use replace-one-user"):
        added.release("page", Mean(), one, among=Fixed(3, 30))
    with pytest.raises(InputError, match="use replace-one-user"):
        added.release("page", Mean(), one, among=Fixed(30, 30))
    with pytest.raises(InputError, match="bounds that say"):
        run.release("page", Mean(), {"mean": Query(Bound(1.0, 2), 0.01)})
    with pytest.raises(InputError, match="bounds that say"):
        run.release("page", Sum(), {"sum": Query(Bound(1.0, 2, terms_per_user=1), 0.01)})
    with pytest.raises(InputError, match="bounds that say"):
        run.choose("page", Mean(), 3, 0.1)
    with pytest.raises(InputError, match="of 29 users, and there are 30"):
        run.release("page", Sum(), {"sum": Query(Bound(1.0, 2), 0.01)}, among=Fixed(3, 29))
    with pytest.raises(InputError, match="how many rows of each user"):
        run.release("page", Mean(rows_per_user=None), one)  # type: ignore[arg-type]
    with pytest.raises(InputError, match="bounds that say"):
        users.sums(Mean(), {"mean": LossBound(2)})
    assert ledger.report().events == ()
    assert added.ledger.report().events == ()


@pytest.mark.parametrize(
    ("relation", "sampling"), [(REPLACE, Poisson(0.2)), (ADD, Poisson(0.2)), (REPLACE, Fixed(6, 30))]
)
def test_noise_of_sigma_times_the_clip_on_a_batch_gradient_is_charged_as_half_of_sigma(
    relation: Relation, sampling: Any
) -> None:
    """DP-CLIP: one example can turn the clipped gradient of a batch round, which moves it by twice the clip."""
    clip, sigma = 0.7, 3.0
    ledger = Ledger(Budget(20.0, 1e-5, relation), seeded=True)
    run = Run(InMemoryUsers(table()), ledger, Billboard(), simulated_noise(1))
    bound = Bound(clip, 2, terms_per_user=1)
    released = run.release("page", Mean(), {"mean": Query(bound, (2 / sigma) ** 2)}, among=sampling)["mean"]
    ((name, event),) = ledger.report().events
    assert isinstance(event, Batched)
    assert (name, event.rate, event.relation, event.count) == ("page/mean", 0.2, relation, 1)
    assert event.noise_multiplier == pytest.approx(sigma / 2, rel=1e-12)
    assert released.sigma == pytest.approx(sigma * clip, rel=2 * BATCH_SLACK)
    assert released.sigma >= sigma * clip * (1 + BATCH_SLACK)
    assert ledger.epsilon > 1.5 * compute_epsilon([Batched(sigma, 0.2, relation)], 1e-5)  # what sigma would have cost
    # and it can be turned round: by a batch whose gradient is the opposite
    totals = [
        InMemoryUsers(table(value=value)).sums(Mean(times=1e9), {"mean": bound})["mean"].exact_numbers
        for value in (1e20, -1e20)
    ]
    assert np.linalg.norm(totals[0] - totals[1]) == pytest.approx(2 * clip, rel=1e-6)
    assert np.linalg.norm(totals[0] - totals[1]) <= bound.sensitivity(relation)
