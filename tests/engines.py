"""The engines, as data: how each is opened on the rows of a table. A new engine joins by a line in ENGINES."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.csv
import pyarrow.parquet as pq

from privrep.data.readers import TableSource, read_table
from privrep.data.table import UserTable
from privrep.federated.task import TableTask
from privrep.models.description import Columns, Config
from privrep.privacy.protocol import Users
from privrep.users.isolated import IsolatedUsers
from privrep.users.memory import InMemoryUsers
from privrep.users.performance import Performance
from privrep.users.streaming import StreamingUsers

try:
    import flwr
except ImportError:
    flwr = None  # type: ignore[assignment]

ONE = Performance(workers=1)


@dataclass(frozen=True)
class World:
    """Rows, sorted by user, and what their columns are."""

    rows: pa.Table
    columns: Columns

    @property
    def task(self) -> TableTask:
        return TableTask(Config(1, 8.0, 1e-6), self.columns)

    def read(self, path: Path) -> UserTable:
        return read_table(self.task._make_source(path))


def interleave(rows: pa.Table) -> pa.Table:
    """Return the rows with users all mixed up, and each user's own in their order."""
    users, key = rows["user"].to_numpy(), np.random.default_rng(5).random(rows.num_rows)
    return rows.take(np.argsort(key[np.lexsort((key, users))]))


def write(rows: pa.Table, path: Path) -> Path:
    if path.suffix == ".csv":
        pa.csv.write_csv(rows, path)
    else:
        pq.write_table(rows, path)
    return path


@contextmanager
def in_memory(world: World, folder: Path, performance: Performance = ONE) -> Iterator[Users]:
    yield InMemoryUsers(world.read(write(world.rows, folder / "rows.parquet")), performance)


@contextmanager
def several_workers(world: World, folder: Path) -> Iterator[Users]:
    with in_memory(world, folder, Performance(workers=3)) as users:
        yield users


@contextmanager
def interleaved(world: World, folder: Path) -> Iterator[Users]:
    yield InMemoryUsers(world.read(write(interleave(world.rows), folder / "rows.parquet")), ONE)


def streamed(name: str, order: Callable[[pa.Table], pa.Table] = lambda rows: rows) -> Opener:
    @contextmanager
    def open_stream(world: World, folder: Path) -> Iterator[Users]:
        source: TableSource = world.task._make_source(write(order(world.rows), folder / name))
        with StreamingUsers.open(source, Performance(workdir=folder, workers=1, regroup_bytes=1 << 16)) as users:
            yield users

    return open_stream


@contextmanager
def file_of_a_node(world: World, folder: Path) -> Iterator[Users]:
    with world.task.open(write(world.rows, folder / "rows.parquet")) as users:
        yield users


@contextmanager
def isolated(world: World, folder: Path, strictly: bool = False) -> Iterator[Users]:
    with in_memory(world, folder) as users:
        assert isinstance(users, InMemoryUsers)
        yield IsolatedUsers(users, strictly)


@contextmanager
def one_by_one(world: World, folder: Path) -> Iterator[Users]:
    with isolated(world, folder, strictly=True) as users:
        yield users


@contextmanager
def isolated_stream(world: World, folder: Path) -> Iterator[Users]:
    with streamed("rows.parquet")(world, folder) as users:
        assert isinstance(users, StreamingUsers)
        yield IsolatedUsers(users)


@contextmanager
def on_nodes(world: World, folder: Path) -> Iterator[Users]:
    from federation import NODES, federation

    user = world.rows["user"].to_numpy()
    ends = np.unique(user)[np.cumsum(list(NODES.values())) - 1]
    node = np.searchsorted(ends, user)
    parts = [world.rows.filter(pa.array(node == place)) for place in range(len(NODES))]
    files = [write(rows, folder / f"{name}.parquet") for name, rows in zip(NODES, parts, strict=True)]
    with federation(world.task, files, folder / "nodes") as fed:
        yield fed.engine()


Opener = Callable[[World, Path], AbstractContextManager[Users]]


@dataclass(frozen=True)
class Engine:
    """How an engine is opened, and what it does not promise."""

    open: Opener
    opens_files: bool = False  # and refuses what a file may not hold
    samples: bool = True  # that are drawn, for steps of fixed shape


ENGINES = {
    "in memory": Engine(in_memory),
    "in memory, several workers": Engine(several_workers),
    "in memory, rows interleaved": Engine(interleaved, opens_files=True),
    "streamed": Engine(streamed("rows.parquet"), opens_files=True),
    "streamed, rows interleaved": Engine(streamed("rows.parquet", interleave), opens_files=True),
    "streamed, CSV, rows interleaved": Engine(streamed("rows.csv", interleave), opens_files=True),
    "the file of a node": Engine(file_of_a_node, opens_files=True),
    "isolated": Engine(isolated),
    "isolated, streamed": Engine(isolated_stream),
    "isolated, one by one": Engine(one_by_one),
}
if flwr is not None:
    ENGINES["on nodes"] = Engine(on_nodes, samples=False)
