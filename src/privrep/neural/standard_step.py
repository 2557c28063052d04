"""Steps on users' rows about points of their own (see `heads.standard`)."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace

import numpy as np

from privrep.heads.gradient import labels_of
from privrep.heads.standard import standardise
from privrep.privacy.bounds import Contributions, Losses
from privrep.privacy.protocol import Step, StepSpec, UserBatch
from privrep.typing import Singles, Vector


@dataclass(frozen=True, eq=False)
class Standards:
    """How public features are standardised: all of it public."""

    classes: int
    raw: int  # columns before the public features
    centre: Vector
    pull: float

    def __call__(self, batch: UserBatch) -> Singles:
        """Return the public features of a batch about their users' points, (users, rows, d)."""
        there = labels_of(batch.y, self.classes).numpy() >= 0
        return standardise(batch.X[:, :, self.raw :], there, self.centre, self.pull).rows


@dataclass(frozen=True, eq=False)
class StandardStep:
    """A step on standardised public features."""

    step: Step
    standards: Standards

    @property
    def spec(self) -> StepSpec:
        return self.step.spec

    def __call__(self, batch: UserBatch) -> Mapping[str, Contributions | Losses]:
        with np.errstate(all="ignore"):
            return self.step(replace(batch, X=self.standards(batch)))
