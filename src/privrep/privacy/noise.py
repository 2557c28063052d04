"""The one place where privacy noise is drawn: what is added to sums, and which candidate is chosen.

Noise is the discrete Gaussian on a grid whose step is a power of two. A release is an integer number of grid steps, so
the low-order bits of floating-point arithmetic cannot tell neighbours apart (Mironov 2012). `secure_noise` draws it
exactly, as `privacy.discrete_gaussian` proves, fed by the operating system's cryptographic generator.

Formal guarantee of noise. Let sigma be in grid steps. Rounded continuous Gaussian noise would be exactly mu-GDP.
* At a point x with |x| <= 40 sigma, the discrete Gaussian differs from it by a factor within exp(+-(40^2 + 1) / (12
  sigma^2)).
* Beyond lies a probability under e^-800, of which a part is never drawn.
* Over a run this adds at most 267 * (sum over released coordinates of 1 / sigma^2) to epsilon and e^(epsilon - 780) to
  delta.
* A release of `size` coordinates that spends mu_q^2 has sigma >= 2^35 / mu_q. So the sum is at most 267 * size * 2^-70
  * mu^2.
* That is less than 1e-9 * epsilon for size <= MAX_SIZE and delta <= 0.01. `gaussian_mu` leaves that much by rounding mu
  down. `privacy.composition` leaves it where there are choices, too, and `privacy.loss_distributions` where there are
  samples.

Formal guarantee of choices. `draw_choice` draws index i with probability proportional to exp(-losses[i] / scale), for
integer losses.
* `secure_noise` does it by rejection. A uniform index i is kept with probability exp(-(losses[i] - smallest) / scale),
  or else another is drawn.
* A kept index then has the distribution it should have. On average that takes as many tries as there are candidates, or
  fewer.
* Both steps are exact in integers (Canonne, Kamath and Steinke 2020), fed by the operating system's cryptographic
  generator. So no rounding decides.
* The noisy max of OpenDP is not used for it. For Gumbel noise it promises zero-concentrated privacy, and under pure
  privacy it draws another distribution.

The members of a sample follow from 32 bytes of `draw_key`, drawn from that generator, too (`privacy.sampling`).
"""

from __future__ import annotations

import os
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import ClassVar, Protocol

import numpy as np

from privrep.errors import InputError
from privrep.privacy.discrete_gaussian import draw_discrete_gaussian
from privrep.typing import Integers


class NoiseSource(Protocol):
    """Source of randomness. `seeded` says that it can be drawn again, so that nothing drawn is private."""

    @property
    def seeded(self) -> bool: ...

    def __call__(self, name: str, sigma: float, size: int) -> Integers:
        """Return independent discrete Gaussian draws, (size,).

        Args:
            name: of the release.
            sigma: in grid steps.
            size: number of draws.
        """
        ...

    def draw_choice(self, name: str, losses: Integers, scale: int) -> int:
        """Return an index, drawn with probability proportional to exp(-losses[index] / scale).

        Args:
            name: of the choice.
            losses: integers, (candidates,).
            scale: in the units of the losses.
        """
        ...

    def draw_key(self, name: str) -> bytes:
        """Return 32 uniform bytes for the sample of that name: a secret, which decides who is asked."""
        ...


WIDEST = 2.0**56  # steps: a draw then fits 63 bits but with a probability of less than e^-8000


def _check_sigma(sigma: float) -> None:
    """Raise InputError unless noise of this many grid steps can be drawn in 64 bits."""
    if not 0 < sigma <= WIDEST:
        raise InputError(
            f"noise of {sigma:g} grid steps cannot be drawn in 64 bits. Spend more of the budget on a release."
        )


def _check_choice(losses: Integers, scale: int) -> None:
    """Raise InputError unless losses (candidates,) are integers and the scale is one that float64 holds."""
    if not (losses.ndim == 1 and len(losses) and np.issubdtype(losses.dtype, np.integer)):
        raise InputError(f"a choice is drawn from integer losses. Got {losses.dtype} of shape {losses.shape} instead.")
    if not 1 <= scale <= 2**53:  # exact in float64
        raise InputError(f"a choice of scale {scale:g} cannot be drawn. Spend more of the budget on it, or less.")


@dataclass(frozen=True)
class SecureNoise:
    """Exact draws from a cryptographic source."""

    seeded: ClassVar[bool] = False

    def __call__(self, name: str, sigma: float, size: int) -> Integers:
        _check_sigma(sigma)
        counts = [min(DRAWS_AT_A_TIME, size - start) for start in range(0, size, DRAWS_AT_A_TIME)]
        if len(counts) <= 1:
            return draw_discrete_gaussian(sigma, size, os.urandom)
        with ThreadPoolExecutor(os.cpu_count()) as pool:  # the draws are independent, whichever thread makes them
            return np.concatenate(
                list(pool.map(lambda count: draw_discrete_gaussian(sigma, count, os.urandom), counts))
            )

    def draw_choice(self, name: str, losses: Integers, scale: int) -> int:
        _check_choice(losses, scale)
        excess, bits = (losses - losses.min()).tolist(), _Bits()
        while True:
            index = bits.draw_below(len(excess))
            if _draw_bernoulli_exp(excess[index], scale, bits):
                return index

    def draw_key(self, name: str) -> bytes:
        return os.urandom(32)


class _Bits:
    """Uniform integers from the operating system's cryptographic generator, which is asked for many bits at a time."""

    def __init__(self) -> None:
        self._pool = self._left = 0

    def draw_below(self, end: int) -> int:
        """Return a uniform integer from 0 to end - 1, drawn again while the bits make a larger one."""
        width = (end - 1).bit_length()
        while True:
            if self._left < width:
                self._pool, self._left = int.from_bytes(os.urandom(1024), "little"), 8 * 1024
            drawn = self._pool & ((1 << width) - 1)
            self._pool >>= width
            self._left -= width
            if drawn < end:
                return drawn


def _draw_bernoulli_exp(numerator: int, denominator: int, bits: _Bits) -> bool:
    """Return True with probability exp(-numerator / denominator), exactly, for non-negative integers."""
    whole, part = divmod(numerator, denominator)
    return all(_draw_bernoulli_exp_fraction(1, 1, bits) for _ in range(whole)) and _draw_bernoulli_exp_fraction(
        part, denominator, bits
    )


def _draw_bernoulli_exp_fraction(numerator: int, denominator: int, bits: _Bits) -> bool:
    """Return True with probability exp(-numerator / denominator), exactly, for a fraction of at most one.

    Let x be the fraction. The loop goes on after its k-th turn with probability x/k. So it gets past that turn with
    probability x^k/k!, and ends in an odd turn with probability 1 - x + x^2/2! - x^3/3! + ... = exp(-x).
    """
    turn = 1
    while bits.draw_below(denominator * turn) < numerator:
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
        _check_sigma(sigma)
        return np.rint(self._generator(name).normal(0.0, sigma, size)).astype(np.int64)

    def draw_choice(self, name: str, losses: Integers, scale: int) -> int:
        _check_choice(losses, scale)
        return int(np.argmin((losses - losses.min()) / scale - self._generator(name).gumbel(size=len(losses))))

    def draw_key(self, name: str) -> bytes:
        return self._generator(name, 256).bytes(32)  # no byte of a name is 256, so noise never has the same numbers

    def _generator(self, name: str, *more: int) -> np.random.Generator:
        """Return the generator of a name: a resumed simulation draws the same."""
        return np.random.default_rng([self.seed, *name.encode(), *more])  # by name: a resumed simulation draws the same


def simulated_noise(seed: int) -> NoiseSource:
    """Return noise that follows from a seed. Raise InputError unless the seed is a non-negative integer."""
    if isinstance(seed, bool) or not isinstance(seed, int | np.integer) or seed < 0:
        raise InputError(f"the seed of a simulation must be a non-negative integer. Got {seed!r} instead.")
    return SimulatedNoise(int(seed))
