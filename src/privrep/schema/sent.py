"""Read JSON that another machine sent as the fields of a dataclass: all of them, none else, each of its declared type.

Nothing of it is taken on trust: numbers are finite and whole ones fit into 64 bits, and a sentence about a value shows
only the beginning of it.
"""

from __future__ import annotations

import types
import typing
from collections.abc import Callable, Collection, Mapping
from dataclasses import fields
from functools import lru_cache
from typing import Annotated, Any

from pydantic import BaseModel, ConfigDict, Field, Strict, ValidationError, create_model

from privrep.errors import InputError

Reader = Callable[[Any], Any]


class _Sent(BaseModel):
    model_config = ConfigDict(extra="forbid", strict=True, allow_inf_nan=False, arbitrary_types_allowed=True)


def read_fields(kind: type[Any], given: Any, where: str, others: Mapping[str, Reader] | None = None) -> dict[str, Any]:
    """Return the arguments of a dataclass from JSON.

    Args:
        kind: the dataclass.
        given: what was sent, with every field of the dataclass.
        where: how sentences call it.
        others: fields that are read by functions of their own.
    """
    others = others or {}
    found = _read(kind, frozenset(others), False, given, where)
    return {name: others[name](value) if name in others else value for name, value in found.items()}


def read_some_fields(kind: type[Any], given: Any, where: str, leave_out: Collection[str]) -> dict[str, Any]:
    """Return the arguments of a dataclass that were sent.

    Args:
        kind: the dataclass.
        given: what was sent.
        where: how sentences call it.
        leave_out: fields that may not be sent.
    """
    return _read(kind, frozenset(leave_out), True, given, where)


def read_mapping(given: Any, where: str) -> Mapping[str, Any]:
    """Return what was sent, if it is a mapping of names."""
    if not isinstance(given, Mapping) or not all(isinstance(name, str) for name in given):
        raise InputError(f"{where} must be a mapping of names to values. Got {shortly(given)} instead.")
    return given


def check_names(given: Mapping[str, Any], wanted: Collection[str], where: str) -> None:
    """Raise InputError unless these names were sent and no other.

    Args:
        given: what was sent.
        wanted: the names.
        where: how sentences call it.
    """
    missing = [name for name in wanted if name not in given]
    stray = [name for name in given if name not in wanted]
    if missing:
        raise _other_version(f"{where} does not say {', '.join(missing)}")
    if stray:
        raise _other_version(f"{where} has no field {stray[0][:40]!r}")


def shortly(value: Any) -> str:
    """Return the beginning of something that was sent, for a sentence."""
    plain = value is None or isinstance(value, str | float | bool) or (isinstance(value, int) and abs(value) < 2**63)
    return f"{value!r:.40}" if plain else f"something of type {type(value).__name__}"


def _other_version(what: str) -> InputError:
    return InputError(f"{what}; server and nodes need the same version of privrep.")


def _read(kind: Any, own: frozenset[str], partly: bool, given: Any, where: str) -> dict[str, Any]:
    model, given = _model_of(kind, own, partly), read_mapping(given, where)
    needed = [name for name, field in model.model_fields.items() if field.is_required()]
    check_names({**dict.fromkeys(set(model.model_fields) - set(needed)), **given}, tuple(model.model_fields), where)
    try:
        found = model.model_validate(dict(given))
    except ValidationError as error:
        first = error.errors(include_url=False)[0]
        name = f"{where}.{first['loc'][0]}"
        raise InputError(f"{name} is not what it should be. Got {shortly(first['input'])} instead.") from None
    return {name: getattr(found, name) for name in given}


@lru_cache
def _model_of(kind: Any, own: frozenset[str], partly: bool) -> type[BaseModel]:
    """Return a model with the fields of a dataclass; those of their own hold anything, or are left out of a part."""
    hints = typing.get_type_hints(kind)
    names = [each.name for each in fields(kind) if each.init and not (partly and each.name in own)]
    typed: dict[str, Any] = {name: Any if name in own else _as_sent(hints[name]) for name in names}
    made: Any = {name: (hint, None if partly else ...) for name, hint in typed.items()}
    return create_model(kind.__name__, __base__=_Sent, **made)


def _as_sent(hint: Any) -> Any:
    """Return the type that JSON has in place of a field's."""
    origin, inner = typing.get_origin(hint), typing.get_args(hint)
    if origin in (typing.Union, types.UnionType):
        return typing.Union[tuple(_as_sent(each) for each in inner)]  # noqa: UP007 - made of a list
    if origin is tuple:
        parts = tuple(each if each is ... else _as_sent(each) for each in inner)
        return Annotated[types.GenericAlias(tuple, parts), Strict(False)]
    if hint is int:
        return Annotated[int, Field(ge=-(2**63), lt=2**63)]
    return hint
