"""Three real panels and one split of each, for `experiments.tables`: wages, batting, chemistry grades.

    task = read_task("nlswork", seed=0)

Files `nlswork.parquet`, `batting.parquet` and `chem97.parquet` are looked for in $PRIVREP_DATA/tables, or in
../shared/data/tables. They hold more than these tasks use.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray
from pyarrow import parquet

from privrep.errors import InputError
from privrep.typing import Array, Integers

SUPPORT = 3  # rows that a newcomer brings, at most
Mask = NDArray[np.bool_]


def default_data() -> Path:
    """Return the folder with the files of the panels."""
    shared = Path(__file__).parents[2] / "shared" / "data"
    return Path(os.environ.get("PRIVREP_DATA", shared)) / "tables"


@dataclass(frozen=True)
class Panel:
    """Rows as they were observed, several a user."""

    X: Array  # (rows, d)
    y: Array  # (rows,)
    users: NDArray[Any]  # (rows,): ids


@dataclass(frozen=True)
class Task:
    """A panel and its split. Users either take part, with rows to learn from and to predict, or are newcomers."""

    X: Array  # (rows, d)
    y: Array  # (rows,)
    codes: Integers  # (rows,): the user of each row, from 0
    place: Integers  # (rows,): of each row among its user's rows, at random, from 0
    train: Mask  # (rows,): rows to learn from
    test: Mask  # (rows,): rows to predict, of the same users
    support: Mask  # (rows,): what newcomers bring, `SUPPORT` rows each at most
    newcomers: Mask  # (rows,): rows of newcomers to predict

    @property
    def n_users(self) -> int:
        return int(self.codes.max()) + 1

    def with_support(self, rows: int) -> Task:
        """Return the task with at most this many rows of each newcomer, from 0 to `SUPPORT`."""
        if not 0 <= rows <= SUPPORT:
            raise InputError(f"rows of newcomers must lie between 0 and {SUPPORT}. Got {rows} instead.")
        return replace(self, support=self.support & (self.place < rows))


def nlswork(folder: Path) -> Panel:
    """Read log wages of 4,700 women over the years. Several columns never change within a woman."""
    return read_women(folder, "ln_wage")


def read_women(folder: Path, target: str, *further: str) -> Panel:
    """Read a column of nlswork as the target, and the columns that explain it, further ones last.

    Rows without one of these values are left out.
    """
    used = ["age", "ttl_exp", "tenure", "hours", "wks_work", "south", "not_smsa", "c_city", "msp", "collgrad", "grade"]
    table = parquet.read_table(folder / "nlswork.parquet", columns=[*used, *further, target, "race", "idcode"])
    numbers = read_numbers(table, [*used, *further, target])
    whole = ~np.isnan(numbers).any(axis=1)
    X, more, y = np.split(numbers[whole], [len(used), len(used) + len(further)], axis=1)
    black = np.array(table["race"].to_pylist())[whole] == "black"
    X = np.column_stack([X, X[:, used.index("ttl_exp")] ** 2 / 10, black, more])
    return Panel(X, y[:, 0], table["idcode"].to_numpy()[whole])


def batting(folder: Path) -> Panel:
    """Read runs of baseball players in a season and the other counts of that season. Slopes are nearly common."""
    used = ["AB", "H", "X2B", "X3B", "HR", "BB", "SO", "SB", "G"]
    table = parquet.read_table(folder / "batting.parquet", columns=[*used, "R", "playerID"])
    numbers = read_numbers(table, [*used, "R"])
    kept = ~np.isnan(numbers).any(axis=1) & (numbers[:, 0] >= 30)
    return Panel(numbers[kept, :-1], numbers[kept, -1], np.array(table["playerID"].to_pylist())[kept])


def chem97(folder: Path) -> Panel:
    """Read A-level chemistry points of pupils by school, with sex, age and earlier grades."""
    table = parquet.read_table(folder / "chem97.parquet")
    numbers = read_numbers(table, ["age", "gcsescore", "score"])
    female = np.array(table["gender"].to_pylist()) == "F"
    X = np.column_stack([female, numbers[:, :2], (numbers[:, 1] - 6.3) ** 2])
    return Panel(X, numbers[:, 2], table["school"].to_numpy())


def read_numbers(table: Any, columns: list[str]) -> Array:
    """Return (rows, columns), nan where a value is missing."""
    return np.column_stack([table[name].to_numpy().astype(np.float64) for name in columns])


PANELS: dict[str, Callable[[Path], Panel]] = {"nlswork": nlswork, "batting": batting, "chem97": chem97}


def read_task(name: str, seed: int, folder: Path | None = None) -> Task:
    """Read a panel of `PANELS` and split it."""
    folder = default_data() if folder is None else folder
    if not (folder / f"{name}.parquet").exists():
        raise InputError(f"there is no {name}.parquet in {folder}. Set PRIVREP_DATA to the parent of its folder.")
    return split(PANELS[name](folder), seed)


def split(panel: Panel, seed: int, *, tested: float = 0.25, new: float = 0.1) -> Task:
    """Split rows within users at random, and set newcomers aside.

    Users with three rows or more have a row to predict at least. Users with one or two are for training alone.

    Args:
        panel: what was observed.
        seed: of rows' places and of who is a newcomer.
        tested: share of a user's rows to predict, rounded down.
        new: share of users who are newcomers.
    """
    rng = np.random.default_rng(seed)
    codes = np.unique(panel.users, return_inverse=True)[1]
    sizes = np.bincount(codes)
    order = np.lexsort((rng.random(len(codes)), codes))
    place = np.empty(len(codes), np.int64)
    place[order] = np.arange(len(codes)) - np.repeat(np.cumsum(sizes) - sizes, sizes)
    held = np.where(sizes >= 3, np.maximum(1, np.floor(tested * sizes)), 0).astype(np.int64)
    is_new = np.zeros(len(sizes), bool)
    is_new[rng.permutation(len(sizes))[: int(new * len(sizes))]] = True
    asked, stranger = place >= (sizes - held)[codes], is_new[codes]
    return Task(
        X=panel.X,
        y=panel.y,
        codes=codes,
        place=place,
        train=~asked & ~stranger,
        test=asked & ~stranger,
        support=~asked & stranger & (place < SUPPORT),
        newcomers=asked & stranger,
    )
