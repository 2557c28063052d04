"""Replace one user by anything: the exact probability of no index changes by more than e^epsilon.

Probabilities are computed from the totals of the engine and the scale that a run would draw with, so what is tested is
clipping, counting in levels, the range under either relation, and the scale, together. Where the range were taken as
half of what it is, the last tests would fail: populations are found that nearly attain e^epsilon.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import numpy as np
import pytest
from asking import ADD, REPLACE, table_of
from hypothesis import given
from hypothesis import strategies as st
from scipy.special import logsumexp

from privrep.privacy.bounds import LossBound
from privrep.privacy.contributions import Losses
from privrep.privacy.events import Relation
from privrep.privacy.exponential import compute_scale
from privrep.privacy.protocol import StepSpec, UserBatch
from privrep.users.memory import InMemoryUsers
from privrep.users.performance import Performance

C = 5
BOUND = LossBound(C)
EPSILONS = st.sampled_from([0.01, 0.3, 1.0, 4.0])


@dataclass(frozen=True)
class FirstRow:
    """A local step: the first features of a user's first row are its losses, whatever they are; none of no rows."""

    spec: ClassVar[StepSpec] = StepSpec()
    dtype: type = np.float64

    def __call__(self, batch: UserBatch) -> dict[str, Losses]:
        X = batch.X
        rows = X[:, 0, :C] if X.shape[1] else np.zeros((len(X), C))
        return {"losses": Losses(rows.astype(self.dtype))}


def totals(users: list[list[float]], step: FirstRow) -> np.ndarray:
    table = table_of([(np.array([[*row, 0.0]]), np.zeros(1)) for row in users], np.float64, C + 1)
    return InMemoryUsers(table, Performance(1)).sums(step, {"losses": BOUND})["losses"].total


def log_probabilities(total: np.ndarray, scale: int) -> np.ndarray:
    exponents = -(total - total.min()) / scale
    return exponents - logsumexp(exponents)


def farthest(here: np.ndarray, there: np.ndarray, scale: int) -> float:
    return float(np.abs(log_probabilities(here, scale) - log_probabilities(there, scale)).max())


ENTRY = st.one_of(
    st.floats(0, 1), st.sampled_from([0.0, 1.0]), st.floats(allow_nan=True, allow_infinity=True, width=32)
)
USER = st.lists(ENTRY, min_size=C, max_size=C)


@given(st.lists(USER, min_size=1, max_size=12), USER, EPSILONS, st.sampled_from([np.float64, np.float32]))
def test_no_probability_changes_by_more_than_epsilon(
    users: list[list[float]], other: list[float], epsilon: float, dtype: type
) -> None:
    step = FirstRow(dtype)
    here = totals(users, step)
    replaced, removed = totals([other, *users[1:]], step), totals(users[1:], step) if users[1:] else np.zeros(C)
    assert farthest(here, replaced, compute_scale(BOUND, epsilon, REPLACE)) <= epsilon * (1 + 1e-12)
    assert farthest(here, removed, compute_scale(BOUND, epsilon, ADD)) <= epsilon * (1 + 1e-12)


@pytest.mark.parametrize("relation", [REPLACE, ADD])
@pytest.mark.parametrize("epsilon", [0.1, 1.0])
def test_epsilon_is_nearly_attained_so_half_the_range_would_break_it(relation: Relation, epsilon: float) -> None:
    """Nearly all lose by every candidate but the second. One user more, or another user, makes the first one better
    and the second one worse."""
    crowd = [[1.0, 0.0, 1.0, 1.0, 1.0]] * round(20 / epsilon)
    one, other = [1.0, 0.0, 1.0, 1.0, 1.0], [0.0, 1.0, 1.0, 1.0, 1.0]
    step = FirstRow()
    here = totals([*crowd, one] if relation == REPLACE else crowd, step)
    there = totals([*crowd, other], step)
    scale = compute_scale(BOUND, epsilon, relation)
    assert 0.999 * epsilon < farthest(here, there, scale) <= epsilon
    assert farthest(here, there, scale // 2) > 1.9 * epsilon


def test_a_user_who_comes_or_goes_would_not_be_safe_with_the_other_relations_scale() -> None:
    """The scale of add-or-remove is half of that of replace-one, and replacing a user then costs twice epsilon."""
    crowd = [[1.0, 0.0, 1.0, 1.0, 1.0]] * 40
    here, there = totals([*crowd, [1.0, 0, 1, 1, 1]], FirstRow()), totals([*crowd, [0.0, 1, 1, 1, 1]], FirstRow())
    assert farthest(here, there, compute_scale(BOUND, 1.0, ADD)) > 1.9
