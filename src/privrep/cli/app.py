"""The program: its commands, its own options, and how it fails."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Annotated

import typer

from privrep import __version__
from privrep.boundary import is_full
from privrep.cli.audit import audit
from privrep.cli.budget import budget
from privrep.cli.command import with_screen
from privrep.cli.config import config
from privrep.cli.demo import demo
from privrep.cli.ending import end_on_sigterm, refuse
from privrep.cli.federate import federate
from privrep.cli.fit import fit
from privrep.cli.fit_clip import fit_multimodal
from privrep.cli.fit_neural import fit_neural
from privrep.cli.inspect import inspect
from privrep.cli.node import node
from privrep.cli.options import flag
from privrep.cli.personalize import personalize
from privrep.cli.population import population
from privrep.cli.predict import predict
from privrep.cli.verify import verify
from privrep.errors import PrivrepError

app = typer.Typer(
    name="privrep",
    help="Many users, little data each, one problem in common: learn the part they share under user-level differential "
    "privacy; each user keeps a small head of its own.",
    no_args_is_help=True,
    pretty_exceptions_enable=False,
)
for command in (demo, fit, fit_neural, fit_multimodal, personalize, predict, inspect, verify, audit, budget):
    app.command("fit-clip" if command is fit_multimodal else None)(with_screen(command))
for group in (config, federate, node, population):
    app.add_typer(group)


def main(arguments: Sequence[str] | None = None) -> None:
    """Run the app. What goes wrong on purpose is one sentence on stderr and exit code 2."""
    end_on_sigterm()
    try:
        app(args=None if arguments is None else list(arguments), prog_name="privrep")
    except PrivrepError as error:
        refuse(str(error))
    except MemoryError:
        refuse("there is not enough memory for this; use a machine with more, or give it less at once.")
    except Exception as error:
        if is_full(error):
            refuse("the disk is full. Make room and run the same command again: what was written before still stands.")
        if not isinstance(error, OSError) or error.filename is None:
            raise
        refuse(f"{error.filename}: {(error.strerror or str(error)).lower()}.")


def _show_version(asked: bool) -> None:
    if asked:
        print(f"privrep {__version__}")
        raise typer.Exit


@app.callback()
def _options(
    version: Annotated[
        bool, flag("--version", callback=_show_version, is_eager=True, help="Show the version.")
    ] = False,
) -> None:
    pass
