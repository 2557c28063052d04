"""Pretrained networks as modules of rows, and how images and texts become rows.

Tokens travel as float32 rows: the ids, then zeros and ones that say which are there. Whatever numbers a row holds are
brought into range first, so that nobody's row can stop a fit.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn
from torch.nn.functional import interpolate, normalize

from privrep.errors import InputError
from privrep.neural.features import LITE_DEVIATION, LITE_MEAN
from privrep.typing import Singles

_LARGEST = 1e4  # the largest pixel that counts, once a processor has scaled it
_AT_A_TIME = 256  # inputs prepared between two reports of progress


class Progress(Protocol):
    """A function that is told how many inputs are done."""

    def __call__(self, done: int, /) -> None: ...


class ScaleShift(nn.Module):
    """A BatchNorm whose averages are constants: a scale and a shift for each channel."""

    def __init__(self, norm: nn.BatchNorm2d) -> None:
        super().__init__()
        if norm.running_mean is None or norm.running_var is None:
            raise InputError("a BatchNorm without averages cannot be fixed; load pretrained weights first.")
        scale = norm.weight.detach() / torch.sqrt(norm.running_var + norm.eps)
        self.scale = nn.Parameter(scale.reshape(-1, 1, 1).clone())
        self.shift = nn.Parameter((norm.bias.detach() - norm.running_mean * scale).reshape(-1, 1, 1).clone())

    def forward(self, images: Tensor) -> Tensor:
        """Return images (r, channels, height, width), scaled and shifted."""
        return images * self.scale + self.shift


class EfficientNet(nn.Module):
    """A module from rows, each an image (side, side, 3) from 0 to 1, to pooled features at `size` pixels."""

    def __init__(self, net: Any, size: int, side: int) -> None:
        """Take a network apart, and fix its norms.

        Args:
            net: an EfficientNet of efficientnet_lite_pytorch.
            size: pixels of a side at which features are computed.
            side: pixels of a side of images in rows.
        """
        super().__init__()
        if side < 1:
            raise InputError(f"side must be at least 1 pixel. Got {side} instead.")
        self.size, self.side = size, side
        self.stem = nn.Sequential(net._conv_stem, net._bn0, net._swish)
        self.blocks = nn.ModuleList(net._blocks)
        self.head = nn.Sequential(net._conv_head, net._bn1, net._swish)
        _fix_norms(self)

    def forward(self, rows: Tensor) -> Tensor:
        """Return features (r, 1280) of rows of pixels."""
        images = torch.nan_to_num(rows).clamp(0, 1).reshape(-1, self.side, self.side, 3).permute(0, 3, 1, 2)
        if self.side != self.size:
            images = interpolate(images, (self.size, self.size), mode="bicubic", align_corners=False).clamp(0, 1)
        found = self.stem((images - LITE_MEAN) / LITE_DEVIATION)
        for block in self.blocks:
            found = block(found)
        result: Tensor = self.head(found).mean((2, 3))
        return result


def _fix_norms(module: nn.Module) -> None:
    """Replace every BatchNorm within a module by a fixed scale and shift."""
    for name, child in module.named_children():
        if isinstance(child, nn.BatchNorm2d):
            setattr(module, name, ScaleShift(child))
        else:
            _fix_norms(child)


class MiniLm(nn.Module):
    """A module from rows of tokens to unit embeddings: the mean over the tokens that are there."""

    def __init__(self, net: Any, tokens: int) -> None:
        super().__init__()
        self.net, self.tokens, self.vocabulary = net, tokens, int(net.config.vocab_size)

    def forward(self, rows: Tensor) -> Tensor:
        """Return embeddings (r, dim) of rows (r, 2 * tokens)."""
        ids, there = read_tokens(rows, self.tokens, self.vocabulary)
        seen = there[:, None, None, :].expand(-1, 1, self.tokens, -1)
        states = self.net(input_ids=ids, attention_mask=make_additive_mask(seen)).last_hidden_state
        weights = there.to(states.dtype)[:, :, None]
        return normalize((states * weights).sum(1) / weights.sum(1), dim=1)


class ContrastiveImages(nn.Module):
    """A module from rows to CLIP's image embeddings.

    A row is an image (channels, side, side) as its processor scales it.
    """

    def __init__(self, net: Any, projection: nn.Module) -> None:
        super().__init__()
        self.net, self.projection = net, projection
        self.shape = (int(net.config.num_channels), int(net.config.image_size), int(net.config.image_size))

    def forward(self, rows: Tensor) -> Tensor:
        """Return embeddings (r, dim) of rows of pixels."""
        images = torch.nan_to_num(rows).clamp(-_LARGEST, _LARGEST).reshape(-1, *self.shape)
        result: Tensor = self.projection(self.net(pixel_values=images).pooler_output)
        return result


class ContrastiveTexts(nn.Module):
    """A module from rows of tokens to CLIP's text embeddings: the state at the token that ends the text."""

    def __init__(self, net: Any, projection: nn.Module) -> None:
        super().__init__()
        self.net, self.projection = net, projection
        self.tokens, self.vocabulary = int(net.config.max_position_embeddings), int(net.config.vocab_size)

    def forward(self, rows: Tensor) -> Tensor:
        """Return embeddings (r, dim) of rows (r, 2 * tokens)."""
        ids, there = read_tokens(rows, self.tokens, self.vocabulary)
        earlier = torch.ones(self.tokens, self.tokens, dtype=torch.bool, device=rows.device).tril()
        mask = make_additive_mask(there[:, None, None, :] & earlier)
        result: Tensor = self.projection(self.net(input_ids=ids, attention_mask=mask).pooler_output)
        return result


def read_tokens(rows: Tensor, tokens: int, vocabulary: int) -> tuple[Tensor, Tensor]:
    """Return ids and which of them are there, both (rows, tokens), of any rows of numbers; the first token always is.

    Args:
        rows: (rows, 2 * tokens).
        tokens: how many a row has.
        vocabulary: how many tokens there are; ids are brought into its range.
    """
    numbers = torch.nan_to_num(rows)
    ids = numbers[:, :tokens].clamp(0, vocabulary - 1).round().long()
    first = torch.arange(tokens, device=rows.device) == 0
    return ids, (numbers[:, tokens:] > 0.5) | first


def make_additive_mask(seen: Tensor) -> Tensor:
    """Return zero where a token is seen and a hugely negative number where not, (rows, 1, tokens, tokens).

    Handed to transformers in four dimensions it is taken as it is. From a mask of two dimensions transformers would
    choose its way of computing by looking at all rows, and so mix them.
    """
    return torch.where(seen, 0.0, torch.finfo(torch.float32).min)


@dataclass(frozen=True)
class Pixels:
    """A function from images to rows (side * side * 3) from 0 to 1, resized one by one where they have another size."""

    side: int

    def __call__(self, inputs: Any, progress: Progress | None = None) -> Singles:
        """Return a row for each image; see `encoders.Prepare`."""
        images = check_images(inputs)
        rows = np.empty((len(images), self.side * self.side * 3), dtype=np.float32)
        for some in _cut_blocks(len(images), progress):
            pixels = to_colour(images[some]).astype(np.float32) / np.float32(255)
            if pixels.shape[1:3] == (self.side, self.side):
                rows[some] = pixels.reshape(len(pixels), -1)
            else:
                rows[some] = [_resize(image, self.side) for image in pixels]
        return rows


@dataclass(frozen=True)
class Processed:
    """A function from images to rows of the numbers that a processor of transformers makes of each, channels first."""

    processor: Any
    shape: tuple[int, int, int]

    def __call__(self, inputs: Any, progress: Progress | None = None) -> Singles:
        """Return a row for each image; see `encoders.Prepare`."""
        images = check_images(inputs)
        rows = np.empty((len(images), int(np.prod(self.shape))), dtype=np.float32)
        for some in _cut_blocks(len(images), progress):
            rows[some] = [self._make_row(image) for image in to_colour(images[some])]
        return rows

    def _make_row(self, image: NDArray[np.uint8]) -> Singles:
        """Return the numbers that the processor makes of one image, (height, width, 3) before, flat after."""
        found = np.asarray(self.processor(images=[image], return_tensors="np")["pixel_values"], dtype=np.float32)[0]
        if found.shape != self.shape:
            raise InputError(
                f"the processor makes images of shape {found.shape} and the model takes {self.shape}; give a folder "
                "whose processor and model belong together."
            )
        return found.ravel()


@dataclass(frozen=True)
class Tokens:
    """A function from texts to rows of tokens."""

    tokenise: Callable[[list[str]], tuple[Any, Any]]  # ids and mask of each text, `tokens` of them
    tokens: int

    def __call__(self, inputs: Any, progress: Progress | None = None) -> Singles:
        """Return a row for each text, (texts, 2 * tokens): ids, then their mask."""
        if isinstance(inputs, str) or not all(isinstance(text, str) for text in inputs):
            raise InputError("texts must be a list of strings.")
        texts = list(inputs)
        rows = np.empty((len(texts), 2 * self.tokens), dtype=np.float32)
        for some in _cut_blocks(len(texts), progress):
            ids, there = self.tokenise(texts[some])
            rows[some, : self.tokens], rows[some, self.tokens :] = ids, there
        return rows


def _resize(image: Singles, side: int) -> Singles:
    """Return an image (height, width, 3) at side * side pixels, flat."""
    channels = torch.from_numpy(image).permute(2, 0, 1)[None]
    smaller = max(image.shape[:2]) > side
    made = interpolate(channels, (side, side), mode="bilinear", align_corners=False, antialias=smaller)
    return np.asarray(made[0].permute(1, 2, 0).reshape(-1).numpy())


def check_images(inputs: Any) -> NDArray[np.uint8]:
    """Return images as an array; raise InputError unless they are uint8 and of a shape that images have."""
    images = np.asarray(inputs)
    if images.dtype != np.uint8 or not (images.ndim == 3 or (images.ndim == 4 and images.shape[3] == 3)):
        raise InputError(
            "images must be whole numbers of 8 bits, (images, height, width, 3) or, in grey, (images, height, width); "
            f"convert them. Got {images.dtype} of shape {images.shape}."
        )
    return images


def to_colour(images: NDArray[np.uint8]) -> NDArray[np.uint8]:
    """Return images (n, height, width, 3); grey ones have their channel three times."""
    return np.repeat(images[..., None], 3, axis=3) if images.ndim == 3 else images


def _cut_blocks(count: int, progress: Progress | None) -> Iterator[slice]:
    """Return slices of inputs that are prepared together, and tell `progress` after each."""
    for start in range(0, count, _AT_A_TIME):
        yield slice(start, start + _AT_A_TIME)
        if progress is not None:
            progress(min(start + _AT_A_TIME, count))
