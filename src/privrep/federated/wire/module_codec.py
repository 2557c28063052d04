"""Torch modules as data: how each layer was made, and its tensors. A list of layers says which can be sent.

Formal guarantee:
* `read_module` makes nothing but layers of the list, which take rows one by one.
* `check_split` sees to it that each layer keeps the first axis, the axis of rows.
* So whatever a sender says, no row changes what is made of another.
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
"""The kinds of layers by the name that travels."""


def write_module(module: nn.Module, write: Write) -> dict[str, Any]:
    """Return a module as a JSON tree; raise InputError if it has a layer that cannot be sent.

    Args:
        module: any torch module.
        write: sends an array, and returns the JSON that names it.
    """
    layers = [layer for _, layer in module.named_modules(remove_duplicate=False)]
    places = [tensor.data_ptr() for layer in layers for tensor in _list_tensors(layer).values() if tensor.numel()]
    if len(set(map(id, layers))) < len(layers) or len(set(places)) < len(places):
        raise InputError(
            "a module with one layer, or weights, in two places cannot be sent to nodes. Give each its own."
        )
    return _write_layer(module, write)


def _list_tensors(layer: nn.Module) -> dict[str, Tensor]:
    """Return the layer's own parameters and buffers, by name."""
    both = (*layer._parameters.items(), *layer._buffers.items())
    return {name: tensor for name, tensor in both if tensor is not None}


def _write_layer(layer: nn.Module, write: Write) -> dict[str, Any]:
    """Return a layer and its children as a JSON tree; raise InputError if its class is not of the list."""
    kind = KINDS.get(type(layer).__name__)
    if kind is None or type(layer) is not kind.made or layer._forward_hooks or layer._forward_pre_hooks:
        raise InputError(
            f"a module with a layer {type(layer).__module__}.{type(layer).__qualname__}, or with hooks, cannot be sent "
            f"to nodes. Make it of {', '.join(KINDS)}."
        )
    arguments: dict[str, Any] = {name: _to_json(getattr(layer, name)) for name in kind.arguments}
    arguments |= {name: getattr(layer, name) is not None for name in kind.flags}
    tensors = {name: (tensor, tensor.requires_grad) for name, tensor in _list_tensors(layer).items()}
    children = dict(layer.named_children())
    twin = _make_layer(kind, {name: _to_tuples(value) for name, value in arguments.items()}, children, tensors)
    if {name: t.shape for name, t in _list_tensors(twin).items()} != {
        name: t.shape for name, (t, _) in tensors.items()
    }:
        raise InputError(f"a {type(layer).__name__} with other weights than its own cannot be sent to nodes.")
    return {
        "layer": type(layer).__name__,
        "arguments": arguments,
        "tensors": {
            name: {"values": write(_to_array(t)), "trained": trained} for name, (t, trained) in tensors.items()
        },
        "inside": {name: _write_layer(child, write) for name, child in children.items()},
    }


def _to_json(value: Any) -> Any:
    """Return an argument as JSON values; raise InputError if it is not finite."""
    if isinstance(value, np.generic):
        value = value.item()
    if isinstance(value, float) and not math.isfinite(value):
        raise InputError(f"a module with {value} for a setting cannot be sent to nodes. Give it a finite number.")
    return [_to_json(each) for each in value] if isinstance(value, tuple | list) else value


def _to_array(tensor: Tensor) -> NDArray[Any]:
    """Return a tensor as an array; raise InputError if NumPy has no numbers of its kind."""
    try:
        array: NDArray[Any] = tensor.detach().cpu().numpy()
    except TypeError:
        raise InputError(f"a module with numbers of {tensor.dtype} cannot be sent to nodes. Use float32.") from None
    return array


def read_module(tree: Any, array: Read, nested: int) -> nn.Module:
    """Return the module that a tree describes, for use and not for training; raise InputError for any other tree.

    Args:
        tree: parsed JSON, as `write_module` wrote it; nothing of it is taken on trust.
        array: returns the array that a piece of JSON names.
        nested: how many layers may lie within each other.
    """
    return _read_layer(tree, array, nested).eval()


def _read_layer(tree: Any, array: Read, nested: int) -> nn.Module:
    """Return the layer that a tree describes, with its children and tensors.

    Args:
        tree: parsed JSON.
        array: returns the array that a piece of JSON names.
        nested: how many layers may lie within this one.
    """
    match tree:
        case {"layer": str(name), "arguments": dict(arguments), "tensors": dict(tensors), "inside": dict(inside)}:
            pass
        case _:
            raise _make_error("a layer is not described by its name, arguments, tensors and what is inside")
    kind = KINDS.get(name)
    if kind is None or len(tree) != 4 or nested < 0:
        raise _make_error("a layer is of no kind that can be sent, or has more to it, or is nested too often")
    if arguments.keys() != {*kind.arguments, *kind.flags}:
        raise _make_error(f"the arguments of its {name} are not {', '.join((*kind.arguments, *kind.flags)) or 'none'}")
    children = {each: _read_layer(child, array, nested - 1) for each, child in inside.items()}
    values = {each: _read_tensor(tensor, array) for each, tensor in tensors.items()}
    try:
        layer = _make_layer(kind, {each: _to_tuples(value) for each, value in arguments.items()}, children, values)
        _fill(layer, values)
    except InputError:
        raise
    except Exception:  # a constructor's, whatever its kind
        raise _make_error(f"there is no {name} with the arguments and tensors that were sent") from None
    return layer


def _make_error(what: str) -> InputError:
    """Return the error that says why a module that was sent cannot be used."""
    return InputError(f"the module that was sent cannot be used: {what}. Ask its sender for one of this version.")


def _to_tuples(value: Any) -> Any:
    """Return an argument as constructors take it: a number, a text, None, or a tuple of them."""
    if type(value) is list:
        return tuple(_to_tuples(each) for each in value)
    if value is not None and type(value) not in (bool, int, float, str):
        raise _make_error("an argument of a layer is no number and no text")
    return value


def _read_tensor(tree: Any, array: Read) -> tuple[Tensor, bool]:
    """Return a tensor and whether it is trained."""
    match tree:
        case {"values": values, "trained": bool(trained), **rest} if not rest:
            return torch.from_numpy(array(values)).clone(), trained
    raise _make_error("a layer's tensor is not described by its values and whether it is trained")


def _make_layer(
    kind: Kind, arguments: dict[str, Any], children: dict[str, nn.Module], values: dict[str, tuple[Tensor, bool]]
) -> nn.Module:
    """Return a layer on the meta device, which has no numbers, takes no memory and draws nothing.

    Args:
        kind: the layer's class, and what it is made of.
        arguments: the constructor's arguments, by name.
        children: the layers within, by name.
        values: the tensors that were sent, by name, and whether each is trained.
    """
    if kind.made is nn.Sequential:
        return nn.Sequential(OrderedDict(children))
    if children.keys() != set(kind.inside):
        raise _make_error(f"what is inside its {kind.made.__name__} is not {', '.join(kind.inside) or 'nothing'}")
    if kind.made is Centred:
        centre = values["centre"][0]
        if centre.ndim != 1 or centre.dtype != torch.float32 or type(arguments["size"]) not in (int, float):
            raise _make_error("a centre is one row of float32, and its size a number")
        return Centred(np.zeros(len(centre)), arguments["size"])
    if kind.made is Images:
        side, other, channels = arguments["shape"]
        if side != other or not all(type(each) is int and each > 0 for each in (side, channels)):
            raise _make_error("images are square")
        return Images(channels, side)
    if kind.made is Adapted:
        return _make_adapted(**children)
    if kind.made is Leading and type(arguments["columns"]) is not int:
        raise _make_error("columns are counted")
    with torch.device("meta"):
        return kind.made(**children, **arguments)


def _make_adapted(layer: nn.Module, down: nn.Module, up: nn.Module) -> Adapted:
    """Return a layer and its addition; raise InputError unless they are as `neural.models.add_adapters` makes them.

    Sums of arrays with other axes could lay rows over each other.
    """
    for known in (nn.Linear, nn.Conv2d):
        if type(layer) is type(down) is type(up) is known and layer.weight.shape[0] == up.weight.shape[0]:
            return Adapted(layer, down, up)
    raise _make_error("an addition to a layer has the layer's own kind and size")


def _fill(layer: nn.Module, values: dict[str, tuple[Tensor, bool]]) -> None:
    """Put the tensors that were sent in the place of the layer's own, which have no numbers."""
    empty = _list_tensors(layer)
    if values.keys() != empty.keys() or any(values[name][0].shape != each.shape for name, each in empty.items()):
        raise _make_error(f"the tensors of its {type(layer).__name__} are not those it is made of")
    for name, (tensor, trained) in values.items():
        if not tensor.is_floating_point():
            raise _make_error(f"the tensors of its {type(layer).__name__} are not of fractions")
        if name in layer._parameters:
            setattr(layer, name, nn.Parameter(tensor, requires_grad=trained))
        elif trained:
            raise _make_error(f"the {name} of its {type(layer).__name__} is a constant")
        else:
            setattr(layer, name, tensor)


def check_split(split: Split, features: int | None) -> None:
    """Raise InputError unless all layers keep rows apart and the parts fit each other.

    A layer of the list computes each row from that row alone if the first axis of its input is the axis of rows. It
    then gives as many rows as it takes. Both are tried with two numbers of rows, because a layer may be made for one of
    them. They are tried without numbers: shapes do not depend on those.

    Args:
        split: the representation and the head.
        features: numbers of a row on this node; None trusts the sender with that.
    """
    if features is not None and split.features != features:
        raise _make_error(f"it is not for rows of {features:,} numbers, which rows have here")
    for rows in (5, 7):
        try:
            middle = _try_shape(split.representation, (rows, split.features))
            out = _try_shape(split.head, (rows, split.rank))
        except InputError:
            raise
        except Exception:  # a layer's that gets what it cannot take
            raise _make_error("its layers do not fit each other") from None
        if middle != (rows, split.rank) or out != (rows, split.classes):
            raise _make_error("its parts do not fit each other")


def _try_shape(part: FlatModule, rows: tuple[int, int]) -> tuple[int, ...]:
    """Return the shape of what a part makes of rows; raise InputError if a layer changes the number of rows on the way.

    Args:
        part: the representation or the head.
        rows: the shape of its input, (rows, numbers).
    """

    def check_rows(layer: nn.Module, inputs: tuple[Tensor, ...], output: Any) -> None:
        """Raise InputError if a layer's output has another number of rows."""
        if not isinstance(output, Tensor) or output.ndim < 2 or output.shape[0] != rows[0]:
            raise _make_error(f"its {type(layer).__name__} does not keep rows apart")

    module = part.module
    named = (*module.named_parameters(), *module.named_buffers())
    handles = [layer.register_forward_hook(check_rows) for layer in module.modules()]
    try:
        with torch.no_grad():
            empty = {name: torch.empty_like(tensor, device="meta") for name, tensor in named}
            out: Tensor = functional_call(module, empty, (torch.empty(rows, device="meta"),))
    finally:
        for handle in handles:
            handle.remove()
    return tuple(out.shape)
