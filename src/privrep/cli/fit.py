"""`privrep fit`."""

from __future__ import annotations

import shutil
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import typer

from privrep.cli import options
from privrep.cli.declared import read_categories, read_covariance, read_items, read_scale
from privrep.cli.shared import TablePath, check_relation, note, progress, say, shout, split_names
from privrep.errors import InputError, ResumeError

if TYPE_CHECKING:
    from privrep.data.categories import Listed
    from privrep.data.readers import TableSource
    from privrep.engines.keys import KeyHolders
    from privrep.engines.streaming import StreamingUsers
    from privrep.heads import Heads
    from privrep.model import Columns, Config, Model
    from privrep.report.words import Inspection

_NOT_PRIVATE = "(not private: for your eyes)"
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
    from privrep.model import Config

    _check_out(out, overwrite)
    numbers = {"--features": features, "--categorical": categorical, "--categories": categories}
    ways = {"--method": method, "--paper": paper, "--start": start, "--scale": scale, "--covariance": covariance}
    heads = {"--no-intercept": no_intercept, "--no-safety-net": no_safety_net}
    _check_item(item, items, target, {**numbers, **ways, **heads})
    by_value = split_names(categorical) or [] if item is None else [item]
    lists = read_categories(categories, by_value) if item is None else read_items(items, item)
    source = _source(table, user, target, split_names(features), by_value, lists, user_as_text, item)
    columns = _columns(source, lists)
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
    )
    config.check(_ANY if _undecided(columns) else len(source.feature_names))
    if features is None and item is None:
        _list_left_out(source)
    _standing(out, config, columns, overwrite)
    _summarise(_learn(source, config, columns, out, workdir, overwrite), out, columns)


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


def _check_columns(columns: Columns, scale: Path | None, covariance: Path | None, paper: bool) -> None:
    """Refuse options that cannot go with these columns."""
    if paper and len(columns.targets) > 1:
        raise InputError(
            "--paper is for one target, as the papers are. Leave it out, or name one column with --target."
        )
    if covariance is not None and columns.categorical:
        raise InputError("--covariance is for tables of numbers; leave it or --categorical out.")
    if scale is not None and _undecided(columns):
        raise InputError(
            f"--scale needs all features to be known: list the values of {_undecided(columns)[0]!r} with --categories, "
            "or leave --scale out."
        )


def _source(
    table: Path,
    user: str,
    target: str,
    features: list[str] | None,
    by_value: Sequence[str],
    lists: Mapping[str, Listed],
    user_as_text: bool,
    item: str | None,
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
    return TableSource(table, user, split_names(target), numeric, user_as_text, listed or None)


def _holds_integers(kind: Any) -> bool:
    import pyarrow as pa

    return bool(pa.types.is_integer(kind.value_type if isinstance(kind, pa.DictionaryType) else kind))


def _columns(source: TableSource, lists: Mapping[str, Listed]) -> Columns:
    """The columns as they were asked for: no list of values where none was declared."""
    from privrep.model import Columns

    names = tuple(source.categories or ())
    declared = tuple(lists.get(name, ()) for name in names)
    return Columns(source.user, source.targets, source.numeric_names, names, declared)


def _undecided(columns: Columns) -> list[str]:
    """The columns whose lists of values are to be selected privately."""
    return [name for name, listed in columns.by_category.items() if not listed]


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


# Learning


def _learn(
    source: TableSource, config: Config, columns: Columns, out: Path, workdir: Path | None, overwrite: bool
) -> Model:
    """The representation, then the heads, all of it written to the folder `out`."""
    from privrep import model as models
    from privrep.engines.streaming import StreamingUsers
    from privrep.heads import fit_heads

    with _stoppable(out):
        with progress(out) as bar, ExitStack() as files:
            opened: list[StreamingUsers] = []

            def make(known: Columns) -> StreamingUsers:
                categories: Any = known.by_category or None
                listed = replace(source, features=known.features, categories=categories)
                _check_rank(config, len(listed.feature_names))
                opened.append(files.enter_context(StreamingUsers.open(listed, workdir)))
                return opened[-1]

            users: StreamingUsers | models.Undecided
            if _undecided(columns):
                holders, count = _holders(source, _undecided(columns), workdir)
                users = models.Undecided(holders, make)
            else:
                users = make(columns)
                count = users.count
            _check_count(source, config, count)
            _make_room(out, config, columns, overwrite)
            fitted = models.learn(users, config, folder=out, columns=columns, on_page=bar.page)
            blocks = bar.heads(opened[0].blocks(), count)
            heads = fit_heads(blocks, fitted.representation, intercept=config.intercept, safety_net=config.safety_net)
        fitted = models.with_heads(fitted, heads)
        models.finish(fitted, out)
    return fitted


def _holders(source: TableSource, names: list[str], workdir: Path | None) -> tuple[dict[str, KeyHolders], int]:
    """Who holds which value of these columns, and how many users there are.

    Selecting values costs, so whatever is wrong with the table is found before: every value in it is looked at.
    """
    import pyarrow.compute as pc

    from privrep.data.readers import checked_batches, read_columns
    from privrep.engines.keys import KeyHolders

    if workdir is not None and not workdir.is_dir():
        raise InputError(f"workdir: there is no folder {workdir}; make it or name another.")
    for _ in checked_batches(source):
        pass
    rows = read_columns(source.path, [source.user, *names], source.user_as_text)
    users, columns = rows[source.user], {name: rows[name] for name in names}
    if source.format == "csv":  # an empty cell is a missing value, not a category
        columns = {name: pc.if_else(pc.equal(column, ""), None, column) for name, column in columns.items()}
    holders = {name: KeyHolders.from_columns(users, column) for name, column in columns.items()}
    return holders, int(pc.count_distinct(users).as_py())


def _check_rank(config: Config, features: int) -> None:
    if config.rank is not None and config.rank > features:
        raise InputError(
            f"--rank must be at most the number of {'items' if config.ratings else 'features'} that could be named, "
            f"{features:,}. Got {config.rank} instead. What was spent on finding out is spent."
        )


def _check_count(source: TableSource, config: Config, count: int) -> None:
    from privrep.privacy.bounds import MAX_USERS

    if count > MAX_USERS:
        raise InputError(f"{source.path} has {count:,} users; one fit takes at most {MAX_USERS:,}.")
    if config.relation == "replace-one-user" and config.delta * count >= 1:
        note(f"delta {config.delta:g} is a weak promise to {count:,} users: keep it far below 1 in them.")


@contextmanager
def _stoppable(out: Path) -> Iterator[None]:
    """Ctrl-C ends with a word on how to go on."""
    try:
        yield
    except KeyboardInterrupt:
        kept = f"{out} keeps what was done: run the same command to continue; nothing is spent twice."
        after = kept if (out / "run.json").is_file() else "nothing was written."
        print(f"privrep: stopped; {after}", file=sys.stderr)
        raise typer.Exit(130) from None


def _check_out(out: Path, overwrite: bool) -> None:
    """Refuse a folder that cannot be the model's, before anything is read."""
    if not out.exists():
        return
    if not out.is_dir():
        raise InputError(f"--out: {out} is a file; name a folder.")
    if (out / "model.json").is_file():
        if not overwrite:
            raise InputError(f"--out: {out} holds a finished model; choose another folder, or pass --overwrite.")
    elif not (out / "run.json").is_file() and any(out.iterdir()):
        raise InputError(f"--out: {out} is not empty and holds no run of privrep; choose another folder.")


def _standing(out: Path, config: Config, columns: Columns, overwrite: bool) -> Inspection | None:
    """What is in the folder `out`; an error if this fit can neither continue nor replace it."""
    from privrep.report.words import inspect_folder

    _check_out(out, overwrite)
    if not out.exists() or not any(out.iterdir()):
        return None
    found = inspect_folder(out)
    if not (found.finished or overwrite or _same_run(found, config, columns)):
        raise ResumeError(
            f"{out} holds a run with other settings or columns; continue it with the same options, choose another "
            "--out, or pass --overwrite to drop it."
        )
    return found


def _same_run(found: Inspection, config: Config, columns: Columns) -> bool:
    return not found.finished and (found.config, found.columns) == (config, columns)


def _make_room(out: Path, config: Config, columns: Columns, overwrite: bool) -> None:
    """Say that a run is continued, or remove what --overwrite replaces: a model, or a run with other settings."""
    found = _standing(out, config, columns, overwrite)
    if found is None:
        return
    spent = f"epsilon {found.privacy.epsilon:.4g} at delta {found.privacy.delta:g}"
    if _same_run(found, config, columns):
        note(f"Continuing the run in {out}; {spent} was spent before.")
        return
    with _sole_owner(out / "ledger.jsonl"):
        shutil.rmtree(out)
    note(f"Replaced {out}. It had spent {spent}: for users who are in both, the two fits add up.")


@contextmanager
def _sole_owner(ledger: Path) -> Iterator[None]:
    """Refuse to touch a run that another process is working on."""
    import fcntl

    if not ledger.is_file():
        yield
        return
    with open(ledger, "rb") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            raise InputError(
                f"{ledger.parent} is in use by another process; wait for it, or choose another --out."
            ) from None
        yield


# What was done


def _summarise(fitted: Model, out: Path, asked: Columns) -> None:
    report = fitted.privacy
    assert fitted.heads is not None
    say(f"Model: {out}")
    say(
        f"Privacy: epsilon {report.epsilon:.4g} of {report.epsilon_budget:g} spent, delta {report.delta:g}, "
        f"user level, {report.relation}"
    )
    for line in _contents(fitted, fitted.heads, asked):
        say(line)
    if fitted.representation.mostly_noise:
        what = "NO FACTORS WERE" if fitted.config.ratings else "NOTHING WAS"
        shout(f"{what} LEARNED: the representation is mostly noise. It takes more users or a larger epsilon.")
    if report.seeded:
        shout("SEEDED NOISE: this is a simulation and NOT PRIVATE. Do not publish it.")
    else:
        say(f"All of {out} but {out / 'private'} may be published; the heads in there belong to their users.")
    say(f"Predict with: privrep predict {out} TABLE --out FILE     What it means: privrep inspect {out}")


def _contents(fitted: Model, heads: Heads, asked: Columns) -> Iterator[str]:
    """What is in the model, a line each."""
    c, (features, rank) = fitted.config, fitted.representation.basis.shape
    label = "" if c.relation == "replace-one-user" else f" {_NOT_PRIVATE}"  # else their number is no public fact
    if c.ratings:
        yield f"{len(heads.ids):,} users{label}, {features:,} items, rank {rank}"
    else:
        yield f"Users: {len(heads.ids):,}{label}; rank {rank} of {features:,} features"
    if (c.method, c.configuration) != ("private-fedrep", "default"):
        yield f"Method: {c.method}{', as its paper has it' if c.configuration == 'paper' else ''}"
    if heads.targets > 1:
        yield f"Targets: {', '.join(fitted.columns.targets)}; a head for each"
    for name, listed in fitted.columns.by_category.items():
        how = "declared" if asked.by_category[name] else "selected privately"
        other = "other items are predicted with a user's mean" if c.ratings else "rows with others have no such feature"
        yield f"Values of {name}: {len(listed):,} named ({how}); {other}"
    if not c.ratings:
        yield _kinds(heads)


def _kinds(heads: Heads) -> str:
    """How many users use which kind of head. Computed on users' data: for the owner's eyes."""
    counts = [int((heads.kind == kind).sum()) for kind in range(3)]
    return (
        f"Heads: {counts[0]:,} on the shared representation, {counts[1]:,} a regression of their own, {counts[2]:,} a "
        f"constant {_NOT_PRIVATE}"
    )
