"""Reading what the config of `privrep fit-clip` names: images or features of them, labels or captions, users."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from privrep.data import images as readers
from privrep.errors import InputError
from privrep.multimodal.pairs import CaptionedImages, read_flickr8k, split_by_image
from privrep.schema.clip import (
    ArchivePairs,
    CifarPairs,
    FeaturePairs,
    FlickrPairs,
    FolderPairs,
    IdxPairs,
    PairSource,
    ParquetPairs,
)
from privrep.typing import Singles

HELD_OUT_SEED = 0  # public: it draws held-out images of Flickr8k, by their names


@dataclass(frozen=True, eq=False)
class Inputs:
    """Pairs before they are encoded. Without `image_of` each image is in one pair."""

    images: NDArray[Any]  # uint8 pixels (images, height, width[, 3]) or features (images, numbers)
    labels: NDArray[np.int64] | None = None
    captions: list[str] | Singles | None = None
    image_of: NDArray[np.int64] | None = None  # the image of each caption
    users: NDArray[Any] | None = None


def read_inputs(data: PairSource) -> tuple[Inputs, Inputs | None]:
    """Return the users' pairs, and the pairs to measure with, if the config names some."""
    if isinstance(data, FlickrPairs):
        found = read_flickr8k(data.path, data.most)
        held = 0 if data.test is None or data.test.held_out is None else data.test.held_out
        parts = split_by_image(found, [max(len(found) - held, 0), held], HELD_OUT_SEED)
        return _make_inputs(parts[0]), _make_inputs(parts[1]) if held else None
    train = _add_users(_read(data), data)
    if data.test is None:
        return train, None
    return train, _read(data.model_copy(update={**data.test.given(), "unit": "pair"}))


def read_public_texts(bank: Path) -> list[str]:
    """Return the captions of a text file, a line each."""
    lines = [line.strip() for line in _read_lines(bank)]
    return [line for line in lines if line]


def read_text_features(bank: Path) -> tuple[Singles, NDArray[np.int64] | None]:
    """Return features of public texts from a NumPy archive, (texts, numbers), and the class of each, where it tells."""
    arrays = readers.read_arrays(bank, ("texts",), ("classes",))
    classes = arrays.get("classes")
    return arrays["texts"].astype(np.float32), None if classes is None else classes.astype(np.int64)


ImagePairs = IdxPairs | CifarPairs | ArchivePairs | FolderPairs | ParquetPairs


def _read(data: FeaturePairs | ImagePairs) -> Inputs:
    """Return the pairs of a source, with labels as places among the config's classes."""
    if isinstance(data, FeaturePairs):
        return _read_features(data)
    classes = list(data.classes or ())
    found = _read_images(data, classes)
    place = np.array([*(classes.index(name) if name in classes else -1 for name in found.names), -1])
    pixels = found.pixels[..., 0] if found.pixels.ndim == 4 and found.pixels.shape[3] == 1 else found.pixels
    return Inputs(pixels, place[found.labels], users=found.users if data.unit == "user" else None)


def _read_images(data: ImagePairs, names: list[str]) -> readers.Images:
    """Return the images and labels of a source, by the reader of its kind."""
    if isinstance(data, IdxPairs):
        return readers.read_idx(data.images, data.labels, data.transpose, names)
    if isinstance(data, CifarPairs):
        found = readers.read_cifar(data.path, data.part, data.coarse)
        return readers.Images(found.pixels, found.labels, tuple(names))
    if isinstance(data, ArchivePairs):
        return readers.read_npz(data.path, names)
    size = (data.size[0], data.size[1])
    if isinstance(data, FolderPairs):
        return readers.read_image_folder(data.path, size, data.colour, users=data.unit == "user")
    columns = data.columns
    user = columns.label if columns.user is None else columns.user
    return readers.read_image_parquet(data.path, columns.image, columns.label, user, size, data.colour)


def _read_features(data: FeaturePairs) -> Inputs:
    """Return features of images, with labels or captions, from a NumPy archive."""
    arrays = readers.read_arrays(data.path, ("images",), ("labels", "captions", "users"))
    labels, captions = arrays.get("labels"), arrays.get("captions")
    if (labels is None) == (captions is None):
        raise InputError(f"{data.path} must hold either labels or captions beside images; write it so.")
    if labels is not None and labels.dtype.kind not in "iu":
        raise InputError(f"labels of {data.path} must be whole numbers. Got {labels.dtype} instead.")
    users = arrays.get("users") if data.unit == "user" else None
    return Inputs(arrays["images"], None if labels is None else labels.astype(np.int64), captions=captions, users=users)


def _add_users(inputs: Inputs, data: FeaturePairs | ImagePairs) -> Inputs:
    """Return the pairs with the user of each; raise InputError if the source names no users and they are needed."""
    if data.unit == "pair":
        return inputs
    named = None if isinstance(data, ArchivePairs | FolderPairs | ParquetPairs) else data.users
    users = inputs.users if named is None else np.array(_read_lines(named))
    if users is None:
        where = data.images if isinstance(data, IdxPairs) else data.path
        raise InputError(f'data.unit is "user", and {where} names no users; name them in data.users.')
    if len(users) != len(inputs.images):
        raise InputError(f"every image needs its user. Got {len(inputs.images):,} images and {len(users):,} users.")
    return Inputs(inputs.images, inputs.labels, inputs.captions, users=users)


def _make_inputs(found: CaptionedImages) -> Inputs:
    """Return captioned photographs as pairs, each photograph a user."""
    texts, image_of = found.flat()
    return Inputs(found.pixels, captions=texts, image_of=image_of, users=image_of)


def _read_lines(path: Path) -> list[str]:
    """Return the lines of a text file in UTF-8."""
    if not path.is_file():
        raise InputError(f"there is no file {path}; check the path.")
    try:
        return path.read_text(encoding="utf-8").splitlines()
    except UnicodeDecodeError:
        raise InputError(f"{path} is not text in UTF-8; write it so.") from None
