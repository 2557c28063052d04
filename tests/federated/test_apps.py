"""The apps for those who run Flower themselves: a new process for every message, so a node must know its run again."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

pytest.importorskip("flwr")

from flwr.app import Context, Message, RecordDict

from federation import FEATURES, NODES, NUMBERS, made_up, write_files
from privrep.errors import InputError
from privrep.federated import apps
from privrep.federated.task import TableTask
from privrep.federated.wire.in_process import LocalGrid
from privrep.models import model as models
from privrep.models.learning import learn


def context(node: int, node_config: dict[str, Any], run_config: dict[str, Any]) -> Context:
    return Context(1, node, node_config, RecordDict(), run_config)


def test_the_apps_learn_what_one_place_learns(tmp_path: Path) -> None:
    whole, files = write_files(tmp_path / "data", made_up())
    folders = [tmp_path / name for name in NODES]
    (tmp_path / "federate.toml").write_text(
        "[privacy]\nepsilon = 20.0\ndelta = 1e-5\nseed = 1\n[model]\nkind = 'table'\nuser = 'user'\ntarget = 'y'\n"
        f"features = {list(NUMBERS)}\nrank = 1\n[federation]\nmin_nodes = {len(NODES)}\n"
        "round_timeout = 1.0\npoll = 0.002\n"
    )

    def node(number: int) -> Any:
        config = {"data": str(files[number]), "folder": str(folders[number]), "simulation": True}

        def app(message: Message, given: Context) -> Message:
            return apps.client(message, context(number, config, {}))

        return app

    grid = LocalGrid({number: node(number) for number in range(len(NODES))})
    try:
        apps.server(grid, context(0, {}, {"config": str(tmp_path / "federate.toml"), "out": str(tmp_path / "out")}))
    finally:
        grid.close()
    found = models.load(tmp_path / "out")
    task = TableTask(found.config, found.columns)
    with task.open(whole) as users:
        alone = learn(users, found.config, columns=found.columns)
    assert np.array_equal(found.representation.matrix, alone.representation.matrix)
    assert found.representation.matrix.shape == (FEATURES, 1)
    for folder, users_there in zip(folders, NODES.values(), strict=True):
        heads = models.load(folder / "model").heads
        assert heads is not None
        assert len(heads.ids) == users_there
        assert folder.stat().st_mode & 0o777 == 0o700


def test_what_flower_was_not_told_is_one_sentence(tmp_path: Path) -> None:
    grid = LocalGrid({})
    with pytest.raises(InputError, match="must say config, a path"):
        apps.server(grid, context(0, {}, {"out": str(tmp_path)}))
    grid.close()


def test_a_grid_of_this_process_is_one_of_flowers() -> None:
    def echo(message: Message, given: Context) -> Message:
        return Message(message.content, reply_to=message)

    grid = LocalGrid({3: echo, 4: echo})  # type: ignore[dict-item]
    grid.set_run(grid.run)
    asked = [grid.create_message(RecordDict(), "query", number, "1") for number in grid.get_node_ids()]
    replies = grid.send_and_receive(asked, timeout=10)
    assert [reply.metadata.src_node_id for reply in replies] == [3, 4]
    assert grid.run.run_id == asked[0].metadata.run_id
    grid.close()
