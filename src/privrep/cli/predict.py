"""`privrep predict`."""

from __future__ import annotations

import csv
import math
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, NamedTuple

import typer

from privrep.cli.console import say
from privrep.cli.options import FeatureColumns, Folder, ItemColumn, TablePath, UserColumn
from privrep.cli.tables import check_file, id_kind, new_file, open_table, open_text
from privrep.errors import InputError

if TYPE_CHECKING:
    from privrep.data.readers import TableSource
    from privrep.models.model import Model


def predict(
    folder: Folder,
    table: TablePath,
    out: Annotated[Path, typer.Option(help="File to write: .parquet, .csv or .csv.gz.")],
    overwrite: Annotated[bool, typer.Option("--overwrite", help="Replace the file --out.")] = False,
    user: UserColumn = None,
    features: FeatureColumns = None,
    item: ItemColumn = None,
    interval: Annotated[
        float | None,
        typer.Option(metavar="SHARE", help="Numbers: add the ends of intervals that cover this share, such as 0.9."),
    ] = None,
    refuse_unknown: Annotated[
        bool, typer.Option("--refuse-unknown", help="A user without a head is an error, not predicted by the prior.")
    ] = False,
) -> None:
    """Predict every row of a table by its user's own head: the same table with one more column, `prediction`.

    A model of several targets adds a column for each, `prediction_NAME`; one of classes predicts a class and, with the
    log loss, adds the probability of each, `probability_CLASS`.
    Rows of users without a head are predicted with the prior mean, which models of numbers have, and with the level and
    the item's offset in models of ratings; it says how many.
    With --interval 0.9, each prediction has two more columns, `prediction_low` and `prediction_high`, between which
    nine of ten targets are expected.
    Private heads make the predictions, so only you can read the file, and it is no part of what may be published.
    """
    from privrep.data.readers import SUFFIXES
    from privrep.heads.uncertainty import check_coverage, describe_unknown
    from privrep.models.model import load

    suffix = check_file(out, overwrite, SUFFIXES, folder)
    if interval is not None:
        check_coverage(interval, "--interval")
    fitted = load(folder)
    if fitted.heads is None:
        raise InputError(f"{folder} holds no heads (private/); make some with: privrep personalize {folder} TABLE")
    column = user or fitted.columns.user
    if not column:
        raise InputError(f"{folder} was fitted on arrays and names no user column; pass --user.")
    source = open_table(table, fitted, column, None, features, item)
    names = _names(fitted, interval, folder)
    taken = next((name for name in names if name in source.header), None)
    if taken is not None:
        raise InputError(f"{table} has a column {taken!r} already; rename it first.")
    unknown = _Unknown()
    refuse = refuse_unknown or not fitted.representation.serves_newcomers
    predictions = _predictions(source, fitted, folder, _Asked(interval, refuse), unknown)
    write = _write_text if (source.format, SUFFIXES[suffix]) == ("csv", "csv") else _write_arrow
    with new_file(out) as temporary:
        rows = write(source, predictions, names, temporary, suffix)
    say(
        f"{rows:,} rows with their prediction{'s' if len(names) > 1 else ''}: {out} (readable by you alone: made by "
        "private heads, not covered by the privacy guarantee)"
    )
    prior = fitted.representation.prior
    if interval is not None and prior is not None and not all(map(math.isfinite, prior.noise)):
        say("Intervals are infinite: there were too few users to tell how large errors are; fit more, or spend more")
    if unknown.rows:
        said = describe_unknown(unknown.rows, len(unknown.users))
        say(f"{said}; privrep personalize {folder} TABLE makes heads of users' own rows")
    for name, count in (+unknown.values).items():
        how = "predicted with the user's level" if fitted.config.ratings else "predicted without that feature"
        say(f"{count:,} {'row' if count == 1 else 'rows'} with a value of {name} that the model does not know: {how}")


@dataclass
class _Unknown:
    """What the model does not know in the rows read so far."""

    values: Counter[str] = field(default_factory=Counter)  # rows with a category that it does not know, by column
    users: set[Any] = field(default_factory=set)  # who have no head
    rows: int = 0  # of these users


class _Asked(NamedTuple):
    """What is asked for besides predictions."""

    interval: float | None
    refuse: bool  # users without a head


def _names(fitted: Model, interval: float | None, folder: Path) -> list[str]:
    """Return the names of the columns of predictions."""
    assert fitted.heads is not None
    if interval is not None:
        try:
            fitted.heads.doubts(fitted.representation)
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

    heads, loss = fitted.heads, fitted.loss
    assert heads is not None
    outputs = heads.predict(fitted.representation, X, users)
    if loss is None:
        ends = () if interval is None else heads.interval(fitted.representation, X, users, interval)
        parts = [part if part.ndim == 2 else part[:, None] for part in (outputs, *ends)]
        return [part[:, c] for c in range(heads.targets) for part in parts]

    from privrep.local.losses import decided, probabilities

    predicted = np.array(fitted.columns.classes)[decided(outputs)]
    return [predicted, *(probabilities(loss, outputs).T if loss.name == "log" else ())]


def _predictions(
    source: TableSource, fitted: Model, folder: Path, asked: _Asked, unknown: _Unknown
) -> Iterator[list[Any]]:
    """Yield arrays of predictions, one for each name, batch by batch, in the order of the rows.

    Notes in `unknown` what the model does not know.
    """
    import numpy as np

    from privrep.data.readers import assembled, checked_batches, column_values, user_ids

    heads, rows = fitted.heads, 0
    assert heads is not None
    order = np.argsort(heads.ids)
    ordered = heads.ids[order]
    for batch in checked_batches(source):
        users = user_ids(batch.column(0))
        if id_kind(users) != id_kind(ordered):
            raise InputError(
                f"the users in column {source.user!r} of {source.path} are {id_kind(users)}, those of {folder} are "
                f"{id_kind(ordered)}."
            )
        spot = np.minimum(np.searchsorted(ordered, users), len(ordered) - 1)
        missing = np.flatnonzero(ordered[spot] != users)
        if len(missing) and asked.refuse:
            raise InputError(
                f"user {users.tolist()[missing[0]]!r} in row {rows + int(missing[0]) + 1} of {source.path} has no head "
                f"in {folder}; make one from some rows with their target: privrep personalize {folder} TABLE"
            )
        unknown.rows += len(missing)
        unknown.users.update(users[missing].tolist())
        positions = order[spot]
        positions[missing] = -1
        columns = dict(zip(source.columns[1:], map(column_values, batch.columns[1:]), strict=True))
        for name in source.categories or ():
            unknown.values[name] += int((columns[name] < 0).sum())
        X = assembled(source, [list(columns.values())], batch.num_rows)[0]
        yield _columns(fitted, X, positions, asked.interval)
        rows += batch.num_rows


def _write_text(source: TableSource, predictions: Iterable[Any], names: Sequence[str], path: Path, suffix: str) -> int:
    """CSV to CSV: every row as the text it is, with its predictions. Returns the number of rows."""
    given, total = Path(source.path), 0
    with (
        open_text(given, "r", packed=given.suffix.lower() == ".gz") as read,
        open_text(path, "w", packed=suffix == ".csv.gz") as written,
    ):
        lines = (line for line in csv.reader(read) if line)
        writer = csv.writer(written, lineterminator="\n")
        writer.writerow([*next(lines), *names])
        for columns in predictions:
            count = len(columns[0])
            rows = list(islice(lines, count))
            if len(rows) != count or any(len(row) != len(source.header) for row in rows):
                raise InputError(f"{source.path} has values with line breaks in them; take them out, or use Parquet.")
            values = zip(*(column.tolist() for column in columns), strict=True)
            writer.writerows([*row, *value] for row, value in zip(rows, values, strict=True))
            total += len(rows)
    return total


def _write_arrow(source: TableSource, predictions: Iterable[Any], names: Sequence[str], path: Path, suffix: str) -> int:
    """From or to Parquet: every row, all its columns, with its predictions. Returns the number of rows."""
    import pyarrow as pa

    writer, total = None, 0
    with ExitStack() as files:
        for rows in _with_predictions(source, predictions, names):
            try:
                writer = writer or _open_writer(files, path, suffix, rows.schema)
                writer.write_table(rows)
            except (pa.ArrowNotImplementedError, pa.ArrowInvalid) as error:
                reason = str(error).splitlines()[0]
                raise InputError(f"{source.path} has a column that --out cannot hold ({reason}).") from None
            total += len(rows)
    return total


def _open_writer(files: ExitStack, path: Path, suffix: str, schema: Any) -> Any:
    """By the suffix, not the path: that is of a temporary file with another ending."""
    import pyarrow as pa
    import pyarrow.csv
    import pyarrow.parquet as pq

    if suffix not in (".csv", ".csv.gz"):
        return files.enter_context(pq.ParquetWriter(path, schema))
    stream = pa.output_stream(str(path), compression="gzip" if suffix == ".csv.gz" else None)
    return files.enter_context(pyarrow.csv.CSVWriter(files.enter_context(stream), schema))


def _with_predictions(source: TableSource, predictions: Iterable[Any], names: Sequence[str]) -> Iterator[Any]:
    """Arrow tables of as many rows as there are predictions at a time."""
    import pyarrow as pa

    batches = _all_columns(source)
    waiting: list[Any] = []
    for columns in predictions:
        count = len(columns[0])
        while sum(batch.num_rows for batch in waiting) < count:
            batch = next(batches, None)
            if batch is None:
                raise InputError(f"{source.path} changed while it was read; run the command again.")
            waiting.append(batch)
        rows = pa.Table.from_batches(waiting)
        waiting = rows.slice(count).to_batches()
        done = rows.slice(0, count)
        for name, column in zip(names, columns, strict=True):
            done = done.append_column(name, pa.array(column))
        yield done


def _all_columns(source: TableSource) -> Iterator[Any]:
    """Record batches with all columns of the file, not only those the model uses."""
    import pyarrow as pa
    import pyarrow.csv
    import pyarrow.parquet as pq

    try:
        if source.format == "parquet":
            with pq.ParquetFile(source.path, buffer_size=1 << 16, pre_buffer=False) as file:
                yield from file.iter_batches(1 << 14)
        else:
            convert = pyarrow.csv.ConvertOptions(column_types=source.read_types)
            with pyarrow.csv.open_csv(source.path, convert_options=convert) as reader:
                yield from reader
    except pa.ArrowException as error:
        reason = str(error).splitlines()[0]
        raise InputError(f"{source.path}: {reason}; write to a .csv file, which keeps every value as text.") from None
