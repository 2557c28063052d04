"""The kinds of model folders, as data: a new kind joins by an entry of KINDS."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np

from privrep import PrivateFactorization, PrivateFedRep, PrivateFedRepClassifier, PrivateMarginSelector
from privrep.data.synthetic import make_population
from privrep.models.description import Columns, Config
from privrep.models.model import load
from privrep.users.memory import InMemoryUsers

try:
    import torch
except ImportError:
    torch = None  # type: ignore[assignment]

Numbers = list[np.ndarray]


@dataclass(frozen=True)
class Kind:
    """How models of one kind are made, with a folder of their run or without, and read; `other` is another run's."""

    fit: Callable[..., Any]
    load: Callable[[Path], Any]
    released: Callable[[Any], np.ndarray]  # what anyone may have
    predicted: Callable[[Any], Numbers] = lambda model: []  # with the heads
    other: dict[str, Any] = field(default_factory=lambda: {"epsilon": 7.0})
    heads: bool = True
    runs: bool = True  # a fit writes to the folder; if not, `fit` saves there
    saves: bool = True  # a federation writes to the folder of its run alone

    def numbers(self, model: Any) -> Numbers:
        return [self.released(model), *self.predicted(model)]


# Made-up users


@cache
def population() -> Any:
    rng = np.random.default_rng(0)
    return make_population(rng, 60, 4, 2, 6, 0.1).sample(rng)


def rows() -> tuple[Any, Any, Any]:
    table = population()
    return table.X, table.y, np.repeat(table.ids, table.sizes)


def fit_numbers(folder: Path | None, **changes: Any) -> PrivateFedRep:
    given = {"epsilon": 8.0, "random_state": 0, "run_folder": folder, **changes}
    return PrivateFedRep(2, **given).fit(*rows())


def fit_classes(folder: Path | None, **changes: Any) -> PrivateFedRepClassifier:
    X, y, groups = rows()
    given = {"epsilon": 8.0, "classes": [False, True], "random_state": 0, "run_folder": folder, **changes}
    return PrivateFedRepClassifier(2, **given).fit(X, y > 0, groups)


def predict_rows(model: Any) -> Numbers:
    return [model.predict(*rows()[::2])]


def fit_ratings(folder: Path | None, **changes: Any) -> PrivateFactorization:
    rng = np.random.default_rng(0)
    users, items = np.repeat(np.arange(60), 4), rng.integers(0, 5, 240)
    given = {"epsilon": 8.0, "items": range(5), "random_state": 0, "run_folder": folder, **changes}
    return PrivateFactorization(1, **given).fit(users, items, rng.normal(size=240))


def fit_selection(folder: Path | None, **changes: Any) -> PrivateMarginSelector:
    X, y, groups = rows()
    given = {"epsilon": 2.0, "candidates": 8, "rounds": 2, "random_state": 0, "run_folder": folder, **changes}
    return PrivateMarginSelector(1, **given).fit(X, np.where(y > 0, 1, -1), groups)


def learn_on_a_server(folder: Path, **changes: Any) -> Path:
    from privrep.federated.task import TableTask

    config = Config(2, **{"epsilon": 8.0, "delta": 1e-6, "seed": 0, **changes})
    task = TableTask(config, Columns("user", ("y",), tuple("abcd")))
    task.learn(InMemoryUsers(population()), folder, lambda page: None)
    return folder


def network_rows() -> tuple[Any, Any, Any]:
    rng = np.random.default_rng(0)
    y = rng.integers(0, 3, 160)
    X = (0.5 * rng.normal(size=(160, 6)) + 2 * np.eye(3, 6)[y]).astype(np.float32)
    return X, y, np.repeat(np.arange(40), 4)


def fit_network(folder: Path | None, **changes: Any) -> Any:
    from privrep import Centaur

    given = {"epsilon": 4.0, "classes": 3, "random_state": 0, "rows": 4, "rounds": 2, "share": "linear", **changes}
    return Centaur(run_folder=folder, **given).fit(*network_rows())


def predict_network(model: Any) -> Numbers:
    X, _, groups = network_rows()
    return [model.heads_.prior, model.heads_.shared, model.heads_.own, model.predict_proba(X, groups)]


def keep_own_network(folder: Path, **changes: Any) -> Any:
    X, y, groups = network_rows()
    own = fit_network(None, **changes).personalize(X[groups == 3], y[groups == 3])
    own.save(folder)
    return own


def encoders() -> tuple[Any, Any]:
    from privrep.multimodal.encoders import Projection

    return Projection(5, 4, 1), Projection(6, 4, 2).requires_grad_(False)


def fit_pairs(folder: Path | None, **changes: Any) -> Any:
    from privrep import DPClip
    from privrep.multimodal.pairs import labelled
    from privrep.multimodal.training import ClipSettings

    rng = np.random.default_rng(0)
    y = rng.integers(0, 3, 60)
    images = (rng.normal(size=(60, 5)) + 2 * np.eye(3, 5)[y]).astype(np.float32)
    pairs = labelled(images, y, np.eye(3, 6, dtype=np.float32), [0, 1, 2])
    settings = ClipSettings("bank", steps=3, page=2, rate=0.5, optimiser="sgd")
    given = {"epsilon": 4.0, "settings": settings, "random_state": 0, **changes}
    return DPClip(*encoders(), run_folder=folder, **given).fit(pairs)


def load_pairs(folder: Path) -> Any:
    from privrep import DPClip

    return DPClip.load(folder, *encoders())


def load_own_network(folder: Path) -> Any:
    from privrep import PersonalNetwork

    return PersonalNetwork.load(folder)


def load_network(folder: Path) -> Any:
    from privrep import Centaur

    return Centaur.load(folder)


def get_basis(model: Any) -> np.ndarray:
    return np.asarray(model.representation_)


KINDS: dict[str, Kind] = {
    "numbers": Kind(fit_numbers, PrivateFedRep.load, get_basis, predict_rows),
    "classes": Kind(fit_classes, PrivateFedRepClassifier.load, get_basis, predict_rows),
    "ratings": Kind(
        fit_ratings,
        PrivateFactorization.load,
        lambda model: model.item_factors_,
        lambda model: [model.predict([1, 2], [3, 4])],
    ),
    "selection": Kind(fit_selection, PrivateMarginSelector.load, get_basis, predict_rows),
    "a server": Kind(
        learn_on_a_server,
        load,
        lambda model: (load(model) if isinstance(model, Path) else model).representation.matrix,
        heads=False,
        saves=False,
    ),
}
if torch is not None:
    KINDS |= {
        "network": Kind(fit_network, load_network, lambda model: model.learned_.weights, predict_network),
        "one user's network": Kind(
            keep_own_network,
            load_own_network,
            lambda own: own.model.learned_.weights,
            lambda own: [own.predict_proba(network_rows()[0])],
            runs=False,
            saves=False,
        ),
        "pairs": Kind(fit_pairs, load_pairs, lambda model: model.weights_, heads=False),
    }
RUNS = [name for name, kind in KINDS.items() if kind.runs]
SAVED = [name for name, kind in KINDS.items() if kind.saves]


def same(one: Numbers, other: Numbers) -> bool:
    return len(one) == len(other) and all(np.array_equal(a, b) for a, b in zip(one, other, strict=True))


def contents(folder: Path) -> dict[str, Any]:
    """Every file; of a page the parts, for the library writes its metadata in a random order."""
    files = {str(path.relative_to(folder)): path.read_bytes() for path in folder.rglob("*") if path.is_file()}
    return {name: _page(data) if name.endswith(".safetensors") else data for name, data in files.items()}


def _page(data: bytes) -> tuple[Any, bytes]:
    end = 8 + int.from_bytes(data[:8], "little")
    return json.loads(data[8:end]), data[end:]
