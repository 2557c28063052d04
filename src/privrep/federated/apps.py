"""A server app and a client app for operators who run Flower themselves, by `flwr run` and `flower-supernode`.

    [tool.flwr.app.components]
    serverapp = "privrep.federated.apps:server"
    clientapp = "privrep.federated.apps:client"
    [tool.flwr.app.config]
    config = "/where/federate.toml"
    out = "/where/model"

A node is started with --node-config 'data="/where/rows.parquet" folder="/where/node"'. The same messages travel as with
`privrep federate`. What differs is Flower's: a node runs the code that the server sends along, a process is started for
every message, and rounds take seconds. See docs/federated.md.
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

from flwr.app import Context, Message
from flwr.clientapp import ClientApp
from flwr.serverapp import Grid, ServerApp

from privrep.errors import InputError
from privrep.federated.config import read_config
from privrep.federated.node import Host
from privrep.federated.server import run_federation

server = ServerApp()
client = ClientApp()


class GridNodes:
    """The nodes of a SuperLink that is run by others, named by Flower's numbers for them."""

    def __init__(self, grid: Grid) -> None:
        self.grid = grid

    def nodes(self) -> dict[str, int]:
        """Return Flower's number of each node that is there now, by name."""
        return {f"node-{number}": number for number in self.grid.get_node_ids()}


@server.main()
def main(grid: Grid, context: Context) -> None:
    """Run the server of a federation on a Grid that Flower hands in."""
    asked = read_config(_read_path(context.run_config, "config"))
    out = _read_path(context.run_config, "out")
    run_federation(GridNodes(grid), asked.task, out, asked.settings, None, print, print)


def _read_path(config: Any, name: str) -> Path:
    """Return the path that Flower's configuration has by this name; raise InputError if there is none."""
    if not isinstance(config.get(name), str):
        raise InputError(f"Flower's configuration must say {name}, a path.")
    return Path(config[name])


def _handle(message: Message, context: Context) -> Message:
    """Answer one message with a host that is opened for it alone."""
    folder = _read_path(context.node_config, "folder")
    folder.mkdir(parents=True, exist_ok=True, mode=0o700)
    os.chmod(folder, 0o700)
    simulation = context.node_config.get("simulation") is True
    host = Host(_read_path(context.node_config, "data"), folder, print, simulation=simulation)
    try:
        return host.make_app()(message, context)
    finally:
        host.close()


for _category, _action in ((client.query, "hello"), (client.train, "sums"), (client.query, "model")):
    _category(_action)(_handle)
