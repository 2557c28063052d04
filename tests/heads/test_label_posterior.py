"""Heads of classifiers as posterior means: against quadrature, against fits without a label, in both spaces."""

from __future__ import annotations

import math

import numpy as np
import pytest

from privrep.heads.label_modes import find_mode, leave_out
from privrep.heads.label_posterior import find_trust, fit_label_heads, fit_labels, moderate, stretch
from privrep.heads.label_spaces import CoordinateSpace, LabelRows, RowSpace
from privrep.local.least_squares import move_users_last
from privrep.local.losses import Loss
from privrep.local.prior import LabelPrior, PriorMean

TWO = Loss("log", 2)


def patterns(rows: int) -> np.ndarray:
    """Return labels of users with 0, 1, ..., `rows` ones."""
    return (np.arange(rows) < np.arange(rows + 1)[:, None]).astype(np.float64)


def exact(y: np.ndarray, level: float, deviation: float) -> np.ndarray:
    """Return the probability of another one, by quadrature over a user's level."""
    b = level + deviation * np.linspace(-8, 8, 4001)
    weight = np.exp(-(np.linspace(-8, 8, 4001) ** 2) / 2)
    p = 1 / (1 + np.exp(-b))
    ones = y.sum(axis=1)[:, None]
    likelihood = weight * p**ones * (1 - p) ** (y.shape[1] - ones)
    return (likelihood * p).sum(axis=1) / likelihood.sum(axis=1)


@pytest.mark.parametrize(
    ("level", "deviation", "rows"), [(0.0, 1.0, 3), (-2.0, 2.0, 2), (-1.0, 0.5, 10), (1.0, 2.0, 30)]
)
def test_probabilities_are_those_of_quadrature(level: float, deviation: float, rows: int) -> None:
    y = patterns(rows)
    users = len(y)
    offset, images = np.full((users, rows, 1), level), np.zeros((users, rows, 0))
    fits = fit_labels(offset, images, y, TWO, np.array([deviation**2]), covariance=True)
    assert fits.covariance is not None
    outputs = moderate((level + fits.level).T, fits.covariance[:, 0, 0, 0][None], TWO)[0]
    assert 1 / (1 + np.exp(-outputs)) == pytest.approx(exact(y, level, deviation), abs=0.035)
    wrong = 1 / (1 + np.exp(-(level + 0 * outputs)))  # the prior's own
    assert np.abs(wrong - exact(y, level, deviation)).max() > 0.08


def random_users(rows: int, width: int, classes: int = 2) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    rng = np.random.default_rng([rows, width, classes])
    outputs = 1 if classes == 2 else classes
    offset = 0.3 * rng.normal(size=(40, rows, outputs))
    return offset, rng.normal(size=(40, rows, width)), rng.integers(0, classes, size=(40, rows)).astype(np.float64)


@pytest.mark.parametrize("classes", [2, 3])
@pytest.mark.parametrize("rows", [8, 12])
def test_both_spaces_give_the_same(classes: int, rows: int) -> None:
    offset, images, y = random_users(rows, rows - 1, classes)  # as many rows as coordinates and the level
    loss = Loss("log", classes)
    start, signs, level = move_users_last(offset), loss.signs(y), np.linspace(0.5, 1.0, loss.outputs)
    every = np.arange(rows)
    by_rows = LabelRows.of(images).with_prior(0.7, level)
    assert isinstance(by_rows, RowSpace)
    by_coordinates = CoordinateSpace(level, every, move_users_last(images) * math.sqrt(0.7))
    for steady in (True, False):
        modes = [find_mode(space, start, signs, start, loss, steady) for space in (by_rows, by_coordinates)]
        for name in ("outputs", "variance", "dual"):
            first, second = (getattr(mode, name) for mode in modes)
            assert first == pytest.approx(second, abs=1e-5)  # W is nowhere below FLATTEST in rows
        for first, second in zip(*(leave_out(mode.space, start, mode) for mode in modes), strict=True):
            assert first == pytest.approx(second, abs=1e-5)


@pytest.mark.parametrize(("rows", "width"), [(20, 30), (20, 8)])
@pytest.mark.parametrize("classes", [2, 3])
def test_one_system_for_several_steps_finds_the_same_mode(classes: int, rows: int, width: int) -> None:
    offset, images, y = random_users(rows, width, classes)
    loss = Loss("log", classes)
    start, signs, level = move_users_last(offset), loss.signs(y), np.ones(loss.outputs)
    space = LabelRows.of(images).with_prior(1 / width, level)
    found = leave_out(space, start, find_mode(space, start, signs, start, loss, steady=True))
    exact = leave_out(space, start, find_mode(space, start, signs, None, loss))
    outputs, variance = (np.abs(a - b).max() for a, b in zip(found, exact, strict=True))
    assert outputs < 0.03
    assert variance < 0.03
    far = leave_out(space, start, find_mode(space, start, -signs, None, loss))
    assert np.abs(far[0] - exact[0]).max() > 0.5


def test_users_too_large_to_count_with_keep_their_level() -> None:
    offset, images, y = random_users(9, 12)
    level = np.array([0.5])
    images[0] *= 1e9
    fits = fit_labels(offset, images, y, TWO, level)
    images[0] = 0.0
    assert np.array_equal(fits.left, fit_labels(offset, images, y, TWO, level).left)


def test_a_label_left_out_is_a_fit_without_it() -> None:
    """To first order for many rows, whose labels say little each."""
    offset, images, y = random_users(12, 2)
    level = np.array([0.5])
    fits = fit_labels(offset, images, y, TWO, level)
    without = y.copy()
    without[:, 3] = -1  # of no class
    refitted = fit_labels(offset, images, without, TWO, level)
    line = offset[:, 3, 0] + refitted.level[:, 0] + np.einsum("up,up->u", refitted.coordinates[:, 0], images[:, 3])
    assert fits.left[0, 3] == pytest.approx(line, abs=0.35)
    whole = offset[:, 3, 0] + fits.level[:, 0] + np.einsum("up,up->u", fits.coordinates[:, 0], images[:, 3])
    assert np.abs(line - whole).mean() > 3 * np.abs(line - fits.left[0, 3]).mean()


def test_users_with_few_rows_are_fitted_anew() -> None:
    offset, images, y = random_users(3, 2)
    level = np.array([4.0])
    fits = fit_labels(offset, images, y, TWO, level)
    without = y.copy()
    without[:, 0] = -1
    refitted = fit_labels(offset, images, without, TWO, level)
    line = offset[:, 0, 0] + refitted.level[:, 0] + np.einsum("up,up->u", refitted.coordinates[:, 0], images[:, 0])
    assert fits.left[0, 0] == pytest.approx(line, abs=1e-3)


def test_what_is_left_to_doubt_makes_probabilities_even() -> None:
    outputs = np.array([[3.0, 3.0, 3.0]])
    found = moderate(outputs, np.array([[0.0, 1.0, 10.0]]), TWO)
    assert found[0, 0] == 3.0
    assert (np.diff(found[0]) < 0).all()
    assert moderate(outputs, np.array([[5.0, 5.0, 5.0]]), Loss("hinge", 2)) is outputs
    three = find_trust(np.array([[1.0], [2.0], [3.0]]))
    assert three.shape == (1,)  # one factor for all outputs of a row: the largest stays the largest


def test_a_stretched_mean_keeps_probabilities() -> None:
    rng = np.random.default_rng(3)
    levels = rng.normal(size=200_000)
    before = (1 / (1 + np.exp(-(-1.5 + 0.5 * levels)))).mean()
    after = (1 / (1 + np.exp(-(-1.5 * stretch(0.25, 4.0) + 2.0 * levels)))).mean()
    assert after == pytest.approx(before, abs=0.02)
    assert abs((1 / (1 + np.exp(-(-1.5 + 2.0 * levels)))).mean() - before) > 0.05


def test_users_without_rows_have_the_prior_mean_and_wild_ones_are_no_trouble() -> None:
    mean = PriorMean.zero(2, 1, True)
    prior = LabelPrior(mean, np.eye(2), False, 1.0, 1.0, 1.0, True)
    X = np.full((2, 3, 2), 1e300)
    X[1] = 0.1
    with np.errstate(all="ignore"):
        heads = fit_label_heads(X, np.ones((2, 3)), prior, TWO)
    assert np.isfinite(heads.intercept[1]).all()
    assert heads.intercept[1, 0] > 0  # all labels are ones
