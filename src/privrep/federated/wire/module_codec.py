"""Torch modules as data: how each layer was made, and its tensors. A list of layers says which can be sent.

Formal guarantee: `read` makes nothing but layers of the list. They take rows one by one, and `check_split` sees to it
that each keeps the first axis, that of rows: whatever a sender says, no row changes what is made of another.
"""

from __future__ import annotations

import math
from collections import OrderedDict
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn
from torch.func import functional_call

from privrep.errors import InputError
from privrep.neural.layers import Centred, Leading
from privrep.neural.models import Adapted, Images
from privrep.nn.flat_module import FlatModule, Split

Write = Callable[[NDArray[Any]], dict[str, Any]]
Read = Callable[[Any], NDArray[Any]]


@dataclass(frozen=True)
class Kind:
    """A layer that can be sent: its class, and the attributes that are its constructor's arguments of the same name."""

    made: type[nn.Module]
    arguments: tuple[str, ...] = ()
    flags: tuple[str, ...] = ()  # arguments that say whether there is a tensor of this name
    inside: tuple[str, ...] = ()  # names of the layers within


_WINDOW = ("kernel_size", "stride", "padding")
KINDS = {
    kind.made.__name__: kind
    for kind in (
        Kind(nn.Sequential),
        Kind(nn.Linear, ("in_features", "out_features"), ("bias",)),
        Kind(
            nn.Conv2d,
            ("in_channels", "out_channels", *_WINDOW, "dilation", "groups", "padding_mode"),
            ("bias",),
        ),
        Kind(nn.ReLU, ("inplace",)),
        Kind(nn.Tanh),
        Kind(nn.Sigmoid),
        Kind(nn.GELU, ("approximate",)),
        Kind(nn.LeakyReLU, ("negative_slope", "inplace")),
        Kind(nn.Flatten, ("start_dim", "end_dim")),
        Kind(nn.Unflatten, ("dim", "unflattened_size")),
        Kind(nn.Identity),
        Kind(nn.MaxPool2d, (*_WINDOW, "dilation", "return_indices", "ceil_mode")),
        Kind(nn.AvgPool2d, (*_WINDOW, "ceil_mode", "count_include_pad", "divisor_override")),
        Kind(nn.AdaptiveAvgPool2d, ("output_size",)),
        Kind(nn.GroupNorm, ("num_groups", "num_channels", "eps", "affine")),
        Kind(nn.LayerNorm, ("normalized_shape", "eps", "elementwise_affine"), ("bias",)),
        Kind(Images, ("shape",)),
        Kind(Centred, ("size",)),
        Kind(Leading, ("columns",), inside=("module",)),
        Kind(Adapted, inside=("layer", "down", "up")),
    )
}
"""By the name that travels."""


def written(module: nn.Module, write: Write) -> dict[str, Any]:
    """The module as a tree; `write` sends an array and says how to name it."""
    layers = [layer for _, layer in module.named_modules(remove_duplicate=False)]
    places = [tensor.data_ptr() for layer in layers for tensor in _tensors(layer).values() if tensor.numel()]
    if len(set(map(id, layers))) < len(layers) or len(set(places)) < len(places):
        raise InputError(
            "a module with one layer, or weights, in two places cannot be sent to nodes. Give each its own."
        )
    return _written(module, write)


def _tensors(layer: nn.Module) -> dict[str, Tensor]:
    """The layer's own parameters and buffers, by name."""
    both = (*layer._parameters.items(), *layer._buffers.items())
    return {name: tensor for name, tensor in both if tensor is not None}


def _written(layer: nn.Module, write: Write) -> dict[str, Any]:
    kind = KINDS.get(type(layer).__name__)
    if kind is None or type(layer) is not kind.made or layer._forward_hooks or layer._forward_pre_hooks:
        raise InputError(
            f"a module with a layer {type(layer).__module__}.{type(layer).__qualname__}, or with hooks, cannot be sent "
            f"to nodes. Make it of {', '.join(KINDS)}."
        )
    arguments: dict[str, Any] = {name: _plain(getattr(layer, name)) for name in kind.arguments}
    arguments |= {name: getattr(layer, name) is not None for name in kind.flags}
    tensors = {name: (tensor, tensor.requires_grad) for name, tensor in _tensors(layer).items()}
    children = dict(layer.named_children())
    twin = _made(kind, {name: _tuples(value) for name, value in arguments.items()}, children, tensors)
    if {name: t.shape for name, t in _tensors(twin).items()} != {name: t.shape for name, (t, _) in tensors.items()}:
        raise InputError(f"a {type(layer).__name__} with other weights than its own cannot be sent to nodes.")
    return {
        "layer": type(layer).__name__,
        "arguments": arguments,
        "tensors": {name: {"values": write(_array(t)), "trained": trained} for name, (t, trained) in tensors.items()},
        "inside": {name: _written(child, write) for name, child in children.items()},
    }


def _plain(value: Any) -> Any:
    """An argument as JSON has it."""
    if isinstance(value, np.generic):
        value = value.item()
    if isinstance(value, float) and not math.isfinite(value):
        raise InputError(f"a module with {value} for a setting cannot be sent to nodes. Give it a finite number.")
    return [_plain(each) for each in value] if isinstance(value, tuple | list) else value


def _array(tensor: Tensor) -> NDArray[Any]:
    try:
        array: NDArray[Any] = tensor.detach().cpu().numpy()
    except TypeError:
        raise InputError(f"a module with numbers of {tensor.dtype} cannot be sent to nodes. Use float32.") from None
    return array


def read(tree: Any, array: Read, nested: int) -> nn.Module:
    """The module, for use and not for training; `array` gives what is named."""
    return _read(tree, array, nested).eval()


def _read(tree: Any, array: Read, nested: int) -> nn.Module:
    match tree:
        case {"layer": str(name), "arguments": dict(arguments), "tensors": dict(tensors), "inside": dict(inside)}:
            pass
        case _:
            raise _wrong("a layer is not described by its name, arguments, tensors and what is inside")
    kind = KINDS.get(name)
    if kind is None or len(tree) != 4 or nested < 0:
        raise _wrong("a layer is of no kind that can be sent, or has more to it, or is nested too often")
    if arguments.keys() != {*kind.arguments, *kind.flags}:
        raise _wrong(f"the arguments of its {name} are not {', '.join((*kind.arguments, *kind.flags)) or 'none'}")
    children = {each: _read(child, array, nested - 1) for each, child in inside.items()}
    values = {each: _tensor(tensor, array) for each, tensor in tensors.items()}
    try:
        layer = _made(kind, {each: _tuples(value) for each, value in arguments.items()}, children, values)
        _fill(layer, values)
    except InputError:
        raise
    except Exception:  # of a constructor, whatever its kind
        raise _wrong(f"there is no {name} with the arguments and tensors that were sent") from None
    return layer


def _wrong(what: str) -> InputError:
    return InputError(f"the module that was sent cannot be used: {what}. Ask its sender for one of this version.")


def _tuples(value: Any) -> Any:
    """An argument: a number, a text or nothing, or several of them."""
    if type(value) is list:
        return tuple(_tuples(each) for each in value)
    if value is not None and type(value) not in (bool, int, float, str):
        raise _wrong("an argument of a layer is no number and no text")
    return value


def _tensor(tree: Any, array: Read) -> tuple[Tensor, bool]:
    match tree:
        case {"values": values, "trained": bool(trained), **rest} if not rest:
            return torch.from_numpy(array(values)).clone(), trained
    raise _wrong("a layer's tensor is not described by its values and whether it is trained")


def _made(
    kind: Kind, arguments: dict[str, Any], children: dict[str, nn.Module], values: dict[str, tuple[Tensor, bool]]
) -> nn.Module:
    """The layer without its numbers: on the meta device, which has none, takes no memory and draws nothing."""
    if kind.made is nn.Sequential:
        return nn.Sequential(OrderedDict(children))
    if children.keys() != set(kind.inside):
        raise _wrong(f"what is inside its {kind.made.__name__} is not {', '.join(kind.inside) or 'nothing'}")
    if kind.made is Centred:
        centre = values["centre"][0]
        if centre.ndim != 1 or centre.dtype != torch.float32 or type(arguments["size"]) not in (int, float):
            raise _wrong("a centre is one row of float32, and its size a number")
        return Centred(np.zeros(len(centre)), arguments["size"])
    if kind.made is Images:
        side, other, channels = arguments["shape"]
        if side != other or not all(type(each) is int and each > 0 for each in (side, channels)):
            raise _wrong("images are square")
        return Images(channels, side)
    if kind.made is Adapted:
        return _adapted(**children)
    if kind.made is Leading and type(arguments["columns"]) is not int:
        raise _wrong("columns are counted")
    with torch.device("meta"):
        return kind.made(**children, **arguments)


def _adapted(layer: nn.Module, down: nn.Module, up: nn.Module) -> Adapted:
    """As `neural.models.adapted` makes them: sums of what has other axes could lay rows over each other."""
    for known in (nn.Linear, nn.Conv2d):
        if type(layer) is type(down) is type(up) is known and layer.weight.shape[0] == up.weight.shape[0]:
            return Adapted(layer, down, up)
    raise _wrong("an addition to a layer has the layer's own kind and size")


def _fill(layer: nn.Module, values: dict[str, tuple[Tensor, bool]]) -> None:
    """Put the tensors in the place of those without numbers."""
    empty = _tensors(layer)
    if values.keys() != empty.keys() or any(values[name][0].shape != each.shape for name, each in empty.items()):
        raise _wrong(f"the tensors of its {type(layer).__name__} are not those it is made of")
    for name, (tensor, trained) in values.items():
        if not tensor.is_floating_point():
            raise _wrong(f"the tensors of its {type(layer).__name__} are not of fractions")
        if name in layer._parameters:
            setattr(layer, name, nn.Parameter(tensor, requires_grad=trained))
        elif trained:
            raise _wrong(f"the {name} of its {type(layer).__name__} is a constant")
        else:
            setattr(layer, name, tensor)


def check_split(split: Split, features: int | None) -> None:
    """Refuse parts whose layers do not keep rows of so many features apart, or do not fit each other.

    Every layer of the list makes of a row something that depends on it alone if the first axis of its input is that of
    the rows, and gives as many rows as it takes if it is so of its output. Tried with two numbers of rows, because a
    layer may be made for one of them, and without numbers: shapes do not depend on those.
    """
    if features is not None and split.features != features:
        raise _wrong(f"it is not for rows of {features:,} numbers, which rows have here")
    for rows in (5, 7):
        try:
            middle = _shape(split.representation, (rows, split.features))
            out = _shape(split.head, (rows, split.rank))
        except InputError:
            raise
        except Exception:  # of a layer that gets what it cannot take
            raise _wrong("its layers do not fit each other") from None
        if middle != (rows, split.rank) or out != (rows, split.classes):
            raise _wrong("its parts do not fit each other")


def _shape(part: FlatModule, rows: tuple[int, int]) -> tuple[int, ...]:
    """Of what the part makes of so many rows; refuses layers that make it another number of rows on the way."""

    def keeps_rows(layer: nn.Module, inputs: tuple[Tensor, ...], output: Any) -> None:
        if not isinstance(output, Tensor) or output.ndim < 2 or output.shape[0] != rows[0]:
            raise _wrong(f"its {type(layer).__name__} does not keep rows apart")

    module = part.module
    named = (*module.named_parameters(), *module.named_buffers())
    handles = [layer.register_forward_hook(keeps_rows) for layer in module.modules()]
    try:
        with torch.no_grad():
            empty = {name: torch.empty_like(tensor, device="meta") for name, tensor in named}
            out: Tensor = functional_call(module, empty, (torch.empty(rows, device="meta"),))
    finally:
        for handle in handles:
            handle.remove()
    return tuple(out.shape)
