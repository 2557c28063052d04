"""Gradients of similarities, clipped one by one: against the formula, against differences, and row by hostile row."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from clipping import add_up, clip_to_numbers
from privrep.errors import InputError
from privrep.privacy.bounds import Bound
from privrep.privacy.similarities import LEAST_SINE, Similarities, count_changed_terms

D1, D2, K = 5, 4, 3
SIZE = K * (D1 + D2)
RNG = np.random.default_rng(0)
G1, G2 = RNG.normal(size=(K, D1)), RNG.normal(size=(K, D2))


def of(x: Any, t: Any, slopes: Any = None, one: Any = G1, other: Any = G2, **more: Any) -> Similarities:
    """What a step makes of a batch; a row of zeros is absent."""
    a, b = x @ one.T, t @ other.T
    lengths, others = np.linalg.norm(a, axis=1), np.linalg.norm(b, axis=1)
    with np.errstate(all="ignore"):
        u = np.where(lengths[:, None] > 0, a / lengths[:, None], 0)
        v = np.where(others[:, None] > 0, b / others[:, None], 0)
    if slopes is None:
        slopes = 1 / (1 + np.exp(-3 * u @ v.T)) - np.eye(len(x))
    return Similarities(x, t, u, v, lengths, others, slopes, **more)


def batch(rows: int, seed: int = 1) -> tuple[np.ndarray, np.ndarray]:
    rng = np.random.default_rng(seed)
    return rng.normal(size=(rows, D1)), rng.normal(size=(rows, D2))


def terms(sims: Similarities) -> np.ndarray:
    """All terms, (b, b, size), by the formula."""
    found = np.zeros((len(sims.x), len(sims.x), SIZE))
    for i, (u, x) in enumerate(zip(sims.left, sims.x, strict=True)):
        for j, (v, t) in enumerate(zip(sims.right, sims.t, strict=True)):
            s = u @ v
            first = np.outer(v - s * u, x) / sims.left_lengths[i]
            second = np.outer(u - s * v, t) / sims.right_lengths[j]
            found[i, j] = sims.slopes[i, j] * np.concatenate([first.ravel(), second.ravel()])
    return found


def test_sums_and_norms_are_those_of_the_formula() -> None:
    sims = of(*batch(7))
    exact = terms(sims)
    lengths = np.linalg.norm(exact, axis=2).ravel()
    assert add_up(sims, np.ones(49)) == pytest.approx(exact.sum(axis=(0, 1)), rel=1e-12, abs=1e-13)
    weights = RNG.random(49) * (RNG.random(49) < 0.7)
    expected = (weights.reshape(7, 7, 1) * exact).sum(axis=(0, 1))
    assert add_up(sims, weights) == pytest.approx(expected, rel=1e-12, abs=1e-13)
    assert (sims.norms() >= lengths).all()
    sines = np.sqrt(np.maximum(1 - (sims.left @ sims.right.T).ravel() ** 2, 0))
    assert sims.norms()[sines > LEAST_SINE] == pytest.approx(lengths[sines > LEAST_SINE], rel=1e-6)
    assert (sims.norms() <= lengths / np.minimum(1, sines / LEAST_SINE) * 1.001).all()


def test_the_sum_is_the_gradient_of_the_similarities() -> None:
    x, t = batch(4)
    slopes = RNG.normal(size=(4, 4))
    found = add_up(of(x, t, slopes), np.ones(16))

    def value(parameters: np.ndarray) -> float:
        one, other = parameters[: K * D1].reshape(K, D1), parameters[K * D1 :].reshape(K, D2)
        sims = of(x, t, slopes, one, other)
        return float((slopes * (sims.left @ sims.right.T)).sum())

    at, h = np.concatenate([G1.ravel(), G2.ravel()]), 1e-6
    numeric = [(value(at + h * e) - value(at - h * e)) / (2 * h) for e in np.eye(SIZE)]
    assert found == pytest.approx(np.array(numeric), rel=1e-6, abs=1e-7)
    assert np.linalg.norm(found) > 0.1


def test_directions_that_nearly_agree_are_not_underestimated() -> None:
    x, t = batch(5)
    sims = of(x, t)
    for angle in (0.0, 1e-9, 1e-6, 1e-3, 0.05):
        turned = sims.left + angle * np.random.default_rng(2).normal(size=sims.left.shape)
        near = replace(sims, right=turned / np.linalg.norm(turned, axis=1)[:, None])
        assert (near.norms() >= np.linalg.norm(terms(near), axis=2).ravel()).all()


def test_every_term_is_clipped_and_those_of_the_diagonal_less() -> None:
    x, t = batch(6)
    for repeat in (1.0, 5.0):
        sims = of(x, t, 10 * RNG.normal(size=(6, 6)), repeat=repeat)
        exact, bound = terms(sims), 0.3
        lengths = np.linalg.norm(exact, axis=2)
        allowed = np.where(np.eye(6, dtype=bool), repeat * bound, bound)
        expected = (exact * np.minimum(1, allowed / lengths)[:, :, None]).sum(axis=(0, 1))
        total = clip_to_numbers(sims, Bound(bound, SIZE, terms_per_user=sims.terms_per_user))
        assert total == pytest.approx(expected, rel=1e-6, abs=1e-7)


@pytest.mark.parametrize(("rows", "mine", "repeat"), [(6, 1, 1.0), (6, 2, 3.0), (6, 6, 2.0), (6, 3, 1.5)])
def test_the_terms_that_a_user_can_change_are_counted(rows: int, mine: int, repeat: float) -> None:
    own = np.arange(rows) < mine
    times = np.where(np.eye(rows, dtype=bool), repeat, 1.0)
    counted = times[own[:, None] | own[None, :]].sum()
    assert count_changed_terms(rows, mine, repeat) == pytest.approx(counted)
    assert of(*batch(rows), rows_per_user=mine, repeat=repeat).terms_per_user == pytest.approx(counted)


@pytest.mark.parametrize("spoilt", [0.0, np.nan, np.inf, 1e200, 1e-300])
@pytest.mark.parametrize("side", [0, 1])
def test_a_row_without_a_direction_counts_for_nothing(spoilt: float, side: int) -> None:
    rows = [np.array(part) for part in batch(5)]
    rows[side][2] = spoilt
    slopes = np.ones((5, 5))
    with np.errstate(all="ignore"):
        sims = of(rows[0], rows[1], slopes)
        total = clip_to_numbers(sims, Bound(1e6, SIZE, terms_per_user=sims.terms_per_user))
    gone = np.ones((5, 5))
    gone[(2, slice(None)) if side == 0 else (slice(None), 2)] = 0
    kept = clip_to_numbers(of(*batch(5), gone), Bound(1e6, SIZE, terms_per_user=sims.terms_per_user))
    assert total == pytest.approx(kept, rel=1e-9, abs=1e-12)


def test_a_slope_that_is_not_finite_or_a_direction_that_is_none_counts_for_nothing() -> None:
    x, t = batch(4)
    bound = Bound(1e6, SIZE, terms_per_user=count_changed_terms(4, 1))
    slopes, zero = np.ones((4, 4)), np.ones((4, 4))
    zero[1, 3] = 0
    for value in (np.nan, np.inf, 1e150):
        slopes[1, 3] = value
        with np.errstate(all="ignore"):
            total = clip_to_numbers(of(x, t, slopes), bound)
        assert total == pytest.approx(clip_to_numbers(of(x, t, zero), bound), rel=1e-9)
    sims, long = of(x, t, np.ones((4, 4))), np.ones((4, 1))
    long[0] = 3.0
    gone = np.ones((4, 4))
    gone[0] = 0
    with_long = clip_to_numbers(replace(sims, left=sims.left * long), bound)
    assert with_long == pytest.approx(clip_to_numbers(of(x, t, gone), bound), rel=1e-9)


def test_batches_that_cannot_be_are_refused() -> None:
    sims = of(*batch(4))
    for other in (
        {"slopes": np.ones((4, 3))},
        {"x": np.ones((3, D1))},
        {"rows_per_user": 3},
        {"left_lengths": np.ones(5)},
    ):
        with pytest.raises(InputError, match="rows of one batch"):
            replace(sims, **other)
    for repeat in (0.5, 1e8, float("nan")):
        with pytest.raises(InputError, match="use a smaller batch"):
            replace(sims, repeat=repeat)
    wide = np.zeros((4, 2049))
    with pytest.raises(InputError, match="use a smaller batch"):
        replace(sims, left=wide, right=wide)
    with pytest.raises(InputError, match="more than the"):
        clip_to_numbers(sims, Bound(1.0, SIZE, terms_per_user=sims.terms_per_user - 1))
