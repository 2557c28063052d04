"""`privrep predict`."""

from __future__ import annotations

import math
from collections import Counter
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from privrep.cli.console import note, say, tell
from privrep.cli.image_rows import RowOptions, refuse_options, takes_rows_of_images
from privrep.cli.options import (
    UNKNOWN,
    Decimal,
    Delimiter,
    Encoding,
    FeatureColumns,
    Folder,
    ImageColumn,
    ItemColumn,
    RowsPath,
    UserColumn,
    flag,
    words,
)
from privrep.cli.predictions import (
    Asked,
    Predictor,
    Seen,
    Unknown,
    check_names,
    table_batches,
    write_predictions,
)
from privrep.cli.streams import readable
from privrep.cli.tables import check_file, no_heads, open_table
from privrep.errors import InputError

if TYPE_CHECKING:
    from privrep.models.model import Model


def predict(
    folder: Folder,
    table: RowsPath,
    out: Annotated[Path, typer.Option(help="File to write: .parquet, .csv or .csv.gz; - for standard output.")],
    overwrite: Annotated[bool, flag("--overwrite", help="Replace the file --out.")] = False,
    user: UserColumn = None,
    features: FeatureColumns = None,
    item: ItemColumn = None,
    image: ImageColumn = None,
    encoding: Encoding = None,
    delimiter: Delimiter = None,
    decimal: Decimal = None,
    interval: Annotated[
        float | None,
        typer.Option(metavar="SHARE", help="Numbers: add the ends of intervals that cover this share, such as 0.9."),
    ] = None,
    unknown: Annotated[
        str | None,
        typer.Option(
            metavar="prior|skip|refuse",
            help="Users without a head: predicted by the prior mean, left out of --out, or an error.",
            autocompletion=words(*UNKNOWN),
        ),
    ] = None,
    refuse_unknown: Annotated[bool, flag("--refuse-unknown", help="The same as --unknown refuse.")] = False,
    proba: Annotated[
        bool, flag("--proba", help="Networks: the probability of each class, too, `probability_CLASS`.")
    ] = False,
) -> None:
    """Predict every row of a table by its user's own head: the same table with one more column, `prediction`.

    A model of several targets adds a column for each, `prediction_NAME`. A model of classes predicts a class and, with
    the log loss, adds the probability of each, `probability_CLASS`.
    Rows of users without a head are predicted with the prior mean, in models of ratings with the level and the item's
    offset. The command says how many. With --unknown skip they are left out. Missing features are filled as in the fit.
    With --interval 0.9, each prediction has two more columns, `prediction_low` and `prediction_high`, between which
    nine of ten targets are expected.
    Networks, and numbers of public features, take images or flattened rows: see --help of `personalize`.
    Private heads make the predictions, so only you can read the file, and it is no part of what may be published.
    """
    from privrep.cli.predict_networks import predict_images
    from privrep.data.dialects import Dialect
    from privrep.data.readers import SUFFIXES
    from privrep.heads.uncertainty import check_coverage

    suffix = check_file(out, overwrite, SUFFIXES, folder)
    if interval is not None:
        check_coverage(interval, "--interval")
    given: Any = {"user": user, "features": features, "item": item, "image": image, "proba": proba}
    how = RowOptions(Dialect(encoding, delimiter, decimal), **given)
    rule = Unknown(unknown, refuse_unknown)
    predict_rows = predict_images if takes_rows_of_images(folder) else _predict_table
    with readable(table) as path:
        predict_rows(folder, path, out, suffix, how, rule, interval)


def _predict_table(
    folder: Path, table: Path, out: Path, suffix: str, how: RowOptions, unknown: Unknown, interval: float | None
) -> None:
    """Predict the rows of a table by the heads of a model of a table.

    Args:
        folder: of the model.
        table: the rows.
        out: the file to write.
        suffix: its ending.
        how: how rows are read.
        unknown: what is done about users without a head.
        interval: the share of targets that intervals cover.
    """
    from privrep.models.model import load

    refuse_options(folder, {"--image": how.image, "--proba": how.proba})
    fitted = load(folder)
    column = how.user or fitted.columns.user
    if not column:
        raise InputError(f"{folder} was fitted on arrays and names no user column; pass --user.")
    source = open_table(table, fitted, column, None, how.features, how.item, dialect=how.dialect)
    predictor = predictor_of(fitted, folder, interval)
    check_names(predictor, source)
    seen, asked = Seen(), Asked(interval, predictor.check_unknown(*unknown))
    batches = table_batches(source, seen)
    predictions = predictor.predict(batches, table, f"column {source.user!r}", asked.unknown, seen)
    write_predictions(source, predictions, predictor.names, out, suffix, predictor.ids is not None)
    say_unusual(fitted, folder, asked, seen)


def predictor_of(fitted: Model, folder: Path, interval: float | None, features: Any = None) -> Predictor:
    """Return the heads of a model of a table; of a published one, which has none, the prior mean for every user.

    Args:
        fitted: the model.
        folder: of the model.
        interval: the share of targets that intervals cover, if they are asked for.
        features: from rows to what the heads take, where that is no columns.
    """

    from privrep.heads.fitting import make_nobody
    from privrep.models.model import with_heads

    def columns(X: Any, positions: Any) -> list[Any]:
        return _columns(fitted, X if features is None else features(X), positions, interval)

    serves = fitted.representation.serves_newcomers
    if fitted.heads is None and not serves:
        raise no_heads(folder)
    ids = None if fitted.heads is None else fitted.heads.ids
    fitted = fitted if ids is not None else with_heads(fitted, make_nobody(fitted.representation))
    return Predictor(folder, ids, columns, _names(fitted, interval, folder), serves)


def say_unusual(fitted: Model, folder: Path, asked: Asked, seen: Seen) -> None:
    """Say what the model did not know, and what was missing.

    Args:
        fitted: the model.
        folder: of the model.
        asked: what was asked for besides predictions.
        seen: in the rows that were predicted.
    """
    from privrep.heads.uncertainty import describe_unknown
    from privrep.local.prior import HeadPrior

    prior = fitted.representation.prior
    if asked.interval is not None and isinstance(prior, HeadPrior) and not all(map(math.isfinite, prior.noise)):
        say("Intervals are infinite: there were too few users to tell how large errors are; fit more, or spend more")
    tell_unknown(asked, seen)
    if fitted.heads is None:
        say(f"{folder} holds no heads (private/): nobody's own rows count in these predictions")
    if seen.rows:
        said = describe_unknown(seen.rows, len(seen.users), asked.unknown == "skip", fitted.config.ratings)
        say(f"{said}; privrep personalize {folder} TABLE makes heads of users' own rows")
    for said in seen.missing.words("by the user's own mean of the fit where it is kept, else by the location"):
        note(f"{said[:1].upper()}{said[1:]} (not private: for your eyes).")
    for name, count in (+seen.values).items():
        how = "predicted with the user's level" if fitted.config.ratings else "predicted without that feature"
        say(f"{count:,} {'row' if count == 1 else 'rows'} with a value of {name} that the model does not know: {how}")


def tell_unknown(asked: Asked, seen: Seen) -> None:
    """Add to what --json prints what the model did not know."""
    tell(without_head={"rows": seen.rows, "users": len(seen.users), "treated": asked.unknown})
    tell(unknown_values=dict(+seen.values))


def _names(fitted: Model, interval: float | None, folder: Path) -> list[str]:
    """Return the names of the columns of predictions."""
    from privrep.models.model import check_intervals

    assert fitted.heads is not None
    if interval is not None:
        try:
            check_intervals(fitted)
        except InputError as error:
            raise InputError(f"--interval: {folder}: {error}") from None
    if fitted.config.loss is not None:
        classes = fitted.columns.classes if fitted.config.loss == "log" else ()
        return ["prediction", *(f"probability_{name}" for name in classes)]
    names = ["prediction"]
    if fitted.heads.targets > 1:
        names = [f"prediction_{name}" for name in fitted.columns.targets or range(1, fitted.heads.targets + 1)]
    if interval is None:
        return names
    listed = [f"{name}{end}" for name in names for end in ("", "_low", "_high")]
    twice = next((name for name, times in Counter(listed).items() if times > 1), None)
    if twice is not None:
        raise InputError(f"--interval: two columns would be called {twice!r}; leave it out, or rename a target.")
    return listed


def _columns(fitted: Model, X: Any, users: Any, interval: float | None) -> list[Any]:
    """Return arrays of predictions, of the names that `_names` gives."""
    import numpy as np

    from privrep.heads.filling import fill_to_predict

    heads, loss = fitted.heads, fitted.loss
    assert heads is not None
    told: Any = {"intercept": fitted.config.intercept, "names": lambda: fitted.columns.feature_names}
    X = fill_to_predict(heads, fitted.representation, X, users, **told)
    outputs = heads.predict(fitted.representation, X, users)
    if loss is None:
        ends = () if interval is None else heads.interval(fitted.representation, X, users, interval)
        parts = [part if part.ndim == 2 else part[:, None] for part in (outputs, *ends)]
        return [part[:, c] for c in range(heads.targets) for part in parts]

    from privrep.local.losses import compute_probabilities, decide_classes

    predicted = np.array(fitted.columns.classes)[decide_classes(outputs)]
    return [predicted, *(compute_probabilities(loss, outputs).T if loss.name == "log" else ())]
