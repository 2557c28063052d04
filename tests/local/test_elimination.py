"""Systems of many users: both ways to solve them against NumPy's, and users apart from each other."""

from __future__ import annotations

import numpy as np
import pytest

from privrep.local import elimination
from privrep.local.elimination import Systems, eliminate


def systems_of(A: np.ndarray) -> Systems:
    """Return the systems A, (n, n, outputs, users)."""
    return eliminate(len(A), A.shape[2:], lambda a: A[a, a:])


def positive(n: int) -> np.ndarray:
    rng = np.random.default_rng(n)
    root = rng.normal(size=(2, 7, n, n + 3))
    return np.ascontiguousarray((root @ root.transpose(0, 1, 3, 2) + np.eye(n)).transpose(2, 3, 0, 1))


@pytest.mark.parametrize("n", [1, 2, 5, elimination.MANY, elimination.MANY + 1])
def test_what_is_read_off_inverses(n: int) -> None:
    A, right = positive(n), np.random.default_rng(0).normal(size=(n, 2, 7))
    systems, inverse = systems_of(A), np.linalg.inv(A.transpose(2, 3, 0, 1))
    solved = np.einsum("ouab,bou->aou", inverse, right)
    assert systems.solve(right) == pytest.approx(solved)
    assert systems.quadratic_forms(right) == pytest.approx((right * solved).sum(axis=0))
    assert systems.inverse_diagonal() == pytest.approx(np.einsum("ouaa->aou", inverse))


@pytest.mark.parametrize("n", [3, 20, elimination.MANY + 1])
def test_a_user_is_the_same_in_any_company_and_spoils_no_other(n: int) -> None:
    A, right = positive(n), np.random.default_rng(1).normal(size=(n, 2, 7))
    whole = systems_of(A).solve(right)
    assert np.array_equal(systems_of(A[..., 3:4]).solve(right[..., 3:4])[..., 0], whole[..., 3])
    A[..., 0] = np.nan
    with np.errstate(all="ignore"):
        found = systems_of(A).solve(right)
    assert np.isnan(found[..., 0]).any()
    assert np.array_equal(found[..., 1:], whole[..., 1:])
