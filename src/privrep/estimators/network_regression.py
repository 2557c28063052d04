"""Numbers from images or other wide rows: public features, reduced to what the budget carries, and `PrivateFedRep`.

model = CentaurRegressor(image=(28, 28, 1), epsilon=1.0, delta=1e-5).fit(X, y, groups)
model.predict(X, groups)
print(model.plan_.words, model.privacy_)

The features are public functions of one row each. All that is learned, charged and kept is what `PrivateFedRep` has.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal, Self

import numpy as np

from privrep.data.table import UserTable, factorize, plain
from privrep.errors import InputError
from privrep.estimators.accounts import check_account
from privrep.estimators.regression import PrivateFedRep
from privrep.estimators.rows import GivenRows, Named
from privrep.heads.heads import Heads
from privrep.heads.personal import PersonalHead
from privrep.linear.starts import random_basis
from privrep.models import model as models
from privrep.neural.features import Dct, Edges, FeatureMap, Frozen, count_edges, from_json, rows_of
from privrep.neural.frozen import OnProgress
from privrep.neural.plan import FeaturePlan, plan_features
from privrep.privacy.ledger import Budget
from privrep.privacy.population import PopulationLedger
from privrep.typing import Array, Singles

PROJECTION = "projection of features"  # names the public basis


@dataclass(frozen=True)
class ReducedMap:
    """Map rows to `keep` public numbers: the first of a feature map, or a public projection of all.

    Formal guarantee: the numbers of a row are a function of that row alone, to the last bit, where the feature map's
    are. The projection is drawn from its sizes, and every product is one of a single row.
    """

    features: FeatureMap | None  # None: the rows themselves
    width: int  # numbers of a row
    keep: int

    @property
    def size(self) -> int:
        """Return how many features there are before they are reduced."""
        return self.width if self.features is None else self.features.size

    @property
    def ordered(self) -> bool:
        """Return whether the first features say most, so that no projection is needed."""
        return isinstance(self.features, Dct | Edges)

    def __call__(self, rows: Singles) -> Array:
        """Return (rows, keep) of rows (rows, width)."""
        found = rows if self.features is None else self.features(rows)
        found = np.where(np.isfinite(found), found, np.nan)  # a row that is not finite is one that is missing
        if self.keep >= self.size or self.ordered:
            return np.asarray(found[:, : self.keep], dtype=np.float64)
        basis = random_basis(self.size, self.keep, PROJECTION)
        with np.errstate(invalid="ignore", over="ignore"):
            return np.asarray((found[:, None, :].astype(np.float64) @ basis)[:, 0])

    def to_json(self) -> dict[str, Any]:
        """Return the public facts that a model folder keeps; of a module a hash of its weights."""
        described = None if self.features is None else self.features.to_json()
        if isinstance(self.features, Frozen):
            from privrep.nn.flat_module import fingerprints

            described = {**self.features.to_json(), **fingerprints(self.features.module)}
        return {"features": described, "width": self.width, "keep": self.keep, "words": self.words}

    @property
    def words(self) -> str:
        """Return what the features of a row are, for people."""
        what = "the numbers themselves" if self.features is None else self.features.describe()
        if self.keep >= self.size:
            return what
        return f"{'the first' if self.ordered else 'a public projection to'} {self.keep:,} of {what}"


class CentaurRegressor(PrivateFedRep):
    """Learn numbers from images or other wide rows, by `PrivateFedRep` on public features of them.

    Predictions, intervals, newcomers, heads, warnings and what is charged are those of `PrivateFedRep`. The relation is
    replace-one-user: how many users there are decides how many features are kept, and must be public.

    Parameters
    ----------
    features : a map of `privrep.neural.features`, or a torch module, optional
        The public features of rows: `Edges`, `Dct` or `Frozen`. A torch module stays frozen; passing it states that its
        weights were learned from public data. By default edges of images, and the rows themselves if there is no image.
    image : (height, width, channels), optional
        Rows are images of this shape, flattened.
    keep : int or "auto"
        How many features are used: the first of `Edges` or `Dct`, a public projection of others. "auto" keeps as many
        as users and budget carry; `planned` says how many, and costs nothing.
    cache, on_progress
        Of a frozen network: a folder of its features, as private as the rows, and a function that is told how far it
        is, as `Centaur` has them.
    rank, epsilon, delta, unknown_users, random_state, run_folder, population, verbose
        As `PrivateFedRep` has them.

    A row with a number that is not finite is left out of a fit, and predicted by its user's mean features.
    """

    relation = "replace-one-user"
    fit_intercept = True
    feature_scale = feature_covariance = categories = missing_indicator = start = None
    configuration, safety_net, missing = "default", True, "drop"

    def __init__(
        self,
        features: Any = None,
        *,
        image: tuple[int, int, int] | None = None,
        keep: int | Literal["auto"] = "auto",
        rank: int | Literal["auto"] = "auto",
        epsilon: float = 1.0,
        delta: float = 1e-6,
        unknown_users: Literal["prior", "refuse"] = "prior",
        random_state: int | None = None,
        run_folder: str | Path | None = None,
        population: str | Path | PopulationLedger | None = None,
        cache: str | Path | None = None,
        on_progress: OnProgress | None = None,
        verbose: bool = False,
    ) -> None:
        self.features, self.image, self.keep, self.rank = features, image, keep, rank
        self.epsilon, self.delta, self.unknown_users = epsilon, delta, unknown_users
        self.random_state, self.run_folder, self.population = random_state, run_folder, population
        self.cache, self.on_progress, self.verbose = cache, on_progress, verbose

    def __sklearn_tags__(self) -> Any:
        tags = super().__sklearn_tags__()
        tags.input_tags.sparse = False
        return tags

    @classmethod
    def paper(cls, rank: int, **parameters: Any) -> Self:
        """Raise InputError: the papers know no public features."""
        raise InputError("the configuration of a paper is for tables; use PrivateFedRep.paper.")

    def planned(self, users: int, features: int) -> FeaturePlan:
        """Return what a fit would use. Costs nothing.

        Args:
            users: how many there are.
            features: numbers of a row.
        """
        budget, found = Budget(self.epsilon, self.delta), self._feature_map(features)
        size = features if found is None else found.size
        what = "numbers of a row" if found is None else found.describe()
        return plan_features(what, size, users, budget.mu, self._wanted(size), isinstance(found, Dct | Edges))

    def fit(self, X: Any, y: Any, groups: Any = None, sample_weight: Any = None) -> Self:
        """Learn the representation of the rows' features privately, then every user's head.

        Args:
            X: rows (rows, numbers).
            y: targets, (rows,), or (rows, targets).
            groups: the user of each row.
            sample_weight: (rows,), as `PrivateFedRep.fit` has it.
        """
        if groups is None:
            raise InputError("fit needs groups: the user of each row. Privacy here is a promise to users, not to rows.")
        check_account(self)
        rows = rows_of(X)
        self.plan_ = self.planned(len(factorize(plain(groups))[0]), rows.shape[1])
        self.map_ = ReducedMap(self._feature_map(rows.shape[1]), rows.shape[1], self.plan_.keep)
        return super().fit(X, y, groups, sample_weight)

    def _given(self, X: Any) -> GivenRows:
        rows = rows_of(X)
        self.n_features_in_ = rows.shape[1]
        return GivenRows(Named(self.map_(rows)))

    def _known(self, X: Any) -> Any:
        return Named(self._mapped(X))

    def _mapped(self, X: Any) -> Array:
        """Return the features (rows, keep) of rows."""
        rows = rows_of(X)
        if rows.shape[1] != self.n_features_in_:
            raise InputError(
                f"the model was fitted on rows of {self.n_features_in_} numbers. Got {rows.shape[1]} instead."
            )
        return self.map_(rows)

    def _as_personal(self, heads: Heads, table: UserTable) -> PersonalHead:
        return replace(super()._as_personal(heads, table), read=self._mapped)

    @property
    def _public_map(self) -> dict[str, Any]:
        return self.map_.to_json()

    @classmethod
    def load(
        cls, folder: str | Path, features: Any = None, *, cache: str | Path | None = None, on_progress: Any = None
    ) -> Self:
        """Read a model folder. A module that was passed to the fit must be passed again, with the same weights.

        Args:
            folder: of the model.
            features: the module of the fit, or the `Frozen` map, where there was one.
            cache, on_progress: as the constructor has them.
        """
        path = Path(folder)
        loaded = models.load(path)
        if loaded.public_map is None:
            raise InputError(f"{folder} holds a model of a table; load it with PrivateFedRep.load.")
        found = restored_map(loaded.public_map, path, features)
        estimator = cls(
            found.features, keep=found.keep, cache=cache, on_progress=on_progress, **cls._parameters(loaded)
        )
        estimator.map_ = replace(found, features=estimator._feature_map(found.width))
        estimator.n_features_in_ = found.width
        estimator._adopt(loaded)
        return estimator

    @classmethod
    def _parameters(cls, loaded: models.Model) -> dict[str, Any]:
        kept = super()._parameters(loaded)
        return {name: kept[name] for name in ("rank", "epsilon", "delta", "random_state")}

    def _wanted(self, size: int) -> int | None:
        keep = self.keep
        if keep == "auto":
            return None
        whole = isinstance(keep, int | np.integer) and not isinstance(keep, bool)
        if not whole or not 1 <= keep <= size:
            raise InputError(f'keep must be "auto" or a whole number from 1 to {size}. Got {keep!r} instead.')
        return int(keep)

    def _feature_map(self, width: int) -> FeatureMap | None:
        """Return the public map of rows of this width; None: the rows themselves."""
        given, image = self.features, self.image
        if image is not None and (len(image) != 3 or math.prod(image) != width):
            raise InputError(f"rows have {width} numbers, which is not an image of {tuple(image)}.")
        if given is None:
            return None if image is None else Edges(*image, count_edges(image[0], image[1]))
        if isinstance(given, Frozen):
            hook = self.on_progress or given.on_progress
            return replace(given, cache=self.cache or given.cache, on_progress=hook)
        if isinstance(given, Dct | Edges):
            return given
        return _frozen(given, (width,) if image is None else tuple(image), self.cache, self.on_progress)


def restored_map(described: dict[str, Any], folder: Path, given: Any = None) -> ReducedMap:
    """Return the map of a model folder; raise InputError if it needs a module and another, or none, was given.

    Args:
        described: what `ReducedMap.to_json` wrote.
        folder: named by refusals.
        given: the module of the fit, or its `Frozen` map.
    """
    known, width, keep = described["features"], int(described["width"]), int(described["keep"])
    if known is None or known["map"] != "frozen":
        if given is not None:
            raise InputError(f"{folder} needs no module to be loaded; leave features out.")
        return ReducedMap(None if known is None else from_json(known), width, keep)
    what = f"the features of {folder} are those of {known['name']}, a module of yours"
    if given is None:
        from privrep.neural.pretrained import load_named_map

        given = load_named_map(known)
    if given is None:
        raise InputError(f"{what}; pass it again: CentaurRegressor.load(folder, features=module).")
    found = given if isinstance(given, Frozen) else _frozen(given, tuple(known["shape"]), None, None)
    from privrep.nn.flat_module import fingerprints

    if fingerprints(found.module)["all"] != known["all"] or (found.shape, found.size) != (
        tuple(known["shape"]),
        known["size"],
    ):
        raise InputError(f"{what}, and the one given has other layers or weights; pass the one of the fit.")
    return ReducedMap(found, width, keep)


def own_map(described: dict[str, Any]) -> str:
    """Return the name of the module of the user's own that a map needs; empty if it needs none."""
    known = described["features"]
    if known is None or known["map"] != "frozen":
        return ""
    from privrep.neural.pretrained import EFFICIENTNET

    return "" if known["name"] == EFFICIENTNET else str(known["name"])


def _frozen(module: Any, shape: tuple[int, ...], cache: Any, on_progress: OnProgress | None) -> Frozen:
    from privrep.neural.frozen import load_torch

    if not isinstance(module, load_torch().nn.Module):
        raise InputError("features must be a map of privrep.neural.features (Edges, Dct, Frozen) or a torch module.")
    return Frozen.of(module, shape, cache=cache, on_progress=on_progress)
