"""Nodes whose rows have missing values and weights: they learn what one file would, and fill alike."""

from __future__ import annotations

from pathlib import Path

import numpy as np

from federation import BUDGET, COLUMNS, FEATURES, NUMBERS, federation, made_up, write_files
from privrep.federated.task import TableTask, task_from_json
from privrep.models import model as models
from privrep.models.description import Config


def test_nodes_with_gaps_learn_what_one_file_would(tmp_path: Path) -> None:
    from dataclasses import replace

    rows = made_up()
    rng = np.random.default_rng(0)
    for name in NUMBERS[1:]:
        rows[name][rng.random(len(rows["y"])) < 0.2] = np.nan
    rows[NUMBERS[2]][:12] = np.nan  # two users without a value in a column
    rows["y"][rng.random(len(rows["y"])) < 0.1] = np.nan
    rows["w"] = rng.integers(1, 3, len(rows["y"])).astype(float)
    columns = replace(COLUMNS, indicators=(3,), weight="w")
    task = TableTask(Config(1, **BUDGET), columns)
    assert task.features == FEATURES + 1
    assert task_from_json(task.to_json()) == task
    path, paths = write_files(tmp_path / "data", rows)
    with federation(task, paths, tmp_path / "nodes") as fed:
        fed.run(tmp_path / "server")
    with task.open(path) as users:
        task.learn(users, tmp_path / "one", lambda page: None)
        assert task.keep(tmp_path / "one", users) == 36
    one, together = models.load(tmp_path / "one"), models.load(tmp_path / "server")
    assert one.ledger.report().epsilon == together.ledger.report().epsilon
    assert np.array_equal(together.representation.matrix, one.representation.matrix)
    first = models.load(tmp_path / "nodes" / "a" / "model").heads
    assert first is not None
    assert one.heads is not None
    assert first.means is not None
    np.testing.assert_array_equal(first.means, one.heads.means[:16])
    assert np.isnan(first.means[0, 2])
