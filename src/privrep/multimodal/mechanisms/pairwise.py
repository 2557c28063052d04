"""Private negatives with clipping inside the loss: every similarity of a batch is clipped by itself.

The loss is the sum over all pairs (i, j) of a batch of -log sigmoid of the scaled similarity of image i and text j. The
similarity has a plus where they belong together and a minus where not (Zhai et al. 2023). The slope of the loss in
a similarity is a function of that image and that text alone, which a softmax over the batch is not. So the gradient of
a batch of b pairs is a sum of b^2 terms. Each is a function of two pairs, and a pair is in 2b - 1 of them.

Formal guarantee (`privacy.similarities`), for terms clipped to B, and to D B where image and text belong together:
* Replacing a pair moves the sum by at most 2B (D + 2(b - 1)).
* With D = b and B = c/(3b - 2) that is 2c whatever b is.
* The signal may be as long as b D B + b (b - 1) B, about 2bc/3. Noise per pair shrinks with b, although negatives are
  other people's.
* It takes batches of a fixed size, and linear projections without bias, of frozen features that are computed row by
  row.
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
from privrep.privacy.bounds import MAX_TERMS, Bound, Contributions
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
        if 2 * rows**2 - rows > MAX_TERMS:
            raise InputError(
                f"clipping inside the loss takes batches of at most {math.isqrt(MAX_TERMS // 2):,} pairs. Got {rows:,} "
                "instead; use a smaller batch."
            )

    @property
    def spec(self) -> StepSpec:
        return StepSpec(layout="batch", rows_per_user=self.rows_per_user)

    @property
    def size(self) -> int:
        return self.towers.size

    def choose_bound(self, clip: float) -> Bound:
        """Return the bound with which replacing a user moves the sum by at most twice `clip`, but for rounding."""
        terms = count_changed_terms(self.users * self.rows_per_user, self.rows_per_user, self._repeat)
        return Bound(clip / terms, self.size, terms_per_user=terms)

    @property
    def _repeat(self) -> float:
        return float(self.users * self.rows_per_user)

    def __call__(self, batch: UserBatch) -> dict[str, Contributions]:
        rows = rows_of(batch.X).flatten(0, 1)
        targets = torch.from_numpy(self.layout.find_targets(batch.y)).flatten()
        x = _compute_features(self.towers.image, self.layout.take_images(rows))
        t = _compute_features(self.towers.text, self.layout.find_texts(rows, targets))
        image_weights, text_weights, log_scale = self.towers.split_weights(self.weights, self.temperature)
        there = (targets >= 0).numpy()
        u, left = _normalise_rows(x @ image_weights.numpy().reshape(self.towers.dim, -1).T, there)
        v, right = _normalise_rows(t @ text_weights.numpy().reshape(self.towers.dim, -1).T, there)
        slopes = self._differentiate_loss(u @ v.T, targets.numpy(), math.exp(log_scale))
        return {"gradient": Similarities(x, t, u, v, left, right, slopes, self.rows_per_user, self._repeat)}

    def _differentiate_loss(self, similarities: NDArray[Any], targets: NDArray[np.int64], scale: float) -> NDArray[Any]:
        """Return the slope of the loss in each similarity, (pairs, pairs).

        Two pairs with one caption of the bank are neither told apart nor joined.

        Args:
            similarities: of every image and every text of the batch, (pairs, pairs).
            targets: the caption of each pair, (pairs,).
            scale: by which similarities are multiplied.
        """
        shifted = scale * similarities - math.log(len(similarities))
        own = np.eye(len(similarities), dtype=bool)
        slopes = scale * (1 / (1 + np.exp(-shifted)) - own)
        listed = (targets >= 0) & (targets < self.layout.free)
        slopes[(targets[:, None] == targets[None, :]) & listed[:, None] & ~own] = 0.0
        return slopes

    def to_gradient(self, released: NDArray[np.float64]) -> NDArray[np.float64]:
        """Return what was released, (size,): it is the gradient in all weights."""
        return released


def check_inside(towers: Towers) -> None:
    """Raise InputError unless every similarity's gradient has a norm that is known without computing it."""
    if not (_is_projection(towers.image) and _is_projection(towers.text)) or towers.learn_scale or not towers.cosine:
        raise InputError(
            "clipping inside the loss takes two trainable linear projections without bias, cosines and a fixed "
            "temperature. Encode with what is frozen first, and train the projections of its features."
        )


def _is_projection(part: FlatModule) -> bool:
    """Return whether a part is a linear layer without bias, alone or after what is frozen."""
    last = part.module[-1] if isinstance(part.module, nn.Sequential) else part.module
    if not isinstance(last, nn.Linear) or last.bias is not None:
        return False
    return last.weight.requires_grad and part.size == last.weight.numel()


def _compute_features(part: FlatModule, rows: Tensor) -> NDArray[Any]:
    """Return what the projection gets of rows, (rows, features)."""
    with torch.no_grad():
        found: Tensor = part.module[:-1](rows) if isinstance(part.module, nn.Sequential) else rows
    return np.asarray(found.numpy())


def _normalise_rows(rows: NDArray[Any], there: NDArray[np.bool_]) -> tuple[NDArray[Any], NDArray[Any]]:
    """Return rows of length one and their lengths; both are zero for rows that are absent or not finite.

    Args:
        rows: (rows, dim).
        there: which rows count, (rows,).
    """
    lengths = np.sqrt((rows * rows).sum(axis=1))
    good = there & np.isfinite(lengths) & (lengths > 0)
    safe = np.where(good, lengths, 1)
    return np.where(good[:, None], rows / safe[:, None], 0), np.where(good, lengths, 0)
