"""Heads in a folder: folder/private/heads.parquet, which its owner alone can read.

Heads of tables (`heads.Heads`), of networks (`neural.OwnHeads`) and of selections (`margin_fitting.MarginHeads`) have
columns of their own in a file of that name.
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq
from numpy.typing import NDArray

from privrep.boundary import writing
from privrep.errors import InputError
from privrep.heads.heads import Heads
from privrep.heads.margin_fitting import MarginHeads
from privrep.typing import Array

if TYPE_CHECKING:
    from privrep.heads.neural import OwnHeads

FILE = "private/heads.parquet"


class HeadSizes(NamedTuple):
    """Numbers of a row as heads on the shared part see it, numbers of a row as heads alone do, and classes."""

    shared: int
    own: int
    classes: int


def has_heads(folder: Path) -> bool:
    """Return whether a model folder holds heads; a copy that was published does not."""
    return (folder / FILE).is_file()


def write_heads(heads: Heads | MarginHeads | OwnHeads, folder: Path) -> None:
    """Write heads to a model folder, for the owner's eyes only, as a whole or not at all."""
    if isinstance(heads, Heads):
        table = _tabulate_heads(heads)
    else:
        table = _tabulate_margin(heads) if isinstance(heads, MarginHeads) else _tabulate_network(heads)
    path = folder / FILE
    path.parent.mkdir(mode=0o700, exist_ok=True)
    temporary = path.with_name(f"{path.name}.tmp")
    with writing(path):
        os.close(os.open(temporary, os.O_CREAT | os.O_WRONLY | os.O_TRUNC, 0o600))
        pq.write_table(table, temporary)
        os.replace(temporary, path)


def _tabulate_heads(heads: Heads) -> pa.Table:
    """Return heads of a table as an Arrow table with a row for each head."""
    own = [None if p < 0 else heads.own[p] for p in heads.own_position]
    ids = ids_to_arrow(heads.ids)
    listed = {name: value for name in _LISTS if (value := getattr(heads, name)) is not None}
    lists = {name: _make_lists(value) for name, value in listed.items() if value.shape[1]}
    empty = {name: "0" for name, value in listed.items() if not value.shape[1]}  # Arrow has no lists of length 0
    if heads.means is not None:
        lists["means"] = _make_lists(np.repeat(heads.means, heads.targets, axis=0))
    return pa.table(
        {
            "user": ids.take(pa.array(np.repeat(np.arange(len(ids)), heads.targets))),
            "kind": pa.array(heads.kind),
            "intercept": pa.array(heads.intercept),
            **lists,
            "own": pa.array(own, type=pa.list_(pa.float64())),
        },
        metadata={"features": str(heads.own.shape[1]), "targets": str(heads.targets), **empty},
    )


_LISTS = ("shared", "origin", "doubt")  # a list of numbers for each head; heads without a prior have the first alone


def _make_lists(numbers: Array) -> pa.Array:
    """Return numbers (heads, length) as a column of lists of that length."""
    return pa.FixedSizeListArray.from_arrays(pa.array(numbers.ravel()), numbers.shape[1])


def _tabulate_network(heads: OwnHeads) -> pa.Table:
    """Return heads of a network as an Arrow table with a row for each user."""
    rows = list(zip(heads.alone.tolist(), heads.position.tolist(), strict=True))
    kind = pa.list_(pa.float32())
    return pa.table(
        {
            "user": ids_to_arrow(heads.ids),
            "alone": pa.array(heads.alone),
            "scale": pa.array(heads.scale, type=pa.float32()),
            "prior": pa.array(list(heads.prior), type=kind),
            "shared": pa.array([None if alone else heads.shared[p].ravel() for alone, p in rows], type=kind),
            "own": pa.array([heads.own[p].ravel() if alone else None for alone, p in rows], type=kind),
        },
        metadata={"shared": str(heads.shared.shape[1]), "own": str(heads.own.shape[1])},
    )


def _tabulate_margin(heads: MarginHeads) -> pa.Table:
    return pa.table({"user": ids_to_arrow(heads.ids), "weights": _make_lists(heads.weights)})


def read_margin_heads(folder: Path, rank: int) -> MarginHeads:
    """Read the heads of a selection; raise ValueError if they are of another rank, or hold no finite numbers."""
    table = pq.read_table(folder / FILE)
    weights = _read_lists(table, "weights")
    if weights is None or weights.shape[1] != rank or not np.isfinite(weights).all():
        raise ValueError("its heads are of another representation")
    return MarginHeads(_read_ids(table), weights)


def read_heads(folder: Path) -> Heads:
    """Read the heads of a table's model."""
    table = pq.read_table(folder / FILE)
    d, q = int(table.schema.metadata[b"features"]), int(table.schema.metadata[b"targets"])
    own = table["own"].combine_chunks()
    has_own = np.asarray(own.is_valid())
    shared, origin, doubt = (_read_lists(table, name) for name in _LISTS)
    if shared is None:
        raise KeyError("shared")
    means = _read_lists(table, "means")
    return Heads(
        _read_ids(table, q),
        _read_column(table, "kind", np.int8),
        _read_column(table, "intercept", np.float64),
        shared,
        np.where(has_own, np.cumsum(has_own) - 1, -1),
        np.asarray(own.flatten(), dtype=np.float64).reshape(int(has_own.sum()), d),
        q,
        origin,
        doubt,
        None if means is None else means[::q],
    )


def _read_column(table: pa.Table, name: str, kind: type[np.generic]) -> NDArray[Any]:
    """Return a column of numbers or of yes and no, (rows,). Raise ValueError if it is another or lacks some."""
    values = table[name]
    if values.null_count or pa.types.is_nested(values.type):
        raise ValueError(f"its {name} lack some values, or are lists")
    return np.asarray(values.to_numpy()).astype(kind, casting="same_kind")


def _read_ids(table: pa.Table, targets: int = 1) -> NDArray[Any]:
    """Return the ids of users, (users,). Raise ValueError if one is missing or there are two heads of one.

    Args:
        table: with a row for each user, or for each of its targets.
        targets: rows of a user.
    """
    users = table["user"]
    if users.null_count or pa.types.is_nested(users.type) or pa.types.is_dictionary(users.type):
        raise ValueError("its users have no ids, or ids that are lists")
    if not len(users):
        raise ValueError("it has no head")
    if targets < 1 or pc.count_distinct(users).as_py() * targets != len(users):
        raise ValueError("it has two heads of one user")
    return np.asarray(users.to_numpy(zero_copy_only=False)[::targets])


def _read_lists(table: pa.Table, name: str) -> Array | None:
    """Return a column of lists as a matrix (heads, length); None if the file has no column of that name."""
    if name in table.column_names:
        if table[name].null_count:
            raise ValueError(f"its {name} lack some lists")
        numbers = np.asarray(table[name].combine_chunks().flatten(), dtype=np.float64)
        return numbers.reshape(len(table), len(numbers) // max(len(table), 1))
    return np.zeros((len(table), 0)) if table.schema.metadata.get(name.encode()) == b"0" else None


def read_own_heads(folder: Path, sizes: HeadSizes) -> OwnHeads:
    """Read the heads of a network's model; raise ValueError if they belong to another shared part.

    Args:
        folder: of the model.
        sizes: of the heads, as the shared part says.
    """
    from privrep.heads.neural import OwnHeads

    table = pq.read_table(folder / FILE)
    alone = _read_column(table, "alone", np.bool_)
    wanted = {"own": sizes.own, "shared": sizes.shared}
    if any(int(table.schema.metadata[name.encode()]) != size for name, size in wanted.items()):
        raise ValueError("its heads are of another shared part")
    scale = np.where(alone, 0.0, 1.0).astype(np.float32)
    heads = OwnHeads(
        _read_ids(table),
        alone,
        _read_column(table, "scale", np.float32) if "scale" in table.column_names else scale,
        _read_numbers(table, "prior").reshape(len(table), sizes.classes),
        np.where(alone, np.cumsum(alone), np.cumsum(~alone)) - 1,
        _read_numbers(table, "shared").reshape(int((~alone).sum()), sizes.shared, sizes.classes),
        _read_numbers(table, "own").reshape(int(alone.sum()), sizes.own, sizes.classes),
    )
    if not all(np.isfinite(each).all() for each in (heads.scale, heads.prior, heads.shared, heads.own)):
        raise ValueError("its heads hold numbers that are not finite")
    return heads


def _read_numbers(table: pa.Table, name: str) -> NDArray[np.float32]:
    """Return all numbers of a column of lists, one after another."""
    return np.array(table[name].combine_chunks().flatten(), dtype=np.float32)


def ids_to_arrow(ids: NDArray[Any]) -> pa.Array:
    """Return the ids of users (users,) as a column; raise InputError if they cannot be read back as they are."""
    try:
        array = pa.array(ids.tolist() if ids.dtype == object else ids)
        if array.to_numpy(zero_copy_only=False).tolist() == ids.tolist():
            return array
    except (pa.ArrowException, ValueError, TypeError):
        pass
    raise InputError("a model can be saved only if its user ids are all integers or all strings; rename the users.")
