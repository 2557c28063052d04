"""Steps that tests make of functions."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

from privrep.privacy.protocol import StepSpec, UserBatch


@dataclass(frozen=True)
class RowsStep:
    """A step of users with equally many rows, made of a function of X and y."""

    spec: ClassVar[StepSpec] = StepSpec()
    function: Callable[[Any, Any], Mapping[str, Any]]

    def __call__(self, batch: UserBatch) -> Mapping[str, Any]:
        return self.function(batch.X, batch.y)
