"""Missing values and weights: how they are filled and copied inside users, and what files with them become."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy import sparse

from privrep.data import readers
from privrep.data.missing import Missing, MissingCounts, compute_own_means, fill_missing
from privrep.data.readers import TableSource, read_checked_batches, read_table
from privrep.data.sparse import SparseRows
from privrep.data.table import UserTable
from privrep.data.weights import check_weights, thin_rows
from privrep.errors import InputError
from privrep.users.summing import clean_rows


def holes(users: int, m: int, d: int, dtype: Any = np.float64, seed: int = 0) -> np.ndarray:
    """Rows of users, a third of whose values are missing, and of every third user a whole column."""
    rng = np.random.default_rng(seed)
    X = (rng.normal(size=(users, m, d)) * 10.0 ** rng.integers(-3, 4, d)).astype(dtype)
    X[rng.random(X.shape) < 0.3] = np.nan
    X[::3, :, 1] = np.nan
    return X


def test_a_missing_value_is_its_users_own_mean_else_the_public_one() -> None:
    X = np.array([[[1.0, np.nan], [3.0, np.nan], [np.nan, np.nan]], [[5.0, 7.0], [5.0, 8.0], [5.0, np.nan]]])
    wanted = np.array([[[1, 9], [3, 9], [2, 9]], [[5, 7], [5, 8], [5, 7.5]]], dtype=float)
    np.testing.assert_array_equal(fill_missing(X, np.array([4.0, 9.0])), wanted)
    np.testing.assert_array_equal(fill_missing(X, 0.0)[0, :, 1], 0.0)
    assert np.isnan(fill_missing(X, math.nan)[0, :, 1]).all()
    np.testing.assert_array_equal(compute_own_means(X), [[2, np.nan], [5, 7.5]])
    assert fill_missing(wanted, 0.0) is wanted


@pytest.mark.parametrize("dtype", [np.float64, np.float32])
@pytest.mark.parametrize("fill", [0.0, math.nan, np.linspace(-3, 3, 5)])
@pytest.mark.parametrize("m", [1, 2, 3, 7, 40])
def test_rows_are_filled_alike_alone_and_in_company_dense_and_sparse(dtype: Any, fill: Any, m: int) -> None:
    X = holes(23, m, 5, dtype)
    together = fill_missing(X, fill)
    assert together.dtype == dtype
    for user in range(len(X)):
        alone = fill_missing(np.ascontiguousarray(X[user : user + 1]), fill)
        assert alone.tobytes() == together[user : user + 1].tobytes()
    public = np.nan_to_num(fill)
    rows = SparseRows(sparse.csr_array(X.reshape(-1, 5)), m)
    filled = fill_missing(rows, fill)
    assert filled.matrix.has_canonical_format
    np.testing.assert_allclose(filled.dense(), fill_missing(X, public), rtol=1e-5, atol=1e-12)
    for user in range(len(X)):
        one = fill_missing(SparseRows(sparse.csr_array(X[user]), m), fill)
        assert one.dense().tobytes() == filled.dense()[user : user + 1].tobytes()


def test_infinity_and_overflow_are_users_without_rows_and_nobody_elses_business() -> None:
    X, y = holes(9, 4, 3), np.ones((9, 4))
    X[2, 0, 0], X[5, :, 2] = np.inf, [np.nan, 1e308, 1e308, 1e308]
    for fill in (0.0, math.nan, np.ones(3)):
        rows, targets = clean_rows(X, y, fill)
        assert not rows[[2, 5]].any()
        assert not targets[[2, 5]].any()
        others = [0, 1, 3, 4, 6, 7, 8]
        np.testing.assert_array_equal(rows[others], fill_missing(X[others], fill))


# Weights


@settings(max_examples=200, deadline=None)
@given(
    st.lists(st.lists(st.floats(0, 12, allow_subnormal=False), min_size=1, max_size=9), min_size=1, max_size=8),
    st.sampled_from([0.5, 2.0, 8]),
)
def test_rows_stay_by_their_users_own_weights_alone(users: list[list[float]], factor: float) -> None:
    sizes = [len(user) for user in users]
    begins = np.concatenate([[0], np.cumsum(sizes)[:-1]])
    weights = np.concatenate([np.array(user) for user in users])
    together = thin_rows(weights, begins)
    assert thin_rows(factor * weights, begins).tolist() == together.tolist()
    for start, user in zip(begins, users, strict=True):
        own, largest = together[start : start + len(user)], max(user)
        assert own.tolist() == thin_rows(np.array(user), np.zeros(1, np.int64)).tolist()
        assert not own[np.array(user) == 0].any()
        if largest > 1e-300:
            assert own[np.array(user) == largest].all()
            assert abs(own.sum() - sum(user) / largest) <= 0.5 + 1e-5 * len(user)


def test_a_row_of_half_the_weight_stays_half_as_often() -> None:
    weights = np.where(np.arange(4000) % 3 == 0, 2.0, 1.0)
    begins = np.arange(0, 4000, 40)
    kept = thin_rows(weights, begins)
    assert kept[weights == 2].all()
    assert abs(kept[weights == 1].mean() - 0.5) < 0.02


def test_equal_weights_are_none_and_weight_zero_is_a_row_that_is_not_there() -> None:
    X, y, groups = np.arange(100.0).reshape(50, 2), np.arange(50.0), np.repeat([3, 1, 2], [10, 20, 20])
    there = np.arange(50) % 3 > 0
    for weights, rows in ((2.0 * (groups + 1), np.full(50, True)), (0.3 * there, there)):
        table, wanted = UserTable.from_rows(X, y, groups, weights), UserTable.from_rows(X[rows], y[rows], groups[rows])
        for name in ("X", "y", "offsets", "ids"):
            np.testing.assert_array_equal(getattr(table, name), getattr(wanted, name))
    none = UserTable.from_rows(X, y, groups, np.where(groups == 1, 0.0, 1.0))
    assert none.ids.tolist() == [1, 2, 3]
    assert none.sizes.tolist() == [0, 20, 10]


@pytest.mark.parametrize(("bad", "words"), [(-1.0, "1 negative"), (np.nan, "1 missing"), (np.inf, "1 infinite")])
def test_weights_that_are_none_are_counted(bad: float, words: str) -> None:
    with pytest.raises(InputError, match=f"^the weights must be numbers from 0; {words}"):
        check_weights(np.array([1.0, 2.0, bad]), "the weights")


# Files


def frame() -> pd.DataFrame:
    return pd.DataFrame(
        {
            "user": [2, 1, 2, 3, 1, 3],
            "y": [1.0, 2.0, np.nan, np.nan, 5.0, np.nan],
            "z": [1.0, np.nan, 3.0, 4.0, 5.0, 6.0],
            "a": [np.nan, 1.0, 2.0, 3.0, 4.0, 5.0],
            "b": pd.array([1, 2, 3, None, 5, 6], dtype="Int64"),
            "w": [2.0, 1.0, 1.0, 1.0, 0.0, 1.0],
        }
    )


@pytest.fixture(params=["t.parquet", "t.csv"])
def path(request: pytest.FixtureRequest, tmp_path: Path) -> Path:
    made = tmp_path / request.param
    frame().to_csv(made, index=False) if made.suffix == ".csv" else frame().to_parquet(made, index=False)
    return made


def test_rows_without_a_target_are_left_out_and_their_users_stay(path: Path) -> None:
    table = read_table(TableSource(path, "user", "y", ["a", "b"]))
    assert table.ids.tolist() == [1, 2, 3]
    assert table.sizes.tolist() == [2, 1, 0]
    np.testing.assert_array_equal(table.X, [[1, 2], [4, 5], [np.nan, 1]])
    assert table.y.tolist() == [2.0, 5.0, 1.0]
    both = read_table(TableSource(path, "user", ["y", "z"], ["a", "b"]))
    assert both.sizes.tolist() == [1, 1, 0]


def test_rows_to_predict_all_stay(path: Path) -> None:
    assert read_table(TableSource(path, "user", None, ["a"])).n_rows == 6


def test_features_are_dropped_refused_or_marked(path: Path) -> None:
    dropped = read_table(TableSource(path, "user", "z", ["a", "b"], missing=Missing("drop")))
    assert dropped.sizes.tolist() == [1, 1, 1]
    assert not np.isnan(dropped.X).any()
    source = TableSource(path, "user", "z", ["a", "b"], missing=Missing("drop", (0,)))
    assert source.feature_names == ("a", "b", "a is missing")
    marked = read_table(source)
    assert marked.sizes.tolist() == [1, 2, 1]
    assert marked.X[:, 2].tolist() == np.isnan(marked.X[:, 0]).astype(float).tolist() == [0, 1, 0, 0]
    with pytest.raises(InputError, match=r"misses values of a \(1\), b \(1\), and missing values are refused"):
        read_table(TableSource(path, "user", "z", ["a", "b"], missing=Missing("refuse")))
    with pytest.raises(InputError, match=r"misses values of b \(1\), and"):
        read_table(TableSource(path, "user", "z", ["a", "b"], missing=Missing("refuse", (0,))))


def test_weights_of_a_file(path: Path) -> None:
    source = TableSource(path, "user", "z", ["a"], weight="w")
    assert "w" in source.columns
    table = read_table(source)
    assert table.sizes.tolist() == [0, 2, 2]  # of user 1 one row has no target, and one weight 0
    assert table.y.tolist() == [1, 3, 4, 6]
    assert TableSource(path, "user", "z", weight="w").feature_names == ("y", "a", "b")
    with pytest.raises(InputError, match="contains 'w', which is the column of weights"):
        TableSource(path, "user", "z", ["a", "w"], weight="w")
    with pytest.raises(InputError, match=r"column 'y' of .* must be numbers from 0; 3 missing"):
        read_table(TableSource(path, "user", "z", ["a"], weight="y"))


def test_what_was_missing_is_counted(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(readers, "BATCH_BYTES", 400)
    counts = MissingCounts()
    assert (
        sum(batch.num_rows for batch in read_checked_batches(TableSource(path, "user", "y", ["a", "b"]), counts)) == 6
    )
    assert counts.words() == ["3 rows of 6 left out: no target", "missing values filled, inside each user: a (1)"]
    counts = MissingCounts()
    list(read_checked_batches(TableSource(path, "user", "z", ["a", "b"], missing=Missing("drop")), counts))
    assert counts.words() == [
        "1 row of 6 left out: no target",
        "2 rows left out for missing values of a (1), b (1)",
    ]


def test_a_policy_that_is_none_is_refused() -> None:
    with pytest.raises(InputError, match=r"missing must be one of impute, drop, refuse\. Got 'mean' instead"):
        Missing("mean")
    with pytest.raises(InputError, match="one indicator"):
        Missing(indicators=(1, 1))


def test_booleans_with_gaps_are_numbers(tmp_path: Path) -> None:
    data = pd.DataFrame(
        {"user": [1, 1, 2], "y": [1.0, 2.0, 3.0], "yes": pd.array([True, None, False], dtype="boolean")}
    )
    data.to_parquet(tmp_path / "t.parquet")
    np.testing.assert_array_equal(read_table(TableSource(tmp_path / "t.parquet", "user", "y")).X[:, 0], [1, np.nan, 0])
