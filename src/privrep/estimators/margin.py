"""Classification under a pure epsilon: the scikit-learn face of the exponential mechanism over representations."""

from __future__ import annotations

from pathlib import Path
from typing import Any, Literal, Self

import numpy as np
from numpy.typing import NDArray
from sklearn.base import BaseEstimator, ClassifierMixin
from sklearn.utils.validation import check_consistent_length, check_is_fitted, column_or_1d, validate_data

from privrep.data.table import UserTable, plain
from privrep.errors import InputError, ResumeError
from privrep.estimators.base import Groups, as_rank, as_seed, known_users, rows_to_predict, warn_if_weak
from privrep.estimators.checks import check_features, check_infinite_targets, feature_names, refuse_missing
from privrep.estimators.rows import read_known
from privrep.heads.margin_fitting import MarginRule, fit_margin_heads
from privrep.heads.personal import MarginHead
from privrep.linear.methods.lipschitz_selection import lipschitz_selection
from privrep.linear.methods.margin_selection import margin_selection
from privrep.linear.nets import Zooming
from privrep.local.representation import Representation
from privrep.models.description import Columns
from privrep.privacy.events import Relation
from privrep.privacy.ledger import Budget
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

    Attributes
    ----------
    representation_ : (n_features, rank) array, public; its columns are not orthonormal where there was a projection
    privacy_ : PrivacyReport
    classes_ : array of the two labels
    users_, heads_ : the ids of the users and their heads, (users, rank): private

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

    def __sklearn_tags__(self) -> Any:
        tags = super().__sklearn_tags__()
        tags.input_tags.sparse = True
        tags.classifier_tags.multi_class = False
        return tags

    def fit(self, X: Any, y: Any, groups: Groups | None = None) -> Self:
        """Choose the representation privately, then fit every user's head. `groups` names the user of each row."""
        if groups is None:
            raise InputError("fit needs groups: the user of each row. Privacy here is a promise to users, not to rows.")
        self._check()
        classes = _two(self.classes)
        X, y = self._validated(X, y)
        table = UserTable.from_rows(X, _codes(y, classes), plain(groups))
        warn_if_weak(self, table.ids)
        self.classes_, self.representation_ = classes, self._learn(table).matrix
        self.users_, self.heads_ = table.ids, self._heads(table, self.configuration == "paper")
        return self

    def decision_function(self, X: Any, groups: Groups | None = None) -> Array:
        """<x, U v_i> with each row's user's own head; positive for the second class."""
        check_is_fitted(self)
        X, names = rows_to_predict(self, self._known(X), groups)
        refuse_missing(self, X)
        users = known_users(self.users_, names)
        matrix, step = self.representation_.astype(X.dtype), max(_ROWS // X.shape[1], 1)
        images = [X[start : start + step] @ matrix for start in range(0, X.shape[0], step)]
        return (np.concatenate(images).astype(np.float64) * self.heads_[users]).sum(axis=1)

    def predict(self, X: Any, groups: Groups | None = None) -> NDArray[Any]:
        """Labels by each row's user's own head. A user who was not in `fit` is an error: see `personalize`."""
        return np.asarray(self.classes_[(self.decision_function(X, groups) > 0).astype(np.int64)])

    def personalize(self, X: Any, y: Any) -> MarginHead:
        """The head of a user who was not there, from its own rows and the public representation. Costs no privacy."""
        check_is_fitted(self)
        X, y = self._validated(self._known(X), y, reset=False)
        table = UserTable.from_rows(X, _codes(y, self.classes_), np.zeros(X.shape[0], dtype=np.int64))
        return MarginHead(self.representation_ @ self._heads(table, False)[0], self.classes_)

    def score(self, X: Any, y: Any, groups: Groups | None = None, sample_weight: Any = None) -> float:
        """Accuracy of `predict`. Computed on users' data: not private, and not part of the model."""
        from sklearn.metrics import accuracy_score

        return float(accuracy_score(plain(y), self.predict(X, groups), sample_weight=sample_weight))

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

    def _learn(self, table: UserTable) -> Representation:
        folder = None if self.run_folder is None else Path(self.run_folder)
        seed = None if self.random_state is None else as_seed(self.random_state)
        if folder is not None:
            folder.mkdir(parents=True, exist_ok=True)
        budget = Budget(float(self.epsilon), float(self.delta), self.relation)
        with Run.open(InMemoryUsers(table), budget, seed=seed, folder=folder) as run:
            self._claim(run, table)
            representation = self._select(run)
        self.privacy_ = run.ledger.report()
        return representation

    def _claim(self, run: Run, table: UserTable) -> None:
        """The first page says what is asked; a folder that holds another question is not continued."""
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
        run.derive("settings", {}, **facts)
        if run.billboard["settings"].facts["derived"] != facts:
            raise ResumeError(f"{self.run_folder} holds a run with other settings or users. Use another folder.")

    def _select(self, run: Run) -> Representation:
        auto = self.projected == "auto"
        common: dict[str, Any] = {
            "radius": float(self.radius),
            "norm": float(self.norm),
            "zooming": Zooming(int(self.candidates), int(self.rounds)),
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
        """(users, rank), a block of users at a time."""
        rule = MarginRule(self.representation_, self.loss, float(self.radius), float(self.norm), second_half)
        return fit_margin_heads(table.blocks(), rule)


def _two(classes: Any) -> NDArray[Any]:
    pair = np.asarray(classes)
    if pair.shape != (2,) or pair[0] == pair[1]:
        raise InputError(f"classes must be two different labels, the positive one second. Got {classes!r} instead.")
    return pair


def _codes(y: NDArray[Any], classes: NDArray[Any]) -> Array:
    """+1 for the second class and -1 for the first."""
    second, first = np.asarray(y == classes[1]), np.asarray(y == classes[0])
    if second.shape != y.shape or not (first | second).all():
        one, other = classes.tolist()
        raise InputError(f"y must hold the labels {one!r} and {other!r} and no others; name two others by classes=.")
    return np.where(second, np.float32(1), np.float32(-1))
