"""Predictions of rows, a batch at a time, and the files they are written to.

Rows come from tables, or from files of images. Users without a head are treated alike in all of them.
"""

from __future__ import annotations

import csv
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from privrep.cli.console import say
from privrep.cli.streams import new_file, shown_output
from privrep.errors import InputError
from privrep.schema.standard import STANDARD

if TYPE_CHECKING:
    from privrep.data.missing import MissingCounts
    from privrep.data.readers import TableSource


class RowBatch(NamedTuple):
    """Rows that are predicted together."""

    users: Any  # (rows,): ids
    X: Any  # (rows, features)
    unlisted: Mapping[str, Any]  # by column of categories, a mask of rows with a value that the model does not know


class Batches(NamedTuple):
    """Record batches with all that is written of each row besides its predictions."""

    path: Path  # of the file they come from, for sentences
    each: Iterable[Any]


class Asked(NamedTuple):
    """Requests besides predictions."""

    interval: float | None
    unknown: str  # what is done about users without a head


class Unknown(NamedTuple):
    """Options about users without a head."""

    given: str | None
    refused: bool


def _no_counts() -> MissingCounts:
    from privrep.data.missing import MissingCounts

    return MissingCounts()


@dataclass
class Seen:
    """Values and users that the model does not know, and what is missing, in the rows read so far."""

    values: Counter[str] = field(default_factory=Counter)  # rows with a category that it does not know, by column
    users: set[Any] = field(default_factory=set)  # who have no head
    rows: int = 0  # of these users
    missing: MissingCounts = field(default_factory=_no_counts)


@dataclass(frozen=True)
class Predictor:
    """Heads, and what they say.

    Args:
        folder: of the model.
        ids: the users who have a head; None: nobody has one.
        columns: from rows and the positions of their users among the ids, -1 for others, to an array for each name.
        names: of the columns of predictions.
        serves_newcomers: whether users without a head can be predicted.
    """

    folder: Path
    ids: Any
    columns: Callable[[Any, Any], list[Any]]
    names: Sequence[str]
    serves_newcomers: bool

    def check_unknown(self, given: str | None, refused: bool) -> str:
        """Return what is done about users without a head: prior, skip or refuse."""
        known = ("prior", "skip", "refuse")
        if given is not None and given not in known:
            raise InputError(f"--unknown must be one of {', '.join(known)}. Got {given!r} instead.")
        if refused and given not in (None, "refuse"):
            raise InputError(f"--refuse-unknown says another thing than --unknown {given}; leave one out.")
        if self.serves_newcomers:
            return "refuse" if refused else given or "prior"
        if given == "prior":
            raise InputError(
                f"--unknown prior: {self.folder} has no prior to predict users without a head by; skip them."
            )
        return given or "refuse"

    def predict(
        self, batches: Iterable[RowBatch], path: Path, user: str, unknown: str, seen: Seen
    ) -> Iterator[tuple[Any, list[Any]]]:
        """Yield which rows of a batch are predicted, a mask, and their predictions, an array for each name.

        Notes in `seen` what the model does not know.

        Args:
            batches: the rows.
            path: of their file, for sentences.
            user: where the file names users, for sentences.
            unknown: what is done about users without a head.
            seen: is added to.
        """
        import numpy as np

        find, rows = self._make_lookup(f"{user} of {path}"), 0
        for users, X, unlisted in batches:
            positions = find(users)
            missing = np.flatnonzero(positions < 0)
            if len(missing) and unknown == "refuse":
                raise InputError(
                    f"user {users.tolist()[missing[0]]!r} in row {rows + int(missing[0]) + 1} of {path} has no head "
                    f"in {self.folder}; make one from some rows with their target: privrep personalize {self.folder} "
                    "TABLE"
                )
            seen.rows += len(missing)
            seen.users.update(users[missing].tolist())
            kept = positions >= 0 if unknown == "skip" else np.ones(len(users), dtype=bool)
            for name, mask in unlisted.items():
                seen.values[name] += int(mask[kept].sum())
            yield kept, self.columns(X[kept], positions[kept])
            rows += len(users)

    def _make_lookup(self, column: str) -> Callable[[Any], Any]:
        """Return a function that returns the position of each row's user among the ids, -1 for others, (rows,).

        Args:
            column: names users, for the sentence that refuses ids of another kind.
        """
        import numpy as np

        from privrep.data.table import id_kind

        if self.ids is None:
            return lambda users: np.full(len(users), -1, dtype=np.int64)
        order = np.argsort(self.ids)
        ordered = self.ids[order]

        def find(users: Any) -> Any:
            if id_kind(users) != id_kind(ordered):
                raise InputError(
                    f"the users in {column} are {id_kind(users)}, those of {self.folder} are {id_kind(ordered)}."
                )
            spot = np.minimum(np.searchsorted(ordered, users), len(ordered) - 1)
            return np.where(ordered[spot] == users, order[spot], -1)

        return find


def check_names(predictor: Predictor, source: TableSource) -> None:
    """Raise InputError if a table has a column that is called as one of the predictions."""
    taken = next((name for name in predictor.names if name in source.header), None)
    if taken is not None:
        raise InputError(f"{source.path} has a column {taken!r} already; rename it first.")


def table_batches(source: TableSource, seen: Seen) -> Iterator[RowBatch]:
    """Yield the rows of a table; values that are missing are added to `seen`."""
    from privrep.data.readers import assemble, read_checked_batches, read_user_ids, read_values

    for batch in read_checked_batches(source, seen.missing):
        columns = dict(zip(source.columns[1:], map(read_values, batch.columns[1:]), strict=True))
        unlisted = {name: columns[name] < 0 for name in source.categories or ()}
        X = assemble(source, [list(columns.values())], batch.num_rows)[0]
        yield RowBatch(read_user_ids(batch.column(0)), X, unlisted)


def write_predictions(
    rows: TableSource | Batches,
    predictions: Iterable[Any],
    names: Sequence[str],
    out: Path,
    suffix: str,
    heads: bool = True,
) -> None:
    """Write the file --out, readable by its owner only, and say how many rows it has.

    Args:
        rows: what is written of each row besides predictions.
        predictions: which rows of a batch are kept, and an array for each name.
        names: of the columns of predictions.
        out: the file.
        suffix: its ending.
        heads: whether users have heads, or are all predicted by the prior mean.
    """
    from privrep.data.readers import SUFFIXES

    with new_file(out) as temporary:
        if isinstance(rows, Batches):
            count = write_arrow(rows, predictions, names, temporary, suffix)
        elif (rows.format, SUFFIXES[suffix]) == ("csv", "csv"):
            count = write_text(rows, predictions, names, temporary, suffix)
        else:
            batches = Batches(Path(rows.path), all_columns(rows))
            count = write_arrow(batches, predictions, names, temporary, suffix)
    say_written(count, out, names, len(names) > 1, heads)


def say_written(count: int, out: Path, names: Sequence[str], several: bool, heads: bool = True) -> None:
    """Say how many rows were predicted, and who may read them.

    Args:
        count: how many.
        out: the file.
        names: of the columns of predictions.
        several: whether a row has several predictions.
        heads: whether users have heads, or are all predicted by the prior mean.
    """
    made = "made by private heads" if heads else "made from private rows"
    alone = "" if out == STANDARD else "readable by you alone: "
    say(
        f"{count:,} rows with their prediction{'s' if several else ''}: {shown_output(out)} ({alone}{made}, "
        "not covered by the privacy guarantee)",
        predictions=out,
        rows=count,
        columns=names,
    )


def write_text(source: TableSource, predictions: Iterable[Any], names: Sequence[str], path: Path, suffix: str) -> int:
    """Write CSV to CSV: every row as the text it is, with its predictions.

    Args:
        source: the table.
        predictions: which rows of a batch are kept, and an array for each name.
        names: of the columns of predictions.
        path: of the file.
        suffix: which says whether it is packed.

    Returns:
        How many rows.
    """
    from privrep.data.dialects import Dialect, open_text, read_text_rows

    dialect, total = source.dialect or Dialect(), 0
    with open_text(path, "w", packed=suffix == ".csv.gz", encoding=dialect.encoding) as written:
        lines = read_text_rows(source.path, dialect)
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


def write_arrow(batches: Batches, predictions: Iterable[Any], names: Sequence[str], path: Path, suffix: str) -> int:
    """Write every row of record batches, all its columns, with its predictions.

    Args:
        batches: the rows.
        predictions: which rows of a batch are kept, and an array for each name.
        names: of the columns of predictions.
        path: of the file.
        suffix: which says how it is written.

    Returns:
        How many rows.
    """
    import pyarrow as pa

    writer, total = None, 0
    with ExitStack() as files:
        for rows in _with_predictions(batches, predictions, names):
            try:
                writer = writer or _open_writer(files, path, suffix, rows.schema)
                writer.write_table(rows)
            except (pa.ArrowNotImplementedError, pa.ArrowInvalid) as error:
                reason = str(error).splitlines()[0]
                raise InputError(f"{batches.path} has a column that --out cannot hold ({reason}).") from None
            total += len(rows)
    return total


def _open_writer(files: ExitStack, path: Path, suffix: str, schema: Any) -> Any:
    """Open a writer by the suffix, not the path: that is of a temporary file with another ending."""
    import pyarrow as pa
    import pyarrow.csv
    import pyarrow.parquet as pq

    if suffix not in (".csv", ".csv.gz"):
        return files.enter_context(pq.ParquetWriter(path, schema))
    stream = pa.output_stream(str(path), compression="gzip" if suffix == ".csv.gz" else None)
    return files.enter_context(pyarrow.csv.CSVWriter(files.enter_context(stream), schema))


def _with_predictions(batches: Batches, predictions: Iterable[Any], names: Sequence[str]) -> Iterator[Any]:
    """Yield Arrow tables of as many rows as there are predictions at a time."""
    import pyarrow as pa

    left = iter(batches.each)
    waiting: list[Any] = []
    for kept, columns in predictions:
        count = len(kept)
        while sum(batch.num_rows for batch in waiting) < count:
            batch = next(left, None)
            if batch is None:
                raise InputError(f"{batches.path} changed while it was read; run the command again.")
            waiting.append(batch)
        rows = pa.Table.from_batches(waiting)
        waiting = rows.slice(count).to_batches()
        done = rows.slice(0, count).filter(pa.array(kept))
        for name, column in zip(names, columns, strict=True):
            done = done.append_column(name, pa.array(column))
        yield done


def all_columns(source: TableSource) -> Iterator[Any]:
    """Yield record batches with all columns of the file, not only those the model uses."""
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
                    read = {name: source.read_text(name, named[name], Problems(source.path)) for name in text}
                    yield pa.record_batch({**named, **read})
    except pa.ArrowException as error:
        reason = str(error).splitlines()[0]
        raise InputError(f"{source.path}: {reason}; write to a .csv file, which keeps every value as text.") from None
