"""DP-BLIP's captions of Flickr8k before and after private learning, at several budgets, and how many users they take.

    python -m experiments.dp_blip_captions --splits dogs [--private 1273] [--epsilons 1 3 10] [--seeds 3]
    python -m experiments.dp_blip_captions --splits plain --public 1000 [--methods public private "no noise" all]

A captioner is taught on public photographs (`experiments.dp_blip_captioner`), then stays as it is. Private users, each
a photograph with its captions, teach what is added to its states (`privrep.multimodal.words`), under the budget. The
splits are in `experiments.dp_blip_data`: "plain" is random, in "dogs" no public caption speaks of a dog. Noise is
simulated from a seed, so that runs can be repeated and are not private. Rows that stand in the CSV are not run again.

Methods: `public`, the captioner as it is; `private`; `no noise`, the same steps at a budget beyond all use; `all`, the
whole decoder taught further on public and private photographs without privacy, by the captions that users teach with.
"""

from __future__ import annotations

import argparse
import csv
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass, fields, replace
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import nn
from transformers.models.blip.modeling_blip_text import BlipTextLMHeadModel

from experiments.dp_blip_captioner import BEGIN, PAD, UNKNOWN, Lessons, Lexicon, Teaching, begin, lexicon_of, teach
from experiments.dp_blip_data import DOGS, PETS, VISIBLE, Lens, Parts, Seen, SplitName, flickr_seen, lens_of, parts_of
from experiments.dp_clip_data import Sources
from privrep.estimators.clip import DPClip
from privrep.multimodal.captions import caption_scores
from privrep.multimodal.pairs import Pairs
from privrep.multimodal.words import Captions, Shift, describe, shift_settings, word_bank, word_pairs
from privrep.privacy.ledger import Budget

RESULTS = Path(__file__).parent / "results" / "dp_blip.csv"
LAYERS, LEAST, NUMBERS, RANK = 2, 5, 64, 64
CAPTIONS, WORDS = 1, 13  # captions of a user that take part, and words of them
NO_NOISE = 1e5  # an epsilon at which noise is nothing
TEACHING, CEILING_EPOCHS = Teaching(), 3
Made = tuple[BlipTextLMHeadModel, Shift | None]
NEVER = (PAD, UNKNOWN, BEGIN)  # tokens that no caption has
METHODS = ("public", "private", "no noise", "all")


@dataclass(frozen=True)
class Row:
    """A line of the results."""

    split: str
    public: int
    private: int
    method: str
    epsilon: float
    seed: int
    weights: int  # of the shift; 0 where there is none
    cider: float
    cider_dogs: float  # of tested photographs of dogs
    bleu_4: float
    rouge_l: float
    seconds: float

    @property
    def key(self) -> tuple[Any, ...]:
        return (self.split, self.public, self.private, self.method, self.epsilon, self.seed)


def rows_at(path: Path) -> list[Row]:
    """Return the lines that stand in a file."""
    if not path.exists():
        return []
    kinds = {field.name: {"str": str, "int": int, "float": float}[str(field.type)] for field in fields(Row)}
    with open(path, newline="") as file:
        return [Row(**{name: kinds[name](value) for name, value in line.items()}) for line in csv.DictReader(file)]


def add_row(path: Path, row: Row) -> None:
    """Write one more line."""
    new = not path.exists()
    with open(path, "a", newline="") as file:
        writer = csv.DictWriter(file, [field.name for field in fields(Row)], lineterminator="\n")
        if new:
            writer.writeheader()
        writer.writerow(asdict(row))


@dataclass(frozen=True, eq=False)
class Setting:
    """A split with its captioner, and what all methods share."""

    name: SplitName
    parts: Parts
    folder: Path  # where the captioner is kept
    most_words: int = WORDS

    @cached_property
    def lexicon(self) -> Lexicon:
        return lexicon_of([text for some in self.parts.public.captions for text in some], LEAST, PETS)

    @cached_property
    def lens(self) -> Lens:
        return lens_of(self.parts.public, NUMBERS)

    def lessons(self, part: Seen, most: int | None = None) -> Lessons:
        """Return photographs with captions, the first `most` of each."""
        ids, photograph = self.captions(part, most)
        seen = torch.from_numpy(self.lens.seen(part.places))
        return Lessons(seen, torch.from_numpy(ids), torch.from_numpy(photograph))

    def captions(self, part: Seen, most: int | None) -> tuple[Any, Any]:
        """Return ids and photographs of captions, the first `most` of each photograph."""
        texts = [list(some[:most]) for some in part.captions]
        ids = self.lexicon.ids([text for some in texts for text in some])
        return ids, np.repeat(np.arange(len(texts)), [len(some) for some in texts])

    @cached_property
    def halves(self) -> tuple[Seen, Seen]:
        """Public photographs to teach with, and a tenth to stop by."""
        count = len(self.parts.public)
        kept = count - count // 10
        return self.parts.public.take(np.arange(kept)), self.parts.public.take(np.arange(kept, count))

    @cached_property
    def captioner(self) -> BlipTextLMHeadModel:
        """Return the captioner of the public photographs, taught unless it was before."""
        if not (self.folder / "config.json").exists():
            model = begin(self.lexicon, VISIBLE, LAYERS, seed=0)
            teach(model, *(self.lessons(half) for half in self.halves), TEACHING)
            model.save_pretrained(self.folder)
        return BlipTextLMHeadModel.from_pretrained(self.folder).eval()

    @cached_property
    def pairs(self) -> Pairs:
        """Return the words of private users."""
        part = self.parts.private
        captions = Captions(*self.captions(part, CAPTIONS), PAD)
        return word_pairs(self.captioner, self.lens.seen(part.places), self.lens.numbers(part.places), captions)

    def shift(self) -> Shift:
        """Return a shift of zeros."""
        bank = word_bank(self.captioner)
        return Shift(bank, bank.directions(RANK), NUMBERS + 1)

    def scored(self, model: BlipTextLMHeadModel, shift: Shift | None) -> dict[str, float]:
        """Return the scores of captions of the tested photographs. Not private."""
        part = self.parts.tested
        added = None if shift is None else shift.of(self.lens.numbers(part.places))
        found = describe(model, self.lens.seen(part.places), added, longest=16, never=NEVER)
        said = dict(zip(part.ids, map(self.lexicon.text, found), strict=True))
        truth = dict(zip(part.ids, part.captions, strict=True))
        dogs = [name for name in truth if any(DOGS.search(text) for text in truth[name])]
        whole = caption_scores(truth, said, meteor=False)
        some = caption_scores({name: truth[name] for name in dogs}, {name: said[name] for name in dogs}, meteor=False)
        scores = {"cider": whole.cider, "cider_dogs": some.cider, "bleu_4": whole.bleu[3], "rouge_l": whole.rouge_l}
        return {name: round(value, 4) for name, value in scores.items()}


def setting_of(seen: Seen, name: SplitName, public: int, private: int | None) -> Setting:
    """Return a split, with its captioner in the cache."""
    return Setting(name, parts_of(seen, name, public, private), Sources().cache / f"{name}_{public}")


def learn_privately(setting: Setting, epsilon: float, seed: int) -> tuple[Shift, DPClip]:
    """Return the shift that private users taught, and how."""
    pairs, shift = setting.pairs, setting.shift()
    users = pairs.table.n_users
    settings = shift_settings(users, Budget(epsilon, 1 / (2 * users)).mu)
    model = DPClip(
        shift,
        nn.Identity(),
        epsilon=epsilon,
        temperature=1.0,
        cosine=False,
        settings=settings,
        pairs_per_user=setting.most_words,
        random_state=seed,
    ).fit(pairs)
    model.trained()
    return shift, model


def learn_all(setting: Setting) -> BlipTextLMHeadModel:
    """Return the captioner, all weights taught further on public and private photographs without privacy: a ceiling.

    Of each photograph those captions take part that do with private users.
    """
    public, private = setting.parts.public, setting.parts.private
    whole = Seen(np.concatenate([public.places, private.places]), public.captions + private.captions, ())
    lessons = setting.lessons(whole, CAPTIONS)
    held = lessons.photograph % 10 == 0
    model = BlipTextLMHeadModel.from_pretrained(setting.folder)
    model.bert.embeddings.word_embeddings.weight.requires_grad_(False)
    kept, left = (Lessons(lessons.seen, lessons.ids[some], lessons.photograph[some]) for some in (~held, held))
    teach(model, kept, left, replace(TEACHING, epochs=CEILING_EPOCHS))
    return model


def run(setting: Setting, done: set[tuple[Any, ...]], options: argparse.Namespace) -> None:
    """Add the lines of a split that are not there yet."""
    sizes = (setting.name, len(setting.parts.public), len(setting.parts.private))

    def line(method: str, epsilon: float, seed: int, make: Callable[[], Made]) -> None:
        if (*sizes, method, epsilon, seed) in done or method not in options.methods:
            return
        start = time.monotonic()
        model, shift = make()
        weights = 0 if shift is None else shift.map.weight.numel()
        scores, seconds = setting.scored(model, shift), round(time.monotonic() - start, 1)
        row = Row(*sizes, method, epsilon, seed, weights, **scores, seconds=seconds)
        add_row(options.results, row)
        print(row, flush=True)

    line("public", 0.0, 0, lambda: (setting.captioner, None))
    line("no noise", NO_NOISE, 0, lambda: (setting.captioner, learn_privately(setting, NO_NOISE, 0)[0]))
    for seed in range(options.seeds):
        for epsilon in options.epsilons:
            made = lambda e=epsilon, s=seed: (setting.captioner, learn_privately(setting, e, s)[0])  # noqa: E731
            line("private", epsilon, seed, made)
    line("all", float("inf"), 0, lambda: (learn_all(setting), None))


def main(given: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--splits", nargs="+", choices=("plain", "dogs"), default=["dogs", "plain"])
    parser.add_argument("--public", nargs="+", type=int, default=[2_000])
    parser.add_argument("--private", nargs="+", type=int, default=[None], help="at most so many private users")
    parser.add_argument("--epsilons", nargs="*", type=float, default=[1.0, 3.0, 10.0])
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--methods", nargs="+", choices=METHODS, default=METHODS)
    parser.add_argument("--results", type=Path, default=RESULTS)
    options = parser.parse_args(given)
    torch.set_num_threads(1)
    seen = flickr_seen(Sources())
    for name in options.splits:
        for public in options.public:
            for private in options.private:
                setting = setting_of(seen, name, public, private)
                run(setting, {row.key for row in rows_at(options.results)}, options)


if __name__ == "__main__":
    main()
