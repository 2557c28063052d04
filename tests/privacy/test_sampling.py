"""Poisson samples: who is in, what it costs by quadrature, and the order of charge, key, pass and noise."""

from __future__ import annotations

import functools
import itertools
import json
import math
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from scipy.stats import binom, norm

from privrep.data.table import UserTable
from privrep.errors import BudgetExceeded, InputError, ResumeError
from privrep.privacy.accounting import (
    SAMPLED,
    compute_epsilon,
    compute_epsilon_by_pld,
    describe_accountant,
    total_mu,
    within_budget,
)
from privrep.privacy.billboard import Billboard
from privrep.privacy.bounds import NORM_SLACK, Bound
from privrep.privacy.calibration import Query
from privrep.privacy.contributions import Counts, Vectors
from privrep.privacy.events import Event, Gaussian, Pure, Relation, Sampled, Selection, event_from_json, event_to_json
from privrep.privacy.groups import Group
from privrep.privacy.ledger import Budget, Ledger, read_ledger
from privrep.privacy.noise import secure_noise, simulated_noise
from privrep.privacy.protocol import StepSpec, UserBatch
from privrep.privacy.run import Run
from privrep.privacy.sampling import Poisson, Sample, plan_noise_multiplier
from privrep.users.memory import InMemoryUsers
from privrep.users.performance import Performance
from stepping import RowsStep

REPLACE: Relation = "replace-one-user"
ADD: Relation = "add-or-remove-one-user"
ALARM = 1e-8  # of each of some fifty looks: 1e-6 in all


def sampled(multiplier: float, rate: float = 0.1) -> Sampled:
    return Sampled(multiplier, rate, REPLACE)


# What it costs, by quadrature

X = np.linspace(-32.0, 32.0, 1 << 17)
WIDTH = X[1] - X[0]


def pair(z: float, q: float, relation: Relation) -> tuple[np.ndarray, np.ndarray]:
    """Densities on a line, noise of 1: users move totals by 1/(2z) either way, or by 1/z one way."""
    r = 1 / (2 * z) if relation == REPLACE else 1 / z
    other = (1 - q) * norm.pdf(X) + q * norm.pdf(X, -r) if relation == REPLACE else norm.pdf(X)
    return (1 - q) * norm.pdf(X) + q * norm.pdf(X, r), other


def hockey_stick(epsilon: float, P: np.ndarray, Q: np.ndarray) -> float:
    return float(np.maximum(P - math.exp(epsilon) * Q, 0.0).sum()) * WIDTH


@pytest.mark.parametrize("relation", [REPLACE, ADD])
@pytest.mark.parametrize(("z", "q"), [(1.0, 0.1), (0.5, 0.01), (3.0, 0.3), (0.3, 0.2), (5.0, 0.9)])
@pytest.mark.parametrize("delta", [1e-3, 1e-5, 1e-6])
def test_epsilon_of_one_release_is_that_of_the_hockey_stick(
    z: float, q: float, relation: Relation, delta: float
) -> None:
    """Neither half nor double: a thousandth less epsilon would be too little."""
    epsilon, (P, Q) = compute_epsilon([Sampled(z, q, relation)], delta), pair(z, q, relation)
    worst = functools.partial(lambda e: max(hockey_stick(e, P, Q), hockey_stick(e, Q, P)))
    assert worst(epsilon) <= delta
    assert worst(epsilon * 0.996 - 1e-6) > delta


def loss_masses(z: float, q: float, relation: Relation, step: float, up: bool) -> tuple[np.ndarray, int]:
    """Privacy losses rounded up or down to multiples of a step: their probabilities, and the first multiple."""
    P, Q = pair(z, q, relation)
    with np.errstate(divide="ignore", invalid="ignore"):
        loss = np.where((P > 0) & (Q > 0), np.log(P / Q), 0.0) / step
    at = (np.ceil(loss) if up else np.floor(loss)).astype(int)
    return np.bincount(at - at.min(), P * WIDTH), int(at.min())


@pytest.mark.parametrize(("z", "q", "rounds"), [(1.0, 0.1, 2), (0.5, 0.05, 2), (2.0, 0.2, 30)])
def test_compositions_are_between_those_of_losses_rounded_down_and_up(z: float, q: float, rounds: int) -> None:
    delta, step = 1e-5, 2e-4
    epsilon = compute_epsilon([sampled(z, q)] * rounds, delta)
    deltas = []
    for up in (False, True):
        masses, first = loss_masses(z, q, REPLACE, step, up)
        length = 1 << (rounds * len(masses)).bit_length()
        together = np.fft.irfft(np.fft.rfft(masses, length) ** rounds, length)[: rounds * len(masses)]
        losses = (rounds * first + np.arange(len(together))) * step
        deltas.append(float((np.maximum(-np.expm1(epsilon - losses), 0.0) * together).sum()))
    low, high = deltas
    assert low <= delta  # what it cannot be below
    assert high >= delta * 0.99  # epsilon is not larger than it need be


@given(st.floats(0.3, 4.0), st.floats(0.01, 0.99), st.floats(0.0, 2.0), st.integers(0, 2**32 - 1))
def test_no_pair_of_vectors_is_worse_than_the_one_on_the_line(z: float, q: float, epsilon: float, seed: int) -> None:
    """Two vectors of the plane, of length up to 1/(2z): by quadrature in two dimensions."""
    rng, r = np.random.default_rng(seed), 1 / (2 * z)
    axis = np.linspace(-9.0, 9.0, 401)
    x, y = np.meshgrid(axis, axis)

    def density(v: np.ndarray) -> np.ndarray:
        return np.exp(-((x - v[0]) ** 2 + (y - v[1]) ** 2) / 2) / (2 * np.pi)

    def seen(v: np.ndarray) -> np.ndarray:
        return (1 - q) * density(np.zeros(2)) + q * density(v)

    angles, lengths = rng.uniform(0, 2 * np.pi, 2), r * rng.choice([1.0, rng.random()], 2)
    one, other = (a * np.array([math.cos(t), math.sin(t)]) for a, t in zip(lengths, angles, strict=True))
    area = (axis[1] - axis[0]) ** 2
    found = float(np.maximum(seen(one) - math.exp(epsilon) * seen(other), 0.0).sum()) * area
    assert found <= hockey_stick(epsilon, *pair(z, q, REPLACE)) + 1e-6


def test_everyone_asked_costs_what_the_closed_form_says() -> None:
    for relation in (REPLACE, ADD):
        assert Poisson(1.0).make_event(0.25, relation) == Gaussian(2.0)
        near = compute_epsilon([Sampled(2.0, 1.0, relation)] * 3, 1e-5)
        assert near == pytest.approx(compute_epsilon([Gaussian(2.0)] * 3, 1e-5), rel=2e-3)


def test_epsilon_falls_with_the_rate_and_with_noise_and_rises_with_rounds() -> None:
    rates = [compute_epsilon([sampled(1.0, q)] * 5, 1e-5) for q in (1.0, 0.5, 0.1, 0.02)]
    noises = [compute_epsilon([sampled(z)] * 5, 1e-5) for z in (0.5, 1.0, 2.0)]
    rounds = [compute_epsilon([sampled(1.0)] * t, 1e-5) for t in (20, 5, 1)]
    for falling in (rates, noises, rounds):
        assert all(b < 0.8 * a for a, b in itertools.pairwise(falling))


def test_sampled_events_compose_with_all_others_in_any_order() -> None:
    events: list[Event] = [sampled(1.0), Gaussian(4.0), Pure(0.2), sampled(2.0), Selection(8.0, 1e-6), sampled(1.0)]
    whole = compute_epsilon(events, 1e-5)
    assert compute_epsilon(events[::-1], 1e-5) == pytest.approx(whole, rel=1e-9)
    assert compute_epsilon_by_pld(events, 1e-5) == whole
    for event in set(events):
        fewer = list(events)
        fewer.remove(event)
        assert compute_epsilon(fewer, 1e-5) < whole
    grouped = [sampled(1.0), Gaussian(3.0, Group("a", 0, 2)), Gaussian(4.0, Group("a", 1, 2))]
    assert compute_epsilon(grouped, 1e-5) == compute_epsilon([sampled(1.0), Gaussian(3.0)], 1e-5)
    assert compute_epsilon([sampled(1.0)], 1e-11) == math.inf  # a delta that rounding would eat
    assert compute_epsilon([sampled(1.0), Selection(8.0, 1e-5)], 1e-5) == math.inf


def test_gaussian_releases_beside_a_sample_that_hardly_costs_anything() -> None:
    events: list[Event] = [Sampled(50.0, 1e-3, REPLACE), Gaussian(3.0), Pure(0.3)]
    assert compute_epsilon(events, 1e-5) == pytest.approx(compute_epsilon(events[1:], 1e-5), rel=2e-3)


def test_mu_counts_a_sample_as_everyone() -> None:
    assert total_mu([sampled(2.0), Gaussian(2.0)]) == pytest.approx(math.sqrt(0.5))


# Events


@given(st.floats(0.05, 1e6), st.floats(2.0**-32, 1.0), st.sampled_from([REPLACE, ADD]))
def test_events_survive_json_exactly(multiplier: float, rate: float, relation: Relation) -> None:
    event = Sampled(multiplier, rate, relation)
    assert event_from_json(json.loads(json.dumps(event_to_json(event)))) == event


RECORDED = {"kind": "sampled", "noise_multiplier": 1.0, "rate": 0.1, "relation": REPLACE}


@pytest.mark.parametrize(
    "data",
    [
        {**RECORDED, "without_replacement": True},
        {**RECORDED, "group": ["a", 0, 2]},
        {**RECORDED, "relation": "other"},
        {**RECORDED, "rate": 0.0},
        {**RECORDED, "rate": 1.5},
        {**RECORDED, "rate": math.nan},
        {**RECORDED, "noise_multiplier": -1.0},
        {**RECORDED, "noise_multiplier": 0.01},
        {key: value for key, value in RECORDED.items() if key != "relation"},
        {key: value for key, value in RECORDED.items() if key != "rate"},
    ],
)
def test_a_recorded_sample_that_is_not_understood_is_refused(data: dict[str, Any], tmp_path: Path) -> None:
    with pytest.raises(InputError):
        event_from_json(data)
    ledger = Ledger(Budget(1.0, 1e-5), path=tmp_path / "ledger.jsonl")
    ledger.close()
    with open(tmp_path / "ledger.jsonl", "a") as file:
        file.write(json.dumps({"charge": "page/sum", **data}) + "\n")
    with pytest.raises(InputError, match="damaged in line 2"):
        read_ledger(tmp_path / "ledger.jsonl")


@pytest.mark.parametrize("rate", [0.0, -0.1, 1.1, math.nan, math.inf, True, "0.5"])
def test_a_rate_must_be_a_probability(rate: Any) -> None:
    with pytest.raises(InputError, match="sampling rate"):
        Poisson(rate)


def test_the_report_says_how_samples_were_accounted_for() -> None:
    words = describe_accountant([sampled(1.0, 0.1), sampled(1.0, 0.25), Gaussian(3.0)])
    assert SAMPLED in words
    assert "2 about samples" in words
    assert "0.1 to 0.25" in words
    assert SAMPLED not in describe_accountant([Gaussian(3.0)])
    ledger = Ledger(Budget(2.0, 1e-5))
    ledger.charge({"a/sum": sampled(3.0)})
    assert SAMPLED in ledger.report().accountant
    assert ledger.report().epsilon == compute_epsilon([sampled(3.0)], 1e-5)


# Planning and the ledger


@pytest.mark.parametrize(("rate", "rounds", "before"), [(0.1, 12, 0.0), (0.02, 40, 0.02), (1.0, 7, 0.01)])
def test_a_plan_fits_the_ledger_and_hardly_less_noise_would(rate: float, rounds: int, before: float) -> None:
    budget = Budget(1.0, 1e-5)
    z, ledger = plan_noise_multiplier(budget, rate, rounds, before), Ledger(budget)
    if before:
        ledger.charge({"first": Gaussian(before**-0.5)})
    for t in range(rounds):
        ledger.charge({f"round-{t}": Poisson(rate).make_event(z**-2, REPLACE)})
    assert 0.995 < ledger.epsilon <= 1.0
    with pytest.raises(BudgetExceeded, match="would bring epsilon to 1"):
        ledger.charge({"more": Poisson(rate).make_event(z**-2, REPLACE)})
    events = [
        *([Gaussian(before**-0.5)] if before else []),
        *[Poisson(rate).make_event((0.995 * z) ** -2, REPLACE)] * rounds,
    ]
    assert not within_budget(events, 1.0, 1e-5)


def test_a_plan_leaves_room_for_choices_and_selections() -> None:
    budget, ledger = Budget(1.0, 1e-5), Ledger(Budget(1.0, 1e-5))
    others: dict[str, Event] = {"choice": Pure(0.2), "keys": Selection(9.0, 1e-6)}
    z = plan_noise_multiplier(budget, 0.1, 5, 0.01, list(others.values()))
    ledger.charge({**others, "first": Gaussian(10.0), **{f"round-{t}": sampled(z) for t in range(5)}})
    assert 0.99 < ledger.epsilon <= 1.0
    assert z > 1.1 * plan_noise_multiplier(budget, 0.1, 5, 0.01)


def test_samples_buy_rounds() -> None:
    budget = Budget(1.0, 1e-5)
    everyone, few = (plan_noise_multiplier(budget, rate, 20) for rate in (1.0, 0.05))
    assert few < everyone / 8  # noise against a sample a twentieth of the size


def test_plans_that_cannot_be_are_refused() -> None:
    with pytest.raises(BudgetExceeded, match="too little of the budget"):
        plan_noise_multiplier(Budget(1.0, 1e-5), 0.1, 10, 100.0)
    with pytest.raises(BudgetExceeded, match="too little of the budget"):
        plan_noise_multiplier(Budget(1.0, 0.0), 0.1, 10)
    for rounds, before in ((0, 0.0), (5, -1.0), (5, math.inf), (5, math.nan)):
        with pytest.raises(InputError, match="one round or more"):
            plan_noise_multiplier(Budget(1.0, 1e-5), 0.1, rounds, before)


def test_what_is_left_beside_samples_can_be_spent_and_no_more() -> None:
    budget = Budget(1.0, 1e-5)
    ledger = Ledger(budget)
    ledger.charge({"first": Gaussian(10.0), **{f"round-{t}": sampled(5.0) for t in range(5)}})
    assert ledger.capacity == budget.mu**2  # the same on every day, samples asked or not
    left, pure = ledger.remaining, ledger.pure_left
    assert 0.001 < left < budget.mu**2 - 0.01
    events = [event for _, event in ledger.report().events]
    for one, more in ((Gaussian(left**-0.5), Gaussian((1.02 * left) ** -0.5)), (Pure(pure), Pure(1.02 * pure))):
        assert within_budget([*events, one], 1.0, 1e-5)
        assert not within_budget([*events, more], 1.0, 1e-5)


def test_a_ledger_takes_no_samples_priced_for_another_relation_and_none_without_delta() -> None:
    with pytest.raises(InputError, match="priced for another relation"):
        Ledger(Budget(1.0, 1e-5)).charge({"a": Sampled(5.0, 0.1, ADD)})
    with pytest.raises(BudgetExceeded, match="takes a delta"):
        Ledger(Budget(1.0, 0.0)).charge({"a": sampled(5.0)})


# Who is in


def rejects(members: np.ndarray, rate: float) -> bool:
    """Whether the number of members is too far from what this rate says; with a false alarm of 1e-8."""
    count, n = int(members.sum()), members.size
    return bool(min(binom.cdf(count, n, rate), binom.sf(count - 1, n, rate)) < ALARM / 2)


@pytest.mark.parametrize(("rate", "wrong"), [(0.003, 0.006), (0.1, 0.11), (0.5, 0.52), (0.97, 0.98)])
@pytest.mark.parametrize("source", [secure_noise, simulated_noise(3)])
def test_users_are_in_at_the_rate_and_pages_and_users_are_independent(source: Any, rate: float, wrong: float) -> None:
    pages = np.stack([Sample(rate, source.draw_key(f"round-{t}")).members(100_000) for t in range(4)])
    assert not any(rejects(members, rate) for members in pages)
    assert rejects(pages[0], wrong)
    assert not rejects(pages[0] & pages[1], rate**2)
    assert rejects(pages[0] & pages[0], rate**2)
    assert not rejects(pages[3, 0::2] & pages[3, 1::2], rate**2)


def test_who_is_in_does_not_depend_on_how_many_there_are_and_a_key_is_not_shown() -> None:
    sample = Sample(0.3, secure_noise.draw_key("a"))
    assert np.array_equal(sample.members(50), sample.members(1000)[:50])
    assert sample.key.hex() not in repr(sample)
    assert repr(sample.key) not in repr(sample)
    assert len(sample.key) == 32


def test_keys_differ_by_page_by_seed_and_from_noise() -> None:
    keys = [simulated_noise(seed).draw_key(name) for seed in (0, 1) for name in ("a", "b")]
    assert len(set(keys)) == 4
    assert simulated_noise(0).draw_key("a") == keys[0]
    assert secure_noise.draw_key("a") != secure_noise.draw_key("a")
    assert keys[0] != np.random.default_rng([0, *b"a"]).bytes(32)


# A page about a sample


@dataclass(frozen=True)
class Sums:
    """Sums of each user's rows, and which feature is largest in them."""

    rows_per_user: int = 4

    @property
    def spec(self) -> StepSpec:
        return StepSpec(layout="padded", rows_per_user=self.rows_per_user)

    def __call__(self, batch: UserBatch) -> dict[str, Any]:
        X = batch.X
        total = X.sum(axis=1)
        return {"sum": Vectors(total), "largest": Counts(total.argmax(axis=1)[:, None], X.shape[2])}


@dataclass
class Spy:
    """Noise of zero; remembers what was asked for, in order, and what the ledger then said."""

    seeded: ClassVar[bool] = False
    ledger: Path | None = None
    calls: list[str] = field(default_factory=list)
    keys: list[bytes] = field(default_factory=list)

    def __call__(self, name: str, sigma: float, size: int) -> np.ndarray:
        self.calls.append(f"noise {name}")
        return np.zeros(size, dtype=np.int64)

    def draw_key(self, name: str) -> bytes:
        if self.ledger is not None:
            assert f'"{name}/' in self.ledger.read_text()
        self.calls.append(f"key {name}")
        self.keys.append(secure_noise.draw_key(name))
        return self.keys[-1]


QUERIES = {"sum": Query(Bound(1.5, 3), 0.02), "largest": Query(Bound(1.0, 3, acute=True), 0.01)}
HALF = Poisson(0.5)


@pytest.fixture
def users(population: Callable[..., UserTable]) -> InMemoryUsers:
    return InMemoryUsers(population(n=50, d=3), Performance(1))


def test_a_page_is_charged_then_drawn_then_passed_over_then_made_noisy(
    users: InMemoryUsers, tmp_path: Path, open_ledger: Callable[..., Ledger]
) -> None:
    ledger, board = open_ledger(Budget(2.0, 1e-5), tmp_path / "ledger.jsonl"), Billboard(tmp_path / "board")
    spy = Spy(tmp_path / "ledger.jsonl")
    released = Run(users, ledger, board, spy).release("page", Sums(), QUERIES, among=HALF)
    assert spy.calls == ["key page", "noise page/sum", "noise page/largest"]
    members = Sample(0.5, spy.keys[0]).members(50)
    assert released["largest"].value.sum() == pytest.approx(members.sum(), rel=1e-6)
    assert dict(ledger.report().events) == {"page/sum+largest": Sampled(0.03**-0.5, 0.5, REPLACE)}
    for file in [path for path in tmp_path.rglob("*") if path.is_file()]:
        assert spy.keys[0] not in file.read_bytes()
        assert spy.keys[0].hex() not in file.read_text(errors="replace")


def test_noise_is_scaled_to_twice_the_bound_even_where_contributions_are_acute(users: InMemoryUsers) -> None:
    released = Run(users, Ledger(Budget(2.0, 1e-5)), Billboard(), Spy()).release("page", Sums(), QUERIES, among=HALF)
    for key, query in QUERIES.items():
        assert released[key].sensitivity >= 2 * query.bound.norm * (1 + NORM_SLACK)
        assert released[key].sensitivity == pytest.approx(2 * query.bound.norm * (1 + NORM_SLACK), rel=1e-9)
        assert released[key].sigma == pytest.approx(released[key].sensitivity * query.mu_squared**-0.5)


def test_at_a_rate_of_one_a_page_is_as_without_sampling(users: InMemoryUsers) -> None:
    runs = [Run(users, Ledger(Budget(2.0, 1e-5)), Billboard(), Spy()) for _ in range(2)]
    plain, all_in = (
        runs[0].release("page", Sums(), QUERIES),
        runs[1].release("page", Sums(), QUERIES, among=Poisson(1.0)),
    )
    assert all(np.array_equal(plain[key].value, all_in[key].value) for key in QUERIES)
    assert runs[0].ledger.report() == runs[1].ledger.report()
    with pytest.raises(InputError, match="no sample to draw"):
        Poisson(1.0).sample(b"k" * 32)


def test_questions_that_samples_cannot_answer_are_refused_before_the_charge(users: InMemoryUsers) -> None:
    spy, ledger = Spy(), Ledger(Budget(2.0, 1e-5))
    run = Run(users, ledger, Billboard(), spy)
    with pytest.raises(InputError, match="a step with slots"):
        run.release("page", RowsStep(lambda X, y: {"sum": Vectors(X.sum(axis=1))}), {"sum": QUERIES["sum"]}, among=HALF)
    with pytest.raises(InputError, match="use replace-one-user"):
        Run(users, Ledger(Budget(2.0, 1e-5, ADD)), Billboard(), spy).release("page", Sums(), QUERIES, among=HALF)
    assert spy.calls == []
    assert ledger.report().events == ()


def test_sums_clipped_to_another_bound_are_not_released(users: InMemoryUsers) -> None:
    class Lax(InMemoryUsers):
        def sums(self, step: Any, bounds: Any, *others: Any, **asked: Any) -> Any:
            return super().sums(step, {**bounds, "sum": Bound(9.0, 3)}, *others, **asked)

    spy, board = Spy(), Billboard()
    with pytest.raises(InputError, match="another bound"):
        Run(Lax(users.table, Performance(1)), Ledger(Budget(2.0, 1e-5)), board, spy).release(
            "page", Sums(), QUERIES, among=HALF
        )
    assert spy.calls == ["key page"]
    assert "page" not in board


@pytest.mark.parametrize("killed", ["in the pass", "before the post"])
def test_a_run_killed_after_the_charge_draws_another_key_and_pays_once(
    users: InMemoryUsers, tmp_path: Path, killed: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    path, spy = tmp_path / "ledger.jsonl", Spy()

    def die(*_: Any, **__: Any) -> None:
        raise KeyboardInterrupt

    with monkeypatch.context() as patched:
        if killed == "in the pass":
            patched.setattr(Sums, "__call__", die)
        else:
            patched.setattr(Billboard, "post_releases", die)
        ledger = Ledger(Budget(2.0, 1e-5), path=path)
        run = Run(users, ledger, Billboard(tmp_path / "board"), spy)
        with pytest.raises(KeyboardInterrupt):
            run.release("page", Sums(), QUERIES, among=HALF)
        spent = ledger.epsilon
        with pytest.raises(ResumeError, match="pays for one"):
            run.release("page", Sums(), QUERIES, among=HALF)  # not in the same process
        ledger.close()
    ledger = Ledger(Budget(2.0, 1e-5), path=path)
    run = Run(users, ledger, Billboard(tmp_path / "board"), spy)
    first = run.release("page", Sums(), QUERIES, among=HALF)
    assert len(spy.keys) == 2
    assert spy.keys[0] != spy.keys[1]
    assert ledger.epsilon == spent
    again = run.release("page", Sums(), QUERIES, among=HALF)  # read from the billboard
    assert len(spy.keys) == 2
    assert np.array_equal(first["sum"].value, again["sum"].value)
    with pytest.raises(ResumeError):
        run.release("page", Sums(), QUERIES, among=Poisson(0.4))
    with pytest.raises(ResumeError):
        run.release("page", Sums(), QUERIES)
    ledger.close()


def test_a_simulation_takes_the_same_samples_again(users: InMemoryUsers) -> None:
    values = []
    for _ in range(2):
        ledger = Ledger(Budget(2.0, 1e-5), seeded=True)
        run = Run(users, ledger, Billboard(), simulated_noise(5))
        values.append(run.release("page", Sums(), QUERIES, among=HALF)["sum"].value)
    assert np.array_equal(*values)
    with pytest.raises(InputError, match="seeded noise is a simulation"):
        Run(users, Ledger(Budget(2.0, 1e-5)), Billboard(), simulated_noise(5)).release("p", Sums(), QUERIES, among=HALF)
