"""Contrast with a public bank of captions: a loss that is a sum over users, each of whom is clipped alone.

An image is told apart from public captions, not from other people's: the loss of a pair is the cross-entropy of its
caption among the captions of the bank (and its own, if that is none of them). It looks at that pair and at public
things alone, so what all users send is an ordinary sum of clipped contributions.

Formal guarantee. With users clipped to C, replacing a user moves the sum over any batch by at most 2C, and noise of
standard deviation z 2C hides it, however many users are in the batch: the noise in the mean gradient of b users is
z 2C / b. A gradient of the whole batch that is clipped to C as one (`mechanisms.batch`) needs the same noise for a
signal that is b times shorter. A user's contribution is a function of its own rows to the last bit: rows are embedded
in calls of fixed shape (`users.batching`), and no layer mixes them.

Captions of the bank are embedded with the public weights. If the text encoder learns, the loss has a slope in those
embeddings, too: V are their directions, a row each, and a pair adds p_m u to row m of the slope, where p is the softmax
(less one at the pair's own caption) and u the scaled embedding of its image. That is a product, too, and is released in
place of a gradient of the text encoder: it has as many numbers as the bank's embeddings, however large the encoder is,
and the encoder's gradient follows from it without the users.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn
from torch.func import grad, vmap

from privrep.multimodal.towers import AT_ONCE, Layout, Towers, unit
from privrep.nn.flat_module import FlatModule
from privrep.nn.ghost_clipping import captured, gradients, joined, not_by_layers
from privrep.nn.threads import one_thread, own_copy, rows_of
from privrep.privacy.bounds import Contributions
from privrep.privacy.contributions import Concatenated, Products, Vectors
from privrep.privacy.protocol import StepSpec, UserBatch
from privrep.typing import Singles


@dataclass(frozen=True, eq=False)
class BankStep:
    """Users send the gradient of the mean loss of their pairs: in the image encoder's weights, in the text encoder's
    where captions are in rows, in the bank's embeddings where texts learn, and in the logarithm of the scale."""

    towers: Towers
    weights: Singles
    layout: Layout
    temperature: float
    rows_per_user: int

    @cached_property
    def size(self) -> int:
        """How many numbers are released."""
        t = self.towers
        return (
            t.image.size + self._own_texts * t.text.size + self._bank_learns * t.dim * self.layout.free + t.learn_scale
        )

    @cached_property
    def by_layers(self) -> bool:
        """Whether gradients are had layer by layer, as products, and not one by one."""
        return all(not_by_layers(part, numbers) is None for part, numbers in self._parts())

    @cached_property
    def spec(self) -> StepSpec:
        """Of a user's numbers, weights of convolutions are held as a vector, or all if gradients are had one by one."""
        held = sum(_kernel_weights(part) for part, _ in self._parts()) if self.by_layers else self.size
        return StepSpec(layout="padded", rows_per_user=self.rows_per_user, floats_per_user=held)

    @property
    def _own_texts(self) -> bool:
        return self.layout.text_numbers > 0 and self.towers.text.size > 0

    @property
    def _bank_learns(self) -> bool:
        return self.layout.free > 0 and self.towers.text.size > 0

    def _parts(self) -> list[tuple[FlatModule, int]]:
        """Encoders whose gradients users compute, and the length of their rows."""
        images = [(self.towers.image, self.layout.image_numbers)] if self.towers.image.size else []
        return images + ([(self.towers.text, self.layout.text_numbers)] if self._own_texts else [])

    @cached_property
    def _pieces(self) -> tuple[Tensor, Tensor, float]:
        return self.towers.pieces(self.weights, self.temperature)

    @cached_property
    def _bank(self) -> Tensor:
        """Directions of the bank's embeddings, (captions, dim): public."""
        with one_thread():
            return unit(torch.from_numpy(self.towers.of_texts(self.weights, self.layout.bank)))

    def __call__(self, batch: UserBatch) -> dict[str, Contributions]:
        with one_thread():
            targets = torch.from_numpy(self.layout.targets(batch.y))
            there = (targets >= 0).float()
            shares = there / there.sum(dim=1, keepdim=True).clamp_min(1)
            if self.by_layers:
                return {"gradient": Concatenated(self._layer_by_layer(batch.X, targets.flatten(), shares.flatten()))}
            return {"gradient": Vectors(self._one_by_one(batch.X, targets, shares))}

    def _layer_by_layer(self, X: NDArray[Any], targets: Tensor, shares: Tensor) -> tuple[Contributions, ...]:
        users, (image_weights, text_weights, log_scale) = len(X), self._pieces
        rows = rows_of(X).flatten(0, 1)
        image, text = own_copy(self.towers.image), own_copy(self.towers.text)
        with captured(image) as seen_images:
            a = image(image_weights, self.layout.images(rows))
        words = self._texts(rows, targets)
        with captured(text) as seen_texts:
            b = None if words is None else text(text_weights, words)
        scales = torch.full((len(rows),), log_scale, requires_grad=True)
        slope = self._slopes(a, b, scales, targets, shares)
        parts: list[Contributions] = []
        if image.size:
            parts += joined(image, [gradients(image, seen_images, a, slope.image, users)])
        if self._own_texts and b is not None and slope.text is not None:
            parts += joined(text, [gradients(text, seen_texts, b, slope.text, users)])
        if self._bank_learns:
            parts.append(Products(_by_user(slope.chances, users), _by_user(slope.scaled, users)))
        if self.towers.learn_scale:
            parts.append(Vectors(slope.scale.reshape(users, -1).sum(dim=1, keepdim=True).numpy()))
        return tuple(parts)

    def _slopes(self, a: Tensor, b: Tensor | None, scales: Tensor, targets: Tensor, shares: Tensor) -> _Slopes:
        """Of the loss in embeddings, row by row."""
        with torch.enable_grad():
            left = a.detach().requires_grad_()
            right = None if b is None else b.detach().requires_grad_()
            logits = self._logits(left, self._bank, right, scales[:, None], targets)
            losses = _losses(logits, targets) * shares
            wanted = [left, scales] + ([] if right is None else [right])
            found = torch.autograd.grad(losses.sum(), wanted)
        with torch.no_grad():
            chances = _chances(logits, targets, shares) if self._bank_learns else logits[:, :0]
            scaled = self._directed(left) * scales.exp()[:, None]
        return _Slopes(
            found[0], found[2] if right is not None else None, found[1], chances[:, : self.layout.free], scaled
        )

    def _directed(self, images: Tensor) -> Tensor:
        return unit(images) if self.towers.cosine else images

    def _logits(self, images: Tensor, bank: Tensor, texts: Tensor | None, log_scale: Tensor, targets: Tensor) -> Tensor:
        """Of each row, for every caption of the bank and then, where rows have captions, for its own."""
        u, scale = self._directed(images), log_scale.exp()
        logits = u @ bank.T * scale
        if texts is None:
            return logits
        own = (u * unit(texts)).sum(dim=1, keepdim=True) * scale
        return torch.cat([logits, own.masked_fill(targets[:, None] != self.layout.free, -torch.inf)], dim=1)

    def _one_by_one(self, X: NDArray[Any], targets: Tensor, shares: Tensor) -> NDArray[np.float32]:
        """The gradient of each user, (users, size), for encoders of any kind."""
        rows, towers, (image_weights, text_weights, log_scale) = rows_of(X), self.towers, self._pieces
        texts = self._texts(rows.flatten(0, 1), targets.flatten())
        image, text = own_copy(towers.image), own_copy(towers.text)

        def loss(weights: tuple[Tensor, ...], r: Tensor, words: Tensor | None, target: Tensor, share: Tensor) -> Tensor:
            of_images, of_texts, bank, scale = weights
            a = image(of_images, r[:, : self.layout.image_numbers])
            b = None if words is None else text(of_texts, words)
            return (_losses(self._logits(a, bank, b, scale, target), target) * share).sum()

        values = (image_weights, text_weights, self._bank, torch.tensor(log_scale))
        words = None if texts is None else texts.reshape(*rows.shape[:2], -1)
        each = vmap(grad(loss), in_dims=(None, 0, None if words is None else 0, 0, 0))
        found = each(values, rows, words, targets, shares)
        kept = [towers.image.size > 0, self._own_texts, self._bank_learns, towers.learn_scale]
        flat = [part.detach().reshape(len(X), -1) for part, keep in zip(found, kept, strict=True) if keep]
        return np.asarray(torch.cat(flat, dim=1).numpy())

    def _texts(self, rows: Tensor, targets: Tensor) -> Tensor | None:
        return self.layout.texts(rows, targets) if self.layout.text_numbers else None

    def gradient(self, released: NDArray[np.float64]) -> NDArray[np.float64]:
        """In all weights, from what was released: the bank's embeddings are the text encoder's doing. Public."""
        t, bank = self.towers, self.layout.free * self.towers.dim * self._bank_learns
        sizes = [t.image.size, self._own_texts * t.text.size, bank, int(t.learn_scale)]
        image, own, slope, scale = np.split(released, np.cumsum(sizes)[:-1])
        text = np.zeros(t.text.size)
        text[: len(own)] += own
        if self._bank_learns:
            text += self._through_texts(slope)
        return np.concatenate([image, text, scale])

    def _through_texts(self, slope: NDArray[np.float64]) -> NDArray[np.float64]:
        """The gradient in the text encoder's weights from the slope in the bank's embeddings, some texts at a time."""
        text, flat = own_copy(self.towers.text), self._pieces[1].clone().requires_grad_()
        outward, bank = (
            torch.from_numpy(slope).float().reshape(self.layout.free, -1),
            torch.from_numpy(self.layout.bank),
        )
        total = np.zeros(len(flat))
        for start in range(0, self.layout.free, AT_ONCE):
            some = slice(start, start + AT_ONCE)
            with one_thread(), torch.enable_grad():
                (part,) = torch.autograd.grad(unit(text(flat, bank[some])), flat, outward[some])
            total += part.double().numpy()
        return total


@dataclass(frozen=True, eq=False)
class _Slopes:
    image: Tensor
    text: Tensor | None
    scale: Tensor
    chances: Tensor  # (rows, captions of the bank): softmax, less one at the row's own
    scaled: Tensor  # (rows, dim): embeddings of images times the scale


def _losses(logits: Tensor, targets: Tensor) -> Tensor:
    """Cross-entropy of each row; of no consequence where there is no target."""
    chosen = logits.gather(1, targets.clamp(0, logits.shape[1] - 1)[:, None])[:, 0]
    return torch.where(targets >= 0, torch.logsumexp(logits, dim=1) - chosen, torch.zeros_like(chosen))


def _chances(logits: Tensor, targets: Tensor, shares: Tensor) -> Tensor:
    """Return the slope of each row's loss in its logits: the softmax, less one at the row's own."""
    result = torch.softmax(logits, dim=1)
    result[torch.arange(len(targets)), targets.clamp_min(0)] -= 1
    return result * shares[:, None]


def _by_user(rows: Tensor, users: int) -> NDArray[np.float32]:
    return np.ascontiguousarray(rows.detach().reshape(users, -1, rows.shape[1]).numpy())


def _kernel_weights(part: FlatModule) -> int:
    layers = dict(part.module.named_modules())
    shapes = part.shapes.items()
    return sum(math.prod(s) for name, s in shapes if isinstance(layers[name.rpartition(".")[0]], nn.Conv2d))
