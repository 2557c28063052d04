"""Finite sets of candidate representations, and rounds of them around the last choice.

A random finite set drawn without looking at the data is a legitimate range of the exponential mechanism. Zooming: every
round has candidates around the representation chosen before, nearer than the round before. The costs of rounds add up.
Nothing else is released, because a round's candidates are functions of its page's name and the choices before it.

A user's losses are the same to the last bit whoever stands beside it and however many candidates there are. Candidates
come WIDTH at a time, always, one product per user. All else is elementwise, by operations that are rounded correctly.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import ClassVar, Protocol

import numpy as np

from privrep.errors import InputError
from privrep.privacy.bounds import Losses
from privrep.privacy.protocol import Step
from privrep.privacy.run import Run
from privrep.typing import Array, Floats, Matrix

WIDTH = 256  # candidates that are scored at a time; the last ones of a net are filled up
_USERS = 64  # users at a time: their images by WIDTH candidates stay in a core's cache

PURPOSES = {"choice": "one of many candidates"}
"""Purposes of the pages that this module asks for; see `method.Method.purposes`."""

_SWAPPED = (np.arange(WIDTH) % 4 == 3)[:, None, None]  # candidates with a fresh direction


class Net(Protocol):
    """A finite set of candidates, drawn without looking at the data."""

    @property
    def size(self) -> int:
        """Return the number of candidates."""
        ...

    def chunk(self, number: int) -> Array:
        """Return the candidates number * WIDTH and following, (dimension, rank, WIDTH)."""
        ...


@dataclass(frozen=True)
class RandomNet:
    """`size` matrices (dimension, rank) with orthonormal columns, the same for the same name.

    Without a centre they are uniform. With a centre the first is the centre itself. Most others lie at `angle` from it
    in random directions, as the root mean square over the columns. Every fourth keeps a random part of its span and has
    one fresh direction: a way on where one direction is right, the others are wrong, and nothing near is better.
    Candidates are drawn WIDTH at a time and never all held.
    """

    fills: ClassVar[type] = Net  # what fields of steps that travel declare
    name: str
    size: int
    dimension: int
    rank: int
    centre: Matrix | None = None
    angle: float = 0.0

    def chunk(self, number: int) -> Array:
        """Return the candidates number * WIDTH and following, (dimension, rank, WIDTH)."""
        generator = np.random.default_rng([self.dimension, self.rank, number, *self.name.encode()])
        T = generator.standard_normal((WIDTH, self.dimension, self.rank))
        if self.centre is not None:
            turned = self.centre @ np.linalg.qr(generator.standard_normal((WIDTH, self.rank, self.rank)))[0]
            T = np.where(_SWAPPED, np.concatenate([turned[:, :, 1:], T[:, :, :1]], axis=2), turned + self._aside(T))
        columns = np.moveaxis(np.linalg.qr(T)[0], 0, 2)
        if self.centre is not None and number == 0:
            columns[:, :, 0] = self.centre
        return columns

    def _aside(self, T: Array) -> Array:
        """Return the moves of the centre by `angle`, (WIDTH, dimension, rank), in directions of T outside its span.

        Args:
            T: random matrices, (WIDTH, dimension, rank).
        """
        assert self.centre is not None
        T = T - self.centre @ (self.centre.T @ T)
        length = np.sqrt((T**2).sum(axis=(1, 2), keepdims=True))
        return np.asarray(T * (math.tan(self.angle) * math.sqrt(self.rank) / np.where(length > 0, length, 1)))

    def member(self, index: int) -> Array:
        """Return one candidate, (dimension, rank), by its position in the net."""
        return np.ascontiguousarray(self.chunk(index // WIDTH)[:, :, index % WIDTH])


@dataclass(frozen=True)
class Zooming:
    """The plan of a selection: rounds, candidates a round, angles from the last choice, and the split of the budget.

    One round is the exponential mechanism over a random finite set. Angles shrink geometrically from the second round
    on.
    Shares of the budget grow, because candidates that are nearer to each other are harder to tell apart.
    """

    candidates: int = 1024
    rounds: int = 10
    widest: float = 0.8
    narrowest: float = 0.25
    growth: float = 1.1

    def __post_init__(self) -> None:
        if self.candidates < 1 or self.rounds < 1:
            raise InputError(
                f"a selection takes at least one round of at least one candidate. Got {self.rounds} rounds of "
                f"{self.candidates} instead."
            )
        if not (0 < self.narrowest <= self.widest < math.pi / 2 and self.growth > 0):
            raise InputError("angles of zooming must lie between 0 and pi/2, the widest first, and growth be positive.")

    def shares(self) -> Array:
        """Return the part of the budget that each round spends, (rounds,)."""
        weights = self.growth ** np.arange(self.rounds)
        return np.asarray(weights / weights.sum())

    def angle(self, t: int) -> float:
        """Return the angle of round t = 2, 3, ..., in radians."""
        return self.widest * (self.narrowest / self.widest) ** ((t - 2) / max(self.rounds - 2, 1))


def zoom(run: Run, page: str, dimension: int, rank: int, zooming: Zooming, losses: Callable[[Net], Step]) -> Array:
    """Return a matrix (dimension, rank) with orthonormal columns, chosen by all of the run's epsilon, one choice a
    round.

    Formal guarantee, for the epsilon of the run's budget:
      - The choice is epsilon-DP without a delta, by adaptive composition of the rounds' choices.
      - That holds for any local step.

    Args:
        run: asks the users; its budget is pure.
        page: begins the names of the pages.
        dimension: rows of the matrix.
        rank: columns of the matrix.
        zooming: the plan of the rounds.
        losses: makes the local step that scores a net.
    """
    centre: Array | None = None
    for t, share in enumerate(zooming.shares().tolist(), start=1):
        angle = 0.0 if centre is None else zooming.angle(t)
        net = RandomNet(f"{page}-{t}", zooming.candidates, dimension, rank, centre, angle)
        centre = net.member(run.choose(net.name, losses(net), net.size, share * run.ledger.budget.epsilon))
    assert centre is not None
    return centre


def make_sign_matrix(rows: int, columns: int) -> Array:
    """Return the public Johnson-Lindenstrauss matrix of this size: entries +-1/sqrt(rows), the same on every day."""
    generator = np.random.default_rng([rows, columns, *b"johnson-lindenstrauss"])
    signs = 2.0 * generator.integers(0, 2, (rows, columns), dtype=np.int8) - 1.0
    return np.asarray(signs / math.sqrt(rows))


def score_candidates(net: Net, rows: Floats, evaluate: Callable[[Floats, slice], Floats]) -> Losses:
    """Return the losses (users, candidates) of every candidate of a net.

    Args:
        net: the candidates.
        rows: of the users, (users, m, dimension).
        evaluate: returns losses (users, WIDTH) from images (users, m, rank, WIDTH) and the slice of users they belong
            to.
    """
    users, m, _ = rows.shape
    losses = np.empty((users, net.size), np.float32)
    for number, start in enumerate(range(0, net.size, WIDTH)):
        C = net.chunk(number)
        flat = np.ascontiguousarray(C, dtype=np.float32).reshape(len(C), -1)
        stop = min(start + WIDTH, net.size)
        for first in range(0, users, _USERS):
            some = slice(first, first + _USERS)
            images = (rows[some] @ flat).reshape(-1, m, C.shape[1], WIDTH)
            losses[some, start:stop] = evaluate(images, some)[:, : stop - start]
    return Losses(losses)
