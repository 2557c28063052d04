"""The server of a federation: it finds the nodes, learns from them, and hands the model to everyone at the end.

FOLDER                   the run, and at its end the model: all of it safe to publish
FOLDER.federation/       for the operator: who takes part and with how many users (roster.json), and what happened (log)

A server that was stopped goes on with the same command. The roster stands, pages on the billboard are read, and charges
are never made twice. The run is a new one for Flower alone.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Mapping
from pathlib import Path

import numpy as np
from flwr.app import RecordDict
from numpy.typing import NDArray

from privrep.errors import InputError
from privrep.federated.agreement import compute_nodes_view, compute_server_view
from privrep.federated.config import FederationSettings
from privrep.federated.credentials import ServerTls
from privrep.federated.run_log import RunLog
from privrep.federated.task import Task
from privrep.federated.wire.messages import pack, unpack
from privrep.federated.wire.rounds import Conversation, Nodes
from privrep.federated.wire.users import FlowerUsers, NoisyFlowerUsers, read_facts
from privrep.models.folder import write_json
from privrep.privacy.bounds import MAX_USERS
from privrep.privacy.population import Account
from privrep.privacy.protocol import Facts

Say = Callable[[str], None]
FACTS = "federation.json"  # in the folder of a model: who added the noise
LOOK = 0.1  # seconds between two looks for nodes


def serve(
    task: Task,
    folder: Path,
    settings: FederationSettings,
    *,
    host: str,
    port: int,
    tls: ServerTls | None,
    node_keys: Mapping[str, bytes] | None,
    say: Say,
    on_page: Callable[[str], None],
    on_address: Callable[[str, int], None] = lambda host, port: None,
    account: Account | None = None,
) -> None:
    """Listen for nodes, learn, and hand out the model.

    Args:
        task: what is learned.
        folder: the folder of the run, which becomes the model's.
        settings: when a round goes on, and who adds the noise.
        host: the address to listen at.
        port: its port; 0 takes any that is free.
        tls: the server's certificate; None is for loopback alone.
        node_keys: public keys of the nodes that are let in, by name; None lets any node in, on loopback alone.
        say: told what happens.
        on_page: told the name of each release.
        on_address: told host and port once the server listens.
        account: with the population ledger that the budget is reserved from; None: with none.
    """
    from privrep.federated.wire.superlink import Tls, open_link

    files = None if tls is None else Tls(tls.certificate, tls.key)
    with open_link(host, port, files, node_keys) as link:
        on_address(host, link.port)
        run_federation(
            link, task, folder, settings, None if node_keys is None else len(node_keys), say, on_page, account
        )


def run_federation(
    nodes: Nodes,
    task: Task,
    folder: Path,
    settings: FederationSettings,
    expected: int | None,
    say: Say,
    on_page: Callable[[str], None],
    account: Account | None = None,
) -> None:
    """Run a whole federation, wherever the nodes are.

    Args:
        nodes: where the nodes are.
        task: what is learned.
        folder: the folder of the run, which becomes the model's.
        settings: when a round goes on, and who adds the noise.
        expected: how many nodes there can be, if that is known.
        say: told what happens.
        on_page: told the name of each release.
        account: with the population ledger that the budget is reserved from; None: with none.
    """
    books = RunLog(folder, say)
    noise = compute_server_view(task, settings)
    books.claim(task, settings)
    finished = (folder / "model.json").is_file()
    greetings = _Greetings(books, task, noise)
    talk = Conversation(nodes, settings, books.say, greetings)
    roster = books.read_roster() or _gather_nodes(talk, nodes, settings, expected, books, greetings)
    total = sum(facts.users for facts in roster.values())
    greetings.begin(task.with_users(total))
    shape = (greetings.task.features, greetings.task.targets, greetings.task.sparse)
    users = (
        FlowerUsers(talk, books.run, roster, shape)
        if noise is None
        else NoisyFlowerUsers(talk, books.run, roster, shape, settings.noise_nodes)
    )
    books.say(f"{len(roster)} nodes with {users.facts.users:,} users take part")
    if noise is not None and settings.noise_nodes >= len(roster) > 1:
        view = compute_nodes_view(task, settings.noise_nodes, len(roster) - 1)
        books.say(f"each node knows its own noise: of other nodes' users it learns epsilon {view:.3g}; see noise_nodes")
    if finished:
        greetings.task.check_own(folder)
    else:
        talk.collect("hello", "begin", set(roster), greetings, _check_ready, lambda names: True, everyone=True)
        greetings.task.learn(users, folder, on_page, account)
    learns = None if noise is None else noise["epsilon"]
    write_json(folder / FACTS, {"noise": settings.noise, "noise_nodes": settings.noise_nodes, "server_epsilon": learns})
    _hand_out(talk, nodes, greetings.task, folder, books)


class _Greetings:
    """The hello of a run: first a question after facts, then, with the number of all users, the beginning."""

    def __init__(self, books: RunLog, task: Task, noise: dict[str, float] | None) -> None:
        self._books, self.task, self._noise, self._begun = books, task, noise, False

    def begin(self, task: Task) -> None:
        """Take the task with the number of all users; every later hello says that the run has begun."""
        self.task, self._begun = task, True

    def __call__(self, name: str) -> RecordDict:
        """Return the hello for the node of this name."""
        fields = {"run": self._books.run, "name": name, "task": self.task.to_json()}
        return pack({**fields, "begin": self._begun, "noise": self._noise})


def _gather_nodes(
    talk: Conversation,
    nodes: Nodes,
    settings: FederationSettings,
    expected: int | None,
    books: RunLog,
    greetings: _Greetings,
) -> dict[str, Facts]:
    """Wait for nodes, and return the facts of each that takes part, by name.

    All take part that have joined when `min_nodes` have, or within the while that is given to others. InputError says
    if too few come in time.

    Args:
        talk: asks nodes, and waits for answers.
        nodes: where the nodes are.
        settings: how many nodes it takes, and how long to wait.
        expected: how many nodes there can be, if that is known.
        books: the operator's files; the roster is kept there.
        greetings: makes the hello for each node.
    """
    roster: dict[str, Facts] = {}
    began, enough_since = time.monotonic(), math.inf
    least = max(settings.min_nodes, settings.noise_nodes)
    refusing: set[str] = set()
    books.say(f"waiting for {least} nodes or more")
    while True:
        new = set(nodes.nodes()) - set(roster) - refusing
        if new:
            found = talk.collect("hello", "hello", new, greetings, _read_facts, lambda names: True, everyone=True)
            refusing |= new - set(found) - talk.missing  # silent nodes are asked again
            for name, facts in sorted(found.items()):
                if facts.users <= settings.most_users and _can_join(facts, roster, greetings.task):
                    books.say(f"{name} joined with {facts.users:,} users")
                    roster[name] = facts
                else:
                    books.say(f"{name} is left out: its rows are of another shape, or its users too many for one sum")
                    refusing.add(name)
        now = time.monotonic()
        if len(roster) >= least:
            enough_since = min(enough_since, now)
            if len(roster) >= (expected or math.inf) or now - enough_since > min(settings.round_timeout, 10.0):
                break
        if now - began > settings.wait:
            raise InputError(
                f"{len(roster)} nodes joined in {settings.wait:g} s, and it takes {least}; nothing was spent. Start "
                "more (the log says who was left out, and why), or lower min_nodes, and run the same command again."
            )
        time.sleep(LOOK)
    books.keep_roster(roster)
    return roster


def _can_join(facts: Facts, roster: Mapping[str, Facts], task: Task) -> bool:
    """Return whether a node can join a roster: one that cannot is to stop nobody else.

    Args:
        facts: the node's users and the shape of its rows.
        roster: the facts of the nodes that have joined.
        task: says which shape rows must have, and how they are counted.
    """
    users = facts.users + sum(each.users for each in roster.values())
    shape = (facts.features, facts.targets, facts.sparse)
    return shape == task.file_shape and users <= MAX_USERS


def _read_facts(name: str, content: RecordDict) -> Facts:
    """Return the facts in a node's answer to a hello."""
    fields, arrays = unpack(content)
    if arrays:
        raise InputError("a node's facts come without arrays")
    return read_facts(fields)


def _hand_out(talk: Conversation, nodes: Nodes, task: Task, folder: Path, books: RunLog) -> None:
    """Send the public model to all nodes that are there, and to nodes of the roster that come back in time.

    Args:
        talk: asks nodes, and waits for answers.
        nodes: where the nodes are.
        task: the task with the number of all users.
        folder: the model.
        books: the operator's files.
    """
    names: list[str] = []
    arrays: dict[str, NDArray[np.uint8]] = {}
    for path in [
        folder / "ledger.jsonl",
        folder / "model.json",
        folder / FACTS,
        *sorted((folder / "billboard").iterdir()),
    ]:
        arrays[f"file.{len(names)}"] = np.frombuffer(path.read_bytes(), dtype=np.uint8)
        names.append(path.relative_to(folder).as_posix())
    content = pack({"run": books.run, "task": task.to_json(), "files": names}, arrays)
    wanted = set(books.read_roster()) | set(nodes.nodes())
    found = talk.collect("model", "model", wanted, lambda name: content, _check_kept, lambda names: True, everyone=True)
    missing = sorted(wanted - set(found))
    after = f"; {', '.join(missing)} can use the published folder: privrep node personalize" if missing else ""
    books.say(f"{len(found)} nodes have the model{after}")


def _check_ready(name: str, content: RecordDict) -> bool:
    """Return True for the answer of a node that is ready; raise InputError for any other."""
    fields, arrays = unpack(content)
    if fields != {"ready": True} or arrays:
        raise InputError("it says something else than that it is ready")
    return True


def _check_kept(name: str, content: RecordDict) -> bool:
    """Return True for the answer of a node that kept the model; raise InputError for any other."""
    fields, arrays = unpack(content)
    if fields != {"kept": True} or arrays:
        raise InputError("it says something else than that it kept the model")
    return True
