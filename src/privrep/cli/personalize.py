"""`privrep personalize`."""

from __future__ import annotations

import csv
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from privrep.cli.console import note, say
from privrep.cli.image_rows import RowOptions, refuse_options, takes_rows_of_images
from privrep.cli.options import (
    Decimal,
    Delimiter,
    Encoding,
    FeatureColumns,
    Folder,
    ImageColumn,
    ItemColumn,
    RowsPath,
    UserColumn,
    Weight,
    flag,
    split_names,
)
from privrep.cli.streams import readable, shown_output
from privrep.cli.tables import as_id, check_file, open_table, say_joined, suffix_of
from privrep.cli.weights import ColumnNames, write_weights
from privrep.errors import InputError
from privrep.schema.standard import STANDARD

if TYPE_CHECKING:
    from privrep.data.dialects import Dialect
    from privrep.data.readers import TableSource
    from privrep.heads.heads import Heads
    from privrep.models.model import Model


def personalize(
    folder: Folder,
    table: RowsPath,
    out: Annotated[
        Path | None,
        typer.Option(
            help="Write the heads to this .json, .csv or .parquet file instead, or as JSON to - (standard output); a "
            "network: to this folder."
        ),
    ] = None,
    user_id: Annotated[
        str | None, typer.Option(help="The table has no user column: all its rows are this user's.")
    ] = None,
    replace: Annotated[bool, flag("--replace", help="Users who have a head already get a new one.")] = False,
    overwrite: Annotated[bool, flag("--overwrite", help="Replace the file --out.")] = False,
    user: UserColumn = None,
    target: Annotated[
        str | None, typer.Option(help="Target column, or columns A,B, if not named as in the fit.")
    ] = None,
    features: FeatureColumns = None,
    item: ItemColumn = None,
    image: ImageColumn = None,
    weight: Weight = None,
    encoding: Encoding = None,
    delimiter: Delimiter = None,
    decimal: Decimal = None,
) -> None:
    """Make heads for users who were not in the fit, from their rows and the public representation. Costs no privacy.

    Without --out they join the heads in FOLDER/private. With --out they go to a file of weights that only you can read.
    With --user-id, a table may have a header and no rows: that user's head is then the prior mean.
    Networks take tables of flattened rows (--user, --target), Parquet files of images (--image), archives (.npz),
    folders user/class/image, and TOML files of `fit-neural`. With --out they write a folder: one user's own network.
    """
    from privrep.data.dialects import Dialect

    given: Any = {"user": user, "target": target, "features": features, "item": item, "image": image}
    how = RowOptions(Dialect(encoding, delimiter, decimal), weight=weight, user_id=user_id, **given)
    personalize_rows = _personalize_images if takes_rows_of_images(folder) else _personalize_table
    with readable(table) as path:
        personalize_rows(folder, path, how, out, replace, overwrite)


def _personalize_table(
    folder: Path, table: Path, how: RowOptions, out: Path | None, replace: bool, overwrite: bool
) -> None:
    """Make heads for users of a model of a table.

    Args:
        folder: of the model.
        table: the users' rows.
        how: how rows are read.
        out: a file of weights; without it heads join those in FOLDER/private.
        replace: whether users who have a head get a new one.
        overwrite: whether `out` may stand already.
    """
    from privrep.models.model import load

    refuse_options(folder, {"--image": how.image})
    if out is not None:
        check_file(out, overwrite, (".json", ".csv", ".parquet"), folder)
        if replace:
            raise InputError("--replace is for the heads in the model folder; with --out use --overwrite.")
    fitted = load(folder)
    targets = _targets(fitted, how.target, folder)
    if how.user_id is not None and fitted.representation.serves_newcomers and _has_no_rows(table):
        new, names = _head_without_rows(fitted, how.user_id, how.features, named=out is not None)
    else:
        with _with_user_column(table, fitted, how.user, how.user_id, how.dialect) as (path, column):
            chosen = (how.features, how.item, how.weight, how.dialect)
            source = open_table(path, fitted, column, targets, *chosen, table)
            new, names = _heads_of_rows(source, fitted), list(source.feature_names)
    if out is not None:
        write_weights(new, fitted, ColumnNames(names, targets), out)
        alone = "" if out == STANDARD else " (readable by you alone)"
        count = f"{len(new.ids):,} {'head' if len(new.ids) == 1 else 'heads'}"
        say(f"{count}: {shown_output(out)}{alone}", heads=out, count=len(new.ids))
        return
    keep_heads(fitted, new, folder, table, replace)


def _personalize_images(
    folder: Path, table: Path, how: RowOptions, out: Path | None, replace: bool, overwrite: bool
) -> None:
    """Make heads for users of a network, or of numbers on public features; the arguments are those of a table."""
    from privrep.cli.personalize_networks import personalize_images

    if out == STANDARD:
        raise InputError("--out is a folder for networks, which standard output cannot hold; name a folder.")
    if out is not None and replace:
        raise InputError("--replace is for the heads in the model folder; with --out use --overwrite.")
    personalize_images(folder, table, how, out, again=replace, overwrite=overwrite)


def keep_heads(fitted: Model, new: Heads, folder: Path, table: Path, replace: bool) -> None:
    """Join new heads to those of a model folder, and say how many there are.

    Args:
        fitted: the model, with the heads it has.
        new: the heads of the users of a table.
        folder: of the model.
        table: the file, for sentences.
        replace: whether users who have a head already get the new one.
    """
    from privrep.heads.store import write_heads
    from privrep.models.newcomers import join_heads

    before, came = 0 if fitted.heads is None else len(fitted.heads.ids), len(new.ids)
    said: Any = {"rows": str(table), "model": str(folder), "advice": "--replace"}
    new = join_heads(fitted.heads, new, replace=replace, **said)
    write_heads(new, folder)
    say_joined(came, came - (len(new.ids) - before), len(new.ids), folder)


def _heads_of_rows(source: TableSource, fitted: Model) -> Heads:
    from privrep.models.newcomers import make_heads
    from privrep.users.streaming import StreamingUsers

    with StreamingUsers.open(source) as users:
        for said in users.missing.words():
            note(f"{said[:1].upper()}{said[1:]} (not private: for your eyes).")
        return make_heads(fitted, users.blocks(), sparse=source.is_sparse)


def _targets(fitted: Model, given: str | None, folder: Path) -> list[str]:
    """Return as many target columns as the model has."""
    targets = split_names(given) or list(fitted.columns.targets)
    if not targets:
        raise InputError(f"{folder} was fitted on arrays and names no target column; pass --target.")
    prior = fitted.representation.prior
    known = len(targets) if fitted.heads is None else fitted.heads.targets
    known = known if prior is None else prior.targets
    wanted = (len(fitted.columns.targets) or known) if fitted.loss is None else 1
    if len(targets) != wanted:
        count = "one target" if wanted == 1 else f"{wanted} targets"
        raise InputError(f"{folder} has {count} and --target names {len(targets)}; name as many.")
    return targets


# A table of one user


@contextmanager
def _with_user_column(
    table: Path, fitted: Model, user: str | None, user_id: str | None, dialect: Dialect
) -> Iterator[tuple[Path, str]]:
    """Yield a table and its user column; of a table without one, a private copy that has one.

    Args:
        table: the file.
        fitted: the model.
        user: the column, if it was named.
        user_id: the user whose rows all are, if the table has no such column.
        dialect: how the file is written, as far as that was said.
    """
    column = user or fitted.columns.user
    if user_id is None:
        if not column:
            raise InputError("the model was fitted on arrays and names no user column; pass --user, or --user-id.")
        yield table, column
        return
    with with_user_column(table, column or "user", _as_id(user_id, fitted), dialect) as copy:
        yield copy, column or "user"


@contextmanager
def with_user_column(table: Path, column: str, value: str | int, dialect: Dialect) -> Iterator[Path]:
    """Yield a private copy of a table with a column that names one user, for as long as it is needed.

    Args:
        table: the file.
        column: the name of the new column.
        value: the user.
        dialect: how the file is written, as far as that was said.
    """
    with tempfile.TemporaryDirectory(prefix="privrep-") as scratch:
        copy = _add_column(table, column, value, Path(scratch), dialect)
        try:
            yield copy
        except InputError as error:
            raise InputError(str(error).replace(str(copy), str(table))) from None


def _add_column(table: Path, column: str, value: str | int, folder: Path, dialect: Dialect) -> Path:
    """Return a copy of a table, with one more column that holds one value in every row.

    Args:
        table: the file.
        column: the name of the new column.
        value: what it holds.
        folder: of the copy.
        dialect: how the file is written, as far as that was said.
    """
    import pyarrow as pa
    import pyarrow.parquet as pq

    from privrep.data.dialects import open_text, read_text_rows
    from privrep.data.files import find_file_dialect, find_format

    found, kind = find_file_dialect(table, None, dialect), find_format(table)
    copy = folder / f"rows.{kind}"
    if kind == "parquet":
        rows = pq.read_table(table)
        _refuse(column, rows.column_names, table)
        pq.write_table(rows.append_column(column, pa.array([value] * len(rows))), copy)
    else:
        header, *lines = list(read_text_rows(table, found)) or [[]]
        _refuse(column, header, table)
        with open_text(copy, "w", packed=False, encoding=found.encoding) as file:
            writer = csv.writer(file, delimiter=found.delimiter or ",")
            writer.writerows([[column, *header], *([value, *line] for line in lines)])
    return copy


def _refuse(column: str, header: list[str], table: Path) -> None:
    if column in header:
        raise InputError(f"{table} has a user column, {column!r}; leave --user-id out.")


def _as_id(text: str, fitted: Model) -> str | int:
    from privrep.data.table import id_kind

    return as_id(text, fitted.heads is None or id_kind(fitted.heads.ids) != "integers")


# A user without rows


def _has_no_rows(table: Path) -> bool:
    """Return whether a file has a header alone. What cannot be read is for others to complain of."""
    import pyarrow as pa
    import pyarrow.parquet as pq

    from privrep.data.dialects import open_text
    from privrep.data.readers import SUFFIXES

    suffix = suffix_of(table, SUFFIXES)
    if suffix is None or not table.is_file():
        return False
    try:
        if SUFFIXES[suffix] == "parquet":
            return bool(pq.read_metadata(table).num_rows == 0)
        with open_text(table, "r", packed=suffix == ".csv.gz") as file:  # of any encoding but UTF-16
            return sum(1 for line in islice((line for line in csv.reader(file) if line), 2)) < 2
    except (pa.ArrowException, OSError, csv.Error):
        return False


def _head_without_rows(fitted: Model, user_id: str, features: str | None, named: bool) -> tuple[Heads, list[str]]:
    """Return the prior mean as the head of this user, and, if they are needed, the names of the features."""
    import numpy as np

    from privrep.data import categories
    from privrep.data.missing import make_indicator_names
    from privrep.heads.fitting import make_newcomer_heads

    d = len(fitted.representation.scale)
    name = _as_id(user_id, fitted)
    names = split_names(features) or list(fitted.columns.features)
    names += make_indicator_names(names, fitted.columns.indicators)
    names += categories.list_names(fitted.columns.named)
    if named and len(names) != d:
        raise InputError(f"the model has {d} features and gives no names to them; pass --features.")
    ids = np.array([name], dtype=object if isinstance(name, str) else np.int64)
    return make_newcomer_heads(ids, fitted.representation), names
