"""DP-BLIP on a tiny BLIP of random weights: the contrastive embeddings, and generation with trained towers."""

from __future__ import annotations

from argparse import Namespace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

torch = pytest.importorskip("torch")
transformers = pytest.importorskip("transformers")
pytest.importorskip("PIL")

from experiments.dp_blip import (  # noqa: E402
    Folders,
    Tiny,
    measured,
    pairs_of,
    tiny_blip,
    train_privately,
    vocabulary,
)

from privrep.errors import InputError  # noqa: E402
from privrep.multimodal.blip import answer, blip_encoders, caption, save, with_encoders  # noqa: E402
from privrep.multimodal.pairs import CaptionedImages, split_by_image  # noqa: E402
from privrep.nn.flat_module import FlatModule, check_module, try_module  # noqa: E402

WORDS = ["a red dog runs on grass", "two boys and a boat at sea", "what is this", "is it the dog or the sea there"]
TINY = Tiny(side=32, width=16, layers=2, dim=8, words=40)
IMAGES = np.random.default_rng(3).integers(0, 256, (3, 40, 36, 3), dtype=np.uint8)


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> Folders:
    return tiny_blip(tmp_path_factory.mktemp("blip"), WORDS, TINY)


def changed(module: Any) -> Any:
    """The module with all weights moved, as training would."""
    with torch.no_grad():
        for number, parameter in enumerate(module.parameters()):
            parameter.add_(0.3 * torch.cos(torch.arange(parameter.numel()) + number).reshape(parameter.shape))
    return module


def test_similarities_are_those_of_the_contrastive_head_of_transformers(folders: Folders) -> None:
    image, text = blip_encoders(folders.contrast, tokens=12)
    model = transformers.BlipForImageTextRetrieval.from_pretrained(folders.contrast).eval()
    processor = transformers.BlipProcessor.from_pretrained(folders.contrast)
    inputs = processor(images=list(IMAGES), text=WORDS, padding=True, return_tensors="pt")
    pixels, texts = image.prepare(IMAGES), text.prepare(WORDS)
    with torch.no_grad():
        expected = model(**inputs, use_itm_head=False).itm_score
        u, v = image.module(torch.from_numpy(pixels)), text.module(torch.from_numpy(texts))
    found = torch.nn.functional.normalize(u, dim=1) @ torch.nn.functional.normalize(v, dim=1).T
    assert found.shape == (3, 4)
    assert torch.allclose(found, expected, atol=1e-5)
    assert expected.std() > 1e-3  # else every embedding would do
    assert pixels.shape == (3, image.numbers) == (3, 3 * 32 * 32)
    assert texts.shape == (4, text.numbers) == (4, 24)
    assert image.dim == text.dim == u.shape[1] == 8


def test_every_row_is_encoded_by_itself_and_any_number_is_accepted(folders: Folders) -> None:
    for encoder in blip_encoders(folders.contrast, tokens=12):
        check_module(encoder.module, encoder.name)
        rows = torch.cos(torch.arange(2.0 * encoder.numbers)).reshape(2, -1)
        assert try_module(encoder.module, rows, encoder.name, "rows").shape == (2, encoder.dim)
        assert torch.isfinite(encoder.module(torch.full((1, encoder.numbers), torch.nan))).all()
        assert torch.isfinite(encoder.module(torch.full((1, encoder.numbers), -1e30))).all()


def test_dropout_of_a_checkpoint_is_off(folders: Folders, tmp_path: Path) -> None:
    config = transformers.BlipConfig.from_pretrained(folders.contrast)
    config.text_config.hidden_dropout_prob, config.vision_config.attention_dropout = 0.5, 0.5
    processor = transformers.BlipProcessor.from_pretrained(folders.contrast)
    save(tmp_path, transformers.BlipForImageTextRetrieval(config), processor)
    for encoder in blip_encoders(tmp_path, tokens=12):
        check_module(encoder.module, encoder.name)
        rows = torch.ones(1, encoder.numbers)
        assert torch.equal(encoder.module.train()(rows), encoder.module(rows))


def test_what_is_trainable_grows_and_every_trainable_weight_has_a_gradient(folders: Folders) -> None:
    sizes = []
    for train in ("nothing", "projections", "last", "all"):
        encoders = blip_encoders(folders.contrast, train=train, tokens=12)  # type: ignore[arg-type]
        sizes.append([FlatModule(encoder.module).size for encoder in encoders])
        for encoder, inputs in zip(encoders, (IMAGES, WORDS), strict=True):
            encoder.module.zero_grad()
            if FlatModule(encoder.module).size:
                encoder.module(torch.from_numpy(encoder.prepare(inputs))).square().sum().backward()
            chosen = {name: p for name, p in encoder.module.named_parameters() if p.requires_grad}
            assert all(p.grad is not None for p in chosen.values())
            assert not any("crossattention" in name for name in chosen)
    assert sizes[0] == [0, 0]
    assert sizes[1] == [16 * 8 + 8] * 2
    assert all(small < large for small, large in zip(sizes[1], sizes[2], strict=True))
    assert all(small < large for small, large in zip(sizes[2], sizes[3], strict=True))


def test_trained_towers_are_in_the_generator_and_change_what_it_says(folders: Folders) -> None:
    image, _ = blip_encoders(folders.contrast, train="last", tokens=12)
    start = caption(*with_encoders(image, folders.caption), IMAGES, longest=8)
    assert start == caption(*with_encoders(image, folders.caption), IMAGES, longest=8, at_a_time=2)
    plain = transformers.BlipForConditionalGeneration.from_pretrained(folders.caption).eval()
    processor = transformers.BlipProcessor.from_pretrained(folders.caption)
    assert start == caption(plain, processor, IMAGES, longest=8)  # one tower in all three folders
    changed(image.module)
    model, _ = with_encoders(image, folders.caption)
    for name, value in image.module.vision_model.state_dict().items():
        assert torch.equal(model.vision_model.state_dict()[name], value)
    decoder = plain.text_decoder.state_dict()
    assert all(torch.equal(value, decoder[name]) for name, value in model.text_decoder.state_dict().items())
    assert caption(model, processor, IMAGES, longest=8) != start
    assert len(start) == 3
    assert set(" ".join(start).split()) <= set(vocabulary(WORDS, 40))


def test_captions_are_a_function_of_the_image(folders: Folders) -> None:
    model, processor = with_encoders(blip_encoders(folders.contrast, tokens=12)[0], folders.caption)
    together = caption(model, processor, IMAGES, longest=6)
    assert together == [caption(model, processor, IMAGES[[n]], longest=6)[0] for n in range(3)]
    assert caption(model, processor, IMAGES, longest=6, beams=3) == caption(model, processor, IMAGES, 6, 3)
    assert caption(model, processor, IMAGES[:0]) == []


def test_answers_do_not_depend_on_other_questions(folders: Folders) -> None:
    image, text = blip_encoders(folders.contrast, train="all", tokens=12)
    for encoder in (image, text):
        changed(encoder.module)
    model, processor = with_encoders(image, folders.answer, "answer", text)
    assert torch.equal(
        model.text_encoder.encoder.layer[1].intermediate.dense.weight,
        text.module.text_encoder.encoder.layer[1].intermediate.dense.weight,
    )
    crossing = transformers.BlipForQuestionAnswering.from_pretrained(folders.answer).text_encoder.encoder.layer[0]
    kept = model.text_encoder.encoder.layer[0].crossattention.self.query.weight
    assert torch.equal(kept, crossing.crossattention.self.query.weight)
    questions = ["what is this", "is it the dog or the sea there", "is the sea"]
    together = answer(model, processor, IMAGES, questions, longest=6)
    alone = [answer(model, processor, IMAGES[[n]], [asked], longest=6)[0] for n, asked in enumerate(questions)]
    assert together == alone
    assert any(together)
    assert all(isinstance(said, str) for said in together)
    with pytest.raises(InputError, match="one question for each image"):
        answer(model, processor, IMAGES, questions[:2])


def test_trained_encoders_are_saved_as_a_blip_and_loaded_again(folders: Folders, tmp_path: Path) -> None:
    encoders = blip_encoders(folders.contrast, train="all", tokens=12)
    for encoder in encoders:
        changed(encoder.module)
    save(tmp_path, *with_encoders(encoders[0], folders.contrast, "contrast", encoders[1]))
    assert {path.suffix for path in tmp_path.iterdir()} <= {".json", ".safetensors"}
    again = blip_encoders(tmp_path, tokens=12)
    for before, after, inputs in zip(encoders, again, (IMAGES, WORDS), strict=True):
        rows = torch.from_numpy(before.prepare(inputs))
        assert torch.equal(before.module(rows), after.module(rows))
        assert np.array_equal(after.prepare(inputs), rows.numpy())


def test_a_generator_of_another_size_and_towers_of_another_kind_are_refused(folders: Folders, tmp_path: Path) -> None:
    image, text = blip_encoders(folders.contrast, tokens=12)
    wider = tiny_blip(tmp_path, WORDS, Tiny(side=32, width=24, layers=2, dim=8, words=40))
    with pytest.raises(InputError, match="another size"):
        with_encoders(image, wider.caption)
    with pytest.raises(InputError, match="give the ImageTower"):
        with_encoders(text, folders.caption)
    with pytest.raises(InputError, match="task must be"):
        with_encoders(image, folders.caption, "chat")  # type: ignore[arg-type]
    with pytest.raises(InputError, match="between 2 and 24"):
        blip_encoders(folders.contrast, tokens=99)
    with pytest.raises(InputError, match="train must be"):
        blip_encoders(folders.contrast, train="some", tokens=12)  # type: ignore[arg-type]


def test_weights_that_are_not_there_are_told_and_never_made_up(
    folders: Folders, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with pytest.raises(InputError, match="lacks weights"):
        blip_encoders(folders.caption)
    with pytest.raises(InputError, match="lacks weights"):
        with_encoders(blip_encoders(folders.contrast, tokens=12)[0], folders.contrast, "caption")
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    for nowhere in (tmp_path, tmp_path / "nothing" / "at" / "all", "nobody/blip"):
        with pytest.raises(InputError, match="give the path of a folder"):
            blip_encoders(nowhere)


def test_the_whole_way_from_private_training_to_scored_captions(
    folders: Folders, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("shutil.which", lambda _: None)  # Java's start would take most of the time
    pytest.importorskip("pycocoevalcap")
    pixels = np.random.default_rng(5).integers(0, 256, (9, 32, 32, 3), dtype=np.uint8)
    names = tuple(f"{n}.jpg" for n in range(9))
    data = CaptionedImages(pixels, names, tuple((WORDS[n % 2], WORDS[(n + 1) % 4]) for n in range(9)))
    parts = split_by_image(data, (2, 5, 2), seed=0)
    options = Namespace(epsilon=3.0, steps=2, meteor=False)
    outcome = measured(folders.contrast, folders.caption, parts, options)
    assert "(3, 0.01)-DP" in outcome.privacy  # delta is 1/(2 users), and at most 0.01
    assert "simulation, not private" in outcome.privacy
    assert [reference for reference, _, _ in outcome.examples] == [captions[0] for captions in parts[2].captions]
    assert 0 <= outcome.after.bleu[0] <= 1
    image, text = blip_encoders(folders.contrast, train="last", tokens=12)
    tower = image.module.vision_model
    before = {name: value.clone() for name, value in tower.state_dict().items()}
    train_privately(image, text, pairs_of(image, text, parts[1], parts[0]), epsilon=3.0, steps=2)
    moved = {name for name, value in tower.state_dict().items() if not torch.equal(value, before[name])}
    assert moved
    assert all(name.startswith(("encoder.layers.1.", "post_layernorm.")) for name in moved)


def test_the_vocabulary_has_the_most_frequent_public_words() -> None:
    assert list(vocabulary(["A dog .", "a cat", "dog a"], 2))[-2:] == ["a", "dog"]
