"""A frozen captioner that learns privately which words photographs of one kind call for.

A decoder says the next word by a softmax over a public list: the word's vector times its own state, plus the word's
bias. Here users teach what to add to that state. It is a linear map of few numbers of the photograph, along few
directions of the word vectors. It begins at zero, with the public captioner as it is, and the loss is convex in it.

To tell the next word apart from all others is to tell a caption apart from a public bank: what `DPClip` does with
`mechanism="bank"`. A row is a word of a caption: the decoder's state before it, the photograph's numbers, and as target
the number of the word. So users, clipping, budget, run folders and saving are the same as for `DPClip`. Decoders are
BLIP's (`BlipTextLMHeadModel`, the `text_decoder` of a BlipForConditionalGeneration) or modules with its parts.

States of a decoder are computed once, from one caption and its photograph alone. Like features they are as private as
what they were computed from. Generating with what was learned is post-processing.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from privrep.errors import InputError
from privrep.multimodal.pairs import Pairs, Users, labelled
from privrep.multimodal.training import ClipSettings
from privrep.nn.threads import one_thread
from privrep.typing import Singles

STEPS = 6
CLIP = 0.1
LOGIT_NOISE = 0.35  # standard deviation that noise may add to the logit of a word
FASTEST = 400.0  # rate: beyond it steps overshoot
_LARGEST = 1e4  # the largest number that counts of a state, and of a photograph


@dataclass(frozen=True, eq=False)
class WordBank:
    """The last layer of a decoder as a public bank of texts, a text being a word.

    `DPClip` takes directions of texts alone. So every vector and its bias get one number more, which makes all equally
    long. The state's part there is zero, and logits are the decoder's own.
    """

    vectors: Singles  # (words, width)
    biases: Singles  # (words,)

    @property
    def length(self) -> float:
        """Return the length that all rows of the bank have."""
        return math.sqrt(float((self.vectors.astype(np.float64) ** 2).sum(1).max() + (self.biases**2).max()))

    @property
    def rows(self) -> Singles:
        """Return (words, width + 2): vectors, biases and what fills them up."""
        own = np.column_stack([self.vectors, self.biases]).astype(np.float64)
        rest = np.sqrt(np.maximum(self.length**2 - (own**2).sum(1), 0))
        return np.column_stack([own, rest]).astype(np.float32)

    def directions(self, rank: int, weights: NDArray[Any] | None = None) -> Singles:
        """Return principal directions of the words' vectors, (width, rank), in which they differ equally.

        Adding a column times a to a state moves the logits of all words by a/sqrt(rank) in the mean square.

        Args:
            rank: how many directions; fewer if the vectors have fewer.
            weights: how much each word counts, (words,): frequencies in public captions. None: all equally.
        """
        share = np.ones(len(self.vectors)) if weights is None else np.asarray(weights, np.float64)
        share = share / share.sum()
        centred = self.vectors - share @ self.vectors
        _, lengths, components = np.linalg.svd(np.sqrt(share)[:, None] * centred, full_matrices=False)
        kept = min(rank, int((lengths > 1e-6 * lengths[0]).sum()))
        return np.asarray((components[:kept] / lengths[:kept, None]).T / math.sqrt(kept), np.float32)


def word_bank(decoder: Any) -> WordBank:
    """Return the last layer of a decoder as a bank of words."""
    last = decoder.cls.predictions.decoder
    biases = np.zeros(len(last.weight)) if last.bias is None else last.bias.detach().numpy()
    return WordBank(last.weight.detach().numpy().copy(), np.asarray(biases, np.float32).copy())


class Shift(nn.Module):
    """A module from a state and a photograph's numbers, rows (r, width + numbers), to the shifted state.

    States are given as the bank has its words. Trainable is the map of a photograph's numbers to the directions alone;
    it begins at zero.
    """

    directions: Tensor

    def __init__(self, bank: WordBank, directions: Singles, numbers: int) -> None:
        """Make a shift of zero.

        Args:
            bank: the words of the decoder.
            directions: of states, (width, rank), along which the shift goes.
            numbers: how many numbers a photograph has.
        """
        super().__init__()
        self.width, self.length = bank.vectors.shape[1], bank.length
        self.map = nn.Linear(numbers, directions.shape[1], bias=False)
        nn.init.zeros_(self.map.weight)
        self.register_buffer("directions", torch.tensor(directions))

    def forward(self, rows: Tensor) -> Tensor:
        """Return shifted states (r, width + 2) of rows."""
        rows = torch.nan_to_num(rows).clamp(-_LARGEST, _LARGEST)
        shifted = rows[:, : self.width] + self.map(rows[:, self.width :]) @ self.directions.T
        ends = torch.tensor([1.0, 0.0]).expand(len(rows), 2)
        return torch.cat([shifted, ends], dim=1) * self.length

    def of(self, photographs: NDArray[Any]) -> Tensor:
        """Return what is added to states, (n, width), from the numbers (n, numbers) of photographs."""
        with torch.no_grad():
            result: Tensor = self.map(torch.tensor(photographs, dtype=torch.float32)) @ self.directions.T
        return result


@dataclass(frozen=True, eq=False)
class Captions:
    """Captions of photographs, in a decoder's own tokens."""

    ids: NDArray[np.int64]  # (captions, tokens): what begins a caption, its words, what ends it, padding
    photograph: NDArray[np.int64]  # (captions,): the row of each caption's photograph
    padding: int


def word_pairs(
    decoder: Any,
    seen: NDArray[Any],
    numbers: NDArray[Any],
    captions: Captions,
    users: Users | None = None,
    progress: Callable[[int], None] | None = None,
) -> Pairs:
    """Return a row for every word of every caption; the bank is the decoder's list of words.

    Formal guarantee:
    * The rows of a caption are a function of that caption and its photograph alone, to the last bit.
    * Captions go through the decoder one at a time, in products whose shapes public sizes decide.

    Args:
        decoder: frozen and public.
        seen: what the decoder attends to, (photographs, places, width).
        numbers: what the shift is a linear map of, (photographs, k).
        captions: captions of these photographs.
        users: the user of each photograph, (photographs,); None: every photograph is a user.
        progress: told how many captions are done.
    """
    bank, owners = word_bank(decoder), np.arange(len(seen)) if users is None else np.asarray(users)
    if not len(seen) == len(numbers) == len(owners) or len(captions.photograph) != len(captions.ids):
        raise InputError(
            "give what is seen, numbers and a user for each photograph, and for each caption a photograph."
        )
    width = bank.vectors.shape[1]
    there = (captions.ids[:, 1:] != captions.padding) & (captions.ids[:, :-1] != captions.padding)
    result = np.empty((int(there.sum()), width + numbers.shape[1]), np.float32)
    end = 0
    for place in range(len(captions.ids)):
        photograph, kept = int(captions.photograph[place]), there[place]
        rows = result[end : end + int(kept.sum())]
        found = _compute_states(decoder, seen[photograph], captions.ids[place], captions.padding)
        rows[:, :width], rows[:, width:] = found[kept], numbers[photograph]
        end += len(rows)
        if progress is not None:
            progress(place + 1)
    of_rows = owners[np.repeat(captions.photograph, there.sum(1))]
    return labelled(result, captions.ids[:, 1:][there], bank.rows, range(len(bank.vectors)), of_rows)


def _compute_states(decoder: Any, seen: NDArray[Any], ids: NDArray[np.int64], padding: int) -> Singles:
    """Return the state before each token but the first, (tokens - 1, width).

    Args:
        decoder: frozen and public.
        seen: what it attends to, (places, width).
        ids: the tokens of one caption, (tokens,).
        padding: the token that stands for none.
    """
    given = torch.from_numpy(ids[None])
    image = torch.tensor(seen[None], dtype=torch.float32)
    with one_thread(), torch.inference_mode():
        mask = (given != padding).long()
        found = decoder.bert(input_ids=given, attention_mask=mask, encoder_hidden_states=image, is_decoder=True)
        result: Singles = decoder.cls.predictions.transform(found.last_hidden_state)[0, :-1].numpy()
    return result


def shift_settings(users: int, mu: float) -> ClipSettings:
    """Return settings of the steps, from public numbers.

    T steps of rate r on everyone, clipped to C, leave noise of standard deviation 2 C r T / (users mu) in every weight.
    Photographs' numbers have length one, and so have words along the directions, in the mean square. So that is the
    noise of a logit, too. The rate keeps it at LOGIT_NOISE, or is FASTEST if that is less.

    Args:
        users: how many there are.
        mu: of the budget, `Budget(epsilon, delta).mu`.
    """
    rate = min(FASTEST, LOGIT_NOISE * users * mu / (2 * CLIP * STEPS))
    return ClipSettings("bank", STEPS, None, clip=CLIP, rate=rate, optimiser="sgd", average=0.5, page=STEPS)


def describe(
    decoder: Any,
    seen: NDArray[Any],
    added: Tensor | None = None,
    longest: int = 20,
    beams: int = 1,
    never: Sequence[int] = (),
    at_a_time: int = 100,
) -> list[list[int]]:
    """Return the tokens of a caption for each photograph, without what begins and ends it: no random numbers.

    Args:
        decoder: frozen.
        seen: what the decoder attends to, (photographs, places, width).
        added: `Shift.of` the photographs' numbers, (photographs, width); None: the decoder as it is.
        longest: the most tokens of a caption.
        beams: how many captions are followed at once.
        never: tokens that are not said, such as the one for words that are not in the list.
        at_a_time: photographs that are computed together.
    """
    config, result = decoder.config, list[list[int]]()
    most = min(longest, int(config.max_position_embeddings) - 1)
    for start in range(0, len(seen), at_a_time):
        some = slice(start, start + at_a_time)
        image = torch.tensor(seen[some], dtype=torch.float32)
        first = torch.full((len(image), 1), int(config.bos_token_id))
        shift = torch.zeros(1) if added is None else added[some].repeat_interleave(beams, dim=0)[:, None]
        with torch.inference_mode(), _add_shift(decoder, shift):
            found = decoder.generate(
                input_ids=first,
                encoder_hidden_states=image,
                max_new_tokens=most,
                num_beams=beams,
                do_sample=False,
                suppress_tokens=list(never) or None,
                bos_token_id=config.bos_token_id,
                eos_token_id=config.sep_token_id,
                pad_token_id=config.pad_token_id,
            )
        result += [_cut_end(row[1:], int(config.sep_token_id)) for row in found.tolist()]
    return result


def _cut_end(ids: list[int], end: int) -> list[int]:
    """Return tokens up to the first one that ends a caption."""
    return ids[: ids.index(end)] if end in ids else ids


@contextmanager
def _add_shift(decoder: Any, shift: Tensor) -> Iterator[None]:
    """Add a shift to every state of a decoder within the block."""
    handle = decoder.cls.predictions.transform.register_forward_hook(lambda layer, inputs, output: output + shift)
    try:
        yield
    finally:
        handle.remove()
