"""A choice: charged before it is drawn, drawn once, posted without a trace of the losses, read where it stands."""

from __future__ import annotations

import json
import math
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
import pytest

from privrep.data.table import UserTable
from privrep.errors import BudgetExceeded, InputError, ResumeError
from privrep.privacy.billboard import Billboard, Choice
from privrep.privacy.bounds import LEVELS, Bound, BoundedSum, LossBound
from privrep.privacy.calibration import Query
from privrep.privacy.contributions import Losses, Vectors
from privrep.privacy.events import Gaussian, Pure
from privrep.privacy.exponential import compute_scale
from privrep.privacy.ledger import Budget, Ledger, noise_multiplier
from privrep.privacy.noise import secure_noise, simulated_noise
from privrep.privacy.protocol import EVERYONE, Audience, Facts, StepSpec, UserBatch
from privrep.privacy.release import choose, release
from privrep.privacy.run import Run
from privrep.users.memory import InMemoryUsers
from privrep.users.performance import Performance

PURE = Budget(1.0, 0.0)
ADD = Budget(1.0, 0.0, "add-or-remove-one-user")
CANDIDATES = 6
Open = Callable[..., Ledger]  # the fixture open_ledger


@dataclass
class Spy:
    """A noise source that takes the candidate of smallest loss and remembers what it was asked for."""

    seeded: ClassVar[bool] = False
    calls: list[tuple[str, list[int], int]] = field(default_factory=list)
    dies: bool = False

    def __call__(self, name: str, sigma: float, size: int) -> np.ndarray:
        raise AssertionError("a choice adds no noise")

    def draw_choice(self, name: str, losses: np.ndarray, scale: int) -> int:
        if self.dies:
            raise KeyboardInterrupt
        self.calls.append((name, losses.tolist(), scale))
        return int(losses.argmin())


@dataclass(frozen=True)
class FarFrom:
    """A local step: candidate c loses where a user's first target is far from c, and no more than 1."""

    spec: ClassVar[StepSpec] = StepSpec()

    def __call__(self, batch: UserBatch) -> dict[str, Any]:
        X, y = batch.X, batch.y
        losses = np.abs(y[:, :1] - np.arange(CANDIDATES)) / CANDIDATES
        return {"losses": Losses(losses), "row": Vectors(X[:, 0, :])}


@dataclass
class Watched:
    inside: InMemoryUsers
    passes: int = 0

    @property
    def facts(self) -> Facts:
        return self.inside.facts

    def sums(self, step: Any, bounds: Any, among: Audience = EVERYONE) -> dict[str, BoundedSum]:
        self.passes += 1
        return self.inside.sums(step, bounds, among)


@pytest.fixture
def users(table_of: Callable[..., UserTable]) -> Watched:
    targets = np.random.default_rng(0).normal(3.0, 0.5, size=40)
    return Watched(InMemoryUsers(table_of([(np.ones((2, 2)), np.full(2, y)) for y in targets], 2), Performance(1)))


def ask(run: Run, page: str = "page", epsilon: float = 0.5, candidates: int = CANDIDATES) -> int:
    return run.choose(page, FarFrom(), candidates, epsilon)


# What is chosen and what is said of it


@pytest.mark.parametrize(("budget", "spread"), [(PURE, 2), (ADD, 1)], ids=["replace", "add"])
def test_the_scale_is_the_range_over_epsilon_rounded_up(users: Watched, budget: Budget, spread: int) -> None:
    spy, board = Spy(), Billboard()
    assert ask(Run(users, Ledger(budget), board, spy), epsilon=0.3) == 3
    ((name, losses, scale),) = spy.calls
    assert name == "page/choice"
    assert losses == users.sums(FarFrom(), {"losses": LossBound(CANDIDATES)})["losses"].total.tolist()
    exact = spread * LEVELS / 0.3
    assert exact * (1 + 1e-9) <= scale <= exact * (1 + 1e-9) + 1
    assert board.read_choice("page") == Choice(3, CANDIDATES, 0.3, scale / LEVELS)


@pytest.mark.parametrize("relation", ["replace-one-user", "add-or-remove-one-user"])
@pytest.mark.parametrize("epsilon", [1e-6, 0.01, 0.1, 1 / 3, 1.0, 8.0, 1e5])
def test_the_scale_never_spends_more_than_epsilon(epsilon: float, relation: Any) -> None:
    bound = LossBound(3)
    assert bound.sensitivity(relation) / compute_scale(bound, epsilon, relation) <= epsilon * (1 - 0.99e-9)


def test_the_page_holds_nothing_of_the_losses(users: Watched, tmp_path: Path, open_ledger: Open) -> None:
    board = Billboard(tmp_path / "board")
    Run(users, open_ledger(PURE, tmp_path / "ledger.jsonl"), board, Spy()).choose("page", FarFrom(), CANDIDATES, 0.5)
    page = Billboard.read(tmp_path / "board")["page"]
    assert dict(page.arrays) == {}
    assert set(page.facts) == {"choice"}
    assert set(page.facts["choice"]) == {"index", "candidates", "epsilon", "scale"}
    assert Billboard(tmp_path / "board").read_choice("page") == board.read_choice("page")
    copy = tmp_path / "copy" / "board"
    copy.parent.mkdir()
    board.write(copy)
    assert Billboard.read(copy).read_choice("page") == board.read_choice("page")


def test_the_charge_is_named_and_pure(users: Watched) -> None:
    ledger = Ledger(PURE)
    ask(Run(users, ledger, Billboard(), Spy()))
    assert dict(ledger.report().events) == {"page/choice": Pure(0.5)}
    assert ledger.epsilon == 0.5


def test_numbers_of_numpy_are_numbers(users: Watched, tmp_path: Path) -> None:
    run = Run(users, Ledger(PURE), Billboard(tmp_path / "board"), Spy())
    run.choose("page", FarFrom(), np.int64(CANDIDATES), np.float32(0.5))  # type: ignore[arg-type]
    assert json.loads(json.dumps(run.billboard["page"].facts["choice"]))["candidates"] == CANDIDATES


# Order and refusal


@pytest.mark.parametrize(
    ("page", "candidates", "epsilon"),
    [("page", 0, 0.5), ("page", 6, 0.0), ("page", 6, math.nan), ("page", 6, 1e-12), ("page", 6, -1.0), ("a/b", 6, 0.5)],
)
def test_a_question_that_means_nothing_is_refused_before_anyone_is_asked(
    users: Watched, page: str, candidates: int, epsilon: float
) -> None:
    ledger, spy = Ledger(PURE), Spy()
    with pytest.raises(InputError):
        Run(users, ledger, Billboard(), spy).choose(page, FarFrom(), candidates, epsilon)
    assert (users.passes, spy.calls, ledger.report().events) == (0, [], ())


def test_losses_of_another_number_of_candidates_are_refused(users: Watched) -> None:
    ledger, spy = Ledger(PURE), Spy()
    with pytest.raises(InputError, match="losses of shape"):
        ask(Run(users, ledger, Billboard(), spy), candidates=CANDIDATES + 1)
    assert (spy.calls, ledger.report().events) == ([], ())


def test_sums_are_not_chosen_from_and_losses_get_no_noise() -> None:
    ledger, spy = Ledger(Budget(1.0, 1e-6)), Spy()
    with pytest.raises(InputError, match="nothing was chosen"):
        choose(BoundedSum(np.zeros(3), Bound(1.0, 3)), 0.5, ledger, spy, "page")
    with pytest.raises(InputError, match="losses are for a choice"):
        release({"x": BoundedSum(np.zeros(3), LossBound(3))}, {"x": Query(Bound(1.0, 3), 0.01)}, ledger, spy, "page")
    assert ledger.report().events == ()


def test_gaussian_noise_is_refused_by_a_pure_budget_before_it_is_drawn(users: Watched) -> None:
    ledger = Ledger(PURE)
    run = Run(users, ledger, Billboard(), Spy())
    with pytest.raises(BudgetExceeded, match="a budget of delta 0 pays for choices alone"):
        run.release("page", FarFrom(), {"row": Query(Bound(1.0, 2), 1e-6)})
    with pytest.raises(InputError, match="A budget of delta 0 has none"):
        Query(Bound(1.0, 2), ledger.capacity)
    assert ledger.report().events == ()


def test_a_choice_and_then_a_release_spend_the_whole_budget(users: Watched) -> None:
    run = Run(users, Ledger(Budget(1.0, 1e-6)), Billboard(), secure_noise)
    ask(run, "choice", 0.25)
    run.release("sum", FarFrom(), {"row": Query(Bound(1.0, 2), run.ledger.capacity)})
    assert run.ledger.epsilon == pytest.approx(1.0, rel=1e-6)
    assert [type(event) for _, event in run.ledger.report().events] == [Pure, Gaussian]
    with pytest.raises(BudgetExceeded):
        ask(run, "more", 0.01)


# Once


def test_a_page_whose_index_is_no_candidate_is_refused(users: Watched) -> None:
    board, ledger = Billboard(), Ledger(PURE)
    ledger.charge({"page/choice": Pure(0.5)})
    scale = compute_scale(LossBound(CANDIDATES), 0.5, "replace-one-user") / LEVELS
    board.post_choice("page", Choice(CANDIDATES, CANDIDATES, 0.5, scale))
    with pytest.raises(ResumeError, match="another question"):
        ask(Run(users, ledger, board, Spy()))


# Simulations


def test_a_simulation_is_repeatable_and_says_so(users: Watched) -> None:
    def chosen(seed: int) -> tuple[list[int], str]:
        run = Run(users, Ledger(Budget(1.0, 0.0), seeded=True), Billboard(), simulated_noise(seed))
        return [ask(run, f"page-{i}", 0.02) for i in range(20)], str(run.billboard["page-0"].facts)

    assert chosen(1) == chosen(1)
    assert chosen(1) != chosen(2)
    assert len(set(chosen(1)[0])) > 1  # pages do not share their noise
    assert "'simulation': True" in chosen(1)[1]


@pytest.mark.parametrize("noise", [secure_noise, simulated_noise(0)], ids=["secure", "simulated"])
def test_a_draw_asks_for_integers_and_a_scale(noise: Any) -> None:
    for losses in (np.zeros(3), np.zeros((2, 2), dtype=np.int64), np.zeros(0, dtype=np.int64)):
        with pytest.raises(InputError, match="integer losses"):
            noise.draw_choice("a", losses, 5)
    for scale in (0, -1, 2**54):
        with pytest.raises(InputError, match="cannot be drawn"):
            noise.draw_choice("a", np.zeros(3, dtype=np.int64), scale)
    assert noise.draw_choice("a", np.array([7]), 1) == 0


def test_most_of_a_budget_may_be_chosen_with_after_a_release() -> None:
    """`pure_left` is what is left for a choice, whatever came before."""
    ledger = Ledger(Budget(1.0, 1e-6))
    ledger.charge({"a/x": Gaussian(noise_multiplier(ledger.capacity / 2))})
    losses = BoundedSum(np.array([0.0, 5.0 * LEVELS]), LossBound(2))
    with pytest.raises(BudgetExceeded):
        choose(losses, ledger.pure_left * 1.001, ledger, Spy(), "too-much")
    assert choose(losses, ledger.pure_left, ledger, Spy(), "fits").index == 0
