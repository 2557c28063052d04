"""A user's softmax regression on its own rows, with what is shared as its start, and what it loses on rows left out.

Scores of a row are  scale * base + log of how often the user has each class + <row, slopes>,  rows and base about the
user's own point and over its size (see `standard`). `base` are the shared part's scores, zero for a user alone, and
affine in the row. The slopes are the posterior mode under a normal prior:
the user's own rows pull them, `penalty` holds them at zero. `Candidate` says how much of each. With few rows slopes
stay near zero by themselves, with many they are the user's own regression.

Slopes are kept in their dual form, a number for each row and class. Each step of the descent solves with the pairs of
a user's rows under the largest curvature that a softmax can have, which never overshoots (Boehning 1992).

Rows are left out in FOLDS portions, every FOLDS-th row in one. A head that is judged on a row has not seen its class.

Calls have a fixed shape (see `users.batching`): products are stacked by user, so a user's numbers are its own to the
last bit, and `HeadLosses` may turn them into a release.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Literal

import torch
from torch import Tensor

from privrep.heads.standard import standardise
from privrep.typing import Array

Evidence = Literal["shared", "alone"]
FOLDS = 4
STEPS = 6  # more of them change no choice, and the penalty less than it says does no harm
AWFUL = 20.0  # nats: what a row may cost at most


@dataclass(frozen=True)
class Candidate:
    """One way to weigh the shared part against a user's own rows."""

    kind: Evidence
    pseudo_count: float  # of classes that a user has not shown: small where users have few of them
    penalty: float = 0.0  # of the user's own slopes, against rows of mean square one; 0: no slopes
    scale: float = 1.0  # of the shared part's scores

    @property
    def words(self) -> str:
        """Return the candidate in words."""
        own = f", own slopes with penalty {self.penalty:g}" if self.penalty else ""
        trust = f" times {self.scale:g}" if self.kind == "shared" else ""
        return f"{self.kind}{trust}, pseudo-count {self.pseudo_count:g}{own}"


@dataclass(frozen=True)
class Sight:
    """Users' rows as one kind of heads sees them, (users, rows, size), with the public centre of such rows."""

    rows: Tensor
    centre: Array
    pull: float  # rows that the centre counts as


@dataclass(frozen=True)
class HeadInputs:
    """Users' rows as heads see them, all functions of the row and of public numbers."""

    base: Tensor  # (users, rows, classes): scores of the shared part, affine in what `shared` holds, or zero
    centre_base: Tensor  # (classes,): those of the centre
    shared: Sight  # what one's own rows are compared in, with the shared part
    own: Sight  # and alone

    def sight(self, kind: Evidence) -> Sight:
        """Return the rows in which slopes are fitted."""
        return self.shared if kind == "shared" else self.own

    def of(self, users: Tensor) -> HeadInputs:
        """Return the same of some users."""
        own = replace(self.own, rows=self.own.rows[users])
        shared = own if self.shared is self.own else replace(self.shared, rows=self.shared.rows[users])
        return HeadInputs(self.base[users], self.centre_base, shared, own)


@dataclass(frozen=True)
class HeadFits:
    """Heads of several users: scores of a row are scale * base + prior + <row, slopes>, rows and base as they are."""

    scale: Tensor  # (users,)
    prior: Tensor  # (users, classes)
    slopes: Tensor  # (users, size, classes)


class OwnRows:
    """Rows of several users about their own points, and their inner products.

    Args:
        sight: the rows.
        labels: (users, rows), -1 where there is no row.
    """

    def __init__(self, sight: Sight, labels: Tensor) -> None:
        found = standardise(sight.rows.numpy(), (labels >= 0).numpy(), sight.centre, sight.pull)
        self.rows, self.point, self.size, self.count = (torch.tensor(part) for part in found)  # see `rows_of`
        self.pull = sight.pull

    @cached_property
    def pairs(self) -> Tensor:
        """Return inner products of a user's rows, (users, rows, rows)."""
        return torch.bmm(self.rows, self.rows.mT)

    def point_base(self, seen: HeadInputs, there: Tensor) -> Tensor:
        """Return the shared part's scores of the users' points, (users, 1, classes)."""
        total = torch.where(there, seen.base, 0.0).sum(dim=1, keepdim=True) + self.pull * seen.centre_base
        return total / (self.count + self.pull).clamp(min=1e-6)


def fit(candidate: Candidate, seen: HeadInputs, labels: Tensor) -> HeadFits:
    """Return the heads of all users by one candidate.

    Args:
        candidate: how the shared part and own rows are weighed.
        seen: users' rows as heads see them.
        labels: (users, rows), -1 where there is no row.
    """
    own, here = OwnRows(seen.sight(candidate.kind), labels), (labels >= 0)[..., None]
    marked = one_hot(labels, seen.base.shape[-1])
    prior = user_frequencies(marked.sum(dim=1, keepdim=True), candidate.pseudo_count)
    point = own.point_base(seen, here)
    scale = torch.zeros(len(labels), 1, 1) if candidate.kind == "alone" else candidate.scale / own.size
    slopes = torch.zeros(len(labels), own.rows.shape[-1], marked.shape[-1])
    if candidate.penalty:
        start = scale * (seen.base - point) + prior
        solver = _solver(own.pairs, here, candidate.penalty)
        dual = _descended(own.pairs, solver, start, marked, here, candidate.penalty)
        slopes = (torch.bmm(own.rows.mT, dual) / own.size).nan_to_num()
    intercept = prior - scale * point - torch.bmm(own.point, slopes)
    return HeadFits(scale[:, 0, 0], intercept[:, 0].nan_to_num(), slopes)


def left_out_losses(candidates: Sequence[Candidate], seen: HeadInputs, labels: Tensor) -> Tensor:
    """Return the mean cross-entropy of each user's rows by heads that were fitted without them, (users, candidates).

    Points and sizes are those of all of a user's rows: they know no class. Users without rows lose nothing.

    Args:
        candidates: kinds of heads.
        seen: users' rows as heads see them.
        labels: (users, rows), -1 where there is no row.
    """
    own = {"shared": OwnRows(seen.shared, labels)}
    own["alone"] = own["shared"] if seen.own is seen.shared else OwnRows(seen.own, labels)
    marked, there = one_hot(labels, seen.base.shape[-1]), labels >= 0
    base = (seen.base - own["shared"].point_base(seen, there[..., None])) / own["shared"].size
    place = torch.arange(labels.shape[1]) % FOLDS
    total = torch.zeros(len(labels), len(candidates), dtype=torch.float64)
    for fold in range(FOLDS):
        here, out = (there & (place != fold))[..., None], there & (place == fold)
        kept = marked * here
        solvers: dict[tuple[int, float], Tensor] = {}
        for number, each in enumerate(candidates):
            prior = user_frequencies(kept.sum(dim=1, keepdim=True), each.pseudo_count)
            scores = prior.expand_as(base) if each.kind == "alone" else each.scale * base + prior
            if each.penalty:
                rows = own[each.kind]
                key = id(rows), each.penalty
                if key not in solvers:
                    solvers[key] = _solver(rows.pairs, here, each.penalty)
                dual = _descended(rows.pairs, solvers[key], scores, kept, here, each.penalty)
                scores = torch.baddbmm(scores, rows.pairs, dual)
            total[:, number] += _costs(scores, labels, out).sum(dim=1)
    return total / there.sum(dim=1).clamp(min=1)[:, None]


def _solver(pairs: Tensor, here: Tensor, penalty: float) -> Tensor:
    """Return the inverse of half the pairs of rows that are here plus the penalty, (users, rows, rows)."""
    used = torch.where(here & here.mT, pairs, 0.0).to(torch.float64) / 2
    used.diagonal(dim1=1, dim2=2).add_(penalty)
    return torch.linalg.inv_ex(used).inverse.to(torch.float32)


def _descended(pairs: Tensor, solver: Tensor, start: Tensor, marked: Tensor, here: Tensor, penalty: float) -> Tensor:
    """Return the dual form of slopes that the rows which are here ask for, (users, rows, classes)."""
    dual = ahead = torch.zeros_like(marked)
    for step in range(STEPS):
        scores = torch.baddbmm(start, pairs, ahead)
        slope = torch.where(here, torch.softmax(scores, dim=-1) - marked, 0.0).add_(ahead, alpha=penalty)
        last, dual = dual, torch.baddbmm(ahead, solver, slope, alpha=-1)
        ahead = dual + step / (step + 3) * (dual - last)
    return dual


def _costs(scores: Tensor, labels: Tensor, out: Tensor) -> Tensor:
    """Return the cross-entropy of the rows that are left out, (users, rows), zero for others."""
    each = -torch.log_softmax(scores, dim=-1).gather(-1, labels.clamp(min=0)[..., None])[..., 0]
    return torch.where(out, each.clamp(max=AWFUL), 0.0)


def one_hot(labels: Tensor, classes: int) -> Tensor:
    """Return classes as zeros and ones, (..., classes), all zero where there is no row."""
    marked = torch.zeros(*labels.shape, classes).scatter_(-1, labels.clamp(min=0)[..., None], 1.0)
    return marked * (labels >= 0)[..., None]


def log_frequencies(counts: Tensor, pseudo_count: Tensor | float) -> Tensor:
    """Return the logarithm of how often each class is shown, counts (..., classes) and pseudo-counts together."""
    counts = counts.clamp(min=0) + pseudo_count
    return torch.log(counts / counts.sum(dim=-1, keepdim=True))


def user_frequencies(counts: Tensor, pseudo_count: float) -> Tensor:
    """Return the logarithm of how often each class is shown by users who may have few rows.

    A class that n rows have not shown may still be one row in n: it never counts as less than that.

    Args:
        counts: rows of each class, (users, 1, classes).
        pseudo_count: added to each.
    """
    rows = counts.sum(dim=-1, keepdim=True)
    return log_frequencies(counts, torch.where(rows > 0, 1 / rows.clamp(min=1), 0.0).clamp(min=pseudo_count))
