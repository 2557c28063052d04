"""The one place where privacy noise is drawn.

Noise is the discrete Gaussian on a grid whose step is a power of two. What is released is an integer number of grid
steps, so the low-order bits of floating-point arithmetic cannot tell neighbours apart (Mironov 2012). `secure_noise`
uses OpenDP's exact sampler (Canonne, Kamath and Steinke 2020), fed by the operating system's cryptographic generator.

Formal guarantee, sigma in grid steps. Rounded continuous Gaussian noise would be exactly mu-GDP. The discrete Gaussian
differs from it, at a point x with |x| <= 40 sigma, by a factor within exp(+-(40^2 + 1) / (12 sigma^2)); beyond lies a
probability under e^-800. Over a run this adds at most 267 * (sum over released coordinates of 1 / sigma^2) to epsilon
and e^(epsilon - 780) to delta. A release of `size` coordinates that spends mu_q^2 has sigma >= 2^35 / mu_q, so the sum
is at most 267 * size * 2^-70 * mu^2, and less than 1e-9 * epsilon for size <= MAX_SIZE and delta <= 0.01: `gaussian_mu`
leaves that much by rounding mu down.
"""

from __future__ import annotations

import math
import os
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import ClassVar

import numpy as np
from numpy.typing import NDArray

from privrep.errors import InputError
from privrep.privacy.bounds import Array

Integers = NDArray[np.int64]
NoiseSource = Callable[[str, float, int], Integers]
"""(name of the release, standard deviation in grid steps, how many) -> independent discrete Gaussian draws."""

STEPS_PER_BOUND = 36  # the grid has 2^35 to 2^36 steps a clipping bound: totals of 2^24 users fit 60 bits


def grid_step(bound: float) -> float:
    """The power of two on whose multiples a statistic with this clipping bound is released."""
    return math.ldexp(1.0, math.frexp(bound)[1] - STEPS_PER_BOUND)


def to_grid(total: Array, step: float) -> Integers:
    """Nearest multiples of `step`, as integers. Moves a total by at most step/2 in each coordinate."""
    return np.rint(total / step).astype(np.int64)


WIDEST = 2.0**56  # steps: a draw then fits 63 bits but with a probability of less than e^-8000


def _check(sigma: float) -> None:
    if not 0 < sigma <= WIDEST:
        raise InputError(
            f"noise of {sigma:g} grid steps cannot be drawn in 64 bits. Spend more of the budget on a release."
        )


def secure_noise(name: str, sigma: float, size: int) -> Integers:
    """Exact discrete Gaussian draws from a cryptographic source."""
    from opendp import domains, measurements, metrics, mod

    _check(sigma)
    mod.enable_features("contrib")
    draw = measurements.make_gaussian(
        domains.vector_domain(domains.atom_domain(T="i64")), metrics.l2_distance(T="i64"), sigma
    )
    counts = [min(DRAWS_AT_A_TIME, size - start) for start in range(0, size, DRAWS_AT_A_TIME)]
    with ThreadPoolExecutor(os.cpu_count()) as pool:  # the draws are independent, whichever thread makes them
        drawn = list(pool.map(lambda count: np.asarray(draw([0] * count), dtype=np.int64), counts))
    return np.concatenate([np.empty(0, dtype=np.int64), *drawn])


DRAWS_AT_A_TIME = 2048


@dataclass(frozen=True)
class SimulatedNoise:
    """Reproducible rounded Gaussian noise, for experiments. Not private: who knows the seed can subtract it."""

    seed: int
    seeded: ClassVar[bool] = True

    def __call__(self, name: str, sigma: float, size: int) -> Integers:
        _check(sigma)
        generator = np.random.default_rng([self.seed, *name.encode()])  # by name: a resumed simulation draws the same
        return np.rint(generator.normal(0.0, sigma, size)).astype(np.int64)


def simulated_noise(seed: int) -> NoiseSource:
    if isinstance(seed, bool) or not isinstance(seed, int | np.integer) or seed < 0:
        raise InputError(f"the seed of a simulation must be a non-negative integer. Got {seed!r} instead.")
    return SimulatedNoise(int(seed))
