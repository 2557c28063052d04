"""The contract of all engines: the same sums as memory, to the last bit, and nothing else. A new one joins by a line of
`engines.ENGINES`."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import cache
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import numpy as np
import pyarrow as pa
import pytest
from panel import Question, panel_questions

from engines import ENGINES, ONE, Engine, World, write
from privrep.data.table import UserTable
from privrep.errors import InputError
from privrep.linear.methods.margin_selection import MarginLosses
from privrep.linear.nets import RandomNet
from privrep.models.description import Columns
from privrep.privacy.bounds import Bound, BoundedSum, LossBound
from privrep.privacy.contributions import Vectors
from privrep.privacy.groups import Group
from privrep.privacy.protocol import EVERYONE, Audience, Facts, StepSpec, UserBatch, Users
from privrep.privacy.sampling import Fixed, FixedSample, Poisson, Sample
from privrep.users.memory import InMemoryUsers

USERS, D = 36, 3
NUMBERS = tuple(f"x{j}" for j in range(D))
WORDS = tuple(f"w{j:03d}" for j in range(140))  # so many that rows are held sparse
PLAIN = Columns("user", ("y",), NUMBERS)


def made(gaps: float = 0.0, seed: int = 3) -> pa.Table:
    """Users with 1 to 9 rows each, whose numbers take all their digits; with gaps, some who lose all rows."""
    rng = np.random.default_rng(seed)
    user = np.repeat(7 * np.arange(USERS) - 50, 1 + np.arange(USERS) % 9)
    X = 5 + rng.normal(size=(len(user), D)) * [1.0, 10.0, 0.1] + rng.normal(size=(USERS, D))[(user + 50) // 7]
    y = X @ [1.0, 0.2, 3.0] + rng.normal(size=len(user))
    if gaps:
        X[rng.random(X.shape) < gaps] = np.nan
        y[rng.random(len(y)) < gaps / 2] = np.nan
        y[np.isin(user, [-29, -22, 7 * (USERS - 1) - 50])] = np.nan
    columns = {"user": user, "y": y, "z": 5 * y + rng.normal(size=len(y)), "w": rng.choice([0.0, 0.5, 1, 3], len(y))}
    words = np.array([*WORDS, None], dtype=object)[rng.integers(0, len(WORDS) + 1, len(y))]
    return pa.table({**columns, **dict(zip(NUMBERS, X.T.copy(), strict=True)), "word": pa.array(words, pa.string())})


WORLDS = {
    "numbers": World(made(), PLAIN),
    "some gaps": World(made(0.2), PLAIN),
    "most missing": World(made(0.7), PLAIN),
    "weights": World(made(), replace(PLAIN, weight="w")),
    "two targets": World(made(), Columns("user", ("y", "z"), NUMBERS)),
    "sparse": World(made(), Columns("user", ("y",), NUMBERS, ("word",), (WORDS,))),
}
FACTS = {
    **dict.fromkeys(WORLDS, Facts(USERS, D, 1, False)),
    "two targets": Facts(USERS, D, 2, False),
    "sparse": Facts(USERS, D + len(WORDS), 1, True),
}
NET = RandomNet("net", 16, D, 1)


ASKED = ("column sizes", "level cells", "panel moments", "common, with slopes", "head losses, relative", "head spreads")
ASKED += ("head errors", "residual gradient")


@cache
def questions(name: str) -> dict[str, tuple[Any, Mapping[str, Bound | LossBound]]]:
    """Return steps that travel, of every kind of contributions: cells, moments, vectors, losses."""
    facts = FACTS[name]
    found: dict[str, Question] = panel_questions(facts.features, 2, True, facts.targets, facts.sparse)
    losses = (MarginLosses(NET, 0.5, 1.0, True), {"losses": LossBound(NET.size)})
    plain = facts.features == D and facts.targets == 1
    return {key: found[key] for key in ASKED if key in found} | ({"losses": losses} if plain else {})


@pytest.fixture(params=ENGINES)
def engine(request: pytest.FixtureRequest) -> Engine:
    return ENGINES[request.param]


def totals(users: Users, question: Any, among: Audience = EVERYONE) -> dict[str, list[int]]:
    step, bounds = question
    sums = users.sums(step, bounds, among)
    assert {key: one.bound for key, one in sums.items()} == dict(bounds)
    return {key: one.total.tolist() for key, one in sums.items()}


def add_up(table: UserTable, parts: Sequence[Sequence[int]], question: Any) -> dict[str, list[int]]:
    """Return the sums in memory of users in parts of any order, each part's added to the others'."""
    step, bounds = question
    found = {key: np.zeros(bound.size, np.int64) for key, bound in bounds.items()}
    for part in parts:
        sums: dict[str, BoundedSum] = InMemoryUsers(pick(table, part), ONE).sums(step, bounds)
        for key, one in sums.items():
            found[key] += one.total
    return {key: total.tolist() for key, total in found.items()}


def pick(table: UserTable, users: Sequence[int]) -> UserTable:
    """Return a table of these users, in this order, with their rows as they are."""
    rows = np.concatenate([np.arange(*table.offsets[user : user + 2]) for user in users])
    offsets = np.concatenate([[0], np.cumsum(table.sizes[list(users)])])
    return UserTable(table.X[rows], table.y[rows], offsets, table.ids[list(users)])


@cache
def table_of(name: str) -> UserTable:
    with TemporaryDirectory() as folder:
        return WORLDS[name].read(write(WORLDS[name].rows, Path(folder) / "all.parquet"))


@cache
def expected(name: str, asked: str, among: Audience = EVERYONE) -> dict[str, list[int]]:
    return totals(InMemoryUsers(table_of(name), ONE), questions(name)[asked], among)


# What is summed


@pytest.mark.parametrize("name", WORLDS)
def test_sums_and_facts_are_those_of_memory_to_the_last_bit(engine: Engine, name: str, tmp_path: Path) -> None:
    with engine.open(WORLDS[name], tmp_path) as users:
        assert users.facts == FACTS[name]
        for asked, question in questions(name).items():
            wanted = expected(name, asked)
            assert totals(users, question) == wanted, asked
            assert any(any(total) for total in wanted.values()), asked


def test_a_group_is_asked_and_its_sums_do_not_depend_on_the_others(engine: Engine, tmp_path: Path) -> None:
    """To the last bit: the rows of all who are not asked are replaced by rows of another size."""
    world, table, group = WORLDS["numbers"], table_of("numbers"), Group("a", 0, 3)
    inside = group.members(table.ids)
    assert 0 < inside.sum() < USERS
    rows = world.rows
    for name in (*NUMBERS, "y"):
        told = np.where(np.repeat(inside, table.sizes), rows[name].to_numpy(), 1e200)
        rows = rows.set_column(rows.column_names.index(name), name, pa.array(told))
    (tmp_path / "others").mkdir()
    with (
        engine.open(world, tmp_path) as users,
        engine.open(replace(world, rows=rows), tmp_path / "others") as spoilt,
    ):
        for asked, question in questions("numbers").items():
            wanted = expected("numbers", asked, group)
            assert wanted != expected("numbers", asked)
            assert totals(users, question, group) == wanted, asked
            assert totals(spoilt, question, group) == wanted, asked


def test_a_second_pass_is_the_first(engine: Engine, tmp_path: Path) -> None:
    question = questions("numbers")["column sizes"]
    with engine.open(WORLDS["numbers"], tmp_path) as users:
        assert totals(users, question) == totals(users, question)


class Padded:
    """A step of fixed shape: means of two rows."""

    spec = StepSpec(layout="padded", rows_per_user=2)

    def __call__(self, batch: UserBatch) -> dict[str, Vectors]:
        return {"mean": Vectors(batch.X.sum(axis=1))}


PADDED: Any = (Padded(), {"mean": Bound(1.0, D)})


@pytest.mark.parametrize("rate", [0.1, 0.6])
def test_a_sample_is_asked_and_nobody_else(engine: Engine, rate: float, tmp_path: Path) -> None:
    if not engine.samples:
        pytest.skip("takes no step of a fixed shape that tests make")
    table = table_of("numbers")
    with engine.open(WORLDS["numbers"], tmp_path) as users:
        for key in (b"1", b"2"):
            sample = Sample(rate, key)
            found = users.sums(*PADDED, sample)["mean"]
            rows = [
                table.X[start : min(start + 2, end)].astype(np.float64).sum(axis=0)
                for start, end in zip(table.offsets[:-1], table.offsets[1:], strict=True)
            ]
            clipped = np.array([row / max(1.0, float(np.linalg.norm(row))) for row in rows])
            wanted = clipped[sample.members(USERS)].sum(axis=0)
            np.testing.assert_allclose(found.exact_numbers, wanted, rtol=1e-6, atol=USERS * found.bound.step)
            assert np.array_equal(found.total, InMemoryUsers(table, ONE).sums(*PADDED, sample)["mean"].total)


# What is refused, in one sentence


def spoil(rows: pa.Table, name: str, value: Any) -> pa.Table:
    told = rows[name].to_pylist()
    told[7] = value
    return rows.set_column(rows.column_names.index(name), name, pa.array(told))


FILES: dict[str, tuple[Callable[[pa.Table], pa.Table], str]] = {
    "infinite feature": (lambda rows: spoil(rows, "x1", np.inf), "x1"),
    "infinite target": (lambda rows: spoil(rows, "y", -np.inf), "y"),
    "nobody's row": (lambda rows: spoil(rows, "user", None), "user"),
    "text for numbers": (lambda rows: rows.set_column(4, "x0", pa.array(["a"] * rows.num_rows)), "x0"),
    "no column": (lambda rows: rows.drop_columns(["x2"]), "x2"),
    "no row": (lambda rows: rows.slice(0, 0), "row"),
}


@pytest.mark.parametrize("damage", FILES)
def test_a_file_that_holds_what_it_may_not_is_refused(engine: Engine, damage: str, tmp_path: Path) -> None:
    if not engine.opens_files:
        pytest.skip("rows come from elsewhere")
    change, word = FILES[damage]
    world = WORLDS["numbers"]
    with (
        pytest.raises(InputError, match=word) as caught,
        engine.open(replace(world, rows=change(world.rows)), tmp_path),
    ):
        pass
    assert "\n" not in str(caught.value)
    assert "Traceback" not in str(caught.value)
    assert not list(tmp_path.glob("privrep-*"))


AUDIENCES: dict[str, Any] = {
    "a plan of a sample": Poisson(0.5),
    "a plan of a batch": Fixed(4, USERS),
    "a batch for a step by size": FixedSample(4, b"key"),
    "nobody": None,
}


@pytest.mark.parametrize("among", AUDIENCES)
def test_an_audience_that_cannot_be_asked_is_refused(engine: Engine, among: str, tmp_path: Path) -> None:
    question = questions("numbers")["column sizes"]
    with engine.open(WORLDS["numbers"], tmp_path) as users:
        with pytest.raises(InputError) as caught:
            totals(users, question, AUDIENCES[among])
        assert "\n" not in str(caught.value)


def test_a_step_of_a_whole_batch_wants_bounds_of_one(engine: Engine, tmp_path: Path) -> None:
    step, bounds = questions("numbers")["column sizes"]
    wrong = {key: Bound(1.0, bound.size, terms_per_user=1) for key, bound in bounds.items()}
    with engine.open(WORLDS["numbers"], tmp_path) as users:
        with pytest.raises(InputError) as caught:
            users.sums(step, wrong)
        assert "\n" not in str(caught.value)


@pytest.mark.parametrize("name", [name for name in WORLDS if name != "sparse"])
def test_sums_do_not_depend_on_the_order_of_users_nor_on_how_they_are_cut(name: str) -> None:
    order = np.random.default_rng(6).permutation(USERS).tolist()
    for asked, question in questions(name).items():
        wanted = expected(name, asked)
        for parts in ([order], [order[:5], order[5:6], order[6:]], [[user] for user in order]):
            assert add_up(table_of(name), parts, question) == wanted, asked


def test_a_wrong_engine_is_noticed() -> None:
    """It loses a user, or asks one twice: the sums of every step tell."""
    for asked, question in questions("numbers").items():
        for users in (range(USERS - 1), [*range(USERS), USERS - 1]):
            assert add_up(table_of("numbers"), [list(users)], question) != expected("numbers", asked), asked
