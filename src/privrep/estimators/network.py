"""CENTAUR with defaults that fit their budget: a shared representation of images, or of any rows, and private heads.

model = Centaur(classes=10, image=(28, 28, 1), epsilon=1.0, delta=1e-5).fit(X, y, groups)
model.predict(X, groups)
print(model.plan_.words, model.privacy_)
"""

from __future__ import annotations

import dataclasses
import warnings
from collections.abc import Hashable, Sequence
from pathlib import Path
from typing import Any, Literal, Self

import numpy as np
from numpy.typing import NDArray
from sklearn.base import BaseEstimator, ClassifierMixin
from sklearn.utils.validation import check_is_fitted, validate_data

from privrep.boundary import refusing
from privrep.errors import InputError, NothingLearned, needed
from privrep.estimators.accounts import check_account, open_account, warn_if_again
from privrep.privacy.population import Account, PopulationLedger

with needed("torch", "Centaur needs PyTorch", "torch"):
    from torch import nn

from privrep.data.table import UserTable, find_users
from privrep.estimators.base import warn_of_budget
from privrep.estimators.network_parts import (
    ON_FEATURES,
    columns_of,
    counted_map,
    list_classes,
    map_of,
    plan_for,
    trained_modules,
)
from privrep.estimators.personal_network import PersonalNetwork, softmax
from privrep.estimators.pipelines import remark_on_pipeline
from privrep.estimators.progress import Bar, watch
from privrep.heads.gradient import labels_of
from privrep.heads.neural import OwnHeads, fit_own_heads
from privrep.heads.store import FILE, has_heads, read_own_heads
from privrep.models.folder import BILLBOARD, MODEL, ModelFolder
from privrep.models.networks import NETWORK, PAGE, PERSONAL, is_personal
from privrep.models.promise import find_weaknesses
from privrep.neural.checks import (
    check_classes,
    check_parameters,
    check_table,
    count_unknown_labels,
    find_class_numbers,
    rows_of,
    warn_of_labels,
)
from privrep.neural.description import arguments, check_names, describe, moved_heads, plan_from_json, restore
from privrep.neural.features import Dct, Edges, FeatureMap
from privrep.neural.frozen import OnProgress
from privrep.neural.layers import Shape
from privrep.neural.plan import Share, SharingPlan
from privrep.neural.rounds import OnLoss, TrainingSettings, report_loss
from privrep.neural.training import SharedPart, learn
from privrep.privacy.events import Relation
from privrep.privacy.ledger import Budget
from privrep.privacy.protocol import Step, Users
from privrep.privacy.report import PrivacyReport
from privrep.privacy.run import OnPage, Run
from privrep.users.memory import InMemoryUsers

ROWS = 64
RELATION: Relation = "replace-one-user"


class Centaur(ClassifierMixin, BaseEstimator):
    """Learn classes from rows of users: a shared part privately, and a head of everyone's own.

    By default the shared part is a linear layer on public features, or nothing where the budget carries no more.

    Parameters
    ----------
    representation : torch module, "mlp" or "lenet", optional
        A module from rows (rows, n_features) to vectors, or the name of a network of the paper. Without one a linear
        layer on public features is shared.
    head : torch module, optional
        From the representation's vectors to scores, one for each class.
    classes : int or list
        How many classes there are, or their names. A public fact.
    epsilon, delta : float
        The whole budget of `fit`. The relation is replace-one-user.
    share : "auto", "all", "adapters", "linear", "directions" or "nothing"
        What is shared: all of the representation, its adapters, a linear layer, or directions in which classes differ.
        "auto" lets users, budget and sizes decide.
    pretrained : bool
        Whether the weights of `representation` as they are now are public and good for something. They may then stay
        frozen, and the module may have BatchNorm and take images.
    image : (height, width, channels), optional
        Rows are images of this shape, flattened.
    features : a map of `privrep.neural.features`, "auto" or None
        The public features of rows. "auto" takes edges of images.
    rows : int
        How many rows of a user take part in training, the first ones. A public number. Heads use up to 1,024.
    rounds, settings : int and `privrep.neural.rounds.TrainingSettings`, optional
        How many rounds there are, and what they do, where not as planned.
    random_state : None or int
        None: cryptographic noise. An integer: a reproducible simulation, which is not private and says so.
    run_folder : path, optional
        Keep ledger and billboard there while fitting, so that a killed fit can be continued without spending twice.
    population : path or PopulationLedger, optional
        The population ledger that the budget is reserved from: all fits on these users together keep to its budget.
    on_page, on_loss, on_progress : functions, optional
        Are told each page and the epsilon spent so far; each round and an estimate of the training loss as it began,
        NOT PRIVATE and for your screen; how many rows a frozen network has done, and of how many.
    cache : path, optional
        A folder for features of a frozen network, as private as the rows. Only its owner can read it.
    verbose : bool
        Show a progress bar on standard error, where that is a terminal, or in a notebook. Releases are the same.

    Attributes
    ----------
    classes_ : array of the classes, in the order of the columns of `predict_proba`, public
    plan_ : SharingPlan; `plan_.words` says what is shared and why, public
    privacy_ : PrivacyReport
    heads_ : the heads of the users, private; None in a model without them

    Formal guarantee: the shared part, `privacy_` and the billboard are (epsilon, delta)-DP at user level. Heads are not
    released.
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
        population: str | Path | PopulationLedger | None = None,
        on_page: OnPage | None = None,
        on_loss: OnLoss | None = None,
        cache: str | Path | None = None,
        on_progress: OnProgress | None = None,
        verbose: bool = False,
    ) -> None:
        self.representation, self.head = representation, head
        self.classes, self.epsilon, self.delta = classes, epsilon, delta
        self.share, self.pretrained, self.image, self.features = share, pretrained, image, features
        self.rows, self.rounds, self.settings = rows, rounds, settings
        self.random_state, self.run_folder, self.population = random_state, run_folder, population
        self.on_page, self.on_loss = on_page, on_loss
        self.cache, self.on_progress, self.verbose = cache, on_progress, verbose

    def __sklearn_tags__(self) -> Any:
        tags = super().__sklearn_tags__()
        tags.input_tags.allow_nan = True
        return tags

    def __sklearn_is_fitted__(self) -> bool:
        return hasattr(self, "learned_")

    def fit(self, X: Any, y: Any = None, groups: Any = None) -> Self:
        """Learn the shared part privately, then every user's head.

        Rows with a number that is not finite, or with a label that is no class, count for nothing.

        Args:
            X: rows (rows, n_features), or a `UserTable` whose y are class numbers.
            y: the class of each row, (rows,).
            groups: the user of each row, (rows,).
        """
        check_parameters(self)
        check_account(self)
        remark_on_pipeline(self)
        classes, places = check_classes(self.classes, self.head), isinstance(X, UserTable)
        if not isinstance(X, UserTable):
            codes = find_class_numbers(y, classes)
            if groups is None:
                raise InputError("fit needs groups: the user of each row. Privacy here is a promise to users.")
            rows = rows_of(X)
            validate_data(self, X, skip_check_array=True)  # keeps the names of columns
            X = UserTable.from_rows(rows, codes, groups)
        check_table(X, self.image, self.features)
        warn_of_labels(count_unknown_labels(X.y, classes, places=places), len(X.y), stacklevel=2)
        warn_of_budget(find_weaknesses(self.epsilon, self.delta, RELATION, X.n_users), stacklevel=2)
        return self._fit(dataclasses.replace(X, X=rows_of(X.X), y=X.y.astype(np.float64)))

    def _fit(self, table: UserTable) -> Self:
        """Learn from a table that was checked."""
        plan = self._begin(table.n_users, table.n_features)
        with watch(self.verbose, plan.rounds + 3) as bar:
            prepared = self._prepared(table, plan, bar)
            self._learn(InMemoryUsers(prepared), plan, prepared, bar, open_account(self, lambda: table.ids))
            self._finish(fit_own_heads(self.learned_, prepared))
        if plan.share == "nothing":
            warnings.warn(NothingLearned(plan.words), stacklevel=3)
        warn_if_again(self, lambda: table.ids, self.privacy_, stacklevel=4)
        return self

    def _begin(self, users: int, features: int) -> SharingPlan:
        """Return the plan that follows from public sizes; set the features of rows, and claim the folder, if any."""
        plan, known = self.planned(users, features), check_classes(self.classes, self.head)
        self.classes_ = list_classes(known)
        self.n_features_in_, self.map_ = features, map_of(self, plan, features)
        self.described_ = describe(self, plan, users, features)
        if self._folder is not None:
            check_names(self.described_)
            ModelFolder(self._folder).claim(NETWORK, self._public)
        return plan

    def _prepared(self, table: UserTable, plan: SharingPlan, bar: Bar | None = None) -> UserTable:
        """Return the table with rows as steps and heads get them. Rows whose label is no class are left out."""
        known = labels_of(table.y, self.n_classes).numpy() >= 0
        table = table if known.all() else table.with_rows(known)
        map_ = self.map_ if bar is None else counted_map(self.map_, bar, plan.rounds + 3)
        return dataclasses.replace(table, X=columns_of(table.X, self._shape_of(plan).raw, map_))

    def _learn(
        self,
        users: Users,
        plan: SharingPlan,
        watched: UserTable | None = None,
        bar: Bar | None = None,
        account: Account | None = None,
    ) -> None:
        """Make all releases. With a folder every charge and page is there before it is used.

        Args:
            users: whose rows are prepared, wherever those are.
            plan: what is shared.
            watched: the rows of which `on_loss` hears.
            bar: hears of pages, too.
            account: with the population ledger that the budget is reserved from; None: with none.
        """
        seed, heard, folder = self.random_state, self.on_loss, self._folder
        hooks = [hook for hook in (self.on_page, None if bar is None else bar.page) if hook is not None]
        given = trained_modules(self, plan, self.n_features_in_)

        def on_release(page: str, step: Step | None) -> None:
            for told in hooks:
                told(page, run.ledger.epsilon)
            if heard is not None and watched is not None:
                report_loss(heard, watched, page, step)

        budget = Budget(self.epsilon, self.delta)
        with Run.open(users, budget, seed=seed, folder=folder, on_release=on_release, account=account) as run:
            self.learned_: SharedPart = learn(run, plan, given, self._shape_of(plan), self.settings)
        self.plan_, self.ledger_, self.billboard_ = self.learned_.plan, run.ledger, run.billboard
        self.privacy_: PrivacyReport = run.ledger.report()

    def _finish(self, heads: OwnHeads | None) -> None:
        """Complete the model, with the heads of its users or without any."""
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
        if not self.__sklearn_is_fitted__():
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
        """Read a model folder. A module or frozen map that is part of what is shared must be passed again.

        Args:
            folder: of the model.
            representation, features: of the fit, with the same frozen weights.
            head: for another fit only.
            cache: where features of a frozen network are kept.
        """
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
        with refusing(where.tell_damage(MODEL)):
            model, wanted = cls(**given, cache=cache), int(saved.described["feature_count"])
            model.n_features_in_, known = wanted, check_classes(model.classes, model.head)
            model.classes_ = list_classes(known)
            model.described_ = {name: value for name, value in saved.described.items() if name != PERSONAL}
            model.map_ = map_of(model, plan, wanted)
            own = wanted if model.map_ is None else model.map_.size
            modules, shape = trained_modules(model, plan, wanted), model._shape_of(plan)
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
        """Return how many classes there are: declared, or as many as the head has scores for."""
        known = check_classes(self.classes, self.head)
        return known if isinstance(known, int) else len(known)

    def planned(self, users: int, features: int) -> SharingPlan:
        """Return what a fit would share. Costs nothing.

        Args:
            users: how many there are.
            features: numbers of a row.
        """
        return plan_for(self, users, features)

    def predict(self, X: Any, groups: Any = None) -> NDArray[Any]:
        """Return the class of each row by its user's own head, (rows,). A user who was not in `fit` is an error.

        Args:
            X: rows (rows, n_features).
            groups: the user of each row, (rows,).
        """
        scores = self._scores(X, groups)
        return np.asarray(self.classes_[scores.argmax(axis=1)])

    def predict_proba(self, X: Any, groups: Any = None) -> NDArray[np.float64]:
        """Return how likely each class is, (rows, classes), in the order of `classes_`; see `predict`."""
        return softmax(self._scores(X, groups))

    def score(self, X: Any, y: Any, groups: Any = None) -> float:
        """Return the accuracy of `predict` for classes y, (rows,). Not private, and not part of the model."""
        return float(np.mean(self.predict(X, groups) == np.asarray(y)))

    def personalize(self, X: Any, y: Any) -> PersonalNetwork:
        """Return the network of a user who was not there, from its own rows and what `fit` released.

        It runs on the user's own device, and costs no privacy.

        Args:
            X: rows (rows, n_features) of the user.
            y: their classes, (rows,).
        """
        rows = self._known_rows(X)
        codes = find_class_numbers(y, self.described_["config"]["classes"])
        table = UserTable.from_rows(rows, codes, np.zeros(len(codes), dtype=np.int64))
        prepared = dataclasses.replace(table, X=columns_of(table.X, self.learned_.raw, self.map_))
        return PersonalNetwork(self, fit_own_heads(self.learned_, prepared))

    def prepared(self, X: Any) -> NDArray[np.float32]:
        """Return rows (rows, n_features) as heads take them."""
        return columns_of(self._known_rows(X), self.learned_.raw, self.map_)

    def _known_rows(self, X: Any) -> NDArray[np.float32]:
        """Return rows for a model that is there; columns with names must come in the order of the fit."""
        check_is_fitted(self)
        rows = rows_of(X)
        if rows.shape[1] != self.n_features_in_:
            raise InputError(
                f"the model was fitted on rows of {self.n_features_in_} numbers. Got {rows.shape[1]} instead."
            )
        validate_data(self, X, reset=False, skip_check_array=True)
        return rows

    def _shape_of(self, plan: SharingPlan) -> Shape:
        raw = 0 if plan.share in ON_FEATURES else self.n_features_in_
        return Shape(self.n_classes, self.rows, raw, ordered=isinstance(self.map_, Dct | Edges))

    def _scores(self, X: Any, groups: Any) -> NDArray[np.float32]:
        rows = self._known_rows(X)
        if self.heads_ is None:
            raise InputError("this model has no heads: its folder had no private/. Use personalize(X, y) instead.")
        if groups is None or len(groups) != len(rows):
            raise InputError(f"groups must name the user of each of the {len(rows):,} rows.")
        users = find_users(self.heads_.ids, groups)
        if (users < 0).any():
            unknown = np.asarray(groups, dtype=object)[np.flatnonzero(users < 0)[0]]
            raise InputError(f"user {unknown!r} was not in the fit. Use personalize(X, y) with rows of that user.")
        return self.heads_.scores(self.learned_, columns_of(rows, self.learned_.raw, self.map_), users)
