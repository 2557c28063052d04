"""The common part of privrep's scikit-learn faces: fitting, saving and loading, and checks of what they are given."""

from __future__ import annotations

import warnings
from abc import ABC, abstractmethod
from collections.abc import Sequence
from copy import copy
from dataclasses import replace
from pathlib import Path
from typing import Any, Self

import numpy as np
from numpy.typing import NDArray
from scipy import sparse
from sklearn.base import BaseEstimator
from sklearn.utils.validation import check_is_fitted

from privrep.data.missing import IMPUTE, Missing
from privrep.data.table import UserTable, factorize, plain
from privrep.errors import InputError, NothingLearned, WeakPrivacy
from privrep.estimators.accounts import check_account, open_account, warn_if_again
from privrep.estimators.checks import Rows, as_rank, as_seed, check_features, feature_names, missing_of, prepare
from privrep.estimators.leaks import refuse_target_names, refuse_target_values
from privrep.estimators.pipelines import remark_on_pipeline
from privrep.estimators.progress import Bar, watch
from privrep.estimators.rows import GivenRows, Named, read_given, read_known, reader, warn_if_unnamed
from privrep.estimators.strangers import Groups, check_unknown_users, find_heads
from privrep.heads.filling import average_users, fill_to_predict, locate
from privrep.heads.fitting import HEAD_KINDS, Heads, fit_block, fit_heads
from privrep.heads.personal import PersonalHead
from privrep.linear.registry import find_estimator
from privrep.local.prior import HeadPrior
from privrep.local.representation import Representation
from privrep.models import learning, newcomers
from privrep.models import model as models
from privrep.models.description import Columns, Config
from privrep.models.gains import judge_nothing
from privrep.models.promise import find_weaknesses
from privrep.privacy.events import Relation
from privrep.privacy.population import Account, PopulationLedger
from privrep.typing import Array


class Personal(BaseEstimator, ABC):
    """Hold what all estimators of tables have in common: fitting, saving and loading."""

    rank: Any
    epsilon: float
    delta: float
    relation: Relation
    fit_intercept: bool
    feature_scale: Any
    feature_covariance: Any
    categories: Any
    start: str | None
    safety_net: bool
    unknown_users: str
    missing: str
    missing_indicator: Any
    random_state: int | None
    run_folder: str | Path | None
    population: str | Path | PopulationLedger | None
    verbose: bool

    def __sklearn_tags__(self) -> Any:
        tags = super().__sklearn_tags__()
        tags.input_tags.sparse = tags.input_tags.allow_nan = True
        return tags

    def fit(self, X: Any, y: Any, groups: Groups | None = None, sample_weight: Any = None) -> Self:
        """Learn the representation privately, then every user's head.

        Rows without a target, or without one of several, are left out. What was missing is counted in a `MissingValues`
        warning, which is not private.

        Args:
            X: rows (rows, n_features); a SciPy sparse matrix is never made dense. Values may be missing: see `missing`.
                Text and categorical columns of a frame of pandas, polars or Arrow have a feature for each category:
                see `categories`.
            y: targets, (rows,), or (rows, targets) of numbers: a head for each.
            groups: the user of each row.
            sample_weight: (rows,), from 0: how much a row counts beside the other rows of its user. The largest weight
                of a user stands for a whole row, 0 leaves a row out, and between these rows are thinned, by a rule
                that depends on that user's weights alone. So all weights equal is the same as none, and users count
                alike whatever their weights are. They cost no privacy.
        """
        if groups is None:
            raise InputError("fit needs groups: the user of each row. Privacy here is a promise to users, not to rows.")
        self._refuses()  # a parameter that is none is refused before anything is spent
        check_account(self)
        remark_on_pipeline(self)
        given = self._given(X)
        refuse_target_names(given.names, y)
        columns = given.columns(y, groups)
        X, y = self._validated(given.X, y)
        refuse_target_values(X, y, columns.features or feature_names(self), given.frame)
        if given.frame is not None:
            self.n_features_in_, self.feature_names_in_ = len(given.names), np.array(given.names, dtype=object)
        folder = None if self.run_folder is None else Path(self.run_folder)
        policy, names = missing_of(self, columns.features), plain(groups)
        rows = prepare(self, X, y, sample_weight, policy, given.frame)
        columns = replace(columns, missing=policy.how, indicators=policy.indicators)
        self._check_lists(columns)
        warn_if_weak(self, names)
        rows.warn()
        with watch(self.verbose, learning.PAGES) as bar:
            account = open_account(self, lambda: factorize(names)[0])
            fitted, table = self._learn(rows, y, names, folder, columns, bar, account)
            warn_if_unnamed(columns, fitted.columns)
            warn_if_nothing(fitted)
            heads = fit_heads(
                table.blocks() if bar is None else bar.heads(table.blocks(), table.n_users),
                fitted.representation,
                intercept=self.fit_intercept,
                safety_net=self.safety_net,
                loss=fitted.loss,
                keep_means=rows.keep_means,
            )
        self._adopt(models.with_heads(fitted, heads))
        if folder is not None:
            models.finish(self.model_, folder)
        warn_if_again(self, lambda: table.ids, fitted.privacy)
        return self

    def _given(self, X: Any) -> GivenRows:
        """Return what `fit` was given as X; estimators that make features of rows make them here."""
        return read_given(X, self.categories)

    @property
    def _public_map(self) -> dict[str, Any] | None:
        """Return the public facts of the map that makes features of rows; None: columns are features."""
        return None

    @abstractmethod
    def _validated(self, X: Any, y: Any, reset: bool = True) -> tuple[Any, Any]:
        """Return rows and targets that were checked; `reset` learns how many features there are."""

    @abstractmethod
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
        """Return the model without heads, and the rows that heads are made of."""

    def _check_lists(self, columns: Columns) -> None:
        """Refuse, before anything is spent, sizes of features that are not known yet."""
        undecided = [name for name, listed in columns.by_category.items() if not listed]
        if undecided and self.feature_scale is not None:
            raise InputError(
                f"feature_scale needs all features to be known: list the values of {undecided[0]!r} in categories, or "
                "leave feature_scale out."
            )
        if columns.categorical and self.feature_covariance is not None:
            raise InputError("feature_covariance is for numbers; leave it or the columns of categories out.")

    def _known(self, X: Any) -> Any:
        """Return rows for `validated`, the columns of a frame found by name."""
        fitted = self.model_
        return read_known(X, fitted.columns, len(self._representation.scale), fitted.config.dense)

    def _found(self, X: Any, groups: Groups | None) -> tuple[Any, Heads, NDArray[np.int64]]:
        """Return rows with nothing missing, the heads, and where each row's user is among them, -1 for unknown ones."""
        refuses = self._refuses()
        check_is_fitted(self)
        X, names = rows_to_predict(self, X, groups, self.model_.columns.policy)
        heads, users = find_heads(self.model_, names, refuses)
        told: Any = {"intercept": bool(self.fit_intercept), "names": lambda: self.model_.columns.feature_names}
        return fill_to_predict(heads, self._representation, X, users, **told), heads, users

    def _refuses(self) -> bool:
        """Return whether users who were not in fit are refused."""
        return check_unknown_users(self.unknown_users)

    def personalize_users(
        self, X: Any, y: Any, groups: Groups, sample_weight: Any = None, *, replace: bool = False
    ) -> Self:
        """Return this estimator with heads for users who were not there, too: many newcomers at once.

        Each head is what `personalize` makes of that user's rows, and what `privrep personalize` writes. It costs no
        privacy. The estimator itself stays as it is. The one returned predicts for old users and newcomers; saved, it
        keeps the heads of both in folder/private.

        Args:
            X: rows (rows, n_features) of all newcomers.
            y: their targets, as `fit` has them. Rows without one are left out.
            groups: the user of each row.
            sample_weight: (rows,), as `fit` has it.
            replace: whether users who have a head already get a new one. Else they are an error.
        """
        check_is_fitted(self)
        if groups is None:
            raise InputError("personalize_users needs groups: the user of each row, who gets a head.")
        table = self._newcomers(X, y, plain(groups), sample_weight)
        new = newcomers.make_heads(self.model_, table.blocks(), sparse=table.is_sparse)
        made = copy(self)
        made._adopt(models.with_heads(self.model_, newcomers.join_heads(self.model_.heads, new, replace=replace)))
        return made

    @abstractmethod
    def _newcomers(self, X: Any, y: Any, groups: Any, sample_weight: Any = None) -> UserTable:
        """Return rows of users who were not there, checked; if `groups` is None, all are one user's."""

    def _fit_one(self, table: UserTable) -> Heads:
        """Return the head of the only user of a table, as heads of many."""
        return fit_block(table, self._representation, self.fit_intercept, self.safety_net, self.model_.loss)

    def _no_rows(self, X: Any, y: Any) -> bool:
        """Return whether these are rows of a user who has none, whose head is the prior's."""
        rows = np.shape(X)
        return self._representation.prior is not None and len(rows) == 2 and not rows[0] and np.shape(y)[:1] == (0,)

    def _without_rows(self, X: Any, targets: Array) -> UserTable:
        """Return a table of one user without rows; X (0, n_features) is checked."""
        X = check_features(self, self._known(X), reset=False, least=0)
        X = prepare(self, X, np.zeros(0), None, self.model_.columns.policy).X
        return UserTable(X, targets, np.zeros(2, dtype=np.int64), np.zeros(1, dtype=np.int64))

    def _personal(self, table: UserTable) -> PersonalHead:
        """Return the head of the only user of a table."""
        return self._as_personal(self._fit_one(table), table)

    def _as_personal(self, heads: Heads, table: UserTable) -> PersonalHead:
        """Return the head of the only user of a table, from heads of many."""
        weights, kinds = heads.weights(self._representation), tuple(HEAD_KINDS[kind] for kind in heads.kind)
        doubts = heads.doubts(self._representation) if isinstance(self._representation.prior, HeadPrior) else None
        c = self.model_.columns
        read = reader(c, weights.shape[1], self.model_.config.dense) if c.features or c.categorical else None
        more: dict[str, Any] = {
            "doubts": doubts,
            "silent": models.explain_silence(self.model_),
            "read": read,
            "missing": c.policy,
        }
        numbers = len(c.features) or table.n_features
        if not table.is_sparse or c.features:
            means = np.concatenate([average_users(table, numbers)[0], np.zeros(table.n_features - numbers)])
            fill, located = locate(self._representation, bool(self.fit_intercept))
            more |= {"fill": np.where(np.isnan(means), fill, means), "ignored": np.isnan(means) & ~located}
        if heads.targets == 1:
            return PersonalHead(kinds[0], weights[0], float(heads.intercept[0]), **more)
        return PersonalHead(kinds, weights, heads.intercept, **more)

    def save(self, folder: str | Path, *, overwrite: bool = False) -> None:
        """Write the model. Everything but folder/private is safe to publish."""
        check_is_fitted(self)
        models.save(self.model_, Path(folder), overwrite=overwrite)

    @classmethod
    def load(cls, folder: str | Path) -> Self:
        """Read a model folder, as `save` or `privrep fit` wrote it."""
        loaded = models.load(Path(folder))
        other = class_name(loaded)
        if not any(kind.__name__ == other for kind in cls.__mro__):
            raise InputError(f"{folder} holds a model of {other}; load it with {other}.load.")
        estimator = cls(**cls._parameters(loaded))
        names = (*loaded.columns.features, *loaded.columns.categorical)
        estimator.n_features_in_ = len(names) or len(loaded.representation.scale) - len(loaded.columns.indicators)
        if names:
            estimator.feature_names_in_ = np.array(names, dtype=object)
        estimator._adopt(loaded)
        return estimator

    @classmethod
    def _parameters(cls, loaded: models.Model) -> dict[str, Any]:
        """Return the parameters of the estimator of a model."""
        c, columns = loaded.config, loaded.columns
        indicators: list[Any] = [columns.features[j] if columns.features else j for j in columns.indicators]
        return {
            "rank": "auto" if c.rank is None else c.rank,
            "epsilon": c.epsilon,
            "delta": c.delta,
            "relation": c.relation,
            "fit_intercept": c.intercept,
            "feature_scale": None if c.scale is None else list(c.scale),
            "feature_covariance": None if c.covariance is None else [list(row) for row in c.covariance],
            "categories": _declared(loaded),
            "start": c.start,
            "safety_net": c.safety_net,
            "missing": columns.missing,
            "missing_indicator": indicators or None,
            "random_state": c.seed,
        }

    def _adopt(self, fitted: models.Model) -> None:
        """Take a fitted model, and show what is public of it as attributes."""
        self.model_ = fitted
        self.representation_ = fitted.representation.matrix
        self.rank_ = self.representation_.shape[1]
        self.privacy_ = fitted.privacy
        self.categories_ = fitted.columns.named
        if fitted.heads is not None:
            self.users_ = fitted.heads.ids

    @property
    def _representation(self) -> Representation:
        return self.model_.representation

    def _config(self, **more: Any) -> Config:
        """Return the settings of a fit."""
        scale, covariance = self.feature_scale, self.feature_covariance
        if covariance is not None:
            covariance = tuple(map(tuple, np.asarray(covariance, dtype=float).tolist()))
        return Config(
            rank=as_rank(self.rank),
            epsilon=float(self.epsilon),
            delta=float(self.delta),
            relation=self.relation,
            intercept=bool(self.fit_intercept),
            safety_net=bool(self.safety_net),
            scale=None if scale is None else tuple(np.asarray(scale, dtype=float).tolist()),
            covariance=covariance,
            start=self.start,
            seed=None if self.random_state is None else as_seed(self.random_state),
            **more,
        )


def one_user(X: Any) -> NDArray[np.int64]:
    """Return the user of each row, (rows,), where all rows X (rows, d) are one user's."""
    return np.zeros(X.shape[0], dtype=np.int64)


def _declared(loaded: models.Model) -> dict[str, list[str | int]] | None:
    """Return the lists of categories, unless some were selected privately: another fit selects them again."""
    selected = f"{learning.KEYS_PAGE}1" in loaded.billboard
    return None if selected or not loaded.columns.named else {n: list(v) for n, v in loaded.columns.named.items()}


def class_name(loaded: models.Model) -> str:
    """Return the name of the estimator that makes such models."""
    config = loaded.config
    if loaded.public_map is not None:
        return "CentaurRegressor"
    return find_estimator(config.method, config.ratings) if config.loss is None else "PrivateFedRepClassifier"


def warn_if_nothing(fitted: models.Model) -> None:
    """Warn where users are no better off than alone, as far as the releases tell."""
    if nothing := judge_nothing(fitted.representation):
        warnings.warn(f"{nothing} (see `privrep budget`). What was spent is spent.", NothingLearned, stacklevel=3)


def warn_if_weak(estimator: Any, groups: Any) -> None:
    """Warn where an estimator's budget promises users little; `groups` names the user of each row."""
    epsilon, delta, users = float(estimator.epsilon), float(estimator.delta), len(groups)
    if delta * users >= 1:  # there are no more users than rows, so that few fits need to count them
        users = len(factorize(groups)[0])
    warn_of_budget(find_weaknesses(epsilon, delta, estimator.relation, users), stacklevel=3)


def warn_of_budget(weaknesses: Sequence[str], stacklevel: int) -> None:
    """Warn of what `find_weaknesses` found; `stacklevel` counts from the caller of this."""
    for weakness in weaknesses:
        warnings.warn(weakness, WeakPrivacy, stacklevel=stacklevel + 1)


def rows_to_predict(estimator: Any, X: Any, groups: Groups | None, policy: Missing = IMPUTE) -> tuple[Any, Any]:
    """Return rows of a fitted estimator's features, with indicators of missing values, and the user of each."""
    check_is_fitted(estimator)
    if groups is None:
        raise InputError("predict needs groups: the user of each row, whose own head makes the prediction.")
    known = estimator._known(X) if isinstance(estimator, Personal) else X
    X = check_features(estimator, known, reset=False, missing=policy)
    X = X if sparse.issparse(X) or isinstance(known, Named) else policy.with_indicators(X)
    names = plain(groups)
    if len(names) != X.shape[0]:
        raise InputError(
            f"groups must name one user per row of X. Got {len(names)} users for {X.shape[0]} rows instead."
        )
    return X, names
