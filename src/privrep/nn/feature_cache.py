"""Features that are computed once and kept in a folder of their owner's.

A file holds whatever the numbers tell of the rows: it is as private as they are. Nothing here removes one.
"""

from __future__ import annotations

import os
import stat
from collections.abc import Callable
from pathlib import Path

import numpy as np

from privrep.boundary import refusing
from privrep.errors import InputError
from privrep.typing import Singles


def load_or_compute(path: str | os.PathLike[str], of: str, make: Callable[[], Singles]) -> Singles:
    """Return what `make` returns, kept in a NumPy archive that its owner alone can read.

    A file of something else is an error, never an answer.

    Args:
        path: the archive; its folder is made if it is not there.
        of: a sentence that says what the numbers are. It is kept with them, and compared.
        make: computes the numbers where there is no file.
    """
    path = Path(path)
    if path.exists():
        refused = refusing(lambda why: f"{path} cannot be read as features ({why}); delete it.")
        with refused, open(path, "rb") as kept, np.load(kept) as file:
            found, said = file["features"], str(file["of"])
        if said != of:
            raise InputError(f"{path} holds {said}, not {of}; delete it or choose another name.")
        return np.asarray(found, dtype=np.float32)
    result = np.ascontiguousarray(make(), dtype=np.float32)
    path.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
    unfinished = path.with_name(f"{path.name}.{os.getpid()}.unfinished")
    with open(os.open(unfinished, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600), "wb") as stream:
        np.savez(stream, features=result, of=np.array(of))
    os.replace(unfinished, path)
    return result


def make_private_folder(folder: str | os.PathLike[str]) -> Path:
    """Make a folder that its owner alone can enter; raise InputError if one stands that others can."""
    path = Path(folder)
    try:
        path.mkdir(parents=True, exist_ok=True, mode=0o700)
    except OSError as error:
        raise InputError(f"the cache {path} cannot be a folder ({error.strerror}); name another.") from None
    if stat.S_IMODE(path.stat().st_mode) & 0o077:
        raise InputError(
            f"the cache {path} can be entered by others, and features tell of the rows; name a folder that is not "
            f"there yet, or close this one: chmod 700 {path}"
        )
    return path
