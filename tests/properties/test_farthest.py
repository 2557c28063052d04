"""Users who are as far apart as users can be: the stated sensitivity is reached, and never exceeded."""

from __future__ import annotations

import numpy as np
import pytest
from asking import (
    ADD,
    REPLACE,
    D,
    Every,
    K,
    Question,
    User,
    assert_within,
    make_user,
    questions,
    sparse_questions,
    sparse_table_of,
    table_of,
    taste_questions,
)

from privrep.linear.families import ERROR_CELLS, HeadErrors, HeadLosses
from privrep.linear.panel_steps import (
    LINEAR_CELLS,
    ROW_CELLS,
    SIGNED_CELLS,
    ColumnSizes,
    CommonGradient,
    LevelCells,
    PanelMoments,
)
from privrep.linear.spreads import HeadSpreads
from privrep.linear.steps import (
    WIDE_CELLS,
    LeaveOneOutGradient,
    PairMoments,
    PowerStep,
    ResidualMoments,
    gradient_size,
)
from privrep.local.prior import PriorMean
from privrep.local.transform import FeatureTransform
from privrep.privacy.bounds import DIRECTION_ONLY, Bound, BoundedSum
from privrep.users.memory import InMemoryUsers
from privrep.users.performance import Performance


def rated(items: list[int], ratings: list[float], d: int = D) -> User:
    return np.eye(d)[items], np.array(ratings)


def pair(first: list[float], signs: tuple[float, float] = (1.0, 1.0)) -> User:
    return np.array([first, first]), np.array(signs)


EAST, NORTH = [1.0, 0.0, 0.0], [0.0, 1.0, 0.0]
PLAIN = FeatureTransform.plain(D)
FIRST = np.eye(D)[:, :1]
GRADIENT = LeaveOneOutGradient(FIRST, PLAIN, 1e-6, 1e-3, False)
PULLED = np.array([[1.0, 1.0, 0.0], [1.0, 1.0, 0.0], [1.0, -1.0, 0.0], [1.0, -1.0, 0.0]])
ACROSS, LEFT_OVER = np.array([1.0, 1.0, -1.0, -1.0]), np.array([1.0, -1.0, 1.0, -1.0])  # nothing of one in the other
NEVER_OPPOSITE = {"means", "frequencies", "noise"}  # parts of them have no negative entries
ZERO_MEAN = PriorMean.zero(D, 1, True)
UNIT = np.ones(1)
WITHOUT = np.zeros((D, 0))
MOMENTS = PanelMoments(np.ones(D + 1), np.zeros(D + 1), np.ones(D + 1), True)
ERRORS = HeadErrors(ZERO_MEAN, WITHOUT, True, 1.0, UNIT, UNIT)
COMMON = CommonGradient(ZERO_MEAN, PLAIN, UNIT, WITHOUT, 1.0, 4.0, 1e-9, 1e-9, True)
LEVEL_OR_NOT = HeadLosses(
    ZERO_MEAN,
    WITHOUT,
    WITHOUT,
    np.zeros(2),
    np.zeros(2),
    np.array([0.0, np.inf]),
    np.ones(2),
    np.ones(2),
    UNIT,
    1e-9,
    True,
)
PACKED = (D + 2) ** 2
FARTHEST: dict[str, tuple[Question, User, User, bool]] = {
    "counts": (
        questions(D, K, False)["feature sizes"],
        (np.ones((2, D)), np.ones(2)),
        (np.full((2, D), 8.0), np.ones(2)),
        False,
    ),
    "row moments": (questions(D, K, False)["second moments"], pair(EAST), pair(NORTH), False),
    "pairs": (
        (PairMoments(PLAIN, False), {"moments": Bound(DIRECTION_ONLY, D**2)}),
        pair(EAST),
        pair(EAST, (1.0, -1.0)),
        False,
    ),
    "normalised pairs": (
        (PairMoments(PLAIN, False, True), {"moments": Bound(0.1, D**2)}),
        pair(EAST),
        pair(EAST, (1.0, -1.0)),
        False,
    ),
    "power": (
        (PowerStep(FIRST, PLAIN, False), {"image": Bound(DIRECTION_ONLY, D)}),
        pair(EAST),
        pair(EAST, (1.0, -1.0)),
        False,
    ),
    "gradient": (
        (GRADIENT, {"step": Bound(1e-6, gradient_size(D, 1))}),
        (PULLED, np.array([2.0, 2.0, 1.0, 1.0])),
        (PULLED, np.array([1.0, 1.0, 2.0, 2.0])),
        False,
    ),
    "residuals": (
        (ResidualMoments(FIRST, PLAIN, 1e-3, False), {"moments": Bound(DIRECTION_ONLY, D**2)}),
        (np.column_stack([ACROSS, LEFT_OVER, np.zeros(4)]), LEFT_OVER),
        (np.column_stack([ACROSS, np.ones(4), np.zeros(4)]), LEFT_OVER),
        False,
    ),
    "levels": (
        (ColumnSizes(True), {"levels": Bound(np.sqrt(D), D * SIGNED_CELLS, acute=True)}),
        (np.ones((2, D)), np.ones(2)),
        (-np.ones((3, D)), np.ones(3)),
        False,
    ),
    "target levels": (
        (ColumnSizes(True), {"target_levels": Bound(1.0, SIGNED_CELLS, acute=True)}),
        (np.ones((2, D)), np.ones(2)),
        (np.ones((2, D)), -np.ones(2)),
        False,
    ),
    "rows": (
        (ColumnSizes(True), {"rows": Bound(1.0, ROW_CELLS, acute=True)}),
        (np.ones((2, D)), np.ones(2)),
        (np.ones((9, D)), np.ones(9)),
        False,
    ),
    "level cells": (
        (
            LevelCells(np.full(D + 1, -4.0), np.full(D + 1, 0.5)),
            {"cells": Bound(np.sqrt(D + 1), (D + 1) * (LINEAR_CELLS + 2), acute=True)},
        ),
        (np.ones((2, D)), np.ones(2)),
        (np.full((3, D), 1e300), np.full(3, -1e300)),
        False,
    ),
    "moments within": (
        (MOMENTS, {"within": Bound(DIRECTION_ONLY, PACKED, acute=True)}),
        (np.array([EAST, [-1e6, 0.0, 0.0]]), np.zeros(2)),
        (np.array([NORTH, [0.0, -1e6, 0.0]]), np.zeros(2)),
        False,
    ),
    "moments between": (
        (MOMENTS, {"between": Bound(DIRECTION_ONLY, PACKED, acute=True)}),
        (np.array([[5.0, 0.0, 0.0]]), np.zeros(1)),
        (np.array([[-0.2, 3.0, 0.0]]), np.zeros(1)),
        False,
    ),
    "spreads": (
        (HeadSpreads(ZERO_MEAN, FIRST, UNIT), {"spreads": Bound(np.sqrt(5.0), 5 * WIDE_CELLS, acute=True)}),
        (np.vander(np.arange(6.0), D), np.array([3.0, 1.0, 4.0, 1.0, 5.0, 9.0])),
        (np.vander(np.arange(6.0), D), 1e3 * np.array([3.0, 1.0, 4.0, 1.0, 5.0, 9.0])),
        False,
    ),
    "tails": (
        (ERRORS, {"tails": Bound(0.5, 2 * ERROR_CELLS, acute=True)}),
        (np.ones((2, D)), np.array([1.0, -1.0])),
        (np.ones((2, D)), np.array([9.0, -9.0])),
        False,
    ),
    "noise": (
        (ERRORS, {"noise": Bound(0.5, 4, acute=True)}),
        (np.ones((1, D)), np.zeros(1)),
        (np.ones((2, D)), np.array([9e3, -9e3])),
        False,
    ),
    "common within": (
        (COMMON, {"within": Bound(1e-6, D + D**2)}),
        (PULLED, ACROSS),
        (PULLED, -ACROSS),
        False,
    ),
    "common between": (
        (COMMON, {"between": Bound(1e-6, 2)}),
        (PULLED, np.ones(4)),
        (PULLED, -np.ones(4)),
        False,
    ),
    "losses": (
        (LEVEL_OR_NOT, {"losses": Bound(1e-6, 3)}),
        (np.ones((2, D)), np.array([1.0, -1.0])),
        (np.ones((2, D)), np.array([1.0, 1.1])),
        False,
    ),
    "frequencies": (
        sparse_questions(D, K, False)["frequencies"],
        (np.array([[1e9, 0.0, 0.0]]), np.ones(1)),
        (np.array([[0.0, 1e9, 0.0]]), np.ones(1)),
        True,
    ),
    "pairs of items": (
        taste_questions(4, 1)["pairs of 4"],
        rated([0, 1], [0.0, 1.0], 4),
        rated([2, 3], [0.0, 1.0], 4),
        True,
    ),
    "rated items": (taste_questions(4, 1)["rated items"], rated([0, 1], [0.0, 1.0], 4), rated([2], [1.0], 4), True),
    "pull of items": (taste_questions(4, 1)["pull"], rated([0], [90.0], 4), rated([0], [-90.0], 4), True),
}


def moved_by(question: Question, one: User, other: User, thin: bool) -> tuple[float, BoundedSum]:
    """How far the sum moves when the second of three users is replaced, with its first statistic."""
    d = one[0].shape[1]
    make, third = (sparse_table_of if thin else table_of), (np.zeros((1, d)), np.ones(1))
    step, bounds = question
    here, there = (
        InMemoryUsers(make([third, u, third], np.float64, d), Performance(1)).sums(step, bounds) for u in (one, other)
    )
    key = next(iter(bounds))
    return float(np.linalg.norm(here[key].exact_numbers - there[key].exact_numbers)), here[key]


@pytest.mark.parametrize("name", FARTHEST)
def test_some_users_are_as_far_apart_as_is_stated(name: str) -> None:
    """Half the stated sensitivity would be too little, and for most kinds anything that is less than all of it."""
    question, one, other, thin = FARTHEST[name]
    moved, summed = moved_by(question, one, other, thin)
    stated = summed.sensitivity(REPLACE)
    assert 0.5 * stated < moved <= stated
    if name not in NEVER_OPPOSITE:
        assert moved > 0.99 * stated


ACUTE = [name for name, (question, *_) in FARTHEST.items() if all(bound.acute for bound in question[1].values())]


@pytest.mark.parametrize("name", [name for name in ACUTE if name not in NEVER_OPPOSITE])
def test_the_acute_kinds_need_the_root_of_two_and_no_more(name: str) -> None:
    question, one, other, thin = FARTHEST[name]
    assert all(bound.acute for bound in question[1].values())
    moved, summed = moved_by(question, one, other, thin)
    assert moved > 1.4 * summed.bound.norm  # of adding one: a bound without the root would be violated
    nothing = (one[0][:0], one[1][:0])
    alone, _ = moved_by(question, one, nothing, thin)
    assert alone <= summed.sensitivity(ADD)
    assert alone > 0.99 * summed.bound.norm


LONG = {
    "zero": (np.zeros((5, D)), np.zeros(5)),
    "one row": (np.ones((1, D)), np.ones(1)),
    "huge": (np.full((4, D), 1e30), np.full(4, -1e30)),
    "tiny": (np.full((4, D), 1e-30), np.array([1e-30, -1e-30, 0.0, 1e-30])),
    "not a number": (np.full((3, D), np.nan), np.ones(3)),
    "infinite": (np.ones((3, D)), np.array([1.0, np.inf, 0.0])),
    "constant targets": (np.random.default_rng(1).normal(size=(9, D)), np.full(9, 0.1)),
    "a thousand rows": (np.random.default_rng(2).normal(size=(1000, D)), np.random.default_rng(3).normal(size=1000)),
    "a thousand others": (-np.random.default_rng(4).normal(size=(1000, D)), np.tile([1.0, -1.0], 500)),
    "east": pair(EAST),
    "against east": pair(EAST, (1.0, -1.0)),
    "raters": rated([0, 1, 2, 0], [1.0, 5.0, 3.0, 2.0]),
    "others": rated([2, 1, 0, 2], [1.0, -5.0, 3.0, 2.0]),
}


@pytest.mark.parametrize("thin", [False, True])
def test_any_user_in_place_of_any_other(thin: bool) -> None:
    make = sparse_table_of if thin else table_of
    rest = [make_user("normal", 6, seed, None, np.float64) for seed in range(3)]
    for intercept in (True, False):
        asked = sparse_questions(D, K, intercept) | taste_questions(D, 1) if thin else questions(D, K, intercept)
        every = Every(asked)
        sums = [
            InMemoryUsers(make([*rest, someone], np.float64), Performance(1)).sums(every, every.bounds())
            for someone in LONG.values()
        ]
        without = InMemoryUsers(make(rest, np.float64), Performance(1)).sums(every, every.bounds())
        for here in sums:
            assert_within(here, without, ADD)
            for there in sums:
                assert_within(here, there, REPLACE)
