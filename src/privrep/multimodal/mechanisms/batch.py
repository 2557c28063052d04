"""DP-CLIP's own step (Algorithm 1): the CLIP loss of a whole batch, its gradient clipped as one.

The loss contrasts every pair with the others of the batch, so it is no sum over pairs. Formal guarantee: the clipped
gradient lies in a ball of radius c, so that replacing, adding or removing a pair moves it by up to 2c, whatever the
relation. Noise of standard deviation sigma c therefore has a multiplier of sigma/2 relative to the sensitivity, and
that is what is charged (`privacy.batches`), by the sampling that was used.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.nn.functional import cross_entropy

from privrep.multimodal.towers import Layout, Towers, unit
from privrep.nn.flat_module import FlatModule
from privrep.nn.threads import rows_of
from privrep.privacy.bounds import Contributions
from privrep.privacy.contributions import BatchTerm
from privrep.privacy.protocol import StepSpec, UserBatch
from privrep.typing import Singles


@dataclass(frozen=True, eq=False)
class BatchStep:
    """The gradient of the CLIP loss of all pairs of a batch. `chunk` is how many rows are differentiated at a time: it
    bounds memory, and leaves the gradient what it is."""

    towers: Towers
    weights: Singles
    layout: Layout
    temperature: float
    rows_per_user: int
    # ---- memory alone
    chunk: int = 256

    @property
    def spec(self) -> StepSpec:
        return StepSpec(layout="batch", rows_per_user=self.rows_per_user)

    @property
    def size(self) -> int:
        return self.towers.size

    def __call__(self, batch: UserBatch) -> dict[str, Contributions]:
        flat = rows_of(batch.X).flatten(0, 1)
        targets = torch.from_numpy(self.layout.targets(batch.y)).flatten()
        there = targets >= 0
        return {"gradient": BatchTerm(self._gradient(flat[there], targets[there]).numpy())}

    def _gradient(self, rows: Tensor, targets: Tensor) -> Tensor:
        if len(rows) < 2:  # nothing to tell apart
            return torch.zeros(self.size)
        towers, (image_weights, text_weights, log_scale) = (
            self.towers,
            self.towers.pieces(self.weights, self.temperature),
        )
        images, texts = self.layout.images(rows), self.layout.texts(rows, targets)
        with torch.no_grad():
            a, b = (
                torch.cat([part(flat, source[some]) for some in self._chunks(len(rows))])
                for part, flat, source in ((towers.image, image_weights, images), (towers.text, text_weights, texts))
            )
        left, right, scale = a.requires_grad_(), b.requires_grad_(), torch.tensor(log_scale, requires_grad=True)
        with torch.enable_grad():
            slopes = torch.autograd.grad(clip_loss(left, right, scale, towers.cosine), [left, right, scale])
        pieces = [
            self._through(towers.image, image_weights, images, slopes[0]),
            self._through(towers.text, text_weights, texts, slopes[1]),
        ]
        return torch.cat([*pieces, slopes[2].reshape(1)] if towers.learn_scale else pieces)

    def _through(self, part: FlatModule, flat: Tensor, source: Tensor, slope: Tensor) -> Tensor:
        """The gradient in a part's weights from the slope in its embeddings, some rows at a time."""
        total = torch.zeros_like(flat)
        if part.size:
            leaf = flat.clone().requires_grad_()
            for some in self._chunks(len(source)):
                with torch.enable_grad():
                    total += torch.autograd.grad(part(leaf, source[some]), leaf, slope[some])[0]
        return total

    def _chunks(self, rows: int) -> Iterator[slice]:
        return (slice(start, start + self.chunk) for start in range(0, rows, self.chunk))

    def gradient(self, released: NDArray[np.float64]) -> NDArray[np.float64]:
        return released


def clip_loss(images: Tensor, texts: Tensor, log_scale: Tensor, cosine: bool = True) -> Tensor:
    """The mean over pairs of the cross-entropies of image to text and of text to image."""
    logits = (unit(images) if cosine else images) @ unit(texts).T * log_scale.exp()
    own = torch.arange(len(logits))
    return (cross_entropy(logits, own) + cross_entropy(logits.T, own)) / 2
