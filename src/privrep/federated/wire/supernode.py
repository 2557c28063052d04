"""A node's side of Flower's Fleet interface: fetch a message, let the client app answer it, send the reply back.

Flower's own client, its TLS, its signatures and its format of messages are used; the loop is privrep's. Flower's stock
loop sleeps three seconds between two looks, starts a new process for every message and runs code that the server sends.
This one looks again after a twentieth of a second, answers in this process, and runs installed code alone.
"""

from __future__ import annotations

import ssl
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

from privrep.federated.wire import silence_flower  # isort: skip
import httpx
from flwr.app import Context, Error, Message, RecordDict
from flwr.app.message import remove_content_from_message
from flwr.clientapp import ClientApp
from flwr.common.constant import HEARTBEAT_DEFAULT_INTERVAL, ErrorCode
from flwr.common.serde import message_to_proto
from flwr.proto.fleet_pb2 import (
    ActivateNodeRequest,
    DeactivateNodeRequest,
    PullMessagesRequest,
    PushMessagesRequest,
    RegisterNodeFleetRequest,
)
from flwr.proto.heartbeat_pb2 import SendNodeHeartbeatRequest
from flwr.proto.node_pb2 import Node
from flwr.supercore.heartbeat import HeartbeatSender
from flwr.supercore.inflatable.inflatable_object import get_all_nested_objects, get_object_tree, no_object_id_recompute
from flwr.supercore.inflatable.inflatable_protobuf_utils import (
    make_confirm_message_received_fn_protobuf,
    make_pull_object_fn_protobuf,
    make_push_object_fn_protobuf,
)
from flwr.supercore.inflatable.inflatable_utils import pull_and_inflate_object_from_tree, push_objects
from flwr.supercore.interceptors.http.runtime_version import RuntimeVersionHttpInterceptor
from flwr.supercore.primitives.asymmetric import public_key_to_bytes
from flwr.supernode.fleet_http_client import FleetHttpClient
from flwr.supernode.node_auth_http_interceptor import NodeAuthHttpInterceptor

from privrep.errors import InputError

BUSY, IDLE = 0.05, 1.0  # seconds between two looks: at first, and after nothing came for a while
PATIENT = 200  # looks at the busy pace before the pace slows
AGAIN = 1.0  # seconds before a server that is away is tried again
TRIES = 3  # with a key that is refused, in case the server is only just coming up

Say = Callable[[str], None]


class Away(Exception):
    """The error of a server that cannot be reached, or no longer knows this node: try again."""


def run_node(
    app: ClientApp,
    address: str,
    key: Any,
    number_file: Path,
    *,
    ca: Path | None,
    insecure: bool,
    done: Callable[[], bool],
    give_up: float,
    say: Say,
) -> None:
    """Answer messages until `done`.

    Args:
        app: makes replies.
        address: the server's, HOST:PORT.
        key: the node's private key, an elliptic curve key of `cryptography`.
        number_file: keeps Flower's number of the node, for its next start.
        ca: the certificate of the authority that vouches for the server.
        insecure: whether to go without TLS.
        done: says whether there is nothing left to answer.
        give_up: seconds to wait for a server that is away.
        say: told when the server comes and goes.
    """
    silence_flower.hush()
    away, since, joined = False, time.monotonic(), False
    while not done():
        try:
            with _open_client(address, key, ca, insecure) as client, _join(client, key, number_file, insecure) as node:
                say(f"joined {address} again" if joined else f"joined {address}")
                away, joined = False, True
                _answer(app, client, node, done)
        except Away as error:
            if not away:
                say(f"{address} is away ({error}); trying again")
                since = time.monotonic()
            away = True
            if time.monotonic() - since > give_up:
                raise InputError(f"{address} has been away for {give_up:g} s; join again when it is there.") from None
            time.sleep(AGAIN)


def _answer(app: ClientApp, client: FleetHttpClient, node: Node, done: Callable[[], bool]) -> None:
    """Answer messages, one after the other, until `done`."""
    looks = 0
    while not done():
        with _translate_errors():
            found = client.PullMessages(PullMessagesRequest(node=node))
        if not found.messages_list:
            looks += 1
            time.sleep(BUSY if looks < PATIENT else IDLE)
            continue
        looks = 0
        with _translate_errors():
            run_id = found.messages_list[0].metadata.run_id
            message = _fetch(client, node, run_id, found.message_object_trees[0])
        context = Context(run_id, node.node_id, {}, RecordDict(), {})
        try:
            reply = app(message, context)
        except Exception:  # for a message of a kind that the app does not know
            reply = Message(Error(ErrorCode.CLIENT_APP_RAISED_EXCEPTION, "failed"), reply_to=message)
        with _translate_errors():
            _send(client, node, run_id, reply)


def _fetch(client: FleetHttpClient, node: Node, run_id: int, tree: Any) -> Message:
    """Return a whole message, and tell the server that it came.

    Args:
        client: the connection to the server.
        node: this node, as Flower names it.
        run_id: Flower's number of the run.
        tree: the names of the message's parts.
    """
    message: Message = pull_and_inflate_object_from_tree(
        tree,
        make_pull_object_fn_protobuf(client.PullObject, node, run_id),
        make_confirm_message_received_fn_protobuf(client.ConfirmMessageReceived, node, run_id),
        return_type=Message,
        initial_backoff=BUSY,
    )
    message.metadata.__dict__["_message_id"] = tree.object_id
    return message


def _send(client: FleetHttpClient, node: Node, run_id: int, reply: Message) -> None:
    """Send a reply to the server.

    Args:
        client: the connection to the server.
        node: this node, as Flower names it.
        run_id: Flower's number of the run.
        reply: the message, made by the app.
    """
    reply.metadata.__dict__["_message_id"] = reply.object_id
    with no_object_id_recompute():
        answer = client.PushMessages(
            PushMessagesRequest(
                node=node,
                messages_list=[message_to_proto(remove_content_from_message(reply))],
                message_object_trees=[get_object_tree(reply)],
                clientapp_runtime_list=[0.0],  # not the true time, which may depend on rows
            )
        )
        push = make_push_object_fn_protobuf(client.PushObject, node, run_id, answer.session_id)
        push_objects(get_all_nested_objects(reply), push, object_ids_to_push=set(answer.objects_to_push))


@contextmanager
def _open_client(address: str, key: Any, ca: Path | None, insecure: bool) -> Iterator[FleetHttpClient]:
    """Open a connection to the server; every request on it is signed with the node's key.

    Args:
        address: the server's, HOST:PORT.
        key: the node's private key.
        ca: the certificate of the authority that vouches for the server; None takes the system's.
        insecure: whether to go without TLS.
    """
    signs = NodeAuthHttpInterceptor(key, key.public_key())
    version = RuntimeVersionHttpInterceptor(component_name="SuperNode")
    roots = None if ca is None or insecure else str(ca)
    with FleetHttpClient.from_server_address(address, insecure, roots, interceptors=[version, signs]) as client:
        yield client


@contextmanager
def _join(client: FleetHttpClient, key: Any, number_file: Path, insecure: bool) -> Iterator[Node]:
    """Register this node, keep it active with signs of life, and leave if the block fails.

    Args:
        client: the connection to the server.
        key: the node's private key.
        number_file: keeps Flower's number of the node.
        insecure: whether the server may let anyone in.
    """
    node = Node(node_id=_activate(client, public_key_to_bytes(key.public_key()), number_file, insecure))
    number_file.write_text(str(node.node_id))

    def beat() -> bool:
        """Send a sign of life."""
        asked = SendNodeHeartbeatRequest(node=node, heartbeat_interval=HEARTBEAT_DEFAULT_INTERVAL)
        with suppress(httpx.HTTPError):
            client.SendNodeHeartbeat(asked)
        return True  # trouble shows at the next look for messages

    beats = HeartbeatSender(beat)
    beats.start()
    try:
        yield node
    except BaseException:
        with suppress(httpx.HTTPError, RuntimeError):
            client.DeactivateNode(DeactivateNodeRequest(node_id=node.node_id))
        raise
    finally:  # a node stays active until its signs of life end: Flower drops answers of nodes that have left
        beats.stop()


def _activate(client: FleetHttpClient, public_key: bytes, number_file: Path, insecure: bool) -> int:
    """Return Flower's number of this node. One that was killed is still active there, under the number it had.

    Args:
        client: the connection to the server.
        public_key: the node's, as bytes.
        number_file: holds the number that the node had before, if it had one.
        insecure: whether to register the key with a server that does not know it yet.
    """
    asked = ActivateNodeRequest(public_key=public_key, heartbeat_interval=HEARTBEAT_DEFAULT_INTERVAL)
    for _ in range(TRIES):
        with _translate_errors(refused=False):
            with suppress(httpx.HTTPStatusError):
                number: int = client.ActivateNode(asked).node_id
                return number
            if insecure:  # perhaps a server that lets anyone in, and does not know this key yet
                with suppress(httpx.HTTPStatusError):
                    client.RegisterNode(RegisterNodeFleetRequest(public_key=public_key))
                    continue
            with suppress(httpx.HTTPStatusError, OSError, ValueError):
                client.DeactivateNode(DeactivateNodeRequest(node_id=int(number_file.read_text())))
        time.sleep(AGAIN)
    raise InputError(
        "the server refuses this node's key: it is not among those it was given, or is in use by another process, or "
        "the clocks of the two machines differ by more than a few seconds."
    )


@contextmanager
def _translate_errors(refused: bool = True) -> Iterator[None]:
    """Raise InputError for a certificate that is not trusted, and Away for any other trouble on the way.

    Args:
        refused: whether an HTTP status that is an error counts as trouble; else it passes through.
    """
    try:
        yield
    except httpx.HTTPStatusError as error:
        if not refused:
            raise
        raise Away(f"status {error.response.status_code}") from None
    except httpx.TransportError as error:
        if isinstance(error.__cause__, ssl.SSLError) or "CERTIFICATE" in str(error).upper():
            raise InputError(
                "the server's certificate is not one that the given CA signed for this address, or it does not speak "
                f"TLS ({error}). Check the address and the CA file."
            ) from None
        raise Away(str(error) or type(error).__name__) from None
    except (ValueError, RuntimeError) as error:  # a message that is gone, or is not whole
        raise Away(str(error)) from None
