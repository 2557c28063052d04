"""A federation in one process: the same apps and messages, without a network."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import ExitStack
from pathlib import Path

from privrep.federated.node import Host
from privrep.federated.server import run_federation
from privrep.federated.settings import FederationSettings
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
