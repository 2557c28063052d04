"""A run may be killed anywhere: continuing it spends nothing twice, reports all that was spent, and ends the same.

This file is also the program that is killed. Run as a script it imports privrep once and forks a process for every
attempt; hooks around every sync, rename, draw, write and post count the places an attempt passes, and at a chosen one
the process ends without any clean-up. Of a charge that was not yet synced only a part survives, as in a power cut.
"""

from __future__ import annotations

import hashlib
import importlib
import json
import os
import signal
import subprocess
import sys
from collections.abc import Callable
from dataclasses import dataclass, field
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np

SEED = 11
DIED = 9


# The program that is killed


@dataclass
class Death:
    """Counts the places a process passes; at the fatal one it ends, by exit or by signal in turn."""

    fatal: int | None
    passed: list[str] = field(default_factory=list)

    def here(self, place: str, last_words: Callable[[], None] = lambda: None) -> None:
        self.passed.append(place)
        if self.fatal == len(self.passed) - 1:
            last_words()
            if self.fatal % 2:
                os.kill(os.getpid(), signal.SIGKILL)
            os._exit(DIED)


def haunt(death: Death, ledger: Path) -> None:
    """Put hooks around everything that leaves a trace. Only ever called in a process of its own."""
    from privrep.privacy import billboard as boards
    from privrep.privacy.billboard import Billboard
    from privrep.privacy.ledger import Ledger

    fsync, replace, save = os.fsync, os.replace, boards.save_file
    charge, post = Ledger.charge, Billboard._post
    safe = [ledger.stat().st_size if ledger.exists() else 0]  # bytes of the ledger that a power cut cannot take

    def new_fsync(descriptor: int) -> None:
        if Path(os.readlink(f"/proc/self/fd/{descriptor}")) != ledger:
            return fsync(descriptor)  # of a page or a folder: the places before and after have hooks of their own

        def tear() -> None:
            size = os.fstat(descriptor).st_size
            os.ftruncate(descriptor, safe[0] + (size - safe[0]) // 2)

        death.here("ledger written, not synced: torn", tear)
        death.here("ledger written, not synced: whole")
        fsync(descriptor)
        safe[0] = os.fstat(descriptor).st_size
        death.here("ledger synced")

    def new_replace(source: Any, target: Any) -> None:
        death.here("before rename")
        replace(source, target)
        death.here("after rename")

    def new_save(arrays: Any, path: str, metadata: Any) -> None:
        save(arrays, path, metadata=metadata)
        whole = Path(path).read_bytes()
        death.here("page half written", lambda: Path(path).write_bytes(whole[: len(whole) // 2]) and None)
        death.here("page written, not synced")

    def new_charge(self: Any, events: Any) -> None:
        death.here("before charge")
        charge(self, events)
        death.here("after charge, before draw")

    def new_post(self: Any, page: Any) -> None:
        death.here("after draw, before post")
        post(self, page)
        death.here("after post")

    os.fsync, os.replace, boards.save_file = new_fsync, new_replace, new_save  # type: ignore[assignment]
    Ledger.charge, Billboard._post = new_charge, new_post  # type: ignore[method-assign]


def attempt(folder: Path, seed: int | None, death: Death) -> None:
    """One process's life, from wherever the last one got to: keys are selected, one of three candidates is chosen, then
    a small Private FedRep."""
    from privrep.data.table import UserTable
    from privrep.linear.alternation import AlternationSettings
    from privrep.linear.methods.private_fedrep import private_fedrep
    from privrep.privacy.billboard import Billboard
    from privrep.privacy.contributions import Losses
    from privrep.privacy.ledger import Budget, Ledger
    from privrep.privacy.noise import secure_noise, simulated_noise
    from privrep.privacy.protocol import StepSpec, UserBatch
    from privrep.privacy.run import Run
    from privrep.users.holders import KeyHolders
    from privrep.users.memory import InMemoryUsers
    from privrep.users.performance import Performance

    rng = np.random.default_rng(0)
    X, heads = rng.normal(size=(300, 5, 3)), rng.normal(size=(300, 1, 1))
    y = (X[:, :, :1] * heads).sum(axis=2) + rng.normal(size=(300, 5))
    table = UserTable(X.reshape(-1, 3), y.ravel(), np.arange(0, 1505, 5), np.arange(300))
    source = secure_noise if seed is None else simulated_noise(seed)

    class Noise:
        seeded = source.seeded

        def __call__(self, name: str, sigma: float, size: int) -> Any:
            return self._between(name, lambda: source(name, sigma, size))

        def draw_choice(self, name: str, losses: Any, scale: int) -> int:
            return int(self._between(name, lambda: source.draw_choice(name, losses, scale)))

        def _between(self, name: str, draw: Callable[[], Any]) -> Any:
            death.here(f"before draw of {name}")
            drawn = draw()
            death.here(f"after draw of {name}")
            return drawn

    class Step:
        spec = StepSpec()

        def __call__(self, batch: UserBatch) -> Any:
            return {"losses": Losses(np.tile([0.5, 0.51, 0.52], (len(batch), 1)))}

    noise = Noise()
    folder.mkdir(exist_ok=True)
    haunt(death, folder / "ledger.jsonl")
    ledger = Ledger(Budget(40.0, 1e-6), seeded=seed is not None, path=folder / "ledger.jsonl")
    board, whole = Billboard(folder / "billboard"), ledger.budget.mu**2
    held = KeyHolders(("common", "rare"), (np.arange(300) < 3).astype(np.int64), np.arange(301))
    run = Run(InMemoryUsers(table, Performance(1)), ledger, board, noise)
    keys = run.select("keys-1", held, 0.05 * whole, 5e-8)
    chosen = run.choose("choice-1", Step(), 3, 2.0)
    learned = private_fedrep(run, 1, settings=AlternationSettings(rounds=2))
    result = [[*keys, chosen], learned.basis.tolist(), learned.scale.tolist(), learned.error]
    (folder / "result.json").write_text(json.dumps(result))
    (folder / "passed.json").write_text(json.dumps(death.passed))


def in_a_process(folder: Path, seed: int | None, fatal: int | None) -> bool:
    """Whether the attempt came to its end. Anything but the end and the death that was asked for is an error."""
    child = os.fork()
    if child == 0:
        try:
            attempt(folder, seed, Death(fatal))
            os._exit(0)
        finally:  # an exception: print it, do not return into the parent's code
            sys.excepthook(*sys.exc_info())
            sys.stderr.flush()
            os._exit(1)
    status = os.waitpid(child, 0)[1]
    killed = os.WIFSIGNALED(status) and os.WTERMSIG(status) == signal.SIGKILL
    if not killed and os.WEXITSTATUS(status) not in (0, DIED):
        raise RuntimeError(f"attempt in {folder} failed with status {status}")
    return not killed and os.WEXITSTATUS(status) == 0


def state(folder: Path) -> dict[str, Any]:
    """What a folder says: the ledger's report, the pages' files by their hashes, and what is on the pages."""
    from privrep.errors import InputError
    from privrep.privacy import billboard as boards
    from privrep.privacy.events import event_to_json
    from privrep.privacy.ledger import read_report

    try:
        report = read_report(folder / "ledger.jsonl")
        spent = {
            "epsilon": report.epsilon,
            "events": [[name, event_to_json(event)] for name, event in report.events],
        }
    except InputError:
        spent = {"epsilon": 0.0, "events": []}
    files = sorted((folder / "billboard").glob("*.safetensors"))
    pages = {file.name: hashlib.sha256(file.read_bytes()).hexdigest() for file in files}
    read = [boards._read_page(file) for file in files]  # safetensors orders its metadata as it likes
    content = [[page.name, {k: v.tolist() for k, v in sorted(page.arrays.items())}, page.facts] for page in read]
    result = folder / "result.json"
    said = json.loads(result.read_text()) if result.exists() else None
    return {**spent, "pages": pages, "content": content, "result": said}


def story(folder: Path, seed: int | None, deaths: list[int]) -> dict[str, Any]:
    """A folder's life: killed at each of these places in turn, then left to finish."""
    between = []
    for fatal in deaths:
        if in_a_process(folder, seed, fatal):
            break
        between.append(state(folder))
    else:
        if not in_a_process(folder, seed, None):
            raise RuntimeError("the last attempt was to finish")
    leftovers = [p.name for p in (folder / "billboard").glob("*.tmp")]
    return {"deaths": deaths, "between": between, "end": state(folder), "leftovers": leftovers}


def program(folder: Path) -> dict[str, Any]:
    for module in ("linear.methods.private_fedrep", "users.memory", "users.holders", "privacy.run"):
        importlib.import_module(f"privrep.{module}")  # once, before the forks

    told: dict[str, Any] = {}
    for kind, seed, every in (("simulated", SEED, 1), ("secure", None, 9)):
        told[kind] = {"undisturbed": story(folder / kind, seed, [])}
        places = json.loads((folder / kind / "passed.json").read_text())
        stories = [story(folder / f"{kind}-{i}", seed, [i]) for i in range(0, len(places), every)]
        rng = np.random.default_rng(1)
        for i in range(max(5 // every, 1)):
            deaths = [int(d) for d in rng.integers(0, len(places), 4)]
            stories.append(story(folder / f"{kind}-often-{i}", seed, deaths))
        told[kind] |= {"places": places, "stories": stories}
    return told


if __name__ == "__main__":
    print(json.dumps(program(Path(sys.argv[1]))))
    sys.exit()


# The tests

import pytest  # noqa: E402


@pytest.fixture(scope="module")
def told(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(p for p in sys.path if p), "OPENBLAS_NUM_THREADS": "1"}
    run = [sys.executable, __file__, str(tmp_path_factory.mktemp("runs"))]
    done = subprocess.run(run, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    return dict(json.loads(done.stdout))


KINDS = pytest.mark.parametrize("kind", ["simulated", "secure"])


def test_deaths_come_at_every_kind_of_place(told: dict[str, Any]) -> None:
    places = told["simulated"]["places"]
    for part in (
        "torn",
        "not synced: whole",
        "before charge",
        "after charge, before draw",
        "before draw of keys-1/keys",
        "after draw of keys-1/keys",
        "before draw of choice-1/choice",
        "after draw of choice-1/choice",
        "before draw of scales",
        "after draw of round-1/step",
        "before draw of round-1/sizes",
        "after draw, before post",
        "half written",
        "before rename",
        "after rename",
        "after post",
    ):
        assert any(part in place for place in places), part
    assert len(places) > 50


@KINDS
def test_nothing_is_spent_twice_and_nothing_is_left_out(told: dict[str, Any], kind: str) -> None:
    """The ledger of a run that was killed equals that of one that was not: names, prices, order, epsilon.

    With secret noise what is asked later depends on noise that was drawn anew, so that the budget alone is compared.
    """
    wanted = told[kind]["undisturbed"]["end"]
    assert wanted["epsilon"] == pytest.approx(40.0, rel=1e-6)
    for story in told[kind]["stories"]:
        if kind == "simulated":
            assert story["end"]["events"] == wanted["events"], story["deaths"]
            assert story["end"]["epsilon"] == wanted["epsilon"], story["deaths"]
        assert story["end"]["epsilon"] == pytest.approx(wanted["epsilon"], rel=1e-9), story["deaths"]
        assert story["end"]["epsilon"] <= 40.0
        names = [name for name, _ in story["end"]["events"]]
        assert len(names) == len(set(names))


@KINDS
def test_a_selection_ends_the_same_wherever_it_was_killed(told: dict[str, Any], kind: str) -> None:
    """Charged once, before any noise was drawn; three holders are too few for a key to be named (chance: 1e-17)."""
    for story in told[kind]["stories"]:
        assert story["end"]["result"][0][:-1] == ["common"], story["deaths"]
        assert [name for name, _ in story["end"]["events"]].count("keys-1/keys") == 1
        for moment in story["between"]:
            assert moment["pages"] == {} or moment["events"][0][0] == "keys-1/keys", story["deaths"]


@KINDS
def test_a_choice_that_stands_is_not_made_again(told: dict[str, Any], kind: str) -> None:
    for story in told[kind]["stories"]:
        chosen = [
            facts["choice"]["index"]
            for moment in [*story["between"], story["end"]]
            for name, _, facts in moment["content"]
            if name == "choice-1"
        ]
        assert len(set(chosen)) == 1, story["deaths"]
        assert story["end"]["result"][0][-1] == chosen[0]
        assert [name for name, _ in story["end"]["events"]].count("choice-1/choice") == 1


@KINDS
def test_at_no_time_does_a_page_stand_whose_charge_is_not_recorded(told: dict[str, Any], kind: str) -> None:
    for story in told[kind]["stories"]:
        for moment in story["between"]:
            charged = {name.split("/")[0] for name, _ in moment["events"]}
            posted = {file.split("-", 1)[1].removesuffix(".safetensors") for file in moment["pages"]}
            assert posted - {"representation"} <= charged, story["deaths"]


@KINDS
def test_what_was_recorded_or_posted_once_stays(told: dict[str, Any], kind: str) -> None:
    for story in told[kind]["stories"]:
        moments = [*story["between"], story["end"]]
        for before, after in pairwise(moments):
            assert after["events"][: len(before["events"])] == before["events"], story["deaths"]
            assert before["pages"].items() <= after["pages"].items(), story["deaths"]


def test_a_simulation_ends_the_same_however_often_it_was_killed(told: dict[str, Any]) -> None:
    wanted = told["simulated"]["undisturbed"]["end"]
    for story in told["simulated"]["stories"]:
        assert story["end"]["result"] == wanted["result"], story["deaths"]
        assert story["end"]["content"] == wanted["content"], story["deaths"]


def test_private_runs_draw_afresh(told: dict[str, Any]) -> None:
    results = [json.dumps(story["end"]["result"]) for story in told["secure"]["stories"]]
    assert len(set(results)) == len(results)


@KINDS
def test_nothing_half_written_is_left(told: dict[str, Any], kind: str) -> None:
    assert all(story["leftovers"] == [] for story in told[kind]["stories"])
