"""The server's optimiser: public arithmetic on averages of updates that were released."""

from __future__ import annotations

from dataclasses import Field, dataclass, replace
from typing import Any, ClassVar, Protocol

import numpy as np

from privrep.typing import Array


class ServerSettings(Protocol):
    """The settings that the optimiser reads, of any dataclass that has them."""

    __dataclass_fields__: ClassVar[dict[str, Field[Any]]]

    @property
    def server(self) -> str: ...
    @property
    def server_rate(self) -> float: ...
    @property
    def momentum(self) -> float: ...
    @property
    def second_momentum(self) -> float: ...
    @property
    def floor(self) -> float: ...
    @property
    def settle(self) -> float: ...


@dataclass(frozen=True, eq=False)
class Optimiser:
    """The server's optimiser, in float64: weights, and averages of past updates and of their squares."""

    settings: ServerSettings
    weights: Array
    first: Array | None = None
    second: Array | None = None
    steps: int = 0

    def settle(self) -> Optimiser:
        """Return the optimiser with a smaller rate, and at rest; itself if the rate stays as it is."""
        slower = replace(self.settings, server_rate=self.settings.server_rate * self.settings.settle)
        return self if slower == self.settings else Optimiser(slower, self.weights)

    def move(self, update: Array) -> Optimiser:
        """Return the optimiser after one step along an averaged update, (size,), by the server's rule."""
        s, first, second = self.settings, self.first, self.second
        steps = self.steps + 1
        if s.server == "sgd":
            move = update
        elif s.server == "momentum":
            move = first = update + (0.0 if first is None else s.momentum * first)
        else:
            first = (1 - s.momentum) * update + (0.0 if first is None else s.momentum * first)
            second = (1 - s.second_momentum) * update**2 + (0.0 if second is None else s.second_momentum * second)
            size = np.sqrt(second / (1 - s.second_momentum**steps))
            move = first / (1 - s.momentum**steps) / (size + s.floor)
        return Optimiser(s, self.weights + s.server_rate * move, first, second, steps)
