"""`privrep node`: what a node does with its own folder, the server away."""

from __future__ import annotations

import csv
import functools
import inspect
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from privrep.cli.command import with_screen
from privrep.cli.options import flag
from privrep.cli.personalize import personalize
from privrep.cli.predict import predict
from privrep.cli.predictions import say_written
from privrep.cli.streams import new_file, readable
from privrep.cli.tables import check_file, say_joined
from privrep.data.dialects import open_text
from privrep.errors import InputError, missing_package

if TYPE_CHECKING:
    from privrep.federated.neural_heads import Predictions

NodeFolder = Annotated[Path, typer.Argument(metavar="FOLDER", help="The folder that was given to `federate join`.")]
NodeFile = Annotated[
    Path, typer.Argument(metavar="FILE", help="A Parquet or CSV file; of a neural model, or a NumPy archive, .npz.")
]

node = typer.Typer(
    name="node",
    help="With a model that a federation learned, on one of its nodes: no server is needed, and nothing leaves.",
    no_args_is_help=True,
)


def _on_node(command: Callable[..., None], neural: Callable[..., None]) -> Callable[..., None]:
    """Return the same command for the folder of a node: it has all options, and refuses those of other models.

    Args:
        command: for a model of a table.
        neural: for a neural model.
    """
    asked, own = inspect.signature(command, eval_str=True), inspect.signature(neural, eval_str=True).parameters

    @functools.wraps(command)
    def run(folder: Path, **given: Any) -> None:
        from privrep.models.networks import is_network

        model = model_folder(folder)
        known, where = (own, folder) if is_network(model) else (asked.parameters, model)
        for parameter in parameters:
            name = parameter.name
            if name not in known and given.get(name, parameter.default) != parameter.default:
                kind = "models of tables" if known is own else "neural models"
                raise InputError(f"--{name.replace('_', '-')} is for {kind}; leave it out for {folder}.")
        (neural if known is own else command)(where, **{name: value for name, value in given.items() if name in known})

    of_commands = (p for p in asked.parameters.values() if p.name != "image")  # a node's task says how files are read
    parameters = [_of_both(p, own.get(p.name)) for p in of_commands]
    parameters += [p for p in own.values() if p.name not in asked.parameters]
    run.__signature__ = asked.replace(parameters=parameters)  # type: ignore[attr-defined]
    run.__annotations__ = {p.name: p.annotation for p in parameters}
    run.__doc__ = f"{inspect.getdoc(command)}\n\n{inspect.getdoc(neural)}"
    del run.__wrapped__
    return run


def _of_both(parameter: inspect.Parameter, own: inspect.Parameter | None) -> inspect.Parameter:
    """Return the parameter as the neural command describes it, where it does."""
    described = own is not None and hasattr(own.annotation, "__metadata__")
    return parameter.replace(annotation=own.annotation) if own is not None and described else parameter


def model_folder(folder: Path) -> Path:
    """Return where a node keeps its model, or raise InputError while it has none."""
    model = folder / "model"
    if not (model / "model.json").is_file():
        raise InputError(
            f"{folder} holds no model of a federation yet; receive it with: privrep federate join HOST:PORT "
            f"--data FILE --folder {folder}"
        )
    return model


# Neural models


def _personalize_network(folder: NodeFolder, table: NodeFile, replace: bool = False) -> None:
    """Read FILE, of a neural model, as `federate join` reads it, labels and all."""
    with readable(table) as path:
        joined = _neural_heads().personalize(folder, path, replace)
    say_joined(joined.came, joined.replaced, joined.in_all, folder / "model")


def _predict_network(
    folder: NodeFolder,
    table: NodeFile,
    out: Annotated[Path, typer.Option(help="File to write: .parquet, .csv or .csv.gz; of a neural model, or .npz.")],
    overwrite: bool = False,
    proba: Annotated[bool, flag("--proba", help="Of a neural model: the probability of each class, too.")] = False,
) -> None:
    """Read FILE, of a neural model, as `federate join` reads it; it needs no labels.

    Each row is written as its `user` and `prediction` and, with --proba, `probability_CLASS` of each class.
    """
    from privrep.data.readers import SUFFIXES

    suffix = check_file(out, overwrite, (*SUFFIXES, ".npz"), folder / "model")
    with readable(table) as path:
        found = _neural_heads().predict(folder, path, proba)
    with new_file(out) as temporary:
        _write(found, temporary, suffix)
    names = ["prediction", *(f"probability_{name}" for name in (found.names.tolist() if proba else ()))]
    say_written(len(found.users), out, names, several=True)


def _neural_heads() -> Any:
    try:
        from privrep.federated import neural_heads
    except ImportError:
        raise missing_package("neural models need PyTorch", "torch") from None
    return neural_heads


def _write(found: Predictions, path: Path, suffix: str) -> None:
    """Write predictions. An archive has the probabilities in one array, and in another the classes they are of.

    Args:
        found: the predictions.
        path: of a temporary file.
        suffix: of the file it becomes, which says how it is written.
    """
    import numpy as np
    import pyarrow as pa
    import pyarrow.parquet as pq

    columns = {"user": found.users.tolist(), "prediction": found.classes.tolist()}
    if suffix == ".npz":
        arrays = {name: np.array(values) for name, values in columns.items()}
        if found.probabilities is not None:
            arrays |= {"probability": found.probabilities, "classes": found.names}
        with open(path, "wb") as file:
            np.savez(file, **arrays)  # type: ignore[arg-type]
        return
    if found.probabilities is not None:
        each = zip(found.names.tolist(), found.probabilities.T.tolist(), strict=True)
        columns |= {f"probability_{name}": values for name, values in each}
    if suffix in (".csv", ".csv.gz"):
        with open_text(path, "w", packed=suffix == ".csv.gz") as text:
            csv.writer(text, lineterminator="\n").writerows([list(columns), *zip(*columns.values(), strict=True)])
    else:
        pq.write_table(pa.table(columns), path)


for _command, _neural in ((personalize, _personalize_network), (predict, _predict_network)):
    node.command()(with_screen(_on_node(_command, _neural)))
