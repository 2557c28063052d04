"""The runs of `experiments.tables` on synthetic populations, whose error is known exactly.

Two questions. On populations of the paper's model: population MSE over that of least-squares heads, without intercepts,
on the true U. On populations like panels: population MSE over that of the best of three simple things, the user's own
mean, the user alone, and the prior mean that privrep itself released.
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

import numpy as np

from experiments.figure1 import rotated_scale
from experiments.frontier_runs import PANELS, USER_MEAN, Point, draw
from experiments.tables_runs import DEFAULT, DELTA, EPSILONS, prior_of
from privrep.data.synthetic import FeatureKind, Population, make_population
from privrep.data.table import UserTable
from privrep.heads.fitting import fit_heads
from privrep.linear.method import Problem
from privrep.linear.references import fit_alone
from privrep.linear.registry import METHODS
from privrep.local.least_squares import fit_least_squares
from privrep.local.prior import PriorMean
from privrep.local.representation import Representation
from privrep.privacy.ledger import Budget
from privrep.privacy.run import Run
from privrep.typing import Array
from privrep.users.memory import InMemoryUsers

SEED = 20_251_118
ORACLE = "least squares on the true U"
SIZES = (500, 2_000, 50_000)
LARGEST = 1.005  # what a population like panels may cost over the best of the simple things


@dataclass(frozen=True)
class Model:
    """A population of the paper's model; the defaults are Figure 1's."""

    users: int = 20_000
    features: int = 50
    rank: int = 2
    rows: int | tuple[int, int] = 10
    noise: float = 0.01
    feature_kind: FeatureKind = "gaussian"
    condition: float = 1.0


@dataclass(frozen=True)
class Case:
    """A population of the paper's model, and at each epsilon the ratio it should reach."""

    name: str
    model: Model
    targets: dict[float, float]


UNEVEN = Model(rank=3, rows=(4, 23), noise=0.1, feature_kind="uniform")
MANY = Model(users=50_000, noise=0.1)
CASES = (
    Case("Figure 1", Model(), {1.0: 1.0, 0.1: 1.1}),
    Case("Figure 1", Model(users=2_000), {1.0: 1.2}),
    Case("4 to 23 rows, rank 3, uniform", UNEVEN, {1.0: 1.0}),
    Case("condition 100", replace(MANY, condition=100.0), {1.0: 1.0}),
    Case("condition 1,000", replace(MANY, condition=1_000.0), {1.0: 1.02}),
)
MEANS = "own feature means, which levels follow"
POPULATIONS = (
    *((name.removesuffix(", 2,000 users"), point) for name, point in PANELS.items()),
    *((MEANS, replace(PANELS[MEANS], users=users)) for users in SIZES),
    *(("no levels", Point(users=users)) for users in SIZES),
)


@dataclass(frozen=True)
class Ratio:
    """One run, and what its error is compared with."""

    name: str
    users: int
    seed: int
    epsilon: float
    rank: str  # "given" or "found"
    mse: float
    against: str
    mse_against: float
    ratio: float
    target: float | None  # None: nothing is asked for
    epsilon_spent: float
    seconds: float

    @property
    def population(self) -> str:
        return f"{self.name}, {self.users:,} users"


@dataclass(frozen=True)
class Fit:
    """What was learned, what was spent on it, and how long it took."""

    learned: Representation
    spent: float
    seconds: float


def learn(table: UserTable, epsilon: float, seed: int, rank: int | None) -> Fit:
    """Learn by the default method, with simulated noise."""
    began = time.perf_counter()
    with Run.open(InMemoryUsers(table), Budget(epsilon, DELTA), seed=seed) as run:
        learned = METHODS[DEFAULT].learn(run, Problem(rank=rank))
        return Fit(learned, float(run.ledger.report().epsilon), time.perf_counter() - began)


def heads_mse(truth: Population, table: UserTable, learned: Representation) -> float:
    """Return the population MSE of privrep's heads."""
    heads = fit_heads(table.blocks(), learned)
    return truth.population_mse(heads.weights(learned), heads.intercept)


def draw_model(model: Model, seed: int) -> tuple[Population, UserTable]:
    """Draw a population of the paper's model, and its rows."""
    rng, m = np.random.default_rng([SEED, seed]), model
    scale = None if m.condition == 1 else rotated_scale(rng, m.features, m.condition)
    kind = m.feature_kind
    truth = make_population(
        rng, m.users, m.features, m.rank, m.rows, m.noise, feature_kind=kind, feature_scale=scale
    )  # fmt: skip
    return truth, truth.sample(rng)


def least_squares_mse(truth: Population, table: UserTable) -> float:
    """Return the population MSE of least-squares heads, without intercepts, on the true U."""
    weights = np.zeros_like(truth.weights)
    for users, size in table.positions_by_size():
        X, y = (values.astype(np.float64) for values in table.group(users, size))
        weights[users] = fit_least_squares(X @ truth.U, y) @ truth.U.T
    return truth.population_mse(weights, np.zeros(len(weights)))


def run_case(case: Case, seed: int) -> Iterator[Ratio]:
    """Run a population of the paper's model, with its rank given and with the rank found."""
    truth, table = draw_model(case.model, seed)
    oracle = least_squares_mse(truth, table)
    for epsilon, target in case.targets.items():
        for rank in ("given", "found"):
            fit = learn(table, epsilon, seed, case.model.rank if rank == "given" else None)
            mse = heads_mse(truth, table, fit.learned)
            measured = mse, ORACLE, oracle, mse / oracle, target, fit.spent, fit.seconds
            yield Ratio(case.name, case.model.users, seed, epsilon, rank, *measured)


def prior_mse(truth: Population, table: UserTable, mean: PriorMean) -> float:
    """Return the population MSE of the prior mean, which knows the features of a user's rows and no target."""
    weights, intercepts = np.tile(mean.slopes[:, 0], (table.n_users, 1)), np.zeros(table.n_users)
    for users, size in table.positions_by_size():
        X = table.group(users, size)[0].astype(np.float64)
        intercepts[users] = _intercepts(X, mean)
    return truth.population_mse(weights, intercepts)


def _intercepts(X: Array, mean: PriorMean) -> Array:
    """Return the prior mean at a row of zeros of users with equally many rows, (users,)."""
    at_rows = mean.predict_users(X)[:, :, 0] - X @ mean.slopes[:, 0]
    every: Array = at_rows.mean(axis=1)  # the same at all rows of a user
    return every


def run_population(name: str, point: Point, seed: int, epsilons: Sequence[float] = EPSILONS) -> Iterator[Ratio]:
    """Run a population like panels against the best of the simple things. The rank is found.

    Nobody is told whether there are levels, so users alone have intercepts, as privrep has.
    """
    trial = draw(point, seed)
    truth, table = trial.asked
    simple = {"user mean": trial.mse_alone(USER_MEAN), "alone": truth.population_mse(*fit_alone(table))}
    for epsilon in epsilons:
        fit = learn(trial.table, epsilon, seed, None)
        mse = heads_mse(truth, table, fit.learned)
        every = simple | {"prior mean": prior_mse(truth, table, prior_of(fit.learned).mean)}
        best = min(every, key=every.__getitem__)
        measured = mse, best, every[best], mse / every[best], LARGEST, fit.spent, fit.seconds
        yield Ratio(name, point.users, seed, epsilon, "found", *measured)


def run_synthetic(seed: int, quick: bool = False) -> Iterator[Ratio]:
    """Run all populations; a quick run has a tenth of the users, epsilon 1 alone for most, and no targets."""
    for case in CASES:
        few = replace(case, model=replace(case.model, users=case.model.users // 10))
        for ratio in run_case(few if quick else case, seed):
            yield replace(ratio, target=None) if quick else ratio
    for name, point in POPULATIONS:
        if quick:
            small = replace(point, users=point.users // 10)
            yield from (replace(ratio, target=None) for ratio in run_population(name, small, seed, (1.0,)))
        else:
            yield from run_population(name, point, seed)
