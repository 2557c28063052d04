"""`privrep fit-neural`: every kind of data, every kind of mistake, and what `inspect` then says."""

from __future__ import annotations

import gzip
import io
import json
import re
import struct
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

pytest.importorskip("torch")
from PIL import Image

from commands import run
from configs import merged, write_config
from privrep import Centaur
from privrep.cli import fit_neural as command
from privrep.cli.console import Bar
from privrep.schema.commands import ImageUsers, NetworkModel, NeuralConfig

SIDE, COUNT = 8, 360


def made_up(seed: int = 0) -> tuple[np.ndarray, np.ndarray]:
    """Images of bars that lie, stand or slant."""
    rng = np.random.default_rng(seed)
    labels = rng.integers(0, 3, COUNT)
    bars = np.zeros((3, SIDE, SIDE))
    bars[0, 3:5], bars[1, :, 3:5], bars[2] = 160, 160, 160 * np.eye(SIDE)
    pixels = bars[labels] + rng.integers(0, 90, (COUNT, SIDE, SIDE))
    return pixels.astype(np.uint8), labels.astype(np.int64)


def write_idx(folder: Path) -> None:
    pixels, labels = made_up()
    header = struct.pack(">4B3I", 0, 0, 8, 3, COUNT, SIDE, SIDE)
    (folder / "images.gz").write_bytes(gzip.compress(header + pixels.tobytes()))
    (folder / "labels").write_bytes(struct.pack(">4BI", 0, 0, 8, 1, COUNT) + labels.astype(np.uint8).tobytes())


def encoded(pixels: np.ndarray) -> bytes:
    file = io.BytesIO()
    Image.fromarray(pixels).save(file, "PNG")
    return file.getvalue()


IDX = {"data": {"kind": "idx", "images": "images.gz", "labels": "labels"}}
DEALT = {"users": {"partition": {"clients": 30, "classes_per_client": 2, "seed": 1}}}
PRIVACY = {"privacy": {"epsilon": 8.0, "delta": 1e-5, "seed": 3}}
MODEL = {"model": {"classes": 3, "share": "linear", "rows": 10}, "training": {"rounds": 2}}
WHOLE: dict[str, Any] = {**IDX, **DEALT, **PRIVACY, **MODEL}


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    write_idx(tmp_path)
    return tmp_path


def test_a_fit_from_a_file_writes_a_model_that_loads(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    config = write_config(folder / "c.toml", merged(WHOLE, {"output": {"folder": "model"}}))
    code, out, err = run(capsys, "fit-neural", config)
    assert (code, err) == (0, "")
    for part in ("Shared: a linear layer", "Privacy: (", "of a budget of 8", "held out: ", "not private", "SEEDED"):
        assert part in out, part
    assert float(re.findall(r"held out: ([\d.]+)", out)[0]) > 0.5
    model = Centaur.load(folder / "model")
    pixels, labels = made_up()
    assert model.predict(pixels.reshape(COUNT, -1)[:5] / 255, [0] * 5).shape == (5,)
    assert (model.epsilon, model.rows, model.image, len(model.heads_.ids)) == (8.0, 10, (SIDE, SIDE, 1), 30)
    head = model.personalize(pixels.reshape(COUNT, -1)[:9] / 255, labels[:9])
    assert head.predict(pixels.reshape(COUNT, -1)[:4] / 255).shape == (4,)
    code, _, err = run(capsys, "fit-neural", config)
    assert code == 2
    assert "finished model" in err


def test_check_says_the_plan_and_writes_nothing(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    code, out, _ = run(capsys, "fit-neural", write_config(folder / "c.toml", WHOLE), "--check")
    assert code == 0
    assert "Shared: a linear layer" in out
    assert "30 users, rows of 64 numbers. Nothing was spent." in out
    assert sorted(path.name for path in folder.iterdir()) == ["c.toml", "images.gz", "labels"]


def test_inspect_reads_a_neural_folder(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    settings = merged(WHOLE, {"training": {"rate": 0.5, "quantile": 0.5}})
    assert run(capsys, "fit-neural", write_config(folder / "c.toml", settings), "--out", folder / "m")[0] == 0
    code, out, _ = run(capsys, "inspect", folder / "m")
    assert code == 0
    text = " ".join(out.split())
    for part in ("a fitted model", "heads of 30 users", "each with probability 0.5", "round-2/update+short", "SEEDED"):
        assert part in text, part
    code, out, _ = run(capsys, "inspect", folder / "m", "--json")
    data = json.loads(out)
    assert data["finished"]
    assert data["epsilon"] <= 8
    assert sum(event["share"] for event in data["events"]) == pytest.approx(data["share_spent"], abs=1e-6)
    assert data["share_spent"] == pytest.approx(1, abs=0.02)


def test_a_run_that_was_stopped_is_inspected_and_continued(
    folder: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    config = write_config(folder / "c.toml", WHOLE)

    def stop(page: str, epsilon: float) -> None:
        if page == "round-1":
            raise KeyboardInterrupt

    plain = command._model
    monkeypatch.setattr(command, "_model", lambda *given: _told(plain(*given), stop))
    code, _, err = run(capsys, "fit-neural", config, "--out", folder / "m")
    assert code == 130
    assert "run the same command to continue" in err
    code, out, _ = run(capsys, "inspect", folder / "m")
    assert code == 0
    assert "NOT FINISHED" in out
    monkeypatch.setattr(command, "_model", plain)
    code, _, err = run(capsys, "fit-neural", config, "--out", folder / "m")
    assert code == 0
    assert "Continuing the run" in err
    assert run(capsys, "fit-neural", config, "--out", folder / "other")[0] == 0
    weights = [Centaur.load(folder / name).learned_.weights for name in ("m", "other")]
    np.testing.assert_array_equal(*weights)


def _told(model: Centaur, on_page: Any) -> Centaur:
    model.on_page = on_page
    return model


def test_the_bar_tells_epsilon_and_a_loss_marked_not_private() -> None:
    class Shown:
        text, disable = "", False

        def add_task(self, text: str, total: int) -> int:
            return 0

        def update(self, task: int, description: str, advance: int) -> None:
            self.text = description

    shown = Shown()
    bar = Bar(shown)
    bar.begin("reading", 5)
    bar.loss("round-1", 0.5)
    bar.page("round-2", 0.75)
    assert shown.text == "round 2, epsilon 0.750 spent, training loss about 0.500 (not private)"


def test_every_kind_of_data(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    pixels, labels = made_up()
    writers = np.arange(COUNT) % 20
    names = ["lies", "stands", "slants"]
    np.savez(folder / "data.npz", images=pixels, labels=labels, writers=writers)
    images = [encoded(image) for image in pixels]
    columns = {"who": [f"w{w}" for w in writers], "is": [names[label] for label in labels], "png": images}
    pq.write_table(pa.table(columns), folder / "data.parquet")
    for number, (image, label, writer) in enumerate(zip(images, labels, writers, strict=True)):
        place = folder / "tree" / f"w{writer}" / names[label]
        place.mkdir(parents=True, exist_ok=True)
        (place / f"{number}.png").write_bytes(image)
    table = {"image": "png", "label": "is", "user": "who"}
    sources: list[dict[str, Any]] = [
        {"data": {"kind": "npz", "path": "data.npz"}, "users": {"by": "writers", "validation": 0.25}},
        {
            "data": {"kind": "parquet", "path": "data.parquet", "columns": table, "size": [8, 8], "colour": False},
            "users": {"by": "column", "validation": 0.25},
            "model": {"classes": names},
        },
        {
            "data": {"kind": "folder", "path": "tree", "size": [8, 8], "colour": False},
            "users": {"by": "folders", "validation": 0.25},
            "model": {"classes": names},
        },
    ]
    for number, source in enumerate(sources):
        base = {name: part for name, part in WHOLE.items() if name not in ("data", "users")}
        config = write_config(folder / "c.toml", merged(base, source))
        code, out, err = run(capsys, "fit-neural", config, "--out", folder / f"model{number}")
        assert code == 0, err
        accuracy = re.findall(r"Accuracy on (\d+) rows held out: ([\d.]+)", out)
        assert int(accuracy[0][0]) == COUNT // 18 * 5  # of 18 rows of each of 20 users, 5
        assert float(accuracy[0][1]) > 0.6
    expected = Centaur.load(folder / "model1")
    rows = pixels.reshape(COUNT, -1) / 255
    mine = np.array([f"w{w}" for w in writers])
    assert np.mean(expected.predict(rows, mine) == np.array(names)[labels]) > 0.6


def test_labels_that_are_no_classes_are_counted_and_refused_where_none_is_one(
    folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    pixels, labels = made_up()
    np.savez(folder / "data.npz", images=pixels, labels=labels, writers=np.arange(COUNT) % 20)
    base = {name: part for name, part in WHOLE.items() if name not in ("data", "users")}
    source = {"data": {"kind": "npz", "path": "data.npz"}, "users": {"by": "writers"}, "model": {"classes": 2}}
    config = write_config(folder / "c.toml", merged(base, source))
    code, _, err = run(capsys, "fit-neural", config, "--out", folder / "model")
    assert code == 0
    assert err.count("label that is none of the classes") == 1
    assert f"{(labels == 2).sum():,} rows" in err
    np.savez(folder / "data.npz", images=pixels, labels=labels + 7, writers=np.arange(COUNT) % 20)
    for option in (["--check"], ["--out", folder / "none"]):
        code, _, err = run(capsys, "fit-neural", config, *option)
        assert code != 0
        assert "no row has a class number, 0 to 1" in err
    assert not (folder / "none").exists()


def test_networks_and_features_are_made_by_name(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    changes: list[dict[str, Any]] = [
        {"model": {"network": "mlp", "share": "all"}, "training": {"rounds": 1, "clip": 0.1, "server": "adam"}},
        {"model": {"features": "dct", "keep": 12}},
        {"model": {"features": "edges", "keep": 20}},
        {"model": {"features": "none"}},
    ]
    for number, change in enumerate(changes):
        config = write_config(folder / "c.toml", merged(WHOLE, change))
        code, _, err = run(capsys, "fit-neural", config, "--out", folder / f"model{number}")
        assert code == 0, err
        Centaur.load(folder / f"model{number}")
    described = json.loads((folder / "model0" / "model.json").read_text())
    assert described["config"]["settings"]["server"] == "adam"
    assert described["plan"]["share"] == "all"


def test_files_that_are_no_config(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert "there is no file" in run(capsys, "fit-neural", folder / "none.toml")[2]
    (folder / "c.toml").write_text("[data\n")
    assert "is not a TOML file" in run(capsys, "fit-neural", folder / "c.toml")[2]
    (folder / "c.toml").write_bytes(b"\xff\xfe")
    assert "is not a TOML file" in run(capsys, "fit-neural", folder / "c.toml")[2]
    write_config(folder / "c.toml", WHOLE)
    assert "say where the model goes" in run(capsys, "fit-neural", folder / "c.toml")[2]


def test_paths_are_relative_to_the_file(folder: Path) -> None:
    config = NeuralConfig.read(write_config(folder / "c.toml", merged(WHOLE, {"output": {"folder": "m"}})))
    assert config.data.images == folder / "images.gz"
    assert config.out == folder / "m"


def test_a_label_that_is_no_class_is_nobodys_class() -> None:
    """It stays -1 on its way through the names of the classes, also as a place in a list of them."""
    from privrep.cli.fit_neural import _tables
    from privrep.data.images import Images

    images = Images(np.zeros((4, 2, 2), np.uint8), np.array([0, 9, 1, -1]), ("a", "b"), users=np.array([0, 0, 1, 1]))
    asked = NeuralConfig.model_construct(users=ImageUsers(by="writers"), model=NetworkModel(classes=["b", "a"]))
    assert _tables(asked, images)[0].y.tolist() == [1, -1, 0, -1]
