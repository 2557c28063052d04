"""Heads of many users as arrays, and what they predict. They never leave their user."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from privrep.errors import InputError
from privrep.heads.filling import join_means
from privrep.heads.ratings import make_newcomer
from privrep.heads.regression import PRIOR
from privrep.heads.uncertainty import NO_PRIOR, Doubts, Trust
from privrep.local.prior import HeadPrior, LabelPrior
from privrep.local.representation import Representation
from privrep.typing import Array


@dataclass(frozen=True)
class Heads:
    """Heads of many users, for each of their targets. The head of user i for target c has number i * targets + c.

    A prediction is intercept + <x, matrix shared> + <x, own>; one of the last two is zero.
    """

    ids: NDArray[Any]  # (n,)
    kind: NDArray[np.int8]  # (heads,)
    intercept: Array
    shared: Array  # (heads, k)
    own_position: NDArray[np.int64]  # row of `own`, or -1
    own: Array  # (heads that are regressions of their users' own, d)
    targets: int = 1
    origin: Array | None = None  # (heads, k): images of users' origins
    doubt: Array | None = None  # (heads, .): doubt about heads with a prior, see `posterior.PosteriorHeads`
    means: Array | None = None  # (n, p): users' means of the first p columns, see `filling`; None: not kept

    def predict(self, representation: Representation, X: Any, users: NDArray[np.int64]) -> Array:
        """Return predictions for rows.

        Args:
            representation: the one that the heads are of.
            X: rows (rows, d), which may be sparse.
            users: the position of each row's user, (rows,). Where there is a prior, -1 stands for a user without a
                head, whose prediction is the prior mean: of ratings the level and the item's offset.

        Returns:
            (rows,), or (rows, targets) where there are several.
        """
        if not representation.serves_newcomers and (users < 0).any():
            raise InputError("some rows are of users without a head, and this model has no prior to predict them with.")
        columns = [self._predict(representation, X, users, c) for c in range(self.targets)]
        if isinstance(representation.prior, LabelPrior):
            trusted = self.trust(representation).factors(X, users)
            columns = [trusted * column for column in columns]
        return columns[0] if self.targets == 1 else np.stack(columns, axis=1)

    def _predict(self, representation: Representation, X: Any, users: NDArray[np.int64], target: int) -> Array:
        """Return predictions for one target, (rows,), before trust.

        Args:
            representation: the one that the heads are of.
            X: rows (rows, d), which may be sparse.
            users: the position of each row's user, -1 for a user without a head, (rows,).
            target: its position.
        """
        heads = users * self.targets + target  # without a head it is another user's: such rows are overwritten
        predictions = self.intercept[heads] + np.einsum("rk,rk->r", X @ representation.head_matrix, self.shared[heads])
        if representation.prior is not None:
            mean = representation.prior.mean
            predictions += X @ mean.slopes[:, target]
            rows = np.flatnonzero((users < 0) | (self.kind[heads] == PRIOR))
            if len(rows):
                predictions[rows] = mean.predict_rows(X[rows])[:, target]
        elif representation.ratings is not None and (users < 0).any():
            rows = np.flatnonzero(users < 0)
            intercept, weights = make_newcomer(representation.ratings, self.shared.shape[1] - 1)
            predictions[rows] = intercept + np.asarray(X[rows] @ (representation.head_matrix @ weights))
        position = np.where(users < 0, -1, self.own_position[heads])
        rows = np.flatnonzero(position >= 0)
        if len(rows):
            predictions[rows] += np.einsum("rd,rd->r", X[rows], self.own[position[rows]])
        return predictions

    def doubts(self, representation: Representation) -> Doubts:
        """Return what the heads leave to doubt; raise InputError if they have no prior."""
        prior = representation.prior
        if not isinstance(prior, HeadPrior) or self.origin is None or self.doubt is None:
            raise InputError(NO_PRIOR)
        return Doubts(prior, self.origin, self.doubt, self.kind == PRIOR)

    def trust(self, representation: Representation) -> Trust:
        """Return how far outputs of classifiers are to be believed."""
        prior = representation.prior
        assert isinstance(prior, LabelPrior)
        assert self.origin is not None
        assert self.doubt is not None
        return Trust(prior, self.origin, self.doubt, self.kind)

    def deviations(self, representation: Representation, X: Any, users: NDArray[np.int64]) -> Array:
        """Return the standard deviation of each prediction's error, in the shape of `predict`; heads must have a prior.

        Args:
            representation: the one that the heads are of.
            X: rows (rows, d), which may be sparse.
            users: the position of each row's user, -1 for a user without a head, (rows,).
        """
        return self.doubts(representation).deviations(X, users)

    def interval(
        self, representation: Representation, X: Any, users: NDArray[np.int64], coverage: float
    ) -> tuple[Array, Array]:
        """Return the lower and the upper ends of intervals, each in the shape of `predict`.

        Args:
            representation: the one that the heads are of.
            X: rows (rows, d), which may be sparse.
            users: the position of each row's user, -1 for a user without a head, (rows,).
            coverage: the share of targets that intervals cover.
        """
        width = self.doubts(representation).half_widths(X, users, coverage)
        middle = self.predict(representation, X, users)
        return middle - width, middle + width

    def weights(self, representation: Representation) -> Array:
        """Return every head's linear model in the original features, (heads, d). For analysis; full vectors all."""
        weights = self.shared @ representation.head_matrix.T
        if representation.prior is not None:
            mean, new = representation.prior.mean, self.kind == PRIOR
            weights += np.tile(mean.slopes.T, (len(self.ids), 1))
            weights[new] = np.tile(mean.row_weights.T, (len(self.ids), 1))[new]
        with_own = self.own_position >= 0
        weights[with_own] += self.own[self.own_position[with_own]]
        return weights

    def of_users(self, chosen: NDArray[np.bool_]) -> Heads:
        """Return the heads of the chosen users, a mask (n,)."""
        each = np.repeat(chosen, self.targets)
        position = self.own_position[each]
        has = position >= 0
        return Heads(
            self.ids[chosen],
            self.kind[each],
            self.intercept[each],
            self.shared[each],
            np.where(has, np.cumsum(has) - 1, -1),
            self.own[position[has]],
            self.targets,
            None if self.origin is None else self.origin[each],
            None if self.doubt is None else self.doubt[each],
            None if self.means is None else self.means[chosen],
        )

    @classmethod
    def join(cls, parts: Iterable[Heads]) -> Heads:
        """Return the heads of all parts, one after another."""
        parts = list(parts)
        starts = np.cumsum([0, *(len(part.own) for part in parts)])
        moved = [np.where(p.own_position >= 0, p.own_position + s, -1) for p, s in zip(parts, starts, strict=False)]
        return cls(
            np.concatenate([part.ids for part in parts]),
            np.concatenate([part.kind for part in parts]),
            np.concatenate([part.intercept for part in parts]),
            np.concatenate([part.shared for part in parts]),
            np.concatenate(moved),
            np.concatenate([part.own for part in parts]),
            parts[0].targets,
            _join_arrays([part.origin for part in parts]),
            _join_arrays([part.doubt for part in parts]),
            join_means(parts),
        )


def _join_arrays(parts: list[Array | None]) -> Array | None:
    """Return arrays one after another; None unless every part has one."""
    held = [part for part in parts if part is not None]
    return np.concatenate(held) if len(held) == len(parts) else None
