"""Write made-up tables to try every command on: visits to shops, answers, ratings, and visits of newcomers.

They look like tables of people: users named by text, numbers of rows that differ, empty cells, columns of categories.
"""

from __future__ import annotations

import csv
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
from numpy.typing import NDArray

VISITORS, NEWCOMERS, JOKES = 4000, 20, 40
SHOPS, COLOURS = ("corner", "market", "station"), ("blue", "green", "red")

_Columns = dict[str, NDArray[Any]]


def write_tables(folder: Path) -> None:
    """Write the same tables every time, three megabytes in all."""
    rng = np.random.default_rng(20_250)
    visits = _make_visits(rng, VISITORS, 6, "u")
    _write_csv(visits, folder / "visits.csv")
    _write_parquet(visits, folder / "visits.parquet")
    _write_csv(_make_visits(rng, NEWCOMERS, 4, "new"), folder / "newcomers.csv")
    _write_parquet(_make_answers(rng, 2000, 8), folder / "answers.parquet")
    _write_parquet(_make_ratings(rng, 2000, 20), folder / "ratings.parquet")


def _make_visits(rng: np.random.Generator, users: int, rows: int, prefix: str) -> _Columns:
    """Return what users spent (y) and how many minutes they stayed (z), with what is known before.

    Users differ in level, and in how they take to high prices. Some cells of `distance` are NaN.
    """
    user = np.repeat(np.arange(users), rng.integers(rows - 2, rows + 3, users))
    n = len(user)
    level, taste = rng.normal(0, 3, users)[user], rng.normal(0, 1, users)[user]
    price, distance, hour = rng.normal(10, 2, n), rng.gamma(2.0, 1.5, n), rng.integers(8, 20, n)
    shop, colour = rng.integers(0, len(SHOPS), n), rng.integers(0, len(COLOURS), n)
    y = 30 + level + (taste - 1) * (price - 10) - 0.8 * distance + np.array([0.0, 3.0, -2.0])[shop]
    z = 25 + 0.5 * level + 0.3 * (hour - 14) + np.array([0.0, 5.0, -5.0])[shop]
    distance[rng.random(n) < 0.05] = np.nan
    return {
        "user": _name(prefix, user),
        "y": (y + rng.normal(0, 1.5, n)).round(2),
        "z": (z + rng.normal(0, 2, n)).round(1),
        "price": price.round(2),
        "distance": distance.round(2),
        "hour": hour,
        "shop": np.array(SHOPS)[shop],
        "colour": np.array(COLOURS)[colour],
    }


def _make_answers(rng: np.random.Generator, users: int, rows: int) -> _Columns:
    """Return answers of yes, no or maybe to questions with five features."""
    user = np.repeat(np.arange(users), rows)
    X = rng.normal(size=(len(user), 5))
    own, common = rng.normal(0, 1, (users, 3)), rng.normal(0, 1, (5, 3))
    along = rng.normal(0, 1, (5, 1)) * rng.normal(0, 1, (users, 1, 3))  # one direction, along which users differ
    scores = X @ common + own[user] + np.einsum("nd,ndc->nc", X, along[user])
    answer = np.array(["maybe", "no", "yes"])[(scores + rng.gumbel(size=scores.shape)).argmax(axis=1)]
    return {"user": _name("u", user), "answer": answer, **{f"x{j}": X[:, j].round(3) for j in range(5)}}


def _make_ratings(rng: np.random.Generator, users: int, rows: int) -> _Columns:
    """Return how users rate some of the jokes, from 1 to 5. Tastes differ along two directions."""
    user = np.repeat(np.arange(users), rows)
    joke = np.concatenate([rng.permutation(JOKES)[:rows] for _ in range(users)])
    offsets, taste, kind = rng.normal(0, 0.5, JOKES), rng.normal(0, 0.7, (users, 2)), rng.normal(0, 0.7, (JOKES, 2))
    level = rng.normal(3, 0.5, users)
    rating = level[user] + offsets[joke] + (taste[user] * kind[joke]).sum(axis=1) + rng.normal(0, 0.7, len(user))
    return {"user": _name("u", user), "joke": joke, "rating": rating.clip(1, 5).round(1)}


def _name(prefix: str, user: NDArray[np.int64]) -> NDArray[np.str_]:
    return np.array([f"{prefix}{i}" for i in range(user.max() + 1)])[user]


def _write_parquet(columns: _Columns, path: Path) -> None:
    """Write a table whose cells of NaN are null."""
    pq.write_table(pa.table({name: pa.array(values, from_pandas=True) for name, values in columns.items()}), path)


def _write_csv(columns: _Columns, path: Path) -> None:
    """Write a table whose cells of NaN are empty."""
    with open(path, "w", newline="", encoding="utf-8") as file:
        lines = csv.writer(file, lineterminator="\n")
        lines.writerow(columns)
        lines.writerows(zip(*map(_cells, columns.values()), strict=True))


def _cells(values: NDArray[Any]) -> Sequence[object]:
    return ["" if value != value else value for value in values.tolist()]
