"""Users with missing values, users who lose all rows, and weights: nobody changes anybody else.

That engines agree about them, `test_engines` says.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from panel import panel_questions
from test_alone_in_a_crowd import numbers

from privrep.data import readers, table
from privrep.data.missing import Missing
from privrep.data.readers import TableSource, read_table
from privrep.heads.fitting import fit_heads
from privrep.linear.steps import FeatureSizes
from privrep.local.representation import Representation
from privrep.local.transform import FeatureTransform
from privrep.privacy.contributions import Counts
from privrep.privacy.protocol import UserBatch
from privrep.users import streaming
from privrep.users.memory import InMemoryUsers
from privrep.users.performance import Performance
from privrep.users.streaming import StreamingUsers

D = 3
QUESTIONS = {name: panel_questions(D, 2, True)[name] for name in panel_questions(D, 2, True)}


def made(share: float, users: int = 40, seed: int = 1, sort: bool = True) -> dict[str, np.ndarray]:
    rng = np.random.default_rng(seed)
    who = np.repeat(np.arange(users), rng.integers(1, 8, users))
    who = who if sort else rng.permutation(who)
    X = 5 + rng.normal(size=(len(who), D)) * [1.0, 10.0, 0.1]
    y = X @ [1.0, 0.2, 3.0] + rng.normal(size=len(who))
    weight = rng.choice([0.0, 0.5, 1.0, 1.7, 3.0], len(who))
    X[rng.random(X.shape) < share] = np.nan
    y[rng.random(len(y)) < share / 2] = np.nan
    y[np.isin(who, [3, 4, users - 1])] = np.nan  # users who lose all rows, also the last
    return {"user": who, "y": y, **{f"x{j}": X[:, j] for j in range(D)}, "w": weight}


@pytest.mark.parametrize("sort", [True, False])
@pytest.mark.parametrize("suffix", [".parquet", ".csv"])
@pytest.mark.parametrize(
    "options",
    [{}, {"weight": "w"}, {"missing": Missing("drop")}, {"missing": Missing("impute", (1,)), "weight": "w"}],
    ids=["impute", "weights", "drop", "indicator and weights"],
)
def test_files_are_read_alike_in_memory_and_in_a_stream(
    sort: bool, suffix: str, options: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(readers, "BATCH_BYTES", 4000)
    for module in (table, streaming):
        monkeypatch.setattr(module, "choose_block_rows", lambda features, is_sparse=False: 9)
    rows = pa.table(made(0.3, 90, sort=sort))
    path = tmp_path / f"t{suffix}"
    if suffix == ".csv":
        rows.to_pandas().to_csv(path, index=False)
    else:
        pq.write_table(rows, path)
    source = TableSource(path, "user", "y", [f"x{j}" for j in range(D)], **options)
    whole = read_table(source)
    with StreamingUsers.open(source, Performance(workdir=tmp_path)) as users:
        assert users.facts == InMemoryUsers(whole).facts
        streamed, blocks = list(users.blocks()), list(whole.blocks())
        assert len(streamed) == len(blocks) > 10
        for one, other in zip(streamed, blocks, strict=True):
            for name in ("X", "y", "offsets", "ids"):
                np.testing.assert_array_equal(getattr(one, name), getattr(other, name))
    assert whole.n_users == 90
    assert (whole.sizes == 0).sum() >= 3


@pytest.mark.parametrize("name", QUESTIONS)
def test_a_user_sends_the_same_alone_and_in_company(name: str) -> None:
    """To the last bit, of rows as engines hand them to steps: with NaN in columns without any value, or filled."""
    from privrep.users.summing import clean_rows

    step = QUESTIONS[name][0]
    rng = np.random.default_rng(7)
    for m in (1, 2, 5):
        X, y = rng.normal(size=(12, m, D)), rng.normal(size=(12, m))
        X[rng.random(X.shape) < 0.4] = np.nan
        together = step(UserBatch(*clean_rows(X, y, step.spec.fill)))
        for user in range(12):
            one = clean_rows(X[user : user + 1], y[user : user + 1], step.spec.fill)
            for key, sent in step(UserBatch(*one)).items():
                company = numbers(together[key], 12)[user]
                assert np.array_equal(numbers(sent, 1)[0], company, equal_nan=True), (key, m, user)


@pytest.mark.parametrize("name", QUESTIONS)
def test_a_neighbour_with_gaps_changes_a_sum_by_no_more_than_its_sensitivity(name: str) -> None:
    step, bounds = QUESTIONS[name]
    rng = np.random.default_rng(11)
    X, y = rng.normal(size=(5, 4, D)), rng.normal(size=(5, 4))

    def sums(row: Any, target: Any) -> dict[str, np.ndarray]:
        rows, targets = X.copy(), y.copy()
        rows[2], targets[2] = row, target
        held = table.UserTable(rows.reshape(-1, D), targets.ravel(), np.arange(0, 21, 4), np.arange(5))
        return {key: one.exact_numbers for key, one in InMemoryUsers(held, Performance(1)).sums(step, bounds).items()}

    for trial in range(30):
        pair = []
        for _ in range(2):
            row, target = 10.0 ** rng.integers(-3, 6) * rng.normal(size=(4, D)), rng.normal(size=4)
            row[rng.random(row.shape) < rng.choice([0.0, 0.3, 0.9, 1.0])] = np.nan
            pair.append(sums(row, target))
        for key, bound in bounds.items():
            change = float(np.linalg.norm(pair[0][key] - pair[1][key]))
            most = bound.norm * (np.sqrt(2.0) if bound.acute else 2.0)
            assert change <= most * (1 + 1e-9), (key, trial)


def test_histograms_leave_out_columns_without_a_value() -> None:
    X = np.random.default_rng(0).normal(size=(6, 4, D))
    X[:3, :, 1] = np.nan
    counts = FeatureSizes(True)(UserBatch(X, np.zeros((6, 4))))["sizes"]
    assert isinstance(counts, Counts)
    assert (counts.cells[:3, 1] == -1).all()
    assert (counts.cells[3:] >= 0).all()
    step, bounds = QUESTIONS["column sizes"]
    held = table.UserTable(X.reshape(-1, D), np.ones(24), np.arange(0, 25, 4), np.arange(6))
    found = InMemoryUsers(held).sums(step, bounds)
    assert found["levels"].exact_numbers.reshape(D, -1).sum(axis=1).tolist() == [6, 3, 6]


def test_without_a_prior_users_who_lost_all_rows_have_no_head() -> None:
    held = table.UserTable(np.ones((4, 2)), np.arange(4.0), np.array([0, 2, 2, 4]), np.array([5, 6, 7]))
    learned = Representation(np.eye(2)[:, :1], FeatureTransform.plain(2), 0.1)
    heads = fit_heads(held.blocks(), learned, keep_means=2)
    assert heads.ids.tolist() == [5, 7]
    assert heads.means is not None
    assert heads.means.shape == (2, 2)
