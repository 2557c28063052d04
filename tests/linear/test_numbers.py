"""What users vote for, and what a fit of numbers makes of it."""

import math

import numpy as np
import pytest

from privrep.data.synthetic import make_population
from privrep.data.table import UserTable
from privrep.linear.descent import _apply_step
from privrep.linear.families import HeadLosses, HeadVotes
from privrep.linear.gathering import Outputs
from privrep.linear.method import Problem
from privrep.linear.newton import Curvature
from privrep.linear.panel import find_panel
from privrep.linear.registry import METHODS
from privrep.local.prior import PriorMean
from privrep.local.representation import Representation
from privrep.privacy.billboard import Release
from privrep.privacy.bounds import Bound
from privrep.privacy.ledger import Budget
from privrep.privacy.run import Run
from privrep.users.memory import InMemoryUsers

D = 3


def lines(users: int, rows: int, slopes: float, seed: int = 0) -> UserTable:
    """Users on lines with slopes of their own, of this deviation, and noise of deviation one."""
    rng = np.random.default_rng(seed)
    X = rng.normal(size=(users, rows, D))
    y = np.einsum("umd,ud->um", X, slopes * rng.normal(size=(users, D))) + rng.normal(size=(users, rows))
    return UserTable.from_rows(X.reshape(-1, D), y.ravel(), np.repeat(np.arange(users), rows))


def votes(step: HeadLosses | HeadVotes, table: UserTable, cells: int) -> np.ndarray:
    asked = {"votes": Bound(1.0, cells, acute=True)}
    return np.asarray(InMemoryUsers(table).sums(step, asked)["votes"].exact_numbers)


def test_users_vote_for_what_does_better() -> None:
    mean, none, one = PriorMean.zero(D, 1, True), np.zeros((D, 0)), np.ones(1)
    own = HeadVotes(mean, none, True, 1.0, np.ones(D))
    for slopes, better in ((3.0, 1), (0.0, 0)):
        table = lines(200, 10, slopes)
        counted = votes(own, table, 2)
        assert counted.sum() == 200
        assert counted[better] > 1.5 * counted[1 - better]
        kinds = (np.array(numbers) for numbers in ((0.0, 2.0), (0.0, 1.0), (1.0, 1.0), (1.0, 1.0), (1.0, 1.0)))
        losses = HeadLosses(mean, none, np.eye(D), *kinds, one, 1.0, False)
        assert votes(losses, table, 2)[better] > 120


def test_users_who_cannot_tell_do_not_vote() -> None:
    """Three rows are too few for a regression of one's own, and two candidates that are one have nothing to choose."""
    mean = PriorMean.zero(D, 1, True)
    assert not votes(HeadVotes(mean, np.zeros((D, 0)), True, 1.0, np.ones(D)), lines(50, 3, 1.0), 2).any()
    same = (np.zeros(2), np.zeros(2), np.ones(2), np.ones(2), np.ones(2))
    step = HeadLosses(mean, np.zeros((D, 0)), np.eye(D), *same, np.ones(1), 1.0, False)
    assert not votes(step, lines(50, 5, 1.0), 2).any()


def learn(users: int, d: int, k: int, rows: int, noise: float, epsilon: float, seed: int = 0, **more) -> Representation:
    rng = np.random.default_rng(seed)
    table = make_population(rng, users, d, k, rows, noise, **more).sample(rng)
    with Run.open(InMemoryUsers(table), Budget(epsilon, 1e-6), seed=seed) as run:
        return METHODS["private-fedrep"].learn(run, Problem(rank=None))


@pytest.mark.parametrize(
    ("users", "d", "k", "rows", "noise", "epsilon"),
    [(3000, 8, 2, 5, 0.3, 0.5), (8000, 10, 2, 10, 0.2, 1.0), (8000, 6, 1, 10, 1.0, 1.0), (4000, 12, 1, 15, 0.3, 1.0)],
)
def test_the_rank_is_found(users, d, k, rows, noise, epsilon) -> None:
    """With levels and common slopes, and in small populations: neither none nor one too many."""
    more = {"intercept": 1.0, "common": 1.0, "between": 0.5}
    assert learn(users, d, k, rows, noise, epsilon).basis.shape[1] == k
    assert learn(2 * users, d, k, rows, noise, epsilon, **more).basis.shape[1] == k


def test_slopes_that_do_not_differ_need_no_representation() -> None:
    found = learn(4000, 8, 0, 6, 1.0, 1.0, intercept=1.0, common=1.0)
    assert found.basis.shape[1] == 0
    assert found.prior is not None
    assert found.prior.factor.shape[1] == 0


def test_a_step_on_slopes_leaves_what_means_say_in_all() -> None:
    """Within users the target follows a column, between users it does not: a step that finds out about slopes must not
    move what is expected of a user with many rows."""
    rng = np.random.default_rng(0)
    users, rows = 20_000, 6
    X = 3 * rng.normal(size=(users, 1, D)) + rng.normal(size=(users, rows, D))
    y = rng.normal(size=(users, 1)) + rng.normal(size=(users, rows))
    table = UserTable.from_rows(X.reshape(-1, D), y.ravel(), np.repeat(np.arange(users), rows))
    with Run.open(InMemoryUsers(table), Budget(5.0, 1e-6), seed=0) as run:
        panel, _ = find_panel(run, run.ledger.capacity, True, None)
    r = len(panel.mean.spread)
    assert r == D
    within = np.concatenate([[1.0, -2.0, 0.5], np.eye(D).ravel()])
    between = np.concatenate([np.zeros(1 + r), np.eye(1 + r).ravel()])
    released = {"within": Release(within, 1e-6, 1.0, 1.0), "between": Release(between, 1e-6, 1.0, 1.0)}
    bends = {
        "within": Curvature(np.eye(D), 1.0, 1e-6, 1e-6),
        "between": Curvature(np.eye(1 + r), 1.0, 1e-6, 1e-6),
    }
    assert within.size == D + D**2
    moved, heard = _apply_step(panel, released, bends, Outputs.of(np.zeros(1), several=False))
    assert heard
    assert np.linalg.norm(moved.mean.slopes - panel.mean.slopes) > 0.5
    many = 10**9
    before, after = (p.mean.slopes + p.mean.context_weights(many) for p in (panel, moved))
    assert after == pytest.approx(before, abs=1e-6 * math.sqrt(D))
