"""`privrep config`: the configurations of the commands, as JSON Schema and as templates; and what `--check` says."""

from __future__ import annotations

import difflib
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from privrep.cli.command import with_screen
from privrep.cli.console import note, show, tell
from privrep.cli.options import flag, words
from privrep.errors import InputError
from privrep.schema.standard import STANDARD, name_of

if TYPE_CHECKING:
    from privrep.privacy.events import Relation
    from privrep.schema.machinery import Configuration
    from privrep.schema.template import Registries

config = typer.Typer(
    name="config",
    help="Configuration files of fit, fit-neural, fit-clip and federate: a template, and a JSON Schema.",
    no_args_is_help=True,
)
_COMMANDS = ("fit", "fit-neural", "fit-clip", "federate")
_NAMES = "fit, fit-neural, fit-clip or federate"
_Complete = words(*_COMMANDS)
_Out = Annotated[Path, typer.Option(help="File to write; - for standard output.")]
_Overwrite = Annotated[bool, flag("--overwrite", help="Replace the file --out.")]


def schema(
    command: Annotated[
        str | None,
        typer.Argument(metavar="[COMMAND]", help=f"{_NAMES}; all if left out.", autocompletion=_Complete),
    ] = None,
    out: _Out = STANDARD,
    overwrite: _Overwrite = False,
) -> None:
    """Print the JSON Schema of a configuration, for editors and validators."""
    import json

    from privrep.schema.template import COMMANDS, json_schema

    names = _registries()
    if command is None:
        found = {name: json_schema(name, names) for name in COMMANDS}
    else:
        found = json_schema(_known(command), names)
    _write(json.dumps(found, indent=2, ensure_ascii=False) + "\n", out, overwrite)


def template(
    command: Annotated[str, typer.Argument(metavar="COMMAND", help=_NAMES, autocompletion=_Complete)],
    out: _Out = STANDARD,
    overwrite: _Overwrite = False,
) -> None:
    """Print a commented configuration with every key; `--check` of the command accepts it."""
    from privrep.schema.template import template as made

    _write(made(_known(command), _registries()), out, overwrite)


for _command in (schema, template):
    config.command()(with_screen(_command, json=False))


def _write(text: str, out: Path, overwrite: bool) -> None:
    if out == STANDARD:
        print(text, end="")
        return
    if out.exists() and not overwrite:
        raise InputError(f"--out: {out} exists already; choose another name, or pass --overwrite.")
    out.write_text(text, encoding="utf-8")


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
        note(f"There is nothing at {path} yet; {name_of(config)} names it.")
    tell(checked=name_of(config), missing_files=list(dict.fromkeys(missing)))
    show(f"Checked: {name_of(config)} can be used. No data was read and nothing was spent.")


def files_are_missing(config: Path, asked: Configuration) -> bool:
    """Return whether files that a configuration names are not there; if so, all that can be checked was said."""
    missing = asked.missing_files()
    if missing:
        say_checked(config, missing)
    return bool(missing)


def note_weakness(
    epsilon: float, delta: float, relation: Relation = "replace-one-user", users: int = 1, unit: str = "user"
) -> None:
    """Remark on a budget that promises little.

    Args:
        epsilon: of the whole fit.
        delta: of the whole fit; 0 where it is not known yet.
        relation: which change of the population is compared.
        users: how many there are; 1 where it is not known.
        unit: what is protected as a whole, "user" or "pair".
    """
    from privrep.models.promise import find_weaknesses

    for weakness in find_weaknesses(epsilon, delta, relation, users, unit):
        note(weakness)
