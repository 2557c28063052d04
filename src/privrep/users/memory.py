"""Users whose rows are in this process's memory."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from privrep.data.table import UserTable
from privrep.privacy.bounds import Bound, BoundedSum, LossBound
from privrep.privacy.groups import Group
from privrep.privacy.sampling import FixedSample, Sample
from privrep.users.batching import slots_of
from privrep.users.summing import LocalStep, SlotStep, default_workers, sum_blocks


@dataclass(frozen=True)
class InMemoryUsers:
    """The engine of a `UserTable`."""

    table: UserTable
    workers: int = field(default_factory=default_workers)

    @property
    def count(self) -> int:
        return self.table.n_users

    @property
    def features(self) -> int:
        return self.table.n_features

    @property
    def targets(self) -> int:
        return self.table.n_targets

    @property
    def sparse(self) -> bool:
        return self.table.is_sparse

    def bounded_sums(
        self,
        step: LocalStep | SlotStep,
        bounds: Mapping[str, Bound | LossBound],
        group: Group | None = None,
        sample: Sample | FixedSample | None = None,
    ) -> dict[str, BoundedSum]:
        by_place = slots_of(step) is not None and self.count > 0  # calls are then cut by users' places, not by blocks
        blocks = [self.table] if by_place else self.table.blocks()
        return sum_blocks(blocks, step, bounds, self.workers, group, sample, self.count)
