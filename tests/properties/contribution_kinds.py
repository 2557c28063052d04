"""Contributions of every kind, of numbers of all sizes, with their norms in exact fractions: see test_norm_contracts.

A new kind joins by one line in KINDS, a function that makes contributions of `Numbers`.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from fractions import Fraction
from math import isqrt
from typing import Any

import numpy as np
from hypothesis import strategies as st

from privrep.privacy.bounds import Contributions
from privrep.privacy.columns import NonNegativeColumns, SparseColumns
from privrep.privacy.contributions import (
    BatchTerm,
    Concatenated,
    Counts,
    NonNegative,
    NormAtMost,
    Products,
    Summed,
    Vectors,
)
from privrep.privacy.kronecker import make_kronecker
from privrep.privacy.moments import CrossMoments, RowMoments
from privrep.privacy.similarities import Similarities
from privrep.privacy.sparse_moments import SparseMoments

ODD = (0.0, -0.0, 5e-324, -1e-310, 2.0**-1022, 2.0**-149, 2.0**-126, 2.0**1023, 3e38, np.inf, -np.inf, np.nan)


@dataclass
class Numbers:
    """Arrays of numbers whose exponents are asked for, one after the other; drawn by `wild` and `tame`.

    exponents   of arrays, in order, where nothing else decides them.
    balance     the exponent of the whole contribution, if factors shall make up for each other.
    spread      of exponents within an array.
    odd         the share of zeros, subnormal numbers, infinities and so on.
    """

    seed: int
    dtype: type
    exponents: list[int]
    balance: int | None
    spread: int
    odd: float
    users: int = 1
    given: list[int] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.rng = np.random.default_rng(self.seed)
        self.cancels = self.rng.random() < 0.3

    def factor(self, *shape: int) -> np.ndarray:
        """Return numbers (users, *shape) around the next exponent."""
        self.given.append(self.exponents[len(self.given)])
        return self._draw(self.given[-1], shape)

    def partner(self, *shape: int, power: int = 1) -> np.ndarray:
        """Return numbers that bring products of the earlier ones to the balance, (users, *shape)."""
        if self.balance is None:
            return self.factor(*shape)
        self.given.append(self.balance - power * sum(self.given))
        return self._draw(self.given[-1], shape)

    def scale(self) -> np.ndarray:
        """Return factors of moments, (users,), in float64; negative ones are odd."""
        self.dtype = np.float64
        values = self.partner(power=2)
        return np.where(self.rng.random(self.users) < self.odd, values, np.abs(values))

    def _draw(self, exponent: int, shape: Sequence[int]) -> np.ndarray:
        shape, rng = (self.users, *shape), self.rng
        exponents = exponent + rng.integers(-self.spread, self.spread + 1, shape)
        exponents = np.clip(exponents, -1074, 1023)
        with np.errstate(all="ignore"):
            values = np.ldexp(rng.uniform(1, 2, shape) * rng.choice([-1, 1], shape), exponents)
            return np.where(rng.random(shape) < self.odd, rng.choice(ODD, shape), values).astype(self.dtype)


@dataclass(frozen=True)
class Made:
    """A user's contribution; the square of its exact norm, and the largest norm that may be reported of it."""

    sent: Contributions
    exact: Callable[[], tuple[Fraction, Fraction]] | None = None  # of numbers that are finite


def fractions(values: np.ndarray) -> list[Any]:
    """The numbers of the first user, exactly, in nested lists."""
    return np.vectorize(lambda v: Fraction(float(v)), otypes=[object])(values[0]).tolist() if values.size else []


def root(square: Fraction) -> Fraction:
    """A square root, to more than a hundred digits of a binary number."""
    shift = max(0, 400 - (square.numerator.bit_length() - square.denominator.bit_length())) // 2
    return Fraction(isqrt((square.numerator << 2 * shift) // square.denominator), 1 << shift)


def squares(values: Any) -> Fraction:
    """Sum of squares of numbers in nested lists."""
    return sum((squares(v) for v in values), Fraction(0)) if isinstance(values, list) else values * values


def outer(left: list[Any], right: list[Any]) -> list[list[Fraction]]:
    """Sum over rows of left_r right_r^T."""
    p, q = len(left[0]), len(right[0])
    return [[sum(a[i] * b[j] for a, b in zip(left, right, strict=True)) for j in range(q)] for i in range(p)]


def plain(values: Any) -> tuple[Fraction, Fraction]:
    """Of numbers whose norm is reported as it is."""
    return squares(values), root(squares(values))


def raised(square: Fraction, mass: Fraction, part: int = 64) -> tuple[Fraction, Fraction]:
    """Of terms that may cancel: their norm is reported as no less than a part of their size."""
    return square, max(root(square) + 2 * mass / 10**6, mass / part)


# The kinds


def make_vectors(some: Numbers) -> Made:
    values = some.factor(4)
    return Made(Vectors(values), lambda: plain(fractions(values)))


def make_batch_term(some: Numbers) -> Made:
    values = some.factor(4)
    return Made(BatchTerm(values[0]), lambda: plain(fractions(values)))


def make_non_negative(some: Numbers) -> Made:
    values = some.factor(4)
    values = values if some.odd else np.abs(values)
    return Made(NonNegative(values), lambda: plain(fractions(values)))


def make_counts(some: Numbers) -> Made:
    cells = some.rng.integers(-1, 5, (some.users, 3)) if some.odd else some.rng.permuted(np.arange(5))[None, :3]
    return Made(Counts(cells, 5), lambda: (Fraction(3), root(Fraction(3))))


def make_row_moments(some: Numbers) -> Made:
    rows, scale = some.factor(*(int(n) for n in some.rng.integers(1, 4, 2))), some.scale()

    def exact() -> tuple[Fraction, Fraction]:
        A = fractions(rows)
        return plain([[Fraction(scale[0]) * v for v in row] for row in outer(A, A)])

    return Made(RowMoments(rows, scale), exact)


def make_cross_moments(some: Numbers) -> Made:
    rows = some.factor(*(int(n) for n in some.rng.integers(1, 4, 2)))
    if some.cancels:
        rows[:, -1] = -rows[:, 0]
    scale = some.scale()

    def exact() -> tuple[Fraction, Fraction]:
        A, factor = fractions(rows), Fraction(scale[0])
        s = [sum(column) for column in zip(*A, strict=True)]
        pairs = zip(outer([s], [s]), outer(A, A), strict=True)
        found = [[factor * (a - b) for a, b in zip(one, other, strict=True)] for one, other in pairs]
        return raised(squares(found), factor * (squares(s) + squares(A)))

    return Made(CrossMoments(rows, scale), exact)


def make_products(some: Numbers, shapes: Sequence[tuple[int, int, int]] = ((2, 3, 3), (1, 3, 2))) -> Made:
    """Norms by Gram matrices, as there are few rows."""
    rows, p, q = shapes[some.seed % len(shapes)]
    left = some.factor(rows, p)
    right = some.partner(rows, q)
    if some.odd and rows > 1:  # rows of different sizes in one user, also where their products are alike
        up = np.ldexp(1.0, some.rng.integers(-700, 700, (some.users, rows, 1)))
        with np.errstate(all="ignore"):
            left, right = (left * up).astype(left.dtype), (right / up).astype(right.dtype)
    if some.cancels and rows > 1:
        left[:, -1], right[:, -1] = left[:, 0], -right[:, 0]

    def exact() -> tuple[Fraction, Fraction]:
        a, b = fractions(left), fractions(right)
        mass = sum((root(squares(x) * squares(y)) for x, y in zip(a, b, strict=True)), Fraction(0))
        return raised(squares(outer(a, b)), mass)

    return Made(Products(left, right), exact)


def make_long_products(some: Numbers) -> Made:
    """Norms by the product, as there are many rows."""
    return make_products(some, ((4, 1, 2), (5, 2, 1)))


def make_kroneckers(some: Numbers) -> Made:
    left, right = some.factor(1, 2).astype(np.float64), some.factor(2, 2)
    scale = some.scale()

    def exact() -> tuple[Fraction, Fraction]:
        L, R = fractions(left), fractions(right)
        return plain([root(squares(outer(L, L))) * root(squares(outer(R, R))) * Fraction(scale[0])])

    return Made(make_kronecker(left, right, scale), exact)


def make_sparse(some: Numbers, kind: type[SparseColumns] = SparseColumns) -> Made:
    values, tail = some.factor(2, 2), some.factor(3)
    if not some.odd and kind is NonNegativeColumns:
        values, tail = np.abs(values), np.abs(tail)
    user = np.repeat(np.arange(some.users), 2)
    sent = kind(user, np.tile([2, 0], some.users), values.reshape(-1, 2), tail, 3)
    return Made(sent, lambda: plain([fractions(values), fractions(tail)]))


def make_non_negative_sparse(some: Numbers) -> Made:
    return make_sparse(some, NonNegativeColumns)


def make_sparse_moments(some: Numbers, columns: tuple[int, int] = (2, 17), features: int = 30) -> Made:
    """Two entries of thirty columns: sums go pair by pair."""
    values = some.factor(2)
    user = np.repeat(np.arange(some.users), 2)
    sent = SparseMoments(user, np.tile(columns, some.users), values.ravel(), some.users, features)

    def exact() -> tuple[Fraction, Fraction]:
        x = fractions(values)
        return plain(outer([x], [x]))

    return Made(sent, exact)


def make_dense_moments(some: Numbers) -> Made:
    """Entries in an eighth of all columns or more: sums are matrix products."""
    return make_sparse_moments(some, (0, 2), 3)


def make_concatenated(some: Numbers) -> Made:
    parts = (make_products(some), make_row_moments(some), make_vectors(some))

    def exact() -> tuple[Fraction, Fraction]:
        each = [part.exact() for part in parts if part.exact is not None]
        return sum(square for square, _ in each), root(sum(limit**2 for _, limit in each))

    return Made(Concatenated(tuple(part.sent for part in parts)), exact)


def make_summed(some: Numbers) -> Made:
    """Parts that are the same but for the signs of some: their sum may be short."""
    first, other = some.factor(3), some.factor(3)
    parts = (Vectors(first), Vectors(other), NonNegative(np.abs(first)))

    def exact() -> tuple[Fraction, Fraction]:
        a, b = fractions(first), fractions(other)
        total = [x + y + abs(x) for x, y in zip(a, b, strict=True)]
        return squares(total), 2 * root(squares(a)) + root(squares(b))

    return Made(Summed(parts), exact)


def make_summed_factors(some: Numbers) -> Made:
    rows, scale = some.factor(2, 2), some.scale()
    right = some.partner(2, 2)
    return Made(
        Summed((make_kronecker(rows[:, :, :1], right, scale), RowMoments(rows, scale), CrossMoments(right, scale)))
    )


def make_norm_at_most(some: Numbers) -> Made:
    return Made(NormAtMost(make_products(some).sent, 2.0 ** (some.seed % 99)), lambda: plain([Fraction(1, 2)]))


def make_similarity(some: Numbers) -> Made:
    x, t = some.factor(1, 2), some.factor(1, 2)
    lengths, others = some.partner(1, power=1), some.factor(1)
    if not some.odd:
        lengths, others = np.abs(lengths), np.abs(others)
    turned = some.rng.normal(size=(2, 3)) * [[1.0], [some.rng.choice([0.0, 1e-9, 1e-3, 1.0])]]
    u, v = (turned[:1], turned.sum(axis=0)[None])
    u, v = ((w / np.linalg.norm(w)).astype(some.dtype) for w in (u, v))
    slope = some.factor(1) if some.odd else np.ones((1, 1))

    def exact() -> tuple[Fraction, Fraction]:
        a, b = fractions(u), fractions(v)
        s = sum(p * q for p, q in zip(a, b, strict=True))
        first = squares([q - s * p for p, q in zip(a, b, strict=True)]) * squares(fractions(x)[0])
        second = squares([p - s * q for p, q in zip(a, b, strict=True)]) * squares(fractions(t)[0])
        own, other = (squares(fractions(each)) for each in (lengths, others))
        mass = root(squares(fractions(x)) / own + squares(fractions(t)) / other)
        return raised(first / own + second / other, mass, 15)

    return Made(Similarities(x[0], t[0], u, v, lengths[0], others[0], slope), exact)


KINDS: dict[str, Callable[[Numbers], Made]] = {
    "Vectors": make_vectors,
    "Counts": make_counts,
    "CrossMoments": make_cross_moments,
    "RowMoments": make_row_moments,
    "Products": make_products,
    "Products, many rows": make_long_products,
    "NonNegative": make_non_negative,
    "BatchTerm": make_batch_term,
    "Concatenated": make_concatenated,
    "Summed": make_summed,
    "Summed, of factors": make_summed_factors,
    "NormAtMost": make_norm_at_most,
    "SparseColumns": make_sparse,
    "NonNegativeColumns": make_non_negative_sparse,
    "SparseMoments": make_sparse_moments,
    "SparseMoments, dense": make_dense_moments,
    "Kronecker": make_kroneckers,
    "Similarities": make_similarity,
}


def make(kind: str, some: Numbers) -> Made:
    """Contributions of this kind, made as engines call steps: without warnings of overflow."""
    with np.errstate(all="ignore"):
        return KINDS[kind](some)


@st.composite
def wild(draw: st.DrawFn, dtype: type, users: int = 1) -> Numbers:
    """Numbers of all exponents, and more of sizes whose squares underflow, in contributions that are no shorter."""
    return Numbers(
        draw(st.integers(0, 2**32 - 1)),
        dtype,
        draw(st.lists(st.integers(-1100, 1100) | st.integers(-800, -520), min_size=8, max_size=8)),
        draw(st.none() | st.integers(-390, -20) | st.integers(-450, 550)),
        draw(st.sampled_from([0, 2, 40, 300, 2000])),
        draw(st.sampled_from([1e-9, 0.05, 0.3])),
        users,
    )


@st.composite
def tame(draw: st.DrawFn, dtype: type, users: int = 1) -> Numbers:
    """Numbers from 2^-100 to 2^100."""
    exponents = draw(st.lists(st.integers(-90, 90), min_size=8, max_size=8))
    return Numbers(
        draw(st.integers(0, 2**32 - 1)), dtype, exponents, None, draw(st.sampled_from([0, 2, 10])), 0.0, users
    )
