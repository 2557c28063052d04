"""`privrep fit`."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from privrep.cli import options
from privrep.cli.console import note
from privrep.cli.declared import read_categories, read_classes, read_covariance, read_items, read_scale
from privrep.cli.folders import check_out, standing
from privrep.cli.learning import learn_table, undecided
from privrep.cli.options import TablePath, check_relation, split_names
from privrep.cli.summary import summarise
from privrep.errors import InputError

if TYPE_CHECKING:
    from privrep.data.categories import Categories
    from privrep.data.readers import TableSource
    from privrep.models.description import Columns

_ANY = 1 << 31  # features: more than a table will have, where their number is not known yet


def fit(
    table: TablePath,
    user: options.User,
    target: options.Target,
    epsilon: options.Epsilon,
    delta: options.Delta,
    out: options.Out,
    features: options.Features = None,
    categorical: options.Categorical = None,
    categories: options.Categories = None,
    item: options.Item = None,
    items: options.Items = None,
    task: options.Task = "regression",
    classes: options.Classes = None,
    loss: options.Loss = None,
    rank: options.Rank = "auto",
    method: options.Method = None,
    paper: options.Paper = False,
    start: options.Start = None,
    relation: options.Relations = "replace-one-user",
    no_intercept: options.NoIntercept = False,
    no_safety_net: options.NoSafetyNet = False,
    scale: options.Scale = None,
    covariance: options.Covariance = None,
    simulate: options.Simulate = None,
    user_as_text: options.UserAsText = False,
    workdir: options.Workdir = None,
    overwrite: options.Overwrite = False,
) -> None:
    """Learn a shared representation privately, and every user's head, from a table of (user, features, target)."""
    from privrep.models.description import Config

    check_out(out, overwrite)
    numbers = {"--features": features, "--categorical": categorical, "--categories": categories}
    ways = {"--method": method, "--paper": paper, "--start": start, "--scale": scale, "--covariance": covariance}
    heads = {"--no-intercept": no_intercept, "--no-safety-net": no_safety_net}
    labels = {"--task": task if task != "regression" else None, "--classes": classes, "--loss": loss}
    _check_item(item, items, target, {**numbers, **ways, **heads, **labels})
    _check_task(task, labels)
    by_value = split_names(categorical) or [] if item is None else [item]
    lists = read_categories(categories, by_value) if item is None else read_items(items, item)
    known = None if task == "regression" else _classes(table, user, target, classes)
    source = _source(table, user, target, split_names(features), by_value, lists, user_as_text, item, known)
    columns = _columns(source, lists, known)
    _check_columns(columns, scale, covariance, paper)
    config = Config(
        rank=_rank(rank),
        epsilon=epsilon,
        delta=delta,
        relation=check_relation(relation),
        intercept=not no_intercept,
        safety_net=not no_safety_net,
        scale=read_scale(scale, source.feature_names),
        covariance=read_covariance(covariance, source.feature_names),
        seed=_seed(simulate),
        method=method or "private-fedrep",
        configuration="paper" if paper else "default",
        start=start,
        ratings=item is not None,
        loss=None if task == "regression" else loss or "log",
    )
    config.check(_ANY if undecided(columns) else len(source.feature_names))
    if features is None and item is None:
        _list_left_out(source)
    standing(out, config, columns, overwrite)
    summarise(learn_table(source, config, columns, out, workdir, overwrite), out, columns)


# What was asked for


def _check_item(item: str | None, items: Path | None, target: str, others: Mapping[str, object]) -> None:
    """Ratings are (user, item, rating): most options have no meaning for them."""
    if item is None:
        if items is not None:
            raise InputError("--items lists the values of the item column; name that column with --item.")
        return
    given = [option for option, value in others.items() if value not in (None, False)]
    if given:
        raise InputError(f"--item is for ratings, which take a rank and a budget; leave out {', '.join(given)}.")
    if len(split_names(target) or []) != 1:
        raise InputError(f"--item is for ratings, which are one target column. Got {target!r} instead.")


def _check_task(task: str, labels: Mapping[str, str | None]) -> None:
    if task not in ("regression", "classification"):
        raise InputError(f"--task must be one of regression, classification. Got {task!r} instead.")
    given = [option for option, value in labels.items() if value is not None]
    if task == "regression" and given:
        raise InputError(f"{' and '.join(given)} {'go' if len(given) > 1 else 'goes'} with --task classification.")


def _classes(table: Path, user: str, target: str, given: str | None) -> Categories:
    """The classes that are known beforehand. Of those to be selected, one that stands for them and shows their kind."""
    from privrep.data.categories import kind_of_labels
    from privrep.data.files import file_format, file_schema, require
    from privrep.data.readers import BATCH_BYTES

    names = split_names(target) or []
    if len(names) != 1:
        raise InputError(f"--task classification is for one target column. Got {target!r} instead.")
    found = file_schema(table, user, BATCH_BYTES // 4)
    require(names[0], "target", table, found.names)
    kind = kind_of_labels(found.field(names[0]).type) if file_format(table) == "parquet" else ""
    if given is not None:
        return read_classes(given, kind)
    return (False, True) if kind == "booleans" else (0,) if kind == "integers" else ("",)


def _check_columns(columns: Columns, scale: Path | None, covariance: Path | None, paper: bool) -> None:
    """Refuse options that cannot go with these columns."""
    if paper and len(columns.targets) > 1:
        raise InputError(
            "--paper is for one target, as the papers are. Leave it out, or name one column with --target."
        )
    if covariance is not None and columns.categorical:
        raise InputError("--covariance is for tables of numbers; leave it or --categorical out.")
    if scale is not None and undecided(columns):
        raise InputError(
            f"--scale needs all features to be known: list the values of {undecided(columns)[0]!r} with --categories, "
            "or leave --scale out."
        )


def _source(
    table: Path,
    user: str,
    target: str,
    features: list[str] | None,
    by_value: Sequence[str],
    lists: Mapping[str, Categories],
    user_as_text: bool,
    item: str | None,
    classes: Categories | None,
) -> TableSource:
    """The table. A column whose values are not declared has a list that stands for the one to come."""
    from privrep.data.files import file_format, file_schema, require
    from privrep.data.readers import BATCH_BYTES, TableSource

    listed: dict[str, Any] = {}
    found: Any = file_schema(table, user, BATCH_BYTES // 4) if by_value else None
    for name in by_value:
        require(name, "--categorical" if item is None else "--item", table, found.names)
        if name in listed:
            raise InputError(f"--categorical names column {name!r} more than once; name it once.")
        whole = file_format(table) == "parquet" and _holds_integers(found.field(name).type)
        listed[name] = lists.get(name) or ((0,) if whole else ("",))
    numeric = features if item is None else []
    return TableSource(table, user, split_names(target), numeric, user_as_text, listed or None, classes)


def _holds_integers(kind: Any) -> bool:
    import pyarrow as pa

    return bool(pa.types.is_integer(kind.value_type if isinstance(kind, pa.DictionaryType) else kind))


def _columns(source: TableSource, lists: Mapping[str, Categories], classes: Categories | None) -> Columns:
    """The columns as they were asked for: no list of values where none was declared."""
    from privrep.models.description import Columns

    names = tuple(source.categories or ())
    declared = tuple(lists.get(name, ()) for name in names)
    known = classes if classes is not None and len(classes) > 1 else ()
    return Columns(source.user, source.targets, source.numeric_names, names, declared, known)


def _rank(text: str) -> int | None:
    if text == "auto":
        return None
    try:
        return int(text)
    except ValueError:
        raise InputError(f"--rank must be a positive integer or auto. Got {text!r} instead.") from None


def _seed(number: int | None) -> int | None:
    if number is not None and number < 0:
        raise InputError(f"--simulate must be zero or a positive integer. Got {number} instead.")
    return number


def _list_left_out(source: TableSource) -> None:
    left_out = [name for name in source.header if name not in source.columns]
    if left_out:
        listed = ", ".join(left_out[:8]) + (", ..." if len(left_out) > 8 else "")
        note(f"Not numbers, so not features: {listed}. Name the features with --features to be sure.")
