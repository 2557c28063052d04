"""Modules that are trained and public features of rows, from the parameters of `Centaur`."""

from __future__ import annotations

import dataclasses
from collections.abc import Hashable
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray
from torch import nn

from privrep.errors import InputError
from privrep.estimators.progress import Bar
from privrep.neural.checks import check_parameters
from privrep.neural.features import Edges, FeatureMap, Frozen, count_edges
from privrep.neural.models import add_adapters, lenet, mlp
from privrep.neural.offers import frozen_map, linear_head, offer
from privrep.neural.plan import Options, SharingPlan, plan_sharing
from privrep.nn.flat_module import try_representation
from privrep.privacy.ledger import Budget

ON_FEATURES = ("linear", "directions", "nothing")  # what is shared takes public features, not rows


class Parameters(Protocol):
    """The parameters of `Centaur` that say what is shared, and what networks see of rows."""

    representation: Any
    head: Any
    pretrained: Any
    image: Any
    features: Any
    cache: Any
    on_progress: Any
    epsilon: Any
    delta: Any
    share: Any
    rounds: Any
    settings: Any

    @property
    def n_classes(self) -> int: ...


def plan_for(model: Parameters, users: int, features: int) -> SharingPlan:
    """Return what a fit would share; raise InputError for parameters that need no data to be refused.

    Args:
        model: the parameters.
        users: how many there are.
        features: numbers of a row.
    """
    check_parameters(model)
    options = Options(model.n_classes, count_features(model, features))
    representation, head = modules_of(model, features)
    if representation is not None:
        frozen = frozen_of(model, features)
        asked: dict[str, Any] = {"pretrained": model.pretrained, "share": model.share, "frozen": frozen}
        options = offer(representation, head, features, options, **asked)
    rounds = model.rounds if model.rounds is not None or model.settings is None else model.settings.rounds
    return plan_sharing(options, users, Budget(model.epsilon, model.delta).mu, model.share, rounds)


def modules_of(model: Parameters, features: int) -> tuple[nn.Module | None, nn.Module | None]:
    """Return the representation and head that were passed, or the parts of the network that was named.

    Args:
        model: the parameters.
        features: numbers of a row.
    """
    named, classes = model.representation, model.n_classes
    if named == "mlp":
        return mlp(features, classes=classes)
    if named == "lenet":
        if model.image is None or model.image[0] != model.image[1]:
            raise InputError("lenet takes square images: pass image=(side, side, channels).")
        return lenet(model.image[2], model.image[0], classes=classes)
    assert not isinstance(named, str)
    return named, model.head


def trained_modules(model: Parameters, plan: SharingPlan, features: int) -> tuple[nn.Module, nn.Module] | None:
    """Return the representation and the head that a plan trains; None if it shares something on public features.

    Args:
        model: the parameters.
        plan: what is shared.
        features: numbers of a row.
    """
    representation, head = modules_of(model, features)
    if plan.share in ON_FEATURES or representation is None:
        return None
    whole = representation if plan.share == "all" else add_adapters(representation, plan.rank)
    if head is None:
        head = linear_head(try_representation(whole, features).shape[1], model.n_classes)
    return whole, head


def count_features(model: Parameters, features: int) -> int:
    """Return how many public features a row has, of rows of `features` numbers."""
    if model.features == "auto":
        return features if model.image is None else count_edges(*model.image[:2])
    return int(features if model.features is None else model.features.size)


def map_of(model: Parameters, plan: SharingPlan, features: int) -> FeatureMap | None:
    """Return the map of all public features of rows. A plan may share a layer on some; heads have all.

    Args:
        model: the parameters.
        plan: what is shared.
        features: numbers of a row.
    """
    given: FeatureMap | str | None = model.features
    if given == "auto":
        frozen = frozen_of(model, features) if plan.share in ON_FEATURES else None
        if frozen is not None or model.image is None:
            return frozen
        height, width, channels = model.image
        return Edges(height, width, channels, count_edges(height, width))
    if isinstance(given, Frozen):
        cache, hook = model.cache or given.cache, model.on_progress or given.on_progress
        return dataclasses.replace(given, cache=cache, on_progress=hook)
    assert not isinstance(given, str)
    return given


def frozen_of(model: Parameters, features: int) -> Frozen | None:
    """Return a pretrained network as a public map; None if there is none, or if another map was asked for."""
    if not model.pretrained or model.features != "auto" or not isinstance(model.representation, nn.Module):
        return None
    return frozen_map(model.representation, features, model.image, model.cache, model.on_progress)


def counted_map(map_: FeatureMap | None, bar: Bar, total: int) -> FeatureMap | None:
    """Return the map; a frozen network tells a bar of its own how far it is.

    Args:
        map_: of public features.
        bar: shows it, and then the next bar.
        total: of the next bar.
    """
    if not isinstance(map_, Frozen):
        return map_
    counted, asked = bar.counting("features", lambda: bar.begin("reading", total)), map_.on_progress

    def on_progress(done: int, rows: int, /) -> None:
        for told in (counted, asked):
            if told is not None:
                told(done, rows)

    return dataclasses.replace(map_, on_progress=on_progress)


def columns_of(rows: NDArray[np.float32], raw: int, map_: FeatureMap | None) -> NDArray[np.float32]:
    """Return what heads and steps get of rows (rows, n_features).

    These are the rows themselves, where a representation takes them, and then the public features, of length one.

    Args:
        rows: as they came.
        raw: how many numbers of a row the representation takes; 0 for none.
        map_: of public features; None takes the rows as features.
    """
    own = rows if map_ is None else map_(rows)
    with np.errstate(all="ignore"):
        own = own / np.maximum(np.sqrt((own * own).sum(axis=1, keepdims=True)), np.float32(1e-12))
    return np.concatenate([rows, own], axis=1) if raw else own


def list_classes(classes: int | list[Hashable]) -> NDArray[Any]:
    """Return the labels of classes, (classes,), in the order of their scores; a number stands for 0, 1, ..."""
    return np.arange(classes) if isinstance(classes, int) else np.asarray(classes)
