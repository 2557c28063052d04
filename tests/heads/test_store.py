"""Heads in a folder: they come back as they were, for their owner alone, whole or not at all."""

from __future__ import annotations

import os
import stat
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from privrep.errors import InputError
from privrep.heads.fitting import Heads
from privrep.heads.store import FILE, HeadSizes, has_heads, ids_to_arrow, read_heads, read_own_heads, write_heads

SIZES = HeadSizes(shared=3, own=5, classes=2)


def heads_of_tables(users: int = 4, targets: int = 2, seed: int = 0) -> Heads:
    rng = np.random.default_rng(seed)
    count = users * targets
    kind = rng.integers(0, 3, count).astype(np.int8)
    own = kind == 1
    place = np.where(own, np.cumsum(own) - 1, -1)
    numbers = rng.normal(size=count), rng.normal(size=(count, 2)), place, rng.normal(size=(int(own.sum()), 5))
    return Heads(np.array([f"user {i}" for i in range(users)], dtype=object), kind, *numbers, targets)


def heads_of_networks(users: int = 6, seed: int = 0) -> Any:
    pytest.importorskip("torch")
    from privrep.heads.neural import OwnHeads

    rng = np.random.default_rng(seed)
    alone = rng.random(users) < 0.5
    position = np.where(alone, np.cumsum(alone), np.cumsum(~alone)) - 1
    prior = rng.normal(size=(users, SIZES.classes)).astype(np.float32)
    shared = rng.normal(size=(int((~alone).sum()), SIZES.shared, SIZES.classes)).astype(np.float32)
    own = rng.normal(size=(int(alone.sum()), SIZES.own, SIZES.classes)).astype(np.float32)
    scale = np.where(alone, 0, rng.random(users)).astype(np.float32)
    return OwnHeads(np.arange(users) * 7, alone, scale, prior, position, shared, own)


MAKERS: dict[str, Any] = {"tables": heads_of_tables, "networks": heads_of_networks}


def read(name: str, folder: Path) -> Any:
    return read_heads(folder) if name == "tables" else read_own_heads(folder, SIZES)


def same(one: Any, other: Any) -> bool:
    return all(np.array_equal(value, vars(other)[name]) for name, value in vars(one).items())


@pytest.mark.parametrize("name", MAKERS)
def test_heads_come_back_as_they_were(name: str, tmp_path: Path) -> None:
    for seed in range(5):
        heads = MAKERS[name](seed=seed)
        assert has_heads(tmp_path) == (seed > 0)
        write_heads(heads, tmp_path)
        assert same(read(name, tmp_path), heads)
    assert os.listdir(tmp_path / "private") == ["heads.parquet"]


@pytest.mark.parametrize("name", MAKERS)
def test_they_are_for_their_owner_alone_whatever_the_umask(name: str, tmp_path: Path) -> None:
    before = os.umask(0)
    try:
        write_heads(MAKERS[name](), tmp_path)
    finally:
        os.umask(before)
    assert stat.S_IMODE((tmp_path / FILE).stat().st_mode) == 0o600
    assert stat.S_IMODE((tmp_path / "private").stat().st_mode) == 0o700


@pytest.mark.parametrize("name", MAKERS)
def test_the_old_heads_stay_until_the_new_ones_stand(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    old, new = MAKERS[name](), MAKERS[name](seed=1)
    write_heads(old, tmp_path)

    def full(*_: object) -> None:
        raise OSError("the disk is full")

    with monkeypatch.context() as patch:
        patch.setattr(os, "replace", full)
        with pytest.raises(OSError, match="the disk is full"):
            write_heads(new, tmp_path)
    assert same(read(name, tmp_path), old)
    write_heads(new, tmp_path)
    assert same(read(name, tmp_path), new)


def test_heads_of_another_shared_part_are_refused(tmp_path: Path) -> None:
    write_heads(heads_of_networks(), tmp_path)
    for other in ({"own": 4}, {"shared": 4}):
        with pytest.raises(ValueError, match="another shared part"):
            read_own_heads(tmp_path, SIZES._replace(**other))


def test_ids_that_would_not_come_back_are_refused() -> None:
    for ids in (np.array([1, "a"], dtype=object), np.array([(1, 2), (3, 4)], dtype=object), np.array([1.5, None])):
        with pytest.raises(InputError, match="all integers or all strings"):
            ids_to_arrow(ids)


def test_heads_of_some_users_are_replaced_by_others() -> None:
    old, new = heads_of_networks(), heads_of_networks(users=3, seed=2)
    stay = np.array([True, False, True, True, False, True])
    joined = old.replaced(stay, new)
    assert joined.ids.tolist() == [0, 14, 21, 35, 0, 7, 14]
    for place, (heads, user) in enumerate([*((old, i) for i in np.flatnonzero(stay)), *((new, i) for i in range(3))]):
        assert joined.alone[place] == heads.alone[user]
        weights = (joined.own if heads.alone[user] else joined.shared)[joined.position[place]]
        wanted = (heads.own if heads.alone[user] else heads.shared)[heads.position[user]]
        np.testing.assert_array_equal(weights, wanted)
        np.testing.assert_array_equal(joined.prior[place], heads.prior[user])
