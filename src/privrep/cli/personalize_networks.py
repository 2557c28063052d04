"""`privrep personalize` for models that take images: networks, and numbers of public features."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

from privrep.cli.console import note, say
from privrep.cli.image_rows import (
    RowOptions,
    Wanted,
    is_table,
    no_target,
    open_flat_table,
    read_rows,
    refuse_options,
)
from privrep.cli.networks import Network, Numbers, open_model
from privrep.cli.tables import as_id, check_place, say_joined
from privrep.errors import InputError

if TYPE_CHECKING:
    from privrep.data.table import UserTable


def personalize_images(
    folder: Path, path: Path, how: RowOptions, out: Path | None, *, again: bool, overwrite: bool
) -> None:
    """Make heads for users of a network, or of numbers on public features, who were not in the fit.

    Args:
        folder: of the model.
        path: of rows with their targets.
        how: how rows are read.
        out: of a network, the folder of one user's own; without it heads join those in FOLDER/private.
        again: whether users who have a head get a new one.
        overwrite: whether `out` may stand already.
    """
    refuse_options(folder, {"--item": how.item}, "ratings")
    refuse_options(folder, {"--weight": how.weight}, "models of tables")
    if out is not None:
        check_place(out, folder)
    model = open_model(folder)
    if isinstance(model, Numbers):
        return _join_numbers(model, path, how, out, again)
    if model.personal is not None:
        raise InputError(f"{folder} is the network of one user; personalize the model that it was made from.")
    table = _labelled_table(model.wanted, path, how)
    _check_labels(table, path, folder)
    if out is not None:
        return _save_one(model, table, path, out, overwrite)
    from privrep.estimators.network_heads import join_heads

    joined = join_heads(model.model, table, folder, path=path, shown=folder, again=again)
    say_joined(joined.came, joined.replaced, joined.in_all, folder)
    return None


def _labelled_table(wanted: Wanted, path: Path, how: RowOptions) -> UserTable:
    """Return the rows of a file by user, as they are, and their class numbers or targets."""
    import numpy as np

    from privrep.data.readers import read_table
    from privrep.data.table import UserTable
    from privrep.neural.features import rows_of

    if is_table(path, how):
        if how.target is None:
            raise no_target(wanted.folder)
        if how.user_id is not None:
            from privrep.cli.personalize import with_user_column

            with with_user_column(path, how.user or "user", as_id(how.user_id, wanted.text_ids), how.dialect) as copy:
                table = read_table(open_flat_table(copy, wanted, replace(how, user=how.user or "user"), how.target))
        else:
            table = read_table(open_flat_table(path, wanted, how, how.target))
        return replace(table, X=rows_of(table.X), y=table.y.astype(np.float64))
    found = read_rows(path, wanted, how, labelled=True)
    users = found.users
    if how.user_id is not None:
        if users is not None:
            raise InputError(f"{path} names users; leave --user-id out.")
        users = np.full(
            len(found.X), as_id(how.user_id, wanted.text_ids), dtype=object if wanted.text_ids else np.int64
        )
    if users is None:
        raise InputError(f"{path} names no users; pass --user-id, if all rows are one user's.")
    return UserTable.from_rows(found.X, found.y, users)


def _check_labels(table: UserTable, path: Path, folder: Path) -> None:
    """Say how many rows have a label that is no class; raise InputError if all have."""
    unknown = int((table.y < 0).sum())
    if unknown == len(table.y):
        raise InputError(f"no row of {path} has a class of {folder} for a label; write labels as they were in the fit.")
    if unknown:
        said = "rows have a label that is none of the classes, and count for nothing"
        note(f"{unknown:,} {said} (not private: for your eyes).")


def _save_one(model: Network, table: UserTable, path: Path, out: Path, overwrite: bool) -> None:
    """Write the network of the only user of a table into a folder of its own."""
    from privrep.neural.features import check_finite

    if table.n_users != 1:
        raise InputError(
            f"--out holds the network of one user, and {path} has rows of {table.n_users:,}; leave --out out, or give "
            "one user's rows."
        )
    check_finite(table.X, path, table.ids.repeat(table.sizes))
    labels = [model.model.classes_[int(code)] if code >= 0 else None for code in table.y]
    model.model.personalize(table.X, labels).save(out, overwrite=overwrite)
    how = f"privrep predict {out} TABLE --user COLUMN --out FILE"
    say(f"1 network: {out} (its private/ is readable by you alone; predict with: {how})", network=out)


def _join_numbers(model: Numbers, path: Path, how: RowOptions, out: Path | None, again: bool) -> None:
    from privrep.cli.personalize import keep_heads
    from privrep.models.newcomers import make_heads
    from privrep.neural.features import check_finite

    if out is not None:
        raise InputError(
            "--out is for networks of classes; heads of a CentaurRegressor join those of the model folder."
        )
    fitted, table = model.fitted, _labelled_table(model.wanted, path, how)
    check_finite(table.X, path, table.ids.repeat(table.sizes))
    new = make_heads(fitted, replace(table, X=model.features(table.X)).blocks())
    keep_heads(fitted, new, model.folder, path, again)
