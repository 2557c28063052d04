"""The steps that find the prior of heads, held to what every local step is: alone as in company, to the last bit."""

from __future__ import annotations

import functools
import itertools
from dataclasses import replace

import numpy as np
import pytest
from asking import ADD, D, Every, K, assert_within, make_user, table_of
from panel import panel_questions, prior_mean
from test_alone_in_a_crowd import assert_alone_as_in_company, chosen, chosen_sparse, crowd, numbers, sparse_crowd

from privrep.errors import InputError
from privrep.federated.wire.step_codec import decode, encode
from privrep.linear.panel_steps import Residual
from privrep.linear.steps import PairMoments
from privrep.local.transform import FeatureTransform
from privrep.privacy.protocol import UserBatch
from privrep.users.memory import InMemoryUsers
from privrep.users.performance import Performance

NAMES = tuple(panel_questions(17, 3, True))
SPARSE = tuple(panel_questions(17, 3, True, sparse=True))
SHAPES = [
    (1, np.float64, 1, True), (1, np.float32, 3, True), (2, np.float32, 1, True), (2, np.float64, 2, False),
    (3, np.float64, 1, True), (5, np.float64, 9, True), (10, np.float32, 3, False), (10, np.float32, 3, True),
    (17, np.float64, 1, False), (33, np.float64, 1, True), (70, np.float32, 2, True),
]  # fmt: skip


pytestmark = pytest.mark.usefixtures("as_the_engines_call_steps")


def strange_crowd(rows: int, dtype: type, targets: int, rng: np.random.Generator) -> tuple[np.ndarray, np.ndarray]:
    """A crowd some of whose users have constant rows, rows of nothing, enormous or tiny ones."""
    X, y = crowd(rows, dtype, targets, rng)
    X[2::7] = X[2::7, :1]
    X[4::7, :, ::2] = 0.0
    X[5], X[6], y[7], y[8] = 0.0, X[6] * dtype(1e18), y[7] * dtype(1e18), y[8] * dtype(1e-25)
    X[9] *= dtype(1e-30)
    return X, y


@pytest.mark.parametrize(("rows", "dtype", "targets", "intercept"), SHAPES)
@pytest.mark.parametrize("name", NAMES)
def test_contributions_do_not_depend_on_the_others(
    name: str, rows: int, dtype: type, targets: int, intercept: bool
) -> None:
    X, y = strange_crowd(rows, dtype, targets, np.random.default_rng([rows, len(name)]))
    step, _ = panel_questions(17, 3, intercept, targets)[name]
    assert_alone_as_in_company(step, functools.partial(chosen, X, y))


@pytest.mark.parametrize(("rows", "dtype", "targets", "intercept"), SHAPES)
@pytest.mark.parametrize("name", SPARSE)
def test_nor_do_those_of_sparse_rows(name: str, rows: int, dtype: type, targets: int, intercept: bool) -> None:
    rng = np.random.default_rng([rows, len(name)])
    matrix, y = sparse_crowd("one-hot" if rows == 10 else "few entries", rows, dtype, rng)
    y = y if targets == 1 else crowd(rows, dtype, targets, rng)[1]
    step, _ = panel_questions(17, 3, intercept, targets, sparse=True)[name]
    assert_alone_as_in_company(step, functools.partial(chosen_sparse, matrix, y, rows))


# Nobody stops the others


def far_along_the_factor(rows: int, size: float, seed: int) -> tuple[np.ndarray, np.ndarray]:
    """A user whose rows are almost one and the same, far from the centre: all of a level's weight cancels."""
    rng = np.random.default_rng(seed)
    return size * (rng.normal(size=D) + 10.0 ** rng.uniform(-12, -1) * rng.normal(size=(rows, D))), rng.normal(
        size=rows
    )


@pytest.mark.parametrize("size", [1e3, 3e4, 1e6, 1e8])
def test_rows_far_along_the_factor_stop_nobody(size: float) -> None:
    asked = {name: each for name, each in panel_questions(D, K, True).items() if not name.startswith("level cells")}
    every = Every(asked)
    rest = [make_user("normal", 6, seed, None, np.float64) for seed in range(3)]
    without = InMemoryUsers(table_of(rest, np.float64), Performance(1)).sums(every, every.bounds())
    for seed in range(40):
        users = [*rest, far_along_the_factor(3 + seed % 30, size, seed)]
        found = InMemoryUsers(table_of(users, np.float64), Performance(1)).sums(every, every.bounds())
        assert_within(found, without, ADD)


# A sender that lies about shapes


@pytest.mark.parametrize("targets", [1, 4])
def test_no_array_of_another_shape_lays_users_over_each_other(targets: int) -> None:
    """As many users as rows, features and targets: whatever can be spread over an axis could be over any other."""
    size = 4
    rng = np.random.default_rng(targets)
    X, y = rng.normal(size=(size, size, size)), rng.normal(size=(size, size, targets))
    y = y[:, :, 0] if targets == 1 else y
    refused = taken = 0
    for name, (step, _) in panel_questions(size, 2, True, targets).items():
        text, arrays = encode(step)
        for key, array in arrays.items():
            for shape in set(itertools.product((0, 1, 2, 4, 5), repeat=array.ndim)) - {array.shape}:
                try:
                    lie = decode(text, {**arrays, key: np.abs(rng.normal(size=shape))}, size, targets)
                    together = {part: numbers(sent, size) for part, sent in lie(UserBatch(X, y)).items()}
                except InputError:
                    refused += 1
                    continue
                except (ValueError, IndexError):  # of the step that a residual holds
                    assert name.startswith("residual")
                    continue
                taken += 1
                for user in range(size):
                    alone = lie(UserBatch(X[user : user + 1], y[user : user + 1]))
                    for part, sent in alone.items():
                        assert np.array_equal(numbers(sent, 1)[0], together[part][user], equal_nan=True), (name, shape)
    assert refused > 1000
    assert taken > 50  # other numbers of slopes, and what is spread over all features of one user


@pytest.mark.parametrize("field", ["level", "slopes", "context"])
def test_a_prior_mean_cannot_add_targets(field: str) -> None:
    mean = prior_mean(3, 1, True)
    wider = np.repeat(getattr(mean, field), 2, axis=-1)
    with pytest.raises(InputError, match="do not fit each other"):
        replace(mean, **{field: wider})
    rows = UserBatch(np.ones((2, 4, 3)), np.ones((2, 4)))
    for other in (prior_mean(3, 2, True), prior_mean(2, 1, True)):
        with pytest.raises(InputError, match="does not go with rows of 3 and 1"):
            Residual(PairMoments(FeatureTransform.plain(3), True), other)(rows)
