"""Run a federation in one process, with the same apps and messages but no network; split one file among its nodes."""

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

from privrep.data.archives import open_archive
from privrep.data.dialects import read_text_rows
from privrep.data.files import find_file_dialect, find_format, read_schema
from privrep.errors import InputError
from privrep.federated.config import FederationSettings
from privrep.federated.node import Host
from privrep.federated.server import run_federation
from privrep.federated.task import Task
from privrep.federated.wire.in_process import LocalNodes
from privrep.privacy.population import Account


def simulate(
    task: Task,
    data: Sequence[Path],
    folder: Path,
    settings: FederationSettings,
    *,
    say: Callable[[str], None],
    on_page: Callable[[str], None],
    account: Account | None = None,
) -> None:
    """Run server and nodes in this process, one node for each file.

    The model is written to `folder`, and each node's own files to folder.nodes/NAME.

    Args:
        task: what is learned.
        data: one file of users for each node.
        folder: the model's folder.
        settings: when a round goes on, and who adds the noise.
        say: told what happens on the server.
        on_page: told the name of each release.
        account: with the population ledger that the budget is reserved from; None: with none.
    """
    places = folder.with_name(folder.name + ".nodes")
    with ExitStack() as open_:
        apps = {}
        for number, path in enumerate(data, start=1):
            name = f"node-{number:0{len(str(len(data)))}d}"
            place = places / name
            place.mkdir(mode=0o700, parents=True, exist_ok=True)
            host = Host(path, place, say=_say_nothing, simulation=True)
            open_.callback(host.close)
            apps[name] = host.make_app()
        nodes = LocalNodes(apps)
        open_.callback(nodes.grid.close)
        run_federation(nodes, task, folder, settings, len(apps), say, on_page, account)


def _say_nothing(what: str) -> None:
    """Ignore what a node says."""
    pass


def split_by_user(path: Path, user: str, nodes: int, folder: Path) -> list[Path]:
    """Write one file for each node, and return their paths; the same file is always split the same way.

    Users are dealt in the order of their ids: the first to the first node, the second to the second, and so on.

    Args:
        path: a CSV file, a Parquet file or a NumPy archive, .npz.
        user: the column of users' ids; of an archive, the array.
        nodes: how many files to write, 1 or more.
        folder: where to write them, as node-1, node-2 and so on.
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
        where = _assign_nodes(rows[user].to_numpy(zero_copy_only=False), nodes, path)
        for number, part in enumerate(parts):
            pq.write_table(rows.filter(pa.array(where == number)), part)
        return parts
    dialect = find_file_dialect(path, user)
    header, *lines = read_text_rows(path, dialect)
    place = header.index(user)
    where = _assign_nodes(np.array([line[place] for line in lines]), nodes, path)
    with ExitStack() as files:
        how: Any = {"lineterminator": "\n", "delimiter": dialect.delimiter}
        writers = [csv.writer(files.enter_context(_open_text(part)), **how) for part in parts]
        for writer in writers:
            writer.writerow(header)
        for number, line in zip(where.tolist(), lines, strict=True):
            writers[number].writerow(line)
    return parts


def _open_text(path: Path) -> Any:
    """Open a file to write CSV to; bytes that are no UTF-8 pass through."""
    return open(path, "w", newline="", encoding="utf-8", errors="surrogateescape")


def _deal_arrays(path: Path, user: str, nodes: int, folder: Path) -> list[Path]:
    """Split a NumPy archive: arrays with one entry per row are dealt among the nodes, others go to all of them."""
    arrays = open_archive(path)
    if user not in arrays or arrays[user].ndim != 1:
        raise InputError(f"{path} has no list {user!r}, which names the user of each row.")
    where, parts = _assign_nodes(arrays[user], nodes, path), []
    for number in range(nodes):
        parts.append(folder / f"node-{number + 1}.npz")
        chosen = where == number
        dealt: dict[str, Any] = {n: a[chosen] if a.ndim and len(a) == len(chosen) else a for n, a in arrays.items()}
        np.savez(parts[-1], **dealt)
    return parts


def _assign_nodes(ids: NDArray[Any], nodes: int, path: Path) -> NDArray[np.int64]:
    """Return the node of each row, from 0, (rows,).

    Args:
        ids: the user of each row, (rows,).
        nodes: how many nodes there are; InputError if users are fewer.
        path: the file, for error sentences.
    """
    try:
        users, place = np.unique(ids, return_inverse=True)
    except TypeError:
        raise InputError(f"the users of {path} have ids of several kinds, or none; give every row one.") from None
    if len(users) < nodes:
        raise InputError(f"{path} has {len(users):,} users, fewer than {nodes:,} nodes; take fewer --nodes.")
    return np.asarray(place.reshape(-1) % nodes, dtype=np.int64)
