"""A fitted model of a table: the public part (representation, ledger, billboard) and the users' heads.

In a folder it is laid out as `models.folder` says.
"""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np

from privrep.errors import InputError
from privrep.heads.heads import Heads
from privrep.heads.posterior import count_doubt
from privrep.heads.regression import HEAD_KINDS, POSTERIOR
from privrep.heads.store import FILE, has_heads, read_heads
from privrep.heads.uncertainty import SAYS_NOTHING
from privrep.linear.registry import DEFAULT, find_estimator
from privrep.local.losses import Loss
from privrep.local.prior import HeadPrior
from privrep.local.representation import Representation, read_representation
from privrep.models.description import Columns, Config, make_loss
from privrep.models.folder import BILLBOARD, MODEL, Described, ModelFolder, ModelKind
from privrep.privacy.billboard import Billboard
from privrep.privacy.ledger import Ledger
from privrep.privacy.report import PrivacyReport

FORMAT = "privrep-model/2"
CLASSES_PAGE = "classes"  # on which they are selected


@dataclass(frozen=True)
class Model:
    """A fitted model: everything a fit leaves behind."""

    config: Config
    representation: Representation
    privacy: PrivacyReport
    ledger: Ledger = field(repr=False)
    billboard: Billboard = field(repr=False)
    columns: Columns = field(default_factory=Columns)
    heads: Heads | None = None
    public_map: Described | None = None  # how features were made of rows; None: columns are features

    @property
    def loss(self) -> Loss | None:
        """Return what the heads minimise; None: squares."""
        return make_loss(self.config, self.columns)

    @property
    def classes_selected(self) -> bool:
        """Return whether the classes were selected privately rather than declared."""
        return CLASSES_PAGE in self.billboard


def explain_silence(model: Model) -> str:
    """Return why a model has no intervals, in one sentence; the empty string where it has."""
    config, prior = model.config, model.representation.prior
    if isinstance(prior, HeadPrior):
        return ""
    name = find_estimator(config.method, config.ratings)
    if config.loss is not None:
        instead = "classes have probabilities in their place" if config.loss == "log" else "classes have none"
        reason = f"intervals are for numbers, and {instead}."
    elif config.ratings:
        reason = f"{name} measures no errors of ratings, of which intervals would be made."
    elif config.configuration == "paper":
        reason = "the configuration of a paper has no prior of heads, of which intervals are made; use the default."
    else:
        others = (
            f"heads of {name} have no prior" if config.method != DEFAULT else "it was made before heads had a prior"
        )
        reason = f"{others}, of which intervals are made; fit PrivateFedRep."
    return SAYS_NOTHING + reason


def check_intervals(model: Model) -> None:
    """Raise InputError, with the reason, if a model has no intervals."""
    if silence := explain_silence(model):
        raise InputError(silence)


def with_heads(model: Model, heads: Heads) -> Model:
    """Return the model with these heads."""
    return replace(model, heads=heads)


def describe(config: Config, columns: Columns, public_map: Described | None = None) -> Described:
    """Return what was asked for, as JSON has it.

    Args:
        config: settings of the fit.
        columns: of the table.
        public_map: facts of the map that made the features; None: columns are features.
    """
    mapped = {} if public_map is None else {"public_map": public_map}
    described: Described = json.loads(json.dumps({"config": asdict(config), "columns": columns.to_json(), **mapped}))
    return described


def _complete(stands: Described) -> Described:
    """Return a run.json with the fields that later versions added."""
    config, columns = Config.from_json(stands["config"]), Columns.from_json(stands["columns"])
    return stands | describe(config, columns)


def _check(described: Any, path: Path) -> None:
    """Raise InputError unless a file describes a model of this format."""
    if str(described["format"]).startswith("privrep-neural/"):
        folder = path.parent
        raise InputError(f"{folder} holds a neural model: read it in Python, by Centaur.load({str(folder)!r}).")
    if str(described["format"]).startswith("privrep-margin/"):
        raise InputError(f"{path.parent} holds a selection, which PrivateMarginSelector.load can read, in Python.")
    if described["format"] != FORMAT:
        raise InputError(f"{path} is not a model this version of privrep can read ({FORMAT}).")


TABLE = ModelKind(
    FORMAT,
    _check,
    "settings, columns or users",
    names_difference=False,
    occupied="is not empty",
    completed=_complete,
)
"""Folders of models of numbers, classes and ratings."""


def save(model: Model, folder: Path, *, overwrite: bool = False) -> None:
    """Write a model to a folder, all of it or nothing.

    Args:
        model: to write.
        folder: to make.
        overwrite: whether a model that stands there is replaced.
    """
    ModelFolder(folder).save(_describe_model(model), model.ledger, model.billboard, model.heads, overwrite=overwrite)


def finish(model: Model, folder: Path) -> None:
    """Write the heads and, last, model.json into the folder of a run: from then on it is a model."""
    ModelFolder(folder).finish(_describe_model(model), model.heads)


def _describe_model(model: Model) -> Described:
    """Return the content of model.json."""
    return {"format": FORMAT, **describe(model.config, model.columns, model.public_map)}


def load(path: Path) -> Model:
    """Read a model folder; raise InputError if it is damaged in whatever way."""
    folder = ModelFolder(path)
    described = folder.read_description(TABLE)
    with folder.damage(MODEL):
        config, columns = Config.from_json(described["config"]), Columns.from_json(described["columns"])
        loss, public_map = make_loss(config, columns), described.get("public_map")
        if public_map is not None:
            int(public_map["width"]), int(public_map["keep"]), public_map["features"], public_map["words"]
    billboard = folder.read_billboard()
    with folder.damage(BILLBOARD):
        if "representation" not in billboard:
            raise ValueError("there is no representation in it")
        page = billboard["representation"]
        representation = read_representation(page.arrays, page.facts["derived"])
        d = representation.matrix.shape[0]
    with folder.damage(MODEL):
        config.check(d)
        if config.ratings != (representation.ratings is not None) or (config.ratings and len(columns.categories) != 1):
            raise ValueError("it is of ratings in one place and not in another")
        if public_map is None and (columns.features or columns.categorical) and len(columns.feature_names) != d:
            raise ValueError(f"its columns make {len(columns.feature_names):,} features, and the model has {d:,}")
    ledger = folder.read_ledger(billboard)
    heads = None
    if has_heads(path):
        with folder.damage(FILE):
            heads = read_heads(path)
            _check_heads(heads, representation, loss)
    return Model(config, representation, ledger.report(), ledger, billboard, columns, heads, public_map)


def _check_heads(heads: Heads, representation: Representation, loss: Loss | None) -> None:
    """Raise ValueError unless heads fit the representation and hold finite numbers alone."""
    d, k = representation.head_matrix.shape
    if (heads.shared.shape[1], heads.own.shape[1]) != (k, d):
        raise ValueError("its heads are of another representation")
    if loss is not None and heads.targets != loss.outputs:
        raise ValueError("its heads are of other classes")
    prior = representation.prior
    if not np.isin(heads.kind, np.arange(len(HEAD_KINDS))).all():
        raise ValueError("its heads are of unknown kinds")
    if (not representation.serves_newcomers and (heads.kind >= POSTERIOR).any()) or (
        prior is not None and heads.targets != prior.targets
    ):
        raise ValueError("its heads are of another prior")
    if heads.means is not None and heads.means.shape[1] > d:
        raise ValueError("its heads are of other features")
    numbers = [heads.intercept, heads.shared, heads.own]
    if prior is not None and (heads.origin is None or heads.doubt is None):
        raise ValueError("its heads are without a prior, and the model has one")
    if heads.origin is not None and heads.doubt is not None:
        if (heads.origin.shape[1], heads.doubt.shape[1]) != (k, count_doubt(k)):
            raise ValueError("its heads are of another prior")
        numbers += [heads.origin, heads.doubt]
    if not all(np.isfinite(each).all() for each in numbers):
        raise ValueError("its heads hold numbers that are not finite")
