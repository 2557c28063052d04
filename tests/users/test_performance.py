"""What `Performance` says changes no answer, to the last bit, and how users are cut up changes it by rounding alone."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from threadpoolctl import threadpool_info, threadpool_limits

from privrep.data.readers import TableSource, read_table
from privrep.errors import InputError
from privrep.heads.fitting import fit_heads
from privrep.local.representation import Representation
from privrep.local.transform import FeatureTransform
from privrep.privacy.bounds import NORM_SLACK, Bound, LossBound
from privrep.privacy.contributions import Contributions, Losses, Vectors
from privrep.privacy.groups import Group
from privrep.privacy.protocol import EVERYONE, Audience, StepSpec, UserBatch, Users
from privrep.privacy.sampling import FixedSample, Sample
from privrep.users.memory import InMemoryUsers
from privrep.users.performance import Performance
from privrep.users.streaming import StreamingUsers

D = 5
BOUNDS = {"sum": Bound(0.7, D), "losses": LossBound(D)}
SETTINGS = [
    Performance(1),
    Performance(2),
    Performance(5),
    Performance(2, regroup_bytes=20_000),
    Performance(5, regroup_bytes=1_000),
]
AUDIENCES: list[Audience] = [EVERYONE, Group("half", 1, 2), Sample(0.4, b"s" * 32), FixedSample(90, b"f" * 32)]


@dataclass(frozen=True)
class Sums:
    """Sums of rows, weighted by targets, and losses, of users by size or padded."""

    spec: StepSpec

    def __call__(self, batch: UserBatch) -> dict[str, Contributions | Losses]:
        there = np.ones(batch.y.shape) if batch.positions is None else batch.y != -1
        means = (batch.X * (batch.y * there)[:, :, None]).sum(axis=1)
        return {"sum": Vectors(means), "losses": Losses(np.abs(means))}


BY_SIZE, PADDED = Sums(StepSpec(floats_per_user=D)), Sums(StepSpec(layout="padded", rows_per_user=6, floats_per_user=D))
ASKED = [(BY_SIZE, EVERYONE), (BY_SIZE, AUDIENCES[1]), *((PADDED, among) for among in AUDIENCES)]


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> TableSource:
    """Rows of users of many sizes, shuffled, so that opening the file regroups it."""
    rng = np.random.default_rng(0)
    users = rng.permutation(np.repeat(np.arange(400), rng.integers(1, 40, 400)))
    columns = {"user": users, "y": rng.standard_normal(len(users))}
    columns |= {f"x{j}": rng.standard_normal(len(users)).astype(np.float32) for j in range(D)}
    path = tmp_path_factory.mktemp("rows") / "rows.parquet"
    pq.write_table(pa.table(columns), path)
    return TableSource(path, "user", "y")


@contextmanager
def engine(kind: str, source: TableSource, performance: Performance) -> Iterator[Users]:
    if kind == "memory":
        yield InMemoryUsers(read_table(source), performance)
        return
    with StreamingUsers.open(source, performance) as users:
        yield users


def answers(users: Users) -> list[dict[str, np.ndarray]]:
    return [
        {key: one.exact_numbers for key, one in users.sums(step, BOUNDS, among).items()}
        for step, among in ASKED
        if isinstance(users, InMemoryUsers) or not isinstance(among, FixedSample)
    ]


@pytest.mark.parametrize("kind", ["memory", "streaming"])
def test_no_answer_depends_on_performance(kind: str, source: TableSource, tmp_path: Path) -> None:
    with engine("memory", source, Performance(1)) as users:
        expected = answers(users)
    for performance in [*SETTINGS, Performance(2, workdir=tmp_path)]:
        with engine(kind, source, performance) as users:
            found = answers(users)
        for one, other in zip(found, expected, strict=kind == "memory"):
            assert {key: total.tobytes() for key, total in one.items()} == {k: t.tobytes() for k, t in other.items()}
            assert all(total.any() for total in one.values())


@pytest.mark.parametrize("kind", ["memory", "streaming"])
@pytest.mark.parametrize("rows", [1, 37, 500])
def test_the_size_of_blocks_moves_sums_by_rounding_and_losses_not_at_all(
    kind: str, rows: int, source: TableSource, monkeypatch: pytest.MonkeyPatch
) -> None:
    with engine("memory", source, Performance(1)) as users:
        expected = {key: one.exact_numbers for key, one in users.sums(BY_SIZE, BOUNDS).items()}
    for module in ("privrep.data.table", "privrep.users.streaming"):
        monkeypatch.setattr(f"{module}.choose_block_rows", lambda *a: rows)
    seen = set()
    for performance in SETTINGS:
        with engine(kind, source, performance) as users:
            found = {key: one.exact_numbers for key, one in users.sums(BY_SIZE, BOUNDS).items()}
        assert np.array_equal(found["losses"], expected["losses"])
        assert np.linalg.norm(found["sum"] - expected["sum"]) <= NORM_SLACK / 2 * BOUNDS["sum"].norm
        seen.add(found["sum"].tobytes())
    assert len(seen) == 1  # for blocks of one size, too, the settings change nothing


def test_no_head_depends_on_performance(source: TableSource) -> None:
    table = read_table(source)
    basis = np.linalg.qr(np.random.default_rng(1).standard_normal((D, 2)))[0]
    learned = Representation(basis, FeatureTransform.plain(D), 0.1)
    found = [fit_heads(table.blocks(200), learned, performance=one) for one in SETTINGS[:3]]
    assert len({(heads.shared.tobytes(), heads.own.tobytes()) for heads in found}) == 1


@dataclass(frozen=True)
class Threads:
    """A step that notes how many threads BLAS has while it is called."""

    seen: list[int]
    spec = StepSpec(floats_per_user=D)

    def __call__(self, batch: UserBatch) -> dict[str, Contributions | Losses]:
        self.seen.extend(library["num_threads"] for library in threadpool_info() if library["user_api"] == "blas")
        return {"sum": Vectors(batch.X.sum(axis=1))}


@pytest.mark.parametrize("workers", [1, 2])
def test_steps_are_called_with_blas_on_one_thread(workers: int, source: TableSource) -> None:
    """Products that are cut up among threads round by the number of cores."""
    step = Threads([])
    with threadpool_limits(2, user_api="blas"):
        InMemoryUsers(read_table(source), Performance(workers)).sums(step, {"sum": BOUNDS["sum"]})
    assert set(step.seen) == {1}


@pytest.mark.parametrize("workers", [0, -1, True, None, 1.5])
def test_workers_are_counted(workers: Any) -> None:
    with pytest.raises(InputError, match="whole number, 1 or more"):
        Performance(workers=workers)
