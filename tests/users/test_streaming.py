"""A file read in blocks gives what its rows in memory give, bit for bit, and leaves nothing behind."""

from __future__ import annotations

import stat
import subprocess
import sys
import threading
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
import pyarrow as pa
import pyarrow.csv
import pyarrow.parquet as pq
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from privrep.data import regroup, sources
from privrep.data.readers import TableSource, read_table
from privrep.data.table import UserTable
from privrep.errors import InputError
from privrep.heads.fitting import fit_heads
from privrep.linear.steps import SIZES, LeaveOneOutGradient, gradient_size
from privrep.local.transform import FeatureTransform
from privrep.models.description import Config
from privrep.models.learning import learn
from privrep.privacy.bounds import MAX_ROWS_PER_SUM, Bound
from privrep.privacy.columns import SparseColumns
from privrep.privacy.contributions import Vectors
from privrep.privacy.groups import Group
from privrep.privacy.protocol import Facts, StepSpec, UserBatch
from privrep.users.memory import InMemoryUsers
from privrep.users.performance import Performance
from privrep.users.streaming import StreamingUsers

D = 6


def rows_of(sizes: list[int], ids: str, dtype: Any, order: str, seed: int = 0) -> pa.Table:
    """A table of users with so many rows each, named in sorted order, with the rows in some order."""
    rng = np.random.default_rng(seed)
    n = sum(sizes)
    names = np.sort(rng.choice(10**6, len(sizes), replace=False)) - 5 * 10**5
    users = np.repeat(names, sizes)
    X, y = rng.standard_normal((n, D)).astype(dtype), rng.standard_normal(n).astype(dtype)
    if order == "shuffled":
        at = rng.permutation(n)
    elif order == "descending":
        at = np.argsort(-users, kind="stable")
    else:
        at = np.arange(n)
    column = pa.array(users[at])
    if ids == "text":
        column = pa.array([f"{'-' if u < 0 else 'é'}{abs(u):06d}" for u in users[at].tolist()])
        if order == "sorted":
            column = column.take(pa.compute.sort_indices(column))
    return pa.table({"user": column, "y": y[at], **{f"x{j}": X[at, j] for j in range(D)}})


def ragged(seed: int = 0) -> list[int]:
    """From one row to thousands: more than a block, exactly one, and small ones that fill blocks to the last row."""
    rng = np.random.default_rng(seed)
    small = rng.integers(1, 40, 400).tolist()
    return [*small[:200], 3 * MAX_ROWS_PER_SUM + 1, 1, MAX_ROWS_PER_SUM, 1, MAX_ROWS_PER_SUM - 1, 1, *small[200:], 5000]


def write(table: pa.Table, path: Path) -> TableSource:
    if path.suffix == ".csv":
        pa.csv.write_csv(table, path)
    else:
        pq.write_table(table, path)
    return TableSource(path, "user", "y")


def assert_same_blocks(users: StreamingUsers, table: UserTable, max_rows: int = MAX_ROWS_PER_SUM) -> None:
    streamed = list(users.blocks(max_rows))
    kept = list(table.blocks(max_rows))
    assert [block.n_rows for block in streamed] == [block.n_rows for block in kept]
    for a, b in zip(streamed, kept, strict=True):
        assert (a.X.dtype, a.y.dtype, a.ids.dtype, a.offsets.dtype) == (
            b.X.dtype,
            b.y.dtype,
            b.ids.dtype,
            b.offsets.dtype,
        )
        assert a.X.flags.c_contiguous


@dataclass(frozen=True)
class Means:
    spec: ClassVar[StepSpec] = StepSpec()

    def __call__(self, batch: UserBatch) -> dict[str, Vectors]:
        X, y = batch.X, batch.y
        return {"means": Vectors((X * y[:, :, None]).mean(axis=1))}


def assert_same_sums(users: StreamingUsers, table: UserTable) -> None:
    basis = np.linalg.qr(np.random.default_rng(1).standard_normal((D, 2)))[0]
    gradient = LeaveOneOutGradient(basis, FeatureTransform(np.full(D, 2.0)), 0.3, 0.02, True)
    asked = [
        (Means(), {"means": Bound(0.7, D)}),
        (gradient, {"step": Bound(0.1, gradient_size(D, 2)), "sizes": SIZES}),
    ]
    for step, bounds in asked:
        streamed, kept = users.sums(step, bounds), InMemoryUsers(table).sums(step, bounds)
        for key in bounds:
            assert kept[key].exact_numbers.any()
            assert streamed[key].exact_numbers.tobytes() == kept[key].exact_numbers.tobytes()
            assert streamed[key].bound == kept[key].bound


@pytest.mark.parametrize("order", ["sorted", "shuffled", "descending"])
@pytest.mark.parametrize("ids", ["integers", "text"])
@pytest.mark.parametrize("dtype", [np.float32, np.float64])
def test_agrees_with_memory(tmp_path: Path, order: str, ids: str, dtype: Any) -> None:
    source = write(rows_of(ragged(), ids, dtype, order), tmp_path / "t.parquet")
    table = read_table(source)
    assert table.X.dtype == dtype
    with StreamingUsers.open(source) as users:
        assert (users.facts.users, users.rows, users.facts.features) == (table.n_users, table.n_rows, D)
        assert_same_blocks(users, table)
        assert_same_sums(users, table)
        assert (users.source is source) == (order == "sorted")


@pytest.mark.parametrize("order", ["sorted", "shuffled"])
def test_agrees_with_memory_for_csv(tmp_path: Path, order: str) -> None:
    for ids in ("integers", "text"):
        source = write(rows_of(ragged(), ids, np.float64, order), tmp_path / "t.csv")
        with StreamingUsers.open(source, Performance(workdir=tmp_path)) as users:
            assert_same_blocks(users, read_table(source))
            assert_same_sums(users, read_table(source))
            assert {path.name for path in tmp_path.glob("privrep-*/*")} == {"lock", Path(users.source.path).name}


def test_agrees_with_rows_grouped_in_memory(tmp_path: Path) -> None:
    rows = rows_of(ragged(), "integers", np.float32, "shuffled")
    X = np.stack([rows[f"x{j}"].to_numpy() for j in range(D)], axis=1)
    table = UserTable.from_rows(X, rows["y"].to_numpy(), rows["user"].to_numpy())
    with StreamingUsers.open(write(rows, tmp_path / "t.parquet")) as users:
        assert_same_blocks(users, table)
        assert_same_sums(users, table)


@given(
    sizes=st.lists(st.integers(1, 12), min_size=1, max_size=30),
    batch=st.integers(1, 20),
    max_rows=st.integers(1, 20),
    order=st.sampled_from(["sorted", "shuffled"]),
)
@settings(max_examples=60, deadline=None, derandomize=True)
def test_blocks_are_cut_as_in_memory(
    tmp_path_factory: pytest.TempPathFactory, sizes: list[int], batch: int, max_rows: int, order: str
) -> None:
    source = write(rows_of(sizes, "integers", np.float64, order), tmp_path_factory.mktemp("t") / "t.parquet")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(sources, "MAX_BATCH_ROWS", batch)
        assert max(b.num_rows for b in source.batches()) <= batch
        with StreamingUsers.open(source) as users:
            assert_same_blocks(users, read_table(source), max_rows)


@given(
    sizes=st.lists(st.integers(1, 12), min_size=1, max_size=20),
    batch=st.integers(1, 20),
    max_rows=st.integers(1, 20),
    seed=st.integers(0, 99),
)
@settings(max_examples=60, deadline=None, derandomize=True)
def test_weights_of_users_that_are_read_in_pieces(
    tmp_path_factory: pytest.TempPathFactory, sizes: list[int], batch: int, max_rows: int, seed: int
) -> None:
    rows, path = rows_of(sizes, "integers", np.float64, "sorted"), tmp_path_factory.mktemp("t") / "t.parquet"
    weights = np.random.default_rng(seed).integers(0, 4, rows.num_rows)
    pq.write_table(rows.append_column("w", pa.array(weights)), path)
    source = TableSource(path, "user", "y", weight="w")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(sources, "MAX_BATCH_ROWS", batch)
        with StreamingUsers.open(source) as users:
            table = read_table(source)
            assert_same_blocks(users, table, max_rows)
            streamed = list(users.blocks(max_rows))
    assert np.concatenate([block.y for block in streamed]).tolist() == table.y.tolist()
    assert np.concatenate([block.sizes for block in streamed]).tolist() == table.sizes.tolist()


@pytest.mark.parametrize("ids", ["integers", "text"])
@pytest.mark.parametrize("order", ["shuffled", "descending"])
def test_regrouping_holds_no_more_than_its_limit(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, ids: str, order: str
) -> None:
    """Small buckets, over two rounds, with one user larger than all the memory allowed."""
    sizes = [*np.random.default_rng(0).integers(1, 40, 300).tolist(), 9000]
    source = write(rows_of(sizes, ids, np.float64, order), tmp_path / "t.parquet")
    monkeypatch.setattr(sources, "MAX_BATCH_ROWS", 50)
    monkeypatch.setattr(regroup, "MAX_BUCKETS", 4)
    monkeypatch.setattr(regroup, "SAMPLE", 64)
    limit, held, rounds = 60_000, [], []
    by_user, cuts = regroup._sort_by_user, regroup._Sample.choose_cuts
    monkeypatch.setattr(regroup, "_sort_by_user", lambda table: [held.append(table.nbytes), by_user(table)][1])
    monkeypatch.setattr(regroup._Sample, "choose_cuts", lambda self, n: [rounds.append(n), cuts(self, n)][1])
    table = read_table(source)
    with StreamingUsers.open(source, Performance(workdir=tmp_path, regroup_bytes=limit)) as users:
        assert_same_blocks(users, table)
        assert_same_sums(users, table)
        assert {path.name for path in tmp_path.glob("privrep-*/*")} == {"lock", "users.parquet"}
    assert len(rounds) > 1
    assert max(held) <= 1.05 * limit / 3  # of which there are three copies at a time


def test_all_rows_of_one_user(tmp_path: Path) -> None:
    rows = pa.concat_tables([rows_of([3000], "integers", np.float32, "sorted", seed) for seed in (3, 3)])
    source = write(rows, tmp_path / "t.parquet")
    with StreamingUsers.open(source, Performance(regroup_bytes=1000)) as users:
        assert users.facts.users == 1
        assert_same_blocks(users, read_table(source), max_rows=10)
    late = pa.concat_tables([rows, rows_of([1], "integers", np.float32, "sorted", 4)])
    for table in (late, late.take(np.arange(late.num_rows)[::-1])):
        source = write(table, tmp_path / "t.parquet")
        with StreamingUsers.open(source, Performance(regroup_bytes=1000)) as users:
            assert users.facts.users == 2
            assert_same_blocks(users, read_table(source), max_rows=10)


def test_without_a_target_there_are_rows_but_no_sums(tmp_path: Path) -> None:
    write(rows_of([3, 4], "integers", np.float32, "shuffled"), tmp_path / "t.parquet")
    source = TableSource(tmp_path / "t.parquet", "user", None, ["x1", "x0"])
    with StreamingUsers.open(source) as users:
        assert_same_blocks(users, read_table(source))
        with pytest.raises(InputError, match="without a target"):
            users.sums(Means(), {"means": Bound(1.0, 2)})


# Temporary files


@pytest.mark.parametrize("name", ["t.parquet", "t.csv"])
def test_temporary_files_are_private_and_go_away(tmp_path: Path, name: str) -> None:
    source = write(rows_of([3, 4, 5], "text", np.float64, "shuffled"), tmp_path / name)
    work = tmp_path / "work"
    work.mkdir()
    users = StreamingUsers.open(source, Performance(workdir=work))
    (folder,) = work.iterdir()
    assert stat.S_IMODE(folder.stat().st_mode) == 0o700
    users.close()
    assert not list(work.iterdir())
    with pytest.raises(InputError, match="were closed"):
        users.blocks()
    with pytest.raises(InputError, match="were closed"):
        users.sums(Means(), {"means": Bound(1.0, D)})
    users.close()


def test_a_sorted_parquet_file_needs_no_temporary_file(tmp_path: Path) -> None:
    source = write(rows_of([3, 4, 5], "text", np.float64, "sorted"), tmp_path / "t.parquet")
    work = tmp_path / "work"
    work.mkdir()
    with StreamingUsers.open(source, Performance(workdir=work)):
        assert not list(work.iterdir())


def test_temporary_files_go_away_after_an_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    source = write(rows_of([30, 40, 50], "integers", np.float64, "shuffled"), tmp_path / "t.parquet")
    work = tmp_path / "work"
    work.mkdir()

    def works_and_fails() -> None:
        with StreamingUsers.open(source, Performance(workdir=work)):
            assert list(work.iterdir())
            raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        works_and_fails()
    assert not list(work.iterdir())

    def fails(*_: Any) -> None:
        assert list(work.glob("*/part-*"))
        raise KeyboardInterrupt

    monkeypatch.setattr(regroup._Bucket, "finish", fails)
    with pytest.raises(KeyboardInterrupt):
        StreamingUsers.open(source, Performance(workdir=work, regroup_bytes=1000))
    assert not list(work.iterdir())


def test_a_bad_value_late_in_the_file_leaves_no_temporary_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sources, "BATCH_BYTES", 8 * (D + 2) * 256)
    rows = rows_of([300, 400, 500], "integers", np.float64, "shuffled").to_pandas()
    rows.loc[1100, "x3"] = np.inf
    for name in ("t.parquet", "t.csv"):
        source = write(pa.Table.from_pandas(rows), tmp_path / name)
        with pytest.raises(InputError, match=r"column 'x3' of .* in row 1101;"):
            StreamingUsers.open(source, Performance(workdir=tmp_path))
        assert not list(tmp_path.glob("privrep-*"))


def test_what_a_killed_process_leaves_is_removed_by_the_next(tmp_path: Path) -> None:
    source = write(rows_of([30, 40, 50], "integers", np.float64, "shuffled"), tmp_path / "t.parquet")
    code = (
        "import os, sys; from privrep.data.readers import TableSource; "
        "from privrep.users.performance import Performance; from privrep.users.streaming import StreamingUsers; "
        "users = StreamingUsers.open(TableSource(sys.argv[1], 'user', 'y'), Performance(workdir=sys.argv[2])); "
        "os._exit(9)"
    )
    with StreamingUsers.open(source, Performance(workdir=tmp_path)) as living:
        (kept,) = tmp_path.glob("privrep-*")
        assert subprocess.run([sys.executable, "-c", code, str(source.path), str(tmp_path)]).returncode == 9
        assert len(list(tmp_path.glob("privrep-*"))) == 2
        with StreamingUsers.open(source, Performance(workdir=tmp_path)) as users:
            assert set(tmp_path.glob("privrep-*")) == {kept, Path(users.source.path).parent}
        assert_same_blocks(living, read_table(source))
    assert not list(tmp_path.glob("privrep-*"))


def test_a_full_disk_is_explained(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    source = write(rows_of([3, 4], "integers", np.float64, "shuffled"), tmp_path / "t.parquet")
    with pytest.raises(InputError, match="workdir: there is no folder"):
        StreamingUsers.open(source, Performance(workdir=tmp_path / "missing"))

    def full(*_: Any) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(regroup._Writer, "write", full)
    with pytest.raises(InputError, match=r"workdir: .*No space left on device.* make room"):
        StreamingUsers.open(source, Performance(workdir=tmp_path))
    assert not list(tmp_path.glob("privrep-*"))


def test_a_file_that_changes_under_a_run_gives_no_sum(tmp_path: Path) -> None:
    """A user whose rows came apart would be clipped twice: the pass must fail, not return."""
    table = rows_of([10] * 50, "integers", np.float64, "sorted")
    source = write(table, tmp_path / "t.parquet")
    swapped = np.arange(500)
    swapped[[5, 495]] = [495, 5]
    more = pa.concat_tables([table, table.slice(490)])
    for other in (table.slice(0, 495), table.take(swapped), table.slice(0, 490), more):
        write(table, tmp_path / "t.parquet")
        users = StreamingUsers.open(source)
        users.sums(Means(), {"means": Bound(1.0, D)})
        write(other, tmp_path / "t.parquet")
        with pytest.raises(InputError, match="changed while it was in use"):
            users.sums(Means(), {"means": Bound(1.0, D)})


def test_leaving_a_pass_early_ends_its_thread(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sources, "MAX_BATCH_ROWS", 10)
    source = write(rows_of([10] * 50, "integers", np.float64, "sorted"), tmp_path / "t.parquet")
    users = StreamingUsers.open(source)
    before = threading.active_count()
    blocks = users.blocks(max_rows=10)
    assert next(blocks).n_rows == 10
    assert threading.active_count() == before + 1
    del blocks
    assert threading.active_count() == before


PEAK = """
import sys
import numpy as np
from privrep.data.readers import TableSource
from privrep.users.performance import Performance
from privrep.users.streaming import StreamingUsers
from privrep.privacy.bounds import Bound
from privrep.privacy.contributions import Vectors
from privrep.privacy.protocol import StepSpec
class First:
    spec = StepSpec()
    def __call__(self, batch):
        return {"first": Vectors(batch.X[:, 0])}
with StreamingUsers.open(TableSource(sys.argv[1], "user", "y"), Performance(regroup_bytes=16 << 20)) as users:
    users.sums(First(), {"first": Bound(1.0, users.facts.features)})
print(next(int(line.split()[1]) >> 10 for line in open("/proc/self/status") if line.startswith("VmHWM")))
"""


@pytest.mark.skipif(sys.platform != "linux", reason="reads the peak from /proc")
@pytest.mark.parametrize("order", ["sorted", "shuffled"])
def test_memory_does_not_grow_with_the_file(tmp_path: Path, order: str) -> None:
    peaks = []
    for rows in (400_000, 1_200_000):
        rng = np.random.default_rng(0)
        users = np.repeat(np.arange(rows // 10), 10)
        values = pa.array(rng.standard_normal(rows, dtype=np.float32))
        columns = {"user": users if order == "sorted" else rng.permutation(users), "y": values}
        columns |= {f"x{j}": values for j in range(30)}
        table = pa.table(columns)
        pq.write_table(table, tmp_path / "t.parquet", use_dictionary=False, compression="none", row_group_size=50_000)
        done = subprocess.run(
            [sys.executable, "-c", PEAK, str(tmp_path / "t.parquet")], check=True, capture_output=True, text=True
        )
        peaks.append(int(done.stdout))
    assert peaks[1] - peaks[0] < 50  # MB, where the files differ by 100


@pytest.mark.parametrize("order", ["sorted", "shuffled"])
@pytest.mark.parametrize("ids", ["integers", "text"])
def test_sums_over_a_group_leave_the_others_out(tmp_path: Path, ids: str, order: str) -> None:
    source = write(rows_of(ragged(), ids, np.float64, order), tmp_path / "t.parquet")
    table, bounds = read_table(source), {"means": Bound(0.7, D)}
    means = [(X * y[:, None]).mean(axis=0) for X, y in rows_by_user(table)]
    clipped = np.array([mean * min(1.0, 0.7 / np.linalg.norm(mean)) for mean in means])
    with StreamingUsers.open(source) as users:
        for group in (Group("a", 0, 3), Group("a", 1, 3), Group("b", 1, 2)):
            inside = group.members(table.ids)
            assert 0 < inside.sum() < table.n_users
            spoilt = replace(table, X=np.where(np.repeat(inside, table.sizes)[:, None], table.X, 1e300))
            streamed, kept, blind = (
                engine.sums(Means(), bounds, group)["means"].exact_numbers
                for engine in (users, InMemoryUsers(table, Performance(1)), InMemoryUsers(spoilt, Performance(3)))
            )
            np.testing.assert_allclose(kept, clipped[inside].sum(axis=0), rtol=1e-9)
            assert streamed.tobytes() == kept.tobytes() == blind.tobytes()
        everybody = users.sums(Means(), bounds)["means"].exact_numbers
    np.testing.assert_allclose(everybody, clipped.sum(axis=0), rtol=1e-9)


def rows_by_user(table: UserTable) -> list[tuple[Any, Any]]:
    return [(one.X, one.y) for one in (table.users(i, i + 1) for i in range(table.n_users))]


# Several targets, categories


@pytest.mark.parametrize("order", ["sorted", "shuffled"])
@pytest.mark.parametrize("name", ["t.parquet", "t.csv"])
def test_several_targets(tmp_path: Path, name: str, order: str) -> None:
    write(rows_of(ragged(), "integers", np.float64, order), tmp_path / name)
    source = TableSource(tmp_path / name, "user", ["y", "x3"])
    table = read_table(source)
    assert table.y.shape == (table.n_rows, 2)
    first = read_table(TableSource(tmp_path / name, "user", "x3", source.feature_names))
    assert np.array_equal(table.y[:, 1], first.y)
    with StreamingUsers.open(source) as users:
        assert (users.facts.targets, users.facts.features, users.facts.sparse) == (2, D - 1, False)
        assert_same_blocks(users, table)
        step, bounds = Both(), {"means": Bound(0.7, D - 1)}
        streamed, kept = users.sums(step, bounds), InMemoryUsers(table).sums(step, bounds)
        assert kept["means"].exact_numbers.any()
        assert streamed["means"].exact_numbers.tobytes() == kept["means"].exact_numbers.tobytes()


@dataclass(frozen=True)
class Both:
    spec: ClassVar[StepSpec] = StepSpec()

    def __call__(self, batch: UserBatch) -> dict[str, Vectors]:
        X, y = batch.X, batch.y
        return {"means": Vectors((X * y.sum(axis=2)[:, :, None]).mean(axis=1))}


@dataclass(frozen=True)
class SparseMeans:
    spec: ClassVar[StepSpec] = StepSpec(accepts_sparse=True)

    def __call__(self, batch: UserBatch) -> dict[str, SparseColumns]:
        X, y = batch.X, batch.y
        user, column, T = X.slots()
        return {"means": SparseColumns(user, column, T @ y.reshape(-1, 1), np.empty((len(X), 0)), X.shape[2])}


def with_categories(table: pa.Table) -> pa.Table:
    rng = np.random.default_rng(3)
    words = pa.array([*(f"wört {j}" for j in range(400)), None])
    table = table.append_column("word", words.take(pa.array(rng.integers(0, 401, table.num_rows))))
    return table.append_column("shelf", pa.array(rng.integers(-3, 9, table.num_rows)))


CATEGORIES = {"word": [f"wört {j}" for j in range(0, 600, 2)], "shelf": [8, -2, 77, 0]}


@pytest.mark.parametrize("order", ["sorted", "shuffled"])
@pytest.mark.parametrize("name", ["t.parquet", "t.csv"])
@pytest.mark.parametrize("features", [("x4", "x0"), ()])
def test_categories(tmp_path: Path, name: str, order: str, features: tuple[str, ...]) -> None:
    table = with_categories(rows_of(ragged(), "text", np.float64, order))
    (pa.csv.write_csv if name == "t.csv" else pq.write_table)(table, tmp_path / name)
    source = TableSource(tmp_path / name, "user", "y", features, categories=CATEGORIES)
    kept = read_table(source)
    d = len(features) + 304
    assert kept.X.shape == (table.num_rows, d)
    with StreamingUsers.open(source, Performance(workdir=tmp_path, regroup_bytes=1 << 20)) as users:
        assert users.facts == Facts(kept.n_users, d, 1, True)
        assert users.rows == kept.n_rows
        for max_rows in (None, 700):
            blocks = list(users.blocks(max_rows))
            assert (len(blocks) > 1) == (max_rows is not None)
            for a, b in zip(blocks, kept.blocks(max_rows), strict=True):
                assert (a.X.shape, a.X.dtype) == (b.X.shape, b.X.dtype)
                for part in ("indptr", "indices", "data"):
                    assert np.array_equal(getattr(a.X, part), getattr(b.X, part))
                assert np.array_equal(a.y, b.y)
                assert np.array_equal(a.offsets, b.offsets)
                assert a.ids.tolist() == b.ids.tolist()
        for step in (Means(), SparseMeans()):
            bounds = {"means": Bound(0.7, d)}
            streamed, memory = users.sums(step, bounds), InMemoryUsers(kept).sums(step, bounds)
            assert memory["means"].exact_numbers.any()
            assert streamed["means"].exact_numbers.tobytes() == memory["means"].exact_numbers.tobytes()


def test_a_missing_category_is_no_error_but_an_infinite_number_is(tmp_path: Path) -> None:
    table = with_categories(rows_of([3, 4, 50], "integers", np.float64, "shuffled"))
    broken = table.set_column(2, "x0", pa.array([np.inf, *table["x0"].to_pylist()[1:]], pa.float64()))
    pq.write_table(broken, tmp_path / "t.parquet")
    source = TableSource(tmp_path / "t.parquet", "user", "y", ["x0"], categories=CATEGORIES)
    with pytest.raises(InputError, match=r"column 'x0' of .* has no finite number in row 1;"):
        StreamingUsers.open(source, Performance(workdir=tmp_path))
    empty = table.set_column(table.num_columns - 2, "word", pa.nulls(table.num_rows, pa.string()))
    pq.write_table(empty, tmp_path / "t.parquet")
    source = TableSource(tmp_path / "t.parquet", "user", "y", (), categories={"word": CATEGORIES["word"]})
    with StreamingUsers.open(source, Performance(workdir=tmp_path)) as users:
        assert [block.X.nnz for block in users.blocks()] == [0]


@pytest.mark.parametrize("order", ["sorted", "shuffled"])
@pytest.mark.parametrize("name", ["t.parquet", "t.csv"])
@pytest.mark.parametrize("dtype", [np.float32, np.float64])
def test_labels(tmp_path: Path, name: str, order: str, dtype: Any) -> None:
    """Codes of labels in a file, sorted by user or not, are those in memory; a label that is not listed is -1."""
    table = rows_of(ragged(), "text", dtype, order)
    words = pa.array(["ash", "birch", "other", "cedar"])
    which = np.random.default_rng(1).integers(0, 4, table.num_rows)
    table = table.set_column(1, "y", words.take(pa.array(which)))
    (pa.csv.write_csv if name == "t.csv" else pq.write_table)(table, tmp_path / name)
    source = TableSource(tmp_path / name, "user", "y", classes=("ash", "birch", "cedar"))
    kept = read_table(source)
    single = dtype == np.float32 and name == "t.parquet"
    assert kept.y.dtype == kept.X.dtype == (np.float32 if single else np.float64)
    assert sorted(set(kept.y.tolist())) == [-1.0, 0.0, 1.0, 2.0]
    assert (kept.y == -1).sum() == (which == 2).sum()
    with StreamingUsers.open(source, Performance(workdir=tmp_path, regroup_bytes=1 << 20)) as users:
        assert (users.facts.targets, users.facts.features) == (1, D)
        assert_same_blocks(users, kept)
        step, bounds = Means(), {"means": Bound(0.7, D)}
        streamed, memory = users.sums(step, bounds), InMemoryUsers(kept).sums(step, bounds)
        assert memory["means"].exact_numbers.any()
        assert streamed["means"].exact_numbers.tobytes() == memory["means"].exact_numbers.tobytes()


def panel_rows(order: str) -> pa.Table:
    """Users with levels, common slopes and slopes of their own along a direction, some of them with one row."""
    rng = np.random.default_rng(4)
    user = np.repeat(np.arange(300), 1 + np.arange(300) % 9)
    X = rng.normal(size=(len(user), D)) + rng.normal(size=(300, D))[user]
    y = 30 + rng.normal(size=300)[user] + X.sum(axis=1) + X[:, 0] * rng.normal(size=300)[user]
    made = {"user": user, "y": y + 0.1 * rng.normal(size=len(y)), "z": 3 * y + rng.normal(size=len(y))}
    made |= {f"x{j}": X[:, j] for j in range(D)}
    table = pa.table(made).append_column("shelf", pa.array(user % 3))
    return table if order == "sorted" else table.take(rng.permutation(len(user)))


PANELS: dict[str, tuple[Config, dict[str, Any]]] = {
    "rank found": (Config(None, 100.0, 1e-5, seed=1), {}),
    "little to spend": (Config(1, 1.0, 1e-5, seed=1), {}),
    "users secret": (Config(2, 100.0, 1e-5, "add-or-remove-one-user", seed=1), {}),
    "no intercept": (Config(2, 100.0, 1e-5, seed=1, intercept=False), {}),
    "two targets": (Config(None, 100.0, 1e-5, seed=1), {"target": ("y", "z")}),
    "sparse": (Config(None, 100.0, 1e-5, seed=1), {"categories": {"shelf": [0, 2]}}),
    "sparse, two targets": (Config(1, 100.0, 1e-5, seed=1), {"target": ("y", "z"), "categories": {"shelf": [0, 2]}}),
}


@pytest.mark.parametrize("order", ["sorted", "shuffled"])
@pytest.mark.parametrize("name", PANELS)
def test_what_is_learned_from_a_stream_is_what_is_learned_in_memory(tmp_path: Path, name: str, order: str) -> None:
    pq.write_table(panel_rows(order), tmp_path / "t.parquet")
    config, options = PANELS[name]
    features = [f"x{j}" for j in range(D)]
    source = TableSource(tmp_path / "t.parquet", "user", features=features, **{"target": "y", **options})
    kept = InMemoryUsers(read_table(source))
    one = learn(kept, config)
    heads = fit_heads(kept.table.blocks(), one.representation, intercept=config.intercept)
    with StreamingUsers.open(source, Performance(workdir=tmp_path, regroup_bytes=1 << 14)) as users:
        other = learn(users, config)
        streamed = fit_heads(users.blocks(), other.representation, intercept=config.intercept)
    assert one.representation.prior is not None
    a, b = (
        {f"{post.name}/{key}": array for post in model.billboard for key, array in post.arrays.items()}
        for model in (one, other)
    )
    assert a.keys() == b.keys()
    for key, array in a.items():
        np.testing.assert_allclose(b[key], array, rtol=1e-9, atol=1e-9 * np.abs(array).max(initial=0.0), err_msg=key)
    assert streamed.ids.tolist() == heads.ids.tolist()
    for part in ("intercept", "shared", "origin", "doubt"):
        mine, theirs = getattr(heads, part), getattr(streamed, part)
        np.testing.assert_allclose(theirs, mine, rtol=1e-9, atol=1e-9)
