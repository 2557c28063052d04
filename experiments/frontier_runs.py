"""The runs of `experiments.frontier`: points, contenders, sweeps, and one row of the CSV for each run."""

from __future__ import annotations

import csv
import time
from collections.abc import Callable, Iterable, Iterator
from dataclasses import asdict, dataclass, fields, replace
from functools import partial
from itertools import product
from pathlib import Path

import numpy as np

from experiments.figure1 import DELTA
from experiments.references import altmin
from experiments.table_references import informed
from privrep.data.synthetic import NoiseKind, Population, make_population
from privrep.data.table import UserTable
from privrep.heads.fitting import fit_heads
from privrep.linear.method import Problem
from privrep.linear.methods.private_fedrep import paper_fedrep
from privrep.linear.references import fit_alone, fit_fedrep, subspace_distance
from privrep.linear.registry import METHODS
from privrep.linear.starts import INITIALISERS, Initialiser, Start, start_from
from privrep.local.representation import Estimate, Representation
from privrep.local.transform import FeatureTransform
from privrep.privacy.billboard import Billboard
from privrep.privacy.ledger import Budget, Ledger
from privrep.privacy.noise import simulated_noise
from privrep.privacy.run import Run
from privrep.typing import Array
from privrep.users.memory import InMemoryUsers

ROWS = 10
HEADS = 5_000  # users whose heads are fitted for the MSE
SEED = 20_251_116
MOST_SECONDS = 60.0
MOST_UNKNOWNS = 500  # d k for Priv-AltMin: it takes up to 4,096, but at 500 a run takes most of a minute already


@dataclass(frozen=True)
class Point:
    """A population and a budget."""

    users: int = 20_000
    features: int = 50
    rank: int = 2
    noise: float = 0.1
    condition: float = 1.0  # of the features' covariance
    epsilon: float = 1.0
    rows: tuple[int, int] = (ROWS, ROWS)  # fewest and most
    intercept: float = 0.0  # what follows are arguments of `make_population`
    level: float = 0.0
    common: float = 0.0
    between: float = 0.0
    context: float = 0.0
    constant_columns: int = 0
    noise_kind: NoiseKind = "gaussian"

    @property
    def population(self) -> Point:
        return replace(self, epsilon=1.0)

    @property
    def has_levels(self) -> bool:
        """Whether users have intercepts, as in panels."""
        return self.intercept > 0


@dataclass(frozen=True)
class Contender:
    """Who is run. Configuration "not private": no noise at all; start "given": a start without noise, NOT PRIVATE."""

    method: str
    start: str = "own"
    configuration: str = "default"


COMPARED = tuple(name for name, method in METHODS.items() if "start" in method.accepts)
OWN_START = {name: METHODS[name].own_start for name in COMPARED}
DEFAULTS = tuple(Contender(method) for method in COMPARED)
PAPERS = (
    *(Contender(method, configuration="paper") for method in COMPARED),
    Contender("private-fedrep", configuration="paper, its code"),  # step 2.5, head and gradient from the same rows
    Contender("private-fedrep", configuration="paper, its theory"),  # step 1, disjoint batches
)
STARTS = tuple(
    Contender(method, start) for method in COMPARED for start in (*INITIALISERS, "given") if start != OWN_START[method]
)
REFERENCES = tuple(Contender(name, configuration="not private") for name in ("fedrep", "altmin", "alone"))
USER_MEAN = Contender("user mean", configuration="not private")
ALONE = (REFERENCES[2], USER_MEAN)


@dataclass(frozen=True)
class Sweep:
    """One field of a point takes these values, the others those of `base`."""

    field: str
    values: tuple[float, ...]
    contenders: tuple[Contender, ...]
    base: Point = Point()
    seeds: int = 3  # at most
    with_mse: bool = True
    points: tuple[Point, ...] = ()  # where there is no such field: values are places in here

    def point(self, value: float) -> Point:
        if self.points:
            return self.points[int(value)]
        whole = self.field in ("users", "features", "rank")
        return replace(self.base, **{self.field: int(value) if whole else float(value)})


EPSILONS = (0.05, 0.1, 0.2, 0.5, 1, 2, 4, 8)
GRID = (*DEFAULTS, *PAPERS, *REFERENCES)
LOW, HIGH, NO_NOISE = Point(epsilon=0.2), Point(epsilon=64.0), Point(epsilon=1_000.0)
LEVELS = Point(features=20, noise=1.0, rows=(5, 15), intercept=2.0, level=10.0)
MEANS = replace(LEVELS, common=3.0, between=1.0, context=1.0)
FEW = replace(MEANS, rows=(2, 5))
PANELS = {  # populations like real panels; new ones go to the end, since the CSV has their places
    "levels": LEVELS,
    "levels and common slopes": replace(LEVELS, common=3.0),
    "the same, no slopes of their own": replace(LEVELS, common=3.0, rank=0),
    "own feature means, which levels follow": MEANS,
    "constant columns": replace(MEANS, constant_columns=8),
    "heavy tails": replace(MEANS, noise_kind="student"),
    "users with two rows": FEW,
    "all of it": replace(FEW, constant_columns=8, noise_kind="student"),
    "all of it, 2,000 users": replace(FEW, constant_columns=8, noise_kind="student", users=2_000),
}
SWEEPS = {
    "epsilon": Sweep("epsilon", EPSILONS, GRID),
    "users": Sweep("users", (500, 1_500, 5_000, 20_000, 60_000, 200_000), GRID),
    "features": Sweep("features", (20, 50, 120, 250, 500), GRID),
    "rank": Sweep("rank", (1, 2, 4, 8), GRID),
    "noise": Sweep("noise", (0.01, 0.1, 0.5, 1), GRID),
    "condition": Sweep("condition", (1, 10, 100, 1_000, 10_000), GRID),
    "starts at 2,000 users": Sweep("epsilon", EPSILONS, (*DEFAULTS, *STARTS, *REFERENCES), Point(users=2_000)),
    "users at 0.2": Sweep("users", (10_000, 20_000, 40_000, 80_000), DEFAULTS, LOW, with_mse=False),
    "features at 0.2": Sweep("features", (20, 32, 50, 80, 120), DEFAULTS, LOW, with_mse=False),
    "rank at 0.2": Sweep("rank", (1, 2, 3, 4), DEFAULTS, LOW, with_mse=False),
    "noise at 0.2": Sweep("noise", (0.01, 0.1, 0.5, 1), DEFAULTS, LOW, with_mse=False),
    "users floor": Sweep("users", (20_000, 60_000, 200_000), PAPERS, NO_NOISE, 1, False),
    "users at 0.2 floor": Sweep("users", (10_000, 20_000, 40_000, 80_000), DEFAULTS, NO_NOISE, 1, False),
    "features floor": Sweep("features", (20, 50, 120), PAPERS, NO_NOISE, 1, False),
    "features at 0.2 floor": Sweep("features", (20, 32, 50, 80, 120), DEFAULTS, NO_NOISE, 1, False),
    "rank at 0.2 floor": Sweep("rank", (1, 2, 3, 4), DEFAULTS, NO_NOISE, 1, False),
    "noise at 0.2 floor": Sweep("noise", (0.01, 0.1, 0.5, 1), DEFAULTS, NO_NOISE, 1, False),
    "starts at 20,000 users": Sweep("epsilon", EPSILONS, STARTS, seeds=1),
    "users at 64": Sweep("users", (10_000, 20_000, 40_000, 80_000), PAPERS, HIGH, with_mse=False),
    "features at 64": Sweep("features", (20, 32, 50, 80), PAPERS, HIGH, with_mse=False),
    "users at 64 floor": Sweep("users", (10_000, 40_000, 80_000), PAPERS, NO_NOISE, 1, False),
    "features at 64 floor": Sweep("features", (32, 80), PAPERS, NO_NOISE, 1, False),
    "panels": Sweep("panel", tuple(range(len(PANELS))), (*DEFAULTS, *ALONE), points=tuple(PANELS.values())),
}


@dataclass(frozen=True)
class Row:
    """One run, or why there was none. Empty (None) where there is nothing to measure."""

    sweep: str
    value: float
    method: str
    start: str
    configuration: str
    seed: int
    mse_over_oracle: float | None = None
    distance: float | None = None
    epsilon_spent: float | None = None
    seconds: float | None = None
    skipped: str = ""

    @property
    def contender(self) -> Contender:
        return Contender(self.method, self.start, self.configuration)

    @property
    def key(self) -> tuple[Point, Contender, int]:
        """Rows of the same key are the same run. What is not private does not depend on epsilon."""
        point = SWEEPS[self.sweep].point(self.value)
        return point.population if self.configuration == "not private" else point, self.contender, self.seed


@dataclass(frozen=True)
class Trial:
    """One draw of a point: the truth, the users' rows, and the error of heads on the true representation."""

    point: Point
    seed: int
    truth: Population
    table: UserTable

    def run(self) -> Run:
        """A fresh budget; noise that differs between seeds and between epsilons."""
        entropy = [SEED, self.seed, round(1_000 * self.point.epsilon)]
        noise = simulated_noise(int(np.random.SeedSequence(entropy).generate_state(1)[0]))
        budget = Budget(self.point.epsilon, DELTA)
        return Run(InMemoryUsers(self.table), Ledger(budget, seeded=True), Billboard(), noise)

    @property
    def asked(self) -> tuple[Population, UserTable]:
        """The users whose heads are fitted, and their rows."""
        c, t = min(HEADS, self.point.users), self.truth
        means = None if t.means is None else t.means[:c]
        few = replace(t, heads=t.heads[:c], intercepts=t.intercepts[:c], sizes=t.sizes[:c], means=means)
        return few, self.table.users(0, c)

    def mse(self, model: Representation) -> float:
        truth, table = self.asked
        heads = fit_heads(table.blocks(), model, intercept=self.point.has_levels)
        return truth.population_mse(heads.weights(model), heads.intercept)

    def mse_alone(self, who: Contender) -> float:
        truth, table = self.asked
        if who == USER_MEAN:
            means = np.add.reduceat(table.y.astype(np.float64), table.offsets[:-1]) / table.sizes
            return truth.population_mse(np.zeros_like(truth.weights), means)
        return truth.population_mse(*fit_alone(table, intercept=self.point.has_levels))

    def oracle(self) -> float:
        """Return the error of default heads on the true U; in panels of heads by one who knows the population."""
        if self.point.has_levels:
            truth, table = self.asked
            return truth.population_mse(*informed(truth, table))
        return self.mse(Representation(self.truth.U, FeatureTransform.plain(len(self.truth.U)), 0.0))

    def distance(self, matrix: Array) -> float | None:
        """Return the squared distance of a learned representation; None if the true one has rank 0."""
        if not self.truth.U.shape[1]:
            return None
        scale = self.truth.feature_scale
        learned, true = (
            np.linalg.qr(scale[:, None] * M if scale.ndim == 1 else scale @ M)[0] for M in (matrix, self.truth.U)
        )
        return min(subspace_distance(learned, true) ** 2, 1.0)


def draw(point: Point, seed: int) -> Trial:
    rng = np.random.default_rng([SEED, seed])
    p = point
    scale = None if p.condition == 1 else covariance_root(rng, p.features, p.condition)
    more = {name: getattr(p, name) for name in ("intercept", "level", "common", "between", "context")}
    more |= {"noise_kind": p.noise_kind, "constant_columns": p.constant_columns}
    truth = make_population(rng, p.users, p.features, p.rank, p.rows, p.noise, feature_scale=scale, **more)
    return Trial(point, seed, truth, truth.sample(rng, np.float32))


def covariance_root(rng: np.random.Generator, d: int, condition: float) -> Array:
    """Symmetric root of a covariance in random directions: eigenvalues geometric over `condition`, their mean one."""
    axes = np.linalg.qr(rng.standard_normal((d, d)))[0]
    values = condition ** -np.linspace(0, 1, d)
    return (axes * np.sqrt(values / values.mean())) @ axes.T


def without_noise(trial: Trial) -> Initialiser:
    """The spectral start of exact sums, with its true error. NOT PRIVATE."""
    exact = fit_fedrep(InMemoryUsers(trial.table), trial.point.rank, intercept=False, rounds=0).matrix

    def start(asked: Start) -> Estimate:
        seen = exact * asked.transform.scale[:, None]
        if asked.transform.whitening is not None:
            seen = np.linalg.solve(asked.transform.whitening, seen)
        return start_from(np.linalg.qr(seen)[0], trial.distance(exact) or 0.0)(asked)

    return start


def learn(trial: Trial, who: Contender, run: Run) -> Representation:
    rank, intercept = max(trial.point.rank, 1), trial.point.has_levels
    readings: dict[str, Callable[..., Representation]] = {
        "paper": METHODS[who.method].paper if who.method in METHODS else paper_fedrep,
        "paper, its code": partial(paper_fedrep, disjoint=False),
        "paper, its theory": partial(paper_fedrep, step=1.0),
    }
    if who.configuration in readings:
        return readings[who.configuration](run, rank)
    if who.configuration == "not private":
        if who.method == "altmin":
            return altmin(trial.table, rank, intercept=intercept)
        return fit_fedrep(InMemoryUsers(trial.table), rank, intercept=intercept)
    start = None if who.start == "own" else INITIALISERS.get(who.start) or without_noise(trial)
    return METHODS[who.method].learn(run, Problem(rank=rank, intercept=intercept, start=start))


def measure(trial: Trial, who: Contender, oracle: float | None) -> dict[str, float | None]:
    """The measured part of a row. Without `oracle` no heads are fitted."""
    began = time.perf_counter()
    if who in ALONE:
        mse = trial.mse_alone(who)
        return {"mse_over_oracle": mse / oracle if oracle else None, "seconds": time.perf_counter() - began}
    run = trial.run()
    model = learn(trial, who, run)
    seconds = time.perf_counter() - began
    return {
        "mse_over_oracle": trial.mse(model) / oracle if oracle else None,
        "distance": trial.distance(model.matrix),
        "epsilon_spent": None if who.configuration == "not private" else run.ledger.report().epsilon,
        "seconds": seconds,
    }


def reason_to_skip(point: Point, who: Contender, earlier: Iterable[Row]) -> str:
    """Why a run is not made: it would take more than a minute, as far as can be told beforehand."""
    unknowns = point.features * point.rank
    if who.method == "priv-altmin" and who.configuration == "default" and unknowns > MOST_UNKNOWNS:
        return f"a minute or more: normal equations of {unknowns:,} unknowns in every round"
    if who.method == "altmin" and unknowns > 250:
        return "a minute or more, and with uncorrelated features it ends where fedrep ends"
    took = [row.seconds for row in earlier if row.contender == who and row.seconds]
    return f"took {max(took):.0f} s with another seed" if took and max(took) > MOST_SECONDS else ""


def most_seeds(point: Point) -> int:
    """Three where a run takes a second, fewer where it takes ten and more."""
    if point.users >= 200_000:
        return 1
    return 2 if point.users * point.features > 1_500_000 else 3


def missing(rows: list[Row], names: Iterable[str], seeds: int) -> Iterator[tuple[int, str, float, Contender]]:
    """What is left to run, the first seed of everything first."""
    done = {(row.sweep, row.value, row.contender, row.seed) for row in rows}
    for seed, name in product(range(1, seeds + 1), names):
        sweep = SWEEPS[name]
        for value, who in product(sweep.values, sweep.contenders):
            fits = seed <= min(sweep.seeds, most_seeds(sweep.point(value)))
            if fits and (name, value, who, seed) not in done:
                yield seed, name, float(value), who


def run_all(path: Path, names: Iterable[str], seeds: int) -> list[Row]:
    """Run what the CSV lacks and append it, row by row. A point that two sweeps share is run once."""
    rows = read_rows(path)
    known = {row.key: row for row in rows if not row.skipped}
    trial: Trial | None = None
    oracle: float | None = None
    for seed, name, value, who in missing(rows, names, seeds):
        sweep = SWEEPS[name]
        point = sweep.point(value)
        row = Row(name, value, who.method, who.start, who.configuration, seed)
        old = known.get(row.key)
        same = [r for r in rows if r.sweep == name and r.value == value]
        if old is not None and (old.mse_over_oracle is not None or not sweep.with_mse):
            row = replace(old, sweep=name, value=value)
        elif reason := reason_to_skip(point, who, same):
            row = replace(row, skipped=reason)
        else:
            if trial is None or (trial.point.population, trial.seed) != (point.population, seed):
                trial, oracle = draw(point, seed), None
            trial = replace(trial, point=point)
            if sweep.with_mse and oracle is None:
                oracle = trial.oracle()
            row = replace(row, **measure(trial, who, oracle if sweep.with_mse else None))
        rows.append(row)
        known.setdefault(row.key, row)
        append(path, row)
        print(
            " ".join(f"{cell:.3g}" if isinstance(cell, float) else str(cell) for cell in asdict(row).values()),
            flush=True,
        )
    return rows


HEADER = [field.name for field in fields(Row)]


def append(path: Path, row: Row) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    new = not path.exists()
    with open(path, "a", newline="") as file:
        writer = csv.writer(file, lineterminator="\n")
        if new:
            writer.writerow(HEADER)
        cells = asdict(row).values()
        writer.writerow(["" if c is None else f"{c:.6g}" if isinstance(c, float) else c for c in cells])


def read_rows(path: Path) -> list[Row]:
    """The rows that stand; those of sweeps, values and contenders that are no more are left out."""
    if not path.exists():
        return []
    with open(path, newline="") as file:
        rows = [_row(cells) for cells in csv.DictReader(file)]
    return [
        row
        for row in rows
        if row.sweep in SWEEPS
        and row.value in SWEEPS[row.sweep].values
        and row.contender in SWEEPS[row.sweep].contenders
    ]


def _row(cells: dict[str, str]) -> Row:
    number = {name: float(cells[name]) if cells[name] else None for name in HEADER[6:10]}
    words = [cells[name] for name in ("method", "start", "configuration")]
    return Row(cells["sweep"], float(cells["value"]), *words, int(cells["seed"]), **number, skipped=cells["skipped"])
