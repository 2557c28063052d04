"""A DP-CLIP model in public facts, by which a run is continued and a model is made of its folder again.

Modules are not written: code that a folder brings along could do anything. A hash of their weights is kept, so that a
run goes on, and a model is loaded, with the very modules it was made with. Of the private rows nothing is described but
how many users there are and how long rows are. The trained weights are on the last page of steps of the billboard.

Functions that read a description raise ValueError, LookupError or TypeError where it is not whole.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Protocol

import numpy as np
from torch import nn

from privrep.errors import InputError
from privrep.multimodal.towers import CENTRE_PAGE, Layout, mean_of
from privrep.multimodal.training import ClipSettings, Question
from privrep.nn.flat_module import fingerprints
from privrep.privacy.billboard import Billboard, Iterated
from privrep.privacy.ledger import Budget
from privrep.typing import Singles

Described = dict[str, Any]
Prints = Mapping[str, Mapping[str, str]]
_SAME = ("mechanism", "temperature", "learn_temperature", "cosine", "centre", "pairs_per_user")
_SIDES = ("image", "text")
_LATER = {"solver": "descent", "moment": 0.0}  # settings that older folders do not have


class Parameters(Protocol):
    """The parameters of a fit, as `DPClip` has them."""

    random_state: int | None

    @property
    def modules(self) -> tuple[nn.Module, nn.Module]: ...


def describe(model: Parameters, question: Question, budget: Budget, unit: str) -> Described:
    """Return all public facts of a fit, as JSON values.

    Args:
        model: the parameters of the fit.
        question: what is asked in a step, and the sizes of rows.
        budget: the budget of the fit.
        unit: the unit of privacy, "user" or "pair".
    """
    bank, layout = np.ascontiguousarray(question.layout.bank), question.layout
    described = {
        "user_count": question.users,
        "unit": unit,
        "image_numbers": layout.image_numbers,
        "text_numbers": layout.text_numbers,
        "bank": {"texts": len(bank), "numbers": bank.shape[1], "hash": hashlib.sha256(bank.tobytes()).hexdigest()[:32]},
        "config": {
            "epsilon": float(budget.epsilon),
            "delta": float(budget.delta),
            "settings": _settings_to_json(question.settings),
            "seed": None if model.random_state is None else int(model.random_state),
            **{name: getattr(model, name) for name in _SAME},
        },
        "modules": prints_of(model.modules),
    }
    return dict(json.loads(json.dumps(described)))


def _settings_to_json(settings: ClipSettings) -> Described:
    """Return the settings as files keep them: later ones are named only where they are not what they were before."""
    return {key: value for key, value in asdict(settings).items() if key not in _LATER or value != _LATER[key]}


def prints_of(modules: tuple[nn.Module, nn.Module]) -> Prints:
    """Return the class and the hashes of each of the two encoders."""
    named = zip(_SIDES, modules, strict=True)
    return {side: {"class": type(module).__name__, **fingerprints(module)} for side, module in named}


@dataclass(frozen=True)
class SavedPairs:
    """A model as its folder describes it."""

    described: Described
    billboard: Billboard

    @property
    def settings(self) -> ClipSettings:
        """Return the settings of the steps."""
        fields: Mapping[str, Any] = self.described["config"]["settings"]
        return ClipSettings(**{**fields, "betas": tuple(fields["betas"])})

    @property
    def arguments(self) -> dict[str, Any]:
        """Return the parameters of the `DPClip` of a folder, but for its encoders."""
        config = self.described["config"]
        same = {name: config[name] for name in ("epsilon", "delta", *_SAME)}
        return {**same, "settings": self.settings, "random_state": config["seed"]}

    @property
    def layout(self) -> Layout:
        """Return the sizes of rows; the bank itself is not kept."""
        numbers = int(self.described["bank"]["numbers"])
        sizes = int(self.described["image_numbers"]), int(self.described["text_numbers"])
        return Layout(*sizes, np.zeros((0, numbers), np.float32))

    @property
    def mean(self) -> Singles:
        """Return what was taken off the images' features; zeros if nothing was."""
        if not self.described["config"]["centre"]:
            return np.zeros(self.layout.image_numbers, np.float32)
        mean = mean_of(self.billboard.releases(CENTRE_PAGE)["sum"].value, int(self.described["user_count"]))
        if mean.shape != (self.layout.image_numbers,) or not np.isfinite(mean).all():
            raise ValueError("its mean is of other features")
        return mean

    @property
    def _last(self) -> Iterated:
        return self.billboard.read_iterated(f"steps-{-(-self.settings.steps // self.settings.page)}")

    @property
    def noise_multiplier(self) -> float:
        """Return the noise of every step, relative to what one user can change."""
        return float(self._last.noise["gradient"]["noise_multiplier"])

    def weights(self, size: int) -> Singles:
        """Return the trained weights, (size,): the ones that the last step ended with, or their average."""
        weights = np.asarray(self._last.state["average" if self.settings.average else "weights"], np.float32)
        if weights.shape != (size,) or not np.isfinite(weights).all():
            raise ValueError("its weights are of other encoders")
        return weights

    def check_modules(self, given: Prints, folder: Path) -> None:
        """Raise InputError unless these are the modules of the fit, but for the trained weights, which the folder has.

        Args:
            given: hashes of the encoders that were passed, by side.
            folder: the model's folder, for error sentences.
        """
        for side, prints in given.items():
            if prints["frozen"] != self.described["modules"][side]["frozen"]:
                raise InputError(
                    f"the {side} encoder of {folder} has other layers or frozen weights than the one given; pass the "
                    "one of the fit."
                )
