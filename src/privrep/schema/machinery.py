"""Read a configuration by its pydantic model, and say what is wrong in one sentence that names file and key.

A section is a frozen model that refuses keys it does not know and converts nothing: "1" is no number, and true is no
whole number. A section that is left out is an empty one, so that all keys it must have are named at once. What a
key asks of others is checked after that.
"""

from __future__ import annotations

import difflib
import sys
import types
import typing
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, ClassVar, Literal, Self

from pydantic import (
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Field,
    GetCoreSchemaHandler,
    PlainValidator,
    ValidationError,
    ValidationInfo,
    WithJsonSchema,
)
from pydantic_core import CoreSchema, PydanticCustomError, core_schema
from pydantic_core import ErrorDetails as Mistake

from privrep.boundary import LIMITS, parse_toml, read_text_file, refusing
from privrep.errors import InputError
from privrep.schema.standard import STANDARD, name_of

_TABLES = ("model_type", "model_attributes_type", "dict_type")  # pydantic's names of "this is no table"


class Section(BaseModel):
    """A table of a configuration."""

    model_config = ConfigDict(frozen=True, extra="forbid", strict=True)

    needs: ClassVar[str] = "the config must say"  # before the keys that are missing
    tells_kinds: ClassVar[bool] = True  # whether what a missing key holds is said, too
    unknown: ClassVar[str] = "the config has no {what} {key}; {there}"
    stray: ClassVar[str] = ""  # of a key that another kind of the section has; empty: it is unknown like any other

    def given(self, *leave_out: str) -> dict[str, Any]:
        """Return the keys that the file says and their values, in the order of the schema."""
        names = (name for name in type(self).model_fields if name in self.model_fields_set and name not in leave_out)
        return {name: getattr(self, name) for name in names}


class SectionOfKind(Section):
    """A table whose key `kind` says which others it has."""

    needs = 'data of kind "{kind}" needs'
    stray = 'data of kind "{kind}" has no {key}; leave it out.'


# What a key holds


@dataclass(frozen=True)
class Holds:
    """In place of pydantic's words: what a key holds, as its sentences say it."""

    kind: str
    missing: str = ""  # what a missing key would hold, where that is more than the kind

    def __get_pydantic_core_schema__(self, source: Any, handler: GetCoreSchemaHandler) -> CoreSchema:
        def check(value: Any, inner: core_schema.ValidatorFunctionWrapHandler) -> Any:
            try:
                return inner(value)
            except ValidationError:
                raise PydanticCustomError("holds", "{kind}", {"kind": self.kind}) from None

        return core_schema.no_info_wrap_validator_function(check, handler(source))


class Shown:
    """Mark an optional key that a template sets."""


def entry(description: str, default: Any = ..., *, example: Any = None) -> Any:
    """Return a pydantic field: its description is the comment of templates and of JSON Schema.

    Args:
        description: what the key means, with its unit.
        default: None for a key that may be left out, `...` for one that may not.
        example: a plausible value, for templates.
    """
    return Field(default, description=description, examples=None if example is None else [example])


def _in_folder(value: Any, info: ValidationInfo) -> Path:
    if not isinstance(value, str) or not value:
        raise PydanticCustomError("holds", "{kind}", {"kind": "a path"})
    return Path((info.context or {}).get("folder", "."), value)


def _folder_or_name(value: Any, info: ValidationInfo) -> Any:
    folder = Path((info.context or {}).get("folder", "."))
    return str(folder / value) if isinstance(value, str) and (folder / value).is_dir() else value


class ReadFrom:
    """Mark a path that must be there before a fit can begin."""


_PATH = (Holds("a path"), PlainValidator(_in_folder), WithJsonSchema({"type": "string", "minLength": 1}))
Text = Annotated[str, Holds("text")]
Column = Annotated[str, Holds("text", missing="the name of a column")]
FolderOrName = Annotated[str, Holds("text"), BeforeValidator(_folder_or_name)]
Whole = Annotated[int, Field(ge=0), Holds("a whole number")]
Number = Annotated[int | float, WithJsonSchema({"type": "number"}), Holds("a number")]
YesNo = Annotated[bool, Holds("true or false")]
InputPath = Annotated[Path, *_PATH, ReadFrom()]
OutputPath = Annotated[Path, *_PATH]
Positive = Annotated[int, Field(gt=0)]
Size = Annotated[list[Positive], Field(min_length=2, max_length=2), Holds("[height, width]")]
ImageShape = Annotated[list[Positive], Field(min_length=3, max_length=3), Holds("[height, width, channels]")]
Texts = Annotated[list[str], Field(min_length=1), Holds("a list of texts")]
Names = Annotated[Positive | Annotated[list[str], Field(min_length=1)], Holds("a whole number or a list of names")]
_Name = Annotated[str, Field(min_length=1)]
Targets = Annotated[
    _Name | Annotated[list[_Name], Field(min_length=1)], Holds("the name of a column, or a list of names")
]
Values = Annotated[list[Any], Holds("the list of its values")]
Table = Annotated[dict[str, Any], Holds("a table")]


# Reading


class Configuration(Section):
    """A whole file: its sections by name."""

    @classmethod
    def read(cls, path: Path) -> Self:
        """Return the settings of a TOML file; paths in it are relative to the file.

        Raises:
            InputError: one sentence that names the file and the key.
        """
        try:
            return cls.checked(read_toml(path), path.parent)
        except _Refused as error:
            raise InputError(f"{name_of(path)}: {error}") from None

    @classmethod
    def checked(cls, found: Mapping[str, Any], folder: Path) -> Self:
        """Return the settings that a mapping of sections holds; paths in it are relative to the folder."""
        sections: dict[str, Any] = {name: {} for name in cls.model_fields if name not in found}
        try:
            return cls.model_validate({**found, **sections}, context={"folder": folder})
        except ValidationError as error:
            raise _Refused(sentence_of(cls, error)) from None

    def missing_files(self) -> list[Path]:
        """Return the paths that a fit would read and that are not there."""
        try:
            return [path for path in _inputs(self) if not path.exists()]
        except OSError as error:  # a name that no file can have
            raise InputError(
                f"a path of the config cannot be one ({error.strerror}): {str(error.filename)[:60]!r}..."
            ) from None


class _Refused(InputError):
    """A sentence that does not name the file yet."""


def read_toml(path: Path) -> dict[str, Any]:
    """Return what a TOML file says, or standard input for `-`, unchecked."""
    if path != STANDARD and not path.is_file():
        raise InputError(f"there is no file {path}; check the path.")
    with refusing(lambda why: f"{name_of(path)} is not a TOML file: {why}.", (OSError,)):
        most = LIMITS["text"].value
        return parse_toml(sys.stdin.buffer.read(most + 1) if path == STANDARD else read_text_file(path))


def _inputs(section: Section) -> Iterator[Path]:
    for name, field in type(section).model_fields.items():
        value = getattr(section, name)
        if isinstance(value, Section):
            yield from _inputs(value)
        elif isinstance(value, Path) and any(isinstance(each, ReadFrom) for each in marks(field)):
            yield value


# Mistakes


def check_all(*checks: Callable[[], None]) -> None:
    """Raise one InputError with the sentences of all checks that raise one."""
    found = []
    for check in checks:
        try:
            check()
        except InputError as error:
            found.append(str(error))
    if found:
        raise InputError(_joined(found))


def sentence_of(model: type[Section], error: ValidationError) -> str:
    """Return what is wrong with a file that was refused, all of it in one line.

    Unknown keys come first, then wrong values, keys that are missing, keys of another kind of section, and settings
    that do not go together. A missing key is left out where an unknown one seems to be meant for it.
    """
    found = error.errors(include_url=False)
    strays = [_Stray.of(model, each) for each in found if each["type"] == "extra_forbidden"]
    meant = {each.meant for each in strays}
    missing = [each for each in found if each["type"] in ("missing", "union_tag_not_found")]
    others = (*missing, *(each for each in found if each["type"] in ("extra_forbidden", "value_error")))
    absent = [each for each in missing if meant.isdisjoint(_names_to(model, each))]
    return _joined(
        [
            *(each.sentence for each in strays if not each.elsewhere),
            *(_of_wrong(model, each) for each in found if each not in others),
            *([_of_missing(model, absent)] if absent else []),
            *(each.sentence for each in strays if each.elsewhere),
            *(str(each["ctx"]["error"]) for each in found if each["type"] == "value_error"),
        ]
    )


def _joined(sentences: Sequence[str]) -> str:
    return " Also: ".join(dict.fromkeys(sentences))


def _names_to(model: type[Section], mistake: Mistake) -> set[str]:
    """Return the names of a missing key and of the sections that hold it."""
    inner = mistake["type"] == "missing"
    names = _Place.at(model, mistake["loc"][:-1] if inner else mistake["loc"]).names
    names += (str(mistake["loc"][-1]),) if inner else ("kind",)
    return {".".join(names[:count]) for count in range(1, len(names) + 1)}


@dataclass(frozen=True)
class _Stray:
    """A key that its section does not have."""

    sentence: str
    elsewhere: bool  # another kind of the section has it
    meant: str  # the key of the section that is nearest to it, if one is near

    @classmethod
    def of(cls, model: type[Section], mistake: Mistake) -> _Stray:
        """Return what is said of an unknown key.

        Args:
            model: of the file.
            mistake: as pydantic tells it.
        """
        *outer, last = mistake["loc"]
        place, name = _Place.at(model, outer), str(last)
        section, full = place.section, ".".join((*place.names, name))
        elsewhere = bool(section.stray) and any(name in other.model_fields for other in place.others)
        sentence, what = section.stray if elsewhere else section.unknown, "key" if place.names else "section"
        near = [] if elsewhere else difflib.get_close_matches(name, section.model_fields, 1)
        there = f"did you mean {near[0]}?" if near else f"there are {', '.join(section.model_fields)}."
        said = sentence.format(kind=place.kind, key=full, what=what, there=there)
        return cls(said, elsewhere, ".".join((*place.names, *near)) if near else "")


def _of_wrong(model: type[Section], mistake: Mistake) -> str:
    place, value = _Place.at(model, mistake["loc"]), mistake["input"]
    full = ".".join(place.names)
    if mistake["type"] == "union_tag_invalid":
        return _of_kind(place, value.get("kind"))
    if mistake["type"] == "literal_error" and isinstance(value, str):
        return f"{full} must be one of {', '.join(choices_of(place.hint))}. Got {value!r} instead."
    kinds = {"holds": mistake["msg"], "literal_error": "text", **dict.fromkeys(_TABLES, "a table")}
    return f"{full} must be {kinds[mistake['type']]}. Got {value!r} instead."


def _of_kind(place: _Place, value: Any) -> str:
    kinds = [kind_of(each) for each in place.others]
    if place.names == ("model",):
        listed = " or ".join(f'"{kind}"' for kind in kinds)
        return f"the config must say model.kind, {listed}. Got {value!r} instead."
    return f"{'.'.join(place.names)}.kind must be one of {', '.join(kinds)}. Got {value!r} instead."


def _of_missing(model: type[Section], missing: Sequence[Mistake]) -> str:
    """Return a sentence that names all keys that are missing, grouped by what needs them."""
    parts: dict[str, list[tuple[str, str]]] = {}
    for each in missing:
        if each["type"] == "union_tag_not_found":
            place = _Place.at(model, each["loc"])
            if place.names == ("model",) and len(missing) == 1:
                return _of_kind(place, None)
            parts.setdefault(Section.needs, []).append((f"{'.'.join(place.names)}.kind", "text"))
            continue
        *outer, name = each["loc"]
        place = _Place.at(model, outer)
        holds = holds_of(place.section.model_fields[str(name)]) if place.section.tells_kinds else ""
        always = all(str(name) in other.model_fields for other in place.others)
        lead = Section.needs if always else place.section.needs.format(kind=place.kind)
        parts.setdefault(lead, []).append((".".join((*place.names, str(name))), holds))
    return "; ".join(f"{lead} {_listed(keys)}" for lead, keys in parts.items()) + "."


def _listed(keys: Sequence[tuple[str, str]]) -> str:
    if len(keys) == 1:
        return ", ".join(filter(None, keys[0]))
    words = [f"{name} ({holds})" if holds else name for name, holds in keys]
    return f"{', '.join(words[:-1])} and {words[-1]}"


@dataclass(frozen=True)
class _Place:
    """Where a mistake is: the section that holds it, and the names of keys on the way there."""

    names: tuple[str, ...]
    hint: Any  # of what stands there
    section: type[Section]
    kind: str  # of the section, if it has kinds
    others: tuple[type[Section], ...]  # all kinds of the section

    @classmethod
    def at(cls, model: type[Section], steps: Sequence[int | str]) -> _Place:
        """Return the place that the steps of pydantic lead to."""
        place = cls((), model, model, "", ())
        for step in map(str, steps):
            place = place._inside(step)
        return place

    def _inside(self, step: str) -> _Place:
        kinds = kinds_of(self.hint)
        if len(kinds) > 1:  # the step is a kind, and no key
            chosen = next(each for each in kinds if kind_of(each) == step)
            return _Place(self.names, chosen, chosen, step, kinds)
        section = kinds[0] if kinds else self.section
        known = section.model_fields if kinds else {}
        hint = known[step].annotation if step in known else None
        inner = kinds_of(hint)
        same = inner[0] if len(inner) == 1 else section
        return _Place((*self.names, step), hint, same, "" if inner else self.kind, inner or self.others)


def kinds_of(hint: Any) -> tuple[type[Section], ...]:
    """Return the sections that may stand where a hint says; several where they have kinds."""
    if isinstance(hint, type) and issubclass(hint, Section):
        return (hint,)
    if typing.get_origin(hint) in (typing.Union, types.UnionType, Annotated):
        return tuple(found for each in typing.get_args(hint) for found in kinds_of(each))
    return ()


def kind_of(section: type[Section]) -> str:
    """Return which kind a section is of, as its key `kind` says."""
    return str(typing.get_args(section.model_fields["kind"].annotation)[0])


def choices_of(hint: Any) -> tuple[str, ...]:
    """Return the texts that a hint allows; none where it allows others."""
    if typing.get_origin(hint) is Literal:
        return typing.get_args(hint)
    return next((found for each in typing.get_args(hint) if (found := choices_of(each))), ())


def marks(field: Any) -> list[Any]:
    """Return what is annotated on a field, also inside of "or None"."""
    found, hints = list(field.metadata), [field.annotation]
    while hints:
        hint = hints.pop()
        if typing.get_origin(hint) is Annotated:
            found += hint.__metadata__
            hints.append(hint.__origin__)
        elif typing.get_origin(hint) in (typing.Union, types.UnionType):
            hints += typing.get_args(hint)
    return found


def holds_of(field: Any) -> str:
    """Return what a key holds, in words; empty where anything may stand."""
    holds = next((each for each in marks(field) if isinstance(each, Holds)), None)
    if holds is not None:
        return holds.missing or holds.kind
    return "text" if choices_of(field.annotation) else "a table" if kinds_of(field.annotation) else ""
