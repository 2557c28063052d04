"""The networks of the CENTAUR paper, and low-rank additions to any network.

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
    """Rows, each an image (side, side, channels) flattened, as (rows, channels, side, side)."""

    def __init__(self, channels: int, side: int) -> None:
        super().__init__()
        self.shape = (side, side, channels)

    def forward(self, rows: Tensor) -> Tensor:
        return rows.reshape(len(rows), *self.shape).permute(0, 3, 1, 2).contiguous()


def mlp(
    features: int = 784, hidden: Sequence[int] = (256, 128, 16), classes: int = 10
) -> tuple[nn.Sequential, nn.Linear]:
    """(representation, head): layers of these sizes with ReLU, and a linear head."""
    return _built(_layers(features, hidden), hidden, classes)


def lenet(
    channels: int = 3, side: int = 32, hidden: Sequence[int] = (384, 32), classes: int = 10
) -> tuple[nn.Sequential, nn.Linear]:
    """(representation, head): two convolutions of 64 channels, 5x5, each with ReLU and 2x2 max pooling, then layers of
    these sizes; the paper has (384, 32) for CIFAR-10 and (128, 32) for CIFAR-100."""
    left = ((side - 4) // 2 - 4) // 2
    if left < 1:
        raise InputError(f"images of side {side} are too small for two 5x5 convolutions; use at least 16.")
    layers: list[nn.Module] = [Images(channels, side)]
    for inputs in (channels, 64):
        layers += [nn.Conv2d(inputs, 64, 5), nn.ReLU(), nn.MaxPool2d(2)]
    return _built([*layers, nn.Flatten(), *_layers(64 * left * left, hidden)], hidden, classes)


def _layers(inputs: int, hidden: Sequence[int]) -> list[nn.Module]:
    if not hidden:
        raise InputError("a representation needs at least one layer. Give the sizes in `hidden`.")
    layers: list[nn.Module] = []
    for size in hidden:
        layers += [nn.Linear(inputs, size), nn.ReLU()]
        inputs = size
    return layers


def _built(layers: list[nn.Module], hidden: Sequence[int], classes: int) -> tuple[nn.Sequential, nn.Linear]:
    representation, head = nn.Sequential(*layers), nn.Linear(hidden[-1], classes)
    initialise(representation, "representation")
    initialise(head, "head")
    return representation, head


def initialise(module: nn.Module, name: str) -> None:
    """He-uniform weights and zero biases, drawn from the names and sizes of the parameters that are trainable."""
    with torch.no_grad():
        for key, parameter in module.named_parameters():
            if not parameter.requires_grad:
                continue
            if parameter.ndim < 2:
                parameter.zero_()
            else:
                parameter.copy_(_he_uniform(f"{name}.{key}", parameter.shape))


def _he_uniform(name: str, shape: torch.Size) -> Tensor:
    seed = hashlib.blake2b(f"{name} {tuple(shape)}".encode(), digest_size=7).digest()
    generator = torch.Generator().manual_seed(int.from_bytes(seed, "little"))
    bound = math.sqrt(6 / math.prod(shape[1:]))
    return (2 * torch.rand(shape, generator=generator) - 1) * bound


class Adapted(nn.Module):
    """A frozen layer plus an up-projection of a down-projection of its input; the former starts at zero."""

    def __init__(self, layer: nn.Module, down: nn.Module, up: nn.Module) -> None:
        super().__init__()
        self.layer, self.down, self.up = layer, down, up

    def forward(self, rows: Tensor) -> Tensor:
        result: Tensor = self.layer(rows) + self.up(self.down(rows))
        return result


def adapted(module: nn.Module, rank: int, name: str = "adapter") -> nn.Module:
    """A copy of the module, frozen, with a trainable addition of this rank to each nn.Linear and nn.Conv2d.

    It starts as the module itself; what is shared and trained are the additions alone.
    """
    if rank < 1:
        raise InputError(f"an adapter has a rank of at least 1. Got {rank} instead.")
    frozen = copy.deepcopy(module)
    for parameter in frozen.parameters():
        parameter.requires_grad_(False)
    result = _with_additions(frozen, rank)
    if not any(parameter.requires_grad for parameter in result.parameters()):
        raise InputError("the module has no nn.Linear and no nn.Conv2d without groups, so there is nothing to adapt.")
    initialise(result, name)
    with torch.no_grad():
        for layer in result.modules():
            if isinstance(layer, Adapted):
                for parameter in layer.up.parameters():
                    parameter.zero_()
    return result


def _with_additions(module: nn.Module, rank: int) -> nn.Module:
    if type(module) is nn.Linear:
        down = nn.Linear(module.in_features, rank, bias=False)
        return Adapted(module, down, nn.Linear(rank, module.out_features, bias=False))
    if type(module) is nn.Conv2d and module.groups == 1:
        window = {"stride": module.stride, "padding": module.padding, "dilation": module.dilation}
        size, mode = module.kernel_size, module.padding_mode
        lower = nn.Conv2d(module.in_channels, rank, size, bias=False, padding_mode=mode, **window)  # type: ignore[arg-type]
        return Adapted(module, lower, nn.Conv2d(rank, module.out_channels, 1, bias=False))
    for name, child in module.named_children():
        setattr(module, name, _with_additions(child, rank))
    return module
