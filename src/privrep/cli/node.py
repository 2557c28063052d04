"""`privrep node`: what a node does with its own folder, the server away."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable
from pathlib import Path
from typing import Annotated, Any

import typer

from privrep.cli.personalize import personalize
from privrep.cli.predict import predict
from privrep.errors import InputError

NodeFolder = Annotated[Path, typer.Argument(metavar="FOLDER", help="The folder that was given to `federate join`.")]

node = typer.Typer(
    name="node",
    help="With a model that a federation learned, on one of its nodes: no server is needed, and nothing leaves.",
    no_args_is_help=True,
)


def _on_node(command: Callable[..., None]) -> Callable[..., None]:
    """The same command, given the folder of a node rather than of a model."""

    @functools.wraps(command)
    def run(folder: Path, **given: Any) -> None:
        command(model_folder(folder), **given)

    asked = inspect.signature(command, eval_str=True)
    parameters = [p.replace(annotation=NodeFolder) if p.name == "folder" else p for p in asked.parameters.values()]
    run.__signature__ = asked.replace(parameters=parameters)  # type: ignore[attr-defined]
    run.__annotations__ = {p.name: p.annotation for p in parameters}
    del run.__wrapped__
    return run


def model_folder(folder: Path) -> Path:
    """Where a node keeps its model; an error while it has none."""
    model = folder / "model"
    if not (model / "model.json").is_file():
        raise InputError(
            f"{folder} holds no model of a federation yet; receive it with: privrep federate join HOST:PORT "
            f"--data FILE --folder {folder}"
        )
    return model


for _command in (personalize, predict):
    node.command()(_on_node(_command))
