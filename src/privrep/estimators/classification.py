"""Classification: the scikit-learn face of Private FedRep for labels."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any, Literal

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from numpy.typing import NDArray
from sklearn.base import ClassifierMixin
from sklearn.utils.metaestimators import available_if
from sklearn.utils.validation import check_consistent_length, check_is_fitted, column_or_1d, validate_data

from privrep.data.categories import Categories, check_classes, encode_labels, name_arrow_label_kind, name_label_kind
from privrep.data.files import is_text
from privrep.data.table import UserTable, plain
from privrep.errors import InputError
from privrep.estimators.base import Personal, one_user
from privrep.estimators.checks import Rows, check_features, check_infinite_targets, prepare
from privrep.estimators.progress import Bar
from privrep.estimators.rows import PreparedRows
from privrep.estimators.strangers import Groups
from privrep.heads.personal import PersonalClassifier, has_probabilities
from privrep.heads.store import ids_to_arrow
from privrep.linear.registry import DEFAULT
from privrep.local.losses import Loss, compute_probabilities, decide_classes
from privrep.local.prior import LabelPrior
from privrep.models import learning
from privrep.models import model as models
from privrep.models.description import Columns
from privrep.privacy.events import Relation
from privrep.privacy.population import Account, PopulationLedger
from privrep.typing import Array
from privrep.users.holders import KeyHolders
from privrep.users.memory import InMemoryUsers


class PrivateFedRepClassifier(ClassifierMixin, Personal):
    """Personal classifiers over a shared representation learned under user-level differential privacy.

    Each user's outputs are b_i + <x, U v_i>: U is shared and released privately, v_i and b_i stay with the user. With
    two classes there is one output, whose sign decides; with more there is one for each class, and the largest does.

    Parameters
    ----------
    rank, epsilon, delta, relation, fit_intercept, feature_scale, feature_covariance, categories, start, safety_net,
    unknown_users, missing, missing_indicator, random_state, run_folder, population, verbose : as those of
        `PrivateFedRep`
    loss : "log" or "hinge"
        "log" is the logistic loss, softmax for more than two classes; "hinge" is smoothed, each class against the rest.
    classes : list, optional
        The classes, if they are public: all text, all integers or all booleans, 1,000 at most. By default those that
        enough users have are selected privately, for a twentieth of the budget: a list of all labels that occur would
        tell of a user who alone has one. Booleans are False and True whoever has which, so that nothing is spent.
        Other labels are ignored; the features of those rows still count for scales, correlations and a user's mean.

    Attributes
    ----------
    classes_ : array of the classes, sorted, public
    representation_ : (n_features, rank) array, public
    privacy_ : PrivacyReport; relation, epsilon spent, delta, accountant, every event, whether the noise was seeded
    rank_ : int
    categories_ : dict of the categories of each column that have a feature, public
    users_ : the ids of the users, private like the heads

    Formal guarantee: `classes_`, `representation_`, `privacy_` and the billboard are (epsilon, delta)-DP at user level;
    declared classes are a public fact, not computed from the users. Heads are not released; if they are collected, the
    guarantee is joint differential privacy (the billboard model): what the others see is private with respect to each
    user.
    """

    def __init__(
        self,
        rank: int | Literal["auto"] = "auto",
        *,
        epsilon: float = 1.0,
        delta: float = 1e-6,
        relation: Relation = "replace-one-user",
        loss: str = "log",
        classes: Any = None,
        fit_intercept: bool = True,
        feature_scale: Any = None,
        feature_covariance: Any = None,
        categories: Any = None,
        start: str | None = None,
        safety_net: bool = True,
        unknown_users: Literal["prior", "refuse"] = "prior",
        missing: Literal["impute", "drop", "refuse"] = "impute",
        missing_indicator: Any = None,
        random_state: int | None = None,
        run_folder: str | Path | None = None,
        population: str | Path | PopulationLedger | None = None,
        verbose: bool = False,
    ) -> None:
        self.rank = rank
        self.epsilon = epsilon
        self.delta = delta
        self.relation = relation
        self.loss = loss
        self.classes = classes
        self.fit_intercept = fit_intercept
        self.feature_scale = feature_scale
        self.feature_covariance = feature_covariance
        self.categories = categories
        self.start = start
        self.safety_net = safety_net
        self.unknown_users = unknown_users
        self.missing = missing
        self.missing_indicator = missing_indicator
        self.random_state = random_state
        self.run_folder = run_folder
        self.population = population
        self.verbose = verbose

    def predict(self, X: Any, groups: Groups | None = None) -> NDArray[Any]:
        """Return labels by each row's user's own head, (rows,).

        Rows of users who were not in `fit` are predicted by the prior mean: see `personalize`.

        Args:
            X: rows (rows, n_features), which may be sparse.
            groups: the user of each row.
        """
        codes = decide_classes(self._outputs(X, groups))
        return np.asarray(self.classes_[codes])

    def decision_function(self, X: Any, groups: Groups | None = None) -> Array:
        """Return the outputs: (rows,) for two classes, positive for the second, or (rows, classes); see `predict`."""
        return self._outputs(X, groups)

    @available_if(has_probabilities)  # type: ignore[untyped-decorator]
    def predict_proba(self, X: Any, groups: Groups | None = None) -> Array:
        """Return how likely each class is, (rows, classes), in the order of `classes_`. For the log loss only."""
        outputs = self._outputs(X, groups)
        return compute_probabilities(self._loss, outputs)

    def personalize(self, X: Any, y: Any, sample_weight: Any = None) -> PersonalClassifier:
        """Return the classifier of a user who was not there, from its own rows and what `fit` released.

        Costs no privacy. There may be no rows at all: the head is then the prior mean.

        Args:
            X: rows (rows, n_features) of the user.
            y: their labels, (rows,). Rows without one are left out.
            sample_weight: (rows,), as `fit` has it.
        """
        check_is_fitted(self)
        prior = self._representation.prior
        if self._no_rows(plain(X), plain(y)):
            table = self._without_rows(X, np.zeros(0))
        else:
            table = self._newcomers(X, y, None, sample_weight)
        heads = self._fit_one(table)
        trust = heads.trust(self._representation) if isinstance(prior, LabelPrior) else None
        return PersonalClassifier(self._as_personal(heads, table), self.classes_, self._loss, trust)

    def _newcomers(self, X: Any, y: Any, groups: Any, sample_weight: Any = None) -> UserTable:
        X, labels = self._validated(self._known(X), y, reset=False)
        columns, served = self.model_.columns, self._representation.prior is not None
        rows = prepare(self, X, labels, sample_weight, columns.policy, may_be_empty=served)
        codes = codes_of(labels, columns.classes).astype(np.float64)
        return UserTable.from_rows(rows.X, codes, one_user(rows.X) if groups is None else groups, rows.weights)

    def _outputs(self, X: Any, groups: Groups | None) -> Array:
        """Return what each row's user's own head says of it."""
        X, heads, users = self._found(X, groups)
        return heads.predict(self._representation, X, users)

    def score(self, X: Any, y: Any, groups: Groups | None = None, sample_weight: Any = None) -> float:
        """Return the accuracy of `predict`. Computed on users' data: not private, and not part of the model."""
        from sklearn.metrics import accuracy_score

        return float(accuracy_score(plain(y), self.predict(X, groups), sample_weight=sample_weight))

    def _validated(self, X: Any, y: Any, reset: bool = True) -> tuple[Any, Any]:
        y = plain(y)
        if isinstance(y, list | tuple):  # else NumPy would find one type for all, and one label could change it
            y = np.array(y, dtype=object)
        if y is None:
            validate_data(self, plain(X), y)  # refuses it, in scikit-learn's words
        X = check_features(self, X, reset=reset)
        y = column_or_1d(y, warn=True)
        check_consistent_length(X, y)
        check_infinite_targets(y)
        return X, label_column(y)

    def _learn(
        self,
        rows: Rows,
        y: Any,
        groups: Any,
        folder: Path | None,
        columns: Columns,
        bar: Bar | None,
        account: Account | None,
    ) -> tuple[models.Model, UserTable]:
        places = np.arange(rows.X.shape[0], dtype=np.float64)
        table = UserTable.from_rows(rows.X, places, groups, rows.weights)  # targets: where rows were
        if rows.weights is not None:  # labels of rows that are left out are nobody's
            y = pc.if_else(pa.array(rows.weights > 0), y, None)
        if folder is not None:
            ids_to_arrow(table.ids)  # what cannot be saved is refused before anything is spent

        def label(made: UserTable, known: Columns) -> UserTable:
            codes = codes_of(y, known.classes).astype(made.X.dtype)
            return replace(made, y=codes[table.y.astype(np.int64)])

        self._refuses()  # a parameter that is none is refused before anything is spent
        config, columns = self._config(loss=self.loss), replace(columns, classes=self._declared(y))
        if not columns.categorical and not columns.indicators:
            config.check(table.n_features)  # what cannot be done, too
            config.check_users(InMemoryUsers(table))
        if columns.classes and (codes_of(y, columns.classes) < 0).all():
            listed = ", ".join(map(repr, columns.classes[:5]))
            raise InputError(
                f"no row has one of the declared classes ({listed}); labels are compared as they are written."
            )
        prepared = PreparedRows(table, rows.frame, config.dense, label)
        labels = None if columns.classes else KeyHolders.from_columns(groups, y)
        told = None if bar is None else bar.page
        facts: Any = {"folder": folder, "account": account, "columns": columns, "on_page": told}
        return learning.learn(prepared.users(columns, labels), config, **facts), prepared.table

    def _declared(self, y: Any) -> Categories:
        """Return the classes if they are known beforehand. Nothing counts of labels but their type."""
        if self.classes is not None:
            return check_classes(self.classes)
        return (False, True) if pa.types.is_boolean(y.type) else ()

    @classmethod
    def _parameters(cls, loaded: models.Model) -> dict[str, Any]:
        c, declared = loaded.config, not loaded.classes_selected
        start = c.start or (None if c.method == DEFAULT else c.learner.own_start)  # all that sets methods apart here
        classes = list(loaded.columns.classes) if declared else None
        return {**super()._parameters(loaded), "start": start, "loss": c.loss, "classes": classes}

    def _adopt(self, fitted: models.Model) -> None:
        super()._adopt(fitted)
        self.classes_ = np.array(fitted.columns.classes)

    @property
    def _loss(self) -> Loss:
        loss = self.model_.loss
        assert loss is not None
        return loss


def label_column(labels: Any) -> Any:
    """Return one Arrow array of text, integers or booleans; missing labels, and empty text, are null.

    Whole numbers that came as floats are integers.
    """
    try:
        column = pa.array(labels, from_pandas=True)
        if pa.types.is_floating(column.type):
            column = column.cast(pa.int64())
        if is_text(column.type):
            column = pc.if_else(pc.equal(column, pa.scalar("", column.type)), None, column.cast(pa.large_string()))
    except (pa.ArrowException, ValueError, TypeError, OverflowError):
        column = None
    if column is None or not name_arrow_label_kind(column.type):
        raise InputError(
            "Unknown label type: y must be all integers, all text or all booleans; turn labels into one of these."
        )
    return column


def codes_of(labels: Any, classes: Categories) -> NDArray[np.int32]:
    """Return where the label of each row is among the classes, (rows,); -1 if it is not."""
    kind, wanted = name_arrow_label_kind(labels.type), name_label_kind(classes[0])
    if kind != wanted:
        raise InputError(f"the labels are {kind} and the classes are {wanted}; convert one or the other.")
    return np.asarray(encode_labels(labels, classes).fill_null(-1))
