"""BLAS on one core, for products that are too small to be shared among several.

Threads of BLAS contend over small matrices: a decomposition of 1,024 x 1,024 takes twice the CPU on two cores, and is
no sooner done. What is computed on one core has the same bits whatever the machine has.
"""

from __future__ import annotations

import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from functools import lru_cache
from typing import Any

from threadpoolctl import ThreadpoolController

_lock = threading.Lock()
_within: set[object] = set()  # blocks that were entered and not left
_limits: list[Any] = []  # what was changed on the way, which is undone when the last block is left


@contextmanager
def one_core() -> Iterator[None]:
    """Keep BLAS on one core within the block. Blocks may be nested, and of several threads at a time."""
    block = object()
    with _lock:
        _within.add(block)
        _limits.append(find_libraries(len(sys.modules)).limit(limits=1, user_api="blas"))
    try:
        yield
    finally:
        with _lock:
            _within.discard(block)
            while _limits and not _within:
                _limits.pop().restore_original_limits()


@lru_cache(maxsize=1)
def find_libraries(modules: int) -> ThreadpoolController:
    """Return the libraries with threads of their own.

    Looking for them takes longer than a small pass. So it is done again only when another number of modules was
    imported.
    """
    return ThreadpoolController()
