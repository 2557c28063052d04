"""A run may be killed anywhere: continuing it spends nothing twice, reports all that was spent, and ends the same.

A new kind of run joins by a line in `killed_programs.PROGRAMS`.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from functools import cache
from itertools import pairwise
from typing import Any

import killed_programs
import pytest
from killed_programs import PROGRAMS, STEPS
from killing import Program

KINDS = ("simulated", "secure")
Tell = Any  # of a program's name: its stories


@pytest.fixture(scope="module")
def tell(tmp_path_factory: pytest.TempPathFactory) -> Tell:
    """Return the stories of a program, which is killed once, when they are first asked for."""

    @cache
    def told(name: str) -> dict[str, Any]:
        if name in ("network", "pairs"):
            pytest.importorskip("torch")
        one = {"OPENBLAS_NUM_THREADS": "1", "OMP_NUM_THREADS": "1"}
        environment = {**os.environ, **one, "PYTHONPATH": os.pathsep.join(p for p in sys.path if p)}
        run = [sys.executable, killed_programs.__file__, name, str(tmp_path_factory.mktemp(name))]
        done = subprocess.run(run, env=environment, capture_output=True, text=True, check=False)
        assert done.returncode == 0, done.stderr
        return dict(json.loads(done.stdout))

    return told


@pytest.fixture(params=PROGRAMS)
def program(request: pytest.FixtureRequest) -> Program:
    return PROGRAMS[request.param]


@pytest.fixture
def told(program: Program, tell: Tell) -> dict[str, Any]:
    return dict(tell(next(name for name, one in PROGRAMS.items() if one is program)))


def moments(story: dict[str, Any]) -> Iterator[dict[str, Any]]:
    yield from story["between"]
    yield story["end"]


def page_names(moment: dict[str, Any]) -> set[str]:
    return {file.split("-", 1)[1].removesuffix(".safetensors") for file in moment["pages"]}


# What holds for all programs


def test_deaths_come_at_every_kind_of_place(program: Program, told: dict[str, Any]) -> None:
    places, lives = program.least
    for part in program.places:
        assert any(part in place for place in told["simulated"]["places"]), part
    assert len(told["simulated"]["places"]) > places
    assert sum(len(story["between"]) for story in told["simulated"]["stories"]) > lives
    if program.deaths["simulated"] is None:
        passed = told["simulated"]["places"]
        assert {passed[at] for story in told["simulated"]["stories"] for at in story["deaths"][:1]} == set(passed)


@pytest.mark.parametrize("kind", KINDS)
def test_nothing_is_spent_twice_and_nothing_is_left_out(program: Program, told: dict[str, Any], kind: str) -> None:
    """The ledger of a run that was killed equals the ledger of one that was not: names, prices, order, epsilon.

    Where what is asked later depends on noise that is drawn anew, the budget alone is compared.
    """
    wanted = told[kind]["undisturbed"]["end"]
    assert len(wanted["events"]) > (1 if program.spends is None else 3)
    if program.spends is not None:
        assert wanted["epsilon"] == pytest.approx(program.epsilon, rel=program.spends)
    for story in told[kind]["stories"]:
        end = story["end"]
        if kind == "secure" and program.adaptive:
            assert end["epsilon"] == pytest.approx(wanted["epsilon"], rel=1e-9), story["deaths"]
        else:
            assert end["events"] == wanted["events"], story["deaths"]
            assert end["epsilon"] == wanted["epsilon"], story["deaths"]
        assert end["epsilon"] <= program.epsilon
        names = [name for name, _ in end["events"]]
        assert len(names) == len(set(names))


@pytest.mark.parametrize("kind", KINDS)
def test_at_no_time_does_a_page_stand_whose_charge_is_not_recorded(
    program: Program, told: dict[str, Any], kind: str
) -> None:
    for story in told[kind]["stories"]:
        for moment in story["between"]:
            charged = {name.split("/")[0] for name, _ in moment["events"]}
            assert page_names(moment) - program.derived <= charged, story["deaths"]


@pytest.mark.parametrize("kind", KINDS)
def test_what_was_recorded_or_posted_once_stays(told: dict[str, Any], kind: str) -> None:
    for story in told[kind]["stories"]:
        for before, after in pairwise(moments(story)):
            assert after["events"][: len(before["events"])] == before["events"], story["deaths"]
            assert before["pages"].items() <= after["pages"].items(), story["deaths"]


def test_a_simulation_ends_the_same_however_often_it_was_killed(told: dict[str, Any]) -> None:
    wanted = told["simulated"]["undisturbed"]["end"]
    for story in told["simulated"]["stories"]:
        assert story["end"]["result"] == wanted["result"], story["deaths"]
        assert story["end"]["content"] == wanted["content"], story["deaths"]


def test_private_runs_draw_afresh(told: dict[str, Any]) -> None:
    drawn = [json.dumps(story["end"]["result"]["drawn"]) for story in told["secure"]["stories"]]
    assert len(set(drawn)) == len(drawn) > 2


@pytest.mark.parametrize("kind", KINDS)
def test_nothing_half_written_is_left(told: dict[str, Any], kind: str) -> None:
    assert all(story["leftovers"] == [] for story in told[kind]["stories"])


# What holds for one


@pytest.mark.parametrize("kind", KINDS)
def test_a_selection_ends_the_same_wherever_it_was_killed(tell: Tell, kind: str) -> None:
    """Charged once, before any noise was drawn; three holders are too few for a key to be named (chance: 1e-17)."""
    for story in tell("table")[kind]["stories"]:
        assert story["end"]["result"]["keys"] == ["common"], story["deaths"]
        assert [name for name, _ in story["end"]["events"]].count("keys-1/keys") == 1
        for moment in story["between"]:
            assert moment["pages"] == {} or moment["events"][0][0] == "keys-1/keys", story["deaths"]


@pytest.mark.parametrize("kind", KINDS)
def test_a_choice_that_stands_is_not_made_again(tell: Tell, kind: str) -> None:
    for story in tell("table")[kind]["stories"]:
        chosen = [
            facts["choice"]["index"]
            for moment in moments(story)
            for name, _, facts in moment["content"]
            if name == "choice-1"
        ]
        assert len(set(chosen)) == 1, story["deaths"]
        assert story["end"]["result"]["chosen"] == chosen[0]
        assert [name for name, _ in story["end"]["events"]].count("choice-1/choice") == 1


def test_a_walk_dies_between_its_steps_too(tell: Tell) -> None:
    places = tell("walk")["simulated"]["places"]
    drawn = [place for place in places if place.startswith(("before key of walk", "before draw of walk"))]
    assert drawn == [
        f"before {what}" for step in range(STEPS) for what in (f"key of walk/{step}", f"draw of walk/{step}/sum")
    ]
    assert places.index(drawn[0]) > places.index("after charge, before draw")


@pytest.mark.parametrize("kind", KINDS)
def test_a_walk_is_charged_once_and_none_of_its_steps_is_posted(tell: Tell, kind: str) -> None:
    told = tell("walk")[kind]
    assert [name for name, _ in told["undisturbed"]["end"]["events"]] == ["walk/sum", "last/sum"]
    for story in told["stories"]:
        assert set().union(*map(page_names, moments(story))) <= {"walk", "last"}, story["deaths"]
