"""Nodes in this process behind Flower's Grid, for simulations: the same messages and apps without a network."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from concurrent.futures import Future, ThreadPoolExecutor, wait

from flwr.app import Context, Message, RecordDict
from flwr.clientapp import ClientApp
from flwr.common.constant import SUPERLINK_NODE_ID
from flwr.serverapp import Grid
from flwr.supercore.run import Run
from flwr.supercore.task_identity import TaskIdentity

RUN = 1  # Flower's number of the run; there is one


class LocalGrid(Grid):
    """A Grid that delivers a message by calling the node's app, in a thread of its own for each node."""

    def __init__(self, apps: Mapping[int, ClientApp]) -> None:
        TaskIdentity.task_id, TaskIdentity.run_id, TaskIdentity.node_id = 1, RUN, SUPERLINK_NODE_ID
        self._apps = dict(apps)
        self._run = Run.create_empty(RUN)
        self._threads = {number: ThreadPoolExecutor(1) for number in self._apps}  # a node answers one after the other
        self._replies: dict[str, Future[Message]] = {}

    def push_messages(self, messages: Iterable[Message]) -> list[str]:
        """Hand messages to the apps of their nodes, and return a name for each."""
        sent = []
        for message in messages:
            number = message.metadata.dst_node_id
            name = f"{len(self._replies)}-{message.object_id}"
            message.metadata.__dict__["_message_id"] = name
            context = Context(RUN, number, {}, RecordDict(), {})
            self._replies[name] = self._threads[number].submit(self._apps[number], message, context)
            sent.append(name)
        return sent

    def pull_messages(self, message_ids: Iterable[str]) -> list[Message]:
        """Return the replies that are ready, of these names; each is delivered once."""
        done = [name for name in message_ids if name in self._replies and self._replies[name].done()]
        replies = [self._replies[name] for name in done]
        for name in done:
            self._replies[name] = Future()  # delivered, and never done again
        return [reply.result() for reply in replies]

    def get_node_ids(self) -> list[int]:
        """Return the numbers of all nodes."""
        return list(self._apps)

    def close(self) -> None:
        """Stop the nodes' threads; messages that wait are dropped."""
        for threads in self._threads.values():
            threads.shutdown(cancel_futures=True)

    def set_run(self, run: Run) -> None:
        """Set the run that Flower asks for."""
        self._run = run

    @property
    def run(self) -> Run:
        return self._run

    def create_message(
        self, content: RecordDict, message_type: str, dst_node_id: int, group_id: str, ttl: float | None = None
    ) -> Message:
        """Return a message to a node, as Flower's own Grid makes it.

        Args:
            content: what it says.
            message_type: the kind of message, "query.hello" for example.
            dst_node_id: the node's number.
            group_id: Flower's label of messages that belong together.
            ttl: seconds for which it is valid.
        """
        return Message(content, dst_node_id, message_type, ttl=ttl, group_id=group_id)

    def send_and_receive(self, messages: Iterable[Message], *, timeout: float | None = None) -> list[Message]:
        """Deliver messages, wait for their replies, and return the ones that came in time."""
        sent = self.push_messages(messages)
        wait([self._replies[name] for name in sent], timeout)
        return self.pull_messages(sent)


class LocalNodes:
    """Nodes of this process, by name."""

    def __init__(self, apps: Mapping[str, ClientApp]) -> None:
        self._numbers = {name: number for number, name in enumerate(apps, start=1)}
        self.grid = LocalGrid({number: apps[name] for name, number in self._numbers.items()})

    def nodes(self) -> dict[str, int]:
        """Return Flower's number of each node, by name."""
        return dict(self._numbers)
