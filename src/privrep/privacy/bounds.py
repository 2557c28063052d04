"""Clipping, the one place where it happens, and the guarantee of a sum of clipped contributions.

Formal guarantee of sums. Let c_i be the contributions of the users of a population, and C the bound. Let s be the step
of its grid (`privacy.grid`), and r how far rounding moves a vector of the bound's size. Let users be cut into blocks in
any way, and let the results of `clip_and_sum` over the blocks be added up.
* The result is sum_i q_i s, exactly. q_i is a vector of integers, a function of user i's contribution alone.
* ||q_i s|| <= R = (1 + 2^-18) C + r for every user. Let L be the length that user i is clipped to. A weighted
  contribution is at most (1 + 2^-19) L long: norms are no smaller than 1 - 2^-20 of the exact ones, but for 2^-440, and
  C is no smaller than 2^-400. Rounding moves it by at most e_i + 2^-20 C, by the contract of `Contributions.roundings`.
  L is chosen so that L + e_i <= C + r.
* All of it holds whatever the data: any numbers of float32 or float64, zeros, subnormal, infinite or NaN, however
  unequal within a user, and for any number of users.
* A user whose contribution is not finite counts as the zero vector. So does one that is out of the range of its kind,
  which is stated there, or is longer than 2^1000 C.
* Hence the L2 sensitivity of the sum is
      R           when one user is added or removed,
      2 R         when one user's rows are replaced, or
      sqrt(2) R   when they are replaced and the bound is `acute`.
* Acute means that any two possible contributions have a non-negative inner product, as counts and positive
  semi-definite matrices do. Then |a - b|^2 <= |a|^2 + |b|^2. Rounded contributions are acute as well, or their kind
  counts sqrt(2) times their rounding as e, the same for all users: |a' - b'| <= sqrt(2) L + 2 e / sqrt(2), which is
  sqrt(2) (L + e).

Formal guarantee of functions of a whole batch of users. Such a function is a sum of terms, one term or a term for every
pair of rows. Terms are clipped instead of users. Let T be the `terms_per_user` of the bound.
* Terms that one user can change add up to at most T times C. One term counts once, or as often as C as it may be long.
* Each of them changes by at most twice its length.
* The sum of all terms is rounded, not each of them. Before that it is within 3/8 BATCH_SLACK * C of the exact one. So
  the sensitivity is (1 + BATCH_SLACK) * 2 * T * C + 2 r, whichever the relation.

Formal guarantee of losses (`LossBound`), which are bounded in each entry instead.
* Every entry of a user's vector is brought into [0, 1] and rounded to a multiple of 1/LEVELS.
* A user with an entry that is not finite counts as all zeros.
* Sums are counted in levels: integers of at most MAX_USERS * LEVELS = 2^60, added up exactly, in any order and in any
  blocks.
* So replacing a user moves each entry of the sum by a number in [-LEVELS, LEVELS]. Adding one moves all of them by
  numbers in [0, LEVELS]. There is no slack.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any, ClassVar, Protocol

import numpy as np
from numpy.typing import NDArray

from privrep.errors import InputError
from privrep.privacy.events import Relation
from privrep.privacy.grid import grid_step, measure_rounding
from privrep.typing import Array, Integers

NORM_SLACK = 2.0**-18  # of a clipped contribution: what norms may be too small by, and rounding of the weights
BATCH_SLACK = 2.0**-9  # of a function of a whole batch, whose terms float64 adds up
MAX_USERS = 2**40  # of one sum, more than any machine holds: levels of their losses fit 60 bits
MAX_TERMS = 2**23  # of a function of a whole batch; the analysis of its rounding rests on it
MAX_SIZE = 2**28  # coordinates of one release; the analysis of the noise rests on it
MAX_ROWS_PER_SUM = 8192  # rows that one matrix product adds up
LEVELS = 2**20  # of a loss in [0, 1]
DIRECTION_ONLY = 2.0**-120  # a bound below every norm that matters: it leaves of a contribution its direction alone


class Contributions(Protocol):
    """Contributions of a group of users, in factored form: no full vector per user unless that is the cheapest form.

    * `acute`: any two users' possible contributions have a non-negative inner product.
    * `terms_per_user`: None for contributions of users one by one. For terms of a function of the whole batch, the
      number of terms that one user can change.
    * `rows_per_user`: the number of rows of each user for which those terms were counted. None where it does not
      matter.
    """

    @property
    def acute(self) -> bool: ...

    @property
    def terms_per_user(self) -> float | None: ...

    @property
    def rows_per_user(self) -> int | None: ...

    def norms(self) -> Array:
        """Return float64 upper bounds of the exact L2 norms, (contributions,).

        A norm may be too small by 2^-20 of itself and by 2^-440, whatever the numbers. It is infinite, NaN or negative
        for a contribution that shall count as zero.
        """
        ...

    def roundings(self, norm: float, step: float) -> Array | float:
        """Return how far rounding may move each contribution, (contributions,) or one number for all.

        That is an upper bound of ||q_i step - w_i c_i|| for all weights with w_i norms_i <= norm, where q_i is what
        `grid_sum` adds of contribution i. An acute kind whose rounded contributions need not be acute returns sqrt(2)
        times that, as one public number for all users. It may be too small by 2^-20 of `norm`, for what float64 does
        before anything is rounded. Terms of a function of the whole batch are not rounded one by one: for them it is
        zero.
        """
        ...

    def grid_sum(self, weights: Array, step: float) -> Integers:
        """Return sum_i q_i, (size,), where q_i is w_i c_i in whole steps of the grid, for weights (contributions,).

        Contributions of weight zero are skipped even where their numbers are not finite. q_i depends on contribution i
        and its weight alone, to the last bit. Of a function of the whole batch it is the rounded sum of all terms. Its
        error before it is rounded is at most 2^-34 * sum_i w_i * norms_i, and 2^-440 a term.
        """
        ...


class UserContributions:
    """Base of contributions of users one by one: they are no terms of a function of the whole batch."""

    terms_per_user: ClassVar[float | None] = None
    rows_per_user: ClassVar[int | None] = None


@dataclass(frozen=True)
class Losses:
    """Losses of users by each candidate, (users, candidates), meant to lie in [0, 1]: a choice adds them up."""

    rows_per_user: ClassVar[int | None] = None
    values: NDArray[Any]


@dataclass(frozen=True)
class Bound:
    """The clipping that an algorithm asks of an engine: this statistic, to `norm`, the same for every user.

    An algorithm cannot assert that a norm is small. `acute` asks for contributions of a kind that is acute by
    construction. The engine refuses any other kind. `terms_per_user` asks for a function of the whole batch, of whose
    terms one user changes at most this many.
    """

    norm: float
    size: int  # length of the vector that is summed: a public fact of the question
    acute: bool = False
    terms_per_user: float | None = None

    def __post_init__(self) -> None:
        if not (self.norm > 0 and math.isfinite(self.norm)):
            raise InputError(f"a clipping bound must be positive and finite. Got {self.norm} instead.")
        if not 2.0**-400 <= self.norm <= 2.0**500:  # beyond, squares under- or overflow and norms cannot be trusted
            raise InputError(f"a clipping bound must lie between 2^-400 and 2^500. Got {self.norm} instead.")
        terms = self.terms_per_user
        if terms is not None and (self.acute or not 1 <= terms <= MAX_TERMS):
            raise InputError(
                f"a function of a whole batch is not acute, and one user touches 1 to {MAX_TERMS:,} of its terms. Got "
                f"acute {self.acute} and {terms} instead."
            )
        if not 1 <= self.size <= MAX_SIZE:
            raise InputError(f"one release has between 1 and {MAX_SIZE:,} coordinates. Got {self.size:,} instead.")

    @property
    def step(self) -> float:
        """Return the step of the grid that sums and releases are on."""
        return grid_step(self.norm)

    @property
    def reach(self) -> float:
        """Return how far one user can move a sum by being in it: R of the module's guarantee."""
        return self.norm * (1 + NORM_SLACK) + measure_rounding(self.size, self.step)

    def sensitivity(self, relation: Relation) -> float:
        """Return the L2 sensitivity of a sum of contributions clipped to this bound, by the module's guarantee."""
        if self.terms_per_user is not None:
            moved = 2.0 * self.terms_per_user * self.norm * (1 + BATCH_SLACK)
            return moved + 2 * measure_rounding(self.size, self.step)
        replaced = math.sqrt(2.0) if self.acute else 2.0
        return self.reach * (1.0 if relation == "add-or-remove-one-user" else replaced)


@dataclass(frozen=True)
class LossBound:
    """The bound that the exponential mechanism asks of an engine: a loss in [0, 1] of every candidate."""

    terms_per_user: ClassVar[float | None] = None
    size: int  # candidates: a public fact of the question

    def __post_init__(self) -> None:
        if not 1 <= self.size <= MAX_SIZE:
            raise InputError(f"one choice has between 1 and {MAX_SIZE:,} candidates. Got {self.size:,} instead.")

    def sensitivity(self, relation: Relation) -> float:
        """Return the range over candidates, in levels, of the difference between totals of two neighbours.

        `privacy.exponential` scales its mechanism by this range.
        """
        return float(LEVELS if relation == "add-or-remove-one-user" else 2 * LEVELS)

    @property
    def step(self) -> float:
        """Return one level of a loss."""
        return 1 / LEVELS


@dataclass(frozen=True)
class BoundedSum:
    """A total with its proven bound. Only engines make one (tests/test_architecture.py holds them to it).

    `total` counts steps of the bound, (size,): int64, or Python's integers where users are very many.
    """

    total: NDArray[np.int64] | NDArray[np.object_]
    bound: Bound | LossBound

    @property
    def exact_numbers(self) -> Array:
        """Return the total as numbers, (size,), which nobody may publish. Releases are made of the integers."""
        return self.total.astype(np.float64) * self.bound.step

    def sensitivity(self, relation: Relation) -> float:
        """Return how far the computed totals of two neighbouring populations may be apart, as the bound measures it."""
        return self.bound.sensitivity(relation)


def clip_and_sum(
    contributions: Contributions | Losses,
    bound: Bound | LossBound,
    counted: NDArray[np.bool_] | None = None,
    users: int | None = None,
) -> Integers:
    """Return what a group of users adds to a sum under this bound, in its steps, (size,): see the module's guarantee.

    Args:
        contributions: of the users of the group, or the terms of a batch.
        bound: to clip to.
        counted: (contributions,), a mask of the users who count. The others' contributions are not looked at. None
            counts all.
        users: number of users who were asked. Another number of contributions is an error: a user who sent two would be
            clipped twice.
    """
    if isinstance(bound, LossBound):
        if not isinstance(contributions, Losses):
            raise InputError(f"a choice asks for Losses. The local step sent {type(contributions).__name__} instead.")
        values = contributions.values
        _check_users(len(values), users)
        return _clip_losses(values if counted is None else values[counted], bound)
    if isinstance(contributions, Losses):
        raise InputError("Losses are for choices. Send another kind of contributions where a sum is asked for.")
    return _clip_vectors(contributions, bound, counted, users)


def _check_users(sent: int, users: int | None) -> None:
    """Raise InputError unless as many contributions came as users were asked; None skips the check."""
    if users is not None and sent != users:
        raise InputError(f"a local step sent {sent:,} contributions of {users:,} users; it must send one of each.")


def _clip_losses(values: NDArray[Any], bound: LossBound) -> Integers:
    """Return losses (users, candidates), clipped to [0, 1], in levels, summed over users: (candidates,).

    Users with a loss that is not finite count as all zeros.
    """
    if values.ndim != 2 or values.shape[1] != bound.size:
        raise InputError(f"a local step sent losses of shape {values.shape} where (users, {bound.size}) was asked for.")
    if values.dtype != np.float32:
        values = values.astype(np.float64, copy=False)
    if not np.isfinite(values.sum()):
        values = np.where(np.isfinite(values).all(axis=1)[:, None], values, values.dtype.type(0))
    levels = np.clip(values, 0, 1)
    levels *= LEVELS
    np.rint(levels, out=levels)  # at most 2^20: exact in either type, as is the product
    return levels.sum(axis=0, dtype=np.float64).astype(np.int64)  # exact: a call has fewer than 2^32 users


def _clip_vectors(
    contributions: Contributions, bound: Bound, counted: NDArray[np.bool_] | None, users: int | None
) -> Integers:
    """Return the sum over a group of users of c_i * min(1, L_i/||c_i||), rounded user by user, in steps, (size,).

    L_i is the bound, less what rounding may add to user i. Contributions that are not finite count as zero. Arguments
    are as in `clip_and_sum`.
    """
    if bound.acute and not contributions.acute:
        raise InputError(f"{type(contributions).__name__} is not acute by construction; ask for a bound without acute.")
    _check_terms(contributions, bound)
    norms = contributions.norms()
    _check_users(len(norms), users)
    finite = np.isfinite(norms) & (norms >= 0)  # a norm that is none is not to be believed: it would not be clipped
    finite = finite if counted is None else finite & counted
    lengths = _shorten(contributions.roundings(bound.norm, bound.step), bound)
    weights = np.where(finite, lengths / np.maximum(np.where(finite, norms, 1.0), np.maximum(lengths, 2.0**-440)), 0.0)
    weights[weights < 2.0**-1000] = 0.0  # longer than 2^1000 bounds: so small a weight would lose its digits
    total = contributions.grid_sum(weights, bound.step)
    if total.shape != (bound.size,):
        raise InputError(f"a local step sent a vector of shape {total.shape} where ({bound.size},) was asked for.")
    if total.dtype != np.int64:
        raise InputError(f"a local step sent sums in {total.dtype}, and not in whole steps of the grid.")
    return total


def _shorten(roundings: Array | float, bound: Bound) -> Array | float:
    """Return the lengths to clip to, so that rounding makes no contribution longer than bound and grid allow.

    A kind that rounds every coordinate to the nearest step is clipped to the bound itself. Where a user's rounding is
    NaN, its length is zero.
    """
    room = measure_rounding(bound.size, bound.step)
    excess = np.maximum(roundings - room * (1 + 1e-12), 0.0)
    lengths: Array = np.maximum(bound.norm - np.where(excess >= 0, excess, np.inf), 0.0)
    return lengths


def _check_terms(contributions: Contributions, bound: Bound) -> None:
    """Raise InputError unless contributions and bound agree on whether these are terms of a batch, and of how many."""
    kind, terms = type(contributions).__name__, contributions.terms_per_user
    if terms is None and bound.terms_per_user is not None:
        raise InputError(f"{kind} is of users one by one; ask for a bound without terms_per_user.")
    if terms is not None and bound.terms_per_user is None:
        raise InputError(f"{kind} is of the whole batch; ask for a bound that says how much of it one user touched.")
    if terms is not None and bound.terms_per_user is not None and not terms <= bound.terms_per_user:
        raise InputError(
            f"one user touches {terms:g} terms of {kind}, more than the {bound.terms_per_user:g} of the bound."
        )
