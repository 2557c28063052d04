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

from privrep.cli.console import note, say
from privrep.cli.options import Decimal, Delimiter, Encoding, FeatureColumns, Folder, ItemColumn, TablePath, UserColumn
from privrep.cli.tables import check_file, id_kind, new_file, open_table
from privrep.errors import InputError

if TYPE_CHECKING:
    from privrep.data.missing import MissingCounts
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
        ),
    ] = None,
    refuse_unknown: Annotated[bool, typer.Option("--refuse-unknown", help="The same as --unknown refuse.")] = False,
) -> None:
    """Predict every row of a table by its user's own head: the same table with one more column, `prediction`.

    A model of several targets adds a column for each, `prediction_NAME`; one of classes predicts a class and, with the
    log loss, adds the probability of each, `probability_CLASS`.
    Rows of users without a head are predicted with the prior mean, in models of ratings with the level and the item's
    offset; it says how many. With --unknown skip they are left out. Missing features are filled as in the fit.
    With --interval 0.9, each prediction has two more columns, `prediction_low` and `prediction_high`, between which
    nine of ten targets are expected.
    Private heads make the predictions, so only you can read the file, and it is no part of what may be published.
    """
    from privrep.data.dialects import Dialect
    from privrep.data.readers import SUFFIXES
    from privrep.heads.uncertainty import check_coverage
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
    source = open_table(table, fitted, column, None, features, item, dialect=Dialect(encoding, delimiter, decimal))
    names = _names(fitted, interval, folder)
    taken = next((name for name in names if name in source.header), None)
    if taken is not None:
        raise InputError(f"{table} has a column {taken!r} already; rename it first.")
    seen = _Seen()
    asked = _Asked(interval, _check_unknown(unknown, refuse_unknown, fitted, folder))
    predictions = _predictions(source, fitted, folder, asked, seen)
    write = _write_text if (source.format, SUFFIXES[suffix]) == ("csv", "csv") else _write_arrow
    with new_file(out) as temporary:
        rows = write(source, predictions, names, temporary, suffix)
    say(
        f"{rows:,} rows with their prediction{'s' if len(names) > 1 else ''}: {out} (readable by you alone: made by "
        "private heads, not covered by the privacy guarantee)"
    )
    _say_unusual(fitted, folder, asked, seen)


def _say_unusual(fitted: Model, folder: Path, asked: _Asked, seen: _Seen) -> None:
    """Say what the model did not know, and what was missing."""
    from privrep.heads.uncertainty import describe_unknown
    from privrep.local.prior import HeadPrior

    prior = fitted.representation.prior
    if asked.interval is not None and isinstance(prior, HeadPrior) and not all(map(math.isfinite, prior.noise)):
        say("Intervals are infinite: there were too few users to tell how large errors are; fit more, or spend more")
    if seen.rows:
        said = describe_unknown(seen.rows, len(seen.users), asked.unknown == "skip", fitted.config.ratings)
        say(f"{said}; privrep personalize {folder} TABLE makes heads of users' own rows")
    for said in seen.missing.words("by the user's own mean of the fit where it is kept, else by the location"):
        note(f"{said[:1].upper()}{said[1:]} (not private: for your eyes).")
    for name, count in (+seen.values).items():
        how = "predicted with the user's level" if fitted.config.ratings else "predicted without that feature"
        say(f"{count:,} {'row' if count == 1 else 'rows'} with a value of {name} that the model does not know: {how}")


def _no_counts() -> MissingCounts:
    from privrep.data.missing import MissingCounts

    return MissingCounts()


def _check_unknown(given: str | None, refused: bool, fitted: Model, folder: Path) -> str:
    """Return what is done about users without a head: prior, skip or refuse."""
    known = ("prior", "skip", "refuse")
    if given is not None and given not in known:
        raise InputError(f"--unknown must be one of {', '.join(known)}. Got {given!r} instead.")
    if refused and given not in (None, "refuse"):
        raise InputError(f"--refuse-unknown says another thing than --unknown {given}; leave one out.")
    if fitted.representation.serves_newcomers:
        return "refuse" if refused else given or "prior"
    if given == "prior":
        raise InputError(f"--unknown prior: {folder} has no prior to predict users without a head by; skip them.")
    return given or "refuse"


@dataclass
class _Seen:
    """What the model does not know, and what is missing, in the rows read so far."""

    values: Counter[str] = field(default_factory=Counter)  # rows with a category that it does not know, by column
    users: set[Any] = field(default_factory=set)  # who have no head
    rows: int = 0  # of these users
    missing: MissingCounts = field(default_factory=_no_counts)


class _Asked(NamedTuple):
    """What is asked for besides predictions."""

    interval: float | None
    unknown: str  # what is done about users without a head


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

    from privrep.local.losses import decided, probabilities

    predicted = np.array(fitted.columns.classes)[decided(outputs)]
    return [predicted, *(probabilities(loss, outputs).T if loss.name == "log" else ())]


def _predictions(
    source: TableSource, fitted: Model, folder: Path, asked: _Asked, seen: _Seen
) -> Iterator[tuple[Any, list[Any]]]:
    """Yield which rows of a batch are predicted, a mask, and their predictions, an array for each name.

    Notes in `seen` what the model does not know, and what is missing.
    """
    import numpy as np

    from privrep.data.readers import assembled, checked_batches, column_values, user_ids

    heads, rows = fitted.heads, 0
    assert heads is not None
    order = np.argsort(heads.ids)
    ordered = heads.ids[order]
    for batch in checked_batches(source, seen.missing):
        users = user_ids(batch.column(0))
        if id_kind(users) != id_kind(ordered):
            raise InputError(
                f"the users in column {source.user!r} of {source.path} are {id_kind(users)}, those of {folder} are "
                f"{id_kind(ordered)}."
            )
        spot = np.minimum(np.searchsorted(ordered, users), len(ordered) - 1)
        missing = np.flatnonzero(ordered[spot] != users)
        if len(missing) and asked.unknown == "refuse":
            raise InputError(
                f"user {users.tolist()[missing[0]]!r} in row {rows + int(missing[0]) + 1} of {source.path} has no head "
                f"in {folder}; make one from some rows with their target: privrep personalize {folder} TABLE"
            )
        seen.rows += len(missing)
        seen.users.update(users[missing].tolist())
        positions = order[spot]
        positions[missing] = -1
        kept = positions >= 0 if asked.unknown == "skip" else np.ones(len(users), dtype=bool)
        columns = dict(zip(source.columns[1:], map(column_values, batch.columns[1:]), strict=True))
        for name in source.categories or ():
            seen.values[name] += int((columns[name][kept] < 0).sum())
        X = assembled(source, [list(columns.values())], batch.num_rows)[0]
        yield kept, _columns(fitted, X[kept], positions[kept], asked.interval)
        rows += batch.num_rows


def _write_text(source: TableSource, predictions: Iterable[Any], names: Sequence[str], path: Path, suffix: str) -> int:
    """CSV to CSV: every row as the text it is, with its predictions, written as the file is. Returns how many rows."""
    from privrep.data.dialects import Dialect, open_text, text_rows

    dialect, total = source.dialect or Dialect(), 0
    with open_text(path, "w", packed=suffix == ".csv.gz", encoding=dialect.encoding) as written:
        lines = text_rows(source.path, dialect)
        writer = csv.writer(written, lineterminator="\n", delimiter=dialect.delimiter or ",")
        writer.writerow([*next(lines), *names])
        for kept, columns in predictions:
            count = len(kept)
            rows = list(islice(lines, count))
            if len(rows) != count or any(len(row) != len(source.header) for row in rows):
                raise InputError(f"{source.path} has values with line breaks in them; take them out, or use Parquet.")
            values = zip(*(_as_text(column, source.decimal) for column in columns), strict=True)
            rows = [row for row, stays in zip(rows, kept.tolist(), strict=True) if stays]
            writer.writerows([*row, *value] for row, value in zip(rows, values, strict=True))
            total += len(rows)
    return total


def _as_text(column: Any, decimal: str) -> list[Any]:
    """Return values as they are written, numbers with the decimal mark of the file."""
    listed: list[Any] = column.tolist()
    return [str(value).replace(".", ",") for value in listed] if decimal == "," and column.dtype.kind == "f" else listed


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
    for kept, columns in predictions:
        count = len(kept)
        while sum(batch.num_rows for batch in waiting) < count:
            batch = next(batches, None)
            if batch is None:
                raise InputError(f"{source.path} changed while it was read; run the command again.")
            waiting.append(batch)
        rows = pa.Table.from_batches(waiting)
        waiting = rows.slice(count).to_batches()
        done = rows.slice(0, count).filter(pa.array(kept))
        for name, column in zip(names, columns, strict=True):
            done = done.append_column(name, pa.array(column))
        yield done


def _all_columns(source: TableSource) -> Iterator[Any]:
    """Record batches with all columns of the file, not only those the model uses."""
    import pyarrow as pa
    import pyarrow.csv

    from privrep.data.dialects import Dialect
    from privrep.data.files import open_csv, open_parquet
    from privrep.data.problems import Problems

    try:
        if source.format == "parquet":
            with open_parquet(source.path) as file:
                yield from file.iter_batches(1 << 14)
        else:
            text = dict.fromkeys(source.numeric_names, pa.large_string())
            types = {**source.read_types, **text}
            convert = pyarrow.csv.ConvertOptions(column_types=types, decimal_point=source.decimal)
            with open_csv(source.path, source.dialect or Dialect(), convert, 1 << 20) as reader:
                for batch in reader:
                    named = dict(zip(batch.schema.names, batch.columns, strict=True))
                    read = {name: source.of_text(name, named[name], Problems(source.path)) for name in text}
                    yield pa.record_batch({**named, **read})
    except pa.ArrowException as error:
        reason = str(error).splitlines()[0]
        raise InputError(f"{source.path}: {reason}; write to a .csv file, which keeps every value as text.") from None
