"""What a user makes of the shared part and its own rows, in closed form, with each row left out in turn.

Scores of a row are  base + log of how often the user has each class + slope * (what the user's own rows say),
where `base` are the shared part's scores (zero for a user alone) and the last term is ridge regression, on the user's
own rows, of what the first two leave over: one Newton step from them. `Candidate` says how much of each. Leaving out a
row takes its count from the frequencies and its residual from the regression, exactly.

Calls have a fixed shape (see `users.batching`): products are stacked by user, so a user's numbers are its own to the
last bit, and `HeadLosses` may turn them into a release.

`fit_own_heads` makes every user's own head: the shared part weighed against the user's own rows, or the user's rows
alone. Those heads never leave their user, so nothing of them is released: they use all of a user's rows, up to
MOST_ROWS of them, and are fitted for groups of users of equal size.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal, Protocol

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from privrep.data.table import UserTable
from privrep.heads.gradient import labels_of
from privrep.nn.threads import one_thread
from privrep.privacy.bounds import Contributions
from privrep.privacy.contributions import Vectors
from privrep.privacy.protocol import StepSpec, UserBatch
from privrep.typing import Singles

BELIEVED = 20.0  # rows of one's own that what all users found counts as
NUMBERS_AT_ONCE = 1 << 23
MOST_ROWS = 1024  # of a user's head: pairs of rows are held, and nobody's may stop the fit
Evidence = Literal["shared", "alone"]
ALONE_RIDGE = 0.01
AWFUL = 20.0  # nats: what a row may cost at most


@dataclass(frozen=True)
class Candidate:
    """One way to weigh the shared part against a user's own rows."""

    kind: Evidence
    pseudo_count: float  # of classes that a user has not shown: small where users have few of them
    ridge: float = 1.0
    slope: float = 0.0  # of the user's own rows; zero: their classes alone count

    @property
    def words(self) -> str:
        own = f", own rows with slope {self.slope:g} and ridge {self.ridge:g}" if self.slope else ""
        return f"{self.kind}, pseudo-count {self.pseudo_count:g}{own}"


CANDIDATES = (
    Candidate("shared", 0.03),
    Candidate("shared", 0.3),
    Candidate("shared", 3.0),
    Candidate("shared", 0.03, ridge=1.0, slope=2.0),
    Candidate("shared", 0.3, ridge=1.0, slope=2.0),
    Candidate("shared", 0.03, ridge=0.3, slope=8.0),
    Candidate("shared", 0.3, ridge=0.3, slope=8.0),
    Candidate("shared", 3.0, ridge=0.3, slope=8.0),
    Candidate("shared", 0.3, ridge=0.3, slope=16.0),
    Candidate("alone", 0.03, ridge=0.3, slope=8.0),
    Candidate("alone", 0.3, ridge=0.3, slope=8.0),
    Candidate("alone", 0.3, ridge=0.3, slope=3.0),
    Candidate("alone", 3.0, ridge=0.3, slope=3.0),
)
ALONE = tuple(candidate for candidate in CANDIDATES if candidate.kind == "alone")
USUAL = 3  # where the shared part has scores
USUAL_ON_DIRECTIONS = 6  # and where it has none: one's own rows must say it all
USUAL_ALONE = 10
MOST_DIFFERENT = 0.3  # nats: what a user's losses, less their mean, are clipped to; most users differ by more


@dataclass(frozen=True)
class HeadInputs:
    """Users' rows as heads see them: (users, rows, .), all functions of the row and of public numbers."""

    base: Tensor  # scores of the shared part
    shared: Tensor  # what one's own rows are compared in, with the shared part
    own: Tensor  # and alone

    def rows(self, kind: Evidence) -> Tensor:
        return self.shared if kind == "shared" else self.own

    def scores(self, kind: Evidence) -> Tensor:
        return self.base if kind == "shared" else torch.zeros_like(self.base)


class View(Protocol):
    """From rows to what heads see; public."""

    @property
    def classes(self) -> int: ...

    def __call__(self, rows: Tensor) -> HeadInputs: ...


@dataclass(frozen=True)
class HeadFits:
    """Heads of one candidate: everything about a user that a prediction needs."""

    prior: Tensor  # (users, classes)
    dual: Tensor  # (users, rows, classes): weights of the user's own rows; zero where slope is
    left_out: Tensor  # (users, rows, classes): scores of each row by the head without it


def fit(candidate: Candidate, seen: HeadInputs, labels: Tensor) -> HeadFits:
    """All users' heads at once; labels (users, rows) are -1 where there is no row."""
    base = seen.scores(candidate.kind)
    marked = one_hot(labels, base.shape[-1])
    counts = marked.sum(dim=1, keepdim=True)
    prior = log_frequencies(counts, candidate.pseudo_count)
    without = base + log_frequencies(counts - marked, candidate.pseudo_count)
    if not candidate.slope:
        return HeadFits(prior[:, 0], torch.zeros_like(base), without)
    present = (labels >= 0)[..., None]
    residual = torch.where(present, marked - torch.softmax(without, dim=-1), 0.0)
    rows = torch.where(present, seen.rows(candidate.kind), 0.0)
    gram = torch.bmm(rows, rows.mT).to(torch.float64)
    inverse = torch.linalg.inv_ex(gram + candidate.ridge * torch.eye(gram.shape[1], dtype=torch.float64)).inverse
    dual = torch.bmm(inverse, residual.to(torch.float64))
    others = residual - dual / inverse.diagonal(dim1=1, dim2=2)[..., None]
    return HeadFits(
        prior[:, 0], (candidate.slope * dual).to(torch.float32), (without + candidate.slope * others).to(torch.float32)
    )


def predict(candidate: Candidate, fits: HeadFits, seen: HeadInputs, rows: HeadInputs) -> Tensor:
    """Scores of new rows (users, r, .) by these heads, whose own rows are `seen`."""
    scores = rows.scores(candidate.kind) + fits.prior[:, None, :]
    if not candidate.slope:
        return scores
    return scores + torch.bmm(torch.bmm(rows.rows(candidate.kind), seen.rows(candidate.kind).mT), fits.dual)


def fit_alone(rows: Tensor, labels: Tensor, prior: Tensor, steps: int = 100) -> tuple[Tensor, Tensor]:
    """(users, classes) and (users, features, classes): a softmax regression of everyone's own, on rows less their mean
    and of size one, by accelerated descent from how often a user has each class: intercepts and weights.

    For heads alone, which are never released; choices are made by the closed form, which is somewhat worse.
    """
    present = (labels >= 0)[..., None]
    count = present.sum(dim=1, keepdim=True).clamp(min=1)
    mean = torch.where(present, rows, 0.0).sum(dim=1, keepdim=True) / count
    rows = torch.where(present, rows - mean, 0.0)
    size = ((rows * rows).sum(dim=(1, 2), keepdim=True) / count).sqrt().clamp(min=1e-12)
    rows = rows / size
    gram, marked = torch.bmm(rows, rows.mT), one_hot(labels, prior.shape[-1])
    steepest = 0.5 * gram.diagonal(dim1=1, dim2=2).sum(dim=1)[:, None, None] + ALONE_RIDGE
    dual = ahead = torch.zeros_like(marked)
    for step in range(steps):
        scores = torch.bmm(gram, ahead) + prior[:, None, :]
        slope = torch.where(present, torch.softmax(scores, dim=-1) - marked, 0.0) + ALONE_RIDGE * ahead
        last, dual = dual, ahead - slope / steepest
        ahead = dual + step / (step + 3) * (dual - last)
    weights = (torch.bmm(rows.mT, dual) / size).nan_to_num()
    return prior - torch.bmm(mean, weights)[:, 0], weights


def left_out_loss(fits: HeadFits, labels: Tensor) -> Tensor:
    """(users,): mean cross-entropy of rows by the head without them; zero for a user without rows."""
    present = labels >= 0
    each = -torch.log_softmax(fits.left_out, dim=-1).gather(-1, labels.clamp(min=0)[..., None])[..., 0]
    each = torch.where(present, each.clamp(max=AWFUL), 0.0)
    return each.sum(dim=1) / present.sum(dim=1).clamp(min=1)


def one_hot(labels: Tensor, classes: int) -> Tensor:
    """(..., classes), all zero where there is no row."""
    marked = torch.zeros(*labels.shape, classes).scatter_(-1, labels.clamp(min=0)[..., None], 1.0)
    return marked * (labels >= 0)[..., None]


def log_frequencies(counts: Tensor, pseudo_count: float) -> Tensor:
    counts = counts.clamp(min=0) + pseudo_count
    return torch.log(counts / counts.sum(dim=-1, keepdim=True))


@dataclass(frozen=True, eq=False)
class HeadLosses:
    """How much better or worse than on average a user does by each candidate, by leaving out its rows in turn."""

    view: View
    rows_per_user: int
    candidates: tuple[Candidate, ...] = CANDIDATES

    @property
    def spec(self) -> StepSpec:
        held = self.rows_per_user * (4 * self.rows_per_user + 8 * self.view.classes)  # pairs of rows, rows by classes
        return StepSpec(layout="padded", rows_per_user=self.rows_per_user, floats_per_user=held)

    def __call__(self, batch: UserBatch) -> dict[str, Contributions]:
        with one_thread(), torch.no_grad():
            labels = labels_of(batch.y, self.view.classes)
            seen = self.view(torch.from_numpy(batch.X.astype(np.float32, copy=False)))
            losses = torch.stack([left_out_loss(fit(c, seen, labels), labels) for c in self.candidates], dim=1)
        values = losses.to(torch.float64).numpy()
        return {"losses": Vectors(values - values.mean(axis=1, keepdims=True))}


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
