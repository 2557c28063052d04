"""The networks of the CENTAUR paper (Shen et al. 2023), and low-rank additions to any network.

Weights at the start are public: drawn from names and sizes, the same on every machine and in every run.
"""

from __future__ import annotations

import copy
import hashlib
import math
from collections.abc import Sequence

import torch
from torch import Tensor, nn

from privrep.errors import InputError


class Images(nn.Module):
    """A module from rows, each an image (side, side, channels) flattened, to (rows, channels, side, side)."""

    def __init__(self, channels: int, side: int) -> None:
        super().__init__()
        self.shape = (side, side, channels)

    def forward(self, rows: Tensor) -> Tensor:
        """Return images of rows (r, side * side * channels)."""
        return rows.reshape(len(rows), *self.shape).permute(0, 3, 1, 2).contiguous()


def mlp(
    features: int = 784, hidden: Sequence[int] = (256, 128, 16), classes: int = 10
) -> tuple[nn.Sequential, nn.Linear]:
    """Return a representation, layers of these sizes with ReLU, and a linear head.

    Args:
        features: numbers of a row.
        hidden: sizes of the layers.
        classes: how many scores the head gives.
    """
    return _build(_make_layers(features, hidden), hidden, classes)


def lenet(
    channels: int = 3, side: int = 32, hidden: Sequence[int] = (384, 32), classes: int = 10
) -> tuple[nn.Sequential, nn.Linear]:
    """Return a representation and a linear head for images.

    The representation has two convolutions of 64 channels, 5x5, each with ReLU and 2x2 max pooling, then layers. The
    paper has layers (384, 32) for CIFAR-10 and (128, 32) for CIFAR-100.

    Args:
        channels: of images.
        side: pixels of a side of images, which are square.
        hidden: sizes of the layers after the convolutions.
        classes: how many scores the head gives.
    """
    left = ((side - 4) // 2 - 4) // 2
    if left < 1:
        raise InputError(f"images of side {side} are too small for two 5x5 convolutions; use at least 16.")
    layers: list[nn.Module] = [Images(channels, side)]
    for inputs in (channels, 64):
        layers += [nn.Conv2d(inputs, 64, 5), nn.ReLU(), nn.MaxPool2d(2)]
    return _build([*layers, nn.Flatten(), *_make_layers(64 * left * left, hidden)], hidden, classes)


def _make_layers(inputs: int, hidden: Sequence[int]) -> list[nn.Module]:
    """Return linear layers of these sizes, each with ReLU."""
    if not hidden:
        raise InputError("a representation needs at least one layer. Give the sizes in `hidden`.")
    layers: list[nn.Module] = []
    for size in hidden:
        layers += [nn.Linear(inputs, size), nn.ReLU()]
        inputs = size
    return layers


def _build(layers: list[nn.Module], hidden: Sequence[int], classes: int) -> tuple[nn.Sequential, nn.Linear]:
    """Return a representation of these layers and its head, both initialised."""
    representation, head = nn.Sequential(*layers), nn.Linear(hidden[-1], classes)
    initialise(representation, "representation")
    initialise(head, "head")
    return representation, head


def initialise(module: nn.Module, name: str) -> None:
    """Set weights to He-uniform numbers and biases to zero, drawn from the names and sizes of trainable parameters."""
    with torch.no_grad():
        for key, parameter in module.named_parameters():
            if not parameter.requires_grad:
                continue
            if parameter.ndim < 2:
                parameter.zero_()
            else:
                parameter.copy_(_draw_he_uniform(f"{name}.{key}", parameter.shape))


def _draw_he_uniform(name: str, shape: torch.Size) -> Tensor:
    """Return uniform numbers of this shape, within sqrt(6 / inputs), drawn from name and shape."""
    seed = hashlib.blake2b(f"{name} {tuple(shape)}".encode(), digest_size=7).digest()
    generator = torch.Generator().manual_seed(int.from_bytes(seed, "little"))
    bound = math.sqrt(6 / math.prod(shape[1:]))
    return (2 * torch.rand(shape, generator=generator) - 1) * bound


class Adapted(nn.Module):
    """A frozen layer plus an up-projection of a down-projection of its input."""

    def __init__(self, layer: nn.Module, down: nn.Module, up: nn.Module) -> None:
        super().__init__()
        self.layer, self.down, self.up = layer, down, up

    def forward(self, rows: Tensor) -> Tensor:
        """Return the layer's output plus the addition's."""
        result: Tensor = self.layer(rows) + self.up(self.down(rows))
        return result


def add_adapters(module: nn.Module, rank: int, name: str = "adapter") -> nn.Module:
    """Return a frozen copy of a module, with a trainable addition of this rank to each nn.Linear and nn.Conv2d.

    It starts as the module itself; what is shared and trained are the additions alone.

    Args:
        module: any module with such a layer.
        rank: of each addition.
        name: from which the additions' weights are drawn.
    """
    if rank < 1:
        raise InputError(f"an adapter has a rank of at least 1. Got {rank} instead.")
    frozen = copy.deepcopy(module)
    for parameter in frozen.parameters():
        parameter.requires_grad_(False)
    result = _add_adapters(frozen, rank)
    if not any(parameter.requires_grad for parameter in result.parameters()):
        raise InputError("the module has no nn.Linear and no nn.Conv2d without groups, so there is nothing to adapt.")
    initialise(result, name)
    with torch.no_grad():
        for layer in result.modules():
            if isinstance(layer, Adapted):
                for parameter in layer.up.parameters():
                    parameter.zero_()
    return result


def _add_adapters(module: nn.Module, rank: int) -> nn.Module:
    """Return a module with additions to its layers, which it replaces in place."""
    if type(module) is nn.Linear:
        down = nn.Linear(module.in_features, rank, bias=False)
        return Adapted(module, down, nn.Linear(rank, module.out_features, bias=False))
    if type(module) is nn.Conv2d and module.groups == 1:
        window = {"stride": module.stride, "padding": module.padding, "dilation": module.dilation}
        size, mode = module.kernel_size, module.padding_mode
        lower = nn.Conv2d(module.in_channels, rank, size, bias=False, padding_mode=mode, **window)  # type: ignore[arg-type]
        return Adapted(module, lower, nn.Conv2d(rank, module.out_channels, 1, bias=False))
    for name, child in module.named_children():
        setattr(module, name, _add_adapters(child, rank))
    return module
