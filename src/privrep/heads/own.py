"""Every user's own head: the shared part weighed against the user's own rows, or the user's rows alone.

Heads never leave their user, so nothing here is released: they use all of a user's rows, up to MOST_ROWS of them, and
are fitted for groups of users of equal size.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Any, Protocol

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from privrep.data.table import UserTable
from privrep.heads.gradient import labels_of
from privrep.heads.neural import ALONE, AWFUL, Candidate, HeadFits, HeadInputs, fit, fit_alone, left_out_loss
from privrep.typing import Singles

BELIEVED = 20.0  # rows of one's own that what all users found counts as
NUMBERS_AT_ONCE = 1 << 23
MOST_ROWS = 1024  # of a user's head: pairs of rows are held, and nobody's may stop the fit


class LearnedPart(Protocol):
    """What heads need of the shared part: how rows look through it, and which candidates do best with it."""

    @property
    def classes(self) -> int: ...
    @property
    def shares_nothing(self) -> bool: ...
    @property
    def shared(self) -> Candidate: ...
    @property
    def alone(self) -> Candidate: ...
    @property
    def advantage(self) -> float:
        """Return by how many nats a row the shared part did better than heads alone, over all users."""
        ...

    def __call__(self, rows: Tensor) -> HeadInputs:
        """Return rows (users, rows, columns) as heads see them."""
        ...


@dataclass(frozen=True)
class OwnHeads:
    """Scores of a row are base + prior + <row as heads see it, weights>; base is zero for a head that is alone."""

    ids: NDArray[Any]
    alone: NDArray[np.bool_]
    prior: Singles  # (users, classes)
    position: NDArray[np.int64]  # of the weights below, in the array of the head's kind
    shared: Singles  # (heads that use the shared part, size, classes)
    own: Singles  # (heads alone, features, classes)

    def scores(self, learned: LearnedPart, rows: Singles, users: NDArray[np.int64]) -> Singles:
        """(rows, classes) of rows of the users at these positions."""
        result = np.empty((len(rows), learned.classes), dtype=np.float32)
        step = max(NUMBERS_AT_ONCE // max(self.own.shape[1] * learned.classes, 1), 1)
        for start in range(0, len(rows), step):
            some = slice(start, start + step)
            result[some] = self._scores(learned, rows[some], users[some])
        return result

    def _scores(self, learned: LearnedPart, rows: Singles, users: NDArray[np.int64]) -> Singles:
        with torch.no_grad():
            seen = learned(torch.from_numpy(np.ascontiguousarray(rows, dtype=np.float32))[None])
        result = self.prior[users].copy()
        for alone, weights, view in ((False, self.shared, seen.shared[0]), (True, self.own, seen.own[0])):
            mine = np.flatnonzero(self.alone[users] == alone)
            if len(mine):
                each = torch.from_numpy(weights[self.position[users[mine]]])
                result[mine] += torch.bmm(view[mine][:, None, :], each)[:, 0].numpy()
                result[mine] += 0 if alone else seen.base[0][mine].numpy()
        return result

    @classmethod
    def join(cls, parts: Iterable[OwnHeads]) -> OwnHeads:
        """One after the other. Of each part the weights must be in the order of its users."""
        parts = list(parts)
        joined = {name: np.concatenate([getattr(p, name) for p in parts]) for name in cls.__dataclass_fields__}
        alone = joined["alone"]
        joined["position"] = np.where(alone, np.cumsum(alone), np.cumsum(~alone)) - 1
        return cls(**joined)

    def of(self, chosen: NDArray[np.bool_]) -> OwnHeads:
        """Return the heads of the chosen users, weights in the order of the users, as `join` takes them."""
        alone, place = self.alone[chosen], self.position[chosen]
        position = np.where(alone, np.cumsum(alone), np.cumsum(~alone)) - 1
        weights = self.shared[place[~alone]], self.own[place[alone]]
        return OwnHeads(self.ids[chosen], alone, self.prior[chosen], position, *weights)

    def replaced(self, stay: NDArray[np.bool_], new: OwnHeads) -> OwnHeads:
        """Return the heads of those who stay, then the new ones.

        Ids are kept as they are: integers of two kinds have no common one in NumPy but decimal numbers.
        """
        old, added = self.of(stay), new.of(np.ones(len(new.ids), dtype=bool))
        ids = np.empty(len(old.ids) + len(added.ids), dtype=object)
        ids[:] = old.ids.tolist() + added.ids.tolist()
        return replace(OwnHeads.join([old, added]), ids=ids)


def fit_own_heads(learned: LearnedPart, table: UserTable) -> OwnHeads:
    """A head for every user of the table, whose rows are those the shared part was learned from."""
    parts: list[OwnHeads] = []
    order: list[NDArray[np.int64]] = []
    table = first_rows(table, MOST_ROWS)
    for positions, size in table.positions_by_size():
        step = max(NUMBERS_AT_ONCE // (size * max(table.n_features, learned.classes, size)), 1)
        for start in range(0, len(positions), step):
            some = positions[start : start + step]
            X, y = table.group(some, size)
            parts.append(_fit_group_or_each(learned, table.ids[some], X, y))
            order.append(some)
    without = np.flatnonzero(table.sizes == 0)
    if len(without) or not parts:
        X = np.zeros((len(without), 1, table.n_features), dtype=np.float32)
        parts.append(_fit_group(learned, table.ids[without], X, np.full((len(without), 1), -1.0)))
        order.append(without)
    return _in_order(OwnHeads.join(parts), np.concatenate(order))


def first_rows(table: UserTable, most: int) -> UserTable:
    """The table with the first so many rows of each user."""
    if not len(table.sizes) or table.sizes.max() <= most:
        return table
    place = np.arange(table.n_rows) - np.repeat(table.offsets[:-1] - table.offsets[0], table.sizes)
    offsets = np.concatenate([[0], np.cumsum(np.minimum(table.sizes, most))]).astype(np.int64)
    return UserTable(table.X[place < most], table.y[place < most], offsets, table.ids)


def _in_order(heads: OwnHeads, places: NDArray[np.int64]) -> OwnHeads:
    back = np.argsort(places)
    return OwnHeads(
        heads.ids[back], heads.alone[back], heads.prior[back], heads.position[back], heads.shared, heads.own
    )


def _fit_group_or_each(learned: LearnedPart, ids: NDArray[Any], X: NDArray[Any], y: NDArray[Any]) -> OwnHeads:
    """One on whose rows the network fails has a head without rows."""
    try:
        return _fit_group(learned, ids, X, y)
    except Exception:
        if len(ids) == 1:
            return _fit_group(learned, ids, np.zeros_like(X), np.full_like(y, -1))
        each = [slice(user, user + 1) for user in range(len(ids))]
        return OwnHeads.join([_fit_group_or_each(learned, ids[u], X[u], y[u]) for u in each])


def _fit_group(learned: LearnedPart, ids: NDArray[Any], X: NDArray[Any], y: NDArray[Any]) -> OwnHeads:
    bad = ~(np.isfinite(X).all(axis=(1, 2)))
    rows = np.where(bad[:, None, None], 0, X).astype(np.float32)
    labels = labels_of(np.where(bad[:, None], -1, np.nan_to_num(y, nan=-1.0)), learned.classes)
    with torch.no_grad():
        seen = learned(torch.from_numpy(rows))
        with_others, alone = fit(learned.shared, seen, labels), [fit(each, seen, labels) for each in ALONE]
        chosen = prefers_alone(learned, with_others, alone, labels)
        shared = _weights(learned.shared, with_others, seen, labels)
        intercept, own = fit_alone(seen.own, labels, alone[ALONE.index(learned.alone)].prior)
        prior = torch.where(chosen[:, None], intercept, with_others.prior)
    flags = chosen.numpy()
    position = np.where(flags, np.cumsum(flags), np.cumsum(~flags)) - 1
    return OwnHeads(ids, flags, prior.numpy(), position, shared[~chosen].numpy(), own[chosen].numpy())


def prefers_alone(learned: LearnedPart, with_others: HeadFits, alone: Sequence[HeadFits], labels: Tensor) -> Tensor:
    """Who does better alone: by its own rows, each left out in turn, and by what all users found, as so many more.

    Alone it is the best of several that counts: the head itself is better than any of them.
    """
    if learned.shares_nothing:
        return torch.ones(len(labels), dtype=torch.bool)
    rows = (labels >= 0).sum(dim=1)
    losses = torch.stack([left_out_loss(each, labels) for each in alone])
    gain = losses.nan_to_num(nan=AWFUL).min(dim=0).values - left_out_loss(with_others, labels)
    return rows * gain.nan_to_num(nan=-AWFUL) + BELIEVED * learned.advantage < 0


def _weights(candidate: Candidate, fits: HeadFits, seen: HeadInputs, labels: Tensor) -> Tensor:
    rows = torch.where((labels >= 0)[..., None], seen.rows(candidate.kind), 0.0)
    return torch.bmm(rows.mT, fits.dual).nan_to_num()
