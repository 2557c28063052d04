"""A node with a population ledger of its own people: what it refuses, and runs that are over."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

pytest.importorskip("flwr")

from flwr.app import RecordDict
from test_wire_users import neural_files, neural_task

from federation import FEATURES, NODES, RUN, TASK, USERS, federation, made_up, write_files
from privrep import PopulationLedger
from privrep.errors import PrivrepError
from privrep.federated import node as module
from privrep.federated.node import Host
from privrep.federated.wire.messages import Answer, Question, pack, unpack
from privrep.linear.steps import CELLS, FeatureSizes
from privrep.privacy.bounds import Bound, LossBound
from privrep.privacy.groups import Group
from privrep.privacy.shares import Share

PRIVATE = replace(TASK, config=replace(TASK.config, epsilon=3.0, delta=1e-6, seed=None))
PLAIN = Question(RUN, 1, FeatureSizes(True), {"sizes": Bound(1.0, FEATURES * CELLS)}, Group("split", 0, 2))
Heard = dict[str, list[tuple[str, RecordDict]]]
MODES = ["exact sums", "noise of the nodes"]


@pytest.fixture(scope="module")
def files(tmp_path_factory: pytest.TempPathFactory) -> list[Path]:
    return write_files(tmp_path_factory.mktemp("files"), made_up())[1]


@pytest.fixture(scope="module")
def heard(files: list[Path], tmp_path_factory: pytest.TempPathFactory) -> Heard:
    """All that a node is sent in a run, from the first hello to the model, where the server or the nodes add noise."""
    found: Heard = {}
    for count, mode in enumerate(MODES, start=1):
        folder = tmp_path_factory.mktemp("run")
        with federation(PRIVATE, files, folder / "nodes", noise_nodes=count) as fed:
            fed.run(folder / "run")
            found[mode] = [
                (each.kind, each.content) for each in fed.wire.record if (each.way, each.node) == ("down", "a")
            ]
    return found


@pytest.fixture
def host(files: list[Path], tmp_path: Path) -> Any:
    """A node that has heard nothing, with a population ledger."""
    (tmp_path / "node").mkdir()
    people = PopulationLedger.create(tmp_path / "people.db", epsilon=9.0, delta=1e-6)
    made = Host(files[0], tmp_path / "node", lambda what: None, population=people)
    yield made
    made.close()


def tell(host: Host, messages: list[tuple[str, RecordDict]], *kinds: str) -> None:
    """Send a node those messages of a run that are of these kinds."""
    answers = {"hello": host.answer_hello, "sums": host.answer_sums, "model": host.keep_model}
    for kind, content in messages:
        if kind in kinds:
            answers[kind](content)


def shares(host: Host) -> list[Share]:
    assert host.population is not None
    return list(host.population.read().shares.values())


def refuse(words: str, answer: Callable[[RecordDict], RecordDict], content: RecordDict) -> None:
    """Check that a message is refused in one line with these words."""
    with pytest.raises(PrivrepError, match=words) as refused:
        answer(content)
    assert "\n" not in str(refused.value)


# What is not counted


@pytest.mark.parametrize("begin", [False, True], ids=["asked to take part", "told to begin"])
def test_a_task_of_secret_samples_is_refused_and_nothing_is_reserved(host: Host, begin: bool, tmp_path: Path) -> None:
    task = neural_task(share="linear", seed=None, epsilon=3.0, training={"rate": 0.5}).with_users(USERS)
    assert task.rate < 1
    _, (host.data, *_) = neural_files(tmp_path)
    hello = {"run": RUN, "name": "a", "task": task.to_json(), "begin": begin, "noise": None}
    before = host.population.path.read_bytes()
    refuse("cannot count secret samples that the server draws", host.answer_hello, pack(hello))
    assert (host.population.path.read_bytes(), host._users, list(host.folder.iterdir())) == (before, None, [])
    everyone = replace(task, training={**task.training, "rate": 1.0})
    host.answer_hello(pack({**hello, "task": everyone.to_json()}))
    host.population = None
    host.answer_hello(pack(hello))


def test_a_question_about_a_sample_or_a_choice_is_refused_and_nothing_is_charged(host: Host) -> None:
    host.answer_hello(pack({"run": RUN, "name": "a", "task": PRIVATE.to_json(), "begin": True, "noise": None}))
    own = host.folder / "accounts" / f"{RUN}.jsonl"
    before = host.population.path.read_bytes(), own.read_bytes()
    sample = replace(PLAIN, group=None, chosen=np.ones(NODES["a"], bool), rate=0.5)
    for question in (sample, replace(PLAIN, bounds={"sizes": LossBound(3)})):
        refuse("Samples and choices of the server are refused", host.answer_sums, question.to_record())
    assert Answer.from_record(host.answer_sums(PLAIN.to_record())).users == NODES["a"]
    assert before == (host.population.path.read_bytes(), own.read_bytes())
    (share,) = shares(host)
    assert (share.status, share.budget.epsilon) == ("open", 3.0)
    host.population = None
    assert Answer.from_record(host.answer_sums(sample.to_record())).users == NODES["a"]


# Runs that are over


def test_a_run_that_is_over_stays_over_without_its_model(host: Host, heard: Heard) -> None:
    """Its budget went back, so its rows are not opened again: neither by a question nor by a hello."""
    messages = heard["exact sums"]
    tell(host, messages, "hello", "sums", "model")
    (share,) = shares(host)
    assert share.status == "finished"
    shutil.rmtree(host.folder / "model")
    (sums, *_), hello = ([content for kind, content in messages if kind == wanted] for wanted in ("sums", "hello"))
    refuse("is over: what it had not spent went back", host.answer_sums, sums)
    refuse("is over: what it had not spent went back", host.answer_hello, hello[-1])
    assert (shares(host), host._users) == ([share], None)


@pytest.mark.parametrize("mode", MODES)
def test_rows_are_closed_once_the_rest_of_the_budget_went_back(
    mode: str, host: Host, heard: Heard, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The disk is full after the settlement and before the model stands. The node answers nothing new from then on."""
    messages = heard[mode]
    tell(host, messages, "hello", "sums")
    write = module.write_private

    def fill(path: Path, content: Any) -> None:
        if path.name == "run.json":
            raise OSError("there is no room")
        write(path, content)

    with monkeypatch.context() as patch:
        patch.setattr(module, "write_private", fill)
        with pytest.raises(OSError, match="no room"):
            tell(host, messages, "model")
    (share,) = shares(host)
    assert (share.status, host._users, host._own) == ("finished", None, None)
    run = unpack(messages[0][1])[0]["run"]
    more = replace(PLAIN, run=run, group=None)
    if mode == "noise of the nodes":
        more = replace(more, page="another-page", mu_squared={"sizes": 1e-4})
    refuse("is over|is finished", host.answer_sums, more.to_record())
    tell(host, messages, "model")
    assert shares(host) == [share]
    assert host.kept


@pytest.mark.parametrize("mode", MODES)
def test_a_node_that_was_away_for_the_whole_run_keeps_its_model(mode: str, host: Host, heard: Heard) -> None:
    """With noise of its own it has charged nothing, and returned all when it was closed."""
    tell(host, heard[mode], "hello")
    host.close()
    tell(host, heard[mode], "model")
    (share,) = shares(host)
    assert (share.status, host.kept) == ("finished" if mode == "exact sums" else "returned", True)
