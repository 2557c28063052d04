"""What a user makes of the shared part and its own rows, in closed form, with each row left out in turn.

Scores of a row are  base + log of how often the user has each class + slope * (what the user's own rows say),
where `base` are the shared part's scores (zero for a user alone) and the last term is ridge regression, on the user's
own rows, of what the first two leave over: one Newton step from them. `Candidate` says how much of each. Leaving out a
row takes its count from the frequencies and its residual from the regression, exactly.

Calls have a fixed shape (see `users.batching`): products are stacked by user, so a user's numbers are its own to the
last bit, and `HeadLosses` may turn them into a release.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, Protocol

import numpy as np
import torch
from torch import Tensor

from privrep.heads.gradient import labels_of, one_thread
from privrep.privacy.bounds import Contributions
from privrep.privacy.contributions import Vectors
from privrep.privacy.protocol import StepSpec, UserBatch

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
