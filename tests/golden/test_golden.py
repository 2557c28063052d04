"""Checks that what is released, saved and said stays as it was recorded: small fits, old folders, a killed run.

Where a change is meant, `python tests/golden/golden_cases.py` records anew. Numbers may differ by rounding: CPUs do.
"""

from __future__ import annotations

import json
import math
import re
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from golden_cases import CASES, KILLED, SMALL, TORCH, as_recorded, described, said, values_of

from privrep import InputError
from privrep.errors import ResumeError

ANEW = "if this change is meant, record anew: python tests/golden/golden_cases.py"
CLOSE = {"network": (1e-4, 1e-5), "pair": (1e-4, 1e-5)}  # those compute in float32
NAMES = [
    pytest.param(name, marks=pytest.mark.skipif(case.needs_torch and not TORCH, reason="needs PyTorch"))
    for name, case in CASES.items()
]


@pytest.fixture(autouse=True)
def _quiet() -> Iterator[None]:
    with as_recorded():
        yield


def differences(now: Any, then: Any, close: tuple[float, float], place: str = "") -> Iterator[str]:
    """Name places where two values differ by more than rounding."""
    if isinstance(now, dict) and isinstance(then, dict):
        if sorted(now) != sorted(then):
            yield f"{place}: has {sorted(now)}, had {sorted(then)}"
        for key in (key for key in then if key in now):
            yield from differences(now[key], then[key], close, f"{place}/{key}")
    elif isinstance(now, list) and isinstance(then, list):
        if len(now) != len(then):
            yield f"{place}: has {len(now)} values, had {len(then)}"
        for number, (one, other) in enumerate(zip(now, then, strict=False)):
            yield from differences(one, other, close, f"{place}[{number}]")
    elif isinstance(now, float) and isinstance(then, float):
        if not (math.isclose(now, then, rel_tol=close[0], abs_tol=close[1]) or (now != now and then != then)):
            yield f"{place}: is {now!r}, was {then!r}"
    elif type(now) is not type(then) or now != then:
        yield f"{place}: is {now!r}, was {then!r}"


def same(now: Any, then: Any, name: str, what: str) -> None:
    found = list(differences(now, then, CLOSE.get(name, (1e-7, 1e-9)), what))
    assert not found, "\n".join([*found[:5], ANEW])


@pytest.mark.parametrize("name", NAMES)
def test_a_fit_releases_saves_and_says_what_it_did(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    case, golden = CASES[name], SMALL / name
    model = case.fit(case.made())
    same(case.told(model), values_of(golden / "told.json"), name, "told")
    model.save(tmp_path / "model")
    same(described(tmp_path / "model"), described(golden / "model"), name, "model")
    monkeypatch.chdir(tmp_path)
    shown = json.loads(said("inspect", "model", "--json"))
    same(shown, values_of(golden / "inspect.json"), name, "inspect --json")
    assert said("inspect", "model") == (golden / "inspect.txt").read_text(), ANEW


@pytest.mark.parametrize("name", NAMES)
def test_an_old_folder_loads_and_predicts_as_it_did(name: str) -> None:
    told = CASES[name].told(CASES[name].load(SMALL / name / "model"))
    assert told, "an old folder says nothing"
    same(told, values_of(SMALL / name / "told.json"), name, "loaded")


def test_ratings_of_an_earlier_version_load_and_predict_as_they_did() -> None:
    """Their users' levels are their own means, and there is nothing to predict newcomers with."""
    folder = SMALL.parent / "before" / "ratings"
    model = CASES["ratings"].load(folder / "model")
    same(CASES["ratings"].told(model), values_of(folder / "told.json"), "ratings", "loaded")
    assert model.level_ is None
    with pytest.raises(InputError, match="was not in fit"):
        model.predict(["nobody"], ["other"])
    with pytest.raises(InputError, match="at least one rating"):
        model.personalize([], [])
    assert "factorisation of ratings" in said("inspect", str(folder / "model"))


def test_classes_of_an_earlier_version_load_and_predict_as_they_did() -> None:
    """Their heads have no prior mean: there is nothing to predict newcomers with."""
    folder = SMALL.parent / "before" / "classes"
    model = CASES["classes"].load(folder / "model")
    same(CASES["classes"].told(model), values_of(folder / "told.json"), "classes", "loaded")
    case = CASES["classes"]
    with pytest.raises(InputError, match="was not in fit"):
        model.predict(case.X[:1], groups=[-1])
    assert "classes" in said("inspect", str(folder / "model"))


@pytest.mark.skipif(not TORCH, reason="needs PyTorch")
def test_networks_of_an_earlier_version_load_and_predict_as_they_did() -> None:
    """Their rows had one public size; newcomers get heads of today on their shared part."""
    folder, case = SMALL.parent / "before" / "network", CASES["network"]
    model = case.load(folder / "model")
    told, then = case.told(model), values_of(folder / "told.json")
    for arrays in (told["arrays"], then["arrays"]):
        del arrays["personal"]
    same(told, then, "network", "told")
    assert "CENTAUR" in said("inspect", str(folder / "model"))


def test_a_table_of_an_earlier_version_loads_and_predicts_as_it_did() -> None:
    """Its pages hold triangles of moments, and sensitivities of sums that were not exact."""
    folder = SMALL.parent / "before" / "killed"
    case, then = CASES[KILLED], values_of(folder / "told.json")
    same(case.told(case.load(folder / "model")), then, KILLED, "loaded")
    shown = json.loads(said("inspect", str(folder / "model"), "--json"))
    assert shown["epsilon"] == pytest.approx(then["privacy"]["epsilon"], rel=1e-9)
    assert len(shown["events"]) == len(then["privacy"]["events"])


def test_a_run_of_an_earlier_version_is_refused_and_stays_as_it_is(tmp_path: Path) -> None:
    """Its releases have another sensitivity: what stands is not asked again, and nothing is charged."""
    case, run = CASES[KILLED], tmp_path / "run"
    shutil.copytree(SMALL.parent / "before" / "killed" / "killed", run)
    begun = {path: path.read_bytes() for path in run.rglob("*") if path.is_file()}
    words = "page 'scales' answers another question, or is of another version of privrep. Use another folder, or the "
    with pytest.raises(ResumeError, match=f"^{re.escape(words)}version that began this run.$"):
        case.fit(case.made(run_folder=run))
    assert {path: path.read_bytes() for path in begun} == begun
    assert not (run / "model.json").exists()


def unchain(ledger: Path) -> None:
    """Write a ledger as it was before lines had hashes: pages that nobody was charged for were not noted."""
    lines = [json.loads(line) for line in ledger.read_text().splitlines()]
    charged = {line["charge"].split("/")[0] for line in lines if "charge" in line}
    lines = [line for line in lines if "posted" not in line or line["posted"] in charged]
    kept = [{name: value for name, value in line.items() if name not in ("chain", "says")} for line in lines]
    kept[0]["format"] = "privrep-ledger/1"
    ledger.write_text("".join(json.dumps(line) + "\n" for line in kept))


@pytest.mark.parametrize("chained", [True, False], ids=["chained", "unchained"])
def test_a_run_that_was_killed_goes_on_to_the_same_end(tmp_path: Path, chained: bool) -> None:
    golden, case, run = SMALL / KILLED, CASES[KILLED], tmp_path / "run"
    wanted = described(golden / "model")
    resumed = Path(shutil.copyfile(golden / "resumed.jsonl", tmp_path / "resumed.jsonl"))
    shutil.copytree(golden / "killed", run)
    if not chained:
        unchain(run / "ledger.jsonl")
        unchain(resumed)
        del wanted["model.json"]["books"]  # the last hash of the ledger
    begun = values_of(run / "ledger.jsonl")
    assert not (run / "model.json").exists()
    model = case.fit(case.made(run_folder=run))
    same(case.told(model), values_of(golden / "told.json"), KILLED, "told")
    ended = described(run)
    assert ended["ledger.jsonl"][: len(begun)] == begun, ANEW
    wanted["ledger.jsonl"] = values_of(resumed)  # of a run it says more
    same(ended, wanted, KILLED, "run")
