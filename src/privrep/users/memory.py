"""Users whose rows are in this process's memory."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from privrep.data.table import UserTable
from privrep.privacy.bounds import Bound, BoundedSum, LossBound
from privrep.privacy.protocol import EVERYONE, Audience, Facts, Step
from privrep.users.performance import Performance
from privrep.users.summing import sum_blocks


@dataclass(frozen=True)
class InMemoryUsers:
    """Engine of a `UserTable`."""

    table: UserTable
    performance: Performance = field(default_factory=Performance)

    @property
    def facts(self) -> Facts:
        return Facts(self.table.n_users, self.table.n_features, self.table.n_targets, self.table.is_sparse)

    def sums(
        self, step: Step, bounds: Mapping[str, Bound | LossBound], among: Audience = EVERYONE
    ) -> dict[str, BoundedSum]:
        users = self.table.n_users
        by_position = step.spec.layout != "by_size" and users > 0  # calls are then cut by positions, not by blocks
        blocks = [self.table] if by_position else self.table.blocks()
        return sum_blocks(blocks, step, bounds, self.performance, among, users)
