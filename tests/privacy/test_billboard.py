"""The public record: pages are whole or absent, never rewritten, and read back exactly."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from privrep.errors import InputError
from privrep.privacy import billboard as module
from privrep.privacy.billboard import Billboard, Choice, Release, Selected


def releases(seed: int = 0) -> dict[str, Release]:
    rng = np.random.default_rng(seed)
    return {
        "step": Release(rng.normal(size=7), 0.1 + 0.2, 1 / 3, 1e-300),
        "sizes": Release(rng.normal(size=3) * 1e300, 5e-324, 2.0**70, 12.5),
    }


def same(a: dict[str, Release], b: dict[str, Release]) -> bool:
    return a.keys() == b.keys() and all(
        np.array_equal(a[k].value, b[k].value)
        and (a[k].sigma, a[k].sensitivity, a[k].noise_multiplier)
        == (b[k].sigma, b[k].sensitivity, b[k].noise_multiplier)
        for k in a
    )


@pytest.mark.parametrize("on_disk", [False, True])
def test_what_was_posted_is_read_back_exactly(tmp_path: Path, on_disk: bool) -> None:
    board = Billboard(tmp_path / "board" if on_disk else None)
    board.post_releases("round-1", releases())
    board.post_derived("model", {"basis": np.eye(3)}, {"error": 0.1, "rank": 3, "note": "ü", "list": [1.5, 2.0]})
    assert len(board) == 2
    assert "round-1" in board
    assert "round-2" not in board
    for read in (board, Billboard(tmp_path / "board")) if on_disk else (board,):
        assert [page.name for page in read] == ["round-1", "model"]
        assert same(read.releases("round-1"), releases())
        assert np.array_equal(read["model"].arrays["basis"], np.eye(3))
        assert read["model"].facts["derived"] == {"error": 0.1, "rank": 3, "note": "ü", "list": [1.5, 2.0]}


def test_a_choice_is_read_back_exactly_and_never_rewritten(tmp_path: Path) -> None:
    board = Billboard(tmp_path)
    chosen = Choice(2**27, 2**28, 0.1 + 0.2, 20 / 3)
    board.post_choice("round-1", chosen)
    board.post_choice("round-2", chosen, simulation=True)
    with pytest.raises(InputError, match="never rewritten"):
        board.post_choice("round-1", Choice(1, 2, 1.0, 1.0))
    for read in (board, Billboard(tmp_path), Billboard.read(tmp_path)):
        assert read.read_choice("round-1") == read.read_choice("round-2") == chosen
        assert "simulation" not in read["round-1"].facts
        assert read["round-2"].facts["simulation"]


@pytest.mark.parametrize("keys", [(), ("é", '"', "\n"), (-(2**63), 0, 2**64 - 1)])
def test_selected_keys_are_read_back_exactly(tmp_path: Path, keys: tuple[int | str, ...]) -> None:
    counts = Release(np.arange(len(keys)) / 3, 0.1 + 0.2, 1 / 3, 12.5)
    board = Billboard(tmp_path)
    board.post_selection("items", Selected(keys, counts, 1 / 7), simulation=True)
    for read in (board, Billboard(tmp_path)):
        selected = read.read_selection("items")
        assert selected.keys == keys
        assert list(map(type, selected.keys)) == list(map(type, keys))
        assert same({"": selected.counts}, {"": counts})
        assert selected.threshold == 1 / 7
        assert read["items"].facts["simulation"]


def test_a_folder_is_resumed_from_in_the_order_of_posting(tmp_path: Path) -> None:
    names = ["scales", "moments", "scout", "b", "a", *(f"round-{i}" for i in range(1, 12))]
    board = Billboard(tmp_path)
    for i, name in enumerate(names):
        board.post_releases(name, releases(i))
    again = Billboard(tmp_path)
    assert [page.name for page in again] == names
    again.post_releases("last", releases(99))
    assert [page.name for page in Billboard(tmp_path)] == [*names, "last"]


def test_a_page_is_never_rewritten(tmp_path: Path) -> None:
    board = Billboard(tmp_path)
    board.post_releases("a", releases(0))
    kept = {file.name: file.read_bytes() for file in tmp_path.iterdir()}
    for again in (board, Billboard(tmp_path)):
        with pytest.raises(InputError, match="'a' already"):
            again.post_releases("a", releases(1))
        page = again.post_derived("a", {"other": np.ones(2)}, {})
        assert "other" not in page.arrays
        assert same(again.releases("a"), releases(0))
    assert {file.name: file.read_bytes() for file in tmp_path.iterdir()} == kept


def test_a_page_appears_whole_and_synced_or_not_at_all(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    events: list[str] = []
    fsync, replace = os.fsync, os.replace

    def recording_fsync(descriptor: int) -> None:
        events.append("sync " + Path(os.readlink(f"/proc/self/fd/{descriptor}")).suffix)
        fsync(descriptor)

    def recording_replace(source: Path, target: Path) -> None:
        assert not Path(target).exists()
        events.append("replace")
        replace(source, target)

    monkeypatch.setattr(os, "fsync", recording_fsync)
    monkeypatch.setattr(os, "replace", recording_replace)
    Billboard(tmp_path).post_releases("a", releases())
    assert events == ["sync .tmp", "replace", "sync "]  # the file, its name, the folder
    assert [file.suffix for file in tmp_path.iterdir()] == [".safetensors"]


@pytest.mark.parametrize("failing", ["save_file", "replace"])
def test_a_post_that_fails_leaves_no_page(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, failing: str) -> None:
    board = Billboard(tmp_path)

    def fail(*_: object, **__: object) -> None:
        raise OSError("no space left on device")

    monkeypatch.setattr(module if failing == "save_file" else os, failing, fail)
    with pytest.raises(OSError, match="no space"):
        board.post_releases("a", releases())
    monkeypatch.undo()
    assert "a" not in board
    assert "a" not in Billboard(tmp_path)
    board.post_releases("a", releases())
    assert same(Billboard(tmp_path).releases("a"), releases())


def test_a_page_left_half_written_is_removed_and_lies_where_nobody_looks(tmp_path: Path, monkeypatch: Any) -> None:
    folder = tmp_path / "billboard"
    Billboard(folder).post_releases("a", releases())

    def killed(*_: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(os, "replace", killed)
    with pytest.raises(KeyboardInterrupt):
        Billboard(folder).post_releases("b", releases(1))
    monkeypatch.undo()
    assert [path.name for path in folder.iterdir()] == ["0000-a.safetensors"]  # the draw is not in what is published
    (left,) = (tmp_path / "private").iterdir()
    assert (tmp_path / "private").stat().st_mode & 0o077 == 0
    board = Billboard(folder)
    assert [page.name for page in board] == ["a"]
    assert not left.exists()
    board.post_releases("b", releases(1))
    assert not list((tmp_path / "private").iterdir())


@pytest.mark.parametrize("content", [b"", b"half a page", b"\xff" * 100])
def test_a_damaged_page_is_refused_by_name(tmp_path: Path, content: bytes) -> None:
    Billboard(tmp_path).post_releases("a", releases())
    (file,) = tmp_path.iterdir()
    file.write_bytes(content)
    with pytest.raises(InputError, match=file.name):
        Billboard(tmp_path)


def test_a_truncated_page_is_refused_by_name(tmp_path: Path) -> None:
    Billboard(tmp_path).post_releases("a", releases())
    (file,) = tmp_path.iterdir()
    file.write_bytes(file.read_bytes()[:-8])
    with pytest.raises(InputError, match=file.name):
        Billboard(tmp_path)


def test_a_copy_has_the_same_pages(tmp_path: Path) -> None:
    board = Billboard()
    board.post_releases("a", releases())
    board.post_derived("model", {"basis": np.eye(2)}, {"error": 0.5})
    board.write(tmp_path / "copy")
    copy = Billboard(tmp_path / "copy")
    assert [page.name for page in copy] == ["a", "model"]
    assert same(copy.releases("a"), releases())


def test_what_is_posted_later_does_not_change_with_the_array_it_was_made_from() -> None:
    board = Billboard()
    basis = np.eye(2)
    board.post_derived("model", {"basis": basis}, {})
    assert board["model"].facts == {"derived": {}}
    with pytest.raises(KeyError):
        board["absent"]
