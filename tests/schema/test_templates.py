"""`privrep config`: JSON Schema, and templates that `--check` accepts."""

from __future__ import annotations

import json
import re
import tomllib
from pathlib import Path
from typing import Any

import pytest

from commands import run
from privrep.errors import InputError
from privrep.linear.registry import METHODS
from privrep.schema.template import COMMANDS

CHECK = {"federate": ["federate", "serve"]}


def written(capsys: pytest.CaptureFixture[str], command: str) -> str:
    code, text, err = run(capsys, "config", "template", command)
    assert (code, err) == (0, "")
    return text


@pytest.mark.parametrize("command", COMMANDS)
def test_check_accepts_a_template_whose_files_are_not_there(
    command: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "c.toml"
    path.write_text(written(capsys, command))
    code, out, err = run(capsys, *CHECK.get(command, [command]), path, "--check")
    assert (code, out) == (0, f"Checked: {path} can be used. No data was read and nothing was spent.\n")
    missing = [] if command == "federate" else sorted(COMMANDS[command].read(path).missing_files())
    assert sorted(err.splitlines()) == [f"There is nothing at {each} yet; {path} names it." for each in missing]
    assert bool(missing) is (command != "federate")
    assert list(tmp_path.iterdir()) == [path]


@pytest.mark.parametrize("command", COMMANDS)
def test_a_template_has_every_key_of_what_it_shows(command: str, capsys: pytest.CaptureFixture[str]) -> None:
    text = written(capsys, command)
    assert max(map(len, text.splitlines())) <= 120
    sections = re.split(r"^\[(\w+)\]$", text, flags=re.MULTILINE)[1:]
    assert sections[::2] == list(COMMANDS[command].model_fields)
    asked = COMMANDS[command].checked(tomllib.loads(text), Path())
    for name, body in zip(sections[::2], sections[1::2], strict=True):
        keys = set(re.findall(r"^#?(\w+) = ", body, re.MULTILINE))
        assert keys == set(type(getattr(asked, name)).model_fields)


def refusal(command: str, text: str) -> str:
    try:
        COMMANDS[command].checked(tomllib.loads(text), Path())
    except InputError as error:
        return str(error)
    return ""


@pytest.mark.parametrize("command", COMMANDS)
def test_keys_that_a_template_leaves_out_are_of_their_kind(command: str, capsys: pytest.CaptureFixture[str]) -> None:
    """Each by itself: it may not go with the others, but it is known, and what it shows is a value for it."""
    text = written(capsys, command)
    lines = re.findall(r"^#\w+ = .*$", text, re.MULTILINE)
    assert len(lines) > 10
    for line in lines:
        said = refusal(command, text.replace(f"\n{line}\n", f"\n{line[1:]}\n", 1))
        assert not re.search(r"must be|has no|must say", said), line


@pytest.mark.parametrize("command", COMMANDS)
def test_a_schema_is_one_whose_references_are_there(command: str, capsys: pytest.CaptureFixture[str]) -> None:
    code, out, _ = run(capsys, "config", "schema", command)
    assert code == 0
    schema = json.loads(out)
    assert schema["$schema"].startswith("https://json-schema.org/")
    assert schema["type"] == "object"
    assert set(schema["required"]) <= set(schema["properties"]) == set(COMMANDS[command].model_fields)
    assert "privacy" in schema["required"]
    assert "output" not in schema["required"]
    assert ("users" in schema["required"]) == (command == "fit-neural")  # who the users are must be said there
    referred = set(re.findall(r'"#/\$defs/(\w+)"', out))
    assert referred == set(schema["$defs"])
    assert '"null"' not in out
    for definition in schema["$defs"].values():
        assert definition["additionalProperties"] is False
        for name, each in definition["properties"].items():
            assert "description" in each or name == "kind", name


def test_a_schema_names_the_methods_and_all_schemas_come_together(capsys: pytest.CaptureFixture[str]) -> None:
    schemas: dict[str, Any] = json.loads(run(capsys, "config", "schema")[1])
    assert list(schemas) == list(COMMANDS)
    assert schemas["fit"] == json.loads(run(capsys, "config", "schema", "fit")[1])
    for command, name in (("fit", "FitModel"), ("federate", "SharedTable")):
        assert schemas[command]["$defs"][name]["properties"]["method"]["enum"] == list(METHODS)
