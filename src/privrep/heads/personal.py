"""One user's own model, as `personalize` returns it, made of the public part and that user's rows."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, Literal, overload

import numpy as np
from numpy.typing import NDArray
from scipy import sparse
from sklearn.utils.metaestimators import available_if

from privrep.data.categories import Categories, encode_items
from privrep.data.missing import IMPUTE, Missing, MissingCounts
from privrep.data.table import plain
from privrep.errors import InputError
from privrep.heads.uncertainty import NO_PRIOR, Doubts, Trust
from privrep.local.losses import Loss, compute_probabilities, decide_classes
from privrep.typing import Array


@dataclass(frozen=True)
class PersonalHead:
    """One user's model, made of the public representation and that user's rows. It belongs to that user."""

    kind: str | tuple[str, ...]  # one of HEAD_KINDS; of several targets one each
    weights: Array  # (d,), in the original features, or (targets, d)
    intercept: float | Array  # or (targets,)
    doubts: Doubts | None = field(default=None, repr=False)  # of this user alone; None: the head has no prior
    silent: str = field(default=NO_PRIOR, repr=False)  # why there are no doubts, if there are none
    fill: Array | None = field(default=None, repr=False)  # (d,): what a missing value is; None: none may be
    ignored: NDArray[np.bool_] | None = field(default=None, repr=False)  # (d,): columns that the user had no value in
    missing: Missing = field(default=IMPUTE, repr=False)  # as the fit had it
    read: Callable[[Any], Any] | None = field(default=None, repr=False, compare=False)  # features of frames

    @overload
    def predict(self, X: Any, return_std: Literal[False] = False) -> Array: ...
    @overload
    def predict(self, X: Any, return_std: Literal[True]) -> tuple[Array, Array]: ...
    def predict(self, X: Any, return_std: bool = False) -> Array | tuple[Array, Array]:
        """Return predictions for rows of this user and, if asked for, the standard deviations of their errors.

        Args:
            X: rows (rows, d), which may be sparse.
            return_std: whether to return standard deviations, too.

        Returns:
            (rows,), or (rows, targets) where there are several; with return_std two arrays of that shape.
        """
        rows = self.checked_rows(X)
        values = self._values(rows)
        return (values, self._known_doubts.deviations(rows, _index_only_user(rows))) if return_std else values

    def _values(self, rows: Any) -> Array:
        """Return predictions for checked rows, (rows,) or (rows, targets)."""
        return np.asarray(rows @ self.weights.T + self.intercept)

    def predict_interval(self, X: Any, coverage: float = 0.9) -> tuple[Array, Array]:
        """Return the lower and the upper ends of intervals, each in the shape of `predict`.

        Args:
            X: rows (rows, d), which may be sparse.
            coverage: the share of targets that intervals cover, between 0 and 1.
        """
        rows = self.checked_rows(X)
        values, width = self._values(rows), self._known_doubts.half_widths(rows, _index_only_user(rows), coverage)
        return values - width, values + width

    @property
    def _known_doubts(self) -> Doubts:
        """Return what the head leaves to doubt; raise InputError if it has no prior."""
        if self.doubts is None:
            raise InputError(self.silent)
        return self.doubts

    def checked_rows(self, X: Any) -> Any:
        """Return rows (rows, d) as numbers; raise InputError unless they have as many features as the head.

        Missing values are filled in, or refused if the fit refused them.
        """
        X = X if self.read is None else self.read(X)
        rows: Any = np.asarray(plain(X), dtype=np.float64) if not sparse.issparse(X) else X
        whole = self.weights.shape[-1]
        d = whole - len(self.missing.indicators)
        marked = self.read is not None and rows.ndim == 2 and rows.shape[1] == whole  # indicators are there already
        if rows.ndim != 2 or (rows.shape[1] != d and not marked):
            raise InputError(f"X must have shape (rows, {d}). Got {rows.shape} instead.")
        if sparse.issparse(rows):
            if self.fill is None or not np.isnan(rows.data).any():
                return rows
            rows = rows.toarray()
        if not marked and self.missing.how == "refuse":
            counts = MissingCounts()
            counts.add([], {f"column {j}": rows[:, j] for j in range(d)}, self.missing)
            counts.check(self.missing, "X")
        if self.fill is None or self.ignored is None:
            return rows
        rows = rows if marked else self.missing.with_indicators(rows)
        return np.where(np.isnan(rows) | self.ignored, self.fill, rows)


def _index_only_user(rows: Any) -> NDArray[np.int64]:
    """Return the position of the only user, 0, for each row."""
    return np.zeros(rows.shape[0], dtype=np.int64)


def has_probabilities(model: Any) -> bool:
    """Raise AttributeError for the hinge loss, whose outputs tell which class, not how likely it is."""
    loss = model.loss.name if isinstance(model.loss, Loss) else model.loss
    if loss != "log":
        raise AttributeError(f"predict_proba is there for the log loss only. The loss of this model is {loss!r}.")
    return True


@dataclass(frozen=True)
class PersonalClassifier:
    """One user's classifier, made of the public representation and that user's rows. It belongs to that user."""

    head: PersonalHead  # one output for two classes, whose sign decides; else one for each
    classes: NDArray[Any]
    loss: Loss = field(repr=False)
    trust: Trust | None = field(default=None, repr=False)  # of this user alone; None: the head has no prior

    @property
    def kind(self) -> str:
        """Return what the head is: "posterior", "prior", "own", or of models without a prior "shared", "constant"."""
        return self.head.kind if isinstance(self.head.kind, str) else self.head.kind[0]

    def decision_function(self, X: Any) -> Array:
        """Return the outputs for rows (rows, d): (rows,) for two classes, positive for the second, or (rows,
        classes)."""
        outputs = self.head.predict(X)
        if self.trust is None:
            return outputs
        rows = self.head.checked_rows(X)
        factors = self.trust.factors(rows, _index_only_user(rows))
        return outputs * (factors if outputs.ndim == 1 else factors[:, None])

    def predict(self, X: Any) -> NDArray[Any]:
        """Return the likeliest class of each row, (rows,), from rows (rows, d)."""
        return self.classes[decide_classes(self.decision_function(X))]

    @available_if(has_probabilities)  # type: ignore[untyped-decorator]
    def predict_proba(self, X: Any) -> Array:
        """Return the probability of each class, (rows, classes), in the order of `classes`, from rows (rows, d)."""
        return compute_probabilities(self.loss, self.decision_function(X))


@dataclass(frozen=True)
class Taste:
    """One user's predictions, made of the public factors and that user's ratings. It belongs to that user."""

    items: Categories
    scores: Array  # of each item
    mean: float  # of an item that is not among them

    def predict(self, items: Any) -> Array:
        """Return predicted ratings of items, (items,); an item that is not known gets the mean prediction."""
        codes = encode_items(items, self.items)
        scores = np.append(self.scores, self.mean)  # at -1: an item that is not among them
        return np.asarray(scores[codes])


@dataclass(frozen=True)
class MarginHead:
    """One user's classifier, made of the public representation and that user's rows. It belongs to that user."""

    weights: Array  # (d,), in the original features
    classes: NDArray[Any]

    def decision_function(self, X: Any) -> Array:
        """Return outputs for rows (rows, d), (rows,); positive for the second class."""
        rows = np.asarray(plain(X)) if isinstance(X, list) else plain(X)
        if rows.ndim != 2 or rows.shape[1] != len(self.weights):
            raise InputError(f"X must have shape (rows, {len(self.weights)}). Got {rows.shape} instead.")
        return np.asarray(rows @ self.weights)

    def predict(self, X: Any) -> NDArray[Any]:
        """Return the class of each row, (rows,), from rows (rows, d)."""
        return self.classes[(self.decision_function(X) > 0).astype(np.int64)]
