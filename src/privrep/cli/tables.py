"""Tables of rows for a model that is there, and files that commands write of them.

A table has the columns that the model needs, under the names they have now. A file is for its owner alone, and is
written whole or not at all.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from privrep.cli.console import note, say, take_stdout
from privrep.cli.options import split_names
from privrep.errors import InputError
from privrep.schema.standard import STANDARD

if TYPE_CHECKING:
    from privrep.data.categories import Categories
    from privrep.data.dialects import Dialect
    from privrep.data.readers import TableSource
    from privrep.models.model import Model


def open_table(
    table: Path,
    fitted: Model,
    user: str,
    targets: Sequence[str] | None,
    features: str | None = None,
    item: str | None = None,
    weight: str | None = None,
    dialect: Dialect | None = None,
    shown: Path | None = None,
) -> TableSource:
    """Return a table's columns as the model needs them, and say how it is read, where that is not plain.

    Args:
        table: the file.
        fitted: the model.
        user: its column of users.
        targets: its columns of targets, if they are needed.
        features: the columns of numbers, if they are not called as in the fit.
        item: the column of items, if it is not.
        weight: the column of weights, if there is one.
        dialect: how the file is written, as far as that was said.
        shown: what sentences call the file, if it is a copy.
    """
    from privrep.data.readers import TableSource
    from privrep.data.table import id_kind

    lists = _lists(fitted, features, item)
    _check_kinds(table, user, lists, fitted.config.ratings, dialect)
    text = fitted.heads is None or id_kind(fitted.heads.ids) == "text"  # no heads to tell: keep ids as they are written
    names = split_names(features)
    if names is None and (fitted.columns.features or lists):
        names = list(fitted.columns.features)
    categories: Any = lists or None
    classes = fitted.columns.classes if targets is not None else ()
    numbers = [*(names or ()), *(() if classes else targets or ())]  # the model says so
    how: Any = {"numeric": numbers, "dialect": dialect, "dense": fitted.config.dense}
    how |= {"items": fitted.config.ratings, "weight": weight, "missing": fitted.columns.policy}
    source = TableSource(table, user, targets, names, text, categories, classes or None, **how)
    for remark in source.remarks:
        note(remark.replace(str(table), str(shown or table)))
    wanted = len(fitted.representation.scale)
    if len(source.feature_names) != wanted:
        raise InputError(
            f"the model has {wanted} features; {table} gives {len(source.feature_names)}. Pass --features."
        )
    return source


def _lists(fitted: Model, features: str | None, item: str | None) -> dict[str, Categories]:
    """Return the columns of categories and their lists, under the names they have in this table."""
    lists = fitted.columns.by_category if fitted.config.ratings else fitted.columns.named
    if fitted.config.ratings and features is not None:
        raise InputError("this is a model of ratings, which has items rather than features; leave --features out.")
    if item is None:
        return lists
    if not fitted.config.ratings:
        raise InputError("this is no model of ratings; leave --item out.")
    return {item: fitted.columns.categories[0]}


def _check_kinds(
    table: Path, user: str, lists: Mapping[str, Categories], ratings: bool, dialect: Dialect | None
) -> None:
    """Raise InputError unless the columns of categories are there and, where types are declared, hold what lists hold.

    Args:
        table: the file.
        user: its column of users.
        lists: of values, by column.
        ratings: whether the model is one of ratings.
        dialect: how the file is written, as far as that was said.
    """
    from privrep.data.categories import can_hold
    from privrep.data.files import find_format, read_schema, require_column
    from privrep.data.readers import BATCH_BYTES

    found: Any = read_schema(table, user, BATCH_BYTES // 4, dialect) if lists else None
    for name, listed in lists.items():
        require_column(name, "--item" if ratings else "categories", table, found.names)
        if find_format(table) == "csv" or not listed:
            continue
        declared = found.field(name).type
        if not can_hold(declared, listed):
            raise InputError(
                f"column {name!r} of {table} holds values of type {declared}, the model knows "
                f"{'text' if isinstance(listed[0], str) else 'integers'} there; convert the column."
            )


def list_left_out(source: TableSource) -> None:
    """Say which columns nobody named are no features, and what to do about it."""
    from privrep.data.problems import TURN_DATES

    advice = {
        "text": "name columns with --categorical to have a feature for each value, with --numeric if they hold numbers",
        "dates": TURN_DATES,
        "row names": "rename them if they are not",
    }
    for kind in dict.fromkeys(source.left_out.values()):
        names = [repr(name) if kind == "row names" else name for name, why in source.left_out.items() if why == kind]
        listed = ", ".join(names[:8]) + (", ..." if len(names) > 8 else "")
        what = kind[0].upper() + kind[1:]
        note(f"{what}, so not features: {listed}; {advice.get(kind, 'name the features with --features to be sure')}.")


def say_joined(came: int, replaced: int, in_all: int, folder: Path) -> None:
    """Say how many users got a head.

    Args:
        came: users in the table.
        replaced: users among them who had a head.
        in_all: users of the model.
        folder: of the model.
    """
    renewed = f"{replaced:,} with a new head, " if replaced else ""
    facts = {"new": came - replaced, "replaced": replaced, "in_all": in_all}
    say(f"Users: {came - replaced:,} more, {renewed}{in_all:,} in all, in {folder / 'private'}", users=facts)


def no_heads(folder: Path) -> InputError:
    """Return the error that a model folder has no heads."""
    return InputError(f"{folder} holds no heads (private/); make some with: privrep personalize {folder} TABLE")


def as_id(text: str, as_text: bool) -> str | int:
    """Return the id of a user as the ids of the model are: text, or an integer."""
    if as_text:
        return text
    try:
        return int(text)
    except ValueError:
        raise InputError(f"--user-id must be an integer, as the ids of this model are. Got {text!r} instead.") from None


def suffix_of(path: Path, suffixes: Iterable[str]) -> str | None:
    """Return the suffix of a file, if it is one of these."""
    return next((suffix for suffix in suffixes if path.name.lower().endswith(suffix)), None)


def check_file(out: Path, overwrite: bool, suffixes: Iterable[str], folder: Path) -> str:
    """Refuse a file that cannot be written or has no place in the model folder, before anything is read.

    Args:
        out: the file, or `-` for standard output.
        overwrite: whether it may be there already.
        suffixes: that it may have; what is printed has the first that is text.
        folder: of the model.

    Returns:
        Its suffix.
    """
    if out == STANDARD:
        take_stdout()
        return next(suffix for suffix in suffixes if suffix in (".csv", ".json"))
    suffix = suffix_of(out, suffixes)
    if suffix is None:
        raise InputError(f"--out: {out} must end in {', '.join(suffixes)}.")
    check_place(out, folder)
    if out.is_dir():
        raise InputError(f"--out: {out} is a folder; name a file.")
    if out.exists() and not overwrite:
        raise InputError(f"--out: {out} exists already; choose another name, or pass --overwrite.")
    if not out.absolute().parent.is_dir():
        raise InputError(f"--out: there is no folder {out.parent}; make it first.")
    return suffix


def check_place(out: Path, folder: Path) -> None:
    """Refuse a path for private data that lies in the public part of a model folder."""
    real, private = out.resolve(), folder.resolve() / "private"
    model = (folder / "model.json").is_file()
    if model and real.is_relative_to(private.parent) and not real.is_relative_to(private):
        raise InputError(
            f"--out: {out} would be private and in {folder}, where everything outside {folder / 'private'} may be "
            "published; choose another place."
        )
    if real == private / "heads.parquet":
        raise InputError(f"--out: {out} holds the heads of the model itself; choose another name.")
