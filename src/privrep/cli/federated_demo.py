"""A federation on this machine: one server and three nodes, processes that speak over TLS, and what comes of it.

The population is made up, so the truth is known; the noise is real. All that is started here is stopped here.
"""

from __future__ import annotations

import os
import shutil
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from privrep.cli.demo import Comparison
from privrep.data.synthetic import Population, make_population
from privrep.data.table import UserTable
from privrep.errors import InputError
from privrep.federated.credentials import make_keys
from privrep.heads.fitting import Heads, fit_heads
from privrep.linear.references import fit_alone
from privrep.models import model as models
from privrep.models.description import Config
from privrep.models.learning import learn
from privrep.typing import Array
from privrep.users.memory import InMemoryUsers

NODES = {"north": 300, "south": 200, "west": 100}  # users of each
FEATURES = tuple(f"x{j}" for j in range(10))
RANK, ROWS, NOISE, EPSILON, DELTA = 2, 8, 0.1, 2.0, 1e-6
NOTE = (
    "Errors use the truth of a made-up population, with sizes chosen to show what joining is worth: 600 users are "
    "enough for this budget, and those of one node are too few. Epsilon 0: nothing about one user reaches another."
)
MARK = ".federated-demo"  # a folder with this file in it may be replaced
PATIENCE = 300.0  # seconds for all of it
GRACE = 10.0  # seconds that a process has to stop by itself
Say = Callable[[str], None]


@dataclass(frozen=True)
class Row(Comparison):
    """One line of the table."""

    seconds: float = 0.0


@dataclass(frozen=True)
class Outcome:
    """The result of a demo: a table to show, and where things are."""

    title: str
    table: list[Row]
    server: Path
    nodes: list[Path]
    rows: Path


def run_demo(out: Path, *, say: Say, overwrite: bool = False) -> Outcome:
    """Run a whole federation on made-up rows on this machine, and return how it compares with one place.

    The folder gets keys, a file of rows for each node, and the folders of the server and of the nodes.

    Args:
        out: the folder; an earlier demo in it is deleted, anything else is refused.
        say: hears what happens.
        overwrite: whether an earlier demo there is replaced.
    """
    _check_out(out, overwrite)
    out.parent.mkdir(parents=True, exist_ok=True)
    if out.exists():
        shutil.rmtree(out)
    out.mkdir(mode=0o700)
    (out / MARK).touch()
    rng = np.random.default_rng(20_250)
    population = make_population(rng, sum(NODES.values()), len(FEATURES), RANK, ROWS, NOISE)
    table = population.sample(rng)
    parts = _parts(table)
    for name, part in parts.items():
        _write(part, out / f"{name}.parquet")
    make_keys(out / "keys", out / "carry", list(NODES), [])
    port = _free_port()
    (out / "federate.toml").write_text(_config(port))
    began = time.monotonic()
    _federate(out, port, say)
    seconds = time.monotonic() - began
    return _outcome(out, population, table, parts, seconds)


def _check_out(out: Path, overwrite: bool) -> None:
    if not out.exists() or (out.is_dir() and not any(out.iterdir())):
        return
    if not (out / MARK).is_file():
        raise InputError(f"{out} is there and holds no demo; choose another --out.")
    if not overwrite:
        raise InputError(f"{out} exists already; choose another --out, or pass --overwrite.")


def _parts(table: UserTable) -> dict[str, UserTable]:
    """Return the users of each node: the first so many, then the next."""
    parts, first = {}, 0
    for name, users in NODES.items():
        start, stop = table.offsets[first], table.offsets[first + users]
        offsets = table.offsets[first : first + users + 1] - start
        ids = table.ids[first : first + users]
        parts[name] = replace(table, X=table.X[start:stop], y=table.y[start:stop], offsets=offsets, ids=ids)
        first += users
    return parts


def _write(part: UserTable, path: Path) -> None:
    columns = {"user": np.repeat(part.ids, part.sizes), "y": part.y}
    pq.write_table(pa.table(columns | {name: part.X[:, j] for j, name in enumerate(FEATURES)}), path)


def _config(port: int) -> str:
    listed = ", ".join(f'"{name}"' for name in FEATURES)
    return f"""[privacy]
epsilon = {EPSILON}
delta = {DELTA}

[model]
kind = "table"
method = "private-fedrep"
rank = {RANK}
user = "user"
target = "y"
features = [{listed}]

[federation]
min_nodes = {len(NODES)}
min_users = {sum(NODES.values())}

[server]
host = "127.0.0.1"
port = {port}
keys = "keys"
"""


def _free_port() -> int:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port: int = free.getsockname()[1]
    return port


# Processes


def _federate(out: Path, port: int, say: Say) -> None:
    """Run server and nodes until all have ended well; whatever happens, none of them is left."""
    privrep = [sys.executable, "-m", "privrep.cli", "federate"]
    commands = {"server": [*privrep, "serve", str(out / "federate.toml"), "--out", str(out / "server")]}
    for name in NODES:
        carried = out / "carry" / name
        data = ["--data", str(out / f"{name}.parquet"), "--folder", str(out / name)]
        with_keys = ["--key", str(carried / "node.key"), "--ca", str(carried / "ca.pem")]
        commands[name] = [*privrep, "join", f"127.0.0.1:{port}", *data, *with_keys]
    with _processes(commands, out) as running:
        logs = {name: _Log(name, out / f"{name}.log", say) for name in commands}
        until = time.monotonic() + PATIENCE
        while any(process.poll() is None for process in running.values()):
            for log in logs.values():
                log.follow()
            _check(running, out)
            if time.monotonic() > until:
                raise InputError(f"the demo took more than {PATIENCE:.0f} seconds; see the logs in {out}.")
            time.sleep(0.05)
        for log in logs.values():
            log.follow()
        _check(running, out)


@contextmanager
def _processes(commands: Mapping[str, Sequence[str]], out: Path) -> Iterator[dict[str, subprocess.Popen[bytes]]]:
    """Start each in a group of its own, so that Ctrl-C reaches this process, which then stops them."""
    running: dict[str, subprocess.Popen[bytes]] = {}
    try:
        for name, command in commands.items():
            with open(out / f"{name}.log", "wb") as log:
                running[name] = subprocess.Popen(
                    command,
                    stdin=subprocess.DEVNULL,
                    stdout=log,
                    stderr=subprocess.STDOUT,
                    env={**os.environ, "OMP_NUM_THREADS": "1", "PYTHONUNBUFFERED": "1"},
                    start_new_session=True,
                )
        yield running
    finally:
        for process in running.values():
            with suppress(ProcessLookupError):
                process.terminate()
        until = time.monotonic() + GRACE
        for process in running.values():
            try:
                process.wait(max(until - time.monotonic(), 0.1))
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()


def _check(running: Mapping[str, subprocess.Popen[bytes]], out: Path) -> None:
    failed = next((name for name, process in running.items() if process.poll() not in (None, 0)), None)
    if failed is not None:
        lines = (out / f"{failed}.log").read_text(errors="replace").split("\n")
        last = next((line for line in reversed(lines) if line.strip()), "it said nothing")
        raise InputError(f"{failed} ended with an error: {last.removeprefix('privrep: ')}")


class _Log:
    """The log of a process, line by line as it comes."""

    def __init__(self, name: str, path: Path, say: Say) -> None:
        self._name, self._path, self._say, self._read = name, path, say, 0

    def follow(self) -> None:
        """Say the lines that are new."""
        with open(self._path, "rb") as file:
            file.seek(self._read)
            new = file.read()
        whole = new[: new.rfind(b"\n") + 1]
        self._read += len(whole)
        for line in whole.decode(errors="replace").splitlines():
            self._say(f"{self._name:>6}: {line}")


# What came of it


def _outcome(
    out: Path, population: Population, table: UserTable, parts: Mapping[str, UserTable], seconds: float
) -> Outcome:
    fitted = models.load(out / "server")
    heads = {name: _heads(out / name / "model", parts[name]) for name in NODES}
    weights = np.concatenate([own.weights(fitted.representation) for own in heads.values()])
    intercepts = np.concatenate([own.intercept for own in heads.values()])
    began = time.monotonic()
    together, spent = _private(table)
    central = time.monotonic() - began
    began = time.monotonic()
    apart = [_private(part) for part in parts.values()]
    each = time.monotonic() - began
    split = [np.concatenate(arrays) for arrays in zip(*(own for own, _ in apart), strict=True)]
    most = max(spent for _, spent in apart)
    found = population.population_mse(weights, intercepts)
    lines = [
        Row("federated, three nodes", found, fitted.privacy.epsilon, True, seconds),
        Row("all data in one place", population.population_mse(*together), spent, False, central),
        Row("each node by itself", population.population_mse(split[0], split[1]), most, False, each),
        Row("each user alone", population.population_mse(*fit_alone(table)), 0.0),
        Row("predict zero", population.null_mse, 0.0),
    ]
    users = ", ".join(f"{count}" for count in NODES.values())
    title = f"nodes of {users} users, {len(FEATURES)} features, rank {RANK}, {ROWS} rows each"
    return Outcome(title, lines, out / "server", [out / name for name in NODES], out / f"{next(iter(NODES))}.parquet")


def _heads(folder: Path, part: UserTable) -> Heads:
    heads = models.load(folder).heads
    if heads is None or heads.ids.tolist() != part.ids.tolist():
        raise InputError(f"{folder} has no heads of its node's users; see the logs of the demo.")
    return heads


def _private(table: UserTable) -> tuple[tuple[Array, Array], float]:
    """Learn the same model from one table, with the same budget; return weights and intercepts, and what was spent."""
    config = Config(rank=RANK, epsilon=EPSILON, delta=DELTA)
    fitted = learn(InMemoryUsers(table), config)
    heads = fit_heads(table.blocks(), fitted.representation)
    return (heads.weights(fitted.representation), heads.intercept), fitted.privacy.epsilon
