"""The work of `privrep fit` once it knows what was asked for: read the table, learn, make heads, write the folder.

First comes the folder: what stands there, and whether this fit may continue or replace it. Then the fit, and what
`privrep fit` says it did.
"""

from __future__ import annotations

import shutil
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from privrep.cli.config import note_weakness
from privrep.cli.console import note, progress, say, shout, tell, tell_privacy
from privrep.cli.ending import stoppable
from privrep.errors import InputError, ResumeError
from privrep.linear.registry import DEFAULT

if TYPE_CHECKING:
    from privrep.data.readers import TableSource
    from privrep.heads.heads import Heads
    from privrep.models.description import Columns, Config
    from privrep.models.model import Model
    from privrep.models.words import TableFacts
    from privrep.privacy.ledger import Budget
    from privrep.privacy.population import Account
    from privrep.users.holders import KeyHolders
    from privrep.users.streaming import StreamingUsers

_NOT_PRIVATE = "(not private: for your eyes)"


def check_out(out: Path, overwrite: bool) -> None:
    """Refuse a folder that cannot be the model's, before anything is read."""
    from privrep.models.folder import ModelFolder

    folder = ModelFolder(out)
    if not out.exists():
        return
    if not out.is_dir():
        raise InputError(f"--out: {out} is a file; name a folder.")
    if folder.finished:
        if not overwrite:
            raise InputError(f"--out: {out} holds a finished model; choose another folder, or pass --overwrite.")
    elif not folder.begun and not folder.empty:
        raise InputError(f"--out: {out} is not empty and holds no run of privrep; choose another folder.")


def standing(out: Path, config: Config, columns: Columns, overwrite: bool) -> TableFacts | None:
    """Return what is in a folder, or raise an error if this fit can neither continue nor replace it.

    Args:
        out: the folder.
        config: the settings of the fit.
        columns: as they were asked for.
        overwrite: whether a model or another run is replaced.
    """
    from privrep.models.folder import ModelFolder
    from privrep.models.inspection import read_table_facts

    check_out(out, overwrite)
    if ModelFolder(out).empty:
        return None
    found = read_table_facts(out)
    if not (found.finished or overwrite or _same_run(found, config, columns)):
        raise ResumeError(
            f"{out} holds a run with other settings or columns; continue it with the same options, choose another "
            "--out, or pass --overwrite to drop it."
        )
    return found


def find_begun(out: Path, config: Config, columns: Columns, overwrite: bool) -> Path | None:
    """Return the folder if this fit goes on with the run in it; arguments and errors as of `standing`."""
    found = standing(out, config, columns, overwrite)
    return out if found is not None and _same_run(found, config, columns) else None


def make_budget(config: Config) -> Budget:
    """Return the budget of a fit."""
    from privrep.privacy.ledger import Budget

    return Budget(config.epsilon, config.delta, config.relation)


def _same_run(found: TableFacts, config: Config, columns: Columns) -> bool:
    return not found.finished and (found.config, found.columns) == (config, columns)


def make_room(out: Path, config: Config, columns: Columns, overwrite: bool) -> str:
    """Remove what --overwrite replaces: a model, or a run with other settings.

    Args:
        out: the folder.
        config: the settings of the fit.
        columns: as they were asked for.
        overwrite: whether a model or another run is replaced.

    Returns:
        What to say once a run that stands is continued; empty if there is none.
    """
    found = standing(out, config, columns, overwrite)
    if found is None:
        return ""
    spent = f"epsilon {found.privacy.epsilon:.4g} at delta {found.privacy.delta:g}"
    if _same_run(found, config, columns):
        return f"Continuing the run in {out}; {spent} was spent before."
    with _sole_owner(out / "ledger.jsonl"):
        shutil.rmtree(out)
    note(f"Replaced {out}. It had spent {spent}: for users who are in both, the two fits add up.")
    return ""


def noting_first(sentence: str, on_page: Callable[..., None]) -> Callable[..., None]:
    """Return `on_page`, which says a sentence before its first page: by then the run has its folder to itself."""
    waiting = [sentence] if sentence else []

    def told(*page: Any) -> None:
        if waiting:
            note(waiting.pop())
        on_page(*page)

    return told


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


def undecided(columns: Columns) -> list[str]:
    """Return the columns of features whose lists of values are to be selected privately."""
    return [name for name, listed in columns.by_category.items() if not listed]


def learn_table(
    source: TableSource,
    config: Config,
    columns: Columns,
    out: Path,
    workdir: Path | None,
    overwrite: bool,
    account: Account | None = None,
) -> Model:
    """Learn the representation, then the heads, and write all of it to a folder.

    Args:
        source: the table.
        config: the settings of the fit.
        columns: as they were asked for.
        out: the folder.
        workdir: where temporary files go.
        overwrite: whether a model or another run in the folder is replaced.
        account: with the population ledger that the budget is reserved from; None: with none.
    """
    from privrep.heads.fitting import fit_heads
    from privrep.models import model as models
    from privrep.models.learning import PAGES, PendingColumns, learn
    from privrep.users.performance import Performance
    from privrep.users.streaming import StreamingUsers

    with stoppable(lambda: how_to_go_on(out)):
        with progress(out) as bar, ExitStack() as files:
            bar.begin("reading", PAGES)
            opened: list[StreamingUsers] = []

            def make(known: Columns) -> StreamingUsers:
                lists: Any = {
                    "categories": (known.by_category if config.ratings else known.named) or None,
                    "classes": known.classes or None,
                    "dense": config.dense,
                    "items": config.ratings,
                }
                listed = replace(source, features=known.features, **lists)
                _check_rank(config, len(listed.feature_names))
                opened.append(files.enter_context(StreamingUsers.open(listed, Performance(workdir=workdir))))
                for said in opened[-1].missing.words():
                    note(f"{said[:1].upper()}{said[1:]} {_NOT_PRIVATE}.")
                return opened[-1]

            users: StreamingUsers | PendingColumns
            to_select = [*undecided(columns), *(source.targets if config.loss and not columns.classes else ())]
            if to_select:
                holders, count = _holders(source, to_select, workdir)
                labels = holders.pop(source.targets[0], None)
                users = PendingColumns(holders, make, labels)
            else:
                users = make(columns)
                count = users.facts.users
            _check_count(source, config, count)
            if account is not None:  # before anything is replaced
                begun = find_begun(out, config, columns, overwrite)
                ledger = None if begun is None else begun / "ledger.jsonl"
                account.check(make_budget(config), ledger, seeded=config.seed is not None)
            on_page = noting_first(make_room(out, config, columns, overwrite), bar.page)
            fitted = learn(users, config, folder=out, columns=columns, on_page=on_page, account=account)
            blocks = bar.heads(opened[0].blocks(), count)
            heads = fit_heads(
                blocks,
                fitted.representation,
                intercept=config.intercept,
                safety_net=config.safety_net,
                loss=fitted.loss,
                keep_means=opened[0].means_to_keep,
            )
        fitted = models.with_heads(fitted, heads)
        models.finish(fitted, out)
    return fitted


def _holders(source: TableSource, names: list[str], workdir: Path | None) -> tuple[dict[str, KeyHolders], int]:
    """Return who holds which value of these columns, and how many users there are.

    Selecting values costs, so whatever is wrong with the table is found before: every value in it is looked at.
    """
    import pyarrow.compute as pc

    from privrep.data.readers import read_checked_batches, read_columns
    from privrep.users.holders import KeyHolders

    if workdir is not None and not workdir.is_dir():
        raise InputError(f"workdir: there is no folder {workdir}; make it or name another.")
    for _ in read_checked_batches(source):
        pass
    rows = read_columns(source.path, [source.user, *names], source.user_as_text, source.dialect)
    users, columns = rows[source.user], {name: rows[name] for name in names}
    holders = {name: KeyHolders.from_columns(users, column) for name, column in columns.items()}
    return holders, int(pc.count_distinct(users).as_py())


def _check_rank(config: Config, features: int) -> None:
    """Raise InputError if --rank is above the number of features that could be named; ratings have no such limit."""
    if config.rank is not None and config.rank > features and not config.ratings:
        raise InputError(
            f"--rank must be at most the number of features that could be named, "
            f"{features:,}. Got {config.rank} instead. What was spent on finding out is spent."
        )


def _check_count(source: TableSource, config: Config, count: int) -> None:
    """Refuse more users than one fit takes, and remark on a budget that promises them little."""
    from privrep.privacy.bounds import MAX_USERS

    if count > MAX_USERS:
        raise InputError(f"{source.path} has {count:,} users; one fit takes at most {MAX_USERS:,}.")
    note_weakness(config.epsilon, config.delta, config.relation, count)


def how_to_go_on(out: Path) -> str:
    """Return what a fit that was stopped leaves, and how to continue it."""
    if not (out / "run.json").is_file():
        return "nothing was written."
    return f"{out} keeps what was done: run the same command to continue; nothing is spent twice."


def summarise(fitted: Model, out: Path, asked: Columns) -> None:
    """Say what a fit did, what was learned, and what may be published.

    Args:
        fitted: the model.
        out: its folder.
        asked: the columns as they were asked for.
    """
    from privrep.models.gains import describe_gains, judge_nothing
    from privrep.models.promise import describe_rest

    report, learned = fitted.privacy, fitted.representation
    assert fitted.heads is not None
    _tell_model(fitted, fitted.heads, asked)
    say(f"Model: {out}", model=out)
    say(
        f"Privacy: epsilon {report.epsilon:.4g} of {report.epsilon_budget:g} spent, delta {report.delta:g}, "
        f"{report.unit} level, {report.relation}"
    )
    if rest := describe_rest(report):
        say(rest)
    for line in _contents(fitted, fitted.heads, asked):
        say(line)
    if nothing := judge_nothing(learned):
        shout(f"NOTHING WAS LEARNED: {nothing}.", nothing_learned=nothing)
    elif learned.gains is not None:
        say(describe_gains(learned), gains=describe_gains(learned))
    if report.seeded:
        shout("SEEDED NOISE: this is a simulation and NOT PRIVATE. Do not publish it.")
    else:
        say(f"All of {out} but {out / 'private'} may be published; the heads in there belong to their users.")
    say(f"Predict with: privrep predict {out} TABLE --out FILE     What it means: privrep inspect {out}")


def _tell_model(fitted: Model, heads: Heads, asked: Columns) -> None:
    """Add what is in the model to what --json prints; what was computed on users' data is not private."""
    c, (features, rank) = fitted.config, fitted.representation.basis.shape
    tell_privacy(fitted.privacy)
    tell(unspent=fitted.privacy.unspent, method=c.method, configuration=c.configuration, rank=rank)
    tell(**{"items" if c.ratings else "features": features, "targets": fitted.columns.targets})
    users = {"users": len(heads.ids)}
    tell(**users if c.relation == "replace-one-user" else {"not_private": users})
    if c.loss is not None:
        tell(classes=fitted.columns.classes, classes_selected=fitted.classes_selected)
    for name, listed in fitted.columns.by_category.items():
        tell(values={name: {"named": len(listed), "declared": bool(asked.by_category[name])}})


def _contents(fitted: Model, heads: Heads, asked: Columns) -> Iterator[str]:
    """Yield what is in the model, a line each.

    Args:
        fitted: the model.
        heads: of its users.
        asked: the columns as they were asked for.
    """
    from privrep.models.gains import FAMILIES, find_family
    from privrep.models.sections import say_classes

    c, (features, rank) = fitted.config, fitted.representation.basis.shape
    label = "" if c.relation == "replace-one-user" else f" {_NOT_PRIVATE}"  # else their number is no public fact
    if c.ratings:
        yield f"{len(heads.ids):,} users{label}, {features:,} items, rank {rank}"
    else:
        yield f"Users: {len(heads.ids):,}{label}; rank {rank} of {features:,} features"
    if (c.method, c.configuration) != (DEFAULT, "default"):
        yield f"Method: {c.method}{', as its paper has it' if c.configuration == 'paper' else ''}"
    if c.loss is not None:
        how = "selected privately" if fitted.classes_selected else "declared"
        yield f"Classes: {say_classes(fitted.columns.classes)}, {how}; other labels are ignored"
    elif heads.targets > 1:
        yield f"Targets: {', '.join(fitted.columns.targets)}; a head for each"
    for name, listed in fitted.columns.by_category.items():
        how = "declared" if asked.by_category[name] else "selected privately"
        other = (
            "other items are predicted with a user's level" if c.ratings else "rows with others have no such feature"
        )
        other = other if listed or c.ratings else "no value is held by enough users, so the column is left out"
        yield f"Values of {name}: {len(listed):,} named ({how}); {other}"
    prior = fitted.representation.prior
    if prior is not None:
        level = ", and a level of each user's own" if prior.mean.intercept else ""
        yield f"Heads: {FAMILIES[find_family(fitted.representation, prior)]}{level}"
    elif not c.ratings:
        yield _kinds(heads, c.loss is not None)


def _kinds(heads: Heads, labels: bool) -> str:
    """Return how many users use which kind of head. Computed on users' data: for the owner's eyes."""
    kinds = heads.kind[:: heads.targets] if labels else heads.kind  # a classifier's outputs are all of one kind
    counts = [int((kinds == kind).sum()) for kind in range(3)]
    own = "classifier" if labels else "regression"
    return (
        f"Heads: {counts[0]:,} on the shared representation, {counts[1]:,} a {own} of their own, {counts[2]:,} a "
        f"constant {_NOT_PRIVATE}"
    )
