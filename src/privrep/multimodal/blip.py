"""DP-BLIP: the two encoders of BLIP's contrastive loss for private training, and generation with the trained weights.

Private training is the same as for any two encoders (`DPClip`). Before it public weights are loaded; after it the
trained weights are put beside a public decoder, which generates. Both are functions of public numbers and of what
training released: they cost no budget. The images and questions that are asked about are seen by whoever gets the
answers.

Weights come by their name on the Hugging Face hub or from a local folder, as safetensors alone. What a checkpoint lacks
is an error, never made up.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import groupby
from pathlib import Path
from typing import Any, Literal

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from privrep.errors import InputError
from privrep.multimodal.encoders import Encoder, _import_transformers, load_pretrained
from privrep.multimodal.modules import Processed, Tokens, check_images, make_additive_mask, read_tokens, to_colour

Train = Literal["nothing", "projections", "last", "all"]
Task = Literal["contrast", "caption", "answer"]
Images = NDArray[np.uint8]  # (n, height, width, 3), or in grey (n, height, width)
TOKENS = 32
_FURTHEST = 16.0  # pixels are scaled to about -2 to 3; what lies beyond this is no picture
_CLASSES: dict[Task, str] = {
    "contrast": "BlipForImageTextRetrieval",
    "caption": "BlipForConditionalGeneration",
    "answer": "BlipForQuestionAnswering",
}


class ImageTower(nn.Module):
    """A module from rows (r, 3 * side * side) of scaled pixels to (r, dim), not normalised; any number is accepted."""

    def __init__(self, vision_model: nn.Module, vision_proj: nn.Module, side: int):
        super().__init__()
        self.vision_model, self.vision_proj, self.side = vision_model, vision_proj, side

    def forward(self, rows: Tensor) -> Tensor:
        """Return embeddings (r, dim) of rows of pixels."""
        pixels = torch.nan_to_num(rows).clamp(-_FURTHEST, _FURTHEST).reshape(len(rows), 3, self.side, self.side)
        result: Tensor = self.vision_proj(self.vision_model(pixel_values=pixels).last_hidden_state[:, 0])
        return result


class TextTower(nn.Module):
    """A module from rows (r, 2 * tokens), ids and then their mask, to (r, dim), not normalised; any number goes."""

    def __init__(self, text_encoder: nn.Module, text_proj: nn.Module, tokens: int, words: int):
        super().__init__()
        self.text_encoder, self.text_proj, self.tokens, self.words = text_encoder, text_proj, tokens, words

    def forward(self, rows: Tensor) -> Tensor:
        """Return embeddings (r, dim) of rows of tokens."""
        ids, there = read_tokens(rows, self.tokens, self.words)
        mask = make_additive_mask(there[:, None, None, :].expand(-1, 1, self.tokens, -1))
        found = self.text_encoder(input_ids=ids, attention_mask=mask).last_hidden_state
        result: Tensor = self.text_proj(found[:, 0])
        return result


def blip_encoders(
    name_or_folder: str | Path, train: Train = "projections", tokens: int = TOKENS
) -> tuple[Encoder, Encoder]:
    """Return the image and the text encoder of BLIP's contrastive loss, of BlipForImageTextRetrieval.

    Trainable are the two projections; or these and the last block of both towers; or all that the loss passes through.
    The cross-attention and the matching head are no part of it. Dropout is off, always. With "projections" a generator
    gains nothing from training: it sees images through the tower, not the projection.

    Formal guarantee: an embedding is a function of its own row and of the weights alone.

    Args:
        name_or_folder: a name on the hub, or a local folder.
        train: "nothing", "projections", "last" or "all".
        tokens: how many tokens of a text are read.
    """
    model, processor = _load_blip(name_or_folder, "contrast")
    side, words = int(model.config.vision_config.image_size), int(model.config.text_config.vocab_size)
    longest = int(model.config.text_config.max_position_embeddings)
    if not 2 <= tokens <= longest:
        raise InputError(f"tokens must lie between 2 and {longest}, what this BLIP can read. Got {tokens} instead.")
    if len(processor.tokenizer) > words:
        raise InputError(f"the tokenizer of {name_or_folder} knows more words than its BLIP; they are of two models.")
    image = ImageTower(model.vision_model, model.vision_proj, side)
    text = TextTower(model.text_encoder, model.text_proj, tokens, words)
    _set_trainable(image, model.vision_model.encoder.layers[-1], train)
    _set_trainable(text, model.text_encoder.encoder.layer[-1], train)
    dim, name = int(model.config.image_text_hidden_size), f"BLIP {Path(name_or_folder).name}"

    def tokenise(texts: list[str]) -> tuple[Any, Any]:
        """Return ids and mask of each text, cut or padded to the encoder's number of tokens."""
        cut = processor.tokenizer(texts, padding="max_length", truncation=True, max_length=tokens)
        return cut["input_ids"], cut["attention_mask"]

    pixels = Processed(processor.image_processor, (3, side, side))
    return (
        Encoder(image.eval(), 3 * side * side, dim, pixels, f"{name}, images"),
        Encoder(text.eval(), 2 * tokens, dim, Tokens(tokenise, tokens), f"{name}, texts"),
    )


def with_encoders(
    image: Encoder | nn.Module, generator: str | Path, task: Task = "caption", text: Encoder | nn.Module | None = None
) -> tuple[Any, Any]:
    """Return a BLIP for the task with these trained weights in it, and its processor.

    For captions the image tower is put in. For answers the text tower is put in, too, if it is given, but for its
    cross-attention. For "contrast" both go in with their projections, so that `save` keeps them as BLIP's own.

    Args:
        image: the trained image encoder of `blip_encoders`.
        generator: a name on the hub, or a local folder, of a BLIP for the task.
        task: "contrast", "caption" or "answer".
        text: the trained text encoder of `blip_encoders`, if it is wanted.
    """
    model, processor = _load_blip(generator, task)
    towers = [_unwrap(image), *([_unwrap(text)] if text is not None and task != "caption" else [])]
    for tower, kind in zip(towers, (ImageTower, TextTower), strict=False):
        if not isinstance(tower, kind):
            raise InputError(f"give the {kind.__name__} of blip_encoders, trained. Got {type(tower).__name__} instead.")
    there = model.state_dict()
    carried = {
        name: value
        for tower in towers
        for name, value in tower.state_dict().items()
        if (task == "contrast" or "_proj." not in name) and ".crossattention." not in name
    }
    for name, value in carried.items():
        if name not in there or there[name].shape != value.shape:
            sizes = f"{tuple(value.shape)} against {tuple(there[name].shape)}" if name in there else "not there"
            raise InputError(f"the BLIP in {generator} has another size ({name}: {sizes}); give one of the same.")
    model.load_state_dict(carried, strict=False)
    return model.eval(), processor


def caption(
    model: Any, processor: Any, images: Images, longest: int = 20, beams: int = 1, at_a_time: int = 16
) -> list[str]:
    """Return a caption for each image; no random numbers are drawn.

    Args:
        model: a BLIP for captions.
        processor: its processor.
        images: (n, height, width, 3), or in grey (n, height, width).
        longest: the most tokens of a caption.
        beams: how many captions are followed at once; 1 takes the likeliest word each time.
        at_a_time: images that are computed together.
    """
    seen = to_colour(check_images(images))
    result: list[str] = []
    for some in _cut_batches(len(seen), at_a_time):
        pixels = processor(images=list(seen[some]), return_tensors="pt")["pixel_values"]
        result += _generate(model, processor, longest, beams, pixel_values=pixels)
    return result


def answer(
    model: Any,
    processor: Any,
    images: Images,
    questions: Sequence[str],
    longest: int = 10,
    beams: int = 1,
    at_a_time: int = 16,
) -> list[str]:
    """Return an answer to each question about its image.

    Questions of equally many tokens go together, without padding. Transformers' BLIP lets the decoder read the padding
    of a question, so the answer to one would depend on the length of another.

    Args:
        model: a BLIP for answers.
        processor: its processor.
        images: (n, height, width, 3), or in grey (n, height, width).
        questions: one for each image.
        longest: the most tokens of an answer.
        beams: how many answers are followed at once.
        at_a_time: questions that are computed together.
    """
    seen = to_colour(check_images(images))
    if isinstance(questions, str) or len(questions) != len(seen):
        raise InputError(f"give one question for each image. Got {len(questions)} for {len(images)} images instead.")
    most = int(model.config.text_config.max_position_embeddings)
    ids = [processor.tokenizer(text, truncation=True, max_length=most)["input_ids"] for text in questions]
    result = [""] * len(ids)
    for _, same in groupby(sorted(range(len(ids)), key=lambda n: (len(ids[n]), n)), key=lambda n: len(ids[n])):
        places = list(same)
        for some in _cut_batches(len(places), at_a_time):
            chosen = places[some]
            pixels = processor(images=[seen[n] for n in chosen], return_tensors="pt")["pixel_values"]
            asked = torch.tensor([ids[n] for n in chosen])
            found = _generate(
                model, processor, longest, beams, pixel_values=pixels, input_ids=asked, attention_mask=asked >= 0
            )
            for place, said in zip(chosen, found, strict=True):
                result[place] = said
    return result


def save(folder: str | Path, model: Any, processor: Any) -> None:
    """Write weights as safetensors, settings and vocabulary as JSON: a folder that all functions here can load.

    Args:
        folder: where to write.
        model: the BLIP.
        processor: its processor.
    """
    model.save_pretrained(str(folder))
    processor.save_pretrained(str(folder))


def _generate(model: Any, processor: Any, longest: int, beams: int, **inputs: Tensor) -> list[str]:
    """Return one text for each row of the inputs, without random numbers.

    Args:
        model: a BLIP.
        processor: its processor.
        longest: the most tokens of a text.
        beams: how many texts are followed at once.
        inputs: what the model's `generate` takes, a row for each text.
    """
    most = int(model.config.text_config.max_position_embeddings) - 1  # one place is the first token's
    with torch.inference_mode():
        ids = model.generate(**inputs, max_new_tokens=min(longest, most), do_sample=False, num_beams=beams)
    return [" ".join(text.split()) for text in processor.batch_decode(ids, skip_special_tokens=True)]


def _set_trainable(tower: nn.Module, block: nn.Module, train: Train) -> None:
    """Mark the weights of a tower that are trained; raise InputError for an unknown choice.

    Args:
        tower: the image or the text tower.
        block: its last block.
        train: "nothing", "projections", "last" or "all".
    """
    if train not in ("nothing", "projections", "last", "all"):
        raise InputError(f"train must be nothing, projections, last or all. Got {train!r} instead.")
    last = {id(parameter) for parameter in block.parameters()}
    for name, parameter in tower.named_parameters():
        chosen = {
            "nothing": False,
            "projections": "_proj." in name,
            "last": "_proj." in name or "post_layernorm." in name or id(parameter) in last,
            "all": True,
        }[train]
        parameter.requires_grad_(chosen and ".crossattention." not in name)


def _cut_batches(count: int, each: int) -> Iterator[slice]:
    """Return slices of at most `each` rows that cover `count` rows."""
    return (slice(start, start + each) for start in range(0, count, each))


def _unwrap(encoder: Encoder | nn.Module) -> nn.Module:
    """Return the module of an encoder, or the module itself."""
    return encoder.module if isinstance(encoder, Encoder) else encoder


def _load_blip(name_or_folder: str | Path, task: Task) -> tuple[Any, Any]:
    """Return the model for the task and its processor."""
    if task not in _CLASSES:
        raise InputError(f"task must be contrast, caption or answer. Got {task!r} instead.")
    transformers = _import_transformers()
    model = load_pretrained(getattr(transformers, _CLASSES[task]), name_or_folder)
    return model, load_pretrained(transformers.BlipProcessor, name_or_folder)
