"""Charge, then draw, then post: the only way from private numbers to public ones."""

from __future__ import annotations

import contextlib
import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, ClassVar

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from scipy.stats import chi2

from privrep.data.table import UserTable
from privrep.errors import BudgetExceeded, InputError, PrivrepError, ResumeError
from privrep.privacy.billboard import Billboard
from privrep.privacy.bounds import NORM_SLACK, Bound, BoundedSum, Contributions, clip_and_sum
from privrep.privacy.calibration import Query
from privrep.privacy.contributions import Counts, Vectors
from privrep.privacy.events import Gaussian
from privrep.privacy.grid import grid_step
from privrep.privacy.groups import Group
from privrep.privacy.ledger import Budget, Ledger, noise_multiplier
from privrep.privacy.node_noise import Noisy, NoisyUsers
from privrep.privacy.noise import NoiseSource, secure_noise, simulated_noise
from privrep.privacy.protocol import EVERYONE, Audience, Facts, Step, StepSpec, UserBatch
from privrep.privacy.release import release
from privrep.privacy.run import Run
from privrep.privacy.sampling import Poisson
from privrep.users.memory import InMemoryUsers
from privrep.users.performance import Performance

REPLACE = Budget(2.0, 1e-6)
ADD = Budget(2.0, 1e-6, "add-or-remove-one-user")
SHARE = 0.25 * REPLACE.mu**2
ALARM = 1e-6
Open = Callable[..., Ledger]  # the fixture open_ledger


@dataclass(frozen=True)
class Means:
    """A local step: each user's mean row, and the histogram of which feature is largest in it."""

    spec: ClassVar[StepSpec] = StepSpec()

    def __call__(self, batch: UserBatch) -> dict[str, Contributions]:
        X = batch.X
        means = X.mean(axis=1)
        return {"mean": Vectors(means), "largest": Counts(means.argmax(axis=1)[:, None], X.shape[2])}


@dataclass
class Watched:
    """An engine that counts its passes."""

    inside: InMemoryUsers
    passes: list[tuple[str, ...]] = field(default_factory=list)

    @property
    def facts(self) -> Facts:
        return self.inside.facts

    def sums(self, step: Step, bounds: Mapping[str, Bound], among: Audience = EVERYONE) -> dict[str, BoundedSum]:
        self.passes.append(tuple(bounds))
        return self.inside.sums(step, bounds, among)


@pytest.fixture
def users(population: Callable[..., UserTable]) -> Watched:
    return Watched(InMemoryUsers(population(n=50, d=3), Performance(1)))


def queries(share: float = SHARE, norm: float = 1.5) -> dict[str, Query]:
    return {"mean": Query(Bound(norm, 3), share), "largest": Query(Bound(1.0, 3, acute=True), share)}


def zeros(size: int, norm: float = 1.5, acute: bool = False) -> BoundedSum:
    return BoundedSum(np.zeros(size, np.int64), Bound(norm, size, acute))


# Refusal


@pytest.mark.parametrize("share", [0.0, -1.0, math.nan, math.inf])
def test_a_share_that_means_nothing_is_refused_before_anything_happens(users: Watched, spy: Any, share: float) -> None:
    ledger = Ledger(REPLACE)
    with pytest.raises((PrivrepError, ValueError, ZeroDivisionError)):
        Run(users, ledger, Billboard(), spy).release("page", Means(), queries(share))
    assert spy.calls == []
    assert ledger.report().events == ()


def test_the_engine_refuses_an_acute_bound_for_contributions_that_are_not(users: Watched, spy: Any) -> None:
    ledger = Ledger(REPLACE)
    with pytest.raises(InputError, match="not acute"):
        Run(users, ledger, Billboard(), spy).release("page", Means(), {"mean": Query(Bound(1.0, 3, acute=True), SHARE)})
    assert spy.calls == []
    assert ledger.report().events == ()


# What is released


@pytest.mark.parametrize("budget", [REPLACE, ADD], ids=lambda b: b.relation)
def test_the_total_is_released_on_the_grid(users: Watched, spy: Any, budget: Budget) -> None:
    released = Run(users, Ledger(budget), Billboard(), spy).release("page", Means(), queries())
    sums = users.sums(Means(), {key: query.bound for key, query in queries().items()})
    for key, query in queries().items():
        step = grid_step(query.bound.norm)
        assert step == query.bound.step
        assert sums[key].total.dtype == np.int64
        assert np.array_equal(released[key].value, sums[key].total * step)
        assert np.array_equal(released[key].value, sums[key].exact_numbers)
        assert np.array_equal(np.rint(released[key].value / step), released[key].value / step)
    assert released["largest"].value.sum() == 50


@pytest.mark.parametrize("budget", [REPLACE, ADD], ids=lambda b: b.relation)
@pytest.mark.parametrize("acute", [False, True])
@pytest.mark.parametrize("size", [1, 7, 10_000])
def test_sensitivity_includes_relation_slack_and_rounding(spy: Any, budget: Budget, acute: bool, size: int) -> None:
    norm = 1.5
    query = Query(Bound(norm, size, acute), SHARE)
    got = release({"s": zeros(size, norm, acute)}, {"s": query}, Ledger(budget), spy, "page")["s"]
    factor = 1.0 if budget is ADD else math.sqrt(2.0) if acute else 2.0
    step = grid_step(norm)
    wanted = factor * (norm * (1 + NORM_SLACK) + math.sqrt(size) / 2 * step * (1 + 2.0**-10))
    assert got.sensitivity == pytest.approx(wanted, rel=1e-14)
    assert got.noise_multiplier == pytest.approx(1 / math.sqrt(SHARE), rel=1e-14)
    assert got.sigma == pytest.approx(got.noise_multiplier * wanted, rel=1e-14)
    ((name, sigma, drawn),) = spy.calls
    assert (name, drawn) == ("page/s", size)
    assert sigma * step == pytest.approx(got.sigma, rel=1e-14)
    assert sigma >= 2**16  # what the argument in noise.py asks for


@given(st.integers(1, 40), st.floats(1e-3, 1e3), st.integers(0, 2**32 - 1))
def test_totals_of_neighbours_on_the_grid_stay_within_the_stated_sensitivity(size: int, norm: float, seed: int) -> None:
    """Of users who are clipped, one of whom turns round, or comes: as far as a user can move a sum, and no farther."""
    rng, bound = np.random.default_rng(seed), Bound(norm, size)
    values = rng.normal(size=(9, size)) * norm * 100
    turned = np.concatenate([values[:8], -values[8:]])
    here, there, without = (clip_and_sum(Vectors(some), bound) for some in (values, turned, values[:8]))
    moved, came = (float(np.linalg.norm((here - other) * bound.step)) for other in (there, without))
    assert 2 * norm * (1 - 1e-9) <= moved <= bound.sensitivity("replace-one-user")
    assert norm * (1 - 1e-9) <= came <= bound.sensitivity("add-or-remove-one-user")


@pytest.mark.parametrize("noise", [secure_noise, simulated_noise(5)], ids=["secure", "simulated"])
@pytest.mark.parametrize("budget", [REPLACE, ADD], ids=lambda b: b.relation)
def test_the_noise_of_a_release_has_multiplier_times_sensitivity(budget: Budget, noise: NoiseSource) -> None:
    """Chi-square of 2,000 coordinates, false-alarm rate 1e-6; it rejects two thirds and three halves of the scale."""
    size = 2000
    queries = {"s": Query(Bound(1.5, size), SHARE)}
    ledger = Ledger(budget, seeded=noise is not secure_noise)
    got = release({"s": zeros(size)}, queries, ledger, noise, "page")["s"]
    low, high = chi2.ppf(ALARM / 2, size), chi2.isf(ALARM / 2, size)
    sigma = noise_multiplier(SHARE) * got.sensitivity
    assert low < ((got.value / sigma) ** 2).sum() < high
    assert not low < ((got.value / (sigma * 2 / 3)) ** 2).sum() < high
    assert not low < ((got.value / (sigma * 3 / 2)) ** 2).sum() < high
    step = grid_step(1.5)
    assert np.array_equal(np.rint(got.value / step) * step, got.value)


def test_every_statistic_of_a_pass_has_noise_of_its_own(users: Watched) -> None:
    same = {"a": zeros(50), "b": zeros(50)}
    asked = {key: Query(Bound(1.5, 50), SHARE) for key in same}
    got = release(same, asked, Ledger(REPLACE, seeded=True), simulated_noise(0), "page")
    assert not np.array_equal(got["a"].value, got["b"].value)


# Once


def test_release_called_twice_for_one_page_does_not_draw_twice_for_one_charge(spy: Any) -> None:
    ledger = Ledger(REPLACE)
    asked = {"s": Query(Bound(1.5, 4), SHARE)}
    release({"s": zeros(4)}, asked, ledger, spy, "page")
    spent = ledger.remaining
    with contextlib.suppress(PrivrepError):
        release({"s": zeros(4)}, asked, ledger, spy, "page")
    assert len(spy.calls) == 1 or ledger.remaining < spent


# Groups


def test_a_group_is_asked_alone_and_charged_alone(population: Callable[..., UserTable], spy: Any) -> None:
    table = population(n=50, d=3)
    ledger = Ledger(REPLACE)
    run = Run(InMemoryUsers(table, Performance(1)), ledger, Billboard(), spy)
    whole = REPLACE.mu**2
    groups = [Group("rounds", t, 4) for t in range(4)]
    asked = [run.release(f"round-{t}", Means(), queries(whole / 2), group) for t, group in enumerate(groups)]
    sizes = [released["largest"].value.sum() for released in asked]
    assert sizes == [group.members(table.ids).sum() for group in groups]
    assert sum(sizes) == 50
    assert 50 not in sizes
    assert ledger.epsilon == pytest.approx(REPLACE.epsilon, rel=1e-7)
    assert {event.group for _, event in ledger.report().events if isinstance(event, Gaussian)} == set(groups)
    with pytest.raises(BudgetExceeded):
        run.release("again", Means(), queries(), groups[0])


def test_a_page_of_another_group_answers_another_question(population: Callable[..., UserTable], spy: Any) -> None:
    run = Run(InMemoryUsers(population(n=50, d=3), Performance(1)), Ledger(REPLACE), Billboard(), spy)
    run.release("page", Means(), queries(), Group("rounds", 0, 2))
    for other in (Group("rounds", 1, 2), Group("other", 0, 2), EVERYONE):
        with pytest.raises(ResumeError):
            run.release("page", Means(), queries(), other)
    run.release("page", Means(), queries(), Group("rounds", 0, 2))
    assert len(spy.calls) == 2


# Derived pages


def test_what_is_derived_costs_nothing_and_is_posted_once(users: Watched, spy: Any) -> None:
    ledger, board = Ledger(REPLACE), Billboard()
    run = Run(users, ledger, board, spy)
    run.derive("model", {"basis": np.eye(2)}, error=0.5)
    run.derive("model", {"basis": np.zeros((2, 2))}, error=0.7)
    assert np.array_equal(board["model"].arrays["basis"], np.eye(2))
    assert board["model"].facts["derived"]["error"] == 0.5
    assert spy.calls == []
    assert ledger.report().events == ()


def test_the_events_charged_are_named_by_page_and_statistic(users: Watched, spy: Any) -> None:
    ledger = Ledger(REPLACE)
    Run(users, ledger, Billboard(), spy).release("round-3", Means(), queries())
    wanted = Gaussian(noise_multiplier(SHARE))
    assert dict(ledger.report().events) == {"round-3/mean": wanted, "round-3/largest": wanted}


def test_users_are_not_asked_for_what_cannot_be_paid() -> None:
    users = Watched(InMemoryUsers(UserTable.from_rows(np.ones((6, 2)), np.zeros(6), np.repeat([0, 1, 2], 2))))
    run = Run(users, Ledger(REPLACE), Billboard(None), secure_noise)
    with pytest.raises(BudgetExceeded):
        run.release("mean", Means(), {"mean": Query(Bound(1.0, 2), 2 * REPLACE.mu**2)})
    assert not users.passes
    run.release("mean", Means(), {"mean": Query(Bound(1.0, 2), SHARE)})
    assert users.passes


class Machines(NoisyUsers):
    """Users on machines that add noise: three of them, or as much as is said."""

    facts = Facts(3, 2, 1, False)

    def __init__(self, sigma: float = 1e9, size: int = 2) -> None:
        self.sigma, self.size = sigma, size

    def sums(self, *_: Any, **__: Any) -> Any:
        raise AssertionError("exact sums were asked for")

    def noisy_sums(self, page: str, *_: Any) -> dict[str, Noisy]:
        return {"mean": Noisy(np.zeros(self.size), self.sigma)}


def noisy_run(users: Any, budget: Budget = REPLACE) -> Run:
    return Run(users, Ledger(budget), Billboard(None), secure_noise)


def test_machines_that_add_the_noise_are_asked_for_nothing_else() -> None:
    query = {"mean": Query(Bound(1.0, 2), SHARE)}
    released = noisy_run(Machines()).release("mean", Means(), query)["mean"]
    assert released.sigma == 1e9
    assert released.noise_multiplier == pytest.approx(1e9 / released.sensitivity)
    run = noisy_run(Machines())
    with pytest.raises(InputError, match="whose sums are exact"):
        run.iterate("walk", 2, {}, lambda state: Means(), query, lambda state, released: state)
    with pytest.raises(InputError, match="all asked"):
        run.release("sampled", Slotted(), query, among=Poisson(0.5))
    with pytest.raises(AssertionError, match="exact sums"):
        run.choose("choice", Means(), 3, 0.1)
    assert run.ledger.epsilon == 0


@pytest.mark.parametrize(
    ("users", "budget", "words"),
    [
        (Machines(sigma=1e-3), REPLACE, "less than what was charged"),
        (Machines(sigma=math.nan), REPLACE, "less than what was charged"),
        (Machines(size=3), REPLACE, "another size"),
        (Machines(), ADD, "replace-one-user"),
    ],
)
def test_noise_of_machines_that_is_too_little_is_not_released(users: Machines, budget: Budget, words: str) -> None:
    run = noisy_run(users, budget)
    with pytest.raises(InputError, match=words):
        run.release("mean", Means(), {"mean": Query(Bound(1.0, 2), 0.25 * budget.mu**2)})
    assert "mean" not in run.billboard


@dataclass(frozen=True)
class Slotted:
    rows_per_user: int = 2

    @property
    def spec(self) -> StepSpec:
        return StepSpec(layout="padded", rows_per_user=self.rows_per_user)

    def __call__(self, batch: UserBatch) -> dict[str, Contributions]:
        X = batch.X
        return {"mean": Vectors(X.mean(axis=1))}
