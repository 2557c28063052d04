"""The boundary for input that somebody else may have made: its limits, its readers, and its errors.

Model folders, tables, configurations and messages are read through here:
* `LIMITS` is the one table of limits. An environment variable raises each of them, and errors name it.
* `refusing` turns whatever a reader or a library raises into one sentence, `writing` a full disk.
* `parse_json`, `read_json` and `read_toml` read texts that are neither too long nor nested too deeply.
* `check_expansion` and `ExpandingFile` refuse a small file that would become a huge one.
"""

from __future__ import annotations

import errno
import gzip
import io
import json
import os
import re
import tomllib
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO

from privrep.errors import DiskFull, InputError, OverLimit, PrivrepError

_Path = str | os.PathLike[str]
_LONGEST = 300  # characters of a library's words in a sentence of ours
_MOST_DIGITS = 40
_FULL = {errno.ENOSPC, errno.EDQUOT, errno.EFBIG}
_FULL_WORDS = ("No space left on device", "Disk quota exceeded", "File too large", "database or disk is full")
_TOKENS = re.compile(rb'"(?:[^"\\]|\\.?)*+"?|[\[\]{}]', re.DOTALL)  # a text that does not end is one to the end


@dataclass(frozen=True)
class Limit:
    """A limit, the environment variable that raises it, and what it limits."""

    variable: str
    default: int
    what: str

    @property
    def value(self) -> int:
        """Return the limit as it is now. Raise InputError if the variable holds no whole number above 0."""
        given = os.environ.get(self.variable, "")
        if not given:
            return self.default
        if not given.isascii() or not given.isdigit() or not 0 < len(given) < 19 or int(given) < 1:
            raise InputError(f"{self.variable} must be a whole number above 0. Got {given[:40]!r} instead.")
        return int(given)


LIMITS = {
    "depth": Limit("PRIVREP_MAX_DEPTH", 64, "levels of brackets in JSON and TOML"),
    "text": Limit("PRIVREP_MAX_TEXT", 1 << 28, "bytes of a JSON or TOML file, or of a ledger"),
    "expanded": Limit("PRIVREP_MAX_EXPANDED", 1 << 29, "bytes that anything packed may become, however small it is"),
    "ratio": Limit("PRIVREP_MAX_RATIO", 500, "times its packed size that something larger may become"),
}
"""All limits by name. None of them limits the size of a table as a whole."""


# Errors


def say_why(error: BaseException) -> str:
    """Return what went wrong in one line without a full stop, whichever library raised it."""
    if isinstance(error, RecursionError):
        return "it is nested too deeply"
    if isinstance(error, MemoryError):
        return "there is not enough memory for it"
    if isinstance(error, KeyError):
        return f"{_shorten(str(error))} is missing"
    return _shorten(str(error)) or type(error).__name__


def _shorten(text: str) -> str:
    """Return the first line of a text, as far as it can be printed."""
    line = next(iter(text.splitlines()), "").rstrip(". ")
    shown = "".join(each if each.isprintable() else "?" for each in line[:_LONGEST])
    return shown + ("..." if len(line) > _LONGEST else "")


@contextmanager
def refusing(tell: Callable[[str], str], passing: tuple[type[BaseException], ...] = ()) -> Iterator[None]:
    """Turn whatever goes wrong inside into an InputError of one sentence. Errors of privrep pass as they are.

    A bad file can make a parser raise anything, so everything that is an Exception is turned. This belongs around
    reading alone. A limit does not know the file, so its error is told again.

    Args:
        tell: makes the sentence of what `say_why` says.
        passing: other errors that pass as they are.
    """
    try:
        yield
    except OverLimit as error:
        raise InputError(tell(say_why(error))) from None
    except Exception as error:
        if isinstance(error, (PrivrepError, *passing)):
            raise
        raise InputError(tell(say_why(error))) from error


@contextmanager
def writing(path: _Path) -> Iterator[None]:
    """Turn the errors of a full disk, whichever library met it, into one sentence; others pass as they are.

    Args:
        path: of the file that is written.
    """
    try:
        yield
    except PrivrepError:
        raise
    except Exception as error:
        if not is_full(error):
            raise
        raise DiskFull(
            f"{path} cannot be written, because the disk is full. Make room and run the same again: "
            "what was written before still stands."
        ) from error


def is_full(error: BaseException) -> bool:
    """Return whether an error says that the disk is full, or that a file may not grow."""
    if isinstance(error, OSError) and error.errno in _FULL:
        return True
    return any(words in str(error) for words in _FULL_WORDS)


def _make_limit_error(name: str, what: str) -> OverLimit:
    """Return the error for something that is over a limit.

    Args:
        name: of the limit.
        what: says what is over it, up to the number.
    """
    limit = LIMITS[name]
    return OverLimit(f"{what} {limit.value:,}; if you trust it, set {limit.variable} to a larger number")


# Texts


def check_text_size(size: int) -> None:
    """Raise OverLimit if a text of this many bytes is too long to be read at once."""
    if size > LIMITS["text"].value:
        raise _make_limit_error("text", f"its {size:,} bytes are over the limit of")


def read_text_file(path: Path) -> bytes:
    """Return the bytes of a file that is read at once. Raise OverLimit if it is too long."""
    check_text_size(path.stat().st_size)
    return path.read_bytes()


def parse_json(text: str | bytes, *, finite: bool = False) -> Any:
    """Return what a JSON text says. Raise ValueError if it is none, OverLimit if it is over a limit.

    Args:
        text: of any length.
        finite: whether NaN and infinite numbers, which Python writes and JSON does not have, are refused.
    """
    raw = text.encode(errors="surrogatepass") if isinstance(text, str) else text
    check_text_size(len(raw))
    check_depth(raw)
    more: dict[str, Any] = {"parse_constant": _refuse_constant} if finite else {}
    return json.loads(text, parse_int=_read_whole, **more)


def _read_whole(digits: str) -> int:
    """Return a whole number. Raise ValueError for one that no field holds, and that no float could."""
    if len(digits) > _MOST_DIGITS:
        raise ValueError(f"it has a number of {len(digits):,} digits")
    return int(digits)


def _refuse_constant(name: str) -> Any:
    """Raise ValueError for a number that JSON does not have."""
    raise ValueError(f"it has {name} for a number")


def read_json(path: Path) -> Any:
    """Return what a JSON file says; errors are as in `parse_json`, or the system's."""
    return parse_json(read_text_file(path))


def check_depth(text: bytes) -> None:
    """Raise OverLimit if brackets of a JSON text lie within each other more often than the limit allows."""
    most = LIMITS["depth"].value
    if text.count(b"[") + text.count(b"{") <= most:
        return
    depth = 0
    for found in _TOKENS.finditer(text):
        token = found[0]
        if token in b"[{":
            depth += 1
            if depth > most:
                raise _make_limit_error("depth", "it has brackets within brackets more often than the limit of")
        elif token in b"]}":
            depth -= 1


def parse_toml(raw: bytes) -> dict[str, Any]:
    """Return what a TOML text says. Raise ValueError if it is none, OverLimit if it is over a limit."""
    check_text_size(len(raw))
    most = LIMITS["depth"].value
    try:
        found = tomllib.loads(raw.decode())
    except RecursionError:
        raise _make_limit_error(
            "depth", "it has tables or lists within each other more often than the limit of"
        ) from None
    level: list[Any] = [found]
    for _ in range(most + 1):
        level = [each for held in level for each in _list_inside(held)]
        if not level:
            return found
    raise _make_limit_error("depth", "it has tables or lists within each other more often than the limit of")


def _list_inside(held: Any) -> list[Any]:
    """Return the tables and lists that a table or a list holds."""
    values = held.values() if isinstance(held, dict) else held
    return [each for each in values if isinstance(each, dict | list)]


# What is packed


def check_expansion(expanded: int, stored: int) -> None:
    """Raise OverLimit if something packed would become too large for its packed size.

    Args:
        expanded: bytes that it becomes.
        stored: bytes of it in the file.
    """
    if expanded <= LIMITS["expanded"].value or expanded <= LIMITS["ratio"].value * max(stored, 1):
        return
    raise _make_limit_error(
        "expanded", f"its {stored:,} bytes would become {expanded:,}, and the limit for anything packed so well is"
    )


class ExpandingFile(io.RawIOBase):
    """A file packed with gzip, read unpacked. It counts what it becomes, and refuses too much of it."""

    def __init__(self, path: _Path) -> None:
        """Open a file for reading."""
        self._stored = os.stat(path).st_size
        self._file: BinaryIO = gzip.open(path, "rb")  # type: ignore[assignment]  # noqa: SIM115
        self._read = 0

    def readable(self) -> bool:
        """Return True."""
        return True

    def readinto(self, buffer: Any) -> int:
        """Read into a buffer. Raise OverLimit once the file becomes too large."""
        view = memoryview(buffer).cast("B")
        found = self._file.read(min(len(view), 1 << 20))
        self._read += len(found)
        check_expansion(self._read, self._stored)
        view[: len(found)] = found
        return len(found)

    def close(self) -> None:
        """Close the file."""
        if not self.closed:
            self._file.close()
        super().close()


def open_packed(path: _Path) -> io.BufferedReader:
    """Open a file packed with gzip to read it unpacked, as far as its limits go."""
    return io.BufferedReader(ExpandingFile(path), 1 << 20)


def unpack(content: bytes) -> bytes:
    """Return the unpacked bytes of what gzip packed. Raise OverLimit if they would be too many."""
    parts, size = [], 0
    with gzip.GzipFile(fileobj=io.BytesIO(content)) as file:
        while part := file.read(1 << 20):
            parts.append(part)
            size += len(part)
            check_expansion(size, len(content))
    return b"".join(parts)
