"""Standard input and output as files: `-` in place of a path.

What comes on standard input is kept in a private temporary file, since tables are read more than once. What goes to
standard output is written to one first, so that a command that fails prints nothing.
"""

from __future__ import annotations

import os
import shutil
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from privrep.cli.console import call
from privrep.errors import PrivrepError
from privrep.schema.standard import STANDARD, name_of

SUFFIXES = {b"PAR1": ".parquet", b"\x1f\x8b": ".csv.gz", b"PK\x03\x04": ".npz"}  # by the first bytes; others: .csv


def shown_output(path: Path) -> str:
    """Return what sentences call a file that is written."""
    return "standard output" if path == STANDARD else str(path)


@contextmanager
def readable(path: Path, workdir: Path | None = None) -> Iterator[Path]:
    """Yield the path of a file; of standard input, a private copy for as long as it is needed.

    Args:
        path: of a file, or `-`.
        workdir: where the copy goes; the system's folder for temporary files if left out.
    """
    if path != STANDARD:
        yield path
        return
    with tempfile.TemporaryDirectory(prefix="privrep-", dir=workdir) as scratch:
        copy = _keep_input(Path(scratch))
        call(copy, name_of(STANDARD))
        try:
            yield copy
        except PrivrepError as error:
            raise type(error)(str(error).replace(str(copy), name_of(STANDARD))) from None


def _keep_input(folder: Path) -> Path:
    """Return a file with all of standard input, named after what it holds."""
    source, plain = sys.stdin.buffer, folder / "rows"
    with open(plain, "xb") as file:
        shutil.copyfileobj(source, file)
    with open(plain, "rb") as file:
        first = file.read(4)
    suffix = next((suffix for mark, suffix in SUFFIXES.items() if first.startswith(mark)), ".csv")
    return plain.rename(folder / f"rows{suffix}")


@contextmanager
def new_file(path: Path) -> Iterator[Path]:
    """Yield a path to write to, readable by its owner only, that becomes the file when all went well.

    Args:
        path: of the file, or `-`: then what was written is printed.
    """
    if path == STANDARD:
        with tempfile.TemporaryDirectory(prefix="privrep-") as scratch:
            whole = Path(scratch, "written")
            yield whole
            sys.stdout.flush()
            with open(whole, "rb") as file:
                shutil.copyfileobj(file, sys.stdout.buffer)
            sys.stdout.buffer.flush()
        return
    temporary = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    try:
        os.close(os.open(temporary, os.O_CREAT | os.O_EXCL | os.O_WRONLY, 0o600))
        yield temporary
        os.replace(temporary, path)
    except BaseException:
        temporary.unlink(missing_ok=True)
        raise
