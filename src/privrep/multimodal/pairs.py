"""Pairs of image and text as rows of users, and the public lists of texts that they are contrasted with.

A row holds the numbers of an image, then, for a free caption, the numbers of its text. The target of a row is the
number of its caption in the `bank`, a public list. The length of the bank says that the caption is in the row itself.
"""

from __future__ import annotations

import csv
import hashlib
import io
import os
import tarfile
from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray

from privrep.boundary import refusing, unpack
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
    """The pairs of users, and the public bank of texts.

    The unit of privacy is a user of `table`, with all pairs that the user holds; the relation is replace-one-user.
    """

    table: UserTable
    image_numbers: int
    text_numbers: int  # numbers of a free caption in the row; 0 where all captions come from the bank
    bank: Singles  # (texts, numbers of a text), public
    unit: Unit = "user"  # the data owner's word for a user of the table: for the record
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
        """Return the target of a row that holds its own caption."""
        return len(self.bank)

    def images(self, X: NDArray[Any]) -> NDArray[Any]:
        """Return the images of table rows, (rows, numbers)."""
        return X[..., : self.image_numbers]

    def texts(self, X: NDArray[Any], y: NDArray[Any]) -> Singles:
        """Return the texts of table rows, (rows, numbers); NaN for a row whose target is no text.

        Args:
            X: table rows, (rows, numbers).
            y: their targets, (rows,).
        """
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
    """Return pairs of images with captions of their classes.

    A class may have several captions. Then its pairs take turns, each user from a place of their own.

    Formal guarantee: the caption of a pair is a function of its user's id (without `users`, of the pair's place) and of
    that user's own pairs.

    Args:
        images: (n, numbers).
        labels: the class of each image, from 0, (n,).
        bank: features of public texts, (texts, numbers).
        caption_of: for each class its row of the bank, or several.
        users: the user of each image, (n,); None makes every pair a unit of privacy by itself.
    """
    rows, texts = _check_rows(images, "images"), _check_rows(bank, "the bank")
    choices = _check_choices(caption_of, len(texts))
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
    groups = _check_users(users, len(rows))
    sizes = np.array([len(choice) for choice in choices])
    padded = np.array([np.resize(choice, sizes.max()) for choice in choices])
    y = padded[found, _count_turns(groups, users is None) % sizes[found]]
    table = UserTable.from_rows(rows, y.astype(np.float32), groups)
    return Pairs(
        table, rows.shape[1], 0, texts, "pair" if users is None else "user", _find_classes(choices, len(texts))
    )


def captioned(
    images: NDArray[Any], captions: NDArray[Any], bank: NDArray[Any] | None = None, users: Users | None = None
) -> Pairs:
    """Return pairs of images with free captions. A caption may not be in the bank unless it is public.

    Args:
        images: (n, numbers).
        captions: the text of each image, (n, numbers of a text).
        bank: features of other, public texts, (texts, numbers of a text), if there are any.
        users: the user of each image, (n,); None makes every pair a unit of privacy by itself.
    """
    rows, texts = _check_rows(images, "images"), _check_rows(captions, "captions")
    if len(rows) != len(texts):
        raise InputError(f"every image needs one caption. Got {len(rows):,} images and {len(texts):,} captions.")
    public = np.zeros((0, texts.shape[1]), np.float32) if bank is None else _check_rows(bank, "the bank")
    y = np.full(len(rows), len(public), dtype=np.float32)
    table = UserTable.from_rows(np.concatenate([rows, texts], axis=1), y, _check_users(users, len(rows)))
    return Pairs(table, rows.shape[1], texts.shape[1], public, "pair" if users is None else "user")


def _check_rows(values: NDArray[Any], what: str) -> Singles:
    """Return values as float32 rows; raise InputError unless they are rows of numbers."""
    found = np.asarray(values)
    if found.ndim != 2 or not found.shape[1] or found.dtype.kind not in "fiub":
        raise InputError(f"{what} must be rows of numbers, (rows, numbers). Got {found.dtype} of shape {found.shape}.")
    return np.ascontiguousarray(found, dtype=np.float32)


def _check_choices(caption_of: Sequence[int] | Sequence[Sequence[int]], texts: int) -> list[NDArray[np.int64]]:
    """Return the rows of the bank that each class has; raise InputError if one is not there."""
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


def _find_classes(choices: list[NDArray[np.int64]], texts: int) -> NDArray[np.int64] | None:
    """Return the class of each text; None if a text is of no class, or of several."""
    named = np.concatenate(choices)
    if not np.array_equal(np.sort(named), np.arange(texts)):
        return None
    found = np.empty(texts, dtype=np.int64)
    found[named] = np.repeat(np.arange(len(choices)), [len(choice) for choice in choices])
    return found


def _check_users(users: Users | None, count: int) -> Users:
    """Return the user of each pair, (count,); without users every pair is one."""
    if users is None:
        return np.arange(count)
    if len(users) != count:
        raise InputError(f"users must name the user of each of {count:,} pairs. Got {len(users):,} instead.")
    return users


def _count_turns(groups: Users, places: bool) -> NDArray[np.int64]:
    """Return the turn of each row, (rows,), by which it takes one of its class's captions.

    A user's first turn follows from its id, and each further row of the user is one turn later.

    Args:
        groups: the user of each row, (rows,).
        places: whether every row is a user, whose turn is its place.
    """
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
    """Return every class in every template, class after class, and the class of each text.

    Args:
        classes: names of classes.
        templates: sentences with one {} for the class.
    """
    if not classes or not templates:
        raise InputError("prompts need at least one class and one template.")
    bad = [template for template in templates if template.count("{}") != 1]
    if bad:
        raise InputError(f"a template has one {{}} for the class. Got {bad[0]!r} instead.")
    texts = [template.replace("{}", name) for name in classes for template in templates]
    return texts, np.repeat(np.arange(len(classes)), len(templates))


def captions_by_class(class_of_text: NDArray[np.int64]) -> list[list[int]]:
    """Return for each class the texts it has in a bank: what `labelled` takes as `caption_of`.

    Args:
        class_of_text: (texts,), from 0.
    """
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
        """Return the photographs of these rows, with their captions."""
        chosen = rows.tolist()
        return CaptionedImages(
            self.pixels[rows], tuple(self.ids[row] for row in chosen), tuple(self.captions[row] for row in chosen)
        )

    def flat(self) -> tuple[list[str], NDArray[np.int64]]:
        """Return all captions, image after image, and the image of each."""
        sizes = [len(some) for some in self.captions]
        return [text for some in self.captions for text in some], np.repeat(np.arange(len(sizes)), sizes)


def read_flickr8k(
    folder: str | os.PathLike[str], most: int | None = None, progress: Callable[[int], None] | None = None
) -> CaptionedImages:
    """Read Flickr8k from images_112px.tar and captions.csv.gz (image, caption), images in the order of their names.

    Images without a caption, or captions without an image, are an error.

    Args:
        folder: where both files are.
        most: how many images to read; None: all.
        progress: told how many images are read.
    """
    captions = _read_captions(Path(folder) / "captions.csv.gz")
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
                image = _decode(archive, members[name])
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


def _read_captions(path: Path) -> dict[str, list[str]]:
    """Return the captions of each image of captions.csv.gz."""
    if not path.is_file():
        raise InputError(f"there is no file {path}; check the path.")
    with refusing(lambda why: f"{path} cannot be read ({why}); fetch it again."):
        rows = list(csv.reader(io.StringIO(unpack(path.read_bytes()).decode())))
    if not rows or rows[0] != ["image", "caption"] or any(len(row) != 2 for row in rows):
        raise InputError(f"{path} must have two columns, image and caption; write it so.")
    captions: dict[str, list[str]] = {}
    for image, caption in rows[1:]:
        captions.setdefault(image, []).append(caption)
    return captions


def _decode(archive: tarfile.TarFile, member: tarfile.TarInfo) -> NDArray[np.uint8]:
    """Return an image of an archive, (height, width, 3)."""
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
    """Return disjoint parts of captioned images, an image with all its captions in one part.

    The same seed and the same names give the same parts on every machine: images come in the order of a hash of both.

    Args:
        data: the photographs.
        sizes: how many images each part has.
        seed: public.
    """
    if any(size < 0 for size in sizes) or sum(sizes) > len(data):
        raise InputError(f"parts of {', '.join(map(str, sizes))} images do not fit into {len(data):,}; lower them.")
    digests = [hashlib.blake2b(f"{seed} {name}".encode(), digest_size=16).hexdigest() for name in data.ids]
    order = np.argsort(digests, kind="stable")
    return [data.take(order[start:end]) for start, end in pairwise(np.cumsum([0, *sizes]))]
