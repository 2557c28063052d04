"""The way a CSV file is written: its encoding, what separates its values, and its decimal mark."""

from __future__ import annotations

import codecs
import csv
import gzip
import io
import os
import re
from collections.abc import Iterator
from dataclasses import dataclass
from functools import lru_cache
from itertools import chain
from pathlib import Path
from typing import IO, Any

from privrep.boundary import open_packed
from privrep.errors import InputError

DELIMITERS = {",": "commas", ";": "semicolons", "\t": "tabs", "|": "bars"}
NAMES = {"comma": ",", "semicolon": ";", "tab": "\t", "\\t": "\t", "bar": "|", "point": "."}  # as options may have them
_CHUNK = 1 << 20
_UTF8 = ("utf-8", "utf-8-sig")
_ESCAPED = re.compile("[\udc80-\udcff]")  # bytes that are not UTF-8
_BEYOND = re.compile("[\u0080-\ud7ff\ue000-\U0010ffff]")  # characters of several bytes
_Path = str | os.PathLike[str]


@dataclass(frozen=True)
class Dialect:
    """Encoding, delimiter and decimal mark of a CSV file. A field of None is found out."""

    encoding: str | None = None
    delimiter: str | None = None
    decimal: str | None = None  # None: a point; where values are not separated by commas, a comma will do, too

    def __post_init__(self) -> None:
        for name, known in (("delimiter", tuple(DELIMITERS)), ("decimal", (".", ","))):
            value = getattr(self, name)
            value = NAMES.get(value, value)
            object.__setattr__(self, name, value)  # the dataclass is frozen; this is its construction
            if value is not None and value not in known:
                listed = ", ".join(word for word, mark in NAMES.items() if mark in known and word != "\\t")
                raise InputError(f"--{name} must be one of {listed}. Got {value!r} instead.")
        if self.encoding is not None:
            try:
                object.__setattr__(self, "encoding", codecs.lookup(self.encoding).name)
            except LookupError:
                raise InputError(
                    f"--encoding: {self.encoding!r} is no encoding; utf-8, latin-1, cp1252 and utf-16 are."
                ) from None

    @property
    def marks(self) -> str:
        """Return the decimal marks that numbers may have."""
        return self.decimal or ("." if self.delimiter in (None, ",") else ".,")

    @property
    def words(self) -> str:
        """Return the dialect in words; nothing if it is UTF-8 with commas."""
        encoding = {"cp1252": "Latin-1 (cp1252)", "iso8859-1": "Latin-1"}.get(self.encoding or "", self.encoding)
        parts = [] if self.encoding in _UTF8 else [f"as {encoding}"]
        if self.delimiter not in (None, ","):
            parts.append(f"separated by {DELIMITERS[str(self.delimiter)]}")
            if self.decimal is None:
                parts.append("decimals with a point or a comma")
        return ", ".join(parts)


def find_dialect(path: _Path, user: str | None = None, asked: Dialect | None = None) -> Dialect:
    """Return how a CSV file is written.

    The header decides what separates values. The encoding is UTF-8, or UTF-16 where the file begins with its mark. It
    is Latin-1 (cp1252) where bytes beyond ASCII are nowhere UTF-8. If they are UTF-8 in one line and not in another, it
    is an error: one user's line cannot change how others' are read.

    Args:
        path: of the file; it may be gzipped.
        user: the column of users, which the header has if it was cut right.
        asked: what was declared.
    """
    status = os.stat(path)
    return _find_cached(os.fspath(path), status.st_mtime_ns, status.st_size, user, asked or Dialect())


@lru_cache(maxsize=256)
def _find_cached(path: str, changed: int, size: int, user: str | None, asked: Dialect) -> Dialect:
    """Return how a file is written, found once for each size and time of change."""
    encoding = asked.encoding or _find_encoding(path, changed, size)
    if asked.encoding and is_packed(path):
        with _open_bytes(path) as file:
            while file.read(_CHUNK):  # which refuses a file that becomes too large
                pass
    return Dialect(encoding, asked.delimiter or _find_delimiter(path, encoding, user), asked.decimal)


@lru_cache(maxsize=256)
def _find_encoding(path: str, changed: int, size: int) -> str:
    """Return the encoding of a file, all of whose bytes are looked at."""
    decoder = codecs.getincrementaldecoder("utf-8")(errors="surrogateescape")
    lines, foreign, beyond, western = 1, 0, False, True
    with _open_bytes(path) as file:
        for chunk in chain(iter(lambda: file.read(_CHUNK), b""), [b""]):  # the last tells the decoder that this is all
            if lines == 1 and chunk[:2] in (codecs.BOM_UTF16_LE, codecs.BOM_UTF16_BE):
                return "utf-16"
            if not chunk.isascii() or decoder.getstate()[0]:
                text = decoder.decode(chunk, final=not chunk)
                beyond = beyond or _BEYOND.search(text.lstrip("\ufeff") if lines == 1 else text) is not None
                if (escaped := _ESCAPED.search(text)) is not None:
                    foreign = foreign or lines + text.count("\n", 0, escaped.start())
                    western = western and not set(chunk) & {0x81, 0x8D, 0x8F, 0x90, 0x9D}
            lines += chunk.count(b"\n")
    if not foreign:
        return "utf-8"
    if beyond or not western:
        raise InputError(
            f"{path} is not UTF-8 in line {foreign}, and no other encoding fits all of it; save it as UTF-8, or say "
            "what it is with --encoding."
        )
    return "cp1252"


def _find_delimiter(path: str, encoding: str, user: str | None) -> str:
    """Return the mark that cuts the header into most names, one of them the user column's if that can be."""
    with open_text(path, "r", packed=is_packed(path), encoding=encoding) as file:
        start = file.read(_CHUNK).lstrip("\r\n")
    headers = {mark: next(csv.reader(start.splitlines(keepends=True), delimiter=mark), []) for mark in DELIMITERS}
    return max(headers, key=lambda mark: (user in headers[mark], len(headers[mark])))


def _open_bytes(path: _Path) -> IO[bytes]:
    """Open a file for reading bytes, unpacked if it is gzipped."""
    return open_packed(path) if is_packed(path) else open(path, "rb")


def open_text(path: _Path, mode: str, *, packed: bool, encoding: str | None = "utf-8") -> IO[str]:
    """Open a CSV file as text; bytes that cannot be decoded are kept as they are.

    Args:
        path: of the file.
        mode: "r" or "w".
        packed: whether it is gzipped.
        encoding: how it is encoded.
    """
    name = "utf-8-sig" if encoding in (None, "utf-8") and mode == "r" else encoding or "utf-8"
    errors = "surrogateescape" if name in _UTF8 else "replace"
    if packed and mode == "r":
        return io.TextIOWrapper(open_packed(path), encoding=name, errors=errors, newline="")
    opened: Any = gzip.open if packed else open
    file: IO[str] = opened(path, f"{mode}t", newline="", encoding=name, errors=errors)
    return file


def read_text_rows(path: _Path, dialect: Dialect) -> Iterator[list[str]]:
    """Yield the lines of a CSV file, its header first, as lists of text; empty lines are left out."""
    with open_text(path, "r", packed=is_packed(path), encoding=dialect.encoding) as file:
        yield from (line for line in csv.reader(file, delimiter=dialect.delimiter or ",") if line)


def is_packed(path: _Path) -> bool:
    """Return whether a file is called as gzipped ones are."""
    return Path(path).name.lower().endswith(".gz")
