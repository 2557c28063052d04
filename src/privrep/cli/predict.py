"""`privrep predict`."""

from __future__ import annotations

import csv
from collections.abc import Iterable, Iterator
from contextlib import ExitStack
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from privrep.cli.shared import (
    FeatureColumns,
    Folder,
    TablePath,
    UserColumn,
    check_file,
    id_kind,
    new_file,
    open_table,
    open_text,
    say,
)
from privrep.errors import InputError

if TYPE_CHECKING:
    from privrep.algorithms.representation import Representation
    from privrep.data.readers import TableSource
    from privrep.heads import Heads


def predict(
    folder: Folder,
    table: TablePath,
    out: Annotated[Path, typer.Option(help="File to write: .parquet, .csv or .csv.gz.")],
    overwrite: Annotated[bool, typer.Option("--overwrite", help="Replace the file --out.")] = False,
    user: UserColumn = None,
    features: FeatureColumns = None,
) -> None:
    """Predict every row of a table by its user's own head: the same table with one more column, `prediction`.

    Private heads make the predictions, so only you can read the file, and it is no part of what may be published.
    """
    from privrep.data.readers import SUFFIXES
    from privrep.model import load

    suffix = check_file(out, overwrite, SUFFIXES, folder)
    fitted = load(folder)
    if fitted.heads is None:
        raise InputError(f"{folder} holds no heads (private/); make some with: privrep personalize {folder} TABLE")
    column = user or fitted.columns.user
    if not column:
        raise InputError(f"{folder} was fitted on arrays and names no user column; pass --user.")
    source = open_table(table, fitted, column, None, features)
    if "prediction" in source.header:
        raise InputError(f"{table} has a column 'prediction' already; rename it first.")
    predictions = _predictions(source, fitted.representation, fitted.heads, folder)
    write = _write_text if (source.format, SUFFIXES[suffix]) == ("csv", "csv") else _write_arrow
    with new_file(out) as temporary:
        rows = write(source, predictions, temporary, suffix)
    say(
        f"{rows:,} rows with their prediction: {out} (readable by you alone: made by private heads, not covered by the "
        "privacy guarantee)"
    )


def _predictions(source: TableSource, representation: Representation, heads: Heads, folder: Path) -> Iterator[Any]:
    """Arrays of predictions, batch by batch, in the order of the rows."""
    import numpy as np

    from privrep.data.readers import checked_batches, column_values, fill_rows, user_ids

    order, rows = np.argsort(heads.ids), 0
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
        if len(missing):
            raise InputError(
                f"user {users.tolist()[missing[0]]!r} in row {rows + int(missing[0]) + 1} of {source.path} has no head "
                f"in {folder}; make one from some rows with their target: privrep personalize {folder} TABLE"
            )
        X = np.empty((batch.num_rows, len(source.feature_names)), source.dtype)
        fill_rows(X, [column_values(column) for column in batch.columns[1:]])
        yield heads.predict(representation, X, order[spot])
        rows += batch.num_rows


def _write_text(source: TableSource, predictions: Iterable[Any], path: Path, suffix: str) -> int:
    """CSV to CSV: every row as the text it is, with its prediction. Returns the number of rows."""
    given, total = Path(source.path), 0
    with (
        open_text(given, "r", packed=given.suffix.lower() == ".gz") as read,
        open_text(path, "w", packed=suffix == ".csv.gz") as written,
    ):
        lines = (line for line in csv.reader(read) if line)
        writer = csv.writer(written, lineterminator="\n")
        writer.writerow([*next(lines), "prediction"])
        for values in predictions:
            rows = list(islice(lines, len(values)))
            if len(rows) != len(values) or any(len(row) != len(source.header) for row in rows):
                raise InputError(f"{source.path} has values with line breaks in them; take them out, or use Parquet.")
            writer.writerows([*row, value] for row, value in zip(rows, values.tolist(), strict=True))
            total += len(rows)
    return total


def _write_arrow(source: TableSource, predictions: Iterable[Any], path: Path, suffix: str) -> int:
    """From or to Parquet: every row, all its columns, with its prediction. Returns the number of rows."""
    import pyarrow as pa

    writer, total = None, 0
    with ExitStack() as files:
        for rows in _with_predictions(source, predictions):
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


def _with_predictions(source: TableSource, predictions: Iterable[Any]) -> Iterator[Any]:
    """Arrow tables of as many rows as there are predictions at a time."""
    import pyarrow as pa

    batches = _all_columns(source)
    waiting: list[Any] = []
    for values in predictions:
        while sum(batch.num_rows for batch in waiting) < len(values):
            batch = next(batches, None)
            if batch is None:
                raise InputError(f"{source.path} changed while it was read; run the command again.")
            waiting.append(batch)
        rows = pa.Table.from_batches(waiting)
        waiting = rows.slice(len(values)).to_batches()
        yield rows.slice(0, len(values)).append_column("prediction", pa.array(values, pa.float64()))


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
            types = {column.name: column.type for column in source.schema}
            convert = pyarrow.csv.ConvertOptions(column_types=types)
            with pyarrow.csv.open_csv(source.path, convert_options=convert) as reader:
                yield from reader
    except pa.ArrowException as error:
        reason = str(error).splitlines()[0]
        raise InputError(f"{source.path}: {reason}; write to a .csv file, which keeps every value as text.") from None
