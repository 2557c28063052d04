"""A DP-CLIP model in a folder.

folder/model.json        settings and sizes; written last, so a folder without it is a run under way
folder/run.json          the same, while a run is under way
folder/ledger.jsonl      every charge
folder/billboard/        every release and where walks ended: the trained weights are on the last page of steps
folder/private/          of use while a run is under way; all the rest is safe to publish

Modules are not written: code that a folder brings along could do anything. A hash of their weights is kept, so that a
run goes on, and a model is loaded, with the very modules it was made with. Of the private rows nothing is described but
how many users there are and how long rows are.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from torch import nn

from privrep.errors import InputError
from privrep.models import model as models
from privrep.multimodal.centre import PAGE, mean_of
from privrep.multimodal.inspection import FORMAT, read_described
from privrep.multimodal.towers import Layout
from privrep.multimodal.training import ClipSettings, Question
from privrep.neural.folders import claim_folder, finish_folder, new_folder
from privrep.neural.saving import fingerprint
from privrep.privacy.billboard import Billboard, Iterated
from privrep.privacy.ledger import Budget, Ledger, read_ledger
from privrep.typing import Singles

if TYPE_CHECKING:
    from privrep.estimators.clip import DPClip

Described = dict[str, Any]
_SAME = ("mechanism", "temperature", "learn_temperature", "cosine", "centre", "pairs_per_user")
_SIDES = ("image", "text")


def describe(model: DPClip, question: Question, budget: Budget, unit: str) -> Described:
    """All public facts of a fit: what a run must agree in to be continued, and what a model is made of again."""
    bank, layout = np.ascontiguousarray(question.layout.bank), question.layout
    described = {
        "format": FORMAT,
        "user_count": question.users,
        "unit": unit,
        "image_numbers": layout.image_numbers,
        "text_numbers": layout.text_numbers,
        "bank": {"texts": len(bank), "numbers": bank.shape[1], "hash": hashlib.sha256(bank.tobytes()).hexdigest()[:32]},
        "config": {
            "epsilon": float(budget.epsilon),
            "delta": float(budget.delta),
            "settings": asdict(question.settings),
            "seed": None if model.random_state is None else int(model.random_state),
            **{name: getattr(model, name) for name in _SAME},
        },
        "modules": {side: _prints(module) for side, module in zip(_SIDES, model.modules, strict=True)},
    }
    return dict(json.loads(json.dumps(described)))


def _prints(module: nn.Module) -> dict[str, str]:
    every, frozen = (fingerprint(module, trainable=trainable) for trainable in (True, False))
    return {"class": type(module).__name__, "all": every, "frozen": frozen}


def claim(folder: Path, described: Described) -> None:
    """Make the folder of a run, or check that the one that stands is of this very run."""
    claim_folder(folder, described, "settings, weights, texts or users")


def finish(folder: Path, described: Described) -> None:
    """Write model.json into the folder of a run: from then on it is a model."""
    finish_folder(folder, described)


def save(folder: Path, described: Described, ledger: Ledger, billboard: Billboard, overwrite: bool) -> None:
    """Write a model to a folder, all of it or nothing."""
    with new_folder(folder, overwrite) as new:
        ledger.write(new / "ledger.jsonl")
        billboard.write(new / "billboard")
        finish(new, described)


@dataclass(frozen=True)
class Saved:
    """A model folder as it was read."""

    described: Described
    ledger: Ledger
    billboard: Billboard
    folder: Path

    @property
    def settings(self) -> ClipSettings:
        with models.damage_explained(self.folder, "model.json"):
            fields: Mapping[str, Any] = self.described["config"]["settings"]
            return ClipSettings(**{**fields, "betas": tuple(fields["betas"])})

    @property
    def layout(self) -> Layout:
        """Sizes of rows; the bank itself is not kept."""
        with models.damage_explained(self.folder, "model.json"):
            numbers = int(self.described["bank"]["numbers"])
            sizes = int(self.described["image_numbers"]), int(self.described["text_numbers"])
            return Layout(*sizes, np.zeros((0, numbers), np.float32))

    @property
    def mean(self) -> Singles:
        """What was taken off the images' features; zeros if nothing was."""
        if not self.described["config"]["centre"]:
            return np.zeros(self.layout.image_numbers, np.float32)
        with models.damage_explained(self.folder, "billboard"):
            mean = mean_of(self.billboard.releases(PAGE)["sum"].value, int(self.described["user_count"]))
            if mean.shape != (self.layout.image_numbers,) or not np.isfinite(mean).all():
                raise ValueError("its mean is of other features")
            return mean

    @property
    def _last(self) -> Iterated:
        return self.billboard.iterated(f"steps-{-(-self.settings.steps // self.settings.page)}")

    @property
    def noise_multiplier(self) -> float:
        """Of every step, relative to what one user can change."""
        with models.damage_explained(self.folder, "billboard"):
            return float(self._last.noise["gradient"]["noise_multiplier"])

    def weights(self, size: int) -> Singles:
        """Where the last walk ended: the trained weights."""
        with models.damage_explained(self.folder, "billboard"):
            weights = np.asarray(self._last.state["average" if self.settings.average else "weights"], np.float32)
            if weights.shape != (size,) or not np.isfinite(weights).all():
                raise ValueError("its weights are of other encoders")
            return weights


def read(folder: Path) -> Saved:
    """Read a model folder. One that is damaged is an InputError."""
    path = folder / "model.json"
    if not path.is_file():
        raise InputError(
            f"{folder} holds a run that was not finished; call fit again with the same arguments to continue it."
            if (folder / "run.json").is_file()
            else f"{folder} is not a model folder: it has no model.json."
        )
    described = read_described(path)
    with models.damage_explained(folder, "ledger.jsonl"):
        ledger = read_ledger(folder / "ledger.jsonl")
    with models.damage_explained(folder, "billboard"):
        billboard = Billboard.read(folder / "billboard")
    return Saved(described, ledger, billboard, folder)


def arguments(saved: Saved) -> dict[str, Any]:
    """With which the `DPClip` of a folder is made again, but for its encoders."""
    with models.damage_explained(saved.folder, "model.json"):
        config = saved.described["config"]
        same = {name: config[name] for name in ("epsilon", "delta", *_SAME)}
        return {**same, "settings": saved.settings, "random_state": config["seed"]}


def check_modules(saved: Saved, modules: tuple[nn.Module, nn.Module]) -> None:
    """Whether these are the modules of the fit but for what was trained, which the folder has."""
    for side, module in zip(_SIDES, modules, strict=True):
        with models.damage_explained(saved.folder, "model.json"):
            wanted = saved.described["modules"][side]["frozen"]
        if _prints(module)["frozen"] != wanted:
            raise InputError(
                f"the {side} encoder of {saved.folder} has other layers or frozen weights than the one given; pass the "
                "one of the fit."
            )
