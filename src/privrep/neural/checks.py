"""Checks before anything is spent: rows, labels and settings that cannot be used are refused, each in one sentence."""

from __future__ import annotations

import math
import os
import warnings
from collections.abc import Hashable, Mapping, Sequence
from numbers import Real
from typing import Any, get_args

import numpy as np
from numpy.typing import NDArray
from torch import nn

from privrep.data.table import UserTable
from privrep.errors import InputError, UnknownLabels
from privrep.heads.gradient import labels_of
from privrep.neural.features import FeatureMap, Frozen
from privrep.neural.features import rows_of as rows_of
from privrep.neural.plan import Share
from privrep.neural.rounds import TrainingSettings
from privrep.nn.flat_module import Split
from privrep.privacy.bounds import Bound
from privrep.privacy.sampling import Poisson
from privrep.typing import Floats

NETWORKS = ("mlp", "lenet")
FEW_CLASSES = 10  # the most that a sentence lists


def find_class_numbers(y: Any, classes: int | Sequence[Hashable]) -> NDArray[np.float64]:
    """Return the place of each label among the classes, (rows,); -1 for a label that is no class.

    Where classes are a number, a whole number that is too large is that number: see `count_unknown_labels`.

    Args:
        y: a label for each row, (rows,).
        classes: a number of classes, or their names.
    """
    if y is None:
        raise InputError("fit takes rows, their classes and the user of each: fit(X, y, groups).")
    if isinstance(y, np.ndarray) and y.ndim != 1:
        raise InputError(f"y must have one label for each row. Got shape {y.shape} instead.")
    labels = y.tolist() if hasattr(y, "tolist") else list(y)  # one by one: a common type is everybody's
    names = range(int(classes)) if isinstance(classes, int | np.integer) else classes
    known = {name: float(code) for code, name in enumerate(names)}
    counted = isinstance(names, range)
    return np.array([_find_class(label, known, counted) for label in labels], dtype=np.float64)


def _find_class(label: Any, known: Mapping[Hashable, float], counted: bool) -> float:
    """Return the place of a label among the classes, -1 for a label that is none.

    Args:
        label: of any kind; a number written as text is that number.
        known: the place of each class, by its name.
        counted: whether classes are a number; then a whole number that is too large gives that number.
    """
    plain = label.item() if isinstance(label, np.generic) else label
    try:
        if isinstance(plain, str) and plain not in known:
            plain = float(plain)  # a number written as text
        if plain in known:
            return known[plain]
    except (TypeError, ValueError):  # a list, or other text: no class
        return -1.0
    whole = isinstance(plain, int) or (isinstance(plain, float) and plain.is_integer())
    return float(len(known)) if counted and whole and plain >= len(known) else -1.0


def count_unknown_labels(codes: Floats, classes: int | Sequence[Hashable], *, places: bool) -> int:
    """Return how many labels are none of the classes; raise InputError if all are, or a class number is too large.

    Whether it raises depends on the labels. What it says depends on the declared classes alone: it quotes no label.

    Args:
        codes: as `find_class_numbers` returns them, or class numbers of a `UserTable`, (rows,).
        classes: as declared.
        places: whether the codes were given as class numbers, and not as labels.
    """
    count = classes if isinstance(classes, int) else len(classes)
    unknown = int((labels_of(codes, count) < 0).sum())
    begin_at_1 = list(range(1, count + 1)) if count <= FEW_CLASSES else f"list(range(1, {count + 1}))"
    if bool(((codes >= count) & np.isfinite(codes) & (codes == np.floor(codes))).any()):
        raise InputError(
            f"class numbers of a table are places among the {count} classes, 0 to {count - 1}, and some are larger; "
            "number them from 0."
            if places
            else f"classes={count} stands for the labels 0 to {count - 1}, and some are larger; write "
            f"classes={begin_at_1} if they begin at 1, else list the labels that should count."
        )
    if unknown < len(codes) or not len(codes):
        return unknown
    if places:
        raise InputError(f"no row has a class number, 0 to {count - 1}; number the classes of the table from 0.")
    if isinstance(classes, int):
        raise InputError(
            f"no label is one of the classes, as classes={count} stands for 0 to {count - 1}; list them as labels are "
            f"written, such as classes={begin_at_1}."
        )
    listed = ", ".join(map(repr, classes[:5]))
    raise InputError(f"no row has one of the declared classes ({listed}); list them as labels are written.")


def warn_of_labels(unknown: int, rows: int, stacklevel: int) -> None:
    """Warn whoever holds the rows how many of them are left out.

    Args:
        unknown: rows whose label is none of the classes.
        rows: all rows.
        stacklevel: of the caller, as `warnings.warn` counts.
    """
    if unknown:
        said = f"{unknown:,} of {rows:,} rows have a label that is none of the classes, and are left out"
        warnings.warn(f"{said} (not private: for your screen)", UnknownLabels, stacklevel=stacklevel + 1)


def check_classes(classes: Any, head: nn.Module | None) -> int | list[Hashable]:
    """Return how many classes there are, or their names; raise InputError unless they are public and at least two.

    Args:
        classes: as declared; None takes as many as the head has scores for.
        head: the module of heads, if one was passed.
    """
    if classes is None and isinstance(head, nn.Linear):
        return head.out_features
    if classes is None:
        raise InputError("which classes there are must be public: pass classes=10, or a list of their names.")
    if isinstance(classes, int | np.integer) and not isinstance(classes, bool):
        found: int | list[Hashable] = int(classes)
    elif isinstance(classes, str | bytes) or not hasattr(classes, "__len__"):
        raise InputError(f"classes must be a whole number or a list of names. Got {classes!r} instead.")
    else:
        found = np.asarray(classes).tolist() if isinstance(classes, np.ndarray) else list(classes)
        if len(set(found)) < len(found):
            raise InputError("classes names one of them twice; name each once.")
    if (found if isinstance(found, int) else len(found)) < 2:
        raise InputError(f"there must be at least 2 classes. Got {classes!r} instead.")
    return found


def check_parameters(model: Any) -> None:
    """Raise InputError for parameters of `Centaur` that no data could make right."""
    for name in ("epsilon", "delta"):
        value = getattr(model, name)
        if isinstance(value, bool) or not isinstance(value, Real) or not math.isfinite(value):
            raise InputError(f"{name} must be a number. Got {value!r} instead.")
    if not model.delta > 0:
        raise InputError(f"delta must be above 0 for Gaussian noise (1e-6 is usual). Got {model.delta} instead.")
    if model.share not in get_args(Share):
        raise InputError(f"share must be one of {', '.join(get_args(Share))}. Got {model.share!r} instead.")
    for name in ("rows", "rounds"):
        value = getattr(model, name)
        whole = isinstance(value, int | np.integer) and not isinstance(value, bool) and value >= 1
        if not whole and not (name == "rounds" and value is None):
            raise InputError(f"{name} must be a whole number, 1 or more. Got {value!r} instead.")
    seed = model.random_state
    if seed is not None and (isinstance(seed, bool) or not isinstance(seed, int | np.integer) or seed < 0):
        raise InputError(f"random_state must be None, or a whole number from 0 for a simulation. Got {seed!r} instead.")
    if model.settings is not None:
        if not isinstance(model.settings, TrainingSettings):
            raise InputError("settings must be privrep.neural.rounds.TrainingSettings(...).")
        Poisson(model.settings.rate), Bound(model.settings.clip, 1)  # refuse what they would, before anything is spent
    if model.cache is not None and not isinstance(model.cache, str | os.PathLike):
        raise InputError(f"cache must be the path of a folder. Got {model.cache!r} instead.")
    _check_modules(model.representation, model.head, model.pretrained)
    _check_image(model.image, model.features)


def _check_modules(representation: Any, head: Any, pretrained: bool) -> None:
    """Raise InputError unless representation and head are modules, or names, that go together.

    Args:
        representation: a module, the name of a network, or None.
        head: a module or None.
        pretrained: whether the representation was trained on public data.
    """
    if isinstance(representation, str) and representation not in NETWORKS:
        raise InputError(
            f"representation must be a torch module or one of {', '.join(NETWORKS)}. Got {representation!r} instead."
        )
    if representation is not None and not isinstance(representation, str | nn.Module):
        raise InputError("representation must be a torch.nn.Module that takes rows of numbers.")
    if head is not None and not isinstance(head, nn.Module):
        raise InputError("head must be a torch.nn.Module that takes what the representation gives.")
    if head is not None and not isinstance(representation, nn.Module):
        raise InputError("a head goes with a representation: pass both modules, or neither.")
    if pretrained and not isinstance(representation, nn.Module):
        raise InputError("pretrained speaks of a representation: pass the module, or leave pretrained out.")


def _check_image(image: Any, features: Any) -> None:
    """Raise InputError unless the size of images and the public map are of their kinds."""
    if features is not None and features != "auto" and not isinstance(features, FeatureMap):
        raise InputError("features must be a map of privrep.neural.features (Edges, Dct, Frozen), None, or 'auto'.")
    if image is None:
        return
    sizes = tuple(image) if isinstance(image, list | tuple) else ()
    if len(sizes) != 3 or not all(isinstance(size, int | np.integer) and size >= 1 for size in sizes):
        raise InputError(f"image must be (height, width, channels), such as (28, 28, 1). Got {image!r} instead.")


def check_table(table: UserTable, image: tuple[int, int, int] | None, features: Any) -> None:
    """Raise InputError unless there is something to learn from, and rows are what the settings say.

    Args:
        table: the users' rows.
        image: (height, width, channels) of images, or None.
        features: a public map, "auto" or None.
    """
    if table.is_sparse or table.n_targets > 1 or table.n_features < 1:
        raise InputError("rows must be a dense array of numbers with one label each.")
    if table.n_users < 2:
        raise InputError("privacy of users needs users: give `groups` at least two of them.")
    if image is not None and math.prod(image) != table.n_features:
        raise InputError(f"rows have {table.n_features} numbers, which is not an image of {tuple(image)}.")
    taken = _count_taken(features)
    if taken is not None and taken != table.n_features:
        raise InputError(f"the feature map takes rows of {taken} numbers, and these have {table.n_features}.")


def _count_taken(features: Any) -> int | None:
    """Return how many numbers of a row a public map takes; None if there is no map yet."""
    if features is None or features == "auto":
        return None
    sizes = features.shape if isinstance(features, Frozen) else (features.height, features.width, features.channels)
    return math.prod(sizes)


def check_scores(both: Split, classes: int) -> None:
    """Raise InputError unless the head gives one score for each class."""
    if both.classes != classes:
        raise InputError(
            f"the head gives {both.classes} scores and there are {classes} classes; give it one score for each class."
        )
