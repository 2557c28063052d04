"""The folder that `privrep fit` writes to: what stands there, and whether this fit may continue or replace it."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

from privrep.cli.console import note
from privrep.errors import InputError, ResumeError

if TYPE_CHECKING:
    from privrep.models.description import Columns, Config
    from privrep.models.words import TableFacts


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
    """What is in the folder `out`; an error if this fit can neither continue nor replace it."""
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


def _same_run(found: TableFacts, config: Config, columns: Columns) -> bool:
    return not found.finished and (found.config, found.columns) == (config, columns)


def make_room(out: Path, config: Config, columns: Columns, overwrite: bool) -> None:
    """Say that a run is continued, or remove what --overwrite replaces: a model, or a run with other settings."""
    found = standing(out, config, columns, overwrite)
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
