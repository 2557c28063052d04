"""A DP-CLIP fit may be killed anywhere: the same call goes on, spends nothing twice, and ends the same.

As `test_kill`, whose deaths it dies, this file is also the program that is killed.
"""

from __future__ import annotations

import importlib
import json
import os
import subprocess
import sys
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import test_kill as kill


def attempt(folder: Path, seed: int | None, death: kill.Death) -> None:
    """One process's life: a small `DPClip` in a run folder, from wherever the last one got to."""
    from privrep.estimators.clip import DPClip
    from privrep.multimodal.encoders import Projection
    from privrep.multimodal.pairs import labelled
    from privrep.multimodal.training import ClipSettings

    rng = np.random.default_rng(0)
    y = rng.integers(0, 2, 30)
    pairs = labelled(rng.normal(size=(30, 4)) + y[:, None], y, np.eye(2, 3), [0, 1])
    modules = Projection(4, 2, 1), Projection(3, 2, 2)
    if (folder / "model.json").exists():
        model = DPClip.load(folder, *modules)  # the last one died when all was done
    else:
        kill.haunt(death, folder / "ledger.jsonl")
        settings = ClipSettings("bank", steps=5, page=2, rate=0.1, optimiser="adam", average=0.5)
        options: dict[str, Any] = {"settings": settings, "centre": 0.1, "random_state": seed, "run_folder": folder}
        model = DPClip(*modules, epsilon=40.0, delta=1e-6, **options).fit(pairs)
    result = [model.weights_.tolist(), model.images(pairs.table.X).tolist()]
    (folder / "result.json").write_text(json.dumps(result))
    (folder / "passed.json").write_text(json.dumps(death.passed))


def program(folder: Path) -> dict[str, Any]:
    for module in ("privrep.estimators.clip", "torch._dynamo", "pandas"):
        importlib.import_module(module)  # once, before the forks

    kill.attempt = attempt
    told: dict[str, Any] = {}
    for kind, seed, every in (("simulated", kill.SEED, 8), ("secure", None, 25)):
        told[kind] = {"undisturbed": kill.story(folder / kind, seed, [])}
        places = json.loads((folder / kind / "passed.json").read_text())
        stories = [kill.story(folder / f"{kind}-{i}", seed, [i]) for i in range(0, len(places), every)]
        stories.append(kill.story(folder / f"{kind}-often", seed, [3, len(places) // 3, len(places) // 2]))
        told[kind] |= {"places": places, "stories": stories}
    return told


if __name__ == "__main__":
    print(json.dumps(program(Path(sys.argv[1]))))
    sys.exit()


# The tests

import pytest  # noqa: E402

pytest.importorskip("torch")
KINDS = pytest.mark.parametrize("kind", ["simulated", "secure"])


@pytest.fixture(scope="module")
def told(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    one = {"OPENBLAS_NUM_THREADS": "1", "OMP_NUM_THREADS": "1"}
    environment = {**os.environ, **one, "PYTHONPATH": os.pathsep.join(p for p in sys.path if p)}
    run = [sys.executable, __file__, str(tmp_path_factory.mktemp("runs"))]
    done = subprocess.run(run, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    return dict(json.loads(done.stdout))


def test_deaths_come_at_many_places(told: dict[str, Any]) -> None:
    places = told["simulated"]["places"]
    for part in ("torn", "before charge", "after charge, before draw", "after draw, before post", "half written"):
        assert any(part in place for place in places), part
    assert len(places) > 30
    assert sum(len(story["between"]) for story in told["simulated"]["stories"]) > 7


@KINDS
def test_nothing_is_spent_twice_and_nothing_is_left_out(told: dict[str, Any], kind: str) -> None:
    wanted = told[kind]["undisturbed"]["end"]
    assert wanted["epsilon"] == pytest.approx(40.0, rel=1e-3)
    assert len(wanted["events"]) > 3
    for story in told[kind]["stories"]:
        assert story["end"]["events"] == wanted["events"], story["deaths"]
        assert story["end"]["epsilon"] == wanted["epsilon"] <= 40.0, story["deaths"]


@KINDS
def test_at_no_time_does_a_page_stand_whose_charge_is_not_recorded(told: dict[str, Any], kind: str) -> None:
    for story in told[kind]["stories"]:
        for moment in story["between"]:
            charged = {name.split("/")[0] for name, _ in moment["events"]}
            posted = {file.split("-", 1)[1].removesuffix(".safetensors") for file in moment["pages"]}
            assert posted <= charged, story["deaths"]


@KINDS
def test_what_was_recorded_or_posted_once_stays(told: dict[str, Any], kind: str) -> None:
    for story in told[kind]["stories"]:
        for before, after in pairwise([*story["between"], story["end"]]):
            assert after["events"][: len(before["events"])] == before["events"], story["deaths"]
            assert before["pages"].items() <= after["pages"].items(), story["deaths"]


def test_a_simulation_ends_the_same_however_often_it_was_killed(told: dict[str, Any]) -> None:
    wanted = told["simulated"]["undisturbed"]["end"]
    for story in told["simulated"]["stories"]:
        assert story["end"]["result"] == wanted["result"], story["deaths"]
        assert story["end"]["content"] == wanted["content"], story["deaths"]


def test_private_runs_draw_afresh(told: dict[str, Any]) -> None:
    weights = [json.dumps(story["end"]["result"][0]) for story in told["secure"]["stories"]]
    assert len(weights) > 2
    assert len(set(weights)) == len(weights)


@KINDS
def test_nothing_half_written_is_left(told: dict[str, Any], kind: str) -> None:
    assert all(story["leftovers"] == [] for story in told[kind]["stories"])
