"""Fields of JSON, each of the type that its dataclass says: what a node makes of what it was sent."""

from __future__ import annotations

import math
import types
import typing
from collections.abc import Callable, Collection, Mapping
from dataclasses import fields
from typing import Any, Literal

from privrep.data.categories import checked_classes
from privrep.errors import InputError
from privrep.models.description import Columns


def read_fields(
    kind: type[Any], given: Any, where: str, others: Mapping[str, Callable[[Any], Any]] | None = None
) -> dict[str, Any]:
    """Arguments of a dataclass from JSON: every field there, none else, each of its declared type; `others` are read by
    functions of their own."""
    given, others = mapping(given, where), others or {}
    check_names(given, [each.name for each in fields(kind) if each.init], where)
    hints = typing.get_type_hints(kind)
    return {
        name: others[name](value) if name in others else typed(value, hints[name], f"{where}.{name}")
        for name, value in given.items()
    }


def read_columns(given: Any) -> Columns:
    """Columns of a table; classes may be texts, integers or booleans."""
    classes = {"classes": lambda listed: () if listed == [] else checked_classes(listed)}
    return Columns(**read_fields(Columns, given, "columns", classes))


def typed(value: Any, hint: Any, where: str) -> Any:
    """The value, if it is of the type: a whole or finite number, a text, one of several, or a list of such."""
    origin, inner = typing.get_origin(hint), typing.get_args(hint)
    if origin in (typing.Union, types.UnionType):
        for each in inner:
            try:
                return typed(value, each, where)
            except InputError:
                continue
    elif origin is Literal:
        if isinstance(value, str) and value in inner:
            return value
    elif origin is tuple:
        several = inner[1:] == (...,)
        if isinstance(value, list | tuple) and (several or len(value) == len(inner)):
            return tuple(typed(each, inner[0 if several else place], where) for place, each in enumerate(value))
    elif hint is float:
        if isinstance(value, int | float) and not isinstance(value, bool) and _finite(value):
            return float(value)
    elif hint is int:
        if isinstance(value, int) and not isinstance(value, bool) and -(2**63) <= value < 2**63:
            return value
    elif (hint is type(None) and value is None) or (hint in (str, bool) and isinstance(value, hint)):
        return value
    raise InputError(f"{where} of the task is not what it should be. Got {shortly(value)} instead.")


def _finite(value: float) -> bool:
    try:
        return math.isfinite(value)
    except OverflowError:
        return False


def shortly(value: Any) -> str:
    """For a message: something that was sent, but not all of it."""
    plain = value is None or isinstance(value, str | float | bool) or (isinstance(value, int) and abs(value) < 2**63)
    return f"{value!r:.40}" if plain else f"something of type {type(value).__name__}"


def mapping(given: Any, where: str) -> Mapping[str, Any]:
    if not isinstance(given, Mapping) or not all(isinstance(name, str) for name in given):
        raise InputError(f"{where} must be a mapping of names to values. Got {shortly(given)} instead.")
    return given


def check_names(given: Mapping[str, Any], wanted: Collection[str], where: str) -> None:
    missing = next((name for name in wanted if name not in given), None)
    if missing is not None:
        raise InputError(f"{where} does not say {missing}; server and nodes need the same version of privrep.")
    stray = next((name for name in given if name not in wanted), None)
    if stray is not None:
        raise InputError(f"{where} has no field {stray[:40]!r}; server and nodes need the same version of privrep.")
