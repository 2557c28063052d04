"""What tests of federations share: a small population on three nodes, and a wire that records, loses and spoils."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
from flwr.app import RecordDict
from flwr.common.serde import recorddict_to_proto
from numpy.typing import NDArray

from privrep.federated.agreement import Agreement
from privrep.federated.config import FederationSettings
from privrep.federated.node import Host
from privrep.federated.server import run_federation
from privrep.federated.task import TableTask, Task
from privrep.federated.wire.in_process import LocalNodes
from privrep.federated.wire.messages import pack, unpack
from privrep.federated.wire.rounds import Conversation
from privrep.federated.wire.users import FlowerUsers, NoisyFlowerUsers
from privrep.models.description import Columns, Config
from privrep.privacy.bounds import Bound

NODES = {"a": 16, "b": 12, "c": 8}  # users of each
USERS, ROWS, FEATURES = sum(NODES.values()), 6, 4
NUMBERS = tuple(f"x{j}" for j in range(FEATURES))
COLUMNS = Columns("user", ("y",), NUMBERS)
LABELS = Columns("user", ("label",), NUMBERS, classes=("no", "yes"))
BUDGET: dict[str, Any] = {"epsilon": 20.0, "delta": 1e-5, "seed": 1}
TASK = TableTask(Config(1, **BUDGET), COLUMNS)
PATIENT: dict[str, Any] = {"wait": 60.0, "round_timeout": 30.0, "resend": 20.0, "poll": 0.002}
QUICK: dict[str, Any] = {"wait": 2.0, "round_timeout": 0.3, "resend": 0.1}  # where nodes fail
RUN = "0123456789abcdef"
BOUND = Bound(1.0, FEATURES)


def made_up(seed: int = 3) -> dict[str, NDArray[Any]]:
    """Rows of users whose regressions share one direction."""
    rng = np.random.default_rng(seed)
    user = np.repeat(np.arange(USERS), ROWS)
    X = rng.normal(size=(len(user), FEATURES))
    y = X[:, 0] * (1 + rng.normal(size=USERS))[user] + 0.1 * rng.normal(size=len(user))
    made: dict[str, NDArray[Any]] = {"user": 7_340_033_000_000 + user, "y": y}
    made |= {name: X[:, j] for j, name in enumerate(NUMBERS)}
    return {**made, "label": np.array(["no", "yes"])[(y > 0).astype(int)]}


def write_files(folder: Path, rows: Mapping[str, NDArray[Any]]) -> tuple[Path, list[Path]]:
    """One file of all users, and one of each node."""
    first = int(rows["user"].min())
    places, ends = rows["user"] - first, np.cumsum([0, *NODES.values()])
    folder.mkdir(exist_ok=True)
    paths = [folder / f"{name}.parquet" for name in NODES]
    for path, start, stop in zip(paths, ends, ends[1:], strict=False):
        mine = (places >= start) & (places < stop)
        pq.write_table(pa.table({name: values[mine] for name, values in rows.items()}), path)
    pq.write_table(pa.table(dict(rows)), folder / "all.parquet")
    return folder / "all.parquet", paths


@dataclass
class Passed:
    """One message on the wire."""

    way: str  # "down" or "up"
    node: str
    kind: str  # hello, sums, model
    content: RecordDict

    @property
    def fields(self) -> dict[str, Any]:
        return unpack(self.content)[0]

    @property
    def arrays(self) -> dict[str, NDArray[Any]]:
        return unpack(self.content)[1]

    @property
    def raw(self) -> bytes:
        """As it is on the wire, inside TLS."""
        data: bytes = recorddict_to_proto(self.content).SerializeToString()
        return data


class Lost(Exception):
    """An answer that never arrives."""


class Broken(Exception):
    """An answer that Flower itself cannot read."""


Fault = Callable[[Passed, dict[str, Any]], RecordDict]  # of an answer and the fields of its question, what arrives


def honest(passed: Passed, asked: Mapping[str, Any]) -> RecordDict:
    return passed.content


@dataclass
class Wire:
    """Nodes of this process, all messages of which are recorded, and answers go through `fault`."""

    inner: LocalNodes
    fault: Fault = honest
    away: set[str] = field(default_factory=set)
    twice: bool = False  # every answer is delivered twice
    slow: dict[str, float] = field(default_factory=dict)  # seconds that a node's answers take longer
    record: list[Passed] = field(default_factory=list)
    _asked: dict[str, tuple[str, str, dict[str, Any]]] = field(default_factory=dict)
    _held: dict[str, tuple[float, Any]] = field(default_factory=dict)

    @property
    def grid(self) -> Any:
        return self

    def nodes(self) -> dict[str, int]:
        return {name: number for name, number in self.inner.nodes().items() if name not in self.away}

    def push_messages(self, messages: Iterable[Any]) -> list[str]:
        numbers, sent = {number: name for name, number in self.inner.nodes().items()}, []
        for message in messages:
            name, kind = numbers[message.metadata.dst_node_id], message.metadata.message_type.split(".")[1]
            passed = Passed("down", name, kind, message.content)
            self.record.append(passed)
            (number,) = self.inner.grid.push_messages([message])
            self._asked[number] = (name, kind, passed.fields)
            sent.append(number)
        return sent

    def pull_messages(self, numbers: Iterable[str]) -> list[Any]:
        found: list[Any] = []
        for number in numbers:
            name, kind, asked = self._asked[number]
            for reply in self.inner.grid.pull_messages([number]):
                self._held[number] = (time.monotonic() + self.slow.get(name, 0.0), reply)
            if number not in self._held or name in self.away or time.monotonic() < self._held[number][0]:
                continue
            passed = Passed("up", name, kind, self._held.pop(number)[1].content)
            self.record.append(passed)
            try:
                content = self.fault(passed, asked)
            except Lost:
                continue
            arrived = SimpleNamespace(content=content, has_error=lambda: False)
            found += [arrived, arrived] if self.twice else [arrived]
        return found


@dataclass
class Federation:
    """Three hosts in this process, and what the server said."""

    task: Task
    hosts: dict[str, Host]
    wire: Wire
    settings: FederationSettings
    said: list[str] = field(default_factory=list)
    noise: dict[str, float] | None = None

    def run(self, folder: Path, on_page: Callable[[str], None] = lambda page: None) -> Path:
        run_federation(self.wire, self.task, folder, self.settings, len(self.hosts), self.said.append, on_page)
        return folder

    def greet(self, name: str) -> RecordDict:
        task = self.task.with_users(USERS).to_json()
        return pack({"run": RUN, "name": name, "task": task, "begin": True, "noise": self.noise})

    def engine(self) -> FlowerUsers:
        """The engine alone: nodes are told of the run, and nothing is learned yet."""
        for name, host in self.hosts.items():
            host.answer_hello(self.greet(name))
        talk = Conversation(self.wire, self.settings, self.said.append, self.greet)
        roster = {name: self.task.read_facts(host.data) for name, host in self.hosts.items()}
        told = self.task.with_users(USERS)
        shape = (told.features, told.targets, told.sparse)
        if self.noise is None:
            return FlowerUsers(talk, RUN, roster, shape)
        return NoisyFlowerUsers(talk, RUN, roster, shape, self.settings.noise_nodes)

    def heard(self, words: str) -> bool:
        return any(words in each for each in self.said)


@contextmanager
def federation(
    task: Task,
    files: Sequence[Path],
    folder: Path,
    *,
    fault: Fault = honest,
    noise: dict[str, float] | None = None,
    agreed: Agreement | None = None,
    simulation: bool = True,
    **settings: Any,
) -> Iterator[Federation]:
    """`noise` is what nodes are told when only the engine is asked; more than one of `noise_nodes` means theirs."""
    hosts = {}
    for name, path in zip(NODES, files, strict=False):
        (folder / name).mkdir(parents=True, exist_ok=True, mode=0o700)
        hosts[name] = Host(path, folder / name, lambda what: None, agreed=agreed, simulation=simulation)
    inner = LocalNodes({name: host.make_app() for name, host in hosts.items()})
    try:
        given = {**PATIENT, **settings, **({"noise": "nodes"} if settings.get("noise_nodes", 1) > 1 else {})}
        yield Federation(task, hosts, Wire(inner, fault), FederationSettings(**given), noise=noise)
    finally:
        inner.grid.close()
        for host in hosts.values():
            host.close()
