"""Classification under a pure epsilon: the scikit-learn face of the exponential mechanism over representations."""

from __future__ import annotations

from pathlib import Path
from typing import Any, Literal, Self

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray
from sklearn.base import BaseEstimator, ClassifierMixin
from sklearn.utils.validation import check_consistent_length, check_is_fitted, column_or_1d, validate_data

from privrep.data.frames import read_frame
from privrep.data.table import UserTable, plain
from privrep.errors import InputError, ResumeError
from privrep.estimators.accounts import check_account, open_account, warn_if_again
from privrep.estimators.base import rows_to_predict, warn_if_weak
from privrep.estimators.checks import (
    as_rank,
    as_seed,
    check_features,
    check_infinite_targets,
    feature_names,
    refuse_missing,
)
from privrep.estimators.leaks import refuse_target_names, refuse_target_values
from privrep.estimators.pipelines import remark_on_pipeline
from privrep.estimators.progress import Bar, watch
from privrep.estimators.rows import read_known
from privrep.estimators.strangers import ONLY_PERSONALIZE, Groups, known_users
from privrep.heads.margin_fitting import MarginHeads, MarginRule, fit_margin_heads
from privrep.heads.personal import MarginHead
from privrep.heads.store import FILE, has_heads, ids_to_arrow, read_margin_heads
from privrep.linear.methods.lipschitz_selection import lipschitz_selection
from privrep.linear.methods.margin_selection import check_margin, margin_selection
from privrep.linear.nets import Zooming
from privrep.local.representation import Representation, read_representation
from privrep.models.description import Columns
from privrep.models.folder import BILLBOARD, MODEL, RUN, ModelFolder, write_json
from privrep.models.margin import MARGIN, PAGE, SETTINGS
from privrep.privacy.events import Relation
from privrep.privacy.ledger import Budget
from privrep.privacy.population import PopulationLedger
from privrep.privacy.protocol import Step
from privrep.privacy.run import Run
from privrep.typing import Array
from privrep.users.memory import InMemoryUsers

_ROWS = 1 << 22  # numbers of a block of rows whose images are computed at a time


class PrivateMarginSelector(ClassifierMixin, BaseEstimator):
    """Personal classifiers of two classes over a shared representation chosen by the exponential mechanism.

    User i's label of x is the sign of <x, U v_i>: U is chosen privately by how well users can do with it, v_i stays
    with the user. It takes no delta, and where labels have a margin its accuracy does not depend on the number of
    features: candidates live in a random projection to few dimensions.

    Parameters
    ----------
    rank : int
        Columns of U.
    epsilon, delta : float
        The whole budget of `fit`; all of epsilon is spent on choices, which need no delta.
    margin : float
        rho: a row counts as right if <x, U v_i> is beyond it. What nearly all rows have in the best U; more than that
        makes it harder to find. For the margin loss only.
    radius : float
        The ball that features lie in. For the margin loss, rows outside it are scaled onto it, each user its own; for
        the others U^T x is shortened to it.
    norm : float
        Gamma: heads are no longer than this while U is chosen.
    projected : "auto", int or None
        The projection's dimension; "auto" takes it from margin, radius and norm (30 for losses without a margin), None
        does not project.
    candidates, rounds : int
        Each round chooses one of so many candidates, around the last choice and nearer from round to round. One round
        is the exponential mechanism over one random set.
    loss : "margin", "logistic", "hinge" or "absolute"
        What a user's heads are judged by when U is chosen, and fitted by: 0-1 loss for "margin".
    configuration : "default" or "paper"
        U is chosen on the first half of every user's rows. Heads use all rows, or, with "paper", the second half: the
        papers' proofs need it, and privacy does not.
    classes : pair
        The two labels, a public fact: the second is the positive one. They are not read off the data.
    relation : "replace-one-user" or "add-or-remove-one-user"
    random_state : None or int
        None: cryptographic noise. An integer: a reproducible simulation, which is not private and says so.
    run_folder : path, optional
        Keep ledger and billboard there while fitting, so that a killed fit can be continued without spending twice.
    population : path or PopulationLedger, optional
        The population ledger that the budget is reserved from: all fits on these users together keep to its budget.
    verbose : bool
        Show a progress bar on standard error, where that is a terminal, or in a notebook. Releases are the same.

    Attributes
    ----------
    representation_ : (n_features, rank) array, public; its columns are not orthonormal where there was a projection
    privacy_ : PrivacyReport
    classes_ : array of the two labels
    users_, heads_ : the ids of the users and their heads, (users, rank): private; None in a model without them

    Formal guarantee: `representation_`, `privacy_` and the billboard are epsilon-DP at user level, without a delta.
    Heads are not released; if they are collected, the guarantee is joint differential privacy (the billboard model).
    """

    def __init__(
        self,
        rank: int = 2,
        *,
        epsilon: float = 1.0,
        delta: float = 0.0,
        margin: float = 0.3,
        radius: float = 1.0,
        norm: float = 1.0,
        projected: int | Literal["auto"] | None = "auto",
        candidates: int = 1024,
        rounds: int = 10,
        loss: str = "margin",
        configuration: str = "default",
        classes: Any = (-1, 1),
        relation: Relation = "replace-one-user",
        random_state: int | None = None,
        run_folder: str | Path | None = None,
        population: str | Path | PopulationLedger | None = None,
        verbose: bool = False,
    ) -> None:
        self.rank = rank
        self.epsilon = epsilon
        self.delta = delta
        self.margin = margin
        self.radius = radius
        self.norm = norm
        self.projected = projected
        self.candidates = candidates
        self.rounds = rounds
        self.loss = loss
        self.configuration = configuration
        self.classes = classes
        self.relation = relation
        self.random_state = random_state
        self.run_folder = run_folder
        self.population = population
        self.verbose = verbose

    def __sklearn_tags__(self) -> Any:
        tags = super().__sklearn_tags__()
        tags.input_tags.sparse = True
        tags.classifier_tags.multi_class = False
        return tags

    def fit(self, X: Any, y: Any, groups: Groups | None = None) -> Self:
        """Choose the representation privately, then fit every user's head.

        Args:
            X: rows (rows, n_features), which may be sparse.
            y: the label of each row, (rows,).
            groups: the user of each row, (rows,).
        """
        if groups is None:
            raise InputError("fit needs groups: the user of each row. Privacy here is a promise to users, not to rows.")
        self._check()
        check_account(self, self._budget)
        remark_on_pipeline(self)
        classes = _two(self.classes)
        frame = read_frame(X)
        refuse_target_names(() if frame is None else frame.names, y)
        X, y = self._validated(X, y)
        if y.dtype.kind in "biu":
            refuse_target_values(X, pa.array(y), feature_names(self), None)
        table = UserTable.from_rows(X, _codes(y, classes), plain(groups))
        warn_if_weak(self, table.ids)
        self.classes_, self.described_ = classes, self._describe(table)
        folder = None if self.run_folder is None else ModelFolder(Path(self.run_folder))
        if folder is not None:
            self._claim(folder, table)
        with watch(self.verbose, int(self.rounds) + 2) as bar:
            self.representation_ = self._learn(table, bar).matrix
            heads = self._heads(table, self.configuration == "paper")
        self.users_: NDArray[Any] | None = table.ids
        self.heads_: Array | None = heads
        if folder is not None:
            folder.finish(self.described_, MarginHeads(table.ids, heads))
        warn_if_again(self, lambda: table.ids, self.privacy_)
        return self

    def decision_function(self, X: Any, groups: Groups | None = None) -> Array:
        """Return <x, U v_i> with each row's user's own head, (rows,); positive for the second class.

        Args:
            X: rows (rows, n_features), which may be sparse.
            groups: the user of each row, (rows,).
        """
        check_is_fitted(self)
        X, names = rows_to_predict(self, self._known(X), groups)
        refuse_missing(self, X)
        if self.users_ is None or self.heads_ is None:
            raise InputError(ONLY_PERSONALIZE)
        users = known_users(self.users_, names)
        matrix, step = self.representation_.astype(X.dtype), max(_ROWS // X.shape[1], 1)
        images = [X[start : start + step] @ matrix for start in range(0, X.shape[0], step)]
        return (np.concatenate(images).astype(np.float64) * self.heads_[users]).sum(axis=1)

    def predict(self, X: Any, groups: Groups | None = None) -> NDArray[Any]:
        """Return labels by each row's user's own head, (rows,). A user who was not in `fit` is an error.

        Args:
            X: rows (rows, n_features), which may be sparse.
            groups: the user of each row, (rows,).
        """
        outputs = self.decision_function(X, groups)
        return np.asarray(self.classes_[(outputs > 0).astype(np.int64)])

    def personalize(self, X: Any, y: Any) -> MarginHead:
        """Return the head of a user who was not there, from its own rows and what `fit` released. Costs no privacy.

        Args:
            X: rows (rows, n_features) of the user.
            y: their labels, (rows,).
        """
        check_is_fitted(self)
        X, y = self._validated(self._known(X), y, reset=False)
        table = UserTable.from_rows(X, _codes(y, self.classes_), np.zeros(X.shape[0], dtype=np.int64))
        return MarginHead(self.representation_ @ self._heads(table, False)[0], self.classes_)

    def score(self, X: Any, y: Any, groups: Groups | None = None, sample_weight: Any = None) -> float:
        """Return the accuracy of `predict`. Computed on users' data: not private, and not part of the model."""
        from sklearn.metrics import accuracy_score

        return float(accuracy_score(plain(y), self.predict(X, groups), sample_weight=sample_weight))

    def save(self, folder: str | Path, *, overwrite: bool = False) -> None:
        """Write the model. Everything but folder/private is safe to publish."""
        check_is_fitted(self)
        _check_saved(self.described_)
        heads = None
        if self.users_ is not None and self.heads_ is not None:
            heads = MarginHeads(self.users_, self.heads_)
        where = ModelFolder(Path(folder))
        where.save(self.described_, self.ledger_, self.billboard_, heads, overwrite=overwrite)

    @classmethod
    def load(cls, folder: str | Path) -> Self:
        """Read a model folder, as `save` or a run folder has it."""
        where = ModelFolder(Path(folder))
        saved = where.read(MARGIN, PAGE)
        config, names = saved.described["config"], saved.described["features"]
        with where.damage(MODEL):
            given = {name: value for name, value in config.items() if name not in ("seed", "classes")}
            model = cls(**given, classes=tuple(config["classes"]), random_state=config["seed"])
            model._check()
            model.classes_, model.described_ = _two(config["classes"]), saved.described
        with where.damage(BILLBOARD):
            page = saved.billboard[PAGE]
            model.representation_ = read_representation(page.arrays, page.facts["derived"]).matrix
            if model.representation_.shape != (saved.described["feature_count"], config["rank"]):
                raise ValueError("its page 'representation' is of another model")
        model.users_, model.heads_ = None, None
        if has_heads(where.path):
            with where.damage(FILE):
                heads = read_margin_heads(where.path, config["rank"])
                model.users_, model.heads_ = heads.ids, heads.weights
        model.n_features_in_ = len(model.representation_)
        if names:
            model.feature_names_in_ = np.array(names, dtype=object)
        model.ledger_, model.billboard_, model.privacy_ = saved.ledger, saved.billboard, saved.ledger.report()
        return model

    def _check(self) -> None:
        if as_rank(self.rank) is None:
            raise InputError("margin selection cannot tell how many directions there are; give a rank.")
        for name, value, known in (
            ("loss", self.loss, ("margin", "logistic", "hinge", "absolute")),
            ("configuration", self.configuration, ("default", "paper")),
        ):
            if value not in known:
                raise InputError(f"{name} must be one of {', '.join(known)}. Got {value!r} instead.")
        whole = isinstance(self.projected, int | np.integer) and not isinstance(self.projected, bool)
        if not (self.projected is None or self.projected == "auto" or (whole and self.projected >= 1)):
            raise InputError(f'projected must be a positive integer, "auto" or None. Got {self.projected!r} instead.')
        _ = self._budget, self._zooming  # refuse what they would, before a folder is claimed
        if self.loss == "margin":
            check_margin(float(self.margin), float(self.radius), float(self.norm))

    @property
    def _zooming(self) -> Zooming:
        return Zooming(int(self.candidates), int(self.rounds))

    def _learn(self, table: UserTable, bar: Bar | None) -> Representation:
        """Make all releases. With a folder every charge and page is there before it is used."""
        folder = None if self.run_folder is None else Path(self.run_folder)
        seed = None if self.random_state is None else as_seed(self.random_state)

        def on_release(page: str, step: Step | None) -> None:
            if bar is not None:
                bar.page(page, run.ledger.epsilon)

        account = open_account(self, lambda: table.ids)
        asked: Any = {"seed": seed, "folder": folder, "on_release": on_release, "account": account}
        with Run.open(InMemoryUsers(table), self._budget, **asked) as run:
            self._post_settings(run, table)
            representation = self._select(run)
        self.ledger_, self.billboard_, self.privacy_ = run.ledger, run.billboard, run.ledger.report()
        return representation

    @property
    def _budget(self) -> Budget:
        return Budget(float(self.epsilon), float(self.delta), self.relation)

    def _describe(self, table: UserTable) -> dict[str, Any]:
        """Return the public facts of a fit, as JSON has them."""
        whole = {name: int(getattr(self, name)) for name in ("rank", "candidates", "rounds")}
        real = {name: float(getattr(self, name)) for name in ("epsilon", "delta", "margin", "radius", "norm")}
        same = {name: getattr(self, name) for name in ("relation", "loss", "configuration")}
        projected = self.projected if self.projected in (None, "auto") else int(self.projected)
        seed = None if self.random_state is None else as_seed(self.random_state)
        classes = _two(self.classes).tolist()
        # a public fact under this relation only
        count = {"user_count": table.n_users} if self.relation == "replace-one-user" else {}
        return {
            "format": MARGIN.format,
            "config": {**whole, **real, **same, "projected": projected, "classes": classes, "seed": seed},
            "feature_count": table.n_features,
            "features": feature_names(self),
            **count,
        }

    def _claim(self, folder: ModelFolder, table: UserTable) -> None:
        """Make the folder of a run, or refuse one that stands unless it is of this very run."""
        _check_saved(self.described_)
        ids_to_arrow(table.ids)  # what cannot be saved is refused before anything is spent
        if not (folder.begun or folder.finished) and any((folder.path / BILLBOARD).glob(f"*-{SETTINGS}.safetensors")):
            write_json(folder.path / RUN, self.described_)  # of before: its first page says what is asked
        folder.claim(MARGIN, self.described_)

    def _post_settings(self, run: Run, table: UserTable) -> None:
        """Post what is asked as the first page; raise ResumeError if the run that stands asked something else."""
        facts: dict[str, Any] = {
            "features": table.n_features,
            "classes": str(np.asarray(self.classes).tolist()),
            "loss": self.loss,
            "projected": str(self.projected),
            **{name: int(getattr(self, name)) for name in ("rank", "candidates", "rounds")},
            **{name: float(getattr(self, name)) for name in ("margin", "radius", "norm")},
        }
        if self.relation == "replace-one-user":
            facts["users"] = table.n_users  # a public fact under this relation only
        run.derive(SETTINGS, {}, **facts)
        if run.billboard[SETTINGS].facts["derived"] != facts:
            raise ResumeError(f"{self.run_folder} holds a run with other settings or users. Use another folder.")

    def _select(self, run: Run) -> Representation:
        auto = self.projected == "auto"
        common: dict[str, Any] = {
            "radius": float(self.radius),
            "norm": float(self.norm),
            "zooming": self._zooming,
        }
        if self.loss == "margin":
            kept = run.users.facts.features if self.projected is None else None if auto else int(self.projected)
            return margin_selection(run, int(self.rank), margin=float(self.margin), projected=kept, **common)
        kept = None if self.projected is None else 30 if auto else int(self.projected)
        loss: Any = self.loss
        return lipschitz_selection(run, int(self.rank), loss=loss, projected=kept, **common)

    def _known(self, X: Any) -> Any:
        """Return rows of a frame with its columns in the order of the fit; anything else as it came."""
        return read_known(X, Columns(features=tuple(feature_names(self))), self.n_features_in_, dense=False)

    def _validated(self, X: Any, y: Any, reset: bool = True) -> tuple[Any, NDArray[Any]]:
        if y is None:
            validate_data(self, plain(X), y)  # refuses it, in scikit-learn's words
        X, y = check_features(self, X, reset=reset), column_or_1d(plain(y), warn=True)
        check_consistent_length(X, y)
        check_infinite_targets(y)
        refuse_missing(self, X, y)
        return X, y

    def _heads(self, table: UserTable, second_half: bool) -> Array:
        """Return the heads of a table's users, (users, rank), a block of users at a time."""
        rule = MarginRule(self.representation_, self.loss, float(self.radius), float(self.norm), second_half)
        return fit_margin_heads(table.blocks(), rule)


def _two(classes: Any) -> NDArray[Any]:
    """Return the two classes; raise InputError if there are not two."""
    pair = np.asarray(classes)
    if pair.shape != (2,) or pair[0] == pair[1]:
        raise InputError(f"classes must be two different labels, the positive one second. Got {classes!r} instead.")
    return pair


def _codes(y: NDArray[Any], classes: NDArray[Any]) -> Array:
    """Return +1 for labels of the second class and -1 for labels of the first, (rows,)."""
    second, first = np.asarray(y == classes[1]), np.asarray(y == classes[0])
    if second.shape != y.shape or not (first | second).all():
        one, other = classes.tolist()
        raise InputError(f"y must hold the labels {one!r} and {other!r} and no others; name two others by classes=.")
    return np.where(second, np.float32(1), np.float32(-1))


def _check_saved(described: dict[str, Any]) -> None:
    """Raise InputError if classes have names that JSON cannot hold."""
    if not all(isinstance(name, str | int | float) for name in described["config"]["classes"]):
        raise InputError("a model can be saved only if its classes are named by texts or numbers; rename them.")
