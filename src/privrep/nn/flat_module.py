"""A network in two parts: a representation that all users share, and a head of which everyone has one of their own.

Public weights travel as one flat float32 vector: the trainable parameters of a module, in the module's own order. What
has `requires_grad=False` is frozen: public, part of the module, in no release. So adapters on a frozen module, or a
layer on top of a public feature map, are ordinary modules.

Fingerprints are hashes by which a run or a model folder knows the modules it was made with.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.func import functional_call

from privrep.errors import InputError
from privrep.typing import Singles

_Normalisation = nn.modules.batchnorm._NormBase
_Drop = nn.modules.dropout._DropoutNd
MANY_WEIGHTS = 1 << 19  # a module with more is tried on few rows


@dataclass(frozen=True, eq=False)
class FlatModule:
    """A module as a function of its flat trainable weights."""

    module: nn.Module

    @cached_property
    def shapes(self) -> dict[str, torch.Size]:
        """Return the shape of each trainable parameter, by name, in the order of the flat weights."""
        return {name: p.shape for name, p in self.module.named_parameters() if p.requires_grad}

    @cached_property
    def size(self) -> int:
        """Return how many trainable weights there are."""
        return sum(math.prod(shape) for shape in self.shapes.values())

    def weights(self) -> Singles:
        """Return a copy of the module's own weights, as they are now, (size,)."""
        flat = [p.detach().reshape(-1) for p in self.module.parameters() if p.requires_grad]
        return np.asarray(torch.cat(flat).numpy() if flat else np.zeros(0), dtype=np.float32).copy()

    def unflatten(self, flat: Tensor) -> dict[str, Tensor]:
        """Return the parameters by name, as views of flat weights.

        Args:
            flat: (size,), or (users, size); then parameters have the leading dimension of users, too.
        """
        ends = np.cumsum([math.prod(shape) for shape in self.shapes.values()]).tolist()
        pieces = torch.tensor_split(flat, ends[:-1], dim=-1) if self.shapes else ()
        return {
            name: piece.reshape(*flat.shape[:-1], *shape)
            for (name, shape), piece in zip(self.shapes.items(), pieces, strict=True)
        }

    def __call__(self, flat: Tensor, rows: Tensor) -> Tensor:
        """Return the module's output for these rows, with these weights.

        Args:
            flat: (size,).
            rows: (rows, features).
        """
        result: Tensor = functional_call(self.module, self.unflatten(flat), (rows,))
        return result

    def load(self, flat: Singles) -> None:
        """Put weights, (size,), into the module itself."""
        named = self.unflatten(torch.from_numpy(np.ascontiguousarray(flat, dtype=np.float32)))
        with torch.no_grad():
            for name, parameter in self.module.named_parameters():
                if name in named:
                    parameter.copy_(named[name])


@dataclass(frozen=True, eq=False)
class Split:
    """Two parts that fit each other, a representation and a head: rows (r, features) -> (r, rank) -> (r, classes)."""

    representation: FlatModule
    head: FlatModule
    features: int
    rank: int
    classes: int


def split(representation: nn.Module, head: nn.Module, features: int) -> Split:
    """Return both modules as one network; raise InputError if a layer mixes users, or sizes do not fit.

    Args:
        representation: takes rows of `features` numbers.
        head: takes what the representation gives.
        features: numbers of a row.
    """
    return with_head(representation, head, try_representation(representation, features), features)


def try_representation(representation: nn.Module, features: int) -> Tensor:
    """Return what a module that may be trained makes of two public rows; raise InputError if it may not."""
    check_module(representation, "representation")
    representation.eval()
    rows = torch.cos(torch.arange(2.0 * features)).reshape(2, features)  # public, and of no special kind
    middle = try_module(representation, rows, "representation", f"rows of {features} numbers")
    if middle.ndim != 2:
        raise InputError(
            f"the representation must give each row a vector. Got an output of shape {tuple(middle.shape)} for 2 rows "
            "instead; end it with nn.Flatten()."
        )
    return middle


def with_head(representation: nn.Module, head: nn.Module, middle: Tensor, features: int) -> Split:
    """Return both modules as one network; raise InputError if the head does not fit.

    Args:
        representation: a module that was checked.
        head: any module.
        middle: what `try_representation` returned, (2, rank).
        features: numbers of a row.
    """
    check_module(head, "head")
    head.eval()
    out = try_module(head, middle.detach(), "head", f"representations of {middle.shape[1]} numbers")
    if out.ndim != 2 or out.shape[1] < 2:
        raise InputError(f"the head must give each row a score for each class. Got shape {tuple(out.shape)} instead.")
    if not FlatModule(head).size:
        raise InputError("the head has no trainable parameters, so nobody could have one of their own.")
    return Split(FlatModule(representation), FlatModule(head), features, int(middle.shape[1]), int(out.shape[1]))


def try_module(module: nn.Module, rows: Tensor, what: str, given: str) -> Tensor:
    """Return what a module makes of public rows; raise InputError if it cannot keep users apart.

    It must give one output for each row, take any number, compute every row by itself and change none of its buffers.

    Args:
        module: in evaluation mode.
        rows: public, (rows, numbers).
        what: the module's name in error sentences.
        given: the rows' name there.
    """
    before = {name: buffer.clone() for name, buffer in module.named_buffers()}
    try:
        with torch.no_grad():
            result: Tensor = module(rows)
    except (RuntimeError, ValueError, IndexError, TypeError) as error:
        raise InputError(f"the {what} cannot take {given}: {str(error).splitlines()[0]}") from None
    if not isinstance(result, Tensor) or not result.shape or result.shape[0] != rows.shape[0]:
        raise InputError(f"the {what} must give one output for each row; it mixes rows or returns no tensor.")
    try:
        mixes = _mixes(module, rows[0])
    except Exception as error:
        raise InputError(
            f"the {what} fails on some numbers ({str(error).splitlines()[0]}), so one user's rows could stop the fit. "
            "Let it take any number: clamp its input first."
        ) from None
    if mixes:
        raise InputError(
            f"the {what} mixes rows: what it makes of one changes with another, so users would not be apart. Let every "
            "row be computed by itself."
        )
    for name, buffer in module.named_buffers():
        if not torch.equal(buffer, before[name]):
            raise InputError(
                f"the {what}'s buffer {name!r} changes when rows pass through: it would carry one user's data to the "
                "next. Remove it, or make it a constant."
            )
    return result


def _mixes(module: nn.Module, row: Tensor) -> bool:
    """Return whether what the module makes of a row changes with the other rows.

    The row is tried at both ends of a few rows, and of more of them where that is quick. This finds mistakes, not
    intent: that a module takes rows one by one is its owner's statement.

    Other rows hold numbers of every size, and none at all. A sum, a mean, a smallest or largest number of all rows
    takes one of these.

    Args:
        module: in evaluation mode.
        row: public, (numbers,).
    """
    small = sum(parameter.numel() for parameter in module.parameters()) < MANY_WEIGHTS
    waves = torch.sin(torch.arange(1.0, 1.0 + len(row)))
    for count in (2, 5, 67) if small else (2, 5):
        for place in (0, count - 1):
            outputs = []
            for filling in (waves, *(torch.tensor(f) for f in (0.5, 0.0, 1e30, -1e30, float("nan")))):
                rows = filling.expand(count, len(row)).clone()
                rows[place] = row
                with torch.no_grad():
                    outputs.append(module(rows)[place])
            if not all(torch.equal(outputs[0], other) for other in outputs[1:]):
                return True
    return False


def check_module(module: nn.Module, what: str) -> None:
    """Raise InputError for layers that mix rows of different users, keep something of them, or draw random numbers."""
    for name, layer in module.named_modules():
        reason = _find_reason(layer)
        if reason is not None:
            kind = type(layer).__name__
            raise InputError(f"the {what}'s layer {name or '(itself)'!r} is a {kind}: {reason}")


def _find_reason(layer: nn.Module) -> str | None:
    """Return why a layer cannot be part of a network here, or None if it can."""
    checks: list[tuple[Callable[[Any], bool], str]] = [
        (
            lambda m: isinstance(m, _Normalisation) and not isinstance(m, nn.modules.instancenorm._InstanceNorm),
            "it averages over the rows of several users and remembers them. Use nn.GroupNorm or nn.LayerNorm instead.",
        ),
        (
            lambda m: isinstance(m, nn.modules.instancenorm._InstanceNorm) and m.track_running_stats,
            "it remembers averages over users. Use nn.InstanceNorm with track_running_stats=False, or nn.GroupNorm.",
        ),
        (
            lambda m: isinstance(m, _Drop) and m.p > 0,
            "it draws random numbers, which are drawn in one place here. Remove it, or set p=0.",
        ),
        (
            lambda m: isinstance(m, nn.RReLU),
            "it draws random numbers, which are drawn in one place here. Use nn.LeakyReLU instead.",
        ),
    ]
    return next((reason for applies, reason in checks if applies(layer)), None)


def fingerprints(module: nn.Module) -> dict[str, str]:
    """Return the hash of all numbers of a module, and the hash of its frozen ones."""
    return {"all": fingerprint(module, trainable=True), "frozen": fingerprint(module, trainable=False)}


def fingerprint(module: nn.Module, *, trainable: bool) -> str:
    """Return a hash of a module's names, sizes and numbers.

    Args:
        module: any module.
        trainable: whether the numbers of trainable parameters count, too.
    """
    found = hashlib.sha256()
    frozen = {name for name, parameter in module.named_parameters() if not parameter.requires_grad}
    frozen |= {name for name, _ in module.named_buffers()}
    for name, tensor in (*module.named_parameters(), *module.named_buffers()):
        found.update(f"{name} {tuple(tensor.shape)} {tensor.dtype} {name in frozen}\n".encode())
        if trainable or name in frozen:
            found.update(tensor.detach().contiguous().numpy().tobytes())
    return found.hexdigest()[:32]
