"""What damage does to model folders, for every kind: one sentence that names folder and part, or nothing at all.

A damaged file is refused, or was not needed: then what is released and predicted stays what it was, to the last bit.
"""

from __future__ import annotations

import json
import shutil
import stat
from collections.abc import Callable
from fnmatch import fnmatch
from pathlib import Path
from typing import Any

import pytest
from folders import KINDS, same

from privrep.errors import InputError
from privrep.heads.store import FILE
from privrep.models.folder import ModelFolder

Folders = dict[str, Path]
every = pytest.mark.parametrize("name", KINDS)

# Every file, damaged in every way


def swap(path: Path, folder: Path) -> bytes:
    """Return another file of the folder, of the same kind if there is one."""
    others = sorted(other for other in folder.rglob("*") if other.is_file() and other.name != path.name)
    return min(others, key=lambda other: other.suffix != path.suffix).read_bytes()


WAYS: dict[str, Callable[[Path, Path], bytes | None]] = {
    "missing": lambda path, folder: None,
    "empty": lambda path, folder: b"",
    "truncated": lambda path, folder: path.read_bytes()[: path.stat().st_size // 2],
    "with more at its end": lambda path, folder: path.read_bytes() + b"no",
    "swapped": swap,
}
FORGIVEN = {
    "missing": {
        "billboard/*": "a page that a run needed to go on, and nobody needs now; the last one is needed",
        FILE: "what anyone may have is a folder without it",
    },
    "swapped": {"billboard/*": "the same"},
    "truncated": {"ledger.jsonl": "its last line is as a killed run leaves it, and lines before it are not counted"},
    "with more at its end": {"ledger.jsonl": "the same: a charge that was never finished"},
}
"""The files that may be damaged in a way, and why the folder is read all the same."""


def harm(path: Path, content: bytes | None) -> None:
    path.unlink()
    if content is not None:
        path.write_bytes(content)


@pytest.mark.parametrize("way", WAYS)
@every
def test_every_file_is_refused_or_not_needed(name: str, way: str, folders: Folders, tmp_path: Path) -> None:
    kind, whole = KINDS[name], folders[name]
    wanted = kind.numbers(kind.load(whole))
    files = sorted(str(path.relative_to(whole)) for path in whole.rglob("*") if path.is_file())
    assert {"model.json", "ledger.jsonl"} <= {*files}
    pages = [file for file in files if file.startswith("billboard")]
    for number, file in enumerate(files):
        broken = tmp_path / str(number)
        shutil.copytree(whole, broken)
        harm(broken / file, WAYS[way](whole / file, whole))
        try:
            model = kind.load(broken)
        except InputError as error:
            message = str(error)
            assert str(broken) in message
            assert "\n" not in message
        else:
            assert any(fnmatch(file, pattern) for pattern in FORGIVEN.get(way, {})), f"{file} {way} is not noticed"
            assert file != pages[-1]
            assert same([kind.released(model)], wanted[:1]), file
            assert file == FILE or same(kind.numbers(model), wanted), file
        shutil.rmtree(broken)


DAMAGE: dict[str, tuple[str, bytes]] = {
    "a list": ("model.json", b"[]"),
    "nothing in it": ("model.json", b"{}"),
    "not text": ("model.json", b"\xff\xfe"),
    "a line": ("ledger.jsonl", b"no\n"),
    "other lines": ("ledger.jsonl", b"{}\n{}\n"),
}


@pytest.mark.parametrize("damage", DAMAGE)
@every
def test_damage_names_folder_and_part(name: str, damage: str, folders: Folders, tmp_path: Path) -> None:
    file, content = DAMAGE[damage]
    shutil.copytree(folders[name], tmp_path / "model")
    harm(tmp_path / "model" / file, content)
    with pytest.raises(InputError) as caught:
        KINDS[name].load(tmp_path / "model")
    message = str(caught.value)
    assert str(tmp_path / "model") in message
    assert file in message or "read it with Centaur.load" in message  # which names the file
    assert "\n" not in message


@every
def test_a_folder_without_its_pages_is_refused(name: str, folders: Folders, tmp_path: Path) -> None:
    shutil.copytree(folders[name], tmp_path / "model")
    shutil.rmtree(tmp_path / "model" / "billboard")
    with pytest.raises(InputError, match=r"is damaged \(billboard"):
        KINDS[name].load(tmp_path / "model")


def test_a_folder_that_may_not_be_read_says_so() -> None:
    with pytest.raises(PermissionError), ModelFolder(Path("model")).damage("ledger.jsonl"):
        raise PermissionError("not yours")


# Formats


@every
def test_a_folder_of_another_kind_or_of_nothing_is_refused(name: str, folders: Folders, tmp_path: Path) -> None:
    with pytest.raises(InputError, match=r"is not a model folder: it has no model\.json\."):
        KINDS[name].load(tmp_path)
    mine = ModelFolder(folders[name]).format
    for other, path in folders.items():
        if ModelFolder(path).format != mine:
            with pytest.raises(InputError, match=r"neural model|can read|\.load") as caught:
                KINDS[name].load(path)
            assert str(path) in str(caught.value), other


@pytest.mark.parametrize("version", ["later", "none", "number"])
@every
def test_a_format_of_another_version_is_refused(name: str, version: str, folders: Folders, tmp_path: Path) -> None:
    shutil.copytree(folders[name], tmp_path / "model")
    path = tmp_path / "model" / "model.json"
    described: dict[str, Any] = json.loads(path.read_text())
    family, _, number = described.pop("format").partition("/")
    assert number.isdigit()
    described |= {"later": {"format": f"{family}/{int(number) + 90}"}, "none": {}, "number": {"format": 1}}[version]
    path.write_text(json.dumps(described))
    with pytest.raises(InputError) as caught:
        KINDS[name].load(tmp_path / "model")
    assert str(tmp_path / "model") in str(caught.value)
    assert "\n" not in str(caught.value)


# What is published, and what is not


@every
def test_a_published_copy_has_all_that_is_released_and_no_head(name: str, folders: Folders, tmp_path: Path) -> None:
    kind, whole = KINDS[name], folders[name]
    shutil.copytree(whole, tmp_path / "copy", ignore=shutil.ignore_patterns("private"))
    if not kind.runs and not kind.saves:
        with pytest.raises(InputError, match="has no head"):  # which is all that it is for
            kind.load(tmp_path / "copy")
        return
    assert same([kind.released(kind.load(tmp_path / "copy"))], [kind.released(kind.load(whole))])


@every
def test_heads_are_for_their_owner_alone(name: str, folders: Folders) -> None:
    private = folders[name] / "private"
    if private.exists():  # pages are written there, too, until they are whole
        assert stat.S_IMODE(private.stat().st_mode) == 0o700
        assert {path.name for path in private.iterdir()} <= {Path(FILE).name}
    assert (folders[name] / FILE).exists() == KINDS[name].heads
    if KINDS[name].heads:
        assert stat.S_IMODE((folders[name] / FILE).stat().st_mode) == 0o600
