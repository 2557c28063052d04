"""Users seen through a public projection: their rows become X matrix^T, of few columns."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, cast

import numpy as np
from numpy.typing import NDArray

from privrep.data.table import UserTable
from privrep.errors import InputError
from privrep.local.projection import Projection
from privrep.privacy.bounds import Bound, BoundedSum, Contributions, LossBound, Losses
from privrep.privacy.groups import Group
from privrep.privacy.sampling import FixedSample, Sample
from privrep.users.batching import slots_of
from privrep.users.memory import InMemoryUsers
from privrep.users.summing import LocalStep, SlotStep, Users, finite_rows, map_blocks


def project(users: Users, projection: Projection) -> Users:
    """Users in memory are projected once, a block at a time; all others whenever they are asked.

    Formal guarantee: a user's projected rows are a function of that user's rows, to the last bit, so what is released
    about them is released about the user, at the same price.
    """
    if isinstance(users, InMemoryUsers) and projection.matrix is not None:
        return InMemoryUsers(_projected(users.table, projection, users.workers), users.workers)
    return ProjectedUsers(users, projection)


@dataclass(frozen=True)
class ProjectedUsers:
    """An engine made of another."""

    users: Users
    projection: Projection

    @property
    def count(self) -> int:
        return self.users.count

    @property
    def features(self) -> int:
        matrix = self.projection.matrix
        return self.users.features if matrix is None else len(matrix)

    @property
    def targets(self) -> int:
        return self.users.targets

    @property
    def sparse(self) -> bool:
        return False

    def bounded_sums(
        self,
        step: LocalStep | SlotStep,
        bounds: Mapping[str, Bound | LossBound],
        group: Group | None = None,
        sample: Sample | FixedSample | None = None,
    ) -> dict[str, BoundedSum]:
        if slots_of(step) is not None or sample is not None:
            raise InputError("projected users take no steps with slots. Project the rows of a table in memory first.")
        return self.users.bounded_sums(_Through(cast(LocalStep, step), self.projection), bounds, group)


@dataclass(frozen=True)
class _Through:
    """A step on projected rows."""

    step: LocalStep
    projection: Projection

    @property
    def sparse(self) -> bool:
        return self.projection.matrix is not None

    @property
    def vector_size(self) -> int:
        return int(getattr(self.step, "vector_size", 0))

    @property
    def sparse_vector_size(self) -> int:
        return max(self.vector_size, 4096)

    def __call__(self, X: Any, y: NDArray[Any]) -> Mapping[str, Contributions | Losses]:
        return self.step(self.projection(X), y)


def _projected(table: UserTable, projection: Projection, workers: int) -> UserTable:
    assert projection.matrix is not None
    X = np.empty((table.n_rows, len(projection.matrix)), np.float32)
    y = np.empty((table.n_rows, *table.y.shape[1:]), np.float32)
    row = 0
    for some, targets in map_blocks(lambda block: _block(block, projection), table.blocks(), workers):
        X[row : row + len(some)], y[row : row + len(some)] = some, targets
        row += len(some)
    return UserTable(X, y, table.offsets - table.offsets[0], table.ids)


def _block(block: UserTable, projection: Projection) -> tuple[NDArray[Any], NDArray[Any]]:
    assert projection.matrix is not None
    X = np.empty((block.n_rows, len(projection.matrix)), np.float32)
    y = np.empty((block.n_rows, *block.y.shape[1:]), np.float32)
    for positions, size in block.positions_by_size():
        with np.errstate(all="ignore"):  # as for any step: a user's overflow is that user's
            rows, targets = finite_rows(*block.group(positions, size))
            at = (block.offsets[positions][:, None] + np.arange(size)).ravel()
            X[at] = projection(rows).reshape(len(at), -1)
            y[at] = targets.reshape(len(at), *block.y.shape[1:])
    return X, y
