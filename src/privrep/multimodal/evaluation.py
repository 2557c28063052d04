"""Measures of embeddings of images and texts. Nothing here is private: all of it is computed on data as they are.

Publishing a figure measured on people's own rows tells something of these people; measure on public rows, or keep it.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from privrep.errors import InputError
from privrep.typing import Array

Whole = NDArray[np.int64]
RECALL_AT = (1, 5, 10)
_AT_A_TIME = 1 << 22  # similarities held at once


@dataclass(frozen=True, eq=False)
class ZeroShot:
    """The share of images whose class was found, and the class found for each."""

    accuracy: float
    predicted: Whole  # (images,)


@dataclass(frozen=True)
class Recall:
    """The share of queries with a right answer among the first k, by k, both ways."""

    image_to_text: dict[int, float]  # a right answer: any text of the image
    text_to_image: dict[int, float]


def zero_shot(
    image_embeddings: NDArray[Any],
    text_embeddings: NDArray[Any],
    class_of_text: Sequence[int] | NDArray[Any],
    labels: NDArray[Any],
) -> ZeroShot:
    """Return how many images are classified right by the texts they are nearest to. Not private: computed on data.

    Each image gets the class whose texts it is nearest to by cosine. A class with several texts (an ensemble of
    prompts) is the mean of their unit embeddings, normalised.

    Args:
        image_embeddings: (images, dim).
        text_embeddings: (texts, dim).
        class_of_text: the class of each text, from 0, (texts,).
        labels: the right class of each image, (images,).
    """
    images, texts = normalise_rows(image_embeddings, "images"), normalise_rows(text_embeddings, "texts")
    owners, wanted = np.asarray(class_of_text), np.asarray(labels)
    _check_sizes(images, texts)
    _check_one_each(owners, len(texts), "class_of_text", "text")
    _check_one_each(wanted, len(images), "labels", "image")
    if not len(images) or not len(texts):
        raise InputError("there are no images to classify, or no texts to classify them by; give both.")
    classes = int(owners.max()) + 1
    missing = np.setdiff1d(np.arange(classes), owners)
    if len(missing) or owners.min() < 0:
        raise InputError(f"classes must be numbered from 0 and each have a text; class {missing[:1]} has none.")
    means = np.zeros((classes, texts.shape[1]))
    np.add.at(means, owners, texts)
    predicted = (images @ normalise_rows(means, "classes").T).argmax(axis=1)
    return ZeroShot(float((predicted == wanted).mean()), predicted.astype(np.int64))


def retrieval(
    image_embeddings: NDArray[Any],
    text_embeddings: NDArray[Any],
    image_of_text: Sequence[int] | NDArray[Any],
    at: Sequence[int] = RECALL_AT,
) -> Recall:
    """Return recall among the first k by cosine, both ways. Not private: computed on data.

    A wrong answer as near as the right one counts as nearer: embeddings that are all the same find nothing.

    Args:
        image_embeddings: (images, dim).
        text_embeddings: (texts, dim).
        image_of_text: the image of each text, (texts,); every image needs a text.
        at: the numbers k.
    """
    images, texts = normalise_rows(image_embeddings, "images"), normalise_rows(text_embeddings, "texts")
    owner = np.asarray(image_of_text)
    _check_sizes(images, texts)
    _check_one_each(owner, len(texts), "image_of_text", "text")
    if not len(images) or not np.array_equal(np.unique(owner), np.arange(len(images))):
        raise InputError(f"image_of_text must name each of {len(images):,} images at least once, and no other.")
    own = (images[owner] * texts).sum(axis=1)
    best = np.full(len(images), -np.inf)
    np.maximum.at(best, owner, own)
    above_text, above_image = np.zeros(len(texts), np.int64), np.zeros(len(images), np.int64)
    step = max(_AT_A_TIME // len(images), 1)
    for start in range(0, len(texts), step):
        some = slice(start, start + step)
        similar = texts[some] @ images.T + 1e-12  # rounding must not make an equal one less
        others = owner[some, None] != np.arange(len(images))
        above_text[some] = ((similar >= own[some, None]) & others).sum(axis=1)
        above_image += ((similar >= best) & others).sum(axis=0)
    return Recall({k: float((above_image < k).mean()) for k in at}, {k: float((above_text < k).mean()) for k in at})


def linear_probe(
    train: NDArray[Any],
    train_labels: NDArray[Any],
    test: NDArray[Any],
    test_labels: NDArray[Any],
    strength: float = 1.0,
) -> float:
    """Return the accuracy of a logistic regression on embeddings. Not private: computed on data.

    Each number is standardised by the mean and deviation of the training rows.

    Args:
        train: embeddings to learn from, (rows, dim).
        train_labels: their classes, (rows,).
        test: embeddings to measure on, (others, dim).
        test_labels: their classes, (others,).
        strength: scikit-learn's C, larger for less regularisation.
    """
    from sklearn.linear_model import LogisticRegression
    from sklearn.pipeline import make_pipeline
    from sklearn.preprocessing import StandardScaler

    known, new = _check_finite(train, "train"), _check_finite(test, "test")
    _check_sizes(known, new)
    _check_one_each(np.asarray(train_labels), len(known), "train_labels", "row")
    _check_one_each(np.asarray(test_labels), len(new), "test_labels", "row")
    probe = make_pipeline(StandardScaler(), LogisticRegression(C=strength, max_iter=2_000))
    return float(probe.fit(known, train_labels).score(new, test_labels))


def normalise_rows(embeddings: NDArray[Any], what: str) -> Array:
    """Return rows of length one, (rows, dim) in float64; a row of zeros stays.

    Args:
        embeddings: (rows, dim), finite.
        what: their name in error sentences.
    """
    found = _check_finite(embeddings, what)
    length = np.linalg.norm(found, axis=1, keepdims=True)
    return np.asarray(found / np.where(length > 0, length, 1.0))


def _check_finite(values: NDArray[Any], what: str) -> Array:
    """Return rows as float64; raise InputError unless they are rows of finite numbers."""
    found = np.asarray(values, dtype=np.float64)
    if found.ndim != 2 or not np.isfinite(found).all():
        raise InputError(f"{what} must be rows of finite numbers. Got shape {found.shape}; leave out what is not.")
    return found


def _check_sizes(left: Array, right: Array) -> None:
    """Raise InputError unless both embeddings have equally many numbers."""
    if left.shape[1] != right.shape[1]:
        raise InputError(
            f"embeddings must have one size. Got {left.shape[1]} and {right.shape[1]} numbers; project both to one."
        )


def _check_one_each(values: NDArray[Any], count: int, name: str, what: str) -> None:
    """Raise InputError unless there is one integer for each of `count` images, texts or rows.

    Args:
        values: meant to be (count,).
        count: how many there must be.
        name: the name of the values in error sentences.
        what: the name of what each belongs to.
    """
    if values.shape != (count,) or values.dtype.kind not in "iu":
        raise InputError(
            f"{name} must be one integer for each {what}, {count:,}. Got {values.dtype} of shape {values.shape}."
        )
