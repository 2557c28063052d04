"""A shift of a decoder's states: the bank has the decoder's own logits, rows are a caption's own, steps are private."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

torch = pytest.importorskip("torch")
transformers = pytest.importorskip("transformers")

from privrep.errors import InputError  # noqa: E402
from privrep.estimators.clip import DPClip  # noqa: E402
from privrep.multimodal.training import ClipSettings  # noqa: E402
from privrep.multimodal.words import (  # noqa: E402
    FASTEST,
    LOGIT_NOISE,
    Captions,
    Shift,
    WordBank,
    describe,
    shift_settings,
    word_bank,
    word_pairs,
)
from privrep.nn.flat_module import check_module, try_module  # noqa: E402

PAD, END, BEGIN, WORDS, WIDTH = 0, 2, 3, 12, 16


@pytest.fixture(scope="module")
def decoder() -> Any:
    from transformers.models.blip.modeling_blip_text import BlipTextLMHeadModel

    config = transformers.BlipTextConfig(
        vocab_size=WORDS,
        hidden_size=WIDTH,
        encoder_hidden_size=6,
        intermediate_size=24,
        num_hidden_layers=2,
        num_attention_heads=2,
        max_position_embeddings=8,
        bos_token_id=BEGIN,
        eos_token_id=END,
        sep_token_id=END,
        pad_token_id=PAD,
        is_decoder=True,
        initializer_range=0.3,
    )
    with torch.random.fork_rng():
        torch.manual_seed(4)
        model = BlipTextLMHeadModel(config).eval()
        with torch.no_grad():
            model.cls.predictions.decoder.bias.copy_(torch.randn(WORDS))
    return model


def photographs(count: int) -> tuple[Any, Any]:
    rng = np.random.default_rng(1)
    numbers = rng.normal(size=(count, 4)).astype(np.float32)
    return rng.normal(size=(count, 3, 6)).astype(np.float32), numbers / np.linalg.norm(numbers, axis=1, keepdims=True)


def captions(count: int, each: int = 2) -> Captions:
    rng = np.random.default_rng(2)
    ids = np.full((count * each, 7), PAD, np.int64)
    for row in ids:
        length = rng.integers(1, 6)
        row[: length + 2] = [BEGIN, *rng.integers(4, WORDS, length), END]
    return Captions(ids, np.repeat(np.arange(count), each), PAD)


def test_the_bank_has_rows_of_one_length_and_the_logits_of_the_decoder(decoder: Any) -> None:
    bank = word_bank(decoder)
    assert np.linalg.norm(bank.rows, axis=1) == pytest.approx(np.full(WORDS, bank.length), rel=1e-5)
    seen, numbers = photographs(3)
    given = captions(3, each=1)
    pairs = word_pairs(decoder, seen, numbers, given)
    with torch.no_grad():
        ids = torch.from_numpy(given.ids)
        mask = (ids != PAD).long()
        own = decoder(input_ids=ids, attention_mask=mask, encoder_hidden_states=torch.tensor(seen)).logits[:, :-1]
        rows = Shift(bank, bank.directions(3), 4)(torch.from_numpy(pairs.table.X))
    logits = rows.numpy() @ (bank.rows / bank.length).T
    there = (given.ids[:, 1:] != PAD).reshape(-1)
    assert logits == pytest.approx(own.reshape(-1, WORDS).numpy()[there], abs=1e-4)
    assert pairs.table.y.tolist() == given.ids[:, 1:].reshape(-1)[there].tolist()
    assert pairs.unit == "user"
    assert pairs.table.n_users == 3


def test_rows_of_a_caption_do_not_depend_on_other_captions(decoder: Any) -> None:
    seen, numbers = photographs(4)
    given = captions(4)
    both = word_pairs(decoder, seen, numbers, given)
    alone = Captions(given.ids[-2:], np.array([0, 0]), PAD)
    last = word_pairs(decoder, seen[-1:], numbers[-1:], alone)
    assert np.array_equal(both.table.X[-len(last.table.X) :], last.table.X)


def test_directions_make_words_differ_equally() -> None:
    vectors = np.random.default_rng(0).normal(size=(200, 10)) * np.linspace(0.1, 3, 10)
    bank = WordBank(vectors.astype(np.float32), np.zeros(200, np.float32))
    along = (bank.vectors - bank.vectors.mean(0)) @ bank.directions(4)
    assert along.T @ along / 200 == pytest.approx(np.eye(4) / 4, abs=1e-4)
    assert bank.directions(99).shape == (10, 10)


def test_a_shift_takes_any_number_mixes_no_rows_and_begins_at_zero(decoder: Any) -> None:
    bank = word_bank(decoder)
    shift = Shift(bank, bank.directions(3), 4)
    check_module(shift, "shift")
    try_module(shift, torch.cos(torch.arange(2.0 * (WIDTH + 4))).reshape(2, -1), "shift", "rows")
    assert not shift.of(photographs(2)[1]).any()


def test_a_shift_is_learned_under_a_budget_and_captions_change(decoder: Any) -> None:
    count = 60
    seen, numbers = photographs(count)
    ids = np.tile(np.array([[BEGIN, 7, 7, END, PAD]]), (count, 1))
    pairs = word_pairs(decoder, seen, numbers, Captions(ids, np.arange(count), PAD))
    shift = Shift(word_bank(decoder), word_bank(decoder).directions(8), 4)
    settings = ClipSettings("bank", 8, None, clip=0.5, rate=20.0, optimiser="sgd")
    model = DPClip(
        shift,
        torch.nn.Identity(),
        epsilon=1e4,
        temperature=1.0,
        cosine=False,
        settings=settings,
        pairs_per_user=3,
        random_state=0,
    ).fit(pairs)
    before = describe(decoder, seen[:5], longest=3)
    assert before == describe(decoder, seen[:5], shift.of(numbers[:5]) * 0, longest=3, at_a_time=2)
    model.trained()
    added = shift.of(numbers)
    assert added.any()
    with torch.no_grad():
        rows = torch.from_numpy(pairs.table.X)
        words = torch.from_numpy(pairs.bank / word_bank(decoder).length)
        plain = Shift(word_bank(decoder), word_bank(decoder).directions(8), 4)
        chance = [torch.softmax(one(rows) @ words.T, dim=1)[::3, 7].mean() for one in (plain, shift)]
    assert chance[1] > chance[0]
    assert "user level" in str(model.privacy_)
    assert model.ledger_.report().epsilon <= 1e4
    assert len(describe(decoder, seen[:4], added[:4], longest=4, beams=2)) == 4
    others = describe(decoder, seen, added, longest=4, never=[7])
    assert not any(7 in ids for ids in others)
    assert not any(END in ids for ids in others)


def test_settings_follow_from_users_and_budget() -> None:
    few, many = shift_settings(500, 0.3), shift_settings(1_000, 0.3)
    assert many.rate == pytest.approx(2 * few.rate)
    assert 2 * few.clip * few.rate * few.steps / (500 * 0.3) == pytest.approx(LOGIT_NOISE)
    assert shift_settings(10**9, 1.0).rate == FASTEST


def test_photographs_without_numbers_are_refused(decoder: Any) -> None:
    seen, numbers = photographs(3)
    with pytest.raises(InputError, match="for each photograph"):
        word_pairs(decoder, seen, numbers[:2], captions(3))
