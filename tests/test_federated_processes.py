"""A federation of real processes: TLS and keys on loopback, and what is left when some of them are killed.

`PRIVREP_KILLS=10 pytest -s tests/test_federated_processes.py -k killed` kills at ten moments and prints a table.
"""

from __future__ import annotations

import os
import re
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import pytest

pytest.importorskip("flwr")

from federation import NODES, NUMBERS, TASK, USERS, made_up, write_files

from privrep import model as models
from privrep.data.user_table import find_users
from privrep.federated.credentials import make_keys
from privrep.heads import fit_heads
from privrep.privacy.ledger import read_ledger

KILLS = int(os.environ.get("PRIVREP_KILLS", "3"))
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
            command = [*privrep, "join", f"127.0.0.1:{self.port}", *data, *keys, *more]
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
    rounds: float


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Undisturbed]:
    """One run in which nothing happens."""
    made = prepared(tmp_path_factory.mktemp("undisturbed"))
    try:
        for name in ("server", *NODES):
            made.start(name)
        made.until("server", "nodes with")
        began = time.monotonic()
        codes = made.ended(["server", *NODES])
        assert codes == [0] * 4, [made.log(name) for name in ("server", *NODES)]
        pages = len(read_ledger(made.folder / "server" / "ledger.jsonl")._posted)
        seconds = time.monotonic() - began
        yield Undisturbed(made.folder, seconds, seconds / pages)
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
        one = models.learn(users, TASK.config, columns=TASK.columns)
        heads = fit_heads(users.table.blocks(), one.representation)  # type: ignore[attr-defined]
    three = models.load(folder / "server")
    np.testing.assert_allclose(three.representation.matrix, one.representation.matrix, atol=1e-5)
    assert three.heads is None
    assert three.privacy.epsilon == one.privacy.epsilon
    probe = np.eye(len(NUMBERS))
    for name, found in heads_of(folder).items():
        kept = models.load(folder / name / "model").heads
        assert kept is not None
        places = find_users(heads.ids, kept.ids)
        for row, place in zip(found, places, strict=True):
            wanted = heads.predict(one.representation, probe, np.full(len(probe), place))
            np.testing.assert_allclose(row, wanted, atol=1e-5)
    print(f"over TLS: {undisturbed.seconds:.2f} s for all rounds, {undisturbed.rounds:.3f} s a round")


def test_a_key_or_a_ca_that_is_not_known_is_one_sentence(processes: Processes, tmp_path: Path) -> None:
    other = tmp_path / "other"
    make_keys(other / "keys", other / "carry", ["a"], [])
    processes.start("server")
    processes.until("server", "Listening")
    processes.start("a", key=other / "carry" / "a" / "node.key")
    processes.start("b", ca=other / "carry" / "a" / "ca.pem")
    assert processes.ended(["a", "b"], 30.0) == [2, 2]
    for name, words in (("a", "refuses this node's key"), ("b", "certificate is not one that the given CA signed")):
        lines = [line for line in processes.log(name).splitlines() if line.startswith("privrep: ")]
        assert len(lines) == 1
        assert words in lines[0]
        assert "Traceback" not in processes.log(name)
    assert "joined" not in processes.log("server")
    assert processes.running["server"].poll() is None


WHO = [("server",), ("b",), ("server", "b")]


def test_what_is_killed_goes_on_where_it_was(undisturbed: Undisturbed, tmp_path: Path) -> None:
    rng, table = np.random.default_rng(int(os.environ.get("PRIVREP_KILL_SEED", "0"))), []
    wanted, wanted_heads = models.load(undisturbed.folder / "server"), heads_of(undisturbed.folder)
    for number in range(KILLS):
        who = WHO[number % len(WHO)]
        after = float(rng.uniform(0.0, 1.0)) * undisturbed.seconds
        table.append(killed(tmp_path / f"run-{number}", who, after, wanted, wanted_heads))
    print("\nkilled          after  page     seconds  more charges  heads")
    for who, after, page, seconds, more, difference in table:
        print(f"{who:<14} {after:5.2f}s  {page:<7}  {seconds:7.1f}  {more:12}  {difference:.1e}")
    assert len(table) == KILLS


def killed(
    folder: Path, who: tuple[str, ...], after: float, wanted: models.Model, wanted_heads: dict[str, Any]
) -> tuple[str, float, str, float, int, float]:
    """One run in which some processes are killed so many seconds after the first round began, and started again."""
    made = prepared(folder)
    began = time.monotonic()
    try:
        for name in ("server", *NODES):
            made.start(name)
        made.until("server", "nodes with")
        time.sleep(after)
        for name in who:
            made.kill(name)
        pages = len(list((folder / "server" / "billboard").glob("*"))) if (folder / "server").exists() else 0
        for name in who:
            made.start(name)
        codes = made.ended(["server", *NODES])
        assert codes == [0] * 4, [made.log(name)[-1500:] for name in ("server", *NODES)]
    finally:
        made.stop()
    found, stands = read_ledger(folder / "server" / "ledger.jsonl"), wanted.privacy
    whole = set(map(str, wanted_entries(wanted)))
    more = len(set(found._entries) - whole)
    assert more <= 1
    assert whole <= set(found._entries)
    assert found.epsilon >= stands.epsilon * (1 - 1e-12)
    model = models.load(folder / "server")
    np.testing.assert_allclose(model.representation.matrix, wanted.representation.matrix, atol=1e-5)
    heads = heads_of(folder)
    difference = max(float(np.abs(heads[name] - wanted_heads[name]).max()) for name in NODES)
    assert difference <= 1e-5
    return " and ".join(who), after, f"{pages}", time.monotonic() - began, more, difference


def wanted_entries(model: models.Model) -> list[str]:
    return list(ENTRIES)


ENTRIES: list[str] = []
