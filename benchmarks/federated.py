"""Rounds over Flower nodes against the same rounds in memory, at the Figure 1 setting, in one run.

    python -m benchmarks.federated [--users 20000] [--nodes 3]

A round is what lies between two pages: a trip to all nodes, their passes over their users, checks, noise, the ledger
and the billboard on disk, and the server's own arithmetic. First in memory, then with the users on two simulated nodes
of this process, then on nodes that are processes of their own and come over TLS, with keys, through loopback. Bytes are
counted on the wire, by a relay between nodes and server: TLS, headers and looks for messages included. Settings
that make a round faster or slower are the defaults; the noise is seeded, so all three learn the same.
"""

from __future__ import annotations

import argparse
import os
import socket
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
from experiments.figure1 import DELTA, Setting, draw

from privrep.data.table import UserTable
from privrep.federated.config import FederationSettings
from privrep.federated.credentials import make_keys, read_node_keys, read_server_tls
from privrep.federated.server import serve
from privrep.federated.simulation import simulate, split_by_user
from privrep.federated.task import TableTask
from privrep.models import model as models
from privrep.models.description import Columns, Config
from privrep.models.learning import learn
from privrep.users.memory import InMemoryUsers

SEED, EPSILON = 1, 1.0


@dataclass
class Relay:
    """Hands on what nodes and server send each other, and counts it."""

    up: int = 0
    down: int = 0
    to: int = 0
    listening: socket.socket = field(default_factory=lambda: socket.create_server(("127.0.0.1", 0)))

    def start(self) -> int:
        threading.Thread(target=self._accept, daemon=True).start()
        port: int = self.listening.getsockname()[1]
        return port

    def _accept(self) -> None:
        while True:
            try:
                node, _ = self.listening.accept()
                server = socket.create_connection(("127.0.0.1", self.to))
            except OSError:
                return  # it is over, or the server is not there yet and the node tries again
            for end in (node, server):
                end.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            for one, other, way in ((node, server, "up"), (server, node, "down")):
                threading.Thread(target=self._pass_on, args=(one, other, way), daemon=True).start()

    def _pass_on(self, one: socket.socket, other: socket.socket, way: str) -> None:
        try:
            while data := one.recv(1 << 18):
                setattr(self, way, getattr(self, way) + len(data))
                other.sendall(data)
            other.shutdown(socket.SHUT_WR)
        except OSError:
            other.close()


@dataclass
class Rounds:
    """When pages came, and how many bytes had passed by then."""

    relay: Relay = field(default_factory=Relay)
    pages: list[tuple[float, int, int]] = field(default_factory=list)

    def on_page(self, name: str) -> None:
        self.pages.append((time.perf_counter(), self.relay.up, self.relay.down))

    def spent(self) -> np.ndarray:
        """Seconds, bytes up and bytes down of each round but the first, in which nodes read their rows."""
        return np.diff(np.array(self.pages), axis=0)


def task_of(setting: Setting) -> TableTask:
    names = tuple(f"x{j}" for j in range(setting.features))
    return TableTask(Config(rank=setting.rank, epsilon=EPSILON, delta=DELTA, seed=SEED), Columns("user", ("y",), names))


def write(table: UserTable, path: Path) -> None:
    columns = {"user": np.repeat(table.ids, table.sizes), "y": table.y}
    pq.write_table(pa.table(columns | {f"x{j}": table.X[:, j] for j in range(table.X.shape[1])}), path)


def parts_of(rows: Path, nodes: int, folder: Path) -> list[Path]:
    place = folder / f"{nodes}-files"
    place.mkdir()
    return split_by_user(rows, "user", nodes, place)


def in_memory(task: TableTask, table: UserTable, folder: Path) -> tuple[Rounds, np.ndarray]:
    rounds = Rounds()
    fitted = learn(InMemoryUsers(table), task.config, folder=folder, on_page=lambda page, _: rounds.on_page(page))
    return rounds, fitted.representation.matrix


def simulated(task: TableTask, files: list[Path], folder: Path) -> tuple[Rounds, np.ndarray]:
    rounds = Rounds()
    simulate(task, files, folder, FederationSettings(min_nodes=len(files)), say=silent, on_page=rounds.on_page)
    return rounds, models.load(folder).representation.matrix


def over_tls(task: TableTask, files: list[Path], folder: Path) -> tuple[Rounds, np.ndarray]:
    rounds, keys, carry = Rounds(), folder / "keys", folder / "carry"
    names = [f"node-{number}" for number in range(1, len(files) + 1)]
    make_keys(keys, carry, names, [])
    address = f"127.0.0.1:{rounds.relay.start()}"

    def listening(host: str, port: int) -> None:
        rounds.relay.to = port
        for name, path in zip(names, files, strict=True):
            start(name, path)

    with processes() as run:

        def start(name: str, path: Path) -> None:
            own = carry / name
            with_keys = ["--key", str(own / "node.key"), "--ca", str(own / "ca.pem")]
            run(["join", address, "--data", str(path), "--folder", str(folder / name), "--simulation", *with_keys])

        serve(
            task,
            folder / "model",
            FederationSettings(min_nodes=len(files), round_timeout=10.0),
            host="127.0.0.1",
            port=0,
            tls=read_server_tls(keys, "127.0.0.1"),
            node_keys=read_node_keys(keys),
            say=silent,
            on_page=rounds.on_page,
            on_address=listening,
        )
    rounds.relay.listening.close()
    return rounds, models.load(folder / "model").representation.matrix


@contextmanager
def processes() -> Iterator[Callable[[list[str]], None]]:
    """Nodes, each a process; none of them is left."""
    running: list[subprocess.Popen[bytes]] = []

    def run(arguments: list[str]) -> None:
        command = [sys.executable, "-m", "privrep.cli", "federate", *arguments]
        running.append(subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL, env=ENVIRONMENT))

    try:
        yield run
    finally:
        for process in running:
            try:
                process.wait(5)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()


ENVIRONMENT = {**os.environ, "OMP_NUM_THREADS": "1"}


def silent(what: str) -> None:
    pass


def line(name: str, rounds: Rounds, found: np.ndarray, plain: Rounds, expected: np.ndarray) -> str:
    seconds, up, down = rounds.spent().T
    ratio = np.median(seconds) / np.median(plain.spent()[:, 0])
    bytes_ = f"  {np.median(up) / 1e3:6.1f} kB up, {np.median(down) / 1e3:6.1f} kB down" if up.any() else ""
    apart = np.abs(found @ found.T - expected @ expected.T).max()
    return (
        f"  {name:30} {np.median(seconds):7.3f} s a round (worst {seconds.max():.3f})  ratio {ratio:5.1f}  "
        f"differs by {apart:.0e}{bytes_}"
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--users", type=int, default=Setting.users)
    parser.add_argument("--nodes", type=int, default=3, help="processes that come over TLS")
    arguments = parser.parse_args()
    setting = Setting(users=arguments.users)
    task, table = task_of(setting), draw(setting, SEED).table
    with tempfile.TemporaryDirectory(prefix="privrep-") as scratch:
        folder = Path(scratch)
        write(table, folder / "rows.parquet")
        plain, expected = in_memory(task, table, folder / "in-memory")
        print(f"{setting}, {len(plain.pages)} pages, medians of rounds; ratios to memory", flush=True)
        print(line("in memory", plain, expected, plain, expected), flush=True)
        two = parts_of(folder / "rows.parquet", 2, folder)
        print(line("2 simulated nodes", *simulated(task, two, folder / "simulated"), plain, expected), flush=True)
        files, place = parts_of(folder / "rows.parquet", arguments.nodes, folder), folder / "tls"
        place.mkdir()
        found = over_tls(task, files, place)
        print(line(f"{arguments.nodes} processes over TLS", *found, plain, expected), flush=True)


if __name__ == "__main__":
    main()
