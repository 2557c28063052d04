"""Numbers from images by public features: plans, fits, newcomers, saving, resuming, and refusals."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from sklearn.base import clone

from commands import run
from privrep import CentaurRegressor, InputError, MissingValues, PrivateFedRep, ResumeError, UnknownUsers
from privrep.estimators.network_regression import ReducedMap
from privrep.neural.features import Dct, Edges, Frozen
from privrep.neural.plan import FEWEST_KEPT, plan_features

SIDE, USERS, EACH = 8, 200, 8
Rows = tuple[np.ndarray, np.ndarray, np.ndarray]


@pytest.fixture(scope="module")
def rows() -> Rows:
    """Images whose left half is as bright as the target says, with a level of each user's own."""
    rng = np.random.default_rng(0)
    users = np.repeat(np.arange(USERS), EACH)
    bright = rng.normal(size=len(users))
    images = 0.5 + 0.1 * rng.normal(size=(len(users), SIDE, SIDE))
    images[:, :, :4] += 0.2 * bright[:, None, None]
    y = 2 * bright + rng.normal(size=USERS)[users] + 0.1 * rng.normal(size=len(users))
    return images.reshape(len(users), -1).astype(np.float32), y, users


def small(**options: Any) -> CentaurRegressor:
    return CentaurRegressor(**{"epsilon": 8.0, "delta": 1e-5, "random_state": 1, "image": (SIDE, SIDE, 1), **options})


@pytest.fixture(scope="module")
def fitted(rows: Rows) -> CentaurRegressor:
    return small(features=Dct(SIDE, SIDE, 1, 16)).fit(*rows)


def test_it_does_better_than_users_means(fitted: CentaurRegressor, rows: Rows) -> None:
    X, y, users = rows
    means = np.bincount(users, y) / EACH
    mean_error = np.mean((y - means[users]) ** 2)
    assert np.mean((fitted.predict(X, users) - y) ** 2) < 0.2 * mean_error
    assert fitted.privacy_.epsilon <= 8.0
    assert fitted.privacy_.relation == "replace-one-user"
    assert fitted.n_features_in_ == SIDE * SIDE
    low, high = fitted.predict_interval(X, users, 0.9)
    assert 0.75 < np.mean((low < y) & (y < high)) <= 1


def test_it_is_private_fedrep_on_the_features(fitted: CentaurRegressor, rows: Rows) -> None:
    X, y, users = rows
    features = Dct(SIDE, SIDE, 1, 16)(X).astype(np.float64)
    plain = PrivateFedRep(epsilon=8.0, delta=1e-5, random_state=1, missing="drop").fit(features, y, users)
    np.testing.assert_array_equal(plain.predict(features, users), fitted.predict(X, users))


def test_newcomers_and_users_without_rows(fitted: CentaurRegressor, rows: Rows) -> None:
    X, y, users = rows
    head = fitted.personalize(X[:EACH], y[:EACH])
    np.testing.assert_allclose(head.predict(X[:EACH]), fitted.predict(X[:EACH], users[:EACH]), rtol=1e-6)
    low, high = head.predict_interval(X[:3], 0.9)
    assert (low < high).all()
    nobody = fitted.personalize(X[:0], y[:0])
    with pytest.warns(UnknownUsers):
        np.testing.assert_allclose(nobody.predict(X[:3]), fitted.predict(X[:3], [999] * 3), rtol=1e-9)


def test_it_is_saved_and_loaded(fitted: CentaurRegressor, rows: Rows, tmp_path: Path) -> None:
    X, y, users = rows
    fitted.save(tmp_path / "m")
    back = CentaurRegressor.load(tmp_path / "m")
    np.testing.assert_array_equal(back.predict(X, users), fitted.predict(X, users))
    head = back.personalize(X[:4], y[:4])
    np.testing.assert_array_equal(head.predict(X[:4]), fitted.personalize(X[:4], y[:4]).predict(X[:4]))
    with pytest.raises(InputError, match=r"load it with CentaurRegressor\.load"):
        PrivateFedRep.load(tmp_path / "m")
    with pytest.raises(InputError, match="needs no module"):
        CentaurRegressor.load(tmp_path / "m", features=Dct(SIDE, SIDE))
    shutil.rmtree(tmp_path / "m" / "private")
    assert CentaurRegressor.load(tmp_path / "m").personalize(X[:4], y[:4]).predict(X[:4]).shape == (4,)
    PrivateFedRep(epsilon=8.0, random_state=1).fit(X[:, :4], y, users).save(tmp_path / "table")
    with pytest.raises(InputError, match=r"PrivateFedRep\.load"):
        CentaurRegressor.load(tmp_path / "table")


def test_the_folder_says_how_features_are_made(fitted: CentaurRegressor, tmp_path: Path) -> None:
    fitted.save(tmp_path / "m")
    described = json.loads((tmp_path / "m" / "model.json").read_text())
    kept = {"map": "dct", "height": SIDE, "width": SIDE, "channels": 1, "keep": 16}
    words = described["public_map"].pop("words")
    assert words == "the 16 lowest frequencies of the cosine transform of 8 x 8 images"
    assert described["public_map"] == {"features": kept, "width": SIDE * SIDE, "keep": 16}
    described["public_map"].pop("keep")
    (tmp_path / "m" / "model.json").write_text(json.dumps(described))
    with pytest.raises(InputError, match="damaged"):
        CentaurRegressor.load(tmp_path / "m")


def test_a_run_with_another_map_is_not_continued(rows: Rows, tmp_path: Path) -> None:
    small(features=Dct(SIDE, SIDE, 1, 16), run_folder=tmp_path / "run").fit(*rows)
    run = json.loads((tmp_path / "run" / "model.json").read_text())
    assert run["public_map"]["keep"] == 16
    for name in ("model.json", "private"):
        path = tmp_path / "run" / name
        shutil.rmtree(path) if path.is_dir() else path.unlink()
    described = {**run, "feature_count": 16, "user_count": USERS}
    kept = {name: value for name, value in described.items() if name not in ("format", "books")}
    (tmp_path / "run" / "run.json").write_text(json.dumps(kept))
    with pytest.raises(ResumeError):
        small(features=Edges(SIDE, SIDE, 1, 16), run_folder=tmp_path / "run").fit(*rows)
    small(features=Dct(SIDE, SIDE, 1, 16), run_folder=tmp_path / "run").fit(*rows)


# Plans


def test_a_plan_follows_from_public_sizes_and_says_so() -> None:
    plan = small(epsilon=1.0).planned(500, 64)
    assert plan.keep == FEWEST_KEPT
    assert "Used: the first 24 of 160 features, 160 averages of oriented edges" in plan.words
    assert "users rely on their own rows" in plan.words
    many = small(epsilon=1.0).planned(20_000, 64)
    assert many.keep == 160
    assert "Used: all 160 features" in many.words
    assert plan_features("numbers", 1280, 2000, 1.0).keep == 125
    assert "a public projection to 125 of 1,280" in plan_features("numbers", 1280, 2000, 1.0).words
    assert CentaurRegressor(image=None, keep=7).planned(100, 50).keep == 7


def test_a_projection_is_public_and_of_one_row_at_a_time() -> None:
    rng = np.random.default_rng(0)
    X = rng.normal(size=(300, 90)).astype(np.float32)
    reduced = ReducedMap(None, 90, 20)
    found = reduced(X)
    assert found.shape == (300, 20)
    np.testing.assert_array_equal(found[17:18], reduced(X[17:18]))
    np.testing.assert_array_equal(found[::-1], reduced(np.ascontiguousarray(X[::-1])))
    np.testing.assert_array_equal(found, ReducedMap(None, 90, 20)(X))
    lengths = (found**2).sum(axis=1) / (X.astype(float) ** 2).sum(axis=1)
    assert 0.5 * 20 / 90 < lengths.mean() < 2 * 20 / 90


# Modules


def test_a_module_stays_frozen_and_is_passed_again(rows: Rows, tmp_path: Path) -> None:
    torch = pytest.importorskip("torch")
    torch.manual_seed(0)

    def module(bias: float = 0.0) -> Any:
        torch.manual_seed(0)
        made = torch.nn.Sequential(torch.nn.Flatten(), torch.nn.Linear(64, 40), torch.nn.Tanh())
        with torch.no_grad():
            made[1].bias += bias
        return made

    X, y, users = rows
    told: list[tuple[int, int]] = []
    model = small(
        features=module(), keep=12, cache=tmp_path / "kept", on_progress=lambda done, of: told.append((done, of))
    ).fit(X, y, users)
    assert told[-1] == (len(X), len(X))
    assert len(list((tmp_path / "kept").iterdir())) == 1
    assert "a public projection to 12 of 40 features, the 40 outputs of Sequential, frozen" in model.plan_.words
    model.save(tmp_path / "m")
    for given in (module(), Frozen.of(module(), (SIDE, SIDE, 1))):
        back = CentaurRegressor.load(tmp_path / "m", features=given)
        np.testing.assert_array_equal(back.predict(X, users), model.predict(X, users))
    with pytest.raises(InputError, match=r"a module of yours; pass it again: CentaurRegressor\.load"):
        CentaurRegressor.load(tmp_path / "m")
    with pytest.raises(InputError, match="other layers or weights"):
        CentaurRegressor.load(tmp_path / "m", features=module(0.5))
    with pytest.raises(InputError, match="Edges, Dct, Frozen"):
        small(features="resnet").planned(100, 64)


def test_edges_need_no_torch() -> None:
    code = (
        "import sys, numpy as np\nfrom privrep import CentaurRegressor\n"
        "X = np.random.default_rng(0).random((400, 64))\n"
        "CentaurRegressor(image=(8, 8, 1), epsilon=8.0, random_state=0).fit(X, X[:, 0], np.arange(400) // 4)\n"
        "assert 'torch' not in sys.modules\n"
    )
    assert subprocess.run([sys.executable, "-W", "ignore", "-c", code]).returncode == 0


# Rows and settings that cannot be used


def test_rows_that_are_not_finite_are_left_out(rows: Rows) -> None:
    X, y, users = rows
    bad = X.copy()
    bad[5, 3] = np.nan
    with pytest.warns(MissingValues):
        model = small(features=Dct(SIDE, SIDE, 1, 16)).fit(bad, y, users)
    kept = np.arange(len(y)) != 5
    same = small(features=Dct(SIDE, SIDE, 1, 16)).fit(X[kept], y[kept], users[kept])
    np.testing.assert_allclose(model.predict(X, users), same.predict(X, users), rtol=1e-6)
    assert np.isfinite(model.predict(bad, users)).all()


@pytest.mark.parametrize(
    ("options", "change", "sentence"),
    [
        ({"image": (9, 9, 1)}, {}, "not an image"),
        ({"keep": 0}, {}, "keep must be"),
        ({"keep": 1000}, {}, "keep must be"),
        ({"keep": "most"}, {}, "keep must be"),
        ({"epsilon": -1.0}, {}, "epsilon"),
        ({"unknown_users": "guess"}, {}, "unknown_users"),
        ({}, {"groups": None}, "fit needs groups"),
        ({}, {"X": np.zeros((USERS * EACH, SIDE, SIDE))}, "flatten images"),
        ({}, {"X": np.array([["a"] * 64] * USERS * EACH)}, "numbers alone"),
    ],
)
def test_what_cannot_be_used_is_refused(
    rows: Rows, tmp_path: Path, options: dict[str, Any], change: dict[str, Any], sentence: str
) -> None:
    given = {"X": rows[0], "y": rows[1], "groups": rows[2], **change}
    with pytest.raises(InputError, match=sentence):
        small(run_folder=tmp_path / "run", **options).fit(**given)
    assert not (tmp_path / "run").exists()


def test_other_rows_and_papers_are_refused(fitted: CentaurRegressor, rows: Rows) -> None:
    with pytest.raises(InputError, match="rows of 64 numbers"):
        fitted.predict(rows[0][:, :5], rows[2])
    with pytest.raises(InputError, match=r"PrivateFedRep\.paper"):
        CentaurRegressor.paper(2)
    copied = clone(fitted)
    assert copied.get_params()["features"] == Dct(SIDE, SIDE, 1, 16)


# The command line


def test_commands_take_its_folders(
    fitted: CentaurRegressor, rows: Rows, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    import pandas as pd

    X, y, users = rows
    fitted.save(tmp_path / "m")
    np.savez(tmp_path / "rows.npz", X=X[:20], users=[*users[:16], 900, 900, 900, 900], y=y[:20])
    command = ["predict", tmp_path / "m", tmp_path / "rows.npz", "--out", tmp_path / "p.csv", "--interval", "0.9"]
    code, said, _ = run(capsys, *command)
    assert code == 0
    assert "4 rows of 1 user without a head: predicted with the prior mean" in said
    found = pd.read_csv(tmp_path / "p.csv")
    assert list(found.columns) == ["user", "prediction", "prediction_low", "prediction_high"]
    np.testing.assert_allclose(found["prediction"][:16], fitted.predict(X[:16], users[:16]), rtol=1e-9)
    np.savez(tmp_path / "new.npz", X=X[16:20], users=[900] * 4, y=y[16:20])
    code, said, err = run(capsys, "personalize", tmp_path / "m", tmp_path / "new.npz")
    assert (code, err) == (0, "")
    assert f"Users: 1 more, {USERS + 1} in all" in said
    back = CentaurRegressor.load(tmp_path / "m")
    expected = fitted.personalize(X[16:20], y[16:20]).predict(X[:5])
    np.testing.assert_allclose(back.predict(X[:5], [900] * 5), expected, rtol=1e-6)
    assert "--proba is for networks of classes" in run(capsys, *command[:5], "--overwrite", "--proba")[2]
    assert (
        "--out is for networks of classes"
        in run(capsys, "personalize", tmp_path / "m", tmp_path / "new.npz", "--out", tmp_path / "w.json")[2]
    )
    assert "has no array 'y'" in run(capsys, "personalize", tmp_path / "m", _without_y(tmp_path, X))[2]
    code, out, _ = run(capsys, "inspect", tmp_path / "m")
    assert code == 0
    assert "Features of rows of 64 numbers, by a public map: the 16 lowest frequencies" in " ".join(out.split())
    data = json.loads(run(capsys, "inspect", tmp_path / "m", "--json")[1])
    assert data["public_map"]["keep"] == 16


def _without_y(folder: Path, X: np.ndarray) -> Path:
    np.savez(folder / "no.npz", X=X[:3], users=[1, 2, 3])
    return folder / "no.npz"
