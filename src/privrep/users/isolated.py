"""Users who cannot stop each other, and checks of their sums: an engine for steps that somebody else sent."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray
from scipy.sparse import csr_array

from privrep.data.table import UserTable
from privrep.errors import InputError
from privrep.privacy.bounds import LEVELS, Bound, BoundedSum, LossBound
from privrep.privacy.grid import Total
from privrep.privacy.groups import Group
from privrep.privacy.protocol import EVERYONE, Audience, Everyone, Facts, Step, check_audience
from privrep.privacy.sampling import FixedSample, Sample
from privrep.typing import Integers
from privrep.users.memory import InMemoryUsers
from privrep.users.performance import Performance
from privrep.users.streaming import StreamingUsers


@dataclass(frozen=True)
class IsolatedUsers:
    """Engine whose users cannot stop each other: a user on whom a step fails sends zeros.

    A step's numbers for a user are the same to the last bit whether it is called with others or alone. So the others'
    sums stay as they are. For padded steps that is true at one batch row alone, and the engine sets their users apart.

    With `strictly`, for a server that may lie, the step is asked about each user alone. The length of each user's
    contribution is measured once it is clipped, and a user who sends more than the bound sends zeros. So a contribution
    is a function of its user's rows and no longer than the bound. That holds for any step, whatever it says of norms.
    """

    users: InMemoryUsers | StreamingUsers
    strictly: bool = False

    @property
    def facts(self) -> Facts:
        return self.users.facts

    def sums(
        self, step: Step, bounds: Mapping[str, Bound | LossBound], among: Audience = EVERYONE
    ) -> dict[str, BoundedSum]:
        check_audience(among)
        if isinstance(among, FixedSample):
            raise InputError("batches of a fixed size need all rows in one place.")
        users = self.facts.users
        chosen = among.members(users) if isinstance(among, Sample) else np.ones(users, bool)
        self._check_public(step, bounds)
        sums = self._sum_users(step, bounds, among, chosen)
        numbers = {key: one.exact_numbers for key, one in sums.items()}
        check_sums(bounds, numbers, users)  # as the server will, and before there is noise on them
        return sums

    def _sum_users(
        self,
        step: Step,
        bounds: Mapping[str, Bound | LossBound],
        among: Everyone | Group | Sample,
        chosen: NDArray[np.bool_],
    ) -> dict[str, BoundedSum]:
        """Return the sums of the users who are asked; `chosen` is a mask (users,) of the members of a sample.

        Users are asked together where nobody fails and the server is trusted, else one by one.
        """
        if not self.strictly:
            try:
                return self.users.sums(step, bounds, among)
            except Exception:  # whose rows it was for stays unsaid
                if step.spec.layout != "by_size":  # the engine has set such users apart already
                    raise InputError("the server's step fails, and on nobody's rows alone.") from None
        totals = {key: Total(bound.size) for key, bound in bounds.items()}
        asked = EVERYONE if isinstance(among, Sample) else among
        for start, block in self._number_blocks():
            for key, part in _sum_one_by_one(block, chosen[start : start + block.n_users], step, bounds, asked).items():
                totals[key].add(part, block.n_users)
        return {key: BoundedSum(totals[key].integers, bound) for key, bound in bounds.items()}

    def _number_blocks(self) -> Iterator[tuple[int, UserTable]]:
        """Yield blocks of users, each with the position of its first user."""
        start = 0
        for block in self.users.table.blocks() if isinstance(self.users, InMemoryUsers) else self.users.blocks():
            yield start, block
            start += block.n_users

    def _check_public(self, step: Step, bounds: Mapping[str, Bound | LossBound]) -> None:
        """Raise InputError for a step that fails on made-up rows: that is nobody's secret."""
        facts = self.facts
        X = np.cos(np.arange(1.0, PUBLIC_ROWS * facts.features + 1)).reshape(PUBLIC_ROWS, -1).astype(np.float32)
        y = (np.arange(PUBLIC_ROWS * facts.targets) % 2).astype(np.float64)
        made_up = UserTable.from_rows(
            csr_array(X) if facts.sparse else X,
            y if facts.targets == 1 else y.reshape(PUBLIC_ROWS, -1),
            np.zeros(PUBLIC_ROWS, np.int64),
        )
        try:
            InMemoryUsers(made_up, ALONE).sums(step, bounds)
        except Exception as error:
            raise InputError(f"the server's step fails on any rows ({type(error).__name__}).") from None


PUBLIC_ROWS = 8  # of a made-up user
ALONE = Performance(workers=1)  # one user is not worth a second thread


def _sum_one_by_one(
    block: UserTable,
    chosen: NDArray[np.bool_],
    step: Step,
    bounds: Mapping[str, Bound | LossBound],
    among: Everyone | Group,
) -> dict[str, Integers]:
    """Return the sums of chosen users, without users on whom the step fails or who send more than the bound.

    Args:
        block: of users.
        chosen: (users,), a mask.
        step: what users compute.
        bounds: of each statistic.
        among: everyone, or a group.
    """
    totals = {key: np.zeros(bound.size, np.int64) for key, bound in bounds.items()}
    for user in np.flatnonzero(chosen).tolist():
        try:
            found = InMemoryUsers(block.users(user, user + 1), ALONE).sums(step, bounds, among)
            check_sums(bounds, {key: one.exact_numbers for key, one in found.items()}, 1)
        except Exception:
            continue
        for key, total in totals.items():
            total += found[key].total.astype(np.int64)
    return totals


REACH = 40.0  # standard deviations that a node's noise may have in a coordinate
ROOM = 2.0**-46  # for a sum of users of whom each was measured: the length of the sum is rounded, too


def check_sums(
    bounds: Mapping[str, Bound | LossBound],
    sums: Mapping[str, NDArray[Any]],
    users: int,
    sigmas: Mapping[str, float] | None = None,
) -> None:
    """Raise InputError for sums that users cannot have made, clipped to these bounds.

    Args:
        bounds: of each statistic.
        sums: totals, (size,) each.
        users: number of users who may have made them.
        sigmas: standard deviation of the noise on each total; None for sums without noise.
    """
    if set(sums) != set(bounds):
        raise InputError("it answers with other statistics than were asked for")
    for key, bound in bounds.items():
        total = sums[key]
        if total.shape != (bound.size,):
            raise InputError(f"its {key!r} has {total.shape} numbers where {bound.size:,} were asked for")
        if not np.isfinite(total).all():
            raise InputError(f"its {key!r} holds numbers that are not finite")
        if isinstance(bound, LossBound):
            levels = total * LEVELS
            if (levels < 0).any() or (levels > users * LEVELS).any() or (levels != np.rint(levels)).any():
                raise InputError(f"its {key!r} are not losses of {users:,} users")
            continue
        sigma = 0.0 if sigmas is None else sigmas[key]
        room = 1.0 if users == 1 else 1 + ROOM
        most = users * bound.reach * room + sigma * (math.sqrt(bound.size) + REACH)
        scale = float(np.abs(total).max())
        length = 0.0 if scale == 0 else scale * float(np.linalg.norm(total / scale))
        if not length <= most:
            raise InputError(f"its {key!r} is longer than {users:,} clipped users can make it")
