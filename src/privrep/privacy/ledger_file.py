"""The file of a ledger: lines of JSON, each chained to all lines before it, only ever appended.

A line ends with `"chain"`: a hash of the line before's chain and of the line itself. So a line that was deleted, moved,
repeated or edited, down to a bit, breaks the chain at that place or at the next one. A chain is no signature: whoever
can write the file can write another one, whole. It tells of damage, and of edits by hand.

Lines of a chained file:
  the budget, the relation, whether noise is simulated
  {"population": name, "run": name}  the population ledger that the run draws from, before any charge
  {"opened": mark}            a process goes on with the run, where it draws from a population ledger
  {"charge": name, ...}       an event, before its noise is drawn
  {"drawn": page}             it is about to be posted, where the run draws from a population ledger
  {"posted": page, ...}       a page that stands, with a hash of all that it says
  {"abandoned": page}         a page that will never stand, although something of it was drawn

Files of before have no chain ("privrep-ledger/1"). They are read and continued as they are, and said to be unchained.
"""

from __future__ import annotations

import fcntl
import hashlib
import json
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from privrep.boundary import parse_json, read_text_file, refusing, say_why, writing
from privrep.errors import InputError
from privrep.privacy.events import Event, event_from_json

FORMAT, UNCHAINED = "privrep-ledger/2", "privrep-ledger/1"
_MARK = b', "chain": "'
_HEX = 32  # digits of a chain
_NAMED = "posted", "abandoned", "charge", "population", "opened", "drawn"  # kinds of lines, but for the first
_DEEP = 8  # brackets that a line may open: ours open three


@dataclass
class Entries:
    """The content of a ledger: charges by name in their order, pages that stand by name, pages that never will."""

    charges: dict[str, Event] = field(default_factory=dict)
    posted: dict[str, str] = field(default_factory=dict)  # page -> hash of what it says, empty where none was kept
    abandoned: set[str] = field(default_factory=set)
    drawn_from: tuple[str, str] | None = None  # a population ledger, and the name of this run there
    opened: str = ""  # the mark of the process that opened it last, where it draws from a population ledger
    lines: list[Mapping[str, Any]] = field(default_factory=list)  # all of these in their order, as data

    def copy(self) -> Entries:
        """Return a copy that is not changed any more."""
        return Entries(
            dict(self.charges), dict(self.posted), set(self.abandoned), self.drawn_from, self.opened, list(self.lines)
        )


@dataclass(frozen=True)
class Contents:
    """The content of a ledger's file.

    Args:
        header: its first line; None for an empty file.
        entries: all other lines.
        whole: bytes of whole lines: a torn last line is not among them.
        unended: whether the last of these lines lacks its line break, as a killed write may leave it.
        head: the chain of the last line; None for a file without chains.
        lines: how many there are.
    """

    header: dict[str, Any] | None
    entries: Entries
    whole: int
    unended: bool
    head: str | None
    lines: int

    @property
    def seal(self) -> dict[str, Any] | None:
        """Return what identifies the file; None without chains."""
        return _seal(self.head, self.lines)


class LedgerFile:
    """A ledger's file, open and locked by this process alone."""

    def __init__(self, path: Path, header: Mapping[str, Any], *, chained: bool = True) -> None:
        """Open or make a file. Raise InputError if it is in use, damaged, or begins with another header.

        Args:
            path: of the file.
            header: of the ledger, without the format.
            chained: whether a file that is made has chains; the copy of one without has none.
        """
        self._path = path
        # without a buffer, which would write later what could not be written before
        self._file = open(path, "a+b", buffering=0)  # noqa: SIM115
        try:
            self._lock(path)
            found = read_file(path)
            self.entries, self.head, self._lines = found.entries, found.head, found.lines
            if found.header is None:
                self._file.truncate(0)
                self.head = "" if chained else None
                self.append([{"format": FORMAT if chained else UNCHAINED, **header}])
                _sync_folder(path.parent)
                return
            stands = {name: value for name, value in found.header.items() if name != "format"}
            if stands != dict(header):
                raise InputError(
                    f"{path} belongs to a run with another budget ({_describe(stands)}). Continue it with the same "
                    "epsilon, delta, relation and random_state, or use another folder."
                )
            self._file.truncate(found.whole)  # a torn last line was never synced, so its noise was never drawn
            if found.unended:
                self._write(b"\n")
        except BaseException:
            self._file.close()
            raise

    def _lock(self, path: Path) -> None:
        """Lock the file for this process."""
        try:
            fcntl.flock(self._file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            raise InputError(
                f"{path} is in use by another process. Wait for it to end, or use another folder."
            ) from None

    def append(self, lines: Sequence[Mapping[str, Any]]) -> None:
        """Append lines and sync them: they are on disk when this returns."""
        head, written = self.head, []
        for line in lines:
            text, head = chain_line(head, line)
            written.append(text)
        self._write(b"".join(written))
        self.head, self._lines = head, self._lines + len(lines)

    def _write(self, text: bytes) -> None:
        """Append bytes and sync them, all or none. Raise DiskFull, and leave the file as it was, if it cannot grow."""
        before = self._file.seek(0, os.SEEK_END)
        try:
            with writing(self._path):
                while text:
                    text = text[self._file.write(text) :]
                os.fsync(self._file.fileno())
        except BaseException:
            self._file.truncate(before)
            raise

    @property
    def contents(self) -> Contents:
        """Return the content of the file as it is now, but for its header."""
        return Contents(None, self.entries, 0, False, self.head, self._lines)

    @property
    def seal(self) -> dict[str, Any] | None:
        """Return what identifies the file as it is now; None without chains."""
        return _seal(self.head, self._lines)

    def close(self) -> None:
        """Close the file, and with it the lock."""
        self._file.close()


def chain_line(before: str | None, line: Mapping[str, Any]) -> tuple[bytes, str | None]:
    """Return a line as it is written, and its chain; without a chain where the line before has None.

    Args:
        before: the chain of the line before, empty for the first line.
        line: its content.
    """
    body = json.dumps(line).encode()
    if before is None:
        return body + b"\n", None
    head = _hash(before, body)
    return body[:-1] + _MARK + head.encode() + b'"}\n', head


def read_chained(before: str, line: bytes) -> tuple[dict[str, Any], str]:
    """Return the content of a line, and its chain. Raise ValueError unless it follows from the line before.

    Args:
        before: the chain of the line before, empty for the first line.
        line: as `chain_line` wrote it.
    """
    data = parse_json(line)
    if not isinstance(data, dict):
        raise ValueError("it is no object")
    head = _check_chain(before, line, data)
    assert head is not None
    return {name: value for name, value in data.items() if name != "chain"}, head


def posted_line(page: str, digest: str) -> dict[str, str]:
    """Return the line of a page that stands, as data."""
    return {"posted": page, **({"says": digest} if digest else {})}


def read_file(path: Path) -> Contents:
    """Return the content of a ledger's file. Raise InputError for anything odd but a torn last line."""
    with refusing(lambda why: f"{path} cannot be read as a ledger ({why}).", (OSError,)):
        raw = read_text_file(path)
    lines = raw.split(b"\n")
    torn = lines.pop()
    unended = _MARK in torn and _is_complete(torn)
    whole = len(raw) if unended else len(raw) - len(torn)
    header: dict[str, Any] | None = None
    entries, head, number = Entries(), "", 0
    chained: str | None = head
    for number, line in enumerate([*lines, torn] if unended else lines, start=1):
        try:
            data = _parse(line)
            if number == 1:
                header, chained = _read_header(data, path), None if data["format"] == UNCHAINED else ""
            chained = _check_chain(chained, line, data)
            if number > 1:
                _add(entries, data, chained is not None)
        except Exception as error:
            if isinstance(error, InputError) and number == 1:
                raise
            raise InputError(_damaged(path, number, say_why(error))) from None
    return Contents(header, entries, whole, unended, chained, number)


def _damaged(path: Path, number: int, why: object) -> str:
    return (
        f"{path} is damaged in line {number} ({why}); restore it from a copy. What it says was spent cannot be "
        "trusted, so the run cannot go on."
    )


def _read_header(data: Mapping[str, Any], path: Path) -> dict[str, Any]:
    """Return the first line. Raise InputError for another format, ValueError where a part is missing."""
    if data["format"] not in (FORMAT, UNCHAINED):
        raise InputError(f"{path} is not a ledger this version of privrep can read ({FORMAT}).")
    kinds = {"relation": (str,), "epsilon": (float, int), "delta": (float, int), "seeded": (bool,)}
    for name, several in kinds.items():
        if type(data[name]) not in several:
            raise ValueError(f"{name} is no {several[0].__name__}")
    return {name: data[name] for name in ("format", *kinds)}


def _add(entries: Entries, data: dict[str, Any], chained: bool) -> None:
    """Add one line to the entries. Raise ValueError if it says what was said before."""
    data = {name: value for name, value in data.items() if name != "chain"}
    if not all(isinstance(data[name], str) for name in _NAMED if name in data):
        raise ValueError("its name is no text")
    if "population" in data:
        if entries.drawn_from or entries.charges:
            raise ValueError("it names a population after charges")
        entries.drawn_from = data["population"], str(data["run"])
    elif "opened" in data:
        if entries.drawn_from is None:
            raise ValueError("it opens a run that draws from no population")
        entries.opened = data["opened"]
    elif "drawn" in data:
        if entries.drawn_from is None:
            raise ValueError("it notes a draw for a population that it draws nothing from")
    elif "posted" in data:
        page = data["posted"]
        if chained and (page in entries.posted or not isinstance(data["says"], str)):
            raise ValueError(f"{page!r} posted twice")
        entries.posted[page] = data["says"] if chained else ""
    elif "abandoned" in data:
        entries.abandoned.add(data["abandoned"])
    elif data["charge"] in entries.charges:
        raise ValueError(f"{data['charge']!r} charged twice")
    else:
        entries.charges[data["charge"]] = event_from_json(data)
    entries.lines.append(data)


def _parse(line: bytes) -> dict[str, Any]:
    """Return a line as data. Raise ValueError if it is none of ours."""
    if line.count(b"{") + line.count(b"[") > _DEEP:
        raise ValueError("brackets within brackets")
    data = parse_json(line)
    if not isinstance(data, dict):
        raise ValueError("it is no object")
    return data


def _check_chain(before: str | None, line: bytes, data: Mapping[str, Any]) -> str | None:
    """Return the chain of a line. Raise ValueError unless it follows from the line before."""
    if before is None:
        if "chain" in data:
            raise ValueError("it is chained and the file is not")
        return None
    body, mark, rest = line.rpartition(_MARK)
    head = _hash(before, body + b"}")
    if not mark or rest != head.encode() + b'"}':
        raise ValueError("its chain is broken: this line or the one before was changed")
    return head


def _is_complete(rest: bytes) -> bool:
    """Return whether what follows the last line break begins with a whole line, so that it was not torn within."""
    try:
        json.JSONDecoder().raw_decode(rest.decode(errors="replace"))
    except (ValueError, RecursionError):
        return False
    return True


def _seal(head: str | None, lines: int) -> dict[str, Any] | None:
    return None if head is None else {"lines": lines, "chain": head}


def _hash(before: str, body: bytes) -> str:
    return hashlib.blake2b(before.encode() + b"\n" + body, digest_size=_HEX // 2).hexdigest()


def _describe(header: Mapping[str, Any]) -> str:
    """Return the budget of a header in words."""
    kind = "simulation" if header["seeded"] else "private"
    return f"epsilon {header['epsilon']:g}, delta {header['delta']:g}, {header['relation']}, {kind}"


def _sync_folder(folder: Path) -> None:
    """Sync a folder, so that files made in it are there after a crash."""
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
