"""A federation whose server and nodes are processes of their own, so that each can be killed by itself.

Messages are Flower's, as on a network. They travel over sockets of this machine, and are sent again until answered.
"""

from __future__ import annotations

import socket
import struct
import sys
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
from killing import Death, haunt

USERS = {"a": 16, "b": 12, "c": 8}  # of each node
ROWS, NAMES = 6, ("x0", "x1", "x2", "x3")
AGAIN = 0.01  # seconds until a message to a node that is away is sent again


def write_rows(place: Path) -> None:
    """Write the rows of each node."""
    rng, first = np.random.default_rng(3), 0
    for name, users in USERS.items():
        user = first + np.repeat(np.arange(users), ROWS)
        X = rng.normal(size=(len(user), len(NAMES)))
        y = X[:, 0] * (1 + rng.normal(size=users))[user - first] + 0.1 * rng.normal(size=len(user))
        table = {"user": user, "y": y, **{column: X[:, j] for j, column in enumerate(NAMES)}}
        pq.write_table(pa.table(table), place / f"{name}.parquet")
        first += users


@dataclass(frozen=True)
class FarNode:
    """The app of a node in another process, for the server's grid."""

    address: str

    def __call__(self, message: Any, context: Any) -> Any:
        from flwr.app import Message
        from flwr.common.serde import message_to_proto, recorddict_from_proto
        from flwr.proto.recorddict_pb2 import RecordDict

        asked = message_to_proto(message).SerializeToString()
        while True:
            try:
                with socket.socket(socket.AF_UNIX) as line:
                    line.connect(self.address)
                    _send(line, asked)
                    answered = _receive(line)
                return Message(recorddict_from_proto(RecordDict.FromString(answered)), reply_to=message)
            except OSError:
                time.sleep(AGAIN)


def _send(line: socket.socket, content: bytes) -> None:
    line.sendall(struct.pack("<Q", len(content)) + content)


def _receive(line: socket.socket) -> bytes:
    """Return a whole message. Raise ConnectionError if the other side died within it."""
    (size,) = struct.unpack("<Q", _receive_bytes(line, 8))
    return _receive_bytes(line, size)


def _receive_bytes(line: socket.socket, size: int) -> bytes:
    found = b""
    while len(found) < size:
        more = line.recv(size - len(found))
        if not more:
            raise ConnectionResetError
        found += more
    return found


def _address(place: Path, name: str) -> str:
    """Return the address of a node: a name that the system forgets when its process dies."""
    return f"\0{place}/{name}"[:100]


def serve(place: Path, death: Death, noise_nodes: int) -> None:
    """Run the server of a federation in place/fit; the nodes may leave when it ends."""
    from privrep.federated.config import FederationSettings
    from privrep.federated.server import run_federation
    from privrep.federated.task import TableTask
    from privrep.federated.wire.in_process import LocalNodes
    from privrep.models.description import Columns, Config
    from privrep.privacy.population import Account, PopulationLedger

    haunt(death, None)
    assert death.population is not None
    nodes = LocalNodes({name: FarNode(_address(place, name)) for name in USERS})  # type: ignore[misc]
    by = {"noise_nodes": noise_nodes, "noise": "nodes"} if noise_nodes > 1 else {}
    settings = FederationSettings(wait=60.0, round_timeout=30.0, resend=20.0, poll=0.002, **by)  # type: ignore[arg-type]
    task = TableTask(Config(1, epsilon=20.0, delta=1e-5), Columns("user", ("y",), NAMES))
    account = Account(PopulationLedger(death.population), "a federation")
    run_federation(nodes, task, place / "fit", settings, len(USERS), _ignore, _ignore, account)
    (place / "over").touch()


def answer(place: Path, death: Death, name: str) -> None:
    """Answer for a node's users until the federation is over."""
    from flwr.app import Context, RecordDict
    from flwr.common.serde import message_from_proto, recorddict_to_proto
    from flwr.proto.message_pb2 import Message

    from privrep.federated.node import Host
    from privrep.privacy.population import PopulationLedger

    haunt(death, None)
    assert death.population is not None
    folder = place / name
    folder.mkdir(exist_ok=True, mode=0o700)
    population = PopulationLedger(death.population)
    host = Host(place / f"{name}.parquet", folder, _note, population=population)
    app = host.make_app()
    with socket.socket(socket.AF_UNIX) as door:
        door.bind(_address(place, name))
        door.listen()
        door.settimeout(0.05)
        while not (place / "over").exists():
            try:
                line, _ = door.accept()
            except TimeoutError:
                continue
            with line:
                try:
                    asked = message_from_proto(Message.FromString(_receive(line)))
                    reply = app(asked, Context(1, 1, {}, RecordDict(), {}))
                    _send(line, recorddict_to_proto(reply.content).SerializeToString())
                except OSError:
                    continue  # the server died, and asks again when it is back
    host.close()


def _ignore(what: str) -> None:
    """Ignore what a server says."""


def _note(what: str) -> None:
    """Print what a node could not answer: nothing of it is meant to happen."""
    if what.startswith("not answered"):
        print(what, file=sys.stderr, flush=True)
