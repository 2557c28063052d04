"""The one place where privacy noise is drawn: what is added to sums, and which candidate is chosen.

Noise is the discrete Gaussian on a grid whose step is a power of two. What is released is an integer number of grid
steps, so the low-order bits of floating-point arithmetic cannot tell neighbours apart (Mironov 2012). `secure_noise`
draws it exactly, as `privacy.discrete_gaussian` proves, fed by the operating system's cryptographic generator.

Formal guarantee, sigma in grid steps. Rounded continuous Gaussian noise would be exactly mu-GDP. The discrete Gaussian
differs from it, at a point x with |x| <= 40 sigma, by a factor within exp(+-(40^2 + 1) / (12 sigma^2)); beyond lies a
probability under e^-800, of which a part is never drawn. Over a run this adds at most 267 * (sum over released
coordinates of 1 / sigma^2) to epsilon and e^(epsilon - 780) to delta. A release of `size` coordinates that spends
mu_q^2 has sigma >= 2^35 / mu_q, so the sum is at most 267 * size * 2^-70 * mu^2, and less than 1e-9 * epsilon for size
<= MAX_SIZE and delta <= 0.01: `gaussian_mu` leaves that much by rounding mu down, `privacy.composition` leaves it where
there are choices, too, and `privacy.loss_distributions` where there are samples.

Choices are drawn by `smallest`: index i with probability proportional to exp(-losses[i] / scale), for integer losses.
`secure_noise` does it by rejection: a uniform index i is kept with probability exp(-(losses[i] - smallest) / scale), or
else another is drawn. What is kept is then distributed as it should be, and it takes as many tries as there are
candidates, or fewer, on average. Both steps are exact in integers (Canonne, Kamath and Steinke 2020, algorithm 1), fed
by the operating system's cryptographic generator, so no rounding decides. OpenDP's noisy max is not used for it: what
it promises of Gumbel noise is zero-concentrated privacy, and under pure privacy it draws another distribution.

Who is in a sample follows from a `key` of 32 bytes, drawn from that generator, too (`privacy.sampling`).
"""

from __future__ import annotations

import math
import os
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import ClassVar, Protocol

import numpy as np

from privrep.errors import InputError
from privrep.privacy.discrete_gaussian import discrete_gaussian
from privrep.typing import Array, Integers


class NoiseSource(Protocol):
    """Where randomness comes from. `seeded` says that it can be drawn again, so that nothing drawn is private."""

    @property
    def seeded(self) -> bool: ...

    def __call__(self, name: str, sigma: float, size: int) -> Integers:
        """Independent discrete Gaussian draws for the release of that name, sigma in grid steps."""
        ...

    def smallest(self, name: str, losses: Integers, scale: int) -> int:
        """An index, drawn with probability proportional to exp(-losses[index] / scale), for the choice of that name."""
        ...

    def key(self, name: str) -> bytes:
        """32 uniform bytes for the sample of that name: a secret, which decides who is asked."""
        ...


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


def _check_choice(losses: Integers, scale: int) -> None:
    if not (losses.ndim == 1 and len(losses) and np.issubdtype(losses.dtype, np.integer)):
        raise InputError(f"a choice is drawn from integer losses. Got {losses.dtype} of shape {losses.shape} instead.")
    if not 1 <= scale <= 2**53:  # exact in float64
        raise InputError(f"a choice of scale {scale:g} cannot be drawn. Spend more of the budget on it, or less.")


@dataclass(frozen=True)
class SecureNoise:
    """Exact draws from a cryptographic source."""

    seeded: ClassVar[bool] = False

    def __call__(self, name: str, sigma: float, size: int) -> Integers:
        _check(sigma)
        counts = [min(DRAWS_AT_A_TIME, size - start) for start in range(0, size, DRAWS_AT_A_TIME)]
        if len(counts) <= 1:
            return discrete_gaussian(sigma, size, os.urandom)
        with ThreadPoolExecutor(os.cpu_count()) as pool:  # the draws are independent, whichever thread makes them
            return np.concatenate(list(pool.map(lambda count: discrete_gaussian(sigma, count, os.urandom), counts)))

    def smallest(self, name: str, losses: Integers, scale: int) -> int:
        _check_choice(losses, scale)
        excess, bits = (losses - losses.min()).tolist(), _Bits()
        while True:
            index = bits.below(len(excess))
            if _happens(excess[index], scale, bits):
                return index

    def key(self, name: str) -> bytes:
        return os.urandom(32)


class _Bits:
    """Uniform integers from the operating system's cryptographic generator, which is asked for many bits at a time."""

    def __init__(self) -> None:
        self._pool = self._left = 0

    def below(self, end: int) -> int:
        """Uniform on 0 to end - 1: as many bits as it takes, drawn again while they make a larger number."""
        width = (end - 1).bit_length()
        while True:
            if self._left < width:
                self._pool, self._left = int.from_bytes(os.urandom(1024), "little"), 8 * 1024
            drawn = self._pool & ((1 << width) - 1)
            self._pool >>= width
            self._left -= width
            if drawn < end:
                return drawn


def _happens(numerator: int, denominator: int, bits: _Bits) -> bool:
    """True with probability exp(-numerator / denominator), exactly, for non-negative integers."""
    whole, part = divmod(numerator, denominator)
    return all(_happens_below_one(1, 1, bits) for _ in range(whole)) and _happens_below_one(part, denominator, bits)


def _happens_below_one(numerator: int, denominator: int, bits: _Bits) -> bool:
    """The same for a fraction of at most one.

    With x the fraction, the loop goes on after its k-th turn with probability x/k: it gets past it with probability
    x^k/k!, and so ends in an odd turn with probability 1 - x + x^2/2! - x^3/3! + ... = exp(-x).
    """
    turn = 1
    while bits.below(denominator * turn) < numerator:
        turn += 1
    return turn % 2 == 1


secure_noise = SecureNoise()
DRAWS_AT_A_TIME = 2**14  # their bits and numbers stay in the cache of a core


@dataclass(frozen=True)
class SimulatedNoise:
    """Reproducible rounded Gaussian noise and choices, for experiments. Not private: who knows the seed knows them."""

    seed: int
    seeded: ClassVar[bool] = True

    def __call__(self, name: str, sigma: float, size: int) -> Integers:
        _check(sigma)
        return np.rint(self._generator(name).normal(0.0, sigma, size)).astype(np.int64)

    def smallest(self, name: str, losses: Integers, scale: int) -> int:
        _check_choice(losses, scale)
        return int(np.argmin((losses - losses.min()) / scale - self._generator(name).gumbel(size=len(losses))))

    def key(self, name: str) -> bytes:
        return self._generator(name, 256).bytes(32)  # no byte of a name is 256, so noise never has the same numbers

    def _generator(self, name: str, *more: int) -> np.random.Generator:
        return np.random.default_rng([self.seed, *name.encode(), *more])  # by name: a resumed simulation draws the same


def simulated_noise(seed: int) -> NoiseSource:
    if isinstance(seed, bool) or not isinstance(seed, int | np.integer) or seed < 0:
        raise InputError(f"the seed of a simulation must be a non-negative integer. Got {seed!r} instead.")
    return SimulatedNoise(int(seed))
