"""The methods by name, a line each. Names are known without loading anything; a method is loaded when it is asked for.

`METHODS` are the methods that the setting `method` can name. Ratings have one method, which no setting names. Selection
by margins and by Lipschitz losses is not here: it takes public facts of its own (margin, radius, norm), spends a pure
budget, and its estimator calls it.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from functools import cache
from importlib import import_module
from typing import TYPE_CHECKING, cast

from privrep.errors import InputError

if TYPE_CHECKING:
    from privrep.linear.method import Method

DEFAULT = "private-fedrep"
_REGISTERED = {  # by name: the file in linear/methods/, and the estimator of numbers in Python
    "private-fedrep": ("private_fedrep", "PrivateFedRep"),
    "priv-altmin": ("priv_altmin", "PrivAltMin"),
    "centaur": ("centaur", "CentaurLinear"),
    "fedavg": ("fedavg", "DPFedAvg"),
}
_RATINGS = ("factorization", "PrivateFactorization")
_SHARED = (
    "transform",
    "panel",
    "descent",
    "numbers",
    "starts",
    "alternation",
    "labels",
    "nets",
)  # in linear/, for many methods

REFUSALS = {  # by the word of `Method.accepts` that is missing
    "classes": "{name} solves least squares, of numbers; for labels the method is {able}.",
    "several targets": "{name} takes one target; fit each by itself, or use {able}.",
    "sparse": "{name} takes dense features, not sparse ones; make them dense, or use {able}.",
    "start": "{name} has no start to choose; leave it out, or use {able}.",
    "paper": "{name} has no configuration of a paper; use the default, or {able}.",
    "add-or-remove-one-user": "{name} takes the number of users as public; use replace-one-user, or {able}.",
}


class _Methods(Mapping[str, "Method"]):
    """The methods by name, each loaded when it is asked for."""

    def __getitem__(self, name: str) -> Method:
        return _load(_REGISTERED[name][0])

    def __iter__(self) -> Iterator[str]:
        return iter(_REGISTERED)

    def __len__(self) -> int:
        return len(_REGISTERED)


METHODS: Mapping[str, Method] = _Methods()
ESTIMATORS = {estimator: name for name, (_, estimator) in _REGISTERED.items()}
"""Names of methods by the names of their estimators."""


@cache
def _load(file: str) -> Method:
    """Return the method of a file in linear/methods/, loaded once."""
    return cast("Method", import_module(f"privrep.linear.methods.{file}").METHOD)


def find_method(name: str, ratings: bool) -> Method:
    """Return the method of this name, or the method of ratings for a table of ratings, whatever the name."""
    return _load(_RATINGS[0]) if ratings else METHODS[name]


def find_estimator(name: str, ratings: bool) -> str:
    """Return the name of the estimator of numbers, or of ratings, that learns by this method."""
    return _RATINGS[1] if ratings else _REGISTERED[name][1]


def check_accepted(method: Method, asked: Iterable[str]) -> None:
    """Raise InputError at the first of the words asked for that the method does not accept."""
    for word in asked:
        if word not in method.accepts:
            able = " or ".join(name for name, other in METHODS.items() if word in other.accepts)
            raise InputError(REFUSALS[word].format(name=method.name, able=able))


def name_methods() -> str:
    """Return the names that `method` can have, in words. Loads no method."""
    *first, last = _REGISTERED
    return f"{', '.join(first)} or {last}"


@cache
def find_purposes() -> Mapping[str, str]:
    """Return what the pages of all methods are for, by the keys that `Method.purposes` explains."""
    parts = [import_module(f"privrep.linear.{module}").PURPOSES for module in _SHARED]
    parts += [method.purposes for method in (*METHODS.values(), _load(_RATINGS[0]))]
    joined: dict[str, str] = {}
    for part in parts:
        for key, meaning in part.items():
            if joined.setdefault(key, meaning) != meaning:
                raise ValueError(f"two purposes of {key}: {joined[key]!r} and {meaning!r}")
    return joined
