"""What steps of labels tell together of level, slopes and contexts."""

from __future__ import annotations

import numpy as np
import pytest

from privrep.linear.gathering import Coordinates, Gathered, Heard, Outputs
from privrep.linear.norms import choose_norm
from privrep.linear.steps import WIDE_CELLS, WIDE_LOWEST
from privrep.local.prior import PriorMean
from privrep.local.transform import FeatureTransform

D, R, ROWS = 5, 4, 3.0


def coordinates_of(rng: np.random.Generator, q: int = 1) -> tuple[Coordinates, PriorMean]:
    """Return coordinates of five features, of which the last does not vary within users, and a mean in them."""
    axes = np.zeros((D, R))
    axes[[0, 1, 2, 4], np.arange(R)] = [1.0, 0.5, 2.0, 1.0]
    spread = np.array([0.5, 1.0, 2.0, 400.0])
    slopes = rng.normal(0, 0.3, (D, q))
    slopes[4] = 0.0
    parts = rng.normal(0, 1, q), slopes, rng.normal(0, 1, D), np.array([1.0, 1, 1, 0, 1]), axes, spread
    mean = PriorMean(*parts, rng.normal(0, 0.3, (R, q)), intercept=True)
    transform = FeatureTransform(np.array([1.0, 2.0, 0.5, 1.0, 1.0]), np.eye(D) + 0.1)
    return Coordinates.of(mean, transform, ROWS), mean


def test_parameters_and_back() -> None:
    coordinates, mean = coordinates_of(np.random.default_rng(0), q=3)
    again = coordinates.mean_of(coordinates.parameters(mean), mean, np.arange(D) < 4)
    for name in ("level", "slopes", "context"):
        assert np.allclose(getattr(again, name), getattr(mean, name))


def observe(
    known: Gathered, coordinates: Coordinates, truth: np.ndarray, here: np.ndarray, sigma: float, size: float = 2000.0
) -> Gathered:
    """Return what is known after a step on a quadratic whose best parameters are `truth`; without noise."""
    within, between = size * np.eye(D), size * np.eye(1 + R)
    H = coordinates.curvature(within, between)
    gradient = H @ (truth - here)
    return known.add_step(Heard(gradient[:D], within, sigma), Heard(gradient[D:], between, sigma), here, coordinates)


def test_one_step_finds_the_best_parameters_where_noise_is_small() -> None:
    coordinates, mean = coordinates_of(np.random.default_rng(1))
    truth = coordinates.parameters(mean)
    start = np.zeros_like(truth)
    found, moved = observe(Gathered.nothing(start), coordinates, truth, start, 1e-3, 1e6).best(coordinates, np.ones(1))
    assert moved
    assert np.abs(found - truth).max() < 0.02


def test_gradients_that_share_a_cross_curvature_are_not_counted_twice() -> None:
    """Without the curvature between slopes and means' slopes the step would go too far."""
    coordinates, mean = coordinates_of(np.random.default_rng(1))
    truth = coordinates.parameters(mean)
    H = coordinates.curvature(np.eye(D), np.eye(1 + R))
    gradient = H @ truth
    assert np.abs(gradient - truth).max() > 0.1  # what blocks by themselves would take for the step


def test_contexts_that_noise_could_make_are_none() -> None:
    """Slopes of rows and of users' means are then the same: a mean of both, by what each tells."""
    rng = np.random.default_rng(2)
    coordinates, mean = coordinates_of(rng)
    truth = coordinates.parameters(mean)
    start = np.linalg.solve(coordinates.turn, truth)
    start[D + 1 :][~coordinates.lasting] = 0.02 * rng.standard_normal((3, 1))  # sampling noise has 1 / sqrt(400) = 0.05
    truth = coordinates.turn @ start
    zero = np.zeros_like(truth)
    found, _ = observe(Gathered.nothing(zero), coordinates, truth, zero, 0.1, 400.0).best(coordinates, np.ones(1))
    contexts = np.linalg.solve(coordinates.turn, found)[D + 1 :]
    assert np.abs(contexts[~coordinates.lasting]).max() < 0.008
    assert abs(contexts[coordinates.lasting] - start[D + 1 :][coordinates.lasting]).max() < 0.05


def test_contexts_that_stand_out_stay() -> None:
    coordinates, mean = coordinates_of(np.random.default_rng(3))
    truth, zero = coordinates.parameters(mean), np.zeros((D + 1 + R, 1))
    found, _ = observe(Gathered.nothing(zero), coordinates, truth, zero, 0.1).best(coordinates, np.ones(1))
    wanted, got = (np.linalg.solve(coordinates.turn, each)[D + 1 :] for each in (truth, found))
    assert np.abs(wanted).max() > 0.2
    assert np.abs(got - wanted).max() < 0.06


def test_earlier_steps_count_by_their_precision() -> None:
    coordinates, mean = coordinates_of(np.random.default_rng(4))
    truth, zero = coordinates.parameters(mean), np.zeros((D + 1 + R, 1))
    once = observe(Gathered.nothing(zero), coordinates, truth, zero, 50.0)
    twice = observe(once, coordinates, truth, truth, 50.0)
    assert np.allclose(twice.precision, 2 * once.precision)
    assert np.allclose(np.linalg.solve(twice.precision, twice.told), truth)


def test_earlier_steps_that_disagree_count_less() -> None:
    coordinates, mean = coordinates_of(np.random.default_rng(5))
    truth, zero = coordinates.parameters(mean), np.zeros((D + 1 + R, 1))
    wrong = observe(Gathered.nothing(zero), coordinates, truth + 1.0, zero, 1.0)
    mended = observe(wrong, coordinates, truth, zero, 1.0)
    assert np.abs(np.linalg.solve(mended.precision, mended.told) - truth).max() < 0.01


def test_a_stretched_mean_takes_what_is_known_with_it() -> None:
    coordinates, mean = coordinates_of(np.random.default_rng(6))
    truth, zero = coordinates.parameters(mean), np.zeros((D + 1 + R, 1))
    known = observe(Gathered.nothing(zero), coordinates, truth, zero, 1.0).rescale(3.0, coordinates)
    assert np.allclose(np.linalg.solve(known.precision, known.told), coordinates.parameters(mean.scale_levels(3.0)))


def test_nothing_heard_leaves_the_first_parameters() -> None:
    coordinates, mean = coordinates_of(np.random.default_rng(7))
    first = coordinates.parameters(mean)
    silent = Heard(np.zeros((D, 1)), np.zeros((D, D)), 1.0), Heard(np.zeros((1 + R, 1)), np.zeros((1 + R, 1 + R)), 1.0)
    found, moved = Gathered.nothing(first).add_step(*silent, first, coordinates).best(coordinates, np.ones(1))
    assert not moved
    assert np.array_equal(found, first)


def test_outputs_that_vary_along_one_direction_share_its_strength() -> None:
    """Four outputs, one direction: what noise adds along the others is left out. Seeds are fixed, nothing is drawn."""
    rng = np.random.default_rng(8)
    coordinates, _ = coordinates_of(rng, q=4)
    p = D + 1 + R
    truth = np.outer(rng.normal(0, 0.6, p), np.array([-1.5, -0.5, 0.5, 1.5]))
    zero, sigma, size = np.zeros_like(truth), 300.0, 2000.0
    H = coordinates.curvature(size * np.eye(D), size * np.eye(1 + R))
    gradient = H @ truth + sigma * rng.standard_normal(truth.shape)
    heard = Heard(gradient[:D], size * np.eye(D), sigma), Heard(gradient[D:], size * np.eye(1 + R), sigma)
    found, _ = Gathered.nothing(zero).add_step(*heard, zero, coordinates).best(coordinates, np.ones(4))
    plain = np.linalg.solve(H, gradient)
    slopes = slice(0, D)
    assert np.linalg.norm((found - truth)[slopes]) < 0.75 * np.linalg.norm((plain - truth)[slopes])


def test_outputs_of_frequent_classes_bend_more() -> None:
    """Newton's step along turned outputs finds what softmax, bent by diag(p) - p p^T, has its gradient from."""
    rng = np.random.default_rng(9)
    level = np.log([0.7, 0.2, 0.06, 0.04])
    p = np.exp(level)
    bend = np.diag(p) - np.outer(p, p)
    truth = rng.normal(0, 1, (D, 4))
    truth -= truth.mean(axis=1, keepdims=True)
    outputs = Outputs.of(level, several=True)
    mean = np.trace(bend) / 3  # of a class's curvature, times c / (c - 1), as losses have it
    found = outputs.back(truth @ bend @ outputs.turn / mean)
    assert np.allclose(found, truth)
    assert np.allclose(outputs.back(outputs.to(truth)), truth)
    assert outputs.bend.max() > 2 * outputs.bend.min()
    assert np.array_equal(Outputs.of(level, several=False).to(truth), truth)


@pytest.mark.parametrize("rare", [400.0, 0.0])
def test_norms_of_losses_leave_room_for_the_few_who_decide(rare: float) -> None:
    """Users with the rarer label lose most: where their cell stands out from noise it is not cut off."""
    counts = np.zeros(WIDE_CELLS)
    peak = -4 - WIDE_LOWEST  # norms of 1/16
    counts[peak], counts[peak + 5] = 10_000.0, rare
    norm = choose_norm(counts, 100.0, 1e-2, 3, 4.0)
    assert norm is not None
    assert (norm >= 1.0) == (rare > 0)
