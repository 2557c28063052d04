"""Rows as estimators are given them: arrays, or frames whose columns are found by name."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
from sklearn.utils.validation import check_array, check_X_y, validate_data

from privrep.data import categories as one_hot
from privrep.data.categories import Categories
from privrep.data.frames import (
    FrameRows,
    check_columns,
    find_numeric_text,
    read_column_names,
    read_frame,
    read_rows,
    sort_columns,
)
from privrep.data.missing import MissingCounts
from privrep.data.table import UserTable, plain
from privrep.errors import ColumnNote, InputError
from privrep.models.description import Columns
from privrep.models.learning import PendingColumns
from privrep.privacy.protocol import Users
from privrep.users.holders import KeyHolders
from privrep.users.memory import InMemoryUsers


@dataclass(frozen=True)
class Named:
    """Rows whose columns were found by name, (rows, columns): an array or a sparse matrix."""

    values: Any


@dataclass(frozen=True)
class GivenRows:
    """Hold what `fit` was given as X.

    `X` is for `validated`: `Named` codes of a frame, or anything else as it came. `frame` tells what the codes mean.
    """

    X: Any
    frame: FrameRows | None = None
    names: tuple[str, ...] = ()  # of the columns, in the order of the frame
    declared: Mapping[str, Categories] | None = None  # of each column of categories; empty where it is not declared

    def columns(self, y: Any, groups: Any) -> Columns:
        """Return the names of the columns, as far as series and frames tell them."""
        if self.frame is None:
            return Columns()
        lists = self.declared or {}
        targets, user = read_column_names(y), "".join(read_column_names(groups)[:1])
        if {user, *targets} & set(self.names) or user in targets:
            user, targets = "", ()
        return Columns(user, targets, self.frame.numbers, tuple(lists), tuple(lists.values()))


def read_given(X: Any, categories: Any) -> GivenRows:
    """Return the rows that a fit is to learn from.

    Args:
        X: a frame, or whatever scikit-learn takes.
        categories: public lists of categories by column; None in place of a list: to be selected privately.
    """
    lists = _checked_lists(categories)
    frame = read_frame(X)
    if frame is None:
        if lists:
            raise InputError("categories are of named columns; give X as a frame of pandas, polars or Arrow.")
        return GivenRows(X)
    numbers, by_value = sort_columns(frame, lists)
    declared = {name: lists.get(name, ()) for name in by_value}
    rows = read_rows(frame, numbers, declared, may_miss=True)
    if doubtful := find_numeric_text(frame, [name for name in by_value if name not in lists]):
        name = doubtful[0]
        raise InputError(
            f"column {name!r} of X is text most of which is written as numbers: convert it if it holds numbers, or "
            f"name it in categories, {{{name!r}: None}}, if its values are codes."
        )
    return GivenRows(Named(rows.values), rows, frame.names, declared)


def _checked_lists(categories: Any) -> dict[str, Categories]:
    if categories is None:
        return {}
    if not isinstance(categories, Mapping):
        raise InputError("categories must map columns to lists; write {'colour': ['red', 'green']}.")
    declared = one_hot.check_lists({name: listed for name, listed in categories.items() if listed is not None})
    return {name: declared.get(name, ()) for name in categories}


def read_known(X: Any, columns: Columns, features: int, dense: bool) -> Any:
    """Return rows for a model that is there: `Named` features where columns have names, anything else as it came.

    Args:
        X: a frame, whose columns may come in any order, or whatever scikit-learn takes.
        columns: those of the fit.
        features: how many features the model has.
        dense: whether its method takes dense rows alone.
    """
    frame, lists = read_frame(X), {name: listed for name, listed in columns.by_category.items() if listed}
    if frame is None:
        encoded = bool(lists) and len(np.shape(X)) == 2 and np.shape(X)[1] == features
        if lists and not encoded:
            raise InputError(
                f"this model has categories ({', '.join(lists)}): give X as a frame, with the columns of the fit."
            )
        return Named(X) if encoded else X
    if not columns.features and not columns.categorical:
        _, text = sort_columns(frame, {})
        if text:
            raise InputError(f"this model was fitted on numbers without names, and column {text[0]!r} of X is text.")
        return X
    unused = [name for name in columns.categorical if name not in lists]
    check_columns(
        frame, [*columns.features, *lists], (columns.user, *columns.targets, *filter(None, (columns.weight,)), *unused)
    )
    rows = read_rows(frame, columns.features, lists, may_miss=True)
    counts = MissingCounts()
    counts.add([], dict(zip(rows.numbers, rows.values.T, strict=False)), columns.policy)
    counts.check(columns.policy, "X")
    return Named(rows.encode(rows.values, lists, dense, columns.policy))


def reader(columns: Columns, features: int, dense: bool) -> Callable[[Any], Any]:
    """Return a function that returns rows of frames as features, and anything else as it came."""

    def read(X: Any) -> Any:
        known = read_known(X, columns, features, dense)
        return known.values if isinstance(known, Named) else known

    return read


def validated(estimator: Any, X: Any, *y: Any, reset: bool, **how: Any) -> Any:
    """Return X, or X and y, as scikit-learn's `validate_data` does; the columns of `Named` rows are known already.

    Args:
        estimator: whose data it is.
        X: rows.
        y: targets, if there are any.
        reset: whether this is `fit`, which learns how many columns there are and what they are called.
        how: what `validate_data` takes besides.
    """
    if not isinstance(X, Named):
        if (frame := read_frame(X)) is not None and (text := sort_columns(frame, {})[1]):
            raise InputError(
                f"column {text[0]!r} of X is text, and {type(estimator).__name__} takes numbers: give each "
                "public value a column of 0 and 1, or leave it out."
            )
        rows = plain(X)
        if isinstance(rows, np.ndarray) and rows.dtype.kind in "UST":
            raise InputError("X is an array of text; turn it into numbers, or give a frame, whose text is categories.")
        try:
            return validate_data(estimator, rows, *y, reset=reset, **how)
        except ValueError as error:
            if "could not convert" not in str(error):
                raise
            raise InputError("X has values that are not numbers; correct them, or leave their rows out.") from None
    how = {"ensure_min_features": 0, "estimator": estimator, **how}
    return check_X_y(X.values, *y, **how) if y else check_array(X.values, input_name="X", **how)


class PreparedRows:
    """Rows in memory that become features once all lists of categories are known."""

    def __init__(
        self,
        table: UserTable,
        frame: FrameRows | None,
        dense: bool,
        finish: Callable[[UserTable, Columns], UserTable] = lambda table, columns: table,
    ) -> None:
        """Take the rows.

        Args:
            table: its X are the values of `frame`, or features if there is none.
            frame: what the values mean.
            dense: whether features must be dense.
            finish: what else is to be done to the table then.
        """
        self.table = table
        self._rows, self._frame, self._dense, self._finish = table, frame, dense, finish

    def users(self, columns: Columns, labels: KeyHolders | None = None) -> Users | PendingColumns:
        """Return the users; those without all lists hold what is to be selected."""
        undecided = [name for name, listed in columns.by_category.items() if not listed]
        if not undecided and labels is None:
            return self.make(columns)
        assert self._frame is not None or not undecided
        owners = np.repeat(np.arange(self._rows.n_users), self._rows.sizes)
        holders = {
            name: KeyHolders.from_columns(owners, self._frame.keys(name, self._rows.X))  # type: ignore[union-attr]
            for name in undecided
        }
        return PendingColumns(holders, self.make, labels)

    def make(self, columns: Columns) -> Users:
        """Return the users with their features; `table` has these rows from now on."""
        table = self._rows
        if self._frame is not None:
            encoded = self._frame.encode(table.X, columns.by_category, self._dense, columns.policy)
            table = replace(table, X=encoded)
        self.table = self._finish(table, columns)
        return InMemoryUsers(self.table)


def warn_if_unnamed(asked: Columns, found: Columns) -> None:
    """Warn of columns of categories none of which could be named."""
    for name, listed in found.by_category.items():
        if not listed and name in asked.categorical:
            warnings.warn(
                f"no value of column {name!r} is held by enough users to be named at this epsilon: it is left out. "
                "Declare its values in categories if they are public.",
                ColumnNote,
                stacklevel=3,
            )
