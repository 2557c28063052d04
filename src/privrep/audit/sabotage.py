"""Noise that is too small on purpose: the control of an audit, which must catch it."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import ClassVar

from privrep.privacy.noise import NoiseSource, secure_noise
from privrep.typing import Integers


@dataclass(frozen=True)
class WeakNoise:
    """The secure noise, asked for less of it than a release asks for. For audits of made-up users alone."""

    factor: float
    noise: NoiseSource = secure_noise
    seeded: ClassVar[bool] = False

    def __call__(self, name: str, sigma: float, size: int) -> Integers:
        return self.noise(name, sigma / self.factor, size)

    def draw_choice(self, name: str, losses: Integers, scale: int) -> int:
        return self.noise.draw_choice(name, losses, max(math.floor(scale / self.factor), 1))

    def draw_key(self, name: str) -> bytes:
        return self.noise.draw_key(name)
