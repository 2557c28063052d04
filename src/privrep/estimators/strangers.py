"""Users who were not in the fit, among rows to predict: refused, or predicted by the prior mean with a warning."""

from __future__ import annotations

import warnings
from collections.abc import Hashable, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from privrep.data.table import factorize, find_users
from privrep.errors import InputError, UnknownUsers
from privrep.heads.fitting import make_nobody
from privrep.heads.heads import Heads
from privrep.heads.uncertainty import describe_unknown
from privrep.models.model import Model

Groups = Sequence[Hashable] | NDArray[Any]

NO_HEADS = "this model was loaded without its users' heads (folder/private)"
ONLY_PERSONALIZE = f"{NO_HEADS}: only personalize works."


def find_heads(fitted: Model, groups: Groups, refuses: bool, stacklevel: int = 5) -> tuple[Heads, NDArray[np.int64]]:
    """Return heads, and where each row's user is among them, (rows,); -1 for users to predict by the prior mean.

    A model that was published has no heads: all its users are strangers then, and a warning says so.

    Args:
        fitted: the model.
        groups: the user of each row, (rows,).
        refuses: whether users who were not in the fit are refused.
        stacklevel: how many calls above this one a warning points to.
    """
    serves = fitted.representation.serves_newcomers
    if fitted.heads is None:
        if refuses or not serves:
            raise InputError(ONLY_PERSONALIZE)
        said = describe_unknown(len(groups), len(factorize(groups)[0]), ratings=fitted.config.ratings)
        warnings.warn(f"{NO_HEADS}; {said}.", UnknownUsers, stacklevel=stacklevel - 1)
        return make_nobody(fitted.representation), np.full(len(groups), -1, dtype=np.int64)
    ids = fitted.heads.ids
    if refuses or not serves:
        return fitted.heads, known_users(ids, groups)
    return fitted.heads, find_or_warn(ids, groups, fitted.config.ratings, stacklevel)


def known_users(ids: NDArray[Any], groups: Groups) -> NDArray[np.int64]:
    """Return where the users of rows are among the users with heads, (rows,); raise InputError for an unknown one."""
    positions = find_users(ids, groups)
    if (positions < 0).any():
        row = int(np.flatnonzero(positions < 0)[0])
        raise InputError(
            f"user {np.asarray(groups, dtype=object)[row]!r} (row {row}) was not in fit, so it has no head. "
            "Call personalize with a few of its rows to make one."
        )
    return positions


def check_unknown_users(unknown_users: str) -> bool:
    """Return whether users who were not in fit are refused; raise InputError if the parameter is none."""
    if unknown_users not in ("prior", "refuse"):
        raise InputError(f'unknown_users must be "prior" or "refuse". Got {unknown_users!r} instead.')
    return unknown_users == "refuse"


def find_or_warn(ids: NDArray[Any], groups: Groups, ratings: bool, stacklevel: int) -> NDArray[np.int64]:
    """Return the position of each row's user among those who have heads, (rows,); -1 and a warning for strangers.

    Args:
        ids: the users who have heads, (users,).
        groups: the user of each row, (rows,).
        ratings: whether the model is one of ratings.
        stacklevel: how many calls above this one the warning points to.
    """
    positions = find_users(ids, groups)
    if (positions < 0).any():
        said = describe_unknown(*count_unknown(ids, groups, positions), ratings=ratings)
        warnings.warn(f"{said}; personalize makes heads of users' own rows.", UnknownUsers, stacklevel=stacklevel)
    return positions


def count_unknown(ids: NDArray[Any], groups: Groups, positions: NDArray[np.int64]) -> tuple[int, int]:
    """Return how many rows are of users without a head, and how many such users there are.

    Args:
        ids: the users who have heads.
        groups: the user of each row; a row without one is an InputError.
        positions: where the user of each row is among `ids`, -1 for a user who is not.
    """
    listed, unknown = list(groups), positions < 0
    codes = factorize(listed)[1]
    kinds = ["text" if isinstance(name, str) else "not text" for name in (ids.tolist()[0], listed[0])]
    if unknown.all() and kinds[0] != kinds[1]:
        raise InputError(f"the users of groups are {kinds[1]}, those of the model are {kinds[0]}; convert one of them.")
    return int(unknown.sum()), len(np.unique(codes[unknown]))
