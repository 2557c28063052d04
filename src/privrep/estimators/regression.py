"""Regression: the scikit-learn face of the methods for numbers."""

from __future__ import annotations

from pathlib import Path
from typing import Any, ClassVar, Literal, Self, cast, overload

import numpy as np
from sklearn.base import RegressorMixin
from sklearn.utils.validation import check_is_fitted, column_or_1d, validate_data

from privrep.data.table import UserTable, plain
from privrep.estimators.base import Personal, one_user
from privrep.estimators.checks import Rows, check_features, check_numbers, prepare
from privrep.estimators.progress import Bar
from privrep.estimators.rows import PreparedRows
from privrep.estimators.strangers import Groups
from privrep.heads.personal import PersonalHead
from privrep.heads.store import ids_to_arrow
from privrep.heads.uncertainty import check_coverage
from privrep.linear.registry import ESTIMATORS, METHODS
from privrep.models import learning
from privrep.models import model as models
from privrep.models.description import Columns
from privrep.privacy.events import Relation
from privrep.privacy.population import Account, PopulationLedger
from privrep.typing import Array


class Regressor(RegressorMixin, Personal):
    """Hold what the methods have in common: everything but the way to the representation."""

    method: ClassVar[str]

    def __init__(
        self,
        rank: int | Literal["auto"] = "auto",
        *,
        epsilon: float = 1.0,
        delta: float = 1e-6,
        relation: Relation = "replace-one-user",
        fit_intercept: bool = True,
        feature_scale: Any = None,
        feature_covariance: Any = None,
        categories: Any = None,
        start: str | None = None,
        configuration: str = "default",
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
        self.fit_intercept = fit_intercept
        self.feature_scale = feature_scale
        self.feature_covariance = feature_covariance
        self.categories = categories
        self.start = start
        self.configuration = configuration
        self.safety_net = safety_net
        self.unknown_users = unknown_users
        self.missing = missing
        self.missing_indicator = missing_indicator
        self.random_state = random_state
        self.run_folder = run_folder
        self.population = population
        self.verbose = verbose

    def __sklearn_tags__(self) -> Any:
        tags = super().__sklearn_tags__()
        accepts = METHODS[self.method].accepts
        tags.input_tags.sparse, tags.target_tags.multi_output = "sparse" in accepts, "several targets" in accepts
        return tags

    @classmethod
    def paper(cls, rank: int, **parameters: Any) -> Self:
        """Return the estimator in its paper's configuration: its constants, no intercepts, shared heads for all."""
        return cls(rank, **{"configuration": "paper", "fit_intercept": False, "safety_net": False, **parameters})

    @overload
    def predict(self, X: Any, groups: Groups | None = None, return_std: Literal[False] = False) -> Array: ...
    @overload
    def predict(self, X: Any, groups: Groups | None = None, *, return_std: Literal[True]) -> tuple[Array, Array]: ...
    @overload
    def predict(self, X: Any, groups: Groups | None, return_std: Literal[True]) -> tuple[Array, Array]: ...
    def predict(self, X: Any, groups: Groups | None = None, return_std: bool = False) -> Array | tuple[Array, Array]:
        """Predict each row by its user's own head, and rows of users who were not in `fit` by the prior mean.

        Missing values are filled. An `UnknownUsers` warning counts rows of unknown users; with unknown_users="refuse",
        and in models without a prior, they are an error. See `personalize` for how to give a user a head.

        Args:
            X: rows (rows, n_features), which may be sparse.
            groups: the user of each row.
            return_std: whether to return the standard deviation of each prediction's error, too: the noise of targets
                and what is left to doubt about the user's head. Models without a prior have none.

        Returns:
            (rows,), or (rows, targets) where there are several; with return_std two arrays of that shape.
        """
        if return_std:
            check_is_fitted(self)
            models.check_intervals(self.model_)
        X, heads, users = self._found(X, groups)
        values = heads.predict(self._representation, X, users)
        return (values, heads.deviations(self._representation, X, users)) if return_std else values

    def predict_interval(self, X: Any, groups: Groups | None = None, coverage: float = 0.9) -> tuple[Array, Array]:
        """Return the lower and the upper ends of intervals that cover this share of targets, each as `predict` has.

        The intervals use released quantiles of users' own errors. Above 99%, tails are taken to be normal.

        Args:
            X, groups: as `predict` has them.
            coverage: the share of targets that intervals are to cover, between 0 and 1.
        """
        check_coverage(coverage)
        check_is_fitted(self)
        models.check_intervals(self.model_)
        X, heads, users = self._found(X, groups)
        return heads.interval(self._representation, X, users, coverage)

    def personalize(self, X: Any, y: Any, sample_weight: Any = None) -> PersonalHead:
        """Return the head of a user who was not there, from its own rows and what `fit` released. Costs no privacy.

        Where the model has a prior, there may be no rows at all: the head is then the prior mean.

        Args:
            X: rows (rows, n_features) of the user.
            y: their targets, (rows,) or (rows, targets). Rows without one are left out.
            sample_weight: (rows,), as `fit` has it.
        """
        check_is_fitted(self)
        prior = self._representation.prior
        if prior is None or not self._no_rows(plain(X), plain(y)):
            return self._personal(self._newcomers(X, y, None, sample_weight))
        return self._personal(self._without_rows(X, np.zeros((0, prior.targets) if prior.targets > 1 else 0)))

    def _newcomers(self, X: Any, y: Any, groups: Any, sample_weight: Any = None) -> UserTable:
        X, y = self._validated(self._known(X), y, reset=False)
        served = self._representation.prior is not None
        rows = prepare(self, X, y, sample_weight, self.model_.columns.policy, may_be_empty=served)
        return UserTable.from_rows(rows.X, y, one_user(rows.X) if groups is None else groups, rows.weights)

    def score(self, X: Any, y: Any, groups: Groups | None = None, sample_weight: Any = None) -> float:
        """Return R^2 of `predict`. Computed on users' data: not private, and not part of the model."""
        from sklearn.metrics import r2_score

        return float(r2_score(plain(y), self.predict(X, groups), sample_weight=sample_weight))

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
        table = UserTable.from_rows(rows.X, y, groups, rows.weights)
        if folder is not None:
            ids_to_arrow(table.ids)  # what cannot be saved is refused before anything is spent
        config = self._config(method=self.method, configuration=self.configuration)
        made = PreparedRows(table, rows.frame, config.dense)
        told = None if bar is None else bar.page
        facts: Any = {"folder": folder, "account": account, "columns": columns, "on_page": told}
        return learning.learn(made.users(columns), config, public_map=self._public_map, **facts), made.table

    def _validated(self, X: Any, y: Any, reset: bool = True) -> tuple[Any, Array]:
        if y is None:
            validate_data(self, plain(X), y)  # refuses it, in scikit-learn's words
        X = check_features(self, X, reset=reset)
        y = check_numbers(y, X)
        return X, column_or_1d(y, warn=True) if y.ndim == 2 and y.shape[1] == 1 else y

    @classmethod
    def _parameters(cls, loaded: models.Model) -> dict[str, Any]:
        return {**super()._parameters(loaded), "configuration": loaded.config.configuration}


class PrivateFedRep(Regressor):
    """Personal linear models over a shared representation learned under user-level differential privacy.

    The model of user i with mean row xbar_i is

        y = level + <x, common slopes> + b_i + <x - xbar_i, U v_i> + noise

    The level, the common slopes, what a user's mean row says of its level, U and the variances of b_i, v_i and of the
    noise are released privately: they are the prior of heads. U may have no columns. b_i and v_i stay with the user:
    its head is their posterior mean given its own rows, of kind "posterior". A user with few rows stays close to the
    prior mean, and one with many has a fit of its own. Without rows a user has the prior mean itself, of kind "prior".

    The configuration "paper" has no prior. There a user's model is y = b_i + <x, U v_i>, and its head is a regression
    on U ("shared"), one of its own on all features ("own"), or its mean ("constant").

    Parameters
    ----------
    rank : int or "auto"
        Columns of the shared representation; "auto" reads it off a released spectrum.
    epsilon, delta : float
        The whole budget of `fit`, initialisation and tuning included.
    relation : "replace-one-user" or "add-or-remove-one-user"
        Which change of the population the guarantee speaks of.
    fit_intercept : bool
        Whether users have intercepts. With one, users centre their own rows: a shift of the data changes nothing.
    feature_scale : array of shape (n_features,), optional
        Public typical sizes of the features, known without looking at the data. By default they are found by a
        charged release, and the features' correlations by another.
    feature_covariance : array of shape (n_features, n_features), optional
        A public covariance of the features, instead.
    categories : dict, optional
        Public lists of the categories of columns of a frame, {"race": ["black", "white", "other"]}. Text and
        categorical columns that it does not name, or names with None in place of a list, have their categories
        selected privately, those that enough users hold, for a twentieth of the budget (all columns together) and of
        delta: which values occur is private, and so is the list that a pandas or polars categorical comes with. Any
        other value, and a missing one, has no feature. Booleans are the numbers 0 and 1.
    start : "spectral", "normalised-pairs", "power-method" or "random", optional
        Where to start from, if not where the method itself would.
    configuration : "default" or "paper"
        The default chooses everything by itself; "paper" follows the method's paper with its constants, for
        comparison. `PrivateFedRep.paper(...)` sets what goes with it.
    safety_net : bool
        Whether each user may keep a regression of its own, or a constant, where that predicted better. Heads with a
        prior need none.
    unknown_users : "prior" or "refuse"
        What `predict` does with rows of users who were not in `fit`: predict them with the prior mean and warn
        (`UnknownUsers`), or raise an error. Models without a prior always raise it.
    missing : "impute", "drop" or "refuse"
        What is done about missing values (NaN, None) of features. They are filled inside each user: by the user's own
        mean of the column, and where it has no value by the released location of the column, in `fit` and in `predict`.
        Or rows of `fit` that miss one are left out; rows to predict are filled. Or they are an error.
    missing_indicator : list of columns, optional
        Names or positions of columns that are always filled, and get a feature of 0 and 1 beside them that says where
        a value was missing. A public choice. These features come last; `feature_scale` speaks of them, too.
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
    representation_ : (n_features, rank) array, public
    privacy_ : PrivacyReport; relation, epsilon spent, delta, accountant, every event, whether the noise was seeded
    rank_ : int
    categories_ : dict of the categories of each column that have a feature, public
    feature_names_in_ : names of the columns of a frame; `predict` finds them by name, in any order
    users_ : the ids of the users, private like the heads

    Formal guarantee: `representation_`, `privacy_` and the billboard are (epsilon, delta)-DP at user level. Heads are
    not released; if they are collected, the guarantee is joint differential privacy (the billboard model): what the
    others see is private with respect to each user.
    """

    method = "private-fedrep"


class PrivAltMin(Regressor):
    """Learn the same by private alternating minimisation (Jain et al. 2021). Parameters are `PrivateFedRep`'s."""

    method = "priv-altmin"


class CentaurLinear(Regressor):
    """Learn the same by CENTAUR in the linear case (Shen et al. 2023). Parameters are `PrivateFedRep`'s."""

    method = "centaur"


def __getattr__(name: str) -> type[Regressor]:
    """Make the estimator of a registered method that has no class above."""
    if name not in ESTIMATORS:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    method = METHODS[ESTIMATORS[name]]
    text = f"{method.title} Parameters are `PrivateFedRep`'s."
    globals()[name] = type(name, (Regressor,), {"method": method.name, "__doc__": text, "__module__": __name__})
    return cast(type[Regressor], globals()[name])
