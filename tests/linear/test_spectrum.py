"""The top of a spectrum, against a full decomposition."""

from __future__ import annotations

import math

import numpy as np
import pytest

from privrep.linear.pairs import EDGE, SURE, PairSums, find_factors, read_together, see_factors
from privrep.linear.spectrum import find_above, reaches


def noisy(size: int, strengths: tuple[float, ...], seed: int = 0) -> np.ndarray:
    """Symmetric noise of variance one, and eigenvalues of these strengths, relative to the edge of noise."""
    rng = np.random.default_rng(seed)
    noise = rng.normal(size=(size, size))
    axes = np.linalg.qr(rng.normal(size=(size, len(strengths))))[0]
    return (noise + noise.T) / math.sqrt(2) + (axes * np.array(strengths) * 2 * math.sqrt(size)) @ axes.T


@pytest.mark.parametrize("size", [1, 2, 30, 300])
def test_eigenvalues_above_an_edge_are_those_of_the_full_decomposition(size: int) -> None:
    matrix = noisy(size, (4.0, 2.0, 1.2)[:size])
    values, vectors = np.linalg.eigh(matrix)
    middle = float(values[[size // 2, size // 2 - 1]].mean()) + 1e-3
    for edge in (values[-1] + 1, 2 * math.sqrt(size), middle, values[0] - 1):
        found, axes = find_above(matrix, edge)
        wanted = np.flatnonzero(values > edge)[::-1]
        assert np.allclose(found, values[wanted], rtol=1e-10, atol=1e-10)
        assert np.allclose(np.abs((axes * vectors[:, wanted]).sum(axis=0)), 1.0, atol=1e-10)
        assert reaches(matrix, edge) == bool(len(wanted))


@pytest.mark.parametrize("seed", range(30))
def test_factors_are_seen_where_filling_in_the_diagonal_would_find_some(seed: int) -> None:
    """One decomposition tells, as the diagonal that is filled in is never negative."""
    rng = np.random.default_rng(seed)
    sums = PairSums(0.01 * noisy(60, tuple(rng.uniform(0.8, 1.6, 2)), seed), 0.01)
    together = np.zeros((60, 60))
    bare = sums.pairs / 0.01
    np.fill_diagonal(bare, 0.0)
    largest, edge = float(np.linalg.eigvalsh(bare)[-1]), 2 * math.sqrt(60)
    assert see_factors(sums, together) == (largest > edge)
    beyond = largest > edge * (1 + SURE * 60 ** (-2 / 3))
    assert bool(len(find_factors(sums, together, None)[1])) == beyond


def test_what_is_rated_together_is_read_off_what_stands_above_the_noise() -> None:
    sums = PairSums(np.abs(noisy(80, (5.0, 1.5))), 1.0)
    values, vectors = np.linalg.eigh(sums.pairs)
    radius = 2 * math.sqrt(80)
    seen = values > EDGE * radius
    wanted = (vectors[:, seen] * np.sqrt(values[seen] ** 2 - radius**2)) @ vectors[:, seen].T
    assert np.allclose(read_together(sums), np.maximum(wanted, 0.0), rtol=1e-10, atol=1e-10)
