"""PyTorch on the calling thread alone, and copies of modules and rows that threads may have for themselves."""

from __future__ import annotations

import copy
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from numpy.typing import NDArray
from torch import Tensor

from privrep.nn.flat_module import FlatModule

_lock = threading.Lock()


_outside: list[int] = []  # PyTorch's threads outside, once for each thread that is within


class _Within(threading.local):
    yes = False  # this thread is within `one_thread`


_within = _Within()


@contextmanager
def one_thread() -> Iterator[None]:
    """Let PyTorch compute on the calling thread alone within the block.

    Engines have a thread for each core, and sums cut up among threads would round by the number of cores. At the end
    the setting is what it was outside, also for threads that start later.
    """
    if _within.yes:
        yield
        return
    with _lock:
        here = torch.get_num_threads()  # sets this thread up: else it would take what another sets on leaving
        _outside.append(_outside[0] if _outside else here)
        torch.set_num_threads(1)
    _within.yes = True
    try:
        yield
    finally:
        _within.yes = False
        with _lock:
            torch.set_num_threads(_outside.pop())


def own_copy(part: FlatModule) -> FlatModule:
    """Return the part with a module of its own, its tensors shared: threads must not share a module.

    A call of a part swaps weights into its module, where another thread's call would find them. The copy is for one
    call of a step: a module that remembers something must not carry it to the next users.
    """
    module = part.module
    shared: dict[int, Any] = {id(tensor): tensor for tensor in (*module.parameters(), *module.buffers())}
    return FlatModule(copy.deepcopy(module, shared))


def rows_of(X: NDArray[Any]) -> Tensor:
    """Return a float32 copy of rows in PyTorch's own memory.

    Its alignment, by which products may round, is always the same.

    Args:
        X: numbers of any shape, which the copy keeps.
    """
    return torch.tensor(X, dtype=torch.float32)
