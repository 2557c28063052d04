"""No contribution is longer than its bound, whatever its numbers: every kind, over all exponents, in exact arithmetic.

The first test asks for the bound alone. The second asks that numbers from 2^-100 to 2^100 count in full: clipped, not
dropped. A new kind joins by one line in the table of contribution_kinds.py.
"""

from __future__ import annotations

import ast
from dataclasses import dataclass, fields, replace
from fractions import Fraction
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from contribution_kinds import KINDS, Numbers, make, root, tame, wild
from hypothesis import given, settings
from hypothesis import strategies as st

import privrep
from clipping import STEP, clip_to_numbers
from privrep.privacy.bounds import DIRECTION_ONLY, NORM_SLACK, Bound, Contributions, clip_and_sum
from privrep.privacy.columns import SparseColumns
from privrep.privacy.contributions import Concatenated, NonNegative, NormAtMost, Products, Summed, Vectors
from privrep.privacy.kronecker import make_kronecker
from privrep.privacy.moments import CrossMoments, RowMoments
from privrep.privacy.sparse_moments import SparseMoments

BOUNDS = (2.0**-400, DIRECTION_ONLY, 1.0, 2.0**500)
CLOSE = Fraction(1, 2**19)  # what norms and weights may take of the bound or add to it
NOTHING = Fraction(1, 2**440)  # what `Contributions.norms` may leave out
TYPES = (np.float64, np.float32)
EXAMPLES = 80
LEFT_OUT = {"Contributions": "the protocol that kinds keep"}
ONE_USER_ALONE = ("BatchTerm", "Similarities")  # terms of a batch: there is no company to be in


def measure(total: np.ndarray) -> Fraction:
    """Square of a vector's norm, exactly: in integers, as every number is a multiple of 2^-1074."""
    whole = ((v.numerator << 1074) // v.denominator for v in map(Fraction, total.tolist()))
    return Fraction(sum(v * v for v in whole), 1 << 2148)


def bound_of(sent: Contributions, norm: float) -> Bound:
    """A bound of this norm that fits the contributions."""
    with np.errstate(all="ignore"):
        size = len(sent.grid_sum(np.zeros(len(sent.norms())), STEP))
    return Bound(norm, size, sent.acute, sent.terms_per_user)


def clip(sent: Contributions, norm: float) -> np.ndarray:
    """What the contributions add to a sum under this bound."""
    with np.errstate(all="ignore"):
        return clip_to_numbers(sent, bound_of(sent, norm))


def longest_allowed(sent: Contributions, norm: float) -> Fraction:
    """How long one contribution may be by the guarantee of `privacy.bounds`, squared."""
    bound = bound_of(sent, norm)
    rounding = bound.reach - bound.norm * (1 + NORM_SLACK)
    return (Fraction(norm) * (1 + CLOSE) + Fraction(rounding)) ** 2


def least_allowed(sent: Contributions, norm: float, wanted: Fraction) -> Fraction:
    """How short one of this length may become, clipped and rounded: it is shortened for its rounding, and rounded."""
    bound = bound_of(sent, norm)
    with np.errstate(all="ignore"):
        moved = float(np.max(sent.roundings(norm, bound.step))) + bound.reach - bound.norm
    return max(wanted * (1 - CLOSE) - 2 * Fraction(moved), Fraction(0))


@pytest.mark.parametrize("dtype", TYPES, ids=["f8", "f4"])
@pytest.mark.parametrize("kind", KINDS)
def test_nothing_is_longer_than_its_bound(kind: str, dtype: type) -> None:
    @settings(max_examples=EXAMPLES)
    @given(wild(dtype))
    def holds(some: Numbers) -> None:
        sent = make(kind, some).sent
        for norm in BOUNDS:
            assert measure(clip(sent, norm)) <= longest_allowed(sent, norm)

    assert CLOSE < NORM_SLACK
    holds()


@pytest.mark.parametrize("dtype", TYPES, ids=["f8", "f4"])
@pytest.mark.parametrize("kind", [kind for kind in KINDS if kind != "Summed, of factors"])
def test_ordinary_numbers_count_in_full(kind: str, dtype: type) -> None:
    @settings(max_examples=EXAMPLES // 4)
    @given(tame(dtype))
    def holds(some: Numbers) -> None:
        made = make(kind, some)
        assert made.exact is not None
        exact, longest = made.exact()
        for norm in BOUNDS:
            share = min(Fraction(1), Fraction(norm) / longest) if longest else Fraction(1)
            wanted = least_allowed(made.sent, norm, share * (root(exact) - longest / 2**34))
            assert wanted <= NOTHING or measure(clip(made.sent, norm)) >= wanted**2

    holds()


@pytest.mark.parametrize("dtype", TYPES, ids=["f8", "f4"])
@pytest.mark.parametrize("kind", [kind for kind in KINDS if kind not in ONE_USER_ALONE])
def test_users_with_wild_numbers_change_nobodys_norm(kind: str, dtype: type) -> None:
    """Users stand in one call whose factors are scaled and not scaled. Each one's norm is what it is alone."""

    @settings(max_examples=EXAMPLES // 4)
    @given(wild(dtype, 3), st.integers(0, 2))
    def holds(some: Numbers, user: int) -> None:
        sent = make(kind, some).sent
        with np.errstate(all="ignore"):
            norms, alone = sent.norms(), pick(sent, user).norms()
        assert np.array_equal(norms[user : user + 1], alone, equal_nan=True)

    holds()


@pytest.mark.parametrize("dtype", TYPES, ids=["f8", "f4"])
@pytest.mark.parametrize("kind", [kind for kind in KINDS if kind not in ONE_USER_ALONE])
def test_a_sum_is_what_users_send_alone_to_the_last_bit(kind: str, dtype: type) -> None:
    """So it does not depend on order, blocks or machines."""

    @settings(max_examples=EXAMPLES // 4)
    @given(st.one_of(wild(dtype, 5), tame(dtype, 5)))
    def holds(some: Numbers) -> None:
        sent = make(kind, some).sent
        for norm in BOUNDS:
            bound = bound_of(sent, norm)
            with np.errstate(all="ignore"):
                total = clip_and_sum(sent, bound)
                alone = [clip_and_sum(pick(sent, user), bound) for user in range(some.users)]
            assert np.array_equal(total, np.sum(alone, axis=0))

    holds()


def pick(sent: Any, user: int) -> Any:
    """The same contributions of one user alone."""
    if isinstance(sent, Concatenated | Summed):
        return type(sent)(tuple(pick(part, user) for part in sent.parts))
    if isinstance(sent, NormAtMost):
        return NormAtMost(pick(sent.of, user), sent.than)
    if isinstance(sent, SparseColumns):
        own = sent.user == user
        return type(sent)(sent.user[own] * 0, sent.column[own], sent.values[own], sent.tail[user : user + 1], 3)
    if isinstance(sent, SparseMoments):
        own = sent.user == user
        return SparseMoments(sent.user[own] * 0, sent.column[own], sent.values[own], 1, sent.features)
    taken = {
        each.name: value[user : user + 1] if isinstance(value, np.ndarray) else value
        for each in fields(sent)
        for value in (getattr(sent, each.name),)
    }
    return type(sent)(**taken)


@dataclass(frozen=True)
class Measured(Vectors):
    """Vectors whose norms are what a step says, (users,)."""

    said: np.ndarray

    def norms(self) -> np.ndarray:
        return self.said


# Single cases


@pytest.mark.parametrize("shape", [(2, 3, 3), (5, 2, 1)])
@pytest.mark.parametrize("norm", BOUNDS)
def test_products_of_a_tiny_and_a_huge_factor_are_clipped(norm: float, shape: tuple[int, int, int]) -> None:
    """The squares of 1e-163 are zero; times 1e150 it is 1e-13."""
    rows, p, q = shape
    for small, large in ((1e-163, 1e150), (1e-300, 1e300), (5e-324, 1.7e308), (1e300, 1e-300), (1e-170, 1e-150)):
        sent = Products(np.full((1, rows, p), small), np.full((1, rows, q), large))
        exact = measure(np.array([small])) * measure(np.array([large])) * rows**2 * p * q
        found = measure(clip(sent, norm))
        assert found <= longest_allowed(sent, norm)
        assert least_allowed(sent, norm, min(root(exact), Fraction(norm))) ** 2 <= found or exact < NOTHING**2


@pytest.mark.parametrize("norm", BOUNDS)
def test_rows_of_one_user_are_scaled_one_by_one(norm: float) -> None:
    """Rows whose products are alike count alike, whichever factor is huge. Rows that are absent do not count."""
    left = np.array([1e-300, 1e200, 0.0, 1e300, 3.0])[None, :, None]
    right = np.array([1e300, 1e-200, 1e308, 0.0, 1.0])[None, :, None]
    sent = Products(left, right)
    found, wanted = measure(clip(sent, norm)), min(Fraction(5), Fraction(norm))  # 1 + 1 + 3
    assert least_allowed(sent, norm, wanted) ** 2 <= found <= longest_allowed(sent, norm)
    assert norm >= 5 or least_allowed(sent, norm, wanted) > 0.99 * wanted


@pytest.mark.parametrize("kind", [RowMoments, CrossMoments])
@pytest.mark.parametrize("norm", BOUNDS)
def test_a_huge_scale_of_tiny_rows_is_clipped(norm: float, kind: type) -> None:
    for exponent in range(-535, -200, 7):
        sent = kind(np.full((1, 2, 2), 2.0**exponent), np.array([2.0**1000]))
        exact = Fraction(16) ** (exponent + 501)
        found, least = measure(clip(sent, norm)), least_allowed(sent, norm, min(root(exact), Fraction(norm)))
        assert least**2 <= found <= longest_allowed(sent, norm)
        assert exact < Fraction(norm) ** 2 or least > 0.99 * Fraction(norm)


@pytest.mark.parametrize("scale", [-1.0, -5e-324, np.nan, -np.inf, np.inf])
def test_a_scale_that_is_none_counts_as_zero(scale: float) -> None:
    """Also beside others, where a negative norm would make a sum of norms too short."""
    rows, scales = np.ones((2, 2, 2)), np.array([scale, 1.0])
    for part in (RowMoments(rows, scales), CrossMoments(rows, scales), make_kronecker(rows, rows, scales)):
        with np.errstate(all="ignore"):
            size = len(part.grid_sum(np.zeros(2), STEP))
        for sent in (part, Summed((part, Vectors(np.full((2, size), 9.0)))), Concatenated((part, part))):
            with np.errstate(all="ignore"):
                assert np.isfinite(sent.norms()).tolist() == [False, True]
            assert np.array_equal(clip(sent, 1.0), clip(pick(sent, 1), 1.0))


def test_float32_is_squared_in_float64() -> None:
    tiny = np.full((1, 2), 2.0**-100, np.float32)
    one = np.zeros(1, np.int64)
    for sent in (NonNegative(tiny), SparseColumns(one, one, tiny, np.zeros((1, 0)), 1), Vectors(tiny)):
        assert measure(clip(sent, DIRECTION_ONLY)) == pytest.approx(DIRECTION_ONLY**2, rel=1e-8)


@pytest.mark.parametrize("wrong", [-9.0, -5e-324, -np.inf, np.nan])
def test_a_norm_that_is_none_is_infinite_beside_others(wrong: float) -> None:
    """Raise no other part's bound by it: a negative norm would make a sum of norms too short."""
    values = np.array([[9.0, 0.0], [3.0, 4.0]])
    bad, good = Measured(values, np.array([wrong, 5.0])), Vectors(values)
    assert np.array_equal(clip(bad, 1.0), clip(pick(bad, 1), 1.0))
    for sent in (Summed((bad, good)), Concatenated((bad, good)), Summed((good, Summed((good, bad))))):
        assert np.isposinf(sent.norms()).tolist() == [True, False]
        assert np.array_equal(clip(sent, 1.0), clip(pick(sent, 1), 1.0))


# The order in memory


def turn(sent: Any) -> Any:
    """The same contributions, with numbers in Fortran's order: the first index changes fastest."""
    arrays = {each.name: getattr(sent, each.name) for each in fields(sent)}
    return replace(sent, **{key: np.asfortranarray(each) for key, each in arrays.items() if np.ndim(each) > 1})


def sparse(values: np.ndarray, tail: np.ndarray) -> SparseColumns:
    """One column of each user."""
    users = np.arange(len(values))
    return SparseColumns(users, users * 0, values, tail, 3)


@pytest.mark.parametrize("huge", [False, True], ids=["ordinary company", "wild company"])
@pytest.mark.parametrize("dtype", TYPES, ids=["f8", "f4"])
@pytest.mark.parametrize("kind", [RowMoments, CrossMoments, Products, Vectors, NonNegative, sparse])
def test_the_order_in_memory_changes_no_norm(kind: Any, dtype: type, huge: bool) -> None:
    """Also where somebody else has a scale, or rows, that are brought near one."""
    rng, users = np.random.default_rng(0), 31
    for m, d in ((1, 33), (3, 17), (12, 9), (33, 17), (40, 40)):
        rows, more = rng.normal(size=(2, users, m, d)).astype(dtype)
        scale = np.abs(rng.normal(size=users))
        if huge:
            scale[0], rows[0] = 2.0**70, rows[0] * dtype(2.0**60)
        given = (np.abs(rows[:, 0]),) if kind in (Vectors, NonNegative) else (rows[:, 0], more[:, 0])
        sent = kind(*(given if kind in (Vectors, NonNegative, sparse) else (rows, more if kind is Products else scale)))
        norms, turned = sent.norms(), turn(sent)
        assert np.array_equal(turned.norms(), norms)
        for user in (1, users - 1):
            assert turn(pick(turned, user)).norms() == norms[user]


def on_the_edge(size: int) -> np.ndarray:
    """A vector whose length rounds to below one or not, by the order in which its squares are added up."""
    for seed in range(10_000):
        v = np.random.default_rng(seed).normal(size=size)
        v /= np.linalg.norm(v)
        if (np.sqrt((v * v)[None].sum(axis=1)[0]) < 1) != (np.sqrt(np.add.accumulate(v * v)[-1]) < 1):
            return v
    raise AssertionError("no vector is on the edge")


def test_the_order_in_memory_changes_no_rounded_product() -> None:
    """A factor of a length next to a power of two is brought to another size by a last bit of that length."""
    v, rng = on_the_edge(200), np.random.default_rng(1)
    left, right = (
        np.repeat(v[None, None], 50, axis=0),
        rng.normal(size=(50, 1, 33)) * 2.0 ** rng.integers(-2, 2, (50, 1, 1)),
    )
    plain = Products(left, right)
    bound, counted = Bound(100.0, 200 * 33), np.arange(50) > 0  # nobody is clipped: a weight would hide the edge
    for turned in (turn(plain), Products(left.transpose(2, 1, 0).copy().transpose(2, 1, 0), right)):
        assert np.array_equal(clip_and_sum(turned, bound), clip_and_sum(plain, bound))
        first = clip_and_sum(pick(turned, 0), bound)
        assert np.array_equal(clip_and_sum(turned, bound) - clip_and_sum(turned, bound, counted), first)


# The table


def find_kinds() -> set[str]:
    """Names of the classes in src that have norms or weighted sums, or inherit them."""
    sources = Path(privrep.__file__).parent.rglob("*.py")
    classes = [
        node for path in sources for node in ast.walk(ast.parse(path.read_text())) if isinstance(node, ast.ClassDef)
    ]
    found: set[str] = set()
    while True:
        more = {
            node.name
            for node in classes
            if any(isinstance(part, ast.FunctionDef) and part.name in ("norms", "grid_sum") for part in node.body)
            or any(isinstance(base, ast.Name) and base.id in found for base in node.bases)
        }
        if more == found:
            return found
        found = more


def test_every_kind_is_in_the_table() -> None:
    assert find_kinds() == {name.partition(",")[0] for name in KINDS} | set(LEFT_OUT)
    for name in KINDS:
        some = Numbers(1, np.float64, [0] * 8, None, 0, 0.0)
        assert type(make(name, some).sent).__name__ == name.partition(",")[0]
