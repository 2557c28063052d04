"""`privrep predict` for models that take images: networks, and numbers of public features."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

from privrep.cli.console import progress, say
from privrep.cli.image_rows import FileRows, RowOptions, is_table, open_flat_table, read_rows, refuse_options
from privrep.cli.networks import Network, Numbers, open_model
from privrep.cli.predictions import (
    Asked,
    Batches,
    RowBatch,
    Seen,
    Unknown,
    check_names,
    table_batches,
    write_predictions,
)
from privrep.errors import InputError

if TYPE_CHECKING:
    from privrep.data.readers import TableSource

AT_A_TIME = 256  # rows between two looks at the bar


def predict_images(
    folder: Path, path: Path, out: Path, suffix: str, how: RowOptions, unknown: Unknown, interval: float | None
) -> None:
    """Predict rows of images; tables keep their columns, of other files users and predictions are written.

    Args:
        folder: of the model.
        path: of the rows.
        out: the file to write.
        suffix: its ending.
        how: how rows are read, and whether probabilities are asked for.
        unknown: what is done about users without a head.
        interval: the share of targets that intervals cover, of numbers.
    """
    refuse_options(folder, {"--item": how.item}, "ratings")
    model = open_model(folder)
    if isinstance(model, Numbers):
        from privrep.cli.predict import predictor_of

        refuse_options(folder, {"--proba": how.proba}, "networks of classes")
        predictor = predictor_of(model.fitted, folder, interval, model.features)
    else:
        refuse_options(folder, {"--interval": interval is not None}, "numbers")
        predictor = model.predictor(path, how.proba)
    seen, asked = Seen(), Asked(interval, predictor.check_unknown(*unknown))
    rows: TableSource | Batches
    if is_table(path, how):
        rows = open_flat_table(path, model.wanted, how)
        check_names(predictor, rows)
        batches, user = table_batches(rows, seen), f"column {rows.user!r}"
    else:
        found = read_rows(path, model.wanted, how, labelled=False)
        rows, batches, user = Batches(path, _written(found)), _batches(found), "the file"
    if model.wanted.one_user:
        batches = _of_one_user(batches, path, folder)
    predictions = predictor.predict(_finite(batches, path), path, user, asked.unknown, seen)
    write_predictions(rows, predictions, predictor.names, out, suffix, predictor.ids is not None)
    _say_unusual(model, asked, seen)


def _say_unusual(model: Network | Numbers, asked: Asked, seen: Seen) -> None:
    from privrep.cli.predict import say_unusual, tell_unknown
    from privrep.heads.uncertainty import describe_unknown

    if isinstance(model, Numbers):
        say_unusual(model.fitted, model.folder, asked, seen)
        return
    tell_unknown(asked, seen)
    if seen.rows:
        said = describe_unknown(seen.rows, len(seen.users), asked.unknown == "skip")
        say(f"{said}; privrep personalize {model.folder} TABLE makes heads of users' own rows")


def _batches(found: FileRows) -> Iterator[RowBatch]:
    """Yield some rows at a time; on a terminal a bar counts them as they are taken."""
    import numpy as np

    users = np.zeros(len(found.X), dtype=np.int64) if found.users is None else found.users
    users = users.astype(object) if users.dtype.kind == "U" else users
    with progress() as bar:
        bar.begin("predictions", len(found.X))
        for start in range(0, len(found.X), AT_A_TIME):
            some = slice(start, start + AT_A_TIME)
            yield RowBatch(users[some], found.X[some], {})
            bar.at(min(start + AT_A_TIME, len(found.X)))


def _finite(batches: Iterator[RowBatch], path: Path) -> Iterator[RowBatch]:
    """Yield rows as public maps and networks take them; raise InputError at a number that is none."""
    from privrep.neural.features import check_finite, rows_of

    rows = 1
    for users, X, unlisted in batches:
        taken = rows_of(X)
        check_finite(taken, path, first=rows)
        yield RowBatch(users, taken, unlisted)
        rows += len(taken)


def _written(found: FileRows) -> Iterator[Any]:
    """Yield what is written of each row before its predictions."""
    import pyarrow as pa

    users = {} if found.users is None else {"user": pa.array(found.users.tolist())}
    table = pa.table({**users, **{name: pa.array(values) for name, values in found.beside.items()}})
    if not table.num_columns:  # of one user's file nothing but the order tells rows apart
        table = pa.table({"row": pa.array(range(1, len(found.X) + 1))})
    yield from table.to_batches()


def _of_one_user(batches: Iterator[RowBatch], path: Path, folder: Path) -> Iterator[RowBatch]:
    """Yield rows that are all one user's, whoever the file says it is."""
    import numpy as np

    first: Any = None
    for users, X, unlisted in batches:
        first = users[0] if first is None and len(users) else first
        if (users != first).any():
            raise InputError(f"{folder} is the network of one user, and {path} has rows of several; give one user's.")
        yield RowBatch(np.zeros(len(users), dtype=np.int64), X, unlisted)
