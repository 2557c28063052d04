"""Tables of rows for a model that is there: the columns it needs, under the names they have now."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

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
        if file_format(table) == "csv":
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
