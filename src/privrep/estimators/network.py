"""CENTAUR with defaults that fit their budget: a shared representation of images, or of any rows, and private heads.

model = Centaur(classes=10, image=(28, 28, 1), epsilon=1.0, delta=1e-5).fit(X, y, groups)
model.predict(X, groups)
print(model.plan_.words, model.privacy_)
"""

from __future__ import annotations

import dataclasses
import warnings
from collections.abc import Callable, Hashable, Sequence
from pathlib import Path
from typing import Any, Literal, Self

import numpy as np
from numpy.typing import NDArray

from privrep.data.table import UserTable, find_users
from privrep.errors import InputError, NothingLearned, needed

with needed("torch", "Centaur needs PyTorch", "torch"):
    from torch import nn

from privrep.estimators.personal_network import PersonalNetwork, softmax
from privrep.heads.gradient import labels_of
from privrep.heads.neural import OwnHeads, fit_own_heads
from privrep.heads.store import FILE, has_heads, read_own_heads
from privrep.models.folder import BILLBOARD, MODEL, ModelFolder
from privrep.models.networks import NETWORK, PAGE, PERSONAL, is_personal
from privrep.neural.checks import (
    check_parameters,
    check_table,
    class_numbers,
    known_classes,
    rows_of,
    unknown_labels,
    warn_of_labels,
)
from privrep.neural.description import arguments, check_names, describe, moved_heads, plan_from_json, restore
from privrep.neural.features import Dct, Edges, FeatureMap, Frozen, most_edges
from privrep.neural.frozen import OnProgress
from privrep.neural.models import adapted, lenet, mlp
from privrep.neural.offers import frozen_map, linear_head, offer
from privrep.neural.plan import Options, Share, SharingPlan, plan_sharing
from privrep.neural.rounds import OnLoss, TrainingSettings, report_loss
from privrep.neural.training import Shape, SharedPart, learn
from privrep.nn.flat_module import represented
from privrep.privacy.ledger import Budget, PrivacyReport
from privrep.privacy.protocol import Step, Users
from privrep.privacy.run import Run
from privrep.users.memory import InMemoryUsers

ROWS = 64
ON_FEATURES = ("linear", "directions", "nothing")  # what is shared takes public features, not rows


class Centaur:
    """Classes from rows of users, by a shared part learned privately and a head of everyone's own.

    classes         how many there are, or their names; public
    representation  a torch module from rows to vectors, and `head` one from those to scores, or "mlp" or "lenet", the
                    paper's; without them a linear layer on public features is shared. `pretrained` says that its
                    weights as they are now are public and good for something: they may then stay frozen, and it may
                    have BatchNorm and take images
    share           "auto" lets users, budget and sizes decide; "all" of the representation, its "adapters", a "linear"
                    layer, "directions" in which classes differ, or "nothing"
    image           (height, width, channels) of rows that are images; `features` is their public map, by default edges
    rows            of a user, the first so many take part in training: a public number. Heads use up to 1,024
    settings        of the rounds: `privrep.neural.rounds.TrainingSettings`; `rounds` says how many, where they differ
    random_state    a seed makes the run a simulation, which is not private and says so
    run_folder      where charges and releases are kept, so that the same call continues a fit that was killed
    on_page         is told each page that is posted and the epsilon spent so far
    on_loss         is told each round and an estimate of the training loss as it began: NOT PRIVATE, for your screen
    cache           a folder where features of a frozen network are kept, a file for each table of rows: as private as
                    the rows, readable by their owner only, and never removed
    on_progress     is told how many rows a frozen network has done, and of how many
    """

    def __init__(
        self,
        representation: nn.Module | Literal["mlp", "lenet"] | None = None,
        head: nn.Module | None = None,
        *,
        classes: int | Sequence[Hashable] | None = None,
        epsilon: float = 1.0,
        delta: float = 1e-5,
        share: Share = "auto",
        pretrained: bool = False,
        image: tuple[int, int, int] | None = None,
        features: FeatureMap | Literal["auto"] | None = "auto",
        rows: int = ROWS,
        rounds: int | None = None,
        settings: TrainingSettings | None = None,
        random_state: int | None = None,
        run_folder: str | Path | None = None,
        on_page: Callable[[str, float], None] | None = None,
        on_loss: OnLoss | None = None,
        cache: str | Path | None = None,
        on_progress: OnProgress | None = None,
    ) -> None:
        self.representation, self.head = representation, head
        self.classes, self.epsilon, self.delta = classes, epsilon, delta
        self.share, self.pretrained, self.image, self.features = share, pretrained, image, features
        self.rows, self.rounds, self.settings = rows, rounds, settings
        self.random_state, self.run_folder = random_state, run_folder
        self.on_page, self.on_loss = on_page, on_loss
        self.cache, self.on_progress = cache, on_progress

    def fit(self, X: Any, y: Any = None, groups: Any = None) -> Centaur:
        """Learn from rows X, their classes y and the user of each, or from a `UserTable` whose y are class numbers."""
        check_parameters(self)
        classes, places = known_classes(self.classes, self.head), isinstance(X, UserTable)
        if not isinstance(X, UserTable):
            codes = class_numbers(y, classes)
            if groups is None:
                raise InputError("fit needs groups: the user of each row. Privacy here is a promise to users.")
            X = UserTable.from_rows(rows_of(X), codes, groups)
        check_table(X, self.image, self.features)
        warn_of_labels(unknown_labels(X.y, classes, places=places), len(X.y), stacklevel=2)
        return self._fit(dataclasses.replace(X, X=rows_of(X.X), y=X.y.astype(np.float64)))

    def _fit(self, table: UserTable) -> Centaur:
        plan = self._begin(table.n_users, table.n_features)
        prepared = self._prepared(table, plan)
        self._learn(InMemoryUsers(prepared), plan, prepared)
        self._finish(fit_own_heads(self.learned_, prepared))
        if plan.share == "nothing":
            warnings.warn(NothingLearned(plan.words), stacklevel=3)
        return self

    def _begin(self, users: int, features: int) -> SharingPlan:
        """Return the plan that follows from public sizes; set the features of rows, and claim the folder, if any."""
        plan = self.planned(users, features)
        self.n_features_in_, self.map_ = features, self._map(plan, features)
        self.described_ = describe(self, plan, users, features)
        if self._folder is not None:
            check_names(self.described_)
            ModelFolder(self._folder).claim(NETWORK, self._public)
        return plan

    def _prepared(self, table: UserTable, plan: SharingPlan) -> UserTable:
        """Return the table with rows as steps and heads get them. Rows whose label is no class are left out."""
        known = labels_of(table.y, self.n_classes).numpy() >= 0
        table = table if known.all() else table.with_rows(known)
        return dataclasses.replace(table, X=self._columns(table.X, self._shape_of(plan).raw))

    def _learn(self, users: Users, plan: SharingPlan, watched: UserTable | None = None) -> None:
        """All that is released, of users whose rows are prepared, wherever those are; `watched` are the rows of which
        `on_loss` hears. With a folder every charge and page is there before it is used."""
        seed, told, heard, folder = self.random_state, self.on_page, self.on_loss, self._folder
        given = self._given(plan, self.n_features_in_)

        def on_release(page: str, step: Step | None) -> None:
            if told is not None:
                told(page, run.ledger.epsilon)
            if heard is not None and watched is not None:
                report_loss(heard, watched, page, step)

        budget = Budget(self.epsilon, self.delta)
        with Run.open(users, budget, seed=seed, folder=folder, on_release=on_release) as run:
            self.learned_: SharedPart = learn(run, plan, given, self._shape_of(plan), self.settings)
        self.plan_, self.ledger_, self.billboard_ = self.learned_.plan, run.ledger, run.billboard
        self.privacy_: PrivacyReport = run.ledger.report()

    def _finish(self, heads: OwnHeads | None) -> None:
        """The model is whole, with the heads of its users or without any."""
        self.heads_: OwnHeads | None = heads
        if self._folder is not None:
            ModelFolder(self._folder).finish(self._public, heads)

    @property
    def _public(self) -> dict[str, Any]:
        """Return what model.json and run.json hold."""
        return {"format": NETWORK.format, **self.described_}

    @property
    def _folder(self) -> Path | None:
        return None if self.run_folder is None else Path(self.run_folder)

    def save(self, folder: str | Path, *, overwrite: bool = False) -> None:
        """Write the model. Everything but folder/private is safe to publish."""
        if not hasattr(self, "learned_"):
            raise InputError("there is nothing to save before a fit.")
        self._write(folder, self._public, self.heads_, overwrite)

    def write_personal(self, folder: str | Path, head: OwnHeads, *, overwrite: bool = False) -> None:
        """Write the public part with the head of one user, as `PersonalNetwork.save` asks for."""
        self._write(folder, {**self._public, PERSONAL: True}, head, overwrite)

    def _write(self, folder: str | Path, public: dict[str, Any], heads: OwnHeads | None, overwrite: bool) -> None:
        check_names(self.described_)
        ModelFolder(Path(folder)).save(public, self.ledger_, self.billboard_, heads, overwrite=overwrite)

    @classmethod
    def load(
        cls,
        folder: str | Path,
        representation: nn.Module | None = None,
        head: nn.Module | None = None,
        features: FeatureMap | None = None,
        *,
        cache: str | Path | None = None,
    ) -> Self:
        """Read a model folder. A module that was passed to the fit and is part of what is shared must be passed again,
        with the same frozen weights; so must a frozen feature map. A head is of use for another fit only."""
        if is_personal(ModelFolder(Path(folder))):
            raise InputError(f"{folder} holds the network of one user; read it with PersonalNetwork.load.")
        return cls._read(folder, representation, head, features, cache)

    @classmethod
    def _read(
        cls,
        folder: str | Path,
        representation: nn.Module | None,
        head: nn.Module | None,
        features: FeatureMap | None,
        cache: str | Path | None,
    ) -> Self:
        where = ModelFolder(Path(folder))
        saved = where.read(NETWORK, PAGE)
        with where.damage(MODEL):
            plan = plan_from_json(saved.described["plan"])
            given = arguments(saved.described, where.path, representation, head, features)
        model, wanted = cls(**given, cache=cache), int(saved.described["feature_count"])
        model.n_features_in_ = wanted
        model.described_ = {name: value for name, value in saved.described.items() if name != PERSONAL}
        model.map_ = model._map(plan, wanted)
        own = wanted if model.map_ is None else model.map_.size
        modules, shape = model._given(plan, wanted), model._shape_of(plan)
        with where.damage(BILLBOARD):
            model.learned_ = restore(plan, saved.billboard[PAGE], modules, shape, own)
        model.heads_ = None
        if has_heads(where.path):
            with where.damage(FILE):
                model.heads_ = moved_heads(read_own_heads(where.path, model.learned_.head_sizes), saved.billboard[PAGE])
        model.plan_, model.privacy_ = model.learned_.plan, saved.ledger.report()
        model.ledger_, model.billboard_ = saved.ledger, saved.billboard
        return model

    @property
    def n_classes(self) -> int:
        """How many classes there are: declared, or as many as the head has scores for."""
        known = known_classes(self.classes, self.head)
        return known if isinstance(known, int) else len(known)

    @property
    def classes_(self) -> NDArray[Any]:
        """The classes, in the order of the columns of `predict_proba`."""
        known = known_classes(self.classes, self.head)
        return np.arange(known) if isinstance(known, int) else np.asarray(known)

    def planned(self, users: int, features: int) -> SharingPlan:
        """Return what a fit with so many users and rows of so many numbers would share. Costs nothing."""
        check_parameters(self)
        options = Options(self.n_classes, self._public_features(features))
        representation, head = self._modules(features)
        if representation is not None:
            frozen = self._frozen(features)
            asked: dict[str, Any] = {"pretrained": self.pretrained, "share": self.share, "frozen": frozen}
            options = offer(representation, head, features, options, **asked)
        return plan_sharing(options, users, Budget(self.epsilon, self.delta).mu, self.share, self._wanted_rounds)

    @property
    def _wanted_rounds(self) -> int | None:
        return self.rounds if self.rounds is not None or self.settings is None else self.settings.rounds

    def predict(self, X: Any, groups: Any) -> NDArray[Any]:
        """The class of each row, by its user's own head."""
        return np.asarray(self.classes_[self._scores(X, groups).argmax(axis=1)])

    def predict_proba(self, X: Any, groups: Any) -> NDArray[np.float64]:
        return softmax(self._scores(X, groups))

    def score(self, X: Any, y: Any, groups: Any) -> float:
        """Accuracy on these rows. Not private: for your eyes."""
        return float(np.mean(self.predict(X, groups) == np.asarray(y)))

    def personalize(self, X: Any, y: Any) -> PersonalNetwork:
        """A head for a user who was not there, from that user's rows: on the user's own device, no privacy spent."""
        codes = class_numbers(y, known_classes(self.classes, self.head))
        table = UserTable.from_rows(rows_of(X), codes, np.zeros(len(codes), dtype=np.int64))
        _same_features(table.n_features, self.n_features_in_)
        prepared = dataclasses.replace(table, X=self._columns(table.X, self.learned_.raw))
        return PersonalNetwork(self, fit_own_heads(self.learned_, prepared))

    def prepared(self, X: Any) -> NDArray[np.float32]:
        """Return rows (rows, n_features) as heads take them."""
        rows = rows_of(X)
        _same_features(rows.shape[1], self.n_features_in_)
        return self._columns(rows, self.learned_.raw)

    def _shape_of(self, plan: SharingPlan) -> Shape:
        raw = 0 if plan.share in ON_FEATURES else self.n_features_in_
        return Shape(self.n_classes, self.rows, raw, ordered=isinstance(self.map_, Dct | Edges))

    def _scores(self, X: Any, groups: Any) -> NDArray[np.float32]:
        rows = rows_of(X)
        _same_features(rows.shape[1], self.n_features_in_)
        if self.heads_ is None:
            raise InputError("this model has no heads: its folder had no private/. Use personalize(X, y) instead.")
        if groups is None or len(groups) != len(rows):
            raise InputError(f"groups must name the user of each of the {len(rows):,} rows.")
        users = find_users(self.heads_.ids, groups)
        if (users < 0).any():
            unknown = np.asarray(groups, dtype=object)[np.flatnonzero(users < 0)[0]]
            raise InputError(f"user {unknown!r} was not in the fit. Use personalize(X, y) with rows of that user.")
        return self.heads_.scores(self.learned_, self._columns(rows, self.learned_.raw), users)

    def _modules(self, features: int) -> tuple[nn.Module | None, nn.Module | None]:
        """The representation and head that were passed, or those of the network that was named."""
        named, classes = self.representation, self.n_classes
        if named == "mlp":
            return mlp(features, classes=classes)
        if named == "lenet":
            if self.image is None or self.image[0] != self.image[1]:
                raise InputError("lenet takes square images: pass image=(side, side, channels).")
            return lenet(self.image[2], self.image[0], classes=classes)
        assert not isinstance(named, str)
        return named, self.head

    def _public_features(self, features: int) -> int:
        if self.features == "auto":
            return features if self.image is None else most_edges(*self.image[:2])
        return features if self.features is None else self.features.size

    def _map(self, plan: SharingPlan, features: int) -> FeatureMap | None:
        """The public features of rows, all of them: a plan may share a layer on some, heads have all."""
        if self.features == "auto":
            frozen = self._frozen(features) if plan.share in ON_FEATURES else None
            if frozen is not None or self.image is None:
                return frozen
            height, width, channels = self.image
            return Edges(height, width, channels, most_edges(height, width))
        if isinstance(self.features, Frozen):
            cache, hook = self.cache or self.features.cache, self.on_progress or self.features.on_progress
            return dataclasses.replace(self.features, cache=cache, on_progress=hook)
        return self.features

    def _frozen(self, features: int) -> Frozen | None:
        """Return a pretrained network as a public map; None if there is none, or if another map was asked for."""
        if not self.pretrained or self.features != "auto" or not isinstance(self.representation, nn.Module):
            return None
        return frozen_map(self.representation, features, self.image, self.cache, self.on_progress)

    def _given(self, plan: SharingPlan, features: int) -> tuple[nn.Module, nn.Module] | None:
        representation, head = self._modules(features)
        if plan.share in ON_FEATURES or representation is None:
            return None
        whole = representation if plan.share == "all" else adapted(representation, plan.rank)
        if head is None:
            head = linear_head(represented(whole, features).shape[1], self.n_classes)
        return whole, head

    def _columns(self, rows: NDArray[np.float32], raw: int) -> NDArray[np.float32]:
        """Return what heads and steps get of rows: the rows themselves, where a representation takes them, and then the
        public features, of length one."""
        own = rows if self.map_ is None else self.map_(rows)
        with np.errstate(all="ignore"):
            own = own / np.maximum(np.sqrt((own * own).sum(axis=1, keepdims=True)), np.float32(1e-12))
        return np.concatenate([rows, own], axis=1) if raw else own


def _same_features(got: int, wanted: int) -> None:
    if got != wanted:
        raise InputError(f"the model was fitted on rows of {wanted} numbers. Got {got} instead.")
