"""BLAS on one core: while any block is open, and no longer."""

from __future__ import annotations

from contextlib import ExitStack

import numpy as np
import pytest
from threadpoolctl import threadpool_info, threadpool_limits

from privrep.local.cores import one_core


def threads() -> set[int]:
    """The numbers of threads of all BLAS libraries here."""
    return {library["num_threads"] for library in threadpool_info() if library["user_api"] == "blas"}


def test_blas_has_one_core_until_the_last_block_is_left() -> None:
    """Blocks of several threads may be left in any order."""
    assert np.linalg.eigvalsh(np.eye(2)).sum() == 2
    with threadpool_limits(2, user_api="blas"):
        first, second = ExitStack(), ExitStack()
        first.enter_context(one_core())
        second.enter_context(one_core())
        assert threads() == {1}
        first.close()
        assert threads() == {1}
        second.close()
        assert threads() == {2}


def test_blas_has_its_cores_back_after_an_error() -> None:
    with threadpool_limits(2, user_api="blas"):
        with pytest.raises(ZeroDivisionError), one_core():
            raise ZeroDivisionError
        assert threads() == {2}
