"""Configurations for people and editors: JSON Schema, and a commented TOML file that `--check` accepts."""

from __future__ import annotations

import json
import textwrap
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from pydantic.fields import FieldInfo
from pydantic.json_schema import GenerateJsonSchema, JsonSchemaValue
from pydantic_core import core_schema

from privrep.schema.clip import PairsConfig
from privrep.schema.commands import FederateFile, FitConfig, FitModel, NeuralConfig, SharedTable
from privrep.schema.machinery import Configuration, Section, Shown, choices_of, kind_of, kinds_of, marks

COMMANDS: dict[str, type[Configuration]] = {
    "fit": FitConfig,
    "fit-neural": NeuralConfig,
    "fit-clip": PairsConfig,
    "federate": FederateFile,
}
_SHOWN_KINDS = ("npz", "features", "table")  # of sections that have kinds: the ones in templates
_RUN = {"federate": "federate serve"}
Registries = Mapping[str, Sequence[str]]
"""Names that a key of a table's model may hold, from the registries above this layer."""


# JSON Schema


class _Schema(GenerateJsonSchema):
    """Without "or null", which TOML has not, and without titles that repeat the keys."""

    def nullable_schema(self, schema: core_schema.NullableSchema) -> JsonSchemaValue:
        return self.generate_inner(schema["schema"])

    def default_schema(self, schema: core_schema.WithDefaultSchema) -> JsonSchemaValue:
        if schema.get("default") is None:
            return self.generate_inner(schema["schema"])
        return super().default_schema(schema)

    def field_title_should_be_set(self, schema: Any) -> bool:
        return False


def json_schema(command: str, names: Registries) -> dict[str, Any]:
    """Return the JSON Schema of a command's configuration.

    Args:
        command: a key of COMMANDS.
        names: of keys of a table's model, the names they may hold.
    """
    found = COMMANDS[command].model_json_schema(schema_generator=_Schema)
    for model in (FitModel, SharedTable):
        for name, listed in names.items() if model.__name__ in found["$defs"] else ():
            found["$defs"][model.__name__]["properties"][name]["enum"] = list(listed)
    found["required"] = [name for name in found["required"] if _needed(found, found["properties"][name])]
    return {"$schema": GenerateJsonSchema.schema_dialect, **found}


def _needed(whole: Mapping[str, Any], section: Mapping[str, Any]) -> bool:
    if "$ref" not in section:
        return True  # it has kinds, and one must be said
    return not {"required", "anyOf"}.isdisjoint(whole["$defs"][section["$ref"].rsplit("/", 1)[1]])


# Templates


def template(command: str, names: Registries) -> str:
    """Return a commented TOML file with all keys of a command's configuration, whose required keys have examples."""
    model = COMMANDS[command]
    intro = (
        f"{model.__doc__} Lines that begin with # and no space after it are keys that may be left out; they show the "
        "default, or what is marked as an example. "
        f"To check this file: privrep {_RUN.get(command, command)} CONFIG.toml --check"
    )
    parts = ["\n".join(_comment(intro))]
    parts += ["\n".join(_section(name, field, names)) for name, field in model.model_fields.items()]
    return "\n\n".join(parts) + "\n"


def _section(name: str, field: FieldInfo, names: Registries) -> Iterator[str]:
    kinds = kinds_of(field.annotation)
    chosen = kinds[0] if len(kinds) == 1 else next(each for each in kinds if kind_of(each) in _SHOWN_KINDS)
    yield from _comment((field.description if "kind" in (field.description or "") else chosen.__doc__) or "")
    yield f"[{name}]"
    if len(kinds) > 1:
        yield from _comment("Which kind it is: one of " + ", ".join(kind_of(each) for each in kinds) + ".")
        yield f'kind = "{kind_of(chosen)}"'
    needed_first = sorted(chosen.model_fields.items(), key=lambda item: not item[1].is_required())
    for key, each in needed_first:
        if key != "kind":
            yield from _key(key, each, names)
    for other in kinds:
        if other is not chosen:
            yield from _comment(_of_other(other, chosen))


def _of_other(section: type[Section], chosen: type[Section]) -> str:
    """Return what another kind of the section holds, in a sentence; what all kinds hold was said before."""
    known = {key: each.description for key, each in chosen.model_fields.items()}
    fields = {key: each for key, each in section.model_fields.items() if known.get(key) != each.description}
    needed = [key for key, each in fields.items() if each.is_required() and key != "kind"]
    others = [key for key in fields if key not in (*needed, "kind")]
    says = f'kind = "{kind_of(section)}": {section.__doc__} It needs {", ".join(needed)}'
    return says + (f"; it may say {', '.join(others)}." if others else ".")


def _key(name: str, field: FieldInfo, names: Registries) -> Iterator[str]:
    choices = names.get(name, ()) or choices_of(field.annotation)
    about = (field.description or "") + (f" One of {', '.join(choices)}." if choices else "")
    yield from _comment(about)
    shown = field.is_required() or any(isinstance(each, Shown) for each in marks(field))
    value = field.examples[0] if field.examples else field.default
    example = bool(field.examples) and not field.is_required() and value != field.default
    yield f"{'' if shown else '#'}{name} = {to_toml(value)}{'  # an example' if example and not shown else ''}"


def _comment(text: str) -> list[str]:
    return textwrap.wrap(
        " ".join(text.split()), 118, initial_indent="# ", subsequent_indent="# ", break_on_hyphens=False
    )


def to_toml(value: Any) -> str:
    """Return a value as TOML writes it in one line."""
    if isinstance(value, Mapping):
        return "{" + ", ".join(f"{key} = {to_toml(inner)}" for key, inner in value.items()) + "}"
    if isinstance(value, list):
        return "[" + ", ".join(map(to_toml, value)) + "]"
    return json.dumps(value, ensure_ascii=False)
