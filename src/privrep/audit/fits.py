"""A whole fit of made-up users in two worlds, and how far apart its pages are.

Formal guarantee. A fit is a sequence of pages, each a sum plus noise, chosen by the pages before it. `Fitted.log_ratio`
is the logarithm of the probability of all pages in the first world over that in the second, the most that any test of
the pages can use (Neyman and Pearson 1933).
* Given the pages before, both worlds ask the same questions, so each page adds the logarithm of its own ratio.
* The noise of a page is a discrete Gaussian on a grid: at a grid point its probability is the Gaussian density but for
  a factor. The totals are rounded onto the same grid, so the factor is the same in both worlds. The ratio is therefore
  that of the densities, around the rounded totals, and exact. With v released and a, b the totals it adds
  (|v - b|^2 - |v - a|^2) / (2 sigma^2). Totals are taken before rounding here: that moves it by some 2^-30 of itself.
"""

from __future__ import annotations

import math
import warnings
from collections.abc import Mapping
from dataclasses import dataclass, field

import numpy as np

from privrep.audit.worlds import Totals, TwoWorlds
from privrep.data.table import UserTable
from privrep.errors import InputError
from privrep.models.description import Config
from privrep.privacy.billboard import Billboard
from privrep.privacy.events import Relation
from privrep.privacy.ledger import Budget, Ledger
from privrep.privacy.noise import NoiseSource
from privrep.privacy.protocol import Step
from privrep.privacy.run import Run
from privrep.typing import Array

Rows = tuple[Array, Array]  # of one user: (rows, features) and (rows,)


@dataclass(frozen=True)
class Fit:
    """A small fit of made-up users, by the default method."""

    epsilon: float = 8.0
    delta: float = 1e-5
    relation: Relation = "replace-one-user"
    rank: int | None = 1
    intercept: bool = False
    users: int = 60
    rows: int = 6
    features: int = 3

    @property
    def budget(self) -> Budget:
        """Return the budget of the fit."""
        return Budget(self.epsilon, self.delta, self.relation)

    @property
    def direction(self) -> Array:
        """Return the direction in which users' slopes differ, (features,)."""
        return np.full(self.features, self.features**-0.5)

    def make_others(self) -> UserTable:
        """Return all users but the canary: public rows, the same in every audit."""
        rng = np.random.default_rng(0)
        X = rng.normal(size=(self.users, self.rows, self.features))
        y = X @ self.direction * rng.normal(size=(self.users, 1)) + 0.1 * rng.normal(size=(self.users, self.rows))
        user = np.repeat(np.arange(self.users), self.rows)
        return UserTable.from_rows(X.reshape(-1, self.features), y.ravel(), user)


@dataclass(frozen=True)
class Apart:
    """How far apart the worlds are on one statistic of one page.

    moved    distance of the totals over the sensitivity: at most 1.
    spent    mu^2 that the ledger charged for it.
    """

    moved: float
    spent: float

    @property
    def mu_squared(self) -> float:
        """Return the mu^2 that the two worlds are apart: at most what was spent."""
        return self.moved**2 * self.spent


@dataclass(frozen=True)
class Fitted:
    """The public record of one fit, as its auditor reads it.

    log_ratio    of all pages.
    loudness     sum of the squares of all noise, in units of the deviation that the pages state.
    numbers      how many numbers have noise.
    epsilon      that the ledger states.
    """

    log_ratio: float
    loudness: float
    numbers: int
    epsilon: float
    pages: Mapping[str, Apart]

    @property
    def mu_squared(self) -> float:
        """Return the mu^2 that the two worlds are apart, if the noise is what the pages state."""
        return math.fsum(page.mu_squared for page in self.pages.values())

    @property
    def share(self) -> float:
        """Return the part of the mu^2 spent that the two worlds are apart."""
        spent = math.fsum(page.spent for page in self.pages.values())
        return self.mu_squared / spent if spent else 0.0


@dataclass(frozen=True)
class Neighbours:
    """Two populations that differ in one user: a canary, in two versions. Without rows it is not there."""

    fit: Fit
    canary: tuple[Rows, Rows]
    tables: tuple[UserTable, UserTable] = field(init=False, repr=False)

    def __post_init__(self) -> None:
        others = self.fit.make_others()
        ids = np.repeat(others.ids, others.sizes)
        tables = tuple(
            UserTable.from_rows(
                np.concatenate([others.X, X]),
                np.concatenate([others.y, y]),
                np.append(ids, np.full(len(y), len(others.ids))),
            )
            for X, y in self.canary
        )
        object.__setattr__(self, "tables", tables)

    def learn(self, second: bool, noise: NoiseSource) -> Fitted:
        """Fit once, and read the record.

        Args:
            second: whether the second world answers.
            noise: of the run.
        """
        users, asked = TwoWorlds(*self.tables, second_answers=second), list[tuple[str, Totals]]()

        def on_release(page: str, step: Step | None) -> None:
            if step is None:
                raise InputError("this audit reads pages of sums, and the fit selects keys or walks.")
            asked.append((page, users.totals[-1]))

        fit, ledger, billboard = self.fit, Ledger(self.fit.budget, seeded=noise.seeded), Billboard()
        seed = 0 if noise.seeded else None
        config = Config(fit.rank, fit.epsilon, fit.delta, fit.relation, intercept=fit.intercept, seed=seed)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            run = Run(users, ledger, billboard, noise, on_release)
            config.learner.learn(run, config.problem(fit.features, None))
        return _read(billboard, asked, second, ledger.epsilon)


def _read(billboard: Billboard, asked: list[tuple[str, Totals]], answers: bool, epsilon: float) -> Fitted:
    """Return the record of a fit: see the module's guarantee.

    Args:
        billboard: of the fit.
        asked: pages of releases in their order, and the totals of both worlds.
        answers: whether the second world answered.
        epsilon: that the ledger states.
    """
    log_ratio, loudness, numbers, pages = 0.0, 0.0, 0, dict[str, Apart]()
    for name, totals in asked:
        for key, one in billboard.releases(name).items():
            first, second = totals[key]
            log_ratio += float(((one.value - second) ** 2 - (one.value - first) ** 2).sum()) / (2 * one.sigma**2)
            loudness += float(((one.value - totals[key][answers]) ** 2).sum()) / one.sigma**2
            numbers += one.value.size
            moved = float(np.linalg.norm(first - second)) / one.sensitivity
            pages[f"{name}/{key}"] = Apart(moved, one.noise_multiplier**-2)
    return Fitted(log_ratio, loudness, numbers, epsilon, pages)
