"""A federation of real processes: TLS and keys on loopback, and what is left when some of them are killed.

`PRIVREP_KILLS=10 pytest -s tests/federated/test_processes.py -k killed` kills at ten moments and prints a table.
"""

from __future__ import annotations

import hashlib
import os
import re
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import pytest

pytest.importorskip("flwr")

from flwr.app import Message
from flwr.app.message import remove_content_from_message
from flwr.common.serde import message_to_proto
from flwr.proto.fleet_pb2 import PullMessagesRequest, PushMessagesRequest
from flwr.proto.message_pb2 import ObjectTree
from flwr.supercore.inflatable.inflatable_protobuf_utils import make_push_object_fn_protobuf

from federation import NODES, NUMBERS, TASK, USERS, made_up, write_files
from privrep.data.table import find_users
from privrep.federated.config import FederationSettings
from privrep.federated.credentials import make_keys, read_node_keys
from privrep.federated.node import _make_own_key
from privrep.federated.wire import supernode
from privrep.federated.wire.messages import pack
from privrep.federated.wire.rounds import Conversation
from privrep.federated.wire.superlink import Tls, open_link
from privrep.heads.fitting import fit_heads
from privrep.models import model as models
from privrep.models.learning import learn

KILLS = int(os.environ.get("PRIVREP_KILLS", "0"))
PAGES = 5  # of a run, without the last
PATIENCE = 90.0  # seconds for a run, whatever happens
CONFIG = f"""
[privacy]
epsilon = 20.0
delta = 1e-5
seed = 1

[model]
kind = "table"
rank = 1
user = "user"
target = "y"
features = [{", ".join(f'"{name}"' for name in NUMBERS)}]

[federation]
min_nodes = 3
min_users = {USERS}
wait = 60
round_timeout = 3
resend = 1
poll = 0.02

[server]
host = "127.0.0.1"
port = PORT
keys = "keys"
"""


@dataclass
class Processes:
    """Commands of one federation in one folder. None of them outlives the test."""

    folder: Path
    port: int
    running: dict[str, subprocess.Popen[bytes]] = field(default_factory=dict)

    def start(self, name: str, *more: str, key: Path | None = None, ca: Path | None = None) -> None:
        privrep = [sys.executable, "-m", "privrep.cli", "federate"]
        if name == "server":
            command = [*privrep, "serve", str(self.folder / "federate.toml"), "--out", str(self.folder / "server")]
        else:
            carried = self.folder / "carry" / name
            data = ["--data", str(self.folder / "data" / f"{name}.parquet"), "--folder", str(self.folder / name)]
            keys = ["--key", str(key or carried / "node.key"), "--ca", str(ca or carried / "ca.pem")]
            command = [*privrep, "join", f"127.0.0.1:{self.port}", *data, *keys, "--simulation", *more]
        with open(self.folder / f"{name}.log", "ab") as log:
            self.running[name] = subprocess.Popen(
                command,
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=subprocess.STDOUT,
                env={**os.environ, "OMP_NUM_THREADS": "1", "PYTHONUNBUFFERED": "1"},
                start_new_session=True,
            )

    def kill(self, name: str) -> None:
        process = self.running[name]
        with suppress(ProcessLookupError):
            os.kill(process.pid, signal.SIGKILL)
        process.wait(10)

    def log(self, name: str) -> str:
        path = self.folder / f"{name}.log"
        return path.read_text(errors="replace") if path.exists() else ""

    def pages(self) -> int:
        return len(list((self.folder / "server" / "billboard").glob("*.safetensors")))

    def until(self, name: str, words: str, seconds: float = PATIENCE) -> None:
        """Wait for a line of a process's log."""
        end = time.monotonic() + seconds
        while not re.search(words, self.log(name)):
            assert time.monotonic() < end, f"{name} never said {words!r}: {self.log(name)[-2000:]}"
            time.sleep(0.02)

    def ended(self, names: Sequence[str], seconds: float = PATIENCE) -> list[int]:
        end = time.monotonic() + seconds
        codes = []
        for name in names:
            try:
                codes.append(self.running[name].wait(max(end - time.monotonic(), 0.1)))
            except subprocess.TimeoutExpired:
                pytest.fail(f"{name} did not end: {self.log(name)[-2000:]}")
        return codes

    def stop(self) -> None:
        for name in self.running:
            self.kill(name)


def free_port() -> int:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port: int = free.getsockname()[1]
    return port


def prepared(folder: Path) -> Processes:
    folder.mkdir(parents=True, exist_ok=True)
    made = Processes(folder, free_port())
    write_files(folder / "data", made_up())
    make_keys(folder / "keys", folder / "carry", list(NODES), [])
    (folder / "federate.toml").write_text(CONFIG.replace("PORT", str(made.port)))
    return made


@pytest.fixture
def processes(tmp_path: Path) -> Iterator[Processes]:
    made = prepared(tmp_path / "run")
    try:
        yield made
    finally:
        made.stop()


@dataclass
class Undisturbed:
    folder: Path
    seconds: float
    rounds: Any  # seconds of each but the first


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Undisturbed]:
    """One run in which nothing happens."""
    made = prepared(tmp_path_factory.mktemp("undisturbed"))
    try:
        for name in ("server", *NODES):
            made.start(name)
        made.until("server", "Listening")
        began = time.monotonic()
        codes = made.ended(["server", *NODES])
        assert codes == [0] * 4, [made.log(name) for name in ("server", *NODES)]
        seconds = time.monotonic() - began
        written = sorted(path.stat().st_mtime for path in (made.folder / "server" / "billboard").iterdir())
        yield Undisturbed(made.folder, seconds, np.diff(written)[:-1])  # the last page is asked of nobody
    finally:
        made.stop()


def heads_of(folder: Path) -> dict[str, Any]:
    """Of each node: the predictions of its users' heads on one probe."""
    found = {}
    probe = np.eye(len(NUMBERS))
    for name in NODES:
        model = models.load(folder / name / "model")
        assert model.heads is not None
        assert len(model.heads.ids) == NODES[name]
        private = folder / name / "model" / "private"
        assert private.stat().st_mode & 0o777 == 0o700
        assert (private / "heads.parquet").stat().st_mode & 0o777 == 0o600
        found[name] = np.stack(
            [
                model.heads.predict(model.representation, probe, np.full(len(probe), place))
                for place in range(len(model.heads.ids))
            ]
        )
    return found


def test_three_processes_over_tls_learn_what_one_place_learns(undisturbed: Undisturbed) -> None:
    folder = undisturbed.folder
    with TASK.open(folder / "data" / "all.parquet") as users:
        one = learn(users, TASK.config, columns=TASK.columns)
        heads = fit_heads(users.table.blocks(), one.representation)  # type: ignore[attr-defined]
    three = models.load(folder / "server")
    assert np.array_equal(three.representation.matrix, one.representation.matrix)
    assert three.heads is None
    assert three.privacy.epsilon == one.privacy.epsilon
    probe = np.eye(len(NUMBERS))
    for name, found in heads_of(folder).items():
        kept = models.load(folder / name / "model").heads
        assert kept is not None
        places = find_users(heads.ids, kept.ids)
        for row, place in zip(found, places, strict=True):
            wanted = heads.predict(one.representation, probe, np.full(len(probe), place))
            assert np.array_equal(row, wanted)
    rounds = undisturbed.rounds
    print(
        f"over TLS: {np.median(rounds):.3f} s a round, {rounds.max():.3f} s at most; {undisturbed.seconds:.1f} s in all"
    )


@pytest.mark.filterwarnings("ignore::DeprecationWarning")  # of libraries that serve HTTP
def test_a_key_or_a_ca_that_is_not_known_is_one_sentence(processes: Processes, tmp_path: Path) -> None:
    other, keys = tmp_path / "other", processes.folder / "keys"
    make_keys(other / "keys", other / "carry", ["a"], [])
    tls = Tls(keys / "server.pem", keys / "server.key")
    with open_link("127.0.0.1", processes.port, tls, read_node_keys(keys)) as link:
        processes.start("a", key=other / "carry" / "a" / "node.key")
        processes.start("b", ca=other / "carry" / "a" / "ca.pem")
        assert processes.ended(["a", "b"], 45.0) == [2, 2]
        assert link.nodes() == {}
    for name, words in (("a", "refuses this node's key"), ("b", "certificate is not one that the given CA signed")):
        lines = [line for line in processes.log(name).splitlines() if line.startswith("privrep: ")]
        assert len(lines) == 1
        assert words in lines[0]
        assert "Traceback" not in processes.log(name)


@pytest.mark.filterwarnings("ignore::DeprecationWarning")
def test_an_answer_that_flower_cannot_read_is_left_out(tmp_path: Path) -> None:
    """A node may store with the server whatever bytes it likes, under the name that Flower's protocol gives them."""
    key, said = _make_own_key(tmp_path / "key"), list[str]()
    spoiled = [b"Message  7\x00garbage", b"ConfigRecord  3\x00abc"]
    with open_link("127.0.0.1", 0, None, None) as link:

        def node() -> None:
            with (
                supernode._open_client(f"127.0.0.1:{link.port}", key, None, True) as client,
                supernode._join(client, key, tmp_path / "number", True) as joined,
            ):
                for data in spoiled:
                    send_garbage(client, joined, data)

        thread = threading.Thread(target=node, daemon=True)
        thread.start()
        talk = Conversation(
            link,
            FederationSettings(wait=20, round_timeout=10, resend=10, poll=0.02),
            said.append,
            lambda name: pack({}),
        )
        end = time.monotonic() + 20
        while not link.nodes():
            assert time.monotonic() < end
            time.sleep(0.02)
        for number in range(len(spoiled)):
            question = pack({"number": number})
            found = talk.collect(
                "sums", f"question {number}", set(link.nodes()), lambda name, question=question: question,
                lambda name, content: content, lambda names: True,
            )  # fmt: skip
            assert found == {}
        thread.join(10)
    assert [each.split(" ", 3)[3] for each in said] == ["is left out: its answer is damaged"] * len(spoiled)


def send_garbage(client: Any, node: Any, data: bytes) -> None:
    """In answer to the next message."""
    while not (asked := client.PullMessages(PullMessagesRequest(node=node))).messages_list:
        time.sleep(0.02)
    run_id, name = asked.messages_list[0].metadata.run_id, hashlib.sha256(data).hexdigest()
    message = supernode._fetch(client, node, run_id, asked.message_object_trees[0])
    reply = message_to_proto(remove_content_from_message(Message(pack({}), reply_to=message)))
    reply.metadata.message_id = name
    request = PushMessagesRequest(
        node=node,
        messages_list=[reply],
        message_object_trees=[ObjectTree(object_id=name)],
        clientapp_runtime_list=[0.1],
    )
    session = client.PushMessages(request).session_id
    make_push_object_fn_protobuf(client.PushObject, node, run_id, session)(name, data)


WHO = [("server",), ("b",), ("server", "b")]
Kill = tuple[tuple[str, ...], int, float]  # who, once so many pages stand, so many seconds later


def test_what_is_killed_goes_on_where_it_was(undisturbed: Undisturbed, tmp_path: Path) -> None:
    """Three kills in one run; or, if the environment asks for more, as many runs with one kill each."""
    rng, kills = np.random.default_rng(int(os.environ.get("PRIVREP_KILL_SEED", "0"))), KILLS or 3
    if KILLS:
        moments = [(WHO[n % 3], 0, float(rng.uniform(0.0, undisturbed.seconds))) for n in range(kills)]
        runs: list[list[Kill]] = [[moment] for moment in moments]
    else:
        pages = np.sort(rng.choice(PAGES, kills, replace=False)).tolist()
        runs = [[(who, page, float(rng.uniform(0.0, 0.2))) for who, page in zip(WHO, pages, strict=True)]]
    table = [line for n, run in enumerate(runs) for line in killed(tmp_path / f"run-{n}", run, undisturbed.folder)]
    print("\nkilled          after  pages there  seconds in all  more charges  heads differ by")
    for who, after, there, seconds, more, difference in table:
        print(f"{who:<14} {after:5.2f}s  {there:11}  {seconds:14.1f}  {more:12}  {difference:15.1e}")
    assert len(table) == kills


def killed(folder: Path, kills: Sequence[Kill], undisturbed: Path) -> list[tuple[str, float, int, float, int, float]]:
    """A run in which processes are killed and started again: what became of it, a line for each kill."""
    made, began, moments = prepared(folder), time.monotonic(), []
    try:
        for name in ("server", *NODES):
            made.start(name)
        made.until("server", "Listening")
        first = time.monotonic()
        for who, page, after in kills:
            while made.pages() < page and made.running["server"].poll() is None:
                assert time.monotonic() < began + PATIENCE, made.log("server")[-2000:]
                time.sleep(0.01)
            time.sleep(after)
            for name in who:
                made.kill(name)
            moments.append((" and ".join(who), time.monotonic() - first, made.pages()))
            for name in who:
                made.start(name)
        codes = made.ended(["server", *NODES])
        assert codes == [0] * 4, [made.log(name)[-1500:] for name in ("server", *NODES)]
    finally:
        made.stop()
    seconds = time.monotonic() - began
    model, wanted = models.load(folder / "server"), models.load(undisturbed / "server")
    found, whole = model.ledger.entries.charges, wanted.ledger.entries.charges
    assert 0 <= len(found) - len(whole) <= len(kills)
    assert {name: found[name] for name in whole} == whole
    assert np.array_equal(model.representation.matrix, wanted.representation.matrix)
    heads, intact = heads_of(folder), heads_of(undisturbed)
    difference = max(float(np.abs(heads[name] - intact[name]).max()) for name in NODES)
    assert difference <= 1e-5
    return [(*moment, seconds, len(found) - len(whole), difference) for moment in moments]
