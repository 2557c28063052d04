"""Problems of the columns of a table: added up while its rows are looked at, and told in one sentence."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import pyarrow as pa

from privrep.errors import InputError

NOT_NUMBERS = "is not a number"
DATES = "holds dates or times"
CODES = "has leading zeros, as codes have,"
TURN_DATES = "turn dates into numbers, such as days since a public day, or leave the column out"
_SHOWN = 10  # columns that a sentence names


@dataclass
class _Found:
    """One kind of problem of one column."""

    column: str
    says: str
    advice: str
    rows: int  # 0: of its type, whatever the rows are
    first: int


class Problems:
    """The problems of one table, by column and kind.

    Only the curator, or the node that holds the rows, sees the sentence. It names columns, counts and places, never
    values.

    Args:
        where: how sentences call the table.
        start: the number of its first row: 1 in files, 0 in frames.
    """

    def __init__(self, where: object, start: int = 1) -> None:
        self.where = str(where)
        self.decimal = ""  # the decimal mark of the table, once one was seen
        self._start = start
        self._rows = 0  # before those that are looked at now
        self._found: dict[tuple[str, str], _Found] = {}
        self._ragged: list[tuple[int, int]] = []  # rows of another length than the header: place, values
        self._header = 0
        self._noted: dict[str, Any] = {}  # by column, the rows with a problem among those that are looked at now

    def __bool__(self) -> bool:
        return bool(self._found or self._ragged)

    def note(self, column: str, says: str, advice: str, mask: Any = None) -> None:
        """Note a problem of a column.

        Args:
            column: its name.
            says: what is wrong, as a verb phrase.
            advice: what to do about it.
            mask: (rows,) which of the rows that are looked at have the problem; None: the type of the column has.
        """
        places = np.flatnonzero(np.asarray(mask)) if mask is not None else np.empty(0, np.int64)
        if mask is not None and not len(places):
            return
        if mask is not None:
            self._noted[column] = np.asarray(mask) | self._noted.get(column, False)
        known = self._found.get((column, says))
        if known is not None:
            known.rows += len(places)
            return
        first = self._rows + int(places[0]) if len(places) else 0
        self._found[column, says] = _Found(column, says, advice, len(places), first)

    def note_missing(self, column: str, says: str, advice: str, mask: Any) -> None:
        """Note missing values, except where a problem was noted that made them missing; arguments are as in `note`."""
        self.note(column, says, advice, np.asarray(mask) & ~np.asarray(self._noted.get(column, False)))

    def note_ragged(self, row: Any) -> str:
        """Note a line of a CSV file that has more or fewer values than the header, and skip it."""
        self._ragged.append(((row.number or 2) - 2, row.actual_columns))
        self._header = row.expected_columns
        return "skip"

    def advance(self, rows: int) -> None:
        """Go on to the next rows."""
        self._rows += rows
        self._noted.clear()

    def error(self) -> InputError:
        """Return all problems in one sentence."""
        sentences = [self._tell_lengths()] if self._ragged else []
        columns = list(dict.fromkeys(found.column for found in self._found.values()))
        by_column = [[found for found in self._found.values() if found.column == name] for name in columns]
        if len(by_column) == 1:
            told = " and ".join(self._tell(found) for found in by_column[0])
            advice = " or ".join(dict.fromkeys(found.advice for found in by_column[0]))
            sentences.append(f"column {columns[0]!r} of {self.where} {told}; {advice}.")
        elif by_column:
            listed = "; ".join(self._tell_all(founds) for founds in by_column[:_SHOWN])
            more = f"; and {len(by_column) - _SHOWN:,} more" if len(by_column) > _SHOWN else ""
            advice = "; ".join(dict.fromkeys(found.advice for found in self._found.values()))
            sentences.append(
                f"{len(by_column):,} columns of {self.where} cannot be used: {listed}{more}. To go on: {advice}."
            )
        return InputError(" ".join(sentences))

    def _tell_all(self, founds: Sequence[_Found]) -> str:
        """Return the problems of one column in words, with its name."""
        return f"{founds[0].column!r} {' and '.join(self._tell(found) for found in founds)}"

    def _tell(self, found: _Found) -> str:
        """Return a problem in words, with the number of its rows and the first of them."""
        if not found.rows:
            return found.says
        row = self._start + self._find_place(found.first)
        return f"{found.says} in " + (f"row {row}" if found.rows == 1 else f"{found.rows:,} rows, first in row {row}")

    def _find_place(self, row: int) -> int:
        """Return the place in the file of a row that was read; lines that were skipped count, too."""
        for place, _ in sorted(self._ragged):
            row += place <= row
        return row

    def _tell_lengths(self) -> str:
        """Return a sentence on lines of another length than the header's."""
        (place, values), count = min(self._ragged), len(self._ragged)
        row, names = self._start + place, ""
        if all(found == self._header + 1 for _, found in self._ragged) and count > self._rows:
            names = ", or write it without row names, which have no column in the header"
        if count == 1:
            return (
                f"row {row} of {self.where} has {values} values under a header of {self._header}; "
                f"correct that line{names}."
            )
        return (
            f"{count:,} rows of {self.where} have another number of values than the header's {self._header}, first row "
            f"{row} with {values}; correct those lines{names}."
        )


def name_value_kind(kind: Any) -> str:
    """Return "numbers", "text", "dates", "nothing" or "" (of no use) for a type of Arrow's, "" for lists and the like.

    Booleans are the numbers 0 and 1. A dictionary of text or of integers is text: its values are categories. A
    dictionary of other numbers is of no use: one value could make it so.
    """
    types = pa.types
    if types.is_dictionary(kind):
        inner = name_value_kind(kind.value_type)
        return "text" if inner == "text" or types.is_integer(kind.value_type) else "" if inner == "numbers" else inner
    if types.is_integer(kind) or types.is_floating(kind) or types.is_boolean(kind) or types.is_decimal(kind):
        return "numbers"
    if is_text(kind):
        return "text"
    if types.is_temporal(kind):
        return "dates"
    return "nothing" if types.is_null(kind) else ""


def is_text(kind: Any) -> bool:
    """Return whether a type of Arrow's is one of its types of text."""
    return bool(pa.types.is_string(kind) or pa.types.is_large_string(kind) or str(kind) == "string_view")


def note_type(problems: Problems, name: str, kind: Any, otherwise: str) -> None:
    """Note that a column of this type holds no numbers.

    Args:
        problems: where to note it.
        name: the name of the column.
        kind: its type, one of Arrow's.
        otherwise: more advice, which comes after "turn it into numbers".
    """
    found = name_value_kind(kind)
    if found == "dates":
        problems.note(name, DATES, TURN_DATES)
    elif found == "nothing":
        problems.note(name, "holds no values", "fill it or leave it out")
    else:
        what = "text" if found == "text" else f"values of type {kind}"
        problems.note(name, f"holds {what}, not numbers", f"turn it into numbers{otherwise}")
