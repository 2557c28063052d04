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


_outside: list[int] = []  # how many threads PyTorch had outside, once for each thread that is within


class _Within(threading.local):
    yes = False  # whether this thread is within `one_thread`


_within = _Within()


@contextmanager
def one_thread() -> Iterator[None]:
    """PyTorch computes on the calling thread alone: engines have a thread for each core, and sums cut up among threads
    would round by the number of cores. Restores what was set outside, also for threads that start later."""
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
    """The part with a module of its own, its tensors shared: a call swaps weights in, so threads must not share one."""
    module = part.module
    shared: dict[int, Any] = {id(tensor): tensor for tensor in (*module.parameters(), *module.buffers())}
    return FlatModule(copy.deepcopy(module, shared))


def rows_of(X: NDArray[Any]) -> Tensor:
    """A float32 copy in PyTorch's own memory, whose alignment, by which products may round, is always the same."""
    return torch.tensor(X, dtype=torch.float32)
