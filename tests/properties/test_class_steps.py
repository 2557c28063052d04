"""The steps of classifiers held to what every local step is held to: alone as in company, and within the sensitivity.

Targets of the other tests' users are turned into labels, one for one, some of them none of the classes.
"""

from __future__ import annotations

import functools
import math
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from asking import ADD, PHASES, REPLACE, D, Every, K, assert_within, basis, table_of, transforms, user
from hypothesis import given, settings
from hypothesis import strategies as st
from panel import prior_mean
from test_alone_in_a_crowd import assert_alone_as_in_company, chosen, chosen_sparse, crowd, sparse_crowd

from privrep.heads.classification import MANY_ROWS
from privrep.linear.class_steps import ClassGradient, Encoded
from privrep.linear.gradient_parts import COMMON_CELLS
from privrep.linear.label_steps import LabelGradient, LabelLosses, LabelResidual, LabelTrust, LabelVotes
from privrep.linear.steps import SIZES, WIDE_CELLS, PairMoments, PowerStep, ResidualMoments, gradient_size
from privrep.local.losses import Loss
from privrep.local.prior import PriorMean
from privrep.privacy.bounds import DIRECTION_ONLY, Bound
from privrep.privacy.protocol import StepSpec, UserBatch
from privrep.users.memory import InMemoryUsers
from privrep.users.performance import Performance

LOSSES = [Loss("log", 2), Loss("log", 3), Loss("hinge", 2), Loss("hinge", 3)]


@dataclass(frozen=True)
class Labelled:
    """A step of labels on users who have numbers: any number to one of the classes, or to none."""

    step: Any
    classes: int

    @property
    def spec(self) -> StepSpec:
        return self.step.spec

    def __call__(self, batch: UserBatch) -> Any:
        X, y = batch.X, batch.y
        code = np.mod(np.floor(np.mod(np.abs(y.astype(np.float64)) * 3, 1e6)), self.classes + 1) - 1
        return self.step(UserBatch(X, code.astype(y.dtype)))


def steps_of(loss: Loss, d: int, k: int, intercept: bool) -> dict[str, tuple[Any, dict[str, Bound]]]:
    U, (scaled, whitened) = basis(d, k), transforms(d)
    matrix, L = whitened.to_original(U), loss.outputs
    mean = prior_mean(d, L, intercept)
    plain = PriorMean.zero(d, L, intercept)
    r = len(mean.spread)
    losses, sizes = Bound(0.4, 7), Bound(1.0, WIDE_CELLS, acute=True)
    candidates = [np.array(each) for each in ([0.0, 1, 1, 2, 0, 2], [0.0, 0.5, 2, 0.1, 0, 1])]
    candidates += [np.array(each) for each in ([0.3, 1.0, 0, 2, math.inf, 4], [1.0, 1, 0, 0, 1, 1])]
    candidates.append(np.array([1.0, 1, 1, 1, 0, 0]))
    common = {
        "within": Bound(0.6, d * L + d**2),
        "sizes": Bound(math.sqrt(2.0 * (1 + intercept)), COMMON_CELLS * (1 + intercept), acute=True),
    }
    short = common | {"within": Bound(DIRECTION_ONLY, d * L + 1)}
    if intercept:
        common["between"] = Bound(0.3, (1 + r) * L + (1 + r) ** 2)
        short["between"] = Bound(0.3, L + 1)
    moments = {"moments": Bound(DIRECTION_ONLY, d**2)}
    gradient = {"step": Bound(0.7, gradient_size(d, k)), "sizes": SIZES}
    tight = {"step": Bound(2.0**-40, gradient_size(d, k)), "sizes": SIZES}
    asked: dict[str, tuple[Any, dict[str, Bound]]] = {
        "pairs": (Encoded(PairMoments(whitened, intercept), loss.classes), moments),
        "residuals": (Encoded(ResidualMoments(U, scaled, 0.02, intercept), loss.classes), moments),
        "power": (Encoded(PowerStep(U, scaled, intercept), loss.classes), {"image": Bound(DIRECTION_ONLY, d * k)}),
        "left, pairs": (LabelResidual(PairMoments(whitened, intercept), mean, loss, 0.7), moments),
        "left, power": (
            LabelResidual(PowerStep(U, scaled, intercept), plain, loss, 2.0),
            {"image": Bound(DIRECTION_ONLY, d * k)},
        ),
        "gradient": (ClassGradient(U, scaled, 0.3, 0.5, intercept, loss, plain, 1.0), gradient),
        "gradient, whitened": (ClassGradient(U, whitened, 0.3, 1e-6, intercept, loss, mean, 0.0), tight),
        "common, whitened": (LabelGradient(mean, whitened, loss, matrix, 1.5, 4.0, 0.4, 0.2, True), common),
        "common": (LabelGradient(plain, scaled, loss, np.zeros((d, 0)), 0.5, 2.0, 0.4, 0.2, False), short),
        "losses": (
            LabelLosses(mean, matrix, np.eye(d), *candidates, loss, 1.0, 0.1),
            {"losses": losses, "sizes": sizes, "votes": Bound(1.0, 6, acute=True)},
        ),
        "trust": (LabelTrust(mean, matrix, True, 1.0, loss, 1.1, 0.9), {"trust": Bound(2.0, 4)}),
        "votes": (
            LabelVotes(mean, matrix, False, 1.0, np.linspace(0.5, 2, d), loss),
            {"votes": Bound(1.0, 2, acute=True)},
        ),
    }
    return {name: (Labelled(step, loss.classes), bounds) for name, (step, bounds) in asked.items()}


pytestmark = pytest.mark.usefixtures("as_the_engines_call_steps")


@pytest.mark.parametrize(
    ("loss", "intercept", "rows", "dtype"),
    [
        (LOSSES[0], True, 10, np.float64),
        (LOSSES[0], False, 3, np.float32),
        (LOSSES[1], True, 10, np.float32),
        (LOSSES[1], False, 1, np.float64),
        (LOSSES[2], False, 10, np.float64),
        (LOSSES[3], True, 4, np.float64),
        (Loss("log", 9), True, 1, np.float64),  # sums of eight numbers and more may be added in another order
    ],
)
def test_contributions_do_not_depend_on_the_others(loss: Loss, intercept: bool, rows: int, dtype: type) -> None:
    X, y = crowd(rows, dtype, 1, np.random.default_rng([rows, loss.classes]))
    for step, _ in steps_of(loss, 17, 3, intercept).values():
        assert_alone_as_in_company(step, functools.partial(chosen, X, y))


@pytest.mark.parametrize(("loss", "intercept"), [(LOSSES[0], True), (LOSSES[1], False)])
def test_nor_do_those_with_many_rows(loss: Loss, intercept: bool) -> None:
    """Many enough that users' own classifiers are fitted in another way."""
    X, y = crowd(MANY_ROWS * 17, np.float32, 1, np.random.default_rng(loss.classes))
    step, _ = steps_of(loss, 17, 3, intercept)["votes"]
    assert_alone_as_in_company(step, functools.partial(chosen, X, y))


@pytest.mark.parametrize("loss", LOSSES[:2])
def test_nor_do_losses_by_slopes_in_fewer_features_than_rows(loss: Loss) -> None:
    X, y = crowd(25, np.float64, 1, np.random.default_rng(loss.classes))
    step, _ = steps_of(loss, 17, 3, True)["losses"]
    assert_alone_as_in_company(step, functools.partial(chosen, X, y))


@pytest.mark.parametrize(("loss", "rows", "dtype"), [(LOSSES[0], 10, np.float32), (LOSSES[1], 3, np.float64)])
def test_nor_do_those_of_sparse_rows(loss: Loss, rows: int, dtype: type) -> None:
    matrix, y = sparse_crowd("few entries", rows, dtype, np.random.default_rng([rows, loss.classes]))
    for name, (step, _) in steps_of(loss, 17, 3, True).items():
        if step.spec.accepts_sparse and "whitened" not in name:
            assert_alone_as_in_company(step, functools.partial(chosen_sparse, matrix, y, rows))


@pytest.mark.parametrize(("loss", "intercept"), list(zip(LOSSES, [True, False, False, True], strict=True)))
def test_replacing_and_removing_a_user(loss: Loss, intercept: bool, tmp_path: Path) -> None:
    every = Every(steps_of(loss, D, K, intercept))

    @settings(max_examples=20, phases=PHASES)
    @given(st.data(), st.sampled_from([np.float64, np.float32]))
    def changed(data: st.DataObject, dtype: type) -> None:
        users = data.draw(st.lists(user(dtype, False), min_size=1, max_size=6))
        position = data.draw(st.integers(0, len(users) - 1))
        replaced = [*users[:position], data.draw(user(dtype, False)), *users[position + 1 :]]
        removed = [*users[:position], *users[position + 1 :]]
        here, there, without = (
            InMemoryUsers(table_of(u, dtype), Performance(2)).sums(every, every.bounds())
            for u in (users, replaced, removed)
        )
        assert_within(here, there, REPLACE)
        assert_within(here, without, ADD)

    changed()


def test_levels_that_vary_beyond_measure_do_not_stop_a_pass() -> None:
    """A system of more rows than are eliminated by hand would be singular, which one user must not tell by an error."""
    d, rng = 40, np.random.default_rng(0)
    step = LabelTrust(PriorMean.zero(d, 1, True), 0.1 * np.eye(d), True, 1e20, Loss("log", 2), 1.0, 1.0)
    X = rng.standard_normal((1, 36, d))
    sent = step(UserBatch(X, np.zeros((1, 36))))["trust"]
    assert np.isfinite(sent.norms()).all()
