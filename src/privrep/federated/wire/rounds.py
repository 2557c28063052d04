"""Questions to nodes, and waiting for answers.

A node that is silent is asked again, one that is late or wrong is left out, and the log says so.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, Protocol, TypeVar

from flwr.app import Message, RecordDict
from flwr.serverapp import Grid

from privrep.errors import InputError
from privrep.federated.wire.messages import Answer, Question, read_refusal

TYPES = {"hello": "query.hello", "sums": "train.sums", "model": "query.model"}
Kept = TypeVar("Kept")


class Pace(Protocol):
    """Seconds to wait, and how many users and nodes it takes; see `federated.config.FederationSettings`."""

    @property
    def min_users(self) -> int: ...
    @property
    def noise_nodes(self) -> int: ...
    @property
    def wait(self) -> float: ...
    @property
    def round_timeout(self) -> float: ...
    @property
    def resend(self) -> float: ...
    @property
    def poll(self) -> float: ...


class Nodes(Protocol):
    """The place where nodes are: a SuperLink (`superlink`) or this very process (`in_process`)."""

    @property
    def grid(self) -> Grid: ...

    def nodes(self) -> dict[str, int]:
        """Return Flower's number of each node that is there now, by name."""
        ...


@dataclass
class Conversation:
    """The questions and answers between a server and the nodes of a run.

    `greet` makes the content of a hello, for nodes that do not know the run.
    """

    nodes: Nodes
    pace: Pace
    say: Callable[[str], None]
    greet: Callable[[str], RecordDict]
    _missing: set[str] = field(default_factory=set)  # did not answer last time, so nobody waits for them alone
    _forgiven: set[str] = field(default_factory=set)  # answered too late, and not in time since
    _late: dict[str, str] = field(default_factory=dict)  # message -> node that did not answer it in time

    def ask_sums(
        self,
        what: str,
        questions: Mapping[str, Question],
        users: Mapping[str, int],
        accept: Callable[[str, Answer], Answer],
    ) -> dict[str, Answer]:
        """Return nodes' answers, as soon as all have come, or enough have and the time is up.

        Args:
            what: the question's name in the log.
            questions: the question to each node, by name.
            users: how many users each node has.
            accept: checks a node's answer, and raises InputError to leave it out.
        """
        contents: dict[int, RecordDict] = {}  # most nodes get the very same question, which is written down once

        def content(name: str) -> RecordDict:
            """Return the question to a node as a message; nodes with the same question share one."""
            question = questions[name]
            if id(question) not in contents:
                contents[id(question)] = question.to_record()
            return contents[id(question)]

        def enough(names: set[str]) -> bool:
            """Return whether answers of these nodes are enough to go on with."""
            some = sum(users[name] for name in names)
            return some >= self.pace.min_users and len(names) >= self.pace.noise_nodes

        def read(name: str, reply: RecordDict) -> Answer:
            """Return a node's checked answer from its reply."""
            return accept(name, Answer.from_record(reply))

        found = self.collect("sums", what, set(questions), content, read, enough)
        behind, all_users = sum(users[name] for name in found), sum(users.values())
        if not enough(set(found)):
            raise InputError(
                f"{what}: {behind:,} of {all_users:,} users are behind the answers of {len(found)} nodes, and it takes "
                f"{self.pace.min_users:,} users of {self.pace.noise_nodes} nodes or more. Nothing was released; run "
                "the same command when more nodes are there."
            )
        if len(found) < len(questions):
            self.say(f"{what}: went on with {behind:,} of {all_users:,} users")
        return found

    def collect(
        self,
        kind: str,
        what: str,
        names: set[str],
        content: Callable[[str], RecordDict],
        read: Callable[[str, RecordDict], Kept],
        enough: Callable[[set[str]], bool],
        everyone: bool = False,
    ) -> dict[str, Kept]:
        """Ask nodes until all have answered; or, once the time of a round is over, until enough have.

        Nodes that were missing last time are asked, too. They are not waited for until they are heard of, be it too
        late, unless `everyone` is. An answer that `read` refuses is left out.

        Args:
            kind: of message: "hello", "sums" or "model".
            what: the question's name in the log.
            names: the nodes to ask.
            content: makes the content of a message to a node.
            read: makes a result of a node's reply; InputError leaves the node out.
            enough: says whether answers of these nodes are enough.
            everyone: whether to wait for nodes that were missing, too.

        Returns:
            What `read` made of the replies, by node.
        """
        if everyone:
            self._missing.clear()
        round_ = _Round(self, kind, what, content, read, set(names))
        began = time.monotonic()
        while round_.waiting:
            round_.ask_again()
            round_.hear()
            passed = time.monotonic() - began
            present = round_.waiting - self._missing
            if not present and enough(set(round_.found)):
                break
            if passed > self.pace.round_timeout and enough(set(round_.found)):
                break
            if passed > self.pace.wait or not round_.waiting:
                break
            time.sleep(self.pace.poll)
        for name in sorted(round_.waiting - self._missing):
            self.say(f"{what}: {name} did not answer in time")
        self._missing = set(round_.waiting)
        round_.forget()
        return round_.found

    @property
    def missing(self) -> set[str]:
        """Return the nodes that did not answer last time."""
        return set(self._missing)

    def forgive(self, name: str) -> None:
        """Wait again for a node that was heard of too late, once: after that, when it has answered in time."""
        if name not in self._forgiven:
            self._forgiven.add(name)
            self._missing.discard(name)

    def greet_again(self, name: str, number: int) -> None:
        """Tell a node that came back what the run is about. Its answer is not waited for."""
        self.nodes.grid.push_messages([_make_message(self.greet(name), number, "hello", self.pace.wait)])


class _Round:
    """One question under way: which nodes are waited for, and what was found."""

    def __init__(self, talk: Conversation, kind: str, what: str, content: Any, read: Any, waiting: set[str]) -> None:
        self._talk, self._kind, self._what, self._content, self._read = talk, kind, what, content, read
        self.waiting, self.found = waiting, dict[str, Any]()
        self._asked: dict[str, str] = {}  # message -> node
        self._when: dict[str, float] = {}
        self._greeted: set[str] = set()

    def ask_again(self) -> None:
        """Ask the nodes that are there and were not asked, or were asked long ago."""
        there, now, pace = self._talk.nodes.nodes(), time.monotonic(), self._talk.pace
        for name in sorted(self.waiting & set(there)):
            if now - self._when.get(name, -1e9) < pace.resend:
                continue
            again = name in self._when
            message = _make_message(self._content(name), there[name], self._kind, pace.wait)
            sent = list(self._talk.nodes.grid.push_messages([message]))
            if sent and sent[0]:
                self._asked[sent[0]] = name
                self._when[name] = now
            if again:
                self._talk.say(f"{self._what}: asked {name} again")

    def hear(self) -> None:
        """Fetch the answers that have come, one by one: one that Flower cannot read is nobody else's trouble."""
        late, say = self._talk._late, self._talk.say
        for number in [*self._asked, *late]:
            try:
                replies = list(self._talk.nodes.grid.pull_messages([number]))
                content = replies[0].content if replies and not replies[0].has_error() else None
            except Exception:
                say(f"{self._what}: {self._asked.get(number) or late[number]} is left out: its answer is damaged")
                self.waiting.discard(self._asked.pop(number, ""))
                late.pop(number, None)
                continue
            if not replies:
                continue
            name, too_late = self._asked.pop(number, ""), late.pop(number, "")
            if content is None:
                continue  # it left; if it comes back it is asked again
            if too_late:
                say(f"{self._what}: {too_late} answered an earlier question, too late")
                self._talk.forgive(too_late)
            elif name not in self.waiting:
                say(f"{self._what}: {name} answered twice; once counts")
            else:
                self._take(name, content)

    def _take(self, name: str, content: RecordDict) -> None:
        """Take a node's reply: keep its answer, greet a node that does not know the run, or leave the node out."""
        say = self._talk.say
        try:
            reason = read_refusal(content)
            if reason is None:
                self.found[name] = self._read(name, content)
                self._talk._forgiven.discard(name)
        except InputError as error:
            say(f"{self._what}: {name} is left out: {str(error).rstrip('.')}")
            self.waiting.discard(name)
            return
        if reason == "unknown-run" and self._kind == "sums":
            number = self._talk.nodes.nodes().get(name)
            if number is not None:
                say(f"{name} came back")
                self._talk.greet_again(name, number)
            if name not in self._greeted:  # at once, but not over and over
                self._greeted.add(name)
                self._when.pop(name, None)
            return
        if reason is not None:
            say(f"{self._what}: {name} cannot answer ({reason}); see its own log")
        self.waiting.discard(name)

    def forget(self) -> None:
        """Remember which nodes are still silent: answers that come now come too late."""
        self._talk._late.update({number: name for number, name in self._asked.items() if name in self.waiting})
        self._asked.clear()


def _make_message(content: RecordDict, number: int, kind: str, ttl: float) -> Message:
    """Return a message to a node.

    Args:
        content: what it says.
        number: Flower's number of the node.
        kind: "hello", "sums" or "model".
        ttl: seconds for which it is valid, 1 at least.
    """
    return Message(content, dst_node_id=number, message_type=TYPES[kind], ttl=max(ttl, 1.0))
