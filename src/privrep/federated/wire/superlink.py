"""Flower's SuperLink inside this process: the door that nodes knock at, and the Grid through which the server speaks.

Flower's own application answers, with its TLS, its signatures of nodes and its store of messages. Of its interfaces
only the Fleet, which nodes use, is reachable from outside. The Control interface starts runs and registers nodes for
whoever asks, and the Runtime interface hands out work. Both are closed here, and what they would do is done by calls
within the process. Nothing outlives the process.

Formal guarantee, with `node_keys`:
* A request is answered only if it is signed with one of these keys.
* A node speaks for itself alone: Flower compares signature, key and node of each request (`NodeAuthMiddleware`).
* No other way to register a key is open.
"""

from __future__ import annotations

import hashlib
import socket
import threading
import time
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from privrep.federated.wire import silence_flower  # isort: skip
import uvicorn
from flwr.app import Message
from flwr.common.constant import (
    HEARTBEAT_DEFAULT_INTERVAL,
    NOOP_ACCOUNT_NAME,
    NOOP_FLWR_AID,
    SUPERLINK_NODE_ID,
    SubStatus,
)
from flwr.proto.message_pb2 import ConfirmMessageReceivedRequest, PullObjectRequest
from flwr.proto.runtime_pb2 import PullAppMessagesRequest
from flwr.supercore.constant import NOOP_FEDERATION_ID, TaskType
from flwr.supercore.inflatable.inflatable_object import iterate_object_tree
from flwr.supercore.inflatable.inflatable_utils import inflate_object_from_contents
from flwr.supercore.task_identity import TaskIdentity
from flwr.superlink.grid.http_grid import HttpGrid
from flwr.superlink.main import create_app
from flwr.superlink.servicer.runtime import runtime_handlers

from privrep.errors import InputError
from privrep.federated.wire.loopback import is_loopback

OPEN = "/v1/fleet/"  # paths that are reachable from outside
MOST_BYTES = 1 << 27  # the longest request: a sum of 16 million numbers
BEATS = 5.0  # seconds between two signs of life of the server's own task


@dataclass(frozen=True)
class Tls:
    """The files of the server's certificate and its key."""

    certificate: Path
    key: Path


class Link:
    """A SuperLink that is up, and one Flower run in it. Make it with `open_link`."""

    def __init__(self, state: Any, port: int, names: dict[int, str] | None) -> None:
        """Start the one run of a SuperLink.

        Args:
            state: Flower's store of nodes and messages.
            port: the port on which nodes reach the SuperLink.
            names: names of the nodes that are let in, by Flower's number; None where anyone is.
        """
        self.port = port
        self._state, self._names, self._beat = state, names, 0.0
        run_id = state.create_run(
            "privrep/federated", "1", "", {}, NOOP_FEDERATION_ID, None, NOOP_FLWR_AID, TaskType.SERVER_APP
        )
        (run,) = state.get_run_info(run_ids=[run_id])
        self._task = run.primary_task_id
        if state.claim_task(self._task) is None or not state.activate_task(self._task):
            raise InputError(
                "Flower did not start a run; check that flwr 1.41.0 is installed, and start the server again."
            )
        (task,) = state.get_tasks(task_ids=[self._task])
        TaskIdentity.task_id, TaskIdentity.run_id, TaskIdentity.node_id = self._task, run_id, SUPERLINK_NODE_ID
        self.grid = InProcessGrid(state, task)
        self.grid.set_run(state.get_run_info(run_ids=[run_id])[0])

    def nodes(self) -> dict[str, int]:
        """Return Flower's number of each node that is there now, by name."""
        self.keep_alive()
        found = self._state.get_node_info(node_ids=list(self._state.get_nodes(self.grid.run.run_id)))
        names = self._names
        if names is None:
            return {_name_node(node.public_key): node.node_id for node in found}
        return {names[node.node_id]: node.node_id for node in found if node.node_id in names}

    def keep_alive(self) -> None:
        """Tell Flower that the run goes on; to be called now and then."""
        if time.monotonic() - self._beat > BEATS:
            self._state.acknowledge_task_heartbeat(self._task)
            self._beat = time.monotonic()

    def finish(self) -> None:
        """Tell Flower that the run is over."""
        self._state.finish_task(self._task, sub_status=SubStatus.COMPLETED, details="")


class InProcessGrid(HttpGrid):
    """Flower's Grid, with its requests answered by the same handlers without a way over the network."""

    def __init__(self, state: Any, task: Any) -> None:
        super().__init__(token="in-process")
        self._handlers = _Handlers(state, task)
        self._arriving: dict[str, Any] = {}  # replies of which parts are still to come, by what they reply to

    @property
    def _runtime_client(self) -> Any:
        return self._handlers

    def pull_messages(self, message_ids: Iterable[str]) -> list[Message]:
        """Return the replies that have come whole. One that cannot be read is an error, once.

        Flower's own Grid waits for parts of a reply, a second at a time.
        """
        wanted = list(message_ids)
        new = [number for number in wanted if number not in self._arriving]
        if new:
            found = self._handlers.PullMessages(PullAppMessagesRequest(message_ids=new))
            for message, tree in zip(found.messages_list, found.message_object_trees, strict=True):
                self._arriving[message.metadata.reply_to_message_id] = tree
        whole = (self._assemble(number) for number in wanted if number in self._arriving)
        return [message for message in whole if message is not None]

    def _assemble(self, number: str) -> Message | None:
        """Return a reply if all of its parts are there, else None."""
        tree, run_id = self._arriving[number], self.run.run_id
        parts = {}
        for part in iterate_object_tree(tree):
            asked = PullObjectRequest(node=self.node, run_id=run_id, object_id=part.object_id)
            found = self._handlers.PullObject(asked)
            if found.object_found and not found.object_available:
                return None
            parts[part.object_id] = found.object_content
        del self._arriving[number]
        self._handlers.ConfirmMessageReceived(
            ConfirmMessageReceivedRequest(node=self.node, run_id=run_id, message_object_id=tree.object_id)
        )
        message = inflate_object_from_contents(tree.object_id, parts)
        if not isinstance(message, Message):
            raise InputError("a node sent something that is no message.")
        message.metadata.__dict__["_message_id"] = tree.object_id
        return message


class _Handlers:
    """The requests that a Grid makes, by their names in Flower's protocol."""

    def __init__(self, state: Any, task: Any) -> None:
        self._asked = (state, task)

    def GetNodes(self, request: Any) -> Any:
        return runtime_handlers.get_nodes(request, *self._asked)

    def PushMessages(self, request: Any) -> Any:
        return runtime_handlers.push_messages(request, *self._asked)

    def PullMessages(self, request: Any) -> Any:
        return runtime_handlers.pull_messages(request, *self._asked)

    def PushObject(self, request: Any) -> Any:
        return runtime_handlers.push_object(request, *self._asked)

    def PullObject(self, request: Any) -> Any:
        return runtime_handlers.pull_object(request, *self._asked)

    def ConfirmMessageReceived(self, request: Any) -> Any:
        return runtime_handlers.confirm_message_received(request, *self._asked)


@contextmanager
def open_link(host: str, port: int, tls: Tls | None, node_keys: Mapping[str, bytes] | None) -> Iterator[Link]:
    """Listen at this address until the block is left.

    Args:
        host: the address; without certificate and keys, this machine's own alone.
        port: its port; 0 takes any that is free.
        tls: the server's certificate and key; None goes without TLS.
        node_keys: public keys of the nodes that may join, by name; None lets anyone in.
    """
    if (tls is None or node_keys is None) and not is_loopback(host):
        raise InputError(
            f"without TLS and node keys a server listens on loopback alone (127.0.0.1). Got {host} instead."
        )
    silence_flower.hush()
    listening = _bind(host, port)
    try:
        app = create_app()
        app.state.enable_supernode_auth = node_keys is not None
        state = app.state.linkstate_factory.state()
        names = None if node_keys is None else {_register(state, key): name for name, key in node_keys.items()}
        server = _make_server(_FleetAlone(app), tls)
        thread = threading.Thread(target=server.run, kwargs={"sockets": [listening]}, daemon=True)
        thread.start()
        try:
            _wait_until_up(server, thread)
            link = Link(state, listening.getsockname()[1], names)
            yield link
            link.finish()
        finally:
            server.should_exit = True
            thread.join(10)
    finally:
        listening.close()


def _bind(host: str, port: int) -> socket.socket:
    """Return a socket that listens at this address; raise InputError if it cannot."""
    found = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
    listening = socket.socket(found[0], socket.SOCK_STREAM)
    listening.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        listening.bind(found[4])
    except OSError as error:
        listening.close()
        reason = (error.strerror or str(error)).lower()
        raise InputError(f"cannot listen at {host}:{port} ({reason}); choose another port.") from None
    return listening


def _make_server(app: Any, tls: Tls | None) -> uvicorn.Server:
    """Return the server of an application that no one runs yet, with TLS if there is a certificate."""
    files: dict[str, Any] = {} if tls is None else {"ssl_certfile": str(tls.certificate), "ssl_keyfile": str(tls.key)}
    settings = uvicorn.Config(
        app,
        log_config=None,
        access_log=False,
        lifespan="off",
        ws="none",
        http="httptools",
        timeout_keep_alive=75,
        **files,
    )
    return uvicorn.Server(settings)


def _wait_until_up(server: uvicorn.Server, thread: threading.Thread) -> None:
    """Wait until the server answers; raise InputError if its thread ends before."""
    while not server.started:
        if not thread.is_alive():
            raise InputError("the server did not start; check its certificate and key.")
        time.sleep(0.01)


def _register(state: Any, key: bytes) -> int:
    """Let a node with this public key in, and return Flower's number of it."""
    number: int = state.create_node(NOOP_FLWR_AID, NOOP_ACCOUNT_NAME, key, HEARTBEAT_DEFAULT_INTERVAL)
    return number


def _name_node(key: bytes) -> str:
    """Return a name for a node that nobody named, from its key."""
    return f"node-{hashlib.sha256(key).hexdigest()[:12]}"


class _FleetAlone:
    """An application that passes on nothing but requests to the Fleet interface, if they are not too long.

    Flower reads all of a request before it looks at the signature.
    """

    def __init__(self, app: Any) -> None:
        self._app = app

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        if scope["type"] != "http":
            return
        status = 404
        if scope["path"].startswith(OPEN):
            headers = dict(scope["headers"])
            length = headers.get(b"content-length", b"")
            if length.isdigit() and int(length) <= MOST_BYTES and b"transfer-encoding" not in headers:
                await self._app(scope, receive, send)
                return
            status = 413
        await send({"type": "http.response.start", "status": status, "headers": [(b"content-length", b"0")]})
        await send({"type": "http.response.body", "body": b""})
