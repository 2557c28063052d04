"""A search for the canary whose two versions a fit's pages tell apart best: random rows, then small changes of them."""

from __future__ import annotations

import time
from dataclasses import dataclass, field

import numpy as np

from privrep.audit.fits import Fit, Neighbours, Rows
from privrep.errors import PrivrepError
from privrep.privacy.noise import simulated_noise

MOST_ROWS = 48  # of a canary
AT_RANDOM = 0.1  # of the time: then changes of the best one alone
CLOSE = 0.02  # to the best share by one fit: worth a look by others
SEEDS = (0, 1, 2)
GUESSES = (
    ((24, 1e-2, 1e-2, 0), (8, 1e5, 1e7, 1)),
    ((8, 1e5, 1e6, 0), (24, 1e-2, 1e-2, 1)),
    ((8, 1e-2, 1e-2, 0), (24, 1e5, 1e6, 1)),
)
"""Rows, size of features, size of targets and axis of both versions: users who differ in everything that pages ask."""


@dataclass
class Search:
    """A search under way. It tries canaries by reproducible noise, so that two canaries differ in nothing else."""

    fit: Fit
    rng: np.random.Generator = field(default_factory=np.random.default_rng)
    best: Neighbours | None = None
    share: float = -1.0
    tries: int = 0

    def go_on(self, seconds: float, most: int = 10**9) -> Neighbours:
        """Return the best canary that was found.

        Args:
            seconds: after which the search ends.
            most: tries after which it ends.
        """
        began = time.monotonic()
        while self.best is None or (self.tries < most and time.monotonic() - began < seconds):
            early = time.monotonic() - began < AT_RANDOM * seconds and self.tries < max(AT_RANDOM * most, 1)
            self.try_one(Neighbours(self.fit, self._draw(early)))
        return self.best

    def try_one(self, found: Neighbours) -> None:
        """Keep a canary if it is better than the best one."""
        self.tries += 1
        try:
            share = found.learn(False, simulated_noise(SEEDS[0])).share
            if share > self.share - CLOSE:
                share = measure_share(found, SEEDS)
        except PrivrepError:
            return  # a fit may find that there is nothing to go by
        if self.best is None or share > self.share:
            self.best, self.share = found, share

    def _draw(self, early: bool) -> tuple[Rows, Rows]:
        """Return a canary in two versions: a guess at first, then new ones, or the best with changes."""
        if self.tries < len(GUESSES):
            quiet, loud = (self._guess(*guess) for guess in GUESSES[self.tries])
            return quiet, loud if self._replaced else self._make_other()
        if self.best is None or (early and self.rng.random() < 0.6):
            return self._make_rows(), self._make_other()
        versions, which = list(self.best.canary), int(self.rng.integers(2)) if self._replaced else 0
        versions[which] = self._make_rows() if self.rng.random() < 0.15 else self._change(versions[which])
        if self._replaced and self.rng.random() < 0.3:
            versions[1 - which] = self._change(versions[1 - which])
        return versions[0], versions[1]

    @property
    def _replaced(self) -> bool:
        return self.fit.relation == "replace-one-user"

    def _guess(self, count: int, size: float, target: float, axis: int) -> Rows:
        """Return equal rows along one axis, with targets of equal size, of both signs in the first version."""
        X = np.zeros((count, self.fit.features))
        X[:, axis % self.fit.features] = size
        return X, np.resize([target, -target] if axis == 0 else [target], count)

    def _make_other(self) -> Rows:
        """Return the second version: rows, or none where the canary is not there."""
        return self._make_rows() if self._replaced else (np.empty((0, self.fit.features)), np.empty(0))

    def _make_rows(self) -> Rows:
        """Return rows of any size, along one direction or many, with targets that follow from them or do not."""
        rng, d = self.rng, self.fit.features
        count = int(rng.integers(1, 9))
        X = rng.normal(size=(count, d)) * 10.0 ** rng.integers(-3, 6)
        kind = int(rng.integers(5))
        if kind == 0:
            X = np.repeat(X[:1], count, axis=0)
        elif kind == 1:
            X = np.zeros((count, d))
            X[:, rng.integers(d)] = 10.0 ** rng.integers(-3, 6)
        elif kind == 2:
            X = X @ np.outer(self.fit.direction, self.fit.direction) + 0.1 * X
        y = rng.normal(size=count) * 10.0 ** rng.integers(-3, 6)
        if rng.integers(2):
            y = X @ rng.normal(size=d) * 10.0 ** rng.integers(-1, 3)
        if rng.integers(3) == 0:
            y = np.abs(y)
        if rng.integers(3) == 0:
            y = np.resize([1.0, -1.0], count) * np.abs(y[0])
        return X, y

    def _change(self, rows: Rows) -> Rows:
        """Return rows that differ a little: their sizes, signs, or how often they come."""
        rng, X, y = self.rng, rows[0].copy(), rows[1].copy()
        row, kind = int(rng.integers(len(y))), int(rng.integers(7))
        if kind == 0:
            X = X * 2.0 ** rng.normal()
        elif kind == 1:
            y = y * 4.0 ** rng.normal()
        elif kind == 2:
            X = X * (1 + 0.5 * rng.normal(size=X.shape) * (rng.random(X.shape) < 0.5))
        elif kind == 3:
            y = y * (1 + 0.8 * rng.normal(size=y.shape) * (rng.random(y.shape) < 0.5))
        elif kind == 4 and len(y) < MOST_ROWS - 4:
            more = int(rng.integers(1, 4))
            X, y = np.concatenate([X, np.repeat(X[row : row + 1], more, axis=0)]), np.append(y, [y[row]] * more)
        elif kind == 5 and len(y) > 1:
            X, y = np.delete(X, row, axis=0), np.delete(y, row)
        else:
            y[row] = -y[row]
        return X, y


def measure_share(neighbours: Neighbours, seeds: tuple[int, ...]) -> float:
    """Return the part of the mu^2 spent that two worlds are apart, on average over noise of these seeds."""
    shares = [neighbours.learn(second, simulated_noise(seed)).share for seed in seeds for second in (False, True)]
    return float(np.mean(shares))
