"""Heads of a network in its folder: what they say of rows, and heads for users who come later.

Nothing here is released: rows, heads and predictions stay where they are, and no privacy is spent.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from privrep.data.table import UserTable, find_users
from privrep.errors import InputError
from privrep.estimators.network import Centaur
from privrep.heads.neural import fit_own_heads
from privrep.heads.store import write_heads
from privrep.neural.features import check_finite

_KINDS = {int: "integers", float: "decimal numbers", bytes: "bytes"}


@dataclass(frozen=True)
class Joined:
    """Count the users who got a head, the users among them who had one, and the users who have one now."""

    came: int
    replaced: int
    in_all: int


def join_heads(model: Centaur, table: UserTable, folder: Path, *, path: Path, shown: Path, again: bool) -> Joined:
    """Make heads for the users of a table, and join them to those in the folder of their model.

    A user who has one gets another only with `again`. On an error the heads are what they were.

    Args:
        model: as it was read from the folder.
        table: rows as they are, and class numbers; -1 for a row whose label is no class.
        folder: of the model.
        path: of the file that the rows come from, for sentences.
        shown: what sentences call the folder.
        again: whether users who have a head get a new one.
    """
    old = model.heads_
    check_finite(table.X, path, np.repeat(table.ids, table.sizes))
    known = np.zeros(table.n_users, dtype=bool)
    stay = np.ones(0 if old is None else len(old.ids), dtype=bool)
    if old is not None:
        check_kinds(old.ids, table.ids, path, shown)
        position = find_users(old.ids, table.ids)
        known = position >= 0
        stay[position[known]] = False
    if known.any() and not again:
        raise InputError(
            f"user {table.ids[known].tolist()[0]!r} of {path} has a head in {shown} already; leave it out, or pass "
            "--replace."
        )
    heads = fit_own_heads(model.learned_, replace(table, X=model.prepared(table.X)))
    if old is not None:
        heads = old.replaced(stay, heads)
    write_heads(heads, folder)
    return Joined(table.n_users, int(known.sum()), len(heads.ids))


def kind_of(ids: NDArray[Any]) -> str:
    """Return what the ids of users are, in words."""
    return _KINDS.get(type(ids[:1].tolist()[0]), "text")


def check_kinds(old: NDArray[Any], new: NDArray[Any], path: Path, folder: Path) -> None:
    """Raise InputError if the users of a file have ids of another kind than those of a folder."""
    if kind_of(old) != kind_of(new):
        raise InputError(
            f"the users of {path} are {kind_of(new)}, those of {folder} are {kind_of(old)}; write them alike."
        )
