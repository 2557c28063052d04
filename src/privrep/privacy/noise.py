"""The one place where privacy noise is drawn.

Noise is the discrete Gaussian on a grid whose step is a power of two. What is released is an integer number of grid
steps, so the low-order bits of floating-point arithmetic cannot tell neighbours apart (Mironov 2012). `secure_noise`
uses OpenDP's exact sampler (Canonne, Kamath and Steinke 2020), fed by the operating system's cryptographic generator.

Formal guarantee. With sigma at least 2^16 steps the discrete Gaussian's privacy loss under integer shifts matches that
of the continuous one with the same sigma to within a relative 2^-30: same zCDP exactly, and the same (epsilon, delta)
up to the error of replacing an integral by a sum with that many points a standard deviation.
"""

from __future__ import annotations

import math
from collections.abc import Callable

import numpy as np
from numpy.typing import NDArray

from privrep.errors import InputError
from privrep.privacy.bounds import Array

Integers = NDArray[np.int64]
NoiseSource = Callable[[str, float, int], Integers]
"""(name of the release, standard deviation in grid steps, how many) -> independent discrete Gaussian draws."""

STEPS_PER_BOUND = 24  # the grid has 2^24 steps a clipping bound: totals of 2^24 users still fit 53 bits


def grid_step(bound: float) -> float:
    """The power of two on whose multiples a statistic with this clipping bound is released."""
    return math.ldexp(1.0, math.frexp(bound)[1] - STEPS_PER_BOUND)


def to_grid(total: Array, step: float) -> Integers:
    """Nearest multiples of `step`, as integers. Moves a total by at most step/2 in each coordinate."""
    return np.rint(total / step).astype(np.int64)


def secure_noise(name: str, sigma: float, size: int) -> Integers:
    """Exact discrete Gaussian draws from a cryptographic source."""
    from opendp import domains, measurements, metrics, mod

    mod.enable_features("contrib")
    draw = measurements.make_gaussian(
        domains.vector_domain(domains.atom_domain(T="i64")), metrics.l2_distance(T="i64"), sigma
    )
    return np.asarray(draw([0] * size), dtype=np.int64)


def simulated_noise(seed: int) -> NoiseSource:
    """Reproducible noise of the same distribution, for experiments. Not private: who knows the seed can subtract it."""
    if isinstance(seed, bool) or not isinstance(seed, int | np.integer) or seed < 0:
        raise InputError(f"the seed of a simulation must be a non-negative integer. Got {seed!r} instead.")

    def draw(name: str, sigma: float, size: int) -> Integers:
        generator = np.random.default_rng([int(seed), *name.encode()])  # by name: a resumed simulation draws the same
        return np.rint(generator.normal(0.0, sigma, size)).astype(np.int64)

    return draw
