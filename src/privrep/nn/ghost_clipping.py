"""Gradients of many users in one forward and one backward pass, layer by layer, and no gradient per user.

A linear layer's gradient is a sum over rows of (gradient in the output) x (input). So a user's norm follows from the
Gram matrices of the two, and a clipped sum is one matrix product (`Products`). Convolutions, whose weights are few and
whose positions are many, send a vector per user. Rows of different users meet in no sum but that.

A user's numbers are its own to the last bit. A row of a matrix product or convolution of fixed shape depends on that
row alone. Shapes and places are public (see `users.summing`), and PyTorch runs on one thread. What is not finite in one
user's rows stays in them.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn
from torch.nn.grad import conv2d_weight

from privrep.nn.flat_module import FlatModule, Split
from privrep.nn.threads import one_thread, own_copy
from privrep.privacy.bounds import Contributions
from privrep.privacy.contributions import Products, Vectors


def join_groups(part: FlatModule, groups: list[dict[str, tuple[Tensor, ...]]]) -> tuple[Contributions, ...]:
    """Return all users' contributions to each parameter, in the order of the flat weights.

    Args:
        part: the module.
        groups: what `compute_gradients` returned for each group of users, in their order.
    """
    parts: list[Contributions] = []
    for name in part.shapes:
        arrays = [_concatenate(several) for several in zip(*(group[name] for group in groups), strict=True)]
        parts.append(Products(*arrays) if len(arrays) == 2 else Vectors(*arrays))
    return tuple(parts)


def _concatenate(several: tuple[Tensor, ...]) -> NDArray[np.float32]:
    """Return several groups' tensors as one array, (users of all groups, ...)."""
    result: NDArray[np.float32] = (several[0] if len(several) == 1 else torch.cat(several)).numpy()
    return result


def find_layer_name(parameter: str) -> str:
    """Return the name of the layer that has a parameter."""
    return parameter.rpartition(".")[0]


@dataclass(frozen=True, eq=False)
class Captured:
    """The input and the output of a layer in a forward pass."""

    layer: nn.Module
    input: Tensor
    output: Tensor


@contextmanager
def capture(part: FlatModule) -> Iterator[dict[str, list[Captured]]]:
    """Record what layers with trainable weights of their own take and give, by name, once for each call.

    Outputs are marked for differentiation, weights are not: a backward pass then makes no gradient of weights.
    """
    names = dict.fromkeys(find_layer_name(name) for name in part.shapes)
    seen: dict[str, list[Captured]] = {name: [] for name in names}
    kept_apart = any(getattr(layer, "inplace", False) for layer in part.module.modules())

    def keep(name: str) -> Callable[..., Tensor]:
        """Return a hook that records what the layer of this name takes and gives."""

        def hook(layer: nn.Module, inputs: tuple[Tensor, ...], output: Tensor) -> Tensor:
            output = output if output.requires_grad else output.requires_grad_()
            seen[name].append(Captured(layer, inputs[0].detach(), output))
            return output.clone() if kept_apart else output

        return hook

    layers = dict(part.module.named_modules())
    handles = [layers[name].register_forward_hook(keep(name)) for name in names]
    try:
        with torch.enable_grad():
            yield seen
    finally:
        for handle in handles:
            handle.remove()


def compute_gradients(
    part: FlatModule, seen: Mapping[str, list[Captured]], out: Tensor, slope: Tensor, users: int
) -> dict[str, tuple[Tensor, ...]]:
    """Return the gradient of all users in each parameter, by its name.

    A linear layer's weights have the slopes in its outputs, (users, rows, out), and its inputs, (users, rows, in). Any
    other parameter has a vector per user, (users, size).

    Args:
        part: the module.
        seen: what `capture` recorded in the forward pass.
        out: the module's output, (users * rows, size).
        slope: the gradient in that output, of the same shape.
        users: how many users the rows are of, equally many each.
    """
    outward = torch.autograd.grad(out, [calls[0].output for calls in seen.values()], slope)
    found: dict[str, tuple[Tensor, ...]] = {}
    for (name, calls), gradient in zip(seen.items(), outward, strict=True):
        for key, pieces in _differentiate_layer(calls[0], gradient, users).items():
            full = f"{name}.{key}" if name else key
            if full in part.shapes:
                found[full] = pieces()
    return found


def _differentiate_layer(seen: Captured, outward: Tensor, users: int) -> dict[str, Callable[[], tuple[Tensor, ...]]]:
    """Return for each parameter of a layer a function that makes its gradient, as `compute_gradients` has it.

    Args:
        seen: what the layer took and gave.
        outward: the gradient in its output.
        users: how many users the rows are of.
    """
    layer = seen.layer
    if isinstance(layer, nn.Conv2d):
        return {
            "weight": lambda: (_differentiate_kernels(layer, seen.input, outward, users),),
            "bias": lambda: (outward.flatten(2).sum(dim=2).reshape(users, -1, outward.shape[1]).sum(dim=1),),
        }
    inward = seen.input.reshape(users, -1, seen.input.shape[-1])
    outward = outward.reshape(users, -1, outward.shape[-1])
    return {"weight": lambda: (outward, inward), "bias": lambda: (outward.sum(dim=1),)}


def _differentiate_kernels(layer: nn.Conv2d, inward: Tensor, outward: Tensor, users: int) -> Tensor:
    """Return the gradient of each user in a convolution's weights, (users, weights), one user at a time.

    Args:
        layer: the convolution.
        inward: its input, (users * rows, channels, height, width).
        outward: the gradient in its output.
        users: how many users the rows are of.
    """
    window = {"stride": layer.stride, "padding": layer.padding, "dilation": layer.dilation}
    several = zip(inward.chunk(users), outward.chunk(users), strict=True)
    each = [conv2d_weight(x, layer.weight.shape, g, **window).flatten() for x, g in several]  # type: ignore[no-untyped-call]
    return torch.stack(each)


def count_numbers_per_row(split: Split) -> int:
    """Return how many numbers a forward pass holds for each row: its features and the outputs of all layers."""
    part, numbers = own_copy(split.representation), split.features

    def count(layer: nn.Module, inputs: Any, output: Any) -> None:
        nonlocal numbers
        numbers += output.numel() if isinstance(output, Tensor) else 0

    handles = [layer.register_forward_hook(count) for layer in part.module.modules() if not list(layer.children())]
    with torch.no_grad():
        part.module(torch.zeros(1, split.features))
    for handle in handles:
        handle.remove()
    return numbers


def find_obstacle(split: Split) -> str | None:
    """Return why `GradientStep` cannot take a representation, or None if it can; `LocalSgdStep` takes any."""
    return find_layer_obstacle(split.representation, split.features)


@lru_cache(maxsize=8)  # by identity: a part does not change
def find_layer_obstacle(part: FlatModule, features: int) -> str | None:
    """Return why a part's gradients cannot be computed layer by layer, or None if they can.

    Args:
        part: the module.
        features: numbers of a row.
    """
    part = own_copy(part)
    layers = dict(part.module.named_modules())
    for name in part.shapes:
        layer = layers[find_layer_name(name)]
        if not _can_handle(layer):
            return f"layer {find_layer_name(name)!r} is a {type(layer).__name__} with trainable weights"
    uses = [p for layer in layers.values() for p in layer.parameters(recurse=False) if p.requires_grad]
    if len(uses) != len(part.shapes):
        return "two layers have weights in common"
    try:
        with one_thread():
            return _compare_gradients(part, features)
    except (RuntimeError, IndexError, TypeError, ValueError) as error:
        return f"its layers cannot be differentiated one by one: {str(error).splitlines()[0]}"


def _can_handle(layer: nn.Module) -> bool:
    """Return whether `compute_gradients` knows a layer's gradient."""
    if type(layer) is nn.Conv2d:
        return layer.groups == 1 and layer.padding_mode == "zeros" and not isinstance(layer.padding, str)
    return isinstance(layer, nn.Linear) and type(layer).forward is nn.Linear.forward


def _compare_gradients(part: FlatModule, features: int) -> str | None:
    """Return a difference to what automatic differentiation says of the weights, or None if there is none.

    It is sought on public rows, row by row. A layer that sees rows in another order than users have them (positions
    first, as in many transformers) has the right gradient in total. It would have users clipped in each other's place.

    Args:
        part: the module.
        features: numbers of a row.
    """
    for count in (5, 7):  # an inner axis may be as long as one of them, not as both
        rows = torch.cos(torch.arange(float(count * features))).reshape(count, features)
        weights = torch.from_numpy(part.weights())
        with capture(part) as seen:
            out = part(weights, rows)
        often = next((name for name, calls in seen.items() if len(calls) != 1), None)
        if often is not None:
            return f"layer {often!r} is called {len(seen[often])} times for a row"
        slope = torch.sin(torch.arange(float(out.numel()))).reshape(out.shape)
        found = compute_gradients(part, seen, out, slope, count)
        weights.requires_grad_()
        for row in range(count):
            (exact,) = torch.autograd.grad(part(weights, rows), weights, _keep_row(slope, row))
            wrong = _find_difference(part, found, exact, row)
            if wrong is not None:
                return f"the weights {wrong!r} act on more than their layer's output, or see rows in another order"
    return None


def _keep_row(slope: Tensor, row: int) -> Tensor:
    """Return a slope with one row as it is and zeros elsewhere."""
    kept = torch.zeros_like(slope)
    kept[row] = slope[row]
    return kept


def _find_difference(part: FlatModule, found: Mapping[str, tuple[Tensor, ...]], exact: Tensor, row: int) -> str | None:
    """Return the first parameter whose gradient in one row is not what was found, or None.

    Args:
        part: the module.
        found: what `compute_gradients` returned, with a user for each row.
        exact: the gradient of that row by automatic differentiation, (size,).
        row: its place.
    """
    largest = float(exact.abs().max())
    for name, expected in part.unflatten(exact).items():
        first, *second = found[name]
        own = (first[row].mT @ second[0][row] if second else first[row]).reshape(-1)
        if not torch.allclose(own, expected.reshape(-1), rtol=1e-3, atol=1e-4 * largest):
            return name
    return None
