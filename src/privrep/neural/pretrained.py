"""Public networks that have a name: a folder that was made with one can be read without passing a module again."""

from __future__ import annotations

import os
from typing import Any

from torch import Tensor, nn
from torch.nn import functional

from privrep.errors import InputError
from privrep.neural.features import LITE_DEVIATION, LITE_MEAN, load_efficientnet
from privrep.neural.frozen import Frozen, OnProgress

EFFICIENTNET = "EfficientNet-Lite0 of ImageNet"
PIXELS = 112  # side that images are resized to


class _Pooled(nn.Module):
    """A module from images (1, channels, height, width), from 0 to 1, to pooled features (1, 1280)."""

    def __init__(self, network: Any) -> None:
        super().__init__()
        self.network = network

    def forward(self, images: Tensor) -> Tensor:
        """Return the features of an image; a grey one has its channel three times."""
        colours = images.expand(-1, 3, -1, -1) if images.shape[1] == 1 else images
        resized = functional.interpolate(colours, (PIXELS, PIXELS), mode="bilinear", align_corners=False)
        found: Tensor = self.network.extract_features((resized - LITE_MEAN) / LITE_DEVIATION)
        return found.mean((2, 3))


def efficientnet(
    image: tuple[int, ...],
    *,
    cache: str | os.PathLike[str] | None = None,
    on_progress: OnProgress | None = None,
) -> Frozen:
    """Return EfficientNet-Lite0, trained on ImageNet, as a public map of images to 1,280 features.

    Args:
        image: (height, width, channels) of images, with one or three channels.
        cache: a folder of features, as `Frozen` has it.
        on_progress: told how many rows are done.
    """
    if len(image) != 3 or image[2] not in (1, 3):
        raise InputError(f"EfficientNet takes images of one or three channels. Got {tuple(image)} instead.")
    module = _Pooled(load_efficientnet(PIXELS))
    return Frozen.of(module, tuple(image), name=EFFICIENTNET, cache=cache, on_progress=on_progress)


def load_named_map(settings: dict[str, Any]) -> Frozen | None:
    """Return the frozen map that these settings of a folder name; None if its module is somebody's own."""
    return efficientnet(tuple(settings["shape"])) if settings.get("name") == EFFICIENTNET else None
