"""JSON that another machine sent, as the fields of a dataclass: all of them, none else, of their types."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal

import pytest

from privrep.errors import InputError
from privrep.schema.sent import read_fields, read_some_fields


@dataclass(frozen=True)
class Kept:
    count: int
    size: float
    names: tuple[str | int, ...] = ()
    pair: tuple[int, float] | None = None
    how: Literal["fast", "slow"] = "fast"
    own: object = None


GOOD: dict[str, Any] = {"count": 3, "size": 2, "names": ["a", 1], "pair": [1, 2], "how": "slow", "own": [1]}


def read(given: Any) -> dict[str, Any]:
    return read_fields(Kept, given, "it", {"own": tuple})


def test_fields_come_as_their_types() -> None:
    found = read(GOOD)
    assert Kept(**found) == Kept(3, 2.0, ("a", 1), (1, 2.0), "slow", (1,))
    assert type(found["size"]) is float


@pytest.mark.parametrize(
    ("name", "value"),
    [
        *(("count", value) for value in (True, 1.0, "1", None, 2**63, 10**400)),
        *(("size", value) for value in (True, "1", None, float("nan"), float("inf"), 10**400)),
        *(("names", value) for value in ("ab", {"a": 1}, [True], [None], [["a"]])),
        *(("pair", value) for value in ([1], [1, 2, 3], [1.0, 2], "ab")),
        *(("how", value) for value in ("", "Fast", 1, ["fast"])),
    ],
)
def test_another_type_is_one_short_sentence(name: str, value: Any) -> None:
    with pytest.raises(InputError) as refused:
        read({**GOOD, name: value})
    said = str(refused.value)
    assert said.startswith(f"it.{name} is not what it should be. Got ")
    assert len(said) < 120


def test_names_are_those_of_the_dataclass() -> None:
    with pytest.raises(InputError, match="it does not say count, size; server and nodes need the same version"):
        read({name: value for name, value in GOOD.items() if name not in ("count", "size")})
    with pytest.raises(InputError, match="it has no field 'zzz'"):
        read({**GOOD, "zzz": 1})
    for given in (None, [], "text", {1: 2}):
        with pytest.raises(InputError, match="it must be a mapping of names to values"):
            read(given)


def test_some_fields_may_be_left_out_and_others_may_not_be_there() -> None:
    assert read_some_fields(Kept, {"size": 1}, "it", ("own",)) == {"size": 1.0}
    assert read_some_fields(Kept, {}, "it", ("own",)) == {}
    with pytest.raises(InputError, match="it has no field 'own'"):
        read_some_fields(Kept, {"own": 1}, "it", ("own",))
