"""A node: its users' rows and heads, a folder that nobody else reads, and the Flower client app that answers for it.

FOLDER/node.key          the node's key, where none was given
FOLDER/model/            the public model, once it has come, and in model/private the heads of this node's users
FOLDER/hello.json        what the run is about, for a process that is started anew
FOLDER/noise/RUN/        ledger and billboard of the noisy sums that this node released in a run, if it adds the noise
FOLDER/accounts/RUN.jsonl  ledger of a run that the server adds the noise to, where the node has a population ledger
"""

from __future__ import annotations

import hashlib
import math
import os
import re
import shutil
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager, ExitStack, nullcontext
from dataclasses import asdict, dataclass, field
from pathlib import Path, PurePosixPath
from typing import Any

import numpy as np
from cryptography.hazmat.primitives import serialization
from cryptography.hazmat.primitives.asymmetric import ec
from flwr.app import Context, Message, RecordDict
from flwr.clientapp import ClientApp
from numpy.typing import NDArray

from privrep.boundary import read_json
from privrep.errors import InputError, PrivrepError
from privrep.federated.agreement import Agreement
from privrep.federated.credentials import is_loopback, read_node_key
from privrep.federated.node_accounts import NodeAccounts
from privrep.federated.run_log import write_private
from privrep.federated.task import Task, task_from_json
from privrep.federated.wire.answering import answer
from privrep.federated.wire.messages import Question, Refusal, make_refusal, pack, unpack
from privrep.federated.wire.users import check_facts
from privrep.privacy.population import Account, PopulationLedger
from privrep.privacy.protocol import Facts, Users
from privrep.privacy.run import Run
from privrep.users.isolated import IsolatedUsers

Say = Callable[[str], None]
_RUN = re.compile(r"[0-9a-z]{1,64}", re.ASCII)  # the name of a run, and of its folder
_NAME = re.compile(r"[\w.-]{1,100}", re.ASCII)  # the name of a node, which is shown


@dataclass
class Host:
    """The process that answers for the users of one file.

    With `agreed`, it takes part in a run of that agreement alone. Without it, what the server says is taken on trust.
    `simulation` allows noise of its own that the server can reproduce. With a `population` ledger, the budget of a run
    is reserved from it before the first answer.
    """

    data: Path
    folder: Path
    say: Say
    agreed: Agreement | None = None
    simulation: bool = False
    population: PopulationLedger | None = None
    run: str | None = None
    kept: bool = False
    _users: IsolatedUsers | None = None
    _own: Run | None = None
    _files: ExitStack = field(default_factory=ExitStack)
    _facts: Facts | None = None

    def __post_init__(self) -> None:
        if self.agreed is not None:  # mistakes in the file are found here, and not by the server's questions
            self._facts = _require_facts(self.agreed.task.read_facts(self.data))

    def make_app(self) -> ClientApp:
        """Return a Flower client app of this host. What goes wrong is said here, and one word of it to the server."""
        app = ClientApp()
        app.query("hello")(self._make_handler(self.answer_hello, "refused"))
        app.train("sums")(self._make_handler(self.answer_sums, "refused"))
        app.query("model")(self._make_handler(self.keep_model, "failed"))
        return app

    def _make_handler(
        self, function: Callable[[RecordDict], RecordDict], otherwise: Refusal
    ) -> Callable[[Message, Context], Message]:
        """Return a function that answers messages, with a refusal of one word in place of an error.

        Args:
            function: makes the content of an answer from the content of a message.
            otherwise: the word for errors that say what is wrong with the message or the disk.
        """

        def handle(message: Message, context: Context) -> Message:
            """Return the answer to a message, or a refusal."""
            try:
                content = function(message.content)
            except _UnknownRun:
                content = make_refusal("unknown-run")
            except _NoData as error:
                self.say(f"not answered: {error}")
                content = make_refusal("no-data")
            except (PrivrepError, OSError) as error:
                self.say(f"not answered: {error}")
                content = make_refusal(otherwise)
            except Exception as error:
                self.say(f"not answered: {type(error).__name__}: {error}")
                content = make_refusal("failed")
            return Message(content, reply_to=message)

        return handle

    def answer_hello(self, content: RecordDict) -> RecordDict:
        """Learn what a run is about, and answer how many users there are. Once all nodes are known, open the rows."""
        fields, arrays = unpack(content)
        if set(fields) != {"run", "name", "task", "begin", "noise"} or arrays:
            raise InputError("the server's hello has other fields than this version of privrep knows.")
        if not _matches(_RUN, fields["run"]) or not _matches(_NAME, fields["name"]):
            raise InputError("the server calls its run, or this node, by a name that is none.")
        self._check_folder(fields["run"])
        task = task_from_json(fields["task"])
        if not fields["begin"]:
            self.close()
            self.say(f"asked to take part as {fields['name']}: {_describe_run(task, fields['noise'])}")
        self._check_task(task, fields["run"], fields["noise"])
        if not fields["begin"]:
            self._accounts.check_room(task, fields["run"], fields["noise"])
            return pack(asdict(self._facts or self._count_facts(task)))
        if self.run != fields["run"] or self._users is None:
            self._open(task, fields)
            write_private(self.folder / "hello.json", fields)
        return pack({"ready": True})

    def _count_facts(self, task: Task) -> Facts:
        """Return the facts of this node's file; raise _NoData if the task cannot be opened with it."""
        try:
            return _require_facts(task.read_facts(self.data))
        except (PrivrepError, OSError) as error:
            raise _NoData(str(error)) from None

    def _open(self, task: Task, fields: Mapping[str, Any]) -> None:
        """Open the rows for a run that the server's hello describes, and the run of own noise, if there is one.

        Rows stay closed where anything fails: they are never open without the noise that the run asks for.
        """
        self.close()
        self._check_task(task, fields["run"], fields["noise"])
        try:
            users: Any = self._files.enter_context(task.open(self.data))
            self._users = IsolatedUsers(users, strictly=fields["noise"] is not None)
            account = self._accounts.open(fields["run"], users)
            if fields["noise"] is not None:
                self._own = self._open_own_run(task, fields["run"], str(fields["name"]), fields["noise"], account)
            elif account is not None:
                self._accounts.reserve(task, fields["run"], account)
        except BaseException:
            self.close()
            raise
        self.run = fields["run"]

    def _check_task(self, task: Task, run: str, noise: Any) -> None:
        """Raise InputError if the server asks for something that this node was not started for.

        Args:
            task: the task as the server sent it.
            run: the name of the run.
            noise: the server's plan for the noise, as it came from JSON.
        """
        if self.agreed is not None:
            self.agreed.check(task, noise)
        if task.seed is not None and not self.simulation:
            raise InputError(
                "the server's run is a simulation, with noise that it can reproduce: join with --simulation."
            )
        if noise is None:
            if (self.folder / "noise" / run).exists():
                raise InputError("in this run this node adds noise of its own; the server wants exact sums now.")
            return
        if set(noise) != {"epsilon"} or not isinstance(noise["epsilon"], int | float):
            raise InputError("the server's hello says nothing of what it may learn.")
        if task.relation != "replace-one-user":
            raise InputError("a node says how many users it has, so noise of its own goes with replace-one-user alone.")

    @property
    def _accounts(self) -> NodeAccounts:
        """Return the accounts of this node's runs with its population ledger."""
        return NodeAccounts(self.folder, self.agreed, self.population)

    def _open_own_run(
        self, task: Task, run: str, name: str, noise: Mapping[str, Any], account: Account | None = None
    ) -> Run:
        """Open the ledger and billboard of this node's own releases: a page that stands is never drawn again.

        Args:
            task: the task of the run.
            run: the name of the run.
            name: the name of this node, from which noise of a simulation is seeded.
            noise: the plan for the noise; its epsilon is the budget, unless the agreement names another.
            account: with the population ledger that the budget is reserved from; None: with none.
        """
        folder = self.folder / "noise" / run
        folder.parent.mkdir(exist_ok=True, mode=0o700)
        folder.mkdir(exist_ok=True, mode=0o700)
        seed = None if task.seed is None else _seed_of(task.seed, name)
        assert self._users is not None
        budget = self._accounts.make_budget(task, noise)
        return self._files.enter_context(Run.open(self._users, budget, seed=seed, folder=folder, account=account))

    def answer_sums(self, content: RecordDict) -> RecordDict:
        """Answer a question with sums over this node's users, in one pass over their rows."""
        asked = unpack(content)[0].get("run")
        if self._users is None or self.run is None or asked != self.run:
            self._come_back(asked)
        assert self.run is not None
        if self._has_model(self.run):  # what the run did not spend went back to the population ledger
            raise InputError("this node has the model of this run: the run is over, and nothing more is answered.")
        users = self._users
        assert users is not None
        question = Question.from_record(content, users.facts.features, users.facts.targets)
        if self.population is not None and self._own is None:
            self._accounts.check_question(question)
        return answer(question, users, self._own).to_record()

    def _come_back(self, run: Any) -> None:
        """Open the rows of a run that an earlier process of this node took part in."""
        known = self.folder / "hello.json"
        fields = read_json(known) if known.is_file() else {}
        if not isinstance(run, str) or fields.get("run") != run:
            raise _UnknownRun
        self._open(task_from_json(fields["task"]), fields)

    def keep_model(self, content: RecordDict) -> RecordDict:
        """Keep the public model, and make the heads of this node's users.

        What the server hears depends on what it sent alone. Whether heads could be made of the rows is for this node's
        log.
        """
        fields, arrays = unpack(content)
        if set(fields) != {"run", "task", "files"} or not isinstance(fields["files"], list):
            raise InputError("the server's model has other fields than this version of privrep knows.")
        self._check_folder(fields["run"])
        if not self._has_model(fields["run"]):
            task = task_from_json(fields["task"])
            if self.agreed is not None:
                self.agreed.check(task, self.agreed.noise)
            new = _write_model(self.folder, fields["files"], arrays)
            task.check_own(new)
            self._keep(task, fields["run"], new)
        self.kept = True
        return pack({"kept": True})

    def _keep(self, task: Task, run: str, new: Path) -> None:
        """Put the model in its place, with heads if they can be made; a file that has none says so in the log."""
        try:
            with self._open_users(task, run) as users:
                heads = f"with the heads of {task.keep(new, users):,} users (yours alone)"
        except Exception as error:
            heads = f"WITHOUT HEADS ({error}): mend the file, and make them with privrep node personalize"
        self._accounts.settle(run, new, self._own)
        self.close()  # what the run did not spend went back: its rows are closed before anything else
        write_private(self.folder / "run.json", {"run": run})
        shutil.rmtree(self.folder / "model", ignore_errors=True)
        os.replace(new, self.folder / "model")
        self.say(f"the model is in {self.folder / 'model'}, {heads}")

    def _open_users(self, task: Task, run: str) -> AbstractContextManager[Users]:
        """Return the users of a run, who may be open already."""
        if self._users is not None and self.run == run:
            return nullcontext(self._users.users)
        return task.open(self.data)

    def _has_model(self, run: str) -> bool:
        """Return whether the folder holds the model of this run."""
        known = self.folder / "run.json"
        return (self.folder / "model" / "model.json").is_file() and read_json(known) == {"run": run}

    def _check_folder(self, run: str) -> None:
        """Raise InputError if the folder belongs to another run.

        A folder is for one run, so that what a server can learn is not multiplied by runs that it starts.
        """
        if not isinstance(run, str) or not _RUN.fullmatch(run):
            raise InputError("the server's run has a name that is none.")
        if (self.folder / "model").exists() and not self._has_model(run):
            raise InputError(f"{self.folder} holds the model of another run; join with another --folder.")
        if any(other.name != run for other in (self.folder / "noise").glob("*")):
            raise InputError(
                f"{self.folder} keeps the account of another run, which may have spent all that the server may learn. "
                "If this run may learn as much again, join with another --folder."
            )

    def close(self) -> None:
        """Close the rows and the run of own noise."""
        self._files.close()
        self._users = self._own = self.run = None


class _NoData(Exception):
    """The error of a file with which the task cannot be opened."""


class _UnknownRun(Exception):
    """The error of a question about a run that this process was not told of: it was started anew."""


def join(
    address: str,
    data: Path,
    folder: Path,
    *,
    key: Path | None,
    ca: Path | None,
    insecure: bool = False,
    agreed: Agreement | None = None,
    simulation: bool = False,
    population: PopulationLedger | None = None,
    give_up: float = math.inf,
    say: Say,
) -> None:
    """Answer for the users of a file until the model has come and the heads are made; see `Host`.

    Args:
        address: the server's, HOST:PORT.
        data: the file of users.
        folder: the node's folder, which nobody else can read.
        key: the node's private key; None makes one in the folder.
        ca: the certificate of the authority that vouches for the server.
        insecure: whether to go without TLS, to a server on this machine alone.
        agreed: the only run to take part in; None trusts the server.
        simulation: whether noise may be reproducible.
        population: the ledger that the budget of a run is reserved from; None: there is none.
        give_up: seconds to wait for a server that is away.
        say: told what happens.
    """
    from privrep.federated.wire.supernode import run_node

    if not data.is_file():
        raise InputError(f"there is no file {data}; check the path.")
    if insecure and not is_loopback(address.rpartition(":")[0].strip("[]")):
        raise InputError(f"without TLS a node joins a server on this machine alone. Got {address} instead.")
    folder.mkdir(parents=True, exist_ok=True, mode=0o700)
    os.chmod(folder, 0o700)
    if (folder / "model" / "model.json").is_file():
        say(f"{folder} has the model of its run already; to take part in another, join with another --folder")
        return
    host = Host(data, folder, say, agreed, simulation, population)
    try:
        run_node(
            host.make_app(),
            address,
            read_node_key(key) if key is not None else _make_own_key(folder / "node.key"),
            folder / "flower-number",
            ca=ca,
            insecure=insecure,
            done=lambda: host.kept,
            give_up=give_up,
            say=say,
        )
    finally:
        host.close()


def _write_model(folder: Path, names: list[Any], arrays: Mapping[str, NDArray[Any]]) -> Path:
    """Write the files of a model that was sent to a new folder beside the model's place, and return it.

    Only names of files of a model folder are taken; InputError says if there is another.

    Args:
        folder: the node's folder.
        names: names of the files, as the server sent them.
        arrays: bytes of each file, as "file.0", "file.1" and so on.
    """
    new = folder / "model.new"
    shutil.rmtree(new, ignore_errors=True)
    new.mkdir(mode=0o700, parents=True)
    if len(arrays) != len(names):
        raise InputError("the server's model has other files than it names.")
    for number, name in enumerate(names):
        parts = PurePosixPath(name).parts if isinstance(name, str) else ()
        blob = arrays.get(f"file.{number}")
        known = parts in (("model.json",), ("ledger.jsonl",), ("federation.json",)) or (
            len(parts) == 2 and parts[0] == "billboard"
        )
        if not known or ".." in parts or blob is None or blob.dtype != np.uint8 or blob.ndim != 1:
            raise InputError("the server's model holds files that are not of a model.")
        path = new.joinpath(*parts)
        path.parent.mkdir(exist_ok=True)
        path.write_bytes(blob.tobytes())
    return new


def _matches(pattern: re.Pattern[str], name: Any) -> bool:
    """Return whether a value is a text that the whole pattern describes."""
    return isinstance(name, str) and pattern.fullmatch(name) is not None


def _make_own_key(path: Path) -> Any:
    """Return the key by which a server that lets anyone in knows this node again; make it once."""
    if not path.is_file():
        key = ec.generate_private_key(ec.SECP384R1())
        form, plain = serialization.PrivateFormat.OpenSSH, serialization.NoEncryption()
        with open(os.open(path, os.O_CREAT | os.O_EXCL | os.O_WRONLY, 0o600), "wb") as file:
            file.write(key.private_bytes(serialization.Encoding.PEM, form, plain))
    return read_node_key(path)


def _seed_of(seed: int, name: str) -> int:
    """Return the seed of a simulated node, so that the noise of every node is its own."""
    return int.from_bytes(hashlib.sha256(f"{seed}/{name}".encode()).digest()[:7], "little")


def _describe_run(task: Task, noise: Any) -> str:
    """Return a sentence that says what a run means for the users of this node."""
    seeded = ", SEEDED NOISE: A SIMULATION, NOT PRIVATE" if task.seed is not None else ""
    told = "the server sees exact sums of this node's users"
    if isinstance(noise, dict) and isinstance(noise.get("epsilon"), int | float):
        told = (
            f"this node adds noise of its own, and the server learns at most epsilon {noise['epsilon']:.3g} of a user"
        )
    return f"epsilon {task.epsilon:g}, delta {task.delta:g}, {task.relation}{seeded}; {told}"


def _require_facts(facts: Facts) -> Facts:
    """Return facts of this node; raise InputError if a server would not take them."""
    check_facts(facts)
    return facts
