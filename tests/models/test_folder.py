"""The contract of model folders, for every kind of model: a new kind joins by an entry of KINDS."""

from __future__ import annotations

import json
import os
import shutil
import stat
import subprocess
import sys
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from privrep import PrivateFactorization, PrivateFedRep, PrivateFedRepClassifier, PrivateMarginSelector
from privrep.data.synthetic import make_population
from privrep.errors import InputError, ResumeError
from privrep.heads.store import FILE
from privrep.models.description import Columns, Config
from privrep.models.folder import ModelFolder, write_json
from privrep.models.inspection import inspect_folder
from privrep.models.model import TABLE, load
from privrep.users.memory import InMemoryUsers

try:
    import torch
except ImportError:
    torch = None  # type: ignore[assignment]

Numbers = list[np.ndarray]


@dataclass(frozen=True)
class Kind:
    """How models of one kind are made, with a folder of their run or without, and read; `other` is another run's."""

    fit: Callable[..., Any]
    load: Callable[[Path], Any]
    numbers: Callable[[Any], Numbers]  # what is released, and predicted
    other: dict[str, Any] = field(default_factory=lambda: {"epsilon": 7.0})
    heads: bool = True
    saves: bool = True  # a federation writes to the folder of its run alone


# Made-up users


@cache
def population() -> Any:
    rng = np.random.default_rng(0)
    return make_population(rng, 60, 4, 2, 6, 0.1).sample(rng)


def rows() -> tuple[Any, Any, Any]:
    table = population()
    return table.X, table.y, np.repeat(table.ids, table.sizes)


def fit_numbers(folder: Path | None, **changes: Any) -> PrivateFedRep:
    given = {"epsilon": 8.0, "random_state": 0, "run_folder": folder, **changes}
    return PrivateFedRep(2, **given).fit(*rows())


def fit_classes(folder: Path | None, **changes: Any) -> PrivateFedRepClassifier:
    X, y, groups = rows()
    given = {"epsilon": 8.0, "classes": [False, True], "random_state": 0, "run_folder": folder, **changes}
    return PrivateFedRepClassifier(2, **given).fit(X, y > 0, groups)


def of_table(model: Any) -> Numbers:
    X, _, groups = rows()
    return [model.representation_, model.predict(X, groups)]


def fit_ratings(folder: Path | None, **changes: Any) -> PrivateFactorization:
    rng = np.random.default_rng(0)
    users, items = np.repeat(np.arange(60), 4), rng.integers(0, 5, 240)
    given = {"epsilon": 8.0, "items": range(5), "random_state": 0, "run_folder": folder, **changes}
    return PrivateFactorization(1, **given).fit(users, items, rng.normal(size=240))


def fit_selection(folder: Path | None, **changes: Any) -> PrivateMarginSelector:
    X, y, groups = rows()
    given = {"epsilon": 2.0, "candidates": 8, "rounds": 2, "random_state": 0, "run_folder": folder, **changes}
    return PrivateMarginSelector(1, **given).fit(X, np.where(y > 0, 1, -1), groups)


def learn_on_a_server(folder: Path, **changes: Any) -> Path:
    from privrep.federated.task import TableTask

    config = Config(2, **{"epsilon": 8.0, "delta": 1e-6, "seed": 0, **changes})
    task = TableTask(config, Columns("user", ("y",), tuple("abcd")))
    task.learn(InMemoryUsers(population()), folder, lambda page: None)
    return folder


def fit_network(folder: Path | None, **changes: Any) -> Any:
    from privrep import Centaur

    rng = np.random.default_rng(0)
    y = rng.integers(0, 3, 160)
    X = (0.5 * rng.normal(size=(160, 6)) + 2 * np.eye(3, 6)[y]).astype(np.float32)
    given = {"epsilon": 4.0, "classes": 3, "random_state": 0, "rows": 4, "rounds": 2, "share": "linear", **changes}
    return Centaur(run_folder=folder, **given).fit(X, y, np.repeat(np.arange(40), 4))


def of_network(model: Any) -> Numbers:
    return [model.learned_.weights, model.heads_.prior, model.heads_.shared, model.heads_.own]


def encoders() -> tuple[Any, Any]:
    from privrep.multimodal.encoders import Projection

    return Projection(5, 4, 1), Projection(6, 4, 2).requires_grad_(False)


def fit_pairs(folder: Path | None, **changes: Any) -> Any:
    from privrep import DPClip
    from privrep.multimodal.pairs import labelled
    from privrep.multimodal.training import ClipSettings

    rng = np.random.default_rng(0)
    y = rng.integers(0, 3, 60)
    images = (rng.normal(size=(60, 5)) + 2 * np.eye(3, 5)[y]).astype(np.float32)
    pairs = labelled(images, y, np.eye(3, 6, dtype=np.float32), [0, 1, 2])
    settings = ClipSettings("bank", steps=3, page=2, rate=0.5, optimiser="sgd")
    given = {"epsilon": 4.0, "settings": settings, "random_state": 0, **changes}
    return DPClip(*encoders(), run_folder=folder, **given).fit(pairs)


def load_pairs(folder: Path) -> Any:
    from privrep import DPClip

    return DPClip.load(folder, *encoders())


def load_network(folder: Path) -> Any:
    from privrep import Centaur

    return Centaur.load(folder)


KINDS: dict[str, Kind] = {
    "numbers": Kind(
        fit_numbers, PrivateFedRep.load, lambda model: [model.representation_, model.predict(*rows()[::2])]
    ),
    "classes": Kind(
        fit_classes, PrivateFedRepClassifier.load, lambda model: [model.representation_, model.predict(*rows()[::2])]
    ),
    "ratings": Kind(
        fit_ratings, PrivateFactorization.load, lambda model: [model.item_factors_, model.predict([1, 2], [3, 4])]
    ),
    "selection": Kind(
        fit_selection, PrivateMarginSelector.load, lambda model: [model.representation_, model.predict(*rows()[::2])]
    ),
    "a server": Kind(
        learn_on_a_server, load, lambda model: [load(model).representation.matrix], heads=False, saves=False
    ),
}
if torch is not None:
    KINDS |= {
        "network": Kind(fit_network, load_network, of_network),
        "pairs": Kind(fit_pairs, load_pairs, lambda model: [model.weights_], heads=False),
    }
SAVED = [name for name, kind in KINDS.items() if kind.saves]


@pytest.fixture(params=KINDS)
def kind(request: pytest.FixtureRequest) -> Kind:
    return KINDS[request.param]


@pytest.fixture(params=SAVED)
def saved(request: pytest.FixtureRequest) -> Kind:
    return KINDS[request.param]


def same(one: Numbers, other: Numbers) -> bool:
    return len(one) == len(other) and all(np.array_equal(a, b) for a, b in zip(one, other, strict=True))


def contents(folder: Path) -> dict[str, Any]:
    """Every file; of a page the parts, for the library writes its metadata in a random order."""
    files = {str(path.relative_to(folder)): path.read_bytes() for path in folder.rglob("*") if path.is_file()}
    return {name: _page(data) if name.endswith(".safetensors") else data for name, data in files.items()}


def _page(data: bytes) -> tuple[Any, bytes]:
    end = 8 + int.from_bytes(data[:8], "little")
    return json.loads(data[8:end]), data[end:]


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
    kept = {name: data for name, data in contents(tmp_path / "run").items() if name != "ledger.jsonl"}
    assert {name: data for name, data in contents(tmp_path / "model").items() if name != "ledger.jsonl"} == kept
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


# Damage

DAMAGE: dict[str, tuple[str, bytes | None]] = {
    "model.json, torn": ("model.json", b"{"),
    "model.json, a list": ("model.json", b"[]"),
    "model.json, nothing in it": ("model.json", b"{}"),
    "model.json, not text": ("model.json", b"\xff\xfe"),
    "billboard, a page": ("billboard/0000-*.safetensors", b"no"),
    "ledger, missing": ("ledger.jsonl", None),
    "ledger, empty": ("ledger.jsonl", b""),
    "ledger, a line": ("ledger.jsonl", b"no\n"),
    "heads, no Parquet": (FILE, b"no"),
}


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    made = {name: tmp_path_factory.mktemp("folders") / "model" for name in KINDS}
    for name, path in made.items():
        KINDS[name].fit(path)
    return made


@pytest.mark.parametrize("damage", DAMAGE)
@pytest.mark.parametrize("name", KINDS)
def test_damage_is_one_sentence_that_names_folder_and_part(
    name: str, damage: str, folders: dict[str, Path], tmp_path: Path
) -> None:
    pattern, content = DAMAGE[damage]
    if pattern == FILE and not KINDS[name].heads:
        pytest.skip("no heads")
    broken = tmp_path / "model"
    shutil.copytree(folders[name], broken)
    (path,) = broken.glob(pattern)
    path.unlink()
    if content is not None:
        path.write_bytes(content)
    with pytest.raises(InputError) as caught:
        KINDS[name].load(broken)
    message = str(caught.value)
    assert str(broken) in message
    assert pattern.partition("/")[0] in message
    assert "\n" not in message


@pytest.mark.parametrize("name", KINDS)
def test_a_folder_of_another_kind_or_of_nothing_is_refused(name: str, folders: dict[str, Path], tmp_path: Path) -> None:
    with pytest.raises(InputError, match=r"is not a model folder: it has no model\.json\."):
        KINDS[name].load(tmp_path)
    mine = ModelFolder(folders[name]).format
    for other, path in folders.items():
        if ModelFolder(path).format != mine:
            with pytest.raises(InputError, match=r"neural model|can read") as caught:
                KINDS[name].load(path)
            assert str(path) in str(caught.value), other


def test_a_folder_that_may_not_be_read_says_so() -> None:
    with pytest.raises(PermissionError), ModelFolder(Path("model")).damage("ledger.jsonl"):
        raise PermissionError("not yours")


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
