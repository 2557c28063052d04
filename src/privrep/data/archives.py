"""NumPy archives that somebody else may have made: arrays by name, none larger than what is stored of it allows."""

from __future__ import annotations

import math
import os
import zipfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from privrep.boundary import check_expansion, refusing
from privrep.errors import InputError

MOST_CHARACTER = 0x10FFFF  # NumPy keeps text as numbers of 4 bytes, and makes text of any of them
_Path = str | os.PathLike[str]


def read_arrays(path: _Path, wanted: Sequence[str], welcome: Sequence[str]) -> dict[str, NDArray[Any]]:
    """Return arrays of a NumPy archive, as in `wanted`, all of them, and in `welcome`, where they are there."""
    arrays = open_archive(path, (*wanted, *welcome))
    if missing := [name for name in wanted if name not in arrays]:
        raise InputError(f"{path} has no array {missing[0]!r}; write it with numpy.savez({missing[0]}=...).")
    return arrays


def open_archive(path: _Path, names: Sequence[str] | None = None) -> dict[str, NDArray[Any]]:
    """Return arrays of a NumPy archive: these, where they are there, or all of them.

    Raise InputError if it cannot be read, or an array is far larger than what is stored of it.
    """
    if not Path(path).is_file():
        raise InputError(f"there is no file {path}; check the path.")
    with refusing(lambda why: f"{path} cannot be read as a NumPy archive ({why}); write it with numpy.savez."):
        with zipfile.ZipFile(path) as archive:
            found = {member.filename.removesuffix(".npy"): member for member in archive.infolist()}
            chosen = [name for name in (found if names is None else names) if name in found]
            for name in chosen:
                _check_member(archive, found[name])
        with np.load(path) as file:
            arrays = {name: file[name] for name in chosen}
        for name, array in arrays.items():
            characters = array.reshape(-1).view(f"{array.dtype.byteorder}u4") if array.dtype.kind == "U" else None
            if characters is not None and (characters > MOST_CHARACTER).any():
                raise ValueError(f"{name} holds text that is none")
    return arrays


def _check_member(archive: zipfile.ZipFile, member: zipfile.ZipInfo) -> None:
    """Raise OverLimit or ValueError unless an array has the size that its header says, and may have it.

    NumPy makes the memory of an array before it reads the first number.
    """
    check_expansion(member.file_size, member.compress_size)
    with archive.open(member) as file:
        version = np.lib.format.read_magic(file)
        read = np.lib.format.read_array_header_1_0 if version == (1, 0) else np.lib.format.read_array_header_2_0
        shape, _, kind = read(file)
        said = math.prod(shape) * kind.itemsize
        if said > member.file_size:
            raise ValueError(f"the header of {member.filename} says {said:,} bytes, and there are fewer")
