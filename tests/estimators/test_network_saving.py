"""A neural model in a folder: it comes back as it was, publishes nothing private, and a killed fit goes on."""

from __future__ import annotations

import json
import shutil
import stat
from pathlib import Path
from typing import Any

import numpy as np
import pytest

torch = pytest.importorskip("torch")
from torch import nn  # noqa: E402

from privrep import Centaur, PersonalNetwork  # noqa: E402
from privrep.errors import InputError, NothingLearned, ResumeError  # noqa: E402
from privrep.models.folder import ModelFolder  # noqa: E402
from privrep.models.networks import inspect_network  # noqa: E402
from privrep.neural import training as fitting  # noqa: E402
from privrep.neural.features import Dct, Frozen  # noqa: E402
from privrep.neural.rounds import TrainingSettings  # noqa: E402

Rows = tuple[np.ndarray, np.ndarray, np.ndarray]


def made_up(users: int = 40, rows: int = 8) -> Rows:
    rng = np.random.default_rng(0)
    y = rng.integers(0, 3, users * rows)
    X = 0.7 * rng.normal(size=(len(y), 36)) + np.eye(3, 36)[y] * 2
    return X.astype(np.float32), y, np.repeat([f"user {i:02d}" for i in range(users)], rows)


def small(**options: Any) -> Centaur:
    return Centaur(
        **{"classes": 3, "epsilon": 2.0, "delta": 1e-5, "random_state": 0, "rows": 6, "rounds": 2, **options}
    )


def module(seed: int = 1, outputs: int = 4) -> nn.Module:
    torch.manual_seed(seed)
    return nn.Sequential(nn.Linear(36, 5), nn.Tanh(), nn.Linear(5, outputs))


@pytest.fixture(scope="module")
def rows() -> Rows:
    return made_up()


@pytest.fixture(scope="module")
def saved(rows: Rows, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("models") / "model"
    small(share="linear").fit(*rows).save(folder)
    return folder


MODELS: dict[str, dict[str, Any]] = {
    "linear": {"share": "linear"},
    "of named classes": {"share": "linear", "classes": ["0", "1", "2"]},
    "directions": {"share": "directions"},
    "nothing": {"share": "nothing"},
    "edges": {"share": "linear", "image": (6, 6, 1)},
    "cosines": {"share": "linear", "features": Dct(6, 6, 1, 10)},
    "mlp": {"share": "all", "representation": "mlp"},
    "a network for nothing": {"share": "linear", "representation": "mlp"},
    "settings": {"share": "linear", "settings": TrainingSettings(rate=0.5, clip=0.2)},
    "more settings": {"share": "linear", "settings": fitting.LINEAR},
}


@pytest.mark.filterwarnings("ignore::privrep.errors.NothingLearned")
@pytest.mark.parametrize("name", MODELS)
def test_what_needs_no_module_comes_back_as_it_was(rows: Rows, tmp_path: Path, name: str) -> None:
    X, y, groups = rows
    labels = y.astype(str) if name == "of named classes" else y
    model = small(**MODELS[name]).fit(X, labels, groups)
    model.save(tmp_path / "model")
    back = Centaur.load(tmp_path / "model")
    np.testing.assert_array_equal(back.predict_proba(X, groups), model.predict_proba(X, groups))
    np.testing.assert_array_equal(back.predict(X, groups), model.predict(X, groups))
    assert (back.plan_, back.privacy_) == (model.plan_, model.privacy_)
    assert back.settings == model.settings
    mine = groups == "user 03"
    np.testing.assert_array_equal(
        back.personalize(X[mine], labels[mine]).predict_proba(X),
        model.personalize(X[mine], labels[mine]).predict_proba(X),
    )
    back.save(tmp_path / "again")
    assert (tmp_path / "again" / "model.json").read_text() == (tmp_path / "model" / "model.json").read_text()


@pytest.mark.parametrize("share", ["all", "adapters", "linear"])
def test_a_module_of_ones_own_is_passed_again(rows: Rows, tmp_path: Path, share: str) -> None:
    X, _, groups = rows
    model = small(representation=module(), share=share, pretrained=share != "all").fit(*rows)
    model.save(tmp_path / "model")
    with pytest.raises(InputError, match=r"a module of yours, Sequential; pass it again: .*representation="):
        Centaur.load(tmp_path / "model")
    with pytest.raises(InputError, match="other layers or weights"):
        Centaur.load(tmp_path / "model", module(outputs=5))
    back = Centaur.load(tmp_path / "model", module())
    np.testing.assert_array_equal(back.predict_proba(X, groups), model.predict_proba(X, groups))
    if share == "all":  # what is trained is in the folder, so where it began does not matter
        other = Centaur.load(tmp_path / "model", module(seed=2))
        np.testing.assert_array_equal(other.predict_proba(X, groups), model.predict_proba(X, groups))
    else:
        with pytest.raises(InputError, match="other layers or weights"):
            Centaur.load(tmp_path / "model", module(seed=2))


def test_a_module_that_is_no_part_of_what_is_shared_is_not_needed(rows: Rows, tmp_path: Path) -> None:
    model = small(representation=module(), share="linear").fit(*rows)
    model.save(tmp_path / "model")
    back = Centaur.load(tmp_path / "model")
    np.testing.assert_array_equal(back.predict(rows[0], rows[2]), model.predict(rows[0], rows[2]))


def test_a_frozen_map_is_passed_again(rows: Rows, tmp_path: Path) -> None:
    model = small(features=Frozen(module(), "net", (36,), 4), share="linear").fit(*rows)
    model.save(tmp_path / "model")
    with pytest.raises(InputError, match="those of net"):
        Centaur.load(tmp_path / "model")
    with pytest.raises(InputError, match="other layers or weights"):
        Centaur.load(tmp_path / "model", features=Frozen(module(2), "net", (36,), 4))
    back = Centaur.load(tmp_path / "model", features=Frozen(module(), "net", (36,), 4))
    np.testing.assert_array_equal(back.predict(rows[0], rows[2]), model.predict(rows[0], rows[2]))


def test_a_network_that_was_named_needs_no_module(rows: Rows, tmp_path: Path) -> None:
    small(representation="mlp", share="all", rounds=1).fit(*rows).save(tmp_path / "model")
    with pytest.raises(InputError, match="leave it out"):
        Centaur.load(tmp_path / "model", module())


def test_a_lenet_is_made_again_by_name(tmp_path: Path) -> None:
    X, y, groups = made_up(6, 4)
    images = np.tile(X, 8)[:, :256]
    model = small(representation="lenet", image=(16, 16, 1), share="all", rounds=1, rows=2).fit(images, y, groups)
    model.save(tmp_path / "model")
    back = Centaur.load(tmp_path / "model")
    np.testing.assert_array_equal(back.predict_proba(images, groups), model.predict_proba(images, groups))


def test_the_public_part_holds_no_head_and_nobodys_name(saved: Path, rows: Rows, tmp_path: Path) -> None:
    heads = saved / "private" / "heads.parquet"
    public = [path for path in saved.rglob("*") if path.is_file() and "private" not in path.parts]
    assert {path.name.split("-")[0] for path in public} >= {"model.json", "ledger.jsonl", "0000"}
    assert not any(b"user 00" in path.read_bytes() for path in public)
    assert b"user 00" in heads.read_bytes()
    shutil.copytree(saved, tmp_path / "copy", ignore=shutil.ignore_patterns("private"))
    published = Centaur.load(tmp_path / "copy")
    with pytest.raises(InputError, match="personalize"):
        published.predict(rows[0], rows[2])
    mine = rows[2] == "user 03"
    whole = Centaur.load(saved).personalize(rows[0][mine], rows[1][mine])
    np.testing.assert_array_equal(
        published.personalize(rows[0][mine], rows[1][mine]).predict_proba(rows[0]), whole.predict_proba(rows[0])
    )


def test_there_is_nothing_to_save_before_a_fit(tmp_path: Path) -> None:
    with pytest.raises(InputError, match="before a fit"):
        small().save(tmp_path / "new")


def edited(folder: Path, change: Any) -> None:
    described = json.loads((folder / "model.json").read_text())
    change(described)
    ModelFolder(folder).finish(described)  # with a seal that fits


@pytest.mark.parametrize(
    ("harm", "sentence"),
    [
        (lambda f: edited(f, lambda d: d.pop("plan")), "'plan' is missing"),
        (lambda f: edited(f, lambda d: d["plan"].pop("share")), r"damaged \(model.json"),
        (lambda f: edited(f, lambda d: d["config"].pop("rows")), "'rows' is missing"),
        (lambda f: edited(f, lambda d: d.update(format="privrep-model/2")), "this version of privrep"),
        (lambda f: edited(f, lambda d: d.update(feature_count=35)), r"damaged \(billboard"),
        (lambda f: edited(f, lambda d: d["config"].update(classes=4)), r"damaged \(billboard"),
        (lambda f: edited(f, lambda d: d["config"].update(settings=3)), r"damaged \(model.json"),
    ],
)
def test_a_description_that_is_not_of_this_folder_is_one_sentence(
    saved: Path, tmp_path: Path, harm: Any, sentence: str
) -> None:
    folder = tmp_path / "model"
    shutil.copytree(saved, folder)
    harm(folder)
    with pytest.raises(InputError, match=sentence) as error:
        Centaur.load(folder)
    assert str(folder) in str(error.value)
    assert "\n" not in str(error.value)


def test_names_that_json_cannot_hold_are_refused_before_anything_is_spent(rows: Rows, tmp_path: Path) -> None:
    X, _, groups = rows
    names = [("a", 1), ("b", 2), ("c", 3)]
    labels = np.empty(len(X), dtype=object)
    labels[:] = [names[i % 3] for i in range(len(X))]
    with pytest.raises(InputError, match="texts or numbers"):
        small(classes=names, share="linear", run_folder=tmp_path / "run").fit(X, labels, groups)
    assert not (tmp_path / "run").exists()


class Stopped(Exception):
    pass


def stop_after(page: str) -> Any:
    def on_page(name: str, epsilon: float) -> None:
        if name == page:
            raise Stopped

    return on_page


@pytest.mark.parametrize("page", ["centre", "round-1", "round-2", "heads"])
def test_a_fit_that_was_stopped_goes_on_and_ends_the_same(rows: Rows, tmp_path: Path, page: str) -> None:
    folder = tmp_path / "run"
    wanted = small(share="linear").fit(*rows)
    with pytest.raises(Stopped):
        small(share="linear", run_folder=folder, on_page=stop_after(page)).fit(*rows)
    assert (folder / "run.json").is_file()
    with pytest.raises(InputError, match="was not finished"):
        Centaur.load(folder)
    before = {path.name: path.read_bytes() for path in (folder / "billboard").iterdir()}
    continued = small(share="linear", run_folder=folder).fit(*rows)
    assert before.items() <= {path.name: path.read_bytes() for path in (folder / "billboard").iterdir()}.items()
    np.testing.assert_array_equal(continued.learned_.weights, wanted.learned_.weights)
    assert continued.privacy_ == wanted.privacy_
    assert not (folder / "run.json").exists()
    np.testing.assert_array_equal(
        Centaur.load(folder).predict_proba(rows[0], rows[2]), wanted.predict_proba(rows[0], rows[2])
    )
    with pytest.raises(InputError, match="finished model"):
        small(share="linear", run_folder=folder).fit(*rows)


@pytest.mark.parametrize(
    ("change", "where"),
    [
        ({"rounds": 3}, "config.rounds"),
        ({"rows": 5}, "config.rows"),
        ({"epsilon": 3.0}, "config.epsilon"),
        ({"random_state": 1}, "config.seed"),
        ({"random_state": None}, "config.seed"),
        ({"classes": 4}, "config.classes"),
        ({"settings": TrainingSettings(clip=0.3)}, "config.settings"),
        ({"features": Dct(6, 6, 1, 12)}, "config.features"),
        ({"representation": module(2)}, "config.representation"),
    ],
)
def test_another_run_is_not_continued(rows: Rows, tmp_path: Path, change: dict[str, Any], where: str) -> None:
    folder = tmp_path / "run"
    options = {"share": "linear", "representation": module(), "run_folder": folder}
    with pytest.raises(Stopped):
        small(**options, on_page=stop_after("round-1")).fit(*rows)
    before = (folder / "ledger.jsonl").read_bytes()
    with pytest.raises(ResumeError, match=where):
        small(**{**options, **change}).fit(*rows)
    X, y, groups = rows
    with pytest.raises(ResumeError, match="user_count"):
        small(**options).fit(X[8:], y[8:], groups[8:])
    assert (folder / "ledger.jsonl").read_bytes() == before


def test_nothing_shared_is_saved_too(rows: Rows, tmp_path: Path) -> None:
    with pytest.warns(NothingLearned):
        small(share="nothing", run_folder=tmp_path / "run").fit(*rows)
    assert Centaur.load(tmp_path / "run").privacy_.epsilon == 0


# One user's own network

PERSONAL: dict[str, dict[str, Any]] = {
    "linear": {"share": "linear"},
    "of named classes": {"share": "linear", "classes": ["0", "1", "2"]},
    "nothing": {"share": "nothing"},
    "adapters": {"share": "adapters", "representation": module(), "pretrained": True},
    "a frozen network": {"share": "linear", "representation": module(), "pretrained": True},
    "a frozen map": {"share": "linear", "features": Frozen(module(), "net", (36,), 4)},
}


@pytest.mark.filterwarnings("ignore::privrep.errors.NothingLearned")
@pytest.mark.parametrize("name", PERSONAL)
def test_a_personal_network_comes_back_as_it_was(rows: Rows, tmp_path: Path, name: str) -> None:
    X, y, groups = rows
    options, mine = PERSONAL[name], groups == "user 03"
    labels = y.astype(str) if "classes" in options else y
    own = small(**options).fit(X, labels, groups).personalize(X[mine], labels[mine])
    own.save(tmp_path / "own")
    given = {key: options[key] for key in ("representation", "features") if key in options}
    back = PersonalNetwork.load(tmp_path / "own", **given)
    np.testing.assert_array_equal(back.predict_proba(X), own.predict_proba(X))
    np.testing.assert_array_equal(back.predict(X), own.predict(X))
    if given:
        with pytest.raises(InputError, match="pass it again"):
            PersonalNetwork.load(tmp_path / "own")
    back.save(tmp_path / "again")
    for file in ("model.json", "ledger.jsonl"):
        assert (tmp_path / "again" / file).read_bytes() == (tmp_path / "own" / file).read_bytes()


def test_the_folder_of_a_personal_network_holds_one_head_and_nobodys_rows(
    saved: Path, rows: Rows, tmp_path: Path
) -> None:
    X, y, groups = rows
    model, mine = Centaur.load(saved), groups == "user 03"
    before = model.heads_
    own = model.personalize(X[mine], y[mine])
    own.save(tmp_path / "own")
    assert model.heads_ is before
    private = tmp_path / "own" / "private"
    assert [path.name for path in private.iterdir()] == ["heads.parquet"]
    assert stat.S_IMODE(private.stat().st_mode) == 0o700
    assert stat.S_IMODE((private / "heads.parquet").stat().st_mode) == 0o600
    written = b"".join(path.read_bytes() for path in (tmp_path / "own").rglob("*") if path.is_file())
    assert b"user 0" not in written
    pages = [{path.name for path in (folder / "billboard").iterdir()} for folder in (saved, tmp_path / "own")]
    assert pages[0] == pages[1]
    assert PersonalNetwork.load(tmp_path / "own").head.ids.tolist() == [0]
    with pytest.raises(InputError, match="exists already"):
        own.save(tmp_path / "own")
    own.save(tmp_path / "own", overwrite=True)


def test_folders_of_one_user_and_of_all_are_not_taken_for_each_other(saved: Path, rows: Rows, tmp_path: Path) -> None:
    X, y, groups = rows
    mine = groups == "user 03"
    Centaur.load(saved).personalize(X[mine], y[mine]).save(tmp_path / "own")
    with pytest.raises(InputError, match=r"PersonalNetwork\.load"):
        Centaur.load(tmp_path / "own")
    with pytest.raises(InputError, match=r"Centaur\.load"):
        PersonalNetwork.load(saved)
    with pytest.raises(InputError, match=r"no model\.json"):
        PersonalNetwork.load(tmp_path / "none")
    said = inspect_network(ModelFolder(tmp_path / "own")).sections[-1].sentences
    assert "the head of one user" in said[0]
    assert "PersonalNetwork.load" in said[1]
    model = PersonalNetwork.load(tmp_path / "own").model
    model.save(tmp_path / "public")  # its head is not among what all users have
    assert not (tmp_path / "public" / "private" / "heads.parquet").exists()
    assert Centaur.load(tmp_path / "public").heads_ is None
    shutil.rmtree(tmp_path / "own" / "private")
    with pytest.raises(InputError, match="has no head"):
        PersonalNetwork.load(tmp_path / "own")
