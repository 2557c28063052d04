"""Public networks that stay as they are: maps from rows to features, computed once.

Nothing here loads PyTorch before a network is applied.
"""

from __future__ import annotations

import hashlib
import math
import os
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Protocol, Self

import numpy as np
from numpy.typing import NDArray

from privrep.errors import InputError, missing_package
from privrep.nn.feature_cache import load_or_compute, make_private_folder
from privrep.typing import Singles

OUTPUTS = ("pooler_output", "image_embeds", "logits")  # names of transformers; the first that is there is taken
_AT_A_TIME = 64  # rows between two reports of progress


class OnProgress(Protocol):
    """A function that is told how many rows are done, of how many."""

    def __call__(self, done: int, rows: int, /) -> None: ...


@dataclass(frozen=True)
class Frozen:
    """A torch module that is public and stays as it is, in evaluation mode, one row at a time.

    Dropout is off, and BatchNorm is a fixed scale and shift by its running statistics. A module of transformers gives
    its pooled output, or else its logits.

    Formal guarantee, if the module's output is a function of its input and its weights were learned from public data
    alone:
    * The features of a row are a function of that row alone, to the last bit.
    * Both conditions are the caller's statement.

    Args:
        module: a torch.nn.Module.
        name: what sentences call it.
        shape: of a row: (numbers,), or (height, width, channels), which the module gets channels first.
        size: how many features it gives; `Frozen.of` finds out.
        cache: a folder in which features are kept, a file for each table of rows. They are as private as the rows:
            their owner alone can read them. Nobody removes them but you.
        on_progress: told how many rows are done.
    """

    module: Any
    name: str
    shape: tuple[int, ...]
    size: int
    cache: str | os.PathLike[str] | None = field(default=None, compare=False)
    on_progress: OnProgress | None = field(default=None, compare=False, repr=False)

    @classmethod
    def of(
        cls,
        module: Any,
        shape: tuple[int, ...],
        *,
        name: str | None = None,
        cache: str | os.PathLike[str] | None = None,
        on_progress: OnProgress | None = None,
    ) -> Self:
        """Return the map of a module, tried on public rows of this shape: see `measure`.

        Args:
            module: a torch.nn.Module.
            shape: of a row: (numbers,), or (height, width, channels).
            name: what sentences call it; None: the name of its class.
            cache: a folder in which features are kept.
            on_progress: told how many rows are done.
        """
        return cls(module, name or type(module).__name__, shape, measure(module, shape), cache, on_progress)

    def __call__(self, rows: NDArray[Any]) -> Singles:
        """Return the features of rows, (rows, size); all of a row with a number that is not finite are NaN.

        Args:
            rows: (rows, numbers).
        """
        wanted = math.prod(self.shape)
        if rows.ndim != 2 or rows.shape[1] != wanted:
            raise InputError(f"{self.name} takes rows of {wanted:,} numbers. Got shape {rows.shape} instead.")
        rows = np.ascontiguousarray(rows, dtype=np.float32)
        if self.cache is None:
            return self._compute(rows)
        folder, of = make_private_folder(self.cache), self._describe_rows(rows)
        path = folder / f"{hashlib.sha256(of.encode()).hexdigest()[:32]}.npz"
        found = load_or_compute(path, of, lambda: self._compute(rows))
        if found.shape != (len(rows), self.size):
            raise InputError(f"{path} has numbers of shape {found.shape}, which are not these features; delete it.")
        return found

    def _compute(self, rows: Singles) -> Singles:
        """Return features, one row at a time on one thread: a row is too little work to share among cores."""
        load_torch()
        from privrep.nn.threads import one_thread

        with one_thread():
            return self._apply_one_by_one(rows)

    def _apply_one_by_one(self, rows: Singles) -> Singles:
        """Return features (rows, size), and report progress."""
        self.module.eval()
        result = np.empty((len(rows), self.size), dtype=np.float32)
        for place, row in enumerate(rows):
            if np.isfinite(row).all():  # others are marked below
                features = _apply(self.module, row, self.shape)
                if features.size != self.size:
                    raise InputError(
                        f"{self.name} must give {self.size:,} features of a row. Got {features.size:,} instead."
                    )
                result[place] = features
            done = place + 1
            if self.on_progress is not None and (done % _AT_A_TIME == 0 or done == len(rows)):
                self.on_progress(done, len(rows))
        return mark_not_finite(result, rows)

    def _describe_rows(self, rows: Singles) -> str:
        """Return a sentence that identifies features, which a cache compares.

        It has hashes of the module's layers and numbers, and of the rows.
        """
        from privrep.nn.flat_module import fingerprint

        layers = "\n".join(f"{n} {type(m).__module__}.{type(m).__qualname__}" for n, m in self.module.named_modules())
        made_of = hashlib.sha256(f"{layers}\n{self.module!r}".encode()).hexdigest()[:32]
        numbers = fingerprint(self.module, trainable=True)
        given = hashlib.sha256(f"{rows.shape} {self.shape}".encode())
        given.update(rows.data)
        return f"{self.size} features by layers {made_of} with numbers {numbers} of rows {given.hexdigest()[:32]}"

    def describe(self) -> str:
        """Return what the map is, for sentences."""
        return f"the {self.size} outputs of {self.name}, frozen"

    def to_json(self) -> dict[str, Any]:
        """Return the map's settings, from which `features.from_json` makes it again with its module."""
        return {"map": "frozen", "name": self.name, "shape": list(self.shape), "size": self.size}


def measure(module: Any, shape: tuple[int, ...], what: str = "module") -> int:
    """Return how many features a frozen module gives; raise InputError if it cannot be a public map of rows.

    It is tried in evaluation mode on public rows, one at a time, as it will be applied. It must take any number, say
    the same of a row twice, and keep nothing of it. That finds mistakes, not intent.

    Args:
        module: a torch.nn.Module.
        shape: of a row, as `Frozen` has it.
        what: the module's name in error sentences.
    """
    torch = load_torch()
    module.eval()
    count = math.prod(shape)
    before = {name: buffer.clone() for name, buffer in module.named_buffers()}
    waves = np.cos(np.arange(count, dtype=np.float32))
    taken = f"rows of {count} numbers" if len(shape) == 1 else f"images of {shape}"
    try:
        first, again = _apply(module, waves, shape), _apply(module, waves, shape)
    except Exception as error:
        raise InputError(f"the {what} cannot take {taken}: {(str(error) or repr(error)).splitlines()[0]}") from None
    try:
        others = [_apply(module, np.full(count, f, np.float32), shape) for f in (0.0, 0.5, 1e30, -1e30)]
    except Exception as error:
        raise InputError(
            f"the {what} fails on some numbers ({(str(error) or repr(error)).splitlines()[0]}), so one user's rows "
            "could stop the fit. Let it take any number: clamp its input first."
        ) from None
    if not first.size or any(other.size != first.size for other in others):
        raise InputError(f"the {what} must give each row equally many numbers, one at least.")
    changed = [name for name, buffer in module.named_buffers() if not torch.equal(buffer, before[name])]
    if changed or not np.array_equal(first, again, equal_nan=True):
        reason = f"its buffer {changed[0]!r} changes" if changed else "it says something else of the same row"
        raise InputError(f"the {what} is not frozen in evaluation mode: {reason}; make it a function of its input.")
    return int(first.size)


def _apply(module: Any, row: Singles, shape: tuple[int, ...]) -> Singles:
    """Return the features of one row, (features,).

    Args:
        module: a torch.nn.Module, in evaluation mode.
        row: (numbers,).
        shape: of the row; images are given channels first.
    """
    torch = load_torch()
    given = np.moveaxis(row.reshape(shape), -1, 0) if len(shape) == 3 else row.reshape(shape)
    with torch.inference_mode():
        found = module(torch.tensor(given)[None])  # in memory of PyTorch's own, always aligned in the same way
        if isinstance(found, Mapping):
            found = next((found[name] for name in OUTPUTS if name in found), None)
        if not isinstance(found, torch.Tensor):
            raise TypeError("it returns no tensor")
        return np.asarray(found.to(torch.float32).numpy(), dtype=np.float32).ravel()


def mark_not_finite(result: Singles, rows: NDArray[Any]) -> Singles:
    """Return the result, with NaN for rows that are not finite, whatever a map would have made of them.

    Args:
        result: features, (rows, size), which are changed in place.
        rows: what they were computed from, (rows, numbers).
    """
    result[~np.isfinite(rows).all(axis=1)] = np.nan
    return result


def load_torch() -> Any:
    """Return the module torch; raise InputError if it is not installed."""
    try:
        import torch
    except ImportError as error:
        raise missing_package("frozen modules need PyTorch", "torch") from error
    return torch
