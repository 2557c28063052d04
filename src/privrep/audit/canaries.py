"""Canaries: made-up users who send far too much, each along an axis of its own, as secret coins decide."""

from __future__ import annotations

import os
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from privrep.audit.worlds import TwoWorlds
from privrep.data.table import UserTable
from privrep.privacy.bounds import Contributions
from privrep.privacy.columns import SparseColumns
from privrep.privacy.contributions import Losses
from privrep.privacy.events import Relation
from privrep.privacy.protocol import StepSpec, UserBatch
from privrep.typing import Array

LOUD = 1e9  # what a canary sends, where a bound of 1 is asked for: clipping takes nearly all of it


def draw_coins(count: int) -> NDArray[np.bool_]:
    """Return fair coins (count,), secret as the noise is: they come from the operating system."""
    return np.unpackbits(np.frombuffer(os.urandom(-(-count // 8)), np.uint8))[:count].astype(bool)


@dataclass(frozen=True)
class Sing:
    """Send the target of a user's first row along the axis that the row's feature names."""

    size: int
    padded: bool = False

    @property
    def spec(self) -> StepSpec:
        return StepSpec(layout="padded", rows_per_user=1) if self.padded else StepSpec()

    def __call__(self, batch: UserBatch) -> dict[str, Contributions]:
        users, axis = np.arange(len(batch)), batch.X[:, 0, 0].astype(np.int64)
        sent = batch.y[:, :1].astype(np.float64)
        return {"sum": SparseColumns(users, axis, sent, np.empty((len(batch), 0)), self.size)}


@dataclass(frozen=True)
class Prefer:
    """Send the two numbers of a user's row as its losses by two candidates."""

    @property
    def spec(self) -> StepSpec:
        return StepSpec()

    def __call__(self, batch: UserBatch) -> dict[str, Losses]:
        return {"losses": Losses(batch.X[:, 0].astype(np.float64))}


def make_choir(coins: NDArray[np.bool_], relation: Relation, axes: Array | None = None) -> TwoWorlds:
    """Return canaries in two worlds: as the coins say, and with every coin turned over. They answer as the first.

    Under replace-one-user the coin is a sign. Under add-or-remove-one-user it says whether a canary is there.

    Args:
        coins: (canaries,).
        relation: neighbours of the guarantee.
        axes: of each canary, (canaries,); None: their numbers.
    """
    axes = np.arange(len(coins), dtype=np.float64) if axes is None else axes

    def make_table(coins: NDArray[np.bool_]) -> UserTable:
        """Return the rows of the canaries whose coins these are."""
        there = np.full(len(coins), True) if relation == "replace-one-user" else coins
        sent = np.where(coins, LOUD, -LOUD)
        return UserTable.from_rows(axes[there, None], sent[there], axes[there].astype(np.int64))

    return TwoWorlds(make_table(coins), make_table(~coins))
