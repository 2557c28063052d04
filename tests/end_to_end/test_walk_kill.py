"""A walk may be killed anywhere: the same call takes it anew, pays for it once, and shows nothing of the first.

As `test_kill`, whose deaths it dies, this file is also the program that is killed.
"""

from __future__ import annotations

import importlib
import json
import os
import subprocess
import sys
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import test_kill as kill

from privrep.privacy.protocol import StepSpec, UserBatch
from privrep.users.performance import Performance

STEPS = 3


@dataclass(frozen=True)
class Step:
    """From where the walk is to each user's row."""

    at: Any
    rows_per_user: int = 1

    @property
    def spec(self) -> StepSpec:
        return StepSpec(layout="padded", rows_per_user=self.rows_per_user)

    def __call__(self, batch: UserBatch) -> dict[str, Any]:
        X = batch.X
        from privrep.privacy.contributions import Vectors

        return {"sum": Vectors(X[:, 0] - self.at)}


def attempt(folder: Path, seed: int | None, death: kill.Death) -> None:
    """One process's life: a short walk over batches of a fixed size, then a page that begins where it ended."""
    from privrep.data.table import UserTable
    from privrep.privacy.billboard import Billboard
    from privrep.privacy.bounds import Bound
    from privrep.privacy.calibration import Query
    from privrep.privacy.ledger import Budget, Ledger
    from privrep.privacy.noise import secure_noise, simulated_noise
    from privrep.privacy.run import Run
    from privrep.privacy.sampling import Fixed
    from privrep.users.memory import InMemoryUsers

    source = secure_noise if seed is None else simulated_noise(seed)

    class Noise:
        seeded = source.seeded

        def __call__(self, name: str, sigma: float, size: int) -> Any:
            death.here(f"before draw of {name}")
            return source(name, sigma, size)

        def draw_key(self, name: str) -> bytes:
            death.here(f"before key of {name}")
            return source.draw_key(name)

        def draw_choice(self, name: str, losses: Any, scale: int) -> int:
            raise NotImplementedError

    X = np.random.default_rng(0).normal(size=(40, 2)).astype(np.float32)
    users = InMemoryUsers(UserTable(X, np.zeros(40, np.float32), np.arange(41), np.arange(40)), Performance(1))
    folder.mkdir(exist_ok=True)
    kill.haunt(death, folder / "ledger.jsonl")
    ledger = Ledger(Budget(8.0, 1e-6), seeded=seed is not None, path=folder / "ledger.jsonl")
    run = Run(users, ledger, Billboard(folder / "billboard"), Noise())
    queries = {"sum": Query(Bound(2.0, 2), 0.2)}
    end = run.iterate(
        "walk",
        STEPS,
        {"at": np.array([3.0, -3.0])},
        lambda state: Step(state["at"]),
        queries,
        lambda state, releases: {"at": state["at"] + releases["sum"].value / 40},
        Fixed(10, 40),
    )
    last = run.release("last", Step(end["at"]), queries)
    (folder / "result.json").write_text(json.dumps([end["at"].tolist(), last["sum"].value.tolist()]))
    (folder / "passed.json").write_text(json.dumps(death.passed))


def program(folder: Path) -> dict[str, Any]:
    for module in (
        "privrep.privacy.run",
        "privrep.users.memory",
        "dp_accounting.pld.privacy_loss_distribution",
    ):
        importlib.import_module(module)  # once, before the forks
    kill.attempt = attempt
    told: dict[str, Any] = {}
    for kind, seed, every in (("simulated", kill.SEED, 6), ("secure", None, 20)):
        told[kind] = {"undisturbed": kill.story(folder / kind, seed, [])}
        places = json.loads((folder / kind / "passed.json").read_text())
        stories = [kill.story(folder / f"{kind}-{i}", seed, [i]) for i in range(0, len(places), every)]
        stories.append(kill.story(folder / f"{kind}-often", seed, [5, 8, 10]))
        told[kind] |= {"places": places, "stories": stories}
    return told


if __name__ == "__main__":
    print(json.dumps(program(Path(sys.argv[1]))))
    sys.exit()


# The tests

import pytest  # noqa: E402

KINDS = pytest.mark.parametrize("kind", ["simulated", "secure"])


@pytest.fixture(scope="module")
def told(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    one = {"OPENBLAS_NUM_THREADS": "1", "OMP_NUM_THREADS": "1"}
    environment = {**os.environ, **one, "PYTHONPATH": os.pathsep.join(p for p in sys.path if p)}
    run = [sys.executable, __file__, str(tmp_path_factory.mktemp("runs"))]
    done = subprocess.run(run, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    return dict(json.loads(done.stdout))


def test_deaths_come_between_steps_too(told: dict[str, Any]) -> None:
    places = told["simulated"]["places"]
    charged = places.index("after charge, before draw")
    drawn = [place for place in places if place.startswith(("before key of walk", "before draw of walk"))]
    assert drawn == [
        f"before {what}" for step in range(STEPS) for what in (f"key of walk/{step}", f"draw of walk/{step}/sum")
    ]
    assert places.index(drawn[0]) > charged
    assert len(places) > 20


@KINDS
def test_a_walk_is_charged_once_and_its_charge_is_there_before_its_page(told: dict[str, Any], kind: str) -> None:
    wanted = told[kind]["undisturbed"]["end"]
    assert [name for name, _ in wanted["events"]] == ["walk/sum", "last/sum"]
    for story in told[kind]["stories"]:
        assert story["end"]["events"] == wanted["events"], story["deaths"]
        assert story["end"]["epsilon"] == wanted["epsilon"] <= 8.0, story["deaths"]
        for moment in story["between"]:
            charged = {name.split("/")[0] for name, _ in moment["events"]}
            posted = {file.split("-", 1)[1].removesuffix(".safetensors") for file in moment["pages"]}
            assert posted <= charged, story["deaths"]
        for before, after in pairwise([*story["between"], story["end"]]):
            assert after["events"][: len(before["events"])] == before["events"], story["deaths"]
            assert before["pages"].items() <= after["pages"].items(), story["deaths"]


@KINDS
def test_no_step_of_a_walk_is_posted(told: dict[str, Any], kind: str) -> None:
    for story in told[kind]["stories"]:
        names = {file.split("-", 1)[1] for moment in [*story["between"], story["end"]] for file in moment["pages"]}
        assert names <= {"walk.safetensors", "last.safetensors"}, story["deaths"]


def test_a_simulation_ends_the_same_and_a_private_walk_elsewhere(told: dict[str, Any]) -> None:
    wanted = told["simulated"]["undisturbed"]["end"]["result"]
    assert all(story["end"]["result"] == wanted for story in told["simulated"]["stories"])
    ends = [json.dumps(story["end"]["result"]) for story in told["secure"]["stories"]]
    assert len(set(ends)) == len(ends) > 2
