"""Options and arguments of commands, one type each."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from privrep.errors import InputError
from privrep.linear.registry import DEFAULT, ESTIMATORS, name_methods

if TYPE_CHECKING:
    from privrep.privacy.events import Relation

TASKS, LOSSES, MISSING, UNKNOWN = (
    ("regression", "classification"),
    ("log", "hinge"),
    ("impute", "drop", "refuse"),
    ("prior", "skip", "refuse"),
)


def flag(*names: str, **how: Any) -> Any:
    """Return an option that is there or not; help shows no kind of value for it, whichever version of typer prints it.

    Args:
        names: of the option.
        how: what else typer takes of an option.
    """
    return typer.Option(*names, metavar="", **how)


def words(*known: str) -> Callable[[str], list[str]]:
    """Return what a shell completes a value with."""

    def complete(incomplete: str) -> list[str]:
        return [word for word in known if word.startswith(incomplete)]

    return complete


ConfigFile = Annotated[Path, typer.Argument(metavar="CONFIG.toml", help="The configuration, or - for standard input.")]
TableOrConfig = Annotated[
    Path,
    typer.Argument(
        metavar="TABLE|CONFIG.toml",
        help="A Parquet or CSV file, or - for standard input; or a file that has all of this in it: privrep config "
        "template fit.",
    ),
]
User = Annotated[str | None, typer.Option(help="Column that names the user of each row. Needed.")]
Target = Annotated[
    str | None, typer.Option(help="Column to predict, or several: A,B. Each user gets a head for each. Needed.")
]
Task = Annotated[
    str,
    typer.Option(
        metavar="TASK",
        help="regression, of numbers, or classification, of text, integers or booleans.",
        autocompletion=words(*TASKS),
    ),
]
Classes = Annotated[
    str | None,
    typer.Option(
        metavar="A,B|FILE", help="Classification: public classes, or a JSON list of them; else selected privately."
    ),
]
Loss = Annotated[
    str | None,
    typer.Option(metavar="LOSS", help="Classification: log, or hinge; log if left out.", autocompletion=words(*LOSSES)),
]
Epsilon = Annotated[float | None, typer.Option(help="Privacy budget, whole fit. Smaller is more private. Needed.")]
Delta = Annotated[
    float | None, typer.Option(help="Privacy budget, second part; well below 1 / number of users. Needed.")
]
Out = Annotated[
    Path | None, typer.Option(help="Folder of the model. The same command continues a stopped fit. Needed.")
]
Population = Annotated[
    Path | None,
    typer.Option(metavar="FILE", help="Population ledger that the budget is reserved from: privrep population create."),
]
Features = Annotated[
    str | None, typer.Option(help="Columns A,B,C; if left out all others (of Parquet: all others of numbers).")
]
Categorical = Annotated[str | None, typer.Option(help="Columns A,B of text or integers, a feature for each value.")]
Categories = Annotated[
    Path | None,
    typer.Option(metavar="FILE", help='JSON file of public values, {"column": [...]}; others are selected privately.'),
]
Numeric = Annotated[
    str | None, typer.Option(help="Columns A,B of numbers, whatever they look like: leading zeros, text in Parquet.")
]
Encoding = Annotated[str | None, typer.Option(help="CSV: utf-8, latin-1, cp1252, ...; found out if left out.")]
Delimiter = Annotated[
    str | None, typer.Option(metavar="MARK", help="CSV: comma, semicolon, tab or bar; read off the header if left out.")
]
Decimal = Annotated[
    str | None, typer.Option(metavar="MARK", help="CSV: point or comma; a comma only where commas do not separate.")
]
Item = Annotated[
    str | None, typer.Option(help="Ratings: column that names the item of each row; the target is the rating.")
]
Items = Annotated[
    Path | None, typer.Option(metavar="FILE", help="JSON list of all items, if public; else selected privately.")
]
Missing = Annotated[
    str,
    typer.Option(
        metavar="impute|drop|refuse",
        help="Missing features: filled inside each user, rows that miss one left out, or an error.",
        autocompletion=words(*MISSING),
    ),
]
MissingIndicator = Annotated[
    list[str] | None,
    typer.Option(metavar="COLUMN", help="Add a feature that says where this column was missing. May be repeated."),
]
Weight = Annotated[str | None, typer.Option(help="Column of weights: how much a row counts beside its user's others.")]
Rank = Annotated[str, typer.Option(metavar="K|auto", help="Columns of the representation.")]
Method = Annotated[
    str | None,
    typer.Option(
        metavar="METHOD",
        help=f"{name_methods()}; {DEFAULT} if left out.",
        autocompletion=words(*ESTIMATORS.values()),
    ),
]
Paper = Annotated[
    bool, flag("--paper", help="The method as published; needs --rank K and --no-intercept. For comparison.")
]
Start = Annotated[
    str | None,
    typer.Option(metavar="START", help="spectral, normalised-pairs, power-method or random; else the method's own."),
]
Relations = Annotated[
    str,
    typer.Option(
        help="replace-one-user, or add-or-remove-one-user.",
        metavar="RELATION",
        autocompletion=words("replace-one-user", "add-or-remove-one-user"),
    ),
]
NoIntercept = Annotated[bool, flag("--no-intercept", help="Users have no intercepts.")]
NoSafetyNet = Annotated[
    bool, flag("--no-safety-net", help="Every user uses the shared representation, helpful or not.")
]
Scale = Annotated[
    Path | None, typer.Option(metavar="FILE", help='JSON file of public feature sizes: {"column": size, ...}.')
]
Covariance = Annotated[
    Path | None,
    typer.Option(metavar="FILE", help='Public covariance, instead: {"columns": [...], "covariance": [[...]]}.'),
]
Simulate = Annotated[
    int | None, typer.Option(metavar="SEED", help="Seeded noise: repeatable and NOT PRIVATE. For experiments.")
]
UserAsText = Annotated[
    bool, flag("--user-as-text", help="CSV: ids that look like numbers are text (keeps leading zeros).")
]
Workdir = Annotated[Path | None, typer.Option(help="Folder for temporary files; the system's if left out.")]
Overwrite = Annotated[bool, flag("--overwrite", help="Replace a model or another run in --out.")]
Check = Annotated[bool, flag("--check", help="Say whether this can be done, without a look at the table.")]


Folder = Annotated[Path, typer.Argument(metavar="FOLDER", help="A model folder, as `fit` made it.")]
RowsPath = Annotated[
    Path,
    typer.Argument(
        metavar="TABLE",
        help="A Parquet or CSV file, or - for standard input. Networks: also a NumPy archive, a folder of images, or a "
        "TOML file of fit-neural.",
    ),
]
UserColumn = Annotated[str | None, typer.Option("--user", help="User column, if it is not named as in the fit.")]
FeatureColumns = Annotated[
    str | None, typer.Option("--features", help="Columns of numbers A,B,C, if not named as in the fit.")
]
ImageColumn = Annotated[
    str | None, typer.Option("--image", help="Networks: column of encoded images of a Parquet file, PNG or JPEG.")
]
ItemColumn = Annotated[
    str | None, typer.Option("--item", help="Ratings: item column, if it is not named as in the fit.")
]


def split_names(text: str | None) -> list[str] | None:
    """Return the names in A,B,C."""
    return None if text is None else [name.strip() for name in text.split(",") if name.strip()]


def check_relation(text: str) -> Relation:
    """Return a relation, or raise InputError if there is none of this name."""
    from privrep.privacy.events import RELATIONS

    if text not in RELATIONS:
        raise InputError(f"--relation must be one of {', '.join(RELATIONS)}. Got {text!r} instead.")
    return text


def was_given(context: typer.Context, name: str | None) -> bool:
    """Return whether a parameter was written on the command line."""
    source = None if name is None else context.get_parameter_source(name)
    return source is not None and source.name == "COMMANDLINE"
