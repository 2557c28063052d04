"""`privrep fit-clip CONFIG.toml`: what may stand in the file, and what it means.

Unknown keys and values of the wrong kind are refused by name; paths are relative to the file. Nothing here needs
PyTorch, so that a mistake is found before anything heavy is loaded.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from privrep.errors import InputError
from privrep.neural.config import NUMBER, PATH, SIZE, TABLE, TEXT, TEXTS, WHOLE, YES, check_section, read_toml

_KEYS: dict[str, dict[str, str]] = {
    "data": {
        "kind": TEXT,
        "path": PATH,
        "images": PATH,
        "labels": PATH,
        "transpose": YES,
        "part": TEXT,
        "coarse": YES,
        "size": SIZE,
        "colour": YES,
        "columns": TABLE,
        "most": WHOLE,
        "unit": TEXT,
        "users": PATH,
        "pairs_per_user": WHOLE,
        "classes": TEXTS,
        "templates": TEXTS,
        "bank": PATH,
        "test": TABLE,
    },
    "data.columns": {"image": TEXT, "label": TEXT, "user": TEXT},
    "data.test": {"path": PATH, "images": PATH, "labels": PATH, "part": TEXT, "held_out": WHOLE},
    "encoders": {
        "image": TEXT,
        "text": TEXT,
        "train": TEXT,
        "learn": TEXT,
        "dim": WHOLE,
        "size": WHOLE,
        "tokens": WHOLE,
        "cache": PATH,
    },
    "privacy": {"epsilon": NUMBER, "delta": NUMBER, "seed": WHOLE},
    "training": {
        "mechanism": TEXT,
        "steps": WHOLE,
        "batch": WHOLE,
        "sampling": TEXT,
        "clip": NUMBER,
        "rate": NUMBER,
        "optimiser": TEXT,
        "average": NUMBER,
        "page": WHOLE,
        "chunk": WHOLE,
        "temperature": NUMBER,
        "learn_temperature": YES,
        "cosine": YES,
        "centre": NUMBER,
    },
    "output": {"folder": PATH},
}
_NEEDED = {"data": ("kind", "unit"), "data.columns": ("image", "label"), "privacy": ("epsilon",)}
_SOURCES: dict[str, tuple[tuple[str, ...], tuple[str, ...]]] = {  # of each kind of data: keys it needs, and others
    "features": (("path",), ("users",)),
    "idx": (("images", "labels"), ("transpose", "users")),
    "cifar": (("path",), ("part", "coarse", "users")),
    "npz": (("path",), ()),
    "folder": (("path", "size"), ("colour",)),
    "parquet": (("path", "size", "columns"), ("colour",)),
    "flickr8k": (("path",), ("most",)),
}
_ANY_KIND = ("kind", "unit", "pairs_per_user", "classes", "templates", "bank", "test")
_TEST = {"idx": ("images", "labels"), "cifar": ("part",), "flickr8k": ("held_out",)}  # others: a path
_CHOICES: dict[str, Sequence[str]] = {
    "data.kind": tuple(_SOURCES),
    "data.part": ("train", "test"),
    "data.test.part": ("train", "test"),
    "data.unit": ("pair", "user"),
    "encoders.train": ("projections", "last", "all"),
    "encoders.learn": ("image", "both"),
    "training.mechanism": ("bank", "batch", "inside"),
    "training.sampling": ("poisson", "fixed"),
    "training.optimiser": ("sgd", "momentum", "adam"),
}
EFFICIENTNET, MINILM = "efficientnet", "minilm"


@dataclass(frozen=True)
class MultimodalConfig:
    """A file that was read: sections by name, checked but for what only the data can tell."""

    data: Mapping[str, Any]
    encoders: Mapping[str, Any]
    privacy: Mapping[str, Any]
    training: Mapping[str, Any]
    out: Path | None

    @property
    def mechanism(self) -> str:
        return str(self.training.get("mechanism", "bank"))

    @property
    def train(self) -> str:
        return str(self.encoders.get("train", "projections"))

    @property
    def both(self) -> bool:
        """Whether texts learn, too."""
        return bool(self.encoders.get("learn", "image" if self.mechanism == "bank" else "both") == "both")

    @property
    def linear(self) -> bool:
        """Whether images of features learn a linear map to fixed texts, each user clipped alone."""
        return self.mechanism == "bank" and self.pretrained is None and self.train == "projections" and not self.both

    @property
    def cosine(self) -> bool:
        """Whether images' embeddings count by their direction alone; where they need not, the loss is convex."""
        return bool(self.training.get("cosine", not self.linear))

    @property
    def pretrained(self) -> str | None:
        """The name or folder of a CLIP model, if that is the encoder."""
        image = self.encoders.get("image", EFFICIENTNET)
        return None if image == EFFICIENTNET or self.data["kind"] == "features" else str(image)


def read_config(path: Path) -> MultimodalConfig:
    """The settings in a TOML file; every mistake is one sentence that names the key."""
    found = read_toml(path)
    check_section("", found, {name: TABLE for name in _KEYS if "." not in name}, (), {})
    sections = {name: dict(found.get(name, {})) for name in _KEYS if "." not in name}
    for name, section in sections.items():
        check_section(name, section, _KEYS[name], _NEEDED.get(name, ()), _CHOICES)
    data = sections["data"]
    for key in ("columns", "test"):
        if key in data:
            check_section(f"data.{key}", data[key], _KEYS[f"data.{key}"], _NEEDED.get(f"data.{key}", ()), _CHOICES)
    _check_source(data)
    _check_users(data)
    _check_texts(data)
    for part in (data, data.get("test", {})):
        for key in ("images", "labels", "path", "users", "bank"):
            if key in part:
                part[key] = path.parent / part[key]
    encoders = sections["encoders"]
    if "cache" in encoders:
        encoders["cache"] = path.parent / encoders["cache"]
    image = encoders.get("image")
    if image is not None and (path.parent / image).is_dir():
        encoders["image"] = str(path.parent / image)
    folder = sections.pop("output").get("folder")
    config = MultimodalConfig(**sections, out=None if folder is None else path.parent / folder)
    _check_encoders(config)
    return config


def _check_source(data: Mapping[str, Any]) -> None:
    kind = data["kind"]
    needed, others = _SOURCES[kind]
    for key in needed:
        if key not in data:
            raise InputError(f'data of kind "{kind}" needs data.{key}, {_KEYS["data"][key]}.')
    for key in data:
        if key not in (*_ANY_KIND, *needed, *others):
            raise InputError(f'data of kind "{kind}" has no data.{key}; leave it out.')
    wanted = _TEST.get(kind, ("path",))
    if "test" in data and set(data["test"]) != set(wanted):
        raise InputError(f'data.test of kind "{kind}" says {" and ".join(wanted)}, and nothing else.')


def _check_users(data: Mapping[str, Any]) -> None:
    kind, unit = data["kind"], data["unit"]
    if kind == "flickr8k" and unit == "pair":
        raise InputError(
            'an image of Flickr8k has five captions, so a pair is no unit: say data.unit = "user", which protects an '
            "image with all its captions."
        )
    if unit == "user" and kind in ("idx", "cifar") and "users" not in data:
        raise InputError(f'data of kind "{kind}" does not tell users; name them in data.users, a line for each image.')
    if unit == "user" and kind == "parquet" and "user" not in data["columns"]:
        raise InputError("the config must say data.columns.user, the column that names the user of each row.")
    for key in ("users", "pairs_per_user") if unit == "pair" else ():
        if key in data:
            raise InputError(f'data.{key} goes with data.unit = "user"; leave it out, or protect users.')
    if unit == "user" and kind != "flickr8k" and "pairs_per_user" not in data:
        raise InputError("the config must say data.pairs_per_user: of each user the first so many take part.")
    if data.get("pairs_per_user", 1) < 1:
        raise InputError("data.pairs_per_user must be 1 or more.")


def _check_texts(data: Mapping[str, Any]) -> None:
    kind, bank = data["kind"], str(data.get("bank", ""))
    if bank and not bank.endswith((".txt", ".npz")):
        raise InputError("data.bank is a .txt file of public captions, a line each, or a .npz file of their features.")
    if bank.endswith(".npz") and kind != "features":
        raise InputError('data.bank with features goes with data.kind = "features"; give a .txt file of captions.')
    if "templates" in data and "classes" not in data:
        raise InputError("data.templates are filled with data.classes; name the classes.")
    if "classes" in data and bank:
        raise InputError("the public texts are either prompts of data.classes or those of data.bank; give one of them.")
    if kind in ("features", "flickr8k"):
        if "classes" in data and kind == "flickr8k":
            raise InputError("Flickr8k has captions, not classes; leave data.classes out.")
        return
    if "classes" not in data:
        raise InputError("the config must say data.classes, a list of the classes' public names, in the labels' order.")


def _check_encoders(config: MultimodalConfig) -> None:
    encoders, kind = config.encoders, config.data["kind"]
    if kind == "features" and ("image" in encoders or "size" in encoders or config.train != "projections"):
        raise InputError(
            "features are encoded images: leave out encoders.image and encoders.size, and train projections."
        )
    if config.pretrained is not None:
        for key in ("text", "size", "tokens", "dim"):
            if key in encoders:
                raise InputError(f"a CLIP model brings both encoders and their sizes; leave encoders.{key} out.")
    elif encoders.get("text", MINILM) != MINILM:
        raise InputError(
            f'encoders.text is "{MINILM}", unless encoders.image is a CLIP model. Got {encoders["text"]!r}.'
        )
    if config.mechanism == "inside" and (config.train != "projections" or not config.both):
        raise InputError('mechanism "inside" trains two projections: encoders.train = "projections", learn = "both".')
    if "dim" in encoders and encoders["dim"] < 1:
        raise InputError("encoders.dim must be 1 or more.")
