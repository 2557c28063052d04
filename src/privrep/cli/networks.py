"""Model folders that take images: networks, and numbers of public features, as commands read them."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from privrep.cli.image_rows import Wanted
from privrep.cli.predictions import Predictor
from privrep.cli.tables import no_heads
from privrep.errors import InputError, missing_package

if TYPE_CHECKING:
    from privrep.estimators.network import Centaur
    from privrep.estimators.network_regression import ReducedMap
    from privrep.estimators.personal_network import PersonalNetwork
    from privrep.models.model import Model


@dataclass(frozen=True)
class Network:
    """A network of all users, or the one of one user."""

    folder: Path
    model: Centaur
    personal: PersonalNetwork | None

    @property
    def ids(self) -> Any:
        """Return the users who have a head; None if there are none."""
        return None if self.model.heads_ is None else self.model.heads_.ids

    @property
    def wanted(self) -> Wanted:
        """Return what rows the model takes."""
        from privrep.data.table import id_kind

        text = self.ids is None or id_kind(self.ids) == "text"
        model, one = self.model, self.personal is not None
        image = model.image or image_of(model.map_)
        return Wanted(self.folder, model.n_features_in_, image, model.classes_.tolist(), text, one)

    def predictor(self, path: Path, proba: bool) -> Predictor:
        """Return the heads; what they say of a row of `path` that is no numbers is refused."""
        import numpy as np

        model, ids = self.model, np.zeros(1, dtype=np.int64) if self.personal is not None else self.ids
        if ids is None:
            raise no_heads(self.folder)

        def columns(X: Any, positions: Any) -> list[Any]:
            if self.personal is not None:
                found = self.personal.predict_proba(X)
            else:
                found = model.predict_proba(X, ids[positions]) if len(X) else np.zeros((0, model.n_classes))
            if not np.isfinite(found).all():
                raise InputError(f"{path} has a row whose numbers are too large; mend it or leave it out.")
            return [model.classes_[found.argmax(axis=1)], *(found.T if proba else ())]

        names = ["prediction", *(f"probability_{name}" for name in model.classes_.tolist() if proba)]
        return Predictor(self.folder, ids, columns, names, serves_newcomers=False)


@dataclass(frozen=True)
class Numbers:
    """A model of numbers on public features."""

    folder: Path
    fitted: Model
    features: ReducedMap

    @property
    def wanted(self) -> Wanted:
        """Return what rows the model takes."""
        from privrep.data.table import id_kind

        heads = self.fitted.heads
        text = heads is None or id_kind(heads.ids) == "text"
        return Wanted(self.folder, self.features.width, image_of(self.features.features), None, text)


def image_of(features: Any) -> tuple[int, int, int] | None:
    """Return the shape of the images that a public map takes, where it takes images."""
    from privrep.neural.features import Dct, Edges, Frozen

    if isinstance(features, Dct | Edges):
        return features.height, features.width, features.channels
    shape = features.shape if isinstance(features, Frozen) else ()
    return (shape[0], shape[1], shape[2]) if len(shape) == 3 else None


def open_model(folder: Path) -> Network | Numbers:
    """Read a folder that takes images; one that needs a module of the user's own is an InputError."""
    from privrep.models.networks import is_network

    if not is_network(folder):
        from privrep.estimators.network_regression import own_map, restored_map
        from privrep.models.model import load

        fitted = load(folder)
        assert fitted.public_map is not None
        if name := own_map(fitted.public_map):
            raise _needs_module(folder, name, "CentaurRegressor", "features")
        return Numbers(folder, fitted, restored_map(fitted.public_map, folder))
    try:
        from privrep.estimators.network import Centaur
        from privrep.estimators.personal_network import PersonalNetwork
        from privrep.neural.description import own_module
    except ImportError:
        raise missing_package("neural models need PyTorch", "torch") from None
    from privrep.models.folder import MODEL, ModelFolder
    from privrep.models.networks import NETWORK, is_personal

    where = ModelFolder(folder)
    described = where.read_description(NETWORK)
    with where.damage(MODEL):
        module = own_module(described)
    if module is not None:
        one = is_personal(where)
        option = "features" if isinstance(described["config"]["features"], dict) else "representation"
        raise _needs_module(folder, module, "PersonalNetwork" if one else "Centaur", option)
    if is_personal(where):
        personal = PersonalNetwork.load(folder)
        return Network(folder, personal.model, personal)
    return Network(folder, Centaur.load(folder), None)


def _needs_module(folder: Path, name: str, kind: str, option: str) -> InputError:
    return InputError(
        f"{folder} needs a module of yours, {name}, which no folder holds; use it in Python: "
        f"{kind}.load({str(folder)!r}, {option}=module)."
    )
