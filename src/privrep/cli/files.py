"""Files that commands write: for their owner alone, whole or not at all."""

from __future__ import annotations

import gzip
import os
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import IO, Any

from privrep.errors import InputError


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
