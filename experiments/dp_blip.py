"""DP-BLIP the whole way on Flickr8k: encoders, private contrastive training, generator, scores of its captions.

    python -m experiments.dp_blip [--images 200] [--epsilon 3] [--steps 40] [--public-steps 200] [--no-meteor]

There are no pretrained BLIP weights on this machine, so a tiny BLIP takes their place: random weights, then some steps
of ordinary training on the public part of the images, from whose captions alone its vocabulary is made, too. Its
figures are about whether the parts fit together, not about quality. The unit of privacy is an image with its five
captions; noise is simulated from a seed, so that runs can be repeated and are not private. With real weights:
`--blip` and `--generator` are folders or names of a BlipForImageTextRetrieval and a BlipForConditionalGeneration.
Figures about quality, of a captioner that says something, are those of `experiments.dp_blip_captions`.
"""

from __future__ import annotations

import argparse
import tempfile
from collections import Counter
from collections.abc import Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from transformers import (
    BertTokenizer,
    BlipConfig,
    BlipForConditionalGeneration,
    BlipForImageTextRetrieval,
    BlipForQuestionAnswering,
    BlipProcessor,
)
from transformers.models.blip.image_processing_pil_blip import BlipImageProcessorPil

from privrep.estimators.clip import DPClip
from privrep.multimodal.blip import blip_encoders, caption, save, with_encoders
from privrep.multimodal.captions import CaptionScores, caption_scores
from privrep.multimodal.encoders import Encoder
from privrep.multimodal.pairs import CaptionedImages, Pairs, captioned, read_flickr8k, split_by_image
from privrep.multimodal.training import ClipSettings
from privrep.nn.threads import one_thread

FLICKR8K = Path(__file__).parents[2] / "shared" / "data" / "flickr8k"
SPECIAL = ("[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", "[DEC]")
TOKENS, CAPTIONS, SEED = 24, 5, 6


@dataclass(frozen=True)
class Tiny:
    """Sizes of a BLIP that a test can afford."""

    side: int = 32
    width: int = 32
    layers: int = 2
    dim: int = 16
    words: int = 1_000  # the most frequent ones


TINY = Tiny()


@dataclass(frozen=True)
class Folders:
    """A BLIP for the contrastive loss, and generators that see images through the same tower."""

    contrast: Path
    caption: Path
    answer: Path


def vocabulary(captions: Sequence[str], most: int) -> dict[str, int]:
    """A WordPiece vocabulary of the most frequent words of these captions, which are public."""
    words = Counter(word for text in captions for word in text.lower().split() if word.isalpha())
    kept = sorted(words, key=lambda word: (-words[word], word))[:most]
    return {word: number for number, word in enumerate((*SPECIAL, *kept))}


def tiny_blip(folder: Path, captions: Sequence[str], tiny: Tiny = TINY, seed: int = SEED) -> Folders:
    """Three models of random weights with one image tower and one processor, each in a folder of its own."""
    numbers = vocabulary(captions, tiny.words)
    # A copy: the tokenizer keeps the one it gets.
    tokenizer = BertTokenizer(vocab=dict(numbers), bos_token="[DEC]", model_max_length=TOKENS)
    images = BlipImageProcessorPil(size={"height": tiny.side, "width": tiny.side})
    processor = BlipProcessor(images, tokenizer)
    both = {"hidden_size": tiny.width, "intermediate_size": 2 * tiny.width, "num_hidden_layers": tiny.layers}
    both |= {"num_attention_heads": 2, "initializer_range": 0.1}
    ends = {"bos_token_id": numbers["[DEC]"], "eos_token_id": numbers["[SEP]"], "sep_token_id": numbers["[SEP]"]}
    text = {**both, **ends, "vocab_size": len(numbers), "max_position_embeddings": TOKENS, "pad_token_id": 0}
    vision = {**both, "image_size": tiny.side, "patch_size": 8}
    config = BlipConfig(text_config=text, vision_config=vision, image_text_hidden_size=tiny.dim)
    folders = Folders(folder / "contrast", folder / "caption", folder / "answer")
    kinds = (BlipForImageTextRetrieval, BlipForConditionalGeneration, BlipForQuestionAnswering)
    tower: dict[str, Any] | None = None
    for path, kind in zip((folders.contrast, folders.caption, folders.answer), kinds, strict=True):
        with torch.random.fork_rng():
            torch.manual_seed(seed)
            model = kind(config).eval()
        tower = tower or model.vision_model.state_dict()
        model.vision_model.load_state_dict(tower)
        save(path, model, processor)
    return folders


def learn_publicly(folders: Folders, public: CaptionedImages, steps: int, batch: int = 32) -> None:
    """Teach the captioner on public images, and give what its tower learned to the contrastive model. Not private."""
    model = BlipForConditionalGeneration.from_pretrained(folders.caption)
    processor = BlipProcessor.from_pretrained(folders.caption)
    pixels = processor(images=list(public.pixels), return_tensors="pt")["pixel_values"]
    texts, image_of = public.flat()
    cut = processor.tokenizer(texts, padding="max_length", truncation=True, max_length=TOKENS, return_tensors="pt")
    ids, shown = cut["input_ids"], cut["attention_mask"]
    ids[:, 0] = model.config.text_config.bos_token_id
    rng, optimiser = np.random.default_rng(SEED), torch.optim.AdamW(model.parameters(), lr=2e-3)
    model.train()
    for _ in range(steps):
        some = torch.from_numpy(rng.integers(0, len(texts), batch))
        labels = ids[some].masked_fill(shown[some] == 0, -100)
        seen = pixels[torch.from_numpy(image_of)[some]]
        loss = model(pixel_values=seen, input_ids=ids[some], attention_mask=shown[some], labels=labels).loss
        optimiser.zero_grad()
        loss.backward()
        optimiser.step()
    save(folders.caption, model.eval(), processor)
    contrast = BlipForImageTextRetrieval.from_pretrained(folders.contrast)
    contrast.vision_model.load_state_dict(model.vision_model.state_dict())
    save(folders.contrast, contrast.eval(), processor)


def pairs_of(image: Encoder, text: Encoder, private: CaptionedImages, public: CaptionedImages) -> Pairs:
    """The private images with their captions, a user being an image; the bank has a caption of each public image."""
    texts, image_of = private.flat()
    bank = text.prepare([captions[0] for captions in public.captions])
    users = [private.ids[place] for place in image_of]
    return captioned(image.prepare(private.pixels)[image_of], text.prepare(texts), bank, users)


def train_privately(image: Encoder, text: Encoder, pairs: Pairs, epsilon: float, steps: int) -> DPClip:
    """Both encoders after private contrastive training on these pairs: the weights are in their modules then.

    A user is an image, of which up to five captions take part. The bank is of public captions.
    """
    settings = ClipSettings("bank", steps, batch=max(pairs.table.n_users // 4, 2), rate=3e-3)
    model = DPClip(image, text, epsilon=epsilon, settings=settings, pairs_per_user=CAPTIONS, random_state=SEED).fit(
        pairs
    )
    model.trained()
    return model


@dataclass(frozen=True)
class Outcome:
    """Captions of images that nobody trained on, before and after the private training."""

    before: CaptionScores
    after: CaptionScores
    privacy: str
    examples: list[tuple[str, str, str]]  # a reference, the caption before, the caption after


def measured(blip: str | Path, generator: str | Path, parts: Sequence[CaptionedImages], options: Any) -> Outcome:
    public, private, test = parts
    image, text = blip_encoders(blip, train="last", tokens=TOKENS)
    references = dict(zip(test.ids, test.captions, strict=True))

    def captions(tower: Encoder) -> dict[str, str]:
        return dict(zip(test.ids, caption(*with_encoders(tower, generator), test.pixels), strict=True))

    before = captions(image)
    model = train_privately(image, text, pairs_of(image, text, private, public), options.epsilon, options.steps)
    after = captions(image)
    scores = [caption_scores(references, said, meteor=options.meteor) for said in (before, after)]
    examples = [(references[name][0], before[name], after[name]) for name in test.ids[:3]]
    return Outcome(scores[0], scores[1], str(model.privacy_), examples)


def arguments_of(given: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--images", type=int, default=200, help="half are public, a fifth for measuring")
    parser.add_argument("--epsilon", type=float, default=3.0)
    parser.add_argument("--steps", type=int, default=40, help="of private training")
    parser.add_argument("--public-steps", type=int, default=200)
    parser.add_argument("--no-meteor", dest="meteor", action="store_false", help="saves its ten seconds' start, twice")
    parser.add_argument("--data", type=Path, default=FLICKR8K)
    parser.add_argument("--blip", help="folder or name of a BlipForImageTextRetrieval, instead of the tiny one")
    parser.add_argument("--generator", help="folder or name of a BlipForConditionalGeneration of the same size")
    options = parser.parse_args(given)
    if bool(options.blip) != bool(options.generator):
        parser.error("give both --blip and --generator, of one size, or neither")
    return options


def main(given: list[str] | None = None) -> None:
    options = arguments_of(given)
    data = read_flickr8k(options.data, options.images)
    sizes = (len(data) // 2, len(data) - len(data) // 2 - len(data) // 5, len(data) // 5)
    public, private, test = split_by_image(data, sizes, SEED)
    print(f"{len(public)} public images, {len(private)} private ones with five captions each, {len(test)} to measure")
    threads = nullcontext() if options.blip else one_thread()  # tiny products are slower on several
    with tempfile.TemporaryDirectory() as folder, threads:
        blip, generator = options.blip, options.generator
        if not blip:
            print("a tiny BLIP of random weights: its figures say that the parts fit together, nothing about quality")
            folders = tiny_blip(Path(folder), public.flat()[0])
            learn_publicly(folders, public, options.public_steps)
            blip, generator = folders.contrast, folders.caption
        outcome = measured(blip, generator, (public, private, test), options)
    print(f"{outcome.privacy}\nbefore: {outcome.before}")
    print(f"after private training at epsilon {options.epsilon:g}: {outcome.after}")
    for reference, before, after in outcome.examples:
        print(f"  people: {reference}\n  before: {before}\n  after:  {after}")


if __name__ == "__main__":
    main()
