"""Ratings: the scikit-learn face of private factorisation."""

from __future__ import annotations

from pathlib import Path
from typing import Any, Literal, Self

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from numpy.typing import NDArray
from sklearn.base import BaseEstimator
from sklearn.utils.validation import check_is_fitted

from privrep.data import categories
from privrep.data.categories import encode_items, to_item_column
from privrep.data.missing import IMPUTE, MissingCounts
from privrep.data.table import UserTable, factorize, plain
from privrep.errors import InputError
from privrep.estimators.accounts import check_account, open_account, warn_if_again
from privrep.estimators.base import warn_if_nothing, warn_if_weak
from privrep.estimators.checks import as_rank, as_seed, warn_missing
from privrep.estimators.progress import watch
from privrep.estimators.strangers import Groups, check_unknown_users, find_heads
from privrep.heads.fitting import fit_block, fit_heads, make_newcomer_heads
from privrep.heads.personal import Taste
from privrep.heads.store import ids_to_arrow
from privrep.models import learning
from privrep.models import model as models
from privrep.models.description import Columns, Config
from privrep.privacy.events import Relation
from privrep.privacy.population import PopulationLedger
from privrep.privacy.protocol import Users
from privrep.typing import Array
from privrep.users.holders import KeyHolders
from privrep.users.memory import InMemoryUsers

COLUMN = "item"


class PrivateFactorization(BaseEstimator):
    """Ratings (user, item, rating) by item factors under user-level differential privacy, and private user factors.

    A prediction is the user's level plus the user's spread times the item's offset plus <item factors, user factors>.
    The typical level, offsets and factors of the items are released privately. Level, spread and factors of a user stay
    with the user: they are what its own ratings make of the typical ones, the less the fewer ratings it has. A user
    without ratings has the typical level and the items' offsets.

    Parameters
    ----------
    rank : int or "auto"
        The most factors to keep; "auto" keeps those that stand out from the noise. There may be none, and with 0 there
        is none: what factors would have cost is then spent on offsets.
    epsilon, delta : float
        The whole budget of `fit`.
    relation : "replace-one-user" or "add-or-remove-one-user"
        Which change of the population the guarantee speaks of.
    items : list, optional
        The catalogue, if it is public: all integers or all text. By default the items that enough users rated are
        selected privately, for a twentieth of the budget: a list of all items that occur would tell of a user who
        alone rated one. If none can be named, users have levels alone, and a warning says so.
    unknown_users : "prior" or "refuse"
        What `predict` does with rows of users who were not in `fit`: predict them with the typical level and the item's
        offset and warn (`UnknownUsers`), or raise an error.
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
    items_ : tuple of the items that have factors, public
    item_offsets_, item_factors_ : arrays (items,) and (items, rank), public, in units of a user's own spread
    level_ : float, of a typical user, public; None in models of earlier versions
    privacy_ : PrivacyReport
    users_ : the ids of the users, private like their factors

    Formal guarantee: all attributes but `users_` are (epsilon, delta)-DP at user level.
    """

    def __init__(
        self,
        rank: int | Literal["auto"] = "auto",
        *,
        epsilon: float = 1.0,
        delta: float = 1e-6,
        relation: Relation = "replace-one-user",
        items: Any = None,
        unknown_users: Literal["prior", "refuse"] = "prior",
        random_state: int | None = None,
        run_folder: str | Path | None = None,
        population: str | Path | PopulationLedger | None = None,
        verbose: bool = False,
    ) -> None:
        self.rank = rank
        self.epsilon = epsilon
        self.delta = delta
        self.relation = relation
        self.items = items
        self.unknown_users = unknown_users
        self.random_state = random_state
        self.run_folder = run_folder
        self.population = population
        self.verbose = verbose

    def fit(self, users: Groups, items: Any, ratings: Any) -> Self:
        """Learn from equally long columns: who rated what how.

        Rows without a rating (NaN) are left out, and counted in a `MissingValues` warning, which is not private. Their
        users stay.

        Args:
            users: the user of each row, (rows,).
            items: what was rated, (rows,).
            ratings: numbers, (rows,).
        """
        check_unknown_users(self.unknown_users)
        check_account(self)
        values = _ratings(ratings)
        users = users.to_numpy() if isinstance(users, pa.ChunkedArray) else users
        if not len(users) == len(items) == len(values):
            raise InputError(
                f"users, items and ratings must be equally long. Got {len(users)}, {len(items)} and {len(values)}."
            )
        column = to_item_column(items)  # what cannot be used is refused before anything is spent
        rated = _rated(values)
        table: UserTable | None = None

        def make(columns: Columns) -> Users:
            nonlocal table
            rows = _one_hot(column, columns.categories[0])
            table = UserTable.from_rows(rows, values, users, None if rated.all() else rated.astype(np.float64))
            return InMemoryUsers(table)

        folder = None if self.run_folder is None else Path(self.run_folder)
        if folder is not None:
            ids_to_arrow(factorize(users)[0])  # what cannot be saved is refused before it costs
        if self.items is None:
            columns = Columns(categorical=(COLUMN,), categories=((),))
            known = pc.if_else(pa.array(rated), column, pa.scalar(None, column.type))
            holders = {COLUMN: KeyHolders.from_columns(users, known)}
        else:
            listed = categories.check_lists({COLUMN: self.items})[COLUMN]
            columns, holders = Columns(categorical=(COLUMN,), categories=(listed,)), {}
        warn_if_weak(self, users)
        pending = learning.PendingColumns(holders, make)
        with watch(self.verbose, learning.PAGES) as bar:
            account = open_account(self, lambda: factorize(users)[0])
            told = None if bar is None else bar.page
            facts: Any = {"folder": folder, "account": account, "columns": columns, "on_page": told}
            fitted = learning.learn(pending, self._config(), **facts)
        assert table is not None  # learn made it
        warn_if_nothing(fitted)
        self._adopt(models.with_heads(fitted, fit_heads(table.blocks(), fitted.representation)))
        if folder is not None:
            models.finish(self.model_, folder)
        warn_if_again(self, lambda: factorize(users)[0], fitted.privacy)
        return self

    def predict(self, users: Groups, items: Any) -> Array:
        """Return ratings by each row's user of each row's item, (rows,).

        An item that is not in `items_` has the user's level.
        Rows of users who were not in `fit` have the typical level and the item's offset. An `UnknownUsers` warning
        counts them. With unknown_users="refuse", and in models of earlier versions, they are an error.
        """
        check_is_fitted(self)
        refuses = check_unknown_users(self.unknown_users)
        if len(users) != len(items):
            raise InputError(f"users and items must be equally long. Got {len(users)} and {len(items)} instead.")
        rows = _one_hot(items, self.items_)
        heads, positions = find_heads(self.model_, plain(users), refuses, stacklevel=4)
        return heads.predict(self.model_.representation, rows, positions)

    def personalize(self, items: Any, ratings: Any) -> Taste:
        """Return the taste of a user who was not there, from its own ratings and the public factors.

        Costs no privacy. There may be no ratings at all: the user then has the typical level and the items' offsets.
        Rows without a rating are left out.
        """
        check_is_fitted(self)
        values = _ratings(ratings)
        if len(items) != len(values):
            raise InputError(f"items and ratings must be equally long. Got {len(items)} and {len(values)} instead.")
        rated = ~np.isnan(values)
        values = values[rated]
        learned = self.model_.representation
        if not len(values) and not learned.serves_newcomers:
            raise InputError("personalize needs at least one rating of the user.")
        nobody = np.zeros(1, dtype=np.int64)
        if len(values):
            rows = _one_hot(items, self.items_)[rated]
            head = fit_block(UserTable.from_rows(rows, values, nobody.repeat(len(values))), learned, True, False)
        else:
            head = make_newcomer_heads(nobody, learned)
        mean = float(head.intercept[0])
        return Taste(self.items_, head.weights(learned)[0] + mean, mean)

    def save(self, folder: str | Path, *, overwrite: bool = False) -> None:
        """Write the model. Everything but folder/private is safe to publish."""
        check_is_fitted(self)
        models.save(self.model_, Path(folder), overwrite=overwrite)

    @classmethod
    def load(cls, folder: str | Path) -> Self:
        """Read a model folder, as `save` or `privrep fit --item` wrote it."""
        loaded = models.load(Path(folder))
        c = loaded.config
        if not c.ratings:
            raise InputError(f"{folder} holds no model of ratings; load it with the estimator that made it.")
        rank: int | Literal["auto"] = "auto" if c.rank is None else c.rank
        estimator = cls(rank, epsilon=c.epsilon, delta=c.delta, relation=c.relation, random_state=c.seed)
        estimator._adopt(loaded)
        return estimator

    def _adopt(self, fitted: models.Model) -> None:
        self.model_ = fitted
        self.items_ = fitted.columns.categories[0]
        matrix = fitted.representation.matrix
        self.item_offsets_, self.item_factors_ = matrix[:, 0], matrix[:, 1:]
        self.rank_ = matrix.shape[1] - 1
        ratings = fitted.representation.ratings
        self.level_ = None if ratings is None else ratings.level
        self.privacy_ = fitted.privacy
        if fitted.heads is not None:
            self.users_ = fitted.heads.ids

    def _config(self) -> Config:
        return Config(
            rank=as_rank(self.rank),
            epsilon=float(self.epsilon),
            delta=float(self.delta),
            relation=self.relation,
            seed=None if self.random_state is None else as_seed(self.random_state),
            ratings=True,
        )


def _ratings(ratings: Any) -> Array:
    """Return ratings as numbers, NaN where one is missing."""
    try:
        values = np.asarray(plain(ratings), dtype=np.float64)
    except (ValueError, TypeError):
        raise InputError("ratings must be numbers; turn them into numbers.") from None
    if values.ndim != 1:
        raise InputError(f"ratings must be one column of numbers. Got shape {values.shape} instead.")
    if np.isinf(values).any():
        raise InputError(f"ratings has no finite number in row {int(np.flatnonzero(np.isinf(values))[0])}.")
    return values


def _rated(values: Array) -> NDArray[np.bool_]:
    """Return which rows have a rating; say how many have none, to whoever holds them."""
    counts = MissingCounts()
    counts.add([values], {}, IMPUTE)
    if len(values) and counts.without_target == len(values):
        raise InputError("no row is left: each lacks its rating. Give others.")
    warn_missing(counts, stacklevel=4)
    return np.asarray(~np.isnan(values))


def _one_hot(items: Any, listed: categories.Categories) -> Any:
    codes = encode_items(items, listed)
    return categories.encode_one_hot(np.empty((len(codes), 0)), codes[:, None], [len(listed)])
