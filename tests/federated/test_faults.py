"""Nodes that fail, lie or come back, and servers that do: rounds go on with who is there, and bounds hold."""

from __future__ import annotations

import json
import math
import shutil
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any, ClassVar

import numpy as np
import pytest
from numpy.typing import NDArray

from privrep.data.table import UserTable
from privrep.privacy.protocol import Facts, StepSpec, UserBatch
from privrep.users.memory import InMemoryUsers

pytest.importorskip("flwr")

from flwr.app import ArrayRecord, ConfigRecord, Message, MetricRecord, RecordDict
from flwr.common.serde import recorddict_from_proto, recorddict_to_proto
from flwr.proto.recorddict_pb2 import RecordDict as ProtoRecordDict
from safetensors.numpy import load_file, save
from scipy.stats import chi2

from federation import (
    BUDGET,
    COLUMNS,
    FEATURES,
    NODES,
    QUICK,
    RUN,
    TASK,
    Broken,
    Federation,
    Lost,
    Passed,
    federation,
    made_up,
    write_files,
)
from privrep.errors import InputError
from privrep.federated.agreement import Agreement
from privrep.federated.config import FederationSettings
from privrep.federated.node import Host
from privrep.federated.task import TableTask
from privrep.federated.wire.messages import REFUSALS, VERSION, Answer, Question, pack, unpack
from privrep.federated.wire.rounds import Conversation
from privrep.federated.wire.users import FlowerUsers
from privrep.linear.steps import CELLS, FeatureSizes
from privrep.models import model as models
from privrep.models.description import Config
from privrep.privacy.billboard import Billboard
from privrep.privacy.bounds import Bound, LossBound, UserContributions
from privrep.privacy.calibration import Query, calibrate
from privrep.privacy.grid import MAX_INT64_USERS, add_rounded, measure_rounding
from privrep.privacy.groups import Group
from privrep.privacy.ledger import Budget, read_ledger
from privrep.users.isolated import IsolatedUsers

STEP = FeatureSizes(True)
SIZE = FEATURES * CELLS
BOUNDS = {"sizes": Bound(1.0, SIZE)}
PRIVATE = replace(TASK, config=replace(TASK.config, seed=None))


@pytest.fixture(scope="module")
def files(tmp_path_factory: pytest.TempPathFactory) -> list[Path]:
    return write_files(tmp_path_factory.mktemp("files"), made_up())[1]


def total(fed: Federation, names: str) -> np.ndarray:
    """What these nodes' users add up to."""
    sums = [fed.hosts[name]._users.sums(STEP, BOUNDS) for name in names]
    return np.sum([each["sizes"].exact_numbers for each in sums], axis=0)


def asked(users: FlowerUsers) -> np.ndarray:
    return users.sums(STEP, BOUNDS)["sizes"].exact_numbers


# Nodes that are not there


def test_a_round_goes_on_without_a_node_and_counts_it_again_when_it_is_back(files: list[Path], tmp_path: Path) -> None:
    with federation(TASK, files, tmp_path, **QUICK) as fed:
        users = fed.engine()
        assert np.array_equal(asked(users), total(fed, "abc"))
        fed.wire.away.add("b")
        assert np.array_equal(asked(users), total(fed, "ac"))
        assert fed.heard("question 2: b did not answer in time")
        assert fed.heard("went on with 24 of 36 users")
        said = len(fed.said)
        assert np.array_equal(asked(users), total(fed, "ac"))  # at once: nobody waits for it any longer
        assert not any("in time" in each for each in fed.said[said:])
        fed.wire.away.clear()
        fed.wire.slow["b"] = 0.05  # the slowest of all, as it may have been before
        for _ in range(3):
            found = asked(users)
            time.sleep(0.06)
        assert np.array_equal(found, total(fed, "abc"))
        assert fed.heard("b answered an earlier question, too late")


def test_a_node_that_is_late_is_left_out_of_that_round_alone(files: list[Path], tmp_path: Path) -> None:
    with federation(TASK, files, tmp_path, **{**QUICK, "resend": 5.0}) as fed:
        users = fed.engine()
        fed.wire.slow["c"] = 0.4
        assert np.array_equal(asked(users), total(fed, "ab"))
        fed.wire.slow.clear()
        assert np.array_equal([asked(users) for _ in range(3)][-1], total(fed, "abc"))


def test_answers_that_come_twice_count_once(files: list[Path], tmp_path: Path) -> None:
    with federation(TASK, files, tmp_path, **{**QUICK, "round_timeout": 5.0}) as fed:
        users = fed.engine()
        fed.wire.twice = True
        assert np.array_equal(asked(users), total(fed, "abc"))
        fed.wire.twice, fed.wire.slow["a"] = False, 0.25
        assert np.array_equal(asked(users), total(fed, "abc"))
        assert fed.heard("question 2: asked a again")
        fed.wire.slow.clear()
        assert np.array_equal(asked(users), total(fed, "abc"))


def test_a_node_that_was_started_anew_is_told_of_the_run(files: list[Path], tmp_path: Path) -> None:
    with federation(TASK, files, tmp_path, **QUICK) as fed:
        users = fed.engine()
        fed.hosts["b"].close()
        assert np.array_equal(asked(users), total(fed, "abc"))  # it finds the run in its folder
        fed.hosts["b"].close()
        (tmp_path / "b" / "hello.json").unlink(missing_ok=True)
        assert np.array_equal(asked(users), total(fed, "abc"))
        assert fed.heard("b came back")


def test_a_node_that_never_knows_the_run_does_not_fill_the_log(files: list[Path], tmp_path: Path) -> None:
    def lost(passed: Passed, question: dict[str, Any]) -> RecordDict:
        return pack({"refused": "unknown-run"}) if passed.node == "b" else passed.content

    with federation(TASK, files, tmp_path, fault=lost, **QUICK) as fed:
        assert np.array_equal(asked(fed.engine()), total(fed, "ac"))
        assert 1 <= sum("b came back" in each for each in fed.said) <= 6


def test_too_few_users_release_nothing_and_charge_nothing(files: list[Path], tmp_path: Path) -> None:
    settings = {**QUICK, "wait": 0.4, "min_users": 30}
    with federation(TASK, files, tmp_path / "nodes", **settings) as fed:
        with pytest.raises(InputError, match=r"24 of 36 users .* it takes 30 users .* Nothing was released"):
            fed.run(tmp_path / "run", lambda page: fed.wire.away.add("b"))
        pages = Billboard(tmp_path / "run" / "billboard")
        ledger = read_ledger(tmp_path / "run" / "ledger.jsonl")
        posted = ledger.entries.posted
        assert len(posted) == 1
        assert {name.split("/")[0] for name in ledger.entries.charges} == set(posted)
        assert all(page in pages for page in posted)
        fed.wire.away.clear()
        fed.run(tmp_path / "run")
    with federation(TASK, files, tmp_path / "undisturbed") as fed:
        fed.run(tmp_path / "whole")
    assert (tmp_path / "run" / "ledger.jsonl").read_bytes() == (tmp_path / "whole" / "ledger.jsonl").read_bytes()
    stopped, whole = models.load(tmp_path / "run"), models.load(tmp_path / "whole")
    assert np.array_equal(stopped.representation.matrix, whole.representation.matrix)


def test_a_node_that_leaves_for_good_misses_the_model_and_nothing_else(files: list[Path], tmp_path: Path) -> None:
    with federation(TASK, files, tmp_path / "nodes", **QUICK) as fed:
        fed.run(tmp_path / "run", lambda page: fed.wire.away.add("c"))
        assert fed.heard("2 nodes have the model; c can use the published folder")
    assert models.load(tmp_path / "run").heads is None
    assert (tmp_path / "nodes" / "a" / "model" / "model.json").is_file()
    assert not (tmp_path / "nodes" / "c" / "model").exists()


# Answers that are wrong


def changed(**fields: Any) -> Callable[[Answer], RecordDict]:
    def change(answer: Answer) -> RecordDict:
        return pack({"number": answer.number, "users": answer.users, **fields}, answer.sums)

    return change


def with_sums(make: Callable[[np.ndarray], dict[str, np.ndarray]]) -> Callable[[Answer], RecordDict]:
    return lambda answer: pack({"number": answer.number, "users": answer.users}, make(answer.sums["sizes"]))


def in_front(value: int) -> np.ndarray:
    """Return a sum of whole steps that is zero but for its first number."""
    return np.where(np.arange(SIZE) == 0, value, 0)


def spoiled(place: int, value: float) -> Callable[[Answer], RecordDict]:
    return with_sums(lambda sums: {"sizes": np.where(np.arange(SIZE) == place, value, sums)})


def broken(answer: Answer) -> RecordDict:
    raise Broken


def one_more_record(answer: Answer) -> RecordDict:
    content = answer.to_record()
    content["more"] = MetricRecord({"users": 12})
    return content


LONGEST = math.floor(NODES["b"] * BOUNDS["sizes"].reach / BOUNDS["sizes"].step)  # in steps


def written(text: str, arrays: bytes, version: int | str | None = VERSION) -> RecordDict:
    """Return a message as it travels, with whatever text, arrays and version."""
    said = {} if version is None else {"version": version}
    return RecordDict({"privrep": ConfigRecord({**said, "text": text, "arrays": arrays})})


WRONG: dict[str, tuple[Callable[[Answer], RecordDict], str]] = {
    "nan": (spoiled(3, math.nan), "whole numbers of grid steps"),
    "inf": (spoiled(3, math.inf), "whole numbers of grid steps"),
    "one number more": (with_sums(lambda sums: {"sizes": np.append(sums, 0)}), "were asked for"),
    "a matrix": (with_sums(lambda sums: {"sizes": sums.reshape(FEATURES, -1)}), "vectors of int64 or float64"),
    "float32": (with_sums(lambda sums: {"sizes": sums.astype(np.float32)}), "vectors of int64 or float64"),
    "float64": (with_sums(lambda sums: {"sizes": sums * BOUNDS["sizes"].step}), "whole numbers of grid steps"),
    "short integers": (with_sums(lambda sums: {"sizes": sums.astype(np.int32)}), "vectors of int64 or float64"),
    "unsigned integers": (with_sums(lambda sums: {"sizes": sums.astype(np.uint64)}), "vectors of int64 or float64"),
    "another name": (with_sums(lambda sums: {"other": sums}), "other statistics"),
    "one statistic more": (with_sums(lambda sums: {"sizes": sums, "more": sums}), "other statistics"),
    "no statistic": (with_sums(lambda sums: {}), "other statistics"),
    "too long": (with_sums(lambda sums: {"sizes": in_front(LONGEST + 1)}), "is longer than"),
    "far too long": (spoiled(0, 2**63 - 1), "is longer than"),
    "far too long downwards": (spoiled(0, -(2**63)), "is longer than"),
    "another question": (changed(number=77), "another question"),
    "more users": (changed(users=13), "says it has 13 users, and joined with 12"),
    "fewer users": (changed(users=11), "says it has 11 users, and joined with 12"),
    "users by a text": (changed(users="12"), "whole number"),
    "users by true": (changed(users=True), "whole number"),
    "another field": (changed(rows=1), "other fields"),
    "a refusal": (lambda answer: pack({"refused": "failed"}), "cannot answer (failed)"),
    "a refusal that tells": (lambda answer: pack({"refused": "user 7 is rich"}), "one of a few words"),
    "nothing": (lambda answer: RecordDict(), "of another kind"),
    "one record more": (one_more_record, "of another kind"),
    "no JSON": (lambda answer: written("{", b""), "damaged"),
    "an old version": (lambda answer: written("{}", b"", None), f"1 there, {VERSION} here"),
    "a later version": (lambda answer: written("{}", b"", VERSION + 1), f"{VERSION + 1} there, {VERSION} here"),
    "no version": (lambda answer: written("{}", b"", "x"), "an unknown one there"),
    "unreadable": (broken, "its answer is damaged"),
}


def spoil_first(spoil: Any) -> Any:
    """A fault that spoils the first answer of node b."""

    def fault(passed: Passed, question: dict[str, Any]) -> RecordDict:
        wrong = passed.node == "b" and question["number"] == 1
        return spoil(Answer.from_record(passed.content)) if wrong else passed.content

    return fault


@pytest.mark.parametrize("name", WRONG)
def test_a_wrong_answer_is_left_out_and_the_next_one_counts(name: str, files: list[Path], tmp_path: Path) -> None:
    spoil, words = WRONG[name]

    with federation(TASK, files, tmp_path, fault=spoil_first(spoil)) as fed:
        users = fed.engine()
        assert np.array_equal(asked(users), total(fed, "ac"))
        assert fed.heard("question 1: b")
        assert fed.heard(words)
        assert not fed.heard("rich")
        assert np.array_equal(asked(users), total(fed, "abc"))


def test_the_longest_sum_that_users_can_make_is_taken(files: list[Path], tmp_path: Path) -> None:
    def fault(passed: Passed, question: dict[str, Any]) -> RecordDict:
        if passed.node != "b":
            return passed.content
        return Answer(question["number"], NODES["b"], {"sizes": in_front(LONGEST)}).to_record()

    with federation(TASK, files, tmp_path, fault=fault) as fed:
        moved = asked(fed.engine()) - total(fed, "ac")
    assert np.array_equal(moved, in_front(LONGEST) * BOUNDS["sizes"].step)  # sums are exact: so is their difference


@pytest.mark.parametrize(
    "facts",
    [
        {"users": 0},
        {"users": -5},
        {"users": MAX_INT64_USERS + 1},  # their sum may leave 63 bits
        {"users": 12.5},
        {"users": "12"},
        {"features": FEATURES + 1},
        {"sparse": True},
        {"sparse": 0},
        {"more": 1},
    ],
    ids=str,
)
def test_a_node_that_cannot_be_true_is_not_let_in(facts: dict[str, Any], files: list[Path], tmp_path: Path) -> None:
    def fault(passed: Passed, question: dict[str, Any]) -> RecordDict:
        lies = passed.kind == "hello" and passed.node == "c" and not question["begin"]
        return pack({**passed.fields, **facts}) if lies else passed.content

    with federation(TASK, files, tmp_path / "nodes", fault=fault, min_nodes=2, **QUICK) as fed:
        fed.run(tmp_path / "run")
        assert fed.heard("c is left out")
        assert fed.heard("2 nodes with 28 users take part")
    assert models.load(tmp_path / "run").privacy.epsilon > 0


def test_a_lie_about_the_count_at_the_start_is_found_in_every_round(files: list[Path], tmp_path: Path) -> None:
    def fault(passed: Passed, question: dict[str, Any]) -> RecordDict:
        lies = passed.kind == "hello" and passed.node == "c" and not question["begin"]
        return pack({**passed.fields, "users": 1000}) if lies else passed.content

    with federation(TASK, files, tmp_path / "nodes", fault=fault) as fed:
        fed.run(tmp_path / "run")
        assert fed.heard("3 nodes with 1,028 users take part")
        rounds = {passed.fields["number"] for passed in fed.wire.record if passed.kind == "sums" and passed.way == "up"}
        said = [each for each in fed.said if "it says it has 8 users, and joined with 1,000" in each]
        assert len(said) == len(rounds) > 3


def test_a_node_whose_hello_was_lost_is_asked_again(files: list[Path], tmp_path: Path) -> None:
    lost: list[str] = []

    def fault(passed: Passed, question: dict[str, Any]) -> RecordDict:
        if passed.kind == "hello" and passed.node == "b" and len(lost) < 4:
            lost.append(passed.node)
            raise Lost
        return passed.content

    with federation(TASK, files, tmp_path / "nodes", fault=fault, min_nodes=3, **{**QUICK, "wait": 10.0}) as fed:
        fed.run(tmp_path / "run")
        assert lost
        assert fed.heard("3 nodes with 36 users take part")


# Fuzz


class Canned:
    """Three nodes whose answers are made here: honest ones, and one of b's that is not."""

    def __init__(self, sums: dict[str, np.ndarray], spoil: Callable[[Answer], RecordDict]) -> None:
        self._sums, self._spoil, self._asked = sums, spoil, dict[str, tuple[str, int]]()
        self.grid: Any = self

    def nodes(self) -> dict[str, int]:
        return {name: place for place, name in enumerate(NODES)}

    def push_messages(self, messages: Any) -> list[str]:
        sent = []
        for message in messages:
            fields = unpack(message.content)[0]
            sent.append(str(len(self._asked)))
            self._asked[sent[-1]] = (list(NODES)[message.metadata.dst_node_id], fields.get("number", 0))
        return sent

    def pull_messages(self, numbers: list[str]) -> list[Any]:
        found = []
        for name, number in map(self._asked.__getitem__, numbers):
            answer = Answer(number, NODES[name], {"sizes": self._sums[name]})
            content = self._spoil(answer) if name == "b" else answer.to_record()
            found.append(SimpleNamespace(content=content, has_error=lambda: False))
        return found


ODD: list[Any] = [None, True, -1, 0, 1, 12, 13, 1e308, 2**63, 2**200, "", "12", "nan", [], [12], {}, {"users": 12}]
ODD_ARRAYS: list[np.ndarray] = [
    np.zeros(SIZE),
    np.full(SIZE, 1e-320),
    np.full(SIZE, 1e308),
    np.full(SIZE, -np.inf),
    np.full(SIZE, 0.1),
    np.zeros(SIZE, np.int64),
    np.full(SIZE, 2**63 - 1),
    np.full(SIZE, -(2**63)),
    np.full(SIZE, round(0.1 / BOUNDS["sizes"].step)),
    np.ones(SIZE, np.float16),
    np.ones(SIZE, np.uint8),
    np.ones(SIZE, bool),
    np.zeros(0),
    np.zeros((0, SIZE)),
    np.ones((SIZE, 1)),
    np.float64(1.0).reshape(()),
]


def mutated(content: RecordDict, rng: np.random.Generator) -> RecordDict:
    """A good message with something wrong with it."""
    fields, arrays = unpack(content)
    kind = rng.integers(8)
    if kind == 0:  # bytes of the whole record
        raw = flipped(recorddict_to_proto(content).SerializeToString(), rng)
        proto = ProtoRecordDict()
        proto.ParseFromString(raw)
        return recorddict_from_proto(proto)
    if kind == 1:  # bytes of the arrays
        return written(json.dumps(fields), flipped(save(arrays), rng))
    if kind == 2:  # characters of the text
        text = flipped(json.dumps(fields).encode(), rng).decode("utf-8", "replace")
        return written(text, save(arrays))
    if kind == 3:  # a field
        name = rng.choice([*fields, "refused", "more"])
        return pack({**fields, str(name): ODD[rng.integers(len(ODD))]}, arrays)
    if kind == 4:  # a field less
        gone = rng.choice(list(fields))
        return pack({name: value for name, value in fields.items() if name != gone}, arrays)
    if kind == 5:  # an array
        name = rng.choice([*arrays, "more"])
        return pack(fields, {**arrays, str(name): ODD_ARRAYS[rng.integers(len(ODD_ARRAYS))]})
    if kind == 6:  # numbers of an array
        new = {key: np.array(array, dtype=array.dtype) for key, array in arrays.items()}
        for array in new.values():
            if array.dtype == np.int64 and array.ndim:
                some = rng.integers(array.size, size=rng.integers(1, 5))
                array.ravel()[some] = rng.choice([0, -3, -LONGEST // 4, 4 * LONGEST, 2**63 - 1, -(2**63)], len(some))
        return pack(fields, new)
    more = [MetricRecord({"a": 1.0}), ArrayRecord(), ConfigRecord({"text": "x"})][rng.integers(3)]
    name = ["privrep", "more"][rng.integers(2)]
    return RecordDict({**dict(content.items()), name: more})


def flipped(data: bytes, rng: np.random.Generator) -> bytes:
    changed = bytearray(data)
    for place in rng.integers(len(changed), size=rng.integers(1, 6)):
        changed[place] = rng.integers(256)
    return bytes(changed[: rng.integers(1, len(changed))]) if rng.random() < 0.2 else bytes(changed)


def test_a_thousand_malformed_answers_crash_nothing_and_move_nothing_beyond_the_bound(
    files: list[Path], tmp_path: Path
) -> None:
    with federation(TASK, files, tmp_path) as fed:
        fed.engine()
        sums = {name: fed.hosts[name]._users.sums(STEP, BOUNDS)["sizes"].total for name in NODES}
    rng, said, sent = np.random.default_rng(0), list[str](), list[RecordDict]()

    def spoil(answer: Answer) -> RecordDict:
        good = answer.to_record()
        sent.append(good)  # stands if the next line fails, as Flower would
        sent[-1] = next(made for made in iter(lambda: mutated(good, rng), None) if not same(made, good))
        return sent[-1]

    roster = {name: Facts(users, FEATURES, 1, False) for name, users in NODES.items()}
    settings = FederationSettings(wait=0.2, round_timeout=0.01, resend=0.005, poll=0.001)
    talk = Conversation(Canned(sums, spoil), settings, said.append, lambda name: pack({}))
    users = FlowerUsers(talk, RUN, roster, (FEATURES, 1, False))
    without, longest, taken = sums["a"] + sums["c"], 0.0, 0
    bound = BOUNDS["sizes"]
    for _ in range(1000):
        said.clear()
        found = users.sums(STEP, BOUNDS)["sizes"].total
        if any(": b " in each for each in said):
            assert np.array_equal(found, without)
            continue
        taken += 1  # nothing is wrong with it that a server could see: it is what some users could have sent
        assert np.array_equal(found, without + Answer.from_record(sent[-1]).sums["sizes"])
        moved = float(np.linalg.norm((found - without) * bound.step))
        assert moved <= NODES["b"] * bound.reach * (1 + 1e-12)
        longest = max(longest, moved)
    print(f"fuzz of answers: 1,000, {1000 - taken} left out, {taken} counted, moving the sum by {longest:.3f} at most")
    assert 0 < taken < 500


def same(one: RecordDict, other: RecordDict) -> bool:
    """Whether two messages say the same."""
    try:
        (fields, arrays), (wanted, others) = unpack(one), unpack(other)
    except InputError:
        return False
    equal = arrays.keys() == others.keys() and all(
        arrays[name].dtype == others[name].dtype and arrays[name].tobytes() == others[name].tobytes() for name in arrays
    )
    return fields == wanted and equal


def test_malformed_questions_get_a_refusal_or_an_answer_and_never_a_reason(files: list[Path], tmp_path: Path) -> None:
    outside = tmp_path / "deep" / "deeper"
    with federation(TASK, files, outside / "nodes") as fed:
        fed.run(outside / "run")
        good = [passed for passed in fed.wire.record if passed.way == "down" and passed.node == "a"]
        shutil.rmtree(outside / "nodes" / "a" / "model")
        rng, counts, host = np.random.default_rng(1), dict[str, int](), fed.hosts["a"]
        app, before = host.make_app(), set(tmp_path.rglob("*"))
        begin = next(passed for passed in good if passed.kind == "hello" and passed.fields["begin"])
        for number in range(400):
            passed = good[rng.integers(len(good))]
            try:
                content = mutated(passed.content, rng)
            except Exception:  # Flower would not have delivered it
                continue
            if same(content, passed.content):
                continue
            if number % 20 == 0:
                host.answer_hello(begin.content)
            kind = {"hello": "query.hello", "sums": "train.sums", "model": "query.model"}[passed.kind]
            message = Message(content, dst_node_id=1, message_type=kind)
            reply = app(
                message, SimpleNamespace(run_id=1, node_id=1, node_config={}, state=RecordDict(), run_config={})
            )
            fields = unpack(reply.content)[0]
            word = fields.get("refused", "answered")
            counts[word] = counts.get(word, 0) + 1
            assert set(fields) in (
                {"refused"}, {"ready"}, {"kept"}, {"number", "users"}, {"users", "features", "targets", "sparse"},
            )  # fmt: skip
            assert word == "answered" or word in REFUSALS
            shutil.rmtree(outside / "nodes" / "a" / "model", ignore_errors=True)
        print(f"fuzz of questions: {sum(counts.values())}, {counts}")
        assert counts["answered"] > 0
        assert sum(counts.values()) - counts["answered"] > 200
        new = {path for path in set(tmp_path.rglob("*")) - before if outside / "nodes" / "a" not in path.parents}
        assert not new


def test_a_question_about_a_group_and_a_sample_at_once_is_refused_before_the_pass(
    files: list[Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    passes = list[object]()
    original = FeatureSizes.__call__

    def counted(self: FeatureSizes, batch: UserBatch) -> Any:
        passes.append(batch)
        return original(self, batch)

    monkeypatch.setattr(FeatureSizes, "__call__", counted)
    with federation(TASK, files, tmp_path) as fed:
        fed.engine()
        host = fed.hosts["a"]
        group = Question(RUN, 1, STEP, BOUNDS, Group("split", 0, 2))
        assert Answer.from_record(host.answer_sums(group.to_record())).users == NODES["a"]  # a group alone is answered
        assert passes
        passes.clear()
        both = replace(group, chosen=np.ones(NODES["a"], bool), rate=0.5)
        with pytest.raises(InputError, match="Ask a group or a sample, not both"):
            host.answer_sums(both.to_record())
        noisy = replace(both, page="page-1", mu_squared={"sizes": 0.1})
        with pytest.raises(InputError, match="another kind of sums"):
            host.answer_sums(noisy.to_record())
    assert not passes


# Steps that fail


def test_a_user_on_whom_a_step_fails_sends_zeros_and_stops_nobody(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    rows = made_up()
    _, without = write_files(tmp_path / "without", rows)
    marked = {**rows, "x2": rows["x2"].copy()}
    marked["x2"][5] = 4711.0  # of the first user
    _, files = write_files(tmp_path / "with", marked)
    original = FeatureSizes.__call__

    def fails(self: FeatureSizes, batch: UserBatch) -> Any:
        if (batch.X == 4711.0).any():
            raise ZeroDivisionError("user 7 is rich")
        return original(self, batch)

    monkeypatch.setattr(FeatureSizes, "__call__", fails)
    with federation(TASK, without, tmp_path / "a") as fed, federation(TASK, files, tmp_path / "b") as other:
        clean, disturbed = asked(fed.engine()), asked(other.engine())
        assert not other.heard("left out")
        assert not other.heard("cannot")
        first = fed.hosts["a"]._users.users.table.users(0, 1)
        own = type(fed.hosts["a"]._users.users)(first).sums(STEP, BOUNDS)["sizes"].exact_numbers
    assert 0 < np.linalg.norm(clean - disturbed) <= BOUNDS["sizes"].reach
    assert np.array_equal(disturbed, clean - own)


@pytest.mark.parametrize("where", ["everywhere", "on made-up rows alone"])
def test_a_step_that_fails_on_made_up_rows_is_refused_whatever_users_hold(
    where: str, files: list[Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Else a server could learn from refusals, which cost nothing, what users hold."""
    original, seen = FeatureSizes.__call__, []

    def fails(self: FeatureSizes, batch: UserBatch) -> Any:
        if where == "everywhere" or (np.shape(batch.X)[:2] == (1, 8) and batch.X.dtype == np.float32):
            raise ZeroDivisionError("user 7 is rich")
        seen.append(len(batch))
        return original(self, batch)

    monkeypatch.setattr(FeatureSizes, "__call__", fails)
    with federation(TASK, files, tmp_path) as fed:
        with pytest.raises(InputError, match="0 of 36 users"):
            asked(fed.engine())
        assert fed.heard("a cannot answer (refused)")
    assert not seen


# Noise of the nodes

QUERIES = {"sizes": Query(BOUNDS["sizes"], 0.5)}


def noisy(files: list[Path], folder: Path, *, share: int = 3, epsilon: float = 400.0, **options: Any) -> Any:
    settings = {"noise": {"epsilon": epsilon}, "noise_nodes": share, **options}
    return federation(settings.pop("task", TASK), files, folder, **settings)


def test_the_noise_of_nodes_adds_up_to_what_is_charged(files: list[Path], tmp_path: Path) -> None:
    wanted = calibrate(BOUNDS["sizes"], 0.5, "replace-one-user").sigma
    with noisy(files, tmp_path) as fed:
        users: Any = fed.engine()
        exact, noise = total(fed, "abc"), []
        for number in range(20):
            found = users.noisy_sums(f"page-{number}", STEP, QUERIES, "replace-one-user")["sizes"]
            assert found.sigma == pytest.approx(wanted, rel=1e-9)
            noise.append(found.value - exact)
    drawn = np.concatenate(noise)
    low, high = chi2.ppf([5e-7, 1 - 5e-7], len(drawn))

    def plausible(values: np.ndarray) -> bool:
        return bool(low <= np.sum((values / wanted) ** 2) <= high)

    assert plausible(drawn)
    assert not plausible(drawn / math.sqrt(3))


def test_more_nodes_than_needed_add_more_noise_and_the_release_says_so(files: list[Path], tmp_path: Path) -> None:
    wanted = calibrate(BOUNDS["sizes"], 0.5, "replace-one-user").sigma
    with noisy(files, tmp_path, share=2, **QUICK) as fed:
        users: Any = fed.engine()
        found = users.noisy_sums("page-1", STEP, QUERIES, "replace-one-user")["sizes"]
        assert found.sigma == pytest.approx(wanted * math.sqrt(3 / 2))
        fed.wire.away.add("a")
        found = users.noisy_sums("page-2", STEP, QUERIES, "replace-one-user")["sizes"]
        assert found.sigma == pytest.approx(wanted)
        fed.wire.away.add("b")
        fed.settings = replace(fed.settings, wait=0.4)
        users._conversation.pace = fed.settings
        with pytest.raises(InputError, match="Nothing was released"):
            users.noisy_sums("page-3", STEP, QUERIES, "replace-one-user")


WRONG_NOISY: dict[str, tuple[Callable[[Answer], RecordDict], str]] = {
    "nan": (spoiled(3, math.nan), "not finite"),
    "inf": (spoiled(3, math.inf), "not finite"),
    "far too long": (spoiled(0, 1e300), "is longer than"),
    "exact sums": (with_sums(lambda sums: {"sizes": np.zeros(SIZE, np.int64)}), "noisy sums are numbers of float64"),
    "float32": (with_sums(lambda sums: {"sizes": sums.astype(np.float32)}), "vectors of int64 or float64"),
}


@pytest.mark.parametrize("name", WRONG_NOISY)
def test_a_wrong_noisy_answer_is_left_out_and_the_next_one_counts(name: str, files: list[Path], tmp_path: Path) -> None:
    spoil, words = WRONG_NOISY[name]

    with noisy(files, tmp_path, share=2, fault=spoil_first(spoil)) as fed:
        users: Any = fed.engine()
        two, three = (
            users.noisy_sums(page, STEP, QUERIES, "replace-one-user")["sizes"].sigma for page in ("page-1", "page-2")
        )
        assert three == pytest.approx(two * math.sqrt(3 / 2))
        assert fed.heard("question 1: b")
        assert fed.heard(words)


def test_a_page_that_was_asked_before_has_the_same_numbers_and_costs_nothing(files: list[Path], tmp_path: Path) -> None:
    with noisy(files, tmp_path, task=PRIVATE) as fed:
        users: Any = fed.engine()
        first = users.noisy_sums("page-1", STEP, QUERIES, "replace-one-user")["sizes"].value
        ledger = tmp_path / "a" / "noise" / RUN / "ledger.jsonl"
        spent = read_ledger(ledger).epsilon
        assert spent > 0
        for host in fed.hosts.values():  # started anew
            host.close()
        again = users.noisy_sums("page-1", STEP, QUERIES, "replace-one-user")["sizes"].value
        assert np.array_equal(first, again)
        assert read_ledger(ledger).epsilon == spent
        other = users.noisy_sums("page-2", STEP, QUERIES, "replace-one-user")["sizes"].value
        assert np.abs(other - first).max() > 0
        assert read_ledger(ledger).epsilon > spent


def test_a_node_releases_no_more_than_its_own_ledger_allows(files: list[Path], tmp_path: Path) -> None:
    with noisy(files, tmp_path, epsilon=4.0, task=PRIVATE) as fed:
        users: Any = fed.engine()
        pages, small = list[str](), {"sizes": Query(BOUNDS["sizes"], 0.05)}

        def ask_on() -> None:
            while len(pages) < 50:
                users.noisy_sums(f"page-{len(pages)}", STEP, small, "replace-one-user")
                pages.append("one more")

        with pytest.raises(InputError, match="0 of 36 users"):
            ask_on()
        assert 2 <= len(pages) <= 10
        assert fed.heard("a cannot answer (refused)")
        for name in NODES:
            assert read_ledger(tmp_path / name / "noise" / RUN / "ledger.jsonl").epsilon <= 4.0


def hello(task: TableTask, noise: dict[str, Any] | None, run: str = RUN) -> RecordDict:
    return pack({"run": run, "name": "a", "task": task.to_json(), "begin": True, "noise": noise})


ADDED = replace(PRIVATE, config=replace(PRIVATE.config, relation="add-or-remove-one-user", scale=(1.0,) * FEATURES))


def test_a_node_tells_its_operator_that_the_server_speaks_another_version(files: list[Path], tmp_path: Path) -> None:
    said: list[str] = []
    host = Host(files[0], tmp_path, said.append)
    with pytest.raises(InputError, match=f"different versions of privrep's wire: 1 there, {VERSION} here"):
        host.answer_hello(written("{}", b"", None))


def test_a_node_takes_part_in_what_was_agreed_on_alone(files: list[Path], tmp_path: Path) -> None:
    agreed = Agreement(PRIVATE, {"epsilon": 5.0})
    with federation(PRIVATE, files, tmp_path / "nodes", agreed=agreed, simulation=False) as fed:
        host = fed.hosts["a"]
        for given, words in [
            (hello(PRIVATE, None), "plan for the noise"),
            (hello(PRIVATE, {"epsilon": 5.1}), "plan for the noise"),
            (hello(PRIVATE, {"epsilon": 5.0, "more": 1}), "plan for the noise"),
            (hello(PRIVATE, {"epsilon": "5"}), "plan for the noise"),
            (hello(TASK, {"epsilon": 5.0}), "not the one that was agreed on"),
            (hello(ADDED, {"epsilon": 5.0}), "not the one that was agreed on"),
            (hello(PRIVATE, {"epsilon": 5.0}, "../../elsewhere"), "other fields|name that is none"),
        ]:
            with pytest.raises(InputError, match=words):
                host.answer_hello(given)
        assert not list((tmp_path / "nodes" / "a").iterdir())
        assert unpack(host.answer_hello(hello(PRIVATE, {"epsilon": 5.0})))[0] == {"ready": True}
        with pytest.raises(InputError, match="another run"):  # which would begin a new ledger
            host.answer_hello(hello(PRIVATE, {"epsilon": 5.0}, RUN[::-1]))


def test_a_run_of_a_node_keeps_its_noise_and_its_budget(files: list[Path], tmp_path: Path) -> None:
    with federation(PRIVATE, files, tmp_path / "nodes", simulation=False) as fed:
        host = fed.hosts["a"]
        with pytest.raises(InputError, match="can reproduce"):
            host.answer_hello(hello(TASK, {"epsilon": 5.0}))
        assert unpack(host.answer_hello(hello(PRIVATE, {"epsilon": 5.0})))[0] == {"ready": True}
        host.close()
        with pytest.raises(InputError, match="another budget"):
            host.answer_hello(hello(PRIVATE, {"epsilon": 50.0}))
        host.close()
        with pytest.raises(InputError, match="exact sums now"):
            host.answer_hello(hello(PRIVATE, None))


def test_exact_sums_are_not_asked_of_nodes_with_noise_nor_noisy_ones_of_others(
    files: list[Path], tmp_path: Path
) -> None:
    with noisy(files, tmp_path / "noisy") as fed:
        users: Any = fed.engine()
        with pytest.raises(InputError, match="no exact sums"):
            asked(users)
        with pytest.raises(InputError, match="no exact sums"):
            users.sums(STEP, {"sizes": LossBound(3)})
        plain = FlowerUsers(users._conversation, RUN, users.roster, (FEATURES, 1, False))
        with pytest.raises(InputError, match="0 of 36 users"):
            asked(plain)
        assert fed.heard("cannot answer (refused)")


@pytest.mark.parametrize(
    ("task", "settings", "words"),
    [
        (ADDED, {}, "replace-one-user alone"),
        (TASK, {"noise_nodes": 4, "min_nodes": 1, "wait": 0.3}, "3 nodes joined .* it takes 4"),
        (TASK, {"noise_nodes": 3, "server_epsilon": 21.0}, "server_epsilon is 21"),
    ],
)
def test_noise_of_nodes_that_cannot_be_had_is_refused_before_anything_is_spent(
    task: TableTask, settings: dict[str, Any], words: str, files: list[Path], tmp_path: Path
) -> None:
    asked_for = {"noise_nodes": 2, **settings}
    with federation(task, files, tmp_path / "nodes", **asked_for) as fed:
        with pytest.raises(InputError, match=words):
            fed.run(tmp_path / "run")
        assert not (tmp_path / "run" / "ledger.jsonl").exists()


def test_a_whole_run_with_noise_of_the_nodes(files: list[Path], tmp_path: Path) -> None:
    with federation(TASK, files, tmp_path / "nodes", noise_nodes=2) as fed:
        fed.run(tmp_path / "run")
    model = models.load(tmp_path / "run")
    assert model.privacy.epsilon <= BUDGET["epsilon"]
    public = read_ledger(tmp_path / "run" / "ledger.jsonl")
    board = Billboard(tmp_path / "run" / "billboard")
    own = read_ledger(tmp_path / "nodes" / "a" / "noise" / next((tmp_path / "nodes" / "a" / "noise").iterdir()).name
                      / "ledger.jsonl")  # fmt: skip
    assert own.entries.charges.keys() == public.entries.charges.keys()
    for name, event in public.entries.charges.items():
        page, key = name.split("/")
        released = board.releases(page)[key]
        assert released.sigma >= event.noise_multiplier * released.sensitivity * (1 - 1e-9)
        assert released.sigma == pytest.approx(
            event.noise_multiplier * released.sensitivity * math.sqrt(3 / 2), rel=1e-6
        )
    mu = Budget(BUDGET["epsilon"], BUDGET["delta"], "replace-one-user").mu
    assert own.budget.mu == pytest.approx(mu * math.sqrt(2), rel=1e-3)


# Servers that are stopped


@pytest.mark.parametrize("noise_nodes", [1, 2], ids=["noise of the server", "noise of the nodes"])
def test_a_server_that_was_stopped_goes_on_and_spends_nothing_twice(
    noise_nodes: int, files: list[Path], tmp_path: Path
) -> None:
    settings = {"noise_nodes": noise_nodes, "min_nodes": 3}
    pages = list[str]()
    with federation(TASK, files, tmp_path / "nodes", **settings) as fed:
        whole = fed.run(tmp_path / "whole", pages.append)
    assert len(pages) >= 5
    for stop in (1, 3, len(pages)):
        folder, nodes, seen = tmp_path / f"run-{stop}", tmp_path / f"nodes-{stop}", list[str]()

        def on_page(page: str, seen: list[str] = seen, stop: int = stop) -> None:
            seen.append(page)
            if len(seen) == stop:
                raise KeyboardInterrupt

        with federation(TASK, files, nodes, **settings) as fed, pytest.raises(KeyboardInterrupt):
            fed.run(folder, on_page)
        with federation(TASK, files, nodes, **settings) as fed:
            fed.run(folder)
            assert fed.heard("going on with the run that stands")
            assert not fed.heard("joined with")  # the roster stands
            facts = [p for p in fed.wire.record if p.kind == "hello" and p.way == "down" and not p.fields["begin"]]
            assert not facts
        assert (folder / "ledger.jsonl").read_bytes() == (whole / "ledger.jsonl").read_bytes()
        for path in (whole / "billboard").iterdir():
            values, wanted = load_file(folder / "billboard" / path.name), load_file(path)
            assert values.keys() == wanted.keys()
            assert all(np.array_equal(values[name], wanted[name]) for name in wanted)


def test_a_run_with_other_settings_is_not_continued(files: list[Path], tmp_path: Path) -> None:
    with federation(TASK, files, tmp_path / "nodes") as fed:
        fed.run(tmp_path / "run")
    other = TableTask(Config(1, **{**BUDGET, "epsilon": 2.0}), COLUMNS)
    with federation(other, files, tmp_path / "nodes") as fed, pytest.raises(InputError, match="other settings"):
        fed.run(tmp_path / "run")


def test_what_the_server_hears_of_its_model_does_not_depend_on_rows(
    files: list[Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fails(*_: Any) -> int:
        raise ArithmeticError("x0 of user 7 is 3.25")

    monkeypatch.setattr(TableTask, "keep", fails)
    with federation(TASK, files, tmp_path / "nodes") as fed:
        fed.run(tmp_path / "out")
        said = [passed.fields for passed in fed.wire.record if (passed.way, passed.kind) == ("up", "model")]
    assert said == [{"kept": True}] * len(NODES)
    assert all((tmp_path / "nodes" / name / "model" / "model.json").is_file() for name in NODES)
    assert not list((tmp_path / "nodes").glob("*/model/private/*"))


def test_a_model_of_another_task_is_not_handed_out(files: list[Path], tmp_path: Path) -> None:
    with federation(TASK, files, tmp_path / "nodes") as fed:
        fed.run(tmp_path / "out")
    (tmp_path / "out" / "notes.txt").write_text("for the operator alone")
    other = replace(TASK, config=replace(TASK.config, epsilon=19.0))
    shutil.rmtree(tmp_path / "out.federation")
    with federation(other, files, tmp_path / "others") as fed, pytest.raises(InputError, match="another task"):
        fed.run(tmp_path / "out")
    with federation(TASK, files, tmp_path / "again") as fed:
        shutil.rmtree(tmp_path / "out.federation")
        fed.run(tmp_path / "out")
        assert fed.heard("3 nodes have the model")
        assert not any("notes.txt" in passed.fields.get("files", ()) for passed in fed.wire.record)


@dataclass(frozen=True)
class _Understated(UserContributions):
    """Contributions that are said to be shorter than they are."""

    acute = False
    vectors: NDArray[Any]

    def norms(self) -> Any:
        return np.full(len(self.vectors), 1e-3)

    def roundings(self, norm: float, step: float) -> float:
        return measure_rounding(self.vectors.shape[1], step)

    def grid_sum(self, weights: Any, step: float) -> Any:
        return add_rounded(self.vectors, weights, step)


@dataclass(frozen=True)
class _Liar:
    """A step that no list has: it sends too much of users whose first number is above 1, and adds up all it sees."""

    spec: ClassVar[StepSpec] = StepSpec()

    def __call__(self, batch: UserBatch) -> dict[str, Any]:
        X = batch.X
        rows = X[:, 0, :FEATURES].astype(np.float64)
        long = rows[:, :1] > 1
        return {"rows": _Understated(np.where(long, 1e3, 0.1) * np.ones_like(rows) * len(X))}


def test_for_a_server_that_may_lie_users_are_asked_alone_and_measured() -> None:
    X = np.zeros((12, FEATURES))
    X[3:6] = 2.0  # of the second user, who would send 1e3
    table = InMemoryUsers(UserTable.from_rows(X, np.zeros(12), np.repeat(np.arange(4), 3)))
    loose, strict = (
        IsolatedUsers(table, strictly=strictly).sums(_Liar(), {"rows": Bound(1e9 if not strictly else 1.0, FEATURES)})
        for strictly in (False, True)
    )
    assert np.linalg.norm(loose["rows"].exact_numbers) > 1e3  # what the step sends, where nobody measures
    each = np.rint(0.1 / strict["rows"].bound.step)
    assert np.array_equal(strict["rows"].total, np.full(FEATURES, 3 * each))  # as if alone; the second sends zeros


def test_a_node_that_is_always_late_is_not_waited_for_in_every_round(files: list[Path], tmp_path: Path) -> None:
    with federation(TASK, files, tmp_path / "nodes", **QUICK) as fed:
        users = fed.engine()
        fed.wire.slow["b"] = 0.6  # twice as long as a round takes at the most
        for _ in range(4):
            users.sums(STEP, BOUNDS)
            time.sleep(0.65)  # its answer is there when the next round begins
        assert fed.heard("b answered an earlier question, too late")
        assert [each.split(": ")[1] for each in fed.said].count("b did not answer in time") == 2


def test_a_hello_that_was_not_agreed_on_is_refused_in_the_midst_of_a_run(files: list[Path], tmp_path: Path) -> None:
    agreed = Agreement(PRIVATE, {"epsilon": 5.0})
    with federation(PRIVATE, files, tmp_path / "nodes", agreed=agreed, simulation=False) as fed:
        host = fed.hosts["a"]
        host.answer_hello(hello(PRIVATE, {"epsilon": 5.0}))
        with pytest.raises(InputError, match="plan for the noise"):
            host.answer_hello(hello(PRIVATE, None))


@pytest.mark.parametrize("noise_nodes", [1, 2])
def test_a_node_that_has_the_model_answers_no_more_questions(
    noise_nodes: int, files: list[Path], tmp_path: Path
) -> None:
    """What the run did not spend went back to the node's population ledger, and is no longer the run's."""
    with federation(TASK, files, tmp_path / "nodes", noise_nodes=noise_nodes) as fed:
        fed.run(tmp_path / "run")
        sent = [one for one in fed.wire.record if (one.way, one.node, one.kind) == ("down", "a", "sums")]
        host = fed.hosts["a"]
        for _ in range(2):
            with pytest.raises(InputError, match="the run is over"):
                host.answer_sums(sent[-1].content)
            host.close()  # a node that was started again


def test_rows_stay_closed_where_the_noise_of_a_node_cannot_be_had(files: list[Path], tmp_path: Path) -> None:
    with federation(PRIVATE, files, tmp_path / "nodes", simulation=False) as fed:
        host = fed.hosts["a"]
        with pytest.raises(InputError, match="epsilon"):
            host.answer_hello(hello(PRIVATE, {"epsilon": -1.0}))
        assert (host.run, host._users, host._own) == (None, None, None)
