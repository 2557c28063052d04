"""The runs of `experiments.tables` on real panels: references, the analyst and privrep, one line of the CSV for each.

RMSE is that of rows of three kinds: test rows of users who took part, rows of newcomers who bring three rows at most,
and the same rows by who knows nothing of their users (strangers).
"""

from __future__ import annotations

import csv
import time
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import Any, TypeVar

import numpy as np

from experiments.table_references import REFERENCES, Predictions, noisy_ridge
from experiments.tables_data import PANELS, Mask, Panel, Task, default_data, split
from privrep.data.table import UserTable, find_users
from privrep.errors import InputError
from privrep.heads.fitting import fit_heads
from privrep.linear.method import Problem
from privrep.linear.registry import METHODS
from privrep.local.prior import HeadPrior
from privrep.local.representation import Representation
from privrep.privacy.ledger import Budget
from privrep.privacy.run import Run
from privrep.typing import Array
from privrep.users.memory import InMemoryUsers

EPSILONS = (0.3, 1.0, 3.0)
DELTA = 1e-6
SHARE = 0.9  # of rows that an interval should cover
ANALYST = "analyst's noisy ridge"
DEFAULT = "private-fedrep"
PRIVREP = (DEFAULT, "priv-altmin", "centaur")
SIZES = {"nlswork": (500, 2_000), "batting": (500, 2_000, 8_000)}  # users of panels that are made smaller
ANALYST_SEED, SUBSET_SEED = 20_251_116, 20_251_117


@dataclass(frozen=True)
class Score:
    """One method on one split of one panel. Empty (None) where a method has no such number."""

    panel: str  # one of `PANELS`, with a number of users where there are not all of them
    users: int
    seed: int
    method: str
    epsilon: float | None  # None: not private
    test: float  # RMSE
    newcomers: float
    strangers: float
    cover_test: float | None = None  # share of rows within their 90% intervals
    cover_newcomers: float | None = None
    cover_strangers: float | None = None
    rank: int | None = None
    epsilon_spent: float | None = None
    seconds: float = 0.0


KINDS = ("test", "newcomers", "strangers")
"""Of rows, as fields of `Score`."""


def read_panels(folder: Path | None = None) -> dict[str, Panel]:
    """Return all panels by name."""
    folder = default_data() if folder is None else folder
    gone = [name for name in PANELS if not (folder / f"{name}.parquet").exists()]
    if gone:
        raise InputError(f"there is no {gone[0]}.parquet in {folder}. Set PRIVREP_DATA to the parent of its folder.")
    return {name: read(folder) for name, read in PANELS.items()}


def take_users(panel: Panel, users: int, seed: int) -> Panel:
    """Return the rows of so many users, drawn at random."""
    everyone = np.unique(panel.users)
    if users > len(everyone):
        raise InputError(f"there are {len(everyone)} users, not {users}.")
    taken = np.random.default_rng([SUBSET_SEED, seed]).choice(everyone, users, replace=False)
    kept = np.isin(panel.users, taken)
    return Panel(panel.X[kept], panel.y[kept], panel.users[kept])


def run_panel(
    name: str, task: Task, seed: int, epsilons: Sequence[float] = EPSILONS, methods: Sequence[str] = PRIVREP
) -> Iterator[Score]:
    """Run everything on one split: what is not private once, the rest at every epsilon."""
    for reference, fit in REFERENCES.items():
        began = time.perf_counter()
        errors = fit(task).errors(task)
        yield Score(name, task.n_users, seed, reference, None, *errors, seconds=time.perf_counter() - began)
    for epsilon in epsilons:
        began = time.perf_counter()
        errors = noisy_ridge(task, epsilon, np.random.default_rng([ANALYST_SEED, seed]), DELTA).errors(task)
        yield Score(name, task.n_users, seed, ANALYST, epsilon, *errors, seconds=time.perf_counter() - began)
        for method in methods:
            yield run_privrep(name, task, seed, epsilon, method)


def run_privrep(name: str, task: Task, seed: int, epsilon: float, method: str = DEFAULT) -> Score:
    """Learn from the training rows with simulated noise, fit heads, and predict. The rank is found."""
    began = time.perf_counter()
    train = table_of(task, task.train)
    with Run.open(InMemoryUsers(train), Budget(epsilon, DELTA), seed=seed) as run:
        learned = METHODS[method].learn(run, Problem(rank=None))
        spent = float(run.ledger.report().epsilon)
    if spent > epsilon:
        raise RuntimeError(f"{method} spent an epsilon of {spent:g}, with {epsilon:g} to spend")
    said, halves = predict(task, learned)
    seconds = time.perf_counter() - began
    errors, covered = said.errors(task), coverage(task, said, halves)
    return Score(
        name, task.n_users, seed, method, epsilon, *errors, *covered, learned.basis.shape[1], spent, seconds
    )  # fmt: skip


def predict(task: Task, learned: Representation) -> tuple[Predictions, Predictions]:
    """Return predictions of the rows of all kinds, and half the widths of their 90% intervals."""
    nothing = np.zeros_like(task.support)
    asked = ((task.train, task.test), (task.support, task.newcomers), (nothing, task.newcomers))
    said, halves = zip(*(answer(task, learned, given, rows) for given, rows in asked), strict=True)
    return Predictions(*said), Predictions(*halves)


def answer(task: Task, learned: Representation, given: Mask, asked: Mask) -> tuple[Array, Array]:
    """Return predictions of the rows asked for, from heads on the rows given, and half the widths of 90% intervals.

    Users who gave no row have the prior mean.
    """
    prior = prior_of(learned)
    X, owners = task.X[asked], task.codes[asked]
    said = prior.mean.predict_rows(X)[:, 0]
    apart = np.sqrt(prior.noise[0] * prior.new_ratio[0])
    halves = np.full(len(said), prior.quantile(SHARE, known=False) * apart)
    if given.any():
        heads = fit_heads(table_of(task, given).blocks(), learned)
        place = find_users(heads.ids, owners)
        has, users = place >= 0, place[place >= 0]
        said[has] = heads.predict(learned, X[has], users)
        halves[has] = prior.quantile(SHARE, known=True) * heads.deviations(learned, X[has], users)
    return said, halves


def coverage(task: Task, said: Predictions, halves: Predictions) -> tuple[float, float, float]:
    """Return the share of rows of each kind that lie within their intervals."""
    known, new = task.y[task.test], task.y[task.newcomers]
    parts = (
        (known - said.test, halves.test),
        (new - said.newcomers, halves.newcomers),
        (new - said.strangers, halves.strangers),
    )
    test, newcomers, strangers = (float(np.mean(np.abs(error) <= half)) for error, half in parts)
    return test, newcomers, strangers


def table_of(task: Task, rows: Mask) -> UserTable:
    """Return these rows by user."""
    return UserTable.from_rows(task.X[rows], task.y[rows], task.codes[rows])


def prior_of(learned: Representation) -> HeadPrior:
    """Return the prior of heads, which a default fit of numbers always has."""
    if learned.prior is None:
        raise InputError("this representation has no prior of heads: it is not that of a default.")
    return learned.prior


def run_panels(seeds: Iterable[int]) -> Iterator[Score]:
    """Run the three panels with all their users."""
    panels = read_panels()
    for seed in seeds:
        for name, panel in panels.items():
            yield from run_panel(name, split(panel, seed), seed)


def run_sizes(seeds: Iterable[int]) -> Iterator[Score]:
    """Run panels with fewer users, the default method alone."""
    panels = read_panels()
    for seed in seeds:
        for name, sizes in SIZES.items():
            for users in sizes:
                task = split(take_users(panels[name], users, seed), seed)
                yield from run_panel(f"{name}, {users:,} users", task, seed, methods=(DEFAULT,))


Line = TypeVar("Line")


def write_lines(path: Path, lines: Sequence[Any]) -> None:
    """Write dataclasses of one kind, six digits a number."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with open(path, "w", newline="") as file:
        writer = csv.writer(file, lineterminator="\n")
        writer.writerow([field.name for field in fields(lines[0])])
        for line in lines:
            cells = asdict(line).values()
            writer.writerow(["" if c is None else f"{c:.6g}" if isinstance(c, float) else c for c in cells])


def read_lines(path: Path, kind: type[Line]) -> list[Line]:
    """Read dataclasses of this kind; none where there is no file."""
    if not path.exists():
        return []
    kinds = {field.name: str(field.type).split(" |")[0] for field in fields(kind)}  # type: ignore[arg-type]
    with open(path, newline="") as file:
        rows = csv.DictReader(file)
        if list(rows.fieldnames or ()) != list(kinds):
            raise InputError(f"{path} has other columns than are written now. Delete it.")
        return [kind(**{name: _value(cell, kinds[name]) for name, cell in row.items()}) for row in rows]


def _value(cell: str, kind: str) -> object:
    if kind == "str":
        return cell
    return None if cell == "" else int(cell) if kind == "int" else float(cell)
