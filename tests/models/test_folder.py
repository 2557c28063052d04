"""The contract of model folders, for every kind of model: they are claimed, finished, saved, replaced and inspected.

A new kind joins by an entry of `folders.KINDS`. What damage does to a folder, `test_folder_damage` says.
"""

from __future__ import annotations

import json
import os
import stat
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from folders import KINDS, RUNS, SAVED, Kind, contents, fit_selection, same

from privrep.errors import InputError, ResumeError
from privrep.heads.store import FILE
from privrep.models.description import Columns, Config
from privrep.models.folder import ModelFolder, write_json
from privrep.models.inspection import inspect_folder
from privrep.models.model import TABLE


@pytest.fixture(params=RUNS)
def kind(request: pytest.FixtureRequest) -> Kind:
    return KINDS[request.param]


@pytest.fixture(params=SAVED)
def saved(request: pytest.FixtureRequest) -> Kind:
    return KINDS[request.param]


class Killed(BaseException):
    pass


def kill_at(patch: pytest.MonkeyPatch, name: str) -> None:
    """The process dies as it gives a file of this name another, or another file this name."""
    rename = os.replace

    def replace(source: Any, target: Any) -> None:
        if name in (Path(source).name, Path(target).name):
            raise Killed
        rename(source, target)

    patch.setattr(os, "replace", replace)


# Claim and finish


def test_a_run_that_is_killed_while_it_claims_its_folder_is_not_stuck(
    kind: Kind, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    whole, folder = kind.fit(tmp_path / "whole"), tmp_path / "run"
    with monkeypatch.context() as patch:
        kill_at(patch, "run.tmp")
        with pytest.raises(Killed):
            kind.fit(folder)
    assert os.listdir(folder) == ["run.tmp"]
    again = kind.fit(folder)
    assert contents(folder) == contents(tmp_path / "whole")
    assert kind.saves is False or same(kind.numbers(again), kind.numbers(whole))


def test_a_run_that_is_killed_as_it_finishes_goes_on_and_spends_nothing_more(
    kind: Kind, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    kind.fit(tmp_path / "whole")
    folder = tmp_path / "run"
    with monkeypatch.context() as patch:
        kill_at(patch, "model.tmp")
        with pytest.raises(Killed):
            kind.fit(folder)
    assert (folder / FILE).is_file() == kind.heads
    with pytest.raises(InputError, match="was not finished"):
        kind.load(folder)
    assert not inspect_folder(folder).finished
    ledger = (folder / "ledger.jsonl").read_bytes()
    with pytest.raises(ResumeError, match="other settings"):
        kind.fit(folder, **kind.other)
    kind.fit(folder)
    assert (folder / "ledger.jsonl").read_bytes() == ledger
    assert contents(folder) == contents(tmp_path / "whole")
    assert not (folder / "run.json").exists()


def test_model_json_is_written_last(kind: Kind, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    renamed: list[str] = []
    rename = os.replace

    def replace(source: Any, target: Any) -> None:
        renamed.append(Path(target).name)
        rename(source, target)

    monkeypatch.setattr(os, "replace", replace)
    kind.fit(tmp_path / "run")
    assert renamed[0] == "run.json"
    assert renamed[-1] == "model.json"
    assert ("heads.parquet" in renamed) == kind.heads


def test_a_folder_of_something_else_is_left_alone(kind: Kind, tmp_path: Path) -> None:
    (tmp_path / "letter.txt").write_text("dear")
    with pytest.raises(InputError, match=r"empty.* and holds no run of privrep\. Choose another folder\."):
        kind.fit(tmp_path)
    assert os.listdir(tmp_path) == ["letter.txt"]
    with pytest.raises(InputError, match="holds no run of privrep"):
        kind.fit(tmp_path / "letter.txt")
    assert (tmp_path / "letter.txt").read_text() == "dear"


def test_a_finished_model_is_not_fitted_again(saved: Kind, tmp_path: Path) -> None:
    saved.fit(tmp_path / "run")
    before = contents(tmp_path / "run")
    with pytest.raises(InputError, match="holds a finished model: load it, or choose another folder"):
        saved.fit(tmp_path / "run")
    assert contents(tmp_path / "run") == before


def test_a_damaged_run_is_not_continued(kind: Kind, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with monkeypatch.context() as patch:
        kill_at(patch, "model.tmp")
        with pytest.raises(Killed):
            kind.fit(tmp_path / "run")
    (tmp_path / "run" / "run.json").write_text("{")
    for read in (lambda: kind.fit(tmp_path / "run"), lambda: inspect_folder(tmp_path / "run")):
        with pytest.raises(InputError, match=r"run is damaged \(run\.json: .*\); restore it from a copy\.") as caught:
            read()
        assert "\n" not in str(caught.value)


def test_a_selection_of_before_goes_on(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """It claimed its folder by a page of the billboard alone."""
    whole = fit_selection(tmp_path / "whole")
    with monkeypatch.context() as patch:
        kill_at(patch, sorted(os.listdir(tmp_path / "whole" / "billboard"))[1])
        with pytest.raises(Killed):
            fit_selection(tmp_path / "run")
    (tmp_path / "run" / "run.json").unlink()
    with pytest.raises(ResumeError, match="other settings or users"):
        fit_selection(tmp_path / "run", margin=0.1)
    (tmp_path / "run" / "run.json").unlink()
    again = fit_selection(tmp_path / "run")
    assert np.array_equal(again.representation_, whole.representation_)
    assert contents(tmp_path / "run") == contents(tmp_path / "whole")


# Save and replace


def test_what_is_saved_is_what_a_run_leaves(saved: Kind, tmp_path: Path) -> None:
    model = saved.fit(tmp_path / "run")
    model.save(tmp_path / "model")
    assert contents(tmp_path / "model") == contents(tmp_path / "run")
    back = saved.load(tmp_path / "model")
    assert same(saved.numbers(back), saved.numbers(model))
    assert back.privacy_ == model.privacy_
    assert stat.S_IMODE((tmp_path / "model").stat().st_mode) == 0o755
    if saved.heads:
        assert stat.S_IMODE((tmp_path / "model" / "private").stat().st_mode) == 0o700
        assert stat.S_IMODE((tmp_path / "model" / FILE).stat().st_mode) == 0o600


def test_a_folder_that_stands_is_replaced_only_when_asked_and_only_if_it_is_a_model(
    saved: Kind, tmp_path: Path
) -> None:
    target = tmp_path / "model"
    saved.fit(None).save(target)
    before, new = contents(target), saved.fit(None, **saved.other)
    with pytest.raises(InputError, match=r"exists already\. Choose another folder, or pass overwrite=True\."):
        new.save(target)
    assert contents(target) == before
    new.save(target, overwrite=True)
    assert saved.load(target).epsilon == 7.0
    (tmp_path / "mine").mkdir()
    with pytest.raises(InputError, match="is not a model folder, so it is not overwritten"):
        new.save(tmp_path / "mine", overwrite=True)
    assert sorted(os.listdir(tmp_path)) == ["mine", "model"]


@pytest.mark.parametrize("at", ["model.tmp", "new"])
def test_the_old_model_stays_until_the_new_one_stands(
    saved: Kind, at: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    target = tmp_path / "model"
    saved.fit(None).save(target)
    before, new = contents(target), saved.fit(None, **saved.other)
    with monkeypatch.context() as patch:
        kill_at(patch, at)
        with pytest.raises(Killed):
            new.save(target, overwrite=True)
    assert contents(target) == before
    assert os.listdir(tmp_path) == ["model"]


# Inspection


@pytest.mark.parametrize("name", KINDS)
def test_every_folder_is_inspected(name: str, folders: dict[str, Path]) -> None:
    before = contents(folders[name])
    found = inspect_folder(folders[name])
    assert contents(folders[name]) == before
    headings = [section.heading for section in found.sections]
    assert headings[:2] == ["What is protected", "Against whom"]
    assert len(set(headings)) == len(headings)
    assert all(section.sentences and all(section.sentences) for section in found.sections)
    data = json.loads(json.dumps(found.to_json()))
    assert data["words"] == found.words
    assert [event["name"] for event in data["events"]] == [spent.name for spent in found.releases]
    assert all(spent.purpose for spent in found.releases)
    assert sum(spent.share for spent in found.releases) == pytest.approx(found.share_spent)


def test_inspecting_needs_no_pytorch(folders: dict[str, Path]) -> None:
    code = (
        "import sys\n"
        "from pathlib import Path\n"
        "from privrep.models.inspection import inspect_folder\n"
        "for folder in sys.argv[1:]: inspect_folder(Path(folder)).to_json()\n"
        "print('torch' in sys.modules)"
    )
    asked = [sys.executable, "-c", code, *map(str, folders.values())]
    assert subprocess.run(asked, capture_output=True, text=True, check=True).stdout == "False\n"


# The folder itself


def test_an_earlier_run_json_is_completed_before_it_is_compared(tmp_path: Path) -> None:
    """Settings that came later are as if they had been asked for by their defaults."""
    config = Config(2, 1.0, 1e-6)
    wanted = json.loads(json.dumps({"config": vars(config), "columns": Columns().to_json()}))
    earlier = json.loads(json.dumps(wanted))
    for name in ("loss", "ratings", "start"):
        del earlier["config"][name]
    del earlier["columns"]["classes"]
    write_json(tmp_path / "run.json", earlier)
    ModelFolder(tmp_path).claim(TABLE, wanted)
    wanted["config"]["epsilon"] = 2.0
    with pytest.raises(ResumeError, match="other settings, columns or users"):
        ModelFolder(tmp_path).claim(TABLE, wanted)


def test_a_folder_is_empty_if_nothing_but_a_torn_claim_is_in_it(tmp_path: Path) -> None:
    folder = ModelFolder(tmp_path / "run")
    assert folder.empty
    folder.path.mkdir()
    (folder.path / "run.tmp").write_text("{")
    assert folder.empty
    assert not folder.begun
    assert folder.format == ""
    (folder.path / "other.tmp").write_text("{")
    assert not folder.empty


def test_a_link_or_a_folder_is_no_torn_claim(tmp_path: Path) -> None:
    """Whoever can write there could otherwise have a fit overwrite another file."""
    linked, nested = ModelFolder(tmp_path / "linked"), ModelFolder(tmp_path / "nested")
    linked.path.mkdir()
    (linked.path / "run.tmp").symlink_to(tmp_path / "elsewhere")
    (nested.path / "run.tmp").mkdir(parents=True)
    assert not linked.empty
    assert not nested.empty
