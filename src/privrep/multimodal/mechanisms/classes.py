"""Steps for pairs whose texts are a few public classes: a softmax regression, in whitened coordinates.

If every text of the bank names one of a few classes, telling an image apart from the texts is telling classes apart.
The loss of a pair is the cross-entropy of its class among all classes, convex in a score for each class and feature.

Formal guarantee, for both steps:
* A step sends a function of the user's own rows and of public numbers, to the last bit.
* Rows are embedded in calls of fixed shape (`users.batching`), and no product mixes them.
* The engine clips what a step sends.
* `MomentStep` sends a positive semi-definite matrix, so replacing a user costs sqrt 2, not 2, of what adding does.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from privrep.multimodal.towers import Layout, normalise_rows
from privrep.nn.threads import one_thread, rows_of
from privrep.privacy.bounds import Contributions
from privrep.privacy.contributions import Products
from privrep.privacy.moments import RowMoments
from privrep.privacy.protocol import StepSpec, UserBatch
from privrep.typing import Array


@dataclass(frozen=True, eq=False)
class Whitening:
    """A public symmetric map P of features: `scales` along some directions, `rest` along all others."""

    directions: Array  # (features, k), orthonormal
    scales: Array  # (k,)
    rest: float

    @cached_property
    def _tensors(self) -> tuple[Tensor, Tensor]:
        """Return the directions, (features, k), and what they get beyond `rest`, (k, features)."""
        longer = (self.directions * (self.scales - self.rest)).T
        return torch.tensor(self.directions, dtype=torch.float32), torch.tensor(longer, dtype=torch.float32)

    def __call__(self, rows: Tensor) -> Tensor:
        """Return the directions of rows after P, (rows, features)."""
        into, back = self._tensors
        return normalise_rows(self.rest * rows + (rows @ into) @ back)

    def map_weights(self, weights: Array) -> Array:
        """Return weights P, (outputs, features): weights on rows, from weights on whitened rows."""
        longer = (self.directions * (self.scales - self.rest)).T
        return np.asarray(self.rest * weights + (weights @ self.directions) @ longer)


@dataclass(frozen=True, eq=False)
class ClosedRows:
    """The reading of rows: their images' features of length one, and their classes. All of it is public."""

    layout: Layout
    before: nn.Module | None  # applied before the linear map: it centres features; None does nothing
    rows_per_user: int

    @property
    def classes(self) -> NDArray[np.int64]:
        """Return the class of each text of the bank."""
        assert self.layout.classes is not None
        return self.layout.classes

    @property
    def spec(self) -> StepSpec:
        """Return how rows are laid out, and how many floats a user takes."""
        held = 2 * self.layout.image_numbers * self.rows_per_user
        return StepSpec(layout="padded", rows_per_user=self.rows_per_user, floats_per_user=held)

    def read(self, batch: UserBatch) -> tuple[Tensor, Tensor, Tensor]:
        """Return features, classes and shares of a batch of users.

        Features are (rows, features), zero where there is no pair; classes are (rows,), shares (users, rows of a user).
        The shares of a user's pairs add up to one.
        """
        targets = torch.from_numpy(self.layout.find_targets(batch.y))
        there = targets >= 0
        shares = there.float() / there.sum(dim=1, keepdim=True).clamp_min(1)
        rows = self.layout.take_images(rows_of(batch.X).flatten(0, 1))
        with torch.no_grad():
            rows = normalise_rows(rows if self.before is None else self.before(rows))
        labels = torch.from_numpy(self.classes)[targets.flatten().clamp_min(0)]
        return torch.where(there.flatten()[:, None], rows, 0.0), labels, shares


@dataclass(frozen=True, eq=False)
class MomentStep:
    """Users send the mean of x x^T over their images' features x, each of length one."""

    rows: ClosedRows

    @property
    def spec(self) -> StepSpec:
        return self.rows.spec

    def __call__(self, batch: UserBatch) -> dict[str, Contributions]:
        with one_thread():
            rows, _, shares = self.rows.read(batch)
        each = shares.max(dim=1).values.numpy().astype(np.float64)
        return {"moment": RowMoments(rows.reshape(*shares.shape, -1).numpy(), each)}


@dataclass(frozen=True, eq=False)
class ClassStep:
    """Users send the gradient of the mean loss of their pairs in the scores of classes, (classes, features)."""

    rows: ClosedRows
    whitening: Whitening
    scores: Array  # (classes, features), on whitened rows

    @property
    def size(self) -> int:
        """Return how many numbers are released."""
        return int(self.scores.size)

    @property
    def spec(self) -> StepSpec:
        return self.rows.spec

    @cached_property
    def _scores(self) -> Tensor:
        return torch.tensor(self.scores, dtype=torch.float32)

    def __call__(self, batch: UserBatch) -> dict[str, Contributions]:
        with one_thread(), torch.no_grad():
            rows, labels, shares = self.rows.read(batch)
            seen = self.whitening(rows)
            slopes = torch.softmax(seen @ self._scores.T, dim=1)
            slopes[torch.arange(len(labels)), labels] -= 1
            slopes *= shares.flatten()[:, None]
        users = shares.shape
        return {"gradient": Products(slopes.reshape(*users, -1).numpy(), seen.reshape(*users, -1).numpy())}
