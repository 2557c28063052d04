"""Public facts that `privrep fit` is told: sizes and covariance of the features, lists of categories, classes."""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from privrep.errors import InputError

if TYPE_CHECKING:
    from privrep.data.categories import Categories


def read_scale(path: Path | None, features: Sequence[str]) -> tuple[float, ...] | None:
    """The size of each feature, in their order."""
    if path is None:
        return None
    sizes = _read_json("--scale", path)
    if not isinstance(sizes, dict):
        raise InputError(f'--scale: {path} must hold {{"column": size, ...}}.')
    for name in features:
        if not (_is_number(sizes.get(name)) and sizes[name] > 0):
            raise InputError(f"--scale: {path} gives no positive number for feature {name!r}.")
    return tuple(float(sizes[name]) for name in features)


def read_covariance(path: Path | None, features: Sequence[str]) -> tuple[tuple[float, ...], ...] | None:
    """The covariance of the features, in their order; the file may have them in another, and others besides."""
    if path is None:
        return None
    data = _read_json("--covariance", path)
    names, rows = (data.get("columns"), data.get("covariance")) if isinstance(data, dict) else (None, None)
    if not isinstance(names, list) or not isinstance(rows, list):
        raise InputError(f'--covariance: {path} must hold {{"columns": [...], "covariance": [[...]]}}.')
    square = len(rows) == len(names) and all(isinstance(row, list) and len(row) == len(names) for row in rows)
    if not square or not all(_is_number(value) for row in rows for value in row):
        raise InputError(
            f"--covariance: {path} names {len(names)} columns and must hold as many rows of as many numbers."
        )
    twice = next((name for name in names if names.count(name) > 1), None)
    if twice is not None:
        raise InputError(f"--covariance: {path} names column {twice!r} more than once; name it once.")
    missing = next((name for name in features if name not in names), None)
    if missing is not None:
        raise InputError(f"--covariance: {path} does not name feature {missing!r}; add it or leave that feature out.")
    places = [names.index(name) for name in features]
    _check_covariance(path, features, [[float(rows[i][j]) for j in places] for i in places])
    return tuple(tuple(float(rows[i][j]) for j in places) for i in places)


def _check_covariance(path: Path, features: Sequence[str], rows: list[list[float]]) -> None:
    for i, name in enumerate(features):
        if not rows[i][i] > 0:
            raise InputError(f"--covariance: {path} gives no positive variance for feature {name!r}.")
        for j in range(i):
            size = math.sqrt(rows[i][i]) * math.sqrt(rows[j][j])
            if not (abs(rows[i][j] - rows[j][i]) <= 1e-6 * size and abs(rows[i][j]) <= size * (1 + 1e-6)):
                raise InputError(
                    f"--covariance: {path} has no covariance of {features[j]!r} and {name!r}: it must be the same "
                    "both ways, and no more than their variances allow."
                )


def read_categories(path: Path | None, categorical: Sequence[str]) -> dict[str, Categories]:
    """The lists of values of those categorical columns that the file declares."""
    from privrep.data.categories import checked_lists

    if path is None:
        return {}
    lists = _read_json("--categories", path)
    if not isinstance(lists, dict) or not all(isinstance(values, list) for values in lists.values()):
        raise InputError(f'--categories: {path} must hold {{"column": [value, ...], ...}}.')
    stray = next((name for name in lists if name not in categorical), None)
    if stray is not None:
        raise InputError(f"--categories: {path} lists values of column {stray!r}, which --categorical does not name.")
    return _named("--categories", path, lambda: checked_lists(lists))


def read_items(path: Path | None, column: str) -> dict[str, Categories]:
    """The items, if they are declared, as the list of values of their column."""
    from privrep.data.categories import checked_lists

    if path is None:
        return {}
    values = _read_json("--items", path)
    if not isinstance(values, list):
        raise InputError(f"--items: {path} must hold a list, [item, ...].")
    return _named("--items", path, lambda: checked_lists({column: values}))


def read_classes(text: str, kind: str) -> Categories:
    """The classes A,B or those of a file, in the kind that the target column declares, where it does."""
    from privrep.data.categories import checked_classes

    path, values = Path(text), _as_kind(text.split(","), kind)
    if path.is_file() or path.suffix == ".json":
        values = _read_json("--classes", path)
        if not isinstance(values, list):
            raise InputError(f"--classes: {path} must hold a list, [class, ...].")
    try:
        return checked_classes(values)
    except InputError as error:
        raise InputError(f"--classes: {error}") from None


def _as_kind(texts: list[str], kind: str) -> list[Any]:
    """What was written on the command line as what the table holds; as it is where that is another kind."""
    stripped = [text.strip() for text in texts]
    try:
        if kind == "booleans":
            return [{"false": False, "true": True}[text.lower()] for text in stripped]
        return [int(text) for text in stripped] if kind == "integers" else stripped
    except (ValueError, KeyError):
        return stripped


def _named(option: str, path: Path, check: Any) -> dict[str, Categories]:
    try:
        lists: dict[str, Categories] = check()
    except InputError as error:
        raise InputError(f"{option}: {path}: {error}") from None
    return lists


def _read_json(option: str, path: Path) -> Any:
    try:
        return json.loads(path.read_text())
    except ValueError as error:
        raise InputError(f"{option}: {path} is not JSON ({error}).") from None


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)
