"""Users seen through a public projection: their rows become X matrix^T, of few columns."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from privrep.data.table import UserTable
from privrep.errors import InputError
from privrep.local.transform import Projection
from privrep.privacy.bounds import Bound, BoundedSum, Contributions, LossBound, Losses
from privrep.privacy.protocol import EVERYONE, Audience, Facts, Step, StepSpec, UserBatch, Users
from privrep.privacy.sampling import FixedSample, Sample
from privrep.users.memory import InMemoryUsers
from privrep.users.performance import Performance
from privrep.users.summing import clean_rows, map_blocks


def project(users: Users, projection: Projection) -> Users:
    """Return users whose rows are projected: in memory once, a block at a time, all others whenever they are asked.

    Formal guarantee:
    * A user's projected rows are a function of that user's rows, to the last bit.
    * So a release about them is a release about the user, at the same price.
    """
    if isinstance(users, InMemoryUsers) and projection.matrix is not None:
        return InMemoryUsers(_project_table(users.table, projection, users.performance), users.performance)
    return ProjectedUsers(users, projection)


@dataclass(frozen=True)
class ProjectedUsers:
    """Engine that projects the rows of another before a step sees them."""

    users: Users
    projection: Projection

    @property
    def facts(self) -> Facts:
        facts, matrix = self.users.facts, self.projection.matrix
        return replace(facts, features=facts.features if matrix is None else len(matrix), sparse=False)

    def sums(
        self, step: Step, bounds: Mapping[str, Bound | LossBound], among: Audience = EVERYONE
    ) -> dict[str, BoundedSum]:
        if step.spec.layout != "by_size" or isinstance(among, Sample | FixedSample):
            raise InputError("projected users take no steps with slots. Project the rows of a table in memory first.")
        return self.users.sums(ProjectedStep(step, self.projection), bounds, among)


@dataclass(frozen=True)
class ProjectedStep:
    """Step on projected rows."""

    step: Step
    projection: Projection

    @property
    def spec(self) -> StepSpec:
        spec = self.step.spec
        return replace(
            spec,
            accepts_sparse=self.projection.matrix is not None,
            fill=0.0,
            floats_per_sparse_user=max(spec.floats_per_user, 4096),
        )

    def __call__(self, batch: UserBatch) -> Mapping[str, Contributions | Losses]:
        return self.step(replace(batch, X=self.projection(batch.X)))


def _project_table(table: UserTable, projection: Projection, performance: Performance) -> UserTable:
    """Return a table of the projected rows, in single precision."""
    assert projection.matrix is not None
    X = np.empty((table.n_rows, len(projection.matrix)), np.float32)
    y = np.empty((table.n_rows, *table.y.shape[1:]), np.float32)
    row = 0
    for some, targets in map_blocks(lambda block: _project_block(block, projection), table.blocks(), performance):
        X[row : row + len(some)], y[row : row + len(some)] = some, targets
        row += len(some)
    return UserTable(X, y, table.offsets - table.offsets[0], table.ids)


def _project_block(block: UserTable, projection: Projection) -> tuple[NDArray[Any], NDArray[Any]]:
    """Return the projected rows (rows, k') of a block and its targets, both in single precision."""
    assert projection.matrix is not None
    X = np.empty((block.n_rows, len(projection.matrix)), np.float32)
    y = np.empty((block.n_rows, *block.y.shape[1:]), np.float32)
    for positions, size in block.positions_by_size():
        with np.errstate(all="ignore"):  # as for any step: a user's overflow is that user's
            rows, targets = clean_rows(*block.group(positions, size))
            at = (block.offsets[positions][:, None] + np.arange(size)).ravel()
            X[at] = projection(rows).reshape(len(at), -1)
            y[at] = targets.reshape(len(at), *block.y.shape[1:])
    return X, y
