"""Tables of rows for a model that is there, and files that commands write of them.

A table has the columns that the model needs, under the names they have now. A file is for its owner alone, and is
written whole or not at all.
"""

from __future__ import annotations

import gzip
import os
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import IO, TYPE_CHECKING, Any

from privrep.cli.options import split_names
from privrep.errors import InputError

if TYPE_CHECKING:
    from privrep.data.categories import Categories
    from privrep.data.readers import TableSource
    from privrep.models.model import Model


def open_table(
    table: Path,
    fitted: Model,
    user: str,
    targets: Sequence[str] | None,
    features: str | None = None,
    item: str | None = None,
) -> TableSource:
    """A table's columns as the model needs them."""
    from privrep.data.readers import TableSource

    lists = _lists(fitted, features, item)
    _check_kinds(table, user, lists, fitted.config.ratings)
    text = fitted.heads is None or id_kind(fitted.heads.ids) == "text"  # no heads to tell: keep ids as they are written
    names = split_names(features)
    if names is None and (fitted.columns.features or lists):
        names = list(fitted.columns.features)
    categories: Any = lists or None
    classes = fitted.columns.classes if targets is not None else ()
    source = TableSource(table, user, targets, names, text, categories, classes or None)
    wanted = len(fitted.representation.scale)
    if len(source.feature_names) != wanted:
        raise InputError(
            f"the model has {wanted} features; {table} gives {len(source.feature_names)}. Pass --features."
        )
    return source


def _lists(fitted: Model, features: str | None, item: str | None) -> dict[str, Categories]:
    """The columns of categories and their lists, under the names they have in this table."""
    lists = fitted.columns.by_category
    if fitted.config.ratings and features is not None:
        raise InputError("this is a model of ratings, which has items rather than features; leave --features out.")
    if item is None:
        return lists
    if not fitted.config.ratings:
        raise InputError("this is no model of ratings; leave --item out.")
    return {item: fitted.columns.categories[0]}


def _check_kinds(table: Path, user: str, lists: Mapping[str, Categories], ratings: bool) -> None:
    """The columns of categories must be there and, where a file declares types, hold what the lists hold."""
    from privrep.data.files import file_format, file_schema, is_text, require
    from privrep.data.readers import BATCH_BYTES

    found: Any = file_schema(table, user, BATCH_BYTES // 4) if lists else None
    for name, listed in lists.items():
        require(name, "--item" if ratings else "categories", table, found.names)
        if file_format(table) == "csv" or not listed:
            continue
        declared = found.field(name).type
        kind, wanted = getattr(declared, "value_type", declared), isinstance(listed[0], str)
        if is_text(kind) != wanted:
            raise InputError(
                f"column {name!r} of {table} holds values of type {declared}, the model knows "
                f"{'text' if wanted else 'integers'} there; convert the column."
            )


def id_kind(ids: Any) -> str:
    kind: str = ids.dtype.kind
    return "integers" if kind in "iu" else "decimal numbers" if kind == "f" else "text"


def suffix_of(path: Path, suffixes: Iterable[str]) -> str | None:
    return next((suffix for suffix in suffixes if path.name.lower().endswith(suffix)), None)


def check_file(out: Path, overwrite: bool, suffixes: Iterable[str], folder: Path) -> str:
    """Refuse a file that cannot be written or has no place in the model folder, before anything is read.

    Returns its suffix.
    """
    suffix = suffix_of(out, suffixes)
    if suffix is None:
        raise InputError(f"--out: {out} must end in {', '.join(suffixes)}.")
    real, private = out.resolve(), folder.resolve() / "private"
    model = (folder / "model.json").is_file()
    if model and real.is_relative_to(private.parent) and not real.is_relative_to(private):
        raise InputError(
            f"--out: {out} would be private and in {folder}, where everything outside {folder / 'private'} may be "
            "published; choose another place."
        )
    if real == private / "heads.parquet":
        raise InputError(f"--out: {out} holds the heads of the model itself; choose another name.")
    if out.is_dir():
        raise InputError(f"--out: {out} is a folder; name a file.")
    if out.exists() and not overwrite:
        raise InputError(f"--out: {out} exists already; choose another name, or pass --overwrite.")
    if not out.absolute().parent.is_dir():
        raise InputError(f"--out: there is no folder {out.parent}; make it first.")
    return suffix


@contextmanager
def new_file(path: Path) -> Iterator[Path]:
    """A path to write to that becomes `path`, readable by its owner only, when all went well; nothing when not."""
    temporary = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    try:
        os.close(os.open(temporary, os.O_CREAT | os.O_EXCL | os.O_WRONLY, 0o600))
        yield temporary
        os.replace(temporary, path)
    except BaseException:
        temporary.unlink(missing_ok=True)
        raise


def open_text(path: Path, mode: str, *, packed: bool) -> IO[str]:
    """A CSV file as text, bytes that are not UTF-8 kept as they are."""
    opened: Any = gzip.open if packed else open
    encoding = "utf-8-sig" if mode == "r" else "utf-8"
    file: IO[str] = opened(path, f"{mode}t", newline="", encoding=encoding, errors="surrogateescape")
    return file
