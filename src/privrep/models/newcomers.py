"""Heads of newcomers, many at once: users who were not in the fit, and came later with rows of their own.

A head is made of the public representation and one user's own rows, so it costs no privacy.
"""

from __future__ import annotations

from collections.abc import Iterable

import numpy as np

from privrep.data.table import UserTable, find_users, id_kind
from privrep.errors import InputError
from privrep.heads.fitting import fit_heads
from privrep.heads.heads import Heads
from privrep.models.model import Model


def make_heads(fitted: Model, blocks: Iterable[UserTable], *, sparse: bool = False) -> Heads:
    """Return heads of the users of a table, whoever has heads in the model already.

    Args:
        fitted: the model.
        blocks: of users, with the features of the model.
        sparse: whether the table is sparse.
    """
    config = fitted.config
    return fit_heads(
        blocks,
        fitted.representation,
        intercept=config.intercept,
        safety_net=config.safety_net,
        loss=fitted.loss,
        keep_means=count_means(fitted, sparse),
    )


def count_means(fitted: Model, sparse: bool) -> int:
    """Return the number of columns whose means are kept with newcomers' heads: as the fit kept users' means.

    Args:
        fitted: the model.
        sparse: whether the newcomers' rows are.
    """
    columns, kept = fitted.columns, fitted.heads is not None and fitted.heads.means is not None
    if not kept and columns.missing == "refuse":
        return 0
    if columns.features or columns.categorical:
        return len(columns.features)
    return 0 if sparse else len(fitted.representation.scale) - len(columns.indicators)


def join_heads(
    old: Heads | None,
    new: Heads,
    *,
    replace: bool,
    rows: str = "groups",
    model: str = "the model",
    advice: str = "replace=True",
) -> Heads:
    """Return the heads there were, then the new ones, which take the place of old ones of the same users.

    Args:
        old: heads of the model; None: it has none.
        new: heads of newcomers.
        replace: whether users who have a head already get the new one.
        rows: what sentences call the newcomers' rows.
        model: what sentences call the model.
        advice: what sentences tell to pass, so that heads are replaced.
    """
    if old is None:
        return new
    if id_kind(old.ids) != id_kind(new.ids):
        raise InputError(f"the users of {rows} are {id_kind(new.ids)}, those of {model} are {id_kind(old.ids)}.")
    position = find_users(old.ids, new.ids)
    known = position >= 0
    if known.any() and not replace:
        raise InputError(
            f"user {new.ids[known].tolist()[0]!r} of {rows} has a head in {model} already; leave it out, or pass "
            f"{advice}."
        )
    stay = np.ones(len(old.ids), dtype=bool)
    stay[position[known]] = False
    return Heads.join([old.of_users(stay), new])
