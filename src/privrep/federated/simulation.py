"""Run a federation in one process, by the same apps and messages without a network, and split one file for it."""

from __future__ import annotations

import csv
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
from numpy.typing import NDArray

from privrep.data.dialects import read_text_rows
from privrep.data.files import find_file_dialect, find_format, read_schema
from privrep.errors import InputError
from privrep.federated.config import FederationSettings
from privrep.federated.node import Host
from privrep.federated.server import run_federation
from privrep.federated.task import Task
from privrep.federated.wire.in_process import LocalNodes


def simulate(
    task: Task,
    data: Sequence[Path],
    folder: Path,
    settings: FederationSettings,
    *,
    say: Callable[[str], None],
    on_page: Callable[[str], None],
) -> None:
    """One node for each file. The model is in `folder`, what each node keeps in folder.nodes/NAME."""
    places = folder.with_name(folder.name + ".nodes")
    with ExitStack() as open_:
        apps = {}
        for number, path in enumerate(data, start=1):
            name = f"node-{number:0{len(str(len(data)))}d}"
            place = places / name
            place.mkdir(mode=0o700, parents=True, exist_ok=True)
            host = Host(path, place, say=_silent, simulation=True)
            open_.callback(host.close)
            apps[name] = host.app()
        nodes = LocalNodes(apps)
        open_.callback(nodes.grid.close)
        run_federation(nodes, task, folder, settings, len(apps), say, on_page)


def _silent(what: str) -> None:
    pass


def split_by_user(path: Path, user: str, nodes: int, folder: Path) -> list[Path]:
    """Files in this folder, one for each node: the first user in the order of the ids goes to the first, and so on.

    The same file is always dealt the same way. `user` is the column of the ids; of an .npz archive, the array.
    """
    if nodes < 1:
        raise InputError(f"--nodes must be 1 or more. Got {nodes} instead.")
    if path.suffix.lower() == ".npz":
        return _deal_arrays(path, user, nodes, folder)
    kind = find_format(path)
    found = read_schema(path, user, 1 << 20)
    if user not in found.names:
        raise InputError(f"{path} has no column {user!r}, which names the user of each row.")
    parts = [folder / f"node-{number}.{kind}" for number in range(1, nodes + 1)]
    if kind == "parquet":
        rows = pq.read_table(path)
        where = _nodes_of(rows[user].to_numpy(zero_copy_only=False), nodes, path)
        for number, part in enumerate(parts):
            pq.write_table(rows.filter(pa.array(where == number)), part)
        return parts
    dialect = find_file_dialect(path, user)
    header, *lines = read_text_rows(path, dialect)
    place = header.index(user)
    where = _nodes_of(np.array([line[place] for line in lines]), nodes, path)
    with ExitStack() as files:
        how: Any = {"lineterminator": "\n", "delimiter": dialect.delimiter}
        writers = [csv.writer(files.enter_context(_text(part)), **how) for part in parts]
        for writer in writers:
            writer.writerow(header)
        for number, line in zip(where.tolist(), lines, strict=True):
            writers[number].writerow(line)
    return parts


def _text(path: Path) -> Any:
    return open(path, "w", newline="", encoding="utf-8", errors="surrogateescape")


def _deal_arrays(path: Path, user: str, nodes: int, folder: Path) -> list[Path]:
    """Of an archive: arrays with an entry for each row are dealt, others go to all nodes."""
    try:
        with np.load(path) as archive:
            arrays = {name: archive[name] for name in archive.files}
    except (ValueError, OSError) as error:
        raise InputError(f"{path} cannot be read as a NumPy archive ({str(error).splitlines()[0]}).") from None
    if user not in arrays or arrays[user].ndim != 1:
        raise InputError(f"{path} has no list {user!r}, which names the user of each row.")
    where, parts = _nodes_of(arrays[user], nodes, path), []
    for number in range(nodes):
        parts.append(folder / f"node-{number + 1}.npz")
        chosen = where == number
        dealt = {n: a[chosen] if a.ndim and len(a) == len(chosen) else a for n, a in arrays.items()}
        np.savez(parts[-1], **dealt)
    return parts


def _nodes_of(ids: NDArray[Any], nodes: int, path: Path) -> NDArray[np.int64]:
    """The node of each row, from 0."""
    try:
        users, place = np.unique(ids, return_inverse=True)
    except TypeError:
        raise InputError(f"the users of {path} have ids of several kinds, or none; give every row one.") from None
    if len(users) < nodes:
        raise InputError(f"{path} has {len(users):,} users, fewer than {nodes:,} nodes; take fewer --nodes.")
    return np.asarray(place.reshape(-1) % nodes, dtype=np.int64)
