"""`privrep federate serve CONFIG.toml`: what may stand in the file, and what it means.

Unknown keys and values of the wrong kind are refused by name; paths are relative to the file. What is learned, and from
which columns, travels to the nodes, so all of it is public: classes and categories are declared here.
"""

from __future__ import annotations

import difflib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, get_args

from privrep.data.categories import Categories, checked_classes, checked_lists
from privrep.errors import InputError
from privrep.federated.settings import FederationSettings, NoiseBy
from privrep.models.description import Columns, Config
from privrep.neural.config import (
    NAMES,
    NUMBER,
    PATH,
    TABLE,
    TEXT,
    TEXTS,
    TRAINING,
    WHOLE,
    YES,
    check_section,
    read_toml,
)
from privrep.neural.plan import Share
from privrep.privacy.accounting import RELATIONS

if TYPE_CHECKING:
    from privrep.federated.task import Task

HOST, PORT = "127.0.0.1", 9092
_SECTIONS = ("privacy", "model", "training", "federation", "server")
_KEYS: dict[str, dict[str, str]] = {
    "privacy": {"epsilon": NUMBER, "delta": NUMBER, "relation": TEXT, "seed": WHOLE},
    "federation": {
        "min_users": WHOLE,
        "min_nodes": WHOLE,
        "wait": NUMBER,
        "round_timeout": NUMBER,
        "resend": NUMBER,
        "poll": NUMBER,
        "noise": TEXT,
        "noise_nodes": WHOLE,
        "server_epsilon": NUMBER,
        "most_users": WHOLE,
    },
    "server": {"host": TEXT, "port": WHOLE, "keys": PATH},
    "training": TRAINING,
}
_MODELS: dict[str, dict[str, str]] = {  # of each kind; of those without a form, more than one is possible
    "table": {
        "kind": TEXT,
        "task": TEXT,
        "method": TEXT,
        "configuration": TEXT,
        "start": TEXT,
        "rank": WHOLE,
        "user": TEXT,
        "target": "",
        "features": TEXTS,
        "categories": TABLE,
        "classes": "",
        "loss": TEXT,
        "intercept": YES,
        "safety_net": YES,
        "scale": TABLE,
    },
    "neural": {
        "kind": TEXT,
        "share": TEXT,
        "network": TEXT,
        "image": "",
        "width": WHOLE,
        "columns": TABLE,
        "features": TEXT,
        "keep": WHOLE,
        "rows": WHOLE,
        "classes": NAMES,
    },
}
_COLUMNS = {"user": TEXT, "target": TEXT, "features": TEXTS}
_NEEDED = {"table": ("user", "target"), "neural": ("classes",)}
_CHOICES: dict[str, Sequence[str]] = {
    "privacy.relation": RELATIONS,
    "model.task": ("regression", "classification"),
    "model.share": get_args(Share),
    "model.network": ("mlp", "lenet", "none"),
    "federation.noise": get_args(NoiseBy),
    "training.server": ("sgd", "momentum", "adam"),
}
_AS_THEY_ARE = ("intercept", "safety_net", "method", "configuration", "start")  # in a table's `Config`


@dataclass(frozen=True)
class FederateConfig:
    """A file that was read."""

    task: Task
    settings: FederationSettings
    host: str
    port: int
    keys: Path | None


def read_config(path: Path) -> FederateConfig:
    """The settings in a TOML file; every mistake is one sentence that names the key."""
    found = read_toml(path)
    check_section("", found, dict.fromkeys(_SECTIONS, TABLE), (), {})
    sections = {name: dict(found.get(name, {})) for name in _SECTIONS}
    for name, known in _KEYS.items():
        check_section(name, sections[name], known, ("epsilon", "delta") if name == "privacy" else (), _CHOICES)
    privacy, model = sections["privacy"], sections["model"]
    kind = _check_model(model)
    if kind == "table":
        if sections["training"]:
            raise InputError('[training] is for model.kind = "neural"; leave it out.')
        task = _table_task(privacy, model)
    else:
        task = _neural_task(privacy, model, sections["training"])
    server = sections["server"]
    if not 0 <= server.get("port", PORT) < 1 << 16:
        raise InputError(f"server.port must lie from 0 to 65535. Got {server['port']} instead.")
    keys, settings = path.parent / server["keys"] if "keys" in server else None, _settings(sections["federation"])
    return FederateConfig(task, settings, server.get("host", HOST), server.get("port", PORT), keys)


def _settings(given: Mapping[str, Any]) -> FederationSettings:
    try:
        return FederationSettings(**given)
    except InputError as error:
        raise InputError(f"federation: {error}") from None


def _check_model(model: dict[str, Any]) -> str:
    """The kind of model; its section has keys of that kind alone."""
    kind = model.get("kind")
    if not isinstance(kind, str) or kind not in _MODELS:
        raise InputError(f'the config must say model.kind, "table" or "neural". Got {kind!r} instead.')
    known = _MODELS[kind]
    others = {key for key, form in known.items() if not form}
    stray = next((key for key in model if key not in known), None)
    if stray is not None:
        near = difflib.get_close_matches(stray, known, 1)
        there = f"did you mean {near[0]}?" if near else f"there are {', '.join(known)}."
        raise InputError(f'a model of kind "{kind}" has no key model.{stray}; {there}')
    for key in _NEEDED[kind]:
        if key not in model:
            raise InputError(f"the config must say model.{key}.")
    choices = {**_CHOICES, **({} if kind == "table" else {"model.features": ("auto", "edges", "dct", "none")})}
    check_section("model", {key: value for key, value in model.items() if key not in others}, known, (), choices)
    return kind


# Tables


def _table_task(privacy: Mapping[str, Any], model: Mapping[str, Any]) -> Task:
    from privrep.federated.task import TableTask

    columns = Columns(
        user=model["user"],
        targets=_targets(model["target"]),
        features=tuple(model.get("features", ())),
        categorical=tuple(model.get("categories", {})),
        categories=_categories(model.get("categories", {})),
        classes=_classes(model),
    )
    labels = model.get("task") == "classification"
    given = {name: model[name] for name in _AS_THEY_ARE if name in model}
    config = Config(
        rank=model.get("rank"),
        epsilon=float(privacy["epsilon"]),
        delta=float(privacy["delta"]),
        relation=privacy.get("relation", "replace-one-user"),
        seed=privacy.get("seed"),
        scale=_scale(model.get("scale"), columns),
        loss=model.get("loss", "log") if labels else None,
        **given,
    )
    return TableTask(config, columns)


def _targets(given: Any) -> tuple[str, ...]:
    listed = [given] if isinstance(given, str) else given
    if not (isinstance(listed, list) and listed and all(isinstance(name, str) and name for name in listed)):
        raise InputError(f"model.target must be the name of a column, or a list of names. Got {given!r} instead.")
    return tuple(listed)


def _categories(given: Mapping[str, Any]) -> tuple[Categories, ...]:
    for name, values in given.items():
        if not isinstance(values, list):
            raise InputError(f"model.categories.{name} must be the list of its values. Got {values!r} instead.")
    try:
        return tuple(checked_lists(given).values())
    except InputError as error:
        raise InputError(f"model.{error}") from None


def _classes(model: Mapping[str, Any]) -> Categories:
    if model.get("task", "regression") == "regression":
        for key in ("classes", "loss"):
            if key in model:
                raise InputError(f'model.{key} goes with model.task = "classification".')
        return ()
    if "classes" not in model:
        raise InputError("the config must list model.classes: nodes cannot select them together, so they are declared.")
    try:
        return checked_classes(model["classes"])
    except InputError as error:
        raise InputError(f"model.{error}") from None


def _scale(given: Mapping[str, Any] | None, columns: Columns) -> tuple[float, ...] | None:
    """The public size of each feature, in their order."""
    if given is None:
        return None
    if columns.categorical:
        raise InputError("model.scale is for tables of numbers; leave it or model.categories out.")
    for name in columns.features:
        value = given.get(name)
        if isinstance(value, bool) or not isinstance(value, int | float) or not value > 0:
            raise InputError(f"model.scale gives no positive number for feature {name!r}.")
    stray = next((name for name in given if name not in columns.features), None)
    if stray is not None:
        raise InputError(f"model.scale gives a size for {stray!r}, which is no feature.")
    return tuple(float(given[name]) for name in columns.features)


# Networks


def _neural_task(privacy: Mapping[str, Any], model: Mapping[str, Any], training: Mapping[str, Any]) -> Task:
    try:
        from privrep.federated.neural_task import NeuralTask
    except ImportError:
        raise InputError("neural models need PyTorch: pip install 'privrep[torch]'.") from None
    if privacy.get("relation", "replace-one-user") != "replace-one-user":
        raise InputError("neural models take the number of users as public: privacy.relation is replace-one-user.")
    network, classes = model.get("network", "none"), model["classes"]
    columns = model.get("columns")
    if columns is not None:
        check_section("model.columns", columns, _COLUMNS, tuple(_COLUMNS), {})
        columns = Columns(columns["user"], (columns["target"],), tuple(columns["features"]))
    return NeuralTask(
        classes=classes if isinstance(classes, int) else tuple(classes),
        epsilon=float(privacy["epsilon"]),
        delta=float(privacy["delta"]),
        seed=privacy.get("seed"),
        representation=None if network == "none" else network,
        image=_image(model.get("image")),
        feature_map=_feature_map(model),
        columns=columns,
        rounds=training.get("rounds"),
        training={name: value for name, value in training.items() if name != "rounds"},
        **{name: model[name] for name in ("share", "rows", "width") if name in model},
    )


def _image(given: Any) -> tuple[int, int, int] | None:
    if given is None:
        return None
    sizes = given if isinstance(given, list) else []
    if len(sizes) != 3 or not all(type(size) is int and size > 0 for size in sizes):
        raise InputError(f"model.image must be [height, width, channels]. Got {given!r} instead.")
    return sizes[0], sizes[1], sizes[2]


def _feature_map(model: Mapping[str, Any]) -> Any:
    from privrep.neural.features import Dct, Edges

    name = model.get("features", "auto")
    if name in ("auto", "none"):
        if "keep" in model:
            raise InputError('model.keep goes with model.features = "edges" or "dct"; leave it out.')
        return "auto" if name == "auto" else None
    if "image" not in model:
        raise InputError(f'model.features = "{name}" is of images: say model.image = [height, width, channels].')
    kept = {"keep": model["keep"]} if "keep" in model else {}
    return (Edges if name == "edges" else Dct)(*_image(model["image"]) or (), **kept)
