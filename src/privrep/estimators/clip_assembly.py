"""From the config of `privrep fit-clip` to encoders, pairs and a `DPClip`; and back from its folder.

ready = load("clip.toml")  # after privrep fit-clip clip.toml
ready.model.images(ready.image_rows(pixels)) @ ready.model.texts(ready.text_rows(["a photo of a dog."])).T
"""

from __future__ import annotations

import hashlib
import math
import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from safetensors import SafetensorError
from safetensors.numpy import load_file, save_file
from torch import nn

from privrep.errors import InputError
from privrep.estimators.clip import DPClip
from privrep.models.folder import MODEL, ModelFolder
from privrep.models.pairs import PAIRS
from privrep.multimodal.description import SavedPairs
from privrep.multimodal.encoders import (
    MINILM_TOKENS,
    Encoder,
    Projection,
    blank,
    clip_encoders,
    describe_embeddings,
    efficientnet,
    features,
    minilm,
    projected,
)
from privrep.multimodal.modules import Progress
from privrep.multimodal.pairs import TEMPLATES, Pairs, captioned, captions_by_class, labelled, prompts
from privrep.multimodal.sources import Inputs, read_public_texts, read_text_features
from privrep.multimodal.towers import TextSpace
from privrep.nn.feature_cache import load_or_compute
from privrep.schema.clip import PairsConfig
from privrep.typing import Singles

DIM, PIXELS, FLICKR_CAPTIONS = 16, 112, 5
_OF_DESCENT = {"batch", "sampling", "clip", "rate", "optimiser"}  # who says one of these wants a descent by hand
CENTRE = 0.03  # of the budget, where features are centred
TEXT_SPACE = "texts.safetensors"
Modules = tuple[nn.Module, nn.Module]


@dataclass(frozen=True, eq=False)
class Sides:
    """Turn inputs into rows, and make the modules that are trained on them."""

    image_rows: Callable[[NDArray[Any]], Singles]
    text_rows: Callable[[Sequence[str]], Singles] | None  # None where texts come as features
    modules: Callable[[int, Singles, int, nn.Linear | None], Modules]  # numbers of an image, the bank, those of a text


@dataclass(frozen=True, eq=False)
class Prepared:
    """Hold all that a fit takes, and the class of each public text where texts are prompts."""

    model: DPClip
    pairs: Pairs
    sides: Sides
    class_of_text: NDArray[np.int64] | None


@dataclass(frozen=True, eq=False)
class Ready:
    """A trained model, and how images and texts become its rows."""

    model: DPClip
    image_rows: Callable[[NDArray[Any]], Singles]
    text_rows: Callable[[Sequence[str]], Singles] | None


def prepared(asked: PairsConfig, inputs: Inputs, progress: Progress | None = None) -> Prepared:
    """Encode what can be encoded once, and make the model. Costs no privacy and releases nothing."""
    sides = sides_of(asked, side_of(asked, inputs.images), progress)
    bank, classes = _bank(asked, sides)
    image = sides.image_rows(inputs.images)
    if inputs.labels is not None:
        if classes is None:
            raise InputError("the images have labels: name data.classes, or the class of each text in data.bank.")
        pairs = labelled(image, inputs.labels, bank, captions_by_class(classes), inputs.users)
    else:
        assert inputs.captions is not None
        captions = caption_rows(sides, inputs)
        every = image if inputs.image_of is None else image[inputs.image_of]
        pairs = captioned(every, captions, bank if len(bank) else None, inputs.users)
    modules = sides.modules(pairs.image_numbers, pairs.bank, pairs.bank.shape[1], None)
    return Prepared(_model(asked, pairs, modules), pairs, sides, classes)


def caption_rows(sides: Sides, inputs: Inputs) -> Singles:
    """Return captions as rows (captions, text_numbers); raise InputError where there is no encoder of texts."""
    if isinstance(inputs.captions, np.ndarray):
        return np.ascontiguousarray(inputs.captions, np.float32)
    if sides.text_rows is None or inputs.captions is None:
        raise InputError("captions are texts, and there is no encoder of texts; give their features.")
    return sides.text_rows(inputs.captions)


def load(config: str | Path, folder: str | Path | None = None) -> Ready:
    """Return the model that `privrep fit-clip` made of a config. The users' data need not be there any more.

    Args:
        config: the file.
        folder: of the model; by default the config's output.folder.
    """
    asked = PairsConfig.read(Path(config))
    where = Path(folder) if folder is not None else asked.out
    if where is None:
        raise InputError("the config says no output.folder; pass the folder of the model.")
    folder_of = ModelFolder(where)
    found = folder_of.read(PAIRS)
    with folder_of.damage(MODEL):
        layout = SavedPairs(found.described, found.billboard).layout
    sides = sides_of(asked, math.isqrt(layout.image_numbers // 3))
    kept = _kept_texts(where)
    bank = np.zeros(layout.bank.shape, np.float32) if kept is not None or asked.both else _bank(asked, sides)[0]
    modules = sides.modules(layout.image_numbers, bank, layout.bank.shape[1], kept)
    return Ready(DPClip.load(where, *modules), sides.image_rows, sides.text_rows)


def keep_texts(folder: Path, text: nn.Module) -> None:
    """Write the space of texts, made of public texts alone, beside the model: elsewhere it would round otherwise."""
    if isinstance(text, TextSpace):
        arrays = {name: np.ascontiguousarray(value.numpy()) for name, value in text.state_dict().items()}
        save_file(arrays, str(folder / TEXT_SPACE))
        os.chmod(folder / TEXT_SPACE, 0o644)  # made of public texts, as public as the rest of the folder


def _kept_texts(folder: Path) -> nn.Linear | None:
    path = folder / TEXT_SPACE
    if not path.is_file():
        return None
    try:
        arrays = load_file(str(path))
        found = nn.Linear(*reversed(arrays["weight"].shape))
        found.load_state_dict({name: torch.from_numpy(value) for name, value in arrays.items()})
    except (SafetensorError, KeyError, TypeError, RuntimeError) as error:
        raise InputError(f"{path} is damaged ({error}); restore it from a copy.") from None
    return found.requires_grad_(False)


def _bank(asked: PairsConfig, sides: Sides) -> tuple[Singles, NDArray[np.int64] | None]:
    """Return the public texts as rows, and the class of each where they are prompts of classes."""
    data = asked.data
    if data.classes is not None:
        assert sides.text_rows is not None
        words, classes = prompts(data.classes, TEMPLATES if data.templates is None else data.templates)
        return sides.text_rows(words), classes
    if data.bank is None:
        return np.zeros((0, 1), np.float32), None
    if sides.text_rows is None:
        return read_text_features(data.bank)
    return sides.text_rows(read_public_texts(data.bank)), None


def _model(asked: PairsConfig, pairs: Pairs, modules: Modules) -> DPClip:
    """Return the model of a config.

    By default lengths are free and features centred where images of features learn a linear map to fixed texts.
    """
    training = asked.training
    several = FLICKR_CAPTIONS if asked.data.kind == "flickr8k" else 1
    own = {name: value for name, value in training.given().items() if name in ("temperature", "learn_temperature")}
    model = DPClip(
        *modules,
        epsilon=float(asked.privacy.epsilon),
        delta=asked.privacy.delta,
        mechanism=asked.mechanism,
        cosine=asked.cosine,
        centre=float((CENTRE if asked.linear else 0.0) if training.centre is None else training.centre),
        pairs_per_user=several if asked.data.pairs_per_user is None else asked.data.pairs_per_user,
        random_state=asked.privacy.seed,
        population=asked.privacy.population,
        **own,
    )
    given = training.given("mechanism", "temperature", "learn_temperature", "cosine", "centre")
    if given.get("batch") == 0:
        given["batch"] = None
    by_hand = {name for name, value in given.items() if value is not None} & _OF_DESCENT
    model.settings = replace(model.settings_of(replace(pairs, classes=None) if by_hand else pairs), **given)
    return model


def side_of(asked: PairsConfig, images: NDArray[Any]) -> int:
    """Return the side of images in rows: small square images keep theirs, others are resized for the network."""
    size = PIXELS if asked.encoders.size is None else asked.encoders.size
    square = images.ndim > 2 and images.shape[1] == images.shape[2] <= size
    return int(images.shape[1]) if square else size


def sides_of(asked: PairsConfig, side: int, progress: Progress | None = None) -> Sides:
    """Return the encoders of a config. Frozen networks make features once, kept if there is a cache."""
    cache = asked.encoders.cache

    def once(encoder: Encoder, inputs: Any) -> Singles:
        if cache is None:
            return features(encoder, inputs, progress)
        of = describe_embeddings(encoder, inputs)
        name = hashlib.sha256(of.encode()).hexdigest()[:16]
        return load_or_compute(cache / f"{name}.npz", of, lambda: features(encoder, inputs, progress))

    return _wheels(asked, side, once) if asked.pretrained is None else _pretrained(asked, asked.pretrained, once)


Once = Callable[[Encoder, Any], Singles]


def _wheels(asked: PairsConfig, side: int, once: Once) -> Sides:
    """Return EfficientNet and MiniLM, or features that are there already."""
    encoders, data = asked.encoders, asked.data
    size = PIXELS if encoders.size is None else encoders.size
    tokens = MINILM_TOKENS if encoders.tokens is None else encoders.tokens
    as_features, whole = asked.data.kind == "features", asked.train != "projections"
    words = not as_features or data.classes is not None or (data.bank is not None and data.bank.suffix == ".txt")
    texts = minilm(asked.train if whole and asked.both else "nothing", tokens) if words else None
    network = None if as_features else efficientnet(asked.train if whole else "nothing", size, side)

    def image_rows(images: NDArray[Any]) -> Singles:
        if network is None:
            return np.ascontiguousarray(images, np.float32)
        if whole:
            return network.prepare(images)
        own = side_of(asked, images)
        return once(network if own == side else efficientnet("nothing", size, own), images)

    def text_rows(some: Sequence[str]) -> Singles:
        assert texts is not None
        return texts.prepare(list(some)) if whole and asked.both else once(texts, list(some))

    def modules(numbers: int, bank: Singles, text_numbers: int, kept: nn.Linear | None) -> Modules:
        named = len(asked.data.classes or ())
        dim = max(DIM, 2 * named) if encoders.dim is None else encoders.dim
        text: nn.Module
        if not asked.both:
            if kept is None and len(bank) < 2:
                raise InputError('there are no public texts: name data.bank, or say encoders.learn = "both".')
            space = kept if kept is not None else TextSpace(bank, dim)
            text, dim = space, space.out_features
        elif whole:
            assert texts is not None
            text = projected(texts, dim, seed=2).module
        else:
            text = Projection(text_numbers, dim, seed=2)
        if whole and network:
            return projected(network, dim, seed=1).module, text
        free = asked.linear and not asked.cosine
        return blank(numbers, dim) if free else Projection(numbers, dim, seed=1), text

    return Sides(image_rows, text_rows if words else None, modules)


def _pretrained(asked: PairsConfig, name: str, once: Once) -> Sides:
    """Return both encoders of a CLIP model. Where projections alone learn, rows are what comes before them."""
    image, text = clip_encoders(name, asked.train)
    if not asked.both:
        text.module.requires_grad_(False)
    if asked.train != "projections":
        return Sides(image.prepare, lambda some: text.prepare(list(some)), lambda *_: (image.module, text.module))
    heads, bodies = [], []
    for encoder in (image, text):
        head: Any = encoder.module.projection
        encoder.module.projection = nn.Identity()
        heads.append(head)
        bodies.append(replace(encoder, dim=int(head.in_features), name=f"{encoder.name} before the projection"))
    return Sides(
        lambda images: once(bodies[0], images),
        lambda some: once(bodies[1], list(some)),
        lambda *_: (heads[0], heads[1]),
    )
