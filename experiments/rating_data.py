"""Ratings and their splits, for `experiments.tables`: films (ml-100k) and jokes (Jester).

    task = read_ratings("films", seed=0)

Files are looked for in $PRIVREP_DATA, or in ../shared/data: ml-100k/ratings.parquet (user, item, rating) and
jester/ratings.npz.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from pyarrow import parquet

from experiments import jester
from experiments.jester import Ratings
from experiments.tables_data import SUPPORT, default_data
from privrep.errors import InputError

SEED = 20_251_122
NEW = 0.1  # share of users who are newcomers in the second fit
FILMS, JOKES = "films", "jokes"


@dataclass(frozen=True)
class RatingTask:
    """Ratings of one data set, split twice: among everybody's ratings, and among users.

    In the first fit all users take part and are asked about a fifth of their ratings. In the second a tenth of them are
    newcomers, who bring three ratings at most and are asked about the same.
    """

    items: int
    declared: bool  # whether the list of items is public
    least: float  # rating that can be given
    most: float
    train: Ratings  # of everybody
    test: Ratings  # of everybody
    others: Ratings  # those of `train` whose users are not newcomers
    support: Ratings  # what newcomers bring
    newcomers: Ratings  # what newcomers are asked

    @property
    def n_users(self) -> int:
        return int(self.train.user.max()) + 1

    def errors(self, said: np.ndarray, asked: Ratings) -> tuple[float, float]:
        """Return RMSE, and the mean absolute error over the range of ratings."""
        nmae, rmse = jester.errors(said, asked, self.least, self.most)
        return rmse, nmae


@dataclass(frozen=True)
class Source:
    """Where ratings are, and what is publicly known of them."""

    file: str
    read: Callable[[Path], Ratings]
    least: float
    most: float
    declared: bool


def read_films(path: Path) -> Ratings:
    """Read 100,000 ratings of 1,682 films by 943 people."""
    table = parquet.read_table(path, columns=["user", "item", "rating"])
    user, item = (np.unique(table[name].to_numpy(), return_inverse=True)[1] for name in ("user", "item"))
    order = np.argsort(user, kind="stable")
    value = table["rating"].to_numpy().astype(np.float64)
    return Ratings(user[order].astype(np.int64), item[order].astype(np.int64), value[order])


SOURCES = {
    FILMS: Source("ml-100k/ratings.parquet", read_films, 1.0, 5.0, declared=True),
    JOKES: Source("jester/ratings.npz", jester.read, jester.LEAST, jester.MOST, declared=False),
}


def read_ratings(name: str, seed: int, folder: Path | None = None) -> RatingTask:
    """Read ratings of `SOURCES` and split them."""
    source = SOURCES[name]
    folder = default_data().parent if folder is None else folder
    if not (folder / source.file).exists():
        raise InputError(f"there is no {source.file} in {folder}. Set PRIVREP_DATA to its folder.")
    return split_ratings(source.read(folder / source.file), seed, source.least, source.most, source.declared)


def split_ratings(ratings: Ratings, seed: int, least: float, most: float, declared: bool) -> RatingTask:
    """Split ratings as `experiments.jester` does, and draw newcomers.

    Args:
        ratings: users are codes from 0, sorted; items are codes from 0.
        seed: of the split and of who is a newcomer.
        least: rating that can be given.
        most: rating that can be given.
        declared: whether the list of items is public.
    """
    train, test = jester.split(ratings, seed)
    users = int(ratings.user.max()) + 1
    rng = np.random.default_rng([SEED, seed])
    new = np.zeros(users, bool)
    new[rng.permutation(users)[: int(NEW * users)]] = True
    order = np.lexsort((rng.random(len(train.user)), train.user))
    place = np.empty(len(order), np.int64)
    place[order] = np.arange(len(order)) - np.searchsorted(train.user, train.user)
    stranger = new[train.user]
    return RatingTask(
        items=int(ratings.item.max()) + 1,
        declared=declared,
        least=least,
        most=most,
        train=train,
        test=test,
        others=train.take(~stranger),
        support=train.take(stranger & (place < SUPPORT)),
        newcomers=test.take(new[test.user]),
    )
