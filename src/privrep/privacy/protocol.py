"""The types that join methods, users and the kernel: questions, audiences, and public facts of users."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal, Protocol

import numpy as np
from numpy.typing import NDArray

from privrep.errors import InputError
from privrep.privacy.bounds import Bound, BoundedSum, Contributions, LossBound, Losses
from privrep.privacy.groups import Group
from privrep.privacy.sampling import Fixed, FixedSample, Poisson, Sample

Layout = Literal["by_size", "padded", "batch"]


@dataclass(frozen=True, kw_only=True)
class StepSpec:
    """Declarations of a step about itself. Engines read them before they call the step, and guess nothing.

    `layout` says which users share a call:
        by_size   users with equally many rows, all of their rows.
        padded    any users, with `rows_per_user` rows each, missing ones made up. Shapes are public.
        batch     all users who are asked, in one call, padded alike. The step is a function of the whole batch.

    `accepts_sparse`: whether the step gets sparse rows as they are. Any other step gets dense rows.

    `fill`: for steps by size, the value of a column for a user who has no value in it: a number, or (features,).
    Columns of users with some values are filled by the user's own mean. NaN: the step gets such columns as NaN, and
    makes nothing of them.

    The fields below the line are how many numbers the step holds of a user. They size memory alone: the guarantee of
    `privacy.bounds` holds however users are cut into calls. No step reads them to decide what it sends.
    """

    layout: Layout = "by_size"
    rows_per_user: int | None = None
    accepts_sparse: bool = False
    fill: Any = field(default=0.0, compare=False)
    # ---- memory alone
    floats_per_user: int = 0
    floats_per_sparse_user: int = 0

    def __post_init__(self) -> None:
        rows = self.rows_per_user
        if rows is not None and (isinstance(rows, bool) or not isinstance(rows, int | np.integer) or rows < 1):
            raise InputError(f"a step has a whole number of slots, 1 or more. Got {rows!r} instead.")
        if self.layout == "batch" and rows is None:
            raise InputError("a step of a whole batch says in `rows_per_user` how many rows of each user it takes.")
        if (self.layout == "by_size") != (rows is None):
            raise InputError(f"a step of layout {self.layout} with {rows} rows of each user cannot be called.")

    @property
    def padded_rows(self) -> int:
        """Return the rows of each user in a call, for a step whose calls have a fixed shape."""
        assert self.rows_per_user is not None
        return int(self.rows_per_user)

    @property
    def batch_level(self) -> bool:
        """Return whether the step is a function of the whole batch, to be called once."""
        return self.layout == "batch"


@dataclass(frozen=True)
class UserBatch:
    """Rows of several users, as a step gets them.

    X           (users, rows, features), an array or sparse rows where the step accepts them.
    y           (users, rows), or (users, rows, targets) where there are several. ABSENT where a padded row is missing.
    positions   (users,), of the users in the population, and ABSENT where nobody takes a batch row. In a whole batch
                they are numbers in the batch, from 0. None where calls are made by size.
    """

    X: Any
    y: NDArray[Any]
    positions: NDArray[np.int64] | None = None

    def __len__(self) -> int:
        return len(self.X)


ABSENT = -1  # the label of a row that is missing, and the position of a batch row that nobody takes


class Step(Protocol):
    """Computation of users on their own rows, given public values: a frozen dataclass of public arrays and numbers.

    A call returns the contributions of the users of a batch to each statistic.

    By size: all users of the batch have equally many rows.

    Padded: a user with more rows than `rows_per_user` has the first of them in the batch. Missing rows are zero, with
    ABSENT for y. So are all rows of a user with a number that is not finite. `users.batching` says which users share a
    call. In calls about a sample some batch rows are taken by nobody. The step's numbers for such rows are not counted.

    Whole batch: the step is called once, with all users who are asked. It returns terms of a function of the batch,
    kinds of contributions that declare `terms_per_user`. It may raise. The engine then calls it with one user at a time
    and treats users for whom it raises as having no rows.

    If a step is not of the whole batch, a user's contribution must be a function of that user's rows alone, to the last
    bit: see `local.least_squares`.

    A class whose calls also keep users apart where rows have several targets declares, in its own body,
    `several_targets: ClassVar[bool] = True`. Nodes with several targets a row refuse any other class. Subclasses do not
    inherit the declaration, and steps that hold another do not take it over.
    """

    @property
    def spec(self) -> StepSpec: ...

    def __call__(self, batch: UserBatch, /) -> Mapping[str, Contributions | Losses]: ...


@dataclass(frozen=True)
class Everyone:
    """All users."""


EVERYONE = Everyone()
Audience = Everyone | Group | Sample | FixedSample
"""The audience that users are told of: everyone, a group by public ids, or a secret sample that was drawn."""
PlannedAudience = Everyone | Group | Poisson | Fixed
"""The audience that a run is told of: it draws a sample inside, once it is paid for."""


def check_audience(among: Audience) -> None:
    """Raise InputError unless users can be told to ask these: a plan of a sample is none, and is not everyone."""
    if not isinstance(among, Everyone | Group | Sample | FixedSample):
        raise InputError(f"users ask everyone, a group or a sample that was drawn. Got {among!r} instead.")


def check_planned_audience(among: PlannedAudience) -> None:
    """Raise InputError unless a run can be told to ask these: a sample that somebody drew has no price."""
    if not isinstance(among, Everyone | Group | Poisson | Fixed):
        raise InputError(f"a run asks everyone, a group, or a sample that it draws itself. Got {among!r} instead.")


@dataclass(frozen=True)
class Facts:
    """Public facts of users' rows.

    users      number of users: public under replace-one-user, not to be used in a release otherwise.
    features   features of a row: a fact of the schema.
    targets    targets of a row: a fact of the schema.
    sparse     whether steps that accept them get sparse rows: a fact of how the rows are held.
    """

    users: int
    features: int
    targets: int
    sparse: bool


class Users(Protocol):
    """Place where users live: in memory, streamed from disk, on other machines. The same algorithm code runs on each.

    They answer one question, a bounded sum, and let nothing else out.
    """

    @property
    def facts(self) -> Facts: ...

    def sums(
        self, step: Step, bounds: Mapping[str, Bound | LossBound], among: Audience = EVERYONE
    ) -> dict[str, BoundedSum]:
        """Return every statistic of the step, clipped and summed, in one pass over the users who are asked.

        Args:
            step: what users compute.
            bounds: of each statistic.
            among: who is asked.
        """
        ...


def positions_of(batch: UserBatch) -> NDArray[np.int64]:
    """Return the positions of the users of a padded batch, ABSENT where nobody takes a batch row."""
    assert batch.positions is not None
    return batch.positions
