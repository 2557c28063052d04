"""Heads of two classes on a representation that was selected: functions of it and one user's own rows."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from functools import partial
from typing import Any, cast

import numpy as np
from numpy.typing import NDArray

from privrep.data.sparse import SparseRows
from privrep.data.table import UserTable
from privrep.heads.margin import LossName, count_first_half, fit_lipschitz, fit_zero_one_heads, shorten_rows
from privrep.typing import Array
from privrep.users.performance import Performance
from privrep.users.summing import clean_rows, map_blocks


@dataclass(frozen=True, eq=False)
class MarginHeads:
    """The heads of users on a representation that was selected. They belong to their users."""

    ids: NDArray[Any]
    weights: Array  # (users, k)


@dataclass(frozen=True)
class MarginRule:
    """The rule by which users' heads of two classes are fitted on a representation that was selected."""

    matrix: Array  # (d, k)
    loss: str  # "margin": 0-1 loss; else one of `margin.LOSSES`
    radius: float  # to which images of rows are shortened, where there is no margin
    norm: float  # of heads, at most, where there is no margin
    second_half: bool  # whether the rows that chose the representation are left out


def fit_margin_heads(blocks: Iterable[UserTable], rule: MarginRule, performance: Performance | None = None) -> Array:
    """Return a head for every user of the blocks, (users, k).

    Args:
        blocks: of users (`table.blocks()`).
        rule: how heads are fitted.
        performance: threads; None: the default.
    """
    return np.concatenate(list(map_blocks(partial(_fit_margin_block, rule=rule), blocks, performance or Performance())))


def _fit_margin_block(block: UserTable, rule: MarginRule) -> Array:
    """Return the heads of one block of users, (users, k); zero for users whose numbers overflow."""
    heads = np.zeros((block.n_users, rule.matrix.shape[1]))
    for users, size in block.positions_by_size():
        with np.errstate(all="ignore"):  # a user whose numbers overflow has no head, and nobody hears of it
            X, y = clean_rows(*block.group(users, size))
            P = X.project(rule.matrix) if isinstance(X, SparseRows) else X @ rule.matrix.astype(X.dtype)
            used = count_first_half(size) if rule.second_half and size > 1 else 0
            P, y = P[:, used:].astype(np.float64), y[:, used:, None]
            if rule.loss == "margin":
                heads[users] = fit_zero_one_heads(P * y)
            else:
                F, loss = shorten_rows(P[..., None], rule.radius), cast(LossName, rule.loss)
                heads[users] = fit_lipschitz(F, y.astype(np.float64), loss, rule.norm).heads[..., 0]
    return np.nan_to_num(heads)
