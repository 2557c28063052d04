"""Text in a CSV file, or in a column that was declared numeric, read as numbers, integers or truth values.

Every value is read by itself, by a public rule: its value does not depend on other rows.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from numpy.typing import NDArray

from privrep.data.problems import CODES, DATES, NOT_NUMBERS, TURN_DATES, Problems

MISSING_TEXT = ("", "NA")  # where nobody quoted it
_WORDS = "NA N/A n/a NaN nan -NaN -nan null NULL None <NA> #N/A #NA 1.#IND -1.#IND 1.#QNAN -1.#QNAN"
_MISSING = pa.array(["", "#N/A N/A", *_WORDS.split(" ")], pa.large_string())
_NUMBER = r"^[+-]?([0-9]+\.?[0-9]*|\.[0-9]+)([eE][+-]?[0-9]+)?$|^[+-]?(inf|Inf|INF|infinity|Infinity)$"
_WITH_COMMA = r"^[+-]?[0-9]*,[0-9]+([eE][+-]?[0-9]+)?$"
_WHOLE = r"^[+-]?[0-9]{1,18}(\.0*)?$"
_DATE = (
    r"^\s*([0-9]{4}[-/.][0-9]{1,2}[-/.][0-9]{1,2}|[0-9]{1,2}[-/.][0-9]{1,2}[-/.][0-9]{4})"
    r"([ T][0-9]{1,2}:[0-9]{2}.*)?\s*$"
)


def read_numbers(name: str, text: Any, problems: Problems, advice: str, decimal: str, declared: bool) -> Any:
    """Return text as float64: null where a value is missing, and where it is no number, which is noted.

    TRUE and FALSE, in any case, are 1 and 0.

    Args:
        name: of the column.
        text: a large_string array (rows,).
        problems: where to note values that are no numbers.
        advice: what to do about such a value.
        decimal: the decimal mark, or both: ".", "," or ".,". One table uses one of them.
        declared: whether the column was declared numeric, so that leading zeros are part of numbers.
    """
    if not declared:
        codes = "name codes with --categorical to use them as they are written, or with --numeric if they are numbers"
        problems.note(name, CODES, codes, find_leading_zeros(text))
    if decimal == ".":
        try:
            return text.cast(pa.float64())
        except pa.ArrowInvalid:
            pass
    text = _set_missing(pc.utf8_trim_whitespace(text))
    text = _unify_marks(name, text, problems, decimal)
    lower = pc.ascii_lower(text)
    text = pc.if_else(pc.equal(lower, "true"), pa.scalar("1", pa.large_string()), text)
    text = pc.if_else(pc.equal(lower, "false"), pa.scalar("0", pa.large_string()), text)
    good = pc.match_substring_regex(text, _NUMBER)
    bad = pc.invert(good)
    if pc.any(bad).as_py():
        dates = looks_like_date(text)
        problems.note(name, DATES, TURN_DATES, _to_mask(pc.and_(bad, dates)))
        problems.note(name, NOT_NUMBERS, f"correct it{advice}", _to_mask(pc.and_not(bad, dates)))
        text = pc.if_else(good, text, pa.scalar(None, pa.large_string()))
    return text.cast(pa.float64())


def _unify_marks(name: str, text: Any, problems: Problems, decimal: str) -> Any:
    """Return text with decimal points; note the rows with another mark than the rows before."""
    if decimal == ".":
        return text
    commas = pc.match_substring_regex(text, _WITH_COMMA)
    points = pc.and_(pc.match_substring(text, "."), pc.match_substring_regex(text, _NUMBER))
    for mark, mask in ((",", commas), (".", points)):
        if not pc.any(mask).as_py():
            continue
        problems.decimal = problems.decimal or (decimal if len(decimal) == 1 else mark)
        if mark != problems.decimal:
            other = {",": "a comma", ".": "a point"}
            problems.note(
                name,
                f"has {other[mark]} where others have {other[problems.decimal]} for decimals",
                "write all one way, or say which it is with --decimal",
                _to_mask(mask),
            )
    return pc.if_else(commas, pc.replace_substring(text, ",", "."), text)


def read_integers(name: str, text: Any, problems: Problems, says: str, advice: str) -> Any:
    """Return text as int64: null where a value is missing, and where it is no integer, which is noted. 6.0 is 6.

    Args:
        name: of the column.
        text: a large_string array (rows,).
        problems: where to note values that are no integers.
        says: how to say that a value is none.
        advice: what to do about it.
    """
    try:
        if not _has_hexadecimal(text):  # Arrow reads 0x1F as 31
            return text.cast(pa.int64())
    except pa.ArrowInvalid:
        pass
    text = _set_missing(pc.utf8_trim_whitespace(text))
    good = pc.match_substring_regex(text, _WHOLE)
    problems.note(name, says, advice, _to_mask(pc.invert(good)))
    text = pc.if_else(good, text, pa.scalar(None, pa.large_string()))
    return pc.replace_substring_regex(text, r"^\+|\.0*$", "").cast(pa.int64())


def read_truth(name: str, text: Any, problems: Problems) -> Any:
    """Return text as booleans: null where a value is missing, and where it is none, which is noted.

    Args:
        name: of the column.
        text: a large_string array (rows,).
        problems: where to note values that are neither true nor false.
    """
    lower = pc.ascii_lower(_set_missing(pc.utf8_trim_whitespace(text)))
    true, false = (pc.is_in(lower, pa.array(words, pa.large_string())) for words in (["true", "1"], ["false", "0"]))
    bad = pc.and_not(lower.is_valid(), pc.or_(true, false))
    problems.note(name, "is neither true nor false", "correct it", bad)
    return pc.if_else(pc.and_(lower.is_valid(), pc.invert(bad)), true, pa.scalar(None, pa.bool_()))


def _has_hexadecimal(text: Any) -> bool:
    """Return whether some text may be a hexadecimal number."""
    return bool(pc.any(pc.match_substring(text, "x", ignore_case=True)).as_py())


def find_leading_zeros(text: Any) -> NDArray[np.bool_]:
    """Return a mask (rows,) of text that begins as codes do: 007, with a sign or without.

    Every number of a file is looked at, so this works on bytes: a regular expression takes five times as long.
    """
    _, offsets, data = text.buffers()
    if not len(text) or data is None or not data.size:
        return np.zeros(len(text), dtype=bool)
    edges = np.frombuffer(offsets, np.int64, count=len(text) + 1, offset=8 * text.offset)
    letters, ends = np.frombuffer(data, np.uint8), edges[1:]
    first = letters[np.minimum(edges[:-1], len(letters) - 1)]
    place = edges[:-1] + ((first == ord("+")) | (first == ord("-")))
    zero = letters[np.minimum(place, len(letters) - 1)] == ord("0")
    after = letters[np.minimum(place + 1, len(letters) - 1)]
    return np.asarray(zero & (place + 1 < ends) & (after >= ord("0")) & (after <= ord("9")))


def looks_like_date(text: Any) -> Any:
    """Return a mask (rows,) of text that is written as a date is."""
    return pc.match_substring_regex(text, _DATE)


def looks_like_number(text: Any) -> Any:
    """Return a mask (rows,) of text that is written as a number is."""
    return pc.match_substring_regex(text, _NUMBER)


def _set_missing(text: Any) -> Any:
    """Return text with null for every word that stands for a missing value."""
    return pc.if_else(pc.is_in(text, _MISSING), pa.scalar(None, pa.large_string()), text)


def _to_mask(found: Any) -> Any:
    """Return booleans with False for null."""
    return pc.fill_null(found, False)
