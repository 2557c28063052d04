"""Heads of networks: which kinds there are, how all users fare by each, and everyone's own.

`CANDIDATES` are the kinds (see `softmax`). `HeadLosses` asks every user how it fares by each, each row judged by a head
that has not seen it: one release, which says what suits the population.

`fit_own_heads` makes every user's own head, by the kind that its own left-out rows and the population's speak for.
Those heads never leave their user, so nothing of them is released: they use all of a user's rows, up to MOST_ROWS of
them, and are fitted for groups of users of equal size.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any, Protocol

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from privrep.data.table import UserTable
from privrep.heads.gradient import labels_of
from privrep.heads.softmax import AWFUL, Candidate, HeadInputs, fit, left_out_losses
from privrep.nn.threads import one_thread, rows_of
from privrep.privacy.bounds import Contributions
from privrep.privacy.contributions import Vectors
from privrep.privacy.protocol import StepSpec, UserBatch
from privrep.typing import Array, Singles
from privrep.users.performance import Performance
from privrep.users.summing import map_blocks

BELIEVED = 20.0  # rows of one's own that what all users found counts as
NUMBERS_AT_ONCE = 1 << 21
MOST_ROWS = 1024  # of a user's head: pairs of rows are held, and nobody's may stop the fit
CANDIDATES = (
    *(Candidate("shared", 0.3, penalty) for penalty in (0.0, 3.0, 0.3, 0.03)),
    *(Candidate("shared", 0.3, penalty, 0.5) for penalty in (0.3, 0.03)),
    *(Candidate("shared", 0.3, penalty, 2.0) for penalty in (0.0, 0.3)),
    *(Candidate("shared", few, penalty) for few in (0.03, 3.0) for penalty in (0.0, 0.3)),
    *(Candidate("alone", 0.3, penalty) for penalty in (0.003, 0.01, 0.03, 0.1, 0.3)),
    *(Candidate("alone", few, 0.03) for few in (0.03, 3.0)),
    Candidate("shared", 0.3, 0.03, 2.0),
    *(Candidate("shared", 0.3, penalty) for penalty in (1.0, 0.1)),
)
"""Kinds of heads. Their order is that of a release, and of what model folders hold: add at the end."""
ALONE = tuple(place for place, each in enumerate(CANDIDATES) if each.kind == "alone")
EXPECTED = np.array(
    [
        *(0.2, 0.15, 0.04, 0.0, 0.04, 0.0, 0.2, 0.05, 0.2, 0.05, 0.2, 0.08),  # with the shared part
        *(0.04, 0.01, 0.0, 0.01, 0.04, 0.01, 0.02),  # alone
        *(0.01, 0.1, 0.01),  # with the shared part
    ]
)  # nats: what a row loses by each before anybody is asked, as if the shared part told nothing of classes
LIKELY = EXPECTED[list(ALONE)]
DOUBTED = 0.05  # nats: how far the losses of a population may well be from those
SEVERAL = {"shared": 2, "alone": 3}  # of the kinds that do best, among which a user chooses
LEAST_PART = 0.05  # of a user's head, that a candidate must have to be fitted
NEVER = 1e6  # loss of a kind that may not be chosen
MOST_DIFFERENT = 0.3  # nats: what a user's losses, less their mean, are clipped to; most users differ by more


class View(Protocol):
    """From rows to what heads see; public."""

    @property
    def classes(self) -> int: ...

    def __call__(self, rows: Tensor) -> HeadInputs: ...


@dataclass(frozen=True, eq=False)
class HeadLosses:
    """How much worse than by the best of them a user does by each candidate, by rows that heads have not seen."""

    view: View
    rows_per_user: int
    candidates: tuple[Candidate, ...] = CANDIDATES

    @property
    def spec(self) -> StepSpec:
        held = self.rows_per_user * (8 * self.rows_per_user + 8 * self.view.classes)  # pairs of rows, rows by classes
        return StepSpec(layout="padded", rows_per_user=self.rows_per_user, floats_per_user=held)

    def __call__(self, batch: UserBatch) -> dict[str, Contributions]:
        with one_thread(), torch.no_grad():
            labels = labels_of(batch.y, self.view.classes)
            seen = self.view(rows_of(batch.X))
            values = left_out_losses(self.candidates, seen, labels).numpy()
        over = np.minimum(values - values.min(axis=1, keepdims=True), MOST_DIFFERENT)
        return {"losses": Vectors(over - over.mean(axis=1, keepdims=True))}


class LearnedPart(Protocol):
    """A shared part as heads see it: how rows look through it, and how users fare by each kind of head."""

    @property
    def classes(self) -> int: ...
    @property
    def losses(self) -> Array:
        """Return what a row loses by each of CANDIDATES, over all users; NEVER where one may not be chosen."""
        ...

    def __call__(self, rows: Tensor) -> HeadInputs:
        """Return rows (users, rows, columns) as heads see them."""
        ...


@dataclass(frozen=True)
class OwnHeads:
    """Scores of a row are scale * base + prior + <row as heads see it, weights>; the scale of a head alone is zero."""

    ids: NDArray[Any]
    alone: NDArray[np.bool_]
    scale: Singles  # (users,): of the shared part's scores
    prior: Singles  # (users, classes)
    position: NDArray[np.int64]  # of the weights below, in the array of the head's kind
    shared: Singles  # (heads that use the shared part, size, classes)
    own: Singles  # (heads alone, features, classes)

    def scores(self, learned: LearnedPart, rows: Singles, users: NDArray[np.int64]) -> Singles:
        """Return scores (rows, classes) of rows (rows, columns) of the users at these positions, (rows,)."""
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
        for alone, weights, view in ((False, self.shared, seen.shared.rows[0]), (True, self.own, seen.own.rows[0])):
            mine = np.flatnonzero(self.alone[users] == alone)
            if len(mine):
                each = torch.from_numpy(weights[self.position[users[mine]]])
                result[mine] += torch.bmm(view[mine][:, None, :], each)[:, 0].numpy()
                result[mine] += self.scale[users[mine], None] * seen.base[0][mine].numpy()
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
        return OwnHeads(self.ids[chosen], alone, self.scale[chosen], self.prior[chosen], position, *weights)

    def replaced(self, stay: NDArray[np.bool_], new: OwnHeads) -> OwnHeads:
        """Return the heads of those who stay, then the new ones.

        Ids are kept as they are: integers of two kinds have no common one in NumPy but decimal numbers.
        """
        old, added = self.of(stay), new.of(np.ones(len(new.ids), dtype=bool))
        ids = np.empty(len(old.ids) + len(added.ids), dtype=object)
        ids[:] = old.ids.tolist() + added.ids.tolist()
        return replace(OwnHeads.join([old, added]), ids=ids)


def fit_own_heads(learned: LearnedPart, table: UserTable) -> OwnHeads:
    """Return a head for every user of the table, whose rows are those the shared part was learned from."""
    table = first_rows(table, MOST_ROWS)

    def fitted(some: tuple[NDArray[np.int64], int]) -> OwnHeads:
        positions, size = some
        X, y = table.group(positions, size) if size else _no_rows(len(positions), table.n_features)
        return _fit_group_or_each(learned, table.ids[positions], X, y)

    groups = list(_groups(learned, table))
    parts = list(map_blocks(fitted, groups, Performance()))
    return _in_order(OwnHeads.join(parts), np.concatenate([positions for positions, _ in groups]))


def _groups(learned: LearnedPart, table: UserTable) -> Iterator[tuple[NDArray[np.int64], int]]:
    """Yield positions of users of one number of rows, and that number; those without rows last."""
    for positions, size in table.positions_by_size():
        step = max(NUMBERS_AT_ONCE // (size * max(table.n_features, learned.classes, size)), 1)
        for start in range(0, len(positions), step):
            yield positions[start : start + step], size
    without = np.flatnonzero(table.sizes == 0)
    if len(without) or not table.n_users:
        yield without, 0


def _no_rows(users: int, features: int) -> tuple[NDArray[Any], NDArray[Any]]:
    return np.zeros((users, 1, features), dtype=np.float32), np.full((users, 1), -1.0)


def first_rows(table: UserTable, most: int) -> UserTable:
    """Return the table with the first rows of each user, at most so many."""
    if not len(table.sizes) or table.sizes.max() <= most:
        return table
    place = np.arange(table.n_rows) - np.repeat(table.offsets[:-1] - table.offsets[0], table.sizes)
    offsets = np.concatenate([[0], np.cumsum(np.minimum(table.sizes, most))]).astype(np.int64)
    return UserTable(table.X[place < most], table.y[place < most], offsets, table.ids)


def _in_order(heads: OwnHeads, places: NDArray[np.int64]) -> OwnHeads:
    back = np.argsort(places)
    users = {name: getattr(heads, name)[back] for name in ("ids", "alone", "scale", "prior", "position")}
    return replace(heads, **users)


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
    places = choices(learned.losses)
    candidates = [CANDIDATES[place] for place in places]
    scale, prior = torch.zeros(len(ids)), torch.zeros(len(ids), learned.classes)
    with one_thread(), torch.no_grad():
        seen = learned(torch.from_numpy(rows))
        shares, alone = weigh(learned.losses[places], candidates, seen, labels)
        slopes = [torch.zeros(len(ids), view.rows.shape[-1], learned.classes) for view in (seen.shared, seen.own)]
        for candidate, share in zip(candidates, torch.from_numpy(shares.T).float(), strict=True):
            mine = torch.nonzero(share)[:, 0]
            if len(mine):
                found, part = fit(candidate, seen.of(mine), labels[mine]), share[mine]
                scale[mine] += part * found.scale
                prior[mine] += part[:, None] * found.prior
                slopes[candidate.kind == "alone"][mine] += part[:, None, None] * found.slopes
    position = np.where(alone, np.cumsum(alone), np.cumsum(~alone)) - 1
    shared, own = slopes[0].numpy()[~alone], slopes[1].numpy()[alone]
    return OwnHeads(ids, alone, scale.numpy(), prior.numpy(), position, shared, own)


def believed_losses(released: Array, noise: float) -> Array:
    """Return what a row loses by each of CANDIDATES: what was released, drawn towards EXPECTED as far as noise asks.

    The best of many noisy losses is mostly the luckiest one. At small budgets users are better served by what is
    likely anyway, and by their own rows.

    Args:
        released: (candidates,), mean over users, about its own mean.
        noise: its standard deviation.
    """
    part = DOUBTED**2 / (DOUBTED**2 + noise**2)
    found = part * (released - released.mean()) + (1 - part) * (EXPECTED - EXPECTED.mean())
    return np.asarray(found - found.min())


def choices(losses: Array) -> list[int]:
    """Return the places of the candidates among which a user chooses: those by which all users fare best."""
    best: list[int] = []
    for kind, several in SEVERAL.items():
        allowed = [p for p, each in enumerate(CANDIDATES) if each.kind == kind and losses[p] < NEVER]
        best += sorted(sorted(allowed, key=lambda place: float(losses[place]))[:several])
    return best


def weigh(
    believed: Array, candidates: Sequence[Candidate], seen: HeadInputs, labels: Tensor
) -> tuple[Array, NDArray[np.bool_]]:
    """Return the part of each candidate in each user's head, (users, candidates), and whether the head is alone.

    A user's own rows speak by what heads lose that have not seen them; all users' losses count as BELIEVED more rows.
    Candidates of the kind that does best are averaged, each by how likely it makes those rows: a choice between heads
    that do about as well would follow chance. Scores are linear in heads, so an average of heads is a head.

    Args:
        believed: what a row loses by each candidate, over all users.
        candidates: among which users choose.
        seen: rows as heads see them.
        labels: (users, rows), -1 where there is no row.
    """
    rows = (labels >= 0).sum(dim=1).numpy()[:, None]
    losses = left_out_losses(candidates, seen, labels).nan_to_num(nan=AWFUL).numpy()
    cost = rows * losses + BELIEVED * believed
    kinds = np.array([each.kind == "alone" for each in candidates])
    alone = kinds[cost.argmin(axis=1)]
    over = np.where(kinds == alone[:, None], cost, np.inf) - cost.min(axis=1, keepdims=True)
    shares = np.exp(-over)
    shares[shares < LEAST_PART * shares.sum(axis=1, keepdims=True)] = 0.0
    return shares / shares.sum(axis=1, keepdims=True), alone


def losses_of_nobody() -> Array:
    """Return the losses that stand for all users' where nothing was released: everybody is alone."""
    losses = np.full(len(CANDIDATES), NEVER)
    losses[list(ALONE)] = LIKELY
    return losses
