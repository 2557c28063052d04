"""Pairs of image and text as rows of users, and the public lists of texts that they are contrasted with.

A row holds the numbers of an image, then, for a free caption, those of its text. The target of a row is the number of
its caption in the `bank`, a public list; the length of the bank says that the caption is in the row itself.
"""

from __future__ import annotations

import csv
import gzip
import hashlib
import io
import os
import tarfile
import zlib
from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray

from privrep.data.table import UserTable, factorize
from privrep.errors import InputError, missing_package
from privrep.typing import Singles

Users = Sequence[Hashable] | NDArray[Any]
Unit = Literal["pair", "user"]
MOST_CAPTIONS = 1 << 24  # whole numbers up to here are exact in float32

TEMPLATES = (
    "a photo of a {}.",
    "a photo of the {}.",
    "a blurry photo of a {}.",
    "a black and white photo of a {}.",
    "a low contrast photo of a {}.",
    "a high contrast photo of a {}.",
    "a bad photo of a {}.",
    "a good photo of a {}.",
    "a photo of a small {}.",
    "a photo of a big {}.",
    "a close-up photo of a {}.",
    "a bright photo of a {}.",
    "a dark photo of a {}.",
    "a cropped photo of a {}.",
    "a picture of a {}.",
    "an image of a {}.",
)
CIFAR10 = ("airplane", "automobile", "bird", "cat", "deer", "dog", "frog", "horse", "ship", "truck")
FASHION_MNIST = (
    "t-shirt",
    "pair of trousers",
    "pullover",
    "dress",
    "coat",
    "sandal",
    "shirt",
    "sneaker",
    "bag",
    "ankle boot",
)


@dataclass(frozen=True, eq=False)
class Pairs:
    """Users' pairs, and the public bank of texts.

    The unit of privacy is a user of `table`, with all pairs that the user holds; the relation is replace-one-user.
    """

    table: UserTable
    image_numbers: int
    text_numbers: int  # of a free caption in the row; 0 where all captions come from the bank
    bank: Singles  # (texts, numbers of a text), public
    unit: Unit = "user"  # what the owner of the data calls a user of the table: for the record
    classes: NDArray[np.int64] | None = None  # (texts,): which class each text names, where every one names one; public

    def __post_init__(self) -> None:
        if self.bank.ndim != 2 or self.bank.dtype != np.float32 or not np.isfinite(self.bank).all():
            raise InputError(
                "the bank must be finite float32 rows, one for each text. "
                f"Got {self.bank.dtype} of shape {self.bank.shape}."
            )
        if len(self.bank) >= MOST_CAPTIONS:
            raise InputError(f"the bank may have fewer than {MOST_CAPTIONS:,} texts. Got {len(self.bank):,} instead.")
        if self.text_numbers not in (0, self.bank.shape[1]):
            raise InputError(
                f"captions have {self.text_numbers:,} numbers and texts of the bank {self.bank.shape[1]:,}; prepare "
                "both with one encoder."
            )
        if self.image_numbers < 1 or self.image_numbers + self.text_numbers != self.table.n_features:
            raise InputError(
                f"{self.image_numbers:,} numbers of an image and {self.text_numbers:,} of a text do not make rows of "
                f"{self.table.n_features:,}; give the numbers of each."
            )
        if not self.text_numbers and not len(self.bank):
            raise InputError("there are neither captions nor a bank of texts; give one of them.")
        found = self.classes
        if found is not None and (
            self.text_numbers
            or found.shape != (len(self.bank),)
            or not np.array_equal(np.unique(found), np.arange(len(np.unique(found))))
        ):
            raise InputError(
                "classes must give every text of the bank its class, numbered from 0, and captions must be in the bank."
            )

    @property
    def free(self) -> int:
        """The target of a row that holds its own caption."""
        return len(self.bank)

    def images(self, X: NDArray[Any]) -> NDArray[Any]:
        """The images of table rows, (rows, numbers)."""
        return X[..., : self.image_numbers]

    def texts(self, X: NDArray[Any], y: NDArray[Any]) -> Singles:
        """The texts of table rows, (rows, numbers). A row whose target is no text has NaN, whoever made the table."""
        result = np.full((len(X), self.bank.shape[1]), np.nan, dtype=np.float32)
        listed = (y >= 0) & (y < len(self.bank)) & (y == np.floor(y))
        result[listed] = self.bank[y[listed].astype(np.int64)]
        if self.text_numbers:
            own = y == self.free
            result[own] = X[own, self.image_numbers :]
        return result


def labelled(
    images: NDArray[Any],
    labels: NDArray[Any],
    bank: NDArray[Any],
    caption_of: Sequence[int] | Sequence[Sequence[int]],
    users: Users | None = None,
) -> Pairs:
    """Images (n, numbers) with a caption of their class: `caption_of[class]` is its row of the bank, or several.

    Of several, pairs take turns, each user from a place of their own. Formal guarantee: which caption a pair has is a
    function of its user's id (without `users`, of the pair's place) and of that user's own pairs. Without `users` every
    pair is a unit of privacy by itself.
    """
    rows, texts = _rows(images, "images"), _rows(bank, "the bank")
    choices = _choices(caption_of, len(texts))
    found = np.asarray(labels)
    if found.shape != (len(rows),) or found.dtype.kind not in "iu":
        raise InputError(
            f"labels must be one integer for each of {len(rows):,} images. Got {found.dtype} of shape {found.shape}."
        )
    wrong = np.flatnonzero((found < 0) | (found >= len(choices)))
    if len(wrong):
        raise InputError(
            f"label {found[wrong[0]]} of row {wrong[0]} is none of the {len(choices)} classes; "
            "correct it or leave the row out."
        )
    groups = _groups(users, len(rows))
    sizes = np.array([len(choice) for choice in choices])
    padded = np.array([np.resize(choice, sizes.max()) for choice in choices])
    y = padded[found, _turns(groups, users is None) % sizes[found]]
    table = UserTable.from_rows(rows, y.astype(np.float32), groups)
    return Pairs(table, rows.shape[1], 0, texts, "pair" if users is None else "user", _class_of(choices, len(texts)))


def captioned(
    images: NDArray[Any], captions: NDArray[Any], bank: NDArray[Any] | None = None, users: Users | None = None
) -> Pairs:
    """Images (n, numbers) with free captions (n, numbers of a text), and a public bank of other texts, if any.

    Without `users` every pair is a unit of privacy by itself. A caption may not be in the bank unless it is public.
    """
    rows, texts = _rows(images, "images"), _rows(captions, "captions")
    if len(rows) != len(texts):
        raise InputError(f"every image needs one caption. Got {len(rows):,} images and {len(texts):,} captions.")
    public = np.zeros((0, texts.shape[1]), np.float32) if bank is None else _rows(bank, "the bank")
    y = np.full(len(rows), len(public), dtype=np.float32)
    table = UserTable.from_rows(np.concatenate([rows, texts], axis=1), y, _groups(users, len(rows)))
    return Pairs(table, rows.shape[1], texts.shape[1], public, "pair" if users is None else "user")


def _rows(values: NDArray[Any], what: str) -> Singles:
    found = np.asarray(values)
    if found.ndim != 2 or not found.shape[1] or found.dtype.kind not in "fiub":
        raise InputError(f"{what} must be rows of numbers, (rows, numbers). Got {found.dtype} of shape {found.shape}.")
    return np.ascontiguousarray(found, dtype=np.float32)


def _choices(caption_of: Sequence[int] | Sequence[Sequence[int]], texts: int) -> list[NDArray[np.int64]]:
    choices = [np.atleast_1d(np.asarray(choice)) for choice in caption_of]
    if not choices:
        raise InputError("caption_of names no class; give every class its rows of the bank.")
    for label, choice in enumerate(choices):
        if choice.ndim != 1 or not len(choice) or choice.dtype.kind not in "iu":
            raise InputError(f"caption_of[{label}] must be one row of the bank or several. Got {caption_of[label]!r}.")
        if choice.min() < 0 or choice.max() >= texts:
            raise InputError(
                f"caption_of[{label}] names row {choice.max() if choice.max() >= texts else choice.min()} of a bank of "
                f"{texts:,} texts; number them from 0."
            )
    return choices


def _class_of(choices: list[NDArray[np.int64]], texts: int) -> NDArray[np.int64] | None:
    """Return the class of each text; None if a text is of no class, or of several."""
    named = np.concatenate(choices)
    if not np.array_equal(np.sort(named), np.arange(texts)):
        return None
    found = np.empty(texts, dtype=np.int64)
    found[named] = np.repeat(np.arange(len(choices)), [len(choice) for choice in choices])
    return found


def _groups(users: Users | None, count: int) -> Users:
    if users is None:
        return np.arange(count)
    if len(users) != count:
        raise InputError(f"users must name the user of each of {count:,} pairs. Got {len(users):,} instead.")
    return users


def _turns(groups: Users, places: bool) -> NDArray[np.int64]:
    """Where each row's turn stands: the place of its user, then one further for each earlier row of that user."""
    if places:
        return np.arange(len(groups), dtype=np.int64)
    ids, codes = factorize(groups)
    order = np.argsort(codes, kind="stable")
    starts = np.searchsorted(codes[order], np.arange(len(ids)))
    turns = np.empty(len(codes), dtype=np.int64)
    turns[order] = np.arange(len(codes)) - starts[codes[order]]
    own = [int.from_bytes(hashlib.blake2b(str(name).encode(), digest_size=4).digest(), "little") for name in ids]
    return turns + np.array(own, dtype=np.int64)[codes]


def prompts(classes: Sequence[str], templates: Sequence[str] = TEMPLATES) -> tuple[list[str], NDArray[np.int64]]:
    """Every class in every template, class after class, and the class of each text."""
    if not classes or not templates:
        raise InputError("prompts need at least one class and one template.")
    bad = [template for template in templates if template.count("{}") != 1]
    if bad:
        raise InputError(f"a template has one {{}} for the class. Got {bad[0]!r} instead.")
    texts = [template.replace("{}", name) for name in classes for template in templates]
    return texts, np.repeat(np.arange(len(classes)), len(templates))


def captions_by_class(class_of_text: NDArray[np.int64]) -> list[list[int]]:
    """For each class the texts it has in a bank: what `labelled` takes as `caption_of`."""
    return [np.flatnonzero(class_of_text == label).tolist() for label in range(int(class_of_text.max()) + 1)]


@dataclass(frozen=True, eq=False)
class CaptionedImages:
    """Photographs of one size with several captions each."""

    pixels: NDArray[np.uint8]  # (images, height, width, 3)
    ids: tuple[str, ...]
    captions: tuple[tuple[str, ...], ...]

    def __len__(self) -> int:
        return len(self.ids)

    def take(self, rows: NDArray[np.int64]) -> CaptionedImages:
        chosen = rows.tolist()
        return CaptionedImages(
            self.pixels[rows], tuple(self.ids[row] for row in chosen), tuple(self.captions[row] for row in chosen)
        )

    def flat(self) -> tuple[list[str], NDArray[np.int64]]:
        """All captions, image after image, and the image of each."""
        sizes = [len(some) for some in self.captions]
        return [text for some in self.captions for text in some], np.repeat(np.arange(len(sizes)), sizes)


def read_flickr8k(
    folder: str | os.PathLike[str], most: int | None = None, progress: Callable[[int], None] | None = None
) -> CaptionedImages:
    """Flickr8k from images_112px.tar and captions.csv.gz (image, caption), images in the order of their names.

    `most` stops after so many. Images without a caption, or captions without an image, are an error.
    """
    captions = _captions(Path(folder) / "captions.csv.gz")
    path = Path(folder) / "images_112px.tar"
    if not path.is_file():
        raise InputError(f"there is no file {path}; check the path.")
    names = sorted(captions)[:most]
    pixels: NDArray[np.uint8] | None = None
    try:
        with tarfile.open(path) as archive:
            members = {Path(member.name).name: member for member in archive.getmembers() if member.isfile()}
            unpaired = sorted(set(members) ^ set(captions))
            if unpaired:
                raise InputError(f"{unpaired[0]} of {folder} has an image or captions, not both; fetch it again.")
            for place, name in enumerate(names):
                image = _decoded(archive, members[name])
                if pixels is None:
                    pixels = np.empty((len(names), *image.shape), dtype=np.uint8)
                if image.shape != pixels.shape[1:]:
                    raise InputError(f"{name} of {path} has another size than the images before it; resize it.")
                pixels[place] = image
                if progress is not None:
                    progress(place + 1)
    except (tarfile.TarError, OSError) as error:
        raise InputError(f"{path} cannot be read ({type(error).__name__}: {error}); fetch it again.") from error
    if pixels is None:
        raise InputError(f"{folder} holds no images; check the folder.")
    return CaptionedImages(pixels, tuple(names), tuple(tuple(captions[name]) for name in names))


def _captions(path: Path) -> dict[str, list[str]]:
    if not path.is_file():
        raise InputError(f"there is no file {path}; check the path.")
    try:
        rows = list(csv.reader(io.StringIO(gzip.decompress(path.read_bytes()).decode())))
    except (OSError, EOFError, zlib.error, UnicodeDecodeError, csv.Error) as error:
        raise InputError(f"{path} cannot be read ({type(error).__name__}); fetch it again.") from error
    if not rows or rows[0] != ["image", "caption"] or any(len(row) != 2 for row in rows):
        raise InputError(f"{path} must have two columns, image and caption; write it so.")
    captions: dict[str, list[str]] = {}
    for image, caption in rows[1:]:
        captions.setdefault(image, []).append(caption)
    return captions


def _decoded(archive: tarfile.TarFile, member: tarfile.TarInfo) -> NDArray[np.uint8]:
    try:
        from PIL import Image
    except ImportError as error:
        raise missing_package("reading encoded images needs Pillow", "multimodal") from error
    file = archive.extractfile(member)
    if file is None:
        raise InputError(f"{member.name} is no file; fetch the archive again.")
    with Image.open(file) as image:
        return np.asarray(image.convert("RGB"))


def split_by_image(data: CaptionedImages, sizes: Sequence[int], seed: int) -> list[CaptionedImages]:
    """Disjoint parts of these numbers of images, an image with all its captions in one part.

    The same seed and the same names give the same parts on every machine: images come in the order of a hash of both.
    """
    if any(size < 0 for size in sizes) or sum(sizes) > len(data):
        raise InputError(f"parts of {', '.join(map(str, sizes))} images do not fit into {len(data):,}; lower them.")
    digests = [hashlib.blake2b(f"{seed} {name}".encode(), digest_size=16).hexdigest() for name in data.ids]
    order = np.argsort(digests, kind="stable")
    return [data.take(order[start:end]) for start, end in pairwise(np.cumsum([0, *sizes]))]
