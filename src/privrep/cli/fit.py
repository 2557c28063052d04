"""`privrep fit`."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import typer

from privrep.cli import options
from privrep.cli.accounts import list_users, open_account
from privrep.cli.config import note_weakness, say_checked
from privrep.cli.console import note
from privrep.cli.declared import read_categories, read_classes, read_covariance, read_items, read_scale
from privrep.cli.fit_request import BESIDES, FitRequest, in_keys, refuse_options
from privrep.cli.fit_table import check_out, find_begun, learn_table, make_budget, summarise, undecided
from privrep.cli.streams import readable
from privrep.cli.tables import list_left_out
from privrep.errors import InputError
from privrep.linear.registry import DEFAULT
from privrep.schema.standard import STANDARD

if TYPE_CHECKING:
    from privrep.data.categories import Categories
    from privrep.data.readers import TableSource
    from privrep.models.description import Columns, Config

_ANY = 1 << 31  # features: more than a table will have, where their number is not known yet


def fit(
    context: typer.Context,
    table: options.TableOrConfig,
    user: options.User = None,
    target: options.Target = None,
    epsilon: options.Epsilon = None,
    delta: options.Delta = None,
    out: options.Out = None,
    features: options.Features = None,
    categorical: options.Categorical = None,
    categories: options.Categories = None,
    numeric: options.Numeric = None,
    item: options.Item = None,
    items: options.Items = None,
    missing: options.Missing = "impute",
    missing_indicator: options.MissingIndicator = None,
    weight: options.Weight = None,
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
    population: options.Population = None,
    user_as_text: options.UserAsText = False,
    encoding: options.Encoding = None,
    delimiter: options.Delimiter = None,
    decimal: options.Decimal = None,
    workdir: options.Workdir = None,
    overwrite: options.Overwrite = False,
    check: options.Check = False,
) -> None:
    """Learn a shared representation privately, and every user's head, from a table of (user, features, target)."""
    if table.suffix == ".toml":
        _fit_file(context, table, out, workdir, overwrite, check)
        return
    request = FitRequest.of_options(context.params)  # the options above, as they were typed
    if check:
        _check(request, table, out)
        return
    if out is None:
        raise InputError("say where the model goes: --out FOLDER.")
    _fit(request, out, workdir, overwrite)


def _fit_file(
    context: typer.Context, path: Path, out: Path | None, workdir: Path | None, overwrite: bool, check: bool
) -> None:
    """Fit as a file says. Only where the model goes, and how the work is done, may be said beside it."""
    from privrep.schema.commands import FitConfig

    given = [
        option.opts[0]
        for option in context.command.params
        if option.name not in ("table", *BESIDES) and options.was_given(context, option.name)
    ]
    refuse_options(path, given)
    asked = FitConfig.read(path)
    folder = out or asked.output.folder
    if folder is None and not check:
        raise InputError("say where the model goes: --out FOLDER, or output.folder in the config.")
    with in_keys(path):
        if check or folder is None:
            _check(FitRequest.of_file(asked), path, folder)
        else:
            _fit(FitRequest.of_file(asked), folder, workdir, overwrite)


def _fit(request: FitRequest, out: Path, workdir: Path | None, overwrite: bool) -> None:
    check_out(out, overwrite)
    _check_request(request)
    with readable(request.table, workdir) as table:
        _fit_table(replace(request, table=table), out, workdir, overwrite)


def _fit_table(request: FitRequest, out: Path, workdir: Path | None, overwrite: bool) -> None:
    by_value, lists = _values(request)
    known = None if request.task == "regression" else _classes(request)
    source = _source(request, by_value, lists, known)
    for remark in source.remarks:
        note(remark)
    columns = _columns(source, lists, known)
    _check_columns(request, columns)
    config = _config(request, source.feature_names)
    config.check(_ANY if undecided(columns) else len(source.feature_names))
    config.check_columns(columns)
    if request.features is None and request.item is None:
        list_left_out(source)
    begun = find_begun(out, config, columns, overwrite)
    account = open_account(
        request.population,
        f"fit into {out.absolute()}",
        make_budget(config),
        begun,
        seeded=config.seed is not None,
        ids=lambda: list_users(source),
    )
    summarise(learn_table(source, config, columns, out, workdir, overwrite, account), out, columns)


def _config(request: FitRequest, features: Sequence[str] | None) -> Config:
    """Return the settings of the fit; without features, those that can be told without the table."""
    from privrep.models.description import Config

    return Config(
        rank=request.rank,
        epsilon=request.epsilon,
        delta=request.delta,
        relation=request.relation,
        intercept=request.intercept,
        safety_net=request.safety_net,
        scale=None if features is None else read_scale(request.scale, features),
        covariance=None if features is None else read_covariance(request.covariance, features),
        seed=request.seed,
        method=request.method or DEFAULT,
        configuration=request.configuration,
        start=request.start,
        ratings=request.item is not None,
        loss=None if request.task == "regression" else request.loss or "log",
    )


# What was asked for


def _check(request: FitRequest, told: Path, out: Path | None) -> None:
    """Refuse what can be refused without the table, and say that the rest can be used.

    Args:
        request: what was asked for.
        told: the file that says so, or the table.
        out: the folder of the model, if it is known.
    """
    _check_request(request)
    by_value, _ = _values(request)
    if request.task == "classification" and request.classes is not None:
        read_classes(request.classes, "")
    numbers = None if by_value or request.features is None else request.features
    config = _config(request, numbers)
    config.check(None if numbers is None else len(numbers))
    open_account(request.population, "", make_budget(config), out, seeded=config.seed is not None)
    note_weakness(request.epsilon, request.delta, request.relation)
    say_checked(told, [] if request.table == STANDARD or request.table.exists() else [request.table])


def _check_request(request: FitRequest) -> None:
    numbers = {
        "--features": request.features,
        "--categorical": request.categorical,
        "--categories": request.categories,
        "--numeric": request.numeric or None,
    }
    ways = {
        "--method": request.method,
        "--paper": request.configuration != "default",
        "--start": request.start,
        "--scale": request.scale,
        "--covariance": request.covariance,
    }
    heads = {"--no-intercept": not request.intercept, "--no-safety-net": not request.safety_net}
    labels = {
        "--task": request.task if request.task != "regression" else None,
        "--classes": request.classes,
        "--loss": request.loss,
    }
    rows = {
        "--missing": request.missing if request.missing != "impute" else None,
        "--missing-indicator": request.missing_indicator or None,
    }
    if request.missing not in ("impute", "drop", "refuse"):
        raise InputError(f"--missing must be one of impute, drop, refuse. Got {request.missing!r} instead.")
    _check_item(request, {**numbers, **rows, **ways, **heads, **labels})
    _check_task(request.task, labels)


def _check_item(request: FitRequest, others: Mapping[str, object]) -> None:
    """Refuse options that have no meaning for ratings, which are (user, item, rating)."""
    if request.item is None:
        if request.items is not None:
            raise InputError("--items lists the values of the item column; name that column with --item.")
        return
    given = [option for option, value in others.items() if value not in (None, False)]
    if given:
        raise InputError(f"--item is for ratings, which take a rank and a budget; leave out {', '.join(given)}.")
    if len(request.targets) != 1:
        target = ",".join(request.targets)
        raise InputError(f"--item is for ratings, which are one target column. Got {target!r} instead.")


def _check_task(task: str, labels: Mapping[str, object]) -> None:
    if task not in ("regression", "classification"):
        raise InputError(f"--task must be one of regression, classification. Got {task!r} instead.")
    given = [option for option, value in labels.items() if value is not None]
    if task == "regression" and given:
        raise InputError(f"{' and '.join(given)} {'go' if len(given) > 1 else 'goes'} with --task classification.")


def _values(request: FitRequest) -> tuple[tuple[str, ...], dict[str, Categories]]:
    """Return the columns that have a feature for each value, and those of their lists that are declared."""
    if request.item is not None:
        return (request.item,), read_items(request.items, request.item)
    by_value = request.categorical or ()
    return by_value, read_categories(request.categories, by_value)


def _classes(request: FitRequest) -> Categories:
    """Return the classes that are known beforehand; of classes to be selected, one that shows their kind."""
    from privrep.data.categories import name_arrow_label_kind
    from privrep.data.files import find_format, read_schema, require_column
    from privrep.data.readers import BATCH_BYTES

    table, names = request.table, request.targets
    if len(names) != 1:
        target = ",".join(names)
        raise InputError(f"--task classification is for one target column. Got {target!r} instead.")
    found = read_schema(table, request.user, BATCH_BYTES // 4, request.dialect)
    require_column(names[0], "target", table, found.names)
    kind = name_arrow_label_kind(found.field(names[0]).type) if find_format(table) == "parquet" else ""
    if request.classes is not None:
        return read_classes(request.classes, kind)
    return (False, True) if kind == "booleans" else (0,) if kind == "integers" else ("",)


def _check_columns(request: FitRequest, columns: Columns) -> None:
    """Refuse options that cannot go with these columns."""
    if request.configuration == "paper" and len(columns.targets) > 1:
        raise InputError(
            "--paper is for one target, as the papers are. Leave it out, or name one column with --target."
        )
    if request.covariance is not None and columns.categorical:
        raise InputError("--covariance is for tables of numbers; leave it or --categorical out.")
    if request.scale is not None and undecided(columns):
        raise InputError(
            f"--scale needs all features to be known: list the values of {undecided(columns)[0]!r} with --categories, "
            "or leave --scale out."
        )


def _source(
    request: FitRequest, by_value: Sequence[str], lists: Mapping[str, Categories], classes: Categories | None
) -> TableSource:
    """Return the table. A column whose values are not declared has a list that stands for the one to come.

    Args:
        request: what was asked for.
        by_value: columns with a feature for each value.
        lists: of values, as far as they are declared.
        classes: of labels.
    """
    from privrep.data.files import find_format, read_schema, require_column
    from privrep.data.missing import IMPUTE, Missing
    from privrep.data.readers import BATCH_BYTES, TableSource

    table, listed = request.table, dict[str, Any]()
    found: Any = read_schema(table, request.user, BATCH_BYTES // 4, request.dialect) if by_value else None
    for name in by_value:
        require_column(name, "--categorical" if request.item is None else "--item", table, found.names)
        if name in listed:
            raise InputError(f"--categorical names column {name!r} more than once; name it once.")
        whole = find_format(table) == "parquet" and _holds_integers(found.field(name).type)
        listed[name] = lists.get(name) or ((0,) if whole else ("",))
    numeric = request.features if request.item is None else ()
    how: Any = {"numeric": request.numeric, "dialect": request.dialect, "weight": request.weight}
    how |= {"items": request.item is not None}
    as_text = request.user_as_text
    source = TableSource(table, request.user, request.targets, numeric, as_text, listed or None, classes, **how)
    policy = Missing(request.missing, indicator_places(source.numeric_names, request.missing_indicator))
    return source if policy == IMPUTE else replace(source, missing=policy)


def indicator_places(numbers: Sequence[str], named: Sequence[str]) -> tuple[int, ...]:
    """Return the positions of columns among those of numbers."""
    for name in named:
        if name not in numbers:
            raise InputError(f"--missing-indicator: {name!r} is no feature of numbers; name one of those.")
        if named.count(name) > 1:
            raise InputError(f"--missing-indicator names column {name!r} more than once; name it once.")
    return tuple(numbers.index(name) for name in named)


def _holds_integers(kind: Any) -> bool:
    import pyarrow as pa

    inner = kind.value_type if isinstance(kind, pa.DictionaryType) else kind
    return bool(pa.types.is_integer(inner) or pa.types.is_floating(inner))  # which whole numbers with gaps are


def _columns(source: TableSource, lists: Mapping[str, Categories], classes: Categories | None) -> Columns:
    """Return the columns as they were asked for: no list of values where none was declared."""
    from privrep.models.description import Columns

    names = tuple(source.categories or ())
    declared = tuple(lists.get(name, ()) for name in names)
    known = classes if classes is not None and len(classes) > 1 else ()
    rows: Any = {"missing": source.missing.how, "indicators": source.missing.indicators, "weight": source.weight or ""}
    return Columns(source.user, source.targets, source.numeric_names, names, declared, known, **rows)
