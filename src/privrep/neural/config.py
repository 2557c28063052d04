"""`privrep fit-neural CONFIG.toml`: what may stand in the file, and what it means.

Unknown keys and values of the wrong kind are refused by name; paths are relative to the file. Nothing here needs
PyTorch, so that a mistake is found before anything heavy is loaded.
"""

from __future__ import annotations

import difflib
import tomllib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, get_args

from privrep.errors import InputError
from privrep.neural.plan import Share

PATH, TEXT, WHOLE, NUMBER, YES, TABLE = "a path", "text", "a whole number", "a number", "true or false", "a table"
SIZE, NAMES, TEXTS = "[height, width]", "a whole number or a list of names", "a list of texts"
TRAINING = {
    "rounds": WHOLE,
    "clip": NUMBER,
    "step_size": NUMBER,
    "batch": WHOLE,
    "epochs": WHOLE,
    "rate": NUMBER,
    "server": TEXT,
    "server_rate": NUMBER,
    "momentum": NUMBER,
    "quantile": NUMBER,
}
_KEYS: dict[str, dict[str, str]] = {
    "data": {
        "kind": TEXT,
        "images": PATH,
        "labels": PATH,
        "transpose": YES,
        "path": PATH,
        "part": TEXT,
        "coarse": YES,
        "size": SIZE,
        "colour": YES,
        "columns": TABLE,
    },
    "data.columns": {"image": TEXT, "label": TEXT, "user": TEXT},
    "users": {"by": TEXT, "validation": NUMBER, "partition": TABLE},
    "users.partition": {"clients": WHOLE, "classes_per_client": WHOLE, "seed": WHOLE, "validation": NUMBER},
    "privacy": {"epsilon": NUMBER, "delta": NUMBER, "seed": WHOLE},
    "model": {"share": TEXT, "network": TEXT, "features": TEXT, "keep": WHOLE, "rows": WHOLE, "classes": NAMES},
    "training": TRAINING,
    "output": {"folder": PATH},
}
_NEEDED = {
    "data": ("kind",),
    "users.partition": ("clients", "classes_per_client"),
    "privacy": ("epsilon", "delta"),
    "model": ("classes",),
}
_SOURCES: dict[str, tuple[tuple[str, ...], tuple[str, ...]]] = {  # of each kind of data: keys it needs, and others
    "idx": (("images", "labels"), ("transpose",)),
    "cifar": (("path",), ("part", "coarse")),
    "npz": (("path",), ()),
    "folder": (("path", "size"), ("colour",)),
    "parquet": (("path", "size", "columns"), ("colour",)),
}
_NATURAL = {"npz": "writers", "folder": "folders", "parquet": "column"}
_CHOICES: dict[str, Sequence[str]] = {
    "data.kind": tuple(_SOURCES),
    "data.part": ("train", "test"),
    "users.by": tuple(_NATURAL.values()),
    "model.share": get_args(Share),
    "model.network": ("mlp", "lenet", "none"),
    "model.features": ("auto", "edges", "dct", "none"),
    "training.server": ("sgd", "momentum", "adam"),
}


@dataclass(frozen=True)
class NeuralConfig:
    """A file that was read: sections by name, checked but for what only the data can tell."""

    data: Mapping[str, Any]
    users: Mapping[str, Any]
    privacy: Mapping[str, Any]
    model: Mapping[str, Any]
    training: Mapping[str, Any]
    out: Path | None


def read_config(path: Path) -> NeuralConfig:
    """The settings in a TOML file; every mistake is one sentence that names the key."""
    found = read_toml(path)
    _check_section("", found, {name: TABLE for name in _KEYS if "." not in name})
    sections = {name: dict(found.get(name, {})) for name in _KEYS if "." not in name}
    for name, section in sections.items():
        _check_section(name, section, _KEYS[name])
    for inner in ("data.columns", "users.partition"):
        outer, key = inner.split(".")
        if key in sections[outer]:
            _check_section(inner, sections[outer][key], _KEYS[inner])
    _check_source(sections["data"])
    _check_users(sections["users"], sections["data"]["kind"])
    _check_model(sections["model"], sections["data"]["kind"])
    for key in ("images", "labels", "path"):
        if key in sections["data"]:
            sections["data"][key] = path.parent / sections["data"][key]
    folder = sections.pop("output").get("folder")
    return NeuralConfig(**sections, out=None if folder is None else path.parent / folder)


def read_toml(path: Path) -> dict[str, Any]:
    """What a TOML file says, unchecked."""
    if not path.is_file():
        raise InputError(f"there is no file {path}; check the path.")
    try:
        with open(path, "rb") as file:
            return tomllib.load(file)
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise InputError(f"{path} is not a TOML file: {error}.") from None


def _check_section(name: str, section: Mapping[str, Any], known: Mapping[str, str]) -> None:
    check_section(name, section, known, _NEEDED.get(name, ()), _CHOICES)


def check_section(
    name: str,
    section: Mapping[str, Any],
    known: Mapping[str, str],
    needed: Sequence[str],
    choices: Mapping[str, Sequence[str]],
) -> None:
    """Whether all keys of a section are known, those that are needed are there, and values are of their kind."""
    for key, value in section.items():
        full = f"{name}.{key}" if name else key
        if key not in known:
            near = difflib.get_close_matches(key, known, 1)
            there = f"did you mean {near[0]}?" if near else f"there are {', '.join(known)}."
            raise InputError(f"the config has no {'key' if name else 'section'} {full}; {there}")
        if not _fits(value, known[key]):
            raise InputError(f"{full} must be {known[key]}. Got {value!r} instead.")
        if full in choices and value not in choices[full]:
            raise InputError(f"{full} must be one of {', '.join(choices[full])}. Got {value!r} instead.")
    for key in needed:
        if key not in section:
            raise InputError(f"the config must say {name}.{key}, {known[key]}.")


def _fits(value: Any, kind: str) -> bool:
    whole = isinstance(value, int) and not isinstance(value, bool)
    if kind == SIZE:
        return isinstance(value, list) and len(value) == 2 and all(_fits(v, WHOLE) and v > 0 for v in value)
    if kind in (NAMES, TEXTS):
        named = isinstance(value, list) and bool(value) and all(isinstance(v, str) for v in value)
        return named or (kind == NAMES and whole and value > 0)
    checks = {
        PATH: isinstance(value, str) and bool(value),
        TEXT: isinstance(value, str),
        WHOLE: whole and value >= 0,
        NUMBER: whole or isinstance(value, float),
        YES: isinstance(value, bool),
        TABLE: isinstance(value, dict),
    }
    return checks[kind]


def _check_source(data: Mapping[str, Any]) -> None:
    kind = data["kind"]
    needed, others = _SOURCES[kind]
    for key in needed:
        if key not in data:
            raise InputError(f'data of kind "{kind}" needs data.{key}, {_KEYS["data"][key]}.')
    for key in data:
        if key not in ("kind", *needed, *others):
            raise InputError(f'data of kind "{kind}" has no data.{key}; leave it out.')
    for key in ("image", "label") if "columns" in data else ():
        if key not in data["columns"]:
            raise InputError(f"the config must say data.columns.{key}, the name of a column.")


def _check_users(users: Mapping[str, Any], kind: str) -> None:
    if ("by" in users) == ("partition" in users):
        raise InputError(
            'say who the users are: users.by = "column", "writers" or "folders" if the data tells, or users.partition '
            "= {clients = 100, classes_per_client = 5} to deal images to made-up ones."
        )
    if "by" in users and users["by"] != _NATURAL.get(kind):
        told = f'use users.by = "{_NATURAL[kind]}"' if kind in _NATURAL else "use users.partition"
        raise InputError(f'data of kind "{kind}" does not tell users by "{users["by"]}"; {told}.')
    if "partition" in users and "validation" in users:
        raise InputError("of dealt images, users.partition.validation says how many are held out; leave the other out.")
    if not 0 <= users.get("validation", 0.0) < 1:
        raise InputError(f"users.validation must lie from 0 to below 1. Got {users['validation']} instead.")


def _check_model(model: Mapping[str, Any], kind: str) -> None:
    if kind == "folder" and not isinstance(model["classes"], list):
        raise InputError("classes of an image folder have names: list those that are public in model.classes.")
    if "keep" in model and model.get("features", "auto") not in ("edges", "dct"):
        raise InputError('model.keep says how many features to keep; it goes with model.features = "edges" or "dct".')
