"""The step of DP-CLIP (Huang et al. 2023, Algorithm 1): the CLIP loss of a whole batch, its gradient clipped as one.

The loss contrasts every pair with the others of the batch, so it is no sum over pairs.

Formal guarantee, with the gradient clipped to c and noise of standard deviation sigma c:
* The clipped gradient lies in a ball of radius c.
* So replacing, adding or removing a pair moves it by up to 2c, whatever the relation.
* The noise therefore has a multiplier of sigma/2 relative to the sensitivity.
* That is what is charged (`privacy.batches`), by the sampling that was used.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from privrep.multimodal.towers import Layout, Towers, normalise_rows, pull_through_directions
from privrep.nn.flat_module import FlatModule
from privrep.nn.threads import rows_of
from privrep.privacy.bounds import Contributions
from privrep.privacy.contributions import BatchTerm
from privrep.privacy.protocol import StepSpec, UserBatch
from privrep.typing import Singles


@dataclass(frozen=True, eq=False)
class BatchStep:
    """The gradient of the CLIP loss of all pairs of a batch.

    `chunk` is how many rows are differentiated at a time: it bounds memory, and leaves the gradient what it is.
    """

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
        targets = torch.from_numpy(self.layout.find_targets(batch.y)).flatten()
        there = targets >= 0
        return {"gradient": BatchTerm(self._compute_gradient(flat[there], targets[there]).numpy())}

    def _compute_gradient(self, rows: Tensor, targets: Tensor) -> Tensor:
        """Return the gradient in all weights, (size,); zero for fewer than two pairs.

        Args:
            rows: of all pairs of the batch, (pairs, numbers).
            targets: the caption of each, (pairs,).
        """
        if len(rows) < 2:  # nothing to tell apart
            return torch.zeros(self.size)
        towers, (image_weights, text_weights, log_scale) = (
            self.towers,
            self.towers.split_weights(self.weights, self.temperature),
        )
        images, texts = self.layout.take_images(rows), self.layout.find_texts(rows, targets)
        with torch.no_grad():
            a, b = (
                torch.cat([part(flat, source[some]) for some in self._cut_chunks(len(rows))])
                for part, flat, source in ((towers.image, image_weights, images), (towers.text, text_weights, texts))
            )
            slopes = differentiate_clip_loss(a, b, torch.tensor(log_scale), towers.cosine)
        pieces = [
            self._pull_back(towers.image, image_weights, images, slopes[0]),
            self._pull_back(towers.text, text_weights, texts, slopes[1]),
        ]
        return torch.cat([*pieces, slopes[2].reshape(1)] if towers.learn_scale else pieces)

    def _pull_back(self, part: FlatModule, flat: Tensor, source: Tensor, slope: Tensor) -> Tensor:
        """Return the gradient in a part's weights from the slope in its embeddings, some rows at a time.

        Args:
            part: an encoder.
            flat: its weights, (weights,).
            source: its rows, (rows, numbers).
            slope: of the loss in its embeddings, (rows, dim).
        """
        total = torch.zeros_like(flat)
        if part.size:
            leaf = flat.clone().requires_grad_()
            for some in self._cut_chunks(len(source)):
                with torch.enable_grad():
                    total += torch.autograd.grad(part(leaf, source[some]), leaf, slope[some])[0]
        return total

    def _cut_chunks(self, rows: int) -> Iterator[slice]:
        """Return slices of rows that are differentiated together."""
        return (slice(start, start + self.chunk) for start in range(0, rows, self.chunk))

    def to_gradient(self, released: NDArray[np.float64]) -> NDArray[np.float64]:
        """Return what was released, (size,): it is the gradient in all weights."""
        return released


def differentiate_clip_loss(
    images: Tensor, texts: Tensor, log_scale: Tensor, cosine: bool = True
) -> tuple[Tensor, Tensor, Tensor]:
    """Return the slopes of the CLIP loss in images, texts and the logarithm of the scale, in closed form.

    The loss is the mean over pairs of the cross-entropies of image to text and of text to image, halved. PyTorch keeps
    several matrices of the size of all similarities to differentiate it. This takes two.

    Args:
        images: embeddings, (pairs, dim).
        texts: embeddings, (pairs, dim), in the order of the images.
        log_scale: the logarithm of the scale of similarities.
        cosine: whether embeddings of images count by their direction alone.
    """
    n, scale = len(images), log_scale.exp()
    u, v = normalise_rows(images) if cosine else images, normalise_rows(texts)
    logits = u @ v.T * scale
    slopes = torch.softmax(logits, dim=1).add_(torch.softmax(logits, dim=0)).mul_(0.5 / n)
    slopes.diagonal().sub_(1 / n)
    of_scale = (slopes * logits).sum()
    left, right = slopes @ v * scale, slopes.T @ u * scale
    return (
        pull_through_directions(left, images, u) if cosine else left,
        pull_through_directions(right, texts, v),
        of_scale,
    )
