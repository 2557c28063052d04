"""Contrast with a public bank of captions: a loss that is a sum over users, each of whom is clipped alone.

An image is told apart from public captions, not from other people's. The loss of a pair is the cross-entropy of its
caption among the captions of the bank (and its own, if that is none of them). It looks at that pair and at public
things alone, so what all users send is an ordinary sum of clipped contributions.

Formal guarantee, with users clipped to C, noise of multiplier z and b users in a batch:
* Replacing a user moves the sum over any batch by at most 2C. Noise of standard deviation z 2C hides it, whatever b is.
* The noise in the mean gradient of the batch is z 2C / b.
* A gradient of the whole batch that is clipped to C as one (`mechanisms.batch`) needs the same noise. Its signal is b
  times shorter.
* A user's contribution is a function of its own rows to the last bit. Rows are embedded in calls of fixed shape
  (`users.batching`), and no layer mixes them.

Captions of the bank are embedded with the public weights. If the text encoder learns, the loss has a slope in those
embeddings, too. Let V be their directions, a row each, p a pair's softmax (less one at its own caption), and u the
scaled embedding of its image. Then the pair adds p_m u to row m of the slope. That is a product, too, and is released
in place of a gradient of the text encoder. It has as many numbers as the bank's embeddings, however large the encoder
is. The encoder's gradient follows from it without the users.
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

from privrep.multimodal.towers import AT_ONCE, Layout, Towers, normalise_rows, pull_through_directions
from privrep.nn.flat_module import FlatModule
from privrep.nn.ghost_clipping import capture, compute_gradients, find_layer_obstacle, join_groups
from privrep.nn.threads import one_thread, own_copy, rows_of
from privrep.privacy.bounds import Contributions
from privrep.privacy.contributions import Concatenated, Products, Vectors
from privrep.privacy.protocol import StepSpec, UserBatch
from privrep.typing import Singles


@dataclass(frozen=True, eq=False)
class BankStep:
    """The step in which users send the gradient of the mean loss of their pairs.

    It is taken in the image encoder's weights, and in the text encoder's where captions are in rows. It is taken in the
    bank's embeddings where texts learn, and in the logarithm of the scale where that is learned.
    """

    towers: Towers
    weights: Singles
    layout: Layout
    temperature: float
    rows_per_user: int

    @cached_property
    def size(self) -> int:
        """Return how many numbers are released."""
        t = self.towers
        return (
            t.image.size + self._own_texts * t.text.size + self._bank_learns * t.dim * self.layout.free + t.learn_scale
        )

    @cached_property
    def by_layers(self) -> bool:
        """Return whether gradients are computed layer by layer, as products, and not for one user after the other."""
        return all(find_layer_obstacle(part, numbers) is None for part, numbers in self._list_parts())

    @cached_property
    def spec(self) -> StepSpec:
        """Return how rows are laid out, and how many floats a user takes.

        Weights of convolutions are held as a vector for each user; all weights are if gradients are computed user by
        user.
        """
        held = sum(_count_kernel_weights(part) for part, _ in self._list_parts()) if self.by_layers else self.size
        return StepSpec(layout="padded", rows_per_user=self.rows_per_user, floats_per_user=held)

    @property
    def _own_texts(self) -> bool:
        return self.layout.text_numbers > 0 and self.towers.text.size > 0

    @property
    def _bank_learns(self) -> bool:
        return self.layout.free > 0 and self.towers.text.size > 0

    def _list_parts(self) -> list[tuple[FlatModule, int]]:
        """Return the encoders whose gradients users compute, and the length of their rows."""
        images = [(self.towers.image, self.layout.image_numbers)] if self.towers.image.size else []
        return images + ([(self.towers.text, self.layout.text_numbers)] if self._own_texts else [])

    @cached_property
    def _pieces(self) -> tuple[Tensor, Tensor, float]:
        return self.towers.split_weights(self.weights, self.temperature)

    @cached_property
    def _bank(self) -> Tensor:
        """Return directions of the bank's embeddings, (captions, dim): public."""
        with one_thread():
            return normalise_rows(torch.from_numpy(self.towers.embed_texts(self.weights, self.layout.bank)))

    def __call__(self, batch: UserBatch) -> dict[str, Contributions]:
        with one_thread():
            targets = torch.from_numpy(self.layout.find_targets(batch.y))
            there = (targets >= 0).float()
            shares = there / there.sum(dim=1, keepdim=True).clamp_min(1)
            if self.by_layers:
                return {
                    "gradient": Concatenated(self._differentiate_layers(batch.X, targets.flatten(), shares.flatten()))
                }
            return {"gradient": Vectors(self._differentiate_users(batch.X, targets, shares))}

    def _differentiate_layers(self, X: NDArray[Any], targets: Tensor, shares: Tensor) -> tuple[Contributions, ...]:
        """Return users' gradients as one contribution for each group of weights, without a gradient per user.

        Args:
            X: rows, (users, rows, numbers).
            targets: the caption of each row, (users * rows,).
            shares: the weight of each row in its user's mean, (users * rows,).
        """
        users, (image_weights, text_weights, log_scale) = len(X), self._pieces
        rows, parts = rows_of(X).flatten(0, 1), list[Contributions]()
        image, text = own_copy(self.towers.image), own_copy(self.towers.text)
        with capture(image) as seen_images:
            a = image(image_weights, self.layout.take_images(rows))
        words = self._find_texts(rows, targets)
        with capture(text) as seen_texts:
            b = None if words is None else text(text_weights, words)
        scales = torch.full((len(rows),), log_scale, requires_grad=True)
        slope = self._differentiate_loss(a, b, scales, targets, shares)
        if image.size:
            parts += join_groups(image, [compute_gradients(image, seen_images, a, slope.image, users)])
        if self._own_texts and b is not None and slope.text is not None:
            parts += join_groups(text, [compute_gradients(text, seen_texts, b, slope.text, users)])
        if self._bank_learns:
            parts.append(Products(_group_by_user(slope.chances, users), _group_by_user(slope.scaled, users)))
        if self.towers.learn_scale:
            parts.append(Vectors(slope.scale.reshape(users, -1).sum(dim=1, keepdim=True).numpy()))
        return tuple(parts)

    def _differentiate_loss(
        self, a: Tensor, b: Tensor | None, scales: Tensor, targets: Tensor, shares: Tensor
    ) -> _Slopes:
        """Return the slopes of the loss in embeddings, row by row.

        Args:
            a: embeddings of images, (rows, dim).
            b: embeddings of rows' own captions, (rows, dim), or None.
            scales: the logarithm of the scale, once for each row, (rows,).
            targets: the caption of each row, (rows,).
            shares: the weight of each row, (rows,).
        """
        if b is None:
            return self._differentiate_bank(a.detach(), scales.detach(), targets, shares)
        with torch.enable_grad():
            left, right = a.detach().requires_grad_(), b.detach().requires_grad_()
            logits = self._compute_logits(left, self._bank, right, scales[:, None], targets)
            losses = _compute_losses(logits, targets) * shares
            found = torch.autograd.grad(losses.sum(), [left, scales, right])
        with torch.no_grad():
            chances = _differentiate_softmax(logits, targets, shares) if self._bank_learns else logits[:, :0]
            scaled = self._direct(left) * scales.exp()[:, None]
        return _Slopes(found[0], found[2], found[1], chances[:, : self.layout.free], scaled)

    @torch.no_grad()
    def _differentiate_bank(self, a: Tensor, scales: Tensor, targets: Tensor, shares: Tensor) -> _Slopes:
        """Return what `_differentiate_loss` does where all captions are the bank's: in closed form."""
        u, factor = self._direct(a), scales.exp()[:, None]
        scaled = u * factor
        logits = u @ self._bank.T * factor
        slopes = _differentiate_softmax(logits, targets, shares)
        left = slopes @ self._bank * factor
        image = pull_through_directions(left, a, u) if self.towers.cosine else left
        return _Slopes(image, None, (slopes * logits).sum(dim=1), slopes[:, : self.layout.free], scaled)

    def _direct(self, images: Tensor) -> Tensor:
        """Return embeddings of images as they count: their directions, or the embeddings themselves."""
        return normalise_rows(images) if self.towers.cosine else images

    def _compute_logits(
        self, images: Tensor, bank: Tensor, texts: Tensor | None, log_scale: Tensor, targets: Tensor
    ) -> Tensor:
        """Return the logits of each row for every caption of the bank and, where rows have captions, for its own.

        Args:
            images: embeddings, (rows, dim).
            bank: directions of the bank's embeddings, (captions, dim).
            texts: embeddings of rows' own captions, (rows, dim), or None.
            log_scale: the logarithm of the scale, of a shape that fits (rows, 1).
            targets: the caption of each row, (rows,).
        """
        u, scale = self._direct(images), log_scale.exp()
        logits = u @ bank.T * scale
        if texts is None:
            return logits
        own = (u * normalise_rows(texts)).sum(dim=1, keepdim=True) * scale
        return torch.cat([logits, own.masked_fill(targets[:, None] != self.layout.free, -torch.inf)], dim=1)

    def _differentiate_users(self, X: NDArray[Any], targets: Tensor, shares: Tensor) -> NDArray[np.float32]:
        """Return the gradient of each user, (users, size), for encoders of any kind.

        Args:
            X: rows, (users, rows, numbers).
            targets: the caption of each row, (users, rows).
            shares: the weight of each row in its user's mean, (users, rows).
        """
        rows, towers, (image_weights, text_weights, log_scale) = rows_of(X), self.towers, self._pieces
        texts = self._find_texts(rows.flatten(0, 1), targets.flatten())
        image, text = own_copy(towers.image), own_copy(towers.text)

        def loss(weights: tuple[Tensor, ...], r: Tensor, words: Tensor | None, target: Tensor, share: Tensor) -> Tensor:
            """Return the mean loss of one user's pairs."""
            of_images, of_texts, bank, scale = weights
            a = image(of_images, r[:, : self.layout.image_numbers])
            b = None if words is None else text(of_texts, words)
            return (_compute_losses(self._compute_logits(a, bank, b, scale, target), target) * share).sum()

        values = (image_weights, text_weights, self._bank, torch.tensor(log_scale))
        words = None if texts is None else texts.reshape(*rows.shape[:2], -1)
        each = vmap(grad(loss), in_dims=(None, 0, None if words is None else 0, 0, 0))
        found = each(values, rows, words, targets, shares)
        kept = [towers.image.size > 0, self._own_texts, self._bank_learns, towers.learn_scale]
        flat = [part.detach().reshape(len(X), -1) for part, keep in zip(found, kept, strict=True) if keep]
        return np.asarray(torch.cat(flat, dim=1).numpy())

    def _find_texts(self, rows: Tensor, targets: Tensor) -> Tensor | None:
        """Return the text of each row, or None where all captions are in the bank."""
        return self.layout.find_texts(rows, targets) if self.layout.text_numbers else None

    def to_gradient(self, released: NDArray[np.float64]) -> NDArray[np.float64]:
        """Return the gradient in all weights, (weights,), from what was released: public arithmetic.

        The bank's embeddings are the text encoder's doing, so their slope is pulled back to its weights.

        Args:
            released: (size,).
        """
        t, bank = self.towers, self.layout.free * self.towers.dim * self._bank_learns
        sizes = [t.image.size, self._own_texts * t.text.size, bank, int(t.learn_scale)]
        image, own, slope, scale = np.split(released, np.cumsum(sizes)[:-1])
        text = np.zeros(t.text.size)
        text[: len(own)] += own
        if self._bank_learns:
            text += self._pull_back_texts(slope)
        return np.concatenate([image, text, scale])

    def _pull_back_texts(self, slope: NDArray[np.float64]) -> NDArray[np.float64]:
        """Return the gradient in the text encoder's weights, (weights,), from the slope in the bank's embeddings.

        Args:
            slope: (captions * dim,).
        """
        text, flat = own_copy(self.towers.text), self._pieces[1].clone().requires_grad_()
        outward, bank = (
            torch.from_numpy(slope).float().reshape(self.layout.free, -1),
            torch.from_numpy(self.layout.bank),
        )
        total = np.zeros(len(flat))
        for start in range(0, self.layout.free, AT_ONCE):
            some = slice(start, start + AT_ONCE)
            with one_thread(), torch.enable_grad():
                (part,) = torch.autograd.grad(normalise_rows(text(flat, bank[some])), flat, outward[some])
            total += part.double().numpy()
        return total


@dataclass(frozen=True, eq=False)
class _Slopes:
    """Slopes of the loss, row by row."""

    image: Tensor
    text: Tensor | None
    scale: Tensor
    chances: Tensor  # (rows, captions of the bank): softmax, less one at the row's own
    scaled: Tensor  # (rows, dim): embeddings of images times the scale


def _compute_losses(logits: Tensor, targets: Tensor) -> Tensor:
    """Return the cross-entropy of each row, (rows,); zero where there is no target."""
    chosen = logits.gather(1, targets.clamp(0, logits.shape[1] - 1)[:, None])[:, 0]
    return torch.where(targets >= 0, torch.logsumexp(logits, dim=1) - chosen, torch.zeros_like(chosen))


def _differentiate_softmax(logits: Tensor, targets: Tensor, shares: Tensor) -> Tensor:
    """Return the slope of each row's loss in its logits: the softmax, less one at the row's own caption."""
    result = torch.softmax(logits, dim=1)
    result[torch.arange(len(targets)), targets.clamp_min(0)] -= 1
    return result * shares[:, None]


def _group_by_user(rows: Tensor, users: int) -> NDArray[np.float32]:
    """Return rows as (users, rows of a user, numbers)."""
    return np.ascontiguousarray(rows.detach().reshape(users, -1, rows.shape[1]).numpy())


def _count_kernel_weights(part: FlatModule) -> int:
    """Return how many weights of a part are of convolutions."""
    layers = dict(part.module.named_modules())
    shapes = part.shapes.items()
    return sum(math.prod(s) for name, s in shapes if isinstance(layers[name.rpartition(".")[0]], nn.Conv2d))
