"""What `privrep fit` does once it knows what was asked for: read the table, learn, make heads, write the folder."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import typer

from privrep.cli.console import note, progress
from privrep.cli.folders import make_room
from privrep.errors import InputError

if TYPE_CHECKING:
    from privrep.data.readers import TableSource
    from privrep.models.description import Columns, Config
    from privrep.models.model import Model
    from privrep.users.holders import KeyHolders
    from privrep.users.streaming import StreamingUsers


def undecided(columns: Columns) -> list[str]:
    """The columns of features whose lists of values are to be selected privately."""
    return [name for name, listed in columns.by_category.items() if not listed]


def learn_table(
    source: TableSource, config: Config, columns: Columns, out: Path, workdir: Path | None, overwrite: bool
) -> Model:
    """The representation, then the heads, all of it written to the folder `out`."""
    from privrep.heads.fitting import fit_heads
    from privrep.models import model as models
    from privrep.models.learning import PAGES, PendingColumns, learn
    from privrep.users.performance import Performance
    from privrep.users.streaming import StreamingUsers

    with stoppable(out):
        with progress(out) as bar, ExitStack() as files:
            bar.begin("reading", PAGES)
            opened: list[StreamingUsers] = []

            def make(known: Columns) -> StreamingUsers:
                lists: Any = {"categories": known.by_category or None, "classes": known.classes or None}
                listed = replace(source, features=known.features, **lists)
                _check_rank(config, len(listed.feature_names))
                opened.append(files.enter_context(StreamingUsers.open(listed, Performance(workdir=workdir))))
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
            make_room(out, config, columns, overwrite)
            fitted = learn(users, config, folder=out, columns=columns, on_page=bar.page)
            blocks = bar.heads(opened[0].blocks(), count)
            net = config.safety_net
            heads = fit_heads(
                blocks, fitted.representation, intercept=config.intercept, safety_net=net, loss=fitted.loss
            )
        fitted = models.with_heads(fitted, heads)
        models.finish(fitted, out)
    return fitted


def _holders(source: TableSource, names: list[str], workdir: Path | None) -> tuple[dict[str, KeyHolders], int]:
    """Who holds which value of these columns, and how many users there are.

    Selecting values costs, so whatever is wrong with the table is found before: every value in it is looked at.
    """
    import pyarrow.compute as pc

    from privrep.data.readers import checked_batches, read_columns
    from privrep.users.holders import KeyHolders

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
def stoppable(out: Path) -> Iterator[None]:
    """Ctrl-C ends with a word on how to go on."""
    try:
        yield
    except KeyboardInterrupt:
        kept = f"{out} keeps what was done: run the same command to continue; nothing is spent twice."
        after = kept if (out / "run.json").is_file() else "nothing was written."
        print(f"privrep: stopped; {after}", file=sys.stderr)
        raise typer.Exit(130) from None
