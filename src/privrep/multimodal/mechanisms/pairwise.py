"""Private negatives with clipping inside the loss: every similarity of a batch is clipped by itself.

The loss is the sum over all pairs (i, j) of a batch of -log sigmoid of the scaled similarity of image i and text j,
with a plus where they belong together and a minus where not (Zhai and others 2023). Its slope in a similarity is a
function of that image and that text alone, which a softmax over the batch is not. So the gradient is a sum of b^2
terms, each a function of two pairs, and a pair is in 2b - 1 of them.

Formal guarantee (`privacy.similarities`): with the term of every similarity clipped to B, and those of the b pairs that
belong together to D B, replacing a pair moves the sum by at most 2B (D + 2(b - 1)). With D = b and B = c/(3b - 2) that
is 2c whatever b is, and the signal may be as long as b D B + b (b - 1) B, about 2bc/3: noise per pair shrinks with b,
although negatives are other people's. It takes batches of a fixed size, and linear projections without bias, of frozen
features that are computed row by row.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from privrep.errors import InputError
from privrep.multimodal.towers import Layout, Towers
from privrep.nn.flat_module import FlatModule
from privrep.nn.threads import rows_of
from privrep.privacy.bounds import MAX_USERS, Bound, Contributions
from privrep.privacy.protocol import StepSpec, UserBatch
from privrep.privacy.similarities import Similarities, count_changed_terms
from privrep.typing import Singles


@dataclass(frozen=True, eq=False)
class InsideStep:
    """The clipped gradients of all similarities of a batch of `users`, in both projections."""

    towers: Towers
    weights: Singles
    layout: Layout
    temperature: float
    rows_per_user: int
    users: int

    def __post_init__(self) -> None:
        rows = self.users * self.rows_per_user
        if 2 * rows**2 - rows > MAX_USERS:
            raise InputError(
                f"clipping inside the loss takes batches of at most {math.isqrt(MAX_USERS // 2):,} pairs. Got {rows:,} "
                "instead; use a smaller batch."
            )

    @property
    def spec(self) -> StepSpec:
        return StepSpec(layout="batch", rows_per_user=self.rows_per_user)

    @property
    def size(self) -> int:
        return self.towers.size

    def bound(self, clip: float) -> Bound:
        """With which replacing a user moves the sum by at most twice `clip`, but for rounding."""
        terms = count_changed_terms(self.users * self.rows_per_user, self.rows_per_user, self._repeat)
        return Bound(clip / terms, self.size, terms_per_user=terms)

    @property
    def _repeat(self) -> float:
        return float(self.users * self.rows_per_user)

    def __call__(self, batch: UserBatch) -> dict[str, Contributions]:
        rows = rows_of(batch.X).flatten(0, 1)
        targets = torch.from_numpy(self.layout.targets(batch.y)).flatten()
        x = _features(self.towers.image, self.layout.images(rows))
        t = _features(self.towers.text, self.layout.texts(rows, targets))
        image_weights, text_weights, log_scale = self.towers.pieces(self.weights, self.temperature)
        there = (targets >= 0).numpy()
        u, left = _directions(x @ image_weights.numpy().reshape(self.towers.dim, -1).T, there)
        v, right = _directions(t @ text_weights.numpy().reshape(self.towers.dim, -1).T, there)
        slopes = self._slopes(u @ v.T, targets.numpy(), math.exp(log_scale))
        return {"gradient": Similarities(x, t, u, v, left, right, slopes, self.rows_per_user, self._repeat)}

    def _slopes(self, similarities: NDArray[Any], targets: NDArray[np.int64], scale: float) -> NDArray[Any]:
        """Of the loss in each similarity. Two pairs with one caption of the bank are neither told apart nor joined."""
        shifted = scale * similarities - math.log(len(similarities))
        own = np.eye(len(similarities), dtype=bool)
        slopes = scale * (1 / (1 + np.exp(-shifted)) - own)
        listed = (targets >= 0) & (targets < self.layout.free)
        slopes[(targets[:, None] == targets[None, :]) & listed[:, None] & ~own] = 0.0
        return slopes

    def gradient(self, released: NDArray[np.float64]) -> NDArray[np.float64]:
        return released


def check_inside(towers: Towers) -> None:
    """Whether every similarity's gradient has a norm that is known without computing it."""
    if not (_projection(towers.image) and _projection(towers.text)) or towers.learn_scale or not towers.cosine:
        raise InputError(
            "clipping inside the loss takes two trainable linear projections without bias, cosines and a fixed "
            "temperature. Encode with what is frozen first, and train the projections of its features."
        )


def _projection(part: FlatModule) -> bool:
    """Whether a part is a linear layer without bias, alone or after what is frozen."""
    last = part.module[-1] if isinstance(part.module, nn.Sequential) else part.module
    if not isinstance(last, nn.Linear) or last.bias is not None:
        return False
    return last.weight.requires_grad and part.size == last.weight.numel()


def _features(part: FlatModule, rows: Tensor) -> NDArray[Any]:
    """What the projection gets of rows."""
    with torch.no_grad():
        found: Tensor = part.module[:-1](rows) if isinstance(part.module, nn.Sequential) else rows
    return np.asarray(found.numpy())


def _directions(rows: NDArray[Any], there: NDArray[np.bool_]) -> tuple[NDArray[Any], NDArray[Any]]:
    lengths = np.sqrt((rows * rows).sum(axis=1))
    good = there & np.isfinite(lengths) & (lengths > 0)
    safe = np.where(good, lengths, 1)
    return np.where(good[:, None], rows / safe[:, None], 0), np.where(good, lengths, 0)
