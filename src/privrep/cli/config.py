"""`privrep config`: the configurations of the commands, as JSON Schema and as templates; and what `--check` says."""

from __future__ import annotations

import difflib
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from privrep.cli.console import note, say
from privrep.errors import InputError

if TYPE_CHECKING:
    from privrep.schema.machinery import Configuration
    from privrep.schema.template import Registries

config = typer.Typer(
    name="config",
    help="Configuration files of fit, fit-neural, fit-clip and federate: a template, and a JSON Schema.",
    no_args_is_help=True,
)
_NAMES = "fit, fit-neural, fit-clip or federate"


@config.command()
def schema(
    command: Annotated[str | None, typer.Argument(metavar="[COMMAND]", help=f"{_NAMES}; all if left out.")] = None,
) -> None:
    """Print the JSON Schema of a configuration, for editors and validators."""
    import json

    from privrep.schema.template import COMMANDS, json_schema

    names = _registries()
    if command is None:
        found = {name: json_schema(name, names) for name in COMMANDS}
    else:
        found = json_schema(_known(command), names)
    print(json.dumps(found, indent=2, ensure_ascii=False))


@config.command()
def template(command: Annotated[str, typer.Argument(metavar="COMMAND", help=_NAMES)]) -> None:
    """Print a commented configuration with every key; `--check` of the command accepts it."""
    from privrep.schema.template import template as made

    print(made(_known(command), _registries()), end="")


def _known(command: str) -> str:
    from privrep.schema.template import COMMANDS

    if command in COMMANDS:
        return command
    near = difflib.get_close_matches(command, COMMANDS, 1)
    there = f"did you mean {near[0]}?" if near else f"there are {', '.join(COMMANDS)}."
    raise InputError(f"no configuration is called {command}; {there}")


def _registries() -> Registries:
    """Return the names that keys of a table's model may hold."""
    from privrep.linear.registry import METHODS
    from privrep.linear.starts import INITIALISERS
    from privrep.local.losses import LOSSES
    from privrep.models.description import CONFIGURATIONS

    return {
        "method": tuple(METHODS),
        "start": tuple(INITIALISERS),
        "loss": LOSSES,
        "configuration": CONFIGURATIONS,
    }


def say_checked(config: Path, missing: list[Path]) -> None:
    """Say that a configuration can be used, and which files a run of it would not find."""
    for path in dict.fromkeys(missing):
        note(f"There is nothing at {path} yet; {config} names it.")
    say(f"Checked: {config} can be used. No data was read and nothing was spent.")


def files_are_missing(config: Path, asked: Configuration) -> bool:
    """Return whether files that a configuration names are not there; if so, all that can be checked was said."""
    missing = asked.missing_files()
    if missing:
        say_checked(config, missing)
    return bool(missing)
