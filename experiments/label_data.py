"""Panels of labels and one split of each, for `experiments.tables`: two real tables and two made-up populations.

    task = LABELS["union"](0, False)

  union                    whether a woman is in a union: nlswork, with the log wage as one more column
  home runs                more home runs a time at bat than half of all seasons: batting, from the other counts
  home runs, four classes  none, or one of three equally large classes of the others
  two rows                 40,000 users with two yes/no rows, levels of standard deviation 2 on the logit, weak slopes
  logistic                 20,000 users with 20 rows, 50 features, labels drawn from <x, U v>, heads v of deviation 3

Files are those of `tables_data`. Labels are codes 0 to classes - 1.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from pyarrow import parquet
from scipy.special import expit

from experiments.tables_data import SUPPORT, Panel, Task, default_data, read_numbers, read_women, split
from privrep.data.synthetic import make_class_population
from privrep.errors import InputError
from privrep.typing import Array, Integers

SEED = 20_251_121
NEW = 1_000  # newcomers in made-up populations, beside the users who take part
SCALES = np.array([1.0, 10.0, 0.1, 5.0, 1.0, 100.0, 1.0, 2.0])  # of the columns of "two rows"
LEVEL, SPREAD = -3.0, 2.0  # of users' logits in "two rows"
SLOPES = 0.15 * np.array([1.0, -1.0, 0.5, 1.5, -0.5, 0.0, 2.0, -1.5])  # in units of the columns' scales
FEATURES, RANK, ROWS, STRENGTH = 50, 2, 20, 3.0  # of "logistic"
ASKED = 5  # rows to predict of each user of "logistic"; of "two rows" it is 2


@dataclass(frozen=True)
class LabelTask(Task):
    """A panel of labels and its split."""

    classes: int = 2
    basis: Array | None = None  # (d, k): the true U, where there is one


def union(folder: Path) -> Panel:
    """Read union membership of 4,100 women over the years."""
    return read_women(folder, "union", "ln_wage")


def read_home_runs(folder: Path) -> Panel:
    """Read home runs a time at bat, as numbers, and the other counts of the season."""
    used = ["AB", "H", "X2B", "X3B", "BB", "SO", "SB", "G"]
    table = parquet.read_table(folder / "batting.parquet", columns=[*used, "HR", "playerID"])
    numbers = read_numbers(table, [*used, "HR"])
    kept = ~np.isnan(numbers).any(axis=1) & (numbers[:, 0] >= 50)
    rate = numbers[kept, -1] / numbers[kept, 0]
    return Panel(numbers[kept, :-1], rate, np.array(table["playerID"].to_pylist())[kept])


def many_home_runs(folder: Path) -> Panel:
    """Return whether a season has more home runs a time at bat than half of them."""
    panel = read_home_runs(folder)
    return Panel(panel.X, (panel.y > np.median(panel.y)).astype(np.float64), panel.users)


def home_run_classes(folder: Path) -> Panel:
    """Return four classes: no home run, and the thirds of the other seasons."""
    panel = read_home_runs(folder)
    some = panel.y > 0
    edges = np.quantile(panel.y[some], [1 / 3, 2 / 3])
    return Panel(panel.X, np.where(some, 1.0 + np.searchsorted(edges, panel.y), 0.0), panel.users)


def read_labels(file: str, read: Callable[[Path], Panel], seed: int, folder: Path | None = None) -> LabelTask:
    """Read a panel from this file and split it."""
    folder = default_data() if folder is None else folder
    if not (folder / file).exists():
        raise InputError(f"there is no {file} in {folder}. Set PRIVREP_DATA to the parent of its folder.")
    panel = read(folder)
    return LabelTask(**vars(split(panel, seed)), classes=int(panel.y.max()) + 1)


def two_rows(seed: int, users: int, new: int = NEW) -> LabelTask:
    """Draw users with two yes/no rows to learn from and two to predict. Newcomers bring three.

    A logit is the user's level plus weak slopes in eight columns, of which the first two never vary within a user and
    the others vary as much between users as within.
    """
    rng = np.random.default_rng([SEED, seed])
    sizes = np.where(np.arange(users + new) < users, 4, SUPPORT + 2)
    codes = np.repeat(np.arange(users + new), sizes)
    X = rng.standard_normal((users + new, len(SCALES)))[codes]
    X[:, 2:] = (X[:, 2:] + rng.standard_normal((len(codes), len(SCALES) - 2))) / np.sqrt(2)
    logits = LEVEL + SPREAD * rng.standard_normal(users + new)[codes] + X @ SLOPES
    y = (rng.random(len(codes)) < expit(logits)).astype(np.float64)
    return _split_by_place(X * SCALES + 3 * SCALES, y, codes, users, sizes - 2)


def logistic(seed: int, users: int, new: int = NEW) -> LabelTask:
    """Draw users whose logits are <x, U v>, with heads v of their own and neither levels nor common slopes."""
    rng = np.random.default_rng([SEED, seed, 1])
    truth = make_class_population(rng, users + new, FEATURES, RANK, ROWS, strength=STRENGTH)
    table = truth.sample(rng, rows=ROWS + ASKED)
    codes = np.repeat(np.arange(users + new), ROWS + ASKED)
    given = np.full(users + new, ROWS)
    return _split_by_place(table.X.astype(np.float64), table.y.astype(np.float64), codes, users, given, truth.U)


def _split_by_place(
    X: Array, y: Array, codes: Integers, users: int, given: Integers, basis: Array | None = None
) -> LabelTask:
    """Return a task whose first users take part, with this many rows of each to learn from; the others are newcomers.

    Args:
        X: (rows, d).
        y: (rows,) codes of classes.
        codes: (rows,) users, sorted.
        users: how many take part.
        given: (users and newcomers,) how many of a user's first rows are not to be predicted.
        basis: (d, k), the true U.
    """
    sizes = np.bincount(codes)
    place = np.arange(len(codes)) - np.repeat(np.cumsum(sizes) - sizes, sizes)
    asked, stranger = place >= given[codes], codes >= users
    return LabelTask(
        X=X,
        y=y,
        codes=codes,
        place=place,
        train=~asked & ~stranger,
        test=asked & ~stranger,
        support=~asked & stranger & (place < SUPPORT),
        newcomers=asked & stranger,
        basis=basis,
    )


UNION, HOME_RUNS, FOUR_CLASSES, TWO_ROWS, LOGISTIC = (
    "union", "home runs", "home runs, four classes", "two rows", "logistic",
)  # fmt: skip
LABELS: dict[str, Callable[[int, bool], LabelTask]] = {
    UNION: lambda seed, quick: read_labels("nlswork.parquet", union, seed),
    HOME_RUNS: lambda seed, quick: read_labels("batting.parquet", many_home_runs, seed),
    FOUR_CLASSES: lambda seed, quick: read_labels("batting.parquet", home_run_classes, seed),
    TWO_ROWS: lambda seed, quick: two_rows(seed, 4_000 if quick else 40_000),
    LOGISTIC: lambda seed, quick: logistic(seed, 2_000 if quick else 20_000),
}
"""By seed, and whether made-up populations have a tenth of their users."""
