"""Public facts that `privrep fit` is told: sizes and covariance of the features, lists of categories, classes."""

from __future__ import annotations

import math
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from privrep.boundary import read_json, refusing
from privrep.errors import InputError

if TYPE_CHECKING:
    from privrep.data.categories import Categories


@dataclass(frozen=True)
class Declared:
    """A public fact as it was told: in a JSON file that an option names, or as a value of a configuration."""

    where: str  # how sentences call it
    path: Path | None = None
    value: Any = None

    @classmethod
    def in_file(cls, option: str, path: str | None) -> Declared | None:
        """Return the fact that a JSON file holds, if an option names one."""
        return None if path is None else cls(f"{option}: {Path(path)}", Path(path))

    @classmethod
    def in_config(cls, key: str, value: Any) -> Declared | None:
        """Return the fact that a configuration holds, if it does."""
        return None if value is None else cls(key, value=value)

    def read(self) -> Any:
        """Return the value, as JSON or TOML has it."""
        if self.path is None:
            return self.value
        with refusing(lambda why: f"{self.where} is not JSON ({why}).", (OSError,)):
            return read_json(self.path)


def read_scale(told: Declared | None, features: Sequence[str]) -> tuple[float, ...] | None:
    """Return the size of each feature, in their order."""
    if told is None:
        return None
    sizes = told.read()
    if not isinstance(sizes, dict):
        raise InputError(f'{told.where} must hold {{"column": size, ...}}.')
    for name in features:
        if not (_is_number(sizes.get(name)) and sizes[name] > 0):
            raise InputError(f"{told.where} gives no positive number for feature {name!r}.")
    return tuple(float(sizes[name]) for name in features)


def read_covariance(told: Declared | None, features: Sequence[str]) -> tuple[tuple[float, ...], ...] | None:
    """Return the covariance of the features, in their order. What was told may have more, in any order."""
    if told is None:
        return None
    data, where = told.read(), told.where
    names, rows = (data.get("columns"), data.get("covariance")) if isinstance(data, dict) else (None, None)
    if not isinstance(names, list) or not isinstance(rows, list):
        raise InputError(f'{where} must hold {{"columns": [...], "covariance": [[...]]}}.')
    square = len(rows) == len(names) and all(isinstance(row, list) and len(row) == len(names) for row in rows)
    if not square or not all(_is_number(value) for row in rows for value in row):
        raise InputError(f"{where} names {len(names)} columns and must hold as many rows of as many numbers.")
    twice = next((name for name in names if names.count(name) > 1), None)
    if twice is not None:
        raise InputError(f"{where} names column {twice!r} more than once; name it once.")
    missing = next((name for name in features if name not in names), None)
    if missing is not None:
        raise InputError(f"{where} does not name feature {missing!r}; add it or leave that feature out.")
    places = [names.index(name) for name in features]
    _check_covariance(where, features, [[float(rows[i][j]) for j in places] for i in places])
    return tuple(tuple(float(rows[i][j]) for j in places) for i in places)


def _check_covariance(where: str, features: Sequence[str], rows: list[list[float]]) -> None:
    for i, name in enumerate(features):
        if not rows[i][i] > 0:
            raise InputError(f"{where} gives no positive variance for feature {name!r}.")
        for j in range(i):
            size = math.sqrt(rows[i][i]) * math.sqrt(rows[j][j])
            if not (abs(rows[i][j] - rows[j][i]) <= 1e-6 * size and abs(rows[i][j]) <= size * (1 + 1e-6)):
                raise InputError(
                    f"{where} has no covariance of {features[j]!r} and {name!r}: it must be the same "
                    "both ways, and no more than their variances allow."
                )


def read_categories(told: Declared | None, categorical: Sequence[str]) -> dict[str, Categories]:
    """Return the lists of values of the categorical columns that are declared."""
    if told is None:
        return {}
    lists = told.read()
    if not isinstance(lists, dict) or not all(isinstance(values, list) for values in lists.values()):
        raise InputError(f'{told.where} must hold {{"column": [value, ...], ...}}.')
    stray = next((name for name in lists if name not in categorical), None)
    if stray is not None:
        raise InputError(f"{told.where} lists values of column {stray!r}, which --categorical does not name.")
    return _checked(told, lists)


def read_items(told: Declared | None, column: str) -> dict[str, Categories]:
    """Return the items, if they are declared, as the list of values of their column."""
    if told is None:
        return {}
    values = told.read()
    if not isinstance(values, list):
        raise InputError(f"{told.where} must hold a list, [item, ...].")
    return _checked(told, {column: values})


def _checked(told: Declared, lists: dict[str, Any]) -> dict[str, Categories]:
    from privrep.data.categories import check_lists

    try:
        return check_lists(lists)
    except InputError as error:
        raise InputError(f"{told.where}: {error}") from None


def read_classes(given: str | Declared, kind: str) -> Categories:
    """Return the classes A,B, or the list in a file, in the kind that the target column declares, where it does."""
    from privrep.data.categories import check_classes

    where, values = "--classes", given.value if isinstance(given, Declared) else _as_kind(given.split(","), kind)
    if isinstance(given, Declared):
        where = given.where
    elif (path := Path(given)).is_file() or path.suffix == ".json":
        values = Declared(f"{where}: {path}", path).read()
        if not isinstance(values, list):
            raise InputError(f"{where}: {path} must hold a list, [class, ...].")
    try:
        return check_classes(values)
    except InputError as error:
        raise InputError(f"{where}: {error}") from None


def _as_kind(texts: list[str], kind: str) -> list[Any]:
    """Return words of the command line as values of a kind; unchanged where one of them is of another kind."""
    stripped = [text.strip() for text in texts]
    try:
        if kind == "booleans":
            return [{"false": False, "true": True}[text.lower()] for text in stripped]
        return [int(text) for text in stripped] if kind == "integers" else stripped
    except (ValueError, KeyError):
        return stripped


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and abs(value) <= sys.float_info.max
