"""Quantiles of errors, from noisy histograms of their sizes."""

import numpy as np
import pytest
from scipy import stats

from privrep.linear.families import ERROR_CELLS, LOWEST_ERROR
from privrep.linear.tails import read_quantiles
from privrep.local.prior import QUANTILES

SHAPES = {"normal": stats.norm, "even": stats.uniform(-np.sqrt(3), 2 * np.sqrt(3)), "heavy": stats.t(4)}


def histogram(shape, scale: float, rows: int) -> np.ndarray:
    edges = 2.0 ** ((np.arange(ERROR_CELLS + 1) + LOWEST_ERROR) / 2)
    edges[0], edges[-1] = 0.0, np.inf
    return rows * np.diff(2 * shape.cdf(edges / scale))


def truth(shape, scale: float) -> np.ndarray:
    return scale * shape.ppf(0.5 + np.array(QUANTILES) / 2)


@pytest.mark.parametrize("shape", SHAPES.values(), ids=list(SHAPES))
def test_precise_counts_are_read_off(shape) -> None:
    found = read_quantiles(histogram(shape, 1.3, 10_000), 10.0, 4.0)
    assert found == pytest.approx(truth(shape, 1.3) / 2, rel=0.25)  # half an octave is a cell
    assert found[QUANTILES.index(0.5)] == pytest.approx(truth(shape, 1.3)[1] / 2, rel=0.05)


@pytest.mark.parametrize("shape", SHAPES.values(), ids=list(SHAPES))
def test_noisy_counts_are_read_by_shapes(shape) -> None:
    """The 90% quantile, on average over noise that leaves no cell beyond doubt."""
    counts, sigma = histogram(shape, 0.8, 10_000), 400.0
    noise = sigma * np.random.default_rng(0).normal(size=(50, ERROR_CELLS))
    found = np.mean([read_quantiles(counts + draw, sigma, 1.0) for draw in noise], axis=0)
    at = QUANTILES.index(0.9)
    assert found[at] == pytest.approx(truth(shape, 0.8)[at], rel=0.12)
    assert (np.diff(found) > 0).all()


def test_noise_alone_says_that_errors_are_normal() -> None:
    found = read_quantiles(np.random.default_rng(0).normal(size=ERROR_CELLS), 1.0, 7.0)
    assert found == pytest.approx(truth(stats.norm, 1.0))
