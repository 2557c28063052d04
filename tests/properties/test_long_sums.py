"""Norms of long contributions: a function of the user alone, to the bit, and never too small, even next to overflow."""

from __future__ import annotations

from fractions import Fraction

import numpy as np
import pytest

from clipping import add_up, clip_to_numbers
from privrep.privacy.bounds import Bound
from privrep.privacy.columns import SparseColumns
from privrep.privacy.contributions import NonNegative, Vectors
from privrep.privacy.kronecker import make_kronecker
from privrep.privacy.moments import CrossMoments, RowMoments

KINDS = {
    "vectors": lambda v: Vectors(v.reshape(len(v), -1)),
    "float32 vectors": lambda v: Vectors(v.reshape(len(v), -1).astype(np.float32)),
    "non-negative": lambda v: NonNegative(np.abs(v).reshape(len(v), -1)),
    "tail": lambda v: SparseColumns(np.arange(len(v)), np.zeros(len(v), int), v[:, 0, :1], v.reshape(len(v), -1), 1),
    "row moments": lambda v: RowMoments(v, np.ones(len(v))),
    "cross moments": lambda v: CrossMoments(v, np.ones(len(v))),
    "one long row": lambda v: CrossMoments(v.reshape(len(v), 1, -1)[:, :, :200], np.ones(len(v))),
    "kronecker": lambda v: make_kronecker(v[:, :3, :2], v, np.ones(len(v))),
}


@pytest.mark.parametrize("shape", [(100, 100), (95, 91), (1, 9000), (5600, 2), (3, 4000)])
@pytest.mark.parametrize("kind", KINDS)
def test_norms_do_not_depend_on_the_others(kind, shape):
    if kind in ("row moments", "cross moments", "kronecker") and max(shape) > 5600:
        pytest.skip("a matrix of this size has too many entries for a test")
    rng = np.random.default_rng([*shape, len(kind)])
    values = rng.normal(size=(5, *shape))
    together = KINDS[kind](values).norms()
    for user in range(5):
        assert KINDS[kind](values[user : user + 1]).norms()[0] == together[user]
        if user < 4:
            assert KINDS[kind](values[user : user + 2]).norms()[0] == together[user]


def exact_norm(rows):
    """Of s s^T - A^T A, in exact arithmetic."""
    A = [[Fraction(float(x)) for x in row] for row in rows]
    d = len(A[0])
    s = [sum(row[a] for row in A) for a in range(d)]
    entries = [s[a] * s[b] - sum(row[a] * row[b] for row in A) for a in range(d) for b in range(d)]
    return sum(entry * entry for entry in entries)


@pytest.mark.parametrize("exponent", [*range(244, 262), -400, -300, -262, -200, 0, 100])
def test_cross_moments_near_overflow_are_clipped_or_dropped(exponent):
    """Some terms of the norm overflow before others: what is left of it must not pass for the norm."""
    rng = np.random.default_rng(exponent + 1000)
    bound = Bound(2.0**-120, 4)
    for _ in range(40):
        rows = np.zeros((1, 2, 2))
        rows[0, :, 1] = rng.uniform(0.3, 3.0, 2) * 2.0**exponent * rng.choice([-1, 1], 2)
        rows[0, :, 0] = rng.choice([0.0, 1e-3]) * rng.normal(size=2) * 2.0**exponent
        with np.errstate(all="ignore"):
            contribution = CrossMoments(rows, np.ones(1))
            reported = contribution.norms()[0]
            total = clip_to_numbers(contribution, bound)
        assert np.linalg.norm(total) <= bound.reach
        if np.isfinite(reported) and reported > 0:
            assert Fraction(float(reported)) ** 2 * Fraction(1 + 10**-9) >= exact_norm(rows[0]) or reported < bound.norm


def test_the_test_would_see_a_norm_that_is_too_small():
    rows = np.array([[[1.0, 2.0], [3.0, -1.0]]])
    reported = CrossMoments(rows, np.ones(1)).norms()[0]
    assert Fraction(float(reported / 1.01)) ** 2 < exact_norm(rows[0])
    assert np.linalg.norm(add_up(CrossMoments(rows, np.ones(1)), np.ones(1))) <= reported
