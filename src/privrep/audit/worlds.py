"""Users of two worlds at once: they answer as one of them, and remember what both would have summed up to."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from privrep.data.table import UserTable
from privrep.privacy.bounds import Bound, BoundedSum, LossBound
from privrep.privacy.protocol import EVERYONE, Audience, Facts, Step
from privrep.typing import Array
from privrep.users.memory import InMemoryUsers
from privrep.users.performance import Performance

Totals = Mapping[str, tuple[Array, Array]]  # of each statistic, in the first world and in the second


@dataclass
class TwoWorlds:
    """Made-up users in memory, in two versions. The same sample of positions is asked in both."""

    first: UserTable
    second: UserTable
    second_answers: bool = False
    totals: list[Totals] = field(default_factory=list)  # of each pass

    def __post_init__(self) -> None:
        self._engines = [InMemoryUsers(table, Performance(workers=1)) for table in (self.first, self.second)]

    @property
    def facts(self) -> Facts:
        return self._engines[self.second_answers].facts

    def sums(
        self, step: Step, bounds: Mapping[str, Bound | LossBound], among: Audience = EVERYONE
    ) -> dict[str, BoundedSum]:
        both = [engine.sums(step, bounds, among) for engine in self._engines]
        self.totals.append({key: (both[0][key].exact_numbers, both[1][key].exact_numbers) for key in bounds})
        return both[self.second_answers]
